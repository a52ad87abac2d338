"""Small SVG pictures for a page: lines over steps, timelines, heat maps. Colours are the page's, for light and dark.

Written by hand rather than drawn with matplotlib: a tenth of the bytes, and a page's own fonts and colours. The same
data give the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from statistics import mean, quantiles
from typing import TypeVar

from paceline.schedules.schedule import FORWARD
from paceline.schedules.timeline import Span, Timeline

from .comparison import is_compute, rank_times
from .expert_loads import Window
from .timeline_style import Style, style_of

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 62, 12, 24, 34
_MOST_POINTS = 600
_NUMBERED = 600
"""Boxes of a timeline up to which they have numbers."""
_COLUMNS = 90
_SHADES = 8

Point = tuple[float, float]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Series:
    """Points over steps.

    Args:
        parts: each is a line of its own.
        look: class of the page's style: ``"main"``, ``"warm"``, ``"faint"``, and with ``" dots"`` dots.
    """

    name: str
    parts: Sequence[Sequence[Point]]
    look: str = "main"

    @property
    def points(self) -> list[Point]:
        return [point for part in self.parts for point in part]


def chart(
    series: Sequence[Series],
    *,
    label: str,
    unit: str = "",
    zero: bool = True,
    marks: Iterable[float] = (),
    axis: str = "step",
    height: int = 250,
    span: Point | None = None,
) -> str:
    """Lines over the steps of a run.

    Args:
        label: what it shows, for those who do not see it.
        unit: of the upright axis.
        zero: whether that begins with zero.
        marks: steps at which an upright line stands.
        axis: what is counted from left to right.
        height: where the page is 720 wide.
        span: first and last step of the axis, so that charts below each other can share it; None: those of the points.
    """
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    low_x, high_x = span or (min(x for x, _ in points), max(x for x, _ in points))
    low_y, high_y = _range([y for _, y in points], zero)
    ticks_y, ticks_x = _ticks(low_y, high_y, 3 + height // 125), [x for x in _ticks(low_x, high_x, 8) if x == int(x)]
    low_y, high_y = min(low_y, ticks_y[0]), max(high_y, ticks_y[-1])

    def at(x: float, y: float) -> Point:
        share_x = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        share_y = (min(y, high_y) - low_y) / (high_y - low_y) if high_y > low_y else 0.5
        return LEFT + share_x * (WIDTH - LEFT - RIGHT), height - BOTTOM - share_y * (height - BOTTOM - TOP)

    out = [_open(height, label)]
    for tick in ticks_y:
        y = at(low_x, tick)[1]
        out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" class="end">{_number(tick)}</text>')
    for tick in ticks_x:
        x = at(tick, low_y)[0]
        out.append(f'<text x="{x:.1f}" y="{height - BOTTOM + 17}" class="middle">{_number(tick)}</text>')
    out.append(f'<text x="{WIDTH - RIGHT}" y="{height - 3}" class="end quiet">{escape(axis)}</text>')
    if unit:
        out.append(f'<text x="8" y="11" class="quiet">{escape(unit)}</text>')
    for mark in marks:
        if low_x <= mark <= high_x:
            out.append(f'<path class="mark" d="M{at(mark, low_y)[0]:.1f} {TOP}V{height - BOTTOM}"/>')
    for one in series:
        dots = "dots" in one.look.split()
        for part in one.parts:
            places = [at(x, y) for x, y in (_extremes(part) if dots else _thinned(part))]
            if dots or len(places) == 1:
                marks_ = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
                out.append(f'<path class="dots {one.look}" d="{marks_}"/>')
            elif places:
                line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
                out.append(f'<path class="line {one.look}" d="M{line}"/>')
    out.append("</svg>")
    named = [one for one in series if one.name]
    if len(named) > 1:
        keys = "".join(f'<span class="key {one.look}">{escape(one.name)}</span>' for one in named)
        out.append(f'<p class="legend">{keys}</p>')
    return "".join(out)


def timeline(step: Timeline, end_s: float, label: str) -> str:
    """One step, a row a rank; the right edge is ``end_s``, so that several can share it."""
    pitch = 22.0 if step.num_ranks <= 24 else max(3.0, 528 / step.num_ranks)
    height = step.num_ranks * pitch + 22
    right = 68
    per_s = (WIDTH - LEFT - right) / end_s
    out = [_open(height, label)]
    every = max(1, ceil(12 / pitch))
    times, whole_s = rank_times(step), step.end_s
    for rank in range(step.num_ranks):
        top = rank * pitch + 1
        out.append(f'<path class="row" d="M{LEFT} {top:.1f}h{whole_s * per_s:.1f}v{pitch - 2:.1f}H{LEFT}z"/>')
        if rank % every == 0:
            middle = top + pitch / 2 + 3
            idle = f"{times[rank].idle_s / whole_s:.0%} idle" if whole_s else ""
            out.append(f'<text x="{LEFT - 8}" y="{middle:.1f}" class="end">rank {rank}{_stages(step, rank)}</text>')
            out.append(f'<text x="{WIDTH - right + 6}" y="{middle:.1f}" class="quiet">{idle}</text>')
    by_style: dict[Style, list[Span]] = {}
    for span in step.spans:
        by_style.setdefault(style_of(span), []).append(span)
    for style in sorted(by_style, key=lambda style: style.group):
        boxes = "".join(
            f"M{LEFT + span.start_s * per_s:.1f} {span.rank * pitch + 1:.1f}"
            f"h{max((span.end_s - span.start_s) * per_s - 0.4, 0.3):.1f}v{pitch - 2:.1f}"
            f"H{LEFT + span.start_s * per_s:.1f}z"
            for span in by_style[style]
        )
        out.append(f'<path fill="{style.colour}" d="{boxes}"/>')
    if len(step.spans) <= _NUMBERED and pitch > 14:
        out += _numbers(step.spans, pitch, per_s)
    bottom = step.num_ranks * pitch + 14
    for tick in _ticks(0, end_s, 7):
        if tick <= end_s:
            text = _number(tick * 1e3) if end_s < 1 else _number(tick)
            out.append(f'<text x="{LEFT + tick * per_s:.1f}" y="{bottom:.1f}" class="middle">{text}</text>')
    out.append(f'<text x="{WIDTH - right + 6}" y="{bottom:.1f}" class="quiet">{"ms" if end_s < 1 else "s"}</text>')
    return "".join([*out, "</svg>"])


def _stages(step: Timeline, rank: int) -> str:
    """The stages of a rank that holds several, shown when somebody points at it."""
    held = step.stages[rank] if step.stages else ()
    return f"<title>stages {', '.join(map(str, held))}</title>" if len(held) > 1 else ""


def timeline_legend(steps: Iterable[Timeline]) -> str:
    """The legend of the boxes."""
    styles = {
        style_of(span): (not is_compute(span), span.chunk, span.kind != FORWARD) for s in steps for span in s.spans
    }
    keys = "".join(
        f'<span class="key"><i style="background:{style.colour}"></i>{escape(style.meaning)}</span>'
        for style in sorted(styles, key=lambda style: (styles[style], style.meaning))
    )
    return f'<p class="legend">{keys}<span class="key"><i class="row"></i>idle</span></p>'


def heat_map(windows: Sequence[Window], label: str) -> str:
    """An expert a row, a window a column; the darker, the larger the expert's share of the layer's tokens."""
    groups = _groups(windows, _COLUMNS)
    columns = [[mean(shares) for shares in zip(*(window.shares for window in group), strict=True)] for group in groups]
    most = max(max(column) for column in columns) or 1.0
    cell = (WIDTH - LEFT - RIGHT) / len(columns)
    pitch = min(14.0, max(2.0, 200 / len(columns[0])))
    height = pitch * len(columns[0]) + 20
    shades: list[list[str]] = [[] for _ in range(_SHADES)]
    for number, column in enumerate(columns):
        for expert, share in enumerate(column):
            shade = min(int(share / most * _SHADES), _SHADES - 1)
            x, y = LEFT + number * cell, expert * pitch
            shades[shade].append(f"M{x:.1f} {y:.1f}h{cell:.2f}v{pitch:.1f}H{x:.1f}z")
    out = [_open(height, label)]
    for shade, cells in enumerate(shades):
        if cells:
            opacity = 0.06 + 0.94 * shade / (_SHADES - 1)
            out.append(f'<path class="heat" fill-opacity="{opacity:.2f}" d="{"".join(cells)}"/>')
    for expert in (0, len(columns[0]) - 1):
        y = expert * pitch + pitch / 2 + 4
        out.append(f'<text x="{LEFT - 8}" y="{y:.1f}" class="end">{expert}</text>')
    for x, step, anchor in ((LEFT, windows[0].step, ""), (WIDTH - RIGHT, windows[-1].step, "end")):
        out.append(f'<text x="{x}" y="{height - 5:.1f}" class="{anchor}">step {step}</text>')
    return "".join([*out, "</svg>"])


def shares(parts: Sequence[tuple[str, float]]) -> str:
    """A bar of parts of a whole, 0 to 1 each, with a class of the page's style."""
    out, x = ['<svg class="bar" viewBox="0 0 200 10" preserveAspectRatio="none" aria-hidden="true">'], 0.0
    for look, share in parts:
        width = 200 * max(share, 0.0)
        out.append(f'<path class="{look}" d="M{x:.1f} 0h{width:.1f}v10H{x:.1f}z"/>')
        x += width
    return "".join([*out, "</svg>"])


