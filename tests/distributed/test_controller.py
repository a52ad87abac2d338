"""The tuner at work: what it measures, that all ranks follow it, and that no number depends on what it chooses."""

from __future__ import annotations

import os
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.jobs import BATCH, MICRO_BATCHES, ds_config, model_config, step_batches
from support.ranks import run_ranks
from support.work_time import WORK_TIME

STAGES, STEPS, RETUNE_EVERY = 3, 14, 3
SLOW_STAGE, SLOW_S, FAST_S = 1, 0.008, 0.001
"""Forwards sleep, so that ranks measure different things."""

LATENCY_S = 0.05
"""That ranks are told their links have: much to gain by another order than 1F1B."""

CLOCK_S = 1000.0
SIZES = [1, BATCH, 4]
ADAPTIVE = {"type": "adaptive", "retune_every": RETUNE_EVERY}


def make_engine(schedule: Any, stages: int = STAGES, by_work: bool = False, **more: Any) -> Any:
    """A causal LM without tied weights, clipping or dropout: then no order of work changes a bit.

    Args:
        by_work: it sees a clock that only work moves on.
        more: keys of the JSON.
    """
    import paceline

    section = {"pipeline": {"stages": stages, **({} if schedule is None else {"schedule": schedule})}}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline=section, **more)
    if by_work:
        WORK_TIME.rule()
    engine, *_ = paceline.initialize(model=model_config(tie_word_embeddings=False), config=config)
    if by_work:
        WORK_TIME.time(engine)
    return engine


def train(engine: Any, steps: int = STEPS, kind: str = "padded") -> dict[str, Any]:
    """What a rank can tell of a run: losses, what every step ran, and its samples (without padding)."""
    found: dict[str, Any] = {"losses": [], "ran": [], "samples": []}
    for step in range(steps):
        WORK_TIME.begin_step()
        found["losses"].append(engine.train_batch(iter(step_batches(step, kind))).item())
        found["ran"].append((engine.schedule.name, engine.cut, engine.schedule.num_micro_batches))
        masks = [
            batch.side.get("attention_mask", torch.ones_like(batch.input_ids)) for batch in engine.support.book.loaded
        ]
        rows = [
            ids[mask.bool()].tolist()
            for batch, side in zip(engine.support.book.loaded, masks, strict=True)
            for ids, mask in zip(batch.input_ids, side, strict=True)
        ]
        found["samples"].append(rows)
    if engine.controller is not None:
        found["decisions"], found["knowledge"] = engine.controller.decisions, engine.controller.measurements.costs
    found["weights"] = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return found


def make_slow(engine: Any, sleep: Callable[[float], None] = time.sleep) -> None:
    """Forwards sleep, those of one stage for long."""
    forward, seconds = engine.module.forward, SLOW_S if engine.stage_id == SLOW_STAGE else FAST_S

    def slow(*args: Any) -> Any:
        sleep(seconds)
        return forward(*args)

    engine.module.forward = slow


def tell_a_latency() -> None:
    """Have the ranks believe in slow links, which makes all but 1F1B look good."""
    from paceline.runtime import rank_reports

    compare = rank_reports.compare_clocks
    rank_reports.compare_clocks = lambda *args: (compare(*args)[0], LATENCY_S)


def run_planned_aside() -> dict[str, Any]:
    """With plannings that another process makes, as of larger pipelines."""
    import psutil

    from paceline.runtime import schedule_actuator

    schedule_actuator.ASIDE_FROM = 1
    engine = make_engine(ADAPTIVE, by_work=True)
    make_slow(engine, WORK_TIME.sleep)
    found = train(engine)
    children = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    engine.destroy()
    left = len(psutil.Process().children())
    return {**found, "children": children, "left": left}


def run_fixed_and_adaptive() -> list[Any]:
    fixed = train(make_engine(None))
    tell_a_latency()
    found = [fixed]
    for schedule in (ADAPTIVE, {**ADAPTIVE, "memory_gib": 1e-6}):
        engine = make_engine(schedule, by_work=True)
        make_slow(engine, WORK_TIME.sleep)
        found.append(train(engine))
        engine.destroy()
    return [*found, run_planned_aside()]


@pytest.fixture(scope="module")
def fixed_and_adaptive() -> list[Any]:
    return run_ranks(run_fixed_and_adaptive, STAGES)


