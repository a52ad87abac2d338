"""Pictures of expert loads over time: of each layer a heat map, and below it how uneven the devices were."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from . import drawing
from .drawing import FAINT, MAIN, QUIET, WARM
from .expert_loads import Window, Windows, changes, unmoved_imbalance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMN, _MIN_WIDTH, _MAX_WIDTH = 0.09, 8.0, 20.0  # inches
_ROW, _MIN_MAP, _MAX_MAP, _LINES = 0.055, 0.9, 4.0, 0.8
_TITLE, _AXIS, _GAP, _LEGEND = 0.36, 0.5, 0.08, 0.62
_LEFT, _RIGHT = 0.75, 0.35


def draw(layers: Windows, path: str | os.PathLike[str]) -> None:
    """Draw the windows of ``layers``, one below the other. The same windows give the same file.

    Of each layer, rows are experts, columns are windows, and the stronger the colour, the larger the expert's share of
    the layer's tokens. The line below is the load of the most loaded device over the mean, the grey one the same if
    experts had stayed where they were at first; an upright line is where experts moved.

    Args:
        path: a ``.png`` or ``.svg`` file.

    Raises:
        ValueError: another suffix, or nothing to draw.
    """
    if not layers:
        raise ValueError("there is nothing to draw: give layers with at least one window.")
    drawing.save(lambda: _figure(layers), path)


def inline(layers: Windows, label: str) -> str:
    """The same for a page."""
    return drawing.inline(lambda: _figure(layers), label)


def _figure(layers: Windows) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    width = min(max(max(map(len, layers.values())) * _COLUMN, _MIN_WIDTH), _MAX_WIDTH)
    maps = [min(max(len(windows[0].loads) * _ROW, _MIN_MAP), _MAX_MAP) for windows in layers.values()]
    size = (_LEFT + width + _RIGHT, sum(_TITLE + height + _GAP + _LINES + _AXIS for height in maps) + _LEGEND)
    most = max(max(window.shares) for windows in layers.values() for window in windows) or 1.0
    # From nothing to a full colour, so that light and dark paper can be below it.
    colours = LinearSegmentedColormap.from_list("share", [(0.24, 0.52, 0.78, 0.04), (0.24, 0.52, 0.78, 1.0)])
    figure = Figure(figsize=size)
    top = size[1]

    def panel(height: float, name: str, label: str) -> Axes:
        axes = figure.add_axes((_LEFT / size[0], top / size[1], width / size[0], height / size[1]), gid=name)
        axes.set_ylabel(label, fontsize=8)
        axes.tick_params(labelsize=8, length=3)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True) if label == "expert" else MaxNLocator(3))
        return axes

    for number, ((name, windows), height) in enumerate(zip(layers.items(), maps, strict=True), 1):
        top -= _TITLE + height
        above = panel(height, f"experts-{number}", "expert")
        rows = list(zip(*(window.shares for window in windows), strict=True))
        # One pixel a cell: thousands of boxes would be a large file. Expert 0 is at the top.
        extent = (-0.5, len(windows) - 0.5, len(rows) - 0.5, -0.5)
        image = above.imshow(
            rows, aspect="auto", interpolation="none", cmap=colours, vmin=0.0, vmax=most, extent=extent
        )
        from_to = f"max / mean device load {windows[0].imbalance:.2f} at first, {windows[-1].imbalance:.2f} at last"
        above.set_title(f"{name}: {from_to}", loc="left", fontsize=9, pad=5)
        above.tick_params(axis="x", labelbottom=False)
        top -= _GAP + _LINES
        below = panel(_LINES, f"devices-{number}", "max / mean")
        looks: dict[str, Any] = {"linewidth": 1.4, "marker": "o" if len(windows) == 1 else None}
        below.plot(unmoved_imbalance(windows), color=FAINT, gid=f"devices-{number}-unmoved", **looks)
        below.plot([w.imbalance for w in windows], color=MAIN, gid=f"devices-{number}-imbalance", **looks)
        below.set_xlim(-0.5, len(windows) - 0.5)
        below.set_ylim(1.0, max(1.1, below.get_ylim()[1]))
        below.set_xlabel("last step of the window", fontsize=8, labelpad=2, color=QUIET)
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.xaxis.set_major_formatter(partial(_step_at, windows))
        for axes in (above, below):
            for position in changes(windows):
                axes.axvline(position - 0.5, color=WARM, lw=0.9, ls=":", gid=f"{axes.get_gid()}-moved-{position}")
        top -= _AXIS
    lines = (("as it was", MAIN, "-"), ("if experts had stayed", FAINT, "-"), ("experts moved", WARM, ":"))
    figure.legend(
        handles=[below.plot([], [], color=colour, linestyle=dash, label=name)[0] for name, colour, dash in lines],
        loc="lower left",
        bbox_to_anchor=(_LEFT / size[0], 0.12 / size[1]),
        ncols=3,
        fontsize=8,
        borderpad=0.2,
    )
    bar = figure.add_axes(((size[0] - _RIGHT - 1.8) / size[0], 0.34 / size[1], 1.8 / size[0], 0.1 / size[1]))
    figure.colorbar(image, cax=bar, orientation="horizontal", format=PercentFormatter(1.0, decimals=None))
    bar.xaxis.set_major_locator(MaxNLocator(3))
    bar.tick_params(labelsize=8, length=2)
    bar.set_ylabel("share of tokens", fontsize=8, rotation=0, ha="right", va="center")
    return figure


def _step_at(windows: Sequence[Window], place: float, _: int | None) -> str:
    inside = place == int(place) and 0 <= place < len(windows)
    return str(windows[int(place)].step) if inside else ""
