"""One fine-tuning job, step by step: model, data, training, export, summary."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.averaging.combining import combining_fault
from paceline.averaging.islands import ISLAND, island_number
from paceline.checkpoint import Checkpoint, CheckpointError
from paceline.checkpoint.format import MANIFEST
from paceline.comm.control import ControlPlane
from paceline.config import PacelineConfig, RunPlan, read_ds_config, without_secrets
from paceline.config.batch_sizes import BATCH_KEYS, TRAIN_BATCH
from paceline.config.stage_counts import is_planned
from paceline.data.batch_plan import BatchPlan
from paceline.hf.arguments import DataArguments, ModelArguments, TrainArguments
from paceline.hf.peft import lora_config
from paceline.hf.quantised import quantised_loading
from paceline.hf.quiet_transformers import quiet
from paceline.launch.earlier_runs import check_nothing_is_lost, checkpoint_to_resume, goes_on_in
from paceline.launch.inputs import read_inputs
from paceline.launch.job_trainer import JobTrainer, Run
from paceline.launch.trackers import Trackers
from paceline.report.metrics import table
from paceline.runtime.builder import build_pipeline
from paceline.runtime.model_export import export
from paceline.runtime.module import CausalLMPipeline
from paceline.runtime.startup import dtype_of, plan_for
from paceline.supervise.output_lock import Claim
from paceline.supervise.watch import WATCH

logger = logging.getLogger("paceline")

MUCH_LEFT_OUT = 0.05
"""Share of an epoch's samples."""

NO_HELD_OUT = "hold some out with --validation_split_percentage"
"""The remedy where weights are to be fitted on them."""


