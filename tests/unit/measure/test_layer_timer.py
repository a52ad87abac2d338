"""Times and bytes of layers, on a clock that the layers themselves move on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.measure.layer_timer import ItemTimes, LayerTimer

CPU = torch.device("cpu")
FLOAT = 4
BATCH, WIDTH = 2, 5
STREAM_BYTES = FLOAT * BATCH * WIDTH


class Clock:
    """Seconds that pass when something says that it takes some."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def take(self, seconds: float) -> None:
        self.now_s += seconds


class Takes(torch.autograd.Function):
    """The identity, of a given duration. It keeps its input, so that checkpointing has something to compute again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, take: Any, forward_s: float, backward_s: float) -> Tensor:
        take(forward_s * float(x.detach()[0, 0]))
        ctx.save_for_backward(x)
        ctx.take, ctx.backward_s = take, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.take(ctx.backward_s * float(x[0, 0]))
        return gradient, torch.zeros(()), None, None, None


class Layer(nn.Module):
    """A second is multiplied by the first number of the input, so that micro-batches may differ."""

    def __init__(self, take: Callable[[float], None], forward_s: float, backward_s: float, how: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.how, self._arguments = how, (take, forward_s, backward_s)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.how == "inside":
            return checkpoint(self._compute, hidden_states, use_reentrant=False)
        if self.how == "keyword":
            return checkpoint(self._compute, hidden_states=hidden_states, use_reentrant=False)
        return self._compute(hidden_states)

    def _compute(self, hidden_states: Tensor) -> Tensor:
        take, forward_s, backward_s = self._arguments
        return Takes.apply(hidden_states, self.weight, take, forward_s, backward_s)


def micro_batch(factor: float = 1.0, requires_grad: bool = True) -> Tensor:
    return torch.full((BATCH, WIDTH), factor, requires_grad=requires_grad)


def run_layers(x: Any, layers: Iterable[Any]) -> Any:
    for layer in layers:
        x = layer(x)
    return x


class Stage:
    """Layers under a timer, as an engine runs them."""

    def __init__(
        self, layers: Sequence[Any], *, clock: Clock, run: Callable[[Any, Any], Any] = run_layers, **items: int | None
    ) -> None:
        self.layers, self.run = layers, run
        modules = {item: layer for item, layer in enumerate(layers, start=3) if isinstance(layer, nn.Module)}
        self.timer = LayerTimer(modules, CPU, stage=nn.ModuleList(modules.values()), now=clock.now, **items)
        self.timer.install()

    def forward(self, x: Any) -> Any:
        self.timer.begin("F")
        out = self.run(x, self.layers)
        self.timer.end("F")
        return out

    def backward(self, *outputs: Tensor) -> None:
        self.timer.begin("B")
        for out in outputs:
            out.backward(torch.ones_like(out), retain_graph=out is not outputs[-1])
        self.timer.end("B")

    def seconds(self) -> dict[int, tuple[float, float]]:
        return {item: pytest.approx(times[:2]) for item, times in self.timer.result().items()}


def test_each_layer_has_its_own_seconds() -> None:
    clock = Clock()
    stage = Stage([Layer(clock.take, 1, 3), Layer(clock.take, 5, 7), Layer(clock.take, 2, 1)], clock=clock)
    for _ in range(2):
        stage.backward(stage.forward(micro_batch()))
    assert stage.seconds() == {3: (1, 3), 4: (5, 7), 5: (2, 1)}


def test_embedding_and_head_get_what_comes_before_and_after_the_layers() -> None:
    clock = Clock()
    embedding, *layers, head = (Layer(clock.take, *seconds) for seconds in ((1, 2), (3, 4), (5, 6), (7, 8)))

    def run(x: Tensor, layers: Any) -> Tensor:
        return head(run_layers(embedding(x), layers))

    stage = Stage(layers, clock=clock, run=run, before=2, after=9)
    stage.backward(stage.forward(micro_batch()))
    assert stage.seconds() == {2: (1, 2), 3: (3, 4), 4: (5, 6), 9: (7, 8)}
    assert {item: times.output_bytes for item, times in stage.timer.result().items()} == {
        2: STREAM_BYTES, 3: STREAM_BYTES, 4: STREAM_BYTES, 9: 0,
    }  # fmt: skip
    nobody = Stage(layers, clock=clock, run=run)
    nobody.backward(nobody.forward(micro_batch()))
    assert nobody.seconds() == {3: (3, 4), 4: (5, 6)}


class Halved(nn.Module):
    """A norm and what adds to the hidden states, twice."""

    def __init__(self, take: Callable[[float], None], *, is_recomputed: bool) -> None:
        super().__init__()
        self.is_recomputed = is_recomputed
        seconds = ((1, 2), (4, 8), (16, 32), (64, 128))
        self.norm, self.attention, self.second_norm, self.mlp = (Layer(take, *each) for each in seconds)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.is_recomputed:
            return checkpoint(self._compute, hidden_states, use_reentrant=False)
        return self._compute(hidden_states)

    def _compute(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + 0 * self.attention(self.norm(hidden_states))
        return hidden_states + 0 * self.mlp(self.second_norm(hidden_states))


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_halves_of_a_layer_have_the_times_of_all_their_modules(is_recomputed: bool) -> None:
    clock = Clock()
    embedding, layer = Layer(clock.take, 0.5, 0.25), Halved(clock.take, is_recomputed=is_recomputed)
    halves = {1: (layer.norm, layer.attention), 2: (layer.second_norm, layer.mlp)}
    again = {2: 1} if is_recomputed else {}
    timer = LayerTimer(halves, CPU, stage=layer, before=0, after=3, again=again, now=clock.now)
    timer.install()
    timer.begin("F")
    out = layer(embedding(micro_batch()))
    timer.end("F")
    timer.begin("B")
    out.backward(torch.ones_like(out))
    timer.end("B")
    found = timer.result()
    more = (5, 80) if is_recomputed else (0, 0)
    assert {item: times[:2] for item, times in found.items()} == {
        0: (0.5, 0.25), 1: (5, 10 + more[0]), 2: (80, 160 + more[1]), 3: (0, 0),
    }  # fmt: skip
    assert found[1].output_bytes == found[2].output_bytes == STREAM_BYTES
    if is_recomputed:
        assert (found[1].saved_bytes, found[2].saved_bytes) == (STREAM_BYTES, 0), "the layer's input, once"
    else:
        assert found[1].saved_bytes == found[2].saved_bytes == 2 * STREAM_BYTES


def test_between_layers_is_nobodys() -> None:
    clock = Clock()
    between = Layer(clock.take, 100, 1000).forward  # a function
    stage = Stage([Layer(clock.take, 1, 2), between, Layer(clock.take, 3, 4)], clock=clock)
    stage.backward(stage.forward(micro_batch()))
    assert stage.seconds() == {3: (1, 2), 5: (3, 4)}


def test_a_micro_batch_has_its_own_backward_wherever_it_runs() -> None:
    clock = Clock()
    stage = Stage([Layer(clock.take, 1, 3), Layer(clock.take, 5, 7)], clock=clock)
    first, second = stage.forward(micro_batch(4.0)), stage.forward(micro_batch(2.0))
    stage.backward(first)
    third = stage.forward(micro_batch(6.0))
    stage.backward(second)
    fourth = stage.forward(micro_batch(2.0))
    stage.backward(third)
    stage.backward(fourth)
    # Forwards 2, 6, 2 (in the first one bytes were counted), backwards 4, 2, 6, 2.
    assert stage.seconds() == {3: (10 / 3, 10.5), 4: (50 / 3, 24.5)}


def test_an_evaluation_does_not_count() -> None:
    clock = Clock()
    stage = Stage([Layer(clock.take, 1, 3)], clock=clock)
    with torch.no_grad():
        stage.forward(micro_batch(50.0))
    assert stage.timer.result() == {}
    stage.backward(stage.forward(micro_batch()))
    with torch.no_grad():
        stage.forward(micro_batch(50.0))
    assert stage.seconds() == {3: (1, 3)}


@pytest.mark.parametrize("how", ["inside", "keyword", "outside"])
def test_what_is_computed_again_belongs_to_the_backward(how: str) -> None:
    clock = Clock()
    layers = [Layer(clock.take, 1, 3, how), Layer(clock.take, 5, 7, how)]

    def run(x: Tensor, layers: Any) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if how == "outside" else layer(x)
        return x

    stage = Stage(layers, clock=clock, run=run)
    for _ in range(3):
        stage.backward(stage.forward(micro_batch()))
    assert stage.seconds() == {3: (1, 4), 4: (5, 12)}
    # The input of each, which autograd shows or not.
    assert [times.saved_bytes for times in stage.timer.result().values()] == [STREAM_BYTES, STREAM_BYTES]


def reentrant(function: Any, x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def by_deepspeed(function: Any, x: Tensor) -> Tensor:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return checkpointing.checkpoint(function, x)


@pytest.mark.parametrize("again", [reentrant, by_deepspeed])
def test_layers_without_marks_share_a_backward_as_they_share_the_forward(again: Any) -> None:
    clock = Clock()
    layers = [Layer(clock.take, 1, 30), Layer(clock.take, 3, 10), Layer(clock.take, 4, 5)]

    def run(x: Tensor, layers: Any) -> Tensor:
        return layers[2](again(lambda x: run_layers(x, layers[:2]), x))

    stage = Stage(layers, clock=clock, run=run, after=9)
    for _ in range(2):
        stage.backward(stage.forward(micro_batch()))
    # 44 s: the forward of the first two again, and their backwards.
    assert stage.seconds() == {3: (1, 11), 4: (3, 33), 5: (4, 5), 9: (0, 0)}
    assert [times.saved_bytes for times in stage.timer.result().values()] == [STREAM_BYTES, 0, STREAM_BYTES, 0]


def test_head_and_embedding_share_with_layers_without_marks() -> None:
    clock = Clock()
    embedding, layer, head = Layer(clock.take, 1, 2), Layer(clock.take, 3, 4), Layer(clock.take, 6, 7)

    def run(x: Tensor, layers: Any) -> Tensor:
        return head(reentrant(layers[0], embedding(x)))

    stage = Stage([layer], clock=clock, run=run, before=2, after=4)
    stage.backward(stage.forward(micro_batch()))
    assert stage.seconds() == {2: (1, 1.6), 3: (3, 4.8), 4: (6, 9.6)}


def test_frozen_layers_have_no_backward_and_the_first_that_trains_ends_with_it() -> None:
    clock = Clock()
    layers = [Layer(clock.take, 1, 2), Layer(clock.take, 3, 4), Layer(clock.take, 5, 6)]
    layers[0].requires_grad_(False)
    stage = Stage(layers, clock=clock, before=2)
    stage.backward(stage.forward(micro_batch(requires_grad=False)))
    assert stage.seconds() == {2: (0, 0), 3: (1, 0), 4: (3, 4), 5: (5, 6)}


def test_only_the_head_trains() -> None:
    clock = Clock()
    head = Layer(clock.take, 5, 6)
    layer = Layer(clock.take, 1, 2).requires_grad_(False)
    stage = Stage([layer], clock=clock, run=lambda x, layers: head(run_layers(x, layers)), after=4)
    stage.backward(stage.forward(micro_batch(requires_grad=False)))
    assert stage.seconds() == {3: (1, 0), 4: (5, 6)}


class OfTuples(nn.Module):
    """One layer for the first of two tensors; the second gets a share of it."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        out = self.layer(x[0])
        return out, x[1] + out


