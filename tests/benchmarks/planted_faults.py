"""The share of planted faults that the tests find: how much a green run says.

    python tests/benchmarks/planted_faults.py [--tier fast] [--resume] [--only NAME]
    python tests/benchmarks/planted_faults.py --random 30 --seed 1

Each fault of ``planting/faults.py``, or so many that are drawn at random (``planting/mutants.py``), is planted in a
clone of the repository, and tests of the tier run there until one fails: first those whose files have a name like the
module's and those in the folder of its package, of all faults; then the whole tier, of the faults that are left (not
with ``--nearest``). A test of several ranks counts if it passes in a clone without a fault. Running past the limit of
time counts, and is told as a hang.

Clones have what is committed. The report is written after each fault; ``--resume`` leaves out those that are in it.
If a fault is tried again that the tests missed, as after they were made better, the report keeps what they said first.

    python tests/benchmarks/planted_faults.py --tier all --only NAME --tests tests/distributed/test_x.py
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from benchmarks.planting.faults import FAULTS, Fault
from benchmarks.planting.mutants import random_faults
from benchmarks.planting.runs import Runs
from support.tiers import entries

REPOSITORY = Path(__file__).resolve().parents[2]
SIDE_BY_SIDE = ("-n", "2", "--dist", "worksteal")
FAST, ALL = "fast", "all"
NEAREST, WHOLE = "nearest", "whole tier"
ALIKE = 5
"""Letters that a word of a module and one of a test begin with, to be called alike."""
UNSTEADY = 3
"""Tests that fail with and without a fault, after which a run is given up."""


@dataclass(frozen=True)
class Found:
    """What tests say of a fault.

    Args:
        by: the first test that fails; None: all pass.
        hangs: it ran into the limit of time.
        tests: which of the tier ran: the nearest ones, all, or those given.
    """

    by: str | None
    hangs: bool
    tests: str
    seconds: float


class Clone:
    """A clone of what is committed, with one fault or none."""

    def __init__(self, runs: Runs, folder: Path, fault: Fault | None = None) -> None:
        self.folder, self._runs = folder, runs
        command = ["git", "clone", "--quiet", "--shared", "--no-tags", str(REPOSITORY), str(folder)]
        subprocess.run(command, check=True)
        if fault is not None:
            file = folder / fault.path
            file.write_text(fault.plant(file.read_text()))

    def first_failure(
        self, tests: Sequence[str], limit_s: float, *, side_by_side: bool = False, without: Iterable[str] = ()
    ) -> str | None:
        """Run tests until one fails.

        Returns:
            The test; None: all pass.

        Raises:
            TimeoutError: they take longer than ``limit_s``.
        """
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short", *(f"--deselect={test}" for test in without)]
        status, text = self._runs.run(self.folder, [*options, *(SIDE_BY_SIDE if side_by_side else ()), *tests], limit_s)
        if status in (0, 5):  # 5: all are deselected
            return None
        if failed := re.search(r"^(?:FAILED|ERROR) (\S+::.+?|\S+)(?: - .*)?$", text, re.MULTILINE):
            return failed[1]
        raise RuntimeError(f"pytest ended with {status} and names no test:\n{text[-3000:]}")


def nearest(fault: Fault, tier: str) -> list[str]:
    """Entries of a tier in the folder of the module's package, and elsewhere; first those with a name like its own."""
    package, module = Path(fault.file).parent.name, Path(fault.file).stem
    known: list[str] = []
    for entry in all_of(tier):
        path = REPOSITORY / entry
        inside = sorted(path.rglob("test_*.py")) if path.is_dir() else ()
        known += [str(file.relative_to(REPOSITORY)) for file in inside] or [entry]
    own = f"tests/unit/{package}/"

    def rank(entry: str) -> int:
        name = Path(entry.partition("::")[0]).stem.removeprefix("test_")
        is_alike, is_own = name == module or _is_alike(name, module), entry.startswith(own)
        return 3 if is_alike and is_own else 2 * is_own + is_alike

    found = [entry for entry in known if rank(entry) and not entry.startswith(("tests/gpu/", "tests/lab/"))]
    return sorted(dict.fromkeys(found), key=rank, reverse=True)


def _is_alike(one: str, other: str) -> bool:
    return any(len(a) >= ALIKE and a[:ALIKE] == b[:ALIKE] for a in one.split("_") for b in other.split("_"))


