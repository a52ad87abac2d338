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
    for path in sorted(root.glob("*.py"), key=lambda p: p.name):
        if path.name.startswith("_sysconfigdata") or not path.is_file():
            continue
        content = path.read_bytes()
        if not content.strip() or total + len(content) > max_bytes or not _is_utf8(content):
            continue
        chosen.append(path)
        total += len(content)
    if not chosen:
        raise ValueError(f"{root}: the embedded corpus needs the standard library's *.py files. Remedy: --train_file.")
    return chosen


def split(paths: Sequence[Path], held_out_percentage: int = 5) -> tuple[list[Path], list[Path]]:
    """``(train, held out)``: a file is held out if a hash of its name says so, whatever other files there are."""
    held_out = [p for p in paths if _bucket(p.name) < held_out_percentage]
    return [p for p in paths if p not in held_out], held_out


def _bucket(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
