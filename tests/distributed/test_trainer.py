"""Hugging Face's Trainer with pipelines: the same figures as without, through the same script."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from paceline.runtime.trainers_checkpoints import newest_complete
from support.jobs import BATCH, LAYERS, LENGTH, model_config
from support.pages import check_page
from support.ranks import OF_A_LAUNCHER, RANK_ENVIRONMENT, RankError, as_if_by_mpirun, free_port, run_ranks

SCRIPT = Path(__file__).parents[1] / "support" / "clm_script.py"
TWO_LINES = {
    "import transformers\n": "import paceline, transformers\n",
    "transformers.Trainer(": "paceline.PacelineTrainer(",
}
ROWS, SEQUENCES = 48, 11


def pipeline(stages: int, **keys: Any) -> dict[str, Any]:
    """accelerate wants ``zero_optimization`` in every DeepSpeed JSON."""
    return {"zero_optimization": {"stage": 1}, "paceline": {"pipeline": {"stages": stages, **keys}}}


def rows(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Some of them padded, so that tokens and samples are not the same."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        ids = torch.randint(3, 97, (LENGTH,), generator=generator)
        labels, mask = ids.clone(), torch.ones(LENGTH, dtype=torch.int64)
        labels[LENGTH - index % 5 :], mask[LENGTH - index % 5 :] = -100, 0
        found.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return found


def powered_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A ``compute_loss_func``: no cross entropy, and not linear in it."""
    logits, labels = outputs.logits[:, :-1].float(), labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses**1.5).sum() / num_items_in_batch


def with_focal_loss(kind: type) -> type:
    """A Trainer with a ``compute_loss`` of its own, a mean of each micro-batch."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logs = outputs["logits"][:, :-1].float().log_softmax(-1)
        picked = logs.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
        kept = inputs["attention_mask"][:, 1:].float()  # where it is 0 is no label
        loss = -((1 - picked.exp()) ** 2 * picked * kept).sum() / kept.sum()
        return (loss, outputs) if return_outputs else loss

    names = {"compute_loss": compute_loss, "loss_is_scaled_for_ga": False, "__module__": "my_script"}
    return type("Focal", (kind,), names)


def with_own_loaders(kind: type) -> type:
    """A Trainer that makes its loaders as people do: one for training from accelerate, a plain one to evaluate."""
    from torch.utils.data import DataLoader

    class OwnLoaders(kind):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(self.train_dataset, self._train_batch_size, shuffle=True, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(self.eval_dataset, 3, collate_fn=self.data_collator)

    return OwnLoaders


def train(
    directory: str,
    config: dict[str, Any] | None,
    *,
    family: str = "llama",
    batch: int = BATCH,
    resume: bool | str = False,
    evaluate_first: bool = False,
    changes: dict[str, Any] | None = None,
    count: int = ROWS,
    adapters: bool = False,
    stop_at: int | None = None,
    streams: bool = False,
    loss: str = "",
    dropout: float = 0.0,
    own_step: bool = False,
    own_loaders: bool = False,
    own_optimizer: bool = False,
    asked_at: int | None = None,
    eval_sets: tuple[str, ...] = (),
) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    import paceline
    from paceline.supervise.watch import WATCH

    seen: list[str] = []
    reads: list[int] = []
    loaders: set[str] = set()

    class Data(list[Any]):
        num_reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.num_reads += 1
            return super().__getitem__(index)

    data = Data(rows(count))

    class Watching(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"step {state.global_step}")
            reads.append(data.num_reads)
            if state.global_step == stop_at:
                control.should_training_stop = True
            if state.global_step == asked_at and args.process_index == args.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            seen.append(f"evaluated {sorted(metrics)[0]}")
            loaders.add(type(kwargs["eval_dataloader"]).__name__)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append("saved")

    set_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(family, attention_dropout=dropout))
    if adapters:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    options: dict[str, Any] = {
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "use_cpu": True,
        **(changes or {}),
    }
    args = TrainingArguments(output_dir=directory, deepspeed=config, report_to=[], disable_tqdm=True, seed=0, **options)
    kind: Any = Trainer if config is None else paceline.PacelineTrainer
    if own_step:

        class Own(kind):
            def training_step(self, *args: Any) -> Any:
                return super().training_step(*args)

        kind = Own
    if own_loaders:
        kind = with_own_loaders(kind)
    trainer = (with_focal_loss(kind) if loss == "method" else kind)(
        model=model,
        args=args,
        compute_loss_func=powered_loss if loss == "function" else None,
        train_dataset=Dataset.from_list(rows(count)).to_iterable_dataset(num_shards=3) if streams else data,
        eval_dataset={name: rows(SEQUENCES, seed) for seed, name in enumerate(eval_sets)} or rows(SEQUENCES, seed=2),
        compute_metrics=lambda found: {
            "guess": float((found.predictions[0] == found.label_ids).mean()),
            "rows": len(found.label_ids),
        },
        preprocess_logits_for_metrics=lambda logits, labels: (logits.argmax(-1), logits.double().logsumexp(-1)),
        callbacks=[Watching()],
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": torch.tensor(0.1)}) if own_optimizer else None,
    )
    first = trainer.evaluate() if evaluate_first else None
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{directory}/final")
    predicted = trainer.predict(rows(5, seed=3))
    if config is not None and (trainer.pipeline.num_stages > 1 or "expert_parallel" in config):
        for call in (trainer.model.generate, trainer.model.save_pretrained):
            with pytest.raises(
                ValueError, match=r"model\.\w+ was called and the model is one stage .* trainer.save_model"
            ):
                call("anything")
        with pytest.raises(ValueError, match=r"the model was called .* trainer.evaluate or trainer.predict"):
            trainer.model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    return {
        "logs": trainer.state.log_history,
        "first": first,
        "metrics": result.metrics,
        "predictions": predicted.predictions,
        "predicted": predicted.metrics,
        "seen": seen,
        "reads": reads,
        "loaders": loaders,
        "limit_s": WATCH._limits.progress_s,
        "engine": type(trainer.model_wrapped).__name__,
        "ranks": (args.world_size, args.process_index),
    }


FIGURES = (
    *("loss", "grad_norm", "learning_rate", "eval_loss", "eval_guess", "eval_rows", "epoch", "step", "train_loss"),
    "total_flos",
)


def figures(logs: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    return [{key: value for key, value in entry.items() if key in FIGURES} for entry in logs]


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 2e-6) -> None:
    for ours, theirs in zip(figures(found["logs"]), figures(wanted["logs"]), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=1e-9)
    assert found["seen"] == wanted["seen"]
    assert found["metrics"]["train_loss"] == pytest.approx(wanted["metrics"]["train_loss"], rel=tolerance)
    for ours, theirs in zip(found["predictions"], wanted["predictions"], strict=True):
        assert ours.shape == theirs.shape
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert found["predicted"]["test_loss"] == pytest.approx(wanted["predicted"]["test_loss"], rel=tolerance)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(directory).state_dict())


def assert_same_weights(found: Path, wanted: Path, tolerance: float = 2e-5) -> None:
    ours, theirs = weights(found), weights(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


class Trained(NamedTuple):
    """Folder and results of a run, for several tests: they copy what they change."""

    folder: Path
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Transformers' own Trainer, in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return Trained(folder, run_ranks(train, 1, str(folder), None))


@pytest.fixture(scope="module")
def in_two_stages(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("two")
    return Trained(folder, run_ranks(train, 2, str(folder), pipeline(2)))


def interrupted(whole: Path, parts: Path) -> Path:
    """A copy of a run as if it had ended after its third step."""
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoint-6")
    return parts


@pytest.mark.parametrize("stages", [2, 3])
def test_a_pipeline_trains_as_one_process_does(
    stages: int, alone: Trained, in_two_stages: Trained, tmp_path: Path
) -> None:
    """Losses, norms, rates, evaluations with metrics, predictions, callbacks, and the model that is saved."""
    ours, found = in_two_stages
    if stages == 3:
        ours, found = tmp_path, run_ranks(train, 3, str(tmp_path), pipeline(3))
    theirs, (wanted,) = alone
    assert {rank["engine"] for rank in found} == {"PacelineEngine"}
    for rank in found:
        assert_same(rank, wanted)
        assert rank["loaders"] == wanted["loaders"]  # a callback may read one on a rank alone
    assert_same_weights(ours / "final", theirs / "final")
    assert_same_weights(ours / "checkpoint-3", theirs / "checkpoint-3")
    assert_recorded(ours, found[0])


def test_metrics_of_a_head_in_slices(alone: Trained, tmp_path: Path) -> None:
    """The last stage has the logits of all slices in an evaluation; a loss of somebody's own is refused in training."""
    ours, (theirs, (wanted,)) = tmp_path / "ours", alone
    config = pipeline(2)
    config["paceline"]["pipeline"] |= {"head_slices": 4, "partition": [0, 6, 9]}
    for rank in run_ranks(train, 2, str(ours), config):
        assert_same(rank, wanted)
    assert_same_weights(ours / "final", theirs / "final")
    with pytest.raises(RankError, match=r"head_slices is 4 and a loss of one's own .* needs the logits"):
        run_ranks(train, 2, str(tmp_path / "own"), config, loss="function")


