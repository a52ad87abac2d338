"""Checkpoints as files: written by every rank in the background, complete or not there, read in any other shape.

Files only: no collectives, no DeepSpeed. What the pieces of a running job are is the runtime's business.
"""

from __future__ import annotations

from .format import CheckpointError, Piece
from .reader import Checkpoint, complete_checkpoints, damaged_checkpoints, latest_checkpoint
from .writer import CheckpointWriter, new_run

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWriter",
    "Piece",
    "complete_checkpoints",
    "damaged_checkpoints",
    "latest_checkpoint",
    "new_run",
]
