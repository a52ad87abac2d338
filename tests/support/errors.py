"""Errors that tests on ranks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def runtime_errors(calls: Iterable[Callable[[], object]]) -> list[str]:
    """Message of the RuntimeError that each call ends in; ``"nothing"`` where it does not."""
    messages = []
    for call in calls:
        try:
            call()
            messages.append("nothing")
        except RuntimeError as error:
            messages.append(str(error))
    return messages
