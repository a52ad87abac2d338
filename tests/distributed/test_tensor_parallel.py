"""Layers in slices on several ranks of a stage train as whole ones do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.checkpoint import Checkpoint
from paceline.checkpoint.export import export_checkpoint
from support.jobs import LAYERS, MICRO_BATCHES, ds_config, model_config, step_batches, train, train_alone
from support.ranks import OneAfterAnother, on, run_ranks
from support.saves import assert_same_tensors

STEPS = 4


def sliced(ranks: int, stages: int, **options: Any) -> Any:
    more = {"tensor_parallel": {"autotp_size": 2}, **options.pop("more", {})}
    return on(ranks, stages, more=more, steps=STEPS, **options)


BF16 = {"bf16": {"enabled": True}}
UNTIED = {"tie_word_embeddings": False}
HEAD = UNTIED | {"vocab_size": 98}
"""An even number of rows, of which each rank has half."""
SCHEDULES = ("kfkb", "zbh1", "gpipe")
IN_CHUNKS = ("interleaved", "zbv")
FOUR_PARTS = [0, 2, 3, 4, 6]
RUNS = OneAfterAnother(
    train,
    {
        "a stage": sliced(2, 1),
        "a stage, untied": sliced(2, 1, **UNTIED),
        "two stages, untied": sliced(4, 2, **UNTIED),
        "two stages": sliced(4, 2),
        "replicas": sliced(4, 1, zero=1, clipping=0.05),
        "three": sliced(8, 2, zero=1, clipping=0.05),
        "qwen3": sliced(4, 2, family="qwen3", clipping=0.05),
        "olmo2": sliced(4, 2, family="olmo2"),
        "bias": sliced(4, 2, attention_bias=True, mlp_bias=True),
        "recomputed": sliced(4, 2, checkpointing=True),
        "packed": sliced(4, 2, kind="packed"),
        "ragged": sliced(4, 2, kind="ragged"),
        **{name: sliced(4, 2, schedule={"type": name}) for name in SCHEDULES},
        **{name: sliced(4, 2, partition=FOUR_PARTS, schedule={"type": name}) for name in IN_CHUNKS},
        "bf16": sliced(4, 2, more=BF16),
        "head": sliced(4, 2, clipping=0.05, **HEAD),
        "head, one stage": sliced(2, 1, clipping=0.05, **HEAD),
        "head, zbh1": sliced(4, 2, schedule={"type": "zbh1"}, clipping=0.05, **HEAD),
    },
    at_once=10,
)
ALONE = OneAfterAnother(
    train_alone,
    {
        "llama": on(1, steps=STEPS),
        "clipping": on(1, steps=STEPS, clipping=0.05),
        "qwen3": on(1, steps=STEPS, family="qwen3", clipping=0.05),
        "olmo2": on(1, steps=STEPS, family="olmo2"),
        "head": on(1, steps=STEPS, clipping=0.05, **HEAD),
        "bias": on(1, steps=STEPS, attention_bias=True, mlp_bias=True),
        "packed": on(1, steps=STEPS, kind="packed"),
        "ragged": on(1, steps=STEPS, kind="ragged"),
    },
)
"""The same by one process with whole layers."""

REFERENCES = {
    **dict.fromkeys(("a stage", "two stages", "recomputed", *SCHEDULES, *IN_CHUNKS), "llama"),
    **dict.fromkeys(("replicas", "three"), "clipping"),
    **dict.fromkeys(("head", "head, one stage", "head, zbh1"), "head"),
    **{name: name for name in ("qwen3", "olmo2", "bias", "packed", "ragged")},
}


def whole_weights(runs: list[dict[str, Any]], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in like.items():
        parts = [rank["state"][name] for rank in runs if name in rank["state"]]
        if parts[0].shape == weight.shape:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            found[name] = parts[0]
        else:
            dim = 0 if parts[0].shape[0] != weight.shape[0] else 1
            found[name] = torch.cat(parts[:2], dim)
    return found


@pytest.mark.parametrize("run", REFERENCES)
def test_losses_and_weights_are_those_of_whole_layers(run: str) -> None:
    runs, (wanted,) = RUNS[run], ALONE[REFERENCES[run]]
    for rank in runs:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=2e-6)
        assert rank["norms"] == pytest.approx(wanted["norms"] or rank["norms"], rel=2e-5)
        assert rank["evaluation"]["eval_loss"] == pytest.approx(wanted["evaluation"]["eval_loss"], rel=2e-6)
        assert rank["evaluation"]["eval_tokens"] == wanted["evaluation"]["eval_tokens"]
    for name, whole in whole_weights(runs, wanted["state"]).items():
        assert (whole - wanted["state"][name]).abs().max() < 2e-4, name


def test_stages_change_no_bit() -> None:
    one, two = RUNS["a stage, untied"], RUNS["two stages, untied"]
    assert two[0]["losses"] == one[0]["losses"]
    for slice_number in range(2):
        for rank in (two[slice_number], two[2 + slice_number]):
            for name, weight in rank["state"].items():
                assert torch.equal(weight, one[slice_number]["state"][name]), name


def test_bf16_trains() -> None:
    losses = RUNS["bf16"][0]["losses"]
    assert losses == pytest.approx(RUNS["two stages"][0]["losses"], rel=5e-3)


def looked_at(stages: int, slices: int) -> list[torch.Tensor]:
    """On every rank: logits before a step and after it, and of the last micro-batch of an evaluation."""
    import paceline

    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES,
        tensor_parallel={"autotp_size": slices},
        paceline={"pipeline": {"stages": stages}},
    )
    engine, *_ = paceline.initialize(model=model_config(**HEAD), config=config)
    batches, found = step_batches(0), []
    for _ in range(2):
        found += [logits for _, logits in engine.predict(batches, lambda logits, labels: logits)]
        engine.train_batch(iter(batches))
    _, last = engine.eval_batch(iter(batches), return_logits=True)
    return [*found, last] if engine.is_last_stage() else found


def test_an_evaluation_sees_the_logits_of_all_rows() -> None:
    (wanted,) = run_ranks(looked_at, 1, 1, 1)
    for rank in run_ranks(looked_at, 4, 2, 2):
        assert len(rank) >= 2 * MICRO_BATCHES
        for ours, theirs in zip(rank, wanted, strict=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def with_dropout() -> dict[str, torch.Tensor]:
    """Weights after a few steps of a model that drops hidden states, where each rank has a seed of its own."""
    import paceline

    torch.manual_seed(int(os.environ["RANK"]))
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES,
        tensor_parallel={"autotp_size": 2},
        paceline={"pipeline": {"stages": 1}},
    )
    model = model_config("gpt_neox", hidden_dropout=0.2, attention_dropout=0.2)
    engine, *_ = paceline.initialize(model=model, config=config)
    for step in range(2):
        engine.train_batch(iter(step_batches(step)))
    return {name: weight.detach().clone() for name, weight in engine.module.stage.model.named_parameters()}


def test_what_is_whole_stays_equal_under_dropout() -> None:
    one, other = run_ranks(with_dropout, 2)
    whole = [name for name in one if "norm" in name or "embed" in name]
    assert len(whole) > 2 * LAYERS
    assert [name for name in whole if not torch.equal(one[name], other[name])] == []


# -- checkpoints and exports ------------------------------------------------------------------------------------------

BEFORE, AFTER = 2, 2


def made(stages: int, slices: int, **more: Any) -> Any:
    import paceline

    replicas = int(os.environ["WORLD_SIZE"]) // stages // slices
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        zero_optimization={"stage": 1},
        tensor_parallel={"autotp_size": slices},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-3}},
        paceline={"pipeline": {"stages": stages, **more}},
    )
    return paceline.initialize(model=model_config("qwen3"), config=config)[0]


def steps(engine: Any, first: int, count: int) -> list[float]:
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    batches = [step_batches(step)[replica::replicas] for step in range(first, first + count)]
    return [engine.train_batch(iter(batch)).item() for batch in batches]


def saved(root: str, stages: int, slices: int) -> list[float]:
    """Train, save, export, and go on without a break."""
    import paceline

    engine = made(stages, slices)
    steps(engine, 0, BEFORE)
    engine.save_checkpoint(root, tag="saved")
    paceline.export(engine.module, f"{root}/exported", engine.control)
    return steps(engine, BEFORE, AFTER)


def loaded(root: str, stages: int, slices: int) -> list[float]:
    """Load, save as it is, and go on."""
    engine = made(stages, slices)
    engine.load_checkpoint(root, tag="saved")
    engine.save_checkpoint(root, tag="again")
    return steps(engine, BEFORE, AFTER)


SHAPES = {"same": ((2, 2), (2, 2)), "into whole layers": ((2, 2), (2, 1)), "into slices": ((2, 1), (1, 2))}
"""Stages and slices of four ranks that save, and of four or two that load."""


@pytest.mark.parametrize("way", SHAPES)
def test_a_checkpoint_loads_into_other_slices(way: str, tmp_path: Path) -> None:
    before, after = SHAPES[way]
    wanted = run_ranks(saved, 4, str(tmp_path), *before)[0]
    found = run_ranks(loaded, 4, str(tmp_path), *after)
    assert_same_tensors(tmp_path / "saved", tmp_path / "again")
    for losses in found:
        assert losses == (wanted if way == "same" else pytest.approx(wanted, rel=1e-5))


def test_exports_are_whole(tmp_path: Path) -> None:
    """Both that of the engine, and that of a checkpoint by one process."""
    run_ranks(saved, 4, str(tmp_path), 2, 2)
    export_checkpoint(tmp_path / "saved", tmp_path / "by one process")
    checkpoint = Checkpoint.open(tmp_path / "saved")
    live, later = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("exported", "by one process"))
    for (name, weight), other in zip(live.named_parameters(), later.parameters(), strict=True):
        assert torch.equal(weight, other), name
        assert torch.equal(weight, checkpoint.read(name, "master")), name


# -- layers that move, and data that differ --------------------------------------------------------------------------


def moved(moves: dict[int, list[int]], *, prepares: bool = False) -> dict[str, Any]:
    """Boundaries to move to, by the number of steps before."""
    engine = made(2, 2, partition=[0, 3, 6])
    losses = []
    for step in range(5):
        if (parts := moves.get(step)) is not None:
            engine.repartition(parts)
        losses += steps(engine, step, 1)
    state = {name: weight.detach().clone() for name, weight in engine.module.stage.model.named_parameters()}
    return {"losses": losses, "state": state, "sent": [move["bytes"] for move in engine.migrations]}


def test_layers_in_slices_move() -> None:
    stayed = run_ranks(moved, 4, {})
    went = run_ranks(moved, 4, {1: [0, 2, 6], 2: [0, 4, 6], 4: [0, 3, 6]})
    for before, after in zip(stayed, went, strict=True):
        assert after["losses"] == before["losses"]
        assert len(after["sent"]) == 3
        for name, weight in before["state"].items():
            assert torch.equal(weight, after["state"][name]), name


def different_data() -> list[str]:
    engine = made(2, 2)
    other = engine.grid.get_slice_parallel_rank()
    with pytest.raises(ValueError, match="see different data") as raised:
        engine.train_batch(iter(step_batches(other)))
    return [str(raised.value)]


def test_slices_have_to_read_the_same() -> None:
    (found,) = {tuple(rank) for rank in run_ranks(different_data, 4)}
    assert found == (
        "ranks with slices of the same layers see different data at step 0: give all of a replica the same iterator "
        "(same files, seed and data-parallel rank).",
    )


def refused() -> list[str]:
    from transformers import AutoConfig

    import paceline

    found = []
    for model, size in (
        (model_config("gpt2"), 2),
        (model_config("mixtral"), 2),
        (model_config("llama"), 4),
        (model_config("llama", intermediate_size=33, num_key_value_heads=4), 2),
        (AutoConfig.for_model("apertus", hidden_size=32, num_hidden_layers=2, vocab_size=97), 2),
    ):
        config = ds_config(tensor_parallel={"autotp_size": size}, paceline={"pipeline": {"stages": 1}})
        with pytest.raises(ValueError, match="autotp_size") as raised:
            paceline.initialize(model=model, config=config)
        found.append(str(raised.value))
    config = ds_config(
        tensor_parallel={"autotp_size": 2}, paceline={"pipeline": {"stages": 1}}, optimizer={"type": "Adafactor"}
    )
    with pytest.raises(ValueError, match="Adafactor looks at a parameter as a whole"):
        paceline.initialize(model=model_config(), config=config)
    return found


def test_models_that_cannot_be_sliced_are_refused() -> None:
    gpt2, mixtral, heads, width, apertus = run_ranks(refused, 4)[0]
    assert gpt2 == (
        "GPT2LMHeadModel (model type 'gpt2') cannot have its layers in slices: transformers has no plan for it "
        "(base_model_tp_plan of GPT2Config); leave tensor_parallel.autotp_size out, or take another model."
    )
    assert mixtral == (
        "tensor_parallel.autotp_size is 2 and the MixtralForCausalLM has experts: experts are not sliced, nor what is "
        "around them; leave autotp_size out, and take expert_parallel."
    )
    assert heads == (
        "tensor_parallel.autotp_size is 4: it must divide the 2 heads of self_attn.k_proj in LlamaForCausalLM; choose "
        "a divisor."
    )
    assert "is 2: it must divide the 33 outputs of mlp.gate_proj in LlamaForCausalLM" in width
    assert "the activation of its MLP has weights" in apertus
