"""The lab: hosts, rates, and emulated training on them."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lab.contestants import num_chunks_of, section_of
from lab.device import DEVICE as ACCELERATOR
from lab.emulation import LEARNING_RATE, EmulatedLayer, Emulation, SpeedChange, loss
from lab.hosts import DEVICE, HostError, Hosts, HostTimeout, available
from lab.partitions import best, step_s
from lab.rates import Change, Player, preemption_trace, read_trace, write_trace
from lab.training import seconds_a_step, train
from lab.transfer import PAYLOAD_SHARE, goodput_bytes_per_s, transfer_s
from paceline.optim.linear_layers import Deferral
from paceline.schedules.split_families import dualpipev_split, vmin, zbh1, zbv
from paceline.schedules.verify import peaks
from support.ranks import PATIENCE_S

LONG_S = 3600
"""Nobody waits for it."""

needs_hosts = pytest.mark.skipif(bool(available()), reason=available() or "-")


def marked() -> tuple[str, str, str]:
    """An environment variable that nobody else has: its name, its value, and both as the kernel shows them."""
    name, value = "LAB_TEST", f"{os.getpid()}-{time.monotonic_ns()}"
    return name, value, f"{name}={value}"


def processes_with(mark: str) -> list[int]:
    """Processes with ``mark`` in their environment.

    One that executes another program at this moment is missing: the kernel shows it without an environment.
    """
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
    deadline = time.monotonic() + PATIENCE_S
    while not (is_met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_met


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
    script = f"from lab.hosts import Hosts\nwith Hosts(2) as hosts: hosts.run(['sleep', '{LONG_S}'], timeout={LONG_S})"
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
        command = ["sh", "-c", f"test $RANK != 1 || {{ echo the reason; exit 3; }}; sleep {LONG_S}"]
        with pytest.raises(HostError, match="host 1: exit status 3\nthe reason") as caught:
            hosts.run(command, env={name: value}, timeout=PATIENCE_S)
        assert caught.value.host == 1
        assert wait_until(lambda: not processes_with(mark))  # what a rank has started ends shortly after it


@needs_hosts
def test_a_job_that_takes_too_long_is_ended():
    with Hosts(2) as hosts:
        for timeout in (0.3, 6.0, 120.0):  # the other rank needs the time to end, and this one to say something
            with pytest.raises(HostTimeout, match=rf"hosts \[.*1\] not done after {timeout:g} s\n") as caught:
                hosts.run(["sh", "-c", f"test $RANK = 0 || {{ echo busy; sleep {LONG_S}; }}"], timeout=timeout)
            if found := re.search(r"hosts \[1\] .*\n.*\nbusy", str(caught.value)):
                break
        assert found, caught.value


@needs_hosts
def test_leaving_the_lab_ends_jobs_that_other_threads_run():
    name, value, mark = marked()
    errors = []

    def run() -> None:
        try:
            hosts.run(["sleep", str(LONG_S)], env={name: value}, timeout=LONG_S)
        except HostError as error:
            errors.append(error)

    with Hosts(1) as hosts:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert wait_until(lambda: bool(processes_with(mark)))
    thread.join(PATIENCE_S)
    assert len(errors) == 1


# -- rates ---------------------------------------------------------------------------------------------------------


def is_reached(measure: Callable[[], bool]) -> bool:
    """Whether one of some measurements is as it should be: other processes make a transfer longer now and then."""
    return any(measure() for _ in range(20))


@needs_hosts
def test_a_rate_limits_what_a_host_sends_and_may_change():
    num_bytes, mbit = 4 << 20, 40
    limited_s = 8e-6 * num_bytes / mbit

    def is_free(sender: int) -> bool:
        return transfer_s(hosts, sender, 1 - sender, num_bytes) < 0.5 * limited_s

    def is_at_the_rate() -> bool:
        reached = 8e-6 * goodput_bytes_per_s(hosts, 0, 1, num_bytes, 128 << 10) / (mbit * PAYLOAD_SHARE)
        assert reached < 1.05
        return reached > 0.7

    with Hosts(2) as hosts:
        assert is_reached(lambda: is_free(0))
        hosts.set_rate(0, mbit)
        assert is_reached(is_at_the_rate)
        assert is_reached(lambda: is_free(1)), "the other direction is free"
        hosts.set_rate(0, None)
        assert is_reached(lambda: is_free(0))


@needs_hosts
def test_a_rank_can_limit_its_own_host():
    limit = "from lab.hosts import set_own_rate; set_own_rate(80)"
    with Hosts(2) as hosts:
        outputs = hosts.run(
            ["sh", "-c", f"test $RANK = 1 || '{sys.executable}' -c '{limit}'; tc qdisc show dev {DEVICE}"],
            env={"PYTHONPATH": str(Path(__file__).parent.parent)},
        )
    assert "tbf" in outputs[0]
    assert "rate 80Mbit" in outputs[0]
    assert "tbf" not in outputs[1]


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
        player.join(PATIENCE_S)


@needs_hosts
def test_the_player_changes_a_link_while_it_is_used():
    with Hosts(2, mbit=10) as hosts:
        at_10 = transfer_s(hosts, 0, 1, 3 << 20)

        def is_shorter() -> bool:
            with Player(hosts, [Change(0.0, 0, 10), Change(0.1, 0, None)]) as player:
                taken_s = transfer_s(hosts, 0, 1, 3 << 20)
                player.join(PATIENCE_S)
            return taken_s < 0.7 * at_10

        assert is_reached(is_shorter)
        assert hosts.rates == [None, 10]


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


def alone(emulation: Emulation, steps: int, share: int = 1) -> list[float]:
    """The same layers in one process, each in ``share`` parts."""
    ranks = [rank for rank in range(emulation.num_ranks) for _ in range(share)]
    layers = torch.nn.Sequential(*(emulation.layer(rank, share) for rank in ranks))
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
        records = train(hosts, ["stock", "torch-1f1b"], emulation, warmup=1, steps=2, timeout=PATIENCE_S)
    for name in ("stock", "torch-1f1b"):
        losses = [record["loss"] for record in records if record["contestant"] == name]
        assert losses == pytest.approx(alone(emulation, 3), rel=1e-5)
        assert losses[0] > losses[2]
        seconds = seconds_a_step(records, name)
        assert len(seconds) == 2
        assert min(seconds) >= 0.95 * emulation.bound_s


@needs_hosts
def test_split_backwards_compute_the_same_and_keep_what_the_schedule_says():
    emulation = Emulation.of(2, [0.002], [0.004], 1 << 12, 4)
    names = ["1f1b", "zbh1", "zbv", "vmin", "our-dualpipev-split", "torch-zbv", "torch-dualpipev"]
    with Hosts(2) as hosts:
        records = train(hosts, names, emulation, warmup=2, steps=1, timeout=PATIENCE_S)
    own = {name: [record for record in records if record["contestant"] == name] for name in names}
    whole = {name: [record["loss"] for record in own[name]] for name in names}
    assert whole["1f1b"] == pytest.approx(alone(emulation, 3), rel=1e-5)
    assert whole["zbh1"] == whole["1f1b"]
    halves = alone(emulation, 3, share=2)
    for name in ("zbv", "vmin", "our-dualpipev-split", "torch-zbv", "torch-dualpipev"):
        assert whole[name] == pytest.approx(halves, rel=1e-5)
    for name, make in {"zbh1": zbh1, "zbv": zbv, "vmin": vmin, "our-dualpipev-split": dualpipev_split}.items():
        expected = [list(peaks(order)) for order in make(2, 4).orders]
        assert own[name][1]["kept"] == expected, name
        assert max(deferred for _, deferred, _ in expected) > 0


@needs_hosts
def test_unequal_devices_and_layers_that_are_cut_otherwise():
    emulation = Emulation.of(
        2, [0.005], [0.005], 1 << 14, 4, num_layers=4, speeds=[3, 1], layer_bytes=1 << 10, optimizer="Adam",
        speed_changes=(SpeedChange(4, 1, 0.1),),
    )  # fmt: skip
    names = ["stock-parameters", 'uneven={"partition": [0, 3, 4]}']
    with Hosts(2) as hosts:
        records = train(hosts, names, emulation, warmup=1, steps=6, timeout=PATIENCE_S)
    losses, seconds = {}, {}
    for label, boundaries in (("stock-parameters", (0, 2, 4)), ("uneven", (0, 3, 4))):
        own = [record for record in records if record["contestant"] == label]
        assert {tuple(record["boundaries"]) for record in own} == {boundaries}
        losses[label] = [record["loss"] for record in own]
        seconds[label] = [record["seconds"] for record in own]
        for step in range(7):
            assert seconds[label][step] > 0.95 * step_s(emulation, boundaries, emulation.speeds_at(step))
    assert losses["uneven"] == losses["stock-parameters"], "where layers are makes no difference"
    assert losses["uneven"][-1] < losses["uneven"][0]
    uniform_s, uneven_s = (step_s(emulation, parts, emulation.speeds_at(4)) for parts in ((0, 2, 4), (0, 3, 4)))

    def is_shorter() -> bool:
        if min(seconds["uneven"][4:]) < 0.9 * uniform_s:
            return True
        with Hosts(2) as hosts:
            records = train(hosts, names[1:], emulation, warmup=1, steps=6, timeout=PATIENCE_S)
        seconds["uneven"] = [record["seconds"] for record in records]
        return False

    assert is_reached(is_shorter), f"what a busy machine may make of {uneven_s}"


@pytest.fixture
def device():
    yield ACCELERATOR
    ACCELERATOR.begin_step(1.0)
    ACCELERATOR.set_noise(0.0, 0)


def least_s(layers: torch.nn.Module, kind: str, below_s: float = 0.0) -> float:
    """The shortest of some forwards or backwards: other processes may only make them longer.

    Of a few, or, with ``below_s``, of as many as it takes to see one that is shorter, within reason.
    """
    found = []
    for number in range(500 if below_s else 5):
        if number >= 5 and min(found) < below_s:
            break
        inputs = torch.zeros(1, 64, requires_grad=True)
        begin = time.perf_counter()
        output = layers(inputs)
        if kind == "backward":
            begin = time.perf_counter()
            output.sum().backward()
        found.append(time.perf_counter() - begin)
    return min(found)


@pytest.mark.parametrize(("kind", "work_s"), [("forward", 0.008), ("backward", 0.016)])
def test_a_layer_takes_the_time_of_the_device_that_it_is_on(device, kind, work_s):
    """Built before the device has its speed, as a layer is that comes from another rank."""
    emulation = Emulation.of(4, [0.002], [0.004], 256, 4, num_layers=24, speeds=[4, 2, 1, 1])
    layers = torch.nn.Sequential(*(emulation.layer(index) for index in range(4)))
    for speed in (1.0, 4.0):
        device.begin_step(speed)
        expected_s = work_s / speed
        assert least_s(layers, kind, 1.05 * expected_s) == pytest.approx(expected_s, rel=0.1, abs=0.0005)


def test_layers_of_a_stage_take_together_what_they_should(device):
    """What the host does between two layers is not added, what it does before the first one is."""

    class Busy(torch.nn.Module):
        def forward(self, hidden):
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass
            return hidden

    emulation = Emulation.of(1, [0.002], [0.002], 256, 1, num_layers=6)
    layers = [emulation.layer(index) for index in range(6)]
    between = torch.nn.Sequential(layers[0], *(part for layer in layers[1:] for part in (Busy(), layer)))
    assert 0.012 <= least_s(between, "forward", 0.0145) < 0.0145
    assert 0.013 <= least_s(torch.nn.Sequential(Busy(), *layers), "forward", 0.0155) < 0.0155


def shortest_s(run: Callable[[], Callable[[], object]], below_s: float) -> float:
    """Seconds that the result of ``run`` takes, as :func:`least_s`."""
    found = []
    for number in range(500):
        if number >= 3 and min(found) < below_s:
            break
        act = run()
        begin = time.perf_counter()
        act()
        found.append(time.perf_counter() - begin)
    return min(found)


def ours(layer: EmulatedLayer) -> tuple[Callable[[], object], Callable[[], object]]:
    deferral, left = Deferral(), []
    deferral.adopt(layer)
    deferral.is_on = True
    output = layer(torch.zeros(1, 64, requires_grad=True))

    def of_input() -> None:
        with deferral.collecting() as deferred:
            output.backward(torch.ones_like(output))
        left.append(deferred)

    return of_input, lambda: left.pop().run()


def torchs(layer: EmulatedLayer) -> tuple[Callable[[], object], Callable[[], object]]:
    inputs = torch.zeros(1, 64, requires_grad=True)
    output, left = layer(inputs), []
    weights = list(layer.parameters())

    def of_input() -> None:
        left.append(stage_backward_input([output], [torch.ones_like(output)], [inputs], iter(weights))[1])

    return of_input, lambda: stage_backward_weight(iter(weights), left.pop())


@pytest.mark.parametrize("split", [ours, torchs])
def test_a_gradient_of_a_weight_takes_its_time_where_it_is_computed(device, split):
    emulation = Emulation.of(1, [0.0], [0.02], 256, 1, weight_s=[0.005])

    def weight() -> Callable[[], object]:
        of_input, of_weight = split(emulation.layer(0))
        of_input()
        return of_weight

    assert 0.015 <= shortest_s(lambda: split(emulation.layer(0))[0], 0.017) < 0.017
    assert 0.004 <= shortest_s(weight, 0.007) < 0.007
    assert 0.02 <= least_s(emulation.layer(0), "backward", 0.022) < 0.022


def test_noise_is_within_its_share_and_the_same_again(device, monkeypatch):
    now_s = 100.0

    def sleep(seconds):
        nonlocal now_s
        now_s += max(seconds, 1e-5)

    monkeypatch.setattr("lab.device.time", SimpleNamespace(perf_counter=lambda: now_s, sleep=sleep))
    layer = Emulation.of(1, [0.004], [0.004], 256, 1).layer(0)
    taken = []
    for seed in (1, 1, 2):
        device.set_noise(0.5, seed)
        chance = random.Random(seed)
        expected = [0.004 * (1 + 0.5 * chance.uniform(-1, 1)) for _ in range(10)]
        taken.append([])
        for _ in range(10):
            begin_s = now_s
            layer(torch.zeros(1, 64))
            taken[-1].append(now_s - begin_s)
        assert taken[-1] == pytest.approx(expected, abs=2e-5)
    assert max(taken[0]) - min(taken[0]) > 0.001


def test_ballast_is_trained_and_costs_a_gradient_a_step(device):
    layer = Emulation.of(1, [0.0], [0.0], 256, 1, layer_bytes=4096).layer(0)
    assert layer.ballast.numel() == 1024
    for _ in range(2):
        device.begin_step(1.0)
        layer(torch.zeros(1, 64)).sum().backward()
        assert not layer.ballast.grad.any()
        layer.ballast.grad = None
        layer(torch.zeros(1, 64)).sum().backward()
        assert layer.ballast.grad is None
        assert layer.linear.weight.grad is not None


def test_a_layer_a_rank_is_a_special_case():
    emulation = Emulation.of(2, [0.01, 0.005], [0.02], 256, 4)
    assert (emulation.num_ranks, emulation.num_layers, emulation.speeds) == (2, 2, (1.0, 1.0))
    assert emulation.bound_s == pytest.approx(0.03 + 0.025 + 3 * 0.03)
    assert emulation == Emulation((0.01, 0.005), (0.02, 0.02), 256, 4)


def test_speeds_change_from_their_step_on():
    changes = (SpeedChange(6, 1, 2.0), SpeedChange(3, 1, 1.0), SpeedChange(3, 0, 5.0))
    emulation = Emulation.of(2, [0.01], [0.02], 256, 4, speeds=[4, 2], speed_changes=changes)
    assert [emulation.speeds_at(step) for step in (2, 3, 5, 6)] == [(4, 2), (5, 1), (5, 1), (5, 2)]
    forward_s, backward_s = emulation.stage_s((0, 1, 2), (5.0, 1.0))
    assert forward_s == pytest.approx((0.002, 0.01))
    assert backward_s == pytest.approx((0.004, 0.02))


def test_the_best_partitions_of_unequal_devices():
    """The figures of the specification: 24 layers, speeds 4:2:1:1, and what that is worth at 32 micro-batches."""
    emulation = Emulation.of(4, [1 / 3], [2 / 3], 256, 32, num_layers=24, speeds=[4, 2, 1, 1])
    ranking = best(emulation, count=5)
    assert [boundaries for _, boundaries in ranking][:2] == [(0, 12, 18, 21, 24), (0, 13, 19, 21, 24)]
    assert [seconds for seconds, _ in ranking] == sorted(step_s(emulation, boundaries) for _, boundaries in ranking)
    assert ranking[0][0] == pytest.approx(31 * 3 + 12)
    assert step_s(emulation, (0, 6, 12, 18, 24)) == pytest.approx(31 * 6 + 16.5) == emulation.bound_s
    assert emulation.bound_s / ranking[0][0] == pytest.approx(1.93, abs=0.005)


def test_a_network_makes_a_step_longer():
    emulation = Emulation.of(2, [0.01], [0.02], 1 << 16, 4)
    message_s = 8 * (1 << 16) / 100e6
    free_s, limited_s = step_s(emulation, (0, 1, 2)), step_s(emulation, (0, 1, 2), mbit=100)
    assert free_s + 2 * message_s < limited_s < free_s + 9 * message_s  # the first and the last at least; there are 8


def test_an_emulation_needs_as_many_forward_times_as_backward_times():
    with pytest.raises(ValueError, match="2 forward and 1 backward times: give one of each a layer"):
        Emulation((0.1, 0.1), (0.1,), 1024, 4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"speeds": [1.0] * 3}, "3 speeds for 2 ranks: give one, or one a rank"),
        ({"num_layers": 1}, "1 layers for 2 ranks: give each rank at least one"),
        ({"speeds": [0.0]}, "speed 0.0 of rank 0: it must be positive"),
        ({"speed_changes": (SpeedChange(0, 2, 1.0),)}, "speed 1.0 of rank 2: it must be positive, of one of 2 ranks"),
        ({"noise": 1.0}, "noise is 1.0: it must be at least 0 and less than 1"),
        ({"layer_bytes": 6}, "layer_bytes is 6: it must be a multiple of 4"),
        ({"weight_s": [0.2]}, r"weight_s is \(0.2, 0.2\): give a part of each of the backwards, \(0.1, 0.1\)"),
        ({"optimizer": "Lion"}, "optimizer is Lion: choose from SGD, Adam"),
    ],
)
def test_an_emulation_that_cannot_be(more, message):
    with pytest.raises(ValueError, match=message):
        Emulation.of(2, [0.1], [0.1], 1024, 4, **more)


def test_contestants_have_a_schedule_or_a_section():
    assert section_of('mine={"type": "kfkb", "k": 3}') == {"schedule": {"type": "kfkb", "k": 3}}
    assert section_of('mine={"partition": [0, 3, 4]}') == {"partition": [0, 3, 4]}
    assert section_of("kfkb2") == {"schedule": {"type": "kfkb", "k": 2}}
    assert [num_chunks_of(name) for name in ("stock", "zbh1", "zbv", 'mine={"type": "vmin"}', "torch-zbv")] == [
        1,
        1,
        2,
        2,
        2,
    ]
    with pytest.raises(ValueError, match="no contestant nobody: it must be one of stock, stock-parameters, "):
        section_of("nobody")
