"""Train without a flush: several directions over the same devices, or one whose weights drift.

Steps with a flush run here too, where both may be chosen: nothing of them lags.

A call of ``train_batch`` runs one window of a :class:`~paceline.schedules.stream.Stream`: the forwards of its step, and
what still lags of the steps before. So weights have the updates of all steps but the last ones when it returns;
:meth:`AsynchronousRun.flush` runs what is left.

Nothing in a step waits for all ranks: what they must agree on travels a step ahead (:mod:`.steps_ahead`), updates are
made beside the computation (:mod:`paceline.optim.asynchronous_updates`), and the loss arrives when somebody looks at
it (:mod:`.late_losses`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from itertools import count
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.checkpoint import CheckpointError

from ..averaging.averager import Averager
from ..messages import brief
from ..optim.sharded import ShardedOptimizer
from ..schedules.lower import Op
from ..schedules.schedule import Schedule
from ..schedules.stream import Stream
from ..schedules.windows import StreamProgram
from ..supervise.watch import WATCH
from .executor import Executor
from .half_way import HalfWay
from .late_losses import LateLosses
from .rank_random import OwnRandom
from .stage_runner import LossBook
from .steps_ahead import StepsAhead
from .updates import StreamUpdates

logger = logging.getLogger("paceline")

LEAVE_S = timedelta(seconds=30)
"""Until a rank whose script has ended leaves without the others."""

COME, GONE = "come", "gone"
"""Verdicts of ranks about whether all have come to the end."""

_NAMES = count()
"""Numbers of this process's engines; ranks make the same ones."""


class Trained(Protocol):
    """DeepSpeed's engine, whose steps are counted."""

    module: nn.Module
    global_rank: int
    global_steps: int
    global_samples: int
    micro_batches: int
    lr_scheduler: LRScheduler | None
    skipped_steps: int
    averager: Averager | None

    def train_batch_size(self) -> int: ...


