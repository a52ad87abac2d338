"""A job that is killed, asked to stop, or runs out of disk, again and again, and resumed each time.

    python tests/benchmarks/survival.py --how kill --times 20     (also: term, disk)

The weights at the end must be those of a run without accidents, in every bit; every accident must end all ranks within
a limit; nothing may be left running. Exits with 1 and says what, otherwise; prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import psutil
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.ranks import PATIENCE_S, RANK_ENVIRONMENT, free_port

LIMIT_S = 60.0
"""From an accident to the end of all ranks."""

LOGS_EVERY = 5
"""Steps from one printed loss to the next."""

MARK = "PACELINE_SURVIVAL"
JOB = {
    "model_type": "llama",
    "config_overrides": "hidden_size=32,intermediate_size=64,num_hidden_layers=4,num_attention_heads=4,"
    "num_key_value_heads=2,max_position_embeddings=64,attention_dropout=0.1",
    "block_size": 32,
    "logging_steps": LOGS_EVERY,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "max_train_samples": 300,
    "save_steps": 3,
    "save_total_limit": 2,
    "eval_strategy": "no",
    "ddp_timeout": 60,
    "resume_from_checkpoint": "auto",
}


class Broken(AssertionError):
    """Something did not survive."""


class Job(Protocol):
    """The job with two stages, as it runs."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def ask(self) -> None:
        """Have it stop, by SIGTERM."""

    def processes(self) -> list[psutil.Process]:
        """All that still are."""

    def ranks(self) -> list[psutil.Process]: ...


Begin = Callable[[list[str], Path], Job]
"""Begins the job with these arguments, and has it add what it prints to a file."""


class Launched:
    """The job under the `deepspeed` command."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
        command += ["--master_port", str(free_port()), "--module", "paceline.launch.finetune", *arguments]
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, **RANK_ENVIRONMENT, MARK: self.mark}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout: float) -> int:
        return self.process.wait(timeout)

    def ask(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def processes(self) -> list[psutil.Process]:
        """Wherever they have gone in the tree."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if any(part.startswith("--local_rank=") for part in process.cmdline()):
                    found.append(process)
        return found


def arguments(output: Path, num_steps: int) -> list[str]:
    flags = {**JOB, "output_dir": output, "max_steps": num_steps}
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def last_step(log: Path, offset: int) -> int:
    """Number of the step whose loss was printed last, 0 before the first."""
    found = re.findall(rb"step (\d+)/\d+: loss ", log.read_bytes()[offset:])
    return int(found[-1]) if found else 0


def wait_until_gone(job: Job, since: float) -> float:
    """Seconds from ``since`` until the job has no process left."""
    while True:
        job.poll()
        left = job.processes()
        took = time.monotonic() - since
        if not left:
            return took
        if took > LIMIT_S:
            names = [(p.pid, p.status(), " ".join(p.cmdline()[:6])) for p in left]
            for one in left:
                one.kill()
            raise Broken(f"{took:.0f} s after the accident there still are {names}")
        time.sleep(0.1)


def accident(how: str, job: Job, output: Path, chance: random.Random) -> None:
    if how == "kill":
        victims = job.ranks()
        if victims:
            with contextlib.suppress(psutil.Error):
                chance.choice(victims).send_signal(signal.SIGKILL)
        else:
            job.ask()
    elif how == "term":
        job.ask()
    else:
        fill(output)


def ballast(output: Path) -> Path:
    return output.parent / "ballast"


def fill(output: Path) -> None:
    """Leave no room on the file system that the job writes to, but for a part of what it has to write."""
    with contextlib.suppress(OSError), ballast(output).open("wb") as file:
        while True:
            file.write(b"\0" * 65536)
            file.flush()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own for the checkpoints, 24 MiB. Needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def weights(output: Path) -> dict[str, bytes]:
    found = {}
    for file in sorted(output.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name).numpy().tobytes() for name in tensors.keys()}  # noqa: SIM118
    return found


