"""Experts that move while an engine without a pipeline trains: the numbers are those of stock DeepSpeed, to the bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.planning.expert_speeds import UNEQUAL
from support import expert_models as models
from support.expert_models import NATIVE
from support.ranks import RankError, run_ranks
from support.work_time import WORK_TIME

STEPS, MOVING_STEPS = 12, 8
BY_HAND = {"paceline": {"moe": {"rebalance_every": 0}}}


def start() -> None:
    """Masters and states of experts that have moved come when somebody waits for them, and no sooner."""
    import paceline
    from paceline.moe import moving
    from paceline.runtime.initialize import start_distributed
    from paceline.state.exchange_beside import ExchangeBeside

    class AtTheLatest(ExchangeBeside):
        def start(self) -> None:
            pass

        def wait(self, *args: Any, **options: Any) -> None:
            super().start()
            super().wait(*args, **options)

    moving.ExchangeBeside = AtTheLatest  # type: ignore[misc]
    paceline.repair_deepspeed()
    start_distributed()


def built(family: str, zero: int, ep: int, accumulation: int, layer: dict[str, Any], **changes: Any) -> Any:
    if family == NATIVE:
        layer = {"ep": ep, **layer}
    bf16 = {"bf16": {"enabled": True}} if layer.get("bf16") else {}
    config = models.ds_config(zero, ep, accumulation, autoep=family != NATIVE, **bf16, **changes)
    return models.engine_for(family, config, **{name: value for name, value in layer.items() if name != "bf16"})


def state_in_order(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's weights, experts in the model's order."""
    with engine.rebalancer.in_order():
        return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


def moving_job(family: str, zero: int, ep: int, accumulation: int, layer: dict[str, Any]) -> dict[str, Any]:
    """As stock DeepSpeed trains, and with experts that are sent somewhere else now and then, and move by themselves."""
    from paceline.moe import rebalancer

    rebalancer.LEAST_BYTES = 0
    start()
    micro_steps = range(MOVING_STEPS * accumulation)
    engine = built(family, zero, ep, accumulation, layer)
    stock = models.train(engine, micro_steps)
    wanted = dict(engine.module.state_dict())

    engine = built(family, zero, ep, accumulation, layer, paceline={"moe": {"rebalance_every": 4}})
    ours, placements, moves, prepared = [], set(), [], []
    for step in range(MOVING_STEPS):
        if step % 4 == 2:
            prepared.append(models.scatter_experts(engine, step + 1, "prepare_experts"))
        if step % 2:
            moves.append(models.scatter_experts(engine, step))
            placements.add(tuple(layer.placement.devices for layer in engine.expert_layers.values()))
        ours += models.train(engine, micro_steps[step * accumulation : (step + 1) * accumulation])
    found = state_in_order(engine)
    top_k = layer.get("k", 2) if family == NATIVE else engine.module.config.num_experts_per_tok
    return {
        "loads": {sum(of["loads"]) for window in engine.rebalancer.windows for of in window["layers"]},
        "tokens": accumulation * torch.distributed.get_world_size() * models.BATCH * models.LENGTH * top_k,
        "stock": stock,
        "ours": ours,
        "placements": len(placements),
        "prepared": prepared,
        "paused for all": [moved for moved in moves if not 0 < moved["paused_bytes"] < moved["num_bytes"]],
        "layers": list(engine.expert_layers),
        "steps": engine.rebalancer.loads.step,
        "other weights": [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)],
    }


