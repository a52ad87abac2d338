"""Optimizers of pipelines, and what changes gradients and updates on the way."""

from .natural_gradient import OnlineNaturalGradient, simple_natural_gradient

__all__ = ["OnlineNaturalGradient", "simple_natural_gradient"]
