"""The config of a model that a person names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers import __version__ as transformers_version

from ..measure.flops import NUM_EXPERTS, size_of
from .anatomy import UnsupportedModelError
from .paths import check_model_path
from .quiet_transformers import quiet
from .weights import causal_config, skeleton

MOST_LAYERS = 1024
_MOST = {"num_hidden_layers": MOST_LAYERS, "hidden_size": 2**20, "head_dim": 2**16, "num_attention_heads": 2**16}
_MOST |= dict.fromkeys(NUM_EXPERTS, 2**14)
MOST_SIZE = 2**31
"""Largest number in a config: with more, the sizes of tensors overflow, or counting takes minutes."""


def config_at(source: str | Path) -> PretrainedConfig:
    """The config at ``source``: a directory, a ``config.json``, or a name on the hub. No weights are read.

    Raises:
        ValueError: there is no config that transformers can read.
    """
    check_model_path(source)
    try:
        with quiet():
            return AutoConfig.from_pretrained(str(source))
    except Exception as error:
        raise ValueError(
            f"{_named(source)} has no config that transformers {transformers_version} can read: {_reason(error)} Give "
            "a directory with a config.json, or the name of a model on the hub."
        ) from error


def model_config_at(source: str | Path) -> PretrainedConfig:
    """The config at ``source``, checked: its sizes are valid, and transformers builds a model of it.

    Raises:
        UnsupportedModelError: it can be made, and not be cut into stages.
        ValueError: there is no such config, or no such model.
    """
    config = config_at(source)
    try:
        text = config.get_text_config()
        own = {name: size_of(text, name) for name in _MOST} | vars(text)
        _check_sizes(source, own)
        with quiet():
            skeleton(causal_config(config))
    except ValueError as error:
        if isinstance(error, UnsupportedModelError) or str(error).startswith(repr(str(source))):
            raise
        raise _impossible(source, error) from error
    except Exception as error:  # a family's constructor raises what it likes
        raise _impossible(source, error) from error
    return config


def _check_sizes(source: str | Path, values: dict[str, Any]) -> None:
    for name, value in values.items():
        most = _MOST.get(name, MOST_SIZE)
        if isinstance(value, int | float) and abs(value) > most:
            raise ValueError(f"{str(source)!r} has a {name} that is too large to count with: give at most {most}.")
    for name in ("max_position_embeddings", "num_hidden_layers"):
        value = values.get(name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{str(source)!r} has {name} {value!r}: give a whole number from 1 upwards.")
    heads, of_keys = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(of_keys, int) and (of_keys < 1 or heads % of_keys):
        raise ValueError(
            f"{str(source)!r} has {heads} attention heads and num_key_value_heads {of_keys}: give a divisor of them."
        )


def _named(source: str | Path) -> str:
    """``source`` in quotes; of a name that is no file or directory here, that too."""
    return repr(str(source)) if os.path.exists(source) else f"{str(source)!r}, which is no directory here,"


def _impossible(source: str | Path, error: Exception) -> ValueError:
    return ValueError(f"no model can be made of {str(source)!r}: {_reason(error)} Give a config that fits together.")


def _reason(error: Exception) -> str:
    """The first line of an error, and the next one where it only leads to that."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(map(str.strip, lines[: 2 if lines[0].endswith(":") else 1]))
