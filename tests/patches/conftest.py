"""Tests of patches begin without any: another test of the same process may have left some for the rest of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.patches import registry


@pytest.fixture(autouse=True)
def none_is_applied() -> Iterator[None]:
    left = [active.patch for active in registry._ACTIVE.values()]
    for patch in reversed(left):
        registry._undo(patch)
    yield
    registry.apply(*left)
