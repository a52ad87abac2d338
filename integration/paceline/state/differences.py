"""Differences between two versions of the same tensor, in few bytes and without loss.

A step of training changes little of a value: its sign, its exponent and the first bits of its mantissa stay. Read as
integers, the two versions differ by a small number. Here that number, zigzag-coded so that small ones of both signs are
small, is written byte by byte, the lowest first; each further byte is written for those elements alone that need it, if
they are few enough for a bit mask to pay. Weights in bf16 with masters in fp32 mostly do not change at all in a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Elements that are packed at a time."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element."""

NOTHING, SOME, ALL = 0, 1, 2
"""Codes of a byte of the numbers: it and all higher ones are zero; it follows a mask of those that have it; all do."""


@torch.no_grad()
def packed(new: Tensor, old: Tensor) -> Tensor | None:
    """``new`` for somebody who has ``old``, tensors of one shape and type: bytes, ``[n]``, uint8.

    Returns:
        None where that is not shorter than ``new`` itself.
    """
    integer = INTEGERS.get(new.element_size())
    if integer is None or new.numel() == 0:
        return None
    pieces: list[Tensor] = []
    for chunk, before in zip(_integers(new, integer).split(CHUNK), _integers(old, integer).split(CHUNK), strict=True):
        difference = chunk - before
        bits = 8 * new.element_size()
        pieces += _packed_numbers((difference << 1) ^ (difference >> bits - 1))
    message = torch.cat(pieces)
    return message if message.numel() < new.nbytes else None


@torch.no_grad()
def unpack(message: Tensor, values: Tensor) -> None:
    """Make ``values``, which are the old ones, the new ones that :func:`packed` was given. Contiguous."""
    assert values.is_contiguous()
    place = 0
    for chunk in _integers(values, INTEGERS[values.element_size()]).split(CHUNK):
        numbers, place = _numbers(message, place, chunk)
        if numbers is not None:
            chunk.add_(_without_sign(numbers >> 1, 1) ^ -(numbers & 1))


def _integers(tensor: Tensor, integer: torch.dtype) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(integer)


def _without_sign(shifted: Tensor, by: int) -> Tensor:
    """Clear the bits that shifting a number with a sign to the right has filled."""
    return shifted & (1 << 8 * shifted.element_size() - by) - 1


def _packed_numbers(numbers: Tensor) -> list[Tensor]:
    size = numbers.element_size()
    codes = [NOTHING] * size
    pieces = []
    for level in range(size):
        marked = numbers != 0
        count = int(marked.sum())
        if count == 0:
            break
        codes[level] = ALL
        if 8 * count < 7 * numbers.numel():
            codes[level] = SOME
            pieces.append(_bits(marked))
            numbers = numbers[marked]
        pieces.append((numbers & 255).to(torch.uint8))
        if level + 1 < size:
            numbers = _without_sign(numbers >> 8, 8)
    return [torch.tensor(codes, dtype=torch.uint8, device=numbers.device), *pieces]


def _numbers(message: Tensor, place: int, chunk: Tensor) -> tuple[Tensor | None, int]:
    """The numbers of a chunk, None if all are zero, and where the next begin."""
    count, size = chunk.numel(), chunk.element_size()
    codes = message[place : place + size].tolist()
    place += size
    levels: list[tuple[Tensor | None, Tensor]] = []
    for code in codes:
        if code == NOTHING:
            break
        marked = None
        if code == SOME:
            length = -(-count // 8)
            marked = _marked(message[place : place + length], count)
            place, count = place + length, int(marked.sum())
        levels.append((marked, message[place : place + count]))
        place += count
    numbers: Tensor | None = None
    for marked, lowest in reversed(levels):
        here = lowest.to(chunk.dtype)
        if size == 1:
            here = lowest.view(torch.int8)
        if numbers is not None:
            here |= numbers << 8
        numbers = here if marked is None else torch.zeros_like(marked, dtype=chunk.dtype).masked_scatter_(marked, here)
    return numbers, place


def _bits(marked: Tensor) -> Tensor:
    """One bit for each, padded to whole bytes."""
    rows = torch.nn.functional.pad(marked.to(torch.uint8), (0, -marked.numel() % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.uint8, device=marked.device)).sum(1, dtype=torch.uint8)


def _marked(bits: Tensor, count: int) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> places) & 1).view(-1)[:count].bool()