@pytest.mark.parametrize(
    ("family", "zero", "ep", "ranks", "accumulation", "layer"),
    [
        ("mixtral", 0, 2, 2, 2, {}),
        ("mixtral", 1, 2, 2, 1, {"bf16": True}),
        ("mixtral", 2, 2, 2, 2, {}),
        ("qwen3_moe", 1, 2, 2, 1, {"checkpointing": True}),
        ("deepseek_v3", 0, 4, 4, 1, {}),
        (NATIVE, 0, 2, 2, 1, {"k": 1, "noisy_gate_policy": "RSample", "use_residual": True}),
        (NATIVE, 1, 2, 4, 1, {"k": 3, "drop_tokens": False}),
    ],
)
def test_moves_change_nothing(
    family: str, zero: int, ep: int, ranks: int, accumulation: int, layer: dict[str, Any]
) -> None:
    """Losses and all weights, bit by bit, against stock DeepSpeed."""
    results = run_ranks(moving_job, ranks, family, zero, ep, accumulation, layer)
    assert results[0]["loads"] == {results[0]["tokens"]}  # in a step, each counted once
    for rank in results:
        assert rank["ours"] == rank["stock"]
        assert rank["other weights"] == []
        assert rank["placements"] >= 4
        assert rank["prepared"] == [True] * 2
        assert rank["paused for all"] == []
        assert rank["steps"] == MOVING_STEPS
        assert len(set(rank["stock"])) == MOVING_STEPS * accumulation


ROW_S, TIMES = 4e-4, 4
"""Seconds of a row by the clock that only work moves on, and how many times as long the second rank takes for it."""


def slow_rank_job() -> dict[str, Any]:
    """The second rank takes longer for a row; copies' tokens are shared by the loads of each batch."""
    from paceline.moe.auto_ep import RebalancedAutoEPLayer

    start()
    WORK_TIME.rule()
    stock = models.train(built("mixtral", 1, 2, 1, {}), range(STEPS))
    compute, rows_here = RebalancedAutoEPLayer._compute, []

    def slow(layer: Any, rows: torch.Tensor, *more: Any) -> torch.Tensor:
        rows_here.append(rows.shape[0])
        WORK_TIME.sleep(rows.shape[0] * ROW_S * (TIMES if layer.rank else 1))
        return compute(layer, rows, *more)

    RebalancedAutoEPLayer._compute = slow  # type: ignore[method-assign]
    runs = {}
    for name, section in {"moves": {}, "copies": {"replicas": 1, "splitting": "fresh"}}.items():
        engine = built("mixtral", 1, 2, 1, {}, paceline={"moe": {"rebalance_every": 4, **section}})
        losses = models.train(engine, range(STEPS - 4))
        rows_here.clear()
        losses += models.train(engine, range(STEPS - 4, STEPS))
        runs[name] = losses, sum(rows_here), engine.rebalancer.decisions
    return {"stock": stock, **runs}


def test_busy_experts_leave_a_slow_rank() -> None:
    """No number changes but by the order of sums, where there are copies."""
    ranks = run_ranks(slow_rank_job, 2)
    for rank in ranks:
        assert rank["moves"][0] == rank["stock"]
        torch.testing.assert_close(rank["copies"][0], rank["stock"], rtol=1e-4, atol=1e-4)
    for name, least in (("moves", 1.15), ("copies", 1.3)):
        fast, slow = ranks[0][name][2][-1]["speeds"]
        assert UNEQUAL <= fast / slow < 1.5 * TIMES, name
        assert ranks[0][name][1] > least * ranks[1][name][1], name


def resume_job(directory: str, family: str, zero: int, accumulation: int) -> dict[str, Any]:
    """Saved with experts anywhere; read by another engine of ours, and by stock DeepSpeed."""
    from deepspeed.utils import safe_get_full_fp32_param

    start()
    first = built(family, zero, 2, accumulation, {}, **BY_HAND)
    models.train(first, range(2 * accumulation))
    models.scatter_experts(first, 1)
    placements = first.rebalancer.placements()
    first.save_checkpoint(directory, tag="two", client_state={"mine": 7})
    assert first.rebalancer.placements() == placements, "saving left experts elsewhere"
    later = range(2 * accumulation, 5 * accumulation)
    result: dict[str, Any] = {"uninterrupted": models.train(first, later)}
    wanted = state_in_order(first)

    second = built(family, zero, 2, accumulation, {}, **BY_HAND)
    _, state = second.load_checkpoint(directory)
    assert second.rebalancer.placements() == placements, "the placement was not restored"
    result["client state"] = state.get("mine"), "paceline" in state
    models.scatter_experts(second, 2)
    masters = {name: (p, safe_get_full_fp32_param(p)) for name, p in second.module.named_parameters()}
    result["other masters"] = [n for n, (p, master) in masters.items() if zero and not torch.equal(p, master)]
    result["resumed"] = models.train(second, later)
    found = state_in_order(second)
    result["other weights"] = [name for name in wanted if not torch.equal(wanted[name], found[name])]

    stock = built(family, zero, 2, accumulation, {})
    stock.load_checkpoint(directory)
    result["stock"] = models.train(stock, later)
    return result


