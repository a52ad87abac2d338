"""The Trainer of the main job: steps over its exact data, and its own reports, evaluations and checkpoints.

The loop is Trainer's. A batch of its data loader stands for a whole step, whose micro-batches the engine takes from
:class:`~paceline.data.batch_plan.TrainingBatches` where they are read, also one step ahead.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback

from paceline.checkpoint.format import MODEL
from paceline.comm.control import is_shared
from paceline.config import RunPlan
from paceline.data.batch_plan import BatchPlan, evaluation_batches
from paceline.data.datasets import Data
from paceline.hf.arguments import TrainArguments
from paceline.hf.quiet_transformers import quiet
from paceline.launch.completion import complete
from paceline.launch.earlier_runs import goes_on_in, remove_earlier_run
from paceline.launch.intervals import Intervals
from paceline.launch.trackers import Trackers
from paceline.report.progress import Progress
from paceline.runtime.module import CausalLMPipeline
from paceline.runtime.run_log import RunLog
from paceline.runtime.trainer import PacelineTrainer
from paceline.supervise.lifetime import Preempted, current
from paceline.supervise.watch import WATCH

logger = logging.getLogger("paceline")

SHOWN = (
    ("loss", "loss"), ("grad norm", "grad_norm"), ("s/step", "step_s"), ("tokens/s", "tokens_per_s"),
    ("lr", "learning_rate"),
)  # fmt: skip
"""Numbers on the terminal, and their keys in ``metrics.jsonl``."""


@dataclass(frozen=True)
class Run:
    """A run: its data, how it trains on them, and where it leaves its files.

    Args:
        resolved: what JSON and flags come to.
        plan: of this rank's pipeline.
        resume_path: checkpoint to go on from.
        facts: more for the report.
        trackers: begins the trackers of ``--report_to``; called on the first rank.
    """

    args: TrainArguments
    output: Path
    resolved: RunPlan
    data: Data
    plan: BatchPlan
    tokenizer: PreTrainedTokenizerBase
    num_steps: int
    resume_path: Path | None
    facts: Mapping[str, Any]
    trackers: Callable[[], Trackers] | None


class JobTrainer(PacelineTrainer):
    """Trains ``pipeline`` as ``run`` says; :meth:`train` is collective."""

    pipeline: CausalLMPipeline
    run_log: RunLog
    _rate: float
    _globalstep_last_logged: int

    def __init__(self, pipeline: CausalLMPipeline, run: Run) -> None:
        with _kept(pipeline.config), quiet():
            super().__init__(model=pipeline, args=training_arguments(run), eval_dataset=run.data.held_out)
        for callback in (DefaultFlowCallback, PrinterCallback):
            self.remove_callback(callback)
        self.run = run
        self.intervals = Intervals(run.args, run.num_steps, run.plan.steps_per_epoch)
        self.batches = run.data.training_batches(run.plan)
        self.trackers: Trackers | None = None
        # The pipeline is built already, for the data's length and with adapters of the flags.
        self.pipeline = self._built_of = pipeline
        self._resolved = run.resolved
        self.trains_adapters = pipeline.adapters is not None  # checkpoints leave out the frozen weights

    # -- hooks of Trainer, in the order of their calls -----------------------------------------------------------

    def train(self) -> None:
        """Train; the job has claimed the output directory before.

        Raises:
            Preempted: some rank was asked to stop; all have saved.
        """
        try:
            Trainer.train(self)
        except Exception as error:
            if is_shared(error) and self._engine is not None:  # all ranks are here: let what is being written be there
                with suppress(Exception):
                    self._engine.finish_checkpoint()
            raise

    def get_train_dataloader(self) -> Iterator[dict[str, Any]]:
        return itertools.repeat({})

    def _prepare_for_training(self, *args: Any) -> Any:
        with WATCH.pause("loading the model"):
            prepared = super()._prepare_for_training(*args)
        run, log = self.run, self.run_log
        with self.pipeline.control.together("starting the trackers"):
            self.trackers = run.trackers() if log.is_first and run.trackers is not None else None
        bar = not run.args.disable_tqdm
        self.progress = Progress(run.num_steps, shown=log.is_first, bar=bar, first_step=log.first_step)
        if log.first_step == 0 and run.args.eval_strategy != "no":
            self._evaluate_held_out(0)
        log.skip_time()
        current().expect_boundaries()
        return prepared

    def _make_log(self, engine: Any) -> RunLog:
        run, control = self.run, self.pipeline.control
        return RunLog(engine, run.output, run.resolved, control, run.facts, [self._track])

    def _begin_log(self, num_steps: int, resume_from_checkpoint: str | None) -> None:
        self.run_log.begin(num_steps)  # the checkpoint knows the tokens before it

    def _parameter_groups(self, pipeline: CausalLMPipeline, ds_config: Mapping[str, Any]) -> list[Any]:
        """Trainer's; without weight decay all parameters are of one group."""
        groups: list[Any] = super()._parameter_groups(pipeline, ds_config)
        if groups[0]["weight_decay"]:
            return groups
        every = dict.fromkeys(p for model in pipeline.models for p in model.parameters() if p.requires_grad)
        return [{"params": list(every), "weight_decay": 0.0}]  # or torch's AdamW has its own default, 0.01

    def _load_state(self, engine: Any, resume_from_checkpoint: str | None) -> None:
        run, path = self.run, self.run.resume_path
        self.batches.shares = lambda: engine.replica_micro_batches
        if not goes_on_in(run.output, path):
            with self.pipeline.control.together(f"clearing {run.output}"):
                if engine.global_rank == 0 and run.args.overwrite_output_dir:
                    remove_earlier_run(run.output)
        if path is None:
            return
        found, state = engine.load_checkpoint(path.parent, tag=path.name)
        job = state["paceline"]
        with self.pipeline.control.together(f"going on from {found}"):
            if engine.reads_data:
                self.batches.load_state_dict(job["data"])
            if engine.global_steps > run.num_steps:
                raise ValueError(
                    f"{found} is of step {engine.global_steps}, and {run.num_steps} steps are asked for: nothing is "
                    "left to train; raise --max_steps or --num_train_epochs, or go on from another checkpoint."
                )
        self.state.global_step = engine.global_steps
        self.run_log.tally.load_state_dict(job)
        if engine.global_rank == 0:
            logger.info("going on from %s, after step %d", found, engine.global_steps)

    def _run_epoch(self, **kwargs: Any) -> None:
        """All steps; none where the checkpoint is of the last one, in which an island may have waited for others."""
        if self.run_log.first_step < self.run.num_steps:
            super()._run_epoch(**kwargs)
        else:
            self._finish_averaging()
            self._evaluate_held_out(self.run.num_steps)
            self.control.should_training_stop = True

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        engine, begun = self._engine, time.perf_counter()
        self._rate = engine.get_lr()[0]  # that this step is taken with
        loss = engine.train_batch(self.batches if engine.reads_data else None)
        step, seconds = self.state.global_step + 1, time.perf_counter() - begun
        self.progress.step(self.run_log.add_step(step, seconds, loss, engine.step_tokens))
        return torch.zeros((), device=self.args.device)  # the loss is asked for when it is reported

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Report, save, complete a line and evaluate, in this order: a checkpoint holds what is not reported yet."""
        step, run, engine = self.state.global_step, self.run, self._engine
        if step == self._globalstep_last_logged:
            return  # Trainer calls it again where its epoch ends
        self._globalstep_last_logged = step
        is_last = step >= run.num_steps
        if is_last:
            self._finish_averaging()
        if self.intervals.reports_at(step):
            self._report(step)
        if step == self.run_log.first_step + 1 and run.args.save_strategy != "no":
            engine.prepare_checkpoint(exclude_frozen_parameters=self.trains_adapters)
        self._stop_if_asked(step)
        if self.intervals.saves_at(step):
            self._save_step(step)
        if self.intervals.completes_at(step):
            self._complete_line(step)
        if self.intervals.evaluates_at(step):
            self._evaluate_held_out(step)
            self._stop_if_asked(step)
        self.control.should_training_stop = is_last

    def _finalize_training(self, *args: Any) -> None:
        self._engine.finish_checkpoint()
        self._close()
        self.is_in_train = False

    def _finish_averaging(self) -> None:
        current().finishing()  # the export is next; no signal is to cut it off
        self._engine.finish_averaging(self._held_out_loss)

    # -- what happens between steps ------------------------------------------------------------------------------

    def _report(self, step: int) -> None:
        line = self.run_log.report(step, self.intervals.epoch_at(step), self._rate)
        self.progress.report(step, {name: line[key] for name, key in SHOWN})

    def _track(self, record: Mapping[str, Any]) -> None:
        if self.trackers is not None:
            self.trackers.log(record)

    def _save_step(self, step: int) -> None:
        """Begin to save; training goes on meanwhile."""
        run, engine = self.run, self._engine
        job = self.run_log.tally.state_dict() | {"planned": run.resolved.planned}
        if engine.reads_data:
            job["data"] = engine.data_state(self.batches)
        engine.save_checkpoint(
            run.output,
            tag=f"checkpoint-{step}",
            client_state={"paceline": job},
            exclude_frozen_parameters=self.trains_adapters,
            wait=False,
            keep=run.args.save_total_limit,
            files=lambda draft: run.tokenizer.save_pretrained(draft / MODEL),
        )

    def _stop_if_asked(self, step: int) -> None:
        """Some rank was asked to stop, and all of them know: save together and leave."""
        if not self._engine.is_stopping or step >= self.run.num_steps:
            return
        reasons = self.pipeline.control.gather(current().reason if current().requested else None)
        current().reached()
        path = None
        if self.run.args.save_strategy != "no":
            with WATCH.pause("saving the checkpoint"):
                self._save_step(step)
                self._engine.finish_checkpoint()
            path = self.run.output / f"checkpoint-{step}"
        self.run_log.leave(step)
        self._close()
        raise Preempted(step, path, next(reason for reason in reasons if reason))

    def _close(self) -> None:
        self.progress.close()
        if self.trackers is not None:
            self.trackers.close()

    def _complete_line(self, step: int) -> None:
        prompt = self.run.args.sample_prompt
        assert prompt, "parse() has seen to it"
        self.run_log.take_time()
        with WATCH.pause("completing a line"):
            text = complete(self._engine, self.run.tokenizer, prompt)
        self.run_log.skip_time()  # it is not training
        self.progress.say(f"[paceline] step {step}: {prompt!r} continues as {text!r}")
        self.run_log.metrics.write({"step": step, "sample": {"prompt": prompt, "completion": text}})

    def _evaluate_held_out(self, step: int) -> None:
        if self.run.data.held_out is None:
            return
        if step > 0:
            self.run_log.take_time()
        with WATCH.pause("evaluating"):
            found = self._engine.evaluate(self._evaluation_batches())
        self.run_log.skip_time()  # evaluating is not training
        if self._engine.is_stopping:
            return  # it was cut short
        self.progress.say(
            f"[paceline] step {step}: held-out loss {found['eval_loss']:.4f}, perplexity {found['perplexity']:.2f}"
        )
        self.run_log.tell_evaluation({"step": step}, found)

    def _evaluation_batches(self) -> Any:
        run = self.run
        assert run.data.held_out is not None
        size, plan = run.args.per_device_eval_batch_size, run.plan
        return evaluation_batches(run.data.held_out, size, plan.data_parallel_rank, plan.data_parallel_size)

    def _held_out_loss(self) -> float:
        return float(self._engine.evaluate(self._evaluation_batches())["eval_loss"])


def training_arguments(run: Run) -> TrainingArguments:
    """Trainer's arguments for ``run``: one step a batch, and nothing to log, save or evaluate by itself.

    accelerate and transformers read a JSON that says no more than they have to know; the engine gets the resolved one.
    """
    args = run.args
    config = {
        "zero_optimization": {"stage": 0},
        "optimizer": run.resolved.ds_config["optimizer"],
        "paceline": {"pipeline": {}},
    }
    with _threads_as_they_are():
        return TrainingArguments(
            output_dir=str(run.output),
            deepspeed=config,
            use_cpu=get_accelerator().device_name() == "cpu",
            max_steps=run.num_steps,
            lr_scheduler_type=args.lr_scheduler_type,
            warmup_steps=args.num_warmup_steps(run.num_steps),
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it waits for the device at each step
            save_strategy="no",
            eval_strategy="no",
            ignore_data_skip=True,
            report_to=[],
            disable_tqdm=True,
        )


@contextmanager
def _kept(config: Any) -> Iterator[None]:
    """Undo Trainer's changes to the model's config, which is exported."""
    before = dict(vars(config))
    try:
        yield
    finally:
        vars(config).clear()
        vars(config).update(before)


@contextmanager
def _threads_as_they_are() -> Iterator[None]:
    """Keep accelerate from setting the number of torch's threads where OMP_NUM_THREADS is not set."""
    name = "OMP_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(torch.get_num_threads())
    try:
        yield
    finally:
        del os.environ[name]
