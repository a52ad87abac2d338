"""Emulated experts: tokens go where the trace says, and rows take their time."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from deepspeed.moe.ep_experts import GroupedExperts
from torch.func import functional_call

from lab.experts import (
    BACKWARD,
    TOP_K,
    EmulatedExperts,
    ExpertEmulation,
    TracedRouter,
    read_trace,
    rows_of,
    train_experts,
)
from lab.hosts import Hosts, available
from support.ranks import PATIENCE_S

RANKS, TOKENS = 4, 64
TRIES = 10
EMULATION = ExpertEmulation(
    tuple(tuple(map(tuple, sample)) for sample in read_trace()), row_s=1e-3, num_tokens=TOKENS, steps_a_sample=10
)


def test_rows_are_in_the_proportions_of_the_trace() -> None:
    assert rows_of([1, 1, 1], 10) == [4, 3, 3]
    assert rows_of([5, 3, 2], 100) == [50, 30, 20]
    for sample, layers in enumerate(EMULATION.tokens):
        for layer, tokens in enumerate(layers):
            rows = EMULATION.rows(sample, layer, RANKS)
            assert sum(rows) == RANKS * TOKENS * TOP_K
            shares = [each / sum(tokens) for each in tokens]
            assert all(abs(row - share * sum(rows)) < 1 for row, share in zip(rows, shares, strict=True))


def test_ranks_share_the_rows_evenly() -> None:
    for layer in range(EMULATION.num_layers):
        chosen = [EMULATION.chosen(3, layer, rank, RANKS) for rank in range(RANKS)]
        counts = torch.stack([torch.bincount(each.flatten(), minlength=EMULATION.num_experts) for each in chosen])
        assert counts.sum(dim=0).tolist() == EMULATION.rows(3, layer, RANKS)
        assert (counts.amax(dim=0) - counts.amin(dim=0) <= 1).all()
        assert all(each.shape == (TOKENS, TOP_K) and (each[:, 0] != each[:, 1]).all() for each in chosen)


def test_no_token_goes_to_an_expert_twice() -> None:
    lopsided = replace(EMULATION, tokens=(((3.0, 1.0),),))
    with pytest.raises(ValueError, match="its share is above 1 / 2"):
        lopsided.chosen(0, 0, 0, RANKS)


def test_samples_last_their_steps_and_the_last_one_stays() -> None:
    last = len(EMULATION.tokens) - 1
    assert [EMULATION.sample(step) for step in (0, 9, 10, 10_000)] == [0, 0, 1, last]
    assert EMULATION.num_steps == 10 * (last + 1)


def router_of(num_experts: int) -> TracedRouter:
    return TracedRouter(16, num_experts, None, None, TOP_K, "softmax", False, 1.0, False)


def test_the_router_follows_the_trace_and_learns_from_its_scores() -> None:
    torch.manual_seed(0)
    router = router_of(8)
    chosen = torch.tensor([[5, 1], [0, 7], [5, 2]])
    router.follow(chosen)
    x = torch.randn(3, 16)
    scores, experts, counts = router(x)
    assert experts.sort(dim=1).values.tolist() == chosen.sort(dim=1).values.tolist()
    assert counts.tolist() == [1, 1, 1, 0, 0, 2, 0, 1]
    assert torch.equal(scores, router.gate(x).softmax(dim=1).gather(1, experts))
    scores.sum().backward()
    assert router.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("by_call", [False, True])
def test_experts_compute_and_take_the_time_of_their_rows(by_call: bool) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(16, 8, 2, use_grouped_mm=False)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    rows, counts = torch.randn(24, 16), torch.tensor([8, 16])
    rows[5:8] = rows[20:] = 0.0  # filled up
    rows.requires_grad_()
    wanted = torch.autograd.grad(experts(rows, counts).square().sum(), [rows, *experts.parameters()])

    experts.__class__ = EmulatedExperts
    experts.emulate(row_s=1e-3)
    begun = time.perf_counter()
    weights = {name: weight * 1.0 for name, weight in experts.named_parameters()}
    output = functional_call(experts, weights, (rows, counts)) if by_call else experts(rows, counts)
    forward_s = experts.taken_s
    found = torch.autograd.grad(output.square().sum(), [rows, *experts.parameters()])
    wall_s = time.perf_counter() - begun
    assert all(map(torch.equal, found, wanted))
    num_rows = 24 - 3 - 4
    assert forward_s >= num_rows * 1e-3
    assert experts.taken_s - forward_s >= BACKWARD * num_rows * 1e-3
    assert wall_s >= experts.taken_s


def test_no_rows_take_no_time() -> None:
    experts = GroupedExperts(16, 8, 1, use_grouped_mm=False)
    experts.__class__ = EmulatedExperts
    experts.emulate(row_s=10.0)
    experts(torch.zeros(8, 16), torch.tensor([8]))
    assert experts.taken_s == 0.0


@pytest.mark.skipif(bool(available()), reason=available() or "-")
def test_contestants_train_alike_in_the_time_of_their_most_loaded_rank() -> None:
    skewed = (4.0, 4.0, 1.0, 1.0, 1.0, 1.0)  # the first rank has 9 of 12 parts, at best 6
    emulation = ExpertEmulation(((skewed,),) * 2, row_s=5e-4, num_tokens=48, steps_a_sample=3, intermediate=8)
    row_s = (1 + BACKWARD) * emulation.row_s

    def is_shorter() -> bool:
        """Whether experts moved and that paid, on a machine that may be busy: all else is so on any."""
        job = {"stock": None, "moving": {"rebalance_every": 3}}
        records = train_experts(hosts, job, emulation, timeout=PATIENCE_S)
        assert [(r["contestant"], r["round"], r["step"]) for r in records] == [
            (label, number, 3 * number + step) for number in range(2) for label in job for step in range(3)
        ]
        stock, moving = ([r for r in records if r["contestant"] == label] for label in job)
        assert [r["loss"] for r in stock] == [r["loss"] for r in moving]
        for record, most in ((stock[5], 144), (moving[5], 96)):
            assert most * row_s <= max(record["expert_s"][0]) <= record["seconds"]
            assert sum(record["expert_s"][0]) >= 192 * row_s
        (decision,) = moving[2]["decisions"]
        taken_s = min(max(record["expert_s"][0]) for record in moving[4:])
        return decision["switched"] and taken_s < 144 * row_s

    with Hosts(2) as hosts:
        assert any(is_shorter() for _ in range(TRIES))
