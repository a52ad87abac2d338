"""The flags of ``paceline.launch.finetune``: names and meaning of transformers' run_clm.py and TrainingArguments.

Each dataclass checks itself; a ``ValueError`` names the flag with its value, the rule it breaks and the remedy.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from transformers import HfArgumentParser, PretrainedConfig

from ..config import accelerates_ds_config, accelerates_precision, check_accelerates_keys
from ..messages import brief, nearest
from .other_flags import ELSEWHERE, ELSEWHERE_BY_PREFIX, VALUE_REMEDIES
from .paths import is_missing, no_model

BUILDERS = {"csv": "csv", "json": "json", "jsonl": "json", "parquet": "parquet", "txt": "text", "py": "text"}
"""File extension -> the ``datasets`` builder that reads it."""

DEFAULT_SAVE_STEPS = 500
"""TrainingArguments' own."""

ADAPTER_FLAGS = frozenset(
    ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_rslora", "use_dora",
     "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
)  # fmt: skip
"""Flags that need --use_peft. Names and defaults are those of TRL's ``ModelConfig``."""

LISTS = frozenset(("lora_target_modules", "lora_modules_to_save", "report_to"))
"""Flags with several values."""

AUTO = "auto"
"""The value of --resume_from_checkpoint that resumes if there is a checkpoint, and begins anew otherwise."""


def _flag(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


def _refuse(name: str, value: Any, rule: str, remedy: str) -> NoReturn:
    raise ValueError(f"--{name} {value}: {rule}. Remedy: {remedy}.")


def _check_range(args: Any, low: float, *names: str, below: float = math.inf) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and not low <= value < below:
            rule = f"must be at least {low} and {f'less than {below}' if below < math.inf else 'finite'}"
            _refuse(name, value, rule, "pass such a value or leave the flag out")


def _check_file(name: str, value: str | None) -> None:
    if value is None:
        return
    if not os.path.isfile(value):  # Path's own fails for names that no file can have
        found = "is a directory" if os.path.isdir(value) else "does not exist"
        _refuse(name, value, f"must be a file, but {found}", "check the path; each node of the job needs it")
    if os.path.getsize(value) == 0:
        _refuse(name, value, "must have content, but is empty", "check the path")


@dataclass
class ModelArguments:
    """Which model and tokenizer; without ``model_name_or_path`` a model is trained from scratch."""

    model_name_or_path: str | None = _flag(None, "Checkpoint to fine-tune: hub name or directory. None: from scratch.")
    model_type: str | None = _flag(None, "From scratch: model type, for example llama.")
    config_name: str | None = _flag(None, "Config name or path, if not that of model_name_or_path.")
    config_overrides: str | None = _flag(
        None, "From scratch: changes to the config, hidden_size=64,num_hidden_layers=4"
    )
    tokenizer_name: str | None = _flag(None, "Tokenizer name or path, if not that of model_name_or_path.")
    cache_dir: str | None = _flag(None, "Where downloaded models and data sets are kept.")
    model_revision: str = _flag("main", "Version of the model: branch, tag or commit.")
    token: str | None = _flag(None, "Hugging Face token. None: the one that `hf auth login` stored.")
    trust_remote_code: bool = _flag(False, "Run code that comes with the tokenizer; models with their own are refused.")
    attn_implementation: str | None = _flag(None, "Attention: eager, sdpa, flash_attention_2, ...")
    use_peft: bool = _flag(False, "Train adapters (LoRA) and nothing else; they are what is written.")
    lora_r: int = _flag(16, "LoRA: rank of the adapters.")
    lora_alpha: int = _flag(32, "LoRA: the adapters are scaled by this over their rank.")
    lora_dropout: float = _flag(0.05, "LoRA: share of an adapter's inputs that are dropped.")
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "LoRA: modules that get adapters: names, or all-linear. None: PEFT's choice for the model."},
    )
    lora_modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "LoRA: modules that are trained whole, beside the adapters."}
    )
    use_rslora: bool = _flag(False, "LoRA: scale by lora_alpha over the root of the rank.")
    use_dora: bool = _flag(False, "LoRA: learn the weights' magnitudes apart (DoRA).")
    load_in_8bit: bool = _flag(False, "Adapters on weights of 8 bits (bitsandbytes).")
    load_in_4bit: bool = _flag(False, "Adapters on weights of 4 bits (bitsandbytes; QLoRA).")
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = _flag("nf4", "4 bits: what they stand for.")
    use_bnb_nested_quant: bool = _flag(False, "4 bits: quantise their scales too.")

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "config_name", "tokenizer_name"):
            value = getattr(self, name)
            if value is not None and is_missing(value):
                _refuse(name, value, "there is no such directory", "check the path, or name a model on the hub")
            if value is not None and name != "tokenizer_name" and (found := no_model(value)):
                _refuse(name, value, *found)
        _check_range(self, 1, "lora_r", "lora_alpha")
        _check_range(self, 0, "lora_dropout", below=1)
        if self.load_in_8bit and self.load_in_4bit:
            _refuse("load_in_8bit", True, "weights have 4 bits or 8", "leave one of the two flags out")
        if self.use_peft and self.model_name_or_path is None:
            rule = "adapters are to a model that has its weights from somewhere"
            _refuse("use_peft", True, rule, "add --model_name_or_path, or leave it out")
        if self.config_overrides is None:
            return
        if self.model_name_or_path is not None:
            rule = (
                f"only models from scratch can change their config, not --model_name_or_path {self.model_name_or_path}"
            )
            _refuse("config_overrides", self.config_overrides, rule, "leave one of the two out")
        for item in self.config_overrides.split(","):
            if not re.fullmatch(r"\w+=[^=]+", item):
                rule = f"must be key=value pairs with commas between, but has {item!r}"
                _refuse(
                    "config_overrides", self.config_overrides, rule, "write it as hidden_size=64,num_hidden_layers=4"
                )

    def override(self, config: PretrainedConfig) -> PretrainedConfig:
        """Apply ``config_overrides`` to ``config`` in place, with the semantics of ``update_from_string``."""
        if self.config_overrides is not None:
            for item in self.config_overrides.split(","):
                key = item.split("=")[0]
                if not hasattr(config, key):
                    near = _nearest(key, config.to_dict(), "the keys are those of the model's config.json")
                    _refuse("config_overrides", item, f"{config.model_type} configs have no {key!r}", near)
            try:
                config.update_from_string(self.config_overrides)
            except (ValueError, TypeError) as error:
                remedy = "values have the type of the config's own; others need a --config_name"
                _refuse("config_overrides", self.config_overrides, str(error), remedy)
        return config


