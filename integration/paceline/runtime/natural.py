"""The part of the engines that gives a model's layers natural gradients, keeps what is learned for them, and limits how
far an update moves parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import PacelineConfig
from ..optim.max_change import Limits
from ..optim.natural_layers import NaturalGradients
from ..state.named import names_of

logger = logging.getLogger("paceline")

MOSTLY = 0.5
"""Share of the updates at the floor from which a run is told that natural gradients do little."""

FEWEST_UPDATES = 100
"""Updates after which that can be known."""


class Natural:
    """Mixed into an engine; its ``_start_...`` are called by all ranks together."""

    natural_gradient: NaturalGradients | None = None
    """None: gradients are ordinary ones."""

    _told_of_the_floor = False

    def _start_natural_gradient(self: Any) -> None:
        options = PacelineConfig.of(self._config._param_dict).natural_gradient
        if options is None:
            return
        name_of = getattr(self.module, "state_name", str)
        self.natural_gradient = NaturalGradients(options, self._unit_of_sum, name_of)
        self.natural_gradient.adopt(self.module)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, len(self.natural_gradient.names))
        if not any(told):
            remedy = "leave it out" if options.layers is None else f"correct layers, {options.layers!r}"
            raise ValueError(
                "paceline.natural_gradient is for linear layers and experts that are trained, and finds none of them: "
                f"{remedy}."
            )

    def _start_max_change(self: Any) -> None:
        limits = PacelineConfig.of(self._config._param_dict).limits
        if limits is None:
            return
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, self._heads())
        heads = frozenset(Limits.layer_of(name) for names in told for name in names)
        self._limit_changes(Limits(limits.layer, limits.head, limits.total, heads))

    def _heads(self: Any) -> list[str]:
        """Names of the output layer's parameters, where it is here."""
        model = getattr(getattr(self.module, "stage", None), "model", self.module)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        own = set(head.parameters()) if isinstance(head, nn.Module) else set()
        return [name for parameter, name in self._names().items() if parameter in own]

    def _names(self: Any) -> dict[nn.Parameter, str]:
        return names_of(self.module)

    def _limit_changes(self: Any, limits: Limits) -> None:
        if self.optimizer is not None:
            self.optimizer.max_change = None if limits.is_none else limits

    def _unit_of_sum(self: Any, num_rows: int) -> float:
        """Times a gradient it is that of a loss summed over the rows: here a loss is the mean over a micro-batch."""
        return num_rows * self.gradient_accumulation_steps() / loss_scale_of(self.optimizer)

    def natural_gradient_report(self: Any) -> dict[str, float] | None:
        """Of this rank: ``layers``, and the share of their ``updates`` that were ``at_floor``, without an effect.

        Waits for the device. Says once if it is most of them.
        """
        if self.natural_gradient is None:
            return None
        floored, updates = self.natural_gradient.updates()
        share = floored / updates if updates else 0.0
        if share > MOSTLY and updates > FEWEST_UPDATES and not self._told_of_the_floor:
            self._told_of_the_floor = True
            logger.warning(
                "natural gradients do little: %.0f %% of the estimates' updates found derivatives too small to learn "
                "from (%s); is the loss divided by something large?",
                *(100 * share, "root mean square below 1e-5 a token"),
            )
        return {"layers": len(self.natural_gradient.names), "updates": updates, "at_floor": share}

    # -- files and moving layers ---------------------------------------------------------------------------------

    def _natural_state(self: Any) -> dict[str, Any]:
        return {} if self.natural_gradient is None else self.natural_gradient.state_dict()

    def _natural_state_of(self: Any, items: Sequence[int]) -> dict[str, Any]:
        """Of layers of a pipeline."""
        prefixes = tuple(self.layers.prefix(item) for item in items)
        return {name: state for name, state in self._natural_state().items() if name.startswith(prefixes)}

    def _move_natural_state(self: Any, left: Mapping[str, Any]) -> None:
        """What was learned of the layers that have left goes to where they are now, of each replica to its own."""
        if self.natural_gradient is None:
            return
        self.natural_gradient.adopt(self.module)
        states: list[Any] = [None] * dist.get_world_size(self.control.pipe)
        dist.all_gather_object(states, _to(left, torch.device("cpu")), group=self.control.pipe)
        self._load_natural_state([*states, self._natural_state()])

    def _load_natural_state(self: Any, states: Iterable[Mapping[str, Any]]) -> None:
        """Of several ranks, the most fitting last."""
        if self.natural_gradient is None:
            return
        merged: dict[str, Any] = {}
        for state in states:
            merged |= state
        here = {name: _to(state, torch.device(self.device)) for name, state in merged.items()}
        self.natural_gradient.load_state_dict(here)


def loss_scale_of(optimizer: Any) -> float:
    """What DeepSpeed multiplies a loss with before its backward."""
    for name in ("loss_scale", "cur_scale"):
        scale = getattr(optimizer, name, None)
        if isinstance(scale, (int, float)):
            return float(scale)
    return 1.0


def _to(state: Any, device: torch.device) -> Any:
    if isinstance(state, Mapping):
        return {key: _to(value, device) for key, value in state.items()}
    return state.to(device) if torch.is_tensor(state) else state
