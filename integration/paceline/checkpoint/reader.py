"""Reading checkpoints: what is there, whether it is whole, and any rows of any tensor."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .format import (
    DTYPES,
    FORMAT,
    LATEST,
    MANIFEST,
    META,
    MODEL_KINDS,
    CheckpointError,
    problem_of,
    rank_file,
    read_digest,
    read_manifest,
    unpack,
)

logger = logging.getLogger("paceline")

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class _Rows:
    """Rows ``start`` to ``stop`` of a tensor, and where they lie.

    Args:
        columns: first one and end, where only some are there.
    """

    start: int
    stop: int
    file: str
    key: str
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Stored:
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: list[_Rows]


class Checkpoint:
    """A complete checkpoint. :meth:`open` makes one.

    Attributes:
        path: its directory.
        meta: what rank 0 gave as ``meta``.
        world_size: of the run that wrote it.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.world_size: int = manifest["world_size"]
        self._files: dict[str, dict[str, Any]] = manifest["files"]
        self._handles: dict[str, Any] = {}
        self.meta: dict[str, Any] = self._unpacked(META)
        self._stored: dict[str, dict[str, _Stored]] = defaultdict(dict)
        for rank in range(self.world_size):
            self._index(rank)
        for kinds in self._stored.values():
            for stored in kinds.values():
                stored.rows.sort(key=lambda rows: rows.start)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open the checkpoint at ``path``; all files are there and have their sizes, small ones their digests.

        Raises:
            CheckpointError: it is none, or not whole. Names what is wrong, and the last complete one before it.
        """
        path = Path(os.path.abspath(path))
        manifest = None
        try:
            _refuse_others(path)
            manifest = read_manifest(path)
            if (problem := problem_of(path, manifest)) is not None:
                raise CheckpointError(problem)
            return cls(path, manifest)
        except CheckpointError as error:
            raise CheckpointError(_with_remedy(error, _remedy(path, manifest))) from error.__cause__

    @property
    def names(self) -> list[str]:
        """Names of all parameters and buffers, in the order of the files."""
        return list(self._stored)

    def kinds(self, name: str) -> list[str]:
        """Kinds of state of ``name``: "master", "exp_avg", …; empty if there is none."""
        return list(self._stored.get(name, ()))

    def shape(self, name: str, kind: str | None = None) -> tuple[int, ...]:
        """Shape of the whole tensor; without ``kind``, of the parameter or buffer itself."""
        kinds = self.kinds(name)
        return self._of(name, kind or next((k for k in MODEL_KINDS if k in kinds), "value")).shape

    def dtype(self, name: str, kind: str) -> torch.dtype:
        return self._of(name, kind).dtype

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``start`` to ``stop`` (default: to the end) along the first dimension, put together from all files.

        Returns:
            a CPU tensor of its own memory, of the dtype it was saved in.

        Raises:
            ValueError: the checkpoint has no such tensor, or lacks some of the rows.
        """
        stored = self._of(name, kind)
        if not stored.shape:
            return self.read_into(torch.empty((), dtype=stored.dtype), name, kind)
        stop = stored.shape[0] if stop is None else stop
        if not 0 <= start <= stop <= stored.shape[0]:
            raise ValueError(f"{kind} of {name} has {stored.shape[0]} rows: {start} to {stop} are no range of them.")
        return self.read_into(torch.empty((stop - start, *stored.shape[1:]), dtype=stored.dtype), name, kind, start)

    def read_into(self, out: Tensor, name: str, kind: str, start: int = 0) -> Tensor:
        """Rows from ``start`` on into ``out``, as many as it has, converted to its dtype and device. Returns ``out``.

        Raises:
            ValueError: as :meth:`read`, or ``out`` has another shape than such rows.
        """
        stored = self._of(name, kind)
        if tuple(out.shape[1:]) != stored.shape[1:] or out.dim() != len(stored.shape):
            raise ValueError(f"{kind} of {name} has shape {stored.shape}: rows of it do not fit {tuple(out.shape)}.")
        if not stored.shape:
            rows = stored.rows[0]
            return out.copy_(self._handle(rows.file).get_tensor(rows.key))
        filled = 0
        for columns in dict.fromkeys(rows.columns for rows in stored.rows):
            part = out if columns is None else out[:, slice(*columns)]
            self._fill(part, name, kind, start, [rows for rows in stored.rows if rows.columns == columns])
            filled += part.shape[1] if columns is not None else 0
        if filled and filled != stored.shape[1]:
            raise ValueError(f"{self.path} has {filled} of the {stored.shape[1]} columns of {kind} of {name}.")
        return out

    def _fill(self, out: Tensor, name: str, kind: str, start: int, stretches: Sequence[_Rows]) -> None:
        """Rows from ``start`` on into ``out``, which has the columns of all ``stretches``."""
        at, stop = start, start + out.shape[0]
        for rows in stretches:
            if at >= stop or rows.start > at:
                break
            if rows.stop > at:
                upto = min(rows.stop, stop)
                held = self._handle(rows.file).get_slice(rows.key)[at - rows.start : upto - rows.start]
                out[at - start : upto - start].copy_(held)
                at = upto
        if at < stop:
            raise ValueError(f"{self.path} lacks row {at} of {kind} of {name} (shape {self.shape(name, kind)}).")

    def rank_state(self, rank: int) -> dict[str, Any]:
        """The ``rank_state`` that rank ``rank`` of the run that wrote the checkpoint gave."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self.path} was written by {self.world_size} ranks: there is no rank {rank}.")
        try:
            return self._unpacked(rank_file(rank, "pt"))
        except CheckpointError as error:
            raise CheckpointError(_with_remedy(error, self._remedy())) from error.__cause__

    @property
    def rank_states(self) -> list[dict[str, Any]]:
        return [self.rank_state(rank) for rank in range(self.world_size)]

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read files ``part``, ``part + parts``, … and compare their digests, so that ranks can share the work.

        Raises:
            CheckpointError: names the first file that is not what was written.
        """
        names = sorted(self._files, key=lambda name: (-self._files[name]["bytes"], name))
        for name in names[part::parts]:
            try:
                self._check(name)
            except CheckpointError as error:
                raise CheckpointError(_with_remedy(error, self._remedy())) from error.__cause__

    def close(self) -> None:
        """Let go of the files; reading opens them again."""
        self._handles.clear()

    def _of(self, name: str, kind: str) -> _Stored:
        stored = self._stored.get(name, {}).get(kind)
        if stored is None:
            kinds = self.kinds(name)
            there = f"only {', '.join(kinds)}" if kinds else "nothing"
            raise ValueError(f"{self.path} has no {kind} of {name}: {there} of it.")
        return stored

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path / file} is damaged: {error}. {self._remedy()}") from error
        return self._handles[file]

    def _index(self, rank: int) -> None:
        file = rank_file(rank, "safetensors")
        for piece in json.loads(self._bytes(rank_file(rank, "json")))["pieces"]:
            name, kind, start, shape = piece["name"], piece["kind"], piece["start"], tuple(piece["shape"])
            dtype = _TORCH_DTYPES[piece["dtype"]]
            stored = self._stored[name].setdefault(kind, _Stored(dtype, shape, []))
            if (stored.dtype, stored.shape) != (dtype, shape):
                raise CheckpointError(
                    f"{self.path}: ranks disagree on {kind} of {name}: {stored.shape} {stored.dtype} "
                    f"on an earlier one, {shape} {dtype} on rank {rank}"
                )
            columns = tuple(piece["columns"]) if "columns" in piece else None
            stored.rows.append(_Rows(start, start + piece["rows"], file, f"{kind}:{start}:{name}", columns))

    def _unpacked(self, name: str) -> Any:
        data = self._bytes(name)
        try:
            return unpack(data)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{self.path / name} cannot be loaded: {error}") from error

    def _bytes(self, name: str) -> bytes:
        self._check(name)
        return (self.path / name).read_bytes()

    def _check(self, name: str) -> None:
        if name not in self._files:
            raise CheckpointError(f"{self.path / MANIFEST} lists no {name}")
        try:
            found = read_digest(self.path / name)
        except OSError as error:
            raise CheckpointError(f"{self.path / name}: {error.strerror}") from error
        if found != self._files[name]:
            raise CheckpointError(f"{self.path / name} is torn: its contents are not those that were written")

    def _remedy(self) -> str:
        return _remedy(self.path, read_manifest(self.path) if (self.path / MANIFEST).exists() else None)


