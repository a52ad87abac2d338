"""DeepSpeed's pipeline engine with the optimizer of :mod:`paceline.optim` and checkpoints that fit any shape."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine, PipelineError
from torch import Tensor, nn

from ..averaging.averager import Averager
from ..checkpoint import CheckpointError
from ..comm.control import ControlPlane
from ..comm.transport import Transport
from ..config import RunPlan
from ..config.replica_keys import check_shares
from ..measure.clock import Clock
from ..optim.linear_layers import Deferral
from ..optim.sharded import ShardedOptimizer
from ..optim.stacked_experts import defer_experts
from ..planning.candidates import Candidate
from ..planning.tuning import DecisionLog
from ..report.run_records import LOADS
from ..schedules.lower import UPDATE, Op
from ..schedules.schedule import Schedule
from ..schedules.stream import Stream, flushed
from ..state.named import link_full_access, names_of
from ..supervise.watch import WATCH
from . import assembly, step_loss
from .boundary import OwnMemory
from .causal_lm_support import CausalLMSupport
from .compiling import compile_by_call
from .evaluation import Evaluation
from .executor import Executor
from .expert_part import SharedExperts
from .half_way import HalfWay
from .lost_peers import forget_messages, naming_lost_peers
from .measured_costs import MeasuredCosts
from .meter import Meter
from .migration import Migration
from .model_support import Cut, ModelSupport, PlainSupport
from .module import CausalLMPipeline
from .monitors import OutlivedMonitors
from .natural_gradient_part import agreed_limits, heads_of
from .optimizer_setup import basic_optimizer
from .pipeline_tuning import pipeline_controller
from .planning_process import PlanningProcess
from .programs import Programs
from .rank_random import OwnRandom
from .rank_reports import ReportGatherer
from .rate import check_follows_steps, check_scheduler_object
from .reach import Reach
from .stage_runner import LossBook
from .state_owners import stage_of_parameters
from .tracer import TimelineWriter, Tracer
from .updates import FlushedUpdates

if TYPE_CHECKING:
    from ..moe.hf_experts import HFExpertLayer
    from ..moe.rebalancer import Rebalancer
    from ..planning.experts import Placement
    from .trainer_loss import TrainersLoss

TIMES_EVERY = 10
"""Steps between lines of ``wall_clock_breakdown``: what DeepSpeed's documents give for ``steps_per_print``."""


def _check_iterator(data: object) -> None:
    """Raise TypeError for what is no iterator over micro-batches; None is the iterator of before, or of no rank's."""
    if data is not None and not hasattr(data, "__next__"):
        raise TypeError(
            f"the data is a {type(data).__name__}: give an iterator over micro-batches, iter(...), made once for all "
            "steps."
        )


def _of_loss_book(name: str) -> Any:
    """A property of the engine that is an attribute of its :class:`LossBook`."""

    def read(engine: PacelineEngine) -> Any:
        return getattr(engine.loss_book, name)

    def write(engine: PacelineEngine, value: Any) -> None:
        setattr(engine.loss_book, name, value)

    return property(read, write)


