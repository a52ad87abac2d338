"""Max change in pipelines and in engines without one is that of whole layers on a single process."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.optim.max_change import Limits, max_change_factors
from support.jobs import LAYERS, MICRO_BATCHES, ds_config, model_config, step_batches
from support.limited_steps import step_limited
from support.ranks import run_ranks

STEPS = 3
LR = 0.5
TOTAL = 0.11
WIDE = (1e6, 1e6, 1e6)


# -- pipelines ---------------------------------------------------------------------------------------------------


def limits_of(tied: bool, layer: float = 0.01, head: float = 0.1, total: float = TOTAL) -> Limits:
    return Limits(layer, head, total, heads=frozenset({"model.embed_tokens" if tied else "lm_head"}))


def alone() -> dict[str, Any]:
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage

    results = {}
    for tied in (True, False):
        model = load_stage(None, model_config(tie_word_embeddings=tied), Cut.whole(LAYERS)).model
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        reports = []
        for step in range(STEPS):
            batches = step_batches(step)
            tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
            for batch in batches:
                model(**batch, num_items_in_batch=tokens, use_cache=False).loss.backward()
            reports.append(step_limited(optimizer, dict(model.named_parameters()), limits_of(tied)))
            optimizer.zero_grad()
        results[f"tied {tied}"] = {n: p.detach().clone() for n, p in model.named_parameters()}, reports
    return results


def engine_of(stages: int, zero: int, tied: bool, limits: Limits | None, **changes: Any) -> Any:
    import paceline

    replicas = int(os.environ["WORLD_SIZE"]) // stages
    config = ds_config(
        stages,
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        optimizer={"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        zero_optimization={"stage": zero, **({"reduce_bucket_size": 3000} if zero else {})},
    )
    config |= changes
    engine, *_ = paceline.initialize(model=model_config(tie_word_embeddings=tied), config=config)
    engine.optimizer.max_change = limits
    return engine


def steps(engine: Any, first: int, count: int) -> list[dict[str, float]]:
    reports = []
    for step in range(first, first + count):
        engine.train_batch(iter(step_batches(step)[engine.grid.data_parallel_id :: engine.dp_world_size]))
        reports.append(engine.optimizer.max_change_report)
    return reports


def values(engine: Any) -> dict[str, Tensor]:
    stages = getattr(engine.module, "stages", None) or [engine.module.stage]
    return {n: p.detach().clone() for stage in stages for n, p in stage.model.named_parameters()}


def pipeline(stages: int, zero: int, schedule: Any = None) -> dict[str, Any]:
    results = {}
    for tied in (True, False):
        section = {"paceline": {"pipeline": {"stages": stages, "schedule": schedule}}} if schedule else {}
        engine = engine_of(stages, zero, tied, limits_of(tied), **section)
        reports = steps(engine, 0, STEPS)
        results[f"tied {tied}"] = values(engine), reports
        engine.destroy()
    return results


@lru_cache
def reference() -> dict[str, Any]:
    return run_ranks(alone, 1)[0]


MULTIDIRECTION = {"type": "multidirection", "staleness": 0}


@pytest.mark.parametrize(
    ("stages", "replicas", "zero", "schedule"), [(2, 2, 0, None), (2, 2, 1, None), (2, 1, 1, MULTIDIRECTION)]
)
def test_pipelines_equal_one_process(stages: int, replicas: int, zero: int, schedule: Any) -> None:
    ranks = run_ranks(pipeline, stages * replicas, stages, zero, schedule)
    for key, (wanted, wanted_reports) in reference().items():
        for rank in ranks:
            found, reports = rank[key]
            for name, value in found.items():
                torch.testing.assert_close(value, wanted[name], rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
            for report, right in zip(reports, wanted_reports, strict=True):
                assert report == pytest.approx(right, rel=1e-4)
        if key == "tied True":
            copies = [rank[key][0]["model.embed_tokens.weight"] for rank in ranks]
            assert all(torch.equal(copy, copies[0]) for copy in copies)
        num_layers = len({name.rpartition(".")[0] for name in wanted})
        assert all(0 < report["num_limited"] < num_layers for report in wanted_reports), wanted_reports
    norms = [report["norm"] for _, wanted_reports in reference().values() for report in wanted_reports]
    assert TOTAL in norms, norms
    assert min(norms) < TOTAL


def edges(zero: int, dtype: str) -> dict[str, Any]:
    """Limits that are not reached, layers that move between stages, changes that are not finite, in bits."""
    changes: dict[str, Any] = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    results: dict[str, Any] = {}
    for key, limits in {
        "none": None,
        "wide": limits_of(True, *WIDE),
        "head": limits_of(True, 0.0, 0.01, 0.0),
        "all": limits_of(True),
    }.items():
        engine = engine_of(2, zero, True, limits, **changes)
        results[f"{key} reports"] = steps(engine, 0, 2)
        results[key] = values(engine)
        if key == "all":
            steps(engine, 2, 1)
            results["third"] = values(engine)
            before = [owned.master.detach().clone() for owned in engine.optimizer.owned]
            for group in engine.optimizer.param_groups:
                group["lr"] = float("inf")
            results["infinite"] = steps(engine, 3, 1)
            masters = [owned.master.detach() for owned in engine.optimizer.owned]
            results["changed"] = sum(not torch.equal(a, b) for a, b in zip(before, masters, strict=True))
            results["after infinite"] = values(engine)
            results["skipped"] = engine.skipped_steps
            for group in engine.optimizer.param_groups:
                group["lr"] = LR
            results["finite again"] = steps(engine, 4, 1)
        engine.destroy()
    engine = engine_of(2, zero, True, limits_of(True), **changes)
    steps(engine, 0, 2)
    parts = list(engine.module.parts)
    engine.repartition([0, parts[1] - 1, parts[2]])
    steps(engine, 2, 1)
    results["moved"] = values(engine)
    return results


@pytest.mark.parametrize(("zero", "replicas", "dtype"), [(0, 1, "fp32"), (1, 2, "bf16")])
def test_edges_of_pipelines(zero: int, replicas: int, dtype: str) -> None:
    ranks = run_ranks(edges, 2 * replicas, zero, dtype)
    third: dict[str, Tensor] = {}
    for rank in ranks:
        third |= rank["third"]
    for rank in ranks:
        assert all(torch.equal(value, rank["wide"][name]) for name, value in rank["none"].items())
        assert rank["none reports"] == [None, None]
        assert all(report["num_limited"] == 0 for report in rank["wide reports"])
        # The head alone: the others' first step is as without limits, which nothing can be said of later.
        assert all(report["num_limited"] == 1 for report in rank["head reports"])
        assert all(report["norm"] == pytest.approx(0.01) for report in rank["head reports"])
        assert rank["changed"] == 0
        assert rank["skipped"] == 1
        assert all(torch.equal(value, rank["third"][name]) for name, value in rank["after infinite"].items())
        assert all(torch.equal(value, third[name]) for name, value in rank["moved"].items() if name in third)
        assert not torch.tensor(rank["infinite"][0]["norm"]).isfinite()


# -- experts -----------------------------------------------------------------------------------------------------


def expert_pipeline(zero: int, experts: int) -> dict[str, Any]:
    import paceline
    from paceline.state.named import MASTER, VALUE, pieces

    config = ds_config(
        1,
        gradient_accumulation_steps=MICRO_BATCHES // int(os.environ["WORLD_SIZE"]),
        optimizer={"type": "SGD", "params": {"lr": LR}},
        zero_optimization={"stage": zero},
    )
    if experts > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": experts, "preset_model": "mixtral"}
    model = model_config("mixtral", tie_word_embeddings=False, num_local_experts=5)
    engine, *_ = paceline.initialize(model=model, config=config)
    engine.optimizer.max_change = limits_of(False)
    reports = steps(engine, 0, STEPS)
    found = pieces(engine.module, engine.optimizer, replica=engine.grid.data_parallel_id)
    rows = {(p.name, p.start): p.tensor.detach().clone() for p in found if p.kind in (MASTER, VALUE)}
    return {"rows": rows, "reports": reports, "kept": [layer.num_slots for layer in engine.expert_layers.values()]}


@lru_cache
def experts_alone() -> dict[str, Any]:
    return run_ranks(expert_pipeline, 1, 0, 1)[0]


@pytest.mark.parametrize(("zero", "replicas"), [(0, 2), (1, 4)])
def test_experts_on_several_ranks_are_one_layer(zero: int, replicas: int) -> None:
    alone = experts_alone()
    ranks = run_ranks(expert_pipeline, replicas, zero, 2)
    found = {key: rows for rank in ranks for key, rows in rank["rows"].items()}
    for (name, start), rows in alone["rows"].items():
        parts = [part for (of, _), part in sorted(found.items(), key=lambda item: item[0]) if of == name]
        assert start == 0
        torch.testing.assert_close(torch.cat(parts), rows, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    for rank in ranks:
        assert set(rank["kept"]) == {3}
        for report, right in zip(rank["reports"], alone["reports"], strict=True):
            assert report == pytest.approx(right, rel=1e-4)
            assert report["num_limited"] > 0


# -- engines without a pipeline ----------------------------------------------------------------------------------

FLAT_LIMITS = Limits(0.16, 0.4, 0.485, heads=frozenset({"4"}))


def small_model() -> nn.Module:
    """Of odd sizes: no segment ends where a parameter does."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 11), nn.LayerNorm(11), nn.Linear(11, 5, bias=False))


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(dtype)


