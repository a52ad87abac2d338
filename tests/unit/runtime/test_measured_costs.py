"""From what ranks saw of their steps to costs: hand-made reports of a pipeline whose times are known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.transport import Record
from paceline.measure.layer_timer import ItemTimes
from paceline.measure.recorder import Recorded, StepTimes
from paceline.planning.kept_activations import as_kept
from paceline.planning.rebalance import Uneven
from paceline.runtime.measured_costs import MeasuredCosts
from paceline.runtime.rank_reports import WAIT, LayerReport, Report
from paceline.schedules.costs import Costs
from paceline.schedules.families import one_f_one_b
from paceline.schedules.simulate import simulate
from support.reports import MICRO_BATCHES, ROUTES, STAGES, Run, lane


def known(*looks: Sequence[Report]) -> MeasuredCosts:
    measured_costs = MeasuredCosts(ROUTES)
    for reports in looks:
        measured_costs.update(reports)
    return measured_costs


def test_costs_are_those_of_the_run() -> None:
    run = Run()
    measured_costs = known(run.reports())
    costs = measured_costs.costs(2)
    assert measured_costs.sizes() == [2]
    assert costs.forward_s == pytest.approx(run.forward_s)
    assert costs.backward_s == pytest.approx(run.backward_s)
    assert costs.message_bytes == (4000.0,) * 2
    assert costs.activation_bytes == (200.0,) * 3
    assert measured_costs.room_bytes == [1e9, 1e9 + 1, 1e9 + 2]
    for link in (*costs.down, *costs.up):
        assert link.bytes_per_s == pytest.approx(1e6)
        assert link.latency_s == 0.001
    assert costs.egress_bytes_per_s == (inf,)
    assert costs.step_s == pytest.approx(0.1)
    assert measured_costs.measured_s == pytest.approx(run.reports()[0].steps[0].ended_s - run.begun_s)


def split(reports: Sequence[Report], share: float) -> Sequence[Report]:
    """As if each backward had been split, with that share of it for the weights."""
    for report in reports:
        for step in report.steps:
            spans = []
            for span in step.spans:
                if span.kind != "B":
                    spans.append(span)
                    continue
                middle = span.end - share * (span.end - span.start)
                spans += [replace(span, kind="I", end=middle), replace(span, kind="W", start=middle)]
            step.spans[:] = spans
    return reports


def test_the_halves_of_split_backwards_are_told_apart() -> None:
    run, share = Run(), 0.4
    costs = known(split(run.reports(), share)).costs(2)
    assert costs.forward_s == pytest.approx(run.forward_s)
    assert costs.backward_s == pytest.approx(run.backward_s)
    assert costs.weight_s == pytest.approx([share * seconds for seconds in run.backward_s])
    assert known(Run().reports()).costs(2).weight_s == ()


def early(reports: Sequence[Report], share: float, *, stages: Sequence[int]) -> Sequence[Report]:
    """As if that share of each backward of some stages had run before its gradient was there."""
    for report in reports:
        for step in report.steps if report.device in stages else ():
            spans = []
            for span in step.spans:
                if span.kind not in ("B", "I"):
                    spans.append(span)
                    continue
                middle = span.start + share * (span.end - span.start)
                spans += [replace(span, kind="R", end=middle), replace(span, start=middle)]
            step.spans[:] = spans
    return reports


@pytest.mark.parametrize("is_split", [False, True])
def test_what_ran_before_a_gradient_was_there_is_a_part_of_its_backward(is_split: bool) -> None:
    run, share = Run(), 0.3
    reports = split(run.reports(), 0.4) if is_split else run.reports()
    own = known(early(reports, share, stages=(0, 1)))
    costs, part = own.costs(2), 0.6 if is_split else 1.0
    assert costs.backward_s == pytest.approx(run.backward_s)
    assert costs.ahead_s == pytest.approx([share * part * run.backward_s[0], share * part * run.backward_s[1], 0.0])
    own.update(run.reports(first_number=99))
    assert own.costs(2).ahead_s == (), "nothing ran ahead any more"


@pytest.mark.parametrize("is_split", [False, True])
def test_some_of_what_could_be_computed_again_is_kept(is_split: bool) -> None:
    """Every other micro-batch of two stages is kept. The third one computes nothing again."""
    run, share = Run(), 0.3
    reports = early(split(run.reports(), 0.4) if is_split else run.reports(), share, stages=(0, 1))
    for report in reports:
        for step in report.steps:
            step.spans[:] = [
                replace(span, kind=WAIT) if span.kind == "R" and span.number % 2 else span for span in step.spans
            ]
        is_again = report.device < 2
        report.again_bytes, report.again_layers = {2: {0: 900.0 * is_again}}, {0: 3}
        report.again_room_bytes = 1e6 + report.device
        for step in report.steps:
            step.kept_shares = {0: 0.5} if is_again else {}
    costs, part = known(reports).costs(2), 0.6 if is_split else 1.0
    again_s = [share * part * seconds for seconds in run.backward_s[:2]]
    assert costs.ahead_s == pytest.approx([seconds / 2 for seconds in again_s] + [0.0])
    shorter = [whole - again / 2 for whole, again in zip(run.backward_s, again_s, strict=False)]
    assert costs.backward_s == pytest.approx([*shorter, run.backward_s[2]])
    assert costs.again is not None
    assert costs.again.seconds == pytest.approx((*again_s, 0.0))
    assert costs.again.num_bytes == (900.0, 900.0, 0.0)
    assert costs.again.layer_bytes == (300.0, 300.0, 0.0)
    assert costs.again.kept == (0.5, 0.5, 0.0)
    assert costs.again.room_bytes == (1e6, 1e6 + 1, 1e6 + 2)

    def in_room(num_bytes: float) -> Costs:
        again = replace(costs.again, room_bytes=(num_bytes,) * 3)  # type: ignore[type-var]
        return as_kept(replace(costs, again=again), one_f_one_b(3, 4))

    whole, none = in_room(1e9), in_room(0.0)
    shorter = [whole - again for whole, again in zip(run.backward_s, again_s, strict=False)]
    assert whole.backward_s == pytest.approx([*shorter, run.backward_s[2]])
    assert none.backward_s == pytest.approx(run.backward_s)


def test_what_was_never_computed_again_by_itself_takes_a_forward() -> None:
    run = Run()
    reports = run.reports()
    for report in reports:
        report.again_bytes, report.again_layers = {2: {0: 900.0}}, {0: 3}
    again = known(reports).costs(2).again
    assert again is not None
    assert again.seconds == pytest.approx(run.forward_s)


def test_what_is_kept_is_known_of_the_steps_that_were_measured() -> None:
    """The first step of each size keeps nothing. That later ones do makes no device faster for other sizes."""
    full, one = Run(), Run(size=1)
    kept = replace(full, backward_s=tuple(b - f for b, f in zip(full.backward_s, full.forward_s, strict=True)))

    def looked(run: Run, share: float) -> Sequence[Report]:
        reports = run.reports()
        for report in reports:
            report.again_bytes, report.again_layers = {2: {0: 900.0}, 1: {0: 450.0}}, {0: 3}
            for step in report.steps:
                step.kept_shares = {0: share}
        return reports

    measured_costs = known(looked(full, 0.0), looked(one, 0.0), looked(kept, 1.0))
    costs, other = measured_costs.costs(2), measured_costs.costs(1)
    assert costs.again is not None
    assert other.again is not None
    assert (costs.again.kept, other.again.kept) == ((1.0,) * 3, (0.0,) * 3)
    assert costs.backward_s == pytest.approx(kept.backward_s)
    assert other.backward_s == pytest.approx(one.backward_s)


def test_splitting_costs_nothing_where_only_split_backwards_compute_again() -> None:
    """As where what is left for later takes the room."""
    run, share = Run(), 0.3
    longer = replace(run, backward_s=tuple(seconds / (1 - share * 0.6) for seconds in run.backward_s))
    costs = known(run.reports(), early(split(longer.reports(), 0.4), share, stages=(0, 1, 2))).costs(2)
    assert costs.split_factor == pytest.approx(1.0)


def test_what_splitting_costs_is_known_also_if_backwards_were_split_from_the_start() -> None:
    """As where each device has two stages. Sizes that were never whole follow."""
    whole = Run()
    longer = replace(whole, backward_s=tuple(1.25 * seconds for seconds in whole.backward_s))
    small = replace(longer, size=1)
    costs = known(split(small.reports(), 0.4), split(longer.reports(), 0.4), whole.reports())
    for size in (1, 2):
        assert costs.costs(size).split_factor == pytest.approx(1.25)
        assert costs.costs(size).backward_s == pytest.approx(whole.backward_s)
        assert costs.costs(size).weight_s == pytest.approx([0.4 * seconds for seconds in whole.backward_s])


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_what_splitting_costs_is_not_laid_to_whole_backwards(slower: float) -> None:
    """Also if the device was another one when they were whole."""
    whole = Run()
    longer = replace(
        whole,
        forward_s=tuple(slower * seconds for seconds in whole.forward_s),
        backward_s=tuple(slower * 1.25 * seconds for seconds in whole.backward_s),
    )
    costs = known(whole.reports(), split(longer.reports(), 0.4)).costs(2)
    assert costs.split_factor == pytest.approx(1.25)
    assert costs.backward_s == pytest.approx([slower * seconds for seconds in whole.backward_s])
    parts = [costs.seconds[kind] for kind in ("I", "W")]
    assert [sum(pair) for pair in zip(*parts, strict=True)] == pytest.approx(longer.backward_s)
    assert parts[1] == pytest.approx([0.4 * seconds for seconds in longer.backward_s])
    shorter = replace(whole, backward_s=tuple(seconds / 1.25 for seconds in whole.backward_s))
    assert known(whole.reports(), split(shorter.reports(), 0.4)).costs(2).split_factor == 1.0, "noise: nothing is won"


@pytest.mark.parametrize("halves", [False, True])
def test_backwards_without_forwards_tell_nothing_of_what_splitting_costs(halves: bool) -> None:
    """Where steps run into each other, a report may have some of a micro-batch only."""
    run = Run()
    reports = split(run.reports(), 0.4) if halves else run.reports()
    for report in reports:
        for step in report.steps:
            step.spans[:] = [span for span in step.spans if span.kind != "F"]
    costs = known(run.reports(), reports).costs(2)
    assert costs.forward_s == pytest.approx(run.forward_s)
    assert costs.split_factor == 1.0


def test_gradients_may_be_smaller_than_activations() -> None:
    reports = Run().reports()
    assert known(reports).costs(2).gradient_share == 1.0
    for report in reports:
        for key, records in report.records.items():
            if key.name.startswith("gradients"):
                report.records[key] = [replace(record, num_bytes=record.num_bytes // 4) for record in records]
    costs = known(reports).costs(2)
    assert (costs.message_bytes, costs.gradient_share) == ((4000.0,) * 2, 0.25)


def test_clocks_that_differ_by_seconds_change_nothing() -> None:
    for hosts in (("a", "a", "a"), ("a", "b", "c")):
        alike = known(Run(hosts=hosts).reports())
        apart = known(Run(hosts=hosts, offsets_s=(5.0, -70.0, 12.5)).reports())
        want, got = alike.costs(2), apart.costs(2)
        for name in ("forward_s", "backward_s", "message_bytes", "egress_bytes_per_s", "step_s"):
            assert getattr(got, name) == pytest.approx(getattr(want, name)), name
        for one, other in zip((*want.down, *want.up), (*got.down, *got.up), strict=True):
            assert other.bytes_per_s == pytest.approx(one.bytes_per_s)
        assert apart.measured_s == pytest.approx(alike.measured_s)


def test_between_hosts_what_leaves_a_host_counts_together() -> None:
    costs = known(Run(hosts=("a", "b", "b")).reports()).costs(2)
    assert costs.hosts == (0, 1, 1)
    assert costs.egress_bytes_per_s == pytest.approx((1e6, 1e6))
    assert [link.bytes_per_s for link in costs.down] == [inf, pytest.approx(1e6)]
    assert [link.bytes_per_s for link in costs.up] == [inf, pytest.approx(1e6)]


def test_replicas_count_as_the_slowest_sees_it() -> None:
    fast = Run()
    slow = replace(
        fast, forward_s=(0.04, 0.01, 0.01), transfer_s=0.008, offsets_s=(3.0, 4.0, 5.0), num_bytes=4000, latency_s=0.002
    )
    reports = [*slow.reports(replica=1), *fast.reports(replica=0)]
    reports[4] = replace(reports[4], room_bytes=7.0, saved_bytes={2: {0: 900.0}})
    measured_costs = known(reports)
    costs = measured_costs.costs(2)
    assert costs.forward_s == pytest.approx((0.04, 0.03, 0.02))
    assert costs.down[0].bytes_per_s == pytest.approx(4000 / 0.008)
    assert costs.down[0].latency_s == 0.002
    assert costs.activation_bytes == (200.0, 900.0, 200.0)
    assert measured_costs.room_bytes == [1e9, 7.0, 1e9 + 2]


def test_a_link_is_what_the_looks_at_it_found_on_average() -> None:
    """One slow look does not make a link slow; each further one brings it closer."""
    fast, slow = Run(), Run(transfer_s=0.008)
    s_per_byte = {run: run.transfer_s / 4000 for run in (fast, slow)}
    once = known(fast.reports(), slow.reports(first_number=9)).costs(2).down[0].bytes_per_s
    twice = known(fast.reports(), slow.reports(first_number=9), slow.reports(first_number=17)).costs(2).down[0]
    assert 1 / once == pytest.approx(0.7 * s_per_byte[slow] + 0.3 * s_per_byte[fast])
    assert 1 / twice.bytes_per_s == pytest.approx(0.91 * s_per_byte[slow] + 0.09 * s_per_byte[fast])


def test_the_host_takes_time_beside_each_computation() -> None:
    (report, *others) = Run().reports()
    for step in report.steps:  # a millisecond of Python after each
        moved = [replace(s, start=s.start + 1e-3 * i, end=s.end + 1e-3 * i) for i, s in enumerate(step.spans)]
        step.spans[:] = moved
    gaps, computations = len(report.steps[0].spans) - 1, 2 * MICRO_BATCHES
    costs = known([report, *others]).costs(2)
    assert costs.forward_s[0] == pytest.approx(0.01 + 1e-3 * gaps / computations)
    assert costs.forward_s[1:] == pytest.approx((0.03, 0.02))


def test_reducing_and_stepping_are_beside_the_schedule() -> None:
    reports = Run().reports()
    for report in reports:
        for step in report.steps:
            step.spans.append(Recorded("reduce", -1, step.ended_s - 0.04, step.ended_s - 0.02))
            step.spans.append(Recorded("step", -1, step.ended_s - 0.02, step.ended_s))
    costs = known(reports).costs(2)
    assert costs.forward_s == pytest.approx(Run().forward_s)
    assert costs.step_s == pytest.approx(0.1)


def test_a_size_that_is_measured_later_is_known_besides() -> None:
    first, later = Run(), Run(forward_s=(0.02, 0.06, 0.04), size=4, num_bytes=8000)
    measured_costs = known(first.reports(), later.reports(first_number=9))
    assert measured_costs.sizes() == [2, 4]
    assert measured_costs.costs(2).forward_s == pytest.approx(first.forward_s)
    assert measured_costs.costs(4).forward_s == pytest.approx(later.forward_s)
    assert measured_costs.costs(2).message_bytes == (4000.0,) * 2
    assert measured_costs.costs(4).message_bytes == (8000.0,) * 2
    assert measured_costs.costs(4).activation_bytes == (400.0,) * 3


def test_a_device_that_becomes_slower_is_slower_at_every_size() -> None:
    two, four = Run(), Run(forward_s=(0.02, 0.06, 0.04), backward_s=(0.04, 0.1, 0.08), size=4)
    slower = Run(forward_s=(0.01, 0.06, 0.02), backward_s=(0.02, 0.1, 0.04))  # stage 1, at size 2
    measured_costs = known(two.reports(), four.reports(first_number=9), slower.reports(first_number=17))
    assert measured_costs.costs(2).forward_s == pytest.approx((0.01, 0.06, 0.02))
    assert measured_costs.costs(4).forward_s == pytest.approx((0.02, 0.12, 0.04))
    assert measured_costs.costs(4).backward_s == pytest.approx((0.04, 0.2, 0.08))


def test_two_sizes_in_one_look_scale_a_third_once() -> None:
    runs = {size: Run(size=size) for size in (1, 2, 4)}
    measured_costs = known(*(run.reports(first_number=1 + 8 * i) for i, run in enumerate(runs.values())))
    slower = replace(runs[1], forward_s=(0.02, 0.06, 0.04)).reports(first_number=25)
    for report, more in zip(slower, replace(runs[2], forward_s=(0.02, 0.06, 0.04)).reports(), strict=True):
        report.steps.extend(more.steps)
    measured_costs.update(slower)
    assert measured_costs.costs(4).forward_s == pytest.approx((0.02, 0.06, 0.04))


def test_a_rank_without_times_keeps_what_was_known_of_it() -> None:
    two, four = Run(), Run(size=4)
    measured_costs = known(two.reports(), four.reports(first_number=9))
    reports = two.reports(first_number=17)
    reports[1] = replace(reports[1], steps=[])
    measured_costs.update(reports)
    for size in (2, 4):
        assert measured_costs.costs(size).forward_s == pytest.approx(two.forward_s)


def test_a_look_without_steps_or_messages_changes_nothing() -> None:
    measured_costs = known(Run().reports())
    before = measured_costs.costs(2)
    nothing = [replace(report, steps=[], records={}) for report in Run().reports()]
    measured_costs.update(nothing)
    assert measured_costs.costs(2) == before


def test_the_messages_of_an_evaluation_tell_the_links_and_not_the_sizes() -> None:
    reports = Run().reports()
    for source, target in ((0, 1), (1, 2)):
        after = reports[source].records[lane(source, "activations_out")][-1].number + 1
        for index in range(3 * MICRO_BATCHES):
            begun = 2000.0 + index
            large = Record(after + index, index, 64_000, begun, begun + 0.033)
            reports[source].records[lane(source, "activations_out")].append(large)
            reports[target].records[lane(target, "activations_in")].append(large)
    costs = known(reports).costs(2)
    assert costs.message_bytes == (4000.0,) * 2
    assert [link.bytes_per_s for link in costs.down] == pytest.approx([(8 * 4 + 12 * 64) / (8 * 4 + 12 * 32) * 1e6] * 2)


def test_what_was_measured_predicts_a_step() -> None:
    costs = known(Run().reports()).costs(2)
    simulation = simulate(one_f_one_b(STAGES, MICRO_BATCHES), costs)
    assert 4 * 0.08 < simulation.makespan_s < 1.0


def contended(steps: int, per_step: int, seed: int, once_s: float = 0.0) -> list[Report]:
    """One stage that shares its core: three computations of four take their time, a fourth has to wait for its turn.

    Args:
        once_s: what the first computation of all takes longer: a kernel is compiled.
    """
    chance, now, found = random.Random(seed), 0.0, []
    for step in range(steps):
        begun, spans = now, []
        for kind, seconds in (("F", 0.02), ("B", 0.04)):
            for micro_batch in range(per_step):
                taken = seconds * (chance.uniform(1.9, 2.1) if chance.random() < 0.25 else chance.uniform(0.97, 1.03))
                taken += once_s if (step, kind, micro_batch) == (0, "F", 0) else 0.0
                spans.append(Recorded(kind, micro_batch, now, now + taken))
                now += taken
        found.append(StepTimes(begun, now, spans, key=("1f1b", 2)))
    return [Report(0, 0, "a", found, {}, {}, 1e9)]


@pytest.mark.parametrize("seed", range(4))
def test_a_step_of_ranks_that_share_cores_is_as_long_as_it_was(seed: int) -> None:
    """A step is a sum of computations, and their median is a fifth too short for it."""
    reports = contended(steps=8, per_step=16, seed=seed)
    measured_costs = MeasuredCosts(((0,),))
    measured_costs.update(reports)
    measured = sum(step.ended_s - step.begun_s for step in reports[0].steps) / 8
    assert simulate(one_f_one_b(1, 16), measured_costs.costs(2)).makespan_s == pytest.approx(measured, rel=1e-6)
    assert measured_costs.measured_s == pytest.approx(measured)


def test_what_happened_once_is_not_expected_again() -> None:
    predicted = []
    for once_s in (0.0, 1.0):
        measured_costs = MeasuredCosts(((0,),))
        measured_costs.update(contended(steps=2, per_step=16, seed=5, once_s=once_s))
        predicted.append(simulate(one_f_one_b(1, 16), measured_costs.costs(2)).makespan_s)
    assert predicted[1] == pytest.approx(predicted[0], rel=0.03)


TIMES = st.floats(0.0, 10.0)


@settings(max_examples=60)
@given(
    st.tuples(TIMES, TIMES, TIMES),
    st.lists(st.tuples(*[st.floats(-1e5, 1e5)] * 3), min_size=2, max_size=2),
    st.lists(st.floats(-5.0, 5.0), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["steps", "records", "saved_bytes"])), max_size=3),
    st.sampled_from([("a", "a", "a"), ("a", "b", "b"), ("a", "b", "c"), ("a", "b", "a")]),
)
def test_no_negative_number_and_no_nan_reaches_the_costs(
    forward_s: tuple[float, float, float],
    offsets_s: list[tuple[float, float, float]],
    errors_s: list[float],
    missing: list[tuple[int, str]],
    hosts: tuple[str, ...],
) -> None:
    """Clocks that drift from look to look and are compared badly, and ranks that have nothing to show."""
    measured_costs = MeasuredCosts(ROUTES)
    measured_costs.update(Run(forward_s=forward_s, hosts=hosts).reports())
    for look, offsets in enumerate(offsets_s):
        reports = Run(forward_s=forward_s, hosts=hosts, offsets_s=offsets).reports(first_number=9 + 8 * look)
        for report, error in zip(reports, errors_s, strict=True):
            report.clock_s += error
        for stage, name in missing:
            reports[stage] = replace(reports[stage], **{name: [] if name == "steps" else {}})
        measured_costs.update(reports)
        costs = measured_costs.costs(2)  # Costs refuses negative numbers and those that are none
        assert isfinite(measured_costs.measured_s)
        assert isfinite(simulate(one_f_one_b(STAGES, MICRO_BATCHES), costs).makespan_s)


# -- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A layer: its kinds, and seconds on a device of speed 1."""

    certain: str
    forward_s: float
    backward_s: float
    probable: str | None = None
    num_parameters: int = 1000
    saved_bytes: float = 40.0
    output_bytes: float = 8.0


