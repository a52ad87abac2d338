"""Losses that a step does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import loss_sums as losses
from paceline.comm.loss_sums import SummedLosses
from support.ranks import PATIENCE_S, run_ranks


class Device:
    """Its staging: a copy is there when the test says so."""

    def __init__(self) -> None:
        self.is_there = threading.Event()

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        def wait() -> None:
            assert self.is_there.wait(PATIENCE_S)

        return tensor.clone(), wait


class Group:
    """In the place of ``torch.distributed``: another rank adds ten."""

    def __init__(self) -> None:
        self.summed: list[float] = []
        self.error: Exception | None = None

    def all_reduce(self, total: Tensor, group: Any) -> None:
        if self.error is not None:
            raise self.error
        self.summed.append(total.item())
        total += 10


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    group = Group()
    monkeypatch.setattr(losses, "dist", group)
    yield group
    assert not any(thread.name == "paceline-losses" for thread in threading.enumerate())


def test_a_step_does_not_wait_for_the_loss_of_a_device(group: Group) -> None:
    device = Device()
    summed = SummedLosses(None, device)  # type: ignore[arg-type]
    waits = [summed.add(loss) for loss in (torch.tensor(1.0), None, torch.tensor(3.0))]
    assert group.summed == []
    device.is_there.set()
    assert [wait().item() for wait in reversed(waits)] == [13, 10, 11]
    assert group.summed == [1, 0, 3], "in the order of the steps, whoever looks"
    assert waits[0]().dtype == torch.float64
    summed.stop()


def test_after_an_error_no_sum_is_begun(group: Group) -> None:
    device = Device()
    device.is_there.set()
    summed = SummedLosses(None, device)  # type: ignore[arg-type]
    group.error = RuntimeError("connection reset by peer")
    first = summed.add(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="reset by peer"):
        first()
    group.error = None
    with pytest.raises(RuntimeError, match="reset by peer"):
        summed.add(torch.tensor(2.0))()
    assert group.summed == []
    summed.stop()


def sums() -> list[list[float]]:
    import torch.distributed as dist

    from paceline.comm.staging import Staging

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for staging in (None, Staging(torch.device("cpu"))):
        summed = SummedLosses(dist.new_group(), staging)
        waits = [summed.add(torch.tensor(0.1 * step) if rank else None) for step in range(4)]
        found.append([wait().item() for wait in (waits if rank else waits[2:])])
        summed.stop()
    return found


def test_ranks_agree_on_each_loss_though_not_all_look() -> None:
    wanted = [torch.tensor(0.1 * step).double().item() for step in range(4)]
    assert run_ranks(sums, 2) == [[wanted[2:]] * 2, [wanted] * 2]
