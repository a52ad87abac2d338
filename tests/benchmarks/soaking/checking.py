"""Whether a job has done what its reference did: nothing lost, nothing twice, no drift."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.soaking.episodes import SAVES
from paceline.checkpoint import Checkpoint, CheckpointError, complete_checkpoints, damaged_checkpoints

CLOSE = 1e-5
BOUND = 0.02
LEFT_BY_LAUNCHER_S = 30.0
"""DeepSpeed's launcher kills ranks that have not saved by then."""


def training_lines(output: Path, after: int = 0) -> dict[int, dict[str, Any]]:
    """Lines of ``metrics.jsonl`` about training, by step. A step that is there twice is a ValueError."""
    found: dict[int, dict[str, Any]] = {}
    for line in _lines(output):
        if "loss" in line:
            if line["step"] in found:
                raise ValueError(f"metrics.jsonl tells twice of step {line['step']}")
            found[line["step"]] = line
    return {step: line for step, line in found.items() if step > after}


def held_out_loss(output: Path) -> tuple[int, float]:
    """Of the last evaluation: step and loss."""
    found = [(line["step"], line["eval_loss"]) for line in _lines(output) if "eval_loss" in line]
    return found[-1] if found else (0, math.nan)


def rounds(output: Path) -> list[dict[str, Any]]:
    """The exchanges with other islands."""
    return [line["averaging"] for line in _lines(output) if "averaging" in line]


def decisions(output: Path) -> dict[str, int]:
    """Looks, and how many of them changed something, by what it was."""
    found: dict[str, int] = {}
    for line in _lines(output):
        if decision := line.get("decision"):
            for key in ("looks", *([decision["what"]] if decision["switched"] else [])):
                found[key] = found.get(key, 0) + 1
    return found


def _lines(output: Path) -> Iterator[dict[str, Any]]:
    file = output / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        yield json.loads(line)


def problems_of_data(output: Path, steps: int, every: int, tokens_a_step: int) -> Iterator[str]:
    """Every step once, with its samples."""
    lines = training_lines(output)
    wanted = sorted({*range(every, steps + 1, every), steps})
    if sorted(lines) != wanted:
        missing, more = sorted(set(wanted) - set(lines)), sorted(set(lines) - set(wanted))
        yield f"metrics.jsonl lacks steps {missing[:10]} and has {more[:10]} instead"
    for step, line in lines.items():
        if line["tokens"] != step * tokens_a_step:
            yield f"{line['tokens']} tokens after step {step}: they are {step * tokens_a_step}"
            return
        if line["loss"] is None or not math.isfinite(line["loss"]):
            yield f"the loss of step {step} is {line['loss']}"
            return


def problems_of_checkpoints(output: Path, keep: int, *, is_over: bool) -> Iterator[str]:
    """All that there are complete; after a run that ended well, nothing but ``keep`` of them."""
    if not output.exists():
        return
    for path, problem in damaged_checkpoints(output).items():
        yield f"{path.name} is damaged: {problem}"
    complete = complete_checkpoints(output)
    for path in complete:
        try:
            checkpoint = Checkpoint.open(path)
            checkpoint.verify()
            checkpoint.close()
        except CheckpointError as error:
            yield f"{path.name}: {error}"
    if len(complete) > keep + (not is_over):
        yield f"{len(complete)} checkpoints are kept: they should be {keep}"
    drafts = [path.name for path in output.iterdir() if path.suffix in (".draft", ".failed", ".tmp")]
    if is_over and drafts:
        yield f"drafts are left: {drafts}"


def last_step_saved(output: Path) -> int:
    latest = output / "latest"
    return int(latest.read_text().strip().rpartition("-")[2]) if latest.exists() else 0


def problems_of_saving(how: str, step: int, saved: int, every: int, took_s: float) -> Iterator[str]:
    """After an accident at ``step`` (0: before the first one) that took ``took_s`` to end the job.

    What stops a job politely loses no step; nothing loses more than the save that was under way, and the steps since.
    """
    if not step:
        return
    if how in SAVES and took_s < LEFT_BY_LAUNCHER_S:
        if saved < step:
            yield f"{how} at step {step}: step {saved} is the last one saved, and it should be saved where it stopped"
    elif saved < (step // every - 1) * every:
        yield f"{how} at step {step}: step {saved} is the last one saved, of saves every {every}"


def first_step(output: Path) -> int | None:
    """That the last start of the job went on from; None: it has not begun to train."""
    file = output / "run.json"
    return int(json.loads(file.read_text())["first_step"]) if file.exists() else None


def data_step(checkpoint: Path) -> int:
    """How many steps' samples the data had given when it was saved."""
    opened = Checkpoint.open(checkpoint)
    try:
        return int(opened.meta["client_state"]["paceline"]["data"]["step"])
    finally:
        opened.close()


def state(checkpoint: Path) -> dict[str, Tensor]:
    """Weights, masters and moments."""
    opened = Checkpoint.open(checkpoint)
    try:
        return {f"{kind} of {name}": opened.read(name, kind) for name in opened.names for kind in opened.kinds(name)}
    finally:
        opened.close()


def exported(output: Path) -> dict[str, Tensor]:
    """The model as it was written."""
    found: dict[str, Tensor] = {}
    for file in sorted(output.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def problems_of_tensors(
    what: str, found: dict[str, Tensor], wanted: dict[str, Tensor], agreement: str
) -> Iterator[str]:
    if not found or found.keys() != wanted.keys():
        names = sorted(found.keys() ^ wanted.keys())[:5]
        yield f"{what}: {len(found)} tensors, the reference has {len(wanted)}, without counterpart are {names}"
        return
    for name, tensor in found.items():
        other = wanted[name]
        if agreement == "bitwise" and not torch.equal(tensor, other):
            largest = (tensor.double() - other.double()).abs().max().item()
            yield f"{what}: {name} differs from the reference by up to {largest:.3g}"
            return
        if agreement == "close" and not torch.allclose(tensor.double(), other.double(), rtol=CLOSE, atol=CLOSE):
            largest = (tensor.double() - other.double()).abs().max().item()
            yield f"{what}: {name} differs from the reference by up to {largest:.3g}, more than {CLOSE}"
            return
        if not torch.isfinite(tensor).all():
            yield f"{what}: {name} is not finite"
            return


def problems_of_losses(output: Path, reference: Path, agreement: str, upto: int | None = None) -> Iterator[str]:
    """Of training, step by step; bounded: of the last evaluation."""
    if agreement == "bounded":
        (_, found), (_, wanted) = held_out_loss(output), held_out_loss(reference)
        if not found <= wanted * (1 + BOUND):  # nor a number
            yield f"the held-out loss is {found:.4f}, more than {BOUND:.0%} above the reference's {wanted:.4f}"
        return
    wanted_lines = training_lines(reference)
    for step, line in training_lines(output).items():
        if step not in wanted_lines:
            if upto is None or step <= upto:
                yield f"the reference has no step {step}"
                return
            continue
        loss, wanted = line["loss"], wanted_lines[step]["loss"]
        if loss != wanted if agreement == "bitwise" else not math.isclose(loss, wanted, rel_tol=CLOSE):
            yield f"the loss of step {step} is {loss!r}, the reference's {wanted!r}"
            return
