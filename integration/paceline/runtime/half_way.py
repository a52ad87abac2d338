"""Know whether something that must not end in the middle did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class HalfWay:
    """Ranks that were interrupted in the middle of a step, or of moving layers, are out of step with each other."""

    is_over = False
    """Whether the engine was destroyed."""

    def __init__(self) -> None:
        self._left_in: str | None = None
        self._is_in_pieces = False

    @property
    def is_whole(self) -> bool:
        return self._left_in is None

    def check(self) -> None:
        """Raise RuntimeError if something was interrupted, or the engine was destroyed."""
        self.check_goes_on()
        if self._left_in is not None:
            raise RuntimeError(
                f"this engine was left half-way ({self._left_in}): what its ranks have sent to each other is out of "
                "step; make another engine, and load the last checkpoint."
            )

    def check_model(self) -> None:
        """Raise RuntimeError if the model was left in pieces: what would be written is no model."""
        if self._is_in_pieces:
            self.check()

    def check_goes_on(self) -> None:
        """Raise RuntimeError if the engine was destroyed: it has no masters and no optimizer states any more."""
        if self.is_over:
            raise RuntimeError("the engine was destroyed: it trains, saves and loads no more; make another one.")

    @contextmanager
    def during(self, what: str, *, takes_apart: bool = False) -> Iterator[None]:
        """Around what must not end in the middle.

        Args:
            takes_apart: parts of the model are nowhere meanwhile.
        """
        around, self._left_in = self._left_in, what
        try:
            yield
        except BaseException as error:
            self._left_in = f"{what}; {type(error).__name__}: {error}"
            self._is_in_pieces |= takes_apart
            raise
        self._left_in = around
