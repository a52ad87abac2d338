"""Decisions of a run and their effect: the configurations that ran, and the times predicted and measured."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

SCHEDULE, PARTITION, EXPERTS, SHARES = "schedule", "partition", "experts", "shares"
MIN_STEPS = 3
"""Fewest steps on either side of the first switch from which a saving is reported."""


@dataclass(frozen=True)
class Configuration:
    """Steps in a row that ran alike.

    Args:
        seconds: of each step, by the host's clock. The first one's hold what it took to switch.
    """

    first_step: int
    schedule: str
    micro_batch_size: int
    partition: tuple[int, ...]
    moves: int
    seconds: tuple[float, ...]

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.seconds) - 1

    @property
    def steady_s(self) -> Sequence[float]:
        """Seconds of the steps but the first, if there are others."""
        return self.seconds[1:] or self.seconds

    @property
    def candidate(self) -> str:
        """The name that the tuner uses."""
        return f"{self.schedule}, micro-batch {self.micro_batch_size}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "schedule": self.schedule,
            "micro_batch_size": self.micro_batch_size,
            "partition": list(self.partition),
            "moves": self.moves,
            **spread(self.steady_s),
            "seconds": list(self.seconds),
        }


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Median and quartiles."""
    if not seconds:
        return {"median_s": None, "lower_quartile_s": None, "upper_quartile_s": None}
    lower, middle, upper = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return {"median_s": middle, "lower_quartile_s": lower, "upper_quartile_s": upper}


def configurations(metrics: Iterable[Mapping[str, Any]], resumed_from: int = 0) -> list[Configuration]:
    """Read configurations from the lines of ``metrics.jsonl``.

    Args:
        resumed_from: step after which the last part of the run began: what ran there is apart from what ran before.
    """
    found: list[Configuration] = []
    for row in (row for line in metrics for row in line.get("ran") or []):
        new = Configuration(
            row["step"],
            row["schedule"],
            row["micro_batch_size"],
            tuple(row["partition"]),
            row["moves"],
            tuple(row["seconds"]),
        )
        last = found[-1] if found else None
        is_next = last is not None and _key(last) == _key(new) and last.last_step + 1 == new.first_step
        if last is not None and is_next and last.last_step != resumed_from:
            found[-1] = replace(last, seconds=(*last.seconds, *new.seconds))
        else:
            found.append(new)
    return found


def _key(one: Configuration) -> tuple[Any, ...]:
    return one.schedule, one.micro_batch_size, one.partition, one.moves


def decisions(logged: Sequence[Mapping[str, Any]], ran: Sequence[Configuration]) -> list[dict[str, Any]]:
    """All decisions with what was predicted and what was measured afterwards; in order of steps.

    Args:
        logged: the decisions as they were logged.
        ran: how the steps ran.
    """
    ordered = sorted(logged, key=lambda decision: decision["step"])  # stable: schedule before partition
    history = _History(ordered, ran)
    return [_decision(decision, history) for decision in ordered]


class _History:
    """An index of a run's decisions and steps.

    Args:
        logged: its decisions, in order of steps.
        ran: how its steps ran.
    """

    def __init__(self, logged: Sequence[Mapping[str, Any]], ran: Sequence[Configuration]) -> None:
        self.ran = ran
        self.moved_at = {d["step"] for d in logged if d["what"] == PARTITION and d["switched"]}
        """Steps after which layers moved."""
        self._decided_at = sorted({d["step"] for d in logged})
        self._of_kind: dict[bool, list[Mapping[str, Any]]] = {False: [], True: []}
        for decision in logged:
            self._of_kind[decision["what"] == EXPERTS].append(decision)
        self._steps = {is_experts: [d["step"] for d in found] for is_experts, found in self._of_kind.items()}
        self._firsts = [one.first_step for one in ran]
        alike: dict[tuple[str, tuple[int, ...]], list[float]] = {}
        for one in ran:
            alike.setdefault((one.candidate, one.partition), []).extend(one.steady_s)
        self._typical_s = {key: median(seconds) for key, seconds in alike.items()}

    @property
    def last_step(self) -> int:
        return self.ran[-1].last_step if self.ran else 0

    def at(self, step: int) -> Configuration | None:
        """The configuration of a step."""
        place = bisect_right(self._firsts, step) - 1
        return self.ran[place] if place >= 0 and step <= self.ran[place].last_step else None

    def next_decision(self, step: int, is_experts: bool) -> Mapping[str, Any] | None:
        """The first decision after ``step``, of the tuner or of the expert rebalancer."""
        place = bisect_right(self._steps[is_experts], step)
        return self._of_kind[is_experts][place] if place < len(self._steps[is_experts]) else None

    def last_decision_step(self, step: int) -> int:
        """The step of the last decision before ``step``; 0 if there was none."""
        place = bisect_left(self._decided_at, step)
        return self._decided_at[place - 1] if place else 0

    def steady_s(self, first_step: int, last_step: int) -> list[float]:
        """Seconds of these steps, without those in which something was switched."""
        found: list[float] = []
        for one in self.ran[max(bisect_right(self._firsts, first_step) - 1, 0) :]:
            if one.first_step > last_step:
                break
            begin = max(first_step - one.first_step, int(len(one.seconds) > 1), 0)
            found += one.seconds[begin : last_step + 1 - one.first_step]
        return found

    def typical_s(self, candidate: str, partition: tuple[int, ...]) -> float | None:
        """Median of a step whenever it ran so."""
        return self._typical_s.get((candidate, partition))


