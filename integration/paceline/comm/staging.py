"""Several ranks on one GPU: gloo in NCCL's place, and host memory for what gloo cannot send from a GPU.

NCCL refuses two ranks on one device. Gloo's collectives (broadcast, all_reduce, reduce, all_gather, gather, scatter,
all_to_all) take CUDA tensors and go through pinned host memory by themselves; torch documents it of the first two, its
``ProcessGroupGloo.cpp`` does it for all. Its send and recv do not look at the device: they hand its address to a
socket, which fails. What is sent from rank to rank therefore goes through :class:`Staging`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.constants import default_pg_timeout
from torch import Tensor

from ..patches.deepspeed_p2p import BY_BROADCAST
from ..patches.registry import apply
from .side_stream import SideStream

logger = logging.getLogger("paceline")


class SharedGPU(CUDA_Accelerator):
    """DeepSpeed's accelerator where ranks outnumber GPUs: local rank i has GPU i modulo their number.

    DeepSpeed takes the local rank for the index of a device in several places, and asks its accelerator each time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._communication_backend_name = "gloo"

    def device_name(self, device_index: int | None = None) -> str:
        return str(super().device_name(_existing(device_index)))

    def device(self, device_index: int | None = None) -> Any:
        return super().device(_existing(device_index))

    def set_device(self, device_index: int | torch.device) -> None:
        # ZeRO 3 gives the device itself.
        super().set_device(device_index if isinstance(device_index, torch.device) else _existing(device_index))


def _existing(device_index: int | str | None) -> int | None:
    """The GPU of a local rank, which DeepSpeed gives as the environment has it in places."""
    return None if device_index is None else int(device_index) % _num_gpus()


def _num_gpus() -> int:
    return max(1, torch.cuda.device_count())  # without any, it is CUDA that says so


def ranks_sharing(device: torch.device) -> int:
    """The most ranks of this node that have one device like ``device``: on a CPU all of the node's."""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if device.type != "cuda":
        return int(local) if local else dist.get_world_size()
    return math.ceil(int(local or 1) / _num_gpus())


def shares_gpu() -> bool:
    """Whether this node has more ranks than GPUs, as its launcher says; it must be so on every node, or on none."""
    return get_accelerator().device_name() == "cuda" and ranks_sharing(torch.device("cuda")) > 1


def share_gpu(timeout: timedelta | None = None) -> None:
    """Have torch and DeepSpeed do with :func:`shares_gpu`, from here to the end of the process.

    Args:
        timeout: of the process group; by default DeepSpeed's.

    Raises:
        ValueError: the process group is there already, and is not gloo's.
    """
    if not dist.is_initialized():
        # DeepSpeed would bind the group to a device, and torch cannot make a part of a bound gloo group.
        dist.init_process_group("gloo", timeout=timeout or default_pg_timeout)
    elif (backend := dist.get_backend()) != "gloo":
        raise ValueError(
            f"this node has more ranks than GPUs ({_num_gpus()}), and the process group's backend is "
            f"{backend!r}, which cannot have two ranks on one: leave it to paceline.initialize to start the process "
            "group, start it with 'gloo', or run one rank per GPU."
        )
    if not isinstance(get_accelerator(), SharedGPU):
        set_accelerator(SharedGPU())
        if os.environ.get("LOCAL_RANK", "0") == "0":
            logger.warning(
                "up to %d ranks share a GPU: they communicate with gloo, through host memory; if each rank has a GPU "
                "to itself and sees no other, start it with LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1",
                ranks_sharing(torch.device("cuda")),
            )
    apply(BY_BROADCAST)


class Staging:
    """Copies between one device and host memory that can be sent; pinned memory if the device is a GPU.

    Each way has a stream of its own, so that copies run beside the computation and beside each other. Nothing here has
    the host wait. Memory that a copy still reads or writes is kept by torch's allocators, which also keep pinned blocks
    for reuse: either end of a copy may be dropped at any time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def _out(self) -> SideStream:
        return SideStream(self.device)

    @cached_property
    def _in(self) -> SideStream:
        return SideStream(self.device)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begin to copy ``tensor``, once what the current stream has been given is done. Nobody may write to it then.

        Returns:
            the copy, contiguous, and what waits until it is there; it may be called on another thread.
        """
        host, made = self.host_buffer(tensor.shape, tensor.dtype), self._out.mark()
        with self._out.entered():
            self._out.wait(made)
            host.copy_(tensor.detach(), non_blocking=True)
            self._out.use(tensor)
            copied = self._out.mark(blocking=True)
        return host, _is_there if copied is None else copied.synchronize

    def to_device(self, host: Tensor) -> Tensor:
        """A copy of ``host`` on the device, for which the current stream waits from here on."""
        with self._in.entered():
            tensor = torch.empty(host.shape, dtype=host.dtype, device=self.device).copy_(host, non_blocking=True)
            copied = self._in.mark()
        self._in.wait(copied)
        self._in.use(tensor)
        return tensor

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory to receive into, not initialised."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.device.type == "cuda")


def _is_there() -> None:
    """A copy within host memory is done when it is begun."""


def staging_for(device: torch.device, group: Any = None) -> Staging | None:
    """What sends and receives in ``group`` need for tensors of ``device``; None if it takes them as they are."""
    return Staging(device) if device.type == "cuda" and dist.get_backend(group) == "gloo" else None
