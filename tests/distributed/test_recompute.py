"""Some layers of each stage are recomputed: as many as the JSON says, or as it takes to fit; no number changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from support.jobs import BATCH, ds_config, model_config, step_batches
from support.ranks import run_ranks

LAYERS, STEPS = 6, 4
ITEMS = LAYERS + 2


def trained(
    pipeline: dict[str, Any] | None = None,
    family: str = "llama",
    moves: dict[int, list[int]] | None = None,
    is_in_memory: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """On every rank: losses and weights of a run, its boundaries, and how often each layer's forward ran in a step.

    Args:
        moves: by step, boundaries that layers move to before it.
    """
    import paceline

    torch.manual_seed(3)
    section = {"stages": 2, "partition": "uniform", **(pipeline or {})}
    model: Any = model_config(family, num_hidden_layers=LAYERS)
    if is_in_memory:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(model)
        for index in (1, 4):
            model.model.layers[index].gradient_checkpointing = True
            model.model.layers[index]._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
    engine, *_ = paceline.initialize(model=model, config=ds_config(paceline={"pipeline": section}, **more))
    engine.executor.early_room = None  # layers run as often as they are recomputed, on the last stage too
    losses, runs, mlp_runs = [], [], []
    for step in range(STEPS):
        if moves and step in moves:
            engine.repartition(moves[step])
        counts: dict[int, int] = {}
        mlp_counts: dict[int, int] = {}
        hooks = [
            part.register_forward_pre_hook(partial(count, counted, index))
            for stage in engine.module.stages
            for index, layer in enumerate(engine.module.anatomy.layers_of(stage.model))
            for name, counted in (("self_attn", counts), ("mlp", mlp_counts))
            if (part := getattr(layer, name, None)) is not None and list(part.parameters())
        ]
        losses.append(engine.train_batch(iter(step_batches(step)[:4])).item())
        for hook in hooks:
            hook.remove()
        runs.append(counts)
        mlp_runs.append(mlp_counts)
    weights = {name: p.detach().clone() for stage in engine.module.stages for name, p in stage.model.named_parameters()}
    parts = list(engine.module.parts)
    engine.destroy()
    return {"losses": losses, "weights": weights, "parts": parts, "runs": runs, "mlp_runs": mlp_runs}


def all_trained(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """On every rank: :func:`trained` of one case after another. Whether a model's layers can be cut is found once."""
    return [trained(**case) for case in cases]


