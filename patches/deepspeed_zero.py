"""``deepspeed/runtime/zero/stage_1_and_2.py``: optimizer states that are linked before they are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.patches.registry import BY_REPAIR, Patch, Use

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def lazy_init_hp_params_optimizer_state(self: DeepSpeedZeroOptimizer) -> None:
    """``DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state``, for more than one parameter group.

    The inner optimizer steps one group at a time, and this is called after each. At the first call only the first
    group has states: linking all groups then, and never again, leaves the others with none, and
    ``safe_get_full_optimizer_state`` raises for their parameters. So a group is linked once its states are there.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state as link

    if not self._hp_optimizer_states_linked:
        # get, for the optimizer's mapping makes an entry for what it does not have
        states = [self.optimizer.state.get(partition) for partition in self.single_partition_of_fp32_groups]
        for group, partition, state in zip(
            self.bit16_groups, self.single_partition_of_fp32_groups, states, strict=True
        ):
            if state:
                link(group, partition, {partition: state})
        self._hp_optimizer_states_linked = all(states)


def link_all_hp_params(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``DeepSpeedZeroOptimizer._link_all_hp_params``, after which optimizer states are linked anew.

    Loading a checkpoint makes new links from parameters to their fp32 partitions, without states, while the mark
    that states are linked stays.
    """

    def _link_all_hp_params(self: DeepSpeedZeroOptimizer) -> None:
        original(self)
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()

    return _link_all_hp_params


_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"

LINK_EACH_GROUP = Patch(
    target=f"{_ZERO}._lazy_init_hp_params_optimizer_state",
    make=Use(lazy_init_hp_params_optimizer_state),
    requires="deepspeed>=0.19.8,<0.20",
    reason="safe_get_full_optimizer_state raises for all parameter groups but the first under ZeRO-1 and 2",
    removable_when="DeepSpeed links a group's optimizer states once they are there",
    watches=f"{_ZERO}._lazy_init_hp_params_optimizer_state",
    fingerprint="45e666d78112",
    applied_by=BY_REPAIR,
)

LINK_AFTER_LOAD = Patch(
    target=f"{_ZERO}._link_all_hp_params",
    make=link_all_hp_params,
    requires="deepspeed>=0.19.8,<0.20",
    reason="safe_get_full_optimizer_state raises after a checkpoint was loaded under ZeRO-1 and 2",
    removable_when="DeepSpeed links optimizer states when it links parameters",
    watches=f"{_ZERO}._link_all_hp_params",
    fingerprint="e91c2f7e8f29",
    applied_by=BY_REPAIR,
)

PATCHES = (LINK_EACH_GROUP, LINK_AFTER_LOAD)
