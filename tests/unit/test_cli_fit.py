"""``paceline fit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig, OPTConfig, Qwen3MoeConfig

from paceline.data.datasets import DEFAULT_BLOCK_SIZE
from paceline.hf.layer_profile import fingerprint
from paceline.hf.weights import skeleton
from paceline.launch.cli import main
from paceline.measure.profile_file import DeviceProfile, ItemProfile, Profile
from paceline.measure.tokens import MOST_TOKENS

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 128,
}
OPT = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
PARTS = ("weights", "gradients", "masters", "moments", "activations", "working", "transport")
GIB = 2**30


@pytest.fixture
def model(tmp_path: Path) -> str:
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def fit(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(config: dict[str, Any], *argv: str, status: int = 0) -> Any:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config))
        got = main(["fit", model, "--deepspeed", str(path), *argv])
        out, err = capsys.readouterr()
        assert got == status, err
        return (json.loads(out) if "--json" in argv and out else out), err

    return run


def ds(stages: int = 3, pipeline: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    section = {"pipeline": {"stages": stages, **(pipeline or {})}}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "paceline": section, **changes}


def test_every_stage_and_what_it_needs(fit: Any) -> None:
    shown, err = fit(ds(), "--world-size", "3", "--device-memory-gib", "1", "--json")
    assert err == ""
    assert shown["fits"]
    assert shown["remedies"] == []
    assert (shown["micro_batch_size"], shown["sequence_length"], shown["schedule"]) == (2, 128, "1f1b")
    assert [row["live_micro_batches"] for row in shown["memory"]] == [3, 2, 1]
    parameters = 2 * 500 * 64 + 64 + 6 * 36992
    assert sum(row["weights"] for row in shown["memory"]) == 4 * parameters
    assert sum(row["moments"] for row in shown["memory"]) == 8 * parameters
    for row in shown["memory"]:
        assert row["total"] == sum(row[name] for name in PARTS)
        assert row["limit"] == GIB
    assert shown["memory"][-1]["working"] == 2 * 128 * 500 * 8  # logits and their gradient


def test_layers_in_slices(fit: Any, tmp_path: Path) -> None:
    memory = ["--device-memory-gib", "1", "--json"]
    whole, _ = fit(ds(), "--world-size", "3", *memory)
    sliced, _ = fit(ds(tensor_parallel={"autotp_size": 2}), "--world-size", "6", *memory)
    assert (sliced["stages"], sliced["tensor_parallel"], sliced["data_parallel"]) == (3, 2, 1)
    (first, middle, last), (of_first, of_middle, of_last) = sliced["memory"], whole["memory"]
    assert middle["weights"] == of_middle["weights"] / 2
    assert of_first["weights"] / 2 < first["weights"] < of_first["weights"], "the embedding is whole"
    assert last["working"] == of_last["working"] / 2, "logits are of half of the rows"
    assert middle["activations"] < of_middle["activations"]
    text, _ = fit(ds(tensor_parallel={"autotp_size": 2}), "--world-size", "6", *memory[:2])
    assert text.startswith("3 stages x 2 tensor parallel x 1 data parallel, ")
    _, err = fit(ds(tensor_parallel={"autotp_size": 4}), "--world-size", "12", *memory, status=2)
    assert "tensor_parallel.autotp_size is 4: it must divide the 2 heads of self_attn.k_proj" in err


def test_recomputed_layers(fit: Any) -> None:
    """As the JSON says: some of each stage, or as few as it takes; the table is of what a run then needs."""
    argv = ("--world-size", "3", "--json")
    free, _ = fit(ds(), *argv, "--device-memory-gib", "1")
    told, _ = fit(ds(pipeline={"recompute": [2, 1, 0]}), *argv, "--device-memory-gib", "1")
    assert (free["recomputed"], told["recomputed"]) == ([0, 0, 0], [2, 1, 0])
    kept, less = ([row["activations"] for row in shown["memory"]] for shown in (free, told))
    assert [a < b for a, b in zip(less, kept, strict=True)] == [True, True, False]
    assert told["memory"][0]["working"] > 0
    room = str(0.8 * max(row["total"] for row in free["memory"]) / GIB)
    _, err = fit(ds(), *argv, "--device-memory-gib", room, status=3)
    assert "stage 0 needs" in err
    for method in ("work", "hetero", "uniform"):
        config = ds(pipeline={"recompute": "fit", "partition": method})
        found, _ = fit(config, *argv, "--device-memory-gib", room)
        assert found["fits"], method
        assert 0 < sum(found["recomputed"]) < 6, method
        text, _ = fit(config, *argv[:-1], "--device-memory-gib", room)
        counts = ", ".join(map(str, found["recomputed"]))
        assert text.splitlines()[1] == f"recomputed layers of each stage: {counts}"
    none, _ = fit(ds(pipeline={"recompute": "fit"}), *argv, "--device-memory-gib", "1")
    assert none["recomputed"] == [0, 0, 0]
    for method in ("work", "hetero"):
        config = ds(pipeline={"recompute": "fit", "partition": method})
        never, _ = fit(config, *argv, "--device-memory-gib", "0.0001", status=3)
        assert sum(never["recomputed"]) == 6
        assert not any("recompute" in remedy for remedy in never["remedies"])


def test_boundaries_are_those_of_what_is_kept(fit: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that have room are not computed again, and count for less beside the head."""
    LlamaConfig(**SIZES | {"vocab_size": 3000, "num_hidden_layers": 10}).save_pretrained(model)
    argv = ("--world-size", "3", "--json", "--device-memory-gib", "1")
    for method in ("work", "hetero"):
        config = ds(pipeline={"partition": method})
        found, again = (fit(config, *argv, *flags)[0]["partition"] for flags in ((), ("--gradient-checkpointing",)))
        assert found == again
        monkeypatch.setenv("PACELINE_RECOMPUTE_EARLY", "0")
        assert fit(config, *argv, "--gradient-checkpointing")[0]["partition"] != found
        monkeypatch.delenv("PACELINE_RECOMPUTE_EARLY")


