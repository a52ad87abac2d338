"""What pipelines written by hand, optimizers of users, and unusual settings do to optimizer and checkpoints."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.jobs import ds_config
from support.ranks import RankError, run_ranks

WIDTH, MICRO_BATCHES = 8, 4


class Two(nn.Module):
    """Passes a pair on; its weight is behind both outputs."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), last

    def forward(self, pair: Any) -> Any:
        a, b = pair if isinstance(pair, tuple) else (pair, pair)
        a, b = a + torch.tanh(self.linear(a)), b - self.linear(b)
        return a * b if self.last else (a, b)


class Tied(nn.Module):
    """A tied weight, and a bias that each copy has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Experts(nn.Module):
    """DeepSpeed's own MoE layer, an expert on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)[0]


def module(kind: str = "plain", stages: int = 1) -> Any:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    deepspeed.init_distributed()
    layers = {
        "plain": [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)],
        "experts": [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Experts)],
        "pairs": [*(LayerSpec(Two) for _ in range(3)), LayerSpec(Two, last=True)],
        "tied": [TiedLayerSpec("t", Tied), LayerSpec(nn.Linear, WIDTH, WIDTH), TiedLayerSpec("t", Tied)],
    }[kind]
    return PipelineModule(
        layers=layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=True
    )


def config(zero: int = 0, stages: int = 1, **changes: Any) -> dict[str, Any]:
    replicas = int(os.environ["WORLD_SIZE"]) // stages
    return ds_config(
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        zero_optimization={"stage": zero},
        **{"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}, **changes},
    )


def train(engine: Any, first: int, last: int, scale: float = 1.0) -> list[float]:
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, MICRO_BATCHES, 2, WIDTH, generator=generator) * scale
        batches = list(zip(x, y, strict=True))[replica::replicas]
        losses.append(engine.train_batch(iter(batches)).item())
    return losses


def pairs(stages: int, zero: int) -> list[float]:
    import paceline

    engine, *_ = paceline.initialize(model=module("pairs", stages), config=config(zero, stages))
    return train(engine, 0, 4)


def test_stages_that_pass_pairs() -> None:
    """Stock's backward goes through a weight once for each tensor of a pair: it is not finished the first time."""
    wanted = run_ranks(pairs, 1, 1, 0)[0]
    for zero in (0, 1):
        assert run_ranks(pairs, 4, 2, zero)[0] == pytest.approx(wanted, rel=1e-5)


def operations(operation: str, ours: bool) -> list[float]:
    import deepspeed

    import paceline

    initialize = paceline.initialize if ours else deepspeed.initialize
    built = module()
    settings = config(gradient_allreduce_op=operation)
    engine, *_ = initialize(model=built, model_parameters=list(built.parameters()), config=settings)
    return train(engine, 0, 3)


def test_replicas_average_or_add() -> None:
    mean, total = (run_ranks(operations, 2, operation, True)[0] for operation in ("mean", "sum"))
    assert mean != total
    assert total == pytest.approx(run_ranks(operations, 2, "sum", False)[0], rel=1e-6)


def rates(root: str, resume: bool) -> list[float]:
    """Each stage has a learning rate of its own."""
    import paceline

    built = module(stages=2)
    rate = [0.1, 1e-3][built.stage_id]
    engine, *_ = paceline.initialize(
        model=built,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        config={key: value for key, value in config(stages=2).items() if key != "optimizer"},
    )
    if resume:
        engine.load_checkpoint(root)
    else:
        train(engine, 0, 2)
        engine.save_checkpoint(root)
    train(engine, 2, 4)
    return engine.get_lr()


def test_each_stage_keeps_its_learning_rate(tmp_path: Path) -> None:
    wanted = run_ranks(rates, 2, str(tmp_path), False)
    assert wanted == [[0.1 / 16], [1e-3 / 16]]
    assert run_ranks(rates, 2, str(tmp_path), True) == wanted


def own_biases(root: str, resume: bool) -> tuple[list[float], list[float]]:
    import paceline

    engine, *_ = paceline.initialize(model=module("tied", 2), config=config(stages=2))
    if resume:
        engine.load_checkpoint(root)
    else:
        train(engine, 0, 3)
        engine.save_checkpoint(root)
    bias = next(p for name, p in engine.module.named_parameters() if name.endswith("t.bias"))
    return bias.tolist(), train(engine, 3, 5)


def test_what_a_tied_module_has_beside_its_weight(tmp_path: Path) -> None:
    wanted = run_ranks(own_biases, 2, str(tmp_path), False)
    assert wanted[0][0] != wanted[1][0]
    assert run_ranks(own_biases, 2, str(tmp_path), True) == wanted