def own_checkpoints(root: str | Path) -> list[tuple[Path, dict[str, Any]]]:
    """Every checkpoint of paceline below ``root`` with its manifest, oldest first; files may be missing."""
    found = []
    root = Path(root)
    for path in root.iterdir() if root.is_dir() else ():
        if path.is_dir() and not path.name.startswith("."):
            try:
                found.append((path, read_manifest(path)))
            except CheckpointError:
                continue
    return sorted(found, key=lambda one: (one[1]["sequence"], one[0].name))


def complete_checkpoints(root: str | Path) -> list[Path]:
    """The checkpoints below ``root`` whose files are there with their sizes, in the order they were saved in."""
    return [path for path, manifest in own_checkpoints(root) if problem_of(path, manifest) is None]


def latest_checkpoint(root: str | Path) -> Path | None:
    """The checkpoint that ``root/latest`` names, or with a warning the newest complete one; None if there is none.

    A save that was killed behind its last step but one has put its checkpoint in place: that one, as if it were named.
    """
    root = Path(root)
    path = _not_yet_named(root) or _named_latest(root)
    problem = None
    if path is not None:
        try:
            problem = problem_of(path, read_manifest(path))
            if problem is None:
                return path
        except CheckpointError as error:
            problem = str(error)
    newest: Sequence[Path] = complete_checkpoints(root)[-1:]
    if problem is not None and newest:
        logger.warning("%s. Going back to %s, the last complete checkpoint.", problem, newest[0])
    return newest[0] if newest else None


