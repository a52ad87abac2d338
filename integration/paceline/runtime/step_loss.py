"""The loss of a step that ends with a flush, on every rank.

Where the ranks are one pipeline it comes with the gradients' norm: a step ends with one exchange instead of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor

if TYPE_CHECKING:
    from .engine import PacelineEngine


def comes_with_norm(engine: PacelineEngine) -> bool:
    """Whether one rank has the loss, of a model that no other ranks have, and no other losses are reported.

    All ranks find the same.
    """
    own = getattr(engine.module.get_additional_losses, "__func__", None)  # which may be the object's, not the class's
    is_only_one = own is PipelineModule.get_additional_losses
    is_all = engine.grid.pipe_parallel_size == dist.get_world_size()  # neither replicas nor a model axis
    is_of_one_rank = is_all and len(engine.support.routes) == 1
    return is_of_one_rank and engine.asynchronous is None and (is_only_one or engine.support.sums_tokens)


def part_with_norm(engine: PacelineEngine) -> Tensor | float:
    """This rank's part of the loss, for a sum over ranks that is taken anyway; 0 where it is not brought so."""
    if engine.total_loss is None or not engine.is_last_stage() or not comes_with_norm(engine):
        return 0.0
    own = engine.total_loss if engine.support.sums_tokens else engine._scale_loss_by_gas(engine.total_loss)
    loss: Tensor = own.detach().float()
    return loss


def loss_with_norm(engine: PacelineEngine) -> Tensor:
    """The loss that has come."""
    # A kernel: a copy from the host would wait for all that the device has been given.
    return torch.full((), engine.optimizer.passenger.total, dtype=torch.float32, device=engine.device)


def loss_by_message(engine: PacelineEngine) -> Tensor:
    """The loss of a model whose losses are sums over tokens, of all replicas. Collective."""
    own = engine.total_loss
    if len(engine.support.routes) > 1:  # several ranks of a pipeline have some of it
        shares = torch.zeros(1, dtype=torch.float64) if own is None else own.reshape(1).double().cpu()
        return engine.control.sum(shares)[0].to(engine.device)
    total = torch.zeros((), dtype=torch.float32, device=engine.device)
    if engine.is_last_stage() and own is not None:
        total += own.float()
    if engine.is_last_stage() and engine.is_data_parallel:
        dist.all_reduce(total, group=engine.grid.get_data_parallel_group())
    if engine.is_pipe_parallel:
        dist.broadcast(total, src=engine._loss_stage_global_rank(), group=engine.grid.get_pipe_parallel_group())
    return total
