"""Models whose weights are quantised: frozen, so that there is something to train only with adapters (QLoRA)."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch
from packaging.version import Version
from transformers import PretrainedConfig

from .arguments import ModelArguments

BITSANDBYTES = "bitsandbytes"

OLDEST = Version("0.49")
"""The oldest bitsandbytes that is supported."""


def quantisation_of(config: PretrainedConfig) -> str | None:
    """The method of a quantised checkpoint or model (``"bitsandbytes"``, ``"gptq"``, …); None if there is none."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def check_trainable(config: PretrainedConfig, adapters: Any) -> None:
    """Raise ValueError if the weights are quantised and nothing else is there to be trained, or cannot be cut."""
    method = quantisation_of(config)
    if method is None:
        return
    if adapters is None:
        raise ValueError(
            f"the model's weights are quantised ({method}), and quantised weights cannot be trained: add adapters "
            "(get_peft_model, --use_peft), or load the model without quantisation."
        )
    if method != BITSANDBYTES:
        raise ValueError(
            f"the model's weights are quantised by {method}: pipelines train adapters on weights of {BITSANDBYTES} or "
            "on plain ones; load the model so."
        )


def quantised_loading(args: ModelArguments, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that quantise weights as the flags say; empty without such flags.

    Raises:
        ValueError: there is nothing here that quantises.
    """
    if not (args.load_in_4bit or args.load_in_8bit):
        return {}
    flag = "--load_in_4bit" if args.load_in_4bit else "--load_in_8bit"
    check_bitsandbytes(flag)
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=args.load_in_4bit,
            load_in_8bit=args.load_in_8bit,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_type=args.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=args.use_bnb_nested_quant,
        )
    }


def check_bitsandbytes(asked: str) -> None:
    """Raise ValueError if bitsandbytes is not there, or is older than what runs on CPUs too."""
    try:
        found = metadata.version(BITSANDBYTES)
    except metadata.PackageNotFoundError:
        found = None
    if found is None or Version(found) < OLDEST:
        has = "is not installed" if found is None else f"is {found}"
        raise ValueError(
            f"{asked}: weights are quantised by bitsandbytes {OLDEST} or newer, which {has}; pip install bitsandbytes, "
            "or leave it out."
        )
