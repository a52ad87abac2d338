"""What backward gives a model's layers: with Hugging Face models, against rows that are divided one by one."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from paceline.config.natural_gradient_keys import NaturalGradientConfig
from paceline.optim import OnlineNaturalGradient
from paceline.optim.natural_layers import NaturalGradients

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "hidden_size": 32},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "mixtral": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "hidden_size": 32,
        "num_local_experts": 4,
    },
}


def make(family: str, **changes: Any) -> Any:
    options = {"num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": False, **FAMILIES[family], **changes}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **options, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config._experts_implementation = "eager"  # the only one in double precision
    return transformers.AutoModelForCausalLM.from_config(config).double()


def natural(model: nn.Module, unit: float | None = None, **options: Any) -> NaturalGradients:
    found = NaturalGradients(NaturalGradientConfig(**options), lambda n: float(n) if unit is None else unit)
    found.adopt(model)
    return found


def gradients(model: Any, seed: int = 0, factor: float = 1.0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(3, 64, (3, 16))
    model.zero_grad()
    (factor * model(input_ids=ids, labels=ids).loss).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Rows(nn.Module):
    """Keeps what a layer is given, and the derivatives of what it gives."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.x = self.dy = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.x, y = x.detach(), self.layer(x)
        y.register_hook(lambda dy: setattr(self, "dy", dy))
        return y


@pytest.mark.parametrize("kind", ["linear", "linear without bias", "conv1d"])
def test_a_layer_is_as_rows_divided_one_by_one(kind: str) -> None:
    torch.manual_seed(0)
    layer = Conv1D(12, 20) if kind == "conv1d" else nn.Linear(20, 12, bias=kind == "linear")
    layer.double()
    of = Rows(layer)
    natural(of, update_period=2, num_samples_history=300.0)
    has_bias = kind != "linear without bias"
    sides = OnlineNaturalGradient(10, 4.0, 300.0, 0.0, 2), OnlineNaturalGradient(6, 4.0, 300.0, 0.0, 2)
    for _ in range(15):
        x = torch.randn(5, 8, 20, dtype=torch.float64) @ torch.randn(20, 20, dtype=torch.float64)
        x.requires_grad_()
        of.zero_grad()
        of(x).square().mean().backward()
        rows, dy = of.x.reshape(40, 20), of.dy.reshape(40, 12)
        weight = layer.weight.T if kind == "conv1d" else layer.weight
        torch.testing.assert_close(x.grad, (dy @ weight).reshape(x.shape))
        if has_bias:
            rows = torch.cat([rows, torch.ones(40, 1, dtype=torch.float64)], 1)
        (a, in_scale), (b, out_scale) = sides[0].precondition(rows), sides[1].precondition(40 * dy)
        wanted = in_scale * out_scale * b.T @ a / 40
        found = layer.weight.grad.T if kind == "conv1d" else layer.weight.grad
        torch.testing.assert_close(found, wanted[:, :20], rtol=1e-9, atol=1e-12)
        if has_bias:
            torch.testing.assert_close(layer.bias.grad, wanted[:, 20], rtol=1e-9, atol=1e-12)


def divided_by_the_others(rows: Tensor, alpha: float = 4.0) -> Tensor:
    """Each row times the inverse of the smoothed second moment of the others, with the norm of all restored."""
    num, dim = rows.shape
    smoothing = alpha * rows.square().sum() / (num * dim) * torch.eye(dim).to(rows)
    found = []
    for i, row in enumerate(rows):
        others = torch.cat([rows[:i], rows[i + 1 :]])
        found.append(torch.linalg.solve(smoothing + others.T @ others / (num - 1), row))
    x_hat = torch.stack(found)
    return x_hat * rows.norm() / x_hat.norm()


@pytest.mark.parametrize("kind", ["linear", "linear without bias", "conv1d"])
def test_a_layer_by_the_simple_method_is_as_rows_divided_by_the_others(kind: str) -> None:
    torch.manual_seed(0)
    layer = Conv1D(12, 20) if kind == "conv1d" else nn.Linear(20, 12, bias=kind == "linear")
    of = Rows(layer.double())
    known = natural(of, method="simple")
    x = torch.randn(5, 8, 20, dtype=torch.float64) @ torch.randn(20, 20, dtype=torch.float64)
    of(x).square().mean().backward()
    rows, dy = of.x.reshape(40, 20), of.dy.reshape(40, 12)
    if layer.bias is not None:
        rows = torch.cat([rows, torch.ones(40, 1, dtype=torch.float64)], 1)
    wanted = divided_by_the_others(dy).T @ divided_by_the_others(rows)
    found = layer.weight.grad.T if kind == "conv1d" else layer.weight.grad
    torch.testing.assert_close(found, wanted[:, :20], rtol=1e-9, atol=1e-12)
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, wanted[:, 20], rtol=1e-9, atol=1e-12)
    assert known.state_dict() == {}
    assert known.updates() == (0, 0)


def test_experts_by_the_simple_method() -> None:
    """The rows of all experts' gradients together, then those of the transpose."""
    ordinary, model = gradients(make("mixtral")), make("mixtral")
    natural(model, method="simple", layers="experts")
    found = gradients(model)
    for name, gradient in ordinary.items():
        if gradient.dim() == 3:
            rows = divided_by_the_others(gradient.reshape(-1, gradient.shape[-1])).view(gradient.shape).mT
            wanted = divided_by_the_others(rows.reshape(-1, rows.shape[-1])).view(rows.shape).mT
            torch.testing.assert_close(found[name], wanted, rtol=1e-7, atol=1e-14)
        else:
            assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_much_smoothing_is_the_ordinary_gradient(family: str, tied: bool) -> None:
    """Every parameter of the model, also those of which natural gradients are made."""
    wanted = gradients(make(family, tie_word_embeddings=tied))
    model = make(family, tie_word_embeddings=tied)
    assert natural(model, alpha=1e12).names
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-9 * gradient.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_only_weights_of_linear_layers_and_experts_change(family: str) -> None:
    wanted = gradients(make(family))
    model = make(family)
    known = natural(model)
    found = gradients(model)
    biases = {name.replace(".weight", ".bias") for name in known.names}
    for name, gradient in wanted.items():
        if name in known.names:
            assert not torch.allclose(found[name], gradient, rtol=1e-2), name
            assert found[name].norm() > 0.01 * gradient.norm(), name
        elif name not in biases:
            assert torch.equal(found[name], gradient), name


def test_the_layers_are_all_that_are_chosen() -> None:
    llama = {"q", "k", "v", "o", "gate", "up", "down"}
    names = natural(make("llama")).names
    assert {name.split(".")[-2].removesuffix("_proj") for name in names} == {*llama, "lm_head"}
    assert natural(make("llama"), layers="mlp").names == [n for n in names if ".mlp." in n]
    frozen = make("llama")
    frozen.lm_head.weight.requires_grad_(False)
    assert "lm_head.weight" not in natural(frozen).names
    experts = [name for name in natural(make("mixtral")).names if "experts" in name]
    assert len(experts) == 4
    assert [n for n in natural(make("gpt2")).names if "c_attn" in n]


def test_a_tied_weight_has_the_heads_natural_gradient_and_the_embeddings_own() -> None:
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (3, 16))

    def of(tied: bool, is_natural: bool) -> dict[str, Tensor]:
        model = make("llama", tie_word_embeddings=tied)
        if not tied:
            model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
        if is_natural:
            natural(model)
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    apart = of(False, True)
    wanted = apart["lm_head.weight"] + apart["model.embed_tokens.weight"]
    torch.testing.assert_close(of(True, True)["model.embed_tokens.weight"], wanted)
    assert not torch.allclose(of(True, False)["model.embed_tokens.weight"], wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(reentrant: bool) -> None:
    plain, checkpointed = make("llama"), make("llama")
    natural(plain)
    natural(checkpointed)
    newer = getattr(checkpointed, "activation_checkpointing_enable", None)
    (newer or checkpointed.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    for model in (plain, checkpointed):
        model.train()
    for step in range(4):
        wanted, found = gradients(plain, step), gradients(checkpointed, step)
        assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows(dtype: torch.dtype) -> None:
    exact, half = make("llama").float(), make("llama").to(dtype)
    exact.load_state_dict({name: value.to(dtype).float() for name, value in exact.state_dict().items()})
    half.load_state_dict(exact.state_dict())
    natural(exact)
    natural(half)
    for step in range(3):
        wanted, found = gradients(exact, step), gradients(half, step)
    for name, gradient in wanted.items():
        assert found[name].dtype == dtype
        assert (found[name].float() - gradient).norm() < 0.05 * gradient.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_trains_fp32_weights(family: str) -> None:
    model = make(family).float()
    natural(model)
    plain = gradients(model)
    model = make(family).float()
    natural(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model)
    for name, gradient in plain.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - gradient).norm() < 0.1 * gradient.norm(), name


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_backward_under_autocast_learns_as_one_outside(family: str) -> None:
    inside, outside = make(family).float(), make(family).float()
    of_inside, of_outside = natural(inside), natural(outside)
    torch.manual_seed(0)
    ids = torch.randint(3, 64, (3, 16))
    for model in (inside, outside):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
            if model is inside:
                loss.backward()
        if model is outside:
            loss.backward()
    head = [known.layers["lm_head.weight"].outputs.learned for known in (of_inside, of_outside)]
    assert torch.equal(head[0].basis, head[1].basis)
    assert torch.equal(head[0].eigenvalues, head[1].eigenvalues)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_scale_of_the_loss_does_not_matter(family: str) -> None:
    """The unit undoes it; without it small gradients are not seen, and a counter says so."""
    big, small, blind = make(family), make(family), make(family)
    of_big, of_small, of_blind = natural(big), natural(small, 48e9), natural(blind, 1.0)
    for step in range(15):
        wanted, found, ordinary = gradients(big, step), gradients(small, step, 1e-9), gradients(blind, step, 1e-9)
        for name, gradient in wanted.items():
            assert (1e9 * found[name] - gradient).norm() < 1e-6 * gradient.norm(), name
    assert of_big.updates()[0] == of_small.updates()[0] == 0
    floored, updates = of_blind.updates()
    outputs = sum(layer.outputs.num_updates for layer in of_blind.layers.values())
    inputs = sum(layer.inputs.num_updates for name, layer in of_blind.layers.items() if "experts" in name)
    assert floored == outputs + inputs
    assert updates == of_big.updates()[1]
    head = "lm_head.weight"
    assert not torch.allclose(1e9 * ordinary[head], wanted[head], rtol=1e-2)


def test_micro_batches_add_up() -> None:
    one, other = make("llama"), make("llama")
    natural(one)
    natural(other)
    wanted = {name: gradient.clone() for name, gradient in gradients(one, 0).items()}
    for name, gradient in gradients(one, 1).items():
        wanted[name] += gradient
    for seed in (0, 1):
        torch.manual_seed(seed)
        ids = torch.randint(3, 64, (3, 16))
        other(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned_is_saved_and_goes_on_in_every_bit(family: str) -> None:
    one, other = make(family), make(family)
    known = natural(one)
    for seed in range(13):
        gradients(one, seed)
    state = known.state_dict()
    fresh = natural(other)
    gradients(other, 99)
    fresh.load_state_dict(state)
    for seed in range(13, 20):
        wanted, found = gradients(one, seed), gradients(other, seed)
        assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def test_a_sample_of_the_rows_is_enough() -> None:
    few, all_rows = make("llama"), make("llama")
    natural(few, max_rows=24)
    natural(all_rows)
    for seed in range(12):
        wanted, found = gradients(all_rows, seed), gradients(few, seed)
    for name, gradient in wanted.items():
        cosine = torch.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.9, (name, cosine)


def test_no_rows_no_gradient() -> None:
    layer = nn.Linear(8, 4)
    of = nn.Sequential(layer)
    natural(of)
    of(torch.zeros(0, 8)).sum().backward()
    assert not layer.weight.grad.any()
    of(torch.ones(3, 8)).sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_rows_that_are_not_finite_are_passed_on_and_not_learned_from() -> None:
    """So that a loss scale which is too large is noticed, and its step left out."""
    model = make("llama")
    known = natural(model)
    gradients(model, 0)
    before = known.state_dict()["lm_head.weight"]["outputs"]["rho"].clone()
    assert not gradients(model, 1, float("inf"))["lm_head.weight"].isfinite().all()
    assert torch.equal(known.layers["lm_head.weight"].outputs.learned.rho, before)
    assert gradients(model, 2)["lm_head.weight"].isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_and_files_of_a_model_have_ordinary_layers(family: str) -> None:
    """And nothing of the engine, to which the unit of the estimates belongs."""

    class Engine:
        def unit(self, rows: int) -> float:
            return float(rows)

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise AssertionError("the engine is copied")

    model = make(family)
    wanted = gradients(make(family))
    types = {name: type(layer).__name__ for name, layer in model.named_modules()}
    known = NaturalGradients(NaturalGradientConfig(), Engine().unit)
    known.adopt(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert {name: type(layer).__name__ for name, layer in other.named_modules()} == types
        assert not any(hasattr(layer, "natural") for layer in other.modules())
        assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(other).items())
    assert not known.layers
    gradients(model)
    assert known.layers.keys() == set(known.names)
    assert {name: type(layer).__name__ for name, layer in model.named_modules()} == types


def test_classes_that_inherit_from_linear_stay_what_they_are() -> None:
    class Named(nn.Linear):
        def name(self) -> str:
            return "named"

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Named(8, 6), Doubled(6, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)))
    wrapped = nn.Linear(4, 4)
    wrapped.forward = nn.Linear.forward.__get__(wrapped)  # as libraries do that hook themselves in
    model.append(wrapped)
    known = natural(model)
    model(torch.randn(5, 8)).sum().backward()
    assert known.names == ["0.weight", "2.weight"]
    assert known.layers.keys() == set(known.names)
    assert model[0].name() == "named"
    assert all(p.grad is not None for p in model.parameters())


def test_what_is_saved_for_backward_is_the_parameter_itself() -> None:
    """ZeRO 3 frees its memory between forward and backward."""
    for layer in (nn.Linear(8, 4), Conv1D(4, 8)):
        of = nn.Sequential(layer)
        natural(of)
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = of(torch.randn(3, 8))
            assert y.grad_fn is not None
            saved = y.grad_fn.saved_tensors  # type: ignore[attr-defined]
            assert sum(tensor is layer.weight for tensor in saved) == 1
            assert sum(tensor.numel() for tensor in saved) == layer.weight.numel() + 24


def test_a_layer_that_is_frozen_later_is_ordinary() -> None:
    of = nn.Sequential(nn.Linear(8, 4))
    known = natural(of)
    of[0].weight.requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    of(x).sum().backward()
    assert of[0].weight.grad is None
    torch.testing.assert_close(of[0].bias.grad, torch.full((4,), 3.0))
    torch.testing.assert_close(x.grad, of[0].weight.sum(0).expand(3, 8))
    known.adopt(of)
    assert known.names == []


def test_a_layer_that_is_used_twice_learns_from_both_uses() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    torch.manual_seed(0)
    model = Twice()
    known = natural(model, alpha=1e12)
    wanted = copy.deepcopy(model)
    x = torch.randn(16, 8)
    for each in (model, wanted):
        each(x).square().sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, wanted.layer.weight.grad)
    assert known.layers["layer.weight"].inputs.num_calls == 2
    model(x[0]).sum().backward()  # one row without a dimension for rows
    assert known.layers["layer.weight"].inputs.num_calls == 4


def test_experts_alone_know_how_many_rows_a_loss_is_the_mean_of() -> None:
    """Without linear layers beside them; and their estimates are those that they have beside linear layers."""
    alone, all_layers = make("mixtral"), make("mixtral")
    of_alone, of_all = natural(alone, layers="experts"), natural(all_layers)
    for seed in range(3):
        wanted, found = gradients(all_layers, seed), gradients(alone, seed)
    assert all("experts" in name for name in of_alone.names)
    for name in of_alone.names:
        torch.testing.assert_close(found[name], wanted[name])
        for one, other in zip(
            (of_alone.layers[name].inputs, of_alone.layers[name].outputs),
            (of_all.layers[name].inputs, of_all.layers[name].outputs),
            strict=True,
        ):
            torch.testing.assert_close(one.learned.eigenvalues, other.learned.eigenvalues)


class Stack(nn.Module):
    """Experts of a rank, which may have room for more."""

    def __init__(self, num_held: int, num_slots: int) -> None:
        super().__init__()
        self.own_experts = tuple(range(num_held))
        self.up = nn.Parameter(torch.zeros(num_slots, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.einsum("eni,eoi->eno", x, self.up[: len(x)]) - x[..., :6]).square().sum()


@pytest.mark.parametrize("num_held", [0, 2])
def test_nothing_is_learned_from_slots_without_an_expert(num_held: int) -> None:
    found = []
    for num_slots in (2, 3):
        stack = Stack(num_held, num_slots).double()
        known = natural(nn.ModuleDict({"experts": stack}), num_samples_history=20.0)
        for seed in range(4):
            torch.manual_seed(seed)
            stack.zero_grad()
            stack(torch.randn(num_held, 7, 8).double()).backward()
        assert stack.up.grad is not None
        assert not stack.up.grad[num_held:].any()
        found.append((stack.up.grad[:num_held], known.state_dict().keys()))
    (gradient, names), (padded, others) = found
    assert torch.equal(gradient, padded)
    assert len(names) == len(others) == (num_held > 0)


def test_experts_whose_parameters_are_replaced_are_adopted_anew() -> None:
    """A layer that has been on another stage; attributes of a parameter may be copied with it."""
    model = make("mixtral")
    known = natural(model)
    wanted = gradients(model)
    fresh = make("mixtral")
    of_fresh = natural(fresh)
    for layer in fresh.modules():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            again = nn.Parameter(parameter.detach().clone())
            vars(again).update(vars(parameter))
            layer.register_parameter(name, again)
    fresh.tie_weights()
    of_fresh.adopt(fresh)
    found = gradients(fresh)
    assert known.names == of_fresh.names
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_last_engine_that_takes_a_model_has_it(family: str) -> None:
    model, other = make(family), make(family)
    first = natural(model)
    second = natural(model)
    wanted = natural(other)
    found, right = gradients(model), gradients(other)
    assert not first.layers
    assert second.layers.keys() == wanted.layers.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in right.items())
