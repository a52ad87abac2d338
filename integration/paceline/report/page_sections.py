"""The sections of a run's page, each from the report's value to HTML; empty where the run has nothing to say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise, takewhile
from statistics import median
from typing import Any, NamedTuple

from .charts import Series, chart, heat_map, shares, timeline, timeline_legend
from .comparison import format_duration, format_figure, time_unit
from .expert_loads import Window
from .step_records import StepRecord

MINUS, DASH, TIMES = "\N{MINUS SIGN}", "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"

_MOST_ROWS = 60
_MOST_PAIRS = 6
_MOST_BOXES = 24_000
_MOST_LAYERS = 4
_MOST_CANDIDATES = 8
_MARKED = " Upright lines are switches."
_KINDS = (("compute_s", "compute"), ("communication_s", "communication"), ("idle_s", "idle"), ("other_s", "other"))


class Sources(NamedTuple):
    """Data of the sections; timelines and loads are too large for the report's value."""

    report: Mapping[str, Any]
    traces: Mapping[int, StepRecord]
    loads: Mapping[str, Sequence[Window]]


# -- numbers and tables ----------------------------------------------------------------------------------------------


def count(value: float) -> str:
    """``1.25 M``."""
    return _scaled(value, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))).strip()


def size(value: float, unit: str = "B") -> str:
    """``12.1 MB``, ``9.1 GFLOP/s``."""
    return _scaled(value, ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))) + unit


def _scaled(value: float, powers: Iterable[tuple[float, str]]) -> str:
    for power, letter in powers:
        if abs(value) >= power:
            return f"{value / power:.3g} {letter}"
    return f"{value:.3g} "


def percent(share: float) -> str:
    """``+12.5 %``, with its sign; a true minus."""
    return f"{100 * share:+.1f} %".replace("-", MINUS)


def plural(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def both(before: float, after: float) -> str:
    """``1.569 s → 0.661 s``: two times in one unit."""
    per_s, unit = time_unit(max(before, after, 1e-6))
    digits = 3 if unit == "s" else 1
    return f"{before * per_s:.{digits}f} {unit} → {after * per_s:.{digits}f} {unit}"


def _seconds(value: float | None) -> str:
    return "" if value is None else format_duration(value)


def _cut(parts: Sequence[int]) -> str:
    return "|".join(str(end - start) for start, end in pairwise(parts))


class _Html(str):
    """Markup, not to be escaped."""


class _Noted(list[Any]):
    """A row of a table with a note below it."""

    def __init__(self, cells: Iterable[Any], note: str) -> None:
        super().__init__(cells)
        self.note = note


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Iterable[int] = ()) -> str:
    """Cells are text, escaped, unless they are markup of this module; columns of ``numbers`` to the right."""
    right = set(numbers)

    def cell(tag: str, column: int, value: Any) -> str:
        inner = value if isinstance(value, _Html) else escape(str(value))
        return f"<{tag}{' class=' + chr(34) + 'n' + chr(34) if column in right else ''}>{inner}</{tag}>"

    def line(tag: str, values: Sequence[Any]) -> str:
        cells = "".join(cell(tag, column, value) for column, value in enumerate(values))
        if not isinstance(values, _Noted):
            return f"<tr>{cells}</tr>"
        note = f'<td></td><td colspan="{len(values) - 1}">{escape(values.note)}</td>'
        return f'<tr class="noted">{cells}</tr><tr class="note">{note}</tr>'

    body = "".join(line("td", row) for row in rows)
    return f'<div class="wide"><table><thead>{line("th", heads)}</thead><tbody>{body}</tbody></table></div>'


