"""What every result of a benchmark names: settings, hardware, versions, commit."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator

import paceline


def facts(args: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """Settings are ``args`` but for ``left_out`` and what says where to write.

    ``COMMIT`` in the environment names the commit where there is no git to ask.
    """
    skipped = {"output", "local_rank", *left_out}
    return {
        "settings": {key: value for key, value in vars(args).items() if key not in skipped},
        "hardware": f"{get_accelerator().device_name()}, {os.cpu_count()} cores, {platform.machine()}",
        "versions": {m.__name__: m.__version__ for m in (torch, deepspeed, transformers, paceline)},
        "commit": os.environ.get("COMMIT") or _commit(),
    }


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent)
    return told.stdout.strip()
