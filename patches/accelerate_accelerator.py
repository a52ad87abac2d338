"""``accelerate/accelerator.py``: the state dict that the Hugging Face Trainer saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.patches.registry import BY_REPAIR, Patch

if TYPE_CHECKING:
    from accelerate import Accelerator


def get_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Accelerator.get_state_dict`` that asks DeepSpeed for a whole state dict where a rank has not all of it.

    Below ZeRO-3 it takes the module's own: after AutoEP that is one rank's experts, under AutoEP's names, and
    ``save_model`` writes a model that ``from_pretrained`` fills with random experts.
    """

    def get_state_dict(self: Accelerator, model: Any, unwrap: bool = True) -> Any:
        from deepspeed import DeepSpeedEngine

        is_engine = isinstance(model, DeepSpeedEngine)
        if is_engine and model._has_autoep_layers() and not model.zero_optimization_partition_weights():
            return model._consolidated_16bit_state_dict()
        return original(self, model, unwrap)

    return get_state_dict


SAVE_MODEL = Patch(
    target="accelerate.accelerator:Accelerator.get_state_dict",
    make=get_state_dict,
    requires="accelerate>=1.1",
    reason="save_model of the Hugging Face Trainer writes a broken model after AutoEP: rank 0's experts only",
    removable_when="Accelerator.get_state_dict asks DeepSpeed for AutoEP's whole state dict",
    watches="accelerate.accelerator:Accelerator.get_state_dict",
    fingerprint="d3650a99fc23",
    applied_by=BY_REPAIR,
)

PATCHES = (SAVE_MODEL,)
