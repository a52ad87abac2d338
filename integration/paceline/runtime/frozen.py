"""The part of :class:`~paceline.runtime.engine.PacelineEngine` that knows which stages a backward pass has to reach.

Gradients are computed down to the first stage that trains anything, and no farther: the stages before it keep nothing
of a forward, get no gradients and run no backward. A frozen stage behind it has no gradients of its own, but hands on
those of its inputs. The instructions of a schedule stay the same; what is not needed does nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Frozen:
    """Mixed into the engine; :meth:`_find_trained` is called by all ranks together."""

    _first_trained = 0
    """Number of the first stage with a trainable parameter; of no stage if there is none."""

    def _find_trained(self: Any) -> bool:
        """Agree on the first stage that trains anything; False if none does."""
        told = self.control.gather(sorted(self._trained_stages()))
        trained = {stage for stages in told for stage in stages}
        self._first_trained = min(trained, default=self.module.num_stages)
        return bool(trained)

    def _trained_stages(self: Any) -> set[int]:
        """Of the stages that this rank holds those with a trainable parameter."""
        return {self.module.stage_id} if any(p.requires_grad for p in self.module.parameters()) else set()

    @property
    def _runs_backward(self: Any) -> bool:
        """Whether something trains on this stage or before it."""
        return bool(self.stage_id >= self._first_trained)

    @property
    def _sends_gradients(self: Any) -> bool:
        """Whether something trains before this stage."""
        return bool(self.stage_id > self._first_trained)

    def _graph(self: Any) -> AbstractContextManager[Any]:
        """Around a forward: what no backward comes to keeps nothing."""
        return nullcontext() if self._runs_backward else torch.no_grad()
