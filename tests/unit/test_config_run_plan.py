"""The plan of a model that something else built, and what a plan holds."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from paceline.config import PacelineConfig, PartitionChoice, RunPlan, ScheduleChoice, plan_as_built, resolve
from paceline.config.expert_choice import MoeChoice

SIZES = {"micro_batch_size": 2, "micro_batches": 6, "train_batch_size": 24}


def as_built(paceline: dict[str, Any], stages: int = 3, **keys: Any) -> RunPlan:
    config = {"paceline": paceline, **keys}
    return plan_as_built(PacelineConfig.of(config), config, stages=stages, data_parallel=2, **SIZES)


def test_what_is_built_stays_as_it_was_built() -> None:
    plan = as_built({})
    assert plan.partition_choice == PartitionChoice(None)
    assert plan.schedule == ScheduleChoice("1f1b")
    assert (plan.stages, plan.data_parallel, plan.micro_batch_size, plan.micro_batches) == (3, 2, 2, 6)
    assert plan.train_batch_size == 24


def test_what_the_json_says_counts() -> None:
    plan = as_built({"pipeline": {"schedule": {"type": "kfkb", "k": 9}}}, pipeline={"partition": "uniform"})
    assert plan.schedule == ScheduleChoice("kfkb", k=6)
    assert plan.partition == "uniform"
    assert as_built({"pipeline": {"partition": "hetero"}}).partition_choice == PartitionChoice("hetero", 100)


def test_partition_without_a_method_is_followed() -> None:
    assert as_built({"pipeline": {"partition": {"repartition_every": 7}}}).partition_choice == PartitionChoice(None, 7)


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup is \[1, 0\]: 3 stages need 3 numbers"):
        as_built({"pipeline": {"schedule": {"type": "eager", "warmup": [1, 0]}}})


def test_parts_of_the_section() -> None:
    plan = as_built({"moe": {"replicas": 1}, "natural_gradient": {"max_change": {"layer": 0.5}}})
    assert plan.moe == MoeChoice(rebalance_every=50, replicas=1, splitting="even", loads_file=None)
    assert as_built({"moe": {"rebalance_every": 0, "replicas": None}}).moe == MoeChoice(rebalance_every=0)
    assert as_built({}).moe is None
    assert plan.natural_gradient is not None
    assert plan.max_change == plan.natural_gradient.max_change
    assert plan.averaging is None
    assert plan.report.trace_every is None


def test_a_plan_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        as_built({}).stages = 2  # type: ignore[misc]


def test_a_section_that_was_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"paceline": {"pipeline": {"stages": 2}}}
    section = PacelineConfig.of(config)
    monkeypatch.setattr(PacelineConfig, "of", None)
    sizes: dict[str, Any] = {"num_layers": 4, "num_items": 6, "state_bytes": None, "device_bytes": None, "cpu": False}
    plan = resolve(config, world_size=4, section=section, **sizes)
    assert (plan.section, plan.stages, plan.partition) == (section, 2, "work")