EMBEDDING, HEAD = Item("embedding", 0.001, 0.002), Item("head", 0.01, 0.03, num_parameters=5000, output_bytes=0.0)
LAYER = Item("layer", 0.01, 0.02)
WINDOW = Item("window", 0.004, 0.006)
ITEMS = (EMBEDDING, LAYER, WINDOW, LAYER, WINDOW, LAYER, LAYER, HEAD)
PARTS = (0, 2, 5, 8)


@dataclass(frozen=True)
class Layered:
    """A pipeline of items on devices.

    Args:
        noise: of each stage and step, a factor.
    """

    items: tuple[Item, ...] = ITEMS
    parts: tuple[int, ...] = PARTS
    speeds: tuple[float, ...] = (1.0, 2.0, 0.5)
    size: int = 2
    steps: int = 2

    def run(self, factors: Sequence[float] = (1.0, 1.0, 1.0)) -> Run:
        stages = [self.items[a:b] for a, b in pairwise(self.parts)]
        scale = [f * self.size / 2 / speed for f, speed in zip(factors, self.speeds, strict=True)]
        forward, backward = (
            tuple(sum(getattr(item, name) for item in stage) * s for stage, s in zip(stages, scale, strict=True))
            for name in ("forward_s", "backward_s")
        )
        return Run(forward, backward, size=self.size, steps=self.steps)

    def reports(
        self, look: int = 0, replica: int = 0, *, timed: bool = False, factors: Sequence[float] = (1.0, 1.0, 1.0)
    ) -> list[Report]:
        found = self.run(factors).reports(replica, first_number=1 + look * MICRO_BATCHES * self.steps)
        if timed:
            for report, (a, b), speed in zip(found, pairwise(self.parts), self.speeds, strict=True):
                report.layers = {n: _layer_report(self.items[n], speed) for n in range(a, b)}
        return found


