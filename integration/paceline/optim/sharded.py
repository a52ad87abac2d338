"""The pipelines' optimizer: named parameters, each with an owner that keeps its fp32 master and moments (ZeRO-1).

Gradients are accumulated in buckets and reduced to the owners, overlapped with the last backward pass of a step; the
norm is taken once per parameter in float64; owners step with an ordinary elementwise optimizer of ``torch.optim``; new
values are broadcast. With ``shard=False`` (ZeRO 0) gradients are reduced to all ranks, each of which steps everything.

Parameters keep their names, and :attr:`ShardedOptimizer.owned` says what this rank holds of which: what collects, sends
and stores state (:mod:`paceline.state.named`) needs no more.

Legend: D data-parallel size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn

from ..config.optimizers import ELEMENTWISE
from ..measure.clock import Clock
from .buckets import Buffers, Domain, lay_out
from .layout import Rows
from .loss_scale import load_scaler_state, scaler_state
from .max_change import Changes, Limits, Outcome, Part, sum_of_squares

logger = logging.getLogger("paceline")

MOST_LEFT_OUT = 50
"""Steps in a row whose gradients, or changes, are not finite, after which training ends."""

LEAST_BUCKET = 1 << 22
"""Elements of a bucket, at least: most buckets are a layer, or several small ones."""


@dataclass
class Owned:
    """Rows of one parameter that this rank steps.

    Args:
        parameter: the model's own, whole.
        start: first row of ``master`` in it.
        master: what the optimizer steps, a leaf of rows ``start`` to ``start + len(master) - 1``; fp32 even where the
            model is not. Where the model is fp32 it shares the model's memory.
    """

    name: str
    parameter: nn.Parameter
    start: int
    master: nn.Parameter

    @property
    def stop(self) -> int:
        """One past its last row; a parameter without dimensions is one row."""
        return self.start + (len(self.master) if self.master.dim() else 1)


class ShardedOptimizer(ZeROOptimizer):
    """Wraps ``basic``, an optimizer over the model's parameters, whose groups it makes groups of masters.

    Args:
        basic: any optimizer of ``torch.optim`` over parameters of one device. Where it is not elementwise, every
            parameter has one owner.
        names: of the parameters.
        group: the D ranks that hold the same parameters; None for one.
        model_group: the ranks that together hold one model, over which the norm is summed; None for one.
        shard: ZeRO 1; otherwise ZeRO 0.
        divisor: what the sum of the ranks' gradients is divided by.
        max_norm: gradients are scaled to this norm at most; 0 for no clipping.
        loss_scaler: of DeepSpeed, for fp16.
        counts: whether a parameter counts in the norm here, or on another rank.
        apart: whether a parameter's gradient is complete only after the last backward (a tied weight).
        domain: the ranks of ``group`` that hold a parameter where not all do (experts on different ranks), or own it
            where not all may (stages of several directions); None for all. They are all the ranks of ``group`` that
            share the other parameters of this domain.
        accumulation_dtype: of gradients; None for that of the masters.
        communication_dtype: of gradients while they are reduced; None for that in which they are accumulated.
        bucket_numel: a bucket is closed when it has so many elements.
        overlap: reduce a bucket when the last backward has finished it, not after the backward.
        device: of the parameters, for a rank that trains none; None for the CPU.
        max_change: how far layers may move in a step, each layer whole, wherever its rows are. Masters are held twice
            during the step. A step whose change is not finite is taken back; moments keep what it gave them.

    Raises:
        ValueError: parameters of these dtypes cannot be trained together; or a max change beside the computation.
    """

    is_asynchronous = False
    """Whether masters are stepped while the model computes: they then share no memory with it, in any case."""

    def __init__(
        self,
        basic: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        *,
        group: Any = None,
        model_group: Any = None,
        shard: bool = True,
        divisor: float = 1.0,
        max_norm: float = 0.0,
        loss_scaler: Any = None,
        counts: Callable[[nn.Parameter], bool] = lambda parameter: True,
        apart: Callable[[nn.Parameter], bool] = lambda parameter: False,
        domain: Callable[[nn.Parameter], Domain | None] = lambda parameter: None,
        accumulation_dtype: torch.dtype | None = None,
        communication_dtype: torch.dtype | None = None,
        bucket_numel: int = 500_000_000,
        overlap: bool = True,
        max_change: Limits | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        if max_change is not None and self.is_asynchronous:
            raise ValueError(
                f"{max_change}: a pipeline that steps beside its computation limits no changes; choose a schedule with "
                "a flush, or leave max_change out."
            )
        self.optimizer = basic
        self.loss_scaler = loss_scaler
        self.dynamic_loss_scale = bool(loss_scaler is not None and loss_scaler.dynamic)
        self.custom_loss_scaler, self.external_loss_scale, self.torch_autocast_gradscaler = False, None, None
        self.overflow = False
        self._num_left_out = 0
        self._global_grad_norm: float | None = None
        self.clock: Clock | None = None
        """Told what is computed and what is waited for."""
        self.max_change = None if max_change is None or max_change.is_none else max_change
        self.max_change_report: dict[str, float] | None = None
        """Of the last step, if changes have limits and its gradients were finite: the ``norm`` of all changes as they
        were made, and ``num_limited``, the layers that would have gone farther than their own limit."""
        self._layers: list[str] = []
        self.clip_grad, self.divisor, self.overlap = max_norm, divisor, overlap
        self._model_group = model_group
        self._domain, self._domain_of = Domain.of(group), domain
        self._shard = shard and self._domain.size > 1
        self._communication_dtype = communication_dtype

        self._bucket_numel, self._accumulation_dtype = bucket_numel, accumulation_dtype
        self._hooks: list[Any] = []
        self._kept: dict[tuple[str, int, int], nn.Parameter] = {}
        self._final = False
        self._fired: set[int] = set()
        self._lay_out(names, counts, apart)

    def _lay_out(
        self,
        names: Mapping[nn.Parameter, str],
        counts: Callable[[nn.Parameter], bool],
        apart: Callable[[nn.Parameter], bool],
    ) -> None:
        """Buckets and owners for the parameters in the groups of the basic optimizer."""
        groups = self.optimizer.param_groups
        for group in groups:
            group.pop("param_names", None)  # torch's, of parameters as they were given; ours have names of their own
        trained = {p for g in groups for p in g["params"]}
        self.parameters: list[nn.Parameter] = [p for p in names if p in trained]  # ranks' groups may differ in order
        self.group_of = {names[p]: number for number, g in enumerate(groups) for p in g["params"]}
        """Number of the group that a parameter is in, by name."""
        self.names = [names[p] for p in self.parameters]
        self._counts = [counts(p) for p in self.parameters]
        self._index_of = index_of = {p: i for i, p in enumerate(self.parameters)}
        # Buckets follow the model's order, in which backward runs, not that of the optimizer's groups.
        order = [index_of[p] for p in names if p in index_of]
        waiting = {i for i in order if apart(self.parameters[i])}
        self._buckets = lay_out(
            order,
            [tuple(p.shape) for p in self.parameters],
            [self._domain_of(p) or self._domain for p in self.parameters],
            [_layer_of(name) for name in self.names],
            waiting=waiting,
            bucket_numel=self._bucket_numel,
            least_numel=LEAST_BUCKET,
            cut=type(self.optimizer).__name__ in ELEMENTWISE,
            shard=self._shard,
        )
        self._dtype = self._dtype_for({p.dtype for p in self.parameters})
        self._touched = [False] * len(self.parameters)
        self._has_stepped = False
        self._next = 0  # bucket that is reduced next: the same order on all ranks
        self._buffers: list[Buffers] = []
        self._views: list[Tensor] = []
        has_other_dtype = any(p.dtype != self._dtype for p in self.parameters)
        if self.parameters and (self.is_asynchronous or self._domain.size > 1 or has_other_dtype):
            self._make_buffers()
        self.owned: list[Owned] = []
        self._adopt()

    def _dtype_for(self, dtypes: set[torch.dtype]) -> torch.dtype:
        masters = {_master_dtype(dtype) for dtype in dtypes} or {torch.float32}
        if len(masters) > 1 and self._accumulation_dtype is None:
            raise ValueError(f"parameters of {sorted(map(str, masters))} cannot be trained together: cast the model.")
        if self._shard and len(dtypes) > 1:
            raise ValueError(
                f"parameters of {sorted(map(str, dtypes))} cannot be sharded together: cast the model, or use ZeRO 0."
            )
        return self._accumulation_dtype or masters.pop()

    def check_dtypes(self, dtypes: set[torch.dtype]) -> None:
        """Raise ValueError if parameters of these dtypes cannot be trained together."""
        self._dtype_for(dtypes)

    def rebuild(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        names: Mapping[nn.Parameter, str],
        *,
        counts: Callable[[nn.Parameter], bool] = lambda parameter: True,
        apart: Callable[[nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        """Train other parameters from now on, between steps: those of a stage that has gained and lost layers.

        Masters of rows that stay are kept, others are made from the parameters' values; states are gone: who wants to
        keep them holds their tensors beforehand (:attr:`owned`, :attr:`state`) and puts them into place afterwards.

        Args:
            groups: the parameters of each group of the basic optimizer, whose options stay. The others as at first.
        """
        self._take_hooks_off()
        self._buffers.clear()
        self._views.clear()
        # Where the model is fp32 they share its memory, which is another from now on.
        has_own = (owned for owned in self.owned if self._has_own_master(owned))
        self._kept = {(owned.name, owned.start, owned.stop): owned.master for owned in has_own}
        self.owned.clear()
        self.optimizer.state.clear()
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = list(parameters)
        self._lay_out(names, counts, apart)
        self._kept.clear()

    def _take_hooks_off(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self.parameters:
            parameter.grad = None

    # -- what belongs to whom ------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different rows of a parameter (ZeRO 1, more than one rank)."""
        return self._shard

    def group_over(self, name: str) -> Any:
        """The ranks over which a parameter's rows are spread; None if this rank has all of them."""
        return next(
            part.domain.group if part.shard else None
            for part in self._buckets
            if any(self.names[index] == name for index in part.bucket.parameters)
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def device(self) -> torch.device:
        """That sums over ranks are taken on."""
        return self.parameters[0].device if self.parameters else self._device or torch.device("cpu")

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale

    @property
    def cur_scale(self) -> float:
        """The loss scale, as DeepSpeed's monitor asks for it."""
        return self.loss_scale

    def num_bytes(self) -> int:
        """What this rank holds beside the parameters' values: masters of their own, states, gradients."""
        states = sum(
            value.numel() * value.element_size()
            for state in list(self.state.values())  # a step in a thread may add to it meanwhile
            for value in list(state.values())
            if torch.is_tensor(value)
        )
        masters = sum(
            owned.master.numel() * owned.master.element_size() for owned in self.owned if self._has_own_master(owned)
        )
        return states + masters + self.gradient_bytes()

    def _has_own_master(self, owned: Owned) -> bool:
        return self.is_asynchronous or owned.master.dtype != owned.parameter.dtype

    def gradient_bytes(self) -> int:
        """What gradients take on this rank."""
        if self._buffers:
            return sum(b.gradients.numel() * b.gradients.element_size() for b in self._buffers)
        return sum(p.numel() * p.element_size() for p in self.parameters)

    def shares(self) -> Iterator[tuple[int, int, int]]:
        """``(position in owned, first row, end)`` of what this rank answers for.

        Disjoint over the ranks that hold a parameter, and complete. Rows count from the parameter's own first row. With
        ZeRO 1 it is all that the rank has; with ZeRO 0 every rank has everything and answers for a part.
        """
        position = {(owned.name, owned.start): place for place, owned in enumerate(self.owned)}
        for part in self._buckets:
            for rows in part.own:
                yield position[self.names[rows.index], rows.start if part.shard else 0], rows.start, rows.stop

    def name_of(self, parameter: nn.Parameter) -> str:
        return self.names[self._index_of[parameter]]

    def check_settled(self) -> None:
        """Raise RuntimeError while updates are under way, which here they never are between steps."""

    def trains(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has this parameter of the model."""
        return parameter in self._index_of

    def owners(self, name: str) -> list[tuple[int, int, int]]:
        """``(rank in its group, first row, end)`` of each part of the parameter; in rank order."""
        return [
            (owner, rows.start, rows.stop)
            for part in self._buckets
            for owner, owned in enumerate(part.bucket.parts)
            for rows in owned
            if self.names[rows.index] == name
        ]

    def _make_buffers(self) -> None:
        device = self.parameters[0].device
        self._views = [torch.empty(0)] * len(self.parameters)
        for part in self._buckets:
            holds_values = part.shard or self.is_asynchronous
            buffers = Buffers(part, self._dtype, self.parameters[0].dtype, device, holds_values=holds_values)
            for index, offset in zip(part.bucket.parameters, part.bucket.offsets, strict=True):
                parameter = self.parameters[index]
                self._views[index] = buffers.adopt(offset, parameter)
                hook = parameter.register_post_accumulate_grad_hook(partial(self._collect, index, buffers))
                self._hooks.append(hook)
            self._buffers.append(buffers)

    @torch.no_grad()
    def _adopt(self) -> None:
        """Replace the parameters in the optimizer's groups by the masters that this rank steps."""
        # Of a parameter that is not sharded every rank steps the whole.
        mine: dict[int, list[Rows | None]] = {}
        for part in self._buckets:
            for index in part.bucket.parameters:
                mine[index] = [] if part.shard else [None]
            for own in part.own if part.shard else ():
                mine[own.index].append(own)
        for group in self.optimizer.param_groups:
            first = len(self.owned)
            for parameter in group["params"]:
                index = self._index_of[parameter]
                state = self.optimizer.state.pop(parameter, {})  # some optimizers make it at once
                for rows in mine[index]:
                    if rows is None:
                        self._own(index, 0, parameter, state)
                    else:
                        piece = _rows_of(parameter.detach(), rows.start, rows.stop)
                        self._own(index, rows.start, piece, _state_of_rows(state, parameter, rows))
            group["params"] = [owned.master for owned in self.owned[first:]]
        self._index = [self._index_of[owned.parameter] for owned in self.owned]

    def _own(self, index: int, start: int, values: Tensor, state: dict[str, Any]) -> None:
        name, stop = self.names[index], start + (len(values) if values.dim() else 1)
        master = self._kept.pop((name, start, stop), None)
        if master is None:
            master = _master(values, copy=self.is_asynchronous)
        self.owned.append(Owned(name, self.parameters[index], start, master))
        if state:
            self.optimizer.state[master] = state

    # -- gradients -----------------------------------------------------------------------------------------------

    @contextmanager
    def final_backward(self, is_final: bool = True) -> Iterator[None]:
        """Around the last backward pass of a step: buckets are reduced as they are finished."""
        self._fired.clear()
        # In the first step it is yet to be seen whose gradients come in several parts.
        self._final = is_final and self.overlap and self._domain.size > 1 and self._has_stepped
        try:
            yield
        finally:
            self._final = False

    @torch.no_grad()
    def _collect(self, index: int, buffers: Buffers, parameter: nn.Parameter) -> None:
        """Called by autograd when a parameter's gradient of one micro-batch is there."""
        view, gradient = self._views[index], parameter.grad
        assert gradient is not None
        assert not buffers.is_reduced, f"{self.names[index]}: a gradient after the reduction"
        if index in self._fired:  # twice in one backward, as where a layer checkpoints itself: none is known to be last
            buffers.waits = True
        self._fired.add(index)
        if gradient.data_ptr() != view.data_ptr() or gradient.dtype != view.dtype:
            if self._touched[index]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
            # From now on autograd adds into the bucket itself, where it can.
            parameter.grad = view if view.dtype == parameter.dtype else None
        self._touched[index] = True
        if self._final:
            buffers.unfinished -= 1
            while self._next < len(self._buffers) and self._buffers[self._next].is_finished:
                self._reduce(self._buffers[self._next])

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The accumulated gradient of a parameter that is here; zeros where no backward reached it."""
        index = self._index_of[parameter]
        if not self._views:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return parameter.grad
        if not self._touched[index]:
            self._views[index].zero_()
            self._touched[index] = True
        return self._views[index]

    def reduce_gradients(self, **kwargs: Any) -> None:
        """Begin the reduction of what the last backward has not begun. Collective over the group, as is ``step``."""
        if self._domain.size > 1:
            while self._next < len(self._buffers):
                self._reduce(self._buffers[self._next])

    def _reduce(self, buffers: Buffers) -> None:
        self._next += 1
        for earlier in self._buffers[: self._next]:  # what was sent in another dtype is a copy: do not keep it long
            if earlier.works and all(reduction.work.is_completed() for reduction in earlier.works):
                earlier.finish_reduction()
        for index in buffers.part.bucket.parameters:
            if not self._touched[index]:
                self._views[index].zero_()
        buffers.start_reduction(self._communication_dtype)

    def _finish_reduction(self) -> None:
        reduced = [reduction.gradients for buffers in self._buffers for reduction in buffers.works]
        num_bytes = sum(gradients.numel() * gradients.element_size() for gradients in reduced)
        with self._transfer("gradients", num_bytes):
            self.reduce_gradients()
            for buffers in self._buffers:
                buffers.finish_reduction()

    def _transfer(self, kind: str, num_bytes: int) -> AbstractContextManager[None]:
        if self.clock is None or (self._domain.size == 1 and kind != "norm"):
            return nullcontext()
        return self.clock.transfer(kind, num_bytes)

    def _compute(self) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.compute()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; the buckets' memory stays."""
        for parameter in self.parameters:
            parameter.grad = None
        for owned in self.owned:
            owned.master.grad = None
        self._touched = [False] * len(self.parameters)
        self._next = 0
        for buffers in self._buffers:
            buffers.reset()

    # -- the step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Reduce, clip, step, and give the new values to all. A step with a gradient that is not finite is left out.

        So is one whose change is not, where changes have limits. Its gradients were: the loss scale goes on.

        A parameter that no micro-batch of the step has reached, on any rank, is left alone, as in ``torch.optim``.
        """
        self._finish_reduction()
        self._has_stepped = True
        gradients: Sequence[Tensor | None] = self._views or [p.grad for p in self.parameters]
        touched = self._touched if self._views else [gradient is not None for gradient in gradients]
        squares, touched = self._survey(gradients, touched)
        scale, num_left_out = self.loss_scale * self.divisor, self._num_left_out
        self._note(squares, scale)
        self.max_change_report = None
        if self.overflow:
            self.zero_grad()
            self._left_out()
            return
        changes = self._begin_changes()
        with self._compute():
            self._hand_over(gradients, touched, squares, scale)
            self.optimizer.step()
        if changes is not None and not self._limit(changes).is_finite:
            self.overflow, self._num_left_out = True, num_left_out + 1
            self.zero_grad()
            self._left_out("change")
            return
        self.publish()

    def _begin_changes(self) -> Changes | None:
        """What is about to change, if that has limits."""
        if self.max_change is None:
            return None
        if not self._layers:
            self._layers = self._layers_of_all()
        counted = {
            position: slice(start - self.owned[position].start, stop - self.owned[position].start)
            for position, start, stop in self.shares()
            if self._counts[self._index[position]]
        }
        with self._compute():
            return Changes(
                self.max_change,
                self._layers,
                [
                    Part(Limits.layer_of(owned.name), owned.master, counted.get(position))
                    for position, owned in enumerate(self.owned)
                ],
            )

    def _layers_of_all(self) -> list[str]:
        """Of the whole model, in an order that all ranks agree on; layers may go to other stages later."""
        own = sorted({Limits.layer_of(name) for name in self.names})
        if self._model_group is None or dist.get_world_size(self._model_group) == 1:
            return own
        found: list[Any] = [None] * dist.get_world_size(self._model_group)
        dist.all_gather_object(found, own, group=self._model_group)
        return sorted({layer for layers in found for layer in layers})

    def _limit(self, changes: Changes) -> Outcome:
        """Every rank knows every layer's norm: those of a weight on two stages do the same, to the bit."""
        with self._compute():
            squares = changes.squares(self.device)
        self._sum_over_ranks(squares, squares)
        with self._compute():
            outcome = changes.limit(squares)
        self.max_change_report = outcome.report
        return outcome

    def _sum_over_ranks(self, report: Tensor, of_model: Tensor) -> None:
        """``report`` over the ranks with the same parameters, and then ``of_model``, a part of it, over the model."""
        with self._transfer("norm", report.numel() * report.element_size()):
            if self._domain.size > 1:
                dist.all_reduce(report, group=self._domain.group)
            if self._model_group is not None and dist.get_world_size(self._model_group) > 1:
                dist.all_reduce(of_model, group=self._model_group)

    def _note(self, squares: float, scale: float) -> None:
        """What is to be known of a step whose gradients, multiplied by ``scale``, have this sum of squares."""
        self._global_grad_norm = _norm(squares, scale)
        self.overflow = not math.isfinite(squares)
        self._num_left_out = self._num_left_out + 1 if self.overflow else 0
        if self.loss_scaler is not None:
            self.loss_scaler.update_scale(self.overflow)

    def _hand_over(
        self, gradients: Sequence[Tensor | None], touched: Sequence[bool], squares: float, scale: float
    ) -> None:
        """Give the masters their rows of ``gradients``, without the scale and clipped."""
        factor = 1.0 / scale
        if self.clip_grad > 0:
            factor *= min(1.0, self.clip_grad / (_norm(squares, scale) + 1e-6))
        given = []
        for owned, index in zip(self.owned, self._index, strict=True):
            gradient = gradients[index]
            if not touched[index]:
                owned.master.grad = None
                continue
            assert gradient is not None, owned.name
            owned.master.grad = _rows_of(gradient, owned.start, owned.stop).to(owned.master.dtype)
            given.append(owned.master.grad)
        if factor != 1.0 and given:
            torch._foreach_mul_(given, factor)

    def _left_out(self, what: str = "gradient") -> None:
        """All ranks know of it: the norm is that of all."""
        if what == "gradient" and self.loss_scaler is not None and self.loss_scaler.dynamic:
            return  # an overflow is how the scale finds its height
        told = f"a {what} is not finite: the step is left out"
        if self._num_left_out >= MOST_LEFT_OUT:
            raise FloatingPointError(
                f"{told}, for the {self._num_left_out}th time in a row; lower the learning rate, clip gradients, or go "
                "on from an earlier checkpoint."
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning("%s (%d in a row)", told, self._num_left_out)

    def _survey(self, gradients: Sequence[Tensor | None], touched: Sequence[bool]) -> tuple[float, list[bool]]:
        """Sum of squares of all gradients, each once, and which parameters any rank's backward has reached.

        The one place of a step where the host waits for the device; where changes have limits, it does so for them too.
        """
        own, size = [], self._domain.size
        for rows in (rows for part in self._buckets for rows in part.own):
            gradient = gradients[rows.index]
            if self._counts[rows.index] and gradient is not None and (size > 1 or touched[rows.index]):
                own.append(_rows_of(gradient, rows.start, rows.stop) if size > 1 else gradient)
        device = self.device
        report = torch.zeros(1 + len(touched), dtype=torch.float64)
        report[1:] = torch.tensor(touched, dtype=torch.float64)
        if device.type != "cpu":
            report = report.to(device, non_blocking=True)
        with self._compute():
            report[0] = sum_of_squares(own, device)
        self._sum_over_ranks(report, report[:1])
        squares, *reached = report.tolist()
        return squares, [count > 0 for count in reached]

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the masters' values into the model, on all ranks. Collective over the group."""
        for owned in self.owned:
            place = _rows_of(owned.parameter.detach(), owned.start, owned.stop)
            if place.data_ptr() != owned.master.data_ptr():
                place.copy_(owned.master)
        if not self._shard:
            return
        sharded = [(b, b.values) for b in self._buffers if b.part.shard and b.values is not None]
        num_bytes = sum(values.numel() * values.element_size() for _, values in sharded)
        with self._transfer("values", num_bytes):
            works = [work for buffers, _ in sharded for work in buffers.start_publishing()]
            for work in works:
                work.wait()

    # -- for DeepSpeed's engine ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of this rank's part; checkpoints are written by name instead (:mod:`paceline.state.named`)."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": [owned.master.detach() for owned in self.owned],
            "loss_scale": scaler_state(self.loss_scaler),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], **kwargs: Any) -> None:
        """Put :meth:`state_dict` of the same rank in the same shape back. Collective over the group."""
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        for owned, master in zip(self.owned, state["masters"], strict=True):
            owned.master.copy_(master)
        load_scaler_state(self.loss_scaler, state["loss_scale"])
        self.publish()

    def destroy(self) -> None:
        """Take the hooks off, and give every parameter memory of its own again."""
        self._take_hooks_off()
        for parameter in self.parameters:
            if self._shard or self.is_asynchronous:
                parameter.data = parameter.detach().clone()
        self._buffers.clear()
        self._views.clear()
        self.owned.clear()
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []  # masters may be views of the buckets


def _state_of_rows(state: dict[str, Any], parameter: nn.Parameter, rows: Rows) -> dict[str, Any]:
    def part(value: Any) -> Any:
        is_cut = torch.is_tensor(value) and value.dim() > 0 and value.shape == parameter.shape
        return value[rows.start : rows.stop].clone() if is_cut else value

    return {key: part(value) for key, value in state.items()}


def _master_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _norm(squares: float, scale: float) -> float:
    return math.sqrt(squares) / scale if squares >= 0 else math.nan


def _master(values: Tensor, copy: bool) -> nn.Parameter:
    """A leaf to be stepped: the memory of ``values`` itself if that is exact enough, else, or with ``copy``, a copy."""
    if not copy and values.dtype == _master_dtype(values.dtype):
        return values if isinstance(values, nn.Parameter) else nn.Parameter(values)
    return nn.Parameter(values.detach().to(_master_dtype(values.dtype), copy=True))


def _layer_of(name: str) -> str:
    """What the names of a layer's parameters begin with: ``"model.layers.3"``; of others, the module's name."""
    words = name.split(".")
    number = next((index for index, word in enumerate(words) if word.isdigit()), len(words) - 2)
    return ".".join(words[: number + 1])


def _rows_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop] if tensor.dim() else tensor
