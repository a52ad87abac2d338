"""States that belong to a rank and to no tensor, in checkpoints: parameter groups, schedulers, random generators.

Each is an entry of what a rank saves. A run of another shape has other ranks: each kind of state knows what it takes
from the entries of all ranks that were saved (:class:`RankStates`).
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch

from ..optim.sharded import ShardedOptimizer
from ..optim.step_outcome import load_scaler_state, scaler_state
from .named import without_tensor

logger = logging.getLogger("paceline")

NOT_RESTORED = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))
"""Entries of a parameter group that belong to the run at hand."""

_TOLD = {"initial_lr": "learning rate", "weight_decay": "weight decay"}
"""Names of options in messages; others have their own."""

_TOLD_WITHOUT_SCHEDULE = {"lr": "learning rate", "weight_decay": "weight decay"}
"""Likewise where no scheduler sets the rate after this."""

_MOMENTUM = frozenset(("momentum", "betas"))
"""Options that schedulers may set besides the rate."""

_RATES = ("lr", "initial_lr")

_RISING = frozenset(("max_lrs", "total_steps"))
"""Entries of the states of torch's CyclicLR and OneCycleLR."""


@dataclass(frozen=True)
class RankStates:
    """One entry of the states of all ranks that were saved.

    Args:
        entries: by rank; None where a rank had no such entry.
        rank: of the run that loads, if it has the shape of the one that was saved; None otherwise.
        replica: number of the rank that loads among those with the same parameters.
        num_replicas: in the run that was saved, where the ranks of a stage follow one another.
        has_groups: whether the optimizer's parameter groups are taken as well, with their learning rates.
    """

    entries: Sequence[Any]
    rank: int | None
    replica: int
    num_replicas: int
    has_groups: bool = True

    @property
    def own(self) -> Any | None:
        """Entry of this very rank; None in a run of another shape."""
        return None if self.rank is None else self.entries[self.rank]

    @property
    def first(self) -> Any | None:
        """Entry of rank 0."""
        return self.entries[0]

    @property
    def nearest_last(self) -> list[Any]:
        """Entries from which to take what this rank has now: its own, or those of all ranks, of its replica last."""
        if self.rank is not None:
            chosen = [self.entries[self.rank]]
        else:
            number = self.replica % self.num_replicas
            order = sorted(range(len(self.entries)), key=lambda rank: rank % self.num_replicas == number)
            chosen = [self.entries[rank] for rank in order]
        return [entry for entry in chosen if entry is not None]


class SavedPart(Protocol):
    """A part with a state of its own on each rank: tensors, numbers, strings, lists, dicts."""

    def state_dict(self) -> Any: ...

    def load_saved(self, saved: RankStates) -> None:
        """Take what fits of a run that was saved; all ranks call it, and it is not collective."""