def test_tuples_and_a_backward_from_each_tensor_in_turn() -> None:
    clock = Clock()
    stage = Stage([OfTuples(Layer(clock.take, 1, 3)), OfTuples(Layer(clock.take, 5, 7))], clock=clock)
    out, side = stage.forward((micro_batch(), micro_batch()))
    stage.backward(out, side)
    assert stage.seconds() == {3: (1, 6), 4: (5, 14)}
    assert {times.output_bytes for times in stage.timer.result().values()} == {2 * STREAM_BYTES}


def test_layers_that_hand_on_their_input_or_write_to_it() -> None:
    class InPlace(nn.Module):
        def __init__(self, layer: Layer) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            x += 0 * self.layer(x)
            return x

    clock = Clock()
    layers = [Layer(clock.take, 1, 2), nn.Identity(), InPlace(Layer(clock.take, 3, 4)), Layer(clock.take, 5, 6)]
    # The factor is read in the backward, where the written tensor is no longer what it was.
    layers[2].layer.forward = lambda x: Layer.forward(layers[2].layer, x.clone())  # type: ignore[method-assign]
    stage = Stage(layers, clock=clock)
    stage.backward(stage.forward(micro_batch()))
    assert stage.seconds() == {3: (1, 2), 4: (0, 0), 5: (3, 4), 6: (5, 6)}


