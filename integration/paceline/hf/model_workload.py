"""The workload of a step of a Hugging Face causal LM, for the search over parallel strategies.

Seconds come from floating-point operations and a speed, or from a profile; which part of a measured layer is its
experts' is decided by the operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..measure.flops import NUM_EXPERTS, TOP_K, attention_widths, experts_of_token, first_of, size_of
from ..measure.profile_file import Profile
from ..planning.expert_spread import UNKNOWN_LOADS
from ..planning.memory import States
from ..planning.workload import NOTHING_BESIDE, Item, Workload
from .activations import count_items
from .anatomy import Anatomy, anatomy_of
from .layer_blocks import Block, blocks_of
from .quiet_transformers import quiet
from .stage import num_tied
from .weights import causal_config, skeleton

BACKWARD = 2.0
"""Seconds of a backward by those of its forward: gradients of inputs and of weights."""


@dataclass(frozen=True)
class Shape:
    """Sizes and precision that a model is trained with.

    Args:
        dtype: of the weights.
        micro_batch_size: samples.
        sequence_length: tokens of a sample.
        train_batch_size: samples of a step.
        gradient_checkpointing: recompute layers in the backward.
        half_layers: items are halves of decoder layers.
    """

    dtype: torch.dtype
    micro_batch_size: int
    sequence_length: int
    train_batch_size: int
    gradient_checkpointing: bool = False
    half_layers: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.sequence_length


def workload_of(
    config: PretrainedConfig,
    shape: Shape,
    *,
    flops_per_s: float = inf,
    profile: Profile | None = None,
    zero: int = 1,
    **routing: Any,
) -> Workload:
    """The model's items with seconds and bytes of one micro-batch.

    Args:
        flops_per_s: that a device reaches; not looked at where there is a ``profile``.
        profile: of this model, scaled in proportion to the tokens of a micro-batch. Of layers that were not recomputed,
            one tells how long they take with it: a forward longer.
        zero: 0 or 1.
        routing: ``loads``, ``capacity_factor`` and ``worst`` of :class:`~paceline.planning.workload.Workload`.

    Raises:
        ValueError: a model that cannot be cut, sizes that it cannot have, loads that are not of it.
    """
    config = causal_config(config)
    memories = count_items(
        config,
        dtype=shape.dtype,
        micro_batch_size=shape.micro_batch_size,
        sequence_length=shape.sequence_length,
        gradient_checkpointing=shape.gradient_checkpointing,
        half_layers=shape.half_layers,
    )
    text = config.get_text_config()
    with quiet():
        model = skeleton(config)
        anatomy = anatomy_of(model, half_layers=shape.half_layers)
        operations = _operations(model, anatomy, shape.tokens, shape.sequence_length)
    num_experts = first_of(text, NUM_EXPERTS) if any(item.expert_parameters for item in operations) else 0
    top_k = first_of(text, TOP_K) if num_experts else 1
    rows = float(shape.tokens * top_k)
    recompute, stage = (1.0 if shape.gradient_checkpointing else 0.0), NOTHING_BESIDE
    if profile is not None:
        profile = profile.scaled(shape.micro_batch_size, shape.sequence_length)
        measured, stage = profile.items, profile.stage
        if profile.gradient_checkpointing:  # its backwards have it
            recompute = 0.0
    element = torch.finfo(shape.dtype).bits // 8
    items = []
    for index, (memory, flops) in enumerate(zip(memories, operations, strict=True)):
        layer = 0 < index < len(memories) - 1
        if profile is not None:
            forward_s, backward_s = measured[index].forward_s, measured[index].backward_s
            backward_s += recompute * forward_s if layer else 0.0
        else:
            forward_s = flops.total / flops_per_s
            backward_s = forward_s * (BACKWARD + (recompute if layer else 0.0))
        share = flops.experts / flops.total if flops.total else 0.0
        items.append(
            Item(
                memory,
                forward_s * (1 - share),
                backward_s * (1 - share),
                flops.expert_parameters,
                (forward_s * share, backward_s * share),
            )
        )
    heads = getattr(text, "num_attention_heads", None) or 1
    of_keys = size_of(text, "num_key_value_heads") or heads
    weight_bytes = 4 if shape.dtype == torch.float32 else 2
    return Workload(
        items=tuple(items),
        num_heads=heads,
        num_kv_heads=min(of_keys) if isinstance(of_keys, list) else of_keys,
        micro_batch_size=shape.micro_batch_size,
        train_batch_size=shape.train_batch_size,
        states=States(weight_bytes=weight_bytes, shard=zero == 1),
        rows=rows if num_experts else 0.0,
        row_bytes=float(text.hidden_size * element),
        num_experts=num_experts,
        top_k=top_k,
        unevenness=UNKNOWN_LOADS,
        tied_parameters=num_tied(model, anatomy),
        stage=stage,
        recomputed=tuple(range(1, len(items) - 1)) if shape.gradient_checkpointing else (),
        blocks_per_layer=anatomy.blocks_per_layer,
        **routing,
    )


@dataclass(frozen=True)
class _Operations:
    """Operations of an item's forward with one micro-batch.

    Args:
        total: floating-point operations.
        experts: of them, those of routed experts.
    """

    total: float
    experts: float = 0.0
    expert_parameters: int = 0


def work_of_items(
    model: PreTrainedModel, anatomy: Anatomy, sequence_length: int, *, recomputes: bool = False
) -> list[float]:
    """Floating-point operations of each item's forward and backward for a token: embedding, blocks of layers, head.

    An embedding looks its rows up: that is no work.

    Args:
        model: may be on the meta device.
        sequence_length: tokens of a sample: how far attention reaches.
        recomputes: the layers compute their forward once more in the backward (gradient checkpointing).
    """
    forward = [each.total / sequence_length for each in _operations(model, anatomy, sequence_length, sequence_length)]
    passes = 1 + BACKWARD
    embedding, *layers, head = forward
    return [embedding * passes, *(each * (passes + recomputes) for each in layers), head * passes]


def _operations(model: PreTrainedModel, anatomy: Anatomy, tokens: int, sequence_length: int) -> list[_Operations]:
    """Two for each weight and token that meet, and scores and weighted sums of attention under a causal mask."""
    text = model.config.get_text_config()
    blocks = blocks_of(model, anatomy)
    widths = attention_widths(text, len(blocks) // anatomy.blocks_per_layer)
    of_kind: dict[str, _Operations] = {}
    for number, block in enumerate(blocks):
        if block.kind not in of_kind:
            width = widths[number // anatomy.blocks_per_layer] if block.has_attention else 0
            of_kind[block.kind] = _of_block(block, text, tokens, 2.0 * tokens * sequence_length * width)
    embedding: Any = model.get_input_embeddings()  # in opt-350m narrower than the hidden states, as the head is
    head = 2.0 * tokens * text.vocab_size * embedding.weight.shape[1]
    return [_Operations(0.0), *(of_kind[block.kind] for block in blocks), _Operations(head)]


def _of_block(block: Block, text: Any, tokens: int, attention: float) -> _Operations:
    experts = block.num_routed
    dense = 2.0 * tokens * (block.num_parameters - experts) + attention
    if not experts:
        return _Operations(dense)
    rows, count = tokens * experts_of_token(text), first_of(text, NUM_EXPERTS)
    routed = 2.0 * rows * experts / count
    return _Operations(dense + routed, routed, experts)
