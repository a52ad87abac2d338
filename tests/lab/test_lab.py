"""The lab: hosts, rates, and emulated training on them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lab.emulation import LEARNING_RATE, Emulation, loss
from lab.hosts import DEVICE, HostError, Hosts, HostTimeout, available
from lab.rates import Change, Player, preemption_trace, read_trace, write_trace
from lab.training import seconds_a_step, train
from lab.transfer import PAYLOAD_SHARE, goodput_bytes_per_s, transfer_s

needs_hosts = pytest.mark.skipif(bool(available()), reason=available() or "-")


def marked() -> tuple[str, str, str]:
    """An environment variable that nobody else has: its name, its value, and both as the kernel shows them."""
    name, value = "LAB_TEST", f"{os.getpid()}-{time.monotonic_ns()}"
    return name, value, f"{name}={value}"


def processes_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # it has ended
                continue
            if mark.encode() in environment:
                found.append(int(entry.name))
    return found


def wait_until(condition) -> bool:
    deadline = time.monotonic() + 5.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


# -- hosts ---------------------------------------------------------------------------------------------------------


@needs_hosts
def test_ranks_have_hosts_of_their_own():
    command = ["sh", "-c", "echo $RANK $WORLD_SIZE $LOCAL_RANK $GLOO_SOCKET_IFNAME $MASTER_ADDR $EXTRA; hostname -I"]
    with Hosts(3) as hosts, Hosts(2) as others:
        outputs = hosts.run(command, env={"EXTRA": "more"})
        assert [output.split() for output in outputs] == [
            [str(rank), "3", "0", DEVICE, "10.77.0.1", "more", f"10.77.0.{rank + 1}"] for rank in range(3)
        ]
        assert len(others.run(["true"])) == 2


@needs_hosts
def test_namespaces_go_when_their_owner_is_killed():
    """However a run ends: the holders of the namespaces and the ranks go with it."""
    name, value, mark = marked()
    script = "from lab.hosts import Hosts\nwith Hosts(2) as hosts: hosts.run(['sh', '-c', 'exec sleep 100'])"
    environment = {**os.environ, name: value, "PYTHONPATH": str(Path(__file__).parent.parent)}
    owner = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        assert wait_until(lambda: len(processes_with(mark)) >= 6)  # owner, switch, two hosts, two ranks
    finally:
        owner.kill()
        owner.wait()
    assert wait_until(lambda: not processes_with(mark)), processes_with(mark)


@needs_hosts
def test_a_failure_on_one_host_ends_the_job_and_is_shown():
    name, value, mark = marked()
    with Hosts(3) as hosts:
        began = time.monotonic()
        with pytest.raises(HostError, match="host 1: exit status 3\nthe reason") as caught:
            hosts.run(["sh", "-c", "test $RANK != 1 || { echo the reason; exit 3; }; sleep 60"], env={name: value})
        assert caught.value.host == 1
        assert time.monotonic() - began < 10
        assert not processes_with(mark)


@needs_hosts
def test_a_job_that_takes_too_long_is_ended():
    with Hosts(2) as hosts, pytest.raises(HostTimeout, match=r"hosts \[1\] not done after 0\.3 s\n.*\nbusy"):
        hosts.run(["sh", "-c", "test $RANK = 0 || { echo busy; sleep 60; }"], timeout=0.3)


@needs_hosts
def test_leaving_the_lab_ends_jobs_that_other_threads_run():
    name, value, mark = marked()
    errors = []

    def run() -> None:
        try:
            hosts.run(["sleep", "60"], env={name: value})
        except HostError as error:
            errors.append(error)

    with Hosts(1) as hosts:
        thread = threading.Thread(target=run)
        thread.start()
        assert wait_until(lambda: bool(processes_with(mark)))
    thread.join(5.0)
    assert len(errors) == 1


# -- rates ---------------------------------------------------------------------------------------------------------


@needs_hosts
def test_a_rate_limits_what_a_host_sends_and_may_change():
    with Hosts(2) as hosts:
        free = transfer_s(hosts, 0, 1, 4 << 20)
        hosts.set_rate(0, 80)
        limited = 8e-6 * goodput_bytes_per_s(hosts, 0, 1, 4 << 20, 128 << 10)
        assert 0.7 * 80 * PAYLOAD_SHARE < limited < 1.05 * 80 * PAYLOAD_SHARE
        assert transfer_s(hosts, 1, 0, 4 << 20) < 0.5 * 8 * (4 << 20) / 80e6, "the other direction is free"
        hosts.set_rate(0, None)
        assert transfer_s(hosts, 0, 1, 4 << 20) < 0.5 * 8 * (4 << 20) / 80e6
        assert free < 0.5 * 8 * (4 << 20) / 80e6


def test_a_host_must_have_a_positive_rate():
    with pytest.raises(ValueError, match="rate 0 Mbit/s of host 1: it must be positive, or None for no limit"):
        Hosts(2).set_rate(1, 0)


class Noted:
    """Stands for hosts: notes what it is told and when."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, int, float | None]] = []

    def set_rate(self, host: int, mbit: float | None) -> None:
        if host > 1:
            raise RuntimeError("no such host")
        self.heard.append((time.monotonic(), host, mbit))


