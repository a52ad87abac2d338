"""``paceline plan``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig

from paceline.config import PacelineConfig, near_misses, resolve
from paceline.hf.layer_profile import fingerprint
from paceline.launch.cli import main
from paceline.measure.profile_file import DeviceProfile, ItemProfile, Profile
from support.saves import small_file_system

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "routed": MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True),
    "wide": LlamaConfig(**SIZES | {"vocab_size": 8000}),
}
CLUSTER = ["--devices", "2", "--flops-per-s", "1e12", "--intra-node-bytes-per-s", "1e10"]
STEP = ["--train-batch-size", "16"]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(model: str, *argv: str, status: int = 0) -> Any:
        MODELS[model].save_pretrained(tmp_path / model)
        got = main(["plan", str(tmp_path / model), *argv])
        out, err = capsys.readouterr()
        assert got == status, err
        return (json.loads(out) if "--json" in argv and out else out), err

    return run


def names(shown: dict[str, Any]) -> list[str]:
    return [found["name"] for found in shown["plans"]]


def test_two_devices(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.plan_report.devices_here", lambda: 2)
    shown, err = plan("mixtral", *CLUSTER, *STEP, "--json")
    assert err == ""
    assert set(names(shown)) == {"tp1_pp1_dp2_ep1", "tp1_pp1_dp2_ep2", "tp1_pp2_dp1_ep1", "tp2_pp1_dp1_ep1"}
    assert (shown["strategies"], shown["dropped"], shown["sequence_length"]) == (4, {}, 128)
    seconds = [found["step_s"] for found in shown["plans"]]
    assert seconds == sorted(seconds)
    for found in shown["plans"]:
        assert found["step_s"] == pytest.approx(sum(found["terms"].values()))
        assert found["runs"] == (found["tensor"] == 1)
        assert found["expert"] * found["expert_data"] == found["data"]
        assert found["boundaries"][-1] == 6
    assert {found["why_not"] for found in shown["plans"]} == {
        None,
        "not runnable here: DeepSpeed's tensor parallelism does not cut experts",
    }


@pytest.mark.parametrize("more", [[], ["--gradient-checkpointing"]], ids=["kept", "recomputed"])
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_a_plan_needs_as_much_memory_as_fit_says(
    plan: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, more: list[str]
) -> None:
    argv = ["--devices", "4", *CLUSTER[2:], *STEP, "--write", str(tmp_path / "plans"), "--json"]
    shown, _ = plan(model, *argv, *more)
    written = [found for found in shown["plans"] if found["file"] and found["tensor"] == 1]
    assert {found["expert"] for found in written} == ({1, 2, 4} if model == "mixtral" else {1})
    for found in written:
        argv = ["--deepspeed", found["file"], "--world-size", "4", "--device-memory-gib", "1", "--seq-length", "128"]
        main(["fit", str(tmp_path / model), *argv, *more, "--json"])
        stages = json.loads(capsys.readouterr().out)["memory"]
        assert max(stage["total"] for stage in stages) / 2**30 == pytest.approx(found["memory_gib"], rel=1e-6), found


def test_plans_for_which_there_is_no_room_leave_nothing(plan: Any, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", "8k") as disk:
        with pytest.raises(OSError, match="No space left"):
            (disk / "rest").write_bytes(bytes(20_000))
        _, err = plan("llama", *CLUSTER, *STEP, "--write", str(disk), status=2)
        assert err == f"paceline: --write {disk}: No space left on device; give a directory that can be written.\n"
        assert [path.name for path in disk.iterdir()] == ["rest"]


def test_the_table(plan: Any) -> None:
    text, _ = plan("llama", *CLUSTER, *STEP, "--memory-gib", "1")
    lines = text.splitlines()
    assert lines[0] == (
        "llama on 2 devices (2 a node, 1 GiB each), bfloat16, ZeRO 1, 16 samples a step in micro-batches of 1 x 128 "
        "tokens"
    )
    assert lines[1] == "3 strategies; left out: 0 for memory, 0 that do not divide the batch"
    assert lines[2].split() == [
        "strategy",
        "step_s",
        "dense_s",
        "tensor_s",
        "bubble_s",
        "gradients_s",
        "GiB",
        "M",
        "runs",
    ]
    assert len(lines) == 6
    assert {line.split()[1] for line in lines[3:]} == {"tp1_pp1_dp2_ep1", "tp1_pp2_dp1_ep1", "tp2_pp1_dp1_ep1"}


def test_why_something_cannot_run(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.moe.hf_experts.experts_of", lambda model: {})
    argv = ["--devices", "512", "--train-batch-size", "512", "--json", "--top", "999"]
    shown, _ = plan("mixtral", *CLUSTER, *STEP, *argv)
    why = {found["name"]: found["why_not"] for found in shown["plans"]}
    assert not any(found["runs_here"] for found in shown["plans"])
    assert why["tp2_pp2_dp128_ep1"] == "not runnable here: DeepSpeed's tensor parallelism does not cut experts"
    assert why["tp1_pp1_dp512_ep2"].startswith("not runnable here: expert_parallel.autoep_size is 2: ")
    assert why["tp1_pp1_dp512_ep1"].startswith("needs 512 devices, there are ")


def test_the_files(plan: Any, tmp_path: Path) -> None:
    from paceline.config import resolve

    folder = tmp_path / "plans"
    shown, _ = plan("mixtral", *CLUSTER, *STEP, "--write", str(folder), "--json", "--zero", "0")
    written = {path.name for path in folder.iterdir()}
    assert written == {"plans.txt"} | {f"{found['name']}.json" for found in shown["plans"] if found["runs"]}
    for found in shown["plans"]:
        if not found["runs"]:
            assert (found["file"], found["command"]) == (None, None)
            continue
        config = json.loads(Path(found["file"]).read_text())
        assert near_misses(config) == []
        assert PacelineConfig.of(config).pipeline.stages == found["pipeline"]
        assert config["zero_optimization"] == {"stage": 0}
        assert config["bf16"] == {"enabled": True}
        sizes: dict[str, Any] = {"num_layers": 4, "num_items": 6, "state_bytes": None, "device_bytes": None}
        resolved = resolve(config | {"gradient_clipping": 1.0}, world_size=2, cpu=False, **sizes)
        assert (resolved.data_parallel, resolved.micro_batches) == (found["data"], found["micro_batches"])
        assert resolved.expert_parallel == found["expert"]
        assert found["command"].startswith(
            f"deepspeed --num_gpus 2 --module paceline.launch.finetune --deepspeed {found['file']} "
        )
    assert "mixtral on 2 devices" in (folder / "plans.txt").read_text()


def test_several_nodes_are_started_by_a_hostfile(plan: Any, tmp_path: Path) -> None:
    argv = [*CLUSTER, "--devices-per-node", "1", *STEP, "--write", str(tmp_path / "plans"), "--json"]
    shown, _ = plan("llama", *argv)
    assert all(found["command"].startswith("deepspeed --hostfile HOSTFILE --module ") for found in shown["plans"])


def test_a_config_stands_for_its_folder(plan: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan("llama", *CLUSTER, *STEP)
    argv = ["--write", str(tmp_path / "plans"), "--json"]
    assert main(["plan", str(tmp_path / "llama" / "config.json"), *CLUSTER, *STEP, *argv]) == 0
    commands = [found["command"] for found in json.loads(capsys.readouterr().out)["plans"] if found["tensor"] == 1]
    assert all(f" --model_name_or_path {tmp_path / 'llama'} " in command for command in commands)


def test_a_tensor_parallel_file_is_for_a_trainer(plan: Any, tmp_path: Path) -> None:
    shown, _ = plan("llama", *CLUSTER, *STEP, "--write", str(tmp_path / "plans"), "--json", "--dtype", "float32")
    found = next(found for found in shown["plans"] if found["tensor"] == 2)
    config = json.loads((tmp_path / "plans" / "tp2_pp1_dp1_ep1.json").read_text())
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (1, 16)
    # Neither DeepSpeed nor the Trainer counts tensor-parallel ranks as one when it checks the product.
    assert not {"paceline", "bf16", "fp16", "train_batch_size"} & set(config)
    assert "--module paceline.launch.patched YOUR_TRAINER_SCRIPT.py --deepspeed " in found["command"]


def test_a_pipeline_of_slices_is_for_the_job(plan: Any, tmp_path: Path) -> None:
    argv = ["--devices", "4", *CLUSTER[2:], *STEP, "--write", str(tmp_path / "plans"), "--json", "--top", "99"]
    shown, _ = plan("llama", *argv, "--late-gradients")
    rows = {found["name"]: found for found in shown["plans"]}
    found = rows["tp2_pp2_dp1_ep1"]
    config = json.loads(Path(found["file"]).read_text())
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert config["train_batch_size"] == 16
    assert config["paceline"]["pipeline"]["stages"] == 2
    assert " --module paceline.launch.finetune --deepspeed " in found["command"]
    late = [row["why_not"] for row in shown["plans"] if row["tensor"] > 1 and "schedule" in row]
    assert late
    assert set(late) == {"not runnable here: slices of layers were tried with steps that end in a flush only"}
    halves, _ = plan("llama", *argv, "--half-layers")
    rows = {found["name"]: found["why_not"] for found in halves["plans"]}
    assert rows["tp2_pp2_dp1_ep1"] == "not runnable here: layers in slices are cut between whole layers only"


def test_what_does_not_fit(plan: Any) -> None:
    shown, err = plan("llama", *CLUSTER, *STEP, "--memory-gib", "0.0001", "--json", status=3)
    assert shown["plans"] == []
    assert shown["dropped"] == {"memory": 3}
    assert [row["reason"] for row in shown["why_dropped"]] == ["memory"] * 3
    assert err.startswith("paceline: none of 3 strategies can be, such as tp2_pp1_dp1_ep1: stage 0 needs ")
    assert err.endswith(" although layers are recomputed.\n")
    assert err.count("\n") == 1
    text, _ = plan("llama", *CLUSTER, *STEP, "--memory-gib", "0.0001", status=3)
    assert text.splitlines()[1] == "3 strategies; left out: 3 for memory, 0 that do not divide the batch"


def test_layers_are_recomputed_where_that_alone_fits(plan: Any, tmp_path: Path) -> None:
    argv = [*CLUSTER, *STEP, "--micro-batch-size", "8", "--json"]
    free, always = plan("llama", *argv)[0], plan("llama", *argv, "--gradient-checkpointing")[0]
    need, less = ({row["name"]: row["memory_gib"] for row in shown["plans"]} for shown in (free, always))
    seconds, quick = ({row["name"]: row["step_s"] for row in shown["plans"]} for shown in (always, free))
    name, room = "tp1_pp1_dp2_ep1", ["--memory-gib", str((need["tp1_pp1_dp2_ep1"] + less["tp1_pp1_dp2_ep1"]) / 2)]
    shown, _ = plan("llama", *argv, *room, "--write", str(tmp_path / "plans"))
    rows = {row["name"]: row for row in shown["plans"]}
    assert rows[name]["gradient_checkpointing"]
    assert seconds[name] == pytest.approx(quick[name]), "a run keeps what has room"
    assert quick[name] < rows[name]["step_s"]
    (again,) = rows[name]["recomputed"]
    assert 0 < again < 4
    written = json.loads(Path(rows[name]["file"]).read_text())
    assert written["paceline"]["pipeline"]["recompute"] == [again]
    assert "pipeline" not in written
    other = rows["tp2_pp1_dp1_ep1"]
    assert not other["gradient_checkpointing"]
    assert "pipeline" not in json.loads(Path(other["file"]).read_text())
    (tight,) = plan("llama", *argv, *room, "--no-gradient-checkpointing")[0]["why_dropped"][:1]
    assert (tight["name"], tight["reason"]) == (name, "memory")
    title, *table = plan("llama", *argv[:-1], *room)[0].splitlines()[2:]
    assert "recomputes" in title
    assert f" {again} of 4 layers " in next(row for row in table if name in row)
    adaptive = plan("llama", *argv, *room, "--adaptive")[0]
    assert {row["name"]: row["gradient_checkpointing"] for row in adaptive["plans"]}[name]


def test_experts_are_not_recomputed_without_a_flush(plan: Any, tmp_path: Path) -> None:
    """A run refuses it: other weights send tokens to other experts. What is written must start."""
    argv = [*CLUSTER, *STEP, "--devices", "4", "--top", "99", "--late-gradients", "--json"]
    free, _ = plan("mixtral", *argv)
    room = min(row["memory_gib"] for row in free["plans"] if "schedule" in row) * 0.999
    tight, _ = plan("mixtral", *argv, "--memory-gib", str(room))
    assert any("schedule" in row for row in free["plans"])
    assert not any("schedule" in row for row in tight["plans"])
    assert any(row["gradient_checkpointing"] for row in tight["plans"])
    always, _ = plan("mixtral", *argv, "--gradient-checkpointing")
    assert not any("schedule" in row for row in always["plans"])
    dense, _ = plan("llama", *argv, "--gradient-checkpointing")
    assert any("schedule" in row for row in dense["plans"])


def test_a_tensor_parallel_plan_tells_its_trainer_to_recompute(plan: Any, tmp_path: Path) -> None:
    more = ["--gradient-checkpointing", "--write", str(tmp_path / "plans"), "--json"]
    rows = {row["name"]: row for row in plan("llama", *CLUSTER, *STEP, *more)[0]["plans"]}
    assert rows["tp2_pp1_dp1_ep1"]["command"].endswith(" --gradient_checkpointing True …")
    assert "gradient_checkpointing" not in rows["tp1_pp2_dp1_ep1"]["command"]


def test_top(plan: Any) -> None:
    all_of_them, _ = plan("llama", *CLUSTER, *STEP, "--json")
    one, _ = plan("llama", *CLUSTER, *STEP, "--json", "--top", "1")
    assert names(one) == names(all_of_them)[:1]


def test_the_best_that_can_run_is_shown_wherever_it_is(plan: Any, tmp_path: Path) -> None:
    """One sample cannot be shared by replicas, and a layer's ranks are busy all the time, unlike stages."""
    argv = [*CLUSTER, "--devices", "4", "--train-batch-size", "1", "--json", "--top", "1"]
    shown, _ = plan("mixtral", *argv)
    assert [(found["rank"], found["name"], found["runs"]) for found in shown["plans"]] == [
        (1, "tp2_pp2_dp1_ep1", False),
        (2, "tp1_pp4_dp1_ep1", True),
    ]
    assert shown["dropped"] == {"batch": 7}
    plan("mixtral", *argv, "--write", str(tmp_path / "plans"))
    assert [path.stem for path in (tmp_path / "plans").glob("*.json")] == ["tp1_pp4_dp1_ep1"]


