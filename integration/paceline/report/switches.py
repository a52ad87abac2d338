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
        """For a JSON."""
        return {**vars(self), "last_step": self.last_step, **spread(self.steady_s)}


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    lower, middle, upper = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [*seconds] * 3
    return {"median_s": middle, "lower_quartile_s": lower, "upper_quartile_s": upper}


def configurations(metrics: Iterable[Mapping[str, Any]], resumed_after: Sequence[int] = ()) -> list[Configuration]:
    """Read configurations from the lines of ``metrics.jsonl``.

    Args:
        resumed_after: steps after which the run was gone on with, in order: what ran before and after is apart.
    """
    found: list[tuple[Configuration, list[float]]] = []
    for row in (row for line in metrics for row in line.get("ran") or []):
        how = row["schedule"], row["micro_batch_size"], tuple(row["partition"]), row["moves"]
        new = Configuration(row["step"], *how, ())
        if found:
            last, seconds = found[-1]
            last_step = last.first_step + len(seconds) - 1
            goes_on = replace(new, first_step=last.first_step) == last and last_step + 1 == new.first_step
            if goes_on and last_step not in resumed_after:
                seconds.extend(row["seconds"])
                continue
        found.append((new, list(row["seconds"])))
    return [replace(one, seconds=tuple(seconds)) for one, seconds in found]


class _Steps:
    """The steps of a run, by how they ran."""

    def __init__(self, ran: Sequence[Configuration], resumed_after: Sequence[int]) -> None:
        self.ran, self.resumed_after = ran, resumed_after
        self.last_step = ran[-1].last_step if ran else 0
        alike: dict[tuple[str, tuple[int, ...], int], list[float]] = {}
        for one in ran:
            alike.setdefault((one.candidate, one.partition, self.part(one.first_step)), []).extend(one.steady_s)
        self._typical_s = {key: median(seconds) for key, seconds in alike.items()}

    def part(self, step: int) -> int:
        """The part of the run that a step belongs to; each resumption begins one, maybe in another number of ranks."""
        return bisect_left(self.resumed_after, step)

    def last_of_part(self, step: int) -> int:
        """The last step of the part of the run that ``step`` belongs to."""
        return min([self.last_step, *self.resumed_after[self.part(step) :]])

    def typical_s(self, candidate: str, like: Configuration) -> float | None:
        """Median of a step that ran so, whenever it did, with the partition and in the part of the run of ``like``."""
        return self._typical_s.get((candidate, like.partition, self.part(like.first_step)))

    def at(self, step: int) -> Configuration | None:
        """The configuration of a step."""
        place = bisect_right(self.ran, step, key=_first_step) - 1
        return self.ran[place] if place >= 0 and step <= self.ran[place].last_step else None

    def steady_s(self, first_step: int, last_step: int) -> list[float]:
        """Seconds of these steps, without those in which something was switched."""
        found: list[float] = []
        for one in self.ran[max(bisect_right(self.ran, first_step, key=_first_step) - 1, 0) :]:
            if one.first_step > last_step:
                break
            begin = max(first_step - one.first_step, int(len(one.seconds) > 1), 0)
            found += one.seconds[begin : last_step + 1 - one.first_step]
        return found


def _first_step(one: Configuration) -> int:
    return one.first_step


