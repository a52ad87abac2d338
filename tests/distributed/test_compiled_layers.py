"""Decoder layers that torch.compile compiles train as they do without."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.jobs import LAYERS, MICRO_BATCHES, assert_equal, ds_config, model_config, step_batches, train
from support.ranks import OneAfterAnother, on, run_ranks

STEPS = 4
EAGER = {"compile": {"backend": "aot_eager"}}
"""Graphs of whole layers, forward and backward, whose operations are those of PyTorch: no bit differs."""
BF16 = {"bf16": {"enabled": True}}
UNIFORM = {"stages": 2, "partition": "uniform"}
SPREAD = {"enabled": True, "autoep_size": 2}
CUT = [0, 4, 2 * LAYERS + 2]
"""Boundaries over halves of layers: the second stage begins with an MLP."""
CUTS = {"after attention": CUT, "between layers": [0, 5, 2 * LAYERS + 2]}
CASES: dict[str, Any] = {
    "2 stages": on(2, 2),
    "bf16, ZeRO 1, 2 replicas": on(4, 2, zero=1, clipping=0.05, more=BF16),
    "lengths": on(2, 2, kind="ragged"),
    "recomputed": on(2, 2, checkpointing=True),
    "lengths of gpt2, recomputed": on(2, 2, family="gpt2", kind="ragged", checkpointing=True),
    "interleaved": on(2, 2, schedule="interleaved"),
    "one_direction": on(2, 2, schedule="one_direction"),
    "multidirection": on(2, 2, schedule={"type": "multidirection", "directions": 2}),
    "halves": on(2, 2, partition=CUT, half_layers=True),
    "halves of gpt2, recomputed": on(2, 2, family="gpt2", partition=CUT, half_layers=True, checkpointing=True),
    "moving halves": on(2, 2, partition={"method": "hetero", "repartition_every": 1}, half_layers=True),
    "moving layers": on(2, 2, partition={"method": "hetero", "repartition_every": 1}),
    "mixtral": on(2, 2, family="mixtral"),
    "experts on several ranks": on(4, 2, family="mixtral", more={"expert_parallel": SPREAD}),
}
IN_ANOTHER_ORDER = ("mixtral", "experts on several ranks")
"""Where a compiled backward adds the gradients of a layer's input up in another order."""
BY_MEASUREMENT = ("moving layers", "moving halves")
"""Where measured times say which rank holds a layer: a norm's sum over the ranks has another order in each run."""

HAS_COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))
needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="inductor needs a C++ compiler on CPUs: it runs where g++ is"
)
INDUCTOR = pytest.param("inductor", "2 stages", marks=needs_compiler)


