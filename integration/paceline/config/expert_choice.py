"""Rebalancing of experts: the section's ``moe`` with the values of the keys that it leaves out."""

from __future__ import annotations

from dataclasses import dataclass

from .section import MoeConfig

REBALANCE_EVERY = 50


@dataclass(frozen=True)
class MoeChoice:
    """The placement of experts as a run is started with it.

    Args:
        rebalance_every: steps from one re-planning of the placement to the next; 0: never.
        replicas: further slots of each device, for copies of experts.
        splitting: how the copies of an expert share its tokens.
        loads_file: file that loads are appended to; None: the job's own, if there is a job.
    """

    rebalance_every: int = REBALANCE_EVERY
    replicas: int = 0
    splitting: str = "even"
    loads_file: str | None = None


def resolve_moe(section: MoeConfig | None) -> MoeChoice | None:
    """``section`` with every value; None: experts stay where they are."""
    return None if section is None else MoeChoice(**section.model_dump(exclude_none=True))
