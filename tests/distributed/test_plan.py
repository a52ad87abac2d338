"""JSONs that ``paceline plan`` writes for two devices start, and what two ranks measure can be planned with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.cli import main
from support import trainer_job
from support.jobs import TINY, finetune, flags
from support.ranks import RANK_ENVIRONMENT, run_ranks
from support.saves import small_file_system

OVERRIDES = {"llama": "", "mixtral": ",num_local_experts=4,num_experts_per_tok=2"}
NAMES = {
    "llama": ["tp1_pp1_dp2_ep1", "tp1_pp2_dp1_ep1", "tp2_pp1_dp1_ep1"],
    "mixtral": ["tp1_pp1_dp2_ep1", "tp1_pp1_dp2_ep2", "tp1_pp2_dp1_ep1"],
}
CLUSTER = ["--devices", "2", "--flops-per-s", "1e9", "--intra-node-bytes-per-s", "1e9"]
STEP = ["--train-batch-size", "8", "--micro-batch-size", "2", "--seq-length", "32", "--dtype", "float32"]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoConfig

    def written(model: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(model)
        text = str(TINY["config_overrides"]) + OVERRIDES[model]
        sizes = {name: int(value) for name, _, value in (part.partition("=") for part in text.split(","))}
        AutoConfig.for_model(model, vocab_size=500, tie_word_embeddings=False, **sizes).save_pretrained(folder)
        assert main(["plan", str(folder), *CLUSTER, *STEP, "--write", str(folder / "plans")]) == 0
        return folder, folder / "plans"

    return {model: written(model) for model in OVERRIDES}


def trainer(argv: list[str]) -> None:
    """The Trainer's script on this rank, started as ``paceline.launch.patched`` starts it."""
    from paceline.launch.patched import repair

    repair()
    trainer_job.main(argv)


@pytest.mark.parametrize("model", list(NAMES))
def test_there_is_a_file_for_each_that_can_run(plans: Any, model: str) -> None:
    assert sorted(path.stem for path in plans[model][1].glob("*.json")) == NAMES[model]


