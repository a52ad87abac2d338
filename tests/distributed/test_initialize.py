"""``paceline.initialize`` as people with their own loop use it: every kind of model, DeepSpeed's arguments, its API."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lab.hosts import Hosts, available, enter
from support.jobs import LAYERS, ds_config, model_config, step_batches
from support.ranks import RankError, as_if_by_mpirun, run_ranks


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def stock_data(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randn(2, 2, 8, generator=generator)) for _ in range(4)]


def train_stock_module(stages: int, clipping: float) -> dict[str, Any]:
    """A hand-written PipelineModule, run by our engine."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    import paceline
    from paceline.runtime.engine import PacelineEngine
    from paceline.runtime.initialize import start_distributed

    start_distributed()
    model = PipelineModule(
        [LayerSpec(Block, seed) for seed in range(4)],
        num_stages=stages,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    engine, *_ = paceline.initialize(model=model, config=ds_config(gradient_clipping=clipping))
    assert type(engine) is PacelineEngine
    losses, norms = [], []
    for step in range(5):
        losses.append(engine.train_batch(iter(stock_data(step))).item())
        norms.append(engine.grad_norm())
    return {"losses": losses, "norms": norms}


def test_stock_pipeline_module_is_clipped_by_the_whole_norm() -> None:
    model = nn.Sequential(*(Block(seed) for seed in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses, norms = [], []
    for step in range(5):
        total = 0.0
        for x, y in stock_data(step):
            loss = nn.functional.mse_loss(model(x), y) / 4
            loss.backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    ranks = run_ranks(train_stock_module, 2, 2, 0.1)
    assert min(norms) > 0.1
    assert ranks[0]["losses"] == pytest.approx(losses, rel=1e-6)
    assert ranks[0]["norms"] == ranks[1]["norms"] == pytest.approx(norms, rel=1e-6)


def outlives_a_monitor(folder: str) -> list[bool]:
    import paceline

    monitor = {"enabled": True, "output_path": folder, "job_name": "run"}
    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(1, csv_monitor=monitor))
    is_there = []
    for step in range(2):
        engine.train_batch(iter(step_batches(step)))
        is_there.append(Path(folder, "run").exists())
        shutil.rmtree(folder, ignore_errors=True)
    return is_there


def test_a_monitor_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    assert run_ranks(outlives_a_monitor, 1, str(tmp_path / "monitor")) == [[True, False]]


def plain_module() -> str:
    import paceline

    optimizer = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}  # DeepSpeed's own would be compiled
    engine, *_ = paceline.initialize(model=Block(0), config=ds_config(optimizer=optimizer))
    x, y = stock_data(0)[0]
    engine.backward(nn.functional.mse_loss(engine(x), y))
    engine.step()
    return type(engine).__name__


def test_any_other_module_goes_to_deepspeed() -> None:
    assert run_ranks(plain_module, 1) == ["DeepSpeedEngine"]


def hugging_face_model_without_section() -> str:
    from transformers import AutoModelForCausalLM

    import paceline

    optimizer = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}  # DeepSpeed's own would be compiled
    model = AutoModelForCausalLM.from_config(model_config())
    engine, *_ = paceline.initialize(model=model, config=ds_config(optimizer=optimizer))
    return type(engine).__name__


def test_a_part_that_is_absent_is_off() -> None:
    assert run_ranks(hugging_face_model_without_section, 1) == ["DeepSpeedEngine"]


def with_training_data(stages: int) -> list[float]:
    """The data set given to initialize, batches made by transformers' own collator."""
    from transformers import default_data_collator

    import paceline

    samples = [
        {"input_ids": ids, "labels": ids}
        for batch in (step_batches(0, "plain") + step_batches(1, "plain"))
        for ids in batch["input_ids"]
    ]
    engine, _, loader, _ = paceline.initialize(
        model=model_config(), config=ds_config(stages), training_data=samples, collate_fn=default_data_collator
    )
    assert loader is not None or not (engine.is_first_stage() or engine.is_last_stage())
    return [engine.train_batch().item() for _ in range(5)]


def test_training_data_and_collator() -> None:
    ranks = run_ranks(with_training_data, 2, 2)
    whole = run_ranks(with_training_data, 1, 1)[0]
    assert ranks[0] == ranks[1] == pytest.approx(whole, rel=1e-6)  # a tied weight's gradients are added in other orders
    assert ranks[0][4] < ranks[0][0]  # the fifth step has the samples of the first again


