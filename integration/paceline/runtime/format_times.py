"""How long this device takes to encode and decode what passes between stages."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median

import torch
from deepspeed.accelerator import get_accelerator

from ..comm.formats import ACTIVATIONS, Format
from ..planning.format_costs import AS_IT_IS, FormatCosts

SHAPE = 1024, 1024
TRIES = 5


def format_costs(
    names: Iterable[str], dtype: torch.dtype, device: torch.device, shape: tuple[int, int] = SHAPE
) -> dict[str, FormatCosts]:
    """Costs of formats by name, measured on a tensor of ``shape``; ``""`` is none."""
    return {"": AS_IT_IS, **{name: _costs(ACTIVATIONS[name], dtype, device, shape) for name in names}}


def _costs(format: Format, dtype: torch.dtype, device: torch.device, shape: tuple[int, int]) -> FormatCosts:
    values = torch.linspace(-1.0, 1.0, shape[0] * shape[1], device=device).to(dtype).view(shape)
    encode, decode = [], []
    for _ in range(TRIES):
        begun = _now(device)
        coded = format.encode(values)
        encoded = _now(device)
        format.decode(coded, shape[1], dtype)
        encode.append(encoded - begun)
        decode.append(_now(device) - encoded)
    return FormatCosts(coded.nbytes / values.nbytes, median(encode) / values.nbytes, median(decode) / values.nbytes)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        get_accelerator().synchronize()
    return time.perf_counter()