def small_alone(limits: Limits) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    reports = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).pow(2).mean().backward()
        reports.append(step_limited(optimizer, dict(model.named_parameters()), limits))
    return {name: p.detach().clone() for name, p in model.named_parameters()}, reports


def flat_engine(zero: int, dtype: str, more: dict[str, Any], limits: Limits | None) -> Any:
    """An engine and its max change; ``fused`` makes DeepSpeed take its fp16 optimizer with flat masters."""
    import deepspeed
    from deepspeed.runtime import engine as engine_module

    from paceline.optim.zero_max_change import FlatMaxChange

    if dtype == "fp16":  # which CPUs can do, if slowly
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    more = dict(more)
    if more.pop("fused", False):
        engine_module.FusedAdam = torch.optim.SGD
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 8},
        "steps_per_print": None,
        "zero_optimization": {"stage": zero, **more.pop("zero", {})},
        **more,
    }
    model = small_model()
    # Two groups: each has a flat buffer of its own.
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2]},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    engine.max_change = None if limits is None else FlatMaxChange(engine, limits)
    return engine


def flat_step(engine: Any, step: int) -> bool:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(batch(step, dtype)[rank::world]).float().pow(2).mean())
    if engine.max_change is None:
        engine.step()
        return True
    engine.max_change.before()
    engine.step()
    return engine.max_change.after()


