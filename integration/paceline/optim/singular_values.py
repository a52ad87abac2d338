"""Singular values of matrices that lie on a device, for which nobody who computes on the device has to wait.

Such a decomposition needs the host: the device's libraries ask it whether they have converged, and a small matrix is
done sooner by LAPACK anyway. So a thread and a stream of their own fetch it, decompose it and bring the result back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..comm.staging import Staging

LEAST_SQUARE = 1e-8
"""Of the largest eigenvalue of the Gram matrix: with less than that for the smallest, which estimates have at their
first rows only, the square has lost half of the digits that are needed, and a QR decomposition takes its place."""


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
    eigen = _eigen((matrix @ matrix.mT).cpu())
    here = [tensor.to(matrix.device) for tensor in eigen]
    return _from_eigen(matrix, *here) if _is_safe(eigen) else _by_qr(matrix)


def _eigen(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of (..., M, M), descending, and their vectors in columns."""
    squares, vectors = torch.linalg.eigh(gram)
    return squares.flip(-1), vectors.flip(-1)


def _is_safe(eigen: tuple[Tensor, Tensor]) -> bool:
    """Whether squaring has left enough digits of the smallest singular values."""
    squares = eigen[0]
    return bool((squares[..., -1] > LEAST_SQUARE * squares[..., 0]).all())


def _from_eigen(matrix: Tensor, squares: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    values = squares.sqrt()
    return values, (vectors.mT @ matrix) / values.unsqueeze(-1)


def _by_qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    q, triangle = torch.linalg.qr(matrix.mT)  # the singular values of a small matrix cost a quarter of a long one's
    _, values, vectors = torch.linalg.svd(triangle.mT.cpu(), full_matrices=False)
    return values.to(q.device), vectors.to(q.device) @ q.mT


@dataclass(frozen=True)
class _Request:
    matrix: Tensor
    gram: Tensor
    ready: Any
    """Event after which both are there; None on the CPU."""
    found: Future[tuple[bool, Tensor, Tensor, Any]]
    """Whether it is eigenvalues and vectors of the Gram matrix, rather than what was asked for; both; an event."""


class Beside:
    """A thread of its own, on a device with a stream of its own, which decomposes what has come in the meantime.

    The Gram matrices of all that wait are fetched, decomposed and brought back together, shape by shape: layers whose
    estimates have the same rank cost one wait for the device, not one each. Products are made one by one, so that
    results do not depend on what came together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # On the device, or each wait would open the first one of the host.
        enter = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "paceline-singular", enter)
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._staging = Staging(device)
        self._waiting: list[_Request] = []
        self._lock = Lock()

    def __call__(self, matrix: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        gram = matrix @ matrix.mT
        ready = None
        if self._stream is not None:
            ready = torch.accelerator.current_stream(self._device).record_event()
        request = _Request(matrix, gram, ready, Future())
        with self._lock:
            self._waiting.append(request)
        self._thread.submit(self._serve)

        def result() -> tuple[Tensor, Tensor]:
            is_eigen, first, second, done = request.found.result()
            if done is not None:
                stream = torch.accelerator.current_stream(self._device)
                stream.wait_event(done)
                for tensor in (first, second, matrix, gram):  # one stream's memory, read in the other
                    tensor.record_stream(stream)
            return _from_eigen(matrix, first, second) if is_eigen else (first, second)

        return result

    def _serve(self) -> None:
        """What waits, all of it; where an earlier call has taken it, nothing."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        groups: dict[Any, list[_Request]] = {}
        for request in waiting:
            groups.setdefault((request.gram.shape, request.gram.dtype), []).append(request)
        for group in groups.values():
            try:
                with nullcontext() if self._stream is None else self._stream:
                    answers = self._answers(group)
            except BaseException as error:
                for request in group:
                    request.found.set_exception(error)
            else:
                for request, answer in zip(group, answers, strict=True):
                    request.found.set_result(answer)

    def _answers(self, group: Sequence[_Request]) -> list[tuple[bool, Tensor, Tensor, Any]]:
        for request in group:
            if self._stream is not None:
                self._stream.wait_event(request.ready)
        # By pinned memory: a copy from or to other memory waits in the driver, and other threads on the device with it.
        grams, wait_for_grams = self._staging.to_host(torch.stack([request.gram for request in group]))
        wait_for_grams()
        eigen = _eigen(grams)
        here = [self._brought(tensor) for tensor in eigen]
        found: list[tuple[bool, Tensor, Tensor]] = []
        for i, request in enumerate(group):
            is_safe = _is_safe((eigen[0][i], eigen[1][i]))
            found.append((True, here[0][i], here[1][i]) if is_safe else (False, *_by_qr(request.matrix)))
        done = None if self._stream is None else self._stream.record_event()
        return [(*each, done) for each in found]

    def _brought(self, tensor: Tensor) -> Tensor:
        return self._staging.to_device(self._staging.host_buffer(tensor.shape, tensor.dtype).copy_(tensor))


_beside = cache(Beside)
