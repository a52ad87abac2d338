"""Parts of an optimizer's step, most with small stand-ins for what they use; no engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import Tensor, nn

from paceline.measure.clock import Clock
from paceline.optim.asynchronous_updates import AsynchronousUpdates
from paceline.optim.buckets import Domain, DomainBucket, lay_out
from paceline.optim.corrections import Corrections
from paceline.optim.gradient_buckets import Completes, GradientBuckets
from paceline.optim.max_change import Limits
from paceline.optim.owned_rows import OwnedRows
from paceline.optim.parameter_layout import ParameterLayout
from paceline.optim.sharded import ShardedOptimizer
from paceline.optim.step_options import StepOptions
from paceline.optim.step_outcome import MOST_SKIPPED, StepOutcome
from paceline.optim.step_sums import GradientNorm, Passenger, ShardedMaxChange
from paceline.optim.task_queue import TaskQueue
from support.ranks import PATIENCE_S, run_ranks

NUM_RANKS, RANK = 2, 1


@dataclass
class Booked:
    """Times that are booked, by kind."""

    found: list[tuple[str, int]] = field(default_factory=list)

    def compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def transfer(self, kind: str, num_bytes: int) -> Iterator[None]:
        self.found.append((kind, num_bytes))
        yield


@dataclass(frozen=True)
class TwoRanks(DomainBucket):
    """A bucket of two ranks, of which the other one has the same gradients and the values 7."""

    calls: list[str] = field(default_factory=list)

    def is_direct(self, device: torch.device) -> bool:
        return False

    def start_reduction(self, gradients: Tensor, communication_dtype: torch.dtype | None) -> list[Any]:
        self.calls.append("reduce")
        return [SimpleNamespace(is_there=lambda: False, finish=lambda: gradients.mul_(2))]

    def start_publishing(self, values: Tensor) -> Iterator[Any]:
        self.calls.append("publish")
        values[: self.bucket.bounds[RANK]] = 7.0
        yield SimpleNamespace(wait=lambda: None)


class ThreeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused, self.last = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def layout_of(module: nn.Module, basic: torch.optim.Optimizer, calls: list[Any], **options: Any) -> ParameterLayout:
    """Of the second of two ranks, with a bucket of each layer."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    layout = ParameterLayout(basic, names, StepOptions(**options))
    layout.num_ranks, layout.is_sharded, layout.has_memory = NUM_RANKS, True, True
    count = len(layout.parameters)
    parts = lay_out(
        range(count),
        [tuple(parameter.shape) for parameter in layout.parameters],
        [Domain(None, NUM_RANKS, RANK)] * count,
        [name.split(".")[0] for name in layout.names],
        waiting=set(),
        bucket_numel=1,
        least_numel=0,
        cut=True,
        shard=True,
    )
    layout.buckets = [TwoRanks(part.bucket, part.domain, part.shard, part.waits, calls) for part in parts]
    return layout


def made(**options: Any) -> tuple[ThreeLayers, GradientBuckets, list[Any], Booked, ParameterLayout]:
    module, calls, booked = ThreeLayers(), list[Any](), Booked()
    layout = layout_of(module, torch.optim.SGD(module.parameters(), lr=1.0), calls, **options)
    return module, GradientBuckets(layout, lambda: booked, StepOptions(**options)), calls, booked, layout


X = torch.arange(4.0)