def test_slices_of_the_head(fit: Any, model: str) -> None:
    """Together they are the head; of one that is tied, the device with the embedding has its rows once."""
    argv = ("--world-size", "2", "--json", "--device-memory-gib", "1")
    parameters = 2 * 500 * 64 + 64 + 6 * 36992
    parts = [0, 8, 11]  # a slice beside all layers, then three
    found, _ = fit(ds(2, {"head_slices": 4, "partition": parts}), *argv)
    first, last = found["memory"]
    assert found["partition"] == parts
    assert first["weights"] + last["weights"] == 4 * parameters
    assert last["weights"] == 4 * 3 * (500 * 64 + 64) // 4
    assert (first["working"], last["working"]) == (2 * 128 * 125 * 8, 2 * 128 * 375 * 8)
    again, _ = fit(ds(2, {"head_slices": 4, "partition": parts}), *argv, "--gradient-checkpointing")
    assert again["recomputed"] == [6, 0]
    some, _ = fit(ds(2, {"head_slices": 4, "partition": parts, "recompute": 2}), *argv)
    assert some["recomputed"] == [2, 0], "slices are no layers"
    assert some["memory"][1]["total"] == last["total"]
    _, err = fit(ds(2, {"head_slices": 4, "partition": parts, "recompute": [4, 2]}), *argv, status=2)
    assert "stage 1 has 0 layers; give at most 0 there" in err
    by_work, _ = fit(ds(2, {"head_slices": 4}), *argv)
    assert by_work["partition"][-1] == 11
    LlamaConfig(**SIZES, tie_word_embeddings=True).save_pretrained(model)
    tied, _ = fit(ds(2, {"head_slices": 4, "partition": parts}), *argv)
    assert tied["memory"][0]["weights"] == first["weights"] - 4 * 500 * 64 // 4
    assert tied["memory"][1]["weights"] == last["weights"]


