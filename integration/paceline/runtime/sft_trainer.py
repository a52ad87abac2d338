"""TRL's ``SFTTrainer``, with pipelines; importing this needs TRL."""

from __future__ import annotations

from trl import SFTTrainer

from .trainer import PipelineTraining


class PacelineSFTTrainer(PipelineTraining, SFTTrainer):
    """``trl.SFTTrainer``; with ``"paceline": {"pipeline": …}`` in the DeepSpeed JSON its model is a pipeline."""