@pytest.mark.parametrize(
    ("family", "zero", "accumulation"), [("mixtral", 0, 2), ("mixtral", 1, 1), (NATIVE, 0, 1), (NATIVE, 1, 1)]
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    family: str, zero: int, accumulation: int, tmp_path: Path
) -> None:
    for rank in run_ranks(resume_job, 2, str(tmp_path), family, zero, accumulation):
        assert rank["resumed"] == rank["uninterrupted"]
        assert rank["stock"] == rank["uninterrupted"]
        assert rank["other weights"] == []
        assert rank["client state"] == (7, False)
        assert rank["other masters"] == []  # who reads them waits for those that are on their way


def saving_job(directory: str, family: str, zero: int, ep: int) -> list[float]:
    start()
    engine = built(family, zero, ep, 1, {}, **BY_HAND)
    models.train(engine, range(3))
    if ep > 1:
        models.scatter_experts(engine, 1)
    engine.save_checkpoint(directory, tag="three")
    return models.train(engine, range(3, 6))


def loading_job(directory: str, family: str, zero: int, ep: int, alone: bool = False) -> dict[str, Any]:
    start()
    engine = built(family, zero, ep, 1, {}, **BY_HAND)
    if ep > 1:
        models.scatter_experts(engine, 2)
    path, _ = engine.load_checkpoint(directory, load_optimizer_states=not alone)
    assert path is not None, directory
    return {"losses": models.train(engine, range(3, 6)), "steps": engine.global_steps}


@pytest.mark.parametrize(
    ("family", "zero", "saved", "loaded"),
    [
        ("mixtral", 0, 2, 1),
        ("mixtral", 1, 1, 2),
        ("qwen3_moe", 2, 2, 1),
        (NATIVE, 0, 1, 2),
        (NATIVE, 1, 2, 1),
    ],
)
def test_checkpoints_of_another_expert_parallel_size(
    family: str, zero: int, saved: int, loaded: int, tmp_path: Path
) -> None:
    """The optimizer's states too; the sums of two ranks' gradients are in another order."""
    wanted = run_ranks(saving_job, 2, str(tmp_path), family, zero, saved)
    for rank, losses in zip(run_ranks(loading_job, 2, str(tmp_path), family, zero, loaded), wanted, strict=True):
        torch.testing.assert_close(rank["losses"], losses, rtol=1e-5, atol=1e-5)
        assert rank["steps"] == 6


def fewer_ranks_job(directory: str) -> dict[tuple[int, int], float]:
    """Two ranks with two micro-batches each do what four did; losses by step and rank of those."""
    start()
    engine = built("qwen3_moe", 1, 2, 2, {}, **BY_HAND)
    engine.load_checkpoint(directory)
    rank = torch.distributed.get_rank()
    work = [(step, of) for step in range(3, 6) for of in (rank, rank + 2)]
    return {(step, of): models.train(engine, [step], of)[0] for step, of in work}


def test_checkpoints_of_another_number_of_ranks(tmp_path: Path) -> None:
    wanted = run_ranks(saving_job, 4, str(tmp_path), "qwen3_moe", 1, 4)
    for losses in run_ranks(fewer_ranks_job, 2, str(tmp_path)):
        for (step, of), loss in losses.items():
            assert loss == pytest.approx(wanted[of][step - 3], rel=1e-5), (step, of)


