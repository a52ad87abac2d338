"""Interleaved and DualPipeV pipelines of Hugging Face models: no number depends on how many stages a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.jobs import ds_config, model_config, step_batches
from support.ranks import OneAfterAnother, on, run_ranks
from support.small_layers import batches, layers, loss_of

STEPS = 3
LAYERS = 6
INTERLEAVED = {"type": "interleaved", "chunks": 2}
SCHEDULES = {"interleaved": INTERLEAVED, "dualpipev": {"type": "dualpipev"}}
PLAIN = "1f1b"


@dataclass(frozen=True)
class Case:
    """How a model is trained, but for its schedule."""

    devices: int = 2
    replicas: int = 1
    family: str = "llama"
    data: str = "padded"
    micro_batches: int = 6
    tied: bool = False
    zero: int = 0
    order: str | None = None
    recompute: bool = False
    partition: tuple[int, ...] | None = None
    section: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, schedule: Any) -> dict[str, Any]:
        pipeline: dict[str, Any] = {"stages": self.devices, "schedule": schedule}
        if self.partition is not None and isinstance(schedule, dict):
            pipeline["partition"] = list(self.partition)
        return ds_config(
            gradient_accumulation_steps=self.micro_batches,
            zero_optimization={"stage": self.zero},
            pipeline={"activation_checkpoint_interval": int(self.recompute)},
            **self.options,
            paceline={"pipeline": pipeline, **self.section},
        )

    def batches(self, step: int, replica: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < self.micro_batches:
            found += step_batches(10 * step + replica + 100 * len(found), self.data)
        return found[: self.micro_batches]


def build(case: Case, schedule: Any) -> Any:
    import paceline
    from paceline.runtime.engine import PacelineEngine

    PacelineEngine.transport_order = case.order
    torch.manual_seed(3)
    model = model_config(case.family, num_hidden_layers=LAYERS, tie_word_embeddings=case.tied)
    engine, *_ = paceline.initialize(model=model, config=case.config(schedule))
    return engine


def train(case: Case, schedule: Any, steps: int = 2) -> dict[str, Any]:
    """Losses, gradient norms, an evaluation, logits, and the weights of this rank by Hugging Face's names."""
    engine = build(case, schedule)
    replica = engine.grid.data_parallel_id
    losses, norms = [], []
    for step in range(steps):
        losses.append(engine.train_batch(iter(case.batches(step, replica))).item())
        norms.append(engine.grad_norm())
    evaluated = engine.evaluate(case.batches(7, replica)[:5])
    seen = [kept for _, kept in engine.predict(case.batches(8, replica)[:3], lambda logits, labels: logits[..., 0])]
    by_name = {engine.module.state_name(n): p.detach().clone() for n, p in engine.module.named_parameters()}
    found = {
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated,
        "seen": seen,
        "weights": by_name,
        "schedule": engine.schedule.name,
        "spreads_experts": bool(engine.expert_layers),
        "stages": engine.module.held,
    }
    engine.destroy()
    return found


def moved(case: Case, schedule: Any, parts: list[int]) -> Any:
    """Losses and weights with ``schedule`` whose layers move after the first step and back again."""
    engine = build(case, schedule)
    before = [int(part) for part in engine.module.parts]
    losses = []
    for step in range(STEPS):
        losses.append(engine.train_batch(iter(case.batches(step, 0))).item())
        told = engine.repartition(parts if step == 0 else before)
        assert (told is None) == (step == STEPS - 1)
    weights = {engine.module.state_name(n): p.detach().clone() for n, p in engine.module.named_parameters()}
    engine.destroy()
    return {"losses": losses, "weights": weights, "moves": engine.migrations}


def trained_or_moved(case: Case, schedule: Any, parts: list[int] | None) -> dict[str, Any]:
    return train(case, schedule, STEPS) if parts is None else moved(case, schedule, parts)


