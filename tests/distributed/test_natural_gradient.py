"""Natural gradients of the JSON in pipelines: as Hugging Face's model and ``NaturalGradients`` make them by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from support.jobs import TINY, ds_config, finetune, flags, model_config, step_batches
from support.natural import (
    ANY_OPTIMIZER,
    AUTOCAST,
    FAST,
    LAYERS,
    LIMITED,
    NO_SUCH_LAYERS,
    OPTIONS,
    SGD,
    allow_fp16,
    assert_close,
    assert_is_limited,
    assert_limited,
    learned,
    same,
    size,
)
from support.ranks import run_ranks

STEPS, MICRO_BATCHES = 4, 4
NO_EXPERTS = {**OPTIONS, "layers": "self_attn|lm_head"}


def data_of(step: int) -> list[dict[str, Tensor]]:
    """Micro-batches of one step, of all replicas; the last one has no label."""
    return step_batches(step, "full")[:MICRO_BATCHES]


# -- pipelines -------------------------------------------------------------------------------------------------------


MORE = {"mixtral": {"num_local_experts": 5}}
"""Two ranks share three and two of them."""


def engine_of(
    stages: int,
    family: str = "llama",
    tied: bool = False,
    zero: int = 1,
    options: Mapping[str, Any] | None = OPTIONS,
    layers: int = LAYERS,
    section: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Any:
    import paceline

    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES * stages // int(os.environ["WORLD_SIZE"]),
        zero_optimization={"stage": zero},
        paceline={"pipeline": {"stages": stages, "partition": "uniform", **(section or {})}},
    )
    if options is not None:
        config["paceline"]["natural_gradient"] = options
    config |= {"optimizer": SGD, **changes}
    model = model_config(family, num_hidden_layers=layers, tie_word_embeddings=tied, **MORE.get(family, {}))
    return paceline.initialize(model=model, config=config)[0]


def steps(engine: Any, first: int, count: int) -> list[float]:
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    return [engine.train_batch(iter(data_of(step)[replica::replicas])).item() for step in range(first, first + count)]


def values(engine: Any) -> dict[str, Tensor]:
    return {name: p.detach().float().clone() for name, p in engine.module.stage.model.named_parameters()}


def run(stages: int, count: int = STEPS, **case: Any) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, weights and estimates of a pipeline."""
    engine = engine_of(stages, **case)
    found = steps(engine, 0, count), values(engine), learned(engine) if engine.natural_gradient else {}
    engine.destroy()
    return found


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped, tied": {"tied": True, "gradient_clipping": 0.3, "zero": 0},
    "gpt2": {"family": "gpt2", "tied": True},
    "mixtral": {"family": "mixtral"},
    "simple": {"options": {"method": "simple"}},
}
REPLICATED = ("clipped, tied", "mixtral")


def cases_of(replicas: int) -> dict[str, dict[str, Any]]:
    return CASES if replicas == 1 else {name: CASES[name] for name in REPLICATED}


def pipelines(stages: int, replicas: int) -> dict[str, Any]:
    return {name: run(stages, **case) for name, case in cases_of(replicas).items()}


def alone(replicas: int) -> dict[str, Any]:
    return {name: by_hand(replicas, **case) for name, case in cases_of(replicas).items()}


