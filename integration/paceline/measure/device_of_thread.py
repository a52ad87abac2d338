"""The device of a thread beside the main one."""

from __future__ import annotations

from collections.abc import Callable

import torch


def on_this_device(target: Callable[..., None]) -> Callable[..., None]:
    """``target`` for another thread, which is to have the GPU that this thread has.

    A thread begins on the first GPU of the host. Where it waits for an event, or leaves a stream of another GPU, CUDA
    would make a context there, of half a gigabyte, for each rank of the host.
    """
    if not torch.cuda.is_initialized():
        return target
    index = torch.cuda.current_device()

    def run(*args: object) -> None:
        torch.cuda.set_device(index)
        target(*args)

    return run
