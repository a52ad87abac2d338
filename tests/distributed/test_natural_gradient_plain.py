"""Natural gradients of the JSON where there is no pipeline: every ZeRO stage, as they are made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoint import CheckpointError
from support.jobs import flags, model_config, step_batches
from support.natural import (
    ANY_OPTIMIZER,
    AUTOCAST,
    FAST,
    LAYERS,
    LIMITED,
    NO_SUCH_LAYERS,
    OPTIONS,
    SGD,
    allow_fp16,
    assert_close,
    assert_is_limited,
    assert_limited,
    learned,
    same,
    size,
)
from support.ranks import TESTS, run_ranks

ACCUMULATION, STEPS = 2, 3
ALL_OF_IT = {"stage3_param_persistence_threshold": 0}
"""Every parameter lies in pieces on the ranks."""


def model_of(family: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        model_config(family, num_hidden_layers=LAYERS, tie_word_embeddings=family == "gpt2")
    )


def batch_of(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    batch = step_batches(ACCUMULATION * step + micro, "full")[rank]
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def engine_of(family: str, zero: int, options: Mapping[str, Any] | None = OPTIONS, **changes: Any) -> Any:
    import deepspeed

    import paceline

    patched = changes.pop("patched", False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.0,
        "optimizer": SGD,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero, **(ALL_OF_IT if zero == 3 else {})},
        "steps_per_print": None,
        "paceline": {} if options is None else {"natural_gradient": options},
        **changes,
    }
    if patched:  # as paceline.launch.patched does it
        paceline.repair_deepspeed()
        deepspeed.init_distributed()
    initialize = deepspeed.initialize if patched else paceline.initialize
    model = model_of(family)
    return initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def steps(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        for micro in range(ACCUMULATION):
            loss = engine(**batch_of(step, micro, engine.global_rank)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def values(engine: Any) -> dict[str, Tensor]:
    import deepspeed

    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().float().clone()
    return found


PLAIN: dict[str, dict[str, Any]] = {
    **{f"llama, ZeRO {zero}": {"family": "llama", "zero": zero} for zero in (0, 1)},
    "gpt2, ZeRO 3": {"family": "gpt2", "zero": 3},
    "mixtral, ZeRO 3": {"family": "mixtral", "zero": 3},
    "llama, patched": {"family": "llama", "zero": 2, "patched": True},
    "llama, clipped": {"family": "llama", "zero": 3, "gradient_clipping": 0.3},
}
HALF: dict[str, dict[str, Any]] = {
    "bf16, ZeRO 0": {"zero": 0, "bf16": {"enabled": True}},
    "fp16, ZeRO 0": {"zero": 0, "fp16": {"enabled": True, "initial_scale_power": 8}},
    "fp16, ZeRO 2": {"zero": 2, "fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast, ZeRO 3": {"zero": 3, **AUTOCAST},
    **{
        f"fp16 autocast, ZeRO {zero}": {"zero": zero, "torch_autocast": {"enabled": True, "dtype": "float16"}}
        for zero in (0, 2)
    },
}


def runs() -> dict[str, Any]:
    allow_fp16()
    found = {}
    for name, case in {**PLAIN, **{name: {"family": "llama", **case} for name, case in HALF.items()}}.items():
        engine = engine_of(**case)
        assert type(engine).__name__ == "PlainEngine", type(engine)
        found[name] = steps(engine, 0, STEPS), values(engine), learned(engine)
        engine.destroy()
    return found


def by_hand(family: str, clipping: float = 0.0) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses of two ranks."""
    from paceline.config.natural_gradient_keys import NaturalGradientConfig
    from paceline.optim.natural_layers import NaturalGradients

    models = [model_of(family) for _ in range(2)]
    for model in models:
        NaturalGradients(NaturalGradientConfig(**OPTIONS), lambda rows: float(ACCUMULATION * rows)).adopt(model)
        model.train()
    optimizer = torch.optim.SGD(models[0].parameters(), **SGD["params"])
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            for micro in range(ACCUMULATION):
                loss = model(**batch_of(step, micro, rank)).loss
                (loss / ACCUMULATION).backward()
                losses[rank].append(loss.item())
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            one.grad = (one.grad + other.grad) / 2
        if clipping:
            torch.nn.utils.clip_grad_norm_(models[0].parameters(), clipping)
        optimizer.step()
        for model in models:
            model.zero_grad()
            model.load_state_dict(models[0].state_dict())
    return losses, {name: p.detach() for name, p in models[0].named_parameters()}


def alone() -> dict[str, Any]:
    families = ("llama", "gpt2", "mixtral")
    return {**{family: by_hand(family) for family in families}, "clipped": by_hand("llama", 0.3)}


def test_engines_without_a_pipeline_are_as_by_hand() -> None:
    """In fp32; and what is computed in half precision follows."""
    ranks, wanted = run_ranks(runs, 2), run_ranks(alone, 1)[0]
    for name, case in PLAIN.items():
        losses, weights = wanted["clipped" if "clipped" in name else case["family"]]
        for rank, own in zip(ranks, losses, strict=True):
            assert rank[name][0] == pytest.approx(own, rel=1e-6), name
            assert_close(rank[name][1], weights, 1e-5)
        assert not same(ranks[0][name][2], ranks[1][name][2]), f"{name}: each has learned from its own data"
    for name in HALF:
        for rank, own in zip(ranks, wanted["llama"][0], strict=True):
            assert rank[name][0] == pytest.approx(own, rel=5e-3), name
            assert size(rank[name][2]) == pytest.approx(size(rank["llama, ZeRO 0"][2]), rel=0.1), name


ADAM_OF_TORCH = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}


