"""Averaging without a pipeline: every ZeRO stage beside a pipeline, and a script that does not know of it."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.archipelago import (
    TOKENS,
    Island,
    assert_equal,
    assert_near,
    config_of,
    lighthouses,
    mean_of,
    run_islands,
    weights_of,
)
from support.jobs import MICRO_BATCHES, model_config, step_batches
from support.ranks import TESTS, run_ranks

STEPS, EVERY = 3, 2
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"ZeRO {zero}": ({"zero_optimization": {"stage": zero}}, {}) for zero in (0, 3)},
    "ZeRO 1, bf16": ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, {}),
    "ZeRO 2, states": ({"zero_optimization": {"stage": 2}}, {"optimizer_state": "average"}),
    "ZeRO 0, nesterov": ({"zero_optimization": {"stage": 0}}, {"outer": "nesterov"}),
    "ZeRO 3, overlap": ({"zero_optimization": {"stage": 3}}, {"overlap_steps": 1}),
}
LAYERS = 2
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}}}
"""DeepSpeed's own would be compiled first."""


def small_model() -> Any:
    """Of the weights that a pipeline draws."""
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage

    return load_stage(None, model_config(num_hidden_layers=LAYERS), Cut.whole(LAYERS)).model


def plain_engine(light: str, averaging: dict[str, Any] | None, changes: dict[str, Any]) -> Any:
    import paceline

    model = small_model()
    config = config_of(light, None, averaging, gradient_accumulation_steps=MICRO_BATCHES // 2, **ADAM, **changes)
    return paceline.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def pipeline_engine(light: str, averaging: dict[str, Any] | None, changes: dict[str, Any]) -> Any:
    import paceline

    zero = min(changes["zero_optimization"]["stage"], 1)
    changes = {**ADAM, **changes, "zero_optimization": {"stage": zero}, "gradient_accumulation_steps": MICRO_BATCHES}
    config = config_of(light, 2, averaging, **changes)
    return paceline.initialize(model=model_config(num_hidden_layers=LAYERS), config=config)[0]


def train_step(engine: Any, island: int, step: int) -> None:
    # One has no labels, of which the mean loss without a pipeline is not a number.
    batches = [{**batch, "labels": batch["input_ids"]} for batch in step_batches(1000 * island + step, "full")]
    if hasattr(engine, "train_batch"):
        engine.train_batch(iter(batches))
        return
    for batch in batches[engine.global_rank :: 2]:
        engine.backward(engine(input_ids=batch["input_ids"], labels=batch["labels"]).loss)
        engine.step()


def values(engine: Any) -> dict[str, Tensor]:
    import deepspeed

    if hasattr(engine, "train_batch"):
        return weights_of(engine)
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().float().clone()
    return found


def island(lights: list[str], make: str, number: int) -> dict[str, Any]:
    """Weights by case: after a round and in the end, and before them alone, if a mean is to be seen."""
    found: dict[str, Any] = {}
    for light, (name, (changes, section)) in zip(lights, CASES.items(), strict=True):
        results = []
        own = {"min_islands": 2, "every_tokens": EVERY * TOKENS, "first_round": "mean", **section}
        for averaging in (None, own) if gives_the_mean(section) else (own,):
            engine = globals()[make](light, averaging, changes)
            for step in range(EVERY if averaging is None else STEPS):
                train_step(engine, number, step)
                if step == EVERY - 1:
                    results.append(values(engine))
            if averaging is not None:
                engine.finish_averaging()
                results.append(values(engine))
            engine.destroy()
        found[name] = results
    return found


def gives_the_mean(section: dict[str, Any]) -> bool:
    """Whether weights are the mean at once after a round."""
    return not section.keys() - {"optimizer_state"}


def test_a_plain_engine_and_a_pipeline_average() -> None:
    """They know the parameters by the same names; after a round both have the mean of what they had."""
    with lighthouses(len(CASES)) as lights:
        makes = enumerate(["plain_engine", "pipeline_engine"])
        runs = run_islands([Island(island, 2, (lights, make, number)) for number, make in makes])
    for case, (_, section) in CASES.items():
        print("case", case)
        alone, after, final = (
            [{name: tensor for rank in ranks for name, tensor in rank[case][which].items()} for ranks in runs]
            for which in (0, -2, -1)
        )
        assert_equal(final[0], final[1])
        if gives_the_mean(section):
            assert_equal(after[0], after[1])
            assert_near(after[0], mean_of(alone), 1e-2 if "bf16" in case else 2e-6)


def frozen_before_a_round(zero: int) -> list[bool]:
    """Whether, of each parameter, the masters that are brought together are those of before it was frozen."""
    from paceline.averaging.masters_by_name import PlainMasters
    from paceline.comm.control import ControlPlane

    engine = plain_engine("", None, {"zero_optimization": {"stage": zero}})
    masters = PlainMasters(ControlPlane.create(), engine.module, engine.optimizer, engine.basic_optimizer)
    names = sorted(masters.numels())
    before = masters.gather(names) or []
    engine.module.requires_grad_(False)
    after = masters.gather(names) or []
    masters.scatter(names, after)
    return [bool((a == b).all()) for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_is_frozen_for_now_is_averaged_too(zero: int) -> None:
    """Names and shapes are those of the first round, as in a pipeline."""
    first, _ = run_ranks(frozen_before_a_round, 2, zero)
    assert first
    assert all(first)


def adapted(light: str, stages: int | None) -> dict[str, Tensor]:
    """The trained parameters of a model with adapters, on the first rank, after the last average."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, set_seed

    import paceline

    set_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(num_hidden_layers=LAYERS, tie_word_embeddings=False))
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    averaging = {"min_islands": 2, "every_tokens": TOKENS, "first_round": "mean"}
    accumulation = MICRO_BATCHES if stages else MICRO_BATCHES // 2
    config = config_of(light, stages, averaging, **ADAM, gradient_accumulation_steps=accumulation)
    engine = paceline.initialize(model=get_peft_model(model, lora), config=config)[0]
    train_step(engine, engine.averager.island, 0)
    engine.finish_averaging()
    names = engine.averager._masters.numels()
    return dict(zip(sorted(names), engine.averager._masters.gather(sorted(names)) or [], strict=False))


def test_adapters_average_with_those_of_a_pipeline() -> None:
    with lighthouses(1) as (light,):
        (plain, _), (pipeline, _) = run_islands([Island(adapted, 2, (light, stages)) for stages in (None, 2)])
    assert len(plain) == 2 * LAYERS + 1
    assert_equal(plain, pipeline)


def brought_to_the_host() -> list[bool]:
    """Whether new values of each parameter reach masters in host memory, which DeepSpeed copies to a GPU to read."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from paceline.averaging.masters_by_name import PlainMasters
    from paceline.comm.control import ControlPlane

    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    engine = plain_engine("", None, {"zero_optimization": offload, "zero_force_ds_cpu_optimizer": False})
    masters = PlainMasters(ControlPlane.create(), engine.module, engine.optimizer, engine.basic_optimizer)
    read = DeepSpeedZeroOptimizer_Stage3.get_local_fp32_param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedZeroOptimizer_Stage3, "get_local_fp32_param", lambda *args: read(*args).clone())
        names = sorted(masters.numels())
        new = [tensor + 1 for tensor in masters.gather(names) or []]
        masters.scatter(names, new)
        found = values(engine)
    return [torch.equal(tensor, found[name].view(-1)) for name, tensor in zip(names, new, strict=False)]


def test_averages_reach_masters_that_are_offloaded() -> None:
    first, _ = run_ranks(brought_to_the_host, 2)
    assert first
    assert all(first)


def test_masters_in_files_are_refused() -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from paceline.optim.zero_partitions import masters_of

    optimizer = object.__new__(DeepSpeedZeroOptimizer_Stage3)
    optimizer.swap_optimizer = True
    with pytest.raises(ValueError, match='device is "nvme"'):
        masters_of(optimizer)


def sliced_engine() -> str:
    import deepspeed

    import paceline

    model = deepspeed.tp_model_init(small_model(), tp_size=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="tensor parallelism over 2 ranks") as caught:
        paceline.initialize(model=model, config=config_of("localhost:1", None, {}, **ADAM))
    return str(caught.value)


def test_slices_of_parameters_are_refused() -> None:
    """Also where the JSON does not tell of them: with ZeRO 0 all ranks would get the first one's."""
    for message in run_ranks(sliced_engine, 2):
        assert message.startswith("paceline.averaging is there and the engine has tensor parallelism"), message


def evaluates_without_an_optimizer(zero: int) -> bool:
    """As Trainer does before a training: there is nothing to average, and no lighthouse is asked for."""
    import paceline

    config = config_of("localhost:1", None, {}, zero_optimization={"stage": zero})
    config["paceline"]["max_change"] = {}
    del config["optimizer"]
    engine = paceline.initialize(model=small_model(), config=config)[0]
    with torch.no_grad():
        loss = engine(**step_batches(0, "plain")[0]).loss
    engine.finish_averaging()
    engine.destroy()
    return bool(loss.isfinite())


def alone_and_not(lights: list[str]) -> Any:
    assert all(evaluates_without_an_optimizer(zero) for zero in (0, 3))
    found = []
    for light, zero, bf16 in zip(lights, (0, 3, 1), (0, 0, 1), strict=True):
        changes = {"zero_optimization": {"stage": zero}, "bf16": {"enabled": bool(bf16)}}
        both = []
        for averaging in (None, {"every_tokens": EVERY * TOKENS}):
            engine = plain_engine(light, averaging, changes)
            for step in range(STEPS):
                train_step(engine, 0, step)
            if averaging is not None:
                engine.finish_averaging()
            both.append((values(engine), None if averaging is None else engine.averager.round))
            engine.destroy()
        found.append(both)
    return found


def test_one_plain_island_is_the_job_without_averaging_in_every_bit() -> None:
    with lighthouses(3) as lights:
        (ranks,) = run_islands([Island(alone_and_not, 2, (lights,))])
    for found in ranks:
        for (without, _), (with_it, rounds) in found:
            assert_equal(with_it, without)
            assert rounds == 2


def losses_of_loops(lights: list[str]) -> dict[str, tuple[list[float], list[str]]]:
    """The losses that an island tells of after steps, on its first rank, and what it logs, by who calls backward."""
    logger, found = logging.getLogger("paceline"), {}
    logger.setLevel(logging.WARNING)
    for light, way in zip(lights, WAYS, strict=True):
        lines = Lines()
        logger.addHandler(lines)
        engine = plain_engine(light, {"every_tokens": EVERY * TOKENS}, {"zero_optimization": {"stage": 1}})
        for batch in [batch for step in range(EVERY) for batch in step_batches(step, "full")][engine.global_rank :: 2]:
            ids = batch["input_ids"]
            outputs = engine(input_ids=ids, labels=ids) if way in ("engine", "loss") else engine(input_ids=ids)
            loss = outputs.loss if outputs.loss is not None else engine.module.loss_function(outputs.logits, ids, 97)
            if way == "engine":
                engine.backward(loss)
            else:
                (engine.scale(loss) if way == "scaled" else loss).backward()
            engine.step()
        told = [loss for exchange in engine.averager.take_exchanges()[1:] for loss in exchange["losses"]]
        found[way] = told, [line for line in lines.lines if "has no loss" in line]
        engine.destroy()
        logger.removeHandler(lines)
    return found


WAYS = ["engine", "loss", "scaled", "logits alone"]


def test_islands_are_told_of_losses_whoever_calls_backward() -> None:
    with lighthouses(len(WAYS)) as lights:
        ((found, _),) = run_islands([Island(losses_of_loops, 2, (lights,))])
    wanted, _ = found["engine"]
    assert len(wanted) == 1
    for way in WAYS[:3]:
        assert found[way] == (pytest.approx(wanted), []), way
    losses, warnings = found["logits alone"]
    assert all(map(math.isnan, losses))
    assert [warning.partition("call ")[2] for warning in warnings] == [
        "engine.backward(loss), or engine.scale(loss).backward(), where the model does not return its loss"
    ]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def script(argv: list[str]) -> list[str]:
    """What it logs."""
    import sys

    from paceline.launch import patched

    lines, logger = Lines(), logging.getLogger("paceline")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    sys.argv = argv
    assert patched.main(argv) == 0
    return lines.lines


def test_a_trainer_script_averages(tmp_path: Path) -> None:
    """It cannot change, and needs not: the section of its JSON does it."""
    model_config(num_hidden_layers=LAYERS).save_pretrained(tmp_path / "model")
    args: list[tuple[list[str]]] = []
    with lighthouses(1) as (light,):
        averaging = {"every_tokens": 2 * 2 * 2 * 16, "min_islands": 2, "first_round": "mean"}
        for number in range(2):
            config = config_of(light, None, averaging, gradient_accumulation_steps=2, zero_optimization={"stage": 1})
            del config["steps_per_print"], config["gradient_clipping"]
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}}
            path = tmp_path / str(number) / "ds.json"
            path.parent.mkdir()
            path.write_text(json.dumps(config))
            flags = ["--deepspeed", str(path), "--model", str(tmp_path / "model"), "--length", "16", "--steps", "4"]
            args.append(([str(TESTS / "support" / "trainer_job.py"), *flags],))
        islands = run_islands([Island(script, 1, island_args) for island_args in args])
    for (lines,) in islands:
        rounds = [line for line in lines if re.search(r": round \d+ with 2 islands", line)]  # not of what is done again
        assert [line.partition(": ")[2].split()[1] for line in rounds] == ["1", "1", "2"], lines


