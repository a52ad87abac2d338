"""The pipelines' optimizer is ``torch.optim`` on a single process, and ZeRO 0 and 1 are the same in every bit."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import pytest
import torch

from support.jobs import LAYERS, MICRO_BATCHES, ds_config, model_config, step_batches
from support.ranks import run_ranks

STEPS = 3
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", {"lr": 1e-3}),
    "AdamW": ("AdamW", {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.8, 0.99]}),
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": ("Adagrad", {"lr": 1e-2, "initial_accumulator_value": 0.1}),  # makes its state at once
}
Results = dict[str, dict[str, Any]]


def alone() -> Results:
    """Hugging Face's model with ``torch.optim`` in a plain loop."""
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage

    results = {}
    for key, (name, options) in OPTIMIZERS.items():
        model = load_stage(None, model_config(tie_word_embeddings=False), Cut.whole(LAYERS)).model
        arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        optimizer = getattr(torch.optim, name)(model.parameters(), **arguments)
        for step in range(STEPS):
            batches = step_batches(step)
            tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
            for batch in batches:
                model(**batch, num_items_in_batch=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results[key] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return results


def pipeline(stages: int, zero: int) -> dict[str, Any]:
    import paceline

    replicas = int(os.environ["WORLD_SIZE"]) // stages
    results: dict[str, Any] = {}
    for key, (name, options) in OPTIMIZERS.items():
        config = ds_config(
            stages,
            gradient_accumulation_steps=MICRO_BATCHES // replicas,
            optimizer={"type": name, "params": options},
            # ZeRO 1 in many buckets, which are reduced while the last backward goes on.
            zero_optimization={"stage": zero, **({"reduce_bucket_size": 3000} if zero else {})},
        )
        engine, optimizer, *_ = paceline.initialize(model=model_config(tie_word_embeddings=False), config=config)
        for step in range(STEPS):
            engine.train_batch(iter(step_batches(step)[engine.grid.data_parallel_id :: replicas]))
        results[key] = {n: p.detach().clone() for n, p in engine.module.stage.model.named_parameters()}
        states = [s for state in optimizer.state.values() for s in state.values() if torch.is_tensor(s) and s.dim()]
        results[f"{key} state"] = sum(s.numel() for s in states)
        results["parameters"] = sum(p.numel() for p in engine.module.parameters())
        results["masters"] = sum(owned.master.numel() for owned in optimizer.owned)
        engine.destroy()
    return results


@lru_cache
def reference() -> Results:
    return run_ranks(alone, 1)[0]


@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (3, 1)])
def test_equals_torch(stages: int, replicas: int) -> None:
    whole, sharded = (run_ranks(pipeline, stages * replicas, stages, zero) for zero in (0, 1))
    for rank, other in zip(whole, sharded, strict=True):
        for key in OPTIMIZERS:
            for name, value in rank[key].items():
                assert torch.equal(value, other[key][name]), f"{key}, {name}: ZeRO 0 and 1 differ"
                wanted = reference()[key][name]
                if replicas == 1:
                    assert torch.equal(value, wanted), f"{key}, {name}"
                else:  # two sums of gradients instead of one; Adam divides by what may be next to zero
                    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-4, msg=f"{key}, {name}")
        share = other["parameters"] / replicas
        assert abs(other["masters"] - share) <= 0.05 * share
        assert abs(other["AdamW state"] - 2 * share) <= 0.05 * 2 * share
        assert abs(other["Adagrad state"] - share) <= 0.05 * share
        assert rank["masters"] == rank["parameters"]
