"""``deepspeed/runtime/engine.py``: an optimizer of one's own with a MoE model; a whole state dict after AutoEP; the
loss scale of fp16 without ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.patches.registry import BY_REPAIR, Patch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def configure_optimizer(original: Callable[..., None]) -> Callable[..., None]:
    """``DeepSpeedEngine._configure_optimizer`` that splits a client's parameter groups as it splits its own.

    ZeRO needs experts in parameter groups of their own, marked ``moe``, because it reduces them over other ranks.
    Where DeepSpeed makes the optimizer it makes these groups; an optimizer that it is given (by the Hugging Face
    Trainer without ``"optimizer"`` in the JSON) fails on "None of the param groups are marked as MoE", and so do
    groups without a name.
    """

    def _configure_optimizer(self: DeepSpeedEngine, client_optimizer: Any, model_parameters: Any) -> None:
        if self.has_moe_layers and client_optimizer is None:
            if model_parameters and all(isinstance(group, dict) for group in model_parameters):
                groups = [{**group, "params": _as_list(group["params"])} for group in model_parameters]
                model_parameters = with_moe_groups(groups)
        elif self.has_moe_layers and _needs_moe_groups(self):
            if hasattr(client_optimizer, "param_groups"):
                _split_groups(client_optimizer)
            else:
                client_optimizer = _then_split_groups(client_optimizer)
        original(self, client_optimizer, model_parameters)

    return _configure_optimizer


def _as_list(parameters: Any) -> list[Any]:
    return [parameters] if hasattr(parameters, "grad_fn") else list(parameters)  # one tensor will do for torch


def _needs_moe_groups(engine: Any) -> bool:
    """Whether the optimizer will be one of those that insist: ZeRO-1, ZeRO-2 or ``BF16_Optimizer``."""
    return engine.zero_optimization_stage() in (1, 2) or (engine.pipeline_parallelism and engine.bfloat16_enabled())


def _split_groups(optimizer: Any) -> None:
    groups = with_moe_groups(optimizer.param_groups)
    if len(groups) > len(optimizer.param_groups) and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "the optimizer already has a learning-rate scheduler, with one rate for each parameter group, and the "
            "model's experts need groups of their own: make the scheduler after deepspeed.initialize, or pass a "
            "function that makes it as lr_scheduler."
        )
    optimizer.param_groups[:] = groups


def _then_split_groups(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make_optimizer(parameters: Any) -> Any:
        optimizer = make(parameters)
        _split_groups(optimizer)
        return optimizer

    return make_optimizer


def with_moe_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups without their experts, then the experts', each with the options of the group that it comes from."""
    from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer

    experts = any(is_moe_param(parameter) for group in groups for parameter in group["params"])
    if not experts or any("moe" in group for group in groups):
        return groups
    # The split is by name: two groups of one name would become one, with the options of the second.
    groups = [{**group, "params": list(group["params"])} for group in groups]
    names = [group.get("name") for group in groups]
    if None in names or len(set(names)) < len(names):
        for index, group in enumerate(groups):
            group["name"] = f"{index}-{group.get('name', 'params')}"
    return list(split_params_into_different_moe_groups_for_optimizer(groups))


