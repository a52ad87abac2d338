"""Seconds and bytes of every item of a pipeline stage, from what a run computes anyway; taken off without trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .recorder import SavedBytes
from .recurring import recurring_mean

OUTPUT, INPUT, END = "output", "input", "end"
"""What of a layer has its gradient complete, or the end of the backward."""
HIDDEN_STATES = "hidden_states"
"""Hugging Face's name of what goes from layer to layer."""


class ItemTimes(NamedTuple):
    """One item and one micro-batch."""

    forward_s: float
    backward_s: float
    """With what is computed again, where activations are checkpointed."""
    saved_bytes: float
    """What stays alive from its forward to its backward."""
    output_bytes: float
    """All tensors that the next item takes; none after the head."""


@dataclass
class _Forward:
    begun: Any
    saved: _Saved | None
    """Counts the bytes of this forward, whose times are too long for that."""
    spans: list[tuple[int, Any, Any]] = field(default_factory=list)
    ended: Any = None
    calls: Counter[nn.Module] = field(default_factory=Counter)
    running: tuple[int, Tensor | None, Any, Any] | None = None
    """Item, its input, what that comes from, and when it began."""


class _Backward(NamedTuple):
    begun: Any
    marks: list[tuple[int, str, Any]]
    ended: Any = None


