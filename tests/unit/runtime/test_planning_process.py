"""Calls in another process: their results and errors come back, and without that process the work is done here."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from functools import partial
from pathlib import Path

import psutil
import pytest

from paceline.runtime.planning_process import KEPT, PlanningProcess
from support.ranks import PATIENCE_S


@pytest.fixture(scope="module")
def process() -> PlanningProcess:
    return PlanningProcess()


def of(process: PlanningProcess) -> subprocess.Popen[bytes]:
    assert process._process is not None
    return process._process


def test_a_call_runs_beside_this_process_and_its_result_comes_back(process: PlanningProcess) -> None:
    there = process.result(process.begin(os.getpid))
    assert there == of(process).pid != os.getpid()
    assert process.result(process.begin(partial(Fraction, 3, 4))) == Fraction(3, 4)


def test_it_does_not_wait_for_the_call(process: PlanningProcess, tmp_path: Path) -> None:
    """A call that ends only once this process goes on, and behind it more than a pipe holds."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    call = process.begin(partial(os.open, fifo, os.O_RDONLY))
    other = process.begin(partial(len, bytes(1 << 20)))
    os.close(os.open(fifo, os.O_WRONLY))
    assert process.result(call) > 2
    assert process.result(other) == 1 << 20


def test_an_error_is_raised_where_the_result_is_asked_for(process: PlanningProcess) -> None:
    call = process.begin(partial(int, "no number"))
    depending = process.begin_after(call, abs)
    for each in (call, depending):
        with pytest.raises(ValueError, match="no number"):
            process.result(each)
    assert process.result(process.begin(partial(int, "4"))) == 4


def test_a_call_may_be_an_argument_of_a_later_one(process: PlanningProcess) -> None:
    numbers = process.begin(partial(list, "321"))
    assert process.result(process.begin_after(numbers, sorted)) == ["1", "2", "3"]
    assert process.result(numbers) == ["3", "2", "1"]


def test_results_that_nobody_took_are_those_of_no_other_call(process: PlanningProcess) -> None:
    calls = [process.begin(partial(int, str(number))) for number in range(KEPT + 3)]
    assert process.result(calls[-1]) == KEPT + 2
    assert process.result(calls[-2]) == KEPT + 1


def test_what_is_printed_gets_into_no_answer(process: PlanningProcess) -> None:
    assert process.result(process.begin(partial(print, "a line"))) is None


def test_without_its_process_the_work_is_done_here(caplog: pytest.LogCaptureFixture) -> None:
    process = PlanningProcess()
    number = process.begin(os.getpid)
    process.begin(partial(time.sleep, 600))
    text = process.begin_after(number, str)
    os.kill(of(process).pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        assert process.result(text) == str(os.getpid())
        for each in range(2):
            assert process.result(process.begin(partial(int, str(each)))) == each
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == ["the process that plans is gone"]


def test_a_closed_one_has_no_process_until_the_next_call() -> None:
    process = PlanningProcess()
    process.close()
    process.begin(partial(time.sleep, 600))
    number = of(process).pid
    process.close()
    assert not psutil.pid_exists(number)
    assert process.result(process.begin(partial(int, "4"))) == 4
    process.close()


def test_a_copy_of_the_rank_leaves_it_alone(process: PlanningProcess) -> None:
    code = (
        "import os, sys\n"
        "from functools import partial\n"
        "from paceline.runtime.planning_process import PlanningProcess\n"
        "process = PlanningProcess()\n"
        "call = process.begin(partial(int, '4'))\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "assert process.result(call) == 4\n"
        "assert not process._is_lost\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_it_needs_no_torch(process: PlanningProcess) -> None:
    from paceline.planning.schedule_search import search

    assert process.result(process.begin(partial(callable, search)))
    modules = "paceline.planning.partition_search, paceline.runtime.planning_process"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("end", ["at its end", "killed"])
def test_it_ends_with_the_rank(end: str) -> None:
    code = (
        "import os, time\n"
        "from paceline.runtime.planning_process import PlanningProcess\n"
        "process = PlanningProcess()\n"
        "print(process.result(process.begin(os.getpid)), flush=True)\n"
    )
    if end == "killed":
        code += "time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        number = int(rank.stdout.readline())
        if end == "killed":
            rank.kill()
        rank.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
