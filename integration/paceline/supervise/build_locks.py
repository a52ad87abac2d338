"""Locks in torch's folder of C++ extensions: a build that is killed leaves its own, and others wait for it for ever."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("paceline")

YOUNG_S = 60
"""Seconds for which another host, whose processes cannot be seen here, may well be building."""


def extension_folders() -> list[Path]:
    """Where torch builds C++ extensions."""
    folders = [Path(os.environ["TORCH_EXTENSIONS_DIR"])] if os.environ.get("TORCH_EXTENSIONS_DIR") else []
    if not folders:
        from torch.utils.cpp_extension import get_default_build_root

        folders.append(Path(get_default_build_root()))
    return folders


def locks(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The locks of builds in ``folders``: path, age in seconds, and the process of this machine that holds it.

    A build has its lock open until it is done. One that is killed leaves it, and others wait for it without end.
    """
    found = []
    for folder in folders:
        for pattern in ("lock", "*/lock", "*/*/lock"):  # with and without a folder for the version of Python
            for path in sorted(folder.glob(pattern)):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    holder = _holder(status.st_dev, status.st_ino)
                    age_s = round(max(0.0, time.time() - status.st_mtime))
                    found.append({"path": str(path), "age_s": age_s, "holder": holder})
    return found


def _holder(device: int, inode: int) -> int | None:
    """A process of this machine that has the file open, as far as this one may look."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for name in os.listdir(entry / "fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(entry / "fd" / name)
                    if (status.st_dev, status.st_ino) == (device, inode):
                        return int(entry.name)
    return None


@functools.cache
def warn_of_locks() -> None:
    """Log the locks that nobody here holds, once a process: DeepSpeed would wait for them without a word."""
    for lock in locks(extension_folders()):
        if lock["holder"] is not None:
            continue
        path, age_s = lock["path"], lock["age_s"]
        if age_s < YOUNG_S:
            text = "%s is %d s old, and no process of this host holds it: unless another host builds there, rm %s"
        else:
            text = "%s was left %d s ago by a build that was killed: DeepSpeed waits for it without end; rm %s"
        logger.warning(text, path, age_s, path)
