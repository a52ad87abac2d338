"""Which stages a backward pass has to reach.

Gradients are computed down to the first stage that trains anything, and no farther: the stages before it keep nothing
of a forward, get no gradients and run no backward. A frozen stage behind it has no gradients of its own, but hands on
those of its inputs. The operations of a schedule stay the same; those that are not needed do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..comm.control import ControlPlane


class Reach:
    """The first stage that trains anything; all ranks know it.

    Args:
        num_stages: of the pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._first_trained = 0

    def find(self, control: ControlPlane, trained: Iterable[int]) -> bool:
        """Agree on it, and on whether anything trains at all. Collective.

        Args:
            trained: stages of this rank that have a trainable parameter.
        """
        everywhere = {stage for stages in control.gather(sorted(trained)) for stage in stages}
        self._first_trained = min(everywhere, default=self._num_stages)
        return bool(everywhere)

    def runs_backward(self, stage: int) -> bool:
        """Whether something trains on ``stage`` or before it."""
        return stage >= self._first_trained

    def sends_gradients(self, stage: int) -> bool:
        """Whether something trains before ``stage``."""
        return stage > self._first_trained
