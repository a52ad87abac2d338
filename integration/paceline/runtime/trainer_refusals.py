"""What a script asks of its Trainer that a pipeline cannot do: value, rule and remedy."""

from __future__ import annotations

import os

from transformers import Trainer, TrainingArguments

from ..averaging.combining import combining_fault
from ..config import PacelineConfig, RunPlan, read_ds_config
from ..config.section import check_its_name
from .trainer_loss import averages_alone, home_of, refused_loss

ASKED = 'the JSON has "paceline": {"pipeline": ...}'
_OWN = ("transformers.trainer", "trl.trainer.sft_trainer")
"""Modules whose methods a pipeline stands in for; their loss is the model's."""

_AS_READ = "the first and the last stage take batches as they are read"

_NOT_COMPILED = (
    'it compiles a whole model, and a stage runs layers of it (compile them with "compile": true in '
    '"paceline"."pipeline" of the JSON; fused attention needs no compiling: attn_implementation)'
)


_TRLS_METRICS = ("entropy", "mean_token_accuracy", "num_tokens", "aux_loss")


def asks_for_pipeline(args: TrainingArguments) -> bool:
    """Whether the DeepSpeed JSON has ``"paceline": {"pipeline": …}``."""
    if args.deepspeed is None:
        return False
    config = read_ds_config(args.deepspeed)
    check_its_name(config)
    section = config.get("paceline")
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
                f"{one.__name__} trains otherwise than by a text's next tokens and {ASKED}: {why}; take "
                'PacelineSFTTrainer or PacelineTrainer, or leave "pipeline" out.'
            )
    return ""


def refused(trainer: Trainer, mixin: type) -> str:
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
        (args.save_on_each_node, "save_on_each_node", "output_dir is one directory, to which all stages write"),
        (trainer.model_init, "model_init", "the model is cut once"),
        (
            args.accelerator_config.dispatch_batches,
            "dispatch_batches of accelerator_config",
            "the first and the last stage read the data themselves",
        ),
    ]
    for value, name, why in named:
        if value:
            return f"{name} is {value!r} and {ASKED}: {why}; leave one of them out."
    if args.dataloader_num_workers and not getattr(args, "dataloader_in_order", True):
        return (
            f"dataloader_in_order is False and {ASKED}: the first and the last stage read the same batches, and "
            "workers would hand them out as they happen to be ready; leave one of them out."
        )
    best = args.metric_for_best_model
    is_trls = averages_alone(type(trainer)) and trainer.compute_metrics is None
    if is_trls and (best or "").removeprefix("eval_") in _TRLS_METRICS:
        return (
            f"metric_for_best_model is {best!r} and {ASKED}: TRL takes it from all logits, which no rank has; choose "
            '"loss", or give a compute_metrics that returns it.'
        )
    uploads = os.environ.get("WANDB_LOG_MODEL", "false")
    if "wandb" in args.report_to and uploads.lower() not in ("false", "0"):
        return f"WANDB_LOG_MODEL is {uploads} and {ASKED}: no rank has the whole model to upload; unset it."
    if args.label_names not in (None, ["labels"]):
        return f"label_names is {args.label_names!r} and {ASKED}: a pipeline has 'labels' only; leave one of them out."
    sizes = vars(getattr(trainer.accelerator, "parallelism_config", None) or object).items()
    divided = {name: size for name, size in sizes if name.endswith("_size") and size != 1}
    if divided:
        return (
            f"parallelism_config has {divided} and {ASKED}: ranks are divided into stages, and into replicas of these; "
            'leave it out, and write "stages" in the JSON.'
        )
    if fault := refused_recomputation(args):
        return fault
    chosen = [
        (args.lr_scheduler_type, ("reduce_lr_on_plateau", "greedy"), "lr_scheduler_type", "no metric moves the rate"),
        (getattr(args, "loss_type", None), ("dft",), "loss_type", "the loss is the model's own"),
        (getattr(args, "train_sampling_strategy", None), ("batch_rebalance",), "train_sampling_strategy",
         "it gives each rank other samples, and a pipeline's ranks read the same"),
    ]  # fmt: skip
    for value, cannot, name, why in chosen:
        if value is not None and str(getattr(value, "value", value)) in cannot:
            return f"{name} is {str(getattr(value, 'value', value))!r} and {ASKED}: {why}; choose another one."
    if fault := refused_methods(type(trainer), mixin):
        return fault
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        return (
            f"optimizers are given and {ASKED}: they would be of the whole model, and each stage trains its own part; "
            "name them in the TrainingArguments (optim, lr_scheduler_type) or in the JSON, or give "
            "optimizer_cls_and_kwargs."
        )
    return ""


