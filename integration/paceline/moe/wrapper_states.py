"""Find what belongs to a parameter in DeepSpeed's optimizer wrappers and in our pipelines' optimizer.

A wrapper replaces the parameters by masters: one each, or all of a group in a flat tensor that is cut at any element
over the ranks which hold the same parameters. States are keyed by the master. Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..optim.owned_rows import Owned
from ..optim.sharded import ShardedOptimizer
from ..state.named import MASTER, VALUE

LEAVE_OUT = 'or leave "moe" out of "paceline"'


class StatePart(NamedTuple):
    """Elements that this rank holds of a parameter or of what belongs to it.

    Args:
        kind: "value", "master", or a state of the optimizer by its name.
        start: first of these elements in the flattened parameter.
        tensor: the elements ``[n]``; writing to it changes what the wrapper has.
    """

    kind: str
    start: int
    tensor: Tensor


States = Callable[[nn.Parameter], Sequence[StatePart]]
"""Everything per element that this rank holds of a parameter, as it is at the moment."""


def states_of(engine: Any) -> States:
    """Find what belongs to the parameters of ``engine``, a ``DeepSpeedEngine`` or one of ours.

    Returns:
        for a parameter its value, which is whole on every rank, its master if it has one apart, and the optimizer's
        states once there are any. It raises ValueError for an optimizer with a state that is not per element. What is
        alike for all elements, such as a count of steps, is left out.

    Raises:
        ValueError: the parts of a parameter cannot be exchanged in place: ZeRO 3, optimizer offload, or a wrapper that
            is not known here.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    if engine.zero_optimization_stage() >= 3:
        raise ValueError(
            "zero_optimization.stage is 3, which takes experts apart while they are not used: experts move with stages "
            f"0 to 2; set one of these, {LEAVE_OUT}."
        )
    if getattr(optimizer, "cpu_offload", False):
        raise ValueError(
            "zero_optimization.offload_optimizer keeps masters in host memory, from where experts do not move: leave "
            f"it out, {LEAVE_OUT}."
        )
    if optimizer is None:
        return lambda parameter: [_value(parameter)]
    if isinstance(optimizer, torch.optim.Optimizer):
        return lambda parameter: [_value(parameter), *_states(optimizer, parameter)]
    if isinstance(optimizer, ShardedOptimizer):
        return _ShardedStates(optimizer)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return _of_partitions(optimizer.single_partition_of_fp32_groups, optimizer)
    if isinstance(optimizer, BF16_Optimizer):
        return _of_partitions(optimizer.fp32_groups_flat_partition, optimizer)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return _of_masters(optimizer)
    if isinstance(optimizer, FP16_Optimizer):
        return _of_flat_masters(optimizer)
    raise ValueError(
        f"experts do not move under {type(optimizer).__name__}: let DeepSpeed make the optimizer of the JSON's "
        f'"optimizer", {LEAVE_OUT}.'
    )


def _of_partitions(partitions: Sequence[Tensor], wrapper: Any) -> States:
    """Each group of parameters is one flat master, of which a rank has one run of elements (ZeRO 1 and 2).

    ``_hp_mapping`` of a parameter says which of them are its own. DeepSpeed's links from there to the states are not
    used: after the first step only those of the first group are there.
    """

    def states(parameter: nn.Parameter) -> list[StatePart]:
        found = [_value(parameter)]
        fragment = getattr(parameter, "_hp_mapping", None)
        if fragment is not None:
            start, numel = fragment.lp_fragment_address.start, fragment.lp_fragment_address.numel
            partition = partitions[fragment.param_group_index]
            at = fragment.hp_fragment_address.start
            found += _run_of(wrapper.optimizer, partition, at, numel, start)
        return found

    return states


def _of_flat_masters(wrapper: Any) -> States:
    """Find states in flat masters of whole groups, which every rank has."""
    places: dict[nn.Parameter, tuple[Tensor, int]] = {}
    for parameters, flat in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
        starts = accumulate((p.numel() for p in parameters[:-1]), initial=0)
        places.update((p, (flat, at)) for p, at in zip(parameters, starts, strict=True))

    def states(parameter: nn.Parameter) -> list[StatePart]:
        found = [_value(parameter)]
        if parameter in places:
            flat, at = places[parameter]
            found += _run_of(wrapper.optimizer, flat, at, parameter.numel(), 0)
        return found

    return states


def _run_of(optimizer: Any, flat: Tensor, at: int, numel: int, start: int) -> Iterator[StatePart]:
    yield StatePart(MASTER, start, flat.detach()[at : at + numel])
    for kind, _, tensor in _states(optimizer, flat):
        yield StatePart(kind, start, tensor[at : at + numel])


def _of_masters(wrapper: Any) -> States:
    """Each parameter has a master of its own."""
    masters = {
        parameter: master
        for parameters, group in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for parameter, master in zip(parameters, group, strict=True)
    }

    def states(parameter: nn.Parameter) -> list[StatePart]:
        found = [_value(parameter)]
        if parameter in masters:
            master = masters[parameter]
            found += [StatePart(MASTER, 0, _flat(master)), *_states(wrapper.optimizer, master)]
        return found

    return states


class _ShardedStates:
    """States of a :class:`~paceline.optim.sharded.ShardedOptimizer`, which has masters of whole rows."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._known: list[Owned] | None = None
        self._owned: dict[nn.Parameter, list[Owned]] = {}

    def __call__(self, parameter: nn.Parameter) -> list[StatePart]:
        found = [_value(parameter)]
        for owned in self._owned_of(parameter):
            start = owned.start * (parameter[0].numel() if parameter.dim() else 1)
            if self._optimizer.rows.has_own_master(owned):
                found.append(StatePart(MASTER, start, _flat(owned.master)))
            states = _states(self._optimizer, owned.master)
            found += [StatePart(kind, start, tensor) for kind, _, tensor in states]
        return found

    def _owned_of(self, parameter: nn.Parameter) -> list[Owned]:
        if self._known is not self._optimizer.owned:  # layers have changed stage
            self._known, self._owned = self._optimizer.owned, {}
            for owned in self._known:
                self._owned.setdefault(owned.parameter, []).append(owned)
        return self._owned.get(parameter, [])


def _value(parameter: nn.Parameter) -> StatePart:
    return StatePart(VALUE, 0, _flat(parameter))


def _states(optimizer: Any, master: Tensor) -> Iterator[StatePart]:
    """The states of a master per element; for a flat one from its own first element."""
    for kind, state in optimizer.state.get(master, {}).items():
        if not torch.is_tensor(state) or state.numel() == 1 != master.numel():
            continue
        if state.shape == master.shape:
            yield StatePart(kind, 0, _flat(state))
        elif state.dim():
            inner = getattr(optimizer, "optimizer", optimizer)
            raise ValueError(
                f"{type(inner).__name__} keeps {kind} of shape {list(state.shape)} for a parameter of shape "
                f"{list(master.shape)}: experts move with states per element only; choose an elementwise optimizer "
                f"such as AdamW, {LEAVE_OUT}."
            )


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"an expert's weight of shape {list(tensor.shape)} has strides {list(tensor.stride())}: one that is not "
            f"contiguous cannot move; make it so before the engine is built, {LEAVE_OUT}."
        )
    return tensor.detach().view(-1)
