"""Run a function on several ranks, or a job through the DeepSpeed launcher, with an end in every case.

``run_ranks`` forks its ranks from a server that has imported torch, DeepSpeed, transformers and paceline once: that
takes seconds, a rank then milliseconds. ``launch`` starts a job as a user does, with everything that this costs.

Forked ranks share the server's hash seed. A collective whose order comes from iterating over a ``set`` is therefore in
step here and may be out of step under the launcher.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import importlib
import importlib.util
import json
import multiprocessing
import operator
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parents[1]

RANK_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",  # gloo looks the host's name up, which containers may not resolve
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What a rank on the CPU sees beside RANK, WORLD_SIZE and the like."""

OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a process that was started by itself does not see."""

OF_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
"""Open MPI's names of them; all ranks are on this host, and where rank 0 is it does not say."""

_SERVER_ENVIRONMENT = {
    **RANK_ENVIRONMENT,
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow would start a thread, and the server must have none
}

_STACKS = signal.SIGUSR2  # SIGUSR1 is what clusters send before they take a node away
_TAIL_LINES = 40
PATIENCE_S = float(os.environ.get("PACELINE_TESTS_PATIENCE_S", "900"))
"""Until something counts as hanging. Machines are slow at times, and what comes in the end is not wrong."""

_ANSWER_S = 60.0
"""Until a rank that hangs has written its stacks."""


def as_if_by_mpirun() -> None:
    """On a rank, before it joins the others: nothing but what Open MPI sets, and a port."""
    for name, other in OF_MPI.items():
        os.environ[other] = os.environ.pop(name)
    del os.environ["MASTER_ADDR"]


class RankError(RuntimeError):
    """A rank raised or died. ``rank`` is the one that did so first."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RankTimeout(RankError):
    """Ranks, or a launched job, ran past the time limit and were killed."""


@dataclass(frozen=True)
class _Failure:
    rank: int
    at: float
    summary: str
    details: str


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = PATIENCE_S,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``world_size`` new processes; its results in rank order.

    Each process finds the variables that ``init_distributed`` reads (RANK, WORLD_SIZE, MASTER_PORT, ...) and
    ``RANK_ENVIRONMENT``; nothing is initialised for it. Arguments and results are pickled. A process group that is
    still there when the function returns is left behind a barrier.

    Args:
        function: of module level, in a test module or an importable one. The ranks import its module from its file;
            ``conftest.py`` and pytest's rewriting of ``assert`` are not at work there, so return values and compare
            them in the test, or give ``assert`` a message.
        timeout: seconds, from the start of the first rank until the last one has returned.
        env: environment variables beside, or instead of, those above. With another ``DS_ACCELERATOR`` than ``cpu``
            ranks see the GPUs and are not forked (CUDA does not survive that): their imports count.

    Raises:
        RankError: a rank raised or died. The message has the traceback of the first one; the others are killed.
        RankTimeout: it took too long. The message has every rank's stack.
    """
    __tracebackhide__ = True
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} cannot be found from another process: define it at module level")
    file = getattr(sys.modules[function.__module__], "__file__", None)
    call = pickle.dumps((function.__module__, file, function.__qualname__))
    call_args = pickle.dumps((args, kwargs))
    environment = _environment(env)
    forked = environment["DS_ACCELERATOR"] == "cpu"
    if forked:
        _warm_up()
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}

    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        ranks = _Ranks(Path(directory), forked)
        try:
            for rank in range(world_size):
                ranks.start(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, call, call_args)
            results = ranks.collect(time.monotonic() + timeout, timeout)
        finally:
            ranks.kill()
        for rank in range(world_size):
            if output := ranks.output(rank):
                print(f"---- rank {rank} ----\n{output}")
    return results


class Case(NamedTuple):
    """See :func:`on`."""

    world_size: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def on(world_size: int, *args: Any, **kwargs: Any) -> Case:
    """A case of :class:`OneAfterAnother`: the number of ranks, and what the function is called with."""
    return Case(world_size, args, kwargs)


