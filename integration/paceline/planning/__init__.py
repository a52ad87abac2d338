"""What could run instead of what runs, what each would cost, and whether it pays to switch. Pure; no torch here."""

from .candidates import Candidate, candidates, memory_curve
from .choose import Choice, Planner, Prediction
from .switching import Decision, SwitchRule

__all__ = [
    "Candidate",
    "Choice",
    "Decision",
    "Planner",
    "Prediction",
    "SwitchRule",
    "candidates",
    "memory_curve",
]
