"""Layers that are compiled: which call runs compiled, and what copies are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.hf.stage import PassThrough
from paceline.optim.linear_layers import Deferral
from paceline.runtime.compiled_layers import CompiledForwards, CompiledLayer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.linear(x) * scale
        return out


class Counted:
    """Stands for torch.compile: counts what it compiles, and calls of that."""

    def __init__(self) -> None:
        self.num_compiled = self.num_calls = 0

    def __call__(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        self.num_compiled += 1

        def compiled(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            return forward(*args, **kwargs)

        return compiled


def test_layers_of_a_class_share_one_compiled_forward() -> None:
    counted, layers = Counted(), [Layer(), PassThrough(), Layer()]
    forwards = CompiledForwards(counted)
    forwards.adopt(layers)
    forwards.adopt(layers)  # again, when a layer has arrived
    x = torch.randn(2, 4)
    wanted = layers[0].linear(x) * 3.0
    assert torch.equal(layers[0](x, scale=3.0), wanted)
    layers[2](x)
    assert (counted.num_compiled, counted.num_calls) == (1, 2)
    assert type(layers[1]) is PassThrough


def test_a_layer_that_leaves_products_for_later_runs_as_it_is() -> None:
    counted, layer, deferral = Counted(), Layer(), Deferral()
    CompiledForwards(counted).adopt([layer])
    deferral.adopt(layer)
    x = torch.randn(2, 4)
    layer(x)
    assert counted.num_calls == 1
    deferral.is_on = True
    with deferral.collecting() as deferred:
        layer(x).sum().backward()
    assert counted.num_calls == 1
    assert layer.linear.weight.grad is None
    deferred.run()
    assert layer.linear.weight.grad is not None


def test_copies_are_not_compiled() -> None:
    counted, layer = Counted(), Layer()
    CompiledForwards(counted).adopt([layer])
    assert isinstance(layer, CompiledLayer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is Layer
        assert torch.equal(other(torch.ones(1, 4)), layer(torch.ones(1, 4)))
    assert counted.num_calls == 2


def test_layers_of_transformers_are_counted_by_class() -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from paceline.runtime.compiled_layers import _single

    codes = {_single(kind.forward).__code__ for kind in (GPT2Block, LlamaDecoderLayer)}
    assert len(codes) == 2
    assert {code.co_filename.rpartition("/")[2] for code in codes} == {"modeling_gpt2.py", "modeling_llama.py"}
