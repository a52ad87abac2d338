"""Data about model families that need more than prune and reuse, and the families that are refused.

Most families need nothing: their decoder is a loop over layers, and what a stage does not own is replaced by modules
that pass the hidden states on. The rest is data, one row a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Adapter:
    """The differences of one family.

    Args:
        order: the trunk's children in the order in which its forward runs them, where neither the published plan nor
            the order of registration is right.
        layers: name of the list of decoder layers, where the model holds several lists of that length.
        count: field of the config that says how many decoder layers there are.
        neutral: attributes of the trunk, or of its config, and the value with which they leave an incoming hidden state
            unchanged, for stages that do not hold the embedding (an embedding multiplier becomes 1).
        adds: weightless children whose output is added to the embedding (tables of sinusoids), which no other stage
            may add again. Learned tables (``nn.Embedding``) are known for what they are and need no row.
        norm: child of the trunk that normalises twice, after the embedding and after the layers.
        keep: tensors of a layer that the trunk itself writes when it is initialised, relative to the layer.
        only: fields of the config whose other values cannot be cut: field → (the value that can, why not others).
        refuse: why this family cannot be cut; empty if it can.
    """

    order: tuple[str, ...] = ()
    layers: str = ""
    count: str = "num_hidden_layers"
    neutral: Mapping[str, Any] = field(default_factory=dict)
    adds: tuple[str, ...] = ()
    norm: str = ""
    keep: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    refuse: str = ""


_MULTIPLIER = Adapter(neutral={"embedding_multiplier": 1.0})
_GRANITE_SWA = replace(_MULTIPLIER, layers="layers")  # there may be as many rotary_embs
_GEMMA4 = Adapter(
    only={
        "num_kv_shared_layers": (0, "its last layers reuse keys and values of earlier ones"),
        "hidden_size_per_layer_input": (0, "every layer needs its own embedding of the token ids"),
    }
)

ADAPTERS: dict[str, Adapter] = {
    "afmoe": Adapter(neutral={"config.mup_enabled": False}),
    "granite": _MULTIPLIER,
    "granitemoe": _MULTIPLIER,
    "granitemoeshared": _MULTIPLIER,
    "granitemoehybrid": _MULTIPLIER,
    "granite_swa": _GRANITE_SWA,
    "granitemoe_swa": _GRANITE_SWA,
    "hyperclovax": _MULTIPLIER,
    "recurrent_gemma": Adapter(neutral={"normalizer": 1.0}),
    "biogpt": Adapter(neutral={"dropout": 0.0}),
    "starcoder2": Adapter(neutral={"embedding_dropout": 0.0}),
    "xglm": Adapter(neutral={"dropout": 0.0}, adds=("embed_positions",)),
    "opt": Adapter(
        order=("embed_tokens", "embed_positions", "project_in", "layers", "final_layer_norm", "project_out")
    ),
    "inkling_text": Adapter(order=("embed_tokens", "embed_norm", "layers", "norm")),
    "nanochat": Adapter(norm="norm"),
    "falcon_h1": Adapter(keep=("mamba.mup_vector",)),
    "longcat_flash": Adapter(count="num_layers"),
    "bamba": Adapter(only={"z_loss_coefficient": (0, "its z-loss is not part of the loss function")}),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": Adapter(only={"num_kv_shared_layers": _GEMMA4.only["num_kv_shared_layers"]}),
}

REFUSED: dict[str, tuple[str, ...]] = {
    "it is an encoder with a language-model head": (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
    ),
    "it is the decoder of an encoder-decoder model": (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
        "prophetnet", "trocr", "whisper",
    ),
    "it joins a language model to towers for images or sound; where the language model has a model type of its own, "
    "train that": (
        "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "mllama",
        "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal",
    ),
    "its layers read keys and values of another model": ("gemma4_assistant", "gemma4_unified_assistant"),
    "its hidden states are several streams, made from the embedding and merged after the last layer": (
        "deepseek_v4", "gemma3n_text", "hy_v4", "qwen4_exp_text",
    ),
    "its layers hand on state beside the hidden states": ("glm_moe_dsa", "inkling2_text", "zaya"),
    "its layers share weights": ("zamba", "zamba2"),
    "its trunk is not one loop over decoder layers": (
        "blt", "cpmant", "dory", "hrm_text", "inkling2_loop_text", "reformer", "xlm", "xlnet",
    ),
    "its trunk changes the hidden states it is given in place": ("ctrl",),
    "its trunk rescales the weights of its layers between training and evaluation": ("rwkv",),
    "its embedding normalises what it is given, embedded or not": ("modernbert-decoder",),
}  # fmt: skip
"""Reason → model types. A reason completes the sentence "… cannot be a pipeline: …"."""

REASONS = {model_type: reason for reason, types in REFUSED.items() for model_type in types}


def adapter_for(config: PretrainedConfig) -> Adapter:
    """The adapter of ``config.model_type``, with ``refuse`` set if this config cannot be cut.

    A family that needs nothing has the empty adapter.
    """
    adapter = ADAPTERS.get(config.model_type, Adapter())
    if config.model_type in REASONS:
        return replace(adapter, refuse=REASONS[config.model_type])
    for name, (allowed, why) in adapter.only.items():
        value = getattr(config, name, allowed)
        if value != allowed:
            return replace(adapter, refuse=f"{name} is {value!r}, and only {allowed!r} can be cut: {why}")
    return adapter
