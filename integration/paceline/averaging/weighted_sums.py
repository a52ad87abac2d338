"""Weighted sums of tensors over islands: a gloo group of their first ranks, and tensors in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .addresses import split

CHUNK_BYTES = 8 << 20
IN_FLIGHT = 4
"""Chunks that are under way at once, so that long distances cost bandwidth rather than latency."""

CONNECT_S = 20.0


class IslandGroup:
    """A gloo group of the islands of one quorum. Its connections are closed when it is dropped.

    DeepSpeed's groups are not concerned. torchft's own wrapper would bind to what the host's name resolves to, which is
    the wrong address where hosts are network namespaces, or have several networks.
    """

    def __init__(self, key: tuple[Any, ...], store: str, prefix: str, rank: int, size: int, address: str) -> None:
        self.key, self.size = key, size
        host, port = split(store)
        timeout = timedelta(seconds=CONNECT_S)
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        gloo: Any = dist.ProcessGroupGloo  # whose stubs are not complete
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timeout
        options._threads = IN_FLIGHT
        self._backend = gloo(dist.PrefixStore(f"paceline/{prefix}", client), rank, size, options)

    def sum(self, values: Tensor, timeout_s: float) -> Any:
        """Begin to sum over the islands, in place."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.timeout = timedelta(seconds=timeout_s)
        return self._backend.allreduce([values], options)

    def exchange(self, values: Tensor, timeout_s: float) -> Tensor:
        """Send ``values[i]`` to island i; what each has sent here, in their order."""
        arrived, options = torch.empty_like(values), dist.AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_s)
        self._backend.alltoall_base(arrived.view(-1), values.view(-1), [], [], options).wait()
        return arrived

    def meet(self, timeout_s: float) -> None:
        """Until all have come here."""
        self.sum(torch.zeros(1), timeout_s).wait()


def weighted_mean(
    group: Any, tensors: Sequence[Tensor], weights: Sequence[float], mine: int, timeout_s: float
) -> tuple[list[Tensor], int]:
    """The weighted sum over islands of each tensor, in new tensors, and the bytes that were summed.

    Islands without weight contribute zeros, whatever they hold. With equal weights it is the sum divided by the number
    of islands, rounded twice; all islands get the same bits.
    """
    if odd := {str(t.dtype) for t in tensors if not t.is_floating_point()}:
        raise ValueError(f"tensors of {', '.join(sorted(odd))} have no average: leave them out.")
    largest = max(weights)
    total = sum(weight / largest for weight in weights)
    results = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    sources, sinks = [t.detach().reshape(-1) for t in tensors], [t.view(-1) for t in results]
    num_bytes = 0
    under_way: deque[tuple[Any, Tensor, list[tuple[int, int, int]]]] = deque()

    def finish() -> None:
        work, chunk, pieces = under_way.popleft()
        work.wait()
        if total != 1:
            chunk /= total
        for (index, start, end), values in zip(pieces, chunk.split([e - s for _, s, e in pieces]), strict=True):
            sinks[index][start:end] = values

    for dtype, pieces in _chunks(tensors):
        chunk = torch.zeros(sum(end - start for _, start, end in pieces), dtype=dtype)
        if weights[mine] > 0:
            torch.cat([sources[index][start:end].to(dtype) for index, start, end in pieces], out=chunk)
            if weights[mine] != largest:
                chunk *= weights[mine] / largest
        num_bytes += chunk.nbytes
        under_way.append((group.sum(chunk, timeout_s), chunk, pieces))
        if len(under_way) == IN_FLIGHT:
            finish()
    while under_way:
        finish()
    return results, num_bytes


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[torch.dtype, list[tuple[int, int, int]]]]:
    """Stretches that are summed together, in order: (index, start, end) of elements, in the dtype of the sum."""
    dtype, pieces, room = torch.float32, list[tuple[int, int, int]](), 0
    for index, tensor in enumerate(tensors):
        wanted = torch.promote_types(tensor.dtype, torch.float32)
        start = 0
        while start < tensor.numel():
            if pieces and (room == 0 or dtype != wanted):
                yield dtype, pieces
                pieces = []
            if not pieces:
                dtype, room = wanted, max(1, CHUNK_BYTES // wanted.itemsize)
            end = min(tensor.numel(), start + room)
            pieces.append((index, start, end))
            room -= end - start
            start = end
    if pieces:
        yield dtype, pieces
