"""Timelines as a trace for https://ui.perfetto.dev and chrome://tracing: the JSON trace event format."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.schedules.schedule import BACKWARD, BACKWARD_INPUT, FORWARD
from paceline.schedules.timeline import Span, Timeline, Transfer

from .comparison import is_compute

Event = dict[str, Any]


class _Slice(NamedTuple):
    """One complete event; times in whole nanoseconds, so that what touches does not overlap by a rounding."""

    tid: int
    start_ns: int
    end_ns: int
    name: str
    category: str
    args: dict[str, Any]


def write_trace(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Write ``timelines`` as one trace.

    A timeline is a process, a rank a track, and so is each direction of each edge; what overlaps there (messages that
    wait for the one before) gets further tracks. Arrows lead from what made a message, over its transfer, to what used
    it. Times are in microseconds since the step began.

    Source: "Trace Event Format", the Chromium project's document.
    """
    pids = range(1, len(timelines) + 1)
    tids = itertools.count(len(timelines) + 1)  # viewers do not expect one thread in two processes
    ids = itertools.count(1)
    headers: list[Event] = []
    events: list[Event] = []
    for pid, timeline in zip(pids, timelines, strict=True):
        headers += _named(pid, pid, "process", timeline.name or f"timeline {pid}", pid)
        placed: list[tuple[Span | Transfer, _Slice]] = []
        for order, (track, members) in enumerate(_tracks(timeline)):
            tid = next(tids)
            headers += _named(pid, tid, "thread", track, order)
            placed += [(member, _slice(member, tid, timeline)) for member in members]
        events += [_complete(pid, found) for _, found in placed]
        events += _flows(pid, placed, ids)
    # A flow belongs to the slice that is open where it stands: slices first.
    events.sort(key=lambda event: (event["ts"], event["ph"] != "X"))
    with Path(path).open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in headers + events))
        file.write("\n]}\n")


def _named(pid: int, tid: int, what: str, name: str, order: int) -> list[Event]:
    return [
        {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_sort_index", "args": {"sort_index": order}},
    ]


def _tracks(timeline: Timeline) -> Iterator[tuple[str, list[Span] | list[Transfer]]]:
    """Name and contents of every track, in the order in which they are shown."""
    spans: dict[str, list[Span]] = {f"rank {rank}": [] for rank in range(timeline.num_ranks)}
    for span in timeline.spans:
        spans[f"rank {span.rank}"].append(span)
    edges: dict[tuple[int, int, str], list[Transfer]] = {}
    for transfer in timeline.transfers:
        edges.setdefault((transfer.source, transfer.target, transfer.kind), []).append(transfer)
    for name, members in spans.items():
        # Without a second key a reduction that starts with a backward could take the rank's own track from it.
        lanes = _lanes(sorted(members, key=lambda span: (span.start_s, not is_compute(span), span.end_s)))
        yield from _numbered(name, lanes or [[]])
    for (source, target, kind), messages in sorted(edges.items()):
        yield from _numbered(f"{source}→{target} {kind}", _lanes(sorted(messages, key=lambda m: (m.start_s, m.end_s))))


def _numbered(name: str, lanes: list[Any]) -> Iterator[tuple[str, Any]]:
    for number, lane in enumerate(lanes, 1):
        yield (name if number == 1 else f"{name} ({number})"), lane


def _lanes(members: Iterable[Any]) -> list[list[Any]]:
    """``members``, sorted by their start, spread over as few lanes as hold them without an overlap."""
    lanes: list[list[Any]] = []
    for member in members:
        free = (lane for lane in lanes if _ns(lane[-1].end_s) <= _ns(member.start_s))
        lane = next(free, None)
        if lane is None:
            lanes.append([member])
        else:
            lane.append(member)
    return lanes


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _slice(member: Span | Transfer, tid: int, timeline: Timeline) -> _Slice:
    chunk = f" chunk {member.chunk}" if member.chunk else ""
    args: dict[str, Any] = {"micro_batch": member.micro_batch, "chunk": member.chunk}
    stage = timeline.stage(member.source if isinstance(member, Transfer) else member.rank, member.chunk)
    if stage is not None:
        args["stage"] = stage
    if isinstance(member, Transfer):
        args["bytes"] = member.num_bytes
        name, category = f"{member.kind} {member.micro_batch}{chunk}", "transfer"
    elif is_compute(member):
        # Viewers colour by the name without its numbers: forwards alike, backwards alike.
        name, category = f"{member.kind} {member.micro_batch}{chunk}", "compute"
    else:
        name, category, args = member.kind, "other", {}
    return _Slice(tid, _ns(member.start_s), _ns(member.end_s), name, category, args)


def _complete(pid: int, found: _Slice) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": found.tid,
        "ts": found.start_ns / 1000,
        "dur": (found.end_ns - found.start_ns) / 1000,
        "name": found.name,
        "cat": found.category,
        "args": found.args,
    }


def _flows(pid: int, placed: Sequence[tuple[Span | Transfer, _Slice]], ids: Iterator[int]) -> Iterator[Event]:
    """An arrow for each message whose maker and user are there, one after the other."""
    computed: dict[tuple[int, str, int], dict[int, _Slice]] = defaultdict(dict)
    for member, found in placed:
        if isinstance(member, Span):
            kind = BACKWARD if member.kind == BACKWARD_INPUT else member.kind
            computed[member.rank, kind, member.micro_batch][member.chunk] = found
    for member, found in placed:
        if not isinstance(member, Transfer):
            continue
        kind = FORWARD if member.kind == "activation" else BACKWARD
        maker = computed[member.source, kind, member.micro_batch].get(member.chunk)
        if maker is None:
            continue
        # Of the target's chunks that run this micro-batch, in whatever order its stages lie, the next one uses it.
        later = [
            found
            for found in computed[member.target, kind, member.micro_batch].values()
            if found.start_ns >= maker.start_ns
        ]
        user = min(later, key=lambda found: found.start_ns, default=None)
        if user is None:
            continue
        if maker.end_ns <= max(user.end_ns, user.start_ns + 1):  # not so if the clocks of two hosts differ much
            yield from _arrow(pid, next(ids), maker, found, user)


def _arrow(pid: int, identity: int, maker: _Slice, message: _Slice, user: _Slice) -> Iterator[Event]:
    # Just before the end: at the end itself the slice is closed and the arrow would hang in the air.
    begin_ns = max(maker.start_ns, maker.end_ns - 1)
    # By clocks that differ a little; viewers drop an arrow that ends before it begins.
    end_ns = max(begin_ns, user.start_ns)
    points = [("s", maker.tid, begin_ns), ("f", user.tid, end_ns)]
    if message.end_ns > message.start_ns and begin_ns <= message.start_ns <= end_ns:
        points.insert(1, ("t", message.tid, message.start_ns))
    for phase, tid, at_ns in points:
        event = {"ph": phase, "pid": pid, "tid": tid, "ts": at_ns / 1000, "name": "message", "cat": "message"}
        yield {**event, "id": identity, **({"bp": "e"} if phase == "f" else {})}