def by_hand(
    replicas: int,
    family: str = "llama",
    tied: bool = False,
    gradient_clipping: float = 0.0,
    zero: int = 0,
    options: Mapping[str, Any] = OPTIONS,
    couple: Callable[..., Callable[[float], None]] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Each replica a model with estimates of its own, their gradients summed; micro-batches one after another.

    Args:
        couple: called with the models; what it gives, after each had a micro-batch, with the number of label tokens.
    """
    from paceline.config.natural_gradient_keys import NaturalGradientConfig
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage
    from paceline.optim.natural_layers import NaturalGradients

    config = model_config(family, num_hidden_layers=LAYERS, tie_word_embeddings=tied, **MORE.get(family, {}))
    models: list[Any] = [load_stage(None, config, Cut.whole(LAYERS)).model for _ in range(replicas)]
    tokens = [0.0]
    for model in models:
        NaturalGradients(NaturalGradientConfig(**options), lambda rows: tokens[0]).adopt(model)
    share = None if couple is None else couple(models)
    optimizer = torch.optim.SGD(models[0].parameters(), **SGD["params"])
    losses = []
    for step in range(STEPS):
        batches = data_of(step)
        tokens[0] = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for number, batch in enumerate(batches):
            outputs = models[number % replicas](**batch, num_items_in_batch=tokens[0], use_cache=False)
            loss = outputs.loss
            if (router := getattr(outputs, "aux_loss", None)) is not None:  # one a step
                loss = loss - (1 - 1 / MICRO_BATCHES) * config.router_aux_loss_coef * router
            loss.backward()
            total += loss.item()
            if share is not None and number % replicas == replicas - 1:
                share(tokens[0])
        losses.append(total)
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            parameters[0].grad = sum(p.grad for p in parameters)
        if gradient_clipping:
            torch.nn.utils.clip_grad_norm_(models[0].parameters(), gradient_clipping)
        optimizer.step()
        for model in models:
            model.zero_grad()
            model.load_state_dict(models[0].state_dict())
    return losses, {name: p.detach() for name, p in models[0].named_parameters()}


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (2, 2)])
def test_pipelines_are_as_by_hand(stages: int, replicas: int) -> None:
    """Two replicas learn each from its own micro-batches."""
    ranks = run_ranks(pipelines, stages * replicas, stages, replicas)
    for name, (losses, weights) in run_ranks(alone, 1, replicas)[0].items():
        for rank in ranks:
            found, state, _ = rank[name]
            assert found == pytest.approx(losses, rel=1e-6), name
            assert_close(state, weights, 1e-5)


# -- what is to change nothing, and what little ----------------------------------------------------------------------

FEW = 3
"""Steps, eleven updates and more."""
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
UNCHANGED = {
    "plain": {},
    "recomputed": {"pipeline": {"activation_checkpoint_interval": 1}},
    "kfkb": {"section": {"schedule": {"type": "kfkb", "k": 2}}},
}
PRECISIONS = {"bf16": {"bf16": {"enabled": True}}, "fp16": FP16, "autocast": AUTOCAST}


def variants() -> dict[str, Any]:
    allow_fp16()
    cases = {**UNCHANGED, **PRECISIONS, "ordinary": {"options": None}}
    return {name: run(2, FEW, **case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def two_stages() -> list[Any]:
    return run_ranks(variants, 2)


def test_no_bit_depends_on_schedule_or_recomputation(two_stages: Any) -> None:
    """Backwards of a stage come in the order of the micro-batches, whatever the schedule."""
    for rank in two_stages:
        for name in UNCHANGED:
            losses, weights, estimates = rank[name]
            assert losses == rank["plain"][0], name
            assert same(weights, rank["plain"][1]), name
            assert same(estimates, rank["plain"][2]), name
            assert estimates


def test_precisions_follow(two_stages: Any) -> None:
    for rank in two_stages:
        for name, tolerance in (("bf16", 5e-3), ("fp16", 1e-3), ("autocast", 5e-3)):
            assert rank[name][0] == pytest.approx(rank["plain"][0], rel=tolerance), name
            assert {value.dtype for value in rank[name][2].values()} <= {torch.float32, torch.float64, torch.int64}
            assert size(rank[name][2]) == pytest.approx(size(rank["plain"][2]), rel=0.1), name  # the scale is undone


def padded(options: Mapping[str, Any] | None, as_on_a_gpu: bool) -> dict[str, Tensor]:
    """Weights after a step of samples with padding behind them, and what the first stage gave out at padding."""
    from paceline.hf import masks, stage

    def needs_mask(device: torch.device) -> bool:
        return masks.needs_mask(torch.device("cuda"))

    with mock.patch.object(stage, "needs_mask", needs_mask if as_on_a_gpu else stage.needs_mask):
        engine = engine_of(2, options=options)
        outputs: list[Tensor] = []
        engine.module.stage.register_forward_hook(lambda *call: outputs.append(call[-1][0].detach().clone()))
        engine.train_batch(iter(step_batches(0, "padded")))
        found = {**values(engine), "outputs": outputs[0]}
    engine.destroy()
    return found


def with_and_without_masks() -> list[list[dict[str, Tensor]]]:
    return [[padded(options, as_on_a_gpu) for as_on_a_gpu in (False, True)] for options in (OPTIONS, None)]


def test_padding_is_computed_as_elsewhere_on_a_gpu_which_may_leave_out_its_mask() -> None:
    """Estimates are of all rows: no mask is left out, as it is for ordinary gradients."""
    for natural, ordinary in run_ranks(with_and_without_masks, 2):
        assert same(natural[1], natural[0])
        assert not torch.equal(ordinary[1]["outputs"], ordinary[0]["outputs"])


def test_it_does_something(two_stages: Any) -> None:
    for rank in two_stages:
        assert rank["plain"][0] != pytest.approx(rank["ordinary"][0], rel=1e-4)


def overflowing() -> dict[str, Any]:
    """The loss scale is too large at first; and again when a gradient is."""
    allow_fp16()
    engine = engine_of(2, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 100})
    found: dict[str, Any] = {"losses": steps(engine, 0, FEW)}
    while engine.skipped_steps == engine.global_steps:
        steps(engine, engine.global_steps, 1)
    found["skipped"], found["losses"] = engine.skipped_steps, steps(engine, 0, FEW)
    found["estimates"] = learned(engine)
    before = {name: tensor for name, tensor in found["estimates"].items() if name.endswith("rho of outputs")}
    handle = next(engine.module.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    steps(engine, 0, 1)
    handle.remove()
    found["skipped later"] = engine.skipped_steps
    found["changed"] = any(not torch.equal(learned(engine)[name], tensor) for name, tensor in before.items())
    return found


def test_steps_that_overflow_leave_estimates_sound(two_stages: Any) -> None:
    """What was learned with a loss scale that was too large is nothing; training then is as without."""
    for rank, exact in zip(run_ranks(overflowing, 2), two_stages, strict=True):
        assert 0 < rank["skipped"] < 20
        assert rank["skipped later"] == rank["skipped"] + 1
        assert rank["changed"]  # other layers' gradients are sound in such a step
        assert all(tensor.isfinite().all() for tensor in rank["estimates"].values())
        assert rank["losses"] == pytest.approx(exact["plain"][0], rel=2e-3)


# -- experts on several ranks ----------------------------------------------------------------------------------------

EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}


def on_two_ranks(stages: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {"all": OPTIONS, "no experts": NO_EXPERTS}.items():
        engine = engine_of(stages, "mixtral", options=options, **EXPERTS)
        found[name] = steps(engine, 0, STEPS), values(engine)
        found["share"] = engine.grid.data_parallel_id
        engine.destroy()
    found["together"] = run(stages, family="mixtral", options=NO_EXPERTS)
    found["on one"] = run(stages, family="mixtral")
    return found


def in_halves(models: Sequence[nn.Module]) -> Callable[[float], None]:
    """Experts' gradients of all models together, in halves, as two ranks have them, each with its own estimates."""
    from paceline.optim import OnlineNaturalGradient

    known: dict[tuple[str, int, bool], OnlineNaturalGradient] = {}
    raw: dict[str, Tensor] = {}

    def put_aside(name: str, gradient: Tensor) -> Tensor:
        raw[name] = raw.get(name, 0.0) + gradient
        return torch.zeros_like(gradient)

    def divided(name: str, place: int, is_out: bool, gradient: Tensor, tokens: float) -> Tensor:
        one = known.setdefault(
            (name, place, is_out), OnlineNaturalGradient(8, 1.0, num_minibatches_history=10, update_period=2)
        )
        rows, scale = one.precondition(tokens * gradient.reshape(-1, gradient.shape[-1]))
        return (scale * rows / tokens).reshape(gradient.shape)

    def share(tokens: float) -> None:
        for name, gradient in raw.items():
            halves = [
                divided(name, place, True, divided(name, place, False, half, tokens).mT.contiguous(), tokens).mT
                for place, half in enumerate(gradient.chunk(2))
            ]
            models[0].get_parameter(name).grad += torch.cat(halves)
        raw.clear()

    for model in models:
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.register_hook(lambda gradient, name=name: put_aside(name, gradient))
    return share


def by_halves() -> tuple[list[float], dict[str, Tensor]]:
    return by_hand(2, "mixtral", options=NO_EXPERTS, couple=in_halves)


def test_experts_on_two_ranks() -> None:
    """A rank learns from the experts that it has, and from the tokens of both; of the other layers nothing changes."""
    losses, weights = run_ranks(by_halves, 1)[0]
    for rank in run_ranks(on_two_ranks, 4, 2):
        found, state = rank["all"]
        assert found == pytest.approx(losses, rel=1e-6)
        here = {n: w.chunk(2)[rank["share"]] if "experts" in n else w for n, w in weights.items()}
        assert {len(w) for n, w in state.items() if "experts" in n} == {3}, "one slot of the second rank is empty"
        assert_close({name: weight[: len(here[name])] for name, weight in state.items()}, here, 1e-5)
        assert rank["no experts"][0] == pytest.approx(rank["together"][0], rel=1e-6)
        # Half as many experts are seen by an estimate: another one of the same kind.
        assert found == pytest.approx(rank["on one"][0], rel=1e-4)


# -- checkpoints of pipelines, and layers that move ------------------------------------------------------------------

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "gradient_clipping": 0.5}
SAVED = 5
"""Steps of two replicas, ten micro-batches each: what comes next does not update each estimate each time."""


