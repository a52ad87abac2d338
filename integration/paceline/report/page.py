"""The report of a run as one HTML page that needs nothing beside it: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .comparison import format_duration, format_figure
from .expert_loads import Window
from .page_sections import SECTIONS, TIMES, Sources, both, count, percent, plural, size
from .step_records import StepRecord

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root{color-scheme:light dark;--paper:#fdfdfb;--ink:#1c1e21;--quiet:#666a70;--rule:#e2e2dc;--shade:#f3f3ee;
--main:#225f9c;--warm:#c4500f;--faint:#b4b8bd;--good:#2a7030}
@media(prefers-color-scheme:dark){:root{--paper:#15171a;--ink:#e4e4e0;--quiet:#989da4;--rule:#30343a;--shade:#1e2125;
--main:#7db4ea;--warm:#f0915a;--faint:#5b6068;--good:#86c98b}}
*{box-sizing:border-box}
body{margin:0 auto;padding:3rem 1.5rem 4rem;max-width:52rem;background:var(--paper);color:var(--ink);
font:16px/1.55 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
h1{font-size:2rem;line-height:1.2;font-weight:600;letter-spacing:-.02em;margin:0 0 .4rem}
h2{font-size:1.2rem;font-weight:600;letter-spacing:-.01em;margin:3.2rem 0 .6rem;padding-top:1rem;
border-top:1px solid var(--rule)}
h3{font-size:.95rem;font-weight:600;margin:1.6rem 0 .3rem}
p{margin:.4rem 0 .8rem;max-width:44rem}
.quiet,small,figcaption,.why{color:var(--quiet)}
small,figcaption,.why{font-size:.85rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:1.4rem 1.6rem;margin:2rem 0 0}
.tiles dt{font-size:.82rem;color:var(--quiet)}
.tiles dd{margin:0;font-size:1.7rem;line-height:1.25;font-weight:600;letter-spacing:-.02em}
.tiles dd small{display:block;font-size:.82rem;font-weight:400;letter-spacing:0;line-height:1.4}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem;margin:.6rem 0 1rem}
th{font-weight:500;color:var(--quiet);text-align:left;border-bottom:1px solid var(--rule);padding:.3rem .9rem .3rem 0}
td{border-bottom:1px solid var(--rule);padding:.4rem .9rem .4rem 0;vertical-align:top}
th:last-child,td:last-child{padding-right:0}
.n{text-align:right;white-space:nowrap}
.why{display:block}
.noted td:nth-child(2){min-width:8rem}
.noted td{border-bottom:0;padding-bottom:0}.note td{padding-top:0;color:var(--quiet);font-size:.82rem}
figure{margin:1rem 0 1.2rem}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:11px;fill:var(--ink)}
svg text.quiet{fill:var(--quiet)}
svg .end{text-anchor:end}svg .middle{text-anchor:middle}
svg .on-light{fill:#1c1e21}svg .on-dark{fill:#fff}
.grid{stroke:var(--rule);fill:none}.mark{stroke:var(--warm);stroke-dasharray:2 3;fill:none}
.line{fill:none;stroke-width:1.7;stroke-linejoin:round}
.dots{fill:none;stroke-width:4;stroke-linecap:round}
.main{stroke:var(--main)}.warm{stroke:var(--warm)}.faint{stroke:var(--faint)}
.line.warm{stroke-dasharray:5 3}.dots.faint{stroke-width:3}
.row{fill:var(--shade);background:var(--shade)}.heat{fill:var(--main)}
.bar{width:100%;min-width:7rem;height:.8rem;margin-top:.35rem}
.compute{fill:var(--main);background:var(--main)}.communication{fill:var(--warm);background:var(--warm)}
.idle{fill:var(--rule);background:var(--rule)}.other{fill:var(--faint);background:var(--faint)}
.legend{font-size:.8rem;color:var(--quiet);margin:.3rem 0 0}
.key{margin-right:1.2rem;white-space:nowrap}
.key i{display:inline-block;width:.8rem;height:.8rem;margin-right:.35rem;vertical-align:-.1rem}
.key.main::before,.key.warm::before,.key.faint::before{content:"";display:inline-block;width:1.1rem;
border-top:2px solid var(--main);margin-right:.35rem;vertical-align:.25rem}
.key.warm::before{border-top:2px dashed var(--warm)}.key.faint::before{border-top-color:var(--faint)}
details{margin:.4rem 0}summary{cursor:pointer;color:var(--quiet);font-size:.88rem}
pre{font-size:.8rem;background:var(--shade);padding:.8rem 1rem;overflow-x:auto;border-radius:4px}
pre.command{white-space:pre-wrap;overflow-wrap:anywhere}.command span{display:inline-block}
footer{margin-top:3.5rem;border-top:1px solid var(--rule);padding-top:1rem}
@media print{:root{color-scheme:light;--paper:#fff;--ink:#000;--quiet:#555;--rule:#ccc;--shade:#f1f1ee;--main:#225f9c;
--warm:#c4500f;--faint:#aaa}body{padding:0;max-width:none;font-size:11pt}h2{margin-top:1.6rem}
h2,h3{break-after:avoid}figure,tr,.tiles{break-inside:avoid}svg,.key i{print-color-adjust:exact}}
""".strip()


