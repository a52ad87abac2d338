"""Decoder layers that torch.compile compiles train as they do without."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.jobs import LAYERS, MICRO_BATCHES, assert_equal, ds_config, model_config, step_batches, train
from support.ranks import OneAfterAnother, on, run_ranks

STEPS = 3
EAGER = {"compile": {"backend": "aot_eager"}}
"""Graphs of whole layers, forward and backward, whose operations are those of PyTorch: no bit differs."""
BF16 = {"bf16": {"enabled": True}}
UNIFORM = {"stages": 2, "partition": "uniform"}
SPREAD = {"enabled": True, "autoep_size": 2}
CUT = [0, 4, 2 * LAYERS + 2]
"""Boundaries over halves of layers: the second stage begins with an MLP."""
CUTS = {"after attention": CUT, "between layers": [0, 5, 2 * LAYERS + 2]}
RECOMPUTED_GPT2 = {"family": "gpt2", "checkpointing": True}
EXPERTS, SPLIT_EXPERTS = "experts on several ranks", "split backwards of experts on several ranks"
CASES: dict[str, Any] = {
    "bf16, ZeRO 1, 2 replicas": on(2, 1, zero=1, clipping=0.05, more=BF16),
    "lengths of gpt2, recomputed": on(2, 2, kind="ragged", **RECOMPUTED_GPT2),
    "interleaved": on(2, 2, schedule="interleaved"),
    "split backwards": on(2, 2, schedule="zbv", kind="ragged"),
    "split backwards of halves of gpt2 in bf16, recomputed": on(
        2, 2, schedule="zbh1", kind="ragged", zero=1, more=BF16, partition=CUT, half_layers=True, **RECOMPUTED_GPT2
    ),
    "halves of gpt2, recomputed": on(2, 2, partition=CUT, half_layers=True, **RECOMPUTED_GPT2),
    EXPERTS: on(2, 1, family="mixtral", more={"expert_parallel": SPREAD}),
    SPLIT_EXPERTS: on(2, 1, family="mixtral", more={"expert_parallel": SPREAD}, schedule="zbh1"),
}
"""Other features beside compiled layers: `test_combinations`."""

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="inductor needs a C++ compiler on CPUs: it runs where g++ is",
)


def counted(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """:func:`train`, and how many graphs were made."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()  # or these ranks have had so many graphs of other cases that no more are made
    counters.clear()
    found = train(*args, steps=STEPS, **kwargs)
    return {**found, "graphs": counters["stats"]["unique_graphs"]}


