"""What the ranks of a pipeline report whose times are known: for tests of what is made of reports."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.comm.transport import Record
from paceline.measure.recorder import StepTimes
from paceline.runtime.rank_reports import WAIT, Report

STAGES, MICRO_BATCHES = 3, 4


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
            spans: list[list[tuple[str, int, float, float]]] = [[] for _ in range(STAGES)]
            for kind, order in (("F", range(STAGES)), ("B", range(STAGES - 1, -1, -1))):
                for micro_batch in range(MICRO_BATCHES):
                    ready = done[order[0]]
                    for stage in order:
                        if ready > done[stage]:
                            spans[stage].append((WAIT, micro_batch, done[stage], ready))
                        start = max(done[stage], ready)
                        end = start + (self.forward_s if kind == "F" else self.backward_s)[stage]
                        spans[stage].append((kind, micro_batch, start, end))
                        done[stage] = end
                        target = stage + (1 if kind == "F" else -1)
                        if 0 <= target < STAGES:
                            lane = "activations" if kind == "F" else "gradients"
                            number = first_number + step * MICRO_BATCHES + micro_batch
                            ready = end + self.transfer_s + self.latency_s
                            self._message(found, lane, stage, target, number, micro_batch, end, ready)
            ended = max(done) + self.beside_s / 2
            length_s = ended - begun
            for stage, report in enumerate(found):
                offset = self.offsets_s[stage]
                own = [(kind, m, start + offset, end + offset) for kind, m, start, end in spans[stage]]
                report.steps.append(StepTimes(begun + offset, ended + offset, own, key=("1f1b", self.size)))
        return found

    def _report(self, stage: int, replica: int) -> Report:
        lanes = [f"{kind}_{end}" for kind in ("activations", "gradients") for end in ("in", "out")]
        is_last = stage == STAGES - 1
        return Report(
            stage=stage,
            replica=replica,
            host=self.hosts[stage],
            steps=[],
            records={lane: [] for lane in lanes},
            saved_bytes={self.size: 100.0 * self.size},
            room_bytes=1e9 + stage,
            clock_s=0.0 if is_last else self.offsets_s[stage + 1] - self.offsets_s[stage],
            latency_s=0.0 if is_last else self.latency_s,
        )

    def _message(
        self, found: list[Report], lane: str, source: int, target: int, number: int, m: int, begun: float, done: float
    ) -> None:
        sent = Record(number, m, self.num_bytes, begun + self.offsets_s[source], done + self.offsets_s[source])
        posted = Record(number, m, self.num_bytes, self.begun_s + self.offsets_s[target], done + self.offsets_s[target])
        found[source].records[f"{lane}_out"].append(sent)
        found[target].records[f"{lane}_in"].append(posted)
