"""The key ``recompute``: what it may be, and what it goes with."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.config import PacelineConfig, resolve
from paceline.config.recompute_keys import check_recompute, counts_of


def resolved(recompute: Any, config: dict[str, Any] | None = None, **pipeline: Any) -> Any:
    section = {"pipeline": {"stages": 2, "recompute": recompute, **pipeline}}
    sizes: dict[str, Any] = {
        "world_size": 4,
        "num_layers": 6,
        "num_items": 8,
        "state_bytes": None,
        "device_bytes": None,
    }
    return resolve({"paceline": section, **(config or {})}, cpu=False, **sizes)


@pytest.mark.parametrize(("value", "read"), [("fit", "fit"), (3, 3), (0, 0), ([2, 0], (2, 0)), (None, None)])
def test_what_it_may_be(value: Any, read: Any) -> None:
    plan = resolved(value)
    assert plan.recompute == read
    assert PacelineConfig.model_validate_json(plan.section.model_dump_json()) == plan.section


@pytest.mark.parametrize("value", ["all", -1, True, 1.0, [], [1, -1], [True, 1], "3", {}])
def test_what_it_may_not_be(value: Any) -> None:
    with pytest.raises(ValueError, match='it must be "fit", how many layers of each stage are recomputed'):
        check_recompute(value)
    with pytest.raises(ValueError, match=r'^paceline\.pipeline\.recompute is .*: it must be "fit", how many layers'):
        resolved(value)


@pytest.mark.parametrize(
    ("value", "pipeline", "message"),
    [
        ([1, 1, 1], {}, "there are 2 stages, and each has a number; give 2 numbers, one for all stages, or "),
        ([1, 1], {"schedule": "zbv"}, "there are 4 stages, and each has a number; give 4 numbers"),
        ([4, 3], {}, "these are 7 layers, and the model has 6; give each stage at most as many as it has"),
    ],
)
def test_what_does_not_go_with_the_stages(value: Any, pipeline: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolved(value, **pipeline)


def test_what_goes_with_the_stages() -> None:
    assert resolved([1, 0, 0, 2], schedule="zbv").recompute == (1, 0, 0, 2)
    for schedule in ("one_direction", "zbv", "multidirection"):
        assert resolved("fit", schedule=schedule).recompute == "fit"


def test_it_is_said_once() -> None:
    with pytest.raises(ValueError, match="one says which layers are recomputed, the other that all are; drop one of"):
        resolved(1, {"pipeline": {"activation_checkpoint_interval": 1}})
    assert resolved(1, {"pipeline": {"activation_checkpoint_interval": 0}}).recompute == 1


def test_numbers_are_of_layers_that_are_there() -> None:
    assert counts_of(2, [3, 1, 0]) == (2, 1, 0)
    assert counts_of((3, 0, 0), [3, 1, 0]) == (3, 0, 0)
    with pytest.raises(ValueError, match=r"is \[3, 2, 0\]: stage 1 has 1 layers; give at most 1 there, or \"fit\""):
        counts_of((3, 2, 0), [3, 1, 0])
