"""Is a model, cut into stages, still the same model? Proven on a small copy: loss, logits and every gradient.

One function serves the table of families, ``paceline check-model`` and the check of an unknown model at start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ..patches import transformers_masking_utils
from ..patches.registry import applied
from .anatomy import WHOLE_LAYERS, UnsupportedModelError
from .masks import facts_of, known
from .sliced_head import Rows
from .stage import LABELS, CausalLMStage, Cut
from .weights import load_stage, model_class_of

ROUNDING = 2e-5
"""Largest relative difference that still counts as rounding in float32."""


@dataclass(frozen=True)
class Parity:
    """Largest relative differences between the cut and the whole model, over all cuts tried."""

    loss: float
    logits: float
    gradient: float
    worst_gradient: str

    @property
    def worst(self) -> float:
        return max(self.loss, self.logits, self.gradient)

    @property
    def exact(self) -> bool:
        return self.worst == 0.0


def cuts(num_blocks: int, *boundaries: int) -> list[Cut]:
    """Stages that begin at block 0 and at each of ``boundaries``."""
    edges = [0, *boundaries, num_blocks]
    last = len(edges) - 2
    return [Cut(edges[i], edges[i + 1], i == 0, i == last) for i in range(last + 1)]


def check_split(
    config: PretrainedConfig,
    num_layers: int,
    *,
    half_layers: bool = False,
    head_slices: int = 1,
    boundaries: Sequence[tuple[int, ...]] = (),
    seed: int = 0,
    batch: int = 2,
    length: int = 12,
) -> Parity:
    """Compare the whole model of ``config`` with its cuts 1 | rest (odd), into three, and embedding | layers | head.

    With ``half_layers``: with its cut into all halves of layers, and into a layer and a half, a layer and a half, rest.
    With ``head_slices`` (3 or more): cut after the first slice, and into a layer, rest, and each slice; the logits,
    which no stage has, are not compared.

    Args:
        config: of a model small enough for this process; float32 on the CPU, in training mode.
        boundaries: cuts to compare instead, each the blocks that its stages after the first begin at.

    Raises:
        UnsupportedModelError: the model cannot be cut, or a cut does not run.
    """
    whole = model_class_of(config)(config).train()
    generator = torch.Generator().manual_seed(seed)
    for parameter in whole.parameters():
        # Not the default initialisation, which leaves biases and norms at values that hide mistakes.
        parameter.data.normal_(std=0.2, generator=generator)
    vocab = config.get_text_config().vocab_size
    ids = torch.randint(3, vocab - 1, (batch, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 3] = -100
    side = {"attention_mask": torch.ones_like(ids)}
    side["attention_mask"][-1, -length // 4 :] = 0
    labels[-1, -length // 4 :] = -100

    num_blocks, usual = num_layers, [(1,), (1, num_layers - 1), (0, num_layers)]
    if half_layers:
        num_blocks, usual = 2 * num_layers, [(3, 6), tuple(range(1, 2 * num_layers))]
    if head_slices > 1:
        num_blocks = num_layers + head_slices - 1
        usual = [(num_layers + 1,), (1, *range(num_layers, num_blocks + 1))]
    finer: dict[str, Any] = {"half_layers": half_layers, "head_slices": head_slices}
    ways = [
        [load_stage(None, config, cut, allow_empty=True, **finer) for cut in cuts(num_blocks, *edges)]
        for edges in boundaries or usual
    ]
    side = {name: tensor for name, tensor in side.items() if all(name in s.accepts for way in ways for s in way)}
    reference = _reference(whole, ids, labels, side)
    results = []
    for stages in ways:
        for stage in stages:
            held = stage.model.state_dict()
            state = {name: tensor for name, tensor in whole.state_dict().items() if name in held}
            for name, rows in _names_in_rows(stage).items():
                state[name] = state[name][rows.start : rows.stop]
            stage.model.load_state_dict(state)
            stage.train()
        try:
            with applied(*transformers_masking_utils.PATCHES), known(facts_of(side, labels)):  # as the engine runs them
                results.append(_compare(reference, stages, ids, labels, side))
        except Exception as error:
            starts = [stage.cut.start for stage in stages[1:]]
            blocks = "half layers" if half_layers else "layers and slices of the head" if head_slices > 1 else "layers"
            raise UnsupportedModelError(
                f"{type(whole).__name__} (model type {config.model_type!r}) cannot be a pipeline: cut before {blocks} "
                f"{starts} it does not run: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                f"{'. ' + WHOLE_LAYERS if half_layers else ''}"
            ) from error
    worst = max(results, key=lambda r: r.worst)
    return Parity(
        max(r.loss for r in results),
        max(r.logits for r in results),
        max(r.gradient for r in results),
        worst.worst_gradient,
    )


def check_halves(config: PretrainedConfig, num_layers: int) -> Parity:
    """:func:`check_split` with ``half_layers``."""
    return check_split(config, num_layers, half_layers=True)


def check_slices(config: PretrainedConfig, num_layers: int) -> Parity:
    """:func:`check_split` with the head in slices: one with the norm, one between others, and the last."""
    return check_split(config, num_layers, head_slices=3)


def _reference(model: PreTrainedModel, ids: Tensor, labels: Tensor, side: dict[str, Tensor]) -> dict[str, Any]:
    """Loss, logits and gradients by the model's own forward, labels and all."""
    outputs = model(input_ids=ids, labels=labels, **side, use_cache=False)
    model.zero_grad()
    outputs.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": outputs.loss.detach(), "logits": outputs.logits.detach(), "gradients": gradients}


