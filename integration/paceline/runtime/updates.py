"""Updates at the end of a training step, by the operations of its program."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from deepspeed.runtime.pipe.engine import PipelineEngine

from ..optim.asynchronous_updates import AsynchronousUpdates, Options
from ..optim.sharded import ShardedOptimizer


class FlushedUpdates:
    """Updates of an engine whose steps end with a flush: DeepSpeed's own methods."""

    def __init__(self, engine: PipelineEngine) -> None:
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


class StreamUpdates:
    """Updates that are made beside the computation, and applied when the program says so.

    Args:
        engine: DeepSpeed's; it keeps the last update's figures.
        num_held: stages of this rank, each of which completes a step.
        applied: called when new values are in the model.
    """

    def __init__(
        self, engine: PipelineEngine, optimizer: ShardedOptimizer, num_held: int, applied: Callable[[], None]
    ) -> None:
        self._engine, self._optimizer, self._num_held, self._applied = engine, optimizer, num_held, applied
        self._completed = 0
        self._options: deque[Options] = deque()
        """Settings for the updates of the steps that have begun and are not complete here."""

    @property
    def _updates(self) -> AsynchronousUpdates:
        """Those of the layers that are here now."""
        updates = self._optimizer.updates
        assert updates is not None, "the optimizer's options have corrections"
        return updates

    def begin_step(self, rate_factor: float) -> None:
        """All ranks know of a step, whose update has the optimizer's options of now, also where later steps have begun
        when its gradients are complete; its learning rates are multiplied by ``rate_factor``."""
        self._options.append(self._updates.options(rate_factor))

    def backward_complete(self, stage: int) -> None:
        """Close the stage's gradients; those of the last stage here complete the step."""
        self._updates.backward_complete(stage)
        self._completed += 1
        if self._completed == self._num_held:
            self._completed = 0
            self._updates.finish_step(self._options.popleft())

    def apply(self) -> None:
        engine, optimizer = self._engine, self._optimizer
        self._updates.apply()
        engine._global_grad_norm = optimizer.outcome.grad_norm
        engine._step_applied = not optimizer.overflow
        engine.skipped_steps += int(optimizer.overflow)
        self._applied()

    def reduce_tied(self) -> None:
        """Nothing, as the two below: closing a stage's gradients reduces them, and the update is :meth:`apply`'s."""

    def reduce(self) -> None: ...

    def update(self) -> None: ...
