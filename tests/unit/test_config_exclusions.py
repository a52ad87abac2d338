"""The one table of features that exclude each other: what it finds, and that what was measured is what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Features, PacelineConfig, check_exclusions, check_written, exclusion
from paceline.config.exclusions import (
    COMPILED,
    EXCLUSIONS,
    FEATURES,
    GROUNDS,
    NO_FLUSH,
    PIPELINE,
    UNEQUAL,
    excluded,
    markdown,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "combinations.json"


def features(config: dict[str, Any], **keys: Any) -> Features:
    return Features(config, PacelineConfig.of(config), **keys)


SCHEDULE = {"paceline": {"pipeline": {"schedule": "one_direction"}}}
MOE: dict[str, Any] = {"paceline": {"moe": {}}}
LIMITS: dict[str, Any] = {"paceline": {"natural_gradient": {"max_change": {}}}}
OFFLOAD = {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
UNEQUAL_REPLICAS: dict[str, Any] = {"paceline": {"pipeline": {"unequal_replicas": {}}}}
AVERAGING = {"paceline": {"averaging": {"lighthouse": "host:1"}}}

ASKING: dict[tuple[str, str], Features] = {
    ("fp16", "bf16"): features({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, is_pipeline=False),
    ("AutoEP's layers", PIPELINE): features(EXPERTS),
    ("unmanaged accumulation", PIPELINE): features({"managed_gradient_accumulation": False}),
    (UNEQUAL, "expert_parallel"): features(UNEQUAL_REPLICAS, expert_parallel=2),
    (UNEQUAL, NO_FLUSH): features({"paceline": {"pipeline": {"schedule": "one_direction", "unequal_replicas": {}}}}),
    (UNEQUAL, "micro_batch_sizes"): features(
        {"paceline": {"pipeline": {"schedule": {"micro_batch_sizes": [1, 2]}, "unequal_replicas": {}}}}
    ),
    ("recompute", "activation_checkpoint_interval"): features(
        {"pipeline": {"activation_checkpoint_interval": 1}, "paceline": {"pipeline": {"recompute": [1, 0]}}}
    ),
    (COMPILED, "flops_profiler"): features(
        {"flops_profiler": {"enabled": True}, "paceline": {"pipeline": {"compile": True}}}
    ),
    ("moe", "hybrid_engine"): features(MOE | {"hybrid_engine": {"enabled": True}}, is_pipeline=False),
    ("moe", "ZeRO 3"): features(MOE | {"zero_optimization": {"stage": 3}}, is_pipeline=False),
    ("moe", "offload"): features(MOE | OFFLOAD, is_pipeline=False),
    ("moe", "sequence parallelism"): features(MOE | {"sequence_parallel_size": 2}, is_pipeline=False),
    ("max_change", "offload"): features(LIMITS | OFFLOAD, is_pipeline=False),
    ("max_change", "ZenFlow"): features(LIMITS | {"zero_optimization": {"zenflow": {"topk": 1}}}, is_pipeline=False),
    ("max_change", "tensor parallelism"): features(LIMITS | {"tensor_parallel": {"autotp_size": 2}}, is_pipeline=False),
    ("averaging", "experts on several ranks without a pipeline"): features(AVERAGING | EXPERTS, is_pipeline=False),
    ("averaging", "ZenFlow"): features(AVERAGING | {"zero_optimization": {"zenflow": {"topk": 1}}}, is_pipeline=False),
    ("averaging", "tensor parallelism"): features(
        AVERAGING | {"tensor_parallel": {"autotp_size": 2}}, is_pipeline=False
    ),
}


@pytest.mark.parametrize("pair", ASKING, ids=" and ".join)
def test_a_row_is_found(pair: tuple[str, str]) -> None:
    row, asked = exclusion(*reversed(pair)), ASKING[pair]
    (message,) = excluded(asked)
    first, second = asked.written(row.first), asked.written(row.second)
    assert first
    assert message == f"{' and '.join(filter(None, (first, second)))}: {row.reason}; {row.remedy}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_exclusions(asked)


@pytest.mark.parametrize("feature", ["fp16", "torch_autocast"])
def test_schedules_without_a_flush(feature: str) -> None:
    asked = features(SCHEDULE | {feature: {"enabled": True, "dtype": "bfloat16"}})
    (message,) = excluded(asked)
    assert message.startswith(f'{feature}.enabled is true and paceline.pipeline.schedule.type "one_direction": ')
    assert not list(excluded(features({feature: {"enabled": True, "dtype": "bfloat16"}})))


def test_who_limits_changes_is_quoted() -> None:
    assert features(LIMITS).written("max_change") == "paceline.natural_gradient.max_change is there"
    assert features({"paceline": {"max_change": {}}}).written("max_change") == "paceline.max_change is there"


def test_what_is_off_excludes_nothing() -> None:
    config = {
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "cpu_offload": False},
        "sequence_parallel_size": 1,
        "tensor_parallel": {"autotp_size": 0},
        "hybrid_engine": {"enabled": False},
        "expert_parallel": {"enabled": False},
        "torch_autocast": {"enabled": False},
        "managed_gradient_accumulation": True,
        **SCHEDULE,
    }
    assert not list(excluded(features(config)))
    assert not list(excluded(features(config | MOE, is_pipeline=False)))


def test_a_pair_has_one_row() -> None:
    pairs = [frozenset((row.first, row.second)) for row in EXCLUSIONS]
    assert len(set(pairs)) == len(pairs)
    assert {name for pair in pairs for name in pair} <= FEATURES.keys()
    assert {row.ground for row in EXCLUSIONS} == GROUNDS.keys()


def test_what_was_measured_as_refused_is_in_the_table() -> None:
    refused = [cell["message"] for cell in json.loads(GOLDEN.read_text()).values() if cell["outcome"] == "refused"]
    assert refused
    endings = [f": {row.reason}; {row.remedy}." for row in EXCLUSIONS]
    assert [message for message in refused if not message.endswith(tuple(endings))] == []


def test_the_readme_has_every_row() -> None:
    readme = (Path(__file__).parents[2] / "integration" / "paceline" / "config" / "README.md").read_text()
    assert markdown() in readme


def test_a_json_alone_is_checked() -> None:
    config: dict[str, Any] = SCHEDULE | {"fp16": {"enabled": True}}
    with pytest.raises(ValueError, match=r"^fp16\.enabled is true and .*one_direction.* no one loss scale"):
        check_written(config, PacelineConfig.of(config), is_pipeline=True)
    config = MOE | {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match=r"^paceline\.moe is there and zero_optimization\.stage is 3"):
        check_written(config, PacelineConfig.of(config), is_pipeline=False)
    for alone in (EXPERTS, MOE):
        check_written(alone, PacelineConfig.of(alone), is_pipeline=False)
