"""Tokenizers: the model's own, or a small byte-level one trained on the spot."""

from __future__ import annotations

import os
from collections.abc import Iterable

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..hf.arguments import ModelArguments

PAD, BOS, EOS = "<pad>", "<s>", "</s>"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most ``vocab_size`` tokens, ``<pad>`` 0, ``<s>`` 1 and ``</s>`` 2 among them.

    The same texts give the same tokenizer. Any text comes back: ``decode(encode(text)) == text``. No special token is
    added to a text. ``AutoTokenizer.from_pretrained`` loads what ``save_pretrained`` wrote.

    Raises:
        ValueError: ``vocab_size`` has no room for the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [PAD, BOS, EOS]
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size {vocab_size}: must hold 256 bytes and {special}. Remedy: {smallest} or more.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(model_args: ModelArguments) -> PreTrainedTokenizerBase:
    """The tokenizer ``tokenizer_name`` or the model names. Padding falls back to its end token; no token is added.

    Raises:
        ValueError: no name is given, or nothing can be loaded from it.
    """
    flag = "model_name_or_path" if model_args.tokenizer_name is None else "tokenizer_name"
    name = getattr(model_args, flag)
    if name is None:
        raise ValueError("A model from scratch brings no tokenizer. Remedy: --tokenizer_name with a name or a path.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            cache_dir=model_args.cache_dir,
            revision=model_args.model_revision if flag == "model_name_or_path" else "main",
            token=model_args.token,
            trust_remote_code=model_args.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:400].rstrip(".")
        remedy = "--tokenizer_name with a model of the same vocabulary, or a folder with its tokenizer's files."
        if not os.path.exists(name):
            remedy = "give the path of a folder; none has this name here."
        raise ValueError(f"--{flag} {name}: no tokenizer can be loaded: {reason}. Remedy: {remedy}") from error
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
