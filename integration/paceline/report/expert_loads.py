"""Expert loads that a run writes, a line of JSON a window: read, and summarized by layer.

The lines are those of :class:`~paceline.moe.rebalancer.Rebalancer`. Copies of an expert are taken to share its tokens
evenly.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from pathlib import Path
from typing import Any

from paceline.json_values import as_whole
from paceline.planning.experts import Placement, checked_loads, imbalance, moved

from .metrics import read_lines

logger = logging.getLogger("paceline")


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
    """The windows of all layers that the files name, in the model's order.

    Files may be of several pipeline stages, or of several parts of a run. Where a file goes back to an earlier step, as
    after a restart from a checkpoint, what it said of that step and those after it is dropped. Where it goes on with
    another number of devices, as after a restart with another expert-parallel size, what came before is dropped, and a
    warning says so.

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
                first = next(iter(known.values()), window)
                shape, now = ((w.placement.num_experts, w.placement.num_devices) for w in (first, window))
                if shape != now:
                    raise ValueError(
                        f"{path}: layer {name} has {now[0]} experts on {now[1]} devices at step {window.step}, and "
                        f"{shape[0]} on {shape[1]} at step {first.step}: give files of one run with one "
                        "expert-parallel size."
                    )
                known[window.step] = window
    names = sorted(found, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return {name: [found[name][step] for step in sorted(found[name])] for name in names}


def latest(path: str | os.PathLike[str]) -> list[list[float]]:
    """Loads ``[layer][expert]`` of each layer's last window, layers in the model's order.

    Raises:
        ValueError: as :func:`read`.
    """
    return [list(windows[-1].loads) for windows in read([path]).values()]


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
    found = []
    for name, windows in layers.items():
        steps = sum(window.steps for window in windows)
        weights = [window.steps / steps for window in windows]
        changed = changes(windows)
        found.append(
            LayerSummary(
                name=name,
                windows=len(windows),
                first=windows[0].imbalance,
                last=windows[-1].imbalance,
                mean=sum(map(mul, (window.imbalance for window in windows), weights)),
                unmoved=sum(map(mul, unmoved_imbalance(windows), weights)),
                moves=len(changed),
                moved=sum(moved(windows[at - 1].placement, windows[at].placement) for at in changed),
            )
        )
    return found


def _read_file(path: Path) -> dict[str, list[Window]]:
    lines = read_lines(path, "give a file of expert loads that a run has written", "no window of expert loads", _layers)
    if not lines:
        raise ValueError(f"{path} is empty: a run writes its first line at the first look for better placements.")
    found: dict[str, list[Window]] = {}
    dropped: dict[int, str] = {}
    for layers in lines:
        for name, window in layers.items():
            known = found.setdefault(name, [])
            while known and known[-1].step >= window.step:
                known.pop()
            if known and known[-1].placement.num_devices != (now := window.placement.num_devices):
                before = known[-1]
                dropped[before.step] = f"experts on {before.placement.num_devices} devices, and then on {now}"
                known.clear()
            known.append(window)
    for step, why in dropped.items():
        logger.warning("%s has %s: what it says of the steps to %d is left out", path, why, step)
    return found


def _layers(values: Mapping[str, Any]) -> dict[str, Window]:
    """The layers of one line."""
    if isinstance(values, list):
        raise ValueError("it is a list")
    step, steps = (as_whole(key, values[key]) for key in ("step", "steps"))
    if step < 1 or steps < 1:
        raise ValueError(f"it has {steps} steps, the last is {step}: both are at least 1")
    found = {}
    for layer in values["layers"]:
        placement = Placement(tuple(map(tuple, layer["placement"])), tuple(layer.get("owned", ())))
        loads = checked_loads(layer["loads"], placement.num_experts)
        found[str(layer["name"])] = Window(step, steps, tuple(loads), placement)
    return found