def test_what_a_run_refuses_is_refused(fit: Any, model: str) -> None:
    """Slices on two stages of a rank, and recomputed layers of a model with experts in steps without a flush."""
    argv = ("--world-size", "2", "--json", "--device-memory-gib", "1")
    pipeline = {"head_slices": 8, "schedule": "zbv", "partition": "uniform"}
    _, err = fit(ds(2, pipeline), *argv, status=2)
    assert "put slices of the head on stages 1 and 2, which one rank holds" in err
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeConfig(**SIZES, **experts).save_pretrained(model)
    late = ds(2, {"schedule": "one_direction"})
    assert fit(late, *argv)[0]["fits"]
    _, err = fit(late, *argv, "--gradient-checkpointing", status=2)
    assert "the model has experts, pipeline.activation_checkpoint_interval is 1" in err
    _, err = fit(ds(2, {"schedule": "one_direction", "recompute": 1}), *argv, status=2)
    assert "the model has experts, paceline.pipeline.recompute is 1" in err


def test_recomputed_halves_of_layers(fit: Any) -> None:
    """A layer within which a stage ends counts for both stages; both of its halves on a stage count as one."""
    argv = ("--world-size", "2", "--json", "--device-memory-gib")
    parts = [0, 6, 14]  # two layers and an attention, then an MLP and three layers
    halves = {"half_layers": True, "partition": parts}
    free, _ = fit(ds(2, halves), *argv, "1")
    kept = [row["activations"] for row in free["memory"]]
    for asked, less in (([3, 4], [True, True]), ([1, 0], [True, False]), ([0, 1], [False, True])):
        told, _ = fit(ds(2, halves | {"recompute": asked}), *argv, "1")
        assert told["recomputed"] == asked
        assert [row["activations"] < most for row, most in zip(told["memory"], kept, strict=True)] == less
    _, err = fit(ds(2, halves | {"recompute": [3, 5]}), *argv, "1", status=2)
    assert "is [3, 5]: these are 8 layers, and the model has 6" in err
    _, err = fit(ds(2, halves | {"recompute": [4, 3]}), *argv, "1", status=2)
    assert "stage 0 has 3 layers" in err
    room = str(0.8 * max(row["total"] for row in free["memory"]) / GIB)
    short, _ = fit(ds(2, halves), *argv, room, status=3)
    assert any("recompute" in remedy for remedy in short["remedies"])
    for method in (parts, "work", "hetero"):
        found, _ = fit(ds(2, halves | {"partition": method, "recompute": "fit"}), *argv, room)
        assert found["fits"], method
        assert 0 < sum(found["recomputed"]) < 7, method


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", {"type": "multidirection", "directions": 2}])
def test_recomputed_layers_of_several_stages_a_rank(fit: Any, schedule: Any) -> None:
    argv = ("--world-size", "2", "--json", "--device-memory-gib")
    free, _ = fit(ds(2, {"schedule": schedule}), *argv, "1")
    room = 0.7 * max(row["total"] for row in free["memory"]) / GIB
    for method in ("uniform", "work", "hetero"):
        found, _ = fit(ds(2, {"schedule": schedule, "recompute": "fit", "partition": method}), *argv, str(room))
        assert found["fits"], method
        assert len(found["recomputed"]) == (4 if isinstance(schedule, str) else 2)
        assert [len(row["stages"]) for row in found["memory"]] == [2, 2]
        assert 0 < sum(found["recomputed"]) < 6, method


@pytest.mark.parametrize(
    ("schedule", "live"),
    [
        ("zbh1", [3, 3, 3]),
        ("zbv", [6, 6, 6]),
        ({"type": "adaptive", "chunks": 2}, [6, 6, 6]),
        ("generated", [6, 6, 6]),
    ],
)
def test_what_split_backwards_leave_for_later_counts_as_what_is_live(fit: Any, schedule: Any, live: list[int]) -> None:
    argv = ["--world-size", "3", "--device-memory-gib", "1", "--json"]
    shown, _ = fit(ds(pipeline={"schedule": schedule}), *argv)
    assert [row["live_micro_batches"] for row in shown["memory"]] == live
    whole, _ = fit(ds(), *argv)
    more = [a["activations"] / b["activations"] for a, b in zip(shown["memory"], whole["memory"], strict=True)]
    assert all(each > 0.9 for each in more)
    assert more[-1] > 2, "1F1B's last stage keeps one micro-batch"


