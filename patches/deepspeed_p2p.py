"""``deepspeed/runtime/pipe/p2p.py``: blocking sends between stages, where ranks share a GPU."""

from __future__ import annotations

from paceline.patches.registry import Patch, Use


def _never() -> bool:
    """``can_send_recv`` that says no: p2p then broadcasts in groups of two, as for a torch without send and recv."""
    return False


BY_BROADCAST = Patch(
    target="deepspeed.runtime.pipe.p2p:can_send_recv",
    make=Use(_never),
    requires="deepspeed>=0.19.8,<0.20",
    reason="PipelineEngine sends a tensor of its GPU when it is made, which gloo cannot; it can broadcast one",
    removable_when="DeepSpeed stages sends of CUDA tensors under gloo, as it does those of MPS tensors",
    watches="deepspeed.runtime.pipe.p2p:can_send_recv",
    fingerprint="be03d736b35d",
    applied_by="paceline.initialize, where ranks share a GPU",
)

PATCHES = (BY_BROADCAST,)
