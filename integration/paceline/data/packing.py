"""Several samples in one row: which go together, and whether a model keeps them apart.

transformers reads from ``position_ids`` that begin anew, where there is no attention mask, that a row has several
samples, and lets none attend to another. Models with recurrent state, or with positions of their own making, do not.
"""

from __future__ import annotations

import inspect

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig

from ..hf.family_configs import shrink
from ..hf.quiet_transformers import quiet
from ..hf.weights import causal_config, model_class_of

LEAK = 1e-4
"""Largest relative difference in logits between a packed sample and the same sample alone that is rounding."""


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Samples, the longest first, each into the row that has least room left for it; else into a new row.

    Args:
        lengths: of the samples, ``[N]``, from 1 to ``capacity``.
        capacity: tokens in a row.

    Returns:
        ``(samples, ends)``: row i holds ``samples[ends[i - 1]:ends[i]]``, in rising order. The same lengths give the
        same rows.

    >>> samples, ends = best_fit_decreasing(np.array([3, 7, 5, 3]), 10)
    >>> [part.tolist() for part in np.split(samples, ends[:-1])]
    [[0, 1], [2, 3]]
    """
    assert len(lengths) == 0 or (lengths.min() > 0 and lengths.max() <= capacity), "cut to capacity before"
    row_of = np.empty(len(lengths), np.int64)
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where rows_with_room[r] has any: the least room that is enough is one bit operation away
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
        else:
            row, room = num_rows, capacity
            num_rows += 1
        row_of[sample] = row
        room -= length
        if room:
            rows_with_room[room].append(row)
            rooms |= 1 << room
    return np.argsort(row_of, kind="stable"), np.cumsum(np.bincount(row_of, minlength=num_rows))


def require_packable(
    config: PretrainedConfig, asked: str = "--packing", remedy: str = "leave --packing out, then samples are padded"
) -> None:
    """Check on a small copy of the model that samples packed into a row are computed as each one alone.

    A second or two. Every rank comes to the same answer, without asking the others.

    Raises:
        ValueError: they are not, or it cannot be found out.
    """
    name = f"{asked}: model type {config.model_type!r}"
    remedy = f"Remedy: {remedy}."
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            leak = packing_leak(config)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name} cannot be checked for packing: {type(error).__name__}: {reason}. {remedy}") from error
    if leak is None:
        raise ValueError(f"{name} takes no position_ids, so it cannot tell packed samples apart. {remedy}")
    if not leak <= LEAK:
        raise ValueError(
            f"{name} does not keep packed samples apart: on a small copy, logits differ by {leak:.1e} from those of "
            f"the samples alone. {remedy}"
        )


def packing_leak(config: PretrainedConfig) -> float | None:
    """Largest relative difference in logits of samples in one row against each alone; None: no ``position_ids``."""
    config = shrink(causal_config(config))
    if getattr(config, "attention_chunk_size", None):
        config.attention_chunk_size = 4  # as small as the copy, or a chunk's edge is never met
    model = model_class_of(config)(config).eval()
    for module in (model, model.base_model):
        if "position_ids" not in inspect.signature(inspect.unwrap(type(module).forward)).parameters:
            return None
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    vocab_size = config.get_text_config().vocab_size
    lengths = [5, 9, 1, 6]
    samples = [torch.randint(3, vocab_size - 1, (1, length), generator=generator) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat(samples, dim=1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in samples], dim=1)
    difference = (packed - alone).abs().max() / alone.abs().max()
    return float("inf") if not torch.isfinite(difference) else float(difference)
