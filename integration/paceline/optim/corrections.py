"""What makes up for gradients that come late: a warm-in, and weights that run ahead of the optimizer.

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

NUM_UPDATES, PREVIOUS_CHANGE = "num_updates", "previous_change"
"""Keys in the state of a parameter."""

KEYS_OF_CORRECTIONS = (NUM_UPDATES, PREVIOUS_CHANGE)

Remembered = dict[nn.Parameter, tuple[float, dict[str, Tensor]]]
"""By parameter, its factor c, and what its state has beside the optimizer's own."""

MOMENTUM = 0.9
"""Nesterov's, where the optimizer has no momentum of its own."""


@dataclass(frozen=True)
class Corrections:
    """Of late gradients, by who owns the rows: each element by itself.

    Let D_n be the change that the optimizer makes in update n, counted by parameter from the first that had a gradient;
    the one before that is 0. The weights move by D_n + c (D_n - D_{n-1}) and so are c D_n ahead of the sum of all
    changes: a gradient that is taken of them is applied an update later, when the sum has come about there.

    * ``"nesterov"``: c is the optimizer's own momentum (``betas[0]`` or ``momentum``) where it has one, else
      :data:`MOMENTUM`. The weights are at the point where Nesterov's method takes its gradients.
    * ``"error_feedback"``: c is 1. What an update got wrong, seen from the next, is made up for in full.

    Both keep one tensor more for each parameter, in the masters' precision, and read the weights a second time in each
    step. An update that is left out (not finite) counts for nothing. Where one is made smaller, D_n is the change with
    which the weights would have moved so far.

    Args:
        warm_in_steps: the learning rate of update n, counted from 0, is multiplied by
            min(1, (n + 1) / ``warm_in_steps``); 0 for none. It comes on top of what a scheduler does.
        correction: ``"nesterov"``, ``"error_feedback"`` or None.

    Raises:
        ValueError: another value.

    Source: the Nesterov and error-feedback corrections of one-step-delayed training; that they are one formula with two
    factors is ours.
    """

    warm_in_steps: int = 0
    correction: str | None = None

    def __post_init__(self) -> None:
        if self.warm_in_steps < 0:
            raise ValueError(f"warm_in_steps is {self.warm_in_steps}: it is a number of updates, give 0 or more.")
        if self.correction not in (None, *CORRECTIONS):
            raise ValueError(f"correction is {self.correction!r}: choose one of {', '.join(CORRECTIONS)}, or null.")

    @property
    def keys(self) -> frozenset[str]:
        """Keys in the state of a parameter that are remembered."""
        kept = {NUM_UPDATES: self.warm_in_steps > 0, PREVIOUS_CHANGE: self.correction is not None}
        return frozenset(key for key, is_kept in kept.items() if is_kept)

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> Remembered:
        """``optimizer.step()``, corrected; learning rates are as before afterwards.

        Returns:
            What was remembered of the parameters that were stepped, before.
        """
        stepped = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        kept: dict[nn.Parameter, dict[str, Tensor]] = {parameter: {} for parameter, _ in stepped}
        before = [p.clone() for p, _ in stepped] if self.correction is not None else []
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
        ahead = {parameter: _momentum(group) if self.correction == NESTEROV else 1.0 for parameter, group in stepped}
        for (parameter, _), old in zip(stepped, before, strict=bool(before)):
            kept[parameter][PREVIOUS_CHANGE] = _run_ahead(optimizer, parameter, old, ahead[parameter])
        return {p: (ahead[p], _exchange(optimizer, p, state)) for p, state in kept.items()}

    def take_back(self, optimizer: torch.optim.Optimizer, before: Remembered) -> None:
        """The last step is undone: remember what was remembered before it."""
        for parameter, (_, state) in before.items():
            _exchange(optimizer, parameter, state)

    def note_limited(
        self, optimizer: torch.optim.Optimizer, before: Remembered, parameter: Tensor, moved: Tensor
    ) -> None:
        """In the last step a parameter has ``moved`` less far than the optimizer and the correction made it."""
        assert isinstance(parameter, nn.Parameter)
        if self.correction is None or parameter not in before:
            return
        ahead, state = before[parameter]
        previous = state.get(PREVIOUS_CHANGE)
        # moved = D_n + c (D_n - D_{n-1})
        change = moved if previous is None else torch.add(moved, previous, alpha=ahead)
        torch.div(change, 1 + ahead, out=optimizer.state[parameter][PREVIOUS_CHANGE])


def _exchange(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, new: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remember ``new``; returns what was remembered."""
    state = optimizer.state[parameter]
    old = {key: state.pop(key) for key in KEYS_OF_CORRECTIONS if key in state}
    state.update(new)
    return old


def _run_ahead(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, old: Tensor, factor: float) -> Tensor:
    """Add the difference between this change and the last, times ``factor``; this change, in the memory of ``old``."""
    change = torch.sub(parameter, old, out=old)
    previous = _remembered(optimizer, parameter, PREVIOUS_CHANGE)
    parameter.add_(change if previous is None else change - previous, alpha=factor)
    return change


def _remembered(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> Tensor | None:
    found: Tensor | None = optimizer.state.get(parameter, {}).get(key)
    return found


def _momentum(group: dict[str, Any]) -> float:
    own = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
    return float(own) or MOMENTUM
