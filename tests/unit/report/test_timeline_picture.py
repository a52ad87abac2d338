"""Pictures of timelines, read back from the SVG."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.report.timeline_picture import draw, style_of
from paceline.schedules.costs import Costs
from paceline.schedules.simulate import simulate
from paceline.schedules.split_families import zbh1
from paceline.schedules.timeline import Span, Timeline
from support.timelines import gpipe_timeline

SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]  # left, right, top, bottom in points


def parse(timelines: list[Timeline], folder: Path, **how: bool) -> ElementTree.Element:
    draw(timelines, folder / "step.svg", **how)
    return ElementTree.parse(folder / "step.svg").getroot()


def shapes(root: ElementTree.Element, group: str) -> list[Box]:
    """Extent of every closed or open line in the group."""
    found = []
    for path in root.findall(f".//{SVG}g[@id='{group}']//{SVG}path"):
        for part in path.get("d", "").split("M")[1:]:
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", part)]
            xs, ys = numbers[::2], numbers[1::2]
            found.append((min(xs), max(xs), min(ys), max(ys)))
    return found


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_a_box_for_every_span_where_its_time_is(tmp_path: Path) -> None:
    predicted, measured = gpipe_timeline(name="predicted"), gpipe_timeline(name="measured", backward_s=0.05)
    root = parse([predicted, measured], tmp_path)
    pairs: list[tuple[float, float]] = []
    for number, timeline in enumerate((predicted, measured), 1):
        tops: dict[int, set[float]] = {rank: set() for rank in range(timeline.num_ranks)}
        for group, kind in (("forward-0", "F"), ("backward-0", "B"), ("reduce", "reduce"), ("step", "step")):
            spans = sorted((s for s in timeline.spans if s.kind == kind), key=lambda s: (s.rank, s.start_s))
            boxes = sorted(shapes(root, f"timeline-{number}-{group}"), key=lambda box: (box[2], box[0]))
            assert len(boxes) == len(spans)
            for span, box in zip(spans, boxes, strict=True):
                pairs += [(span.start_s, box[0]), (span.end_s, box[1])]
                tops[span.rank].add(box[2])
        assert [len(found) for found in tops.values()] == [1] * timeline.num_ranks  # one row a rank
    # one scale for all panels: points are a straight line of the seconds
    (first_s, first), (last_s, last) = min(pairs), max(pairs)
    for seconds, x in pairs:
        assert x == pytest.approx(first + (last - first) * (seconds - first_s) / (last_s - first_s), abs=1e-3)
    lowest = max(box[3] for box in shapes(root, "timeline-1-forward-0"))
    assert all(box[2] > lowest for box in shapes(root, "timeline-2-forward-0"))  # the measured step lies below


def test_numbers_title_and_legend(tmp_path: Path) -> None:
    timeline = gpipe_timeline(2, 3, name="gpipe by hand")
    found = texts(parse([timeline], tmp_path))
    counts = Counter(found)
    assert "gpipe by hand: 290.0 ms, 19.0% bubble" in found
    assert "ms since the step began" in found
    assert {"rank 0", "rank 1", "forward", "backward", "reduce", "step", "idle"} <= set(found)
    assert counts["activation under way"] == counts["gradient under way"] == 1
    assert counts["28% idle"] == counts["10% idle"] == 1
    assert counts["1"] == counts["2"] == 4  # two ranks, forward and backward; 0 is on the axis too
    seconds = texts(parse([gpipe_timeline(forward_s=1, backward_s=2)], tmp_path))
    assert "s since the step began" in seconds


def test_numbers_only_where_they_fit(tmp_path: Path) -> None:
    assert "7" in texts(parse([gpipe_timeline(2, 8)], tmp_path))
    crowded = parse([gpipe_timeline(1, 1200)], tmp_path)
    assert "7" not in texts(crowded)
    assert len(shapes(crowded, "timeline-1-backward-0")) == 1200


def test_a_line_for_every_message(tmp_path: Path) -> None:
    timeline = gpipe_timeline(3, 4)
    root = parse([timeline], tmp_path)
    for kind in ("activation", "gradient"):
        lines = shapes(root, f"timeline-1-{kind}")
        assert len(lines) == 8
        boxes = shapes(root, "timeline-1-forward-0")
        edges = {round(edge, 3) for box in boxes for edge in box[2:]}
        assert {round(edge, 3) for line in lines for edge in line[2:]} <= edges  # from row to row
    without = parse([timeline], tmp_path, transfers=False)
    assert not shapes(without, "timeline-1-activation")
    assert "activation under way" not in texts(without)


def test_many_ranks_and_micro_batches(tmp_path: Path) -> None:
    timeline = gpipe_timeline(40, 100)
    root = parse([timeline], tmp_path)
    assert len(shapes(root, "timeline-1-forward-0")) == 40 * 100
    assert not shapes(root, "timeline-1-activation")  # nothing fits between the rows
    assert (tmp_path / "step.svg").stat().st_size < 2e6
    assert "7" not in texts(root)
    width, height = (float(root.get(side, "").removesuffix("pt")) for side in ("width", "height"))
    assert width <= 24 * 72
    assert height <= 11 * 72
    taller = parse([gpipe_timeline(300, 2)], tmp_path)
    assert 20 < sum(text.startswith("rank ") for text in texts(taller)) < 100  # not one on top of the other


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_same_timelines_give_the_same_file(tmp_path: Path, suffix: str) -> None:
    import matplotlib

    draw([gpipe_timeline()], tmp_path / f"first.{suffix}")
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "lines.linewidth": 9}):
        draw([gpipe_timeline()], tmp_path / f"second.{suffix}")
        assert matplotlib.rcParams["font.size"] == 30
    first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("first", "second"))
    assert first == second
    draw([gpipe_timeline(num_micro_batches=5)], tmp_path / f"third.{suffix}")
    assert (tmp_path / f"third.{suffix}").read_bytes() != first


def test_png(tmp_path: Path) -> None:
    draw([gpipe_timeline(), gpipe_timeline()], tmp_path / "step.PNG")
    assert (tmp_path / "step.PNG").read_bytes().startswith(b"\x89PNG\r\n")


def test_forward_and_backward_differ_without_colours() -> None:
    def lightness(span: Span) -> float:
        colour = style_of(span).colour
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255

    forwards = [Span(0, "F", 0, chunk, 0, 1) for chunk in range(5)]
    backwards = [span._replace(kind="B") for span in forwards]
    assert min(map(lightness, forwards)) - max(map(lightness, backwards)) > 0.3
    groups = {style_of(span).group for span in forwards + backwards}
    assert len(groups) == 10  # chunks stay apart in the file even where colours repeat
    weights = [span._replace(kind="W") for span in forwards]
    assert max(lightness(span) for span in weights) < min(map(lightness, backwards)), "what is left for later is darker"


def test_split_backwards_are_told_apart(tmp_path: Path) -> None:
    timeline = simulate(zbh1(2, 3), Costs.uniform(2, 1.0, 2.0), timeline=True).timeline
    assert timeline is not None
    root = parse([timeline], tmp_path)
    assert {"forward", "backward of inputs", "backward of weights"} <= set(texts(root))
    for group in ("forward-0", "backward-of-inputs-0", "backward-of-weights-0"):
        assert len(shapes(root, f"timeline-1-{group}")) == 2 * 3


def test_chunks_are_told_apart(tmp_path: Path) -> None:
    spans = [Span(0, "F", 0, 0, 0.0, 1.0), Span(0, "F", 0, 1, 1.0, 2.0), Span(0, "B", 0, 1, 2.0, 4.0)]
    root = parse([Timeline(1, (*spans, Span(0, "B", 0, 0, 4.0, 6.0)))], tmp_path)
    assert {"forward", "forward, chunk 1", "backward", "backward, chunk 1"} <= set(texts(root))
    assert len(shapes(root, "timeline-1-forward-1")) == 1
    assert any(text.startswith("step: 6.000 s") for text in texts(root))  # no name


def test_no_display_and_no_global_figures(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import paceline.report.timeline_picture as timeline\n"
        "assert 'matplotlib' not in sys.modules\n"
        "from support.timelines import gpipe_timeline\n"
        "timeline.draw([gpipe_timeline()], sys.argv[2])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    arguments = [str(Path(__file__).parents[2]), str(tmp_path / "step.png")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=900)


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step\.gif: pictures are \.svg or \.png files; choose"):
        draw([gpipe_timeline()], tmp_path / "step.gif")
    for nothing in ([], [gpipe_timeline(), replace(gpipe_timeline(), spans=())]):
        with pytest.raises(ValueError, match="nothing to draw: give timelines with at least one span"):
            draw(nothing, tmp_path / "step.svg")
    assert not list(tmp_path.iterdir())
