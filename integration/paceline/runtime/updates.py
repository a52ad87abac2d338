"""Updates at the end of a training step, by the operations of its program."""

from __future__ import annotations

from typing import Any


class FlushedUpdates:
    """Updates of an engine whose steps end with a flush: DeepSpeed's own methods."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def backward_complete(self, stage: int) -> None:
        """Nothing: the step's end comes for all stages together."""

    def apply(self) -> None:
        """Nothing: an update is in the model when its step ends."""

    def reduce_tied(self) -> None:
        self._engine._exec_reduce_tied_grads()

    def reduce(self) -> None:
        self._engine._exec_reduce_grads()

    def update(self) -> None:
        self._engine._exec_optimizer_step()
