"""A state of torch's global generators for the computation of one rank, apart from everybody else's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..comm.control import Gather
from ..state.rank_states import RankStates


def draw_alike(gather: Gather, rank: int, first: int, device: torch.device) -> None:
    """Have torch's global generators go on as those of another rank, ``first``. Collective.

    Ranks with slices of the same layers drop the same of what all of them have, whatever seeds a script has given them.
    """
    own = [torch.get_rng_state()]
    if device.type == "cuda":
        own.append(torch.cuda.get_rng_state(device))
    told = gather(own)[first]
    if rank != first:
        torch.set_rng_state(told[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(told[1], device)


class OwnRandom:
    """Between :meth:`enter` and :meth:`leave` the global generators are in a state of this object's own.

    Args:
        offset: to torch's initial seed; ranks with different ones draw different numbers.
        device: whose generator is used, beside the CPU's.
    """

    def __init__(self, offset: int, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        seed = torch.initial_seed() + offset
        self._state = {"cpu": torch.Generator().manual_seed(seed).get_state()}
        if self._device is not None:
            self._state["cuda"] = torch.Generator(self._device).manual_seed(seed).get_state()

    def enter(self) -> None:
        self._swap()

    def leave(self) -> None:
        self._swap()

    def _swap(self) -> None:
        others = {"cpu": torch.get_rng_state()}
        torch.set_rng_state(self._state["cpu"])
        if self._device is not None:
            others["cuda"] = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(self._state["cuda"], self._device)
        self._state = others

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._state |= {kind: tensor for kind, tensor in state.items() if kind in self._state}

    def load_saved(self, saved: RankStates) -> None:
        """Go on where this rank was; in a run of another shape it starts anew."""
        if saved.own is not None:
            self.load_state_dict(saved.own)
