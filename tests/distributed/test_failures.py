"""A rank that raises, dies, stops or hangs ends all ranks soon, and one line says which, at which step, doing what.

Also the signals that ask a job to stop, to a rank or the launcher's processes: who sees them, and that nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import ranks as runner
from support.accidents import Running, accident

LIMIT_S = 20.0
"""Without progress: more than steps take on a machine that is busy, ranks of other jobs included.

Engines may take longer to start: before the watch does."""
STEPS = 400
VICTIM, AT_STEP = 1, 3


@pytest.fixture(scope="module")
def all_of() -> Iterator[Any]:
    """Jobs that mostly wait, and so run beside each other: all cases of a function, begun for the first."""
    begun: dict[Any, Running] = {}

    def one_of(function: Any, case: tuple[Any, ...], cases: Iterable[tuple[Any, ...]]) -> Running:
        if (function, case) not in begun:
            begun.update({(function, args): Running(function, 3, *args) for args in cases})
        return begun[function, case]

    yield one_of
    for running in begun.values():
        running.kill()


def watch(what: str) -> None:
    """Start the watch: one that takes no rank for gone, or for mute, because this machine stands still for a while.

    Unless a rank stops; then its silence has to tell.
    """
    from paceline.supervise import watch as watching
    from paceline.supervise.first_cause import Limits
    from paceline.supervise.watch import WATCH

    watching._ANSWER_S = runner.PATIENCE_S
    limits = Limits.of(LIMIT_S) if what == "is stopped" else Limits(LIMIT_S, silent_s=runner.PATIENCE_S)
    WATCH.start(LIMIT_S)  # where an engine has not done it, with a longer limit
    WATCH._limits = limits
    if WATCH._hub is not None:
        WATCH._hub._limits = limits


def train(what: str, victim: int) -> None:
    """A loop of collectives, in which one rank has an accident. Ends as the main job does."""
    import deepspeed
    import torch

    from paceline.supervise.lifetime import end_process
    from paceline.supervise.watch import EVERYONE, WATCH

    deepspeed.init_distributed("gloo")
    store, rank = torch.distributed.distributed_c10d._get_default_store(), int(os.environ["RANK"])
    watch(what)
    try:
        for step in range(STEPS):
            WATCH.step = step
            WATCH.doing("loading data")
            hit = step == AT_STEP and rank == victim
            if hit:  # the others have come through the step before
                store.wait([f"at step {other}" for other in range(3) if other != victim])
            elif step == AT_STEP:
                store.set(f"at step {rank}", "")
            if hit and what == "hangs loading":
                time.sleep(1000)
            WATCH.doing("computing")
            if hit:
                accident(what)
            WATCH.doing("summing", EVERYONE)
            deepspeed.comm.all_reduce(torch.ones(1))
            WATCH.idle()
    except Exception as error:
        end_process(WATCH.fail(error).code)
    end_process(0)


ACCIDENTS = {
    "raises": r"rank {v} failed at step 3, computing: MemoryError: no more of it",
    "is killed": r"rank {v} is gone \(its process ended without a word\)",
    "is stopped": r"rank {v} is gone \(nothing heard for \d+ s: stopped, or",
    "spins": r"rank {v} hangs at step 3, computing: \d+ s in accident \(accidents.py:\d+\); the limit is 20 s$",
    "hangs loading": r"rank {v} hangs at step 3, loading data: \d+ s in train \(test_failures.py:\d+\); the limit",
}


VICTIMS = [
    *[(what, victim) for what in ("is killed", "is stopped") for victim in (0, 1)],
    *[("raises", 1), ("spins", 1), ("hangs loading", 0)],
]


@pytest.mark.parametrize(("what", "victim"), VICTIMS)
def test_an_accident_of_one_rank_ends_all_and_is_told_once(what: str, victim: int, all_of: Any) -> None:
    job = all_of(train, (what, victim), VICTIMS)
    ended = job.end(stopped=victim if what == "is stopped" else None)
    assert len(ended.causes) == 1, "\n".join(ended.outputs)
    assert re.search(ACCIDENTS[what].format(v=victim), ended.causes[0]), ended.causes
    assert "at step 3, " in ended.causes[0]
    assert not any("Traceback" in text for text in ended.outputs)
    assert ended.codes == [-9 if r == victim and what in ("is killed", "is stopped") else 1 for r in range(3)]
    assert ended.left == []


def looks(what: str) -> None:
    """An adaptive pipeline; one rank has an accident while all compare what they measured."""
    import deepspeed

    import paceline
    from paceline.supervise.lifetime import end_process
    from paceline.supervise.watch import WATCH
    from support.jobs import ds_config, model_config, step_batches

    deepspeed.init_distributed("gloo")
    section = {"pipeline": {"stages": 3, "schedule": {"type": "adaptive", "retune_every": 1}}}
    config = ds_config(gradient_accumulation_steps=8, paceline=section)
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    watch(what)
    if engine.global_rank == VICTIM:
        gather = engine.reports.gather

        def has_an_accident(*args: Any, **options: Any) -> Any:
            if engine.global_steps > AT_STEP:
                accident(what)
            return gather(*args, **options)

        engine.reports.gather = has_an_accident
    try:
        for step in range(STEPS):
            engine.train_batch(iter(step_batches(step)))
    except Exception as error:
        end_process(WATCH.fail(error).code)
    end_process(0)


LOOKS = {
    "is killed": r"rank 1 is gone \(its process ended without a word\)",
    "raises": r"rank 1 failed at step \d, comparing the last steps: MemoryError: no more of it",
}


@pytest.mark.parametrize("what", LOOKS)
def test_an_accident_while_the_schedule_is_chosen_ends_all_and_is_told_once(what: str, all_of: Any) -> None:
    ended = all_of(looks, (what,), [(case,) for case in LOOKS]).end()
    assert len(ended.causes) == 1, "\n".join(ended.outputs)
    assert re.search(LOOKS[what], ended.causes[0]), ended.causes
    assert ended.codes == [1, -9 if what == "is killed" else 1, 1]
    assert ended.left == []


def misfortune(what: str) -> None:
    """What a transport does not notice: ranks that wait in C, as for NCCL, or that leave."""
    import ctypes

    import deepspeed
    import torch

    from paceline.comm.control import ControlPlane
    from paceline.launch.finetune import _fail, _leave_together, _stop_all
    from paceline.supervise import watch as watching
    from paceline.supervise.lifetime import Preemption, end_process
    from paceline.supervise.watch import EVERYONE, WATCH

    if what != "shared but by rank 0":
        watching._SHARED_S = runner.PATIENCE_S  # it is rank 0 that says it, however late

    def wait_in_c() -> None:
        mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)

    deepspeed.init_distributed("gloo")
    watch(what)
    rank, WATCH.step = int(os.environ["RANK"]), AT_STEP
    store = torch.distributed.distributed_c10d._get_default_store()
    torch.distributed.barrier()  # one that goes while another still connects is another misfortune
    if what == "interrupted":  # Ctrl-C goes to all
        with Preemption(interrupt=True, tell=_stop_all):
            os.kill(os.getpid(), signal.SIGINT)
            wait_in_c()
    if what.startswith("told to go") and rank == 1:
        WATCH.stop_all(143, "stopped by SIGTERM before the first step")
        end_process(143)
    if what.startswith("shared"):
        control, own = ControlPlane.create(), KeyError("lost") if rank == 1 else None
        try:
            control.settle(ValueError("too many") if what == "shared input" else own, "reading")
        except Exception as error:
            if what == "shared but by rank 0" and rank == 0:
                wait_in_c()
            sys.excepthook(type(error), error, error.__traceback__)
        end_process(1)
    if what == "killed" and rank == 1:
        store.wait(["waits0", "waits2"])
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "in a circle" or (what == "killed" and rank != 1):
        peer = (rank + 1) % 3
        WATCH.doing(f"receiving from stage {peer}", peer)
        store.set(f"waits{rank}", "")
        wait_in_c()
    try:
        if what == "long" and rank == 0:
            with WATCH.pause("saving"):
                time.sleep(1.5 * LIMIT_S)
        if what == "leaves" and rank == 1:
            WATCH.close()
            end_process(0)
        if what == "uncaught" and rank == 1:
            raise KeyError("lost")
        WATCH.doing("summing", EVERYONE)
        deepspeed.comm.all_reduce(torch.ones(1))
    except RuntimeError as error:
        if what == "told to go":
            end_process(_fail(rank, error))
        if what == "told to go as it leaves":
            end_process(_leave_together(0))
        end_process(WATCH.fail(error).code)
    except KeyError as error:
        sys.excepthook(KeyError, error, error.__traceback__)  # as Python does when nobody catches it
        end_process(1)
    WATCH.doing("leaving", EVERYONE)
    deepspeed.comm.barrier()
    WATCH.close()
    end_process(0)


MISFORTUNES: dict[str, tuple[list[int], str | None, list[int]]] = {
    "killed": ([1, -9, 1], r"rank 1 is gone .*; rank [02] was at step 3, receiving from stage ", []),
    "in a circle": ([1, 1, 1], r"all ranks wait for each other, the limit is 20 s: rank 0 .*; rank 1 .*; rank 2 ", []),
    "long": ([0, 0, 0], None, []),
    "leaves": ([1, 0, 1], r"rank 1 has ended at step 3, .*, and other ranks wait for it$", []),
    "uncaught": ([1, 1, 1], r"rank 1 failed at step 3, outside of the engine: KeyError: 'lost'$", [1]),
    "interrupted": (
        [130] * 3,
        r"^paceline: interrupted at step 3; what was done since the last checkpoint is lost$",
        [],
    ),
    "told to go": ([143] * 3, r"^paceline: stopped by SIGTERM before the first step$", []),
    "told to go as it leaves": ([143] * 3, r"^paceline: stopped by SIGTERM before the first step$", []),
    "shared": ([1, 1, 1], r"^paceline: error: rank 1 failed while reading: KeyError: 'lost'$", [1]),
    "shared but by rank 0": ([1, 1, 1], r"error: (rank 1 failed while reading: )?KeyError: 'lost'$", [1]),
    "shared input": ([1, 1, 1], r"^paceline: error: too many$", [0]),
}
"""Exit codes, what is told, and who shows where it was."""


@pytest.mark.parametrize("what", MISFORTUNES)
def test_what_a_transport_does_not_notice(what: str, all_of: Any) -> None:
    codes, cause, traces = MISFORTUNES[what]
    ended = all_of(misfortune, (what,), [(case,) for case in MISFORTUNES]).end()
    assert ended.codes == codes, "\n".join(ended.outputs)
    assert len(ended.causes) == (cause is not None), ended.outputs
    assert cause is None or re.search(cause, ended.causes[0]), ended.causes
    assert [rank for rank, text in enumerate(ended.outputs) if "Traceback" in text] == traces
    assert ended.left == []


def is_asked_in_a_collective() -> None:
    """Rank 0 gets SIGTERM while it waits in gloo for rank 1, which gets none; both stop at the next step."""
    import deepspeed
    import torch

    from paceline.supervise.lifetime import PREEMPTED, Preemption, end_process

    deepspeed.init_distributed("gloo")
    rank = int(os.environ["RANK"])
    with Preemption() as preemption:
        for step in range(STEPS):
            stop = torch.tensor(float(preemption.requested))
            deepspeed.comm.all_reduce(stop, op=deepspeed.comm.ReduceOp.MAX)
            if stop.item():
                preemption.reached()
                print(f"stopped at {step} by {preemption.reason}")
                deepspeed.comm.barrier()
                end_process(PREEMPTED)
            if step == AT_STEP and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == AT_STEP and rank == 1:
                time.sleep(0.5)
    end_process(0)


def test_ranks_agree_to_stop_at_a_step() -> None:
    job = Running(is_asked_in_a_collective, 2)
    try:
        ended = job.end()
    finally:
        job.kill()
    assert ended.codes == [143, 143]
    assert ended.outputs == [f"stopped at {AT_STEP + 1} by SIGTERM"] * 2


STUB = """
import os, sys, time
from pathlib import Path
from paceline.supervise.lifetime import PREEMPTED, Preemption, end_process
shared, rank = Path(sys.argv[-1]), os.environ["RANK"]
with Preemption() as preemption:
    (shared / f"own{rank}").write_text(str(os.getpid()))
    (shared / f"own{rank}").rename(shared / f"pid{rank}")  # whole as soon as it is there
    while not (shared / "stop").exists():
        if preemption.requested:
            (shared / f"asked{rank}").write_text(preemption.reason)
            if not (shared / "alone").exists():
                time.sleep(2.5)  # a rank that should not be asked beside this one would have been by now
                while len(list(shared.glob("asked*"))) < int((shared / "asks").read_text()):
                    time.sleep(0.05)
                (shared / "stop").touch()
        time.sleep(0.05)
    preemption.reached()
    time.sleep(0.5)
    (shared / f"saved{rank}").touch()
    while len(list(shared.glob("saved*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    end_process(PREEMPTED)
"""
"""Ranks that agree and save by way of files: without torch, they begin at once."""

COMMAND, LAUNCHER, RANK_1 = "the deepspeed command", "launch.py", "rank 1"
COMMAND_ENDED, LAUNCHER_ENDED = "the end of the deepspeed command", "the end of DeepSpeed's launcher"


class Launched:
    """A job under the real launcher, and the processes that belong to it wherever they have been adopted."""

    def __init__(self, directory: Path, asks: int, with_command: bool = True) -> None:
        """A job of which ``asks`` ranks will be asked to stop.

        Without the ``deepspeed`` command, its launch.py alone: that saves an import of DeepSpeed.
        """
        self.directory = directory
        (directory / "asks").write_text(str(asks))
        script = directory / "stub.py"
        script.write_text(STUB)
        environment = runner._environment({"PACELINE_TEST_MARK": str(directory)})
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        command = (runner.deepspeed_command if with_command else runner.launch_py)(2)
        self.process = subprocess.Popen(
            [*command, str(script), str(directory)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running():
            process.kill()
        self.process.wait()

    def running(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("PACELINE_TEST_MARK") == str(self.directory):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def launcher(self) -> psutil.Process:
        def find() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):  # another child, which has ended
                    if "deepspeed.launcher.launch" in child.cmdline():
                        return child
            return None

        return wait_for(find, runner.PATIENCE_S, "no launch.py")

    def wait_until_ranks_run(self) -> None:
        def run() -> bool:
            assert self.process.poll() is None, "over before it began"
            return len(list(self.directory.glob("pid*"))) == 2

        wait_for(run, runner.PATIENCE_S, "ranks did not begin")

    def pid(self, rank: int) -> int:
        return int((self.directory / f"pid{rank}").read_text())

    def asked(self) -> dict[int, str]:
        return {int(file.name[-1]): file.read_text() for file in sorted(self.directory.glob("asked*"))}

    def wait_until_over(self) -> int:
        """The exit status of the command; nothing of the job runs any more."""
        status = self.process.wait(runner.PATIENCE_S)
        wait_for(lambda: not self.running(), runner.PATIENCE_S, "processes are left")
        return status


def wait_for(condition: Any, seconds: float, message: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(0.05)
    return found


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("target", "number", "asked", "status"),
    [
        (COMMAND, signal.SIGTERM, {0: COMMAND_ENDED, 1: COMMAND_ENDED}, -15),
        (LAUNCHER, signal.SIGTERM, {0: "SIGTERM"}, 1),
        (LAUNCHER, signal.SIGKILL, {0: LAUNCHER_ENDED, 1: LAUNCHER_ENDED}, -9),
        (RANK_1, signal.SIGUSR1, {1: "SIGUSR1"}, 143),
    ],
)
def test_whoever_is_signalled_the_ranks_save_together_and_nothing_is_left(
    target: str, number: int, asked: dict[int, str], status: int | None, tmp_path: Path
) -> None:
    with Launched(tmp_path, len(asked), with_command=target == COMMAND) as job:
        job.wait_until_ranks_run()
        os.kill(job.pid(1) if target == RANK_1 else job.process.pid, number)
        assert job.wait_until_over() == status
        assert job.asked() == asked
        assert len(list(tmp_path.glob("saved*"))) == 2


@pytest.mark.launcher
def test_a_command_that_is_killed_before_the_ranks_begin_takes_them_with_it(tmp_path: Path) -> None:
    with Launched(tmp_path, asks=2) as job:
        job.launcher()
        job.process.kill()
        job.wait_until_over()
        assert job.asked() == {0: COMMAND_ENDED, 1: COMMAND_ENDED}
