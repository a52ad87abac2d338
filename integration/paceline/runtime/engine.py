"""DeepSpeed's pipeline engine with the optimizer of :mod:`paceline.optim` and checkpoints that fit any shape."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from torch import Tensor, nn

from ..averaging.averager import Averager, make_averager
from ..averaging.masters_by_name import PipelineMasters
from ..checkpoint import CheckpointError
from ..comm.control import ControlPlane
from ..comm.shapes import Shapes
from ..comm.transport import Transport
from ..config import RunPlan
from ..hf.quantised import quantisation_of
from ..hf.weights import is_pretrained
from ..measure.clock import Clock
from ..optim.sharded import ShardedOptimizer
from ..optim.step_options import StepOptions
from ..planning.candidates import Candidate
from ..planning.tuning import DecisionLog
from ..report.run_records import LOADS
from ..schedules.lower import UPDATE, Op
from ..schedules.schedule import Schedule
from ..state.named import is_copy, link_full_access, names_of, tied_weights
from ..state.rank_states import ParameterGroups, RandomStates, SavedPart, SchedulerState
from ..supervise.watch import WATCH
from .boundary import Boundary, OwnMemory
from .checkpointer import Checkpointer
from .executor import Executor, HeldStage
from .expert_part import Experts, SharedExperts
from .half_way import HalfWay
from .lost_peers import forget_messages, naming_lost_peers
from .meter import Meter
from .migration import Migration, Migrator, Seat, StageParameters
from .movable_layers import Layers
from .natural_gradient_part import NaturalGradientPart, agreed_limits, loss_scale_of
from .optimizer_setup import basic_optimizer, check_own_parameters, step_options
from .pipeline_links import Links
from .pipeline_tuning import pipeline_controller
from .plain_layers import PlainLayers
from .programs import Programs
from .rank_reports import ReportGatherer
from .rate import check_scheduler_object
from .reach import Reach
from .stage_runner import LossBook, PlainRunner, StageRunner
from .surroundings import DeepSpeedSurroundings
from .tracer import TimelineWriter, Tracer
from .updates import FlushedUpdates

if TYPE_CHECKING:
    from ..moe.hf_experts import HFExpertLayer
    from ..moe.rebalancer import Rebalancer
    from ..planning.experts import Placement

_Asks = Callable[[nn.Parameter], bool]

TIMES_EVERY = 10
"""Steps between lines of ``wall_clock_breakdown``: what DeepSpeed's documents give for ``steps_per_print``."""


def _of_loss_book(name: str) -> Any:
    """A property of the engine that is an attribute of its :class:`LossBook`."""

    def read(engine: PacelineEngine) -> Any:
        return getattr(engine.loss_book, name)

    def write(engine: PacelineEngine, value: Any) -> None:
        setattr(engine.loss_book, name, value)

    return property(read, write)