def assert_recorded(output: Path, found: dict[str, Any]) -> None:
    """The run's files are in the output directory, as the main job's are: losses, evaluations, a report, a timeline."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "epoch", "loss", "learning_rate", "grad_norm")
    for kind in ("loss", "eval_loss"):
        told = [{key: line[key] for key in keys if key in line} for line in lines if kind in line]
        assert told == [{key: entry[key] for key in keys if key in entry} for entry in found["logs"] if kind in entry]
    report, summary = (json.loads((output / name).read_text()) for name in ("report.json", "summary.json"))
    check_page((output / "report.html").read_text())
    assert report["run"]["state"] == "finished"
    assert [row["loss"] for row in report["loss"]] == [line["loss"] for line in lines if "loss" in line]
    assert [row["eval_loss"] for row in report["evaluation"]] == [
        line["eval_loss"] for line in lines if "eval_loss" in line
    ]
    assert [len(one["seconds"]) for one in report["configurations"]] == [6]
    assert (
        summary["tokens"]
        == lines[-1].get("tokens", lines[-2].get("tokens"))
        == sum(int(row["attention_mask"].sum()) for row in rows(ROWS))
    )
    assert (output / "trace" / "step-6.json").exists()
    assert not Path("trace").exists()


def test_of_several_evaluation_sets_the_first_has_the_held_out_loss(tmp_path: Path) -> None:
    (found, _) = run_ranks(train, 2, str(tmp_path), pipeline(2), eval_sets=("old", "new"), changes={"max_steps": 3})
    report, summary = (json.loads((tmp_path / name).read_text()) for name in ("report.json", "summary.json"))
    last = {key: value for entry in found["logs"] for key, value in entry.items()}
    assert [row["eval_loss"] for row in report["evaluation"]] == [last["eval_old_loss"]]
    assert {key: summary[key] for key in ("eval_loss", "eval_new_loss")} == {
        "eval_loss": last["eval_old_loss"],
        "eval_new_loss": last["eval_new_loss"],
    }


def test_ranks_without_gpus_are_counted_without_use_cpu(alone: Trained, tmp_path: Path) -> None:
    """transformers takes each of them for the only one, and they would log and save twice."""
    found = run_ranks(train, 2, str(tmp_path), pipeline(2), changes={"use_cpu": False})
    for rank in found:
        assert_same(rank, alone.ranks[0])
    assert [rank["ranks"] for rank in found] == [(2, 0), (2, 1)]


def train_under_mpirun(directory: str) -> Any:
    as_if_by_mpirun()
    return train(directory, pipeline(2), changes={"use_cpu": False})


def test_ranks_that_mpirun_has_started_are_counted(alone: Trained, tmp_path: Path) -> None:
    """transformers takes each of them for the only one, too."""
    found = run_ranks(train_under_mpirun, 2, str(tmp_path))
    for rank in found:
        assert_same(rank, alone.ranks[0])
    assert [rank["ranks"] for rank in found] == [(2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("loss", "replicas", "changes"),
    [
        ("", 1, {"label_smoothing_factor": 0.1}),
        ("method", 1, {"per_device_train_batch_size": 1}),  # some of them without padding
        ("function", 2, {"average_tokens_across_devices": True}),
    ],
)
def test_losses_of_ones_own(loss: str, replicas: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """On the last stage: as in one process, or in as many as there are pipelines."""
    changes = {"max_steps": 3, **changes}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    found = run_ranks(train, 2 * replicas, str(ours), pipeline(2), changes=changes, loss=loss)
    wanted = run_ranks(train, replicas, str(theirs), None, changes=changes, loss=loss)
    for rank in found:
        assert_same(rank, wanted[0], 1e-6)
    assert_same_weights(ours / "final", theirs / "final", 1e-6)


@pytest.mark.parametrize("changes", [{}, {"label_smoothing_factor": 0.1}], ids=["its own loss", "a loss of one's own"])
def test_layers_and_head_in_slices(changes: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks a stage; a loss of one's own, and metrics, see the logits of both."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    config = pipeline(2) | {"tensor_parallel": {"autotp_size": 2}}
    changes = {"max_steps": 3, **changes}
    found = run_ranks(train, 4, str(ours), config, family="olmo2", changes=changes)
    (wanted,) = run_ranks(train, 1, str(theirs), None, family="olmo2", changes=changes)
    for rank in found:
        assert_same(rank, wanted, 4e-6)
    assert_same_weights(ours / "final", theirs / "final")


def test_a_compute_loss_that_needs_the_whole_model_is_told() -> None:
    from transformers import LlamaForCausalLM

    from paceline.hf.stage import CausalLMStage, Cut
    from paceline.runtime.trainer_loss import _LastStage

    stage = CausalLMStage(LlamaForCausalLM(model_config()), Cut.whole(4))
    batch = {name: torch.ones(1, 4, dtype=torch.int64) for name in ("input_ids", "labels")}
    model = _LastStage(stage, torch.zeros(1, 4, 97), batch, None, 1.0)
    assert model(**batch, use_cache=False).loss.item() == pytest.approx(torch.tensor(97.0).log().item())
    for changes in ({"output_hidden_states": True}, {"input_ids": batch["input_ids"].clone()}):
        with pytest.raises(ValueError, match=f"compute_loss calls the model with '{next(iter(changes))}', which its"):
            model(**{**batch, **changes})


def test_logs_of_a_compute_loss_on_the_last_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0, whose logs trackers get, does not have them; one warning says so. They are no report of a step."""
    from paceline.runtime.trainer import PipelineTraining
    from paceline.runtime.trainer_loss import TrainersLoss

    logged: list[dict[str, float]] = []

    class Base:
        accelerator, is_in_train = SimpleNamespace(), True
        model_accepts_loss_kwargs, compute_loss_func = True, None

        def log(self, logs: dict[str, float]) -> None:
            logged.append(logs)

    class Kind(PipelineTraining, Base):  # type: ignore[misc]
        is_pipeline, run_log = True, None
        _resolved: Any = SimpleNamespace(stages=2)

    class NoReport:
        def report(self, *_: object) -> None:
            raise AssertionError("a report is made by all ranks together")

    trainer: Any = object.__new__(Kind)
    trainer.run_log = NoReport()

    def compute(*_: object, **__: object) -> torch.Tensor:
        trainer.log({"loss": 2.0})
        return torch.zeros(())

    stage: Any = SimpleNamespace(model=SimpleNamespace(config=None), training=True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    own = TrainersLoss(trainer, compute, 1)
    for _ in range(2):
        own(stage, torch.zeros(1, 2, 3), {}, None, num_items=1, router_share=0.0, num_micro_batches=1)
    assert logged == [{"loss": 2.0}] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "compute_loss logs loss on rank 1, which has the last stage, and trackers and trainer_state.json get "
        "what rank 0 logs: print it, or write it to a file of your own."
    ]