def test_whatever_is_chosen_no_bit_changes(fixed_and_adaptive: list[Any]) -> None:
    for fixed, *others in fixed_and_adaptive:
        for run in others:
            assert run["losses"] == fixed["losses"]
            for name, weight in fixed["weights"].items():
                assert torch.equal(run["weights"][name], weight), name


def test_all_ranks_switch_before_the_same_step(fixed_and_adaptive: list[Any]) -> None:
    ran = [adaptive["ran"] for _, adaptive, *_ in fixed_and_adaptive]
    assert ran[0] == ran[1] == ran[2]
    names = [name for name, *_ in ran[0]]
    split = f"zbh1, micro-batch {BATCH}"
    assert names[:6] == ["1f1b"] * 4 + [split] * 2  # settling and measuring
    assert len({*names[6:]} - {split}) > 0
    assert all(run["ran"] == [("1f1b", BATCH, MICRO_BATCHES)] * STEPS for run, *_ in fixed_and_adaptive)


def test_decisions_carry_the_numbers(fixed_and_adaptive: list[Any]) -> None:
    first, *others = [adaptive for _, adaptive, *_ in fixed_and_adaptive]
    assert all(other["decisions"] == [] for other in others)
    decisions = first["decisions"]
    assert [decision["step"] for decision in decisions] == [6, 9, 12]
    for decision in decisions:
        assert set(decision) == {
            *("what", "step", "switched", "from", "to", "why", "predicted_now_s", "predicted_best_s", "measured_s"),
            *("switch_s", "predicted_s"),
        }
        assert decision["switched"] == (decision["from"] != decision["to"])
        assert decision["predicted_s"][decision["from"]] == decision["predicted_now_s"]
        # An order that was made anew must save a hundredth, and so much may be given for less harm by slow messages;
        # where messages vary, those that fell behind early were replayed less.
        if "over what the last plannings have measured" not in decision["why"]:
            assert decision["predicted_best_s"] <= 1.1 * min(decision["predicted_s"].values())
        assert decision["measured_s"] > MICRO_BATCHES * SLOW_S
        assert decision["switch_s"] > 0
    switched = next(decision for decision in decisions if decision["switched"])
    assert switched["from"] == f"zbh1, micro-batch {BATCH}"
    assert "saves" in switched["why"]
    ran = [name for name, *_ in first["ran"]]
    for decision in decisions:
        assert ran[decision["step"]].split(",")[0] == decision["to"].split(",")[0]


def test_another_process_plans_beside_a_step(fixed_and_adaptive: list[Any]) -> None:
    """The first choice is made at once; the others take effect one step later, on all ranks before the same."""
    runs = [aside for *_, aside in fixed_and_adaptive]
    assert [decision["step"] for decision in runs[0]["decisions"]] == [6, 10, 13]
    assert runs[0]["ran"] == runs[1]["ran"] == runs[2]["ran"]
    ran = [name for name, *_ in runs[0]["ran"]]
    for decision in runs[0]["decisions"]:
        assert ran[decision["step"] - 1].split(",")[0] == decision["from"].split(",")[0]
        assert ran[decision["step"]].split(",")[0] == decision["to"].split(",")[0]
    plans = ["planning_process" in child for child in runs[0]["children"]]
    assert sum(plans) == 1
    assert not any("planning_process" in child for run in runs[1:] for child in run["children"])
    assert runs[0]["left"] == len(plans) - 1


def test_the_slow_stage_is_seen_as_it_is(fixed_and_adaptive: list[Any]) -> None:
    costs = fixed_and_adaptive[0][1]["knowledge"].costs(BATCH)
    assert costs.forward_s[SLOW_STAGE] > SLOW_S
    assert all(seconds > 0 for seconds in costs.forward_s)  # how long the others take is the machine's business
    assert [link.latency_s for link in (*costs.down, *costs.up)] == [LATENCY_S] * 4
    assert all(num_bytes > 0 for num_bytes in (*costs.activation_bytes, *costs.message_bytes))


