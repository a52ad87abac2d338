"""Hugging Face's experts by slots: the same numbers as transformers' own, wherever an expert lies."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from paceline.hf.family_configs import tiny_configs
from paceline.hf.stage import Cut
from paceline.hf.weights import load_stage, skeleton
from paceline.moe.hf_experts import check_experts, experts_of, take_share
from paceline.moe.layer import ExpertLayer
from paceline.planning.experts import Placement

ORDER = (2, 0, 3, 1)


def model_of(family: str, implementation: str) -> Any:
    model = load_stage(None, tiny_configs(type(AutoConfig.for_model(family)))[0], Cut.whole(4)).model
    model.set_experts_implementation(implementation)
    return model.train()


def spread(model: Any, order: tuple[int, ...]) -> Any:
    """All experts on one rank, in slots of this order."""
    spread = copy.deepcopy(model)
    for name, layer in take_share(spread, 0, 1).items():
        for parameter in layer.parameters():
            parameter.data = parameter.data[list(order)]
        layer.begin(name, None)
        layer.take_on(Placement((order,)))
    return spread


def learn(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_same_numbers_in_every_order(family: str, implementation: str) -> None:
    model = model_of(family, implementation)
    in_order, shuffled = spread(model, (0, 1, 2, 3)), spread(model, ORDER)
    (loss, own), (first, gradients), (second, moved) = learn(model), learn(in_order), learn(shuffled)
    assert loss == first == second
    assert own.keys() == gradients.keys() == moved.keys()
    of_experts = {f"{name}.{leaf}" for name, e in experts_of(model).items() for leaf, _ in e.named_parameters()}
    assert of_experts <= own.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, own[name], rtol=1e-5, atol=1e-7, msg=name)
        assert torch.equal(gradient[list(ORDER)] if name in of_experts else gradient, moved[name]), name
    for layer, other in zip(experts_of(in_order).values(), experts_of(shuffled).values(), strict=True):
        assert int(layer.routed.sum()) == 2 * 12 * 2
        assert torch.equal(layer.routed, other.routed), "loads are by the experts' numbers in the model"


@pytest.mark.parametrize(("rank", "size", "rows"), [(1, 2, [2, 3]), (0, 3, [0, 1]), (1, 3, [2, None])])
def test_a_share_keeps_names_and_its_rows(rank: int, size: int, rows: list[int | None]) -> None:
    model = model_of("mixtral", "grouped_mm")
    whole = copy.deepcopy(model).state_dict()
    layers = take_share(model, rank, size)
    assert list(layers) == [f"model.layers.{number}.mlp.experts" for number in range(4)]
    state = model.state_dict()
    assert state.keys() == whole.keys()
    for name, tensor in state.items():
        if ".experts." in name:
            wanted = [torch.zeros_like(tensor[0]) if row is None else whole[name][row] for row in rows]
            assert torch.equal(tensor, torch.stack(wanted)), name
        else:
            assert torch.equal(tensor, whole[name]), name
    weight = layers["model.layers.0.mlp.experts"].down_proj
    assert weight.untyped_storage().nbytes() == weight.nbytes, "the memory of the other share is free"


def test_a_rank_owns_and_copies_at_most_what_it_has_slots_for() -> None:
    layer: Any = SimpleNamespace(name="mlp", num_experts=5, size=3, num_slots=2, num_replicas=1)
    for devices, owned in (((0, 1, 2), (3, 4), (2,)), (2, 2, 1)), (((4,), (2, 3), (0, 1)), ()):
        ExpertLayer.check(layer, Placement(devices, owned))
    right = r"^mlp has 2 own slots and 1 for copies on each rank, the placement owns "
    with pytest.raises(ValueError, match=right + re.escape("[3, 2, 0] and copies [0, 0, 0]: a rank can own at most 2")):
        ExpertLayer.check(layer, Placement(((0, 1, 2), (3, 4), ())))
    with pytest.raises(
        ValueError, match=right + re.escape("[2, 2, 1] and copies [0, 0, 2]: ") + ".*raise paceline.moe"
    ):
        ExpertLayer.check(layer, Placement(((0, 1), (2, 3), (4, 0, 1)), (2, 2, 1)))


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("llama", 2, "LlamaForCausalLM (model type 'llama') has no experts that can lie on several ranks; leave "),
        (
            "dbrx",
            2,
            "transformer.blocks.0.ffn.experts of DbrxForCausalLM (model type 'dbrx') is a DbrxExperts, which does not "
            "keep its experts as transformers' experts interface does, and they cannot lie on several ranks; leave ",
        ),
        (
            "mixtral",
            5,
            "it must not exceed the number of experts, and model.layers.0.mlp.experts has 4; choose fewer ranks.",
        ),
    ],
    ids=["none", "of another kind", "too many"],
)
def test_refused_before_anything_is_loaded(family: str, size: int, message: str) -> None:
    whole = skeleton(tiny_configs(type(AutoConfig.for_model(family)))[0])
    with pytest.raises(ValueError, match=f"^{re.escape(f'expert_parallel.autoep_size is {size}: {message}')}"):
        check_experts(whole, size)