def items_told(kind: type, num_micro_batches: int | None) -> int | None:
    """``num_items_in_batch`` of a batch with seven, as a ``compute_loss_func`` of such a trainer gets it."""
    from paceline.runtime.trainer_loss import TrainersLoss

    told: list[Any] = []

    def compute(model: Any, inputs: Any, *, num_items_in_batch: Any) -> torch.Tensor:
        told.append(num_items_in_batch)
        return torch.zeros(())

    trainer: Any = type("Mine", (kind,), {"__init__": lambda self: None})()
    trainer.model_accepts_loss_kwargs, trainer.compute_loss_func, trainer.accelerator = True, compute, None
    stage: Any = SimpleNamespace(model=torch.nn.Linear(1, 1), training=False)
    stage.model.config = None
    loss = TrainersLoss(trainer, compute, 1)
    counts: Any = {"num_items": 7, "router_share": 1.0, "num_micro_batches": num_micro_batches}
    loss(stage, torch.zeros(1, 2, 3), {"labels": torch.ones(1, 2)}, None, **counts)
    return None if told[0] is None else int(told[0])


def test_a_loss_of_ones_own_is_told_the_items_that_its_trainer_tells() -> None:
    """TRL's trainer tells none in evaluations."""
    from transformers import Trainer
    from trl import SFTTrainer

    assert [items_told(kind, 4) for kind in (Trainer, SFTTrainer)] == [7, 7]
    assert [items_told(kind, None) for kind in (Trainer, SFTTrainer)] == [7, None]


def test_adapters_under_the_trainer(tmp_path: Path) -> None:
    """PEFT's model, its files in every checkpoint, and a run that goes on from one."""
    from safetensors.torch import load_file

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    found = run_ranks(train, 2, str(ours), pipeline(2), adapters=True)
    (wanted,) = run_ranks(train, 1, str(theirs), None, adapters=True)
    for rank in found:
        assert_same(rank, wanted)
    for name in ("final", "checkpoint-3"):
        files = [load_file(folder / name / "adapter_model.safetensors") for folder in (ours, theirs)]
        assert files[0].keys() == files[1].keys()
        for key, tensor in files[1].items():
            torch.testing.assert_close(files[0][key], tensor, rtol=1e-4, atol=1e-4)
        assert not (ours / name / "model.safetensors").exists()
    parts = interrupted(ours, tmp_path / "parts")
    (resumed, _) = run_ranks(train, 2, str(parts), pipeline(2), adapters=True, resume=True)
    assert resumed["seen"][0] == "step 4"
    assert figures(resumed["logs"])[-2] == figures(found[0]["logs"])[-2]


