"""Wrong input stops every rank, soon, with a non-zero code and one line that names value, rule and remedy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from paceline.planning.candidates import Candidate
from support.jobs import (
    LAYERS,
    MICRO_BATCHES,
    TINY,
    ds_config,
    finetune,
    finetune_as_a_process,
    flags,
    model_config,
    step_batches,
)
from support.ranks import RankError, RankTimeout, run_ranks


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def section(**pipeline: Any) -> dict[str, Any]:
    return {"paceline": {"pipeline": pipeline}}


CASES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "stages that do not divide the ranks": (
        {},
        section(stages=3),
        r"paceline\.pipeline\.stages is 3 and there are 2 ranks: stages must divide the ranks; write one of \[1, 2\]",
    ),
    "more stages than layers": (
        {"config_overrides": "hidden_size=32,intermediate_size=64,num_hidden_layers=1,num_attention_heads=4"},
        section(stages=2),
        r"paceline\.pipeline\.stages is 2 and the model has 1 decoder layers: every stage needs one",
    ),
    "batch size that does not divide": (
        {},
        {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, **section(stages=2)},
        r"train_batch_size is 9: it must be a multiple of 2 .*; write 10",
    ),
    "unknown key": ({}, section(stage=2), r"paceline\.pipeline\.stage.*stages"),
    "ZeRO-2": ({}, {"zero_optimization": {"stage": 2}, **section(stages=2)}, r"zero_optimization\.stage is 2.*write 1"),
    "boundaries that do not fit": (
        {},
        section(stages=2, partition=[0, 3, 9]),
        r"\[0, 3, 9\].*must end at 6, the number of items \(embedding, 4 decoder layers, head\)",
    ),
    "JSON against flag": (
        {"learning_rate": 0.5},
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, **section(stages=2)},
        r"optimizer\.params\.lr is 0\.1 in the JSON and --learning_rate on the command line makes it 0\.5",
    ),
    "missing file": ({"train_file": "nowhere.txt"}, None, r"--train_file nowhere\.txt.*does not exist"),
    "missing JSON": ({"deepspeed": "nowhere.json"}, None, r"--deepspeed nowhere\.json.*does not exist"),
    "data set without the column": (
        {"text_column": "story"},
        None,
        r"there is no column 'story' of strings; the columns are text",
    ),
    "unsupported model": (
        {"model_type": "bert", "config_overrides": "num_hidden_layers=2"},
        None,
        r"bert.*cannot be a pipeline",
    ),
    "model that does not exist": (
        {"model_name_or_path": "no/such-model", "train_file": __file__},
        None,
        r"--model_name_or_path no/such-model",
    ),
    "checkpoint without data": ({"model_name_or_path": "no/such-model"}, None, r"add --dataset_name or --train_file"),
    "unknown flag": ({"learning_rates": 1}, None, r"learning_rates.*learning_rate"),
    "less data than a batch": (
        {"max_train_samples": 3},
        section(stages=2),
        r"3 training samples: less than one global batch.*= 16\. Remedy",
    ),
    "packed rows of flash attention in micro-batches of several sizes": (
        {"packing": True, "attn_implementation": "flash_attention_2"},
        section(stages=2, schedule={"type": "adaptive", "micro_batch_sizes": [1, 2]}),
        r"micro_batch_sizes is \[1, 2\] with --packing: flash_attention_2 keeps packed samples apart in .*one row only",
    ),
    "block longer than the model": ({"block_size": 128}, None, r"--block_size 128: the model has 64 positions"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line(case: str, tmp_path: Path) -> None:
    changes, ds_config, message = CASES[case]
    values = {**TINY, "output_dir": tmp_path / "model", **changes}
    if ds_config is not None:
        values["deepspeed"] = write(tmp_path / "ds.json", ds_config)
    if "model_name_or_path" in changes:
        values = {k: v for k, v in values.items() if k not in ("model_type", "config_overrides")}
    ranks = run_ranks(finetune, 2, flags(**values))
    for code, errors in ranks:
        assert code == 2, errors
        assert "Traceback" not in errors
    lines = [line for line in ranks[0][1].splitlines() if "[paceline]" not in line and line.strip()]
    lines = [line for line in lines if line.startswith("paceline")]
    assert len(lines) == 1, ranks[0][1]
    assert re.search(message, lines[0]), lines[0]
    assert not re.search(message, ranks[1][1]), "told twice"


def test_error_on_one_rank_stops_all(tmp_path: Path) -> None:
    text = write(tmp_path / "text.jsonl", '{"text": "to be"}\n' * 2000)
    table = write(tmp_path / "table.jsonl", '{"story": 1}\n' * 2000)

    ranks = run_ranks(outcome_on_rank_files, 2, flags(**TINY, output_dir=tmp_path / "m"), [str(text), str(table)])
    assert [code for code, _ in ranks] == [2, 2]
    assert "there is no column of strings" in ranks[0][1] + ranks[1][1]


def outcome_on_rank_files(argv: list[str], files: list[str]) -> tuple[int, str]:
    return finetune([*argv, "--train_file", files[int(os.environ["RANK"])]])


def test_torn_checkpoint_stops_all(tmp_path: Path) -> None:
    """A shard that was copied in part."""
    start = tmp_path / "start"
    argv = flags(**TINY | {"max_steps": 1}, max_shard_size="20KB", output_dir=start)
    assert run_ranks(finetune, 1, argv)[0][0] == 0
    shard = sorted(start.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-8])
    values = {k: v for k, v in TINY.items() if k not in ("model_type", "config_overrides")}
    text = write(tmp_path / "text.txt", "to be or not to be\n" * 4000)
    values |= {"gradient_accumulation_steps": 8, "model_name_or_path": start, "train_file": text}
    argv = flags(**values, output_dir=tmp_path / "m")
    ranks = run_ranks(finetune, 2, argv)
    assert [code for code, _ in ranks] == [1, 1]
    told = f"{start}: the weights cannot be loaded: {shard.name} is incomplete or damaged (SafetensorError"
    assert told in ranks[0][1]


def test_processes_end_with_the_status(tmp_path: Path) -> None:
    """By which a launcher knows it, and nobody is left hanging."""
    ds_config = write(tmp_path / "ds.json", section(stages=3))
    argv = flags(**TINY, deepspeed=ds_config, output_dir=tmp_path / "m")
    with pytest.raises(RankError, match=r"died with exit status 2"):
        run_ranks(finetune_as_a_process, 2, argv)


def train_until_data_ends(stages: int, batches: int) -> list[str]:
    """Own loop: an iterator that ends in the middle of a step, on every rank the same exception."""
    import paceline

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(stages))
    data = iter(step_batches(0)[:batches])
    seen = []
    try:
        while True:
            engine.train_batch(data)
            seen.append("step")
    except StopIteration as stop:
        seen.append(str(stop))
    wrongs = (
        {"input_ids": [[1, 2]]},
        {"input_ids": [[1, 2]], "labels": [[1, 2, 3]]},
        {"input_ids": [[1, 97]], "labels": [[1, 97]]},
        {"input_ids": [[1, 2]], "labels": [[1, 2]], "token_type_ids": [[0, 0]]},
        {"input_ids": [[1, 2]], "labels": [[1, -1]]},
        {"input_ids": [[1, 2]], "labels": [[1, 97]]},
        {"input_ids": [[], []], "labels": [[], []]},
    )
    for wrong in wrongs:
        try:
            engine.train_batch(iter([wrong] * 4) if engine.stage_id == 0 else iter(step_batches(0)))
        except ValueError as error:
            seen.append(str(error))
    return seen


def calls_with_other_things() -> list[str]:
    import paceline
    from paceline.schedules import asynchronous

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(1))
    told = []
    calls = (
        lambda: engine.train_batch(step_batches(0)),
        lambda: engine.eval_batch(step_batches(0)),
        lambda: engine.set_schedule("gpipe"),
        lambda: engine.set_schedule(asynchronous.one_direction(1, 4)),
        lambda: engine.save_16bit_model("."),
        engine.module_state_dict,
        engine.offload_states,
    )
    for call in calls:
        with pytest.raises(TypeError) as error:
            call()
        told.append(str(error.value))
    return told


def test_calls_with_something_else_say_what_to_give() -> None:
    [(data, evaluated, schedule, stream, saved, state_dict, offloaded)] = run_ranks(calls_with_other_things, 1)
    assert data == "the data is a list: give an iterator over micro-batches, iter(...), made once for all steps."
    assert evaluated == data
    assert "paceline.export(engine.module, directory, engine.control)" in saved
    assert "engine.module.state_dict() for the layers of this rank" in state_dict
    assert "save a checkpoint, call engine.destroy()" in offloaded
    assert schedule == "set_schedule('gpipe'): give a schedule, paceline.schedules.make('gpipe', 1, 4)."
    assert stream.startswith("set_schedule('one_direction'): that has no flush, and an engine is made for it: write it")


def evaluated_otherwise() -> tuple[list[str], Any, float]:
    """Messages about other reductions, on every rank; the losses without one; and their mean."""
    import paceline

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(2))
    told = []
    for keys in ({"reduce_output": "sum"}, {"reduce_output": None}):
        with pytest.raises(ValueError, match="reduce_output is") as error:
            engine.eval_batch(iter(step_batches(0)), **keys)
        told.append(str(error.value))
    losses = engine.eval_batch(iter(step_batches(0)), reduce_output=None, bcast_loss=False)
    return told, losses and [loss.item() for loss in losses], engine.eval_batch(iter(step_batches(0))).item()


def test_other_reductions_of_an_evaluation() -> None:
    """The first stage does not wait for a loss that the last one cannot give."""
    (first_told, nothing, _), (told, losses, mean) = run_ranks(evaluated_otherwise, 2)
    assert first_told == told
    assert "is 'sum': it must be \"avg\"" in told[0]
    assert "give bcast_loss=False" in told[1]
    assert nothing is None
    assert len(losses) == 4
    assert sum(losses) / 4 == pytest.approx(mean, rel=1e-6)


def engine_with(schedule: Any) -> Any:
    import paceline

    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES)
    config["paceline"] = {"pipeline": {"stages": 2, "schedule": schedule}}
    return paceline.initialize(model=model_config("llama", tie_word_embeddings=False), config=config)[0]


def refused_batch_size(schedule: Any) -> tuple[str, Any]:
    engine = engine_with(schedule)
    with pytest.raises(ValueError, match="cannot become 6") as error:
        engine.set_train_batch_size(6)
    engine.train_batch(iter(step_batches(0)))
    return str(error.value), (engine.train_batch_size(), engine.micro_batches, engine.replica_micro_batches)


STEPS = 3
"""Before another batch size is set, and as many after it."""

SIZES = {"type": "adaptive", "micro_batch_sizes": [1, 2, 4]}


def test_a_batch_size_that_the_schedule_cannot_have_changes_nothing() -> None:
    for schedule, told in (
        (
            "interleaved",
            'steps would have 3 micro-batches, and the schedule "interleaved" of 2 stages takes at least 2',
        ),
        (SIZES, "paceline.pipeline.schedule.micro_batch_sizes is [1, 2, 4]: 4 must divide the 6 samples"),
    ):
        for message, state in run_ranks(refused_batch_size, 2, schedule):
            assert message.startswith(f"train_batch_size cannot become 6: {told}"), message
            assert state == (2 * MICRO_BATCHES, MICRO_BATCHES, (MICRO_BATCHES,))


def batch_sizes_of_smaller_micro_batches() -> tuple[str, int, float]:
    engine = engine_with("interleaved")
    engine.set_train_micro_batch_size(1)
    with pytest.raises(ValueError, match="cannot become 3") as error:
        engine.set_train_batch_size(3)
    engine.set_train_batch_size(6)
    rows = [{name: rows[:1] for name, rows in batch.items()} for batch in step_batches(0)[:6]]
    return str(error.value), engine.micro_batches, engine.train_batch(iter(rows)).item()


def test_a_batch_size_after_another_micro_batch_size_is_checked_by_that() -> None:
    first, second = run_ranks(batch_sizes_of_smaller_micro_batches, 2)
    assert first == second
    message, micro_batches, loss = first
    assert message.startswith("train_batch_size cannot become 3: steps would have 3 micro-batches"), message
    assert micro_batches == 6
    assert loss > 0


def other_batch_size(schedule: Any, running: Any, num_micro_batches: int) -> tuple[list[str], list[float]]:
    """The tuner has chosen ``running`` when another batch size is set, and goes on to plan after each step."""
    engine = engine_with(schedule | {"retune_every": 1})
    tuner = next(actuator for actuator in engine.controller._actuators if hasattr(actuator, "run_again"))
    names, losses = [], []
    for step in range(2 * STEPS):
        if step == STEPS:
            tuner.apply(running)
            names.append(engine.schedule.name)
            engine.set_train_batch_size(2 * num_micro_batches)
            names.append(engine.schedule.name)
        batches = step_batches(step)[: MICRO_BATCHES if step < STEPS else num_micro_batches]
        losses.append(engine.train_batch(iter(batches)).item())
    return names, losses


def test_the_tuner_follows_another_batch_size() -> None:
    """Its choice of before does not exist for three micro-batches, or is cut otherwise."""
    in_v = run_ranks(other_batch_size, 2, {"type": "adaptive", "chunks": 2}, Candidate(2, family="dualpipev"), 3)
    in_line = run_ranks(other_batch_size, 2, {"type": "adaptive"}, Candidate(2, k=2), 3)
    assert {tuple(names) for names, _ in in_v} == {("dualpipev, micro-batch 2", "zbv, micro-batch 2")}
    assert {tuple(names) for names, _ in in_line} == {("kfkb k=2, micro-batch 2",) * 2}
    assert [losses for _, losses in in_v] == [losses for _, losses in in_line]


def with_a_stream() -> str:
    import paceline

    stream = Dataset.from_dict({"input_ids": [[1, 2]] * 8}).to_iterable_dataset()
    with pytest.raises(ValueError, match="training_data is a IterableDataset") as error:
        paceline.initialize(model=model_config(), config=ds_config(1), training_data=stream)
    return str(error.value)


def test_a_stream_is_no_training_data() -> None:
    assert "iter(DataLoader(data" in run_ranks(with_a_stream, 1)[0]


def train_on_different_data(stages: int) -> str:
    import paceline

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(stages))
    try:  # the same shapes and as many labels, but not the same tokens
        engine.train_batch(iter(step_batches(1 if engine.is_last_stage() else 0, "plain")))
    except ValueError as error:
        return str(error)
    return "no error"


def test_ends_of_a_pipeline_that_see_different_data_are_told() -> None:
    told = run_ranks(train_on_different_data, 4, 2)
    assert len(set(told)) == 1
    assert told[0].startswith("the first and the last stage see different data at step 0: give both the same iterator")


def train_and_evaluate_on_what_is_too_long(stages: int) -> list[str]:
    import paceline

    engine, *_ = paceline.initialize(model=model_config("gpt2", n_positions=8), config=ds_config(stages))
    told = []
    for run in (engine.train_batch, engine.eval_batch):
        with pytest.raises(ValueError, match="truncate samples to 8 tokens") as error:
            run(iter(step_batches(0)))
        told.append(str(error.value))
    return told


def test_samples_longer_than_a_table_of_positions_stop_every_stage() -> None:
    """Before any of them computes: on a GPU the index would end the process."""
    for told in run_ranks(train_and_evaluate_on_what_is_too_long, 2, 2):
        assert [text[:75] for text in told] == [
            "a micro-batch has a sample of 16 tokens, the model has 8 positions: truncat"
        ] * 2


def test_data_that_ends_or_does_not_fit_stops_every_stage() -> None:
    ranks = run_ranks(train_until_data_ends, 3, 3, 6)
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0][:2] == ["step", "the data ended after 2 of a step's 4 micro-batches"]
    assert "no 'labels': add it" in ranks[0][2]
    assert "'labels' has shape [1, 3], input_ids [1, 2]" in ranks[0][3]
    assert "has the token id 97, the model's vocabulary is 0 to 96" in ranks[0][4]
    assert "has ['token_type_ids'], which a causal-LM pipeline does not pass on" in ranks[0][5]
    assert "has the label -1, the model's vocabulary is 0 to 96: give token ids, and -100" in ranks[0][6]
    assert "has the label 97, the model's vocabulary is 0 to 96" in ranks[0][7]
    assert "'input_ids' has shape [2, 0]: leave out micro-batches without a token" in ranks[0][8]


def operations_after_refusals() -> list[str]:
    import paceline
    from paceline.supervise.watch import WATCH

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(2))
    found = []
    for refused in (
        lambda: engine.train_batch(iter(step_batches(0)[:3])),
        lambda: engine.eval_batch(iter(step_batches(0)[:3])),
        lambda: engine.repartition([0, 2, LAYERS + 2], memory_bytes=10),
    ):
        with pytest.raises((StopIteration, ValueError)):
            refused()
        found.append(WATCH.operation)
    return found


def test_who_catches_an_error_of_all_ranks_may_take_any_time() -> None:
    """The watch ended jobs that did something else for longer than its limit after their data had ended."""
    assert run_ranks(operations_after_refusals, 2) == [[""] * 3] * 2


def calls_on_rank_0_first(folder: str) -> list[tuple[str, str]]:
    """Warnings, and what the watch knows when they come. Rank 1 comes after them."""
    import logging

    import paceline
    from paceline.supervise import expected
    from paceline.supervise.watch import WATCH

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(2))
    found: list[tuple[str, str]] = []

    def note(record: logging.LogRecord) -> bool:
        if "has waited" in record.getMessage():
            found.append((WATCH.operation, record.getMessage()))
            Path(folder, f"told {len(found)}").touch()
        return True

    expected.logger.addFilter(note)
    expected.logger.setLevel(logging.WARNING)
    for number, call in enumerate(
        (
            lambda: paceline.export(engine.module, f"{folder}/model", engine.control),
            lambda: engine.save_checkpoint(f"{folder}/checkpoints"),
            lambda: engine.repartition(engine.module.parts),
            lambda: engine.place_experts({}),
        ),
        1,
    ):
        expected.REMIND_AFTER_S = 0.1
        while engine.global_rank == 1 and not Path(folder, f"told {number}").exists():
            time.sleep(0.02)
        call()
        expected.REMIND_AFTER_S = 1000.0
        call()
    return found


def test_a_call_on_rank_0_alone_is_told(tmp_path: Path) -> None:
    """The others do not come: a warning says what to do, and the watch knows what is waited for."""
    found, elsewhere = run_ranks(calls_on_rank_0_first, 2, str(tmp_path))
    calls = ["saving the model", "saving a checkpoint", "moving layers", "placing experts"]
    advice = "has waited 0.1 s for other ranks: call it on all ranks, not on rank 0 alone."
    assert found == [(call, f"{call} {advice}") for call in calls]
    assert elsewhere == []


def dies_in_training(stages: int) -> None:
    """Rank 1 is killed in the middle of training."""
    import signal

    import paceline

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(stages))
    for step in range(3):
        if step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_batch(iter(step_batches(step)))


def loses_a_peer() -> str:
    """Rank 1 closes its connections, as the kernel does for a rank that is killed, and lives to let rank 0 tell."""
    import paceline
    from paceline.comm.control import PeerError

    engine, *_ = paceline.initialize(model=model_config(), config=ds_config(2))
    engine.train_batch(iter(step_batches(0)))
    told = ""
    if engine.stage_id == 1:
        time.sleep(1)  # rank 0 is waiting by now
        for link in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as connection:
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                    connection.shutdown(socket.SHUT_RDWR)
        time.sleep(4)
    else:
        try:
            engine.train_batch(iter(step_batches(1)))
        except PeerError as error:
            told = str(error)
    torch.distributed.destroy_process_group()
    return told


@pytest.mark.skipif(sys.platform != "linux", reason="lists a process's sockets in /proc")
def test_a_lost_peer_is_named_with_the_step() -> None:
    assert re.search(r"lost another rank at step 1 while", run_ranks(loses_a_peer, 2)[0])


def test_killed_rank_ends_the_others() -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(dies_in_training, 3, 3)
    assert not isinstance(raised.value, RankTimeout)
