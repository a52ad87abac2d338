"""One executor runs the programs of every family: ranks are threads here, lanes are queues, stages are small layers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.shapes import Meta, Value, meta_of
from paceline.hf.early_recomputation import Checkpoints, checkpointed
from paceline.measure.clock import Clock
from paceline.optim.gradient_buckets import Completes
from paceline.optim.linear_layers import Deferral, Deferred
from paceline.runtime.boundary import Boundary
from paceline.runtime.early_room import Extent
from paceline.runtime.executor import Executor, HeldStage
from paceline.runtime.meter import Meter
from paceline.runtime.stage_runner import Live, StageRunner, gradient_of
from paceline.schedules import Schedule, families
from paceline.schedules.directions import routes
from paceline.schedules.keeping import NOTHING, Keeping
from paceline.schedules.lower import FLUSHED_UPDATE, LOAD, RUN_BACKWARD, Op, lower
from paceline.schedules.schedule import BACKWARD, Action, backward, backward_input, backward_weight, forward
from support.ranks import PATIENCE_S

WIDTH, MICRO_BATCHES = 3, 8


class Everything:
    """All stages train, and nothing is done around a computation."""

    def runs_backward(self, stage: int) -> bool:
        return True

    def sends_gradients(self, stage: int) -> bool:
        return stage > 0

    def forward(self) -> Any:
        return nullcontext()

    def backward(self, completes: Completes, *, stage: int, is_of_weights: bool = False) -> Any:
        return nullcontext()


class LayerRunner(StageRunner):
    """A stage of one linear layer and a tanh; the last one sums the squares of what it has."""

    def __init__(self, stage: int, layers: list[nn.Linear], inputs: Tensor) -> None:
        self.around = Everything()
        super().__init__(stage, len(layers), reach=self.around, around=self.around)  # type: ignore[arg-type]
        self.layer, self.data = layers[stage], inputs
        self.ended: list[tuple[int, Completes]] = []
        """Micro-batches whose backward, or a part of it, has completed gradients."""

    def load(self, live: Live, number: int) -> None:
        if self.is_first:
            live.inputs = self.data[number]

    def forward(self, live: Live, number: int) -> None:
        live.outputs = self.layer(live.inputs).tanh()
        if self.is_last:
            live.outputs = live.outputs.square().sum()

    def backward(self, live: Live, number: int, completes: Completes = Completes.NOTHING) -> None:
        live.outputs.backward(live.gradients)
        live.outputs = live.gradients = None
        if completes:
            self.ended.append((number, completes))

    def backward_weight(self, deferred: Deferred, completes: Completes = Completes.NOTHING) -> None:
        super().backward_weight(deferred, completes)
        if completes:
            self.ended.append((-1, completes))

    def activation_key(self, number: int) -> Hashable:
        return number

    def leaving(self, live: Live) -> Value:
        return live.outputs

    def arrived(self, live: Live, number: int, value: Value) -> None:
        assert isinstance(value, Tensor)
        live.inputs = value.requires_grad_()

    def gradient_meta(self, live: Live) -> Meta:
        return meta_of(live.outputs)

    def leaving_gradients(self, live: Live) -> Value:
        return gradient_of(live.inputs)


class QueueLane:
    """One way of an edge. What is taken must have been posted, and comes in any order."""

    def __init__(self, queue: SimpleQueue[Any]) -> None:
        self.queue, self.posted, self.here = queue, set[int](), dict[int, Tensor]()

    def post(self, number: int, key: Hashable, format: None) -> None:
        self.posted.add(number)

    def send(self, number: int, key: Hashable, value: Tensor) -> None:
        self.queue.put((number, value.detach().clone()))

    def receive(self, number: int) -> Tensor:
        self.posted.remove(number)
        while number not in self.here:
            other, value = self.queue.get(timeout=PATIENCE_S)
            self.here[other] = value
        return self.here.pop(number)


class Ended:
    """Counts what ends a step."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def backward_complete(self, stage: int) -> None:
        self.calls.append(f"complete {stage}")

    def apply(self) -> None:
        self.calls.append("apply")

    def reduce_tied(self) -> None:
        self.calls.append("reduce_tied")

    def reduce(self) -> None:
        self.calls.append("reduce")

    def update(self) -> None:
        self.calls.append("update")