def _layer_report(item: Item, speed: float) -> LayerReport:
    times = ItemTimes(item.forward_s / speed, item.backward_s / speed, item.saved_bytes, item.output_bytes)
    return LayerReport((item.certain, item.probable or item.certain), item.num_parameters, times)


def followed(pipe: Layered, *others: Sequence[Report]) -> MeasuredCosts:
    """What is known after a look with layers' times, and other looks."""
    measured_costs = MeasuredCosts(ROUTES, parts=pipe.parts)
    measured_costs.update(pipe.reports(timed=True))
    for reports in others:
        measured_costs.update(reports)
    return measured_costs


def works(measured_costs: MeasuredCosts) -> list[tuple[float, float]]:
    return [(item.forward_s, item.backward_s) for item in measured_costs.items]


def test_work_and_speed_are_told_apart() -> None:
    measured_costs = followed(Layered())
    assert works(measured_costs) == [pytest.approx((item.forward_s, item.backward_s)) for item in ITEMS]
    assert [item.num_parameters for item in measured_costs.items] == [item.num_parameters for item in ITEMS]
    assert [item.saved_bytes for item in measured_costs.items] == [item.saved_bytes for item in ITEMS]
    assert [item.output_bytes for item in measured_costs.items] == [item.output_bytes for item in ITEMS]
    assert measured_costs.guessed == ()


