"""Lines over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from . import drawing
from .drawing import FAINT, INK, MAIN, QUIET, WARM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = (4.9, 2.45)  # inches: a picture is as wide as a phone, and three are as wide as a desk's screen
_LOOKS: dict[str, dict[str, Any]] = {
    "main": {"color": MAIN, "linewidth": 1.6},
    "warm": {"color": WARM, "linewidth": 1.6, "linestyle": (0, (4, 2))},
    "faint": {"color": FAINT, "linewidth": 1.6},
    # As an image: a long run has a million of them.
    "dots": {"color": FAINT, "linestyle": "none", "marker": "o", "markersize": 2.2, "rasterized": True},
}

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points over steps.

    Args:
        parts: each is a line of its own.
        look: ``"main"``, ``"warm"``, ``"faint"`` or ``"dots"``.
    """

    name: str
    parts: Sequence[Sequence[Point]]
    look: str = "main"


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    unit: str,
    zero: bool = True,
    marks: Iterable[float] = (),
    axis: str = "step",
    span: Point | None = None,
) -> str:
    """Draw lines over the steps of a run, for a page; empty if there are no points.

    Args:
        label: what it shows, for those who do not see it.
        unit: of the upright axis.
        zero: whether that begins with zero.
        marks: steps at which an upright line stands.
        axis: what is counted from left to right.
        span: first and last step of the axis, so that charts can share it; None: those of the points.
    """
    if not any(part for one in series for part in one.parts):
        return ""
    return drawing.inline(lambda: _figure(series, unit, zero, tuple(marks), axis, span), label)


def _figure(
    series: Sequence[Series], unit: str, zero: bool, marks: Sequence[float], axis: str, span: Point | None
) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=_SIZE)
    axes = figure.add_axes((0.115, 0.15, 0.865, 0.66))
    points = [point for one in series for part in one.parts for point in part]
    top = _top([y for _, y in points]) if zero else None
    for number, one in enumerate(series):
        drawn = [point for part in one.parts for point in (*part, (nan, nan))]
        xs, ys = [x for x, _ in drawn], [y if top is None else min(y, top) for _, y in drawn]
        alone = {"marker": "o", "markersize": 3} if max(map(len, one.parts)) == 1 else {}
        axes.plot(xs, ys, label=one.name, gid=f"series-{number}", **{**_LOOKS[one.look], **alone})
    low_x, high_x = span or (min(x for x, _ in points), max(x for x, _ in points))
    axes.set_xlim(low_x, high_x if high_x > low_x else low_x + 1)
    if top is not None:
        axes.set_ylim(min(0.0, *(y for _, y in points)), top * 1.04 or 1.0)
    upright = [(x, y) for mark in marks for x, y in ((mark, 0), (mark, 1), (nan, nan))]
    if upright:
        axes.plot(*zip(*upright, strict=True), color=WARM, lw=0.8, ls=":", transform=axes.get_xaxis_transform())
    axes.grid(axis="y", linewidth=0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    low_y, high_y = axes.get_ylim()
    if max(abs(low_y), abs(high_y)) >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.get_offset_text().set_color(QUIET)
    axes.set_xlabel(axis, loc="right", color=QUIET, labelpad=1)
    figure.text(0.008, 0.97, unit, color=QUIET, va="top")
    if sum(bool(one.name) for one in series) > 1:
        figure.legend(
            loc="upper right", ncols=3, labelcolor=INK, bbox_to_anchor=(1.0, 1.02), handlelength=1.6, columnspacing=1.2
        )
    return figure


def _top(values: Sequence[float]) -> float:
    """The end of the upright axis: a few values far above all others are drawn at it."""
    high = max(values)
    usual = quantiles(values, n=20, method="inclusive")[-1] if len(values) >= 20 else high
    return 1.5 * usual if 0 < 2.5 * usual < high else high
