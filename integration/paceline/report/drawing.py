"""Colours and output of all pictures, drawn with matplotlib: light as drawn, dark by a style sheet in the SVG."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .metrics import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER, INK, QUIET, RULE, SHADE = "#fdfdfc", "#1b1e23", "#646a73", "#dfe1e5", "#f1f2f4"
MAIN, WARM, FAINT, GOOD = "#22609d", "#c4510f", "#a9aeb6", "#2a7031"
_DARK = {
    PAPER: "#14171b",
    INK: "#e6e7e9",
    QUIET: "#9aa1ab",
    RULE: "#333941",
    SHADE: "#1f242a",
    MAIN: "#7db4ea",
    WARM: "#f0915a",
    FAINT: "#616873",
    GOOD: "#86c98b",
}
_KEYS = ("fill", "stroke")
_DARK_PAPER = f"@media screen and (prefers-color-scheme:dark){{svg{{background:{_DARK[PAPER]}}}}}"
_DPI = 150
_RC: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), RULE),
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def dark_style() -> str:
    """Rules that give what is drawn in a colour above its counterpart where the reader prefers dark pages."""
    rules = "".join(
        f'[style*="{key}: {light}"]{{{key}:{dark}!important}}' for light, dark in _DARK.items() for key in _KEYS
    )
    return f"@media screen and (prefers-color-scheme:dark){{{rules}}}"


def variables(dark: bool) -> str:
    """The colours as variables of a page's style sheet."""
    names = {"paper": PAPER, "ink": INK, "quiet": QUIET, "rule": RULE, "shade": SHADE}
    names |= {"main": MAIN, "warm": WARM, "faint": FAINT, "good": GOOD}
    return "".join(f"--{name}:{_DARK[colour] if dark else colour};" for name, colour in names.items())


def save(make: Callable[[], Figure], path: str | os.PathLike[str]) -> None:
    """Write a picture as ``.svg``, which needs nothing beside it, or ``.png``. The same data give the same file.

    Raises:
        ValueError: another suffix.
        OSError: the file cannot be written.
    """
    if Path(path).suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"{path}: pictures are .svg or .png files; choose one of these suffixes.")
    if Path(path).suffix.lower() == ".svg":
        style = f"<style>svg{{background:{PAPER}}}{dark_style()}{_DARK_PAPER}</style>"
        text = re.sub(r"(<svg[^>]*>)", lambda match: match[1] + style, _svg(make), count=1)
        write_whole(Path(path), text)
        return
    with _settings():
        file = io.BytesIO()
        make().savefig(file, format="png", dpi=_DPI, metadata={"Software": None})
    write_whole(Path(path), file.getvalue())


def inline(make: Callable[[], Figure], label: str) -> str:
    """A picture as an element of a page.

    Args:
        label: what it shows, for those who do not see it.
    """
    text = _svg(make, label)  # ids of its own, of all pictures of the page
    text = text[text.index("<svg") :]
    used = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", text)
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])  # type: ignore[index]
    opened = f'<svg role="img" aria-label="{escape(label)}" style="--natural:{width:.0f}px"'
    return re.sub(r'^<svg( xmlns:xlink="[^"]+")? width="[^"]+" height="[^"]+"', opened, text)


def _svg(make: Callable[[], Figure], salt: str = "paceline") -> str:
    with _settings({"svg.hashsalt": salt}):
        file = io.StringIO()
        nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        make().savefig(file, format="svg", dpi=_DPI, metadata=nothing, transparent=True)
    return re.sub(r"(?<=\d)\n(?=[LMz])", "", file.getvalue())


@contextmanager
def _settings(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Our settings for the time of a picture: a user's would change what fits."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC | dict(more or {}))
        yield
