"""Paths that people give where a name on the hub may stand too."""

from __future__ import annotations

import json
import os
from pathlib import Path


def is_missing(source: str | Path) -> bool:
    """Whether a path is meant that does not exist; transformers would take it for a name on the hub, and say so.

    >>> is_missing("./nowhere"), is_missing("Qwen/Qwen3-0.6B")
    (True, False)
    """
    text = str(source)
    is_path = isinstance(source, Path) or text.startswith((".", "/", "~")) or text.endswith(("/", ".json"))
    # Path's own `exists` fails for names that no file can have.
    return (is_path or text.count("/") > 1) and not os.path.exists(text)


def check_model_path(source: str | Path) -> None:
    """Check that a path that is meant for a model exists, and holds more than adapters.

    Raises:
        ValueError: it does not exist, or holds adapters of PEFT's without their model.
    """
    if is_missing(source):
        raise ValueError(
            f"{str(source)!r} does not exist: give a directory with a config.json (or that file), or the name of a "
            "model on the hub, as in Qwen/Qwen3-0.6B."
        )
    if rule := only_adapters(source):
        raise ValueError(f"{str(source)!r} {rule}: {MODEL_OF_ADAPTERS}.")


def only_adapters(source: str | Path) -> str:
    """The statement that the directory ``source`` holds adapters without their model; empty if it does not."""
    config = os.path.join(source, "adapter_config.json")
    if not os.path.exists(config) or os.path.exists(os.path.join(source, "config.json")):
        return ""
    base = json.loads(Path(config).read_text()).get("base_model_name_or_path")
    return f"holds PEFT adapters of {base}, not a model"


MODEL_OF_ADAPTERS = (
    "give that model to train new adapters, or the two as one (PeftModel.merge_and_unload, then save_pretrained)"
)
"""Remedy for a directory that holds :func:`only_adapters`."""
