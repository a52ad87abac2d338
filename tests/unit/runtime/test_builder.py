"""Advice on a first partition, and on the dtype."""

from __future__ import annotations

import pytest
import torch

from paceline.runtime.builder import _tell_of_another_dtype, largest_stages

LAYERS = [2.0] * 6


def test_a_large_head_is_told_by_how_much_slices_would_help() -> None:
    now, sliced = largest_stages([0.0, *LAYERS, 12.0], [0, 3, 7, 8])
    assert now == pytest.approx(12 / 8)
    assert sliced == pytest.approx(8.25 / 8)  # four layers; two and five slices; eleven


def test_a_small_head_is_not() -> None:
    now, sliced = largest_stages([0.0, *LAYERS, 1.0], [0, 3, 5, 8])
    assert sliced >= 0.9 * now


def test_no_work_is_no_reason() -> None:
    assert largest_stages([0.0] * 8, [0, 4, 8]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("has", "trains_in", "is_told"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float64, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float32, torch.float32, False),
        (torch.float32, torch.bfloat16, False),
    ],
)
def test_a_model_in_another_precision_that_trains_in_fp32_is_told_of(
    has: torch.dtype, trains_in: torch.dtype, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _tell_of_another_dtype(torch.nn.Linear(2, 2, dtype=has), trains_in)
    told = [f"the model has weights in {str(has)[6:]}, and is trained and written in float32"] if is_told else []
    assert [record.getMessage().partition(", since")[0] for record in caplog.records] == told