def held_by(schedule: Schedule, rank: int, runners: list[StageRunner], queues: dict[Any, Any], meter: Meter) -> Any:
    """The rank's chunks, with lanes to neighbouring cells on other ranks."""
    held = []
    cells = schedule.cells[rank]
    for cell, runner in zip(cells, runners, strict=True):
        before, behind = (None if runner.is_first else cell - 1), (None if runner.is_last else cell + 1)
        lanes = {}
        if before is not None and before not in cells:
            lanes["activations_in"] = QueueLane(queues["activation", before])
            lanes["gradients_out"] = QueueLane(queues["gradient", cell])
        if behind is not None and behind not in cells:
            lanes["activations_out"] = QueueLane(queues["activation", cell])
            lanes["gradients_in"] = QueueLane(queues["gradient", behind])
        held.append(
            HeldStage(
                runner,
                Boundary(runner, lanes, meter, None),  # type: ignore[arg-type]
                ranks=[place[0] for place in schedule.places[: schedule.num_stages]],
                next_chunk=cells.index(behind) if behind in cells else None,
                previous_chunk=cells.index(before) if before in cells else None,
            )
        )
    return held


def train(
    schedule: Schedule, order: str, made: type[LayerRunner] = LayerRunner, room: Any = None, *, measures: bool = False
) -> tuple[list[list[list[nn.Linear]]], list[Ended], list[Executor]]:
    """One step: the layers of each rank and chunk, with their gradients."""
    inputs = torch.randn(MICRO_BATCHES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    queues: dict[Any, Any] = defaultdict(SimpleQueue)
    for cell in range(len(schedule.places)):
        queues["activation", cell], queues["gradient", cell] = SimpleQueue(), SimpleQueue()
    programs = lower(schedule, order=order)
    found: list[list[Any]] = [[] for _ in programs]
    ended = [Ended() for _ in programs]
    executors: list[Any] = [None for _ in programs]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            meter = Meter(Clock(torch.device("cpu")), nn.Identity(), torch.device("cpu"))
            runners: list[StageRunner] = [
                made(stage, model(schedule.num_stages), inputs) for stage in schedule.stages[rank]
            ]
            deferral = Deferral()
            for runner in runners:
                deferral.adopt(runner.layer)  # type: ignore[attr-defined]
            held = held_by(schedule, rank, runners, queues, meter)
            meter.measures_memory_of = 1 if measures else None
            executors[rank] = Executor(held, meter=meter, transports=(), deferral=deferral, early_room=room)
            meter.recorder.begin()
            executors[rank].run(
                (*programs[rank], *FLUSHED_UPDATE), num_micro_batches=MICRO_BATCHES, updates=ended[rank]
            )
            meter.recorder.end()
            found[rank] = [(runner.stage, runner) for runner in runners]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return found, ended, executors


def model(num_stages: int) -> list[nn.Linear]:
    generator = torch.Generator().manual_seed(2)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(num_stages)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return layers


def alone(num_stages: int, micro_batches: range) -> list[nn.Linear]:
    """The same layers, with gradients added up over micro-batches in one process."""
    inputs = torch.randn(MICRO_BATCHES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layers = model(num_stages)
    for number in micro_batches:
        stream = inputs[number]
        for layer in layers:
            stream = layer(stream).tanh()
        stream.square().sum().backward()
    return layers


class AgainRunner(LayerRunner):
    """Its forward is computed again for the backward."""

    def __init__(self, stage: int, layers: list[nn.Linear], inputs: Tensor) -> None:
        super().__init__(stage, layers, inputs)
        self.ran = 0
        self.counted: list[bool] = []

    def forward(self, live: Live, number: int) -> None:
        def run(x: Tensor) -> Tensor:
            self.ran += 1
            return self.layer(x).tanh()

        live.outputs = checkpointed(run, live.inputs)
        if self.is_last:
            live.outputs = live.outputs.square().sum()

    def may_keep(self) -> bool:
        return True

    def checkpoints(self, *, counts: bool, keeps: int = 0) -> Checkpoints:
        self.counted.append(counts)
        return Checkpoints(torch.device("cpu"), keeps=keeps)

    def extent(self, number: int | None = None) -> Extent:
        return Extent(1, 1)


class Always:
    """Keeps activations, or computes them again early, in every step."""

    def __init__(self, choice: Keeping) -> None:
        self.choice = choice

    def choose(self, program: object, most: object) -> Keeping:
        return self.choice


LARGEST = 5


class UnlikeRunner(AgainRunner):
    """One of its micro-batches has more tokens than the others."""

    def extent(self, number: int | None = None) -> Extent:
        return Extent(1 + (number == LARGEST), 1)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "two directions"])
