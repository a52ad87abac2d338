"""Hugging Face's Trainer, whose model is a pipeline if the DeepSpeed JSON says so.

Everything a script knows of its Trainer stays: arguments, callbacks, logging, evaluation, ``compute_metrics``,
checkpoints, ``resume_from_checkpoint``. What changes is who computes: a step's micro-batches go to the engine together,
each pipeline has a share of the data instead of each rank, and stages write their part of what is saved.

The learning rate's scheduler, the loss scale and clipping are the engine's, as they are DeepSpeed's in a plain Trainer.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from ..comm.control import ControlPlane
from ..comm.groups import end_left_groups, end_with, groups_here
from ..config import PacelineConfig, RunPlan, read_ds_config
from ..data.packing import require_packable
from ..hf.check import require_language_model, require_supported
from ..hf.peft import config_of_adapters, unwrapped
from ..hf.stage import CUT, require_whole
from ..patches.deepspeed_ops import NO_SHM_COMM
from ..patches.registry import apply, warn_of_changes
from ..patches.repairs import repair_deepspeed
from ..patches.transformers_trainer import OVERRIDES
from ..report.metrics import table
from ..report.run_records import tokens_so_far
from ..supervise.output_lock import claimed
from ..supervise.watch import EVERYONE, WATCH
from .builder import build_pipeline
from .initialize import TIMEOUT_S, initialize, start_distributed
from .micro_batches import FILLER, count_label_tokens
from .model_export import _naming, export
from .module import CausalLMPipeline, config_of
from .replica_shares import ReplicaShares
from .run_log import RunLog
from .startup import plan_for
from .trainer_batches import EvaluatedAhead, Seeing, StepsOfEpoch, without_extras
from .trainer_loss import averages_alone, is_computing, trainers_loss
from .trainer_model import Counted, stand_in
from .trainer_optimizer import Stepped, parameter_groups
from .trainer_optimizer import keep_embeddings_wide as _keep_embeddings_wide
from .trainer_optimizer import make_optimizer as _make_optimizer
from .trainer_preemption import take_over, watched
from .trainer_refusals import asks_for_pipeline, refused, refused_combining, refused_kind, refused_shape
from .trainers_checkpoints import (
    checked,
    naming_the_one_before,
    naming_what_torch_saves,
    newest_complete,
    refuse_pipelines,
    with_training,
)
from .training_arguments import count_ranks, match_backend, take_accelerates_json

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    class _Trainer(Trainer): ...

else:
    _Trainer = object  # any Trainer may come behind it

logger = logging.getLogger("paceline")

if "RANK" in os.environ and get_accelerator().device_name() == "cpu":
    # TrainingArguments start DeepSpeed's communication before there is a trainer.
    apply(NO_SHM_COMM)

FEW_MICRO_BATCHES = 2
"""Times the stages: with fewer micro-batches a step, a pipeline idles for more than a third of it."""

_BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps")


class PipelineTraining(_Trainer):
    """Makes a Trainer one of pipelines; comes before its class::

        class MyPipelineTrainer(PipelineTraining, MyTrainer): ...

    Without ``"paceline": {"pipeline": …}`` in the DeepSpeed JSON it is that Trainer, whose DeepSpeed reads the other
    parts of the section (experts, natural gradients, averaging between islands). Its methods are many, since Trainer
    has as many places where a pipeline differs: nearly all are Trainer's own, overridden.

    Raises:
        ValueError: the JSON asks for a pipeline and the script for what none can do (:func:`refused`).
    """

    pipeline: CausalLMPipeline | None = None
    """What is trained, once training or evaluating has begun."""
    run_log: RunLog | None = None
    """Records of the last training, once it has begun."""
    preprocess_logits_for_metrics: Any
    _built_of: Any = None
    _resolved: RunPlan
    _has_warned_of_logs = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        repair_deepspeed()
        warn_of_changes(OVERRIDES)
        for given in (*args, *kwargs.values()):
            if isinstance(given, TrainingArguments):
                take_accelerates_json(given)
                if asks_for_pipeline(given) and (fault := refused_kind(type(self))):
                    raise ValueError(fault)
                count_ranks(given)
        super().__init__(*args, **kwargs)
        if self.args.deepspeed and not dist.is_initialized():
            start_distributed()  # or DeepSpeed would look for MPI where one process started itself
        match_backend()
        self._engine: Any = None
        self._waiting: list[Any] = []
        self._epoch: tuple[Any, StepsOfEpoch] | None = None
        self._losses: list[Tensor] = []
        self._rate: float | None = None
        self._reads_for: bool | None = None
        """Whether a loader that is being made trains; None where a subclass makes it."""
        if self.is_pipeline and (fault := refused(self, PipelineTraining)):
            raise ValueError(fault)
        if fault := refused_combining(self):
            raise ValueError(fault)
        if self.is_pipeline:
            self._read_as_pipelines()
            take_over(self, lambda: self._engine.is_stopping)

    @cached_property
    def is_pipeline(self) -> bool:
        """Whether the JSON asks for a pipeline."""
        return asks_for_pipeline(self.args)

    # -- what is built -------------------------------------------------------------------------------------------

    def _build(self) -> CausalLMPipeline:
        """The pipeline of ``self.model``; collective, the first time."""
        if self.pipeline is not None and self._built_of is self.model:
            return self.pipeline
        start_distributed()
        WATCH.start(self.args.ddp_timeout)
        patience = timedelta(seconds=max(self.args.ddp_timeout, TIMEOUT_S))  # a shorter one is the watch's
        end_left_groups()
        groups = groups_here()
        model = self.model
        control = ControlPlane.create(timeout=patience)
        ds_config = read_ds_config(self.args.deepspeed)
        section = PacelineConfig.of(ds_config)
        with control.together("reading the model's config"):
            require_whole(model)
            require_language_model(model)
            hf_config = config_of(model)
            require_supported(hf_config)
            if getattr(self, "padding_free", False):
                require_packable(hf_config, "packing or padding_free", "leave them out")
        data, args = self.train_dataset, self.args
        steps = None if data is None else partial(_count_steps, args, data)
        asked = getattr(self.args, "activation_checkpointing", None) or self.args.gradient_checkpointing
        # Or the script has switched it on for the model, for the layers and with the options that it likes.
        recomputes = asked or any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
        resolved = plan_for(
            hf_config,
            ds_config,
            section,
            control,
            args=self.args,
            given=_given(self.args),
            num_steps=steps,
            peft_config=config_of_adapters(model),
            gradient_checkpointing=bool(recomputes),
            has_own_loss=trainers_loss(self, 1) is not None,
        )
        if resolved.micro_batches != self.args.gradient_accumulation_steps:
            raise ValueError(
                f"gradient_accumulation_steps is {resolved.micro_batches} in the JSON and "
                f'{self.args.gradient_accumulation_steps} in the TrainingArguments: write "auto" in the JSON, or the '
                "same number."
            )
        if fault := refused_shape(self.args, resolved):
            raise ValueError(fault)
        _warn_of_idling(resolved)
        whole = unwrapped(model)
        if hasattr(self, "router_aux_loss_coef") and hasattr(whole, "router_aux_loss_coef"):
            whole.router_aux_loss_coef = self.router_aux_loss_coef  # TRL's SFTConfig has one
        counted = Counted(whole)
        self.pipeline = build_pipeline(
            model, hf_config, resolved, control, gradient_checkpointing=bool(asked), timeout=patience
        )
        end_with(self.pipeline, groups)
        grid = self.pipeline._grid
        group = grid.get_data_parallel_group()
        self._shares = ReplicaShares(grid.data_parallel_size, grid.data_parallel_id, group)
        if getattr(whole, CUT, False):
            stand_in(model, whole, counted)
        self._resolved, self._built_of, self._engine = resolved, model, None
        return self.pipeline

    def _start(self, num_steps: int | None) -> Any:
        """The engine, made anew for each training; evaluating takes what is there. A training that was interrupted,
        as in a notebook, leaves one that goes on no more: a rank that is alone makes another, to evaluate."""
        pipeline = self._build()
        evaluates = self._engine is not None and num_steps is None
        if evaluates and (self._engine.half_way.is_whole or dist.get_world_size() > 1):
            return self._engine
        plan = self._resolved
        self._created_lr_scheduler, self.lr_scheduler = False, None

        def scheduler(optimizer: torch.optim.Optimizer) -> Any:
            return self.create_scheduler(1 if num_steps is None else num_steps, optimizer)

        if self._engine is not None:
            self._engine.destroy()
        names_optimizer = "optimizer" in read_ds_config(self.args.deepspeed)
        if not names_optimizer:  # then it is the TrainingArguments'
            plan = replace(plan, ds_config={key: v for key, v in plan.ds_config.items() if key != "optimizer"})
        engine, _, _, lr_scheduler = initialize(
            model=pipeline,
            model_parameters=self._parameter_groups(pipeline, plan.ds_config),
            optimizer=None if names_optimizer else partial(_make_optimizer, self),
            lr_scheduler=None if "scheduler" in plan.ds_config else scheduler,
            config=plan,
        )
        if not names_optimizer:
            _keep_embeddings_wide(self, engine, pipeline)
        engine.own_loss = trainers_loss(self, pipeline._grid.data_parallel_size)
        self._engine = self.deepspeed = self.model_wrapped = engine
        self.optimizer = Stepped(engine)
        self.lr_scheduler = DeepSpeedSchedulerWrapper(lr_scheduler, [self.optimizer])
        self.accelerator._models[:] = [engine]  # or it would prepare the model itself
        self.accelerator._optimizers[:] = [self.optimizer]
        self.accelerator.deepspeed_engine_wrapped = None
        return engine

    def _parameter_groups(self, pipeline: CausalLMPipeline, ds_config: Mapping[str, Any]) -> list[dict[str, Any]]:
        return parameter_groups(self, pipeline.models, ds_config)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        if not self.is_pipeline:
            found: tuple[Any, Any] = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
            return found
        engine = self._start(max_steps)
        self.run_log = self._make_log(engine)
        self._load_state(engine, resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._waiting, self._losses, self._epoch = [], [], None
        self._begin_log(max_steps, resume_from_checkpoint)
        return engine, train_dataloader

    def _load_state(self, engine: Any, resume_from_checkpoint: str | None) -> None:
        """Go on from a checkpoint, if one is asked for."""
        if resume_from_checkpoint is not None:
            from transformers.integrations.deepspeed import deepspeed_load_checkpoint

            # Trainer draws the order of the data, and restores the state then.
            with torch.random.fork_rng(devices=[]), naming_the_one_before(Path(resume_from_checkpoint)):
                deepspeed_load_checkpoint(engine, resume_from_checkpoint)
            if engine.global_steps != self.state.global_step:
                raise ValueError(
                    f"{resume_from_checkpoint} was saved in the middle of a step: it has the weights of step "
                    f"{engine.global_steps} and the trainer's state of step {self.state.global_step}; go on from "
                    "another one, and save in on_step_end."
                )

    # -- data: a share for each pipeline, not for each rank ------------------------------------------------------

    def _read_as_pipelines(self) -> None:
        """Have accelerate share data out to pipelines and gather from them: also where loaders are a subclass's."""
        accelerator = self.accelerator

        def shares() -> ReplicaShares:
            self._build()
            return self._shares

        def prepare(loader: DataLoader[Any], *_: Any, **__: Any) -> DataLoader[Any]:
            own = shares()
            trains = not isinstance(loader.sampler, SequentialSampler) if self._reads_for is None else self._reads_for
            seed = self.args.seed if self._resolved.stages > 1 else None
            return own.prepare(accelerator, loader, self.args.dataloader_num_workers, trains=trains, seed=seed)

        accelerator.prepare_data_loader = prepare
        accelerator.gather = lambda *args, **kwargs: shares().gather(*args, **kwargs)
        self.gather_function = lambda *args, **kwargs: shares().gather_for_metrics(*args, **kwargs)
        accelerator.gather_for_metrics = self.gather_function

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> DataLoader[Any]:
        if not self.is_pipeline:
            plain: DataLoader[Any] = super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)
            return plain
        self._build()
        self._reads_for = bool(args[1] if len(args) > 1 else kwargs.get("is_training", False))
        try:
            dataset = self._shares.take(dataset, description, batch_size, trains=self._reads_for)
            loader: DataLoader[Any] = super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)
        finally:
            self._reads_for = None
        return loader

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        if not self.is_pipeline:
            return int(super().get_total_train_batch_size(args))
        replicas = self._build()._grid.data_parallel_size
        return int(self._train_batch_size * args.gradient_accumulation_steps * replicas)

    def get_tp_size(self) -> int:
        """1 in a pipeline, whose replicas are counted and not its ranks, with slices of layers as without."""
        return 1 if self.is_pipeline else int(super().get_tp_size())

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; another run with the same ``output_dir`` is refused meanwhile.

        With ``resume_from_checkpoint=True`` a pipeline goes on from the newest complete checkpoint.
        """
        resume, *rest = args or (kwargs.pop("resume_from_checkpoint", None),)
        with claimed(self.args.output_dir) if self.args.deepspeed else nullcontext():
            if not self.is_pipeline:
                refuse_pipelines(resume, Path(self.args.output_dir))
                return super().train(resume, *rest, **kwargs)
            if resume:
                if resume is True:
                    resume = newest_complete(Path(self.args.output_dir), tells=self.args.process_index == 0)
                else:
                    resume = checked(Path(resume))
                resume = with_training(resume)
            with watched(self.args):
                return super().train(resume, *rest, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Micro-batches wait for the last of their step; then all of them are trained on."""
        if not self.is_pipeline:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        nothing = torch.zeros((), device=self.args.device)
        self._waiting.append(without_extras(inputs))
        if not self.accelerator.gradient_state.sync_gradients:
            return nothing
        batches, self._waiting = self._waiting, []
        engine = self._engine
        engine.module.train()
        if len(batches) > engine.micro_batches:
            logger.warning(
                "step %d: the data of the epoch before ended with %d micro-batches, too few for a step: left out",
                *(self.state.global_step + 1, len(batches) - engine.micro_batches),
            )
            batches = batches[-engine.micro_batches :]
        batches += [FILLER] * (engine.micro_batches - len(batches))  # the last step of an epoch
        self._rate = float(engine.get_lr()[0])  # some optimizers keep it in a tensor, which the step changes
        if self._epoch is None:
            loss = engine.train_batch(iter(batches))
        else:
            steps = self._epoch[1]
            loss = engine.train_batch(steps)
            steps.trained()
        self._losses.append(loss)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            get_accelerator().empty_cache()
        assert self.run_log is not None
        seconds = time.perf_counter() - self._step_begun
        self.run_log.add_step(self.state.global_step + 1, seconds, loss, engine.step_tokens)
        return nothing  # the loss is asked for when it is logged: a pipeline without a flush does not have it yet

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_pipeline and (self.control.should_log or self.control.should_save):
            self._settle_losses(tr_loss)
            grad_norm = self._engine.grad_norm()
            if self.run_log is not None and not self.control.should_log:
                self.run_log.tell_tokens(self.state.global_step)
        with ExitStack() as stack:
            if self.is_pipeline and self.control.should_save:
                folder = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
                stack.enter_context(_naming(folder))
                stack.enter_context(naming_the_one_before(folder))
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def get_num_trainable_parameters(self) -> int:
        """Count those of the whole model, also when ``self.model`` is a stage of it."""
        if self.pipeline is None:
            return int(super().get_num_trainable_parameters())
        return int(unwrapped(self.model).num_parameters(only_trainable=True))

    def store_flos(self) -> None:
        """Trainer adds up those of all ranks, and those of one pipeline have counted the same inputs."""
        if self.pipeline is not None:
            self.current_flos /= self.pipeline.num_stages * self.pipeline.tensor_parallel
        super().store_flos()

    def _settle_losses(self, total: Tensor) -> None:
        losses, self._losses = [loss.item() for loss in self._losses], []
        finite = [loss for loss in losses if math.isfinite(loss)]
        if self.args.logging_nan_inf_filter and len(finite) < len(losses):
            finite += [sum(finite) / len(finite) if finite else 0.0] * (len(losses) - len(finite))
            losses = finite
        total += sum(losses)

    def _finalize_training(self, *args: Any) -> Any:
        self._epoch = None  # the loader's workers end with it
        if self.is_pipeline:
            ends = "ending the training (set control.should_training_stop on all ranks, after the same step)"
            # A callback may have stopped this rank alone; over the control plane the others agree on their next step.
            with WATCH.waiting(ends, EVERYONE):
                dist.barrier()
            self._settle_losses(self._tr_loss)
        finish = getattr(self.model_wrapped, "finish_averaging", None)
        if finish is not None:
            finish(self._held_out_loss if self.eval_dataset is not None else None)
            _warn_of_own_best(self)
        log, steps = self.run_log, self.state.global_step
        if log is not None:
            log.leave(steps)
        output = super()._finalize_training(*args)
        if log is None:
            return output
        samples = (steps - log.first_step) * self._train_batch_size * self.args.gradient_accumulation_steps
        samples *= self._shares.replicas
        tokens = log.tally.all_tokens - log.first_tokens
        summary = log.summary(steps, round(tokens / max(samples, 1)), output.training_loss)
        if summary is not None:
            logger.info("%s", table(summary))
            log.write_page()
            log.warn_of_the_end()
        return output

    def _held_out_loss(self) -> float:
        """Of the first evaluation dataset, beside what callbacks and logs see."""
        dataset = self.eval_dataset
        if isinstance(dataset, Mapping):
            dataset = next(iter(dataset.values()))
        loader = self.get_eval_dataloader(dataset)
        found = self.evaluation_loop(loader, "Combining the last rounds", prediction_loss_only=True)
        return float(found.metrics["eval_loss"])

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Of a pipeline the engine clips, and its norm is asked for when it is logged."""
        return None if self.is_pipeline else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return None if self.is_pipeline else super()._get_grad_norm(model, grad_norm)

    def _get_learning_rate(self) -> float:
        """That the last step had."""
        if not self.is_pipeline or self._rate is None:
            return float(super()._get_learning_rate())
        return float(self._rate)

    # -- records of the run --------------------------------------------------------------------------------------

    def _make_log(self, engine: Any) -> RunLog:
        return RunLog(engine, Path(self.args.output_dir), self._resolved, engine.module.control)

    def _begin_log(self, num_steps: int, resume_from_checkpoint: str | None) -> None:
        log = self.run_log
        assert log is not None
        with log.control.together("reading the records of the run"):
            if log.is_first and resume_from_checkpoint is not None:  # which may lie elsewhere, and does not say
                log.tally.tokens = tokens_so_far(Path(resume_from_checkpoint).parent, self._engine.global_steps)
        log.begin(max(num_steps, 1))  # of max_steps=0, too, Trainer makes one

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        self._step_begun = time.perf_counter()
        read = super().get_batch_samples
        if not self._reads_ahead:
            self._epoch = None
            return read(epoch_iterator, num_batches, *args, **kwargs)
        if self._epoch is None or self._epoch[0] is not epoch_iterator:
            engine = self._engine
            engine.asynchronous.steps.forget()
            steps = StepsOfEpoch(
                lambda number: read(epoch_iterator, number, *args, **kwargs),
                engine.micro_batches,
                fills=has_length(self.callback_handler.train_dataloader),
            )
            self._epoch = epoch_iterator, steps
        return self._epoch[1].samples(num_batches)

    @property
    def _reads_ahead(self) -> bool:
        """Whether the engine agrees on a step while the one before runs, and nobody changes the inputs on their way."""
        is_own = type(self).training_step is PipelineTraining.training_step
        return self.is_pipeline and is_own and self._engine.asynchronous is not None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        of_loss = self.is_pipeline and is_computing(self)
        if of_loss and self._resolved.stages > 1 and dist.get_rank() > 0 and not self._has_warned_of_logs:
            self._has_warned_of_logs = True
            logger.warning(
                "compute_loss logs %s on rank %d, which has the last stage, and trackers and trainer_state.json get "
                "what rank 0 logs: print it, or write it to a file of your own.",
                *(", ".join(logs), dist.get_rank()),
            )
        super().log(logs, *args, **kwargs)
        if of_loss or self.run_log is None or not self.is_in_train:
            return
        step, epoch = self.state.global_step, self.state.epoch
        if "loss" in logs:
            self.run_log.report(step, epoch, logs.get("learning_rate"), logs["loss"], logs.get("grad_norm"))
        elif found := {key: value for key, value in logs.items() if key.startswith("eval_")}:
            if isinstance(self.eval_dataset, Mapping):  # the records' held-out loss is that of the first
                first = f"eval_{next(iter(self.eval_dataset))}_loss"
                found |= {"eval_loss": found[first]} if first in found else {}
            if "eval_loss" in found:
                found["perplexity"] = float(torch.tensor(found["eval_loss"]).exp())
            self.run_log.tell_evaluation({"step": step, "epoch": epoch}, found)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_pipeline:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        self._start(None)
        log = self.run_log if self.is_in_train else None
        if log is not None:
            log.take_time()
        only_loss = kwargs.get("prediction_loss_only", args[1] if len(args) > 1 else None)
        only_loss = self.args.prediction_loss_only if only_loss is None else only_loss
        preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        try:
            ahead = EvaluatedAhead(self._engine, dataloader, None if only_loss else Seeing(preprocess), self._shares)
            return super().evaluation_loop(ahead, *args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics = preprocess
            self.callback_handler.eval_dataloader = dataloader  # to read it is no evaluation of all ranks
            if log is not None:
                log.skip_time()  # evaluating is not training

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if not self.is_pipeline:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        loss, seen = inputs.outcome
        device, labels = self.args.device, inputs.get("labels")
        if labels is None:
            loss = None
        else:
            if averages_alone(type(self)):
                loss = loss if count_label_tokens(labels) else torch.zeros_like(loss)
            elif self.args.average_tokens_across_devices:
                loss = self._shares.share_of_loss(loss, labels, device)
            loss = loss.float().to(device)
        if prediction_loss_only:
            return loss, None, None
        seen = recursively_apply(lambda tensor: tensor.to(device), seen)
        return loss, seen, None if labels is None else labels.to(device)

    # -- files ---------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_pipeline:
            super().save_model(output_dir, _internal_call)
            return
        directory = self.args.output_dir if output_dir is None else output_dir
        pipeline = self._build()
        export(pipeline, directory, pipeline.control, tokenizer=_saved_beside(self))
        arguments = f"{directory}/training_args.bin"
        with pipeline.control.together(f"saving to {directory}"), naming_what_torch_saves(arguments):
            if self.args.should_save:
                torch.save(self.args, arguments)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_rng_state(self, output_dir: str) -> None:
        if not self.is_pipeline:
            super()._save_rng_state(output_dir)
            return
        # Of all ranks before rank 0 writes the state, which makes it complete, and deletes older checkpoints.
        what = f"the random state of rank {self.args.process_index} in {output_dir}"
        with self._build().control.together(f"saving to {output_dir}"), naming_what_torch_saves(what):
            super()._save_rng_state(output_dir)


class PacelineTrainer(PipelineTraining, Trainer):
    """``transformers.Trainer``; with ``"paceline": {"pipeline": …}`` in the DeepSpeed JSON its model is a pipeline.

    Example::

        args = TrainingArguments(deepspeed="ds_configs/pp2.json", gradient_accumulation_steps=8, ...)
        trainer = PacelineTrainer(model=model, args=args, train_dataset=..., eval_dataset=...)
        trainer.train()

    Raises:
        ValueError: the JSON asks for a pipeline and the script for what none can do.
    """


def _given(args: TrainingArguments) -> set[str]:
    """Flags that are not left at what they are by themselves, and the batch, which is Trainer's to say."""
    found = {f.name for f in fields(args) if f.init and getattr(args, f.name) != f.default}
    return found | set(_BATCHES)


