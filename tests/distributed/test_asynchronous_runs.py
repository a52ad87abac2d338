"""Runs of asynchronous pipelines: saved, resumed, reshaped, evaluated, exported; what they keep; loops of all kinds."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.accidents import Ended, Running, accident
from support.archipelago import lighthouses
from support.jobs import MICRO_BATCHES, TINY, ds_config, finetune, flags, model_config, step_batches
from support.ranks import RankError, run_ranks

MULTI = {"type": "multidirection"}
ONE = {"type": "one_direction"}
BEFORE, AFTER = 3, 3


def make(
    schedule: Any,
    stages: int = 4,
    dtype: str = "fp32",
    model: str = "llama",
    partition: Any = "uniform",
    **changes: Any,
) -> Any:
    import paceline

    replicas = int(os.environ["WORLD_SIZE"]) // stages
    section = {"stages": stages, "partition": partition, "schedule": schedule}
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        gradient_clipping=0.5,
        bf16={"enabled": dtype == "bf16"},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-3}},
        paceline={"pipeline": section},
    )
    engine, *_ = paceline.initialize(model=model_config(model, **changes), config=config)
    return engine


def steps(engine: Any, first: int, count: int) -> list[float]:
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    losses = [engine.train_batch(iter(step_batches(step)[replica::replicas])) for step in range(first, first + count)]
    return [loss.item() for loss in losses]


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Of this rank's stages, by Hugging Face's names."""
    return {engine.module.state_name(n): p.detach().clone() for n, p in engine.module.named_parameters()}


def merged(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All ranks' weights, each of which all that have it have alike."""
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, tensor in rank.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"{name} differs between ranks"
    return found


# -- resume --------------------------------------------------------------------------------------------------------


def saves_and_goes_on(root: str, schedule: Any, dtype: str) -> Any:
    engine = make(schedule, dtype=dtype, model="gpt2", **dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.1))
    steps(engine, 0, BEFORE)
    engine.save_checkpoint(root)
    losses = steps(engine, BEFORE, AFTER)
    engine.flush()
    return losses, engine.get_lr(), weights(engine)


def resumes(root: str, schedule: Any, dtype: str) -> Any:
    engine = make(schedule, dtype=dtype, model="gpt2", **dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.1))
    torch.rand(3)  # wherever the generators are
    engine.load_checkpoint(root)
    assert engine.global_steps == BEFORE
    losses = steps(engine, BEFORE, AFTER)
    engine.flush()
    return losses, engine.get_lr(), weights(engine)


@pytest.mark.parametrize(("schedule", "dtype"), [(MULTI, "bf16"), (ONE, "fp32")])
def test_resume_is_bitwise(schedule: Any, dtype: str, tmp_path: Path) -> None:
    """With dropout and a rising learning rate: the boundary is an update, no gradient is lost or counted twice."""
    wanted = run_ranks(saves_and_goes_on, 4, str(tmp_path), schedule, dtype)
    found = run_ranks(resumes, 4, str(tmp_path), schedule, dtype)
    merged([rank[2] for rank in wanted])
    for (losses, rates, tensors), (other_losses, other_rates, other_tensors) in zip(wanted, found, strict=True):
        assert losses == other_losses
        assert rates == other_rates
        assert all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items())


def saved_by(root: str, schedule: Any, stages: int) -> dict[str, torch.Tensor]:
    engine = make(schedule, stages)
    steps(engine, 0, BEFORE)
    engine.save_checkpoint(root, tag="saved")
    engine.save_checkpoint(root, tag="again")
    return weights(engine)


def loaded_by(root: str, schedule: Any, stages: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = make(schedule, stages)
    engine.load_checkpoint(root, tag="saved")
    held = weights(engine)
    return held, steps(engine, BEFORE, 2)


@pytest.mark.parametrize(("before", "after"), [(("1f1b", 2, 2), (MULTI, 4, 4)), ((MULTI, 2, 4), (ONE, 4, 4))])
def test_checkpoints_fit_every_shape(before: Any, after: Any, tmp_path: Path) -> None:
    """(schedule, stages, ranks); tied embeddings."""
    wanted = merged(run_ranks(saved_by, before[2], str(tmp_path), *before[:2]))
    found = run_ranks(loaded_by, after[2], str(tmp_path), *after[:2])
    held = merged([rank for rank, _ in found])
    assert {n for n in held if not n.endswith("@copy")} == {n for n in wanted if not n.endswith("@copy")}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in held.items() if name in wanted)
    assert all(losses == found[0][1] for _, losses in found)


# -- evaluation, export --------------------------------------------------------------------------------------------


