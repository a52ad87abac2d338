"""Which island a process is, by the environment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.monitor.config import get_monitor_config

from paceline.averaging.islands import ISLAND, island_share
from paceline.config.averaging_keys import AveragingConfig
from paceline.runtime.initialize_patch import with_plan

SECTION = AveragingConfig(lighthouse="localhost:29510", min_islands=2)


def test_an_island_has_one_sample_in_as_many_as_there_are_shares(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_numbers_that_no_island_has(monkeypatch: pytest.MonkeyPatch, written: str | None, message: str) -> None:
    if written is None:
        monkeypatch.delenv(ISLAND, raising=False)
    else:
        monkeypatch.setenv(ISLAND, written)
    with pytest.raises(ValueError, match=r"^(paceline.averaging is there|this is island)") as refused:
        island_share(SECTION, 7)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(("section", "added"), [(SECTION, "-island1"), (None, "")])
def test_monitors_of_islands_write_into_folders_of_their_own(
    section: AveragingConfig | None, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISLAND, "1")
    asked = {"csv_monitor": {"enabled": True, "job_name": "mine"}, "tensorboard": {"job_name": "none"}}
    config = SimpleNamespace(monitor_config=get_monitor_config(asked))
    known: Any = SimpleNamespace(averaging=section)
    built = with_plan(SimpleNamespace, known)(config_class=config)
    monitors = built.config_class.monitor_config
    assert monitors.csv_monitor.job_name == f"mine{added}"
    assert monitors.tensorboard.job_name == "none"