def counted(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """:func:`train`, and how many graphs were made."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()  # or these ranks have had so many graphs of other cases that no more are made
    counters.clear()
    found = train(*args, steps=STEPS, **kwargs)
    return {**found, "graphs": counters["stats"]["unique_graphs"]}


def by_its_engine() -> dict[str, Any]:
    """As DeepSpeed's users compile: by a call, after the engine is made."""
    from torch._dynamo.utils import counters

    import paceline

    torch.compiler.reset()
    counters.clear()
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": UNIFORM})
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    engine.compile(backend="aot_eager")
    losses = [engine.train_batch(iter(step_batches(step))).item() for step in range(STEPS)]
    state = {name: parameter.detach().clone() for name, parameter in engine.module.stage.model.named_parameters()}
    return {"losses": losses, "state": state, "graphs": counters["stats"]["unique_graphs"]}


def compiled(case: Any, keys: dict[str, Any]) -> Any:
    args, kwargs = case.args, {**case.kwargs}
    return on(case.world_size, *args, keys={**kwargs.pop("keys", {}), **keys}, **kwargs)


def fused_halves(cut: str) -> Any:
    """In bf16, where a fused kernel rounds once what single ones round each."""
    boundaries = {"partition": CUTS[cut], "half_layers": True, "more": BF16}
    return compiled(on(2, 2, **boundaries), {"compile": True})


RUNS = OneAfterAnother(
    counted,
    {
        **{(name, "plain"): case for name, case in CASES.items()},
        **{(name, "compiled"): compiled(case, EAGER) for name, case in CASES.items()},
        **({("inductor", "compiled"): compiled(CASES["2 stages"], {"compile": True})} if HAS_COMPILER else {}),
        **({cut: fused_halves(cut) for cut in CUTS} if HAS_COMPILER else {}),
    },
    at_once=8,
)


@pytest.mark.parametrize("name", [name for name in CASES if name not in IN_ANOTHER_ORDER])
def test_no_bit_differs_from_layers_that_are_not_compiled(name: str) -> None:
    plain, found = RUNS[name, "plain"], RUNS[name, "compiled"]
    assert all(rank["graphs"] == 0 for rank in plain)
    assert all(rank["graphs"] > 0 for rank in found), found
    assert_equal(found, plain)
    assert [rank["evaluation"] for rank in found] == [rank["evaluation"] for rank in plain]
    norms = [rank["norms"] for rank in plain]
    wanted = [pytest.approx(each, rel=1e-12) for each in norms] if name in BY_MEASUREMENT else norms
    assert [rank["norms"] for rank in found] == wanted


@pytest.mark.parametrize(("name", "reference"), [*zip(IN_ANOTHER_ORDER, IN_ANOTHER_ORDER, strict=True), INDUCTOR])
def test_the_same_up_to_rounding(name: str, reference: str) -> None:
    plain, found = RUNS[reference, "plain"], RUNS[name, "compiled"]
    for ours, theirs in zip(found, plain, strict=True):
        assert ours["graphs"] > 0
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        for key, tensor in theirs["state"].items():
            torch.testing.assert_close(ours["state"][key], tensor, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_kernels_of_a_half_are_the_same_wherever_the_other_is() -> None:
    assert_equal(*(RUNS[cut] for cut in CUTS))


def test_the_call_of_deepspeeds_users_compiles_the_layers() -> None:
    found, plain = run_ranks(by_its_engine, 2), RUNS["2 stages", "plain"]
    assert all(rank["graphs"] > 0 for rank in found)
    assert_equal(found, plain)


def moved() -> tuple[list[bool], list[float]]:
    """Whether the layers here are compiled, after one has come and one has gone; and losses."""
    import paceline
    from paceline.hf.stage import PassThrough
    from paceline.runtime.compiled_layers import CompiledLayer

    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": {**UNIFORM, **EAGER}})
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    losses = []
    for step in range(STEPS):
        if step in MOVES:
            engine.repartition(MOVES[step])
        losses.append(engine.train_batch(iter(step_batches(step))).item())
    layers = [layer for layer in engine.module.stage.model.model.layers if not isinstance(layer, PassThrough)]
    return [isinstance(layer, CompiledLayer) for layer in layers], losses


MOVES = {1: [0, 2, 6], 2: [0, 4, 6]}


def test_layers_that_arrive_are_compiled() -> None:
    found, plain = run_ranks(moved, 2), RUNS["2 stages", "plain"]
    assert [compiled for compiled, _ in found] == [[True] * 3, [True]]
    assert [losses for _, losses in found] == [rank["losses"] for rank in plain]


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
    hetero = {"stages": 2, "partition": "hetero"}
    pipelines = [{**hetero, **EAGER}, {"stages": "plan", **EAGER}, hetero]
    for first, planned, plain in run_ranks(graphs_of_measurements, 2, pipelines):
        assert (first, set(planned), plain) == ([1], {1}, [0])


def test_graphs_are_made_once_for_alike_layers_and_once_more_for_lengths() -> None:
    """One with a mask for training and one for the evaluation, of two layers on each rank."""
    assert {rank["graphs"] for rank in RUNS["2 stages", "compiled"]} == {2}
    assert {rank["graphs"] for rank in RUNS["lengths", "compiled"]} == {3}


def test_graphs_are_made_once_for_alike_halves() -> None:
    """Each for training and for the evaluation, wherever the other half is."""
    assert {rank["graphs"] for rank in RUNS["halves", "compiled"]} == {4}


def timed_halves(is_compiled: bool) -> tuple[dict[int, tuple[float, ...]], int]:
    """Forward and backward seconds, saved and output bytes of the items here; and graphs that timing them made."""
    from torch._dynamo.utils import counters

    import paceline

    torch.compiler.reset()
    counters.clear()
    pipeline = {"stages": 2, "partition": CUT, "half_layers": True, **(EAGER if is_compiled else {})}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": pipeline})
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    engine.train_batch(iter(step_batches(0)))
    before = counters["stats"]["unique_graphs"]
    engine.meter.time_layers(engine.layers)
    engine.train_batch(iter(step_batches(1)))
    reports = engine.meter.stop_timing_layers(engine.layers, 2)
    return {item: tuple(found.times) for item, found in reports.items()}, counters["stats"]["unique_graphs"] - before


def test_halves_that_are_compiled_are_timed_each() -> None:
    """Also those of a layer that is whole on its stage; and no graph is made for it, which would take long."""
    found, plain = run_ranks(timed_halves, 2, True), run_ranks(timed_halves, 2, False)
    for (times, num_graphs), (wanted, _) in zip(found, plain, strict=True):
        assert num_graphs == 0
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
        ({"schedule": "zbh1"}, {}, 'schedule.type "zbh1": a compiled layer computes both gradients in one'),
        ({"schedule": "adaptive"}, {}, 'write "compile": true'),
    ],
)
def test_a_call_has_the_rules_of_the_json(pipeline: dict[str, Any], call: dict[str, Any], message: str) -> None:
    (told,) = run_ranks(refused, 1, pipeline, {}, call)
    assert message in told


def test_a_call_is_refused_where_natural_gradients_are() -> None:
    (told,) = run_ranks(refused, 1, {}, {"natural_gradient": {}}, {})
    assert "natural_gradient is there" in told


def hooked() -> list[int]:
    """Calls of a hook that comes when layers have been compiled."""
    import paceline

    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline={"pipeline": {"stages": 1, **EAGER}})
    engine, *_ = paceline.initialize(model=model_config(), config=config)
    engine.train_batch(iter(step_batches(0)))
    calls: list[int] = []
    mlp = engine.module.stage.model.model.layers[1].mlp
    mlp.register_forward_hook(lambda *_: calls.append(1))
    engine.train_batch(iter(step_batches(1)))
    return calls


def test_a_hook_within_a_layer_is_called_although_it_comes_later() -> None:
    (calls,) = run_ranks(hooked, 1)
    assert len(calls) == MICRO_BATCHES
