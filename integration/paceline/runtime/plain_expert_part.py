"""Experts that follow the load in training without a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ..comm.control import ControlPlane
from ..config import exclusion
from ..config.expert_choice import MoeChoice
from ..config.section import SECTION, value_at
from ..moe.auto_ep import RebalancedAutoEPLayer
from ..moe.deepspeed_moe import RebalancedMOELayer
from ..moe.experts_ahead import BesideSteps
from ..moe.late_states import LateStates
from ..moe.layer import ExpertLayer
from ..moe.moving import states_of
from ..moe.rebalancer import Rebalancer
from ..moe.resharding import PLACEMENTS, SIZES, Spread, load_states
from ..planning.experts import Placement
from ..planning.tuning import DecisionLog
from .controller import Controller
from .expert_part import check_alike, expert_controller

logger = logging.getLogger("paceline")


class PlainExperts:
    """Experts of an engine without a pipeline, that follow the load.

    Its checkpoints are DeepSpeed's own, with experts by their number in the model, and are read by runs of another
    expert-parallel size too. A run resumes with the placement that it had, if the size is the same, otherwise with
    experts in order.

    Args:
        engine: DeepSpeed's, with its optimizer.
        decided: gets the decisions.
        control: over the job.

    Attributes:
        layers: by the name of the module, those whose experts can move.
        rebalancer: what moves them; None if every rank has all experts.

    Raises:
        ValueError: on every rank: experts cannot move with this config or in this model.
    """

    def __init__(
        self, engine: DeepSpeedEngine, section: MoeChoice, decided: DecisionLog, control: ControlPlane
    ) -> None:
        if engine.sequence_parallel_size > 1:
            size = f"the sequence-parallel size is {engine.sequence_parallel_size}"
            raise ValueError(exclusion("moe", "sequence parallelism").message("paceline.moe is there", size))
        self._engine, self._control = engine, control
        self.rebalancer: Rebalancer | None = None
        self.controller: Controller | None = None
        self.layers = take_over(engine.module, section, self._is_last_backward)
        self._late: LateStates | None = None
        if self.layers:
            layers = list(self.layers.values())
            states, group, device, beside = states_of(engine), engine.data_parallel_group, layers[0].device, None
            if device.type == "cpu" and engine.optimizer is not None:  # on GPUs it was never tried
                parts = (part for layer in layers for slot in range(layer.num_slots) for part in layer.parts(slot))
                self._late = LateStates(engine.optimizer, {part.parameter: None for part in parts})
                states = self._late.settled(states)
                expect, settle = self._late.expect, self._late.settle
                beside = BesideSteps.of_ranks(control.gather, group, device, expect=expect, settle=settle)
            self.rebalancer, self.controller = expert_controller(
                *(layers, states, group, device, section, decided), beside=beside
            )
        elif dist.get_rank() == 0:
            logger.warning(
                "paceline.moe has nothing to do: the expert-parallel size is 1, so that every rank has all experts."
            )

    def _is_last_backward(self) -> bool:
        """Whether the optimizer's step comes after the backward that runs now, with no other in between.

        True where that is not known, or where gradients are reduced after each backward (ZeRO 2): to send a copy's
        gradient too often is right, only not free.
        """
        engine = self._engine
        known = engine.managed_gradient_accumulation() and not engine.inside_no_sync_ctxt
        reduces_each = engine.zero_optimization_partition_gradients()
        return bool(not known or reduces_each or engine.is_gradient_accumulation_boundary())

    def settle(self) -> None:
        """Wait for masters and states of experts that have moved; before each step of the optimizer."""
        if self._late is not None:
            self._late.settle()

    def close(self) -> None:
        """End what is on its way. The ranks need not call it together."""
        if self.rebalancer is not None:
            self.rebalancer.close()

    def after_step(self) -> None:
        """After a step of the optimizer, taken or skipped, experts may move. Collective."""
        if self.controller is not None:
            self.forget_gradients()  # they are used up, or of a step that was skipped
            self.controller.after_step()
            for layer in self.layers.values():
                layer.fetch()

    def forget_gradients(self) -> None:
        """Forget what copies have learned."""
        for layer in self.layers.values():
            if layer.replicas is not None:
                layer.replicas.forget()

    def place(self, placements: Mapping[str, Placement]) -> dict[str, float]:
        """Move experts so that the named layers have these placements. Between two steps, on all ranks.

        Returns:
            ``moved`` experts, ``num_bytes`` that the busiest rank sends or receives, of these ``paused_bytes`` while
            training stood still, for ``seconds``; ``transfer_s`` of the slowest rank is that exchange.

        Raises:
            ValueError: there is no such layer, or it cannot have such a placement; nothing has moved then.
        """
        rebalancer = self._there()
        self._numbered(placements)
        return rebalancer.place(placements)

    def prepare(self, placements: Mapping[str, Placement]) -> bool:
        """Send values that :meth:`place` is to move later beside the steps until then. Between two steps, on all ranks.

        Returns:
            Whether that was begun; there must be enough of it.

        Raises:
            ValueError: as from :meth:`place`.
        """
        return self._there().prepare(self._numbered(placements))

    def is_prepared(self) -> bool:
        """Whether all that :meth:`prepare` sends has arrived on all ranks. Collective."""
        return self._there().is_prepared()

    def _numbered(self, placements: Mapping[str, Placement]) -> dict[int, Placement]:
        """By the numbers of layers; raises ValueError on all ranks where one cannot be, or they ask for different."""
        with self._control.together("placing experts"):
            found = self._there().numbered(placements)
        check_alike(self._control.gather({name: placements.get(name) for name in self.layers}))
        return found

    def _there(self) -> Rebalancer:
        if self.rebalancer is None:
            raise ValueError("experts cannot be placed: the expert-parallel size is 1, every rank has them all.")
        return self.rebalancer

    # -- files -----------------------------------------------------------------------------------------------------

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """DeepSpeed's files know experts in order only: inside, they are, without copies. Collective.

        If something raises inside they stay so: moving them takes all ranks, and others may be waiting in DeepSpeed for
        the one that failed.
        """
        if self.rebalancer is None:
            yield
            return
        with self.rebalancer.in_order():
            self.settle()
            yield

    def saved_with(self, client_state: Mapping[str, object] | None) -> dict[str, object]:
        """The client state of a checkpoint, with the placements in it.

        Raises:
            KeyError: it has "paceline" already.
        """
        state = dict(client_state or {})
        if SECTION in state:
            raise KeyError(f"client_state has {SECTION!r}, which is where placements are written: rename it.")
        placements = {} if self.rebalancer is None else self.rebalancer.placements()
        state[SECTION] = {PLACEMENTS: placements, SIZES: dict(Spread.of(self._engine).sizes)}
        return state

    def restore(self, client_state: Mapping[str, object] | None) -> None:
        """Take the placements of the run that was saved out of its client state, if they fit."""
        saved = value_at(client_state or {}, f"{SECTION}.{PLACEMENTS}") or {}
        if isinstance(client_state, dict):
            client_state.pop(SECTION, None)
        if self.rebalancer is not None and (placements := _fitting(saved, self.layers)):
            self.rebalancer.place(placements)
        if self.rebalancer is not None and self.controller is not None:
            self.rebalancer.loads.forget(self._engine.global_steps)
            self.controller.go_on(self._engine.global_steps)

    def to_reshard(self, load_dir: str, tag: str | None) -> tuple[Path, Spread] | None:
        """The folder of the checkpoint and how experts were spread, if it was otherwise.

        DeepSpeed would not notice: ZeRO's partitions may have the same lengths, with other experts in them.
        """
        engine, latest = self._engine, Path(load_dir, "latest")
        if engine.optimizer is None or engine.load_universal_checkpoint() or (tag is None and not latest.is_file()):
            return None
        checkpoint = Path(load_dir, latest.read_text().strip() if tag is None else str(tag))
        file = Path(engine._get_ckpt_name(load_dir, checkpoint.name))
        if not file.is_file():
            return None  # DeepSpeed says so
        state = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
        now = Spread.of(engine)
        saved = Spread.saved(state, now)
        return None if saved == now else (checkpoint, saved)

    def load_states(self, checkpoint: tuple[Path, Spread]) -> None:
        """Load the optimizer's states of a checkpoint that :meth:`to_reshard` has found.

        Raises:
            ValueError: they cannot be spread anew.
        """
        load_states(self._engine, *checkpoint)


def take_over(model: nn.Module, section: MoeChoice, is_last_backward: Callable[[], bool]) -> dict[str, ExpertLayer]:
    """Make the expert layers of ``model`` ours, in place, after DeepSpeed has given them their groups.

    Args:
        is_last_backward: see :class:`~paceline.moe.replica_sync.Replicas`.

    Returns:
        those whose experts are on more than one rank, by their names.

    Raises:
        ValueError: there is no expert layer, or one that cannot be taken over.
    """
    found = {
        name: (module.deepspeed_moe if isinstance(module, MoE) else module)
        for name, module in model.named_modules()
        if isinstance(module, (MoE, AutoEPMoELayer))
    }
    if not found:
        raise ValueError(
            'paceline.moe is there, and the model has no expert layer: write "expert_parallel": {"enabled": true, …} '
            'for a Hugging Face MoE model, or leave "moe" out of "paceline".'
        )
    ours = {AutoEPMoELayer: RebalancedAutoEPLayer, MOELayer: RebalancedMOELayer}
    layers: dict[str, ExpertLayer] = {}
    for name, layer in found.items():
        if layer.ep_size == 1:
            continue
        if type(layer) not in ours:
            raise ValueError(
                f"{name} is a {type(layer).__name__}, a kind of expert layer that is not known here: leave "
                '"moe" out of "paceline".'
            )
        layer.__class__ = ours[type(layer)]
        layer.rebalance(
            name,
            num_replicas=section.replicas,
            splitting=section.splitting,
            is_last_backward=is_last_backward,
        )
        layers[name] = layer
    return layers


def _fitting(saved: Mapping[str, object], layers: Mapping[str, ExpertLayer]) -> dict[str, Placement]:
    """The placements that were saved, if all of them can be those of ``layers``."""
    if saved.keys() != layers.keys():
        return {}
    placements = {}
    try:
        for name, held in saved.items():
            placements[name] = layers[name].from_saved(held)
    except ValueError:
        return {}
    return placements
