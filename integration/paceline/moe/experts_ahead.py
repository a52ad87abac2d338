"""Send the values of experts that are about to change ranks beside the steps before.

What steps change of them meanwhile follows when the experts move (:mod:`..state.values_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.control import Gather
from ..comm.groups import gloo_group
from ..comm.staging import ranks_sharing
from ..comm.transport import TIMEOUT
from ..measure.device_memory import room_bytes
from ..planning.experts import Placement
from ..state.values_ahead import ValuesAhead
from .expert_ranges import Route, routes
from .layer import ExpertLayer, SlotPart

LEAST_BYTES = 1 << 20
"""Fewer bytes than these, on the rank that sends the most or receives the most, are sent when the experts move."""

Change = tuple[ExpertLayer, Placement]


class BesideSteps(NamedTuple):
    """What can move beside steps, and how.

    Args:
        group: carries it, and nothing else meanwhile; of the ranks that move experts together.
        expect: takes what is to be called before anybody looks at masters and states again
            (:meth:`~paceline.optim.sharded.ShardedOptimizer.expect_states`).
        settle: waits for masters and states that are on their way.
        has_room: whether this rank has room for so many bytes.
        disturb: called where something moves beside the next step of the job, on all its ranks.
    """

    group: dist.ProcessGroup
    expect: Callable[[Callable[[], None]], None]
    settle: Callable[[], None]
    has_room: Callable[[int], bool]
    disturb: Callable[[], None]

    @classmethod
    def of_ranks(
        cls,
        gather: Gather,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        expect: Callable[[Callable[[], None]], None],
        settle: Callable[[], None],
        disturb: Callable[[], None] = lambda: None,
    ) -> BesideSteps:
        """With a new group of the ranks of ``group``, and the room that ``device`` has. Collective over the job.

        Args:
            gather: over the job.
            group: the ranks that move experts together; None for all.
        """
        own = dist.get_process_group_ranks(group)
        groups = {tuple(ranks): gloo_group(ranks, TIMEOUT) for ranks in sorted(set(map(tuple, gather(own))))}
        sharing = ranks_sharing(device)

        def has_room(num_bytes: int) -> bool:
            return num_bytes <= room_bytes(device, sharing)

        return cls(groups[tuple(own)], expect, settle, has_room, disturb)


class ExpertsAhead(ValuesAhead):
    """Values of experts that are about to change ranks, on their way. Collective over these ranks.

    Args:
        changes: layers with the placements that they are to have.
        gather: over the ranks that move experts together.
        pausing_group: of these ranks; None for all there are.
    """

    def __init__(
        self,
        changes: Sequence[Change],
        *,
        gather: Gather,
        group: dist.ProcessGroup,
        pausing_group: dist.ProcessGroup | None,
    ) -> None:
        self._changes = [(layer, layer.placement, new) for layer, new in changes]
        first = changes[0][0]

        def own() -> dict[str, Tensor]:
            leaving = _parts(self._changes, lambda route, rank: route.slot if route.device == rank else None)
            return {name: values(part) for name, part in leaving}

        places = {name: torch.empty_like(values(part)) for name, part in _parts(self._changes, _arriving_slot)}
        names = {name for name, _ in _parts(self._changes, lambda route, rank: 0)}
        super().__init__(
            gather,
            own,
            places,
            names,  # of frozen experts too, whose differences take a byte
            replica=dist.get_rank() if first.group is None else dist.get_process_group_ranks(first.group)[0],
            doing="moving experts",
            device=first.device,
            group=group,
            pausing_group=pausing_group,
        )

    def is_for(self, changes: Sequence[Change]) -> bool:
        """Whether these were sent, and nothing has moved since."""
        asked = [(layer, layer.placement, new) for layer, new in changes]
        return len(asked) == len(self._changes) and all(
            one[0] is other[0] and one[1:] == other[1:] for one, other in zip(asked, self._changes, strict=True)
        )

    def put(self) -> None:
        """Write what has come into the slots that it is for."""
        for name, part in _parts(self._changes, _arriving_slot):
            values(part).copy_(self.places[name])


def most_bytes(changes: Sequence[Change]) -> int:
    """Bytes of values that a rank sends or receives, the rank that sends or receives the most of them."""
    num_bytes: dict[tuple[bool, int], int] = {}
    for layer, new in changes:
        of_expert = sum(values(part).nbytes for part in layer.parts(0))
        for route in routes(layer.placement, new):
            if route.device != route.new_device:
                for end in ((False, route.device), (True, route.new_device)):
                    num_bytes[end] = num_bytes.get(end, 0) + of_expert
    return max(num_bytes.values(), default=0)


def values(part: SlotPart) -> Tensor:
    """The elements of one weight of a slot, flat. A view."""
    return part.parameter.detach().view(-1)[part.start : part.start + part.numel]


def _arriving_slot(route: Route, rank: int) -> int | None:
    return route.new_slot if route.new_device == rank else None


def _parts(
    changes: Sequence[tuple[ExpertLayer, Placement, Placement]], slot_of: Callable[[Route, int], int | None]
) -> Iterator[tuple[str, SlotPart]]:
    """Weights of experts that change ranks, by name.

    Args:
        slot_of: this rank's slot that is meant, by its number; None: the expert is left out.
    """
    for layer, old, new in changes:
        for route in routes(old, new):
            slot = slot_of(route, layer.rank)
            if route.device != route.new_device and slot is not None:
                for part in layer.parts(slot):
                    yield f"{layer.name}.{route.expert}.{part.name}", part
