"""The choice of a schedule for a run that was measured: a function of values, which another process can compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..schedules.costs import Costs
from ..schedules.generator import GENERATED, generated
from .candidates import FEW, IN_V, SLACKS, SPLIT_IN_LINE, Candidate, candidates, that_fit
from .choose import NO_FORMATS, Choice, Past, Planner
from .format_costs import FormatCosts
from .switching import SwitchRule

GENERATED_UP_TO = 2048
"""Up to so many stages times micro-batches an order is made anew at each planning: it takes a second there."""


@dataclass(frozen=True)
class Options:
    """The schedules that a run may choose from.

    Args:
        in_v: two stages a device, along the devices and back; otherwise one.
        only_generated: orders that are made for what was measured, and the families of split backwards.
        late: whether gradients may come late.
        formats: by name, costs of formats that stages may send in.
        risk: as of :class:`~paceline.planning.choose.Planner`.
    """

    in_v: bool = False
    only_generated: bool = False
    late: bool = False
    formats: Mapping[str, FormatCosts] = field(default_factory=lambda: NO_FORMATS)
    risk: float | None = None


@dataclass(frozen=True)
class Measured:
    """A run's pipeline as it was measured. Numbers are by size of a micro-batch, then one a stage.

    Args:
        num_stages: one a device; devices, where they hold several.
        micro_batch_size: as configured.
        micro_batches: of a step of this replica.
        replica_micro_batches: the same of each replica.
        costs: of one micro-batch.
        saved_bytes: of the sizes whose memory is known.
        room_bytes: that activations may take, one number a device.
        route: device of each stage.
    """

    num_stages: int
    micro_batch_size: int
    micro_batches: int
    replica_micro_batches: tuple[int, ...]
    costs: Mapping[int, Costs]
    saved_bytes: Mapping[int, Sequence[float]]
    room_bytes: Sequence[float]
    route: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Samples of a step of this replica."""
        return self.micro_batch_size * self.micro_batches

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate stays within the room that there is, if its size was measured."""
        size = candidate.micro_batch_size
        if size not in self.saved_bytes:
            return True
        return candidate.fits(self.num_stages, self.samples, self.costs[size], self.room_bytes)


class Found(NamedTuple):
    """The outcome of a search.

    Args:
        planner: with the candidates.
        rule: with what it remembers now.
        num_made: orders that were made in the run so far.
        gives_way: what runs does not fit in memory any more, and the smallest was compared in its place.
    """

    choice: Choice
    planner: Planner
    rule: SwitchRule
    num_made: int
    gives_way: bool


class SearchArguments(NamedTuple):
    """The arguments of :func:`search`.

    Args:
        running: its size was measured.
        least: takes the least memory; in its place where not even that fits.
        rule: is changed.
        num_made: orders that were made in the run so far.
        switch_s: seconds that a switch costs.
        steps: done since the last choice.
        before: costs that the last choices were made for, with the same layers.
    """

    measured: Measured
    options: Options
    running: Candidate
    least: Candidate
    rule: SwitchRule
    num_made: int
    switch_s: float
    steps: int
    before: tuple[Past, ...] = ()


def search(
    measured: Measured,
    options: Options,
    running: Candidate,
    least: Candidate,
    rule: SwitchRule,
    num_made: int,
    switch_s: float,
    steps: int,
    before: Sequence[Past] = (),
) -> Found:
    """Predict all candidates that fit, and decide whether the best of them pays."""
    made = made_orders(measured, options, running, with_weights(measured.costs, measured.saved_bytes), num_made)
    new = [each for each in made if each.made != running.made]
    found = tuple(
        candidate._replace(boundary=name)
        for candidate in (*_known(measured, options, least), *made)
        if _runs_everywhere(candidate, measured)
        for name in options.formats
    )
    planner = Planner(found, measured.num_stages, measured.samples, options.formats, options.risk)
    least = least._replace(boundary=running.boundary)
    gives_way = running != least and not measured.fits(running)
    running = least if gives_way else running
    choice = planner.choose(measured.costs, running, rule, switch_s=switch_s, steps=steps, before=before)
    return Found(choice, planner, rule, num_made + len(new), gives_way)


def made_orders(
    measured: Measured, options: Options, running: Candidate, costs: Mapping[int, Costs], num_made: int
) -> list[Candidate]:
    """An order for these costs, of each micro-batch size; none where that takes too long.

    Args:
        costs: with those of the backwards of weights.
        num_made: so many have names already.
    """
    is_too_large = not options.only_generated and measured.num_stages * measured.micro_batches > GENERATED_UP_TO
    if is_too_large or len(set(measured.replica_micro_batches)) > 1:
        return []
    found: list[Candidate] = []
    for size, each in costs.items():
        try:
            order = generated({measured.route: each}, measured.samples // size, measured.room_bytes)
        except ValueError:  # nothing fits
            continue
        if running.made is not None and order.orders == running.made.orders:
            found.append(running._replace(boundary=""))
        elif not order.name.startswith(f"{GENERATED} as "):
            num_made += 1
            found.append(Candidate(size, family=f"{GENERATED} {num_made}", made=replace(order, name=GENERATED)))
    return found


def _known(measured: Measured, options: Options, least: Candidate) -> Iterator[Candidate]:
    """Families that fit in memory, of micro-batches whose memory was measured."""
    sizes = [size for size in measured.costs if size in measured.saved_bytes]
    num_stages, samples = measured.num_stages, measured.samples
    if options.in_v or options.only_generated:
        yield least
    else:
        yield from candidates(
            *(num_stages, samples, sizes, measured.saved_bytes, measured.room_bytes),
            configured=measured.micro_batch_size,
            slacks=SLACKS if len(sizes) * num_stages * measured.micro_batches <= FEW else (0.0, 1.0),
            late=options.late,
        )
    if split := with_weights(measured.costs, measured.saved_bytes):
        names = IN_V if options.in_v else SPLIT_IN_LINE
        yield from that_fit(names, num_stages, samples, split, measured.room_bytes)


def with_weights(costs: Mapping[int, Costs], saved_bytes: Mapping[int, Sequence[float]]) -> dict[int, Costs]:
    """Costs of the sizes that can run with split backwards: how long those take is known once some were split."""
    return {size: each for size, each in costs.items() if each.weight_s and size in saved_bytes}


def _runs_everywhere(candidate: Candidate, measured: Measured) -> bool:
    """Whether replicas with other shares can run a candidate that fits with this one's."""
    costs = measured.costs[candidate.micro_batch_size]
    for count in set(measured.replica_micro_batches) - {measured.micro_batches}:
        try:
            if not candidate.fits(measured.num_stages, count * measured.micro_batch_size, costs, measured.room_bytes):
                return False
        except ValueError:  # too few for it
            return False
    return True
