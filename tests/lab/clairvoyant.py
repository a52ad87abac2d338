"""A contestant that knows the rates: before each step it takes the schedule that is the fastest at those of the moment.

It measures nothing, plans nothing in the way of a step, and switches for nothing: what a planner that sees only what
has been can at best come to.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.emulation import Emulation
from lab.rates import read_trace
from paceline.schedules.costs import Costs, Link
from paceline.schedules.families import eager, gpipe, kfkb, one_f_one_b
from paceline.schedules.schedule import Schedule
from paceline.schedules.simulate import simulate
from paceline.schedules.split_families import zbh1, zbh2

Rates = tuple[float | None, ...]


def schedules(num_ranks: int, num_micro_batches: int) -> list[Schedule]:
    """Those of one stage a rank that ``"adaptive"`` knows, but for orders made for the moment."""
    shape = num_ranks, num_micro_batches
    return [
        one_f_one_b(*shape),
        zbh1(*shape),
        zbh2(*shape),
        *(eager(*shape, slack) for slack in (0.5, 1.0, 1.5, 2.0, 3.0)),
        *(kfkb(*shape, k) for k in (2, 4, 8)),
        gpipe(*shape),
    ]


class Clairvoyant:
    """Says which schedule is the best in the step that begins.

    Args:
        trace: a file of rates, which are played from the end of the warm-up on.
        warmup: calls before that.
    """

    def __init__(self, trace: Path, emulation: Emulation, warmup: int = 2) -> None:
        self.schedules = schedules(emulation.num_ranks, emulation.num_micro_batches)
        self._emulation, self._warmup = emulation, warmup
        rates: list[float | None] = [None] * emulation.num_ranks
        self._times, self._rates = [-inf], [tuple(rates)]
        for change in read_trace(trace):
            rates[change.host] = change.mbit
            self._times.append(change.time_s)
            self._rates.append(tuple(rates))
        self._best = {each: self._choose(each) for each in dict.fromkeys(self._rates)} if dist.get_rank() == 0 else {}
        self._begun_s = 0.0
        self._number = torch.zeros(1, dtype=torch.int64)

    def __call__(self) -> Schedule:
        """The same on all ranks."""
        self._warmup -= 1
        if self._warmup == -1:
            self._begun_s = time.perf_counter()
        passed_s = time.perf_counter() - self._begun_s if self._warmup < 0 else -1.0
        if dist.get_rank() == 0:
            self._number.fill_(self._best[self._rates[bisect_right(self._times, passed_s) - 1]])
        dist.broadcast(self._number, 0)
        return self.schedules[int(self._number)]

    def _choose(self, rates: Rates) -> int:
        emulation, stages = self._emulation, self._emulation.num_ranks
        sent = tuple(inf if rate is None else rate * 1e6 / 8 for rate in rates)
        costs = Costs(
            tuple(emulation.forward_s),
            tuple(emulation.backward_s),
            (float(emulation.message_bytes),) * (stages - 1),
            tuple(Link(sent[stage]) for stage in range(stages - 1)),
            tuple(Link(sent[stage + 1]) for stage in range(stages - 1)),
            hosts=tuple(range(stages)),
            egress_bytes_per_s=sent,
        )
        seconds = [simulate(schedule, costs).makespan_s for schedule in self.schedules]
        return seconds.index(min(seconds))


def clairvoyant_step(engine: Any, trace: Path, emulation: Emulation, step: Callable[[], Any]) -> Callable[[], Any]:
    """``step`` of an engine of ours, each with the schedule that is the best at its beginning."""
    chosen = Clairvoyant(trace, emulation)

    def run() -> Any:
        schedule = chosen()
        if schedule.name != engine.schedule.name:
            engine.set_schedule(schedule)
        return step()

    return run