class PacelineEngine(PipelineEngine):
    """Trains a pipeline: a Hugging Face model or any :class:`deepspeed.pipe.PipelineModule`.

    It owns the parts that do the work, and hands DeepSpeed's calls on to them. It has more methods than they, since
    DeepSpeed's engine has: a third of them are its own, overridden.

    * ``train_batch(data_iter)`` takes M micro-batches from the iterator on the ranks that read data
      (:attr:`reads_data`), which must all see the same. The loss that it returns, and whose gradient it applies, is
      that of the unsplit model over all tokens of the step; of a ``PipelineModule`` of one's own, the mean over
      micro-batches.
    * Any schedule that can be proven to work, with transfers beside the computation (:meth:`set_schedule`).
    * One optimizer for ZeRO 0 and 1 and every precision (:class:`~paceline.optim.sharded.ShardedOptimizer`): stages may
      have different parameter groups (stock: they hang), the norm is that of all stages (stock: of the first, in fp32).
    * Layers move from stage to stage between steps, with everything that belongs to them (:meth:`repartition`).
    * Checkpoints are complete or not there, written in the background, and load into any shape.
    * A step's time is split into compute, communication and idle (:attr:`clock`).
    """

    optimizer: ShardedOptimizer
    data_iterator: Any
    monitor: OutlivedMonitors
    transport_order: str | None = None
    """``"free"`` or ``"paired"``; None: what suits the backend."""

    def __init__(self, *args: Any, plan: RunPlan, **kwargs: Any) -> None:
        self.plan = plan
        model = kwargs["model"]
        self.control = getattr(model, "control", None) or ControlPlane.create(
            model.num_stages, pipes=model._grid._topo.get_axis_comm_lists("pipe")
        )
        self.support: ModelSupport = (CausalLMSupport if isinstance(model, CausalLMPipeline) else PlainSupport)(model)
        self.shared_experts = SharedExperts.of(model)
        self.mirrors = assembly.make_mirrors(self, model)
        self.data_iterator = None
        self.loss_book = LossBook()
        self.reach = Reach(self.num_virtual_stages)
        self.half_way = HalfWay()
        self.run_dir = Path()
        """Where recorded steps go."""
        self.stage_of: dict[nn.Parameter, int] = {}
        """Stage of each parameter here, where ranks that hold the same stages share their updates."""
        self.decisions = DecisionLog()
        """Decisions about schedule, partition and experts."""
        # DeepSpeed's start sends along the devices, whichever stages they have.
        self._ends = 0, model.num_stages - 1
        super().__init__(*args, **kwargs)
        self.monitor = OutlivedMonitors(self.monitor)
        self._ends = self.support.routes[0][0], self.support.routes[0][-1]
        # Slices of activations instead of whole ones, with tensor parallelism: an option that changes no number.
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        is_unequal = self.plan.section.pipeline.unequal_replicas is not None
        self.share_micro_batches(self.plan.replica_micro_batches if is_unequal else self._equal_shares)
        device, optimizer = torch.device(self.device), self.optimizer
        if self.plan.tensor_parallel > 1:
            assembly.make_slices_alike(self)
        self.experts = assembly.make_experts(self)
        self.natural_gradient = assembly.make_natural_gradient(self)
        """None: gradients are ordinary ones."""
        limits = agreed_limits(self.plan.max_change, self.module, names_of(self.module), self.control.gather)
        self.clock = Clock(device)
        self.averager: Averager | None = None
        """None: this job is alone."""
        if isinstance(optimizer, ShardedOptimizer):
            self.averager = assembly.make_averaging(self, optimizer)
            optimizer.max_change, optimizer.clock = limits, self.clock
        self.meter = Meter(self.clock, self.module, device)
        self.layers = self.support.make_layers()
        self.cut = self._configured_cut()
        self.links = assembly.make_links(self)
        num_sharing = self.shared_experts.groups.size
        self._computed_s = 0.0
        """Seconds of the last step by the host's clock, reading of data left out."""
        self.steps = self.support.make_steps(self, self.control, device, self._reported, num_sharing)
        # Devices that hold the same stages would draw the same dropout for different micro-batches.
        self.own_random = OwnRandom(self.links.device_number, device) if len(self.support.routes) > 1 else None
        self.own_memory = OwnMemory(parameter for parameter in self.module.parameters() if parameter.requires_grad)
        self.rounding_errors = assembly.make_rounding_errors(self)
        self.held = assembly.make_stages(self)
        self._deferral = Deferral()
        self._splits = False
        """Whether layers can leave gradients of weights for later."""
        self.executor = Executor(
            self.held,
            meter=self.meter,
            transports=self.links.transports,
            deferral=self._deferral,
            early_room=assembly.make_early_room(self),
        )
        self._evaluation = assembly.make_evaluation(self)
        self.programs = Programs(self.plan.schedule, self.support.routes, self.links.device_number, self.links.order)
        self._split_backwards()
        self._follow_the_cluster()
        self.asynchronous = assembly.make_asynchronous_run(self) if self.plan.schedule.is_asynchronous else None
        self.migrator = assembly.make_migrator(self)
        if self.migrator is not None and self.num_stages > 1 and self.plan.partition_choice.repartition_every:
            self.migrator.get_ready()
        self.checkpointer = assembly.make_checkpointer(self)
        self._start_partition()
        if isinstance(self.module, CausalLMPipeline):
            self.module.settle = self._flush_whole
            if self._config.pipeline["activation_checkpoint_interval"] > 0:
                self.module.enable_gradient_checkpointing()

    # -- the pipeline ----------------------------------------------------------------------------------------------

    @property
    def num_virtual_stages(self) -> int:
        """Stages of one direction."""
        return len(self.support.routes[0])

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
        """The global rank that has a stage of this rank's pipeline, in its first direction."""
        return int(self.grid.stage_to_global(stage_id=self.support.routes[0][stage]))

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage of the first direction."""
        return bool(self.stage_id == self._ends[0])

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage of the first direction."""
        return bool(self.stage_id == self._ends[1])

    def _loss_stage_global_rank(self) -> int:
        return self.rank_of_stage(self.num_virtual_stages - 1)

    # -- its schedule ----------------------------------------------------------------------------------------------

    def _configured_cut(self) -> int:
        """Samples of a micro-batch as configured, after a look whether they could be cut otherwise, if asked."""
        sizes = self.plan.schedule.micro_batch_sizes or ()
        if set(sizes) - {self.micro_batch_size} and not self.support.can_cut:
            raise ValueError(
                f"paceline.pipeline.schedule.micro_batch_sizes is {list(sizes)}: this PipelineModule's data cannot be "
                f"cut otherwise than into micro-batches of {self.micro_batch_size}; leave the key out."
            )
        return int(self.micro_batch_size)

    def _follow_the_cluster(self) -> None:
        """Begin to follow the cluster, if the JSON asks for it. Collective."""
        self.reports = ReportGatherer(
            *(self.control, self.meter, torch.device(self.device)),
            links=self.links,
            module=self.module,
            optimizer=self.optimizer,
        )
        self.timelines = TimelineWriter(
            step=lambda: int(self.global_steps),
            order=lambda: self.order,
            micro_batch_size=lambda: int(self.cut),
            folder=lambda: self.run_dir,
            begun=lambda: 0 if self.asynchronous is None else self.asynchronous.num_before_last,
        )
        every = self.plan.report.trace_every
        self.tracer = None if every is None else self._make_tracer(every)
        self.planning_process: PlanningProcess = PlanningProcess()
        self.controller = pipeline_controller(
            *(self.plan.schedule, self.plan.partition_choice, self, self.layers, self.meter, self.reports),
            *(self.control, self.decisions, self.timelines, self.support.routes),
            recomputes=not isinstance(self.module, CausalLMPipeline) and self.module.activation_checkpoint_interval > 0,
            formats=assembly.format_choices(self),
            pool=self.plan.pool,
            notice=self.steps,
            reshare_every=self.plan.reshare_every,
            uneven_experts=self.experts.uneven_s,
            process=self.planning_process,
        )

    def _make_tracer(self, every: int) -> Tracer:
        has_flush = not self.plan.schedule.is_asynchronous
        costs = MeasuredCosts(self.support.routes, has_flush=has_flush, of_first_replica=True)  # which is drawn
        return Tracer(every, costs, self.reports, self.timelines, is_first=self.global_rank == 0)

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
    def order(self) -> Schedule | Stream:
        """Order of the steps: without a flush, of one in the steady state."""
        return self.schedule if self.asynchronous is None else self.asynchronous.order

    @property
    def run_micro_batches(self) -> int:
        """Micro-batches of a step as it is run: those that are loaded, unless the tuner cuts them otherwise."""
        return int(self.micro_batches * self.micro_batch_size // self.cut)

    def share_micro_batches(self, shares: Sequence[int]) -> None:
        """Have replica r compute ``shares[r]`` micro-batches of a step, from the next on. On all ranks, between steps.

        ``train_batch`` then takes :attr:`micro_batches`, this replica's share, from its iterator.

        Raises:
            ValueError: other numbers than one for each replica, whose sum is a step's.
            RuntimeError: the engine was destroyed.
        """
        self.half_way.check_goes_on()
        replicas, own = int(self.grid.data_parallel_size), int(self.grid.data_parallel_id)
        usual, counts = self.gradient_accumulation_steps(), self.plan.schedule.micro_batch_counts(self.num_stages)
        check_shares(shares, replicas=replicas, micro_batches=usual, counts=counts)
        self.replica_micro_batches = tuple(shares)
        self.micro_batches = shares[own]

    @property
    def _equal_shares(self) -> list[int]:
        return [self.gradient_accumulation_steps()] * int(self.grid.data_parallel_size)

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the decoder layers, as ``"compile"`` in the JSON does; arguments as of DeepSpeed's engine.

        Raises:
            ValueError: the JSON's ``"compile"`` does not have them, or another feature of the run does not go with it.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError(
                "compile() has a schedule or compiled_autograd_enabled: a pipeline compiles its layers one by one; "
                "leave both out."
            )
        compile_by_call(self.module, self.plan, backend, compile_kwargs or {})

    @property
    def is_compiled(self) -> bool:
        """Whether decoder layers are compiled, by the JSON or by :meth:`compile`."""
        return bool(getattr(self.module, "is_compiled", False))

    def set_schedule(self, schedule: Schedule) -> None:
        """Run ``schedule`` from the next step on. Call it on all ranks, between steps.

        Raises:
            ValueError: it cannot be run: of another shape, incomplete, or with a deadlock; or the engine was made for
                a schedule that it keeps.
            TypeError: a name instead of a schedule, or one without a flush.
            RuntimeError: the engine was destroyed.
        """
        self.half_way.check_goes_on()
        if isinstance(schedule, str):
            raise TypeError(
                f"set_schedule({schedule!r}): give a schedule, paceline.schedules.make({schedule!r}, "
                f"{self.num_stages}, {self.run_micro_batches})."
            )
        if isinstance(schedule, Stream):
            raise TypeError(
                f"set_schedule({schedule.name!r}): that has no flush, and an engine is made for it: write it into the "
                "JSON, and make another engine, with the last checkpoint."
            )
        if self.mirrors is not None:
            raise ValueError(
                f"set_schedule({schedule.name!r}): an engine that was made for {self.plan.schedule.type!r} keeps its "
                "schedule; make another engine, with the last checkpoint."
            )
        self._set_schedule(schedule)

    def _set_schedule(self, schedule: Schedule) -> None:
        self.programs.set(schedule, self.run_micro_batches)
        self._split_backwards()

    def _split_backwards(self) -> None:
        """Let the layers that are here leave gradients of their weights for later, if a schedule has done so."""
        self._splits |= self.schedule.is_split
        if self._splits:
            embeds = any(one.runner.is_first for one in self.held)
            self._deferral.adopt(self.module, heads_of(self.module), embeds=embeds)
            defer_experts(self.module, self._deferral)

    def run_candidate(self, candidate: Candidate) -> None:
        """Run what the tuner has chosen from the next step on. Collective."""
        self.cut = candidate.micro_batch_size
        assembly.choose_format(self, candidate.boundary)
        order = candidate.schedule(self.num_stages, self.micro_batches * self.micro_batch_size)
        if self.asynchronous is not None:
            self.asynchronous.follow(order if isinstance(order, Stream) else flushed(order))
        self._set_schedule(order.one_step if isinstance(order, Stream) else order)

    def _train_schedule(self) -> tuple[Op, ...]:
        return self.programs.training(self.run_micro_batches)

    def _inference_schedule(self, micro_batches: int) -> tuple[Op, ...]:
        return self.programs.forwards(micro_batches)

    def _exec_schedule(self, pipe_schedule: tuple[Op, ...]) -> None:
        trains = pipe_schedule[-1].kind == UPDATE
        updates = FlushedUpdates(self) if trains else None
        self.loss_book.of_forwards = []
        self.own_memory.forget()
        random = self.own_random if trains else None
        with self.half_way.during("it was interrupted"):
            if random is not None:
                random.enter()
            self.executor.run(pipe_schedule, num_micro_batches=self.run_micro_batches, updates=updates)
            if random is not None:
                random.leave()

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Around a training step: the tuner's and the tracer's turns, and the step's times between them."""
        forget_messages(self.held)
        if self.controller is not None:
            self.controller.before_step()
        recorder = self.meter.recorder
        recorder.begin((self.schedule.name, self.cut))
        recomputes = isinstance(self.module, CausalLMPipeline) and self.module.is_recomputed
        self.meter.measures_memory_of = self.cut if self.controller is not None or recomputes else None
        # Garbage is collected between steps, by all ranks at once; a pause within one would hold up all stages in turn.
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        except BaseException:
            recorder.drop()
            raise
        finally:
            self.meter.measures_memory_of = None
            if collects:
                gc.enable()
        recorder.end()
        if self.controller is not None:
            self.controller.step_took(self._computed_s, self.step_tokens or 1)
        if self.tracer is not None:
            self.tracer.after_step()

    def naming_lost_peers(self) -> AbstractContextManager[None]:
        """Around what sends and receives: say where this rank was when the connection to another broke."""
        return naming_lost_peers(self.global_rank, lambda: (self.global_steps, self.held[self.executor.chunk]))

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Around what ranks do together between training steps, all of which are done."""
        self.half_way.check()
        self.flush()
        with self.naming_lost_peers():
            yield

    # -- data ------------------------------------------------------------------------------------------------------

    def reset_activation_shape(self) -> None:
        """The shapes of activations change with the next step; call it on all ranks (DeepSpeed's, for curricula)."""
        super().reset_activation_shape()
        self.support.reset_shapes()

    @property
    def reads_data(self) -> bool:
        """Whether :meth:`train_batch` takes micro-batches from its iterator on this rank."""
        return any(order[end] == self.stage_id for order in self.support.routes for end in (0, -1))

    def set_dataiterator(self, iterator: Any) -> None:
        """As DeepSpeed's, on every rank that reads data."""
        _check_iterator(iterator)
        if self.reads_data:
            self.training_dataloader, self.data_iterator = None, iterator

    def set_dataloader(self, loader: Any) -> None:
        """The same of ``training_data``."""
        if self.reads_data:
            self.training_dataloader, self.data_iterator = loader, iter(loader)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        if self.mirrors is not None and train_batch_size != self.train_batch_size():
            raise ValueError(
                f"train_batch_size cannot become {train_batch_size} while the schedule is {self.plan.schedule.type!r}: "
                "save a checkpoint, and load it into an engine with the other batch size."
            )
        if self.plan.section.pipeline.unequal_replicas is not None:
            raise ValueError(
                f"train_batch_size cannot become {train_batch_size} while replicas have shares of their own "
                f"({list(self.replica_micro_batches)}): leave unequal_replicas out, or make another engine."
            )
        size = int(self.train_micro_batch_size_per_gpu())  # set_train_micro_batch_size may have changed it
        of_one_each = size * int(self.grid.data_parallel_size)
        if train_batch_size % of_one_each == 0:  # DeepSpeed refuses others
            try:
                num_micro_batches = train_batch_size // of_one_each
                self.plan.schedule.check_step(self.num_stages, num_micro_batches, size)
            except ValueError as error:
                raise ValueError(f"train_batch_size cannot become {train_batch_size}: {error}") from None
        is_other = train_batch_size != self.train_batch_size()
        super().set_train_batch_size(train_batch_size)
        self.share_micro_batches(self._equal_shares)
        if self.controller is not None and is_other:
            self.controller.step_has_changed()

    def _reported(self) -> AbstractContextManager[None]:
        """Around an error that is raised on all ranks: it may be that of a save, which is then told once."""
        return self.checkpointer.reported()

    def data_state(self, iterator: Any) -> Any:
        """``iterator.state_dict()`` as of the end of the last step: what it would go on from."""
        return iterator.state_dict() if self.asynchronous is None else self.asynchronous.steps.data_state(iterator)

    @property
    def is_stopping(self) -> bool:
        """Whether any rank had been asked to stop when the last step began; the same on all ranks."""
        return bool(self.steps.is_stopping)

    @property
    def step_tokens(self) -> int:
        """Tokens of the last step, of all replicas, padding not counted; samples, where inputs are anything."""
        tokens = self.steps.tokens
        return int(self.train_batch_size()) if tokens is None else int(tokens)

    @property
    def own_loss(self) -> TrainersLoss | None:
        """Computes losses on the last stage instead of the model."""
        return assembly.causal_lm_runners(self.held)[0].own_loss

    @own_loss.setter
    def own_loss(self, compute: TrainersLoss | None) -> None:
        if compute is not None:
            self.support.require_logits("a loss of one's own (compute_loss, label smoothing, …)")
        for runner in assembly.causal_lm_runners(self.held):
            runner.own_loss = compute

    # -- natural gradients -----------------------------------------------------------------------------------------

    def natural_gradient_report(self) -> dict[str, float] | None:
        """See :meth:`NaturalGradientPart.report`; None without natural gradients."""
        return None if self.natural_gradient is None else self.natural_gradient.report()

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
        trains = self.reach.find(self.control, self._stages_with(lambda parameter: parameter.requires_grad))
        try:
            if not trains:
                raise ValueError("no stage has a trainable parameter: set requires_grad of those that are to train.")
            if any(getattr(p, "allreduce", True) is False for p in self.module.parameters()):
                raise ValueError(
                    "the module has experts on different ranks (ep_size > 1): pipelines spread those of Hugging Face "
                    'models only, as "expert_parallel" in the JSON says; use ep_size 1.'
                )
            self.basic_optimizer = basic_optimizer(self, client_optimizer, parameters)
            if self.mirrors is not None:
                names = assembly.parameters_of_stages(self).names
                order = {parameter: number for number, parameter in enumerate(names)}
                for group in self.basic_optimizer.param_groups:  # the same on all ranks that hold the same
                    group["params"] = sorted(group["params"], key=lambda p: order.get(p, len(order)))
            self.shared_experts.check_optimizer(self.basic_optimizer)
            self.support.check_optimizer(self.basic_optimizer)
            self._check_for_duplicates(self.basic_optimizer)
            self.optimizer = assembly.make_optimizer(self, self.basic_optimizer)
        except Exception as caught:
            error = caught
        self.control.settle(error, "making the optimizer")
        self.optimizer.passenger.own = partial(step_loss.part_with_norm, self)
        link_full_access(self.optimizer)

    def _stages_with(self, is_one: Callable[[nn.Parameter], bool]) -> set[int]:
        """Stages of this rank that have such a parameter."""
        return {stage for parameter, stage in stage_of_parameters(self.support.stages).items() if is_one(parameter)}

    def _configure_lr_scheduler(self) -> None:
        check_scheduler_object(self.client_lr_scheduler, self.basic_optimizer)
        super()._configure_lr_scheduler()
        check_follows_steps(self.lr_scheduler)

    def scheduler_params(self) -> dict[str, Any]:
        """As the JSON says; none are no reason to fail, as they are to DeepSpeed."""
        return super().scheduler_params() or {}

    def _scheduler_from_config(self, optimizer: object) -> Any:
        try:
            return super()._scheduler_from_config(self.basic_optimizer)  # torch's schedulers take no other
        except (TypeError, ValueError) as error:
            params = self.scheduler_params()
            raise ValueError(
                f"scheduler {self.scheduler_name()} with params {params}: {error}; correct scheduler.params."
            ) from error

    def clip_fp32_gradients(self) -> None:
        """The optimizer clips."""

    def zero_grad(self) -> None:
        """Forget gradients, unless they are those of steps under way."""
        if self.asynchronous is not None and not self.asynchronous.is_settled:
            return
        super().zero_grad()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.zero_grad()

    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step before clipping, where it was finite."""
        norm = self.get_global_grad_norm()
        return None if norm is None or not torch.isfinite(torch.tensor(norm)) else float(norm)

    def forward(self, *_: object, **__: object) -> NoReturn:
        """Refused, as are ``backward`` and ``step``: a step of a pipeline is one call."""
        raise PipelineError(
            "a pipeline runs a step as a whole: instead of engine(batch), engine.backward(loss) and engine.step() "
            "call engine.train_batch(iterator) with an iterator over micro-batches (for losses alone, engine.evaluate)."
        )

    backward = step = forward

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over M micro-batches.

        Without a flush (``"multidirection"``, ``"one_direction"``) the update of this step comes with the next ones,
        the loss waits for the other ranks when somebody looks at it, and the iterator is read one step ahead, if it is
        the same at each step.

        Returns:
            The step's loss, a scalar tensor, on every rank.

        Raises:
            StopIteration: the iterator has less than a step left.
            ValueError: on every rank: no optimizer; micro-batches that cannot be a step's, or differ between the ranks
                that read the same data.
            CheckpointError: on every rank: a checkpoint that was being written failed.
            RuntimeError: gradients are off; the engine was destroyed, or interrupted in the middle of a step; a peer is
                gone.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients: call it outside of torch.no_grad().")
        WATCH.step = self.global_steps
        if not isinstance(self.optimizer, ShardedOptimizer):
            raise ValueError('there is no optimizer to train with: write "optimizer" into the JSON, or pass one.')
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.half_way.check()
        with self.naming_lost_peers():
            if self.averager is not None:
                self.averager.join(self.global_steps)
            with self._recorded():
                if self.asynchronous is not None:
                    self._compute_loss = True
                    loss = self.agg_train_loss = self.asynchronous.train_batch()
                    self.experts.after_late_step()
                else:
                    is_cut = self.cut != self.micro_batch_size
                    self.steps.open(self.micro_batches, cut=Cut(self.cut, self.run_micro_batches) if is_cut else None)
                    begun_s = time.perf_counter()
                    loss = super().train_batch()
                    self._computed_s = time.perf_counter() - begun_s
            if self.steps_per_print() is None:  # nobody reads it, and it keeps two events a step until somebody does
                self.timers(TRAIN_BATCH_TIMER).reset()
            if self.averager is not None:
                self.averager.after_step(self.global_steps, loss, self.step_tokens)
        WATCH.step = self.global_steps
        WATCH.idle()
        return loss

    def flush(self) -> None:
        """Finish all steps that have begun, and put their updates into the model. Collective, between steps."""
        if self.asynchronous is not None:
            self.asynchronous.flush()

    def _flush_whole(self) -> None:
        """:meth:`flush` before the model is written; refused where a migration broke off and left it in pieces."""
        self.half_way.check_model()
        self.flush()

    def _aggregate_total_loss(self) -> Tensor:
        """The step's loss, of all replicas, on every rank."""
        if step_loss.comes_with_norm(self):
            loss = step_loss.loss_with_norm(self)
        elif self.support.sums_tokens:
            loss = step_loss.loss_by_message(self)
        else:
            own: Tensor = super()._aggregate_total_loss()
            return own
        self.dp_group_loss = loss.clone()
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As :meth:`deepspeed.PipelineEngine.eval_batch`.

        Raises:
            ValueError: on every rank: another ``reduce_output`` than ``"avg"``, or None for what is to be broadcast.
        """
        if reduce_output is not None and reduce_output.lower() != "avg":
            raise ValueError(
                f'reduce_output is {reduce_output!r}: it must be "avg", the mean over micro-batches and replicas, or '
                "None; sum what you need yourself."
            )
        if reduce_output is None and compute_loss and (bcast_loss or self.monitor.enabled):
            raise ValueError(
                "reduce_output is None and the loss is to be broadcast, which is one number: give bcast_loss=False "
                "to have those of the micro-batches on the last stage (without a monitor in the JSON)."
            )
        _check_iterator(data_iter)
        trained_on = self.data_iterator
        with self.between_steps():
            self.data_iterator = data_iter
            try:
                self.steps.open(num_micro_batches or self.micro_batches)
            finally:
                self.data_iterator = trained_on
            result = super().eval_batch(
                data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
            )
        WATCH.idle()
        return result

    def run_forwards(self, num_micro_batches: int) -> None:
        """Run the forwards of so many micro-batches, which have been agreed on."""
        self._exec_schedule(self._inference_schedule(num_micro_batches))

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """See :meth:`~paceline.runtime.evaluation.Evaluation.evaluate`."""
        return self._evaluates().evaluate(batches)

    def predict(
        self, batches: Iterable[Any], see: Callable[[Tensor, Tensor], Any] | None = None
    ) -> Iterator[tuple[Tensor, Any]]:
        """See :meth:`~paceline.runtime.evaluation.Evaluation.predict`."""
        return self._evaluates().predict(batches, see)

    def _evaluates(self) -> Evaluation:
        if self._evaluation is None:
            raise TypeError("a PipelineModule of one's own is evaluated by eval_batch(): its outputs can be anything.")
        return self._evaluation

    def __del__(self) -> None:
        if (run := getattr(self, "asynchronous", None)) is not None:
            run.stop()  # ranks collect garbage when each of them likes, and destroying waits for all
        super().__del__()

    def destroy(self) -> None:
        """As DeepSpeed's; what is under way is finished first, if all ranks call this within half a minute.

        Otherwise, or after an exception, the last updates are not in the model.
        """
        if (run := getattr(self, "asynchronous", None)) is not None:
            run.leave()
        if self.averager is not None:
            self.averager.close()
        if hasattr(self, "checkpointer"):
            self.checkpointer.close()
        if hasattr(self, "planning_process"):
            self.planning_process.close()
        if (migrator := getattr(self, "migrator", None)) is not None:
            migrator.close()
        if (experts := getattr(self, "experts", None)) is not None:
            experts.close()
        self.half_way.is_over = True
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
        with self.between_steps():
            return self.experts.place(placements)

    def prepare_experts(self, placements: Mapping[str, Placement]) -> bool:
        """See :meth:`~paceline.runtime.expert_part.Experts.prepare`."""
        self.half_way.check()
        with self.naming_lost_peers():
            return self.experts.prepare(placements)

    def experts_are_prepared(self) -> bool:
        """See :meth:`~paceline.runtime.expert_part.Experts.is_prepared`."""
        with self.naming_lost_peers():
            return self.experts.is_prepared()

    def is_last_backward(self) -> bool:
        """Whether the backward that runs now is the last of this step on this stage."""
        return bool(self.executor.is_last_backward)

    def _broadcast_model(self) -> None:
        """Give all replicas the weights of the first; DeepSpeed's own fails for a parameter that is a single number."""
        self.shared_experts.broadcast(self.module.parameters(), self.module._grid.get_data_parallel_group())

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
        self.half_way.check_goes_on()
        self._flush_whole()
        return self.checkpointer.save(
            save_dir, tag, client_state, save_latest, exclude_frozen_parameters=exclude_frozen_parameters, **options
        )

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, *args: Any, custom_load_fn: Any = None, **options: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """See :meth:`~paceline.runtime.checkpointer.Checkpointer.load`, which has the other options."""
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn is given: tensors are loaded by name; leave it out.")
        self.half_way.check_goes_on()
        if self.asynchronous is not None:
            self.flush()
            self.asynchronous.steps.forget()  # data of before
        if self.averager is not None:
            self.averager.settle()  # or what a round brings would be added to what is loaded
        loaded = self.checkpointer.load(load_dir, tag, *args, **options)
        if loaded[0] is not None:
            self._global_grad_norm = None  # that of a step before
        return loaded

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> None:
        """Refused: :func:`paceline.export` writes the whole model, for ``from_pretrained``."""
        raise TypeError(
            "save_16bit_model() would write one stage: call paceline.export(engine.module, directory, engine.control)."
        )

    def module_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as DeepSpeed's pipelines write files instead, into the checkpoint that they are saving."""
        raise TypeError(
            "module_state_dict() would be of one stage: call paceline.export(engine.module, directory, engine.control) "
            "for the model, or engine.module.state_dict() for the layers of this rank."
        )

    def offload_states(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as is ``reload_states``: pipelines keep their states on the devices."""
        raise TypeError(
            "offload_states() and reload_states(): pipelines keep their states on the devices; to free them, save a "
            "checkpoint, call engine.destroy(), and load it into another engine later."
        )

    reload_states = offload_states

    def prepare_checkpoint(self, *, exclude_frozen_parameters: bool = False) -> None:
        """See :meth:`~paceline.runtime.checkpointer.Checkpointer.prepare`.

        Nothing without a flush: what is to be saved is under way between steps; the first save takes its memory itself.
        """
        self.half_way.check_goes_on()
        if self.asynchronous is None:
            self.checkpointer.prepare(exclude_frozen_parameters=exclude_frozen_parameters)

    def finish_checkpoint(self) -> None:
        """See :meth:`~paceline.runtime.checkpointer.Checkpointer.finish`."""
        self.checkpointer.finish()

    def checkpoint_error(self) -> CheckpointError | None:
        """See :meth:`~paceline.runtime.checkpointer.Checkpointer.error`."""
        return self.checkpointer.error()

    @property
    def replica(self) -> int:
        """Number of this rank among those that hold the same parameters."""
        if self.mirrors is not None:
            return self.mirrors.stages.ranks.index(self.global_rank)
        return int(self.grid.data_parallel_id)

    # -- layers that move between stages --------------------------------------------------------------------------

    def repartition(self, parts: Sequence[int], *, memory_bytes: int | None = None) -> Migration | None:
        """Have each stage hold the items that ``parts`` says, from the next step on. Call it between steps.

        No number of the training changes: every bit of every weight is what it would have been. Only sums are taken in
        another order: that of the norm, with clipping, and those of gradients over three or more replicas. Of what is
        random (dropout), each rank goes on with its own generator. Hooks on parameters stay behind, and so do those
        that somebody has put on the engine's layers.
        Without a flush, how late a layer's weights are is a matter of its stage, and numbers follow the partition.

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
        self.flush()
        forget_messages(self.held)  # of the last step
        with self.naming_lost_peers():
            migration = self.migrator.migrate(new, memory_bytes)
        WATCH.idle()
        return migration

    def prepare_repartition(self, parts: Sequence[int]) -> bool:
        """Send the layers that :meth:`repartition` is to move later beside the steps until then.

        What steps change of them meanwhile follows when they move, in few bytes. Collective, between steps.

        Returns:
            Whether that was begun; there must be enough of it.

        Raises:
            ValueError: as from :meth:`repartition`.
        """
        WATCH.step = self.global_steps
        self.half_way.check()
        new = None if self.migrator is None else self.migrator.agree(parts)
        if self.migrator is None or new is None:
            return False
        forget_messages(self.held)
        with self.naming_lost_peers():
            is_begun = self.migrator.prepare(new)
        WATCH.idle()
        return is_begun

    def repartition_is_prepared(self) -> bool:
        """Whether all that :meth:`prepare_repartition` sends has arrived on all ranks. Collective, between steps."""
        with self.naming_lost_peers():
            is_prepared = self.migrator is None or self.migrator.is_prepared()
        WATCH.idle()
        return is_prepared

    def forget_repartition(self) -> None:
        """Let go of the layers that :meth:`prepare_repartition` sends, whose move does not come. On all ranks."""
        with self.naming_lost_peers():
            if self.migrator is not None:
                self.migrator.forget()
        WATCH.idle()

    @property
    def migrations(self) -> Sequence[Migration]:
        """Figures of the last migrations."""
        return () if self.migrator is None else self.migrator.migrations

    def _start_partition(self) -> None:
        """Apply the JSON's partition to a module that was built with another one."""
        choice = self.plan.partition_choice
        if choice.method is None or self.num_stages == 1 or self.migrator is None:
            return
        boundaries = self.layers.boundaries(choice.method, choice.profile)
        if boundaries is not None:
            self.repartition(boundaries)

    def forget_old_stages(self) -> None:
        """Drop what was kept of the stage as it was, and bring values to the copies of experts that have come."""
        trains = self.optimizer.layout.trains  # what is frozen for some steps only, too
        self.own_memory.belong_to(p for p in self.module.parameters() if p.requires_grad or trains(p))
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.reach.find(self.control, self._stages_with(trains))
        self._split_backwards()
        self.meter.forget_stage()
        self.reset_activation_shape()
        self.experts.fetch()

    # -- losses, which DeepSpeed's methods keep on the engine ------------------------------------------------------

    total_loss = _of_loss_book("total")
    total_additional_losses = _of_loss_book("additional")
    fwd_outputs = _of_loss_book("of_forwards")
    outputs = _of_loss_book("outputs")

    def flops_profiler_profile_step(self) -> int:
        """None for DeepSpeed's hooks of the module, which in pipelines begin a profile and never show it."""
        return -1

    def _create_module_forward_pre_hook(self) -> Any:
        return super()._create_module_forward_pre_hook() if self._observes_forwards else None

    def _create_module_forward_post_hook(self) -> Any:
        return super()._create_module_forward_post_hook() if self._observes_forwards else None

    @property
    def _observes_forwards(self) -> bool:
        """Whether anything of DeepSpeed's acts around each forward: else its hooks only cost the host time."""
        is_asked = self.wall_clock_breakdown() or self.memory_breakdown() or self.autotuning_enabled()
        return bool(is_asked or self.fp16_auto_cast() or self.random_ltd_enabled())

    # -- what ends a step ----------------------------------------------------------------------------------------

    def _exec_reduce_tied_grads(self) -> None:
        forget_messages(self.held)
        ties = [tie for tie in self.support.ties if self.optimizer.layout.trains(tie.weight)]
        with self.clock.transfer("tied", sum(tie.num_bytes for tie in ties)):
            for tie in ties:
                dist.all_reduce(tie.shared(self.optimizer.gradients.of(tie.weight)), group=tie.group)

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        super()._exec_optimizer_step(lr_kwargs)
        self.experts.after_step()

    def _exec_reduce_grads(self) -> None:
        self.optimizer.reduce_gradients()  # begins; the optimizer's step waits, and books the time
