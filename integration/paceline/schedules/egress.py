"""The sending side of one host: what leaves it shares its rate (processor sharing)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf


class Egress:
    """All links that leave one host share its rate equally, and none gets more than its own.

    A link sends one message after another, so only the first of each line counts. Rates change only when such a message
    starts or ends; in between, what is left of each shrinks linearly, so these moments are exact.

    Args:
        bytes_per_s: of the host.
        links: rate of each link that leaves it, by a number that names the link.

    ``done_s`` is when the next message has left, infinite when there is none. It holds as long as ``version`` does.
    """

    __slots__ = ("_bytes_per_s", "_done_link", "_lines", "_links", "_now", "_rates", "_remaining", "done_s", "version")

    def __init__(self, bytes_per_s: float, links: Mapping[int, float]) -> None:
        self.done_s = inf
        self.version = 0
        self._bytes_per_s = bytes_per_s
        self._links = links
        # Messages and their bytes, by link; the first of each is on its way.
        self._lines: dict[int, deque[tuple[int, float]]] = {link: deque() for link in links}
        self._remaining: dict[int, float] = {}
        self._rates: dict[int, float] = {}
        self._now = 0.0
        self._done_link = -1

    def send(self, now: float, link: int, message: int, num_bytes: float) -> bool:
        """Put a message into the line of ``link``; whether it is the first there, which changes the rates."""
        line = self._lines[link]
        line.append((message, num_bytes))
        if len(line) > 1:
            return False
        self._advance(now)
        self._remaining[link] = num_bytes
        self._share()
        return True

    def pop(self) -> tuple[int, int]:
        """Go on to ``done_s``: link and message that have left the host then."""
        link = self._done_link
        self._advance(self.done_s)
        line = self._lines[link]
        message, _ = line.popleft()
        if line:
            self._remaining[link] = line[0][1]
        else:
            del self._remaining[link]
        self._share()
        return link, message

    def _advance(self, now: float) -> None:
        passed, self._now = now - self._now, now
        remaining = self._remaining
        for link, rate in self._rates.items():
            remaining[link] = max(0.0, remaining[link] - rate * passed)

    def _share(self) -> None:
        """Fill equally, beginning with the slowest link: what it leaves over goes to the others."""
        self.version += 1
        self.done_s = inf
        self._rates = rates = {}
        left, waiting = self._bytes_per_s, len(self._remaining)
        for link in sorted(self._remaining, key=self._links.__getitem__):
            rates[link] = rate = min(self._links[link], left / waiting)
            left -= rate
            waiting -= 1
            done_s = self._now + self._remaining[link] / rate
            if done_s < self.done_s:
                self.done_s, self._done_link = done_s, link
