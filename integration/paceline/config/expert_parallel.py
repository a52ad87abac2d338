"""DeepSpeed's section ``"expert_parallel"`` as pipelines read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .section import show

EXPERT_PARALLEL = "expert_parallel"

_READ = frozenset(("enabled", "autoep_size", "preset_model"))
"""``preset_model`` says what a pipeline sees for itself: which layers have experts, and what they compute."""

_DEFAULTS: dict[str, Any] = {
    "async_split_plan": False,
    "combine_impl": "auto",
    "comm_backend": "comm",
    "comm_max_tokens_per_rank": 0,
    "comm_num_sm": 12,
    "comm_qp_margin": 4,
    "disable_triton_grouped_mm": False,
    "expert_tensor_parallel_size": 1,
    "gate_up_impl": "separate",
    "load_balance_coeff": None,
    "route_scale": 1.0,
    "routed_scaling_factor": "auto",
    "row_weighting_impl": "auto",
    "score_apply": "auto",
    "score_func": "auto",
    "top_k": "auto",
    "use_grouped_mm": True,
    "validate_folding_routing": False,
}
"""DeepSpeed's defaults of other keys, where they are not null."""


def resolve_expert_parallel(section: Any, data_parallel: int | None) -> int:
    """Ranks of a stage that share its experts; 1 where the section is absent or not enabled.

    Args:
        section: ``expert_parallel`` of the JSON.
        data_parallel: replicas of each stage; None: not known.

    Raises:
        ValueError: a size that does not fit, or a key that asks DeepSpeed's own layers for something.
    """
    if not isinstance(section, Mapping):
        raise ValueError(f"{EXPERT_PARALLEL} is {show(section)}: it must be an object; write one, or leave it out.")
    if not section.get("enabled", False):
        return 1
    size = section.get("autoep_size", 1)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{EXPERT_PARALLEL}.autoep_size is {show(size)}: it must be a whole number of at least 1.")
    for key, value in section.items():
        if key not in _READ and value != _DEFAULTS.get(key):
            raise ValueError(
                f"{EXPERT_PARALLEL}.{key} is {show(value)}: it is for DeepSpeed's own expert layers, and in a pipeline "
                "the model's own compute (how: experts_implementation of its config); leave it out."
            )
    if data_parallel is not None and data_parallel % size:
        raise ValueError(
            f"{EXPERT_PARALLEL}.autoep_size is {size}: it must divide the {data_parallel} replicas of each stage "
            "(ranks / stages); choose a divisor, or other stages."
        )
    return size
