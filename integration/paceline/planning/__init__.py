"""Alternatives to what runs, their predicted costs, and whether a switch pays. Pure; no torch here."""

from .blocks import Block, Device, DoesNotFit, Partition, bottleneck
from .candidates import Candidate, candidates, memory_curve
from .choose import Choice, Planner, Prediction
from .order import links_in_order, search_order
from .partition import partition
from .refine import refine, stage_costs
from .switching import Decision, SwitchRule

__all__ = [
    "Block",
    "Candidate",
    "Choice",
    "Decision",
    "Device",
    "DoesNotFit",
    "Partition",
    "Planner",
    "Prediction",
    "SwitchRule",
    "bottleneck",
    "candidates",
    "links_in_order",
    "memory_curve",
    "partition",
    "refine",
    "search_order",
    "stage_costs",
]