def test_where_no_memory_is_left_1f1b_stays(fixed_and_adaptive: list[Any]) -> None:
    run = fixed_and_adaptive[0][2]
    assert {name.split(",")[0] for name, *_ in run["ran"]} == {"1f1b"}
    assert len(run["decisions"]) == 4
    for decision in run["decisions"]:
        assert list(decision["predicted_s"]) == [f"1f1b, micro-batch {BATCH}"]
        assert not decision["switched"]


def run_recomputed() -> dict[str, Any]:
    """All layers recomputed: as the tuner likes, and with room for whole backwards only."""
    recompute = {"pipeline": {"activation_checkpoint_interval": 1}}
    fixed = train(make_engine("1f1b", 2))
    engine = make_engine({"type": "adaptive", "retune_every": 2}, 2, **recompute)
    free = train(engine)
    meter, costs = engine.meter, None
    if "knowledge" in free and engine.global_rank == 0:
        costs = free["knowledge"].costs(BATCH)
    kept = engine.control.from_first(None if costs is None else (costs.activation_bytes, costs.deferred_bytes))
    sizes = {name: getattr(meter, name)[BATCH][0] for name in ("_most_deferred_bytes", "_deferred_bytes")}
    room = {"memory_gib": 2.5 * max(kept[0]) / 2**30}
    short = train(make_engine({"type": "adaptive", "retune_every": 2, **room}, 2, **recompute))
    return {"fixed": fixed, "free": free, "short": short, "kept": kept, **sizes}


def test_split_backwards_of_recomputed_layers_are_tried_where_there_is_room_for_what_they_leave() -> None:
    ranks = run_ranks(run_recomputed, 2)
    for rank in ranks:
        assert 0 < rank["_deferred_bytes"] <= rank["_most_deferred_bytes"] <= 2 * rank["_deferred_bytes"]
        for run in (rank["free"], rank["short"]):
            assert run["losses"] == rank["fixed"]["losses"]
            for name, weight in rank["fixed"]["weights"].items():
                assert torch.equal(run["weights"][name], weight), name
        ran = {which: {name.partition(",")[0] for name, *_ in rank[which]["ran"]} for which in ("free", "short")}
        assert "zbh1" in ran["free"]
        assert not any("zb" in name for name in ran["short"]), ran["short"]
    kept, deferred = ranks[0]["kept"]
    assert min(deferred) > 2.5 * max(kept), "or there is no room to be short of"
    families = {name.partition(",")[0] for each in ranks[0]["free"]["decisions"] for name in each["predicted_s"]}
    assert "zbh1" in families


USUAL_STEPS, CHANGED_STEPS = 10, 7


def run_steps_that_become_longer(stages: int) -> list[Any]:
    """By the clock that the watch is told, which does not depend on this machine."""
    steps = USUAL_STEPS + CHANGED_STEPS
    fixed = train(make_engine(None, stages), steps)
    engine = make_engine({"type": "adaptive", "retune_every": 1000}, stages)
    step_took, told = engine.controller.step_took, []

    def tell(seconds: float, size: float) -> None:
        told.append((seconds, size))
        step_took(1.0 if len(told) <= USUAL_STEPS else 2.0, 1.0)

    engine.controller.step_took = tell
    return [fixed, {**train(engine, steps), "told": told}]


def test_a_change_is_planned_for_at_once() -> None:
    """Long before the interval ends, on all ranks of both replicas, and no number changes."""
    found = run_ranks(run_steps_that_become_longer, 4, 2)
    for fixed, adaptive in found:
        assert adaptive["losses"] == fixed["losses"]
        assert all(seconds > 0 and size > 0 for seconds, size in adaptive["told"])
    # Two longer steps, one that begins with the notice, two that are measured.
    assert [decision["step"] for decision in found[0][1]["decisions"]] == [6, USUAL_STEPS + 2 + 1 + 2]


def shift_clock(engine: Any) -> None:
    """This rank's clock shows more than the others'."""
    from paceline.comm import transport
    from paceline.runtime import rank_reports

    shifted = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + CLOCK_S)
    for module in (rank_reports, transport):
        module.time = shifted  # type: ignore[attr-defined]
    engine.clock.host_s = shifted.perf_counter


