"""Pictures of expert loads over time: of each layer a heat map, and below it how uneven the devices were."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .expert_loads import Window, Windows, changes, unmoved_imbalance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Inches, unless they end in _pt.
_LEFT, _RIGHT, _TITLE, _AXIS, _GAP, _LEGEND = 0.75, 0.35, 0.36, 0.46, 0.08, 0.62
_COLUMN, _MIN_WIDTH, _MAX_WIDTH = 0.09, 7.0, 20.0
_ROW, _MIN_MAP, _MAX_MAP, _LINES = 0.055, 0.7, 4.0, 0.8
_FONT_PT, _TITLE_PT = 8.0, 10.0

_COLOURS = "YlGnBu"  # light is little, also in grey
_LINE, _UNMOVED, _MOVED = "#225f9c", "#999999", "#c4500f"


def draw(layers: Windows, path: str | os.PathLike[str]) -> None:
    """Draw the windows of ``layers``, one below the other. The same windows give the same file.

    Of each layer, rows are experts, columns are windows, and the colour is the expert's share of the layer's tokens.
    The line below is the load of the most loaded device over the mean, the grey one the same if experts had stayed
    where they were at first; an upright line is where experts moved.

    Args:
        path: a ``.svg`` file, which needs nothing beside it.

    Raises:
        ValueError: another suffix, or nothing to draw.
    """
    if Path(path).suffix.lower() != ".svg":
        raise ValueError(f"{path}: the picture is an .svg file; choose this suffix.")
    if not layers:
        raise ValueError("there is nothing to draw: give layers with at least one window.")
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's settings would change what fits
        matplotlib.rcParams.update({"svg.hashsalt": "paceline", "svg.fonttype": "none"})
        metadata: dict[str, Any] = {"Date": None, "Creator": None}
        _figure(layers).savefig(path, format="svg", metadata=metadata)


def _figure(layers: Windows) -> Figure:
    from matplotlib.figure import Figure

    columns = max(map(len, layers.values()))
    width = min(max(columns * _COLUMN, _MIN_WIDTH), _MAX_WIDTH)
    maps = [min(max(len(windows[0].loads) * _ROW, _MIN_MAP), _MAX_MAP) for windows in layers.values()]
    size = (_LEFT + width + _RIGHT, sum(_TITLE + height + _GAP + _LINES + _AXIS for height in maps) + _LEGEND)
    most = max(max(window.shares) for windows in layers.values() for window in windows) or 1.0
    figure = Figure(figsize=size)
    top = size[1]

    def axes(height: float, group: str) -> Axes:
        place = (_LEFT / size[0], top / size[1], width / size[0], height / size[1])
        return figure.add_axes(place, gid=group)

    for number, ((name, windows), height) in enumerate(zip(layers.items(), maps, strict=True), 1):
        top -= _TITLE + height
        image = _heat_map(axes(height, f"experts-{number}"), name, windows, most)
        top -= _GAP + _LINES
        _imbalance(axes(_LINES, f"devices-{number}"), windows)
        top -= _AXIS
    _legend(figure, image)
    return figure


def _heat_map(axes: Axes, name: str, windows: Sequence[Window], most: float) -> AxesImage:
    from matplotlib.ticker import MaxNLocator

    rows = list(zip(*(window.shares for window in windows), strict=True))
    # One pixel a cell: thousands of boxes would be a large file.
    image = axes.imshow(
        rows, aspect="auto", interpolation="none", cmap=_COLOURS, vmin=0.0, vmax=most, extent=_extent(rows)
    )
    from_to = f"max / mean device load {windows[0].imbalance:.2f} at first, {windows[-1].imbalance:.2f} at last"
    axes.set_title(f"{name}: {from_to}", loc="left", fontsize=_TITLE_PT, pad=5)
    axes.set_ylabel("expert", fontsize=_FONT_PT)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(axis="both", labelsize=_FONT_PT, length=3, labelbottom=False)
    _moments(axes, windows)
    return image


def _extent(rows: Sequence[Sequence[float]]) -> tuple[float, float, float, float]:
    """Cells have their number in their middle, and expert 0 is at the top."""
    return (-0.5, len(rows[0]) - 0.5, len(rows) - 0.5, -0.5)


def _imbalance(axes: Axes, windows: Sequence[Window]) -> None:
    from matplotlib.ticker import MaxNLocator

    places = range(len(windows))
    for values, colour, group in (
        (unmoved_imbalance(windows), _UNMOVED, "unmoved"),
        ([window.imbalance for window in windows], _LINE, "imbalance"),
    ):
        axes.plot(
            places,
            values,
            color=colour,
            linewidth=1.2,
            marker="o" if len(windows) == 1 else None,
            gid=f"{axes.get_gid()}-{group}",
        )
    _moments(axes, windows)
    axes.set_xlim(-0.5, len(windows) - 0.5)
    axes.set_ylim(bottom=1.0)
    if axes.get_ylim()[1] < 1.1:
        axes.set_ylim(top=1.1)
    axes.set_ylabel("max / mean", fontsize=_FONT_PT)
    axes.set_xlabel("last step of the window", fontsize=_FONT_PT, labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(lambda place, _: _step_at(windows, place))
    axes.tick_params(axis="both", labelsize=_FONT_PT, length=3)
    axes.spines[["top", "right"]].set_visible(False)


def _step_at(windows: Sequence[Window], place: float) -> str:
    inside = place == int(place) and 0 <= place < len(windows)
    return str(windows[int(place)].step) if inside else ""


def _moments(axes: Axes, windows: Sequence[Window]) -> None:
    """Mark moves, between the windows before and after each."""
    for position in changes(windows):
        axes.axvline(
            position - 0.5, color=_MOVED, linewidth=0.8, linestyle=":", gid=f"{axes.get_gid()}-moved-{position}"
        )


def _legend(figure: Figure, image: AxesImage) -> None:
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches()
    figure.legend(
        handles=[
            Line2D([], [], color=_LINE, label="as it was"),
            Line2D([], [], color=_UNMOVED, label="if experts had stayed"),
            Line2D([], [], color=_MOVED, linestyle=":", label="experts moved"),
        ],
        loc="lower left",
        bbox_to_anchor=(_LEFT / width, 0.12 / height),
        ncols=3,
        fontsize=_FONT_PT,
        frameon=False,
        borderpad=0.2,
    )
    bar = figure.add_axes(((width - _RIGHT - 1.8) / width, 0.34 / height, 1.8 / width, 0.1 / height), gid="scale")
    figure.colorbar(image, cax=bar, orientation="horizontal")
    bar.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
    bar.tick_params(labelsize=_FONT_PT, length=2)
    bar.set_ylabel("share of tokens", fontsize=_FONT_PT, rotation=0, ha="right", va="center")
