"""The embedded corpus: the Python standard library's own source, which every machine has. No download.

It depends on the interpreter: nodes of one job run the same Python version, or see different text.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 3_000_000


def source_files(root: Path | None = None, max_bytes: int = MAX_BYTES) -> list[Path]:
    """The ``*.py`` files directly in the standard library (or ``root``), sorted by name, ``max_bytes`` in all at most.

    Packages are left out, and with them site-packages and the tests; so are empty files, files that are not UTF-8,
    and the build's own settings (``_sysconfigdata*``), which differ from machine to machine.

    Raises:
        ValueError: there is no source, as in an interpreter that ships compiled files only.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    chosen, total = [], 0
    for path in sorted(root.glob("*.py")):
        content = path.read_bytes()
        is_text = bool(content.strip()) and content.decode(errors="ignore").encode() == content
        if is_text and total + len(content) <= max_bytes and not path.name.startswith("_sysconfigdata"):
            chosen.append(path)
            total += len(content)
    if not chosen:
        raise ValueError(f"{root}: the embedded corpus needs the standard library's *.py files. Remedy: --train_file.")
    return chosen


def split(paths: Sequence[Path], held_out_percentage: int = 5) -> tuple[list[Path], list[Path]]:
    """``(train, held out)``: a file is held out if a hash of its name says so, whatever other files there are."""
    hashes = {path: hashlib.sha256(path.name.encode()).digest() for path in paths}
    held_out = [path for path in paths if int.from_bytes(hashes[path][:8], "big") % 100 < held_out_percentage]
    return [path for path in paths if path not in held_out], held_out