class Job:
    """The main job on one rank. All ranks call :meth:`run`; a wrong input stops all of them with the same message."""

    def __init__(
        self,
        model_args: ModelArguments,
        data_args: DataArguments,
        args: TrainArguments,
        given: set[str],
        command: str | None = None,
    ) -> None:
        self.model_args, self.data_args, self.args, self.given = model_args, data_args, args, given
        self.command = command
        self.rank = dist.get_rank()
        # No time limit on small messages: limits of each operation are the watch's (paceline.supervise.watch).
        self.timeout = timedelta(days=7)
        self.control = ControlPlane.create(timeout=self.timeout)
        self.output = Path(args.output_dir)
        self.resume_path: Path | None = None
        self.claim: Claim | None = None

    def run(self) -> None:
        try:
            with _deepspeed_warnings_only():
                trainer = self._prepare()
                trainer.train()
            with WATCH.pause("writing the model"):
                self._finish(trainer)
        finally:
            if self.claim is not None:
                self.claim.release()

    def _prepare(self) -> JobTrainer:
        torch.manual_seed(self.args.seed)
        with self.control.together("reading the configuration"):
            ds_config = self._read_config()
        self._check_output()
        self._open_run_to_resume(ds_config)
        # One rank of each node tokenizes; the others find its work in the cache of datasets.
        for turn in (True, False):
            with WATCH.pause("reading the data"), self.control.together("reading the data"):
                if (os.environ["LOCAL_RANK"] == "0") == turn:
                    progress = self.rank == 0 and not self.args.disable_tqdm
                    self.inputs = read_inputs(self.model_args, self.data_args, self.args, progress=progress)
        evaluates = self.args.eval_strategy != "no" and not self.data_args.streaming  # of a stream it is said already
        if evaluates and self.inputs.data.held_out is None and self.rank == 0:
            rule = "there are no held-out data, and nothing is evaluated"
            logger.warning("--eval_strategy %s: %s; %s", self.args.eval_strategy, rule, NO_HELD_OUT)
        with self.control.together("planning"):  # what can be wrong is so on all ranks, or told to all
            resolved = plan_for(
                self.inputs.config,
                ds_config,
                self.section,
                self.control,
                args=self.args,
                given=self.given,
                num_steps=self._num_steps,
                peft_config=lora_config(self.model_args) if self.model_args.use_peft else None,
                sequence_length=self.inputs.data.block_size,
                gradient_checkpointing=self.args.gradient_checkpointing,
                is_quantised=bool(self.model_args.load_in_4bit or self.model_args.load_in_8bit),
                plans_unasked=True,
                kept=self.kept,
            )
            self._check_rows(resolved)
            self._tell_what_is_left_out(self._plan(resolved))  # there is data for a step
            fault = combining_fault(self.section, self.inputs.data.held_out is not None, NO_HELD_OUT)
            if fault is not None:
                raise ValueError(fault)
        self._check_state_to_resume(resolved)
        with WATCH.pause("loading the model"):
            return self._build(resolved)

    # -- before training -----------------------------------------------------------------------------------------

    def _check_output(self) -> None:
        """Check, before hours of training, that the output directory can be written and is the same on all nodes."""
        probe, found = self.output / ".paceline", None
        with self.control.together(f"preparing {self.output}"):
            if self.rank == 0:
                try:
                    self.output.mkdir(parents=True, exist_ok=True)
                    self.claim = Claim(self.output)
                except OSError as error:
                    why = f"{error.strerror}; choose a directory that can be written to, with room"
                    raise ValueError(f"--output_dir {self.output}: {why}.") from error
                found = checkpoint_to_resume(self.output, self.args)
                if not goes_on_in(self.output, found):
                    check_nothing_is_lost(self.output, self.args)
                probe.touch()
        with self.control.together(f"looking for {self.output}"):
            if not probe.exists():
                raise ValueError(
                    f"--output_dir {self.output} is not the same directory on all nodes (rank {self.rank} does not see "
                    "what rank 0 wrote): choose one on a file system that they share."
                )
        self.resume_path = self.control.gather(found)[0]
        with self.control.together(f"preparing {self.output}"):
            if self.rank == 0:
                probe.unlink()

    def _read_config(self) -> dict[str, Any]:
        ds_config = read_ds_config(self.args.deepspeed or {})
        self.section = PacelineConfig.of(ds_config)
        self.island, self.num_islands = 0, 1
        if self.section.averaging is not None:
            if self.args.island is not None:
                os.environ[ISLAND] = str(self.args.island)
            self.island, self.num_islands = island_number(self.section.averaging)
            self.output /= f"island{self.island}"  # all islands are started by the same command
        elif self.args.island is not None:
            raise ValueError(
                f'--island {self.args.island}: there are no islands without averaging; write "averaging" into the '
                '"paceline" section of the JSON, or leave the flag out.'
            )
        ds_config.setdefault("paceline", {}).setdefault("pipeline", {})  # it is what this job is for
        if not ds_config.get("wall_clock_breakdown"):
            ds_config.setdefault("steps_per_print", None)  # DeepSpeed's own lines; progress is ours
        return ds_config

    def _plan(self, resolved: RunPlan, replica: int = 0) -> BatchPlan:
        return BatchPlan(
            num_samples=self.inputs.data.num_samples,
            micro_batch_size=resolved.micro_batch_size,
            micro_batches_per_step=resolved.micro_batches,
            data_parallel_rank=replica,
            data_parallel_size=resolved.data_parallel,
            seed=self.args.seed,
            island=self.island,
            num_islands=self.num_islands,
        )

    def _tell_what_is_left_out(self, plan: BatchPlan) -> None:
        """Say how many samples of an epoch are in none of its steps."""
        if plan.num_samples is None or plan.steps_per_epoch is None or self.rank:
            return
        samples = plan.num_samples // plan.num_islands
        left = samples - plan.steps_per_epoch * plan.global_batch_size
        if left:
            logger.log(
                logging.WARNING if left > MUCH_LEFT_OUT * samples else logging.INFO,
                "each epoch leaves out %d of %d samples, others each time, which do not fill a global batch of %d: "
                "smaller batches (--gradient_accumulation_steps) leave out fewer",
                *(left, samples, plan.global_batch_size),
            )

    def _check_rows(self, resolved: RunPlan) -> None:
        """Refuse packed rows that flash attention would be given two at a time, and then takes for one sample each."""
        sizes, attention = resolved.schedule.micro_batch_sizes or (), self.model_args.attn_implementation or ""
        if self.data_args.packing and "flash" in attention and len(sizes) > 1:
            raise ValueError(
                f"paceline.pipeline.schedule.micro_batch_sizes is {list(sizes)} with --packing: {attention} keeps "
                "packed samples apart in micro-batches of one row only; leave one of them out, or take "
                "--attn_implementation sdpa."
            )

    def _num_steps(self, resolved: RunPlan) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        steps_per_epoch = self._plan(resolved).steps_per_epoch
        assert steps_per_epoch is not None, "a stream needs --max_steps, parse() has seen to it"
        return math.ceil(self.args.num_train_epochs * steps_per_epoch)

    def _open_run_to_resume(self, ds_config: dict[str, Any]) -> None:
        """Read, before there is a plan, what the job had planned that goes on; only in as many ranks it stays."""
        self.earlier: dict[str, Any] | None = None
        self.kept: dict[str, Any] | None = None
        if self.resume_path is None:
            return
        with self.control.together(f"opening {self.resume_path}"):
            try:
                checkpoint = Checkpoint.open(self.resume_path)
            except CheckpointError as error:
                if (self.resume_path / MANIFEST).exists():
                    raise
                raise ValueError(f"--resume_from_checkpoint {self.args.resume_from_checkpoint}: {error}") from None
            self.earlier = checkpoint.meta["client_state"].get("paceline")
            if self.earlier is None:
                raise ValueError(
                    f"{self.resume_path} was not saved by this job: load it with engine.load_checkpoint in a loop of "
                    "your own."
                )
            if checkpoint.world_size == dist.get_world_size() and not self.args.replan:
                self.kept = self.earlier.get("planned") or None
                if self.kept is None and self.section.pipeline.stages is None:
                    self._keep_stages(ds_config, checkpoint.meta["shape"]["stages"])
            checkpoint.close()
            if self.kept is None:
                self._keep_batch(ds_config, self.earlier["data"]["data"]["global_batch_size"])

    def _keep_stages(self, ds_config: dict[str, Any], stages: int) -> None:
        """Go on without a plan, as a run does that began without one."""
        if is_planned(self.section, ds_config, unasked=True):
            ds_config["paceline"]["pipeline"]["stages"] = stages
            self.section = PacelineConfig.of(ds_config)
            if self.rank == 0:
                logger.info("%d stages, as before the checkpoint; --replan chooses anew", stages)

    def _keep_batch(self, ds_config: dict[str, Any], samples: int) -> None:
        """Go on with as many samples a step where the flags and the JSON leave all batch sizes open."""
        asked = self.given & {"per_device_train_batch_size", "gradient_accumulation_steps"}
        if not asked and all(ds_config.get(key) in (None, "auto") for key in BATCH_KEYS):
            ds_config[TRAIN_BATCH] = samples
            if self.rank == 0:
                logger.info("a global batch of %d, as before the checkpoint", samples)

    def _check_state_to_resume(self, resolved: RunPlan) -> None:
        """Refuse, before the model is loaded, a checkpoint of other data, another seed or another batch size."""
        if self.earlier is not None:
            with self.control.together(f"opening {self.resume_path}"):
                self.inputs.data.training_batches(self._plan(resolved)).check_state(self.earlier["data"])

    def _build(self, resolved: RunPlan) -> JobTrainer:
        pipeline = self._build_pipeline(resolved)
        run = Run(
            args=self.args,
            output=self.output,
            resolved=resolved,
            data=self.inputs.data,
            plan=self._plan(resolved, pipeline._grid.data_parallel_id),
            tokenizer=self.inputs.tokenizer,
            num_steps=self._num_steps(resolved),
            resume_path=self.resume_path,
            facts={
                "island": self.island if self.section.averaging is not None else None,
                "command": self.command,
                "ds_config": without_secrets(read_ds_config(self.args.deepspeed or {})),
            },
            trackers=partial(self._start_trackers, self._num_steps(resolved)) if self.args.report_to else None,
        )
        trainer = JobTrainer(pipeline, run)
        # Dropout differs between ranks; the weights were drawn by name and do not care.
        torch.manual_seed(self.args.seed + self.rank)
        return trainer

    def _build_pipeline(self, resolved: RunPlan) -> CausalLMPipeline:
        args = self.model_args
        loading: dict[str, Any] = {}
        if args.attn_implementation:
            loading["attn_implementation"] = args.attn_implementation
        if args.model_name_or_path:
            loading |= {"cache_dir": args.cache_dir, "revision": args.model_revision, "token": args.token}
        peft_config = None
        if args.use_peft:
            with self.control.together("preparing the adapters"):
                peft_config = lora_config(args)
                loading |= quantised_loading(args, dtype_of(resolved.ds_config))
        try:
            pipeline = build_pipeline(
                args.model_name_or_path or self.inputs.config,
                self.inputs.config,
                resolved,
                self.control,
                sequence_length=self.inputs.data.block_size,
                gradient_checkpointing=self.args.gradient_checkpointing,
                seed=self.args.seed,
                timeout=self.timeout,
                peft_config=peft_config,
                **loading,
            )
        except ImportError as error:
            if args.attn_implementation is None:
                raise
            remedy = "install what it needs, or choose eager or sdpa"
            raise ValueError(f"--attn_implementation {args.attn_implementation}: {error}; {remedy}.") from error
        if self.rank == 0:
            for line in pipeline.describe():
                logger.info("%s", line)
        return pipeline

    def _start_trackers(self, num_steps: int) -> Trackers:
        flags = vars(self.model_args) | vars(self.data_args) | vars(self.args)
        flags = {name: value for name, value in flags.items() if name not in ("token", "local_rank")}
        name, island = self.args.run_name, None
        if self.section.averaging is not None:
            island = self.island  # all islands are started by the same command
            name = name and f"{name}-island{island}"
        flags |= {"output_dir": str(self.output), "run_name": name}
        return Trackers(self.args.report_to, flags, self.inputs.config, num_steps, island)

    # -- after training ------------------------------------------------------------------------------------------

    def _finish(self, trainer: JobTrainer) -> None:
        export(
            trainer.pipeline,
            self.output,
            self.control,
            tokenizer=self.inputs.tokenizer,
            max_shard_size=self.args.max_shard_size,
        )
        log, length = trainer.run_log, self.inputs.data.train.length
        summary = log.summary(trainer.run.num_steps, length)
        with self.control.together("writing the report"):
            if summary is None:
                return
            logger.info("%s", table(summary))
            what, loader = ("adapter", "AutoPeft") if self.model_args.use_peft else ("model", "Auto")
            values = (what, self.output, loader, str(self.output))
            logger.info("%s written to %s: %sModelForCausalLM.from_pretrained(%r)", *values)
            log.write_page()
            if self.args.sample_prompt:
                try:
                    self._complete_line(self.args.sample_prompt)
                except Exception as error:  # the model is written; a sample is an extra
                    logger.warning("no sample: %s: %s", type(error).__name__, error)
            log.warn_of_the_end()

    def _complete_line(self, prompt: str) -> None:
        """Load what was exported as anybody would, and let it complete a line."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with quiet():
            model = AutoModelForCausalLM.from_pretrained(self.output)
        tokenizer = AutoTokenizer.from_pretrained(self.output)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        text = tokenizer.decode(ids[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        logger.info("%r continues as %r", prompt, text)


@contextmanager
def _deepspeed_warnings_only() -> Iterator[None]:
    """DeepSpeed says at INFO, on every rank, what it does at every turn."""
    from deepspeed.utils import logger as ds_logger

    level = ds_logger.level
    ds_logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        ds_logger.setLevel(level)