def test_the_steps_are_as_they_were_measured() -> None:
    pipe = Layered()
    costs = followed(pipe, pipe.reports(1), pipe.reports(2)).costs(2)
    assert costs.forward_s == pytest.approx(pipe.run().forward_s)
    assert costs.backward_s == pytest.approx(pipe.run().backward_s)


def test_another_partition_is_predicted_as_it_would_be() -> None:
    pipe = Layered()
    measured_costs = followed(pipe)
    other = replace(pipe, parts=(0, 3, 6, 8))
    costs = measured_costs.layout((), None).costs(measured_costs.costs(2), other.parts)
    assert costs.forward_s == pytest.approx(other.run().forward_s)
    assert costs.backward_s == pytest.approx(other.run().backward_s)


UNEVEN_S = 0.003
"""Of a sample, on a device of speed 1."""


def with_busy_experts(pipe: Layered, item: int, times: float = 1.0) -> tuple[Layered, dict[int, Uneven]]:
    """The same pipeline, a layer of which takes longer; and by how much, on its device."""
    extra, like = times * UNEVEN_S * 2, pipe.items[item]
    longer = replace(like, forward_s=like.forward_s + extra / 3, backward_s=like.backward_s + extra * 2 / 3)
    items = (*pipe.items[:item], longer, *pipe.items[item + 1 :])
    stage = next(number for number, stop in enumerate(pipe.parts[1:]) if item < stop)
    seconds = times * UNEVEN_S / pipe.speeds[stage]
    return replace(pipe, items=items), {item: Uneven(seconds, seconds)}