@pytest.mark.parametrize(
    ("model", "name"), [("llama", "tp1_pp1_dp2_ep1"), ("llama", "tp1_pp2_dp1_ep1"), ("mixtral", "tp1_pp1_dp2_ep2")]
)
def test_it_starts(plans: Any, tmp_path: Path, model: str, name: str) -> None:
    from transformers import AutoModelForCausalLM

    values = {**TINY, "model_type": model, "config_overrides": str(TINY["config_overrides"]) + OVERRIDES[model]}
    output = tmp_path / "model"
    values |= {"max_steps": 2, "logging_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    argv = flags(**values, deepspeed=plans[model][1] / f"{name}.json", output_dir=output)
    ranks = run_ranks(finetune, 2, argv)
    assert {code for code, _ in ranks} == {0}, ranks
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    held = [rank["parameters"] for rank in json.loads((output / "summary.json").read_text())["ranks"]]
    sizes = {n: p.numel() for n, p in AutoModelForCausalLM.from_pretrained(output).named_parameters()}
    whole, experts = sum(sizes.values()), sum(size for n, size in sizes.items() if ".experts." in n)
    if name == "tp1_pp2_dp1_ep1":
        assert sum(held) == whole
    else:
        assert held == [whole - (experts // 2 if name.endswith("ep2") else 0)] * 2


def test_experts_are_placed_where_the_prediction_took_them_to_be(plans: Any, tmp_path: Path) -> None:
    folder, _ = plans["mixtral"]
    (tmp_path / "loads.json").write_text(json.dumps([[10, 8, 1, 1]] * 4))
    argv = ["--loads", str(tmp_path / "loads.json"), "--rebalanced", "--gradient-checkpointing"]
    assert main(["plan", str(folder), *CLUSTER, *STEP, *argv, "--write", str(tmp_path / "plans")]) == 0
    overrides = str(TINY["config_overrides"]) + OVERRIDES["mixtral"]
    values = {**TINY, "model_type": "mixtral", "config_overrides": overrides, "max_steps": 10}
    values |= {"eval_strategy": "no", "save_strategy": "no", "deepspeed": tmp_path / "plans" / "tp1_pp1_dp2_ep2.json"}
    output = tmp_path / "model"
    ranks = run_ranks(finetune, 2, flags(**values, output_dir=output))
    assert {code for code, _ in ranks} == {0}, ranks
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    (decision,) = [line["decision"] for line in lines if "decision" in line]
    assert (decision["what"], decision["step"]) == ("experts", 10)
    assert decision["predicted_now_s"] > 0
    ran = json.loads((output / "run.json").read_text())
    assert (ran["schedule"], ran["stages"], ran["data_parallel"]) == ("1f1b", 1, 2)
    assert (ran["micro_batch_size"], ran["micro_batches"]) == (2, 2)


def test_a_plan_of_layers_in_slices_starts(plans: Any, tmp_path: Path) -> None:
    folder, _ = plans["llama"]
    argv = ["--devices", "4", *CLUSTER[2:], *STEP, "--write", str(tmp_path / "plans")]
    assert main(["plan", str(folder), *argv]) == 0
    values = {**TINY, "config_overrides": str(TINY["config_overrides"]) + OVERRIDES["llama"], "max_steps": 2}
    values |= {"eval_strategy": "no", "save_strategy": "no", "deepspeed": tmp_path / "plans" / "tp2_pp2_dp1_ep1.json"}
    output = tmp_path / "model"
    ranks = run_ranks(finetune, 4, flags(**values, output_dir=output))
    assert {code for code, _ in ranks} == {0}, ranks
    ran = json.loads((output / "summary.json").read_text())
    assert (ran["stages"], ran["tensor_parallel"], ran["data_parallel"]) == (2, 2, 1)
    held = [rank["parameters"] for rank in ran["ranks"]]
    assert held[0] == held[1]
    assert held[2] == held[3]
    assert ran["parameters"] / 2 < sum(held[::2]) < ran["parameters"], "the embedding is whole, and so are norms"


def test_a_tensor_parallel_plan_starts_under_a_trainer(plans: Any, tmp_path: Path) -> None:
    folder, files = plans["llama"]
    found = tmp_path / "found.json"
    argv = flags(deepspeed=files / "tp2_pp1_dp1_ep1.json", model=folder, steps=2, output=found)
    run_ranks(trainer, 2, argv)
    told = json.loads(found.read_text())
    assert len(told["losses"]) == len(told["step_s"]) == 2
    assert all(map(math.isfinite, told["losses"]))


def measure(argv: list[str]) -> int:
    """The measuring job on this rank."""
    from paceline.launch.measure import main

    return main(argv)


def test_what_two_ranks_measure_can_be_planned_with(
    plans: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = plans["mixtral"]
    argv = [str(folder), *flags(output_dir=tmp_path, micro_batch_size=2, seq_length=32)]
    assert run_ranks(measure, 2, argv) == [0, 0]
    cluster = json.loads((tmp_path / "cluster.json").read_text())
    assert (cluster["devices"], cluster["devices_per_node"]) == (2, 2)
    assert all(value > 0 for value in cluster["intra_node"].values())
    assert 0 < cluster["memory_gib"] < 10_000
    assert cluster["state_bytes_per_s"] > 0
    assert cluster["inter_node"]["bytes_per_s"] is None  # one node: nothing is across
    given = ["--cluster", str(tmp_path / "cluster.json"), "--profile", str(tmp_path / "profile.json")]
    capsys.readouterr()
    assert main(["plan", str(folder), *given, *STEP, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown = json.loads(out)
    assert shown["measured"]
    for found in shown["plans"]:
        assert found["terms"]["dense"] > 0
        assert found["terms"]["optimizer"] > 0
        assert (found["terms"]["all_to_all"] > 0) == (found["expert"] > 1)


def test_all_ranks_end_where_there_is_no_room_for_what_they_measure(plans: Any, tmp_path: Path) -> None:
    folder, _ = plans["llama"]
    with small_file_system(tmp_path / "disk", "8k") as disk:
        with pytest.raises(OSError, match="No space left"):
            (disk / "rest").write_bytes(bytes(20_000))
        assert run_ranks(measure, 2, [str(folder), *flags(output_dir=disk, seq_length=8)]) == [2, 2]
        assert [path.name for path in disk.iterdir()] == ["rest"]


@pytest.mark.launcher
def test_measured_first(plans: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    folder, _ = plans["llama"]
    capsys.readouterr()
    assert main(["plan", str(folder), "--devices", "2", "--measure", *STEP, "--json", "--memory-gib", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown = json.loads(out)
    assert shown["measured"]
    assert shown["cluster"]["intra_node"]["all_reduce_bytes_per_s"] > 0
    assert shown["cluster"]["memory_gib"] == 1
    assert all(found["step_s"] > 0 for found in shown["plans"])


def test_a_model_that_is_not_there_is_wrong_input(tmp_path: Path) -> None:
    assert run_ranks(measure, 2, [str(tmp_path / "absent")]) == [2, 2]


def test_an_output_that_is_a_file_is_told_before_measuring(plans: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run_ranks(measure, 2, [str(plans["llama"][0]), "--output_dir", str(tmp_path / "file")]) == [2, 2]
