"""What a family of models needs beyond prune and reuse, and the families that are refused.

Most families need nothing: their decoder is a loop over layers, and what a stage does not own is replaced by modules
that pass the hidden states on. The rest is data, one row a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Adapter:
    """How one family differs.

    Args:
        order: the trunk's children in the order in which its forward runs them, where neither the published plan nor
            the order of registration is right.
        layers: name of the list of decoder layers, where the model holds several lists of that length.
        neutral: attributes of the trunk, and the value with which they leave an incoming hidden state unchanged, for
            stages that do not hold the embedding (an embedding multiplier becomes 1).
        side: tensors of the batch that every stage needs, beside the attention mask and the position ids.
        refuse: why this family cannot be cut; empty if it can.
    """

    order: tuple[str, ...] = ()
    layers: str = ""
    neutral: Mapping[str, Any] = field(default_factory=dict)
    side: tuple[str, ...] = ()
    refuse: str = ""


_MULTIPLIER = Adapter(neutral={"embedding_multiplier": 1.0})

ADAPTERS: dict[str, Adapter] = {
    "granite": _MULTIPLIER,
    "granitemoe": _MULTIPLIER,
    "granitemoeshared": _MULTIPLIER,
    "granitemoehybrid": _MULTIPLIER,
    "granite_swa": _MULTIPLIER,
    "granitemoe_swa": _MULTIPLIER,
    "hyperclovax": _MULTIPLIER,
    "starcoder2": Adapter(neutral={"embedding_dropout": 0.0}),
    "opt": Adapter(
        order=("embed_tokens", "embed_positions", "project_in", "layers", "final_layer_norm", "project_out")
    ),
}


def adapter_for(config: PretrainedConfig) -> Adapter:
    """The adapter of ``config.model_type``; the empty one for a family that needs nothing."""
    return ADAPTERS.get(config.model_type, Adapter())
