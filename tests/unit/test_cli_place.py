"""``paceline place``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.launch.cli import main

LOADS = [[9, 1, 1, 1, 5, 1, 1, 1], [1] * 8, [0] * 8]
EVEN = ("--devices", "4", "--slots-per-device", "2")


@pytest.fixture
def write(tmp_path):
    """Writes values as JSON, or a text, to a file; its path."""

    def written(values, name="loads.json"):
        path = tmp_path / name
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return str(path)

    return written


def answer(capsys, path, *argv):
    assert main(["place", "--loads", path, *argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)["layers"]


def test_json(capsys, write):
    layers = answer(capsys, write([[4, 3, 2, 1]]), "--devices", "2", "--slots-per-device", "2")
    assert layers == [
        {
            "placement": [[0, 3], [2, 1]],
            "owned": [2, 2],
            "before": 1.4,
            "after": 1.0,
            "after_split": 1.0,
            "bound": 1.0,
            "moved": 2,
        }
    ]


def test_copies(capsys, write):
    first = answer(capsys, write(LOADS), *EVEN, "--replicas", "1")
    assert [layer["moved"] > 0 for layer in first] == [True, False, False]
    assert first[0]["before"] == first[0]["bound"] == 2.0
    assert first[0]["after"] < 1.2
    assert first[0]["after_split"] == pytest.approx(1.0, abs=1e-3)
    held = first[0]["placement"]
    assert all(len(experts) <= 3 and len(set(experts)) == len(experts) for experts in held)
    assert sorted(expert for experts in held for expert in experts[:2]) == list(range(8))
    # What does not become better stays, also blocks of neighbours under even loads.
    assert first[1]["placement"] == first[2]["placement"] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_loads_of_a_run_are_those_of_its_last_planning(capsys, write):
    """Lines of two stages, each with its own layers: of the model's layers 2, 9 and 10."""

    def line(step, **loads):
        placement = [[0, 1, 2, 3], [4, 5, 6, 7]]
        layers = [{"name": f"layers.{n[1:]}.mlp", "loads": row, "placement": placement} for n, row in loads.items()]
        return json.dumps({"step": step, "steps": 10, "layers": layers}) + "\n"

    before = line(10, _2=[1] * 8, _10=[1] * 8) + line(10, _9=[5, 1, 1, 1, 1, 1, 1, 1])
    log = write(before + line(20, _2=LOADS[0], _10=LOADS[2]) + line(20, _9=LOADS[1]), "expert_loads.jsonl")
    assert answer(capsys, log, *EVEN) == answer(capsys, write(LOADS), *EVEN)
    assert main(["place", "--loads", write("[[1]]\n", "none.jsonl"), "--devices", "1"]) == 2
    assert "none.jsonl, line 1 is no window of expert loads" in capsys.readouterr().err


def test_current(capsys, write):
    loads = write(LOADS)
    first = answer(capsys, loads, *EVEN, "--replicas", "1")
    current = write({"layers": first}, "current.json")
    again = answer(capsys, loads, *EVEN, "--replicas", "1", "--current", current)
    assert [layer["moved"] for layer in again] == [0, 0, 0]
    assert [layer["before"] for layer in again] == [layer["after"] for layer in first]
    assert [layer["placement"] for layer in again] == [layer["placement"] for layer in first]
    # The placement alone is enough, and with another number of copies it has to change.
    bare = write({"layers": [{"placement": layer["placement"]} for layer in first]}, "bare.json")
    assert answer(capsys, loads, *EVEN, "--replicas", "1", "--current", bare) == again
    without = answer(capsys, loads, *EVEN, "--current", bare)
    assert all(len(experts) == 2 for layer in without for experts in layer["placement"])


