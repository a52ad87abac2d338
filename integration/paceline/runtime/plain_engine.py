"""Training without a pipeline: DeepSpeed's engine with natural gradients, averaging, experts that move."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ..averaging.averager import Averager, make_averager
from ..averaging.masters_by_name import PlainMasters
from ..averaging.period_loss import StepLoss
from ..checkpoint import CheckpointError
from ..comm.control import ControlPlane
from ..comm.groups import end_with, groups_here
from ..config import RunPlan, exclusion
from ..hf.weights import is_pretrained
from ..optim.zero_max_change import FlatMaxChange
from ..planning.tuning import DecisionLog
from .natural_gradient_part import NaturalGradientPart, agreed_limits, loss_scale_of
from .rate import check_scheduler_object
from .trainers_checkpoints import refuse_pipelines_tag

if TYPE_CHECKING:
    from ..moe.layer import ExpertLayer
    from ..moe.rebalancer import Rebalancer
    from ..planning.experts import Placement
    from .plain_expert_part import PlainExperts

logger = logging.getLogger("paceline")

OWN_FILE = "paceline_rank_{rank:05d}.pt"
"""In a checkpoint of DeepSpeed's: what belongs to one rank alone."""


class PlainEngine(DeepSpeedEngine):
    """A ``DeepSpeedEngine`` for a config whose ``"paceline"`` section has something for models without a pipeline."""

    natural_gradient: NaturalGradientPart | None = None
    """None: gradients are ordinary ones."""
    averager: Averager | None = None
    """None: this job is alone."""
    experts: PlainExperts | None = None
    """None: experts stay where they are."""
    lr_scheduler: Any
    _max_change: FlatMaxChange | None = None
    _loss_scale: tuple[int, float] = (-1, 1.0)
    """The scale, with the number of its step: to ask for it may mean to wait for the device."""

    def __init__(self, *args: Any, plan: RunPlan, **kwargs: Any) -> None:
        self.plan = plan
        super().__init__(*args, **kwargs)
        groups = groups_here()
        self.control = ControlPlane.create()
        end_with(self, groups)
        if plan.natural_gradient is not None:
            self.natural_gradient = NaturalGradientPart(
                plan.natural_gradient,
                self.module,
                gather=self.control.gather,
                device=torch.device(self.device),
                unit=self._unit_of_sum,
            )
        trains = self.basic_optimizer is not None  # otherwise it is there to evaluate
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        limits = agreed_limits(plan.max_change, self.module, names, self.control.gather)
        if limits is not None and trains:
            self._max_change = FlatMaxChange(self, limits)
        if plan.averaging is not None and self.mp_world_size > 1:  # also of tp_model_init, which the JSON does not tell
            row = exclusion("averaging", "tensor parallelism")
            written = f"the engine has tensor parallelism over {self.mp_world_size} ranks"
            raise ValueError(row.message("paceline.averaging is there", written))
        self._tokens = 0
        self._loss = StepLoss()
        self.averager = make_averager(
            plan.averaging if trains else None,
            self.control,
            lambda: PlainMasters(self.control, self.module, self.optimizer, self.basic_optimizer),
            self.basic_optimizer,
            is_pretrained=getattr(self.module, "is_pretrained", is_pretrained(self.module)),
        )
        self.decisions = DecisionLog()
        """What was decided about experts."""
        if plan.moe is not None:
            from .plain_expert_part import PlainExperts

            groups = groups_here()
            self.experts = PlainExperts(self, plan.moe, self.decisions, self.control)
            end_with(self, groups)

    @property
    def expert_layers(self) -> Mapping[str, ExpertLayer]:
        """Layers whose experts can move, by the names of the modules."""
        return {} if self.experts is None else self.experts.layers

    @property
    def rebalancer(self) -> Rebalancer | None:
        """Moves experts; None: there are none that move."""
        return None if self.experts is None else self.experts.rebalancer

    def place_experts(self, placements: Mapping[str, Placement]) -> dict[str, Any]:
        """See :meth:`~paceline.runtime.plain_expert_part.PlainExperts.place`."""
        return self._moving_experts.place(placements)

    def prepare_experts(self, placements: Mapping[str, Placement]) -> bool:
        """See :meth:`~paceline.runtime.plain_expert_part.PlainExperts.prepare`."""
        return self._moving_experts.prepare(placements)

    def experts_are_prepared(self) -> bool:
        """See :meth:`~paceline.runtime.plain_expert_part.PlainExperts.is_prepared`."""
        return self._moving_experts.is_prepared()

    @property
    def _moving_experts(self) -> PlainExperts:
        if self.experts is None:
            raise ValueError('experts cannot be placed: "moe" is not in the "paceline" section.')
        return self.experts

    def step(self, lr_kwargs: Any = None) -> None:
        """As DeepSpeed's; after a step of the optimizer experts may move."""
        steps = self.global_steps
        super().step(lr_kwargs)
        if self.experts is not None and self.global_steps > steps:
            self.experts.after_step()

    def zero_grad(self) -> None:
        """As DeepSpeed's; what copies of experts have learned is forgotten too."""
        super().zero_grad()
        if self.experts is not None:
            self.experts.forget_gradients()

    def _configure_lr_scheduler(self) -> None:
        check_scheduler_object(self.client_lr_scheduler, self.basic_optimizer)
        super()._configure_lr_scheduler()

    def _unit_of_sum(self, num_rows: int) -> float:
        """Factor that makes a gradient that of a loss summed over rows: a loss here is the mean of a micro-batch."""
        if self._loss_scale[0] != self.global_steps:
            self._loss_scale = self.global_steps, loss_scale_of(self)
        return float(num_rows * self.gradient_accumulation_steps()) / self._loss_scale[1]

    def natural_gradient_report(self) -> dict[str, float] | None:
        """See :meth:`NaturalGradientPart.report`; None without natural gradients."""
        return None if self.natural_gradient is None else self.natural_gradient.report()

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        if self.averager is not None:  # of a loop that calls the module itself
            self.averager.join(self.global_steps)
        if self.experts is not None:
            self.experts.settle()
        if self._max_change is None:
            super()._take_model_step(*args, **kwargs)
        else:
            self._take_limited_step(self._max_change, *args, **kwargs)
        if self.averager is not None:
            if not self._loss.is_known and self.global_rank == 0:
                _warn_of_no_loss()
            tokens, self._tokens = int(self.control.sum(torch.tensor([self._tokens]))), 0
            self.averager.after_step(self.global_steps, self._loss.take(), tokens)

    def _take_limited_step(self, max_change: FlatMaxChange, *args: Any, **kwargs: Any) -> None:
        max_change.before()
        scheduler, limiting = self.lr_scheduler, _Limiting(self.lr_scheduler, max_change)
        self.lr_scheduler = None if scheduler is None else limiting
        try:
            super()._take_model_step(*args, **kwargs)
            limiting.limit()  # if no scheduler has stepped
        finally:
            self.lr_scheduler = scheduler

    # -- what averaging counts -----------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; where islands average, the first one finds the others."""
        if self.averager is not None and torch.is_grad_enabled():
            self.averager.join(self.global_steps)
            self._tokens += _num_tokens(inputs, kwargs)
            self._loss.begin(kwargs.get("labels"))
        outputs = super().forward(*inputs, **kwargs)
        if self.averager is not None and (loss := _loss_in(outputs)) is not None:
            self._loss.add_forwards(loss)
        return outputs

    def scale(self, loss: Any) -> Any:
        """As DeepSpeed's."""
        if self.averager is not None:
            self._loss.tell(loss, adds_up=False)
        return super().scale(loss)

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """As DeepSpeed's."""
        if self.averager is not None:
            self._loss.tell(loss, adds_up=not scale_wrt_gas)
        return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

    def destroy(self) -> None:
        """As DeepSpeed's."""
        if self.averager is not None:
            self.averager.close()
        if self.experts is not None:
            self.experts.close()
        super().destroy()

    def finish_averaging(self, held_out_loss: Callable[[], float] | None = None) -> None:
        """See :meth:`~paceline.averaging.averager.Averager.finish`."""
        if self.averager is not None:
            self.averager.finish(self.global_steps, held_out_loss)

    # -- files -----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's, with what belongs to our parts: small files of ranks, placements in the client state.

        Raises:
            KeyError: the client state has "paceline" already, and experts move.
        """
        tag = str(tag if tag is not None else f"global_step{self.global_steps}")
        if self.averager is not None:
            self.averager.settle()
        if self.natural_gradient is not None or self.averager is not None:
            folder = Path(save_dir, tag)
            parts = {"natural_gradient": self.natural_gradient, "averaging": self.averager}
            own = {name: {} if part is None else part.state_dict() for name, part in parts.items()}
            with self.control.together(f"saving {folder}"):  # or the others would wait for a rank whose disk is full
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(own, folder / OWN_FILE.format(rank=self.global_rank))
        state = dict(client_state or {}) if self.experts is None else self.experts.saved_with(client_state)
        with self._experts_in_order():
            saved = super().save_checkpoint(
                save_dir,
                tag=tag,
                client_state=state,
                save_latest=save_latest,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
            if self.experts is not None and self.checkpoint_engine.is_decoupled():
                self._commit_decoupled_checkpoint()  # it reads on, and experts are about to move back
        return bool(saved)

    def _experts_in_order(self) -> AbstractContextManager[None]:
        return nullcontext() if self.experts is None else self.experts.in_order()

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As DeepSpeed's."""
        # AutoEP's layers are written with the help of their placement descriptor.
        with nullcontext() if self._has_autoep_layers() else self._experts_in_order():
            return bool(super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters))

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Any, Any]:
        """As DeepSpeed's; natural gradients, averages and the placements of experts go on, as far as they fit.

        On another number of ranks natural gradients are those of another rank, and experts are spread anew.

        Raises:
            ValueError: it is a checkpoint of a pipeline, or the optimizer's states cannot be spread anew.
        """
        refuse_pipelines_tag(load_dir, tag)
        if self.averager is not None:
            self.averager.settle()  # or what a round brings would be added to what is loaded
        loads_all, experts = load_optimizer_states and not load_module_only, self.experts
        spread = experts.to_reshard(load_dir, tag) if experts is not None and loads_all else None
        with self._experts_in_order():
            path, state = super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states and spread is None,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )
            if experts is not None and spread is not None:
                experts.load_states(spread)
        if path is not None and loads_all:
            with self.control.together(f"loading {path}"):
                self._load_own(Path(path).parent)
        if experts is not None:
            experts.restore(state)
        return path, state

    def _load_own(self, folder: Path) -> None:
        files = sorted(folder.glob(OWN_FILE.format(rank=0).replace("00000", "*")))
        if files:
            own = files[self.global_rank % len(files)]
            try:
                saved = torch.load(own, map_location=torch.device(self.device), weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
                raise CheckpointError(f"{own} is damaged ({error}): load another checkpoint.") from error
            if self.natural_gradient is not None:
                self.natural_gradient.load([saved["natural_gradient"]])
            if self.averager is not None and saved["averaging"]:
                self.averager.load_state_dict(saved["averaging"])


def _loss_in(outputs: Any) -> torch.Tensor | None:
    """The loss that a model returns, alone, by this name or first of several; None: it returns none to train on."""
    loss = getattr(outputs, "loss", outputs)
    if loss is outputs and isinstance(outputs, Mapping | tuple | list):
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else next(iter(outputs), None)
    return loss.detach().float() if torch.is_tensor(loss) and loss.requires_grad and not loss.dim() else None


@cache
def _warn_of_no_loss() -> None:
    logger.warning(
        "a step has no loss that islands could be told of, and one with a loss outweighs this one: call "
        "engine.backward(loss), or engine.scale(loss).backward(), where the model does not return its loss"
    )


class _Limiting:
    """Stands for a learning rate's scheduler while a step is taken: limits its change first, and steps if it holds."""

    def __init__(self, scheduler: Any, max_change: FlatMaxChange) -> None:
        self._scheduler, self.limit = scheduler, cache(max_change.after)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.limit():
            self._scheduler.step(*args, **kwargs)


def _num_tokens(inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Of a micro-batch, padding included: to leave it out would mean to wait for the device. Else its rows."""
    ids = kwargs.get("input_ids", inputs[0] if inputs else None)
    if not torch.is_tensor(ids):
        ids = next((v for v in (*inputs, *kwargs.values()) if torch.is_tensor(v)), None)
    if ids is None or not ids.dim():
        return 1
    return int(len(ids) if ids.is_floating_point() else ids.numel())
