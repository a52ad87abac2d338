"""A checkpoint into a directory that ``from_pretrained`` loads, by one process, of a killed run too."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from paceline.hf import hub_files, peft
from paceline.hf.anatomy import anatomy_of
from paceline.hf.weights import skeleton

from .format import MANIFEST, MODEL, MODEL_KINDS, CheckpointError
from .reader import Checkpoint, checkpoint_around, latest_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """The result of :func:`export_checkpoint`. ``dtype`` is that of the parameters, ``num_bytes`` of all tensors."""

    checkpoint: Path
    directory: Path
    dtype: str
    num_files: int
    num_bytes: int


def export_checkpoint(
    source: str | Path,
    directory: str | Path,
    *,
    max_shard_size: str | int = "5GB",
    dtype: str = "auto",
    overwrite: bool = False,
) -> Exported:
    """Write the model in a checkpoint as a Hugging Face model. Takes the memory of one model of the new dtype.

    Args:
        source: a checkpoint, or a folder of checkpoints, of which the latest complete one is taken.
        directory: the files of an earlier export there, told by its config, are replaced; not those of the model that
            the run began with.
        max_shard_size: of one file, as in ``save_pretrained``.
        dtype: a name in ``DTYPES``; "auto" is the one that the model was trained in.
        overwrite: replace another model there too.

    Raises:
        ValueError: there is no checkpoint that is whole, it holds no whole model, ``directory`` holds another model,
            or a file cannot be written.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: choose auto, {', '.join(DTYPES)}.")
    hub_files.shards({}, max_shard_size)  # a mistake here is told before the work
    chosen = _chosen(Path(source))
    if not (chosen / MANIFEST).exists() and next(chosen.glob("model*.safetensors"), None):
        raise CheckpointError(
            f"{chosen} is a Hugging Face model already: name the folder of a checkpoint to export it."
        )
    checkpoint = Checkpoint.open(chosen)
    target = Path(directory)
    if owner := checkpoint_around(target):
        name = "the checkpoint itself" if owner == checkpoint.path.resolve() else f"{owner.name}, a checkpoint"
        raise ValueError(f"{target} belongs to {name}: export to another directory.")
    if not overwrite:
        _check_replaces(target, checkpoint)
    checkpoint.verify()
    try:
        return _export(checkpoint, target, max_shard_size, dtype)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(target / hub_files.DRAFT, ignore_errors=True)
        raise CheckpointError(
            f"exporting to {target} failed: {_cause(error)}; export to a directory that can be written to, with room."
        ) from error


def _cause(error: Exception) -> str:
    if isinstance(error, shutil.Error):  # a list of what could not be copied, whereto and why
        return str(error.args[0][0][2])
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).rstrip(".")


def _check_replaces(target: Path, checkpoint: Checkpoint) -> None:
    """Raise ValueError if ``target`` holds a model, or adapters, with another config than the checkpoint's, or the
    model that its run began with."""
    if (checkpoint.meta.get("model") or {}).get("began_with") == str(target.resolve()):
        raise ValueError(
            f"{target} holds the model that the run began with: export to another directory, or replace it with "
            "--overwrite."
        )
    folder = checkpoint.path / MODEL
    exported = peft.CONFIG if (folder / peft.CONFIG).exists() else "config.json"
    for name in ("config.json", peft.CONFIG):
        if not (target / name).exists():
            continue
        if name != exported or _compared(target / name) != _compared(folder / name):
            raise ValueError(
                f"{target} already holds another model, as its {name} is not the checkpoint's: export to another "
                "directory, or replace it with --overwrite."
            )


def _compared(config: Path) -> object:
    """The values of a config that exports of one run share."""
    try:
        values = json.loads(config.read_text())
        # PEFT writes sets as lists in any order.
        return {
            key: sorted(value, key=str) if isinstance(value, list) else value
            for key, value in values.items()
            if key not in ("dtype", "transformers_version")
        }
    except (OSError, ValueError, AttributeError):  # no config
        return None


def _chosen(source: Path) -> Path:
    if (source / MANIFEST).exists():
        return source
    return latest_checkpoint(source) or source


