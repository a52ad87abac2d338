"""Records in the output directory of a run, read back: of one that is finished, was killed, or is under way."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..json_values import read_text
from ..messages import reason
from . import step_records
from .expert_loads import Window
from .expert_loads import read as read_loads
from .metrics import finite, keep_until, read_lines, write_whole
from .step_records import StepRecord

START, METRICS, SUMMARY, LOADS = "run.json", "metrics.jsonl", "summary.json", "expert_loads.jsonl"
_DRAWN = ("json", "svg", "png", "perfetto.json")
"""A recorded step, and what ``paceline trace`` makes of it beside."""
_ISLAND = re.compile(r"island(0|[1-9]\d*)")
_REMEDY, _NATURE = "give the output directory of a run", "not what a run writes"

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """All records of a run.

    Args:
        name: of its directory.
        start: what was known when training began (:func:`write_start`); empty of older runs.
        summary: of its end; None if it did not come to it.
        lines: of ``metrics.jsonl``, each with its ``step``.
        traces: recorded steps.
        loads: of experts, by layer.
        problems: what could not be read, a line each.
    """

    name: str
    start: Line
    summary: Line | None
    lines: tuple[Line, ...] = ()
    traces: tuple[StepRecord, ...] = ()
    loads: Mapping[str, list[Window]] | None = None
    problems: tuple[str, ...] = ()

    def having(self, key: str) -> list[Line]:
        """Lines with ``key``, such as ``"loss"``."""
        return [line for line in self.lines if key in line]

    def inner(self, key: str) -> list[Line]:
        """Objects that lines hold under ``key``, such as ``"decision"``, each with its step."""
        return [{"step": line["step"], **line[key]} for line in self.lines if isinstance(line.get(key), dict)]


def write_start(run_dir: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``run.json``; what an earlier run in this directory wrote of later steps, or of its end, goes.

    Args:
        facts: with ``first_step``, after which this run goes on.

    Returns:
        What was written: the facts, and in ``resumed_after`` the steps after which this run was gone on with so far.
    """
    first_step = facts["first_step"]
    try:
        earlier = (_object(run_dir / START) or {}).get("resumed_after", [])
    except ValueError:
        earlier = []
    facts = {**facts, "resumed_after": sorted({step for step in [*earlier, first_step] if 0 < step <= first_step})}
    (run_dir / SUMMARY).unlink(missing_ok=True)
    for name in (METRICS, LOADS):
        keep_until(run_dir / name, first_step)
    for path in (run_dir / step_records.FOLDER).glob("step-*"):
        step, _, kind = path.name[5:].partition(".")
        if kind in _DRAWN and step.isdecimal() and int(step) > first_step:
            path.unlink()
    _write_facts(run_dir, facts)
    return facts


def keep_start(run_dir: Path, facts: Mapping[str, Any]) -> None:
    """Write ``run.json`` again where it was removed during the run, as far as that is possible."""
    if not (run_dir / START).exists():
        with suppress(OSError):  # the next report tries again
            run_dir.mkdir(parents=True, exist_ok=True)
            _write_facts(run_dir, facts)


def _write_facts(run_dir: Path, facts: Mapping[str, Any]) -> None:
    write_whole(run_dir / START, json.dumps(finite(facts), indent=2, allow_nan=False) + "\n")


def read_summary(run_dir: Path) -> dict[str, object] | None:
    """The summary of a run that came to its end; None if there is none, or none that can be read."""
    try:
        values = json.loads((run_dir / SUMMARY).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    is_whole = isinstance(values, dict) and {"steps", "tokens", "training_s", "ranks"} <= values.keys()
    return values if is_whole else None


def tokens_so_far(run_dir: Path, step: int) -> int:
    """Tokens trained on up to ``step``, by the last line in ``run_dir`` that tells them; 0 if there is none."""
    lines = [line for line in _lines(run_dir / METRICS) if "tokens" in line and line["step"] <= step]
    return max((line["tokens"] for line in lines), default=0)


def runs_in(run_dir: str | os.PathLike[str]) -> list[Path]:
    """The directory itself if it is a run's, else those of the islands in it, by number.

    Raises:
        ValueError: it holds neither.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no directory: give the output directory of a run.")
    if _is_run(folder):
        return [folder]
    islands = [(int(match[1]), path) for path in folder.iterdir() if (match := _ISLAND.fullmatch(path.name))]
    found = [path for _, path in sorted(islands) if path.is_dir() and _is_run(path)]
    if not found:
        raise ValueError(
            f"{folder} holds no records of a run ({START}, {METRICS} or {SUMMARY}): give the output directory of one."
        )
    return found


def read(run_dir: str | os.PathLike[str]) -> RunRecords:
    """Everything that the run in ``run_dir`` wrote. A last line that was cut off, as by a kill, is skipped.

    Raises:
        ValueError: a file cannot be read, or is not what a run writes.
    """
    folder = Path(run_dir)
    start, summary = _object(folder / START) or {}, _object(folder / SUMMARY)
    lines = _lines(folder / METRICS)
    last = max([*(line["step"] for line in lines), (summary or {}).get("steps") or 0])
    problems: list[str] = []
    traces: list[StepRecord] = []
    loads: Mapping[str, list[Window]] = {}
    try:
        traces = step_records.read(folder) if any(_traced(folder)) else []
    except ValueError as error:
        problems.append(str(error))
    try:
        loads_file = start.get("expert_loads", LOADS)
        loads = read_loads([folder / loads_file]) if loads_file and (folder / loads_file).exists() else {}
    except ValueError as error:
        problems.append(str(error))
    return RunRecords(
        name=folder.resolve().name,
        start=start,
        summary=summary,
        lines=tuple(lines),
        traces=tuple(trace for trace in traces if trace.step <= last),
        loads={n: kept for n, w in loads.items() if (kept := [x for x in w if x.step <= last])} or None,
        problems=tuple(problems),
    )


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (START, METRICS, SUMMARY))


def _traced(folder: Path) -> list[tuple[Path, int]]:
    found = (folder / step_records.FOLDER).glob("step-*.json")
    return [(path, int(path.stem[5:])) for path in sorted(found) if path.stem[5:].isdecimal()]


def _object(path: Path) -> Line | None:
    if not path.exists():
        return None
    try:
        values = json.loads(read_text(path, _REMEDY))
        if not isinstance(values, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is {_NATURE} ({reason(error)}): remove it.") from None
    return values


def _lines(path: Path) -> list[Line]:
    return read_lines(path, _REMEDY, _NATURE, _line) if path.exists() else []


def _line(values: Any) -> Line:
    if not isinstance(values, dict) or type(values.get("step")) is not int:  # a bool is an int too
        raise ValueError("it is no object with a step")
    return values
