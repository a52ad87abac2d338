"""The speed of a device by a short matrix product."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.measure import probe


def test_half_the_speed_is_half_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose products take 40 ms against one of 20 ms; one that is disturbed now and then counts as it is."""
    device, multiply = torch.device("cpu"), torch.mm

    def taking(*seconds: float) -> float:
        calls = iter(seconds * 100)

        def slow(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            time.sleep(next(calls))
            return multiply(*args, **kwargs)

        monkeypatch.setattr(torch, "mm", slow)
        return probe.device_speed(device)

    monkeypatch.setitem(probe._EDGE, "cpu", 8)
    fast, slow, disturbed = taking(0.02), taking(0.04), taking(0.06, 0.02)
    assert fast == pytest.approx(2 * slow, rel=0.2)
    assert disturbed == pytest.approx(fast, rel=0.2)


def test_it_is_short() -> None:
    begin = time.perf_counter()
    assert probe.device_speed(torch.device("cpu")) > 0
    assert time.perf_counter() - begin < 2


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