def test_owners_stay(capsys, write):
    layers = answer(capsys, write(LOADS), *EVEN, "--replicas", "1", "--keep-owners")
    assert [experts[:2] for experts in layers[0]["placement"]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layers[0]["after"] < layers[0]["before"]


def test_nodes(capsys, write):
    layers = answer(capsys, write([[9, 1, 1, 1, 5, 1, 1, 1]]), *EVEN, "--replicas", "1", "--nodes", "2")
    held = layers[0]["placement"]
    assert {*held[0], *held[1]}.isdisjoint({*held[2], *held[3]})


def test_copies_that_are_in_another_node_do_not_stay(capsys, write):
    """However even that makes the devices."""
    now = {"layers": [{"placement": [[0], [1, 0], [2, 0], [3, 0]], "owned": [1] * 4}]}
    argv = ("--devices", "4", "--replicas", "1", "--nodes", "2", "--current", write(now, "now.json"))
    (layer,) = answer(capsys, write([[10, 1, 1, 1]]), *argv)
    assert layer["after"] > layer["before"]
    holders = [device for device, experts in enumerate(layer["placement"]) if 0 in experts]
    assert len({device // 2 for device in holders}) == 1


def test_speeds(capsys, write):
    (layer,) = answer(capsys, write([[6, 5, 1, 1]]), "--devices", "2", "--slots-per-device", "3", "--speeds", "1", "3")
    assert list(map(sorted, layer["placement"])) == [[2, 3], [0, 1]]
    assert (layer["before"], layer["after"]) == pytest.approx((11 * 2 / 6.5, 11 * 2 / 3 / 6.5))
    assert main(["place", "--loads", write([[1, 2]]), "--devices", "2", "--speeds", "1", "--json"]) == 2
    assert "1 speeds for 2 devices: give one for each" in capsys.readouterr().err


def test_room_that_is_not_needed(capsys, write):
    layers = answer(capsys, write([[5, 1, 1]]), "--devices", "2", "--slots-per-device", "3")
    assert sorted(map(sorted, layers[0]["placement"])) == [[0], [1, 2]]
    layers = answer(capsys, write([[5, 1]]), "--devices", "4")
    assert layers[0]["moved"] == 0


def test_text(capsys, write):
    assert main(["place", "--loads", write([[4, 4, 1, 1], [0, 0, 0, 0]]), "--devices", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "layer  before  after  split  bound  moved",
        "    0   2.400  1.200  1.200  1.200      2",
        "    1   1.000  1.000  1.000  1.000      0",
        "",
        "layer 0",
        "  device 0: 0",
        "  device 1: 1",
        "  device 2: 3 2",
        "",
        "layer 1",
        "  device 0: 0 1",
        "  device 1: 2",
        "  device 2: 3",
    ]
    path = write([[9, 1]], "two.json")
    assert main(["place", "--loads", path, "--devices", "2", "--slots-per-device", "1", "--replicas", "1"]) == 0
    assert "  device 1: 1 + copies 0" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("values", "argv", "message"),
    [
        ("", EVEN, "line 1, column 1: Expecting value; give a file with JSON, [[load per expert] per layer]."),
        ("[[1, NaN]]", EVEN, "line 1, column 6: NaN is not JSON; write a number"),
        ("[[1, Infinity]]", EVEN, "Infinity is not JSON"),
        ("[[1, 1e999]]", EVEN, "layer 0, expert 1 is too large or too small to be computed with"),
        ("[" * 100_000, EVEN, "too many brackets inside each other"),
        ("[[" + "9" * 5000 + "]]", EVEN, "Exceeds the limit"),
        ({"layers": [[1]]}, EVEN, "holds an object: give a list of layers, each a list of the experts' loads."),
        ([], EVEN, "the file is empty: give a list with something in it."),
        ([[]], EVEN, "layer 0 is empty: give a list with something in it."),
        ([1, 2], EVEN, "layer 0 is 1: give a list"),
        ([[1, -2]], EVEN, "layer 0: the load of expert 1 is -2.0: give a finite number from 0 upwards."),
        ([[1, "2\n"]], EVEN, 'layer 0, expert 1 is "2\\n": give a number.'),
        ([[1, True]], EVEN, "layer 0, expert 1 is true: give a number."),
        ([[1, None]], EVEN, "layer 0, expert 1 is null: give a number."),
        ([[1, [2]]], EVEN, "layer 0, expert 1 is a list: give a number."),
        ([[1, 2], [1]], EVEN, "layer 1 has 1 experts and layer 0 has 2: give each layer as many."),
        ([[1] * 9], EVEN, "4 devices with 2 slots each have no room for 9 experts: give 3 slots or more"),
        ([[1]], ("--devices", "0"), "--devices is 0: give 1 or more."),
        ([[1]], ("--devices", "100000"), "--devices 100000 are too many to plan for: give 4096 or fewer."),
        ([[1]], ("--devices", "1025", "--replicas", "1"), "--devices 1025 are too many to plan copies for: give 1024"),
        ([[1]], ("--devices", "1", "--slots-per-device", "0"), "--slots-per-device is 0: give 1 or more."),
        ([[1]], ("--devices", "1", "--replicas", "-1"), "--replicas is -1: give 0 or more."),
        ([[1]], ("--devices", "3", "--nodes", "2"), "--devices 3 are not --nodes 2 of the same size: give a divisor."),
        ([[1, 2]], ("--devices", "2", "--speeds", "1", "1e-320"), "--speeds is too large or too small to be computed"),
        ([[1]], ("--devices", "1", "--keep-owners"), "--keep-owners leaves nothing to change without copies"),
    ],
)
def test_bad_input(capsys, write, values, argv, message):
    refused(capsys, write(values), argv, message)


def refused(capsys, path, argv, message):
    assert main(["place", "--loads", path, *argv, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "line 1, column 2"),
        ([], "has no layers: give"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [{"placement": [[0], [1]]}] * 2}, "has 2 layers and "),
        ({"layers": [[[0], [1]]]}, "layer 0: it has no placement: give"),
        ({"layers": [{"placement": [0, 1]}]}, "layer 0: placement[0] is 0: give a list."),
        ({"layers": [{"placement": [[0], ["1"]]}]}, 'layer 0: placement[1][0] is "1": give a whole number.'),
        ({"layers": [{"placement": [[0], [True]]}]}, "layer 0: placement[1][0] is true: give a whole number."),
        ({"layers": [{"placement": [[0], [-1]]}]}, "layer 0: device 1 holds -1: experts are whole numbers from 0."),
        ({"layers": [{"placement": [[0, 0], [1]]}]}, "layer 0: device 0 holds expert 0 twice"),
        ({"layers": [{"placement": [[0], [10**30]]}]}, "layer 0: no device holds expert 1"),
        ({"layers": [{"placement": [[0], [1, 2]]}]}, "layer 0: it has 3 experts on 2 devices, and "),
        ({"layers": [{"placement": [[0, 1]]}]}, "layer 0: it has 2 experts on 1 devices, and "),
        ({"layers": [{"placement": [[0], [1]], "owned": [1]}]}, "layer 0: owned has 1 numbers for 2 devices"),
        ({"layers": [{"placement": [[0], [1]], "owned": "x"}]}, 'layer 0: owned is "x": give a list.'),
    ],
)
def test_bad_current(capsys, write, values, message):
    argv = ("--devices", "2", "--current", write(values, "current.json"))
    refused(capsys, write([[1, 2]]), argv, message)


def test_a_fault_names_its_place_once(capsys, write):
    current = write({"layers": [{"placement": [[0], [1]], "owned": [1, None]}]}, "current.json")
    assert main(["place", "--loads", write([[1, 2]]), "--devices", "2", "--current", current]) == 2
    assert capsys.readouterr().err == f"paceline: {current}: layer 0: owned[1] is null: give a whole number.\n"


def test_files_that_are_not_there(capsys, write, tmp_path):
    refused(capsys, str(tmp_path / "none"), EVEN, "No such file or directory; give a file with JSON")
    refused(capsys, str(tmp_path), EVEN, "Is a directory")
    refused(capsys, "", EVEN, "the name of a file is empty; give a file with JSON, [[load per expert] per layer].")
    refused(capsys, write([[1] * 8]), (*EVEN, "--current", str(tmp_path / "none")), "No such file or directory")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["layers", "placement"]), inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(json_values, json_values, st.integers(-1, 4), st.integers(-1, 4), st.integers(-1, 2))
def test_anything_ends_in_an_answer_or_a_line(capsys, write, loads, current, devices, slots, replicas):
    path, old = write(loads), write(current, "current.json")
    flags = ["--devices", str(devices), "--slots-per-device", str(slots), "--replicas", str(replicas)]
    for more in ([], ["--current", old]):
        status = main(["place", "--loads", path, *flags, *more])
        out, err = capsys.readouterr()
        assert (status, bool(out), err.count("\n")) in ((0, True, 0), (2, False, 1))


def test_it_starts_without_torch(write):
    code = (
        "import sys; from paceline.launch.cli import main; "
        f"assert main(['place', '--loads', {write(LOADS)!r}, '--devices', '4', '--replicas', '1']) == 0; "
        "assert not {'torch', 'deepspeed', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
