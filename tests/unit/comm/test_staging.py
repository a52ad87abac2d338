"""Which ranks share a GPU, what DeepSpeed is told of it, and copies to and from host memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from paceline.comm.side_stream import SideStream
from paceline.comm.staging import SharedGPU, Staging, ranks_sharing, shares_gpu
from paceline.measure.device_memory import available_bytes, plannable_bytes
from support.streams import Streams

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_sizes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def cuda_accelerator() -> Iterator[None]:
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    before = get_accelerator()
    set_accelerator(CUDA_Accelerator())
    yield
    set_accelerator(before)


@pytest.mark.parametrize("launcher", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
@pytest.mark.parametrize(
    ("local_ranks", "gpus", "sharing"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (4, 4, 1), (3, 2, 2), (2, 4, 1), (8, 3, 3)]
)
def test_ranks_share_when_they_outnumber_gpus(
    launcher: str,
    local_ranks: int,
    gpus: int,
    sharing: int,
    no_sizes: pytest.MonkeyPatch,
    cuda_accelerator: None,
) -> None:
    no_sizes.setattr(torch.cuda, "device_count", lambda: gpus)
    no_sizes.setenv(launcher, str(local_ranks))
    assert ranks_sharing(CUDA) == sharing
    assert shares_gpu() == (sharing > 1)
    assert ranks_sharing(CPU) == local_ranks


def test_who_does_not_say_how_many_ranks_a_node_has_shares_nothing(
    no_sizes: pytest.MonkeyPatch, cuda_accelerator: None
) -> None:
    no_sizes.setattr(torch.cuda, "device_count", lambda: 1)
    assert not shares_gpu()


def test_ranks_on_a_cpu_share_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    before = get_accelerator()
    set_accelerator(CPU_Accelerator())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not shares_gpu()
    set_accelerator(before)


def test_deepspeed_is_given_devices_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int | torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    accelerator = SharedGPU()
    for local_rank in range(5):
        accelerator.set_device(local_rank)
    assert chosen == [0, 1, 0, 1, 0]
    accelerator.set_device(torch.device("cuda", 1))  # ZeRO 3 gives what it was told the local rank's device is
    assert chosen[5:] == [torch.device("cuda", 1)]
    assert [accelerator.device_name(i) for i in (0, 1, 2, 3)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert accelerator.device_name("3") == "cuda:1"  # type: ignore[arg-type] # ZeRO 3 gives what the environment has
    assert accelerator.device(3) == torch.device("cuda", 1)
    assert (accelerator.device_name(), accelerator.device()) == ("cuda", torch.device("cuda"))
    assert accelerator.communication_backend_name() == "gloo"


def test_ranks_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=8 * 2**30)  # what really is free, others change meanwhile

    class Properties:
        total_memory = 24 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert available_bytes(CUDA, 1) == 24 * 2**30
    assert available_bytes(CUDA, 3) == 8 * 2**30
    assert plannable_bytes(CUDA, 3) == int(0.9 * 8 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert [available_bytes(CPU, ranks) for ranks in (1, 4)] == [8 * 2**30, 2 * 2**30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_copies_are_copies(dtype: torch.dtype) -> None:
    staging = Staging(CPU)
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    host, ready = staging.to_host(tensor)
    ready()
    back = staging.to_device(host)
    assert torch.equal(host, tensor)
    assert torch.equal(back, tensor)
    assert host.dtype == back.dtype == dtype
    assert len({t.untyped_storage().data_ptr() for t in (tensor, host, back)}) == 3


def test_what_is_not_contiguous_is_made_so_without_a_gradient() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 6))
    host, _ = Staging(CPU).to_host(parameter.t())
    assert host.is_contiguous()
    assert not host.requires_grad
    assert torch.equal(host, parameter.detach().t())


def test_buffers_have_the_shape_that_is_asked_for() -> None:
    staging = Staging(CPU)
    for shape in ((), (0,), (2, 3)):
        buffer = staging.host_buffer(shape, torch.float16)
        assert (tuple(buffer.shape), buffer.dtype, buffer.device) == (shape, torch.float16, CPU)
        assert not buffer.is_pinned()


def test_copies_run_beside_the_computation_and_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, staging = Streams(), Staging(CPU)
    staging._out, staging._in = SideStream(CUDA, streams), SideStream(CUDA, streams)
    before: list[set[str]] = []
    kept: dict[int, set[str]] = {}
    copy_ = torch.Tensor.copy_

    def copying(place: torch.Tensor, source: torch.Tensor, **options: Any) -> torch.Tensor:
        assert options == {"non_blocking": True}
        before.append(streams.issue(f"copy {len(before)}"))
        return copy_(place, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copying)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: kept.update({t.data_ptr(): stream.known}))
    tensor = torch.ones(3)
    streams.issue("forward")
    host, ready = staging.to_host(tensor)
    ready()
    streams.issue("forward of the next")
    arrived = staging.to_device(host)
    assert before == [{"forward"}, set()], "one waits for what it copies, the other for nothing"
    assert kept[tensor.data_ptr()] == {"forward", "copy 0"}, "the memory is the copy's until it is done"
    assert streams.issue("uses it") == {"forward", "forward of the next", "copy 1"}
    assert "uses it" in kept[arrived.data_ptr()]