def test_replicas_share_the_data_as_data_parallel_processes_do(tmp_path: Path) -> None:
    """Epochs whose last step is short, and batches that are filled up."""
    changes = {"max_steps": -1, "num_train_epochs": 2}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    found = run_ranks(train, 4, str(ours), pipeline(2), changes=changes, count=37, evaluate_first=True)
    # Not evaluated first: transformers' own data-parallel processes would not reduce their gradients after that.
    wanted = run_ranks(train, 2, str(theirs), None, changes=changes, count=37)
    for rank in found:
        rank["seen"].remove("evaluated epoch") if "evaluated epoch" in rank["seen"][0] else rank["seen"].pop(0)
        assert_same({**rank, "logs": rank["logs"][1:] if "eval_loss" in rank["logs"][0] else rank["logs"]}, wanted[0])
        assert 0.9 < rank["first"]["eval_loss"] / wanted[0]["logs"][0]["loss"] < 1.1
    assert_same_weights(ours / "final", theirs / "final")


def test_a_share_of_the_experts_is_no_whole_model(tmp_path: Path) -> None:
    """One stage has all layers, and not all experts where ranks share them; the whole model's are counted."""
    from transformers import AutoModelForCausalLM

    config = {**pipeline(1), "expert_parallel": {"enabled": True, "autoep_size": 2}}
    found = run_ranks(train, 2, str(tmp_path), config, family="mixtral", changes={"max_steps": 1})
    model = AutoModelForCausalLM.from_config(model_config("mixtral"))
    flos = 6 * 2 * 4 * BATCH * LENGTH * model.num_parameters(exclude_embeddings=True)  # as Trainer counts them
    assert [rank["logs"][-1]["total_flos"] for rank in found] == [flos, flos]


def test_loaders_of_ones_own(tmp_path: Path) -> None:
    """Stages read alike from what accelerate prepares, and a plain loader's rows count once, before training too."""
    options: dict[str, Any] = {"changes": {"max_steps": 3}, "own_loaders": True, "evaluate_first": True}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    found = run_ranks(train, 2, str(ours), pipeline(2), **options)
    (wanted,) = run_ranks(train, 1, str(theirs), None, **options)
    for rank in found:
        assert_same(rank, wanted)
        assert rank["first"]["eval_rows"] == SEQUENCES


