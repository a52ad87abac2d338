"""``paceline loads FILE…``: how the load of experts moved over a run, and what placing them anew made of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline.messages import aligned

if TYPE_CHECKING:
    from paceline.report.expert_loads import LayerSummary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "files", metavar="FILE", nargs="+", help="expert loads that a run has written: a line of JSON a window"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="also draw them as heat maps over time: .svg or .png")


def run(args: argparse.Namespace) -> int:
    """Sum up the windows by layer, and draw them if asked to; the exit status.

    Raises:
        ValueError: a file that is none of a run's loads, or a picture that cannot be written.
    """
    from paceline.report.expert_heat_map import draw
    from paceline.report.expert_loads import read, summarize

    layers = read(args.files)
    if args.output is not None:
        try:
            draw(layers, args.output)
        except OSError as error:
            raise ValueError(
                f"cannot write {args.output} ({error.strerror}): choose another file with --output."
            ) from None
    summaries = summarize(layers)
    if args.json:
        print(json.dumps({"layers": [asdict(summary) for summary in summaries], "picture": args.output}, indent=2))
    else:
        print(_text(summaries))
        if args.output is not None:
            print(f"wrote {args.output}")
    return 0


def _text(summaries: Sequence[LayerSummary]) -> str:
    rows = [["layer", "windows", "first", "last", "mean", "unmoved", "moves", "experts moved"]]
    rows += [
        [
            summary.name,
            str(summary.windows),
            *(f"{value:.3f}" for value in (summary.first, summary.last, summary.mean, summary.unmoved)),
            str(summary.moves),
            str(summary.moved),
        ]
        for summary in summaries
    ]
    head = "load of the most loaded device over the mean, in the first window, in the last, and on average:"
    return "\n".join([head, *aligned(rows, left=[0])])
