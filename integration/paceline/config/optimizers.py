"""Optimizers of ``torch.optim`` that a DeepSpeed JSON may name for a pipeline; without torch, for who only checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .section import value_at

ELEMENTWISE = frozenset(
    ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Classes of ``torch.optim`` that treat each element by itself, so that rows of a parameter can be stepped apart."""

REFUSED = {
    "LBFGS": "it evaluates the loss again and again within a step",
    "Muon": "it is for matrices only; pass initialize an optimizer of your own that joins it with another",
    "SparseAdam": "it is for sparse gradients, which pipelines do not have",
}


def check_optimizer(config: Mapping[str, Any]) -> None:
    """Raise ValueError if ``optimizer.type`` of a DeepSpeed JSON cannot train a pipeline, whatever its case."""
    name = value_at(config, "optimizer.type")
    for refused, why in REFUSED.items():
        if str(name).lower() == refused.lower():
            raise ValueError(
                f"optimizer.type is {name}: a pipeline cannot use it, {why}; choose one of "
                f"{', '.join(sorted(ELEMENTWISE))}."
            )
