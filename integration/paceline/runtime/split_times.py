"""Measures what a stage takes beside its items, and what it takes to split a backward, before there is a pipeline."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from ..hf.layer_profile import Bench
from ..hf.stage import Cut
from ..optim.linear_layers import Deferral, Deferred
from ..optim.stacked_experts import defer_experts
from ..planning.workload import StageTimes

MOST_SPLIT = 2.0
"""Most that a split backward counts by a whole one: more is a disturbance."""


def measure_stage(bench: Bench) -> StageTimes:
    """Time a stage without items, and a layer of the most frequent kind, whole and split. Not collective."""
    trunk = bench.trunk
    found = StageTimes(trunk.forward_s, trunk.backward_s)
    kind, _ = Counter(bench.kinds).most_common(1)[0]
    index = bench.kinds.index(kind)
    blocks = bench.anatomy.blocks_of(index // bench.anatomy.blocks_per_layer)
    cut = Cut(blocks.start, blocks.stop, False, False)
    whole, split, deferral = bench.stage(cut), bench.stage(cut), Deferral()
    deferral.adopt(split)
    defer_experts(split, deferral)
    deferral.is_on = True
    left: list[Deferred] = []

    def inputs(*outputs: Tensor | None) -> None:
        with deferral.collecting() as deferred:
            bench.backward(*outputs)
        left.append(deferred)

    def weights(*_: Tensor | None) -> None:
        left.pop().run()

    forward_s, backward_s = bench.times(whole, bench.stream, [bench.backward])
    longer_s, inputs_s, weights_s = bench.times(split, bench.stream, [inputs, weights])
    parts_s = inputs_s + weights_s
    again_s = forward_s if bench.gradient_checkpointing else 0.0
    factor = (max(longer_s - forward_s, 0.0) + parts_s) / backward_s
    share = weights_s / max(parts_s - again_s, weights_s)
    return found._replace(split_factor=min(max(factor, 1.0), MOST_SPLIT), weight_share=share)
