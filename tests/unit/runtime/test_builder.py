"""Advice on a first partition."""

from __future__ import annotations

import pytest

from paceline.runtime.builder import largest_stages

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
