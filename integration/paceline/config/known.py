"""Keys that DeepSpeed 0.19 reads, and warnings about keys that look like one of them.

DeepSpeed accepts unknown keys without a word at the top level and in some sections, so that a misspelt one is as good
as absent. The table of :mod:`.effects` has most of the keys; a test compares all with those that DeepSpeed reads.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from .effects import EFFECTS
from .section import SECTION, show, value_at


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP_LEVEL = frozenset(path.partition(".")[0] for path in EFFECTS)

# DeepSpeed refuses these by name.
REMOVED = _words(
    "amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula progressive_layer_drop "
    "quantize_training sparse_attention sparse_gradients"
)

# Sections in which DeepSpeed accepts unknown keys silently. Those that do nothing in a pipeline have their keys here.
SECTIONS = {
    "activation_checkpointing": _words(
        "contiguous_memory_optimization cpu_checkpointing number_checkpoints partition_activations profile "
        "synchronize_checkpoint_boundary"
    ),
    "checkpoint": _words(
        "checkpoint_serialization load_universal parallel_write tag_validation use_node_local_storage writer"
    ),
    **{
        name: frozenset(path.partition(".")[2] for path in EFFECTS if path.startswith(f"{name}."))
        for name in ("data_types", "flops_profiler", "optimizer", "pipeline", "scheduler", "torch_autocast")
    },
}

_CUTOFF = 0.8


# Sections whose keys are read here and by Trainer's rules.
_OBJECTS = (
    *("optimizer", "optimizer.params", "scheduler", "scheduler.params"),
    *("zero_optimization", "fp16", "bf16", "checkpoint", "data_types"),
)


def check_objects(ds_config: Mapping[str, Any]) -> None:
    """Raise ValueError for a section of DeepSpeed's that is no object, an optimizer or scheduler without a name, or a
    quoted ``"false"``, which is none where it is asked for its truth.

    ``"zero_optimization": true``, the old form, passes.
    """
    for path in _OBJECTS:
        parent, _, key = path.rpartition(".")
        holder = value_at(ds_config, parent) if parent else ds_config
        value = holder.get(key, {}) if isinstance(holder, Mapping) else {}
        if not isinstance(value, Mapping) and not (path == "zero_optimization" and isinstance(value, bool)):
            raise ValueError(f"{path} is {show(value)}: it must be an object; write {{}} or leave it out.")
    for path in ("optimizer.type", "scheduler.type"):
        value = value_at(ds_config, path)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{path} is {show(value)}: it must be a name; correct it, or leave it out.")
    for path, value in _quoted(ds_config):
        raise ValueError(f"{path} is {show(value)}: it must be true or false; write it without quotes.")


def near_misses(ds_config: Mapping[str, Any]) -> list[str]:
    """One line for each key that DeepSpeed does not read, with the one that it looks like, or that it refuses.

    Names that begin with ``_``, and ``comment``, are taken for remarks.
    """
    lines = [
        f'"{key}" was removed from DeepSpeed, which refuses a config that has it; delete it.'
        for key in ds_config
        if key in REMOVED
    ]
    lines += _near(ds_config, TOP_LEVEL | {SECTION}, "", skip=REMOVED)
    for name, keys in SECTIONS.items():
        section = ds_config.get(name)
        if isinstance(section, Mapping):
            lines += _near(section, keys, f"{name}.")
    return lines


def warn_near_misses(ds_config: Mapping[str, Any]) -> None:
    """Log :func:`near_misses` as warnings of the logger ``"paceline"``."""
    logger = logging.getLogger("paceline")
    for line in near_misses(ds_config):
        logger.warning(line)


def _quoted(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Paths of quoted truth values, outside of our section, which is checked by itself."""
    for key, value in section.items():
        if isinstance(value, Mapping) and key != SECTION:
            yield from _quoted(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value.lower() in ("true", "false"):
            yield f"{prefix}{key}", value


def _near(
    section: Mapping[str, Any], known: frozenset[str], prefix: str, skip: frozenset[str] = frozenset()
) -> list[str]:
    lines = []
    for key in section:
        if key in known or key in skip:
            continue
        near = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=_CUTOFF)
        if near:
            lines.append(f'"{prefix}{key}" is not a key that DeepSpeed reads; did you mean "{prefix}{near[0]}"?')
        elif not str(key).startswith("_") and key != "comment":
            lines.append(f'"{prefix}{key}" is not a key that DeepSpeed reads: it has no effect; delete it.')
    return lines
