"""``transformers/trainer.py``: private methods that our Trainers override, and the sources they fit."""

from __future__ import annotations

from paceline.patches.registry import Override


def _override(method: str, *fingerprints: str, by: str = "paceline.runtime.trainer:PipelineTraining") -> Override:
    return Override(f"transformers.trainer:Trainer.{method}", by, fingerprints)


OVERRIDES = (
    _override("_prepare_for_training", "0a4d89b3fdfd", "f55950593d7e", "28182cbf71da"),
    _override("_get_dataloader", "5f975c244904", "d1296dbd4dcb"),
    _override("_maybe_log_save_evaluate", "af101534f0f7"),
    _override("_finalize_training", "8fdcb7005e2b", "6d6d83d6a271"),
    _override("_save_rng_state", "27a97d106124"),
    _override("_clip_grad_norm", "ebfa9dc91d30"),
    _override("_get_grad_norm", "913ba6f52f07"),
    _override("_get_learning_rate", "158d12f9b950"),
    _override("_run_epoch", "ebe374933064", "31aff00f34c3", by="paceline.launch.job_trainer:JobTrainer"),
)
"""Several fingerprints: of transformers 5.17, the lowest version that is supported, and of later ones."""
