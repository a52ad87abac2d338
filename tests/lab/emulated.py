"""The job that runs on every host of a lab: emulated training, contestants in turn, timed.

    emulated.py --contestant stock --contestant kfkb2 --forward-s 0.02 --backward-s 0.04 --message-bytes 524288
        --micro-batches 16 --rounds 3 --steps 4 --output steps.jsonl

With ``--layers 24 --speeds 4 2 1 1`` the times are those of layers on a device of speed 1, and the ranks' devices are
unequal; ``--speed-changes [[40, 1, 0.5]]`` makes them faster or slower while training goes on.

All contestants live in the same processes. First each runs its warm-up steps, in which connections are made; then, in
every round, each runs ``--steps`` steps, or as many as begin within ``--seconds``. Rank 0 writes one JSON line a step:
contestant, round (-1 in the warm-up), step (of the contestant), seconds, and what :data:`lab.contestants.Step` says; in
the warm-up also ``kept``, by rank the :class:`lab.kept.Peaks` of the step. When the warm-up is over, a file
``OUTPUT.begun`` appears. With ``--mbit 400 100`` all rounds are run once at each of these rates, which the line then
has.

Contestants without a flush take as long for a step as lies between the moments at which the last rank was done with
that step and with the one before. In every round they first run two steps more, which count as warm-up, to be past the
start of a run; and they are flushed at its end, which is in no step's seconds.

Before each step of the others rank 0 tells all whether there is one more: a message of one value, with which all agree
on the end of a run of so many seconds. It belongs to the step's seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import IO, Any

import deepspeed
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lab.asynchronous import SETTLING_STEPS, AsynchronousStep
from lab.contestants import Step, label_of, make
from lab.device import DEVICE
from lab.emulation import OPTIMIZERS, Emulation, SpeedChange
from lab.hosts import set_own_rate
from lab.kept import KEEPING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contestant", action="append", required=True, help="again for each one; see lab.contestants")
    parser.add_argument("--forward-s", type=float, nargs="+", required=True, help="one value, or one a layer")
    parser.add_argument("--backward-s", type=float, nargs="+", required=True, help="one value, or one a layer")
    parser.add_argument("--weight-s", type=float, nargs="+", default=[], help="part of each backward; default: half")
    parser.add_argument("--message-bytes", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--layers", type=int, help="default: one a rank")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0], help="one value, or one a rank")
    parser.add_argument("--speed-changes", type=json.loads, default=[], help="[[step of a contestant, rank, speed], …]")
    parser.add_argument("--noise", type=float, default=0.0, help="share of each computation's time")
    parser.add_argument("--layer-bytes", type=int, default=0, help="of parameters that only have to be moved")
    parser.add_argument("--frozen", action="store_true", help="those are not trained")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="SGD")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=2, help="steps of each contestant before the first round")
    parser.add_argument("--steps", type=int, default=4, help="of each contestant in a round")
    parser.add_argument("--seconds", type=float, help="of each contestant in a round, instead of --steps")
    parser.add_argument("--mbit", type=float, nargs="+", default=[], help="all rounds once at each of these rates")
    parser.add_argument("--output", type=Path, required=True, help="written by rank 0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for half a minute
    deepspeed.init_distributed("gloo")
    emulation = Emulation.of(
        dist.get_world_size(),
        args.forward_s,
        args.backward_s,
        args.message_bytes,
        args.micro_batches,
        num_layers=args.layers,
        speeds=args.speeds,
        speed_changes=tuple(SpeedChange(*change) for change in args.speed_changes),
        noise=args.noise,
        layer_bytes=args.layer_bytes,
        is_frozen=args.frozen,
        optimizer=args.optimizer,
        weight_s=args.weight_s,
    )
    DEVICE.set_noise(emulation.noise, seed=dist.get_rank())
    contestants = {label_of(name): make(name, emulation) for name in args.contestant}
    with args.output.open("w") if dist.get_rank() == 0 else open(os.devnull, "w") as lines:
        race = Race(contestants, emulation, lines)
        for name in contestants:
            race.run(name, -1, args.warmup, None)
        dist.barrier()
        if dist.get_rank() == 0:
            args.output.with_name(args.output.name + ".begun").touch()
        for rate in args.mbit or [None]:
            race.set_rate(rate)
            for number, name in product(range(args.rounds), contestants):
                race.run(name, number, args.steps, args.seconds)
    dist.barrier()
    dist.destroy_process_group()


class Race:
    """Contestants that take turns. The devices are what they are in the step that the contestant is at."""

    def __init__(self, contestants: dict[str, Step], emulation: Emulation, lines: IO[str]) -> None:
        self.contestants = contestants
        self.emulation = emulation
        self.lines = lines
        self.num_steps = dict.fromkeys(contestants, 0)
        self._flag = torch.zeros(1)
        self._mbit: float | None = None

    def set_rate(self, mbit: float | None) -> None:
        """From now on every host can send so much; None: what it could before."""
        self._mbit = mbit
        if mbit is not None:
            set_own_rate(mbit)
        dist.barrier()

    def run(self, name: str, number: int, num_steps: int, seconds: float | None) -> None:
        """Steps of one contestant in one round: ``num_steps``, or those that begin within ``seconds``."""
        contestant = self.contestants[name]
        if isinstance(contestant, AsynchronousStep) and not contestant.is_flushed:
            if seconds is not None:
                raise ValueError(f"{name} in rounds of {seconds:g} s: its ranks agree on nothing in a step, give steps")
            self._run_on(name, contestant, number, num_steps)
            return
        began = time.perf_counter()
        for _ in self._agreed(began, num_steps, seconds):
            KEEPING.forget()
            said = self._step(name)
            ended = time.perf_counter()
            if number < 0:
                said["kept"] = _of_ranks(KEEPING.peaks)
            self._write(name, number, ended - began, said)
            began = ended if number >= 0 else time.perf_counter()

    def _run_on(self, name: str, contestant: AsynchronousStep, number: int, num_steps: int) -> None:
        """Steps that nobody waits for in between."""
        dist.barrier()
        began = time.perf_counter()
        said, ended = [], []
        for _ in range(SETTLING_STEPS + num_steps):
            said.append(self._step(name))
            ended.append(time.perf_counter() - began)
        losses = contestant.flush()
        ends = [0.0, *map(max, zip(*_of_ranks(ended), strict=True))]
        for index, (one, loss, (before, end)) in enumerate(zip(said, losses, pairwise(ends), strict=True)):
            counts = index >= SETTLING_STEPS
            self._write(name, number if counts else -1, end - before, {**one, "loss": loss})

    def _step(self, name: str) -> dict[str, Any]:
        number = self.num_steps[name]
        DEVICE.begin_step(self.emulation.speeds_at(number)[dist.get_rank()])
        said = self.contestants[name]()
        self.num_steps[name] += 1
        return {"step": number, **said}

    def _write(self, name: str, number: int, seconds: float, said: dict[str, Any]) -> None:
        line = {"contestant": name, "round": number, "seconds": seconds, "mbit": self._mbit}
        self.lines.write(json.dumps({**line, **said}) + "\n")
        self.lines.flush()

    def _agreed(self, began: float, num_steps: int, seconds: float | None) -> Iterator[None]:
        done = 0
        while True:
            more = done < num_steps if seconds is None else time.perf_counter() - began < seconds
            self._flag.fill_(more)
            dist.broadcast(self._flag, 0)
            if not self._flag:
                return
            yield
            done += 1


def _of_ranks(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


if __name__ == "__main__":
    main()
