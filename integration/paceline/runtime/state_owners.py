"""Ranks that hold the same parameters in an asynchronous pipeline, and owners of the optimizer's state among them.

With several directions the ranks of a mirror group hold the same stages, and so do their replicas. Gradients are summed
over them. By default the rank that has a stage in direction 0 owns the state of it, with its replicas (ZeRO 1): no
other has any. ``"mirror"``: every one of them owns an equal part of each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..comm.transport import TIMEOUT
from ..optim.buckets import Domain
from ..schedules import directions


@dataclass(frozen=True)
class Mirrors:
    """The process groups of an optimizer that works beside the computation, and so has them to itself.

    Args:
        ranks: global ranks that hold what this rank holds, rising; this one is among them.
        group: of these; None for one.
        model_group: ranks that together hold every parameter once; None for one.
        stages: that they hold, rising.
        owners: for each of these stages, positions in ``ranks`` of those that may own rows of it.
    """

    ranks: tuple[int, ...]
    group: Any
    model_group: Any
    stages: tuple[int, ...]
    owners: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def create(
        cls, pipes: Sequence[Sequence[int]], rank: int, routes: tuple[tuple[int, ...], ...], *, equal_parts: bool
    ) -> Mirrors:
        """Collective over the world.

        Args:
            pipes: ranks of each pipeline, by device.
            routes: device of each stage, one route a direction.
            equal_parts: every rank of a mirror group owns an equal part of its stages.
        """
        sets = directions.mirror_groups(routes)
        alike = [sorted(pipe[device] for pipe in pipes for device in devices) for devices in sets]
        groups = [dist.new_group(ranks, timeout=TIMEOUT) if len(ranks) > 1 else None for ranks in alike]
        models = [sorted(ranks) for ranks in zip(*alike, strict=True)]
        model_groups = [dist.new_group(ranks, timeout=TIMEOUT) if len(ranks) > 1 else None for ranks in models]
        number = next(n for n, ranks in enumerate(alike) if rank in ranks)
        stages = tuple(sorted(directions.stages_of(sets[number][0], routes)))
        owners = tuple(
            None if equal_parts else tuple(sorted(alike[number].index(pipe[routes[0][stage]]) for pipe in pipes))
            for stage in stages
        )
        model_group = next(g for g, ranks in zip(model_groups, models, strict=True) if rank in ranks)
        return cls(tuple(alike[number]), groups[number], model_group, stages, owners)

    def domain(self, stage: int) -> Domain:
        """Ranks over which the parameters of a stage are reduced."""
        place = self.stages.index(stage)
        if self.group is None:
            return Domain(section=stage)
        position = self.ranks.index(dist.get_rank())
        return Domain(self.group, len(self.ranks), position, self.owners[place], stage)
