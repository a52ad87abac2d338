"""Ranks that share a GPU, played on the CPU: how they start, and what goes from one to the other."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from support.ranks import RankError, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
WIDTH = 8


def messages(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 3, generator=generator).mul(4).to(dtype) for dtype in DTYPES] + [torch.tensor(1.5 + rank)]


def exchange() -> list[torch.Tensor]:
    """Each rank sends to the other what both can make: all that it gets, posted before it is sent."""
    import torch.distributed as dist

    from paceline.comm.staging import Staging
    from paceline.runtime.initialize import start_distributed

    start_distributed()
    rank, staging = dist.get_rank(), Staging(torch.device("cpu"))
    mine = messages(rank)
    buffers = [staging.host_buffer(tensor.shape, tensor.dtype) for tensor in mine]
    receives = [dist.irecv(buffer, 1 - rank) for buffer in buffers]
    sends = []
    for tensor in mine:
        host, ready = staging.to_host(tensor)
        tensor.zero_()  # it was copied
        ready()
        sends.append(dist.isend(host, 1 - rank))
    for work in receives + sends:
        work.wait()
    return [staging.to_device(buffer) for buffer in buffers]


def test_what_is_staged_arrives_as_it_was() -> None:
    for rank, got in enumerate(run_ranks(exchange, 2)):
        for found, wanted in zip(got, messages(1 - rank), strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)


def start_sharing() -> dict[str, Any]:
    """As on a node with fewer GPUs than ranks; on a CPU nothing may be put on the GPU that is played."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    from paceline.comm.staging import Staging, staging_for
    from paceline.patches.deepspeed_p2p import BY_BROADCAST
    from paceline.runtime.initialize import start_distributed

    chosen: list[int] = []
    torch.cuda.device_count = lambda: 2
    torch.cuda.set_device = chosen.append
    set_accelerator(CUDA_Accelerator())
    start_distributed()
    start_distributed()  # as paceline.launch.finetune and paceline.initialize do
    half = dist.new_group([0, 1])  # not all ranks: torch refuses it to a group that is bound to a device
    if dist.get_rank() < 2:
        dist.all_reduce(torch.zeros(1), group=half)
    ours = deepspeed.comm.new_group([1, 2])
    return {
        "chosen": chosen,
        "backend": dist.get_backend(),
        "bound": dist.group.WORLD.bound_device_id,
        "device": get_accelerator().device_name(int(os.environ["LOCAL_RANK"])),
        "by_broadcast": BY_BROADCAST.is_applied(),
        "staged": [isinstance(staging_for(torch.device(name)), Staging) for name in ("cuda:0", "cpu")],
        "subgroup": dist.get_backend(ours) if dist.get_rank() > 0 else "gloo",
    }


def test_more_ranks_than_gpus_start_with_gloo() -> None:
    for rank, found in enumerate(run_ranks(start_sharing, 3)):
        assert found == {
            "chosen": [rank % 2] * 2,
            "backend": "gloo",
            "bound": None,
            "device": f"cuda:{rank % 2}",
            "by_broadcast": True,
            "staged": [True, False],
            "subgroup": "gloo",
        }


def start_over_another_backend() -> None:
    import torch.distributed as dist
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    from paceline.runtime.initialize import start_distributed

    torch.cuda.device_count = lambda: 1
    set_accelerator(CUDA_Accelerator())
    dist.init_process_group("fake", store=dist.HashStore(), rank=int(os.environ["RANK"]), world_size=2)
    start_distributed()


def test_a_process_group_of_another_backend_is_refused() -> None:
    message = (
        r"more ranks than GPUs \(1\), and the process group's backend is 'fake', which cannot have two ranks on one"
    )
    with pytest.raises(RankError, match=message):
        run_ranks(start_over_another_backend, 2)


def train_stock(by_broadcast: bool) -> list[float]:
    """DeepSpeed's own pipeline engine and its own sends."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    from paceline.patches.deepspeed_p2p import BY_BROADCAST
    from paceline.patches.registry import applied

    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": None,
    }
    torch.manual_seed(0)
    module = PipelineModule(
        [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)],
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    generator = torch.Generator().manual_seed(0)
    with applied(*([BY_BROADCAST] if by_broadcast else [])):
        engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        batches = [tuple(torch.randn(2, 2, WIDTH, generator=generator)) for _ in range(4)]
        return [engine.train_batch(iter(batches)).item() for _ in range(3)]


def test_stages_that_broadcast_train_as_stages_that_send() -> None:
    sent, broadcast = (run_ranks(train_stock, 4, by_broadcast) for by_broadcast in (False, True))
    assert broadcast == sent
    assert sent[0][0] > sent[0][-1]
