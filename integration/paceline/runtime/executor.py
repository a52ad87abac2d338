"""Run a rank's program: one interpreter for the operations of every schedule.

With a flush or without one, with one held stage or several, forwards only or with backwards: a program is a list of
:class:`~paceline.schedules.lower.Op`, and everything that differs between schedules is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from ..comm.transport import Transport
from ..optim.gradient_buckets import Completes
from ..optim.linear_layers import Deferral, Deferred
from ..schedules.keeping import Cell
from ..schedules.lower import (
    APPLY,
    COMPLETE,
    LOAD,
    POST_ACTIVATION,
    POST_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    RUN_BACKWARD,
    RUN_BACKWARD_INPUT,
    RUN_BACKWARD_WEIGHT,
    RUN_FORWARD,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    UPDATE,
    WAIT_ACTIVATION,
    WAIT_GRADIENT,
    Op,
)
from ..schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from ..supervise.watch import DEVICE, EVERYONE, WATCH
from .boundary import Boundary, detached
from .early_room import EarlyRoom, Extent
from .meter import Meter
from .stage_runner import Live, StageRunner

BACKWARDS = frozenset((RUN_BACKWARD, RUN_BACKWARD_INPUT))
"""Operations that give the gradients of a stage's inputs."""

ISSUED = frozenset((POST_ACTIVATION, SEND_ACTIVATION, POST_GRADIENT, SEND_GRADIENT))
"""Operations that a transport may collect, to issue them together before the next one of another kind."""


def completing_ops(ops: Iterable[Op], *, is_split: bool) -> dict[Op, Completes]:
    """Operations of a step's program that complete gradients of their chunk.

    Args:
        is_split: whether backwards of the inputs leave gradients of weights for later; else they are whole ones.
    """
    with_inputs, left = dict[int, Op](), dict[int, Op]()
    for op in ops:
        if op.kind in BACKWARDS:
            with_inputs[op.chunk] = op
        if op.kind in (RUN_BACKWARD, RUN_BACKWARD_WEIGHT if is_split else RUN_BACKWARD_INPUT):
            left[op.chunk] = op
    found = dict.fromkeys(with_inputs.values(), Completes.WITH_INPUTS)
    for op in left.values():
        found[op] = found.get(op, Completes.NOTHING) | Completes.LEFT
    return found


class Updates(Protocol):
    """Makes updates of gradients, by the operations of a program."""

    def backward_complete(self, stage: int) -> None:
        """The last backward of a step through ``stage`` has run, in a program without a flush."""

    def apply(self) -> None:
        """Put the update that was made of an earlier step into the model."""

    def reduce_tied(self) -> None: ...

    def reduce(self) -> None: ...

    def update(self) -> None: ...


@dataclass(frozen=True)
class HeldStage:
    """A stage that this rank holds, as one of its chunks.

    Args:
        ranks: global rank of each stage, in the direction of the chunk.
        next_chunk, previous_chunk: chunk of this rank that holds the neighbouring stage, if one does.
    """

    runner: StageRunner
    boundary: Boundary
    ranks: Sequence[int]
    next_chunk: int | None = None
    previous_chunk: int | None = None

    def operations(self) -> dict[str, tuple[tuple[str, int | None], Callable[[Live, int], None]]]:
        """By kind: what others are told if it hangs, with the rank that it waits for; and what runs it."""
        runner, boundary = self.runner, self.boundary
        before, behind = runner.stage - 1, runner.stage + 1
        return {
            LOAD: (("loading a micro-batch", DEVICE), runner.load),
            RUN_FORWARD: (("computing forward", DEVICE), runner.forward),
            RUN_BACKWARD: (("computing backward", DEVICE), runner.backward),
            RUN_BACKWARD_INPUT: (("computing gradients of inputs", DEVICE), runner.backward),
            POST_ACTIVATION: (
                self._with("preparing to receive activations from", before),
                boundary.post_activation,
            ),
            WAIT_ACTIVATION: (self._with("receiving activations from", before), boundary.wait_activation),
            SEND_ACTIVATION: (self._with("sending activations to", behind), boundary.send_activation),
            POST_GRADIENT: (self._with("preparing to receive gradients from", behind), boundary.post_gradient),
            WAIT_GRADIENT: (self._with("receiving gradients from", behind), boundary.wait_gradient),
            SEND_GRADIENT: (self._with("sending gradients to", before), boundary.send_gradient),
        }

    def _with(self, verb: str, stage: int) -> tuple[str, int | None]:
        return f"{verb} stage {stage}", self.ranks[stage] if 0 <= stage < len(self.ranks) else None

    def ends_with(self, *, trains: bool) -> Collection[str]:
        """Kinds of the operation after which nothing of a micro-batch is kept but what weights' gradients need."""
        runner = self.runner
        if trains:
            return BACKWARDS if runner.is_first or self.previous_chunk is not None else {SEND_GRADIENT}
        return {RUN_FORWARD} if runner.is_last or self.next_chunk is not None else {SEND_ACTIVATION}


