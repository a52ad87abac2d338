"""Wrong input of every kind into everything that takes input: no traceback, no hang, no message that says nothing.

    python tests/benchmarks/fuzz.py [--cases 12000] [--seed 0] [--workers 2] [--processes 210]

Calls every ``paceline`` command, what reads and resolves a DeepSpeed JSON, the job's flags and its environment with
inputs that are mostly one step away from valid ones (``fuzzing/``). A call fails if another exception than SystemExit
leaves it, if a traceback is printed, if it ends with a status that means nothing, without a message or with
one of more than 1500 characters, with ``--json`` and no JSON, or runs past its time (20 s of computing) or memory
(3 GiB of addresses, 1.5 GiB in use). Failures are made as small as they can be and written into the report;
``--repeat REPORT`` runs them again, ``--case N`` the case of that number.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from benchmarks.fuzzing.campaign import failures, read, run, shown, summary, workers
from benchmarks.fuzzing.cases import Cases
from benchmarks.fuzzing.inputs import make
from benchmarks.fuzzing.values import noise

NOISE = 1500
"""Values that hypothesis makes up, which replace others."""


def main() -> int:
    args = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        inputs = args.inputs or Path(folder) / "inputs"
        if not inputs.exists():
            make(inputs)
        if args.repeat is not None or args.case is not None:
            return _again(args, inputs)
        return _campaign(args, inputs)


def _campaign(args: argparse.Namespace, inputs: Path) -> int:
    cases = Cases(inputs, args.seed, noise(args.seed, NOISE))
    begun = time.monotonic()

    def tell(done: int, failed: list[str]) -> None:
        if failed or done % 400 < 40:
            print("\n".join([f"{done} cases, {time.monotonic() - begun:.0f} s", *failed]), flush=True)

    numbers = range(args.cases - args.processes)
    with workers(args.workers, inputs) as crew:
        results = run(crew, (cases(number) for number in numbers), tell)
        results += run(crew, (cases(number, own_process=True) for number in range(args.processes)), tell)
        told, passed = failures(crew[0], results)
    report: dict[str, Any] = {
        **facts(args, "repeat", "case", "inputs"),
        "cases": len(results),
        "failed": sum(failure["cases"] for failure in told),
        "passed_when_alone": passed,
        "duration_s": round(time.monotonic() - begun, 1),
        **summary(results),
        "failures": told,
        "repeat": f"python tests/benchmarks/fuzz.py --repeat {args.output.name}",
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in ("cases", "failed", "duration_s", "by_outcome")}))
    for failure in told:
        print(f"{failure['command']}: {failure['problem']} ({failure['cases']} cases)")
    return 1 if told else 0


def _again(args: argparse.Namespace, inputs: Path) -> int:
    if args.repeat is not None:
        again = [read(failure["case"]) for failure in json.loads(args.repeat.read_text())["failures"]]
    else:
        again = [Cases(inputs, args.seed, noise(args.seed, NOISE))(args.case, own_process=args.own_process)]
    failed = 0
    with workers(1, inputs) as crew:
        for case in again:
            result = crew[0].run([case])[0]
            failed += bool(result["problem"])
            print(json.dumps(shown(case))[:3000])
            print(f"  {result['outcome']}, {result['seconds']:.2f} s: {result['problem'] or result['stderr'].strip()}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12_000, help="all together")
    parser.add_argument("--processes", type=int, default=210, help="of these, as processes of their own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fuzz.json")
    parser.add_argument("--repeat", type=Path, metavar="REPORT", help="run the failures of a report again")
    parser.add_argument("--case", type=int, metavar="N", help="run one case")
    parser.add_argument("--own-process", action="store_true", help="with --case: of those that are processes")
    parser.add_argument(
        "--inputs", type=Path, metavar="DIR", help="keep valid inputs there, or take those that are there"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
