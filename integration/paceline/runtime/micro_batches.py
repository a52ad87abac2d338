"""Micro-batches of a causal LM as the first and last stage of a pipeline load them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..hf.masks import IGNORED, MaskFacts, facts_of
from ..hf.stage import SIDE_INPUTS


@dataclass(frozen=True)
class MicroBatchShape:
    """What every stage knows of a micro-batch before it arrives."""

    batch: int
    length: int
    side: tuple[str, ...]
    label_tokens: int
    tokens: int
    masks: MaskFacts


@dataclass
class MicroBatch:
    """One micro-batch on the first or last stage, on the CPU: ``[B, S]`` int64 each.

    Args:
        has_full_mask: it came with a mask that masks nothing, which ``side`` leaves out.
    """

    input_ids: Tensor
    labels: Tensor
    side: dict[str, Tensor]
    is_filler: bool = False
    has_full_mask: bool = False

    @property
    def row(self) -> list[int]:
        flags = [*(name in self.side for name in SIDE_INPUTS), *astuple(facts_of(self.side, self.labels))]
        bits = sum(flag << place for place, flag in enumerate(flags))
        mask = self.side.get("attention_mask")
        tokens = self.input_ids.numel() if mask is None else int(mask.sum())
        if self.is_filler:
            tokens = 0
        contents = (self.input_ids, self.labels, *self.side.values())
        checksum = zlib.crc32(torch.stack(contents).cpu().numpy().tobytes())
        return [*self.input_ids.shape, bits, count_label_tokens(self.labels), tokens, checksum]


def pinned(batch: MicroBatch) -> MicroBatch:
    """``batch`` in memory from which a copy to a GPU runs beside the host."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    side = {name: moved(tensor) for name, tensor in batch.side.items()}
    return replace(batch, input_ids=moved(batch.input_ids), labels=moved(batch.labels), side=side)


def shape_of(row: Sequence[int]) -> MicroBatchShape:
    """The shape that :attr:`MicroBatch.row` tells."""
    batch, length, bits, label_tokens, tokens, _ = row
    side = tuple(name for i, name in enumerate(SIDE_INPUTS) if bits >> i & 1)
    facts = MaskFacts(*(bool(bits >> len(SIDE_INPUTS) + i & 1) for i in range(len(fields(MaskFacts)))))
    return MicroBatchShape(batch, length, side, label_tokens, tokens, facts)


FILLER = MicroBatch(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), IGNORED), {}, is_filler=True)
"""What fills a step up that has too few: it counts nowhere."""


def count_label_tokens(labels: Tensor) -> int:
    """Label tokens that a next-token loss over ``labels`` ``[B, S]`` averages over: the first position has none."""
    return int((labels[:, 1:] != IGNORED).sum())


@runtime_checkable
class _HasKeys(Protocol):
    """A mapping, or nearly one."""

    def keys(self) -> Iterable[str]: ...

    def __getitem__(self, name: str, /) -> object: ...


def _as_tensor(name: str, value: object) -> Tensor:
    try:
        return torch.as_tensor(value).long()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name!r} of a micro-batch is a {type(value).__name__} that is no tensor [batch, sequence]: pad its rows "
            "to one length, and give a dataset of the datasets library tensors, dataset.with_format('torch')."
        ) from None


def read_micro_batch(batch: object) -> MicroBatch:
    """A micro-batch from what a data loader yields: a mapping with Hugging Face's names, or ``(inputs, labels)``.

    One that is a :class:`MicroBatch` already is taken as it is.

    Raises:
        ValueError: no token ids or labels, unknown keys, no token, or shapes that do not match.
    """
    if isinstance(batch, MicroBatch):
        return batch
    if isinstance(batch, _HasKeys):
        given = dict(batch)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, labels = batch
        given = {**(inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}), "labels": labels}
    else:
        raise ValueError(
            f"a micro-batch is a {type(batch).__name__}: it must be a mapping with 'input_ids' and 'labels', "
            "or a pair (input_ids, labels)."
        )
    for name in ("input_ids", "labels"):
        if given.get(name) is None:
            there = sorted(key for key, value in given.items() if value is not None)
            raise ValueError(
                f"a micro-batch has {there} but no {name!r}: add it"
                + (" (a copy of input_ids, -100 where there is no loss)." if name == "labels" else ".")
            )
    unknown = set(given) - {"input_ids", "labels", *SIDE_INPUTS}
    if unknown:
        raise ValueError(
            f"a micro-batch has {sorted(unknown)}, which a causal-LM pipeline does not pass on: give only "
            f"{['input_ids', 'labels', *SIDE_INPUTS]}."
        )
    tensors = {name: _as_tensor(name, value) for name, value in given.items() if value is not None}
    shape = tensors["input_ids"].shape
    for name, tensor in tensors.items():
        if tensor.shape != shape or tensor.dim() != 2:
            raise ValueError(
                f"{name!r} has shape {list(tensor.shape)}, input_ids {list(shape)}: both must be [batch, sequence]."
            )
    if 0 in shape:
        raise ValueError(f"'input_ids' has shape {list(shape)}: leave out micro-batches without a token.")
    side = {name: tensors[name] for name in SIDE_INPUTS if name in tensors}
    has_full_mask = set(side) == {"attention_mask"} and bool(side["attention_mask"].all())
    if has_full_mask:
        side = {}  # nothing is padded: the mask says no more than its absence, and need not travel
    return MicroBatch(tensors["input_ids"], tensors["labels"], side, has_full_mask=has_full_mask)


def recut(loaded: Sequence[MicroBatch], size: int, count: int) -> list[MicroBatch]:
    """The same samples in the same order, as ``count`` micro-batches of ``size``.

    Rows of different lengths that come together are padded on the right, with a mask that says so; with positions the
    padding begins anew, like a sample: beside a mask, transformers would let packed samples attend to one another.

    Raises:
        ValueError: there are not ``size * count`` samples.
    """
    rows = sum(len(batch.input_ids) for batch in loaded)
    if rows != size * count:
        raise ValueError(
            f"a step has {rows} samples and was to be cut into {count} micro-batches of {size}: give micro-batches of "
            "one size, or leave paceline.pipeline.schedule.micro_batch_sizes out."
        )
    length = max(batch.input_ids.shape[1] for batch in loaded)
    names = {name for batch in loaded for name in batch.side}
    if "position_ids" not in names and any(batch.input_ids.shape[1] < length for batch in loaded):
        names.add("attention_mask")
    ids = torch.cat([_padded(batch.input_ids, length, 0) for batch in loaded])
    labels = torch.cat([_padded(batch.labels, length, IGNORED) for batch in loaded])
    side = {
        name: torch.cat([_padded(_side(batch, name), length, 0) for batch in loaded])
        for name in SIDE_INPUTS
        if name in names
    }
    has_full_mask = not side and any(batch.has_full_mask for batch in loaded)
    found = []
    for index in range(count):
        part = slice(index * size, (index + 1) * size)
        own = {name: tensor[part] for name, tensor in side.items()}
        found.append(MicroBatch(ids[part], labels[part], own, has_full_mask=has_full_mask))
    return found


def _side(batch: MicroBatch, name: str) -> Tensor:
    if name in batch.side:
        return batch.side[name]
    if name == "attention_mask":
        return torch.ones_like(batch.input_ids)
    if name == "position_ids":
        return torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    return torch.zeros_like(batch.input_ids)


def _padded(tensor: Tensor, length: int, value: int) -> Tensor:
    return nn.functional.pad(tensor, (0, length - tensor.shape[1]), value=value)
