"""Experts follow the load: the actuator that changes their placement.

In each tuning interval the ranks of a group learn how many tokens each expert was sent and how long the experts took.
They search better placements layer by layer, the first rank decides, and all take on its decision before the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..config.expert_choice import MoeChoice
from ..measure.host_names import host_name, num_nodes
from ..planning import tuning
from ..planning.experts import Placement, imbalance, moved
from ..planning.rebalance import (
    LayerLoad,
    Proposal,
    Times,
    Uneven,
    candidates,
    num_copies,
    overheads,
    propose,
    uneven_load,
)
from ..planning.splitting import split
from ..planning.switching import Decision, SwitchRule
from .experts_ahead import LEAST_BYTES, BesideSteps, ExpertsAhead, most_bytes
from .layer import EVEN, ExpertLayer
from .load_measurements import LoadMeasurements, Window
from .moving import Guard, StatePart, move_experts
from .stage_agreement import Stages

logger = logging.getLogger("paceline")

T = TypeVar("T")

FIXED_S, EXPERT_S = 0.02, 8e-4
"""Seconds that moving anything takes, and each expert, beside sending it; before the first were moved."""

KEPT_MOVES = 8
"""Last moves, from which is estimated what moving takes."""

MUCH = 1 << 18
"""Bytes, of which so many show how fast experts can be sent."""

PROBE_BYTES = (1 << 16, 1 << 20)
"""Sent around the ranks, before the first experts are, to learn how fast that goes."""

Placements = Mapping[int, Placement]
"""By number of the layer."""


@dataclass(frozen=True)
class Moved:
    """Experts that changed their rank.

    Args:
        num_moved: experts that a rank has which had them not before.
        num_bytes: that the busiest rank sends or receives.
        paused_bytes: the same of what is sent while training stands still.
        transfer_s: of the slowest rank, in which it exchanged these.
        seconds: that training stood still.
        before: placements of the layers that changed.
    """

    num_moved: int
    num_bytes: int
    paused_bytes: int
    transfer_s: float
    seconds: float
    before: Placements

    def to_json(self) -> dict[str, float]:
        return {
            "moved": self.num_moved,
            "num_bytes": self.num_bytes,
            "paused_bytes": self.paused_bytes,
            "transfer_s": self.transfer_s,
            "seconds": self.seconds,
        }


class Rebalancer:
    """Places the experts of some layers. Every rank of the group has one and calls it at the same places.

    Args:
        loads: of the layers, measured.
        states: what this rank holds of a parameter (:func:`paceline.moe.moving.states_of`).
        group: all ranks that hold these layers: expert-parallel times expert-data-parallel.
        config: how often, and with how many copies.
        decided: what was decided, for :attr:`decisions`.
        stages: of the pipeline, if these layers are of one stage of several.
        beside: what can move beside steps; None: all moves while training stands still.
        half_way: holds moves, which must not end in the middle.
    """

    def __init__(
        self,
        loads: LoadMeasurements,
        states: Callable[[nn.Parameter], Sequence[StatePart]],
        group: Any,
        config: MoeChoice,
        decided: tuning.DecisionLog,
        *,
        stages: Stages | None = None,
        beside: BesideSteps | None = None,
        half_way: Guard = nullcontext,
    ) -> None:
        self.loads, self.stages, self._decided = loads, stages, decided
        self._beside, self._half_way = beside, half_way
        self.layers, self.states, self.group = loads.layers, states, group
        self.num_replicas = config.replicas
        self.evens_out = config.splitting != EVEN
        self._is_repeated = config.rebalance_every > 0
        self._horizon_steps = max(1, config.rebalance_every)
        self._rule = SwitchRule(self._horizon_steps)
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._times: tuple[float, float, float] | None = None
        """Bytes a second, fixed seconds, and seconds for each expert, of moving; once known."""
        self._nodes, self._inside_bytes_per_s = 1, inf
        """Hosts of the ranks that share experts, if each has several of them, and the rate between these."""
        self._before_move: tuple[int, dict[str, float]] = -1, {}
        """Step after which experts were moved last, and what was uneven until then."""
        self._ahead: ExpertsAhead | None = None
        self._is_ahead_somewhere = False
        """Whether any stage sends values for a move that is to come."""
        self._proposed_for: list[tuple[ExpertLayer, Placement]] = []
        """Layers as they were when a change of them was proposed."""
        self._moves: list[tuple[int, float]] = []
        """Experts that changed owner, and seconds beside sending them, of the last moves."""

    @property
    def by_name(self) -> dict[str, ExpertLayer]:
        """The layers by their names."""
        return {layer.name: layer for layer in self.layers}

    def follow(self, layers: Sequence[ExpertLayer]) -> None:
        """Place the experts of ``layers`` from now on, if they are not those of before. Between steps.

        Time that was lost by not moving experts was lost in other layers, and counts no longer.
        """
        if list(layers) != self.layers:
            self.forget_prepared()
            self.loads.follow(layers)
            self._rule = SwitchRule(self._horizon_steps)

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """Decisions about experts and their numbers, in a pipeline of all stages. On the first rank of the job."""
        return [decision for decision in self._decided.decisions if decision["what"] == tuning.EXPERTS]

    @property
    def windows(self) -> list[dict[str, Any]]:
        """On the first rank of the group, step, loads and placements of each tuning interval."""
        return self.loads.windows

    # -- between steps, as somebody asks -------------------------------------------------------------------------

    def place(self, placements: Mapping[str, Placement]) -> dict[str, float]:
        """Move experts so that the named layers have these placements, between two steps. Collective over the group.

        Returns:
            ``moved`` experts, ``num_bytes`` that the busiest rank sends or receives, of these ``paused_bytes`` while
            training stood still, for ``seconds``; ``transfer_s`` of the slowest rank is that exchange.

        Raises:
            ValueError: there is no such layer, or it cannot have such a placement; nothing has moved then.
        """
        found = self._move(self.numbered(placements), None)
        for layer in self.layers:
            layer.fetch()
        return found.to_json()

    def numbered(self, placements: Mapping[str, Placement]) -> dict[int, Placement]:
        """The same by the numbers of layers.

        Raises:
            ValueError: there is no such layer, or it cannot have such a placement.
        """
        unknown = sorted(set(placements) - set(self.by_name))
        if unknown:
            raise ValueError(f"there is no expert layer {unknown[0]!r} here: name one of {sorted(self.by_name)}.")
        for name, placement in placements.items():
            self.by_name[name].check(placement)
        return {self.layers.index(self.by_name[name]): placement for name, placement in placements.items()}

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Experts lie as in the model while inside, without copies, and as before afterwards. Collective.

        For files whose format knows no other placement.
        """
        before = {layer.name: layer.placement for layer in self.layers}
        self.place({name: Placement.contiguous(p.num_experts, p.num_devices) for name, p in before.items()})
        yield  # where one rank fails nobody moves back: the others may wait for it elsewhere
        self.place(before)

    def uneven_s(self) -> dict[str, Uneven] | None:
        """Seconds of a step that each layer takes longer than if its tokens were shared evenly, by the last interval.

        Returns:
            By name of the layer; None if no interval has ended yet, although one will.
        """
        window = self.loads.window
        if window is None:
            return None if self._is_repeated else {}
        now = self._uneven_now(window)
        step, before = self._before_move
        measured = before if step == self.loads.step else now
        return {name: Uneven(measured.get(name, seconds), seconds) for name, seconds in now.items()}

    def _uneven_now(self, window: Window) -> dict[str, float]:
        """As the experts lie."""
        if window.row_s is None:
            return {}
        return {
            layer.name: uneven_load(self._load_of(layer, window), evens_out=self.evens_out) * window.row_s
            for layer in self.layers
            if layer.time_depends_on_load and layer.name in window.names
        }

    def placements(self) -> dict[str, Any]:
        """By name of the layer, the experts on each rank: in a form for JSON."""
        return {layer.name: layer.placement.to_json() for layer in self.layers}

    # -- called by the loop --------------------------------------------------------------------------------------

    def propose(self, steps: int) -> tuning.Proposal[Placements, Moved] | None:
        """Search better placements, and decide whether moving experts pays. Collective over the group."""
        window = self.loads.window
        assert window is not None, "gathered before"
        self._proposed_for = self._now()
        movable = [number for number, layer in enumerate(self.layers) if layer.time_depends_on_load]
        proposal: Proposal | None = None
        if self._times is None and self._size > 1 and self.layers:
            self._nodes = self._nodes_of_group()
            self._times = (_probe(self.group, self.loads.device), FIXED_S, EXPERT_S)
            if self._nodes > 1:
                per_node = self.layers[0].size // self._nodes
                self._inside_bytes_per_s = _probe(self.group, self.loads.device, per_node)
        loads = [self._load_of(self.layers[number], window) for number in movable] if window.row_s is not None else []
        options = self._candidates(loads)
        if self._rank == 0 and window.row_s is not None and movable:
            assert self._times is not None
            proposal = propose(
                loads,
                Times(
                    *(window.row_s, *self._times, self._nodes, self._inside_bytes_per_s),
                    states_come_beside=self._beside is not None,
                ),
                found=options,
                num_replicas=self.num_replicas,
                evens_out=self.evens_out,
                horizon_steps=self._horizon_steps,
            )
        gain_s = self._gain_s(proposal, steps)
        if proposal is None:
            return None
        decision = self._rule.consider(proposal.now_s, proposal.now_s - gain_s, proposal.switch_s, steps)
        change = {movable[place]: placement for place, placement in proposal.placements.items()}
        record = partial(self._record, decision, proposal.best_s, window)
        return tuning.Proposal(change if decision.switch else None, record)

    def prepare(self, change: Placements | None) -> bool:
        """Begin to send the values of experts that are to change ranks. Collective over all stages."""
        if self._beside is None:
            return False
        self.forget_prepared()
        if change:
            self._beside.settle()
            changes = self._changes(change)
            num_bytes = 2 * most_bytes(changes)  # as they were sent, and as they have come
            if num_bytes >= 2 * LEAST_BYTES and all(self._gather(self._beside.has_room(num_bytes))):
                self._ahead = ExpertsAhead(
                    changes, gather=self._gather, group=self._beside.group, pausing_group=self.group
                )
        told = self._gather_in_job((bool(change), self._ahead is not None))
        self._is_ahead_somewhere = any(is_ahead for _, is_ahead in told)
        if any(moves for moves, _ in told):
            self._beside.disturb()
        return self._is_ahead_somewhere

    def is_prepared(self) -> bool:
        """Whether all has come that is on its way in any stage. Collective over all stages."""
        is_done = all(self._gather_in_job(self._ahead is None or self._ahead.is_done))
        if self._is_ahead_somewhere and self._beside is not None:
            self._beside.disturb()  # masters and states come beside the next step, if values do not
        self._is_ahead_somewhere &= not is_done
        return is_done

    def close(self) -> None:
        """End what is on its way. The ranks need not call it together."""
        with suppress(RuntimeError):  # what was lost on its way is of no use any more
            self.forget_prepared()

    def apply(self, change: Placements) -> Moved:
        """Move experts so that the layers have these placements. Collective over the group.

        Where layers or experts have moved since the proposal, nothing does.
        """
        if self._proposed_for != self._now():
            return Moved(0, 0, 0, 0.0, 0.0, {})
        window = self.loads.window
        assert window is not None, "gathered before"
        self._before_move = self.loads.step, self._uneven_now(window)
        return self._move(change, window.loads)

    def _now(self) -> list[tuple[ExpertLayer, Placement]]:
        return [(layer, layer.placement) for layer in self.layers]

    def _changes(self, placements: Placements) -> list[tuple[ExpertLayer, Placement]]:
        return [(self.layers[number], placement) for number, placement in sorted(placements.items())]

    def forget_prepared(self) -> None:
        """Let go of values that were sent for a move that does not come now."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.wait()

    def _gather(self, value: T) -> list[T]:
        """The value of each rank that has these layers."""
        told: list[T] = [value] * self._size
        dist.all_gather_object(told, value, group=self.group)
        return told

    def _gather_in_job(self, value: T) -> list[T]:
        """The value of each rank of all stages."""
        return self._gather(value) if self.stages is None else self.stages.control.gather(value)

    def _gain_s(self, proposal: Proposal | None, steps: int) -> float:
        """By how much the step becomes shorter. Collective over all stages."""
        saved_s = 0.0 if proposal is None else proposal.now_s - proposal.best_s
        if self.stages is None:
            return saved_s
        pays = proposal is not None and self._rule.could_pay(saved_s, proposal.switch_s, steps)
        return min(saved_s, self.stages.step_saved_s(saved_s, pays))

    def _nodes_of_group(self) -> int:
        """Groups of neighbours among the ranks that share experts, a host each; 1 where they are not alike."""
        told = self._gather((self.layers[0].rank, host_name()))
        of_numbers = [[host for number, host in told if number == n] for n in range(self.layers[0].size)]
        found = {num_nodes(hosts) for hosts in zip(*of_numbers, strict=False)}
        return found.pop() if len(found) == 1 else 1

    def _candidates(self, loads: Sequence[LayerLoad]) -> list[list[Placement]]:
        """Search candidates for each layer. The ranks share the search, and tell each other."""
        if not loads:
            return []
        mine = [
            candidates(load, num_replicas=self.num_replicas, evens_out=self.evens_out, nodes=self._nodes)
            for load in loads[self._rank :: self._size]
        ]
        told = self._gather(mine)
        return [told[place % self._size][place // self._size] for place in range(len(loads))]

    def _load_of(self, layer: ExpertLayer, window: Window) -> LayerLoad:
        number = window.names.index(layer.name)
        replicas = self._size // layer.size  # each with experts of its own, for its own tokens
        loads = tuple(load / replicas for load in window.loads[number])
        return LayerLoad(loads, layer.placement, window.expert_bytes[number], window.speeds, window.value_bytes[number])

    def _move(self, placements: Placements, loads: Sequence[Sequence[float]] | None) -> Moved:
        begun = time.perf_counter()
        changes = self._changes(placements)
        if self._ahead is not None and not self._ahead.is_for(changes):
            self.forget_prepared()
        num_moved = sum(moved(layer.placement, placement) for layer, placement in changes)
        num_owners = sum(
            before != after
            for layer, placement in changes
            for before, after in zip(layer.placement.owners, placement.owners, strict=True)
        )
        before = {number: self.layers[number].placement for number in placements}
        ahead, self._ahead = self._ahead, None
        done = move_experts(changes, self.states, self.group, beside=self._beside, ahead=ahead, half_way=self._half_way)
        for number, placement in placements.items():
            self.layers[number].take_on(placement, None if loads is None else loads[number])
        seconds = time.perf_counter() - begun
        if num_owners and self._times is not None:
            per_s = self._times[0]
            if done.paused_bytes >= MUCH and ahead is None and self._nodes == 1:  # else they may be of either side
                per_s = done.paused_bytes / done.transfer_s
            self._moves = [*self._moves[-KEPT_MOVES + 1 :], (num_owners, max(0.0, seconds - done.transfer_s))]
            self._times = (per_s, *overheads(self._moves, (FIXED_S, EXPERT_S)))
        return Moved(num_moved, done.num_bytes, done.paused_bytes, done.transfer_s, seconds, before)

    def _record(self, decision: Decision, best_s: float, window: Window, done: Moved | None) -> tuning.DecisionRecord:
        figures: dict[str, Any] = {
            "step_saved_s": decision.now_s - decision.best_s,
            "suffered_s": decision.suffered_s,
        }
        if window.speeds is not None:
            figures["speeds"] = [round(speed, 3) for speed in window.speeds]
        has_moved = done is not None and bool(done.before)
        if done is not None and has_moved:
            pairs = [(window.loads[n], old, self.layers[n].placement) for n, old in done.before.items()]
            figures |= {
                **done.to_json(),
                "layers": [self.layers[number].name for number in done.before],
                "imbalance_before": [self._imbalance(old, loads, window.speeds) for loads, old, _ in pairs],
                "imbalance_after": [self._imbalance(new, loads, window.speeds) for loads, _, new in pairs],
            }
            logger.info(
                "step %d: experts of %d layers placed anew, %d moved in %.3g s: %s",
                *(self.loads.step, len(done.before), done.num_moved, done.seconds, decision.why),
            )
        return tuning.DecisionRecord(tuning.EXPERTS, self.loads.step, has_moved, decision, best_s, figures)

    def _imbalance(self, placement: Placement, loads: Sequence[float], speeds: Sequence[float] | None) -> float:
        shares = split(placement, loads, speeds=speeds) if self.evens_out and num_copies(placement) else None
        return imbalance(placement, loads, shares, speeds)


def _probe(group: Any, device: torch.device, among: int | None = None) -> float:
    """Bytes a second from each rank to the next, the slowest. Collective.

    Args:
        among: so many neighbours each send in a ring of their own; None: all ranks in one.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ring = size if among is None else among
    first = rank // ring * ring
    to, source = first + (rank + 1) % ring, first + (rank - 1) % ring
    times = []
    for num_bytes in (1, *PROBE_BYTES):
        sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        counts = [num_bytes if place == to else 0 for place in range(size)]
        received = [num_bytes if place == source else 0 for place in range(size)]
        arrived = torch.empty_like(sent)
        dist.barrier(group=group)
        begun = time.perf_counter()
        dist.all_to_all_single(arrived, sent, received, counts, group=group)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # an update on another may wait for other ranks
        times.append(time.perf_counter() - begun)
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    small, large = slowest.tolist()
    return (PROBE_BYTES[1] - PROBE_BYTES[0]) / max(large - small, 1e-9)
