"""The runner of multi-process tests, tested on itself."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import ranks
from support.ranks import OneAfterAnother, RankError, hang_of, launch, on, run_ranks

LONG_S = 3600


@dataclass(frozen=True)
class Point:
    x: int


def rank_and_environment(point: Point, scale: int = 1) -> tuple[int, Point, dict[str, str]]:
    assert point.x == 7
    return int(os.environ["RANK"]), Point(point.x * scale), dict(os.environ)


def modules_and_threads() -> tuple[bool, int, int]:
    preload = sys.modules["support.rank_preload"]
    import torch

    return "deepspeed" in sys.modules, preload.num_threads(), torch.get_num_threads()


def converted_by_threads(num_threads: int) -> int:
    import torch

    gate = threading.Barrier(num_threads)

    def convert(_: int) -> bool:
        gate.wait()
        return bool((torch.ones(1_000_000).to(torch.bfloat16) == 1).all())

    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(convert, range(num_threads)))


def all_reduced() -> float:
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo", verbose=False)
    value = torch.tensor([float(os.environ["RANK"]) + 1])
    deepspeed.comm.all_reduce(value)
    return value.item()


def summed_tensor():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    values = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(values)
    return values


def one_raises_while_others_wait(failing: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == failing:
        print("about to fail")
        raise ValueError(f"rank {failing} cannot")
    dist.barrier()


def process_and(value: int) -> tuple[int, int]:
    if value < 0:
        raise ValueError(f"{value} is too little")
    return os.getpid(), value + int(os.environ["RANK"])


def one_dies(failing: int) -> None:
    if os.environ["RANK"] == str(failing):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG_S)


def sleeps_on_one(sleeper: int, child_file: str) -> None:
    if os.environ["RANK"] == str(sleeper):
        child = subprocess.Popen(["sleep", str(LONG_S)])
        Path(child_file).write_text(str(child.pid))
        print("going to sleep")
        a_long_nap()


def a_long_nap() -> None:
    time.sleep(LONG_S)


def returns_a_lambda():
    return lambda: None


def test_results_come_in_rank_order():
    results = run_ranks(rank_and_environment, 3, Point(7), scale=2, env={"COLOUR": "red"})
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert {point for _, point, _ in results} == {Point(14)}
    environments = [environment for _, _, environment in results]
    for rank, environment in enumerate(environments):
        assert environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["COLOUR"] == "red"
        assert environment["HF_HOME"] == os.environ["HF_HOME"]
        assert environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    assert len({environment["MASTER_PORT"] for environment in environments}) == 1
    assert "COLOUR" not in os.environ


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_ranks_are_forked_with_everything_imported_and_one_thread():
    assert run_ranks(modules_and_threads, 2) == [(True, 1, 1)] * 2


def test_collectives():
    assert run_ranks(all_reduced, 4) == [10.0] * 4


def test_eight_ranks_return_tensors():
    results = run_ranks(summed_tensor, 8)
    assert [result.tolist() for result in results] == [[28.0] * 1000] * 8


def test_the_first_failure_is_shown_and_ends_the_others():
    with pytest.raises(RankError) as error:
        run_ranks(one_raises_while_others_wait, 3, 1)
    message = str(error.value)
    assert error.value.rank == 1
    assert message.startswith("rank 1 of 3 raised ValueError: rank 1 cannot\n")
    assert 'raise ValueError(f"rank {failing} cannot")' in message
    assert message.endswith("---- rank 1, end of output ----\nabout to fail")


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankError, match=r"^rank 2 of 3 died with exit status -9 \(SIGKILL\)"):
        run_ranks(one_dies, 3, 2)


def test_time_limit_kills_and_shows_stacks(tmp_path):
    child_file = tmp_path / "child"
    shown = "ranks [1] of 3", "in a_long_nap"  # the others are done
    message = hang_of(lambda timeout: run_ranks(sleeps_on_one, 3, 1, str(child_file), timeout=timeout), *shown)
    assert re.match(r"ranks \[1\] of 3 not done after \d+ s: all ranks killed\n---- rank 1, stack ----\n", message)
    assert message.endswith("---- rank 1, end of output ----\ngoing to sleep")
    assert not _is_running(int(child_file.read_text()))


CALLER = """
import time
from pathlib import Path
from support import ranks
ranks.TESTS = Path(__file__).parent  # with a preload that imports nothing
if __name__ == "__main__":
    ranks.run_ranks(time.sleep, 1, 3600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks notice on Linux only")
def test_ranks_end_with_their_caller(tmp_path):
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "support").mkdir()
    (tmp_path / "support" / "rank_preload.py").touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ranks.TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(tmp_path / "caller.py")]
    caller = subprocess.Popen(command, env=environment | {"TMPDIR": str(tmp_path)})
    try:
        while not (begun := list(tmp_path.glob("ranks-*/stack0"))):
            assert caller.poll() is None
            time.sleep(0.05)
        rank = _writer_of(begun[0])
    finally:
        caller.kill()
        caller.wait()
    assert not _is_running(rank)


