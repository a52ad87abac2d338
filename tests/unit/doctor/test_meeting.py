"""Rendezvous of ranks: launchers' variables that make no sense, and a rank 0 that is not where it is said to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from paceline.doctor.meeting import Place, Unmet, meet

GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "rule"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number of at least 1"),
        ({"RANK": "2"}, "RANK must be a whole number from 0 to 1, the last rank of WORLD_SIZE"),
        ({"RANK": "-1"}, "RANK must be a whole number from 0 to 1, the last rank of WORLD_SIZE"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR must be rank 0's address"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be a whole number from 1 to 65535"),
    ],
)
def test_variables_that_make_no_job(variables: dict[str, str], rule: str) -> None:
    with pytest.raises(Unmet, match=f"they make no job, {rule}"):
        Place.of(GOOD | variables)


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "x"}, {"LOCAL_WORLD_SIZE": "2(x3)"}])
def test_ranks_of_a_host_that_make_no_sense(variables: dict[str, str]) -> None:
    with pytest.raises(Unmet, match=r"LOCAL_RANK is '.' of '.*' ranks on this host") as unmet:
        Place.of(GOOD | variables)
    assert "torchrun" in unmet.value.finding.remedy


def test_variables_of_a_job() -> None:
    assert Place.of(GOOD) == Place(0, 2, 0, 2, "node1", 29500)
    assert Place.of({}) is None


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            "The server socket has failed to listen on any local network address. port: 29500",
            "choose another --master_port",
        ),
        (
            "The client socket has timed out after 5000ms while trying to connect to (node1, 29500).",
            "give an address of rank 0's own host instead of node1 (MASTER_ADDR, --master_addr)",
        ),
    ],
    ids=["port", "address"],
)
def test_rank_0_that_cannot_listen(message: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise dist.DistNetworkError(message)

    monkeypatch.setattr(dist, "TCPStore", refuse)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = Place.of(GOOD)
    assert place is not None
    with pytest.raises(Unmet) as unmet:
        meet(place, 5.0)
    assert message in unmet.value.finding.text
    assert remedy in unmet.value.finding.remedy
