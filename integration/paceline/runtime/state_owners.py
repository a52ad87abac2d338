"""Ranks that hold the same parameters in a pipeline of several directions, and owners of its optimizer's state.

With several directions the ranks of a mirror group hold the same stages, and so do their replicas. Gradients are summed
over them. By default the rank that has a stage in direction 0 owns the state of it, with its replicas (ZeRO 1): no
other has any. ``"mirror"``: every one of them owns an equal part of each stage. Experts that replicas share are the
same on fewer of these ranks, which are a group of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from ..comm.groups import new_group
from ..comm.transport import TIMEOUT
from ..config.schedules import ScheduleChoice
from ..config.section import value_at
from ..optim.buckets import Domain
from ..optim.corrections import Corrections
from ..optim.step_options import StepOptions
from ..schedules import directions


@dataclass(frozen=True)
class Holders:
    """The ranks that hold the same parameters of some stages.

    Args:
        ranks: global ranks, rising; this one is among them.
        group: of these; None for one.
        owners: by stage, positions in ``ranks`` of those that may own rows of it; None: all may.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    owners: Mapping[int, tuple[int, ...] | None]

    def domain(self, stage: int) -> Domain:
        """Ranks over which such parameters of a stage are reduced."""
        if self.group is None:
            return Domain(section=stage)
        return Domain(self.group, len(self.ranks), self.ranks.index(dist.get_rank()), self.owners[stage], stage)


@dataclass(frozen=True)
class Mirrors:
    """The process groups of an optimizer that works beside the computation, and so has them to itself.

    Args:
        stages: the ranks that hold the stages that this rank holds.
        experts: those of them that have the same experts, where replicas share them; else the same as ``stages``.
        model_group: ranks that together hold every parameter once; None for one.
        planning_group: those of ``stages`` once more, for what they agree on while updates are made; None unless asked.
    """

    stages: Holders
    experts: Holders
    model_group: dist.ProcessGroup | None
    planning_group: dist.ProcessGroup | None = None

    @classmethod
    def create(
        cls,
        pipes: Sequence[Sequence[int]],
        rank: int,
        routes: tuple[tuple[int, ...], ...],
        *,
        equal_parts: bool,
        num_sharing: int = 1,
        plans: bool = False,
    ) -> Mirrors:
        """Collective over the world.

        Args:
            pipes: ranks of each pipeline, by device.
            routes: device of each stage, one route a direction.
            equal_parts: every rank of a mirror group owns an equal part of its stages.
            num_sharing: consecutive pipelines that share the experts of their stages.
            plans: whether a planning group is needed.
        """
        sets = directions.mirror_groups(routes)

        def holders(pipes: Sequence[Sequence[int]]) -> list[tuple[list[int], Holders]]:
            """Ranks of each mirror group of these pipelines, and this rank's part in it."""
            found = []
            for devices in sets:
                ranks = sorted(pipe[device] for pipe in pipes for device in devices)
                group = new_group(ranks, TIMEOUT) if len(ranks) > 1 else None
                owners = {
                    stage: None if equal_parts else tuple(sorted(ranks.index(pipe[routes[0][stage]]) for pipe in pipes))
                    for stage in directions.stages_of(devices[0], routes)
                }
                found.append((ranks, Holders(tuple(ranks), group, owners)))
            return found

        alike = holders(pipes)
        models = [sorted(ranks) for ranks in zip(*(ranks for ranks, _ in alike), strict=True)]
        model_groups = [new_group(ranks, TIMEOUT) if len(ranks) > 1 else None for ranks in models]
        sharing = alike
        if num_sharing > 1:
            sharing = [one for place in range(num_sharing) for one in holders(pipes[place::num_sharing])]
        model_group = next(g for g, ranks in zip(model_groups, models, strict=True) if rank in ranks)
        own, experts = (next(h for ranks, h in found if rank in ranks) for found in (alike, sharing))
        planning = [new_group(ranks) for ranks, _ in alike] if plans else [None] * len(alike)
        return cls(own, experts, model_group, planning[next(n for n, (ranks, _) in enumerate(alike) if rank in ranks)])


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
    is_spread: Callable[[nn.Parameter], bool],
    choice: ScheduleChoice,
    ds_config: Mapping[str, object],
    ties: Callable[[], Sequence[tuple[nn.Parameter, dist.ProcessGroup]]],
    *,
    spreads_experts: bool,
) -> StepOptions:
    """``options`` for a schedule whose mirror groups reduce gradients and own states together.

    Args:
        stage_of: of a parameter, as layers lie now.
        is_spread: whether replicas share a parameter, that of experts.
        choice: the schedule; without a flush updates are made beside the computation.
        ties: weights of which another rank has a copy, and the group of the two.
        spreads_experts: whether there are such parameters on any stage.
    """
    asked = value_at(ds_config, "zero_optimization.overlap_comm")

    def domain(parameter: nn.Parameter) -> Domain:
        return (mirrors.experts if is_spread(parameter) else mirrors.stages).domain(stage_of(parameter))

    return replace(
        options,
        group=mirrors.stages.group,
        model_group=mirrors.model_group,
        domain=domain,
        shard=len(mirrors.stages.owners) > 1 or options.shard,
        # Without experts on several ranks, these groups are the only ones at work in a step, and one thread issues
        # their operations: NCCL can, too.
        overlap=options.overlap or (asked is not False and not spreads_experts),
        corrections=Corrections(choice.warm_in_steps or 0, choice.correction) if choice.is_asynchronous else None,
        ties=ties,
    )
