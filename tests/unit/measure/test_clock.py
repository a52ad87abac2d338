"""The split of a step's time."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.measure.clock import Clock, Transfer


def test_waiting_is_what_exceeds_the_fastest_transfer() -> None:
    clock = Clock(torch.device("cpu"))
    for seconds in (0.02, 0.06, 0.02):
        with clock.transfer("receive", 100):
            time.sleep(seconds)
    with clock.transfer("receive", 200):  # another size: nothing to compare it with
        time.sleep(0.05)
    with clock.compute():
        time.sleep(0.03)
    read = clock.read()
    assert read["communication_s"] == pytest.approx(3 * 0.02 + 0.05, abs=0.02)
    assert read["idle_s"] == pytest.approx(0.04, abs=0.02)
    assert read["compute_s"] == pytest.approx(0.03, abs=0.02)
    parts = sum(read[name] for name in ("compute_s", "communication_s", "idle_s", "other_s"))
    assert parts == pytest.approx(read["wall_s"])


def test_reading_starts_anew() -> None:
    clock = Clock(torch.device("cpu"))
    with clock.compute():
        time.sleep(0.01)
    assert clock.read()["compute_s"] > 0
    assert clock.read()["compute_s"] == 0


def test_of_collectives_beside_the_computation_what_is_waited_for_counts() -> None:
    """Half of one lies in the wait from 10 to 12; the other, of 1 s within it, takes twice what the fastest takes."""
    clock = Clock(torch.device("cpu"))
    clock.add_wait(0.0, 1.0, [Transfer("values", 8, 0.0, 0.5)])
    read = clock.read()
    assert (read["communication_s"], read["idle_s"]) == (0.5, 0.5)
    transfers = [Transfer("gradients", 8, 9.5, 10.5), Transfer("values", 8, 10.5, 11.5), Transfer("norm", 8, 3.0, 4.0)]
    clock.add_wait(10.0, 12.0, transfers)
    read = clock.read()
    assert (read["communication_s"], read["idle_s"]) == (0.5 + 0.5, 1.0)
