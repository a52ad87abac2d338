"""From what ranks saw of their steps to costs: hand-made reports of a pipeline whose times are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.measure.recorder import StepTimes
from paceline.runtime.knowledge import Knowledge
from paceline.runtime.observer import WAIT, Report, messages
from paceline.runtime.transport import Record
from paceline.schedules.families import one_f_one_b
from paceline.schedules.simulate import simulate

STAGES, MICRO_BATCHES = 3, 4


@dataclass(frozen=True)
class Run:
    """A pipeline as it really is; all times on one true clock."""

    forward_s: tuple[float, ...] = (0.01, 0.03, 0.02)
    backward_s: tuple[float, ...] = (0.02, 0.05, 0.04)
    transfer_s: float = 0.004
    num_bytes: int = 4000
    latency_s: float = 0.001
    size: int = 2
    hosts: tuple[str, ...] = ("a", "a", "a")
    offsets_s: tuple[float, ...] = (0.0, 0.0, 0.0)
    """What each stage's clock shows beyond the true time."""
    beside_s: float = 0.1
    """Before the first and after the last computation of a step, together."""
    begun_s: float = 1000.0
    steps: int = 2

    def reports(self, replica: int = 0, first_number: int = 1) -> list[Report]:
        """Every stage waits until its turn, all forwards and then all backwards; the messages as they come of it."""
        found = [self._report(stage, replica) for stage in range(STAGES)]
        length_s = 0.0
        for step in range(self.steps):
            begun = self.begun_s + step * length_s
            done = [begun + self.beside_s / 2] * STAGES
            spans: list[list[tuple[str, int, float, float]]] = [[] for _ in range(STAGES)]
            for kind, order in (("F", range(STAGES)), ("B", range(STAGES - 1, -1, -1))):
                for micro_batch in range(MICRO_BATCHES):
                    ready = done[order[0]]
                    for stage in order:
                        if ready > done[stage]:
                            spans[stage].append((WAIT, micro_batch, done[stage], ready))
                        start = max(done[stage], ready)
                        end = start + (self.forward_s if kind == "F" else self.backward_s)[stage]
                        spans[stage].append((kind, micro_batch, start, end))
                        done[stage] = end
                        target = stage + (1 if kind == "F" else -1)
                        if 0 <= target < STAGES:
                            lane = "activations" if kind == "F" else "gradients"
                            number = first_number + step * MICRO_BATCHES + micro_batch
                            ready = end + self.transfer_s + self.latency_s
                            self._message(found, lane, stage, target, number, micro_batch, end, ready)
            ended = max(done) + self.beside_s / 2
            length_s = ended - begun
            for stage, report in enumerate(found):
                offset = self.offsets_s[stage]
                own = [(kind, m, start + offset, end + offset) for kind, m, start, end in spans[stage]]
                report.steps.append(StepTimes(begun + offset, ended + offset, own, key=("1f1b", self.size)))
        return found

    def _report(self, stage: int, replica: int) -> Report:
        lanes = [f"{kind}_{end}" for kind in ("activations", "gradients") for end in ("in", "out")]
        is_last = stage == STAGES - 1
        return Report(
            stage=stage,
            replica=replica,
            host=self.hosts[stage],
            steps=[],
            records={lane: [] for lane in lanes},
            saved_bytes={self.size: 100.0 * self.size},
            room_bytes=1e9 + stage,
            clock_s=0.0 if is_last else self.offsets_s[stage + 1] - self.offsets_s[stage],
            latency_s=0.0 if is_last else self.latency_s,
        )

    def _message(
        self, found: list[Report], lane: str, source: int, target: int, number: int, m: int, begun: float, done: float
    ) -> None:
        sent = Record(number, m, self.num_bytes, begun + self.offsets_s[source], done + self.offsets_s[source])
        posted = Record(number, m, self.num_bytes, self.begun_s + self.offsets_s[target], done + self.offsets_s[target])
        found[source].records[f"{lane}_out"].append(sent)
        found[target].records[f"{lane}_in"].append(posted)


def known(*looks: Sequence[Report]) -> Knowledge:
    knowledge = Knowledge(STAGES)
    for reports in looks:
        knowledge.update(reports)
    return knowledge