class OneAfterAnother:
    """Cases that the same ranks go through one after another: a start of ranks takes as long as a short training.

    The first case that a test asks for runs those that stand beside it, too. An error names its case. Each case finds
    the process as the one before it has left it.

    Args:
        function: as in :func:`run_ranks`, called with the arguments of each case.
        cases: by name, made by :func:`on`.
        at_once: the most cases of one start. Engines leave the threads of their groups behind.
    """

    def __init__(self, function: Callable[..., Any], cases: Mapping[Any, Case], at_once: int = 12) -> None:
        self.function = function
        self.cases = cases
        self.at_once = at_once
        self._found: dict[Any, list[Any] | RankError] = {}

    def __getitem__(self, name: Any) -> list[Any]:
        """What the case has returned, in rank order.

        Raises:
            RankError: from this case, or from one beside it.
        """
        __tracebackhide__ = True
        if name not in self._found:
            self._run(name)
        found = self._found[name]
        if isinstance(found, RankError):
            raise found
        return found

    def _run(self, name: Any) -> None:
        world_size = self.cases[name].world_size
        alike = [key for key, case in self.cases.items() if case.world_size == world_size]
        first = alike.index(name) // self.at_once * self.at_once
        names = alike[first : first + self.at_once]
        file = sys.modules[self.function.__module__].__file__
        call = pickle.dumps((self.function.__module__, file, self.function.__qualname__))
        cases = [(str(key), pickle.dumps(self.cases[key][1:])) for key in names]
        try:
            ranks = run_ranks(_one_after_another, world_size, call, cases)
        except RankError as error:
            self._found.update(dict.fromkeys(names, error))
        else:
            self._found.update(zip(names, map(list, zip(*ranks, strict=True)), strict=True))


def _one_after_another(call: bytes, cases: Sequence[tuple[str, bytes]]) -> list[Any]:
    found = []
    for name, call_args in cases:
        print(f"case {name}", flush=True)
        try:
            found.append(_call(call, call_args))
        except Exception as error:
            raise RuntimeError(f"case {name}: {type(error).__name__}: {error}") from error
    return found


