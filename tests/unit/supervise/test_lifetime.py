"""Signals set a flag, or end the process with the right code, whatever its main thread does; and can be taken back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.supervise import lifetime
from paceline.supervise.lifetime import PREEMPTED, Preempted, Preemption, current
from support.ranks import PATIENCE_S

BLOCK = """
import ctypes, sys
from paceline.supervise import lifetime
from paceline.supervise.lifetime import Preemption

def block():  # in C, as in a collective with a peer that is gone: handlers of Python do not run
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    print("blocked", flush=True)
    lock(mutex)
    lock(mutex)

"""


def run(code: str, number: int, *, insists: bool = False) -> tuple[int, str]:
    """Exit code and output of ``code``, signalled when it said that it is blocked, and from then on if one insists."""
    with subprocess.Popen(
        [sys.executable, "-c", BLOCK + code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first == "blocked\n", first + process.stdout.read()
        try:
            process.send_signal(number)
            while insists and process.poll() is None:
                time.sleep(0.2)
                process.send_signal(number)
            return process.wait(PATIENCE_S), process.stdout.read()
        finally:
            process.kill()


def test_the_flag_and_its_reason() -> None:
    with Preemption() as preemption:
        assert current() is preemption
        assert not preemption.requested
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
        assert preemption.reason == "SIGUSR1"
    assert not current().requested


def test_the_former_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    threads = set(threading.enumerate())
    for _ in range(2):
        with Preemption(interrupt=True):
            assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert set(threading.enumerate()) <= threads, "others may end meanwhile"


def test_only_the_main_thread() -> None:
    raised: list[ValueError] = []

    def enter() -> None:
        try:
            Preemption().__enter__()
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_a_forked_worker_can_be_terminated_and_does_not_ask_its_parent_to_stop() -> None:
    with Preemption() as preemption:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        worker.terminate()
        worker.join()
        assert worker.exitcode == -signal.SIGTERM
        time.sleep(0.2)
        assert not preemption.requested


def test_interrupt_ends_at_once_and_quietly() -> None:
    assert run("with Preemption(interrupt=True): block()", signal.SIGINT) == (130, "")


def test_before_training_a_signal_ends_the_process() -> None:
    code = "lifetime._SETUP_GRACE_S = 0.1\nwith Preemption(in_training=False, tell=print): block()"
    assert run(code, signal.SIGTERM) == (
        143,
        "143 stopped by SIGTERM before the first step; there is nothing to save\n",
    )


def test_no_step_boundary_within_the_limit() -> None:
    code, text = run("with Preemption(limit_s=0.5, tell=print): block()", signal.SIGTERM)
    assert (code, text) == (143, "143 stopped by SIGTERM; no step ended within 0.5 s, so nothing was saved\n")


def test_the_limit_ends_when_the_save_begins() -> None:
    """Only a later SIGTERM ends a save, and the first ones are one: launchers and clusters both send it."""
    code = """
lifetime._INSISTING_AFTER_S = 3.0
with Preemption(limit_s=0.5, tell=print) as preemption:
    preemption.reached()
    block()
"""
    began = time.monotonic()
    assert run(code, signal.SIGTERM, insists=True) == (143, "143 \n")
    assert time.monotonic() - began > 3.0


def test_when_training_is_over_only_a_second_signal_ends_what_is_left() -> None:
    code = """
lifetime._INSISTING_AFTER_S = 0.5
with Preemption(limit_s=0.1, tell=print) as preemption:
    preemption.finishing()
    block()
"""
    ended = run(code, signal.SIGTERM, insists=True)
    assert ended == (143, "143 stopped by a second SIGTERM; the results are not complete\n")


def test_workers_end_with_the_process() -> None:
    """Also one that hangs, as a data loader's may: it holds the output open for as long as it lives."""
    code = """
import multiprocessing, signal
from paceline.supervise.lifetime import end_process
multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True).start()
end_process(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stderr) == (3, b"")


def test_preempted_ends_python_with_its_code_and_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from paceline.supervise.lifetime import Preempted; raise Preempted(7, 'c')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (PREEMPTED, "")


def test_what_preempted_says() -> None:
    assert str(Preempted(7, "runs/checkpoint-7", "SIGUSR1")) == (
        "stopped by SIGUSR1 after step 7; the checkpoint is runs/checkpoint-7; run the same command with "
        "--resume_from_checkpoint true to go on"
    )
    assert str(Preempted(0)) == "stopped by SIGTERM after step 0; nothing was saved"


CHAIN = """
import ctypes, os, signal, subprocess, sys, threading, time
before, *rest = sys.argv[1:]
child = subprocess.Popen([sys.executable, *rest])
if before == "ending":  # the main thread ends alone: no command line any more, still the parent
    threading.Thread(target=child.wait).start()
    ctypes.CDLL(None).pthread_exit(None)
child.wait()
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
from paceline.supervise.lifetime import _Lineage
target = os.getppid()
if sys.argv[1] == "command":
    target = int(Path(f"/proc/{target}/stat").read_text().rpartition(")")[2].split()[1])
if sys.argv[2] == "ending":
    while Path(f"/proc/{target}/cmdline").read_bytes():
        time.sleep(0.01)
lineage = _Lineage()
before = lineage.gone()
os.kill(target, signal.SIGKILL)
while not (found := lineage.gone()):
    time.sleep(0.01)
print(repr(before), "then", found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="an ending process is read as Linux has it")
@pytest.mark.parametrize(
    ("who", "command", "launcher", "variable", "told"),
    [
        ("command", "bin/deepspeed", "deepspeed/launcher/launch.py", "CROSS_RANK", "the deepspeed command"),
        ("command ending", "bin/deepspeed", "deepspeed/launcher/launch.py", "CROSS_RANK", "the deepspeed command"),
        ("launcher ending", "bin/deepspeed", "deepspeed/launcher/launch.py", "CROSS_RANK", "DeepSpeed's launcher"),
        ("launcher", "bash.py", "torchrun", "TORCHELASTIC_RUN_ID", "torchrun"),
    ],
)
def test_who_is_missed(who: str, command: str, launcher: str, variable: str, told: str, tmp_path: Path) -> None:
    """Also those that were about to end when the rank looked, and had no command line any more."""
    scripts = [tmp_path / command, tmp_path / launcher, tmp_path / "rank.py"]
    for script, text in zip(scripts, (CHAIN, CHAIN, RANK), strict=True):
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
    target, _, ending = who.partition(" ")
    steps = [ending if target == step else "" for step in ("command", "launcher")]
    process = subprocess.run(
        [sys.executable, scripts[0], steps[0], scripts[1], steps[1], scripts[2], target, ending],
        env=os.environ | {variable: "0"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=False,
    )
    assert process.stdout == f"'' then the end of {told}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="sessions of other processes are read as Linux has them")
def test_a_process_without_a_launcher_has_none_to_lose() -> None:
    assert lifetime._Lineage().gone() == ""
