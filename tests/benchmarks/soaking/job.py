"""A job on the hosts of a lab: DeepSpeed's launcher on every host, as its ``deepspeed`` command starts them there."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from lab.hosts import Hosts
from support.ranks import RANK_ENVIRONMENT

MARK = "PACELINE_SOAK"
"""Variable that all processes of an episode have, wherever they are in the tree."""

_STEP = re.compile(rb"step (\d+)/\d+: loss ")
_TAIL_CHARS = 4000
_LOOKED_AT = 2**16


class Broken(AssertionError):
    """Something did not hold."""


class Job:
    """One start of a job, one rank on each of ``places`` (hosts).

    Args:
        flags: of ``paceline.launch.finetune``.
        folder: logs go there; each host has a /dev/shm and a folder for temporary files of its own below it.
    """

    def __init__(
        self, hosts: Hosts, places: Sequence[int], flags: Sequence[str], port: int, folder: Path, env: Mapping[str, str]
    ) -> None:
        self.places = list(places)
        self.log = folder / f"host{places[0]}.log"
        self.offset = self.log.stat().st_size if self.log.exists() else 0
        world = base64.urlsafe_b64encode(json.dumps({f"host{place}": [0] for place in places}).encode()).decode()
        self.launchers: list[subprocess.Popen[str]] = []
        self.logs = [folder / f"host{place}.log" for place in places]
        for number, place in enumerate(places):
            shm, tmp = folder / "shm" / f"host{place}", folder / "tmp" / f"host{place}"
            shm.mkdir(parents=True, exist_ok=True)
            tmp.mkdir(parents=True, exist_ok=True)
            command = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
            command += ['mount --bind "$0" /dev/shm && exec "$@"', str(shm)]
            command += [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
            command += [f"--node_rank={number}", f"--master_addr={hosts.addresses[places[0]]}", f"--master_port={port}"]
            command += ["--log_level=warning", "--module", "paceline.launch.finetune", *flags]
            with self.logs[number].open("a") as log:
                own = {**env, "TMPDIR": str(tmp), "PYTHONFAULTHANDLER": "1"}
                self.launchers.append(hosts.popen(place, command, own, log))
        self.began = time.monotonic()
        self._ranks: dict[int, psutil.Process] = {}

    def ranks(self) -> dict[int, psutil.Process]:
        """By number; those that have been seen, also when they have ended."""
        for number, launcher in enumerate(self.launchers):
            if number in self._ranks:
                continue
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(launcher.pid).children():
                    if any(part.startswith("--local_rank=") for part in child.cmdline()):
                        self._ranks[number] = child
        return self._ranks

    def watched(self) -> dict[str, psutil.Process]:
        """Ranks and launchers, by name."""
        found = {f"rank {number}": rank for number, rank in self.ranks().items()}
        for number, launcher in enumerate(self.launchers):
            with contextlib.suppress(psutil.Error):
                found[f"launcher {number}"] = psutil.Process(launcher.pid)
        return found

    def step(self) -> int:
        """The last one that this start of the job has told of; 0: none yet."""
        return last_step(self.log, self.offset)

    def codes(self) -> list[int | None]:
        """Of the launchers; None: it runs."""
        return [launcher.poll() for launcher in self.launchers]

    def has_ended(self) -> bool:
        return None not in self.codes()

    def output(self, chars: int = _TAIL_CHARS) -> str:
        """What the hosts wrote last."""
        return "\n".join(f"---- {log.stem} ----\n{tail(log, chars)}" for log in self.logs)


def last_step(log: Path, offset: int = 0) -> int:
    """That the log tells of behind ``offset``, or 0."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(max(offset, log.stat().st_size - _LOOKED_AT))
        found = _STEP.findall(file.read())
    return int(found[-1]) if found else 0


def tail(log: Path, chars: int = _TAIL_CHARS) -> str:
    if not log.exists():
        return ""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))[-chars:]


def start_alone(flags: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The job as one process, without a launcher."""
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "paceline.launch.finetune"]
    with log.open("ab") as file:
        return subprocess.Popen(
            [*command, *flags],
            env={**os.environ, **RANK_ENVIRONMENT, "PYTHONFAULTHANDLER": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def processes(mark: str) -> list[psutil.Process]:
    """Every process whose mark begins so."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK, "").startswith(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_all(mark: str) -> None:
    for process in processes(mark):
        with contextlib.suppress(psutil.Error):
            process.kill()


def show_stacks(mark: str) -> None:
    """Have all ranks write their stacks to their logs. It ends them."""
    for process in processes(mark):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGABRT)
    time.sleep(3.0)


def inside_namespaces(namespaces: set[int]) -> list[int]:
    """Processes in one of these network namespaces."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns" / "net").stat().st_ino in namespaces:
                    found.append(int(entry.name))
    return found