def test_what_a_rank_returns_must_be_picklable():
    with pytest.raises(RankError, match=r"rank 0 of 1 raised .*returns_a_lambda"):
        run_ranks(returns_a_lambda, 1)


def test_functions_must_be_of_module_level():
    with pytest.raises(ValueError, match="define it at module level"):
        run_ranks(lambda: None, 1)


def test_output_of_ranks_is_replayed(capsys):
    run_ranks(print, 2, "hello")
    assert capsys.readouterr().out == "---- rank 0 ----\nhello\n---- rank 1 ----\nhello\n"


def test_ports_differ():
    """All of them: several jobs may be about to listen."""
    assert len({ranks.free_port() for _ in range(100)}) == 100


SCRIPT = """
import time
def nap(): time.sleep(3600)
nap()
"""


@pytest.mark.launcher
def test_launch_kills_the_ranks_of_a_job_that_hangs(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    message = hang_of(lambda timeout: launch([str(script)], 2, timeout, with_command=False), "in nap", first_s=20.0)
    assert "not over after" in message


def _writer_of(file: Path) -> int:
    """The process that has ``file`` open."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # it has been closed
                    if link.readlink() == file:
                        return int(process.name)
    raise AssertionError(f"nobody has {file} open")


def _is_running(pid: int) -> bool:
    deadline = time.monotonic() + ranks.PATIENCE_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.02)
    return True


def test_threads_of_a_rank_may_be_the_first_to_compute() -> None:
    assert run_ranks(converted_by_threads, 8, 8) == [8] * 8


def test_cases_share_ranks_and_an_error_names_its_case() -> None:
    cases = OneAfterAnother(process_and, {number: on(2, number) for number in range(3)}, at_once=2)
    found = {number: cases[number] for number in range(3)}
    assert {number: [value for _, value in ranks_] for number, ranks_ in found.items()} == {
        0: [0, 1],
        1: [1, 2],
        2: [2, 3],
    }
    (first, _), (second, _), (third, _) = (found[number][0] for number in range(3))
    assert first == second != third
    failing = OneAfterAnother(process_and, {"good": on(1, 1), "bad": on(1, value=-1), "elsewhere": on(2, 1)})
    for name in ("good", "bad"):
        with pytest.raises(RankError, match="raised RuntimeError: case bad: ValueError: -1 is too little"):
            failing[name]
    assert [value for _, value in failing["elsewhere"]] == [1, 2]


def test_one_thread_at_a_time_changes_the_environment_in_which_ranks_start() -> None:
    """A process that another thread starts meanwhile would end before it is a Python, with status 255."""
    with ThreadPoolExecutor(1) as pool:
        with ranks._server_environment():
            found = pool.submit(ranks._environment, {"ISLAND": "1"})
            assert not wait([found], timeout=0.2).done
        assert found.result(ranks.PATIENCE_S)["ISLAND"] == "1"
