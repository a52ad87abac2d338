"""A schedule is a value: families build it, verify proves it, simulate predicts it, lower derives its communication."""

from . import families
from .costs import Costs, Link
from .families import FAMILIES, make
from .lower import Op, lower
from .schedule import Action, Schedule
from .simulate import Simulation, simulate
from .text import from_text, to_text
from .timeline import Timeline
from .verify import Proof, verify

__all__ = [
    "FAMILIES",
    "Action",
    "Costs",
    "Link",
    "Op",
    "Proof",
    "Schedule",
    "Simulation",
    "Timeline",
    "families",
    "from_text",
    "lower",
    "make",
    "simulate",
    "to_text",
    "verify",
]
