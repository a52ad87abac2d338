"""DeepSpeed's section ``"expert_parallel"``, as pipelines read it."""

import json
from dataclasses import fields

import pytest

from paceline.config import PacelineConfig, check_features, resolve
from paceline.config.expert_parallel import _DEFAULTS, _READ, resolve_expert_parallel


def resolved(config, world_size=4):
    return resolve(
        {"paceline": {"pipeline": {"stages": 2}}} | config,
        world_size=world_size,
        num_layers=4,
        num_items=6,
        state_bytes=None,
        device_bytes=None,
        cpu=False,
    )


def test_deepspeed_never_sees_it():
    """It would put layers of its own into the stages."""
    found = resolved({"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}})
    assert found.expert_parallel == 2
    assert "expert_parallel" not in found.ds_config


@pytest.mark.parametrize("section", [{}, {"enabled": False, "autoep_size": 64}, {"enabled": True}])
def test_off(section):
    assert resolved({"expert_parallel": section}).expert_parallel == 1
    assert resolved({}).expert_parallel == 1


def test_defaults_are_deepspeeds():
    """A key with the value that it has anyway asks for nothing."""
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig, parse_autoep_config

    theirs = parse_autoep_config({"enabled": True})
    names = {field.name for field in fields(AutoEPConfig) if not field.name.startswith("_")}
    assert names >= set(_DEFAULTS) | _READ
    for name in names - _READ - {"expert_w3"}:  # left out it is neither null nor a name
        assert getattr(theirs, name) == _DEFAULTS.get(name), name
        json.dumps(value := getattr(theirs, name))
        assert resolve_expert_parallel({"enabled": True, "autoep_size": 2, name: value}, 2) == 2


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([2], "expert_parallel is [2]: it must be an object; write one, or leave it out."),
        (
            {"enabled": True, "autoep_size": "2"},
            'expert_parallel.autoep_size is "2": it must be a whole number of at least 1.',
        ),
        (
            {"enabled": True, "autoep_size": 2, "score_func": "sigmoid"},
            'expert_parallel.score_func is "sigmoid": it is for DeepSpeed\'s own expert layers, and in a pipeline the '
            "model's own compute (how: experts_implementation of its config); leave it out.",
        ),
        (
            {"enabled": True, "autoep_size": 4},
            "expert_parallel.autoep_size is 4: it must divide the 2 replicas of each stage (ranks / stages); choose a "
            "divisor, or other stages.",
        ),
    ],
)
def test_refused(section, message):
    with pytest.raises(ValueError, match=r".") as error:
        resolved({"expert_parallel": section})
    assert str(error.value) == message


def test_layers_may_move():
    config = {
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "paceline": {"pipeline": {"stages": 2, "partition": "hetero"}},
    }
    plan = resolved(config)
    assert (plan.expert_parallel, plan.partition_choice.repartition_every) == (2, 100)


def test_not_for_modules_of_other_kinds():
    with pytest.raises(ValueError, match=r"^expert_parallel\.enabled is true: a PipelineModule's own layers cannot"):
        check_features({"expert_parallel": {"enabled": True}}, PacelineConfig())
