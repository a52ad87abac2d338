"""States of ranks in checkpoints: what each kind takes from those of all ranks that were saved."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from torch import nn

from paceline.optim.sharded import ShardedOptimizer
from paceline.state.named import parts_of
from paceline.state.rank_states import ParameterGroups, RandomStates, RankStates, SchedulerState

CPU = torch.device("cpu")


def saved(*entries: Any, rank: int | None = None, replica: int = 0, num_replicas: int = 1) -> RankStates:
    return RankStates(entries, rank, replica, num_replicas)


def optimizer_of(*names: str, rates: tuple[float, ...] = (0.1,)) -> ShardedOptimizer:
    """A group for each rate, with an equal share of the names."""
    parameters = {nn.Parameter(torch.ones(2)): name for name in names}
    each, share = list(parameters), len(names) // len(rates)
    groups = [{"params": each[n * share : (n + 1) * share], "lr": rate} for n, rate in enumerate(rates)]
    return ShardedOptimizer(torch.optim.SGD(groups, lr=1.0), parameters)


def test_the_same_rank_takes_its_own() -> None:
    states = saved("a", "b", rank=1)
    assert (states.own, states.first, states.nearest_last) == ("b", "a", ["b"])


def test_another_shape_takes_all_and_its_replica_last() -> None:
    """Ranks of a stage follow one another: of two replicas the odd ranks are of the second."""
    states = saved("a", "b", "c", "d", replica=1, num_replicas=2)
    assert states.own is None
    assert states.nearest_last == ["a", "c", "b", "d"]
    assert saved("a", "b", "c", "d", replica=2, num_replicas=2).nearest_last == ["b", "d", "a", "c"]
    assert saved(None, "b", replica=0).nearest_last == ["b"]


def test_groups_are_found_by_the_names_of_their_parameters() -> None:
    """Stage 1's group is another rank's here; options of how to compute are not taken."""
    before = [
        ParameterGroups(optimizer_of("a", "b", rates=(0.1, 0.2)), warns=False).state_dict(),
        ParameterGroups(optimizer_of("c", "d", rates=(0.3, 0.4)), warns=False).state_dict(),
    ]
    before[1][0]["options"] |= {"momentum": 0.5}
    now = optimizer_of("c", "b", rates=(1.0, 2.0))
    now.param_groups[0]["foreach"] = False
    ParameterGroups(now, warns=False).load_saved(saved(*before))
    assert [group["lr"] for group in now.param_groups] == [0.3, 0.2]
    assert now.param_groups[0]["momentum"] == 0.5
    assert now.param_groups[0]["foreach"] is False
    assert "foreach" not in before[0][0]["options"]


def test_a_group_without_rows_here_is_that_of_its_number() -> None:
    before = ParameterGroups(optimizer_of("a", "b", rates=(0.1, 0.2)), warns=False).state_dict()
    now = optimizer_of("a", "b", rates=(1.0, 2.0))
    now.param_groups[1]["params"].clear()
    ParameterGroups(now, warns=False).load_saved(saved(before))
    assert [group["lr"] for group in now.param_groups] == [0.1, 0.2]


def test_numbers_of_an_optimizer_are_numbers_again() -> None:
    """Powers of a count are taken in float64 if it is a number, and in float32 if it is a tensor, which files have."""
    before, now = optimizer_of("a"), optimizer_of("a")
    (master,), (other,) = (one.param_groups[0]["params"] for one in (before, now))
    before.state[master] = {"step": 3, "rms": 0.5, "has_begun": True, "comp": None, "count": torch.tensor(2.0)}
    entry = ParameterGroups(before, warns=False).state_dict()
    parts = parts_of(before, before.owned[0])
    now.state[other] = {kind: parts[kind] for kind in before.state[master]}
    ParameterGroups(now, warns=False).load_saved(saved(entry))
    assert {kind: type(value) for kind, value in now.state[other].items()} == {
        "step": int,
        "rms": float,
        "has_begun": bool,
        "comp": type(None),
        "count": torch.Tensor,
    }
    assert now.state[other] == before.state[master]


def test_another_rate_is_said_by_who_warns(caplog: pytest.LogCaptureFixture) -> None:
    before, now = optimizer_of("a"), optimizer_of("a")
    before.param_groups[0]["initial_lr"], now.param_groups[0]["initial_lr"] = 0.5, 0.25
    entry = ParameterGroups(before, warns=False).state_dict()
    with caplog.at_level(logging.WARNING, "paceline"):
        ParameterGroups(optimizer_of("a"), warns=True).load_saved(saved(entry))
        assert not caplog.records
        ParameterGroups(now, warns=True).load_saved(saved(entry))
    assert "0.25 gives way to the checkpoint's, 0.5" in caplog.text


def test_without_a_schedule_the_rate_that_training_goes_on_with_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """That of the end of a schedule, say: 0 often."""
    entry = ParameterGroups(optimizer_of("a", rates=(0.0,)), warns=False).state_dict()
    with caplog.at_level(logging.WARNING, "paceline"):
        ParameterGroups(optimizer_of("a"), warns=True).load_saved(saved(entry))
        assert not caplog.records
        ParameterGroups(optimizer_of("a"), warns=True, is_scheduled=lambda: False).load_saved(saved(entry))
    assert "the learning rate 0.1 gives way to the checkpoint's, 0" in caplog.text


def test_other_options_are_said_unless_the_schedule_sets_them(caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint's are taken, as torch.optim does: momentum and Nesterov of the JSON would have no effect."""
    entry = ParameterGroups(optimizer_of("a"), warns=False).state_dict()
    for cycles in (lambda: True, lambda: False):
        now = optimizer_of("a")
        now.param_groups[0] |= {"momentum": 0.9, "nesterov": True, "foreach": False}
        ParameterGroups(now, warns=True, cycles_momentum=cycles).load_saved(saved(entry))
        assert now.param_groups[0]["momentum"] == 0
    nesterov = "the nesterov True gives way to the checkpoint's, False"
    momentum = "the momentum 0.9 gives way to the checkpoint's, 0"
    assert [record.message for record in caplog.records] == [nesterov, momentum, nesterov]


