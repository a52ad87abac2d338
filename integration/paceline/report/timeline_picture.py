"""Pictures of steps: one panel a timeline, one row a rank, all on one time axis."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from paceline.schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from paceline.schedules.timeline import Span, Timeline, Transfer

from . import drawing
from .comparison import bubble_share, format_duration, is_compute, rank_times, time_unit
from .drawing import QUIET, RULE, SHADE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Forwards are light and backwards dark, also in grey; the hue tells the chunk. What is left of a split backward for
# later, the gradients of the weights, is darker still.
_BACKWARD = ("#2a6cae", "#a3500a", "#2a7030", "#6f3a8c")
_COMPUTE = {
    FORWARD: (("#aed4f5", "#fbd29b", "#bfe3b4", "#e2c6ee"), "forward"),
    BACKWARD: (_BACKWARD, "backward"),
    BACKWARD_INPUT: (_BACKWARD, "backward of inputs"),
    RECOMPUTE: (("#6ba3d6", "#d68f45", "#76a873", "#aa80bd"), "forward again"),
    BACKWARD_WEIGHT: (("#123a63", "#5a2c05", "#163d1a", "#3e204f"), "backward of weights"),
}
_OTHER = {"reduce": "#bdbdbd", "step": "#8a8a8a"}
_UNKNOWN = "#d6d6d6"
_TRANSFERS: dict[str, tuple[str, Literal["-", "--"]]] = {"activation": ("#4a90c8", "-"), "gradient": ("#c4510f", "--")}

# Inches, unless they end in _pt.
_LEFT, _RIGHT, _TITLE, _AXIS = 0.75, 0.85, 0.36, 0.42
_ENTRY, _LEGEND_ROW = 1.5, 0.22
_MIN_WIDTH, MAX_WIDTH = 9.0, 24.0
_MAX_PITCH, _MIN_PITCH, _PANEL = 0.52, 0.012, 9.0
_TWO_LINES = 0.3
_FONT_PT, _MIN_FONT_PT = 8.0, 5.0
_AIR_PT = 2.5
_DIGIT = 0.64  # width of a digit in font sizes


class Style(NamedTuple):
    """The looks of a kind of box; ``group`` names its boxes in an SVG."""

    colour: str
    meaning: str
    group: str


def style_of(span: Span) -> Style:
    if not is_compute(span):
        return Style(_OTHER.get(span.kind, _UNKNOWN), span.kind, span.kind)
    colours, word = _COMPUTE[span.kind]
    chunk = f", chunk {span.chunk}" if span.chunk else ""
    return Style(colours[span.chunk % len(colours)], word + chunk, f"{word.replace(' ', '-')}-{span.chunk}")


@dataclass(frozen=True)
class _Layout:
    """Sizes that all panels share. Inches."""

    width: float  # of a panel
    pitch: float  # from a rank's row to the next
    end_s: float  # right end of the time axis
    box: float  # height of a box as a share of the pitch: what is left is for the messages between rows
    titles_have_times: bool = True

    def row(self, rank: int) -> tuple[float, float]:
        """Top and bottom of the boxes of a rank, in rows."""
        return rank + 0.08, rank + 0.08 + self.box

    def centre(self, rank: int) -> float:
        return sum(self.row(rank)) / 2

    @property
    def has_room_for_messages(self) -> bool:
        return self.box < 0.8

    def width_pt(self, seconds: float) -> float:
        return 72 * self.width * seconds / self.end_s


def draw(timelines: Sequence[Timeline], path: str | os.PathLike[str], *, transfers: bool = True) -> None:
    """Draw ``timelines`` below each other, such as a step as predicted and as measured.

    Boxes are forwards (light) and backwards (dark) with their micro-batch where the number fits, grey is what else ran,
    the row's own shade is idle time, lines between rows are messages. The number at the right of a row is its idle
    share; below a rank that holds several stages stand their numbers, by chunk. The same timelines give the same file.

    Args:
        path: a ``.png`` or ``.svg`` file.
        transfers: whether to draw messages; never with so many ranks that nothing fits between the rows.

    Raises:
        ValueError: another suffix, or nothing to draw.
    """
    if not timelines or not all(timeline.end_s > 0 for timeline in timelines):
        raise ValueError("there is nothing to draw: give timelines with at least one span that takes time.")
    drawing.save(lambda: _figure(timelines, _layout(timelines, transfers, MAX_WIDTH)), path)


def inline(timelines: Sequence[Timeline], label: str, width: float) -> str:
    """The same for a page, at most ``width`` inches wide, without messages, and without times that a caption has."""
    layout = replace(_layout(timelines, False, width), titles_have_times=False)
    return drawing.inline(lambda: _figure(timelines, layout), label)


def _layout(timelines: Sequence[Timeline], transfers: bool, widest: float) -> _Layout:
    end_s = max(timeline.end_s for timeline in timelines)
    # Wide enough for the numbers in forwards, the narrower boxes, within bounds.
    width = 0.0
    for timeline in timelines:
        boxes = [span for span in timeline.spans if span.kind == FORWARD and span.end_s > span.start_s]
        if boxes:
            typical_s = median(span.end_s - span.start_s for span in boxes)
            digits = max(len(_number(span)) for span in boxes)
            width = max(width, _text_pt(digits, _FONT_PT) / 72 * end_s / typical_s)
    width = min(max(width + _LEFT + _RIGHT, _MIN_WIDTH), widest) - _LEFT - _RIGHT
    pitch = min(_MAX_PITCH, max(_MIN_PITCH, _PANEL / max(timeline.num_ranks for timeline in timelines)))
    between = transfers and pitch > 0.25 and any(timeline.transfers for timeline in timelines)
    return _Layout(width, pitch if between else min(pitch, 0.34), end_s, box=0.6 if between else 0.84)


def _figure(timelines: Sequence[Timeline], layout: _Layout) -> Figure:
    from matplotlib.figure import Figure

    handles = list(_legend(timelines, layout.has_room_for_messages))
    columns = max(1, min(len(handles), int(layout.width / _ENTRY)))
    heights = [timeline.num_ranks * layout.pitch for timeline in timelines]
    below = 0.12 + _LEGEND_ROW * -(-len(handles) // columns)
    size = (_LEFT + layout.width + _RIGHT, sum(heights) + len(heights) * (_TITLE + _AXIS) + below)
    figure = Figure(figsize=size)
    top = size[1]
    for number, (timeline, height) in enumerate(zip(timelines, heights, strict=True), 1):
        top -= _TITLE + height
        place = (_LEFT / size[0], top / size[1], layout.width / size[0], height / size[1])
        axes = figure.add_axes(place, gid=f"timeline-{number}")
        _panel(axes, timeline, layout, f"timeline-{number}")
        top -= _AXIS
        for other in timelines:
            if other is not timeline:  # where the other step ends
                axes.axvline(other.end_s, color=QUIET, linewidth=0.8, linestyle=":", zorder=4)
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(_LEFT / size[0], 0),
        ncols=columns,
        fontsize=8,
        handlelength=1.6,
        borderaxespad=0.4,
        borderpad=0.2,
    )
    return figure


def _legend(timelines: Sequence[Timeline], messages: bool) -> Iterator[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    spans = [span for timeline in timelines for span in timeline.spans]
    styles = {style_of(span): (not is_compute(span), span.chunk, span.kind != FORWARD, span.kind) for span in spans}
    for style in sorted(styles, key=lambda style: styles[style]):
        yield Patch(facecolor=style.colour, label=style.meaning)
    yield Patch(facecolor=SHADE, edgecolor=RULE, label="idle")
    kinds = {transfer.kind for timeline in timelines for transfer in timeline.transfers}
    for kind, (colour, dashes) in _TRANSFERS.items():
        if messages and kind in kinds:
            yield Line2D([], [], color=colour, linestyle=dashes, linewidth=0.9, label=f"{kind} under way")


def _panel(axes: Axes, timeline: Timeline, layout: _Layout, group: str) -> None:
    per_s, unit = time_unit(layout.end_s)
    axes.set_xlim(0, layout.end_s)
    axes.set_ylim(timeline.num_ranks, 0)
    rows = [Span(rank, "idle", -1, 0, 0.0, timeline.end_s) for rank in range(timeline.num_ranks)]
    _boxes(axes, rows, layout, facecolors=SHADE, edgecolors=RULE, linewidths=0.4, zorder=1)
    by_style: dict[Style, list[Span]] = {}
    for span in timeline.spans:
        by_style.setdefault(style_of(span), []).append(span)
    for style, spans in by_style.items():
        narrow = median(layout.width_pt(span.end_s - span.start_s) for span in spans) < 3
        border: dict[str, Any] = {"linewidths": 0} if narrow else {"linewidths": 0.5, "edgecolors": SHADE}
        order = 3 if is_compute(spans[0]) else 2
        _boxes(axes, spans, layout, facecolors=style.colour, **border, zorder=order, gid=f"{group}-{style.group}")
    _numbers(axes, timeline.spans, layout)
    if layout.has_room_for_messages:
        _messages(axes, timeline.transfers, layout, group)
    took = f"{format_duration(timeline.end_s)}, " * layout.titles_have_times
    title = f"{timeline.name or 'step'}: {took}{bubble_share(timeline):.1%} bubble"
    axes.set_title(title, loc="left", fontsize=9, pad=5)
    axes.set_xlabel(f"{unit} since the step began", fontsize=8, labelpad=2, color=QUIET)
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * per_s:.6g}")
    axes.tick_params(axis="x", labelsize=8, length=3)
    axes.spines["left"].set_visible(False)
    _rank_labels(axes, timeline, layout)


def _rank_labels(axes: Axes, timeline: Timeline, layout: _Layout) -> None:
    """The rank with its stages below it, where it has several and there is room; its idle share at the right."""
    every = 1
    while layout.pitch * every < 0.14:  # a line of text
        every *= 2
    times, ticks, labels = rank_times(timeline), [], []
    for rank in range(0, timeline.num_ranks, every):
        held = timeline.stages[rank] if timeline.stages and layout.pitch >= _TWO_LINES else ()
        ticks.append(layout.centre(rank))
        labels.append(f"rank {rank}" + f"\n({', '.join(map(str, held))})" * (len(held) > 1))
        axes.text(
            1.006,
            layout.centre(rank),
            f"{times[rank].idle_s / timeline.end_s:.0%} idle",
            transform=axes.get_yaxis_transform(),
            va="center_baseline",
            fontsize=8,
            color=QUIET,
        )
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", labelsize=8, length=0)


def _boxes(axes: Axes, spans: Iterable[Span], layout: _Layout, **looks: Any) -> None:
    """One path a rank: tens of thousands of boxes would otherwise take minutes to write."""
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Outline

    corners: dict[int, list[tuple[float, float]]] = {}
    for span in spans:
        top, bottom = layout.row(span.rank)
        corners.setdefault(span.rank, []).extend(
            [(span.start_s, top), (span.end_s, top), (span.end_s, bottom), (span.start_s, bottom), (span.start_s, top)]
        )
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    outlines = [Outline(points, codes * (len(points) // len(codes))) for _, points in sorted(corners.items())]
    axes.add_collection(PathCollection(outlines, clip_on=False, **looks), autolim=False)


def _number(span: Span) -> str:
    return str(span.micro_batch) if is_compute(span) else span.kind


def _text_pt(num_letters: int, font_pt: float) -> float:
    """Width of a text with some air on both sides."""
    return font_pt * _DIGIT * num_letters + _AIR_PT


def _numbers(axes: Axes, spans: Sequence[Span], layout: _Layout) -> None:
    """Micro-batch numbers, all of one size, in the boxes that are wide enough."""
    height_pt = 72 * layout.pitch * layout.box
    # As wide as the longest number, so that boxes of a kind have all of their numbers or none.
    digits = max((len(_number(span)) for span in spans if is_compute(span)), default=1)
    narrowest = min((layout.width_pt(span.end_s - span.start_s) for span in spans if is_compute(span)), default=inf)
    font_pt = min(_FONT_PT, height_pt, max((narrowest - _AIR_PT) / (_DIGIT * digits), _MIN_FONT_PT))
    for span in spans if height_pt >= _MIN_FONT_PT else ():
        letters = digits if is_compute(span) else len(span.kind)
        if _text_pt(letters, font_pt) <= layout.width_pt(span.end_s - span.start_s) + 1e-6:
            axes.text(
                (span.start_s + span.end_s) / 2,
                layout.centre(span.rank),
                _number(span),
                ha="center",
                va="center_baseline",
                fontsize=font_pt,
                color="black" if not is_compute(span) or span.kind == FORWARD else "white",
                zorder=5,
            )


def _messages(axes: Axes, transfers: Sequence[Transfer], layout: _Layout, group: str) -> None:
    """Lines from the edge of the sender's row to the nearer edge of the receiver's."""
    from matplotlib.collections import LineCollection

    for kind, (colour, dashes) in _TRANSFERS.items():
        lines = []
        for transfer in transfers:
            if transfer.kind == kind:
                below = transfer.target > transfer.source
                source, target = layout.row(transfer.source)[below], layout.row(transfer.target)[not below]
                lines.append([(transfer.start_s, source), (transfer.end_s, target)])
        drawn = LineCollection(
            lines, colors=colour, linestyles=dashes, linewidths=0.9, clip_on=False, zorder=1.5, gid=f"{group}-{kind}"
        )
        axes.add_collection(drawn, autolim=False)
