"""What the tuner chooses from what was measured: the truth that the measurements were simulated with tells the best."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config.schedules import ScheduleChoice
from paceline.planning.candidates import FAMILIES, IN_V, SPLIT_IN_LINE, Candidate
from paceline.planning.choose import NO_FORMATS
from paceline.planning.format_costs import AS_IT_IS, FormatCosts, with_format
from paceline.runtime.measured_costs import MeasuredCosts
from paceline.runtime.pipeline_measurements import PipelineMeasurements
from paceline.runtime.planning_process import PlanningProcess
from paceline.runtime.schedule_actuator import ASIDE_FROM, ScheduleActuator, trials
from paceline.schedules.costs import Costs, Link
from paceline.schedules.families import DUALPIPEV
from paceline.schedules.schedule import Schedule
from paceline.schedules.simulate import peak_bytes, simulate
from support.reports import simulated

DEVICES, MICRO_BATCHES, SIZE, SAVED, DEFERRED, ROOMY = 4, 8, 2, 100.0, 60.0, 1e9


class Pipeline:
    """A pipeline that takes the seconds of its truth."""

    num_stages, micro_batch_size, micro_batches, cut, global_steps = DEVICES, SIZE, MICRO_BATCHES, SIZE, 4
    replica_micro_batches: tuple[int, ...] = (MICRO_BATCHES,)

    def __init__(self, truth: Costs, choice: ScheduleChoice, room_bytes: float = ROOMY, formats: Any = None) -> None:
        self.exact = self.truth = truth
        self.room_bytes, self.decides = room_bytes, True
        self.order: Any = choice.first(DEVICES, MICRO_BATCHES)
        self.costs = MeasuredCosts(choice.routes(DEVICES))
        part: Any = self
        self.actuator = ScheduleActuator(part, self.costs, part, choice, formats or NO_FORMATS, PlanningProcess())
        self.formats = formats or NO_FORMATS
        for trial in trials(choice, DEVICES, SIZE, MICRO_BATCHES):
            self.actuator.apply(trial)
            self.measure()

    def run_candidate(self, candidate: Candidate) -> None:
        self.order = candidate.schedule(DEVICES, SIZE * MICRO_BATCHES)
        self.truth = with_format(self.exact, self.formats[""], self.formats[candidate.boundary])

    def measure(self) -> None:
        def of_chunks(device: int, num_bytes: float) -> dict[int, dict[int, float]]:
            return {SIZE: dict.fromkeys(range(len(self.order.stages[device])), num_bytes)}

        reports = [
            replace(
                report,
                room_bytes=self.room_bytes,
                saved_bytes=of_chunks(report.device, SAVED),
                deferred_bytes=of_chunks(report.device, DEFERRED) if self.order.is_split else {},
            )
            for report in simulated(self.order, self.truth)
        ]
        self.costs.update(reports)

    def choose(self) -> Candidate:
        """Plan once, and run what is chosen."""
        proposal = self.actuator.propose(10)
        assert proposal is not None
        if proposal.change is not None:
            self.actuator.apply(proposal.change)
            self.measure()
        return self.actuator.current

    def seconds(self, order: Any) -> float:
        return simulate(order, self.truth).makespan_s

    def peak(self, order: Any) -> float:
        kept = replace(
            self.truth,
            activation_bytes=(SAVED,) * len(self.truth.forward_s),
            deferred_bytes=(DEFERRED,) * len(self.truth.forward_s),
        )
        return max(peak_bytes(order, kept))


def in_line(weight: float = 1 / 3, last: float = 1.0) -> Costs:
    """Stages of 10 ms forwards; the last may take longer."""
    forward_s = (*(0.01,) * (DEVICES - 1), 0.01 * last)
    backward_s = tuple(2 * seconds for seconds in forward_s)
    return Costs(forward_s, backward_s, weight_s=tuple(weight * seconds for seconds in backward_s))


def in_v(weight: float = 0.5) -> Costs:
    halves = 2 * DEVICES
    return Costs((0.005,) * halves, (0.01,) * halves, weight_s=(weight * 0.01,) * halves)


def families(names: tuple[str, ...]) -> list[Schedule]:
    return [FAMILIES[name](DEVICES, MICRO_BATCHES) for name in names]


ADAPTIVE = ScheduleChoice("adaptive", retune_every=10)
CHOICES = {
    "adaptive": (ADAPTIVE, in_line(), SPLIT_IN_LINE),
    "adaptive, half of a backward": (ADAPTIVE, in_line(0.5), SPLIT_IN_LINE),
    "adaptive, long last stage": (ADAPTIVE, in_line(last=1.6), SPLIT_IN_LINE),
    "adaptive in V": (replace(ADAPTIVE, chunks=2), in_v(), IN_V),
    "adaptive in V, short": (replace(ADAPTIVE, chunks=2), in_v(0.3), IN_V),
    "generated": (ScheduleChoice("generated", retune_every=10), in_line(last=1.6), SPLIT_IN_LINE),
    "generated in V": (ScheduleChoice("generated", retune_every=10, chunks=2), in_v(0.3), IN_V),
}


@pytest.mark.parametrize("name", CHOICES)
def test_nothing_is_faster_than_what_is_chosen(name: str) -> None:
    choice, truth, names = CHOICES[name]
    pipeline = Pipeline(truth, choice)
    before_s = pipeline.seconds(pipeline.order)
    pipeline.choose()
    found_s = pipeline.seconds(pipeline.order)
    assert found_s <= before_s
    assert found_s <= 1.011 * min(map(pipeline.seconds, families(names)))


def test_with_little_of_a_backward_to_leave_stages_wait_less_in_an_order_of_their_own() -> None:
    pipeline = Pipeline(in_v(0.3), replace(ADAPTIVE, chunks=2))
    assert pipeline.choose().family == "generated 1"
    assert pipeline.seconds(pipeline.order) < 0.99 * min(map(pipeline.seconds, families(IN_V)))


@pytest.mark.parametrize("name", CHOICES)
def test_another_process_chooses_the_same(name: str) -> None:
    choice, truth, _ = CHOICES[name]
    here, aside = Pipeline(truth, choice), Pipeline(truth, choice)
    for seconds in (1.0, 2.0, 0.5, 1.5):
        for pipeline in (here, aside):
            pipeline.exact = pipeline.truth = replace(truth, forward_s=tuple(seconds * s for s in truth.forward_s))
            pipeline.measure()
        assert aside.actuator.begin(10) == (seconds != 1.0), "the first one is made at once"
        proposals = [pipeline.actuator.propose(10) for pipeline in (here, aside)]
        assert proposals[0] is not None
        assert proposals[1] is not None
        assert proposals[0].change == proposals[1].change
        assert proposals[0].record(None).figures == proposals[1].record(None).figures
        assert here.actuator.candidates == aside.actuator.candidates
        for pipeline, proposal in zip((here, aside), proposals, strict=True):
            if proposal is not None and proposal.change is not None:
                pipeline.actuator.apply(proposal.change)
                pipeline.measure()


def test_a_small_pipeline_chooses_at_once() -> None:
    pipeline = Pipeline(in_line(), ADAPTIVE)
    pipeline.actuator.begin(10)
    pipeline.replica_micro_batches = (ASIDE_FROM // DEVICES - 1,)
    assert not pipeline.actuator.begin(10)
    pipeline.replica_micro_batches = (1, ASIDE_FROM // DEVICES)
    pipeline.decides = False
    assert pipeline.actuator.begin(10), "the same on all ranks"


def test_an_order_of_its_own_stays_while_nothing_changes() -> None:
    pipeline = Pipeline(in_v(0.3), replace(ADAPTIVE, chunks=2))
    chosen = [pipeline.choose() for _ in range(4)]
    assert len(set(chosen)) == 1


def test_replicas_with_other_shares_can_run_what_is_chosen() -> None:
    """An order that was made for one number of micro-batches gives way when the shares change, and none is made."""
    pipeline = Pipeline(in_v(0.3), replace(ADAPTIVE, chunks=2))
    assert pipeline.choose().made is not None
    pipeline.replica_micro_batches = (MICRO_BATCHES, 3)
    pipeline.actuator.run_again()
    assert pipeline.actuator.current.made is None
    pipeline.measure()
    chosen = pipeline.choose()
    assert chosen.made is None
    chosen.schedule(DEVICES, SIZE * 3)


def test_a_family_that_a_replica_has_too_few_micro_batches_for_gives_way() -> None:
    pipeline = Pipeline(in_v(), replace(ADAPTIVE, chunks=2))
    pipeline.actuator.apply(Candidate(SIZE, family=DUALPIPEV))
    for shares, family in (((DEVICES * 2 + 1, DEVICES * 2), DUALPIPEV), ((DEVICES * 4, DEVICES * 2 - 1), "zbv")):
        pipeline.replica_micro_batches = shares
        pipeline.actuator.run_again()
        assert pipeline.actuator.current == pipeline.actuator.next == Candidate(SIZE, family=family)
        assert pipeline.order.name.startswith(family)


@pytest.mark.parametrize("kind", ["interleaved", "kfkb"])
def test_a_schedule_that_is_not_tuned_follows_the_shares_by_itself(kind: Any) -> None:
    choice = ScheduleChoice(kind, k=2, chunks=3 if kind == "interleaved" else None)
    pipeline: Any = SimpleNamespace(micro_batch_size=SIZE)  # nothing is run
    ScheduleActuator(pipeline, MeasuredCosts(choice.routes(DEVICES)), pipeline, choice).run_again()


def test_what_fits_with_few_micro_batches_may_not_with_many() -> None:
    """Where one replica has few, a schedule that keeps all of them alive must fit where there are many."""
    room = 3.5 * DEVICES * SAVED
    pipeline = Pipeline(in_line(), ADAPTIVE, room)
    pipeline.replica_micro_batches = (MICRO_BATCHES, 4 * MICRO_BATCHES)
    many = pipeline.choose().schedule(DEVICES, SIZE * 4 * MICRO_BATCHES)
    assert pipeline.peak(many) <= room


@pytest.mark.parametrize("kind", ["adaptive", "generated"])
@pytest.mark.parametrize("whole_stages", [1.4, 2.0, 3.0])
def test_what_is_chosen_fits_in_memory(kind: Any, whole_stages: float) -> None:
    room = whole_stages * 2 * SAVED
    pipeline = Pipeline(in_v(), ScheduleChoice(kind, retune_every=10, chunks=2), room)
    chosen = pipeline.choose()
    fits = [order for order in families(IN_V) if pipeline.peak(order) <= room]
    if fits:
        assert pipeline.peak(pipeline.order) <= room
        assert pipeline.seconds(pipeline.order) <= 1.011 * min(map(pipeline.seconds, fits))
    else:
        assert pipeline.peak(pipeline.order) <= room or chosen.family == "vmin", "the least that there is"


def test_with_late_gradients_no_backward_is_split() -> None:
    pipeline = Pipeline(in_line(), replace(ADAPTIVE, late_gradients=True))
    pipeline.actuator.propose(10)
    assert pipeline.actuator.candidates
    assert not any(candidate.family for candidate in pipeline.actuator.candidates)


def test_a_split_backward_is_tried_beside_all_sizes() -> None:
    choice = replace(ADAPTIVE, micro_batch_sizes=(1, 2, 4))
    assert trials(choice, 4, 2, 8) == [Candidate(2), Candidate(1), Candidate(4), Candidate(2, family="zbh1")]
    assert trials(ADAPTIVE, 1, 2, 8) == [Candidate(2)], "nobody waits for anybody"
    assert trials(ADAPTIVE, 4, 2, 8, recomputes=True) == [Candidate(2)], "memory is short"


def test_a_whole_backward_is_tried_where_all_begin_split() -> None:
    choice = replace(ADAPTIVE, micro_batch_sizes=(1, 2, 4), chunks=2)
    split = [Candidate(size, family="zbv") for size in (2, 1, 4)]
    assert trials(choice, 4, 2, 16) == [*split, Candidate(2, family=DUALPIPEV)]
    assert trials(choice, 4, 2, 15) == split, "splitting pays there"


def test_a_trial_must_exist_and_fit_for_every_replica() -> None:
    """The batch may have become smaller since the trials were chosen."""

    live = replace(in_v(), activation_bytes=(SAVED,) * 2 * DEVICES)

    def would_run(micro_batches: tuple[int, ...], room_bytes: float = ROOMY) -> bool:
        known: Any = SimpleNamespace(saved_bytes={SIZE: {}}, costs=lambda size: live, room_bytes=[room_bytes] * DEVICES)
        pipeline = SimpleNamespace(num_stages=DEVICES, micro_batch_size=SIZE, replica_micro_batches=micro_batches)
        measurements: Any = SimpleNamespace(costs=known, _pipeline=pipeline)
        return PipelineMeasurements._would_fit(measurements, Candidate(SIZE, family=DUALPIPEV))

    assert would_run((16, 8))
    assert not would_run((16, 3)), "there is no such schedule of three micro-batches"
    assert not would_run((16, 8), room_bytes=SAVED)


def test_whole_backwards_are_chosen_where_splitting_costs_more_than_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 4 * DEVICES
    monkeypatch.setitem(globals(), "MICRO_BATCHES", many)
    monkeypatch.setattr(Pipeline, "micro_batches", many)
    monkeypatch.setattr(Pipeline, "replica_micro_batches", (many,))
    for factor, is_split in ((1.0, True), (1.5, False)):
        pipeline = Pipeline(replace(in_v(), split_factor=factor), replace(ADAPTIVE, chunks=2))
        pipeline.choose()
        assert pipeline.costs.split_factor == pytest.approx(factor)
        assert pipeline.order.is_split == is_split


@pytest.mark.parametrize("name", CHOICES)
def test_the_first_trial_is_what_a_run_begins_with(name: str) -> None:
    choice, _, _ = CHOICES[name]
    first = trials(choice, DEVICES, SIZE, MICRO_BATCHES)[0].schedule(DEVICES, SIZE * MICRO_BATCHES)
    begun = choice.first(DEVICES, MICRO_BATCHES)
    assert isinstance(first, Schedule)
    assert first.orders == begun.orders


FORMATS = {"": AS_IT_IS, "bf16": FormatCosts(0.5, 1e-10, 1e-10), "int8": FormatCosts(0.25, 1e-9, 1e-9)}


def on_links(bytes_per_s: float) -> Costs:
    """Messages of a million bytes."""
    links = (Link(bytes_per_s),) * (DEVICES - 1)
    return replace(in_line(), message_bytes=(1e6,) * (DEVICES - 1), down=links, up=links)


def test_a_format_is_chosen_where_messages_are_slow_and_left_where_they_are_fast() -> None:
    pipeline = Pipeline(on_links(1e7), ADAPTIVE, formats=FORMATS)
    slow_s = pipeline.seconds(pipeline.order)
    chosen = pipeline.choose()
    assert chosen.boundary == "int8"
    assert "int8 between stages" in pipeline.order.name
    assert pipeline.seconds(pipeline.order) < slow_s / 2
    assert pipeline.choose().boundary == "int8", "what was measured with the format tells what it is without"
    fast = Pipeline(on_links(1e12), ADAPTIVE, formats=FORMATS)
    assert fast.choose().boundary == "", "encoding takes time, and rounding has a price"


def test_without_formats_none_is_chosen() -> None:
    assert Pipeline(on_links(1e7), ADAPTIVE).choose().boundary == ""


def test_costs_with_a_format_and_back_are_the_same() -> None:
    costs = replace(on_links(1e7), backward_s=(0.03, 0.02, 0.02, 0.04))
    rounded = with_format(costs, FORMATS[""], FORMATS["int8"])
    assert rounded.message_bytes == (2.5e5,) * 3
    assert rounded.forward_s == pytest.approx([0.011, 0.012, 0.012, 0.011])
    assert rounded.backward_s == pytest.approx([0.031, 0.022, 0.022, 0.041])
    back = with_format(rounded, FORMATS["int8"], FORMATS[""])
    assert back.forward_s == pytest.approx(costs.forward_s)
    assert back.message_bytes == pytest.approx(costs.message_bytes)