def test_memory_is_measured_of_the_largest_micro_batch_of_the_first_step(name: str) -> None:
    """Each chunk has its own, since it may have only some of them; among equal ones it is the first."""
    schedule = SCHEDULES[name]
    found, _, executors = train(schedule, "free", UnlikeRunner, Always(Keeping(True, {})), measures=True)
    for rank, (chunks, executor) in enumerate(zip(found, executors, strict=True)):
        assert executor._meter.saved_bytes[1].keys() == set(range(len(chunks)))
        for chunk, (_, runner) in enumerate(chunks):
            own = range(schedule.direction(rank, chunk), MICRO_BATCHES, schedule.num_directions)
            measured = LARGEST if LARGEST in own else own[0]
            assert runner.counted == [number == measured for number in own]


def both_ways() -> Schedule:
    """Two ranks, two directions: each rank holds both stages."""
    ways = routes(2, 2)
    numbers = [[m for m in range(MICRO_BATCHES) if m % 2 == direction] for direction in (0, 1)]
    orders = []
    for rank in range(2):
        order = []
        stages = [way.index(rank) for way in ways]
        for even, odd in zip(*numbers, strict=True):
            pair = sorted(((even, 0), (odd, 1)), key=lambda one: stages[one[1]])
            order += [forward(m, chunk) for m, chunk in pair] + [backward(m, chunk) for m, chunk in reversed(pair)]
        orders.append(tuple(order))
    return Schedule(tuple(orders), MICRO_BATCHES, 2, "both ways", tuple(ways))


def split(schedule: Schedule, count: int) -> Schedule:
    """Gradients of weights come ``count`` backwards after those of inputs; every third backward is whole."""
    orders = []
    for order in schedule.orders:
        left, found = list[Action](), list[Action]()
        for action in order:
            kind, micro_batch, chunk = action
            if kind != BACKWARD or micro_batch % 3 == 2:
                found += left if kind == BACKWARD else ()  # gradients are added in the micro-batches' order
                left = [] if kind == BACKWARD else left
                found.append(action)
                continue
            found.append(backward_input(micro_batch, chunk))
            left.append(backward_weight(micro_batch, chunk))
            if len(left) > count:
                found.append(left.pop(0))
        orders.append((*found, *left))
    return Schedule(tuple(orders), schedule.num_micro_batches, schedule.num_chunks, "split", schedule.routes)


SCHEDULES = {
    "1f1b": families.one_f_one_b(3, MICRO_BATCHES),
    "gpipe": families.gpipe(3, MICRO_BATCHES),
    "kfkb": families.kfkb(3, MICRO_BATCHES, 2),
    "eager": families.eager(3, MICRO_BATCHES, 1.0),
    "one stage": families.one_f_one_b(1, MICRO_BATCHES),
    "interleaved": families.interleaved(2, MICRO_BATCHES, 2),
    "dualpipev": families.dualpipev(2, MICRO_BATCHES),
    "two directions": both_ways(),
    "split": split(families.one_f_one_b(3, MICRO_BATCHES), 1),
    "split, interleaved": split(families.interleaved(2, MICRO_BATCHES, 2), 3),
}