@dataclass
class DataArguments:
    """What to train on; without ``dataset_name`` and ``train_file``, :mod:`paceline.data.standard_library`.

    Names and meaning are run_clm.py's, and for conversations, completions and packing those of TRL's ``SFTConfig``.
    """

    dataset_name: str | None = _flag(None, "Data set: hub name or directory.")
    dataset_config_name: str | None = _flag(None, "Configuration of the data set.")
    train_file: str | None = _flag(None, "Training data: csv, json, jsonl, parquet, txt or py file.")
    validation_file: str | None = _flag(None, "Evaluation data, the same kinds of file.")
    text_column: str | None = _flag(None, "Column with the text. None: `text`, or the first column of strings.")
    sample_kind: Literal["text", "messages", "prompt_completion", "instruction", "conversations"] | None = _flag(
        None,
        "What a row is, where its columns allow more than one: text, messages, prompt_completion (prompt, completion), "
        "instruction (instruction, input, output), conversations (ShareGPT's). None: by its columns.",
    )
    completion_only_loss: bool = _flag(
        True, "Loss on completions and assistant turns only; without it, on prompts too."
    )
    chat_template_path: str | None = _flag(
        None, "Chat template: Jinja file, or directory with a tokenizer. None: the tokenizer's own."
    )
    packing: bool = _flag(False, "Pack several samples into a row of block_size, none attending to another.")
    pad_to_multiple_of: int | None = _flag(None, "Rows that are padded or packed: to a multiple of so many tokens.")
    streaming: bool = _flag(False, "Read the data as it is needed; --max_steps says for how long.")
    shuffle_buffer_size: int = _flag(10_000, "Streaming: rows that are shuffled together; 0: the data's own order.")
    max_train_samples: int | None = _flag(None, "Train on this many samples (of running text, blocks) at most.")
    max_eval_samples: int | None = _flag(None, "Evaluate on this many samples (of running text, blocks) at most.")
    block_size: int | None = _flag(None, "Tokens in a row at most. None: what the model can take, 1024 at most.")
    validation_split_percentage: int = _flag(5, "Share of the data held out if no validation set is there; 0: none.")
    preprocessing_num_workers: int | None = _flag(None, "Processes that tokenize.")
    overwrite_cache: bool = _flag(False, "Tokenize again although it was done before.")
    keep_linebreaks: bool = _flag(True, "txt files: keep line breaks; without them each line is a document.")

    def __post_init__(self) -> None:
        for name in ("train_file", "validation_file"):
            value = getattr(self, name)
            if value is None:
                continue
            if self.dataset_name is not None:
                rule = f"cannot stand with --dataset_name {self.dataset_name}: the data comes from one place"
                _refuse(name, value, rule, "leave one of the two out")
            if extension(value) not in BUILDERS:
                rule = f"the extension must be one of {', '.join(BUILDERS)}"
                _refuse(name, value, rule, "rename or convert the file")
            _check_file(name, value)
        if self.validation_file is not None and self.train_file is None:
            _refuse("validation_file", self.validation_file, "needs --train_file", "name the file to train on")
        if self.dataset_config_name is not None and self.dataset_name is None:
            _refuse("dataset_config_name", self.dataset_config_name, "needs --dataset_name", "name the data set")
        _check_range(self, 1, "max_train_samples", "max_eval_samples", "preprocessing_num_workers")
        _check_range(self, 2, "block_size")
        _check_range(self, 1, "pad_to_multiple_of")
        _check_range(self, 0, "shuffle_buffer_size")
        _check_range(self, 0, "validation_split_percentage", below=100)
        if self.text_column is not None and self.sample_kind not in (None, "text"):
            rule = f"cannot stand with --sample_kind {self.sample_kind}, which has no text column"
            _refuse("text_column", self.text_column, rule, "leave one of the two out")
        if self.streaming:
            self._check_streaming()

    def _check_streaming(self) -> None:
        if self.dataset_name is None and self.train_file is None:
            remedy = "--dataset_name or --train_file, or leave it out"
            _refuse("streaming", True, "the embedded corpus is not streamed", remedy)
        for name in ("max_train_samples", "preprocessing_num_workers", "overwrite_cache"):
            value = getattr(self, name)
            if value not in (None, False):
                remedy = "leave it out" + ("; --max_steps ends the training" if name == "max_train_samples" else "")
                _refuse(name, value, "is not for --streaming, which tokenizes as it goes and keeps nothing", remedy)


