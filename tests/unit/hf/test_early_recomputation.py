"""Activations that are computed again before their backward: bits, how often, and what is kept."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.hf.early_recomputation import Checkpoints, checkpointed, is_repeated, recompute_early
from paceline.hf.stage import recompute_layers
from paceline.measure.recorder import SavedBytes

CPU = torch.device("cpu")
LAYERS = 3


def made(*, recomputes: bool = True) -> Any:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        attention_dropout=0.3,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    if recomputes:
        recompute_layers(model)
    return model


def trained(model: Any, way: str) -> list[torch.Tensor]:
    """Loss and gradients of one micro-batch."""
    ids = torch.arange(18).reshape(2, 9)
    torch.manual_seed(1)
    own = Checkpoints(CPU)
    if way == "plain":
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    else:
        with own.collecting():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    if way == "early":
        own.recompute()
        torch.rand(3)  # whatever is drawn meanwhile
    with own.around_backward():
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.rand(())]


def test_every_bit_is_that_of_a_backward_that_computes_them_itself() -> None:
    """With dropout, whose masks are drawn again as they were."""
    wanted = trained(made(recomputes=False), "plain")[:-1]
    for way in ("plain", "late", "early"):
        found = trained(made(), way)[:-1]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), way
    assert torch.equal(trained(made(), "plain")[-1], trained(made(), "late")[-1]), "other numbers are drawn afterwards"


@pytest.mark.parametrize("way", ["late", "early"])
def test_each_layer_is_computed_again_once_the_last_one_first(way: str) -> None:
    model, ran = made(), list[tuple[int, bool]]()
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: ran.append((index, is_repeated())))
    trained(model, way)
    assert ran == [*((index, False) for index in range(LAYERS)), *((index, True) for index in reversed(range(LAYERS)))]


def test_layers_without_a_backward_are_not_computed_again() -> None:
    model, ran = made(), Counter[int]()
    model.get_input_embeddings().requires_grad_(False)
    model.disable_input_require_grads()
    model.model.layers[0].requires_grad_(False)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: ran.update([index]))
    trained(model, "early")
    assert ran == {0: 1, 1: 2, 2: 2}


def test_bytes_are_those_that_the_layers_keep_without_checkpoints() -> None:
    ids = torch.arange(18).reshape(2, 9)
    model, own = made(), Checkpoints(CPU)
    counted = Checkpoints(CPU, model)
    assert own.num_bytes is None
    with counted.collecting():
        out = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert counted.num_bytes == 0.0
    with counted.around_backward():
        out.sum().backward()
    each, layer_bytes = made(recomputes=False), Counter[int]()
    for index, layer in enumerate(each.model.layers):
        layer.forward = partial(within, layer.forward, each, layer_bytes, index)
    each.model(input_ids=ids, use_cache=False)
    assert counted.num_bytes == sum(layer_bytes.values()) > 0


def within(forward: Any, model: nn.Module, found: Counter[int], index: int, *args: Any, **kwargs: Any) -> Any:
    with SavedBytes(model, CPU) as saved:
        out = forward(*args, **kwargs)
    found[index] += saved.num_bytes
    return out


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_nothing_is_left_when_the_backward_is_done(no_collector: None) -> None:
    """Without a garbage collector, as in a step."""
    model = made()
    for way in ("late", "early"):
        trained(model, way)
    left = [one for one in gc.get_objects() if type(one).__name__ == "_CheckpointFrame"]
    assert not left


def test_checkpoints_with_options_of_ones_own_stay() -> None:
    model = made()
    first, second, _ = model.model.layers
    own = first._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, determinism_check="none")
    second._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    recompute_early(model)
    assert first._gradient_checkpointing_func is own
    assert second._gradient_checkpointing_func is checkpointed


@pytest.mark.parametrize("options", [{}, {"preserve_rng_state": True}])
def test_layers_train_where_nothing_before_them_does(options: dict[str, Any]) -> None:
    """As on a stage behind one that is frozen: a reentrant checkpoint gives no gradient where no input asks for one."""
    model = made()
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True, **options)
    model.disable_input_require_grads()
    model.get_input_embeddings().requires_grad_(requires_grad=False)
    recompute_early(model)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.model.layers.parameters())
