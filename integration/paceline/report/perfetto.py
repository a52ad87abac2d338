"""Timelines as a trace for https://ui.perfetto.dev and chrome://tracing: the JSON trace event format."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.schedules.schedule import BACKWARD, BACKWARD_INPUT, FORWARD
from paceline.schedules.timeline import Span, Timeline, Transfer

from .comparison import is_compute
from .metrics import write_whole

Event = dict[str, Any]
Member = Span | Transfer


def write_trace(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Write ``timelines`` as one trace.

    A timeline is a process, a rank a track, and so is each direction of each edge; what overlaps there (messages that
    wait for the one before) gets further tracks. Arrows lead from what made a message, over its transfer, to what used
    it. Times are in microseconds since the step began.

    Source: "Trace Event Format", the Chromium project's document.
    """
    tids = itertools.count(len(timelines) + 1)  # viewers do not expect one thread in two processes
    ids = itertools.count(1)
    headers: list[Event] = []
    events: list[Event] = []
    for pid, timeline in enumerate(timelines, 1):
        headers += _named(pid, pid, "process", timeline.name or f"timeline {pid}", pid)
        placed: list[tuple[Member, int]] = []
        for order, (track, members) in enumerate(_tracks(timeline)):
            tid = next(tids)
            headers += _named(pid, tid, "thread", track, order)
            placed += [(member, tid) for member in members]
        events += [{"ph": "X", "pid": pid, "tid": tid, **_slice(member, timeline)} for member, tid in placed]
        events += [{"pid": pid, **event} for event in _flows(placed, ids)]
    # A flow belongs to the slice that is open where it stands: slices first.
    events.sort(key=lambda event: (event["ts"], event["ph"] != "X"))
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in headers + events)
    write_whole(Path(path), f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n')


def _named(pid: int, tid: int, what: str, name: str, order: int) -> list[Event]:
    return [
        {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_sort_index", "args": {"sort_index": order}},
    ]


def _tracks(timeline: Timeline) -> Iterator[tuple[str, Sequence[Member]]]:
    """Name and contents of every track, in the order in which they are shown."""
    members: dict[str, list[Any]] = {f"rank {rank}": [] for rank in range(timeline.num_ranks)}
    for span in timeline.spans:
        members[f"rank {span.rank}"].append(span)
    for transfer in sorted(timeline.transfers, key=lambda one: (one.source, one.target, one.kind)):
        members.setdefault(f"{transfer.source}→{transfer.target} {transfer.kind}", []).append(transfer)
    for name, those in members.items():
        lanes: list[list[Member]] = [[]]  # as few as hold them without an overlap
        # Without a second key a reduction that starts with a backward could take the rank's own track from it.
        for one in sorted(those, key=lambda one: (one.start_s, _is_other(one), one.end_s)):
            free = (lane for lane in lanes if not lane or _ns(lane[-1].end_s) <= _ns(one.start_s))
            lane = next(free, None)
            if lane is None:
                lanes.append(lane := [])
            lane.append(one)
        yield from ((f"{name} ({number})" if number > 1 else name, lane) for number, lane in enumerate(lanes, 1))


def _is_other(member: Member) -> bool:
    return isinstance(member, Span) and not is_compute(member)


def _ns(seconds: float) -> int:
    """Whole nanoseconds, so that what touches does not overlap by a rounding."""
    return round(seconds * 1e9)


def _slice(member: Member, timeline: Timeline) -> Event:
    start_ns, end_ns = _ns(member.start_s), _ns(member.end_s)
    event: Event = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000, "name": member.kind, "cat": "other"}
    if _is_other(member):
        return event | {"args": {}}
    # Viewers colour by the name without its numbers: forwards alike, backwards alike.
    event["name"] += f" {member.micro_batch}" + (f" chunk {member.chunk}" if member.chunk else "")
    event["cat"] = "transfer" if isinstance(member, Transfer) else "compute"
    args: dict[str, Any] = {"micro_batch": member.micro_batch, "chunk": member.chunk}
    stage = timeline.stage(member.source if isinstance(member, Transfer) else member.rank, member.chunk)
    if stage is not None:
        args["stage"] = stage
    if isinstance(member, Transfer):
        args["bytes"] = member.num_bytes
    return event | {"args": args}


def _flows(placed: Sequence[tuple[Member, int]], ids: Iterator[int]) -> Iterator[Event]:
    """An arrow for each message whose maker and user are there, one after the other."""
    computed: dict[tuple[int, str, int], dict[int, tuple[Span, int]]] = defaultdict(dict)
    for span, tid in placed:
        if isinstance(span, Span):
            kind = BACKWARD if span.kind == BACKWARD_INPUT else span.kind
            computed[span.rank, kind, span.micro_batch][span.chunk] = span, tid
    for message, tid in placed:
        if not isinstance(message, Transfer):
            continue
        kind = FORWARD if message.kind == "activation" else BACKWARD
        made = computed[message.source, kind, message.micro_batch].get(message.chunk)
        used = computed[message.target, kind, message.micro_batch].values()
        # Of the target's chunks that run this micro-batch, in whatever order its stages lie, the next one uses it.
        later = [one for one in used if made is not None and _ns(one[0].start_s) >= _ns(made[0].start_s)]
        if made is None or not later:
            continue
        user, user_tid = min(later, key=lambda one: _ns(one[0].start_s))
        start_ns, end_ns, used_ns = _ns(made[0].start_s), _ns(made[0].end_s), _ns(user.start_s)
        if end_ns > max(_ns(user.end_s), used_ns + 1):  # the clocks of two hosts differ much
            continue
        # Just before the end: at the end itself the slice is closed and the arrow would hang in the air.
        begin_ns = max(start_ns, end_ns - 1)
        # By clocks that differ a little; viewers drop an arrow that ends before it begins.
        used_ns = max(begin_ns, used_ns)
        points = [("s", made[1], begin_ns, {}), ("f", user_tid, used_ns, {"bp": "e"})]
        if begin_ns <= _ns(message.start_s) <= used_ns and _ns(message.end_s) > _ns(message.start_s):
            points.insert(1, ("t", tid, _ns(message.start_s), {}))
        identity = next(ids)
        for phase, at_tid, at_ns, more in points:
            event = {"ph": phase, "tid": at_tid, "ts": at_ns / 1000, "name": "message", "cat": "message"}
            yield event | {"id": identity} | more
