"""Activations that are kept, or computed again before their gradient arrives: no number depends on it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import pytest
import torch

from paceline.runtime import early_room
from paceline.runtime.early_room import EarlyRoom
from support.jobs import LAYERS, MICRO_BATCHES, ds_config, model_config, step_batches
from support.ranks import OneAfterAnother, on, run_ranks

STEPS = 3


@dataclass(frozen=True)
class Case:
    """How a model is trained whose layers are recomputed, but for when they are."""

    schedule: Any = "1f1b"
    stages: int = 2
    replicas: int = 1
    family: str = "llama"
    data: str = "ragged"
    changes: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    order: str | None = None
    lora: bool = False
    is_early: bool = True

    @property
    def model(self) -> Any:
        config = model_config(self.family, **{"tie_word_embeddings": False, **self.changes})
        if not self.lora:
            return config
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config)
        return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))

    @property
    def config(self) -> dict[str, Any]:
        pipeline = {"stages": self.stages, "schedule": self.schedule, "partition": "uniform", **self.pipeline}
        return ds_config(
            gradient_accumulation_steps=MICRO_BATCHES // self.replicas,
            gradient_clipping=0.05,
            paceline={"pipeline": pipeline, **self.section},
            **{"pipeline": {"activation_checkpoint_interval": 1}, **self.options},
        )


LATE, SOME, ALL = "late", "some", "all"
"""Nothing is kept, something is and the rest computed again early, or all is kept."""


class Limited(EarlyRoom):
    """Has half of the room that is missing for all, beside what it takes to compute all again early."""

    def _decide(self, program: Any, most: Any) -> Any:
        def decided(room: float) -> Any:
            self._room_bytes = lambda: room
            self._known.clear()
            return super(Limited, self)._decide(program, most)

        def least(suffices: Callable[[Any], bool]) -> float:
            low, high = 0.0, 1e12
            while high - low > 1:
                middle = (low + high) / 2
                low, high = (low, middle) if suffices(decided(middle)) else (middle, high)
            return high

        if decided(1e12) is None:
            return None
        whole = least(lambda found: set(found.shares.values()) == {1.0})
        return decided((least(lambda found: found.found.is_early) + whole) / 2)


def trained(case: Case, room: str) -> dict[str, Any]:
    import paceline
    from paceline.runtime.engine import PacelineEngine

    PacelineEngine.transport_order = case.order
    torch.manual_seed(3)
    engine, *_ = paceline.initialize(model=case.model, config=case.config)
    if room == LATE or engine.executor.early_room is None:
        engine.executor.early_room = None
    elif room == SOME:
        early_room.MEASURED_ANEW = inf
        room_of_all = engine.executor.early_room
        engine.executor.early_room = Limited(engine.meter, lambda: 0.0, agree=room_of_all._agree)
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    found: dict[str, Any] = {"losses": [], "norms": [], "early": [], "again": [], "forwards": []}
    *_, mlp = (module for name, module in engine.module.named_modules() if name.endswith(".mlp"))
    seen = mlp if "compile" not in case.pipeline else torch.nn.Identity()  # a graph would be made for each number
    hook = seen.register_forward_pre_hook(lambda *_: found["forwards"].append(step))
    for step in range(STEPS):
        batches = step_batches(step, case.data)[replica:MICRO_BATCHES:replicas]
        found["losses"].append(engine.train_batch(iter(batches)).item())
        found["norms"].append(engine.grad_norm())
        found["early"].append(engine.executor.recomputes_early)
        spans = engine.meter.recorder.steps()[-1].spans
        found["again"].append(sum(span.kind == "R" for span in spans))
    hook.remove()
    found["evaluated"] = engine.evaluate(step_batches(7, case.data)[:3])
    found["weights"] = {engine.module.state_name(n): p.detach().clone() for n, p in engine.module.named_parameters()}
    engine.destroy()
    return found


def all_ways(case: Case) -> dict[str, dict[str, Any]]:
    return {room: trained(case, room) for room in (LATE, SOME, ALL)}


EXPERTS, SLICES = "experts on two ranks", "layers in slices on two ranks"
SPREAD = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
DROPOUT = {"resid_pdrop": 0.2, "attn_pdrop": 0.2, "embd_pdrop": 0.2}
CASES = {
    "1f1b, ZeRO 1, two replicas": Case(replicas=2, options={"zero_optimization": {"stage": 1}}),
    "groups, three stages, paired": Case({"type": "kfkb", "k": 2}, stages=3, order="paired"),
    "split backwards of experts": Case("zbh1", family="mixtral"),
    "two stages a rank": Case("zbv"),
    "interleaved, dropout": Case("interleaved", family="gpt2", changes=DROPOUT),
    "both directions": Case({"type": "multidirection", "staleness": 0}),
    "LoRA, bf16": Case(lora=True, options={"bf16": {"enabled": True}}),
    "natural gradients, autocast": Case(
        section={"natural_gradient": {"rank_in": 8, "rank_out": 8}},
        options={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    ),
    "halves of layers": Case(pipeline={"half_layers": True, "partition": [0, 4, 2 * LAYERS + 2]}),
    "some layers": Case(pipeline={"recompute": [1, 2]}, options={"pipeline": {"activation_checkpoint_interval": 0}}),
    "compiled": Case(pipeline={"compile": {"backend": "aot_eager"}}, data="padded"),
    "boundaries of eight bits": Case(pipeline={"boundary": {"forward": "int8", "backward": "int8"}}),
    "a head in slices": Case("zbh1", pipeline={"head_slices": 4, "partition": [0, 3, LAYERS + 5]}),
    "one stage": Case(stages=1, replicas=2, options={"zero_optimization": {"stage": 1}}),
    "without a flush": Case("one_direction", is_early=False),
    EXPERTS: Case(replicas=2, family="mixtral", options={"expert_parallel": SPREAD}, data="padded", is_early=False),
    SLICES: Case(replicas=2, options={"tensor_parallel": {"autotp_size": 2}}, is_early=False),
}
WAYS = OneAfterAnother(all_ways, {name: on(case.stages * case.replicas, case) for name, case in CASES.items()})


@pytest.mark.parametrize("name", ["1f1b, ZeRO 1, two replicas", "one stage", EXPERTS, SLICES])
def test_what_has_room_is_not_computed_again(name: str) -> None:
    """Ranks that share experts, or layers, keep all or nothing, since their layers are collective."""
    count = MICRO_BATCHES // 2
    for ways in WAYS[name]:
        assert Counter(ways[LATE]["forwards"]) == dict.fromkeys(range(STEPS), 2 * count)
        assert Counter(ways[ALL]["forwards"]) == {0: 2 * count, **dict.fromkeys(range(1, STEPS), count)}
    some = [Counter(ways[SOME]["forwards"]) for ways in WAYS[name]]
    for step in range(1, STEPS):
        again = sum(of_rank[step] for of_rank in some) - count * len(some)
        assert 0 < again <= count * len(some)
        assert name not in (EXPERTS, SLICES) or [of_rank[step] for of_rank in some] == [2 * count] * 2 + [count] * 2


def off_on_one_rank(case: Case) -> dict[str, Any]:
    """The variable of the environment is set where a launcher brought it."""
    with pytest.MonkeyPatch.context() as patched:
        if os.environ["RANK"] == "1":
            patched.setenv("PACELINE_RECOMPUTE_EARLY", "0")
        return trained(case, ALL)


@pytest.mark.parametrize("name", [EXPERTS, SLICES])
def test_a_rank_that_keeps_nothing_is_heard_by_those_that_share_its_layers(name: str) -> None:
    case = replace(CASES[name], stages=1)
    for found in run_ranks(off_on_one_rank, 2, case):
        assert Counter(found["forwards"]) == dict.fromkeys(range(STEPS), MICRO_BATCHES), "each of half of them twice"


def rooms(case: Case) -> tuple[float, float, int]:
    """Bytes that activations may take of 10 MB, before an update was made and after, and of what is trained."""
    import paceline
    from paceline.runtime import rank_reports

    rank_reports.room_bytes = lambda *_: 10**7
    engine, *_ = paceline.initialize(model=case.model, config=case.config)
    room = engine.executor.early_room._room_bytes
    before, engine.global_steps = room(), 1
    after = room()
    engine.destroy()
    return before, after, sum(parameter.nbytes for parameter in engine.module.parameters())


def test_gradients_that_a_step_will_make_have_no_room_for_activations() -> None:
    """A single pipeline's are made by autograd in each step anew. The optimizer's first step makes its states."""
    for before, after, num_bytes in run_ranks(rooms, 2, Case()):
        assert before == 0
        assert after == 10**7 - num_bytes


def test_a_limit_of_the_partition_is_one_of_all_that_a_device_holds() -> None:
    """The model's values and gradients; the optimizer that has not made a step has no states yet."""
    limit = 2.0**20
    partition = {"method": "work", "memory_gib": limit / 2**30}
    for _, after, num_bytes in run_ranks(rooms, 2, Case(pipeline={"partition": partition})):
        assert after == limit - 2 * num_bytes


@pytest.mark.parametrize("name", CASES)
def test_no_number_depends_on_what_is_kept_and_when_the_rest_is_computed_again(name: str) -> None:
    """Ranks that wait for gradients do so early from the second step on, when it is known what there is to keep."""
    case, again = CASES[name], list[list[int]]()
    for ways in WAYS[name]:
        for room in (SOME, ALL):
            for key in ("losses", "norms", "evaluated"):
                assert ways[room][key] == ways[LATE][key], key
            assert ways[room]["weights"].keys() == ways[LATE]["weights"].keys()
            for weight, value in ways[room]["weights"].items():
                assert torch.equal(value, ways[LATE]["weights"][weight]), weight
        assert not any(ways[LATE]["early"])
        assert not any(ways[LATE]["again"])
        assert not any(ways[ALL]["again"])
        again.append(ways[SOME]["again"])
    first, *later = (sum(of_ranks) for of_ranks in zip(*again, strict=True))
    assert not first
    assert all(later) if case.is_early and case.stages > 1 else not any(later)
