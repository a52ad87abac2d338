"""One run at a time in an output directory."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from paceline.supervise.output_lock import FILE_NAME, Claim, Holder, claimed
from support.ranks import PATIENCE_S
from support.saves import small_file_system

HOLD = """
import sys, time
from paceline.supervise.output_lock import Claim
sys.stdin.readline()
try:
    claim = Claim(sys.argv[1])
except ValueError as error:
    print("refused", error, flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
    claim.release()
"""


def another(directory: Path) -> subprocess.Popen[str]:
    """A process that claims ``directory`` once it reads a line, and releases it with the next."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    with ExitStack() as processes:
        yield lambda: processes.enter_context(another(tmp_path))


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path, start: Any) -> None:
    first = start()
    say(first)
    assert heard(first) == "held\n"
    with pytest.raises(ValueError, match=rf"{tmp_path} is .* process {first.pid} on .*Choose another directory, or"):
        Claim(tmp_path)
    with pytest.raises(ValueError, match="two runs would overwrite"), claimed(tmp_path):
        raise AssertionError
    Claim(tmp_path / "..").release()
    first.send_signal(signal.SIGSTOP)  # it may go on
    with pytest.raises(ValueError, match="has not ended"):
        Claim(tmp_path)
    first.send_signal(signal.SIGCONT)
    say(first)
    assert first.wait(PATIENCE_S) == 0
    assert list(tmp_path.iterdir()) == []
    with claimed(tmp_path):
        assert (tmp_path / FILE_NAME).exists()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_does_not_block_the_next(tmp_path: Path, start: Any) -> None:
    first = start()
    say(first)
    assert heard(first) == "held\n"
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # a launcher may be slow to look at it
    assert (tmp_path / FILE_NAME).exists()
    Claim(tmp_path)
    assert Holder.parse((tmp_path / FILE_NAME).read_text()) == Holder.own()
    first.wait()


def test_only_one_of_many_takes_over(tmp_path: Path, start: Any) -> None:
    gone = replace(Holder.own(), pid=2**22 + 1)
    (tmp_path / FILE_NAME).write_text(json.dumps(asdict(gone)))
    runs = [start() for _ in range(4)]
    for run in runs:
        say(run)
    told = [heard(run).split()[0] for run in runs]
    assert sorted(told) == ["held", *["refused"] * 3]
    say(runs[told.index("held")])
    assert [run.wait(PATIENCE_S) for run in runs] == [0] * 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}', '{"host": "a", "pid": "x", "started": 1}'])
def test_what_names_nobody_is_taken_over(tmp_path: Path, text: str) -> None:
    """A file system that filled up, for example."""
    (tmp_path / FILE_NAME).write_text(text)
    Claim(tmp_path).release()


def test_another_process_with_that_id(tmp_path: Path) -> None:
    own = Holder.own()
    parent = replace(own, pid=os.getppid())
    assert replace(parent, started=own.started - 1e5).is_gone()
    assert replace(parent, boot="another").is_gone()
    assert not own.is_gone()


@pytest.mark.skipif(sys.platform != "linux", reason="psutil looks for the start of the host elsewhere")
def test_a_clock_that_is_set_meanwhile(tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux counts the start of processes from that of the host, and says when that was by the clock as it is now."""
    import psutil

    first = start()
    say(first)
    assert heard(first) == "held\n"
    boot_s = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_s + 3600.0)
    with pytest.raises(ValueError, match=f"process {first.pid} on "):
        Claim(tmp_path)


def test_another_host(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps(asdict(replace(Holder.own(), host="elsewhere", pid=2**22 + 1))))
    with pytest.raises(ValueError, match=rf"on elsewhere, .*cannot tell\), remove {tmp_path / FILE_NAME}\."):
        Claim(tmp_path)


@pytest.mark.parametrize(("job", "count", "is_gone"), [("7", "1", True), ("7", "0", False), ("8", "1", False)])
def test_a_job_that_slurm_starts_again_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, count: str, is_gone: bool
) -> None:
    """After the loss of the node that its first rank was on."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    before = replace(Holder.own(), host="lost", pid=2**22 + 1, boot="another")
    (tmp_path / FILE_NAME).write_text(json.dumps(asdict(before)))
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    if is_gone:
        Claim(tmp_path).release()
    else:
        with pytest.raises(ValueError, match="on lost"):
            Claim(tmp_path)


def test_the_file_is_not_pushed_to_the_hub() -> None:
    from transformers import Trainer

    for push in (Trainer.push_to_hub, Trainer._push_from_checkpoint):
        assert 'ignore_patterns=["_*"' in inspect.getsource(push)
    assert fnmatch(FILE_NAME, "_*")


def test_what_others_hold_is_not_released(tmp_path: Path) -> None:
    claim = Claim(tmp_path)
    other = json.dumps(asdict(replace(Holder.own(), host="elsewhere")))
    claim.path.write_text(other)
    claim.release()
    assert claim.path.read_text() == other


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", "4k") as disk:
        (disk / "filler").write_bytes(bytes(4096))
        with pytest.raises(ValueError, match=rf"No space left on device: '{disk / FILE_NAME}'"), claimed(disk):
            pass
        (disk / "filler").unlink()
        with claimed(disk):
            assert (disk / FILE_NAME).stat().st_size