def saves(root: str, zero: int) -> list[Any]:
    engine = engine_of("llama", zero, **ADAM_OF_TORCH)
    steps(engine, 0, 6)  # beyond the eleventh micro-batch
    engine.save_checkpoint(root)
    return [steps(engine, 6, 3), values(engine), learned(engine)]


def goes_on(root: str, zero: int, forget: bool = False) -> list[Any]:
    engine = engine_of("llama", zero, **ADAM_OF_TORCH)
    if forget:
        engine.natural_gradient.load = lambda states: None
    steps(engine, 20, 1)
    engine.load_checkpoint(root)
    found = [steps(engine, 6, 3), values(engine), learned(engine)]
    if forget:
        _damage_and_load(engine, Path(root))
    return found


def _damage_and_load(engine: Any, root: Path) -> None:
    """A file of one rank is damaged, and all are told."""
    (file,) = root.glob("*/paceline_rank_00001.pt")
    if engine.global_rank == 1:
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"rank_00001\.pt is damaged"):
        engine.load_checkpoint(str(root))


@pytest.mark.parametrize("zero", [0, 3])
def test_resuming_without_a_pipeline_is_bitwise(zero: int, tmp_path: Path) -> None:
    wanted = run_ranks(saves, 2, str(tmp_path), zero)
    found = run_ranks(goes_on, 2, str(tmp_path), zero)
    for (losses, weights, estimates), rank in zip(wanted, found, strict=True):
        assert rank[0] == losses
        assert same(rank[1], weights)
        assert same(rank[2], estimates)
    if zero == 0:
        assert run_ranks(goes_on, 2, str(tmp_path), zero, True)[0][0] != wanted[0][0]


def trainer_job(argv: list[str]) -> None:
    """The Trainer's script on this rank, started as ``paceline.launch.patched`` starts it."""
    from paceline.launch.patched import main

    assert main([str(TESTS / "support" / "trainer_job.py"), *argv]) == 0


def trainer_losses(folder: Path, options: Mapping[str, Any] | None) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "steps_per_print": None,
        "paceline": {} if options is None else {"natural_gradient": options},
    }
    (folder / "ds.json").write_text(json.dumps(config))
    run_ranks(trainer_job, 2, flags(deepspeed=folder / "ds.json", model=folder, steps=4, output=folder / "found.json"))
    losses: list[float] = json.loads((folder / "found.json").read_text())["losses"]
    return losses


def test_a_script_with_a_trainer(tmp_path: Path) -> None:
    """Unchanged: the JSON alone says it."""
    model_config(num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    ordinary, natural = trainer_losses(tmp_path, None), trainer_losses(tmp_path, OPTIONS)
    assert natural[0] == ordinary[0]
    assert natural != ordinary


def limited() -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    """Changes of the first steps, and what is reported of them."""
    engine = engine_of("llama", 2, LIMITED, optimizer=FAST)
    found = []
    for step in range(3):
        before = values(engine)
        steps(engine, step, 1)
        changes = {name: value - before[name] for name, value in values(engine).items()}
        found.append((changes, engine._max_change.report))
    return found


def test_with_max_change_updates_obey_the_limits() -> None:
    for (changes, report), (_, same_report) in zip(*run_ranks(limited, 2), strict=True):
        assert report == same_report
        assert_limited(changes, report)


def first_changes() -> dict[str, list[dict[str, Tensor]]]:
    """Of each optimizer's first step, without limits and with them, and without natural gradients."""
    found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in ANY_OPTIMIZER}
    for name, optimizer in ANY_OPTIMIZER.items():
        for section in ({}, {"max_change": {}}):
            engine = engine_of("llama", 2, None, optimizer=optimizer, paceline=section)
            before = values(engine)
            steps(engine, 0, 1)
            found[name].append({key: value - before[key] for key, value in values(engine).items()})
            engine.destroy()
    return found


def test_max_change_of_any_optimizer() -> None:
    for found in run_ranks(first_changes, 2):
        for free, limited in found.values():
            assert_is_limited(free, limited)


def refused() -> str:
    try:
        engine_of("llama", 3, {"layers": "nonsense", "max_change": {}})
    except ValueError as error:
        return str(error)
    return ""


def test_layers_that_are_not_there() -> None:
    assert run_ranks(refused, 2) == [NO_SUCH_LAYERS] * 2


def with_experts_elsewhere(moves: bool) -> tuple[list[float], list[str], dict[str, Any]]:
    """Experts on two ranks of DeepSpeed's, with ``"paceline": {"moe": …}``: before each step they change places."""
    import paceline
    from paceline.runtime.initialize import start_distributed
    from support import expert_models as models

    paceline.repair_deepspeed()
    start_distributed()
    section = {"moe": {"rebalance_every": 0}, "natural_gradient": OPTIONS}
    config = models.ds_config(1, 2, optimizer=SGD, zero_allow_untested_optimizer=True, paceline=section)
    engine = models.engine_for("mixtral", config)
    losses = []
    for step in range(4):
        if moves:
            models.scatter_experts(engine, step)
        losses += models.train(engine, [step])
    report = engine.natural_gradient_report()
    return losses, engine.natural_gradient.names, report


def moving_or_not() -> list[Any]:
    return [with_experts_elsewhere(moves) for moves in (True, False)]


def test_experts_that_change_ranks() -> None:
    """A rank's estimates are of the experts that it has had; all experts of a layer are much alike."""
    for (moved, names, report), (stayed, _, _) in run_ranks(moving_or_not, 2):
        assert [name for name in names if name.endswith("experts.w1")]
        assert [name for name in names if name.endswith("gate.weight")]
        assert moved == pytest.approx(stayed, rel=1e-3)
        assert report["at_floor"] < 0.1
