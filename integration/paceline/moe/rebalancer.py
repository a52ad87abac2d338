"""Experts follow the load: the one loop for expert placements.

Every ``rebalance_every`` steps the ranks put together how many tokens each expert was sent and how long the experts
took. The first of them looks for better placements, layer by layer, and all take on what it decides before the same
step. While nothing moves a step costs nothing but a sum of what the routers counted anyway.

Legend: L layers, E experts of a layer, R ranks of the group.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config.expert_choice import MoeChoice
from ..planning.experts import Placement, device_loads, moved
from ..planning.rebalance import LayerLoad, Proposal, Times, candidates, num_copies, overheads, propose
from ..planning.splitting import split
from ..planning.switching import Decision, SwitchRule
from ..planning.tuning import EXPERTS, DecisionLog, DecisionRecord
from .layer import EVEN, ExpertLayer
from .moving import StatePart, move_experts
from .stage_agreement import KEPT, Looks, Stages
from .timing import ExpertClock

logger = logging.getLogger("paceline")

TIMED_STEPS = 2
"""Before a look in which experts are timed."""

FIXED_S, EXPERT_S = 0.02, 8e-4
"""Seconds that moving anything takes, and each expert, beside sending it; before the first were moved."""

KEPT_MOVES = 8
"""Last moves, from which is estimated what moving takes."""

MUCH = 1 << 18
"""Bytes, of which so many tell how fast experts can be sent."""

PROBE_BYTES = (1 << 16, 1 << 20)
"""Sent around the ranks, before the first experts are, to learn how fast that goes."""


@dataclass(frozen=True)
class Window:
    """Loads and times that the ranks gathered since the last look.

    Args:
        loads: ``[L][E]`` tokens of each expert in a step, all ranks together.
        row_s: see :class:`~paceline.planning.rebalance.Times`; None if nothing was timed.
        expert_bytes: of each layer, what moves with an expert from one rank.
    """

    loads: list[list[float]]
    row_s: float | None
    expert_bytes: list[float]


class Rebalancer:
    """Places the experts of some layers. Every rank of the group has one and calls it at the same places.

    Args:
        layers: of this rank, in the model's order; the same on all ranks of ``group``.
        states: what this rank holds of a parameter (:func:`paceline.moe.moving.states_of`).
        group: all ranks that hold these layers: expert-parallel times expert-data-parallel.
        config: how often, and with how many copies.
        decided: gets the decisions; in a pipeline those of all stages, on the first rank of the job.
        stages: of the pipeline, if these layers are of one stage of several.
        log: file that the first rank of the group appends each window to, a line of JSON, unless the config names one.

    Attributes:
        windows: on the first rank, step, loads and placements of each look; the last :data:`KEPT`.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        states: Callable[[nn.Parameter], Sequence[StatePart]],
        group: Any,
        config: MoeChoice,
        decided: DecisionLog,
        *,
        stages: Stages | None = None,
        log: Path | None = None,
    ) -> None:
        self.stages = stages
        self.layers, self.states, self.group = list(layers), states, group
        self.log = log if config.loads_file is None else Path(config.loads_file)
        self.by_name = {layer.name: layer for layer in self.layers}
        self.num_replicas = config.replicas
        self.looks = Looks(config.rebalance_every)
        self.evens_out = config.splitting != EVEN
        self.rule = SwitchRule(max(1, self.looks.every))
        self.decided = decided
        self.windows: list[dict[str, Any]] = []
        self._timed_from = 0
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._times: tuple[float, float, float] | None = None
        """Bytes a second, fixed seconds, and seconds for each expert, of moving; once known."""
        self._moves: list[tuple[int, float]] = []
        """Experts that changed owner, and seconds beside sending them, of the last moves."""
        self._start_clocks()

    @property
    def step(self) -> int:
        """Steps of the optimizer so far."""
        return self.looks.step

    # -- at step boundaries --------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Once after every step of the optimizer. Collective over the group.

        Raises:
            RuntimeError: a rank was lost.
        """
        for layer in self.layers:
            if layer.replicas is not None:
                layer.replicas.forget()
        if steps := self.looks.after_step():
            self._look(steps)
        self._start_clocks()
        self._fetch()

    def go_on(self, step: int) -> None:
        """Count from ``step``: of a run that goes on."""
        self.looks.go_on(step)
        for layer in self.layers:
            layer.clock = None
            layer.routed.zero_()
        self._start_clocks()

    def _start_clocks(self) -> None:
        looks = self.looks
        if looks.every and looks.next - looks.step <= TIMED_STEPS and self.layers[0].clock is None:
            self._timed_from = looks.step
            for layer in self.layers:
                layer.clock = ExpertClock(layer.device)

    def place(self, placements: Mapping[str, Placement]) -> dict[str, Any]:
        """Move experts so that the named layers have these placements, between two steps. Collective over the group.

        Returns:
            ``moved`` experts, ``num_bytes`` that the busiest rank sent or received, ``seconds``.

        Raises:
            ValueError: there is no such layer, or it cannot have such a placement; nothing has moved then.
        """
        unknown = sorted(set(placements) - set(self.by_name))
        if unknown:
            raise ValueError(f"there is no expert layer {unknown[0]!r} here: name one of {sorted(self.by_name)}.")
        for name, placement in placements.items():
            self.by_name[name].check(placement)
        found = self._move({self.layers.index(self.by_name[name]): p for name, p in placements.items()}, None)
        self._fetch()
        return found

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Experts lie as in the model while inside, without copies, and as before afterwards. Collective.

        For files whose format knows no other placement.
        """
        before = {layer.name: layer.placement for layer in self.layers}
        self.place({name: Placement.contiguous(p.num_experts, p.num_devices) for name, p in before.items()})
        yield  # where one rank fails nobody moves back: the others may wait for it elsewhere
        self.place(before)

    def placements(self) -> dict[str, list[list[int]]]:
        """By name of the layer, the experts on each rank: in a form for JSON."""
        return {layer.name: [list(held) for held in layer.placement.devices] for layer in self.layers}

    # -- the look ------------------------------------------------------------------------------------------------

    def _look(self, steps: int) -> None:
        window = self._gather(steps)
        movable = [number for number, layer in enumerate(self.layers) if layer.time_depends_on_load]
        decision: Decision | None = None
        proposal: Proposal | None = None
        found: dict[int, Placement] | None = None
        if self._times is None and self._size > 1:
            self._times = (_probe(self.group, self.layers[0].device), FIXED_S, EXPERT_S)
        loads = [self._load_of(number, window) for number in movable] if window.row_s is not None else []
        options = self._candidates(loads)
        if self._rank == 0 and window.row_s is not None and movable:
            assert self._times is not None
            proposal = propose(
                loads,
                Times(window.row_s, *self._times),
                found=options,
                num_replicas=self.num_replicas,
                evens_out=self.evens_out,
                horizon_steps=self.looks.every,
            )
        gain_s = self._gain_s(proposal, steps)
        if proposal is not None:
            decision = self.rule.consider(proposal.now_s, proposal.now_s - gain_s, proposal.switch_s, steps)
            if decision.switch:
                found = {movable[place]: placement for place, placement in proposal.placements.items()}
        found = self._from_first(found)
        self._note_window(window, steps)
        before = {number: self.layers[number].placement for number in found or {}}
        took = self._move(found, window.loads) if found else None
        own = []
        if decision is not None and proposal is not None:
            own.append(self._record_of(decision, proposal, window, before, took))
        self.decided.add(own if self.stages is None else self.stages.records(own))

    def _gain_s(self, proposal: Proposal | None, steps: int) -> float:
        """By how much the step becomes shorter. Collective over all stages."""
        saved_s = 0.0 if proposal is None else proposal.now_s - proposal.best_s
        if self.stages is None:
            return saved_s
        pays = proposal is not None and self.rule.could_pay(saved_s, proposal.switch_s, steps)
        return min(saved_s, self.stages.step_saved_s(saved_s, pays))

    def _candidates(self, loads: Sequence[LayerLoad]) -> list[list[Placement]]:
        """Search candidates for each layer. The ranks share the search, and tell each other."""
        if not loads:
            return []
        mine = [
            candidates(load, num_replicas=self.num_replicas, evens_out=self.evens_out)
            for load in loads[self._rank :: self._size]
        ]
        told: list[Any] = [None] * self._size
        dist.all_gather_object(told, mine, group=self.group)
        return [told[place % self._size][place // self._size] for place in range(len(loads))]

    def _load_of(self, number: int, window: Window) -> LayerLoad:
        layer = self.layers[number]
        replicas = self._size // layer.size  # each with experts of its own, for its own tokens
        loads = tuple(load / replicas for load in window.loads[number])
        return LayerLoad(loads, layer.placement, window.expert_bytes[number])

    def _gather(self, steps: int) -> Window:
        """Gather what every rank counted and timed, on all ranks, with one collective."""
        width = max(layer.num_experts for layer in self.layers)
        mine = torch.zeros(len(self.layers), width + 4, dtype=torch.float64)
        for row, layer in zip(mine, self.layers, strict=True):
            row[: layer.num_experts] = layer.routed.to(torch.float64)
            layer.routed.zero_()
            if layer.clock is not None:
                row[width:] = torch.tensor([layer.clock.rows, *layer.clock.read(), self._expert_bytes(layer)])
                layer.clock = None
        mine = mine.to(self.layers[0].device)
        gathered = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(gathered, mine, group=self.group)
        everyone = torch.stack(gathered).cpu()
        counts = everyone[:, :, :width].sum(dim=0) / steps
        loads = [row[: layer.num_experts].tolist() for row, layer in zip(counts, self.layers, strict=True)]
        rows, compute_s, travel_s, num_bytes = (everyone[:, :, width + i] for i in range(4))
        timed = self.looks.step - self._timed_from
        return Window(loads, _row_s(rows / timed, compute_s / timed, travel_s / timed), num_bytes.amax(dim=0).tolist())

    def _expert_bytes(self, layer: ExpertLayer) -> float:
        """Bytes that this rank holds of one expert on average."""
        parameters = {
            id(part.parameter): part.parameter for slot in range(layer.num_slots) for part in layer.parts(slot)
        }
        parts = (part for parameter in parameters.values() for part in self.states(parameter))
        return sum(part.tensor.numel() * part.tensor.element_size() for part in parts) / layer.num_slots

    def _from_first(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0, device=self.layers[0].device)
        return values[0]

    # -- its parts -----------------------------------------------------------------------------------------------

    def _move(self, placements: Mapping[int, Placement], loads: Sequence[Sequence[float]] | None) -> dict[str, Any]:
        begun = time.perf_counter()
        changes = [(self.layers[number], placement) for number, placement in sorted(placements.items())]
        num_moved = sum(moved(layer.placement, placement) for layer, placement in changes)
        num_owners = sum(
            before != after
            for layer, placement in changes
            for before, after in zip(layer.placement.owners, placement.owners, strict=True)
        )
        done = move_experts(changes, self.states, self.group)
        for number, placement in placements.items():
            self.layers[number].take_on(placement, None if loads is None else loads[number])
        seconds = time.perf_counter() - begun
        if num_owners and self._times is not None:
            per_s = self._times[0]
            if done.num_bytes >= MUCH:
                per_s = done.num_bytes / done.transfer_s
            self._moves = [*self._moves[-KEPT_MOVES + 1 :], (num_owners, max(0.0, seconds - done.transfer_s))]
            self._times = (per_s, *overheads(self._moves, (FIXED_S, EXPERT_S)))
        return {"moved": num_moved, "num_bytes": done.num_bytes, "seconds": seconds}

    def _fetch(self) -> None:
        for layer in self.layers:
            layer.fetch()

    # -- reports -------------------------------------------------------------------------------------------------

    def _note_window(self, window: Window, steps: int) -> None:
        if self._rank != 0:
            return
        note = {
            "step": self.step,
            "steps": steps,
            "layers": [
                {"name": layer.name, "loads": loads, "placement": [list(held) for held in layer.placement.devices]}
                for layer, loads in zip(self.layers, window.loads, strict=True)
            ],
        }
        self.windows = [*self.windows[-KEPT + 1 :], note]
        if self.log is not None:
            try:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with self.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(note) + "\n")
            except OSError as error:
                logger.warning("the loads of experts are no longer written: %s", error)
                self.log = None

    def _record_of(
        self,
        decision: Decision,
        proposal: Proposal,
        window: Window,
        before: Mapping[int, Placement],
        took: dict[str, Any] | None,
    ) -> DecisionRecord:
        figures: dict[str, Any] = {
            "step_saved_s": decision.now_s - decision.best_s,
            "suffered_s": decision.suffered_s,
        }
        if took is not None:
            pairs = [(window.loads[n], old, self.layers[n].placement) for n, old in before.items()]
            figures |= {
                **took,
                "layers": [self.layers[number].name for number in before],
                "imbalance_before": [self._imbalance(old, loads) for loads, old, _ in pairs],
                "imbalance_after": [self._imbalance(new, loads) for loads, _, new in pairs],
            }
            logger.info(
                "step %d: experts of %d layers placed anew, %d moved in %.3g s: %s",
                self.step,
                len(before),
                took["moved"],
                took["seconds"],
                decision.why,
            )
        return DecisionRecord(EXPERTS, self.step, decision.switch, decision, proposal.best_s, figures)

    def _imbalance(self, placement: Placement, loads: Sequence[float]) -> float:
        shares = split(placement, loads) if self.evens_out and num_copies(placement) else None
        each = device_loads(placement, loads, shares)
        return max(each) * len(each) / sum(each) if sum(each) else 1.0


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


def _probe(group: Any, device: torch.device) -> float:
    """Bytes a second from each rank to the next, the slowest. Collective."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    times = []
    for num_bytes in (1, *PROBE_BYTES):
        sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        counts = [num_bytes if place == (rank + 1) % size else 0 for place in range(size)]
        received = [num_bytes if (place + 1) % size == rank else 0 for place in range(size)]
        arrived = torch.empty_like(sent)
        dist.barrier(group=group)
        begun = time.perf_counter()
        dist.all_to_all_single(arrived, sent, received, counts, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    small, large = slowest.tolist()
    return (PROBE_BYTES[1] - PROBE_BYTES[0]) / max(large - small, 1e-9)