def test_pipelines_share_a_stream(tmp_path: Path) -> None:
    """Batch by batch, as Trainer's own processes do, however many files it has; epochs that end in mid-step too."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    found = run_ranks(train, 2, str(ours), pipeline(1), streams=True)
    wanted = run_ranks(train, 2, str(theirs), None, streams=True)
    for rank in found:
        assert_same(rank, wanted[0])
    options: dict[str, Any] = {"streams": True, "count": ROWS - 4, "changes": {"max_steps": 4}}
    found = run_ranks(train, 2, str(tmp_path / "short"), pipeline(1), **options)
    assert [entry["step"] for entry in found[0]["logs"] if "loss" in entry] == [1, 2, 3, 4]


def test_a_run_goes_on_from_its_checkpoint(in_two_stages: Trained, tmp_path: Path) -> None:
    """In every bit, scheduler and order of the data included."""
    halves, (whole, (wanted, _)) = tmp_path / "halves", in_two_stages
    run_ranks(train, 2, str(halves), pipeline(2), stop_at=3)
    (found, _) = run_ranks(train, 2, str(halves), pipeline(2), resume=True)
    assert found["seen"][0] == "step 4"
    losses = [[entry["loss"] for entry in run["logs"] if "loss" in entry] for run in (found, wanted)]
    assert losses[0] == losses[1]
    ours, theirs = weights(halves / "final"), weights(whole / "final")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_run_that_goes_on_elsewhere_counts_all_tokens(in_two_stages: Trained, tmp_path: Path) -> None:
    whole, _ = in_two_stages
    run_ranks(train, 2, str(tmp_path), pipeline(2), resume=str(whole / "checkpoint-3"))
    found, wanted = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path, whole))
    assert (found["tokens"], found["resumed_from_step"]) == (wanted["tokens"], 3)
    assert 0 < found["tokens_before"] < found["tokens"]


def test_an_order_that_is_drawn_in_each_epoch(tmp_path: Path) -> None:
    """From torch's own generator, as group_by_length does it: alike on all stages, whatever dropout draws on them.

    A run that goes on in mid-epoch has the same order.
    """
    whole = tmp_path / "whole"
    config = pipeline(2, partition=[0, 2, 6])  # with one layer here and three there
    options: dict[str, Any] = {"changes": {"train_sampling_strategy": "group_by_length"}, "count": 32, "dropout": 0.1}
    (wanted, _) = run_ranks(train, 2, str(whole), config, **options)
    parts = interrupted(whole, tmp_path / "parts")
    (found, _) = run_ranks(train, 2, str(parts), config, resume=True, **options)
    losses = [[entry["loss"] for entry in run["logs"] if "loss" in entry] for run in (found, wanted)]
    assert losses[0] == losses[1]


def test_a_run_that_is_asked_to_stop_saves_after_the_same_step_on_all_ranks(
    in_two_stages: Trained, tmp_path: Path
) -> None:
    """With transformers' ``enable_jit_checkpoint``: the weights of the step that the trainer's state is of.

    An evaluation that is due does not come first.
    """
    halves, (whole, (wanted, _)) = tmp_path / "halves", in_two_stages
    changes = {"enable_jit_checkpoint": True, "save_strategy": "no", "logging_steps": 4, "eval_steps": 2}
    for rank in run_ranks(train, 2, str(halves), pipeline(2), changes=changes, asked_at=1):
        assert rank["seen"][:3] == ["step 1", "step 2", "saved"]
    assert [path.name for path in halves.glob("checkpoint-*")] == ["checkpoint-2"]
    (found, _) = run_ranks(train, 2, str(halves), pipeline(2), resume=True)
    assert found["seen"][0] == "step 3"
    assert found["predicted"]["test_loss"] == wanted["predicted"]["test_loss"]
    assert_same_weights(halves / "final", whole / "final", tolerance=0)
    tokens = [json.loads((folder / "summary.json").read_text())["tokens"] for folder in (halves, whole)]
    assert tokens[0] == tokens[1]  # those of steps that no report had told of too


def test_a_checkpoint_of_a_half_step_is_refused(in_two_stages: Trained, tmp_path: Path) -> None:
    parts = interrupted(in_two_stages.folder, tmp_path / "parts")
    state = parts / "checkpoint-3" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": 2}))
    with pytest.raises(RankError, match=r"weights of step 3 and the trainer's state of step 2; go on from"):
        run_ranks(train, 2, str(parts), pipeline(2), resume=True)


def test_an_older_checkpoint_stays_until_all_ranks_have_written_the_new_one(
    in_two_stages: Trained, tmp_path: Path
) -> None:
    """Rank 0 was done, and deleted it, whether or not the other rank could write its random state."""
    parts = interrupted(in_two_stages.folder, tmp_path / "parts")
    (parts / "checkpoint-6" / "rng_state_1.pth").mkdir(parents=True)
    older = str(parts / "checkpoint-3")
    with pytest.raises(RankError, match="Is a directory"):
        run_ranks(train, 2, str(parts), pipeline(2), resume=older, changes={"save_total_limit": 1})
    assert newest_complete(parts) == older


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("training_args.bin", r"checkpoint-6/training_args\.bin was not written: .* wrong with the disk"),
        ("rng_state_1.pth", r"the random state of rank 1 in \S*/checkpoint-6 was not written: .* wrong with the disk"),
        ("trainer_state.json", r"No space left on device: '\S*/checkpoint-6'"),
    ],
    ids=["arguments", "random state", "trainer's state"],
)
def test_a_full_disk_is_told_with_the_name_of_what_was_not_written(
    file: str, named: str, in_two_stages: Trained, tmp_path: Path
) -> None:
    parts = interrupted(in_two_stages.folder, tmp_path / "parts")
    (parts / "checkpoint-6").mkdir()
    full = parts / "checkpoint-6" / file
    full.symlink_to("/dev/full")
    older = str(parts / "checkpoint-3")
    with pytest.raises(RankError, match=named):
        run_ranks(train, 2, str(parts), pipeline(2), resume=older, changes={"save_total_limit": 1})
    full.unlink()  # to read it would never end
    assert newest_complete(parts) == older


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    changes = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "learning_rate": 0.3,
        "max_grad_norm": 0.0,
    }
    run_ranks(train, 2, str(tmp_path), pipeline(2), changes=changes)
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    best = Path(state["best_model_checkpoint"])
    ours, theirs = weights(tmp_path / "final"), weights(best)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    "schedule",
    ["zbv", {"type": "adaptive", "retune_every": 2}, "one_direction"],
    ids=["zbv", "adaptive", "one_direction"],
)
def test_schedules_under_the_trainer(schedule: Any, alone: Trained, tmp_path: Path) -> None:
    """Those with a flush as any; those without lose nothing, and evaluate after what is under way."""
    (found, _), (wanted,) = run_ranks(train, 2, str(tmp_path), pipeline(2, schedule=schedule)), alone.ranks
    if schedule != "one_direction":  # of zbv, a rank has both copies of the tied weight
        assert_same(found, wanted)
        return
    losses = [entry["loss"] for entry in found["logs"] if "loss" in entry]
    assert len(losses) == 6
    assert losses[0] == pytest.approx(wanted["logs"][0]["loss"], rel=2e-6)
    assert losses[1:] == pytest.approx([entry["loss"] for entry in wanted["logs"][1:] if "loss" in entry], rel=0.02)
    assert found["metrics"]["train_loss"] == pytest.approx(sum(losses) / 6, rel=1e-5)


def test_steps_without_a_flush_are_read_ahead(tmp_path: Path) -> None:
    """Within an epoch, with a step of fewer micro-batches at its end; nothing else changes.

    A ``training_step`` of somebody's own may change the inputs: its steps are not read ahead.
    """
    options: dict[str, Any] = {"count": 26, "changes": {"max_steps": 10, "eval_steps": 5}}  # steps of 8, 8, 8 and 2
    config = pipeline(2, schedule="multidirection")
    (ahead, middle) = run_ranks(train, 2, str(tmp_path / "ahead"), config, **options)
    (found, _) = run_ranks(train, 2, str(tmp_path / "found"), config, own_step=True, **options)
    assert figures(ahead["logs"]) == figures(found["logs"])
    assert ahead["seen"] == found["seen"]
    ours, theirs = weights(tmp_path / "ahead" / "final"), weights(tmp_path / "found" / "final")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    # accelerate reads a batch more than it has handed out.
    assert found["reads"] == [10, 18, 26, 26, 36, 44, 52, 52, 62, 70]
    assert ahead["reads"] == middle["reads"] == [10, 26, 26, 26, 36, 52, 52, 52, 62, 78]


def test_other_optimizers_and_precision(alone: Trained, tmp_path: Path) -> None:
    """Those that the TrainingArguments or the script name, where the JSON names nothing."""
    changes = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.5, "max_steps": 3, "ddp_timeout": 400}
    (found, _) = run_ranks(train, 2, str(tmp_path / "ours"), pipeline(2), changes=changes)
    assert found["limit_s"] == 400
    (wanted,) = run_ranks(train, 1, str(tmp_path / "theirs"), None, changes=changes)
    assert_same(found, wanted)
    (found, _) = run_ranks(train, 2, str(tmp_path / "own"), pipeline(2), changes=changes, own_optimizer=True)
    (wanted,) = run_ranks(train, 1, str(tmp_path / "its"), None, changes=changes, own_optimizer=True)
    assert_same(found, wanted)  # with the rates of each step, though the scheduler changes one tensor
    (half, _) = run_ranks(train, 2, str(tmp_path / "half"), pipeline(2), changes={"bf16": True, "max_steps": 1})
    assert half["logs"][0]["loss"] == pytest.approx(alone.ranks[0]["logs"][0]["loss"], rel=2e-2)
    assert weights(tmp_path / "half" / "final")["lm_head.weight"].dtype == torch.bfloat16


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (pipeline(2), {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is 5.0"),
    (pipeline(2), {"auto_find_batch_size": True}, "auto_find_batch_size is True"),
    (pipeline(2), {"label_names": ["labels", "input_ids"]}, r"label_names is \['labels', 'input_ids'\]"),
    (pipeline(2), {"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type is 'reduce_lr_on_plateau'"),
    (
        pipeline(2),
        {"torch_compile": True},
        "torch_compile is True .* a stage runs .* attn_implementation",
    ),
    (pipeline(2), {"bf16_full_eval": True}, "bf16_full_eval is True .* in the dtype they train in"),
    (
        pipeline(1),
        {"average_tokens_across_devices": False},
        "average_tokens_across_devices is False and there are 2",
    ),
    (
        pipeline(1),
        {"accelerator_config": {"even_batches": False}},
        "even_batches of accelerator_config is False and there are 2 pipelines .*; leave it at True",
    ),
    (pipeline(2, schedule={"micro_batch_sizes": [1, 2]}), {}, r"micro_batch_sizes is \[1, 2\] under the Trainer"),
    ({**pipeline(2), "gradient_accumulation_steps": 8}, {}, "gradient_accumulation_steps is 8 in the JSON and"),
    (pipeline(3), {}, "stages is 3"),
    (pipeline(2, stagess=2), {}, 'did you mean "stages"'),
]


def refusals(directory: str) -> list[str]:
    """What each case is refused with, one after another."""
    told = []
    for number, (config, changes, _) in enumerate(REFUSED):
        try:
            train(f"{directory}/{number}", config, changes=changes)
        except ValueError as error:
            told.append(str(error))
        else:
            told.append("not refused")
    return told


def test_what_a_pipeline_cannot_do_is_said_at_the_start(tmp_path: Path) -> None:
    for told in run_ranks(refusals, 2, str(tmp_path)):
        for text, (_, _, message) in zip(told, REFUSED, strict=True):
            assert re.search(message, text), (message, text)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"label_names": []}, {}, r"label_names is \[\] and the JSON has .*; leave one of them out"),
        ({}, {"tp_size": 2}, r"parallelism_config has \{'tp_size': 2\} and .*; leave it out, and write \"stages\""),
        (
            {"save_on_each_node": True},
            {},
            "save_on_each_node is True and .* one directory, to which all stages write; leave",
        ),
        ({"accelerator_config": {"dispatch_batches": True}}, {}, "dispatch_batches of accelerator_config is True and"),
        (
            {"dataloader_num_workers": 2, "dataloader_in_order": False},
            {},
            "dataloader_in_order is False and .* read the same batches, and workers .*; leave one of them out",
        ),
        ({"dataloader_in_order": False}, {}, ""),  # without workers batches come in order
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"determinism_check": "none"}},
            {},
            r"[a-z]+_checkpointing_kwargs has \{'determinism_check': 'none'\} and .*; leave it out .* \"recompute\" in",
        ),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, {}, ""),
        ({"gradient_checkpointing_kwargs": {"determinism_check": "none"}}, {"tp_size": 1}, ""),
        ({"report_to": ["wandb"]}, {}, "WANDB_LOG_MODEL is end and .*: no rank has the whole model .*; unset it"),
        ({"report_to": ["tensorboard"]}, {}, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning:transformers")
def test_settings_that_stages_would_not_heed_are_refused(
    changes: dict[str, Any], sizes: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    from paceline.runtime.trainer import PipelineTraining
    from paceline.runtime.trainer_refusals import refused

    class Given(PipelineTraining, Trainer):
        def __init__(self) -> None:
            self.args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{"report_to": [], **changes})
            self.accelerator = SimpleNamespace(parallelism_config=ParallelismConfig(**sizes) if sizes else None)
            self.model_init = self.optimizer = self.lr_scheduler = None

    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    assert re.match(f"^{message}" if message else "$", refused(Given(), PipelineTraining))


@pytest.mark.parametrize(
    "name",
    [
        *("create_optimizer", "create_optimizer_and_scheduler", "training_step", "prediction_step", "save_model"),
        *("_prepare_inputs", "_prepare_input", "_get_num_items_in_batch", "_save"),
        *("compute_loss_context_manager", "autocast_smart_context_manager"),
    ],
)
def test_methods_that_would_never_be_called_are_refused(name: str) -> None:
    from transformers import Trainer

    from paceline.runtime.trainer import PacelineTrainer, PipelineTraining
    from paceline.runtime.trainer_refusals import refused_methods

    own = type("Own", (Trainer,), {name: lambda self, *args: None, "__module__": "my_script"})
    assert f"my_script has a {name} of its own and the JSON has" in refused_methods(
        type("OwnPipelines", (PipelineTraining, own), {}), PipelineTraining
    )
    fine = type("Fine", (PacelineTrainer,), {"log": lambda self, *args: None})
    assert refused_methods(fine, PipelineTraining) == ""


def test_a_rank_that_ends_alone_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others train on, and the watch tells what this one waits for."""
    from paceline.runtime.trainer import PacelineTrainer
    from paceline.supervise.watch import WATCH

    def barrier() -> None:
        raise RuntimeError(WATCH.operation)

    monkeypatch.setattr(torch.distributed, "barrier", barrier)
    alone = PacelineTrainer.__new__(PacelineTrainer)
    vars(alone)["is_pipeline"] = True
    with pytest.raises(RuntimeError, match=r"ending the training \(set control\.should_training_stop on all"):
        alone._finalize_training()
    WATCH.idle()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("DPOTrainer", "under a second one for reference"),
        ("GRPOTrainer", "it generates with the whole model"),
        ("RewardTrainer", "a head for one number"),
    ],
)
def test_trainers_of_other_losses_are_refused_for_their_own_reason(name: str, why: str, tmp_path: Path) -> None:
    """Before they load or tokenize anything."""
    import trl
    from transformers import TrainingArguments

    from paceline.runtime.trainer import PipelineTraining
    from paceline.runtime.trainer_refusals import refused_kind

    kind = type("Mine", (PipelineTraining, getattr(trl, name)), {})
    args = TrainingArguments(output_dir=str(tmp_path), deepspeed=None, use_cpu=True, report_to=[])
    args.deepspeed = pipeline(2)  # set like this, no process group is asked for
    with pytest.raises(ValueError, match=f"^{name} trains otherwise than by .*{why}.*; take PacelineSFTTrainer"):
        kind(model="nothing", args=args)
    assert refused_kind(type("Fine", (PipelineTraining, trl.SFTTrainer), {})) == ""


