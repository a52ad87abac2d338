"""The config of a model that a person names."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig
from transformers import __version__ as transformers_version

from .quiet import quiet


def config_at(source: str | Path) -> PretrainedConfig:
    """The config at ``source``: a directory, a ``config.json``, or a name on the hub. No weights are read.

    Raises:
        ValueError: there is no config that transformers can read.
    """
    try:
        with quiet():
            return AutoConfig.from_pretrained(str(source))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{str(source)!r} has no config that transformers {transformers_version} can read: {reason} Give a "
            "directory with a config.json, or the name of a model on the hub."
        ) from error
