"""The ``paceline`` command."""

import errno
import json
import subprocess
import sys

import pytest

import paceline
from paceline.launch.cli import build_parser, main
from paceline.messages import MOST, brief
from paceline.patches.repairs import REPAIRS, repair_deepspeed


@pytest.fixture
def ds_json(tmp_path):
    def write(config):
        path = tmp_path / "ds.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return str(path)

    return write


def test_starts_light():
    heavy = ("torch", "transformers", "deepspeed", "pydantic", "numpy", "packaging")
    code = (
        "import sys, paceline.launch.cli as cli; cli.build_parser().format_help();"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900)
    assert done.stdout.strip() == "[]"


def test_version_and_help(capsys):
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as stop:
            main([flag])
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"paceline {paceline.__version__}\n")
    for command in ("check-config", "check-model", "schema", "patches", "export"):
        assert command in out


def test_without_a_command_all_are_told(capsys):
    assert main([]) == 2
    assert "check-config" in capsys.readouterr().err


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args([])
    assert stop.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_check_config(ds_json, capsys):
    path = ds_json({"paceline": {"pipeline": {"stages": 2}}, "train_batch_size": 16, "gradient_cliping": 1.0})
    assert main(["check-config", path, "--world-size", "4", "--num-layers", "12", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == (
        'paceline: warning: "gradient_cliping" is not a key that DeepSpeed reads; did you mean "gradient_clipping"?\n'
    )
    shown = json.loads(out)
    assert shown["paceline"] == {
        "pipeline": {
            "stages": 2,
            "partition": None,
            "half_layers": False,
            "head_slices": 1,
            "schedule": None,
            "recompute": None,
            "compile": None,
            "boundary": None,
            "unequal_replicas": None,
        },
        "moe": None,
        "natural_gradient": None,
        "max_change": None,
        "averaging": None,
        "report": {"metrics": True, "html": True, "trace_every": None},
    }
    assert shown["resolved"] == {
        "stages": 2,
        "data_parallel": 2,
        "partition": "work",
        "micro_batch_size": 1,
        "micro_batches": 8,
        "train_batch_size": 16,
        "repartition_every": 0,
        "schedule": {"type": "1f1b"},
    }
    assert shown["chosen"]["paceline.pipeline.schedule"] == {"value": "1f1b", "why": "as DeepSpeed has it"}
    assert shown["chosen"]["gradient_accumulation_steps"]["value"] == 8
    assert "auto" in shown


def test_check_config_with_boundaries(ds_json, capsys):
    """They are a list in JSON and a tuple in the section, of which pydantic used to warn."""
    path = ds_json({"paceline": {"pipeline": {"stages": 2, "partition": [0, 3, 6]}}})
    assert main(["check-config", path, *CLUSTER[:2], "--num-layers", "4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown = json.loads(out)
    assert shown["paceline"]["pipeline"]["partition"]["method"] == shown["resolved"]["partition"] == [0, 3, 6]


@pytest.mark.parametrize("name", ["Muon", "muon", "LBFGS"])
def test_check_config_refuses_the_optimizers_that_the_job_refuses(ds_json, capsys, name):
    from paceline.optim.torch_optimizers import torch_class

    path = ds_json({"optimizer": {"type": name}, "paceline": {"pipeline": {"stages": 2}}})
    assert main(["check-config", path]) == 2
    with pytest.raises(ValueError, match="a pipeline cannot use it") as refused:
        torch_class(name)
    assert capsys.readouterr().err == f"paceline: {refused.value}\n"
    assert main(["check-config", ds_json({"optimizer": {"type": name}})]) == 0  # may be for DeepSpeed without pipelines
    assert main(["check-config", ds_json({"optimizer": {"type": name}}), *CLUSTER]) == 2


def test_check_config_takes_stages_that_go_with_the_batch_as_a_run_does(ds_json, capsys):
    """Two stages would be two replicas, among which three micro-batches cannot be shared out."""
    config = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2, "paceline": {"pipeline": {}}}
    assert main(["check-config", ds_json(config), *CLUSTER, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["resolved"]["stages"] == 4
    assert "go with the batch" in shown["chosen"]["paceline.pipeline.stages"]["why"]
    config["paceline"]["pipeline"]["stages"] = 2
    assert main(["check-config", ds_json(config), *CLUSTER]) == 2
    assert "train_batch_size" in capsys.readouterr().err


def test_check_config_looks_at_the_profile(ds_json, capsys):
    path = ds_json({"paceline": {"pipeline": {"partition": {"method": "hetero", "profile": "none.json"}}}})
    assert main(["check-config", path]) == 0  # it may be there where the job runs
    told = "paceline: warning: paceline.pipeline.partition.profile: profile none.json: "
    assert capsys.readouterr().err.startswith(told)


def test_check_config_as_text(ds_json, capsys):
    path = ds_json({"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    assert main(["check-config", path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        '"paceline": {"pipeline": {"stages": null, "partition": null, "half_layers": false, "head_slices": 1, '
        '"schedule": null, '
        '"recompute": null, "compile": null, "boundary": null, "unequal_replicas": null}, '
        '"moe": null, "natural_gradient": null, "max_change": null, "averaging": null, '
        '"report": {"metrics": true, "html": true, "trace_every": null}}',
        "train_batch_size: filled from the command line",
        "optimizer.params.lr: filled from the command line",
    ]
    assert main(["check-config", path, "--world-size", "4", "--num-layers", "12"]) == 0
    out, err = capsys.readouterr()
    assert "paceline: train_batch_size: taken as left out" in err
    assert "stages: 2" in out.splitlines()
    assert 'schedule: {"type": "1f1b"}' in out.splitlines()
    assert "chosen paceline.pipeline.stages = 2: the fewest pipeline stages for 4 ranks and 12 decoder layers" in out


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"paceline": {"pipeline": {"stage": 2}}}, [], 'paceline.pipeline.stage is not a key of this version'),
        ('{"a": 1, "a": 2}', [], 'line 1, column 10: duplicate key "a"'),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8},
            [],
            '"model_type" is a key of a model\'s config, and none is DeepSpeed\'s: give a DeepSpeed JSON (`paceline '
            "plan` writes one); whether the model can be a pipeline, `paceline check-model ",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
            [],
            "scheduler.params.warmup_steps is not a parameter of WarmupLR: write one of warmup_min_lr,",
        ),
        ({}, ["--world-size", "4"], "--world-size and --num-layers belong together"),
        (
            {"paceline": {"pipeline": {"stages": 3}}},
            ["--world-size", "4", "--num-layers", "12"],
            "paceline.pipeline.stages is 3 and there are 4 ranks",
        ),
        (
            {"paceline": {"pipeline": {"schedule": "one_direction"}}, "fp16": {"enabled": True}},
            [],
            'fp16.enabled is true and paceline.pipeline.schedule.type "one_direction": the backwards of two steps',
        ),
        (
            {"paceline": {"moe": {}}, "zero_optimization": {"stage": 3}},
            [],
            "paceline.moe is there and zero_optimization.stage is 3: ",
        ),
    ],
)  # fmt: skip
def test_one_clear_line(ds_json, capsys, config, more, message):
    assert main(["check-config", ds_json(config), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paceline: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0", "'0' is not a whole number of at least 1"),
        ("1048577", "'1048577' is more than 1048576, which is as many as can be planned for"),
        ("9" * 5000, "more than 1048576, which is as many as can be planned for"),
    ],
)
def test_sizes_have_limits(ds_json, capsys, text, rule):
    with pytest.raises(SystemExit) as stop:
        main(["check-config", ds_json({}), "--world-size", text, "--num-layers", "2"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert rule in err
    assert len(err.partition("error: ")[2]) <= MOST + 1


CLUSTER = ["--world-size", "4", "--num-layers", "8"]


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ("[" * 100_000, [], "ds.json: too many brackets inside each other"),
        ('{"a": ' + "9" * 5000 + "}", [], "bring it near 1."),
        (
            {"paceline": {"pipeline": {"x" * 5000: 1}}},
            [],
            'Valid keys of paceline.pipeline: "boundary", "compile", "half_layers", "head_slices", "partition", ',
        ),
        ({"train_batch_size": "x" * 5000}, CLUSTER, "xxx…: it must be a whole number, at least 1; leave the key out"),
        ({"train_batch_size": 2**41}, CLUSTER, f"train_batch_size is {2**41}: it must be at most {2**40}; correct it"),
        ({"train_batch_size": 10**15}, CLUSTER, f"train_batch_size is {10**15}: it must be at most {2**40}; correct"),
        ({"optimizer": {"type": "Adam", "params": "x"}}, CLUSTER, 'optimizer.params is "x": it must be an object'),
        ({"optimizer": {"type": 3}}, CLUSTER, "optimizer.type is 3: it must be a name; correct it, or leave it out."),
    ],
)
def test_what_no_one_means_is_refused_at_once_and_shortly(ds_json, capsys, config, more, message):
    assert main(["check-config", ds_json(config), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert len(err) < MOST + 20


def test_large_batches_are_resolved_at_once(ds_json, capsys):
    assert main(["check-config", ds_json({"train_batch_size": 2**40}), *CLUSTER, "--json"]) == 0
    resolved = json.loads(capsys.readouterr().out)["resolved"]
    assert (resolved["micro_batches"], resolved["micro_batch_size"]) == (8, 2**36)


def test_what_the_terminal_cannot_show(tmp_path):
    """A file whose name is no UTF-8."""
    layer = {"name": "mlp", "loads": [6, 2], "placement": [[0], [1]]}
    (tmp_path / "loads.jsonl").write_text(json.dumps({"step": 1, "steps": 1, "layers": [layer]}) + "\n")
    command = [sys.executable, "-m", "paceline.launch.cli", "loads", "loads.jsonl", "-o", "\udcff.svg"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=900, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"wrote \\udcff.svg\n")


@pytest.mark.parametrize("command", [["check-config", "ds.json"], ["schema"]])
def test_output_for_which_there_is_no_room(command, tmp_path):
    """Few lines are written at the end, many before."""
    (tmp_path / "ds.json").write_text("{}")
    command = [sys.executable, "-m", "paceline.launch.cli", *command]
    full = "paceline: the output cannot be written (No space left on device): write to a disk with room.\n"
    for name, status, told in (("/dev/full", 2, full), ("/dev/null", 0, "")):
        with open(name, "w") as output:
            done = subprocess.run(command, stdout=output, stderr=-1, text=True, cwd=tmp_path, timeout=900, check=False)
        assert (done.returncode, done.stderr) == (status, told)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["export", "", "out"], "the name of a directory is empty; give one.\n"),
        (["export", "run", ""], "the name of a directory is empty; give one.\n"),
        (["report", ""], "the name of a directory is empty; give one.\n"),
        (["check-config", ""], "the name of a file is empty; give the path of a DeepSpeed JSON.\n"),
    ],
)
def test_an_empty_name_is_not_the_working_directory(command, message, capsys):
    """As of a variable of a shell that is not set."""
    assert main(command) == 2
    assert capsys.readouterr().err.endswith(message)


