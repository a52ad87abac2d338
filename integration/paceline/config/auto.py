"""``"auto"`` in DeepSpeed's own keys, filled from the command line by the rules of Hugging Face's Trainer.

The rules are Trainer's own code (``HfTrainerDeepSpeedConfig``), so that they follow the installed transformers. Ours
differs in three things: a contradiction counts only for a flag that the user gave (Trainer compares defaults too), a
flag that the user gave fills an absent key (Trainer drops it), and no ``"auto"`` may be left.
"""

from __future__ import annotations

import copy
import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from .known import check_objects
from .optimizers import check_optimizer_values
from .schedulers import check_scheduler
from .section import SECTION, show, value_at

# Where "auto" is a value that DeepSpeed itself understands.
_DEEPSPEEDS_AUTO = (
    "autotuning.*",
    "data_types.keep_in_fp32_modules",
    "expert_parallel.*",
    "pipeline.stages",
    "zero_optimization.zenflow.*",
    f"{SECTION}.*",  # refused, with its own remedy, where the section is read
)
_ADAM = ("adam", "adamw")
_BATCH = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_SIZED = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_CALCULATED = {
    "train_batch_size (calculated)": list(_BATCH),
    "num_training_steps (calculated)": ["max_steps"],
}
# Flags of Trainer that a smaller command line may lack.
_OFF = ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval", "save_on_each_node", "warmup_ratio")


def fill_auto(
    ds_config: Mapping[str, Any],
    args: Any,
    *,
    data_parallel: int,
    hidden_size: int | None = None,
    max_steps: int | None = None,
    given: Iterable[str] = (),
) -> dict[str, Any]:
    """A copy of ``ds_config`` with every ``"auto"`` of DeepSpeed's keys filled.

    An absent ``"optimizer"`` becomes AdamW, an absent ``"gradient_clipping"`` becomes ``args.max_grad_norm``. A batch
    size that is ``None`` in ``args`` is not filled but left out, to be chosen by :func:`~paceline.config.resolve`.

    Args:
        args: an object with the attributes of ``transformers.TrainingArguments``; ``None`` where there is no command
            line, and then nothing is filled.
        data_parallel: number of pipelines side by side (ranks / stages).
        hidden_size: of the model; needed by the bucket sizes of ZeRO.
        max_steps: optimizer steps of the run; needed by learning-rate schedules.
        given: names of the attributes of ``args`` that the user gave explicitly.

    Raises:
        ValueError: a JSON value contradicts a flag that was given, something needed is unknown, or an ``"auto"`` has
            no rule; one line with the key's path.
    """
    config = copy.deepcopy(dict(ds_config))
    if isinstance(config.get("zero_optimization"), bool):  # the old form
        config["zero_optimization"] = {"stage": int(config["zero_optimization"])}
    check_objects(config)
    check_scheduler(config)
    if args is not None:
        check_optimizer_values(config)
        explicit = frozenset(given)
        _ask_for_more(config, args, explicit)
        config = _fill_as_trainer(config, args, data_parallel, hidden_size, max_steps, explicit)
    zero = config.get("zero_optimization", {})
    if zero.get("stage", 0) != 3:
        # Trainer leaves these and DeepSpeed drops them: they mean nothing without ZeRO-3.
        for key in [k for k, v in zero.items() if v == "auto" and k.startswith("stage3_")]:
            del zero[key]
    left = open_autos(config)
    if left:
        why = "there is no command line to fill it from" if args is None else "no command-line flag fills it"
        raise ValueError(f'{left[0]} is "auto" and {why}; write a value or leave the key out.')
    return config


def open_autos(ds_config: Mapping[str, Any]) -> list[str]:
    """Paths of the ``"auto"`` values that :func:`fill_auto` would have to fill."""
    return [p for p in _autos(ds_config, "") if not any(fnmatch.fnmatch(p, own) for own in _DEEPSPEEDS_AUTO)]


