"""What scripts do with a Trainer before, in and after a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.hf.stage import recompute_layers
from support.jobs import BATCH, MICRO_BATCHES, ds_config, model_config, step_batches
from support.ranks import run_ranks

from .test_trainer import pipeline, rows

STEPS = 4


def made(
    directory: str,
    *,
    stages: int = 1,
    model: Any = None,
    schedule: str = "1f1b",
    keys: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer of a small Llama."""
    from transformers import AutoModelForCausalLM, TrainingArguments

    import paceline

    torch.manual_seed(0)
    own: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **(arguments or {}),
    }
    return paceline.PacelineTrainer(
        model=AutoModelForCausalLM.from_config(model_config()) if model is None else model,
        args=TrainingArguments(
            output_dir=directory, deepspeed=pipeline(stages, schedule=schedule, **(keys or {})), **own
        ),
        **{"train_dataset": rows(48), "eval_dataset": rows(7, seed=2), **options},
    )


def test_models_that_are_no_whole_language_model_are_refused(tmp_path: Any) -> None:
    """A stage, one with another head, and a module around one."""
    told = run_ranks(two_trainers, 2, str(tmp_path))
    assert all("one stage of a pipeline already" in text for text in told)


def two_trainers(directory: str) -> str:
    from transformers import AutoModelForTokenClassification

    other = AutoModelForTokenClassification.from_config(model_config())
    with pytest.raises(ValueError, match="is a LlamaForTokenClassification, whose outputs are no logits over a voc"):
        made(directory, stages=2, model=other).train()
    with pytest.raises(ValueError, match="the model is a Scaled, and a pipeline is cut from a model of transformers"):
        made(directory, stages=2, model=Scaled(other)).train()
    trainer = made(directory, stages=2)
    trainer.train()
    with pytest.raises(ValueError, match="load the whole model again") as told:
        made(directory, stages=2, model=trainer.model).train()
    return str(told.value)


class Scaled(torch.nn.Module):
    """A layer of a script's own around one of the model's, with a parameter that is a single number."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


def test_layers_and_a_head_that_a_script_has_wrapped_and_a_weight_that_it_transposed(tmp_path: Any) -> None:
    """They train and are saved; two stages have the numbers of one."""
    (wanted,) = run_ranks(wrapped, 1, str(tmp_path / "one"), 1)
    assert run_ranks(wrapped, 2, str(tmp_path / "two"), 2) == [wanted] * 2
    assert 0.5 not in wanted[1]


def wrapped(directory: str, stages: int) -> tuple[list[float], list[float]]:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(tie_word_embeddings=False))
    model.lm_head, model.model.layers[1].mlp = Scaled(model.lm_head), Scaled(model.model.layers[1].mlp)
    transposed = model.model.layers[0].mlp.down_proj.weight
    transposed.data = transposed.data.t().contiguous().t()
    trainer = made(directory, stages=stages, model=model, arguments={"max_grad_norm": 0})
    trainer.train()
    trainer.save_model()
    saved = load_file(f"{directory}/model.safetensors")
    scales = [saved[f"{name}.scale"].item() for name in ("lm_head", "model.layers.1.mlp")]
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], scales


def test_a_model_with_one_stage_may_have_another_trainer(tmp_path: Any) -> None:
    run_ranks(one_stage_twice, 1, str(tmp_path))


def one_stage_twice(directory: str) -> None:
    from paceline.supervise.watch import WATCH

    trainer = made(directory)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert WATCH.step == STEPS, "what fails now is told with the steps that are done"
    again = made(directory, model=trainer.model)
    assert again.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"] != before


def test_recomputation_that_a_script_switched_on_is_counted(tmp_path: Any) -> None:
    run_ranks(recomputed, 1, str(tmp_path))


def recomputed(directory: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(model_config())
    recompute_layers(model)
    with pytest.raises(ValueError, match=r"recompute is 1, and gradient checkpointing, .*: leave one of them out"):
        made(directory, model=model, keys={"recompute": 1}).evaluate()


def test_an_interrupted_training_may_be_evaluated_and_trained_again(tmp_path: Any) -> None:
    run_ranks(interrupted, 1, str(tmp_path))


def interrupted(directory: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    trainer = made(directory)
    trainer._build()
    handle = trainer.pipeline.stage.register_forward_pre_hook(interrupt)  # in the middle of a step
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    handle.remove()
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] != before


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_may_become_a_single_number(ranks: int, tmp_path: Any) -> None:
    """Also of the last batch, which has fewer rows than the others."""
    for found in run_ranks(numbers_of_batches, ranks, str(tmp_path)):
        assert found == 3  # of two replicas both and then, as accelerate has it, the one that still has a row


def numbers_of_batches(directory: str) -> int:
    count: Callable[[Any], Any] = lambda found: {"count": float(len(found.predictions))}  # noqa: E731
    mean: Callable[..., Any] = lambda logits, labels: logits.mean()  # noqa: E731
    metrics = made(directory, compute_metrics=count, preprocess_logits_for_metrics=mean).evaluate()
    return int(metrics["eval_count"])


def test_the_optimizer_that_callbacks_see(tmp_path: Any) -> None:
    run_ranks(looked_at, 1, str(tmp_path))


def test_operations_that_a_script_counts_itself(tmp_path: Any) -> None:
    """The stages have the same inputs, and count them once."""
    assert run_ranks(counted, 2, str(tmp_path)) == [7 * 4 * STEPS] * 2


def counted(directory: str) -> float:
    trainer = made(directory, stages=2)
    trainer.floating_point_ops = lambda inputs: 7
    trainer.train()
    return float(trainer.state.total_flos)


def test_trainable_parameters_are_the_whole_models(tmp_path: Any) -> None:
    for before, after in run_ranks(trainable, 2, str(tmp_path)):
        assert before == after


def trainable(directory: str) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(model_config())
    model.get_input_embeddings().requires_grad_(False)
    trainer = made(directory, stages=2, model=model)
    before = trainer.get_num_trainable_parameters()
    trainer.evaluate()
    return [before, trainer.get_num_trainable_parameters()]


def test_one_step_for_max_steps_0(tmp_path: Any) -> None:
    """As the plain Trainer makes, with its rate; the device's cache is emptied as often as asked for."""
    assert run_ranks(hardly_trained, 1, str(tmp_path)) == [([1, 0, 1, 2], 0.0)]


