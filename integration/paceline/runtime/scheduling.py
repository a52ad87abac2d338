"""The part of :class:`~paceline.runtime.engine.PacelineEngine` that runs a schedule: its order, its communication."""

from __future__ import annotations

import gc
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..comm.control import PeerError
from ..comm.shapes import Shapes
from ..comm.staging import Staging, staging_for
from ..comm.transport import Transport
from ..config import PacelineConfig
from ..config.partitions import resolve_partition
from ..config.schedules import resolve_schedule
from ..config.stage_counts import resolve_method
from ..planning.candidates import Candidate
from ..schedules import families
from ..schedules.lower import FLUSHED_UPDATE, UPDATE, Op, lower
from ..schedules.schedule import Schedule
from ..schedules.verify import verify
from ..supervise.watch import WATCH
from .boundary import Boundary, OwnMemory
from .controller import Controller
from .executor import Executor, HeldStage
from .rank_reports import COMPARISONS, machine_name
from .stage_runner import PlainRunner, StageRunner
from .surroundings import DeepSpeedSurroundings
from .tracer import Tracer

_LOST_CONNECTION = re.compile(r"by peer|timed? ?out|broken pipe|NCCL|remote process", re.IGNORECASE)


class Scheduling:
    """Runs any schedule that :func:`~paceline.schedules.verify.verify` accepts, with one model chunk a rank."""

    transport_order: str | None = None
    """``"free"`` or ``"paired"``; None: what suits the backend."""

    can_cut = False
    """Whether the samples of a step can be cut into micro-batches of another size."""

    def _start_scheduling(self: Any) -> None:
        # Slices of activations instead of whole ones, with tensor parallelism: an option that changes no number.
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        device = torch.device(self.device)
        staging = staging_for(device)
        # What gloo sends lies in host memory; anything else has communicators that are not safe to use at once.
        order = self.transport_order or ("free" if device.type == "cpu" or staging is not None else "paired")
        if order == "free" and device.type == "cuda":
            staging = staging or Staging(device)
        pipes = self.grid._topo.get_axis_comm_lists("pipe") if self.is_pipe_parallel else []
        self.pipe_number = next((n for n, pipe in enumerate(pipes) if self.global_rank in pipe), self.global_rank)
        self.transport = Transport(
            pipes,
            self.global_rank,
            order=order,
            device=device,
            staging=staging,
            activation_shapes=self._activation_shapes,
            announces=self.dynamic_shape,
            # DeepSpeed's own, whose other operations come between steps: a communicator costs memory on every GPU.
            group=self.grid.get_pipe_parallel_group() if pipes else None,
        )
        section = PacelineConfig.of(self._config._param_dict)
        self.pipe_ranks = next((pipe for pipe in pipes if self.global_rank in pipe), [self.global_rank])
        self.schedule_choice, _ = resolve_schedule(
            section, self.num_stages, self.micro_batches, micro_batch_size=self.micro_batch_size
        )
        self._schedule: Schedule | None = None
        self._lowered: dict[tuple[Any, ...], tuple[Schedule, tuple[Op, ...]]] = {}
        self._ahead: deque[Any] = deque()
        self._broken: str | None = None
        self._shapes_reset = 0
        sizes = self.schedule_choice.micro_batch_sizes or ()
        if set(sizes) - {self.micro_batch_size} and not self.can_cut:
            raise ValueError(
                f"paceline.pipeline.schedule.micro_batch_sizes is {list(sizes)}: this PipelineModule's data cannot be "
                f"cut otherwise than into micro-batches of {self.micro_batch_size}; leave the key out."
            )
        self.cut = self.micro_batch_size
        self.clocks: deque[tuple[float, float]] = deque(maxlen=COMPARISONS)
        """What the next stage's clock shows beyond this one's, and the latency to it, as compared last."""
        self.is_one_machine = len(set(self.control.gather(machine_name()))) == 1
        self.run_dir = Path()
        """Where recorded steps go."""
        every = section.report.trace_every
        self.tracer = None if every is None else Tracer(self, every)
        self.partition_choice, _ = resolve_partition(section, resolve_method(self._config._param_dict)[0])
        is_adaptive = self.schedule_choice.type == "adaptive"
        follows = is_adaptive or (self.partition_choice.repartition_every and self.num_stages > 1)
        self.controller = Controller(self, self.schedule_choice, self.partition_choice) if follows else None
        self._own_memory = OwnMemory(self.module.parameters())
        self.held = self._hold()
        self.executor = Executor(self.held, meter=self.meter, transports=self._transports(), enter=self._enter)

    def _hold(self: Any) -> list[HeldStage]:
        """The stages of this rank, by chunk."""
        runner = self._make_runner(self.stage_id, reduces_early=True)
        lanes = self.transport.lanes()
        ranks = [self.rank_of_stage(stage) for stage in range(self.num_stages)]
        return [HeldStage(runner, Boundary(runner, lanes, self.meter, self._own_memory), ranks)]

    def _transports(self: Any) -> Sequence[Transport]:
        return [self.transport]

    def _enter(self: Any, chunk: int) -> None:
        """The operations that follow are of a chunk."""

    def _make_runner(self: Any, stage: int, *, reduces_early: bool) -> StageRunner:
        return PlainRunner(
            stage,
            self.num_stages,
            reach=self.reach,
            around=DeepSpeedSurroundings(self, reduces_early=reduces_early),
            module=self.module,
            device=torch.device(self.device),
            next_batch=self._next_batch,
            losses=self.loss_book,
            wants=lambda: (self._compute_loss, self.eval_return_logits),
            num_micro_batches=self.gradient_accumulation_steps,
            shapes_version=lambda: self._shapes_reset,
        )

    # -- which schedule ------------------------------------------------------------------------------------------

    @property
    def schedule(self: Any) -> Schedule:
        """What the next step runs."""
        if self._schedule is None or self._schedule.num_micro_batches != self.run_micro_batches:
            self._schedule = self.schedule_choice.first(self.num_stages, self.run_micro_batches)
        return self._schedule

    @property
    def run_micro_batches(self: Any) -> int:
        """Micro-batches of a step as it is run: those that are loaded, unless the tuner cuts them otherwise."""
        return int(self.micro_batches * self.micro_batch_size // self.cut)

    def run_candidate(self: Any, candidate: Candidate) -> None:
        """Run what the tuner has chosen from the next step on."""
        self.cut = candidate.micro_batch_size
        self.set_schedule(candidate.schedule(self.num_stages, self.micro_batches * self.micro_batch_size))

    def set_schedule(self: Any, schedule: Schedule) -> None:
        """Run ``schedule`` from the next step on. Call it on all ranks, between steps.

        Raises:
            ValueError: it cannot be run: of another shape, incomplete, or with a deadlock.
        """
        is_plain = schedule.num_chunks == 1 and schedule.cells == tuple((rank,) for rank in range(schedule.num_ranks))
        if not is_plain or schedule.num_ranks != self.num_stages:
            raise ValueError(
                f"the schedule {schedule.name!r} has {schedule.num_ranks} ranks with {schedule.num_chunks} chunks: "
                f"this pipeline has {self.num_stages} stages of one chunk each."
            )
        if schedule.num_micro_batches != self.run_micro_batches:
            raise ValueError(
                f"the schedule {schedule.name!r} has {schedule.num_micro_batches} micro-batches and a step "
                f"{self.run_micro_batches}: make one for these, or change gradient_accumulation_steps."
            )
        proof = verify(schedule)
        if not proof.backward_in_order:
            raise ValueError(
                f"the schedule {schedule.name!r} runs backwards out of order: gradients are added up in the order of "
                "the micro-batches, so that no number depends on the schedule."
            )
        self._schedule = schedule

    def _train_schedule(self: Any) -> tuple[Op, ...]:
        return (*self._program(self.schedule, trains=True), *FLUSHED_UPDATE)

    def _inference_schedule(self: Any, micro_batches: int) -> tuple[Op, ...]:
        return self._program(families.forward_only(self.num_stages, micro_batches), trains=False)

    def _program(self: Any, schedule: Schedule, *, trains: bool) -> tuple[Op, ...]:
        """This rank's operations. Of schedules that are the same each time it is asked, they are kept."""
        key = (id(schedule) if trains else 0, schedule.num_micro_batches, trains)
        kept, program = self._lowered.get(key, (None, ()))
        if kept is None or (trains and kept is not schedule):
            if len(self._lowered) > 8:
                self._lowered.clear()
            program = lower(schedule, order=self.transport.order)[self.device_number]
            self._lowered[key] = schedule, program
        return program

    @property
    def device_number(self: Any) -> int:
        """Number of this rank along its pipeline."""
        return int(self.pipe_ranks.index(self.global_rank))

    def _check_whole(self: Any) -> None:
        if self._broken is not None:
            raise RuntimeError(
                f"this engine was left half-way ({self._broken}): what its ranks have sent to each other is out of "
                "step; make another engine, and load the last checkpoint."
            )

    @contextmanager
    def _recorded(self: Any) -> Iterator[None]:
        self._forget_doing()
        if self.controller is not None:
            self.controller.before_step()
        recorder = self.meter.recorder
        recorder.begin((self.schedule.name, self.cut))
        # Garbage is collected between steps, by all ranks at once; a pause within one would hold up all stages in turn.
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        except BaseException:
            recorder.drop()
            raise
        finally:
            if collects:
                gc.enable()
        recorder.end()
        if self.tracer is not None:
            self.tracer.after_step()

    # -- running it ----------------------------------------------------------------------------------------------

    def _exec_schedule(self: Any, program: tuple[Op, ...]) -> None:
        trains = program[-1].kind == UPDATE
        if trains and self.controller is not None and self.cut not in self.meter.saved_bytes:
            self.meter.measures_memory_of = self.cut
        self.loss_book.of_forwards = []
        self._own_memory.forget()
        with self._half_way("it was interrupted"):
            self.executor.run(
                program, num_micro_batches=self.run_micro_batches, updates=FlushedUpdates(self) if trains else None
            )

    @contextmanager
    def _half_way(self: Any, what: str) -> Iterator[None]:
        """What must not end in the middle: if it does, the ranks are out of step with each other."""
        self._broken = what
        try:
            yield
        except BaseException as error:
            self._broken = f"{what}; {type(error).__name__}: {error}"
            raise
        self._broken = None

    def rank_of_stage(self: Any, stage: int) -> int:
        """The global rank that has a stage of this rank's pipeline."""
        return int(self.grid.stage_to_global(stage_id=stage))

    def _forget_doing(self: Any) -> None:
        for held in self.held:
            held.boundary.doing = None

    @contextmanager
    def _naming_lost_peers(self: Any) -> Iterator[None]:
        """Say where a rank was when the connection to another broke; the backends only say that it did."""
        try:
            yield
        except RuntimeError as error:
            if not _LOST_CONNECTION.search(str(error)):
                raise
            doing = WATCH.operation or "agreeing with the other ranks"
            lane = getattr(error, "paceline_lane", None)
            if lane is not None:  # the thread of one lane, while this one may have waited for another
                doing = f"{'sending to' if lane.is_sender else 'receiving from'} rank {lane.peer}"
            elif (last := self.held[self.executor.chunk].boundary.doing) is not None:
                verb, stage = last
                doing = f"{verb} stage {stage}, rank {self.held[self.executor.chunk].ranks[stage]}"
            raise PeerError(
                f"rank {self.global_rank}, stage {self.stage_id}, lost another rank at step {self.global_steps} while "
                f"{doing}; that rank's own error, if it could still give one, is the cause ({error})"
            ) from error

    # -- what a stage of any PipelineModule passes on -------------------------------------------------------------

    def _activation_shapes(self) -> Shapes:
        return Shapes()

    def reset_activation_shape(self: Any) -> None:
        """The shapes of activations change with the next step; call it on all ranks (DeepSpeed's, for curricula)."""
        super().reset_activation_shape()  # type: ignore[misc]
        self._shapes_reset += 1

    # -- data ----------------------------------------------------------------------------------------------------

    def _open_step(self: Any, num_micro_batches: int, *, trains: bool = False) -> Any:
        """Read the whole step before it begins: a rank whose data ends, or is broken, stops all of them together."""
        error: BaseException | None = self.checkpoint_error()
        if error is None and (self.is_first_stage() or self.is_last_stage()):
            try:
                while len(self._ahead) < num_micro_batches:
                    self._ahead.append(super()._next_batch())  # type: ignore[misc]
            except Exception as caught:
                error = caught
        with self._told_once():
            try:
                self.control.settle(error, f"beginning step {self.global_steps}")
            except BaseException:
                self._ahead.clear()
                raise

    def _next_batch(self: Any) -> Any:
        return self._ahead.popleft() if self._ahead else super()._next_batch()  # type: ignore[misc]


class FlushedUpdates:
    """Updates of an engine whose steps end with a flush: DeepSpeed's own methods."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def backward_complete(self, stage: int) -> None:
        """Nothing: the step's end comes for all stages together."""

    def apply(self) -> None:
        """Nothing: an update is in the model when its step ends."""

    def reduce_tied(self) -> None:
        self._engine._exec_reduce_tied_grads()

    def reduce(self) -> None:
        self._engine._exec_reduce_grads()

    def update(self) -> None:
        self._engine._exec_optimizer_step()
