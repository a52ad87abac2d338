"""Training without a pipeline, with experts that follow the load: DeepSpeed's engine and the rebalancer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from torch import nn

from ..config import RunPlan, exclusion
from ..config.expert_choice import MoeChoice
from ..config.section import SECTION
from ..moe.auto_ep import RebalancedAutoEPLayer
from ..moe.deepspeed_moe import RebalancedMOELayer
from ..moe.layer import ExpertLayer
from ..moe.moving import states_of
from ..moe.rebalancer import Rebalancer
from ..moe.resharding import PLACEMENTS, SIZES, Spread, load_states
from ..planning.experts import Placement
from ..planning.tuning import DecisionLog
from .controller import Controller
from .expert_part import expert_controller
from .plain_engine import PlainEngine

logger = logging.getLogger("paceline")


class ExpertEngine(PlainEngine):
    """A :class:`PlainEngine` for a config with ``"paceline": {"moe": …}``.

    Its checkpoints are DeepSpeed's own, with experts by their number in the model, and are read by runs of another
    expert-parallel size too. A run resumes with the placement that it had, if the size is the same, otherwise with
    experts in order.

    Attributes:
        expert_layers: by the name of the module, those whose experts can move.
        rebalancer: what moves them; None if every rank has all experts.

    Raises:
        ValueError: at the start, on every rank: experts cannot move with this config or in this model.
    """

    expert_layers: Mapping[str, ExpertLayer] = {}

    def __init__(self, *args: Any, plan: RunPlan, **kwargs: Any) -> None:
        super().__init__(*args, plan=plan, **kwargs)
        if self.sequence_parallel_size > 1:
            size = f"the sequence-parallel size is {self.sequence_parallel_size}"
            raise ValueError(exclusion("moe", "sequence parallelism").message("paceline.moe is there", size))
        section = plan.moe
        assert section is not None, "chosen by the section"
        self.rebalancer: Rebalancer | None = None
        self.controller: Controller | None = None
        self.decisions = DecisionLog()
        self.expert_layers = take_over(self.module, section, self._is_last_backward)
        if self.expert_layers:
            layers = list(self.expert_layers.values())
            self.rebalancer, self.controller = expert_controller(
                *(layers, states_of(self), self.data_parallel_group, section, self.decisions)
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
        known = self.managed_gradient_accumulation() and not self.inside_no_sync_ctxt
        reduces_each = self.zero_optimization_partition_gradients()
        return bool(not known or reduces_each or self.is_gradient_accumulation_boundary())

    def step(self, lr_kwargs: Any = None) -> None:
        """As DeepSpeed's; after a step of the optimizer, taken or skipped, experts may move."""
        steps = self.global_steps
        super().step(lr_kwargs)
        if self.controller is not None and self.global_steps > steps:
            self.controller.after_step()
            for layer in self.expert_layers.values():
                layer.fetch()

    def zero_grad(self) -> None:
        """As DeepSpeed's; what copies have learned is forgotten too."""
        super().zero_grad()
        for layer in self.expert_layers.values():
            if layer.replicas is not None:
                layer.replicas.forget()

    def place_experts(self, placements: Mapping[str, Placement]) -> dict[str, Any]:
        """Move experts so that the named layers have these placements. Between two steps, on all ranks.

        Returns:
            ``moved`` experts, ``num_bytes`` that the busiest rank sent or received, ``seconds``.

        Raises:
            ValueError: there is no such layer, or it cannot have such a placement; nothing has moved then.
        """
        if self.rebalancer is None:
            raise ValueError("experts cannot be placed: the expert-parallel size is 1, every rank has them all.")
        return self.rebalancer.place(placements)

    # -- files -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """DeepSpeed's files know experts in order only: inside, they are, without copies. Collective.

        If something raises inside they stay so: moving them takes all ranks, and others may be waiting in DeepSpeed for
        the one that failed.
        """
        if self.rebalancer is None:
            yield
            return
        with self.rebalancer.in_order():
            yield

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's, with the placements in the client state.

        Raises:
            KeyError: the client state has "paceline" already.
        """
        state = dict(client_state or {})
        if SECTION in state:
            raise KeyError(f"client_state has {SECTION!r}, which is where placements are written: rename it.")
        placements = {} if self.rebalancer is None else self.rebalancer.placements()
        state[SECTION] = {PLACEMENTS: placements, SIZES: dict(Spread.of(self).sizes)}
        with self._in_order():
            saved = super().save_checkpoint(
                save_dir,
                tag=tag,
                client_state=state,
                save_latest=save_latest,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
            if self.checkpoint_engine.is_decoupled():  # it reads on, and experts are about to move back
                self._commit_decoupled_checkpoint()
            return bool(saved)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Any, Any]:
        """As DeepSpeed's, then with the placements of the run that was saved, if they fit.

        A checkpoint that was saved with experts on another number of ranks is spread anew.

        Raises:
            ValueError: its optimizer's states cannot be spread anew.
        """
        checkpoint = self._to_reshard(load_dir, tag) if load_optimizer_states and not load_module_only else None
        with self._in_order():
            path, state = super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states and checkpoint is None,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )
            if checkpoint is not None:
                load_states(self, *checkpoint)
        saved = (state or {}).pop(SECTION, {}).get(PLACEMENTS, {})
        if self.rebalancer is not None and (placements := _fitting(saved, self.expert_layers)):
            self.rebalancer.place(placements)
        if self.rebalancer is not None and self.controller is not None:
            self.rebalancer.loads.forget(self.global_steps)
            self.controller.go_on(self.global_steps)
        return path, state

    def _to_reshard(self, load_dir: str, tag: str | None) -> tuple[Path, Spread] | None:
        """The folder of the checkpoint and how experts were spread, if it was otherwise.

        DeepSpeed would not notice: ZeRO's partitions may have the same lengths, with other experts in them.
        """
        latest = Path(load_dir, "latest")
        if self.optimizer is None or self.load_universal_checkpoint() or (tag is None and not latest.is_file()):
            return None
        checkpoint = Path(load_dir, latest.read_text().strip() if tag is None else str(tag))
        file = Path(self._get_ckpt_name(load_dir, checkpoint.name))
        if not file.is_file():
            return None  # DeepSpeed says so
        state = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
        now = Spread.of(self)
        saved = Spread.saved(state, now)
        return None if saved == now else (checkpoint, saved)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As DeepSpeed's."""
        if self._has_autoep_layers():  # written with the help of the layers' placement descriptor
            return bool(super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters))
        with self._in_order():
            return bool(super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters))


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


def _fitting(saved: Mapping[str, Any], layers: Mapping[str, ExpertLayer]) -> dict[str, Placement]:
    """The placements that were saved, if all of them can be those of ``layers``."""
    if saved.keys() != layers.keys():
        return {}
    placements = {}
    try:
        for name, held in saved.items():
            layer = layers[name]
            width = layer.num_slots + layer.num_replicas  # of copies as many as there is room for now
            devices = tuple(tuple(experts[:width]) for experts in held)
            placements[name] = Placement(devices, (layer.num_slots,) * len(devices))
            layer.check(placements[name])
    except ValueError:
        return {}
    return placements