def test_flags_go_before_the_file(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"devices": 8, "flops_per_s": 1e12, "intra_node": {"bytes_per_s": 1e9}}))
    shown, _ = plan(
        "llama", "--cluster", str(path), *STEP, "--json", "--devices", "4", "--intra-node-latency-s", "1e-5"
    )
    assert (shown["cluster"]["devices"], shown["cluster"]["flops_per_s"]) == (4, 1e12)
    assert (shown["cluster"]["intra_node"]["bytes_per_s"], shown["cluster"]["intra_node"]["latency_s"]) == (1e9, 1e-5)


def test_seconds_of_a_profile(plan: Any, tmp_path: Path) -> None:
    items = [
        ItemProfile("embedding", "E", 0.0, 0.0, 0, 1, 1),
        *(ItemProfile(f"layers.{index}", "L", 0.1, 0.2, 1, 1, 1) for index in range(4)),
        ItemProfile("head", "H", 0.05, 0.05, 1, 0, 1),
    ]
    path = tmp_path / "p.json"
    device = DeviceProfile("d", 1.0, 1, 1)
    Profile(fingerprint(MODELS["mixtral"]), "float32", 1, 128, False, tuple(items), (device,)).save(path)
    argv = ["--devices", "1", "--profile", str(path), *STEP, "--json"]
    shown, err = plan("mixtral", *argv)
    terms = shown["plans"][0]["terms"]
    assert err == ""
    assert shown["dtype"] == "float32"
    assert terms["dense"] + terms["experts"] == pytest.approx(16 * (4 * 0.3 + 0.1))
    assert terms["experts"] > terms["dense"] / 4
    shown, err = plan("mixtral", *argv, "--seq-length", "64")
    assert shown["plans"][0]["step_s"] == pytest.approx(16 * (4 * 0.3 + 0.1) / 2)
    assert "measured with sequence_length 128 and the run has 64" in err
    again, err = plan("mixtral", *argv, "--gradient-checkpointing")
    assert err == ""
    assert again["plans"][0]["step_s"] == pytest.approx(16 * (4 * 0.3 + 0.1)), "all activations have room"
    tight = str(again["plans"][0]["memory_gib"])
    again, err = plan("mixtral", *argv, "--gradient-checkpointing", "--memory-gib", tight)
    assert 16 * (4 * 0.3 + 0.1) < again["plans"][0]["step_s"] <= 16 * (4 * 0.4 + 0.1), "a forward longer"
    _, err = plan("llama", *argv, status=2)
    assert err.startswith(f"paceline: profile {path} is of another model: ")
    Profile(fingerprint(MODELS["mixtral"]), "float32", 1, 128, True, tuple(items), (device,)).save(path)
    as_measured, err = plan("mixtral", *argv)
    assert (err, as_measured["plans"][0]["gradient_checkpointing"]) == ("", True)
    assert as_measured["plans"][0]["step_s"] == pytest.approx(16 * (4 * 0.2 + 0.1)), "a run would keep all of it"
    assert (
        "gradient_checkpointing True and the run has False" in plan("mixtral", *argv, "--no-gradient-checkpointing")[1]
    )
    Profile(fingerprint(MODELS["mixtral"]), "float32", 1, 128, False, tuple(items[1:]), (device,)).save(path)
    _, err = plan("mixtral", *argv, status=2)
    assert err.startswith(f"paceline: profile {path}: it has 5 items, and the model 6 (embedding, layers, head); ")


