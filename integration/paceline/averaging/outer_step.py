"""New values of parameters from a round's average: the average itself, or a step of an outer optimizer towards it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..config.averaging_keys import NESTEROV, AveragingConfig
from .rules import OuterNesterov


class OuterStep:
    """The outer optimizer and its anchors, which the first rank of an island has.

    Args:
        nesterov: None: the average is taken as it is, and there are no anchors.
    """

    def __init__(self, nesterov: OuterNesterov | None) -> None:
        self._nesterov = nesterov
        self._anchors: dict[int, Tensor] = {}

    @staticmethod
    def of(section: AveragingConfig) -> OuterStep:
        if section.outer != NESTEROV:
            return OuterStep(None)
        rate, momentum = section.outer_learning_rate, section.outer_momentum
        return OuterStep(OuterNesterov(0.7 if rate is None else rate, 0.9 if momentum is None else momentum))

    @property
    def has_optimizer(self) -> bool:
        return self._nesterov is not None

    @property
    def num_anchors(self) -> int:
        return len(self._anchors)

    def anchor(self, tensors: Sequence[Tensor]) -> None:
        """Begin at these values of all parameters, but for those that have anchors already."""
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
            self._nesterov.load_buffers(tensors[len(indices) :], list(indices))

    def step(self, indices: Sequence[int], averages: Sequence[Tensor], period: float) -> Sequence[Tensor]:
        """New values of parameters. Without an optimizer it returns ``averages`` themselves."""
        if self._nesterov is None:
            return averages
        new = self._nesterov.step([self._anchors[i] for i in indices], averages, list(indices), period)
        self._anchors.update(zip(indices, new, strict=True))
        return new

    def state_dict(self) -> dict[str, Any]:
        if self._nesterov is None:
            return {}
        return {"anchors": dict(self._anchors), "outer": self._nesterov.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of a run with an outer optimizer, if this is one too."""
        if self._nesterov is not None and "anchors" in state:
            self._anchors = dict(state["anchors"])
            self._nesterov.load_state_dict(state["outer"])
