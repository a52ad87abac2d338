"""Masters and states of experts that come beside the next step of DeepSpeed's own optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from .wrapper_states import StatePart, States

READERS = ("state_dict", "load_state_dict", "refresh_fp32_params")
"""Methods of DeepSpeed's optimizers, between two steps, that look at masters and states."""

READERS_OF_PARAMETER = ("get_full_hp_param", "set_full_hp_param")
"""Methods of a parameter that ``deepspeed.utils.safe_get_full_fp32_param`` and its like call."""

LINK = "_link_all_hp_params"
"""Method of DeepSpeed's optimizers that gives parameters these methods: anew after a checkpoint was loaded."""


class LateStates:
    """Masters and states on their way to this rank, waited for by whoever looks at them. Nothing here is collective.

    The engine has to call :meth:`settle` before each step of the optimizer. Whoever reads the optimizer's tensors
    themselves between two steps finds experts that have just moved half-way.

    Args:
        optimizer: DeepSpeed's; its methods that look at masters and states wait first, from now on.
        parameters: of the experts; the same.
    """

    def __init__(self, optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
        self._arrive: Callable[[], None] | None = None
        self._parameters = list(parameters)
        self._have_wait([optimizer], READERS)
        self._have_wait(self._parameters, READERS_OF_PARAMETER)
        if (link := getattr(optimizer, LINK, None)) is not None:
            setattr(optimizer, LINK, partial(self._linked, link))

    def expect(self, arrive: Callable[[], None]) -> None:
        """Have ``arrive`` called before anybody looks."""
        self.settle()
        self._arrive = arrive

    def settle(self) -> None:
        """Wait for what is on its way, if anything is.

        Raises:
            PeerError: a rank was lost.
        """
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()

    def settled(self, states: States) -> States:
        """The same ``states``, which wait first."""

        def waiting(parameter: nn.Parameter) -> Sequence[StatePart]:
            self.settle()
            return states(parameter)

        return waiting

    def _have_wait(self, owners: Sequence[Any], names: Sequence[str]) -> None:
        for owner in owners:
            for name in names:
                if (read := getattr(owner, name, None)) is not None:
                    setattr(owner, name, partial(self._settled, read))

    def _linked(self, link: Callable[[], None]) -> None:
        link()
        self._have_wait(self._parameters, READERS_OF_PARAMETER)

    def _settled(self, read: Callable[..., object], *args: object, **kwargs: object) -> object:
        self.settle()
        return read(*args, **kwargs)
