"""Which rows go to which slot, and what comes back for a token; on one rank that has all slots, or plays all ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from paceline.moe.dispatch import SlotTable, TakeRows, plan_exchange, take_rows
from paceline.planning.experts import Placement
from paceline.planning.splitting import split

CPU = torch.device("cpu")
NUM_EXPERTS = 6


def chosen_by_router(num_tokens: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    chosen = torch.stack([torch.randperm(NUM_EXPERTS)[:top_k] for _ in range(num_tokens)])
    return chosen, torch.bincount(chosen.reshape(-1), minlength=NUM_EXPERTS)


def slots_of(placement: Placement, num_slots: int, num_replicas: int) -> dict[int, int]:
    """From slot to expert."""
    width = num_slots + num_replicas
    return {r * width + s: e for r, held in enumerate(placement.devices) for s, e in enumerate(held)}


@pytest.mark.parametrize("top_k", [1, 3])
def test_rows_are_sorted_by_slot_and_each_goes_to_a_slot_of_its_expert(top_k: int) -> None:
    placement = Placement(((4, 0, 3, 5, 2, 1),))
    chosen, counts = chosen_by_router(20, top_k, seed=top_k)
    table = SlotTable(placement, NUM_EXPERTS, 0, CPU)
    exchange = plan_exchange(chosen, counts, table, None)
    experts = chosen.reshape(-1)[exchange.order].tolist()
    assert experts == sorted(experts, key=placement.devices[0].index)
    assert exchange.counts.tolist() == [[counts[e].item() for e in placement.devices[0]]]
    for expert in range(NUM_EXPERTS):  # of one expert in the tokens' order
        own = [place for place in exchange.order.tolist() if chosen.reshape(-1)[place] == expert]
        assert own == sorted(own)


@pytest.mark.parametrize("loads", [None, [8.0, 4.0, 2.0, 2.0, 2.0, 2.0]])
def test_copies_share_the_tokens_of_their_expert(loads: list[float] | None) -> None:
    placement = Placement(((0, 1, 2, 3), (3, 4, 5, 0)), owned=(3, 3))
    table = SlotTable(placement, 3, 1, CPU, loads)
    at = slots_of(placement, 3, 1)
    shares = [[0.5, 0.5] if len(c) == 2 else [1.0] for c in placement.copies]
    if loads is not None:
        shares = [list(of_expert) for of_expert in split(placement, loads)]
        assert shares[0] != [0.5, 0.5], "the first device has more to give"
    # 100 tokens, all for one expert: so many go to each of its copies.
    for expert, slots in enumerate(table.copies):
        assert all(at[slot] == expert for slot in slots)
        part = (torch.arange(100) + 0.5) / 100
        copy = (part[:, None] > table.ends[expert]).sum(dim=1)
        found = torch.bincount(table.slots[expert, copy], minlength=8)
        for slot, share in zip(slots, shares[expert], strict=True):
            assert found[slot].item() == pytest.approx(100 * share, abs=1)


def test_copies_lie_behind_all_own_slots_whether_these_are_empty_or_not() -> None:
    table = SlotTable(Placement(((0, 1, 2), (2, 0)), owned=(2, 1)), 2, 1, CPU)
    assert table.width == 3
    assert table.copies == [[0, 5], [1], [3, 2]]


def test_a_gradient_adds_up_in_the_order_of_the_experts_wherever_they_lie() -> None:
    chosen, counts = chosen_by_router(64, 5, seed=1)
    x = torch.randn(64, 7)
    gradients = []
    for devices in (tuple(range(NUM_EXPERTS)), (5, 2, 4, 0, 1, 3)):
        leaf = x.clone().requires_grad_()
        exchange = plan_exchange(chosen, counts, SlotTable(Placement((devices,)), NUM_EXPERTS, 0, CPU), None)
        rows = take_rows(leaf, chosen, exchange)
        torch.manual_seed(2)
        weights = torch.randn(64 * 5, 7)  # of each choice, in the router's order
        (rows * weights[exchange.order]).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    plain = x.clone().requires_grad_()
    by_expert = torch.argsort(chosen.reshape(-1), stable=True)
    (plain[by_expert // 5] * weights[by_expert]).sum().backward()
    assert torch.equal(gradients[0], plain.grad)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_rows_have_the_right_gradient(top_k: int) -> None:
    chosen, counts = chosen_by_router(5, top_k, seed=3)
    exchange = plan_exchange(chosen, counts, SlotTable(Placement.contiguous(6, 1), 6, 0, CPU), None)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: TakeRows.apply(x, exchange.order, chosen), (x,))


def test_no_tokens_at_all() -> None:
    chosen, counts = torch.empty(0, 2, dtype=torch.int64), torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    exchange = plan_exchange(chosen, counts, SlotTable(Placement.contiguous(6, 1), 6, 0, CPU), None)
    assert take_rows(torch.empty(0, 4), chosen, exchange).shape == (0, 4)
    assert Counter(exchange.counts.reshape(-1).tolist()) == {0: 6}
