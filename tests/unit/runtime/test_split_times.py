"""Times of a stage beside its items, and the cost of splitting a backward, measured on a real layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from paceline.hf.layer_profile import Bench
from paceline.optim.linear_layers import OwnLinear
from paceline.runtime.split_times import MOST_SPLIT, measure_stage

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=97, max_position_embeddings=64,
)  # fmt: skip
SHAPE: dict[str, Any] = {
    "dtype": torch.float32, "device": torch.device("cpu"), "micro_batch_size": 2, "sequence_length": 32
}  # fmt: skip


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_is_measured(recomputes: bool) -> None:
    found = measure_stage(Bench(CONFIG, repeats=3, gradient_checkpointing=recomputes, **SHAPE))
    assert found.forward_s > 0
    assert 1 <= found.split_factor <= MOST_SPLIT
    assert 0 < found.weight_share <= 1


@pytest.mark.parametrize(
    ("split", "factor"),
    [([1.5, 1.5, 1.0], 1.5), ([1.0, 0.5, 0.5], 1.0), ([1.0, 4.0, 4.0], MOST_SPLIT), ([0.5, 1.5, 1.5], 1.5)],
)
def test_what_splitting_costs(split: list[float], factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts and what the forward takes longer, by a whole backward, within limits: the rest is noise."""
    bench, told = Bench(CONFIG, repeats=1, **SHAPE), iter([[1.0, 2.0], split])
    trunk = bench.trunk  # measured before
    monkeypatch.setattr(Bench, "times", lambda *_: next(told))
    found = measure_stage(bench)
    assert (found.forward_s, found.backward_s) == (trunk.forward_s, trunk.backward_s)
    assert found.split_factor == factor
    assert found.weight_share == split[2] / (split[1] + split[2])


def test_the_share_of_weights_is_that_of_a_backward_without_what_it_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(CONFIG, repeats=1, gradient_checkpointing=True, **SHAPE)
    told = iter([[1.0, 3.0], [1.0, 2.0, 1.0]])
    assert bench.trunk  # measured before
    monkeypatch.setattr(Bench, "times", lambda *_: next(told))
    found = measure_stage(bench)
    assert (found.split_factor, found.weight_share) == (1.0, 0.5)


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_parts_are_a_whole_backward(recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward that is timed as split leaves weights without gradients until its second part; the whole one not."""
    seen: list[list[bool]] = []
    times = Bench.times

    def watched(self: Bench, stage: Any, stream: Any, parts: Any, *more: Any) -> list[float]:
        weights = [layer.weight for layer in stage.modules() if isinstance(layer, (torch.nn.Linear, OwnLinear))]

        def then(part: Any) -> Any:
            def run(*outputs: Any) -> None:
                part(*outputs)
                seen.append([weight.grad is not None for weight in weights])
                if part is parts[-1]:
                    stage.zero_grad()

            return run

        return times(self, stage, stream, [then(part) for part in parts], *more)

    monkeypatch.setattr(Bench, "times", watched)
    measure_stage(Bench(CONFIG, repeats=1, gradient_checkpointing=recomputes, **SHAPE))
    trunk, whole, inputs, both = seen
    assert trunk == []
    assert whole == both == [True] * 7
    assert inputs == [False] * 7
