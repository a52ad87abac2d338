"""The claim of one run on its output directory: a second one is refused while the first lives.

A file names the process that holds it: host, process id, and the moments at which host and process were started. A
process that was killed leaves its file; it is known by them, and taken over. Of a process on another host nothing is
known, unless a scheduler has started this job again: then what it ran before has ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

FILE_NAME = "_paceline.lock"
"""Trainer does not push files to the hub that begin like this."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a claim.

    Args:
        boot: of its host, from start to start another one; empty where it cannot be known.
        started: seconds since 1970, by the clock as it was.
        host_started: likewise; where the clock has been set since, that of now says another time. 0: not known.
        slurm_job: that it belongs to; empty: it is none of Slurm's.
        requeued: how often Slurm had started that job again.
    """

    host: str
    pid: int
    started: float
    host_started: float = 0.0
    boot: str = ""
    slurm_job: str = ""
    requeued: int = 0

    @classmethod
    def own(cls) -> Holder:
        """This process."""
        job, requeued = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")
        started, restarts = psutil.Process().create_time(), int(requeued) if requeued.isdigit() else 0
        return cls(socket.gethostname(), os.getpid(), started, psutil.boot_time(), _boot(), job, restarts)

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """The holder that ``text`` names; None if it names none: its process ended before it had written."""
        try:
            found = cls(**json.loads(text))
            return found if isinstance(found.pid, int) and found.started >= 0 else None
        except (ValueError, TypeError):
            return None

    def is_gone(self) -> bool:
        """Whether that process has ended, as far as this host can tell: of another host's, only by the scheduler."""
        own = Holder.own()
        if self.slurm_job and self.slurm_job == own.slurm_job and self.requeued < own.requeued:
            return True
        if self.host != own.host:
            return False
        if self.boot and own.boot and self.boot != own.boot:
            return True  # the host was started anew; its name was given to another one
        try:
            process = psutil.Process(self.pid)
            clock_set_by = psutil.boot_time() - self.host_started if self.host_started else 0.0
            is_it = abs(process.create_time() - clock_set_by - self.started) < 2.0  # ids are used again later
            return not is_it or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


class Claim:
    """Holds ``directory`` until :meth:`release`.

    Raises:
        ValueError: another run holds it and lives, or may live on another host.
        OSError: the file cannot be written; with its name, which the system does not give where the disk is full.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / FILE_NAME
        self._own = Holder.own()
        while not self._take():  # the file was removed between opening and locking it
            pass

    def release(self) -> None:
        """Give it up, if it is still this run's."""
        try:
            with open(self.path, "r+") as file:
                _lock(file.fileno())
                if Holder.parse(file.read()) == self._own and _is_at(file.fileno(), self.path):
                    self.path.unlink()
        except OSError:  # it is gone, or cannot be removed: a later run takes over from a process that has ended
            return

    def _take(self) -> bool:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        with open(descriptor, "r+") as file:
            # For as long as this file is open: who reads a dead holder replaces it before others read.
            _lock(descriptor)
            if not _is_at(descriptor, self.path):
                return False
            holder = Holder.parse(file.read())
            if holder is not None and holder != self._own and not holder.is_gone():
                raise ValueError(_refusal(self.path, holder, self._own))
            try:  # past the buffer of ``file``, which would try again as it is closed
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(self._own)).encode(), 0)
                os.fsync(descriptor)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        return True


@contextmanager
def claimed(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the claim for all ranks of this run. Collective where there is a process group.

    Raises:
        ValueError: on every rank, if another run holds it, or the directory cannot be written to.
    """
    import torch.distributed as dist

    claim, fault = None, [""]
    is_group = dist.is_available() and dist.is_initialized()
    if not is_group or dist.get_rank() == 0:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            claim = Claim(directory)
        except (OSError, ValueError) as error:
            fault = [str(error)]
    if is_group and dist.get_world_size() > 1:
        dist.broadcast_object_list(fault, src=0)
    if fault[0]:
        raise ValueError(fault[0])
    try:
        yield
    finally:
        if claim is not None:
            claim.release()


def _refusal(path: Path, holder: Holder, own: Holder) -> str:
    since = datetime.fromtimestamp(holder.started).isoformat(" ", "seconds")
    text = (
        f"{path.parent} is the output directory of a run that has not ended: process {holder.pid} on {holder.host}, "
        f"started {since}; two runs would overwrite each other's files. Choose another directory, or stop that run"
    )
    if holder.host != own.host:
        text += f"; if it is gone (this host, {own.host}, cannot tell), remove {path}"
    return f"{text}."


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _lock(descriptor: int) -> None:
    """Until the file is closed. Where the file system has no locks, two runs that begin at one moment may both win."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