class LayerTimer:
    """Forward and backward seconds, saved bytes and output bytes of the items of a stage.

    The forward of a layer is what lies between its module's hooks. Its backward begins when the gradient of its output
    is complete and ends when that of its input is; where the input needs none, with the backward of the micro-batch.
    The head's backward is what comes before the last layer's, the embedding's what comes after the first one's.

    With reentrant checkpointing (DeepSpeed's own) the forward leaves no tensors to watch: what such layers, and a head
    or embedding beside them, take of a backward is then divided among them in proportion to their forward seconds.

    The first forward tells the bytes. Counting takes time, so its seconds are left out if there are others. On a GPU
    bytes are what is allocated, so the run should be past its first step. A storage counts once, with the first item
    that keeps it; what is kept between two layers counts with the later one.

    Args:
        layers: item number -> module, in the order in which they run. A module under several numbers runs as the
            first of them when it is first called, then as the next. Or item number -> the modules of which it consists:
            its time is from the first that runs to the last, and it puts out as many bytes as it takes.
        stage: the module that holds all that runs: its parameters are not counted as kept.
        before: item of what runs before the first layer (an embedding); None: that is nobody's.
        after: item of what runs after the last layer (norm, head and loss); None: that is nobody's.
        again: item -> the one before it, of the same checkpoint: the later one's backward computes both anew.
        now: this moment on the device (:meth:`paceline.measure.clock.Clock.now`).
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module | Sequence[nn.Module]],
        device: torch.device,
        *,
        stage: nn.Module,
        before: int | None = None,
        after: int | None = None,
        again: Mapping[int, int] | None = None,
        now: Callable[[], Any],
    ) -> None:
        self._items: dict[nn.Module, list[int]] = {}
        self._parted: set[int] = set()  # items that consist of several modules
        for item, modules in layers.items():
            if not isinstance(modules, nn.Module):
                self._parted.add(item)
            for module in (modules,) if isinstance(modules, nn.Module) else modules:
                self._items.setdefault(module, []).append(item)
        self._stage, self._device = stage, device
        self._before, self._after, self._now = before, after, now
        self._again = dict(again or {})
        self._handles: list[Any] = []
        self._forwards: list[_Forward] = []
        self._backwards: list[_Backward] = []
        self._forward: _Forward | None = None
        self._backward: _Backward | None = None
        self._saved_bytes: Counter[int] = Counter()
        self._output_bytes: Counter[int] = Counter()
        self._unseen: set[int] = set()  # layers whose tensors are not there in the forward
        self._watches = False  # those of other layers

    def install(self) -> None:
        """Put hooks on the layers."""
        assert not self._handles, "installed twice"
        for module in self._items:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))

    def remove(self) -> None:
        """Take all hooks off again, also those on tensors of micro-batches whose backward is still to come."""
        self._stop_counting()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forward = self._backward = None

    def begin(self, kind: str) -> None:
        """A micro-batch's forward (``"F"``) or backward (``"B"``) begins. Evaluations do not count."""
        assert kind in ("F", "B"), kind
        if not self._handles:
            return
        if kind == "B":
            self._backward = _Backward(self._now(), [])
        elif torch.is_grad_enabled():
            saved = None if self._forwards else _Saved(self._stage, self._device)
            if saved is not None:
                saved.__enter__()
            self._forward = _Forward(self._now(), saved)

    def end(self, kind: str) -> None:
        """What was begun has ended."""
        now = self._now()
        if kind == "B" and self._backward is not None:
            self._backwards.append(self._backward._replace(ended=now))
            self._backward = None
        elif kind == "F" and self._forward is not None:
            if self._forward.saved is not None and self._after is not None:
                self._saved_bytes[self._after] += self._forward.saved.take()
                self._output_bytes[self._after] = 0
            self._stop_counting()
            self._forward.ended = now
            if self._forward.spans:
                self._forwards.append(self._forward)
            self._forward = None

    def result(self) -> dict[int, ItemTimes]:
        """Means of what repeats over the micro-batches seen, without items that never ran. Waits for the device."""
        forwards = [forward for forward in self._forwards if forward.saved is None] or self._forwards
        forward_s = _means(self._times_of_forward(forward) for forward in forwards)
        backward_s = _means(self._times_of_backward(backward, forward_s) for backward in self._backwards)
        return {
            item: ItemTimes(seconds, backward_s.get(item, 0.0), self._saved_bytes[item], self._output_bytes[item])
            for item, seconds in sorted(forward_s.items())
        }

    # -- while it runs -------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = self._forward
        if forward is None:  # computed again within a backward, or an evaluation
            return
        items = self._items[module]
        item = items[min(forward.calls[module], len(items) - 1)]
        forward.calls[module] += 1
        inputs = args or tuple(kwargs.get(name) for name in sorted(kwargs, key=lambda name: name != HIDDEN_STATES))
        stream = _stream(inputs)
        node = None if stream is None else stream.grad_fn
        if item in self._parted and forward.spans and forward.spans[-1][0] == item:  # it goes on
            forward.running = item, stream, node, forward.spans.pop()[1]
            return
        if not forward.spans and self._before is not None and forward.saved is not None:
            self._saved_bytes[self._before] += forward.saved.take()
            self._output_bytes[self._before] = _num_bytes(inputs[0] if inputs else None)
        if item in self._parted:
            self._output_bytes[item] = _num_bytes(stream)
        self._watch(stream, item, INPUT)
        forward.running = item, stream, node, self._now()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        forward = self._forward
        if forward is None or forward.running is None:
            return
        now = self._now()
        item, stream, node, begun = forward.running
        forward.running = None
        forward.spans.append((item, begun, now))
        out = _stream((output,))
        does_nothing = out is stream and (out is None or out.grad_fn is node)
        is_recomputed = not torch.is_grad_enabled()
        if is_recomputed:
            self._unseen.add(item)
        if not does_nothing:  # else its output's gradient would seem to come after its input's
            self._watch(out, item, OUTPUT)
        if forward.saved is not None:
            is_later = item in self._again or (item in self._parted and self._saved_bytes[item])
            if not does_nothing and not is_later and stream is not None and out is not None:
                forward.saved.keep_unseen(stream, out, is_recomputed)
            self._saved_bytes[item] += forward.saved.take()
            if item not in self._parted:
                self._output_bytes[item] = _num_bytes(output)

    def _watch(self, tensor: Tensor | None, item: int, side: str) -> None:
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            self._handles.append(tensor.register_hook(partial(self._mark, item, side)))
            self._watches = True

    def _mark(self, item: int, side: str, gradient: Tensor) -> None:
        if self._backward is not None:
            self._backward.marks.append((item, side, self._now()))

    def _stop_counting(self) -> None:
        if self._forward is not None and self._forward.saved is not None:
            self._forward.saved.__exit__()

    # -- afterwards ----------------------------------------------------------------------------------------------

    def _times_of_forward(self, forward: _Forward) -> dict[int, float]:
        spent: dict[int, float] = defaultdict(float)
        for item, begun, ended in forward.spans:
            spent[item] += _elapsed(begun, ended)
        if self._before is not None:
            spent[self._before] += _elapsed(forward.begun, forward.spans[0][1])
        if self._after is not None:
            spent[self._after] += _elapsed(forward.spans[-1][2], forward.ended)
        return spent

    def _times_of_backward(self, backward: _Backward, forward_s: Mapping[int, float]) -> dict[int, float]:
        if not self._forwards or (self._watches and not backward.marks):  # of a forward before the timer was there
            return {}
        spans = self._forwards[0].spans
        first, last = spans[0][0], spans[-1][0]
        unmarked = set(self._unseen)
        unmarked |= {self._before} if first in unmarked and self._before is not None else set()
        unmarked |= {self._after} if last in unmarked and self._after is not None else set()
        spent: dict[int, float] = defaultdict(float)
        owner, since = None if last in unmarked else self._after, backward.begun
        for item, side, moment in [*backward.marks, (None, END, backward.ended)]:
            if side == INPUT and owner != item:  # over already: the layer before it has begun with the same tensor
                continue
            if owner is not None:
                spent[owner] += _elapsed(since, moment)
            since = moment
            owner = item if side == OUTPUT else self._before if item == first else None
        rest = _elapsed(backward.begun, backward.ended) - sum(spent.values())
        whole = sum(forward_s.get(item, 0.0) for item in unmarked)
        for item in unmarked if whole > 0 else ():
            spent[item] += rest * forward_s.get(item, 0.0) / whole
        for later, earlier in self._again.items():
            if later not in unmarked:
                anew = min(forward_s.get(earlier, 0.0), spent[later])
                spent[later] -= anew
                spent[earlier] += anew
        return spent


