"""Whether a model keeps several samples in one row apart.

transformers reads from ``position_ids`` that begin anew, where there is no attention mask, that a row has several
samples, and lets none attend to another. Models with recurrent state, or with positions of their own making, do not.
"""

from __future__ import annotations

import inspect

import torch
from transformers import PretrainedConfig

from ..hf.family_configs import shrink
from ..hf.quiet_transformers import quiet
from ..hf.weights import causal_config, model_class_of

LEAK = 1e-4
"""Largest relative difference in logits between a packed sample and the same sample alone that is rounding."""


def require_packable(
    config: PretrainedConfig, asked: str = "--packing", remedy: str = "leave --packing out, then samples are padded"
) -> None:
    """Check on a small copy of the model that samples packed into a row are computed as each one alone.

    A second or two. Every rank comes to the same answer, without asking the others.

    Raises:
        ValueError: they are not, or it cannot be found out.
    """
    name = f"{asked}: model type {config.model_type!r}"
    remedy = f"Remedy: {remedy}."
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            leak = packing_leak(config)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name} cannot be checked for packing: {type(error).__name__}: {reason}. {remedy}") from error
    if leak is None:
        raise ValueError(f"{name} takes no position_ids, so it cannot tell packed samples apart. {remedy}")
    if not leak <= LEAK:
        raise ValueError(
            f"{name} does not keep packed samples apart: on a small copy, logits differ by {leak:.1e} from those of "
            f"the samples alone. {remedy}"
        )


def packing_leak(config: PretrainedConfig) -> float | None:
    """Largest relative difference in logits of samples in one row against each alone; None: no ``position_ids``."""
    config = shrink(causal_config(config))
    if getattr(config, "attention_chunk_size", None):
        config.attention_chunk_size = 4  # as small as the copy, or a chunk's edge is never met
    model = model_class_of(config)(config).eval()
    for module in (model, model.base_model):
        if "position_ids" not in inspect.signature(inspect.unwrap(type(module).forward)).parameters:
            return None
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    vocab_size = config.get_text_config().vocab_size
    lengths = [5, 9, 1, 6]
    samples = [torch.randint(3, vocab_size - 1, (1, length), generator=generator) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat(samples, dim=1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in samples], dim=1)
    difference = (packed - alone).abs().max() / alone.abs().max()
    return float("inf") if not torch.isfinite(difference) else float(difference)