def flat_values(engine: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's values, and the masters, of which those of ZeRO 0 are read here and all others by DeepSpeed."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    optimizer, found, masters = engine.optimizer, {}, {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            masters[name] = safe_get_full_fp32_param(parameter).detach().clone()
        elif hasattr(optimizer, "fp32_groups_flat"):
            for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
                for one, master in zip(group, torch._utils._unflatten_dense_tensors(flat, group), strict=True):
                    if one is parameter:
                        masters[name] = master.detach().clone()
        elif hasattr(optimizer, "fp32_groups"):
            for group, own in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for one, master in zip(group, own, strict=True):
                    if one is parameter:
                        masters[name] = master.detach().clone()
        else:
            masters[name] = found[name]
    return found, masters


def flat_job(zero: int, dtype: str, more: dict[str, Any]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for key, limits in {"none": None, "wide": Limits(*WIDE), "limited": FLAT_LIMITS}.items():
        engine = flat_engine(zero, dtype, more, limits)
        results["optimizer"] = type(engine.optimizer).__name__
        start = flat_values(engine)[1]
        assert flat_step(engine, 0)
        results[f"{key} first"] = {name: m - start[name] for name, m in flat_values(engine)[1].items()}
        results[f"{key} reports"] = [engine.max_change and engine.max_change.report]
        for step in range(1, STEPS):
            assert flat_step(engine, step)
            results[f"{key} reports"].append(engine.max_change and engine.max_change.report)
        results[key], results[f"{key} masters"] = flat_values(engine)
    for group in engine.optimizer.param_groups:
        group["lr"] = float("inf")
    results["holds"] = flat_step(engine, STEPS)
    results["skipped"] = engine.skipped_steps
    results["after infinite"], results["masters after infinite"] = flat_values(engine)
    return results


FLAT = [
    (0, "fp32", {}, "SGD"),
    (0, "bf16", {}, "FP16_UnfusedOptimizer"),
    (0, "bf16", {"fused": True}, "FP16_Optimizer"),
    (1, "fp32", {}, "DeepSpeedZeroOptimizer"),
    (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}, "BF16_Optimizer"),
    (2, "bf16", {}, "DeepSpeedZeroOptimizer"),
    (2, "fp16", {}, "DeepSpeedZeroOptimizer"),
    (3, "fp32", {"zero": {"stage3_param_persistence_threshold": 0}}, "DeepSpeedZeroOptimizer_Stage3"),
    (3, "bf16", {}, "DeepSpeedZeroOptimizer_Stage3"),
]


def flat_jobs() -> list[dict[str, Any]]:
    return [flat_job(zero, dtype, more) for zero, dtype, more, _ in FLAT]


def test_engines_without_a_pipeline() -> None:
    ranks = run_ranks(flat_jobs, 2)
    for number, (zero, dtype, more, optimizer) in enumerate(FLAT):
        print("ZeRO", zero, dtype, more)
        assert_flat_is_limited([rank[number] for rank in ranks], dtype, optimizer)


def assert_flat_is_limited(ranks: list[dict[str, Any]], dtype: str, optimizer: str) -> None:
    wanted, wanted_reports = small_alone(FLAT_LIMITS)
    assert wanted_reports[0]["num_limited"] == 3, wanted_reports
    assert {report["norm"] == FLAT_LIMITS.total for report in wanted_reports} == {True, False}, wanted_reports
    for rank in ranks:
        assert rank["optimizer"] == optimizer
        for name, value in rank["none"].items():
            assert torch.equal(value, rank["wide"][name]), name
            assert torch.equal(rank["none masters"][name], rank["wide masters"][name]), name
        # The first step is the unlimited one, scaled.
        layers = sorted({name.rpartition(".")[0] for name in wanted})
        squares = [
            sum(float(c.double().square().sum()) for n, c in rank["none first"].items() if n.startswith(f"{layer}."))
            for layer in layers
        ]
        own = torch.tensor([FLAT_LIMITS.head if layer == "4" else FLAT_LIMITS.layer for layer in layers])
        factors, norm = max_change_factors(torch.tensor(squares).sqrt(), own, FLAT_LIMITS.total)
        for name, change in rank["none first"].items():
            factor = factors[layers.index(name.rpartition(".")[0])].float()
            torch.testing.assert_close(rank["limited first"][name], factor * change, rtol=0, atol=5e-7)
        assert rank["limited reports"][0]["norm"] == pytest.approx(float(norm), rel=1e-5)
        for name, value in rank["limited"].items():
            assert torch.equal(value, rank["limited masters"][name].to(value.dtype)), f"{name}: not the master's value"
            exact = {"rtol": 0, "atol": 2e-6} if dtype == "fp32" else {"rtol": 0, "atol": 2e-2}
            torch.testing.assert_close(rank["limited masters"][name], wanted[name], **exact)
            assert torch.equal(rank["after infinite"][name], value), name
            assert torch.equal(rank["masters after infinite"][name], rank["limited masters"][name]), name
        assert not rank["holds"]
        assert rank["skipped"] == 1
        for report, right in zip(rank["limited reports"], wanted_reports, strict=True):
            assert report == pytest.approx(right, rel=1e-4 if dtype == "fp32" else 0.1)
        assert rank["wide reports"][0]["num_limited"] == 0


def thawed() -> list[float]:
    """How far the first layer goes in each of two steps, before the second of which it is thawed."""
    import deepspeed

    from paceline.optim.zero_max_change import FlatMaxChange

    model = small_model()
    model[0].requires_grad_(False)
    optimizer = {"type": "SGD", "params": {"lr": 100.0}}
    config = {"train_batch_size": 4, "optimizer": optimizer, "steps_per_print": None}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    engine.max_change = FlatMaxChange(engine, FLAT_LIMITS)
    found, before = [], torch.cat([p.detach().flatten() for p in model[0].parameters()])
    for step in range(2):
        assert flat_step(engine, step)
        found.append(float((torch.cat([p.detach().flatten() for p in model[0].parameters()]) - before).norm()))
        model[0].requires_grad_()
    return found


def test_a_layer_that_is_thawed_later_is_limited_too() -> None:
    frozen, limited = run_ranks(thawed, 1)[0]
    assert frozen == 0
    assert 0.0 < limited <= FLAT_LIMITS.layer + 1e-6


def expert_change(family: str, zero: int, ep: int, limits: Limits | None) -> dict[str, Any]:
    """What the first step changes on this rank: of each parameter, and of layers over the ranks."""
    import deepspeed

    from paceline.optim.zero_max_change import FlatMaxChange
    from support import expert_models as models

    layer = {"ep": ep} if family == models.NATIVE else {}
    config = models.ds_config(
        zero,
        ep,
        autoep=family != models.NATIVE,
        optimizer={"type": "SGD", "params": {"lr": LR}},
        zero_allow_untested_optimizer=True,
    )
    engine = models.engine_for(family, config, **layer)
    max_change = None if limits is None else FlatMaxChange(engine, limits)

    def whole() -> dict[str, Tensor]:
        found = {}
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                found[name] = parameter.detach().clone()
        return found

    before = whole()
    ids = models.batch(0, torch.distributed.get_rank())
    engine.backward(engine(input_ids=ids, labels=ids)["loss"])
    if max_change is not None:
        max_change.before()
    engine.step()
    if max_change is not None:
        max_change.after()
    after = whole()
    is_expert = {name: getattr(p, "allreduce", True) is False for name, p in engine.module.named_parameters()}
    return {
        "changes": {name: after[name] - value for name, value in before.items()},
        "experts": {name for name, is_one in is_expert.items() if is_one},
        "report": max_change and max_change.report,
    }


EXPERT_LIMITS = {
    "mixtral": Limits(0.01, 0.05, 0.055, heads=frozenset({"lm_head"})),
    "deepspeed.moe": Limits(0.04, 0.3, 0.3, heads=frozenset({"head"})),
}


def expert_jobs(cases: list[tuple[str, int, int]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    import paceline
    from paceline.runtime.initialize import start_distributed

    paceline.repair_deepspeed()
    start_distributed()
    return [(expert_change(*case, None), expert_change(*case, EXPERT_LIMITS[case[0]])) for case in cases]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [("mixtral", 0, 2), ("mixtral", 2, 2), ("deepspeed.moe", 1, 2)]),
        (4, [("mixtral", 1, 2), ("deepspeed.moe", 0, 2)]),
    ],
)
def test_experts_of_deepspeed(world: int, cases: list[tuple[str, int, int]]) -> None:
    """Stacked ones are one layer, over all ranks that have some; those of ``deepspeed.moe`` are layers each."""
    ranks = run_ranks(expert_jobs, world, cases)
    for number, (family, zero, ep) in enumerate(cases):
        free, limited = ([rank[number][which] for rank in ranks] for which in (0, 1))
        squares: dict[str, float] = {}
        layer_of: dict[tuple[int, str], str] = {}
        for place, rank in enumerate(free):
            for name, change in rank["changes"].items():
                is_expert = name in rank["experts"]
                layer = name.rpartition(".")[0]
                if family == "deepspeed.moe" and is_expert:
                    layer += f" of {place % ep}"
                layer_of[place, name] = layer
                if place < (ep if is_expert else 1):
                    squares[layer] = squares.get(layer, 0.0) + float(change.double().square().sum())
        layers, limits = sorted(squares), EXPERT_LIMITS[family]
        own = torch.tensor([limits.head if layer in limits.heads else limits.layer for layer in layers])
        norms = torch.tensor([squares[layer] for layer in layers]).sqrt()
        factors, norm = max_change_factors(norms, own, limits.total)
        assert 0 < int((norms > own).sum()) < len(layers), (family, norms)
        for place, rank in enumerate(limited):
            report = {"norm": float(norm), "num_limited": int((norms > own).sum())}
            assert rank["report"] == pytest.approx(report, rel=1e-4), (family, zero)
            for name, change in rank["changes"].items():
                factor = factors[layers.index(layer_of[place, name])].float()
                torch.testing.assert_close(change, factor * free[place]["changes"][name], rtol=0, atol=5e-7)


