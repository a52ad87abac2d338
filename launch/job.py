"""One fine-tuning job, step by step: model, data, engine, training, evaluation, export, summary."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from paceline.averaging.islands import ISLAND, combining_fault, island_number
from paceline.checkpoint import Checkpoint
from paceline.checkpoint.format import MODEL
from paceline.comm.control import ControlPlane, is_shared
from paceline.config import PacelineConfig, Resolved, read_ds_config, without_secrets
from paceline.data import datasets as data
from paceline.data.batch_plan import BatchPlan
from paceline.data.tokenizer import load_tokenizer, train_tokenizer
from paceline.hf.arguments import DataArguments, ModelArguments, TrainArguments
from paceline.hf.check import require_supported
from paceline.hf.peft import lora_config
from paceline.hf.quantised import quantised_loading
from paceline.hf.quiet_transformers import quiet
from paceline.launch.completion import complete
from paceline.launch.earlier_runs import check_nothing_is_lost, checkpoint_to_resume, remove_earlier_run
from paceline.launch.trackers import Trackers
from paceline.report.metrics import table
from paceline.report.progress import Progress
from paceline.runtime.builder import build_pipeline, dtype_of
from paceline.runtime.initialize import initialize
from paceline.runtime.model_export import export
from paceline.runtime.module import CausalLMPipeline
from paceline.runtime.run_log import RunLog
from paceline.runtime.startup import plan_for
from paceline.supervise.lifetime import Preempted, current
from paceline.supervise.output_lock import Claim
from paceline.supervise.watch import WATCH

logger = logging.getLogger("paceline")

TOKENIZER_TEXTS = 2_000
"""Rows that a tokenizer is trained on when a model from scratch brings none."""

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
        # Ranks wait for each other's small messages as long as it takes: what may take how long, the watch knows.
        self.timeout = timedelta(days=7)
        self.control = ControlPlane.create(timeout=self.timeout)
        self.output = Path(args.output_dir)
        self.resume_path: Path | None = None
        self.claim: Claim | None = None

    def run(self) -> None:
        try:
            self._run()
        finally:
            if self.claim is not None:
                self.claim.release()

    def _run(self) -> None:
        torch.manual_seed(self.args.seed)
        with _deepspeed_warnings_only():
            with self.control.together("reading the configuration"):
                ds_config = self._read_config()
            self._check_output()
            # One rank of each node tokenizes; the others find its work in the cache of datasets.
            for turn in (True, False):
                with WATCH.pause("reading the data"), self.control.together("reading the data"):
                    if (os.environ["LOCAL_RANK"] == "0") == turn:
                        self._read_data()
            with self.control.together("planning"):  # its one collective comes before anything that can be wrong
                resolved = plan_for(
                    self.config,
                    ds_config,
                    args=self.args,
                    given=self.given,
                    num_steps=self._num_steps,
                    has_adapters=self.model_args.use_peft,
                )
                self._plan(resolved)  # there is data for a step
                fault = combining_fault(self.section, self.data.held_out is not None, NO_HELD_OUT)
                if fault is not None:
                    raise ValueError(fault)
            self._check_state_to_resume(resolved)
            with WATCH.pause("loading the model"):
                self._build(resolved)
                self._resume()
            try:
                self._train()
            except Exception as error:
                if is_shared(error):  # all ranks are here: let the checkpoint that is being written be finished
                    with suppress(Exception):
                        self.engine.finish_checkpoint()
                raise
        with WATCH.pause("writing the model"):
            self._finish()

    # -- before training -----------------------------------------------------------------------------------------

    def _check_output(self) -> None:
        """Before hours of training: the model's directory can be written, and all nodes see the same one."""
        probe = self.output / ".paceline"
        with self.control.together(f"preparing {self.output}"):
            if self.rank == 0:
                self.output.mkdir(parents=True, exist_ok=True)
                self.claim = Claim(self.output)
                check_nothing_is_lost(self.output, self.args)
                probe.touch()
        with self.control.together(f"looking for {self.output}"):
            if not probe.exists():
                raise ValueError(
                    f"--output_dir {self.output} is not the same directory on all nodes (rank {self.rank} does not see "
                    "what rank 0 wrote): choose one on a file system that they share."
                )
        found = None
        with self.control.together("looking for the checkpoint to go on from"):
            if self.rank == 0:
                found = checkpoint_to_resume(self.output, self.args)
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

    def _read_data(self) -> None:
        raw = data.read(
            self.data_args, seed=self.args.seed, cache_dir=self.model_args.cache_dir, token=self.model_args.token
        )
        self.tokenizer = self._tokenizer(raw)
        self.config = self._model_config()
        require_supported(self.config)
        self.data = self._tokenize(raw)

    def _tokenizer(self, raw: data.RawData) -> PreTrainedTokenizerBase:
        if self.model_args.tokenizer_name or self.model_args.model_name_or_path:
            return load_tokenizer(self.model_args)
        return train_tokenizer(raw.texts(TOKENIZER_TEXTS))

    def _model_config(self) -> PretrainedConfig:
        args = self.model_args
        name = args.config_name or args.model_name_or_path
        if name is None:
            config = AutoConfig.for_model(args.model_type, **_special_tokens(self.tokenizer))
            return args.override(config)
        try:
            config = AutoConfig.from_pretrained(
                name,
                cache_dir=args.cache_dir,
                revision=args.model_revision,
                token=args.token,
            )
        except (OSError, ValueError) as error:
            flag = "config_name" if args.config_name else "model_name_or_path"
            raise ValueError(f"--{flag} {name}: no model config can be loaded: {error}") from error
        if args.model_name_or_path is None:
            config.update(_special_tokens(self.tokenizer))
        return args.override(config)

    def _tokenize(self, raw: data.RawData) -> data.Data:
        largest = len(self.tokenizer) - 1
        if largest >= self.config.get_text_config().vocab_size:
            raise ValueError(
                f"the tokenizer has {largest + 1} tokens, the model's vocabulary "
                f"{self.config.get_text_config().vocab_size}: choose a tokenizer that belongs to the model."
            )
        return data.prepare(
            raw,
            self.data_args,
            self.tokenizer,
            self.config,
            seed=self.args.seed,
            attn_implementation=self.model_args.attn_implementation,
            progress=self.rank == 0 and not self.args.disable_tqdm,
        )

    def _plan(self, resolved: Resolved, replica: int = 0) -> BatchPlan:
        return self.data.plan(
            micro_batch_size=resolved.micro_batch_size,
            micro_batches_per_step=resolved.micro_batches,
            data_parallel_rank=replica,
            data_parallel_size=resolved.data_parallel,
            seed=self.args.seed,
            island=self.island,
            num_islands=self.num_islands,
        )

    def _num_steps(self, resolved: Resolved) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        steps_per_epoch = self._plan(resolved).steps_per_epoch
        assert steps_per_epoch is not None, "a stream needs --max_steps, parse() has seen to it"
        return math.ceil(self.args.num_train_epochs * steps_per_epoch)

    def _build(self, resolved: Resolved) -> None:
        args = self.model_args
        loading: dict[str, Any] = {}
        if args.attn_implementation:
            loading["attn_implementation"] = args.attn_implementation
        if args.model_name_or_path:
            loading |= {"cache_dir": args.cache_dir, "revision": args.model_revision, "token": args.token}
        self.resolved = resolved
        peft_config = None
        if args.use_peft:
            with self.control.together("preparing the adapters"):
                peft_config = lora_config(args)
                loading |= quantised_loading(args, dtype_of(resolved.ds_config))
        self.pipeline = build_pipeline(
            args.model_name_or_path or self.config,
            self.config,
            resolved,
            self.control,
            sequence_length=self.data.block_size,
            gradient_checkpointing=self.args.gradient_checkpointing,
            seed=self.args.seed,
            timeout=self.timeout,
            peft_config=peft_config,
            **loading,
        )
        # Dropout differs between ranks; the weights were drawn by name and do not care.
        torch.manual_seed(self.args.seed + self.rank)
        if self.rank == 0:
            for line in self.pipeline.describe():
                logger.info("%s", line)
        self.num_steps = self._num_steps(resolved)
        self.engine, *_ = initialize(
            model=self.pipeline,
            model_parameters=_decay_groups(self.pipeline, resolved.ds_config),
            lr_scheduler=None if "scheduler" in resolved.ds_config else self._schedule,
            config=resolved.ds_config,
        )
        self.replica = self.engine.grid.data_parallel_id
        self.plan = self._plan(resolved, self.replica)

    def _check_state_to_resume(self, resolved: Resolved) -> None:
        """Before the model is loaded: other data, another seed or batch size would not go on where the run stopped."""
        if self.resume_path is None:
            return
        with self.control.together(f"opening {self.resume_path}"):
            run = Checkpoint.open(self.resume_path).meta["client_state"].get("paceline")
            if run is None:
                raise ValueError(
                    f"{self.resume_path} was not saved by this job: load it with engine.load_checkpoint in a loop of "
                    "your own."
                )
            self.data.training_batches(self._plan(resolved)).check_state(run["data"])

    def _resume(self) -> None:
        self.batches = self.data.training_batches(self.plan)
        self.first_step, self.first_tokens, self.tokens = 0, 0, 0
        self.losses: list[torch.Tensor] = []
        self.pending_tokens = 0
        self.untimed = (0, 0)
        if self.resume_path is None:
            with self.control.together(f"clearing {self.output}"):
                if self.rank == 0 and self.args.overwrite_output_dir:
                    remove_earlier_run(self.output)
            return
        path, state = self.engine.load_checkpoint(self.resume_path.parent, tag=self.resume_path.name)
        run = state["paceline"]
        with self.control.together(f"going on from {path}"):
            if self.engine.reads_data:
                self.batches.load_state_dict(run["data"])
        self.first_step, self.first_tokens = self.engine.global_steps, run["tokens"] + run["pending_tokens"]
        self.tokens, self.pending_tokens = run["tokens"], run["pending_tokens"]
        self.losses = [torch.tensor(loss, dtype=torch.float64) for loss in run["losses"]]
        self.untimed = (len(self.losses), self.pending_tokens)
        if self.rank == 0:
            logger.info("going on from %s, after step %d", path, self.first_step)

    def _schedule(self, optimizer: Any) -> Any:
        from transformers import get_scheduler

        warmup = self.args.num_warmup_steps(self.num_steps)
        return get_scheduler(self.args.lr_scheduler_type, optimizer, warmup, self.num_steps)

    # -- training ------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        args, engine = self.args, self.engine
        self.trackers: Trackers | None = None
        self.log = RunLog(
            engine,
            self.output,
            self.section,
            self.resolved,
            self.control,
            facts={"command": self.command, "ds_config": without_secrets(read_ds_config(args.deepspeed or {}))},
            listeners=[self._track],
        )
        island = self.island if self.section.averaging is not None else None
        self.log.begin(self.num_steps, self.first_step, island)
        with self.control.together("starting the trackers"):
            self.trackers = self._start_trackers() if self.rank == 0 and args.report_to else None
        self.progress = Progress(
            self.num_steps, shown=self.rank == 0, bar=not args.disable_tqdm, first_step=self.first_step
        )
        self.evaluation: dict[str, float] | None = None
        self.train_loss = math.nan
        if self.first_step == 0:
            self._evaluate(0)
        self.log.skip_time()
        current().expect_boundaries()
        for step in range(self.first_step + 1, self.num_steps + 1):
            begun = time.perf_counter()
            self.rate = engine.get_lr()[0]  # that this step is taken with
            self.losses.append(engine.train_batch(self.batches if engine.reads_data else None))
            self.pending_tokens += engine.step_tokens
            if self.rank == 0:
                self.progress.step(self.log.add_step(step, time.perf_counter() - begun))
            if step == self.num_steps:
                current().finishing()  # the export is next; no signal is to cut it off
                engine.finish_averaging(self._held_out_loss)
            if step % args.logging_steps == 0 or step == self.num_steps:
                self._report(step)
            if step == self.first_step + 1 and args.save_strategy != "no":
                engine.prepare_checkpoint(exclude_frozen_parameters=self.model_args.use_peft)
            if engine.is_stopping and step < self.num_steps:
                self._stop(step)
            if self._is_save_due(step):
                self._save(step)
            if args.sample_every and step % args.sample_every == 0:
                self._sample_in_pipeline(step)
            if self._is_evaluation_due(step):
                self._evaluate(step)
                if engine.is_stopping and step < self.num_steps:
                    self._stop(step)
        if self.first_step >= self.num_steps:
            self._evaluate(self.num_steps)
        engine.finish_checkpoint()
        self.progress.close()
        self._close_trackers()

    def _start_trackers(self) -> Trackers:
        flags = vars(self.model_args) | vars(self.data_args) | vars(self.args)
        flags = {name: value for name, value in flags.items() if name not in ("token", "local_rank")}
        name = self.args.run_name
        if name is not None and self.section.averaging is not None:
            name += f"-island{self.island}"  # all islands are started by the same command
        flags |= {"output_dir": str(self.output), "run_name": name}
        return Trackers(self.args.report_to, flags, self.config, self.num_steps)

    def _close_trackers(self) -> None:
        if self.trackers is not None:
            self.trackers.close()

    def _sample_in_pipeline(self, step: int) -> None:
        assert self.args.sample_prompt, "parse() has seen to it"
        self.log.take_time()
        with WATCH.pause("completing a line"):
            text = complete(self.engine, self.tokenizer, self.args.sample_prompt)
        self.log.skip_time()  # it is not training
        self.progress.say(f"[paceline] step {step}: {self.args.sample_prompt!r} continues as {text!r}")
        self.log.metrics.write({"step": step, "sample": {"prompt": self.args.sample_prompt, "completion": text}})

    def _is_save_due(self, step: int) -> bool:
        if self.args.save_strategy == "epoch":
            return self.plan.steps_per_epoch is not None and step % self.plan.steps_per_epoch == 0
        if self.args.save_strategy == "no":
            return False
        return step == self.num_steps or step % (self.args.save_steps or 1) == 0  # at the end too, as Trainer does

    def _save(self, step: int) -> None:
        """Begin to save; training goes on meanwhile."""
        run = {
            "tokens": self.tokens,
            "pending_tokens": self.pending_tokens,
            "losses": [loss.item() for loss in self.losses],
        }
        if self.engine.reads_data:
            run["data"] = self.engine.data_state(self.batches)

        def write_files(draft: Path) -> None:
            self.tokenizer.save_pretrained(draft / MODEL)

        self.engine.save_checkpoint(
            self.output,
            tag=f"checkpoint-{step}",
            client_state={"paceline": run},
            exclude_frozen_parameters=self.model_args.use_peft,
            wait=False,
            keep=self.args.save_total_limit,
            files=write_files,
        )

    def _stop(self, step: int) -> NoReturn:
        """Some rank was asked to stop, and all of them know: save together and leave."""
        reasons = self.control.gather(current().reason if current().requested else None)
        current().reached()
        path = None
        if self.args.save_strategy != "no":
            with WATCH.pause("saving the checkpoint"):
                self._save(step)
                self.engine.finish_checkpoint()
            path = self.output / f"checkpoint-{step}"
        self.log.leave(step)
        self.progress.close()
        self._close_trackers()
        raise Preempted(step, path, next(reason for reason in reasons if reason))

    def _report(self, step: int) -> None:
        losses, tokens = self.losses, self.pending_tokens
        self.losses, self.pending_tokens = [], 0
        self.log.take_time()
        self.tokens += tokens
        self.train_loss = sum(loss.item() for loss in losses) / len(losses)
        (steps_before, tokens_before), self.untimed = self.untimed, (0, 0)
        line = self.log.report(
            {
                "step": step,
                "epoch": step / self.plan.steps_per_epoch if self.plan.steps_per_epoch else None,
                "loss": self.train_loss,
                "learning_rate": self.rate,
                "grad_norm": self.engine.grad_norm(),
                "tokens": self.tokens,
            },
            len(losses) - steps_before,
            tokens - tokens_before,
        )
        shown = {"loss": "loss", "grad norm": "grad_norm", "s/step": "step_s", "tokens/s": "tokens_per_s"}
        shown["lr"] = "learning_rate"
        self.progress.report(step, {name: line[key] for name, key in shown.items()})

    def _track(self, record: Mapping[str, Any]) -> None:
        if self.trackers is not None:
            self.trackers.log(record)

    def _is_evaluation_due(self, step: int) -> bool:
        if step == self.num_steps:
            return True
        if self.args.eval_strategy == "epoch":
            return self.plan.steps_per_epoch is not None and step % self.plan.steps_per_epoch == 0
        return self.args.eval_strategy == "steps" and step % (self.args.eval_steps or 1) == 0

    def _evaluate(self, step: int) -> None:
        if self.data.held_out is None or (step == 0 and self.args.eval_strategy == "no"):
            return
        if step > 0:
            self.log.take_time()
        with WATCH.pause("evaluating"):
            found = self.engine.evaluate(self._evaluation_batches())
        self.log.skip_time()  # evaluating is not training
        if self.engine.is_stopping:
            return  # it was cut short
        self.evaluation = found
        self.progress.say(
            f"[paceline] step {step}: held-out loss {found['eval_loss']:.4f}, perplexity {found['perplexity']:.2f}"
        )
        self.log.tell({"step": step, **found})

    def _evaluation_batches(self) -> Any:
        return self.data.evaluation_batches(
            self.args.per_device_eval_batch_size, self.replica, self.resolved.data_parallel
        )

    def _held_out_loss(self) -> float:
        return float(self.engine.evaluate(self._evaluation_batches())["eval_loss"])

    # -- after training ------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        export(
            self.pipeline,
            self.output,
            self.control,
            tokenizer=self.tokenizer,
            max_shard_size=self.args.max_shard_size,
        )
        summary = self.log.summary(
            steps=self.num_steps,
            tokens=self.tokens,
            first_tokens=self.first_tokens,
            sequence_length=self.data.train.length,
            train_loss=self.train_loss,
            evaluation=self.evaluation,
        )
        with self.control.together("writing the report"):
            if summary is not None:
                logger.info("%s", table(summary))
                what, loader = ("adapter", "AutoPeft") if self.model_args.use_peft else ("model", "Auto")
                told = (what, self.output, loader, str(self.output))
                logger.info("%s written to %s: %sModelForCausalLM.from_pretrained(%r)", *told)
                self.log.write_page()
                if self.args.sample_prompt:
                    try:
                        self._sample(self.args.sample_prompt)
                    except Exception as error:  # the model is written; a sample is an extra
                        logger.warning("no sample: %s: %s", type(error).__name__, error)

    def _sample(self, prompt: str) -> None:
        """Load what was exported as anybody would, and let it complete a line."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with quiet():
            model = AutoModelForCausalLM.from_pretrained(self.output)
        tokenizer = AutoTokenizer.from_pretrained(self.output)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        text = tokenizer.decode(ids[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        logger.info("%r continues as %r", prompt, text)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _decay_groups(pipeline: CausalLMPipeline, ds_config: dict[str, Any]) -> list[Any]:
    """Trainer's rule: with weight decay, biases and norms are a group without."""
    from transformers.trainer_pt_utils import get_parameter_names

    plain = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decays: dict[torch.nn.Parameter, bool] = {}
    for model in pipeline.models:
        decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], plain))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                decays.setdefault(parameter, name in decayed)
    if not ds_config.get("optimizer", {}).get("params", {}).get("weight_decay"):
        return list(decays)
    return [
        {"params": [parameter for parameter, is_decayed in decays.items() if is_decayed]},
        {"params": [parameter for parameter, is_decayed in decays.items() if not is_decayed], "weight_decay": 0.0},
    ]


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
