"""A small campaign of the fuzz with a fixed seed (tests/benchmarks/fuzz.py runs a large one), and its judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzzing import campaign, worker
from benchmarks.fuzzing.cases import COMMAND, CONFIG, ENVIRONMENT, JOB, Case, Cases
from benchmarks.fuzzing.inputs import make
from benchmarks.fuzzing.values import Damage, harmless, noise

SEED, CASES = 7, 160


def test_no_wrong_input_is_worse_than_refused(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    make(inputs, with_run=False)
    cases = Cases(inputs, SEED, ())  # what hypothesis makes up depends on what else is imported
    with campaign.workers(1, inputs) as crew:
        results = campaign.run(crew, map(cases, range(CASES)))
    assert [case.number for case, _ in results] == list(range(CASES))
    failed = [(result["problem"], json.dumps(campaign.shown(case))) for case, result in results if result["problem"]]
    assert not failed, "\n".join(f"{problem}\n  {case}" for problem, case in failed)
    assert {case.call for case, _ in results} == {COMMAND, CONFIG, ENVIRONMENT, JOB}
    outcomes = campaign.summary(results)["by_outcome"]
    assert min(outcomes["status 0"], outcomes["status 2"]) > CASES / 10  # valid ones pass, others are refused


def test_cases_are_made_again_by_their_number(tmp_path: Path) -> None:
    make(tmp_path, with_run=False)
    values = noise(3, 20)
    first, again = (Cases(tmp_path, 3, values) for _ in range(2))
    assert [first(n).to_dict() for n in range(60)] == [again(n).to_dict() for n in reversed(range(60))][::-1]
    assert {"simulate", "check-config", "doctor", "report", "finetune", CONFIG} <= {*first.flags, *first.names}
    shown = campaign.shown(first(5))
    assert campaign.read(json.loads(json.dumps(shown))).to_dict() == first(5).to_dict()


@pytest.mark.parametrize(
    ("argv", "status", "out", "err", "problem"),
    [
        ([], 0, "", "", ""),
        ([], 2, "", "paceline: --k is 0: give 1.\n", ""),
        ([], 2, "", "usage: paceline x\npaceline x: error: no\n", ""),
        ([], 2, "", "usage: " + "long " * 1000 + "\npaceline x: error: no\n", ""),
        ([], 2, "", "", "status 2 without a message"),
        ([], 2, "", "usage: paceline\npaceline x: error: \n", "status 2 without a message"),
        ([], 2, "", "paceline: \n", "status 2 without a message"),
        ([], 2, "", "a warning of somebody else's\n", "status 2 without a message"),
        ([], 2, "", "a warning of somebody else's\npaceline: --k is 0: give 1.\n", ""),
        ([], 3, "", "", "status 3 without a message"),
        ([], 1, "", "", "status 1 without a message"),
        (["--json"], 3, "no", "", "--json prints no JSON: Expecting value: line 1 column 1 (char 0)"),
        (["--json"], 3, "", "paceline: no", ""),
        ([], 2, "", "paceline: " + "x" * 1500, "a message of more than 1500 characters"),
        ([], 4, "", "no", "status 4"),
        ([], None, "", "", "status None"),
        ([], True, "", "", "status True"),
        ([], 2, "", "Traceback (most recent call last):\n  File\nKeyError: 1\n", "prints a traceback: KeyError: 1"),
        (["--json"], 0, "{}", "", ""),
        (["--json"], 0, '{"a": NaN}', "", "--json prints no JSON: NaN in it"),
        (["--json"], 0, "stage", "", "--json prints no JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_the_judge(argv: list[str], status: Any, out: str, err: str, problem: str) -> None:
    assert worker.verdict(argv, status, out, err) == problem


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # pytest's, of a fork
def test_what_hangs_or_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process of a case, which is forked; the next one runs all the same."""

    def call(case: dict[str, Any]) -> int:
        what = case["argv"][0]
        while what == "hang":
            pass
        if what == "memory":
            bytes(2**40)
        if what == "die":
            worker.os._exit(9)
        return 0

    monkeypatch.setitem(worker._CALLS, "command", call)
    monkeypatch.setattr(worker, "CPU_S", 0.5)
    cases = [Case(n, COMMAND, "x", [word]).to_dict() for n, word in enumerate(("fine", "memory", "hang"))]
    results = worker._batch(cases, tmp_path)
    assert [result["problem"].partition(":")[0] for result in results] == [
        "",
        "MemoryError leaves ?",
        "ran past its limit of 0 s",
    ]
    (died,) = worker._batch([Case(0, COMMAND, "x", ["die"]).to_dict()], tmp_path)
    assert died["problem"] == "the process ended with 9"


def test_failures_are_made_small() -> None:
    class Fails:
        def run(self, cases: list[Case]) -> list[dict[str, Any]]:
            is_bad = "bad" in cases[0].argv and b'"key": 3' in bytes.fromhex(cases[0].files["f"])
            return [{"problem": "KeyError leaves a.py:b: 3" if is_bad else ""}]

    document = json.dumps({"other": [1, 2, {"deep": 1}], "inner": {"key": 3, "more": "x"}}).encode()
    case = Case(1, COMMAND, "x", ["--a", "1", "bad", "--b"], files={"f": document.hex()})
    small = campaign.shrunk(Fails(), case, campaign.signature("KeyError leaves a.py:b: 3"))  # type: ignore[arg-type]
    assert small.argv == ["bad"]
    assert json.loads(bytes.fromhex(small.files["f"])) == {"inner": {"key": 3}}


def test_no_damaged_word_leads_out_of_a_case(tmp_path: Path) -> None:
    import random

    damage = Damage(random.Random(1), ["/etc/passwd", "~/x", "a/../../x", "../../x"])
    words = [damage.word() for _ in range(3000)] + ["--output=/etc/x"]
    for word in map(harmless, words):
        path = word.partition("=")[2] if word.startswith("--") else word
        assert not path.startswith("/") or path in ("/dev/null/x", "/proc/nothing/x"), word
        assert not path.startswith("~"), word
        assert ".." not in path.removeprefix("../x"), word