def test_weights_alone_of_another_expert_parallel_size(tmp_path: Path) -> None:
    wanted = run_ranks(saving_job, 2, str(tmp_path), "mixtral", 1, 2)
    for rank, losses in zip(run_ranks(loading_job, 2, str(tmp_path), "mixtral", 1, 1, True), wanted, strict=True):
        torch.testing.assert_close(rank["losses"][0], losses[0], rtol=1e-5, atol=1e-5)
        assert abs(rank["losses"][2] - losses[2]) > 1e-3  # the optimizer begins anew


def convert_job(source: str) -> None:
    import sys

    from deepspeed.checkpoint import ds_to_universal  # as it is: the experts are in order

    sys.argv = ["ds_to_universal", "--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    sys.argv += ["--input_folder", source, "--output_folder", f"{source}_universal"]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def placing_job(directory: str) -> tuple[list[float], Any]:
    start()
    engine = built("mixtral", 1, 2, 1, {}, **BY_HAND)
    models.train(engine, range(3))
    models.scatter_experts(engine, 1)
    engine.save_checkpoint(directory, tag="three")
    return models.train(engine, range(3, 6)), engine.rebalancer.placements()


def universal_job(directory: str, ep: int) -> tuple[list[float], Any]:
    start()
    engine = built("mixtral", 1, ep, 1, {}, **BY_HAND, checkpoint={"load_universal": True})
    if ep > 1:
        models.scatter_experts(engine, 2)
    engine.load_checkpoint(directory, tag="three_universal")
    placements = engine.rebalancer.placements() if engine.rebalancer else None
    return models.train(engine, range(3, 6)), placements


def test_universal_checkpoints_into_another_expert_parallel_size(tmp_path: Path) -> None:
    saved = run_ranks(placing_job, 2, str(tmp_path))
    run_ranks(convert_job, 1, str(tmp_path / "three"))
    same = run_ranks(universal_job, 2, str(tmp_path), 2)
    assert same == saved  # placements too
    alone = run_ranks(universal_job, 2, str(tmp_path), 1)
    for rank, wanted in zip(alone, saved, strict=True):
        torch.testing.assert_close(rank[0], wanted[0], rtol=1e-5, atol=1e-5)


def failing_save_job(directory: str) -> tuple[list[float], list[float]]:
    """The disk is full."""
    start()
    losses = []
    for _ in range(2):
        engine = built("mixtral", 1, 2, 1, {}, **BY_HAND)
        models.train(engine, range(2))
        models.scatter_experts(engine, 1)
        if not losses:
            engine._save_moe_checkpoint = None  # not callable
            with pytest.raises(TypeError):
                engine.save_checkpoint(directory)
        losses.append(models.train(engine, range(2, 4)))
    return losses[0], losses[1]


def test_training_goes_on_after_a_save_that_failed(tmp_path: Path) -> None:
    for with_failure, without in run_ranks(failing_save_job, 2, str(tmp_path)):
        assert with_failure == without


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "zero 3": (
        "mixtral",
        {},
        {"zero_optimization": {"stage": 3}},
        "paceline.moe is there and zero_optimization.stage is 3",
    ),
    "offload": (
        "mixtral",
        {},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        "paceline.moe is there and zero_optimization.offload_optimizer.device is",
    ),
    "async split plan": (
        "mixtral",
        {},
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "async_split_plan": True}},
        "model.layers.0.mlp is set to async_split_plan",
    ),
    "no experts": ("mixtral", {}, {"expert_parallel": {"enabled": False}}, "the model has no expert layer"),
    "copies": (
        NATIVE,
        {},
        {"paceline": {"moe": {"replicas": 1}}},
        "layers.0 is a deepspeed.moe.layer.MoE: each of its experts computes its whole capacity",
    ),
}


