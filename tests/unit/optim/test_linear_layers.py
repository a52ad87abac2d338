"""Gradients of weights that are left for later are those of an ordinary backward, in every bit."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from paceline.config.natural_gradient_keys import NaturalGradientConfig
from paceline.hf.activations import SavedStorages
from paceline.optim.linear_layers import Deferral
from paceline.optim.natural_layers import NaturalGradients

D_IN, D_OUT = 24, 40


def conv1d() -> nn.Module:
    return Conv1D(D_OUT, D_IN)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "bias": lambda: nn.Linear(D_IN, D_OUT),
    "no bias": lambda: nn.Linear(D_IN, D_OUT, bias=False),
    "conv1d": conv1d,
    "bf16": lambda: nn.Linear(D_IN, D_OUT, dtype=torch.bfloat16),
    "fp64": lambda: nn.Linear(D_IN, D_OUT, dtype=torch.float64),
}


def block(make: Callable[[], nn.Module]) -> nn.Module:
    """Two layers, with something between them that is not deferred."""
    torch.manual_seed(3)
    first = make()
    dtype = next(first.parameters()).dtype
    return nn.Sequential(first, nn.LayerNorm(D_OUT, dtype=dtype), nn.GELU(), nn.Linear(D_OUT, 8, dtype=dtype))


def adopted(model: nn.Module, **kwargs: Any) -> Deferral:
    deferral = Deferral()
    deferral.adopt(model, **kwargs)
    deferral.is_on = True
    return deferral


def micro_batches(dtype: torch.dtype, shape: tuple[int, ...] = (2, 5), count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, D_IN, generator=generator).to(dtype).requires_grad_() for _ in range(count)]


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return found  # type: ignore[return-value]


def loss_of(out: Tensor) -> Tensor:
    return (out.float() ** 2).mean()


@pytest.mark.parametrize("shape", [(2, 5), (7,), (1, 1)], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_every_bit_is_as_in_a_whole_backward(name: str, shape: tuple[int, ...]) -> None:
    whole, split = block(MAKERS[name]), block(MAKERS[name])
    dtype = next(whole.parameters()).dtype
    deferral = adopted(split)
    left = []
    ours, theirs = micro_batches(dtype, shape), micro_batches(dtype, shape)
    for x, y in zip(ours, theirs, strict=True):
        loss_of(whole(y)).backward()
        out = split(x)
        assert torch.equal(out, whole(y))
        with deferral.collecting() as deferred:
            loss_of(out).backward()
        left.append(deferred)
        assert torch.equal(x.grad, y.grad)
    assert split[0].weight.grad is None
    assert split[1].weight.grad is not None, "what cannot be deferred has its gradient"
    for deferred in left:
        assert len(deferred) == 2
        deferred.run()
        assert len(deferred) == 0
    for ours_, theirs_ in zip(gradients(split), gradients(whole), strict=True):
        assert torch.equal(ours_, theirs_)


def test_memory_of_what_is_left() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    with adopted(model).collecting() as deferred:
        (model(torch.randn(5, 4)) * torch.randn(5, 2)).sum().backward()
    assert deferred.num_bytes == 4 * 5 * (4 + 8 + 8 + 2), "inputs and gradients of both layers' outputs"
    deferred.run()
    assert deferred.num_bytes == 0


@pytest.mark.parametrize("is_on", [False, True])
def test_a_whole_backward_defers_nothing(is_on: bool) -> None:
    whole, split = block(MAKERS["bias"]), block(MAKERS["bias"])
    adopted(split).is_on = is_on
    for x, y in zip(micro_batches(torch.float32), micro_batches(torch.float32), strict=True):
        loss_of(whole(y)).backward()
        loss_of(split(x)).backward()
    for ours, theirs in zip(gradients(split), gradients(whole), strict=True):
        assert torch.equal(ours, theirs)


def test_a_layer_whose_backward_is_whole_costs_no_function_of_ours() -> None:
    """After a schedule that split backwards, others run as if it had not been."""
    model = nn.Sequential(nn.Linear(4, 4))
    deferral = adopted(model)
    names = []
    for is_on in (True, False):
        deferral.is_on = is_on
        names.append(type(model(torch.ones(2, 4)).grad_fn).__name__)
    assert names == ["_LinearFunctionBackward", "AddmmBackward0"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_layer_is_deferred_once(use_reentrant: bool) -> None:
    whole, split = block(MAKERS["bias"]), block(MAKERS["bias"])
    deferral = adopted(split)
    (x,), (y,) = micro_batches(torch.float32, count=1), micro_batches(torch.float32, count=1)
    loss_of(whole(y)).backward()
    out = checkpoint(split, x, use_reentrant=use_reentrant)
    with deferral.collecting() as deferred:
        loss_of(out).backward()
    assert len(deferred) == 2
    deferred.run()
    for ours, theirs in zip(gradients(split), gradients(whole), strict=True):
        assert torch.equal(ours, theirs)


def test_hooks_see_the_gradient_when_it_is_there() -> None:
    model, seen = block(MAKERS["bias"]), list[Any]()
    deferral = adopted(model)
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    (x,) = micro_batches(torch.float32, count=1)
    with deferral.collecting() as deferred:
        loss_of(model(x)).backward()
    assert not seen
    deferred.run()
    assert len(seen) == 1
    assert torch.equal(seen[0], model[0].weight.grad)


def test_what_is_left_for_later_keeps_no_graph() -> None:
    """The graph would keep the stage's input and its gradient."""
    model = block(MAKERS["bias"])
    deferral = adopted(model)
    x = torch.randn(2, D_IN, requires_grad=True)
    inputs = weakref.ref(x)
    with deferral.collecting() as deferred:
        loss_of(model(x * 2)).backward()
    del x
    assert inputs() is None
    assert len(deferred) == 2


