"""Agreement of ranks through the file system that a draft is complete, and its publication by rank 0.

A rank that has written its files leaves a mark ``rank_….done`` in the draft, one that could not ``rank_….failed`` with
the cause. Rank 0 alone judges: it renames the draft, or removes it and leaves a verdict with the cause in the root.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .format import (
    FORMAT,
    LATEST,
    MANIFEST,
    META,
    VERSION,
    CheckpointError,
    draft_parts,
    problem_of,
    rank_file,
    read_digest,
    read_manifest,
    sync,
    write_file,
)
from .reader import own_checkpoints

logger = logging.getLogger("paceline")

FIRST_POLL_S, LONGEST_POLL_S = 0.01, 0.5
VERDICT_MARGIN_S = 60.0
"""Others wait longer than rank 0 by so much, so that they hear its verdict rather than give up themselves."""
VERDICT_DELAY_S = 5.0

UNDER_WAY: set[tuple[str, int]] = set()
"""Run and number of the saves that this process, as rank 0, is writing: it may have several engines."""


@dataclass(frozen=True)
class Save:
    """Save ``number`` of a run, seen from ``rank``."""

    root: Path
    tag: str
    run: str
    number: int
    rank: int
    world_size: int
    time_limit_s: float

    @property
    def target(self) -> Path:
        return self.root / self.tag

    @property
    def id(self) -> str:
        return f"{self.run}-{self.number}"

    @property
    def draft(self) -> Path:
        return self.root / f".{self.tag}.{self.id}.draft"

    @property
    def verdict(self) -> Path:
        return self.root / f".{self.tag}.{self.id}.failed"

    def mark_done(self, entries: dict[str, Any]) -> None:
        """Announce that this rank's files, with their entries of the manifest, are all there."""
        _replace(self.draft / rank_file(self.rank, "done"), json.dumps(entries))


class FailedElsewhere(Exception):
    """Another rank could not write its files; the message is its cause."""


def reported(save: Save, error: Exception) -> str:
    """The cause of a failure in a line, by the names that files would have had."""
    if isinstance(error, FailedElsewhere):
        return str(error)
    # What this rank has just written is gone: rank 0 is deleting the draft, and about to say why.
    is_deleted = isinstance(error, OSError) and (isinstance(error, FileNotFoundError) or _is_gone(save.draft))
    if save.rank and is_deleted and not isinstance(error, NotADirectoryError):  # there can be no word of rank 0 then
        for _ in _moments(VERDICT_DELAY_S):
            with contextlib.suppress(OSError):
                return save.verdict.read_text()
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, ValueError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return f"rank {save.rank}: {text}".replace(str(save.draft), str(save.target)).rstrip(".")


def _is_gone(path: Path) -> bool:
    """Whether there is nothing at ``path``; of a place that cannot be looked at nobody knows."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def refuse(save: Save, cause: str) -> None:
    """After a failure: say so to the other ranks and leave nothing of the draft."""
    if save.rank == 0:
        shutil.rmtree(save.draft, ignore_errors=True)  # first: the verdict may need the room
        _say(save.verdict, cause)
        shutil.rmtree(save.draft, ignore_errors=True)  # another rank may have told its own failure there meanwhile
    elif save.verdict.exists():
        discard(save)
        with contextlib.suppress(OSError):
            save.draft.rmdir()
    else:
        _say(save.draft / rank_file(save.rank, "failed"), cause)


def discard(save: Save) -> None:
    """Delete this rank's files of the draft."""
    for suffix in ("safetensors", "json", "pt", "done"):
        (save.draft / rank_file(save.rank, suffix)).unlink(missing_ok=True)


def wait_until_published(save: Save) -> None:
    """Wait, on the other ranks, once their files are written.

    Raises:
        FailedElsewhere: rank 0 has said no.
        CheckpointError: it has said nothing in time.
    """
    for _ in _moments(save.time_limit_s + VERDICT_MARGIN_S):
        if not save.draft.exists():
            with contextlib.suppress(CheckpointError):
                if read_manifest(save.target)["save"] == save.id:
                    return
        with contextlib.suppress(FileNotFoundError):
            raise FailedElsewhere(save.verdict.read_text() or "rank 0 could not write why: the disk is full")
    raise CheckpointError(f"rank 0 did not publish it within {save.time_limit_s + VERDICT_MARGIN_S:g} s")


def publish(save: Save, meta: bytes, files: Callable[[Path], None] | None, keep: int | None) -> None:
    """Publish, on rank 0, once its files are written: from waiting for the others to deleting old checkpoints.

    Raises:
        FailedElsewhere: another rank could not write.
        CheckpointError: one said nothing in time, or its files are not seen here.
        OSError: the disk is full, say.
    """
    entries = _collect(save)
    entries[META] = write_file(save.draft / META, meta)
    if files is not None:
        files(save.draft)
        entries |= _add(save.draft, entries)
    older = own_checkpoints(save.root)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tag": save.tag,
        "save": save.id,
        "sequence": 1 + max((manifest["sequence"] for _, manifest in older), default=0),
        "world_size": save.world_size,
        "files": dict(sorted(entries.items())),
    }
    write_file(save.draft / MANIFEST, json.dumps(manifest, indent=1).encode())
    write_file(save.draft / LATEST, save.tag.encode())  # now: once the draft is in place, nothing may need room
    sync(save.draft)
    _move_into_place(save)
    os.replace(save.target / LATEST, save.root / LATEST)
    sync(save.root)
    if keep is not None:
        _delete_beyond(save, keep)


