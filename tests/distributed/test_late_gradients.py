"""A tuner that may choose late gradients: what it chooses, and that every step is what its schedule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.jobs import BATCH, MICRO_BATCHES, ds_config, model_config, step_batches
from support.ranks import run_ranks
from support.work_time import WORK_TIME

STAGES = 3
FORWARD_S = 0.02
"""By the clock that only work moves on, so that the bubble of a step with a flush costs more than a switch."""
ORDER = [False, False, True, True, True, False, True, False]
"""By step, whether gradients may come late."""


def make(schedule: Any, replicas: int = 1, **changes: Any) -> Any:
    import paceline

    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        gradient_clipping=0.5,
        zero_optimization={"stage": 1},
        paceline={"pipeline": {"stages": STAGES, "partition": "uniform", "schedule": schedule}},
    )
    engine, *_ = paceline.initialize(model=model_config(**changes), config=config)
    return engine


def steps(engine: Any, before: Any, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    losses = []
    for step in range(count):
        before(engine, step)
        losses.append(engine.train_batch(iter(step_batches(step)[replica::replicas])))
    engine.flush()
    weights = {engine.module.state_name(name): p.detach().clone() for name, p in engine.module.named_parameters()}
    found = [loss.item() for loss in losses], weights
    engine.destroy()
    return found


def switched_by_hand(replicas: int, correction: str | None) -> list[Any]:
    """The same run twice: schedules that change, and one without a flush that is flushed where they have one."""
    from paceline.planning.candidates import Candidate

    orders = [Candidate(BATCH), Candidate(BATCH, 2), Candidate(BATCH, slack=1.0)]

    def switch(engine: Any, step: int) -> None:
        if not (step and ORDER[step - 1] and ORDER[step]):
            engine.run_candidate(Candidate(BATCH, is_late=True) if ORDER[step] else orders[step % len(orders)])

    def flush(engine: Any, step: int) -> None:
        if step and not (ORDER[step - 1] and ORDER[step]):
            engine.flush()

    extra = {} if correction is None else {"correction": correction}
    engine = make({"type": "adaptive", "late_gradients": True, **extra}, replicas)
    engine.controller = None  # by hand
    return [
        steps(engine, switch, len(ORDER)),
        steps(make({"type": "one_direction", **extra}, replicas), flush, len(ORDER)),
    ]


@pytest.mark.parametrize(("replicas", "correction"), [(1, None), (2, "error_feedback")])
def test_steps_are_what_their_schedules_say(replicas: int, correction: str | None) -> None:
    for (losses, weights), (own_losses, own_weights) in run_ranks(
        switched_by_hand, STAGES * replicas, replicas, correction
    ):
        assert losses == own_losses
        assert all(torch.equal(weight, own_weights[name]) for name, weight in weights.items())


def never_late() -> list[Any]:
    def nothing(engine: Any, step: int) -> None: ...

    adaptive = {"type": "adaptive", "late_gradients": True, "retune_every": 1000}
    return [steps(make(schedule, tie_word_embeddings=False), nothing, 4) for schedule in (adaptive, "1f1b")]


def test_until_it_chooses_them_none_is_late() -> None:
    for (losses, weights), (own_losses, own_weights) in run_ranks(never_late, STAGES):
        assert losses == own_losses
        assert all(torch.equal(weight, own_weights[name]) for name, weight in weights.items())


def tuned(late_gradients: bool) -> Any:
    WORK_TIME.rule()
    engine = make({"type": "adaptive", "late_gradients": late_gradients, "retune_every": 4})
    WORK_TIME.time(engine)
    forward = engine.module.forward

    def takes_its_time(*args: Any) -> Any:
        WORK_TIME.sleep(FORWARD_S)
        return forward(*args)

    engine.module.forward = takes_its_time
    ran: list[str] = []

    def begin(engine: Any, step: int) -> None:
        WORK_TIME.begin_step()
        ran.append(engine.schedule.name)

    losses, _ = steps(engine, begin, 16)
    return ran, losses, engine.decisions.decisions


def test_it_chooses_late_gradients_where_they_are_faster() -> None:
    ranks = run_ranks(tuned, STAGES, True)
    late = f"one_direction, micro-batch {BATCH}"
    assert all(ran[-1] == late and torch.tensor(losses).isfinite().all() for ran, losses, _ in ranks)
    first, *_ = [decisions for *_, decisions in ranks if decisions]
    switch = next(decision for decision in first if decision["to"] == late)
    assert switch["switched"]
    assert min(switch["predicted_s"], key=switch["predicted_s"].get) == late


def test_it_does_not_where_they_are_not_allowed() -> None:
    for ran, _, decisions in run_ranks(tuned, STAGES, False):
        assert not any(name.startswith("one_direction") for name in ran)
        assert not any(name.startswith("one_direction") for d in decisions for name in d["predicted_s"])
