"""``enable_jit_checkpoint`` under a Trainer of pipelines: on SIGTERM, all ranks save after the same step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..supervise.lifetime import Preemption, current


class SavesWhenAsked(TrainerCallback):
    """In place of transformers' ``JITCheckpointCallback``, with which each rank saves on its own, in mid-step.

    Args:
        is_stopping: whether some rank had been asked to stop when the last step began: all of them know.
    """

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self._is_stopping = is_stopping

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Save at once, and end the training, if that was asked for."""
        if self._is_stopping():
            current().reached()
            control.should_save = control.should_training_stop = True
            # It would come first, while the time runs out, and with save_strategy="best" decide whether to save.
            control.should_evaluate = False


def take_over(trainer: Trainer, is_stopping: Callable[[], bool]) -> None:
    """Put :class:`SavesWhenAsked` in the place of transformers' callback and its signal handler, if they are there."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "JITCheckpointCallback":
            signal.signal(signal.SIGTERM, callback.jit_manager._original_sigterm_handler or signal.SIG_DFL)
            trainer.callback_handler.remove_callback(callback)
            trainer.callback_handler.add_callback(SavesWhenAsked(is_stopping))
            return


def watched(args: TrainingArguments) -> AbstractContextManager[object]:
    """Around a training: requests to stop are noticed, if the arguments ask for it."""
    return Preemption() if getattr(args, "enable_jit_checkpoint", False) else nullcontext()