def refused_recomputation(args: TrainingArguments) -> str:
    """Options of recomputed layers that stages would not heed."""
    given = args.gradient_checkpointing_kwargs if args.gradient_checkpointing else None
    unheeded = {key: value for key, value in (given or {}).items() if key != "use_reentrant"}
    if not unheeded:
        return ""
    return (
        f"{'activation' if hasattr(args, 'activation_checkpointing_kwargs') else 'gradient'}_checkpointing_kwargs has "
        f"{unheeded} and {ASKED}: all layers of a stage are recomputed, with torch's own settings; leave it out (for "
        'some of the layers write "recompute" in "paceline"."pipeline" of the JSON, in place of the checkpointing).'
    )


def refused_methods(kind: type, mixin: type) -> str:
    """Methods of a Trainer of one's own that a pipeline would never call.

    Args:
        mixin: the class of ours in ``kind`` that stands in for what comes behind it.
    """
    order = kind.__mro__
    behind = order[order.index(mixin) + 1 :]
    asked = (
        ("create_optimizer", order, "stages have their own parameters (get_decay_parameter_names may be overridden)"),
        ("create_optimizer_and_scheduler", order, "stages have their own parameters"),
        ("training_step", behind, "a step's micro-batches are trained on together"),
        ("prediction_step", behind, "several batches are under way at a time"),
        ("_prepare_inputs", order, f"{_AS_READ} (change batches in the data_collator)"),
        ("_prepare_input", order, f"{_AS_READ} (change batches in the data_collator)"),
        ("_get_num_items_in_batch", order, "a step's loss is divided by its label tokens"),
        ("compute_loss_context_manager", order, "stages run layers, and the loss is the last one's"),
        ("autocast_smart_context_manager", order, "stages run layers in the dtype that the JSON names"),
        ("_save", order, "each stage writes its part (save_model may be overridden by a class of PacelineTrainer)"),
        ("save_model", behind, "each stage writes its part (override it in a class of PacelineTrainer)"),
    )
    for name, classes, why in asked:
        home = next((one.__module__ for one in classes if name in vars(one)), _OWN[0])
        if home not in _OWN:
            return f"{home} has a {name} of its own and {ASKED}: {why}; leave one of them out."
    if why := refused_loss(kind):
        home = home_of(kind, "compute_loss")
        return f"{home} has a compute_loss of its own and {ASKED}: {why}; give a compute_loss_func instead."
    return ""


def refused_shape(args: TrainingArguments, resolved: RunPlan) -> str:
    """The same, of what is known once ranks are divided into stages and replicas."""
    if resolved.data_parallel > 1 and not args.average_tokens_across_devices:
        return (
            f"average_tokens_across_devices is False and there are {resolved.data_parallel} pipelines side by side: "
            "all label tokens of a step count alike; leave it at True."
        )
    if resolved.data_parallel > 1 and not args.accelerator_config.even_batches:
        return (
            f"even_batches of accelerator_config is False and there are {resolved.data_parallel} pipelines side by "
            "side: one with fewer batches would leave another waiting; leave it at True, and give dataloader_drop_last "
            "where no row is to be trained on twice."
        )
    sizes = resolved.schedule.micro_batch_sizes or ()
    if len(sizes) > 1:
        return (
            f"paceline.pipeline.schedule.micro_batch_sizes is {list(sizes)} under the Trainer, whose steps end short "
            "where an epoch does: leave it out, or train with paceline.launch.finetune."
        )
    if resolved.section.pipeline.unequal_replicas is not None and resolved.data_parallel > 1:
        return (
            "paceline.pipeline.unequal_replicas is there under the Trainer, whose loaders give each replica as "
            "many batches: leave it out, or train with paceline.launch.finetune."
        )
    return ""


def refused_combining(trainer: Trainer) -> str:
    """Why islands cannot fit their weights on this Trainer's data; empty if they can, or there are none."""
    section = read_ds_config(trainer.args.deepspeed).get("paceline") if trainer.args.deepspeed is not None else None
    if not isinstance(section, dict):
        return ""
    config = PacelineConfig.of({"paceline": section})
    return combining_fault(config, trainer.eval_dataset is not None, "give the Trainer an eval_dataset") or ""
