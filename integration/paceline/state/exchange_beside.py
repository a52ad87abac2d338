"""An exchange of tensors that goes on beside a rank's steps, until somebody needs what it brings."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import torch

from ..measure.device_of_thread import on_this_device
from .exchange import Transfer, carry_out

LOOK_S = 0.5
"""Between two looks at how far an exchange has come, while somebody waits for it."""

LEAVE_S = 30.0
"""The longest that the end of a script waits for the next message."""


class ExchangeBeside:
    """Carries out rounds of transfers on a thread, from :meth:`start` on.

    Nobody may write to the tensors that leave, or look at the places, before :meth:`wait` has returned.

    Args:
        rounds: transfers from and to this rank, as :func:`~.exchange.carry_out` takes them.
        group: that carries them, and nothing else until they are done.
        in_place: as :func:`~.exchange.carry_out` takes it.

    Attributes:
        seconds: that it took, once it is done.
    """

    seconds = 0.0

    def __init__(
        self, rounds: Sequence[Sequence[Transfer]], device: torch.device, group: Any, *, in_place: bool = False
    ) -> None:
        self._rounds, self._device, self._group, self._in_place = rounds, device, group, in_place
        self._num_messages = 0
        self._error: BaseException | None = None
        self._thread = Thread(target=on_this_device(self._run), name="paceline-exchange", daemon=True)

    def start(self) -> None:
        """Begin. All ranks of the group do so, if not at once."""
        atexit.register(self._leave)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def wait(self, progress: Callable[[], None] = lambda: None) -> None:
        """Return when everything has arrived and been sent.

        Args:
            progress: called after messages.

        Raises:
            RuntimeError: a connection was lost; or it was not started.
        """
        if self._thread.ident is None:
            raise RuntimeError("what an exchange brings was asked for before it began.")
        seen = 0
        while self._thread.is_alive():
            self._thread.join(LOOK_S)
            if self._num_messages != seen:
                seen = self._num_messages
                progress()
        atexit.unregister(self._leave)
        if self._error is not None:
            raise self._error

    def _leave(self) -> None:
        """At the end of the script: a thread that waits for a message then would abort the process."""
        seen = -1
        while self._thread.is_alive() and self._num_messages != seen:
            seen = self._num_messages
            self._thread.join(LEAVE_S)

    def _run(self) -> None:
        begun = time.perf_counter()
        try:
            carry_out(self._rounds, self._device, group=self._group, in_place=self._in_place, progress=self._note)
        except BaseException as error:
            self._error = error
        self._rounds = ()
        self.seconds = time.perf_counter() - begun

    def _note(self) -> None:
        self._num_messages += 1
