"""The pieces of one rank, copied into blocks of host memory that are, one after another, the file as it will be.

This copy is all that a save costs on the training path. The blocks, and the names and offsets in them, are kept from
one save to the next as long as the pieces are the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from .format import DTYPES, Piece

LARGEST_BLOCK = 2**30
LEAST_BLOCK = 2**20
"""Bytes of blocks, each a power of two as every size between them. Smaller blocks are as large as they need to be."""


def block_sizes(num_bytes: int) -> list[int]:
    """Sizes of the blocks that hold ``num_bytes``.

    torch rounds pinned memory up to a power of two (33 GiB would take 64): blocks that are one take no more than asked.
    """
    sizes = [LARGEST_BLOCK] * (num_bytes // LARGEST_BLOCK)
    left = num_bytes % LARGEST_BLOCK
    while left >= LEAST_BLOCK:
        sizes.append(1 << (left.bit_length() - 1))
        left -= sizes[-1]
    return [*sizes, left] if left else sizes


class Snapshot:
    """``header`` and ``data`` are a safetensors file, ``index`` says which pieces are in it (``rank_….json``)."""

    def __init__(self) -> None:
        self.header = self.index = b""
        self._layout: list[tuple[Any, ...]] | None = None
        self._blocks: list[Tensor] = []
        self._num_bytes = 0
        self._places: list[list[Tensor]] = []
        self._copied: list[torch.cuda.Event] = []

    def take(self, pieces: Iterable[Piece]) -> None:
        """Copy ``pieces``. Returns once what CPU tensors hold is copied and the copies from GPUs are on their streams.

        Raises:
            ValueError: a piece that cannot be, or two of the same rows.
        """
        # Large elements first: every tensor of the file is then aligned, as safetensors has it.
        ordered = sorted(pieces, key=lambda piece: -piece.tensor.element_size())
        layout = [(p.name, p.kind, p.start, p.column, p.whole, p.tensor.dtype, tuple(p.tensor.shape)) for p in ordered]
        devices = {p.tensor.device for p in ordered if p.tensor.is_cuda}
        if layout != self._layout:
            self._layout = None
            self._lay_out(ordered, pinned=bool(devices))
            self._layout = layout
        if places := list(chain.from_iterable(self._places)):
            divided = map(_divided, (piece.tensor.detach() for piece in ordered), self._places)
            sources = list(chain.from_iterable(divided))
            with torch.no_grad():
                torch._foreach_copy_(places, sources, non_blocking=bool(devices))
        self._copied = [_recorded(device) for device in devices]

    def data(self) -> list[memoryview]:
        """The blocks, once the copies from GPUs have arrived."""
        for event in self._copied:
            event.synchronize()
        return [memoryview(part.numpy().data) for part in self._in_blocks(0, self._num_bytes)]

    def _in_blocks(self, start: int, end: int) -> Iterator[Tensor]:
        """The bytes ``start`` to ``end`` of the whole, block by block."""
        ends = accumulate(block.numel() for block in self._blocks)
        for block, block_end in zip(self._blocks, ends, strict=True):
            block_start = block_end - block.numel()
            if start < block_end and block_start < end:
                yield block[max(start, block_start) - block_start : min(end, block_end) - block_start]

    def _lay_out(self, pieces: Sequence[Piece], pinned: bool) -> None:
        header: dict[str, Any] = {}
        offset = 0
        spans = []
        for piece in pieces:
            piece.validate()
            if piece.key in header:
                raise ValueError(f"{piece.kind} of {piece.name} from row {piece.start} is there twice on this rank.")
            end = offset + piece.tensor.numel() * piece.tensor.element_size()
            shape = list(piece.tensor.shape)
            header[piece.key] = {"dtype": DTYPES[piece.tensor.dtype], "shape": shape, "data_offsets": [offset, end]}
            spans.append((offset, end))
            offset = end
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        index = [
            {"name": p.name, "kind": p.kind, "dtype": DTYPES[p.tensor.dtype], "start": p.start,
             "rows": p.tensor.shape[0] if p.whole else 0, "shape": list(p.whole),
             **({} if p.column is None else {"columns": [p.column, p.column + p.tensor.shape[1]]})}
            for p in pieces
        ]  # fmt: skip
        self.index = json.dumps({"pieces": index}, separators=(",", ":")).encode()
        is_large_enough = sum(block.numel() for block in self._blocks) >= offset
        if not is_large_enough or (pinned and not all(block.is_pinned() for block in self._blocks)):
            self._places, self._blocks = [], []  # the old ones go before the new ones come
            self._blocks = [torch.empty(n, dtype=torch.uint8, pin_memory=pinned) for n in block_sizes(offset)]
        self._num_bytes = offset
        self._places = [
            _shaped(list(self._in_blocks(start, end)), piece.tensor)
            for (start, end), piece in zip(spans, pieces, strict=True)
        ]


def _shaped(parts: list[Tensor], tensor: Tensor) -> list[Tensor]:
    """The bytes ``parts`` as elements of ``tensor``; flat if they lie in several blocks."""
    if len(parts) == 1:
        return [parts[0].view(tensor.dtype).view(tensor.shape)]
    return [part.view(tensor.dtype) for part in parts]


def _divided(tensor: Tensor, places: Sequence[Tensor]) -> Sequence[Tensor]:
    """Tensors that go to each of ``places``, as :func:`_shaped` has them."""
    if len(places) <= 1:  # none for a piece without elements
        return [tensor][: len(places)]
    return tensor.reshape(-1).split([place.numel() for place in places])


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
