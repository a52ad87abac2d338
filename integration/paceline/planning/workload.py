"""Computation, exchange and memory of one training step, before it is spread over devices.

Legend: E experts, K of them for each token, ``rows`` = tokens · K of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from .expert_spread import expected_imbalance, most_imbalance
from .experts import Placement, checked_loads, imbalance
from .memory import ItemMemory, States, with_head_slices
from .placement import greedy


class Item(NamedTuple):
    """Embedding, a decoder layer, or head with loss, for one micro-batch on one device that has all of it.

    Args:
        memory: of the whole item, all its experts among it.
        forward_s: of all but the routed experts.
        backward_s: likewise.
        expert_parameters: of its routed experts together; 0: a dense layer.
        expert_s: forward and backward of the routed experts with all rows.
    """

    memory: ItemMemory
    forward_s: float
    backward_s: float
    expert_parameters: int = 0
    expert_s: tuple[float, float] = (0.0, 0.0)


class StageTimes(NamedTuple):
    """Times of a stage beside those of its items, and the cost of splitting a backward.

    Args:
        forward_s: of one micro-batch, whatever the items of the stage: masks, rotary tables.
        backward_s: likewise.
        split_factor: how many times as long as a whole backward the two parts of a split one take; what the forward
            takes longer then is among it.
        weight_share: part of a backward, without what it recomputes, that is the gradients of weights.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    split_factor: float = 1.0
    weight_share: float = 0.5

    def times(self, factor: float) -> StageTimes:
        """On a device that takes ``factor`` times as long, or with as many times the tokens."""
        return self._replace(forward_s=self.forward_s * factor, backward_s=self.backward_s * factor)


NOTHING_BESIDE = StageTimes()


@dataclass(frozen=True)
class Workload:
    """A model, a batch and a precision.

    Args:
        items: in the model's order.
        num_heads: of attention.
        num_kv_heads: of keys and values.
        micro_batch_size: samples.
        train_batch_size: samples of a step.
        states: how states of parameters are kept (its ``data_parallel`` is not looked at).
        rows: of a micro-batch on its way to experts.
        row_bytes: of one of them.
        num_experts: E of each MoE layer; 0: a dense model.
        top_k: K.
        tied_parameters: of the embedding, where the head has the same.
        loads: tokens of each expert, one row a MoE layer; empty: not known.
        unevenness: standard deviation over mean that loads are taken to have where they are not known; 0: all alike.
        capacity_factor: c, where a gate lets an expert have c · rows / E at most.
        worst: experts get what the gate permits at most, and ``loads`` are not looked at.
        rebalanced: experts are placed by ``loads``; otherwise in order.
        stage: times beside those of items.
        recomputed: items whose activations backwards compute anew, as their times and memory say.
        blocks_per_layer: items that a decoder layer is: itself, or its two halves.
        work: of each item, by which stages are cut as far as memory allows; empty: by seconds.

    Raises:
        ValueError: sizes or loads that cannot be.
    """

    items: tuple[Item, ...]
    num_heads: int
    num_kv_heads: int
    micro_batch_size: int
    train_batch_size: int
    states: States = field(default_factory=States)
    rows: float = 0.0
    row_bytes: float = 0.0
    num_experts: int = 0
    top_k: int = 1
    tied_parameters: int = 0
    loads: tuple[tuple[float, ...], ...] = ()
    unevenness: float = 0.0
    capacity_factor: float | None = None
    worst: bool = False
    rebalanced: bool = False
    stage: StageTimes = NOTHING_BESIDE
    recomputed: tuple[int, ...] = ()
    blocks_per_layer: int = 1
    work: tuple[float, ...] = ()
    _imbalance: dict[int, dict[int, float]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "micro_batch_size", "train_batch_size", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a whole number from 1 upwards.")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor is {self.capacity_factor}: give a number above 0.")
        if self.loads:
            self._check_loads()

    def _check_loads(self) -> None:
        layers = len(self.moe_layers)
        if len(self.loads) != layers:
            raise ValueError(f"there are loads of {len(self.loads)} layers and {layers} MoE layers: give one row each.")
        for index, layer in enumerate(self.loads):
            try:
                checked_loads(layer, self.num_experts)
            except ValueError as error:
                raise ValueError(f"loads[{index}]: {error}") from None

    @property
    def recomputes(self) -> bool:
        """Whether any layer is recomputed."""
        return bool(self.recomputed)

    def with_recomputed(self, again: Workload, items: Collection[int]) -> Workload:
        """The workload in which these ``items`` are recomputed.

        Args:
            again: this workload with all layers recomputed.
        """
        mixed = tuple(again.items[index] if index in items else item for index, item in enumerate(self.items))
        return replace(self, items=mixed, recomputed=tuple(sorted(items)))

    def in_head_slices(self, number: int) -> Workload:
        """The workload with the head in ``number`` equal slices, for stages to share."""
        *others, head = self.items
        seconds = head.forward_s / number, head.backward_s / number
        slices = with_head_slices([item.memory for item in self.items], number)[len(others) :]
        items = (*others, *(Item(memory, *seconds) for memory in slices))
        work = (*self.work[:-1], *(self.work[-1] / number for _ in slices)) if self.work else ()
        return replace(self, items=items, work=work)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.items) - 2

    @cached_property
    def moe_layers(self) -> list[int]:
        """Items with experts."""
        return [index for index, item in enumerate(self.items) if item.expert_parameters]

    def most_experts(self, expert_parallel: int) -> int:
        """Experts that each of so many devices has room for."""
        return -(-self.num_experts // expert_parallel)

    def imbalance(self, expert_parallel: int) -> dict[int, float]:
        """Rows of the busiest of so many devices, as a multiple of the mean, by MoE item.

        With one device there is none. Where their number does not divide E, some have an expert more, and are busier
        also if all experts are alike. A gate of unlimited capacity may send every token to experts of one device.
        """
        if expert_parallel not in self._imbalance:
            found = [self._of_layer(layer, expert_parallel) for layer in range(len(self.moe_layers))]
            self._imbalance[expert_parallel] = dict(zip(self.moe_layers, found, strict=True))
        return self._imbalance[expert_parallel]

    def _of_layer(self, layer: int, num_devices: int) -> float:
        if num_devices == 1:
            return 1.0
        most = most_imbalance(self.num_experts, num_devices, self.top_k)
        if self.capacity_factor is not None:
            even = self.most_experts(num_devices) * num_devices / self.num_experts
            most = min(most, self.capacity_factor * even)
        if self.worst:
            return most
        if not self.loads:
            return min(most, expected_imbalance(self.num_experts, num_devices, self.unevenness))
        loads = self.loads[layer]
        placed = greedy(loads, num_devices) if self.rebalanced else Placement.contiguous(self.num_experts, num_devices)
        return min(most, imbalance(placed, loads))
