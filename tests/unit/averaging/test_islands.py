"""Which island a process is, by the environment."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from paceline.averaging.islands import ISLAND, Averager, _Pending, island_share
from paceline.averaging.rounds import Outcome
from paceline.averaging.rules import Report
from paceline.config.averaging_keys import AveragingConfig
from paceline.hf.weights import is_pretrained

SECTION = AveragingConfig(lighthouse="localhost:29510", min_islands=2)


def test_every_so_manieth_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISLAND, "1")
    assert list(island_share(SECTION, 7)) == [1, 3, 5]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "PACELINE_ISLAND is not set: say which island this is, from 0"),
        ("one", "PACELINE_ISLAND is 'one': say which island this is"),
        ("²", "PACELINE_ISLAND is '²': say which island this is"),
        ("-1", "PACELINE_ISLAND is '-1': say which island this is"),
        ("9" * 5000, "999': say which island this is"),
        ("2", "this is island 2, and the data are divided into 2 shares, for islands 0 to 1"),
    ],
)
def test_what_is_no_island(monkeypatch: pytest.MonkeyPatch, written: str | None, message: str) -> None:
    if written is None:
        monkeypatch.delenv(ISLAND, raising=False)
    else:
        monkeypatch.setenv(ISLAND, written)
    with pytest.raises(ValueError, match=r"^(paceline.averaging is there|this is island)") as refused:
        island_share(SECTION, 7)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 300


class FakeMasters:
    """Of one tensor, on one rank."""

    keeps_states_apart = True

    def __init__(self) -> None:
        self.value = torch.zeros(3)

    def scatter(self, names: Any, tensors: list[Tensor], *, add: bool = False) -> None:
        self.value = self.value + tensors[0] if add else tensors[0]


def averager(is_pretrained: bool = False, **section: Any) -> tuple[Averager, FakeMasters]:
    config = AveragingConfig(lighthouse="localhost:29510", min_islands=2, every_tokens=100, **section)
    control: Any = SimpleNamespace(rank=0, from_first=lambda value: value, sum=lambda tensor: tensor)
    masters: Any = FakeMasters()
    found = Averager(config, control, masters, torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]), is_pretrained)
    found.names, found.parts, found._joined = ["w"], [range(1)], True
    if found._outer is not None:
        found._anchors = {0: torch.zeros(3)}
    return found, masters


def take(found: Averager, masters: FakeMasters, average: float, weights: list[float], *trained: int) -> None:
    """A round that brings an average; each island's period is as long as what it has trained on."""
    thread = threading.Thread(target=int)
    thread.start()
    reports = [
        Report(i, 1, 0.0, 2.0, number, True, found.round, number, min(1.0, number / 100))
        for i, number in enumerate(trained)
    ]
    tensors = [torch.full((3,), average)] if any(trained) else None
    outcome = Outcome(tensors, reports, weights, found.round + any(trained), 0.0, 0.0, 0, 1)
    sent = [masters.value]
    found._pending = _Pending(
        range(1), 0, True, False, False, trained[0], trained[0], sent, thread=thread, outcome=outcome
    )
    found.settle()


@pytest.fixture(autouse=True)
def _is_island_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISLAND, "0")


def test_the_rate_is_for_the_islands_of_the_next_round() -> None:
    """The first round takes one of three; the next average divides by three all the same."""
    found, masters = averager(first_round="best")
    assert found.learning_rate_factor == 2.0  # nobody is known yet: min_islands
    take(found, masters, 1.0, [0.0, 1.0, 0.0], 100, 100, 100)
    assert found.learning_rate_factor == 3.0
    take(found, masters, 2.0, [0.5, 0.5], 100, 100)
    assert found.learning_rate_factor == 2.0


@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_without_new_tokens_nothing_moves_and_no_model_is_counted(outer: Any) -> None:
    found, masters = averager(outer=outer, combine_rounds=2)
    for value in (1.0, 2.0):
        take(found, masters, value, [0.5, 0.5], 100, 100)
    before, weights = masters.value.clone(), found._last_rounds.weights()
    take(found, masters, 9.0, [0.5, 0.5], 0, 0)
    assert torch.equal(masters.value, before)
    assert (found.round, len(found.exchanges), len(found._last_rounds), weights) == (2, 2, 2, [0.5, 0.5])


def test_islands_that_join_with_equal_values_keep_count_of_their_tokens() -> None:
    """Of two that go on from checkpoints in the middle of a period: their next average is of all of it."""
    found, masters = averager()
    found._trained_until, found.tokens = {0: 200}, 250
    thread = threading.Thread(target=int)
    thread.start()
    reports = [Report(island, 1, 0.0, 2.0, 50, False, 2, 50) for island in (0, 1)]
    outcome = Outcome(None, reports, [1.0, 0.0], 3, 0.0, 0.0, 0, 1)
    found._pending = _Pending(range(1), 0, False, True, False, 50, 250, [masters.value], thread=thread, outcome=outcome)
    found.settle()
    assert found._trained_until == {0: 200}


def test_a_short_period_takes_a_short_outer_step() -> None:
    """From the same momentum: with a hundredth of the tokens, and an average that is as much nearer."""
    moved = []
    for trained in (100, 1):
        found, masters = averager(outer="nesterov", combine_rounds=2)
        take(found, masters, 1.0, [0.5, 0.5], 100, 100)
        start = masters.value.clone()
        take(found, masters, float(start[0]) + trained / 100, [0.5, 0.5], trained, trained)
        moved.append(float((masters.value - start)[0]))
        assert found._last_rounds.weights() == (
            [0.5, 0.5] if trained == 100 else pytest.approx([1 / 1.01, 0.01 / 1.01])
        )
    assert 0 < moved[1] < 0.012 * moved[0]


def test_a_pretrained_model_begins_with_a_mean() -> None:
    assert averager(is_pretrained=True)[0].first_round == "mean"
    assert averager(is_pretrained=False)[0].first_round == "best"
    assert averager(is_pretrained=True, first_round="best")[0].first_round == "best"
    assert averager(is_pretrained=False, outer="nesterov")[0].first_round == "mean"


def test_what_is_pretrained() -> None:
    config = LlamaConfig()
    assert is_pretrained("Qwen/Qwen3-0.6B")
    assert is_pretrained(Path("model"))
    assert not is_pretrained(config)
    model = torch.nn.Linear(1, 1)
    assert not is_pretrained(model)
    model.config = config
    assert not is_pretrained(model)
    config._name_or_path = "model"
    assert is_pretrained(model)