def test_a_name_that_is_too_long_for_a_file(tmp_path, capsys):
    assert main(["export", "x" * 5000, str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("paceline: xxx")
    assert err.endswith("xxx/manifest.json: the name is too long for a file; give a shorter one.\n")
    assert len(err) < MOST + 20


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "far/run"),
            2,
            "paceline: far/run: Permission denied; give another path, or make this one accessible.\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_any_command(error, status, message, monkeypatch, capsys):
    """Looking at a file in a folder that others may not enter, and Ctrl-C."""

    def end(*_):
        raise error

    monkeypatch.setattr("paceline.report.run_records.runs_in", end)
    assert main(["report", "far/run"]) == status
    assert capsys.readouterr().err == message


def test_schema(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {"averaging", "max_change", "moe", "natural_gradient", "pipeline", "report"}


@pytest.mark.usefixtures("no_patches")
def test_patches(capsys):
    assert main(["patches", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    targets = [row["target"] for row in rows]
    assert targets[:7] == [
        "deepspeed:PipelineEngine",
        "deepspeed:DeepSpeedEngine",
        "deepspeed.ops:__compatible_ops__[deepspeed_shm_comm]",
        "deepspeed.runtime.pipe.p2p:can_send_recv",
        "deepspeed.runtime.pipe.module:PipelineModule._partition_layers",
        "transformers.masking_utils:find_packed_sequence_indices",
        "transformers.masking_utils:fast_all",
    ]
    assert len(targets) == len(set(targets))
    assert {row["repair"] for row in rows[7:]} == set(REPAIRS)
    for row in rows:
        assert row["fits"] == (not row["problem"])
        assert row["reason"]
        assert row["removable_when"]
        assert row["requires"].startswith(("deepspeed", "accelerate", "transformers"))
        assert row["applied_by"].startswith("paceline.")
    assert not any(row["applied"] for row in rows)
    with repair_deepspeed("receive-pool"):
        assert main(["patches", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["repair"] for row in rows if row["applied"]] == ["receive-pool"]
        assert all(row["fits"] for row in rows if row["applied"])  # the source that is compared is upstream's
    assert main(["patches"]) == 0
    out = capsys.readouterr().out
    assert all(row["target"] in out and row["reason"] in out for row in rows)


class Report:
    def __init__(self, verdict):
        self.verdict = verdict

    def to_dict(self):
        return {"model_type": "llama", "verdict": self.verdict, "reason": ""}


@pytest.mark.parametrize(("verdict", "status"), [("exact", 0), ("rounding", 0), ("refused", 3)])
def test_check_model(monkeypatch, capsys, verdict, status):
    check = pytest.importorskip("paceline.hf.check")
    monkeypatch.setattr(check, "check_source", lambda source: Report(verdict))
    assert main(["check-model", "some/model", "--json"]) == status
    assert json.loads(capsys.readouterr().out) == Report(verdict).to_dict()
    assert main(["check-model", "some/model"]) == status
    assert capsys.readouterr().out == f"model_type: llama\nverdict: {verdict}\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**6}, "has a num_hidden_layers that is too large to count with: give at most 1024."),
        ({"hidden_size": 10**12}, "has a hidden_size that is too large to count with: give at most 1048576."),
        ({"vocab_size": 10**400}, "has a vocab_size that is too large to count with: give at most 2147483648."),
        ({"num_hidden_layers": 0}, "has num_hidden_layers 0: give a whole number from 1 upwards."),
        ({"num_key_value_heads": 3}, "has 4 attention heads and num_key_value_heads 3: give a divisor of them."),
        ({"hidden_act": "nope"}, "no model can be made of "),
        ({"hidden_size": 33}, "The hidden size (33) is not a multiple of the number of attention heads (4)"),
    ],
)
def test_check_model_of_an_impossible_config(tmp_path, capsys, changes, message):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=60).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": 8, **changes}))
    assert main(["check-model", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paceline: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["simulate", "--stage", "4"], "paceline simulate: error: unknown flag --stage: did you mean --stages?"),
        (["simulate", "--micro_batches=4"], "unknown flag --micro_batches: did you mean --micro-batches?"),
        (["partition", "--cost", "a.json"], "unknown flag --cost: did you mean --costs?"),  # which is required
        (["plan", "-devices", "4"], "unknown flag -devices: "),
        (["simulate", "--qqq"], "unknown flag --qqq: see `paceline simulate --help`."),
        (["--versio"], "paceline: error: unknown flag --versio: did you mean --version?"),
        (["fitt"], "unknown 'fitt': did you mean 'fit'? There are check-config, check-model, schema,"),
        (["sim"], "unknown 'sim': did you mean 'simulate'?"),
        (["qqq"], "unknown 'qqq': there are check-config,"),
        (["export", "a", "b", "--dtype", "floot32"], "argument --dtype: unknown 'floot32': did you mean 'float32'?"),
    ],
)
def test_a_slip_of_the_pen_names_what_was_meant(capsys, argv, line):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert line in capsys.readouterr().err


def test_values_and_what_follows_two_dashes_are_no_flags(ds_json, capsys):
    assert main(["check-config", "--", ds_json({})]) == 0
    with pytest.raises(SystemExit):
        main(["simulate", "--stages", "-4", "--micro-batches", "1.5"])
    assert "argument --micro-batches: invalid int value" in capsys.readouterr().err


def test_brief():
    assert brief("short") == "short"
    text = "begin" + "x" * 5000 + "end"
    assert len(brief(text)) == MOST
    assert brief(text).startswith("beginxxx")
    assert brief(text).endswith("xxxend")
    assert "…" in brief(text)


def test_check_model_bad_name(tmp_path, capsys):
    pytest.importorskip("paceline.hf.check")
    assert main(["check-model", str(tmp_path / "nowhere")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
