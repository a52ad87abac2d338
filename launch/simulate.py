"""``paceline simulate``: how long a step of a pipeline schedule would take, without a cluster."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from math import ceil, fsum
from random import Random
from typing import TYPE_CHECKING, Any

from paceline.json_values import as_number, read_json, read_text, within
from paceline.launch.simulated_schedules import (
    DEFAULTS,
    fitting,
    flushed_to_compare,
    generated_for,
    schedule_of,
    streams_to_compare,
)

if TYPE_CHECKING:
    from paceline.schedules.costs import Costs
    from paceline.schedules.schedule import Schedule
    from paceline.schedules.simulate import Simulation
    from paceline.schedules.steady import Steady
    from paceline.schedules.stream import Stream
    from paceline.schedules.timeline import Timeline

_OPTIONS = ("k", "slack", "chunks", "memory_gib", "directions", "staleness")
_SHAPE = ("stages", "micro_batches", "schedule", *_OPTIONS)
_STEPS_DRAWN = 3
"""Steps drawn of a schedule without a flush: its start, a step of the steady state or close to it, its end."""
MOST_ACTIONS = 2**20
"""Forwards and backwards of all schedules that are simulated: more would take minutes."""

MOST_DRAWN = 2**16
_MESSAGES, _REPLAYS = 1024, 32
"""Times of messages that are drawn for a link, and replays of a step in which they vary."""

_TRIED = 24
"""Times that a generated schedule takes what 1F1B takes."""

_SECONDS = ("forward", "backward", "weight", "ahead", "transfer", "transfer_samples", "latency")
_COSTS = (*_SECONDS, "activation_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    shape = parser.add_argument_group("schedule")
    shape.add_argument(
        "--stages", type=int, metavar="S", help="pipeline stages, one a rank (with --costs: as many as it has)"
    )
    add_schedule_arguments(
        shape,
        "1f1b (default), gpipe, kfkb, eager; with several stages a rank, each a part of the whole one that --forward "
        "and --backward are of: interleaved, dualpipev; with the gradients of weights apart: zbh1, zbh2, zbv, vhalf, "
        "vmin, dualpipev_split; generated: the fastest that is found for these costs; or without a flush: "
        "multidirection, one_direction. A step of these two (makespan_s, bubble, idle) is one of the steady state",
    )
    shape.add_argument("--chunks", type=int, metavar="V", help="of interleaved: stages of a rank (default 2)")
    shape.add_argument(
        "--memory-gib",
        type=float,
        metavar="GIB",
        help="of generated: what a rank may keep of micro-batches, with --activation-bytes or --costs (default: as "
        "much as there is use for)",
    )
    shape.add_argument(
        "--directions",
        type=int,
        metavar="P",
        help="of multidirection: pipelines over the same S devices: 2, for every even S, or S/2, for 2 and multiples "
        "of 4 (default: S/2 where there is that order, otherwise 2)",
    )
    shape.add_argument(
        "--staleness",
        type=int,
        metavar="N",
        help="of multidirection: updates that a backward may come after its forward: 1 (default), or 0: with a flush",
    )
    shape.add_argument(
        "--schedule-file", metavar="FILE", help="a schedule in text form instead: rank 0: F0 F1 B0 B1 ..."
    )
    shape.add_argument(
        "--compare",
        action="store_true",
        help="side by side: 1f1b, kfkb of k = 2, 4, 8 and so on, eager of slack 1 and 2, all others that have an order "
        "of so many micro-batches, and multidirection with all numbers of directions that have one",
    )
    costs = parser.add_argument_group("costs, in seconds: one number, or several with commas between them")
    for flag, metavar, what in (
        ("forward", "F", "forward of a micro-batch; one a stage"),
        ("backward", "B", "backward of a micro-batch; one a stage"),
        ("weight", "W", "part of the backward that is the gradients of the weights; one a stage (default: half)"),
        ("ahead", "R", "part of the backward that needs no gradient, as a forward again does; one a stage (default 0)"),
        ("transfer", "C", "what an activation, or a gradient, occupies its link for; one a boundary (default 0)"),
        (
            "transfer-samples",
            "C",
            "instead of --transfer, what single messages took, such as 0.1,0.1,0.1,0.1,4: every message takes one of "
            "these, mean_s and p90_s are of replayed steps (makespan_s is that of messages which all take the mean)",
        ),
        ("latency", "L", "how much later it arrives; one a boundary (default 0)"),
        ("activation-bytes", "N", "bytes: what a live micro-batch keeps in memory; one a stage (default 0)"),
    ):
        costs.add_argument(f"--{flag}", type=_numbers, metavar=metavar, help=what)
    costs.add_argument(
        "--costs",
        metavar="FILE",
        help="a JSON of all costs instead, memory too: the fields of paceline.schedules.Costs, one value a rank, or "
        "one a stage where a rank has several",
    )
    parser.add_argument("--draw", metavar="FILE", help="timelines as a picture: .svg or .png")
    parser.add_argument("--trace", metavar="FILE", help="timelines as a trace for ui.perfetto.dev")


def add_schedule_arguments(group: Any, types: str) -> None:
    """The flags of a schedule with a flush. ``types``: the help of ``--schedule``."""
    group.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches of a step")
    group.add_argument("--schedule", metavar="TYPE", help=types)
    group.add_argument("--k", type=int, help="of kfkb: micro-batches in a group (default 2)")
    group.add_argument(
        "--slack", type=float, metavar="X", help="of eager: the warm-up is 1 + X times that of 1f1b (default 1)"
    )


def run(args: argparse.Namespace) -> int:
    """The command; its exit status.

    Raises:
        ValueError: flags that do not go together, a file that is none or cannot be written, or no schedule.
    """
    for flag in ("schedule_file", "costs", "draw", "trace"):
        if getattr(args, flag) == "":
            name = flag.replace("_", "-")
            raise ValueError(f"--{name}: the name of a file is empty; give one, or leave --{name} out.")
    given = _costs_of_file(args) if args.costs else None
    schedules, costs = _schedules(args, given)
    if args.draw or args.trace:
        try:
            _draw([_timeline(schedule, fitting(costs, schedule)) for schedule in schedules], args)
        except OSError as error:
            file = error.filename or " or ".join(filter(None, (args.draw, args.trace)))  # a full disk names none
            raise ValueError(
                f"cannot write {file} ({error.strerror}): choose another file with --draw or --trace."
            ) from None
    rows = [_facts(schedule, fitting(costs, schedule)) for schedule in schedules]
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
    """The options of the schedule; defaults are the config's."""
    defaults = DEFAULTS.get(args.schedule, {})
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    return {**given, **{name: value for name, value in defaults.items() if name not in given}}


