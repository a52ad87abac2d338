"""When experts move: the rule, with times and links that are known; the group's other rank does as this one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config.expert_choice import MoeChoice
from paceline.moe import load_measurements, rebalancer, stage_agreement
from paceline.moe.rebalancer import EXPERT_S, FIXED_S
from paceline.moe.stage_agreement import Stages
from paceline.planning import rebalance
from paceline.planning.experts import Placement, device_loads
from paceline.planning.switching import Decision
from paceline.planning.tuning import EXPERTS, DecisionLog, DecisionRecord
from paceline.runtime.expert_part import expert_controller

EVERY = 10
ROW_S = 1e-3
COMPUTE_S, TRAVEL_S = 0.75 * ROW_S, 0.25 * ROW_S
"""Of a row."""
LOADS = [60.0, 50.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0]
"""Of both ranks together, in a step: the two hottest experts lie on one rank, and best on two."""
IN_ORDER = Placement.contiguous(8, 2)
NOW_S = 130 * ROW_S
EXPERT_BYTES = 1000
WEIGHT = torch.zeros(10)


class Group:
    """Two ranks, as seen by the first; the second one's values are the same."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, bytes_per_s: float = 1e9, latency_s: float = 1e-3, size: int = 2) -> None:
        self.bytes_per_s, self.latency_s, self.now_s, self.size = bytes_per_s, latency_s, 0.0, size

    def get_rank(self, group: Any) -> int:
        return 0

    def get_world_size(self, group: Any) -> int:
        return self.size

    def all_gather(self, gathered: list[torch.Tensor], value: torch.Tensor, group: Any) -> None:
        for place in gathered:
            place.copy_(value)

    def all_gather_object(self, told: list[Any], value: Any, group: Any) -> None:
        told[:] = [value, *[[]] * (self.size - 1)]
        if isinstance(value, tuple):  # number of the rank, host
            told[:] = [(rank % 2, value[1]) for rank in range(self.size)]

    def broadcast_object_list(self, values: list[Any], **_: Any) -> None:
        pass

    def barrier(self, group: Any) -> None:
        self.now_s += 1.0

    def all_reduce(self, values: torch.Tensor, op: Any, group: Any) -> None:
        assert op == self.ReduceOp.MAX

    def all_to_all_single(self, arrived: Any, sent: torch.Tensor, received: Any, counts: Any, group: Any) -> None:
        assert counts == [0, sent.numel(), *[0] * (self.size - 2)], "to the next rank"
        self.now_s += self.latency_s + sent.numel() / self.bytes_per_s


class Clock:
    """Of experts whose rows all take the same."""

    def __init__(self, device: torch.device) -> None:
        self.rows = 0

    def read(self) -> tuple[float, float]:
        return self.rows * COMPUTE_S, self.rows * TRAVEL_S


