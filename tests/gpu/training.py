"""What the ranks of a capability do: train tiny models for a few steps, the same way on a GPU and on a CPU.

A job gets an empty folder that all its ranks share, and returns what is compared:

* ``losses`` and ``norms``, of this rank;
* ``facts``, which must be equal on both accelerators;
* ``devices``, where the parameters were.

Checkpoints ``begin`` and ``end`` in the folder are compared too; jobs that write none return ``begin`` and ``end``,
tensors by their names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.jobs import LENGTH, MICRO_BATCHES, TINY, ds_config, finetune, flags, model_config, step_batches
from support.natural import allow_fp16

STEPS = 4
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
"""An update is as small as its gradient: with Adam, what is rounding in one becomes a whole step of the other."""
BEGIN, END = "begin", "end"


def train(engine: Any, first: int, last: int, kind: str = "padded") -> tuple[list[Any], list[Any]]:
    """Losses and norms of these steps."""
    replica, replicas = engine.grid.data_parallel_id, engine.grid.data_parallel_size
    losses, norms = [], []
    for step in range(first, last):
        losses.append(engine.train_batch(iter(step_batches(step, kind)[replica::replicas])))
        norms.append(engine.grad_norm())
    return losses, norms


def devices_of(engine: Any) -> set[str]:
    return {parameter.device.type for parameter in engine.module.parameters()}


def config_for(
    stages: int,
    config: Mapping[str, Any] | None = None,
    section: Mapping[str, Any] | None = None,
    partition: Any = "uniform",
    schedule: Any = None,
    keys: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A DeepSpeed config; ``keys`` are more of ``"pipeline"``."""
    replicas = int(os.environ["WORLD_SIZE"]) // stages
    changes = {"gradient_accumulation_steps": MICRO_BATCHES // replicas, "optimizer": SGD, **(config or {})}
    pipeline = {"stages": stages, "partition": partition, "schedule": schedule, **(keys or {})}
    if os.environ["DS_ACCELERATOR"] == "cpu":
        if changes.get("fp16"):
            allow_fp16()
        pipeline.pop("compile", None)  # the numbers of layers as they are, without a minute of a C++ compiler
    return ds_config(**changes, paceline={"pipeline": pipeline, **(section or {})})


def adapted(hf_config: Any) -> Any:
    """The whole model with LoRA in every layer, which begins at random."""
    import peft

    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage

    model = load_stage(None, hf_config, Cut.whole(hf_config.num_hidden_layers)).model
    torch.manual_seed(0)
    layers = ["q_proj", "v_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False))


def pipeline(
    folder: str,
    stages: int = 2,
    family: str = "llama",
    kind: str = "padded",
    model: Mapping[str, Any] | None = None,
    moves: Mapping[int, Sequence[int]] | None = None,
    are_experts_moved: bool = False,
    has_adapters: bool = False,
    traced_steps: int = 0,
    waits_for_device: bool = False,
    **config: Any,
) -> dict[str, Any]:
    """A Hugging Face model in stages: so many steps, and an evaluation.

    Args:
        model: changes of its config.
        moves: boundaries of layers, by the step before which they are taken.
        are_experts_moved: to random places, before the second step.
        traced_steps: records that there must be.
        waits_for_device: after each step, for all that the GPU was given.
        config: of :func:`config_for`.
    """
    import paceline
    from support.expert_models import scatter_experts

    hf_config = model_config(family, **(model or {}))
    given = adapted(hf_config) if has_adapters else hf_config
    engine, *_ = paceline.initialize(model=given, config=config_for(stages, **config))
    engine.run_dir = folder
    engine.save_checkpoint(folder, tag=BEGIN)
    losses, norms = [], []
    for step in range(STEPS):
        if moves and step in moves:
            engine.repartition(list(moves[step]))
        if are_experts_moved and step == 1:
            scatter_experts(engine, seed=1)
        more_losses, more_norms = train(engine, step, step + 1, kind)
        losses += more_losses
        norms += more_norms
        if waits_for_device and torch.cuda.is_available():
            torch.cuda.synchronize()
    losses = [float(loss) for loss in losses]
    replica, replicas = engine.grid.data_parallel_id, engine.grid.data_parallel_size
    held_out = step_batches(STEPS, kind)[: MICRO_BATCHES - 1]  # not as many for each replica
    losses.append(engine.evaluate(held_out[replica::replicas])["eval_loss"])
    engine.save_checkpoint(folder, tag=END)
    facts = {"migrations": len(engine.migrations)} if moves else {}
    if traced_steps and engine.global_rank == 0:
        records = [json.loads(file.read_text()) for file in sorted(Path(folder, "trace").glob("*.json"))]
        assert len(records) == traced_steps, records
        assert all(record["measured_s"] > 0 for record in records), records
    found = {"losses": losses, "norms": norms, "facts": facts, "devices": devices_of(engine)}
    engine.destroy()
    return found


def checkpoints(folder: str) -> dict[str, Any]:
    """Saved in the background with two stages and two replicas, resumed so and with four stages, exported."""
    from transformers import AutoModelForCausalLM

    import paceline

    hf_config = model_config()

    def make(stages: int, zero: int) -> Any:
        config = config_for(stages, {"zero_optimization": {"stage": zero}})
        return paceline.initialize(model=hf_config, config=config)[0]

    engine = make(2, 1)
    engine.save_checkpoint(folder, tag=BEGIN)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, tag="saved", wait=False)
    straight, norms = train(engine, 2, 4)
    engine.finish_checkpoint()
    engine.destroy()
    losses = []
    for stages, zero in ((2, 1), (4, 0)):
        engine = make(stages, zero)
        path, _ = engine.load_checkpoint(folder, tag="saved")
        assert path is not None, "nothing was loaded"
        more_losses, more_norms = train(engine, 2, 4)
        losses += more_losses
        norms += more_norms
        if stages == 2:
            engine.destroy()
    engine.save_checkpoint(folder, tag=END)
    paceline.export(engine.module, f"{folder}/model", engine.control)
    loaded = dict(AutoModelForCausalLM.from_pretrained(f"{folder}/model").named_parameters())
    for name, parameter in engine.module.stage.model.named_parameters():
        assert torch.equal(parameter.detach().cpu(), loaded[name]), f"{name} was exported otherwise"
    found = {
        "losses": [float(loss) for loss in (*straight, *losses)],
        "norms": norms,
        "facts": {},
        "devices": devices_of(engine),
    }
    engine.destroy()
    return found


def island(folder: str, light: str, **averaging: Any) -> dict[str, Any]:
    """One of two that average: two stages each, a round every second step or as ``averaging`` says."""
    import paceline
    from support.archipelago import TOKENS, weights_of

    rounds = {"lighthouse": light, "min_islands": 2, "every_tokens": 2 * TOKENS, "first_round": "mean", **averaging}
    engine, *_ = paceline.initialize(model=model_config(), config=config_for(2, section={"averaging": rounds}))
    begin = weights_of(engine)
    own = 1000 * int(os.environ["PACELINE_ISLAND"])
    losses, norms = train(engine, own, own + STEPS)
    engine.finish_averaging()
    found = {
        "losses": [float(loss) for loss in losses],
        "norms": norms,
        "facts": {"rounds": engine.averager.round},
        "devices": devices_of(engine),
        BEGIN: _on_cpu(begin),
        END: _on_cpu(weights_of(engine)),
    }
    engine.destroy()
    return found


def trainer(folder: str) -> dict[str, Any]:
    """``PacelineTrainer``: steps, an evaluation, predictions, and the model that is saved."""
    from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

    import paceline
    from paceline.runtime.initialize import start_distributed

    start_distributed()  # before accelerate, which would start NCCL on a GPU that ranks share
    set_seed(0)
    model = AutoModelForCausalLM.from_config(model_config())
    begin = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 97, (48, LENGTH), generator=generator)]
    args = TrainingArguments(
        output_dir=f"{folder}/output",
        deepspeed={"zero_optimization": {"stage": 1}, "optimizer": SGD, "paceline": {"pipeline": {"stages": 2}}},
        use_cpu=os.environ["DS_ACCELERATOR"] == "cpu",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=4,
        max_steps=STEPS,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trained = paceline.PacelineTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:11])
    trained.train()
    trained.save_model(f"{folder}/model")
    predicted = trained.predict(rows[11:16])
    logs = trained.state.log_history
    losses = [line[key] for line in logs for key in ("loss", "eval_loss") if key in line]
    return {
        "losses": [*losses, predicted.metrics["test_loss"]],
        "norms": [line["grad_norm"] for line in logs if "grad_norm" in line],
        "facts": {"predictions": predicted.predictions.shape},
        "devices": devices_of(trained.model_wrapped),
        BEGIN: begin,
        END: _model_in(f"{folder}/model"),
    }


