"""Several hosts on one Linux machine: network namespaces with limited links, in which jobs run one rank a host.

What stands for a host is a process that holds a network namespace and ends when its input ends. A lab therefore leaves
nothing behind, however the process that made it ends, and any number of labs may exist side by side: none of them has
anything in the machine's own network.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import IO

from support.ranks import RANK_ENVIRONMENT

DEVICE = "eth0"
BURST_BYTES = 128 * 1024
"""What a limited host may send at once after a pause, if nothing else is said."""

_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
_TAIL_LINES = 60
_CLONE_NEWNET = 0x40000000


class HostError(RuntimeError):
    """The job failed on a host. ``host`` is the one that failed first."""

    def __init__(self, host: int, message: str) -> None:
        super().__init__(message)
        self.host = host


class HostTimeout(HostError):
    """The job ran past its time limit and was killed."""


@functools.cache
def available() -> str:
    """Why there can be no lab on this machine; empty if there can be one."""
    if os.geteuid() != 0:
        return "the lab needs root: network namespaces and rate limits"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"the lab needs {', '.join(missing)}: install iproute2 and util-linux"
    try:
        with Hosts(2, mbit=100):
            return ""
    except (OSError, RuntimeError) as error:
        return f"the lab cannot be built here: {error}"


class Hosts:
    """``num_hosts`` hosts on one switch, each with an address of its own.

    Args:
        num_hosts: at most 200.
        mbit: limit of every host's sending side in Mbit/s of bytes on the wire; None: no limit.
        burst_bytes: what a limited host may send at once after a pause.

    Example::

        with Hosts(4, mbit=200) as hosts:
            hosts.set_rate(2, 100)
            outputs = hosts.run([sys.executable, "train.py"])
    """

    def __init__(self, num_hosts: int, mbit: float | None = None, burst_bytes: int = BURST_BYTES) -> None:
        if not 1 <= num_hosts <= 200:
            raise ValueError(f"num_hosts is {num_hosts}: one address range has room for 1 to 200 hosts")
        self.addresses = [f"10.77.0.{host + 1}" for host in range(num_hosts)]
        self.rates: list[float | None] = [None] * num_hosts
        self._mbit, self._burst_bytes = mbit, burst_bytes
        self._num_jobs = 0
        self._switch = _Namespace()
        self._hosts = [_Namespace() for _ in self.addresses]
        self._open = contextlib.ExitStack()
        self._started: list[subprocess.Popen[str]] = []
        self._starting = threading.Lock()

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as stack:
            switch = stack.enter_context(self._switch)
            switch.ip("link add switch type bridge", "link set switch up")
            for host, address in enumerate(self.addresses):
                namespace, port = stack.enter_context(self._hosts[host]), f"port{host}"
                namespace.ip(
                    f"link add {DEVICE} type veth peer name {port} netns {switch.pid}",
                    f"link set {DEVICE} addrgenmode none",  # no second, local address
                    f"addr add {address}/24 dev {DEVICE}",
                    f"link set {DEVICE} up",
                    "link set lo up",
                    # Some defaults estimate a rate of their own and lag behind a limit that moves.
                    f"route change 10.77.0.0/24 dev {DEVICE} src {address} congctl reno",
                )
                switch.ip(f"link set {port} master switch up")
            self._open = stack.pop_all()
        try:
            for host in range(len(self.addresses)):
                self.set_rate(host, self._mbit)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        with self._starting:  # another thread may be starting one
            _kill([process for process in self._started if process.returncode is None])  # other threads wait for them
        self._open.close()

    @property
    def namespaces(self) -> list[str]:
        """Of the hosts, for :func:`enter`."""
        return [host.path for host in self._hosts]

    def set_rate(self, host: int, mbit: float | None) -> None:
        """Limit what ``host`` sends to ``mbit`` Mbit/s of bytes on the wire, from now on; None: no limit.

        Raises:
            ValueError: not a positive rate.
        """
        if mbit is not None and not mbit > 0:
            raise ValueError(f"rate {mbit} Mbit/s of host {host}: it must be positive, or None for no limit")
        if mbit is not None:
            self._hosts[host].call(*_limiting(mbit, self._burst_bytes))
        elif self.rates[host] is not None:
            self._hosts[host].call("tc", *f"qdisc del dev {DEVICE} root".split())
        self.rates[host] = mbit

    def popen(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        output: IO[str] | int | None = None,
    ) -> subprocess.Popen[str]:
        """Start ``command`` on ``host``, in its own session. It is killed when the thread that called this ends."""
        with self._starting:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._hosts[host].inside, *command],
                env={**os.environ, **RANK_ENVIRONMENT, "GLOO_SOCKET_IFNAME": DEVICE, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
            self._started = [one for one in self._started if one.returncode is None] + [process]
        return process

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float = 120.0,
        are_islands: bool = False,
    ) -> list[str]:
        """Run ``command`` as one rank on every host; what each wrote, in order of hosts.

        Ranks find RANK, WORLD_SIZE, MASTER_ADDR and the like, and what the CPU ranks of other tests find.

        Args:
            env: variables beside, or instead of, those.
            timeout: seconds until all ranks are killed.
            are_islands: every host is a world of its own, and an island of this number.

        Raises:
            HostError: a rank failed; the others are killed. The message has the end of what the first one wrote.
            HostTimeout: it took too long. The message has what the ranks that were left wrote last, Python's stacks
                included.
        """
        __tracebackhide__ = True
        num_hosts = len(self.addresses)
        self._num_jobs += 1
        job = {
            "WORLD_SIZE": str(num_hosts),
            "LOCAL_RANK": "0",
            "LOCAL_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(20000 + self._num_jobs),
            "PYTHONFAULTHANDLER": "1",
        }
        with tempfile.TemporaryDirectory(prefix="lab-") as folder, contextlib.ExitStack() as stack:
            files = [Path(folder, f"host{host}") for host in range(num_hosts)]
            processes: list[subprocess.Popen[str]] = []
            stack.callback(_kill, processes)
            for host, file in enumerate(files):
                rank = {**job, "RANK": str(host), **(env or {})}
                if are_islands:
                    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": self.addresses[host]}
                    rank |= alone | {"PACELINE_ISLAND": str(host)}
                processes.append(self.popen(host, command, rank, stack.enter_context(file.open("w"))))
            _wait(processes, files, timeout)
            return [file.read_text(errors="replace") for file in files]


def enter(namespace: str) -> None:
    """Be on a host from here on: the thread that calls this, and those that it starts."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: {namespace}")


