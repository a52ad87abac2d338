"""Do the tests that take longest pass again and again beside other work? Each run is added to the result.

    python tests/benchmarks/repeated_tests.py --runs 20 [--busy 2]

Chosen are the longest tests that together take half of the seconds of all. A full run tells which these are:

    PYTEST_ADDOPTS="--junitxml=all.xml -o junit_family=xunit1" bash tests/run.sh --all
    python tests/benchmarks/repeated_tests.py --choose all.xml
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from facts import facts

ROOT = Path(__file__).parents[2]
SHARE = 0.5
"""Part of the seconds of all tests that the longest take together."""

BUSY = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--choose", type=Path, metavar="XML", help="choose the tests anew, by this record of all")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--busy", type=int, default=2, help="processes that compute meanwhile")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "repeated_tests.json")
    args = parser.parse_args()
    if args.choose is not None:
        write(args.output, {**longest(args.choose), "runs": []})
    for _ in range(args.runs):
        result = json.loads(args.output.read_text())
        with busy(args.busy):
            told = run(result["tests"])
        result["runs"].append({**told, **facts(args, "choose", "runs")})
        write(args.output, result)
        print(json.dumps(told), flush=True)


def write(path: Path, result: dict[str, Any]) -> None:
    """Write ``result`` with one test a line."""
    path.write_text(json.dumps(result, indent=1) + "\n")


def longest(record: Path) -> dict[str, Any]:
    """The longest tests of a record that take half of its seconds, and these seconds, of workers side by side."""
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(record).iter("testcase"):
        file = case.get("file", "")
        inside = case.get("classname", "")[len(file.removesuffix(".py")) + 1 :]
        parts = [file, *filter(None, inside.split(".")), case.get("name", "")]
        seconds["::".join(parts)] = float(case.get("time", 0))
    whole, chosen = sum(seconds.values()), 0.0
    tests = []
    for test in sorted(seconds, key=lambda test: -seconds[test]):
        if chosen >= SHARE * whole:
            break
        tests.append(test)
        chosen += seconds[test]
    return {"seconds": round(chosen), "seconds_of_all": round(whole), "num_tests": len(tests), "tests": sorted(tests)}


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """With so many processes that compute without end."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run(tests: list[str]) -> dict[str, Any]:
    """One run, as the full tier runs: its seconds, the load of the machine, and what failed."""
    with tempfile.TemporaryDirectory() as folder:
        record, chosen = Path(folder) / "record.xml", Path(folder) / "tests"
        chosen.write_text("\n".join(tests) + "\n")
        command = [sys.executable, "-m", "pytest", "-n", "3", "--dist", "worksteal", "-p", "no:cacheprovider", "-q"]
        command += [f"--junitxml={record}", "-o", "junit_family=xunit1", f"@{chosen}"]
        begun = time.monotonic()
        subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        seconds = time.monotonic() - begun
        cases = list(ElementTree.parse(record).iter("testcase"))
    if len(cases) < len(tests):
        raise SystemExit(f"{len(cases)} of {len(tests)} tests ran: choose them anew (--choose), or see what ended it.")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": [f"{case.get('classname')}.{case.get('name')}" for case in failed],
        "seconds": round(seconds),
        "load": round(os.getloadavg()[1], 1),
    }


if __name__ == "__main__":
    main()