def reports_of(pipe: Layered, uneven_s: dict[int, Uneven], look: int = 0, *, timed: bool = False) -> list[Report]:
    found = pipe.reports(look, timed=timed)
    for report, (a, b) in zip(found, pairwise(pipe.parts), strict=True):
        report.uneven_s = {item: s for item, s in uneven_s.items() if a <= item < b}
    return found


def timed_for_one(pipe: Layered, uneven_s: dict[int, Uneven]) -> list[Report]:
    """Layers are timed with micro-batches of the size that the steps have."""
    found = reports_of(pipe, uneven_s, timed=True)
    for report in found:
        report.layers = {item: layer._replace(size=2) for item, layer in report.layers.items()}
    return found


def test_a_layer_whose_experts_are_unevenly_busy_is_long_and_its_device_not_slow() -> None:
    busy, uneven_s = with_busy_experts(Layered(), 3)
    measured_costs = MeasuredCosts(ROUTES, parts=busy.parts)
    measured_costs.update(timed_for_one(busy, uneven_s))
    assert works(measured_costs) == [pytest.approx((item.forward_s, item.backward_s)) for item in busy.items]
    for parts in ((0, 3, 6, 8), (0, 4, 6, 8)):  # the layer stays, and moves
        costs = measured_costs.layout((), None).costs(measured_costs.costs(2), parts)
        there = replace(busy, parts=parts).run()
        assert (costs.forward_s, costs.backward_s) == (
            pytest.approx(there.forward_s),
            pytest.approx(there.backward_s),
        ), parts


