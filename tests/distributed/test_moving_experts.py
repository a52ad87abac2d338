"""Experts that move between steps train as those that stay: every bit of values, masters and moments is the same."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.accidents import Running, accident
from support.expert_models import NATIVE, NativeModel, build, ds_config, random_placement, train
from support.ranks import run_ranks

STEPS = 3
SLOTS = 3
"""Of each rank: half of a layer's elements ends within an expert."""

BF16 = {"bf16": {"enabled": True}}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "zero_allow_untested_optimizer": True}

CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "fp32": ("mixtral", 0, {}, ""),
    "fp32, SGD": ("qwen3_moe", 0, SGD, ""),
    "fp32, own parameters": (NATIVE, 0, {}, ""),
    "bf16, fused": ("mixtral", 0, BF16, "FP16_Optimizer"),
    "ZeRO 1, SGD": ("mixtral", 1, SGD, "DeepSpeedZeroOptimizer"),
    "ZeRO 2, bf16, own parameters": (NATIVE, 2, BF16, "DeepSpeedZeroOptimizer"),
    "bf16": ("mixtral", 0, BF16, "FP16_UnfusedOptimizer"),
    "ZeRO 1, bf16": ("mixtral", 1, BF16, "DeepSpeedZeroOptimizer"),
    "ZeRO 1, bf16, fp32 gradients": ("mixtral", 1, BF16 | FP32_GRADIENTS, "BF16_Optimizer"),
    "ZeRO 1, own parameters": (NATIVE, 1, {}, "DeepSpeedZeroOptimizer"),
    "ZeRO 2": ("mixtral", 2, {}, "DeepSpeedZeroOptimizer"),
}
"""Family, stage, changes of the config, and the wrapper that DeepSpeed chooses."""


def initialize(ep: int, case: str, num_layers: int) -> tuple[Any, list[Any]]:
    """DeepSpeed's own engine, and its expert layers made ours."""
    import deepspeed
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.moe.sharded_moe import MOELayer
    from deepspeed.runtime import engine as deepspeed_engine

    import paceline
    from paceline.moe.auto_ep import RebalancedAutoEPLayer
    from paceline.moe.deepspeed_moe import RebalancedMOELayer

    family, zero, changes, wrapper = CASES[case]
    deepspeed.init_distributed("gloo")
    paceline.repair_deepspeed("autoep-start")
    is_native = family == NATIVE
    if is_native:
        model: Any = NativeModel(ep, SLOTS * ep)
        model.layers = model.layers[:num_layers]
    else:
        name = "num_local_experts" if family == "mixtral" else "num_experts"
        model = build(family, num_hidden_layers=num_layers, **{name: SLOTS * ep})
    config = ds_config(zero, ep, autoep=not is_native, **changes)
    fused = deepspeed_engine.FusedAdam
    if wrapper == "FP16_Optimizer":  # it is for optimizers of DeepSpeed's that are not built here
        deepspeed_engine.FusedAdam = torch.optim.AdamW
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    finally:
        deepspeed_engine.FusedAdam = fused
    found = "" if engine.optimizer is engine.basic_optimizer else type(engine.optimizer).__name__
    assert found == wrapper, found
    layers = []
    for name, module in engine.module.named_modules():
        if isinstance(module, (AutoEPMoELayer, MOELayer)):
            module.__class__ = RebalancedMOELayer if is_native else RebalancedAutoEPLayer
            module.rebalance(name, num_replicas=0, splitting="even", is_last_backward=lambda: True)
            layers.append(module)
    return engine, layers


