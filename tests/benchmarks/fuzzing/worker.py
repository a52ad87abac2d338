"""Runs cases in processes that are forked for a few of them each, within limits, and judges what came of them.

Started by :mod:`benchmarks.fuzzing.campaign`; takes a line of JSON with cases on stdin, and answers each with a line.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paceline

CPU_S, WALL_S = 20.0, 400.0
"""Longest that a case may compute, and that it may take on a busy machine."""

MEMORY_BYTES = 3 * 2**30
"""Most addresses beyond those of the modules."""

MOST_RESIDENT_BYTES = 3 * 2**29
FILE_BYTES = 2**28
PROCESS_BYTES, PROCESS_CPU_S = 6 * 2**30, 90
"""Of a process of its own, which imports its modules too."""

MOST_MESSAGE = 1500
STATUSES = (0, 1, 2, 3)
BAD_INPUT, REFUSED = 2, 3

_TRACEBACK = "Traceback (most recent call last)"
_MODULES = (
    *("torch", "deepspeed", "transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral"),
    *("transformers.models.gpt2.modeling_gpt2", "matplotlib.figure", "matplotlib.backends.backend_svg"),
    "matplotlib.backends.backend_agg",
)
"""That cases would import, each in its own process, beside those of paceline."""


def main() -> None:
    """Answer until stdin ends."""
    inputs = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    own = [found.name for found in pkgutil.walk_packages(paceline.__path__, "paceline.")]
    for name in (*_MODULES, *own):
        with contextlib.suppress(Exception):  # it fails again in the cases that need it
            importlib.import_module(name)
    for line in sys.stdin:
        cases = json.loads(line)
        while cases:
            done = _batch(cases, inputs)
            for result in done:
                print(json.dumps(result), file=answers)
            cases = cases[len(done) :]


def _batch(cases: Sequence[dict[str, Any]], inputs: Path) -> list[dict[str, Any]]:
    """Results of the first cases, up to one that had to be ended."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _be_child(cases, inputs, Path(folder), write)
        os.close(write)
        buffer = b""
        begun, cpu = time.monotonic(), 0.0
        problem = ""
        while not problem:
            ready, _, _ = select.select([read], [], [], 1.0)
            if ready:
                data = os.read(read, 1 << 16)
                if not data:
                    break
                buffer += data
                *lines, buffer = buffer.split(b"\n")
                results += map(json.loads, lines)
                if lines:
                    begun, cpu = time.monotonic(), _cpu_s(child)
            elif _cpu_s(child) - cpu > CPU_S or time.monotonic() - begun > WALL_S:
                problem = f"ran past its limit of {CPU_S:.0f} s" if _cpu_s(child) - cpu > CPU_S else "hangs"
                where = _where_is(child, Path(folder))
                os.kill(child, signal.SIGKILL)
                problem += where
        os.close(read)
        _, status = os.waitpid(child, 0)
        if len(results) < len(cases):
            told = problem or f"the process ended with {os.waitstatus_to_exitcode(status)}"
            seconds = time.monotonic() - begun
            ended = {"outcome": "ended", "seconds": seconds, "problem": told, "stderr": "", "resident": 0}
            results.append({"number": cases[len(results)]["number"], **ended})
    return results


def _cpu_s(child: int) -> float:
    """Of a process and of its children that it has waited for."""
    try:
        times = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _where_is(child: int, folder: Path) -> str:
    """In which function of paceline a process is, as faulthandler tells it."""
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.5)
        frames = re.findall(
            r'File ".*/(?:integration/paceline|launch|patches)/(\S+\.py)", line \d+ in (\w+)',
            (folder / "where").read_text(),
        )
        if frames:
            return f" in {frames[0][0]}:{frames[0][1]}"
    return ""


