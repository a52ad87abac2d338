"""Reversible, fingerprinted replacements of upstream attributes and items. Nothing is replaced at import.

A patch is the last resort, for what has no hook. It says where, why, for which versions, against which source it was
written, and when it can go; ``paceline patches`` lists them all.

A patch that does not fit what is installed is refused, also when only the source that it was written against has
changed. What happens then is declared with the patch: by default :class:`PatchError`; a patch that is ``optional``
(a run is right without it) is left out with a warning.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.requirements import Requirement

logger = logging.getLogger("paceline")

BY_REPAIR = "paceline.repair_deepspeed, which paceline.initialize and paceline.launch.patched call"
"""What applies the repairs of DeepSpeed's faults."""

_ITEM = re.compile(r"(?P<path>.+)\[(?P<key>.+)\]")


class PatchError(RuntimeError):
    """A patch does not fit what is installed, or something else has already replaced its target."""


@dataclass(frozen=True)
class Use:
    """``make`` of a patch that puts one value in place, whatever was there. Equal for equal values."""

    value: Any

    def __call__(self, original: Any) -> Any:
        return self.value


@dataclass(frozen=True)
class Load:
    """``make`` of a patch by name, ``"module:function"``: imported when it is applied."""

    path: str

    def __call__(self, original: Any) -> Any:
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)(original)


_installed = cache(version)
"""Of a distribution: a dozen patches ask for the same one, and each answer reads a file."""


@dataclass(frozen=True)
class Patch:
    """One declared replacement.

    Args:
        target: ``"module:Owner.attribute"`` or ``"module:mapping[key]"``.
        make: the replacement, given the original.
        requires: PEP 508 requirement that the installed distribution must meet (``"deepspeed>=0.19.8,<0.20"``).
        reason: why there is no other way, one line.
        removable_when: what makes it superfluous, one line.
        watches: ``"module:function"`` whose source the patch was written against.
        fingerprint: of that source, see :func:`fingerprint`.
        original: ``"module:attribute"`` where upstream defines what the target holds; anything else there is a
            foreign replacement. Empty where ``watches`` is the target itself.
        accelerator: name of DeepSpeed's accelerator that it is for; empty for all.
        applied_by: what applies it.
        optional: a run is right without it, so that refusing it is a warning.
    """

    target: str
    make: Callable[[Any], Any]
    requires: str
    reason: str
    removable_when: str
    watches: str
    fingerprint: str
    original: str = ""
    accelerator: str = ""
    applied_by: str = ""
    optional: bool = False

    def check(self) -> None:
        """Raise :class:`PatchError` unless the patch fits what is installed and its target is as upstream left it."""
        requirement = Requirement(self.requires)
        try:
            found = _installed(requirement.name)
        except PackageNotFoundError:
            raise PatchError(f"{self.target}: needs {self.requires}, which is not installed") from None
        if not requirement.specifier.contains(found, prereleases=True):
            raise PatchError(f"{self.target}: needs {self.requires}, found {found}; port the patch or install that")
        if self.accelerator and self.accelerator != _accelerator():
            raise PatchError(f"{self.target}: is for the {self.accelerator} accelerator, this is {_accelerator()}")
        slot = _slot(self.target)
        now = slot.get()
        before = _ACTIVE[self.target].original if self.target in _ACTIVE else now
        if self.original and before is not _slot(self.original).get():
            raise PatchError(f"{self.target}: was replaced by {before!r}; undo that replacement first")
        watched = _ACTIVE.get(self.watches)
        source = fingerprint(watched.original if watched else _slot(self.watches).get())
        if source != self.fingerprint:
            raise PatchError(
                f"{self.target}: the source of {self.watches} is {source}, the patch was written against "
                f"{self.fingerprint}; read what changed, then update the fingerprint"
            )

    def problem(self) -> str:
        """Why the patch does not fit; empty if it does."""
        try:
            self.check()
        except PatchError as error:
            return str(error)
        return ""

    def is_applied(self) -> bool:
        """Whether its target holds its replacement, in this process."""
        try:
            return _is_applied(self)
        except PatchError:
            return False


@dataclass(frozen=True)
class Override:
    """A private upstream method that a subclass of ours overrides: no replacement, but written against a source.

    Args:
        target: ``"module:Class.method"`` of upstream.
        by: ``"module:Class"`` of ours.
        fingerprints: of the sources that it was read against, of all supported versions.
    """

    target: str
    by: str
    fingerprints: tuple[str, ...]

    def problem(self) -> str:
        """Why the override may not fit; empty if it does."""
        try:
            source = fingerprint(_slot(self.target).get())
        except (PatchError, AttributeError, KeyError, ImportError) as error:
            return f"{self.target}: {self.by} overrides it, and it is not there ({error})"
        if source in self.fingerprints:
            return ""
        return (
            f"{self.target}: {self.by} overrides it, and its source is {source}, of the versions that it was written "
            f"against {', '.join(self.fingerprints)}; read what changed, then add the fingerprint"
        )