def render(
    report: Mapping[str, Any], traces: Sequence[StepRecord] = (), loads: Mapping[str, Sequence[Window]] | None = None
) -> str:
    """The page.

    Args:
        report: of :func:`~paceline.report.run_report.make_report`.
        traces: recorded steps, of which it shows those that the report names.
        loads: of experts, for heat maps.
    """
    sources = Sources(report, {trace.step: trace for trace in traces}, loads or {})
    run = report["run"]
    title = _title(run)
    body = [f"<header><h1>{escape(title)}</h1>{_subtitle(run)}</header>", _tiles(report)]
    for heading, section in SECTIONS:
        inner = section(sources)
        if inner:
            body.append(f"<section><h2>{escape(heading)}</h2>{inner}</section>")
    body.append(_notes(report))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(run['name'])}: {escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _title(run: Mapping[str, Any]) -> str:
    what = run["model_type"] or run["name"]
    if run["parameters"]:
        what += f", {count(run['parameters'])} parameters"
    steps = f"{run['steps']:,} steps"
    if run["state"] != "finished" and run["planned_steps"]:
        steps = f"{run['steps']:,} of {run['planned_steps']:,} steps"
    return f"{what}: {steps}"


def _subtitle(run: Mapping[str, Any]) -> str:
    parts = [run["name"]]
    if run["island"] is not None:
        parts.append(f"island {run['island']}")
    if run["stages"]:
        parts.append(f"{plural(run['stages'], 'stage')} {TIMES} {plural(run['data_parallel'], 'replica')}")
        parts.append(f"{plural(run['micro_batches'], 'micro-batch', 'micro-batches')} of {run['micro_batch_size']}")
    parts += [run[key] for key in ("dtype", "hardware") if run[key]]
    if run["started"]:
        parts.append(f"started {run['started'].replace('T', ' ').replace('+00:00', ' UTC')}")
    if run["resumed_from_step"]:
        parts.append(f"gone on from step {run['resumed_from_step']:,}")
    text = f'<p class="quiet">{escape(" · ".join(map(str, parts)))}</p>'
    if run["state"] != "finished":
        text += (
            "<p>This run has not come to its end: it was stopped, or is still under way. What follows is what it had "
            "told.</p>"
        )
    return text


def _tiles(report: Mapping[str, Any]) -> str:
    head, tiles = report["headline"], []

    def tile(name: str, value: Any, show: Callable[[Any], str], more: str = "") -> None:
        if value is not None:
            tiles.append(
                f"<div><dt>{escape(name)}</dt><dd>{escape(show(value))}<small>{escape(more)}</small></dd></div>"
            )

    tile("loss", head["loss"], format_figure, "in training, at last")
    perplexity = f"perplexity {format_figure(head['perplexity'])}" if head["perplexity"] is not None else ""
    tile("held-out loss", head["eval_loss"], format_figure, perplexity)
    flops = report["run"]["model_flop_per_s"]
    tile(
        "tokens a second",
        head["tokens_per_s"],
        lambda rate: f"{rate:,.0f}",
        f"{size(flops, 'FLOP/s')}" if flops else "",
    )
    tile("step", head["median_step_s"], format_duration, "median")
    saved = head["saved"]
    if saved is not None:
        pace = both(saved["before"]["median_s"], saved["after"]["median_s"]) + " a step"
        tile("time since the first switch", -saved["share"], percent, pace)
    switches = sum(decision["switched"] for decision in report["decisions"])
    plannings = len(report["decisions"])
    if plannings:
        tile(
            "decisions",
            switches,
            lambda number: plural(number, "switch", "switches"),
            f"in {plural(plannings, 'planning')}",
        )
    return f'<dl class="tiles">{"".join(tiles)}</dl>' if tiles else ""


def _notes(report: Mapping[str, Any]) -> str:
    lines: Iterable[str] = [
        "Seconds of a step by the host's clock are the first rank's, with loading data and what was written in them. "
        "What the tuner predicts and measures is the pipeline's step alone, from when its first rank begins until its "
        "last one ends.",
        *(f"Not shown: {problem}" for problem in report["problems"]),
    ]
    return f"<footer>{''.join(f'<p><small>{escape(line)}</small></p>' for line in lines)}</footer>"
