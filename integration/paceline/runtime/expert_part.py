"""The part of :class:`~paceline.runtime.engine.PacelineEngine` that concerns experts on several ranks of a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from torch import nn

from ..config import PacelineConfig
from ..config.optimizers import ELEMENTWISE
from ..moe.hf_experts import HFExpertLayer
from ..moe.layer import EVEN
from ..optim.buckets import Domain
from ..planning.experts import Placement
from .expert_groups import ExpertGroups

if TYPE_CHECKING:
    from ..moe.rebalancer import Rebalancer
    from ..moe.stage_agreement import Bystander

ELEMENTWISE_OF_DEEPSPEED = frozenset(
    ("DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion")
)


class Experts:
    """Mixed into the engine, before DeepSpeed's own."""

    rebalancer: Rebalancer | None = None
    """Moves the experts of this stage. Its group are the stage's data-parallel ranks."""
    expert_looks: Rebalancer | Bystander | None = None
    """Called after every step: the rebalancer, or in a stage without one whatever takes part for it."""

    @property
    def expert_layers(self: Any) -> dict[str, HFExpertLayer]:
        """The stage's layers whose experts lie on several ranks, by Hugging Face's names, in the model's order."""
        return getattr(self.module, "expert_layers", {})

    @property
    def _expert_groups(self: Any) -> ExpertGroups:
        return getattr(self.module, "expert_groups", None) or ExpertGroups()

    def _start_experts(self: Any) -> None:
        section = PacelineConfig.of(self._config._param_dict).moe
        groups = self._expert_groups
        if section is not None and groups.size == 1:
            raise ValueError(
                'paceline.moe is there, and every rank has all experts of its stage: write "expert_parallel": '
                '{"enabled": true, "autoep_size": …}, or leave "moe" out of "paceline".'
            )
        for name, layer in self.expert_layers.items():
            layer.begin(
                name,
                groups.sharing,
                num_replicas=(section and section.replicas) or 0,
                splitting=(section and section.splitting) or EVEN,
                is_last_backward=self.is_last_backward,
            )
        if section is None:
            return
        from ..moe.moving import states_of
        from ..moe.rebalancer import Rebalancer, looks_every
        from ..moe.stage_agreement import Bystander, Stages

        stages = None
        if self.num_stages > 1:
            stages = Stages(
                *(self.stage_id, self.num_stages, self.control),
                computed_s=lambda: float(self.meter.recorder.computed_s()),  # made later
                num_micro_batches=lambda: self.schedule.num_micro_batches,
            )
        if self.expert_layers:
            layers, group = list(self.expert_layers.values()), self.grid.get_data_parallel_group()
            self.expert_looks = self.rebalancer = Rebalancer(layers, states_of(self), group, section, stages=stages)
        elif stages is not None:
            self.expert_looks = Bystander(looks_every(section), stages)

    def _take_placements(self: Any, rank_states: Sequence[Mapping[str, Any]]) -> None:
        """Lay experts as they were in the run that was saved, if they lay on as many ranks: before all else is read."""
        if self.rebalancer is None:
            return
        saved = {name: held for state in rank_states for name, held in state.get("experts", {}).items()}
        for name, layer in self.expert_layers.items():
            if len(saved.get(name, ())) == layer.size:
                width = layer.num_slots + layer.num_replicas
                devices = tuple(tuple(held[:width]) for held in saved[name])
                layer.take_on(Placement(devices, (layer.num_slots,) * layer.size))

    def place_experts(self: Any, placements: Mapping[str, Placement]) -> dict[str, Any]:
        """Move experts so that the named layers have these placements. Between two steps, on all ranks.

        Returns:
            ``moved`` experts of this stage, ``num_bytes`` that the busiest rank sent or received, ``seconds``.

        Raises:
            ValueError: there is no such layer, or it cannot have such a placement; nothing has moved then.
        """
        movable = {} if self.rebalancer is None else self.expert_layers
        with self.control.together("placing experts"):
            for name in placements.keys() & movable.keys():
                movable[name].check(placements[name])
        known = sorted({name for names in self.control.gather(list(movable)) for name in names})
        if unknown := sorted(set(placements) - set(known)):
            raise ValueError(
                f"there is no layer {unknown[0]!r} whose experts can move: name one of {known}; they can where the "
                'JSON has "expert_parallel" and "paceline": {"moe": {}}.'
            )
        if self.rebalancer is None:
            return {"moved": 0, "num_bytes": 0, "seconds": 0.0}
        own: dict[str, Any] = self.rebalancer.place({n: p for n, p in placements.items() if n in movable})
        return own

    def is_last_backward(self: Any) -> bool:
        """Whether the backward that runs now is the last of this step on this stage."""
        return bool(self.executor.is_last_backward)

    def _refuse_migration(self: Any, old: Sequence[int], new: Sequence[int]) -> None:
        """Raise ValueError where layers cannot move because of their experts."""
        if self._expert_groups.size > 1:
            raise ValueError(
                f"layers cannot move between stages ({list(old)} to {list(new)}) while their experts lie on "
                f"{self._expert_groups.size} ranks: leave expert_parallel out, or give the partition at the start."
            )

    # -- the optimizer -------------------------------------------------------------------------------------------

    def _check_experts_optimizer(self: Any, basic: torch.optim.Optimizer) -> None:
        name = type(basic).__name__
        if self._expert_groups.size > 1 and name not in ELEMENTWISE | ELEMENTWISE_OF_DEEPSPEED:
            raise ValueError(
                f"optimizer {name} looks at a parameter as a whole, and of the experts' every rank has another part: "
                f"choose one of {', '.join(sorted(ELEMENTWISE))}, or leave expert_parallel out."
            )

    def _expert_domain(self: Any) -> Callable[[nn.Parameter], Domain | None]:
        """The ranks over which a parameter is reduced, if it is not all replicas."""
        alike = Domain.of(self._expert_groups.alike)
        experts = {parameter for layer in self.expert_layers.values() for parameter in layer.parameters()}
        return lambda parameter: alike if parameter in experts else None

    # -- DeepSpeed's ---------------------------------------------------------------------------------------------

    def _broadcast_model(self: Any) -> None:
        """Replicas begin with the weights of the first; experts with those of the first that has them."""
        if not self.expert_layers:
            super()._broadcast_model()  # type: ignore[misc]
            return
        experts = {parameter for layer in self.expert_layers.values() for parameter in layer.parameters()}
        everyone = self.module._grid.get_data_parallel_group()
        for parameter in self.module.parameters():
            group = self._expert_groups.alike if parameter in experts else everyone
            if group is not None:
                first = torch.distributed.get_global_rank(group, 0)
                dist.broadcast(parameter.data.view(-1).view(torch.uint8), first, group=group)
