"""The share of a micro-batch in the loss of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.runtime.causal_lm_runner import CausalLMRunner, Inspection


def test_micro_batches_of_all_replicas_share_the_routers_loss_and_what_only_fills_a_step_has_none() -> None:
    shares: list[float] = []

    def loss(logits: Tensor, labels: Any, routing: Any, num_items: int, router_share: float) -> Tensor:
        assert num_items == 16, "label tokens of all replicas"
        shares.append(router_share)
        return torch.tensor(0.5)

    losses = SimpleNamespace(of_forwards=[], total=None)
    shapes = [SimpleNamespace(tokens=count) for count in (3, 0, 5)]
    runner: Any = SimpleNamespace(
        _book=SimpleNamespace(shapes=shapes, label_tokens=16, num_filled=5),  # three on the other replica
        _losses=losses,
        _stage=SimpleNamespace(loss=loss),
        _num_replicas=2,
        _wants_logits=lambda: False,
        own_loss=None,
    )
    for number in range(3):
        CausalLMRunner._loss(runner, SimpleNamespace(labels=None), number, torch.zeros(1), None)  # type: ignore[arg-type]
    assert shares == pytest.approx([1 / 5, 0.0, 1 / 5])
    assert [value.item() for value in losses.of_forwards] == [0.5 * 3 * 2] * 3
    assert losses.total.item() == 1.5


def test_logits_that_an_evaluation_keeps_go_to_the_host_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a step may be more than a GPU has room for."""
    fetched: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: fetched.append(tensor) or tensor)
    inspection = Inspection(see=lambda logits, labels: {"logits": (logits, 3)})
    runner: Any = SimpleNamespace(inspection=inspection, _whole_loss=lambda *args: None)
    logits = torch.ones(1, 2, 5)
    CausalLMRunner._inspect(runner, SimpleNamespace(labels=None), 0, logits, None)  # type: ignore[arg-type]
    assert fetched[0] is logits
    assert inspection.seen == [(None, {"logits": (logits, 3)})]


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_the_longest_micro_batch_tells_the_most_that_is_left_for_later(is_recomputed: bool) -> None:
    """Of layers that keep all, nothing is told: they leave no more."""
    shapes = [SimpleNamespace(batch=2, length=length) for length in (3, 7, 5)]
    layers = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2).requires_grad_(False)
    )
    config = SimpleNamespace(get_text_config=SimpleNamespace)
    module = SimpleNamespace(is_recomputed=is_recomputed, models=[None, layers], config=config)
    runner: Any = SimpleNamespace(_module=module, _chunk=1, _book=SimpleNamespace(shapes=shapes))
    most = CausalLMRunner.most_deferred_bytes(runner)
    assert most == (2 * 7 * (4 + 8) * 4 if is_recomputed else None)