def _compare(
    reference: dict[str, Any], stages: Sequence[CausalLMStage], ids: Tensor, labels: Tensor, side: dict[str, Tensor]
) -> Parity:
    stream, routing = ids, None
    crossings: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
    for stage in stages:
        out, routing_out = stage(stream, side | {LABELS: labels}, routing)
        if stage.cut.last:
            break
        stream = out.detach().requires_grad_()
        routing = None if routing_out is None else routing_out.detach().requires_grad_()
        crossings.append((out, stream, routing_out, routing))
    tokens = (labels[:, 1:] != -100).sum()  # the first label has no token before it
    loss = stages[-1].loss(out, labels, routing_out, tokens)
    loss.backward()
    for sent, received, sums_sent, sums_received in reversed(crossings):
        tensors, gradients = [sent], [received.grad]
        of_sums = None if sums_received is None else sums_received.grad
        if sums_sent is not None and sums_sent.requires_grad and of_sums is not None:
            tensors.append(sums_sent)
            gradients.append(of_sums)
        torch.autograd.backward(tensors, gradients)

    found: dict[str, Tensor] = {}
    for stage in stages:
        in_rows = _names_in_rows(stage)
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                if name in in_rows:
                    rows = in_rows[name]
                    gradient = gradient.new_zeros(rows.whole, *gradient.shape[1:])
                    gradient[rows.start : rows.stop] = parameter.grad
                found[name] = found[name] + gradient if name in found else gradient
    wanted: dict[str, Tensor] = reference["gradients"]
    missing = sorted(set(wanted) ^ set(found))
    if missing:
        raise RuntimeError(f"gradients of {missing[:3]} exist on one side of the comparison only.")
    # A gradient that is zero but for rounding (a key's bias under softmax) is measured by the others' size.
    floor = 1e-3 * max((gradient.abs().max().item() for gradient in wanted.values()), default=0.0)
    worst_name, worst = "", 0.0
    for name, gradient in wanted.items():
        difference = _relative(found[name], gradient, floor)
        if difference > worst:
            worst_name, worst = name, difference
    of_logits = 0.0 if stages[-1].head_rows is not None else _relative(out.detach(), reference["logits"])
    return Parity(_relative(loss.detach(), reference["loss"]), of_logits, worst, worst_name)


def _names_in_rows(stage: CausalLMStage) -> dict[str, Rows]:
    in_rows = stage.parameters_in_rows()
    named = stage.model.named_parameters(remove_duplicate=False)
    return {name: in_rows[own] for name, own in named if own in in_rows}


def _relative(value: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    scale = max(wanted.abs().max().item(), floor)
    difference = (value - wanted).abs().max().item()
    if not math.isfinite(difference):
        return math.inf  # two models that overflow alike prove nothing
    return difference / scale if scale else difference