def test_loads_make_expert_parallelism_slower(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "loads.json"

    def step_s(loads: Any, *argv: str) -> float:
        path.write_text(json.dumps([loads] * 4))
        shown, _ = plan("mixtral", *CLUSTER, *STEP, "--loads", str(path), "--json", *argv)
        return next(found["step_s"] for found in shown["plans"] if found["expert"] == 2)

    even, skewed = step_s([5, 5, 5, 5]), step_s([10, 8, 1, 1])
    log = tmp_path / "expert_loads.jsonl"
    layer = {"loads": [10, 8, 1, 1], "placement": [[0, 1], [2, 3]]}
    layers = [{"name": f"layers.{index}.mlp", **layer} for index in range(4)]
    log.write_text(json.dumps({"step": 10, "steps": 10, "layers": layers}) + "\n")
    shown, _ = plan("mixtral", *CLUSTER, *STEP, "--loads", str(log), "--json")
    assert next(found["step_s"] for found in shown["plans"] if found["expert"] == 2) == skewed
    assert even < step_s([10, 8, 1, 1], "--rebalanced") < skewed
    assert even < step_s([10, 8, 1, 1], "--capacity-factor", "1.2") < skewed
    shown, _ = plan("mixtral", *CLUSTER, *STEP, "--worst-routing", "--json")
    assert next(found["step_s"] for found in shown["plans"] if found["expert"] == 2) > skewed
    shown, _ = plan("mixtral", *CLUSTER, *STEP, "--json")
    assert even < next(found["step_s"] for found in shown["plans"] if found["expert"] == 2) < skewed, "not known"
    texts = [plan("mixtral", *CLUSTER, *STEP, *more)[0] for more in ([], ["--loads", str(path)], ["--worst-routing"])]
    assert [text.count("loads of experts are not known") for text in texts] == [1, 0, 0]


def test_the_files_say_all_that_their_predictions_stand_on(plan: Any, tmp_path: Path) -> None:
    from paceline.config import resolve

    (tmp_path / "loads.json").write_text(json.dumps([[10, 8, 1, 1]] * 4))
    loads = ["--loads", str(tmp_path / "loads.json")]
    cases: list[tuple[list[str], bool, bool]] = [
        ([], False, False),
        ([*loads], False, False),
        ([*loads, "--rebalanced"], True, False),
        (["--gradient-checkpointing"], False, True),
    ]
    for number, (argv, moves, recomputes) in enumerate(cases):
        folder = tmp_path / f"plans{number}"
        more = ["--devices", "4", "--micro-batch-size", "2", "--write", str(folder), "--json"]
        shown, _ = plan("mixtral", *CLUSTER, *STEP, *argv, *more)
        found = [row for row in shown["plans"] if row["file"]]
        assert {(row["pipeline"], row["data"], row["expert"]) for row in found} >= {(2, 2, 2), (1, 4, 4), (4, 1, 1)}
        for row in found:
            config = json.loads(Path(row["file"]).read_text())
            sizes: dict[str, Any] = {"num_layers": 4, "num_items": 6, "state_bytes": None, "device_bytes": None}
            resolved = resolve(config | {"gradient_clipping": 1.0}, world_size=4, cpu=False, **sizes)
            assert near_misses(config) == []
            assert (resolved.stages, resolved.data_parallel) == (row["pipeline"], row["data"])
            assert resolved.expert_parallel == row["expert"]
            assert (resolved.micro_batches, resolved.micro_batch_size) == (row["micro_batches"], 2)
            assert resolved.schedule.type == "1f1b" == config["paceline"]["pipeline"]["schedule"]
            assert row["pipeline"] == 1 or resolved.partition == row["boundaries"]
            section = PacelineConfig.of(config).moe
            if moves and row["expert"] > 1:
                assert section is not None, "the job would leave experts in order"
                assert section.rebalance_every, "the job would never look"
                assert section.replicas == 0, "copies were not predicted"
            else:
                assert section is None, "experts in order were predicted"
            assert config.get("pipeline") == ({"activation_checkpoint_interval": 1} if recomputes else None)


LATE = ["--devices", "4", "--top", "99", "--late-gradients"]


def test_late_gradients_are_offered_when_they_are_asked_for(plan: Any) -> None:
    argv = [*CLUSTER, *STEP, *LATE, "--json"]
    plain, _ = plan("mixtral", *(flag for flag in argv if flag != "--late-gradients"))
    shown, _ = plan("mixtral", *argv)
    late = {row["name"]: row["schedule"] for row in shown["plans"] if "schedule" in row}
    assert late == {
        "tp1_pp2_dp2_ep1_multidirection1": {"type": "multidirection", "directions": 1},
        "tp1_pp2_dp2_ep1_multidirection2": {"type": "multidirection", "directions": 2},
        "tp1_pp2_dp2_ep1_one_direction": {"type": "one_direction"},
        "tp1_pp4_dp1_ep1_multidirection2": {"type": "multidirection", "directions": 2},
        "tp1_pp4_dp1_ep1_one_direction": {"type": "one_direction"},
        "tp2_pp2_dp1_ep1_multidirection1": {"type": "multidirection", "directions": 1},
        "tp2_pp2_dp1_ep1_multidirection2": {"type": "multidirection", "directions": 2},
        "tp2_pp2_dp1_ep1_one_direction": {"type": "one_direction"},
    }
    others = [{**row, "rank": 0} for row in shown["plans"] if "schedule" not in row]
    assert others == [{**row, "rank": 0} for row in plain["plans"]]
    text, _ = plan("mixtral", *CLUSTER, *STEP, *LATE)
    assert [line.split()[1] for line in text.splitlines()[3:]] == names(shown)


def test_late_gradients_in_fp16(plan: Any) -> None:
    """There is no one loss scale for the backwards of two steps."""
    shown, _ = plan("llama", *CLUSTER, *STEP, *LATE, "--json", "--dtype", "float16")
    assert {row["schedule"]["type"] for row in shown["plans"] if "schedule" in row} == {"multidirection"}


def test_late_gradients_that_cannot_be(plan: Any) -> None:
    shown, err = plan("llama", *CLUSTER, *STEP, *LATE, "--json", "--memory-gib", "0.0001", status=3)
    assert len(shown["why_dropped"]) == len({row["name"] for row in shown["why_dropped"]}) == shown["strategies"]
    assert {row["why"].split()[0] for row in shown["why_dropped"]} == {"stage", "device"}
    assert f" strategies can be, such as {shown['why_dropped'][-1]['name']}: " in err
    shown, _ = plan("llama", *CLUSTER, "--train-batch-size", "6", *LATE, "--json")
    why = {row["name"]: row["why"] for row in shown["why_dropped"]}
    assert why["tp1_pp4_dp1_ep1_multidirection2"] == "6 micro-batches a step are no multiple of 4 stages"
    assert "tp1_pp4_dp1_ep1_one_direction" in names(shown)


def test_the_files_of_late_gradients(plan: Any, tmp_path: Path) -> None:
    from paceline.config import resolve

    (tmp_path / "loads.json").write_text(json.dumps([[10, 8, 1, 1]] * 4))
    argv = [*CLUSTER, *STEP, *LATE, "--loads", str(tmp_path / "loads.json"), "--rebalanced"]
    shown, _ = plan("mixtral", *argv, "--write", str(tmp_path / "plans"), "--json")
    late = [row for row in shown["plans"] if "schedule" in row and row["runs"]]
    assert len(late) == 5
    for row in late:
        assert Path(row["file"]) == tmp_path / "plans" / f"{row['name']}.json"
        config = json.loads(Path(row["file"]).read_text())
        assert near_misses(config) == []
        assert config["paceline"]["pipeline"]["schedule"] == row["schedule"]
        sizes: dict[str, Any] = {"num_layers": 4, "num_items": 6, "state_bytes": None, "device_bytes": None}
        resolved = resolve(config | {"gradient_clipping": 1.0}, world_size=4, cpu=False, **sizes)
        assert (resolved.stages, resolved.micro_batches) == (row["pipeline"], row["micro_batches"])
        assert (resolved.partition, resolved.schedule.is_asynchronous) == (row["boundaries"], True)
        assert (resolved.schedule.type, resolved.schedule.directions) == (
            row["schedule"]["type"],
            row["schedule"].get("directions"),
        )
        assert resolved.schedule.optimizer_owners in (None, "direction")  # as its memory was counted


def test_a_capacity_factor_is_predicted_only(plan: Any, tmp_path: Path) -> None:
    argv = [*CLUSTER, *STEP, "--capacity-factor", "1.5"]
    assert plan("mixtral", *argv)[1] == ""
    assert plan("mixtral", *argv, "--write", str(tmp_path / "plans"))[1].startswith("paceline: --capacity-factor is ")


FILES = {
    "broken.json": "{",
    "list.json": "[]",
    "cluster.json": '{"devices": 2, "flops": 1}',
    "loads.json": "[[1, 2, 3, 4]]",
    "words.json": '[["a"]]',
    "number.json": "5",
    "large.json": f"[[1{'0' * 400}]]",
    "digits.json": f"[[1{'0' * 5000}]]",
}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "there is no number of devices: give --devices N, or --cluster FILE with it."),
        (["--devices", "2"], "there is no speed of the devices: give --flops-per-s, flops_per_s in --cluster, "),
        ([*CLUSTER, "--devices", "0"], "cluster: devices is 0: give a whole number from 1 upwards."),
        ([*CLUSTER, "--devices", str(10**12)], "there are too many devices to plan for: give 1048576 at most."),
        ([*CLUSTER, "--memory-gib", "-1"], "cluster: memory_gib is -1.0: give a number above 0."),
        ([*CLUSTER, "--flops-per-s", "1e-320"], "a step takes longer than can be computed with: give higher speeds"),
        (
            [*CLUSTER, "--intra-node-bytes-per-s", "1e-320"],
            "a step takes longer than can be computed with: give higher speeds",
        ),
        ([*CLUSTER, "--train-batch-size", str(10**400)], "--train-batch-size is too large to plan for: give at most "),
        ([*CLUSTER, "--micro-batch-size", str(10**12)], "--micro-batch-size is too large to plan for: give at most "),
        ([*CLUSTER, "--seq-length", str(10**20)], "--seq-length is too large to plan for: give at most "),
        ([*CLUSTER, "--top", "0"], "--top is 0: give a whole number from 1 upwards."),
        ([*CLUSTER, "--train-batch-size", "0"], "--train-batch-size is 0: give a whole number from 1 upwards."),
        ([*CLUSTER, "--micro-batch-size", "0"], "--micro-batch-size is 0: give a whole number from 1 upwards."),
        (
            [*CLUSTER, "--seq-length", "129"],
            "sequence_length is 129 and the model has 128 positions: give at most 128.",
        ),
        ([*CLUSTER, "--capacity-factor", "0"], "capacity_factor is 0.0: give a number above 0."),
        ([*CLUSTER, "--rebalanced"], "--rebalanced places experts by what they have to do: give --loads FILE too."),
        (["--cluster", "absent.json"], "--cluster absent.json: No such file or directory; give a JSON file."),
        (["--cluster", "broken.json"], "--cluster broken.json, line 1, column 2: "),
        (["--cluster", "list.json"], "--cluster list.json: it must hold an object {...}."),
        (
            ["--cluster", "cluster.json"],
            '"flops" is not a key of the cluster; did you mean "flops_per_s"?',
        ),
        ([*CLUSTER, "--profile", "absent.json"], "profile absent.json: No such file or directory; make one with "),
        ([*CLUSTER, "--loads", "absent.json"], "--loads absent.json: No such file or directory; give a JSON file."),
        ([*CLUSTER, "--loads", "loads.json"], "--loads loads.json: there are loads of 1 layers and 4 MoE layers: "),
        ([*CLUSTER, "--loads", "list.json"], "--loads list.json: there are no loads, and 4 MoE layers: give one row"),
        ([*CLUSTER, "--write", ""], "--write: the name of a directory is empty; give one, or leave --write out."),
        ([*CLUSTER, "--loads", "words.json"], "--loads words.json: expert 0 in row 0 of [[tokens of each expert"),
        ([*CLUSTER, "--loads", "number.json"], "--loads number.json: row 0 of [[tokens of each expert] of each MoE"),
        ([*CLUSTER, "--loads", "large.json"], "--loads large.json: expert 0 in row 0 of [[tokens of each expert"),
        ([*CLUSTER, "--loads", "digits.json"], "--loads digits.json: Exceeds the limit"),
        (
            [*CLUSTER, "--loads", "loads.json", "--worst-routing"],
            "--worst-routing does not look at --loads: drop one of them.",
        ),
        (["--measure", "--devices", "1"], "--measure with 1 devices: this machine has "),
        (
            ["--measure", "--devices", "2", "--profile", "x"],
            "--measure makes a profile and a cluster file of its own: ",
        ),
        (
            [*CLUSTER, "--write", "broken.json"],
            "--write broken.json: File exists; give a directory that can be written.",
        ),
    ],
)
def test_what_cannot_be(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    _, err = plan("mixtral", *STEP, *argv, status=2)
    assert err.startswith("paceline: ")
    assert message in err
    assert err.count("\n") == 1


def test_sigterm_while_measuring_ends_the_ranks(tmp_path: Path) -> None:
    line = tmp_path / "line"
    os.mkfifo(line)
    rank = f"exec 3> {line}; echo started >&3; sleep 60; echo survived >&3"
    code = f"from paceline.launch.plan import _output; _output({['sh', '-c', rank]!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as command, line.open() as told:
        assert told.readline() == "started\n"
        command.terminate()
        assert told.read() == ""
    assert command.returncode == 143


def test_routing_of_a_dense_model(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "loads.json").write_text("[[1, 1]]")
    routing = (["--loads", str(tmp_path / "loads.json")], ["--worst-routing"], ["--capacity-factor", "1.25"])
    for flags in routing:
        _, err = plan("llama", *CLUSTER, *STEP, *flags, status=2)
        assert err.startswith(f"paceline: {' '.join(flags)}: ")
        assert err.endswith(" has no experts; drop it.\n")


def test_no_such_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "absent"), *CLUSTER, *STEP]) == 2
    err = capsys.readouterr().err
    assert "does not exist: give a directory" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_local_experts": -1}, "no model can be made of "),
        ({"vocab_size": -1}, "no model can be made of "),
        ({"num_hidden_layers": 10**400}, "has a num_hidden_layers that is too large to count with: give at most 1024."),
    ],
)
def test_sizes_that_no_model_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: dict[str, int], message: str
) -> None:
    MODELS["mixtral"].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    assert main(["plan", str(tmp_path), *CLUSTER, *STEP]) == 2
    err = capsys.readouterr().err
    assert err.startswith("paceline: ")
    assert message in err
    assert err.count("\n") == 1