def test_costs_are_those_of_the_run() -> None:
    run = Run()
    knowledge = known(run.reports())
    costs = knowledge.costs(2)
    assert knowledge.sizes() == [2]
    assert costs.forward_s == pytest.approx(run.forward_s)
    assert costs.backward_s == pytest.approx(run.backward_s)
    assert costs.message_bytes == (4000.0,) * 2
    assert costs.activation_bytes == (200.0,) * 3
    assert knowledge.room_bytes == [1e9, 1e9 + 1, 1e9 + 2]
    for link in (*costs.down, *costs.up):
        assert link.bytes_per_s == pytest.approx(1e6)
        assert link.latency_s == 0.001
    assert costs.egress_bytes_per_s == (inf,)
    assert costs.step_s == pytest.approx(0.1)
    assert knowledge.measured_s == pytest.approx(run.reports()[0].steps[0].ended_s - run.begun_s)


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
    reports[4] = replace(reports[4], room_bytes=7.0, saved_bytes={2: 900.0})
    knowledge = known(reports)
    costs = knowledge.costs(2)
    assert costs.forward_s == pytest.approx((0.04, 0.03, 0.02))
    assert costs.down[0].bytes_per_s == pytest.approx(4000 / 0.008)
    assert costs.down[0].latency_s == 0.002
    assert costs.activation_bytes == (200.0, 900.0, 200.0)
    assert knowledge.room_bytes == [1e9, 7.0, 1e9 + 2]


def test_the_host_takes_time_beside_each_computation() -> None:
    (report, *others) = Run().reports()
    for step in report.steps:  # a millisecond of Python after each
        moved = [(kind, m, start + 1e-3 * i, end + 1e-3 * i) for i, (kind, m, start, end) in enumerate(step.spans)]
        step.spans[:] = moved
    gaps, computations = len(report.steps[0].spans) - 1, 2 * MICRO_BATCHES
    costs = known([report, *others]).costs(2)
    assert costs.forward_s[0] == pytest.approx(0.01 + 1e-3 * gaps / computations)
    assert costs.forward_s[1:] == pytest.approx((0.03, 0.02))


def test_reducing_and_stepping_are_beside_the_schedule() -> None:
    reports = Run().reports()
    for report in reports:
        for step in report.steps:
            step.spans.append(("reduce", -1, step.ended_s - 0.04, step.ended_s - 0.02))
            step.spans.append(("step", -1, step.ended_s - 0.02, step.ended_s))
    costs = known(reports).costs(2)
    assert costs.forward_s == pytest.approx(Run().forward_s)
    assert costs.step_s == pytest.approx(0.1)


def test_a_size_that_is_measured_later_is_known_besides() -> None:
    first, later = Run(), Run(forward_s=(0.02, 0.06, 0.04), size=4, num_bytes=8000)
    knowledge = known(first.reports(), later.reports(first_number=9))
    assert knowledge.sizes() == [2, 4]
    assert knowledge.costs(2).forward_s == pytest.approx(first.forward_s)
    assert knowledge.costs(4).forward_s == pytest.approx(later.forward_s)
    assert knowledge.costs(2).message_bytes == (4000.0,) * 2
    assert knowledge.costs(4).message_bytes == (8000.0,) * 2
    assert knowledge.costs(4).activation_bytes == (400.0,) * 3


def test_a_device_that_becomes_slower_is_slower_at_every_size() -> None:
    two, four = Run(), Run(forward_s=(0.02, 0.06, 0.04), backward_s=(0.04, 0.1, 0.08), size=4)
    slower = Run(forward_s=(0.01, 0.06, 0.02), backward_s=(0.02, 0.1, 0.04))  # stage 1, at size 2
    knowledge = known(two.reports(), four.reports(first_number=9), slower.reports(first_number=17))
    assert knowledge.costs(2).forward_s == pytest.approx((0.01, 0.06, 0.02))
    assert knowledge.costs(4).forward_s == pytest.approx((0.02, 0.12, 0.04))
    assert knowledge.costs(4).backward_s == pytest.approx((0.04, 0.2, 0.08))


def test_two_sizes_in_one_look_scale_a_third_once() -> None:
    runs = {size: Run(size=size) for size in (1, 2, 4)}
    knowledge = known(*(run.reports(first_number=1 + 8 * i) for i, run in enumerate(runs.values())))
    slower = replace(runs[1], forward_s=(0.02, 0.06, 0.04)).reports(first_number=25)
    for report, more in zip(slower, replace(runs[2], forward_s=(0.02, 0.06, 0.04)).reports(), strict=True):
        report.steps.extend(more.steps)
    knowledge.update(slower)
    assert knowledge.costs(4).forward_s == pytest.approx((0.02, 0.06, 0.04))