class PacelineEngine(PipelineEngine):
    """Runs any :class:`deepspeed.pipe.PipelineModule`, as :class:`PipelineEngine` does.

    * Any schedule that can be proven to work, with transfers beside the computation (:meth:`set_schedule`).
    * One optimizer for ZeRO 0 and 1 and every precision (:class:`~paceline.optim.sharded.ShardedOptimizer`): stages may
      have different parameter groups (stock: they hang), the norm is that of all stages (stock: of the first, in fp32).
    * Layers move from stage to stage between steps, with everything that belongs to them (:meth:`repartition`).
    * Checkpoints are complete or not there, written in the background, and load into any shape.
    * A step's time is split into compute, communication and idle (:attr:`clock`).
    """

    optimizer: ShardedOptimizer
    data_iterator: Any
    natural_gradient: NaturalGradientPart | None = None
    """None: gradients are ordinary ones."""
    averager: Averager | None = None
    """None: this job is alone."""

    transport_order: str | None = None
    """``"free"`` or ``"paired"``; None: what suits the backend."""

    can_cut = False
    """Whether the samples of a step can be cut into micro-batches of another size."""

    def __init__(self, *args: Any, plan: RunPlan, **kwargs: Any) -> None:
        self.plan = plan
        model = kwargs["model"]
        self.control = getattr(model, "control", None) or ControlPlane.create(
            model.num_stages, pipes=model._grid._topo.get_axis_comm_lists("pipe")
        )
        self.loss_book = LossBook()
        self.reach = Reach(model.num_stages)
        self.half_way = HalfWay()
        self.run_dir = Path()
        """Where recorded steps go."""
        self.decisions = DecisionLog()
        """What was decided about schedule, partition and experts."""
        self._ahead: deque[Any] = deque()
        self._shapes_reset = 0
        self.shared_experts = SharedExperts.of(model)
        super().__init__(*args, **kwargs)
        self.experts = self._make_experts()
        self._start_natural_gradient()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.averager = self._make_averager(self.optimizer)
        self.clock = Clock(torch.device(self.device))
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.clock = self.clock
        self.meter = Meter(self.clock, self.module, self.clock.device)
        self.layers = self._make_layers()
        self._check_micro_batch_sizes()
        self._connect()
        self._start_scheduling()
        self.migrator = self._make_migrator()
        self.checkpointer = self._make_checkpointer()
        self._start_partition()

    # -- the pipeline ----------------------------------------------------------------------------------------------

    def _routes_of_directions(self) -> tuple[tuple[int, ...], ...]:
        """Device of each stage, one route a direction."""
        return (tuple(range(self.num_stages)),)

    def _connect(self) -> None:
        """Make lanes to the neighbours, and what computes the stages of this rank. Collective."""
        # Slices of activations instead of whole ones, with tensor parallelism: an option that changes no number.
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        pipes = self.grid._topo.get_axis_comm_lists("pipe") if self.is_pipe_parallel else []
        self.links = Links(
            pipes,
            self.global_rank,
            torch.device(self.device),
            routes=self._routes_of_directions(),
            order=self.transport_order,
            activation_shapes=self._activation_shapes,
            announces=self.dynamic_shape,
            # DeepSpeed's own, whose other operations come between steps: a communicator costs memory on every GPU.
            group=self.grid.get_pipe_parallel_group() if pipes else None,
        )
        self._own_memory = OwnMemory(self.module.parameters())
        self.held = self._hold()
        self.executor = Executor(self.held, meter=self.meter, transports=self.links.transports, enter=self._enter)

    def _hold(self) -> list[HeldStage]:
        """The stages of this rank, by chunk: one of each direction."""
        held = []
        for direction, transport in enumerate(self.links.transports):
            runner = self._make_runner(self.links.stage(direction))
            boundary = Boundary(runner, transport.lanes(), self.meter, self._gradients_to_send())
            held.append(HeldStage(runner, boundary, self.links.ranks_of_stages(direction)))
        return held

    def _gradients_to_send(self) -> OwnMemory | None:
        """Gives gradients memory of their own; None: they have it."""
        return self._own_memory

    def _enter(self, chunk: int) -> None:
        """The operations that follow are of a chunk."""

    def _make_runner(self, stage: int) -> StageRunner:
        return PlainRunner(
            stage,
            self.num_stages,
            reach=self.reach,
            around=DeepSpeedSurroundings(self, reduces_early=True),
            module=self.module,
            device=torch.device(self.device),
            next_batch=self._next_batch,
            losses=self.loss_book,
            wants=lambda: (self._compute_loss, self.eval_return_logits),
            num_micro_batches=self.gradient_accumulation_steps,
            shapes_version=lambda: self._shapes_reset,
        )

    def _activation_shapes(self) -> Shapes:
        return Shapes()

    @property
    def transport(self) -> Transport:
        """Lanes of the first direction."""
        return self.links.transports[0]

    @property
    def pipe_ranks(self) -> Sequence[int]:
        """Global ranks of this pipeline, by device."""
        return self.links.ranks

    @property
    def pipe_number(self) -> int:
        """Number of this pipeline among those side by side."""
        return self.links.pipe_number

    def rank_of_stage(self, stage: int) -> int:
        """The global rank that has a stage of this rank's pipeline."""
        return int(self.grid.stage_to_global(stage_id=stage))

    # -- its schedule ----------------------------------------------------------------------------------------------

    def _check_micro_batch_sizes(self) -> None:
        sizes = self.plan.schedule.micro_batch_sizes or ()
        if set(sizes) - {self.micro_batch_size} and not self.can_cut:
            raise ValueError(
                f"paceline.pipeline.schedule.micro_batch_sizes is {list(sizes)}: this PipelineModule's data cannot be "
                f"cut otherwise than into micro-batches of {self.micro_batch_size}; leave the key out."
            )
        self.cut = self.micro_batch_size

    def _start_scheduling(self) -> None:
        """Begin to follow the cluster, if the JSON asks for it. Collective."""
        self.programs = Programs(self.plan.schedule, self.num_stages, self.links.device_number, self.links.order)
        self.reports = ReportGatherer(
            *(self.control, self.meter, torch.device(self.device)),
            pipe_ranks=self.pipe_ranks,
            stage=lambda: self.stage_id,
            replica=self.pipe_number,
            transport=self.transport,
            module=self.module,
            optimizer=self.optimizer,
        )
        self.timelines = TimelineWriter(
            step=lambda: int(self.global_steps),
            schedule=lambda: self.schedule,
            micro_batch_size=lambda: int(self.cut),
            folder=lambda: self.run_dir,
        )
        every = self.plan.report.trace_every
        self.tracer = None if every is None else self._make_tracer(every)
        self.controller = pipeline_controller(
            *(
                self.plan.schedule,
                self.plan.partition_choice,
                self,
                self.layers,
                self.meter,
                self.reports,
                self.control,
                self.decisions,
                self.timelines,
            )
        )

    def _make_tracer(self, every: int) -> Tracer:
        return Tracer(every, self.num_stages, self.reports, self.timelines, is_first=self.global_rank == 0)

    def keep_records(self, run_dir: Path, num_steps: int) -> None:
        """Write timelines and loads of experts into a run's folder from now on, as far as the plan asks for them.

        Args:
            num_steps: of the run, whose report shows the last step.
        """
        self.run_dir = run_dir
        self.experts.write_loads(run_dir / LOADS)
        self.timelines.records_switches = self.plan.report.html
        if self.plan.report.html and self.controller is None and self.tracer is None and self.timelines.is_drawn:
            self.tracer = self._make_tracer(num_steps)

    @property
    def schedule(self) -> Schedule:
        """Schedule of the next step."""
        return self.programs.schedule(self.run_micro_batches)

    @property
    def run_micro_batches(self) -> int:
        """Micro-batches of a step as it is run: those that are loaded, unless the tuner cuts them otherwise."""
        return int(self.micro_batches * self.micro_batch_size // self.cut)

    def set_schedule(self, schedule: Schedule) -> None:
        """Run ``schedule`` from the next step on. Call it on all ranks, between steps.

        Raises:
            ValueError: it cannot be run: of another shape, incomplete, or with a deadlock.
        """
        self.programs.set(schedule, self.run_micro_batches)

    def run_candidate(self, candidate: Candidate) -> None:
        """Run what the tuner has chosen from the next step on."""
        self.cut = candidate.micro_batch_size
        self.set_schedule(candidate.schedule(self.num_stages, self.micro_batches * self.micro_batch_size))

    def _train_schedule(self) -> tuple[Op, ...]:
        return self.programs.training(self.run_micro_batches)

    def _inference_schedule(self, micro_batches: int) -> tuple[Op, ...]:
        return self.programs.forwards(micro_batches)

    def _exec_schedule(self, pipe_schedule: tuple[Op, ...]) -> None:
        trains = pipe_schedule[-1].kind == UPDATE
        if trains and self.controller is not None and self.cut not in self.meter.saved_bytes:
            self.meter.measures_memory_of = self.cut
        updates = FlushedUpdates(self) if trains else None
        self.loss_book.of_forwards = []
        self._own_memory.forget()
        with self.half_way.during("it was interrupted"):
            self.executor.run(pipe_schedule, num_micro_batches=self.run_micro_batches, updates=updates)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Around a training step: the tuner's and the tracer's turns, and the step's times between them."""
        forget_messages(self.held)
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

    def _naming_lost_peers(self) -> AbstractContextManager[None]:
        """Around what sends and receives: say where this rank was when the connection to another broke."""
        return naming_lost_peers(
            self.global_rank, lambda: (self.stage_id, self.global_steps, self.held[self.executor.chunk])
        )

    # -- data ------------------------------------------------------------------------------------------------------

    def _open_step(self, num_micro_batches: int, *, trains: bool = False) -> Any:
        """Read the whole step before it begins: a rank whose data ends, or is broken, stops all of them together."""
        error: BaseException | None = self.checkpoint_error()
        if error is None and (self.is_first_stage() or self.is_last_stage()):
            try:
                while len(self._ahead) < num_micro_batches:
                    self._ahead.append(super()._next_batch())
            except Exception as caught:
                error = caught
        with self.checkpointer.reported():
            try:
                self.control.settle(error, f"beginning step {self.global_steps}")
            except BaseException:
                self._ahead.clear()
                raise

    def _next_batch(self) -> Any:
        return self._ahead.popleft() if self._ahead else super()._next_batch()

    def reset_activation_shape(self) -> None:
        """The shapes of activations change with the next step; call it on all ranks (DeepSpeed's, for curricula)."""
        super().reset_activation_shape()
        self._shapes_reset += 1

    # -- natural gradients -----------------------------------------------------------------------------------------

    def _start_natural_gradient(self) -> None:
        gather = self.control.gather
        if self.plan.natural_gradient is not None:
            self.natural_gradient = NaturalGradientPart(
                self.plan.natural_gradient,
                self.module,
                gather=gather,
                device=torch.device(self.device),
                unit=self._unit_of_sum,
                name_of=getattr(self.module, "state_name", str),
            )
        limits = agreed_limits(self.plan.max_change, self.module, names_of(self.module), gather)
        if limits is not None and self.optimizer is not None:
            self.optimizer.max_change = limits

    def _unit_of_sum(self, num_rows: int) -> float:
        """Factor that makes a gradient that of a loss summed over rows: a loss here is the mean of a micro-batch."""
        return num_rows * self.gradient_accumulation_steps() / loss_scale_of(self.optimizer)

    def natural_gradient_report(self) -> dict[str, float] | None:
        """See :meth:`NaturalGradientPart.report`; None without natural gradients."""
        return None if self.natural_gradient is None else self.natural_gradient.report()

    def _make_averager(self, optimizer: ShardedOptimizer) -> Averager | None:
        return make_averager(
            self.plan.averaging,
            self.control,
            lambda: PipelineMasters(self.control, self.module, optimizer, self.experts.fetch),
            self.basic_optimizer,
            is_pretrained=getattr(self.module, "is_pretrained", is_pretrained(self.module)),
        )

    def finish_averaging(self, held_out_loss: Callable[[], float] | None = None) -> None:
        """See :meth:`~paceline.averaging.averager.Averager.finish`."""
        if self.averager is not None:
            self.averager.finish(self.global_steps, held_out_loss)

    def steps_per_print(self) -> int | None:
        """As the JSON says. DeepSpeed's pipelines cannot report times without it."""
        every: int | None = super().steps_per_print()
        return TIMES_EVERY if every is None and self.wall_clock_breakdown() else every

    # -- the optimizer -------------------------------------------------------------------------------------------

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        parameters = list(model_parameters or ())
        error: Exception | None = None
        trains = self.reach.find(self.control, self._trained_stages())
        try:
            if not trains:
                raise ValueError("no stage has a trainable parameter: set requires_grad of those that are to train.")
            if any(getattr(p, "allreduce", True) is False for p in self.module.parameters()):
                raise ValueError(
                    "the module has experts on different ranks (ep_size > 1): pipelines spread those of Hugging Face "
                    'models only, as "expert_parallel" in the JSON says; use ep_size 1.'
                )
            self.basic_optimizer = self._make_basic_optimizer(client_optimizer, parameters)
            self.shared_experts.check_optimizer(self.basic_optimizer)
            self._check_for_duplicates(self.basic_optimizer)
            self.optimizer = self._shard(self.basic_optimizer)
        except Exception as caught:
            error = caught
        self.control.settle(error, "making the optimizer")
        link_full_access(self.optimizer)

    def _trained_stages(self) -> set[int]:
        """Stages of this rank that have a trainable parameter."""
        return {self.module.stage_id} if any(p.requires_grad for p in self.module.parameters()) else set()

    def _configure_lr_scheduler(self) -> None:
        check_scheduler_object(self.client_lr_scheduler, self.basic_optimizer)
        super()._configure_lr_scheduler()

    def _make_basic_optimizer(self, client_optimizer: Any, parameters: list[Any]) -> torch.optim.Optimizer:
        return basic_optimizer(self, client_optimizer, parameters)

    def _shard(self, basic: torch.optim.Optimizer) -> ShardedOptimizer:
        names, counts, apart = self._placement()
        check_own_parameters(basic, names)
        options = step_options(self, self.module._grid, spreads_experts=self.shared_experts.groups.size > 1)
        options = replace(options, divisor=self._gradient_divisor(), domain=self.shared_experts.domain())
        return ShardedOptimizer(basic, names, self._own_options(options), counts=counts, apart=apart)

    def _own_options(self, options: StepOptions) -> StepOptions:
        return options

    def _placement(self) -> StageParameters:
        grid, module = self.module._grid, self.module
        tied = tied_weights(module)
        first_slice = grid.get_slice_parallel_rank() == 0

        def counts(parameter: nn.Parameter) -> bool:
            is_slice = getattr(parameter, "model_parallel", False)
            return not is_copy(parameter, tied) and (first_slice or is_slice)

        return StageParameters(names_of(module), counts, lambda parameter: id(parameter) in tied)

    def _gradient_divisor(self) -> float:
        """Replicas average their gradients, or add them (``gradient_allreduce_op``)."""
        return float(self.module._grid.data_parallel_size) if self.gradient_average else 1.0

    def clip_fp32_gradients(self) -> None:
        """The optimizer clips."""

    def zero_grad(self) -> None:
        super().zero_grad()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.zero_grad()

    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step before clipping, where it was finite."""
        norm = self.get_global_grad_norm()
        return None if norm is None or not torch.isfinite(torch.tensor(norm)) else float(norm)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over M micro-batches.

        Returns:
            The step's loss, a scalar tensor, on every rank.

        Raises:
            StopIteration: the iterator has less than a step left.
        """
        WATCH.step = self.global_steps
        if not isinstance(self.optimizer, ShardedOptimizer):
            raise ValueError('there is no optimizer to train with: write "optimizer" into the JSON, or pass one.')
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.half_way.check()
        with self._naming_lost_peers():
            if self.averager is not None:
                self.averager.join(self.global_steps)
            with self._recorded():
                self._open_step(self.micro_batches, trains=True)
                loss = super().train_batch()
            if self.steps_per_print() is None:  # nobody reads it, and it keeps two events a step until somebody does
                self.timers(TRAIN_BATCH_TIMER).reset()
            if self.averager is not None:
                self.averager.after_step(self.global_steps, loss, self._tokens_of_step())
        WATCH.idle()
        return loss

    def _tokens_of_step(self) -> int:
        """Tokens of the last step, of all replicas; samples, where a layer's inputs are anything."""
        return int(self.train_batch_size())

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As :meth:`deepspeed.PipelineEngine.eval_batch`."""
        self.half_way.check()
        trained_on, self.data_iterator = self.data_iterator, data_iter
        with self._naming_lost_peers():
            try:
                self._open_step(num_micro_batches or self.micro_batches)
            finally:
                self.data_iterator = trained_on
            result = super().eval_batch(
                data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
            )
        WATCH.idle()
        return result

    @property
    def reads_data(self) -> bool:
        """Whether :meth:`train_batch` takes micro-batches from its iterator on this rank."""
        return bool(self.is_first_stage() or self.is_last_stage())

    def data_state(self, iterator: Any) -> Any:
        """``iterator.state_dict()`` as of the end of the last step: what it would go on from."""
        return iterator.state_dict()

    def destroy(self) -> None:
        """As DeepSpeed's; what is under way is finished first. Not collective."""
        if self.averager is not None:
            self.averager.close()
        if hasattr(self, "checkpointer"):
            self.checkpointer.close()
        super().destroy()
        self.links.close()

    # -- experts on several ranks of a stage ----------------------------------------------------------------------

    @property
    def expert_layers(self) -> Mapping[str, HFExpertLayer]:
        """The stage's layers whose experts lie on several ranks, by Hugging Face's names, in the model's order."""
        return self.shared_experts.layers

    @property
    def rebalancer(self) -> Rebalancer | None:
        """Moves the experts of this stage; None: it has none that move."""
        return self.experts.rebalancer

    def place_experts(self, placements: Mapping[str, Placement]) -> dict[str, Any]:
        """See :meth:`~paceline.runtime.expert_part.Experts.place`."""
        return self.experts.place(placements)

    def is_last_backward(self) -> bool:
        """Whether the backward that runs now is the last of this step on this stage."""
        return bool(self.executor.is_last_backward)

    def _make_experts(self) -> Experts:
        from ..moe.moving import states_of
        from ..moe.stage_agreement import Stages

        stages = None
        if self.num_stages > 1:
            stages = Stages(
                *(self.stage_id, self.num_stages, self.control),
                computed_s=lambda: float(self.meter.recorder.computed_s()),  # made later
                num_micro_batches=lambda: self.schedule.num_micro_batches,
            )
        return Experts(
            self.shared_experts,
            self.plan.moe,
            control=self.control,
            stages=stages,
            group=self.grid.get_data_parallel_group,
            states=lambda: states_of(self),
            is_last_backward=self.is_last_backward,
            decided=self.decisions,
        )

    def _broadcast_model(self) -> None:
        if self.shared_experts.layers:
            self.shared_experts.broadcast(self.module.parameters(), self.module._grid.get_data_parallel_group())
        else:
            super()._broadcast_model()

    # -- files -----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        **options: Any,
    ) -> bool:
        """See :meth:`~paceline.runtime.checkpointer.Checkpointer.save`, which has the other options."""
        return self.checkpointer.save(
            save_dir, tag, client_state, save_latest, exclude_frozen_parameters=exclude_frozen_parameters, **options
        )

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, *args: Any, custom_load_fn: Any = None, **options: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """See :meth:`~paceline.runtime.checkpointer.Checkpointer.load`, which has the other options."""
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn is given: tensors are loaded by name; leave it out.")
        return self.checkpointer.load(load_dir, tag, *args, **options)

    def prepare_checkpoint(self, *, exclude_frozen_parameters: bool = False) -> None:
        """See :meth:`~paceline.runtime.checkpointer.Checkpointer.prepare`."""
        self.checkpointer.prepare(exclude_frozen_parameters=exclude_frozen_parameters)

    def finish_checkpoint(self) -> None:
        """See :meth:`~paceline.runtime.checkpointer.Checkpointer.finish`."""
        self.checkpointer.finish()

    def checkpoint_error(self) -> CheckpointError | None:
        """See :meth:`~paceline.runtime.checkpointer.Checkpointer.error`."""
        return self.checkpointer.error()

    def _make_checkpointer(self) -> Checkpointer:
        optimizer = self.optimizer if isinstance(self.optimizer, ShardedOptimizer) else None
        stage, is_first = getattr(self.module, "stage", None), self.global_rank == 0
        learned = {"natural_gradient": self.natural_gradient, "averaging": self.averager}
        return Checkpointer(
            self.control,
            self.module,
            optimizer,
            self,
            world_size=torch.distributed.get_world_size(),
            replica=self.replica,
            shape=self._shape,
            groups=None if optimizer is None else ParameterGroups(optimizer, warns=is_first),
            scheduler=SchedulerState(lambda: self.lr_scheduler, lambda: self.basic_optimizer.param_groups),
            learned={name: part for name, part in learned.items() if part is not None},
            run=self._run_states(),
            experts=self.experts,
            settle=(lambda: None) if self.averager is None else self.averager.settle,
            write_model=self._write_model,
            is_quantised=stage is not None and quantisation_of(stage.model.config) is not None,
        )

    @property
    def replica(self) -> int:
        """Number of this rank among those that hold the same parameters."""
        return int(self.grid.data_parallel_id)

    def _shape(self) -> dict[str, Any]:
        return {
            "stages": self.num_stages,
            "data_parallel": self.dp_world_size,
            "parts": [int(part) for part in self.module.parts],
            "train_batch_size": self.train_batch_size(),
        }

    def _run_states(self) -> dict[str, SavedPart]:
        """States of this rank that go on whatever becomes of the optimizer's."""
        return {"rng": RandomStates(torch.device(self.device), warns=self.global_rank == 0)}

    def _write_model(self, draft: Path) -> None:
        """Write what a checkpoint needs to become a model of its own. On rank 0."""

    # -- layers that move between stages --------------------------------------------------------------------------

    def repartition(self, parts: Sequence[int], *, memory_bytes: int | None = None) -> Migration | None:
        """Have each stage hold the items that ``parts`` says, from the next step on. Call it between steps.

        No number of the training changes: every bit of every weight is what it would have been. Only sums are taken in
        another order: that of the norm, with clipping, and those of gradients over three or more replicas. Of what is
        random (dropout), each rank goes on with its own generator; hooks that somebody put on a layer stay behind.

        Args:
            parts: boundaries over the items, one more than there are stages: ``[0, …, number of items]``. Items are
                the layers of a ``PipelineModule``; of a Hugging Face model embedding, decoder layers, head.
            memory_bytes: what a rank may take for layers that come; by default what is free.

        Returns:
            The figures that :attr:`migrations` gets; None where nothing is to move.

        Raises:
            ValueError: on every rank, and nothing has moved: boundaries that do not fit, a layer that cannot be made
                anew, groups of the optimizer that a stage lacks, or memory that does not suffice.
            RuntimeError: a rank or a connection was lost on the way: this engine is of no use any more.
        """
        WATCH.step = self.global_steps
        self.half_way.check()
        if self.migrator is None:
            raise ValueError(
                'there is no optimizer, so layers have no reason to move: write "optimizer" into the JSON.'
            )
        new = self.migrator.agree(parts)
        if new is None:
            return None
        forget_messages(self.held)  # of the last step
        with self._naming_lost_peers():
            migration = self.migrator.migrate(new, memory_bytes)
        WATCH.idle()
        return migration

    @property
    def migrations(self) -> Sequence[Migration]:
        """Figures of the last migrations."""
        return () if self.migrator is None else self.migrator.migrations

    def _make_layers(self) -> Layers:
        return PlainLayers(self.module)

    def _make_migrator(self) -> Migrator | None:
        if not isinstance(self.optimizer, ShardedOptimizer):
            return None
        grid = self.grid
        is_cut = grid.get_slice_parallel_world_size() > 1
        slice_name = f" (slice {grid.get_slice_parallel_rank()})" if is_cut else ""
        return Migrator(
            self.control,
            Seat(self.global_rank, self.stage_id, self.pipe_number, slice_name),
            self.layers,
            self.optimizer,
            torch.device(self.device),
            parameters=self._placement,
            step=lambda: int(self.global_steps),
            half_way=self.half_way.during,
            learned=self.natural_gradient,
            refuse=self.shared_experts.check_migration,
            after=self._forget_the_old_stage,
        )

    def _start_partition(self) -> None:
        """Apply the JSON's partition to a module that was built with another one."""
        choice = self.plan.partition_choice
        if choice.method is None or self.num_stages == 1 or self.migrator is None:
            return
        boundaries = self.layers.boundaries(choice.method, choice.profile)
        if boundaries is not None:
            self.repartition(boundaries)

    def _forget_the_old_stage(self) -> None:
        """Drop what was kept of the stage as it was."""
        self._own_memory.belong_to(self.module.parameters())
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.reach.find(self.control, self._trained_stages())
        self.meter.forget_stage()
        self.reset_activation_shape()

    # -- losses, which DeepSpeed's methods keep on the engine ------------------------------------------------------

    total_loss = _of_loss_book("total")
    total_additional_losses = _of_loss_book("additional")
    fwd_outputs = _of_loss_book("of_forwards")
    outputs = _of_loss_book("outputs")

    def flops_profiler_profile_step(self) -> int:
        """None for DeepSpeed's hooks of the module, which in pipelines begin a profile and never show it."""
        return -1

    # -- what ends a step ----------------------------------------------------------------------------------------

    def _exec_reduce_tied_grads(self) -> None:
        forget_messages(self.held)
        ties = [(w, group) for w, group in self.module.get_tied_weights_and_groups() if self.optimizer.layout.trains(w)]
        num_bytes = sum(w.numel() * w.element_size() for w, _ in ties)
        with self.clock.transfer("tied", num_bytes):
            for weight, group in ties:
                dist.all_reduce(self.optimizer.gradients.of(weight), group=group)

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        super()._exec_optimizer_step(lr_kwargs)
        self.experts.after_step()

    def _exec_reduce_grads(self) -> None:
        self.optimizer.reduce_gradients()  # begins; the optimizer's step waits, and books the time