def saves(root: str) -> list[Any]:
    from paceline.runtime.model_export import export

    engine = engine_of(2, **ADAM)
    steps(engine, 0, SAVED)
    engine.save_checkpoint(root, wait=False)
    after = steps(engine, SAVED, 3)
    engine.finish_checkpoint()
    export(engine.module, f"{root}/model", engine.control)
    return [after, values(engine), learned(engine)]


def goes_on(root: str, stages: int, save: bool = False) -> list[Any]:
    engine = engine_of(stages, **ADAM)
    steps(engine, 20, 1)  # whatever was learned before
    engine.load_checkpoint(root)
    loaded = learned(engine)
    after = steps(engine, SAVED, 3)
    return [after, values(engine), learned(engine), loaded]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    root = str(tmp_path_factory.mktemp("saved"))
    return root, run_ranks(saves, 4, root)


def test_resuming_is_bitwise(saved: Any) -> None:
    root, wanted = saved
    for (losses, weights, estimates), found in zip(wanted, run_ranks(goes_on, 4, root, 2), strict=True):
        assert found[0] == losses
        assert same(found[1], weights)
        assert same(found[2], estimates)


def test_another_number_of_stages_goes_on_with_the_estimates(saved: Any) -> None:
    """Two stages are one, and each replica has what it learned: only sums of the norm are taken in another order."""
    root, wanted = saved
    one_stage = run_ranks(goes_on, 2, root, 1)
    for replica, (losses, weights, estimates, _) in enumerate(one_stage):
        assert losses == pytest.approx(wanted[0][0], rel=1e-6)
        for stage in (0, 1):
            _, state, learned_there = wanted[2 * stage + replica]
            assert_close({name: weights[name] for name in state}, state, 1e-4)
            assert learned_there.keys() < estimates.keys()
    assert not same(one_stage[0][3], one_stage[1][3])
    assert one_stage[0][0] != run_ranks(forgets, 2, root)[0]


