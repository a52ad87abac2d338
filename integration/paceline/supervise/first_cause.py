"""Why a job cannot go on: the first cause among what is known of its ranks.

Pure: :mod:`.watch` tells what a rank does, :mod:`.watch_hub` gathers it on rank 0 and asks here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

EVERYONE = -1
"""As a peer: the operation waits for all other ranks."""

DEVICE = -2
"""As a peer: the operation waits for this rank's device, on which kernels may queue behind those that communicate."""

_LOST_CONNECTION = re.compile(
    r"by peer|timed? ?out|broken pipe|NCCL|remote process|connection (was )?(closed|refused|reset)", re.IGNORECASE
)


@dataclass(frozen=True)
class Doing:
    """What a rank does.

    Args:
        step: optimizer steps done, -1 before training.
        operation: such as ``"loading data"``; empty outside of the engine.
        peer: the rank that the operation waits for, :data:`EVERYONE`, or None.
        age_s: seconds since it began.
        paused: the phase that may take long, if it is in one.
        where: the line of Python that it is at, once it takes long.
        may_wait: it may wait for any other rank although it has no peer: see :data:`DEVICE`.
    """

    step: int = -1
    operation: str = ""
    peer: int | None = None
    age_s: float = 0.0
    paused: str = ""
    where: str = ""
    may_wait: bool = False

    @property
    def waits(self) -> bool:
        """Whether it waits for another rank, or may."""
        return self.peer is not None or self.may_wait

    def __str__(self) -> str:
        what = self.paused or self.operation or ("outside of the engine" if self.step >= 0 else "setting up")
        if self.peer is not None and self.peer != EVERYONE and "rank" not in what:
            what += f" (rank {self.peer})"
        return f"at step {self.step}, {what}" if self.step >= 0 else what


@dataclass
class Member:
    """A rank as rank 0 knows it; times are of rank 0's clock."""

    heard_at_s: float
    doing: Doing = field(default_factory=Doing)
    lost_at_s: float | None = None
    """When its connection broke without a word: the process ended."""
    has_left: bool = False
    """Whether it ended in order."""
    failed_at_s: float | None = None
    """When it told of an error that another rank's end may have brought about."""
    error: str = ""


@dataclass(frozen=True)
class Cause:
    """Why everybody stops: which rank says so, the line it says, and the exit code of all."""

    text: str
    rank: int = 0
    speaker: int = 0
    code: int = 1


@dataclass(frozen=True)
class Limits:
    """Seconds: without progress; until a rank that waits gives one up whose process has ended; until no news of a rank
    is bad news; that a lost connection waits for its explanation."""

    progress_s: float = 1800.0
    lost_s: float = 3.0
    silent_s: float = 30.0
    explain_s: float = 1.5

    @staticmethod
    def of(progress_s: float) -> Limits:
        return Limits(progress_s=progress_s, silent_s=max(2.0, min(30.0, progress_s / 2)))


def is_lost_connection(error: BaseException) -> bool:
    """Whether ``error`` tells of a lost connection or a time limit of the transport."""
    return isinstance(error, (RuntimeError, OSError)) and bool(_LOST_CONNECTION.search(str(error)))


def may_follow(error: BaseException) -> bool:
    """Whether ``error`` may come from another rank's end: itself, or as somebody has put it who saw it."""
    return is_lost_connection(error) or (isinstance(error, RuntimeError) and "lost another rank" in str(error))


def raised(rank: int, doing: Doing, error: str) -> Cause:
    return Cause(f"rank {rank} failed {doing}: {error}", rank, speaker=rank)


def gone(
    rank: int,
    doing: Doing | None,
    how: str = "its process ended without a word",
    seen_by: tuple[int, Doing] | None = None,
) -> Cause:
    """Args: ``doing`` is the last that was heard of it, ``seen_by`` a rank that misses it, and what that one does."""
    last = f"; last heard {doing}" if doing is not None else ""
    seen = f"; rank {seen_by[0]} was {seen_by[1]}" if seen_by is not None else ""
    return Cause(f"rank {rank} is gone ({how}){last}{seen}", rank)