def _refuse_together(args: argparse.Namespace, flag: str, others: tuple[str, ...]) -> None:
    given = {name: getattr(args, name) for name in others}
    both = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None and value is not False]
    if both:
        raise ValueError(f"{flag} says what {', '.join(both)} would say: give one or the other.")


def _costs_of_file(args: argparse.Namespace) -> Costs:
    from paceline.schedules.costs import Costs

    _refuse_together(args, "--costs", _COSTS)
    values = read_json(args.costs, "give a file with the JSON of the costs")
    if not isinstance(values, dict):
        raise ValueError(f"{args.costs}: holds {type(values).__name__}, costs are an object {{...}}.")
    with within(args.costs):
        return Costs.from_dict(values)


def _costs_of_flags(args: argparse.Namespace, num_stages: int) -> Costs:
    from paceline.schedules.costs import Costs, Link

    def spread(name: str, count: int, what: str) -> tuple[float, ...]:
        given: tuple[float, ...] | None = getattr(args, name)
        if given is None and name in ("forward", "backward"):
            raise ValueError(f"--{name} is missing: give its seconds, or all costs with --costs.")
        given = given or (0.0,)
        if len(given) not in (1, count):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} has {len(given)} numbers: give one, or {count}, one a {what}.")
        return given * count if len(given) == 1 else given

    for name in _COSTS:
        for value in getattr(args, name) or ():
            if not 0 <= value < float("inf"):
                what = "seconds" if name in _SECONDS else "bytes"
                raise ValueError(f"--{name.replace('_', '-')} {value:g} is no number of {what} from 0 upwards.")
            as_number(f"--{name.replace('_', '-')}", value)
    transfers, latencies = (spread(name, num_stages - 1, "boundary") for name in ("transfer", "latency"))
    variation: tuple[float, ...] = ()
    if args.transfer_samples:
        if args.transfer is not None:
            raise ValueError("--transfer-samples says what --transfer would say: give one or the other.")
        mean = fsum(args.transfer_samples) / len(args.transfer_samples)
        transfers = (mean,) * (num_stages - 1)
        variation = tuple(seconds / mean for seconds in args.transfer_samples) if mean else ()
    # A message of as many bytes as it takes seconds, over one byte a second.
    down, up = (
        tuple(Link(1.0, latency, _drawn(variation, 2 * boundary + back)) for boundary, latency in enumerate(latencies))
        for back in (0, 1)
    )
    return Costs(
        forward_s=spread("forward", num_stages, "stage"),
        backward_s=spread("backward", num_stages, "stage"),
        message_bytes=transfers,
        down=down,
        up=up,
        weight_s=() if args.weight is None else spread("weight", num_stages, "stage"),
        ahead_s=() if args.ahead is None else spread("ahead", num_stages, "stage"),
        activation_bytes=() if args.activation_bytes is None else spread("activation_bytes", num_stages, "stage"),
    )