def logical(layers: Sequence[Any], states: Callable[[nn.Parameter], Any]) -> dict[tuple[str, ...], Tensor]:
    """All that belongs to each expert, put together from all ranks; copies of the same elements must be equal."""
    from torch import distributed as dist

    mine = []
    for layer in layers:
        for slot in range(layer.num_slots):
            expert = layer.placement.devices[layer.rank][slot]
            for part in layer.parts(slot):
                for kind, start, tensor in states(part.parameter):
                    low, high = max(start, part.start), min(start + len(tensor), part.start + part.numel)
                    if low < high:
                        key = (layer.name, part.name, str(expert), kind)
                        mine.append((key, part.numel, low - part.start, tensor[low - start : high - start].clone()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[tuple[str, ...], Tensor] = {}
    for key, numel, start, tensor in (entry for entries in everyone for entry in entries):
        whole = found.setdefault(key, torch.full((numel,), torch.nan, dtype=tensor.dtype))
        place = whole[start : start + len(tensor)]
        assert bool((place.isnan() | (place == tensor)).all()), f"ranks differ in {key}"
        place.copy_(tensor)
    assert not any(bool(whole.isnan().any()) for whole in found.values())
    return found


def scatter(layers: Sequence[Any], states: Any, seed: int, group: Any = None, beside: Any = None) -> dict[str, Any]:
    """Move by a random placement for each layer, as the rebalancer does."""
    from paceline.moe.moving import move_experts

    changes = [
        (layer, random_placement(100 * seed + number, layer.num_experts, layer.size))
        for number, layer in enumerate(layers)
    ]
    moved = move_experts(changes, states, group, beside=beside)
    for layer, placement in changes:
        layer.take_on(placement)
    return {
        "num_bytes": moved.num_bytes,
        "paused_bytes": moved.paused_bytes,
        "s": (moved.transfer_s, moved.seconds),
    }


def train_case(ep: int, case: str, num_layers: int, is_moved: bool) -> tuple[list[float], dict[Any, Tensor], list[Any]]:
    from paceline.moe.moving import states_of

    engine, layers = initialize(ep, case, num_layers)
    states = states_of(engine)
    losses, moves = [], []
    for step in range(STEPS):
        if is_moved:  # before the first step too, when there are no states
            moves.append(scatter(layers, states, step))
        losses += train(engine, [step])
    found: dict[Any, Tensor] = dict(logical(layers, states))
    own = {id(part.parameter) for layer in layers for slot in range(layer.num_slots) for part in layer.parts(slot)}
    found |= {(name,): p.detach().clone() for name, p in engine.module.named_parameters() if id(p) not in own}
    engine.destroy()
    return losses, found, moves


def compare(ep: int, cases: Sequence[str], num_layers: int, round_bytes: int) -> dict[str, dict[str, Any]]:
    from paceline.moe import moving

    moving.ROUND_BYTES = round_bytes
    results = {}
    for case in cases:
        losses, wanted, _ = train_case(ep, case, num_layers, False)
        moved_losses, found, moves = train_case(ep, case, num_layers, True)
        different = [key for key in wanted if not torch.equal(wanted[key], found[key])]
        results[case] = {
            "losses": losses,
            "moved losses": moved_losses,
            "missing": sorted(wanted.keys() ^ found.keys()),
            "different": different,
            "kinds": sorted({key[3] for key in wanted if len(key) == 4}),
            "moves": moves,
        }
    return results


@pytest.mark.parametrize(
    ("ranks", "ep", "num_layers", "round_bytes", "cases"),
    [
        (2, 2, 2, 1 << 28, [*CASES][:6]),
        (4, 2, 1, 1, [*CASES][6:]),  # one layer, which is cut in its middle; rounds of one part each
        (4, 4, 2, 20_000, ["ZeRO 1, bf16"]),
    ],
    ids=["ep2", "ep2-edp2", "ep4"],
)
def test_experts_that_move_train_as_those_that_stay(
    ranks: int, ep: int, num_layers: int, round_bytes: int, cases: list[str]
) -> None:
    for results in run_ranks(compare, ranks, ep, cases, num_layers, round_bytes):
        for case, result in results.items():
            assert result["moved losses"] == result["losses"], case
            assert not result["missing"], case
            assert not result["different"], (case, result["different"])
            moments = {"momentum_buffer"} if "SGD" in case else {"exp_avg", "exp_avg_sq"}
            master = {"master"} if case.startswith(("ZeRO", "bf16")) else set()
            assert set(result["kinds"]) == {"value"} | moments | master, case
            for move in result["moves"]:
                assert move["num_bytes"] == move["paused_bytes"] > 0, case
                assert 0 < move["s"][0] < move["s"][1], case


# -- our pipelines' optimizer ------------------------------------------------------------------------------------------


def stacked_layer(group: Any, dtype: torch.dtype, name: str = "layer") -> Any:
    """Experts that are nothing but two weights, stacked."""
    from paceline.moe.layer import ExpertLayer, SlotPart

    class Stacked(ExpertLayer, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            device = torch.distributed.get_rank(group)
            start = torch.arange(SLOTS, dtype=dtype) + SLOTS * device
            self.weight = nn.Parameter(start[:, None, None].repeat(1, 5, 7))
            self.bias = nn.Parameter(-start[:, None].repeat(1, 5))
            self.set_up(name, SLOTS * 2, group)

        def parts(self, slot: int) -> list[SlotPart]:
            return [SlotPart("weight", self.weight, 35 * slot, 35), SlotPart("bias", self.bias, 5 * slot, 5)]

    return Stacked()


def step_stacked(layer: Any, optimizer: Any, step: int) -> None:
    """Replicas and experts have targets of their own, as if they saw different tokens."""
    loss = torch.zeros(())
    for slot in range(SLOTS):
        expert = layer.placement.devices[layer.rank][slot]
        generator = torch.Generator().manual_seed(100 * step + 10 * (torch.distributed.get_rank() // 2) + expert)
        for part in layer.parts(slot):
            target = torch.rand(part.parameter[slot].shape, generator=generator)
            loss = loss + ((part.parameter[slot].float() - target) ** 2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_sharded(
    zero: int, dtype: torch.dtype, has_stages: bool, *, is_moved: bool, is_beside: bool = False
) -> dict[Any, Tensor]:
    """Two expert-parallel groups: replicas, or stages of a pipeline with other layers.

    Args:
        is_beside: masters and states come after the values.
    """
    from types import SimpleNamespace

    from torch import distributed as dist

    from paceline.moe.experts_ahead import BesideSteps
    from paceline.moe.moving import states_of
    from paceline.optim.sharded import ShardedOptimizer
    from paceline.optim.step_options import StepOptions

    column, row = divmod(dist.get_rank(), 2)
    ep_group = [dist.new_group([0, 1]), dist.new_group([2, 3])][column]
    edp_group = [dist.new_group([0, 2]), dist.new_group([1, 3])][row]
    layer = stacked_layer(ep_group, dtype, f"layer {column if has_stages else 0}")
    basic = torch.optim.AdamW(layer.parameters(), lr=0.1)
    names = {parameter: name for name, parameter in layer.named_parameters()}
    group, replicas = (None, 1.0) if has_stages else (edp_group, 2.0)
    optimizer = ShardedOptimizer(basic, names, StepOptions(group, shard=zero == 1, divisor=replicas))
    states = states_of(SimpleNamespace(optimizer=optimizer, zero_optimization_stage=lambda: zero))
    moving_group = ep_group if has_stages else None
    beside = None
    if is_beside:
        made = [dist.new_group(ranks) for ranks in ([[0, 1], [2, 3]] if has_stages else [[0, 1, 2, 3]])]
        carries = made[column if has_stages else 0]
        later = optimizer.expect_states, optimizer.settle_states
        beside = BesideSteps(carries, *later, has_room=lambda num_bytes: True, disturb=lambda: None)
    for step in range(STEPS):
        for time in range(2 if is_moved else 0):  # one directly after the other
            moved = scatter([layer], states, (10 * column * has_stages + step) * 2 + time, moving_group, beside)
            has_states = step > 0 or dtype != torch.float32
            if moved["num_bytes"]:
                assert (moved["paused_bytes"] < moved["num_bytes"]) == (is_beside and has_states)
        step_stacked(layer, optimizer, step)
    found = logical([layer], states)
    optimizer.destroy()
    return found


SHARDED = [(zero, dtype, False) for zero in (0, 1) for dtype in (torch.float32, torch.bfloat16)]
SHARDED += [(0, torch.float32, True)]


def compare_sharded() -> list[tuple[list[Any], list[str]]]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    results = []
    for case in SHARDED:
        wanted = train_sharded(*case, is_moved=False)
        different = []
        for is_beside in (False, True):
            found = train_sharded(*case, is_moved=True, is_beside=is_beside)
            assert wanted.keys() == found.keys(), "as many experts with as many states"
            different += [(is_beside, key) for key in wanted if not torch.equal(wanted[key], found[key])]
        results.append((different, sorted({key[3] for key in wanted})))
    return results


def test_under_the_optimizer_of_our_pipelines() -> None:
    """Values are right on every rank, whichever rows it steps."""
    for results in run_ranks(compare_sharded, 4):
        for case, (different, kinds) in zip(SHARDED, results, strict=True):
            assert not different, (case, different)
            assert kinds == ["exp_avg", "exp_avg_sq", *(["master"] if torch.bfloat16 in case else []), "value"]


# -- what does not move ------------------------------------------------------------------------------------------------


def refusals() -> dict[str, Any]:
    from types import SimpleNamespace

    import deepspeed
    from torch import distributed as dist

    from paceline.moe.moving import Moved, move_experts, states_of
    from paceline.planning.experts import Placement

    deepspeed.init_distributed("gloo")
    layer = stacked_layer(dist.group.WORLD, torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    states = states_of(SimpleNamespace(optimizer=optimizer, zero_optimization_stage=lambda: 0))
    rank = dist.get_rank()
    before = [p.detach().clone() for p in layer.parameters()]

    def message(*changes: Any) -> str:
        try:
            move_experts(list(changes), states, None)
        except ValueError as error:
            return str(error)
        return ""

    in_order = Placement(((0, 1, 2), (3, 4, 5)))
    swapped = Placement(((0, 1, 3), (2, 4, 5)))
    found: dict[str, Any] = {
        "nothing": move_experts([(layer, in_order)], states, None) == Moved(),
        "other size": message((layer, Placement(((0, 1, 2, 3), (4, 5))))),
        "other placements": message((layer, swapped if rank == 0 else Placement(((0, 4, 2), (3, 1, 5))))),
        "other changes": message(*[(layer, swapped)] * (1 + rank)),
    }
    if rank == 0:  # a rank whose experts no token has reached
        step_stacked(layer, optimizer, 0)
        before = [p.detach().clone() for p in layer.parameters()]
    found["states"] = message((layer, swapped))
    found["unchanged"] = all(map(torch.equal, before, layer.parameters()))
    return found


def test_what_cannot_move_is_refused_on_every_rank() -> None:
    for found in run_ranks(refusals, 2):
        assert found["nothing"]
        assert "the placement owns [4, 2]" in found["other size"]
        assert found["other placements"] == (
            "layer: ranks 0 and 1 of its group have or ask for different placements: give all ranks the same."
        )
        assert found["other changes"] == (
            "ranks ask for the move of different layers: give all ranks the same changes."
        )
        assert re.match(
            r"layer: device 1 has no exp_avg(_sq)? of weight, or not all of it, and others have: experts can move when",
            found["states"],
        )
        assert found["unchanged"]


# -- accidents ---------------------------------------------------------------------------------------------------------


def has_an_accident(what: str) -> None:
    from datetime import timedelta
    from types import SimpleNamespace

    import deepspeed
    from torch import distributed as dist

    from paceline.comm.control import PeerError
    from paceline.moe import moving
    from paceline.planning.experts import Placement

    deepspeed.init_distributed("gloo")
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=30))  # which is not the limit of the start, too
    layer = stacked_layer(group, torch.float32)
    states = moving.states_of(SimpleNamespace(optimizer=None, zero_optimization_stage=lambda: 0))
    if dist.get_rank() == 1:
        moving.carry_out = lambda *args, **kwargs: accident(what)
    try:
        moving.move_experts([(layer, Placement(((0, 1, 3), (2, 4, 5))))], states, group)
    except PeerError as error:
        print(f"paceline: {error}", flush=True)
        os._exit(1)


@pytest.fixture(scope="module")
def jobs_with_accidents() -> Iterator[dict[str, Running]]:
    """They mostly wait, and so run beside each other."""
    begun = {what: Running(has_an_accident, 2, what) for what in ("is killed", "is stopped")}
    yield begun
    for running in begun.values():
        running.kill()


@pytest.mark.parametrize("what", ["is killed", "is stopped"])
def test_a_rank_that_is_lost_on_the_way_ends_the_others(what: str, jobs_with_accidents: dict[str, Running]) -> None:
    ended = jobs_with_accidents[what].end(stopped=1 if what == "is stopped" else None)
    assert ended.codes == [1, -9]
    assert ended.causes == [
        "paceline: rank 0 lost another rank while experts were being moved; that rank's own error, if it could still "
        "give one, is the cause. Go on from the last checkpoint."
    ]
