"""``deepspeed/runtime/fp16/unfused_optimizer.py``: the gradient norm of fp16 without ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.patches.registry import BY_REPAIR, Patch

if TYPE_CHECKING:
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer


def unscale_and_clip_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    """``FP16_UnfusedOptimizer.unscale_and_clip_grads`` that takes the scale out of the norm that is told, too."""

    def unscale_and_clip_grads(self: FP16_UnfusedOptimizer, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        self._global_grad_norm = total_norm / self.loss_scale_config.cur_scale
        return original(self, total_norm, *args, **kwargs)

    return unscale_and_clip_grads


_OPTIMIZER = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"

NORM = Patch(
    target=f"{_OPTIMIZER}.unscale_and_clip_grads",
    make=unscale_and_clip_grads,
    requires="deepspeed>=0.19.8,<0.20",
    reason="fp16 without ZeRO tells the norm of gradients that are multiplied by the loss scale",
    removable_when="FP16_UnfusedOptimizer divides its _global_grad_norm by the loss scale, as FP16_Optimizer does",
    watches=f"{_OPTIMIZER}.unscale_and_clip_grads",
    fingerprint="748792c7d107",
    applied_by=BY_REPAIR,
)

PATCHES = (NORM,)
