"""Find the parts of a Hugging Face causal language model: embedding, decoder layers, norm, head.

A pipeline stage keeps the model's own ``forward`` and loses the parts that live elsewhere, so all that has to be known
is which child modules run before the decoder layers, which after them, and which every stage needs (rotary tables).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .adapters import Adapter, adapter_for


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
        raise UnsupportedModelError(f"model type {config.model_type!r} cannot be a pipeline: {reason}.")


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """Find the parts of ``model`` (it may be on the meta device).

    The family's adapter comes first, then the order that transformers publishes in ``base_model_pp_plan``, then the
    order in which the trunk's children were registered.

    Raises:
        UnsupportedModelError: no single list of decoder layers, state that the layers hand on beside the hidden
            states, weights outside the known parts, or a family that is known not to be cut exactly.
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
    return Anatomy(trunk_name, layers_name, len(layers), returns, embedding, before, after, head, adapter)


@cache
def layer_loop(trunk: type[nn.Module], layers: str) -> tuple[int, tuple[str, ...]]:
    """Values that the forward of ``trunk`` takes from each of its ``layers``, read from its source.

    Returns:
        ``(returns, state)``: number of values as in :class:`Anatomy`, and the names of those beside the hidden states
        that go on into the next layer. ``(0, ())`` where the source shows no plain loop.
    """
    forward = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(trunk.forward))))
    for loop in ast.walk(forward):
        if not isinstance(loop, ast.For) or f"self.{layers}" not in ast.unparse(loop.iter):
            continue
        layer = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        for step in ast.walk(loop):
            if not (isinstance(step, ast.Assign) and isinstance(step.value, ast.Call)):
                continue
            called = step.value.func
            if isinstance(called, ast.Name) and called.id in layer:
                return _taken(step.targets[0], step.value, loop)
    return 0, ()


def _taken(target: ast.expr, call: ast.Call, loop: ast.For) -> tuple[int, tuple[str, ...]]:
    if isinstance(target, ast.Tuple):
        given = {node.id for argument in [*call.args, *(k.value for k in call.keywords)] for node in _names(argument)}
        beside = [node.id for node in target.elts[1:] if isinstance(node, ast.Name)]
        return len(target.elts), tuple(name for name in beside if name in given)
    assert isinstance(target, ast.Name)
    indexed = any(isinstance(node, ast.Subscript) and ast.unparse(node) == f"{target.id}[0]" for node in ast.walk(loop))
    return (2 if indexed else 0), ()


def _names(node: ast.AST) -> list[ast.Name]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Name)]


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