@pytest.mark.parametrize("name", ["mean_token_accuracy", "eval_entropy"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning:transformers")
def test_trls_own_metrics_choose_no_model(name: str, tmp_path: Path) -> None:
    """Nobody computes them; a ``compute_metrics`` may return one of that name."""
    from trl import SFTConfig, SFTTrainer

    from paceline.runtime.trainer import PipelineTraining
    from paceline.runtime.trainer_refusals import refused

    class Given(PipelineTraining, SFTTrainer):
        def __init__(self, compute_metrics: Any) -> None:
            self.args = SFTConfig(
                output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False, metric_for_best_model=name
            )
            self.compute_metrics = compute_metrics
            self.accelerator = SimpleNamespace()
            self.model_init = self.optimizer = self.lr_scheduler = None

    told = f"^metric_for_best_model is '{name}' and the JSON has .*; choose \"loss\", or give a compute_metrics"
    assert re.match(told, refused(Given(None), PipelineTraining))
    assert refused(Given(lambda found: {}), PipelineTraining) == ""


def test_a_compute_loss_before_trls_is_refused() -> None:
    from trl import SFTTrainer

    from paceline.runtime.trainer import PipelineTraining
    from paceline.runtime.trainer_refusals import refused_methods

    own = type("Own", (SFTTrainer,), {"compute_loss": lambda self, *args: None, "__module__": "my_script"})
    assert "my_script has a compute_loss of its own and the JSON has" in refused_methods(
        type("OwnPipelines", (PipelineTraining, own), {}), PipelineTraining
    )


def checkpoints_of_ones_own(directory: str) -> dict[int, Any]:
    """By item, options of the layers that are recomputed in a model whose first layer is not."""
    from transformers import AutoModelForCausalLM, TrainingArguments

    import paceline

    model = AutoModelForCausalLM.from_config(model_config())
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.model.layers[0].gradient_checkpointing = False
    args = TrainingArguments(directory, deepspeed=pipeline(2), gradient_accumulation_steps=4, report_to=[])
    built = paceline.PacelineTrainer(model, args, train_dataset=rows(8))._build()
    held = range(built.parts[built.stage_id], built.parts[built.stage_id + 1])
    layers = {item: built.anatomy.layers_of(built.models[0])[item - 1] for item in built.recomputed if item in held}
    return {item: layer._gradient_checkpointing_func.keywords for item, layer in layers.items()}


def test_a_model_is_recomputed_as_the_script_has_switched_it_on(tmp_path: Path) -> None:
    first, second = run_ranks(checkpoints_of_ones_own, 2, str(tmp_path))
    own = {"use_reentrant": False, "preserve_rng_state": False}
    assert first | second == dict.fromkeys(range(2, LAYERS + 1), own)


def learned_tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel()
    specials = ["<end>", "<pad>"]
    learned.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=97, special_tokens=specials))
    return PreTrainedTokenizerFast(tokenizer_object=learned, eos_token="<end>", pad_token="<pad>")