def test_each_rank_holds_its_share_of_the_experts(fit: Any, model: str) -> None:
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeConfig(**SIZES, **experts).save_pretrained(model)
    argv = ("--world-size", "4", "--device-memory-gib", "1", "--json")
    whole, _ = fit(ds(2), *argv)
    shared, _ = fit(ds(2, expert_parallel={"enabled": True, "autoep_size": 2}), *argv)
    elsewhere = 3 * 2 * (3 * 64 * 32)  # of the three layers of a stage, two experts each
    for row, own in zip(whole["memory"], shared["memory"], strict=True):
        assert row["items"] == own["items"]
        for name, size in (("weights", 4), ("gradients", 4), ("moments", 8)):
            assert row[name] - own[name] == size * elsewhere
    config = ds(2, expert_parallel={"enabled": True, "autoep_size": 2})
    config["paceline"]["moe"] = {"replicas": 1}
    copied, _ = fit(config, *argv)
    for own, row in zip(shared["memory"], copied["memory"], strict=True):
        for name, size in (("weights", 4), ("gradients", 4), ("moments", 0)):
            assert row[name] - own[name] == size * elsewhere // 2, "one expert of each layer"


@pytest.mark.parametrize("part", ["activations", "working"])
def test_the_busiest_of_ranks_that_share_experts_keeps_more_than_its_part(fit: Any, model: str, part: str) -> None:
    """Half of the rows come to two of four ranks that share four experts, and more than a quarter to the busiest."""
    experts = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeConfig(**SIZES, **experts).save_pretrained(model)
    argv = ["--world-size", "4", "--device-memory-gib", "1", "--seq-length", "64", "--json"]
    argv += ["--gradient-checkpointing"] * (part == "working")
    whole, _ = fit(ds(1), *argv)
    shared, _ = fit(ds(1, expert_parallel={"enabled": True, "autoep_size": 4}), *argv)
    assert shared["memory"][0][part] > 1.1 * whole["memory"][0][part]


def test_experts_that_cannot_be_shared_are_refused_as_by_a_run(fit: Any, model: str) -> None:
    config, argv = ds(2, expert_parallel={"enabled": True, "autoep_size": 4}), ("--world-size", "8")
    _, err = fit(config, *argv, status=2)
    assert "autoep_size is 4: LlamaForCausalLM (model type 'llama') has no experts" in err
    Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=2, num_experts_per_tok=1).save_pretrained(model)
    _, err = fit(config, *argv, status=2)
    assert "it must not exceed the number of experts, and model.layers.0.mlp.experts has 2" in err


def test_the_fewest_stages_are_those_of_a_run(fit: Any, model: str) -> None:
    """Each rank counts its own experts only."""
    experts = {"moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2}
    Qwen3MoeConfig(**SIZES, **experts).save_pretrained(model)
    argv = ("--world-size", "4", "--json", "--device-memory-gib")
    shared = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    one, _ = fit(ds(2, **shared), *argv, "1")
    room = 1.2 * 16 * sum(row["weights"] for row in one["memory"]) / 4 / 2 / 0.6 / GIB
    found, _ = fit({**ds(**shared), "paceline": {"pipeline": {}}}, *argv, str(room), status=3)
    assert found["stages"] == 2


def test_stages_that_go_with_the_batch_are_those_of_a_planned_run(fit: Any) -> None:
    """Two stages would be two replicas, among which three micro-batches cannot be shared out."""
    config = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2, "paceline": {"pipeline": {}}}
    found, _ = fit(config, "--world-size", "4", "--device-memory-gib", "1", "--json")
    assert found["stages"] == 4


