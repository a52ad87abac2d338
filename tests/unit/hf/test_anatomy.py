"""Where a model's parts are, and the models in which they cannot be told apart."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paceline.hf import adapters
from paceline.hf import family_configs as families
from paceline.hf.anatomy import UnsupportedModelError, anatomy_of, layer_loop
from paceline.hf.check import quiet
from paceline.hf.family_configs import tiny_configs
from paceline.hf.weights import causal_config, model_class_of, skeleton


def _class(model_type: str) -> type[PretrainedConfig]:
    return next(c for c in AutoModelForCausalLM._model_mapping if c.model_type == model_type)


def _tiny(model_type: str) -> PreTrainedModel:
    with quiet(), torch.device("meta"):
        config = tiny_configs(_class(model_type))[0]
        return model_class_of(config)(config)


@pytest.mark.parametrize(
    ("model_type", "trunk", "layers", "embedding", "before", "after", "head"),
    [
        ("llama", "model", "layers", "embed_tokens", ("embed_tokens",), ("norm",), ("lm_head",)),
        ("gpt2", "transformer", "h", "wte", ("wte", "wpe", "drop"), ("ln_f",), ("lm_head",)),
        ("gpt_neox", "gpt_neox", "layers", "embed_in", ("embed_in", "emb_dropout"), ("final_layer_norm",), None),
        ("mamba", "backbone", "layers", "embeddings", ("embeddings",), ("norm_f",), ("lm_head",)),
        ("xglm", "model", "layers", "embed_tokens", ("embed_tokens", "embed_positions"), ("layer_norm",), ("lm_head",)),
        (
            "opt",
            "model.decoder",
            "layers",
            "embed_tokens",
            ("embed_tokens", "embed_positions"),
            ("final_layer_norm",),
            ("lm_head",),
        ),
    ],
)
def test_parts(
    model_type: str,
    trunk: str,
    layers: str,
    embedding: str,
    before: tuple[str, ...],
    after: tuple[str, ...],
    head: tuple[str, ...] | None,
) -> None:
    model = _tiny(model_type)
    anatomy = anatomy_of(model)
    assert (anatomy.trunk, anatomy.layers, anatomy.num_layers) == (trunk, layers, 4)
    assert (anatomy.embedding, anatomy.before, anatomy.after) == (embedding, before, after)
    assert head is None or anatomy.head == head
    assert len(anatomy.layers_of(model)) == 4


@pytest.mark.parametrize(
    ("model_type", "returns"), [("llama", 0), ("gpt2", 0), ("falcon", 2), ("bamba", 2), ("openai-gpt", 2), ("mpt", 2)]
)
def test_what_the_loop_takes_from_a_layer(model_type: str, returns: int) -> None:
    assert anatomy_of(_tiny(model_type)).returns == returns


class HandsOn(nn.Module):
    def forward(self, hidden: Any, state: Any = None) -> Any:
        for i, layer in enumerate(self.blocks[:4]):  # type: ignore[index, arg-type]
            hidden, state, _ = layer(hidden, mask=[i], state=state)
        return hidden


class TakesTuples(nn.Module):
    def forward(self, hidden: Any) -> Any:
        for layer in self.layers:  # type: ignore[union-attr]
            outputs = layer(hidden)
            hidden = outputs[0]
        return hidden[1]


class TakesTensors(nn.Module):
    def forward(self, hidden: Any) -> Any:
        for layer in self.layers:  # type: ignore[union-attr]
            hidden = layer(hidden)
            hidden = hidden[:, :1]
        return hidden


class HasNoLoop(nn.Module):
    def forward(self, hidden: Any) -> Any:
        return hidden


@pytest.mark.parametrize(
    ("trunk", "layers", "found"),
    [
        (HandsOn, "blocks", (3, ("state",))),
        (TakesTuples, "layers", (2, ())),
        (TakesTensors, "layers", (0, ())),
        (TakesTensors, "blocks", (0, ())),
        (HasNoLoop, "layers", (0, ())),
    ],
)
def test_layer_loop(trunk: type[nn.Module], layers: str, found: tuple[int, tuple[str, ...]]) -> None:
    assert layer_loop(trunk, layers) == found


@pytest.mark.parametrize(
    ("model_type", "extra", "message"),
    [
        ("zaya", {"num_experts_per_tok": 1}, "its layers hand on prev_router_hidden_states beside the hidden states."),
        ("glm_moe_dsa", {}, "its layers hand on topk_indices beside the hidden states."),
        ("deepseek_v4", {}, r"\['hc_head'\] hold weights outside the embedding, the decoder layers and the final norm"),
        ("xlm", {}, r"needs exactly one list of 4 decoder layers \(num_hidden_layers\), found \['transformer.attent"),
        ("bert", {}, "its input embedding is not a child of 'bert.encoder' that runs before the decoder layers"),
    ],
)
def test_refused_without_being_listed(
    model_type: str, extra: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts alone give these away; the list of refusals only says why in better words."""
    monkeypatch.delitem(adapters.REASONS, model_type)
    with quiet():
        monkeypatch.setitem(families.EXTRA, model_type, (extra,))
        with pytest.raises(UnsupportedModelError, match=message):
            anatomy_of(_tiny(model_type))


def test_listed_refusal_comes_before_the_model_is_built() -> None:
    message = "^model type 'bert' cannot be a pipeline: it is an encoder with a language-model head.$"
    with pytest.raises(UnsupportedModelError, match=message):
        skeleton(_class("bert")())


def test_causal_config_of_a_composite_is_its_text_config() -> None:
    with quiet():
        assert causal_config(_class("llama4")()).model_type == "llama4_text"
        assert causal_config(_class("gemma3")()).model_type == "gemma3"
        assert causal_config(_class("llama")()).model_type == "llama"