def test_a_last_stage_of_functions_is_not_timed_by_layer() -> None:
    """A PipelineModule may have one: nothing tells how fast its device is."""
    measured_costs = MeasuredCosts(ROUTES, parts=PARTS)
    reports = Layered().reports(0, timed=True)
    reports[-1].layers = {}
    measured_costs.update(reports)
    expected = [(item.forward_s, item.backward_s) for item in ITEMS[: PARTS[-2]]]
    assert works(measured_costs)[: PARTS[-2]] == [pytest.approx(each) for each in expected]
    assert works(measured_costs)[PARTS[-2] :] == [(0.0, 0.0)] * (PARTS[-1] - PARTS[-2])


def test_it_is_as_long_as_its_experts_are_uneven_now() -> None:
    """Experts were placed anew, and the layer was not timed again: no device has become faster."""
    busy, uneven_s = with_busy_experts(Layered(), 3)
    measured_costs = MeasuredCosts(ROUTES, parts=busy.parts)
    measured_costs.update(timed_for_one(busy, uneven_s))
    for look in (1, 2):
        later, uneven_s = with_busy_experts(Layered(), 3, 0.25)
        measured_costs.update(reports_of(later, uneven_s, look))
    assert works(measured_costs) == [pytest.approx((item.forward_s, item.backward_s)) for item in later.items]
    costs = measured_costs.layout((), None).costs(measured_costs.costs(2), (0, 3, 6, 8))
    assert costs.forward_s == pytest.approx(replace(later, parts=(0, 3, 6, 8)).run().forward_s)


def test_what_a_placement_saves_counts_in_the_planning_at_which_it_is_made() -> None:
    """Experts have just been placed anew: the steps were measured before, the next ones are predicted."""
    busy, uneven_s = with_busy_experts(Layered(), 3)
    later = with_busy_experts(Layered(), 3, 0.25)[0]
    placed = {item: Uneven(seconds.measured, 0.25 * seconds.expected) for item, seconds in uneven_s.items()}
    measured_costs = MeasuredCosts(ROUTES, parts=busy.parts)
    measured_costs.update(timed_for_one(busy, placed))
    assert works(measured_costs) == [pytest.approx((item.forward_s, item.backward_s)) for item in later.items]
    for parts in (PARTS, (0, 3, 6, 8)):
        costs = measured_costs.layout((), None).costs(measured_costs.costs(2), parts)
        whole = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
        there = replace(later, parts=parts).run()
        expected = [f + b for f, b in zip(there.forward_s, there.backward_s, strict=True)]
        assert whole == pytest.approx(expected, rel=1e-3), parts


def test_what_probably_is_alike_tells_if_nothing_certainly_is() -> None:
    """Layers that are told their number, say: of other kinds, as far as one can be sure."""
    items = tuple(replace(item, certain=f"{item.certain} {n}", probable=item.certain) for n, item in enumerate(ITEMS))
    measured_costs = followed(Layered(items))
    assert works(measured_costs) == [pytest.approx((item.forward_s, item.backward_s)) for item in ITEMS]
    assert measured_costs.guessed == ()


