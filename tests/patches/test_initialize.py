"""``deepspeed.initialize`` reads our section, once it is repaired."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from torch import nn

from paceline.patches.deepspeed_initialize import SECTION, engine_class
from paceline.patches.registry import applied

MOE: dict[str, Any] = {"paceline": {"moe": {}}}


def upstream(args: Any = None, model: Any = None, config: Any = None, config_params: Any = None) -> str:
    """The name of the class that DeepSpeed would build."""
    kind = "PipelineEngine" if isinstance(model, deepspeed.PipelineModule) else "DeepSpeedEngine"
    return str(getattr(deepspeed, kind).__name__)


initialize: Callable[..., str] = SECTION.make(upstream)


def test_a_config_in_any_place(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(MOE))
    assert initialize(model=nn.Linear(1, 1), config=MOE) == "PlainEngine"
    assert initialize(None, nn.Linear(1, 1), config_params=MOE) == "PlainEngine"
    assert initialize(SimpleNamespace(deepspeed_config=str(file)), nn.Linear(1, 1)) == "PlainEngine"
    assert initialize(model=nn.Linear(1, 1), config=str(file)) == "PlainEngine"
    assert deepspeed.DeepSpeedEngine.__name__ == "DeepSpeedEngine"


@pytest.mark.parametrize("config", [{}, {"paceline": {}}, {"paceline": {"moe": None}}, {"paceline": {"report": {}}}])
def test_without_the_section_it_is_deepspeeds_own(config: dict[str, Any]) -> None:
    assert initialize(model=nn.Linear(1, 1), config=config) == "DeepSpeedEngine"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"paceline": {"mo": {}}}, r'paceline.mo is not a key .* did you mean "moe"'),
        ({"paceline": {"moe": {"replicas": -1}}}, "paceline.moe.replicas is -1"),
        ({"paceline": {"pipeline": {}}}, r"paceline\.pipeline asks for stages, .* take paceline\.PacelineTrainer"),
        (MOE | {"hybrid_engine": {"enabled": True}}, r"paceline\.moe is there and hybrid_engine\.enabled is true: "),
    ],
)
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        initialize(model=nn.Linear(1, 1), config=config)


class Pipeline(deepspeed.PipelineModule):
    def __init__(self) -> None:
        nn.Module.__init__(self)


def test_a_pipeline_is_for_paceline_initialize() -> None:
    """Which has chosen an engine of ours by the time that it calls deepspeed.initialize."""
    with pytest.raises(ValueError, match=r"only with paceline\.initialize"):
        initialize(model=Pipeline(), config=MOE)

    class Engine(deepspeed.PipelineEngine):
        pass

    with applied(engine_class(Engine)):
        assert initialize(model=Pipeline(), config=MOE) == "Engine"