def _ask_for_more(config: dict[str, Any], args: Any, given: frozenset[str]) -> None:
    """Write ``"auto"`` for absent keys that the command line decides."""
    config.setdefault("gradient_clipping", "auto")
    for flag, key in _BATCH.items():
        if flag in given:
            config.setdefault(key, "auto")
    for precision in ("fp16", "bf16"):
        if precision in given and getattr(args, precision):
            config.setdefault(precision, {}).setdefault("enabled", "auto")
    if "optimizer" not in config:
        config["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    optimizer = {"learning_rate": "lr", "weight_decay": "weight_decay"}
    if str(config["optimizer"].get("type", "")).lower() in _ADAM:
        optimizer |= {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps"}
    for flag, key in optimizer.items():
        if flag in given:
            config["optimizer"].setdefault("params", {}).setdefault(key, "auto")
    scheduler = config.get("scheduler", {})
    if given & {"warmup_steps", "warmup_ratio"} and str(scheduler.get("type", "")).startswith("Warmup"):
        scheduler.setdefault("params", {}).setdefault("warmup_num_steps", "auto")


def _fill_as_trainer(
    config: dict[str, Any],
    args: Any,
    data_parallel: int,
    hidden_size: int | None,
    max_steps: int | None,
    given: frozenset[str],
) -> dict[str, Any]:
    for flag, key in _BATCH.items():
        if config.get(key) == "auto" and getattr(args, flag) is None:
            del config[key]
    values = _Arguments(args, config, data_parallel, given)
    unknown = any(key not in config and getattr(args, flag) is None for flag, key in _BATCH.items())
    if config.get("train_batch_size") == "auto" and unknown:
        del config["train_batch_size"]
    _refuse_unknowable(config, values, hidden_size, max_steps)

    import transformers.integrations.deepspeed as hf

    class Filler(hf.HfTrainerDeepSpeedConfig):
        def fill_match(self, ds_key_long: str, hf_val: Any, hf_key: str = "", must_match: bool = True) -> None:
            node, key = self.find_config_node(ds_key_long)
            value = None if node is None else node.get(key)
            differs = hf_val is not None and value not in (None, "auto", hf_val)
            if must_match and differs and _is_given(hf_key, given):
                flags = " and ".join(f"--{flag}" for flag in _flags(hf_key) if flag in given)
                raise ValueError(
                    f"{ds_key_long} is {show(value)} in the JSON and {flags} on the command line makes it "
                    f'{show(hf_val)}; drop one of them, or write "auto" in the JSON.'
                )
            super().fill_match(ds_key_long, hf_val, hf_key, must_match=False)

    # The constructor makes its config the process's one, which may be a Trainer's.
    owner = hf._hf_deepspeed_config_weak_ref
    try:
        filler = Filler(config)
        filler.trainer_config_process(values)
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size))
        filler.trainer_config_finalize(values, model, max_steps)
    finally:
        hf._hf_deepspeed_config_weak_ref = owner
    return dict(filler.config)


class _Arguments:
    """The command line as Trainer's rules read it: ranks that hold the same data count once, the JSON beats defaults.

    A rule that joins several flags (the train batch, the betas) would otherwise mix a JSON value with a default.
    """

    def __init__(self, args: Any, config: Mapping[str, Any], data_parallel: int, given: frozenset[str]) -> None:
        self._args = args
        self.world_size = data_parallel
        for flag, key in _BATCH.items():
            value = getattr(args, flag)
            written = config.get(key)
            # 1 stands for a number that nothing reads: its key was dropped above.
            setattr(self, flag, written if flag not in given and isinstance(written, int) else value or 1)
        betas = value_at(config, "optimizer.params.betas")
        if isinstance(betas, list) and len(betas) == 2:
            for flag, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
                if flag not in given:
                    setattr(self, flag, beta)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name, False) if name in _OFF else getattr(self._args, name)

    def get_warmup_steps(self, num_training_steps: int | None) -> int:
        ratio = getattr(self._args, "warmup_ratio", None)
        if ratio and not self.warmup_steps:
            return max(1, math.ceil((num_training_steps or 0) * ratio))
        # DeepSpeed 0.19.6 and later refuse 0; transformers before 5.20 would write it.
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return max(1, math.ceil((num_training_steps or 0) * self.warmup_steps))


def _refuse_unknowable(
    config: Mapping[str, Any], values: _Arguments, hidden_size: int | None, max_steps: int | None
) -> None:
    needs_steps = ["total_num_steps"] + (
        ["warmup_num_steps"] if 0 < values.warmup_steps < 1 or values.warmup_ratio else []
    )
    for path in (f"scheduler.params.{key}" for key in needs_steps):
        if max_steps is None and value_at(config, path) == "auto":
            raise ValueError(
                f'{path} is "auto" and the number of steps is unknown; give --max_steps or write a number.'
            )
    for path in (f"zero_optimization.{key}" for key in _SIZED):
        if hidden_size is None and value_at(config, path) == "auto":
            raise ValueError(f'{path} is "auto" and the hidden size of the model is unknown; write a number.')


def _flags(hf_key: str) -> list[str]:
    return _CALCULATED.get(hf_key) or re.findall(r"\w+", hf_key)


def _is_given(hf_key: str, given: frozenset[str]) -> bool:
    # A calculated number contradicts the user only if he gave all that goes into it.
    return (all if hf_key in _CALCULATED else any)(flag in given for flag in _flags(hf_key))


def _autos(node: Any, path: str) -> Iterator[str]:
    if node == "auto":
        yield path
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _autos(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _autos(value, f"{path}[{index}]")
