"""Tensors between the stages of a pipeline: sends that nobody waits for, receives that are posted ahead of use.

A *lane* is one edge of the pipeline in one direction. Messages on a lane arrive in the order in which they were sent.
Two orders of communication are proven free of deadlock by :mod:`paceline.schedules.verify`:

* free: a rank has every lane in a process group of its own, so that no message waits behind another lane's (gloo);
* paired: one group for the pipeline, and both ends of every pair issue their operations in the same order, in batches
  (NCCL, where concurrent communicators are not safe to assume; :func:`calls_of` splits them into calls that it can run
  one after another).

Both ends of a lane work out the shapes of a message from its key. A key that the lane has not seen is announced: the
shapes travel ahead of the tensors, once.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ..measure.clock import Moment, WorkTimes, work_times
from ..measure.device_of_thread import on_this_device
from .formats import Format, Parcel, on_the_wire, unpack
from .groups import gloo_group, new_group
from .shapes import GivenShapes, Meta, Shapes, Value, announce, meta_of, read_announcement, show, tensors_of
from .staging import Staging

CLOSING_S = 60.0
"""How long the end of an engine waits for what was sent to be delivered."""

AT_ONCE_BYTES = 1 << 16
"""The largest message that is sent by the thread that computes: issuing a longer one takes longer than waking another
thread up, since it is copied meanwhile."""

SENT_AT_ONCE = 8
"""Messages that the caller has sent, before the thread is woken up to see to their ends."""

RECORDS = 512
"""The last messages of a lane, whose times are kept."""

TIMEOUT = timedelta(days=7)
"""Of a wait for a peer: how long it may take, the watch knows."""

NOTHING = Meta(())


@dataclass(frozen=True)
class Record(Generic[Moment]):
    """One message, as one end of its lane saw it."""

    number: int
    """On its lane, from the first on: the same at both ends."""
    micro_batch: int
    num_bytes: int
    begun_s: Moment
    """When it could be sent, or when its receive was posted."""
    done_s: Moment
    """When it had arrived. On the sending side: when it was issued, in the free order, or the backend was done with
    it, in the paired one."""


@dataclass
class _Message:
    micro_batch: int
    tensors: list[Tensor]
    begun_s: Any
    ready: list[Callable[[], None]] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    meta: Meta = NOTHING
    """Shapes and dtypes of a message that is received, before it was encoded."""
    format: Format | None = None
    is_announced: bool = False
    has_begun: bool = False
    """Issued, by whichever thread."""
    error: BaseException | None = None
    done_s: Any = None
    """On a GPU in the paired order: the event of its end."""
    is_done: SimpleQueue[None] = field(default_factory=SimpleQueue)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class Lane:
    """One end of one lane. A thread waits for the messages under way, and notes when those that come were done.

    What is sent is noted before it goes: the other end can then not have noted a message that this end has not, however
    long the thread waits for its turn.

    Receives and small sends are issued by the caller, who would else keep the thread from its turn while it computes;
    the thread issues large sends, and what it must first wait for itself.

    Args:
        peer: global rank at the other end.
        is_sender: whether this rank sends on it.
        group: of this lane's own (free), or of the whole pipeline (paired).
        batch: in the paired order, collects operations until :meth:`Transport.flush`; None in the free one.
        announces: announce every message, since no key tells its shapes.
        failed: the first error of any lane, as soon as there is one; shared by the lanes of a rank.
    """

    at_once_bytes = AT_ONCE_BYTES

    def __init__(
        self,
        name: str,
        peer: int,
        *,
        is_sender: bool,
        group: Any,
        shapes: Shapes,
        device: torch.device,
        staging: Staging | None = None,
        batch: _Batch | None = None,
        announces: bool = False,
        failed: list[BaseException] | None = None,
    ) -> None:
        self._announces, self._failed = announces, [] if failed is None else failed
        self.name, self.peer, self.is_sender, self.group, self.shapes = name, peer, is_sender, group, shapes
        self.records: deque[Record[Any]] = deque(maxlen=RECORDS)
        self._num_records = 0
        self._device, self._staging, self._batch = device, staging, batch
        self._arriving: dict[int, _Message] = {}
        self._unknown: deque[tuple[int, Hashable, Format | None]] = deque()
        self._queue: SimpleQueue[_Message | None] = SimpleQueue()
        self._sent: list[_Message] = []
        """Messages on their way, of which the thread is yet to hear."""
        self._last_left: weakref.ref[_Message] | None = None
        """The last message that the thread was left to issue; its memory is not kept."""
        # In the paired order the backend orders its work on the device's streams, and the host need not wait.
        self._thread = (
            None if batch is not None else Thread(target=on_this_device(self._carry_out), name=name, daemon=True)
        )
        if self._thread is not None:
            self._thread.start()

    # -- the sending end -----------------------------------------------------------------------------------------

    def send(self, micro_batch: int, key: Hashable, value: Value | Parcel) -> None:
        """Begin to send; returns at once. The tensors must not be written to before the step ends.

        Raises:
            ValueError: shapes other than those that the receiver was told for this key.
        """
        self._raise_if_failed()
        if isinstance(value, Parcel):
            meta, tensors = value.meta, value.tensors
        else:
            meta, tensors = meta_of(value), tensors_of(value)
        known = None if self._announces else self.shapes.of(key)
        if known is None:
            self._issue(_Message(-1, [self._header(meta)], time.perf_counter()), send=True)
            self._flush()
            self.shapes.learn(key, meta)
        elif known != meta:
            raise ValueError(
                f"micro-batch {micro_batch}: {self.name} are {show(meta)}, and were {show(known)} before: build the "
                "PipelineModule with dynamic_shape=True where shapes change."
            )
        message = _Message(micro_batch, [tensor.detach().contiguous() for tensor in tensors], time.perf_counter())
        if self._staging is not None:
            copies = [self._staging.to_host(tensor) for tensor in message.tensors]
            message.tensors, message.ready = [host for host, _ in copies], [ready for _, ready in copies]
        self._issue(message, send=True)

    # -- the receiving end ---------------------------------------------------------------------------------------

    def post(self, micro_batch: int, key: Hashable, format: Format | None = None) -> None:
        """Make room for a message that will come, and let it come. Posts are in the order of the sends.

        Args:
            format: in which it comes.
        """
        self._raise_if_failed()
        if self._announces and self._batch is None:
            # The thread waits for the announcement, so that the message can arrive while this one computes.
            message = _Message(micro_batch, [], time.perf_counter(), format=format, is_announced=True)
            self._arriving[micro_batch] = message
            self._issue(message, send=False)
        elif self._announces or self._unknown or self.shapes.of(key) is None:
            self._unknown.append((micro_batch, key, format))
            if self._batch is not None:  # the place of this receive is now
                self._meet()
        else:
            self._post(micro_batch, key, format)

    def take(self, micro_batch: int) -> Value:
        """Wait for a message that was posted, and decode it."""
        received = self.receive(micro_batch)
        return unpack(received) if isinstance(received, Parcel) else received

    def receive(self, micro_batch: int) -> Value | Parcel:
        """Wait for a message that was posted; it is as it came."""
        while micro_batch not in self._arriving:
            self._meet()
        message = self._arriving.pop(micro_batch)
        if self._batch is not None:
            self._flush()
            for work in message.works:
                work.wait()
            self.note(message)
        else:
            self._wait_until_done(message)
        if message.error is not None:
            raise message.error
        tensors = message.tensors
        if self._staging is not None and micro_batch >= 0:
            tensors = [self._staging.to_device(tensor) for tensor in tensors]
        if message.format is not None:
            return Parcel(message.meta, tuple(tensors), message.format)
        return tuple(tensors) if message.meta.is_tuple else tensors[0]

    def _post(self, micro_batch: int, key: Hashable, format: Format | None) -> None:
        meta = self.shapes.of(key)
        assert meta is not None
        message = _Message(micro_batch, self._buffers(meta, format), time.perf_counter(), meta=meta, format=format)
        self._arriving[micro_batch] = message
        self._issue(message, send=False)

    def _meet(self) -> None:
        """Wait for the announcement of the first message whose shapes are not known, and post what is known then."""
        key = self._unknown[0][1]
        if self._announces or self.shapes.of(key) is None:
            header = _Message(-1, [self._header(Meta(()))], time.perf_counter(), meta=Meta((), is_tuple=False))
            self._arriving[-1] = header
            self._issue(header, send=False)
            self.shapes.learn(key, read_announcement(self.take(-1)))
        while self._unknown and self.shapes.of(self._unknown[0][1]) is not None:
            self._post(*self._unknown.popleft())

    # -- both ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread, once everything under way is done; a sender's is waited for."""
        if self._thread is not None:
            self.see_to_sent()
            self._queue.put(None)
            if self.is_sender and not self._failed:
                self._thread.join(CLOSING_S)

    def _raise_if_failed(self) -> None:
        if self._failed:
            raise self._failed[0]

    def _wait_until_done(self, message: _Message) -> None:
        while True:
            try:
                message.is_done.get(timeout=1.0)
                return
            except Empty:
                if message.error is None:
                    self._raise_if_failed()  # on another lane: what is waited for here may never come

    def _header(self, meta: Meta) -> Tensor:
        try:
            return announce(meta).to(self._device if self._staging is None else "cpu")
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _buffers(self, meta: Meta, format: Format | None) -> list[Tensor]:
        return [self._buffer(shape, dtype) for shape, dtype in on_the_wire(meta, format).tensors]

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._staging is not None:
            return self._staging.host_buffer(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _issue(self, message: _Message, *, send: bool) -> None:
        if self._batch is not None:
            self._batch.add(self, message, send)
            return
        must_wait = message.ready or message.is_announced or (send and message.num_bytes > self.at_once_bytes)
        last_left = None if self._last_left is None else self._last_left()
        if not must_wait and (last_left is None or last_left.has_begun):
            self._attempt(self._begin, message)
            if send and len(self._sent) < SENT_AT_ONCE:  # it ends by itself, and nobody waits for it
                self._sent.append(message)
                return
        else:  # in the order of the lane
            self._last_left = weakref.ref(message)
        self.see_to_sent()
        self._queue.put(message)

    def see_to_sent(self) -> None:
        """Have the thread wait for the ends of what the caller has sent, and let go of it."""
        for message in self._sent:
            self._queue.put(message)
        self._sent.clear()

    def _flush(self) -> None:
        if self._batch is not None:
            self._batch.flush()

    def _carry_out(self) -> None:
        under_way: deque[_Message] = deque()
        is_open = True
        while is_open or under_way:
            while is_open and (not under_way or not (self._announces or self._queue.empty())):
                entry = self._queue.get()
                if entry is None:
                    is_open = False
                else:
                    if not entry.has_begun:
                        self._attempt(self._begin, entry)
                    under_way.append(entry)
                del entry
            if not under_way:
                return
            message = under_way.popleft()
            self._attempt(self._wait, message)
            if not self.is_sender:
                self.note(message)
            message.is_done.put(None)
            del message  # its tensors are free

    def _attempt(self, act: Callable[[_Message], None], message: _Message) -> None:
        try:
            if message.error is None:
                self._raise_if_failed()
                act(message)
        except BaseException as caught:
            message.error = caught
            if not self._failed:
                caught.paceline_lane = self  # type: ignore[attr-defined]
            self._failed.append(caught)  # the connection is gone; what follows fails as well

    def _begin(self, message: _Message) -> None:
        for ready in message.ready:
            ready()
        act = dist.isend if self.is_sender else dist.irecv
        if message.is_announced:
            header = self._header(Meta(()))
            dist.recv(header, self.peer, group=self.group)
            message.meta = read_announcement(header)
            message.tensors = self._buffers(message.meta, message.format)
        if message.ready or not self.is_sender:  # or the time of the computation would be the link's
            message.begun_s = time.perf_counter()
        if self.is_sender:
            self.note(message)
        message.works = [act(tensor, self.peer, group=self.group) for tensor in message.tensors]
        message.has_begun = True

    def _wait(self, message: _Message) -> None:
        for work in message.works:
            work.wait()

    def note(self, message: _Message) -> None:
        if message.micro_batch >= 0 and message.error is None:
            self._num_records += 1
            done_s = time.perf_counter() if message.done_s is None else message.done_s
            self.records.append(
                Record(self._num_records, message.micro_batch, message.num_bytes, message.begun_s, done_s)
            )


MOST_AT_A_TIME = 8
"""Ranks of a group up to which NCCL certainly runs the operations of a call at the same time."""


def calls_of(operations: Sequence[tuple[int, bool]], num_ranks: int) -> list[range]:
    """Cut operations, given as peer and whether it is a send, into calls of NCCL that may be issued one after another.

    Within a call NCCL takes the first operation each way with each peer, and only when all of them are done, receives
    included, the second ones. A rank with two tensors to send and one to receive would so wait for the answer before
    its second tensor goes, and the other end for that tensor before it answers. So a call has one operation each way
    with a peer. In groups of more than :data:`MOST_AT_A_TIME` ranks, of which NCCL takes so many peers at a time, it
    has a single operation.

    Args:
        num_ranks: of the group.

    Source: ``ncclAddWorkBatchToPlan`` and ``scheduleP2pTasksToPlan`` in NCCL's ``enqueue.cc``.
    """
    found, begun, ways = [], 0, set[tuple[int, bool]]()
    for number, way in enumerate(operations):
        if way in ways or (ways and num_ranks > MOST_AT_A_TIME):
            found.append(range(begun, number))
            begun, ways = number, set()
        ways.add(way)
    return [*found, range(begun, len(operations))] if operations else []


class _Batch:
    """The paired order: operations between two computations are issued together, in order.

    Args:
        times: of what a device does behind the host; None: the host's clock tells.
    """

    def __init__(self, times: WorkTimes | None = None) -> None:
        self._times = times
        self._waiting: list[tuple[Lane, _Message, bool]] = []
        self._sent: deque[tuple[Lane, _Message]] = deque()

    def add(self, lane: Lane, message: _Message, send: bool) -> None:
        self._waiting.append((lane, message, send))

    def flush(self) -> None:
        if not self._waiting:
            return
        operations: list[tuple[_Message, Any]] = []
        ways: list[tuple[int, bool]] = []
        for lane, message, send in self._waiting:
            for ready in message.ready:
                ready()
            act = dist.isend if send else dist.irecv
            operations += [
                (message, dist.P2POp(act, tensor, lane.peer, group=lane.group)) for tensor in message.tensors
            ]
            ways += [(lane.peer, send)] * len(message.tensors)
        begun = None if self._times is None else self._times.now()
        group = self._waiting[0][0].group
        for numbers in calls_of(ways, dist.get_world_size(group)):
            self._issue([operations[number] for number in numbers], begun)
        self._sent.extend((lane, message) for lane, message, send in self._waiting if send)
        self._waiting = []
        while self._sent and all(work.is_completed() for work in self._sent[0][1].works):
            lane, message = self._sent.popleft()
            lane.note(message)

    def _issue(self, call: Sequence[tuple[_Message, Any]], begun: Any) -> None:
        works = dist.batch_isend_irecv([operation for _, operation in call])
        done = None if self._times is None else self._times.done(works)
        is_each = len(works) == len(call)  # or one for the whole call
        for number, (message, _) in enumerate(call):
            message.works += [works[number]] if is_each else works
            if self._times is not None:  # the host runs ahead of the device: its clock tells nothing
                message.begun_s, message.done_s = begun, done

    def finish(self) -> None:
        self.flush()
        while self._sent:
            lane, message = self._sent.popleft()
            for work in message.works:
                work.wait()
            lane.note(message)


class Transport:
    """The lanes of a rank's stages: ``activations_in``, ``activations_out``, ``gradients_in``, ``gradients_out``.

    Collective: every rank of the world makes one at the same time.

    Args:
        pipes: of each pipeline of the world, the global rank of each stage; a rank may have several stages.
        order: ``"free"`` or ``"paired"``.
        activation_shapes: a new book of shapes for a lane of activations.
        announces: announce every activation: no two need have the same shapes.
        failed: the first error of any lane; shared by transports of which none can go on without the others.
        group: of this rank's pipeline, for the paired order; None: one is made. Its operations, here and elsewhere,
            must have one order on both ranks of every pair.
    """

    def __init__(
        self,
        pipes: Sequence[Sequence[int]],
        rank: int,
        *,
        order: str,
        device: torch.device,
        staging: Staging | None = None,
        activation_shapes: Callable[[], Shapes] = Shapes,
        announces: bool = False,
        failed: list[BaseException] | None = None,
        group: Any = None,
    ) -> None:
        self.order = order
        self.failed: list[BaseException] = [] if failed is None else failed
        self.staging = staging
        self._batch = _Batch(work_times(device)) if order == "paired" else None
        self._lanes: dict[int, dict[str, Lane]] = {}
        groups = _free_groups(pipes, rank) if order == "free" else _paired_groups(pipes, rank, device, group)
        for pipe in pipes:
            for stage in (number for number, holder in enumerate(pipe) if holder == rank):
                self._lanes[stage] = {
                    name: Lane(
                        f"{name.replace('_', ' ')} of stage {stage}",
                        pipe[target if source == stage else source],
                        is_sender=source == stage,
                        group=groups[source, target],
                        shapes=activation_shapes() if name.startswith("activations") else GivenShapes(),
                        device=device,
                        staging=staging,
                        batch=self._batch,
                        announces=announces and name.startswith("activations"),
                        failed=self.failed,
                    )
                    for name, source, target in lanes_of(stage, len(pipe))
                    if pipe[source] != pipe[target]
                }

    def __getitem__(self, name: str) -> Lane:
        return self.lanes()[name]

    def lanes(self, stage: int | None = None) -> dict[str, Lane]:
        """Those of a stage that this rank holds, by name; None: of its first one."""
        return dict(self._lanes[min(self._lanes) if stage is None else stage]) if self._lanes else {}

    def flush(self) -> None:
        """Issue what the paired order has collected."""
        if self._batch is not None:
            self._batch.flush()

    def finish(self) -> None:
        """Let go of what was sent, at the end of a step."""
        if self._batch is not None:
            self._batch.finish()
            return
        for lanes in self._lanes.values():
            for lane in lanes.values():
                lane.see_to_sent()

    def close(self) -> None:
        """Deliver what was sent, and end. What is sent or received afterwards is an error."""
        for lanes in self._lanes.values():
            for lane in lanes.values():
                lane.close()
        self.failed.append(RuntimeError("the engine was destroyed: it sends and receives no more; make another one."))


def lanes_of(stage: int, num_stages: int) -> list[tuple[str, int, int]]:
    """Name, sending and receiving stage of each lane at ``stage``."""
    lanes = []
    if stage > 0:
        lanes += [("activations_in", stage - 1, stage), ("gradients_out", stage, stage - 1)]
    if stage < num_stages - 1:
        lanes += [("activations_out", stage, stage + 1), ("gradients_in", stage + 1, stage)]
    return lanes


def _free_groups(pipes: Sequence[Sequence[int]], rank: int) -> dict[tuple[int, int], Any]:
    """A group for each way between two stages of the pipeline of ``rank``. Collective.

    No rank has two lanes in one of them, and so no two threads. A pipeline with one stage a rank has four, however long
    it is: every other edge has the same two, one for each way.
    """
    groups: dict[tuple[int, int], Any] = {}
    for pipe in pipes:
        for alike in _disjoint_edges(pipe):
            for is_back in (False, True):
                group = gloo_group(sorted(set(pipe)), TIMEOUT)
                if rank in pipe:
                    groups.update({(s + 1, s) if is_back else (s, s + 1): group for s in alike})
    return groups


def _connect(pipe: Sequence[int], rank: int, device: torch.device, group: Any) -> None:
    """Send a number both ways between neighbouring stages.

    NCCL connects two ranks, each way by itself, when they first use it, and both hosts wait for each other. Within a
    step one of them may not come: what it computes can wait for a message that the other was about to send.
    """
    edges = [edge for edge in pairwise(pipe) if edge[0] != edge[1] and rank in edge]
    peers = sorted({a + b - rank for a, b in edges})
    acts = [(act, peer) for peer in peers for act in (dist.isend, dist.irecv)]
    operations = [dist.P2POp(act, torch.zeros(1, device=device), peer, group=group) for act, peer in acts]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    get_accelerator().synchronize()


def _disjoint_edges(pipe: Sequence[int]) -> list[list[int]]:
    """The edges between neighbouring stages on different ranks, by their first stage, in sets without a common rank."""
    found: list[tuple[set[int], list[int]]] = []
    for stage, ends in enumerate(pairwise(pipe)):
        if ends[0] == ends[1]:
            continue
        ranks, edges = next(((r, e) for r, e in found if r.isdisjoint(ends)), (None, None))
        if ranks is None or edges is None:
            ranks, edges = set(), []
            found.append((ranks, edges))
        ranks.update(ends)
        edges.append(stage)
    return [edges for _, edges in found]


def _paired_groups(
    pipes: Sequence[Sequence[int]], rank: int, device: torch.device, given: Any
) -> dict[tuple[int, int], Any]:
    groups = {}
    for pipe in pipes:
        group = new_group(sorted(set(pipe)), TIMEOUT) if given is None else given
        if rank not in pipe:
            continue
        dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)
        if device.type == "cuda":
            # A group's first operation must be of all its ranks.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            _connect(pipe, rank, device, group)
        groups.update({edge: group for s in range(len(pipe) - 1) for edge in ((s, s + 1), (s + 1, s))})
    return groups