def test_a_module_under_two_numbers_runs_as_the_first_then_as_the_second() -> None:
    clock = Clock()
    tied = Layer(clock.take, 1, 2)
    stage = Stage([tied, Layer(clock.take, 3, 4), tied], clock=clock)
    stage.backward(stage.forward(micro_batch()))
    stage.backward(stage.forward(micro_batch()))
    assert stage.seconds() == {3: (1, 2), 4: (3, 4), 5: (1, 2)}


def test_saved_bytes_are_those_counted_by_hand() -> None:
    # Linear keeps its input, tanh its output, which the next linear layer keeps too; weights do not count, wherever.
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    whole = nn.ModuleList([nn.Linear(4, 5), layers, nn.Linear(3, 2)])
    timer = LayerTimer(dict(enumerate(layers, 1)), CPU, stage=whole, before=0, after=4, now=time.perf_counter)
    timer.install()
    timer.begin("F")
    whole[2](layers(whole[0](torch.ones(2, 4))))
    timer.end("F")
    saved = [times.saved_bytes / FLOAT / 2 for times in timer.result().values()]
    assert saved == [4, 5, 7, 0, 3]
    assert [times.output_bytes / FLOAT / 2 for times in timer.result().values()] == [5, 7, 7, 3, 0]


def test_bytes_are_counted_in_a_forward_whose_seconds_do_not_count() -> None:
    clock = Clock()
    stage = Stage([Layer(clock.take, 1, 1)], clock=clock)
    stage.forward(micro_batch(100.0))
    assert stage.seconds() == {3: (100, 0)}, "better than nothing"
    stage.forward(micro_batch(3.0))
    assert stage.seconds() == {3: (3, 0)}


