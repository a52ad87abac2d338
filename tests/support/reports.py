"""What the ranks of a pipeline report whose times are known: for tests of what is made of reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.comm.transport import Record
from paceline.measure.recorder import Recorded, StepTimes
from paceline.runtime.rank_reports import WAIT, LaneKey, Report
from paceline.schedules.costs import Costs
from paceline.schedules.schedule import Schedule
from paceline.schedules.simulate import simulate

STAGES, MICRO_BATCHES = 3, 4
ROUTES = (tuple(range(STAGES)),)


def lane(stage: int, name: str) -> LaneKey:
    """A lane of the one direction."""
    return LaneKey(0, stage, name)


@dataclass(frozen=True)
class Run:
    """A pipeline as it really is; all times on one true clock."""

    forward_s: tuple[float, ...] = (0.01, 0.03, 0.02)
    backward_s: tuple[float, ...] = (0.02, 0.05, 0.04)
    transfer_s: float = 0.004
    num_bytes: int = 4000
    latency_s: float = 0.001
    size: int = 2
    hosts: tuple[str, ...] = ("a", "a", "a")
    offsets_s: tuple[float, ...] = (0.0, 0.0, 0.0)
    """What each stage's clock shows beyond the true time."""
    beside_s: float = 0.1
    """Before the first and after the last computation of a step, together."""
    begun_s: float = 1000.0
    steps: int = 2

    def reports(self, replica: int = 0, first_number: int = 1) -> list[Report]:
        """Every stage waits until its turn, all forwards and then all backwards; the messages as they come of it."""
        found = [self._report(stage, replica) for stage in range(STAGES)]
        length_s = 0.0
        for step in range(self.steps):
            begun = self.begun_s + step * length_s
            done = [begun + self.beside_s / 2] * STAGES
            spans: list[list[Recorded]] = [[] for _ in range(STAGES)]
            for kind, order in (("F", range(STAGES)), ("B", range(STAGES - 1, -1, -1))):
                for micro_batch in range(MICRO_BATCHES):
                    ready = done[order[0]]
                    for stage in order:
                        if ready > done[stage]:
                            spans[stage].append(Recorded(WAIT, micro_batch, done[stage], ready))
                        start = max(done[stage], ready)
                        end = start + (self.forward_s if kind == "F" else self.backward_s)[stage]
                        spans[stage].append(Recorded(kind, micro_batch, start, end))
                        done[stage] = end
                        target = stage + (1 if kind == "F" else -1)
                        if 0 <= target < STAGES:
                            what = "activations" if kind == "F" else "gradients"
                            number = first_number + step * MICRO_BATCHES + micro_batch
                            ready = end + self.transfer_s + self.latency_s
                            self._message(found, what, stage, target, number, micro_batch, end, ready)
            ended = max(done) + self.beside_s / 2
            length_s = ended - begun
            for stage, report in enumerate(found):
                offset = self.offsets_s[stage]
                own = [replace(span, start=span.start + offset, end=span.end + offset) for span in spans[stage]]
                report.steps.append(StepTimes(begun + offset, ended + offset, own, key=("1f1b", self.size)))
        return found

    def _report(self, stage: int, replica: int) -> Report:
        lanes = [lane(stage, f"{kind}_{end}") for kind in ("activations", "gradients") for end in ("in", "out")]
        is_last = stage == STAGES - 1
        return Report(
            device=stage,
            replica=replica,
            host=self.hosts[stage],
            steps=[],
            records={key: [] for key in lanes},
            saved_bytes={self.size: {0: 100.0 * self.size}},
            room_bytes=1e9 + stage,
            clock_s=0.0 if is_last else self.offsets_s[stage + 1] - self.offsets_s[stage],
            latency_s=0.0 if is_last else self.latency_s,
        )

    def _message(
        self, found: list[Report], what: str, source: int, target: int, number: int, m: int, begun: float, done: float
    ) -> None:
        sent = Record(number, m, self.num_bytes, begun + self.offsets_s[source], done + self.offsets_s[source])
        posted = Record(number, m, self.num_bytes, self.begun_s + self.offsets_s[target], done + self.offsets_s[target])
        found[source].records[lane(source, f"{what}_out")].append(sent)
        found[target].records[lane(target, f"{what}_in")].append(posted)


def simulated(
    schedule: Schedule, costs: Costs, *, num_windows: int = 1, offsets_s: Sequence[float] = (), size: int = 2
) -> list[Report]:
    """Reports of ranks on which all happens as it is simulated, whichever stages they hold.

    Args:
        num_windows: steps of a run without a flush, of which ``schedule`` has the actions. Each rank's ends when it has
            run its share of them.
        offsets_s: what each rank's clock shows beyond the true time.
    """
    run = simulate(schedule, costs, timeline=True).timeline
    assert run is not None
    offsets = offsets_s or (0.0,) * schedule.num_ranks
    found = []
    for rank, held in enumerate(schedule.cells):
        waits = rank < schedule.num_ranks - 1
        clock_s = offsets[rank + 1] - offsets[rank] if waits else 0.0
        found.append(
            Report(rank, 0, "a", [], {}, {size: {c: 10.0 + cell for c, cell in enumerate(held)}}, 1e9, clock_s)
        )
        own = sorted((span for span in run.spans if span.rank == rank), key=lambda span: span.start_s)
        per_window = -(-len(own) // num_windows)
        now = 0.0
        for first in range(0, len(own), per_window):
            step = StepTimes(now + offsets[rank], key=(schedule.name, size))
            for span in own[first : first + per_window]:
                if span.start_s > now:
                    step.spans.append(Recorded(WAIT, span.micro_batch, now, span.start_s, span.chunk))
                step.spans.append(Recorded(span.kind, span.micro_batch, span.start_s, span.end_s, span.chunk))
                now = span.end_s
            step.spans = [replace(s, start=s.start + offsets[rank], end=s.end + offsets[rank]) for s in step.spans]
            step.ended_s = now + offsets[rank]
            found[rank].steps.append(step)
    for sent in sorted(run.transfers, key=lambda transfer: transfer.start_s):
        way, stage = divmod(schedule.cells[sent.source][sent.chunk], schedule.num_stages)
        what, step_to = ("activations", 1) if sent.kind == "activation" else ("gradients", -1)
        ends = LaneKey(way, stage, f"{what}_out"), LaneKey(way, stage + step_to, f"{what}_in")
        for rank, key in zip((sent.source, sent.target), ends, strict=True):
            records = found[rank].records.setdefault(key, [])
            moments = sent.start_s + offsets[rank], sent.end_s + offsets[rank]
            records.append(Record(len(records) + 1, sent.micro_batch, int(sent.num_bytes), *moments))
    return found
