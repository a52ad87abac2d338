"""The blocks between which a model's decoder layers are cut: whole layers, or their halves."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from .anatomy import Anatomy
from .layer_kinds import layer_kinds
from .stage import HalfLayer


class Block(NamedTuple):
    """A decoder layer, or one half of it.

    Args:
        name: ``"layers.3"``, or of a half with its main module, ``"layers.3.self_attn"``.
        class_name: of the layer, or of the half's main module.
        kind: equal for blocks that cost the same (:func:`~paceline.hf.layer_kinds.layer_kinds`).
        modules: what it consists of.
        children: of a half, the names of these modules within the layer.
        has_attention: of a whole layer or a first half.
    """

    name: str
    class_name: str
    kind: str
    modules: tuple[nn.Module, ...]
    children: tuple[str, ...] = ()
    has_attention: bool = True

    @property
    def num_parameters(self) -> int:
        parameters = {id(p): p for module in self.modules for p in module.parameters()}
        return sum(p.numel() for p in parameters.values())

    @property
    def num_routed(self) -> int:
        """Parameters of its routed experts."""
        named = chain.from_iterable(module.named_parameters() for module in self.modules)
        return sum(p.numel() for name, p in named if ".experts." in f".{name}.")


def blocks_of(model: PreTrainedModel, anatomy: Anatomy) -> list[Block]:
    """The blocks of a whole model, in order. It may be on the meta device."""
    found = []
    for index, (layer, kind) in enumerate(zip(anatomy.layers_of(model), layer_kinds(model, anatomy), strict=True)):
        name = f"layers.{index}"
        if anatomy.blocks_per_layer == 1:
            found.append(Block(name, type(layer).__name__, kind, (layer,)))
            continue
        for half in range(2):
            children, modules = zip(*HalfLayer(layer, half).named_children(), strict=True)
            main = main_module(modules)
            named = children[modules.index(main)]
            of_half = (type(main).__name__, f"{kind} {named}", modules, children, half == 0)
            found.append(Block(f"{name}.{named}", *of_half))
    return found


def main_module(modules: Iterable[nn.Module]) -> nn.Module:
    """The module with the most weights, of those of a half layer: attention, or the MLP."""
    return max(modules, key=lambda module: sum(p.numel() for p in module.parameters()))
