"""The language model in a multimodal one: taken out as a model of its own, which a pipeline trains, and put back.

Transformers builds most models for text and images around the trunk of a causal LM that it also has by itself, such as
``gemma3`` around ``gemma3_text`` and ``mistral3`` around ``mistral``. Their weights are the same, under other names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _get_model_class

from .adapters import adapter_for

_AUTOS = (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForCausalLM)


def language_part(config: PretrainedConfig) -> PretrainedConfig | None:
    """The config of the language model in a multimodal one, if that can be a pipeline by itself."""
    text = getattr(config, "text_config", None)
    if not isinstance(text, PretrainedConfig) or type(text) not in AutoModelForCausalLM._model_mapping:
        return None
    return None if adapter_for(text).refuse else text


def hint(config: PretrainedConfig) -> str:
    """A sentence for a refusal of the whole model; empty: nothing can be taken out of it."""
    if language_part(config) is None:
        return ""
    return " `paceline extract` writes its language model as one that can be."


def multimodal_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of the whole model; None: transformers has none that is loaded by an ``Auto`` class."""
    for auto in _AUTOS:
        if type(config) in auto._model_mapping:
            return _get_model_class(config, auto._model_mapping)
    return None


def take_out(whole: PreTrainedModel) -> PreTrainedModel:
    """The language model of ``whole``, whose weights it shares: to be written, not to be called.

    Raises:
        ValueError: ``whole`` has no language model that is a causal LM by itself.
    """
    text = language_part(whole.config)
    name = f"model type {whole.config.model_type!r}"
    if text is None:
        raise ValueError(f"{name} has no language model that can be a pipeline by itself: choose another model.")
    with torch.device("meta"):
        model = _get_model_class(text, AutoModelForCausalLM._model_mapping)(text)
    state = _weights_of(whole, model)
    missing = sorted(model.state_dict().keys() ^ state.keys())
    if missing:
        raise ValueError(
            f"the language model of {name} is no {type(model).__name__}: only one of them has {missing[0]!r}; choose "
            "another model."
        )
    model.load_state_dict(state, assign=True)
    model.config.tie_word_embeddings = _are_tied(whole)
    model.config.dtype = whole.dtype
    model.generation_config = whole.generation_config
    return model


def put_back(model: PreTrainedModel, whole: PreTrainedModel) -> None:
    """Copy the weights of ``model`` into the multimodal one that it was taken out of, in place.

    Raises:
        ValueError: it has other weights; or a head of its own, which in ``whole`` is the embedding.
    """
    given, wanted = model.state_dict(), _weights_of(whole, model)
    others = sorted(given.keys() ^ wanted.keys())
    if others:
        raise ValueError(
            f"only one of the two has {others[0]!r}: give the model that was taken out of the {type(whole).__name__}."
        )
    if _are_tied(whole) and not _are_tied(model):
        raise ValueError(
            "the head was trained apart from the embedding, and the multimodal model has one matrix for both: train it "
            "with tie_word_embeddings true."
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            if tensor.shape != given[name].shape:
                shapes = f"{list(given[name].shape)}, and {list(tensor.shape)} in the {type(whole).__name__}"
                raise ValueError(f"{name} is {shapes}: give the model that was taken out of it, trained.")
            tensor.copy_(given[name])


def _weights_of(whole: PreTrainedModel, model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights of ``whole``'s language model, by the names that they have in ``model``."""
    decoder = whole.get_decoder()
    if isinstance(decoder, type(model)):  # with its head, as in llama4 and blip-2
        return dict(decoder.state_dict())
    parts: Mapping[str, nn.Module | None] = {
        _name_in(model, model.get_decoder()): decoder,
        _name_in(model, model.get_output_embeddings()): whole.get_output_embeddings(),
    }
    return {
        f"{prefix}.{name}": tensor
        for prefix, part in parts.items()
        if part is not None
        for name, tensor in part.state_dict().items()
    }


def _name_in(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)


def _are_tied(model: PreTrainedModel) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight
