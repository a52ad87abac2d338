"""Layers that are compiled: which call runs compiled, and what copies are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralDecoderLayer

from paceline.config.natural_gradient_keys import NaturalGradientConfig
from paceline.hf.stage import HalfLayer, PassThrough, take_out_half
from paceline.optim.linear_layers import Deferral, OwnLinear
from paceline.optim.natural_layers import NaturalGradients
from paceline.optim.stacked_experts import defer_experts
from paceline.runtime.compiled_layers import CompiledForwards, CompiledLayer, compiled_forwards, run_of_half

# While torch traces, it looks for gradients of all inputs, and makes an autograd function as others are told not to.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


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


def in_two_parts(layer: nn.Module, x: Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> dict[str, Any]:
    """A forward, a backward of the inputs and one of the weights.

    Args:
        dtype: of autocast; None: without.

    Returns:
        output, gradients by name, names of those that come with the inputs', and size of what is left for later.
    """
    deferral = Deferral()
    deferral.adopt(layer)
    defer_experts(layer, deferral)
    deferral.is_on = True
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        found = layer(x, **kwargs)
    out: Tensor = found[0] if isinstance(found, tuple) else found
    with deferral.collecting() as deferred:
        out.float().square().sum().backward()
    early = {name for name, parameter in layer.named_parameters() if parameter.grad is not None}
    size = len(deferred), deferred.num_bytes
    deferred.run()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out, "gradients": {"input": x.grad, **gradients}, "early": early, "size": size}


def assert_same_parts(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert torch.equal(found["out"], plain["out"])
    assert found["early"] == plain["early"]
    assert found["size"] == plain["size"]
    for name, gradient in plain["gradients"].items():
        assert (found["gradients"][name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(found["gradients"][name], gradient), name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_a_compiled_layer_leaves_products_for_later(family: str, precision: str) -> None:
    layer, kwargs = (gpt2_layer(), {}) if family == "gpt2" else (llama_layer(), tables())
    x = torch.randn(2, 3, 16)
    if precision == "bfloat16":
        layer, x = layer.bfloat16(), x.bfloat16()
        kwargs = {name: tuple(table.bfloat16() for table in pair) for name, pair in kwargs.items()}
    compiled, dtype = copy.deepcopy(layer), torch.bfloat16 if precision == "autocast" else None
    plain = in_two_parts(layer, x, dtype=dtype, **kwargs)
    num_products = {"llama": 7, "gpt2": 4}[family]
    assert plain["size"][0] == num_products
    torch._dynamo.reset()
    counters.clear()
    compiled_forwards(backend="aot_eager").adopt([compiled])
    assert_same_parts(in_two_parts(compiled, x, dtype=dtype, **kwargs), plain)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


class Twice(nn.Module):
    """A layer with a linear layer that is called twice, one for half of the rows, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.short, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.twice(self.twice(x).tanh()) + self.short(x[: len(x) // 2]).mean()
        return out


def test_products_that_cannot_come_out_of_a_graph_are_left_between_two() -> None:
    layer, x = Twice(), torch.randn(6, 4)
    compiled = copy.deepcopy(layer)
    plain = in_two_parts(layer, x)
    torch._dynamo.reset()
    compiled_forwards(backend="aot_eager").adopt([compiled])
    assert_same_parts(in_two_parts(compiled, x), plain)
    assert compiled.never.tap is None, "or a later forward would take what is of this one"


def test_a_change_of_the_schedule_has_no_graph_made_twice() -> None:
    layer, deferral, num_graphs = Layer(), Deferral(), []
    deferral.adopt(layer)
    torch._dynamo.reset()
    counters.clear()
    compiled_forwards(backend="aot_eager").adopt([layer])
    for splits in (False, True, False):
        deferral.is_on = splits
        layer(torch.ones(2, 4))
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs == [1, 2, 2]


class Wide(nn.Module):
    """A layer with linear layers whose width is its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_with_taps_is_for_all_lengths_and_one_width(dynamic: bool | None) -> None:
    """As one without: the tapped rows are a length, and the weights' shapes are not."""
    num_graphs = []
    for splits in (False, True):
        torch._dynamo.reset()
        counters.clear()
        deferral, layers = Deferral(), [Wide(8), Wide(12)]
        compiled_forwards(backend="aot_eager", dynamic=dynamic).adopt(layers)
        for layer in layers:
            deferral.adopt(layer)
        deferral.is_on = splits
        for length in (3, 5, 7, 6):
            for layer in layers:
                layer(torch.ones(2, length, 4, requires_grad=True)).sum().backward()
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs == [2 if dynamic else 4] * 2


def test_what_is_left_for_later_keeps_no_graph_where_torch_runs_a_layer_uncompiled() -> None:
    kept: list[bool] = []

    class Noting(Deferral):
        def leave(self, layer: OwnLinear, inputs: Tensor, outputs: Tensor) -> None:
            kept.append(inputs.requires_grad or outputs.requires_grad)

    layer, deferral = Wide(8), Noting()
    deferral.adopt(layer)
    deferral.is_on = True
    CompiledForwards(Counted()).adopt([layer])
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert kept == [False, False]


def test_experts_that_leave_products_for_later_run_between_two_graphs() -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_implementation": "eager"}
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=2, **heads)
    layer, x = MixtralDecoderLayer(config, 0), torch.randn(2, 3, 16)
    for parameter in layer.mlp.parameters():  # transformers fills them when it makes a whole model
        nn.init.normal_(parameter, std=0.1)
    compiled = copy.deepcopy(layer)
    plain = in_two_parts(layer, x, **tables())
    assert plain["size"][0] > 4, "besides attention's products those of the experts"
    assert not {name for name in plain["early"] if "experts" in name}
    torch._dynamo.reset()
    counters.clear()
    compiled_forwards(backend="aot_eager").adopt([compiled])
    found = in_two_parts(compiled, x, **tables())
    assert counters["stats"]["unique_graphs"] > 1
    assert (found["early"], found["size"][0]) == (plain["early"], plain["size"][0])
    for name, gradient in plain["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient)


def test_natural_gradients_of_a_compiled_layer_are_those_of_the_layer() -> None:
    layer = llama_layer()
    compiled, x = copy.deepcopy(layer), torch.randn(2, 3, 16)
    torch._dynamo.reset()
    counters.clear()
    compiled_forwards(backend="aot_eager").adopt([compiled])
    gradients = []
    for each in (layer, compiled):
        NaturalGradients(NaturalGradientConfig(), unit=float).adopt(each)
        for _ in range(2):
            each(x, **tables()).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in each.named_parameters()})
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_hook_that_is_new_runs_in_any_thread(is_elsewhere: bool) -> None:
    layer, seen = Layer(), list[Tensor]()
    compiled_forwards(backend="eager").adopt([layer])

    def run() -> None:
        torch._dynamo.reset()
        layer(torch.ones(2, 4))
        layer.linear.register_forward_hook(lambda module, args, output: seen.append(output))
        layer(torch.ones(2, 4))

    if is_elsewhere:
        thread = Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert len(seen) == 1


def llama_layer() -> nn.Module:
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, attn_implementation="eager")
    return LlamaDecoderLayer(config, 0)


def gpt2_layer() -> nn.Module:
    config = GPT2Config(n_embd=16, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager")
    return GPT2Block(config, 0)


def tables() -> dict[str, Any]:
    return {"position_embeddings": (torch.ones(1, 3, 8), torch.zeros(1, 3, 8))}


def called(layer: nn.Module, *, by_name: bool = False) -> Tensor:
    x = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(0))
    out: Tensor = layer(hidden_states=x, **tables()) if by_name else layer(x, **tables())
    return out


@pytest.mark.parametrize("by_name", [False, True])
def test_a_layer_of_two_halves_runs_them_one_after_the_other(by_name: bool) -> None:
    counted, layer = Counted(), llama_layer()
    wanted = called(layer)
    CompiledForwards(counted).adopt([layer], in_halves=True)
    names = [name for name, _ in layer.named_parameters()]
    calls: list[str] = []
    layer.register_forward_hook(lambda *_: calls.append("layer"))
    for half in range(2):
        piece = run_of_half(layer, half)
        assert piece is not None
        piece.register_forward_hook(lambda *_, half=half: calls.append(f"half {half}"))
    assert torch.equal(called(layer, by_name=by_name), wanted)
    assert (counted.num_compiled, counted.num_calls) == (1, 2)
    assert calls == ["half 0", "half 1", "layer"]
    assert names == [name for name, _ in llama_layer().named_parameters()]
    layer.eval()
    called(layer)
    assert [piece.training for piece in layer.pieces] == [False, False]


def test_a_half_whose_other_half_comes_and_goes() -> None:
    counted, layer = Counted(), llama_layer()
    forwards, wanted = CompiledForwards(counted), called(layer)
    forwards.adopt([layer], in_halves=True)
    second = HalfLayer(layer, 1)
    take_out_half(layer, 1)
    forwards.adopt([layer], in_halves=True)
    assert run_of_half(layer, 0) is layer
    between = called(layer)
    assert not torch.equal(between, wanted)
    second.put_into(layer)
    forwards.adopt([layer], in_halves=True)
    assert torch.equal(called(layer), wanted)
    assert counted.num_calls == 3


def test_a_layer_that_may_not_be_cut_runs_as_one() -> None:
    counted, layer = Counted(), llama_layer()
    assert run_of_half(layer, 0) is None
    CompiledForwards(counted).adopt([layer])
    called(layer)
    assert counted.num_calls == 1


class InTuples(nn.Module):
    """A layer as those of some families, which also returns what its attention and its router say."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Says("attention"), Says("mlp")

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        kept = x
        x, weights = self.attention(x)
        x = kept + x
        kept = x
        x, logits = self.mlp(x)
        x = kept + x
        return x, weights, logits


class Says(nn.Linear):
    def __init__(self, word: str) -> None:
        super().__init__(4, 4)
        self.word = word

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.word


def test_what_either_half_returns_besides() -> None:
    layer, x = InTuples(), torch.ones(1, 4)
    wanted = layer(x)
    assert wanted[1:] == ("attention", "mlp")
    CompiledForwards(Counted()).adopt([layer], in_halves=True)
    found = layer(x)
    assert torch.equal(found[0], wanted[0])
    assert found[1:] == wanted[1:]


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