def _open(height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'


def _numbers(spans: Iterable[Span], pitch: float, per_s: float) -> list[str]:
    found = []
    for span in spans:
        text, width = str(span.micro_batch), (span.end_s - span.start_s) * per_s
        if is_compute(span) and width >= 6.5 * len(text) + 3:
            x = LEFT + (span.start_s + span.end_s) / 2 * per_s
            look = "on-light" if span.kind == FORWARD else "on-dark"
            found.append(
                f'<text x="{x:.1f}" y="{span.rank * pitch + pitch / 2 + 4:.1f}" class="middle {look}">{text}</text>'
            )
    return found


def _range(values: Sequence[float], zero: bool) -> Point:
    """The range of the axis: a few values far above all others are drawn at its end."""
    low, high = min(values), max(values)
    if zero and len(values) >= 20:
        usual = quantiles(values, n=20, method="inclusive")[-1]
        if usual > 0 and high > 2.5 * usual:
            high = 1.5 * usual
    if zero:
        low = min(low, 0.0)
    if high <= low:
        high = low + (abs(low) or 1.0)
    return low, high


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers around what is from ``low`` to ``high``."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    base = 10.0 ** floor(log10(rough))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough * 0.999)
    return [number * step for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)] or [low]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Means of neighbours, at most :data:`_MOST_POINTS`."""
    return [(mean(x for x, _ in group), mean(y for _, y in group)) for group in _groups(points, _MOST_POINTS)]


def _extremes(points: Sequence[Point]) -> list[Point]:
    """The lowest and the highest of neighbours."""
    if len(points) <= 2 * _MOST_POINTS:
        return list(points)
    found = []
    for group in _groups(points, _MOST_POINTS):
        found += [min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])]
    return found


def _groups(values: Sequence[_T], most: int) -> list[Sequence[_T]]:
    """Neighbours together, so that there are at most so many groups."""
    size = ceil(len(values) / most)
    return [values[start : start + size] for start in range(0, len(values), size)]