def judge(
    members: Mapping[int, Member], now_s: float, limits: Limits, paused_at_s: float = float("-inf")
) -> Cause | None:
    """The first cause, or None while the job may go on (or an error still waits for its explanation).

    Args:
        paused_at_s: when a rank was last in a phase that may take long; nobody's time counts until then, but that of a
            rank that is not heard of.
    """
    lost = sorted((m.lost_at_s, rank) for rank, m in members.items() if m.lost_at_s is not None)
    failed = sorted((m.failed_at_s, rank) for rank, m in members.items() if m.failed_at_s is not None)
    running = {rank: m for rank, m in members.items() if m.lost_at_s is None and not m.has_left}
    waiting = {rank: m for rank, m in running.items() if m.doing.waits and not m.doing.paused}
    if lost:
        at_s, rank = lost[0]
        patient = [r for r, m in waiting.items() if min(m.doing.age_s, now_s - at_s) < limits.lost_s]
        if failed or len(patient) < len(waiting):
            witness = failed[0][1] if failed else min(set(waiting) - set(patient))
            return gone(rank, members[rank].doing, seen_by=(witness, members[witness].doing))
    if failed:
        at_s, rank = failed[0]
        if now_s - at_s < limits.explain_s:
            return None
        explained = _left(members) or _silent(running, now_s, limits, seen_by=rank)
        return explained or raised(rank, members[rank].doing, members[rank].error)
    oldest_s, rank = max(((m.doing.age_s, r) for r, m in running.items() if m.doing.operation), default=(0.0, 0))
    if oldest_s < limits.progress_s:
        return None
    if now_s - paused_at_s < limits.progress_s:  # a phase of a rank that has not been heard of since is none
        return _silent(running, now_s, replace(limits, silent_s=limits.progress_s), seen_by=rank)
    return _stuck(members, running, now_s, limits, seen_by=rank)


def _left(members: Mapping[int, Member]) -> Cause | None:
    for rank, member in members.items():
        if member.has_left:
            return Cause(f"rank {rank} has ended {member.doing}, and other ranks wait for it", rank)
    return None


def _silent(running: Mapping[int, Member], now_s: float, limits: Limits, seen_by: int) -> Cause | None:
    silent_s, rank = max(((now_s - m.heard_at_s, rank) for rank, m in running.items()), default=(0.0, 0))
    if silent_s < limits.silent_s:
        return None
    how = f"nothing heard for {silent_s:.0f} s: stopped, or its machine or network down"
    return gone(rank, running[rank].doing, how, None if seen_by == rank else (seen_by, running[seen_by].doing))


def _stuck(
    members: Mapping[int, Member], running: Mapping[int, Member], now_s: float, limits: Limits, seen_by: int
) -> Cause | None:
    for gone_rank, member in members.items():
        if member.lost_at_s is not None:
            return gone(gone_rank, member.doing, seen_by=(seen_by, running[seen_by].doing))
    if ended := _left(members) or _silent(running, now_s, limits, seen_by):
        return ended
    limit = f"the limit is {limits.progress_s:g} s"
    busy = sorted(
        (m.doing.step, m.doing.may_wait, -m.doing.age_s, rank) for rank, m in running.items() if m.doing.peer is None
    )
    if busy:
        rank = busy[0][3]
        doing = running[rank].doing
        where = f" in {doing.where}" if doing.where else ""
        return Cause(f"rank {rank} hangs {doing}: {doing.age_s:.0f} s{where}; {limit}", rank)
    waits = sorted((m.doing.step, rank) for rank, m in running.items())
    shown = "; ".join(f"rank {rank} {running[rank].doing}" for _, rank in waits[:8])
    more = f"; and {len(waits) - 8} more" if len(waits) > 8 else ""
    return Cause(f"all ranks wait for each other, {limit}: {shown}{more}", waits[0][1])


def is_paused(member: Member, now_s: float, limits: Limits) -> bool:
    """Whether this rank is, and is alive, in a phase that may take long."""
    return bool(member.doing.paused) and member.lost_at_s is None and now_s - member.heard_at_s < limits.silent_s
