"""Batch sizes: train batch = micro-batch x micro-batches (gradient accumulation) x data parallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..planning.divisors import divisors
from .section import show, whole

MICRO_BATCH, MICRO_BATCHES, TRAIN_BATCH = BATCH_KEYS = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
# 1F1B idles (stages - 1) / (micro-batches + stages - 1) of the time: under a fifth from here on.
MICRO_BATCHES_PER_STAGE = 4
# Samples of a step; beyond, their number is a mistake, and its divisors take long to find.
MOST_SAMPLES = 2**40
# Weights are stale in the first round of a step only.
ROUNDS = 2


def batch_sizes(
    config: Mapping[str, Any], stages: int, data_parallel: int, *, in_rounds: bool = False
) -> tuple[dict[str, int], dict[str, str]]:
    """All three batch sizes, and why for those that were chosen: train = micro x accumulation x data parallel.

    Args:
        in_rounds: the schedule runs rounds of as many micro-batches as there are stages. A number that is written is
            not checked for it here.
    """
    micro, count, train = (None if config.get(key) is None else whole(key, config[key]) for key in BATCH_KEYS)
    for key, size in zip(BATCH_KEYS, (micro, count, train), strict=True):
        if size is not None and size > MOST_SAMPLES:
            raise ValueError(f"{key} is {show(size)}: it must be at most {MOST_SAMPLES}; correct it or leave it out.")
    target = MICRO_BATCHES_PER_STAGE * stages if stages > 1 else 1
    why_target = f"{MICRO_BATCHES_PER_STAGE} for each of {stages} stages" if stages > 1 else "one stage needs no more"
    a_round, rounds = 1, ""
    if in_rounds:
        target, why_target = ROUNDS * stages, f"{ROUNDS} rounds of {stages}, one for each stage"
        a_round, rounds = stages, f" x {stages} micro-batches of a round"
    reasons: dict[str, str] = {}
    if train is None:
        if micro is None:
            micro, reasons[MICRO_BATCH] = 1, "the smallest: least memory"
        if count is None:
            count, reasons[MICRO_BATCHES] = target, why_target
        train = micro * count * data_parallel
        reasons[TRAIN_BATCH] = f"micro-batch x micro-batches x data parallel = {micro} x {count} x {data_parallel}"
    elif micro is None and count is None:
        _must_divide(train, data_parallel * a_round, f"data parallel {data_parallel}{rounds}")
        share = train // data_parallel
        count = min((n for n in divisors(share) if n % a_round == 0), key=lambda n: (abs(n - target), -n))
        micro = share // count
        divisor = f"multiple of {stages} that divides" if in_rounds else "divisor of"
        reasons[MICRO_BATCHES] = f"the {divisor} {share} samples a pipeline nearest to {target} ({why_target})"
        reasons[MICRO_BATCH] = f"{share} samples a pipeline / {count} micro-batches"
    elif count is None:
        assert micro is not None
        named = f"micro-batch {micro} x data parallel {data_parallel}{rounds}"
        _must_divide(train, micro * data_parallel * a_round, named)
        count = train // (micro * data_parallel)
        reasons[MICRO_BATCHES] = f"{train} / (micro-batch {micro} x data parallel {data_parallel})"
    elif micro is None:
        _must_divide(train, count * data_parallel, f"{MICRO_BATCHES} {count} x data parallel {data_parallel}")
        micro = train // (count * data_parallel)
        reasons[MICRO_BATCH] = f"{train} / (micro-batches {count} x data parallel {data_parallel})"
    elif train != micro * count * data_parallel:
        raise ValueError(
            f"{TRAIN_BATCH} is {train}: it must be {MICRO_BATCH} x {MICRO_BATCHES} x data parallel = {micro} x {count} "
            f"x {data_parallel} = {micro * count * data_parallel}; correct it or leave one of the three out."
        )
    return {MICRO_BATCH: micro, MICRO_BATCHES: count, TRAIN_BATCH: train}, reasons


def _must_divide(train: int, divisor: int, named: str) -> None:
    if train % divisor:
        raise ValueError(
            f"{TRAIN_BATCH} is {train}: it must be a multiple of {divisor} ({named}); "
            f"write {-(-train // divisor) * divisor}, or leave it out."
        )
