"""Loads and times of experts, measured while they train, for plannings of their placement.

While nothing moves a step costs nothing but a sum of what the routers counted anyway.

Legend: L layers, E experts of a layer, R ranks of the group.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..planning.expert_speeds import SpeedsInAgreement, rank_speeds
from .layer import ExpertLayer
from .moving import StatePart
from .timing import ExpertClock

logger = logging.getLogger("paceline")

KEPT_WINDOWS = 1024

TIMED_STEPS = 2
"""Before a planning in which experts are timed."""


@dataclass(frozen=True)
class Window:
    """Loads and times that the ranks gathered in a tuning interval.

    Args:
        loads: ``[L][E]`` tokens of each expert in a step, all ranks together.
        row_s: see :class:`~paceline.planning.rebalance.Times`; None if nothing was timed.
        expert_bytes: of each layer, what moves with an expert from one rank.
        speeds: of the ranks that share experts, by their number; of several groups' the slowest. None: equal.
        names: of the layers.
        value_bytes: of each layer, those of an expert's values.
    """

    loads: list[list[float]]
    row_s: float | None
    expert_bytes: list[float]
    speeds: tuple[float, ...] | None = None
    names: tuple[str, ...] = ()
    value_bytes: tuple[float, ...] = ()


class LoadMeasurements:
    """Counts and times the experts of some layers. Every rank of the group has one.

    Args:
        layers: of this rank, in the model's order; the same on all ranks of ``group``. A stage without any takes part
            in the plannings of the others.
        states: what this rank holds of a parameter (:func:`paceline.moe.moving.states_of`).
        group: all ranks that hold these layers.
        device: that the group communicates from.
        file: that the first rank of the group appends each window to, a line of JSON.

    Attributes:
        window: of the last interval; None before its end.
        windows: on the first rank, step, loads and placements of each interval; the last :data:`KEPT_WINDOWS`.
        step: steps of the optimizer so far.
    """

    window: Window | None = None

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        states: Callable[[nn.Parameter], Sequence[StatePart]],
        group: Any,
        device: torch.device,
        file: Path | None = None,
    ) -> None:
        self.layers, self.states, self.group, self.file = list(layers), states, group, file
        self.device = device
        self.windows: list[dict[str, Any]] = []
        self.step = 0
        self._begun = self._timed_from = 0
        """Steps at which the interval, and timing in it, began."""
        self._is_timing = False
        self._steps = 0
        """Steps of the last interval."""
        self._agreed = SpeedsInAgreement()

    def forget(self, step: int) -> None:
        """Count from ``step``: of a run that goes on."""
        self.step = self._begun = step
        self._is_timing = False
        for layer in self.layers:
            layer.clock = None
            layer.routed.zero_()

    def follow(self, layers: Sequence[ExpertLayer]) -> None:
        """Measure ``layers`` from now on, between steps. Their counts came along, and times are taken anew."""
        self.layers[:] = layers
        if self._is_timing:
            self._begin_timing()

    def _begin_timing(self) -> None:
        self._is_timing, self._timed_from = True, self.step
        for layer in self.layers:
            layer.clock = ExpertClock(layer.device)

    # -- called by the loop --------------------------------------------------------------------------------------

    def end_step(self, done: int) -> None:
        """Count a step of the optimizer."""
        self.step = done

    def is_complete(self, done: int) -> bool:
        """Every interval tells enough."""
        return True

    def begin_step(self, done: int, until_planning: int | None) -> None:
        """Time the experts in the last steps before a planning."""
        if until_planning is not None and until_planning <= TIMED_STEPS and not self._is_timing:
            self._begin_timing()

    def gather(self) -> None:
        """Gather what every rank counted and timed, on all ranks, with one collective."""
        self._steps, self._begun, self._is_timing = self.step - self._begun, self.step, False
        if not self.layers:
            self.window = Window([], None, [])
            return
        width = max(layer.num_experts for layer in self.layers)
        mine = torch.zeros(len(self.layers), width + 5, dtype=torch.float64)
        for row, layer in zip(mine, self.layers, strict=True):
            row[: layer.num_experts] = layer.routed.to(torch.float64)
            layer.routed.zero_()
            row[width + 4] = layer.rank
            if layer.clock is not None:
                row[width:-1] = torch.tensor([layer.clock.rows, *layer.clock.read(), self._expert_bytes(layer)])
                layer.clock = None
        mine = mine.to(self.device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, mine, group=self.group)
        everyone = torch.stack(gathered).cpu()
        counts = everyone[:, :, :width].sum(dim=0) / self._steps
        loads = [row[: layer.num_experts].tolist() for row, layer in zip(counts, self.layers, strict=True)]
        rows, compute_s, travel_s, num_bytes = (everyone[:, :, width + i] for i in range(4))
        timed = self.step - self._timed_from
        if (were_timed := (compute_s > 0).all(dim=0)).any():
            timed_rows, timed_s = rows[:, were_timed].tolist(), compute_s[:, were_timed].tolist()
            self._agreed.add(rank_speeds(timed_rows, timed_s, self._agreed.speeds))
        speeds, slowness = self._speeds_of_numbers(everyone[:, 0, width + 4].tolist())
        row_s = _row_s(rows * slowness / timed, compute_s / timed, travel_s / timed)
        names = tuple(layer.name for layer in self.layers)
        value_bytes = tuple(
            float(sum(part.numel * part.parameter.element_size() for part in layer.parts(0))) for layer in self.layers
        )
        self.window = Window(loads, row_s, num_bytes.amax(dim=0).tolist(), speeds, names, value_bytes)
        for layer in self.layers:
            layer.know_speeds(speeds)

    def _speeds_of_numbers(self, numbers: Sequence[float]) -> tuple[tuple[float, ...] | None, Tensor]:
        """Speeds by the ranks' number among those that share experts; how slow each rank of the group is ``[R, 1]``.

        Args:
            numbers: of each rank of the group.
        """
        found = self._agreed.speeds
        size = self.layers[0].size
        if found is None:
            return None, torch.ones(1, 1, dtype=torch.float64)
        slowest = [min(speed for speed, own in zip(found, numbers, strict=True) if own == n) for n in range(size)]
        mean = sum(slowest) / size
        speeds = tuple(speed / mean for speed in slowest)
        return speeds, torch.tensor([[mean / speed] for speed in found], dtype=torch.float64)

    def before_switch(self, *, switches: bool) -> None:
        """Record the window, with the placements that it is of. On the first rank of the group."""
        if dist.get_rank(self.group) != 0 or not self.layers:
            return
        assert self.window is not None
        if self.window.names != tuple(layer.name for layer in self.layers):
            return  # layers have moved since
        note = {
            "step": self.step,
            "steps": self._steps,
            "layers": [
                {"name": layer.name, "loads": loads, **layer.placement.to_json()}
                for layer, loads in zip(self.layers, self.window.loads, strict=True)
            ],
        }
        self.windows = [*self.windows[-KEPT_WINDOWS + 1 :], note]
        if self.file is not None:
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with self.file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(note) + "\n")
            except OSError as error:
                logger.warning("the loads of experts are no longer written: %s", error)
                self.file = None

    def _expert_bytes(self, layer: ExpertLayer) -> float:
        """Bytes that this rank holds of one expert on average."""
        parameters = {
            id(part.parameter): part.parameter for slot in range(layer.num_slots) for part in layer.parts(slot)
        }
        parts = (part for parameter in parameters.values() for part in self.states(parameter))
        return sum(part.tensor.numel() * part.tensor.element_size() for part in parts) / layer.num_slots


def _row_s(rows: Tensor, compute_s: Tensor, travel_s: Tensor) -> float | None:
    """Seconds of one more row on the rank with the most, from ``[R, L]`` of the timed steps.

    Computing by the slope over all ranks and layers: what an expert takes however few rows it has is not saved. A rank
    that waits for others books that as travelling, so the one that waits least tells what travelling takes.
    """
    total = rows.sum()
    if not total:
        return None
    apart = rows - rows.mean()
    spread = (apart**2).sum()
    slope = (apart * (compute_s - compute_s.mean())).sum() / spread if spread > 0 else torch.tensor(0.0)
    average = compute_s.sum() / total
    if not 0 < slope < 2 * average:  # too even, or too noisy, to tell what is fixed
        slope = average
    travel = travel_s.amin(dim=0).sum() / rows.amax(dim=0).sum()
    return float(slope + travel)
