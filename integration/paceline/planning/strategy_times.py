"""Busy seconds of a stage's device for each item of a model, by the strategy that spreads it.

Legend: t, ep of :class:`~paceline.planning.strategy_shape.Strategy`; B_max rows of the busiest device of an
expert-parallel group, for one micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

from .cluster import Cluster
from .strategy_shape import Strategy
from .workload import Workload

EXCHANGES = 4
"""All-to-alls of an MoE layer: there and back, in the forward and in the backward."""

REDUCTIONS = 4
"""All-reduces of a tensor-parallel layer: after attention and after its feed-forward part, and in the backward."""


class ItemTime(NamedTuple):
    """Seconds of one item with one micro-batch, forward and backward.

    Args:
        dense: computing all but the experts.
        experts: computing them, on the busiest device.
        all_to_all: rows on their way to experts and back.
        tensor: all-reduces of tensor parallelism.
    """

    dense: tuple[float, float]
    experts: tuple[float, float]
    all_to_all: float
    tensor: float

    @property
    def forward_s(self) -> float:
        """All of the forward: communication is half in the forward and half in the backward."""
        return self.dense[0] + self.experts[0] + (self.all_to_all + self.tensor) / 2

    @property
    def backward_s(self) -> float:
        """All of the backward."""
        return self.dense[1] + self.experts[1] + (self.all_to_all + self.tensor) / 2

    @property
    def total_s(self) -> float:
        """Both."""
        return self.forward_s + self.backward_s


def item_times(strategy: Strategy, workload: Workload, cluster: Cluster) -> list[ItemTime]:
    """Times of all items. Where experts of a layer are unevenly busy, all wait for the busiest.

    An MoE layer is affine in the rows B_max of the busiest device, ``T = 3 s · B_max + 4 · A(B_max)``: with experts of
    n matrices of ``H · αH`` (n = 3 with a gate, else 2) and a device of P FLOP/s, ``3 s = 3 · 2nα·H² / P``, or what was
    measured; ``A = latency + H · bytes / BW · B_max``, less the share of it that stays on its device.

    Source: SmartMoE (USENIX ATC 2023), section 4.2.
    """
    imbalance = workload.imbalance(strategy.expert)
    tensor, last = strategy.tensor, len(workload.items) - 1
    times = []
    for index, item in enumerate(workload.items):
        share = 1 / tensor if index else 1.0
        dense = (item.forward_s * share, item.backward_s * share)
        reductions = 0.0
        if tensor > 1 and 0 < index < last:
            reductions = (
                REDUCTIONS / workload.blocks_per_layer * cluster.all_reduce_s(item.memory.output_bytes, tensor, 1)
            )
        experts, exchanges = (0.0, 0.0), 0.0
        if item.expert_parameters:
            busiest = imbalance[index]
            experts = (item.expert_s[0] * busiest / tensor, item.expert_s[1] * busiest / tensor)
            sent = workload.rows * busiest * workload.row_bytes
            exchanges = EXCHANGES * cluster.all_to_all_s(sent, strategy.expert, tensor)
        times.append(ItemTime(dense, experts, exchanges, reductions))
    return times