def test_frozen_layers_are_left_alone() -> None:
    model = block(MAKERS["bias"]).requires_grad_(False)
    adopted(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.LayerNorm, nn.GELU, nn.Linear]


def with_head(vocabulary: int) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(vocabulary, 4), nn.Linear(4, 12), nn.Linear(12, 4), nn.Linear(4, vocabulary))


@pytest.mark.parametrize(("vocabulary", "is_left"), [(4 * 32 - 4, True), (4 * 32 - 3, False)])
def test_a_head_is_deferred_unless_it_keeps_much_more_than_the_others(vocabulary: int, is_left: bool) -> None:
    model = with_head(vocabulary)
    deferral = adopted(model, heads=[model[3]])
    with deferral.collecting() as deferred:
        loss_of(model(torch.arange(3))).backward()
    assert len(deferred) == (3 if is_left else 2)
    assert (model[3].weight.grad is None) is is_left


@pytest.mark.parametrize("embeds", [False, True])
def test_a_head_that_is_tied_to_an_embedding_in_use_is_not_deferred(embeds: bool) -> None:
    model = with_head(40)
    model[3].weight = model[0].weight
    deferral = adopted(model, heads=[model[3]])
    deferral.adopt(model, [model[3]], embeds=embeds)  # once more: the stage has got its embedding
    with deferral.collecting() as deferred:
        loss_of(model(torch.arange(3))).backward()
    assert len(deferred) == (2 if embeds else 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_leaves_no_more_than_a_micro_batch_has_kept_of_it(dtype: torch.dtype) -> None:
    """`paceline fit` and the planner count with that."""
    head = nn.Linear(8, 300, bias=False, dtype=dtype)
    deferral, kept = adopted(head), SavedStorages(head)
    with kept.hooks:
        logits = head(torch.randn(7, 8).to(dtype).requires_grad_())
        loss = nn.functional.cross_entropy(logits.float(), torch.arange(7))
    with deferral.collecting() as deferred:
        loss.backward()
    assert len(deferred) == 1
    assert deferred.num_bytes == dtype.itemsize * 7 * (8 + 300)
    assert deferred.num_bytes <= kept.num_bytes


def test_a_head_in_a_wrapper_is_known_by_its_weight() -> None:
    model = with_head(4000)
    model[3] = nn.Sequential(model[3])  # as PEFT has one that it trains whole
    adopted(model, heads=[model[3]])
    assert type(model[3][0]) is nn.Linear


def test_a_frozen_bias_stays_without_a_gradient() -> None:
    model = block(MAKERS["bias"])
    model[0].bias.requires_grad_(False)
    deferral = adopted(model)
    (x,) = micro_batches(torch.float32, count=1)
    with deferral.collecting() as deferred:
        loss_of(model(x)).backward()
    deferred.run()
    assert model[0].bias.grad is None
    assert model[0].weight.grad is not None


def test_natural_gradients_are_the_same_later() -> None:
    """Estimates see the same micro-batches in the same order."""
    found = []
    for defers in (False, True):
        model = block(MAKERS["bias"])
        NaturalGradients(NaturalGradientConfig(), float).adopt(model)
        deferral = adopted(model) if defers else Deferral()
        left = []
        for x in micro_batches(torch.float32, (4, 16), 14):
            if not defers:
                loss_of(model(x)).backward()
                continue
            with deferral.collecting() as deferred:
                loss_of(model(x)).backward()
            left.append(deferred)
        for deferred in left:
            deferred.run()
        found.append(gradients(model))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_copies_and_files_have_ordinary_layers() -> None:
    model = block(MAKERS["bias"])
    adopted(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is nn.Linear
        assert "deferral" not in vars(other[0])


def test_layers_behind_inputs_without_gradients_are_deferred_too() -> None:
    whole, split = block(MAKERS["bias"]), block(MAKERS["bias"])
    deferral = adopted(split)
    x = torch.randn(2, 5, D_IN)
    loss_of(whole(x)).backward()
    with deferral.collecting() as deferred:
        loss_of(split(x)).backward()
    assert len(deferred) == 2
    deferred.run()
    for ours, theirs in zip(gradients(split), gradients(whole), strict=True):
        assert torch.equal(ours, theirs)