def test_a_backward_whose_forward_was_not_seen_does_not_count() -> None:
    clock = Clock()
    layers = [Layer(clock.take, 1, 3)]
    alive = run_layers(micro_batch(50.0), layers)
    stage = Stage(layers, clock=clock, after=4)
    stage.backward(alive)
    stage.backward(stage.forward(micro_batch()))
    assert stage.seconds() == {3: (1, 3), 4: (0, 0)}


def test_nothing_is_left_when_it_is_taken_off() -> None:
    clock = Clock()
    layers = [Layer(clock.take, 1, 2), Layer(clock.take, 3, 4)]
    stage = Stage(layers, clock=clock)
    seen: list[Tensor] = []
    layers[0].register_forward_hook(lambda module, args, out: seen.append(out))
    alive = stage.forward(micro_batch())
    stage.timer.begin("F")
    stage.timer.remove()  # in mid-forward
    assert [len(layer._forward_pre_hooks) for layer in layers] == [0, 0]
    assert [len(layer._forward_hooks) for layer in layers] == [1, 0]
    assert not any(tensor._backward_hooks for tensor in (alive, seen[0]))
    before = stage.timer.result()
    stage.backward(alive)
    stage.forward(micro_batch(9.0))
    assert stage.timer.result() == before


def test_autograd_is_not_listened_to_any_more() -> None:
    layer = nn.Linear(2, 2)
    timer = LayerTimer({0: layer}, CPU, stage=layer, now=time.perf_counter)
    timer.install()
    timer.begin("F")
    with pytest.raises(KeyError):  # the forward fails
        raise KeyError
    timer.remove()
    with pytest.raises(RuntimeError, match=r"stack\.empty"):
        torch._C._autograd._pop_saved_tensors_default_hooks()


class Event:
    """As CUDA's, of a device a second behind the host."""

    def __init__(self, at_s: float) -> None:
        self.at_s, self.is_done = at_s, False

    def synchronize(self) -> None:
        self.is_done = True

    def elapsed_time(self, other: Event) -> float:
        assert other.is_done, "not waited for"
        return (other.at_s - self.at_s) * 1e3