def test_pipelines_with_the_schedules_of_adaptive(plan: Any, tmp_path: Path) -> None:
    """On a slow link a step is shorter than with 1F1B, and the JSON says so; without a pipeline nothing changes."""
    slow = ["--devices", "4", "--devices-per-node", "1", "--flops-per-s", "2e10", "--inter-node-bytes-per-s", "2e7"]
    argv = [*slow, "--inter-node-latency-s", "1e-3", *STEP, "--json"]
    usual, _ = plan("llama", *argv)
    tuned, _ = plan("llama", *argv, "--adaptive", "--write", str(tmp_path / "plans"))
    before = {found["name"]: found["step_s"] for found in usual["plans"]}
    after = {found["name"]: found["step_s"] for found in tuned["plans"]}
    assert after["tp1_pp4_dp1_ep1"] < 0.95 * before["tp1_pp4_dp1_ep1"]
    assert after["tp1_pp1_dp4_ep1"] == before["tp1_pp1_dp4_ep1"]
    assert list(after.values()) == sorted(after.values())
    written = json.loads((tmp_path / "plans" / "tp1_pp4_dp1_ep1.json").read_text())
    assert PacelineConfig.of(written).pipeline.schedule.type == "adaptive"
    for found in tuned["plans"]:
        assert found["step_s"] == pytest.approx(sum(found["terms"].values()))


