"""What the optimizers of a DeepSpeed engine without a pipeline step: this rank's segment of each parameter.

DeepSpeed's optimizers know parameters as stretches of flat buffers, of which a rank has a part. Their own map leads
from a parameter to its segment here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FlatMasters:
    """What a kind of optimizer steps.

    Args:
        segment: of a parameter, what this rank steps, a view of the optimizer's memory; None for nothing.
        publish: bring the segments' values into the model, on all ranks.
        are_whole: every rank that holds a parameter steps all of it (ZeRO 0).
    """

    segment: Callable[[nn.Parameter], Tensor | None]
    publish: Callable[[], None]
    are_whole: bool


def num_real(parameter: nn.Parameter, segment: Tensor) -> int | None:
    """How many of the segment's elements are the parameter's; ZeRO 3 pads those of the last ranks. None for all."""
    if not hasattr(parameter, "ds_id"):
        return None
    first = segment.numel() * parameter._z3_optimizer._get_param_partition_rank(parameter)  # type: ignore[attr-defined]
    return int(min(segment.numel(), max(0, parameter.ds_numel - first)))  # type: ignore[attr-defined]


def masters_of(optimizer: Any) -> FlatMasters:
    """How to get at what ``optimizer`` steps.

    Raises:
        ValueError: it is none of DeepSpeed's or PyTorch's, or keeps masters in files.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if optimizer.swap_optimizer:
            raise ValueError(
                'zero_optimization.offload_optimizer.device is "nvme", and between steps masters are in files there, '
                'where averaging does not change them: write "cpu", or leave averaging out of "paceline".'
            )
        return FlatMasters(lambda p: _third(optimizer, p), lambda: _publish_third(optimizer), are_whole=False)
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        return FlatMasters(_fragment, optimizer.update_lp_params, are_whole=False)
    if isinstance(optimizer, FP16_Optimizer):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)
        flat = ((group, torch._utils._unflatten_dense_tensors(master.detach(), group)) for group, master in pairs)
        return _copies({p: master for group, masters in flat for p, master in zip(group, masters, strict=True)})
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        both = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        return _copies({p: master for group, masters in both for p, master in zip(group, masters, strict=True)})
    if isinstance(optimizer, torch.optim.Optimizer):
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        return FlatMasters(lambda p: p.detach() if p in trained else None, lambda: None, are_whole=True)
    raise ValueError(
        f"what {type(optimizer).__name__} steps is not known: without a pipeline max_change and averaging are for "
        "optimizers of torch.optim and DeepSpeed; choose one of them, or leave these parts out."
    )


def _copies(masters: Mapping[nn.Parameter, Tensor]) -> FlatMasters:
    """Each parameter has a master, whole, on every rank."""

    @torch.no_grad()
    def publish() -> None:
        for parameter, master in masters.items():
            parameter.copy_(master)

    return FlatMasters(masters.get, publish, are_whole=True)


def _fragment(parameter: nn.Parameter) -> Tensor | None:
    mapping = getattr(parameter, "_hp_mapping", None)  # none where the parameter is not trained, or not here
    return None if mapping is None else mapping.hp_fragment.detach()


def _third(optimizer: Any, parameter: nn.Parameter) -> Tensor | None:
    """Where the master lies: ``get_local_fp32_param`` copies those that are offloaded to the device."""
    position = optimizer.grad_position.get(optimizer.get_param_id(parameter))
    if position is None:
        return None
    group, start, numel = position
    segment: Tensor = optimizer.fp32_partitioned_groups_flat[group].narrow(0, start, numel)
    return segment.detach()


def _publish_third(optimizer: Any) -> None:
    """As the optimizer does it at the end of a step."""
    optimizer._partition_all_parameters()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer._post_step(set())
