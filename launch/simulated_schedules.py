"""The schedules that ``paceline simulate`` knows, by the names of its flags, and costs that fit them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.schedules.costs import Costs
    from paceline.schedules.schedule import Schedule
    from paceline.schedules.stream import Stream

DEFAULTS: dict[str | None, dict[str, Any]] = {
    "kfkb": {"k": 2}, "eager": {"slack": 1.0}, "interleaved": {"chunks": 2}
}  # fmt: skip
"""Options of a schedule that are left out."""


def schedule_of(type: str, num_stages: int, num_micro_batches: int, **options: Any) -> Schedule | Stream:
    """The schedule of a name, whatever the costs are.

    Raises:
        ValueError: there is none of this name or shape, or an option has no meaning for it.
    """
    from paceline.schedules import FAMILIES, asynchronous, families, make
    from paceline.schedules.split_families import SPLIT_FAMILIES

    shapes = {families.DUALPIPEV: families.dualpipev, **SPLIT_FAMILIES}
    known = (*FAMILIES, families.INTERLEAVED, *shapes, "generated", *asynchronous.STREAMS)
    if type not in known:
        raise ValueError(f"schedule type {type!r} is unknown: choose one of {', '.join(known)}.")
    if type == families.INTERLEAVED:
        num_chunks = options.pop("chunks")
        if not options:
            return families.interleaved(num_stages, num_micro_batches, num_chunks)
    if type in shapes and not options:
        return shapes[type](num_stages, num_micro_batches)
    has_directions = type == asynchronous.MULTIDIRECTION
    staleness, count = (options.pop(name, None) if has_directions else None for name in ("staleness", "directions"))
    if type in FAMILIES and options.keys() <= {"k", "slack"}:
        return make(type, num_stages, num_micro_batches, **options)
    for name, value in options.items():
        raise ValueError(f"{name}={value!r} has no meaning for the schedule {type!r}: leave it out.")
    if staleness not in (None, 0, 1):
        raise ValueError(f"staleness={staleness} is not possible: give 1, or 0 for a flush at the end of every step.")
    stream = asynchronous.make(type, num_stages, num_micro_batches, count)
    return _flushed(stream) if staleness == 0 else stream


def generated_for(
    costs: Costs, num_ranks: int, num_micro_batches: int, memory_gib: float | None = None, **options: Any
) -> Schedule:
    """The fastest schedule that is found for some costs.

    Args:
        costs: of one stage a rank, and the schedule may have one or two; or of several, and it has as many.
        memory_gib: what a rank may keep of micro-batches.
    """
    from paceline.schedules.families import chunked_route, v_route
    from paceline.schedules.generator import GENERATED, generated

    for name, value in options.items():
        raise ValueError(f"{name}={value!r} has no meaning for the schedule {GENERATED!r}: leave it out.")
    room = None
    if memory_gib is not None:
        if not 0 < memory_gib < inf:
            raise ValueError(f"--memory-gib {memory_gib:g} is no size: give GiB, above 0.")
        if not costs.activation_bytes:
            raise ValueError("--memory-gib needs to know what micro-batches keep: give --activation-bytes too.")
        room = (memory_gib * 2**30,) * num_ranks
    num_chunks, odd = divmod(len(costs.forward_s), num_ranks)
    if odd or not num_chunks:
        raise ValueError(
            f"the costs are of {len(costs.forward_s)} stages and there are {num_ranks} ranks: give one value a rank, or"
            " one for each of as many stages on every rank."
        )
    around = {count: chunked_route("interleaved", num_ranks, count) for count in (1, 2, num_chunks)}
    if num_chunks == 1:
        routes = {around[1]: costs, **{way: costs.of_chunks(way) for way in (v_route(num_ranks), around[2])}}
    else:
        routes = dict.fromkeys([around[num_chunks], *([v_route(num_ranks)] if num_chunks == 2 else [])], costs)
    return generated(routes, num_micro_batches, room)


def _flushed(stream: Stream) -> Schedule:
    """One step of a run that is drained after every step."""
    return replace(stream.unrolled(1), name=f"{stream.name} staleness=0")


def flushed_to_compare(num_stages: int, num_micro_batches: int) -> list[Schedule | Stream]:
    """The schedules with a flush that ``--compare`` shows."""
    from paceline.schedules import families, make
    from paceline.schedules.split_families import SPLIT_FAMILIES

    schedules: list[Schedule | Stream] = [
        make("1f1b", num_stages, num_micro_batches),
        *(make("kfkb", num_stages, num_micro_batches, k=k) for k in families.group_sizes(num_micro_batches)),
        *(make("eager", num_stages, num_micro_batches, slack=slack) for slack in (1.0, 2.0)),
        make("gpipe", num_stages, num_micro_batches),
    ]
    for type in (families.INTERLEAVED, families.DUALPIPEV, *SPLIT_FAMILIES):
        with suppress(ValueError):  # no order of so many micro-batches
            schedules.append(schedule_of(type, num_stages, num_micro_batches, **DEFAULTS.get(type, {})))
    return schedules


def streams_to_compare(num_stages: int, num_micro_batches: int) -> list[Schedule | Stream]:
    """The schedules without a flush that ``--compare`` shows, and a step with one of the same orders."""
    from paceline.schedules import asynchronous
    from paceline.schedules.directions import allowed

    schedules: list[Schedule | Stream] = []
    if num_micro_batches % num_stages == 0:
        for count in reversed(allowed(num_stages)):
            stream = asynchronous.multidirection(num_stages, num_micro_batches, count)
            schedules += [_flushed(stream), stream]
    return [*schedules, asynchronous.one_direction(num_stages, num_micro_batches)]


def fitting(costs: Costs, schedule: Schedule | Stream) -> Costs:
    """Costs of the stages of a schedule, of those of one stage a rank."""
    from paceline.schedules.stream import Stream

    num_stages = len(costs.forward_s)
    if isinstance(schedule, Stream) or schedule.num_stages == num_stages or schedule.num_ranks != num_stages:
        return costs
    return costs.of_chunks([schedule.rank(stage) for stage in range(schedule.num_stages)])
