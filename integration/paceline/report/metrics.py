"""Files that a run leaves behind: a line of JSON per report while it trains, and a summary at its end."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from ..json_values import read_text
from ..messages import aligned, plural, reason

logger = logging.getLogger("paceline")

T = TypeVar("T")
TIMES = ("compute_s", "communication_s", "idle_s", "other_s", "wall_s")


@dataclass
class MetricsFile:
    """``metrics.jsonl`` of one run: a JSON object a line, flushed at once. A path of None writes nothing.

    It goes on with what is there; :func:`keep_until` is for what an earlier run has left. Where it cannot be written, a
    warning says so, and it ends there: the run matters more. One that somebody has removed begins anew.
    """

    path: Path | None
    _file: TextIO | None = field(default=None, repr=False)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write ``record``; numbers that JSON cannot hold (NaN, infinity) become null."""
        if self.path is None:
            return
        try:
            if self._file is not None and not _is_at(self._file, self.path):
                logger.warning(
                    "%s was removed while the run writes it: it begins anew at step %s", self.path, record.get("step")
                )
                self.close()
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a")
            print(json.dumps(finite(record), allow_nan=False), file=self._file, flush=True)
        except OSError as error:
            logger.warning("%s ends before step %s: %s", self.path, record.get("step"), error.strerror)
            self.path = None
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # of what could not be written before
                file.close()


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def keep_until(path: Path, step: int) -> None:
    """Drop lines of an earlier run with steps after ``step``, and a line that was cut off.

    With a ``step`` of 0 the file goes: evaluations before the first step are done again.
    """
    if not path.exists():
        return
    lines = path.read_text(errors="replace").splitlines(keepends=True) if step else []
    kept = []
    for number, line in enumerate(lines, 1):
        if line.endswith("}\n"):
            try:
                is_kept = json.loads(line).get("step", 0) <= step
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number} cannot be read ({reason(error)}): remove it.") from None
            kept += [line] * is_kept
    if not kept:
        path.unlink()
    elif len(kept) < len(lines):
        write_whole(path, "".join(kept))


def read_lines(path: Path, remedy: str, nature: str, parse: Callable[[Any], T]) -> list[T]:
    """Lines of JSON, as ``parse`` returns them. A last line that was cut off, as by a kill, is skipped.

    Args:
        remedy: what to give instead of a file, or a line, that cannot be read.
        nature: what a line is that cannot be parsed.

    Raises:
        ValueError: the file cannot be read, or a line, by number, cannot be parsed.
    """
    found = []
    for number, text in enumerate(read_text(path, remedy).split("\n")[:-1], 1):
        try:
            found.append(parse(json.loads(text)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else reason(error)
            raise ValueError(f"{path}, line {number} is {nature} ({why}): remove it, or {remedy}.") from None
    return found


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, and in place of a link what it names; a pipe or device just takes it.

    Raises:
        OSError: it cannot be written, with its name: where the disk is full, the system does not give it.
    """
    if isinstance(content, str):
        content = content.encode("utf-8", "replace")  # of a command's bytes that are no text
    target = Path(os.path.realpath(path))
    # What is printed may go to the file that /dev/stdout names, too.
    is_whole = path.parent != Path("/dev") and (path.is_file() or not path.exists())
    draft = target.with_name(f".{target.name}.{os.getpid()}") if is_whole else path
    try:
        draft.write_bytes(content)
        if is_whole:
            draft.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if is_whole:
            with suppress(OSError):  # of the draft; what counts is told of the file
                draft.unlink()


def events(record: Mapping[str, Any], samples: int, prefix: str = "Paceline") -> list[tuple[str, float, int]]:
    """``record`` as DeepSpeed's monitors take it: ``(name, value, samples so far)``, one for each finite number."""
    found = []
    for key, value in record.items():
        if isinstance(value, Mapping):
            found += events(value, samples, f"{prefix}/{key}")
        elif isinstance(value, (int, float)) and math.isfinite(value):
            found.append((f"{prefix}/{key}", float(value), samples))
    return found


@dataclass
class RankTotals:
    """One rank's share of a run, summed over its reports."""

    rank: int
    stage: int
    holds: str
    parameters: int
    peak_memory_bytes: int = 0
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))

    def add(self, times: Mapping[str, float]) -> None:
        for name in TIMES:
            self.times[name] += times[name]


def summarize(
    ranks: Sequence[RankTotals],
    *,
    steps: int,
    tokens: int,
    first_step: int = 0,
    first_tokens: int = 0,
    flops_per_token: float,
    train_loss: float,
    evaluation: Mapping[str, float] | None,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole run as one JSON object.

    Args:
        tokens: trained on by all replicas together, padding not counted.
        first_step: that this run went on from, with ``first_tokens`` behind it; times and rates are of this run.
        flops_per_token: of the model, forward and backward (:mod:`paceline.measure.flops`).
        facts: what identifies the run (model, versions, hardware).
    """
    seconds = max(rank.times["wall_s"] for rank in ranks)
    rate = (tokens - first_tokens) / seconds if seconds else 0.0
    return finite(
        {
            **facts,
            "steps": steps,
            "tokens": tokens,
            "resumed_from_step": first_step or None,
            "tokens_before": first_tokens or None,
            "train_loss": train_loss,
            **(evaluation or {}),
            "training_s": seconds,
            "tokens_per_s": rate,
            "tokens_per_s_per_rank": rate / len(ranks),
            "model_flop_per_s": rate * flops_per_token,
            "ranks": [
                {key: value for key, value in (vars(rank) | rank.times).items() if key != "times"} for rank in ranks
            ],
        }
    )


def table(summary: Mapping[str, Any]) -> str:
    """``summary`` for a terminal."""
    tokens = summary["tokens"] - (summary["tokens_before"] or 0)
    head = (
        f"{_span(summary)}, {tokens:,} tokens in {summary['training_s']:.1f} s: "
        f"{summary['tokens_per_s']:,.0f} tokens/s ({summary['tokens_per_s_per_rank']:,.0f} a rank), "
        f"{_si(summary['model_flop_per_s'])}FLOP/s"
    )
    rows = [["rank", "stage", "compute", "communicate", "idle", "other", "peak memory", "holds"]]
    for rank in summary["ranks"]:
        shares = [f"{100 * rank[name] / (rank['wall_s'] or 1.0):.0f}%" for name in TIMES[:4]]
        room = f"{rank['peak_memory_bytes'] / 2**20:.0f} MiB"
        rows.append([str(rank["rank"]), str(rank["stage"]), *shares, room, rank["holds"]])
    return "\n".join([head, *aligned(rows, left=[7])])


def _span(summary: Mapping[str, Any]) -> str:
    first = summary.get("resumed_from_step")
    if first == summary["steps"]:
        return f"all {first} steps were done before"
    return f"steps {first + 1} to {summary['steps']}" if first else plural(summary["steps"], "step")


def _si(value: float) -> str:
    for power, letter in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:.1f} {letter}"
    return f"{value:.0f} "


def finite(value: Any) -> Any:
    """``value`` with null for every number in it that JSON cannot hold, and arrays as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if hasattr(value, "tolist"):  # of numpy or torch
        return finite(value.tolist())
    return value
