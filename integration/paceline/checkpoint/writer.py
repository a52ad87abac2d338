"""One rank's part in saving checkpoints: a copy on the training path, everything else on a thread."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..measure.device_of_thread import on_this_device
from .format import CheckpointError, Piece, check_tag, pack, rank_file, write_file
from .publish import UNDER_WAY, Save, discard, publish, refuse, remove_leftovers, reported, wait_until_published
from .reader import latest_checkpoint
from .snapshot import Snapshot

logger = logging.getLogger("paceline")

NONE_YET = ". There is no complete checkpoint yet"
"""Ends the error of a save into a folder that has none."""


def new_run() -> str:
    """A name for a run of this job. Rank 0 makes one as the run begins, and all ranks take it."""
    return secrets.token_hex(4)


class CheckpointWriter:
    """Saves the checkpoints of one run. Every rank has one, and calls :meth:`save` with the same tag.

    Ranks meet in the file system that all of them see: each writes its pieces into a draft and leaves a mark, and rank
    0 publishes the draft once all marks are there. If one rank fails, all of them learn its cause.

    Args:
        run: the same string on all ranks, of digits and lower-case letters, and another one in every run of the job
            (:func:`new_run`): tells the draft of this run from what a killed one left.
        time_limit_s: how long rank 0 waits for the other ranks' files, and they for rank 0.
    """

    def __init__(self, *, rank: int, world_size: int, run: str, time_limit_s: float = 1800.0) -> None:
        if not (run.isascii() and run.isalnum() and run == run.lower()):
            raise ValueError(f"run {run!r}: must be digits and lower-case letters; new_run() makes one.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank}: must be one of the {world_size} ranks.")
        self.rank = rank
        self.world_size = world_size
        self.run = run
        self.time_limit_s = time_limit_s
        self._number = 0
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._forgotten = 0
        self._taken: Any = None
        atexit.register(self._at_exit)  # or the interpreter ends under the thread

    def save(
        self,
        root: str | Path,
        tag: str,
        pieces: Iterable[Piece],
        *,
        rank_state: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        files: Callable[[Path], None] | None = None,
        keep: int | None = None,
        wait: bool = False,
    ) -> None:
        """Begin to save ``root/tag``; returns as soon as everything is copied, so the tensors may change.

        Waits for an earlier save that is still under way.

        Args:
            pieces: that this rank owns. Of every row of the job's tensors, one rank at least has it.
            rank_state: what belongs to this rank alone, loadable with ``weights_only=True``.
            meta: the same of the whole job. Rank 0's counts.
            files: called on rank 0 with the draft's folder, to write more files. It runs on the thread.
            keep: delete older checkpoints of paceline beyond so many, this one included. Rank 0's counts.
            wait: return only when the checkpoint is there.

        Raises:
            ValueError: a piece, state or tag that cannot be saved; nothing has begun then.
            CheckpointError: an earlier save failed and nobody has asked (:meth:`poll`, :meth:`wait`); or this one,
                with ``wait``.
        """
        check_tag(tag)
        try:
            self.take(root, tag, pieces, rank_state=rank_state, meta=meta, files=files, keep=keep)
        except ValueError as error:
            save = self._next(Path(root), tag)  # in step with the other ranks, which have begun
            if self.world_size > 1:
                self._tell(save, reported(save, error))
            raise
        self.start()
        if wait:
            self.wait()

    def take(
        self,
        root: str | Path,
        tag: str,
        pieces: Iterable[Piece],
        *,
        rank_state: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        files: Callable[[Path], None] | None = None,
        keep: int | None = None,
    ) -> None:
        """The first half of :meth:`save`: check and copy everything. Nothing is written before :meth:`start`.

        Raises:
            CheckpointError: as :meth:`save`; and if this rank may not write, which it could not tell the others either.
        """
        check_tag(tag)
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}: at least the new checkpoint is kept; give 1 or more, or None for all.")
        self._check_may_write(Path(root))
        state = pack(dict(rank_state or {}), "rank_state")
        packed_meta = pack(dict(meta or {}), "meta") if self.rank == 0 else b""
        self.wait()
        self._snapshot.take(pieces)
        self._taken = (Path(root), tag, state, packed_meta, files, keep)

    def start(self) -> None:
        """The second half: begin to write what was taken. If one rank could not take it, none may start."""
        (root, tag, *arguments), self._taken = self._taken, None  # or it would keep the job of ``files`` until the exit
        save = self._next(root, tag)
        if self.rank == 0:
            UNDER_WAY.add((save.run, save.number))
        self._thread = threading.Thread(
            target=on_this_device(self._write), args=(save, *arguments), name="paceline-checkpoint", daemon=True
        )
        self._thread.start()

    def prepare(self, pieces: Iterable[Piece]) -> None:
        """Take the host memory for pieces such as these now, so that the first save is as quick as the others.

        Raises:
            CheckpointError: as :meth:`wait`.
        """
        self.wait()
        self._snapshot.take(pieces)

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> CheckpointError | None:
        """The error of the last save, once; None if it did not fail, or is still under way. Never blocks."""
        if self.busy:
            return None
        error, self._error, self._thread = self._error, None, None
        return None if self._forgotten == self._number else error

    def forget(self) -> None:
        """Skip the report of the last save's failure: this rank has heard of it from another one."""
        self._forgotten = self._number

    def wait(self) -> None:
        """Block until the last save is published.

        Raises:
            CheckpointError: it failed, on this rank or another.
        """
        if self._thread is not None:
            self._thread.join()
        if (error := self.poll()) is not None:
            raise error

    def close(self) -> None:
        """Wait for the last save and give the host memory back. Raises as :meth:`wait`."""
        try:
            self.wait()
        finally:
            self._snapshot, self._taken = Snapshot(), None

    def _next(self, root: Path, tag: str) -> Save:
        self._number += 1
        return Save(root, tag, self.run, self._number, self.rank, self.world_size, self.time_limit_s)

    def _check_may_write(self, root: Path) -> None:
        there = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
        if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
            raise CheckpointError(
                f"{root} cannot be saved to: rank {self.rank} may not write to {there}, which is read-only there or "
                "another user's; choose a folder that all ranks can write to."
            )

    def _at_exit(self) -> None:
        try:
            self.wait()
        except CheckpointError as error:  # nobody has asked
            logger.error("%s", error)

    def _write(
        self, save: Save, state: bytes, meta: bytes, files: Callable[[Path], None] | None, keep: int | None
    ) -> None:
        try:
            if self.rank == 0:
                remove_leftovers(save)
            self._write_own(save, state)
            if self.rank == 0:
                publish(save, meta, files, keep)
            else:
                wait_until_published(save)
        except Exception as error:
            cause = reported(save, error)
            self._tell(save, cause)
            self._error = CheckpointError(f"{save.target} was not saved: {cause}{self._last_complete(save)}")
            self._error.__cause__ = error
            logger.debug("saving %s failed", save.target, exc_info=True)
        finally:
            UNDER_WAY.discard((save.run, save.number))

    def _tell(self, save: Save, cause: str) -> None:
        """Spare the other ranks their time limit."""
        with contextlib.suppress(OSError):
            save.draft.mkdir(parents=True, exist_ok=True)
            refuse(save, cause)

    def _write_own(self, save: Save, state: bytes) -> None:
        save.draft.mkdir(parents=True, exist_ok=True)
        contents: dict[str, tuple[bytes | memoryview, ...]] = {
            "safetensors": (self._snapshot.header, *self._snapshot.data()),
            "json": (self._snapshot.index,),
            "pt": (state,),
        }
        try:
            entries = {
                rank_file(self.rank, suffix): write_file(save.draft / rank_file(self.rank, suffix), *parts)
                for suffix, parts in contents.items()
            }
            save.mark_done(entries)
        except OSError:
            discard(save)  # makes room for saying so
            raise

    def _last_complete(self, save: Save) -> str:
        with contextlib.suppress(OSError, ValueError):
            if (last := latest_checkpoint(save.root)) is not None:
                return f". The last complete checkpoint is {last}"
        return NONE_YET