def refusal_job() -> dict[str, Any]:
    start()
    messages = {}
    for name, (family, layer, changes, _) in REFUSED.items():
        try:
            built(family, 1, 2, 1, layer, **(BY_HAND | changes))
        except ValueError as refused:
            messages[name] = str(refused)
    engine = built("mixtral", 1, 1, 1, {}, **BY_HAND)
    losses = models.train(engine, range(2))
    try:
        engine.place_experts({})
    except ValueError as refused:
        messages["one rank"] = str(refused)
    engine = built("mixtral", 1, 2, 1, {}, **BY_HAND)
    layer = engine.expert_layers["model.layers.0.mlp"]
    on_first = torch.distributed.get_rank() == 0
    swapped = placement([[0, 1, 2, 4], [3, 5, 6, 7]])
    wrong = {
        "a layer": {"model.layers.7.mlp": layer.placement},
        "a placement": {layer.name: placement([[0, 1], [2]])},
        "no placement": {layer.name: [[0, 1], [2]]},
        "on one rank": {layer.name: placement([[0, 1], [2]])} if on_first else {},
        "other on one rank": {layer.name: swapped} if on_first else {layer.name: layer.placement},
    }
    for name, placements in wrong.items():
        try:
            engine.place_experts(placements)
        except ValueError as refused:
            messages[name] = str(refused)
    import paceline

    config = models.ds_config(1, 2, **BY_HAND)
    ours = paceline.initialize(
        model=(model := models.build("mixtral")), model_parameters=model.parameters(), config=config
    )
    return {"messages": messages, "losses": losses, "engine": type(ours[0]).__name__}


def placement(devices: list[list[int]]) -> Any:
    from paceline.planning.experts import Placement

    return Placement(tuple(map(tuple, devices)))


def test_what_is_refused() -> None:
    for rank in run_ranks(refusal_job, 2):
        messages = rank["messages"]
        for name, (*_, message) in REFUSED.items():
            assert message in messages[name]
        assert messages["one rank"].startswith("experts cannot be placed: the expert-parallel size is 1")
        assert messages["a layer"].startswith("there is no expert layer 'model.layers.7.mlp' here: name one of")
        assert messages["a placement"].startswith("model.layers.0.mlp has 8 experts on 2 ranks, the placement 3 on 2")
        assert messages["no placement"].startswith("model.layers.0.mlp is to have [[0, 1], [2]], which is no Placement")
        assert messages["on one rank"] == messages["a placement"]
        assert messages["other on one rank"].startswith("rank 1 asks for another placement of model.layers.0.mlp than")
        assert len(rank["losses"]) == 2
        assert rank["engine"] == "PlainEngine"


def full_disk_job(directory: str) -> None:
    start()
    engine = built("mixtral", 1, 2, 1, {}, **BY_HAND)
    models.train(engine, range(2))
    models.scatter_experts(engine, 1)
    if torch.distributed.get_rank() == 0:
        engine.checkpoint_engine.save = full_disk
    engine.save_checkpoint(directory)


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError("the disk is full")


def test_a_rank_that_cannot_save_stops_the_others(tmp_path: Path) -> None:
    """It does not wait for them to move experts, while they wait for it in DeepSpeed."""
    with pytest.raises(RankError, match="rank 0 of 2 raised OSError: the disk is full"):
        run_ranks(full_disk_job, 2, str(tmp_path))


def dying_job(directory: str) -> None:
    """Saves, trains on, and loses a rank while experts move."""
    from paceline.moe import moving

    start()
    engine = built("mixtral", 1, 2, 1, {}, **BY_HAND)
    models.train(engine, range(3))
    models.scatter_experts(engine, 1)
    engine.save_checkpoint(directory, tag="three")
    rank = torch.distributed.get_rank()
    torch.save(models.train(engine, range(3, 6)), Path(directory, f"losses_{rank}.pt"))
    if rank == 1:
        moving.carry_out = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    models.scatter_experts(engine, 2)


def test_a_rank_that_dies_while_experts_move_leaves_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(dying_job, 2, str(tmp_path))
    for rank, found in enumerate(run_ranks(loading_job, 2, str(tmp_path), "mixtral", 1, 2)):
        assert found["losses"] == torch.load(tmp_path / f"losses_{rank}.pt")