PARTS = {"[0, 2, 3, 6, 8]": ([0, 2, 3, 6, 8], 1), "[0, 3, 4, 6, 8]": ([0, 3, 4, 6, 8], 0)}
"""Boundaries that layers move to, and the ZeRO stage."""
MOVES = OneAfterAnother(
    trained_or_moved,
    {
        PLAIN: on(2, Case(), PLAIN, None),
        **{
            (schedule, name): on(2, Case(partition=(0, 2, 4, 6, 8), zero=zero), SCHEDULES[schedule], parts)
            for schedule in SCHEDULES
            for name, (parts, zero) in PARTS.items()
        },
    },
)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_move_between_the_stages_of_all_ranks(schedule: str, parts: str) -> None:
    plain, several = MOVES[PLAIN], MOVES[schedule, parts]
    for one, other in zip(plain, several, strict=True):
        assert other["losses"] == one["losses"]
        assert other["moves"][0]["to"] == PARTS[parts][0]
    assert_same_weights(plain, several)


def assert_same_weights(plain: list[dict[str, Any]], several: list[dict[str, Any]]) -> None:
    plain_weights, several_weights = weights_of_all(plain), weights_of_all(several)
    assert plain_weights.keys() == several_weights.keys()
    for name, weight in plain_weights.items():
        assert torch.equal(weight, several_weights[name]), name


