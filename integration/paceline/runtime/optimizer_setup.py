"""Options of a pipeline's optimizer, from what DeepSpeed has read of its JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from typing import TypeAlias

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import nn

from ..config.optimizers import ELEMENTWISE, class_name
from ..config.section import value_at
from ..optim.step_options import StepOptions
from ..optim.torch_optimizers import check_deepspeeds, make_optimizer, torch_class

_UNFIT = {
    "grokadamw": "it treats a parameter by how many come before it in the model, and a stage has its own only",
    "schedulefree": "it changes weights where training and evaluations begin, and copies of them stay as they were",
    "torchao": "its states are tensors of its own kind, which can be neither saved nor moved by rows",
}
"""Packages whose optimizers cannot train a pipeline, and why."""

Parameters: TypeAlias = Sequence[nn.Parameter] | Sequence[Mapping[str, object]]
"""Parameters, or groups of them."""


def basic_optimizer(
    engine: DeepSpeedEngine,
    client_optimizer: torch.optim.Optimizer | Callable[[Parameters], torch.optim.Optimizer] | None,
    parameters: Parameters,
) -> torch.optim.Optimizer:
    """The optimizer of the caller, or the one that the JSON names, over the parameters that train.

    Args:
        engine: DeepSpeed's.
        client_optimizer: an optimizer, a function that makes one, or None.
        parameters: or groups of them.

    Raises:
        ValueError: it cannot train a pipeline.
    """
    device = torch.device(engine.device)
    # Of a stage that is frozen: torch.optim refuses an empty list, and functions of the caller sort parameters.
    nothing = nn.Parameter(torch.empty(0, 0, device=device))
    parameters = parameters or [nothing]
    if isinstance(client_optimizer, torch.optim.Optimizer):
        basic = client_optimizer
    elif client_optimizer is not None:
        basic = client_optimizer(parameters)
    elif torch_class(engine.optimizer_name()) is not None:
        basic = make_optimizer(engine.optimizer_name(), parameters, engine.optimizer_params() or {}, device)
    else:
        check_deepspeeds(str(engine.optimizer_name()), device)
        basic = engine._configure_basic_optimizer(parameters)  # one of DeepSpeed's own
    if why := _UNFIT.get(type(basic).__module__.partition(".")[0]):
        raise ValueError(
            f"optimizer is {class_name(basic)}, which cannot train a pipeline: {why}; choose one of "
            f"{', '.join(sorted(ELEMENTWISE))}."
        )
    for group in basic.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad and p is not nothing]
    basic.state.pop(nothing, None)
    closure = signature(basic.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"optimizer is a {type(basic).__name__}, whose step needs a closure that computes the loss again, and a "
            f"pipeline's step computes it once: choose one of {', '.join(sorted(ELEMENTWISE))}."
        )
    return basic


def check_own_parameters(basic: torch.optim.Optimizer, own: Collection[nn.Parameter]) -> None:
    """Raise ValueError if the optimizer has a parameter that is none of the stage's."""
    outsiders = [p for group in basic.param_groups for p in group["params"] if p not in own]
    if outsiders:
        raise ValueError(
            f"the optimizer has a parameter of shape {list(outsiders[0].shape)} that is not in the module, "
            f"one stage of the model that this {type(basic).__name__} was made for: pass a function of the "
            "stage's parameters (optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)), or name "
            'one under "optimizer" in the JSON; leave model_parameters out if they are those of the whole model.'
        )


def step_options(engine: DeepSpeedEngine, grid: PipelineParallelGrid, *, spreads_experts: bool) -> StepOptions:
    """Options of the optimizer that the JSON and the grid of ranks decide.

    Args:
        engine: DeepSpeed's.
        spreads_experts: ranks of a stage have different experts, or slices of layers.
    """
    scaler = None
    if engine.fp16_enabled():
        scaler = CreateLossScaler(
            dtype=torch.half,
            static_loss_scale=engine.loss_scale(),
            dynamic_scaling=engine.dynamic_loss_scale(),
            dynamic_loss_args=engine.dynamic_loss_scale_args(),
        )
    # fp32 unless ``data_types.grad_accum_dtype`` says otherwise: a pipeline adds up many micro-batches.
    accumulation_dtype = None if engine._config.grad_accum_dtype is None else engine.get_data_types()[1]
    communication_dtype = engine.communication_data_type  # of the model, unless the JSON says otherwise
    # DeepSpeed says fp32 of fp64 models too.
    is_wide = communication_dtype == torch.float32
    if engine._config.communication_data_type is None and (is_wide or accumulation_dtype is not None):
        communication_dtype = accumulation_dtype
    backend = torch.distributed.get_backend()
    return StepOptions(
        group=grid.get_data_parallel_group() if grid.data_parallel_size > 1 else None,
        model_group=grid.get_model_parallel_group(),
        shard=engine.zero_optimization_stage() == 1,
        max_norm=engine.gradient_clipping(),
        loss_scaler=scaler,
        accumulation_dtype=accumulation_dtype,
        communication_dtype=communication_dtype,
        bucket_numel=int(engine.zero_reduce_bucket_size()),
        overlap=overlaps_reduction(engine._config._param_dict, backend, spreads_experts=spreads_experts),
        device=torch.device(engine.device),
    )


def overlaps_reduction(ds_config: Mapping[str, object], backend: str, *, spreads_experts: bool) -> bool:
    """Whether buckets are reduced during the last backward.

    In a rank's last backward all its receives are done, so that no transfer between stages waits for a reduction that
    waits for it, even where operations of different communicators run one at a time (NCCL). Experts on several ranks,
    as slices of layers, have collectives within the backward: there the user asks for it.
    """
    asked = value_at(ds_config, "zero_optimization.overlap_comm")
    if isinstance(asked, bool):
        return asked
    return backend == "gloo" or not spreads_experts
