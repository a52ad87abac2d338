"""``paceline simulate``: how long a step of a pipeline schedule would take, without a cluster."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.schedules.costs import Costs
    from paceline.schedules.schedule import Schedule
    from paceline.schedules.simulate import Simulation

_DEFAULTS: dict[str | None, dict[str, Any]] = {"kfkb": {"k": 2}, "eager": {"slack": 1.0}}
_SHAPE = ("stages", "micro_batches", "schedule", "k", "slack")
_SECONDS = ("forward", "backward", "transfer", "latency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    shape = parser.add_argument_group("schedule")
    shape.add_argument(
        "--stages", type=int, metavar="S", help="pipeline stages, one a rank (with --costs: as many as it has)"
    )
    shape.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches of a step")
    shape.add_argument("--schedule", metavar="TYPE", help="1f1b (default), gpipe, kfkb or eager")
    shape.add_argument("--k", type=int, help="of kfkb: micro-batches in a group (default 2)")
    shape.add_argument(
        "--slack", type=float, metavar="X", help="of eager: the warm-up is 1 + X times that of 1f1b (default 1)"
    )
    shape.add_argument(
        "--schedule-file", metavar="FILE", help="a schedule in text form instead: rank 0: F0 F1 B0 B1 ..."
    )
    shape.add_argument(
        "--compare",
        action="store_true",
        help="side by side: 1f1b, kfkb of k = 2, 4, 8 and so on, eager of slack 1 and 2, gpipe",
    )
    costs = parser.add_argument_group("costs, in seconds: one number, or several with commas between them")
    costs.add_argument("--forward", type=_numbers, metavar="F", help="forward of a micro-batch; one a stage")
    costs.add_argument("--backward", type=_numbers, metavar="B", help="backward of a micro-batch; one a stage")
    costs.add_argument(
        "--transfer",
        type=_numbers,
        metavar="C",
        help="what an activation, or a gradient, occupies its link for; one a boundary (default 0)",
    )
    costs.add_argument(
        "--latency", type=_numbers, metavar="L", help="how much later it arrives; one a boundary (default 0)"
    )
    costs.add_argument(
        "--costs",
        metavar="FILE",
        help="a JSON of all costs instead, memory too: the fields of paceline.schedules.Costs",
    )
    parser.add_argument("--draw", metavar="FILE", help="timelines as a picture: .svg or .png")
    parser.add_argument("--trace", metavar="FILE", help="timelines as a trace for ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    """The command; its exit status.

    Raises:
        ValueError: flags that do not go together, a file that is none, or no schedule.
    """
    from paceline.schedules.simulate import simulate

    costs = _costs_of_file(args) if args.costs else None
    schedules = _schedules(args, costs)
    if costs is None:
        costs = _costs_of_flags(args, schedules[0].num_stages)
    with_timeline = bool(args.draw or args.trace)
    steps = [simulate(schedule, costs, timeline=with_timeline, critical_path=True) for schedule in schedules]
    timelines = [step.timeline for step in steps if step.timeline is not None]
    if args.draw:
        from paceline.report.timeline import draw

        draw(timelines, args.draw)
    if args.trace:
        from paceline.report.perfetto import write_trace

        write_trace(timelines, args.trace)
    rows = [_facts(schedule, step) for schedule, step in zip(schedules, steps, strict=True)]
    if args.json:
        print(json.dumps(rows if args.compare else rows[0], indent=2))
    else:
        print(_comparison(rows) if args.compare else _text(rows[0]))
    return 0


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number and no list of numbers like 0.02,0.03") from None


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What is left out is as in the config."""
    defaults = _DEFAULTS.get(args.schedule, {})
    given = {name: getattr(args, name) for name in ("k", "slack") if getattr(args, name) is not None}
    return {**defaults, **given}


def _refuse_together(args: argparse.Namespace, flag: str, others: tuple[str, ...]) -> None:
    both = [f"--{name.replace('_', '-')}" for name in others if getattr(args, name) not in (None, False)]
    if both:
        raise ValueError(f"{flag} says what {', '.join(both)} would say: give one or the other.")


