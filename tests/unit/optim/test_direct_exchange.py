"""Reductions by messages, with the messages themselves left out."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.optim import direct_exchange
from paceline.optim.direct_exchange import AT_ONCE, DirectReduction, ReductionThread, publish_direct
from support.ranks import PATIENCE_S

SIZE = 3
PARTS = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [0.1, 0.2, 0.3, 0.4, 0.5], [1e8, -1e8, 1e8, -1e8, 1e8]])
"""Gradients of each rank. Their sum depends on the order."""
BOUNDS = (0, 2, 5, 5)
"""The last rank owns nothing."""


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Direction, peer and length of each message; what is received are rows of :data:`PARTS`."""
    found: list[tuple[str, int, int]] = []

    def isend(part: torch.Tensor, **to: Any) -> Any:
        found.append(("to", to["group_dst"], len(part)))
        return SimpleNamespace(wait=lambda: None)

    def irecv(part: torch.Tensor, **to: Any) -> Any:
        peer = to["group_src"]
        found.append(("from", peer, len(part)))
        return SimpleNamespace(wait=lambda: part.copy_(PARTS[peer, : len(part)]))

    monkeypatch.setattr(direct_exchange, "dist", SimpleNamespace(isend=isend, irecv=irecv))
    return found


@pytest.mark.parametrize("rank", range(SIZE))
def test_owners_add_up_in_the_order_of_ranks(rank: int, messages: list[tuple[str, int, int]]) -> None:
    gradients = PARTS[rank].clone()
    own = slice(BOUNDS[rank], BOUNDS[rank + 1])
    rows = [gradients[own].clone() if peer == rank else PARTS[peer, : own.stop - own.start] for peer in range(SIZE)]
    DirectReduction.begin(gradients, gradients, BOUNDS, rank, None).finish()
    assert torch.equal(gradients[own], (rows[0] + rows[1]) + rows[2])
    lengths = {0: 2, 1: 3}
    received = [("from", peer, lengths[rank]) for peer in range(SIZE) if peer != rank] if rank in lengths else []
    sent = [("to", peer, length) for peer, length in lengths.items() if peer != rank]
    assert sorted(messages) == sorted(received + sent)


def test_sums_in_another_dtype_come_to_the_gradients(messages: list[tuple[str, int, int]]) -> None:
    gradients = PARTS[0].clone()
    sent = gradients.to(torch.bfloat16)
    DirectReduction.begin(sent, gradients, BOUNDS, 0, None).finish()
    total = PARTS.to(torch.bfloat16)
    assert torch.equal(gradients[:2], ((total[0] + total[1]) + total[2]).float()[:2])


def test_every_part_is_published_by_its_owner(messages: list[tuple[str, int, int]]) -> None:
    values = torch.zeros(5)
    for work in publish_direct(values, BOUNDS, 2, None):
        work.wait()
    assert torch.equal(values, torch.cat((PARTS[0, :2], PARTS[1, :3])))
    assert sorted(messages) == [("from", 0, 2), ("from", 1, 3)]


def test_a_few_at_a_time_and_in_order() -> None:
    """More are given than may be under way; the thread begins another one when the first is there."""
    begun: list[int] = []
    there = [threading.Event() for _ in range(2 * AT_ONCE)]
    both = threading.Event()

    def begin(number: int) -> list[Any]:
        begun.append(number)
        if len(begun) == AT_ONCE:
            both.set()
        return [SimpleNamespace(finish=there[number].wait)]

    thread, first = ReductionThread(), threading.Event()
    block = thread.put(lambda: [SimpleNamespace(finish=first.wait)])  # until all are given
    reductions = [thread.put(lambda number=number: begin(number)) for number in range(len(there))]
    first.set()
    block.finish()
    assert both.wait(PATIENCE_S)
    assert begun == list(range(AT_ONCE))
    for number, event in enumerate(there):
        assert not reductions[number].is_there()
        event.set()
        reductions[number].finish()
    assert begun == list(range(len(there)))
    thread.stop()


def test_nothing_is_begun_behind_an_error() -> None:
    def fail() -> list[Any]:
        raise RuntimeError("the peer is gone")

    thread = ReductionThread()
    begun: list[int] = []
    first, second = thread.put(fail), thread.put(lambda: begun.append(1) or [])
    for reduction in (first, second):
        with pytest.raises(RuntimeError, match="the peer is gone"):
            reduction.finish()
    assert begun == []
    thread.stop()