def each(*cases: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Results of both ranks, case by case."""
    return list(map(list, zip(*run_ranks(all_trained, 2, cases), strict=True)))


def count(counts: dict[int, int], layer: int, *_: Any) -> None:
    counts[layer] = counts.get(layer, 0) + 1


def recomputed(ranks: list[dict[str, Any]], step: int = 0, part: str = "runs") -> list[int]:
    """The layers whose forward, or with "mlp_runs" their MLP's, ran twice for each of the four micro-batches of a
    step."""
    runs = {layer: count for rank in ranks for layer, count in rank[part][step].items()}
    assert set(runs) == set(range(LAYERS))
    assert set(runs.values()) <= {4, 8}
    return sorted(layer for layer, count in runs.items() if count == 8)


def assert_same(ranks: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for rank, other in zip(ranks, wanted, strict=True):
        assert rank["losses"] == other["losses"]
        assert set(rank["weights"]) == set(other["weights"])
        for name, weight in rank["weights"].items():
            assert torch.equal(weight, other["weights"][name]), name


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_so_many_layers_of_each_stage_are_recomputed(family: str) -> None:
    """From its first; no bit of a loss or of a weight changes."""
    wanted: list[tuple[Any, list[int]]] = [([2, 1], [0, 1, 3])]
    if family == "llama":
        wanted += [(1, [0, 3]), (99, [*range(LAYERS)]), ([0, 3], [3, 4, 5])]
    plain, *runs = each({"family": family}, *({"pipeline": {"recompute": n}, "family": family} for n, _ in wanted))
    assert recomputed(plain) == []
    for (asked, layers), found in zip(wanted, runs, strict=True):
        assert recomputed(found) == layers, asked
        assert_same(found, plain)


def test_layers_that_move_stay_recomputed() -> None:
    moves = {1: [0, 2, ITEMS], 2: [0, 6, ITEMS], 3: [0, 4, ITEMS]}
    plain, found = each({"moves": moves}, {"pipeline": {"recompute": [2, 1]}, "moves": moves})
    assert [recomputed(found, step) for step in range(STEPS)] == [[0, 1, 3]] * STEPS
    assert_same(found, plain)


HALF_ITEMS = 2 * LAYERS + 2
HALVES = {"half_layers": True, "partition": [0, 4, HALF_ITEMS]}
"""The first stage has a whole layer and the attention of the next."""


def recomputed_parts(ranks: list[dict[str, Any]], step: int = 0) -> tuple[list[int], list[int]]:
    return recomputed(ranks, step), recomputed(ranks, step, "mlp_runs")


def test_a_stage_recomputes_what_it_has_of_a_layer() -> None:
    wanted: list[tuple[Any, tuple[list[int], list[int]]]] = [
        ([2, 1], ([0, 1], [0, 1])),
        ([2, 0], ([0, 1], [0])),
        (1, ([0], [0, 1])),
    ]
    runs = ({"pipeline": HALVES | {"recompute": asked}} for asked, _ in wanted)
    whole, plain, *recomputing = each({}, {"pipeline": HALVES}, *runs)
    assert recomputed_parts(plain) == ([], [])
    assert plain[0]["losses"] == whole[0]["losses"]
    for (asked, parts), found in zip(wanted, recomputing, strict=True):
        assert recomputed_parts(found) == parts, asked
        assert_same(found, plain)


def test_halves_that_meet_are_recomputed_if_both_were() -> None:
    moves = {1: [0, 3, HALF_ITEMS], 2: [0, 5, HALF_ITEMS], 3: [0, 4, HALF_ITEMS]}
    asked = ({"recompute": [2, 1]}, {"recompute": [2, 0]})
    plain, *runs = each(*({"pipeline": HALVES | some, "moves": moves} for some in ({}, *asked)))
    apart, together = ([0, 1], [0]), ([0], [0])
    steps = [([0, 1], [0, 1])] * STEPS, [apart, together, together, apart]
    for found, wanted in zip(runs, steps, strict=True):
        assert [recomputed_parts(found, step) for step in range(STEPS)] == wanted
        assert_same(found, plain)


def test_a_model_keeps_the_layers_that_its_owner_chose() -> None:
    found = run_ranks(trained, 2, is_in_memory=True, moves={2: [0, 2, ITEMS]})
    assert [recomputed(found, step) for step in range(STEPS)] == [[1, 4]] * STEPS


def memory_of(boundaries: list[int], again: list[int], *, half_layers: bool = False) -> list[float]:
    """Bytes of each stage under 1F1B, these layers, or halves of them, recomputed."""
    from paceline.hf.activations import count_items
    from paceline.measure.tokens import tokens_of_sample
    from paceline.planning.memory import States, stage_memory
    from paceline.planning.recomputation import recomputed as with_recomputed

    config = model_config(num_hidden_layers=LAYERS)
    shape: Any = {"micro_batch_size": BATCH, "sequence_length": tokens_of_sample(None, config)}
    items = count_items(config, dtype=torch.float32, half_layers=half_layers, **shape)
    items = with_recomputed(items, [layer + 1 for layer in again])
    return [stage_memory(items, boundaries, stage, States(), 2 - stage).total for stage in range(2)]


def test_as_few_layers_are_recomputed_as_it_takes() -> None:
    """1F1B keeps two micro-batches on the first stage, which has too little room for all that its three layers keep."""
    parts = [0, 4, ITEMS]
    limit = (memory_of(parts, [])[0] + memory_of(parts, [0])[0]) / 2

    def within(memory_bytes: float) -> dict[str, Any]:
        partition = {"method": parts, "memory_gib": memory_bytes / 2**30}
        return {"pipeline": {"partition": partition, "recompute": "fit"}}

    plain, found, roomy = each({"pipeline": {"partition": parts}}, within(limit), within(2.0**30))
    assert found[0]["parts"] == parts
    assert recomputed(found) == [0]
    assert max(memory_of(parts, [0])) <= limit
    assert_same(found, plain)
    assert recomputed(roomy) == []


def test_as_few_halves_are_recomputed_as_it_takes() -> None:
    parts = [0, 8, HALF_ITEMS]  # three layers and an attention
    limit = (memory_of(parts, [], half_layers=True)[0] + memory_of(parts, [0, 1], half_layers=True)[0]) / 2
    partition = {"method": parts, "memory_gib": limit / 2**30}
    plain, found = each(
        {"pipeline": {"half_layers": True, "partition": parts}},
        {"pipeline": {"half_layers": True, "partition": partition, "recompute": "fit"}},
    )
    assert recomputed_parts(found) == ([0], [0]), "a whole layer"
    assert max(memory_of(parts, [0, 1], half_layers=True)) <= limit
    assert_same(found, plain)


def test_boundaries_within_layers_and_recomputed_layers_are_found_together() -> None:
    parts = [0, 7, HALF_ITEMS]
    least = memory_of(parts, [*range(2 * LAYERS)], half_layers=True)[0]
    limit = 0.6 * memory_of(parts, [], half_layers=True)[0] + 0.4 * least
    pipelines = [
        {
            "half_layers": True,
            "partition": {"method": method, "memory_gib": limit / 2**30, "repartition_every": 0},
            "recompute": "fit",
        }
        for method in ("work", "hetero")
    ]
    for found, plain in each_and_plain(pipelines):
        attention, mlp = recomputed_parts(found)
        assert attention
        again = sorted([2 * layer for layer in attention] + [2 * layer + 1 for layer in mlp])
        assert max(memory_of(found[0]["parts"], again, half_layers=True)) <= limit
        assert_same(found, plain)


def with_plain(pipelines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """On every rank: of each pipeline, its run, and one within the same boundaries that recomputes nothing."""
    found = []
    for pipeline in pipelines:
        ours = trained(dict(pipeline))
        found += [ours, trained({"half_layers": pipeline.get("half_layers", False), "partition": ours["parts"]})]
    return found


def each_and_plain(pipelines: Sequence[Mapping[str, Any]]) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Results of :func:`with_plain` on both ranks, pipeline by pipeline."""
    runs = list(map(list, zip(*run_ranks(with_plain, 2, pipelines), strict=True)))
    return list(zip(runs[::2], runs[1::2], strict=True))


@pytest.mark.parametrize("method", ["work", "hetero"])
def test_boundaries_and_recomputed_layers_are_found_together(method: str) -> None:
    parts = [0, 4, ITEMS]
    limit = (memory_of(parts, [0, 1])[0] + memory_of(parts, [0, 1])[1]) / 2
    assert memory_of(parts, [0, 1])[0] < limit < memory_of(parts, [])[1], "both stages are short of it"
    partition = {"method": method, "memory_gib": limit / 2**30, "repartition_every": 0}
    ((found, plain),) = each_and_plain([{"partition": partition, "recompute": "fit"}])
    again = recomputed(found)
    assert again
    assert max(memory_of(found[0]["parts"], again)) <= limit
    first, last = (range(max(a - 1, 0), min(b - 1, LAYERS)) for a, b in pairwise(found[0]["parts"]))
    assert again == [*first[: sum(i in first for i in again)], *last[: sum(i in last for i in again)]]
    assert_same(found, plain)


def held_bytes(schedule: dict[str, Any], boundaries: list[int], again: list[int]) -> list[float]:
    """Bytes of each device under a schedule with several stages on each, these layers recomputed."""
    from paceline.config.schedules import resolve_schedule
    from paceline.config.section import PacelineConfig
    from paceline.hf.activations import count_items
    from paceline.measure.tokens import tokens_of_sample
    from paceline.planning.memory import States
    from paceline.planning.recomputation import recomputed as with_recomputed
    from paceline.planning.shared_devices import held_by, whole_schedule

    section = PacelineConfig.of({"paceline": {"pipeline": {"stages": 2, "schedule": schedule}}})
    choice, _ = resolve_schedule(section, 2, 4, micro_batch_size=BATCH)
    config = model_config(num_hidden_layers=LAYERS)
    shape: Any = {"micro_batch_size": BATCH, "sequence_length": tokens_of_sample(None, config)}
    items = with_recomputed(count_items(config, dtype=torch.float32, **shape), [layer + 1 for layer in again])
    held = held_by(whole_schedule(choice.planned(2, 4)), choice.optimizer_owners)
    return [one.memory(items, boundaries, States()).total for one in held]


def recomputed_anywhere(ranks: list[dict[str, Any]]) -> list[int]:
    """The layers whose forward ran more often than for each of the four micro-batches of all steps."""
    runs = dict.fromkeys(range(LAYERS), 0)
    for counts in (counts for rank in ranks for counts in rank["runs"]):
        for layer, times in counts.items():
            runs[layer] += times
    return sorted(layer for layer, times in runs.items() if times > 4 * STEPS)


ROUND = {"type": "interleaved"}, [0, 3, 4, 6, ITEMS]
SPLIT = {"type": "zbv"}, [0, 3, 4, 6, ITEMS]
BOTH_WAYS = {"type": "multidirection", "directions": 2}, [0, 4, ITEMS]


@pytest.mark.parametrize(
    ("schedule", "parts", "method"),
    [(*ROUND, "hetero"), (*SPLIT, "work"), (*BOTH_WAYS, "written"), (*SPLIT, "written")],
    ids=["round-hetero", "split-work", "both ways-written", "split-written"],
)
def test_stages_of_a_device_share_its_memory(schedule: dict[str, Any], parts: list[int], method: str) -> None:
    """Each has room for some less than the stages of any boundaries keep."""
    inner = combinations(range(2, ITEMS - 1), len(parts) - 2)
    least = min(max(held_bytes(schedule, [0, *cuts, ITEMS], [])) for cuts in inner)
    limit = 0.9 * least + 0.1 * max(held_bytes(schedule, parts, [*range(LAYERS)]))
    partition = {"method": parts if method == "written" else method, "memory_gib": limit / 2**30}
    if method == "hetero":
        partition["repartition_every"] = 0
    found = run_ranks(trained, 2, {"schedule": schedule, "partition": partition, "recompute": "fit"})
    again, boundaries = recomputed_anywhere(found), found[0]["parts"]
    assert 0 < len(again) < LAYERS
    assert max(held_bytes(schedule, boundaries, again)) <= limit
    assert max(held_bytes(schedule, boundaries, [])) > limit
    if method == "written":
        assert boundaries == parts
        for layer in again:
            assert max(held_bytes(schedule, boundaries, [one for one in again if one != layer])) > limit, layer
    usual: dict[str, Any] = {"schedule": schedule, "partition": boundaries}
    if schedule["type"] == "multidirection":  # layers are computed again with weights that may have changed
        stages = [range(max(a - 1, 0), min(b - 1, LAYERS)) for a, b in pairwise(boundaries)]
        usual["recompute"] = [sum(layer in stage for layer in again) for stage in stages]
    assert_same(found, run_ranks(trained, 2, usual))


def refused(layers: int) -> dict[str, str]:
    """On every rank: what is said of each wrong combination."""
    from functools import partial

    from torch import nn

    import paceline
    from paceline import CausalLMPipeline

    found: dict[str, str] = {}

    def tell(name: str, model: Any, schedule: Any = None, **keys: Any) -> None:
        section = {"stages": 2, "partition": None, "schedule": schedule, **keys}
        try:
            paceline.initialize(model=model, config=ds_config(paceline={"pipeline": section}))
        except ValueError as error:
            found[name] = str(error)

    config = partial(model_config, num_hidden_layers=layers)
    tell("too many", config(), recompute=[layers, 0])
    tell("built", CausalLMPipeline(config(), num_stages=2), recompute="fit")
    tell("experts", config("mixtral"), "one_direction", recompute=[1, 0])
    tell("twice", CausalLMPipeline(config(), num_stages=2, gradient_checkpointing=True), recompute=1)
    module = paceline.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=nn.functional.mse_loss)
    tell("own layers", module, recompute=1)
    return found


