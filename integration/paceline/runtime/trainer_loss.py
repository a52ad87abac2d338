"""A Trainer's own loss on the last stage: label smoothing, ``compute_loss_func``, a ``compute_loss`` of one's own.

The last stage has the logits, the labels and the inputs of each micro-batch. So the Trainer's ``compute_loss`` runs
there as it is, with an object in place of the model that answers with the logits that there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..hf.stage import CausalLMStage

_TRAINERS = "transformers.trainer"
_TRLS = "trl.trainer.sft_trainer"


def home_of(kind: type, method: str) -> str:
    """Name of the module whose class gives ``kind`` this method."""
    return next((one.__module__ for one in kind.__mro__ if method in vars(one)), _TRAINERS)


def refused_loss(kind: type) -> str:
    """Why the ``compute_loss`` of a class of Trainers cannot run on the last stage; empty if it can."""
    homes = [one.__module__ for one in kind.__mro__ if "compute_loss" in vars(one)]
    if homes[:1] not in ([_TRAINERS], [_TRLS]) and _TRLS in homes:
        return "TRL's, which it stands before, gathers metrics from all ranks, and it runs on the last stage only"
    return ""


def averages_alone(kind: type) -> bool:
    """Whether a class of Trainers takes the mean of each evaluation batch by itself, whatever other processes have, and
    0 of one without labels, and counts no items for it: TRL's."""
    return home_of(kind, "compute_loss") == _TRLS


class ComputeLoss(Protocol):
    """A Trainer's ``compute_loss``."""

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor], *, num_items_in_batch: Tensor | None) -> Tensor: ...


class TrainersLoss:
    """The loss of a micro-batch as a Trainer computes it.

    Args:
        compute: ``compute_loss`` of ``trainer``.
        num_replicas: pipelines side by side: the processes that a plain Trainer would have.
    """

    def __init__(self, trainer: Trainer, compute: ComputeLoss, num_replicas: int) -> None:
        self._trainer, self._compute, self._num_replicas = trainer, compute, num_replicas

    def __call__(
        self,
        stage: CausalLMStage,
        logits: Tensor,
        batch: Mapping[str, Tensor],
        routing: Tensor | None,
        *,
        num_items: int,
        router_share: float,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """The share of a micro-batch in the loss of its step; of an evaluation, its own loss.

        Args:
            logits: ``[B, S, V]``.
            batch: ``input_ids`` and ``labels`` ``[B, S]``, and what else the batch has.
            routing, router_share: as for :meth:`CausalLMStage.loss`.
            num_items: label tokens of the whole step, or of this batch of an evaluation.
            num_micro_batches: of this pipeline's step; None in an evaluation.
        """
        trainer = self._trainer
        counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        if num_micro_batches is None and averages_alone(type(trainer)):
            counts = False
        items = torch.full((), num_items, device=logits.device) if counts else None
        accelerator = trainer.accelerator
        trainer.accelerator = _Processes(accelerator, 1 if num_micro_batches is None else self._num_replicas)
        try:
            model = _LastStage(stage, logits, batch, routing, router_share)
            loss = self._compute(model, dict(batch), num_items_in_batch=items)
        finally:
            trainer.accelerator = accelerator
        if num_micro_batches is None:
            return loss
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if not (counts if is_scaled is None else is_scaled):
            loss = loss / num_micro_batches
        return loss / self._num_replicas  # the mean of the processes, as data-parallel gradients are


def trainers_loss(trainer: Trainer, num_replicas: int) -> TrainersLoss | None:
    """None where the model's own loss counts."""
    if home_of(type(trainer), "compute_loss") not in (_TRAINERS, _TRLS):
        return TrainersLoss(trainer, trainer.compute_loss, num_replicas)
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None:
        return TrainersLoss(trainer, partial(Trainer.compute_loss, trainer), num_replicas)
    return None


def is_computing(trainer: Trainer) -> bool:
    """Whether the Trainer's own loss of a micro-batch is under way: on the last stage, and not on every rank."""
    accelerator: object = trainer.accelerator
    return isinstance(accelerator, _Processes)


class _LastStage(nn.Module):
    """In place of the model, for one micro-batch: called with its inputs it has the logits, and the model's loss."""

    def __init__(
        self,
        stage: CausalLMStage,
        logits: Tensor,
        batch: Mapping[str, Tensor],
        routing: Tensor | None,
        router_share: float,
    ) -> None:
        super().__init__()
        self._stage = (stage,)  # in a tuple: it is no part of this
        self._known = (logits, batch, routing, router_share)
        self.config = stage.model.config
        self.training = stage.training

    def _get_name(self) -> str:
        return type(self._stage[0].model).__name__

    def forward(
        self, *, labels: Tensor | None = None, num_items_in_batch: Tensor | None = None, **inputs: object
    ) -> CausalLMOutputWithPast:
        (stage,), (logits, batch, routing, router_share) = self._stage, self._known
        for name, value in inputs.items():
            if value is not batch.get(name) and not (
                name in ("return_dict", "use_cache") or value is None or value is False
            ):
                raise ValueError(
                    f"compute_loss calls the model with {name!r}, which its micro-batch did not have: on the last "
                    "stage of a pipeline the logits are computed already, and nothing else is there of the model; use "
                    "outputs.logits of the inputs as they are, or train without a pipeline."
                )
        loss = None
        if labels is not None:
            loss = stage.loss(logits, labels, routing, num_items_in_batch, router_share=router_share)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class _Processes:
    """An accelerator that counts pipelines, not ranks, as processes."""

    def __init__(self, accelerator: Accelerator, num_processes: int) -> None:
        self._accelerator, self.num_processes = accelerator, num_processes

    def __getattr__(self, name: str) -> object:
        return getattr(self._accelerator, name)
