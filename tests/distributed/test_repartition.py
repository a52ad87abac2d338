"""Partitions that follow the devices: where layers end up, how soon, and that no number depends on it.

Layers take their time by a clock that only work moves on, by the speed of their process's device.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.device import DEVICE
from lab.emulation import OPTIMIZERS, EmulatedLayer, Emulation, SpeedChange, loss
from lab.partitions import best, step_s
from support.jobs import MICRO_BATCHES, ds_config, model_config, step_batches, wait_for_what_is_sent_ahead
from support.ranks import run_ranks
from support.work_time import WORK_TIME, Work

EVERY = 3
WORK_S = 0.012
"""Of a layer's forward, and as much of its backward, on a device of speed 1."""
LAYER_S, TIMES = 0.005, 3
"""Of a real layer's forward, and how many times as long it takes on a slow rank."""
AT_ONCE = 1e6
"""A speed: nothing takes time."""
NEAR = 1.05
"""Of the best step time. How near and how soon on real clocks is measured by `tests/benchmarks/slowdown.py`."""
LATENCY_S = 0.03
"""That ranks are told their links have: much to gain by another order than 1F1B."""


def emulation_of(speeds: Sequence[float], num_layers: int, message_bytes: int = 64, **more: Any) -> Emulation:
    of_layers = [WORK_S], [WORK_S], message_bytes, 8
    return Emulation.of(len(speeds), *of_layers, num_layers=num_layers, speeds=speeds, optimizer="Adam", **more)


class Warnings(logging.Handler):
    """What the library warns of on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("paceline").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def expect_short_moves() -> None:
    """Steps are short here: a move that is thought to take a third of a second does not pay at the first look."""
    from paceline.runtime import partition_actuator

    partition_actuator.REBUILD_S = 0.01


def layers_of(emulation: Emulation, tied: Sequence[int]) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    arguments = [emulation.layer_arguments(index) for index in range(emulation.num_layers)]
    return [
        TiedLayerSpec("tied", EmulatedLayer, *each, tied_weight_attr=["linear.weight"])
        if index in tied
        else LayerSpec(EmulatedLayer, *each)
        for index, each in enumerate(arguments)
    ]


def run(
    emulation: Emulation,
    steps: int,
    section: dict[str, Any],
    *,
    tied: Sequence[int] = (),
    method: Any = "uniform",
    report: dict[str, Any] | None = None,
    folder: Path | None = None,
    latency_s: float | None = None,
) -> dict[str, Any]:
    """A run on this rank: what it lost, where the layers lay in every step, what the controller decided."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import paceline
    from paceline.runtime.rank_reports import COMPARISONS

    deepspeed.init_distributed()
    expect_short_moves()
    wait_for_what_is_sent_ahead()
    WORK_TIME.rule()
    told = Warnings()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": emulation.num_micro_batches,
        "optimizer": {"type": emulation.optimizer, "params": OPTIMIZERS[emulation.optimizer]},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "paceline": {"pipeline": section, **({"report": report} if report else {})},
    }
    torch.manual_seed(0)
    module = PipelineModule(
        layers_of(emulation, tied), num_stages=emulation.num_ranks, loss_fn=loss, partition_method=method
    )
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = paceline.initialize(model=module, model_parameters=trained, config=config)
    WORK_TIME.time(engine)
    if folder is not None:
        engine.run_dir = folder
    if latency_s is not None:
        engine.reports.clocks.extend([(0.0, latency_s)] * COMPARISONS)
    batches = cycle(emulation.batches)
    found: dict[str, Any] = {"losses": [], "parts": [], "schedules": []}
    for step in range(steps):
        WORK_TIME.begin_step()
        DEVICE.begin_step(emulation.speeds_at(step)[int(os.environ["RANK"])])
        found["losses"].append(engine.train_batch(batches).item())
        found["parts"].append(tuple(engine.module.parts))
        found["schedules"].append(engine.schedule.name)
    found["weights"] = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    found["migrations"] = list(engine.migrations)
    found["decisions"] = [] if engine.controller is None else engine.controller.decisions
    found["warnings"] = told.lines
    engine.destroy()
    logging.getLogger("paceline").removeHandler(told)
    return found