def test_what_is_refused() -> None:
    found, other = run_ranks(refused, 2, LAYERS)
    assert found == other
    phrases = {
        "too many": 'is [6, 0]: stage 0 has 3 layers; give at most 3 there, or "fit" for as many as it takes.',
        "built": "and the pipeline is built: give the model itself to have it built, or write how many layers",
        "experts": 'the model has experts, paceline.pipeline.recompute is [1, 0] and "one_direction" has no flush: ',
        "twice": "recompute is 1, and gradient checkpointing, which recomputes all layers, is on as well: ",
        "own layers": 'of one\'s own layers DeepSpeed recomputes all; write "activation_checkpoint_interval": 1',
    }
    assert set(found) == set(phrases)
    for name, phrase in phrases.items():
        assert phrase in found[name], name


def built(counts: Any) -> list[int]:
    import deepspeed

    import paceline
    from paceline import CausalLMPipeline

    deepspeed.init_distributed()
    pipeline = CausalLMPipeline(model_config(num_hidden_layers=LAYERS), num_stages=2, partition="uniform")
    section = {"pipeline": {"stages": 2, "recompute": counts}}
    engine, *_ = paceline.initialize(model=pipeline, config=ds_config(paceline=section))
    engine.train_batch(iter(step_batches(0)[:4]))
    return sorted(engine.module.recomputed)


