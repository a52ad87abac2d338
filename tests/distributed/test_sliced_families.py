"""Every family of which transformers has a plan for tensor parallelism computes in slices what it computes whole."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from support.ranks import run_ranks

ROUNDING = 2e-4
"""Largest difference of gradients, by the largest of their tensor. Linear attention adds to what is rounded."""


def differences() -> dict[str, Any]:
    """By family, on each of two ranks: the largest difference of loss and gradients, or why layers stay whole."""
    from paceline.hf.anatomy import UnsupportedModelError, anatomy_of
    from paceline.hf.family_configs import causal_lm_configs, tiny_configs
    from paceline.hf.sliced_layers import Slicing, plan_of_slices
    from paceline.hf.weights import skeleton

    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for config_class in causal_lm_configs():
        if not getattr(config_class, "base_model_tp_plan", None):
            continue
        try:
            config = tiny_configs(config_class)[0]
            model = skeleton(config)
            anatomy = anatomy_of(model)
        except Exception:  # no pipeline at all, as other tests say
            continue
        try:
            plan = plan_of_slices(model, anatomy, 2)
        except UnsupportedModelError as error:
            found[config_class.model_type] = str(error)
            continue
        slicing = Slicing(dist.get_rank(), 2, dist.group.WORLD)
        found[config_class.model_type] = difference(type(model)(config).train(), anatomy, plan, slicing)
    return found


def difference(model: Any, anatomy: Any, plan: dict[str, str], slicing: Any) -> float:
    from paceline.hf.sliced_layers import PARTIAL, SLICE, slice_layer

    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    ids = torch.randint(3, model.config.get_text_config().vocab_size - 1, (2, 12), generator=generator)
    sliced = copy.deepcopy(model)
    for layer in anatomy.layers_of(sliced):
        slice_layer(layer, plan, slicing)
    losses = []
    for each in (model, sliced):
        losses.append(each(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    whole, own = (loss.item() for loss in losses)
    worst = abs(whole - own) / abs(whole)
    for wanted, found in zip(model.parameters(), sliced.parameters(), strict=True):
        assert (wanted.grad is None) == (found.grad is None)
        if wanted.grad is None:
            continue
        gradient = wanted.grad
        if hasattr(found, SLICE):
            gradient = gradient.chunk(2, getattr(found, SLICE).dim)[slicing.rank]
        elif hasattr(found, PARTIAL):
            dist.all_reduce(found.grad)
        worst = max(worst, ((gradient - found.grad).abs().max() / wanted.grad.abs().max().clamp(min=1e-12)).item())
    return worst


def test_layers_in_slices_of_all_families() -> None:
    ranks = run_ranks(differences, 2)
    exact = {family for family, found in ranks[0].items() if isinstance(found, float)}
    for rank in ranks:
        wrong = {family: rank[family] for family in exact if not rank[family] < ROUNDING}
        assert not wrong
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "olmo2", "phi3", "gpt_neox", "glm4"} <= exact
    whole = {family: found for family, found in ranks[0].items() if family not in exact}
    assert whole.keys() >= {"apertus", "doge", "mixtral", "deepseek_v3"}
    assert all("cannot have its layers in slices" in found for found in whole.values())