def full_access() -> dict[str, Any]:
    """DeepSpeed's own way to look at, and to change, what is sharded."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    import paceline

    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, *_ = paceline.initialize(model=module(), config=config(1, optimizer=adam, bf16={"enabled": True}))
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    x = torch.randn(2, MICRO_BATCHES, 2, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    engine.train_batch(iter(list(zip(*x, strict=True))[replica::replicas]))
    found = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter)
        assert torch.equal(full.bfloat16(), parameter.detach()), name
        found[name] = (full, safe_get_full_optimizer_state(parameter, "exp_avg"))
        safe_set_full_fp32_param(parameter, full + 1)
        safe_set_full_optimizer_state(parameter, torch.zeros_like(full), "exp_avg")
        assert torch.equal(parameter.detach(), (full + 1).bfloat16()), name
        assert safe_get_full_optimizer_state(parameter, "exp_avg").count_nonzero() == 0
    return found


def test_full_parameters_and_states_can_be_read_and_set() -> None:
    one, other = run_ranks(full_access, 2)
    for name, (full, moment) in one.items():
        assert torch.equal(full, other[name][0])
        assert torch.equal(moment, other[name][1])
        assert moment.count_nonzero() > 0


def mishaps(root: str) -> dict[str, str]:
    """A save that one rank cannot make, a failed one in the background, and that neither harms the next."""
    import paceline
    from paceline.checkpoint import writer

    said = {}
    engine, *_ = paceline.initialize(model=module(), config=config(1))
    train(engine, 0, 1)
    try:
        engine.save_checkpoint(root, tag="no", client_state={"x": object()} if engine.global_rank == 0 else {})
    except ValueError as error:
        said["unsavable"] = str(error)
    try:
        engine.save_checkpoint(root, tag=f"rank{engine.global_rank}")
    except ValueError as error:
        said["names"] = str(error)
    engine.save_checkpoint(root, tag="good")

    def write_files(draft: Path) -> None:
        (draft / "no such folder" / "file").write_text("")

    def wait_until_published(save: Any) -> None:
        time.sleep(1)
        notice(save)

    notice, writer.wait_until_published = writer.wait_until_published, wait_until_published  # rank 1 is slow to notice
    engine.save_checkpoint(root, tag="bad", wait=False, files=write_files)
    try:
        for step in count(1):  # a disk may take as long as many steps
            train(engine, step, step + 1)
    except ValueError as error:
        said["background"] = str(error)
    engine.save_checkpoint(root, tag="again")
    engine.save_checkpoint(root, tag="unfinished", wait=False)
    engine.destroy()  # finishes it
    return said


def test_a_mishap_does_not_harm_the_next_save(tmp_path: Path) -> None:
    for said in run_ranks(mishaps, 2, str(tmp_path)):
        assert "client_state" in said["unsavable"]
        assert "different names" in said["names"]
        assert "bad was not saved" in said["background"]
    from paceline.checkpoint import complete_checkpoints

    assert [path.name for path in complete_checkpoints(tmp_path)] == ["good", "again", "unfinished"]


def elsewhere(root: str) -> None:
    import paceline

    engine, *_ = paceline.initialize(model=module(), config=config())
    engine.save_checkpoint(root)
    engine.load_checkpoint(root if engine.global_rank == 0 else root + "/not shared")


def test_a_folder_that_is_not_shared_hangs_nobody(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"not shared.*is no checkpoint"):
        run_ranks(elsewhere, 2, str(tmp_path))


def without_the_frozen(root: str) -> dict[str, Any]:
    import paceline

    def frozen() -> Any:
        built = module()
        next(built.parameters()).requires_grad_(False)
        return built

    engine, *_ = paceline.initialize(model=frozen(), config=config())
    train(engine, 0, 2)
    engine.save_checkpoint(root, exclude_frozen_parameters=True)
    wanted = train(engine, 2, 4)
    again, *_ = paceline.initialize(model=frozen(), config=config())
    again.load_checkpoint(root)
    other = {"type": "AdamW", "params": {"lr": 1e-3}}
    changed, *_ = paceline.initialize(model=frozen(), config=config(optimizer=other))
    changed.load_checkpoint(root)
    no_optimizer = {key: value for key, value in config().items() if key != "optimizer"}
    evaluated, *_ = paceline.initialize(model=frozen(), config=no_optimizer)
    evaluated.load_checkpoint(root)
    weights = [dict(e.module.named_parameters())["3.weight"].detach().clone() for e in (again, changed, evaluated)]
    return {"wanted": wanted, "found": train(again, 2, 4), "weights": weights, "adam": train(changed, 2, 3)}


def test_other_uses_of_a_checkpoint(tmp_path: Path) -> None:
    """Without frozen weights; with another optimizer, whose states start anew; without any."""
    (found,) = run_ranks(without_the_frozen, 1, str(tmp_path))
    assert found["found"] == found["wanted"]
    assert all(torch.equal(weight, found["weights"][0]) for weight in found["weights"])
    assert found["adam"] == found["wanted"][:1]


def explode() -> str:
    import paceline

    engine, *_ = paceline.initialize(model=module(), config=config())
    try:
        train(engine, 0, 60, scale=float("nan"))
    except FloatingPointError as error:
        return f"{engine.skipped_steps}: {error}"
    return "went on"


def test_gradients_that_are_never_finite_end_training() -> None:
    assert run_ranks(explode, 1)[0].startswith("49: a gradient is not finite: the step is skipped, for the 50th time")


def refused(what: str) -> None:
    import paceline

    if what == "experts":
        paceline.initialize(model=module("experts"), config=config())
    built = module(stages=2)
    if what == "outsider":
        own = [*built.parameters(), *([nn.Parameter(torch.zeros(3))] if built.stage_id == 1 else [])]
        paceline.initialize(model=built, optimizer=torch.optim.SGD(own, lr=0.1), config=config(stages=2))
    else:
        paceline.initialize(model=built, config=config(stages=2, optimizer={"type": what, "params": {"lr": 0.1}}))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("experts", "the module has experts on different ranks"),
        (
            "outsider",
            r"the optimizer has a parameter of shape \[3\] that is not in the module, .* SGD was made for: pass a "
            r"function of the stage's parameters \(optimizer=lambda parameters: .*, or name one under \"optimizer\"",
        ),
        ("Lion", "optimizer.type is lion: DeepSpeed has its kernels for GPUs only, .* CPUs; choose one of .*AdamW"),
        ("LBFGS", "a pipeline cannot use it, it evaluates the loss again"),
        ("Muon", "a pipeline cannot use it, it is for matrices only"),
    ],
)
def test_refused_on_every_rank(what: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(refused, 2, what)