def test_the_player_plays_from_the_beginning_of_the_job():
    noted, begun = Noted(), threading.Event()
    changes = [Change(0.0, 0, 100), Change(0.2, 1, None), Change(60.0, 0, 200)]
    with Player(noted, changes, begun.is_set) as player:
        time.sleep(0.1)
        assert not noted.heard
        began = time.monotonic()
        begun.set()
        assert wait_until(lambda: player.num_played == 2)
    assert [(host, rate) for _, host, rate in noted.heard] == [(0, 100), (1, None)]
    assert noted.heard[1][0] - began >= 0.19


def test_the_player_tells_what_went_wrong():
    with pytest.raises(RuntimeError, match="no such host"), Player(Noted(), [Change(0.0, 2, 100)]) as player:
        player.join(5.0)


@needs_hosts
def test_the_player_changes_a_link_while_it_is_used():
    with Hosts(2, mbit=40) as hosts:
        at_40 = transfer_s(hosts, 0, 1, 3 << 20)
        with Player(hosts, [Change(0.0, 0, 40), Change(0.1, 0, None)]):
            assert transfer_s(hosts, 0, 1, 3 << 20) < 0.7 * at_40
        assert hosts.rates == [None, 40]


def test_a_trace_is_the_same_after_writing_and_reading(tmp_path):
    trace = preemption_trace(3, 60.0, seed=1)
    write_trace(tmp_path / "trace.csv", trace)
    assert read_trace(tmp_path / "trace.csv") == trace
    assert {change.mbit for change in trace} >= {100, None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host,mbit\n", "its first line must be time_s,host,mbit"),
        ("time_s,host,mbit\n0,0,fast\n", "line 2: .* is not"),
        ("time_s,host,mbit\n5,0,off\n1,0,100\n", "line 3: 1.0 s is before the line above it"),
    ],
)
def test_a_trace_with_a_fault_is_refused(tmp_path, text, message):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "trace.csv")


def test_a_preemption_trace_keeps_every_host_moving():
    trace = preemption_trace(4, 600.0, seed=0)
    assert trace == preemption_trace(4, 600.0, seed=0) != preemption_trace(4, 600.0, seed=1)
    for host in range(4):
        own = [change for change in trace if change.host == host]
        assert own[0].time_s == 0.0
        assert own[-1].time_s > 600 - 16
        for one, following in itertools.pairwise(own):
            assert one.mbit != following.mbit
            assert 3.9 < following.time_s - one.time_s < 16.1


# -- emulated training ---------------------------------------------------------------------------------------------


def alone(emulation: Emulation, steps: int) -> list[float]:
    """The same layers in one process."""
    layers = torch.nn.Sequential(*(emulation.layer(rank) for rank in range(emulation.num_ranks)))
    optimizer = torch.optim.SGD(layers.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(steps):
        each = [loss(layers(inputs), labels) for inputs, labels in emulation.batches]
        mean = torch.stack(each).mean()
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses


@needs_hosts
def test_emulated_training_computes_what_one_process_does_and_takes_its_time():
    emulation = Emulation(forward_s=(0.01, 0.005), backward_s=(0.01, 0.02), message_bytes=1 << 14, num_micro_batches=4)
    with Hosts(2) as hosts:
        records = train(hosts, ["stock", "torch-1f1b"], emulation, warmup=1, steps=2)
    for name in ("stock", "torch-1f1b"):
        losses = [record["loss"] for record in records if record["contestant"] == name]
        assert losses == pytest.approx(alone(emulation, 3), rel=1e-5)
        assert losses[0] > losses[2]
        seconds = seconds_a_step(records, name)
        assert len(seconds) == 2
        assert min(seconds) >= 0.95 * emulation.bound_s


def test_an_emulation_needs_as_many_forward_times_as_backward_times():
    with pytest.raises(ValueError, match="2 forward and 1 backward times: give one of each a rank"):
        Emulation((0.1, 0.1), (0.1,), 1024, 4)