def online(every: int = EVERY, **more: Any) -> dict[str, Any]:
    return {"partition": {"method": "uniform", "repartition_every": every, **more}}


def run_both(speeds: Sequence[float], num_layers: int, steps: int, section: dict[str, Any], **more: Any) -> Any:
    """A run that follows its devices, and the same computation on one partition, where nobody sleeps."""
    of_emulation = ("speed_changes", "layer_bytes", "is_frozen", "message_bytes")
    options = {key: more.pop(key) for key in of_emulation if key in more}
    followed = run(emulation_of(speeds, num_layers, **options), steps, section, **more)
    tied = {"tied": more["tied"]} if "tied" in more else {}
    fixed = run(emulation_of([AT_ONCE] * len(speeds), num_layers), steps, {"partition": "uniform"}, **tied)
    return followed, fixed


def check_same(ranks: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """No bit depends on where the layers were."""
    for followed, fixed in ranks:
        assert followed["losses"] == fixed["losses"]
        assert followed["parts"] == ranks[0][0]["parts"]
    ended, wanted = ({n: w for rank in ranks for n, w in rank[which]["weights"].items()} for which in (0, 1))
    assert {name for name in ended if not name.endswith("ballast")} == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(ended[name], weight), name
    assert len(set(ranks[0][1]["losses"])) > 2, "nothing was trained"


@pytest.mark.parametrize(("speeds", "num_layers"), [((3.0, 1.0), 8), ((2.0, 1.0, 1.0), 12)])
def test_uneven_devices_get_the_layers_that_suit_them(speeds: tuple[float, ...], num_layers: int) -> None:
    ranks = run_ranks(run_both, len(speeds), speeds, num_layers, 9, online())
    check_same(ranks)
    followed = ranks[0][0]
    emulation = emulation_of(speeds, num_layers)
    uniform = tuple(num_layers * stage // len(speeds) for stage in range(len(speeds) + 1))
    assert followed["parts"][:4] == [uniform] * 4
    ((best_s, _),) = best(emulation)
    assert step_s(emulation, followed["parts"][-1]) <= NEAR * best_s, followed["parts"]
    first = followed["decisions"][0]
    assert (first["what"], first["step"], first["switched"]) == ("partition", 4, True)
    assert first["migration"] == followed["migrations"][0]
    assert first["predicted_now_s"] == pytest.approx(step_s(emulation, uniform), rel=0.02)
    assert all(rank["decisions"] == [] for rank, _ in ranks[1:])


@pytest.mark.parametrize("is_frozen", [True, False])
def test_weights_come_before_their_layer(is_frozen: bool) -> None:
    """Their layer moves a step after that was decided, and training waits for little."""
    large = {"layer_bytes": 1 << 20, "is_frozen": is_frozen, "message_bytes": 1 << 18}
    ranks = run_ranks(run_both, 2, (3.0, 1.0), 8, 9, online(), **large)
    check_same(ranks)
    followed = ranks[0][0]
    assert followed["parts"][:5] == [(0, 4, 8)] * 5
    first, moved = followed["decisions"][0], followed["migrations"][0]
    assert first["step"] >= 5
    assert (first["switched"], first["migration"]) == (True, moved)
    assert moved["bytes"] > (1 if is_frozen else 2) << 20
    # One layer is packed in any case; others are not where the link is as fast as here. At once it would be a third.
    assert moved["paused_bytes"] < (1 << 12 if is_frozen else moved["bytes"] / 4)


def test_layers_leave_a_device_that_slows_down_and_come_back() -> None:
    slow_at, recover_at, steps = 5, 14, 23
    changes = (SpeedChange(slow_at, 1, 1 / 3), SpeedChange(recover_at, 1, 1.0))
    ranks = run_ranks(run_both, 2, (1.0, 1.0), 8, steps, online(), speed_changes=changes)
    check_same(ranks)
    emulation = emulation_of((1.0, 1.0), 8, speed_changes=changes)
    for begun, ended in ((0, slow_at), (slow_at, recover_at), (recover_at, steps)):
        speeds = emulation.speeds_at(begun)
        ((best_s, _),) = best(emulation, speeds)
        parts = ranks[0][0]["parts"][ended - 1]
        assert step_s(emulation, parts, speeds) <= NEAR * best_s, (ended - 1, parts)
    moved_at = [migration["step"] for migration in ranks[0][0]["migrations"]]
    assert slow_at < moved_at[0] < recover_at
    assert recover_at < moved_at[-1]


def test_schedule_and_partition_change_together() -> None:
    section = online() | {"schedule": {"type": "adaptive", "retune_every": EVERY}}
    ranks = run_ranks(run_both, 3, (2.0, 1.0, 1.0), 12, 11, section, latency_s=LATENCY_S)
    check_same(ranks)
    followed = ranks[0][0]
    assert followed["parts"][5] == (0, 4, 8, 12)
    assert followed["parts"][6][1] > 4
    assert followed["schedules"][:6] == ["1f1b"] * 4 + ["zbh1, micro-batch 1"] * 2
    assert followed["schedules"][6] not in followed["schedules"][:6]
    first, second = followed["decisions"][:2]
    assert [(d["what"], d["step"]) for d in (first, second)] == [("schedule", 6), ("partition", 6)]
    assert second["switched"]
    assert second["schedule"] == followed["schedules"][6]
    assert all(rank["schedules"] == followed["schedules"] for rank, _ in ranks)


def test_little_memory_is_said_and_training_goes_on() -> None:
    section = online(memory_gib=1e-6)
    ranks = run_ranks(run_both, 2, (3.0, 1.0), 8, 9, section, layer_bytes=4096)
    check_same(ranks)
    (line,) = ranks[0][0]["warnings"]
    assert line.startswith("step 4: with the partition [0, 4, 8], device 0 takes 0.0")
    assert "paceline.pipeline.partition.memory_gib allows 0.001023 MiB: layers move only to" in line
    assert ranks[1][0]["warnings"] == []
    assert set(ranks[0][0]["parts"]) == {(0, 4, 8)}
    assert [d["switched"] for d in ranks[0][0]["decisions"]] == [False, False]


def test_tied_layers_stay() -> None:
    """The slow first stage would keep one layer, and has to keep three."""
    ranks = run_ranks(run_both, 2, (0.5, 2.0), 8, 6, online(), tied=(2, 6))
    check_same(ranks)
    assert ranks[0][0]["parts"][-1] == (0, 3, 8)


def test_a_trace_of_every_step_takes_nothing_from_the_looks(tmp_path: Path) -> None:
    ranks = run_ranks(run_both, 2, (3.0, 1.0), 8, 6, online(), report={"trace_every": 1}, folder=tmp_path)
    check_same(ranks)
    assert ranks[0][0]["parts"][-1][1] > 4
    assert len(list(tmp_path.rglob("*.json*"))) > 0


# -- models of Hugging Face ------------------------------------------------------------------------------------------


def train_model(
    zero: int,
    partition: Any,
    slow_rank: int | None,
    steps: int,
    schedule: Any = "1f1b",
    num_layers: int = 6,
    moves: Mapping[int, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Decoder layers on two ranks, of which one may be slow.

    Args:
        moves: boundaries that are asked for, by the step before which they are.
    """
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    import paceline

    expect_short_moves()
    WORK_TIME.rule()
    layer_s = LAYER_S * (TIMES if slow_rank == int(os.environ["RANK"]) else 1)
    replicas = int(os.environ["WORLD_SIZE"]) // 2
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        zero_optimization={"stage": zero},
        paceline={"pipeline": {"stages": 2, "partition": partition, "schedule": schedule}},
    )
    forward = LlamaDecoderLayer.forward

    def takes_its_time(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(layer, Work.apply(hidden_states, layer_s), *args, **kwargs)

    LlamaDecoderLayer.forward = takes_its_time
    try:
        engine, *_ = paceline.initialize(model=model_config(num_hidden_layers=num_layers), config=config)
        WORK_TIME.time(engine)
        found: dict[str, Any] = {"losses": [], "parts": [], "held": engine.module.held}
        for step in range(steps):
            WORK_TIME.begin_step()
            if moves and step in moves:
                engine.repartition(moves[step])
            batches = step_batches(step)[engine.grid.data_parallel_id :: replicas]
            found["losses"].append(engine.train_batch(iter(batches)).item())
            found["parts"].append(tuple(engine.module.parts))
        if engine.controller is not None:
            knowledge = engine.controller.measurements.costs
            found |= {"decisions": engine.controller.decisions, "guessed": knowledge.guessed}
            found |= {"state_bytes": knowledge.state_bytes, "moved_bytes": knowledge.moved_bytes}
            found["items"] = [(item.forward_s > 0, item.saved_bytes > 0) for item in knowledge.items]
        found["evaluation"] = engine.evaluate(step_batches(steps)[engine.grid.data_parallel_id :: replicas])
        engine.destroy()
    finally:
        LlamaDecoderLayer.forward = forward
    return found


def model_both(zero: int, slow_rank: int, steps: int = 9) -> tuple[dict[str, Any], dict[str, Any]]:
    followed = train_model(zero, {"method": "uniform", "repartition_every": 2}, slow_rank, steps)
    return followed, train_model(zero, "uniform", None, steps)


@pytest.mark.parametrize(("zero", "replicas", "slow_rank"), [(0, 1, 1), (1, 2, 1)])
def test_a_language_model_follows_its_devices(zero: int, replicas: int, slow_rank: int) -> None:
    """With two replicas one rank of a stage is slow: its stage counts as slow."""
    ranks = run_ranks(model_both, 2 * replicas, zero, slow_rank)
    for followed, fixed in ranks:
        assert followed["losses"] == fixed["losses"]
        assert followed["evaluation"] == fixed["evaluation"]
        assert followed["parts"] == ranks[0][0]["parts"]
        assert set(fixed["parts"]) == {(0, 4, 8)}
    followed = ranks[0][0]
    last = followed["parts"][-1][1]
    assert last < 4 if slow_rank < replicas else last > 4
    assert [d["step"] for d in followed["decisions"]] == [4, 6, 8]
    assert followed["guessed"] == ()
    # Values, gradients, and Adam's two moments, of which ZeRO 1 has half on each replica; gradients stay behind.
    moments = 8 if zero == 0 else 8 / replicas
    assert followed["state_bytes"] == pytest.approx([4 + 4 + moments] * 2, rel=0.01)
    assert followed["moved_bytes"] == pytest.approx(4 + moments, rel=0.01)


SEVERAL = {
    "interleaved": {"type": "interleaved", "chunks": 2},
    "without a flush": {"type": "multidirection", "directions": 2},
    "one direction": {"type": "one_direction"},
}


def several_both(name: str, steps: int = 7) -> tuple[dict[str, Any], dict[str, Any]]:
    """On devices that hold several stages, or whose steps run into each other; and as it is without any move.

    Without a flush a layer's weights are as late as its stage is: then with the same moves, asked for by hand.
    """
    schedule = SEVERAL[name]
    start = [0, 3, 5, 7, 10] if name == "interleaved" else [0, 5, 10]
    followed = train_model(0, {"method": start, "repartition_every": 2}, 1, steps, schedule, num_layers=8)
    parts = followed["parts"]
    moves = {step: parts[step] for step in range(1, steps) if parts[step] != parts[step - 1]}
    by_hand = None if name == "interleaved" else moves
    return followed, train_model(0, start, None, steps, schedule, num_layers=8, moves=by_hand)


@pytest.mark.parametrize("name", SEVERAL)
def test_layers_follow_devices_that_hold_several_stages_or_never_flush(name: str) -> None:
    """The second rank is slow; where both have both stages, in two directions, there is nothing to be gained."""
    ranks = run_ranks(several_both, 2, name)
    for followed, fixed in ranks:
        assert followed["losses"] == fixed["losses"]
        assert followed["evaluation"] == fixed["evaluation"]
        assert followed["parts"] == ranks[0][0]["parts"]
    followed = ranks[0][0]
    first, last = (followed["parts"][index] for index in (0, -1))
    assert followed["decisions"], "it is looked at"
    assert all(seconds and num_bytes for seconds, num_bytes in followed["items"][1:-1]), "every layer was timed"
    if len(first) == 3 and len(ranks[0][0]["held"]) == 2:
        return
    before, after = (sum(parts[stage + 1] - parts[stage] for stage in ranks[1][0]["held"]) for parts in (first, last))
    assert after < before, "the slow device has less to do"


# -- a partition of the JSON for a module that was built with another one ----------------------------------------------


def given_other_boundaries() -> Any:
    """Losses, boundaries and layers here of a stock module: built so, and told so by the JSON."""
    emulation = emulation_of([AT_ONCE] * 2, 8)
    found = []
    for method, partition in (("uniform", "uniform"), ("uniform", [0, 2, 8]), ("uniform", {"method": {"Emulated": 1}})):
        ran = run(emulation, 3, {"partition": partition}, method=method)
        found.append((ran["losses"], ran["parts"], sorted(ran["weights"])))
    return found


def test_the_jsons_partition_is_taken_on_by_a_ready_made_module() -> None:
    for rank, results in enumerate(run_ranks(given_other_boundaries, 2)):
        (losses, parts, _), moved, by_class = results
        assert parts == [(0, 4, 8)] * 3
        here = range(2) if rank == 0 else range(2, 8)
        assert moved == (losses, [(0, 2, 8)] * 3, sorted(f"{item}.linear.weight" for item in here))
        assert by_class[:2] == (losses, parts)


def by_hand(partition: Any) -> dict[str, Any]:
    import deepspeed

    import paceline
    from paceline.runtime.module import CausalLMPipeline

    deepspeed.init_distributed()
    model = CausalLMPipeline(model_config(num_hidden_layers=6), num_stages=2, partition=[0, 5, 8])
    section = {} if partition is None else {"partition": partition}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": {"stages": 2, **section}})
    engine, *_ = paceline.initialize(model=model, config=config)
    losses = [engine.train_batch(iter(step_batches(step))).item() for step in range(3)]
    layers = sorted({int(n.split(".")[2]) for n, _ in engine.module.stage.model.named_parameters() if ".layers." in n})
    return {"losses": losses, "parts": tuple(engine.module.parts), "layers": layers}


def both_by_hand() -> Any:
    return by_hand(None), by_hand([0, 2, 8]), by_hand("uniform")


def test_the_jsons_partition_is_taken_on_by_a_language_model_built_by_hand() -> None:
    for rank, (stays, moved, uniform) in enumerate(run_ranks(both_by_hand, 2)):
        assert stays["parts"] == (0, 5, 8)
        assert stays["losses"] == moved["losses"] == uniform["losses"]
        assert (moved["parts"], uniform["parts"]) == ((0, 2, 8), (0, 4, 8))
        assert moved["layers"] == (list(range(1)) if rank == 0 else list(range(1, 6)))
        assert uniform["layers"] == (list(range(3)) if rank == 0 else list(range(3, 6)))


def moved_by_hand(is_moved: bool) -> list[float]:
    """Losses of a run that looks at its layers, and whose script moves them before each step."""
    import paceline
    from support.jobs import MICRO_BATCHES, ds_config, model_config, step_batches

    partition = {"method": "hetero", "repartition_every": 2} if is_moved else "uniform"
    section = {"pipeline": {"stages": 2, "partition": partition}}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline=section)
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    losses = []
    for step in range(8):
        if is_moved:
            engine.repartition([0, 2 + step % 3, engine.layers.num_items])
        losses.append(engine.train_batch(iter(step_batches(step))).item())
    return losses


def test_a_script_moves_layers_that_are_about_to_be_timed() -> None:
    assert run_ranks(moved_by_hand, 2, True) == run_ranks(moved_by_hand, 2, False)
