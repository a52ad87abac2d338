"""The files that a run leaves in its output directory while it trains: how it began, each report, its end, the page.

All ranks have one and call it alike; the first one writes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

import deepspeed
import torch
import torch.distributed as dist
import transformers

from ..averaging.averager import Averager
from ..comm.control import ControlPlane
from ..comm.staging import ranks_sharing
from ..config import RunPlan
from ..hf.weights import skeleton
from ..measure.clock import Clock
from ..measure.device_memory import peak_bytes
from ..measure.flops import flops_per_token
from ..measure.profile_file import FILE_NAME as PROFILE
from ..optim.sharded import ShardedOptimizer
from ..planning.tuning import DecisionLog
from ..report.metrics import TIMES, MetricsFile, RankTotals, events, summarize, write_whole
from ..report.run_records import LOADS, METRICS, SUMMARY, keep_start, read_summary, write_start
from ..report.running import Running, StepLog
from ..report.tally import Loss, Tally
from ..schedules.schedule import Schedule
from .expert_part import Experts
from .late_losses import Monitor
from .module import CausalLMPipeline
from .rounding_errors import RoundingErrors
from .startup import dtype_of

logger = logging.getLogger("paceline")


class TrainingEngine(Protocol):
    """The engine of a training, as far as its records tell of it."""

    module: CausalLMPipeline
    decisions: DecisionLog
    schedule: Schedule
    cut: int
    """Samples of a micro-batch."""
    clock: Clock
    device: torch.device | str
    stage_id: int
    dp_world_size: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    optimizer: ShardedOptimizer
    monitor: Monitor
    averager: Averager | None
    experts: Experts
    rounding_errors: RoundingErrors | None

    def grad_norm(self) -> float | None: ...

    def fp16_enabled(self) -> bool: ...

    def natural_gradient_report(self) -> dict[str, float] | None: ...

    def keep_records(self, run_dir: Path, num_steps: int) -> None: ...


class RunLog:
    """Records of one training of a Hugging Face model's pipeline.

    Args:
        run_dir: output directory of the run.
        plan: of the run.
        control: of all ranks.
        facts: more, or other, of what is written down when training begins.
        listeners: called with each record that the metrics file gets from :meth:`tell`; on the first rank.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        run_dir: Path,
        plan: RunPlan,
        control: ControlPlane,
        facts: Mapping[str, object] | None = None,
        listeners: Sequence[Callable[[Mapping[str, object]], None]] = (),
    ) -> None:
        self._more, self._listeners = dict(facts or {}), listeners
        self.engine, self.pipeline, self.run_dir = engine, engine.module, run_dir
        self.plan, self.control = plan, control
        self.is_first = dist.get_rank() == 0
        self.tally, self.step_log = Tally(), StepLog()
        self.evaluation: dict[str, float] | None = None
        """The last figures, by their keys."""
        self._started: dict[str, object] | None = None
        self.train_loss = math.nan
        """The loss that was reported last."""
        self.times = dict.fromkeys(TIMES, 0.0)
        self.metrics = MetricsFile(run_dir / METRICS if self.is_first and plan.report.metrics else None)

    def begin(self, num_steps: int) -> None:
        """Training begins, or goes on after the engine's last step: what an earlier run wrote of later ones goes.

        Args:
            num_steps: of the whole run.

        Raises:
            ValueError: the directory cannot be written to; on all ranks.
        """
        engine, report = self.engine, self.plan.report
        self.first_step, self.first_tokens = engine.global_steps, self.tally.all_tokens
        self._skipped_before, self._num_skipped = engine.skipped_steps, 0  # in all; up to the last step, in a row
        self.totals = RankTotals(dist.get_rank(), engine.stage_id, *self._stage())
        self._kept = read_summary(self.run_dir) if self.is_first and self.first_step >= num_steps else None
        with self.control.together("writing the profile"):
            if self.is_first:
                self.run_dir.mkdir(parents=True, exist_ok=True)
            if self.is_first and self.pipeline.profile is not None:
                self.pipeline.profile.save(self.run_dir / PROFILE)
            if self.is_first and (report.metrics or report.html) and self._kept is None:
                self._started = write_start(self.run_dir, self._start(num_steps))
        engine.keep_records(self.run_dir, num_steps)
        self.skip_time()

    def add_step(self, step: int, seconds: float, loss: Loss, tokens: int) -> Running:
        """Count step number ``step``, which took so long.

        Returns:
            How it ran, as far as this rank knows: what was decided, the first one does.
        """
        self.tally.add(loss, tokens)
        engine = self.engine
        self._num_skipped = self._num_skipped + 1 if engine.skipped_steps > self._skipped_before else 0
        self._skipped_before = engine.skipped_steps
        running = Running(engine.schedule.name, engine.cut, tuple(self.pipeline.parts), engine.decisions.num_moves)
        self.step_log.add(step, running, seconds)
        return running

    # -- time ----------------------------------------------------------------------------------------------------

    def take_time(self) -> None:
        """Book the time since the clock was last read as training's."""
        for name, seconds in self.engine.clock.read().items():
            self.times[name] += seconds

    def skip_time(self) -> None:
        """Forget the time since the clock was last read: what was done is not training."""
        self.engine.clock.read()

    # -- reports -------------------------------------------------------------------------------------------------

    def report(
        self,
        step: int,
        epoch: float | None,
        learning_rate: float | None,
        loss: float | None = None,
        grad_norm: float | None = None,
    ) -> dict[str, object]:
        """Write a line of ``metrics.jsonl``, after those of what was decided since the last one. Collective.

        Args:
            learning_rate: that the last step was taken with.
            loss: None: the mean of the steps since the last report, with the engine's ``grad_norm``.

        Returns:
            The line: these, rates, and where the time went.
        """
        self.take_time()
        counted = self.tally.report()
        if loss is None:
            loss, grad_norm = counted.loss, self.engine.grad_norm()
        self.train_loss = loss
        self.tell_decisions()
        self.tell_averaging(step)
        times, self.times = self.times, dict.fromkeys(TIMES, 0.0)
        self.totals.add(times)
        engine = self.engine
        line = {
            "step": step,
            "epoch": epoch,
            "loss": self.train_loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "tokens": self.tally.tokens,
            "tokens_per_s": counted.tokens / times["wall_s"],
            "step_s": times["wall_s"] / max(counted.steps, 1),
            "skipped_steps": engine.skipped_steps,
            **({"loss_scale": engine.optimizer.loss_scale} if engine.fp16_enabled() else {}),
            **self._natural_gradient(),
            **self._rate_factor(),
            **self._rounding(),
            "rank0": {name: times[name] for name in ("compute_s", "communication_s", "idle_s", "other_s")},
            "ran": self.step_log.take(),
        }
        self.tell(line)
        if self._started is not None:
            keep_start(self.run_dir, self._started)
        return line

    def tell_evaluation(self, where: Mapping[str, object], figures: Mapping[str, float]) -> None:
        """Write the figures of an evaluation, after ``where``: its step, and what goes with that."""
        self.evaluation = {**(self.evaluation or {}), **figures}  # other data sets have other keys
        self.tell({**where, **figures})

    def tell(self, record: Mapping[str, object]) -> None:
        """Write ``record`` to the metrics file, to listeners and, by samples as they count, to DeepSpeed's monitors."""
        self.metrics.write(record)
        if self.is_first:
            for listener in self._listeners:
                listener(record)
        if self.is_first and self.engine.monitor.enabled:
            self.engine.monitor.write_events(events(record, self.engine.global_samples))

    def tell_tokens(self, step: int) -> None:
        """Write how many tokens there were up to ``step``, for a run that goes on from it (:func:`tokens_so_far`)."""
        self.metrics.write({"step": step, "tokens": self.tally.all_tokens})

    def tell_decisions(self) -> None:
        """Write what was decided since the last time, with its numbers."""
        if not self.is_first:
            return
        for decision in self.engine.decisions.take_decisions():
            self.metrics.write({"step": decision["step"], "decision": decision})
        for measured in self.engine.decisions.take_measurements():
            self.metrics.write({"step": measured["step"], "look": measured})

    def tell_averaging(self, step: int) -> None:
        """Write the exchanges with other islands since the last time, up to ``step``."""
        averager = self.engine.averager
        if averager is not None and self.is_first:
            for exchange in averager.take_exchanges():
                at = min(step, exchange.pop("step"))  # one beside training may be due later
                self.metrics.write({"step": at, "averaging": exchange})

    def leave(self, step: int) -> None:
        """Training is left after ``step``: book and write what has not been told yet."""
        self.take_time()
        self.totals.add(self.times)
        self.times = dict.fromkeys(TIMES, 0.0)
        self.tell_decisions()
        self.tell_averaging(step)
        if self.is_first and (ran := self.step_log.take()):
            self.metrics.write({"step": step, "ran": ran})
        self.metrics.close()

    def _natural_gradient(self) -> dict[str, object]:
        """Figures of natural gradients and max change, of all stages and replicas; none where they are off.

        Collective.
        """
        told: dict[str, object] = {}
        if self.engine.optimizer.max_change is not None:
            told["max_change"] = self.engine.optimizer.max_change_report
        own = self.engine.natural_gradient_report()
        if own is None:
            return told
        counts = torch.tensor([own["layers"], own["updates"], own["updates"] * own["at_floor"]], dtype=torch.float64)
        layers, updates, at_floor = self.control.sum(counts).tolist()
        told["natural_gradient"] = {
            "layers": round(layers / self.engine.dp_world_size),
            "updates": int(updates),
            "at_floor": at_floor / max(updates, 1),
        }
        return told

    def _rounding(self) -> dict[str, object]:
        """What formats of boundaries round away; none where nothing is rounded. Collective."""
        errors = self.engine.rounding_errors
        if errors is None:
            return {}
        found = errors.report(self.control)
        if self.is_first:
            errors.warn_of_growth(found)
        return {"boundary_error": found}

    def _rate_factor(self) -> dict[str, float]:
        """Factor of the scheduled learning rate, where islands average and there is one."""
        factor = 1.0 if self.engine.averager is None else self.engine.averager.learning_rate_factor
        return {} if factor == 1.0 else {"learning_rate_factor": factor}

    # -- the end -------------------------------------------------------------------------------------------------

    def summary(self, steps: int, sequence_length: int, train_loss: float | None = None) -> dict[str, object] | None:
        """Write ``summary.json``, if that is possible, and return it on the first rank. Collective.

        A run that was done when it was started again keeps what it has.

        Args:
            steps: of the whole run, also those before it was gone on with.
            sequence_length: tokens of a sample.
            train_loss: None: that of the last report.
        """
        self.totals.holds, self.totals.parameters = self._stage()  # layers may have moved
        self.totals.peak_memory_bytes = peak_bytes(torch.device(self.engine.device))
        ranks = self.control.gather(self.totals)
        with self.control.together("writing the summary"):
            if not self.is_first:
                return None
            self.metrics.close()
            if self._kept is not None:
                return self._kept
            summary = summarize(
                ranks,
                steps=steps,
                first_step=self.first_step,
                tokens=self.tally.all_tokens,
                first_tokens=self.first_tokens,
                flops_per_token=flops_per_token(
                    skeleton(self.pipeline.config),
                    self.pipeline.anatomy.num_layers,
                    sequence_length,
                    is_frozen=self.pipeline.adapters is not None,
                ),
                train_loss=self.train_loss if train_loss is None else train_loss,
                evaluation=self.evaluation,
                facts=self._facts(),
            )
            try:
                write_whole(self.run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
            except OSError as error:  # the model matters more: a script writes it after this
                logger.warning("%s is not written: %s", self.run_dir / SUMMARY, error.strerror)
            return summary

    def warn_of_the_end(self) -> None:
        """Warn of a run that did not train to its end, or spoilt its model. On the first rank, after the summary."""
        faults = []
        if self._num_skipped > 1:
            faults.append(f"the last {self._num_skipped} steps were skipped, as their gradients were not finite")
        held_out = (self.evaluation or {}).get("eval_loss")
        if held_out is not None and not math.isfinite(held_out):
            faults.append(f"the held-out loss is {held_out}")
        if faults and self._kept is None:
            remedy = "go on from an earlier checkpoint, or begin anew, with a lower learning rate or clipped gradients"
            logger.warning("this run ended badly: %s; %s", " and ".join(faults), remedy)

    def write_page(self) -> None:
        """Write ``report.html`` and ``report.json``, unless they are off. On the first rank, after the summary."""
        if not self.plan.report.html:
            return
        try:
            from ..report.run_report import write

            page, _ = write(self.run_dir)
        except Exception as error:  # the model is written; `paceline report` can try again
            logger.warning("no report: %s: %s", type(error).__name__, error)
        else:
            logger.info("report written to %s", page)

    # -- what is told of the run itself --------------------------------------------------------------------------

    def _stage(self) -> tuple[str, int]:
        """Contents of this rank's stages, in words, and how many parameters those are."""
        lines = self.pipeline.describe()
        where = " + ".join(lines[stage].partition(": ")[2] for stage in self.pipeline.held)
        empty = sum(layer.num_empty for layer in self.pipeline.expert_layers.values())
        return where, sum(p.numel() for p in self.pipeline.parameters()) - empty

    def _start(self, num_steps: int) -> dict[str, object]:
        """Facts known when training begins, for the report of a run that does not come to its end."""
        loads: str | Path | None = None  # this rank's stage may have no experts
        if self.engine.experts.follow_load and self.plan.moe is not None:
            loads = self.plan.moe.loads_file or self.run_dir / LOADS
        return {
            **self._facts(),
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "planned_steps": num_steps,
            "first_step": self.first_step,
            "first_tokens": self.first_tokens,
            "island": None,
            "expert_loads": None if loads is None else os.path.relpath(loads, self.run_dir),
            "paceline": self.plan.section.model_dump(mode="json", exclude_defaults=True),
            **self._more,
        }

    def _facts(self) -> dict[str, object]:
        device = torch.device(self.engine.device)
        hardware = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
        )
        count = dist.get_world_size() // (ranks_sharing(device) if device.type == "cuda" else 1)
        num_slices = dist.get_world_size() // (self.plan.stages * self.plan.data_parallel)
        return {
            "model_type": self.pipeline.config.model_type,
            "parameters": self.pipeline.total_parameters,
            "stages": self.plan.stages,
            "data_parallel": self.plan.data_parallel,
            **({"tensor_parallel": num_slices} if num_slices > 1 else {}),
            "boundaries": self.pipeline.parts,
            "micro_batches": self.plan.micro_batches,
            "micro_batch_size": self.plan.micro_batch_size,
            "schedule": self.engine.schedule.name,
            "dtype": str(dtype_of(self.plan.ds_config)).removeprefix("torch."),
            "hardware": f"{count} x {hardware} ({os.cpu_count()} cores)",
            "versions": {
                "torch": torch.__version__,
                "deepspeed": deepspeed.__version__,
                "transformers": transformers.__version__,
            },
        }
