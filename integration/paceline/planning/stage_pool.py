"""The numbers of stages that a run did not take, compared again by what it measures while it trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf, isfinite

from ..schedules.costs import Costs
from .cluster import Cluster, Fabric
from .stage_choice import Option, Stages, choose, predicted, scaled
from .workload import Workload

WORTH_A_RESTART = 0.2
"""Share of a step that another number of stages must save: predictions of different pipelines err by half as much."""


@dataclass(frozen=True)
class Entry:
    """An option, and what it was predicted from.

    Args:
        workload: on the devices as they were.
        tuned: its schedule is chosen; otherwise it is 1F1B.
        memory_bytes: that may be used of a device.
        recomputed: the workload with all layers recomputed, if some may be so that the rest fits.
        halved: the workload in halves of decoder layers, if stages may end within them.
        halved_again: the same with all layers recomputed, where ``recomputed`` is there.
        sliced: the workload with the head in slices, if stages may share it.
        sliced_halves: the same in halves of decoder layers, where ``halved`` is there.
    """

    option: Option
    workload: Workload
    expert: int = 1
    tuned: bool = False
    memory_bytes: float = inf
    recomputed: Workload | None = None
    halved: Workload | None = None
    halved_again: Workload | None = None
    sliced: Workload | None = None
    sliced_halves: Workload | None = None

    def as_it_runs(self, *, halves: bool, slices: bool = False) -> Entry:
        """Cut as told, with no other choice."""
        workload, again = self.workload, self.recomputed
        if halves and self.halved is not None:
            workload, again = self.halved, self.halved_again
        cut = self.sliced_halves if halves and self.sliced_halves is not None else self.sliced
        if slices and cut is not None:
            workload, again = cut, None
        return Entry(self.option, workload, self.expert, self.tuned, self.memory_bytes, again)

    def predicted(self, cluster: Cluster, slowness: float = 1.0, within_s: float = inf) -> Option:
        """The option on ``cluster``, whose devices take ``slowness`` times as long as they did."""
        optional = (self.recomputed, self.halved, self.halved_again, self.sliced, self.sliced_halves)
        again, halved, halved_again, sliced, sliced_halves = (
            None if each is None else scaled(each, slowness) for each in optional
        )
        cluster = replace(cluster, memory_bytes=min(cluster.memory_bytes, self.memory_bytes))
        return predicted(
            *(self.option, scaled(self.workload, slowness), cluster),
            expert=self.expert,
            tuned=self.tuned,
            within_s=within_s,
            recomputed=again,
            halved=halved,
            halved_again=halved_again,
            sliced=sliced,
            sliced_halves=sliced_halves,
        )


@dataclass(frozen=True)
class Advice:
    """Another number of stages would be so much faster that a restart pays.

    Args:
        now: what runs, as predicted for the present rates.
        better: what would be the fastest.
        steps: after which the restart has paid.
    """

    now: Option
    better: Option
    steps: int


@dataclass(frozen=True)
class StagePool:
    """All options of a run's start that can be.

    Args:
        cluster: as it was measured at the start.
        stages: that the run has.
    """

    entries: tuple[Entry, ...]
    cluster: Cluster
    stages: Stages

    def advice(self, rate: float, slowness: float, restart_s: float) -> Advice | None:
        """Compare all options again; None where no other one is :data:`WORTH_A_RESTART`.

        Args:
            rate: of the links, by that at the start.
            slowness: seconds of the devices, likewise.
            restart_s: seconds until a restarted run trains.
        """
        where = replace(
            self.cluster, inside=_faster(self.cluster.inside, rate), across=_faster(self.cluster.across, rate)
        )
        first = next(entry for entry in self.entries if entry.option.shape == self.stages)
        now = first.predicted(where, slowness)
        found, least_s = [now], (1 - WORTH_A_RESTART) * now.step_s
        for entry in sorted(self.entries, key=lambda entry: entry.option.chunks):
            if entry is not first:
                # Chunks that would not be advised need not be simulated, between two steps.
                found.append(entry.predicted(where, slowness, within_s=least_s))
                least_s = min(least_s, found[-1].step_s)
        best = choose(found, self.stages)
        if best is None or best.shape == self.stages or best.step_s > (1 - WORTH_A_RESTART) * now.step_s:
            return None
        steps = ceil(restart_s / (now.step_s - best.step_s)) if isfinite(now.step_s) else 0
        return Advice(now, best, steps)


def _faster(fabric: Fabric, rate: float) -> Fabric:
    def times(bytes_per_s: float | None) -> float | None:
        return None if bytes_per_s is None else bytes_per_s * rate

    return replace(
        fabric,
        bytes_per_s=fabric.bytes_per_s * rate,
        all_reduce_bytes_per_s=times(fabric.all_reduce_bytes_per_s),
        all_to_all_bytes_per_s=times(fabric.all_to_all_bytes_per_s),
        zero1_bytes_per_s=times(fabric.zero1_bytes_per_s),
    )


def rate_of(costs: Costs) -> float | None:
    """Bytes a second of the slowest link, among those that were measured; None: none was."""
    rates = [link.bytes_per_s for link in (*costs.down, *costs.up)] + [*costs.egress_bytes_per_s]
    known = [rate for rate in rates if isfinite(rate)]
    return min(known, default=None)


def seconds_of(costs: Costs) -> float:
    """Seconds of a micro-batch's forward and backward through all stages."""
    return sum(costs.forward_s) + sum(costs.backward_s)