def test_a_rank_without_times_keeps_what_was_known_of_it() -> None:
    two, four = Run(), Run(size=4)
    knowledge = known(two.reports(), four.reports(first_number=9))
    reports = two.reports(first_number=17)
    reports[1] = replace(reports[1], steps=[])
    knowledge.update(reports)
    for size in (2, 4):
        assert knowledge.costs(size).forward_s == pytest.approx(two.forward_s)


def test_a_look_without_steps_or_messages_changes_nothing() -> None:
    knowledge = known(Run().reports())
    before = knowledge.costs(2)
    nothing = [replace(report, steps=[], records={}) for report in Run().reports()]
    knowledge.update(nothing)
    assert knowledge.costs(2) == before


def test_the_messages_of_an_evaluation_tell_the_links_and_not_the_sizes() -> None:
    reports = Run().reports()
    for source, target in ((0, 1), (1, 2)):
        after = reports[source].records["activations_out"][-1].number + 1
        for index in range(3 * MICRO_BATCHES):
            begun = 2000.0 + index
            large = Record(after + index, index, 64_000, begun, begun + 0.033)
            reports[source].records["activations_out"].append(large)
            reports[target].records["activations_in"].append(large)
    costs = known(reports).costs(2)
    assert costs.message_bytes == (4000.0,) * 2
    assert [link.bytes_per_s for link in costs.down] == pytest.approx([(8 * 4 + 12 * 64) / (8 * 4 + 12 * 32) * 1e6] * 2)


def test_a_message_is_seen_once() -> None:
    after: dict[tuple[int, int, str], int] = {}
    reports = Run().reports()
    assert len(messages(reports, after)) == 2 * MICRO_BATCHES * 2 * (STAGES - 1)
    assert messages(reports, after) == []
    assert len(messages(Run(steps=3).reports(), after)) == MICRO_BATCHES * 2 * (STAGES - 1)


def test_messages_are_on_the_first_stages_clock_and_begin_when_both_ends_are_ready() -> None:
    run = Run(offsets_s=(5.0, -70.0, 12.5))
    reports = run.reports()
    late = reports[1].records["activations_in"][0]
    ready = late.done_s - 0.003  # its receive was posted three milliseconds before it had come
    reports[1].records["activations_in"][0] = late._replace(begun_s=ready)
    first, second, *_ = [seen for seen in messages(reports) if (seen.kind, seen.source) == ("activation", 0)]
    assert first.record.begun_s == pytest.approx(ready + 70.0 + 5.0)
    assert first.record.done_s - first.record.begun_s == pytest.approx(0.003)
    assert second.record.done_s - second.record.begun_s == pytest.approx(0.005)
    assert {(s.kind, s.source, s.target) for s in messages(reports)} == {
        *(("activation", stage, stage + 1) for stage in range(STAGES - 1)),
        *(("gradient", stage + 1, stage) for stage in range(STAGES - 1)),
    }


def test_numbers_that_are_missing_at_one_end_are_left_out() -> None:
    reports = Run().reports()
    sent = reports[0].records["activations_out"]
    del sent[0], sent[-1]  # forgotten, and not noted yet
    del reports[1].records["activations_in"][3]
    after: dict[tuple[int, int, str], int] = {}
    seen = [s.record.number for s in messages(reports, after) if (s.kind, s.source) == ("activation", 0)]
    assert seen == [2, 3, 5, 6, 7]
    # What the sender notes a moment later is seen at the next look.
    late = [s.record.number for s in messages(Run().reports(), after) if (s.kind, s.source) == ("activation", 0)]
    assert late == [8]


def test_what_was_measured_predicts_a_step() -> None:
    costs = known(Run().reports()).costs(2)
    simulation = simulate(one_f_one_b(STAGES, MICRO_BATCHES), costs)
    assert 4 * 0.08 < simulation.makespan_s < 1.0


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
    knowledge = Knowledge(STAGES)
    knowledge.update(Run(forward_s=forward_s, hosts=hosts).reports())
    for look, offsets in enumerate(offsets_s):
        reports = Run(forward_s=forward_s, hosts=hosts, offsets_s=offsets).reports(first_number=9 + 8 * look)
        for report, error in zip(reports, errors_s, strict=True):
            report.clock_s += error
        for stage, name in missing:
            reports[stage] = replace(reports[stage], **{name: [] if name == "steps" else {}})
        knowledge.update(reports)
        costs = knowledge.costs(2)  # Costs refuses negative numbers and those that are none
        assert isfinite(knowledge.measured_s)
        assert isfinite(simulate(one_f_one_b(STAGES, MICRO_BATCHES), costs).makespan_s)
