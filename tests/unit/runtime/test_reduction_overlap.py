"""Whether an engine with a flush reduces gradients during the last backward."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.runtime.optimizer_setup import overlaps_reduction


@pytest.mark.parametrize(
    ("backend", "spreads_experts", "zero", "overlaps"),
    [
        ("nccl", False, {}, True),
        ("nccl", True, {}, False),  # experts' collectives are within the backward
        ("nccl", True, {"overlap_comm": True}, True),
        ("nccl", False, {"overlap_comm": False}, False),
        ("gloo", True, {}, True),
        ("gloo", False, {"overlap_comm": False}, False),
    ],
)
def test_unless_the_user_says_otherwise(
    backend: str, spreads_experts: bool, zero: dict[str, Any], overlaps: bool
) -> None:
    ds_config = {"zero_optimization": {"stage": 1, **zero}}
    assert overlaps_reduction(ds_config, backend, spreads_experts=spreads_experts) is overlaps