def trained(
    pipeline: dict[str, Any],
    more: dict[str, Any] | None = None,
    call: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Args: ``call`` has the arguments of the engine's ``compile``, which DeepSpeed's users call after it is made."""
    import torch._inductor.config
    from torch._dynamo.utils import counters

    import paceline

    torch.compiler.reset()
    counters.clear()
    torch._inductor.config.compile_threads = 1  # or each rank starts processes, which import torch
    section = {"pipeline": pipeline, **(section or {})}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline=section, **(more or {}))
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    if call is not None:
        engine.compile(**call)
    assert engine.is_compiled == (call is not None or "compile" in pipeline), "as DeepSpeed's engine says"
    losses = [engine.train_batch(iter(step_batches(step))).item() for step in range(STEPS)]
    state = {name: parameter.detach().clone() for name, parameter in engine.module.stage.model.named_parameters()}
    return {"losses": losses, "state": state, "graphs": counters["stats"]["unique_graphs"]}


def compiled(case: Any) -> Any:
    return on(case.world_size, *case.args, keys=EAGER, **case.kwargs)


RUNS = OneAfterAnother(
    counted,
    {
        ("2 stages", "plain"): on(2, 2),
        **{(name, "plain"): case for name, case in CASES.items()},
        **{(name, "compiled"): compiled(case) for name, case in CASES.items()},
    },
    at_once=6,
)


@pytest.mark.parametrize("name", [name for name in CASES if name not in (EXPERTS, SPLIT_EXPERTS)])
def test_no_bit_differs_from_layers_that_are_not_compiled(name: str) -> None:
    plain, found = RUNS[name, "plain"], RUNS[name, "compiled"]
    assert all(rank["graphs"] == 0 for rank in plain)
    assert all(rank["graphs"] > 0 for rank in found), found
    assert_equal(found, plain)
    assert [rank["evaluation"] for rank in found] == [rank["evaluation"] for rank in plain]
    assert [rank["norms"] for rank in found] == [rank["norms"] for rank in plain]


@pytest.mark.parametrize("name", [EXPERTS, SPLIT_EXPERTS])
def test_the_same_up_to_rounding(name: str) -> None:
    """A compiled backward adds the gradients of an input of several experts up in another order."""
    assert_alike(RUNS[name, "compiled"], RUNS[name, "plain"])


HALVES = {"stages": 2, "half_layers": True, "compile": True}
FUSED = OneAfterAnother(
    trained,
    {
        "2 stages": on(2, {**UNIFORM, "compile": True}),
        "split backwards": on(2, {**UNIFORM, "schedule": "zbh1", "compile": True}),
        **{name: on(2, {**HALVES, "partition": cut}, BF16) for name, cut in CUTS.items()},
    },
)
"""By inductor; halves in bf16, where a fused kernel rounds once what single ones round each."""


def assert_alike(found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, plain, strict=True):
        assert ours["graphs"] > 0
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        for key, tensor in theirs["state"].items():
            # Adam moves a weight of next to no gradient by as much as any other; rounding depends on the CPU.
            torch.testing.assert_close(ours["state"][key], tensor, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("name", ["2 stages", "split backwards"])
def test_fused_kernels_give_the_same_up_to_rounding(name: str) -> None:
    assert_alike(FUSED[name], RUNS["2 stages", "plain"])


@needs_compiler
def test_kernels_of_a_half_are_the_same_wherever_the_other_is() -> None:
    assert_equal(*(FUSED[name] for name in CUTS))
    assert all(rank["graphs"] > 0 for name in CUTS for rank in FUSED[name])


def test_the_call_of_deepspeeds_users_compiles_the_layers() -> None:
    found, plain = run_ranks(trained, 2, UNIFORM, None, {"backend": "aot_eager"}), RUNS["2 stages", "plain"]
    assert_equal(found, plain)
    assert [rank["graphs"] for rank in found] == [1, 1], "one for the two alike layers of each rank"


def moved(half_layers: bool, keys: dict[str, Any]) -> dict[str, Any]:
    """A run in which a layer or half comes and one goes, and in whose last step those here are timed: seconds of
    forward and backward, and saved and output bytes."""
    from torch._dynamo.utils import counters

    import paceline
    from paceline.hf.stage import PassThrough
    from paceline.runtime.compiled_layers import CompiledLayer

    torch.compiler.reset()
    counters.clear()
    moves = HALVES_MOVE if half_layers else LAYERS_MOVE
    pipeline = {"stages": 2, "partition": moves[0], "half_layers": half_layers, **keys}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": pipeline})
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    losses = []
    for step in range(STEPS):
        if step > 0:
            engine.repartition(moves[step])
        losses.append(engine.train_batch(iter(step_batches(step))).item())
    layers = [layer for layer in engine.module.stage.model.model.layers if not isinstance(layer, PassThrough)]
    num_graphs = counters["stats"]["unique_graphs"]
    engine.meter.time_layers(engine.layers)
    engine.train_batch(iter(step_batches(STEPS)))
    reports = engine.meter.stop_timing_layers(engine.layers, 2)
    return {
        "are_compiled": [isinstance(layer, CompiledLayer) for layer in layers],
        "losses": losses,
        "graphs": num_graphs,
        "graphs_for_times": counters["stats"]["unique_graphs"] - num_graphs,
        "times": {item: tuple(found.times) for item, found in reports.items()},
    }


LAYERS_MOVE = [0, 3, 6], [0, 2, 6], [0, 4, 6]
HALVES_MOVE = CUT, [0, 5, 10], [0, 6, 10]
MOVED = OneAfterAnother(
    moved, {"layers": on(2, False, EAGER), "halves": on(2, True, EAGER), "halves, plain": on(2, True, {})}
)


@pytest.mark.parametrize(
    ("what", "are_compiled"), [("layers", [[True] * 3, [True]]), ("halves", [[True] * 3, [True] * 2])]
)
def test_layers_that_arrive_are_compiled(what: str, are_compiled: list[list[bool]]) -> None:
    found, plain = MOVED[what], RUNS["2 stages", "plain"]
    assert [rank["are_compiled"] for rank in found] == are_compiled
    assert [rank["losses"] for rank in found] == [rank["losses"] for rank in plain]


def graphs_of_measurements(pipelines: Sequence[dict[str, Any]]) -> list[list[int]]:
    """How many graphs are made by each measurement of layers before there is a pipeline."""
    from torch._dynamo.utils import counters

    import paceline
    from paceline.runtime import hetero, plan_at_start

    found: list[list[int]] = []
    profile_items = hetero.profile_items

    def noted(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.reset()
        counters.clear()
        items = profile_items(*args, **kwargs)
        found[-1].append(counters["stats"]["unique_graphs"])
        return items

    hetero.profile_items = plan_at_start.profile_items = noted
    for pipeline in pipelines:
        found.append([])
        config = ds_config(train_batch_size=8, paceline={"pipeline": pipeline})
        for fixed in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):  # what a plan chooses
            del config[fixed]
        paceline.initialize(model=model_config(), config=config)[0].destroy()
    return found


def test_layers_are_compiled_where_they_are_measured_for_a_plan() -> None:
    pipelines = [{"stages": 2, "partition": "hetero", **EAGER}, {"stages": "plan", **EAGER}]
    for first, planned in run_ranks(graphs_of_measurements, 2, pipelines):
        assert (first, set(planned)) == ([1], {1})


@pytest.mark.parametrize("name", ["lengths of gpt2, recomputed", "split backwards"])
def test_graphs_are_made_once_for_alike_layers_and_once_more_for_lengths(name: str) -> None:
    """One for the first length, one for all others, and one for the evaluation, of two layers on each rank."""
    assert {rank["graphs"] for rank in RUNS[name, "compiled"]} == {3}


def test_graphs_are_made_once_for_alike_halves() -> None:
    """Wherever the other half is, and also of those that arrive."""
    assert {rank["graphs"] for rank in MOVED["halves"]} == {2}


def test_halves_that_are_compiled_are_timed_each() -> None:
    """Also those of a layer that is whole on its stage; and no graph is made for it, which would take long."""
    for found, plain in zip(MOVED["halves"], MOVED["halves, plain"], strict=True):
        assert found["graphs_for_times"] == 0
        times, wanted = found["times"], plain["times"]
        assert times.keys() == wanted.keys()
        for item, (forward_s, backward_s, saved_bytes, output_bytes) in times.items():
            assert min(forward_s, backward_s) > 0
            assert output_bytes == wanted[item][3]
            assert wanted[item][2] / 2 < saved_bytes <= wanted[item][2]  # what is cheap, a graph computes again


def refused(pipeline: dict[str, Any], more: dict[str, Any], call: dict[str, Any]) -> str:
    import paceline

    section = {"pipeline": {"stages": 1, **pipeline}, **more}
    config = ds_config(paceline=section)
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    with pytest.raises(ValueError, match="compile") as told:
        engine.compile(**call)
    return str(told.value)


@pytest.mark.parametrize(
    ("pipeline", "call", "message"),
    [
        ({}, {"compile_kwargs": {"mode": "reduce-overhead"}}, "pipeline.compile.mode"),
        ({}, {"compile_kwargs": {"fullgraph": True}}, "fullgraph"),
        ({}, {"backend": "cudagraphs"}, "pipeline.compile.backend"),
        ({}, {"compiled_autograd_enabled": True}, "compiled_autograd_enabled"),
        ({"schedule": "adaptive"}, {}, 'write "compile": true'),
    ],
)
def test_a_call_has_the_rules_of_the_json(pipeline: dict[str, Any], call: dict[str, Any], message: str) -> None:
    (told,) = run_ranks(refused, 1, pipeline, {}, call)
    assert message in told


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_natural_gradients_of_compiled_layers(schedule: str) -> None:
    pipeline, section = {**UNIFORM, "schedule": schedule}, {"natural_gradient": {}}
    plain = run_ranks(trained, 2, pipeline, None, None, section)
    found = run_ranks(trained, 2, {**pipeline, **EAGER}, None, None, section)
    assert_equal(found, plain)
    assert [rank["graphs"] for rank in found] == [1, 1], "one for the two alike layers of each rank"
    assert plain[0]["losses"] != RUNS["2 stages", "plain"][0]["losses"]


def hooked() -> list[int]:
    """Calls of a hook that comes when layers have been compiled."""
    import paceline

    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": {"stages": 1, **EAGER}})
    engine, *_ = paceline.initialize(model=model_config(num_hidden_layers=1), config=config)
    engine.train_batch(iter(step_batches(0)))
    calls: list[int] = []
    mlp = engine.module.stage.model.model.layers[0].mlp
    mlp.register_forward_hook(lambda *_: calls.append(1))
    engine.train_batch(iter(step_batches(1)))
    return calls


def test_a_hook_within_a_layer_is_called_although_it_comes_later() -> None:
    (calls,) = run_ranks(hooked, 1)
    assert len(calls) == MICRO_BATCHES
