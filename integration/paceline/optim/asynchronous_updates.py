"""Updates beside the computation: gradients of a step become values while later micro-batches run.

A step's gradients are complete when the last backward of each section (a stage that this rank holds) has run. From then
on they are an update of their own: reduced to the owners, stepped, and sent to all as new values, which wait in the
memory of the gradients that they were made of until the schedule says that the model takes them. Gradients that come in
the meantime go to other memory, which is taken only then.

All collectives are issued in the order of a queue, by one thread: every rank of a group issues the same ones in the
same order, whatever its model computes. They are the only ones of their groups while updates are under way, and begin
when the hosts of all ranks have come to them (:mod:`paceline.comm.host_barrier`). On a GPU the thread has a stream of
its own: an update waits for the backwards that its gradients come from, what is computed with the new values waits for
the update, and nothing else of the one waits for the other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import Buffers, view_at
from .corrections import Remembered
from .direct_exchange import AT_ONCE, Reduction, finish
from .gradient_buckets import GradientBuckets, Taken, publish
from .max_change import Outcome
from .owned_rows import Owned, OwnedRows
from .parameter_layout import ParameterLayout
from .step_options import StepOptions
from .step_outcome import StepOutcome
from .step_sums import GradientNorm, ShardedMaxChange
from .task_queue import Task, TaskQueue, Times

Options = list[dict[str, Any]]
"""Settings of an optimizer's groups of parameters, such as their learning rates."""


@dataclass(eq=False)
class _Update:
    """Gradients of one step on their way to be values.

    Args:
        taken: gradients by section.
        options: of the optimizer's groups, as they were when the step began.
        scale: what gradients were multiplied by.
        squares: of the gradients, known when it is made.
        limited: what became of its change, if changes have limits; known then too.
    """

    taken: dict[int, list[Taken]] = field(default_factory=dict)
    options: Options = field(default_factory=list)
    scale: float = 1.0
    squares: float = 0.0
    limited: Outcome | None = None
    task: Task | None = None

    @property
    def buckets(self) -> list[Taken]:
        return [taken for section in sorted(self.taken, reverse=True) for taken in self.taken[section]]