def _warn_of_own_best(trainer: Trainer) -> None:
    averager, best = trainer.model_wrapped.averager, trainer.state.best_model_checkpoint
    if averager is None or not trainer.args.load_best_model_at_end or best is None or averager.num_shares == 1:
        return
    if trainer.is_world_process_zero():
        logger.warning(
            "load_best_model_at_end is True: island %d goes back from the last average to %s, the best of its own "
            "checkpoints, and its model differs from that of the other islands; leave it out to have the average.",
            *(averager.island, best),
        )


def _warn_of_idling(resolved: RunPlan) -> None:
    stages, micro_batches = resolved.stages, resolved.micro_batches
    if stages > 1 and micro_batches < FEW_MICRO_BATCHES * stages and dist.get_rank() == 0:
        logger.warning(
            "a pipeline of %d stages with gradient_accumulation_steps %d idles for %.0f %% of a step: make "
            "per_device_train_batch_size smaller and gradient_accumulation_steps larger (%d)",
            *(stages, micro_batches, 100 * (stages - 1) / (micro_batches + stages - 1), 4 * stages),
        )


def _saved_beside(trainer: Any) -> Any:
    return trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)


def _count_steps(args: TrainingArguments, dataset: Any, resolved: RunPlan) -> int:
    """Of the whole training, as Trainer counts them."""
    if args.max_steps > 0:
        return int(args.max_steps)
    try:
        rows = len(dataset)
    except TypeError:
        raise ValueError("the data have no length: give max_steps.") from None
    batch = args.per_device_train_batch_size * resolved.data_parallel
    batches = rows // batch if args.dataloader_drop_last else math.ceil(rows / batch)
    steps: int = math.ceil(args.num_train_epochs * max(1, math.ceil(batches / resolved.micro_batches)))
    return steps
