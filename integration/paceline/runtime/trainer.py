"""Hugging Face's Trainer, whose model is a pipeline if the DeepSpeed JSON says so.

Everything a script knows of its Trainer stays: arguments, callbacks, logging, evaluation, ``compute_metrics``,
checkpoints, ``resume_from_checkpoint``. What changes is who computes: a step's micro-batches go to the engine together,
each pipeline has a share of the data instead of each rank, and stages write their part of what is saved.

The learning rate's scheduler, the loss scale and clipping are the engine's, as they are DeepSpeed's in a plain Trainer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.data_loader import IterableDatasetShard, prepare_data_loader
from accelerate.utils import recursively_apply
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import seed_worker

from ..averaging.islands import combining_fault
from ..comm.control import ControlPlane
from ..config import PacelineConfig, Resolved, read_ds_config
from ..config.section import value_at
from ..data.packing import require_packable
from ..hf.check import require_supported
from ..hf.masks import IGNORED
from ..hf.peft import is_peft_model, unwrapped
from ..patches.repairs import repair_deepspeed
from ..report.metrics import table
from ..report.run_records import tokens_so_far
from ..supervise.output_lock import claimed
from .builder import build_pipeline
from .initialize import initialize, start_distributed
from .micro_batches import FILLER, count_label_tokens
from .model_export import export
from .module import CausalLMPipeline, config_of
from .run_log import RunLog
from .startup import plan_for
from .trainer_loss import home_of, refused_loss, trainers_loss
from .training_arguments import count_ranks

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

logger = logging.getLogger("paceline")

FEW_MICRO_BATCHES = 2
"""Times the stages: with fewer micro-batches a step, a pipeline idles for more than a third of it."""

_ASKED = 'the JSON has "paceline": {"pipeline": ...}'
_OWN = ("transformers.trainer", "trl.trainer.sft_trainer")
"""Modules whose methods a pipeline stands in for; their loss is the model's."""

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys of a batch that say again what its position_ids say: where samples that were packed begin."""

_BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps")


class PipelineTraining:
    """Makes a Trainer one of pipelines; comes before its class::

        class MyPipelineTrainer(PipelineTraining, MyTrainer): ...

    Without ``"paceline": {"pipeline": …}`` in the DeepSpeed JSON it is that Trainer, whose DeepSpeed reads the other
    parts of the section (experts, natural gradients, averaging between islands).

    Raises:
        ValueError: the JSON asks for a pipeline and the script for what none can do (:func:`refused`).
    """

    pipeline: CausalLMPipeline | None = None
    """What is trained, once training or evaluating has begun."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        repair_deepspeed()
        for given in (*args, *kwargs.values()):
            if isinstance(given, TrainingArguments):
                if asks_for_pipeline(given) and (fault := refused_kind(type(self))):
                    raise ValueError(fault)
                count_ranks(given)
        super().__init__(*args, **kwargs)
        if self.args.deepspeed and not dist.is_initialized():  # type: ignore[attr-defined]
            start_distributed()  # or DeepSpeed would look for MPI where one process started itself
        self._engine: Any = None
        self._resolved: Resolved | None = None
        self._waiting: list[Any] = []
        self._losses: list[Tensor] = []
        self._rate: float | None = None
        self._rows_at_end = 0
        self._log: RunLog | None = None
        if self.is_pipeline and (fault := refused(self)):
            raise ValueError(fault)
        self._check_combining()

    def _check_combining(self: Any) -> None:
        section = read_ds_config(self.args.deepspeed).get("paceline") if self.args.deepspeed is not None else None
        if isinstance(section, dict):
            config = PacelineConfig.of({"paceline": section})
            if fault := combining_fault(config, self.eval_dataset is not None, "give the Trainer an eval_dataset"):
                raise ValueError(fault)

    @cached_property
    def is_pipeline(self: Any) -> bool:
        """Whether the JSON asks for a pipeline."""
        return asks_for_pipeline(self.args)

    # -- what is built -------------------------------------------------------------------------------------------

    def _build(self: Any) -> CausalLMPipeline:
        """The pipeline of ``self.model``; collective, the first time."""
        if self.pipeline is not None and self._built_of is self.model:
            return self.pipeline
        start_distributed()
        model = self.model
        control = ControlPlane.create()
        ds_config = read_ds_config(self.args.deepspeed)
        PacelineConfig.of(ds_config)
        with control.together("reading the model's config"):
            hf_config = config_of(model)
            require_supported(hf_config)
            if getattr(self, "padding_free", False):
                require_packable(hf_config, "packing or padding_free", "leave them out")
        steps = None if self.train_dataset is None else self._num_steps
        resolved = plan_for(
            hf_config,
            ds_config,
            args=self.args,
            given=_given(self.args),
            num_steps=steps,
            has_adapters=is_peft_model(model),
        )
        if resolved.micro_batches != self.args.gradient_accumulation_steps:
            raise ValueError(
                f"gradient_accumulation_steps is {resolved.micro_batches} in the JSON and "
                f'{self.args.gradient_accumulation_steps} in the TrainingArguments: write "auto" in the JSON, or the '
                "same number."
            )
        if fault := _refused_shape(self.args, resolved):
            raise ValueError(fault)
        _warn_of_idling(resolved)
        whole = unwrapped(model)
        if hasattr(self, "router_aux_loss_coef") and hasattr(whole, "router_aux_loss_coef"):
            whole.router_aux_loss_coef = self.router_aux_loss_coef  # TRL's SFTConfig has one
        recomputes = getattr(self.args, "activation_checkpointing", None) or self.args.gradient_checkpointing
        self.pipeline = build_pipeline(model, hf_config, resolved, control, gradient_checkpointing=bool(recomputes))
        if resolved.stages > 1:
            for part in (model, whole):
                part.generate, part.save_pretrained = _WholeModelOnly("generate"), _WholeModelOnly("save_pretrained")
        self._resolved, self._built_of, self._engine = resolved, model, None
        return self.pipeline

    def _num_steps(self: Any, resolved: Resolved) -> int:
        """Of the whole training, as Trainer counts them."""
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        try:
            rows = len(self.train_dataset)
        except TypeError:
            raise ValueError("the data have no length: give max_steps.") from None
        batch = self.args.per_device_train_batch_size * resolved.data_parallel
        batches = rows // batch if self.args.dataloader_drop_last else math.ceil(rows / batch)
        return math.ceil(self.args.num_train_epochs * max(1, math.ceil(batches / resolved.micro_batches)))

    def _start(self: Any, num_steps: int | None) -> Any:
        """The engine, made anew for each training; evaluating takes what is there."""
        pipeline = self._build()
        if self._engine is not None and num_steps is None:
            return self._engine
        ds_config = self._resolved.ds_config
        self._created_lr_scheduler, self.lr_scheduler = False, None

        def scheduler(optimizer: torch.optim.Optimizer) -> Any:
            return self.create_scheduler(num_steps or 1, optimizer)

        if self._engine is not None:
            self._engine.destroy()
        names_optimizer = "optimizer" in read_ds_config(self.args.deepspeed)
        if not names_optimizer:  # then it is the TrainingArguments'
            ds_config = {key: value for key, value in ds_config.items() if key != "optimizer"}
        engine, _, _, lr_scheduler = initialize(
            model=pipeline,
            model_parameters=self._parameter_groups(pipeline, ds_config),
            optimizer=None if names_optimizer else self._make_optimizer,
            lr_scheduler=None if "scheduler" in ds_config else scheduler,
            config=ds_config,
        )
        engine.own_loss = trainers_loss(self, pipeline._grid.data_parallel_size)
        self._engine = self.deepspeed = self.model_wrapped = engine
        self.optimizer = _Stepped(engine)
        self.lr_scheduler = DeepSpeedSchedulerWrapper(lr_scheduler, [self.optimizer])
        self.accelerator._models[:] = [engine]  # or it would prepare the model itself
        self.accelerator._optimizers[:] = [self.optimizer]
        self.accelerator.deepspeed_engine_wrapped = None
        return engine

    def _parameter_groups(self: Any, pipeline: CausalLMPipeline, ds_config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As Trainer groups them: what decays, and norms and biases, which do not."""
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for model in pipeline.models:
            decays = set(self.get_decay_parameter_names(model))
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    groups[name in decays].append(parameter)
        decay = value_at(ds_config, "optimizer.params.weight_decay")
        decay = self.args.weight_decay if decay is None else decay
        return [{"params": groups[True], "weight_decay": decay}, {"params": groups[False], "weight_decay": 0.0}]

    def _make_optimizer(self: Any, groups: Any) -> torch.optim.Optimizer:
        made, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        options = {key: value for key, value in options.items() if key != "fused"}  # steps masters of its own
        name = str(getattr(self.args.optim, "value", self.args.optim))
        is_plain = isinstance(made, type) and issubclass(made, torch.optim.Optimizer)
        if not is_plain or {"params", "model", "optimizer_dict"} & options.keys() or "schedule_free" in name:
            raise ValueError(
                f"optim is {name!r} and {_ASKED}: it is made of the whole model, or told of each training and "
                "evaluation, and a stage has its own parameters only; choose one of torch.optim's, such as "
                "adamw_torch, or name one in the JSON."
            )
        optimizer: torch.optim.Optimizer = made(groups, **options)
        return optimizer

    def _prepare_for_training(
        self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        if not self.is_pipeline:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore
        engine = self._start(max_steps)
        if resume_from_checkpoint is not None:
            from transformers.integrations.deepspeed import deepspeed_load_checkpoint

            deepspeed_load_checkpoint(engine, resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._waiting, self._losses = [], []
        self._begin_log(engine, max_steps)
        return engine, train_dataloader

    # -- data: a share for each pipeline, not for each rank ------------------------------------------------------

    def _get_dataloader(
        self: Any, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> DataLoader:
        if self.is_pipeline:
            grid = self._build()._grid
            self.accelerator.prepare_data_loader = self._prepare_data_loader
            self.accelerator.gather = self._gather
            self.accelerator.gather_for_metrics = self.gather_function = self._gather_for_metrics
            if isinstance(dataset, IterableDataset) and grid.data_parallel_size > 1:
                if not (args[1] if len(args) > 1 else kwargs.get("is_training", False)):
                    raise ValueError(
                        f"the data for {description.lower()} are a stream and there are {grid.data_parallel_size} "
                        "pipelines side by side: rows that fill the last batch up would count twice; give data with a "
                        "length, or as many stages as ranks."
                    )
                # Batch by batch: accelerate would give each pipeline files of its own, and not equally many batches.
                replicas, own = grid.data_parallel_size, grid.data_parallel_id
                dataset = IterableDatasetShard(dataset, batch_size, num_processes=replicas, process_index=own)
        return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)  # type: ignore[misc]

    def _prepare_data_loader(self: Any, loader: Any, device_placement: Any = None, **kwargs: Any) -> Any:
        """As accelerate's, for as many readers as there are pipelines. Batches stay on the CPU, for the engine."""
        accelerator, grid = self.accelerator, self.pipeline._grid
        if loader.worker_init_fn is not None:  # Trainer's: ranks of a pipeline are to read the same
            workers = self.args.dataloader_num_workers
            loader.worker_init_fn = partial(seed_worker, num_workers=workers, rank=grid.data_parallel_id)
        is_shared_out = isinstance(loader.dataset, IterableDatasetShard)
        prepared = prepare_data_loader(
            loader,
            num_processes=1 if is_shared_out else grid.data_parallel_size,
            process_index=0 if is_shared_out else grid.data_parallel_id,
            split_batches=accelerator.split_batches,
            put_on_device=False,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def _gather(self: Any, data: Any) -> Any:
        """Of all pipelines, one after another; their stages have the same."""
        grid = self.pipeline._grid
        if grid.data_parallel_size == 1:
            return data
        group = grid.get_data_parallel_group()

        def gather(tensor: Tensor) -> Tensor:
            own = (tensor if tensor.dim() else tensor[None]).contiguous()
            found = [torch.empty_like(own) for _ in range(grid.data_parallel_size)]
            dist.all_gather(found, own, group=group)
            return torch.cat(found)

        return recursively_apply(gather, data, error_on_other_type=True)

    def _gather_for_metrics(self: Any, data: Any, use_gather_object: bool = False) -> Any:
        """And without what only fills the last batch up."""
        data = self._gather(data)
        if not self._rows_at_end:
            return data
        return recursively_apply(lambda tensor: tensor[: self._rows_at_end], data)

    def get_total_train_batch_size(self: Any, args: TrainingArguments) -> int:
        if not self.is_pipeline:
            return super().get_total_train_batch_size(args)  # type: ignore[misc]
        replicas = self._build()._grid.data_parallel_size
        return int(self._train_batch_size * args.gradient_accumulation_steps * replicas)

    # -- training ------------------------------------------------------------------------------------------------

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; another run with the same ``output_dir`` is refused meanwhile."""
        with claimed(self.args.output_dir) if self.args.deepspeed else nullcontext():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def training_step(self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Micro-batches wait for the last of their step; then all of them are trained on."""
        if not self.is_pipeline:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        nothing = torch.zeros((), device=self.args.device)
        self._waiting.append(_without_extras(inputs))
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
        self._rate = engine.get_lr()[0]
        self._losses.append(engine.train_batch(iter(batches)))
        self._count_step(engine)
        return nothing  # the loss is asked for when it is logged: a pipeline without a flush does not have it yet

    def _maybe_log_save_evaluate(self: Any, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_pipeline and (self.control.should_log or self.control.should_save):
            self._settle_losses(tr_loss)
            grad_norm = self._engine.grad_norm()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)  # type: ignore[misc]

    def _settle_losses(self: Any, total: Tensor) -> None:
        losses, self._losses = [loss.item() for loss in self._losses], []
        finite = [loss for loss in losses if math.isfinite(loss)]
        if self.args.logging_nan_inf_filter and len(finite) < len(losses):
            finite += [sum(finite) / len(finite) if finite else 0.0] * (len(losses) - len(finite))
            losses = finite
        total += sum(losses)

    def _finalize_training(self: Any, *args: Any) -> Any:
        if self.is_pipeline:
            self._settle_losses(self._tr_loss)
        finish = getattr(self.model_wrapped, "finish_averaging", None)
        if finish is not None:
            finish(self._held_out_loss if self.eval_dataset is not None else None)
        if self._log is not None:
            self._log.leave(self.state.global_step)
        output = super()._finalize_training(*args)  # type: ignore[misc]
        if self._log is not None:
            self._end_log(output.training_loss)
        return output

    def _held_out_loss(self: Any) -> float:
        """Of the first evaluation dataset, beside what callbacks and logs see."""
        dataset = self.eval_dataset
        if isinstance(dataset, Mapping):
            dataset = next(iter(dataset.values()))
        loader = self.get_eval_dataloader(dataset)
        found = self.evaluation_loop(loader, "Combining the last rounds", prediction_loss_only=True)
        return float(found.metrics["eval_loss"])

    def _clip_grad_norm(self: Any, model: nn.Module) -> Any:
        """Of a pipeline the engine clips, and its norm is asked for when it is logged."""
        return None if self.is_pipeline else super()._clip_grad_norm(model)  # type: ignore[misc]

    def _get_grad_norm(self: Any, model: nn.Module, grad_norm: Any = None) -> Any:
        return None if self.is_pipeline else super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    def _get_learning_rate(self: Any) -> float:
        """That the last step had."""
        if not self.is_pipeline or self._rate is None:
            return super()._get_learning_rate()  # type: ignore[misc]
        return float(self._rate)

    # -- records of the run --------------------------------------------------------------------------------------

    def _begin_log(self: Any, engine: Any, num_steps: int) -> None:
        run_dir, section = Path(self.args.output_dir), PacelineConfig.of(read_ds_config(self.args.deepspeed))
        self._log = RunLog(engine, run_dir, section, self._resolved, self.pipeline.control)
        self._log.begin(num_steps, engine.global_steps)
        self._tokens = self._first_tokens = tokens_so_far(run_dir) if self._log.is_first else 0
        self._steps_untold = self._tokens_untold = 0
        self._evaluation: dict[str, float] | None = None

    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._step_begun = time.perf_counter()
        return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    def _count_step(self: Any, engine: Any) -> None:
        self._steps_untold += 1
        self._tokens_untold += engine.step_tokens
        self._tokens += engine.step_tokens
        if self._log.is_first:
            self._log.add_step(self.state.global_step + 1, time.perf_counter() - self._step_begun)

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        if self._log is None or not self.is_in_train:
            return
        where = {"step": self.state.global_step, "epoch": self.state.epoch}
        if "loss" in logs:
            told = {key: logs.get(key) for key in ("loss", "learning_rate", "grad_norm")}
            steps, tokens = self._steps_untold, self._tokens_untold
            self._steps_untold = self._tokens_untold = 0
            self._log.report({**where, **told, "tokens": self._tokens}, steps, tokens)
        elif found := {key: value for key, value in logs.items() if key.startswith("eval_")}:
            if "eval_loss" in found:
                found["perplexity"] = float(torch.tensor(found["eval_loss"]).exp())
            self._evaluation = found
            self._log.tell({**where, **found})

    def _end_log(self: Any, train_loss: float) -> None:
        log, steps = self._log, self.state.global_step
        samples = (steps - log.first_step) * self._train_batch_size * self.args.gradient_accumulation_steps
        samples *= self.pipeline._grid.data_parallel_size
        summary = log.summary(
            steps=steps,
            tokens=self._tokens,
            first_tokens=self._first_tokens,
            sequence_length=round((self._tokens - self._first_tokens) / max(samples, 1)),
            train_loss=train_loss,
            evaluation=self._evaluation,
        )
        if summary is not None:
            logger.info("%s", table(summary))
            log.write_page()

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluation_loop(self: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_pipeline:
            return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        self._start(None)
        is_timed = self._log is not None and self.is_in_train
        if is_timed:
            self._log.take_time()
        only_loss = kwargs.get("prediction_loss_only", args[1] if len(args) > 1 else None)
        only_loss = self.args.prediction_loss_only if only_loss is None else only_loss
        preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        try:
            see = None if only_loss else _Seeing(preprocess)
            return super().evaluation_loop(_Ahead(self, dataloader, see), *args, **kwargs)  # type: ignore[misc]
        finally:
            self.preprocess_logits_for_metrics = preprocess
            if is_timed:
                self._log.skip_time()  # evaluating is not training

    def prediction_step(
        self: Any, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if not self.is_pipeline:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        loss, seen = inputs.outcome
        device, labels = self.args.device, inputs.get("labels")
        loss = None if labels is None else self._share_of_loss(loss, labels).float().to(device)
        if prediction_loss_only:
            return loss, None, None
        seen = recursively_apply(lambda tensor: tensor.to(device), seen)
        return loss, seen, None if labels is None else labels.to(device)

    def _share_of_loss(self: Any, loss: Tensor, labels: Tensor) -> Tensor:
        """Of pipelines side by side: their mean is that of all label tokens, as Trainer has it."""
        replicas = self.pipeline._grid.data_parallel_size
        if replicas == 1 or not self.args.average_tokens_across_devices:
            return loss
        tokens = count_label_tokens(labels)
        counted = self._gather(torch.tensor([tokens], device=self.args.device)).sum().cpu()
        return loss.nan_to_num() * tokens * replicas / counted

    # -- files ---------------------------------------------------------------------------------------------------

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_pipeline:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        directory = self.args.output_dir if output_dir is None else output_dir
        pipeline = self._build()
        export(pipeline, directory, pipeline.control, tokenizer=_saved_beside(self))
        if self.args.should_save:
            torch.save(self.args, f"{directory}/training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


class PacelineTrainer(PipelineTraining, Trainer):
    """``transformers.Trainer``, with pipelines::

    trainer = PacelineTrainer(model=model, args=TrainingArguments(deepspeed="ds_configs/pp2.json", ...), ...)
    """


_NOT_COMPILED = (
    "torch.compile takes a forward and its backward as one, and a stage runs the forwards and backwards of several "
    "micro-batches in an order of its own, layer by layer (fused attention needs no compiling: attn_implementation)"
)


def asks_for_pipeline(args: TrainingArguments) -> bool:
    """Whether the DeepSpeed JSON has ``"paceline": {"pipeline": …}``."""
    if args.deepspeed is None:
        return False
    section = read_ds_config(args.deepspeed).get("paceline")
    return isinstance(section, dict) and "pipeline" in section


_OTHER_TRAINING = {
    "dpo": "it compares two answers to a prompt, under the model and under a second one for reference",
    "kto": "it weighs answers under the model against those under a second one for reference",
    "grpo": "it generates with the whole model between its steps",
    "rloo": "it generates with the whole model between its steps",
    "reward": "its model has a head for one number in place of the vocabulary, and compares two answers",
    "distillation": "it needs the logits of a second model beside those of the first",
}


def refused_kind(kind: type) -> str:
    """Why a Trainer of TRL's, or one derived from it, is none of pipelines; empty if it may be."""
    for one in kind.__mro__:
        name = one.__module__.rpartition(".")[2]
        is_base = name == "base_trainer" or one.__module__ in _OWN
        if one.__module__.startswith("trl.") and name.endswith("_trainer") and not is_base:
            why = _OTHER_TRAINING.get(name.removesuffix("_trainer"), "its loss is another one")
            return (
                f"{one.__name__} trains otherwise than by a text's next tokens and {_ASKED}: {why}; take "
                'PacelineSFTTrainer or PacelineTrainer, or leave "pipeline" out.'
            )
    return ""


def refused(trainer: Any) -> str:
    """What a script asks for that a pipeline cannot do: value, rule and remedy; empty if there is nothing."""
    args = trainer.args
    named = [
        (args.neftune_noise_alpha, "neftune_noise_alpha", "the embedding is on one stage only"),
        (args.auto_find_batch_size, "auto_find_batch_size", "stages would run out of memory one by one"),
        (getattr(args, "torch_compile", False), "torch_compile", _NOT_COMPILED),
        (getattr(args, "bf16_full_eval", False), "bf16_full_eval", "stages evaluate in the dtype they train in"),
        (getattr(args, "fp16_full_eval", False), "fp16_full_eval", "stages evaluate in the dtype they train in"),
        (args.eval_use_gather_object, "eval_use_gather_object", "pipelines gather tensors only"),
        (getattr(args, "activation_offloading", False), "activation_offloading", "stages keep what they compute"),
        (args.batch_eval_metrics, "batch_eval_metrics", "several batches are under way at a time"),
        (trainer.model_init, "model_init", "the model is cut once"),
    ]
    for value, name, why in named:
        if value:
            return f"{name} is {value!r} and {_ASKED}: {why}; leave one of them out."
    chosen = [
        (args.lr_scheduler_type, ("reduce_lr_on_plateau", "greedy"), "lr_scheduler_type", "no metric moves the rate"),
        (getattr(args, "loss_type", None), ("dft",), "loss_type", "the loss is the model's own"),
        (getattr(args, "train_sampling_strategy", None), ("batch_rebalance",), "train_sampling_strategy",
         "it gives each rank other samples, and a pipeline's ranks read the same"),
    ]  # fmt: skip
    for value, cannot, name, why in chosen:
        if value is not None and str(getattr(value, "value", value)) in cannot:
            return f"{name} is {str(getattr(value, 'value', value))!r} and {_ASKED}: {why}; choose another one."
    if fault := _refused_methods(type(trainer)):
        return fault
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        return (
            f"optimizers are given and {_ASKED}: they would be of the whole model, and each stage trains its own part; "
            "name them in the TrainingArguments (optim, lr_scheduler_type) or in the JSON, or give "
            "optimizer_cls_and_kwargs."
        )
    return ""


def _refused_methods(kind: type) -> str:
    """Methods of a Trainer of one's own that a pipeline would never call."""
    order = kind.__mro__
    behind = order[order.index(PipelineTraining) + 1 :]
    asked = (
        ("create_optimizer", order, "stages have their own parameters (get_decay_parameter_names may be overridden)"),
        ("create_optimizer_and_scheduler", order, "stages have their own parameters"),
        ("training_step", behind, "a step's micro-batches are trained on together"),
        ("prediction_step", behind, "several batches are under way at a time"),
    )
    for name, classes, why in asked:
        home = next((one.__module__ for one in classes if name in vars(one)), _OWN[0])
        if home not in _OWN:
            return f"{home} has a {name} of its own and {_ASKED}: {why}; leave one of them out."
    if why := refused_loss(kind):
        home = home_of(kind, "compute_loss")
        return f"{home} has a compute_loss of its own and {_ASKED}: {why}; give a compute_loss_func instead."
    return ""


def _refused_shape(args: TrainingArguments, resolved: Resolved) -> str:
    """The same, of what is known once ranks are divided into stages and replicas."""
    if resolved.data_parallel > 1 and not args.average_tokens_across_devices:
        return (
            f"average_tokens_across_devices is False and there are {resolved.data_parallel} pipelines side by side: "
            "all label tokens of a step count alike; leave it at True."
        )
    sizes = resolved.schedule.micro_batch_sizes or ()
    if len(sizes) > 1:
        return (
            f"paceline.pipeline.schedule.micro_batch_sizes is {list(sizes)} under the Trainer, whose steps end short "
            "where an epoch does: leave it out, or train with paceline.launch.finetune."
        )
    return ""


class _WholeModelOnly:
    """In place of a method of the whole model, on a model that is a stage now."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"model.{self._name} was called and the model is one stage of a pipeline: write the whole one with "
            "trainer.save_model (on all ranks), and load that with from_pretrained."
        )


class _Batch(dict[str, Any]):
    """An evaluation batch, and what a pipeline makes of it."""

    outcome: tuple[Tensor, Any]


class _Seeing:
    """What an evaluation keeps of logits, on the last stage."""

    def __init__(self, preprocess: Callable[[Any, Any], Any] | None) -> None:
        self._preprocess = preprocess

    def __call__(self, logits: Tensor, labels: Tensor) -> Any:
        return logits if self._preprocess is None else self._preprocess(logits, labels)


class _Ahead:
    """A data loader of an evaluation whose batches are evaluated, several at a time, before they are handed out."""

    def __init__(self, trainer: Any, loader: Any, see: Any) -> None:
        self._trainer, self._loader, self._see = trainer, loader, see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[_Batch]:
        trainer = self._trainer
        read: list[_Batch] = []

        def batches() -> Iterator[Any]:
            for batch in self._loader:
                read.append(_Batch(batch))
                yield _with_labels(_without_extras(batch))

        # One is held back: of the last of all some rows only fill it up.
        held: _Batch | None = None
        source = batches()
        try:
            for outcome in trainer._engine.predict(source, self._see):
                if held is not None:
                    yield held
                if not read:  # a stage in the middle reads no data
                    next(source)
                held = read.pop(0)
                held.outcome = outcome
            trainer._rows_at_end = max(0, getattr(self._loader, "remainder", 0))
            if held is not None:
                yield held
        finally:
            trainer._rows_at_end = 0


class _Stepped(torch.optim.Optimizer):
    """The engine's optimizer as Trainer and callbacks see it: its groups and states; steps are taken already."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._skipped = engine.skipped_steps
        self.defaults = dict(engine.basic_optimizer.defaults)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self._engine.basic_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._engine.basic_optimizer.state

    @property
    def step_was_skipped(self) -> bool:
        before, self._skipped = self._skipped, self._engine.skipped_steps
        return bool(self._skipped > before)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def _given(args: TrainingArguments) -> set[str]:
    """Flags that are not left at what they are by themselves, and the batch, which is Trainer's to say."""
    found = {f.name for f in fields(args) if f.init and getattr(args, f.name) != f.default}
    return found | set(_BATCHES)


def _warn_of_idling(resolved: Resolved) -> None:
    stages, micro_batches = resolved.stages, resolved.micro_batches
    if stages > 1 and micro_batches < FEW_MICRO_BATCHES * stages and dist.get_rank() == 0:
        logger.warning(
            "a pipeline of %d stages with gradient_accumulation_steps %d idles for %.0f %% of a step: make "
            "per_device_train_batch_size smaller and gradient_accumulation_steps larger (%d)",
            *(stages, micro_batches, 100 * (stages - 1) / (micro_batches + stages - 1), 4 * stages),
        )


def _without_extras(batch: Any) -> dict[str, Any]:
    """Of Trainer's batch what concerns the model."""
    told_again = _PACKED if "position_ids" in batch else ()
    return {
        name: value
        for name, value in batch.items()
        if value is not None and name != "num_items_in_batch" and name not in told_again
    }


def _with_labels(batch: dict[str, Any]) -> dict[str, Any]:
    return batch if "labels" in batch else {**batch, "labels": torch.full_like(batch["input_ids"], IGNORED)}


def _saved_beside(trainer: Any) -> Any:
    return trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
