"""Find the parts of a Hugging Face causal language model: embedding, decoder layers, norm, head.

A pipeline stage keeps the model's own ``forward`` and loses the parts that live elsewhere, so all that has to be known
is which child modules run before the decoder layers, which after them, and which every stage needs (rotary tables).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .adapters import Adapter, adapter_for
from .language_part import hint
from .layer_source import layer_halves, layer_loop, uncalled
from .own_class import plain_class

WHOLE_LAYERS = "Leave paceline.pipeline.half_layers out: cuts are then between whole layers."
"""The remedy where a model can be cut between its decoder layers only."""


class UnsupportedModelError(ValueError):
    """A model that cannot be cut into pipeline stages that are sure to be right; the message has the reason."""


@dataclass(frozen=True)
class Anatomy:
    """Dotted module names of a ``...ForCausalLM``, in the order in which its forward runs them.

    Args:
        trunk: the decoder, whose forward loops over the layers (``"model"``, ``"transformer"``, ``"model.decoder"``).
        layers: the trunk's ``nn.ModuleList`` of decoder layers, relative to the trunk.
        num_layers: its length.
        returns: how many values the loop takes from a layer, the hidden states first; 0 where it takes the hidden
            states alone, not in a tuple.
        embedding: the token embedding, relative to the trunk.
        before: children of the trunk that run before the layers, ``embedding`` among them.
        after: children of the trunk that run after the layers (the final norm).
        head: children of the model beside the trunk (``lm_head``).
        blocks_per_layer: parts that a decoder layer can be cut into: 1, or 2 with attention and MLP apart.
        head_slices: parts that the head can be cut into, each with a run of the vocabulary's rows. All but the last
            are blocks, after those of the layers.
    """

    trunk: str
    layers: str
    num_layers: int
    returns: int
    embedding: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    head: tuple[str, ...]
    adapter: Adapter
    blocks_per_layer: int = 1
    head_slices: int = 1

    @property
    def num_blocks(self) -> int:
        return self.num_layer_blocks + self.head_slices - 1

    @property
    def num_layer_blocks(self) -> int:
        """Decoder layers, or their halves."""
        return self.num_layers * self.blocks_per_layer

    def blocks_of(self, layer: int) -> range:
        """The blocks of a decoder layer, by number."""
        return range(layer * self.blocks_per_layer, (layer + 1) * self.blocks_per_layer)

    def trunk_of(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.trunk)

    def layers_of(self, model: nn.Module) -> nn.ModuleList:
        layers = self.trunk_of(model).get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers


def refuse_known(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError if ``config`` is known not to be cut exactly (:mod:`paceline.hf.adapters`)."""
    reason = adapter_for(config).refuse
    if reason:
        raise UnsupportedModelError(f"model type {config.model_type!r} cannot be a pipeline: {reason}.{hint(config)}")


def anatomy_of(model: PreTrainedModel, *, half_layers: bool = False, head_slices: int = 1) -> Anatomy:
    """Find the parts of ``model`` (it may be on the meta device).

    Args:
        half_layers: decoder layers are to be cut between attention and MLP too.
        head_slices: the head is to be cut into so many parts (:mod:`.sliced_head`).

    The family's adapter comes first, then the order that transformers publishes in ``base_model_pp_plan``, then the
    order in which the trunk's children were registered.

    Raises:
        UnsupportedModelError: no single list of decoder layers, state that the layers hand on beside the hidden
            states, weights outside the known parts, or a family that is known not to be cut exactly; with
            ``half_layers`` also a layer that cannot be cut in two.
    """
    config = model.config
    refuse_known(config)
    adapter = adapter_for(config)
    name = f"{type(model).__name__} (model type {config.model_type!r})"
    trunk_name, layers_name = _find_layers(model, name, adapter)
    trunk = model.get_submodule(trunk_name)
    layers = trunk.get_submodule(layers_name)
    assert isinstance(layers, nn.ModuleList)
    returns, state = layer_loop(type(trunk), layers_name)  # type: ignore[arg-type]  # classes are hashable
    if state:
        raise UnsupportedModelError(
            f"{name} cannot be a pipeline: its layers hand on {', '.join(state)} beside the hidden states."
        )

    children = [child for child, module in trunk.named_children() if child != layers_name]
    order = list(adapter.order or _published_order(config, trunk, layers_name) or dict(trunk.named_children()))
    at = order.index(layers_name)

    def moves(child: str) -> bool:
        return child in children and (child in adapter.adds or not _needed_everywhere(trunk.get_submodule(child)))

    before, after = tuple(filter(moves, order[:at])), tuple(filter(moves, order[at + 1 :]))
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
    blocks = 1
    if half_layers:
        for layer in layers:
            _check_halves(layer, name)
        blocks = 2
    return Anatomy(
        *(trunk_name, layers_name, len(layers), returns, embedding, before, after, head, adapter),
        blocks_per_layer=blocks,
        head_slices=head_slices,
    )


def half_children(layer: nn.Module, half: int) -> dict[str, int]:
    """Children of a decoder layer that its first (0) or second (1) half calls, each with the number of values that it
    returns, as :attr:`Anatomy.returns`. The layer is one that :func:`anatomy_of` has found to have halves."""
    children = dict(layer.named_children())
    called = layer_halves(plain_class(layer))[half]  # type: ignore[arg-type]  # classes are hashable
    return {name: returns for name, returns in called if name in children}


def _check_halves(layer: nn.Module, name: str) -> None:
    reason = ""
    try:
        read = uncalled(type(layer))  # type: ignore[arg-type]  # classes are hashable
        first, second = half_children(layer, 0), half_children(layer, 1)
    except ValueError as error:
        reason = str(error)
    else:
        weights = {child for child, module in layer.named_children() if any(True for _ in module.parameters())}
        own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        if own:
            reason = f"has tensors of its own, {[tensor for tensor, _ in own]}"
        elif both := weights & first.keys() & second.keys():
            reason = f"calls {sorted(both)} in both halves"
        elif stray := weights - (first.keys() | second.keys()):
            reason = f"does not call {sorted(stray)} in its forward"
        elif used := (first.keys() | second.keys()) & read:
            reason = f"reads {sorted(used)} in another way than by calling them"
        elif not weights & first.keys() or not weights & second.keys():
            reason = "has all of its weights in one half"
    if reason:
        raise UnsupportedModelError(
            f"{name} cannot be cut within a decoder layer: its {type(layer).__name__} {reason}. {WHOLE_LAYERS}"
        )


def _find_layers(model: PreTrainedModel, name: str, adapter: Adapter) -> tuple[str, str]:
    wanted: Any = getattr(model.config.get_text_config(), adapter.count, None)
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
            f"({adapter.count}), found {where or 'none'}."
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
