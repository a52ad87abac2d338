"""A campaign: many cases on a few workers, what came of them, and failures made as small as they can be."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.fuzzing.cases import Case
from benchmarks.fuzzing.values import dump

TESTS = Path(__file__).resolve().parents[2]
BATCH = 40
MOST_TRIES, MOST_S = 200, 120.0
"""Calls, and seconds, that making one failure smaller may take."""

SLOWEST = 10


class Worker:
    """A process that runs cases in children of its own (:mod:`benchmarks.fuzzing.worker`)."""

    def __init__(self, inputs: Path) -> None:
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fuzzing.worker", str(inputs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **quiet, "PYTHONPATH": path},
        )

    def run(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Their results, in order."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([case.to_dict() for case in cases]) + "\n")
        self.process.stdin.flush()
        lines = [self.process.stdout.readline() for _ in cases]
        if not all(lines):
            raise RuntimeError(f"a worker ended with {self.process.wait()}")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=60)


@contextlib.contextmanager
def workers(count: int, inputs: Path) -> Iterator[list[Worker]]:
    """So many, ended at the end."""
    started = [Worker(inputs) for _ in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            worker.close()


def run(
    crew: Sequence[Worker], cases: Iterator[Case], tell: Callable[[int, list[str]], None] = lambda done, failed: None
) -> list[tuple[Case, dict[str, Any]]]:
    """All cases with their results, in order of their numbers.

    Args:
        tell: hears now and then how many are done, and which have failed since it heard last.
    """
    found: list[tuple[Case, dict[str, Any]]] = []
    faults: list[BaseException] = []
    lock = threading.Lock()

    def work(worker: Worker) -> None:
        try:
            while not faults:
                with lock:
                    batch = list(islice(cases, BATCH))
                if not batch:
                    return
                results = worker.run(batch)
                with lock:
                    found.extend(zip(batch, results, strict=True))
                    failed = zip(batch, results, strict=True)
                    tell(len(found), [f"{c.command} {c.number}: {r['problem']}" for c, r in failed if r["problem"]])
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in crew]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return sorted(found, key=lambda pair: pair[0].number)


def signature(problem: str) -> str:
    """What failures of one cause have in common."""
    return re.sub(r"[\d.]+|: .*", "", problem, flags=re.DOTALL)


def failures(
    worker: Worker, results: Sequence[tuple[Case, dict[str, Any]]], most: int = 60
) -> tuple[list[dict[str, Any]], int]:
    """One failure of each kind, as small as it can be; and how many took too long, but not when they were alone."""
    kinds: dict[tuple[str, str], list[tuple[Case, dict[str, Any]]]] = defaultdict(list)
    for case, result in results:
        if result["problem"]:
            kinds[case.command, signature(result["problem"])].append((case, result))
    told, passed = [], 0
    for (command, kind), members in list(kinds.items())[:most]:
        if kind.startswith(("ran past", "hangs", "TimeoutExpired")):  # or another one had the machine
            for case, result in list(members):
                again = worker.run([case])[0]
                if not again["problem"]:
                    result.update(again)
                    members.remove((case, result))
                    passed += 1
            if not members:
                continue
        case, result = min(members, key=lambda member: len(json.dumps(member[0].to_dict())))
        again = worker.run([case])[0]
        if not again["problem"]:
            again = {**result, "problem": f"{result['problem']} (but not alone)"}
        is_slow = result["seconds"] > 5 or "but not alone" in again["problem"]
        small = case if is_slow else shrunk(worker, case, signature(again["problem"]))
        told.append(
            {
                "command": command,
                "problem": again["problem"],
                "cases": len(members),
                "number": case.number,
                "stderr": again["stderr"][-300:],
                "case": shown(small),
            }
        )
    return told, passed


def shown(case: Case) -> dict[str, Any]:
    """A case without what is empty; contents as text where they are."""
    values = {key: value for key, value in case.to_dict().items() if value}
    for name, data in case.files.items():
        with contextlib.suppress(UnicodeDecodeError):
            values["files"] = {**values["files"], name: {"text": bytes.fromhex(data).decode()}}
    return values


def read(values: dict[str, Any]) -> Case:
    """The inverse of :func:`shown`."""
    files = {
        name: data["text"].encode().hex() if isinstance(data, dict) else data
        for name, data in values.get("files", {}).items()
    }
    return Case(**{"number": 0, **values, "files": files})


def shrunk(worker: Worker, case: Case, kind: str) -> Case:
    """The smallest case found that fails in the same way."""
    tries, begun = 0, time.monotonic()
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(case):
            tries += 1
            if tries > MOST_TRIES or time.monotonic() - begun > MOST_S:
                return case
            if signature(worker.run([smaller])[0]["problem"]) == kind:
                case, is_smaller = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    def changed(**changes: Any) -> Case:
        smaller = copy.deepcopy(case)
        for name, value in changes.items():
            setattr(smaller, name, value)
        return smaller

    for length in (4, 2, 1):
        for at in range(len(case.argv) - length + 1):
            yield changed(argv=case.argv[:at] + case.argv[at + length :])
    for at, word in enumerate(case.argv):
        if len(word) > 20:
            yield changed(argv=[*case.argv[:at], word[: len(word) // 2], *case.argv[at + 1 :]])
    for at in range(len(case.edits)):
        yield changed(edits=case.edits[:at] + case.edits[at + 1 :])
    for name in case.env:
        yield changed(env={key: value for key, value in case.env.items() if key != name})
    for name, data in case.files.items():
        for smaller in _smaller_file(bytes.fromhex(data)):
            yield changed(files={**case.files, name: smaller.hex()})


def _smaller_file(data: bytes) -> Iterator[bytes]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        lines = data.splitlines(keepends=True)
        for count in (len(lines) // 2, 1):
            for at in range(0, len(lines), max(1, count)):
                if count and len(lines) > 1:
                    yield b"".join(lines[:at] + lines[at + count :])
        if len(data) > 1:
            yield data[: len(data) // 2]
            yield data[len(data) // 2 :]
        return
    for smaller in _smaller_document(document):
        yield dump(smaller).encode("utf-8", "surrogatepass")


def _smaller_document(document: Any) -> Iterator[Any]:
    try:
        if isinstance(document, dict):
            for key, value in document.items():
                yield {other: kept for other, kept in document.items() if other != key}
                for smaller in _smaller_document(value):
                    yield {**document, key: smaller}
        elif isinstance(document, list):
            for at, value in enumerate(document):
                yield document[:at] + document[at + 1 :]
                for smaller in _smaller_document(value):
                    yield [*document[:at], smaller, *document[at + 1 :]]
        elif isinstance(document, str) and len(document) > 8:
            yield document[: len(document) // 2]
    except RecursionError:
        return


def summary(results: Iterable[tuple[Case, dict[str, Any]]]) -> dict[str, Any]:
    """Cases by command and outcome, what took longest, and the most memory that one took."""
    results = list(results)
    by_command: dict[str, Counter[str]] = defaultdict(Counter)
    for case, result in results:
        process = " (process)" if case.call == "program" else ""
        by_command[f"{case.command}{process}"][result["outcome"]] += 1
    slowest = sorted(results, key=lambda pair: -pair[1]["seconds"])[:SLOWEST]
    return {
        "by_outcome": dict(sorted(Counter(result["outcome"] for _, result in results).items())),
        "by_command": {
            name: {"cases": found.total(), **dict(sorted(found.items()))} for name, found in sorted(by_command.items())
        },
        "slowest": [
            {
                "command": case.command,
                "call": case.call,
                "number": case.number,
                "argv": [word[:60] for word in case.argv],
                "seconds": round(result["seconds"], 2),
            }
            for case, result in slowest
        ],
        "most_resident_gib": round(max((result["resident"] for _, result in results), default=0) / 2**30, 3),
    }