def _drawn(multiples: tuple[float, ...], seed: int) -> tuple[float, ...]:
    """What a link's messages take, one after another: each of these as often, shuffled, the same at each call."""
    found = [*multiples] * (ceil(_MESSAGES / len(multiples)) if multiples else 0)
    Random(seed).shuffle(found)
    return tuple(found)


def _schedules(args: argparse.Namespace, costs: Costs | None) -> tuple[list[Schedule | Stream], Costs]:
    """What is to be simulated, and with which costs: one value a rank, or one a stage."""
    if args.schedule_file:
        from paceline.schedules.text import from_text

        _refuse_together(args, "--schedule-file", (*_SHAPE, "compare"))
        schedule = from_text(read_text(args.schedule_file, "give a file with a schedule in text form"))
        return [schedule], costs or _costs_of_flags(args, schedule.num_stages)
    num_stages = args.stages if args.stages is not None or costs is None else len(costs.forward_s)
    for name, value in (("stages", num_stages), ("micro-batches", args.micro_batches)):
        if value is None:
            raise ValueError(f"--{name} is missing: give a number, or a schedule with --schedule-file.")
    _check_size(args, num_stages)
    if args.compare:
        _refuse_together(args, "--compare", ("schedule", *_OPTIONS))
        flushed = flushed_to_compare(num_stages, args.micro_batches)
        costs = costs or _costs_of_flags(args, num_stages)
        best = generated_for(costs, num_stages, args.micro_batches)
        return [*flushed, best, *streams_to_compare(num_stages, args.micro_batches)], costs
    type, options = args.schedule or "1f1b", _options(args)
    if type == "generated":
        for name, count in (("stages", num_stages), ("micro-batches", args.micro_batches)):
            if count < 1:
                raise ValueError(f"--{name} {count} must be 1 or more.")
        costs = costs or _costs_of_flags(args, num_stages)
        return [generated_for(costs, num_stages, args.micro_batches, **options)], costs
    schedules = [schedule_of(type, num_stages, args.micro_batches, **options)]
    return schedules, costs or _costs_of_flags(args, num_stages)


def _check_size(args: argparse.Namespace, num_stages: int) -> None:
    """Refuse, before anything is built, what would take minutes."""
    from paceline.schedules import asynchronous
    from paceline.schedules.families import group_sizes

    count = args.micro_batches
    if num_stages < 1 or count < 1:
        return
    actions = 2 * num_stages * count
    steady = 8 * (actions + 2 * num_stages**2)  # steps until they repeat, and those that are late
    if args.compare:
        actions = actions * (_TRIED + 16 + len(group_sizes(count))) + 2 * steady
    elif args.schedule == "generated":
        actions *= _TRIED
    elif args.schedule in asynchronous.STREAMS:
        actions = steady
    if args.transfer_samples:
        actions *= _REPLAYS
    most = MOST_DRAWN if args.draw or args.trace else MOST_ACTIONS
    if actions > most:
        raise ValueError(
            f"--micro-batches {count} on {num_stages} stages are too many to "
            f"{'draw' if most == MOST_DRAWN else 'simulate'} (about {min(actions, 10**99):.3g} forwards and "
            "backwards, of at most "
            f"{most}): give fewer."
        )


def _num_stages(schedule: Schedule | Stream) -> int:
    from paceline.schedules.stream import Stream

    return len(schedule.routes[0]) if isinstance(schedule, Stream) else schedule.num_stages


def _timeline(schedule: Schedule | Stream, costs: Costs) -> Timeline:
    from paceline.schedules.simulate import simulate
    from paceline.schedules.stream import Stream

    if isinstance(schedule, Stream):
        schedule = replace(schedule.unrolled(_STEPS_DRAWN), name=f"{schedule.name}, {_STEPS_DRAWN} steps")
    timeline = simulate(schedule, costs, timeline=True).timeline
    assert timeline is not None
    return timeline


def _draw(timelines: list[Timeline], args: argparse.Namespace) -> None:
    if args.draw:
        from paceline.report.timeline_picture import draw

        draw(timelines, args.draw)
    if args.trace:
        from paceline.report.perfetto import write_trace

        write_trace(timelines, args.trace)


def _facts(schedule: Schedule | Stream, costs: Costs) -> dict[str, Any]:
    from paceline.schedules.simulate import simulate
    from paceline.schedules.steady import steady
    from paceline.schedules.stream import Stream

    step: Simulation | Steady
    own: dict[str, Any]
    if isinstance(schedule, Stream):
        step = steady(schedule, costs)
        own = {
            "makespan_s": step.period_s,
            "period_s": step.period_s,
            "first_step_s": step.first_s,
            "mismatch": _mismatch(schedule),
        }
    else:
        step = simulate(schedule, costs, critical_path=True)
        own = {"makespan_s": step.makespan_s, "critical_path_s": step.critical_s}
    return {
        "schedule": schedule.name,
        "stages": _num_stages(schedule),
        "micro_batches": schedule.num_micro_batches,
        **own,
        **_replayed(schedule, costs),
        "bubble_fraction": step.bubble_fraction,
        "peak_activations": step.peak_activations,
        **_kept(schedule, step),
        "peak_bytes": step.peak_bytes,
        "busy_s": step.busy_s,
        "idle_s": step.idle_s,
    }


