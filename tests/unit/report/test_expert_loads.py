"""Windows of expert loads: read strictly, summed up by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.report.expert_loads import changes, read, summarize

IN_ORDER = [[0, 1], [2, 3]]


def window(step: int, placement: list[list[int]] = IN_ORDER, loads: Any = (6, 2, 1, 1), **more: Any) -> dict[str, Any]:
    layer = {"name": "a", "loads": list(loads), "placement": placement}
    return {"step": step, "steps": 10, "layers": [layer]} | more


def layers(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "loads": [6, 2, 1, 1], "placement": IN_ORDER} for name in names]


def write(path: Path, *windows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in windows))
    return path


def test_owners_are_those_that_the_file_names(tmp_path: Path) -> None:
    placement = [
        [0, 1, 3],
        [1, 2, 3],
    ]  # by position the first device would own three experts, of which one is not first
    line = window(10, placement)
    line["layers"][0]["owned"] = [1, 3]
    (found,) = read([write(tmp_path / "loads", line)])["a"]
    assert found.placement.owners == (0, 1, 1, 1)


def test_a_layer_that_was_placed_anew(tmp_path: Path) -> None:
    moved = [[0, 3], [2, 1]]
    log = write(tmp_path / "loads", window(10), window(30, moved, steps=20), window(40, moved, (1, 1, 1, 1)))
    windows = read([log])["a"]
    assert [w.step for w in windows] == [10, 30, 40]
    assert windows[0].shares == [0.6, 0.2, 0.1, 0.1]
    assert changes(windows) == [1]
    (summary,) = summarize({"a": windows})
    assert (summary.windows, summary.moves, summary.moved) == (3, 1, 2)
    assert (summary.first, summary.last) == (8 / 5, 1.0)
    # steps weigh: 10 of 1.6 (experts 0 and 1 together), 20 of 1.4 (0 and 3), 10 of 1.0
    assert summary.mean == pytest.approx((1.6 + 2 * 1.4 + 1.0) / 4)
    assert summary.unmoved == pytest.approx((3 * 1.6 + 1.0) / 4)


def test_copies_share_evenly(tmp_path: Path) -> None:
    windows = read([write(tmp_path / "loads", window(10), window(20, [[0, 1, 2], [2, 3, 0]]))])["a"]
    assert windows[1].imbalance == pytest.approx((3 + 2 + 0.5) / 5)
    (summary,) = summarize({"a": windows})
    assert (summary.moves, summary.moved) == (1, 2)


def test_a_layer_without_tokens(tmp_path: Path) -> None:
    (w,) = read([write(tmp_path / "loads", window(10, loads=(0, 0, 0, 0)))])["a"]
    assert (w.imbalance, w.shares) == (1.0, [0.0] * 4)


def test_files_of_several_stages_and_of_a_run_in_two_parts(tmp_path: Path) -> None:
    first = write(tmp_path / "stage0", window(10, layers=layers("a", "b")))
    second = write(tmp_path / "stage1", window(10, layers=layers("c")))
    later = write(tmp_path / "later", window(20, layers=layers("a", "b")))
    found = read([later, first, second])
    assert {name: [w.step for w in windows] for name, windows in found.items()} == {
        "a": [10, 20],
        "b": [10, 20],
        "c": [10],
    }


def test_layers_come_in_the_models_order(tmp_path: Path) -> None:
    """Whatever order a run had them in: after layers have moved, for example."""
    names = [f"model.layers.{number}.mlp" for number in (2, 10, 0)]
    found = read([write(tmp_path / "loads", window(10, layers=layers(*names)))])
    assert list(found) == [names[2], names[0], names[1]]
    assert [summary.name for summary in summarize(found)] == list(found)


def test_a_restart_tells_its_own_story(tmp_path: Path) -> None:
    log = write(tmp_path / "loads", *(window(step) for step in (10, 20, 30)), window(20, loads=(1, 1, 1, 1)))
    assert [(w.step, w.imbalance) for w in read([log])["a"]] == [(10, 1.6), (20, 1.0)]


def test_a_restart_with_another_expert_parallel_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on_four = [[0], [1], [2], [3]]
    log = write(tmp_path / "loads", *(window(step) for step in (10, 20, 30)), window(30, on_four), window(40, on_four))
    with caplog.at_level("WARNING", "paceline"):
        windows = read([log])["a"]
    assert [(w.step, w.placement.num_devices) for w in windows] == [(30, 4), (40, 4)]
    assert caplog.messages == [
        f"{log} has experts on 2 devices, and then on 4: what it says of the steps to 20 is left out"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "Expecting value"),
        ('{"step": 10', "Expecting"),
        ("[" * 100_000, "nested too deeply"),
        ("3", "not subscriptable"),
        ('{"steps": 10, "layers": []}', "'step' is missing"),
        (window(0), "it has 10 steps, the last is 0: both are at least 1"),
        (window(20) | {"step": "20"}, 'step is "20": give a whole number'),
        (window(20, layers=[{"name": "a"}]), "'placement' is missing"),
        (window(20, loads=[6, 2, 1, "x"]), "could not convert string to float: 'x'"),
        (window(20, loads=[6, 2, 1]), "there are 3 loads for 4 experts"),
        (window(20, loads=[6, 2, 1, -1]), "the load of expert 3 is -1.0"),
        (window(20, loads=[6, 2, 1, float("nan")]), "the load of expert 3 is nan"),
        (window(20, loads=[1e308] * 4), "the sum of the loads is not finite"),
        (window(20, placement=[]), "the placement has no devices"),
        (window(20, placement=[[], []]), "the placement has no experts"),
        (window(20, placement=[[0, 1], [3]]), "no device holds expert 2"),
        (window(20, placement=[[0, 1], [2, [3]]]), "device 1 holds [3]"),  # type: ignore[list-item]
        (window(20, placement=[[0, 1], [2, 2, 3]]), "device 1 holds expert 2 twice"),
    ],
)
def test_a_line_that_is_no_window(tmp_path: Path, line: str | dict[str, Any], message: str) -> None:
    log = write(tmp_path / "loads", window(10))
    with log.open("a") as file:
        file.write((line if isinstance(line, str) else json.dumps(line)) + "\n" + json.dumps(window(30)) + "\n")
    with pytest.raises(ValueError, match="line 2") as error:
        read([log])
    assert str(error.value).startswith(f"{log}, line 2")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe")
    for path, message in (
        (tmp_path / "nowhere", "give a file of expert loads"),
        (tmp_path, "give a file of expert loads"),
        (binary, "not UTF-8 text"),
        (empty, "is empty"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            read([path])
        assert str(path) in str(error.value)


def test_files_that_contradict_each_other(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first", window(10)), write(tmp_path / "second", window(10))
    with pytest.raises(ValueError, match="both have layer a at step 10"):
        read([first, second])
    other = write(tmp_path / "other", window(20, [[0], [1], [2], [3]]))
    with pytest.raises(ValueError, match="other: layer a has 4 experts on 4 devices at step 20, and 4 on 2 at step 10"):
        read([first, other])