def evaluated_and_exported(root: str, schedule: Any) -> Any:
    from paceline.runtime.model_export import export

    engine = make(schedule)
    steps(engine, 0, 3)
    export(engine.module, f"{root}/model", engine.control)
    evaluation = engine.evaluate(step_batches(50)[:5])
    after = engine.evaluate(step_batches(50)[:5])
    assert after == evaluation
    steps(engine, 3, 1)
    return evaluation, weights(engine)


@pytest.mark.parametrize("schedule", [MULTI, ONE], ids=["multidirection", "one_direction"])
def test_the_exported_model_has_all_updates(schedule: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    evaluation, _ = run_ranks(evaluated_and_exported, 4, str(tmp_path), schedule)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    total = tokens = 0
    with torch.no_grad():
        for batch in step_batches(50)[:5]:
            count = int((batch["labels"][:, 1:] != -100).sum())
            if count:
                total += float(model(**batch, num_items_in_batch=1).loss)
                tokens += count
    assert evaluation["eval_tokens"] == tokens
    assert evaluation["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)


# -- what ranks keep -----------------------------------------------------------------------------------------------


def bytes_kept(owners: str) -> dict[str, float]:
    engine = make({**MULTI, "optimizer_owners": owners}, tie_word_embeddings=False)
    steps(engine, 0, 2)
    engine.flush()
    states = sum(t.numel() * t.element_size() for s in engine.optimizer.state.values() for t in s.values() if t.dim())
    return {"states": states, "held": sum(p.numel() * p.element_size() for p in engine.module.parameters())}


@pytest.mark.parametrize("owners", ["direction", "mirror"])
def test_each_rank_keeps_one_stages_states(owners: str) -> None:
    """Of the P = 2 stages that it holds: half of Adam's two moments of them, on the average of a mirror group."""
    kept = run_ranks(bytes_kept, 4, owners)
    for group in ((0, 3), (1, 2)):
        states, held = (sum(kept[rank][what] for rank in group) for what in ("states", "held"))
        assert states == 2 * held / 2
    if owners == "mirror":
        for one, other in ((0, 3), (1, 2)):
            assert kept[one]["states"] == pytest.approx(kept[other]["states"], rel=0.05)


def live_micro_batches() -> int:
    """The most whose forward has begun and whose backward has not ended, as they ran."""
    engine = make(MULTI)
    steps(engine, 0, 4)
    live = most = 0
    for step in engine.meter.recorder.steps():
        for span in step.spans:
            live += {"F": 1, "B": -1}.get(span.kind, 0)
            most = max(most, live)
    engine.flush()
    return most


def test_live_activations_are_nearly_flat() -> None:
    assert run_ranks(live_micro_batches, 4) == [3, 4, 4, 3]


# -- loops ---------------------------------------------------------------------------------------------------------


def loops(kind: str) -> list[float]:
    """The same data: an iterator a step, one for all steps, only where it is read, a new one when the last ended."""
    engine = make(MULTI)
    num_steps = 3
    reads = engine.reads_data
    if kind == "each":
        found = steps(engine, 0, num_steps)
        engine.destroy()
        return found
    if kind == "some ranks":
        given = [iter(step_batches(step)) if reads else None for step in range(num_steps)]
    elif kind == "epochs":
        epochs = [chain(step_batches(0), step_batches(1)), iter(step_batches(2))]
        given = [epochs[0]] * 2 + [epochs[1]]
    else:
        given = [chain.from_iterable(map(step_batches, range(num_steps)))] * num_steps
    losses = [engine.train_batch(data) for data in given]
    found = [loss.item() for loss in losses]
    with pytest.raises(StopIteration):
        engine.train_batch(given[-1])
    engine.flush()
    engine.destroy()
    return found


def all_loops() -> dict[str, list[float]]:
    return {kind: loops(kind) for kind in ("each", "one", "some ranks", "epochs")}


def test_loops_of_all_kinds_train_on_the_same() -> None:
    ranks = run_ranks(all_loops, 4)
    for rank in ranks:
        assert rank == dict.fromkeys(rank, ranks[0]["each"])


def reads_bad_data() -> None:
    engine = make(MULTI)
    batches = [batch for step in range(4) for batch in step_batches(step)]
    batches[3 * MICRO_BATCHES + 2] = {"input_ids": torch.full((2, 16), 1000), "labels": torch.zeros(2, 16).long()}
    data = iter(batches)
    for _ in range(3):
        engine.train_batch(data)
    engine.train_batch(data)


def test_bad_data_stops_all_at_its_step() -> None:
    with pytest.raises(RankError, match="token id 1000, the model's vocabulary is 0 to 96"):
        run_ranks(reads_bad_data, 4)


def changes_the_schedule() -> str:
    from paceline.schedules import families

    engine = make(MULTI)
    try:
        engine.set_schedule(families.one_f_one_b(4, MICRO_BATCHES))
    except ValueError as error:
        return str(error)
    return ""


def test_the_schedule_cannot_change() -> None:
    told = "an engine that was made for 'multidirection' keeps its schedule"
    assert all(told in message for message in run_ranks(changes_the_schedule, 4))


PARTS = [[0, 3, 4, 5, 8], [0, 2, 4, 6, 8], [0, 2, 3, 5, 8]]
TWO_STAGES = [[0, 4, 8], [0, 5, 8], [0, 3, 8]]


def changes_parts(
    schedule: Any, boundaries: list[list[int]], saved: str | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps with each of ``boundaries``: layers move, or a checkpoint in ``saved`` makes another engine."""
    stages = len(boundaries[0]) - 1
    engine = make(schedule, stages, num_hidden_layers=6, partition=boundaries[0])
    losses, data = [], chain.from_iterable(map(step_batches, range(6)))
    for number, parts in enumerate(boundaries):
        if number and saved is None:
            assert engine.repartition(parts)["from"] == boundaries[number - 1]
        elif number:
            engine.save_checkpoint(saved, tag=str(number))
            engine.destroy()
            engine = make(schedule, stages, num_hidden_layers=6, partition=parts)
            engine.load_checkpoint(saved, tag=str(number))
        losses += [engine.train_batch(iter(list(islice(data, MICRO_BATCHES)))) for _ in range(2)]
    engine.flush()
    weights = {engine.module.state_name(name): p.detach().clone() for name, p in engine.module.named_parameters()}
    found = [loss.item() for loss in losses], weights
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("schedule", "boundaries"),
    [({**MULTI, "optimizer_owners": "mirror"}, PARTS), (ONE, PARTS), ({**MULTI, "directions": 2}, TWO_STAGES)],
    ids=["mirror", "one direction", "between stages of the same devices"],
)
def test_layers_move_between_steps(schedule: Any, boundaries: list[list[int]], tmp_path: Path) -> None:
    """After a drain, with everything that belongs to them: every bit is as after a checkpoint and another engine."""
    ranks = len(boundaries[0]) - 1
    anew, moved = (run_ranks(changes_parts, ranks, schedule, boundaries, saved) for saved in (str(tmp_path), None))
    for (losses, weights), (own_losses, own_weights) in zip(anew, moved, strict=True):
        assert own_losses == losses
        assert own_weights.keys() == weights.keys()
        assert all(torch.equal(weights[name], own_weights[name]) for name in weights)


def trains_with(schedule: Any, section: dict[str, Any], flushes: list[int], steps: int = 6) -> tuple[Any, Any]:
    """Some steps, flushed after some of them, with another part of the section: losses, and weights by name."""
    import paceline

    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES,
        paceline={"pipeline": {"stages": 2, "partition": "uniform", "schedule": schedule}, **section},
    )
    engine, *_ = paceline.initialize(model=model_config(tie_word_embeddings=False), config=config)
    losses = []
    for step in range(steps):
        losses.append(engine.train_batch(iter(step_batches(step))))
        if step in flushes:
            engine.flush()
    engine.flush()
    weights = {engine.module.state_name(name): p.detach().clone() for name, p in engine.module.named_parameters()}
    found = [loss.item() for loss in losses], weights
    engine.finish_averaging()
    engine.destroy()
    return found


def test_natural_gradients_of_flushed_steps_are_those_of_1f1b() -> None:
    section = {"natural_gradient": {}}
    plain = run_ranks(trains_with, 2, "1f1b", section, [], 3)
    flushed = run_ranks(trains_with, 2, ONE, section, [0, 1, 2], 3)
    for (losses, weights), (own_losses, own_weights) in zip(plain, flushed, strict=True):
        assert own_losses == pytest.approx(losses, rel=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(own_weights[name], weight, rtol=1e-5, atol=1e-7, msg=name)


def test_natural_gradients_of_late_backwards() -> None:
    """Without a flush they train, and otherwise than ordinary ones."""
    with_it, without = (run_ranks(trains_with, 2, MULTI, section, [], 3) for section in ({"natural_gradient": {}}, {}))
    assert all(torch.isfinite(weight).all() for _, weights in with_it for weight in weights.values())
    assert with_it[0][0] != without[0][0]


@pytest.mark.parametrize("schedule", [ONE, MULTI], ids=["one direction", "directions"])
def test_an_average_drains_what_is_under_way(schedule: Any) -> None:
    """One island's average changes nothing: the run is that which is flushed where the rounds are."""
    tokens = sum(int(batch["attention_mask"].sum()) for batch in step_batches(0))
    with lighthouses(1) as (address,):
        section = {"averaging": {"lighthouse": address, "every_tokens": tokens, "scale_learning_rate": False}}
        averaged = run_ranks(trains_with, 2, schedule, section, [], env={"PACELINE_ISLAND": "0"})
    flushed = run_ranks(trains_with, 2, schedule, {}, rounds_of(tokens))
    for (losses, weights), (own_losses, own_weights) in zip(flushed, averaged, strict=True):
        assert own_losses == losses
        assert all(torch.equal(own_weights[name], weight) for name, weight in weights.items())


def rounds_of(every_tokens: int) -> list[int]:
    """Steps after which a round is due."""
    found, tokens, due = [], 0, every_tokens
    for step in range(6):
        tokens += sum(int(batch["attention_mask"].sum()) for batch in step_batches(step))
        if tokens >= due:
            found.append(step)
            due += every_tokens
    return found


# -- the main job --------------------------------------------------------------------------------------------------


def job(output: Path, **changes: Any) -> list[str]:
    config = output.with_suffix(".json")
    config.write_text(json.dumps({"paceline": {"pipeline": {"stages": 2, "schedule": {**MULTI, "directions": 2}}}}))
    settings = {**TINY, "gradient_accumulation_steps": 4, "save_steps": 3, "eval_strategy": "no", "logging_steps": 1}
    return flags(**{**settings, "max_steps": 6, "output_dir": output, "deepspeed": config, **changes})


def is_killed_after(argv: list[str], steps: int) -> tuple[int, str]:
    """Rank 1 dies somewhere in the step after that, or before the next one. The first checkpoint is written by then."""
    if os.environ["RANK"] == "1":
        from paceline.runtime.engine import PacelineEngine

        saved, train_batch = Path(argv[argv.index("--output_dir") + 1]) / "checkpoint-3", PacelineEngine.train_batch

        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def train_until_killed(engine: Any, *args: Any, **options: Any) -> Any:
            if engine.global_steps == steps:
                while not saved.exists():  # its disk may be slow
                    time.sleep(0.01)
                threading.Timer(random.Random(steps).random() * 0.05, die).start()
            if engine.global_steps > steps:
                die()
            return train_batch(engine, *args, **options)

        PacelineEngine.train_batch = train_until_killed  # type: ignore[method-assign]
    return finetune(argv)


def end_of(function: Any, world_size: int, *args: Any) -> Ended:
    running = Running(function, world_size, *args)
    try:
        return running.end()
    finally:
        running.kill()


def model_files(output: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(output.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def test_a_killed_job_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """From its last checkpoint, which is between two updates: no gradient is lost or counted twice."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for code, errors in run_ranks(finetune, 2, job(whole)):
        assert code == 0, errors
    told = json.loads((whole / "summary.json").read_text())["ranks"]
    assert all(rank["compute_s"] > 0 for rank in told)
    assert sum(rank["communication_s"] + rank["idle_s"] for rank in told) > 0, "the second waits for its first input"
    for rank in told:
        assert rank["holds"].count(" M parameters)") == 2
        assert "embedding" in rank["holds"]
        assert "head" in rank["holds"]
    ended = end_of(is_killed_after, 2, job(parts), 4)
    assert ended.codes[1] == -signal.SIGKILL
    assert not (parts / "model.safetensors").exists()
    for code, errors in run_ranks(finetune, 2, job(parts, resume_from_checkpoint="true")):
        assert code == 0, errors
    wanted, found = model_files(whole), model_files(parts)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def loses_a_rank() -> None:
    from paceline.supervise.lifetime import end_process
    from paceline.supervise.watch import WATCH

    engine = make(MULTI)
    data = chain.from_iterable(map(step_batches, range(20)))
    try:
        for step in range(20):
            if step == 3 and engine.global_rank == 2:
                accident("is killed")
            engine.train_batch(data)
    except Exception as error:
        end_process(WATCH.fail(error).code)
    end_process(0)


def test_a_lost_rank_is_named_once() -> None:
    ended = end_of(loses_a_rank, 4)
    assert len(ended.causes) == 1, "\n".join(ended.outputs)
    assert "rank 2 is gone" in ended.causes[0]
    assert ended.codes == [1, 1, -9, 1]
