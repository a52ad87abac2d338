"""How many devices share what: the value that the search over parallel strategies ranges over."""

from __future__ import annotations

from typing import NamedTuple


class Strategy(NamedTuple):
    """t · p · d devices. Ranks are numbered tensor innermost, then data, then pipeline, as DeepSpeed does.

    Args:
        tensor: t, devices that compute one layer together.
        pipeline: p, stages.
        data: d, replicas of each stage.
        expert: ep, devices among which the experts of a layer are spread; divides d.
    """

    tensor: int
    pipeline: int
    data: int
    expert: int

    @property
    def expert_data(self) -> int:
        """edp, replicas of each expert."""
        return self.data // self.expert

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.data

    @property
    def name(self) -> str:
        """``tp1_pp2_dp2_ep2``."""
        return f"tp{self.tensor}_pp{self.pipeline}_dp{self.data}_ep{self.expert}"
