"""Schedules that fit in memory: micro-batch size x micro-batches of a group x warm-up (the seed's memory-limit curve).

A larger micro-batch leaves memory for smaller groups: for each size, the largest group that fits every stage is a point
of the curve. The largest is not always the fastest, so everything under the curve is a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil, inf, isnan
from typing import NamedTuple

from ..schedules import families
from ..schedules.asynchronous import ONE_DIRECTION, one_direction
from ..schedules.costs import Costs
from ..schedules.families import DUALPIPEV, dualpipev, grouped
from ..schedules.schedule import Schedule
from ..schedules.simulate import peak_bytes
from ..schedules.split_families import DUALPIPEV_SPLIT, SPLIT_FAMILIES, ZBH1, ZBH2
from ..schedules.stream import Stream
from ..schedules.verify import peaks

SLACKS = (0.0, 0.5, 1.0, 2.0, 3.0)
FEW = 512
"""Up to so many stages times micro-batches times sizes every warm-up is tried: a replay grows with all three."""
# Every group size up to here is tried, beyond it one per doubling.
ALL_GROUPS_TO = 8
FAMILIES: Mapping[str, Callable[[int, int], Schedule]] = {**SPLIT_FAMILIES, DUALPIPEV: dualpipev}
"""Orders without settings, by name: functions of the number of devices and of micro-batches."""
SPLIT_IN_LINE = (ZBH1, ZBH2)
"""Those for one stage a device."""
IN_V = (*families.IN_V, DUALPIPEV_SPLIT)
"""Those for two stages a device, along the devices and back."""


class Candidate(NamedTuple):
    """One way to run a step: the samples cut into micro-batches, these into groups, and how early stages begin.

    Args:
        micro_batch_size: samples of a micro-batch.
        k: micro-batches of a group.
        slack: stage s of S begins with ``ceil((S - 1 - s) * (1 + slack))`` groups of forwards. 0 with k = 1 is 1F1B.
        is_late: 1F1B without a flush, whose gradients come late.
        family: an order of :data:`FAMILIES` instead of groups, or the name of ``made``.
        made: an order that was made for the costs of a run.
        boundary: format of what passes between stages, in both directions; empty: as the JSON has it.
    """

    micro_batch_size: int
    k: int = 1
    slack: float = 0.0
    is_late: bool = False
    family: str = ""
    made: Schedule | None = None
    boundary: str = ""

    @property
    def key(self) -> tuple[int, int, float, bool, str, str]:
        """For a fixed order of candidates."""
        return self.micro_batch_size, self.k, self.slack, self.is_late, self.family, self.boundary

    @property
    def name(self) -> str:
        """A name for people: ``"kfkb k=2, micro-batch 4"``."""
        if self.is_late:
            order = ONE_DIRECTION
        elif self.family:
            order = self.family
        elif self.k == 1:
            order = f"eager slack={self.slack:g}" if self.slack else "1f1b"
        else:
            order = f"kfkb k={self.k}" + (f" slack={self.slack:g}" if self.slack else "")
        between = f", {self.boundary} between stages" if self.boundary else ""
        return f"{order}, micro-batch {self.micro_batch_size}{between}"

    def schedule(self, num_stages: int, samples: int) -> Schedule | Stream:
        """The order of a step of so many samples (of one pipeline); a stream without a flush.

        Args:
            num_stages: of one a device; devices, where they hold several.

        Raises:
            ValueError: the micro-batch size does not divide the samples, k or slack is out of range, or the order does
                not exist for so many micro-batches.
        """
        count = num_micro_batches(self.micro_batch_size, samples)
        if self.made is not None and self.made.num_micro_batches != count:
            raise ValueError(
                f"{self.name} was made for {self.made.num_micro_batches} micro-batches and a step has {count}: make an "
                "order for these."
            )
        if self.is_late:
            return replace(one_direction(num_stages, count), name=self.name)
        if self.family:
            return replace(self.made or _of_family(self.family, num_stages, count), name=self.name)
        return grouped(num_stages, count, self.k, self._warmup(num_stages), self.name)

    def peak_activations(self, num_stages: int, samples: int) -> tuple[int, ...]:
        """Most micro-batches that each stage keeps alive at once: what :func:`~paceline.schedules.verify` counts.

        Of a family those of each device, all of its stages together, and those that are left for later.

        A stage has run one group more than its warm-up when it begins the first backward, and never more from then on.
        """
        count = num_micro_batches(self.micro_batch_size, samples)
        if self.is_late:  # those of the next step are there before this one's are gone
            return tuple(range(num_stages, 0, -1))
        if self.family:
            order = self.schedule(num_stages, samples)
            assert isinstance(order, Schedule)
            return tuple(peaks(actions).held for actions in order.orders)
        return tuple(min(count, (groups + 1) * self.k) for groups in self._warmup(num_stages))

    def fits(self, num_stages: int, samples: int, costs: Costs, room_bytes: Sequence[float]) -> bool:
        """Whether what a device keeps alive, or leaves for later, is never more than there is room for.

        Args:
            costs: of one micro-batch.
            room_bytes: one number a device.
        """
        order = self.schedule(num_stages, samples)
        whole = order if isinstance(order, Schedule) else order.unrolled(order.most_lag + 1)
        found = peak_bytes(whole, replace(costs, fixed_bytes=()))
        return all(peak <= max(room, 0.0) for peak, room in zip(found, room_bytes, strict=True))

    def _warmup(self, num_stages: int) -> tuple[int, ...]:
        if not 0 <= self.slack < inf:
            raise ValueError(f"slack={self.slack} must be a number from 0 upwards: 0 is 1F1B, 1 doubles the warm-up.")
        # The small number undoes rounding: 10 * 1.1 is a little more than 11.
        return tuple(ceil(later * (1 + self.slack) - 1e-9) for later in range(num_stages - 1, -1, -1))


@lru_cache(maxsize=128)
def schedule_of(candidate: Candidate, num_stages: int, samples: int) -> Schedule | Stream:
    """:meth:`Candidate.schedule`, kept: plannings ask for the same ones again."""
    return candidate.schedule(num_stages, samples)


@lru_cache(maxsize=64)
def _of_family(name: str, num_devices: int, num_micro_batches: int) -> Schedule:
    """Some are found by simulation, which takes seconds where there are many devices."""
    return FAMILIES[name](num_devices, num_micro_batches)


def num_micro_batches(micro_batch_size: int, samples: int) -> int:
    """Number of micro-batches of a step of so many samples.

    Raises:
        ValueError: the size does not divide the samples.
    """
    if micro_batch_size < 1 or samples < 1 or samples % micro_batch_size:
        raise ValueError(
            f"a micro-batch size of {micro_batch_size} does not divide the {samples} samples of a step: each "
            "micro-batch must be as large as the others; choose a divisor."
        )
    return samples // micro_batch_size


def memory_curve(
    num_stages: int,
    samples: int,
    micro_batch_sizes: Sequence[int],
    activation_bytes: Mapping[int, Sequence[float]],
    room_bytes: Sequence[float],
) -> dict[int, int]:
    """The largest k whose peak of live activations fits every stage, by micro-batch size; 0 if not even k = 1.

    The peak grows with k, so the first k that does not fit ends the search: on stage s that is the first whose
    min(M, k * (S - s)) micro-batches need more than there is.

    Args:
        num_stages: S.
        samples: of a step of one pipeline.
        micro_batch_sizes: to try; each divides the samples.
        activation_bytes: by micro-batch size, what one live micro-batch keeps on each stage.
        room_bytes: what live activations may take, one number a stage; infinite where there is no limit.

    Raises:
        ValueError: a size does not divide the samples or has no bytes, or a list has not one number a stage.
    """
    curve = {}
    for size in micro_batch_sizes:
        count = num_micro_batches(size, samples)
        limits = _live_limits(num_stages, size, count, activation_bytes, room_bytes)
        curve[size] = min(
            count if limit == count else limit // (num_stages - stage) for stage, limit in enumerate(limits)
        )
    return curve


def candidates(
    num_stages: int,
    samples: int,
    micro_batch_sizes: Sequence[int],
    activation_bytes: Mapping[int, Sequence[float]],
    room_bytes: Sequence[float],
    *,
    configured: int,
    slacks: Sequence[float] = SLACKS,
    late: bool = False,
) -> tuple[Candidate, ...]:
    """All schedules that fit in memory, no two of which are the same order.

    For every micro-batch size each k up to the largest that fits (:func:`memory_curve`), with each warm-up slack that
    fits. Where a step has many micro-batches not every k is tried: all up to 8, then one per doubling (the largest
    divisor of the micro-batches in it if there is one, since equal groups run best), and the largest that fits.

    1F1B of the configured size is always there, also if by these numbers it does not fit: it keeps the fewest
    micro-batches alive of all that are pipelined, so it is what runs where nothing fits.

    Args:
        configured: the micro-batch size of the configuration.
        slacks: of the warm-up, from 0 upwards; see :class:`Candidate`. The others as of :func:`memory_curve`.
        late: whether gradients may come late, with the configured size.

    Raises:
        ValueError: as of :func:`memory_curve`.
    """
    curve = memory_curve(num_stages, samples, micro_batch_sizes, activation_bytes, room_bytes)
    found = {_order(Candidate(configured), num_stages, samples): Candidate(configured)}
    for size, largest in curve.items():
        count = num_micro_batches(size, samples)
        limits = _live_limits(num_stages, size, count, activation_bytes, room_bytes)
        for k in _groups(largest, count):
            for slack in sorted(slacks):
                candidate = Candidate(size, k, slack)
                peaks = candidate.peak_activations(num_stages, samples)
                if all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
                    found.setdefault(_order(candidate, num_stages, samples), candidate)
    if late and configured in curve:
        without_flush = Candidate(configured, is_late=True)
        rooms = zip(activation_bytes[configured], room_bytes, strict=True)
        peaks = without_flush.peak_activations(num_stages, samples)
        if all(peak * each <= max(room, 0.0) for peak, (each, room) in zip(peaks, rooms, strict=True)):
            return (*found.values(), without_flush)
    return tuple(found.values())


def that_fit(
    names: Sequence[str], num_devices: int, samples: int, costs: Mapping[int, Costs], room_bytes: Sequence[float]
) -> tuple[Candidate, ...]:
    """Families that exist for a step's micro-batches and fit in memory, of every micro-batch size.

    Args:
        names: in :data:`FAMILIES`.
        costs: by micro-batch size.
        room_bytes: as of :func:`candidates`, one number a device.
    """
    found = []
    for size, name in product(costs, names):
        candidate = Candidate(size, family=name)
        try:
            fits = candidate.fits(num_devices, samples, costs[size], room_bytes)
        except ValueError:  # not with so few micro-batches
            continue
        if fits:
            found.append(candidate)
    return tuple(found)


def _groups(largest: int, count: int) -> list[int]:
    """Group sizes to try up to ``largest``, rising."""
    tried = set(range(1, min(largest, ALL_GROUPS_TO) + 1))
    below = ALL_GROUPS_TO
    while below < largest:
        doubling = range(min(2 * below, largest), below, -1)
        tried.add(next((k for k in doubling if count % k == 0), doubling[0]))
        below *= 2
    return sorted(tried | {largest} - {0})


def _order(candidate: Candidate, num_stages: int, samples: int) -> tuple[int, ...]:
    """The same for two candidates if and only if they run the same actions in the same order on every stage.

    Two micro-batch sizes never do. For one size, k shows on the last stage; and a warm-up of all groups but one and one
    of all of them both run every forward first.
    """
    count = num_micro_batches(candidate.micro_batch_size, samples)
    k = min(candidate.k, count)
    last = ceil(count / k) - 1
    return (candidate.micro_batch_size, k, *(min(groups, last) for groups in candidate._warmup(num_stages)))


def _live_limits(
    num_stages: int,
    size: int,
    count: int,
    activation_bytes: Mapping[int, Sequence[float]],
    room_bytes: Sequence[float],
) -> list[int]:
    """The most micro-batches of a size, at most all, that may be alive on each stage."""
    if size not in activation_bytes:
        raise ValueError(
            f"micro-batch size {size} has no activation_bytes (there are {sorted(activation_bytes)}): measure it, or "
            "leave the size out."
        )
    each_bytes = activation_bytes[size]
    for name, values in (("activation_bytes", each_bytes), ("room_bytes", room_bytes)):
        if len(values) != num_stages:
            raise ValueError(f"{name} has {len(values)} values for {num_stages} stages: give one for each stage.")
    limits = []
    for stage, (each, room) in enumerate(zip(each_bytes, room_bytes, strict=True)):
        if not 0 <= each < inf or isnan(room):
            raise ValueError(
                f"stage {stage} keeps {each} bytes for a micro-batch of {size} and has room for {room}: give numbers "
                "from 0 upwards."
            )
        left = max(room, 0.0)  # what else is in memory may leave less than nothing
        limits.append(count if count * each <= left else int(left // each))
    return limits
