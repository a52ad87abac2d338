"""Which schedule a pipeline runs: the section's ``pipeline.schedule`` with what it leaves out filled in."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..planning.divisors import divisors
from ..planning.unequal_replicas import MicroBatchCounts
from ..schedules import asynchronous, directions, families
from ..schedules.asynchronous import MULTIDIRECTION, ONE_DIRECTION, STREAMS
from ..schedules.generator import GENERATED
from ..schedules.schedule import Schedule
from ..schedules.split_families import SPLIT, SPLIT_FAMILIES
from ..schedules.stream import Stream, flushed
from .batch_sizes import MICRO_BATCHES
from .section import MEAN, PLAN, SECTION, PacelineConfig, ScheduleConfig, ScheduleType, show
from .stage_counts import CHUNKS

TUNED = ("adaptive", GENERATED)
"""Types that are chosen anew while training goes on."""
SCHEDULE = f"{SECTION}.pipeline.schedule"
K, SLACK, RETUNE_EVERY = 2, 1.0, 100
STALENESS, OWNERS = 1, "direction"


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule as a run is started with it. What does not belong to the type is ``None``.

    Args:
        k: micro-batches of a group.
        slack: stage ``s`` of ``S`` begins with ``ceil((S - 1 - s) * (1 + slack))`` forwards; ``None`` with a warm-up.
        warmup: forwards that each stage begins with.
        retune_every: steps from one choice of the tuner to the next, at most.
        micro_batch_sizes: that the tuner may choose from, rising, the configured one among them.
        memory_bytes: what live activations may take on each device; ``None``: what is free.
        chunks: stages that each rank holds.
        directions: pipelines over the same devices.
        staleness: updates that may come between the forward and the backward of a micro-batch.
        optimizer_owners: of the ranks that hold a stage, which have its optimizer states: ``"direction"``, the one
            that has the stage in the first direction, or ``"mirror"``, all of them, each a part.
        warm_in_steps: updates over which the learning rate rises to what it is scheduled to be.
        correction: of late gradients: ``"nesterov"``, ``"error_feedback"`` or ``None``; see
            :class:`~paceline.optim.corrections.Corrections`.
        late_gradients: whether the tuner may choose ``"one_direction"``.
        risk: the quantile of a step by which the tuner compares where messages vary; ``None``: the mean.
    """

    type: ScheduleType
    k: int | None = None
    slack: float | None = None
    warmup: tuple[int, ...] | None = None
    retune_every: int | None = None
    micro_batch_sizes: tuple[int, ...] | None = None
    memory_bytes: int | None = None
    chunks: int | None = None
    directions: int | None = None
    staleness: int | None = None
    optimizer_owners: str | None = None
    warm_in_steps: int | None = None
    correction: str | None = None
    late_gradients: bool | None = None
    risk: float | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether it is chosen anew while training goes on."""
        return self.type in TUNED

    @property
    def has_directions(self) -> bool:
        """Whether there are several pipelines over the same devices."""
        return self.type == MULTIDIRECTION

    @property
    def is_asynchronous(self) -> bool:
        """Whether a step may begin before the last one's update."""
        return (
            self.type == ONE_DIRECTION or (self.has_directions and self.staleness != 0) or self.late_gradients is True
        )

    @property
    def shares_updates(self) -> bool:
        """Whether the ranks that hold the same stages, in any direction, make updates together."""
        return self.type in STREAMS or self.is_asynchronous

    def routes(self, num_devices: int) -> tuple[tuple[int, ...], ...]:
        """Device of each stage, one route a direction."""
        if self.has_directions:
            return directions.routes(num_devices, self.directions)
        if self.chunks is not None:
            return (families.chunked_route(self.type, num_devices, self.chunks),)
        return (tuple(range(num_devices)),)

    def stream(self, num_stages: int, num_micro_batches: int) -> Stream:
        """The order of a step in the steady state, for the types that have one (also with a flush).

        Where the tuner may choose late gradients, it is that of 1F1B, with which it begins.

        Raises:
            ValueError: there is none of this shape.
        """
        if self.late_gradients:
            return flushed(self.first(num_stages, num_micro_batches))
        assert self.type in STREAMS, f"{self.type} is flushed at the end of each step"
        return asynchronous.make(self.type, num_stages, num_micro_batches, self.directions)

    def first(self, num_stages: int, num_micro_batches: int) -> Schedule:
        """The schedule that a run begins with: where it is tuned 1F1B, which keeps the fewest micro-batches alive, or
        ZB-V, which keeps as many on every rank.

        Of a stream it is one step with a flush at its end.
        """
        if self.type in STREAMS:
            name = self.type if self.is_asynchronous else f"{self.type} staleness=0"
            return replace(self.stream(num_stages, num_micro_batches).one_step, name=name)
        if self.type == families.DUALPIPEV:
            return families.dualpipev(num_stages, num_micro_batches)
        if self.type in SPLIT:
            return SPLIT_FAMILIES[self.type](num_stages, num_micro_batches)
        if self.chunks is not None and self.is_tuned:
            return SPLIT_FAMILIES[families.ZBV](num_stages, num_micro_batches)
        if self.chunks is not None:
            return families.interleaved(num_stages, num_micro_batches, self.chunks)
        kind = "1f1b" if self.is_tuned else self.type
        return families.make(kind, num_stages, num_micro_batches, k=self.k, slack=self.slack, warmup=self.warmup)

    def micro_batch_counts(self, num_stages: int) -> MicroBatchCounts:
        """Numbers of micro-batches that a step may have."""
        if self.type == families.DUALPIPEV:
            return MicroBatchCounts(least=2 * num_stages)
        if self.type == families.INTERLEAVED:
            return MicroBatchCounts(num_stages, num_stages)
        return MicroBatchCounts()

    def check_step(self, num_stages: int, num_micro_batches: int, micro_batch_size: int) -> None:
        """Raise ValueError unless steps may have so many micro-batches of the configured size from now on."""
        counts = self.micro_batch_counts(num_stages)
        if not counts.allow(num_micro_batches):
            raise ValueError(
                f"steps would have {num_micro_batches} micro-batches, and the schedule {show(self.type)} of "
                f"{num_stages} stages takes {counts.rule}; take another batch size, or another schedule."
            )
        _check_sizes(self.micro_batch_sizes or (), micro_batch_size * num_micro_batches)

    def planned(self, num_stages: int, num_micro_batches: int) -> Schedule | Stream:
        """The order that a partition is planned for: the steady state of what has one, else what a run begins with."""
        if self.is_asynchronous and not self.late_gradients:
            return self.stream(num_stages, num_micro_batches)
        return self.first(num_stages, num_micro_batches)

    def to_dict(self) -> dict[str, Any]:
        """The values that apply, for a JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def resolve_schedule(
    section: PacelineConfig, num_stages: int, num_micro_batches: int, *, micro_batch_size: int
) -> tuple[ScheduleChoice, dict[str, tuple[Any, str]]]:
    """The schedule of a step, and by path what was chosen because its key was left out: the value and why.

    Args:
        num_micro_batches: of a step and pipeline, at the configured micro-batch size.
        micro_batch_size: the configured one.

    Raises:
        ValueError: a warm-up for another number of stages, a micro-batch size that does not divide the samples, or
            stages or micro-batches that several directions cannot have.
    """
    schedule = section.pipeline.schedule
    if schedule is None:
        return ScheduleChoice("1f1b"), {SCHEDULE: ("1f1b", "as DeepSpeed has it")}
    chosen: dict[str, tuple[Any, str]] = {}

    def pick(key: str, default: Any, why: str) -> Any:
        value = getattr(schedule, key)
        if value is not None:
            return value
        chosen[f"{SCHEDULE}.{key}"] = (default, why)
        return default

    kind = pick("type", "adaptive", "follows the network and the devices")
    if kind == "kfkb":
        k = pick("k", min(K, num_micro_batches), "the smallest group that hides transfers: least memory")
        return ScheduleChoice(kind, k=min(k, num_micro_batches)), chosen
    if kind == "eager" and schedule.warmup is not None:
        _check_warmup(schedule.warmup, num_stages)
        return ScheduleChoice(kind, warmup=schedule.warmup), chosen
    if kind == "eager":
        return ScheduleChoice(kind, slack=pick("slack", SLACK, "begins with twice the forwards of 1F1B")), chosen
    if kind == GENERATED:
        every = pick("retune_every", RETUNE_EVERY, "often for a network's changes, seldom for steps")
        memory_bytes = None if schedule.memory_gib is None else int(schedule.memory_gib * 2**30)
        chunks = _check_chunks(schedule, pick("chunks", CHUNKS, "half the bubble of one stage a rank"))
        return ScheduleChoice(kind, retune_every=every, memory_bytes=memory_bytes, chunks=chunks), chosen
    if kind == "adaptive":
        every = pick("retune_every", RETUNE_EVERY, "often for a network's changes, seldom for steps")
        only = "the configured one: what is defined per micro-batch (dropout, router losses) stays as it is"
        sizes = pick("micro_batch_sizes", (micro_batch_size,), only)
        _check_sizes(sizes, micro_batch_size * num_micro_batches)
        sizes = tuple(sorted({*sizes, micro_batch_size}))
        memory_bytes = None if schedule.memory_gib is None else int(schedule.memory_gib * 2**30)
        chunks = None if schedule.chunks == PLAN else _check_chunks(schedule, schedule.chunks)
        choice = ScheduleChoice(
            kind,
            retune_every=every,
            micro_batch_sizes=sizes,
            memory_bytes=memory_bytes,
            chunks=chunks,
            risk=None if schedule.risk == MEAN else schedule.risk,
        )
        if not schedule.late_gradients:
            _check_synchronous(schedule, "no late_gradients", "true for late_gradients")
            return choice, chosen
        if chunks is not None or schedule.chunks == PLAN:
            raise ValueError(
                f"{SCHEDULE}.chunks is {show(schedule.chunks)} and late_gradients true: without a flush each rank has "
                "one stage; leave one of the two keys out."
            )
        if len(sizes) > 1:
            raise ValueError(
                f"{SCHEDULE}.micro_batch_sizes is {show(sizes)} and late_gradients true: a step is read before the one "
                "ahead of it has ended, cut as configured; leave one of the two keys out."
            )
        warm_in_steps = pick("warm_in_steps", 0, "the learning rate as it is scheduled")
        return replace(choice, late_gradients=True, warm_in_steps=warm_in_steps, correction=schedule.correction), chosen
    if kind in families.CHUNKED:
        count = 2 if kind in families.IN_V else pick("chunks", CHUNKS, "half the bubble of 1F1B")
        choice = ScheduleChoice(kind, chunks=count)
        try:
            choice.first(num_stages, num_micro_batches)
        except ValueError as error:
            raise ValueError(
                f"{MICRO_BATCHES} is {num_micro_batches} and {SCHEDULE}.type {show(kind)}: {error}"
            ) from None
        return choice, chosen
    if kind in STREAMS:
        count = staleness = owners = None
        if kind == MULTIDIRECTION:
            _check_rounds(num_stages, num_micro_batches, schedule.directions)
            count = directions.num_directions(num_stages, schedule.directions)
            if schedule.directions is None:
                why = "half as many as devices idle least"
                why = why if directions.has_halves(num_stages) else f"the only order of {num_stages} devices"
                chosen[f"{SCHEDULE}.directions"] = (count, why)
            staleness = pick("staleness", STALENESS, "no flush at the end of a step: at most one update comes between")
            owners = pick("optimizer_owners", OWNERS, "each stage's states whole on one device")
        if staleness == 0:
            _check_synchronous(schedule, "staleness 0", "1 for staleness")
        warm_in_steps = pick("warm_in_steps", 0, "the learning rate as it is scheduled")
        choice = ScheduleChoice(
            kind,
            directions=count,
            staleness=staleness,
            optimizer_owners=owners,
            warm_in_steps=warm_in_steps,
            correction=schedule.correction,
        )
        return choice, chosen
    return ScheduleChoice(kind), chosen


def _check_chunks(schedule: ScheduleConfig, chunks: int | None) -> int | None:
    """Stages a rank of a schedule that is tuned; None: one."""
    if chunks is not None and chunks > 2:
        raise ValueError(
            f"{SCHEDULE}.chunks is {chunks} and the type {show(schedule.type or 'adaptive')}: it chooses among "
            "schedules of one stage a rank, or of two, along the ranks and back; write 1 or 2."
        )
    return chunks if chunks == 2 else None


def _check_rounds(num_stages: int, num_micro_batches: int, num_directions: int | None) -> None:
    try:
        directions.num_directions(num_stages, num_directions)
    except ValueError as error:
        raise ValueError(f"{SCHEDULE}.type is {show(MULTIDIRECTION)} for {num_stages} stages: {error}") from None
    try:
        asynchronous.multidirection(num_stages, num_micro_batches, num_directions)
    except ValueError as error:
        raise ValueError(
            f"{MICRO_BATCHES} is {num_micro_batches} and {SCHEDULE}.type {show(MULTIDIRECTION)}: {error}"
        ) from None


def _check_synchronous(schedule: ScheduleConfig, why: str, remedy: str) -> None:
    for key in ("warm_in_steps", "correction"):
        value = getattr(schedule, key)
        if value:
            raise ValueError(
                f"{SCHEDULE}.{key} is {show(value)} and {why}: it makes up for late gradients and there are none; drop "
                f"it, or write {remedy}."
            )


def _check_warmup(warmup: tuple[int, ...], num_stages: int) -> None:
    if len(warmup) != num_stages:
        example = list(range(num_stages - 1, -1, -1))
        raise ValueError(
            f"{SCHEDULE}.warmup is {show(warmup)}: {num_stages} stages need {num_stages} numbers, it has "
            f"{len(warmup)}; write one a stage, such as {show(example)}, or write slack instead."
        )


def _check_sizes(sizes: tuple[int, ...], samples: int) -> None:
    for size in sizes:
        if samples % size:
            raise ValueError(
                f"{SCHEDULE}.micro_batch_sizes is {show(sizes)}: {size} must divide the {samples} samples that a "
                f"pipeline takes a step; write some of {show(divisors(samples))}."
            )
