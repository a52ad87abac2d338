"""The optimizer of a Trainer whose model is a pipeline: made as Trainer makes it, of a stage's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Trainer

from ..config.section import value_at
from ..state.named import REPLICATED
from .module import CausalLMPipeline
from .trainer_refusals import ASKED

if TYPE_CHECKING:
    from .engine import PacelineEngine

Group = dict[str, Any]
"""Parameters, and what holds for them."""


class Stepped(torch.optim.Optimizer):
    """The engine's optimizer as Trainer and callbacks see it: its groups and states; steps are taken already."""

    def __init__(self, engine: PacelineEngine) -> None:
        self._engine = engine
        self._skipped = engine.skipped_steps
        self.defaults = dict(engine.basic_optimizer.defaults)

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        return self._engine.basic_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._engine.basic_optimizer.state

    @property
    def step_was_skipped(self) -> bool:
        before, self._skipped = self._skipped, self._engine.skipped_steps
        return bool(self._skipped > before)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    def state_dict(self) -> Group:
        """State of this rank's part."""
        found: Group = self._engine.basic_optimizer.state_dict()
        return found

    def load_state_dict(self, state_dict: object) -> None:
        raise ValueError(
            "optimizer.load_state_dict was called, and each rank of a pipeline has a part of the optimizer: give "
            "trainer.train(resume_from_checkpoint=…) a checkpoint, which has all of it."
        )

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        return self._engine.basic_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        return self._engine.basic_optimizer.register_step_post_hook(hook)


def parameter_groups(trainer: Trainer, models: Iterable[nn.Module], ds_config: Mapping[str, object]) -> list[Group]:
    """Group parameters as Trainer does: those that decay, and norms and biases, which do not.

    Args:
        models: parts of the model that this rank has.
    """
    does_decay: dict[nn.Parameter, bool] = {}  # a rank with both ends of the pipeline has one tied weight
    for model in models:
        decays = set(trainer.get_decay_parameter_names(model))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                does_decay.setdefault(parameter, name in decays)
    groups = {kind: [p for p, decays in does_decay.items() if decays is kind] for kind in (True, False)}
    decay = value_at(ds_config, "optimizer.params.weight_decay")
    decay = trainer.args.weight_decay if decay is None else decay
    return [{"params": groups[True], "weight_decay": decay}, {"params": groups[False], "weight_decay": 0.0}]


def _asked_optimizer(trainer: Trainer) -> tuple[Any, Group]:
    """Class and arguments of the optimizer that the script or the TrainingArguments name."""
    given = trainer.optimizer_cls_and_kwargs
    found: tuple[Any, Group] = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    return found


def make_optimizer(trainer: Trainer, groups: Iterable[Group]) -> torch.optim.Optimizer:
    """Make the one that the TrainingArguments name, or the script's ``optimizer_cls_and_kwargs``."""
    args = trainer.args
    made, options = _asked_optimizer(trainer)
    if args.device.type == "cpu":  # as the optimizers of the JSON
        options = {key: value for key, value in options.items() if key != "fused"}
    name = str(getattr(args.optim, "value", args.optim))
    is_plain = isinstance(made, type) and issubclass(made, torch.optim.Optimizer)
    if not is_plain or {"params", "model", "optimizer_dict"} & options.keys() or "schedule_free" in name:
        raise ValueError(
            f"optim is {name!r} and {ASKED}: it is made of the whole model, or told of each training and "
            "evaluation, and a stage has its own parameters only; choose one of torch.optim's, such as "
            "adamw_torch, or name one in the JSON."
        )
    optimizer: torch.optim.Optimizer = made(groups, **options)
    return optimizer


def keep_embeddings_wide(trainer: Trainer, engine: PacelineEngine, pipeline: CausalLMPipeline) -> None:
    """Have bitsandbytes' optimizers of 8 bits keep the states of embeddings in 32 bits, as Trainer has them."""
    made, options = _asked_optimizer(trainer)
    if "bitsandbytes" not in str(made) or options.get("optim_bits") != 8:
        return
    basic: Any = engine.basic_optimizer
    modules = [module for model in pipeline.models for module in model.modules()]
    wide = {module.weight for module in modules if isinstance(module, nn.Embedding)}
    masters = {
        id(owned.master)
        for owned in engine.optimizer.owned
        if owned.parameter in wide or getattr(owned.parameter, REPLICATED, False)  # the same weight on another stage
    }
    for number, group in enumerate(basic.param_groups):
        for place, master in enumerate(group["params"]):
            if id(master) in masters:
                basic.mng.index2config[number, place] = {"optim_bits": 32}