@pytest.mark.parametrize("order", ["free", "paired"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_one_process(name: str, order: str) -> None:
    schedule = SCHEDULES[name]
    found, ended, executors = train(schedule, order)
    for rank, chunks in enumerate(found):
        for chunk, (stage, runner) in enumerate(chunks):
            way, ways = schedule.direction(rank, chunk), schedule.num_directions
            expected = alone(schedule.num_stages, range(way, MICRO_BATCHES, ways))[stage]
            assert torch.equal(runner.layer.weight.grad, expected.weight.grad)
            assert torch.equal(runner.layer.bias.grad, expected.bias.grad)
            last = max(range(way, MICRO_BATCHES, ways))
            if schedule.is_split and last % 3 != 2:
                assert runner.ended == [(last, Completes.WITH_INPUTS), (-1, Completes.LEFT)]
            else:
                assert runner.ended == [(last, Completes.ALL)]
    assert [end.calls for end in ended] == [["reduce_tied", "reduce", "update"]] * schedule.num_ranks
    assert not any(executor._live for executor in executors), "nothing is kept of a micro-batch that is done"
    assert not any(executor._deferred for executor in executors)
    for order, executor in zip(schedule.orders, executors, strict=True):
        (step,) = executor._meter.recorder.steps()
        computed = [
            Action(span.kind, span.number, span.chunk) for span in step.spans if span.kind in ("F", "B", "I", "W")
        ]
        assert tuple(computed) == order


CHOICES = {
    "late": NOTHING,
    "early": Keeping(True, {}),
    "kept": Keeping(True, {(chunk, number): 1 for chunk in range(2) for number in range(MICRO_BATCHES)}),
    "some kept, the others early": Keeping(True, {(0, 0): 1, (1, 1): 1, (0, 3): 1}),
    "some kept, the others late": Keeping(False, {(0, 1): 1, (0, 2): 1, (1, 4): 1}),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["1f1b", "kfkb", "dualpipev", "split"])
def test_activations_are_kept_or_computed_again_before_a_rank_waits_for_their_gradient(name: str, choice: str) -> None:
    schedule, (is_early, kept) = SCHEDULES[name], CHOICES[choice]
    found, _, executors = train(schedule, "free", AgainRunner, Always(CHOICES[choice]))
    for chunks, order, executor in zip(found, schedule.orders, executors, strict=True):
        cells = [stage for stage, _ in chunks]
        for chunk, (stage, runner) in enumerate(chunks):
            assert torch.equal(
                runner.layer.weight.grad, alone(schedule.num_stages, range(MICRO_BATCHES))[stage].weight.grad
            )
            keep = sum((chunk, number) in kept for number in range(MICRO_BATCHES))
            assert runner.ran == 2 * MICRO_BATCHES - keep
        (step,) = executor._meter.recorder.steps()
        waits = [stage < schedule.num_stages - 1 and stage + 1 not in cells for stage, _ in chunks]
        wanted = list[Action]()
        for action in order:
            if action.kind in "BI" and waits[action.chunk]:
                again = is_early and (action.chunk, action.micro_batch) not in kept
                wanted += [Action("R", *action[1:])] * again + [Action("wait", action.micro_batch, 0)]
            wanted.append(action)
        ran = [Action(span.kind, span.number, span.chunk) for span in step.spans]
        of_backwards = [
            action
            for number, action in enumerate(ran)
            if action.kind in "RFBIW" or (action.kind == "wait" and ran[number + 1].kind in "BI")
        ]
        assert of_backwards == wanted


def test_forwards_only_keep_nothing() -> None:
    schedule = families.forward_only(2, 3)
    inputs = torch.ones(3, WIDTH, dtype=torch.float64)
    queues: dict[Any, Any] = {(kind, cell): SimpleQueue() for kind in ("activation", "gradient") for cell in (0, 1)}
    for rank, program in enumerate(lower(schedule)):
        meter = Meter(Clock(torch.device("cpu")), nn.Identity(), torch.device("cpu"))
        runner = LayerRunner(rank, model(2), inputs)
        executor = Executor(held_by(schedule, rank, [runner], queues, meter), meter=meter, transports=())
        with torch.no_grad():
            executor.run(program, num_micro_batches=3)
        assert not executor._live


def test_a_step_may_leave_backwards_to_the_next_ones() -> None:
    """Micro-batches of a step that lags keep what they have, by their numbers in the run."""
    meter = Meter(Clock(torch.device("cpu")), nn.Identity(), torch.device("cpu"))
    inputs = torch.arange(4 * WIDTH, dtype=torch.float64).reshape(4, WIDTH) / 9
    runner, updates = LayerRunner(0, model(1), inputs), Ended()
    executor = Executor([HeldStage(runner, Boundary(runner, {}, meter, None), [0])], meter=meter, transports=())
    begin = [Op(LOAD, 0, 0), Op("forward", 0, 0), Op(LOAD, 1, 0), Op("forward", 1, 0), Op(RUN_BACKWARD, 0, 0)]
    late = [Op(RUN_BACKWARD, 1, 0, 1), Op("backward_complete", 1, 0, 1), Op("apply")]
    executor.run(begin, num_micro_batches=2, step=0, updates=updates, goes_on=True)
    assert list(executor._live) == [(0, 1)]
    meter.recorder.begin()
    executor.run([*late, *begin], num_micro_batches=2, step=1, updates=updates, goes_on=True)
    assert list(executor._live) == [(0, 3)]
    assert updates.calls == ["complete 0", "apply"]
    assert runner.ended == [(1, Completes.ALL)], "a step ends with the backward that completes it, not with a program"
    meter.recorder.end()
    (step,) = meter.recorder.steps()
    assert [(span.kind, span.number) for span in step.spans] == [("B", 1), ("step", -1), ("F", 2), ("F", 3), ("B", 2)]
    executor.run([*begin[:2]], num_micro_batches=2, step=0, updates=updates)
    assert list(executor._live) == [(0, 0)], "a step with a flush begins with nothing under way"