def changes_places(root: str) -> list[Any]:
    """Two stages a rank, of which each rank has another one after the checkpoint."""
    found: list[Any] = []
    for schedule in ("interleaved", "zbv"):
        engine = engine_of(2, section={"schedule": schedule}, layers=4)
        if found:
            engine.load_checkpoint(root)
        else:
            steps(engine, 0, 1)
            engine.save_checkpoint(root)
        found += [learned(engine), engine.natural_gradient.names]
        engine.destroy()
    return found


def test_another_order_of_stages_goes_on_with_the_estimates(tmp_path: Path) -> None:
    ranks = run_ranks(changes_places, 2, str(tmp_path))
    wanted = {name: estimate for rank in ranks for name, estimate in rank[0].items()}
    assert ranks[0][1] != ranks[0][3], "it has other layers"
    for _, _, found, names in ranks:
        assert same(found, {name: tensor for name, tensor in wanted.items() if name.partition(", ")[0] in names})


def forgets(root: str) -> list[float]:
    """The same, but for what was learned."""
    engine = engine_of(1, **ADAM)
    engine.natural_gradient.load = lambda states: None
    engine.load_checkpoint(root)
    return steps(engine, SAVED, 3)


def test_exported_models_are_ordinary(saved: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from paceline.launch.cli import main

    root, wanted = saved
    assert main(["export", root, str(tmp_path / "model")]) == 0
    for folder in (f"{root}/model", str(tmp_path / "model")):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert type(model.lm_head) is nn.Linear
        if folder.startswith(root):
            state = {**wanted[0][1], **wanted[2][1]}
            assert same({name: p.detach() for name, p in model.named_parameters()}, state)


def moves(moving: bool, is_frozen: bool, family: str = "llama") -> list[Any]:
    """Layers may be frozen in the steps around the second move, in which one comes to the second stage."""
    engine = engine_of(2, family)
    losses = steps(engine, 0, 1)
    for step, parts in enumerate(([0, 3, 4], [0, 1, 4], [0, 2, 4]), 1):
        if is_frozen and step > 1:
            for name, parameter in engine.module.named_parameters():
                if ".layers." in name:
                    parameter.requires_grad_(step == 3)
        if moving and not (is_frozen and step == 3):
            engine.repartition(parts)
        losses += steps(engine, step, 3 if step == 3 else 1)
    engine.repartition([0, 2, 4])
    found = [losses, values(engine), learned(engine)]
    engine.destroy()
    return found


CHANGES: dict[str, dict[str, Any]] = {
    "as they are": {"is_frozen": False},
    "frozen experts": {"is_frozen": True, "family": "mixtral"},
}


def moves_or_not() -> dict[str, list[Any]]:
    return {name: [moves(True, **changes), moves(False, **changes)] for name, changes in CHANGES.items()}


def test_layers_take_along_what_was_learned_of_them() -> None:
    for rank in run_ranks(moves_or_not, 4):
        for name, ((losses, weights, estimates), (wanted, state, known)) in rank.items():
            assert losses == wanted, name
            assert same(weights, state), name
            assert same(estimates, known), name


# -- limits of changes -----------------------------------------------------------------------------------------------


def limited() -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    """Changes of the first steps, and what is reported of them."""
    engine = engine_of(2, options=LIMITED, optimizer=FAST)
    found = []
    for step in range(3):
        before = values(engine)
        steps(engine, step, 1)
        changes = {name: value - before[name] for name, value in values(engine).items()}
        found.append((changes, engine.optimizer.max_change_report))
    return found


def test_with_max_change_updates_obey_the_limits() -> None:
    for (first, report), (last, same_report) in zip(*run_ranks(limited, 2), strict=True):
        assert report == same_report
        assert_limited(first | last, report)


def first_changes() -> dict[str, list[dict[str, Tensor]]]:
    """Of each optimizer's first step, without limits and with them, and without natural gradients."""
    found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in ANY_OPTIMIZER}
    for name, optimizer in ANY_OPTIMIZER.items():
        for section in ({}, {"max_change": {}}):
            paceline = {"pipeline": {"stages": 2, "partition": "uniform"}, **section}
            engine = engine_of(2, options=None, optimizer=optimizer, paceline=paceline)
            before = values(engine)
            steps(engine, 0, 1)
            found[name].append({key: value - before[key] for key, value in values(engine).items()})
            engine.destroy()
    return found


