"""The order of what is issued to a device beside its computation: by a thread, or to copy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """A stream of a device beside the one that the model computes in; on a CPU nothing, as work there is done at once.

    What lies in memory that both use is ordered by events: :meth:`mark` on one side, :meth:`wait` on the other. Neither
    has the host wait.

    Args:
        cuda: :mod:`torch.cuda`, or what stands for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None

    def entered(self) -> AbstractContextManager[Any]:
        """Have the calling thread issue to this stream."""
        return nullcontext() if self._stream is None else self._cuda.stream(self._stream)

    def mark(self, *, blocking: bool = False) -> Any:
        """All that has been issued to the stream that the calling thread is in; None on a CPU.

        Args:
            blocking: a thread that waits for it leaves its core to others.
        """
        if self._stream is None:
            return None
        event = self._cuda.Event(blocking=blocking)
        event.record(self._cuda.current_stream(self._device))
        return event

    def wait(self, mark: Any) -> None:
        """Have what is issued from now on, to the stream that the calling thread is in, come after ``mark``."""
        if self._stream is not None and mark is not None:
            self._cuda.current_stream(self._device).wait_event(mark)

    def use(self, tensor: Tensor) -> None:
        """Keep the memory of ``tensor``, of another stream, until the calling thread's stream is past here."""
        if self._stream is not None:
            tensor.record_stream(self._cuda.current_stream(self._device))
