"""``paceline partition``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.launch.cli import main

BLOCK = {"work": 1.0, "activation_bytes": 4, "memory_bytes": 10}
COSTS = {"blocks": [BLOCK] * 24, "devices": [{"speed": speed} for speed in (4, 2, 1, 1)], "links": [8, 8, 8]}


@pytest.fixture
def costs(tmp_path):
    """Writes costs, or a text, to a file; its path."""
    path = tmp_path / "costs.json"

    def write(values):
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return str(path)

    return write


def answer(capsys, path, *argv):
    assert main(["partition", "--costs", path, *argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_json(capsys, costs):
    found = answer(capsys, costs(COSTS))
    assert sorted(found) == ["bottleneck_s", "boundaries", "cuts", "stages"]
    assert found["cuts"] == [12, 18, 21]
    assert found["boundaries"] == [0, 12, 18, 21, 24]
    assert found["bottleneck_s"] == 3.0
    assert found["stages"][0] == {
        "device": 0,
        "blocks": [0, 12],
        "work": 12.0,
        "compute_s": 3.0,
        "transfer_s": 0.0,
        "memory_bytes": 120,
        "memory_limit_bytes": None,
    }
    assert [stage["transfer_s"] for stage in found["stages"]] == [0.0, 1.0, 1.0, 1.0]
    assert [stage["blocks"] for stage in found["stages"]] == [[0, 12], [12, 18], [18, 21], [21, 24]]


def test_text(capsys, costs):
    values = {**COSTS, "devices": [{"speed": 4, "memory_bytes": 90}, {"speed": 2}, {"speed": 1}, {"speed": 1}]}
    assert main(["partition", "--costs", costs(values)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "24 blocks on 4 devices: bottleneck 4 s",
        "stage  device  blocks  work  compute_s  transfer_s  memory_bytes  limit",
        "    0       0     0-8     9       2.25           0            90     90",
        "    1       1    9-15     7        3.5           1            70   none",
        "    2       2   16-19     4          4           1            40   none",
        "    3       3   20-23     4          4           1            40   none",
    ]


def test_what_is_left_out_is_no_limit(capsys, costs):
    found = answer(capsys, costs({"blocks": [{"work": 1}] * 4, "devices": [{"speed": 1}] * 2}))
    assert found["boundaries"] == [0, 2, 4]
    nulls = {"blocks": [BLOCK] * 4, "devices": [{"speed": 1, "memory_bytes": None}] * 2, "links": [None]}
    assert answer(capsys, costs(nulls))["stages"][1]["transfer_s"] == 0.0


def test_order(capsys, costs):
    values = {"blocks": [{"work": work} for work in (4, 1, 1)], "devices": [{"speed": 1}, {"speed": 2}]}
    found = answer(capsys, costs(values), "--order", "search")
    assert found["order"] == [1, 0]
    assert [stage["device"] for stage in found["stages"]] == [1, 0]
    assert found["bottleneck_s"] == 2.0
    blocks = [{"work": 1, "activation_bytes": 1}] * 3
    links = [[0, 0.1, 9], [0.1, 0, 9], [9, 9, None]]
    found = answer(
        capsys, costs({"blocks": blocks, "devices": [{"speed": 1}] * 3, "links": links}), "--order", "search"
    )
    assert found["order"] == [0, 2, 1]
    assert [stage["transfer_s"] for stage in found["stages"]] == [0.0, 2 / 9, 2 / 9]


def test_the_shortest_step(capsys, costs):
    values = {"blocks": [{"work": 3}] * 8, "devices": [{"speed": 3}, {"speed": 1}]}
    assert answer(capsys, costs(values))["boundaries"] == [0, 6, 8]
    found = answer(capsys, costs(values), "--micro-batches", "1")
    assert (found["boundaries"], found["step_s"]) == ([0, 7, 8], pytest.approx(10.0))
    assert (found["bottleneck_s"], found["schedule"], found["micro_batches"]) == (7.0, "1f1b", 1)
    found = answer(capsys, costs(COSTS), "--micro-batches", "8", "--schedule", "kfkb", "--k", "2")
    assert found["schedule"] == "kfkb k=2"
    assert answer(capsys, costs(COSTS), "--micro-batches", "8", "--schedule", "kfkb") == found  # as in simulate
    assert main(["partition", "--costs", costs(values), "--micro-batches", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "step: 10 s of 1 micro-batches, 1f1b"


def test_forward_and_backward(capsys, costs):
    """The last stage ends both forwards before the first backward, so the step depends on the split of the work."""
    devices = [{"speed": 1}, {"speed": 1}]
    steps = [
        answer(
            capsys,
            costs({"blocks": [{"work": 3}, {"forward": part, "backward": 3 - part}], "devices": devices}),
            *("--micro-batches", "2", "--schedule", "gpipe"),
        )["step_s"]
        for part in (1, 3)
    ]
    assert steps[0] == 9.0
    assert steps[1] == 11.0


def test_live_activations_take_memory(capsys, costs):
    block = {"work": 1, "memory_bytes": 10, "live_bytes": 5}
    values = {"blocks": [block] * 6, "devices": [{"speed": 1, "memory_bytes": 45}, {"speed": 1, "memory_bytes": 60}]}
    found = answer(capsys, costs(values), "--micro-batches", "8")
    # Two micro-batches are alive on the first stage, one on the second.
    assert found["boundaries"] == [0, 2, 6]
    assert [stage["memory_bytes"] for stage in found["stages"]] == [40, 60]
    assert main(["partition", "--costs", costs(values), "--micro-batches", "8", "--schedule", "gpipe"]) == 2
    assert "stage 0 on device 0 needs 50 bytes at least (block 0 alone)" in capsys.readouterr().err


def changed(**values):
    return {**COSTS, **values}


@pytest.mark.parametrize(
    ("values", "argv", "message"),
    [
        ({"format": 1, "items": [], "devices": []}, (), "it is a profile, which belongs in a JSON for `paceline fit`"),
        (changed(devices=[{"speed": 1, "memory_bytes": 55}] * 4), (), "no split fits in memory: stage 3 on device 3"),
        ("", (), "line 1, column 1: Expecting value"),
        ('{"blocks": [],}', (), "line 1, column "),
        ('{"blocks": NaN}', (), "NaN is not JSON; write a number or null."),
        ('{"blocks": [], "blocks": []}', (), 'duplicate key "blocks", first at line 1, column 2; keep one of them.'),
        ("[" * 100_000, (), "too many brackets inside each other"),
        ('{"blocks": ' + "9" * 5000 + "}", (), "Exceeds the limit"),
        ([1], (), "the file is a list: give an object with blocks, devices, links."),
        (changed(block=[]), (), '"block" is not a key of the file; did you mean "blocks"?'),
        (changed(blocks=[{"wrok": 1}]), (), '"wrok" is not a key of blocks[0]; did you mean "work"?'),
        (changed(devices=[{"zzz\n": 1}]), (), '"zzz\\n" is not a key of devices[0]; choose from speed, memory_bytes.'),
        ({"devices": []}, (), "blocks is missing: give a list."),
        (changed(devices={}), (), "devices is an object: give a list."),
        (changed(blocks=[3]), (), "blocks[0] is 3: give an object with work, forward, backward"),
        (changed(blocks=[]), (), "there are no blocks: give one at least."),
        (changed(blocks=[BLOCK]), (), "4 devices are more than 1 blocks"),
        (changed(blocks=[{}]), (), "blocks[0]: give either work, or forward and backward."),
        (changed(blocks=[{"work": 1, "forward": 1}]), (), "blocks[0]: give either work, or forward and backward."),
        (changed(blocks=[{"forward": 1}]), (), "blocks[0] has no backward: give forward and backward, or work alone."),
        (changed(blocks=[{"forward": -1, "backward": 2}]), (), "blocks[0].forward is -1: give a number from 0"),
        (changed(blocks=[{"work": True}]), (), "blocks[0].work is true: give a number."),
        (changed(blocks=[{"work": "1"}]), (), 'blocks[0].work is "1": give a number.'),
        (changed(blocks=[{"work": None}]), (), "blocks[0].work is null: give a number."),
        (changed(blocks=[{"work": 10**400}]), (), "blocks[0].work is too large or too small to be computed with"),
        ('{"blocks": [{"work": 1e999}], "devices": []}', (), "blocks[0].work is too large or too small"),
        (changed(blocks=[{"work": -1}] * 24), (), "blocks[0].work is -1: give a number from 0 upwards."),
        (changed(devices=[{}]), (), "devices[0] has no speed: give work a second."),
        (changed(devices=[{"speed": 0}] * 4), (), "devices[0].speed is 0: give a number above 0."),
        (changed(links=[1, 2]), (), "links has 2 values for 4 devices: give 3, one between two neighbours, or none."),
        (changed(links=[1, 2, 0]), (), "links[2] is 0: give bytes a second, above 0."),
        (changed(links="fast"), (), 'links is "fast": give a list.'),
        (changed(links=[[1] * 4] * 4), (), "links is a matrix: give 3 numbers, one between two neighbours, or"),
        (COSTS, ("--order", "search"), "links between neighbours say nothing about another order: give a matrix"),
        (changed(links=[[1] * 4, 3]), ("--order", "search"), "links[1] is 3: give a list."),
        (changed(links=[[1] * 3] * 3), ("--order", "search"), "links is no matrix of 4 rows with 4 values each"),
        (COSTS, ("--k", "2"), "--k is of a step: give --micro-batches too."),
        (COSTS, ("--micro-batches", "0"), "num_micro_batches=0 must be 1 or more."),
        (COSTS, ("--micro-batches", "8193"), "--micro-batches 8193 on 4 devices are too many to simulate"),
        (COSTS, ("--micro-batches", "4", "--schedule", "kfbk"), "schedule type 'kfbk' is unknown"),
        (COSTS, ("--micro-batches", "4", "--schedule", "interleaved"), "schedule type 'interleaved' has a function"),
        (changed(blocks=[{"work": 1, "live_bytes": 3}] * 24), (), "live_bytes are of each micro-batch that is alive: "),
    ],
)  # fmt: skip
def test_one_clear_line(capsys, costs, values, argv, message):
    path = costs(values)
    assert main(["partition", "--costs", path, *argv, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paceline: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.json", "nowhere.json: No such file or directory; give a file with the JSON of the costs."),
        (".", ".: Is a directory; give a file with the JSON of the costs."),
        ("a\0b", "a\0b: not a path; give a file with the JSON of the costs."),
    ],
)
def test_no_such_file(capsys, path, message):
    assert main(["partition", "--costs", path]) == 2
    assert capsys.readouterr().err == f"paceline: {message}\n"


def test_not_text(capsys, tmp_path):
    path = tmp_path / "costs.json"
    path.write_bytes(b"\xff\xfe")
    assert main(["partition", "--costs", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"paceline: {path}: not UTF-8 text")
    assert err.endswith("give a file with the JSON of the costs.\n")


NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(-3, 3), st.integers(), st.just(10**400), st.floats(0, 9)
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=5,
)
LIKELY = st.one_of(st.integers(0, 5), st.floats(0, 5), NUMBERS, JUNK)


def some(*names):
    """An object with some of these keys, and now and then another."""
    return st.dictionaries(st.sampled_from(names), LIKELY).flatmap(
        lambda values: st.one_of(st.just(values), st.just(values), JUNK)
    )


FILES = st.fixed_dictionaries(
    {
        "blocks": st.one_of(
            st.lists(st.fixed_dictionaries({"work": LIKELY}), min_size=3, max_size=6),
            st.lists(some("work", "forward", "backward", "activation_bytes", "memory_bytes", "live_bytes"), max_size=5),
        ),
        "devices": st.one_of(
            st.lists(st.fixed_dictionaries({"speed": LIKELY}, optional={"memory_bytes": LIKELY}), max_size=3), JUNK
        ),
    },
    optional={"links": st.one_of(st.lists(LIKELY, max_size=3), st.lists(st.lists(LIKELY, max_size=3)), JUNK)},
)


GOOD = st.one_of(st.integers(1, 5), st.floats(0.1, 5))
SOLVABLE = st.fixed_dictionaries(
    {
        "blocks": st.lists(
            st.fixed_dictionaries({"work": GOOD}, optional={"activation_bytes": GOOD, "memory_bytes": GOOD}),
            min_size=3,
            max_size=6,
        ),
        "devices": st.lists(
            st.fixed_dictionaries({"speed": GOOD}, optional={"memory_bytes": st.integers(5, 50)}),
            min_size=1,
            max_size=3,
        ),
    }
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.one_of(SOLVABLE, FILES, JUNK), st.sampled_from([(), ("--order", "search"), ("--micro-batches", "3")]))
def test_any_json_is_solved_or_refused_in_one_line(capsys, costs, values, argv):
    status = main(["partition", "--costs", costs(values), *argv, "--json"])
    out, err = capsys.readouterr()
    if status == 0:
        json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert err == ""
    else:
        assert (status, out, err.count("\n")) == (2, "", 1)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40))
def test_any_bytes_are_refused_in_one_line(capsys, tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    assert main(["partition", "--costs", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_runs_light(costs):
    """Neither the help nor a run waits for what training needs."""
    heavy = ("torch", "transformers", "deepspeed", "pydantic", "numpy", "matplotlib")
    code = (
        "import sys; from paceline.launch.cli import main;"
        f"assert main({['partition', '--costs', costs(COSTS), '--micro-batches', '4']}) == 0;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900)
    assert done.stdout.splitlines()[-1] == "[]"
