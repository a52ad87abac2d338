"""DeepSpeed configs from files, as strict JSON: no duplicate keys, no NaN, no comments."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..json_values import read_json

_SECRET = re.compile(r"(^|_)(key|token|password|secret)$", re.IGNORECASE)


_ACCELERATES = ("gradient_", "zero_stage", "offload_", "zero3_save_", "mixed_precision")


def read_ds_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config of one's own: a deep copy of a dict, or what a JSON file holds.

    DeepSpeed reads Hjson and accepts more; what this accepts, everybody accepts.

    Raises:
        ValueError: no such file, not strict JSON, or not an object; with the file, line and column.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    path = Path(source)
    if _is_empty(path):
        raise ValueError(f"{path}: the file is empty; a DeepSpeed config is an object: write {{}} for the defaults.")
    config = read_json(source, "give the path of a DeepSpeed JSON")
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds {type(config).__name__}, a DeepSpeed config is an object {{...}}.")
    _check_kind(path, config)
    return config


def _is_empty(path: Path) -> bool:
    try:
        return path.is_file() and not path.read_bytes().strip()
    except OSError:  # of which the reader tells
        return False


def accelerates_ds_config(environment: Mapping[str, str]) -> str | None:
    """The JSON that ``accelerate launch`` was given, by ``--deepspeed_config_file`` or in its own config; else None."""
    if environment.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return None
    return environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")


def check_accelerates_keys(environment: Mapping[str, str]) -> None:
    """Raise ValueError for keys of accelerate's own config that it refuses beside a DeepSpeed JSON."""
    given = environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    keys = [key for key in given if key.startswith(_ACCELERATES)]
    if keys and environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise ValueError(
            f"accelerate's config has {', '.join(keys)}: DeepSpeed's values are read from its JSON; write them there, "
            "and deepspeed_config_file with its path in their place."
        )


def accelerates_precision(environment: Mapping[str, str]) -> str | None:
    """``"bf16"`` or ``"fp16"`` if ``accelerate launch --mixed_precision``, or accelerate's own config, says it."""
    precision = environment.get("ACCELERATE_MIXED_PRECISION")
    return precision if precision in ("bf16", "fp16") else None


def without_secrets(config: Any) -> Any:
    """``config``, to be shown: values of keys that name a key, a token, a password or a secret say ``"hidden"``."""
    if isinstance(config, Mapping):
        return {
            name: "hidden" if value and _SECRET.search(str(name)) else without_secrets(value)
            for name, value in config.items()
        }
    return [without_secrets(each) for each in config] if isinstance(config, (list, tuple)) else config


def _check_kind(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a model's own config, no key of which DeepSpeed would miss or complain of."""
    from .known import SECTION, TOP_LEVEL

    own = next((key for key in ("model_type", "architectures") if key in config), None)
    if own is not None and not config.keys() & {*TOP_LEVEL, SECTION}:
        raise ValueError(
            f"{path}: \"{own}\" is a key of a model's config, and none is DeepSpeed's: give a DeepSpeed JSON "
            f"(`paceline plan` writes one); whether the model can be a pipeline, `paceline check-model {path.parent}` "
            "says."
        )