def collected_in_a_step() -> list[bool]:
    """Whether the collector may come in the forwards of a step, and whether it may after the step."""
    import gc

    import paceline

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(1))
    seen: list[bool] = []
    engine.module.stage.model.lm_head.register_forward_hook(lambda *_: seen.append(gc.isenabled()))
    engine.train_batch(iter(step_batches(0)))
    return [any(seen), not seen, gc.isenabled()]


def test_garbage_is_collected_between_steps() -> None:
    """A pause of one rank within a step would hold up the others in turn."""
    assert run_ranks(collected_in_a_step, 1) == [[False, False, True]]


def client_optimizer(stages: int, groups: str) -> tuple[list[float], list[float]]:
    """An optimizer and a schedule of one's own; groups of parameters as recipes make them."""
    import paceline
    from paceline.runtime.module import CausalLMPipeline

    paceline.runtime.initialize.start_distributed()
    model = CausalLMPipeline(
        model_config(), num_stages=stages, partition=[0, 1, 6] if groups == "uneven" else "uniform"
    )
    named = list(model.named_parameters())
    parameters: list[Any] = [p for _, p in named]
    if groups != "one":
        parameters = [
            {"params": [p for name, p in named if "norm" not in name]},
            {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
        ]
    config = ds_config(stages)
    del config["optimizer"]
    engine, *_ = paceline.initialize(
        model=model,
        model_parameters=parameters,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        config=config | {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
    )
    rates, losses = [], []
    for step in range(3):
        rates.append(engine.get_lr()[0])
        losses.append(engine.train_batch(iter(step_batches(step))).item())
    return rates, losses


def test_own_optimizer_and_schedule() -> None:
    assert [rates for rates, _ in run_ranks(client_optimizer, 2, 2, "two")] == [[1e-2, 5e-3, 2.5e-3]] * 2


def torchs_schedules(stages: int) -> list[Any]:
    import paceline

    found: list[Any] = []
    right = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    for schedule in (right, {"type": "ReduceLROnPlateau"}, {"type": "StepLR"}):
        try:
            engine, *_ = paceline.initialize(model=model_config(), config=ds_config(stages, scheduler=schedule))
        except ValueError as error:
            found.append(str(error))
            continue
        for step in range(2):
            found.append(engine.get_lr())
            engine.train_batch(iter(step_batches(step)))
    return found


def test_a_schedule_of_torchs_in_the_json() -> None:
    for *rates, refusal, incomplete in run_ranks(torchs_schedules, 2, 2):
        assert rates == [[1e-3], [5e-4]]
        assert "a ReduceLROnPlateau, which follows a metric" in refusal
        assert re.search("scheduler StepLR with params {}: .*'step_size'; correct scheduler.params", incomplete)


def test_stages_may_have_different_numbers_of_groups() -> None:
    """Stage 0 holds the embedding alone and has no norm: stock DeepSpeed hangs at the first step under ZeRO-1."""
    assert run_ranks(client_optimizer, 2, 2, "uneven") == run_ranks(client_optimizer, 2, 2, "two")


def frozen_model(optimizer: str) -> None:
    import paceline
    from paceline.runtime.module import CausalLMPipeline

    paceline.runtime.initialize.start_distributed()
    model = CausalLMPipeline(model_config(), num_stages=2)
    model.requires_grad_(False)
    own = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)} if optimizer == "own" else {}
    paceline.initialize(model=model, config=ds_config(2), **own)


@pytest.mark.parametrize("optimizer", ["json", "own"])
def test_a_frozen_model_is_refused_on_every_rank(optimizer: str) -> None:
    with pytest.raises(RankError, match="no stage has a trainable parameter: set requires_grad"):
        run_ranks(frozen_model, 2, optimizer)


def shared_weights(stages: int) -> float:
    from transformers import AutoModelForCausalLM

    import paceline

    model = AutoModelForCausalLM.from_config(model_config())
    model.model.layers[3].mlp = model.model.layers[0].mlp
    engine, *_ = paceline.initialize(model=model, config=ds_config(stages))
    return float(engine.train_batch(iter(step_batches(0))))


def test_weights_that_stages_would_share_are_refused() -> None:
    """Each stage would train its own."""
    told = "layers.3.mlp.gate_proj.weight is the same parameter as model.layers.0.mlp.gate_proj.weight, which stages ca"
    with pytest.raises(RankError, match=told):
        run_ranks(shared_weights, 2, 2)
    assert 0 < run_ranks(shared_weights, 1, 1)[0] < 10, "one stage has them once"


