"""Files of weights in a model's directory: which of them is missing or damaged, once loading has failed."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

_POINTER = b"version https://git-lfs"


def fault_in(directory: str | Path) -> str:
    """The first missing or damaged file of weights in ``directory``, and the remedy; empty if none is found."""
    directory = Path(directory)
    names = _names(directory)
    if not names:
        others = [path.name for path in sorted(directory.glob("*.gguf"))[:1]]
        unread = f" ({others[0]} is in a format that is not read)" if others else ""
        return f"it has no {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME}{unread}: download one of them, or give another model."
    for name in names:
        if fault := _fault_of(directory / name):
            return f"{name} {fault}"
    return ""


def _names(directory: Path) -> list[str]:
    """Files of weights, of which the directory may not have all, as transformers looks for them."""
    for whole, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (directory / whole).exists():
            return [whole]
        if (directory / index).exists():
            return sorted(set(json.loads((directory / index).read_text())["weight_map"].values()))
    return []


def _fault_of(file: Path) -> str:
    if not file.exists():
        return "is missing: download it."
    with file.open("rb") as opened:
        start = opened.read(len(_POINTER))
    if start == _POINTER:
        return "is a git-lfs pointer, not the weights: run `git lfs pull` in the directory."
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt"):
                return ""
        except SafetensorError as error:
            return f"is incomplete or damaged ({type(error).__name__}: {error}): download it again."
    is_cut = start.startswith(b"PK") and not zipfile.is_zipfile(file)
    return "is incomplete or damaged: download it again." if is_cut or not start else ""
