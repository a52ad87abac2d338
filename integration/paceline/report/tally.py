"""Losses and tokens of a run: of the steps since the last report, and of all before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Loss(Protocol):
    """A tensor of one number, which may still be computed."""

    def item(self) -> float: ...


@dataclass(frozen=True)
class Counted:
    """The steps of one report.

    Args:
        loss: their mean.
        steps: as many as this process trained; others came with the checkpoint that it goes on from.
        tokens: of those.
    """

    loss: float
    steps: int
    tokens: int


@dataclass
class Tally:
    """Counts what was trained on.

    Args:
        tokens: of the steps that have been reported.
    """

    tokens: int = 0
    _losses: list[Loss | float] = field(default_factory=list)
    _pending_tokens: int = 0
    _before: tuple[int, int] = (0, 0)
    """Steps and tokens since the last report that another process trained."""

    @property
    def all_tokens(self) -> int:
        """Also of the steps that are still to be reported."""
        return self.tokens + self._pending_tokens

    def add(self, loss: Loss, tokens: int) -> None:
        """Count a step. Its loss is not read before the next report, or save."""
        self._losses.append(loss)
        self._pending_tokens += tokens

    def report(self) -> Counted:
        """Take the steps since the last report."""
        losses = self._settled()
        steps, tokens = self._before
        mean = sum(losses) / len(losses) if losses else math.nan
        found = Counted(mean, len(losses) - steps, self._pending_tokens - tokens)
        self.tokens, self._losses, self._pending_tokens, self._before = self.all_tokens, [], 0, (0, 0)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Numbers for a checkpoint."""
        return {"tokens": self.tokens, "pending_tokens": self._pending_tokens, "losses": self._settled()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.tokens, self._pending_tokens, self._losses = state["tokens"], state["pending_tokens"], [*state["losses"]]
        self._before = (len(self._losses), self._pending_tokens)

    def _settled(self) -> list[float]:
        return [loss if isinstance(loss, float) else loss.item() for loss in self._losses]