class Layer:
    """What the rebalancer needs of an expert layer."""

    name, num_experts, rank, size, num_slots, replicas = "layer", 8, 0, 2, 4, None
    device, time_depends_on_load = torch.device("cpu"), True
    clock: Any = None

    def __init__(self) -> None:
        self.placement, self.routed = IN_ORDER, torch.zeros(8, dtype=torch.int64)

    def parts(self, slot: int) -> list[Any]:
        return [SimpleNamespace(parameter=WEIGHT, numel=WEIGHT.numel())]

    def take_on(self, placement: Placement, loads: Any) -> None:
        self.placement = placement

    def know_speeds(self, speeds: Any) -> None:
        self.speeds = speeds

    def fetch(self) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Steps of a rebalancer whose group has links of some speed; the layer afterwards, and what was decided."""

    def ran(
        steps: int,
        group: Group,
        every: int = EVERY,
        here: Any = lambda step: True,
        after: Any = lambda of_layers: None,
        **more: Any,
    ) -> tuple[Layer, list[dict[str, Any]]]:
        layer = Layer()
        state = SimpleNamespace(tensor=torch.zeros(EXPERT_BYTES * layer.num_slots, dtype=torch.uint8))
        for module in (rebalancer, load_measurements, stage_agreement):
            monkeypatch.setattr(module, "dist", group)
        monkeypatch.setattr(load_measurements, "ExpertClock", Clock)
        monkeypatch.setattr(rebalancer, "time", SimpleNamespace(perf_counter=lambda: group.now_s))
        moved = SimpleNamespace(num_bytes=0, paused_bytes=0, transfer_s=0.0)
        monkeypatch.setattr(rebalancer, "move_experts", lambda *_, **__: moved)
        config = MoeChoice(rebalance_every=every)
        decided = DecisionLog()
        parts: Any = [layer] if here(0) else [], lambda _: [state], None, torch.device("cpu")
        of_layers, controller = expert_controller(*parts, config, decided, **more)
        for step in range(steps):
            of_layers.follow([layer] if here(step) else [])
            layer.routed += torch.tensor(LOADS, dtype=torch.int64) // 2
            if layer.clock is not None:
                layer.clock.rows += 130
            controller.after_step()
        after(of_layers)
        return layer, decided.decisions

    return ran


def most_moved(old: Placement, new: Placement) -> int:
    """Experts that the busiest rank gives away, or takes in."""
    moved = [pair for pair in zip(old.owners, new.owners, strict=True) if pair[0] != pair[1]]
    return max(max(sum(pair[end] == rank for pair in moved) for rank in range(2)) for end in range(2))


def price(bytes_per_s: float, best: Placement) -> float:
    """Seconds that moving takes."""
    num_moved = sum(a != b for a, b in zip(IN_ORDER.owners, best.owners, strict=True))
    return FIXED_S + num_moved * EXPERT_S + most_moved(IN_ORDER, best) * EXPERT_BYTES / bytes_per_s


def gain(best: Placement) -> float:
    """Seconds that a step becomes shorter by."""
    return NOW_S - max(device_loads(best, LOADS)) * ROW_S


def test_a_move_that_pays_within_the_horizon_is_made(run: Any) -> None:
    fast = Group()
    layer, (decision,) = run(EVERY, fast)
    assert decision["switched"]
    assert layer.placement != IN_ORDER
    assert decision["predicted_now_s"] == pytest.approx(NOW_S)
    assert decision["predicted_best_s"] == pytest.approx(NOW_S - gain(layer.placement))
    assert decision["switch_s"] == pytest.approx(price(1e9, layer.placement))


def test_tokens_of_other_replicas_are_no_load_of_this_one(run: Any) -> None:
    """Four ranks, of which two and two have the same experts: twice the tokens, and as many for each rank."""
    (two,), (four,) = (run(EVERY, Group(size=size))[1] for size in (2, 4))
    assert four["predicted_now_s"] == pytest.approx(two["predicted_now_s"])
    assert four["predicted_best_s"] == pytest.approx(two["predicted_best_s"])


def test_the_horizon_is_until_the_next_look(run: Any) -> None:
    """What takes longer than one step saves, and less than ten."""
    best = run(EVERY, Group())[0].placement
    slow = most_moved(IN_ORDER, best) * EXPERT_BYTES / (5 * gain(best))
    assert gain(best) < price(slow, best) < EVERY * gain(best)
    layer, (decision,) = run(EVERY, Group(slow))
    assert decision["switched"]
    assert layer.placement == best


def test_layers_are_chosen_by_what_they_gain_until_the_next_look(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    horizons = []

    def propose(*layers: Any, horizon_steps: int, **options: Any) -> Any:
        horizons.append(horizon_steps)
        return rebalance.propose(*layers, horizon_steps=horizon_steps, **options)

    monkeypatch.setattr(rebalancer, "propose", propose)
    run(2 * EVERY, Group())
    assert horizons == [EVERY, EVERY]


def test_a_move_that_does_not_pay_is_not_made_until_what_was_lost_pays_for_it(run: Any) -> None:
    best = run(EVERY, Group())[0].placement
    slow = most_moved(IN_ORDER, best) * EXPERT_BYTES / (25 * gain(best))
    layer, decisions = run(2 * EVERY, Group(slow))
    assert [decision["switched"] for decision in decisions] == [False, False]
    assert layer.placement == IN_ORDER
    assert decisions[0]["switch_s"] == pytest.approx(price(slow, best), rel=1e-3)
    assert decisions[1]["suffered_s"] == pytest.approx(EVERY * gain(best))
    layer, decisions = run(3 * EVERY, Group(slow))
    assert [decision["switched"] for decision in decisions] == [False, False, True]
    assert layer.placement == best


def test_busy_experts_leave_a_slow_rank_once_two_intervals_have_shown_it(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank takes three times as long for as many rows."""

    def all_gather(gathered: list[torch.Tensor], value: torch.Tensor, group: Any) -> None:
        for rank, place in enumerate(gathered):
            place.copy_(value)
            place[:, 9] *= 3 if rank else 1
            place[:, 12] = rank

    group = Group()
    monkeypatch.setattr(group, "all_gather", all_gather)
    layer, (first, second) = run(2 * EVERY, group)
    assert first["switched"]
    assert "speeds" not in first
    assert second["switched"]
    assert second["speeds"] == pytest.approx([1.5, 0.5])
    assert layer.speeds == pytest.approx([1.5, 0.5])
    slow, fast = (sum(LOADS[expert] for expert in layer.placement.devices[rank]) for rank in (1, 0))
    assert (slow, fast) == (40, 130), "the slow one has the four idlest, however the loads lie"
    assert second["imbalance_after"][0] < second["imbalance_before"][0]


