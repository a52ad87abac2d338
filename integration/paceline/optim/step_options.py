"""Options of the pipelines' optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..comm.host_barrier import HostBarrier
from .buckets import Domain
from .corrections import Corrections
from .max_change import Limits


@dataclass(frozen=True)
class StepOptions:
    """How gradients become new values, on which ranks.

    Args:
        group: the D ranks that hold the same parameters; None for one.
        model_group: the ranks that together hold one model, over which the norm is summed; None for one.
        shard: ZeRO 1; otherwise ZeRO 0.
        domain: the ranks of ``group`` that hold a parameter where not all do (experts on different ranks), or own it
            where not all may (stages of several directions); None for all. They are all the ranks of ``group`` that
            share the other parameters of this domain.
        divisor: what the sum of the ranks' gradients is divided by.
        max_norm: gradients are scaled to this norm at most; 0 for no clipping.
        max_change: how far layers may move in a step, each layer whole, wherever its rows are. Masters are held twice
            during the step. A step whose change is not finite is taken back; moments keep what it gave them. Changes
            are limited as they come into the model, with ``corrections``.
        loss_scaler: of DeepSpeed, for fp16.
        accumulation_dtype: of gradients; None for that of the masters.
        communication_dtype: of gradients while they are reduced; None for that in which they are accumulated.
        bucket_numel: a bucket is full when it has so many elements.
        overlap: reduce a bucket when the last backward has finished it, not after the backward. Asynchronous updates
            are made in a thread beside the computation, not when they are applied.
        device: of the parameters, for a rank that trains none; None for the CPU.
        corrections: of late gradients, where steps are taken beside the computation; None: ``step`` takes them.
        ties: weights of which another rank has a copy, and the two ranks. Asynchronous updates add up their gradients:
            such a weight is to be among those ``apart``, and in the section that completes last.
        host_barrier: called before collectives that are issued beside the computation, with their group.
    """

    group: Any = None
    model_group: Any = None
    shard: bool = True
    domain: Callable[[nn.Parameter], Domain | None] = lambda parameter: None
    divisor: float = 1.0
    max_norm: float = 0.0
    max_change: Limits | None = None
    loss_scaler: Any = None
    accumulation_dtype: torch.dtype | None = None
    communication_dtype: torch.dtype | None = None
    bucket_numel: int = 500_000_000
    overlap: bool = True
    device: torch.device | None = None
    corrections: Corrections | None = None
    ties: Callable[[], Iterable[tuple[nn.Parameter, Any]]] = tuple
    host_barrier: HostBarrier = lambda group: None

    @property
    def is_asynchronous(self) -> bool:
        return self.corrections is not None

    def gradient_dtype(self, dtypes: set[torch.dtype], *, is_sharded: bool) -> torch.dtype:
        """The dtype in which gradients of parameters of ``dtypes`` are accumulated.

        Raises:
            ValueError: they cannot be trained together.
        """
        masters, found = {master_dtype(dtype) for dtype in dtypes} or {torch.float32}, sorted(map(str, dtypes))
        if self.is_asynchronous and len(dtypes) > 1:
            raise ValueError(f"parameters of {found} cannot be updated beside the computation: cast the model.")
        if len(masters) > 1 and self.accumulation_dtype is None:
            raise ValueError(f"parameters of {sorted(map(str, masters))} cannot be trained together: cast the model.")
        if is_sharded and len(dtypes) > 1:
            raise ValueError(f"parameters of {found} cannot be sharded together: cast the model, or use ZeRO 0.")
        return self.accumulation_dtype or masters.pop()


DEFAULTS = StepOptions()


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parameters of ``dtype`` are stepped."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
