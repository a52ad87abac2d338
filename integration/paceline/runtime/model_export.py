"""A trained pipeline back into a directory that ``from_pretrained`` loads. One pass; no rank holds the whole model.

Each stage writes the shards of its own tensors under their final names (the stages agree on the numbers first), with
tensors that transformers merged or renamed on loading given back their names of the hub's format. Everything goes into
a hidden folder until rank 0 has written the index, or joined what fits into one file, and moves it into place: a
killed export leaves nothing that looks whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.hub import convert_file_size_to_int

from ..comm.control import ControlPlane
from ..hf import hub_files
from ..hf.peft import CONFIG, PREFIX, Adapters, adapter_state, save_adapter_config, write_adapters
from ..hf.sliced_head import Rows
from ..hf.sliced_layers import SLICE
from ..hf.stage import CausalLMStage
from ..supervise.expected import expecting_all
from .module import CausalLMPipeline


class SavesFiles(Protocol):
    """A tokenizer, or a processor."""

    def save_pretrained(self, directory: Path, /) -> object: ...


def export(
    pipeline: CausalLMPipeline,
    directory: str | Path,
    control: ControlPlane,
    *,
    tokenizer: SavesFiles | None = None,
    max_shard_size: str | int = "5GB",
) -> None:
    """Write ``pipeline`` as a Hugging Face checkpoint. Collective: all ranks call it.

    Of a model with adapters these are written, and nothing else, as PEFT does it (``PeftModel.from_pretrained``).

    Args:
        directory: on a file system that all nodes share; the files of an earlier export are replaced.
        tokenizer: saved beside the model, if given.
        max_shard_size: of one file, as in ``save_pretrained``.

    Raises:
        ValueError: on every rank, if rank 0 does not see the other stages' files.
        PeerError, OSError: on every rank, if any rank could not write (a full disk).
    """
    target = Path(directory)
    with expecting_all("saving the model", control.rank):
        control.settle(None, f"preparing {target}")
    if pipeline.settle is not None:
        pipeline.settle()
    with _no_draft_after_a_failure(target, control):
        if pipeline.adapters is not None:
            _write_adapters(pipeline, pipeline.adapters, target, control, tokenizer)
        else:
            _write_model(pipeline, target, control, tokenizer, max_shard_size)
    with control.together(f"finishing {target}"):
        if control.rank == 0:
            last = "config.json" if pipeline.adapters is None else CONFIG
            hub_files.publish(target / hub_files.DRAFT, target, last=last)


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """An error names the place, which the system does not where a disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error


@contextmanager
def _no_draft_after_a_failure(target: Path, control: ControlPlane) -> Iterator[None]:
    """Delete the draft, of which a disk may be full, if what is done inside fails: it does so on all ranks."""
    try:
        yield
    except Exception:
        if control.rank == 0:
            shutil.rmtree(target / hub_files.DRAFT, ignore_errors=True)
        raise


def _write_model(
    pipeline: CausalLMPipeline,
    target: Path,
    control: ControlPlane,
    tokenizer: SavesFiles | None,
    max_shard_size: str | int,
) -> None:
    """All files of the model, into the draft."""
    draft, writes = target / hub_files.DRAFT, pipeline._grid.data_parallel_id == 0 and pipeline.slicing.rank == 0
    with control.together(f"preparing {target}"):
        if control.rank == 0:
            hub_files.begin(target)
    experts, layers = whole_experts(pipeline), whole_layers(pipeline)
    heads = control.gather_at_first(_own_rows(pipeline) if writes else None) if pipeline.has_slices else []
    state: dict[str, Tensor] = {}
    files: list[list[str]] = []
    size = 0
    with control.together(f"collecting the tensors of stage {pipeline.stage_id}"):
        if writes:
            for stage in pipeline.own_stages:
                own = own_tensors(stage)
                whole = {name: tensor for name, tensor in (experts | layers).items() if name in own}
                hub_format = hub_files.hub_format(stage.model, own | whole)
                state |= {name: tensor.contiguous() for name, tensor in hub_format.items()}
            if control.rank == 0:
                state |= _whole(heads)
            files = hub_files.shards(state, max_shard_size)
            size = sum(t.numel() * t.element_size() for t in state.values())
    reports = sorted(r for r in control.gather((pipeline.stage_id, files, size) if writes else None) if r)
    names = hub_files.shard_names(sum(len(keys) for _, keys, _ in reports))
    first = sum(len(keys) for stage, keys, _ in reports if stage < pipeline.stage_id)
    with control.together(f"writing stage {pipeline.stage_id} to {target}"):
        for name, keys in zip(names[first:], files, strict=False):
            hub_files.write_tensors({key: state[key] for key in keys}, draft / name)
    with control.together(f"finishing {target}"), _naming(target):
        if control.rank == 0:
            hub_files.save_config(pipeline.stage.model, draft)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
            missing = [name for name in names if not (draft / name).exists()]
            if missing:
                raise ValueError(
                    f"rank 0 does not see {missing[0]} that another stage wrote to {target}: "
                    "choose an output_dir on a file system that all nodes share."
                )
            total_bytes = sum(r[2] for r in reports)
            if len(names) > 1 and total_bytes <= convert_file_size_to_int(max_shard_size):
                hub_files.join(draft, names)  # the stages' files are as many as the stages
            else:
                keys_by_file = [keys for _, files, _ in reports for keys in files]
                hub_files.write_index(draft, names, keys_by_file, pipeline.total_parameters, total_bytes)


