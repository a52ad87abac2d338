"""What formats of boundaries round away, as it is reported."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from paceline.comm.formats import FORMATS, pack
from paceline.runtime.rounding_errors import RoundingErrors


class OneRank:
    def sum(self, values: Tensor) -> Tensor:
        return values


def seen(errors: RoundingErrors, kind: str, boundary: int, size: float) -> None:
    """A message in bf16 that loses ``size`` of its norm, up to rounding."""
    sent = torch.full((1, 2, 64), 1.0)
    parcel = pack(sent, FORMATS["bf16"])
    errors.see(kind, boundary, sent * (1 - size) if size < 1 else sent * 1e9, parcel)


def test_each_boundary_has_its_error() -> None:
    errors = RoundingErrors(3)
    seen(errors, "forward", 0, 0.5)
    seen(errors, "forward", 2, 0.2)
    seen(errors, "forward", 2, 0.9)  # one message a report
    found = errors.report(OneRank())
    assert list(found) == ["forward"]
    assert found["forward"] == [pytest.approx(1.0), None, pytest.approx(0.25)]
    assert errors.report(OneRank()) == {}
    seen(errors, "backward", 1, 0.0)
    assert errors.report(OneRank()) == {"backward": [None, 0.0, None]}
    overflow = torch.full((1, 2, 64), torch.inf)
    errors.see("forward", 0, overflow, pack(overflow, FORMATS["int8"]))
    assert errors.report(OneRank()) == {}


def test_an_error_that_grows_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    errors = RoundingErrors(2)
    with caplog.at_level(logging.WARNING, "paceline"):
        for size in (0.01, 0.015, 0.03, 0.04):
            errors.warn_of_growth({"backward": [0.01, size]})
    [record] = caplog.records
    assert record.getMessage() == (
        "gradients between the stages 1 and 2 lose 0.03 of their size by rounding, and 0.01 at first: choose a finer "
        "paceline.pipeline.boundary.backward."
    )
