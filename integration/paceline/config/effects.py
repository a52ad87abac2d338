"""One table of DeepSpeed's keys: what each of them does in a pipeline. Static, so that checking needs no DeepSpeed.

Pipelines read only some of what the documents list. A key that would change nothing is named in a warning, one that
cannot be is refused, and a test holds the table against the keys that the installed DeepSpeed reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HONOURED, WARNED, REFUSED = "honoured", "warned", "refused"


@dataclass(frozen=True)
class Effect:
    """The effect of a key in a pipeline.

    Args:
        verdict: ``honoured``, ``warned`` (no effect, said at the start) or ``refused`` (an error at the start).
        why: of a warning, with what to write instead, if there is something.
        default: DeepSpeed's own value, which asks for nothing.
    """

    verdict: str
    why: str = ""
    default: Any = None


def _honoured(*keys: str) -> dict[str, Effect]:
    return dict.fromkeys(keys, Effect(HONOURED))


def _refused(*keys: str) -> dict[str, Effect]:
    return dict.fromkeys(keys, Effect(REFUSED))


def _warned(why: str, *keys: str, **defaults: Any) -> dict[str, Effect]:
    """``defaults``: keys of ``zero_optimization``, which have values that ask for nothing."""
    found = {key: Effect(WARNED, why) for key in keys}
    return found | {f"zero_optimization.{key}": Effect(WARNED, why, value) for key, value in defaults.items()}


_CHECKPOINTS = "pipelines have checkpoints of their own format, which load into any shape"
_BUCKETS = "the pipelines' optimizer has buckets of its own: reduce_bucket_size is their size"
_ZERO_3 = "it is for ZeRO 2 and 3, which pipelines have not"
_GRADIENTS = "gradients are added up in fp32 and divided by the number of replicas after that"

EFFECTS: dict[str, Effect] = {
    # Batches, optimizer, precision.
    **_honoured("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    **_honoured("optimizer", "optimizer.type", "optimizer.params", "scheduler", "scheduler.type", "scheduler.params"),
    **_warned("pipelines make their optimizer of one of torch.optim's", "optimizer.legacy_fusion"),
    **_honoured("gradient_clipping", "gradient_allreduce_op", "communication_data_type"),
    **_warned(_GRADIENTS, "prescale_gradients"),
    "gradient_predivide_factor": Effect(WARNED, _GRADIENTS, 1.0),
    **_honoured("fp16", "fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window"),
    **_honoured("fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale"),
    **_warned("a pipeline's inputs are tokens, which are not cast", "fp16.auto_cast"),
    **_refused("fp16.fp16_master_weights_and_grads"),
    **_honoured("bf16", "bfloat16", "bf16.enabled"),
    **_warned("gradients are added up in fp32", "bf16.immediate_grad_update", "bf16.check_grad_overflow"),
    **_refused("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
    **_honoured("torch_autocast", "torch_autocast.enabled", "torch_autocast.dtype"),
    **_honoured("torch_autocast.lower_precision_safe_modules", "data_types", "data_types.grad_accum_dtype"),
    **_warned(
        "fp16 and bf16 say what a pipeline's parameters are",
        *("data_types.param_dtype", "data_types.buffer_dtype", "data_types.keep_in_fp32_modules"),
    ),
    **_honoured("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),  # permissions: pipelines need none
    **_refused("managed_gradient_accumulation"),
    # The pipeline.
    **_honoured("pipeline", "pipeline.stages", "pipeline.partition", "pipeline.activation_checkpoint_interval"),
    **_honoured("pipeline.use_reentrant", "pipeline.pipe_partitioned", "pipeline.grad_partitioned"),
    **_warned("weights are drawn by their names", "pipeline.seed_layers"),
    **_warned(
        "layers are recomputed with --gradient_checkpointing (gradient_checkpointing=True of TrainingArguments) or "
        '"pipeline": {"activation_checkpoint_interval": 1}; only layers that call deepspeed.checkpointing read it',
        "activation_checkpointing",
    ),
    **_honoured("expert_parallel"),
    **_refused("sequence_parallel_size", "hybrid_engine"),
    **_warned("the number of replicas is that of the ranks divided by the stages", "data_parallel_size"),
    **_warned("pipelines have no sequence parallelism", "seq_parallel_communication_data_type"),
    **_warned("expert_parallel.autoep_size says which ranks share experts", "use_data_before_expert_parallelism"),
    **_honoured("tensor_parallel", "tensor_parallel.autotp_size"),
    **_warned(
        "layers are sliced as transformers' plan for the model says",
        *("tensor_parallel.partition_config", "tensor_parallel.preset_model", "tensor_parallel.injection_policy_tuple"),
        *("tensor_parallel.tensor_parallel", "tensor_parallel.tp_overlap_comm", "tensor_parallel.keep_module_on_host"),
        *("tensor_parallel.replace_with_kernel_inject", "tensor_parallel.vocab_parallel_lm_head"),
    ),
    # ZeRO.
    **_honoured("zero_optimization", "zero_optimization.stage", "zero_optimization.reduce_bucket_size"),
    **_honoured("zero_optimization.overlap_comm"),
    **_refused("zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
    **_refused("zero_optimization.cpu_offload"),
    **_warned(
        _BUCKETS,
        contiguous_gradients=True,
        reduce_scatter=True,
        use_multi_rank_bucket_allreduce=True,
        allgather_partitions=True,
        allgather_bucket_size=500_000_000,
        round_robin_gradients=False,
        parameter_alignment=False,
        legacy_stage1=False,
        zero_hpz_partition_size=1,
    ),
    **_warned("the norm is always taken", compute_grad_norm=True),
    **_warned("every parameter may be unused", ignore_unused_parameters=True),
    **_warned(
        _CHECKPOINTS,
        load_from_fp32_weights=True,
        elastic_checkpoint=False,
        pipeline_loading_checkpoint=False,
        gather_16bit_weights_on_model_save=False,
        stage3_gather_fp16_weights_on_model_save=False,
        save_muon_momentum_buffer_in_memory=False,
    ),
    **_warned(
        _ZERO_3,
        zenflow=None,
        sub_group_size=1_000_000_000,
        cpu_offload_param=None,
        cpu_offload_use_pin_memory=None,
        prefetch_bucket_size=50_000_000,
        stage3_prefetch_bucket_size=50_000_000,
        param_persistence_threshold=100_000,
        stage3_param_persistence_threshold=100_000,
        model_persistence_threshold=None,
        stage3_model_persistence_threshold=None,
        max_live_parameters=1_000_000_000,
        stage3_max_live_parameters=1_000_000_000,
        max_reuse_distance=1_000_000_000,
        stage3_max_reuse_distance=1_000_000_000,
        stage3_gather_16bit_weights_on_model_save=False,
        stage3_module_granularity_threshold=0,
        stage3_use_all_reduce_for_fetch_params=False,
        stage3_allgather_sequential=False,
        module_granularity_threshold=0,
        use_all_reduce_for_fetch_params=False,
        allgather_sequential=False,
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        zero_quantized_gradients=False,
        memory_efficient_linear=True,
        override_module_apply=True,
        log_trace_cache_warnings=False,
        enable_sanity_checks=False,
        leaf_module=None,
    ),
    **_warned("it belongs to an old form of zero_optimization", "allgather_size"),
    **_warned("it is for offload to NVMe, which pipelines have not", "aio"),
    **_warned("ranks that own no part of a parameter get it by broadcast", "disable_allgather"),
    # Reports.
    **_honoured("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level"),
    **_honoured("disable_python_gc"),
    **_honoured("tensorboard", "wandb", "comet", "csv_monitor"),
    **_honoured("flops_profiler", "flops_profiler.enabled", "flops_profiler.profile_step"),
    **_honoured("flops_profiler.module_depth", "flops_profiler.top_modules", "flops_profiler.detailed"),
    **_honoured("flops_profiler.output_file"),
    **_warned("the profile is of a stage's forward", "flops_profiler.recompute_fwd_factor"),
    **_warned(
        "pipelines send with torch.distributed; metrics.jsonl has the time, and report.trace_every draws every message",
        "comms_logger",
    ),
    **_warned("metrics.jsonl has tokens_per_s", "timers"),
    **_warned('"paceline plan" searches for a configuration', "autotuning"),
    # What DeepSpeed's other engine does with data, files and the model.
    **_warned("a pipeline's micro-batches are trained on as they are read", "data_efficiency", "vocabulary_size"),
    **_honoured("dataloader_drop_last"),
    **_warned('"paceline": {"pipeline": {"compile": true}} compiles the layers of stages', "compile"),
    **_warned("quantised models are read with --load_in_4bit and --load_in_8bit", "weight_quantization"),
    **_warned(_CHECKPOINTS, "checkpoint", "datastates_ckpt"),
}
"""Effects by path. A key that is not listed has the effect of its section."""


def without_effect(ds_config: Mapping[str, Any]) -> list[str]:
    """One line for each key that asks a pipeline for something it does not do."""
    lines = []
    for key, value in ds_config.items():
        effect = EFFECTS.get(key)
        if effect is None:
            continue
        inner = {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, Mapping) else {}
        named = [path for path, part in inner.items() if path in EFFECTS and _is_idle(path, part)]
        lines += [_line(path) for path in named]
        if effect.verdict == WARNED and not named and _is_idle(key, value):
            lines.append(_line(key))
    return lines


def _is_idle(path: str, value: Any) -> bool:
    effect = EFFECTS[path]
    return effect.verdict == WARNED and _asks(value, effect.default)


def _asks(value: Any, default: Any = None) -> bool:
    """Whether ``value`` asks for more than ``default`` does."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", any(_asks(part) for part in value.values())))
    return value not in (None, "auto", "none") and value != default and not (default is None and value is False)


def _line(path: str) -> str:
    return f'"{path}" has no effect in a pipeline: {EFFECTS[path].why}.'
