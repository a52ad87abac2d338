"""Emulated training on the hosts of a lab: starts the job, plays rates to it, reads what it measured."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.emulation import Emulation
from lab.hosts import Hosts
from lab.rates import Change, Player

JOB = Path(__file__).with_name("emulated.py")
_START_S = 240.0
"""Ranks import torch and more, all at once on few cores."""


def train(
    hosts: Hosts,
    contestants: Sequence[str],
    emulation: Emulation,
    *,
    rounds: int = 1,
    warmup: int = 2,
    steps: int = 4,
    seconds: float | None = None,
    trace: Sequence[Change] = (),
    rates: Sequence[float] = (),
    timeout: float | None = None,
) -> list[dict[str, Any]]:
    """Run ``contestants`` in turn, a rank a host; one record a step, those of the warm-up with round -1.

    Args:
        rounds: times that each contestant has its turn.
        warmup: steps of each contestant before the first round.
        steps: of each contestant in a round.
        seconds: of each contestant in a round, instead of ``steps``.
        trace: changes of rates, played from the end of the warm-up on.
        rates: all rounds are run once at each of these, which the hosts' sending sides are limited to; Mbit/s.
        timeout: seconds until the job is killed. By default ten times what compute takes, and the start.

    Raises:
        HostError: the job failed.
    """
    if timeout is None:
        slowest = 10 * emulation.bound_s
        of_round = (steps + 2) * slowest if seconds is None else seconds
        turns = warmup * slowest + rounds * of_round * max(1, len(rates))
        timeout = _START_S + len(contestants) * turns
    with tempfile.TemporaryDirectory(prefix="lab-training-") as folder, contextlib.ExitStack() as stack:
        output = Path(folder, "steps.jsonl")
        command = [sys.executable, str(JOB), "--output", str(output)]
        for name in contestants:
            command += ["--contestant", name]
        command += ["--forward-s", *map(str, emulation.forward_s), "--backward-s", *map(str, emulation.backward_s)]
        command += ["--weight-s", *map(str, emulation.weight_s)]
        command += ["--message-bytes", str(emulation.message_bytes)]
        command += ["--micro-batches", str(emulation.num_micro_batches)]
        command += ["--layers", str(emulation.num_layers), "--speeds", *map(str, emulation.speeds)]
        command += ["--speed-changes", json.dumps(emulation.speed_changes), "--noise", str(emulation.noise)]
        command += ["--layer-bytes", str(emulation.layer_bytes), "--optimizer", emulation.optimizer]
        command += ["--frozen"] if emulation.is_frozen else []
        command += ["--rounds", str(rounds), "--warmup", str(warmup), "--steps", str(steps)]
        if seconds is not None:
            command += ["--seconds", str(seconds)]
        if rates:
            command += ["--mbit", *map(str, rates)]
        if trace:
            begun = output.with_name(output.name + ".begun")
            stack.enter_context(Player(hosts, trace, begun.exists))
        hosts.run(command, timeout=timeout)
        return [json.loads(line) for line in output.read_text().splitlines()]


def mbit(text: str) -> float | None:
    """A rate of a command line: Mbit/s, or ``off``."""
    return None if text == "off" else float(text)


def seconds_a_step(records: Sequence[dict[str, Any]], contestant: str) -> list[float]:
    """What the steps of ``contestant`` took, the warm-up left out."""
    return [r["seconds"] for r in records if r["contestant"] == contestant and r["round"] >= 0]


def median_step_s(records: Sequence[dict[str, Any]], contestant: str) -> float:
    """The median of :func:`seconds_a_step`."""
    return statistics.median(seconds_a_step(records, contestant))
