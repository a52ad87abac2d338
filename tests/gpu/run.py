"""All tests of GPUs, the most valuable first, and a record of what each of them found, with hardware and versions.

    python tests/gpu/run.py [--minutes 9] [--parallel 4] [--output FILE] [--previous FILE]

A call ends after so many minutes; the next one goes on with what has not passed, as long as sources and hardware are
the same. The record is written after every test, and a failure, a crash or a hang does not stop the others. Nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = Path("tests/benchmarks/results/gpu.json")
ONE_GPU, NCCL = "test_capabilities.py", "test_nccl.py"
FILES = (
    ONE_GPU,
    "test_staging.py",
    "test_checkpoint_snapshot.py",
    "test_natural_gradient.py",
    "test_migration.py",
    "test_single_gpu.py",
    NCCL,
)
"""In the order of their value; what a file has first comes first."""
LONG = (ONE_GPU, "test_migration.py", "test_single_gpu.py", NCCL)
"""Files whose tests take a process each: what one has found is not lost with the next at the end of a call."""
FIRST = 8
"""Capabilities that come before the other files."""

TEST_S = 300.0
"""Until a test counts as hanging; ranks are given up on before that, and say where they are."""
RANKS_S = 120.0
SOURCES = ("integration/paceline", "patches", "launch", "tests/gpu", "tests/support")
REHEARSAL = "CPU (rehearsal)"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "torchft")
DETAILS = 20_000
"""Characters that are kept of a failure, its end: the stacks of four ranks."""


@dataclass
class Record:
    """What is written."""

    path: Path
    about: dict[str, Any]
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, found: Mapping[str, dict[str, Any]]) -> None:
        with self._lock:
            self.tests |= found
            self.write()

    def write(self) -> None:
        counts = {kind: sum(t["outcome"] == kind for t in self.tests.values()) for kind in (PASSED, FAILED, SKIPPED)}
        whole = {**self.about, "counts": counts, "tests": self.tests}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
        draft.replace(self.path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left to run. 0 if nothing has failed and nothing is left, 1 if something has, 3 if time is up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    at_once = max(1, min(4, (os.cpu_count() or 1) // 4))
    parser.add_argument("--parallel", type=int, default=at_once, help="tests at once")
    parser.add_argument("--output", type=Path, default=REPOSITORY / RESULTS)
    parser.add_argument("--previous", type=Path, help="a record to go on from (default: the output)")
    parser.add_argument("--again", action="store_true", help="also what has passed")
    parser.add_argument("--commit", help="of the sources, where there is no git to ask")
    parser.add_argument("--only", nargs="+", default=[""], help="tests whose names contain one of these, in this order")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * args.minutes
    record = Record(args.output, facts(args.commit))
    if not args.again:
        record.tests = _passed(args.previous or args.output, record.about)
    record.write()
    tests = collect()
    todo = list(dict.fromkeys(test for part in args.only for test in tests if part in test))
    record.add(lacking_a_gpu(todo, len(record.about["hardware"]["gpus"]), record.about["on"] == REHEARSAL))
    groups = [group for group in grouped(todo) if not all(test in record.tests for test in group)]
    print(f"{len(todo)} tests, {sum(map(len, groups))} to run, {args.parallel} at once", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-tests-shared-") as shared:
        os.environ["PACELINE_GPU_TESTS_SHARED"] = shared
        left = run_all(groups, record, args.parallel, deadline)
    failed = [name for name in todo if record.tests.get(name, {}).get("outcome") == FAILED]
    print(f"{args.output}: {json.loads(args.output.read_text())['counts']}, {left} not run")
    for name in failed:
        print(f"FAILED {name}: {record.tests[name]['details'].strip().splitlines()[-1]}")
    return 1 if failed else 3 if left else 0


def _passed(previous: Path, about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a record of the same sources on the same hardware has of tests that need not run again."""
    if not previous.is_file():
        return {}
    known = json.loads(previous.read_text())
    if any(known[key] != about[key] for key in ("sources", "hardware", "versions", "on")):
        return {}
    return {name: test for name, test in known["tests"].items() if test["outcome"] in (PASSED, SKIPPED)}


# -- what there is -----------------------------------------------------------------------------------------------------


def collect() -> list[str]:
    """All tests, as pytest names them, in the order in which they run."""
    files = [f"tests/gpu/{file}" for file in FILES]
    told = _told([*_PYTEST, "--collect-only", "-q", *files])
    found = [line for line in told.stdout.splitlines() if line.startswith("tests/gpu/") and "::" in line]
    if told.returncode or not found:
        raise SystemExit(f"the tests cannot be collected:\n{told.stdout}\n{told.stderr}")
    capabilities = [test for test in found if ONE_GPU in test]
    others = [test for test in found if ONE_GPU not in test]
    early = [test for test in others if NCCL not in test]
    return [*capabilities[:FIRST], *early, *capabilities[FIRST:], *(test for test in others if test not in early)]


def grouped(tests: Sequence[str]) -> list[list[str]]:
    """The tests that one process runs: a long one, or a file of short ones."""
    groups: dict[str, list[str]] = {}
    for test in tests:
        file = test.partition("::")[0]
        groups.setdefault(test if file.endswith(LONG) else file, []).append(test)
    return list(groups.values())