def all_of(tier: str) -> list[str]:
    """Entries of a tier."""
    return entries() if tier == FAST else ["tests"]


def look(runs: Runs, fault: Fault, tests: Sequence[str], which: str, limit_s: float) -> Found:
    """Run tests with a fault until one fails because of it."""
    begun = time.monotonic()

    def found(by: str | None, hangs: bool = False) -> Found:
        return Found(by, hangs, which, round(time.monotonic() - begun, 1))

    if not tests:
        return found(None)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        faulty = Clone(runs, Path(folder, "faulty"), fault)
        unsteady: list[str] = []
        while len(unsteady) < UNSTEADY:
            try:
                failed = faulty.first_failure(tests, limit_s, side_by_side=which == WHOLE, without=unsteady)
            except TimeoutError as error:
                return found(str(error), hangs=True)
            if failed is None or failed.startswith("tests/unit/"):
                return found(failed)
            if Clone(runs, Path(folder, f"sound {len(unsteady)}")).first_failure([failed], limit_s) is None:
                return found(failed)
            print(f"  {failed} fails without it too", flush=True)
            unsteady.append(failed)
    raise RuntimeError(f"{fault.name}: tests fail without it too: {', '.join(unsteady)}")


def main() -> int:
    args = _parser().parse_args()
    faults = random_faults(REPOSITORY, args.random, args.seed) if args.random else FAULTS
    if args.output is None:
        args.output = Path(__file__).parent / "results" / f"{'random' if args.random else 'planted'}_faults.json"
    report = json.loads(args.output.read_text()) if args.output.exists() and (args.resume or args.only) else {}
    told: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in report.get("faults", ())}
    chosen = [fault for fault in faults if not args.only or fault.name in args.only]
    if not chosen:
        sys.exit(f"there is no fault {args.only!r}: choose one of {', '.join(fault.name for fault in faults)}.")
    runs = Runs()

    def run(fault: Fault, tests: Sequence[str], which: str) -> None:
        found = look(runs, fault, tests, which, args.limit_s)
        entry = told.setdefault(fault.name, {"name": fault.name, "file": fault.file, "breaks": fault.breaks})
        before = entry.get(args.tier)
        if before and before["by"] is None and which != WHOLE:
            entry.setdefault(f"{args.tier}_at_first", before)
        entry[args.tier] = asdict(found)
        by = found.by or f"not by {which}"
        print(f"{fault.name} ({found.seconds:.0f} s): {'hangs: ' if found.hangs else ''}{by}", flush=True)
        _write(args, [told[fault.name] for fault in faults if fault.name in told])

    for fault in chosen:
        if args.tests:
            run(fault, args.tests, " ".join(args.tests))
        elif not (args.resume and args.tier in told.get(fault.name, {})):
            run(fault, nearest(fault, args.tier), NEAREST)
    for fault in chosen if not (args.nearest or args.tests) else ():
        found = told[fault.name][args.tier]
        if found["by"] is None and found["tests"] != WHOLE:
            run(fault, all_of(args.tier), WHOLE)
    runs.close()
    return 0


def _write(args: argparse.Namespace, ordered: Sequence[dict[str, Any]]) -> None:
    by_fast = [entry["name"] for entry in ordered if entry.get(FAST, {}).get("by")]
    by_any = [entry["name"] for entry in ordered if any(entry.get(tier, {}).get("by") for tier in (FAST, ALL))]
    report = {
        **facts(args, "resume", "only", "tests", "tier", "nearest"),
        "num_faults": len(ordered),
        "found_by_fast_tier": len(by_fast),
        "found_by_all_tests": len(by_any),
        "missed_by_fast_tier": [entry["name"] for entry in ordered if entry["name"] not in by_fast],
        "missed_by_all_tests": [entry["name"] for entry in ordered if entry["name"] not in by_any],
        "faults": ordered,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=(FAST, ALL), default=FAST)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults; the others of the report stay")
    parser.add_argument("--resume", action="store_true", help="leave out what the report has")
    parser.add_argument("--nearest", action="store_true", help="do not go on with the whole tier")
    parser.add_argument("--tests", nargs="+", default=(), help="instead of the tier's: what pytest takes")
    parser.add_argument("--limit-s", type=float, default=900.0, help="of one run of pytest")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="draw so many faults instead")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--output", type=Path, help="default: results/planted_faults.json, or random_faults.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
