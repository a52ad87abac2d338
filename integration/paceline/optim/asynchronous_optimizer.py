"""The pipelines' optimizer beside the computation: gradients of a step become values while later micro-batches run.

A step's gradients are complete when each section (a stage that this rank holds) has been closed. From then on they are
an update of their own: reduced to the owners, stepped, and sent to all as new values, which wait in the memory of the
gradients that they were made of until the schedule says that the model takes them. Gradients that come in the meantime
go to other memory, which is taken only then.

All collectives are issued in the order of a queue, by one thread: every rank of a group issues the same ones in the
same order, whatever its model computes. They are the only ones of their groups while updates are under way. On a GPU
the thread has a stream of its own: an update waits for the backwards that its gradients come from, what is computed
with the new values waits for the update, and nothing else of the one waits for the other.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.side_stream import SideStream
from ..measure.clock import Transfer
from .buckets import Buffers, DomainBucket, view_at
from .corrections import Corrections
from .sharded import Owned, ShardedOptimizer

STOP_S = 10.0
"""How long :meth:`AsynchronousOptimizer.stop` waits for a task that is running: it may wait for a rank that is gone."""


@dataclass(eq=False)
class _Task:
    run: Callable[[], None]
    after: Any = None
    """What the computation had issued to the device when the task was given: the task comes after it."""
    end: Any = None
    """What the task has issued to the device itself."""
    is_done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class _Closed:
    """Gradients of one bucket, that are complete.

    Args:
        memory: of the gradients, and of the new values from when the owners have stepped.
        values: the beginning of ``memory``, as values.
        views: of the gradients of the bucket's parameters, by number.
    """

    buffers: Buffers
    memory: Tensor
    values: Tensor
    views: dict[int, Tensor]


@dataclass(eq=False)
class _Update:
    """What the gradients of one step become.

    Args:
        touched: which parameters a backward of this rank has reached.
        closed: gradients by section.
        options: of the optimizer's groups, as they were when the step was finished.
        scale: what gradients were multiplied by.
        squares: of the gradients, known when it is made.
    """

    touched: list[bool]
    closed: dict[int, list[_Closed]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    scale: float = 1.0
    squares: float = 0.0
    task: _Task | None = None

    @property
    def buckets(self) -> list[_Closed]:
        return [closed for section in sorted(self.closed, reverse=True) for closed in self.closed[section]]


class AsynchronousOptimizer(ShardedOptimizer):
    """A :class:`ShardedOptimizer` whose steps are taken apart: :meth:`close`, :meth:`finish_step`, :meth:`apply`.

    For a step, on every rank: :meth:`close` of each section after its last backward, :meth:`finish_step`, and at any
    later time, even after backwards of later steps, :meth:`apply`. Values change in :meth:`apply` only. A micro-batch
    whose forward came before it and whose backward comes after it has its backward with the new values.

    With :meth:`apply` right after :meth:`finish_step` it equals ``ShardedOptimizer.step`` in every bit.

    Masters, and the memory of a step's gradients, are always this object's own: with fp32 values on one rank this takes
    memory that :class:`ShardedOptimizer` does not. A second set of gradients is taken for a bucket only when a backward
    comes between :meth:`close` and :meth:`apply`.

    Args:
        corrections: for gradients that come late.
        ties: weights of which another rank has a copy, and the two ranks: their gradients are added up when the section
            is reduced. Such a weight is to be among those ``apart``, and in the section that closes last.
        overlap: make updates in a thread beside the computation. Otherwise everything happens in :meth:`apply`, which
            is then collective over ``group``, ``model_group`` and the ties.

    The groups are to be used by nobody else while updates are pending.

    The other arguments are those of :class:`ShardedOptimizer`. A loss scale that changes needs every update to be
    applied before the next backward of the sections that it is of.
    """

    is_asynchronous = True

    def __init__(
        self,
        basic: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        *,
        corrections: Corrections | None = None,
        ties: Sequence[tuple[nn.Parameter, Any]] = (),
        **options: Any,
    ) -> None:
        super().__init__(basic, names, **options)
        self.corrections = corrections or Corrections()
        self._ties = {self._index_of[weight]: group for weight, group in ties if weight in self._index_of}
        self._sections: dict[int, list[Buffers]] = {}
        self._buffers_of: dict[int, Buffers] = {}
        self._owned_in: dict[Buffers, list[tuple[Owned, int]]] = {}
        """Masters whose values lie in a bucket, and where."""
        for buffers in self._buffers:
            self._sections.setdefault(buffers.part.domain.section, []).append(buffers)
            self._buffers_of.update(dict.fromkeys(buffers.part.bucket.parameters, buffers))
            self._owned_in[buffers] = list(_places(buffers.part, self.owned, self._index))
        self._twin = _twin_of(basic)
        self.is_settled: Callable[[], bool] = lambda: True
        """Whether all steps that have begun are done; who runs the steps knows."""
        self._closed: set[int] = set()
        self._num_reduced = 0
        """Sections, in falling order, of the step that is not finished, whose reduction is in the queue."""
        self._lent: set[Buffers] = set()
        """Whose gradients belong to an update: the next backward needs other memory."""
        self._spares: dict[Buffers, list[Tensor]] = {buffers: [] for buffers in self._buffers}
        self._num_sets = dict.fromkeys(self._buffers, 1)
        self._unfinished: _Update | None = None
        self._pending: deque[_Update] = deque()
        self._transfers: deque[Transfer] = deque()
        """Collectives of the thread that the clock has not been told of."""
        self._tasks = _Tasks(self.device, has_thread=self.overlap)

    # -- gradients -----------------------------------------------------------------------------------------------

    @contextmanager
    def final_backward(self, is_final: bool = True) -> Iterator[None]:
        """:meth:`close` says which backward was the last."""
        yield

    def _collect(self, index: int, buffers: Buffers, parameter: nn.Parameter) -> None:
        if buffers in self._lent:
            if self.dynamic_loss_scale and (self._pending or self._closed):
                raise ValueError(
                    "a gradient came before the update of the step before was applied, and the loss scale is dynamic: "
                    'gradients of one step would have different scales; set fp16.loss_scale, or use "bf16".'
                )
            self._renew(buffers)
        super()._collect(index, buffers, parameter)

    def _renew(self, buffers: Buffers) -> None:
        """Have the coming gradients go to other memory than that of those which are closed."""
        if self._spares[buffers]:
            memory = self._spares[buffers].pop()
        else:
            memory = torch.empty_like(buffers.gradients)
            self._num_sets[buffers] += 1
        self._lent.remove(buffers)
        buffers.gradients = memory
        for index, offset in zip(buffers.part.bucket.parameters, buffers.part.bucket.offsets, strict=True):
            self._views[index] = view_at(memory, offset, self.parameters[index])

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The gradient that is being accumulated; zeros where no backward has reached the parameter since."""
        buffers = self._buffers_of[self._index_of[parameter]]
        if buffers in self._lent:
            self._renew(buffers)
        return super().gradient(parameter)

    def gradient_bytes(self) -> int:
        """What all sets of gradients take on this rank."""
        return sum(n * b.gradients.numel() * b.gradients.element_size() for b, n in self._num_sets.items())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of sections that are not closed; the others belong to an update."""
        for parameter in self.parameters:
            parameter.grad = None
        self._touched = [False] * len(self.parameters)

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, closure: None = None) -> None:
        raise NotImplementedError("an asynchronous optimizer has no step: call close, finish_step and apply.")

    def reduce_gradients(self, **kwargs: Any) -> None:
        raise NotImplementedError("an asynchronous optimizer reduces what is closed: call close.")

    @property
    def num_pending(self) -> int:
        """Steps that are finished, and whose updates are not yet applied."""
        return len(self._pending)

    @torch.no_grad()
    def close(self, section: int) -> None:
        """The last backward of a step through ``section`` has run on this rank: its gradients may be reduced.

        Sections are reduced in falling order, on all ranks: one that closes out of order waits for those above it.

        Raises:
            Exception: what went wrong in the thread, if anything did.
        """
        self._tasks.check()
        assert section not in self._closed, f"section {section} closed twice in a step"
        self._closed.add(section)
        if self._unfinished is None:
            self._unfinished = _Update([False] * len(self.parameters))
        update = self._unfinished
        for buffers in self._sections.get(section, ()):
            for index in buffers.part.bucket.parameters:
                if index in self._ties:
                    self.gradient(self.parameters[index])  # the other rank's copy has one, or may have
            if buffers in self._lent:
                self._renew(buffers)
            update.closed.setdefault(section, []).append(self._close(buffers, update.touched))
        for other in sorted(self._sections, reverse=True)[self._num_reduced :]:
            if other not in self._closed:
                break
            self._num_reduced += 1
            self._tasks.put(partial(self._reduce_closed, update.closed[other], update.touched))

    def _close(self, buffers: Buffers, touched: list[bool]) -> _Closed:
        memory, values = buffers.gradients, buffers.values
        assert values is not None
        # The new values have the memory of the gradients, of which nobody needs anything when there are any.
        has_room = memory.element_size() >= values.element_size()
        views = {}
        for index in buffers.part.bucket.parameters:
            views[index] = self._views[index]
            touched[index], self._touched[index] = self._touched[index], False
            self.parameters[index].grad = None
        self._lent.add(buffers)
        place = memory.view(values.dtype)[: values.numel()] if has_room else torch.empty_like(values)
        return _Closed(buffers, memory, place, views)

    def finish_step(self) -> None:
        """All sections are closed: the update may be made, with the options and the loss scale of this moment.

        Raises:
            Exception: what went wrong in the thread, if anything did.
        """
        self._tasks.check()
        missing = sorted(set(self._sections) - self._closed)
        assert not missing, f"the step is finished, and its sections {missing} are not closed"
        update = self._unfinished or _Update([False] * len(self.parameters))
        update.options = [
            {key: value.clone() if torch.is_tensor(value) else value for key, value in group.items()}
            for group in self.param_groups
        ]
        update.scale = self.loss_scale * self.divisor
        self._closed.clear()
        self._num_reduced, self._unfinished = 0, None
        # Learning-rate schedulers look whether there was a step before their own.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        update.task = self._tasks.put(partial(self._make, update))
        self._pending.append(update)

    @torch.no_grad()
    def apply(self) -> None:
        """Bring the values of the oldest update that is pending into the model, once they are there.

        :attr:`overflow`, the gradient norm and the loss scale are those of this update from then on. Graphs of
        micro-batches that are under way have saved the parameters: autograd is not told of the change.

        Raises:
            FloatingPointError: too many updates in a row were left out, as their gradients were not finite.
            Exception: what went wrong in the thread, if anything did.
        """
        assert self._pending, "apply() without an update that is finished"
        update = self._pending[0]
        assert update.task is not None
        if self.overlap and self.clock is not None:
            start = self.clock.now()
            self._tasks.wait(update.task)
            end = self.clock.now()
            if self.device.type == "cuda":
                self.clock.add_idle(start, end)
            else:
                count = len(self._transfers)  # the thread may add to them meanwhile
                self.clock.add_wait(start, end, [self._transfers.popleft() for _ in range(count)])
        else:
            self._tasks.wait(update.task)
        self._pending.popleft()
        self._note(update.squares, update.scale)
        with super()._compute():
            for closed in update.buckets:
                # A parameter's data is a view of this memory with a version counter of its own, which stays.
                values = closed.buffers.values
                assert values is not None
                if not self.overflow:
                    values.copy_(closed.values)
                self._spares[closed.buffers].append(closed.memory)
        if self.overflow:
            self._left_out()

    # -- in the queue --------------------------------------------------------------------------------------------

    def _reduce_closed(self, section: Sequence[_Closed], touched: Sequence[bool]) -> None:
        works = []
        num_bytes = sum(closed.memory.numel() * closed.memory.element_size() for closed in section)
        with self._transfer("gradients", num_bytes):
            for closed in section:
                for index, view in closed.views.items():
                    if not touched[index]:
                        view.zero_()
                    if index in self._ties:
                        dist.all_reduce(view, group=self._ties[index])
                works += closed.buffers.part.start_reduction(closed.memory, self._communication_dtype)
            for reduction in works:
                reduction.finish()

    def _make(self, update: _Update) -> None:
        """The new values of an update, out of its gradients, or nothing if they are not finite."""
        buckets = update.buckets
        gradients = [torch.empty(0)] * len(self.parameters)
        for closed in buckets:
            for index, view in closed.views.items():
                gradients[index] = view
        update.squares, touched = self._survey(gradients, update.touched)
        if not math.isfinite(update.squares):
            return
        with self._compute():
            self._hand_over(gradients, touched, update.squares, update.scale)
            self._step_with(update.options)
            for owned in self.owned:
                owned.master.grad = None
            for closed in buckets:
                for owned, offset in self._owned_in[closed.buffers]:
                    view_at(closed.values, offset, owned.master).copy_(owned.master)
        sharded = [closed for closed in buckets if closed.buffers.part.shard]
        num_bytes = sum(closed.values.numel() * closed.values.element_size() for closed in sharded)
        with self._transfer("values", num_bytes):
            works = [work for closed in sharded for work in closed.buffers.part.start_publishing(closed.values)]
            for work in works:
                work.wait()

    def _step_with(self, options: list[dict[str, Any]]) -> None:
        """Step by means of a twin: schedulers change the options of the optimizer itself meanwhile."""
        basic, twin = self.optimizer, self._twin
        twin.__dict__.update({key: value for key, value in vars(basic).items() if key != "step"})  # schedulers wrap it
        twin.param_groups = [dict(group) for group in options]
        self.corrections.step(twin)
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

    def _compute(self) -> AbstractContextManager[None]:
        return nullcontext() if self.overlap else super()._compute()  # clocks are of one thread

    def _transfer(self, kind: str, num_bytes: int) -> AbstractContextManager[None]:
        return self._noted(kind, num_bytes) if self.overlap else super()._transfer(kind, num_bytes)

    @contextmanager
    def _noted(self, kind: str, num_bytes: int) -> Iterator[None]:
        """A collective of the thread, for the clock, which is the other thread's."""
        begun_s = time.perf_counter()
        yield
        has_peers = self._domain.size > 1 or kind == "norm"
        if self.clock is not None and has_peers and self.device.type != "cuda":  # a GPU's runs behind the host
            self._transfers.append(Transfer(kind, num_bytes, begun_s, time.perf_counter()))

    # -- between updates -----------------------------------------------------------------------------------------

    def _dtype_for(self, dtypes: set[torch.dtype]) -> torch.dtype:
        if len(dtypes) > 1:
            raise ValueError(
                f"parameters of {sorted(map(str, dtypes))} cannot be updated beside the computation: cast the model."
            )
        return super()._dtype_for(dtypes)

    def check_settled(self) -> None:
        """Raise RuntimeError unless all steps that have begun are done, on all ranks alike."""
        if not self.is_settled():
            raise RuntimeError("steps are under way, and their updates with them: call engine.flush() first.")

    def _check_nothing_is_under_way(self) -> None:
        assert not self._pending, f"{len(self._pending)} updates are pending: apply them first"
        assert not self._closed, f"sections {sorted(self._closed)} are closed: finish the step first"

    def publish(self) -> None:
        self._check_nothing_is_under_way()
        super().publish()

    def state_dict(self) -> dict[str, Any]:
        self._check_nothing_is_under_way()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any], **kwargs: Any) -> None:
        self._check_nothing_is_under_way()
        super().load_state_dict(state, **kwargs)

    def rebuild(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "the parameters of an asynchronous optimizer cannot change: save a checkpoint, and load it into another "
            "pipeline."
        )

    def stop(self) -> None:
        """End the thread. What is pending is not made any more, and this object cannot be used for training."""
        self._tasks.stop()

    def destroy(self) -> None:
        self.stop()
        self._pending.clear()
        self._unfinished = None
        self._spares.clear()
        self._sections.clear()
        self._buffers_of.clear()
        self._owned_in.clear()
        self._num_sets.clear()
        self._lent.clear()
        super().destroy()


