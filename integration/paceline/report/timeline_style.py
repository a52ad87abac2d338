"""Styles of pictures of timelines, and their legend."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from paceline.schedules.timeline import Span

from .comparison import is_compute

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

# Forwards are light and backwards dark, also in grey; the hue tells the chunk. What is left of a split backward for
# later, the gradients of the weights, is darker still.
_BACKWARD = ("#225f9c", "#a3500a", "#2a7030", "#6f3a8c")
_COMPUTE = {
    FORWARD: (("#aed4f5", "#fbd29b", "#bfe3b4", "#e2c6ee"), "forward"),
    BACKWARD: (_BACKWARD, "backward"),
    BACKWARD_INPUT: (_BACKWARD, "backward of inputs"),
    BACKWARD_WEIGHT: (("#123454", "#5a2c05", "#163d1a", "#3e204f"), "backward of weights"),
}
_OTHER = {"reduce": "#bdbdbd", "step": "#8a8a8a"}
_UNKNOWN = "#d6d6d6"
TRANSFERS: dict[str, tuple[str, Literal["-", "--"]]] = {"activation": ("#4a90c8", "-"), "gradient": ("#c4500f", "--")}

_ENTRY, _ROW = 1.5, 0.22  # inches of a legend


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


class Legend:
    """The legend of a picture's boxes and lines, in as many rows as ``width`` asks for.

    Args:
        spans: all that is drawn.
        transfers: kinds of messages that are drawn.
        width: inches.
    """

    def __init__(self, spans: Iterable[Span], transfers: Collection[str], width: float) -> None:
        self._handles = list(_handles(spans, transfers))
        self._columns = max(1, min(len(self._handles), int(width / _ENTRY)))
        self.height = 0.12 + _ROW * -(-len(self._handles) // self._columns)

    def draw(self, figure: Figure, left: float) -> None:
        """Put it at the bottom of ``figure``, ``left`` inches from its edge."""
        figure.legend(
            handles=self._handles,
            loc="lower left",
            bbox_to_anchor=(left / figure.get_figwidth(), 0),
            ncols=self._columns,
            fontsize=8,
            frameon=False,
            handlelength=1.6,
            borderaxespad=0.4,
            borderpad=0.2,
        )


def _handles(spans: Iterable[Span], transfers: Collection[str]) -> Iterator[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    styles = {style_of(span): (not is_compute(span), span.chunk, span.kind != FORWARD, span.kind) for span in spans}
    for style in sorted(styles, key=lambda style: styles[style]):
        yield Patch(facecolor=style.colour, label=style.meaning)
    yield Patch(facecolor="white", edgecolor="#cccccc", label="idle")
    for kind, (colour, dashes) in TRANSFERS.items():
        if kind in transfers:
            yield Line2D([], [], color=colour, linestyle=dashes, linewidth=0.9, label=f"{kind} under way")
