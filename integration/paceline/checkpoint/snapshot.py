"""The pieces of one rank, copied into one block of host memory that is laid out as the file will be.

This copy is all that a save costs on the training path. The block, and the names and offsets in it, are kept from one
save to the next as long as the pieces are the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .format import DTYPES, Piece


class Snapshot:
    """``header`` and ``data`` are a safetensors file, ``index`` says which pieces are in it (``rank_….json``)."""

    def __init__(self) -> None:
        self.header = self.index = b""
        self._layout: list[tuple[Any, ...]] | None = None
        self._block = torch.empty(0, dtype=torch.uint8)
        self._num_bytes = 0
        self._places: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []

    def take(self, pieces: Iterable[Piece]) -> None:
        """Copy ``pieces``. Returns once what CPU tensors hold is copied and the copies from GPUs are on their streams.

        Raises:
            ValueError: a piece that cannot be, or two of the same rows.
        """
        # Large elements first: every tensor of the file is then aligned, as safetensors has it.
        ordered = sorted(pieces, key=lambda piece: -piece.tensor.element_size())
        layout = [(p.name, p.kind, p.start, p.whole, p.tensor.dtype, tuple(p.tensor.shape)) for p in ordered]
        devices = {p.tensor.device for p in ordered if p.tensor.is_cuda}
        if layout != self._layout:
            self._layout = None
            self._lay_out(ordered, pinned=bool(devices))
            self._layout = layout
        if ordered:
            with torch.no_grad():
                torch._foreach_copy_(self._places, [p.tensor.detach() for p in ordered], non_blocking=bool(devices))
        self._copied = [_recorded(device) for device in devices]

    def data(self) -> memoryview:
        """The block, once the copies from GPUs have arrived."""
        for event in self._copied:
            event.synchronize()
        return memoryview(self._block[: self._num_bytes].numpy().data)

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
             "rows": p.tensor.shape[0] if p.whole else 0, "shape": list(p.whole)}
            for p in pieces
        ]  # fmt: skip
        self.index = json.dumps({"pieces": index}, separators=(",", ":")).encode()
        if self._block.numel() < offset or (pinned and not self._block.is_pinned()):
            self._places = []
            self._block = torch.empty(0, dtype=torch.uint8)  # the old block goes before the new one comes
            self._block = torch.empty(offset, dtype=torch.uint8, pin_memory=pinned)
        self._num_bytes = offset
        self._places = [
            self._block[start:end].view(piece.tensor.dtype).view(piece.tensor.shape)
            for (start, end), piece in zip(spans, pieces, strict=True)
        ]


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
