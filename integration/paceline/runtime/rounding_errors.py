"""Rounding errors of the formats in which activations and gradients travel, of one micro-batch for each report."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..comm.formats import Parcel, unpack
from ..comm.shapes import Value, tensors_of

logger = logging.getLogger("paceline")

KINDS = ("forward", "backward")
"""Activations and their gradients, as the JSON calls them."""

GROWTH = 2.0
"""Times its first value: an error that has grown so much is told."""


class Sums(Protocol):
    """Adds up over all ranks. Collective."""

    def sum(self, values: Tensor) -> Tensor: ...


class RoundingErrors:
    """Relative errors of one rank's messages, and, added up, of each boundary.

    Args:
        num_boundaries: between stages.
    """

    def __init__(self, num_boundaries: int) -> None:
        self._num_boundaries = num_boundaries
        self._seen: dict[tuple[str, int], Tensor] = {}
        """Since the last report, squared norms of what is rounded away and of what was to be sent."""
        self._first: dict[str, list[float | None]] = {}

    def see(self, kind: str, boundary: int, value: Value, parcel: Parcel) -> None:
        """Compare the first message of a boundary since the last report with what arrives of it."""
        if (kind, boundary) in self._seen:
            return
        sent, arrives = tensors_of(value)[0].detach().float(), tensors_of(unpack(parcel))[0].float()
        self._seen[kind, boundary] = torch.stack([(sent - arrives).square().sum(), sent.square().sum()])

    def forget(self) -> None:
        """Another format begins: what was lost at first tells nothing of it."""
        self._seen.clear()
        self._first.clear()

    def report(self, control: Sums) -> dict[str, list[float | None]]:
        """Relative error of each boundary, by kind; None where nothing was rounded. Collective.

        The error is the root of the squares' mean, as a part of that of what is sent.
        """
        table = torch.zeros(len(KINDS), self._num_boundaries, 2, dtype=torch.float64)
        for (kind, boundary), sums in self._seen.items():
            if sums.isfinite().all():  # an overflow is the loss scaler's to tell
                table[KINDS.index(kind), boundary] = sums.double().cpu()
        self._seen.clear()
        lost, sent = control.sum(table).unbind(-1)
        found = {}
        for kind, errors, norms in zip(KINDS, (lost / sent).sqrt().tolist(), sent.tolist(), strict=True):
            if any(norms):
                found[kind] = [error if norm else None for error, norm in zip(errors, norms, strict=True)]
        return found

    def warn_of_growth(self, found: Mapping[str, Sequence[float | None]]) -> None:
        """Warn of errors that have grown to :data:`GROWTH` times what they were at first; of each once."""
        for kind, errors in found.items():
            first = self._first.setdefault(kind, list(errors))
            for boundary, error in enumerate(errors):
                at_first = first[boundary]
                if not at_first:  # none yet, or nothing that was lost
                    first[boundary] = error
                elif error is not None and error > GROWTH * at_first:
                    what = "activations" if kind == "forward" else "gradients"
                    logger.warning(
                        "%s between the stages %d and %d lose %.2g of their size by rounding, and %.2g at first: "
                        "choose a finer paceline.pipeline.boundary.%s.",
                        *(what, boundary, boundary + 1, error, at_first, kind),
                    )
                    first[boundary] = float("inf")
