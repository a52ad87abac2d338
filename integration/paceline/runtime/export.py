"""A trained pipeline back into a directory that ``from_pretrained`` loads. One pass; no rank holds the whole model.

Each stage writes the shards of its own tensors under their final names (the stages agree on the numbers first), with
tensors that transformers merged or renamed on loading given back their names of the hub's format. Everything goes into
a hidden folder until rank 0 has written the index and moves it into place: a killed export leaves nothing that looks
whole.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .control import ControlPlane
from .module import CausalLMPipeline

logger = logging.getLogger("paceline")


def export(
    pipeline: CausalLMPipeline,
    directory: str | Path,
    control: ControlPlane,
    *,
    tokenizer: Any = None,
    max_shard_size: str | int = "5GB",
) -> None:
    """Write ``pipeline`` as a Hugging Face checkpoint. Collective: all ranks call it.

    Args:
        directory: on a file system that all nodes share; the files of an earlier export are replaced.
        tokenizer: saved beside the model, if given.
        max_shard_size: of one file, as in ``save_pretrained``.

    Raises:
        ValueError: on every rank, if rank 0 does not see the other stages' files.
        PeerError, OSError: on every rank, if any rank could not write (a full disk).
    """
    target = Path(directory)
    draft = target / ".export"
    writes = pipeline._grid.data_parallel_id == 0
    with control.together(f"preparing {target}"):
        if control.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
    state: dict[str, Tensor] = {}
    files: list[list[str]] = []
    size = 0
    with control.together(f"collecting the tensors of stage {pipeline.stage_id}"):
        if writes:
            state = {k: t.contiguous() for k, t in _hub_format(pipeline).items()}
            # By shape alone: under ZeRO all parameters are views of one storage, which would be one file.
            shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
            split = split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)
            files = list(split.filename_to_tensors.values())
            size = sum(t.numel() * t.element_size() for t in state.values())
    reports = sorted(r for r in control.gather((pipeline.stage_id, files, size) if writes else None) if r)
    names = _names(sum(len(keys) for _, keys, _ in reports))
    first = sum(len(keys) for stage, keys, _ in reports if stage < pipeline.stage_id)
    with control.together(f"writing stage {pipeline.stage_id} to {target}"):
        for name, keys in zip(names[first:], files, strict=False):
            save_file({key: state[key] for key in keys}, draft / name, metadata={"format": "pt"})
    with control.together(f"finishing {target}"):
        if control.rank == 0:
            _save_config(pipeline, draft)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
            if len(names) > 1:
                keys_by_file = zip(names, (keys for _, files, _ in reports for keys in files), strict=True)
                weight_map = {key: name for name, keys in keys_by_file for key in keys}
                metadata = {"total_parameters": pipeline.total_parameters, "total_size": sum(r[2] for r in reports)}
                index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
                (draft / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
            _publish(draft, target, names)


def own_tensors(pipeline: CausalLMPipeline) -> dict[str, Tensor]:
    """The stage's tensors by Hugging Face's names; a tied weight's copy on the last stage is not its own."""
    state = pipeline.stage.model.state_dict()
    copy = pipeline.stage.tied_weight
    if copy is None or pipeline.stage_id == 0 or copy not in state:
        return state
    shared = state[copy].data_ptr()
    return {name: tensor for name, tensor in state.items() if tensor.data_ptr() != shared}


def _hub_format(pipeline: CausalLMPipeline) -> dict[str, Tensor]:
    state = own_tensors(pipeline)
    for pattern in pipeline.stage.model._keys_to_ignore_on_save or ():
        state.pop(pattern, None)
    # Tensors tied inside a stage (head and embedding of a single stage) are written once, under the source's name.
    ties = getattr(pipeline.stage.model, "all_tied_weights_keys", None) or {}
    state = {name: tensor for name, tensor in state.items() if not (name in ties and ties[name] in state)}
    return revert_weight_conversion(pipeline.stage.model, state)


def _names(count: int) -> list[str]:
    if count == 1:
        return [SAFE_WEIGHTS_NAME]
    stem, _, suffix = SAFE_WEIGHTS_NAME.rpartition(".")
    return [f"{stem}-{i:05d}-of-{count:05d}.{suffix}" for i in range(1, count + 1)]


def _save_config(pipeline: CausalLMPipeline, folder: Path) -> None:
    model = pipeline.stage.model
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


def _publish(draft: Path, target: Path, shards: list[str]) -> None:
    missing = [name for name in shards if not (draft / name).exists()]
    if missing:
        raise ValueError(
            f"rank 0 does not see {missing[0]} that another stage wrote to {target}: "
            "choose an output_dir on a file system that all nodes share."
        )
    for stale in (*target.glob("model*.safetensors"), target / SAFE_WEIGHTS_INDEX_NAME):
        stale.unlink(missing_ok=True)
    # The config last: without it the directory is no model.
    for path in sorted((p for p in draft.iterdir() if p.is_file()), key=lambda p: p.name == "config.json"):
        shutil.copymode(draft / "config.json", path)  # safetensors writes files that only their owner can read
        os.replace(path, target / path.name)
    shutil.rmtree(draft)
