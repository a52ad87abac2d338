"""Steps at which a run reports, saves, evaluates and completes a line."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.hf.arguments import TrainArguments


@dataclass(frozen=True)
class Intervals:
    """Steps are counted from 1.

    Args:
        num_steps: of the whole run.
        steps_per_epoch: None for a stream, which has no epochs.
    """

    args: TrainArguments
    num_steps: int
    steps_per_epoch: int | None

    def reports_at(self, step: int) -> bool:
        return step % self.args.logging_steps == 0 or step == self.num_steps

    def saves_at(self, step: int) -> bool:
        """Whether to save, as Trainer does: by steps, the last one too."""
        is_last = self.args.save_strategy == "steps" and step == self.num_steps
        return is_last or self._is_due(self.args.save_strategy, self.args.save_steps, step)

    def evaluates_at(self, step: int) -> bool:
        return step == self.num_steps or self._is_due(self.args.eval_strategy, self.args.eval_steps, step)

    def completes_at(self, step: int) -> bool:
        return bool(self.args.sample_every) and step % (self.args.sample_every or 1) == 0

    def epoch_at(self, step: int) -> float | None:
        return step / self.steps_per_epoch if self.steps_per_epoch else None

    def _is_due(self, strategy: str | None, every: int | None, step: int) -> bool:
        if strategy == "epoch":
            return self.steps_per_epoch is not None and step % self.steps_per_epoch == 0
        return strategy == "steps" and step % (every or 1) == 0
