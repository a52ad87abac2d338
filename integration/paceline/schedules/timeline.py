"""What happened when in one step, predicted or measured: the same value for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar


class Span(NamedTuple):
    """Something that one rank did. Seconds since the step began.

    ``kind`` is that of the action (``micro_batch`` and ``chunk`` tell which), else what it was:
    ``"reduce"``, ``"step"`` (micro_batch −1).
    """

    rank: int
    kind: str
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """One message between ranks: from when it could be sent until it had arrived. Seconds since the step began.

    ``kind`` is ``"activation"`` or ``"gradient"``; chunk is the sender's.
    """

    kind: str
    source: int
    target: int
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float
    num_bytes: float


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline.

    Args:
        name: of the schedule.
        stages: of each rank, by chunk; empty: it is not known.
    """

    num_ranks: int
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...] = ()
    name: str = ""
    stages: tuple[tuple[int, ...], ...] = ()

    def stage(self, rank: int, chunk: int) -> int | None:
        """The stage that a rank holds as ``chunk``; None: it is not known."""
        held = self.stages[rank] if rank < len(self.stages) else ()
        return held[chunk] if 0 <= chunk < len(held) else None

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timeline:
        """The inverse of :meth:`to_dict`, also after a round trip through JSON.

        Raises:
            ValueError: it is none.
        """
        try:
            return cls(
                num_ranks=_num_ranks(values["num_ranks"]),
                spans=tuple(_checked(Span(*row)) for row in values["spans"]),
                transfers=tuple(_checked(Transfer(*row)) for row in values.get("transfers", ())),
                name=str(values.get("name", "")),
                stages=tuple(tuple(_stage(stage) for stage in held) for held in values.get("stages", ())),
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"this is no timeline ({error!r}): give a file that a run or simulate wrote.") from None


MOST_RANKS = 2**12
"""Of a timeline that is read: each has a row in a picture."""


def _num_ranks(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value <= MOST_RANKS:
        raise TypeError(f"num_ranks is {value!r} and must be a whole number up to {MOST_RANKS}")
    return value


def _stage(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"stage {value!r} is no whole number from 0")
    return value


_Event = TypeVar("_Event", Span, Transfer)
_KINDS: dict[str, Any] = {"kind": str, "micro_batch": int, "chunk": int, "num_bytes": (int, float)}


def _checked(event: _Event) -> _Event:
    """Raise TypeError for what is no name or no number; whoever reads a file checks ranks and times."""
    for name, kind in _KINDS.items():
        value = getattr(event, name, 0)
        if not isinstance(value, kind) or value == "":
            raise TypeError(f"{name} of a {type(event).__name__.lower()} is {value!r}")
    return event
