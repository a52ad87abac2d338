"""The rules of averaging between islands: who counts, what becomes of the average. No communication.

An island is a DeepSpeed job of its own. It trains on its share of the data; at a *round* all islands that are there
report what they did (:class:`Report`), and each computes the same weights from the same reports.

Sources: Povey, Zhang, Khudanpur, arXiv 1410.7455 (average, first round, learning rates); Douillard et al., DiLoCo,
arXiv 2311.08105 (outer Nesterov).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Report:
    """What an island says of itself at a round."""

    island: int
    """Its number: 0, 1, …; no two have the same."""
    digest: int
    """64 bits over everything that all islands must have in common: names and shapes, and the averaging's settings."""
    checksum: float
    """Of the tensors' values; compared where nobody counts."""
    loss: float
    """Mean over the tokens since its last round, in nats; not finite: it failed."""
    tokens: int
    """That it trained on since its last round."""
    counts: bool
    """False where it has just started, or come back: its values are worth nothing, it takes the others'."""
    round: int
    """Rounds that it has finished."""
    trained: int = 0
    """Tokens that it trained on since the last round of the same tensors: the weight of its values. Differs from
    ``tokens`` where tensors go by parts, and where it comes back from a checkpoint."""
    period: float = 1.0
    """Share of a regular period that these are: less than 1 at the end of training, and where it was called."""
    ends: bool = False
    """Its training is over: it takes part without new tokens, until that of all islands is."""


def island_weights(
    reports: Sequence[Report], *, first_round: Literal["best", "mean"] = "mean", difference_threshold: float = math.inf
) -> list[float]:
    """The weight of each island's values in the average; they sum to 1.

    Islands that count have weights in proportion to the tokens that their values were trained on, equal ones where
    nobody has trained. Without weight are those that missed a round which others finished, and those whose loss is not
    finite, or is above the best one of islands that have trained by more than the threshold; if no loss is finite, it
    tells no island from another.
    If no island counts, one of those with the most rounds has weight 1: that with the lowest number.

    Args:
        reports: one for each island, at least one, in the order in which the weights are wanted.
        first_round: "best": where no island that counts has finished a round, the one with the smallest loss has
            weight 1, of equal ones that with the lowest number.
        difference_threshold: in nats.
    """
    assert reports
    indices = [i for i, report in enumerate(reports) if report.counts]
    if not indices:
        furthest = max(report.round for report in reports)
        ahead = [i for i, report in enumerate(reports) if report.round == furthest]
        return _only(_lowest(reports, ahead), len(reports))
    newest = max(reports[i].round for i in indices)
    indices = [i for i in indices if reports[i].round == newest]
    if finite := [i for i in indices if math.isfinite(reports[i].loss)]:
        finite = [i for i in finite if reports[i].trained] or finite  # an old loss leaves nobody out
        best = min(reports[i].loss for i in finite)
        if newest == 0 and first_round == "best":
            return _only(_lowest(reports, [i for i in finite if reports[i].loss == best]), len(reports))
        indices = [i for i in finite if reports[i].loss - best <= difference_threshold]
    tokens = [reports[i].trained if i in indices else 0 for i in range(len(reports))]
    if len({reports[i].trained for i in indices}) == 1:
        return [1 / len(indices) if i in indices else 0.0 for i in range(len(reports))]
    return [number / sum(tokens) for number in tokens]


def is_no_round(reports: Sequence[Report]) -> bool:
    """Whether these islands have nothing to tell each other: all were in the same rounds, and have no new tokens."""
    return len({report.round for report in reports}) == 1 and all(r.counts and not r.trained for r in reports)


def period_of(reports: Sequence[Report], weights: Sequence[float]) -> float:
    """Share of a regular period that an average is of; 0 where nobody whose values are in it has trained."""
    counted = [(w, r) for w, r in zip(weights, reports, strict=True) if w > 0 and r.counts]
    if not any(report.trained for _, report in counted):
        return 0.0
    return sum(w * r.period for w, r in counted) / sum(w for w, _ in counted)


def _lowest(reports: Sequence[Report], indices: Iterable[int]) -> int:
    return min(indices, key=lambda i: reports[i].island)


def _only(index: int, length: int) -> list[float]:
    return [float(i == index) for i in range(length)]


def refusals(reports: Sequence[Report]) -> dict[int, str]:
    """Which reports (by index) cannot take part, each with the rule it breaks and the remedy.

    Where one side is further (counts, then has finished more rounds), it goes on and the other is refused; where none
    is, both are. So a job that runs is not stopped by one that is started wrongly beside it.
    """
    if not reports:
        return {}
    refused: dict[int, str] = {}
    for island, count in Counter(report.island for report in reports).items():
        twins = [i for i, report in enumerate(reports) if report.island == island]
        ahead = [i for i in twins if _progress(reports[i]) == max(_progress(reports[j]) for j in twins)]
        for i in twins if len(ahead) > 1 else set(twins) - set(ahead):
            refused[i] = (
                f"{count} islands have the number {island}; give each its own, or wait until the one before has ended."
            )
    # Whoever is refused for its number has no say in what the others have.
    voters = [i for i in range(len(reports)) if i not in refused] or list(range(len(reports)))
    furthest = max(_progress(reports[i]) for i in voters)
    right = {reports[i].digest for i in voters if _progress(reports[i]) == furthest}
    for i, report in enumerate(reports):
        if i not in refused and (len(right) > 1 or report.digest not in right):
            other = next(r for r in reports if r.digest != report.digest)
            refused[i] = (
                f"islands {report.island} and {other.island} differ in the model or in how it is averaged (digests "
                f"{report.digest:#018x} and {other.digest:#018x}); start all with the same model and the same "
                '"averaging" section, and have a lighthouse for each job.'
            )
    return refused