def run_sizes() -> dict[str, Any]:
    """The tuner measures other micro-batch sizes, with samples of all lengths and a clock that is off."""
    from paceline.runtime import rank_reports

    fixed = train(make_engine(None), kind="ragged")
    engine = make_engine({**ADAPTIVE, "micro_batch_sizes": SIZES})
    if os.environ["RANK"] == str(SLOW_STAGE):
        shift_clock(engine)
    make_slow(engine)
    adaptive = train(engine, kind="ragged")
    clocks = [rank_reports.compare_clocks(engine.control, engine.pipe_ranks) for _ in range(5)]
    engine.destroy()
    return {"fixed": fixed, "adaptive": adaptive, "clocks": clocks}


@pytest.fixture(scope="module")
def sizes() -> list[Any]:
    return run_ranks(run_sizes, STAGES)


def test_every_micro_batch_size_is_measured(sizes: list[Any]) -> None:
    assert [rank["adaptive"]["ran"] for rank in sizes[1:]] == [sizes[0]["adaptive"]["ran"]] * (STAGES - 1)
    cuts = [cut for _, cut, _ in sizes[0]["adaptive"]["ran"]]
    assert cuts[:8] == [BATCH] * 4 + [1] * 2 + [4] * 2
    assert all(cut * count == BATCH * MICRO_BATCHES for _, cut, count in sizes[0]["adaptive"]["ran"])
    knowledge = sizes[0]["adaptive"]["knowledge"]
    assert knowledge.sizes() == SIZES
    for stage in range(STAGES):
        saved = [knowledge.saved_bytes[size][stage] for size in SIZES]
        assert 0 < saved[0] < saved[1] < saved[2]
    sent = [knowledge.costs(size).message_bytes[0] for size in SIZES]
    assert 0 < sent[0] < sent[1] < sent[2]
    decided = sizes[0]["adaptive"]["decisions"][0]
    assert {name.split("micro-batch ")[1] for name in decided["predicted_s"]} == {str(size) for size in SIZES}


def test_other_sizes_train_on_the_same_samples(sizes: list[Any]) -> None:
    for stage in (0, STAGES - 1):
        fixed, adaptive = sizes[stage]["fixed"], sizes[stage]["adaptive"]
        assert adaptive["samples"] == fixed["samples"]
        assert adaptive["losses"] == pytest.approx(fixed["losses"], rel=1e-5)


def test_clocks_that_differ_are_found_out(sizes: list[Any]) -> None:
    for stage, offset in ((SLOW_STAGE - 1, CLOCK_S), (SLOW_STAGE, -CLOCK_S)):
        clocks = sizes[stage]["clocks"]
        assert all(abs(clock_s - offset) <= latency_s + 1e-6 for clock_s, latency_s in clocks)
        assert min(abs(clock_s - offset) for clock_s, _ in clocks) < 0.1 * CLOCK_S


def test_predictions_are_sane_in_spite_of_the_clocks(sizes: list[Any]) -> None:
    knowledge, decisions = sizes[0]["adaptive"]["knowledge"], sizes[0]["adaptive"]["decisions"]
    for size in SIZES:
        costs = knowledge.costs(size)
        assert all(0 < seconds < 100 for seconds in (*costs.forward_s, *costs.backward_s))
        assert all(link.bytes_per_s > 100 for link in (*costs.down, *costs.up))
        assert costs.step_s < 100
    # A machine that stands still for a while spoils some of them; clocks that are off would spoil all.
    assert any(0.05 < decision["predicted_now_s"] / decision["measured_s"] < 20 for decision in decisions)