def remove_leftovers(save: Save) -> None:
    """Delete drafts and verdicts of other runs, unless they are under way here, and of this run's earlier saves."""
    save.root.mkdir(parents=True, exist_ok=True)
    for path in save.root.iterdir():
        parts = draft_parts(path.name)
        if parts is None or parts == (save.run, save.number) or parts in UNDER_WAY:
            continue
        # The verdict before this save may not have been read yet; the one before that is not needed any more.
        if path.suffix == ".failed" and parts == (save.run, save.number - 1):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _collect(save: Save) -> dict[str, dict[str, Any]]:
    """The files of all ranks, once they are written; the marks go."""
    waiting = set(range(save.world_size))
    entries: dict[str, dict[str, Any]] = {}
    for _ in _moments(save.time_limit_s):
        present = set(os.listdir(save.draft))
        for rank in sorted(waiting):
            if rank_file(rank, "failed") in present:
                cause = (save.draft / rank_file(rank, "failed")).read_text()
                raise FailedElsewhere(cause or f"rank {rank} could not write, not even why: the disk is full")
            if rank_file(rank, "done") in present:
                entries |= json.loads((save.draft / rank_file(rank, "done")).read_text())
                waiting.remove(rank)
        if not waiting:
            break
    else:
        late = ", ".join(map(str, sorted(waiting)))
        raise CheckpointError(
            f"rank {late} has not written its files to {save.target} within {save.time_limit_s:g} s: choose a folder "
            "on a file system that all nodes share"
        )
    for name, entry in entries.items():
        size = (save.draft / name).stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{save.draft / name} has {size} bytes instead of {entry['bytes']}")
    for rank in range(save.world_size):
        (save.draft / rank_file(rank, "done")).unlink()
    return entries


def _add(draft: Path, known: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The files below ``draft`` that are not ``known``, synced."""
    added = {}
    for folder, _, names in os.walk(draft):
        for path in (Path(folder, name) for name in names):
            name = path.relative_to(draft).as_posix()
            if name not in known:
                added[name] = read_digest(path)
                sync(path)
        if folder != str(draft):
            sync(Path(folder))
    return added


def _move_into_place(save: Save) -> None:
    """Rename the draft to its tag, in the place of a checkpoint that may be there.

    Somebody else's file or folder of that name, such as a checkpoint of DeepSpeed's, is set aside.
    """
    if save.target.exists() and not _is_own(save.target):
        aside = save.root / f"{save.tag}.before-{save.id}"
        save.target.rename(aside)
        logger.warning("%s was there and is no checkpoint of paceline: it is %s now", save.target, aside)
    if save.target.exists():
        if not _exchanged(save.draft, save.target):
            # For a moment there is nothing under the tag, so nothing may point to it.
            others = [path for path, _ in own_checkpoints(save.root) if path != save.target]
            if others:
                _replace(save.root / LATEST, others[-1].name)
            else:
                (save.root / LATEST).unlink(missing_ok=True)
            old = save.draft.with_suffix(".old.draft")
            save.target.rename(old)
            save.draft.rename(save.target)
            shutil.rmtree(old, ignore_errors=True)
    else:
        save.draft.rename(save.target)
    sync(save.root)
    shutil.rmtree(save.draft, ignore_errors=True)


def _is_own(path: Path) -> bool:
    """Whether a checkpoint of ours is, or was, at ``path``: it may be damaged, or an empty folder; no link to one."""
    if path.is_symlink() or not path.is_dir():
        return False
    names = (MANIFEST, META, rank_file(0, "json"))
    return any((path / name).exists() for name in names) or not any(path.iterdir())


def _exchanged(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _delete_beyond(save: Save, keep: int) -> None:
    """Delete what is older than the ``keep`` newest complete ones.

    A kill in the middle leaves a draft, no torn checkpoint.
    """
    own = own_checkpoints(save.root)
    complete = [manifest["sequence"] for path, manifest in own if problem_of(path, manifest) is None]
    for path, manifest in own:
        if manifest["sequence"] < min(complete[-keep:]):
            doomed = save.root / f".{path.name}.{save.id}.draft"
            try:
                path.rename(doomed)
            except OSError as error:  # somebody else's, or gone: the new one is there all the same
                logger.warning("%s, an older checkpoint, cannot be deleted: %s", path, error.strerror)
            shutil.rmtree(doomed, ignore_errors=True)


def _replace(path: Path, text: str) -> None:
    """Write a small file so that others see it whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    write_file(temporary, text.encode())
    os.replace(temporary, path)
    with contextlib.suppress(FileNotFoundError):  # of a draft: as the last rank is done, rank 0 publishes it
        sync(path.parent)


def _say(path: Path, cause: str) -> None:
    try:
        _replace(path, cause)
    except OSError:
        path.touch()  # a name needs no space


def _moments(limit_s: float) -> Iterator[None]:
    """Now, and again and again until the limit, ever less often."""
    end = time.monotonic() + limit_s
    pause_s = FIRST_POLL_S
    while True:
        yield
        if time.monotonic() >= end:
            return
        time.sleep(pause_s)
        pause_s = min(LONGEST_POLL_S, pause_s * 1.5)