def run_to_end(begin: Begin, output: Path, num_steps: int, log: Path) -> None:
    if begin(arguments(output, num_steps), log).wait(timeout=PATIENCE_S) != 0:
        raise Broken(f"the run to the end failed:\n{log.read_text(errors='replace')[-3000:]}")


def survive(
    accidents: Sequence[str], num_steps: int, seed: int, folder: Path, begin: Begin = Launched
) -> dict[str, object]:
    """Have ``accidents`` ("kill", "term", "disk") happen one after the other to a job of ``num_steps`` steps.

    Args:
        begin: called for a run without accidents, for each accident, and for the run from there to the end.

    Raises:
        ValueError: too few steps for so many accidents.
    """
    chance = random.Random(seed)
    apart = num_steps // (len(accidents) + 1)
    if apart <= 2 * LOGS_EVERY:
        raise ValueError(
            f"{num_steps} steps for {len(accidents)} accidents: give {2 * LOGS_EVERY + 1} for each and more."
        )
    run_to_end(begin, folder / "undisturbed", num_steps, folder / "undisturbed.log")
    disk = folder / "disk"
    disk.mkdir()
    took, codes, steps = [], [], []
    log = folder / "disturbed.log"
    log.touch()
    with small_disk(disk) if "disk" in accidents else contextlib.nullcontext():
        output = disk / "output"
        for how in accidents:
            offset = log.stat().st_size
            job = begin(arguments(output, num_steps), log)
            # Mostly while it trains and saves, sometimes while it starts. By steps, not by time: machines differ.
            in_training = how == "disk" or chance.random() < 0.8
            strikes_at = len(took) * apart + chance.randrange(LOGS_EVERY, apart - LOGS_EVERY)
            begun = time.monotonic()
            while in_training and job.poll() is None and last_step(log, offset) < strikes_at:
                if time.monotonic() - begun > PATIENCE_S:
                    raise Broken(
                        f"not at step {strikes_at} in {PATIENCE_S:g} s:\n{log.read_text(errors='replace')[-3000:]}"
                    )
                time.sleep(0.02)
            time.sleep(chance.uniform(0.0, 0.2 if in_training else 10.0))
            if (code := job.poll()) is not None:
                if code != 0:
                    raise Broken(f"ended by itself:\n{log.read_text(errors='replace')[-3000:]}")
                raise Broken(f"{num_steps} steps are too few: done before the accident")
            since = time.monotonic()
            accident(how, job, output, chance)
            took.append(wait_until_gone(job, since))
            codes.append(job.wait(timeout=10))
            ballast(output).unlink(missing_ok=True)
            latest = output / "latest"
            steps.append(int(latest.read_text().rpartition("-")[2]) if latest.exists() else 0)
        run_to_end(begin, output, num_steps, log)
        if weights(output) != weights(folder / "undisturbed"):
            raise Broken("the weights differ from those of the undisturbed run")
    return {
        "accidents": {how: accidents.count(how) for how in sorted(set(accidents))},
        "steps": num_steps,
        "resumed_from": steps,
        "longest_end_s": round(max(took), 1),
        "median_end_s": round(sorted(took)[len(took) // 2], 1),
        "exit_codes": sorted(set(codes)),
        "weights": "bitwise equal",
    }


def record(output: Path, how: str, result: dict[str, object]) -> None:
    """Put ``result`` into the file of results, with what it was measured on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    measured = {
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        "commit": commit.stdout.strip(),
    }
    known = json.loads(output.read_text()) if output.exists() else {}
    output.write_text(json.dumps({**known, how: {**result, **measured}}, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=["kill", "term", "disk"], default="kill")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="survival-"))
    try:
        result = survive([args.how] * args.times, args.steps, args.seed, folder)
    except Broken as broken:
        print(f"{broken}\nlogs: {folder}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    record(args.output, args.how, result)
    if not args.keep:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
