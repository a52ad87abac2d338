"""AutoEP: it starts, trains as one process does, takes any optimizer, and gives a whole model back."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import RankError, run_ranks

STEPS, RANKS, BATCH, LENGTH = 3, 2, 2, 16
EXPERTS = 4


def mixtral(**changes: Any) -> Any:
    """A Mixtral of two layers, the same on every rank."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=97, num_hidden_layers=2, num_local_experts=EXPERTS, num_experts_per_tok=2, **(sizes | changes)
        )
    )


def rows(ranks: int = RANKS) -> torch.Tensor:
    """Of all steps; a step takes a batch for every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 97, (STEPS * ranks * BATCH, LENGTH), generator=generator)


def ds_config(zero: int, ep: int = RANKS, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "expert_parallel": {"enabled": True, "autoep_size": ep, "preset_model": "mixtral"},
        "steps_per_print": None,
        **changes,
    }


def step_of(engine: Any, step: int) -> float:
    import deepspeed

    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    ids = rows(ranks).view(STEPS, ranks, BATCH, LENGTH)[step, rank]
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    deepspeed.comm.all_reduce(mean)
    return mean.item() / ranks


def train_alone(ranks: int = RANKS, **changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """All ranks' batches in one process, on the model as transformers has it."""
    model = mixtral(**changes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in rows(ranks).view(STEPS, ranks, BATCH, LENGTH):
        optimizer.zero_grad()
        loss = sum(model(input_ids=ids, labels=ids).loss for ids in step) / ranks
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_same_weights(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


def start_job(zero: int, ep: int) -> dict[str, Any]:
    import deepspeed

    import paceline

    deepspeed.init_distributed("gloo")
    config = ds_config(zero, ep)
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    model = mixtral(**changes)
    stock = error_of(deepspeed.initialize, model=model, model_parameters=model.parameters(), config=config)
    paceline.repair_deepspeed("autoep-start", "save-model")
    model = mixtral(**changes)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = [step_of(engine, step) for step in range(STEPS)]
    return {"stock": stock, "losses": losses, "state": engine._consolidated_16bit_state_dict()}


@pytest.mark.parametrize(("zero", "ep", "ranks"), [(0, 2, 2), (1, 2, 2), (1, 1, 2), (2, 2, 4)])
def test_autoep_starts_and_trains_as_one_process(zero: int, ep: int, ranks: int) -> None:
    """The router's auxiliary loss too, which needs the registry of recorders that it does not start for.

    Also with one rank for all experts, and with two replicas of the experts of each of two ranks.
    """
    from transformers.utils import output_capturing

    results = run_ranks(start_job, ranks, zero, ep)
    losses, wanted = train_alone(ranks, output_router_logits=True, router_aux_loss_coef=0.1)
    for rank in results:
        if hasattr(output_capturing, "_CanRecordRegistry"):
            assert rank["stock"].startswith("TypeError: _CanRecordRegistry.get() takes 2 positional arguments")
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
    assert [rank["state"] is None for rank in results] == [False] + [True] * (ranks - 1)
    assert_same_weights(results[0]["state"], wanted)


def trainer_job(directory: str, repairs: tuple[str, ...], zero: int, client_optimizer: bool) -> dict[str, Any]:
    """The Hugging Face Trainer, as a script would have it."""
    from transformers import Trainer, TrainingArguments

    import paceline

    paceline.repair_deepspeed(*repairs)
    config = ds_config(zero)
    if client_optimizer:
        del config["optimizer"]
    args = TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=0.1,
        optim="sgd",
        optim_args="momentum=0.9",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        deepspeed=config,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=mixtral(), args=args, train_dataset=[{"input_ids": r, "labels": r} for r in rows()])
    # The order of the rows is the test's own.
    trainer._get_train_sampler = lambda *a, **k: torch.utils.data.SequentialSampler(range(len(rows())))
    trainer.train()
    trainer.save_model(directory)
    groups = trainer.deepspeed.basic_optimizer.param_groups
    return {"moe": [bool(group.get("moe")) for group in groups], "lr": [group["lr"] for group in groups]}


def saved(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def loaded(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    return model.state_dict(), {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys")}


def test_what_the_trainer_saves_is_the_model(tmp_path: Path) -> None:
    stock = tmp_path / "stock"
    run_ranks(trainer_job, RANKS, str(stock), ("autoep-start",), 1, False)
    assert len(saved(stock)) == 25  # of 41, without an error
    assert saved(stock)["model.layers.0.block_sparse_moe.experts.w1"].shape == (EXPERTS // RANKS, 48, 32)

    ours = tmp_path / "ours"
    run_ranks(trainer_job, RANKS, str(ours), ("autoep-start", "save-model"), 1, False)
    state, info = loaded(ours)
    assert len(saved(ours)) == 41
    assert info == {"missing_keys": [], "unexpected_keys": []}
    assert_same_weights(state, train_alone()[1])


@pytest.mark.parametrize("zero", [1, 2])
def test_the_trainer_without_an_optimizer_in_the_json(zero: int, tmp_path: Path) -> None:
    if zero == 1:
        with pytest.raises(RankError, match="None of the param groups are marked as MoE"):
            run_ranks(trainer_job, RANKS, str(tmp_path / "stock"), ("autoep-start",), zero, True)
    ours = tmp_path / "ours"
    for rank in run_ranks(trainer_job, RANKS, str(ours), (), zero, True):
        assert rank == {"moe": [False, False, True], "lr": [0.1] * 3}  # the norms are not decayed: a group of their own
    assert_same_weights(loaded(ours)[0], train_alone()[1])


def groups_job(kind: str) -> dict[str, Any]:
    """What can be given to ``deepspeed.initialize`` in place of an optimizer in the JSON."""
    import deepspeed

    import paceline

    deepspeed.init_distributed("gloo")

    def initialize() -> Any:
        model = mixtral()
        config = ds_config(1)
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "lr": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "lr": 0.1},
        ]
        if kind == "groups":
            return deepspeed.initialize(model=model, model_parameters=groups, config=config)
        del config["optimizer"]
        if kind == "function":

            def make(parameters: Any) -> Any:
                return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

            return deepspeed.initialize(model=model, optimizer=make, model_parameters=parameters, config=config)
        optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
        if kind == "scheduled":
            torch.optim.lr_scheduler.ConstantLR(optimizer)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    paceline.repair_deepspeed("autoep-start")
    stock = error_of(initialize)
    paceline.repair_deepspeed("moe-groups", "save-model")
    if kind == "scheduled":
        return {"stock": stock, "ours": error_of(initialize)}
    engine = initialize()[0]
    losses = [step_of(engine, step) for step in range(STEPS)]
    return {"stock": stock, "losses": losses, "state": engine._consolidated_16bit_state_dict()}


@pytest.mark.parametrize("kind", ["groups", "function", "optimizer"])
def test_experts_get_groups_of_their_own(kind: str) -> None:
    ranks = run_ranks(groups_job, RANKS, kind)
    fault = "KeyError: 'name'" if kind == "groups" else "AssertionError: The model has moe layers, but None of the"
    assert ranks[0]["stock"].startswith(fault)
    losses, wanted = train_alone()
    assert ranks[0]["losses"] == pytest.approx(losses, rel=1e-5)
    assert_same_weights(ranks[0]["state"], wanted)


def test_an_optimizer_that_has_a_scheduler_is_refused() -> None:
    """The scheduler has one rate for each group that there was."""
    error = run_ranks(groups_job, RANKS, "scheduled")[0]["ours"]
    assert error.startswith("ValueError: the optimizer already has a learning-rate scheduler")
    assert "make the scheduler after deepspeed.initialize" in error


PLACEMENT = [[2, 0], [3, 1]]
"""Experts of the model by rank, in the order in which the rank holds them."""


def placement_job(directory: str) -> dict[str, Any]:
    """Trains, declares that the experts are placed otherwise, and saves all there is about the model."""
    import deepspeed
    from deepspeed.checkpoint import autoep_affine as affine
    from deepspeed.checkpoint import constants
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    import paceline

    paceline.repair_deepspeed("autoep-start", "save-model")
    deepspeed.init_distributed("gloo")
    model = mixtral()
    config = ds_config(1, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    step_of(engine, 0)
    local = {}
    for name, layer in model.named_modules():
        if isinstance(layer, AutoEPMoELayer):
            layer.expert_placement_descriptor = affine.make_autoep_placement_descriptor(EXPERTS, PLACEMENT)
            for weight, parameter in layer.experts.named_parameters():
                meta = getattr(parameter, constants.DS_AUTOEP_UC_META)
                shape = meta[constants.AUTOEP_PARAM_LOGICAL_SHAPE]
                lowered = affine.autoep_placement_to_affine_map(layer.expert_placement_descriptor, shape)
                meta[constants.AUTOEP_EXPERT_PLACEMENT] = layer.expert_placement_descriptor
                meta[constants.AFFINE_MAP] = lowered.to_dict()
                meta[constants.AUTOEP_PARAM_LOCAL_EXPERTS] = list(PLACEMENT[layer.ep_rank])
                local[f"{name}.experts.{weight}"] = parameter.detach().clone()
    engine.save_checkpoint(directory, tag="one")
    engine.save_16bit_model(directory)
    return {"local": local, "state": engine._consolidated_16bit_state_dict()}


def convert_job(source: str, target: str, repaired: bool) -> None:
    from deepspeed.checkpoint import ds_to_universal

    import paceline

    if repaired:
        paceline.repair_deepspeed("expert-placement")
    sys.argv = ["ds_to_universal", "--inject_missing_state", "--input_folder", source, "--output_folder", target]
    sys.argv += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def test_universal_conversion_keeps_the_placement_of_experts(tmp_path: Path) -> None:
    ranks = run_ranks(placement_job, RANKS, str(tmp_path))
    whole = {}
    for name in ranks[0]["local"]:
        whole[name] = torch.empty(EXPERTS, *ranks[0]["local"][name].shape[1:])
        for rank, experts in zip(ranks, PLACEMENT, strict=True):
            whole[name][experts] = rank["local"][name]
    for repaired in (False, True):
        target = tmp_path / f"universal{repaired:d}"
        run_ranks(convert_job, 1, str(tmp_path / "one"), str(target), repaired)
        for name, right in whole.items():
            converted = torch.load(target / "zero" / name / "fp32.pt", weights_only=False)["param"]
            assert torch.equal(converted, right) is repaired, name
            assert repaired or torch.equal(converted, torch.cat([rank["local"][name] for rank in ranks]))

    # The whole state dict has the model's order too, and so has the file of save_16bit_model.
    state, file = ranks[0]["state"], torch.load(tmp_path / "pytorch_model.bin")
    assert_same_weights(file, state)
    assert state.keys() == mixtral().state_dict().keys()
    for layer in range(2):
        fused = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        assert torch.equal(fused[:, :48], whole[f"model.layers.{layer}.mlp.experts.w1"])
        assert torch.equal(fused[:, 48:], whole[f"model.layers.{layer}.mlp.experts.w3"])


def refused_job(directory: str, zero: int) -> list[str]:
    import deepspeed

    import paceline

    paceline.repair_deepspeed("autoep-start")
    if zero == 3:
        paceline.repair_deepspeed()
    deepspeed.init_distributed("gloo")
    model = mixtral()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config(zero))
    paceline.repair_deepspeed()
    step_of(engine, 0)
    return [error_of(engine.save_16bit_model, directory), *os.listdir(directory)]


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (3, "NotImplementedError: save_16bit_model is not supported for AutoEP with ZeRO Stage 3"),
        (1, "RuntimeError: model.layers.0.mlp was made by AutoEP without a record of what it replaced: call paceline"),
    ],
)
def test_what_cannot_be_gathered_is_an_error_and_no_file(zero: int, message: str, tmp_path: Path) -> None:
    for error, *files in run_ranks(refused_job, RANKS, str(tmp_path), zero):
        assert error.startswith(message)
        assert files == []