def consolidated_16bit_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepSpeedEngine._consolidated_16bit_state_dict``, for experts that are spread over ranks too."""

    def _consolidated_16bit_state_dict(self: DeepSpeedEngine, exclude_frozen_parameters: bool = False) -> Any:
        if not self._has_autoep_layers() or self.zero_optimization_partition_weights():
            return original(self, exclude_frozen_parameters)
        if self.pipeline_parallelism or self.autotp_size() > 1:
            raise NotImplementedError(
                "a whole state dict of a model with AutoEP layers cannot be gathered over pipeline stages or tensor "
                "parallel ranks: save a checkpoint and convert it with ds_to_universal.py"
            )
        from paceline.patches.deepspeed_auto_ep_layer import gathered_state_dict

        return gathered_state_dict(self.module, exclude_frozen_parameters)

    return _consolidated_16bit_state_dict


def save_16bit_model(original: Callable[..., bool]) -> Callable[..., bool]:
    """``DeepSpeedEngine.save_16bit_model`` that writes all experts, under the names that the model came with."""

    def save_16bit_model(
        self: DeepSpeedEngine,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        if not self._has_autoep_layers() or self.zero_optimization_partition_weights():
            return original(self, save_dir, save_filename, exclude_frozen_parameters)
        whole = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        self.module_state_dict = lambda **_: whole  # what it writes, on rank 0
        try:
            return original(self, save_dir, save_filename, exclude_frozen_parameters)
        finally:
            del self.module_state_dict

    return save_16bit_model


def scale_without_zero(optimizer: object) -> float:
    """Factor by which the optimizer of fp16 without ZeRO divides gradients; 1.0 for any other one."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    scale = optimizer.loss_scale if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)) else None
    return 1.0 if scale is None else float(scale)  # bf16 without ZeRO has FP16_Optimizer too, and there None


def backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepSpeedEngine.backward`` that multiplies by the scale by which the step of fp16 without ZeRO divides."""

    def backward(self: DeepSpeedEngine, loss: Any, *args: Any, **kwargs: Any) -> Any:
        scale = scale_without_zero(self.optimizer)
        if scale == 1.0:
            return original(self, loss, *args, **kwargs)
        scaled = original(self, loss.float() * scale, *args, **kwargs)
        return (scaled.detach() / scale).to(loss.dtype)

    return backward


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"

MOE_GROUPS = Patch(
    target=f"{_ENGINE}._configure_optimizer",
    make=configure_optimizer,
    requires="deepspeed>=0.19.8,<0.20",
    reason='"None of the param groups are marked as MoE" for every optimizer that DeepSpeed does not make itself',
    removable_when="DeepSpeed makes MoE groups of a client's optimizer, as it does of its own",
    watches=f"{_ENGINE}._configure_optimizer",
    fingerprint="dd82a70f2f92",
    applied_by=BY_REPAIR,
)

WHOLE_STATE_DICT = Patch(
    target=f"{_ENGINE}._consolidated_16bit_state_dict",
    make=consolidated_16bit_state_dict,
    requires="deepspeed>=0.19.8,<0.20",
    reason="after AutoEP there is no whole state dict: a rank has its own experts, under other names",
    removable_when="_consolidated_16bit_state_dict gathers AutoEP's experts",
    watches=f"{_ENGINE}._consolidated_16bit_state_dict",
    fingerprint="2fd064d6105e",
    applied_by=BY_REPAIR,
)

SAVE_16BIT = Patch(
    target=f"{_ENGINE}.save_16bit_model",
    make=save_16bit_model,
    requires="deepspeed>=0.19.8,<0.20",
    reason="after AutoEP save_16bit_model writes rank 0's experts only, under names that nothing loads",
    removable_when="save_16bit_model gathers AutoEP's experts",
    watches=f"{_ENGINE}.save_16bit_model",
    fingerprint="a9fbf0f2e4b5",
    applied_by=BY_REPAIR,
)

LOSS_SCALE = Patch(
    target=f"{_ENGINE}.backward",
    make=backward,
    requires="deepspeed>=0.19.8,<0.20",
    reason="fp16 without ZeRO divides gradients by a loss scale that no loss was multiplied by: little is learned",
    removable_when="DeepSpeedEngine.backward multiplies the loss where its optimizer is FP16_Optimizer",
    watches=f"{_ENGINE}.backward",
    fingerprint="89aab0f80f1a",
    applied_by=BY_REPAIR,
)

PATCHES = (MOE_GROUPS, WHOLE_STATE_DICT, SAVE_16BIT, LOSS_SCALE)
