"""Recorded steps of a run: when everything ran, measured and predicted. One JSON file a step."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.messages import reason
from paceline.schedules.timeline import Span, Timeline, Transfer

from .metrics import write_whole

FOLDER = "trace"
_KEYS = ("step", "schedule", "predicted", "measured", "predicted_s", "measured_s")


@dataclass(frozen=True)
class StepRecord:
    """One step of a run.

    Args:
        step: its number.
        schedule: the name of the schedule that ran.
        predicted: what the simulator expected; None if nothing was predicted.
        measured: what happened, in seconds since the first rank began: no time is negative.
        predicted_s: step time that was expected; None if none was.
        measured_s: step time.
    """

    step: int
    schedule: str
    predicted: Timeline | None
    measured: Timeline
    predicted_s: float | None
    measured_s: float


def write(run_dir: str | os.PathLike[str], record: StepRecord) -> Path:
    """Write ``record`` into the folder of records of ``run_dir``: the whole file or none.

    An earlier record of the same step is replaced, so that a run that goes on from a checkpoint tells its own story.

    Returns:
        The file: ``run_dir/trace/step-<N>.json``.
    """
    folder = Path(run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{record.step}.json"
    values = {key: getattr(record, key) for key in _KEYS}
    values["predicted"] = record.predicted.to_dict() if record.predicted is not None else None
    values["measured"] = record.measured.to_dict()
    write_whole(path, json.dumps(values, allow_nan=False, separators=(",", ":")) + "\n")
    return path


def read(run_dir: str | os.PathLike[str]) -> list[StepRecord]:
    """Every step that a run recorded, in order.

    Raises:
        ValueError: there is none, or a file is broken or was written by something else.
    """
    if not Path(run_dir).is_dir():
        raise ValueError(f"{run_dir} is no directory: give the output directory of a run.")
    folder = Path(run_dir) / FOLDER
    # What is drawn lies beside the records: step-8.perfetto.json is no record.
    paths = [path for path in folder.glob("step-*.json") if not path.name.endswith(".perfetto.json")]
    if not paths:
        raise ValueError(
            f"{run_dir} has no recorded steps in {FOLDER}/: set "
            '"paceline": {"report": {"trace_every": N}} in the DeepSpeed JSON to record every Nth step of a run.'
        )
    return sorted((_read_one(path) for path in paths), key=lambda record: record.step)


def _read_one(path: Path) -> StepRecord:
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict) or sorted(values) != sorted(_KEYS):
            raise ValueError(f"a record holds exactly {', '.join(_KEYS)}")
        for key in ("predicted", "measured"):
            if key == "measured" or values[key] is not None:
                values[key] = _timeline(values[key])
        for key in ("predicted_s", "measured_s"):
            if key == "measured_s" or values[key] is not None:
                _check_seconds(key, values[key])
        if path.stem != f"step-{values['step']!r}":
            raise ValueError(f"it says step {values['step']!r}")
        return StepRecord(**values | {"schedule": str(values["schedule"])})
    except (OSError, ValueError, TypeError, RecursionError) as error:  # broken JSON and bad UTF-8 are ValueErrors
        raise ValueError(f"{path} is no record of a step ({reason(error)}): remove it, or record again.") from None


def _timeline(values: Any) -> Timeline:
    timeline = Timeline.from_dict(values)
    events: list[Span | Transfer] = [*timeline.spans, *timeline.transfers]
    for event in events:
        _check_seconds("start_s", event.start_s)
        _check_seconds("end_s", event.end_s)
        if event.end_s < event.start_s:
            raise ValueError(f"{event} ends before it starts")
        for rank in (event.rank,) if isinstance(event, Span) else (event.source, event.target):
            if type(rank) is not int or rank not in range(timeline.num_ranks):  # False and 0.0 are in it, too
                raise ValueError(f"rank {rank!r} is not one of {timeline.num_ranks}")
    return timeline


def _check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a time in seconds")