def test_pipelines_in_two_chunks(plan: Any, tmp_path: Path) -> None:
    """Where they are clearly faster, they have a row of their own, and a JSON that says so."""
    fast = ["--devices", "2", "--flops-per-s", "1e9", "--intra-node-bytes-per-s", "1e10"]
    few = ["--train-batch-size", "2", "--json"]
    shown, _ = plan("llama", *fast, *few, "--adaptive", "--write", str(tmp_path / "plans"))
    found = {each["name"]: each for each in shown["plans"]}
    two = found["tp1_pp2_dp1_ep1_chunks2"]
    assert two["step_s"] < 0.97 * found["tp1_pp2_dp1_ep1"]["step_s"]
    assert two["step_s"] == pytest.approx(sum(two["terms"].values()))
    assert two["schedule"] == {"type": "adaptive", "chunks": 2}
    assert two["boundaries"] == [0, 2, 3, 4, 6]
    written = json.loads((tmp_path / "plans" / "tp1_pp2_dp1_ep1_chunks2.json").read_text())
    pipeline = PacelineConfig.of(written).pipeline
    assert (pipeline.stages, pipeline.schedule.type, pipeline.schedule.chunks) == (2, "adaptive", 2)
    plan_of_job = resolve(
        written, world_size=2, num_layers=4, num_items=6, state_bytes=None, device_bytes=None, cpu=True
    )
    assert (plan_of_job.schedule.chunks, plan_of_job.partition) == (2, [0, 2, 3, 4, 6])
    usual, _ = plan("llama", *fast, *few)
    assert "chunks2" not in json.dumps(usual)
    slow = [*fast[:-1], "1e4", *few]
    assert "chunks2" not in json.dumps(plan("llama", *slow, "--adaptive")[0])


