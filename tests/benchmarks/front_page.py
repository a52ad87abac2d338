"""The picture on the README's first screen: how many times as fast as stock DeepSpeed, from the results beside it.

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".svg"))
    args = parser.parse_args()
    draw(args.output)
    for bar in bars():
        print(f"{bar.times:.2f}  {bar.setting}: {bar.what}")


if __name__ == "__main__":
    main()
