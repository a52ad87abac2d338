"""DeepSpeed's pipeline engine with the optimizer of :mod:`paceline.optim` and checkpoints that fit any shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from torch import Tensor, nn

from ..averaging.islands import Averaging
from ..averaging.masters_by_name import PipelineMasters
from ..comm.control import ControlPlane
from ..config import PacelineConfig
from ..config.section import value_at
from ..config.stage_counts import resolve_method
from ..measure.clock import Clock
from ..optim.sharded import ShardedOptimizer
from ..optim.torch_optimizers import check_deepspeeds, make_optimizer, torch_class
from ..state.named import is_copy, link_full_access, names_of, tied_weights
from ..supervise.watch import WATCH
from .checkpointing import Checkpointing
from .expert_part import Experts
from .meter import Meter
from .migration import Migration, Migrator, Seat, StageParameters
from .movable_layers import Layers
from .natural_gradient_part import NaturalGradientPart, agreed_limits, loss_scale_of
from .plain_layers import PlainLayers
from .rate import check_scheduler_object
from .reach import Reach
from .scheduling import Scheduling
from .stage_runner import LossBook

_Asks = Callable[[nn.Parameter], bool]

TIMES_EVERY = 10
"""Steps between lines of ``wall_clock_breakdown``: what DeepSpeed's documents give for ``steps_per_print``."""


