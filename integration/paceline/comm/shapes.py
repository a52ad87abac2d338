"""What a stage passes on to the next, and the book that both ends of a lane keep of its shapes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Value: TypeAlias = Tensor | tuple[Tensor, ...]
"""What a stage passes on."""

HEADER = 256
"""Numbers in an announcement: whether it is a tuple, how many tensors, then dtype, dimensions and sizes of each."""

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


class Meta(NamedTuple):
    """What a message holds: shape and dtype of each tensor, and whether it is a tuple or a tensor alone."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    is_tuple: bool = True


def meta_of(value: Value) -> Meta:
    return Meta(
        tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(value)), is_tuple=isinstance(value, tuple)
    )


def tensors_of(value: Value, whose: str = "a stage") -> tuple[Tensor, ...]:
    """The tensors that ``whose`` gives to the next one.

    Raises:
        ValueError: they cannot be sent.
    """
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
            kind = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(
                f"{whose} passes on a {kind}: it must be a tensor, or a tuple of tensors, each of {dtypes}; change "
                "what the layer returns, or the partition."
            )
    return tensors


@dataclass
class Shapes:
    """What a lane knows of its messages: the shapes that belong to a key. Both ends keep the same book."""

    _known: dict[Hashable, Meta] = field(default_factory=dict)

    def of(self, key: Hashable) -> Meta | None:
        """The shapes of a message with this key, None if they have yet to be announced."""
        return self._known.get(key)

    def learn(self, key: Hashable, meta: Meta) -> None:
        self._known[key] = meta


class GivenShapes(Shapes):
    """The key is the :data:`Meta` itself; nothing is ever announced."""

    def of(self, key: Hashable) -> Meta:
        return key  # type: ignore[return-value]


def announce(meta: Meta) -> Tensor:
    """``meta`` in :data:`HEADER` numbers, int64.

    Raises:
        ValueError: it has too many tensors.
    """
    numbers = [int(meta.is_tuple), len(meta.tensors)]
    for shape, dtype in meta.tensors:
        numbers += [DTYPES.index(dtype), len(shape), *shape]
    if len(numbers) > HEADER:
        raise ValueError(
            f"{len(meta.tensors)} tensors, {show(meta)}: at most {HEADER} numbers describe what a stage passes on; "
            "pass fewer tensors."
        )
    return torch.tensor([*numbers, *[0] * (HEADER - len(numbers))], dtype=torch.int64)


def read_announcement(header: Any) -> Meta:
    """The inverse of :func:`announce`."""
    numbers = iter(header.tolist())
    is_tuple = bool(next(numbers))
    meta = []
    for _ in range(next(numbers)):
        dtype, num_dims = DTYPES[next(numbers)], next(numbers)
        meta.append((tuple(next(numbers) for _ in range(num_dims)), dtype))
    return Meta(tuple(meta), is_tuple)


def show(meta: Meta) -> str:
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in meta.tensors)
