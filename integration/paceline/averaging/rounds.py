"""Rounds between islands over real networks: who is there, what each reports, the weighted sum of their tensors.

Who is there is the lighthouse's to say (:mod:`.presence`). Tensors go over a gloo group of the quorum's islands
(:mod:`.weighted_sums`). An island that dies takes its part of the round with it: the others do it again.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .addresses import is_loopback, split
from .presence import CONNECT_S, Closed, Presence, report_of
from .rounded_means import Residuals, Rounded, rounded_mean
from .rules import Report, is_no_round, island_weights, refusals
from .weighted_sums import IslandGroup, weighted_mean

logger = logging.getLogger("paceline")

Sent = Sequence[Tensor] | Rounded
Tensors = Sequence[Tensor] | Callable[[Sequence[Report]], Sent]

_STALL_S = 120.0
_PAUSE_S = 1.0
_LONG_S = 30 * 86400.0


@dataclass(frozen=True)
class Outcome:
    """What a round has brought, the same on all islands that were in it except for the times."""

    tensors: list[Tensor] | None
    """New ones, the weighted average; None where there is nothing to change: go on with what you have."""
    reports: list[Report]
    """Of all islands in it, in the order of ``weights``."""
    weights: list[float]
    round: int
    """Rounds finished with this one: the next report's ``round``, of an island that has just come too. One in which
    nobody had anything new (:func:`~paceline.averaging.rules.is_no_round`) is none."""
    waited_s: float
    """Until all islands were there, failed attempts included."""
    transfer_s: float
    """Of the attempt that succeeded."""
    bytes_sent: int
    """By this island in it; of what is not rounded, as a ring all-reduce sends them."""
    attempts: int
    """From asking who is there; the last one succeeded."""
    residuals: Residuals | None = None
    """Where tensors were rounded, and are changes."""

    @property
    def num_islands(self) -> int:
        """That the average is of."""
        return sum(weight > 0 for weight in self.weights)


class Left(Closed):
    """This island did not come when it was called, and the others count it as dead: let another object join them."""


class _Again(Exception):
    """An attempt at a round that came to nothing. ``spent_s`` of it count towards the time limit."""

    def __init__(self, why: str, spent_s: float) -> None:
        super().__init__(why)
        self.spent_s = spent_s


class Islands:
    """This island among the others. On one rank of the island only; the others have no part in it.

    It is alive to the others from here to :meth:`close`, whatever the Python threads do in the meantime.

    Args:
        lighthouse: host:port. The address of this host on the way there is where the others find this island, so it
            must not be a loopback address for some islands and another one for others.
        island: this one's number, from 0; no two islands have the same.
        min_islands: a round waits for so many, itself included.
        timeout_s: how long a round may wait for others that are alive, or fail for whatever reason, before it raises;
            sending tensors does not count. An island whose report says that it does not count, or whose training was
            over before its first round here, waits for the next round of others that are alive however long it takes.
        grace_s: how long an island that has come to a round waits before it calls those of the last round that have
            not (:meth:`is_called`). One that has been called and does not come in as long again is dead to the others
            from then on, until it comes.
        weigh: the weights of the reports. It must be the same on all islands, so what it depends upon belongs into
            :attr:`Report.digest`.
        join: makes the presence at the lighthouse.

    Raises:
        ValueError: ``lighthouse`` is no address.
        ConnectionError: nothing answers there within 30 s, or ``timeout_s`` if that is less.

    Example::

        islands = Islands("node1:29510", 0, min_islands=2, timeout_s=600.0)
        outcome = islands.round(report, masters)
        if outcome.tensors is not None:
            ...  # take them
    """

    def __init__(
        self,
        lighthouse: str,
        island: int,
        *,
        min_islands: int,
        timeout_s: float,
        grace_s: float = math.inf,
        weigh: Callable[[Sequence[Report]], Sequence[float]] = island_weights,
        join: Callable[[str, int, float], Presence] = Presence,
    ) -> None:
        self.island, self.min_islands, self.timeout_s, self.weigh = island, min_islands, timeout_s, weigh
        self.lighthouse, self.grace_s = lighthouse, grace_s
        self._presence = join(lighthouse, island, timeout_s)
        self._twins: set[str] = set()
        self._failures = 0
        self._group: IslandGroup | None = None
        self._has_left = False
        self._others: list[str] = []
        """Stores of the other islands of the last round."""
        self._next = 0
        """Rounds finished, that of the start not counted: of :attr:`Report.round` when it comes again."""
        self._stays = threading.Lock()
        """Held as long as a round is under way, and while this island leaves because it is too late for one."""
        if math.isfinite(grace_s):
            threading.Thread(target=self._watch, name="paceline-grace", daemon=True).start()

    def is_called(self, finished: int) -> bool:
        """Whether others wait for this island, which has finished so many rounds, longer than the grace time."""
        return self._presence.is_called(finished)

    def _watch(self) -> None:
        """Leave when this island has been called and does not come: the others then need not wait for it."""
        called_at = None
        while not self._presence.is_closed:
            time.sleep(min(_PAUSE_S, self.grace_s / 4))
            if not self._stays.acquire(blocking=False):
                called_at = None
                continue
            try:
                if not self.is_called(self._next):
                    called_at = None
                elif called_at is None:
                    called_at = time.monotonic()
                elif time.monotonic() - called_at > self.grace_s:
                    logger.warning(
                        "island %d does not come to round %d, though the others have waited for it for twice "
                        "averaging.grace_s (%g s): they go on without it, and it takes part in the next one.",
                        self.island,
                        self._next + 1,
                        self.grace_s,
                    )
                    self._has_left = True
                    self.close()
            finally:
                self._stays.release()

    def close(self) -> None:
        """Leave: the others wait no longer than for a dead one. A round under way on another thread raises."""
        try:
            self._presence.close()
        finally:
            self._group = None

    def round(self, report: Report, tensors: Tensors) -> Outcome:
        """Average with all islands that are there. It blocks; on one thread at a time, which may be any.

        Args:
            report: this island's. All islands call this with reports of the same digest.
            tensors: floating-point, on the CPU, of the same shapes and dtypes in the same order on all islands. They
                are only read. A function of the reports is called once it is known who is there, where what is sent
                depends on that: on all islands it must choose alike. Dtypes of less than 32 bits are summed in
                float32.

        Raises:
            ValueError: this island cannot take part as it is: another has its number, or another model or settings.
            Left: it has been left out of a round, as it came too late.
            TimeoutError: no round in ``timeout_s``.
            RuntimeError: :meth:`close` was called meanwhile.

        After any error this object is closed, so that the others need not wait for it. Another one may take its place.
        """
        assert report.island == self.island, report
        with self._stays:
            if self._presence.is_closed:
                kind = Left if self._has_left else Closed
                raise kind(f"island {self.island} has left the other islands")
            try:
                outcome = self._round(report, tensors)
            except BaseException:
                self.close()
                raise
            self._next = outcome.round - (not any(each.counts for each in outcome.reports))
            return outcome

    def _round(self, report: Report, tensors: Tensors) -> Outcome:
        begun, spent_s, attempts = time.monotonic(), 0.0, 0
        while True:
            attempts += 1
            try:
                outcome = self._attempt(report, tensors, self.timeout_s - spent_s)
            except _Again as again:
                why = str(again)
                spent_s += again.spent_s
            else:
                waited_s = time.monotonic() - begun - outcome.transfer_s
                return replace(outcome, waited_s=waited_s, attempts=attempts)
            if spent_s >= self.timeout_s:
                raise TimeoutError(
                    f"island {self.island}: round {report.round + 1} is not done after {self.timeout_s:g} s of waiting "
                    f"({why}); see whether the other islands and `paceline lighthouse` at {self.lighthouse} run, "
                    "write a smaller averaging.min_islands if some have ended, or raise averaging.timeout_s."
                )
            time.sleep(_PAUSE_S)

    def _attempt(self, report: Report, tensors: Tensors, limit_s: float) -> Outcome:
        asked = time.monotonic()
        # Who has come to its end without a round, from a checkpoint, knows nobody whom it could call.
        is_patient = not report.counts or (report.ends and not self._others)
        try:
            quorum = self._presence.quorum(
                report,
                self._failures,
                _LONG_S if is_patient else limit_s,
                called=self._others,
                grace_s=math.inf if is_patient else self.grace_s,
            )
        except TimeoutError:
            why = "fewer than min_islands are left, others are alive and have not come, or the lighthouse is gone"
            raise _Again(why, limit_s) from None
        except Closed:
            raise
        except RuntimeError as error:
            since = time.monotonic() if is_patient else asked  # how long others were waited for does not count then
            self._presence.find_again(since + limit_s)
            raise _Again(f"lighthouse: {error}", time.monotonic() - since + _PAUSE_S) from None
        spent_s = _PAUSE_S * (report.counts or report.ends) if is_patient else time.monotonic() - asked + _PAUSE_S
        reports = [report_of(member) for member in quorum.participants]
        mine = [member.replica_id for member in quorum.participants].index(self._presence.id)
        if lacking := self._lacking(quorum.participants, reports, mine):
            raise _Again(lacking, spent_s)
        weights = [float(weight) for weight in self.weigh(reports)]
        self._others = [m.store_address for n, m in enumerate(quorum.participants) if n != mine]
        finished = max(each.round for each in reports) + (not is_no_round(reports))
        outcome = Outcome(None, reports, weights, finished, 0.0, 0.0, 0, 0)
        if not self._changes(reports, weights):
            return outcome
        stall_s = min(_STALL_S, self.timeout_s)
        with self._connected(outcome, spent_s):
            group = self._meet(quorum, mine)
        begun = time.monotonic()
        inputs = tensors(reports) if callable(tensors) else tensors
        with self._connected(outcome, spent_s):
            results, residuals, num_bytes = _mean(group, inputs, weights, mine, stall_s)
            # Once all have everything, nobody has to do it again: without this one might, when others had gone on.
            group.meet(stall_s)
        transfer_s = time.monotonic() - begun
        return replace(outcome, tensors=results, transfer_s=transfer_s, bytes_sent=num_bytes, residuals=residuals)

    @contextmanager
    def _connected(self, outcome: Outcome, spent_s: float) -> Iterator[None]:
        """A part of an attempt that comes to nothing if any connection is lost."""
        try:
            yield
        except RuntimeError as error:
            if self._presence.is_closed:
                raise
            # Less where in gloo's source it was, and its guesses.
            said = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).partition(". This is")[0]
        else:
            return
        self._failures += 1
        self._group = None  # closes its connections, so that the others' attempts end too
        why = f"with {len(outcome.reports)} islands: {said}"
        logger.warning("island %d: round %d is done again, it failed %s", self.island, outcome.round, why)
        raise _Again(why, max(spent_s, _PAUSE_S))

    def _lacking(self, members: Sequence[Any], reports: Sequence[Report], mine: int) -> str | None:
        """Why there cannot be a round of these islands now.

        Raises:
            ValueError: because of this one, which will not change.
        """
        refused = refusals(reports)
        if mine in refused:
            # One that was killed as it waited, and has been started anew, may still be asking when it does.
            twins = {m.replica_id for m, r in zip(members, reports, strict=True) if r.island == self.island}
            twins.remove(self._presence.id)
            if not twins or twins & self._twins:
                raise ValueError(f"island {self.island} is refused: {refused[mine]}")
            self._twins |= twins
        if refused:
            return "; ".join(f"island {reports[i].island} is refused: {why}" for i, why in refused.items())
        if len(reports) < self.min_islands:
            return f"{len(reports)} of at least {self.min_islands} islands are there"
        hosts = [split(member.store_address)[0] for member in members]
        loopback = [is_loopback(host) for host in hosts]
        if any(loopback) and not all(loopback):
            near, far = reports[loopback.index(True)].island, reports[loopback.index(False)].island
            raise ValueError(
                f"island {near} reaches the lighthouse by a loopback address ({hosts[loopback.index(True)]}), where "
                f"island {far} ({hosts[loopback.index(False)]}) cannot reach it; give all islands the lighthouse's IP "
                "address in averaging.lighthouse."
            )
        return None

    def _changes(self, reports: Sequence[Report], weights: Sequence[float]) -> bool:
        if len(reports) == 1 or is_no_round(reports):
            return False
        if any(report.counts for report in reports):
            return True
        rounds = {report.round for report in reports}
        if len(rounds) == 1 and (rounds != {0} or all(report.trained for report in reports)):
            return False  # all have come back from checkpoints of the same round, and go on as they were
        if len({report.checksum.hex() for report in reports}) == 1:
            return False
        logger.warning(
            "islands %s have just started and differ in their parameters: all take those of island %d",
            [report.island for report in reports],
            reports[weights.index(1.0)].island,
        )
        return True

    def _meet(self, quorum: Any, mine: int) -> IslandGroup:
        """The group of a quorum's islands, all of whom have been heard of. RuntimeError if one is not to be reached."""
        members = [(member.replica_id, member.data["failures"]) for member in quorum.participants]
        key = (quorum.quorum_id, *members)
        if self._group is None or self._group.key != key:
            self._group = None
            created = f"{quorum.created.seconds}.{quorum.created.nanos}"
            prefix = f"{quorum.quorum_id}/{created}/{sum(failures for _, failures in members)}"
            store = quorum.participants[0].store_address
            self._group = IslandGroup(key, store, prefix, mine, len(members), self._presence.address)
        self._group.meet(min(CONNECT_S, self.timeout_s))
        return self._group


def _mean(
    group: IslandGroup, sent: Sent, weights: Sequence[float], mine: int, stall_s: float
) -> tuple[list[Tensor], Residuals | None, int]:
    """The weighted mean of all tensors, new residuals, and bytes that this island sent."""
    exact = sent.exact if isinstance(sent, Rounded) else sent
    results, summed = weighted_mean(group, exact, weights, mine, stall_s)
    num_bytes = 2 * summed * (group.size - 1) // group.size
    if not isinstance(sent, Rounded):
        return results, None, num_bytes
    means, residuals, rounded_bytes = rounded_mean(group, sent, weights, mine, stall_s)
    return [*means, *results], residuals, num_bytes + rounded_bytes
