"""What each of DeepSpeed's keys does in a pipeline: the table, against the DeepSpeed that is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from paceline.config import PacelineConfig, check_features, near_misses, without_effect
from paceline.config.effects import EFFECTS, HONOURED, REFUSED, WARNED, Effect
from paceline.config.known import SECTIONS, TOP_LEVEL

RECORD = """
import json
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
sections = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
print(json.dumps({
    name: {key: [field.alias or key, field.is_required() or field.default_factory is not None or str(field.default)]
           for key, field in kind.model_fields.items()} for name, kind in sections.items()}))
"""

REFUSALS: dict[str, Any] = {
    "managed_gradient_accumulation": False,
    "sequence_parallel_size": 2,
    "hybrid_engine": {"enabled": True},
    "zero_optimization.offload_param": {"device": "cpu"},
    "zero_optimization.offload_optimizer": {"device": "nvme"},
}
"""A value of each key that is refused; of the others, ``true`` is."""


def effect_of(path: str) -> Effect | None:
    """The effect of a key, ``"section.key"``; None: no pipeline reads it."""
    return EFFECTS.get(path) or EFFECTS.get(path.partition(".")[0])


@pytest.fixture(scope="module")
def read_by_deepspeed() -> set[str]:
    """Every key: those that ``test_config`` has DeepSpeed write down, and the fields of its typed sections."""
    told = subprocess.run([sys.executable, "-c", RECORD], capture_output=True, text=True, check=True).stdout
    typed = json.loads(told.splitlines()[-1])
    paths = {
        f"{section}.{name}" for section, fields in typed.items() for key in fields for name in {key, fields[key][0]}
    }
    paths |= {f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys}
    return paths | TOP_LEVEL


def test_every_key_has_one_effect(read_by_deepspeed: set[str]) -> None:
    assert [path for path in sorted(read_by_deepspeed) if effect_of(path) is None] == []
    of_slices = {path for path in EFFECTS if path.startswith("tensor_parallel.")}  # a section that is read elsewhere
    assert [path for path in EFFECTS if path not in read_by_deepspeed | of_slices] == []
    # A section that is honoured says so, or not, of each of its keys.
    whole = {"tensorboard", "wandb", "comet", "csv_monitor", "expert_parallel"}
    unsaid = [path for path in read_by_deepspeed - set(EFFECTS) if effect_of(path).verdict == HONOURED]  # type: ignore
    assert [path for path in unsaid if path.partition(".")[0] not in whole] == []


def config_with(path: str, value: Any) -> dict[str, Any]:
    section, _, key = path.partition(".")
    return {section: {key: value} if key else value}


@pytest.mark.parametrize("path", [path for path, effect in EFFECTS.items() if effect.verdict == WARNED])
def test_what_has_no_effect_is_named(path: str) -> None:
    default = EFFECTS[path].default
    (line,) = without_effect(config_with(path, {"enabled": True} if default is None else 7))
    assert line.startswith(f'"{path}" has no effect in a pipeline: ')
    for idle in (default, None, "auto", {"enabled": False}):
        assert without_effect(config_with(path, idle)) == []


@pytest.mark.parametrize("path", [path for path, effect in EFFECTS.items() if effect.verdict == REFUSED])
def test_what_cannot_be_is_refused(path: str) -> None:
    key = path.rpartition(".")[2]
    with pytest.raises(ValueError, match=key):
        check_features(config_with(path, REFUSALS.get(path, True)), PacelineConfig())


@pytest.mark.parametrize("path", [path for path, effect in EFFECTS.items() if effect.verdict == HONOURED])
def test_what_is_honoured_is_quiet(path: str) -> None:
    assert without_effect(config_with(path, 7)) == []


def test_as_people_write_them() -> None:
    config = {
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True}},
        "compile": {"deepcompile": True},
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
        "comms_logger": {"enabled": True, "verbose": False},
        "flops_profiler": {"enabled": True},
        "prescale_gradients": True,
        "communication_data_type": "fp32",
        "checkpoint": {"use_node_local_storage": True},
        "zero_optimization": {"stage": 1, "contiguous_gradients": True, "allgather_bucket_size": 200000000},
        "mine": 3,
    }
    assert [line.split('"')[1] for line in without_effect(config)] == [
        *("data_efficiency", "compile", "activation_checkpointing", "comms_logger", "prescale_gradients", "checkpoint"),
        "zero_optimization.allgather_bucket_size",
    ]
    assert near_misses(config) == ['"mine" is not a key that DeepSpeed reads: it has no effect; delete it.']
