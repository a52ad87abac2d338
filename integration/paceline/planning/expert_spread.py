"""How much more than the others the busiest of several devices has to do, while nobody has counted experts' loads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import erf, prod, sqrt

from .experts import Placement

UNKNOWN_LOADS = 0.5
"""Standard deviation over mean of the loads of a layer's experts that no run has counted yet.

Routers are not even: on the traces that SmartMoE published (32 experts) it is about 2. In untrained models of
transformers it was between 0.2 (Mixtral, 8 experts) and 1.6 (Qwen3, 128 experts), in a trial by hand.
"""

POINTS = 64
"""Number of points at which the integral is taken."""

REACH = 5.0
"""Standard deviations beyond which no load is expected."""


def most_imbalance(num_experts: int, num_devices: int, top_k: int) -> float:
    """The load of the most loaded device over the mean where every token goes to experts of one device.

    These are all of its K choices, or as many as there are.
    """
    return num_devices * min(top_k, -(-num_experts // num_devices)) / top_k


@lru_cache(maxsize=256)
def expected_imbalance(num_experts: int, num_devices: int, unevenness: float) -> float:
    """The expected load of the most loaded device over the mean, with experts in order and loads not known.

    Args:
        unevenness: standard deviation over mean of the experts' loads.
    """
    held = [len(experts) for experts in Placement.contiguous(num_experts, num_devices).devices]
    means = [number * num_devices / num_experts for number in held]
    # Of experts drawn from a layer's without putting back: more on one device are fewer elsewhere.
    one = unevenness * num_devices / num_experts / sqrt(max(1, num_experts - 1))
    return _expected_most(means, [one * sqrt(number * (num_experts - number)) for number in held])


def _expected_most(means: Sequence[float], deviations: Sequence[float]) -> float:
    """The expected maximum of normal variables whose sum is fixed, and that are independent but for that.

    Their maximum is on average that of independent ones with n / (n - 1) times the variances.
    """
    if not any(deviations):
        return max(means)
    spread = [deviation * sqrt(len(means) / (len(means) - 1)) for deviation in deviations]
    first, last = (
        max(mean + side * REACH * wide for mean, wide in zip(means, spread, strict=True)) for side in (-1, 1)
    )
    width = (last - first) / POINTS
    return last - width * sum(_below(first + (point + 0.5) * width, means, spread) for point in range(POINTS))


def _below(value: float, means: Sequence[float], deviations: Sequence[float]) -> float:
    """The probability that all are below ``value``."""
    return prod(
        (1 + erf((value - mean) / (deviation * sqrt(2)))) / 2 if deviation else float(value >= mean)
        for mean, deviation in zip(means, deviations, strict=True)
    )
