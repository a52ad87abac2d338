"""Where the parts of a Hugging Face causal language model are: embedding, decoder layers, norm, head.

A pipeline stage keeps the model's own ``forward`` and loses the parts that live elsewhere, so all that has to be known
is which child modules run before the decoder layers, which after them, and which every stage needs (rotary tables).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .adapters import Adapter, adapter_for


class UnsupportedModelError(ValueError):
    """This model cannot be cut into pipeline stages that are sure to be right; the message says why."""


@dataclass(frozen=True)
class Anatomy:
    """Dotted module names of a ``...ForCausalLM``, in the order in which its forward runs them.

    Args:
        trunk: the decoder, whose forward loops over the layers (``"model"``, ``"transformer"``, ``"model.decoder"``).
        layers: the trunk's ``nn.ModuleList`` of decoder layers, relative to the trunk.
        num_layers: its length.
        embedding: the token embedding, relative to the trunk.
        before: children of the trunk that run before the layers, ``embedding`` among them.
        after: children of the trunk that run after the layers (the final norm).
        head: children of the model beside the trunk (``lm_head``).
    """

    trunk: str
    layers: str
    num_layers: int
    embedding: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    head: tuple[str, ...]
    adapter: Adapter

    def trunk_of(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.trunk)

    def layers_of(self, model: nn.Module) -> nn.ModuleList:
        layers = self.trunk_of(model).get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """Find the parts of ``model`` (it may be on the meta device).

    The family's adapter comes first, then the order that transformers publishes in ``base_model_pp_plan``, then the
    order in which the trunk's children were registered.

    Raises:
        UnsupportedModelError: no single list of decoder layers, weights outside the known parts, or a family that
            is known not to be cut exactly.
    """
    config = model.config
    adapter = adapter_for(config)
    name = f"{type(model).__name__} (model type {config.model_type!r})"
    if adapter.refuse:
        raise UnsupportedModelError(f"{name} cannot be a pipeline: {adapter.refuse}")

    trunk_name, layers_name = _find_layers(model, name, adapter)
    trunk = model.get_submodule(trunk_name)
    layers = trunk.get_submodule(layers_name)
    assert isinstance(layers, nn.ModuleList)

    children = [child for child, module in trunk.named_children() if child != layers_name]
    order = list(adapter.order or _published_order(config, trunk, layers_name) or dict(trunk.named_children()))
    at = order.index(layers_name)
    before = tuple(c for c in order[:at] if c in children and not _needed_everywhere(trunk.get_submodule(c)))
    after = tuple(c for c in order[at + 1 :] if c in children and not _needed_everywhere(trunk.get_submodule(c)))

    embedding_module = model.get_input_embeddings()
    embedding = next((c for c in before if trunk.get_submodule(c) is embedding_module), None)
    if embedding is None:
        raise UnsupportedModelError(
            f"{name} cannot be a pipeline: its input embedding is not a child of {trunk_name!r} that runs before the "
            f"decoder layers; children before them: {list(before)}."
        )
    shared = [c for c in children if c not in before and c not in after]
    stray = [c for c in shared if any(True for _ in trunk.get_submodule(c).parameters())]
    stray += [p for p, _ in trunk.named_parameters(recurse=False)]
    if stray:
        raise UnsupportedModelError(
            f"{name} cannot be a pipeline: {stray} hold weights outside the embedding, the decoder layers and the "
            "final norm, and every stage would train a copy of its own."
        )
    top = trunk_name.split(".")[0]
    head = tuple(c for c, _ in model.named_children() if c != top)
    return Anatomy(trunk_name, layers_name, len(layers), embedding, before, after, head, adapter)


def _find_layers(model: PreTrainedModel, name: str, adapter: Adapter) -> tuple[str, str]:
    config = model.config.get_text_config()
    wanted = getattr(config, "num_hidden_layers", None)
    found = [
        path.rpartition(".")[::2]
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted and path.count(".") <= 2
    ]
    if adapter.layers:
        found = [(trunk, leaf) for trunk, leaf in found if leaf == adapter.layers]
    if len(found) != 1:
        where = [".".join(pair) for pair in found]
        raise UnsupportedModelError(
            f"{name} cannot be a pipeline: it needs exactly one list of {wanted} decoder layers "
            f"(num_hidden_layers), found {where or 'none'}."
        )
    trunk, leaf = found[0]
    if not trunk:
        raise UnsupportedModelError(
            f"{name} cannot be a pipeline: its layers hang on the model itself, not on a decoder."
        )
    return trunk, leaf


def _published_order(config: PretrainedConfig, trunk: nn.Module, layers_name: str) -> list[str] | None:
    plan = getattr(config.get_text_config(), "base_model_pp_plan", None)
    if not plan or layers_name not in plan or any(not hasattr(trunk, child) for child in plan):
        return None
    return list(plan)


def _needed_everywhere(module: nn.Module) -> bool:
    """Position tables (rotary, ALiBi slopes) are computed from the inputs and carry no weights."""
    has_weights = any(True for _ in module.parameters())
    passes_through = isinstance(module, (nn.Dropout, nn.Identity)) or "Norm" in type(module).__name__
    return not has_weights and not passes_through
