"""Experts that follow the load, from the JSON: what is looked at, when experts move, and that no number depends on it.

Experts take their time for each of their rows by a clock that only work moves on, so that the most loaded rank sets the
pace on any machine.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from support.expert_models import ds_config, engine_for
from support.ranks import run_ranks
from support.work_time import WORK_TIME, Work

ROW_S = 4e-4
"""A row's time in a forward; it takes twice that in a backward."""
EVERY = 3
STEPS = 10
FAMILY = "qwen3_moe"
EXPERTS, TOP_K = 8, 3
TOKENS = 32
SKEWED = [0, 1, 2]
"""The experts that most tokens go to: all on the first rank, as DeepSpeed places them."""


def emulate(layers: Any, row_s: float) -> None:
    """Experts that take their time, by the rows that they get; padding of a few rows counts as rows."""
    for layer in layers:
        experts = layer.experts
        compute = type(experts).forward

        def slow(self: Any, x: Any, counts: Any, compute: Any = compute) -> Any:
            return Work.apply(compute(self, x, counts), row_s * x.shape[0])

        experts.__class__ = type("Emulated", (type(experts),), {"forward": slow})


def route(layers: Any, skewed: bool) -> None:
    """Have the routers send tokens to a few experts, or to all alike; their weights go on being trained."""
    torch.manual_seed(3)
    fixed = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    if skewed:
        fixed[: TOKENS * 3 // 4] = torch.tensor(SKEWED)
    else:
        fixed = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % EXPERTS
    for layer in layers:

        def choose(module: Any, args: Any, out: Any) -> Any:
            scores, chosen, counts = out
            chosen = fixed[: chosen.shape[0]]
            return scores, chosen, torch.bincount(chosen.reshape(-1), minlength=EXPERTS).to(counts.dtype)

        layer.router.register_forward_hook(choose)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 97, (2, TOKENS // 2), generator=torch.Generator().manual_seed(100 * step + rank))


def run(section: dict[str, Any] | None, *, skewed: bool, row_s: float, ep: int) -> dict[str, Any]:
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    import paceline

    if section is None:
        paceline.repair_deepspeed()
        engine = engine_for(FAMILY, ds_config(1, ep))
    else:
        from support.expert_models import EIGHT, build

        WORK_TIME.rule()
        model = build(FAMILY, **EIGHT[FAMILY])
        config = ds_config(1, ep, paceline={"moe": section})
        engine = paceline.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    layers = [module for module in engine.module.modules() if isinstance(module, AutoEPMoELayer)]
    emulate(layers, row_s)
    route(layers, skewed)
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {"losses": []}
    for step in range(STEPS):
        ids = tokens(step, rank)
        loss = engine(input_ids=ids, labels=ids)["loss"]
        engine.backward(loss)
        engine.step()
        found["losses"].append(loss.item())
    if section is not None:
        assert engine.rebalancer is not None
        found |= {"decisions": engine.rebalancer.decisions, "windows": engine.rebalancer.windows}
        found["placements"] = {n: told["placement"] for n, told in engine.rebalancer.placements().items()}
        found["copies"] = [
            {
                "placement": layer.placement.devices,
                "own": layer.experts.w1.detach().clone(),
                "copies": None if layer.replicas is None else settled(layer),
            }
            for layer in layers
        ]
    return found


def settled(layer: Any) -> torch.Tensor:
    layer.replicas.settle()
    return layer.replicas.copies[0].clone()


def run_both(section: dict[str, Any], skewed: bool, ep: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return run(section, skewed=skewed, row_s=ROW_S, ep=ep), run(None, skewed=skewed, row_s=0.0, ep=ep)


def test_hot_experts_are_spread_and_no_number_changes(tmp_path: Path) -> None:
    file = tmp_path / "loads.jsonl"
    section = {"rebalance_every": EVERY, "loads_file": str(file)}
    ranks = run_ranks(run_both, 2, section, True, 2)
    for ours, stock in ranks:
        assert ours["losses"] == stock["losses"]
        assert ours["placements"] == ranks[0][0]["placements"]
    ours = ranks[0][0]
    first = ours["decisions"][0]
    assert (first["what"], first["switched"], first["step"]) == ("experts", True, EVERY)
    assert first["moved"] > 0
    assert first["num_bytes"] > 0
    for before, after in zip(first["imbalance_before"], first["imbalance_after"], strict=True):
        assert 1 <= after < before
    for placement in ours["placements"].values():
        assert sum(expert in placement[0] for expert in SKEWED) in (1, 2), placement
    # What was counted is what was routed: all ranks' choices, each step.
    windows = ours["windows"]
    assert [window["step"] for window in windows] == [EVERY, 2 * EVERY, 3 * EVERY]
    for window in windows:
        for layer in window["layers"]:
            assert sum(layer["loads"]) == pytest.approx(2 * TOKENS * TOP_K)
    assert [json.loads(line) for line in file.read_text().splitlines()] == windows
    # It pays: the time is that of the busiest rank.
    assert first["predicted_best_s"] < 0.85 * first["predicted_now_s"]


def test_even_loads_leave_everything_where_it_is() -> None:
    ranks = run_ranks(run_both, 2, {"rebalance_every": 2, "replicas": 1}, False, 2)
    for ours, stock in ranks:
        assert ours["losses"] == stock["losses"]
        assert [[0, 1, 2, 3], [4, 5, 6, 7]] in ours["placements"].values()
    decisions = ranks[0][0]["decisions"]
    assert len(decisions) == STEPS // 2
    assert not any(decision["switched"] for decision in decisions)


@pytest.mark.parametrize("splitting", ["even", "planned", "fresh"])
def test_copies_take_their_part_and_are_equal_to_their_owners(splitting: str) -> None:
    section = {"rebalance_every": EVERY, "replicas": 1, "splitting": splitting}
    ranks = run_ranks(run_both, 4 if splitting == "fresh" else 2, section, True, 4 if splitting == "fresh" else 2)
    owned: dict[int, torch.Tensor] = {}
    for rank, (ours, stock) in enumerate(ranks):
        assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        for slot, expert in enumerate(ours["copies"][0]["placement"][rank][: len(ours["copies"][0]["own"])]):
            owned[expert] = ours["copies"][0]["own"][slot]
    num_copies = 0
    for rank, (ours, _) in enumerate(ranks):
        layer = ours["copies"][0]
        for copy, expert in enumerate(layer["placement"][rank][len(layer["own"]) :]):
            assert torch.equal(layer["copies"][copy], owned[expert])
            num_copies += 1
    assert num_copies > 0
    first = ranks[0][0]["decisions"][0]
    assert first["switched"]
    assert max(first["imbalance_after"]) < min(first["imbalance_before"])


def test_looks_come_when_they_are_due() -> None:
    ranks = run_ranks(run, 2, {"rebalance_every": 1}, skewed=True, row_s=0.0, ep=2)
    assert [decision["step"] for decision in ranks[0]["decisions"]] == list(range(1, STEPS + 1))
    never = run_ranks(run, 2, {"rebalance_every": 0}, skewed=True, row_s=0.0, ep=2)
    assert never[0]["decisions"] == never[0]["windows"] == []
    steps = [window["step"] for window in ranks[0]["windows"]]
    assert all(b - a == 1 for a, b in pairwise(steps))