@pytest.mark.parametrize("pipeline", [{"stages": 1}, {"stages": 2, "schedule": "zbv"}, {"stages": 2}])
def test_weights_that_embedding_and_head_of_a_device_share_are_there_once(
    fit: Any, model: str, pipeline: dict[str, Any]
) -> None:
    argv = ("--world-size", "2", "--device-memory-gib", "1", "--json")
    apart, _ = fit(ds(pipeline=pipeline), *argv)
    LlamaConfig(**SIZES, tie_word_embeddings=True).save_pretrained(model)
    tied, _ = fit(ds(pipeline=pipeline), *argv)
    once = 4 * 500 * 64 if pipeline != {"stages": 2} else 0
    assert tied["memory"][0]["weights"] == apart["memory"][0]["weights"] - once
    if once:  # and their states need no memory that recomputing layers would have to free
        room = (tied["memory"][0]["total"] + apart["memory"][0]["total"]) / 2 / GIB
        fitting = ds(pipeline=pipeline | {"partition": apart["partition"], "recompute": "fit"})
        short = ("--world-size", "2", "--device-memory-gib", str(room), "--json")
        assert not any(fit(fitting, *short)[0]["recomputed"])
        LlamaConfig(**SIZES, tie_word_embeddings=False).save_pretrained(model)
        assert any(fit(fitting, *short)[0]["recomputed"])
    narrow = OPTConfig(**{key: SIZES[key] for key in OPT}, ffn_dim=128, word_embed_proj_dim=16)
    narrow.save_pretrained(model)
    own, _ = fit(ds(pipeline=pipeline), *argv)
    parameters = sum(parameter.numel() for parameter in skeleton(narrow).parameters())
    assert sum(row["weights"] for row in own["memory"]) == 4 * (parameters + (0 if once else 500 * 16))


@pytest.mark.parametrize("method", ["work", "hetero"])
def test_one_stage_recomputes_as_few_layers_as_in_a_run_where_weights_are_shared(
    fit: Any, model: str, method: str
) -> None:
    LlamaConfig(**SIZES | {"vocab_size": 8000}, tie_word_embeddings=True).save_pretrained(model)
    argv = ("--world-size", "1", "--seq-length", "64", "--json", "--device-memory-gib")
    free, _ = fit(ds(1, {"partition": method}), *argv, "1")
    room = (free["memory"][0]["total"] - 1) / GIB
    found, _ = fit(ds(1, {"partition": method, "recompute": "fit"}), *argv, str(room))
    assert found["recomputed"] == [1]


def test_what_does_not_fit(fit: Any) -> None:
    argv = ["--world-size", "6", "--device-memory-gib", "0.0001", "1", "1"]
    shown, err = fit(ds(), *argv, "--json", status=3)
    assert [row["fits"] for row in shown["memory"]] == [False, True, True]
    need = shown["memory"][0]["total"] / GIB
    assert err == f"paceline: stage 0 needs {need:.4g} GiB and its limit is 0.0001 GiB.\n"
    assert len(shown["remedies"]) == 6
    text, _ = fit(ds(), *argv, status=3)
    assert "does not fit" in text.splitlines()[2]
    assert text.splitlines()[-1].startswith('it does not fit; what helps: more stages ("paceline.pipeline.stages"); ')


def test_remedies_are_those_that_are_left(fit: Any) -> None:
    config = ds(6, train_micro_batch_size_per_gpu=1, bf16={"enabled": True}, zero_optimization={"stage": 1})
    argv = ["--world-size", "12", "--device-memory-gib", "0.0001", "--gradient-checkpointing", "--json"]
    shown, _ = fit(config, *argv, status=3)
    assert shown["remedies"] == ["shorter samples (--seq-length)"]


