"""Means over islands, of which the other one is a function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.averaging import weighted_sums
from paceline.averaging.weighted_sums import weighted_mean


class TwoIslands:
    """The sum of this island's part and of the other one's, whose tensors hold ``value`` and count ``share``."""

    def __init__(self, value: float, share: float) -> None:
        self.part, self.num_sums = value * share, 0

    def sum(self, values: Tensor, timeout_s: float) -> Any:
        values += self.part
        self.num_sums += 1
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize(
    ("weights", "mine", "mean"),
    [([1.0, 1.0], 0, 6.0), ([1.0, 3.0], 0, 7.0), ([3.0, 1.0], 0, 5.0), ([1.0, 3.0], 1, 5.0), ([0.0, 2.0], 0, 8.0)],
)
def test_islands_count_by_their_weights(
    weights: list[float], mine: int, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This island has 4 and the other one 8, in tensors that are cut into chunks of three elements."""
    monkeypatch.setattr(weighted_sums, "CHUNK_BYTES", 12)
    group = TwoIslands(8.0, weights[1 - mine] / max(weights))
    tensors = [torch.full((2, 2), 4.0), torch.full((5,), 4.0, dtype=torch.bfloat16)]
    found, num_bytes = weighted_mean(group, tensors, weights, mine, 1.0)
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.bfloat16]
    for tensor, given in zip(found, tensors, strict=True):
        torch.testing.assert_close(tensor, torch.full_like(given, mean))
        assert given.eq(4).all()
    assert (num_bytes, group.num_sums) == (9 * 4, 3)