def main_job(folder: str) -> dict[str, Any]:
    """``paceline.launch.finetune``: two stages on the standard library's source files."""
    sgd = {"type": "SGD", "params": {**SGD["params"], "lr": "auto"}}
    config = {"optimizer": sgd, "paceline": {"pipeline": {"stages": 2, "schedule": "kfkb"}}}
    first = int(os.environ["RANK"]) == 0
    file = Path(folder, f"rank{os.environ['RANK']}.json")
    file.write_text(json.dumps(config))
    sizes = {**TINY, "logging_steps": 1, "learning_rate": 0.1}
    argv = flags(**sizes, deepspeed=file, output_dir=f"{folder}/output", eval_strategy="no")
    code, errors = finetune(argv)
    assert code == 0, errors
    if not first:
        return {"losses": [], "norms": [], "facts": {}, "devices": set(), BEGIN: {}, END: {}}
    lines = [json.loads(line) for line in Path(folder, "output", "metrics.jsonl").read_text().splitlines()]
    summary = json.loads(Path(folder, "output", "summary.json").read_text())
    assert summary["tokens_per_s"] > 0, summary
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "norms": [line["grad_norm"] for line in lines if "grad_norm" in line],
        "facts": {},
        "devices": set(),
        BEGIN: {},
        END: _model_in(f"{folder}/output"),
    }