@dataclass
class TrainArguments:
    """How to train. Defaults are those of ``TrainingArguments`` where it has the flag."""

    output_dir: str = _flag("paceline_output", "Directory the trained model is written to.")
    overwrite_output_dir: bool = _flag(
        False, "Write into output_dir although it holds a model or an earlier run, whose checkpoints are deleted."
    )
    seed: int = _flag(42, "Seed of weights and of the order of samples.")
    island: int | None = _flag(
        None, "Number of this island, from 0, where islands average. None: PACELINE_ISLAND of the environment."
    )
    max_steps: int = _flag(-1, "Steps to train; -1: num_train_epochs decides.")
    num_train_epochs: float = _flag(3.0, "Passes over the data.")
    per_device_train_batch_size: int = _flag(
        8,
        'Samples in a micro-batch of one pipeline. The default is for "auto" in the JSON; with no size there, it is '
        "chosen.",
    )
    per_device_eval_batch_size: int = _flag(8, "Samples in a micro-batch of one pipeline, in evaluation.")
    gradient_accumulation_steps: int | None = _flag(None, "Micro-batches in a step of one pipeline. None: chosen.")
    learning_rate: float = _flag(5e-5, "Peak learning rate.")
    weight_decay: float = _flag(0.0, "Weight decay of AdamW.")
    adam_beta1: float = _flag(0.9, "Decay of AdamW's first moment.")
    adam_beta2: float = _flag(0.999, "Decay of AdamW's second moment.")
    adam_epsilon: float = _flag(1e-8, "Epsilon of AdamW.")
    max_grad_norm: float = _flag(1.0, "Gradients are clipped to this norm; 0: not clipped.")
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
    ] = _flag("linear", "Course of the learning rate after warm-up.")
    warmup_steps: float = _flag(0, "Steps of linear warm-up; below 1 a share of all steps.")
    warmup_ratio: float = _flag(0.0, "Steps of linear warm-up as a share of all steps.")
    logging_steps: int = _flag(10, "Steps between two log lines.")
    eval_steps: int | None = _flag(
        None, "Steps between two evaluations. None: logging_steps, with --eval_strategy steps."
    )
    eval_strategy: Literal["no", "steps", "epoch"] | None = _flag(
        None, "When to evaluate besides at the end. None: steps if eval_steps is given, else no."
    )
    save_strategy: Literal["no", "steps", "epoch"] = _flag("steps", "When to save a checkpoint into output_dir.")
    save_steps: int | None = _flag(None, "Steps between two checkpoints. None: 500, with --save_strategy steps.")
    save_total_limit: int | None = _flag(None, "Checkpoints that are kept, the newest ones. None: all.")
    resume_from_checkpoint: str | None = _flag(
        None,
        "Go on from a checkpoint: its directory; true: the last one in output_dir; auto: that, or from the beginning "
        "where there is none.",
    )
    replan: bool = _flag(
        False,
        "Measure anew which number of stages (and chunks) is the fastest; else a run that goes on keeps what it chose.",
    )
    gradient_checkpointing: bool = _flag(False, "Compute activations again in the backward pass to save memory.")
    bf16: bool = _flag(False, "Train in bfloat16.")
    fp16: bool = _flag(False, "Train in float16 with loss scaling.")
    ddp_timeout: int = _flag(1800, "Seconds any rank waits for another.")
    deepspeed: str | None = _flag(None, "DeepSpeed JSON file.")
    local_rank: int = _flag(-1, "Given by the launcher.")
    disable_tqdm: bool = _flag(False, "No progress bars.")
    report_to: list[str] = field(
        default_factory=lambda: ["none"],
        metadata={"help": "Trackers, as Trainer has them: none, tensorboard, wandb, ..., or all that are installed."},
    )
    run_name: str | None = _flag(None, "Name of the run for --report_to.")
    max_shard_size: str = _flag("5GB", "Size of the largest file of weights that is written.")
    sample_prompt: str | None = _flag(None, "A line to complete after the export; rank 0 loads the whole model for it.")
    sample_every: int | None = _flag(
        None,
        "Steps between two completions of sample_prompt while training: a forward of the pipeline a token.",
    )

    def __post_init__(self) -> None:
        one = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        _check_range(self, 1, *one, "logging_steps", "eval_steps", "save_steps", "save_total_limit", "ddp_timeout")
        _check_range(self, 1, "sample_every")
        _check_range(self, 0, "seed", below=2**63)
        _check_range(self, 0, "island")
        _check_range(self, 0, "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps")
        _check_range(self, 0, "adam_beta1", "adam_beta2", "warmup_ratio", below=1)
        for name in ("adam_epsilon", "num_train_epochs"):
            if not 0 < getattr(self, name) < math.inf:
                _refuse(name, getattr(self, name), "must be more than 0 and finite", "leave the flag out")
        if self.max_steps != -1 and self.max_steps < 1:
            _refuse("max_steps", self.max_steps, "must be at least 1, or -1", "use -1 to go by --num_train_epochs")
        if self.fp16 and self.bf16:
            _refuse("fp16", "--bf16", "training has one precision", "leave one of the two out")
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            rule = "must be a whole number of steps, or a share below 1"
            _refuse("warmup_steps", self.warmup_steps, rule, f"use {round(self.warmup_steps)}")
        if self.warmup_steps and self.warmup_ratio:
            rule = f"cannot stand with --warmup_ratio {self.warmup_ratio}"
            _refuse("warmup_steps", self.warmup_steps, rule, "leave one of the two out")
        if self.eval_strategy is None:
            self.eval_strategy = "no" if self.eval_steps is None else "steps"
        if self.eval_strategy == "steps":
            self.eval_steps = self.eval_steps or self.logging_steps
        elif self.eval_steps is not None:
            rule = f"cannot stand with --eval_strategy {self.eval_strategy}"
            _refuse("eval_steps", self.eval_steps, rule, "leave one of the two out")
        if self.save_strategy == "steps":
            self.save_steps = self.save_steps or DEFAULT_SAVE_STEPS
        elif self.save_steps is not None:
            rule = f"cannot stand with --save_strategy {self.save_strategy}"
            _refuse("save_steps", self.save_steps, rule, "leave one of the two out")
        self._check_resume()
        self._check_trackers()
        if self.sample_every is not None and not self.sample_prompt:
            _refuse("sample_every", self.sample_every, "there is no line to complete", "add --sample_prompt")
        if not re.fullmatch(r"0*[1-9]\d*[KMGT]B", self.max_shard_size, re.IGNORECASE):
            rule = "must be a whole number above 0 with KB, MB, GB or TB"
            _refuse("max_shard_size", self.max_shard_size, rule, "write it as 5GB")
        if not self.output_dir:
            _refuse("output_dir", repr(""), "the name of a directory is empty", "give one, or leave the flag out")
        if os.path.isfile(self.output_dir):
            _refuse("output_dir", self.output_dir, "must be a directory, but is a file", "choose another name")
        if self.deepspeed is None:
            self.deepspeed = accelerates_ds_config(os.environ)
        check_accelerates_keys(os.environ)
        _check_file("deepspeed", self.deepspeed)

    def _check_resume(self) -> None:
        """Words as `run_clm.py` and its users write them; a directory otherwise."""
        value = self.resume_from_checkpoint
        if value is None or value.lower() in ("false", "no"):
            self.resume_from_checkpoint = None
        elif value.lower() in ("true", "yes", AUTO):
            self.resume_from_checkpoint = AUTO if value.lower() == AUTO else "true"
        elif not os.path.isdir(value):
            rule = "must be a checkpoint's directory, true or auto, but there is no such directory"
            _refuse("resume_from_checkpoint", value, rule, "check the path; each node of the job needs it")

    def _check_trackers(self) -> None:
        """Make ``report_to`` the names of trackers that are known and installed."""
        names = [name for name in self.report_to if name != "none"]
        self.report_to = names
        if not names:
            return
        from transformers.integrations import integration_utils as trackers

        installed = trackers.get_available_reporting_integrations()
        self.report_to = names = installed if "all" in names else names
        for name in names:
            if name not in trackers.INTEGRATION_TO_CALLBACK:
                known = trackers.INTEGRATION_TO_CALLBACK
                remedy = _nearest(name, known, f"choose from none, all, {', '.join(known)}")
                _refuse("report_to", name, "is not a tracker that transformers knows", remedy.rstrip("?"))
            if name not in installed:
                _refuse("report_to", name, "its package is not installed", f"pip install {name}, or leave it out")
        uploads = os.environ.get("WANDB_LOG_MODEL", "false")
        if "wandb" in names and uploads.lower() not in ("false", "0"):
            rule = f"WANDB_LOG_MODEL is {uploads}, and no rank has the whole model to upload"
            _refuse("report_to", "wandb", rule, "unset it")

    def num_warmup_steps(self, num_steps: int) -> int:
        """Warm-up steps of a training of ``num_steps`` steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_steps * (self.warmup_steps or self.warmup_ratio))


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        flag = re.match(r"argument --(\w+)", message)
        if flag and (remedy := VALUE_REMEDIES.get(flag[1])):
            message = f"{message}. Remedy: {remedy}"
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of a node see the same flags
            print(f"{self.prog}: {brief(message)}", file=sys.stderr)
        raise SystemExit(2)


def parse(
    argv: Sequence[str], prog: str = "paceline.launch.finetune"
) -> tuple[ModelArguments, DataArguments, TrainArguments, set[str]]:
    """Parse flags, or the one JSON file ``argv`` names (``{"learning_rate": 1e-4, ...}``, null: the default).

    Returns the three groups and the names that were given by the user, ``local_rank`` (the launcher's) excepted.

    Raises:
        SystemExit: 2 with one line on stderr: a flag nobody knows, a value that does not parse. 0 after ``--help``.
        ValueError: values that break a rule.
    """
    parser = _Parser((ModelArguments, DataArguments, TrainArguments), prog=prog, allow_abbrev=False)
    for action in parser._actions:
        if action.option_strings[0].startswith("--no_"):  # transformers gives it the help of its opposite
            action.help = f"Turn --{action.dest} off."
    names = [f.name for group in parser.dataclass_types for f in fields(group)]
    launcher = [a for a in argv if re.match(r"--local[-_]rank=", a)]
    rest = [a for a in argv if a not in launcher]
    if len(rest) == 1 and rest[0].endswith(".json") and not rest[0].startswith("-"):
        rest = _flags_in(rest[0])
    # names still bound to the sentinel after parsing were not given
    missing = object()
    namespace, unknown = parser.parse_known_args([*launcher, *rest], Namespace(**dict.fromkeys(names, missing)))
    if unknown:
        parser.error(_unknown(unknown, names))
    given = {name: value for name, value in vars(namespace).items() if value is not missing}
    if not given.keys() & {"bf16", "fp16"}:
        precision = accelerates_precision(os.environ)
        given |= {} if precision is None else {precision: True}
    model_args, data_args, train_args = parser.parse_dict(given)
    if not model_args.use_peft:
        for name in sorted(given.keys() & ADAPTER_FLAGS):
            if given[name] not in (False, None):
                remedy = "add --use_peft, or leave it out"
                _refuse(name, given[name], "is for adapters, and the whole model is trained", remedy)
    if data_args.streaming and train_args.max_steps < 0:
        _refuse("streaming", True, "a stream has no known end to count epochs by", "--max_steps with a number")
    if data_args.streaming and train_args.eval_strategy == "epoch":
        _refuse("eval_strategy", "epoch", "a stream has no known epochs", "--eval_steps with a number")
    if data_args.streaming and train_args.save_strategy == "epoch":
        _refuse("save_strategy", "epoch", "a stream has no known epochs", "--save_steps with a number")
    return model_args, data_args, train_args, set(given) - {"local_rank"}


def _flags_in(path: str) -> list[str]:
    _check_file("json", path)
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: must be strict JSON, but {error}. Remedy: correct it there.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must be one object with flags as keys, but is a {type(values).__name__}.")
    for name, value in values.items():
        if isinstance(value, dict) or (isinstance(value, list) and name not in LISTS):
            raise ValueError(f"{path}: {name} must be a number, a string, true, false or null, but is {value}.")
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags


def _unknown(arguments: Sequence[str], names: Sequence[str]) -> str:
    flags = [a.split("=")[0] for a in arguments if a.startswith("--")]
    if not flags:
        return f"unexpected argument {arguments[0]!r}; every value follows its --flag"
    return "; ".join(f"unknown flag {flag}: {_remedy(flag, names)}" for flag in flags)


def _remedy(flag: str, names: Sequence[str]) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    by_prefix = (remedy for prefix, remedy in ELSEWHERE_BY_PREFIX.items() if name.startswith(prefix))
    return ELSEWHERE.get(name) or _nearest(name, names, next(by_prefix, "see --help"), prefix="--")


def _nearest(name: str, known: Any, otherwise: str, prefix: str = "") -> str:
    near = nearest(name, known)
    return f"did you mean {prefix}{near}?" if near else otherwise


def extension(path: str | Path) -> str:
    """``"jsonl"`` of ``"data/Train.JSONL"``."""
    return Path(path).suffix.lower().removeprefix(".")