def test_events_are_waited_for() -> None:
    clock = Clock()
    layer = Layer(clock.take, 1, 2)
    timer = LayerTimer({0: layer}, CPU, stage=layer, now=lambda: Event(clock.now_s))
    timer.install()
    timer.begin("F")
    out = layer(micro_batch())
    timer.end("F")
    timer.begin("B")
    out.sum().backward()
    timer.end("B")
    assert timer.result() == {0: ItemTimes(1.0, 2.0, STREAM_BYTES, STREAM_BYTES)}


class Longest:
    """The longest forward and backward that a timer measured, by the host's clock."""

    def __init__(self) -> None:
        self.seconds = {"F": 0.0, "B": 0.0}

    @contextmanager
    def span(self, timer: LayerTimer, kind: str) -> Iterator[None]:
        begun = time.perf_counter()
        timer.begin(kind)
        yield
        timer.end(kind)
        self.seconds[kind] = max(self.seconds[kind], time.perf_counter() - begun)


def test_real_seconds() -> None:
    layers = [Layer(time.sleep, 0.005, 0.02), Layer(time.sleep, 0.03, 0.01)]
    timer = LayerTimer(dict(enumerate(layers)), CPU, stage=nn.ModuleList(layers), now=time.perf_counter)
    timer.install()
    longest = Longest()
    for _ in range(5):
        with longest.span(timer, "F"):
            out = run_layers(micro_batch(), layers)
        with longest.span(timer, "B"):
            out.sum().backward()
    first, second = timer.result().values()
    # Load makes a sleep longer, never shorter; all layers together take no more than the longest of the five.
    assert first.forward_s >= 0.005
    assert first.backward_s >= 0.02
    assert second.forward_s >= 0.03
    assert second.backward_s >= 0.01
    assert first.forward_s + second.forward_s <= longest.seconds["F"]
    assert first.backward_s + second.backward_s <= longest.seconds["B"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("part", ["whole", "first", "middle", "last"])
def test_a_hugging_face_stage(part: str, checkpointing: bool) -> None:
    from transformers import LlamaConfig

    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, vocab_size=101,
    )  # fmt: skip
    cut = {
        "whole": Cut.whole(6),
        "first": Cut(0, 2, True, False),
        "middle": Cut(2, 4, False, False),
        "last": Cut(4, 6, False, True),
    }[part]
    stage = load_stage(None, config, cut)
    stage.train()
    if checkpointing:
        # The second name is that of transformers before 5.23.
        enable = getattr(stage.model, "activation_checkpointing_enable", None)
        (enable or stage.model.gradient_checkpointing_enable)({"use_reentrant": False})
    blocks = stage.anatomy.layers_of(stage.model)
    layers = {index + 1: blocks[index] for index in range(cut.start, cut.stop)}
    before, after = 0 if cut.first else None, 7 if cut.last else None
    timer = LayerTimer(layers, CPU, stage=stage, before=before, after=after, now=time.perf_counter)
    length = 16
    stream = torch.arange(2 * length).view(2, length) if cut.first else torch.randn(2, length, 32)

    def step(longest: Longest) -> list[Tensor]:
        stage.zero_grad()
        x = stream.clone().requires_grad_() if stream.is_floating_point() else stream
        with longest.span(timer, "F"):
            out, _ = stage(x)
        with longest.span(timer, "B"):
            out.square().sum().backward()
        return [parameter.grad.clone() for parameter in stage.parameters() if parameter.grad is not None]

    expected = step(Longest())  # the timer is not on yet
    timer.install()
    longest = Longest()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(step(longest), expected, strict=True))
    timer.remove()
    found = timer.result()
    assert list(found) == [*([0] if cut.first else []), *layers, *([7] if cut.last else [])]
    assert all(times.forward_s > 0 and times.backward_s > 0 for times in found.values())
    assert sum(times.forward_s for times in found.values()) <= longest.seconds["F"]
    assert sum(times.backward_s for times in found.values()) <= longest.seconds["B"]
    hidden_bytes = FLOAT * 2 * length * 32
    middle = [found[item] for item in list(layers)[1:]]  # the first one also has what all of them share
    assert all(times.output_bytes == hidden_bytes for times in middle)
    if checkpointing:
        assert all(times.saved_bytes == hidden_bytes for times in middle)
    else:
        assert all(times.saved_bytes > 8 * hidden_bytes for times in middle)
        assert all(times.saved_bytes < 40 * hidden_bytes for times in found.values())
