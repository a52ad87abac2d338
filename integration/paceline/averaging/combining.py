"""The final model, combined from those of the last rounds: their mean, or weights that are fitted on held-out data.

Sources: Povey, Zhang, Khudanpur, arXiv 1410.7455 (appendix C.4); Kaldi's ``nnet3-combine``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..config import PacelineConfig
from ..config.averaging_keys import HELD_OUT

SWEEPS = 3
"""Times that each weight is fitted."""

ENOUGH = 1e-4
"""Share of the loss: a sweep that gains less is the last."""


def combining_fault(section: PacelineConfig, has_held_out: bool, remedy: str) -> str | None:
    """Why the last rounds' models could not be combined as ``section`` says, in the end; None: they can be.

    Args:
        remedy: how to have held-out data, where the one who asks takes them from.
    """
    averaging = section.averaging
    if has_held_out or averaging is None or averaging.combine_weights != HELD_OUT:
        return None
    return (
        f'paceline.averaging.combine_weights is "{HELD_OUT}" and there are no held-out data to fit the weights on: '
        f'{remedy}, or write "mean".'
    )


class RunningMean:
    """The plain average of the models of the last rounds, which is better than the last one.

    It keeps the models whole: ``num_rounds`` times the memory of the tensors given, where they lie, and once more after
    a period that was cut short. That counts by its share, and the oldest model by what is left of ``num_rounds``.

    Args:
        num_rounds: at least 1.
    """

    def __init__(self, num_rounds: int) -> None:
        assert num_rounds >= 1, num_rounds
        self.num_rounds = num_rounds
        self._models: deque[tuple[float, list[Tensor]]] = deque()

    def __len__(self) -> int:
        return len(self._models)

    def add(self, tensors: Iterable[Tensor], period: float = 1.0) -> None:
        """A round's model. It is copied.

        Args:
            period: share of a regular period since the one before it, above 0 and up to 1.
        """
        assert 0 < period <= 1, period
        self._models.append((period, [tensor.detach().clone() for tensor in tensors]))
        while sum(share for share, _ in list(self._models)[1:]) >= self.num_rounds:
            self._models.popleft()

    def weights(self) -> list[float]:
        """Of each model in the mean, oldest first; they sum to 1. At least one model must have been added."""
        assert self._models, "no round yet"
        room, weights = float(self.num_rounds), list[float]()
        for share, _ in reversed(self._models):
            weights.insert(0, min(share, room))
            room -= weights[0]
        return [weight / sum(weights) for weight in weights]

    def mean(self, weights: Sequence[float] | None = None) -> list[Tensor]:
        """New tensors of the dtypes that were given, summed in float64.

        Args:
            weights: of each model, oldest first; left out: :meth:`weights`.
        """
        weights = self.weights() if weights is None else weights
        means = []
        for same in zip(*(tensors for _, tensors in self._models), strict=True):
            total = same[0].double() * weights[0]
            for weight, tensor in zip(weights[1:], same[1:], strict=True):
                total += weight * tensor.double()
            means.append(total.to(same[0].dtype))
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"models": [tensors for _, tensors in self._models], "periods": [share for share, _ in self._models]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        models = state["models"]
        self._models = deque(zip(state.get("periods", [1.0] * len(models)), models, strict=True))


class LastModels:
    """Models of the last rounds, each put together from the averages of its parts.

    The first rank of an island has the tensors; all ranks count periods.

    Args:
        num_rounds: models that are combined; with 1 there is nothing to combine, and none is kept.
    """

    def __init__(self, num_rounds: int) -> None:
        self.moved = 0.0
        """Periods that the parts have been averaged over since the last model was kept, all together."""
        self._models = RunningMean(num_rounds)
        self._newest: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._models)

    def update(self, indices: Iterable[int], tensors: Iterable[Tensor]) -> None:
        """New values of some of the model's tensors."""
        if self._models.num_rounds > 1:
            self._newest.update(zip(indices, tensors, strict=True))

    def keep(self, num_tensors: int, num_parts: int) -> None:
        """Keep the model as it is, if all of its tensors have been averaged."""
        if num_tensors and len(self._newest) == num_tensors:
            self._models.add([self._newest[i] for i in range(num_tensors)], min(1.0, self.moved / num_parts))
        self.moved = 0.0

    def forget(self) -> None:
        """Begin anew."""
        self._models, self._newest = RunningMean(self._models.num_rounds), {}

    def weights(self) -> list[float]:
        """See :meth:`RunningMean.weights`."""
        return self._models.weights()

    def mean(self, weights: Sequence[float]) -> list[Tensor]:
        """See :meth:`RunningMean.mean`."""
        return self._models.mean(weights)

    def state_dict(self) -> dict[str, Any]:
        return {"last_rounds": self._models.state_dict(), "average": dict(self._newest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._models.load_state_dict(state["last_rounds"])
        self._newest = dict(state["average"])


def fit_weights(loss: Callable[[Sequence[float]], float], start: Sequence[float]) -> tuple[list[float], float]:
    """``(weights, loss)``: weights of models, none negative and 1 in all, whose combination loses least.

    One weight after another is fitted, the others keeping their proportions: a parabola through three losses says how
    far. Only what is better is taken, so the result is never worse than ``start`` or the last model alone.

    Args:
        loss: of a combination; not finite counts as worst. It is asked for 3 times for each model and sweep at most.
        start: weights to begin with, none negative and 1 in all.

    Example:
        >>> weights, least = fit_weights(lambda w: (w[0] - 0.25) ** 2 + 2.0, [0.5, 0.5])
        >>> [round(weight, 6) for weight in weights], round(least, 6)
        ([0.25, 0.75], 2.0)
    """

    def ask(weights: Sequence[float]) -> float:
        value = loss(weights)
        return value if math.isfinite(value) else math.inf

    number = len(start)
    last = [float(i == number - 1) for i in range(number)]
    best, least = min(((list(w), ask(w)) for w in (start, last)), key=lambda found: found[1])
    for _ in range(SWEEPS if number > 1 else 0):
        before = least
        for index in range(number):
            best, least = _along(ask, best, least, index)
        if not before - least > ENOUGH * abs(before):
            break
    return best, least


def _along(
    ask: Callable[[Sequence[float]], float], weights: list[float], value: float, index: int
) -> tuple[list[float], float]:
    """The best that was seen on the line from ``weights`` to the model ``index`` and away from it."""
    own = weights[index]
    lowest = -own / (1 - own) if own < 1 else 0.0  # where it has no weight any more
    if own == 1.0:
        return weights, value

    def at(t: float) -> list[float]:
        moved = [max(0.0, weight + t * (float(i == index) - weight)) for i, weight in enumerate(weights)]
        return [weight / sum(moved) for weight in moved]

    near, far = (lowest, 0.5) if lowest < 0 else (0.5, 1.0)
    seen = [(0.0, value)] + [(t, ask(at(t))) for t in (near, far)]
    (_, y), (a, ya), (b, yb) = seen
    if math.isfinite(ya) and math.isfinite(yb):
        # y + s t + c t² through both others
        c = ((ya - y) / a - (yb - y) / b) / (a - b)
        s = (ya - y) / a - c * a
        if c > 0:
            t = min(max(-s / (2 * c), lowest), 1.0)
            if t not in (0.0, a, b):
                seen.append((t, ask(at(t))))
    t, least = min(seen, key=lambda found: found[1])
    return (at(t), least) if least < value else (weights, value)