def trained(
    light: str, directory: str, stages: int | None, **options: Any
) -> tuple[dict[str, Tensor], int, list[float]]:
    """By ``PacelineTrainer``, with or without a pipeline; three steps, of which the last is after the last round.

    Weights, rounds, and the losses that the islands told in the last one.
    """
    from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

    import paceline

    set_seed(0)
    averaging = {"every_tokens": 2 * 2 * 2 * 16, "min_islands": 2, "first_round": "mean"}
    config = config_of(light, stages, averaging, **ADAM, zero_optimization={"stage": 1})
    for key in ("steps_per_print", "gradient_clipping", "gradient_accumulation_steps"):
        del config[key]
    args = TrainingArguments(
        output_dir=directory,
        deepspeed=config,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=stages or 0,
        **options,
    )
    rows = [
        {"input_ids": row, "labels": row} for step in range(4) for row in step_batches(step, "plain")[0]["input_ids"]
    ]
    model = AutoModelForCausalLM.from_config(model_config(num_hidden_layers=LAYERS))
    trainer = paceline.PacelineTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:2])
    trainer.train()
    engine = trainer.model_wrapped
    own = weights_of(engine) if stages else {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    exchanges = engine.averager.exchanges
    return own, engine.averager.round, exchanges[-1]["losses"] if exchanges else []


def test_our_trainer_takes_the_last_average(tmp_path: Path) -> None:
    """One island has a pipeline and the other none; both report the same kind of loss: of a step, for each token."""
    with lighthouses(1) as (light,):
        islands = [
            Island(trained, 1, (light, str(tmp_path / "plain"), None)),
            Island(trained, 2, (light, str(tmp_path / "pipeline"), 2)),
        ]
        ((plain, rounds, losses),), pipeline = run_islands(islands)
    assert rounds == pipeline[0][1] == 2
    assert losses[0] == pytest.approx(losses[1], rel=0.1), "both models are all but untrained"
    merged = {name: tensor for weights, *_ in pipeline for name, tensor in weights.items()}
    assert_equal({name: merged[name] for name in plain}, plain)


def warned_of_the_best(light: str, directory: str) -> list[str]:
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    lines = Lines()
    logging.getLogger("paceline").addHandler(lines)
    trained(light, directory, None, **evaluates)
    return [line for line in lines.lines if line.startswith("load_best_model_at_end is True: ")]


def test_an_island_that_goes_back_to_its_best_model_warns(tmp_path: Path) -> None:
    with lighthouses(1) as (light,):
        islands = [Island(warned_of_the_best, 1, (light, str(tmp_path / str(number)))) for number in range(2)]
        for number, ((warning,),) in enumerate(run_islands(islands)):
            assert f"island {number} goes back from the last average to {tmp_path / str(number)}" in warning


def goes_back(light: str, folder: str, kind: str) -> bool:
    """Whether the step after a checkpoint was loaded, while a round was under way, is the step that it was before."""
    averaging = {"min_islands": 2, "every_tokens": 2 * TOKENS, "first_round": "mean", "overlap_steps": 1}
    made = plain_engine if kind == "plain" else pipeline_engine
    engine = made(light, averaging, {"zero_optimization": {"stage": 1}})
    island = engine.averager.island
    train_step(engine, island, 0)
    engine.save_checkpoint(f"{folder}/{island}")
    train_step(engine, island, 1)  # and a round begins
    before = values(engine)
    engine.load_checkpoint(f"{folder}/{island}")
    train_step(engine, island, 1)
    after = values(engine)
    engine.finish_averaging()
    return all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("kind", ["plain", "pipeline"])
def test_what_a_round_brings_is_not_added_to_a_checkpoint_that_is_loaded(kind: str, tmp_path: Path) -> None:
    with lighthouses(1) as (light,):
        found = run_islands([Island(goes_back, 2, (light, str(tmp_path), kind), number) for number in range(2)])
    assert found == [[True, True]] * 2
