"""A head that several stages share: each computes the logits of some rows of the vocabulary, one stage after another.

No stage has all logits. With the hidden states travel two sums a token, in float32: the logarithm of the sum of the
exponentials of all logits so far, and the logit of the label, once its row has come. What the last stage makes of
them is the cross entropy of the whole vocabulary, up to rounding.

Legend: B batch, S sequence, N = B·S tokens, V vocabulary, R rows of it on a stage, H hidden size.

Sources: the partial sums are those of a parallel cross entropy (Megatron-LM, arXiv 1909.08053, section 3); that the
vocabulary is what unbalances pipelines: Yeung et al., arXiv 2411.05288, who have every stage compute a part of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from .anatomy import Anatomy, UnsupportedModelError
from .cross_entropy import IGNORED, pieces_of

WHOLE_HEAD = "leave paceline.pipeline.head_slices out: the last stage then has the whole head"
"""The remedy where a model's head cannot be cut."""

NOTHING = -1e30
"""Logarithm of an empty sum, as a number that can travel."""


class Rows(NamedTuple):
    """Rows ``start`` to ``stop - 1`` of a tensor of ``whole`` rows."""

    start: int
    stop: int
    whole: int


class RowsOfLinear(nn.Linear):
    """A linear layer that computes some rows of its weight, which is the whole embedding's."""

    rows: Rows

    @classmethod
    def become(cls, head: nn.Module, rows: Rows) -> None:
        """Have ``head`` compute these rows alone, in place."""
        head.__class__ = cls
        head.rows = rows  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight[self.rows.start : self.rows.stop], self.bias)


def check_head(model: PreTrainedModel, anatomy: Anatomy) -> None:
    """Raise UnsupportedModelError if the head of ``model``, which may be on the meta device, cannot be cut."""
    head, reason = model.get_output_embeddings(), ""
    if anatomy.head_slices == 1:
        return
    if anatomy.head != tuple(name for name, child in model.named_children() if child is head):
        reason = f"it has {list(anatomy.head)} after its decoder, and one linear layer can be cut"
    elif type(head) is not nn.Linear or not head.weight.is_floating_point():
        reason = f"its head is a {type(head).__module__}.{type(head).__name__}, and a torch.nn.Linear can be cut"
    elif model.loss_function is not ForCausalLMLoss:
        reason = "its loss is another than transformers' cross entropy"
    elif anatomy.adapter.norm:
        reason = f"its {anatomy.adapter.norm} runs before its layers and after them"
    elif head.out_features < anatomy.head_slices:
        reason = f"its vocabulary has {head.out_features} rows"
    if reason:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model type {model.config.model_type!r}) cannot have its head in "
            f"{anatomy.head_slices} slices: {reason}; {WHOLE_HEAD}."
        )


