"""Divisors of a whole number."""

from __future__ import annotations

from math import isqrt


def divisors(number: int) -> list[int]:
    """All of them, rising; takes time as the root of ``number``."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