def _replayed(schedule: Schedule | Stream, costs: Costs) -> dict[str, float]:
    """Of steps in which messages take different times: the mean, and what nine of ten stay below."""
    from paceline.schedules.variation import expected, phases, resampled_s, varies

    if not varies(costs):
        return {}
    seconds = resampled_s(schedule, costs, phases(_REPLAYS))
    return {"mean_s": expected(seconds), "p90_s": expected(seconds, 0.9)}


def _kept(schedule: Schedule | Stream, step: Simulation | Steady) -> dict[str, Any]:
    """By rank, what waits for the weights' backward, and what is live or waits, in stages of which a rank has one."""
    from paceline.schedules.simulate import Simulation

    if not isinstance(step, Simulation):
        return {"peak_stages": step.peak_activations}
    share = schedule.num_ranks / _num_stages(schedule)
    return {
        "peak_deferred": [peak.deferred for peak in step.peaks],
        "peak_stages": [share * peak.held for peak in step.peaks],
    }


def _mismatch(stream: Stream) -> list[int]:
    """The most updates between a forward and its backward, by stage."""
    from paceline.schedules.directions import stages_of

    most = [0] * len(stream.routes[0])
    for rank, mismatches in enumerate(stream.mismatches(2 * stream.most_lag + 2)):
        stages = stages_of(rank, stream.routes)
        for (_, _, chunk), mismatch in mismatches.items():
            most[stages[chunk]] = max(most[stages[chunk]], mismatch)
    return most


def _text(facts: dict[str, Any]) -> str:
    lines = [f"{facts['schedule'] or 'schedule'}: {facts['stages']} stages, {facts['micro_batches']} micro-batches"]
    step, bubble = f"step:          {facts['makespan_s']:.6g} s", f"{facts['bubble_fraction']:.1%} bubble"
    if "mean_s" in facts:
        step += f" ({facts['mean_s']:.6g} s in the mean over messages, p90 {facts['p90_s']:.6g} s)"
    if "period_s" in facts:
        lines += [
            f"{step} in the steady state, of which {bubble}; the first takes {facts['first_step_s']:.6g} s",
            f"mismatch:      by stage {' '.join(map(str, facts['mismatch']))} (most updates from forward to backward)",
        ]
    else:
        critical = ", ".join(f"{name} {seconds:.6g} s" for name, seconds in facts["critical_path_s"].items() if seconds)
        lines += [f"{step}, of which {bubble}", f"critical path: {critical or 'nothing'}"]
    lines.append(
        f"{'rank':>4} {'busy_s':>12} {'idle_s':>12} {'peak activations':>17} {'peak stages':>12} {'peak_bytes':>12}"
    )
    columns = (facts[name] for name in ("busy_s", "idle_s", "peak_activations", "peak_stages", "peak_bytes"))
    for rank, (busy, idle, live, kept, size) in enumerate(zip(*columns, strict=True)):
        lines.append(f"{rank:>4} {busy:>12.6g} {idle:>12.6g} {live:>17} {kept:>12.6g} {size:>12.6g}")
    return "\n".join(lines)


def _comparison(rows: list[dict[str, Any]]) -> str:
    width = max(16, *(len(row["schedule"]) for row in rows))
    titles = (
        f"{'step_s':>12} {'speed-up':>9} {'bubble':>7} {'peak activations':>17} {'peak stages':>12} {'peak_bytes':>12}"
    )
    varies = any("mean_s" in row for row in rows)
    if varies:
        titles = f"{'mean_s':>12} {'p90_s':>12} {titles}"
    lines = [f"{'schedule':<{width}} {titles}"]
    first = rows[0].get("mean_s", rows[0]["makespan_s"])
    for row in rows:
        mean_s = row.get("mean_s", row["makespan_s"])
        ratio = first / mean_s if mean_s else 1.0
        name = f"{row['schedule']:<{width}}"
        if varies:
            name += f" {mean_s:>12.6g} {row.get('p90_s', mean_s):>12.6g}"
        lines.append(
            f"{name} {row['makespan_s']:>12.6g} {ratio:>9.3f} {row['bubble_fraction']:>7.1%}"
            f" {max(row['peak_activations']):>17} {max(row['peak_stages']):>12.6g} {max(row['peak_bytes']):>12.6g}"
        )
    return "\n".join(lines)