def test_halves_of_layers_are_recomputed_where_that_alone_fits(plan: Any, tmp_path: Path) -> None:
    argv = [*CLUSTER, *STEP, "--micro-batch-size", "8", "--half-layers", "--json"]
    free, always = plan("llama", *argv)[0], plan("llama", *argv, "--gradient-checkpointing")[0]
    name = "tp1_pp2_dp1_ep1"
    need, less = (next(r["memory_gib"] for r in shown["plans"] if r["name"] == name) for shown in (free, always))
    shown, _ = plan("llama", *argv, "--memory-gib", str((need + less) / 2), "--write", str(tmp_path / "plans"))
    row = next(row for row in shown["plans"] if row["name"] == name)
    assert row["gradient_checkpointing"]
    assert 0 < sum(row["recomputed"]) < 4
    written = json.loads(Path(row["file"]).read_text())["paceline"]["pipeline"]
    assert (written["half_layers"], written["recompute"]) == (True, row["recomputed"])
    table = plan("llama", *argv[:-1], "--memory-gib", str((need + less) / 2))[0]
    num_layers = 4 + (row["boundaries"][1] % 2 == 0)
    assert f" {sum(row['recomputed'])} of {num_layers} layers " in next(r for r in table.splitlines() if name in r)
    whole = plan("llama", *argv, "--gradient-checkpointing", "--write", str(tmp_path / "whole"))[0]
    file = next(row["file"] for row in whole["plans"] if row["name"] == name)
    assert json.loads(Path(file).read_text())["pipeline"] == {"activation_checkpoint_interval": 1}, "all layers are"


