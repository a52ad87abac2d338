"""``paceline.repair_deepspeed``: the repairs of DeepSpeed's faults, by name."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from types import TracebackType

from paceline.patches import (
    accelerate_accelerator,
    deepspeed_auto_ep_layer,
    deepspeed_auto_ep_presets,
    deepspeed_checkpoint,
    deepspeed_engine,
    deepspeed_fp16,
    deepspeed_initialize,
    deepspeed_pipe_engine,
    deepspeed_zero,
)
from paceline.patches.registry import Patch, PatchError, apply

logger = logging.getLogger("paceline")

REPAIRS: dict[str, tuple[Patch, ...]] = {
    "autoep-start": deepspeed_auto_ep_presets.PATCHES,
    "moe-groups": (deepspeed_engine.MOE_GROUPS,),
    "save-model": (
        *deepspeed_auto_ep_layer.PATCHES,
        deepspeed_engine.WHOLE_STATE_DICT,
        deepspeed_engine.SAVE_16BIT,
        *accelerate_accelerator.PATCHES,
    ),
    "expert-placement": deepspeed_checkpoint.PATCHES,
    "optimizer-states": deepspeed_zero.PATCHES,
    "receive-pool": deepspeed_pipe_engine.PATCHES,
    "loss-scale": (deepspeed_engine.LOSS_SCALE, *deepspeed_fp16.PATCHES),
    "moe-section": (deepspeed_initialize.SECTION,),
}
"""Patches by the name of the repair that they make together."""

_told: set[str] = set()


class Repairs:
    """What one call of :func:`repair_deepspeed` did.

    Attributes:
        applied: names of the repairs that it applied.
        skipped: why others were left out, by name.

    Leaving it as a context, or :meth:`undo`, takes back what it applied; otherwise it stays until the process ends.
    """

    def __init__(self) -> None:
        self.applied: tuple[str, ...] = ()
        self.skipped: dict[str, str] = {}
        self._undo = ExitStack()

    def undo(self) -> None:
        """Put DeepSpeed's own code back in place. A second time does nothing."""
        self._undo.close()
        self.applied = ()

    def __enter__(self) -> Repairs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Repairs(applied={list(self.applied)}, skipped={self.skipped})"


def repair_deepspeed(*names: str) -> Repairs:
    """Repair the faults of the DeepSpeed that is installed. Call it before ``deepspeed.initialize``.

    A repair that does not fit what is installed is left out, with one warning for all; one that is applied already
    stays as it is, and is undone by who applied it.

    Args:
        names: of :data:`REPAIRS`; none means all. ``paceline patches`` lists what each replaces.

    Returns:
        What was done; undoes it as a context manager, or when told to.

    Raises:
        ValueError: a name that is none.

    Example::

        paceline.repair_deepspeed()  # for the rest of the process

        with paceline.repair_deepspeed("expert-placement"):
            ds_to_universal.main(args)
    """
    if unknown := sorted(set(names) - set(REPAIRS)):
        raise ValueError(f"{unknown[0]!r} is not a repair of DeepSpeed: choose from {', '.join(REPAIRS)}.")
    repairs = Repairs()
    for name in names or REPAIRS:
        if all(patch.is_applied() for patch in REPAIRS[name]):
            continue
        try:
            repairs._undo.enter_context(apply(*REPAIRS[name]))
        except PatchError as error:
            repairs.skipped[name] = str(error)
        else:
            repairs.applied += (name,)
    news = {name: why for name, why in repairs.skipped.items() if name not in _told}
    _told.update(news)
    if news and os.environ.get("RANK", "0") == "0":
        logger.warning("left out of the repairs of DeepSpeed: %s", "; ".join(f"{n} ({w})" for n, w in news.items()))
    return repairs
