"""The speed of a device by a short matrix product."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.measure import probe


def test_half_the_speed_is_half_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose products take 4 s against one of 2 s; one that is disturbed now and then counts as it is."""
    device, now_s = torch.device("cpu"), 0.0

    def taking(*seconds: float) -> float:
        calls = iter(seconds * 100)

        def slow(*args: torch.Tensor, **kwargs: torch.Tensor) -> None:
            nonlocal now_s
            now_s += next(calls)

        monkeypatch.setattr(torch, "mm", slow)
        return probe.device_speed(device)

    monkeypatch.setitem(probe._EDGE, "cpu", 8)
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now_s))
    assert (taking(2.0), taking(4.0), taking(6.0, 2.0)) == (0.5, 0.25, 0.5)


def test_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few products, as large as a CPU does in milliseconds; they take some of the clock's time."""
    edges, multiply = list[int](), torch.mm

    def seen(left: torch.Tensor, right: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        edges.append(len(left))
        return multiply(left, right, **kwargs)

    monkeypatch.setattr(torch, "mm", seen)
    assert 0 < probe.device_speed(torch.device("cpu")) < float("inf")
    assert sum(edge**3 for edge in edges) <= 10 * 512**3


def test_it_multiplies_random_numbers_and_draws_none_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power that a device draws, and so its clock, depends on the numbers: constants flatter it."""
    multiplied: list[torch.Tensor] = []
    multiply = torch.mm

    def seen(left: torch.Tensor, right: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        multiplied.extend((left, right))
        return multiply(left, right, **kwargs)

    monkeypatch.setattr(torch, "mm", seen)
    before = torch.random.get_rng_state()
    probe.device_speed(torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert min(matrix.float().unique().numel() for matrix in multiplied) > 1000