class PacelineEngine(Experts, Averaging, Checkpointing, Scheduling, PipelineEngine):
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.control = getattr(model, "control", None) or ControlPlane.create(
            model.num_stages, pipes=model._grid._topo.get_axis_comm_lists("pipe")
        )
        self.loss_book = LossBook()
        self.reach = Reach(model.num_stages)
        self._writer = None
        super().__init__(*args, **kwargs)
        self._start_experts()
        self._start_natural_gradient()
        if isinstance(self.optimizer, ShardedOptimizer):
            self._start_averaging(lambda: PipelineMasters(self))
        self.clock = Clock(torch.device(self.device))
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.clock = self.clock
        self.meter = Meter(self.clock, self.module, self.clock.device)
        self.layers = self._make_layers()
        self._start_scheduling()
        self.migrator = self._make_migrator()
        self._start_partition()

    def _start_natural_gradient(self) -> None:
        section, gather = PacelineConfig.of(self._config._param_dict), self.control.gather
        if section.natural_gradient is not None:
            self.natural_gradient = NaturalGradientPart(
                section.natural_gradient,
                self.module,
                gather=gather,
                device=torch.device(self.device),
                unit=self._unit_of_sum,
                name_of=getattr(self.module, "state_name", str),
            )
        limits = agreed_limits(section.limits, self.module, names_of(self.module), gather)
        if limits is not None and self.optimizer is not None:
            self.optimizer.max_change = limits

    def _unit_of_sum(self, num_rows: int) -> float:
        """Factor that makes a gradient that of a loss summed over rows: a loss here is the mean of a micro-batch."""
        return num_rows * self.gradient_accumulation_steps() / loss_scale_of(self.optimizer)

    def natural_gradient_report(self) -> dict[str, float] | None:
        """See :meth:`NaturalGradientPart.report`; None without natural gradients."""
        return None if self.natural_gradient is None else self.natural_gradient.report()

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
            self._check_experts_optimizer(self.basic_optimizer)
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
        parameters = parameters or [{"params": []}]  # of a stage that is frozen; torch.optim refuses an empty list
        if isinstance(client_optimizer, torch.optim.Optimizer):
            basic = client_optimizer
        elif client_optimizer is not None:
            basic = client_optimizer(parameters)
        elif torch_class(self.optimizer_name()) is not None:
            device = torch.device(self.device)
            basic = make_optimizer(self.optimizer_name(), parameters, self.optimizer_params() or {}, device)
        else:
            check_deepspeeds(str(self.optimizer_name()), torch.device(self.device))
            basic = self._configure_basic_optimizer(parameters)  # one of DeepSpeed's own
        for group in basic.param_groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        return basic

    def _shard(self, basic: torch.optim.Optimizer) -> ShardedOptimizer:
        grid = self.module._grid
        names, counts, apart = self._placement()
        outsiders = [p for g in basic.param_groups for p in g["params"] if p not in names]
        if outsiders:
            raise ValueError(
                f"the optimizer has a parameter of shape {list(outsiders[0].shape)} that is not in the module, "
                f"one stage of the model that this {type(basic).__name__} was made for: pass a function of the "
                "stage's parameters (optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)), or name "
                'one under "optimizer" in the JSON.'
            )
        scaler = None
        if self.fp16_enabled():
            scaler = CreateLossScaler(
                dtype=torch.half,
                static_loss_scale=self.loss_scale(),
                dynamic_scaling=self.dynamic_loss_scale(),
                dynamic_loss_args=self.dynamic_loss_scale_args(),
            )
        accumulation_dtype = self._accumulation_dtype()
        communication_dtype = self.communication_data_type  # of the model, unless the JSON says otherwise
        # DeepSpeed says fp32 of fp64 models too.
        is_wide = communication_dtype == torch.float32
        if self._config.communication_data_type is None and (is_wide or accumulation_dtype is not None):
            communication_dtype = accumulation_dtype
        return self._make_sharded(
            basic,
            names,
            group=grid.get_data_parallel_group() if grid.data_parallel_size > 1 else None,
            model_group=grid.get_model_parallel_group(),
            shard=self.zero_optimization_stage() == 1,
            divisor=self._gradient_divisor(),
            max_norm=self.gradient_clipping(),
            loss_scaler=scaler,
            counts=counts,
            apart=apart,
            domain=self._expert_domain(),
            accumulation_dtype=accumulation_dtype,
            communication_dtype=communication_dtype,
            bucket_numel=int(self.zero_reduce_bucket_size()),
            device=torch.device(self.device),
            overlap=self._overlaps_reduction(),
        )

    def _overlaps_reduction(self) -> bool:
        """Whether buckets are reduced during the last backward.

        In a rank's last backward all its receives are done, so that no transfer between stages waits for a reduction
        that waits for it, even where operations of different communicators run one at a time (NCCL). Experts on several
        ranks have collectives within the backward: there the user asks for it.
        """
        asked = value_at(self._config._param_dict, "zero_optimization.overlap_comm")
        if isinstance(asked, bool):
            return asked
        return torch.distributed.get_backend() == "gloo" or self._expert_groups.size == 1

    def _make_sharded(
        self, basic: torch.optim.Optimizer, names: dict[nn.Parameter, str], **options: Any
    ) -> ShardedOptimizer:
        return ShardedOptimizer(basic, names, **options)

    def _placement(self) -> StageParameters:
        grid, module = self.module._grid, self.module
        tied = tied_weights(module)
        first_slice = grid.get_slice_parallel_rank() == 0

        def counts(parameter: nn.Parameter) -> bool:
            is_slice = getattr(parameter, "model_parallel", False)
            return not is_copy(parameter, tied) and (first_slice or is_slice)

        return StageParameters(names_of(module), counts, lambda parameter: id(parameter) in tied)

    def _accumulation_dtype(self) -> torch.dtype | None:
        """fp32 unless ``data_types.grad_accum_dtype`` says otherwise: a pipeline adds up many micro-batches."""
        return None if self._config.grad_accum_dtype is None else self.get_data_types()[1]

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
        self._check_whole()
        with self._naming_lost_peers():
            self._join_islands()
            with self._recorded():
                self._open_step(self.micro_batches, trains=True)
                loss = super().train_batch()
            if self.steps_per_print() is None:  # nobody reads it, and it keeps two events a step until somebody does
                self.timers(TRAIN_BATCH_TIMER).reset()
            self._average(loss, self._tokens_of_step())
        WATCH.idle()
        return loss

    def _tokens_of_step(self) -> int:
        """That the last step was of, of all replicas; samples, where a layer's inputs are anything."""
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
        self._check_whole()
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
        self._leave_islands()
        super().destroy()
        self.transport.close()

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
        self._check_whole()
        if self.migrator is None:
            raise ValueError(
                'there is no optimizer, so layers have no reason to move: write "optimizer" into the JSON.'
            )
        new = self.migrator.agree(parts)
        if new is None:
            return None
        self._forget_doing()  # of the last step
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
            half_way=self._half_way,
            learned=self.natural_gradient,
            refuse=self._refuse_migration,
            after=self._forget_the_old_stage,
        )

    def _start_partition(self) -> None:
        """Apply the JSON's partition to a module that was built with another one."""
        method = resolve_method(self._config._param_dict)[0]
        if method is None or self.num_stages == 1 or self.migrator is None:
            return
        boundaries = self.layers.boundaries(method, self.partition_choice.profile)
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

    @property
    def total_loss(self) -> Any:
        return self.loss_book.total

    @total_loss.setter
    def total_loss(self, value: Any) -> None:
        self.loss_book.total = value

    @property
    def total_additional_losses(self) -> Any:
        return self.loss_book.additional

    @total_additional_losses.setter
    def total_additional_losses(self, value: Any) -> None:
        self.loss_book.additional = value

    @property
    def fwd_outputs(self) -> list[Any]:
        return self.loss_book.of_forwards

    @fwd_outputs.setter
    def fwd_outputs(self, value: list[Any]) -> None:
        self.loss_book.of_forwards = value

    @property
    def outputs(self) -> Any:
        return self.loss_book.outputs

    @outputs.setter
    def outputs(self, value: Any) -> None:
        self.loss_book.outputs = value

    def flops_profiler_profile_step(self) -> int:
        """None for DeepSpeed's hooks of the module, which in pipelines begin a profile and never show it."""
        return -1

    # -- what ends a step ----------------------------------------------------------------------------------------

    def _exec_reduce_tied_grads(self) -> None:
        self._forget_doing()
        ties = [(w, group) for w, group in self.module.get_tied_weights_and_groups() if self.optimizer.trains(w)]
        num_bytes = sum(w.numel() * w.element_size() for w, _ in ties)
        with self.clock.transfer("tied", num_bytes):
            for weight, group in ties:
                dist.all_reduce(self.optimizer.gradient(weight), group=group)

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        super()._exec_optimizer_step(lr_kwargs)
        if self.expert_looks is not None:
            self.expert_looks.after_step()

    def _exec_reduce_grads(self) -> None:
        self.optimizer.reduce_gradients()  # begins; the optimizer's step waits, and books the time