def _export(checkpoint: Checkpoint, target: Path, max_shard_size: str | int, dtype: str) -> Exported:
    folder = checkpoint.path / MODEL
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{checkpoint.path} has no {MODEL}/config.json: it was saved without its model's files.")
    model = skeleton(AutoConfig.from_pretrained(folder))
    if (folder / peft.CONFIG).exists():
        return _export_adapters(checkpoint, target, dtype, model)
    state = hub_files.hub_format(model, _state(checkpoint, model, dtype))
    files = hub_files.shards(state, max_shard_size)
    names = hub_files.shard_names(len(files))
    num_bytes = sum(t.numel() * t.element_size() for t in state.values())
    dtypes = {t.dtype for t in state.values() if t.is_floating_point()}
    draft = hub_files.begin(target)
    for name, keys in zip(names, files, strict=True):
        hub_files.write_tensors({key: state.pop(key) for key in keys}, draft / name)
    total_parameters = sum(p.numel() for p in model.parameters())
    hub_files.write_index(draft, names, files, total_parameters, num_bytes)
    shutil.copytree(folder, draft, copy_function=shutil.copyfile, dirs_exist_ok=True)
    written = str(dtypes.pop() if len(dtypes) == 1 else torch.float32).removeprefix("torch.")
    config = json.loads((draft / "config.json").read_text())
    if config.get("dtype") != written:
        config["dtype"] = written
        (draft / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    hub_files.publish(draft, target)
    return Exported(checkpoint.path, target, written, len(files), num_bytes)


def _export_adapters(checkpoint: Checkpoint, target: Path, dtype: str, model: PreTrainedModel) -> Exported:
    """Export the adapters alone, as PEFT has them."""
    from peft import PeftConfig

    folder = checkpoint.path / MODEL
    name = (checkpoint.meta.get("model") or {}).get("adapter") or "default"
    adapters = peft.resolve_adapters(PeftConfig.from_pretrained(str(folder)), model, anatomy_of(model), name)
    # PEFT alone decides which tensors its file has: it is called with the parameters, without their values.
    parameters = model.state_dict(keep_vars=True)
    # A tied weight has two names, of which a checkpoint has one.
    wanted = {id(parameters[name]): name for name in hub_files.saved_names(model, parameters)}
    files = peft.adapter_state(model, adapters, parameters)
    state = {file_name: wanted[id(tensor)] for file_name, tensor in files.items()}
    tensors = _state(checkpoint, model, dtype, list(state.values()))
    found = {file_name: tensors[name] for file_name, name in state.items()}
    draft = hub_files.begin(target)
    peft.write_adapters(found, draft)
    shutil.copytree(folder, draft, copy_function=shutil.copyfile, dirs_exist_ok=True)
    for whole in ("config.json", "generation_config.json"):  # with these it would be a model
        (draft / whole).unlink(missing_ok=True)
    hub_files.publish(draft, target, last=peft.CONFIG)
    dtypes = {tensor.dtype for tensor in found.values()}
    written = str(dtypes.pop() if len(dtypes) == 1 else torch.float32).removeprefix("torch.")
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    return Exported(checkpoint.path, target, written, 1, num_bytes)


def _state(
    checkpoint: Checkpoint, model: PreTrainedModel, dtype: str, names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """The model's tensors by their names in memory, converted one after another."""
    described = checkpoint.meta.get("model") or {}
    state = {}
    for name in hub_files.saved_names(model, model.state_dict()) if names is None else names:
        kinds = checkpoint.kinds(name)
        kind = next((kind for kind in MODEL_KINDS if kind in kinds), None)
        if kind is None:
            raise CheckpointError(
                f"{checkpoint.path} has no weights for {name}, which the model in its {MODEL}/config.json has."
            )
        to = checkpoint.dtype(name, kind)
        if to.is_floating_point:
            if dtype != "auto":
                to = DTYPES[dtype]
            elif kind == "master":  # a value is as the model had it
                to = getattr(torch, described.get("dtype") or "float32")
        state[name] = checkpoint.read_into(torch.empty(checkpoint.shape(name, kind), dtype=to), name, kind)
    return state
