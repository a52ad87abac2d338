"""A word to the user when another number of stages would be so much faster that a restart pays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ..planning.stage_choice import Stages
from ..planning.stage_pool import Advice, StagePool, rate_of, seconds_of
from ..schedules.costs import Costs
from ..supervise.watch import WATCH
from .controller import Agreement
from .planning_process import Call, PlanningProcess

logger = logging.getLogger("paceline")


CHANGED = 1.25
"""Links or devices that changed by less (relatively) are not looked at: a comparison simulates many steps."""


class KnowsCosts(Protocol):
    """Measured costs of micro-batches."""

    def sizes(self) -> list[int]:
        """Sizes of micro-batches that were measured."""

    def costs(self, size: int) -> Costs:
        """Costs of one micro-batch."""


class OtherPlans:
    """Compares the pool of a run's start again at each planning; changes nothing, as that needs a restart.

    What a run measures of links and devices is not measured as it was at the start. So the first planning stands for
    the start, and later ones count by how much they differ from it.

    Args:
        size: samples of a micro-batch, as configured.
        restart_s: seconds that this run took until it trained.
        process: compares beside steps, so that its advice comes with the next planning; None: between two of them.
    """

    def __init__(
        self,
        pool: StagePool,
        costs: KnowsCosts,
        agreement: Agreement,
        *,
        size: int,
        restart_s: float,
        process: PlanningProcess | None = None,
    ) -> None:
        self._process, self._begun = process, None
        self._pool, self._costs, self._agreement = pool, costs, agreement
        self._size, self._restart_s = size, restart_s
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] = 1.0, 1.0
        """Changes at the last comparison."""
        self._told: Stages | None = None
        """Stages of the last advice."""

    _begun: tuple[Call[Advice | None], float, float] | None
    """A comparison in another process, and what it is made for."""

    def propose(self, steps: int) -> None:
        """Log what a restart would bring, once for each option."""
        if not self._agreement.decides or self._size not in self._costs.sizes():
            return
        if self._begun is not None and self._process is not None:
            (call, faster, slower), self._begun = self._begun, None
            self._say(partial(self._process.result, call), faster, slower)
        costs = self._costs.costs(self._size)
        rate, seconds = rate_of(costs), seconds_of(costs)
        if rate is None or not seconds:
            return
        if self._first is None:
            self._first = rate, seconds
            return
        faster, slower = rate / self._first[0], seconds / self._first[1]
        if all(1 / CHANGED < now / then < CHANGED for now, then in zip((faster, slower), self._last, strict=True)):
            return
        self._last = faster, slower
        if self._process is None:
            self._say(partial(self._pool.advice, faster, slower, self._restart_s), faster, slower)
        else:
            call = self._process.begin(partial(self._pool.advice, faster, slower, self._restart_s))
            self._begun = call, faster, slower

    def _say(self, advice_of: Callable[[], Advice | None], faster: float, slower: float) -> None:
        """Log an advice, unless it was the last one as well."""
        WATCH.doing("comparing other numbers of stages")
        try:
            advice = advice_of()
        except Exception as error:  # training can do without
            logger.warning("plan: other numbers of stages are not compared: %s: %s", type(error).__name__, error)
            return
        if advice is not None and advice.better.shape != self._told:
            logger.info(
                "plan: links are %.3g times as fast as at first, a micro-batch takes %.3g times as long. Now the "
                "fastest is %s; as it runs, %s. A restart from the last checkpoint that plans anew (in the job: "
                "--replan) pays after %d steps",
                *(faster, slower, advice.better.text, advice.now.text, advice.steps),
            )
        self._told = None if advice is None else advice.better.shape

    def apply(self, change: object) -> object:
        """Never called: nothing is proposed."""
        raise AssertionError(f"no change is proposed, and {change} is to be applied")
