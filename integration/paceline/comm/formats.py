"""Formats of what passes between stages: fewer bytes for less precision. Encoded and decoded by whole tensors.

Values of one block, the row of a token or a part of it, share a scale. On the wire a row is its scales, then its codes,
as bytes. A value that is not finite makes its block, or its sequence, not finite: an overflow is not hidden.

Sources: block-wise formats with a scale as in LLM.int8() (Dettmers et al. 2022) and the OCP formats; AC-SGD (Wang et
al. 2022) for activations and their gradients between the stages of a pipeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .shapes import Meta, Value, meta_of, tensors_of

LEAST = 1e-35
"""Blocks whose largest value is smaller are scaled as if it were this: nothing is divided by 0."""


class Format(ABC):
    """How tensors are encoded. A tensor of ``[..., n]`` becomes bytes of ``[..., num_bytes(n)]``, a row each."""

    @abstractmethod
    def num_bytes(self, size: int) -> int:
        """Bytes of a row of ``size`` values."""

    def coded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the bytes of a tensor of ``shape`` have."""
        return (*shape[:-1], self.num_bytes(shape[-1]))

    @abstractmethod
    def encode(self, tensor: Tensor) -> Tensor:
        """The bytes of ``tensor``, in memory of their own."""

    @abstractmethod
    def decode(self, coded: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """The values that :meth:`encode` was given, rounded."""


class BFloat16(Format):
    """The upper half of a float32: 8 bits of exponent, 8 of precision, no scale."""

    def num_bytes(self, size: int) -> int:
        return 2 * size

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(torch.bfloat16, copy=True).contiguous().view(torch.uint8)

    def decode(self, coded: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        return coded.view(torch.bfloat16).to(dtype, copy=True)


@dataclass(frozen=True)
class Int8(Format):
    """A whole number from -127 to 127 a value, a float32 scale a row."""

    def num_bytes(self, size: int) -> int:
        return size + 4

    def encode(self, tensor: Tensor) -> Tensor:
        values = tensor.detach().float()
        scale, codes = _scaled(values, 127.0)
        return torch.cat([scale.view(torch.uint8), codes.round_().to(torch.int8).view(torch.uint8)], dim=-1)

    def decode(self, coded: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        return (coded[..., 4:].view(torch.int8) * _scales(coded, 4, torch.float32)).to(dtype)


@dataclass(frozen=True)
class Float8(Format):
    """An e4m3 number a value (4 bits of exponent, 3 of mantissa), a float32 scale a row."""

    def num_bytes(self, size: int) -> int:
        return size + 4

    def encode(self, tensor: Tensor) -> Tensor:
        scale, codes = _scaled(tensor.detach().float(), 448.0)
        return torch.cat([scale.view(torch.uint8), codes.to(torch.float8_e4m3fn).view(torch.uint8)], dim=-1)

    def decode(self, coded: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        return (coded[..., 4:].view(torch.float8_e4m3fn).float() * _scales(coded, 4, torch.float32)).to(dtype)


DIRECTIONS = Float8()
"""Format of the directions of :class:`InCommonApart`."""


@dataclass(frozen=True)
class Int4(Format):
    """A whole number from -8 to 7 a value, two in a byte; an e4m3 scale for each ``block`` values, in units of a
    float32 scale of the row.

    A scale has the sign that puts the largest value of its block at -8, so that all 16 numbers are used. Small blocks,
    scaled in two levels, as in NVFP4: with one scale for 64 values the held-out loss of training from scratch rose two
    to three times as much. Stochastic rounding, of gradients, made it worse.
    """

    block: int = 16

    def num_bytes(self, size: int) -> int:
        num_blocks = -(-size // self.block)
        return 4 + num_blocks * (1 + self.block // 2)

    def encode(self, tensor: Tensor) -> Tensor:
        values = tensor.detach().float()
        values = pad(values, (0, -values.shape[-1] % self.block)).unflatten(-1, (-1, self.block))
        low, high = values.aminmax(dim=-1)
        unit, block_scales = _scaled(torch.where(high > -low, high, low), 448.0)
        coded_scales = block_scales.neg_().to(torch.float8_e4m3fn)
        step = coded_scales.float() * (unit / 8.0)
        steps_a_unit = torch.where(step != 0, 1.0 / step, 0.0).unsqueeze(-1)  # blocks far below the largest are zeros
        codes = (values * steps_a_unit).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
        halves = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return torch.cat([unit.view(torch.uint8), coded_scales.view(torch.uint8), halves.flatten(-2)], dim=-1)

    def decode(self, coded: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        num_blocks = -(-size // self.block)
        scales, halves = coded[..., 4 : 4 + num_blocks], coded[..., 4 + num_blocks :]
        step = scales.view(torch.float8_e4m3fn).float() * (_scales(coded, 4, torch.float32) / 8.0)
        codes = torch.stack([halves & 15, halves >> 4], dim=-1).flatten(-2).to(torch.int8) - 8
        values = codes.unflatten(-1, (num_blocks, self.block)) * step.unsqueeze(-1)
        return values.flatten(-2)[..., :size].to(dtype)


@dataclass(frozen=True)
class InCommonApart(Format):
    """By how much the rows of a sequence, ``[..., rows, n]``, differ from what they have in common, in the format
    ``of_rows``. What they have in common is their mean, in bf16, and a few directions in which they differ most, in
    e4m3; both travel as further rows before the others. Each row begins with its coefficients of the directions, in
    e4m3. What is rounded away of directions and coefficients is a part of the difference, and so not lost.

    Few numbers tell most of what tokens differ in while a model begins to learn: their mean was half to nine tenths of
    the energy of hidden states in the first steps from scratch, and a sixth in the last ones; four directions were
    eight to nine tenths of the rest, and two thirds. If all is rounded together, little is left of the remainder.
    Gradients have no such mean (1 % of their energy), and rows of zeros among them stay zeros.

    Sequences of fewer than ``least_rows`` are encoded as rows alone: what is apart would be more than it saves.

    The directions are found by one step of a subspace iteration from a fixed start (Halko et al. 2011), for each
    sequence anew: nothing is remembered between messages.
    """

    of_rows: Format
    most_directions: int = 4
    least_rows: int = 64

    def num_bytes(self, size: int) -> int:
        return self._num_directions(size) + self.of_rows.num_bytes(size)

    def coded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if shape[-2] < self.least_rows:
            return self.of_rows.coded_shape(shape)
        return (*shape[:-2], self._further_rows(shape[-1]) + shape[-2], self.num_bytes(shape[-1]))

    def encode(self, tensor: Tensor) -> Tensor:
        size = tensor.shape[-1]
        if tensor.shape[-2] < self.least_rows:
            return self.of_rows.encode(tensor)
        values = tensor.detach().float().reshape(-1, *tensor.shape[-2:])
        mean = values.mean(-2, keepdim=True).to(torch.bfloat16)
        rest = values - mean
        start = _spread(size, self._num_directions(size), rest.device).expand(len(rest), -1, -1)
        directions = torch.linalg.qr(rest.mT @ (rest @ start)).Q
        coefficients = rest @ directions
        largest = coefficients.abs().amax(-2, keepdim=True).clamp_(min=LEAST)
        coded_directions = DIRECTIONS.encode((directions * (largest / 448.0)).mT)
        coded_coefficients = coefficients.mul_(448.0 / largest).to(torch.float8_e4m3fn)
        told = DIRECTIONS.decode(coded_directions, size, torch.float32)
        rest.baddbmm_(coded_coefficients.float(), told, alpha=-1)
        common = torch.cat([mean.view(torch.uint8).flatten(1), coded_directions.flatten(1)], dim=-1)
        rows, width = self._further_rows(size), self.num_bytes(size)
        common = pad(common, (0, rows * width - common.shape[-1])).unflatten(-1, (rows, width))
        own = torch.cat([coded_coefficients.view(torch.uint8), self.of_rows.encode(rest)], dim=-1)
        return torch.cat([common, own], dim=-2).view(self.coded_shape(tuple(tensor.shape)))

    def decode(self, coded: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        if coded.shape[-1] == self.of_rows.num_bytes(size):
            return self.of_rows.decode(coded, size, dtype)
        rows, num_directions = self._further_rows(size), self._num_directions(size)
        every = coded.reshape(-1, *coded.shape[-2:])
        common, own = every[:, :rows].flatten(1), every[:, rows:]
        mean = _scales(common, 2 * size, torch.bfloat16).unsqueeze(-2)
        width = DIRECTIONS.num_bytes(size)
        coded_directions = common[:, 2 * size :][:, : num_directions * width].unflatten(-1, (num_directions, width))
        directions = DIRECTIONS.decode(coded_directions, size, torch.float32)
        coefficients = _scales(own, num_directions, torch.float8_e4m3fn).float()
        values = self.of_rows.decode(own[..., num_directions:], size, torch.float32).add_(mean)
        values.baddbmm_(coefficients, directions)
        return values.to(dtype).view(*coded.shape[:-2], -1, size)

    def _num_directions(self, size: int) -> int:
        return min(self.most_directions, size)

    def _further_rows(self, size: int) -> int:
        num_bytes = 2 * size + self._num_directions(size) * DIRECTIONS.num_bytes(size)
        return -(-num_bytes // self.num_bytes(size))


def _spread(size: int, num: int, device: torch.device) -> Tensor:
    """Columns ``[size, num]`` that no direction is at right angles to but by chance: sines of unrelated frequencies."""
    places = torch.arange(1, size + 1, dtype=torch.float32, device=device)
    return torch.sin(2.3998277 * places.unsqueeze(-1) * torch.arange(1, num + 1, dtype=torch.float32, device=device))


def _scaled(values: Tensor, largest_code: float) -> tuple[Tensor, Tensor]:
    """The scale of each row, and the values in units of it; of memory of their own."""
    largest = values.abs().amax(-1, keepdim=True).clamp_(min=LEAST)
    return largest / largest_code, values * (largest_code / largest)


def _scales(coded: Tensor, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """The first bytes of each row, as numbers; copied, since a view needs strides that are multiples of its size."""
    return coded[..., :num_bytes].clone(memory_format=torch.contiguous_format).view(dtype)


FORMATS: Mapping[str, Format] = {"bf16": BFloat16(), "int8": Int8(), "fp8_e4m3": Float8(), "int4": Int4()}
"""By their names in the JSON: of gradients, and of what islands send."""

ACTIVATIONS: Mapping[str, Format] = {**FORMATS, "int4": InCommonApart(Int4(block=8))}
"""The same of activations."""


class BoundaryFormats(NamedTuple):
    """Formats of activations and of their gradients; None: as they are."""

    forward: Format | None = None
    backward: Format | None = None

    @classmethod
    def named(cls, forward: str | None, backward: str | None) -> BoundaryFormats:
        """Empty or None: as they are."""
        return cls(ACTIVATIONS.get(forward or ""), FORMATS.get(backward or ""))


AS_THEY_ARE = BoundaryFormats()


@dataclass(frozen=True)
class Parcel:
    """A message as it travels.

    Args:
        meta: of what it is made from.
        tensors: each encoded, or as it was.
        format: how.
    """

    meta: Meta
    tensors: tuple[Tensor, ...]
    format: Format


def pack(value: Value, format: Format) -> Parcel:
    """Encode what a stage passes on."""
    meta = meta_of(value)
    coded = (
        format.encode(tensor) if _is_encoded(tuple(tensor.shape), tensor.dtype) else tensor.detach()
        for tensor in tensors_of(value)
    )
    return Parcel(meta, tuple(coded), format)


def unpack(parcel: Parcel) -> Value:
    """The inverse of :func:`pack`, but for rounding."""
    tensors = tuple(
        parcel.format.decode(tensor, shape[-1], dtype) if _is_encoded(shape, dtype) else tensor
        for tensor, (shape, dtype) in zip(parcel.tensors, parcel.meta.tensors, strict=True)
    )
    return tensors if parcel.meta.is_tuple else tensors[0]


def on_the_wire(meta: Meta, format: Format | None) -> Meta:
    """Shapes and dtypes of the tensors that travel."""
    if format is None:
        return meta
    return Meta(
        tuple(
            (format.coded_shape(shape), torch.uint8) if _is_encoded(shape, dtype) else (shape, dtype)
            for shape, dtype in meta.tensors
        ),
        meta.is_tuple,
    )


def _is_encoded(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Rows of values are; side inputs (whole numbers) and sums over experts (a single row) are not."""
    return dtype.is_floating_point and len(shape) > 1
