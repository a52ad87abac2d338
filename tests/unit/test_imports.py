"""Imports without looking for garbage all the time."""

from __future__ import annotations

import gc

import pytest

from paceline.imports import few_collections


def test_cycles_are_looked_for_less_often_within() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        with few_collections():
            assert _collections_among(50_000) == 0
        assert gc.get_threshold() == (700, 10, 10)
        assert _collections_among(50_000) > 50
    finally:
        gc.set_threshold(*before)


def test_an_import_that_fails_leaves_the_collector_as_it_was() -> None:
    before = gc.get_threshold()
    with pytest.raises(ImportError), few_collections():
        raise ImportError
    assert gc.get_threshold() == before


def _collections_among(num_objects: int) -> int:
    before = gc.get_stats()[0]["collections"]
    kept = [[] for _ in range(num_objects)]
    assert len(kept) == num_objects
    return int(gc.get_stats()[0]["collections"] - before)