def _read(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ValueError(f"{path}: {reason}; give a file with {what}.") from None


def _costs_of_file(args: argparse.Namespace) -> Costs:
    from paceline.schedules.costs import Costs

    _refuse_together(args, "--costs", _SECONDS)
    text = _read(args.costs, "the JSON of the costs")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{args.costs}, line {error.lineno}, column {error.colno}: {error.msg}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{args.costs}: holds {type(values).__name__}, costs are an object {{...}}.")
    try:
        return Costs.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{args.costs}: {error}") from None


def _costs_of_flags(args: argparse.Namespace, num_stages: int) -> Costs:
    from paceline.schedules.costs import Costs, Link

    def spread(name: str, count: int, what: str) -> tuple[float, ...]:
        given: tuple[float, ...] | None = getattr(args, name)
        if given is None and name in ("forward", "backward"):
            raise ValueError(f"--{name} is missing: give its seconds, or all costs with --costs.")
        given = given or (0.0,)
        if len(given) not in (1, count):
            raise ValueError(f"--{name} has {len(given)} numbers: give one, or {count}, one a {what}.")
        return given * count if len(given) == 1 else given

    for name in _SECONDS:
        for value in getattr(args, name) or ():
            if not 0 <= value < float("inf"):
                raise ValueError(f"--{name} {value:g} is no number of seconds from 0 upwards.")
    transfers, latencies = (spread(name, num_stages - 1, "boundary") for name in ("transfer", "latency"))
    # A message of as many bytes as it takes seconds, over one byte a second.
    links = tuple(Link(1.0, latency) for latency in latencies)
    return Costs(
        forward_s=spread("forward", num_stages, "stage"),
        backward_s=spread("backward", num_stages, "stage"),
        message_bytes=transfers,
        down=links,
        up=links,
    )


def _schedules(args: argparse.Namespace, costs: Costs | None) -> list[Schedule]:
    from paceline.schedules import make

    if args.schedule_file:
        from paceline.schedules.text import from_text

        _refuse_together(args, "--schedule-file", (*_SHAPE, "compare"))
        return [from_text(_read(args.schedule_file, "a schedule in text form"))]
    num_stages = args.stages if args.stages is not None or costs is None else len(costs.forward_s)
    for name, value in (("stages", num_stages), ("micro-batches", args.micro_batches)):
        if value is None:
            raise ValueError(f"--{name} is missing: give a number, or a schedule with --schedule-file.")
    if not args.compare:
        return [make(args.schedule or "1f1b", num_stages, args.micro_batches, **_options(args))]
    _refuse_together(args, "--compare", ("schedule", "k", "slack"))
    groups = [2**power for power in range(1, 64) if 2**power < args.micro_batches]
    return [
        make("1f1b", num_stages, args.micro_batches),
        *(make("kfkb", num_stages, args.micro_batches, k=k) for k in groups),
        *(make("eager", num_stages, args.micro_batches, slack=slack) for slack in (1.0, 2.0)),
        make("gpipe", num_stages, args.micro_batches),
    ]


def _facts(schedule: Schedule, step: Simulation) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "stages": schedule.num_stages,
        "micro_batches": schedule.num_micro_batches,
        "makespan_s": step.makespan_s,
        "bubble_fraction": step.bubble_fraction,
        "critical_path_s": step.critical_s,
        "peak_activations": step.peak_activations,
        "peak_bytes": step.peak_bytes,
        "busy_s": step.busy_s,
        "idle_s": step.idle_s,
    }


def _text(facts: dict[str, Any]) -> str:
    critical = ", ".join(f"{name} {seconds:.6g} s" for name, seconds in facts["critical_path_s"].items() if seconds)
    lines = [
        f"{facts['schedule'] or 'schedule'}: {facts['stages']} stages, {facts['micro_batches']} micro-batches",
        f"step:          {facts['makespan_s']:.6g} s, of which {facts['bubble_fraction']:.1%} bubble",
        f"critical path: {critical or 'nothing'}",
        f"{'rank':>4} {'busy_s':>12} {'idle_s':>12} {'peak activations':>17} {'peak_bytes':>12}",
    ]
    columns = (facts[name] for name in ("busy_s", "idle_s", "peak_activations", "peak_bytes"))
    for rank, (busy, idle, live, size) in enumerate(zip(*columns, strict=True)):
        lines.append(f"{rank:>4} {busy:>12.6g} {idle:>12.6g} {live:>17} {size:>12.6g}")
    return "\n".join(lines)


def _comparison(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'schedule':<16} {'step_s':>12} {'speed-up':>9} {'bubble':>7} {'peak activations':>17} {'peak_bytes':>12}"
    ]
    first = rows[0]["makespan_s"]
    for row in rows:
        ratio = first / row["makespan_s"] if row["makespan_s"] else 1.0
        lines.append(
            f"{row['schedule']:<16} {row['makespan_s']:>12.6g} {ratio:>9.3f} {row['bubble_fraction']:>7.1%}"
            f" {max(row['peak_activations']):>17} {max(row['peak_bytes']):>12.6g}"
        )
    return "\n".join(lines)
