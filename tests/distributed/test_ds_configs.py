"""Every shipped configuration trains, evaluates and exports."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from support.archipelago import Island, lighthouse, run_islands
from support.jobs import TINY, finetune, flags
from support.ranks import run_ranks

CONFIGS = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
SHORT = TINY | {"max_steps": 2, "logging_steps": 1}


def num_ranks(config: Path) -> int:
    stages = int(match[1]) if (match := re.match(r"pp(\d+)", config.stem)) else 2
    replicas = int(match[1]) if (match := re.search(r"_(?:dp|ep)(\d+)", config.stem)) else 1
    return stages * replicas


def model_of(config: Path) -> dict[str, Any]:
    """Flags for a tiny model that the config is for."""
    if "expert_parallel" not in json.loads(config.read_text()):
        return SHORT
    overrides = f"{TINY['config_overrides']},num_local_experts=4,num_experts_per_tok=2"
    return {**SHORT, "model_type": "mixtral", "config_overrides": overrides}


def run_two_islands(config: Path, output: Path) -> tuple[list[Any], Path]:
    """At a lighthouse of the test's. What the ranks of the second one return, and where its model is."""
    ds_config = json.loads(config.read_text())
    with lighthouse() as ds_config["paceline"]["averaging"]["lighthouse"]:
        changed = output.parent / config.name
        changed.write_text(json.dumps(ds_config))
        islands = [
            Island(finetune, num_ranks(config), (flags(**SHORT, deepspeed=changed, output_dir=output, island=number),))
            for number in range(2)
        ]
        return run_islands(islands)[1], output / "island1"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_runs(config: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    output = tmp_path / "model"
    if "averaging" in json.loads(config.read_text())["paceline"]:
        ranks, output = run_two_islands(config, output)
    else:
        ranks = run_ranks(finetune, num_ranks(config), flags(**model_of(config), deepspeed=config, output_dir=output))
    assert {code for code, _ in ranks} == {0}, ranks
    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.num_hidden_layers == 4
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert any("perplexity" in line for line in lines)
    summary = json.loads((output / "summary.json").read_text())
    assert len(summary["ranks"]) == num_ranks(config)
    assert summary["steps"] == 2


def test_table_lists_every_file() -> None:
    table = (CONFIGS[0].parent / "README.md").read_text()
    assert set(re.findall(r"`(\w+\.json)`", table)) == {path.name for path in CONFIGS}
