"""What ``tests/gpu/sequences.py`` draws: the same every time, every feature, nothing that a config check refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu.drawing import ADAPTERS, FROZEN, KINDS, Case, draw
from gpu.playing import Player
from gpu.sequences import differences
from paceline.config.resolve import resolve
from paceline.runtime.engine import PacelineEngine
from support.jobs import MICRO_BATCHES

NUM_SEEDS = 200
CASES = {kind: [draw(kind, seed) for seed in range(NUM_SEEDS)] for kind in KINDS}
ALL = [case for cases in CASES.values() for case in cases]


def configs(case: Case) -> list[dict[str, Any]]:
    """DeepSpeed's JSON of each start."""
    return [operation.values[0] for operation in case.operations if operation.action == "open"]


def shapes(case: Case) -> list[tuple[int, str]]:
    """Stages and schedule of each start."""
    pipelines = [config["paceline"]["pipeline"] for config in configs(case)]
    return [(pipeline["stages"], pipeline["schedule"]["type"]) for pipeline in pipelines]


def keys(value: Any) -> set[str]:
    """Of objects inside objects, without those that are off."""
    if not isinstance(value, dict):
        return set()
    return {key for key in value if value[key] is not False}.union(*map(keys, value.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_the_same_every_time_and_like_no_other(kind: str) -> None:
    assert [draw(kind, seed) for seed in reversed(range(NUM_SEEDS))] == CASES[kind][::-1]
    assert len({repr(case.operations) for case in CASES[kind]}) == NUM_SEEDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_config_can_be_run(kind: str) -> None:
    for case in CASES[kind]:
        layers = case.model.num_layers
        for config in configs(case):
            plan = resolve(
                config,
                world_size=case.ranks,
                num_layers=layers,
                num_items=layers + 2,
                state_bytes=None,
                device_bytes=None,
                cpu=True,
            )
            assert plan.micro_batches * plan.data_parallel == MICRO_BATCHES


FEATURES: dict[str, Callable[[Case], bool]] = {
    "adapters": lambda case: case.model.treatment == ADAPTERS,
    "frozen layers": lambda case: case.model.treatment == FROZEN,
    "tied embeddings": lambda case: case.model.is_tied,
    "copies of experts": lambda case: any(c["paceline"].get("moe", {}).get("replicas") for c in configs(case)),
    "a resume in the same shape": lambda case: len(configs(case)) > 1 and len(set(shapes(case))) == 1,
    "a resume in another shape": lambda case: len({stages for stages, _ in shapes(case)}) > 1,
}
IN_CONFIGS = (
    *("chunks", "half_layers", "boundary", "recompute", "compile", "natural_gradient", "max_change", "correction"),
    *("averaging", "lighthouse", "overlap_steps", "unequal_replicas", "reshare_every", "repartition_every"),
    *("expert_parallel", "rebalance_every", "bf16", "fp16", "torch_autocast", "scheduler"),
)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_drawn(feature: str) -> None:
    assert any(map(FEATURES[feature], ALL))


def test_every_key_and_schedule_is_drawn() -> None:
    drawn = set().union(*(keys(config) for case in ALL for config in configs(case)))
    assert set(IN_CONFIGS) <= drawn
    assert {name for case in ALL for _, name in shapes(case)} == {n for kind in KINDS.values() for n in kind.schedules}


def test_every_operation_is_drawn_and_there_is() -> None:
    own = {name for name in vars(Player) if not name.startswith("_")}
    engines = {"zero_grad", "finish_checkpoint", "repartition", "prepare_repartition", "share_micro_batches"}
    assert {operation.action for case in ALL for operation in case.operations} == own | engines
    assert all(hasattr(PacelineEngine, name) for name in engines)


def test_a_difference_is_found_wherever_it_is() -> None:
    weights = ("w", "value", 0, torch.ones(4))
    rank: dict[str, list[Any]] = {"losses": [2.0, 0.1], "evaluations": [1.0], "state": [weights]}
    assert set(differences([rank], [rank]).values()) == {0.0}
    for what, changed, wanted in (
        ("losses", [2.2, 0.1], 0.1),
        ("losses", [2.0, math.nan], math.inf),
        ("losses", [2.0], math.inf),
        ("evaluations", [0.9], 0.1),
        ("state", [("w", "value", 0, torch.full((4,), 1.1))], 0.1),
        ("state", [("w", "momentum", 0, torch.ones(4))], math.inf),
    ):
        assert max(differences([{**rank, what: changed}], [rank]).values()) == pytest.approx(wanted, rel=1e-2)