def test_probably_alike_layers_keep_their_own_times() -> None:
    items = [replace(LAYER, certain=f"layer {n}", probable="layer") for n in range(8)]
    items[4] = replace(items[4], forward_s=0.03)  # not alike after all
    items[1] = replace(items[1], forward_s=0.03)
    items[7] = replace(items[7], forward_s=0.03)
    measured_costs = followed(Layered(tuple(items), parts=(0, 3, 6, 8), speeds=(1.0, 1.0, 1.0)))
    forward_s = [item.forward_s for item in measured_costs.items]
    assert min(forward_s[n] for n in (1, 4, 7)) > 2.5 * max(forward_s[n] for n in (0, 2, 3, 5, 6))


def test_a_layer_that_was_timed_on_two_stages_tells_what_was_guessed() -> None:
    """Parameters mislead here: the last stage's layers have many and take no longer."""
    items = [replace(LAYER, certain=f"{n // 3}") for n in range(9)]
    items[6:] = [replace(item, num_parameters=9000) for item in items[6:]]
    before = Layered(tuple(items), parts=(0, 3, 6, 9))
    measured_costs = followed(before)
    assert measured_costs.guessed == (1, 2)
    assert works(measured_costs)[8] != pytest.approx((LAYER.forward_s, LAYER.backward_s), rel=0.1)
    after = replace(before, parts=(0, 4, 7, 9))  # one layer of each later stage has moved up
    measured_costs.has_moved(after.parts)
    measured_costs.update(after.reports(1, timed=True))
    assert measured_costs.guessed == ()
    assert works(measured_costs) == [pytest.approx((LAYER.forward_s, LAYER.backward_s))] * 9


def test_times_of_other_micro_batches_are_not_mixed() -> None:
    pipe = Layered()
    measured_costs = followed(pipe)
    larger = replace(pipe, size=4).reports(1, timed=True)
    for report in larger:
        report.layers = {
            item: layer._replace(size=4, times=layer.times._replace(forward_s=2 * layer.times.forward_s))
            for item, layer in report.layers.items()
        }
    measured_costs.update(larger)
    assert [forward for forward, _ in works(measured_costs)] == pytest.approx([2 * item.forward_s for item in ITEMS])


def test_where_nothing_is_alike_sizes_tell_and_the_stage_is_named() -> None:
    items = [replace(item, certain=f"{n}") for n, item in enumerate((LAYER,) * 6)]
    items[4] = items[5] = replace(LAYER, certain="other", num_parameters=2000, forward_s=0.02, backward_s=0.04)
    items[2] = items[0]
    measured_costs = followed(Layered(tuple(items), parts=(0, 2, 4, 6)))
    assert measured_costs.guessed == (2,)
    assert works(measured_costs)[0] == pytest.approx((0.01, 0.02))
    assert works(measured_costs)[4] == pytest.approx((0.02, 0.04))


def test_replicas_of_unlike_devices_tell_of_probably_alike_layers_together() -> None:
    items = tuple(replace(LAYER, certain=str(n), probable="layer") for n in range(6))
    slow, fast = (Layered(items, parts=(0, 2, 4, 6), speeds=(1.0, speed, 1.0)) for speed in (0.5, 1.0))
    found = []
    for first, second in ((slow, fast), (fast, slow)):
        measured_costs = MeasuredCosts(ROUTES, parts=(0, 2, 4, 6))
        measured_costs.update([*first.reports(timed=True), *second.reports(replica=1, timed=True)])
        found.append(works(measured_costs))
        assert measured_costs.costs(2).forward_s == pytest.approx((0.02, 0.04, 0.02))  # the slowest counts
    assert found[0] == [pytest.approx(work) for work in found[1]]
    assert [forward for forward, _ in found[0]] == pytest.approx([0.01] * 6, rel=0.1)


def test_without_a_partition_to_look_for_nothing_is_learnt_of_layers() -> None:
    measured_costs = MeasuredCosts(ROUTES)
    measured_costs.update(Layered().reports(timed=True))
    assert measured_costs.items == ()
    assert measured_costs.costs(2).forward_s == pytest.approx(Layered().run().forward_s)


def test_a_device_that_slows_down_is_seen_at_the_next_look() -> None:
    pipe = Layered()
    slower = replace(pipe, speeds=(1.0, 1.0, 0.5))
    measured_costs = followed(pipe, *(pipe.reports(look) for look in (1, 2, 3)), slower.reports(4))
    assert measured_costs.costs(2).forward_s == pytest.approx(slower.run().forward_s)
    assert measured_costs.costs(2).backward_s == pytest.approx(slower.run().backward_s)
    measured_costs.update(pipe.reports(5))
    assert measured_costs.costs(2).forward_s == pytest.approx(pipe.run().forward_s)


def unsteady(pipe: Layered, look: int, factors: Sequence[Sequence[float]]) -> list[Report]:
    """A look at steps of which each has its own factors."""
    one = replace(pipe, steps=1)
    first, *others = [one.reports(len(factors) * look + n, factors=each) for n, each in enumerate(factors)]
    for report, *more in zip(first, *others, strict=True):
        report.steps.extend(step for other in more for step in other.steps)
    return first


def test_one_long_step_is_no_slow_device() -> None:
    pipe = Layered()
    costs = followed(pipe, unsteady(pipe, 1, [(1, 5, 1), (1, 1, 1), (1, 1, 1)])).costs(2)
    assert costs.forward_s == pytest.approx(pipe.run().forward_s)


def noise(chance: random.Random) -> list[list[float]]:
    return [[chance.uniform(0.9, 1.1) for _ in range(STAGES)] for _ in range(3)]