class ParameterGroups:
    """Options of the optimizer's parameter groups (learning rates, weight decay), and its loss scale.

    Args:
        warns: whether this rank says when an option that was given makes way for the checkpoint's.
        is_scheduled: whether a scheduler sets the learning rate.
        cycles_momentum: whether it sets the momentum, too.
    """

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        *,
        warns: bool,
        is_scheduled: Callable[[], bool] = lambda: True,
        cycles_momentum: Callable[[], bool] = lambda: False,
    ) -> None:
        self._optimizer, self._warns, self._is_scheduled = optimizer, warns, is_scheduled
        self._cycles_momentum = cycles_momentum

    def state_dict(self) -> list[dict[str, Any]]:
        name_of = self._names()
        return [
            {
                "names": [name_of[id(master)] for master in group["params"]],
                "options": {k: v for k, v in group.items() if k not in NOT_RESTORED},
                "numbers": self._numbers(group["params"]),
            }
            for group in self._optimizer.param_groups
        ]

    def _numbers(self, masters: Sequence[torch.Tensor]) -> list[str]:
        """Kinds of states that are numbers of Python's or None; in files they are tensors."""
        states = (self._optimizer.state.get(master, {}) for master in masters)
        return sorted({kind for state in states for kind, value in state.items() if isinstance(value, Real | None)})

    def load_saved(self, saved: RankStates) -> None:
        options_of: dict[str, dict[str, Any]] = {}
        numbers: set[str] = set()
        for groups in saved.entries:
            for group in groups or ():
                options_of |= dict.fromkeys(group["names"], group["options"])
                numbers.update(group.get("numbers", ()))  # older checkpoints have none
        for state in self._optimizer.state.values():
            state.update(
                {kind: without_tensor(state[kind]) for kind in numbers & state.keys() if torch.is_tensor(state[kind])}
            )
        first, name_of = saved.first or [], self._names()
        changes: dict[tuple[str, str, str], None] = {}
        options_told = self._options_told()
        for index, group in enumerate(self._optimizer.param_groups):
            names = (name_of[id(master)] for master in group["params"])
            options = _common_options([options_of[name] for name in names if name in options_of])
            if not options and len(first) == len(self._optimizer.param_groups):
                options = first[index]["options"]  # none of the group's rows are here
            for key, told in options_told.items():
                given, saved_value = group.get(key), options.get(key)
                if given is not None and saved_value is not None and _shown(given) != _shown(saved_value):
                    changes[told, _shown(given), _shown(saved_value)] = None
            group.update(options)
        if self._warns:
            for change in changes:
                logger.warning("the %s %s gives way to the checkpoint's, %s", *change)

    def _options_told(self) -> dict[str, str]:
        """Options of which a change is told, and their names."""
        told = _TOLD if self._is_scheduled() else _TOLD_WITHOUT_SCHEDULE
        untold = NOT_RESTORED | {*_RATES, *(_MOMENTUM if self._cycles_momentum() else ())}
        return {key: key for key in self._optimizer.optimizer.defaults if key not in untold} | told

    def loss_scale(self) -> dict[str, Any]:
        """State of the loss scaler, the same on all ranks."""
        return scaler_state(self._optimizer.loss_scaler)

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Put :meth:`loss_scale` back."""
        load_scaler_state(self._optimizer.loss_scaler, state)

    def _names(self) -> dict[int, str]:
        return {id(owned.master): owned.name for owned in self._optimizer.owned}


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _common_options(saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Options of a group, from those that its parameters had: without the ones in which these differ, but for rates.

    They differ where other groups were saved: a run without weight decay has one group, and with it two.
    """
    first = saved[0] if saved else {}
    others = [options for options in saved if options is not first]
    return {
        key: value
        for key, value in first.items()
        if key in _RATES or all(options.get(key, value) == value for options in others)
    }


class SchedulerState:
    """State of the learning rate's scheduler, which keeps something for each parameter group of its rank.

    Its rates become those of the groups. These have the checkpoint's, or, where the optimizer begins anew, this run's
    own as far along the schedule. A scheduler of another kind than the one that was saved takes as many steps as that
    had taken, and the groups have its rates.

    Args:
        scheduler: returns it, or None where there is none.
        groups: returns the parameter groups of this rank.
        warns: whether this rank says so of another kind, or of a checkpoint without a scheduler.
    """

    def __init__(
        self, scheduler: Callable[[], Any], groups: Callable[[], list[dict[str, Any]]], *, warns: bool = False
    ) -> None:
        self._scheduler, self._groups, self._warns = scheduler, groups, warns

    def state_dict(self) -> dict[str, Any] | None:
        scheduler = self._scheduler()
        return None if scheduler is None else dict(scheduler.state_dict())

    def load_saved(self, saved: RankStates) -> None:
        scheduler = self._scheduler()
        state = saved.first if saved.rank is None else saved.own
        if scheduler is None:
            return
        groups, own = self._groups(), dict(scheduler.state_dict())
        if state is None or _kind(state) != _kind(own):
            num_steps = _num_steps(own if state is None else state)
            if num_steps is not None and _depends_on_steps(scheduler, own):
                if self._warns:
                    found = "no" if state is None else "another kind of"
                    rule = "learning-rate schedule: this run's goes on at step"
                    logger.warning("the checkpoint has %s %s %d", found, rule, num_steps)
                _catch_up(scheduler, state or {}, num_steps, groups)
                return
        if state is None:
            return
        scheduler.load_state_dict(_with_functions(state, len(groups)))
        if not saved.has_groups:
            _follow(scheduler, state, groups)
        _fit_groups(scheduler, groups)


class RandomStates:
    """States of the generators of Python, numpy and torch. In a run of another shape they start anew.

    Args:
        warns: whether this rank says so then.
    """

    def __init__(self, device: torch.device, *, warns: bool) -> None:
        self._device, self._warns = device, warns

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state()
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": [kind, [int(key) for key in keys], *rest],
            "torch": torch.get_rng_state(),
        }
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_saved(self, saved: RankStates) -> None:
        state = saved.own
        if state is None:
            if self._warns:
                logger.info("the checkpoint has another shape: random number generators (dropout) start anew")
            return
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)


