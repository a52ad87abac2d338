"""Experts of a stage that lie on several of its ranks: what the engine must know of them, and their moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from deepspeed import comm as dist
from torch import nn
from torch.distributed import ProcessGroup

from ..comm.control import ControlPlane, Gather
from ..config.expert_choice import MoeChoice
from ..config.optimizers import ELEMENTWISE, class_name, is_elementwise
from ..moe.experts_ahead import BesideSteps
from ..moe.hf_experts import HFExpertLayer
from ..moe.layer import EVEN, ExpertLayer, LayerState
from ..moe.load_measurements import LoadMeasurements
from ..moe.moving import Guard
from ..moe.rebalancer import Rebalancer
from ..moe.stage_agreement import StageAgreement, Stages
from ..optim.buckets import Domain
from ..planning.experts import Placement
from ..planning.rebalance import Uneven
from ..planning.tuning import DecisionLog, TuningInterval
from ..state.named import is_spread
from ..supervise.expected import expecting_all
from .controller import Controller
from .expert_groups import ExpertGroups

if TYPE_CHECKING:
    from ..moe.wrapper_states import States

FIRST_STEPS = 10
"""Steps until experts are first placed anew, if there are to be more in an interval."""


@dataclass(frozen=True)
class SharedExperts:
    """Layers of a stage whose experts lie on several ranks; known before there is an optimizer.

    Args:
        layers: by Hugging Face's names, in the model's order; as they are at the moment.
        groups: of this rank.
    """

    layers: Mapping[str, HFExpertLayer] = field(default_factory=dict)
    groups: ExpertGroups = field(default_factory=ExpertGroups)

    @classmethod
    def of(cls, module: nn.Module) -> SharedExperts:
        """Experts of a pipeline's module; none of one that does not spread them."""
        groups: ExpertGroups | None = getattr(module, "expert_groups", None)
        return cls(getattr(module, "expert_layers", {}), groups or ExpertGroups())

    def check_optimizer(self, basic: torch.optim.Optimizer) -> None:
        """Raise ValueError for an optimizer that cannot step a part of the experts."""
        name = class_name(basic)
        if self.groups.size > 1 and not is_elementwise(basic):
            raise ValueError(
                f"optimizer {name} looks at a parameter as a whole, and of the experts' every rank has another part: "
                f"choose one of {', '.join(sorted(ELEMENTWISE))}, or leave expert_parallel out."
            )

    @property
    def number(self) -> int:
        """Number of this rank among those that share experts; ranks of all stages with one number have the same."""
        return 0 if self.groups.sharing is None else torch.distributed.get_rank(self.groups.sharing)

    def domain(self) -> Callable[[nn.Parameter], Domain | None]:
        """Find the ranks over which a parameter is reduced; None stands for all replicas."""
        alike = Domain.of(self.groups.alike)
        return lambda parameter: alike if is_spread(parameter) else None

    def broadcast(self, parameters: Iterable[nn.Parameter], everyone: ProcessGroup | None) -> None:
        """Have replicas begin with the weights of the first, and experts with those of the first that has them.

        Args:
            everyone: the group of the replicas.
        """
        for parameter in parameters:
            if not parameter.is_contiguous():  # a weight that a script has transposed: all else reads it in order
                parameter.data = parameter.data.contiguous()
            group = self.groups.alike if is_spread(parameter) else everyone
            if group is not None:
                first = torch.distributed.get_global_rank(group, 0)
                dist.broadcast(parameter.data.view(-1).view(torch.uint8), first, group=group)


def interval_of(section: MoeChoice) -> TuningInterval:
    """Intervals of ``rebalance_every`` steps, of which the first is short: experts begin in any order."""
    return TuningInterval(section.rebalance_every, min(section.rebalance_every, FIRST_STEPS))


def expert_controller(
    layers: Sequence[ExpertLayer],
    states: States,
    group: ProcessGroup | None,
    device: torch.device,
    section: MoeChoice,
    decided: DecisionLog,
    stages: Stages | None = None,
    settle: Callable[[bool], None] = lambda switches: None,
    beside: BesideSteps | None = None,
    half_way: Guard = nullcontext,
) -> tuple[Rebalancer, Controller]:
    """Make the actuator of experts' placement and its controller; it counts steps of the optimizer.

    Args:
        layers: of this rank, in the model's order; the same on all ranks of ``group``. A stage of a pipeline may have
            none.
        states: finds what belongs to a parameter.
        device: that ``group`` communicates from.
        decided: gets the decisions.
        stages: of the pipeline, if these layers are of one stage of several.
        settle: see :class:`Controller`.
        beside, half_way: see :class:`Rebalancer`.
    """
    file = None if section.loads_file is None else Path(section.loads_file)
    loads = LoadMeasurements(layers, states, group, device, file)
    rebalancer = Rebalancer(loads, states, group, section, decided, stages=stages, beside=beside, half_way=half_way)
    agreement = StageAgreement(group, device, stages)
    return rebalancer, Controller(loads, {rebalancer: interval_of(section)}, agreement, decided, settle)


