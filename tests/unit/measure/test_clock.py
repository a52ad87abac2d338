"""The split of a step's time."""

from __future__ import annotations

import pytest
import torch

from paceline.measure.clock import Clock, Transfer


class Host:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def take(self, seconds: float) -> None:
        self.now_s += seconds


def make() -> tuple[Clock, Host]:
    host = Host()
    return Clock(torch.device("cpu"), lambda: host.now_s), host


def test_waiting_is_what_exceeds_the_fastest_transfer() -> None:
    clock, host = make()
    for seconds in (2.0, 6.0, 2.0):
        with clock.transfer("receive", 100):
            host.take(seconds)
    with clock.transfer("receive", 200):  # another size: nothing to compare it with
        host.take(5.0)
    with clock.compute():
        host.take(3.0)
    host.take(1.0)
    assert clock.read() == pytest.approx(
        {"compute_s": 3.0, "communication_s": 3 * 2.0 + 5.0, "idle_s": 4.0, "other_s": 1.0, "wall_s": 19.0}
    )


def test_reading_starts_anew() -> None:
    clock, host = make()
    with clock.compute():
        host.take(1.0)
    assert clock.read()["compute_s"] == 1.0
    host.take(2.0)
    assert clock.read() == {"compute_s": 0, "communication_s": 0, "idle_s": 0, "other_s": 2.0, "wall_s": 2.0}


def test_the_clock_of_the_host_is_real_unless_another_one_is_given() -> None:
    clock = Clock(torch.device("cpu"))
    with clock.compute():
        pass
    read = clock.read()
    assert 0 < read["compute_s"] <= read["wall_s"]


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
