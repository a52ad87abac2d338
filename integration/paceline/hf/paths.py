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
    """Check that a path that is meant for a model exists, and holds nothing else.

    Raises:
        ValueError: it does not exist, or :func:`no_model` says what it is.
    """
    if is_missing(source):
        raise ValueError(
            f"{str(source)!r} does not exist: give a directory with a config.json (or that file), or the name of a "
            "model on the hub, as in Qwen/Qwen3-0.6B."
        )
    if found := no_model(source):
        rule, remedy = found
        raise ValueError(f"{str(source)!r} {rule}: {remedy}.")


def no_model(source: str | Path) -> tuple[str, str] | None:
    """The statement that the directory ``source`` holds something else than a model, and the remedy.

    That is adapters without their model, or a checkpoint of a pipeline. None: it may be a model.
    """
    if os.path.exists(os.path.join(source, "config.json")):
        return None
    config = os.path.join(source, "adapter_config.json")
    if os.path.exists(config):
        base = json.loads(Path(config).read_text()).get("base_model_name_or_path")
        return (
            f"holds PEFT adapters of {base}, not a model",
            "give that model to train new adapters, or the two as one (PeftModel.merge_and_unload, then "
            "save_pretrained)",
        )
    if all(os.path.exists(os.path.join(source, name)) for name in ("manifest.json", "meta.pt", "model/config.json")):
        return "is a checkpoint, not a model", f"make a model of it with `paceline export {source} DIR`, and give that"
    return None
