"""Max change where DeepSpeed steps flat shards: this rank's segment of each parameter, and the norms of whole layers.

DeepSpeed's optimizers know parameters as stretches of flat buffers, of which a rank has a part. Their own map leads
from a parameter to its segment here; squares of segments add up to those of the layer over the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import exclusion
from .max_change import Changes, Limits, Part
from .step_outcome import StepOutcome
from .zero_partitions import masters_of, num_real

ONE_BY_ONE = ".deepspeed_experts."
"""In the names of experts that are modules of their own, and numbered on each rank from 0."""


class FlatMaxChange:
    """Limits what a step of a DeepSpeed engine without a pipeline changes; ZeRO 0 to 3, in any precision.

    Call :meth:`before` right before the engine takes the step, and :meth:`after` right after it, on all ranks::

        def _take_model_step(self, *args, **kwargs):
            self.max_change.before()
            super()._take_model_step(*args, **kwargs)
            self.max_change.after()

    Masters are held twice during the step. Experts that are stacked in one module are one layer, over all ranks that
    have any of them; experts of ``deepspeed.moe`` are layers each. Collective over the data-parallel ranks.

    Args:
        engine: of DeepSpeed, with its optimizer.
        limits: heads are given by the names of modules in ``engine.module``.

    Raises:
        ValueError: the engine's optimizer is one whose changes cannot be limited from here.
    """

    def __init__(self, engine: Any, limits: Limits) -> None:
        self.limits = limits
        self.report: dict[str, float] | None = None
        """Of the last step: the ``norm`` of all changes as they were made, and ``num_limited``, the layers that would
        have gone farther than their own limit."""
        self._engine, self._group = engine, engine.seq_data_parallel_group
        _check(engine, limits)
        self._masters = masters_of(engine.optimizer)
        self._changes: Changes | None = None
        self._outcome = StepOutcome()
        # Those that are frozen too, since they may be trained later.
        own = sorted({self._layer_of(name, p) for name, p in engine.module.named_parameters()})
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, own, group=self._group)
        self._layers = sorted({layer for layers in found for layer in layers})

    @torch.no_grad()
    def before(self) -> None:
        """The step comes now."""
        self._changes = None if self.limits.is_none else Changes(self.limits, self._layers, self._parts())

    @torch.no_grad()
    def after(self) -> bool:
        """Make what has changed since :meth:`before` as small as the limits say.

        Returns:
            Whether the step holds. One whose change is not finite is taken back, and counts as skipped by the engine;
            moments keep what it gave them.

        Raises:
            FloatingPointError: too many steps in a row were taken back.
        """
        if self.limits.is_none:
            return True
        assert self._changes is not None, "after() without before()"
        changes, self._changes = self._changes, None
        squares = changes.squares(torch.device(self._engine.device))
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(squares, group=self._group)
        outcome = changes.limit(squares)
        self.report = outcome.report
        if outcome.is_smaller or not outcome.is_finite:
            self._masters.publish()
        if outcome.is_finite:
            self._outcome.complete()
        else:
            self._engine.skipped_steps += 1
            self._engine._step_applied = False
            self._outcome.skip("change")
        return outcome.is_finite

    def _parts(self) -> Iterator[Part]:
        for name, parameter in self._engine.module.named_parameters():
            segment = self._masters.segment(parameter) if parameter.requires_grad else None
            if segment is not None:
                counts = not self._masters.are_whole or self._is_first(parameter)
                counted = slice(num_real(parameter, segment)) if counts else None
                yield Part(self._layer_of(name, parameter), segment, counted)

    def _is_first(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the first of those that hold the parameter."""
        group = self._group
        if _is_expert(parameter):
            group = self._engine.expert_data_parallel_group[parameter.group_name]  # type: ignore[attr-defined]
        return dist.get_rank(group) == 0

    def _layer_of(self, name: str, parameter: nn.Parameter) -> str:
        layer = Limits.layer_of(name)
        if not (_is_expert(parameter) and ONE_BY_ONE in name):
            return layer
        from deepspeed.utils import groups

        return f"{layer}@{groups._get_expert_parallel_rank(parameter.group_name)}"  # type: ignore[attr-defined]


def _is_expert(parameter: nn.Parameter) -> bool:
    """Whether not all data-parallel ranks hold it."""
    return getattr(parameter, "allreduce", True) is False


def _check(engine: Any, limits: Limits) -> None:
    if engine.pipeline_parallelism:
        raise ValueError(f"{limits} of a pipeline: its optimizer limits changes itself; give it max_change.")
    offloads = [engine.zero_offload_optimizer(), engine.zero_offload_param()]
    found = {
        "offload": any(offload is not None and offload.device != "none" for offload in offloads),
        "ZenFlow": bool(engine.zenflow),
        "tensor parallelism": engine.mp_world_size > 1,
    }
    for feature, is_on in found.items():
        if is_on:
            raise ValueError(exclusion("max_change", feature).message(str(limits), f"the engine has {feature}"))
