"""Files of a directory that ``from_pretrained`` loads, for all that write one."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import (
    CHAT_TEMPLATE_DIR,
    CHAT_TEMPLATE_FILE,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

logger = logging.getLogger("paceline")

_OF_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    CHAT_TEMPLATE_FILE,
)
"""Files of which a tokenizer writes some, and reads those that are there."""

DRAFT = ".export"
"""Hidden folder of the target that everything is written to first."""


def saved_names(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Select the ``names`` (of ``model``'s state dict) that are written: of tied tensors only the source."""
    kept = [name for name in names if name not in (model._keys_to_ignore_on_save or ())]
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    there = set(kept)
    return [name for name in kept if not (name in ties and ties[name] in there)]


def hub_format(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` as it is on the hub: tensors that transformers merged or renamed on loading get back their names."""
    return revert_weight_conversion(model, {name: state[name] for name in saved_names(model, state)})


def shards(state: Mapping[str, Tensor], max_shard_size: str | int) -> list[list[str]]:
    """The names in ``state``, one list a file.

    Raises:
        ValueError: ``max_shard_size`` is no size.
    """
    # By shape alone: under ZeRO all parameters are views of one storage, which would be one file.
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    return list(split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size).filename_to_tensors.values())


def shard_names(count: int) -> list[str]:
    """File names of ``count`` shards."""
    if count == 1:
        return [SAFE_WEIGHTS_NAME]
    stem, _, suffix = SAFE_WEIGHTS_NAME.rpartition(".")
    return [f"{stem}-{i:05d}-of-{count:05d}.{suffix}" for i in range(1, count + 1)]


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a file of weights.

    Raises:
        OSError: it cannot be written; the message has its name, which that of safetensors has not.
    """
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} was not written: {error}; see what is wrong with the disk, and save again.") from error


def join(folder: Path, names: Sequence[str]) -> None:
    """Make one file of the files ``names``, which it replaces; no tensor is held in memory.

    Of a tensor that several have, such as a buffer of the whole model, the first file's is kept. Tensors with large
    elements come first, as safetensors has it: they stay aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    found: list[tuple[int, str, dict[str, Any], Path, int]] = []
    seen = set(header)
    for path in (folder / name for name in names):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
        for key, entry in entries.items():
            if key not in seen:
                seen.add(key)
                bits = re.search(r"\d+", entry["dtype"])  # F32, BF16, F8_E4M3, BOOL
                start = 8 + length + entry["data_offsets"][0]
                found.append((-int(bits[0]) if bits else -8, key, entry, path, start))
    found.sort(key=lambda one: one[:2])
    size = 0
    for _, key, entry, _, _ in found:
        first, end = entry["data_offsets"]
        header[key] = {**entry, "data_offsets": [size, size := size + end - first]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / SAFE_WEIGHTS_NAME).open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, _, entry, path, start in found:
            first, end = entry["data_offsets"]
            with path.open("rb") as file:
                file.seek(start)
                left = end - first
                while left:
                    piece = file.read(min(left, 2**24))
                    out.write(piece)
                    left -= len(piece)
    for name in names:
        (folder / name).unlink()


def write_index(
    folder: Path, names: Sequence[str], keys: Iterable[Sequence[str]], total_parameters: int, total_bytes: int
) -> None:
    """Say which of the files ``names`` holds which ``keys``; a single file needs no index."""
    if len(names) > 1:
        weight_map = {key: name for name, held in zip(names, keys, strict=True) for key in held}
        metadata = {"total_parameters": total_parameters, "total_size": total_bytes}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the config and the generation config; ``dtype`` is that of the model's parameters."""
    config = model.config
    config.architectures = [type(model).__name__]
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    config.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    config.save_pretrained(folder)
    if model.can_generate():
        try:
            model.generation_config.save_pretrained(folder)
        except ValueError as error:  # transformers loads such configs and does not save them
            logger.warning("the generation config is left out of the export: %s", error)


def begin(target: Path) -> Path:
    """An empty draft in ``target``."""
    draft = target / DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def publish(draft: Path, target: Path, last: str = "config.json") -> None:
    """Move a complete draft into place, over the files of an earlier export, of which nothing is left.

    Args:
        last: the config goes first and comes last: without it the directory is no model, or no adapter.
    """
    configs = (target / name for name in ("config.json", "adapter_config.json"))
    weights = (*target.glob("model*.safetensors"), *target.glob("adapter_model*.safetensors"))
    others = [target / GENERATION_CONFIG_NAME]
    if (draft / "tokenizer_config.json").exists():  # else the directory's own may belong to the model
        others += [target / name for name in _OF_TOKENIZERS]
        shutil.rmtree(target / CHAT_TEMPLATE_DIR, ignore_errors=True)
    for stale in (*configs, *weights, target / SAFE_WEIGHTS_INDEX_NAME, *others):
        stale.unlink(missing_ok=True)
    for path in sorted(draft.iterdir(), key=lambda p: p.name == last):
        if path.is_dir():  # a tokenizer's further chat templates
            shutil.rmtree(target / path.name, ignore_errors=True)
        else:
            shutil.copymode(draft / last, path)  # safetensors writes files that only their owner can read
        os.replace(path, target / path.name)
    shutil.rmtree(draft)