def damaged_checkpoints(root: str | Path) -> dict[Path, str]:
    """The first problem of each checkpoint below ``root`` that cannot be opened, by path.

    Those are the directories with a manifest, also of a later version of paceline, and what ``root/latest`` names.
    Somebody else's file of the same name is no manifest; drafts are no checkpoints.
    """
    root = Path(root)
    paths = [path for path in root.iterdir() if not path.name.startswith(".")] if root.is_dir() else []
    found = {path for path in paths if _has_manifest(path)}
    named = _named_latest(root)
    problems = {}
    for path in sorted(found | ({named} if named is not None else set())):
        try:
            _refuse_others(path)
            problem = problem_of(path, read_manifest(path))
        except CheckpointError as error:
            problem = str(error)
        if problem is not None:
            problems[path] = problem
    return problems


def checkpoint_around(path: Path) -> Path | None:
    """The checkpoint that ``path`` is, or lies in; whole or not."""
    path = path.resolve()
    return next((folder for folder in (path, *path.parents) if _has_manifest(folder)), None)


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST).exists() and not _is_foreign(path / MANIFEST)


def _named_latest(root: Path) -> Path | None:
    try:
        path = root / (root / LATEST).read_text().strip()
    except (OSError, ValueError):
        return None
    return path if path.parent == root else None


def _not_yet_named(root: Path) -> Path | None:
    """The newest checkpoint, if it is whole and still has the file that becomes ``root/latest``."""
    for path, manifest in own_checkpoints(root)[-1:]:
        if (path / LATEST).is_file() and problem_of(path, manifest) is None:
            return path
    return None


def _is_foreign(file: Path) -> bool:
    """Whether it is whole JSON that says nothing of a checkpoint; a torn manifest is no JSON."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    return not (isinstance(content, dict) and content.get("format") == FORMAT)


def _refuse_others(path: Path) -> None:
    """Raises CheckpointError for what is not a checkpoint of paceline at all."""
    if not os.path.isdir(path):  # Path's own fails for a name that is too long
        raise CheckpointError(f"{path} is no checkpoint: there is no such directory")
    if (path / MANIFEST).exists():
        return
    if next(path.glob("*mp_rank_*_model_states.pt"), None) or next(path.glob("*zero_pp_rank_*"), None):
        raise CheckpointError(
            f"{path} is a checkpoint in DeepSpeed's own format, which belongs to one number of stages and ranks: "
            "load it with deepspeed.initialize and engine.load_checkpoint, in the shape that it was saved in"
        )
    if next(path.glob("model*.safetensors"), None):
        raise CheckpointError(f"{path} is a Hugging Face model, no checkpoint: start from it with --model_name_or_path")
    if complete_checkpoints(path):
        raise CheckpointError(f"{path} is a folder of checkpoints: choose one of them, {latest_checkpoint(path)} say")
    if damaged := damaged_checkpoints(path):
        raise CheckpointError(f"{path} has no complete checkpoint: {next(iter(damaged.values()))}")
    raise CheckpointError(
        f"{path} is no checkpoint, or not a complete one: it has no {MANIFEST}, nor has a folder in it"
    )


def _with_remedy(error: CheckpointError, remedy: str) -> str:
    return f"{error}. {remedy}" if remedy else str(error)


def _remedy(path: Path, manifest: dict[str, Any] | None) -> str:
    """Which other one to take; empty where ``path`` does not lie among checkpoints."""
    before = [
        other
        for other, others in own_checkpoints(path.parent)
        if other != path
        and (manifest is None or others["sequence"] < manifest["sequence"])
        and problem_of(other, others) is None
    ]
    if manifest is None:  # nobody knows when it was saved
        if before:
            return f"The last complete one in {path.parent} is {before[-1]}"
        return f"None in {path.parent} is complete" if damaged_checkpoints(path.parent) else ""
    return (
        f"The last complete one before it is {before[-1]}"
        if before
        else f"There is no complete one before it in {path.parent}"
    )
