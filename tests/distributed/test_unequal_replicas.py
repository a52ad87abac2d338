"""Replicas with unequal shares of a step give the numbers of one process: written, chosen in training, in the job."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.jobs import MICRO_BATCHES, STEPS, TINY, ds_config, finetune, flags, model_config, step_batches, train_alone
from support.ranks import RankError, run_ranks

FEW = 3
"""Steps with shares that stay."""
FAST_S, SLOW_S = 0.02, 0.06
"""What a forward takes on the replicas, by their own clocks."""


def engine_of(
    stages: int, unequal: dict[str, Any], family: str = "llama", pipeline: dict[str, Any] | None = None, **keys: Any
) -> Any:
    import paceline

    replicas = int(os.environ["WORLD_SIZE"]) // stages
    section = {"stages": stages, "partition": "uniform", "unequal_replicas": unequal, **(pipeline or {})}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES // replicas, **keys)
    config["paceline"] = {"pipeline": section}
    engine, *_ = paceline.initialize(model=model_config(family), config=config)
    return engine


def own_batches(engine: Any) -> Iterator[dict[str, torch.Tensor]]:
    """This replica's micro-batches, step after step: all replicas together have those of one process."""
    from paceline.planning.unequal_replicas import dealt

    step = 0
    while True:
        owners = dealt(engine.replica_micro_batches)  # known when the step begins to be read
        for batch, owner in zip(step_batches(step), owners, strict=True):
            if owner == engine.replica:
                yield batch
        step += 1


def trained(stages: int, shares: list[int], family: str = "llama", zero: int = 0, clipping: float = 0.0) -> Any:
    engine = engine_of(
        *(stages, {"micro_batches": shares}, family),
        zero_optimization={"stage": zero},
        gradient_clipping=clipping,
    )
    batches, losses, norms = own_batches(engine), [], []
    for _ in range(FEW):
        losses.append(engine.train_batch(batches).item())
        norms.append(engine.grad_norm())
    held_out = step_batches(FEW)[: MICRO_BATCHES - 1]
    evaluation = engine.evaluate(held_out[engine.replica :: len(shares)])
    state = {name: p.detach().clone() for name, p in engine.module.stage.model.named_parameters()}
    return {"losses": losses, "norms": norms, "evaluation": evaluation, "state": state}


@pytest.mark.parametrize(
    ("stages", "shares", "family", "zero", "clipping"),
    [
        (2, [7, 1], "llama", 1, 0.5),
        (2, [3, 5], "llama", 0, 0.0),
        (2, [6, 2], "mixtral", 1, 0.0),
    ],
)
def test_any_shares_give_the_numbers_of_one_process(
    stages: int, shares: list[int], family: str, zero: int, clipping: float
) -> None:
    (alone,) = run_ranks(train_alone, 1, clipping, family=family, steps=FEW)
    ranks = run_ranks(trained, stages * len(shares), stages, shares, family, zero, clipping)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert rank["evaluation"]["eval_loss"] == pytest.approx(alone["evaluation"]["eval_loss"], rel=1e-6)
        if clipping:
            assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, alone["state"][name], rtol=1e-4, atol=2e-6)


class Device:
    """A clock that only goes on when it is read, and by what a forward takes on this replica."""

    def __init__(self, forward_s: float) -> None:
        self.forward_s, self._now_s = forward_s, 0.0

    def now_s(self) -> float:
        self._now_s += 0.001
        return self._now_s

    def computes(self, *_: Any) -> None:
        self._now_s += self.forward_s


def followed(schedule: Any) -> dict[str, Any]:
    """One of two replicas is slow in the first half of the steps, and the other in the second."""
    engine = engine_of(1, {"reshare_every": 4}, pipeline={"schedule": schedule})
    device = Device((FAST_S, SLOW_S)[engine.replica])
    engine.clock.host_s = device.now_s
    engine.module.register_forward_pre_hook(device.computes)
    batches, losses, shares = own_batches(engine), [], []
    for step in range(2 * STEPS):
        if step == STEPS:
            device.forward_s = FAST_S + SLOW_S - device.forward_s
        losses.append(engine.train_batch(batches).item())
        shares.append(engine.replica_micro_batches)
    return {"losses": losses, "shares": shares, "decisions": engine.decisions.take_decisions()}


@lru_cache
def losses_alone() -> list[float]:
    (alone,) = run_ranks(train_alone, 1, steps=2 * STEPS)
    losses: list[float] = alone["losses"]
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", {"type": "adaptive", "retune_every": 4}])
def test_shares_follow_the_speeds_and_change_no_number(schedule: Any) -> None:
    first, second = run_ranks(followed, 2, schedule)
    assert first["losses"] == second["losses"] == pytest.approx(losses_alone(), rel=1e-5)
    assert first["shares"] == second["shares"]
    assert first["shares"][0] == (4, 4)
    assert first["shares"][STEPS - 1] == (6, 2)
    assert first["shares"][-1] == (2, 6)
    taken = [decision for decision in first["decisions"] if decision["what"] == "shares"]
    assert [decision["to"] for decision in taken if decision["switched"]] == [
        list(now) for before, now in zip(first["shares"], first["shares"][1:], strict=False) if now != before
    ]


KEEPS_NOTHING = {"max_steps": STEPS, "eval_strategy": "no", "save_strategy": "no"}


def job(folder: str, unequal: Any) -> tuple[int, str]:
    pipeline = {"stages": 1, "unequal_replicas": unequal} if unequal else {"stages": 1}
    config = Path(folder) / f"config{os.environ['RANK']}.json"
    config.write_text(json.dumps(ds_config("auto") | {"paceline": {"pipeline": pipeline}}))
    return finetune(flags(**TINY | KEEPS_NOTHING, output_dir=Path(folder) / "out", deepspeed=config))


def losses_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_the_job_trains_on_the_same_samples(tmp_path: Path) -> None:
    found = []
    for number, unequal in enumerate((None, {"micro_batches": [5, 3]}, {"reshare_every": 1})):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert [code for code, _ in run_ranks(job, 2, str(folder), unequal)] == [0, 0]
        found.append(losses_of(folder))
        report = json.loads((folder / "out" / "report.json").read_text())
        assert {decision["kind"] for decision in report["decisions"]} == ({"shares"} if number == 2 else set())
        assert (folder / "out" / "report.html").exists()
    assert len(found[0]) == STEPS // TINY["logging_steps"]
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def refused(unequal: dict[str, Any], stages: int = 1, schedule: str = "1f1b") -> None:
    engine_of(stages, unequal, pipeline={"schedule": schedule})


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([8], "there are 2 replicas, and each has a number"),
        ([4, 3], "their sum 8 .gradient_accumulation_steps 4 times 2"),
    ],
)
def test_shares_that_are_not_a_step(shares: list[int], message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(refused, 2, {"micro_batches": shares})


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("dualpipev", "takes at least 4 micro-batches, and 3 are not"),
        ("interleaved", "in multiples of 2, and 5 are not"),
    ],
)
def test_shares_that_a_schedule_cannot_have(schedule: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(refused, 4, {"micro_batches": [5, 3]}, 2, schedule)
