"""What makes up for gradients that come late: a warm-in, and corrections of the gradient or of the update.

What they remember lies in the optimizer's state beside its own, so that checkpoints by name carry it. Optimizers of
``torch.optim`` make their state where a parameter has none: so ours goes in after a parameter's first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NESTEROV, ERROR_FEEDBACK = "nesterov", "error_feedback"
CORRECTIONS = (NESTEROV, ERROR_FEEDBACK)

NUM_UPDATES, PREVIOUS_GRADIENT, PREVIOUS_CHANGE = "num_updates", "previous_gradient", "previous_change"
"""Keys in the state of a parameter."""

_KEYS = (NUM_UPDATES, PREVIOUS_GRADIENT, PREVIOUS_CHANGE)

MOMENTUM = 0.9
"""How far a gradient is extrapolated where the optimizer has no momentum of its own."""


@dataclass(frozen=True)
class Corrections:
    """Of late gradients, by who owns the rows: each element by itself.

    Let g_n be the gradient of update n, clipped and without the loss scale, and D_n the change that the optimizer makes
    of it, both counted by parameter from the first that had a gradient.

    * ``"nesterov"``: the optimizer sees g_n + mu (g_n - g_{n-1}), the gradient extrapolated to the weights that it will
      be applied to: the look-ahead of Nesterov's method. mu is the optimizer's own momentum (``betas[0]`` or
      ``momentum``) where it has one, else :data:`MOMENTUM`.
    * ``"error_feedback"``: the weights move by D_n + (D_n - D_{n-1}): what one late gradient got wrong is made up for
      when the next one shows it. It costs a second reading of the weights a step.

    The first of each is not corrected. Both keep one tensor more for each parameter, in the masters' precision. An
    update that is left out (not finite) counts for nothing.

    Args:
        warm_in_steps: the learning rate of update n, counted from 0, is multiplied by
            min(1, (n + 1) / ``warm_in_steps``); 0 for none. It comes on top of what a scheduler does.
        correction: ``"nesterov"``, ``"error_feedback"`` or None.

    Raises:
        ValueError: another value.

    Source: the Nesterov and error-feedback corrections of one-step-delayed training; the formulas here are ours.
    """

    warm_in_steps: int = 0
    correction: str | None = None

    def __post_init__(self) -> None:
        if self.warm_in_steps < 0:
            raise ValueError(f"warm_in_steps is {self.warm_in_steps}: it is a number of updates, give 0 or more.")
        if self.correction not in (None, *CORRECTIONS):
            raise ValueError(f"correction is {self.correction!r}: choose one of {', '.join(CORRECTIONS)}, or null.")

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()``, corrected; learning rates are as before afterwards, gradients may be others."""
        stepped = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        kept: dict[nn.Parameter, dict[str, Tensor]] = {parameter: {} for parameter, _ in stepped}
        if self.correction == NESTEROV:
            for parameter, group in stepped:
                kept[parameter][PREVIOUS_GRADIENT] = _look_ahead(optimizer, parameter, _momentum(group))
        before = [p.clone() for p, _ in stepped] if self.correction == ERROR_FEEDBACK else []
        rates = [group["lr"] for group in optimizer.param_groups]
        if self.warm_in_steps:
            known = (_remembered(optimizer, parameter, NUM_UPDATES) for parameter, _ in stepped)
            number = max((int(count) for count in known if count is not None), default=0)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * min(1.0, (number + 1) / self.warm_in_steps)
            for parameter in kept:
                kept[parameter][NUM_UPDATES] = torch.tensor(number + 1)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for (parameter, _), old in zip(stepped, before, strict=bool(before)):
            kept[parameter][PREVIOUS_CHANGE] = _feed_back(optimizer, parameter, old)
        for parameter, state in kept.items():
            for key in _KEYS:  # a checkpoint may have what is of no use with these corrections
                optimizer.state[parameter].pop(key, None)
            optimizer.state[parameter].update(state)


def _look_ahead(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, momentum: float) -> Tensor:
    """Extrapolate the gradient in place; what it was before."""
    gradient, previous = parameter.grad, _remembered(optimizer, parameter, PREVIOUS_GRADIENT)
    assert gradient is not None
    if previous is None:
        return gradient.clone()
    change = gradient - previous
    previous.copy_(gradient)
    gradient.add_(change, alpha=momentum)
    return previous


def _feed_back(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, old: Tensor) -> Tensor:
    """Add the difference between this change and the last; this change, in the memory of ``old``."""
    change = torch.sub(parameter, old, out=old)
    previous = _remembered(optimizer, parameter, PREVIOUS_CHANGE)
    if previous is not None:
        parameter.add_(change - previous)
    return change


def _remembered(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> Tensor | None:
    return optimizer.state.get(parameter, {}).get(key)


def _momentum(group: dict[str, Any]) -> float:
    own = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
    return float(own) or MOMENTUM