def test_a_pipeline_that_is_built_recomputes_as_written() -> None:
    assert run_ranks(built, 2, [1, 2]) == [[1, 4, 5]] * 2


def resumed() -> list[Any]:
    """On every rank: stages and number of layers that a run recomputes whose start before had found the fewest that
    fit, unless it asks for all, and if it does."""
    import deepspeed

    from paceline.comm.control import ControlPlane
    from paceline.config import PacelineConfig
    from paceline.config.recompute_keys import PATH
    from paceline.config.stage_counts import STAGES
    from paceline.runtime.startup import plan_for

    deepspeed.init_distributed()
    config: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "paceline": {"pipeline": {}}}
    control, found = ControlPlane.create(), []
    for recomputes in (False, True):
        plan = plan_for(
            model_config(num_hidden_layers=LAYERS, max_position_embeddings=64),
            config,
            PacelineConfig.of(config),
            control,
            gradient_checkpointing=recomputes,
            plans_unasked=True,
            kept={STAGES: 2, PATH: "fit"},
        )
        found.append((plan.stages, plan.recompute))
    return found


def test_a_run_that_goes_on_keeps_what_was_found_unless_all_layers_are_asked_for() -> None:
    assert run_ranks(resumed, 2) == [[(2, "fit"), (2, None)]] * 2
