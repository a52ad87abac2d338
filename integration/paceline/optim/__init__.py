"""Optimizers of pipelines, and what changes gradients and updates on the way."""

from .max_change import Limits, max_change_factors
from .natural_gradient import AffineNaturalGradient, OnlineNaturalGradient, simple_natural_gradient

__all__ = [
    "AffineNaturalGradient",
    "Limits",
    "OnlineNaturalGradient",
    "max_change_factors",
    "simple_natural_gradient",
]
