"""Trackers are told what the Trainer tells them, under its names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import LlamaConfig, TrainerCallback
from transformers.integrations import integration_utils

from paceline.hf.arguments import TrainArguments
from paceline.launch.trackers import Trackers

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
LINES: tuple[dict[str, Any], ...] = (
    {"step": 2, "loss": 2.5, "learning_rate": 0.1, "grad_norm": None, "epoch": 0.5, "rank0": {"idle_s": 1}, "ran": []},
    {"step": 4, "eval_loss": 2.25, "perplexity": 9.5},
)


def flags(output_dir: Path) -> dict[str, Any]:
    return vars(TrainArguments(output_dir=str(output_dir), run_name="first"))


class Recorder(TrainerCallback):
    told: ClassVar[list[Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        assert args.to_dict()["run_name"] == args.run_name == "first"
        assert (args.process_index, args.load_best_model_at_end) == (0, False)  # flags that are not ours
        self.told.append(("begin", state.is_world_process_zero, state.max_steps, model.num_parameters()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.told.append((state.global_step, state.epoch, logs))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.told.append("end")


def test_callbacks_are_told_numbers_at_their_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Recorder)
    monkeypatch.setattr(Recorder, "told", [])
    trackers = Trackers(["tensorboard"], flags(tmp_path), CONFIG, 6)
    for line in LINES:
        trackers.log(line)
    trackers.close()
    trackers.close()
    (_, *begun), *logs, end = Recorder.told
    assert begun[:2] == [True, 6]
    assert begun[2] > 2 * 32 * CONFIG.vocab_size  # of the whole model
    assert logs == [
        (2, 0.5, {"loss": 2.5, "learning_rate": 0.1, "epoch": 0.5}),
        (4, 0.5, {"eval_loss": 2.25, "eval_perplexity": 9.5}),
    ]
    assert end == "end"


def test_one_that_cannot_be_written_ends_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class WithoutRoom(Recorder):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.global_step == 4:
                raise OSError(28, "No space left on device")

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", WithoutRoom)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "mlflow", Recorder)
    monkeypatch.setattr(Recorder, "told", [])
    trackers = Trackers(["tensorboard", "mlflow"], flags(tmp_path), CONFIG, 6)
    for line in LINES:
        trackers.log(line)
    trackers.close()
    (record,) = caplog.records
    assert record.getMessage() == "WithoutRoom (--report_to) ends at step 4: [Errno 28] No space left on device"
    assert [told[0] for told in Recorder.told[2:4]] == [2, 4]
    assert Recorder.told[4:] == ["end"]


def test_islands_that_share_a_folder_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TensorBoard takes what is in one folder for one run."""

    class InFolder(Recorder):
        def __init__(self) -> None:
            self.logging_dir = os.environ.get("TENSORBOARD_LOGGING_DIR")

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.told.append(self.logging_dir)

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", InFolder)
    monkeypatch.setattr(Recorder, "told", [])
    for folder in ("logs", None):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", folder) if folder else monkeypatch.delenv(
            "TENSORBOARD_LOGGING_DIR"
        )
        for island in (1, None):
            Trackers(["tensorboard"], flags(tmp_path), CONFIG, 6, island)
    assert Recorder.told == ["logs/island1", "logs", None, None]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="a tracker's package: runs where it is installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(["tensorboard"], flags(tmp_path), CONFIG, 6)
    for line in LINES:
        trackers.log(line)
    trackers.close()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    found = EventAccumulator(str(file))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {
        *("train/loss", "train/learning_rate", "train/epoch", "eval/loss", "eval/perplexity")
    }
    assert [(event.step, event.value) for event in found.Scalars("eval/loss")] == [(4, 2.25)]


def test_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="a tracker's package: runs where it is installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    trackers = Trackers(["wandb"], flags(tmp_path), CONFIG, 6)
    assert wandb.run is not None
    assert wandb.run.name == "first"
    assert wandb.config["model/num_parameters"] > 0
    for line in LINES:
        trackers.log(line)
    assert wandb.run.summary["eval/loss"] == 2.25
    assert wandb.run.summary["train/global_step"] == 4
    trackers.close()
    wandb.finish()
    assert list(tmp_path.rglob("*.wandb"))
