"""The one loop: measure, predict, choose, switch. Here it changes the schedule of a pipeline while it trains.

Every ``retune_every`` steps all ranks put together what they saw, the first rank decides, and all of them apply its
decision before the same step.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from ..config.schedules import ScheduleChoice
from ..planning.candidates import SLACKS, Candidate, candidates
from ..planning.choose import Choice, Planner
from ..planning.switching import SwitchRule
from .observer import Knowledge, gather_reports
from .watch import EVERYONE, WATCH

logger = logging.getLogger("paceline")

SETTLING_STEPS = 2
"""Steps before anything is measured: connections, caches and allocators find their sizes."""

MEASURING_STEPS = 2
"""Steps with a micro-batch size before its times count."""

FEW = 512
"""Up to so many stages times micro-batches times sizes every warm-up is tried: a replay grows with all three."""

SWITCH_S = 0.01
"""A switch before the first was timed."""


@dataclass
class Controller:
    """Chooses the schedule of one engine. Every rank has one, and calls :meth:`before_step` before every step.

    Args:
        engine: a :class:`~paceline.runtime.engine.PacelineEngine`.
        choice: of type ``"adaptive"``.
    """

    engine: Any
    choice: ScheduleChoice
    knowledge: Knowledge = field(init=False)
    current: Candidate = field(init=False)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    """On the first rank, every decision since somebody took them out."""
    _steps: int = 0
    _last_look: int = 0
    _switch_s: float = SWITCH_S
    _after: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine, every = self.engine, self.choice.retune_every or 1
        self.configured = int(engine.micro_batch_size)
        self.current = Candidate(self.configured)
        self.knowledge = Knowledge(engine.num_stages)
        self.rule = SwitchRule(every)
        others = [size for size in self.choice.micro_batch_sizes or () if size != self.configured]
        self._to_measure = [self.configured, *sorted(others)]
        self._planner: Planner | None = None

    # -- the loop ------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Look, decide and switch, if it is time to. Collective.

        Raises:
            RuntimeError: a rank was lost.
        """
        self._steps += 1
        done = self._steps - 1
        if done < SETTLING_STEPS:
            return
        if self._to_measure:
            self._measure(done - SETTLING_STEPS)
        elif done - self._last_look >= (self.choice.retune_every or 1):
            self._look(done)

    def _measure(self, done: int) -> None:
        """One micro-batch size after the other runs as 1F1B for a few steps; then comes the first look."""
        turn, step = divmod(done, MEASURING_STEPS)
        if turn == 0 or step > 0:
            return
        if turn == len(self._to_measure):
            self._to_measure = []
            self._look(self._steps - 1)
            return
        self._see()
        size = self._to_measure[turn]
        fits = self._agree(self._would_fit(size))
        if fits:
            self._apply(Candidate(size))
        else:
            self._to_measure.remove(size)
            self._measure(done)

    def _would_fit(self, size: int) -> bool:
        """Whether 1F1B of an unmeasured size fits, if memory grows with the samples."""
        knowledge, (known, *_) = self.knowledge, self._to_measure
        if known not in knowledge.saved_bytes:
            return size < known
        stages = range(self.engine.num_stages)
        return all(
            knowledge.saved_bytes[known][s] * size / known * (self.engine.num_stages - s) <= knowledge.room_bytes[s]
            for s in stages
        )

    def _look(self, done: int) -> None:
        self._see()
        steps, self._last_look = done - self._last_look, done
        choice: Choice | None = None
        chosen = self.current
        if self._decides:
            WATCH.doing("choosing a schedule")
            choice = self._choose(steps)
            chosen = choice.next if choice is not None else self.current
        chosen = self._agree(chosen)
        begun = time.perf_counter()
        if chosen != self.current:
            self._apply(chosen)
            self._switch_s = time.perf_counter() - begun
        if choice is not None:
            self._tell(choice)

    def _choose(self, steps: int) -> Choice | None:
        knowledge = self.knowledge
        sizes = [size for size in knowledge.sizes() if size in knowledge.saved_bytes]
        if self.current.micro_batch_size not in knowledge.sizes():
            return None
        samples = self.configured * self.engine.micro_batches
        found = candidates(
            self.engine.num_stages,
            samples,
            sizes,
            knowledge.saved_bytes,
            knowledge.room_bytes,
            configured=self.configured,
            slacks=SLACKS if len(sizes) * self.engine.num_stages * self.engine.micro_batches <= FEW else (0.0, 1.0),
        )
        if self._planner is None or (self._planner.candidates, self._planner.samples) != (found, samples):
            self._planner = Planner(found, self.engine.num_stages, samples)
        costs = {size: knowledge.costs(size) for size in knowledge.sizes()}
        # What no longer fits, or turned out not to, is left for what needs the least, whatever that costs.
        running = self.current
        if running != Candidate(self.configured) and not self._fits(running, samples):
            logger.warning("step %d: %s does not fit in memory as measured now", self.engine.global_steps, running.name)
            running = Candidate(self.configured)
        return self._planner.choose(costs, running, self.rule, switch_s=self._switch_s, steps=steps)

    def _fits(self, candidate: Candidate, samples: int) -> bool:
        """Whether a candidate whose size was measured stays within the room that there is now."""
        saved, room = self.knowledge.saved_bytes.get(candidate.micro_batch_size), self.knowledge.room_bytes
        peaks = candidate.peak_activations(self.engine.num_stages, samples)
        return saved is None or all(p * each <= r for p, each, r in zip(peaks, saved, room, strict=True))

    # -- its parts -----------------------------------------------------------------------------------------------

    @property
    def _decides(self) -> bool:
        return bool(self.engine.global_rank == 0)

    def _see(self) -> None:
        WATCH.doing("comparing the last steps", EVERYONE)
        reports = gather_reports(self.engine, self._after, self.choice.memory_bytes)
        self.engine.recorder.forget()
        if self._decides:
            self.knowledge.update(reports)

    def _agree(self, value: Any) -> Any:
        """The first rank's value, on all."""
        WATCH.doing("agreeing on a schedule", EVERYONE)
        return self.engine.control.from_first(value)

    def _apply(self, candidate: Candidate) -> None:
        self.current = candidate
        self.engine.run_candidate(candidate)

    def _tell(self, choice: Choice) -> None:
        decision = choice.decision
        seconds = {prediction.candidate.name: prediction.step_s for prediction in choice.predictions}
        self.decisions.append(
            {
                "step": self.engine.global_steps,
                "switched": decision.switch,
                "from": choice.current.name,
                "to": choice.next.name,
                "why": decision.why,
                "predicted_now_s": decision.now_s,
                "predicted_best_s": decision.best_s,
                "measured_s": self.knowledge.measured_s,
                "switch_s": decision.switch_s,
                "predicted_s": seconds,
            }
        )
        level = logging.INFO if decision.switch else logging.DEBUG
        logger.log(
            level,
            "step %d: %s -> %s: %s (predicted %.4g s -> %.4g s, measured %.4g s)",
            *(self.engine.global_steps, choice.current.name, choice.next.name, decision.why),
            *(decision.now_s, decision.best_s, self.knowledge.measured_s),
        )