class WithoutGradient(torch.autograd.Function):
    """The product with a weight that gets no gradient, as in a compiled layer that does not depend on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_parameter_that_autograd_has_no_gradient_for_is_not_reached() -> None:
    module, gradients, _, _, layout = made()
    for _ in range(2):
        with gradients.backward():
            WithoutGradient.apply(module(X), module.unused.weight).sum().backward()
        _, touched = gradients.reduced()
        assert not touched[layout.index_of[module.unused.weight]]
        assert touched[layout.index_of[module.last.weight]]
        gradients.zero()


def test_buckets_are_reduced_as_the_last_backward_finishes_them() -> None:
    module, gradients, calls, booked, layout = made()
    last = layout.index_of[module.last.weight]
    for step in range(2):
        with gradients.backward(Completes.NOTHING):
            module(X).sum().backward()
        wanted = 2 * 2 * module.last.weight.grad  # two micro-batches, two ranks
        with gradients.backward():
            hook = module.first.weight.register_hook(lambda gradient: calls.append("first"))
            module(X).sum().backward()
            hook.remove()
        # Whose gradients come in several parts is seen in the first step; the unused layer is between the others.
        assert calls == (["first"] if step == 0 else ["reduce", "first"])
        found, touched = gradients.reduced()
        assert calls.count("reduce") == 3
        torch.testing.assert_close(found[last], wanted)
        assert all(g.count_nonzero() == 0 for g, was in zip(found, touched, strict=True) if g is not None and not was)
        assert touched == [name.split(".")[0] != "unused" for name in layout.names]
        gradients.zero()
        assert module.last.weight.grad is None
        for buffers in gradients.buffers:
            buffers.gradients.fill_(9.0)  # of another step
        calls.clear()
    assert {kind for kind, _ in booked.found} == {"gradients"}


def comes(parameter: nn.Parameter) -> None:
    torch.autograd.backward(parameter, torch.ones_like(parameter))


@pytest.mark.parametrize("is_split_before", [False, True])
def test_split_backwards_complete_gradients_in_two_parts(is_split_before: bool) -> None:
    """The last layer's gradient is left for later, the first's comes with the inputs', and the other's in both parts.

    Backwards that were whole in the first step do not tell which is which.
    """
    module, gradients, calls, _, _ = made()
    last, both, first = module.last.weight, module.unused.weight, module.first.weight
    if not is_split_before:
        with gradients.backward():
            comes(last), comes(both), comes(first)
        gradients.reduced()
        gradients.zero()
    for step in range(2):
        calls.clear()
        for micro_batch in range(2):
            is_last = micro_batch == 1
            with gradients.backward(Completes.WITH_INPUTS if is_last else Completes.NOTHING):
                comes(both), comes(first)
            assert calls == []
            with gradients.backward(Completes.LEFT if is_last else Completes.NOTHING, is_of_weights=True):
                comes(last)
                seen = [len(calls)]
                comes(both)
                seen.append(len(calls))
            assert seen == ([1, 3] if is_last and step else [0, 0]), "in the first step it is not known"
        assert both.grad.eq(4).all()
        gradients.reduced()
        gradients.zero()


def test_whole_backwards_among_split_ones_complete_gradients_too() -> None:
    """A whole backward is the last in which gradients come with the inputs', others are still to come."""
    module, gradients, calls, _, _ = made()
    parameters = module.last.weight, module.unused.weight, module.first.weight
    last, *others = parameters
    for step in range(2):
        calls.clear()
        with gradients.backward(Completes.NOTHING):
            [comes(parameter) for parameter in others]
        with gradients.backward(Completes.WITH_INPUTS):
            [comes(parameter) for parameter in parameters]
        assert calls == []
        with gradients.backward(Completes.LEFT, is_of_weights=True):
            comes(last)
            assert len(calls) == (3 if step else 0)
        gradients.reduced()
        gradients.zero()


def test_a_gradient_of_two_stages_is_waited_for() -> None:
    module, gradients, calls, _, _ = made()
    for step in range(2):
        calls.clear()
        for stage in (3, 0):
            with gradients.backward(stage=stage):
                comes(module.last.weight if stage else module.first.weight)
                assert len(calls) == (1 if step else 0)
                comes(module.unused.weight)
        assert len(calls) == (1 if step else 0)
        gradients.reduced()
        gradients.zero()


def test_a_gradient_that_comes_twice_in_a_backward_is_waited_for() -> None:
    module, gradients, calls, _, _ = made()
    for _ in range(2):
        with gradients.backward():
            module.last(X).sum().backward()
            module.last(X).sum().backward()
        assert calls == []
        gradients.reduced()
        gradients.zero()
        calls.clear()


def test_a_gradient_after_the_reduction_is_an_error() -> None:
    module, gradients, _, _, _ = made()
    module(X).sum().backward()
    gradients.reduced()
    with pytest.raises(AssertionError, match=r"weight: a gradient after the reduction"):
        module(X).sum().backward()


def test_owners_values_come_from_the_other_rank() -> None:
    module, gradients, calls, booked, _ = made()
    gradients.publish_values()
    assert calls == ["publish"] * 3
    assert module.first.weight[:2].eq(7).all()
    assert not module.first.weight[2:].eq(7).any()
    assert booked.found[0][0] == "values"


