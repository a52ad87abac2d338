"""Checkpoints of Hugging Face's Trainer: which of them are complete."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger("paceline")

STATE = "trainer_state.json"
"""Trainer writes it last."""


def newest_complete(folder: Path) -> str:
    """The newest checkpoint in ``folder`` that was written to its end.

    A full disk or a killed run leaves another one, which Trainer itself would take, and not be able to read.

    Raises:
        ValueError: there is none.
    """
    step = {}
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if number.isdecimal() and path.is_dir():
            step[path] = int(number)
    for path in sorted(step, key=step.__getitem__, reverse=True):
        if _is_complete(path):
            return str(path)
        logger.warning("%s is not complete: %s cannot be read; looking for the one before", path, STATE)
    raise ValueError(
        f"resume_from_checkpoint is True: there must be a complete checkpoint in {folder}, and there is none; give the "
        "path of one, or leave it out to start anew."
    )


def checked(checkpoint: Path) -> str:
    """The path of a checkpoint, which was written to its end.

    Raises:
        ValueError: it was not, or is none.
    """
    if not _is_complete(checkpoint):
        raise ValueError(
            f"resume_from_checkpoint is {str(checkpoint)!r}: it must be a complete checkpoint, and its {STATE} cannot "
            "be read; give the path of one, or leave it out to start anew."
        )
    return str(checkpoint)


def _is_complete(checkpoint: Path) -> bool:
    try:
        TrainerState.load_from_json(str(checkpoint / STATE))
    except (OSError, ValueError):
        return False
    return True
