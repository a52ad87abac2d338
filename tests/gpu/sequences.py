"""Random sequences of what a user does with an engine between its steps, on CPU ranks and on GPU ranks.

    python tests/gpu/sequences.py [--minutes 4] [--parallel 4] [--first 0] [--kinds ...] [--shared] [--output FILE]

A case is a kind and a seed (:mod:`gpu.drawing`). It is played over gloo on the CPU and over NCCL on one GPU that all
ranks share; with ``--shared`` they send through the host's memory instead. Weights, optimizer states, losses and
evaluations must agree. The record is written after every case. With ``PACELINE_GPU_TESTS_ON=cpu`` both sides run on
the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.drawing import KINDS, Case, draw
from gpu.playing import play
from gpu.run import DETAILS, FAILED, PASSED, RANKS_S, REPOSITORY, Record, facts
from gpu.sides import EACH_A_HOST, ON_CPU, ONE_GPU, REHEARSAL
from support.archipelago import lighthouses
from support.expert_pipelines import joined
from support.ranks import RankTimeout, run_ranks

RESULTS = Path("tests/benchmarks/results/gpu_sequences.json")
PATIENCE_S = float(os.environ.get("PACELINE_TESTS_PATIENCE_S", RANKS_S))
"""Until ranks count as hanging."""
COMMAND = "python tests/gpu/sequences.py"
NOT_OVER = "not over"
SEQUENCES = ("losses", "evaluations")
SMALL = 1e-3
"""Added to what a difference is relative to: a tensor that is rounding may be anything."""


class _Record(Record):
    def write(self) -> None:
        self.about[NOT_OVER] = [name for name, case in self.tests.items() if case["outcome"] == NOT_OVER]
        super().write()


def main(argv: Sequence[str] | None = None) -> int:
    """Play cases until the time is up. 1 if something has failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="of this call")
    parser.add_argument("--parallel", type=int, default=4, help="cases at once")
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--shared", action="store_true", help="the GPU without NCCL")
    parser.add_argument("--output", type=Path, default=REPOSITORY / RESULTS)
    parser.add_argument("--commit", help="of the sources, where there is no git to ask")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * args.minutes
    record = _Record(args.output, facts(args.commit) | {"command": COMMAND})
    environment = ON_CPU if REHEARSAL else ONE_GPU if args.shared else EACH_A_HOST
    numbers = itertools.count()

    def work() -> None:
        while time.monotonic() < deadline:
            turn, place = divmod(next(numbers), len(args.kinds))
            case = draw(args.kinds[place], args.first + turn)
            told = compare(case, {"cpu": ON_CPU, "gpu": environment}, deadline)
            record.add({f"{case.kind}, {case.seed}": told})
            print(f"{told['outcome']:9s}{case.kind}, {case.seed}: {told['difference']}, {told['seconds']}", flush=True)

    workers = [threading.Thread(target=work) for _ in range(args.parallel)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    outcomes = [case["outcome"] for case in record.tests.values()]
    print(f"{args.output}: {', '.join(f'{outcomes.count(kind)} {kind}' for kind in (PASSED, FAILED, NOT_OVER))}")
    return 1 if FAILED in outcomes else 0


def compare(case: Case, sides: Mapping[str, Mapping[str, str]], deadline: float) -> dict[str, Any]:
    """Play a case on both sides, by their environments; what to write of it.

    Args:
        deadline: of :func:`time.monotonic`. What is cut there is not over; what runs past its patience hangs.
    """
    seconds: dict[str, float] = {}
    told = {"kind": case.kind, "seed": case.seed, "outcome": FAILED, "difference": None, "limit": case.limit}
    told |= {"seconds": seconds, "operations": len(case.operations)}
    found = []
    patience_s, side = PATIENCE_S, ""
    try:
        for side, environment in sides.items():
            begun = time.monotonic()
            patience_s = max(1.0, min(PATIENCE_S, deadline - begun))
            env = {"PACELINE_ISLAND": "0", **environment}
            with tempfile.TemporaryDirectory(prefix="gpu-sequences-") as folder, lighthouses(1) as (address,):
                found.append(run_ranks(play, case.ranks, case, folder, address, timeout=patience_s, env=env))
            seconds[side] = round(time.monotonic() - begun, 1)
        wanted, gpu = found
        apart = differences(gpu, wanted)
    except Exception as error:
        if isinstance(error, RankTimeout) and patience_s < PATIENCE_S:
            told["outcome"] = NOT_OVER
        details = f"{side}: {type(error).__name__}: {error}"
        return told | {"details": details[-DETAILS:], "drawn": asdict(case)}
    where = max(apart, key=lambda name: apart[name])
    told |= {"difference": float(f"{apart[where]:.3g}"), "where": where}
    if apart[where] <= case.limit:
        return told | {"outcome": PASSED}
    far = sorted((name for name in apart if apart[name] > case.limit), key=lambda name: -apart[name])
    details = "\n".join(f"{name}: {apart[name]:.3g}" for name in far)
    return told | {"details": details[:DETAILS], "drawn": asdict(case)}


def differences(found: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Relative ones by name: of weights, optimizer states, and each rank's losses and evaluations, by norms."""
    ours, theirs = (
        {", ".join(key): rows for key, rows in joined(list(side)).items()}
        | {f"{what}, rank {rank}": torch.tensor(own[what]) for rank, own in enumerate(side) for what in SEQUENCES}
        for side in (found, wanted)
    )
    lacking = {f"{name} on one side": math.inf for name in ours.keys() ^ theirs.keys()}
    return lacking | {name: _apart(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}


def _apart(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return math.inf
    apart = float((found.double() - wanted.double()).norm() / (wanted.double().norm() + SMALL))
    return apart if math.isfinite(apart) else math.inf


if __name__ == "__main__":
    sys.exit(main())