def _be_child(cases: Sequence[dict[str, Any]], inputs: Path, folder: Path, write: int) -> None:
    import faulthandler

    faulthandler.register(signal.SIGUSR1, open(folder / "where", "w"), all_threads=False)  # noqa: SIM115
    noise = os.open(folder / "noise", os.O_RDWR | os.O_CREAT)
    os.dup2(noise, 1)
    os.dup2(noise, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    size = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = 1
    try:
        for index, case in enumerate(cases):
            place = folder / str(index) / "x" / "here"
            place.mkdir(parents=True)
            prepare(case, inputs, place)
            os.chdir(place)
            environment = dict(os.environ)
            result = _judged(case, folder / "noise")
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            shutil.rmtree(folder / str(index), ignore_errors=True)
            os.write(write, json.dumps({"number": case["number"], **result}).encode() + b"\n")
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def prepare(case: dict[str, Any], inputs: Path, place: Path) -> None:
    """Fill the folder of a case."""
    for target, source in case["inputs"].items():
        path = place / target
        path.parent.mkdir(parents=True, exist_ok=True)
        if (inputs / source).is_dir():
            shutil.copytree(inputs / source, path, dirs_exist_ok=True)
        else:
            shutil.copyfile(inputs / source, path)
    for target, data in case["files"].items():
        path = place / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes.fromhex(data))
    for target, what, *how in case["edits"]:
        path = place / target
        if what == "remove":
            path.unlink(missing_ok=True)
        elif what == "truncate":
            os.truncate(path, how[0])
        else:
            with path.open("r+b") as file:
                file.seek(how[0])
                file.write(bytes.fromhex(how[1]))
    for target in case["folders"]:
        (place / target).unlink(missing_ok=True)
        (place / target).mkdir(parents=True, exist_ok=True)


def _judged(case: dict[str, Any], noise: Path) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF)
    heard = noise.stat().st_size
    out, err = _Captured("strict"), _Captured("backslashreplace")
    begun = time.monotonic()
    status: Any = None
    problem = ""
    os.environ.update(case["env"])
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = _CALLS[case["call"]](case)
    except SystemExit as stop:
        status = 0 if stop.code is None else stop.code
    except BaseException as error:
        problem = _escaped(error)
    seconds = time.monotonic() - begun
    told, errors = out.text(), err.text()
    with noise.open(errors="replace") as file:
        file.seek(heard)
        errors += file.read()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resident = peak if peak > before.ru_maxrss * 1024 else 0
    problem = problem or verdict(case["argv"], status, told, errors)
    if not problem and resident > MOST_RESIDENT_BYTES:
        problem = f"takes {resident / 2**30:.1f} GiB"
    outcome = f"status {status}" if not problem else "failed"
    return {"outcome": outcome, "seconds": seconds, "problem": problem, "stderr": errors[-600:], "resident": resident}


class _Captured(io.TextIOWrapper):
    """What a terminal or a file would take: not what is no UTF-8."""

    def __init__(self, errors: str) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]


def verdict(argv: Sequence[str], status: Any, out: str, err: str) -> str:
    """What is wrong with how a call ended; empty if nothing."""
    if _TRACEBACK in out + err:
        last = [
            line for line in (out + err).splitlines() if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)
        ]
        return f"prints a traceback: {last[-1][:120] if last else ''}"
    if isinstance(status, bool) or status not in STATUSES:
        return f"status {status!r}"
    _, *messages = re.split(r"^(?:paceline[\w. -]*:(?: error:)?|[\w. -]+: error:)", err, flags=re.MULTILINE)
    message = messages[-1] if messages else ""
    if status == BAD_INPUT and not message.strip():
        return "status 2 without a message"
    if status not in (0, BAD_INPUT) and not (err + out).strip():
        return f"status {status} without a message"
    if status == BAD_INPUT and len(message) > MOST_MESSAGE:
        return "a message of more than 1500 characters"
    if status != BAD_INPUT and "--json" in argv and (out or not status) and not out.startswith("usage: "):
        try:
            json.loads(out, parse_constant=_no_constant)
        except ValueError as error:
            return f"--json prints no JSON: {str(error)[:60]}"
    return ""


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} in it")


def _escaped(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if re.search(r"/(paceline|launch|patches)/", f.filename) and "fuzzing" not in f.filename]
    where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "?"
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__} leaves {where}: {first[:160]}"