def test_what_each_remedy_saves(fit: Any) -> None:
    def need(config: dict[str, Any], *argv: str) -> dict[str, Any]:
        return fit(config, "--world-size", "6", "--device-memory-gib", "1", "--json", *argv)[0]["memory"][0]

    plain = need(ds())
    zero = need(ds(zero_optimization={"stage": 1}))
    assert zero["moments"] == plain["moments"] / 2
    assert zero["activations"] == plain["activations"]
    thrifty = need(ds(), "--gradient-checkpointing")
    assert thrifty["activations"] < plain["activations"] / 4
    assert thrifty["working"] > plain["working"]
    assert need(ds(), "--seq-length", "64")["activations"] == pytest.approx(plain["activations"] / 2, rel=0.01)
    half = need(ds(bf16={"enabled": True}))
    assert half["weights"] == plain["weights"] / 2
    assert half["masters"] == plain["weights"]
    eager = need(ds(pipeline={"schedule": {"type": "gpipe"}}))
    assert eager["live_micro_batches"] == 4
    assert need(ds(pipeline={"schedule": "adaptive"})) == plain
    assert need(ds(pipeline={"stages": 6}))["weights"] < plain["weights"]


@pytest.mark.parametrize(("owners", "mine"), [("direction", (1, 0)), ("mirror", (0.5, 0.5))])
def test_several_directions(fit: Any, owners: str, mine: tuple[float, float]) -> None:
    """A row a device: weights and gradients of both its stages, and the optimizer states that it owns."""
    schedule = {"type": "multidirection", "optimizer_owners": owners}
    config = ds(4, {"schedule": schedule, "partition": "uniform"}, train_micro_batch_size_per_gpu=1)
    argv = ["--world-size", "8", "--device-memory-gib", "1"]
    shown, _ = fit(config, *argv, "--json")
    plain, _ = fit(ds(4, {"partition": "uniform"}, train_micro_batch_size_per_gpu=1), *argv, "--json")
    stages = [row["weights"] for row in plain["memory"]]
    assert shown["schedule"] == "multidirection"
    for device, row in enumerate(shown["memory"]):
        held = [device, 3 - device]
        assert row["stages"] == held
        assert row["weights"] == row["gradients"] == sum(stages[stage] for stage in held)
        owned = sum(share * stages[stage] for share, stage in zip(mine, held, strict=True)) / 2  # two replicas
        assert (row["masters"], row["moments"]) == (owned, 2 * owned)
        assert row["total"] == sum(row[name] for name in PARTS)
    assert [row["live_micro_batches"] for row in shown["memory"]] == [3, 4, 4, 3]
    text, _ = fit(config, *argv)
    first, last = shown["memory"][0]["items"]
    assert f"{first[0]}-{first[1] - 1},{last[0]}-{last[1] - 1}" in text
    flushed, _ = fit(ds(4, {"schedule": {**schedule, "staleness": 0}, "partition": "uniform"}), *argv, "--json")
    assert flushed["schedule"] == "multidirection staleness=0"
    assert all(row["masters"] == 0 for row in flushed["memory"])  # fp32 weights are their own
    short, err = fit(config, *argv[:-1], "0.0001", "--json", status=3)
    assert not short["fits"]
    assert "stage 3 needs" in err


