"""Checkpoints of Hugging Face's Trainer: which of them are complete."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint import CheckpointError, complete_checkpoints, damaged_checkpoints
from ..checkpoint.format import LATEST
from ..checkpoint.reader import own_checkpoints
from ..checkpoint.writer import NONE_YET

logger = logging.getLogger("paceline")

STATE = "trainer_state.json"
"""Trainer writes it last."""


def newest_complete(folder: Path, *, tells: bool = True) -> str:
    """The newest checkpoint in ``folder`` that was written to its end.

    A full disk or a killed run leaves another one, which Trainer itself would take, and not be able to read.

    Args:
        tells: this rank warns of those that it passes over; the others find the same.

    Raises:
        ValueError: there is none.
    """
    problems = []
    for path in _newest_first(folder):
        if (problem := _problem(path)) is None:
            return str(path)
        problems.append(problem)
        if tells:
            logger.warning("%s is not complete: %s; looking for the one before", path, problem)
    found = f" ({'; '.join(problems)})" if problems else ""
    raise ValueError(
        f"resume_from_checkpoint is True: there must be a complete checkpoint in {folder}, and there is none{found}; "
        "give the path of one, or leave it out to start anew."
    )


def checked(checkpoint: Path) -> str:
    """The path of a checkpoint, which was written to its end.

    Raises:
        ValueError: it was not, or is none.
    """
    if (problem := _problem(checkpoint)) is not None:
        before = _complete_before(checkpoint)
        remedy = "give the path of one" if before is None else f"the one before it is {before}: give its path"
        raise ValueError(
            f"resume_from_checkpoint is {str(checkpoint)!r}: it must be a complete checkpoint, and {problem}; "
            f"{remedy}, or leave it out to start anew."
        )
    return str(checkpoint)


def refuse_pipelines(asked: str | bool | None, folder: Path) -> None:
    """Refuse a checkpoint of a pipeline in a run without one: Trainer and DeepSpeed read other files.

    Args:
        asked: Trainer's ``resume_from_checkpoint``.
        folder: its ``output_dir``.

    Raises:
        ValueError: it is one.
    """
    path = next(iter(_newest_first(folder)), None) if asked is True else Path(asked) if asked else None
    if path is not None and complete_checkpoints(path):
        raise ValueError(_of_pipeline(path))


def refuse_pipelines_tag(load_dir: str, tag: str | None) -> None:
    """As :func:`refuse_pipelines`, by what DeepSpeed's ``load_checkpoint`` is given.

    Raises:
        ValueError: it is one.
    """
    folder, latest = Path(load_dir), Path(load_dir, LATEST)
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    if tag is not None and folder / str(tag) in complete_checkpoints(folder):
        raise ValueError(_of_pipeline(folder / str(tag)))


def _of_pipeline(path: Path) -> str:
    return (
        f'{path} is a checkpoint of a pipeline, and this run has none: write "pipeline" into the "paceline" section of '
        "the DeepSpeed JSON, or begin a new run with the model that is in it (paceline export)."
    )


def with_training(checkpoint: str) -> str:
    """The path of a checkpoint, which has more than the model.

    Raises:
        ValueError: it has not.
    """
    if complete_checkpoints(checkpoint):
        return checkpoint
    raise ValueError(
        f"{checkpoint} has nothing of a pipeline's training beside the model (save_only_model leaves that out): resume "
        "from one that was saved without that, or begin a new run with the model that is in it."
    )


@contextmanager
def naming_the_one_before(checkpoint: Path) -> Iterator[None]:
    """An error of a checkpoint that is raised inside names the complete one before, of those of Trainer's."""
    try:
        yield
    except CheckpointError as error:
        if (before := _complete_before(checkpoint)) is None:
            raise
        text = str(error).removesuffix(NONE_YET)
        raise CheckpointError(f"{text}. Of Trainer's checkpoints, the complete one before it is {before}") from error


@contextmanager
def naming_what_torch_saves(what: str) -> Iterator[None]:
    """An error of ``torch.save`` inside says what was not written: of a full disk it has a position in an archive."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"{what} was not written: {error}; see what is wrong with the disk, and save again.") from error


def _complete_before(checkpoint: Path) -> Path | None:
    step = _step_of(checkpoint)
    if step is None:
        return None
    earlier = [path for path in _newest_first(checkpoint.parent) if (_step_of(path) or 0) < step]
    return next((path for path in earlier if _problem(path) is None), None)


def _newest_first(folder: Path) -> list[Path]:
    found = [p for p in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if p.is_dir() and _step_of(p) is not None]
    return sorted(found, key=lambda path: _step_of(path) or 0, reverse=True)


def _step_of(path: Path) -> int | None:
    number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number.isdecimal() else None


def _problem(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be read; None for one that is complete."""
    try:
        TrainerState.load_from_json(str(checkpoint / STATE))
    except (OSError, ValueError, TypeError, AttributeError):  # no object, or one with other keys
        return f"its {STATE} cannot be read"
    for file in sorted(checkpoint.glob("rng_state*.pth")):  # with which one rank alone would fail
        if not zipfile.is_zipfile(file):  # as torch.save writes them
            return f"its {file.name} is truncated or damaged"
    if (missing := _missing_random_state(checkpoint)) is not None:
        return f"it lacks {missing}, and the others' are there"
    if complete_checkpoints(checkpoint):
        return None
    return next(iter(damaged_checkpoints(checkpoint).values()), None)


def _missing_random_state(checkpoint: Path) -> str | None:
    """The file that a rank would have written next to those of others, where the run was killed before."""
    there = {file.name for file in checkpoint.glob("rng_state_*.pth")}
    num_ranks = max((manifest["world_size"] for _, manifest in own_checkpoints(checkpoint)), default=0)
    names = [f"rng_state_{rank}.pth" for rank in range(num_ranks)]
    return next((name for name in names if there and name not in there), None)