def test_gradients_that_have_no_memory_yet_are_still_to_come() -> None:
    """A single pipeline has them; where ranks reduce, buckets have memory from the start."""
    module = ThreeLayers()
    names = {parameter: name for name, parameter in module.named_parameters()}
    options = StepOptions()
    layout = ParameterLayout(torch.optim.SGD(module.parameters(), lr=1.0), names, options)
    gradients = GradientBuckets(layout, Booked, options)
    assert gradients.coming_bytes() == 3 * 16 * 4
    module(X).sum().backward()
    assert gradients.coming_bytes() == 16 * 4
    module.unused.requires_grad_(False)
    assert gradients.coming_bytes() == 0
    gradients.zero()
    assert gradients.coming_bytes() == 2 * 16 * 4
    assert made()[1].coming_bytes() == 0


def test_parameters_have_memory_of_their_own_again() -> None:
    module, gradients, _, _, _ = made()
    values = [parameter.detach().clone() for parameter in module.parameters()]
    buckets = {buffers.values.untyped_storage().data_ptr() for buffers in gradients.buffers}
    assert {parameter.untyped_storage().data_ptr() for parameter in module.parameters()} == buckets
    gradients.release()
    module(X).sum().backward()  # no hook is left
    for parameter, value in zip(module.parameters(), values, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.untyped_storage().data_ptr() not in buckets


def test_taken_gradients_are_not_added_to() -> None:
    module, gradients, _, _, layout = made(corrections=Corrections())
    one_set = gradients.num_bytes()
    module(X).sum().backward()
    buffers, index = gradients.buffers[0], layout.index_of[module.last.weight]
    taken = gradients.take(buffers)
    before = taken.views[index].clone()
    assert taken.touched == {index}
    assert gradients.num_bytes() == one_set, "not before a gradient comes"
    module(X).sum().backward()
    assert torch.equal(taken.views[index], before)
    assert torch.equal(gradients.of(module.last.weight), before)
    assert gradients.num_bytes() == one_set + buffers.gradients.nbytes
    buffers.give_back(taken.memory)
    gradients.take(buffers)
    module(X).sum().backward()
    assert gradients.num_bytes() == one_set + buffers.gradients.nbytes, "memory that was given back is used"


# -- owned rows ------------------------------------------------------------------------------------------------------


def rows_of(dtype: torch.dtype) -> tuple[ThreeLayers, OwnedRows, torch.optim.Optimizer, ParameterLayout]:
    module = ThreeLayers().to(dtype)
    basic = torch.optim.Adagrad(module.parameters(), lr=1.0, initial_accumulator_value=3.0)  # has states at once
    layout = layout_of(module, basic, [])
    return module, OwnedRows(layout, basic), basic, layout


def test_states_of_a_vector_are_cut_by_rows_too() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.arange(1024.0))
    basic = torch.optim.Adagrad(module.parameters(), lr=1.0, initial_accumulator_value=3.0)
    (one,) = OwnedRows(layout_of(module, basic, []), basic).owned
    assert (one.start, one.stop) == (512, 1024)
    assert basic.state[one.master]["sum"].shape == one.master.shape == (512,)
    assert basic.state[one.master]["step"].shape == (), "what is of the whole parameter stays"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_steps_its_rows_and_answers_for_them(dtype: torch.dtype) -> None:
    module, rows, basic, layout = rows_of(dtype)
    owned = {one.name: one for one in rows.owned}
    assert basic.param_groups[0]["params"] == [one.master for one in rows.owned]
    one = owned["first.weight"]
    assert (one.start, one.stop, one.master.dtype) == (2, 4, torch.float32)
    assert basic.state[one.master]["sum"].shape == (2, 4), "its rows of the state"
    assert basic.state[one.master]["sum"].dtype == torch.float32, "or its sums would stop growing"
    assert sorted((rows.owned[place].name, start, stop) for place, start, stop in rows.shares()) == sorted(
        (one.name, one.start, one.stop) for one in rows.owned
    )
    gradients = [torch.full_like(parameter, 2.0) for parameter in layout.parameters]
    touched = [not name.startswith("unused") for name in layout.names]
    rows.hand_over(gradients, touched, 0.5)
    assert one.master.grad is not None
    assert one.master.grad.eq(1).all()
    assert all(one.master.grad is None for one in rows.owned if one.name.startswith("unused"))
    with torch.no_grad():
        one.master.fill_(5.0)
    rows.write_values()
    assert module.first.weight[2:].eq(5).all()
    assert not module.first.weight[:2].eq(5).any()
    rows.forget_gradients()
    assert one.master.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_with_memory_of_their_own_are_kept(dtype: torch.dtype) -> None:
    module, rows, basic, layout = rows_of(dtype)
    masters, kept = {one.name: one.master for one in rows.owned}, rows.kept()
    assert bool(kept) is (dtype != torch.float32)
    states = sum(value.nbytes for state in basic.state.values() for value in state.values())
    own = sum(master.nbytes for master in masters.values())
    assert rows.num_bytes() == states + (own if kept else 0)
    rows.release()
    assert not basic.state
    basic.param_groups[0]["params"] = list(module.parameters())
    for one in OwnedRows(layout, basic, kept).owned:
        assert (one.master is masters[one.name]) is (dtype != torch.float32)


