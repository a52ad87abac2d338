"""Expert loads that a run writes, a line of JSON a window: read, and summarized by layer.

The lines are those of :class:`~paceline.moe.rebalancer.Rebalancer`. Copies of an expert are taken to share its tokens
evenly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.json_values import read_text
from paceline.messages import reason
from paceline.planning.experts import Placement, checked_loads, imbalance, moved

_KEYS = ("step", "steps", "layers")
_LAYER_KEYS = ("name", "loads", "placement")
_MOST_STEPS = 2**53
"""Largest step number; beyond, neighbouring numbers cannot be told apart in a picture."""


@dataclass(frozen=True)
class Window:
    """Loads of one layer over one rebalancing interval.

    Args:
        step: the last of the window.
        steps: that the window has.
        loads: of each expert, tokens a step.
        placement: under which they were computed.
    """

    step: int
    steps: int
    loads: tuple[float, ...]
    placement: Placement

    @cached_property
    def imbalance(self) -> float:
        """The load of the most loaded device over the mean."""
        return imbalance(self.placement, self.loads)

    @property
    def shares(self) -> list[float]:
        """Each expert's share of the layer's tokens; zeros if there were none."""
        total = sum(self.loads)
        return [load / total if total else 0.0 for load in self.loads]


Windows = Mapping[str, Sequence[Window]]
"""Windows of each layer by its name, in order of steps."""


@dataclass(frozen=True)
class LayerSummary:
    """Balance of a layer's experts over the devices.

    Args:
        name: of the layer.
        windows: how many there are.
        first, last: imbalance of the first window and of the last one.
        mean: imbalance of a step on average.
        unmoved: the same, had the first window's placement stayed.
        moves: how often the placement changed.
        moved: experts that came to a device, all moves together.
    """

    name: str
    windows: int
    first: float
    last: float
    mean: float
    unmoved: float
    moves: int
    moved: int


def read(paths: Iterable[str | os.PathLike[str]]) -> dict[str, list[Window]]:
    """The windows of all layers that the files name.

    Files may be of several pipeline stages, or of several parts of a run. Where a file goes back to an earlier step, as
    after a restart from a checkpoint, what it said of that step and those after it is dropped.

    Raises:
        ValueError: a file cannot be read or has no lines; a line, by number, is no window, or does not fit those before
            it; two files have the same layer at the same step.
    """
    found: dict[str, dict[int, Window]] = {}
    source: dict[tuple[str, int], Path] = {}
    for path in map(Path, paths):
        for name, windows in _read_file(path).items():
            known = found.setdefault(name, {})
            for window in windows:
                if (other := source.setdefault((name, window.step), path)) is not path:
                    raise ValueError(f"{path} and {other} both have layer {name} at step {window.step}: give one.")
                _check_same_shape(next(iter(known.values()), window), window, name, str(path))
                known[window.step] = window
    return {name: [known[step] for step in sorted(known)] for name, known in found.items()}


def changes(windows: Sequence[Window]) -> list[int]:
    """Positions of the windows whose placement is another one than that of the window before."""
    return [
        position
        for position in range(1, len(windows))
        if windows[position].placement.devices != windows[position - 1].placement.devices
    ]


def unmoved_imbalance(windows: Sequence[Window]) -> list[float]:
    """The imbalance of each window under the placement of the first one."""
    return [imbalance(windows[0].placement, window.loads) for window in windows]


def summarize(layers: Windows) -> list[LayerSummary]:
    """One summary a layer, in the order of ``layers``."""
    return [_summary(name, windows) for name, windows in layers.items()]


def _summary(name: str, windows: Sequence[Window]) -> LayerSummary:
    changed = changes(windows)
    return LayerSummary(
        name=name,
        windows=len(windows),
        first=windows[0].imbalance,
        last=windows[-1].imbalance,
        mean=_mean([window.imbalance for window in windows], windows),
        unmoved=_mean(unmoved_imbalance(windows), windows),
        moves=len(changed),
        moved=sum(moved(windows[at - 1].placement, windows[at].placement) for at in changed),
    )


def _mean(values: Sequence[float], windows: Sequence[Window]) -> float:
    """Over steps."""
    steps = sum(window.steps for window in windows)
    return sum(value * (window.steps / steps) for value, window in zip(values, windows, strict=True))


def _read_file(path: Path) -> dict[str, list[Window]]:
    lines = read_text(path, "give a file of expert loads that a run has written").split("\n")
    if lines[-1] == "" or _is_cut_off(lines[-1]):
        lines.pop()
    if not lines:
        raise ValueError(f"{path} is empty: a run writes its first line at the first look for better placements.")
    found: dict[str, list[Window]] = {}
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            windows = _windows(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{where} is no window of expert loads ({reason(error)}): remove it.") from None
        for name, window in windows.items():
            known = found.setdefault(name, [])
            while known and known[-1].step >= window.step:
                known.pop()
            if known:
                _check_same_shape(known[-1], window, name, where)
            known.append(window)
    return found


def _is_cut_off(last: str) -> bool:
    """Whether the last line was cut off, as by a kill."""
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return True
    return False


def _windows(values: Any) -> dict[str, Window]:
    _check_keys(values, _KEYS, "a window")
    step, steps = (_positive(values[key], key) for key in ("step", "steps"))
    if not isinstance(values["layers"], list) or not values["layers"]:
        raise ValueError("layers is no list of at least one layer")
    found: dict[str, Window] = {}
    for layer in values["layers"]:
        _check_keys(layer, _LAYER_KEYS, "a layer")
        name = layer["name"]
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ValueError(f"name is {name!r}, not that of a layer")
        if name in found:
            raise ValueError(f"layer {name} is there twice")
        placement = Placement(tuple(map(tuple, _lists(layer["placement"]))))
        loads = _numbers(layer["loads"])
        found[name] = Window(step, steps, tuple(checked_loads(loads, placement.num_experts)), placement)
    return found


def _check_keys(values: Any, keys: Sequence[str], what: str) -> None:
    if not isinstance(values, dict) or sorted(values) != sorted(keys):
        raise ValueError(f"{what} is an object with exactly {', '.join(keys)}")


def _positive(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_STEPS:
        raise ValueError(f"{what} is {json.dumps(value)[:40]}, not a whole number of at least 1")
    return value


def _lists(value: Any) -> list[list[Any]]:
    if not isinstance(value, list) or not all(isinstance(experts, list) for experts in value):
        raise ValueError("placement is no list of the experts on each device")
    return value


def _numbers(value: Any) -> list[float]:
    if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in value):
        raise ValueError("loads is no list of a number for each expert")
    return value


def _check_same_shape(before: Window, window: Window, name: str, where: str) -> None:
    shape, now = ((w.placement.num_experts, w.placement.num_devices) for w in (before, window))
    if shape != now:
        raise ValueError(
            f"{where}: layer {name} has {now[0]} experts on {now[1]} devices, and {shape[0]} on {shape[1]} at step "
            f"{before.step}: give files of one run with one expert-parallel size."
        )
