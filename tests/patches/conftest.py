"""Tests of patches begin without any."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def none_is_applied(no_patches: None) -> None:
    """See :func:`no_patches`."""