def launch(
    args: Sequence[str],
    num_ranks: int,
    timeout: float = PATIENCE_S,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    with_command: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run ``deepspeed --num_gpus num_ranks *args`` in this Python environment and wait for it.

    Args:
        args: what follows the launcher's own options, such as ``["--module", "paceline.launch.finetune", ...]``.
        timeout: seconds until the launcher and all its ranks are killed.
        cwd: the job's working directory; by default this process's.
        env: environment variables beside, or instead of, ``RANK_ENVIRONMENT``.
        with_command: if not, its launch.py alone: that saves an import of DeepSpeed.

    Returns:
        The launcher's exit status and what it and the ranks wrote, whatever the status is.

    Raises:
        RankTimeout: it took too long. The message ends with what the job wrote last, stacks of all threads included.
    """
    __tracebackhide__ = True
    command = [*(deepspeed_command(num_ranks) if with_command else launch_py(num_ranks)), *args]
    environment = _environment(env) | {"PYTHONFAULTHANDLER": "1"}
    if environment["DS_ACCELERATOR"] == "cpu":
        environment.pop("CUDA_VISIBLE_DEVICES", None)  # the launcher sets it, and warns of one that is set
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _signal_group(process.pid, signal.SIGABRT)  # faulthandler writes the stacks
            _wait_for_group(process)
            status = None
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read(), err.read()
    if status is None:
        shown = _tail(stdout, _TAIL_LINES) + "\n" + _tail(stderr, 3 * _TAIL_LINES)
        raise RankTimeout(-1, f"not over after {timeout:g} s: {' '.join(command)}\n{shown}")
    return subprocess.CompletedProcess(command, status, stdout, stderr)


def deepspeed_command(num_ranks: int) -> list[str]:
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    launcher = shutil.which("deepspeed", path=search)
    if launcher is None:
        raise FileNotFoundError(f"no `deepspeed` command beside {sys.executable} or on PATH: install deepspeed")
    return [sys.executable, launcher, "--num_gpus", str(num_ranks), "--master_port", str(free_port())]


def launch_py(num_ranks: int) -> list[str]:
    """What the `deepspeed` command starts on a host."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(num_ranks))}).encode()).decode()
    launcher = [sys.executable, "-m", "deepspeed.launcher.launch"]
    return [*launcher, f"--world_info={world}", f"--master_port={free_port()}"]


def hang_of(act: Callable[[float], Any], *shown: str, first_s: float = 10.0) -> str:
    """What :class:`RankTimeout` says of ``act(timeout)``, which hangs where ``shown`` tells.

    It gets more and more time to come there, from ``first_s`` on: how much it takes depends on the machine.
    """
    message = ""
    for timeout in (first_s, 6 * first_s, min(36 * first_s, PATIENCE_S)):
        try:
            act(timeout)
        except RankTimeout as error:
            message = str(error)
        else:
            raise AssertionError("it does not hang")
        if all(part in message for part in shown):
            return message
    raise AssertionError(f"{shown} are not in: {message}")


def free_port() -> int:
    """A TCP port that nobody listens on, below those that outgoing connections are given.

    Tests that run side by side have ports of their own, or one could take what another has found and is yet to use.
    DeepSpeed's default, 29500, is nobody's. Of 100 in a row no two are the same: islands that begin at once, each on a
    thread, have yet to listen where they were sent.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        number, count = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % 4, 4
    else:
        number, count = map(int, os.environ.get("PACELINE_TESTS_PORTS", "0/1").split("/"))
    num_ports = 14400 // count
    with _giving:
        for _ in range(1000):
            port = random.SystemRandom().randrange(15000 + num_ports * number, 15000 + num_ports * (number + 1))
            if port in _given:
                continue
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                _given.append(port)
                return port
    raise OSError("no free TCP port between 15000 and 29400 found in 1000 tries")


_given: deque[int] = deque(maxlen=99)
"""The last ports."""

_giving = threading.Lock()


class _Ranks:
    """The processes of one call, as their parent sees them."""

    def __init__(self, directory: Path, forked: bool) -> None:
        self.directory = directory
        self.context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
        self.processes: list[Any] = []
        self.reports: list[connection.Connection] = []

    def start(self, environment: dict[str, str], call: bytes, call_args: bytes) -> None:
        report, sender = self.context.Pipe(duplex=False)
        self.reports.append(report)
        with sender, _server_environment():
            process = self.context.Process(
                target=_rank_main, args=(environment, sender, str(self.directory), call, call_args)
            )
            process.start()
        self.processes.append(process)

    def collect(self, deadline: float, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        results: dict[int, Any] = {}
        while len(results) < len(self.processes):
            outcomes = self._next({rank for rank in range(len(self.processes)) if rank not in results}, deadline)
            if not outcomes:
                self._raise_timeout(results, timeout)
            if any(isinstance(outcome, _Failure) for outcome in outcomes.values()):
                self._raise_failure(outcomes, set(results) | set(outcomes))
            results |= outcomes
        for process in self.processes:
            process.join(5.0)
        return [results[rank] for rank in sorted(results)]

    def _next(self, waiting: set[int], deadline: float) -> dict[int, Any]:
        """What the ranks that have ended brought: results and failures. Empty when the time is up."""
        events: dict[Any, int] = {self.reports[rank]: rank for rank in waiting}
        events |= {self.processes[rank].sentinel: rank for rank in waiting}
        ready = connection.wait(list(events), max(0.0, deadline - time.monotonic()))
        return {rank: self._read(rank) for rank in {events[event] for event in ready}}

    def _read(self, rank: int) -> Any:
        try:
            return pickle.loads(self.reports[rank].recv_bytes())
        except EOFError:
            process = self.processes[rank]
            process.join(60.0)
            status = process.exitcode
            name = f" ({signal.Signals(-status).name})" if status is not None and status < 0 else ""
            return _Failure(rank, time.monotonic(), f"died with exit status {status}{name}", "")

    def _raise_failure(self, outcomes: dict[int, Any], done: set[int]) -> None:
        __tracebackhide__ = True
        # Ranks that lost their peer fail a moment later and may be heard first: time decides, not arrival.
        late = self._next(set(range(len(self.processes))) - done, time.monotonic() + 0.1)
        failures = [outcome for outcome in (outcomes | late).values() if isinstance(outcome, _Failure)]
        first, *others = sorted(failures, key=lambda failure: failure.at)
        parts = [f"rank {first.rank} of {len(self.processes)} {first.summary}", first.details]
        parts += [f"then rank {other.rank} {other.summary}" for other in others]
        self.kill()
        parts.append(self._shown_output(first.rank))
        raise RankError(first.rank, "\n".join(part for part in parts if part)) from None

    def _raise_timeout(self, results: dict[int, Any], timeout: float) -> None:
        __tracebackhide__ = True
        late = [rank for rank in range(len(self.processes)) if rank not in results]
        stacks = {rank: self._stack(rank) for rank in late}
        parts = [f"ranks {late} of {len(self.processes)} not done after {timeout:g} s: all ranks killed"]
        self.kill()
        for rank in late:
            parts += [f"---- rank {rank}, stack ----", stacks[rank], self._shown_output(rank)]
        raise RankTimeout(late[0], "\n".join(part for part in parts if part))

    def _stack(self, rank: int) -> str:
        """Its stacks, line by line, once it writes no more: on a busy machine it may rest between two lines."""
        file, process = self.directory / f"stack{rank}", self.processes[rank]
        if not file.exists():
            return "(the rank had not begun)"
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, _STACKS)
        text, looks_alike, deadline = "", 0, time.monotonic() + _ANSWER_S
        while looks_alike < 10 and process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.02)
            before, text = text, file.read_text(errors="replace")
            looks_alike = looks_alike + 1 if text and text == before else 0
        return text.rstrip() or "(the rank did not answer)"

    def _shown_output(self, rank: int) -> str:
        output = self.output(rank)
        return f"---- rank {rank}, end of output ----\n{_tail(output, _TAIL_LINES)}" if output else ""

    def output(self, rank: int) -> str:
        file = self.directory / f"output{rank}"
        return file.read_text(errors="replace").rstrip() if file.exists() else ""

    def kill(self) -> None:
        """End every rank and what it has started. Those that have ended are not disturbed."""
        for process in self.processes:
            _signal_group(process.pid, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for report in self.reports:
            report.close()
        self.processes.clear()
        self.reports.clear()


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    with _starting:
        own = dict(os.environ)
    environment = own | RANK_ENVIRONMENT | dict(env or {})
    if environment["DS_ACCELERATOR"] != "cpu" and "CUDA_VISIBLE_DEVICES" not in (env or {}):
        environment.pop("CUDA_VISIBLE_DEVICES")
        if "CUDA_VISIBLE_DEVICES" in own:
            environment["CUDA_VISIBLE_DEVICES"] = own["CUDA_VISIBLE_DEVICES"]
    return environment


@contextlib.contextmanager
def _server_environment() -> Iterator[None]:
    """The environment in which the fork server starts, should it not be running. For one thread at a time: a process
    that starts while another thread changes the environment ends with status 255, before it is a Python."""
    with _starting:
        before = dict(os.environ)
        path = [str(TESTS), *filter(None, [before.get("PYTHONPATH")])]
        os.environ.update(_SERVER_ENVIRONMENT, PYTHONPATH=os.pathsep.join(path))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


_starting = threading.Lock()


def _warm_up() -> None:
    """Have the fork server run, everything imported."""
    global _warm
    if _warm:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.rank_preload"])
    with _server_environment():
        process = context.Process(target=_nothing)
        process.start()
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        raise RankTimeout(-1, f"the server that ranks are forked from is not ready after {PATIENCE_S:g} s")
    process.close()
    _warm = True


_warm = False


def _nothing() -> None:
    pass


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _wait_for_group(leader: subprocess.Popen[str]) -> None:
    """Until the leader and all others of its group have ended, as they do when they have written their stacks."""
    deadline = time.monotonic() + _ANSWER_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            leader.poll()
            os.killpg(leader.pid, 0)
            time.sleep(0.05)


def _tail(text: str, num_lines: int) -> str:
    lines = text.splitlines()
    return "\n".join(lines if len(lines) <= num_lines else ["...", *lines[-num_lines:]])


def _rank_main(
    environment: dict[str, str], report: connection.Connection, directory: str, call: bytes, call_args: bytes
) -> None:
    """The whole life of one rank. Does not return: what others do as an interpreter ends may abort in gloo."""
    os.setsid()
    _die_with_parent()
    # A rank's own processes (workers of a DataLoader) begin as elsewhere, and not from a server that imports all again.
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(environment)
    rank = int(environment["RANK"])
    output = os.open(Path(directory, f"output{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    stack = open(Path(directory, f"stack{rank}"), "w")  # noqa: SIM115 (faulthandler writes to it until the end)
    faulthandler.register(_STACKS, stack)
    status = 0
    try:
        payload = pickle.dumps(_call(call, call_args))
        _leave_group()
    except BaseException as error:
        at = time.monotonic()
        summary = "raised " + "".join(traceback.format_exception_only(error)).strip()
        payload = pickle.dumps(_Failure(rank, at, summary, traceback.format_exc().rstrip()))
        status = 1
    report.send_bytes(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _call(call: bytes, call_args: bytes) -> Any:
    importlib.import_module("support.rank_preload")
    import torch

    # In a fork, PyTorch replaces its thread pool at the first use, and two threads that are both first may find none
    # ("Invalid thread pool!"): this thread is the first.
    torch.set_num_threads(torch.get_num_threads())
    module_name, file, qualname = pickle.loads(call)
    function = operator.attrgetter(qualname)(_module(module_name, file))
    args, kwargs = pickle.loads(call_args)  # may need the module
    return function(*args, **kwargs)


def _module(name: str, file: str | None) -> ModuleType:
    """The module ``name`` of ``file``, which need not be where imports are looked for (pytest's importlib mode)."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is not None and found.origin == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file or "")
    assert spec is not None and spec.loader is not None, (name, file)  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    for end in (i for i, character in enumerate(name) if character == "."):
        sys.modules.setdefault(name[:end], ModuleType(name[:end]))  # unpickling imports the parents too
    spec.loader.exec_module(module)
    return module


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _die_with_parent() -> None:
    """Have Linux end this process when the one that called ``run_ranks`` ends, however that comes about.

    The sentinel is a pipe that only the caller can close, and a hang-up there is a SIGIO here.
    """
    if sys.platform == "linux":
        import fcntl

        caller = multiprocessing.parent_process()
        assert caller is not None
        fcntl.fcntl(caller.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(caller.sentinel, fcntl.F_SETFL, fcntl.fcntl(caller.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