def test_noise_is_smoothed() -> None:
    chance = random.Random(3)
    pipe = Layered()
    measured_costs = followed(pipe)
    off, steady = [], []
    for look in range(1, 51):
        reports = unsteady(pipe, look, noise(chance))
        measured_costs.update(reports)
        for seen, errors in ((known(reports), off), (measured_costs, steady)):
            pairs = zip(seen.costs(2).forward_s, pipe.run().forward_s, strict=True)
            errors += [abs(now / true - 1) for now, true in pairs]
    assert max(steady) < 0.06
    assert sum(steady) < 0.6 * sum(off)


def test_noise_does_not_add_up_in_sizes_that_are_not_measured() -> None:
    chance = random.Random(4)
    pipe, large = Layered(), Layered(size=4)
    measured_costs = followed(pipe, large.reports(1))
    for look in range(2, 102):
        measured_costs.update(unsteady(pipe, look, noise(chance)))
        for seconds, true in zip(measured_costs.costs(4).forward_s, large.run().forward_s, strict=True):
            assert seconds == pytest.approx(true, rel=0.08)


def test_layers_that_have_moved_are_predicted_until_the_next_look() -> None:
    pipe = Layered()
    after = replace(pipe, parts=(0, 4, 6, 8))
    measured_costs = followed(pipe)
    predicted = measured_costs.layout((), None).costs(measured_costs.costs(2), after.parts)
    measured_costs.has_moved(after.parts)
    assert measured_costs.parts == after.parts
    assert measured_costs.costs(2) == predicted
    assert predicted.forward_s == pytest.approx(after.run().forward_s)
    assert predicted.activation_bytes == pytest.approx((200.0 * 4 / 2, 200.0 * 2 / 3, 200.0 * 2 / 3))
    heavier = replace(after, speeds=(1.0, 1.5, 0.5))  # layers take longer there than was thought
    measured_costs.update(heavier.reports(1))
    assert measured_costs.costs(2).forward_s == pytest.approx(heavier.run().forward_s)
    measured_costs.has_moved(pipe.parts)  # and that is what counts from then on
    assert measured_costs.costs(2).forward_s == pytest.approx(replace(heavier, parts=pipe.parts).run().forward_s)


def test_layers_move_at_every_size() -> None:
    pipe, large = Layered(), Layered(size=4)
    measured_costs = followed(pipe, large.reports(1))
    parts = (0, 4, 6, 8)
    measured_costs.has_moved(parts)
    assert measured_costs.costs(4).forward_s == pytest.approx(replace(large, parts=parts).run().forward_s)
    assert measured_costs.costs(2).forward_s == pytest.approx(replace(pipe, parts=parts).run().forward_s)


def test_layers_that_move_before_anything_is_known() -> None:
    measured_costs = MeasuredCosts(ROUTES, parts=PARTS)
    measured_costs.has_moved((0, 4, 6, 8))
    moved = replace(Layered(), parts=(0, 4, 6, 8))
    measured_costs.update(moved.reports(timed=True))
    assert works(measured_costs) == [pytest.approx((item.forward_s, item.backward_s)) for item in ITEMS]


def test_the_slowest_replica_is_followed() -> None:
    fast, slow = Layered(), Layered(speeds=(1.0, 1.0, 0.25))
    measured_costs = MeasuredCosts(ROUTES, parts=PARTS)
    for look in range(3):
        reports = [*fast.reports(look, timed=look == 0), *slow.reports(look, replica=1, timed=look == 0)]
        measured_costs.update(reports)
    assert measured_costs.costs(2).forward_s == pytest.approx(slow.run().forward_s)
    measured_costs.update([*fast.reports(3), *replace(slow, speeds=(0.5, 1.0, 0.25)).reports(3, replica=1)])
    assert measured_costs.costs(2).forward_s[0] == pytest.approx(2 * fast.run().forward_s[0])


def test_what_a_device_may_hold() -> None:
    reports = Layered().reports(timed=True)
    for report, room, state, moved in zip(
        reports, (10.0, 20.0, 30.0), (16.0, 16.0, 8.0), (12.0, 4.0, 6.0), strict=True
    ):
        report.room_bytes, report.state_bytes, report.moved_bytes = room, state, moved
    measured_costs = MeasuredCosts(ROUTES, parts=PARTS)
    measured_costs.update(reports)
    free = measured_costs.layout((1, 3), None)
    assert free.limit_bytes == (10.0 + 16 * 2000, 20.0 + 16 * 3000, 30.0 + 8 * 7000)
    assert (free.parts, free.cuts, free.items) == (PARTS, (1, 3), measured_costs.items)
    assert (free.state_bytes, free.moved_bytes) == ((16.0, 16.0, 8.0), 12.0)
    assert measured_costs.layout((), 77).limit_bytes == (77.0, 77.0, 77.0)


def test_of_replicas_the_one_with_the_most_to_hold_counts() -> None:
    first, second = Layered().reports(timed=True), Layered().reports(replica=1, timed=True)
    for report, room, state in zip((*first, *second), (9.0, 2.0, 9.0, 1.0, 9.0, 3.0), (4, 4, 4, 6, 2, 5), strict=True):
        report.room_bytes, report.state_bytes = room, float(state)
    measured_costs = MeasuredCosts(ROUTES, parts=PARTS)
    measured_costs.update([*second, *first])
    assert measured_costs.room_bytes == [1.0, 2.0, 3.0]
    assert measured_costs.state_bytes == [6.0, 4.0, 5.0]
