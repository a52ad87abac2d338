"""Heat maps of expert loads."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.planning.experts import Placement
from paceline.report.expert_heat_map import draw
from paceline.report.expert_loads import Window

SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
IN_ORDER, MOVED = Placement(((0, 1), (2, 3))), Placement(((0, 3), (2, 1)))


def windows() -> list[Window]:
    return [
        Window(10, 10, (6, 2, 1, 1), IN_ORDER),
        Window(20, 10, (6, 2, 1, 1), MOVED),
        Window(30, 10, (1, 1, 1, 1), MOVED),
    ]


def drawn(layers: dict[str, list[Window]], path: Path) -> ElementTree.Element:
    draw(layers, path)
    return ElementTree.parse(path).getroot()


def texts(picture: ElementTree.Element) -> set[str]:
    return {"".join(text.itertext()).strip() for text in picture.iter(f"{SVG}text")}


def groups(picture: ElementTree.Element) -> set[str]:
    return {group.get("id", "") for group in picture.iter(f"{SVG}g")}


def test_a_panel_a_layer(tmp_path: Path) -> None:
    picture = drawn({"one": windows(), "two": windows()[:1]}, tmp_path / "loads.svg")
    assert {
        "one: max / mean device load 1.60 at first, 1.00 at last",
        "two: max / mean device load 1.60 at first, 1.60 at last",
        "10",
        "20",
        "30",
        "experts moved",
        "share of tokens",
    } <= texts(picture)
    found = groups(picture)
    assert {"experts-1", "devices-1-imbalance", "devices-1-unmoved", "experts-2", "devices-2-imbalance"} <= found
    # experts moved once, in the first layer only: before its second window
    assert {name for name in found if "moved-" in name} == {"experts-1-moved-1", "devices-1-moved-1"}


def test_cells_are_stronger_where_the_share_is_larger(tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture = drawn({"one": windows()}, tmp_path / "loads.svg")
    links = [image.get(f"{XLINK}href", "") for image in picture.iter(f"{SVG}image")]
    assert all(link.startswith("data:image/png;base64,") for link in links), "needs no other file"
    cells = imread(io.BytesIO(base64.b64decode(links[0].partition(",")[2])))
    assert cells.shape[:2] == (4, 3), "a pixel a cell: experts in rows, windows in columns"
    strength = cells[:, :, 3]
    assert list(strength[:, 0]) == sorted(strength[:, 0], reverse=True), "loads fall from expert 0 to expert 3"
    assert strength[0, 0] == strength[0, 1] > strength[0, 2]
    assert strength[3, 0] < strength[3, 2]


def test_the_same_windows_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw({"one": windows()}, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert not re.search(r"<dc:date>|file:", (tmp_path / "a.svg").read_text())


def test_extremes(tmp_path: Path) -> None:
    nothing = Window(10, 10, (0, 0), Placement(((0,), (1,))))
    assert "a: max / mean device load 1.00 at first, 1.00 at last" in texts(drawn({"a": [nothing]}, tmp_path / "a.svg"))
    experts = tuple(range(300))
    many = [Window(step, 1, experts, Placement.contiguous(300, 4)) for step in range(1, 501)]
    assert "500" not in texts(drawn({"a": many}, tmp_path / "b.svg"))  # labels keep their distance
    assert (tmp_path / "b.svg").stat().st_size < 500_000


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose one of these suffixes"):
        draw({"one": windows()}, tmp_path / "loads.gif")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw({}, tmp_path / "loads.svg")
    assert not list(tmp_path.iterdir())