def _write_adapters(
    pipeline: CausalLMPipeline, adapters: Adapters, target: Path, control: ControlPlane, tokenizer: SavesFiles | None
) -> None:
    """All files of the adapters, into the draft. PEFT wants one for all stages: rank 0 has it all for a moment."""
    state: dict[str, Tensor] = {}
    rows: dict[str, tuple[Rows, Tensor]] = {}
    layers = whole_layers(pipeline)
    with control.together(f"collecting the adapters of stage {pipeline.stage_id}"):
        if pipeline._grid.data_parallel_id == 0 and pipeline.slicing.rank == 0:
            for stage in pipeline.own_stages:
                own = stage.model.state_dict()
                whole = {name: tensor for name, tensor in layers.items() if name in own}
                found = adapter_state(stage.model, adapters, own | whole if whole else None)
                state |= {name: tensor.detach().cpu() for name, tensor in found.items()}
            # PEFT writes embedding and head too if they have got rows for new tokens.
            rows = {PREFIX + name: part for name, part in _own_rows(pipeline).items() if PREFIX + name in state}
    states, heads = control.gather_at_first(state), control.gather_at_first(rows)
    with control.together(f"writing {target}"), _naming(target):
        if control.rank == 0:
            draft = hub_files.begin(target)
            found = {name: tensor for one in states for name, tensor in one.items()}
            write_adapters(found | _whole(heads), draft)
            save_adapter_config(pipeline.stage.model, adapters, draft)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)


@torch.no_grad()
def whole_experts(pipeline: CausalLMPipeline) -> dict[str, Tensor]:
    """The stage's experts that lie on several ranks, by Hugging Face's names, on the CPU of its first replica.

    Elsewhere nothing. Collective over the ranks of each stage.
    """
    found: dict[str, Tensor] = {}
    rank = pipeline._grid.data_parallel_id
    for name, layer in pipeline.expert_layers.items():
        if rank >= layer.size:
            continue  # has the same as a rank before it
        for leaf, parameter in layer.named_parameters():  # type: ignore[attr-defined]
            shares = [torch.empty_like(parameter) for _ in range(layer.size)] if rank == 0 else None
            dist.gather(parameter.detach().contiguous(), shares, group=layer.group, group_dst=0)
            if shares is not None:
                whole = torch.empty((layer.num_experts, *parameter.shape[1:]), dtype=parameter.dtype)
                for device, share in enumerate(shares):
                    own = list(layer.placement.own_experts(device))
                    whole[own] = share[: len(own)].cpu()
                found[f"{name}.{leaf}"] = whole
    return found


@torch.no_grad()
def whole_layers(pipeline: CausalLMPipeline) -> dict[str, Tensor]:
    """The stage's tensors that lie in slices on several ranks, put together, by Hugging Face's names, on the CPU of the
    rank with the first slices. Elsewhere nothing. Collective over the ranks of each stage.
    """
    found: dict[str, Tensor] = {}
    slicing = pipeline.slicing
    for name, parameter in pipeline.named_parameters() if slicing.size > 1 else ():
        if hasattr(parameter, SLICE):
            slices = [torch.empty_like(parameter) for _ in range(slicing.size)] if slicing.rank == 0 else None
            dist.gather(parameter.detach(), slices, group=slicing.group, group_dst=0)
            if slices is not None:
                found[pipeline.state_name(name)] = torch.cat(slices, getattr(parameter, SLICE).dim).cpu()
    return found


def _own_rows(pipeline: CausalLMPipeline) -> dict[str, tuple[Rows, Tensor]]:
    """This rank's rows of a head in slices that is not tied to the embedding, by Hugging Face's names."""
    in_rows, tied = pipeline.parameters_in_rows(), {id(tie.weight) for tie in pipeline.ties}
    named = [named for stage in pipeline.own_stages for named in stage.model.named_parameters()]
    return {name: (in_rows[own], own.detach().cpu()) for name, own in named if own in in_rows and id(own) not in tied}


def _whole(heads: Iterable[dict[str, tuple[Rows, Tensor]] | None]) -> dict[str, Tensor]:
    """Tensors of a head in slices, put together."""
    whole: dict[str, Tensor] = {}
    for of_rank in heads:
        for name, (rows, tensor) in (of_rank or {}).items():
            found = whole.setdefault(name, tensor.new_empty(rows.whole, *tensor.shape[1:]))
            found[rows.start : rows.stop] = tensor
    return whole


def own_tensors(stage: CausalLMStage) -> dict[str, Tensor]:
    """A stage's whole tensors by Hugging Face's names; a tied weight's copy on the last stage is not its own."""
    state: dict[str, Tensor] = stage.model.state_dict()
    if in_rows := stage.parameters_in_rows():
        cut = {tensor.data_ptr() for tensor in in_rows}
        return {name: tensor for name, tensor in state.items() if tensor.data_ptr() not in cut}
    copy = stage.tied_weight
    if copy is None or stage.cut.first or copy not in state:
        return state
    shared = state[copy].data_ptr()
    return {name: tensor for name, tensor in state.items() if tensor.data_ptr() != shared}