def test_max_change_of_any_optimizer() -> None:
    first, last = run_ranks(first_changes, 2)
    for name in ANY_OPTIMIZER:
        free, limited = (one | other for one, other in zip(first[name], last[name], strict=True))
        assert_is_limited(free, limited)


# -- any pipeline ----------------------------------------------------------------------------------------------------

WIDTH, OUT, BLOCKS = 12, 7, 4


class Block(nn.Module):
    """A linear layer, and two stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ParameterDict({"up": nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return x + torch.einsum("bd,eod->bo", x, self.experts["up"]) / 8


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def blocks_of(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(24, WIDTH, generator=generator), torch.randint(0, OUT, (24,), generator=generator))
        for _ in range(MICRO_BATCHES)
    ]


def module_of(stages: int) -> Any:
    """Of modules that are there, which come back as they were when their layers have been elsewhere."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, OUT)]
    return PipelineModule(layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform")


def any_pipeline(stages: int, moves: Sequence[Sequence[int]] = ()) -> Any:
    import paceline

    module = module_of(stages)
    config = ds_config(
        train_micro_batch_size_per_gpu=24,
        gradient_accumulation_steps=MICRO_BATCHES,
        paceline={"natural_gradient": OPTIONS},
    )
    config["optimizer"] = SGD
    engine, *_ = paceline.initialize(
        model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=config
    )
    losses = []
    for step in range(STEPS):
        if step < len(moves):
            engine.repartition(moves[step])
        losses.append(engine.train_batch(iter(blocks_of(step))).item())
    return losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}, learned(engine)


