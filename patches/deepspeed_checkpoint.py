"""``deepspeed/checkpoint/deepspeed_checkpoint.py``: what universal conversion keeps of AutoEP's metadata."""

from __future__ import annotations

from paceline.patches.registry import BY_REPAIR, Patch


def with_placement(fields: tuple[str, ...]) -> tuple[str, ...]:
    """``AUTOEP_METADATA_FIELDS`` with the placement of the experts.

    A checkpoint says which expert is where, and ``autoep_universal`` reads it; ``DeepSpeedCheckpoint`` keeps only
    these fields in between. Without the placement, conversion takes experts to be in order.
    """
    from deepspeed.checkpoint.constants import AUTOEP_AFFINE_MAPS, AUTOEP_EXPERT_PLACEMENT

    return (*fields, *(name for name in (AUTOEP_EXPERT_PLACEMENT, AUTOEP_AFFINE_MAPS) if name not in fields))


EXPERT_PLACEMENT = Patch(
    target="deepspeed.checkpoint.deepspeed_checkpoint:AUTOEP_METADATA_FIELDS",
    make=with_placement,
    requires="deepspeed>=0.19.8,<0.20",
    reason="universal conversion gives experts that were moved to the wrong place in the model",
    removable_when="DeepSpeedCheckpoint keeps the placement of AutoEP's experts",
    watches="deepspeed.checkpoint.deepspeed_checkpoint:DeepSpeedCheckpoint._lightweight_autoep_metadata",
    fingerprint="bc791826a491",
    applied_by=BY_REPAIR,
)

PATCHES = (EXPERT_PLACEMENT,)