def test_other_weight_decay_is_said_and_none_of_it_is_guessed(caplog: pytest.LogCaptureFixture) -> None:
    """A run without weight decay has one group, and one with it two: norms have none."""
    one, two = optimizer_of("a", "norm"), optimizer_of("a", "norm", rates=(0.1, 0.1))
    two.param_groups[0]["weight_decay"] = 0.25
    for before, now in ((one, two), (two, one)):
        entry = ParameterGroups(before, warns=False).state_dict()
        with caplog.at_level(logging.WARNING, "paceline"):
            ParameterGroups(now, warns=True).load_saved(saved(entry))
        assert [group["weight_decay"] for group in now.param_groups] == [0.0] * len(now.param_groups)
        two.param_groups[0]["weight_decay"] = 0.25
    assert [record.message for record in caplog.records] == ["the weight decay 0.25 gives way to the checkpoint's, 0"]


@pytest.mark.parametrize("nested", [False, True], ids=["one", "one inside of another"])
@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1)])
def test_a_scheduler_takes_the_place_of_one_with_other_groups(before: int, now: int, nested: bool) -> None:
    def scheduled(*rates: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=1.0)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [scheduler], []) if nested else scheduler

    def step(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        optimizer.step()
        scheduler.step()

    optimizer, scheduler = scheduled(*[0.5] * before)
    step(optimizer, scheduler)
    entry = SchedulerState(lambda: scheduler, lambda: optimizer.param_groups).state_dict()
    other = scheduled(*[2.0] * now)
    SchedulerState(lambda: other[1], lambda: other[0].param_groups).load_saved(saved(entry, rank=0))
    step(*other)
    assert [group["lr"] for group in other[0].param_groups] == pytest.approx([2.0 / 3] * now)


def test_a_scheduler_fits_the_groups_of_its_rank() -> None:
    def scheduled(*rates: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    optimizer, scheduler = scheduled(0.5, 0.25)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    entry = SchedulerState(lambda: scheduler, lambda: optimizer.param_groups).state_dict()

    same, other = scheduled(1.0, 2.0), scheduled(8.0)
    SchedulerState(lambda: same[1], lambda: same[0].param_groups).load_saved(saved(entry, rank=0))
    assert same[1].base_lrs == [1.0, 2.0], "the rates of another optimizer's run are not taken"
    SchedulerState(lambda: other[1], lambda: other[0].param_groups).load_saved(saved(entry))
    assert other[1].last_epoch == 2
    assert other[1].base_lrs == [8.0]

    nothing = SchedulerState(lambda: None, list)
    assert nothing.state_dict() is None
    nothing.load_saved(saved(entry, rank=0))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8),
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "down to a rate": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16, eta_min=0.05),
    "one after another": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        ],
        milestones=[2],
    ),
    "DeepSpeed's": lambda optimizer: WarmupDecayLR(optimizer, 12, warmup_max_lr=0.5, warmup_num_steps=2),
}