def _command(case: dict[str, Any]) -> int:
    if case["command"] == "measure":
        from paceline.launch.measure import main as measure

        return measure(case["argv"])
    from paceline.launch.cli import main as command

    return command([case["command"], *case["argv"]])


def _job(case: dict[str, Any]) -> int:
    """What a rank does with its flags before it trains."""
    from paceline.hf.arguments import parse
    from paceline.launch.finetune import _with_embedded_defaults

    return _refused(lambda: parse(_with_embedded_defaults(case["argv"])))


def _environment(case: dict[str, Any]) -> int:
    from paceline.averaging.islands import island_share
    from paceline.config.averaging_keys import AveragingConfig
    from paceline.launch.finetune import _set_up_logging

    _set_up_logging(0)
    _set_up_logging(1)
    section = json.loads(case["values"]["section"])
    try:
        checked = AveragingConfig.model_validate(section)
    except ValueError:  # pydantic's own, which PacelineConfig.of says otherwise
        checked = AveragingConfig(lighthouse="localhost:29510", min_islands=2)
    return _refused(lambda: island_share(checked, 10))


def _config(case: dict[str, Any]) -> int:
    """What the job does with a DeepSpeed JSON; each part is asked, whatever the others said."""
    from paceline.config import PacelineConfig, check_features, near_misses, open_autos, read_ds_config

    read: dict[str, Any] = {}

    def load() -> None:
        read["config"] = read_ds_config("ds.json")

    status = _refused(load)
    if status:
        return status
    config = read["config"]
    near_misses(config)
    open_autos(config)
    calls = (
        lambda: PacelineConfig.of(config),
        lambda: check_features(config, PacelineConfig.of(config)),
        lambda: _resolved(config, case["values"]),
    )
    statuses, told = [], ""
    for call in calls:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            statuses.append(_refused(call))
        if verdict([], statuses[-1], "", err.getvalue()):
            told = err.getvalue()
            break
        told = err.getvalue() or told
    print(told, file=sys.stderr)
    return max(statuses)


def _resolved(config: dict[str, Any], values: dict[str, Any]) -> None:
    from paceline.config import fill_auto, resolve
    from paceline.config.section import HETERO
    from paceline.hf.arguments import parse
    from paceline.planning.memory import States

    if values["args"]:
        *_, args, given = parse(["--learning_rate", "1e-4", "--output_dir", "out", "--warmup_steps", "3"])
        config = fill_auto(
            config, args, data_parallel=1, hidden_size=64, max_steps=values["max_steps"], given=given
        )  # fmt: skip
    else:
        config = {key: value for key, value in config.items() if value != "auto"}
    layers = values["num_layers"]
    sizes = {key: values[key] for key in ("world_size", "num_layers", "state_bytes", "device_bytes")}
    resolved = resolve(config, num_items=layers + 2, cpu=True, **sizes)
    States.from_config(resolved.ds_config, resolved.data_parallel)
    if not resolved.schedule.has_directions and resolved.partition != HETERO:
        resolved.schedule.first(resolved.stages, resolved.micro_batches)


def _refused(call: Callable[[], Any]) -> int:
    """As the job does: a ValueError is a line on stderr."""
    from paceline.supervise.watch import describe

    try:
        call()
    except ValueError as error:
        print(f"paceline: {describe(error)}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _program(case: dict[str, Any]) -> int:
    module, argv = "paceline.launch.cli", [case["command"], *case["argv"]]
    if case["command"] in ("finetune", "measure"):
        module, argv = f"paceline.launch.{case['command']}", case["argv"]
    command = [sys.executable, "-m", module, *argv]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (PROCESS_BYTES, PROCESS_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESS_CPU_S, PROCESS_CPU_S))

    done = subprocess.run(command, capture_output=True, check=False, preexec_fn=limit, timeout=WALL_S - 20)
    print(done.stdout.decode(errors="replace"))
    print(done.stderr.decode(errors="replace"), file=sys.stderr)
    return done.returncode


_CALLS: dict[str, Callable[[dict[str, Any]], int]] = {
    "command": _command,
    "config": _config,
    "job": _job,
    "environment": _environment,
    "program": _program,
}


if __name__ == "__main__":
    main()