def decisions(
    logged: Sequence[Mapping[str, Any]], ran: Sequence[Configuration], resumed_after: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """All decisions with what was predicted and what was measured afterwards; in order of steps.

    Args:
        logged: the decisions as they were logged.
        ran: how the steps ran.
        resumed_after: steps after which the run was gone on with, in order; no decision was about later parts.
    """
    ordered = sorted(logged, key=lambda decision: decision["step"])  # stable: schedule before partition
    steps = _Steps(ran, resumed_after)
    moved_at = {one["step"] for one in ordered if one["what"] == PARTITION and one["switched"]}
    before = [0, *sorted({one["step"] for one in ordered})]
    later: dict[str, list[Mapping[str, Any]]] = {}
    for one in ordered:
        later.setdefault(_decider(one["what"]), []).append(one)
    found = []
    for one in ordered:
        kind, step = str(one["what"]), one["step"]
        since = before[bisect_left(before, step - (kind == EXPERTS)) - 1]
        others = later[_decider(kind)]
        place = bisect_right(others, step, key=lambda other: other["step"])
        following = others[place] if place < len(others) else None
        # Layers that move at the same step may bring a schedule of their own, whose prediction is the one that counts.
        overruled = kind == SCHEDULE and step in moved_at
        found.append(_decision(one, steps, since, following, overruled=overruled))
    return found


def _decider(kind: str) -> str:
    """Schedule and partition are planned together; shares of replicas and places of experts each by itself."""
    return kind if kind in (EXPERTS, SHARES) else SCHEDULE


def _decision(
    logged: Mapping[str, Any], steps: _Steps, since: int, following: Mapping[str, Any] | None, *, overruled: bool
) -> dict[str, Any]:
    kind, step, switched = str(logged["what"]), logged["step"], bool(logged["switched"])
    last_step = step - (kind == EXPERTS)  # experts move at the end of a step, all else at the beginning of the next
    before = steps.at(last_step)
    old, new = _ends(logged, before)
    migration = logged.get("migration") or {"seconds": logged.get("seconds"), "bytes": logged.get("num_bytes")}
    step_s = None
    if before is not None:  # of the steps since the decision before that ran as the last one did
        steady_s = steps.steady_s(max(since + 1, before.first_step), last_step)
        step_s = median(steady_s or before.seconds[: last_step + 1 - before.first_step])
    return {
        "step": step,
        "kind": kind,
        "stage": logged.get("stage"),
        "switched": switched,
        "from": old,
        "to": new,
        "why": logged["why"],
        "predicts": "experts" if kind == EXPERTS else "step",
        "predicted_now_s": logged["predicted_now_s"],
        "predicted_best_s": logged["predicted_best_s"],
        "measured_s": logged.get("measured_s"),
        "step_s": step_s,
        "switch": {
            "predicted_s": logged["switch_s"],
            "measured_s": migration.get("seconds") if switched else None,
            "bytes": migration.get("bytes") if switched else None,
            "experts": logged.get("moved"),
        },
        # The fastest by prediction first; measured is what ran with the same partition at any time.
        "candidates": [
            {"schedule": name, "predicted_s": s, "step_s": before and steps.typical_s(name, before)}
            for name, s in sorted((logged.get("predicted_s") or {}).items(), key=lambda item: (item[1], item[0]))
        ],
        "after": None if overruled else _after(logged, steps, following),
        "overruled_by_partition": overruled,
    }


def _ends(logged: Mapping[str, Any], before: Configuration | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """From what to what."""
    kind = logged["what"]
    if kind == EXPERTS:
        new = {"imbalance": logged.get("imbalance_after"), "layers": logged.get("layers")}
        return {"imbalance": logged.get("imbalance_before")}, new
    old, new = {kind: logged["from"]}, {kind: logged["to"]}
    if kind == PARTITION:
        old[SCHEDULE], new[SCHEDULE] = before and before.candidate, logged["schedule"]
    return old, new


def _after(logged: Mapping[str, Any], steps: _Steps, following: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Measurements until the ``following`` decision, and the error of the prediction."""
    step, is_experts = logged["step"], logged["what"] == EXPERTS
    if following is not None and steps.part(following["step"]) != steps.part(step):
        following = None  # it looked at what the resumed run does
    until = steps.last_of_part(step) if following is None else following["step"]
    seconds = steps.steady_s(step + 1, until)
    if until <= step or (not seconds and following is None):
        return None
    # The tuner measures what it predicts; the host's clock has loading data, logging and the like in it too.
    measured_s = None if following is None or is_experts else following.get("measured_s")
    predicted_s = None if is_experts else logged["predicted_best_s" if logged["switched"] else "predicted_now_s"]
    return {
        "first_step": step + 1,
        "last_step": until,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": measured_s / predicted_s - 1 if measured_s and predicted_s else None,
        "step_s": median(seconds) if seconds else None,
    }


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
    first, start = min(switched_at), ran[0]
    num_before = first - start.first_step + 1 - (len(start.seconds) > 1)  # -1 where experts moved at the very first
    before = start.steady_s[: max(num_before, 0)]
    # Steps in which micro-batch sizes were tried belong to neither.
    after = [s for one in ran for n, s in enumerate(one.seconds, one.first_step) if n > first]
    if min(len(before), len(after)) < MIN_STEPS:
        return None
    old, new = spread(before), spread(after)
    if old["lower_quartile_s"] <= new["upper_quartile_s"] and new["lower_quartile_s"] <= old["upper_quartile_s"]:
        return None
    whole_s = old["median_s"] * len(after)
    return {
        "before": {"steps": len(before), **old},
        "after": {"steps": len(after), **new},
        "saved_s": whole_s - sum(after),
        "share": 1 - sum(after) / whole_s,
    }