def stepped(sent: torch.dtype | None) -> list[float]:
    """A parameter of zeros after a step of 1 along the sum of the ranks' gradients, 1 and 2."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    parameter = nn.Parameter(torch.zeros(4, 2))
    options = StepOptions(dist.group.WORLD, communication_dtype=sent)
    optimizer = ShardedOptimizer(torch.optim.SGD([parameter], lr=1.0), {parameter: "weight"}, options)
    (parameter * (1 + dist.get_rank())).sum().backward()
    optimizer.reduce_gradients()
    optimizer.step()
    return parameter.flatten().tolist()


@pytest.mark.parametrize("sent", [None, torch.bfloat16])
def test_gradients_are_summed_in_whatever_dtype_they_travel(sent: torch.dtype | None) -> None:
    assert run_ranks(stepped, 2, sent) == [[-3.0] * 8] * 2


# -- sums and outcome ------------------------------------------------------------------------------------------------


class Sums:
    """Two ranks that have the same, of a model on one rank."""

    def add(self, report: Tensor, of_model: Tensor) -> None:
        report *= 2

    def union(self, own: set[str]) -> list[str]:
        return sorted(own | {"elsewhere"})


def test_the_norm_counts_every_row_once() -> None:
    module, _, _, _, layout = made()
    layout.counts[layout.index_of[module.last.weight]] = False
    gradients = [torch.full_like(parameter, 3.0) for parameter in layout.parameters]
    touched = [name == "first.weight" for name in layout.names]
    sums: Any = Sums()
    norm = GradientNorm(layout, sums, Booked, max_norm=6.0)
    squares, reached = norm.survey(gradients, touched)
    others = sum(parameter.numel() for parameter in module.parameters()) - module.last.weight.numel()
    assert squares == 9 * others, "half of them are here, and the other rank has as many"
    assert reached == touched
    assert norm.factor(4.0 * 144, 2.0) == pytest.approx(0.5 * 6 / 12)
    assert norm.factor(4.0 * 9, 2.0) == 0.5
    assert GradientNorm(layout, sums, Booked).factor(1e12, 4.0) == 0.25


def test_a_number_goes_along_with_the_norm() -> None:
    _, _, _, _, layout = made()
    gradients = [torch.full_like(parameter, 3.0) for parameter in layout.parameters]
    sums: Any = Sums()
    alone = GradientNorm(layout, sums, Booked).survey(gradients, [True] * len(gradients))
    loss = torch.tensor(2.3)
    passenger = Passenger(own=lambda: loss)
    assert GradientNorm(layout, sums, Booked, passenger=passenger).survey(gradients, [True] * len(gradients)) == alone
    assert passenger.total == 2 * loss.item(), "no bit is lost on the way"


def test_changes_are_limited_by_the_sum_of_all_ranks() -> None:
    _, rows, _, layout = rows_of(torch.float32)
    sums: Any = Sums()
    change = ShardedMaxChange(lambda: Limits(layer=1.0, head=0.0, total=0.0), sums, Booked)
    begun = change.begin(layout, rows)
    assert begun is not None
    master = next(one.master for one in rows.owned if one.name == "first.weight")
    before = master.detach().clone()
    with torch.no_grad():
        master += 1.0  # 8 elements here, 8 on the other rank: a norm of 4
    outcome = change.limit(begun, torch.device("cpu"))
    assert (outcome.norm, outcome.num_limited) == (1.0, 1)
    torch.testing.assert_close(master.detach(), before + 0.25)
    assert ShardedMaxChange(lambda: None, sums, Booked).begin(layout, rows) is None


def test_skipped_steps_end_training_unless_the_scale_is_looking_for_its_height() -> None:
    outcome = StepOutcome()
    outcome.note_gradients(16.0, 2.0)
    assert (outcome.grad_norm, outcome.overflow, outcome.loss_scale) == (2.0, False, 1.0)
    for _ in range(MOST_SKIPPED - 1):
        outcome.skip()
    outcome.complete()
    for _ in range(MOST_SKIPPED - 1):
        outcome.skip("change")
    with pytest.raises(FloatingPointError, match=r"gradient is not finite.*for the 50th time"):
        outcome.skip()
    scales: list[bool] = []
    scaler = SimpleNamespace(loss_scale=8.0, dynamic=True, update_scale=scales.append)
    outcome = StepOutcome(scaler)
    for _ in range(MOST_SKIPPED + 1):
        outcome.note_gradients(math.nan, 8.0)
        outcome.skip()
    assert (outcome.overflow, outcome.loss_scale, scales) == (True, 8.0, [True] * (MOST_SKIPPED + 1))


def test_the_smallest_loss_scale_ends_training_with_a_remedy() -> None:
    scaler = DynamicLossScaler(2.0, scale_window=2, min_scale=2.0, delayed_shift=1, consecutive_hysteresis=False)
    with pytest.raises(FloatingPointError, match=r"the loss scale, 2, is the smallest .* lower the learning rate"):
        StepOutcome(scaler).note_gradients(math.inf, 2.0)
    broken = SimpleNamespace(loss_scale=2.0, dynamic=True, update_scale=lambda overflow: {}["scale"])
    with pytest.raises(KeyError):
        StepOutcome(broken).note_gradients(math.inf, 2.0)


# -- beside the computation ------------------------------------------------------------------------------------------


def test_a_thread_tells_the_waiting_clock_of_its_collectives() -> None:
    begun, waits = threading.Event(), threading.Event()

    class WaitsNow(Clock):
        def now(self) -> Any:
            moment = super().now()
            waits.set()
            return moment

    clock = WaitsNow(torch.device("cpu"))
    tasks = TaskQueue(torch.device("cpu"), lambda: clock, has_thread=True)

    def run() -> None:
        with tasks.times().transfer("values", 8):
            begun.set()
            assert waits.wait(PATIENCE_S)

    task = tasks.put(run)
    assert begun.wait(PATIENCE_S)
    tasks.wait(task)
    tasks.stop()
    spent = clock.read()
    assert spent["communication_s"] > 0
    with pytest.raises(AssertionError, match="has been stopped"):
        tasks.check()


def test_without_a_thread_tasks_run_in_order_when_one_is_waited_for() -> None:
    clock, ran = Clock(torch.device("cpu")), list[int]()
    tasks = TaskQueue(torch.device("cpu"), lambda: clock, has_thread=False)
    put = [tasks.put(lambda number=number: ran.append(number)) for number in range(3)]
    assert ran == []
    tasks.wait(put[1])
    assert ran == [0, 1]
    assert tasks.times() is clock
    failed = tasks.put(lambda: ran.append(1 // 0))
    with pytest.raises(ZeroDivisionError):
        tasks.wait(failed)
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("squares", [4.0, math.inf])
def test_an_update_whose_norm_is_not_finite_changes_nothing(squares: float) -> None:
    module, gradients, calls, _, layout = made(corrections=Corrections())
    basic, clock = torch.optim.SGD(module.parameters(), lr=1.0), Clock(torch.device("cpu"))
    rows, outcome = OwnedRows(layout, basic), StepOutcome()
    norm: Any = SimpleNamespace(survey=lambda found, touched: (squares, touched), factor=lambda squares, scale: 1.0)
    tasks = TaskQueue(torch.device("cpu"), lambda: clock, has_thread=False)
    options = StepOptions(corrections=Corrections())
    sums: Any = Sums()
    changes = ShardedMaxChange(lambda: None, sums, Booked)
    updates = AsynchronousUpdates(basic, layout, gradients, rows, norm, changes, outcome, lambda: clock, tasks, options)
    before = module.first.weight.detach().clone()
    module(X).sum().backward()
    gradient = module.first.weight.grad.clone()
    updates.backward_complete(0)
    updates.finish_step()
    assert calls == [], "everything happens when it is applied"
    updates.apply()
    assert calls == ["reduce"] * 3 + ["publish"] * 3 * math.isfinite(squares)
    assert outcome.overflow is not math.isfinite(squares)
    if outcome.overflow:
        assert torch.equal(module.first.weight, before)
    else:
        assert module.first.weight[:2].eq(7).all(), "the other rank's"
        torch.testing.assert_close(module.first.weight[2:].detach(), (before - 2 * gradient)[2:])
