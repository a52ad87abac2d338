"""The pictures on the README's first screens, from the results beside them: how many times as fast as stock DeepSpeed,
and what a step takes over slow links.

    python tests/benchmarks/front_page.py

Nothing is measured here. Every bar is a figure of a JSON that a benchmark has written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
COLOUR, STOCK = "#0072b2", "#888888"
SLOW_LINKS = {
    "zero3": "DeepSpeed ZeRO-3",
    "fsdp2": "FSDP2",
    "zero1": "DeepSpeed ZeRO-1",
    "stock-pipeline": "DeepSpeed pipeline",
    "paceline": "Paceline, exact",
    "paceline+int8": "Paceline, int8 boundaries",
    "islands+int8": "Paceline, islands",
}
LINKS = {"100 Mbit/s": "100 Mbit/s", "1000 Mbit/s": "1 Gbit/s", "10000 Mbit/s": "10 Gbit/s"}


class Bar(NamedTuple):
    setting: str
    what: str
    times: float


def _result(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text())


def bars() -> Iterator[Bar]:
    for run in _result("network")["network"]:
        if run["mbit"] == 200.0:
            steps = {name: found["step_s"] for name, found in run["contestants"].items()}
            yield Bar("4 hosts on 200 Mbit/s each", "adaptive schedule", steps["stock"] / steps["adaptive"])
    times = _result("preemption")["times_stock"]["adaptive"]
    yield Bar("a network whose rates keep moving", "adaptive schedule", times)
    times = _result("partition")["contestants"]["online"]["times_stock"]
    yield Bar("devices of speeds 4 : 2 : 1 : 1", "layers that move", times)
    times = _result("expert_placement")["trace"]["even"]["times_stock"]
    yield Bar("experts under skewed load", "experts that move, and copies", times)
    rows = [r for r in _result("asynchronous")["rows"] if r["micro_batches"] == 8 and r["mbit"] is None]
    times = next(r["times_stock"] for r in rows if r["contestant"] == "one_direction")
    yield Bar("8 micro-batches, 4 stages, fast network", "no flush (weights one update old)", times)
    times = _result("averaging")["summary"]["plain SGD"]["times_as_fast"]
    yield Bar("4 hosts on 50 Mbit/s, time to a loss", "islands that average", times)


def draw(path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    found = list(bars())
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "paceline", "svg.fonttype": "none", "font.size": 9})
        figure = Figure(figsize=(8.2, 0.46 * len(found) + 0.9))
        axes = figure.subplots()
        figure.subplots_adjust(left=0.36, right=0.97, top=0.9, bottom=0.13)
        places = range(len(found))[::-1]
        axes.barh(places, [bar.times for bar in found], color=COLOUR, height=0.5)
        axes.axvline(1.0, color=STOCK, linewidth=1.2)
        axes.text(1.0, len(found) - 0.45, "stock DeepSpeed", color=STOCK, ha="center", va="bottom", fontsize=8)
        for place, bar in zip(places, found, strict=True):
            axes.text(bar.times + 0.05, place, f"{bar.times:.2f}×", va="center", fontweight="bold")  # noqa: RUF001
            axes.annotate(bar.setting, (0, place), (-8, 1), textcoords="offset points", ha="right", va="bottom")
            axes.annotate(
                bar.what,
                (0, place),
                (-8, -1),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=8,
                color=COLOUR,
            )
        axes.set_yticks([])
        axes.set_xlim(0, max(bar.times for bar in found) + 0.5)
        axes.set_ylim(-0.6, len(found) - 0.1)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_xlabel("times as fast", fontsize=8)
        metadata: dict[str, Any] = {"Date": None, "Creator": None}
        figure.savefig(path, format="svg", metadata=metadata)


def draw_slow_links(path: Path) -> None:
    """Seconds a step of every contestant, a panel for each link, on one logarithmic scale."""
    import matplotlib
    from matplotlib.figure import Figure

    found = _result("against_zero3")["full"]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "paceline", "svg.fonttype": "none", "font.size": 9})
        figure = Figure(figsize=(8.2, 2.9))
        panels = figure.subplots(1, len(LINKS), sharex=True, sharey=True)
        figure.subplots_adjust(left=0.225, right=0.985, top=0.86, bottom=0.15, wspace=0.06)
        places = range(len(SLOW_LINKS))[::-1]
        for axes, (link, title) in zip(panels, LINKS.items(), strict=True):
            seconds = [found[link][name]["step_s"] for name in SLOW_LINKS]
            colours = [COLOUR if label.startswith("Paceline") else STOCK for label in SLOW_LINKS.values()]
            axes.barh(places, seconds, color=colours, height=0.62)
            for place, second in zip(places, seconds, strict=True):
                text = f"{second:.3g} s" if second < 100 else f"{second:.0f} s"
                axes.annotate(text, (second, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
            axes.set_title(f"links of {title}", fontsize=9)
            axes.set_xscale("log")
            axes.set_xlim(0.5, 12000)
            axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
            axes.minorticks_off()
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_yticks(places, list(SLOW_LINKS.values()))
        panels[1].set_xlabel("seconds a step, logarithmic: less is better", fontsize=8)
        metadata: dict[str, Any] = {"Date": None, "Creator": None}
        figure.savefig(path, format="svg", metadata=metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".svg"))
    parser.add_argument("--slow-links", type=Path, default=HERE / "against_zero3.svg")
    args = parser.parse_args()
    draw(args.output)
    draw_slow_links(args.slow_links)
    for bar in bars():
        print(f"{bar.times:.2f}  {bar.setting}: {bar.what}")


if __name__ == "__main__":
    main()
