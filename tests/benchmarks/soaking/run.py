"""The jobs of an episode from their first start to their end, with all accidents between."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soaking.checking import first_step, last_step_saved, problems_of_checkpoints, problems_of_saving
from benchmarks.soaking.disturbing import cause
from benchmarks.soaking.episodes import BLOCK, LONG, NUM_HOSTS, Accident, Episode, Shape, ds_config, overrides
from benchmarks.soaking.job import MARK, Broken, Job, kill_all, processes, show_stacks
from benchmarks.soaking.watching import Watcher
from lab.hosts import Hosts

LOGGING_STEPS = 5
KEEP = 2
WITHOUT_END = 1_000_000
"""Steps of the long episode: it is stopped."""

END_LIMIT_S = 120.0
"""From an accident to the end of all processes of the job."""

DDP_TIMEOUT_S = 120

START_LIMIT_S = END_LIMIT_S + DDP_TIMEOUT_S
"""The same while it starts: those who wait for a rank that never comes to meet them cannot know why."""

DISK_LIMIT_S = 400.0
"""A full disk is found at the next save."""

_PORTS = iter(range(20001, 30000))


@dataclass(frozen=True)
class Inputs:
    """What all episodes train on, and where they keep what has been tokenized."""

    train: Path
    held_out: Path
    tokenizer: Path
    home: Path

    @property
    def env(self) -> dict[str, str]:
        return {
            "HF_HOME": str(self.home),
            "HF_DATASETS_OFFLINE": "1",
            "TORCH_EXTENSIONS_DIR": str(self.home / "torch_extensions"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.home / "torchinductor"),
        }


def flags(episode: Episode, shape: Shape, inputs: Inputs, config: Path, output: Path, **changes: Any) -> list[str]:
    """Of ``paceline.launch.finetune``, for this shape of the job."""
    is_long = episode.kind == LONG
    values = {
        "model_type": episode.family,
        "tokenizer_name": inputs.tokenizer,
        "config_overrides": overrides(episode),
        "train_file": inputs.train,
        "validation_file": inputs.held_out,
        "block_size": BLOCK,
        "max_eval_samples": 32,
        "per_device_train_batch_size": episode.batch,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": episode.samples // (episode.batch * shape.replicas),
        "learning_rate": episode.learning_rate,
        "lr_scheduler_type": "constant" if is_long else "linear",
        "max_grad_norm": episode.max_grad_norm,
        "max_steps": WITHOUT_END if is_long else episode.steps,
        "logging_steps": LOGGING_STEPS,
        "save_steps": episode.save_steps,
        "save_total_limit": KEEP,
        "eval_strategy": "steps",
        "eval_steps": 250 if is_long else 50,
        "ddp_timeout": DDP_TIMEOUT_S,
        "seed": episode.number,
        "resume_from_checkpoint": "auto",
        "gradient_checkpointing": str(episode.gradient_checkpointing).lower(),
        "streaming": str(episode.streaming).lower(),
        "deepspeed": config,
        "output_dir": output,
        **changes,
    }
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


@dataclass
class _World:
    """A job that is started again after each of its accidents; with islands there are several."""

    number: int
    places: list[int]
    output: Path
    shapes: list[Shape]
    accidents: list[Accident]
    job: Job
    watcher: Watcher | None = None
    starts: int = 1
    is_over: bool = False
    due: float | None = None
    """When the next accident happens."""
    goes_on_from: int | None = None
    """What the last accident has left; None: the job has been seen to go on from there."""
    progress: tuple[int, float] = field(default_factory=lambda: (0, time.monotonic()))
    """The last step, and when it was first seen."""


class Run:
    """The jobs of an episode on ``hosts``.

    Args:
        mark: that all their processes carry.
        patience_s: without a step, a job hangs.
        quiet: held while an accident happens.
    """

    def __init__(
        self,
        episode: Episode,
        hosts: Hosts,
        inputs: Inputs,
        folder: Path,
        output: Path,
        mark: str,
        patience_s: float,
        lighthouse: str = "",
        quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.episode, self.hosts, self.inputs, self.folder, self.output = episode, hosts, inputs, folder, output
        self.mark, self.patience_s, self.lighthouse, self.quiet = mark, patience_s, lighthouse, quiet
        self.accidents: list[dict[str, Any]] = []
        self.memory: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.worlds: list[_World] = []

    @property
    def outputs(self) -> list[Path]:
        if self.episode.islands == 1:
            return [self.output]
        return [self.output / f"island{number}" for number in range(self.episode.islands)]

    def jobs(self) -> list[Job]:
        """Those that run."""
        return [world.job for world in self.worlds if not world.is_over]

    def to_end(self, shapes: Sequence[Shape], accidents: Sequence[Accident] = (), *, seconds: float = 0.0) -> None:
        """Until all jobs are done; or, where the episode has no end, for ``seconds`` of training.

        Raises:
            Broken: a job fails, hangs, or does not end after an accident.
        """
        self._start_all(list(shapes), list(accidents))
        try:
            began = None
            while not all(world.is_over for world in self.worlds):
                time.sleep(0.2)
                for world in self.worlds:
                    if not world.is_over:
                        self._look_after(world)
                if self.episode.kind == LONG:
                    if began is None and self.worlds[0].job.step():
                        began = time.monotonic()
                    if began is not None and time.monotonic() - began >= seconds:
                        self._stop(self.worlds[0])
            self._check_nothing_runs()
        finally:
            for world in self.worlds:
                self._end_watch(world)
            kill_all(self.mark)

    # -- starts ----------------------------------------------------------------------------------------------------

    def _start_all(self, shapes: list[Shape], accidents: list[Accident]) -> None:
        islands = self.episode.islands
        for number in range(islands):
            each = NUM_HOSTS // islands
            places = list(range(number * each, (number + 1) * each))
            own = [(a, s) for a, s in zip(accidents, shapes[1:], strict=True) if a.victim % islands == number]
            own_shapes = [shapes[0], *(shape for _, shape in own)]
            job = self._start(number, places, shapes[0], 0)
            self.worlds.append(_World(number, places, self.outputs[number], own_shapes, [a for a, _ in own], job))

    def _start(self, number: int, places: list[int], shape: Shape, starts: int) -> Job:
        config = self.folder / f"config{number}-{starts}.json"
        config.write_text(json.dumps(ds_config(self.episode, shape, self.lighthouse), indent=1))
        changes = {"island": number} if self.episode.islands > 1 else {}
        given = flags(self.episode, shape, self.inputs, config, self.output, **changes)
        env = {**self.inputs.env, MARK: f"{self.mark}.{number}.{starts}."}
        return Job(self.hosts, places[: shape.num_ranks], given, next(_PORTS), self.folder, env)

    # -- while they run --------------------------------------------------------------------------------------------

    def _look_after(self, world: _World) -> None:
        job, step, now = world.job, world.job.step(), time.monotonic()
        self._begin_watch(world)
        if step and world.goes_on_from is not None:
            if (found := first_step(world.output)) != world.goes_on_from:
                self.problems.append(f"step {world.goes_on_from} was saved, and the next start went on from {found}")
            world.goes_on_from = None
        if job.has_ended():
            self._end_watch(world)
            if any(job.codes()):
                raise Broken(f"it ended by itself with {job.codes()} after step {step}:\n{job.output()}")
            world.is_over = True
            if world.accidents:
                self.accidents += [{"how": accident.how, "at_step": "too late"} for accident in world.accidents]
            return
        if self.episode.kind != LONG and step >= self.episode.steps:
            self._end_watch(world)  # what the export takes is no leak
        if step != world.progress[0]:
            world.progress = step, now
        elif now - world.progress[1] > self.patience_s:
            show_stacks(f"{self.mark}.{world.number}.")
            raise Broken(f"no step in {self.patience_s:.0f} s after step {step}:\n{job.output(16000)}")
        if world.accidents:
            self._see_to_accident(world, step, now)

    def _see_to_accident(self, world: _World, step: int, now: float) -> None:
        accident = world.accidents[0]
        if world.due is None:
            if accident.after_step == 0:
                world.due = world.job.began + accident.delay_s
            elif step >= accident.after_step:
                world.due = now + accident.delay_s
        if world.due is None or now < world.due:
            return
        world.due = None
        world.accidents.pop(0)
        ballast = self.output.parent / "ballast"
        self._end_watch(world)
        # Ranks are numbered within the job, hosts within the lab.
        victim = accident.victim // self.episode.islands
        with self.quiet():
            cause(accident.how, world.job, victim, ballast)
        limit_s = END_LIMIT_S if step else START_LIMIT_S
        took = self._wait_until_gone(world, now, DISK_LIMIT_S if accident.how == "full disk" else limit_s)
        ballast.unlink(missing_ok=True)
        codes = world.job.codes()
        told: dict[str, Any] = {"how": accident.how, "island": world.number}
        told["victim"] = victim % len(world.job.places)
        resumes_from = last_step_saved(world.output)
        told |= {"at_step": step, "ended_s": round(took, 1), "codes": codes, "saved": resumes_from}
        self.accidents.append(told)
        self.problems += problems_of_checkpoints(world.output, KEEP, is_over=False)
        self.problems += problems_of_saving(accident.how, step, resumes_from, self.episode.save_steps, took)
        if not any(codes):
            self.problems.append(f"after {accident.how} at step {step} the job went on to its end")
            world.is_over = True
            return
        world.goes_on_from = resumes_from
        shape = world.shapes[world.starts]
        world.job = self._start(world.number, world.places, shape, world.starts)
        world.watcher = None
        world.starts += 1
        world.progress = (0, time.monotonic())

    def _wait_until_gone(self, world: _World, since: float, limit_s: float) -> float:
        mark = f"{self.mark}.{world.number}."
        while True:
            world.job.codes()  # reaps them
            took = time.monotonic() - since
            left = processes(mark)
            if not left and world.job.has_ended():
                return took
            if took > limit_s:
                names = [_name(process) for process in left]
                show_stacks(mark)
                raise Broken(f"{took:.0f} s after the accident there still are {names}:\n{world.job.output(16000)}")
            for other in self.worlds:
                if other is not world and not other.is_over:
                    self._begin_watch(other)
            time.sleep(0.1)

    def _stop(self, world: _World) -> None:
        """The end of a run that has none: as a cluster would."""
        self._end_watch(world)
        since, step = time.monotonic(), world.job.step()
        with self.quiet():
            cause("stop launcher", world.job, 0, self.output)
        took = self._wait_until_gone(world, since, END_LIMIT_S)
        told = {"how": "stop launcher", "at_step": step, "ended_s": round(took, 1), "codes": world.job.codes()}
        saved = last_step_saved(world.output)
        self.accidents.append({**told, "saved": saved})
        self.problems += problems_of_saving("stop launcher", step, saved, self.episode.save_steps, took)
        world.is_over = True

    def _begin_watch(self, world: _World) -> None:
        """Once it trains: what is imported and built before that is no leak."""
        if world.watcher is None and world.job.step():
            world.watcher = Watcher(world.job.watched())
            world.watcher.__enter__()

    def _end_watch(self, world: _World) -> None:
        watcher, world.watcher = world.watcher, _DONE if world.watcher is not None else None
        if watcher is not None and watcher is not _DONE:
            watcher.__exit__(None, None, None)
            found = watcher.findings()
            self.problems += found.pop("problems")
            if found["processes"]:
                self.memory.append({"island": world.number, "start": world.starts, **found["processes"]})

    def _check_nothing_runs(self) -> None:
        deadline = time.monotonic() + 20.0
        while (left := processes(self.mark + ".")) and time.monotonic() < deadline:
            time.sleep(0.2)
        if left:
            raise Broken(f"all jobs are done, and there still are {[_name(process) for process in left]}")


_DONE = Watcher({})
"""In place of a watcher that has ended."""


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return f"{process.pid} {process.status()} {' '.join(map(os.path.basename, process.cmdline()[:5]))}"
    return str(process.pid)