def check_alike(told: Sequence[Mapping[str, Placement | None]]) -> None:
    """Raise ValueError if ranks that have a layer ask for different placements of it.

    Ranks send each other tokens and copies by their own placements, and would wait for what nobody sends, or take one
    expert for another.

    Args:
        told: by each rank, the same on all, the placement that it asks for of each of its layers; None: of none.
    """
    asked: dict[str, Placement | None] = {}
    for rank, layers in enumerate(told):
        for name, placement in layers.items():
            if asked.setdefault(name, placement) != placement:
                raise ValueError(
                    f"rank {rank} asks for another placement of {name} than the ranks before it: give all ranks that "
                    "have this layer the same."
                )


class Experts:
    """Moves experts between the ranks of a stage, by the load or as somebody asks. All ranks make one together.

    Where layers change stage, their experts stay with ranks of the same number: :meth:`state_of` and :meth:`follow`.

    Args:
        shared: of this rank's stage.
        section: ``"moe"``; None: experts stay where they are.
        stages: what the stages of a pipeline tell each other; None for one stage.
        group: the ranks that hold the same stages.
        device: that they communicate from.
        states: finds what belongs to a parameter (:func:`paceline.moe.moving.states_of` the engine).
        is_last_backward: whether the backward that runs now is the last of its step on this stage.
        decided: gets the decisions about experts.
        settle: see :class:`Controller`.
        beside: says what can move beside steps; None: nothing. Collective.
        half_way: holds moves, which must not end in the middle.

    Attributes:
        rebalancer: moves the experts of this stage, if it has any; None: experts stay.
        controller: plans anew after some steps, together with the other stages; None: experts stay.

    Raises:
        ValueError: the section is there, and every rank has all experts of its stage.
    """

    def __init__(
        self,
        shared: SharedExperts,
        section: MoeChoice | None,
        *,
        control: ControlPlane,
        stages: Stages | None,
        group: Callable[[], ProcessGroup | None],
        device: torch.device,
        states: Callable[[], States],
        is_last_backward: Callable[[], bool],
        decided: DecisionLog,
        settle: Callable[[bool], None] = lambda switches: None,
        beside: Callable[[], BesideSteps | None] = lambda: None,
        half_way: Guard = nullcontext,
    ) -> None:
        self.layers, self._control = shared.layers, control
        self.rebalancer: Rebalancer | None = None
        self.controller: Controller | None = None
        if section is not None and shared.groups.size == 1:
            raise ValueError(
                'paceline.moe is there, and every rank has all experts of its stage: write "expert_parallel": '
                '{"enabled": true, "autoep_size": …}, or leave "moe" out of "paceline".'
            )
        self._begin: Callable[[HFExpertLayer, str], None] = lambda layer, name: layer.begin(
            name,
            shared.groups.sharing,
            num_replicas=section.replicas if section else 0,
            splitting=section.splitting if section else EVEN,
            is_last_backward=is_last_backward,
        )
        for name, layer in self.layers.items():
            self._begin(layer, name)
        if section is not None:
            layers = list(self.layers.values())
            parts = (layers, states(), group(), device, section, decided, stages, settle, beside(), half_way)
            self.rebalancer, self.controller = expert_controller(*parts)

    def after_step(self) -> None:
        """Plan anew if it is time, and bring new values to copies. Collective, after every step of the optimizer."""
        if self.controller is not None:
            self.controller.after_step()
            self.fetch()

    def after_late_step(self) -> None:
        """Plan anew if it is time. Collective, after every step without a flush, whose updates call :meth:`renew`."""
        if self.controller is not None:
            before = [layer.placement for layer in self.layers.values()]
            self.controller.after_step()
            if any(layer.placement is not old for layer, old in zip(self.layers.values(), before, strict=True)):
                self.fetch()

    @property
    def follow_load(self) -> bool:
        """Whether this rank takes part in moving experts by the load."""
        return self.controller is not None

    def uneven_s(self) -> Mapping[str, Uneven] | None:
        """Seconds of a step that layers of this stage take longer than if their experts were evenly busy, by name.

        None while that is not known, and will be. Nothing of experts that stay.
        """
        return {} if self.rebalancer is None else self.rebalancer.uneven_s()

    def write_loads(self, file: Path) -> None:
        """Append loads to a file, unless the section names one."""
        if self.rebalancer is not None and self.rebalancer.loads.file is None:
            self.rebalancer.loads.file = file

    def place(self, placements: Mapping[str, Placement]) -> dict[str, float]:
        """Move experts so that the named layers have these placements. Between two steps, on all ranks.

        Returns:
            ``moved`` experts of this stage, ``num_bytes`` that the busiest rank sends or receives, of these
            ``paused_bytes`` while training stood still, for ``seconds``; ``transfer_s`` of the slowest rank is that
            exchange.

        Raises:
            ValueError: there is no such layer, or it cannot have such a placement; nothing has moved then.
        """
        here = self._checked(placements)
        if self.rebalancer is None:
            return {"moved": 0, "num_bytes": 0, "paused_bytes": 0, "transfer_s": 0.0, "seconds": 0.0}
        return self.rebalancer.place(here)

    def prepare(self, placements: Mapping[str, Placement]) -> bool:
        """Send values that :meth:`place` is to move later beside the steps until then. Between two steps, on all ranks.

        Returns:
            Whether that was begun; there must be enough of it.

        Raises:
            ValueError: as from :meth:`place`.
        """
        here = self._checked(placements)
        return self.rebalancer is not None and self.rebalancer.prepare(self.rebalancer.numbered(here))

    def is_prepared(self) -> bool:
        """Whether all that :meth:`prepare` sends has arrived on all ranks. Collective."""
        return self.rebalancer is None or self.rebalancer.is_prepared()

    def close(self) -> None:
        """End what is on its way. The ranks need not call it together."""
        if self.rebalancer is not None:
            self.rebalancer.close()

    def _checked(self, placements: Mapping[str, Placement]) -> dict[str, Placement]:
        """Those of layers that are here; raises ValueError on all ranks where one cannot be."""
        movable = {} if self.rebalancer is None else self.layers
        with expecting_all("placing experts", self._control.rank), self._control.together("placing experts"):
            for name in placements.keys() & movable.keys():
                movable[name].check(placements[name])
        told = self._control.gather(({name: placements.get(name) for name in movable}, set(placements)))
        known = sorted({name for layers, _ in told for name in layers})
        if unknown := sorted({name for _, named in told for name in named} - set(known)):
            raise ValueError(
                f"there is no layer {unknown[0]!r} whose experts can move: name one of {known}; they can where the "
                'JSON has "expert_parallel" and "paceline": {"moe": {}}.'
            )
        check_alike([layers for layers, _ in told])
        return {name: placement for name, placement in placements.items() if name in movable}

    # -- layers that move between stages -------------------------------------------------------------------------

    def state_of(self, prefixes: Sequence[str]) -> dict[str, LayerState]:
        """Placements and counts of the layers whose names begin with one of ``prefixes``."""
        return {name: layer.leave() for name, layer in self.layers.items() if name.startswith(tuple(prefixes))}

    def leave(self, prefixes: Sequence[str]) -> Callable[[Gather], None]:
        """:meth:`follow`, with the :meth:`state_of` of now."""
        return partial(self.follow, self.state_of(prefixes))

    def follow(self, left: Mapping[str, LayerState], gather: Gather) -> None:
        """Begin the layers that have come, with their experts where they lay; :meth:`fetch` brings values to copies.

        Args:
            left: of the layers that have left this rank (:meth:`state_of`, before).
            gather: over the stages of this rank's pipeline, which call this together.
        """
        come = {name: state for told in gather(dict(left)) for name, state in told.items() if name in self.layers}
        for name, state in come.items():
            self._begin(self.layers[name], name)
            self.layers[name].arrive(state)
        if self.rebalancer is not None:
            self.rebalancer.follow(list(self.layers.values()))

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def placements(self) -> Mapping[str, object]:
        """Experts on each rank by the layer's name, for a checkpoint; nothing where they stay."""
        return {} if self.rebalancer is None else self.rebalancer.placements()

    def take(self, saved: Sequence[Mapping[str, object]]) -> None:
        """Lay experts as they were in the run that was saved, if they lay on as many ranks: before all else is read."""
        if self.rebalancer is None:
            return
        merged = {name: held for placements in saved for name, held in placements.items()}
        for name, layer in self.layers.items():
            if name in merged and Placement.from_json(merged[name]).num_devices == layer.size:
                layer.take_on(layer.from_saved(merged[name]))

    def fetch(self) -> None:
        """Bring new values to the copies of experts."""
        for layer in self.layers.values():
            layer.fetch()

    def renew(self) -> None:
        """Bring new values to the copies of experts at once: backwards that come next use them."""
        self.fetch()
        for layer in self.layers.values():
            if layer.copying is not None:
                layer.copying.settle()

    def resume(self, step: int) -> None:
        """Count from ``step``, where a run goes on."""
        if self.rebalancer is not None:
            self.rebalancer.loads.forget(step)
        if self.controller is not None:
            self.controller.go_on(step)