def any_by_hand() -> tuple[list[float], dict[str, Tensor]]:
    from paceline.config.natural_gradient_keys import NaturalGradientConfig
    from paceline.optim.natural_layers import NaturalGradients

    module = module_of(1)
    NaturalGradients(NaturalGradientConfig(**OPTIONS), lambda rows: 24.0 * MICRO_BATCHES).adopt(module)
    optimizer = torch.optim.SGD(module.parameters(), **SGD["params"])
    losses = []
    for step in range(STEPS):
        own = [loss_of(module(x), labels) / MICRO_BATCHES for x, labels in blocks_of(step)]
        for loss in own:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in own))
    return losses, {name: p.detach() for name, p in module.named_parameters()}


def test_any_pipeline_module() -> None:
    """Also one whose layers move away and come back."""
    losses, weights = run_ranks(any_by_hand, 1)[0]
    estimates: dict[str, Tensor] = {}
    for stages, moves in ((1, ()), (2, ()), (2, ([0, 1, 5], [0, 4, 5], [0, 2, 5]))):
        together: dict[str, Tensor] = {}
        for found, state, known in run_ranks(any_pipeline, stages, stages, moves):
            assert found == pytest.approx(losses, rel=1e-6)
            assert_close(state, weights, 1e-5)
            together |= known
        assert {name.split(",")[0] for name in together} == set(weights) - {n for n in weights if n.endswith("bias")}
        if moves:
            assert same(together, estimates)
        estimates = together


# -- the main job ----------------------------------------------------------------------------------------------------


def test_the_main_job_reports(tmp_path: Path) -> None:
    """Of all stages together; replicas have the same layers."""
    config = {"paceline": {"pipeline": {"stages": 2}, "natural_gradient": {"update_period": 2, "max_change": {}}}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    argv = flags(**TINY, deepspeed=tmp_path / "ds.json", output_dir=tmp_path / "model")
    for code, errors in run_ranks(finetune, 4, argv):
        assert code == 0, errors
    lines = [json.loads(line) for line in (tmp_path / "model" / "metrics.jsonl").read_text().splitlines()]
    reports = [line for line in lines if "grad_norm" in line]
    assert len(reports) == 2
    for line in reports:
        told = line["natural_gradient"]
        assert told["layers"] == 4 * 7 + 1
        assert told["updates"] > 0
        assert 0 <= told["at_floor"] < 0.5
        assert 0 < line["max_change"]["norm"] <= 2
        assert line["max_change"]["num_limited"] >= 0
    assert reports[1]["natural_gradient"]["updates"] > reports[0]["natural_gradient"]["updates"]


# -- what is wrong is said -------------------------------------------------------------------------------------------


def refused(schedule: Any, options: Mapping[str, Any]) -> str:
    try:
        engine_of(2, section={"schedule": schedule}, options=options)
    except ValueError as error:
        return str(error)
    return ""


def test_layers_that_are_not_there() -> None:
    options = {"layers": "nonsense", "max_change": {}}
    assert run_ranks(refused, 2, "1f1b", options) == [NO_SUCH_LAYERS] * 2
