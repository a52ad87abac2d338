"""The router's auxiliary (load-balancing) loss of a mixture of experts, cut over stages.

The loss is a product of two means over all layers and tokens, so it is no sum over stages. Its two means are: each
stage adds its layers' sums to those that came in with the activations, the last stage takes the product, and the
gradient of the probabilities comes back with the activations' gradient. No collective, no approximation.

Source: Switch Transformer, arXiv 2101.03961, equations (4) to (6), as transformers computes it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .anatomy import UnsupportedModelError

KNOWN = {
    "c15057ed9ce61076": "5.17.0, counts by torch.bincount",
    "69fb71ea85a8156f": "5.23.0, counts by torch.histc",
}
"""Fingerprints of transformers' ``load_balancing_loss_func`` that compute the loss of :class:`RouterLoss`."""


@dataclass(frozen=True)
class RouterLoss:
    """Load-balancing loss over ``num_experts`` experts of which each token takes ``top_k``.

    The running sums are one float32 vector ``[2 E + 1]``: tokens sent to each expert, probability given to each
    expert, rows (tokens × layers) counted.
    """

    num_experts: int
    top_k: int
    coefficient: float

    @property
    def size(self) -> int:
        return 2 * self.num_experts + 1

    def accumulate(
        self,
        routing: Tensor | None,
        router_logits: Sequence[Tensor],
        attention_mask: Tensor | None,
        device: torch.device,
    ) -> Tensor:
        """Add these layers' logits, each ``[B·S, E]``, to ``routing``; padding (mask 0) does not count."""
        experts = self.num_experts
        if routing is None:
            routing = torch.zeros(self.size, dtype=torch.float32, device=device)
        tokens, probability, rows = routing[:experts], routing[experts:-1], routing[-1]
        mask = None if attention_mask is None else attention_mask.reshape(-1).to(torch.float32)
        for logits in router_logits:
            weights = torch.softmax(logits.reshape(-1, experts), dim=-1)
            chosen = weights.topk(self.top_k, dim=-1).indices.reshape(-1)
            per_token = torch.ones(weights.shape[0], dtype=torch.float32, device=device) if mask is None else mask
            counted = torch.zeros(experts, dtype=torch.float32, device=device)
            tokens = tokens + counted.scatter_add_(0, chosen, per_token.repeat_interleave(self.top_k))
            weights = weights.float() if mask is None else weights.float() * mask.unsqueeze(-1)
            probability = probability + weights.sum(dim=0)
            rows = rows + (per_token.shape[0] if mask is None else mask.sum())
        return torch.cat([tokens, probability, rows.reshape(1)])

    def value(self, routing: Tensor) -> Tensor:
        """The loss (a scalar) from the whole model's sums."""
        experts = self.num_experts
        tokens, probability, rows = routing[:experts], routing[experts:-1], routing[-1]
        rows = rows.clamp(min=1)  # a model without one mixture layer, a micro-batch of nothing but padding
        return torch.sum(tokens / rows * (probability / rows)) * experts


def router_loss_of(model: PreTrainedModel) -> RouterLoss | None:
    """The model's router loss if its config asks for one (``output_router_logits``) and its forward adds it, else None.

    What the forward adds is read from its source: the number of experts, how many a token takes, the coefficient.

    Raises:
        UnsupportedModelError: the forward balances the experts by a function that is not the one computed here, or
            from logits that this version of transformers does not record.
    """
    if not getattr(model.config.get_text_config(), "output_router_logits", False):
        return None
    forward = inspect.unwrap(type(model).forward)
    found = _balancing(forward)
    if found is None or inspect.signature(forward).parameters["output_router_logits"].default is not None:
        return None  # the forward adds no such loss, or does not ask the config for it
    call, coefficient = found
    function = ast.unparse(call.func)
    known = len(call.args) == 4 and fingerprint(forward.__globals__[function]) in KNOWN
    if not known or not _recorders(model):
        why = "no module records its router's logits" if known else f"its {function} cannot be cut over stages"
        raise UnsupportedModelError(
            f"{type(model).__name__} (model type {model.config.model_type!r}) cannot be a pipeline with "
            f"output_router_logits: {why}. Set output_router_logits to false in the config."
        )
    experts, top_k, weight = (_value(node, model, forward) for node in (call.args[1], call.args[2], coefficient))
    return RouterLoss(int(experts), int(top_k), float(weight))


def has_routers(model: PreTrainedModel) -> bool:
    """Whether the stage ``model`` holds a router: layers without experts stand between others, or behind them."""
    recorders = _recorders(model)
    return any(_records(recorder, name, module) for name, module in model.named_modules() for recorder in recorders)


def fingerprint(function: Callable[..., Any]) -> str:
    """Digest of a function's code as written; its docstring, comments and line breaks do not count."""
    source = textwrap.dedent(inspect.getsource(function))
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    docstring = range(body[0].lineno, body[0].end_lineno + 1) if documented else range(0)
    words = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.start[0] not in docstring and token.type != tokenize.COMMENT and token.string.strip()
    ]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def _balancing(forward: Callable[..., Any]) -> tuple[ast.Call, ast.expr] | None:
    """Call and coefficient in ``aux_loss = load_balancing_loss_func(…)``, ``loss += coefficient * aux_loss``."""
    source = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    call, coefficient = None, None
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("load_balancing_loss"):
            call = node
        if isinstance(node, ast.AugAssign) and "aux_loss" in ast.unparse(node.value):
            assert isinstance(node.value, ast.BinOp)
            coefficient = node.value.left
    if call is None:
        return None
    assert coefficient is not None, "a balancing loss that is computed is added"
    return call, coefficient


def _recorders(model: PreTrainedModel) -> list[Any]:
    """Descriptions, for transformers, of the modules whose router logits it records."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    found = [(getattr(part, "_can_record_outputs", None) or {}).get("router_logits") for part in parts]
    return [recorder for recorder in found if recorder is not None]


def _records(recorder: Any, name: str, module: nn.Module) -> bool:
    """Whether transformers records the output of this module, by its class and part of its name, as it looks itself."""
    place = getattr(recorder, "layer_name", None)
    is_there = place is None or f".{place.strip('.')}." in f".{name}."
    return is_there and isinstance(module, getattr(recorder, "target_class", recorder))


def _value(expression: ast.expr, model: PreTrainedModel, forward: Callable[..., Any]) -> Any:
    code = compile(ast.Expression(expression), "<forward>", "eval")
    return eval(code, forward.__globals__, {"self": model})
