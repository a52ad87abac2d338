"""Streams of a device without one: which order the calls give to what is issued."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class Streams:
    """In the place of ``torch.cuda``: what each stream has been given, and what it comes after."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._default: set[str] = set()

    def Stream(self, device: torch.device) -> set[str]:
        return set()

    def current_stream(self, device: torch.device | None = None) -> Any:
        stream = getattr(self._own, "stream", self._default)
        return SimpleNamespace(known=stream, wait_event=lambda event: stream.update(event.known))

    @contextmanager
    def stream(self, stream: set[str]) -> Iterator[None]:
        former = self.current_stream().known
        self._own.stream = stream
        yield
        self._own.stream = former

    def Event(self, **options: Any) -> Any:
        event = SimpleNamespace(known=set[str](), synchronize=lambda: None, **options)
        event.record = lambda stream: event.known.update(stream.known)
        return event

    def issue(self, what: str) -> set[str]:
        """To the stream of the thread; what comes before it."""
        known = self.current_stream().known
        before = set(known)
        known.add(what)
        return before