def _twin_of(basic: torch.optim.Optimizer) -> Any:
    """Of the same class, but that its end is nobody's business: some free what they share with ``basic``."""
    cls = type(basic)
    return object.__new__(type(cls.__name__, (cls,), {"__del__": lambda self: None}))


class _Tasks:
    """Runs tasks one after another: in a thread, or when one of them is waited for.

    After one has failed, none is run any more: other ranks would be given what they do not expect.
    """

    def __init__(self, device: torch.device, *, has_thread: bool) -> None:
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._has_thread, self._is_stopped = has_thread, False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._last: Any = None
        # Without a thread, kernels are issued in the stream that the model computes in, in order.
        self._side = SideStream(device if has_thread else torch.device("cpu"))

    def put(self, run: Callable[[], None]) -> _Task:
        task = _Task(run, after=self._side.mark())
        self._queue.put(task)
        if self._has_thread and self._thread is None and not self._is_stopped:
            self._thread = threading.Thread(target=self._work, name="paceline-updates", daemon=True)
            self._thread.start()
        return task

    def wait(self, task: _Task) -> None:
        """Until ``task`` has been run; what was put in before has been run then too. The device is not waited for."""
        while not self._has_thread and not task.is_done.is_set():
            first = self._queue.get_nowait()
            assert first is not None
            self._run(first)
        task.is_done.wait()
        self.check()
        self._side.wait(task.end)

    def check(self) -> None:
        """Raise what a task has raised."""
        if self._error is not None:
            raise self._error
        assert not self._is_stopped, "the optimizer has been stopped"

    def stop(self) -> None:
        self._is_stopped = True
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(STOP_S)
            self._side.wait(self._last)  # memory that it has used may be freed

    def _work(self) -> None:
        with self._side.entered():
            while (task := self._queue.get()) is not None:
                self._run(task)

    def _run(self, task: _Task) -> None:
        try:
            if self._error is None and not self._is_stopped:
                self._side.wait(task.after)
                with torch.no_grad():  # of each thread for itself
                    task.run()
                self._last = task.end = self._side.mark()
        except BaseException as error:
            self._error = error
        finally:
            task.is_done.set()


def _places(part: DomainBucket, owned: Sequence[Owned], indices: Sequence[int]) -> Iterator[tuple[Owned, int]]:
    offset_of = dict(zip(part.bucket.parameters, part.bucket.offsets, strict=True))
    for one, index in zip(owned, indices, strict=True):
        if index in offset_of:
            yield one, offset_of[index] + one.start * prod(one.parameter.shape[1:])
