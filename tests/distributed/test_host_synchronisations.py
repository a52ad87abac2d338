"""A stage's forward never waits for the device: whatever it has to know of a batch is found on the CPU before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from support.jobs import MICRO_BATCHES, ds_config, model_config, step_batches
from support.ranks import run_ranks

READS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")
"""Operations that wait for a GPU to have computed their operand."""


class Reads(TorchDispatchMode):
    """Names of the operations that read values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in READS:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def read_in_forwards(kinds: list[str], attention: str) -> dict[str, Any]:
    """By the kind of a step's batches: values read in this rank's forwards, loss included, and the step's loss."""
    import paceline

    config = model_config(attn_implementation=attention)
    engine, *_ = paceline.initialize(
        model=config,
        config=ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": {"stages": 3}}),
    )
    [held] = engine.held
    forward = held.runner.forward
    reads: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> None:
        with Reads() as mode:
            forward(*args, **kwargs)
        reads.extend(mode.found)

    held.runner.forward = counted
    found = {}
    for kind in kinds:
        reads.clear()
        loss = engine.train_batch(iter(step_batches(0, kind))).item()
        found[kind] = (list(reads), loss)
    return found


@pytest.mark.parametrize("attention", ["sdpa"])
def test_no_forward_reads_a_value(attention: str) -> None:
    kinds = ["plain", "padded", "packed", "prompt"]
    ranks = run_ranks(read_in_forwards, 3, kinds, attention)
    for rank in ranks:
        assert {kind: reads for kind, (reads, _) in rank.items()} == {kind: [] for kind in kinds}
        assert all(loss > 1 for _, loss in rank.values())


def test_reads_are_seen() -> None:
    """What transformers does where nobody has told it."""
    from transformers.masking_utils import create_causal_mask

    config, hidden = model_config(attn_implementation="sdpa"), torch.zeros(2, 8, 32)
    for attention_mask, position_ids in ((None, torch.arange(8)[None]), (torch.ones(2, 8), None)):
        with Reads() as mode:
            create_causal_mask(config, hidden, attention_mask, None, position_ids)
        assert mode.found == ["aten::_local_scalar_dense"]


def broadcasts_of_steps(steps: int) -> tuple[int, list[float]]:
    """Broadcasts in steps after the first one, and the steps' losses."""
    import paceline

    engine, *_ = paceline.initialize(
        model=model_config(),
        config=ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": {"stages": 2}}),
    )
    calls, broadcast = 0, dist.broadcast

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return broadcast(*args, **kwargs)

    losses = [engine.train_batch(iter(step_batches(0, "padded"))).item()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", counted)
        losses += [engine.train_batch(iter(step_batches(step, "padded"))).item() for step in range(1, steps)]
    return calls, losses


def test_the_loss_of_one_pipeline_comes_with_the_norm() -> None:
    (first, losses), (second, others) = run_ranks(broadcasts_of_steps, 2, 3)
    assert (first, second) == (0, 0)
    assert losses == others
    assert all(1 < loss < 10 for loss in losses)