def _figure(picture: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{picture}{below}</figure>" if picture else ""


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _folded(summary: str, inner: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


# -- decisions -------------------------------------------------------------------------------------------------------


def _decisions(sources: Sources) -> str:
    decided = sources.report["decisions"]
    if not decided:
        return ""
    switched = [decision for decision in decided if decision["switched"]]
    out = [_paragraph(_account(decided, switched)), _saved(sources.report["headline"]["saved"])]
    heads = ("step", "what", "predicted step", "measured before", "after", "off by", "switching")
    right = (0, 2, 3, 4, 5, 6)
    if switched:
        out.append(_table(heads, map(_decision_row, switched[-_MOST_ROWS:]), right))
        if len(switched) > _MOST_ROWS:
            out.append(_paragraph(f"The last {_MOST_ROWS} of {len(switched):,}; report.json has all."))
    for decision in switched[-_MOST_PAIRS:]:
        out.append(_candidates(decision, decided))
    stayed = [decision for decision in decided if not decision["switched"]]
    if stayed:
        shown = stayed[-_MOST_ROWS:]
        more = f", the last {_MOST_ROWS}" if len(stayed) > _MOST_ROWS else ""
        table = _table(heads, map(_decision_row, shown), right)
        out.append(_folded(f"{plural(len(stayed), 'look')} at which nothing was switched{more}", table))
    return "".join(out)


def _account(decided: Sequence[Mapping[str, Any]], switched: Sequence[Mapping[str, Any]]) -> str:
    kinds = {kind: sum(d["kind"] == kind for d in switched) for kind in ("schedule", "partition", "experts")}
    changes = ", ".join(
        f"the {kind} {number} times" if number > 1 else f"the {kind} once" for kind, number in kinds.items() if number
    )
    text = f"{plural(len(decided), 'look')}; {'switched: ' + changes if changes else 'nothing was switched'}."
    errors = [abs(d["after"]["error"]) for d in decided if d["after"] and d["after"]["error"] is not None]
    if errors:
        text += (
            f" The step that was predicted for what ran next was off by {median(errors):.1%} (median of "
            f"{plural(len(errors), 'look')}), {max(errors):.0%} at most."
        )
    return text


def _saved(saved: Mapping[str, Any] | None) -> str:
    if saved is None:
        return ""
    before, after, seconds = saved["before"], saved["after"], saved["saved_s"]
    less = "less" if seconds > 0 else "more"
    return _paragraph(
        f"Before the first switch a step took {format_duration(before['median_s'])} (median of {before['steps']:,}, by "
        f"the host's clock), after it {format_duration(after['median_s'])}. The {after['steps']:,} steps after it took "
        f"{format_duration(abs(seconds))} {less} than so many at the first pace, with all that switching took. What "
        "they would have taken without a switch nobody has measured."
    )


def _decision_row(decision: Mapping[str, Any]) -> _Noted:
    after, switch = decision["after"] or {}, decision["switch"]
    experts = decision["kind"] == "experts"
    predicted = both(decision["predicted_now_s"], decision["predicted_best_s"])
    if not decision["switched"] and decision["predicted_now_s"] == decision["predicted_best_s"]:
        predicted = _seconds(decision["predicted_now_s"])
    if experts:
        predicted += " of experts"
    measured = decision["step_s"] if experts or decision["measured_s"] is None else decision["measured_s"]
    then = after.get("measured_s") if after.get("measured_s") is not None and not experts else after.get("step_s")
    error = after.get("error")
    took = switch["measured_s"] if switch["measured_s"] is not None else switch["predicted_s"]
    moved = f"{size(switch['bytes'])} sent" if switch["bytes"] else ""
    change, more = _change(decision)
    return _Noted(
        [
            f"{decision['step']:,}",
            change,
            predicted,
            _seconds(measured),
            _seconds(then),
            "" if error is None else percent(error),
            _seconds(took) + " expected" * (switch["measured_s"] is None) if decision["switched"] else "",
        ],
        "; ".join(filter(None, (more, moved, decision["why"]))),
    )


def _change(decision: Mapping[str, Any]) -> tuple[str, str]:
    """A decision in few words, and details."""
    old, new, kind = decision["from"], decision["to"], decision["kind"]
    if kind == "schedule":
        if decision["switched"]:
            return f"{old['schedule']} → {new['schedule']}", ""
        return f"{old['schedule']} stays", "layers moved, with a schedule of their own" * decision[
            "overruled_by_partition"
        ]
    if kind == "partition":
        if not decision["switched"]:
            return f"{_cut(old['partition'])} stays", ""
        changed = old["schedule"] not in (None, new["schedule"])
        schedules = f"with {new['schedule']} instead of {old['schedule']}" if changed else ""
        return f"{_cut(old['partition'])} → {_cut(new['partition'])}", schedules
    stage = "" if decision["stage"] is None else f"stage {decision['stage']}: "
    if not decision["switched"]:
        return f"{stage}experts stay", ""
    layers = plural(len(new["layers"] or []), "layer")
    worst = f"{max(old['imbalance'] or [1]):.2f} → {max(new['imbalance'] or [1]):.2f}"
    moved = plural(decision["switch"]["experts"] or 0, "expert")
    return f"{stage}{moved} moved", f"{layers}; busiest device {worst} {TIMES} the mean"


def _candidates(decision: Mapping[str, Any], decided: Sequence[Mapping[str, Any]]) -> str:
    """Candidates of a switch: the fastest by prediction, and all that have run."""
    looked = next((d for d in decided if d["step"] == decision["step"] and d["candidates"]), None)
    if looked is None or (decision["kind"] == "schedule" and looked is not decision):
        return ""
    rows, all_rows = [], looked["candidates"]
    for place, row in enumerate(all_rows):
        if place < _MOST_CANDIDATES or row["step_s"] is not None:
            rows.append([row["schedule"], _seconds(row["predicted_s"]), _seconds(row["step_s"])])
    more = len(all_rows) - len(rows)
    table = _table(("schedule", "predicted step", "measured, when it ran"), rows, (1, 2))
    rest = _paragraph(f"And {plural(more, 'slower one')}, which never ran.") if more else ""
    return _folded(f"{plural(len(all_rows), 'schedule')} compared at step {looked['step']:,}", table + rest)


# -- over the steps --------------------------------------------------------------------------------------------------


def _steps(sources: Sources) -> str:
    report = sources.report
    ran = report["configurations"]
    switches = sorted({d["step"] for d in report["decisions"] if d["switched"]})
    each = [(one["first_step"] + n, s) for one in ran for n, s in enumerate(one["seconds"])]
    out = []
    if each:
        unit, per_s = ("ms", 1e3) if median(s for _, s in each) < 1 else ("s", 1.0)
        medians = [
            [(one["first_step"], one["median_s"] * per_s), (one["last_step"], one["median_s"] * per_s)] for one in ran
        ]
        predicted = [
            [(a["first_step"], a["predicted_s"] * per_s), (a["last_step"], a["predicted_s"] * per_s)]
            for d in report["decisions"]
            if (a := d["after"]) and a["predicted_s"] is not None
        ]
        series = [
            Series("each step", [[(n, s * per_s) for n, s in each]], "faint dots"),
            Series("median while nothing changed", medians),
            *([Series("predicted when planned", predicted, "warm")] if predicted else []),
        ]
        caption = f"Time of a step, in {unit}.{_MARKED * bool(switches)}"
        out.append(_figure(chart(series, label=f"time of each step, in {unit}", unit=unit, marks=switches), caption))
    if len(ran) > 1:
        rows = [
            [
                f"{one['first_step']:,}" + f"{DASH}{one['last_step']:,}" * (one["first_step"] < one["last_step"]),
                one["schedule"],
                one["micro_batch_size"],
                _cut(one["partition"]) if len(one["partition"]) > 2 else "",
                one["moves"] or "",
                _seconds(one["median_s"]),
                f"{_seconds(one['lower_quartile_s'])} {DASH} {_seconds(one['upper_quartile_s'])}",
            ]
            for one in ran[-_MOST_ROWS:]
        ]
        heads = ("steps", "schedule", "micro-batch", "partition", "moves", "median step", "middle half")
        out.append(_table(heads, rows, (2, 4, 5, 6)))
    speed = [(row["step"], row["tokens_per_s"]) for row in report["steps"] if row["tokens_per_s"] is not None]
    if len(speed) > 1:
        picture = chart([Series("", [speed])], label="tokens a second", unit="tokens/s", marks=switches)
        caption = f"Tokens a second, between one report and the next.{_MARKED * bool(switches)}"
        out.append(_figure(picture, caption))
    return "".join(out)


def _loss(sources: Sources) -> str:
    report = sources.report
    trained = _over_steps(report["loss"], "loss")
    held_out = _over_steps(report["evaluation"], "eval_loss")
    series = [Series("training", [trained])] if trained else []
    series += [Series("held out", [held_out], "warm")] if held_out else []
    steps = [step for step, _ in (*trained, *held_out)]
    span = (min(steps), max(steps)) if steps else None
    out = []
    if len(trained) + len(held_out) >= 2:
        caption = "Loss of a label token, in nats: in training the mean of the steps since the report before"
        caption += ", held out that of the evaluation data." if held_out else "."
        out.append(_figure(chart(series, label="loss over the steps", unit="nats", zero=False, span=span), caption))
    for key, unit, caption in (
        ("learning_rate", "learning rate", "Learning rate, of the first group of parameters."),
        ("grad_norm", "norm", "Norm of all gradients of a step together, before clipping."),
    ):
        points = _over_steps(report["loss"], key)
        if len(points) > 1:
            picture = chart([Series("", [points])], label=caption[:-1], unit=unit, height=150, span=span)
            out.append(_figure(picture, caption))
    if held_out and out:
        rows = [
            [
                f"{row['step']:,}",
                f"{row['eval_loss']:.4f}",
                "" if row["perplexity"] is None else format_figure(row["perplexity"]),
            ]
            for row in report["evaluation"][-_MOST_ROWS:]
            if row["eval_loss"] is not None
        ]
        table = _table(("step", "held-out loss", "perplexity"), rows, (0, 1, 2))
        out.append(_folded(plural(len(held_out), "evaluation"), table))
    if report["samples"]:
        rows = [[f"{row['step']:,}", row["completion"]] for row in report["samples"][-_MOST_ROWS:]]
        table = _table(("step", f"{report['samples'][-1]['prompt']!r} continues as"), rows, (0,))
        out.append(_folded(plural(len(report["samples"]), "sample"), table))
    return "".join(out)


def _over_steps(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(row["step"], row[key]) for row in rows if row[key] is not None]


def _last_step(sources: Sources) -> str:
    """The last recorded step, for a run in which nothing switched."""
    return _timelines(sources, [pair for pair in sources.report["timelines"] if pair["step"] is None])


def _switches(sources: Sources) -> str:
    return _timelines(sources, [pair for pair in sources.report["timelines"] if pair["step"] is not None])


def _timelines(sources: Sources, pairs: Sequence[Mapping[str, Any]]) -> str:
    drawn: list[str] = []
    boxes, too_large = 0, 0
    for pair in reversed(pairs[-_MOST_PAIRS:]):
        out: list[str] = []
        shown = [
            (when, pair[when], sources.traces.get(pair[when]["step"])) for when in ("before", "after") if pair[when]
        ]
        steps = [trace.measured for _, _, trace in shown if trace is not None]
        more = sum(len(step.spans) for step in steps)
        end_s = max((step.end_s for step in steps), default=0.0)
        if boxes + more > _MOST_BOXES:
            too_large += 1
            continue
        if end_s <= 0:
            continue
        boxes += more
        if pair["step"] is not None:
            out.append(f"<h3>The switch after step {pair['step']:,}</h3>")
        for when, facts, trace in shown:
            if trace is None:
                continue
            caption = f"{'' if pair['step'] is None else when + ': '}step {facts['step']:,}, {facts['schedule']}, "
            caption += f"{format_duration(facts['measured_s'])}"
            if facts["predicted_s"] is not None:
                caption += f" (as simulated from what was measured then {format_duration(facts['predicted_s'])})"
            out.append(_figure(timeline(trace.measured, end_s, caption), caption))
        drawn.append("".join([*out, timeline_legend(steps)]))
    drawn.reverse()
    if too_large:
        drawn.append(
            _paragraph(f"Too large to draw here: {too_large}; `paceline trace --step N` draws a recorded step.")
        )
    if len(pairs) > _MOST_PAIRS:
        drawn.append(
            _paragraph(f"The last {_MOST_PAIRS} of {len(pairs):,} switches; `paceline trace` draws any recorded step.")
        )
    return "".join(drawn)


# -- devices, links, experts -----------------------------------------------------------------------------------------


def _ranks(sources: Sources) -> str:
    ranks = sources.report["ranks"]
    if not ranks:
        return ""
    rows = []
    for rank in ranks:
        whole = sum(rank[key] for key, _ in _KINDS) or 1.0
        parts = [(look, rank[key] / whole) for key, look in _KINDS]
        summary = " · ".join(f"{share:.0%} {look}" for look, share in parts if share >= 0.005)
        rows.append(
            [
                rank["rank"],
                _Html(f"{escape(rank['holds'])}<span class=why>{escape(summary)}</span>"),
                _Html(shares(parts)),
                size(rank["peak_memory_bytes"]) if rank["peak_memory_bytes"] else "",
            ]
        )
    keys = "".join(f'<span class="key"><i class="{look}"></i>{look}</span>' for _, look in _KINDS)
    table = _table(("rank", "holds", "its time", "peak memory"), rows, (0, 3))
    return f'{table}<p class="legend">{keys}</p>'


def _like_the_last(looks: Sequence[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """Measurements since the run has had its last number of stages: it may have been resumed with another."""
    return [*takewhile(lambda look: kind(look) == kind(looks[-1]), reversed(looks))][::-1]


def _network(sources: Sources) -> str:
    stages = _like_the_last(sources.report["stages"], lambda look: len(look["forward_s"]))
    links = _like_the_last(
        sources.report["links"], lambda look: [(edge["from"], edge["to"]) for edge in look["between"]]
    )
    out = []
    if stages:
        first, last = stages[0], stages[-1]
        rows = [
            [
                stage,
                _seconds(first["forward_s"][stage] + first["backward_s"][stage]),
                _seconds(last["forward_s"][stage] + last["backward_s"][stage]),
                size(last["activation_bytes"][stage]) if last["activation_bytes"] else "",
                size(last["room_bytes"][stage]) if last["room_bytes"] and last["room_bytes"][stage] is not None else "",
            ]
            for stage in range(len(last["forward_s"]))
        ]
        heads = (
            "stage",
            f"at step {first['step']:,}",
            f"at step {last['step']:,}",
            "kept for a micro-batch",
            "room left",
        )
        text = (
            "Forward and backward of a micro-batch, at the first look (micro-batches of "
            f"{first['micro_batch_size']}, {_cut(first['partition'])}) and at the last (of {last['micro_batch_size']}, "
            f"{_cut(last['partition'])})."
        )
        out += [_paragraph(text), _table(heads, rows, range(5))]
    if links:
        named = [(edge["from"], edge["to"]) for edge in links[-1]["between"]]
        hosts = links[-1]["hosts"] or []
        rows = []
        for place, (source, target) in enumerate(named):
            each = [look["between"][place]["bytes_per_s"] for look in links]
            rates = [rate for rate in each if rate is not None]
            apart = len(hosts) > max(source, target) and hosts[source] != hosts[target]
            rows.append(
                [
                    f"{source} → {target}",
                    "between hosts" if apart else "one host",
                    "" if each[-1] is None else size(each[-1], "B/s"),
                    f"{size(min(rates), 'B/s')} {DASH} {size(max(rates), 'B/s')}" if rates else "",
                    _seconds(links[-1]["between"][place]["latency_s"]),
                ]
            )
        out.append(_table(("stages", "", "at the last planning", "over all plannings", "latency"), rows, (2, 3, 4)))
        sent = [(host, rate) for host, rate in enumerate(links[-1]["egress_bytes_per_s"] or []) if rate is not None]
        if sent:
            out.append(_table(("host", "can send"), [[host, size(rate, "B/s")] for host, rate in sent], (1,)))
        out.append(
            "<p><small>Rates are of the run's own messages while at least one was under way; none is shown "
            "where they were too fast to tell, and between hosts that of the sending host counts.</small></p>"
        )
    return "".join(out)


def _experts(sources: Sources) -> str:
    layers = sources.report["experts"]
    if not layers:
        return ""
    heads = ("layer", "first look", "last look", "mean", "had they stayed", "moves", "experts moved")
    rows = [
        [
            layer["layer"],
            *(f"{layer[key]:.3f}" for key in ("first", "last", "mean", "unmoved")),
            layer["moves"],
            layer["moved"],
        ]
        for layer in layers
    ]
    out = [
        _paragraph("Tokens of the busiest device over the mean of all devices; 1 is even."),
        _table(heads, rows, range(1, 7)),
    ]
    worst = sorted(layers, key=lambda layer: (-layer["unmoved"], layer["layer"]))[:_MOST_LAYERS]
    for layer in worst:
        lines = [(float(step), value) for step, value in zip(layer["steps"], layer["imbalance"], strict=True)]
        moved = [
            d["step"]
            for d in sources.report["decisions"]
            if d["switched"] and d["kind"] == "experts" and layer["layer"] in (d["to"]["layers"] or [])
        ]
        out.append(f"<h3>{escape(layer['layer'])}</h3>")
        if len(lines) > 1:
            out.append(
                _figure(
                    chart(
                        [Series("", [lines])],
                        label=f"imbalance of {layer['layer']}",
                        unit="max / mean",
                        zero=False,
                        marks=moved,
                    ),
                    "Tokens of the busiest device over the mean." + " Upright lines are moves." * bool(moved),
                )
            )
        windows = sources.loads.get(layer["layer"])
        if windows:
            out.append(
                _figure(
                    heat_map(windows, f"loads of {layer['layer']}"),
                    "Each expert's share of the tokens, a column for each planning.",
                )
            )
    return "".join(out)


# -- islands, natural gradient, the run ------------------------------------------------------------------------------


def _islands(sources: Sources) -> str:
    rounds = sources.report["islands"]
    if not rounds:
        return ""
    sent, waited = sum(r["bytes_sent"] for r in rounds), sum(r["waited_s"] for r in rounds)
    out = [_paragraph(f"{plural(len(rounds), 'round')}: {size(sent)} sent, {format_duration(waited)} waited.")]
    by_island: dict[Any, list[tuple[float, float]]] = {}
    for one in rounds:
        for island, loss in zip(one["islands"], one["losses"], strict=True):
            if loss is not None:
                by_island.setdefault(island, []).append((one["round"], loss))
    looks = ("main", "warm", "faint")
    series = [
        Series(f"island {island}", [points], looks[number % len(looks)])
        for number, (island, points) in enumerate(sorted(by_island.items(), key=lambda item: str(item[0])))
    ]
    if any(len(points) > 1 for points in by_island.values()):
        picture = chart(series, label="loss of the islands by round", unit="nats", zero=False, axis="round")
        out.append(_figure(picture, "Loss of a label token in training, in nats, as each island had it at a round."))
    rows = [
        [
            one["round"],
            ", ".join(map(str, one["islands"])),
            ", ".join(f"{weight:.2f}" for weight in one["weights"]),
            size(one["bytes_sent"]),
            _seconds(one["waited_s"]),
            _seconds(one["transfer_s"]),
        ]
        for one in rounds[-_MOST_ROWS:]
    ]
    table = _table(("round", "islands", "weights", "sent", "waited", "transfer"), rows, (0, 3, 4, 5))
    return "".join([*out, _folded(f"{plural(len(rows), 'round')}, one by one", table)])


def _natural(sources: Sources) -> str:
    rows = sources.report["natural"]
    if not rows:
        return ""
    last = rows[-1]
    out = [
        _paragraph(
            f"{plural(last['layers'], 'layer')} with natural gradients, {plural(last['updates'], 'update')} of their "
            f"matrices; {last['at_floor']:.1%} of what was learned lay at the floor at last."
        )
    ]
    points = [(row["step"], 100 * row["at_floor"]) for row in rows]
    if len(points) > 1 and any(share for _, share in points):
        picture = chart([Series("", [points])], label="share at the floor", unit="%")
        out.append(_figure(picture, "Of what the matrices learned, the share at their floor, in %."))
    return "".join(out)


def _run(sources: Sources) -> str:
    run = sources.report["run"]
    names = {
        "model_type": "model",
        "parameters": "parameters",
        "stages": "stages",
        "data_parallel": "replicas",
        "boundaries": "boundaries at last",
        "schedule": "schedule at last",
        "micro_batches": "micro-batches a step",
        "micro_batch_size": "samples of a micro-batch",
        "dtype": "numbers",
        "hardware": "hardware",
        "tokens": "tokens",
        "training_s": "training",
    }
    shown: dict[str, Callable[[Any], str]] = {
        "parameters": lambda value: f"{value:,}",
        "tokens": lambda value: f"{value:,}",
        "training_s": format_duration,
        "boundaries": lambda value: ", ".join(map(str, value)),
    }
    rows = [[name, shown.get(key, str)(run[key])] for key, name in names.items() if run[key] is not None]
    rows += [[name, version] for name, version in (run["versions"] or {}).items()]
    return _table(("", ""), rows) if rows else ""


def _started(sources: Sources) -> str:
    run = sources.report["run"]
    words = " ".join(f"<span>{escape(word)}</span>" for word in (run["command"] or "").split())
    out = f'<pre class="command">{words}</pre>' if words else ""
    config = run["ds_config"] or ({"paceline": run["paceline"]} if run["paceline"] else None)
    if config:
        out += _folded("The DeepSpeed JSON", f"<pre>{escape(json.dumps(config, indent=2))}</pre>")
    return out


SECTIONS: tuple[tuple[str, Callable[[Sources], str]], ...] = (
    ("Loss, learning rate, gradient norm", _loss),
    ("Command and JSON", _started),
    ("What was decided", _decisions),
    ("Step time", _steps),
    ("Before and after", _switches),
    ("The last recorded step", _last_step),
    ("Ranks", _ranks),
    ("Stages and links, as measured", _network),
    ("Experts", _experts),
    ("Islands", _islands),
    ("Natural gradient", _natural),
    ("The run", _run),
)