def test_by_how_much_experts_are_uneven_is_known_after_an_interval(run: Any) -> None:
    seen: list[Any] = []
    run(EVERY - 1, Group(), after=lambda found: seen.append(found.uneven_s()))
    assert seen == [None]
    layer, _ = run(EVERY, Group(), after=lambda found: seen.append(found.uneven_s()))
    even_s = sum(LOADS) / 2 * ROW_S
    placed_s = max(device_loads(layer.placement, LOADS)) * ROW_S
    assert seen[1] == {"layer": pytest.approx((NOW_S - even_s, placed_s - even_s))}
    run(EVERY + 1, Group(), after=lambda found: seen.append(found.uneven_s()))
    assert seen[2] == {"layer": pytest.approx((placed_s - even_s, placed_s - even_s))}
    run(EVERY, Group(), every=0, after=lambda found: seen.append(found.uneven_s()))
    assert seen[3] == {}, "they will not be placed, and loads are not measured"


def test_travelling_is_part_of_what_a_row_takes() -> None:
    rows = torch.tensor([[130.0], [70.0]])
    compute_s, travel_s = rows * COMPUTE_S, torch.tensor([[0.05], [0.02]])
    found = load_measurements._row_s(rows, compute_s, travel_s)
    # The rank with fewer rows waits less for itself and more for the other; the least is what travelling takes.
    assert found == pytest.approx(COMPUTE_S + 0.02 / 130)
    assert load_measurements._row_s(rows, compute_s, 0 * travel_s) == pytest.approx(COMPUTE_S)
    assert load_measurements._row_s(0 * rows, compute_s, travel_s) is None


def test_what_an_expert_takes_however_few_its_rows_is_not_saved() -> None:
    rows = torch.tensor([[100.0], [50.0]])
    found = load_measurements._row_s(rows, 0.01 + rows * COMPUTE_S, 0 * rows)
    assert found == pytest.approx(COMPUTE_S)


def test_the_probe_finds_the_rate_of_the_links_and_not_their_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(bytes_per_s=3e7, latency_s=0.5)
    monkeypatch.setattr(rebalancer, "dist", group)
    monkeypatch.setattr(rebalancer, "time", SimpleNamespace(perf_counter=lambda: group.now_s))
    assert rebalancer._probe(None, torch.device("cpu")) == pytest.approx(3e7)


# -- stages of a pipeline ----------------------------------------------------------------------------------------------


class Control:
    """The control plane of a job whose other ranks say what they are told to."""

    def __init__(self, *others: tuple[int, float, float, bool], notes: tuple[DecisionRecord, ...] = ()) -> None:
        self.others, self.notes = others, notes

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, bool):  # whether values are on their way, or have come
            return [value, value]
        return [value, *self.others]

    def gather_at_first(self, value: Any) -> list[Any]:
        return [value, list(self.notes)]


def stages(computed_s: float, control: Control, num_micro_batches: int = 8) -> Stages:
    return Stages(0, 2, control, lambda: computed_s, lambda: num_micro_batches)  # type: ignore[arg-type]


