"""The part that spreads and moves experts, with fakes of layers, the rebalancer and the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.expert_choice import MoeChoice
from paceline.moe.layer import ExpertLayer, LayerState
from paceline.planning.experts import Placement
from paceline.planning.tuning import DecisionLog
from paceline.runtime import expert_part
from paceline.runtime.expert_groups import ExpertGroups
from paceline.runtime.expert_part import Experts, SharedExperts
from paceline.state.named import SPREAD

IN_ORDER, SWAPPED = Placement(((0, 1), (2, 3))), Placement(((0, 2), (1, 3)))


class Layer(nn.Module):
    """Two slots on each of two ranks."""

    size, num_replicas, placement = 2, 1, IN_ORDER
    from_saved = ExpertLayer.from_saved

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        setattr(self.weight, SPREAD, True)
        self.calls: list[Any] = []

    def begin(self, name: str, group: Any, **options: Any) -> None:
        self.calls.append(("begin", name, group, options["num_replicas"], options["splitting"]))

    def check(self, placement: Placement) -> None:
        if placement.num_devices != self.size:
            raise ValueError(f"{placement.num_devices} devices are not {self.size}")

    def take_on(self, placement: Placement) -> None:
        self.calls.append(placement)

    def leave(self) -> LayerState:
        return LayerState(self.placement, None, torch.ones(4))

    def arrive(self, left: LayerState) -> None:
        self.calls.append(("arrive", left))

    def fetch(self) -> None:
        self.calls.append("fetch")

    @property
    def copying(self) -> Layer:
        return self

    def settle(self) -> None:
        self.calls.append("settle")


class Control:
    """This rank and another one, which has the layers ``others`` and asks for these placements of them."""

    rank = 0

    def __init__(self, others: Mapping[str, Placement | None] | None = None) -> None:
        self.others = others or {}

    def gather(self, value: Any) -> list[Any]:
        return [value, (self.others, set(self.others))]

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        yield


class FakeRebalancer:
    """Stands for the actuator and its measurements."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls, self.loads, self.file = calls, self, None

    def place(self, placements: Mapping[str, Placement]) -> dict[str, Any]:
        self.calls.append(dict(placements))
        return {"moved": 2, "num_bytes": 8, "seconds": 0.5}

    def placements(self) -> dict[str, Any]:
        return {"mlp": IN_ORDER.to_json()}

    def follow(self, layers: Sequence[Layer]) -> None:
        self.calls.append(("follow", layers))

    def forget(self, step: int) -> None:
        self.calls.append(("forget", step))


class FakeController:
    moves = False

    def __init__(self, calls: list[Any], made_of: Any) -> None:
        self.calls, self.made_of = calls, made_of

    def after_step(self) -> None:
        self.calls.append("after step")
        if self.moves:
            self.made_of[0][0].placement = SWAPPED

    def go_on(self, step: int) -> None:
        self.calls.append(("go on", step))


@pytest.fixture(autouse=True)
def fake_rebalancer(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*made_of: Any) -> tuple[FakeRebalancer, FakeController]:
        calls: list[Any] = []
        return FakeRebalancer(calls), FakeController(calls, made_of)

    monkeypatch.setattr(expert_part, "expert_controller", make)


def shared(*, size: int = 2, with_layer: bool = True) -> tuple[SharedExperts, Layer]:
    layer: Any = Layer()
    return SharedExperts({"mlp": layer} if with_layer else {}, ExpertGroups(size, "sharing")), layer


def experts(
    of: SharedExperts,
    section: MoeChoice | None,
    others: Mapping[str, Placement | None] | None = None,
    stages: Any = None,
) -> Experts:
    control: Any = Control(others)
    return Experts(
        of,
        section,
        control=control,
        stages=stages,
        group=lambda: "group",
        device=torch.device("cpu"),
        states=lambda: "states",  # type: ignore[arg-type, return-value]
        is_last_backward=lambda: True,
        decided=DecisionLog(),
    )


def test_layers_begin_and_their_rebalancer_gets_what_it_needs() -> None:
    of, layer = shared()
    part = experts(of, MoeChoice(replicas=1), stages="stages")
    assert layer.calls == [("begin", "mlp", "sharing", 1, "even")]
    found: Any = part.controller
    assert (found.made_of[:3], found.made_of[6]) == (([layer], "states", "group"), "stages")
    part.after_step()
    assert layer.calls[1:] == ["fetch"]
    part.resume(7)
    assert found.calls == ["after step", ("forget", 7), ("go on", 7)]


def test_without_a_flush_copies_are_renewed_with_each_update_and_where_experts_have_moved() -> None:
    of, layer = shared()
    part = experts(of, MoeChoice(replicas=1))
    layer.calls.clear()
    part.after_late_step()
    assert layer.calls == []
    part.renew()
    assert layer.calls == ["fetch", "settle"]
    found: Any = part.controller
    found.moves = True
    part.after_late_step()
    assert (found.calls, layer.calls) == (["after step"] * 2, ["fetch", "settle", "fetch"])