def hardly_trained(directory: str) -> tuple[list[int], float]:
    from deepspeed.accelerator import get_accelerator

    trainer = made(directory, arguments={"max_steps": 0})
    steps = [trainer.train().global_step]
    rate = trainer.state.log_history[0]["learning_rate"]
    trainer.args.max_steps, trainer.args.torch_empty_cache_steps = 5, 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "empty_cache", lambda: steps.append(trainer.state.global_step // 2))
        trainer.train()
    return steps, rate


def looked_at(directory: str) -> None:
    trainer, calls = made(directory), []
    trainer.train()
    state = trainer.optimizer.state_dict()
    assert [group["lr"] for group in state["param_groups"]] == [0.0, 0.0]  # it has decayed
    assert state["state"]
    trainer.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    trainer.deepspeed.train_batch(iter(step_batches(0)))
    assert calls == [1]
    with pytest.raises(ValueError, match="resume_from_checkpoint"):
        trainer.optimizer.load_state_dict(state)


class Drawn(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows that are drawn when they are read."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 97, (12,))
        return {"input_ids": ids, "labels": ids.clone()}


def test_data_that_are_drawn_beside_dropout(tmp_path: Any) -> None:
    """Stages draw dropout differently often, and must read the same."""
    for told, losses in run_ranks(drawn, 2, str(tmp_path)):
        assert "let them draw from one of their own, or in dataloader workers" in told
        assert len(losses) == STEPS


def drawn(directory: str) -> tuple[str, list[float]]:
    from transformers import AutoModelForCausalLM

    def trainer(**arguments: Any) -> Any:
        model = AutoModelForCausalLM.from_config(model_config(num_hidden_layers=5, attention_dropout=0.1))
        return made(directory, stages=2, model=model, train_dataset=Drawn(), arguments=arguments)

    with pytest.raises(ValueError, match="different data") as told:
        trainer().train()
    working = trainer(dataloader_num_workers=1)
    working.train()
    return str(told.value), [entry["loss"] for entry in working.state.log_history if "loss" in entry]


def test_data_that_are_drawn_in_workers_go_on_as_they_would_have(tmp_path: Any) -> None:
    """Each epoch has numbers of its own, those that it had if a run had not stopped before it. Nothing is learned."""
    for whole, resumed in run_ranks(epochs_of_drawn_data, 2, str(tmp_path)):
        assert len({round(loss, 6) for loss in whole}) == len(whole) == 4
        assert resumed == whole


def epochs_of_drawn_data(directory: str) -> tuple[list[float], list[float]]:
    found = []
    for resumes in (False, True):
        arguments = {"dataloader_num_workers": 1, "max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch"}
        arguments["learning_rate"] = 0.0
        trainer = made(directory, stages=2, train_dataset=Drawn(), arguments=arguments)
        trainer.train(resume_from_checkpoint=f"{directory}/checkpoint-2" if resumes else None)
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found[0], found[1]


def test_learning_rates_without_a_flush(tmp_path: Any) -> None:
    for rates in run_ranks(logged_rates, 2, str(tmp_path)):
        assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def logged_rates(directory: str) -> list[float]:
    trainer = made(directory, stages=2, schedule="one_direction")
    trainer.train()
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


WARMUP = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 8, "total_num_steps": 12, "warmup_max_lr": 0.1}}


RANGE_TEST = {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2}}


@pytest.mark.parametrize(
    ("scheduler", "schedule"),
    [(WARMUP, "one_direction"), (RANGE_TEST, "multidirection")],
    ids=["warm-up-one_direction", "range test-multidirection"],
)
def test_learning_rates_of_deepspeeds_own_schedulers(schedule: str, scheduler: dict[str, Any]) -> None:
    wanted = run_ranks(rates_of_steps, 1, 1, "1f1b", scheduler)[0]
    assert len(set(wanted)) >= STEPS
    assert run_ranks(rates_of_steps, 2, 2, schedule, scheduler) == [wanted, wanted]


def rates_of_steps(stages: int, schedule: str, scheduler: dict[str, Any]) -> list[float]:
    import paceline

    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES,
        scheduler=scheduler,
        paceline={"pipeline": {"stages": stages, "schedule": schedule}},
    )
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    rates = []
    for step in range(STEPS):
        rates.append(engine.get_lr()[0])
        engine.train_batch(iter(step_batches(step)))
    rates.append(engine.get_lr()[0])
    if schedule != "1f1b":
        engine.flush()
    rates.append(engine.get_lr()[0])
    return rates


def gathered_where_accelerate_expects_nccl() -> list[int]:
    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.utils.operations import _gpu_gather

    from paceline.runtime.training_arguments import match_backend

    dist.init_process_group("gloo")
    PartialState(cpu=True).backend = "nccl"  # what it takes for the group's where it sees a GPU
    match_backend()
    found: list[int] = _gpu_gather(torch.tensor([[2 * dist.get_rank(), 1]])).flatten().tolist()
    return found


def test_accelerate_gathers_as_the_group_can_where_ranks_share_a_gpu() -> None:
    assert run_ranks(gathered_where_accelerate_expects_nccl, 2) == [[0, 1, 2, 1]] * 2
