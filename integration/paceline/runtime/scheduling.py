"""The part of :class:`~paceline.runtime.engine.PacelineEngine` that runs a schedule: its order, its communication."""

from __future__ import annotations

import gc
import re
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import schedule as instructions
from torch import Tensor

from ..comm.control import PeerError
from ..comm.shapes import Meta, Shapes, Value, meta_of, tensors_of
from ..comm.staging import Staging, staging_for
from ..comm.transport import Lane, Transport
from ..config import PacelineConfig
from ..config.partitions import resolve_partition
from ..config.schedules import resolve_schedule
from ..config.stage_counts import resolve_method
from ..planning.candidates import Candidate
from ..schedules import families
from ..schedules.schedule import BACKWARD, FORWARD, Schedule
from ..schedules.verify import verify
from ..supervise.watch import DEVICE, EVERYONE, WATCH
from .controller import Controller
from .lowering import LoweredSchedule, PostActivation, PostGrad
from .rank_reports import COMPARISONS, WAIT, machine_name
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
        self._at = Here(**self.transport.lanes())
        section = PacelineConfig.of(self._config._param_dict)
        self.pipe_ranks = next((pipe for pipe in pipes if self.global_rank in pipe), [self.global_rank])
        self.schedule_choice, _ = resolve_schedule(
            section, self.num_stages, self.micro_batches, micro_batch_size=self.micro_batch_size
        )
        self._schedule: Schedule | None = None
        self._lowered: dict[tuple[str, int, bool], LoweredSchedule] = {}
        self._ahead: deque[Any] = deque()
        self._broken: str | None = None
        self._gradients_are_there = False
        self._trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
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

    def _train_schedule(self: Any) -> LoweredSchedule:
        return self._lower(self.schedule, trains=True)

    def _inference_schedule(self: Any, micro_batches: int) -> LoweredSchedule:
        return self._lower(families.forward_only(self.num_stages, micro_batches), trains=False)

    def _lower(self: Any, schedule: Schedule, *, trains: bool) -> LoweredSchedule:
        key = (id(schedule) if trains else 0, schedule.num_micro_batches, trains)
        found = self._lowered.get(key)
        if found is None or (trains and found.schedule is not schedule):
            if len(self._lowered) > 8:
                self._lowered.clear()
            found = LoweredSchedule(schedule, self.stage_id, order=self.transport.order, trains=trains)
            self._lowered[key] = found
        return found

    def _check_whole(self: Any) -> None:
        if self._broken is not None:
            raise RuntimeError(
                f"this engine was left half-way ({self._broken}): what its ranks have sent to each other is out of "
                "step; make another engine, and load the last checkpoint."
            )

    @contextmanager
    def _recorded(self: Any) -> Iterator[None]:
        self._at.doing = None
        if self.controller is not None:
            self.controller.before_step()
        self.recorder.begin((self.schedule.name, self.cut))
        # Garbage is collected between steps, by all ranks at once; a pause within one would hold up all stages in turn.
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        except BaseException:
            self.recorder.drop()
            raise
        finally:
            if collects:
                gc.enable()
        self.recorder.end()
        if self.tracer is not None:
            self.tracer.after_step()

    # -- running it ----------------------------------------------------------------------------------------------

    def _exec_schedule(self: Any, pipe_schedule: LoweredSchedule) -> None:
        with self._half_way("it was interrupted"):
            self._run(pipe_schedule)

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

    def _run(self: Any, pipe_schedule: LoweredSchedule) -> None:
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self.fwd_outputs: list[Tensor] = []
        self._backwards = 0
        self._gradients_are_there = False
        clock, recorder, transport, doing = self.clock, self.recorder, self.transport, WATCH.doing
        timer = self.layer_timer
        measures_memory = self.controller is not None and torch.is_grad_enabled() and self.cut not in self.saved_bytes
        for told, flushes, timed, run, arguments in self._bind(pipe_schedule):
            doing(*told)
            if flushes:
                transport.flush()
            if timed is None:
                run(**arguments)
                continue
            if "micro_batch" not in arguments:
                start = clock.now()
                run()
                recorder.add(timed, -1, start, clock.now())
                continue
            start = clock.now()
            if timer is not None:
                timer.begin(timed)
            if measures_memory:
                self._measure_memory(run, arguments)
                recorder.leave_out(timed, arguments["micro_batch"])
                measures_memory = False
            else:
                run(**arguments)
            if timer is not None:
                timer.end(timed)
            end = clock.now()
            clock.add_compute(start, end)
            recorder.add(timed, arguments["micro_batch"], start, end)
        transport.finish()

    def _bind(self: Any, pipe_schedule: LoweredSchedule) -> list[Any]:
        """The instructions with what runs them, found by name: the stock engine's table holds its own functions."""
        if pipe_schedule.bound is None:
            kinds = [(type(command), command.kwargs) for commands in pipe_schedule for command in commands]
            pipe_schedule.bound = [
                (self._told[k], k not in self._ISSUED, self._TIMED.get(k), getattr(self, self._NAMES[k]), arguments)
                for k, arguments in kinds
            ]
        return pipe_schedule.bound

    _NAMES: ClassVar = {
        instructions.LoadMicroBatch: "_exec_load_micro_batch",
        PostActivation: "_exec_post_activations",
        instructions.RecvActivation: "_exec_recv_activations",
        instructions.ForwardPass: "_exec_forward_pass",
        instructions.SendActivation: "_exec_send_activations",
        PostGrad: "_exec_post_grads",
        instructions.RecvGrad: "_exec_recv_grads",
        instructions.BackwardPass: "_exec_backward_pass",
        instructions.SendGrad: "_exec_send_grads",
        instructions.ReduceTiedGrads: "_exec_reduce_tied_grads",
        instructions.ReduceGrads: "_exec_reduce_grads",
        instructions.OptimizerStep: "_exec_optimizer_step",
    }
    _ISSUED: ClassVar = {PostActivation, instructions.SendActivation, PostGrad, instructions.SendGrad}
    _TIMED: ClassVar = {
        instructions.ForwardPass: FORWARD,
        instructions.BackwardPass: BACKWARD,
        instructions.ReduceTiedGrads: "reduce",
        instructions.ReduceGrads: "reduce",
        instructions.OptimizerStep: "step",
    }

    def _what_instructions_do(self: Any) -> dict[type, tuple[str, int | None]]:
        """For each instruction what others are told if it hangs, and the rank that it waits for."""

        def with_stage(verb: str, stage: int) -> tuple[str, int | None]:
            there = 0 <= stage < self.num_stages
            return f"{verb} stage {stage}", self.rank_of_stage(stage) if there else None

        return {
            instructions.LoadMicroBatch: ("loading a micro-batch", DEVICE),
            instructions.ForwardPass: ("computing forward", DEVICE),
            instructions.BackwardPass: ("computing backward", DEVICE),
            instructions.SendActivation: with_stage("sending activations to", self.next_stage),
            PostActivation: with_stage("preparing to receive activations from", self.prev_stage),
            instructions.RecvActivation: with_stage("receiving activations from", self.prev_stage),
            instructions.SendGrad: with_stage("sending gradients to", self.prev_stage),
            PostGrad: with_stage("preparing to receive gradients from", self.next_stage),
            instructions.RecvGrad: with_stage("receiving gradients from", self.next_stage),
            instructions.ReduceTiedGrads: ("reducing tied gradients", EVERYONE),
            instructions.ReduceGrads: ("reducing gradients", EVERYONE),
            instructions.OptimizerStep: ("stepping the optimizer", EVERYONE),
        }

    def rank_of_stage(self: Any, stage: int) -> int:
        """The global rank that has a stage of this rank's pipeline."""
        return int(self.grid.stage_to_global(stage_id=stage))

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
            elif self._at.doing is not None:
                verb, stage = self._at.doing
                doing = f"{verb} stage {stage}, rank {self.rank_of_stage(stage)}"
            raise PeerError(
                f"rank {self.global_rank}, stage {self.stage_id}, lost another rank at step {self.global_steps} while "
                f"{doing}; that rank's own error, if it could still give one, is the cause ({error})"
            ) from error

    # -- between stages ------------------------------------------------------------------------------------------

    def _exec_post_activations(self: Any, buffer_id: int, micro_batch: int) -> None:
        self._at.set("receiving from", self.prev_stage)
        self._at.activations_in.post(micro_batch, self._activation_key(micro_batch))

    def _exec_recv_activations(self: Any, buffer_id: int, micro_batch: int) -> None:
        self._at.set("receiving from", self.prev_stage)
        self._arrived(buffer_id, micro_batch, self._take(self._at.activations_in, micro_batch))

    def _exec_send_activations(self: Any, buffer_id: int, micro_batch: int) -> None:
        self._at.set("sending to", self.next_stage)
        value = self._leaving(buffer_id)
        tensors_of(value, f"the last layer of stage {self.stage_id}")  # refuses what cannot be sent
        if not (torch.is_grad_enabled() and self._runs_backward):
            # A layer may give out the same memory again, which then has yet to be sent.
            value = tuple(tensor.clone() for tensor in value) if isinstance(value, tuple) else value.clone()
            self.pipe_buffers["outputs"][buffer_id] = self.pipe_buffers["inputs"][buffer_id] = None
        self._at.activations_out.send(micro_batch, self._activation_key(micro_batch), value)

    def _exec_post_grads(self: Any, buffer_id: int, micro_batch: int) -> None:
        if not self._runs_backward:
            return
        self._at.set("receiving from", self.next_stage)
        self._at.gradients_in.post(micro_batch, self._gradient_meta(buffer_id))

    def _exec_recv_grads(self: Any, buffer_id: int, micro_batch: int) -> None:
        if not self._runs_backward:
            return
        self._at.set("receiving from", self.next_stage)
        self._gradients_arrived(buffer_id, self._take(self._at.gradients_in, micro_batch))

    def _exec_send_grads(self: Any, buffer_id: int, micro_batch: int) -> None:
        if not self._sends_gradients:
            self.pipe_buffers["inputs"][buffer_id] = None
            return
        self._at.set("sending to", self.prev_stage)
        value = self._own(self._leaving_gradients(buffer_id))
        self._at.gradients_out.send(micro_batch, meta_of(value), value)
        self.pipe_buffers["inputs"][buffer_id] = None

    def _take(self: Any, lane: Lane, micro_batch: int) -> Value:
        start = self.clock.now()
        value = lane.take(micro_batch)
        end = self.clock.now()
        self.clock.add_idle(start, end)
        self.recorder.add(WAIT, micro_batch, start, end)
        return value

    def _own(self: Any, value: Value) -> Value:
        """``value`` in memory to which nobody writes while it is sent.

        Autograd may let a parameter's first gradient share the memory of an input's, and adds the next one to it.
        """
        if self._gradients_are_there:
            return value
        own, self._gradients_are_there = set(), True
        for parameter in self._trained:
            if parameter.grad is None:
                self._gradients_are_there = False
            else:
                own.add(parameter.grad.untyped_storage().data_ptr())
        if isinstance(value, tuple):
            return tuple(t.clone() if t.untyped_storage().data_ptr() in own else t for t in value)
        return value.clone() if value.untyped_storage().data_ptr() in own else value

    # -- what a stage of any PipelineModule passes on -------------------------------------------------------------

    def _activation_shapes(self) -> Shapes:
        return Shapes()

    def _activation_key(self: Any, micro_batch: int) -> Hashable:
        """Micro-batches with the same key have activations of the same shapes on every edge."""
        return self._shapes_reset

    def reset_activation_shape(self: Any) -> None:
        """The shapes of activations change with the next step; call it on all ranks (DeepSpeed's, for curricula)."""
        super().reset_activation_shape()  # type: ignore[misc]
        self._shapes_reset += 1

    def _leaving(self: Any, buffer_id: int) -> Value:
        value: Value = self.pipe_buffers["outputs"][buffer_id]
        return value

    def _arrived(self: Any, buffer_id: int, micro_batch: int, value: Value) -> None:
        for tensor in value if isinstance(value, tuple) else (value,):
            needs = tensor.is_floating_point() and torch.is_grad_enabled() and self._sends_gradients
            tensor.requires_grad_(needs)
        self.pipe_buffers["inputs"][buffer_id] = value

    def _gradient_meta(self: Any, buffer_id: int) -> Meta:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if isinstance(outputs, tuple):
            return meta_of(tuple(tensor for tensor in outputs if tensor.is_floating_point()))
        return meta_of(outputs)

    def _leaving_gradients(self: Any, buffer_id: int) -> Value:
        inputs = self.pipe_buffers["inputs"][buffer_id]
        if not isinstance(inputs, tuple):
            return gradient_of(inputs)
        return tuple(gradient_of(tensor) for tensor in inputs if tensor.is_floating_point())

    def _gradients_arrived(self: Any, buffer_id: int, value: Value) -> None:
        self.grad_layer = value

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


@dataclass
class Here:
    """Where a rank is, and its lanes. (To set an attribute of an engine, a module, takes as long as ten of these.)"""

    activations_in: Any = None
    activations_out: Any = None
    gradients_in: Any = None
    gradients_out: Any = None
    doing: tuple[str, int] | None = None

    def set(self, verb: str, stage: int) -> None:
        self.doing = (verb, stage)


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient of what came from another stage; zeros where the loss does not depend on it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