def _decision(logged: Mapping[str, Any], history: _History) -> dict[str, Any]:
    kind, step, switched = str(logged["what"]), logged["step"], bool(logged["switched"])
    is_experts = kind == EXPERTS
    # Layers that move at the same step may bring a schedule of their own: then that prediction is the one that counts.
    overruled = kind == SCHEDULE and step in history.moved_at
    migration = logged.get("migration") or {}
    predicted_s = logged["predicted_best_s" if switched else "predicted_now_s"]
    before = history.at(step - is_experts)  # experts move at the end of a step, all else at the beginning of the next
    return {
        "step": step,
        "kind": kind,
        "stage": logged.get("stage"),
        "switched": switched,
        "from": _from(logged, before),
        "to": _to(logged),
        "why": logged["why"],
        "predicts": "experts" if is_experts else "step",
        "predicted_now_s": logged["predicted_now_s"],
        "predicted_best_s": logged["predicted_best_s"],
        "measured_s": logged.get("measured_s"),
        "step_s": _step_s_until(step - is_experts, before, history),
        "switch": {
            "predicted_s": logged["switch_s"],
            "measured_s": (migration.get("seconds") if migration else logged.get("seconds")) if switched else None,
            "bytes": (migration.get("bytes") if migration else logged.get("num_bytes")) if switched else None,
            "experts": logged.get("moved"),
        },
        "candidates": _candidates(logged, before, history),
        "after": None if overruled else _after(step, is_experts, predicted_s, history),
        "overruled_by_partition": overruled,
    }


def _from(logged: Mapping[str, Any], before: Configuration | None) -> Any:
    if logged["what"] == EXPERTS:
        return {"imbalance": logged.get("imbalance_before")}
    if logged["what"] == PARTITION:
        return {"partition": logged["from"], "schedule": before.candidate if before is not None else None}
    if logged["what"] == SHARES:
        return {"shares": logged["from"]}
    return {"schedule": logged["from"]}


def _to(logged: Mapping[str, Any]) -> Any:
    if logged["what"] == EXPERTS:
        return {"imbalance": logged.get("imbalance_after"), "layers": logged.get("layers")}
    if logged["what"] == PARTITION:
        return {"partition": logged["to"], "schedule": logged["schedule"]}
    if logged["what"] == SHARES:
        return {"shares": logged["to"]}
    return {"schedule": logged["to"]}


def _candidates(logged: Mapping[str, Any], before: Configuration | None, history: _History) -> list[dict[str, Any]]:
    """The fastest by prediction first; measured is what ran with the same partition at any time of the run."""
    predicted = sorted((logged.get("predicted_s") or {}).items(), key=lambda item: (item[1], item[0]))
    return [
        {
            "schedule": name,
            "predicted_s": predicted_s,
            "step_s": None if before is None else history.typical_s(name, before.partition),
        }
        for name, predicted_s in predicted
    ]


def _after(step: int, is_experts: bool, predicted_s: float, history: _History) -> dict[str, Any] | None:
    """Measurements until the next decision, and the error of the prediction."""
    following = history.next_decision(step, is_experts)
    until = following["step"] if following is not None else history.last_step
    seconds = history.steady_s(step + 1, until)
    if until <= step or (not seconds and following is None):
        return None
    # The tuner measures what it predicts; the host's clock has loading data, logging and the like in it too.
    measured_s = following.get("measured_s") if following is not None and not is_experts else None
    return {
        "first_step": step + 1,
        "last_step": until,
        "predicted_s": None if is_experts else predicted_s,
        "measured_s": measured_s,
        "error": measured_s / predicted_s - 1 if measured_s and predicted_s else None,
        "step_s": median(seconds) if seconds else None,
    }


def _step_s_until(step: int, one: Configuration | None, history: _History) -> float | None:
    """Median of the steps since the last decision that ran as step number ``step`` did."""
    if one is None:
        return None
    seconds = history.steady_s(max(history.last_decision_step(step) + 1, one.first_step), step)
    return median(seconds or one.seconds[: step + 1 - one.first_step])


def saved(ran: Sequence[Configuration], switched_at: Sequence[int]) -> dict[str, Any] | None:
    """Step times before the first switch and after it, by the host's clock; switching is in them.

    No more is claimed than this: nobody knows what the later steps would have taken without. None where there was no
    switch, where there were too few steps before or after it, or where the middle halves of both overlap, so that the
    difference is within what steps differ by anyway.

    Args:
        switched_at: steps after which something was switched.
    """
    if not ran or not switched_at:
        return None
    first = min(switched_at)
    start = ran[0]
    before = list(start.steady_s[: first - start.first_step + 1 - (len(start.seconds) > 1)])
    # Steps in which micro-batch sizes were tried belong to neither.
    after = [s for one in ran for n, s in enumerate(one.seconds, one.first_step) if n > first]
    if min(len(before), len(after)) < MIN_STEPS:
        return None
    old, new = spread(before), spread(after)
    assert old["lower_quartile_s"] is not None
    assert old["upper_quartile_s"] is not None
    assert old["median_s"] is not None
    assert new["lower_quartile_s"] is not None
    assert new["upper_quartile_s"] is not None
    apart = new["upper_quartile_s"] < old["lower_quartile_s"] or new["lower_quartile_s"] > old["upper_quartile_s"]
    if not apart:
        return None
    whole_s = old["median_s"] * len(after)
    return {
        "before": {"steps": len(before), **old},
        "after": {"steps": len(after), **new},
        "saved_s": whole_s - sum(after),
        "share": 1 - sum(after) / whole_s,
    }