class AsynchronousUpdates:
    """Steps taken apart: :meth:`backward_complete`, :meth:`finish_step`, :meth:`apply`.

    For a step, on every rank: :meth:`backward_complete` of each section, :meth:`finish_step`, and at any later time,
    even after backwards of later steps, :meth:`apply`. Values change in :meth:`apply` only. A micro-batch whose forward
    came before it and whose backward comes after it has its backward with the new values.

    With :meth:`apply` right after :meth:`finish_step` it equals the synchronous step in every bit.

    Args:
        basic: the optimizer, which has the masters of ``rows``.
        times: of the calling thread.
        tasks: run one after another. Where they have no thread everything happens in :meth:`apply`, which is then
            collective over all groups.
    """

    def __init__(
        self,
        basic: torch.optim.Optimizer,
        layout: ParameterLayout,
        gradients: GradientBuckets,
        rows: OwnedRows,
        norm: GradientNorm,
        changes: ShardedMaxChange,
        outcome: StepOutcome,
        times: Callable[[], Times],
        tasks: TaskQueue,
        options: StepOptions,
    ) -> None:
        assert options.corrections is not None
        self._basic, self._twin, self._corrections = basic, _twin_of(basic), options.corrections
        self._gradients, self._rows, self._norm, self._outcome = gradients, rows, norm, outcome
        self._changes, self._layout = changes, layout
        self._divisor, self._communication_dtype = options.divisor, options.communication_dtype
        self._host_barrier, self._groups = options.host_barrier, (options.group, options.model_group)
        self._times, self._tasks = times, tasks
        ties = ((weight, group) for weight, group in options.ties() if layout.trains(weight))
        self._ties = {layout.index_of[weight]: (weight, group) for weight, group in ties}
        self._sections: dict[int, list[Buffers]] = {}
        for buffers in gradients.buffers:
            self._sections.setdefault(buffers.part.domain.section, []).append(buffers)
        self._places = {buffers: list(_places(buffers, rows)) for buffers in gradients.buffers}
        """Masters whose values lie in a bucket, and where."""
        self._completed: set[int] = set()
        self._num_reduced = 0
        """Sections, in falling order, of the step that is not finished, whose reduction is in the queue."""
        self._unfinished = _Update()
        self.pending: deque[_Update] = deque()
        """Updates of steps that are finished, and not yet applied."""

    @torch.no_grad()
    def backward_complete(self, section: int) -> None:
        """The last backward of a step through ``section`` has run on this rank: its gradients may be reduced.

        Sections are reduced in falling order, on all ranks: one that completes out of order waits for those above it.

        Raises:
            Exception: what went wrong in the thread, if anything did.
        """
        self._tasks.check()
        assert section not in self._completed, f"section {section} is complete twice in a step"
        self._completed.add(section)
        update = self._unfinished
        for buffers in self._sections.get(section, ()):
            for index in buffers.views:
                if index in self._ties:
                    self._gradients.of(self._ties[index][0])  # the other rank's copy has one, or may have
            update.taken.setdefault(section, []).append(self._gradients.take(buffers))
        for other in sorted(self._sections, reverse=True)[self._num_reduced :]:
            if other not in self._completed:
                break
            self._num_reduced += 1
            self._tasks.put(partial(self._reduce, update.taken[other]))

    def options(self, rate_factor: float = 1.0) -> Options:
        """Those of the optimizer's groups at this moment, for the update of a step that begins.

        Args:
            rate_factor: by which the update's learning rates are multiplied.
        """
        # Learning-rate schedulers look whether there was a step before their own.
        self._basic._opt_called = True  # type: ignore[attr-defined]
        options = [
            {key: value.clone() if torch.is_tensor(value) else value for key, value in group.items()}
            for group in self._basic.param_groups
        ]
        if rate_factor != 1.0:
            for group in options:
                group["lr"] = group["lr"] * rate_factor
        return options

    def finish_step(self, options: Options | None = None) -> None:
        """All sections are complete: the update may be made, with the loss scale of this moment.

        Args:
            options: what :meth:`options` gave when the step began; None: those of this moment.

        Raises:
            Exception: what went wrong in the thread, if anything did.
        """
        self._tasks.check()
        missing = sorted(set(self._sections) - self._completed)
        assert not missing, f"the step is finished, and its sections {missing} are not complete"
        update, self._unfinished = self._unfinished, _Update()
        update.options = self.options() if options is None else options
        update.scale = self._outcome.loss_scale * self._divisor
        self._completed.clear()
        self._num_reduced = 0
        update.task = self._tasks.put(partial(self._make, update))
        self.pending.append(update)

    @torch.no_grad()
    def apply(self) -> None:
        """Bring the values of the oldest update that is pending into the model, once they are there.

        The overflow, the gradient norm and the loss scale are those of this update from then on. Graphs of
        micro-batches that are under way have saved the parameters: autograd is not told of the change.

        Raises:
            FloatingPointError: too many updates in a row were skipped, as their gradients were not finite.
            Exception: what went wrong in the thread, if anything did.
        """
        assert self.pending, "apply() without an update that is finished"
        update = self.pending[0]
        assert update.task is not None
        self._tasks.wait(update.task)
        self.pending.popleft()
        self._outcome.note_gradients(update.squares, update.scale)
        is_void = self._outcome.overflow
        if update.limited is not None:
            self._outcome.change = update.limited.report
            is_void = not update.limited.is_finite
        with self._times().compute():
            for taken in update.buckets:
                # A parameter's data is a view of this memory with a version counter of its own, which stays.
                values = taken.buffers.values
                assert values is not None
                if not is_void:
                    values.copy_(taken.values)
                taken.buffers.give_back(taken.memory)
        if is_void:
            self._outcome.skip("gradient" if self._outcome.overflow else "change")
        else:
            self._outcome.complete()

    def check_idle(self) -> None:
        """Assert that no step is under way."""
        assert not self.pending, f"{len(self.pending)} updates are pending: apply them first"
        assert not self._completed, f"sections {sorted(self._completed)} are complete: finish the step first"

    def stop(self) -> None:
        """End the thread. What is pending is not made any more, and nothing can be trained."""
        self._tasks.stop()

    # -- in the queue --------------------------------------------------------------------------------------------

    def _reduce(self, section: list[Taken]) -> None:
        under_way: deque[Sequence[Reduction]] = deque()
        ties = [self._ties[index][1] for taken in section for index in taken.views if index in self._ties]
        for group in dict.fromkeys([*ties, *(taken.buffers.part.domain.group for taken in section)]):
            self._host_barrier(group)
        with self._tasks.times().transfer("gradients", sum(taken.memory.nbytes for taken in section)):
            for taken in section:
                for index, view in taken.views.items():
                    if index not in taken.touched:
                        view.zero_()
                    if index in self._ties:
                        dist.all_reduce(view, group=self._ties[index][1])
                if len(under_way) == AT_ONCE:
                    finish(under_way.popleft())
                under_way.append(taken.buffers.part.start_reduction(taken.memory, self._communication_dtype))
            for reductions in under_way:
                finish(reductions)

    def _make(self, update: _Update) -> None:
        """The new values of an update, out of its gradients; nothing if they, or the changes, are not finite."""
        for group in self._groups:
            self._host_barrier(group)
        buckets = update.buckets
        gradients: list[Tensor | None] = [None] * len(self._layout.parameters)
        touched = [False] * len(self._layout.parameters)
        for taken in buckets:
            for index, view in taken.views.items():
                gradients[index], touched[index] = view, index in taken.touched
        update.squares, touched = self._norm.survey(gradients, touched)
        if not math.isfinite(update.squares):
            return
        changes = self._changes.begin(self._layout, self._rows)
        with self._tasks.times().compute():
            self._rows.hand_over(gradients, touched, self._norm.factor(update.squares, update.scale))
            remembered = self._step_with(update.options)
            self._rows.forget_gradients()
        if changes is not None:
            limited = partial(self._corrections.note_limited, self._basic, remembered)
            update.limited = self._changes.limit(changes, self._layout.device, limited)
            if not update.limited.is_finite:
                self._corrections.take_back(self._basic, remembered)
                return
        with self._tasks.times().compute():
            for taken in buckets:
                for owned, offset in self._places[taken.buffers]:
                    view_at(taken.values, offset, owned.master).copy_(owned.master)
        publish([(taken.buffers.part, taken.values) for taken in buckets], self._tasks.times())

    def _step_with(self, options: Options) -> Remembered:
        """Step by means of a twin: schedulers change the options of the optimizer itself meanwhile."""
        basic, twin = self._basic, self._twin
        twin.__dict__.update({key: value for key, value in vars(basic).items() if key != "step"})  # schedulers wrap it
        twin.param_groups = [dict(group) for group in options]
        remembered = self._corrections.step(twin)
        for key, value in vars(twin).items():
            if key != "param_groups":
                vars(basic)[key] = value
        for before, after in zip(options, twin.param_groups, strict=True):
            for key, value in after.items():
                if key not in before or value is not before[key]:
                    raise ValueError(
                        f"{type(basic).__name__} changes its option {key!r} in a step: an asynchronous pipeline cannot "
                        "keep it; choose an optimizer of torch.optim."
                    )
        return remembered


def _twin_of(basic: torch.optim.Optimizer) -> Any:
    """An object of the same class without its ``__del__``: some free there what they share with ``basic``."""
    cls = type(basic)
    return object.__new__(type(cls.__name__, (cls,), {"__del__": lambda self: None}))


def _places(buffers: Buffers, rows: OwnedRows) -> Iterator[tuple[Owned, int]]:
    offset_of = dict(zip(buffers.part.bucket.parameters, buffers.part.bucket.offsets, strict=True))
    for owned, index in zip(rows.owned, rows.indices, strict=True):
        if index in offset_of:
            yield owned, offset_of[index] + owned.start * prod(owned.parameter.shape[1:])
