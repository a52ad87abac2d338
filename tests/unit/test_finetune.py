"""The command line of the main job, and what it is without flags."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoint import CheckpointError
from paceline.hf.arguments import parse
from paceline.launch.finetune import (
    EMBEDDED_MODEL,
    _command,
    _fail,
    _set_up_logging,
    _train,
    _with_embedded_defaults,
    main,
)


def test_without_flags_the_embedded_model_is_trained() -> None:
    model, data, train, given = parse(_with_embedded_defaults([]))
    assert model.model_type == "llama"
    assert (data.train_file, data.dataset_name) == (None, None)
    assert train.max_steps == int(EMBEDDED_MODEL["max_steps"])
    assert given == set(EMBEDDED_MODEL)


def test_a_flag_replaces_its_default() -> None:
    _, _, train, _ = parse(_with_embedded_defaults(["--max_steps", "3", "--local_rank=1"]))
    assert (train.max_steps, train.local_rank) == (3, 1)
    assert train.learning_rate == float(EMBEDDED_MODEL["learning_rate"])


def test_what_accelerates_config_says_beside_a_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero_stage,mixed_precision")
    parse(["--model_type", "llama"])  # accelerate may leave it from elsewhere
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"accelerate's config has zero_stage, mixed_precision: .*; write"):
        parse(["--model_type", "llama"])


@pytest.mark.parametrize(
    ("flag", "value", "name", "wanted"),
    [
        ("eval_strategy", "no", "eval_steps", None),
        ("num_train_epochs", "1", "max_steps", -1),
        ("warmup_ratio", "0.1", "warmup_steps", 0),
        ("output_dir", "mine", "overwrite_output_dir", False),
    ],
)
def test_a_default_gives_way_to_a_flag_that_it_contradicts(flag: str, value: str, name: str, wanted: object) -> None:
    assert getattr(parse(_with_embedded_defaults([f"--{flag}", value]))[2], name) == wanted


@pytest.mark.parametrize("first", [[], ["--local_rank=0"]])
def test_a_json_that_is_a_flags_value_is_no_arguments_file(first: list[str], tmp_path: Path) -> None:
    ds_config = tmp_path / "ds.json"
    ds_config.write_text("{}")
    model, _, train, _ = parse(_with_embedded_defaults([*first, "--deepspeed", str(ds_config)]))
    assert (model.model_type, train.deepspeed) == ("llama", str(ds_config))


def test_the_json_that_accelerate_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds_config, other = tmp_path / "ds.json", tmp_path / "other.json"
    ds_config.write_text("{}")
    other.write_text("{}")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(ds_config))  # accelerate may leave it from elsewhere
    assert parse(["--model_type", "llama"])[2].deepspeed is None
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert parse(["--model_type", "llama"])[2].deepspeed == str(ds_config)
    assert parse(["--model_type", "llama", "--deepspeed", str(other)])[2].deepspeed == str(other)
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = f"accelerate launch --use_deepspeed --deepspeed_config_file {ds_config} --num_processes 2 --module"
    assert _command(["--seed", "1"]) == f"{command} paceline.launch.finetune --seed 1"


def test_the_precision_that_accelerate_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes with any JSON, and gives way to flags."""
    ds_config = tmp_path / "ds.json"
    ds_config.write_text("{}")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(ds_config))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def precision(*flags: str) -> tuple[bool, bool, bool]:
        _, _, train, given = parse(["--model_type", "llama", *flags])
        return train.bf16, train.fp16, "bf16" in given

    assert precision() == (True, False, True)
    assert precision("--fp16") == (False, True, False)
    assert precision("--bf16", "false") == (False, False, True)
    assert precision("--deepspeed", str(ds_config)) == (True, False, True)
    assert "--mixed_precision bf16 --num_processes 2" in _command([])
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")  # accelerate launch --multi_gpu
    assert precision("--deepspeed", str(ds_config)) == (True, False, True)
    assert _command(["--seed", "1"]).endswith("paceline.launch.finetune --seed 1 --bf16")
    assert _command(["--fp16"]).endswith("paceline.launch.finetune --fp16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert precision() == (False, False, False)


@pytest.mark.parametrize(
    ("argv", "environment", "command"),
    [
        (
            ["--local_rank=0", "--max_steps", "3"],
            {"WORLD_SIZE": "4", "LOCAL_SIZE": "2"},
            "deepspeed --num_nodes 2 --num_gpus 2 --module paceline.launch.finetune --max_steps 3",
        ),
        (
            ["--local_rank=0"],
            {"WORLD_SIZE": "3", "LOCAL_SIZE": "1", "CROSS_SIZE": "2"},  # the other machine has two
            "deepspeed --hostfile HOSTFILE --module paceline.launch.finetune",
        ),
        (
            [],
            {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"},
            "torchrun --nnodes 2 --nproc_per_node 1 -m paceline.launch.finetune",
        ),
        (
            ["--sample_prompt", "to be or"],
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "torchrun --nproc_per_node 2 -m paceline.launch.finetune --sample_prompt 'to be or'",
        ),
        (
            ["--token", "hf_x", "--token=hf_x"],
            {"WORLD_SIZE": "1"},
            "python -m paceline.launch.finetune --token hidden --token=hidden",
        ),
    ],
)
def test_the_command_as_a_report_shows_it(
    argv: list[str], environment: dict[str, str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_SIZE", "CROSS_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _command(argv) == command


def test_the_quickstart_can_be_run_again() -> None:
    train = parse(_with_embedded_defaults([]))[2]
    assert (train.output_dir, train.overwrite_output_dir) == ("runs/quickstart", True)


@pytest.mark.parametrize(
    "argv",
    [
        ["--model_type", "gpt2"],
        ["--model_name_or_path=x"],
        ["--model-name-or-path", "x"],
        ["arguments.json"],
        ["--local_rank=0", "arguments.json"],
    ],
)
def test_a_model_of_ones_own_gets_no_defaults(argv: list[str]) -> None:
    assert _with_embedded_defaults(argv) == argv


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_help_is_said_once(
    local_rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as ended:
        _train(["--help", f"--local_rank={local_rank}"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.count("usage: ") == lines


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ValueError("--x 3: too many"), 2, "--x 3: too many"),
        (FileNotFoundError("no notes.jsonl"), 2, "no notes.jsonl"),
        (CheckpointError("no space left"), 1, "no space left"),
        (KeyError("x"), 1, "KeyError: 'x'"),
    ],
)
def test_exit_codes(
    error: Exception, code: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _fail(0, error) == code
    assert capsys.readouterr().err == f"paceline: error: {told}\n"


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        (("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "RANK, LOCAL_RANK"),
        (("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "LOCAL_RANK"),
    ],
)
def test_a_launcher_that_sets_not_all_variables(
    given: tuple[str, ...], absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
        if name not in given:
            monkeypatch.delenv(name)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr("paceline.launch.finetune.find_spec", lambda name: None)  # of mpi4py
    # Flags that are wrong: were the variables not looked at, these would end it.
    assert main(["--no_such_flag"]) == 2
    rule = f"a launcher of several processes (mpirun, srun) has started this one without {absent}"
    assert capsys.readouterr().err == f"paceline: error: {rule}: start with deepspeed or torchrun, or set them.\n"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RANK": "x"}, "RANK='x', WORLD_SIZE='2'"),
        ({"RANK": "2"}, "RANK must be a whole number from 0 to 1"),  # counted from 1, it would wait for a rank 0
        ({"MASTER_PORT": "node1:29500"}, "MASTER_PORT must be a whole number from 1 to 65535"),
        ({"LOCAL_WORLD_SIZE": "2(x3)"}, "of '2(x3)' ranks on this host (LOCAL_WORLD_SIZE or LOCAL_SIZE)"),  # Slurm's
    ],
)
def test_a_launcher_whose_variables_make_no_job(
    changed: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (values | changed).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert main(["--no_such_flag"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("paceline: error: ")
    assert told in said
    assert "; start the job with `deepspeed` or torchrun" in said


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("paceline")
    before = (logger.handlers[:], logger.propagate, logger.level)
    yield logger
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.mark.parametrize(
    ("level", "rank", "told"),
    [
        (None, 0, "[paceline] info\n[paceline] warning\n[paceline] error\n"),
        (None, 3, "[paceline rank 3] error\n"),
        ("warning", 0, "[paceline] warning\n[paceline] error\n"),
        ("warning", 3, "[paceline rank 3] error\n"),
        ("debug", 3, "".join(f"[paceline rank 3] {kind}\n" for kind in ("debug", "info", "warning", "error"))),
    ],
)
def test_one_rank_says_what_all_could(
    level: str | None,
    rank: int,
    told: str,
    logger: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if level is None:
        monkeypatch.delenv("PACELINE_LOG", raising=False)
    else:
        monkeypatch.setenv("PACELINE_LOG", level)
    _set_up_logging(rank)
    for kind in ("debug", "info", "warning", "error"):
        getattr(logger, kind)(kind)
    assert capsys.readouterr().err == told


def test_a_level_that_nobody_knows(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_LOG", "loud")
    _set_up_logging(0)
    assert logger.level == logging.INFO
    assert "PACELINE_LOG is loud: choose debug, info, warning or error" in capsys.readouterr().err
    monkeypatch.setenv("PACELINE_LOG", "x" * 5000)
    _set_up_logging(0)
    assert len(capsys.readouterr().err) < 300