def set_own_rate(mbit: float) -> None:
    """As :meth:`Hosts.set_rate`, called on the host itself, by a rank for instance."""
    subprocess.run(_limiting(mbit), check=True)


def _limiting(mbit: float, burst_bytes: int = BURST_BYTES) -> list[str]:
    limiter = f"tbf rate {round(mbit * 1e6)}bit burst {burst_bytes} latency 100ms"
    return ["tc", *f"qdisc replace dev {DEVICE} root {limiter}".split()]


class _Namespace:
    """A network namespace, held by a process that ends with its standard input."""

    def __enter__(self) -> _Namespace:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the terminal is for those who use the namespace
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None  # noqa: PT018
        if not self._holder.stdout.readline():
            message = self._holder.stderr.read().decode(errors="replace").strip()
            self.__exit__()
            raise RuntimeError(message or "no network namespace could be made")
        self.pid = self._holder.pid
        self.path = f"/proc/{self.pid}/ns/net"
        self.inside = ["nsenter", f"--net={self.path}", "--"]
        return self

    def __exit__(self, *exception: object) -> None:
        self._holder.kill()
        self._holder.communicate()

    def ip(self, *commands: str) -> None:
        self.call("ip", "-batch", "-", text="\n".join(commands) + "\n")

    def call(self, *command: str, text: str = "") -> None:
        done = subprocess.run(
            [*self.inside, *command], check=False, input=text, capture_output=True, text=True, start_new_session=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} {text}: {(done.stderr or done.stdout).strip()}")


def _wait(processes: Sequence[subprocess.Popen[str]], files: Sequence[Path], timeout: float) -> None:
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        left: dict[int, int] = {}
        for host, process in enumerate(processes):
            left[os.pidfd_open(process.pid)] = host
        for descriptor in left:
            stack.callback(os.close, descriptor)
        while left:
            ended = connection.wait(list(left), max(0.0, deadline - time.monotonic()))
            failed = []
            for descriptor in ended:
                host = left.pop(descriptor)
                if processes[host].wait():
                    failed.append(host)
            if failed:  # more than one only if they ended at the same time; the others are killed
                shown = [
                    f"host {host}: exit status {processes[host].returncode}\n{_tail(files[host])}" for host in failed
                ]
                raise HostError(failed[0], "\n".join(shown))
            if not ended:
                hosts = sorted(left.values())
                _signal(processes, signal.SIGABRT)  # Python writes its stacks
                time.sleep(0.5)
                shown = [f"---- host {host} ----\n{_tail(files[host])}" for host in hosts]
                raise HostTimeout(hosts[0], "\n".join([f"hosts {hosts} not done after {timeout:g} s", *shown]))


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    _signal(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def _signal(processes: Sequence[subprocess.Popen[str]], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # also what a rank that has ended has left


def _tail(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