class AsynchronousRun:
    """Runs the schedules ``"multidirection"`` and ``"one_direction"`` of a causal LM without a flush.

    * :meth:`train_batch` reads one step ahead, if it gets the same iterator at each step.
    * The loss that it returns waits for the other ranks when somebody looks at it; the gradient norm is that of the
      last update in the model. A request to stop is seen a step later.
    * An update has the learning rate, and the other options of the optimizer, with which its step began. Its
      scheduler steps at the end of each call, whether gradients turn out to be finite or not.

    Args:
        engine: whose counters, module and learning rate are DeepSpeed's.
        program: what this rank runs in each step.
        optimizer: None: nothing trains here.
        steps: begins steps.
        book: where the last stage puts its losses.
        own_random: generators of this rank's own, where several ranks compute the same stage.
        around: around what sends and receives.
        applied: called when an update is in the model.
    """

    def __init__(
        self,
        engine: Trained,
        program: StreamProgram,
        executor: Executor,
        optimizer: ShardedOptimizer | None,
        *,
        steps: StepsAhead,
        losses: LateLosses,
        book: LossBook,
        half_way: HalfWay,
        own_random: OwnRandom | None,
        around: Callable[[], AbstractContextManager[None]],
        applied: Callable[[], None],
    ) -> None:
        self._engine, self._program, self._executor, self._optimizer = engine, program, executor, optimizer
        self.steps, self._losses, self._book, self._half_way = steps, losses, book, half_way
        self._own_random, self._around = own_random, around
        self._updates = None if optimizer is None else StreamUpdates(engine, optimizer, len(executor.held), applied)
        self._name = next(_NAMES)
        self._begun = 0
        """Steps since the start, or since the last flush."""
        self.num_before_last = 0
        """The same when the last step began: it may be flushed by now."""
        self._number = 0
        """Number of the next step of this engine: it counts on over flushes and resumes."""
        if optimizer is not None:
            optimizer.is_settled = lambda: not self._begun

    @property
    def order(self) -> Schedule | Stream:
        """The order of a step in the steady state; a schedule where nothing lags."""
        stream = self._program.stream
        return stream if stream.most_lag else stream.one_step

    @property
    def is_settled(self) -> bool:
        """Whether all steps that have begun are done."""
        return not self._begun

    def train_batch(self) -> Tensor:
        """Run one window.

        Returns:
            The step's loss, a scalar tensor, on every rank.
        """
        engine = self._engine
        engine.module.train()
        self._book.total = None
        self.steps.begin(self._number)
        if self._updates is not None:
            self._updates.begin_step(1.0 if engine.averager is None else engine.averager.learning_rate_factor)
        with self._half_way.during("it was interrupted"):
            self.num_before_last = self._begun
            self._run(self._program.step(self._begun))
            self._begun += 1
            engine.global_steps += 1
            engine.global_samples += engine.train_batch_size()
            if engine.lr_scheduler is not None:
                engine.lr_scheduler.step()
        loss = self._losses.of_step(self._book.total)
        self._losses.tell(loss)
        return loss

    def follow(self, stream: Stream) -> None:
        """Run the steps in another order from the next one on, after those under way. Collective, between steps."""
        self.flush()
        self._program = StreamProgram(stream, self._program.rank)

    def flush(self) -> None:
        """Finish all steps that have begun, and put their updates into the model. Collective, between steps.

        Where gradients are off, as where weights are copied, too.
        """
        if not self._begun or not self._half_way.is_whole:
            return
        module = self._engine.module
        WATCH.step = self._engine.global_steps
        was_training = module.training
        module.train()  # what is recomputed is what was computed
        with torch.enable_grad(), self._around(), self._half_way.during("a flush was interrupted"):
            self._number -= 1  # it is that of the last step
            self._run(self._program.drain(self._begun))
            self._begun = 0
        module.train(was_training)
        self._losses.tell()
        WATCH.idle()

    def leave(self) -> None:
        """At the end of the script, or of the engine: finish what is under way, as all other ranks do.

        A thread that waits for a message or an update while the interpreter goes would abort the process. After an
        exception (but the end of the data) the others may never come, and nothing is waited for; they may have died,
        or go on training without this one, so that they are waited for :data:`LEAVE_S` only.
        """
        ends_well = not hasattr(sys, "last_type") and sys.exc_info()[0] in (None, StopIteration)
        if self._begun and self._half_way.is_whole and ends_well:
            why = "not all ranks came to the end of training, after the same steps"
            if not dist.is_initialized():
                why = "the process group is gone; call engine.flush() or engine.destroy() before"
            try:
                if dist.is_initialized() and self._all_come():
                    self.flush()
            except Exception as error:  # of a rank that is gone, and the rest of the script may do without
                why = brief(str(error))
            WATCH.idle()
            if self._begun:
                logger.warning("the last updates are not in the model: %s", why)
        self.stop()

    def _all_come(self) -> bool:
        """Whether all ranks leave after the same step, the same on all of them: none finishes it without the others.

        Through the store: a barrier of gloo's holds all but its first rank for as long as its group waits.
        """
        store = dist.distributed_c10d._get_default_store()
        ranks = [f"paceline/leaves/{self._name}/{rank}" for rank in range(dist.get_world_size())]
        store.set(ranks[self._engine.global_rank], str(self._number))
        verdict = GONE
        with suppress(RuntimeError):  # of a store, too
            store.wait(ranks, LEAVE_S)
            if len({bytes(store.get(rank)) for rank in ranks}) == 1:
                verdict = COME
        # The first verdict counts, also for one that comes when another has given up.
        return bytes(store.compare_set(f"paceline/leaves/{self._name}", "", verdict)) == COME.encode()

    def stop(self) -> None:
        """End without what is under way. Not collective."""
        self._begun = 0
        self._losses.stop()
        if self._optimizer is not None and self._optimizer.updates is not None:
            self._optimizer.updates.stop()

    def _run(self, ops: Iterable[Op]) -> None:
        """One window, of the step :attr:`_number`, which it ends."""
        self._book.of_forwards = []
        random = self._own_random
        if random is not None:
            random.enter()
        try:
            self._executor.run(
                ops,
                num_micro_batches=self._engine.micro_batches,
                step=self._number,
                updates=self._updates,
                goes_on=True,
            )
        except CheckpointError as error:
            raise RuntimeError(
                "activations were not recomputed as they had been computed: if parameters were frozen or trained again "
                "while steps were under way, call engine.flush() before requires_grad_(). It was found by "
                f"{str(error).splitlines()[0]}"
            ) from error
        if random is not None:
            random.leave()
        self._number += 1