def run_with_sizes_that_cannot_be_cut() -> str:
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from torch import nn

    import paceline

    deepspeed.init_distributed()
    module = PipelineModule(layers=[nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=nn.MSELoss())
    section = {"pipeline": {"schedule": {**ADAPTIVE, "micro_batch_sizes": SIZES}}}
    try:
        paceline.initialize(
            model=module, model_parameters=list(module.parameters()), config=ds_config(paceline=section)
        )
    except ValueError as error:
        return str(error)
    return "nothing refused it"


def test_a_pipeline_module_of_the_users_own_is_not_cut() -> None:
    for message in run_ranks(run_with_sizes_that_cannot_be_cut, 2):
        assert message == (
            "paceline.pipeline.schedule.micro_batch_sizes is [1, 2, 4]: this PipelineModule's data cannot be cut "
            "otherwise than into micro-batches of 2; leave the key out."
        )


class Held:
    """A tensor that autograd keeps for a micro-batch's backward."""

    def __init__(self, tensor: torch.Tensor, micro_batch: int) -> None:
        self.tensor, self.micro_batch = tensor, micro_batch


class Alive:
    """The most micro-batches of which an engine has kept anything at a time, seen at the end of each forward."""

    def __init__(self, engine: Any) -> None:
        self.peak = 0
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()
        [held] = engine.held
        self._forwards, self._forward = 0, held.runner.forward
        held.runner.forward = self._watched

    def _watched(self, live: Any, number: int) -> None:
        self._forwards += 1
        index = self._forwards  # over all steps: what a step leaves behind counts in the next

        def pack(tensor: torch.Tensor) -> Held:
            held = Held(tensor, index)
            self._held.add(held)
            return held

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            self._forward(live, number)
        self.peak = max(self.peak, len({held.micro_batch for held in self._held}))

    def take(self) -> tuple[int, int]:
        """Of the last step, and how many are alive now."""
        peak, self.peak = self.peak, 0
        return peak, len(self._held)


def make_schedules() -> list[Any]:
    from paceline.schedules.families import eager, gpipe, kfkb, one_f_one_b

    shape = (STAGES, MICRO_BATCHES)
    return [
        *(one_f_one_b(*shape), kfkb(*shape, 2), eager(*shape, 1.0), gpipe(*shape)),
        *(kfkb(*shape, 3), one_f_one_b(*shape)),
    ]


def refusals(engine: Any) -> list[str]:
    from paceline.schedules.families import interleaved, one_f_one_b
    from paceline.schedules.schedule import Schedule, backward, forward

    order = [forward(m) for m in range(MICRO_BATCHES)] + [backward(m) for m in reversed(range(MICRO_BATCHES))]
    late = Schedule((tuple(order),) * STAGES, MICRO_BATCHES, name="late")
    found = []
    for schedule in (
        one_f_one_b(STAGES, MICRO_BATCHES - 1),
        one_f_one_b(STAGES + 1, MICRO_BATCHES),
        interleaved(STAGES, 2 * STAGES, 2),
        late,
    ):
        before = engine.schedule
        try:
            engine.set_schedule(schedule)
            found.append("nothing refused it")
        except ValueError as error:
            found.append(str(error))
        assert engine.schedule is before, "a schedule that was refused is run"
    return found


def run_set_schedules() -> dict[str, Any]:
    schedules = make_schedules()
    fixed = train(make_engine(None), len(schedules))
    engine = make_engine(None)
    alive = Alive(engine)
    losses, peaks = [], []
    for step, schedule in enumerate(schedules):
        engine.set_schedule(schedule)
        losses.append(engine.train_batch(iter(step_batches(step))).item())
        peaks.append(alive.take())
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return {"fixed": fixed, "losses": losses, "weights": weights, "peaks": peaks, "refused": refusals(engine)}


@pytest.fixture(scope="module")
def set_schedules() -> list[Any]:
    return run_ranks(run_set_schedules, STAGES)


def test_a_schedule_set_between_steps_changes_no_number(set_schedules: list[Any]) -> None:
    for rank in set_schedules:
        assert rank["losses"] == rank["fixed"]["losses"]
        for name, weight in rank["fixed"]["weights"].items():
            assert torch.equal(rank["weights"][name], weight), name


def test_as_many_micro_batches_are_alive_as_the_proof_says(set_schedules: list[Any]) -> None:
    from paceline.schedules.verify import verify

    wanted = [verify(schedule).peak_activations for schedule in make_schedules()]
    assert len(set(wanted)) == 5
    for stage, rank in enumerate(set_schedules):
        assert rank["peaks"] == [(peaks[stage], 0) for peaks in wanted], f"stage {stage}"


def test_what_cannot_be_run_is_refused(set_schedules: list[Any]) -> None:
    for rank in set_schedules:
        count, ranks, chunks, order = rank["refused"]
        assert f"has {MICRO_BATCHES - 1} micro-batches and a step {MICRO_BATCHES}: make one for these" in count
        assert "has 4 ranks with 1 chunks: this pipeline has 3 stages of one chunk each" in ranks
        assert "has 3 ranks with 2 chunks: this pipeline has 3 stages of one chunk each" in chunks
        assert "'late' runs backwards out of order: gradients are added up in the order of" in order
