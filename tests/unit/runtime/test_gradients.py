"""Gradients that leave a stage for the one before it."""

from __future__ import annotations

import torch

from paceline.runtime.causal_lm_runner import CausalLMRunner
from paceline.runtime.stage_runner import Live


def test_a_loss_that_leaves_the_router_alone_sends_zeros() -> None:
    """A loss of one's own may use the logits only; the routing that came with the activations has no gradient then."""
    stream, routing = torch.ones(2, 3, requires_grad=True), torch.ones(4, requires_grad=True)
    stream.sum().backward()
    live = Live()
    live.inputs = (stream, {}, routing)
    runner = CausalLMRunner.__new__(CausalLMRunner)  # nothing of it is asked
    of_stream, of_routing = runner.leaving_gradients(live)
    assert torch.equal(of_stream, torch.ones(2, 3))
    assert torch.equal(of_routing, torch.zeros(4))
