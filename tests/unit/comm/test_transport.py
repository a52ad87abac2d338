"""Lanes over a wire that is a queue in this process: what is announced, what arrives, what ends, what is refused."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm import transport
from paceline.comm.shapes import Shapes, Value, meta_of
from paceline.comm.transport import Lane, _Batch, _Message, lanes_of
from support.ranks import PATIENCE_S

CPU = torch.device("cpu")


@dataclass
class Work:
    """One operation; it is completed when the test says so, or once it was waited for."""

    tensor: Tensor
    wire: Wire | None = None
    completed: bool = False

    def wait(self) -> None:
        while self.wire is not None and not self.completed:  # receives are served in the order of their posts
            work = self.wire.posted.popleft()
            work.tensor.copy_(self.wire.tensors.get(timeout=60))
            work.completed = True
        self.completed = True

    def is_completed(self) -> bool:
        return self.completed


@dataclass
class Wire:
    """In the place of ``torch.distributed``, for one lane."""

    tensors: SimpleQueue[Tensor] = field(default_factory=SimpleQueue)
    sent: list[Work] = field(default_factory=list)
    posted: deque[Work] = field(default_factory=deque)
    delay_s: float = 0.0
    error: Exception | None = None

    def isend(self, tensor: Tensor, peer: int, group: Any = None) -> Work:
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        self.tensors.put(tensor.clone())
        self.sent.append(Work(tensor))
        return self.sent[-1]

    def irecv(self, tensor: Tensor, peer: int, group: Any = None) -> Work:
        self.posted.append(Work(tensor, self))
        return self.posted[-1]

    def recv(self, tensor: Tensor, peer: int, group: Any = None) -> None:
        self.irecv(tensor, peer).wait()

    def P2POp(self, act: Any, tensor: Tensor, peer: int, group: Any = None) -> Any:
        return lambda: act(tensor, peer)

    def get_world_size(self, group: Any = None) -> int:
        return 2

    def batch_isend_irecv(self, operations: list[Any]) -> list[Work]:
        return [operation() for operation in operations]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(transport, "dist", wire)
    return wire


@pytest.fixture(params=["free", "paired"])
def ends(request: pytest.FixtureRequest, wire: Wire) -> Iterator[list[Lane]]:
    """The sending and the receiving end of a lane, each in an order of its own."""
    ends = [lane(is_sender, request.param) for is_sender in (True, False)]
    yield ends
    for end in ends:
        end.close()


def lane(is_sender: bool, order: str, *, announces: bool = False, failed: list[BaseException] | None = None) -> Lane:
    return Lane(
        "activations of stage 0",
        1,
        is_sender=is_sender,
        group=None,
        shapes=Shapes(),
        device=CPU,
        batch=_Batch() if order == "paired" else None,
        announces=announces,
        failed=failed,
    )


def flush(end: Lane) -> None:
    if end._batch is not None:
        end._batch.flush()


def carried(sender: Lane, receiver: Lane, values: list[Value], keys: list[Any]) -> list[Value]:
    """All sent, then all posted, then all taken: the wire is as long as need be."""
    for number, (value, key) in enumerate(zip(values, keys, strict=True)):
        sender.send(number, key, value)
        flush(sender)
    for number, key in enumerate(keys):
        receiver.post(number, key)
    return [receiver.take(number) for number in range(len(keys))]


def assert_equal(found: list[Value], wanted: list[Value]) -> None:
    assert [meta_of(value) for value in found] == [meta_of(value) for value in wanted]
    for value, other in zip(found, wanted, strict=True):
        pairs = zip(value, other, strict=True) if isinstance(value, tuple) else [(value, other)]
        assert all(torch.equal(a, b) for a, b in pairs)


@given(st.integers(1, 9))
def test_both_ends_of_every_lane_are_there(num_stages: int) -> None:
    ends = sorted((source, target, name) for s in range(num_stages) for name, source, target in lanes_of(s, num_stages))
    wanted = []
    for stage in range(num_stages - 1):
        wanted += [(stage, stage + 1, f"activations_{end}") for end in ("in", "out")]
        wanted += [(stage + 1, stage, f"gradients_{end}") for end in ("in", "out")]
    assert ends == sorted(wanted)


# -- what arrives -----------------------------------------------------------------------------------------------------


def test_a_key_is_announced_once(ends: list[Lane], wire: Wire) -> None:
    values: list[Value] = [torch.rand(2, 3), torch.rand(2, 3), (torch.rand(4), torch.arange(5)), torch.rand(2, 3)]
    assert_equal(carried(*ends, values, ["a", "a", "b", "a"]), values)
    assert len(wire.sent) == 2 + 5
    assert [record.micro_batch for record in ends[1].records] == [0, 1, 2, 3]
    assert [record.num_bytes for record in ends[1].records] == [24, 24, 16 + 40, 24]


def test_other_shapes_for_a_key_are_refused(ends: list[Lane]) -> None:
    sender, _ = ends
    sender.send(0, "a", torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"micro-batch 1.*\[3, 3\] float32, and were \[2, 3\] .*dynamic_shape=True"):
        sender.send(1, "a", torch.zeros(3, 3))


@pytest.mark.parametrize("order", ["free", "paired"])
def test_shapes_that_no_key_tells_are_announced_each_time(order: str, wire: Wire) -> None:
    sender, receiver = lane(True, order, announces=True), lane(False, order, announces=True)
    values: list[Value] = [torch.rand(2), torch.rand(0, 3), (torch.rand(2),), (torch.rand(4, 1), torch.tensor(True))]
    try:
        assert_equal(carried(sender, receiver, values, [0] * 4), values)
    finally:
        sender.close()
        receiver.close()
    assert len(wire.sent) == 4 + 5


# -- what ends --------------------------------------------------------------------------------------------------------


def test_the_paired_order_keeps_only_what_is_under_way(wire: Wire) -> None:
    sender = lane(True, "paired")
    batch = sender._batch
    assert batch is not None
    sender.send(0, "a", torch.zeros(2))
    batch.flush()
    for number in range(1, 4):
        sender.send(number, "a", torch.zeros(2))
        batch.flush()
    assert [message.micro_batch for _, message in batch._sent] == [-1, 0, 1, 2, 3]
    for work in wire.sent:
        work.completed = True
    sender.send(4, "a", torch.zeros(2))
    batch.flush()
    assert [message.micro_batch for _, message in batch._sent] == [4]
    assert [record.micro_batch for record in sender.records] == [0, 1, 2, 3]
    batch.finish()
    assert not batch._sent
    assert wire.sent[-1].completed
    assert [record.micro_batch for record in sender.records] == [0, 1, 2, 3, 4]


def test_small_messages_are_issued_by_the_caller_and_large_ones_by_the_thread(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuers, isend = [], wire.isend
    monkeypatch.setattr(wire, "isend", lambda *args, **kwargs: (issuers.append(get_ident()), isend(*args, **kwargs))[1])
    sender = lane(True, "free")
    sender.at_once_bytes = 8
    for number, length in enumerate((2, 3, 2)):
        sender.shapes.learn(length, meta_of(torch.zeros(length)))
        sender.send(number, length, torch.zeros(length))
        while sender._last_left is not None and (left := sender._last_left()) is not None and not left.has_begun:
            time.sleep(0.001)
    assert sender._thread is not None
    assert issuers == [get_ident(), sender._thread.ident, get_ident()]
    sender.close()


def test_the_thread_hears_of_what_was_sent_at_the_end_of_a_step_or_after_some(wire: Wire) -> None:
    sender = lane(True, "free")
    sender.shapes.learn("a", meta_of(torch.zeros(2)))
    for number in range(2 * transport.SENT_AT_ONCE + 1):
        sender.send(number, "a", torch.full((2,), float(number)))
    assert len(sender._sent) == transport.SENT_AT_ONCE  # kept alive until they have arrived
    sender.see_to_sent()
    assert not sender._sent
    sender.close()
    assert [record.micro_batch for record in sender.records] == list(range(2 * transport.SENT_AT_ONCE + 1))


def test_what_is_sent_is_noted_before_it_goes(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the thread waits for its turn: the other end may have noted it by then."""
    gets_its_turn, noted, isend = threading.Event(), list[int](), wire.isend
    monkeypatch.setattr(Work, "wait", lambda work: gets_its_turn.wait(PATIENCE_S))
    sender = lane(True, "free")
    sender.at_once_bytes = 8
    for length in (2, 3):
        sender.shapes.learn(length, meta_of(torch.zeros(length)))
    monkeypatch.setattr(wire, "isend", lambda *args, **kw: (noted.append(len(sender.records)), isend(*args, **kw))[1])
    for number in range(3):
        sender.send(number, 2, torch.zeros(2))
    sender.see_to_sent()
    assert [record.micro_batch for record in sender.records] == [0, 1, 2]
    sender.send(3, 3, torch.zeros(3))  # the thread sends it
    gets_its_turn.set()
    sender.close()
    assert noted == [1, 2, 3, 4]
    assert [record.number for record in sender.records] == [1, 2, 3, 4]


