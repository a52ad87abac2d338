"""Figures of a run's page, and the rows of its tables that need more than formatting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from statistics import median
from typing import Any, NamedTuple

from ..messages import plural
from . import expert_heat_map, timeline_picture
from .comparison import format_duration, time_unit
from .expert_loads import Window
from .line_chart import Point, Series, line_chart
from .step_records import StepRecord

MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
MOST_PAIRS = 6
KINDS = ("compute", "communication", "idle", "other")

_MOST_BOXES = 24_000
_MOST_LAYERS = 4
_MOST_CANDIDATES = 8
_WIDTH = 12.0  # inches of a timeline

Row = Mapping[str, Any]


class Figure(NamedTuple):
    """A picture, and the caption below it."""

    svg: str
    caption: str


# -- numbers ---------------------------------------------------------------------------------------------------------


def count(value: float) -> str:
    """``1.25 M``."""
    return _scaled(value, "TGMk").strip()


def size(value: float, unit: str = "B") -> str:
    """``12.1 MB``, ``9.1 GFLOP/s``."""
    return _scaled(value, "PTGMk") + unit


def _scaled(value: float, letters: str) -> str:
    for power, letter in zip(range(3 * len(letters), 0, -3), letters, strict=True):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g} {letter}"
    return f"{value:.3g} "


def percent(share: float) -> str:
    """``+12.5 %``, with its sign; a true minus."""
    return f"{100 * share:+.1f} %".replace("-", MINUS)


def both(before: float, after: float) -> str:
    """``1.569 s → 0.661 s``: two times in one unit."""
    per_s, unit = time_unit(max(before, after, 1e-6))
    digits = 3 if unit == "s" else 1
    return f"{before * per_s:.{digits}f} {unit} → {after * per_s:.{digits}f} {unit}"


def cut(parts: Sequence[int]) -> str:
    """``4|6``: the layers of each stage."""
    return "|".join(str(end - start) for start, end in pairwise(parts))


# -- decisions -------------------------------------------------------------------------------------------------------


def account(decided: Sequence[Row]) -> str:
    """How often was decided and switched, and how true the predictions were."""
    kinds = {kind: sum(d["switched"] and d["kind"] == kind for d in decided) for kind in _THINGS}
    changes = ", ".join(f"the {kind} {times(n)}" for kind, n in kinds.items() if n)
    text = f"{plural(len(decided), 'planning')}; {'switched: ' + changes if changes else 'nothing was switched'}."
    errors = [abs(d["after"]["error"]) for d in decided if d["after"] and d["after"]["error"] is not None]
    if errors:
        text += (
            f" The step that was predicted for what ran next was off by {median(errors):.1%} (median of "
            f"{plural(len(errors), 'planning')}), {max(errors):.0%} at most."
        )
    return text


_THINGS = ("schedule", "partition", "experts", "shares")


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def decision_row(decision: Row) -> dict[str, str]:
    """The cells of a decision in the table, and ``note`` below them."""
    after, switch, switched = decision["after"] or {}, decision["switch"], decision["switched"]
    experts = decision["kind"] == "experts"
    now_s, best_s = decision["predicted_now_s"], decision["predicted_best_s"]
    predicted = both(now_s, best_s) if switched or now_s != best_s else format_duration(now_s)
    measured = decision["step_s"] if experts or decision["measured_s"] is None else decision["measured_s"]
    then = after.get("measured_s") if after.get("measured_s") is not None and not experts else after.get("step_s")
    took = switch["measured_s"] if switch["measured_s"] is not None else switch["predicted_s"]
    change, more = _change(decision)
    moved = f"{size(switch['bytes'])} sent" if switch["bytes"] else ""
    return {
        "step": f"{decision['step']:,}",
        "what": change,
        "predicted": predicted + " of experts" * experts,
        "before": seconds(measured),
        "after": seconds(then),
        "error": "" if after.get("error") is None else percent(after["error"]),
        "switching": seconds(took) + " expected" * (switch["measured_s"] is None) if switched else "",
        "note": "; ".join(filter(None, (more, moved, decision["why"]))),
    }


def seconds(value: float | None) -> str:
    return "" if value is None else format_duration(value)


def _change(decision: Row) -> tuple[str, str]:
    """A decision in few words, and details."""
    old, new, kind, switched = decision["from"], decision["to"], decision["kind"], decision["switched"]
    if kind == "experts":
        stage = "" if decision["stage"] is None else f"stage {decision['stage']}: "
        if not switched:
            return f"{stage}experts stay", ""
        worst = f"{max(old['imbalance'] or [1]):.2f} → {max(new['imbalance'] or [1]):.2f}"
        moved, layers = plural(decision["switch"]["experts"] or 0, "expert"), plural(len(new["layers"] or []), "layer")
        return f"{stage}{moved} moved", f"{layers}; busiest device {worst} {TIMES} mean"
    show = {"partition": cut, "shares": lambda parts: "|".join(map(str, parts))}.get(kind, str)
    change = f"{show(old[kind])} → {show(new[kind])}" if switched else f"{show(old[kind])} stays"
    if kind == "shares":
        return change, "micro-batches of each replica"
    if kind == "schedule":
        return change, "layers moved, with a schedule of their own" * decision["overruled_by_partition"]
    changed = switched and old["schedule"] not in (None, new["schedule"])
    return change, f"with {new['schedule']} instead of {old['schedule']}" * changed


def candidates(decision: Row, decided: Sequence[Row]) -> dict[str, Any] | None:
    """Candidates of a switch: the fastest by prediction, and all that have run."""
    looked = next((d for d in decided if d["step"] == decision["step"] and d["candidates"]), None)
    if looked is None or (decision["kind"] == "schedule" and looked is not decision):
        return None
    every = looked["candidates"]
    shown = [row for place, row in enumerate(every) if place < _MOST_CANDIDATES or row["step_s"] is not None]
    return {"step": looked["step"], "number": len(every), "rows": shown, "more": len(every) - len(shown)}


# -- figures ---------------------------------------------------------------------------------------------------------


def training(report: Row) -> Iterator[Figure]:
    """Loss, learning rate, gradient norm, on one range of steps."""
    trained, held_out = _over_steps(report["loss"], "loss"), _over_steps(report["evaluation"], "eval_loss")
    steps = [step for step, _ in (*trained, *held_out)]
    span = (min(steps), max(steps)) if steps else None
    if len(steps) > 1:
        series = [Series("training", [trained])] if trained else []
        series += [Series("held out", [held_out], "warm")] if held_out else []
        caption = "Loss of a label token, in nats: in training the mean of the steps since the report before"
        caption += ", held out that of the evaluation data." if held_out else "."
        yield Figure(line_chart(series, label="loss over the steps", unit="nats", zero=False, span=span), caption)
    for key, unit, caption in (
        ("learning_rate", "learning rate", "Learning rate, of the first group of parameters."),
        ("grad_norm", "norm", "Norm of all gradients of a step together, before clipping."),
    ):
        points = _over_steps(report["loss"], key)
        if len(points) > 1:
            yield Figure(line_chart([Series("", [points])], label=caption[:-1], unit=unit, span=span), caption)


def speed(report: Row) -> Iterator[Figure]:
    """Seconds of each step, and tokens a second."""
    ran, looks = report["configurations"], report["decisions"]
    switches = sorted({d["step"] for d in looks if d["switched"]})
    marked = " Upright lines are switches." * bool(switches)
    each = [(one["first_step"] + n, s) for one in ran for n, s in enumerate(one["seconds"])]
    if each:
        unit, per_s = ("ms", 1e3) if median(s for _, s in each) < 1 else ("s", 1.0)

        def level(one: Row, seconds: float) -> list[Point]:
            return [(one["first_step"], seconds * per_s), (one["last_step"], seconds * per_s)]

        planned = [d["after"] for d in looks if d["after"] and d["after"]["predicted_s"] is not None]
        series = [
            Series("each", [[(n, s * per_s) for n, s in each]], "dots"),
            Series("median", [level(one, one["median_s"]) for one in ran]),
            *([Series("predicted", [level(one, one["predicted_s"]) for one in planned], "warm")] if planned else []),
        ]
        caption = f"Time of a step, in {unit}.{marked} Medians are of steps between which nothing changed."
        yield Figure(line_chart(series, label=f"time of each step, in {unit}", unit=unit, marks=switches), caption)
    points = _over_steps(report["steps"], "tokens_per_s")
    if len(points) > 1:
        picture = line_chart([Series("", [points])], label="tokens a second", unit="tokens/s", marks=switches)
        yield Figure(picture, f"Tokens a second, between one report and the next.{marked}")


def _over_steps(rows: Iterable[Row], key: str) -> list[Point]:
    return [(row["step"], row[key]) for row in rows if row[key] is not None]


def timelines(report: Row, traces: Mapping[int, StepRecord], switches: bool) -> dict[str, Any]:
    """Recorded steps before and after each switch, or else the last one, and how many are left out as too large."""
    pairs = [pair for pair in report["timelines"] if (pair["step"] is not None) == switches]
    drawn: list[dict[str, Any]] = []
    boxes = too_large = 0
    for pair in reversed(pairs[-MOST_PAIRS:]):
        shown = [(when, pair[when]) for when in ("before", "after") if pair[when] and pair[when]["step"] in traces]
        captions = [_caption(facts, f"{when}: " * switches) for when, facts in shown]
        steps = [
            replace(traces[facts["step"]].measured, name=caption.partition(" (")[0].rpartition(", ")[0])
            for (_, facts), caption in zip(shown, captions, strict=True)
        ]
        more = sum(len(step.spans) for step in steps)
        if boxes + more > _MOST_BOXES:
            too_large += 1
        elif steps and min(step.end_s for step in steps) > 0:
            boxes += more
            picture = timeline_picture.inline(steps, "; ".join(captions), _WIDTH)
            drawn.insert(0, {"step": pair["step"], "figure": Figure(picture, "; ".join(captions) + ".")})
    return {"drawn": drawn, "too_large": too_large, "number": len(pairs)}


def _caption(facts: Row, when: str) -> str:
    text = f"{when}step {facts['step']:,}, {facts['schedule']}, {format_duration(facts['measured_s'])}"
    if facts["predicted_s"] is not None:
        text += f" (as simulated from what was measured then {format_duration(facts['predicted_s'])})"
    return text


def experts(report: Row, loads: Mapping[str, Sequence[Window]]) -> Iterator[Figure]:
    """Heat maps of the layers that would have been least even."""
    worst = sorted(report["experts"], key=lambda layer: (-layer["unmoved"], layer["layer"]))[:_MOST_LAYERS]
    for layer in worst:
        windows = loads.get(layer["layer"])
        if windows:
            picture = expert_heat_map.inline({layer["layer"]: windows}, f"loads of {layer['layer']}")
            caption = "Each expert's share of the tokens, a column for each planning. Below, tokens of the busiest "
            yield Figure(picture, caption + "device over the mean of all devices. Upright lines are moves.")


def islands(rounds: Sequence[Row]) -> Iterator[Figure]:
    """Losses of all islands, by round."""
    by_island: dict[str, list[Point]] = {}
    for one in rounds:
        for island, loss in zip(one["islands"], one["losses"], strict=True):
            if loss is not None:
                by_island.setdefault(f"island {island}", []).append((one["round"], loss))
    looks = ("main", "warm", "faint")
    series = [Series(name, [by_island[name]], looks[n % 3]) for n, name in enumerate(sorted(by_island))]
    if any(len(points) > 1 for points in by_island.values()):
        picture = line_chart(series, label="loss of the islands by round", unit="nats", zero=False, axis="round")
        yield Figure(picture, "Loss of a label token in training, in nats, as each island had it at a round.")


def natural(rows: Sequence[Row]) -> Iterator[Figure]:
    """The share of directions at the floor."""
    points = [(row["step"], 100 * row["at_floor"]) for row in rows]
    if len(points) > 1 and any(share for _, share in points):
        picture = line_chart([Series("", [points])], label="share at the floor", unit="%")
        yield Figure(picture, "Of what the matrices learned, the share at their floor, in %.")


# -- measurements ----------------------------------------------------------------------------------------------------


def _like_the_last(looks: Sequence[Row], kind: Callable[[Row], Any]) -> list[Row]:
    """Measurements since the run has had its last number of stages: it may have been resumed with another."""
    return [*takewhile(lambda look: kind(look) == kind(looks[-1]), reversed(looks))][::-1]


def stages(report: Row) -> list[Row]:
    """Measurements of the stages as they are at last."""
    return _like_the_last(report["stages"], lambda look: len(look["forward_s"]))


def links(report: Row) -> dict[str, Any] | None:
    """Rates between the stages, and of the hosts."""
    looks = _like_the_last(report["links"], lambda look: [(edge["from"], edge["to"]) for edge in look["between"]])
    if not looks:
        return None
    last, rows = looks[-1], []
    hosts = last["hosts"] or []
    for place, edge in enumerate(last["between"]):
        ends = edge["from"], edge["to"]
        rates = [rate for look in looks if (rate := look["between"][place]["bytes_per_s"]) is not None]
        apart = len(hosts) > max(ends) and hosts[ends[0]] != hosts[ends[1]]
        rows.append({**edge, "where": "between hosts" if apart else "one host", "rates": rates})
    sent = [(host, rate) for host, rate in enumerate(last["egress_bytes_per_s"] or []) if rate is not None]
    return {"rows": rows, "sent": sent}
