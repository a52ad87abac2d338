"""``paceline report RUN_DIR``: a run as a page and a JSON value; of a finished run, or of what a killed one left."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.messages import plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="output directory of a run; of islands, that of one or that of all"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.html",
        help="where to write the page, and its JSON beside it (default: RUN_DIR/report.html)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and the JSON, and say in a few lines what is in them; the exit status.

    Raises:
        ValueError: no records of a run, records that cannot be read, or a place that cannot be written to.
    """
    from paceline.report.run_records import runs_in
    from paceline.report.run_report import write

    if not args.run_dir:
        raise ValueError("RUN_DIR: the name of a directory is empty; give one.")
    folders = runs_in(args.run_dir)
    if args.output is not None:
        if len(folders) > 1:
            raise ValueError(
                f"--output {args.output} is one page and {args.run_dir} holds {len(folders)} islands: leave it out, or "
                f"give the directory of one, such as {folders[0]}."
            )
        if Path(args.output).suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"{args.output}: the page is an .html file; choose this suffix.")
    reports = {}
    for folder in folders:
        try:
            page, value = write(folder, args.output)
        except OSError as error:
            raise ValueError(
                f"cannot write {args.output or folder} ({error.strerror}): choose another file with --output."
            ) from None
        reports[folder.name] = json.loads(value.read_text(encoding="utf-8"))
        if not args.json:
            print(_text(reports[folder.name]))
            print(f"wrote {page}")
            print(f"wrote {value}")
    if args.json:
        print(json.dumps(next(iter(reports.values())) if folders == [Path(args.run_dir)] else reports, indent=2))
    return 0


def _text(report: Mapping[str, Any]) -> str:
    from paceline.report.comparison import format_duration, format_figure

    run, head, decided = report["run"], report["headline"], report["decisions"]
    parts = [f"{run['name']}: {plural(run['steps'], 'step')}"]
    if run["state"] != "finished":
        parts[0] += " so far"
    shown = {
        "loss": lambda loss: f"loss {format_figure(loss)}",
        "eval_loss": lambda loss: f"held-out loss {format_figure(loss)}",
        "tokens_per_s": lambda rate: f"{rate:,.0f} tokens/s",
        "median_step_s": lambda seconds: f"a step {format_duration(seconds)}",
    }
    parts += [show(head[key]) for key, show in shown.items() if head[key] is not None]
    if decided:
        switches = plural(sum(decision["switched"] for decision in decided), "switch", "switches")
        parts.append(f"{switches} in {plural(len(decided), 'look')}")
    return ", ".join(parts)