def rows_of(slices: range, anatomy: Anatomy, vocabulary: int) -> Rows:
    """The rows of consecutive slices."""
    start, stop = (index * vocabulary // anatomy.head_slices for index in (slices.start, slices.stop))
    return Rows(start, stop, vocabulary)


def keep_rows(model: PreTrainedModel, anatomy: Anatomy, slices: range, *, shares_embedding: bool) -> Rows:
    """Keep of a model's head, in place, what ``slices`` have of it. Works on meta and on real weights.

    Args:
        shares_embedding: the stage has the whole embedding too, and its weight is the head's.

    Returns:
        The rows that are left.
    """
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    rows = rows_of(slices, anatomy, head.out_features)
    embedding = anatomy.trunk_of(model).get_submodule(anatomy.embedding)
    is_tied = getattr(embedding, "weight", None) is head.weight
    if head.bias is not None:
        head.bias = _rows(head.bias, rows)
    if is_tied and shares_embedding:
        RowsOfLinear.become(head, rows)
    else:
        head.weight = _rows(head.weight, rows)
        if is_tied:
            embedding.weight = head.weight
    head.out_features = rows.stop - rows.start
    return rows


def _rows(parameter: Tensor, rows: Rows) -> nn.Parameter:
    kept = parameter.detach()[rows.start : rows.stop].clone()
    return nn.Parameter(kept, requires_grad=parameter.requires_grad)


def empty_sums(num_tokens: int, device: torch.device) -> Tensor:
    """The sums ``[2 N]`` before the first slice."""
    sums = torch.zeros(2 * num_tokens, device=device)
    sums[:num_tokens] = NOTHING
    return sums


def add_logits(sums: Tensor, logits: Tensor, labels: Tensor, first_row: int) -> Tensor:
    """The sums ``[2 N]`` with those of one stage.

    Args:
        sums: of the stages before it.
        logits: ``[B, S, R]``.
        labels: ``[B, S]``, not shifted; -100 is no label.
        first_row: of the vocabulary, here.
    """
    targets = shifted(labels) - first_row
    targets = targets.masked_fill((targets < 0) | (targets >= logits.shape[-1]), -1)
    log_sums, of_targets = _Sums.apply(logits.reshape(-1, logits.shape[-1]), targets)
    before, targets_before = sums.chunk(2)
    return torch.cat([torch.logaddexp(before, log_sums), targets_before + of_targets])


def sums_of_ranks(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sums ``[2 N]`` of all rows, from those that each rank of ``group`` has of some."""
    total: Tensor = _SumsOfRanks.apply(sums, group)
    return total


def cross_entropy_of(sums: Tensor, labels: Tensor, num_items: Tensor | float | None) -> Tensor:
    """Next-token cross entropy over the label tokens, divided by ``num_items`` (None: by their number).

    Args:
        sums: ``[2 N]``, of all slices.
        labels: ``[B, S]``, not shifted; -100 is no label.
    """
    log_sums, of_targets = sums.chunk(2)
    has_label = shifted(labels) != IGNORED
    total = (log_sums - of_targets).masked_fill(~has_label, 0.0).sum()
    return total / (has_label.sum() if num_items is None else num_items)


def shifted(labels: Tensor) -> Tensor:
    """The label that each token is to predict, ``[N]``."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)


class _SumsOfRanks(torch.autograd.Function):
    """Adds up exponentials whose logarithms ranks have, and logits of labels."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        parts = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, sums, group=group)
        log_sums, of_targets = torch.stack(parts).chunk(2, dim=1)
        total = torch.cat([log_sums.logsumexp(0), of_targets.sum(0)])
        ctx.save_for_backward(sums, total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor) -> tuple[Tensor, None]:
        sums, total = ctx.saved_tensors
        of_log_sums, of_targets = of_total.chunk(2)
        share = torch.exp(sums.chunk(2)[0] - total.chunk(2)[0])
        return torch.cat([of_log_sums * share, of_targets]), None


class _Sums(torch.autograd.Function):
    """For each row of logits ``[N, R]``: the logarithm of the sum of its exponentials, and the logit of its target, 0
    where that is -1. Logits in float32 exist a piece at a time; the backward computes each piece anew."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_sums = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for part in pieces_of(logits):
            log_sums[part] = torch.logsumexp(logits[part].float(), dim=-1)
        ctx.save_for_backward(logits, targets, log_sums)
        of_targets = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].float()
        return log_sums, of_targets.masked_fill(targets < 0, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_sums: Tensor, of_targets: Tensor) -> tuple[Tensor, None]:
        logits, targets, log_sums = ctx.saved_tensors
        found = torch.empty_like(logits)
        of_targets = of_targets.masked_fill(targets < 0, 0.0)
        for part in pieces_of(logits):
            own = found[part] if found.dtype == torch.float32 else None
            piece = torch.sub(logits[part], log_sums[part, None], out=own).exp_().mul_(of_log_sums[part, None])
            piece.scatter_add_(1, targets[part, None].clamp(min=0), of_targets[part, None])
            if own is None:
                found[part] = piece
        return found, None
