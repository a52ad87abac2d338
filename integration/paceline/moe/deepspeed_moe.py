"""DeepSpeed's own MoE layer (``deepspeed.moe.layer.MoE``) with experts that can lie anywhere.

Its gate gives every expert room for the same number of tokens, and an expert computes all of its room, filled or not.
So neither moving experts nor copies of them make a step faster, and the rebalancer finds nothing to gain; experts move
when they are told to, and checkpoints written with any placement can be read.

Legend: E experts of the model, R ranks of the group, C room of an expert on a rank, M hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.moe.sharded_moe import MOELayer, _AllToAll, _route_slots, _sparse_decode, _sparse_encode
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import Tensor

from ..planning.experts import Placement
from .layer import ExpertLayer, SlotPart


class RebalancedMOELayer(ExpertLayer, MOELayer):
    """The ``MOELayer`` of a ``MoE``. As long as its experts lie in order it computes as DeepSpeed's own.

    Its times in ``wall_clock_breakdown`` are those of the last forward in order.
    """

    time_depends_on_load = False
    _order: Tensor | None = None
    _places: Tensor

    def rebalance(self, name: str, *, num_replicas: int, splitting: str, is_last_backward: Callable[[], bool]) -> None:
        """Begin with the contiguous placement, when DeepSpeed has given the layer its group.

        Args:
            name: of the ``MoE`` in the model.

        Raises:
            ValueError: the layer cannot have copies, or sends its tokens in a way that knows no map.
        """
        if num_replicas:
            raise ValueError(
                f"paceline.moe.replicas is {num_replicas}, and {name} is a deepspeed.moe.layer.MoE: each of its "
                "experts computes its whole capacity however many tokens it gets, so that a copy saves nothing; leave "
                '"replicas" out.'
            )
        if self.use_tutel:
            raise ValueError(
                f"{name} sends its tokens by Tutel, which knows only experts in order: make the layer with "
                'use_tutel=False, or leave "moe" out of "paceline".'
            )
        if bwc_tensor_model_parallel_world_size(groups.mpu) > 1:
            raise ValueError(
                f"{name} is in a tensor-parallel model, whose ranks share its tokens: that is not supported; leave "
                '"moe" out of "paceline".'
            )
        if buffers := [buffer for buffer, _ in self.experts.named_buffers()]:
            raise ValueError(
                f"the experts of {name} have buffers ({buffers[0]}, …), which do not move with them: make them "
                'parameters, or leave "moe" out of "paceline".'
            )
        self.set_up(name, self.num_local_experts * self.ep_size, self.ep_group if self.ep_size > 1 else None)

    def parts(self, slot: int) -> list[SlotPart]:
        expert = self.experts.deepspeed_experts[slot]
        return [SlotPart(name, weight, 0, weight.numel()) for name, weight in expert.named_parameters()]

    def take_on(self, placement: Placement, loads: Sequence[float] | None = None) -> None:
        super().take_on(placement, loads)
        order = [expert for held in placement.devices for expert in held]
        self._order = None
        if order != sorted(order):
            self._order = torch.tensor(order, device=self.device)
            self._places = torch.argsort(self._order)

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Tensor:
        if self._order is None:
            output = super().forward(*inputs, **kwargs)
        else:
            output = self._forward_by(self._order, self._places, *inputs)
        self.count(self.exp_counts.to(torch.int64))  # counted before the gate drops any
        return output

    def _forward_by(self, order: Tensor, places: Tensor, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """As ``MOELayer.forward``, with the rows of the experts in the order of their slots on the way.

        Only ``[E, C, M]`` is reordered: which tokens an expert gets, and in which order a token's gradients add up, is
        as in DeepSpeed's own.
        """
        width = hidden.shape[-1]
        tokens = hidden.reshape(-1, width)
        self.l_aux, capacity, num_experts, chosen, locations, gates, self.exp_counts = self.gate(
            tokens, used_token, True, False
        )
        room = int(capacity)
        slots = _route_slots(chosen, locations, num_experts, room)
        rows = _Reordered.apply(_sparse_encode(tokens, slots, num_experts, room), order, places)
        rows = _AllToAll.apply(self.ep_group, rows)
        rows = self.experts(rows.reshape(self.ep_size, self.num_local_experts, -1, width))
        rows = _AllToAll.apply(self.ep_group, rows.reshape(num_experts, -1, width))
        rows = _Reordered.apply(rows, places, order)
        output = _sparse_decode(rows.view(num_experts * room, width), slots, gates, tokens.shape[0])
        return output.reshape(hidden.shape)


class _Reordered(torch.autograd.Function):
    """``x [E, …]`` in the order ``order [E]``; ``places`` is the inverse, so that backward adds nothing up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None