class _Saved(SavedBytes):
    """What was kept since the last look, while the forward goes on."""

    def __init__(self, stage: nn.Module, device: torch.device) -> None:
        super().__init__(stage, device)
        self._known = self._so_far()
        self._num_packed = 0

    def take(self) -> int:
        """Bytes since the last call."""
        before, self._known = self._known, self._so_far()
        self._num_packed = 0
        return max(0, self._known - before)

    def keep_unseen(self, stream: Tensor, out: Tensor, is_recomputed: bool) -> None:
        """Count a layer's input where autograd was not seen to keep anything for its backward: a checkpoint has it."""
        is_kept = stream.requires_grad if is_recomputed else out.requires_grad and not self._num_packed
        if is_kept and self._device is None:
            super()._pack(stream)

    def _so_far(self) -> int:
        return self.num_bytes if self._device is None else torch.cuda.memory_allocated(self._device)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._num_packed += 1
        return super()._pack(tensor)


def _means(found: Iterable[Mapping[int, float]]) -> dict[int, float]:
    values: dict[int, list[float]] = {}
    for times in found:
        for item, seconds in times.items():
            values.setdefault(item, []).append(seconds)
    return {item: recurring_mean(seconds) for item, seconds in values.items()}


def _elapsed(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


def _stream(values: Iterable[Any]) -> Tensor | None:
    """The tensor that the gradient comes through: the first that has one, else the first of floating point."""
    found = [tensor for value in values for tensor in _tensors(value) if tensor.is_floating_point()]
    return next((tensor for tensor in found if tensor.requires_grad), found[0] if found else None)


def _num_bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
