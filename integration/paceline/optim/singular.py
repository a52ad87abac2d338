"""Singular values of matrices that lie on a device, for which nobody who computes on the device has to wait.

Such a decomposition needs the host: the device's libraries ask it whether they have converged, and a small matrix is
done sooner by LAPACK anyway. So a thread and a stream of their own fetch it, decompose it and bring the result back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor


def singular(matrix: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Begin to decompose; what is returned gives the singular values and the right singular vectors.

    The host waits only if they are asked for before they are there; the caller's stream waits for them, not the host.
    On the CPU they are there at once.

    Args:
        matrix: of shape (..., M, N), M <= N; it is not to be changed before the result has been asked for.

    Returns:
        A function that gives tensors of shapes (..., M), descending, and (..., M, N).
    """
    if matrix.device.type == "cpu":
        found = decompose(matrix)
        return lambda: found
    return _beside(matrix.device)(matrix)


def decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The same, at once; the host waits for the device."""
    q, triangle = torch.linalg.qr(matrix.mT)  # the singular values of a small matrix cost a quarter of a long one's
    _, values, vectors = torch.linalg.svd(triangle.mT.cpu(), full_matrices=False)
    return values.to(q.device), vectors.to(q.device) @ q.mT


class Beside:
    """A thread of its own, on a device with a stream of its own, which decomposes one matrix after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-singular")
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    def __call__(self, matrix: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        if self._stream is None:
            return self._thread.submit(decompose, matrix).result
        stream = torch.accelerator.current_stream(self._device)
        future = self._thread.submit(self._decompose, matrix, stream.record_event())

        def result() -> tuple[Tensor, Tensor]:
            values, vectors, done = future.result()
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(done)
            for tensor in (values, vectors, matrix):  # the other stream's memory, read in this one; and the reverse
                tensor.record_stream(stream)
            return values, vectors

        return result

    def _decompose(self, matrix: Tensor, ready: Any) -> tuple[Tensor, Tensor, Any]:
        assert self._stream is not None
        with self._stream:
            self._stream.wait_event(ready)
            values, vectors = decompose(matrix)
            return values, vectors, self._stream.record_event()


_beside = cache(Beside)