def scheduled(name: str, rate: float) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)
    return optimizer, SCHEDULES[name](optimizer)


def rates_of(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    """Those of the next steps, which are taken."""
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_with_an_optimizer_that_begins_anew(name: str) -> None:
    before, wanted, now = scheduled(name, 0.5), rates_of(*scheduled(name, 2.0), 8), scheduled(name, 2.0)
    rates_of(*before, 4)
    entry = SchedulerState(lambda: before[1], lambda: before[0].param_groups).state_dict()
    part = SchedulerState(lambda: now[1], lambda: now[0].param_groups)
    part.load_saved(replace(saved(entry, rank=0), has_groups=False))
    assert rates_of(*now, 4) == pytest.approx(wanted[4:])


OTHER_SCHEDULES = SCHEDULES | {
    "by a factor": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "at once": lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 3)], optimizer
    ),
    "up and down": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 16),
}


@pytest.mark.parametrize("now", OTHER_SCHEDULES)
@pytest.mark.parametrize("before", [*OTHER_SCHEDULES, None])
def test_a_schedule_of_another_kind_goes_on_at_its_step(
    before: str | None, now: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With its own form, whatever the one that was saved keeps. Without one it begins."""
    monkeypatch.setattr(f"{__name__}.SCHEDULES", OTHER_SCHEDULES)
    wanted, (optimizer, scheduler) = rates_of(*scheduled(now, 0.5), 8), scheduled(now, 0.5)
    group, entry = optimizer.param_groups[0], None
    if before is None:
        group["lr"] = 0.5
    else:
        old = scheduled(before, 0.5)
        rates_of(*old, 4)
        entry = SchedulerState(lambda: old[1], lambda: old[0].param_groups).state_dict()
        group |= {key: old[0].param_groups[0][key] for key in ("lr", "initial_lr") if key in old[0].param_groups[0]}
    with caplog.at_level(logging.WARNING, "paceline"):
        SchedulerState(lambda: scheduler, lambda: optimizer.param_groups, warns=True).load_saved(saved(entry, rank=0))
    begun = 0 if before is None else 4
    found = rates_of(optimizer, scheduler, 8 - begun)
    assert found == pytest.approx(wanted[begun:])
    told = f"this run's goes on at step {begun}" in caplog.text
    assert told == (before != now)


def test_a_schedule_of_another_kind_does_not_go_back() -> None:
    before, now = scheduled("lambda", 0.5), scheduled("step", 0.5)
    rates_of(*before, 1)
    rates_of(*now, 2)
    entry = SchedulerState(lambda: before[1], lambda: before[0].param_groups).state_dict()
    with pytest.raises(ValueError, match=r"another kind, at step 1, .* at step 2: load .* into a new engine"):
        SchedulerState(lambda: now[1], lambda: now[0].param_groups).load_saved(saved(entry, rank=0))


def test_generators_go_on_in_the_same_shape_only(caplog: pytest.LogCaptureFixture) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    states = RandomStates(CPU, warns=True)
    entry = states.state_dict()
    first, second = drawn(), drawn()
    states.load_saved(saved(None, entry, rank=1))
    assert drawn() == first
    with caplog.at_level(logging.INFO, "paceline"):
        states.load_saved(saved(entry, entry))
    assert "start anew" in caplog.text
    assert drawn() == second
