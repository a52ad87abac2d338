"""The engines' part that gives a model's layers natural gradients and keeps the estimates where the layers are.

Also the limits on how far an update moves parameters, which the same section of the JSON may give.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ..comm.control import Gather
from ..config.natural_gradient_keys import MaxChangeConfig, NaturalGradientConfig
from ..optim.max_change import Limits
from ..optim.natural_layers import NaturalGradients
from ..patches.deepspeed_engine import LOSS_SCALE, scale_without_zero
from ..state.rank_states import RankStates

logger = logging.getLogger("paceline")

MOSTLY = 0.5
"""Share of the updates at the floor from which a run is told that natural gradients do little."""

FEWEST_UPDATES = 100
"""Updates after which that can be known."""


class NaturalGradientPart:
    """Natural gradients of the layers on this rank.

    Args:
        options: the section of the JSON.
        model: this rank's modules; layers may come and go (:meth:`follow`).
        gather: over all ranks of the job, which make this part together.
        device: where estimates are kept.
        unit: factor that makes a gradient that of a loss summed over the given number of rows.
        name_of: names under which parameters are saved, from those in ``model``.

    Raises:
        ValueError: on every rank: none of them has a layer that can have natural gradients.
    """

    def __init__(
        self,
        options: NaturalGradientConfig,
        model: nn.Module,
        *,
        gather: Gather,
        device: torch.device,
        unit: Callable[[int], float],
        name_of: Callable[[str], str] = str,
    ) -> None:
        self._model, self._device = model, device
        self._layers = NaturalGradients(options, unit, name_of)
        self._layers.adopt(model)
        self._has_warned = False
        if not any(gather(len(self.names))):
            remedy = "leave it out" if options.layers is None else f"correct layers, {options.layers!r}"
            raise ValueError(
                "paceline.natural_gradient is for linear layers and experts that are trained, and finds none of them: "
                f"{remedy}."
            )

    @property
    def names(self) -> list[str]:
        """Names of the weights on this rank that have natural gradients, sorted."""
        return self._layers.names

    def report(self) -> dict[str, float]:
        """Numbers of this rank's layers, of their estimates' updates, and the share of those that had no effect.

        Waits for the device. Warns once if most updates had none.
        """
        floored, updates = self._layers.updates()
        share = floored / updates if updates else 0.0
        if share > MOSTLY and updates > FEWEST_UPDATES and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "natural gradients do little: %.0f %% of the estimates' updates found derivatives too small to learn "
                "from (%s); is the loss divided by something large?",
                *(100 * share, "root mean square below 1e-5 a token"),
            )
        return {"layers": len(self.names), "updates": updates, "at_floor": share}

    # -- files and moving layers ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Estimates of this rank's layers, by the name of the weight."""
        return self._layers.state_dict()

    def load_saved(self, saved: RankStates) -> None:
        """Go on with the estimates of a run that was saved; those of this rank's replica before others."""
        self.load(saved.nearest_last)

    def load(self, states: Iterable[Mapping[str, object]]) -> None:
        """Take this rank's estimates from those of several ranks; of one weight the last counts."""
        merged: dict[str, object] = {}
        for state in states:
            merged |= state
        self._layers.load_state_dict({name: _to(state, self._device) for name, state in merged.items()})

    def state_of(self, prefixes: Sequence[str]) -> dict[str, object]:
        """Estimates of the layers whose names begin with one of ``prefixes``."""
        return {name: state for name, state in self.state_dict().items() if name.startswith(tuple(prefixes))}

    def leave(self, prefixes: Sequence[str]) -> Callable[[Gather], None]:
        """:meth:`follow`, with the :meth:`state_of` of now."""
        return partial(self.follow, self.state_of(prefixes))

    def follow(self, left: Mapping[str, object], gather: Gather) -> None:
        """Adopt the layers that have come, with their estimates; a replica's layers take those of the same replica.

        Args:
            left: estimates of the layers that have left this rank (:meth:`state_of`, before).
            gather: over the stages of this rank's pipeline, which call this together.
        """
        cpu = torch.device("cpu")
        told = gather((self.names, {name: _to(state, cpu) for name, state in left.items()}))
        self._layers.adopt(self._model, frozen={name for names, _ in told for name in names})
        self.load([*(states for _, states in told), self.state_dict()])


def agreed_limits(
    section: MaxChangeConfig | None, model: nn.Module, names: Mapping[nn.Parameter, str], gather: Gather
) -> Limits | None:
    """Limits on the change of parameters in an update, the same on all ranks, which call this together.

    Args:
        model: this rank's modules, which may have the output layer.
        names: of the parameters, as the optimizer has them.
    """
    if section is None:
        return None
    own = {parameter for head in heads_of(model) for parameter in head.parameters()}
    told = gather([name for parameter, name in names.items() if parameter in own])
    heads = frozenset(Limits.layer_of(name) for found in told for name in found)
    limits = Limits(section.layer, section.head, section.total, heads)
    return None if limits.is_none else limits


def heads_of(model: nn.Module) -> list[nn.Module]:
    """The output layers among this rank's modules: none, or one for each model that has some of it here."""
    parts = getattr(model, "models", [model])
    found = [part.get_output_embeddings() for part in parts if hasattr(part, "get_output_embeddings")]
    return [head for head in found if isinstance(head, nn.Module)]


def loss_scale_of(engine: DeepSpeedEngine) -> float:
    """Factor by which a DeepSpeed engine multiplies a loss before its backward.

    That of fp16 autocast waits for the device.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, ZeROOptimizer):
        scaler, scale = optimizer.torch_autocast_gradscaler, getattr(optimizer, "loss_scale", 1.0)
    else:
        scaler = engine.torch_autocast_z0_gradscaler
        scale = scale_without_zero(optimizer) if LOSS_SCALE.is_applied() else 1.0  # DeepSpeed multiplies by none
    return float(scale if scaler is None else scaler.get_scale())


def _to(state: object, device: torch.device) -> object:
    if isinstance(state, Mapping):
        return {key: _to(value, device) for key, value in state.items()}
    return state.to(device) if torch.is_tensor(state) else state
