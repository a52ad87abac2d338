"""Copies between a GPU and host memory: nobody waits for them who need not, and none is overtaken."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from paceline.comm.staging import Staging

pytestmark = pytest.mark.gpu

A_TENTH_OF_A_SECOND = 2 * 10**8
"""In cycles, about."""


def test_a_copy_waits_for_what_it_copies_and_another_thread_can_wait_for_it() -> None:
    staging = Staging(torch.device("cuda"))
    tensor = torch.zeros(2**20, device="cuda")
    # What is launched for the first time is loaded, and loading waits for the device.
    torch.cuda._sleep(1)
    staging.to_host(tensor.fill_(3))[1]()
    torch.cuda.synchronize()
    torch.cuda._sleep(A_TENTH_OF_A_SECOND)
    tensor.fill_(1)
    host, ready = staging.to_host(tensor)
    del tensor
    torch.full((2**20,), 2.0, device="cuda")  # would have the same memory, were it free
    assert not torch.cuda.current_stream().query()  # nothing above has waited
    assert host.is_pinned()
    waiting = Thread(target=ready)
    waiting.start()
    waiting.join()
    assert torch.equal(host, torch.ones(2**20))


def test_a_host_tensor_may_be_dropped_before_it_is_copied() -> None:
    """Its block goes to nobody else until the copy is done."""
    staging = Staging(torch.device("cuda"))
    torch.cuda._sleep(1)  # the first time is slow
    for _ in range(8):  # and so is memory that is pinned
        staging.to_device(staging.host_buffer((2**20,), torch.float32))
    torch.cuda.synchronize()
    torch.cuda._sleep(A_TENTH_OF_A_SECOND)
    copies = []
    for value in range(8):
        host = staging.host_buffer((2**20,), torch.float32)
        host.fill_(value)
        copies.append(staging.to_device(host))
        del host
    assert not torch.cuda.current_stream().query()
    for value, copy in enumerate(copies):
        assert copy.is_cuda
        assert torch.equal(copy.cpu(), torch.full((2**20,), float(value)))


def test_a_block_is_used_again() -> None:
    staging = Staging(torch.device("cuda"))
    blocks = set()
    for _ in range(16):
        host, ready = staging.to_host(torch.ones(2**20, device="cuda"))
        ready()
        blocks.add(host.data_ptr())
        del host
    assert len(blocks) < 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_there_and_back(dtype: torch.dtype) -> None:
    staging = Staging(torch.device("cuda"))
    tensor = torch.randint(0, 2, (7, 3), device="cuda").to(dtype).t()
    host, ready = staging.to_host(tensor)
    ready()
    assert host.is_contiguous()
    assert torch.equal(staging.to_device(host), tensor)


def test_a_copy_that_comes_does_not_wait_for_the_computation() -> None:
    staging = Staging(torch.device("cuda"))
    host = staging.host_buffer((2**20,), torch.float32).fill_(3)
    staging.to_device(host)  # the first time is slow
    torch.cuda.synchronize()
    torch.cuda._sleep(A_TENTH_OF_A_SECOND)
    copy = staging.to_device(host)
    staging._in._stream.synchronize()
    assert not torch.cuda.current_stream().query()
    assert torch.equal(copy, torch.full((2**20,), 3.0, device="cuda"))
