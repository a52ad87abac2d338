"""Hours of training in which everything goes wrong: nothing lost, nothing left behind, no leak, no drift.

    python tests/benchmarks/soak.py [--minutes 125] [--seed 0] [--continue]

Needs root (tests/lab). Small Hugging Face models are trained by the main job on four hosts, in one episode after
another, drawn from the seed (``soaking/episodes.py``): stages, replicas, schedule, partition, ZeRO, precision,
experts that move, natural gradients, islands. The rates of links change all the time, ranks are slowed down, ranks and
launchers are killed or told to stop, the disk is full; each time the job is started again, also in another shape. One
episode, a quarter of the time, has no accidents: it is for leaks.

An episode fails if a job hangs or ends by itself; if processes, namespaces or files stay behind; if memory, descriptors
or threads of a process grow; if a step, a sample or a checkpoint is lost or there twice; or if losses, weights and
optimizer states are not those of its reference, in every bit where `runtime/README.md` says so. The report is written
after each episode; ``--continue`` goes on with one until the time is full, and ``--only N`` runs one episode again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from facts import facts

from benchmarks.soaking.episode import run_episode
from benchmarks.soaking.episodes import ACCIDENTS, LONG, draw
from benchmarks.soaking.flatness import LEAST_SECONDS_OF_MEMORY
from benchmarks.soaking.inputs import make
from benchmarks.soaking.run import Inputs
from lab.hosts import available

LONG_SHARE = 0.26
"""Of the time, for the episode without accidents."""


def main() -> int:
    args = _parser().parse_args()
    if reason := available():
        sys.exit(reason)
    signal.signal(signal.SIGTERM, _stop)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=args.folder))
    keeps = True
    try:
        inputs = make(folder / "inputs")
        keeps = _only(args, inputs, folder) if args.only is not None else _soak(args, inputs, folder)
    except (KeyboardInterrupt, SystemExit):
        keeps = False
        raise
    finally:
        if keeps:
            print(f"logs of what failed: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return int(keeps)


def _stop(*_: object) -> None:
    """On SIGTERM: all that was started ends, and the report of the episodes so far stays."""
    print("stopped by SIGTERM; go on with --continue", file=sys.stderr)
    sys.exit(143)


def _only(args: argparse.Namespace, inputs: Inputs, folder: Path) -> bool:
    result = _run(args, args.only, inputs, folder)
    print(json.dumps(result, indent=1))
    return bool(result["problems"])


def _soak(args: argparse.Namespace, inputs: Inputs, folder: Path) -> bool:
    """Episodes until the time is full. Returns whether one of them, also of those before, failed or too little was
    seen."""
    episodes: list[dict[str, Any]] = _earlier(args) if args.go_on else []
    while not _is_full(args, episodes):
        result = _run(args, len(episodes), inputs, folder)
        episodes.append({**result, "commit": facts(args)["commit"]})
        _write(args, episodes)
    report = _report(args, episodes)
    print(json.dumps(report["totals"] | {"lacking": report["lacking"]}, indent=1))
    return not report["passed"]


def _run(args: argparse.Namespace, number: int, inputs: Inputs, folder: Path) -> dict[str, Any]:
    episode = draw(args.seed, number)
    begun = time.strftime("%H:%M:%S")
    kinds = [accident.how for accident in episode.accidents]
    print(f"{begun} episode {number}, {episode.kind}: {kinds or 'no accidents'}", flush=True)
    seconds = 60 * args.minutes * LONG_SHARE
    result = run_episode(episode, inputs, folder / f"episode{number}", args.patience, seconds)
    print(f"  {result['outcome']} after {result['seconds']:.0f} s, {result.get('steps', 0)} steps", flush=True)
    for problem in result["problems"]:
        print(f"  {problem}", flush=True)
    return result


def _earlier(args: argparse.Namespace) -> list[dict[str, Any]]:
    if not args.output.exists():
        return []
    report = json.loads(args.output.read_text())
    if report["settings"]["seed"] != args.seed:
        sys.exit(f"{args.output} has the seed {report['settings']['seed']}: go on with --seed of that, or elsewhere")
    return list(report["episodes"])


def _seconds(episodes: list[dict[str, Any]]) -> float:
    return float(sum(episode["seconds"] for episode in episodes))


def _is_full(args: argparse.Namespace, episodes: list[dict[str, Any]]) -> bool:
    has_long = any(episode["kind"] == LONG for episode in episodes)
    return has_long and _seconds(episodes) >= 60 * args.minutes


def _write(args: argparse.Namespace, episodes: list[dict[str, Any]]) -> None:
    args.output.parent.mkdir(parents=True, exist_ok=True)
    draft = args.output.with_suffix(".tmp")
    draft.write_text(json.dumps(_report(args, episodes), indent=1) + "\n")
    draft.replace(args.output)


def _report(args: argparse.Namespace, episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """``passed``: the time is full, a long episode is among them, none has failed, and nothing is lacking of what shows
    that there was something to withstand."""
    minutes = _seconds(episodes) / 60
    failed = [episode["number"] for episode in episodes if episode["outcome"] != "passed"]
    accidents = [one for episode in episodes for one in episode.get("accidents", ()) if one["at_step"] != "too late"]
    growths = [
        process
        for episode in episodes
        for start in episode.get("memory", ())
        for process in start.values()
        if isinstance(process, dict)
    ]
    totals = {
        "minutes": round(minutes, 1),
        "episodes": len(episodes),
        "failed": failed,
        "by_kind": Counter(episode["kind"] for episode in episodes),
        "steps": sum(episode.get("steps", 0) for episode in episodes),
        "accidents": Counter(one["how"] for one in accidents),
        "longest_end_s": max((one["ended_s"] for one in accidents), default=None),
        "rate_changes": sum(episode.get("rate_changes", 0) for episode in episodes),
        "slowed": sum((Counter(episode.get("slowed", {})) for episode in episodes), Counter()),
        "processes_watched": len(growths),
        "largest_growth_mb": max((process["rss_growth_mb"] for process in growths), default=None),
        "longest_watch_s": max((process["seconds"] for process in growths), default=None),
    }
    switched = [key for episode in episodes for key in episode.get("decisions", {}) if key != "looks"]
    evidence = {
        "accidents of every kind": totals["accidents"].keys() >= set(ACCIDENTS),
        "rates that changed": totals["rate_changes"],
        "ranks that were slowed down": totals["slowed"],
        "schedules and partitions that changed": {"schedule", "partition"} <= set(switched),
        "memory watched for long enough": (totals["longest_watch_s"] or 0) >= LEAST_SECONDS_OF_MEMORY,
    }
    lacking = [what for what, is_there in evidence.items() if not is_there]
    return {
        "passed": _is_full(args, episodes) and not failed and not lacking,
        "is_full": _is_full(args, episodes),
        "lacking": lacking,
        "totals": totals,
        **facts(args, "go_on", "only", "folder"),
        "repeat": f"python tests/benchmarks/soak.py --seed {args.seed} --only NUMBER",
        "episodes": episodes,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=125.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="go on with the report that is there")
    parser.add_argument("--only", type=int, metavar="N", help="run this episode and print what came of it")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds without a step that are a hang")
    parser.add_argument("--folder", type=Path, help="where to work; a folder for temporary files if left out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
