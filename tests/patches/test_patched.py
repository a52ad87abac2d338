"""Scripts that cannot change: the runner that repairs DeepSpeed first."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ranks import PATIENCE_S, RANK_ENVIRONMENT, run_ranks

SHOW = """
import json, sys
import sibling
from paceline.patches.registry import all_patches

shown = {"argv": sys.argv, "name": __name__, "sibling": sibling.__name__}
shown["applied"] = sum(patch.is_applied() for patch in all_patches())
print(json.dumps(shown))
"""

# Nothing of paceline in it: what anybody has who follows the documentation of the Trainer.
TRAIN = """
import sys
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = MixtralConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
rows = torch.randint(0, 97, (16, 16))
ds_config = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 1},
    "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"},
}
args = TrainingArguments(sys.argv[-1], max_steps=2, per_device_train_batch_size=2, deepspeed=ds_config, use_cpu=True,
                         report_to=[], save_strategy="no")
trainer = Trainer(MixtralForCausalLM(config), args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train()
trainer.save_model()
"""


def run(argv: list[str]) -> tuple[int, str, str]:
    from paceline.launch.patched import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    return status, out.getvalue(), err.getvalue()


def test_the_script_sees_what_it_would_see_alone(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    (tmp_path / "sibling.py").write_text("")
    command = [sys.executable, "-m", "paceline.launch.patched", "--local_rank=0", str(script), "--lr", "1", "-m"]
    environment = {**os.environ, **RANK_ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # All but the engine classes, the broadcasts of shared GPUs, and what a batch tells the masks of a stage.
    from paceline.patches.registry import all_patches

    assert shown == {
        "argv": [str(script), "--local_rank=0", "--lr", "1", "-m"],
        "name": "__main__",
        "sibling": "sibling",
        "applied": len(all_patches()) - 5,
    }


def test_a_module(tmp_path: Path) -> None:
    [(status, out, _)] = run_ranks(run, 1, ["-m", "this"])
    assert status == 0
    assert out.startswith("The Zen of Python")
    for name in ("no_such_module", "json.no_such_module", "no_such_package.module"):
        [(status, out, err)] = run_ranks(run, 1, ["-m", name])
        assert (status, out) == (2, "")
        assert f"paceline: {name}: there is no such module; usage: " in err


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ([], 2, "usage: "),
        (["--help"], 0, "usage: "),
        (["--nonsense", "x.py"], 2, "usage: "),
        (["-m"], 2, "usage: "),
        (["no_such_script.py"], 2, "paceline: no_such_script.py: there is no such script"),
    ],
)
def test_wrong_usage(argv: list[str], status: int, message: str) -> None:
    found, out, err = run(argv)
    assert (found, out) == (status, "")
    assert err.startswith(message)


def test_a_plain_trainer_script(tmp_path: Path) -> None:
    """AutoEP, no optimizer in the JSON, save_model: stock fails three times over."""
    from transformers import AutoModelForCausalLM

    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    ended = run_ranks(run, 2, [str(script), str(tmp_path / "model")])
    assert [status for status, _, _ in ended] == [0, 0]
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
