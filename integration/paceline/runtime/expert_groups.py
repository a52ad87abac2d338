"""Groups of the ranks that share the experts of a stage, or its layers, and of those that hold the same ones.

Of the D data-parallel ranks of a stage, ``size`` consecutive ones share the experts; the ranks at the same place of
these runs hold the same. DeepSpeed orders them so too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm.groups import gloo_group, new_group


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of this rank.

    Args:
        size: ranks that share the experts.
        sharing: their group; None for one.
        alike: the group of the ranks that hold the same experts; None for one.
        control: that of ``sharing`` over gloo.
    """

    size: int = 1
    sharing: dist.ProcessGroup | None = None
    alike: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, data_groups: Sequence[Sequence[int]], size: int, rank: int) -> ExpertGroups:
        """Collective over all ranks.

        Args:
            data_groups: the data-parallel ranks of each stage.

        Raises:
            ValueError: ``size`` does not divide their number.
        """
        replicas = len(data_groups[0])
        if size < 1 or replicas % size:
            raise ValueError(
                f"expert_parallel.autoep_size is {size}: it must divide the {replicas} replicas of each stage (ranks / "
                "stages); choose a divisor, or other stages."
            )
        if size == 1:
            return cls()
        sharing = [list(ranks[first : first + size]) for ranks in data_groups for first in range(0, replicas, size)]
        alike = [list(ranks[place::size]) for ranks in data_groups for place in range(size)]
        return cls(
            size,
            _own_of(sharing, rank),
            _own_of(alike, rank) if replicas > size else None,
            _own_of(sharing, rank, gloo_group),
        )

    @classmethod
    def of_slices(cls, model_groups: Sequence[Sequence[int]], rank: int) -> ExpertGroups:
        """Groups of ranks with slices of the same layers, which need only agree. Collective over all ranks.

        Args:
            model_groups: ranks with slices of the same layers, of each stage and replica.
        """
        groups = [list(ranks) for ranks in model_groups]
        return cls(len(groups[0]), control=_own_of(groups, rank, gloo_group))

    def agree(self, wants: bool) -> bool:
        """Whether all ranks that compute layers together want something. Collective among them."""
        found = torch.tensor([wants], dtype=torch.int32)
        if self.control is not None:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self.control)
        return bool(found.item())


def _own_of(
    groups: Sequence[list[int]], rank: int, make: Callable[[list[int]], dist.ProcessGroup] = new_group
) -> dist.ProcessGroup:
    """Makes all groups, on all ranks in the same order."""
    made = [make(ranks) for ranks in groups]
    own: dist.ProcessGroup = next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)
    return own
