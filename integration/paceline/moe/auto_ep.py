"""DeepSpeed's AutoEP layer with experts that can lie anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from deepspeed.checkpoint.autoep_affine import autoep_placement_to_affine_map, make_autoep_placement_descriptor
from deepspeed.checkpoint.constants import (
    AFFINE_MAP,
    AUTOEP_EXPERT_PLACEMENT,
    AUTOEP_PARAM_LOCAL_EXPERTS,
    AUTOEP_PARAM_LOGICAL_SHAPE,
    DS_AUTOEP_UC_META,
)
from deepspeed.module_inject.auto_ep_comm import COMM_BACKEND
from deepspeed.module_inject.auto_ep_layer import (
    AutoEPMoELayer,
    apply_scores_before_experts_if_enabled,
    combine_from_routed,
    permute_by_local_expert,
    unpermute_by_local_expert,
)
from deepspeed.moe.ep_kernels import TOKEN_GROUP_ALIGN_SIZE_M
from torch import Tensor
from torch.func import functional_call

from ..planning.experts import Placement
from .dispatch import Exchange, take_rows
from .layer import ExpertLayer, SlotPart, SlotWeights
from .replica_sync import Replicas

WEIGHTS = ("w1", "w2", "w3")


class RebalancedAutoEPLayer(ExpertLayer, AutoEPMoELayer):
    """An ``AutoEPMoELayer`` that sends tokens through a map from experts to slots.

    As long as :meth:`set_up` was not called it is DeepSpeed's own.
    """

    is_rebalanced = False

    def rebalance(self, name: str, *, num_replicas: int, splitting: str, is_last_backward: Callable[[], bool]) -> None:
        """Begin with the contiguous placement, when DeepSpeed has given the layer its group. Collective over that.

        Raises:
            ValueError: the layer sends its tokens in a way that knows no map.
        """
        if self.comm_backend != COMM_BACKEND:
            raise ValueError(
                f'{name} sends tokens by comm_backend "{self.comm_backend}", which knows only contiguous experts: '
                f'write "comm_backend": "{COMM_BACKEND}" in expert_parallel, or leave "moe" out of "paceline".'
            )
        if self.folding_group_handles is not None and self.folding_group_handles.spec.tp_size > 1:
            raise ValueError(
                f"{name} is folded over {self.folding_group_handles.spec.tp_size} tensor-parallel ranks, which know "
                'only contiguous experts: set tensor_parallel.autotp_size to 1, or leave "moe" out of "paceline".'
            )
        if self.async_split_plan or self.combine_impl == "fused_weighted_sum":
            raise ValueError(
                f"{name} is set to async_split_plan or combine_impl fused_weighted_sum, which know only contiguous "
                'experts: leave these keys out of expert_parallel, or leave "moe" out of "paceline".'
            )
        group = self.ep_group if self.ep_size > 1 else None
        self.set_up(name, self.num_experts, group, num_replicas=num_replicas, splitting=splitting)
        if num_replicas and group is not None:
            weights = [getattr(self.experts, weight) for weight in WEIGHTS]
            self.replicas = Replicas(weights, group, num_replicas, is_last_backward)
            self.replicas.take_on(self.placement)
        self.is_rebalanced = True

    def parts(self, slot: int) -> list[SlotPart]:
        found = []
        for name in WEIGHTS:
            weight = getattr(self.experts, name)
            numel = weight.numel() // self.num_slots
            found.append(SlotPart(name, weight, slot * numel, numel))
        return found

    def take_on(self, placement: Placement, loads: Sequence[float] | None = None) -> None:
        super().take_on(placement, loads)
        owned = [list(placement.own_experts(device)) for device in range(placement.num_devices)]
        self.expert_placement_descriptor = make_autoep_placement_descriptor(self.num_experts, owned)
        for name in WEIGHTS:
            meta = getattr(getattr(self.experts, name), DS_AUTOEP_UC_META)
            lowered = autoep_placement_to_affine_map(self.expert_placement_descriptor, meta[AUTOEP_PARAM_LOGICAL_SHAPE])
            meta[AUTOEP_EXPERT_PLACEMENT] = self.expert_placement_descriptor
            meta[AFFINE_MAP] = lowered.to_dict()
            meta[AUTOEP_PARAM_LOCAL_EXPERTS] = owned[self.rank]

    def _forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if not self.is_rebalanced:
            return super()._forward(hidden_states)
        shape = hidden_states.shape
        x = hidden_states.reshape(-1, shape[-1])
        scores, chosen, counts = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
            exchange = self.route(chosen, counts)
        top_scores = scores.reshape(-1)[exchange.order]
        rows = take_rows(x, chosen, exchange)
        rows = apply_scores_before_experts_if_enabled(rows, top_scores, score_apply=self.score_apply)
        rows = self.through_experts(rows, exchange, self._compute)
        output = combine_from_routed(
            rows,
            top_scores=scores,
            token_indices_sorted=exchange.order,
            top_k=self.top_k,
            score_apply=self.score_apply,
            combine_impl=self.combine_impl,
            shape=tuple(shape),
        )
        return self._finalize_output(output, x, hidden_states, shape[-1])

    def _compute(self, rows: Tensor, exchange: Exchange, weights: SlotWeights) -> Tensor:
        """As :meth:`ExpertLayer.through_experts` wants it."""
        rows, places, by_slot, num_rows = permute_by_local_expert(rows, exchange.counts)
        if not weights:
            rows = self.experts(rows, by_slot)
        else:
            own, copies = weights
            edge = self.num_slots
            end = sum(map(_padded, exchange.by_slot[:edge]))
            rows = torch.cat(
                [self._with(own, rows[:end], by_slot[:edge]), self._with(copies, rows[end:], by_slot[edge:])]
            )
        return unpermute_by_local_expert(rows, places, num_rows)

    def _with(self, weights: Sequence[Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        return functional_call(self.experts, dict(zip(WEIGHTS, weights, strict=True)), (rows, counts))


def _padded(num_rows: int) -> int:
    """Rows of an expert with its padding, as ``by_slot`` has them on the device."""
    return -(-max(num_rows, 1) // TOKEN_GROUP_ALIGN_SIZE_M) * TOKEN_GROUP_ALIGN_SIZE_M