def test_a_small_message_does_not_overtake_a_large_one(wire: Wire) -> None:
    sender = lane(True, "free")
    sender.at_once_bytes = 8
    lengths = [2, 3, 2, 3, 2, 2]
    for length in set(lengths):
        sender.shapes.learn(length, meta_of(torch.zeros(length)))
    wire.delay_s = 0.02
    for number, length in enumerate(lengths):
        sender.send(number, length, torch.full((length,), float(number)))
    sender.close()
    assert [work.tensor[0].item() for work in wire.sent] == [0, 1, 2, 3, 4, 5]


def test_the_memory_of_what_was_sent_is_let_go(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the last message that the thread has sent, while there is no other."""
    sent: list[weakref.ref[Tensor]] = []

    def isend(tensor: Tensor, *_: Any, **__: Any) -> Work:
        sent.append(weakref.ref(tensor))
        return Work(torch.zeros(0))

    sender = lane(True, "free")
    sender.at_once_bytes = 8
    sender.shapes.learn(3, meta_of(torch.zeros(3)))
    monkeypatch.setattr(wire, "isend", isend)
    sender.send(0, 3, torch.zeros(3))
    sender.close()
    assert [tensor() for tensor in sent] == [None]


def test_closing_a_lane_delivers_what_was_sent(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = lane(True, "free")
    sender.at_once_bytes = -1
    is_closing = threading.Event()
    isend, see_to_sent = wire.isend, sender.see_to_sent
    monkeypatch.setattr(wire, "isend", lambda *args, **options: is_closing.wait(PATIENCE_S) and isend(*args, **options))
    for number in range(5):
        sender.send(number, "a", torch.full((2,), float(number)))
    assert not sender.records
    monkeypatch.setattr(sender, "see_to_sent", lambda: is_closing.set() or see_to_sent())  # as it begins
    wire.delay_s = 0.2
    sender.close()
    assert [record.micro_batch for record in sender.records] == [0, 1, 2, 3, 4]
    assert all(work.completed for work in wire.sent)
    assert sender._thread is not None
    assert not sender._thread.is_alive()


def test_closing_a_lane_with_nothing_under_way_ends_its_thread(wire: Wire) -> None:
    ends = [lane(is_sender, "free") for is_sender in (True, False)]
    assert all(end._thread in threading.enumerate() for end in ends)
    for end in ends:
        end.close()
        assert end._thread is not None
        end._thread.join(60)
        assert not end._thread.is_alive()


# -- what fails -------------------------------------------------------------------------------------------------------


def test_an_error_of_one_lane_is_heard_by_all(wire: Wire) -> None:
    failed: list[BaseException] = []
    sender, receiver = lane(True, "free", failed=failed), lane(False, "free", failed=failed)
    receiver.shapes.learn("a", meta_of(torch.zeros(2)))
    receiver.post(0, "a")
    wire.error = ConnectionError("the other rank has gone")
    sender.send(0, "a", torch.zeros(2))
    with pytest.raises(ConnectionError, match="the other rank has gone"):
        receiver.take(0)
    for act in (lambda: sender.send(1, "a", torch.zeros(2)), lambda: receiver.post(1, "a")):
        with pytest.raises(ConnectionError, match="the other rank has gone"):
            act()
    sender.close()
    receiver.close()


def test_a_message_is_sent_from_when_it_is_there() -> None:
    """Not from when its copy to the host was asked for, behind a computation: that would be the link's time."""
    message = _Message(0, [], begun_s=time.perf_counter(), ready=[lambda: time.sleep(0.05)])
    asked = message.begun_s
    noted: list[float] = []
    sender = SimpleNamespace(is_sender=True, note=lambda message: noted.append(message.begun_s))
    Lane._begin(sender, message)  # type: ignore[arg-type]
    assert noted == [message.begun_s]
    assert message.begun_s >= asked + 0.05