def _with_functions(state: Mapping[str, Any], num_groups: int) -> dict[str, Any]:
    """A scheduler's state, with as many entries for functions of the step as there are groups."""
    fitted = dict(state)
    if "lr_lambdas" in state:
        fitted["lr_lambdas"] = [*state["lr_lambdas"], *[None] * num_groups][:num_groups]
    if "_schedulers" in state:
        fitted["_schedulers"] = [_with_functions(inner, num_groups) for inner in state["_schedulers"]]
    return fitted


def _kind(state: Mapping[str, Any]) -> tuple[set[str], list[Any]]:
    """Names in a scheduler's state, and in the states of those inside it: the same for schedulers of one class."""
    return {key for key in state if not key.startswith("_")}, [_kind(inner) for inner in state.get("_schedulers", ())]


def _num_steps(state: Mapping[str, Any]) -> int | None:
    """Steps that a scheduler has taken; None if its state does not tell."""
    if "last_batch_iteration" in state:
        return int(state["last_batch_iteration"]) + 1
    if "last_epoch" in state:
        return int(state["last_epoch"])
    return next((_num_steps(inner) for inner in state.get("_schedulers", ())), None)


def _depends_on_steps(scheduler: Any, state: Mapping[str, Any]) -> bool:
    """Whether the number of steps tells its rates, and it is of torch or DeepSpeed, whose way to go on is known."""
    is_of_torch = "_last_lr" in state and not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    return _num_steps(state) is not None and (is_of_torch or "last_batch_iteration" in state)


def _catch_up(scheduler: Any, state: Mapping[str, Any], num_steps: int, groups: list[dict[str, Any]]) -> None:
    """Have a scheduler that does not know ``state`` go on after ``num_steps`` steps.

    Raises:
        ValueError: it has gone farther.
    """
    own = scheduler.state_dict()
    if "last_batch_iteration" in own:
        scheduler.load_state_dict({"last_batch_iteration": num_steps - 1})
        for group, rate in zip(groups, scheduler.get_lr(), strict=False):
            group["lr"] = rate
        return
    missing = num_steps - (_num_steps(own) or 0)
    if missing < 0:
        raise ValueError(
            f"its learning-rate schedule is of another kind, at step {num_steps}, and this run's is past it, at step "
            f"{num_steps - missing}: load the checkpoint into a new engine."
        )
    # Schedules with a rate in the middle that they rise to begin at a rate that is not the optimizer's.
    rises = not _RISING.isdisjoint({*own, *state})
    for group, base, rate in zip(groups, _first_rates(own), own["_last_lr"], strict=False):
        if rises or not base:
            group["initial_lr"] = base
        group["lr"] = rate * (group["initial_lr"] / base if base else 1.0)
    _fit_groups(scheduler, groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: the optimizer takes no steps meanwhile
        for _ in range(missing):
            scheduler.step()


def _follow(scheduler: Any, state: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Give new parameter groups the rates that a scheduler which was loaded has reached.

    Schedulers of torch compute them from those that the groups begin with, or keep rates, which are scaled to these;
    DeepSpeed's compute them.
    """
    bases, reached = _first_rates(state), state.get("_last_lr")
    if hasattr(scheduler, "_get_closed_form_lr"):
        scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
        for group, rate in zip(groups, scheduler._get_closed_form_lr(), strict=True):
            group["lr"] = rate
    elif bases and reached:
        shares = [last / base if base else 1.0 for base, last in zip(bases, reached, strict=False)]
        for group, share in zip(groups, [*shares, *[shares[-1]] * len(groups)], strict=False):
            group["lr"] = group.get("initial_lr", group["lr"]) * share
    elif "last_batch_iteration" in state and state["last_batch_iteration"] >= 0:
        for group, rate in zip(groups, scheduler.get_lr(), strict=False):
            group["lr"] = rate


def _first_rates(state: Mapping[str, Any]) -> list[float]:
    """Rates that a scheduler of torch began with, or the first of those inside it."""
    if "base_lrs" in state:
        return list(state["base_lrs"])
    return next((found for inner in state.get("_schedulers", ()) if (found := _first_rates(inner))), [])


def _fit_groups(scheduler: Any, groups: list[dict[str, Any]]) -> None:
    """Have a scheduler of torch, and those inside it, keep what this rank's parameter groups say."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _fit_groups(inner, groups)
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = [group["lr"] for group in groups]