def weights_of_all(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for rank in ranks:
        for name, weight in rank["weights"].items():
            if ".experts." in name and rank.get("spreads_experts"):
                continue  # each rank has others, in places of its own: losses and exports tell of them
            assert name not in merged or torch.equal(merged[name], weight), f"copies of {name} differ"
            merged[name] = weight
    return merged


CASES = {
    "two ranks": Case(),
    "three ranks, paired, packed": Case(devices=3, order="paired", data="packed"),
    "own boundaries, recomputed": Case(partition=(0, 2, 3, 5, 8), recompute=True),
    "experts": Case(
        replicas=2,
        zero=1,
        family="mixtral",
        micro_batches=4,
        options={"expert_parallel": {"enabled": True, "autoep_size": 2}},
        section={"moe": {"rebalance_every": 1}},
    ),
    "natural gradient": Case(section={"natural_gradient": {"rank_in": 8, "rank_out": 8}}),
    "gpt2, replicas": Case(replicas=2, zero=1, micro_batches=4, family="gpt2"),
}


COPIES, TIED = "experts with copies", "tied, clipping"
ALL = {
    **CASES,
    COPIES: replace(CASES["experts"], section={"moe": {"rebalance_every": 1, "replicas": 1}}),
    TIED: Case(replicas=2, tied=True, zero=1, options={"gradient_clipping": 0.05}),
}
TRAINED = {
    name: OneAfterAnother(
        train,
        {
            kind: on(case.devices * case.replicas, case, schedule)
            for kind, schedule in {PLAIN: PLAIN, **SCHEDULES}.items()
            if name != COPIES or kind != "interleaved"
        },
    )
    for name, case in ALL.items()
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_that_of_one_stage_a_rank(case: str, schedule: str) -> None:
    """Gradients of a layer are added up in the order of the micro-batches, whichever rank has it."""
    ranks, other_ranks = TRAINED[case][PLAIN], TRAINED[case][schedule]
    for plain, several in zip(ranks, other_ranks, strict=True):
        assert several["schedule"].startswith(schedule)
        assert len(plain["stages"]) == 1
        assert len(several["stages"]) == 2
        assert several["losses"] == plain["losses"]
        assert several["norms"] == pytest.approx(plain["norms"], rel=1e-6)  # a sum over other parts of the model
        assert several["evaluated"] == plain["evaluated"]
        assert all(map(torch.equal, several["seen"], plain["seen"]))
    assert_same_weights(ranks, other_ranks)


def test_with_copies_of_experts_it_is_one_stage_a_rank_to_rounding() -> None:
    """When experts get copies depends on what computing takes, and copies add up their gradients in parts."""
    for plain, several in zip(TRAINED[COPIES][PLAIN], TRAINED[COPIES]["dualpipev"], strict=True):
        assert several["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert several["norms"] == pytest.approx(plain["norms"], rel=1e-3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tied_weights_and_clipping_agree_to_rounding(schedule: str) -> None:
    """The embedding's gradient is a sum of two in another order, and the norm one over other parts of the model."""
    ranks, other_ranks = (TRAINED[TIED][kind] for kind in (PLAIN, schedule))
    for plain, several in zip(ranks, other_ranks, strict=True):
        assert several["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        assert several["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    plain_weights, several_weights = weights_of_all(ranks), weights_of_all(other_ranks)
    for name, weight in plain_weights.items():
        torch.testing.assert_close(several_weights[name], weight, rtol=1e-4, atol=1e-6)


def saved_by_each(case: Case, where: str) -> dict[tuple[str, str | None], float]:
    """By schedule: three steps, a checkpoint after the second, and an export. Then another goes on from each.

    Returns:
        The last loss of each run that saved, by its schedule, and of each that went on, by the pair.
    """
    import paceline

    found: dict[tuple[str, str | None], float] = {}
    schedules = {PLAIN: PLAIN, **SCHEDULES}
    pairs = zip(schedules, [*SCHEDULES, PLAIN], strict=True)
    for saved, loaded in [*((kind, None) for kind in schedules), *pairs]:
        print(f"case {saved}, {loaded}", flush=True)
        engine = build(case, schedules[loaded or saved])
        if loaded is None:
            for step in range(2):
                engine.train_batch(iter(case.batches(step, 0)))
            engine.save_checkpoint(f"{where}/{saved}", tag="two")
        else:
            engine.load_checkpoint(f"{where}/{saved}", tag="two")
        found[saved, loaded] = engine.train_batch(iter(case.batches(2, 0))).item()
        paceline.export(engine.module, f"{where}/{saved} {loaded}", engine.control)
        engine.destroy()
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case(tied=True),
        Case(replicas=2, family="mixtral", options={"expert_parallel": {"enabled": True, "autoep_size": 2}}),
    ],
    ids=["tied", "experts"],
)
def test_checkpoints_and_exports_fit_any_schedule(case: Case, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ranks = run_ranks(saved_by_each, case.devices * case.replicas, case, str(tmp_path))
    exported = {
        pair: AutoModelForCausalLM.from_pretrained(tmp_path / f"{pair[0]} {pair[1]}").state_dict() for pair in ranks[0]
    }
    gone_on = [pair for pair in ranks[0] if pair[1] is not None]
    assert len(gone_on) == 3
    for saved, loaded in gone_on:
        for found in ranks:
            assert found[saved, loaded] == pytest.approx(found[saved, None], rel=1e-6), (saved, loaded)
        first, second = exported[saved, None], exported[saved, loaded]
        assert not first.keys() ^ second.keys(), (saved, loaded)
        for name, weight in first.items():
            torch.testing.assert_close(second[name], weight, rtol=1e-4, atol=1e-6, msg=f"{saved}, {loaded}: {name}")


def train_layers(
    case: tuple[str, int, int, int], schedule: Any, partition: Any, move: list[int] | None = None
) -> dict[str, Any]:
    """Layers of one's own: losses, an evaluation, and weights by name.

    Args:
        move: boundaries from the second step on.
    """
    import deepspeed

    import paceline
    from paceline.runtime.engine import PacelineEngine
    from paceline.schedules.families import chunked_route

    kind, devices, zero, interval = case
    deepspeed.init_distributed()
    PacelineEngine.transport_order = None
    is_plain = schedule == "1f1b"
    route = None if is_plain else chunked_route(schedule["type"], devices, 2)
    module = paceline.PipelineModule(
        layers=layers(kind),
        num_stages=devices,
        loss_fn=loss_of,
        partition_method="uniform" if is_plain else partition,
        seed_layers=True,
        activation_checkpoint_interval=interval,
        routes=None if route is None else [route],
    )
    config = ds_config(
        gradient_accumulation_steps=6,
        optimizer={"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        zero_optimization={"stage": zero},
        paceline={"pipeline": {"schedule": schedule}},
    )
    engine, *_ = paceline.initialize(model=module, config=config)
    shift = engine.grid.data_parallel_id * 50
    losses = []
    for step in range(STEPS):
        if step == 1 and move is not None:
            engine.repartition(move)
        losses.append(engine.train_batch(iter(batches(step + shift, [5]))).item())
    evaluated = engine.eval_batch(iter(batches(99 + shift, [5]))).item()
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return {
        "losses": losses,
        "evaluated": evaluated,
        "weights": weights,
        "stages": [held.runner.stage for held in engine.held],
    }


OWN = {
    "three ranks": (("pair", 3, 0, 0), 1, "parameters"),
    "replicas": (("pair", 2, 1, 0), 2, [0, 2, 3, 5, 7]),
    "tied, recomputed": (("tied", 2, 0, 1), 1, "uniform"),
}
OWN_TRAINED = OneAfterAnother(
    train_layers,
    {
        (name, kind): on(case[1] * replicas, case, schedule, partition)
        for name, (case, replicas, partition) in OWN.items()
        for kind, schedule in {PLAIN: PLAIN, **SCHEDULES}.items()
    },
    at_once=9,
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", OWN)
def test_layers_of_ones_own(case: str, schedule: str) -> None:
    ranks, other_ranks = OWN_TRAINED[case, PLAIN], OWN_TRAINED[case, schedule]
    is_shared = schedule == "dualpipev"  # one rank has both ends, whose weight is one: sums in another order
    for plain, several in zip(ranks, other_ranks, strict=True):
        assert len(several["stages"]) == 2
        assert several["losses"] == (pytest.approx(plain["losses"], rel=1e-6) if is_shared else plain["losses"])
        assert several["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-6)
    if not is_shared:
        assert_same_weights(ranks, other_ranks)
        return
    plain_weights, several_weights = weights_of_all(ranks), weights_of_all(other_ranks)
    assert plain_weights.keys() == several_weights.keys()
    for name, weight in plain_weights.items():
        torch.testing.assert_close(several_weights[name], weight, rtol=1e-4, atol=1e-6)


def moved_layers(case: tuple[str, int, int, int], schedule: Any) -> list[dict[str, Any]]:
    """Layers of one's own that move after the first step, beside those that were built so from the start."""
    before, after = [0, 2, 3, 5, 7], [0, 1, 3, 4, 7]
    return [train_layers(case, schedule, partition, move) for partition, move in ((after, None), (before, after))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_of_ones_own_move(schedule: str) -> None:
    found = run_ranks(moved_layers, 2, ("pair", 2, 1, 0), SCHEDULES[schedule])
    for given, moved_ in found:
        for what in ("losses", "evaluated", "stages"):
            assert moved_[what] == given[what]
        assert moved_["weights"].keys() == given["weights"].keys()
        for name, weight in given["weights"].items():
            assert torch.equal(moved_["weights"][name], weight), name


def built_otherwise(schedule: Any) -> str:
    import deepspeed

    import paceline

    deepspeed.init_distributed()
    module = paceline.PipelineModule(layers=layers("pair"), num_stages=2, loss_fn=loss_of)
    config = ds_config(gradient_accumulation_steps=4, paceline={"pipeline": {"schedule": schedule}})
    with pytest.raises(ValueError, match=r".") as error:
        paceline.initialize(model=module, config=config)
    return str(error.value)


def test_a_pipeline_of_one_stage_a_rank_is_refused_with_the_routes_to_pass() -> None:
    for told in run_ranks(built_otherwise, 2, INTERLEAVED):
        assert "needs a pipeline with the routes ((0, 1, 0, 1),)" in told
        assert "was built with ((0, 1),)" in told
        assert "pass these routes" in told