def test_auto_is_taken_as_left_out(fit: Any) -> None:
    config = ds(train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", gradient_clipping="auto")
    shown, err = fit(config, "--world-size", "3", "--device-memory-gib", "1", "--json")
    assert (shown["micro_batch_size"], shown["micro_batches"]) == (1, 12)
    keys = "train_micro_batch_size_per_gpu, gradient_accumulation_steps, gradient_clipping"
    assert err == f"paceline: {keys}: taken as left out; the command line decides.\n"


OPEN = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


@pytest.mark.parametrize(
    ("left_open", "told"), [({}, []), (OPEN, ["train_micro_batch_size_per_gpu", "bf16.enabled", "fp16.enabled"])]
)
def test_the_command_line_says_what_the_json_leaves_open(fit: Any, left_open: dict[str, Any], told: list[str]) -> None:
    config = ds()
    del config["train_micro_batch_size_per_gpu"]
    argv = ["--world-size", "3", "--device-memory-gib", "1", "--json"]
    for dtype, num_bytes in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        shown, err = fit({**config, **left_open}, *argv, "--micro-batch-size", "4", "--dtype", dtype)
        assert (shown["micro_batch_size"], shown["weight_bytes"], err) == (4, num_bytes, "")
    shown, err = fit({**config, **left_open}, *argv)
    assert (shown["micro_batch_size"], shown["weight_bytes"]) == (1, 4)
    assert err == (f"paceline: {', '.join(told)}: taken as left out; the command line decides.\n" if told else "")


def test_as_many_tokens_as_a_run_takes(fit: Any, model: str) -> None:
    LlamaConfig(**{**SIZES, "max_position_embeddings": 4096}).save_pretrained(model)
    shown, _ = fit(ds(), "--world-size", "3", "--device-memory-gib", "1", "--json")
    assert shown["sequence_length"] == MOST_TOKENS == DEFAULT_BLOCK_SIZE


def test_a_limit_of_the_json_can_be_raised(fit: Any) -> None:
    config = ds(3, {"partition": {"method": "parameters", "memory_gib": 0.001}})
    shown, _ = fit(config, "--world-size", "3", "--json", status=3)
    assert shown["remedies"][0] == 'a higher "paceline.pipeline.partition.memory_gib", which is the limit'
    shown, _ = fit(config, "--world-size", "3", "--json", "--device-memory-gib", "0.001", status=3)
    assert not any("memory_gib" in remedy for remedy in shown["remedies"])


def test_layers_count_by_their_parameters_without_a_profile(fit: Any) -> None:
    argv = ["--world-size", "3", "--device-memory-gib", "1", "--json"]
    _, err = fit(ds(3, {"partition": "hetero"}), *argv)
    assert err.startswith("paceline: layers count by their operations until they are measured; ")
    assert err.count("\n") == 1


def test_a_profile_of_another_model(fit: Any, tmp_path: Path) -> None:
    items = [ItemProfile("x", "X", 0.1, 0.2, 1, 1, 1)] * 8
    other = fingerprint(LlamaConfig(**{**SIZES, "vocab_size": 400}))
    path = tmp_path / "p.json"
    Profile(other, "float32", 1, 8, False, tuple(items), (DeviceProfile("d", 1.0, 1, 1),)).save(path)
    config = ds(3, {"partition": {"method": "hetero", "profile": str(path)}})
    _, err = fit(config, "--world-size", "3", "--device-memory-gib", "1", status=2)
    assert err.startswith(
        f"paceline: profile {path} is of another model: its vocab_size is 400 and this model's is 500; "
    )


def test_this_machines_memory_unless_said_otherwise(fit: Any) -> None:
    shown, _ = fit(ds(), "--world-size", "3", "--json")
    assert shown["fits"]
    assert shown["memory"][0]["limit"] > 10 * shown["memory"][0]["total"]


def test_a_partition_by_a_profile(fit: Any, tmp_path: Path) -> None:
    items = [ItemProfile("x", "X", 0.1, 0.2, 1, 1, 1)] * 8
    devices = [DeviceProfile("fast", 4.0, 1, 1), DeviceProfile("slow", 1.0, 1, 1)]
    config = LlamaConfig(**SIZES)
    Profile(fingerprint(config), "float32", 1, 8, False, tuple(items), tuple(devices)).save(tmp_path / "p.json")
    partition = {"method": "hetero", "profile": str(tmp_path / "p.json")}
    argv = ["--world-size", "2", "--json", "--device-memory-gib"]
    shown, _ = fit(ds(2, {"partition": partition}), *argv, "1")
    assert shown["partition"] == [0, 7, 8]
    limit = shown["memory"][0]["total"] / GIB - 1e-6
    shown, _ = fit(ds(2, {"partition": partition}), *argv, str(limit), "1")
    assert shown["partition"] == [0, 6, 8]
    shown, _ = fit(ds(2, {"partition": partition}), *argv, "0.00001", "1", status=3)
    assert shown["partition"] == [0, 7, 8]


@pytest.mark.parametrize(
    ("precision", "dtype", "message"),
    [
        ({"bf16": {"enabled": True}}, "float32", "bf16.enabled is true in the JSON and --dtype float32 makes it false"),
        (
            {"bf16": {"enabled": False}},
            "bfloat16",
            "bf16.enabled is false in the JSON and --dtype bfloat16 makes it true",
        ),
        (
            {"bfloat16": {"enabled": True}},
            "float16",
            "bfloat16.enabled is true in the JSON and --dtype float16 makes it",
        ),
    ],
)
def test_a_dtype_that_the_json_contradicts(fit: Any, precision: dict[str, Any], dtype: str, message: str) -> None:
    _, err = fit(ds(**precision), "--world-size", "3", "--device-memory-gib", "1", "--dtype", dtype, status=2)
    assert err.startswith(f"paceline: {message}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--world-size", "0"], "--world-size is 0: give the number of ranks, from 1 upwards."),
        (["--world-size", "4"], "paceline.pipeline.stages is 3 and there are 4 ranks: stages must divide the ranks"),
        (["--world-size", "3", "--device-memory-gib", "-1"], "--device-memory-gib -1 is no size: give GiB, above 0."),
        (
            ["--world-size", "3", "--device-memory-gib", "1", "2"],
            "--device-memory-gib has 2 numbers for 3 stages: give one, or one a stage.",
        ),
        (
            ["--world-size", "3", "--micro-batch-size", "4"],
            "train_micro_batch_size_per_gpu is 2 in the JSON and --micro-batch-size 4 makes it 4; drop one of them, or "
            'write "auto" in the JSON.',
        ),
        (["--world-size", "1048577"], "--world-size is 1048577: give at most 1048576."),
        (["--world-size", "3", "--device-memory-gib", "inf"], "--device-memory-gib inf is no size: give GiB, above 0."),
        (["--world-size", "3", "--device-memory-gib", "nan"], "--device-memory-gib nan is no size: give GiB, above 0."),
        (
            ["--world-size", "3", "--seq-length", "99999999"],
            "sequence_length is 99999999, too large to count with: give",
        ),
        (["--world-size", "3", "--micro-batch-size", "0"], "--micro-batch-size is 0: give a whole number from 1"),
        (["--world-size", "3", "--seq-length", "129"], "sequence_length is 129 and the model has 128 positions"),
    ],
)
def test_what_cannot_be(fit: Any, argv: list[str], message: str) -> None:
    _, err = fit(ds(), *argv, status=2)
    assert err.startswith(f"paceline: {message}")
    assert err.count("\n") == 1


