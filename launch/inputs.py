"""Inputs that the flags of the main job name: tokenizer, model config and rows of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from paceline.data.datasets import Data, prepare
from paceline.data.reading import read
from paceline.data.tokenizer import load_tokenizer, train_tokenizer
from paceline.hf.arguments import DataArguments, ModelArguments, TrainArguments
from paceline.hf.check import require_supported
from paceline.messages import nearest

TOKENIZER_TEXTS = 2_000
"""Rows that a tokenizer is trained on when a model from scratch brings none."""


@dataclass(frozen=True)
class Inputs:
    """All that a run reads before it builds its model."""

    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    data: Data


def read_inputs(
    model_args: ModelArguments, data_args: DataArguments, args: TrainArguments, *, progress: bool
) -> Inputs:
    """Read and tokenize.

    Args:
        progress: draw bars.

    Raises:
        ValueError: data, tokenizer or model config that cannot be read, or do not fit each other.
    """
    raw = read(data_args, seed=args.seed, cache_dir=model_args.cache_dir, token=model_args.token)
    if model_args.tokenizer_name or model_args.model_name_or_path:
        tokenizer = load_tokenizer(model_args)
    else:
        tokenizer = train_tokenizer(raw.texts(TOKENIZER_TEXTS))
    config = _model_config(model_args, tokenizer)
    require_supported(config)
    largest, vocab_size = len(tokenizer) - 1, config.get_text_config().vocab_size
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer has {largest + 1} tokens, the model's vocabulary {vocab_size}: choose a tokenizer that "
            "belongs to the model."
        )
    data = prepare(
        raw,
        data_args,
        tokenizer,
        config,
        seed=args.seed,
        attn_implementation=model_args.attn_implementation,
        progress=progress,
    )
    return Inputs(tokenizer, config, data)


def _model_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    name = args.config_name or args.model_name_or_path
    if name is None:
        if args.model_type is None:
            raise ValueError(
                "there is no model: give --model_name_or_path, or for one from scratch --config_name or --model_type."
            )
        if args.model_type not in CONFIG_MAPPING:
            near = nearest(args.model_type, list(CONFIG_MAPPING))
            remedy = f"did you mean {near}?" if near else "give a model_type of transformers, such as llama."
            raise ValueError(f"--model_type {args.model_type}: transformers has no such type; {remedy}")
        return _as_flags_say(AutoConfig.for_model(args.model_type, **_special_tokens(tokenizer)), args)
    try:
        config = AutoConfig.from_pretrained(
            name, cache_dir=args.cache_dir, revision=args.model_revision, token=args.token
        )
    except (OSError, ValueError) as error:
        flag = "config_name" if args.config_name else "model_name_or_path"
        raise ValueError(f"--{flag} {name}: no model config can be loaded: {error}") from error
    if args.model_name_or_path is None:
        config.update(_special_tokens(tokenizer))
    return _as_flags_say(config, args)


def _as_flags_say(config: PretrainedConfig, args: ModelArguments) -> PretrainedConfig:
    """``config``, changed. What layers keep is counted and measured by it, and eager attention keeps its scores."""
    if args.attn_implementation == "eager":
        config._attn_implementation = args.attn_implementation
    return args.override(config)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