def trls(directory: str, config: dict[str, Any] | None, data: dict[str, Any], texts: list[str], **changes: Any) -> Any:
    """TRL's trainer, or ours with the pipeline of a JSON, of a new model."""
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    import paceline

    family = changes.pop("family", "llama")
    args = SFTConfig(
        output_dir=directory,
        deepspeed=config,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        gradient_accumulation_steps=4,
        bf16=False,
        gradient_checkpointing=False,
        **changes,
    )
    return (SFTTrainer if config is None else paceline.PacelineSFTTrainer)(
        model=AutoModelForCausalLM.from_config(model_config(family)),
        args=args,
        **data,
        processing_class=learned_tokenizer(texts),
    )


def fine_tune(directory: str, config: dict[str, Any] | None, count: int = 40, **changes: Any) -> list[dict[str, Any]]:
    """As people use TRL: prompts, completions, loss on the latter."""
    from datasets import Dataset
    from transformers import set_seed

    set_seed(0)
    asked = [(a, b) for a in range(6) for b in range(8)]
    samples = [{"prompt": f"what is {a} plus {b}?", "completion": f" {a + b} of course"} for a, b in asked]
    data = {"train_dataset": Dataset.from_list(samples[:count]), "eval_dataset": Dataset.from_list(samples[40:])}
    changes = {"max_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 2, "max_length": 32} | changes
    changes |= {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    texts = [sample["prompt"] + sample["completion"] for sample in samples]
    trainer = trls(directory, config, data, texts, **changes)
    trainer.train()
    trainer.save_model()
    return figures(trainer.state.log_history)


@pytest.mark.parametrize("packing", [False, True])
def test_trl_fine_tunes_with_a_pipeline(packing: bool, tmp_path: Path) -> None:
    """Losses, norms and weights of TRL's own trainer; its metrics of logits (entropy, accuracy) are left out."""
    (found, _) = run_ranks(fine_tune, 2, str(tmp_path / "ours"), pipeline(2), packing=packing)
    (wanted,) = run_ranks(fine_tune, 1, str(tmp_path / "theirs"), None, packing=packing)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-9)
    assert_same_weights(tmp_path / "ours", tmp_path / "theirs", 2e-3)  # Adam makes steps of rounding, too


def evaluate_alone(directory: str, config: dict[str, Any] | None) -> float:
    """TRL's evaluation of rows with 1 to 11 label tokens, and of one with none."""
    from datasets import Dataset
    from transformers import set_seed

    set_seed(0)
    ids = [row["input_ids"].tolist() for row in rows(6)]
    data = Dataset.from_list(
        [{"input_ids": one, "labels": [-100] * (15 - 2 * n) + one[15 - 2 * n :]} for n, one in enumerate(ids)]
        + [{"input_ids": ids[0], "labels": [-100] * LENGTH}]
    )
    both = {"train_dataset": data, "eval_dataset": data}
    trainer = trls(directory, config, both, ["some text"], per_device_eval_batch_size=1)
    return float(trainer.evaluate()["eval_loss"])


def test_trls_evaluation_by_several_pipelines(tmp_path: Path) -> None:
    """Each batch has its own mean there, whatever the other processes have, and one without labels counts 0."""
    found = run_ranks(evaluate_alone, 2, str(tmp_path / "ours"), pipeline(1))
    wanted = run_ranks(evaluate_alone, 2, str(tmp_path / "theirs"), None)
    assert found == pytest.approx(wanted, rel=2e-6)


def test_the_routers_loss_is_trls(tmp_path: Path) -> None:
    """With SFTConfig's weight for it; in evaluations, and in an epoch's last step, which is short."""
    changes = {"family": "mixtral", "count": 12, "max_steps": 4, "router_aux_loss_coef": 0.5, "learning_rate": 1e-3}
    (found, _) = run_ranks(fine_tune, 2, str(tmp_path / "ours"), pipeline(2), **changes)
    (wanted,) = run_ranks(fine_tune, 1, str(tmp_path / "theirs"), None, **changes)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9)


