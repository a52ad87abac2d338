"""Say where a rank was when the connection to another broke; the backends only say that it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..comm.control import PeerError, is_shared
from ..supervise.first_cause import is_lost_connection
from ..supervise.watch import WATCH
from .executor import HeldStage


@contextmanager
def naming_lost_peers(rank: int, where: Callable[[], tuple[int, HeldStage]]) -> Iterator[None]:
    """Raise :class:`PeerError` for errors that tell of a lost connection; of one of all ranks, the engine is left.

    Args:
        where: gives the step, and the stage of this rank that ran last.
    """
    try:
        yield
    except Exception as error:
        if is_shared(error) or isinstance(error, StopIteration):  # who catches it on all ranks may take any time
            WATCH.idle()
        if not isinstance(error, RuntimeError) or not is_lost_connection(error):
            raise
        step, held = where()
        doing = WATCH.operation or "agreeing with the other ranks"
        lane = getattr(error, "paceline_lane", None)
        if lane is not None:  # the thread of one lane, while this one may have waited for another
            doing = f"{'sending to' if lane.is_sender else 'receiving from'} rank {lane.peer}"
        elif held.boundary.doing is not None:
            verb, other = held.boundary.doing
            doing = f"{verb} stage {other}, rank {held.ranks[other]}"
        raise PeerError(
            f"rank {rank}, stage {held.runner.stage}, lost another rank at step {step} while {doing}; that rank's own "
            f"error, if it could still give one, is the cause ({error})"
        ) from error


def forget_messages(held: Sequence[HeldStage]) -> None:
    """Forget the last messages: what fails from here on is none between stages."""
    for stage in held:
        stage.boundary.doing = None