def test_what_the_slowest_stage_saves_counts_and_what_another_saves_hardly_does(run: Any) -> None:
    slowest = stages(1.0, Control((1, 0.5, 0.0, False)))
    layer, (decision,) = run(EVERY, Group(), stages=slowest)
    assert decision["step_saved_s"] == pytest.approx(gain(layer.placement))
    assert (decision["switched"], decision["stage"]) == (True, 0)

    best = layer.placement
    slow = most_moved(IN_ORDER, best) * EXPERT_BYTES / (5 * gain(best))
    beside = stages(0.5, Control((1, 1.0, 0.0, False)))
    layer, (decision,) = run(EVERY, Group(slow), stages=beside)
    assert decision["step_saved_s"] == pytest.approx(gain(best) / 8)
    assert decision["predicted_best_s"] == pytest.approx(NOW_S - gain(best)), "of the experts, as they would be"
    assert (decision["switched"], layer.placement) == (False, IN_ORDER)


def test_a_stage_that_will_stay_is_not_counted_on(run: Any) -> None:
    """Two stages are equally slow: this one's saving counts if the other one saves too."""
    for would, switched in ((True, True), (False, False)):
        best = run(EVERY, Group())[0].placement
        slow = most_moved(IN_ORDER, best) * EXPERT_BYTES / (5 * gain(best))
        _, (decision,) = run(EVERY, Group(slow), stages=stages(1.0, Control((1, 1.0, gain(best), would))))
        assert decision["switched"] is switched
        assert decision["step_saved_s"] == pytest.approx(gain(best) if would else gain(best) / 8)


OTHER = DecisionRecord(EXPERTS, 10, True, Decision(True, "", 1.0, 0.5, 0.1, 0.5, 0.0), 0.5, {}, stage=1)
"""Of the second stage."""


def test_the_first_rank_has_the_decisions_of_all_stages(run: Any) -> None:
    _, decisions = run(EVERY, Group(), stages=stages(1.0, Control((1, 0.5, 0.0, False), notes=(OTHER,))))
    assert [decision["stage"] for decision in decisions] == [0, 1]
    assert decisions[1] == OTHER.to_json()


def test_a_stage_without_experts_takes_part_in_every_planning(run: Any) -> None:
    control = Control((1, 0.5, 0.2, True), notes=(OTHER,))
    _, decided = run(12, Group(), 4, here=lambda step: False, stages=stages(1.0, control))
    assert decided == [OTHER.to_json()] * 3


def test_a_layer_that_comes_before_a_planning_is_placed_by_its_own_counts_and_by_times_from_then_on(run: Any) -> None:
    """It comes before the last step of the interval; what it counted elsewhere came along."""
    layer, (decision,) = run(EVERY, Group(), here=lambda step: step == EVERY - 1)
    assert (decision["switched"], decision["predicted_now_s"]) == (True, pytest.approx(NOW_S))
    assert layer.placement != IN_ORDER


def test_experts_are_placed_anew_soon_at_first_and_after_a_pause(run: Any) -> None:
    steps = [decision["step"] for decision in run(121, Group(), every=50)[1]]
    assert steps == [10, 60, 110]
    assert run(60, Group(), every=0)[1] == []


def test_a_change_is_not_made_if_experts_have_moved_since_it_was_proposed(run: Any) -> None:
    """Their values take some steps to come, in which somebody may move them by hand, or layers move."""
    swapped = Placement(((4, 5, 6, 7), (0, 1, 2, 3)))

    def after(of_layers: Any) -> None:
        (layer,) = of_layers.layers
        moved = layer.placement
        assert moved != IN_ORDER, "as it was when a move was proposed"
        assert of_layers.apply({0: swapped}) == rebalancer.Moved(0, 0, 0, 0.0, 0.0, {})
        assert layer.placement == moved
        layer.placement = IN_ORDER
        assert of_layers.apply({0: swapped}).before == {0: IN_ORDER}
        assert layer.placement == swapped

    run(EVERY, Group(), after=after)


@pytest.mark.parametrize("moves_by_hand", [False, True])
def test_a_change_that_was_not_made_is_no_switch(run: Any, moves_by_hand: bool) -> None:
    """Nor does it count among the moves of the run."""

    def after(of_layers: Any) -> None:
        (layer,) = of_layers.layers
        layer.placement = IN_ORDER
        proposal = of_layers.propose(EVERY)
        if moves_by_hand:
            layer.placement = Placement(((4, 5, 6, 7), (0, 1, 2, 3)))
        record = proposal.record(of_layers.apply(proposal.change))
        assert record.switched != moves_by_hand
        assert record.figures.get("layers") == (None if moves_by_hand else ["layer"])

    run(EVERY, Group(), after=after)