def run_script(arguments: list[str], cache: str) -> None:
    """On every rank: a script as a user starts it."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(cache)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def test_two_lines_of_a_script(tmp_path: Path) -> None:
    """The import, and the JSON on the command line: the same losses and metrics."""
    text = SCRIPT.read_text()
    for line, other in TWO_LINES.items():
        assert text.count(line) == 1
        text = text.replace(line, other)
    changed = tmp_path / "script.py"
    changed.write_text(text)
    data = tmp_path / "data.txt"
    data.write_text("\n".join(text.splitlines() * 6))
    learned_tokenizer([text]).save_pretrained(tmp_path / "tokenizer")
    model_config().save_pretrained(tmp_path / "model")
    (tmp_path / "pp2.json").write_text(json.dumps(pipeline(2)))
    flags = [
        *("--config_name", str(tmp_path / "model"), "--tokenizer_name", str(tmp_path / "tokenizer")),
        *("--train_file", str(data), "--max_steps", "4", "--gradient_accumulation_steps", "4", "--logging_steps", "1"),
        *("--per_device_train_batch_size", "2", "--learning_rate", "1e-2", "--eval_strategy", "steps"),
        *("--eval_steps", "2", "--save_steps", "2", "--report_to", "none", "--use_cpu", "True", "--seed", "3"),
    ]
    run = {
        "theirs": (1, [str(SCRIPT), *flags]),
        "ours": (2, [str(changed), *flags, "--deepspeed", str(tmp_path / "pp2.json")]),
    }
    for name, (num_ranks, arguments) in run.items():
        run_ranks(run_script, num_ranks, [*arguments, "--output_dir", str(tmp_path / name)], str(tmp_path / "cache"))
    states = [
        json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"] for name in ("ours", "theirs")
    ]
    for ours, theirs in zip(*map(figures, states), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-9)
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("ours", "theirs")]
    for key in ("eval_accuracy", "perplexity", "train_loss"):
        assert results[0][key] == pytest.approx(results[1][key], rel=2e-6)
    assert os.path.exists(tmp_path / "ours" / "README.md")
    assert_same_weights(tmp_path / "ours", tmp_path / "theirs")


SCRIPT_OF_A_USER = """
import sys
import torch, transformers
from paceline import PacelineTrainer

model, config, output = sys.argv[-3:]
transformers.set_seed(0)
args = transformers.TrainingArguments(
    output_dir=output, deepspeed=config if config != "accelerate's" else None, max_steps=3,
    per_device_train_batch_size=2, gradient_accumulation_steps=4,
    learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
)
model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model))
tokens = torch.randint(3, 97, (24, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in tokens]
trainer = PacelineTrainer(model=model, args=args, train_dataset=data)
trainer.train()
trainer.save_model()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.launcher
def test_a_script_under_accelerate(tmp_path: Path) -> None:
    """On CPUs, which it does not mention: the losses of one process, and one report. accelerate is given the JSON.

    torchrun: ``test_main_job.py``.
    """
    script, config = tmp_path / "script.py", tmp_path / "ds.json"
    script.write_text(SCRIPT_OF_A_USER)
    config.write_text(json.dumps({"zero_optimization": {"stage": 0}, "paceline": {"pipeline": {}}}))
    model_config().save_pretrained(tmp_path / "model")
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    environment |= {name: value for name, value in RANK_ENVIRONMENT.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "extensions")

    def arguments(name: str, config: str) -> list[str]:
        return [str(script), str(tmp_path / "model"), config, str(tmp_path / name)]

    def losses(name: str, stages: int) -> list[float]:
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert report["run"]["stages"] == stages
        return [row["loss"] for row in report["loss"]]

    run_ranks(run_script, 1, arguments("alone", str(config)), str(tmp_path / "cache"))
    wanted = losses("alone", 1)
    assert len(wanted) == 3
    start = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--main_process_port", str(free_port()), "--deepspeed_config_file", str(config)),
    ]
    command = [*start, *arguments("launched", "accelerate's")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (tmp_path / "extensions").exists(), "DeepSpeed's communication was compiled, for minutes"
    assert losses("launched", 2) == pytest.approx(wanted, rel=1e-6)
    assert done.stdout.count("'loss'") == 3, done.stdout  # one rank logs
