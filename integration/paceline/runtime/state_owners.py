"""Ranks that hold the same parameters in a pipeline of several directions, and owners of its optimizer's state.

With several directions the ranks of a mirror group hold the same stages, and so do their replicas. Gradients are summed
over them. By default the rank that has a stage in direction 0 owns the state of it, with its replicas (ZeRO 1): no
other has any. ``"mirror"``: every one of them owns an equal part of each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from ..comm.transport import TIMEOUT
from ..config.schedules import ScheduleChoice
from ..config.section import value_at
from ..optim.buckets import Domain
from ..optim.corrections import Corrections
from ..optim.step_options import StepOptions
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


def stage_of_parameters(stages: Sequence[tuple[int, nn.Module]]) -> dict[nn.Parameter, int]:
    """The stage of each parameter of a rank; of a weight that two share, the first.

    Args:
        stages: number and module of each that the rank holds.
    """
    found: dict[nn.Parameter, int] = {}
    for number, stage in sorted(stages, key=lambda pair: -pair[0]):
        found.update(dict.fromkeys(stage.parameters(), number))
    return found


def by_stage(names: Mapping[nn.Parameter, str], stages: Mapping[nn.Parameter, int]) -> dict[nn.Parameter, str]:
    """``names`` in one order on all ranks that hold the same stages, each with other chunks first."""
    return dict(sorted(names.items(), key=lambda item: (stages[item[0]], item[1])))


def over_directions(
    options: StepOptions,
    mirrors: Mirrors,
    stage_of: Callable[[nn.Parameter], int],
    choice: ScheduleChoice,
    ds_config: Mapping[str, Any],
    ties: Callable[[], Sequence[tuple[nn.Parameter, Any]]],
) -> StepOptions:
    """``options`` for a schedule whose mirror groups reduce gradients and own states together.

    Args:
        stage_of: of a parameter, as layers lie now.
        choice: the schedule; without a flush updates are made beside the computation.
        ties: weights of which another rank has a copy, and the group of the two.
    """
    asked = value_at(ds_config, "zero_optimization.overlap_comm")
    return replace(
        options,
        group=mirrors.group,
        model_group=mirrors.model_group,
        domain=lambda parameter: mirrors.domain(stage_of(parameter)),
        shard=len(mirrors.stages) > 1 or options.shard,
        # These groups are the only ones at work in a step, and one thread issues their operations: NCCL can, too.
        overlap=options.overlap or asked is not False,
        corrections=Corrections(choice.warm_in_steps or 0, choice.correction) if choice.is_asynchronous else None,
        ties=lambda: [(weight, group) for weight, group in ties() if weight.requires_grad],
    )