def test_without_the_section_experts_stay() -> None:
    of, layer = shared()
    part = experts(of, None)
    assert (part.rebalancer, part.controller, part.placements()) == (None, None, {})
    part.after_step()
    part.resume(3)
    part.take([{"mlp": [[0, 2], [1, 3]]}])
    part.fetch()
    assert layer.calls == [("begin", "mlp", "sharing", 0, "even"), "fetch"]


def test_the_section_needs_experts_on_several_ranks() -> None:
    with pytest.raises(ValueError, match=r"paceline\.moe is there, and every rank has all experts .*autoep_size"):
        experts(shared(size=1)[0], MoeChoice())


def test_placements_that_are_asked_for_go_to_the_layers_that_are_here() -> None:
    part = experts(shared()[0], MoeChoice(), others={"other": SWAPPED})
    found: Any = part.rebalancer
    assert part.place({"mlp": SWAPPED, "other": SWAPPED})["moved"] == 2
    assert found.calls == [{"mlp": SWAPPED}]
    with pytest.raises(ValueError, match=r"no layer 'nowhere' whose experts can move: name one of \['mlp', 'other'\]"):
        part.place({"nowhere": SWAPPED})
    with pytest.raises(ValueError, match="1 devices are not 2"):
        part.place({"mlp": Placement(((0, 1, 2, 3),))})
    assert found.calls == [{"mlp": SWAPPED}]


@pytest.mark.parametrize("other", [SWAPPED, None, Placement(((0, 1, 3), (2, 3)), (2, 2))])
def test_ranks_that_ask_for_different_placements_of_a_layer_are_told_so(other: Placement | None) -> None:
    """Those of another rank for the same layer: another owner, none, other copies."""
    part = experts(shared()[0], MoeChoice(replicas=1), others={"mlp": other})
    found: Any = part.rebalancer
    with pytest.raises(ValueError, match="rank 1 asks for another placement of mlp than the ranks before it: give all"):
        part.place({"mlp": IN_ORDER})
    assert found.calls == []


def test_what_only_another_rank_calls_a_layer_is_refused_here_too() -> None:
    part = experts(shared()[0], MoeChoice())
    control: Any = part._control
    control.gather = lambda value: [value, ({}, {"nowhere"})]
    with pytest.raises(ValueError, match="no layer 'nowhere' whose experts can move"):
        part.place({"mlp": SWAPPED})


def test_a_stage_without_experts_takes_part() -> None:
    part = experts(shared(with_layer=False)[0], MoeChoice(), others={"other": SWAPPED}, stages="stages")
    found: Any = part.rebalancer
    part.place({"other": SWAPPED})
    assert found.calls == [{}]


def test_layers_that_come_begin_as_those_that_left_and_their_rebalancer_follows() -> None:
    of, layer = shared()
    part = experts(of, MoeChoice(replicas=1))
    layers: Any = of.layers
    assert part.state_of(["nothing."]) == {}
    left = part.state_of(["mlp"])
    assert (left["mlp"].placement, list(left)) == (IN_ORDER, ["mlp"])
    another = Layer()
    del layers["mlp"]
    layers["other"] = another
    state = LayerState(SWAPPED, [1.0] * 4, torch.zeros(4))
    layer.calls.clear()
    part.follow(left, lambda own: [own, {"other": state}, {"third": state}])
    assert layer.calls == []
    assert another.calls == [("begin", "other", "sharing", 1, "even"), ("arrive", state)]
    found: Any = part.rebalancer
    assert found.calls == [("follow", [another])]


WITH_COPIES = Placement(((0, 2, 1), (1, 3, 0)), (2, 2))
UNEVEN = Placement(((0, 2, 4, 1), (1, 3, 0)), (3, 2))


@pytest.mark.parametrize(
    ("saved", "taken"),
    [
        (WITH_COPIES.to_json(), [WITH_COPIES]),
        ([[0, 2, 1], [1, 3, 0]], [WITH_COPIES]),  # as checkpoints once had it
        ({"placement": [[0, 2, 4, 1, 3], [1, 3, 0, 2]], "owned": [3, 2]}, [UNEVEN]),
        (Placement(((0, 1, 2, 3),)).to_json(), []),
    ],
    ids=["alike", "without owners", "uneven", "one rank"],
)
def test_a_saved_placement_is_taken_on_with_as_many_copies_as_fit(saved: Any, taken: list[Any]) -> None:
    of, layer = shared()
    part = experts(of, MoeChoice())
    part.take([{}, {"mlp": saved}])
    assert [call for call in layer.calls if isinstance(call, Placement)] == taken


def test_what_the_engine_must_know_of_shared_experts() -> None:
    of, layer = shared()
    other = nn.Parameter(torch.zeros(1))
    domain = SharedExperts(of.layers).domain()
    assert domain(other) is None
    assert domain(layer.weight) is not None
    of.check_optimizer(torch.optim.AdamW([other]))
    with pytest.raises(ValueError, match=r"optimizer Adafactor looks at a parameter as a whole.* AdamW"):
        of.check_optimizer(torch.optim.Adafactor([other]))


def test_a_module_without_shared_experts_allows_everything() -> None:
    of = SharedExperts.of(nn.Linear(1, 1))
    of.check_optimizer(torch.optim.Adafactor([nn.Parameter(torch.zeros(1))]))
    assert (dict(of.layers), of.groups.size, of.number) == ({}, 1, 0)
