"""A Trainer's model that has become one stage of a pipeline: what is asked of the whole one."""

from __future__ import annotations

import itertools
from typing import NoReturn

from transformers import PreTrainedModel

from ..hf.stage import is_called_as_stage


class _WholeModelOnly:
    """In place of a method of the whole model, on a model that is a stage now."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise ValueError(
            f"model.{self._name} was called and the model is one stage of a pipeline: write the whole one with "
            "trainer.save_model (on all ranks), and load that with from_pretrained."
        )


class Counted:
    """In place of ``num_parameters`` of a model that is a stage now: the whole model's, for Trainer and trackers."""

    def __init__(self, whole: PreTrainedModel) -> None:
        choices = itertools.product((False, True), repeat=2)
        self._found = {choice: int(whole.num_parameters(*choice)) for choice in choices}

    def __call__(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return self._found[bool(only_trainable), bool(exclude_embeddings)]


def stand_in(model: PreTrainedModel, whole: PreTrainedModel, counted: Counted) -> None:
    """Refuse what only the whole model can do, of ``model`` and the one inside of its adapters."""
    for part in (model, whole):
        part.generate, part.save_pretrained = _WholeModelOnly("generate"), _WholeModelOnly("save_pretrained")
        part.num_parameters = counted
    whole.register_forward_pre_hook(_refuse_calls)


def _refuse_calls(model: PreTrainedModel, args: object) -> None:
    if not is_called_as_stage(model):
        raise ValueError(
            "the model was called and it is one stage of a pipeline: give trainer.evaluate or trainer.predict the "
            "data (on all ranks), or load what trainer.save_model writes."
        )