def skipped() -> dict[str, Any]:
    """A step that DeepSpeed itself leaves out, in between."""
    engine = flat_engine(2, "fp16", {"fp16": {"enabled": True, "initial_scale_power": 32}}, FLAT_LIMITS)
    before = flat_values(engine)
    holds = flat_step(engine, 0)
    after = flat_values(engine)
    same = [torch.equal(old, after[place][name]) for place in (0, 1) for name, old in before[place].items()]
    return {"skipped": engine.skipped_steps, "holds": holds, "same": all(same), "report": engine.max_change.report}


def test_a_step_that_deepspeed_skips_changes_nothing() -> None:
    for rank in run_ranks(skipped, 2):
        assert rank == {"skipped": 1, "holds": True, "same": True, "report": {"norm": 0.0, "num_limited": 0}}


def rates_around_a_step_that_is_taken_back(zero: int) -> dict[str, Any]:
    import paceline

    engine, *_ = paceline.initialize(
        model=small_model(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
            "zero_optimization": {"stage": zero},
            "paceline": {"max_change": {}},
        },
    )
    found: dict[str, Any] = {"rates": [], "counts": []}
    for step, rate in enumerate((None, float("inf"), 1e-3)):
        for group in engine.optimizer.param_groups:
            group["lr"] = group["lr"] if rate is None else rate
        engine.backward(engine(batch(step)).pow(2).mean())
        engine.step()
        found["rates"].append(engine.get_lr()[0])
        found["counts"].append((engine.lr_scheduler.last_epoch, engine.skipped_steps, engine.was_step_applied()))
    return found


@pytest.mark.parametrize("zero", [0, 2])
def test_a_step_that_is_taken_back_is_none_for_the_learning_rate(zero: int) -> None:
    for found in run_ranks(rates_around_a_step_that_is_taken_back, 2, zero):
        assert found["counts"] == [(1, 0, True), (1, 1, False), (2, 1, True)]
        assert found["rates"] == [5e-4, float("inf"), 5e-4]


def refused(zero: dict[str, Any]) -> str:
    try:
        flat_engine(3, "fp32", {"zero": zero}, FLAT_LIMITS)
    except ValueError as error:
        return str(error)
    return ""


def test_offloaded_masters_are_refused() -> None:
    message = run_ranks(refused, 1, {"offload_param": {"device": "cpu"}})[0]
    assert message.endswith(
        "leave offload_optimizer and offload_param out of zero_optimization, or leave max_change out."
    )
