"""``paceline trace RUN_DIR``: draw a step that a run recorded, as it was predicted and as it was."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.messages import aligned

if TYPE_CHECKING:
    from paceline.report.comparison import RankTime
    from paceline.report.step_records import StepRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help='output directory of a run with "report": {"trace_every": N}'
    )
    parser.add_argument("--step", type=int, metavar="N", help="which recorded step (default: the last)")
    parser.add_argument("--output", metavar="DIR", help="where to write (default: RUN_DIR/trace)")
    parser.add_argument("--format", default="svg", choices=("svg", "png"), help="of the picture (default svg)")


def run(args: argparse.Namespace) -> int:
    """Write the picture and the Perfetto trace of one step, and print where its time went."""
    from paceline.report import step_records

    if args.output == "":
        raise ValueError("--output: the name of a directory is empty; give one, or leave --output out.")
    record = _choose(step_records.read(args.run_dir), args.step)
    output = Path(args.output) if args.output is not None else Path(args.run_dir) / step_records.FOLDER
    picture, trace = output / f"step-{record.step}.{args.format}", output / f"step-{record.step}.perfetto.json"
    numbers = {"picture": str(picture), "perfetto": str(trace), **_numbers(record)}
    _write(record, picture, trace)
    print(json.dumps(numbers, indent=2) if args.json else _text(numbers))
    return 0


def _choose(records: Sequence[StepRecord], step: int | None) -> StepRecord:
    if step is None:
        return records[-1]
    for record in records:
        if record.step == step:
            return record
    recorded = ", ".join(str(record.step) for record in records[-20:])
    more = "…, " if len(records) > 20 else ""
    raise ValueError(f"--step {step} was not recorded: choose one of {more}{recorded}.")


def _write(record: StepRecord, picture: Path, trace: Path) -> None:
    from paceline.report.perfetto import write_trace
    from paceline.report.timeline_picture import draw

    timelines = [replace(record.measured, name=f"measured: step {record.step}, {record.schedule}")]
    if record.predicted is not None:
        timelines.insert(0, replace(record.predicted, name=f"predicted: step {record.step}, {record.schedule}"))
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(timelines, picture)
        write_trace(timelines, trace)
    except OSError as error:
        raise ValueError(
            f"cannot write to {picture.parent} ({error.strerror}): choose another folder with --output."
        ) from None


def _numbers(record: StepRecord) -> dict[str, Any]:
    from paceline.report.comparison import largest_difference, rank_times

    numbers: dict[str, Any] = {
        "step": record.step,
        "schedule": record.schedule,
        "measured_s": record.measured_s,
        "predicted_s": record.predicted_s,
        "measured": _shares(rank_times(record.measured), record.measured.end_s),
        "predicted": None,
        "largest_difference": None,
    }
    if record.predicted is not None:
        numbers["predicted"] = _shares(rank_times(record.predicted), record.predicted.end_s)
        largest = largest_difference(record.predicted, record.measured)
        if largest is not None:
            numbers["largest_difference"] = {**largest._asdict(), "text": str(largest)}
    return numbers


def _shares(times: Iterable[RankTime], step_s: float) -> list[dict[str, float]]:
    return [{**time._asdict(), "idle_share": time.idle_s / step_s if step_s else 0.0} for time in times]


def _text(numbers: Mapping[str, Any]) -> str:
    from paceline.report.comparison import format_duration

    head = f"step {numbers['step']}, {numbers['schedule']}: measured {format_duration(numbers['measured_s'])}"
    if numbers["predicted_s"]:
        error = numbers["measured_s"] / numbers["predicted_s"] - 1
        head += f", predicted {format_duration(numbers['predicted_s'])} ({error:+.1%})"
    lines = [head]
    if numbers["largest_difference"]:
        lines.append(f"largest difference: {numbers['largest_difference']['text']}")
    titles = ["compute", "other", "idle", "idle"]
    rows = [["rank", *titles]]
    rows += [[str(rank["rank"]), *_cells(rank)] for rank in numbers["measured"]]
    if numbers["predicted"]:
        rows[0] += ["predicted:", *titles]
        for row, rank in zip(rows[1:], numbers["predicted"], strict=True):
            row += ["", *_cells(rank)]
    lines += aligned(rows)
    lines.append(f"wrote {numbers['picture']}")
    lines.append(f"wrote {numbers['perfetto']}, for https://ui.perfetto.dev")
    return "\n".join(lines)


def _cells(rank: Mapping[str, float]) -> list[str]:
    times = [format(1e3 * rank[name], ",.1f") + " ms" for name in ("compute_s", "other_s", "idle_s")]
    return [*times, f"{rank['idle_share']:.1%}"]
