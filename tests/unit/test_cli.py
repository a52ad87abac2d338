"""The ``paceline`` command."""

import json
import subprocess
import sys

import pytest

import paceline
from paceline.launch.cli import build_parser, main
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
        "pipeline": {"stages": 2, "partition": None, "schedule": None},
        "moe": None,
        "natural_gradient": None,
        "averaging": None,
        "report": {"metrics": True, "trace_every": None},
    }
    assert shown["resolved"] == {
        "stages": 2,
        "data_parallel": 2,
        "partition": "parameters",
        "micro_batch_size": 1,
        "micro_batches": 8,
        "train_batch_size": 16,
        "repartition_every": 0,
        "schedule": {"type": "1f1b"},
    }
    assert shown["chosen"]["paceline.pipeline.schedule"] == {"value": "1f1b", "why": "as DeepSpeed has it"}
    assert shown["chosen"]["gradient_accumulation_steps"]["value"] == 8
    assert "auto" in shown


def test_check_config_as_text(ds_json, capsys):
    path = ds_json({"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    assert main(["check-config", path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        '"paceline": {"pipeline": {"stages": null, "partition": null, "schedule": null}, '
        '"moe": null, "natural_gradient": null, "averaging": null, "report": {"metrics": true, "trace_every": null}}',
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
        ({}, ["--world-size", "4"], "--world-size and --num-layers belong together"),
        (
            {"paceline": {"pipeline": {"stages": 3}}},
            ["--world-size", "4", "--num-layers", "12"],
            "paceline.pipeline.stages is 3 and there are 4 ranks",
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


def test_sizes_are_positive(ds_json, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["check-config", ds_json({}), "--world-size", "0", "--num-layers", "2"])
    assert stop.value.code == 2
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err


def test_schema(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {"averaging", "moe", "natural_gradient", "pipeline", "report"}


def test_patches(capsys):
    assert main(["patches", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    targets = [row["target"] for row in rows]
    assert targets[:5] == [
        "deepspeed:PipelineEngine",
        "deepspeed:DeepSpeedEngine",
        "deepspeed.ops:__compatible_ops__[deepspeed_shm_comm]",
        "deepspeed.runtime.pipe.p2p:can_send_recv",
        "deepspeed.runtime.pipe.module:PipelineModule._partition_layers",
    ]
    assert len(targets) == len(set(targets))
    assert {row["repair"] for row in rows[5:]} == set(REPAIRS)
    for row in rows:
        assert row["fits"] == (not row["problem"])
        assert row["reason"]
        assert row["removable_when"]
        assert row["requires"].startswith(("deepspeed", "accelerate"))
        assert row["applied_by"].startswith("paceline.")
        assert row["applied"] is False
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


def test_check_model_bad_name(tmp_path, capsys):
    pytest.importorskip("paceline.hf.check")
    assert main(["check-model", str(tmp_path / "nowhere")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
