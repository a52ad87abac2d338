"""How much faster one rank computes experts than another, told apart from how many tokens each of them gets.

Plain arithmetic in a fixed order: ranks that work this out from the same numbers come to the same bits.

Legend: R ranks, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, fsum, log

UNEQUAL = 1.5
"""How many times as long the slowest must take as the fastest: less may be what else runs on the host."""

ROUNDS = 8
"""Times that costs are fitted to speeds, and speeds to costs."""


def rank_speeds(
    rows: Sequence[Sequence[float]], compute_s: Sequence[Sequence[float]], known: Sequence[float] | None = None
) -> list[float] | None:
    """Speeds of the ranks, their geometric mean 1; None: no reason to think that they differ.

    A rank takes ``slowness · (fixed + row_s · rows)`` for a layer. The search begins with equal ranks, so what the
    number of rows explains is not taken for speed; or with the speeds that are ``known``: once rows go by them, all
    ranks take as long, which equal ranks would too if rows cost nothing. The slowest and the fastest must differ in
    every layer.

    Args:
        rows: ``[R][L]`` that each rank computed.
        compute_s: ``[R][L]`` seconds that it took, above 0.
    """
    pairs = [list(zip(*each, strict=True)) for each in zip(rows, compute_s, strict=True)]
    if len(pairs) < 2 or not all(any(row for row, _ in of_rank) for of_rank in pairs):
        return None
    slowness = [1 / speed for speed in known or [1.0] * len(pairs)]
    for _ in range(ROUNDS):
        fixed_s, row_s = _costs(
            [(row, seconds / slow) for of_rank, slow in zip(pairs, slowness, strict=True) for row, seconds in of_rank]
        )
        expected = [fsum(fixed_s + row_s * row for row, _ in of_rank) for of_rank in pairs]
        if not all(expected):
            return None
        slowness = [
            fsum(seconds for _, seconds in of_rank) / whole for of_rank, whole in zip(pairs, expected, strict=True)
        ]
        mean = exp(fsum(map(log, slowness)) / len(slowness))
        slowness = [slow / mean for slow in slowness]
    ratios = [[seconds / (fixed_s + row_s * row or 1.0) for row, seconds in of_rank] for of_rank in pairs]
    slowest, fastest = (chosen(range(len(pairs)), key=slowness.__getitem__) for chosen in (max, min))
    differ = slowness[slowest] >= UNEQUAL * slowness[fastest] and min(ratios[slowest]) > max(ratios[fastest])
    return [1 / slow for slow in slowness] if differ else None


def _costs(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds of a layer without rows, and of a row, both not negative: least squares over ``(rows, seconds)``."""
    mean_rows = fsum(row for row, _ in points) / len(points)
    mean_s = fsum(seconds for _, seconds in points) / len(points)
    spread = fsum((row - mean_rows) ** 2 for row, _ in points)
    row_s = fsum((row - mean_rows) * (seconds - mean_s) for row, seconds in points) / spread if spread else 0.0
    fixed_s = mean_s - row_s * mean_rows
    if row_s >= 0 and fixed_s >= 0:
        return fixed_s, row_s
    through_origin = 0.0, fsum(row * seconds for row, seconds in points) / fsum(row**2 for row, _ in points)
    return min(
        ((mean_s, 0.0), through_origin),
        key=lambda costs: fsum((seconds - costs[0] - costs[1] * row) ** 2 for row, seconds in points),
    )


class SpeedsInAgreement:
    """Speeds that two intervals in a row found; what a single one finds may be chance, and changes nothing.

    Attributes:
        speeds: of each rank; None: equal.
    """

    def __init__(self) -> None:
        self.speeds: list[float] | None = None
        self._last: list[float] | None = None

    def add(self, found: list[float] | None) -> None:
        """Take in what an interval found."""
        if found is None and self._last is None:
            self.speeds = None
        elif found is not None and self._last is not None:
            self.speeds = [(now * then) ** 0.5 for now, then in zip(found, self._last, strict=True)]
        self._last = found
