"""Copies of experts: the tokens of an expert are shared, and training is that of one expert, up to rounding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from support import expert_models as models
from support.ranks import run_ranks

STEPS = 8


def with_copies(seed: int, num_experts: int, num_ranks: int, num_replicas: int) -> Any:
    """A random placement with random copies; slots for copies may stay empty."""
    from paceline.planning.experts import Placement

    chance = random.Random(seed)
    owned = models.random_placement(seed, num_experts, num_ranks).devices
    devices = []
    for held in owned:
        others = [expert for expert in range(num_experts) if expert not in held]
        devices.append((*held, *chance.sample(others, chance.randint(0, num_replicas))))
    return Placement(tuple(devices), tuple(map(len, owned)))


def held_experts(layer: Any) -> dict[int, tuple[bool, list[torch.Tensor]]]:
    """Of each expert here: whether it is a copy, and its weights."""
    found = {}
    layer.replicas.settle()
    for slot, expert in enumerate(layer.placement.devices[layer.rank]):
        copy = slot - layer.num_slots
        own = [part.parameter.detach()[slot] for part in layer.parts(slot)] if copy < 0 else []
        found[expert] = (copy >= 0, [weight.clone() for weight in own or [w[copy] for w in layer.replicas.copies]])
    return found


def copies_job(family: str, zero: int, ep: int, accumulation: int, splitting: str) -> dict[str, Any]:
    import paceline
    from paceline.runtime.initialize import start_distributed

    paceline.repair_deepspeed()
    start_distributed()
    stock = models.engine_for(family, models.ds_config(zero, ep, accumulation))
    micro_steps = range(STEPS * accumulation)
    result: dict[str, Any] = {
        "stock": models.train(stock, micro_steps),
        "stock weights": dict(stock.module.state_dict()),
    }

    section = {"moe": {"rebalance_every": 0, "replicas": 2, "splitting": splitting}}
    engine = models.engine_for(family, models.ds_config(zero, ep, accumulation, paceline=section))
    result |= {"ours": [], "unequal": [], "copies": 0}
    for step in range(STEPS):
        if step % 3 == 1:
            placements = {
                name: with_copies(10 * step + number, layer.num_experts, ep, 2)
                for number, (name, layer) in enumerate(engine.expert_layers.items())
            }
            engine.place_experts(placements)
        result["ours"] += models.train(engine, micro_steps[step * accumulation : (step + 1) * accumulation])
        for name, layer in engine.expert_layers.items():
            everyone: list[Any] = [None] * layer.size
            torch.distributed.all_gather_object(everyone, held_experts(layer), group=layer.group)
            owners = {e: weights for held in everyone for e, (is_copy, weights) in held.items() if not is_copy}
            for expert, weights in ((e, w) for held in everyone for e, (is_copy, w) in held.items() if is_copy):
                result["copies"] += 1
                if not all(map(torch.equal, weights, owners[expert])):
                    result["unequal"].append((step, name, expert))
    with engine.rebalancer.in_order():
        result["weights"] = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    return result


@pytest.mark.parametrize(
    ("family", "zero", "ep", "ranks", "accumulation", "splitting"),
    [
        ("mixtral", 0, 2, 2, 2, "even"),
        ("mixtral", 2, 2, 2, 2, "even"),
        ("qwen3_moe", 1, 2, 4, 1, "planned"),
        ("mixtral", 0, 4, 4, 1, "fresh"),
    ],
)
def test_copies_train_as_one_expert(
    family: str, zero: int, ep: int, ranks: int, accumulation: int, splitting: str
) -> None:
    for rank in run_ranks(copies_job, ranks, family, zero, ep, accumulation, splitting):
        assert rank["unequal"] == []
        assert rank["copies"] > STEPS
        torch.testing.assert_close(rank["ours"], rank["stock"], rtol=1e-4, atol=1e-4)
        for name, weight in rank["stock weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-2, atol=1e-3, msg=name)


def resume_job(directory: str) -> dict[str, Any]:
    import paceline
    from paceline.planning.experts import Placement
    from paceline.runtime.initialize import start_distributed

    paceline.repair_deepspeed()
    start_distributed()
    section = {"moe": {"rebalance_every": 0, "replicas": 1}}
    runs = []
    for number in range(2):
        engine = models.engine_for("mixtral", models.ds_config(1, 2, 2, paceline=section))
        if number == 0:
            models.train(engine, range(4))
            placement = Placement(((0, 1, 2, 6, 7), (3, 4, 5, 7, 0)), (4, 4))
            engine.place_experts(dict.fromkeys(engine.expert_layers, placement))
            engine.save_checkpoint(directory, tag="two")
        else:
            engine.load_checkpoint(directory)
        runs.append((engine.rebalancer.placements(), models.train(engine, range(4, 8))))
    return {"saved": runs[0], "resumed": runs[1]}


def test_copies_are_there_again_after_a_resume(tmp_path: Path) -> None:
    for rank in run_ranks(resume_job, 2, str(tmp_path)):
        placements, _ = rank["saved"]
        assert any(len(held) > 4 for told in placements.values() for held in told["placement"])
        assert rank["resumed"] == rank["saved"]


class Waits:
    """Counts how often the host would wait for a device: a number, a list or a copy of a tensor is asked for."""

    ASKED = ("tolist", "item", "cpu", "__int__", "__float__", "__bool__", "__index__", "nonzero", "numpy")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> Waits:
        self._before = {name: getattr(torch.Tensor, name) for name in self.ASKED}
        for name, function in self._before.items():

            def counted(*args: Any, name: str = name, function: Any = function, **kwargs: Any) -> Any:
                self.calls.append(name)
                return function(*args, **kwargs)

            setattr(torch.Tensor, name, counted)
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(torch.Tensor, name, function)


def waits_of_a_layer() -> dict[tuple[str, bool, bool], list[str]]:
    """By splitting, with copies or not, and backward or not: what the host asked a layer's tensors for."""
    import torch.distributed as dist

    from paceline.hf.family_configs import causal_lm_configs, tiny_configs
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage
    from paceline.moe.hf_experts import take_share
    from paceline.planning.experts import Placement

    dist.init_process_group("gloo")
    (config,) = (one for one in causal_lm_configs() if one.model_type == "mixtral")
    found = {}
    for splitting in ("even", "planned"):
        model = load_stage(None, tiny_configs(config)[0], Cut.whole(4)).model
        model.set_experts_implementation("grouped_mm")  # which itself asks for nothing
        layer = next(iter(take_share(model, dist.get_rank(), 2).values()))
        layer.begin("layer", dist.group.WORLD, num_replicas=1, splitting=splitting)
        hidden = torch.randn(6, layer.gate_up_proj.shape[-1], requires_grad=True)
        chosen = torch.stack([torch.randperm(layer.num_experts)[:2] for _ in range(6)])
        first, second = layer.placement.devices
        copied = Placement(((*first, second[0]), (*second, first[0])), (layer.num_slots,) * 2)
        for placement in (layer.placement, copied):
            layer.take_on(placement, [1.0] * layer.num_experts)
            layer.fetch()
            with Waits() as forward:
                out = layer(hidden, chosen, torch.rand(6, 2))
            with Waits() as backward:
                out.sum().backward()
            has_copies = layer.table.has_copies
            found[splitting, has_copies, False] = forward.calls
            found[splitting, has_copies, True] = backward.calls
    return found


def test_a_layer_makes_the_host_wait_once() -> None:
    """For what is to be sent and received; not a second time for what copies get, and not in the backward."""
    for rank in run_ranks(waits_of_a_layer, 2):
        assert rank == {
            (splitting, has_copies, backward): [] if backward else ["tolist"]
            for splitting in ("even", "planned")
            for has_copies in (False, True)
            for backward in (False, True)
        }
