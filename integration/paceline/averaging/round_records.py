"""Records of one round of averaging: how it was begun, and what it has brought."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..config.averaging_keys import AveragingConfig
from .rounds import Outcome
from .rules import Report, period_of

logger = logging.getLogger("paceline")


@dataclass(frozen=True)
class Exchange:
    """An exchange that is under way."""

    due: int
    """Step at whose end it is waited for."""
    counts: bool
    starts: bool
    """Before the first step: there is nothing to go on with alone."""
    tokens: int
    trained_until: int
    """Tokens that this island had trained on when it began."""
    indices: range
    """Numbers of the parameters in ``sent``: a part, or all where it does not count."""
    sent: list[Tensor] | None
    """On the first rank: what this island had when it began."""
    states: list[Tensor]
    """On the first rank, where they are averaged: those of the optimizer, one kind after another."""

    def has(self, indices: range) -> bool:
        """Whether all of these parameters are in it."""
        return self.indices.start <= indices.start and indices.stop <= self.indices.stop


@dataclass(frozen=True)
class News:
    """Result of an exchange, for all ranks of the island. Tensors are on the first."""

    round: int
    num_islands: int
    """Number of islands that train on; of all, where none does."""
    tokens_of_all: int
    indices: range
    period: float
    anyone_counts: bool
    has_changed: bool
    replaces: bool
    """Whether the tensors are new values, rather than by how much they change."""
    has_states: bool


@dataclass(frozen=True)
class Values:
    """Tensors that an exchange has brought to the first rank; None: they stay as they are."""

    new: Sequence[Tensor] | None = None
    replaces: bool = False
    states: list[Tensor] | None = None


def are_alike(reports: Sequence[Report]) -> bool:
    """Whether these islands were in the same rounds, and so have the same anchors, momenta and counts of tokens."""
    return len({(report.counts, report.round) for report in reports}) == 1


def news_of(outcome: Outcome, values: Values, indices: range, tokens_of_all: int) -> News:
    """News of a round; ``tokens_of_all`` are those before it."""
    return News(
        round=outcome.round,
        num_islands=sum(not report.ends for report in outcome.reports) or len(outcome.reports),
        tokens_of_all=tokens_of_all + sum(report.tokens for report in outcome.reports if report.counts),
        indices=indices,
        period=period_of(outcome.reports, outcome.weights),
        anyone_counts=any(report.counts for report in outcome.reports),
        has_changed=values.new is not None,
        replaces=values.replaces,
        has_states=values.states is not None,
    )


def settings_digest(section: AveragingConfig, first_round: str, numels: Mapping[str, int], kinds: Sequence[str]) -> int:
    """64 bits over everything that all islands must have in common."""
    own = {"lighthouse", "min_islands", "islands", "timeout_s", "grace_s", "every_tokens"}
    settings = section.model_dump(exclude=own) | {"first_round": first_round}
    text = repr((sorted(numels.items()), sorted(settings.items()), kinds))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def numbers_of(outcome: Outcome, step: int, tokens: int) -> dict[str, Any]:
    """Figures of an exchange, which was waited for at the end of ``step``."""
    return {
        "step": step,
        "round": outcome.round,
        "islands": [report.island for report in outcome.reports],
        "weights": outcome.weights,
        "losses": [report.loss for report in outcome.reports],
        "tokens": tokens,
        "bytes_sent": outcome.bytes_sent,
        "waited_s": outcome.waited_s,
        "transfer_s": outcome.transfer_s,
        "attempts": outcome.attempts,
    }


def log_round(island: int, outcome: Outcome) -> None:
    skipped = [r.island for r, w in zip(outcome.reports, outcome.weights, strict=True) if r.counts and not w]
    logger.info(
        "island %d: round %d with %d islands%s: %.4g MB sent, %.3g s",
        island,
        outcome.round,
        len(outcome.reports),
        f" ({skipped} skipped)" if skipped else "",
        outcome.bytes_sent / 1e6,
        outcome.transfer_s,
    )
