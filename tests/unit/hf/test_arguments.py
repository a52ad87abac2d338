"""The command line: what parses, what is explicit, what is refused and how."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from transformers import LlamaConfig, TrainingArguments

from paceline.hf.arguments import DataArguments, ModelArguments, TrainArguments, _remedy, parse
from paceline.hf.other_flags import ELSEWHERE, VALUE_REMEDIES


def test_defaults_are_those_of_hugging_face() -> None:
    model_args, data_args, train_args, explicit = parse([])
    assert explicit == set()
    assert (model_args, data_args, train_args) == (ModelArguments(), DataArguments(), TrainArguments())
    theirs = {f.name: f.default for f in fields(TrainingArguments)}
    same = "seed max_steps num_train_epochs per_device_train_batch_size per_device_eval_batch_size learning_rate"
    same += " weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type warmup_steps eval_steps"
    same += " fp16 ddp_timeout"
    for name in same.split():
        assert getattr(train_args, name) == theirs[name], name


def test_explicit_names_even_where_the_value_is_the_default() -> None:
    argv = ["--local_rank=3", "--learning_rate", "5e-5", "--bf16", "--no_keep_linebreaks"]
    _, data_args, train_args, explicit = parse(argv)
    assert explicit == {"learning_rate", "bf16", "keep_linebreaks"}
    assert (train_args.local_rank, train_args.learning_rate, train_args.bf16) == (3, 5e-5, True)
    assert not data_args.keep_linebreaks


def test_dashes_for_underscores() -> None:
    assert parse(["--max-steps=7", "--local-rank=1"])[2].max_steps == 7


def test_json_file(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"learning_rate": 1e-4, "bf16": True, "sample_prompt": "--x", "eval_steps": None}))
    for argv in ([str(path)], ["--local_rank=2", str(path)]):
        _, _, train_args, explicit = parse(argv)
        assert explicit == {"learning_rate", "bf16", "sample_prompt"}
        assert (train_args.learning_rate, train_args.bf16, train_args.sample_prompt) == (1e-4, True, "--x")
    assert train_args.local_rank == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{'a': 1}", "must be strict JSON"),
        ("[1]", "must be one object with flags as keys, but is a list"),
        ('{"seed": [1]}', r"seed must be a number, a string, true, false or null, but is \[1\]"),
    ],
)
def test_json_file_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "args.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        parse([str(path)])


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--lerning_rate", "1"], "unknown flag --lerning_rate: did you mean --learning_rate?"),
        (["--learning-rat=1"], "unknown flag --learning-rat: did you mean --learning_rate?"),
        (["--max_step", "1"], "unknown flag --max_step: did you mean --max_steps?"),
        (["--qqqqqq"], "unknown flag --qqqqqq: see --help"),
        (["--do_train"], "unknown flag --do_train: leave it out, training is what this program does"),
        (
            ["--logging_dir", "a", "--hub_model_id", "b"],
            "unknown flag --logging_dir: set TENSORBOARD_LOGGING_DIR in the environment; "
            "unknown flag --hub_model_id: leave it out, upload --output_dir afterwards with `hf upload`",
        ),
        (
            ["--torch_compile", "true"],
            'unknown flag --torch_compile: leave it out, "compile": true in "paceline"."pipeline" of the DeepSpeed '
            "JSON compiles layers",
        ),
        (["--full_determinism"], "unknown flag --full_determinism: see --help"),
        (["corpus.txt"], "unexpected argument 'corpus.txt'; every value follows its --flag"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
    ],
)
def test_unknown_is_one_line(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"paceline.launch.finetune: {line}\n"


def test_flags_of_the_trainer_are_not_mistaken_for_ours() -> None:
    """None gets the name of another flag as its remedy, and what is said of one is not about one of ours."""
    ours = {f.name for group in (ModelArguments, DataArguments, TrainArguments) for f in fields(group)}
    theirs = {f.name for f in fields(TrainingArguments)} - ours
    assert not [name for name in theirs if "did you mean" in _remedy(f"--{name}", sorted(ours))]
    assert not ours & ELSEWHERE.keys()
    assert ours >= VALUE_REMEDIES.keys()


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--save_steps", "0.1"], "a whole number of steps; a share of the training is not taken"),
        (["--save_strategy", "best"], "steps with --save_steps; `paceline export` takes the checkpoint that you find"),
        (["--resume_from_checkpoint", "--bf16"], "true for the last checkpoint in --output_dir, auto for that or a"),
    ],
)
def test_values_of_the_trainer_have_a_remedy(argv: list[str], remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(argv)
    error = capsys.readouterr().err
    assert f"Remedy: {remedy}" in error
    assert error.count("\n") == 1


def test_trackers_are_those_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["tensorboard", "mlflow"])
    assert parse([])[2].report_to == parse(["--report_to", "none"])[2].report_to == []
    assert parse(["--report_to", "all"])[2].report_to == ["tensorboard", "mlflow"]
    train_args = parse(["--report_to", "tensorboard", "mlflow", "--run_name", "first"])[2]
    assert (train_args.report_to, train_args.run_name) == (["tensorboard", "mlflow"], "first")
    for name, message in (
        ("wandb", "--report_to wandb: its package is not installed. Remedy: pip install wandb, or leave it out."),
        ("tensorbord", "is not a tracker that transformers knows. Remedy: did you mean tensorboard."),
        ("paper", "Remedy: choose from none, all, azure_ml,"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            parse(["--report_to", name])


def test_a_model_in_parts_is_not_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["wandb"])
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    with pytest.raises(ValueError, match=r"WANDB_LOG_MODEL is end, and no rank has the whole .* Remedy: unset it"):
        parse(["--report_to", "wandb"])


def test_samples_need_a_line_to_complete() -> None:
    with pytest.raises(ValueError, match=r"--sample_every 5: there is no line to complete\. Remedy: add --sample"):
        parse(["--sample_every", "5"])
    assert parse(["--sample_every", "5", "--sample_prompt", "x"])[2].sample_every == 5


@pytest.mark.parametrize("flag", ["model_name_or_path", "config_name"])
def test_adapters_are_no_model(flag: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(ValueError, match=f"--{flag} {tmp_path}: holds PEFT adapters of some/base, not a model. Remedy"):
        parse([f"--{flag}", str(tmp_path), "--dataset_name", "some/data"])
    parse(["--model_name_or_path", "some/model", "--tokenizer_name", str(tmp_path), "--dataset_name", "some/data"])


def test_a_checkpoint_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("manifest.json", "meta.pt", "model/config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        ValueError, match=f"{tmp_path}: is a checkpoint, not a model. .*`paceline export {tmp_path} DIR`"
    ):
        parse(["--model_name_or_path", str(tmp_path), "--dataset_name", "some/data"])


def test_a_wrong_choice_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--eval_strategy", "often"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "steps" in error


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--config_overrides" in said
    assert "--no-keep-linebreaks Turn --keep_linebreaks off." in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset_name", "a", "--train_file", "b.txt"], "cannot stand with --dataset_name a.*leave one"),
        (
            ["--train_file", "missing.txt"],
            "--train_file missing.txt: must be a file, but does not exist. Remedy: check",
        ),
        (["--train_file", "x.xml"], "the extension must be one of csv, json, jsonl, parquet, txt, py. Remedy"),
        (["--validation_file", __file__], "needs --train_file"),
        (["--dataset_config_name", "x"], "needs --dataset_name"),
        (["--deepspeed", "missing.json"], "--deepspeed missing.json: must be a file"),
        (["--output_dir", __file__], "must be a directory, but is a file"),
        (["--output_dir", ""], "the name of a directory is empty"),
        (["--block_size", "1"], "--block_size 1: must be at least 2 and finite. Remedy"),
        (["--max_train_samples", "-5"], "--max_train_samples -5: must be at least 1"),
        (["--validation_split_percentage", "100"], "must be at least 0 and less than 100"),
        (["--per_device_train_batch_size", "0"], "must be at least 1"),
        (["--gradient_accumulation_steps", "0"], "must be at least 1"),
        (["--learning_rate", "nan"], "--learning_rate nan: must be at least 0 and finite"),
        (["--learning_rate", "inf"], "must be at least 0 and finite"),
        (["--adam_beta2", "1"], "less than 1"),
        (["--adam_epsilon", "0"], "must be more than 0"),
        (["--num_train_epochs", "0"], "must be more than 0"),
        (["--max_steps", "0"], "must be at least 1, or -1"),
        (["--fp16", "--bf16"], "training has one precision"),
        (["--warmup_steps", "1.5"], "whole number"),
        (["--warmup_steps", "5", "--warmup_ratio", "0.1"], "cannot stand with --warmup_ratio"),
        (["--eval_steps", "5", "--eval_strategy", "no"], "cannot stand with --eval_strategy no"),
        (["--max_shard_size", "5"], "--max_shard_size 5: must be a whole number above 0 with KB, MB, GB or TB"),
        (
            ["--config_overrides", "a=1", "--model_name_or_path", "m"],
            "only models from scratch.*--model_name_or_path m",
        ),
        (["--config_overrides", "a=1,b"], "must be key=value pairs with commas between, but has 'b'"),
    ],
)
def test_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(argv)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("no", None)),
        ({"eval_steps": 5}, ("steps", 5)),
        ({"eval_strategy": "steps"}, ("steps", 10)),
        ({"eval_strategy": "epoch"}, ("epoch", None)),
    ],
)
def test_eval_strategy(options: dict[str, Any], expected: tuple[str, int | None]) -> None:
    args = TrainArguments(**options)
    assert (args.eval_strategy, args.eval_steps) == expected


@pytest.mark.parametrize(("options", "expected"), [({}, 0), ({"warmup_steps": 7}, 7), ({"warmup_steps": 0.1}, 3)])
def test_warmup(options: dict[str, Any], expected: int) -> None:
    assert TrainArguments(**options).num_warmup_steps(25) == expected
    assert TrainArguments(warmup_ratio=0.1).num_warmup_steps(25) == 3


def test_config_overrides() -> None:
    overrides = "hidden_size=64,num_hidden_layers=4,rms_norm_eps=1e-5,tie_word_embeddings=true,hidden_act=gelu"
    config = ModelArguments(config_overrides=overrides).override(LlamaConfig())
    assert (config.hidden_size, config.num_hidden_layers, config.rms_norm_eps) == (64, 4, 1e-5)
    assert (config.tie_word_embeddings, config.hidden_act) == (True, "gelu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("hiden_size=64", "llama configs have no 'hiden_size'. Remedy: did you mean hidden_size?"),
        ("hidden_size=big", "invalid literal for int"),
        ("pad_token_id=1", "only update int, float, bool or string"),
    ],
)
def test_config_overrides_refused(overrides: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelArguments(config_overrides=overrides).override(LlamaConfig())
