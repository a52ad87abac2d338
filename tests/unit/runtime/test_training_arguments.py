"""TrainingArguments take what ``accelerate launch`` was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from paceline.runtime.training_arguments import take_accelerates_json


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize(
    ("launched", "own", "wanted"),
    [("bf16", {}, (True, False)), ("no", {}, (False, False)), ("bf16", {"fp16": True}, (False, True))],
)
def test_accelerates_precision_goes_with_its_json(
    is_ours: bool,
    launched: str,
    own: dict[str, bool],
    wanted: tuple[bool, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "ds.json"
    sections = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
    section = {"paceline": {"pipeline": {}}} if is_ours else {}
    file.write_text(json.dumps({**sections, "zero_optimization": {"stage": 0}, **section}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **own)
    take_accelerates_json(args)
    config = args.deepspeed_plugin.deepspeed_config
    assert tuple(config[name]["enabled"] for name in ("bf16", "fp16")) == wanted
    assert args.deepspeed == (str(file) if is_ours else None)
    assert (args.bf16, args.fp16) == (wanted if is_ours else (False, own.get("fp16", False)))


@pytest.mark.parametrize(
    ("sections", "own", "wanted"),
    [
        ({}, {}, True),
        ({"bf16": {"enabled": "auto"}}, {}, True),
        ({"bf16": {"enabled": True}}, {}, True),
        ({"bf16": {"enabled": False}}, {}, False),
        ({}, {"fp16": True}, False),
    ],
)
@pytest.mark.parametrize("is_pipeline", [True, False])
def test_accelerates_precision_goes_with_a_json_of_the_arguments(
    sections: dict[str, Any],
    own: dict[str, bool],
    wanted: bool,
    is_pipeline: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As DeepSpeed trains in it under Trainer, where the JSON leaves it open."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config = {"zero_optimization": {"stage": 0}, "paceline": {"pipeline": {}} if is_pipeline else {}, **sections}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], deepspeed=config, **own)
    take_accelerates_json(args)
    assert args.bf16 == (wanted and is_pipeline)
    assert args.deepspeed == config