def plain(
    folder: str,
    zero: int,
    section: Mapping[str, Any],
    family: str = "llama",
    config: Mapping[str, Any] | None = None,
    are_experts_moved: bool = False,
) -> dict[str, Any]:
    """DeepSpeed's engine without a pipeline; every parameter of ZeRO 3 lies in pieces."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    import paceline
    from support.expert_models import scatter_experts

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(family, num_hidden_layers=2, tie_word_embeddings=False))
    settings = {"stage": zero, **({"stage3_param_persistence_threshold": 0} if zero == 3 else {})}
    changes = {"zero_optimization": settings, "optimizer": SGD, "zero_allow_untested_optimizer": True}
    engine = paceline.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=ds_config(gradient_accumulation_steps=2, paceline=section, **changes, **(config or {})),
    )[0]

    def values() -> dict[str, Tensor]:
        found = {}
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                found[name] = parameter.detach().float().clone()
        return _on_cpu(found)

    begin, losses, norms = values(), [], []
    for step in range(STEPS):
        if are_experts_moved and step == 1:
            scatter_experts(engine, seed=1)
        for micro_batch in range(2):
            batch = step_batches(2 * step + micro_batch, "full")[engine.global_rank]
            inputs = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            loss = engine(**inputs, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    if are_experts_moved:  # back in order, for the values to be of the same experts as at the begin
        with engine._experts_in_order():
            end = values()
    else:
        end = values()
    found = {
        "losses": losses,
        "norms": [None if norm is None else float(norm) for norm in norms],
        "facts": {"engine": type(engine).__name__},
        "devices": devices_of(engine),
        BEGIN: begin,
        END: end,
    }
    engine.destroy()
    return found


def _model_in(folder: str) -> dict[str, Tensor]:
    """Of all its files."""
    from safetensors.torch import load_file

    return {
        name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
