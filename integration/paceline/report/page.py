"""The report of a run as one HTML page that needs nothing beside it: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..messages import plural
from . import drawing, page_figures
from .comparison import format_duration, format_figure
from .expert_loads import Window
from .step_records import StepRecord

if TYPE_CHECKING:
    from jinja2 import Template

_RUN = {
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


def render(
    report: Mapping[str, Any], traces: Sequence[StepRecord] = (), loads: Mapping[str, Sequence[Window]] | None = None
) -> str:
    """The page.

    Args:
        report: of :func:`~paceline.report.run_report.make_report`.
        traces: recorded steps, of which it shows those that the report names.
        loads: of experts, for heat maps.
    """
    return template().render(
        report=report,
        figures=page_figures,
        plural=plural,
        traces={trace.step: trace for trace in traces},
        loads=loads or {},
        title=_title(report["run"]),
        facts=_facts(report["run"]),
        drawing=drawing,
    )


@cache
def template() -> Template:
    """Compiled once in a process."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("paceline.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "count": page_figures.count,
        "size": page_figures.size,
        "percent": page_figures.percent,
        "duration": page_figures.seconds,
        "figure": format_figure,
        "cut": page_figures.cut,
        "whole": lambda value: f"{value:,.0f}",
        "pretty": lambda value: json.dumps(value, indent=2),
    }
    return environment.get_template("page.html.j2")


def _title(run: Mapping[str, Any]) -> str:
    what = run["model_type"] or run["name"]
    if run["parameters"]:
        what += f", {page_figures.count(run['parameters'])} parameters"
    if run["state"] != "finished" and run["planned_steps"]:
        return f"{what}: {run['steps']:,} of {plural(run['planned_steps'], 'step')}"
    return f"{what}: {plural(run['steps'], 'step')}"


def _facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = {
        "parameters": "{:,}".format,
        "tokens": "{:,}".format,
        "training_s": format_duration,
        "boundaries": lambda value: ", ".join(map(str, value)),
    }
    rows = [(name, shown.get(key, str)(run[key])) for key, name in _RUN.items() if run[key] is not None]
    return rows + list((run["versions"] or {}).items())