def evaluated(stages: int) -> dict[str, Any]:
    import paceline

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(stages))
    before = engine.eval_batch(iter(step_batches(0)), num_micro_batches=6).item()
    loss, logits = engine.eval_batch(iter(step_batches(1)), return_logits=True)
    trained = engine.train_batch(iter(step_batches(2))).item()
    after = engine.evaluate(iter(step_batches(0)[:6]))
    return {
        "before": before,
        "loss": loss.item(),
        "logits": None if logits is None else logits.shape,
        "trained": trained,
        "after": after,
    }


def test_eval_batch_is_deepspeeds_with_token_weights() -> None:
    whole = run_ranks(evaluated, 1, 1)[0]
    ranks = run_ranks(evaluated, 3, 3)
    for rank in ranks:
        assert rank["after"] == pytest.approx(whole["after"], rel=1e-6)  # tied weights: gradients add in other orders
        for name in ("before", "loss", "trained"):
            assert rank[name] == pytest.approx(whole[name], rel=1e-6), name
    assert ranks[2]["logits"] == whole["logits"] == torch.Size([2, 16, 97])
    assert whole["after"]["eval_loss"] < whole["before"]


def evaluated_unevenly(stages: int, batches_of_replica: list[int]) -> dict[str, float]:
    import paceline

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(stages))
    replica = engine.grid.data_parallel_id
    start = sum(batches_of_replica[:replica])
    return engine.evaluate(step_batches(0)[start : start + batches_of_replica[replica]])


def test_replicas_may_have_different_numbers_of_batches_to_evaluate_also_none() -> None:
    """Five and none: in the second round of four, and in the first on one replica, there is nothing to do."""
    wanted = run_ranks(evaluated_unevenly, 1, 1, [5])[0]
    for rank in run_ranks(evaluated_unevenly, 4, 2, [5, 0]):
        assert rank == pytest.approx(wanted, rel=1e-6)


def built_first(stages: int, asked: int) -> tuple[int, float]:
    """A pipeline that is built already: the config is completed for it, or refused."""
    import paceline

    paceline.runtime.initialize.start_distributed()
    model = paceline.CausalLMPipeline(model_config(), num_stages=stages)
    config = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "train_batch_size": 8, "steps_per_print": None}
    config["paceline"] = {"pipeline": {"stages": asked}}
    engine, *_ = paceline.initialize(model=model, config=config)
    return engine.micro_batches, engine.train_batch(iter(step_batches(0))).item()


def test_a_pipeline_that_is_built_already() -> None:
    (batches, loss), _ = run_ranks(built_first, 2, 2, 2)
    assert batches == 8
    assert loss > 0
    with pytest.raises(RankError, match="stages is 1 and the pipeline was built with 2 stages: leave the key out"):
        run_ranks(built_first, 2, 2, 1)


def with_timers(stages: int, zero: int) -> list[float]:
    import paceline

    config = ds_config(stages, wall_clock_breakdown=True, steps_per_print=1, zero_optimization={"stage": zero})
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    return [engine.train_batch(iter(step_batches(step))).item() for step in range(2)]


@pytest.mark.parametrize("zero", [0, 1])
def test_wall_clock_breakdown(zero: int) -> None:
    """Stock DeepSpeed 0.19.8 stops at the second backward: nothing stops the timers on stages before the last."""
    ranks = run_ranks(with_timers, 2, 2, zero)
    assert ranks[0] == ranks[1]


def saved_and_loaded(folder: str, stages: int) -> list[list[float]]:
    """DeepSpeed's own checkpoints of the same shape."""
    import paceline

    def start() -> Any:
        return paceline.initialize(model=model_config(), config=ds_config(stages))[0]

    engine = start()
    engine.train_batch(iter(step_batches(0)))
    engine.save_checkpoint(folder)
    straight = [engine.train_batch(iter(step_batches(step))).item() for step in (1, 2)]
    again = start()
    again.load_checkpoint(folder)
    return [straight, [again.train_batch(iter(step_batches(step))).item() for step in (1, 2)]]


def test_deepspeed_checkpoint_of_the_same_shape(tmp_path: Path) -> None:
    for straight, resumed in run_ranks(saved_and_loaded, 2, str(tmp_path), 2):
        assert straight == resumed


def half_precision(stages: int) -> list[float]:
    import paceline

    engine, *_ = paceline.initialize(
        model=model_config(), config=ds_config(stages, fp16={"enabled": True, "initial_scale_power": 8})
    )
    return [engine.train_batch(iter(step_batches(step))).item() for step in range(10)]


def test_fp16() -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed has no fp16 on this accelerator: runs on GPUs")
    wanted = run_ranks(half_precision, 1, 1)[0]
    got = run_ranks(half_precision, 2, 2)[0]
    assert got == pytest.approx(wanted, rel=2e-3)