def _progress(report: Report) -> tuple[bool, int]:
    return report.counts, report.round


class OuterNesterov:
    """SGD with Nesterov momentum whose gradient is how far the average is from the last round's result (DiLoCo).

    g = anchor - average; b = momentum · b + g; anchor ← anchor - learning_rate · (g + momentum · b): what
    ``torch.optim.SGD(nesterov=True)`` computes, to the bit. The anchor is what the last round made, where all islands
    started from; the caller keeps it.

    All islands must hold the same anchors and buffers. They do as long as they were in all rounds, because they compute
    the same from the same average. One that has just started or come back has neither: in a round where a report has
    ``counts`` False, let all islands send parameters, anchors and :meth:`buffers` together, and take all three from
    the outcome (:meth:`load_buffers`) before :meth:`step`. The newcomer's weigh nothing, and the others' are equal, so
    their mean is what they have, up to a rounding that is the same everywhere.

    Args:
        learning_rate: above 0; 0.7 in the paper.
        momentum: from 0, below 1; 0.9 in the paper.

    Raises:
        ValueError: a value out of its range.
    """

    def __init__(self, learning_rate: float, momentum: float) -> None:
        if not learning_rate > 0 or not 0 <= momentum < 1:
            raise ValueError(
                f"outer learning rate {learning_rate}, momentum {momentum}: give a rate above 0 and a momentum in "
                "[0, 1)."
            )
        self.learning_rate, self.momentum = learning_rate, momentum
        self._buffers: dict[int, Tensor] = {}

    def step(
        self,
        anchors: Sequence[Tensor],
        averages: Sequence[Tensor],
        indices: Sequence[int] | None = None,
        period: float = 1.0,
    ) -> list[Tensor]:
        """New anchors; nothing that is given is changed.

        Args:
            anchors, averages: the same number, of the same shapes, dtypes and devices.
            indices: which of the model's tensors they are, where a round has only a part of them; else all in order.
            period: share of a regular period that the averages are of (:func:`period_of`). The momentum moves and
                fades as much less; g is smaller by itself.
        """
        indices = range(len(anchors)) if indices is None else indices
        stepped = []
        for i, anchor, average, momentum in zip(
            indices, anchors, averages, self.buffers(anchors, indices), strict=True
        ):
            change = anchor - average
            if self.momentum:
                kept = momentum.mul(self.momentum**period)
                self._buffers[i] = kept + change
                change = change.add(kept.mul_(period).add_(change), alpha=self.momentum)
            stepped.append(anchor.add(change, alpha=-self.learning_rate))
        return stepped

    def buffers(self, like: Sequence[Tensor], indices: Sequence[int] | None = None) -> list[Tensor]:
        """The momentum of each tensor; zeros of the shapes of ``like`` before its first step."""
        indices = range(len(like)) if indices is None else indices
        return [
            self._buffers[i] if i in self._buffers else torch.zeros_like(t) for i, t in zip(indices, like, strict=True)
        ]

    def load_buffers(self, buffers: Sequence[Tensor], indices: Sequence[int] | None = None) -> None:
        """Put other momenta in place, as they came out of a round."""
        indices = range(len(buffers)) if indices is None else indices
        self._buffers.update(zip(indices, buffers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"buffers": dict(self._buffers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._buffers = dict(state["buffers"])


def learning_rate_factor(tokens: int, decay_tokens: int | None, num_islands: int, scale: bool) -> float:
    """What an island's learning rate is multiplied by.

    It falls exponentially to a tenth at ``decay_tokens`` and stays there. With ``scale`` it is multiplied by the number
    of islands, since the next average divides the change of each by that.

    Args:
        tokens: of all islands together, so far.
        decay_tokens: None for no decay.
        num_islands: that the next round's average is expected to be of.
    """
    decay = 1.0 if decay_tokens is None else 10.0 ** -min(1.0, tokens / decay_tokens)
    return decay * (num_islands if scale else 1)


def parts_of(numels: Sequence[int], parts: int) -> list[range]:
    """Cut a list of tensors into contiguous parts of about the same number of elements.

    Cuts fall nearest to equal shares, and no part is empty. The same for all islands, as it depends on nothing but:

    Args:
        numels: elements of each tensor, in an order that all islands share.
        parts: at least 1; if there are fewer tensors, there are as many parts.

    Returns:
        Indices of each part, together all of them in order.

    Example:
        >>> parts_of([4, 4, 1, 7], 2)
        [range(0, 2), range(2, 4)]
    """
    assert parts >= 1, parts
    length = len(numels)
    parts = min(parts, length)
    sums = [0]
    for numel in numels:
        sums.append(sums[-1] + numel)
    cuts = [0]
    for part in range(1, parts):
        candidates = range(cuts[-1] + 1, length - (parts - part) + 1)
        cuts.append(min(candidates, key=lambda cut: abs(sums[cut] * parts - sums[-1] * part)))
    cuts.append(length)
    return [range(start, end) for start, end in pairwise(cuts) if end > start]
