"""Read from a model's source how its decoder runs its layers, and how a layer runs its two halves."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import TypeGuard

from torch import nn

Half = tuple[tuple[str, int], ...]
"""Child modules that one half of a layer calls, each with the number of values that are taken from it; 0: one value
alone, not in a tuple."""


@cache
def layer_loop(trunk: type[nn.Module], layers: str) -> tuple[int, tuple[str, ...]]:
    """Values that the forward of ``trunk`` takes from each of its ``layers``, read from its source.

    Returns:
        ``(returns, state)``: the number of values, the hidden states first, 0 where they are taken alone and not in a
        tuple; and the names of those beside the hidden states that go on into the next layer. ``(0, ())`` where the
        source shows no plain loop.
    """
    for loop in ast.walk(_forward_of(trunk)):
        if not isinstance(loop, ast.For) or f"self.{layers}" not in ast.unparse(loop.iter):
            continue
        layer = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        for step in ast.walk(loop):
            if not (isinstance(step, ast.Assign) and isinstance(step.value, ast.Call)):
                continue
            called = step.value.func
            if isinstance(called, ast.Name) and called.id in layer:
                target, call = step.targets[0], step.value
                given = {name for argument in _arguments(call) for name in _names(argument)}
                beside = target.elts[1:] if isinstance(target, ast.Tuple) else []
                state = tuple(node.id for node in beside if isinstance(node, ast.Name) and node.id in given)
                return _values_taken(target, loop), state
    return 0, ()


@cache
def layer_halves(layer: type[nn.Module]) -> tuple[Half, Half]:
    """The child modules that a decoder layer calls before and after its second residual connection begins.

    A layer of the usual form keeps its hidden states twice (``residual = hidden_states``), each time adding what
    comes next: attention, then the MLP. Between the two nothing but the hidden states goes on.

    Raises:
        ValueError: a forward of another form; the message says in what way, to follow the layer's name.
    """
    forward = _readable_forward_of(layer)
    if len(forward.args.args) < 2:
        raise ValueError("does not name its hidden states in its forward")
    stream = forward.args.args[1].arg
    kept = [
        number
        for number, step in enumerate(forward.body)
        if isinstance(step, ast.Assign) and isinstance(step.value, ast.Name) and step.value.id == stream
    ]
    if len(kept) != 2:
        raise ValueError(f"keeps its hidden states for a residual connection {len(kept)} times in its forward, not 2")
    halves = forward.body[: kept[1]], forward.body[kept[1] :]
    first, second = (dict(child for step in half for child in _called(step, forward)) for half in halves)
    return tuple(first.items()), tuple(second.items())


@cache
def uncalled(layer: type[nn.Module]) -> frozenset[str]:
    """Attributes of itself that the forward of ``layer`` reads in another way than by calling them or asking whether
    they are None.

    Raises:
        ValueError: it has no source; the message is to follow the layer's name.
    """
    forward = _readable_forward_of(layer)
    called = {id(node.func) for node in ast.walk(forward) if isinstance(node, ast.Call)}
    asked = {id(node.left) for node in ast.walk(forward) if isinstance(node, ast.Compare) and _is_with_none(node)}
    return frozenset(node.attr for node in ast.walk(forward) if _is_own(node) and id(node) not in called | asked)


def _forward_of(module: type[nn.Module]) -> ast.FunctionDef:
    (forward,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(module.forward)))).body
    assert isinstance(forward, ast.FunctionDef)
    return forward


def _readable_forward_of(layer: type[nn.Module]) -> ast.FunctionDef:
    try:
        return _forward_of(layer)
    except (OSError, TypeError, SyntaxError):
        raise ValueError("has no source to read its forward from") from None


def _called(step: ast.stmt, forward: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    assigned = {
        id(node.value): node.targets[0]
        for node in ast.walk(step)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    }
    for node in ast.walk(step):
        if isinstance(node, ast.Call) and _is_own(node.func):
            target = assigned.get(id(node))
            yield node.func.attr, 0 if target is None else _values_taken(target, forward)


def _is_with_none(node: ast.Compare) -> bool:
    """True for ``… is None`` and ``… is not None``."""
    (operator, *others), value = node.ops, node.comparators[0]
    is_none = isinstance(value, ast.Constant) and value.value is None
    return not others and isinstance(operator, (ast.Is, ast.IsNot)) and is_none


def _is_own(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _values_taken(target: ast.expr, within: ast.AST) -> int:
    if isinstance(target, ast.Tuple):
        return len(target.elts)
    if not isinstance(target, ast.Name):
        raise ValueError(f"assigns to {ast.unparse(target)} in its forward")
    indexed = any(
        isinstance(node, ast.Subscript) and ast.unparse(node) == f"{target.id}[0]" for node in ast.walk(within)
    )
    return 2 if indexed else 0


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _names(node: ast.AST) -> list[str]:
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