def bad_config(kind: str) -> str:
    import paceline

    configs: dict[str, Any] = {
        "nothing": None,
        "auto": ds_config(1, gradient_clipping="auto"),
        "unknown": ds_config(1) | {"paceline": {"pipelines": {}}},
        "layers": ds_config(int(os.environ["WORLD_SIZE"])),
        "half": ds_config(1, fp16={"enabled": True}),
        "monitor": ds_config(1, comet={"enabled": True}),
        "module": ds_config(2),
    }
    model = torch.nn.Linear(1, 1) if kind == "module" else model_config(num_hidden_layers=1)
    if os.environ["RANK"] == "0":
        sys.modules["comet_ml"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        paceline.initialize(model=model, config=configs[kind])
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "no DeepSpeed config: pass config=PATH or a dict"),
        ("auto", 'gradient_clipping is "auto" and there is no command line to fill it from'),
        ("unknown", "paceline.pipelines"),
        ("layers", "the model has 1 decoder layers"),
        ("monitor", "comet.enabled is true, and its package is not installed: pip install comet_ml, or leave it out."),
        ("module", "the model is a Linear, and a pipeline is cut from a model of transformers (a PreTrainedModel)"),
        ("half", "fp16.enabled (--fp16) is true, and DeepSpeed has no fp16 on this device (cpu): take bf16"),
    ],
)
def test_bad_configs_are_the_same_error_everywhere(kind: str, message: str) -> None:
    from deepspeed.accelerator import get_accelerator

    if kind == "half" and get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed has fp16 on this accelerator: runs on CPUs")
    ranks = run_ranks(bad_config, 2, kind)
    assert ranks[0] == ranks[1]
    assert message in ranks[0]


def plain_loop() -> list[str]:
    from deepspeed.runtime.pipe.module import PipelineError

    import paceline

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(1))
    told = []
    for call in (engine, engine.backward, engine.step):
        try:
            call()
        except PipelineError as error:
            told.append(str(error))
    return told


def test_a_plain_loop_is_told_of_train_batch() -> None:
    [told] = run_ranks(plain_loop, 1)
    assert len(told) == 3
    assert all("call engine.train_batch(iterator)" in text for text in told)


def started_by_mpirun() -> list[float]:
    import paceline

    as_if_by_mpirun()
    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(paceline={"pipeline": {"stages": 2}}))
    return [engine.global_rank, engine.train_batch(iter(step_batches(0))).item()]


def test_ranks_that_mpirun_has_started_meet_by_its_variables() -> None:
    (first, loss), (second, other_loss) = run_ranks(started_by_mpirun, 2)
    assert (first, second) == (0, 1)
    assert loss == other_loss


def start_on_host(hosts: list[str], address: str) -> None:
    """As the only rank of one of these hosts, whose name leads to the loopback."""
    from paceline.runtime.initialize import start_distributed

    enter(hosts[int(os.environ["RANK"])])
    os.environ.update(MASTER_ADDR=address, GLOO_SOCKET_IFNAME="lo")
    start_distributed()


@pytest.mark.skipif(bool(available()), reason=available())
def test_ranks_that_meet_and_do_not_reach_each_other_are_told_the_remedy() -> None:
    """Gloo alone says that a connection to 127.0.0.1 was refused."""
    told = r"do not reach each other: .*set GLOO_SOCKET_IFNAME .*Gloo's words: .*connectFullMesh"
    with Hosts(2) as hosts, pytest.raises(RankError, match=told):
        run_ranks(start_on_host, 2, hosts.namespaces, hosts.addresses[0])


assert LAYERS == 4, "the explicit partitions above cut four layers"


def start_in_vain(is_taken: bool) -> None:
    """Where another program listens at the port, or as one of two ranks."""
    from paceline.runtime.initialize import start_distributed

    with socket.socket() as other:
        if is_taken:
            other.bind(("", int(os.environ["MASTER_PORT"])))
            other.listen()
        else:
            os.environ["WORLD_SIZE"] = "2"
        start_distributed(timeout=timedelta(seconds=1))


@pytest.mark.parametrize(
    ("is_taken", "told"),
    [
        (True, r"MASTER_PORT is \d+, which another program .*: choose another .*--master_port .*words: .* in use"),
        (False, r"rank 0 has not met the others of 2 ranks at 127.0.0.1:\d+: start all of them, .*words: Timed out"),
    ],
    ids=["port", "rank"],
)
def test_ranks_that_do_not_meet_are_told_the_remedy(is_taken: bool, told: str) -> None:
    with pytest.raises(RankError, match=told):
        run_ranks(start_in_vain, 1, is_taken)