def test_nothing_is_allocated(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of a size that no machine for tests could hold."""
    LlamaConfig(**{**SIZES, "hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 64}).save_pretrained(
        tmp_path / "large"
    )
    (tmp_path / "ds.json").write_text(json.dumps(ds(2)))
    argv = ["fit", str(tmp_path / "large"), "--deepspeed", str(tmp_path / "ds.json"), "--world-size", "2"]
    assert main([*argv, "--device-memory-gib", "80", "--json"]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert shown["memory"][0]["weights"] > 400 * GIB
    assert torch.get_default_device().type == "cpu"


def test_a_model_whose_layers_heads_differ(fit: Any, model: str) -> None:
    """As Gemma 4's: of such sizes the config has none for the model."""
    heads = {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    more = {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    }
    Gemma4TextConfig(**SIZES, **heads, **more).save_pretrained(model)
    shown, _ = fit(ds(), "--world-size", "3", "--device-memory-gib", "1", "--json")
    assert shown["fits"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**6}, "has a num_hidden_layers that is too large to count with: give at most 1024."),
        ({"hidden_act": "nope"}, "Give a config that fits together."),
        ({"max_position_embeddings": -1}, "has max_position_embeddings -1: give a whole number from 1 upwards."),
    ],
)
def test_a_model_that_cannot_be(model: str, fit: Any, changes: dict[str, Any], message: str) -> None:
    path = Path(model) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    out, err = fit(ds(), "--world-size", "3", status=2)
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