@pytest.mark.parametrize("flags", [[], ["--adaptive"], ["--half-layers"]])
def test_stages_share_a_head_that_is_more_work_than_a_stage(plan: Any, tmp_path: Path, flags: list[str]) -> None:
    """The head is cut where that is faster, and the JSON says so."""
    argv = [*CLUSTER, *STEP, *flags, "--memory-gib", "1", "--json"]
    name = "tp1_pp2_dp1_ep1"
    usual, sliced = plan("wide", *argv)[0], plan("wide", *argv, "--head-slices", "--write", str(tmp_path / "p"))[0]
    whole, row = (next(row for row in shown["plans"] if row["name"] == name) for shown in (usual, sliced))
    assert (whole["head_slices"], row["head_slices"]) == (1, 16)
    assert row["step_s"] < 0.97 * whole["step_s"]
    assert row["step_s"] == pytest.approx(sum(row["terms"].values()))
    layers = 8 if "--half-layers" in flags else 4
    assert row["boundaries"][1] > 1 + layers, "the first stage has all layers and a part of the head"
    assert row["boundaries"][-1] == 1 + layers + 16
    assert {each["head_slices"] for each in sliced["plans"] if each["pipeline"] == 1} == {1}
    written = json.loads(Path(row["file"]).read_text())
    assert not near_misses(written)
    job = resolve(written, world_size=2, num_layers=4, num_items=6, state_bytes=None, device_bytes=None, cpu=True)
    assert (job.head_slices, job.partition) == (16, row["boundaries"])
    assert " 16 slices " in next(
        line for line in (tmp_path / "p" / "plans.txt").read_text().splitlines() if name in line
    )
    assert all(each["head_slices"] == 1 for each in plan("llama", *argv, "--head-slices")[0]["plans"])


def test_a_head_that_fits_in_slices_alone_and_a_head_that_cannot_be_cut(plan: Any) -> None:
    argv = ["--devices", "4", *CLUSTER[2:], *STEP, "--no-gradient-checkpointing", "--json"]
    name = "tp1_pp4_dp1_ep1"
    need = next(row["memory_gib"] for row in plan("wide", *argv)[0]["plans"] if row["name"] == name)
    tight = [*argv, "--memory-gib", str(0.8 * need)]
    assert name not in names(plan("wide", *tight)[0])
    row = next(row for row in plan("wide", *tight, "--head-slices")[0]["plans"] if row["name"] == name)
    assert row["head_slices"] == 16
    assert row["memory_gib"] <= 0.8 * need
    _, err = plan("routed", *argv, "--head-slices", status=2)
    assert "leave head_slices out, or write output_router_logits false in the model's config" in err
