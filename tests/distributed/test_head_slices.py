"""A head that several stages share, each with some rows of the vocabulary, trains as a whole one does."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.checkpoint import Checkpoint
from support.jobs import LAYERS, MICRO_BATCHES, ds_config, model_config, step_batches, train, train_alone
from support.ranks import OneAfterAnother, RankError, on, run_ranks

STEPS = 4
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
BF16 = {"bf16": {"enabled": True}}
SLICES = 4
LAST = 1 + LAYERS + SLICES
"""The last boundary: embedding, layers, slices of the head."""
WITH_LAYERS = {2: [0, 6, LAST], 3: [0, 3, 7, LAST], 4: [0, 3, 5, 7, LAST]}
"""Boundaries by the number of stages. The first stage of two has the embedding and a slice."""


def slices(ranks: int, partition: Any = None, stages: int | None = None, keys: Any = None, **options: Any) -> Any:
    stages = stages or ranks
    keys = {"head_slices": SLICES, **(keys or {})}
    return on(ranks, stages, partition=partition or WITH_LAYERS[stages], keys=keys, steps=STEPS, **options)


FOUR_PARTS = WITH_LAYERS[4]
SCHEDULES = ("kfkb", "zbh1")
IN_CHUNKS = ("interleaved", "zbv")
KINDS = ("packed", "ragged")
RUNS = OneAfterAnother(
    train,
    {
        **{("tied", n): slices(n, **TIED) for n in (3, 4)},
        ("untied", 4): slices(4, **UNTIED),
        "clipping": slices(4, None, 2, zero=1, clipping=0.05, **TIED),
        **{kind: slices(2, kind=kind, **UNTIED) for kind in KINDS},
        **{schedule: slices(2, schedule={"type": schedule}, **UNTIED) for schedule in SCHEDULES},
        **{schedule: slices(2, FOUR_PARTS, schedule={"type": schedule}, **TIED) for schedule in IN_CHUNKS},
        "zbh1, tied": slices(2, schedule={"type": "zbh1"}, **TIED),
        "gpt2": slices(3, family="gpt2"),
        "bf16": slices(2, more=BF16, **UNTIED),
        "bf16, whole": on(2, 2, partition="uniform", more=BF16, steps=STEPS, **UNTIED),
    },
    at_once=10,
)


ALONE = OneAfterAnother(
    train_alone,
    {
        "tied": on(1, steps=STEPS, **TIED),
        "untied": on(1, steps=STEPS, **UNTIED),
        "clipping": on(1, steps=STEPS, clipping=0.05, **TIED),
        "gpt2": on(1, steps=STEPS, family="gpt2"),
        **{kind: on(1, steps=STEPS, kind=kind, **UNTIED) for kind in KINDS},
    },
)
"""The same by one process with the whole model."""


def assert_alike(runs: list[dict[str, Any]], reference: str) -> None:
    (wanted,) = ALONE[reference]
    for rank in runs:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=2e-6)
        assert rank["evaluation"]["eval_loss"] == pytest.approx(wanted["evaluation"]["eval_loss"], rel=2e-6)
    for name, weight in wanted["state"].items():
        whole = whole_weight(runs, name, weight)
        # Adam makes much of gradients that are nothing but rounding.
        assert (whole - weight).abs().max() < 2e-4, name


def whole_weight(runs: list[dict[str, Any]], name: str, like: torch.Tensor) -> torch.Tensor:
    """A weight that one stage has, or several in rows, one after another."""
    found = [rank["state"][name] for rank in runs if name in rank["state"]]
    whole = [part for part in found if part.shape == like.shape]
    return whole[0] if whole else torch.cat(found)


@pytest.mark.parametrize(("ties", "stages"), [("tied", 3), ("tied", 4), ("untied", 4)])
def test_losses_and_weights_are_those_of_a_whole_head(ties: str, stages: int) -> None:
    assert_alike(RUNS[ties, stages], ties)


@pytest.mark.parametrize("stages", [3, 4])
def test_copies_of_tied_rows_stay_equal(stages: int) -> None:
    name = "model.embed_tokens.weight"
    first, *others = RUNS["tied", stages]
    rows = torch.cat([rank["state"][name] for rank in others if name in rank["state"]])
    assert torch.equal(rows, first["state"][name])


def test_no_stage_has_the_whole_head() -> None:
    found = [len(rank["state"]["lm_head.weight"]) for rank in RUNS["untied", 4][2:]]
    assert found == [48, 49]
    assert "lm_head.weight" not in RUNS["untied", 4][1]["state"]


def looked_at(stages: int, partition: list[int] | None, schedule: str | None = None) -> list[torch.Tensor]:
    """On every rank: logits of batches of several lengths, before a step and after it, and of the last one alone."""
    import paceline

    pipeline = {"stages": stages, "schedule": schedule}
    if partition is not None:
        pipeline |= {"partition": partition, "head_slices": SLICES}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": pipeline})
    engine, *_ = paceline.initialize(model=model_config(**TIED), config=config)
    batches, found = step_batches(0, "ragged"), []
    for _ in range(2):
        found += [logits for _, logits in engine.predict(batches, lambda logits, labels: logits)]
        assert engine.evaluate(batches)["eval_loss"] > 0
        engine.train_batch(iter(batches))
    _, last = engine.eval_batch(iter(batches), return_logits=True)
    return [*found, last] if engine.is_last_stage() else found


@lru_cache
def logits_of_a_whole_head() -> list[torch.Tensor]:
    (found,) = run_ranks(looked_at, 1, 1, None)
    return list(found)


@pytest.mark.parametrize(("stages", "schedule"), [(4, None), (2, "interleaved")], ids=["4", "interleaved"])
def test_an_evaluation_may_look_at_all_logits(stages: int, schedule: str | None) -> None:
    """Where three stages have slices; what a function makes of the logits comes to all ranks."""
    wanted = logits_of_a_whole_head()
    for rank in run_ranks(looked_at, stages, stages, WITH_LAYERS[4], schedule):
        assert len(rank) >= 2 * MICRO_BATCHES
        for ours, theirs in zip(rank, wanted, strict=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_norms_count_tied_rows_once() -> None:
    """With replicas, and states that are sharded."""
    assert_alike(RUNS["clipping"][::2], "clipping")
    assert RUNS["clipping"][0]["norms"] == pytest.approx(ALONE["clipping"][0]["norms"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind: str) -> None:
    assert_alike(RUNS[kind], kind)


@pytest.mark.parametrize("schedule", [*SCHEDULES, *IN_CHUNKS])
def test_schedules(schedule: str) -> None:
    assert_alike(RUNS[schedule], "tied" if schedule in IN_CHUNKS else "untied")


def test_a_rank_with_slices_on_two_stages_is_refused() -> None:
    with pytest.raises(RankError, match="put slices of the head on stages 1 and 3, which one rank holds"):
        run_ranks(train, 2, 2, partition=[0, 5, 6, 7, LAST], schedule="interleaved", keys={"head_slices": SLICES})


def test_a_split_backward_of_rows_of_an_embedding() -> None:
    assert_alike(RUNS["zbh1, tied"], "tied")


def test_another_family() -> None:
    assert_alike(RUNS["gpt2"], "gpt2")


def test_bf16() -> None:
    for rank, other in zip(RUNS["bf16"], RUNS["bf16, whole"], strict=True):
        assert rank["losses"] == pytest.approx(other["losses"], rel=1e-3)


def make(partition: list[int], *, tied: bool) -> Any:
    import paceline

    stages = len(partition) - 1
    replicas = int(os.environ["WORLD_SIZE"]) // stages
    pipeline = {"stages": stages, "partition": partition, "head_slices": partition[-1] - LAYERS - 1}
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        zero_optimization={"stage": 1},
        paceline={"pipeline": pipeline},
    )
    return paceline.initialize(model=model_config(tie_word_embeddings=tied), config=config)[0]


def steps(engine: Any, first: int) -> list[float]:
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    return [engine.train_batch(iter(step_batches(step)[replica::replicas])).item() for step in range(first, first + 2)]


def save(root: str, partition: list[int]) -> dict[str, list[float]]:
    """Train, save, export, and go on."""
    import paceline

    losses = {}
    for tied in (False, True):
        engine = make(partition, tied=tied)
        steps(engine, 0)
        engine.save_checkpoint(f"{root}/{tied}", tag="saved")
        paceline.export(engine.module, f"{root}/{tied}/model", engine.control)
        losses[str(tied)] = steps(engine, 2)
        engine.destroy()
    return losses


def load(root: str, partition: list[int]) -> dict[str, list[float]]:
    """Load, save again as it is, and go on."""
    losses = {}
    for tied in (False, True):
        engine = make(partition, tied=tied)
        engine.load_checkpoint(f"{root}/{tied}", tag="saved")
        engine.save_checkpoint(f"{root}/{tied}", tag="again")
        losses[str(tied)] = steps(engine, 2)
        engine.destroy()
    return losses


def test_checkpoints_have_the_whole_head(tmp_path: Path) -> None:
    """In four slices where they are saved, and seven where they are loaded: the same tensors, and steps that go on
    alike."""
    wanted = run_ranks(save, 4, str(tmp_path), [0, 6, 9])[0]
    for rank in run_ranks(load, 3, str(tmp_path), [0, 3, 7, 12]):
        for tied in (False, True):
            assert rank[str(tied)] == pytest.approx(wanted[str(tied)], rel=1e-5)
    for tied in (False, True):
        folder = tmp_path / str(tied)
        saved, again = Checkpoint.open(folder / "saved"), Checkpoint.open(folder / "again")
        assert sorted(saved.names) == sorted(again.names)
        assert ("lm_head.weight" in saved.names) is not tied
        for name in saved.names:
            for kind in saved.kinds(name):
                assert torch.equal(saved.read(name, kind), again.read(name, kind)), f"{kind} of {name}"
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        named = dict(model.named_parameters())
        assert named.keys() == set(saved.names)
        for name, parameter in named.items():
            assert torch.equal(parameter, saved.read(name, "master")), name