def warn_of_changes(overrides: Iterable[Override]) -> None:
    """Warn of overridden methods whose source upstream has changed."""
    for override in overrides:
        if problem := override.problem():
            logger.warning("%s", problem)


def fingerprint(function: Any) -> str:
    """First 12 hex digits of the SHA-256 of a function's or class's source, which is read once."""
    try:
        return _fingerprint(function)
    except TypeError:  # it cannot be remembered
        return _fingerprint.__wrapped__(function)


@cache
def _fingerprint(function: Any) -> str:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise PatchError(f"{function!r} has no source to compare ({error})") from None
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def apply(*patches: Patch) -> ExitStack:
    """Apply all patches or none, until the stack that is returned is closed.

    A patch that is applied already stays as it is and is undone by who applied it. An ``optional`` one that does not
    fit is left out with a warning.

    Raises:
        PatchError: another patch does not fit, or its target holds another replacement.
    """
    fitting = []
    for patch in patches:
        try:
            if not _is_applied(patch):
                patch.check()
                fitting.append(patch)
        except PatchError as error:
            if not patch.optional:
                raise
            logger.warning("going on without a patch: %s", error)
    with ExitStack() as stack:
        for patch in fitting:
            if not _is_applied(patch):  # twice among the arguments
                _apply(patch)
                stack.callback(_undo, patch)
        return stack.pop_all()


@contextmanager
def applied(*patches: Patch) -> Iterator[None]:
    """:func:`apply`, and undo in reverse order when the context is left."""
    with apply(*patches):
        yield


def all_patches() -> tuple[Patch, ...]:
    """Every patch of this package."""
    from paceline.patches import (
        deepspeed_initialize,
        deepspeed_ops,
        deepspeed_p2p,
        deepspeed_pipe_module,
        transformers_masking_utils,
    )
    from paceline.patches.repairs import REPAIRS

    repairs = [patch for patches in REPAIRS.values() for patch in patches]
    modules = (
        deepspeed_initialize,
        deepspeed_ops,
        deepspeed_p2p,
        deepspeed_pipe_module,
        transformers_masking_utils,
    )
    return (*(patch for module in modules for patch in module.PATCHES), *repairs)


@dataclass(frozen=True)
class _Slot:
    """A place that can be read and written: an attribute of an object or an item of a mapping."""

    owner: Any
    name: str
    is_item: bool

    def get(self) -> Any:
        # Not getattr: a function of a class would come back bound, a static method bare.
        return self.owner[self.name] if self.is_item else vars(self.owner)[self.name]

    def set(self, value: Any) -> None:
        if self.is_item:
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


@dataclass(frozen=True)
class _Active:
    patch: Patch
    original: Any
    replacement: Any


_ACTIVE: dict[str, _Active] = {}


def _slot(target: str) -> _Slot:
    module, _, path = target.partition(":")
    item = _ITEM.fullmatch(path)
    *parents, name = (item["path"] if item else path).split(".")
    if item:
        parents, name = [*parents, name], item["key"]
    try:
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        slot = _Slot(owner, name, bool(item))
        slot.get()
    except (ImportError, AttributeError, KeyError):
        raise PatchError(f"{target}: is no longer there upstream; port the patch or delete it") from None
    return slot


def _is_applied(patch: Patch) -> bool:
    active = _ACTIVE.get(patch.target)
    if active is None:
        return False
    now = _slot(patch.target).get()
    if active.patch != patch or now is not active.replacement:
        raise PatchError(f"{patch.target}: holds another replacement, {now!r}; undo that one first")
    return True


def _apply(patch: Patch) -> None:
    slot = _slot(patch.target)
    original = slot.get()
    replacement = patch.make(original)
    slot.set(replacement)
    _ACTIVE[patch.target] = _Active(patch, original, replacement)


def _undo(patch: Patch) -> None:
    active = _ACTIVE.pop(patch.target)
    slot = _slot(patch.target)
    if slot.get() is not active.replacement:
        raise PatchError(f"{patch.target}: was replaced by {slot.get()!r} while it was patched; it stays so")
    slot.set(active.original)


def _accelerator() -> str:
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())
