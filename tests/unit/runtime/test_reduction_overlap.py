"""Whether an engine with a flush reduces gradients during the last backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paceline.runtime.engine import PacelineEngine


@pytest.mark.parametrize(
    ("backend", "num_sharing_experts", "zero", "overlaps"),
    [
        ("nccl", 1, {}, True),
        ("nccl", 2, {}, False),  # experts' collectives are within the backward
        ("nccl", 2, {"overlap_comm": True}, True),
        ("nccl", 1, {"overlap_comm": False}, False),
        ("gloo", 2, {}, True),
        ("gloo", 1, {"overlap_comm": False}, False),
    ],
)
def test_unless_the_user_says_otherwise(
    backend: str, num_sharing_experts: int, zero: dict[str, Any], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda *_: backend)
    engine: Any = SimpleNamespace(
        _config=SimpleNamespace(_param_dict={"zero_optimization": {"stage": 1, **zero}}),
        _expert_groups=SimpleNamespace(size=num_sharing_experts),
    )
    assert PacelineEngine._overlaps_reduction(engine) is overlaps
