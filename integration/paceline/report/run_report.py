"""The report of a run: one JSON value, and a page that shows it. The same records give the same bytes.

Keys of the value, :data:`FORMAT` among them; what a run has no data for is null or empty:

==================  ================================================================================================
``format``          1; another one when a key changes its meaning
``run``             what ran: the command, the DeepSpeed JSON as given (``ds_config``), its ``"paceline"`` section,
                    model, shape, hardware, versions; ``state`` is ``"finished"``, or ``"unfinished"`` for one that
                    was killed or is under way
``headline``        the last loss and held-out loss; of the steps since the run was last resumed tokens a second, the
                    median, and ``saved`` (:func:`~paceline.report.switches.saved`)
``loss``            a row a report: step, loss, learning rate, gradient norm
``evaluation``      a row an evaluation: step, held-out loss, perplexity
``samples``         a row a sample: step, prompt, completion
``steps``           a row a report: step, seconds of a step, tokens a second, tokens so far
``configurations``  steps in a row that ran alike: schedule, micro-batch size, partition, the seconds of each step
``decisions``       a row a decision: from what to what and why, predicted and measured, the candidates, what switching
                    cost, and, in ``after``, what was measured until the next one
``timelines``       for each switch the recorded steps next to it: how long, predicted and measured, idle shares
``stages``          a row a re-planning: seconds of a forward and a backward, bytes of a message and of live activations
``links``           a row a re-planning: bytes a second and latency between neighbouring stages, and of each host; null
                    is faster than could be measured
``experts``         a row a layer: how even the devices were at each rebalancing, and where experts lay before the last
``ranks``           a row a rank: what it holds, peak memory, where its time went
``islands``         a row a round: who took part, with what loss and weight, bytes sent, seconds waited
``natural``         a row a report: layers, updates, the share at the floor; the greatest change where it is limited
``problems``        what could not be read
==================  ================================================================================================

Times whose name is ``step_s`` or that lie in ``configurations`` are the first rank's, by the host's clock, with loading
data in them; ``measured_s`` is what the tuner measures, from the first rank's beginning to the last one's end, which is
what it predicts.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from .comparison import rank_times
from .expert_loads import Window, summarize
from .metrics import finite, write_whole
from .run_records import RunRecords, read
from .step_records import StepRecord
from .switches import EXPERTS, Configuration, configurations, decisions, saved

FORMAT = 1
PAGE, VALUE = "report.html", "report.json"
_FACTS = (
    *("model_type", "parameters", "stages", "data_parallel", "boundaries", "micro_batches", "micro_batch_size"),
    *("schedule", "dtype", "hardware", "versions"),
)


def write(run_dir: str | os.PathLike[str], page: str | os.PathLike[str] | None = None) -> tuple[Path, Path]:
    """Write the page of a run, and its value beside it under the same name with ``.json``.

    Args:
        page: by default ``report.html`` in the directory of the run.

    Returns:
        The page and the value.

    Raises:
        ValueError: the records cannot be read.
        OSError: the files cannot be written.
    """
    from .page import render

    with _of_this_version(Path(run_dir).resolve().name):
        records = read(run_dir)
    report = make_report(records)
    path = Path(run_dir) / PAGE if page is None else Path(page)
    value = path.with_suffix(".json")
    if value != Path(run_dir) / VALUE and value.exists() and not _is_report(value):
        raise ValueError(
            f"{value} would hold the report's numbers, and is there and no report: choose another --output."
        )
    with _of_this_version(records.name):
        html = render(report, records.traces, records.loads)
    path.parent.mkdir(parents=True, exist_ok=True)
    for target, text in ((value, to_json(report)), (path, html)):
        write_whole(target, text)
    return path, value


def to_json(report: Mapping[str, Any]) -> str:
    """The text of ``report.json``."""
    return json.dumps(report, allow_nan=False, indent=1) + "\n"


def make_report(records: RunRecords) -> dict[str, Any]:
    """The value whose keys are those above.

    Raises:
        ValueError: the records are not what a run writes.
    """
    with _of_this_version(records.name):
        return finite(_report(records))


@contextmanager
def _of_this_version(name: str) -> Iterator[None]:
    """Name the run whose records are not what they should be."""
    from jinja2 import UndefinedError

    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, UndefinedError) as error:
        raise ValueError(
            f"{name} holds records that no run of this version writes ({type(error).__name__}: {error}): give the "
            "output directory of another run."
        ) from None


def _is_report(path: Path) -> bool:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and {"format", "headline", "configurations"} <= values.keys()


def _report(records: RunRecords) -> dict[str, Any]:
    first_step = records.start.get("first_step") or 0
    resumed_after = records.start.get("resumed_after", [first_step])  # of an older run the last one is known
    ran = configurations(records.having("ran"), resumed_after)
    decided = decisions(records.inner("decision"), ran, resumed_after)
    switched_at = [d["step"] - (d["kind"] == EXPERTS) for d in decided if d["switched"] and d["step"] > first_step]
    own = [one for one in ran if one.first_step > first_step]  # since the run was last resumed
    return {
        "format": FORMAT,
        "run": _run(records),
        "headline": {**_headline(records, own), "saved": saved(own, switched_at)},
        "loss": [_row(line, "step", "loss", "learning_rate", "grad_norm") for line in records.having("loss")],
        "evaluation": [_row(line, "step", "eval_loss", "perplexity") for line in records.having("eval_loss")],
        "samples": [dict(line) for line in records.inner("sample")],
        "steps": [_row(line, "step", "step_s", "tokens_per_s", "tokens") for line in records.having("loss")],
        "configurations": [one.to_dict() for one in ran],
        "decisions": decided,
        "timelines": _timelines(decided, records.traces, resumed_after),
        "stages": [
            _row(look, "step", "partition", "micro_batch_size", "measured_s", "forward_s", "backward_s", "step_s")
            | _row(look, "message_bytes", "activation_bytes")
            | {"room_bytes": _room(look)}
            for look in records.inner("look")
        ],
        "links": [_links(look) for look in records.inner("look") if look.get("down")],
        "experts": _experts(records.loads or {}),
        "ranks": list((records.summary or {}).get("ranks") or []),
        "islands": [dict(line) for line in records.inner("averaging")],
        "natural": [
            {"step": line["step"], **line["natural_gradient"], "max_change": line.get("max_change")}
            for line in records.having("loss")
            if line.get("natural_gradient")
        ],
        "problems": list(records.problems),
    }


def _row(line: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: line.get(key) for key in keys}


def _run(records: RunRecords) -> dict[str, Any]:
    start, summary = records.start, records.summary
    facts = start if summary is None else summary
    last = records.having("loss")[-1] if records.having("loss") else {}
    return {
        "name": records.name,
        "state": "unfinished" if summary is None else "finished",
        "started": start.get("started"),
        "steps": last.get("step", 0) if summary is None else summary.get("steps"),
        "planned_steps": start.get("planned_steps"),
        "resumed_from_step": start.get("first_step") or None,
        "island": start.get("island"),
        **_row(facts, *_FACTS),
        **_row(start, "command", "ds_config", "paceline"),
        "tokens": last.get("tokens") if summary is None else summary.get("tokens"),
        "training_s": (summary or {}).get("training_s"),
        "model_flop_per_s": (summary or {}).get("model_flop_per_s"),
    }


def _headline(records: RunRecords, ran: Iterable[Configuration]) -> dict[str, Any]:
    summary, lines = records.summary or {}, records.having("loss")
    steady = [seconds for one in ran for seconds in one.steady_s]
    rate = summary.get("tokens_per_s")
    if rate is None and lines:  # of an unfinished run: from its reports
        since = records.start.get("first_step") or 0
        tokens_before = records.start.get("first_tokens")
        if tokens_before is None:  # of an older run
            tokens_before = next((line["tokens"] for line in reversed(lines) if line["step"] <= since), 0)
        own = [line for line in lines if line["step"] > since]
        firsts = [since, *(line["step"] for line in own)]
        whole_s = sum(line["step_s"] * (line["step"] - first) for first, line in zip(firsts, own, strict=False))
        rate = (lines[-1]["tokens"] - tokens_before) / whole_s if whole_s else None
    evaluation = records.having("eval_loss")[-1] if records.having("eval_loss") else {}
    return {
        "loss": lines[-1]["loss"] if lines else summary.get("train_loss"),
        "eval_loss": evaluation.get("eval_loss", summary.get("eval_loss")),
        "perplexity": evaluation.get("perplexity", summary.get("perplexity")),
        "tokens_per_s": rate,
        "median_step_s": median(steady) if steady else None,
    }


def _timelines(
    decided: Sequence[Mapping[str, Any]], traces: Sequence[StepRecord], resumed_after: Sequence[int]
) -> list[dict[str, Any]]:
    """The last recorded step before each switch and the first after it, with no other switch or resumption between."""
    switches = sorted({d["step"] for d in decided if d["switched"] and d["kind"] != EXPERTS})
    bounds, found = [0, *switches, inf], []
    for since, step, until in zip(bounds, switches, bounds[2:], strict=False):
        part = bisect_left(resumed_after, step)
        own = [trace for trace in traces if bisect_left(resumed_after, trace.step) == part]
        before = [trace for trace in own if since < trace.step <= step]
        after = [trace for trace in own if step < trace.step <= until]
        if before or after:
            ends = {"before": _timeline(*before[-1:]), "after": _timeline(*after[:1])}
            found.append({"step": step, **ends})
    if not found and traces:
        found.append({"step": None, "before": None, "after": _timeline(traces[-1])})
    return found


def _timeline(record: StepRecord | None = None) -> dict[str, Any] | None:
    if record is None:
        return None
    end_s = record.measured.end_s
    return {
        "step": record.step,
        "schedule": record.schedule,
        "measured_s": record.measured_s,
        "predicted_s": record.predicted_s,
        "idle_shares": [time.idle_s / end_s if end_s else 0.0 for time in rank_times(record.measured)],
    }


def _room(look: Mapping[str, Any]) -> list[Any] | None:
    """Bytes that are left for each stage: where it is on several devices, on the one with least."""
    room, routes = look.get("room_bytes"), look.get("routes")
    if not room or not routes:
        return room
    of_stages = [[room[device] for device in held] for held in zip(*routes, strict=True)]
    return [None if None in held else min(held) for held in of_stages]


def _links(look: Mapping[str, Any]) -> dict[str, Any]:
    hosts, routes = look.get("hosts"), look.get("routes")
    return {
        "step": look["step"],
        "hosts": [hosts[device] for device in routes[0]] if hosts and routes else hosts,
        "egress_bytes_per_s": look.get("egress_bytes_per_s"),
        "between": [
            {"from": source, "to": target, **link}
            for boundary, pair in enumerate(zip(look["down"], look["up"], strict=True))
            for (source, target), link in zip(((boundary, boundary + 1), (boundary + 1, boundary)), pair, strict=True)
        ],
    }


def _experts(loads: Mapping[str, Sequence[Window]]) -> list[dict[str, Any]]:
    return [
        {
            "layer": summary.name,
            **{key: getattr(summary, key) for key in ("first", "last", "mean", "unmoved", "moves", "moved")},
            "steps": [window.step for window in windows],
            "imbalance": [window.imbalance for window in windows],
            "placement": [list(device) for device in windows[-1].placement.devices],
        }
        for summary, windows in zip(summarize(loads), loads.values(), strict=True)
    ]
