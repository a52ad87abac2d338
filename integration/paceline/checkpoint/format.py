"""The checkpoint format on disk.

::

    root/latest                               the tag of the last complete checkpoint
    root/checkpoint-40/manifest.json          every other file with its size and digest; written last
                       meta.pt                what belongs to no tensor: steps, scheduler, loss scale, …
                       rank_00000.safetensors the pieces that rank 0 owns
                       rank_00000.json        which pieces these are, of which tensors
                       rank_00000.pt          what belongs to rank 0 alone: states of random number generators, …
                       model/                 config, generation config, tokenizer
    root/.checkpoint-40.<run>-<n>.draft/      the same while it is being written, or while it is being deleted
    root/.checkpoint-40.<run>-<n>.failed      why save n of this run came to nothing

A checkpoint is written as a draft and renamed once it is complete, so a directory with a manifest has all its files.
"""

from __future__ import annotations

import errno
import io
import json
import mmap
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

FORMAT = "paceline checkpoint"
VERSION = 1
MANIFEST, META, LATEST, MODEL = "manifest.json", "meta.pt", "latest", "model"
DIGEST = "xxh3_128"
CHUNK_BYTES = 2**22
MODEL_KINDS = ("master", "value")
"""Kinds that a model's weights come from, the most exact first."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types that safetensors can hold, by its names."""

_TAG = re.compile(r"[A-Za-z0-9_][\w.+=-]*")
_DRAFT = re.compile(r"\.(?P<tag>.+)\.(?P<run>[0-9a-z]+)-(?P<number>\d+)\.(draft|old\.draft|failed|failed\.tmp)")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or was not saved; the message names the file and the cause."""


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor of the job, or the whole of it, as its owner has it.

    Args:
        name: of the parameter or buffer, Hugging Face's own.
        kind: "master" (fp32 master, or the parameter itself where it has none), "value" (frozen parameters and
            buffers), or an optimizer state by its own name ("exp_avg", "step", …).
        tensor: rows ``start`` to ``start + len(tensor)`` along the first dimension; of a number (shape ``()``) itself.
        shape: of the whole tensor; None if ``tensor`` is the whole.
        column: the first of its columns, along the second dimension, where it has some only; None: it has all.
    """

    name: str
    kind: str
    tensor: Tensor
    start: int = 0
    shape: tuple[int, ...] | None = None
    column: int | None = None

    @property
    def key(self) -> str:
        """Name in the safetensors file."""
        return f"{self.kind}:{self.start}:{self.name}"

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.shape is None else tuple(self.shape)

    def validate(self) -> None:
        """Raises ValueError if the rows do not lie in the whole, or the dtype cannot be stored."""
        rows, whole = tuple(self.tensor.shape), self.whole
        fits = rows[1:] == whole[1:] and len(rows) == len(whole)
        if self.column is not None:
            fits = len(rows) == len(whole) >= 2 and rows[2:] == whole[2:]
            fits = fits and 0 <= self.column <= self.column + rows[1] <= whole[1]
        if whole:
            fits = fits and self.start >= 0 and self.start + rows[0] <= whole[0]
        if not fits or (not whole and self.start):
            raise ValueError(
                f"{self.kind} of {self.name}: a piece of shape {rows} from row {self.start} is no part of {whole}: "
                "pieces are ranges of rows along the first dimension, of all columns or a range of them."
            )
        if self.tensor.dtype not in DTYPES:
            raise ValueError(
                f"{self.kind} of {self.name} is {self.tensor.dtype}, which a checkpoint cannot hold: "
                f"convert it to one of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}."
            )


def rank_file(rank: int, suffix: str) -> str:
    """``suffix``: safetensors, json (the pieces), pt (the rank's state), done or failed (marks in a draft)."""
    return f"rank_{rank:05d}.{suffix}"


def check_tag(tag: str) -> None:
    if not _TAG.fullmatch(tag) or tag == LATEST:
        raise ValueError(
            f"checkpoint tag {tag!r}: must be the name of a folder, of letters, digits, _, ., +, = and -, that begins "
            f"with one of A-Z, a-z, 0-9 and _, and is not {LATEST!r}; write one such as checkpoint-40."
        )


def draft_parts(name: str) -> tuple[str, int] | None:
    """Run and number of the save that a draft's or verdict's name belongs to; None if it is something else."""
    match = _DRAFT.fullmatch(name)
    return (match["run"], int(match["number"])) if match else None


def pack(value: Any, what: str) -> bytes:
    """``torch.save`` of what ``torch.load(weights_only=True)`` gives back.

    Raises:
        ValueError: it would not; names the place in ``value`` and its type.
    """
    if (packed := _packed(value)) is not None:
        return packed
    place, culprit = _culprit(value, what)
    kind = type(culprit)
    raise ValueError(
        f"{place} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: "
        "convert it to tensors, numbers, strings, lists and dicts."
    )


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _packed(value: Any) -> bytes | None:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpack(buffer.getvalue())
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError, EOFError, ModuleNotFoundError):
        return None
    return buffer.getvalue()


def _culprit(value: Any, place: str) -> tuple[str, Any]:
    if isinstance(value, dict):
        parts = [(f"{place}[{key!r}]", part) for key, part in value.items()]
        parts += [(f"a key of {place}", key) for key in value]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{place}[{index}]", part) for index, part in enumerate(value)]
    else:
        parts = []
    return next((_culprit(part, where) for where, part in parts if _packed(part) is None), (place, value))


class Digest:
    """Size and digest of what is fed to it."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self.num_bytes += len(data)

    def entry(self) -> dict[str, Any]:
        """The entry of the manifest."""
        return {"bytes": self.num_bytes, DIGEST: self._hash.hexdigest()}


def write_file(path: Path, *parts: bytes | memoryview) -> dict[str, Any]:
    """Write and sync a file; its entry for the manifest, of what was to be written rather than of what is there.

    Raises:
        OSError: with ``path`` as its filename.
    """
    digest = Digest()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            for part in parts:
                for chunk in _chunks(memoryview(part)):
                    digest.update(chunk)
                    written = 0
                    while written < len(chunk):
                        written += os.write(descriptor, chunk[written:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.entry()


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def read_digest(path: Path) -> dict[str, Any]:
    """Entry for the manifest of a file that is there."""
    digest = Digest()
    # Not from malloc, which would keep it: every save has a thread of its own, and threads have heaps of their own.
    with mmap.mmap(-1, CHUNK_BYTES) as memory, memoryview(memory) as buffer, open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.entry()


def sync(path: Path) -> None:
    """Have a file or a directory's list of names on the disk; file systems that cannot do this are left alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to a later version of paceline.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
        assert manifest["format"] == FORMAT
        version = manifest["version"]
        if version == VERSION:
            assert manifest["world_size"] > 0 <= manifest["sequence"]
            assert all(entry["bytes"] >= 0 and entry[DIGEST] for entry in manifest["files"].values())
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise CheckpointError(f"{file} is damaged, or was not written by paceline") from None
    if version != VERSION:
        raise CheckpointError(f"{file} has version {version}, not {VERSION}: it needs the paceline that wrote it")
    return manifest


def problem_of(path: Path, manifest: dict[str, Any]) -> str | None:
    """The first file that is missing or has not its size; None if all are there."""
    for name, entry in manifest["files"].items():
        file = path / name
        try:
            size = file.stat().st_size
        except OSError as error:
            return f"{file}: {error.strerror}"
        if size != entry["bytes"]:
            return f"{file} has {size} bytes instead of {entry['bytes']}: it is truncated or was overwritten"
    return None
