"""One episode: its reference, its hosts, what happens on them, and what is found at the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.soaking import checking
from benchmarks.soaking.disturbing import Slowing, small_disk
from benchmarks.soaking.episodes import BLOCK, LONG, NUM_HOSTS, Episode, Shape, ds_config, undisturbed
from benchmarks.soaking.job import MARK, Broken, inside_namespaces, kill_all, last_step, start_alone, tail
from benchmarks.soaking.run import KEEP, LOGGING_STEPS, Inputs, Run, flags
from lab.hosts import DEVICE, Hosts
from lab.rates import Player, preemption_trace

LIGHTHOUSE_PORT = 29510
TRACE_S = 3 * 3600.0


def run_episode(episode: Episode, inputs: Inputs, folder: Path, patience_s: float, seconds: float) -> dict[str, Any]:
    """What came of it, as JSON has it. Nothing is raised but what ends the whole soak.

    Args:
        folder: for all that it writes; logs stay there when it fails.
        patience_s: without a step, a job hangs.
        seconds: of training, for an episode without an end.
    """
    began = time.monotonic()
    folder.mkdir(parents=True)
    one = _One(episode, inputs, folder, patience_s)
    try:
        one.run(seconds)
    except Broken as broken:
        one.problems.append(str(broken))
    except Exception:
        one.problems.append(f"the soak itself failed:\n{traceback.format_exc()}")
    finally:
        kill_all(one.mark)
        kill_all(one.reference_mark)
    problems = [problem.replace(str(folder), "EPISODE") for problem in one.problems]
    if not problems:
        shutil.rmtree(folder, ignore_errors=True)
    result = {"outcome": "failed" if problems else "passed", "problems": problems, **one.found}
    return {"number": episode.number, "kind": episode.kind, "seconds": round(time.monotonic() - began, 1), **result}


class _One:
    def __init__(self, episode: Episode, inputs: Inputs, folder: Path, patience_s: float) -> None:
        self.episode, self.inputs, self.folder, self.patience_s = episode, inputs, folder, patience_s
        self.mark, self.reference_mark = f"job-{uuid.uuid4().hex}", f"reference-{uuid.uuid4().hex}"
        self.problems: list[str] = []
        self.found: dict[str, Any] = {"draw": episode.to_dict()}
        self.reference = folder / "reference" / "output"
        self.alone: subprocess.Popen[bytes] | None = None

    def run(self, seconds: float) -> None:
        episode = self.episode
        (self.folder / "reference").mkdir()
        with contextlib.ExitStack() as stack:
            if episode.reference == "same":
                self._run_undisturbed()
            else:
                self.alone = self._start_alone()
                stack.callback(kill_all, self.reference_mark)
            place = self.folder / "disk"
            stack.enter_context(small_disk(place) if episode.fills_disk else contextlib.nullcontext())
            place.mkdir(exist_ok=True)
            run = self._disturb(place / "output", seconds)
            self.problems += run.problems
            self.problems += self._problems_left_behind()
            if self.alone is not None:
                self._wait_for_reference(run)
            for output, reference in zip(run.outputs, self._references(), strict=True):
                self.problems += self._problems_of(output, reference)
            if episode.islands > 1:
                self.problems += _problems_of_islands(run.outputs)
            lines = checking.training_lines(run.outputs[0])
            self.found["steps"] = max(lines, default=0)
            self.found["decisions"] = checking.decisions(run.outputs[0])
            self.found["held_out_loss"] = [checking.held_out_loss(output)[1] for output in run.outputs]
            self.found["held_out_loss_of_reference"] = [checking.held_out_loss(one)[1] for one in self._references()]

    # -- the reference ---------------------------------------------------------------------------------------------

    def _references(self) -> list[Path]:
        if self.episode.islands == 1:
            return [self.reference]
        return [self.reference / f"island{number}" for number in range(self.episode.islands)]

    def _start_alone(self) -> subprocess.Popen[bytes]:
        config = self.folder / "reference" / "config.json"
        config.write_text(json.dumps(ds_config(self.episode, Shape(1)), indent=1))
        changes: dict[str, Any] = {"gradient_checkpointing": "false"}
        if self.episode.kind == LONG:
            changes["save_total_limit"] = 10_000
        given = flags(self.episode, Shape(1), self.inputs, config, self.reference, **changes)
        env = {**self.inputs.env, MARK: self.reference_mark}
        return start_alone(given, self._reference_log, env)

    @property
    def _reference_log(self) -> Path:
        return self.folder / "reference" / "host0.log"

    def _wait_for_reference(self, run: Run) -> None:
        assert self.alone is not None
        wanted = checking.last_step_saved(run.output) if self.episode.kind == LONG else None
        before, since = -1, time.monotonic()
        while self.alone.poll() is None:
            step = last_step(self._reference_log)
            if wanted is not None and step >= wanted:
                self.alone.send_signal(signal.SIGTERM)
                self.alone.wait(self.patience_s)
                return
            if step != before:
                before, since = step, time.monotonic()
            if time.monotonic() - since > self.patience_s:
                raise Broken(f"the reference makes no step after {step}:\n{tail(self._reference_log)}")
            time.sleep(0.2)
        if self.alone.returncode:
            raise Broken(f"the reference ended with {self.alone.returncode}:\n{tail(self._reference_log)}")

    def _run_undisturbed(self) -> None:
        with Hosts(NUM_HOSTS) as hosts, self._lighthouse(hosts, self.reference_mark) as light:
            folder = self.folder / "reference"
            args = (self.episode, hosts, self.inputs, folder, self.reference, self.reference_mark, self.patience_s)
            run = Run(*args, lighthouse=light)
            run.to_end([undisturbed(self.episode)])
        self.problems += [f"reference: {problem}" for problem in run.problems]

    # -- what is disturbed -----------------------------------------------------------------------------------------

    def _disturb(self, output: Path, seconds: float) -> Run:
        episode = self.episode
        seed = f"{episode.number} {episode.kind}"
        rates = preemption_trace(NUM_HOSTS, TRACE_S, episode.number, episode.hold_s, episode.rates)
        with Hosts(NUM_HOSTS) as hosts:
            namespaces = {os.stat(f"/proc/{one.pid}/ns/net").st_ino for one in (hosts._switch, *hosts._hosts)}
            with self._lighthouse(hosts, self.mark) as light, Player(hosts, rates) as player:
                args = (episode, hosts, self.inputs, self.folder, output, self.mark, self.patience_s)
                run = Run(*args, lighthouse=light)
                slowing = Slowing(run.jobs, seed, {MARK: self.mark})
                run.quiet = slowing.paused
                try:
                    with slowing if episode.is_slowed else contextlib.nullcontext():
                        run.to_end(episode.shapes, episode.accidents, seconds=seconds)
                finally:
                    self.found |= {"accidents": run.accidents, "memory": run.memory}
                    self.found |= {"rate_changes": player.num_played, "slowed": dict(slowing.counts)}
        deadline = time.monotonic() + 5.0
        while (left := inside_namespaces(namespaces)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            self.problems.append(f"processes {left} hold network namespaces of hosts that are gone")
        return run

    @contextlib.contextmanager
    def _lighthouse(self, hosts: Hosts, mark: str) -> Iterator[str]:
        """Address of it, on the first host; nothing where there are no islands."""
        if self.episode.islands == 1:
            yield ""
            return
        address = f"{hosts.addresses[0]}:{LIGHTHOUSE_PORT}"
        command = [sys.executable, "-m", "paceline.launch.cli", "lighthouse", "--host", hosts.addresses[0]]
        log = self.folder / "lighthouse.log"
        with log.open("a") as file:
            process = hosts.popen(0, [*command, "--port", str(LIGHTHOUSE_PORT)], {MARK: f"{mark}-light"}, file)
        try:
            deadline = time.monotonic() + self.patience_s
            while "lighthouse:" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Broken(f"no lighthouse on {DEVICE}:\n{tail(log)}")
                time.sleep(0.1)
            yield address
        finally:
            log.unlink()
            process.terminate()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self.problems.append("the lighthouse did not end 20 s after SIGTERM")

    def _problems_left_behind(self) -> Iterator[str]:
        for name in ("shm", "tmp"):
            for path in sorted((self.folder / name).glob("host*/*"))[:10]:
                yield f"left behind: {path.relative_to(self.folder)}"

    # -- what came of it -------------------------------------------------------------------------------------------

    def _problems_of(self, output: Path, reference: Path) -> Iterator[str]:
        episode = self.episode
        is_long = episode.kind == LONG
        steps = checking.last_step_saved(output) if is_long else episode.steps
        final = output / f"checkpoint-{steps}"
        if not final.exists():
            yield f"there is no {final.name}"
            return
        shown = steps // LOGGING_STEPS * LOGGING_STEPS if is_long else steps
        yield from checking.problems_of_data(output, shown, LOGGING_STEPS, episode.samples * BLOCK)
        if (found := checking.data_step(final)) != steps:
            yield f"{final.name} has the data after step {found}"
        yield from checking.problems_of_checkpoints(output, KEEP, is_over=True)
        limit = max(checking.training_lines(reference), default=0)
        self.found["reference"] = {"steps": min(limit, shown), "agreement": episode.agreement}
        yield from checking.problems_of_losses(output, reference, episode.agreement, upto=limit)
        if is_long:
            yield from self._problems_of_last_common(output, reference)
            return
        written, wanted = checking.exported(output), checking.exported(reference)
        yield from checking.problems_of_tensors("the exported model", written, wanted, episode.agreement)
        if episode.agreement != "bounded":
            states = (checking.state(final), checking.state(reference / final.name))
            yield from checking.problems_of_tensors(final.name, *states, episode.agreement)

    def _problems_of_last_common(self, output: Path, reference: Path) -> Iterator[str]:
        """Of the last checkpoint that both have; where it was stopped, the reference has none."""
        both = {path.name for path in output.glob("checkpoint-*")} & {p.name for p in reference.glob("checkpoint-*")}
        if not both:
            yield "the reference has none of its checkpoints"
            return
        last = max(both, key=lambda name: int(name.rpartition("-")[2]))
        self.found["reference"]["checkpoint"] = last
        states = (checking.state(output / last), checking.state(reference / last))
        yield from checking.problems_of_tensors(last, *states, self.episode.agreement)


def _problems_of_islands(outputs: list[Path]) -> Iterator[str]:
    """Those of the same last round have the same model."""
    last = [(checking.rounds(output) or [{"round": -1}])[-1] for output in outputs]
    models = [checking.exported(output) for output in outputs]
    for number, (one, model) in enumerate(zip(last, models, strict=True)):
        if one["round"] < 0:
            yield f"island {number} was in no round"
            continue
        for other in one["islands"]:
            if other > number and last[other]["round"] == one["round"] and number in last[other]["islands"]:
                yield from checking.problems_of_tensors(f"islands {number}, {other}", model, models[other], "bitwise")
