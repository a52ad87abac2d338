"""New values of parameters from a round's average: the average itself, or a step of an outer optimizer towards it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ..comm.formats import FORMATS, Format
from ..config.averaging_keys import NESTEROV, AveragingConfig
from .rounded_means import Residuals, Rounded
from .rules import OuterNesterov, Report


class OuterStep:
    """The outer optimizer and its anchors, which the first rank of an island has.

    Args:
        nesterov: None: the average is taken as it is.
        format: in which islands send by how much they differ from the anchors; None: they send their values.

    Without either there are no anchors.
    """

    def __init__(self, nesterov: OuterNesterov | None, format: Format | None = None) -> None:
        self._nesterov, self._format = nesterov, format
        self._anchors: dict[int, Tensor] = {}
        self._own: set[int] = set()
        """Anchors that no round has made: this island's values, which those of others may differ from."""
        self._made_by: dict[int, float] = {}
        """Checksums of the reports of the rounds that anchors are of: islands may have been in different ones."""
        self._left: dict[str, dict[int, Tensor]] = {"changes": {}, "means": {}}
        """Residuals of rounding that are still to be sent."""

    @staticmethod
    def of(section: AveragingConfig) -> OuterStep:
        format = None if section.format is None else FORMATS[section.format]
        if section.outer != NESTEROV:
            return OuterStep(None, format)
        rate, momentum = section.outer_learning_rate, section.outer_momentum
        return OuterStep(OuterNesterov(0.7 if rate is None else rate, 0.9 if momentum is None else momentum), format)

    @property
    def has_optimizer(self) -> bool:
        return self._nesterov is not None

    @property
    def has_anchors(self) -> bool:
        """Whether the parameters of the last round are kept."""
        return self._nesterov is not None or self._format is not None

    @property
    def num_anchors(self) -> int:
        return len(self._anchors)

    def anchor(self, tensors: Sequence[Tensor]) -> None:
        """Begin at these values of all parameters, but for those that have anchors already."""
        self._own |= set(range(len(tensors))) - self._anchors.keys()
        for i, tensor in enumerate(tensors):
            self._anchors.setdefault(i, tensor)

    def shared(self, indices: Sequence[int], values: Sequence[Tensor]) -> list[Tensor]:
        """Anchors and momenta that islands which have just come lack; ``values`` stand for missing anchors."""
        if self._nesterov is None:
            return []
        anchors = [self._anchors.get(i, value) for i, value in zip(indices, values, strict=True)]
        return [*anchors, *self._nesterov.buffers(anchors, list(indices))]

    def take_shared(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Take :meth:`shared` as a round brought it."""
        if self._nesterov is not None:
            self._anchors.update(zip(indices, tensors[: len(indices)], strict=True))
            self._own.difference_update(indices)
            self._nesterov.load_buffers(tensors[len(indices) :], list(indices))

    def note_round(self, indices: Sequence[int], reports: Sequence[Report]) -> None:
        """Note the reports of the round that has made these anchors."""
        self._made_by.update(dict.fromkeys(indices, float(crc32(repr(list(reports)).encode()))))

    def checksum(self, indices: Sequence[int]) -> float:
        """Sum of the anchors' bits, the same on all machines; NaN where some are missing.

        Without a format, if rounds have made them, that of what was reported in those: machines may round an outer step
        differently. 0 without anchors.
        """
        if not self.has_anchors:
            return 0.0
        if self._format is None and self._own.isdisjoint(indices):
            return sum(self._made_by.get(i, 0.0) for i in indices) % 2**53
        if any(i not in self._anchors for i in indices):
            return math.nan
        return float(sum(_bits(self._anchors[i]) for i in indices) % 2**53)

    def agrees(self, reports: Sequence[Report]) -> bool:
        """Whether islands that count have the same anchors, as far as their :meth:`checksum` tells."""
        return not self.has_anchors or (
            len({report.checksum.hex() for report in reports}) == 1 and not math.isnan(reports[0].checksum)
        )

    # -- in few bits

    def rounded(self, indices: Sequence[int], values: Sequence[Tensor], exact: Sequence[Tensor]) -> Rounded | None:
        """``values`` as they are sent in a format; None without one.

        Args:
            exact: further tensors, which are not rounded.
        """
        if self._format is None:
            return None
        changes = [value.float() - self._anchors[i].float() for i, value in zip(indices, values, strict=True)]
        residuals = (
            [left.get(i, torch.zeros_like(change)) for i, change in zip(indices, changes, strict=True)]
            for left in self._left.values()
        )
        return Rounded(changes, Residuals(*residuals), self._format, exact)

    def averages(
        self, indices: Sequence[int], means: Sequence[Tensor], residuals: Residuals | None
    ) -> Sequence[Tensor]:
        """Average values of parameters.

        Args:
            means: of a round; where it was rounded, of changes.
            residuals: of a round that was rounded. After one that was not, nothing is left to be sent.
        """
        if residuals is None:
            for of_kind in self._left.values():
                for i in indices:
                    of_kind.pop(i, None)
            return means
        for of_kind, found in zip(self._left.values(), residuals, strict=True):
            of_kind.update(zip(indices, found, strict=True))
        anchors = (self._anchors[i] for i in indices)
        return [
            (anchor.to(_sum_dtype(anchor)) + mean).to(anchor.dtype) for anchor, mean in zip(anchors, means, strict=True)
        ]

    def step(self, indices: Sequence[int], averages: Sequence[Tensor], period: float) -> Sequence[Tensor]:
        """New values of parameters. Without an optimizer it returns ``averages`` themselves."""
        if self._nesterov is None:
            if self._format is not None:
                self._anchors.update(zip(indices, (average.clone() for average in averages), strict=True))
            return averages
        new = self._nesterov.step([self._anchors[i] for i in indices], averages, list(indices), period)
        self._anchors.update(zip(indices, new, strict=True))
        self._own.difference_update(indices)
        return new

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.has_anchors:
            state = {"anchors": dict(self._anchors), "made_by": dict(self._made_by)}
        if self._nesterov is not None:
            state["outer"] = self._nesterov.state_dict()
        if self._format is not None:
            state["left"] = {kind: dict(left) for kind, left in self._left.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of a run with anchors, if this is one too; else begin anew, without any."""
        fits = self.has_anchors and "anchors" in state and (self._nesterov is None or "outer" in state)
        state = state if fits else {}
        self._anchors, self._own = dict(state.get("anchors", {})), set()
        self._made_by = dict(state.get("made_by", {}))
        if self._nesterov is not None:
            self._nesterov.load_state_dict(state.get("outer", {"buffers": {}}))
        self._left = {kind: dict(state.get("left", {}).get(kind, {})) for kind in self._left}


def _bits(tensor: Tensor) -> int:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.contiguous().view(whole).sum(dtype=torch.int64))


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