def lacking_a_gpu(tests: Sequence[str], num_gpus: int, is_rehearsal: bool) -> dict[str, dict[str, Any]]:
    """Tests that lack a GPU, as skipped: no process is started to find that out."""
    found = {}
    for test in tests:
        is_rehearsed = is_rehearsal and test.partition("::")[0].endswith(ONE_GPU)
        if num_gpus == 0 and not is_rehearsed:
            why = "needs a GPU: run it on a machine with one"
            found[test] = {"outcome": SKIPPED, "seconds": 0.0, "details": why}
    return found


# -- running -----------------------------------------------------------------------------------------------------------

_PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", "-W", "default")


def _environment() -> dict[str, str]:
    path = [str(REPOSITORY / "integration"), *filter(None, [os.environ.get("PYTHONPATH")])]
    patience = {"PACELINE_TESTS_PATIENCE_S": os.environ.get("PACELINE_TESTS_PATIENCE_S", str(RANKS_S))}
    # Where several test processes each set up a cache of their own, none may wait for another's lock.
    return {**os.environ, **patience, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}


def run_all(groups: Sequence[Sequence[str]], record: Record, parallel: int, deadline: float) -> int:
    """Run them, some at once; how many tests there was no time for."""
    waiting: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()
    for group in groups:
        waiting.put(group)

    def work(number: int) -> None:
        while time.monotonic() < deadline:
            try:
                group = waiting.get_nowait()
            except queue.Empty:
                return
            found = run_group(group, deadline, {"PACELINE_TESTS_PORTS": f"{number}/{parallel}"})
            record.add(found)
            for name, test in found.items():
                print(f"{test['outcome']:8s}{test['seconds']:7.1f} s  {name.partition('::')[2]}", flush=True)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(parallel)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(test not in record.tests for group in groups for test in group)


def run_group(tests: Sequence[str], deadline: float, env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The tests of one process, which sees ``env`` too.

    Those that it did not come to have failed, or were not run where the time was up.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-tests-") as folder:
        report, output = Path(folder, "report.xml"), Path(folder, "output")
        begun = time.monotonic()
        limit = min(TEST_S * len(tests), max(1.0, deadline - begun))
        command = [*_PYTEST, "-q", "--tb=short", f"--junitxml={report}", f"--basetemp={folder}/tests", *tests]
        with output.open("w") as file:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=_environment() | env, stdout=file, stderr=file, start_new_session=True
            )
            try:
                status: Any = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = f"not over after {limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ranks end with it
                process.wait()
        seconds = time.monotonic() - begun
        found = read_report(report, tests) if report.exists() else {}
        if isinstance(status, str) and time.monotonic() >= deadline:
            return found
        told = f"{output.read_text(errors='replace')}\nthe process ended with: {status}"[-DETAILS:]
        missing = {"outcome": FAILED, "seconds": round(seconds, 1), "details": told}
        return {test: found.get(test, missing) for test in tests}


def read_report(report: Path, tests: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each test: ``outcome``, ``seconds``, ``differences`` from the CPU, ``details`` of what was not well."""
    by_name = {test.partition("::")[2]: test for test in tests}
    found: dict[str, dict[str, Any]] = {}
    for case in ET.parse(report).iter("testcase"):
        name = by_name.get(case.attrib["name"])
        if name is None:
            continue
        test: dict[str, Any] = {"outcome": PASSED, "seconds": round(float(case.attrib["time"]), 1)}
        for kind, outcome in (("failure", FAILED), ("error", FAILED), ("skipped", SKIPPED)):
            for told in case.iter(kind):
                details = told.attrib.get("message", "") if outcome == SKIPPED else told.text or ""
                test |= {"outcome": outcome, "details": details[-DETAILS:]}
        for told in case.iter("property"):
            if told.attrib["name"] == "differences":
                test["differences"] = ast.literal_eval(told.attrib["value"])
        found[name] = test
    return found


# -- what it ran on ----------------------------------------------------------------------------------------------------


def facts(commit: str | None) -> dict[str, Any]:
    """Hardware, versions, sources."""
    import torch

    has_gpu = torch.cuda.is_available()
    versions = {name: _version(name) for name in PACKAGES}
    if has_gpu:
        versions |= {
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if has_gpu else []
    return {
        "command": "python tests/gpu/run.py",
        "on": REHEARSAL if os.environ.get("PACELINE_GPU_TESTS_ON") == "cpu" else "GPU",
        "hardware": {"gpus": gpus, "cores": os.cpu_count(), "machine": platform.machine()},
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit or _commit(),
        "sources": _digest(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    told = _told([tool, "--query-gpu=driver_version", "--format=csv,noheader"])
    return told.stdout.strip().partition("\n")[0] or None


def _commit() -> str | None:
    told = _told(["git", "rev-parse", "--short", "HEAD"])
    if told.returncode:
        return None
    changed = _told(["git", "status", "--porcelain"])
    return told.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def _told(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY, env=_environment())


def _digest() -> str:
    """Of what the tests are of: a record of other sources says nothing of these."""
    whole = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(REPOSITORY.glob(pattern)):
            for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
                whole.update(str(file.relative_to(REPOSITORY)).encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()[:16]


if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "integration")]  # without pytest, from anywhere
    sys.exit(main())