class Executor:
    """Runs programs over the stages that this rank holds.

    Args:
        held: the stages, by chunk.
        meter: what computations take.
        transports: issue what they have collected before a rank computes or waits.
        deferral: has the stages' layers leave gradients of weights for later; for programs with split backwards.
        early_room: tells in which steps activations are computed again before their gradient is there; None: in none.
    """

    def __init__(
        self,
        held: Sequence[HeldStage],
        *,
        meter: Meter,
        transports: Sequence[Transport],
        deferral: Deferral | None = None,
        early_room: EarlyRoom | None = None,
    ) -> None:
        self.held = tuple(held)
        self._meter, self._transports = meter, tuple(transports)
        self._operations = [stage.operations() for stage in self.held]
        self._live: dict[tuple[int, int], Live] = {}
        self._deferral, self._deferred = deferral, dict[tuple[int, int], Deferred]()
        self.early_room = early_room
        self._checkpointed = [False] * len(self.held)
        self._kept: Mapping[Cell, int] = {}
        self._counted: set[int] = set()
        """Chunks of which the bytes of a micro-batch of the step are counted: that whose forward is measured."""
        self.recomputes_early = False
        """Whether the step that runs, or ran last, computes activations again before their gradient is there."""
        self.chunk = 0
        """The chunk whose operations run, or ran last."""
        self.is_last_backward = False
        """Whether the backward that runs now is the last of its step on its stage."""

    def run(
        self,
        program: Iterable[Op],
        *,
        num_micro_batches: int,
        step: int = 0,
        updates: Updates | None = None,
        goes_on: bool = False,
    ) -> None:
        """Run one step, or what is left of earlier ones.

        Args:
            num_micro_batches: M of a step: micro-batch m of step n has the number n · M + m.
            step: number of the step that ops without a lag are of.
            updates: None: forwards only.
            goes_on: micro-batches of earlier programs are under way. Steps end where the program says so, on each stage
                for itself; otherwise all end with the program.
        """
        ops = tuple(program)
        trains = updates is not None
        if not goes_on:
            self._live.clear()
            self._deferred.clear()
        if self._deferral is not None:
            # Layers are timed in whole backwards, which give the same gradients.
            splits = any(op.kind == RUN_BACKWARD_INPUT for op in ops)
            self._deferral.is_on = splits and not self._meter.times_single_layers
        self._find_checkpoints(ops, has_early=trains and not goes_on)
        self._meter.measured_numbers = self._largest(ops) if trains and not goes_on else {}
        ending = (COMPLETE,) if goes_on else BACKWARDS
        last = {(op.chunk, op.lag): op.micro_batch for op in ops if op.kind in ending}
        completing = {} if goes_on else completing_ops(ops, is_split=self._splits)
        ends = [stage.ends_with(trains=trains) for stage in self.held]
        live_of, doing = self._live, WATCH.doing
        self.chunk = 0
        for op in ops:
            kind, micro_batch, chunk, lag = op
            if chunk < 0 or kind == COMPLETE:
                assert updates is not None
                self._update(kind, chunk, updates)
                continue
            self.chunk = chunk
            if kind == RUN_BACKWARD_WEIGHT:
                number = (step - lag) * num_micro_batches + micro_batch
                self._backward_weight(chunk, number, completing.get(op, Completes.NOTHING))
                continue
            told, run = self._operations[chunk][kind]
            doing(*told)
            if kind not in ISSUED:
                self._flush()
            number = (step - lag) * num_micro_batches + micro_batch
            live = live_of.get((chunk, number))
            if live is None:
                live = live_of[chunk, number] = Live()
            if kind in BACKWARDS:
                is_last = last.get((chunk, lag)) == micro_batch
                completes = Completes.ALL if goes_on and is_last else completing.get(op, Completes.NOTHING)
                self._backward(op, live, number, completes, is_last=is_last)
            elif kind == RUN_FORWARD:
                self._forward(chunk, live, number, keeps=self._kept.get((chunk, micro_batch), 0))
            else:
                checkpoints = live.checkpoints if self.recomputes_early and kind == WAIT_GRADIENT else None
                if checkpoints is not None and checkpoints.is_waiting:
                    doing("computing activations again", DEVICE)
                    self._meter.compute(RECOMPUTE, number, checkpoints.recompute, chunk)
                    doing(*told)
                run(live, number)
            if kind in ends[chunk]:
                del live_of[chunk, number]
        for transport in self._transports:
            transport.finish()
        self.chunk = 0

    def _largest(self, program: Sequence[Op]) -> dict[int, int]:
        """By chunk of which it is not known what micro-batches keep, the largest one of the step."""
        found: dict[int, tuple[Extent, int]] = {}
        lacking = {
            chunk
            for chunk, again in enumerate(self._checkpointed)
            if self._meter.lacks_memory_of(chunk, splits=self._splits, recomputes=again)
        }
        for kind, number, chunk, _ in program if lacking else ():
            if kind == RUN_FORWARD and chunk in lacking:
                extent = self.held[chunk].runner.extent(number)
                if extent is not None and (chunk not in found or extent > found[chunk][0]):
                    found[chunk] = extent, number
        return {chunk: number for chunk, (_, number) in found.items()}

    def _find_checkpoints(self, program: Sequence[Op], *, has_early: bool) -> None:
        """Which chunks have activations that may be computed again early in this step, whether they are, and what keeps
        them instead."""
        room = self.early_room if has_early else None
        runners = [stage.runner for stage in self.held]
        self._checkpointed = [room is not None and runner.may_keep() for runner in runners]
        self.recomputes_early, self._kept = False, {}
        self._counted.clear()
        if room is not None and any(self._checkpointed):
            self.recomputes_early, self._kept = room.choose(program, runners[0].extent())

    def _forward(self, chunk: int, live: Live, number: int, *, keeps: int) -> None:
        held = self.held[chunk]
        if self._checkpointed[chunk]:
            counts = self._meter.counts_recomputed(chunk) and self._meter.is_measured(number, chunk)
            counts = counts and chunk not in self._counted
            if counts:
                self._counted.add(chunk)
            if counts or keeps or self.recomputes_early:
                live.checkpoints = held.runner.checkpoints(counts=counts, keeps=0 if counts else keeps)

        def run() -> None:
            held.boundary.unpack_activation(live, number)
            with nullcontext() if live.checkpoints is None else live.checkpoints.collecting():
                held.runner.forward(live, number)
            held.boundary.pack_activation(live)

        self._meter.compute(FORWARD, number, run, chunk)
        self._meter.may_defer(held.runner.most_deferred_bytes, chunk)
        if held.next_chunk is not None:
            behind = self._live[held.next_chunk, number] = Live()
            self.held[held.next_chunk].runner.arrived(behind, number, detached(held.runner.leaving(live)))

    def _backward(self, op: Op, live: Live, number: int, completes: Completes, *, is_last: bool) -> None:
        chunk, held = op.chunk, self.held[op.chunk]
        runner = held.runner
        self.is_last_backward = is_last
        is_whole = op.kind == RUN_BACKWARD or not self._splits

        def run() -> None:
            if runner.runs_backward:
                held.boundary.unpack_gradient(live)
                checkpoints, live.checkpoints = live.checkpoints, None
                with nullcontext() if checkpoints is None else checkpoints.around_backward():
                    runner.backward(live, number, completes)
                if checkpoints is not None:
                    extent, layers = runner.extent(number), max(checkpoints.num_layers, 1)
                    self._meter.recomputed(checkpoints.num_bytes, extent, chunk, layers)
                held.boundary.pack_gradient(live)

        def run_input() -> None:
            assert self._deferral is not None
            with self._deferral.collecting() as deferred:
                run()
            self._deferred[chunk, number] = deferred
            if self._meter.is_measured(number, chunk):
                self._meter.deferred(lambda: deferred.num_bytes, chunk)

        if is_whole:
            self._meter.compute(BACKWARD, number, run, chunk)
        else:
            self._meter.compute(BACKWARD_INPUT, number, run_input, chunk)
        self.is_last_backward = False
        if held.previous_chunk is not None and runner.sends_gradients:
            self._live[held.previous_chunk, number].gradients = runner.leaving_gradients(live)

    @property
    def _splits(self) -> bool:
        """Whether backwards of the inputs leave something for later in the step that runs."""
        return self._deferral is not None and self._deferral.is_on

    def _backward_weight(self, chunk: int, number: int, completes: Completes) -> None:
        if not self._splits:
            return
        WATCH.doing("computing gradients of weights", DEVICE)
        self._flush()
        deferred, runner = self._deferred.pop((chunk, number)), self.held[chunk].runner
        self._meter.compute(BACKWARD_WEIGHT, number, lambda: runner.backward_weight(deferred, completes), chunk)

    def _update(self, kind: str, chunk: int, updates: Updates) -> None:
        if kind == COMPLETE:
            updates.backward_complete(self.held[chunk].runner.stage)
            return
        told, run, booked = {
            APPLY: ("waiting for an update", updates.apply, "step"),
            REDUCE_TIED: ("reducing tied gradients", updates.reduce_tied, "reduce"),
            REDUCE: ("reducing gradients", updates.reduce, "reduce"),
            UPDATE: ("stepping the optimizer", updates.update, "step"),
        }[kind]
        WATCH.doing(told, EVERYONE)
        self._flush()
        self._meter.update(booked, run)

    def _flush(self) -> None:
        for transport in self._transports:
            transport.flush()
