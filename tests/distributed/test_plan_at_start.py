"""Planned stages: the run measures its cluster and takes the fastest number; what it learns stays the same."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.hosts import DEVICE, Hosts, available, enter
from support.jobs import TINY, finetune, flags, model_config, step_batches
from support.ranks import RankError, run_ranks

SAMPLES = 16
"""Samples of a step, in eight batches of two."""
POSITIONS = 64
"""Tokens of a sample that is measured, where a model takes no more."""
LARGE = 1416
"""Vocabulary whose head has the operations of four layers of the tests' model, with as many tokens as it takes."""


MEASURING = ("profile_items", "measure_stage", "measure_cluster")
"""Functions of ``plan_at_start`` that tests replace."""


def measure_otherwise(last_rank: str) -> None:
    """On the second rank, measuring layers does what ``last_rank`` says.

    Where it is slow, times are the same in every run: what else the machine does must not make the first rank slow too,
    nor messages as long as layers.
    """
    from paceline.runtime import plan_at_start

    is_last = os.environ["RANK"] == "1"
    if not last_rank or ("fails" in last_rank and not is_last):
        return
    measured = plan_at_start.profile_items
    unit_s = 1.5 if is_last else 0.5

    def profile_items(*args: Any, **kwargs: Any) -> Any:
        if last_rank == "fails" or (last_rank == "fails with halves" and kwargs["half_layers"]):
            raise RuntimeError("out of memory")
        if last_rank == "fails with halves":
            return measured(*args, **kwargs)
        found = measured(*args, **kwargs, repeats=1)
        return [replace(item, forward_s=unit_s, backward_s=2 * unit_s) for item in found]

    plan_at_start.profile_items = profile_items  # type: ignore[assignment]


def measure_facts(
    bytes_per_s: float | None, device_bytes: float | None, head_layers: float = 0.0, last_takes: float = 1.0
) -> None:
    """All layers take as long, and nothing else but the head takes time; links carry so much, and replicas would
    exchange gradients for hours.

    Args:
        device_bytes: memory of a device; None: as measured.
        head_layers: that take as long as the head.
        last_takes: times as long on the second rank.
    """
    from paceline.planning.cluster import Cluster, Fabric
    from paceline.planning.workload import NOTHING_BESIDE
    from paceline.runtime import plan_at_start

    if bytes_per_s is None:
        return
    measured = plan_at_start.profile_items
    unit_s = 0.01 * (last_takes if os.environ["RANK"] == "1" else 1.0)

    def profile_items(*args: Any, **kwargs: Any) -> Any:
        items = measured(*args, **kwargs, repeats=1)
        seconds = [0.0, *[unit_s] * (len(items) - 2), unit_s * head_layers]
        return [replace(item, forward_s=s, backward_s=2 * s) for item, s in zip(items, seconds, strict=True)]

    def measure_cluster(control: Any, device: Any, memory_bytes: int) -> Cluster:
        link = Fabric(bytes_per_s, 0.0, all_reduce_bytes_per_s=1e12, zero1_bytes_per_s=1.0)
        return Cluster(2, 1, memory_bytes if device_bytes is None else device_bytes, across=link)

    plan_at_start.profile_items = profile_items  # type: ignore[assignment]
    plan_at_start.measure_stage = lambda bench: NOTHING_BESIDE  # type: ignore[assignment]
    plan_at_start.measure_cluster = measure_cluster  # type: ignore[assignment]


def note_adapters() -> list[bool]:
    """Whether layers are measured with adapters, for each time that they are measured."""
    from paceline.runtime import plan_at_start

    measured, noted = plan_at_start.profile_items, []

    def profile_items(*arguments: Any, **options: Any) -> Any:
        noted.append(options.get("adapters") is not None)
        return measured(*arguments, **options)

    plan_at_start.profile_items = profile_items
    return noted


@contextlib.contextmanager
def measuring_as_before() -> Iterator[None]:
    """However layers and links are measured inside: afterwards as before."""
    from paceline.runtime import plan_at_start

    before = {name: getattr(plan_at_start, name) for name in MEASURING}
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(plan_at_start, name, function)


def trained(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """:func:`_trained`, after which the process measures as it did before."""
    with measuring_as_before():
        return _trained(*args, **kwargs)


def _trained(
    asked: dict[str, Any],
    layers: int = 4,
    lora: bool | list[str] = False,
    family: str = "llama",
    last_rank: str = "",
    bytes_per_s: float | None = None,
    device_bytes: float | None = None,
    head_layers: float = 0.0,
    last_takes: float = 1.0,
    **changes: Any,
) -> dict[str, Any]:
    """On every rank: what was planned, unless stages are given, and the losses of two steps.

    Args:
        asked: of the pipeline, by the section.
        bytes_per_s: that links are measured to carry (:func:`measure_facts`); None: they are measured.
        last_rank: what measuring layers does there: ``"fails"``, ``"fails with halves"`` of layers alone, or takes
            three times as long, ``"is slow"``.
    """
    import torch

    import paceline

    measure_otherwise(last_rank)
    measure_facts(bytes_per_s, device_bytes, head_layers, last_takes)
    with_adapters = note_adapters()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    paceline_logger = logging.getLogger("paceline")
    paceline_logger.addHandler(handler)
    paceline_logger.setLevel(logging.INFO)
    config = {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": None,
        "paceline": {"pipeline": {"stages": "plan"} | asked},
        **changes,
    }
    more: dict[str, Any] = {"max_position_embeddings": POSITIONS}
    if head_layers:
        more["vocab_size"] = LARGE
    if isinstance(lora, list):  # adapters may be in the head
        more["tie_word_embeddings"] = False
    model: Any = model_config(family, num_hidden_layers=layers, **more)
    if lora:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        targets = lora if isinstance(lora, list) else "all-linear"
        model = get_peft_model(AutoModelForCausalLM.from_config(model), LoraConfig(target_modules=targets))
    engine, *_ = paceline.initialize(model=model, config=config)
    plan, losses = engine.plan, []
    for step in range(2):
        samples = [
            {name: tensor[row : row + 1] for name, tensor in batch.items()}
            for batch in step_batches(step)
            for row in range(2)
        ]
        own = samples[engine.grid.data_parallel_id :: plan.data_parallel]
        size = plan.micro_batch_size
        batches = [
            {name: torch.cat([each[name] for each in own[first : first + size]]) for name in own[0]}
            for first in range(0, len(own), size)
        ]
        losses.append(engine.train_batch(iter(batches)).item())
    paceline_logger.removeHandler(handler)
    engine.destroy()
    return {
        "shape": (plan.stages, plan.data_parallel),
        "samples": plan.train_batch_size,
        "schedule": plan.schedule.type,
        "chunks": plan.schedule.chunks,
        "method": plan.partition_choice.method,
        "chosen": {key: choice.value for key, choice in plan.chosen.items()},
        "losses": losses,
        "recomputed": sorted(engine.module.recomputed),
        "lines": [line for line in lines if line.startswith("plan: ")],
        "with_adapters": with_adapters,
    }


def all_trained(cases: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """On every rank: :func:`trained` of one case after another."""
    return [trained(asked, **options) for asked, options in cases]


def each(*cases: tuple[dict[str, Any], dict[str, Any]], ranks: int = 2) -> list[dict[str, Any]]:
    """The result of each case, the same on all ranks."""
    return [same(list(found)) for found in zip(*run_ranks(all_trained, ranks, cases), strict=True)]


def same(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The result that all ranks have, with rank 0's lines."""
    first = found[0]
    for other in found[1:]:
        assert {**other, "lines": None} == {**first, "lines": None}
    return first


@pytest.mark.parametrize("lora", [False, True])
def test_the_losses_are_those_of_any_number_of_stages(lora: bool) -> None:
    planned, *given = each(*(({} if n is None else {"stages": n}, {"lora": lora}) for n in (None, 1, 2)))
    assert planned["chosen"]["paceline.pipeline.stages"] == planned["shape"][0]
    assert any(line.startswith("plan: measured in") for line in planned["lines"])
    assert sum(" s a step of " in line for line in planned["lines"]) == 3  # one of two chunks among them
    assert planned["schedule"] == ("1f1b" if planned["shape"][0] == 1 else "adaptive")
    assert planned["with_adapters"] == [lora]
    for found in given:
        assert found["lines"] == []
        assert found["samples"] == planned["samples"] == SAMPLES
        assert planned["losses"] == pytest.approx(found["losses"], rel=1e-6)


def test_what_the_json_says_is_not_chosen() -> None:
    asked = ({"schedule": "1f1b", "partition": "uniform"}, {"partition": [0, 3, 6]}, {"schedule": "zbv"})
    planned, *told = each(*((pipeline, {"bytes_per_s": FAST}) for pipeline in (*asked, {"schedule": "gpipe"})))
    assert any("measured" in line for line in planned["lines"])
    assert (planned["schedule"], planned["method"]) == ("1f1b", "uniform")
    for found in told:
        (line,) = found["lines"]
        assert "this run cannot plan them" in line
        assert found["shape"] == (2, 1)


def test_samples_of_a_step_go_before_speed() -> None:
    """With the micro-batches of a pipeline given, another number of replicas would have other samples."""
    sizes = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    found = same(run_ranks(trained, 2, {"schedule": "adaptive"}, **sizes))
    assert found["shape"] == (2, 1)
    assert found["lines"] == ["plan: these batch sizes and layers leave one number of stages to choose from"]


def test_where_the_fewest_stages_do_not_go_with_the_batch() -> None:
    """Two stages would be two replicas, among which three micro-batches cannot be shared out."""
    found = same(run_ranks(trained, 4, {}, train_batch_size=6, train_micro_batch_size_per_gpu=2, layers=4))
    assert found["shape"] == (4, 1)
    assert found["chosen"]["paceline.pipeline.stages"] == 4
    with pytest.raises(RankError, match="train_batch_size is 6: it must be a multiple of 4"):
        run_ranks(trained, 4, {"partition": [0, 3, 6]}, train_batch_size=6, train_micro_batch_size_per_gpu=2, layers=4)


FEW = {"train_micro_batch_size_per_gpu": 8}
"""Two micro-batches a step: filling the pipeline takes a good part of it."""
FAST, SLOW = 1e12, 2e6
"""Bytes a second; activations of these micro-batches are tens of kB."""


def test_chunks_are_taken_where_links_are_fast() -> None:
    """Two stages whole, or in two chunks a rank; what is learned is the same."""
    of_chunks = {"stages": 2, "schedule": {"type": "adaptive", "chunks": "plan"}}
    keys = [(name, rate) for name in ("stages", "chunks") for rate in (FAST, SLOW)]
    asked = [({} if name == "stages" else of_chunks, FEW | {"bytes_per_s": rate}) for name, rate in keys]
    whole, *results = each(({"stages": 2}, FEW), *asked)
    found = dict(zip(keys, results, strict=True))
    assert {key: one["chunks"] for key, one in found.items()} == {
        **{("stages", FAST): 2, ("stages", SLOW): None},
        **{("chunks", FAST): 2, ("chunks", SLOW): None},
    }
    for (name, rate), one in found.items():
        assert (one["shape"], one["schedule"]) == ((2, 1), "adaptive")
        assert one["losses"] == pytest.approx(whole["losses"], rel=1e-6)
        assert any(line.startswith("plan: 2 stages of 2 chunks: ") for line in one["lines"])
        chosen = {key.rpartition(".")[2] for key in one["chosen"]}
        assert ("stages" in chosen) == (name == "stages")
        assert ("chunks" in chosen) == (name == "chunks" or rate == FAST)


@pytest.mark.parametrize(
    "more", [{"pipeline": {"activation_checkpoint_interval": 1}}, {}], ids=["recomputed", "compiled"]
)
def test_chunks_are_compared_though_layers_are_recomputed_or_compiled(more: dict[str, Any]) -> None:
    """Activations have room here, and are kept."""
    asked = {} if more else {"compile": {"backend": "aot_eager"}}
    whole, found = each(({"stages": 2}, FEW), (asked, FEW | {"bytes_per_s": FAST} | more))
    assert (found["shape"], found["schedule"], found["chunks"]) == ((2, 1), "adaptive", 2)
    assert any(line.startswith("plan: 2 stages of 2 chunks: ") for line in found["lines"])
    assert found["losses"] == pytest.approx(whole["losses"], rel=1e-6)


def test_chunks_are_compared_where_layers_must_be_recomputed() -> None:
    """As few layers of both chunks as it takes, in the plan and in the run."""
    asked = {"stages": 2, "schedule": {"type": "adaptive", "chunks": "plan"}, "recompute": "fit"}
    facts = FEW | {"bytes_per_s": FAST}
    (roomy,) = each((asked, facts))
    (line,) = (line for line in roomy["lines"] if line.startswith("plan: 2 stages of 2 chunks: "))
    assert roomy["chunks"] == 2
    assert line.endswith(" GiB")
    limit = {"method": "work", "memory_gib": 0.96 * float(line.split()[-2])}
    (short,) = each((asked | {"partition": limit}, facts))
    (line,) = (line for line in short["lines"] if line.startswith("plan: 2 stages of 2 chunks: "))
    assert line.endswith(" with 1 recomputed layers"), line
    assert (short["chunks"], len(short["recomputed"]), roomy["recomputed"]) == (2, 1, [])
    assert short["losses"] == roomy["losses"]


def test_where_the_json_leaves_no_choice_of_chunks() -> None:
    """A schedule that is written says how many; layers must be enough."""
    cases = (({"schedule": "adaptive"}, {}), ({}, {"layers": 3}))
    for found in each(*((pipeline, FEW | {"bytes_per_s": FAST} | changes) for pipeline, changes in cases)):
        assert found["chunks"] is None
        assert not any("chunks" in line for line in found["lines"])


HALVES = "paceline.pipeline.half_layers"


@pytest.mark.parametrize("lora", [False, True])
def test_stages_end_within_layers_where_that_is_faster(lora: bool) -> None:
    """Three layers in two stages: two and one, or one and a half each. What is learned is the same."""
    asks, facts = {"stages": 2, "half_layers": "plan"}, {"layers": 3, "bytes_per_s": FAST, "lora": lora}
    whole, found, even = each(
        ({"stages": 2}, {"layers": 3, "lora": lora}), (asks, facts), (asks, facts | {"layers": 4})
    )
    assert found["chosen"][HALVES] is True
    assert (found["schedule"], found["chunks"]) == (whole["schedule"], whole["chunks"]), "halves alone are planned"
    assert found["losses"] == whole["losses"]
    (line,) = (line for line in found["lines"] if line.startswith("plan: 2 stages: "))
    assert line.endswith(", cut within layers")
    assert found["with_adapters"] == [lora, lora]
    assert even["chosen"][HALVES] is False
    assert even["with_adapters"] == [lora], "halves need not be measured"
    if not lora:
        fit = asks | {"recompute": "fit"}
        unasked, fitting, both, failed = each(
            ({}, facts),
            (fit, facts),
            ({"half_layers": "plan"}, facts),
            (asks, facts | {"last_rank": "fails with halves"}),
        )
        assert HALVES not in unasked["chosen"], "stages alone were to be planned"
        assert fitting["chosen"][HALVES] is True, "where nothing needs to be recomputed"
        assert fitting["losses"] == whole["losses"]
        limit = 0.95 * min(float(line.partition(" GiB")[0].split()[-1]) for line in fitting["lines"] if " GiB" in line)
        (short,) = each((fit, facts | {"device_bytes": limit * 2**30}))
        assert short["chosen"][HALVES] is True
        assert any(" recomputed layers, cut within layers" in line for line in short["lines"]), short["lines"]
        assert short["losses"] == whole["losses"]
        assert both["chosen"][HALVES] is True, "beside the stages"
        assert both["losses"] == pytest.approx(whole["losses"], rel=1e-6)
        assert failed["chosen"][HALVES] is False
        assert any("rank 1 failed while measuring halves of layers" in line for line in failed["lines"])
        assert failed["losses"] == whole["losses"]


SLICES = "paceline.pipeline.head_slices"


def test_stages_share_the_head_where_that_is_faster() -> None:
    """Two layers and a head worth four of them in two stages: two and four, or three each. The same is learned."""
    asks, facts = {"stages": 2, "head_slices": "plan"}, {"layers": 2, "head_layers": 4.0, "bytes_per_s": FAST}
    with_lora = facts | {"lora": True}
    whole, small, found, adapted, as_whole, even, unasked, halved = each(
        ({"stages": 2}, {"layers": 2, "head_layers": 4.0}),
        ({"stages": 2}, {"layers": 2}),
        (asks, facts),
        (asks, with_lora),
        (asks | {"head_slices": 1}, with_lora),
        (asks, facts | {"head_layers": 0.0}),
        ({}, facts),
        (asks | {"half_layers": "plan"}, facts | {"layers": 3, "head_layers": 4.5}),
    )
    assert found["chosen"][SLICES] == 16
    assert found["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    (line,) = (line for line in found["lines"] if line.startswith("plan: 2 stages: "))
    assert line.endswith(", the head in 16 slices")
    assert adapted["chosen"][SLICES] == 16
    assert adapted["losses"] == pytest.approx(as_whole["losses"], rel=1e-6)
    assert even["chosen"][SLICES] == 1
    assert even["losses"] == small["losses"]
    assert SLICES not in unasked["chosen"], "stages alone were to be planned"
    assert (halved["chosen"][SLICES], halved["chosen"][HALVES]) == (16, False), "3.75 layers each without halves"


def test_a_head_that_cannot_be_cut_stays_whole() -> None:
    asks, facts = {"stages": 2, "head_slices": "plan"}, {"layers": 2, "head_layers": 4.0, "bytes_per_s": FAST}
    reasons: list[tuple[dict[str, Any], str]] = [
        ({"lora": ["q_proj", "lm_head"]}, "adapters are in the head"),
        ({"optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}}, "not elementwise"),
        ({"last_takes": 3.0}, ""),
        ({"family": "mixtral"}, "output_router_logits"),
    ]
    for (_, why), found in zip(reasons, each(*((asks, facts | changes) for changes, _ in reasons)), strict=True):
        assert found["chosen"].get(SLICES, 1) == 1
        said = [line for line in found["lines"] if "not with slices" in line]
        assert bool(said) == bool(why), why
        assert all(why in line for line in said), said


def test_layers_that_cannot_be_cut_stay_whole() -> None:
    """Attention and MLP of GPT-NeoX are side by side."""
    asks = {"stages": 2, "half_layers": "plan"}
    found = same(run_ranks(trained, 2, asks, layers=3, family="gpt_neox", bytes_per_s=FAST))
    assert found["chosen"][HALVES] is False
    (line,) = (line for line in found["lines"] if "not in halves of layers" in line)
    assert "gpt_neox" in line


def test_where_nothing_fits_layers_are_recomputed() -> None:
    """Unasked then only, and as few as it takes."""
    facts, recomputed = FEW | {"bytes_per_s": FAST}, {"pipeline": {"activation_checkpoint_interval": 1}}

    def least_bytes(lines: list[str]) -> float:
        return min(float(line.split()[-2]) for line in lines if line.endswith(" GiB")) * 2**30

    plain, again = each(({}, facts), ({}, facts | recomputed))
    limit = (least_bytes(plain["lines"]) + least_bytes(again["lines"])) / 2
    short = facts | {"device_bytes": limit}
    found, fits, nothing = each(({}, short), ({}, short | recomputed), ({}, facts | {"device_bytes": 1e4}))
    assert found["shape"] == (2, 1)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert "paceline.pipeline.recompute" in found["chosen"]
    (line,) = (line for line in found["lines"] if line.startswith("plan: 2 stages: "))
    assert line.endswith(" recomputed layers")
    assert 0 < int(line.split()[-3]) < 4, "not all four"
    assert not any("recomputed" in line for line in fits["lines"]), "all are, as asked"
    assert not any("recomputed" in line for line in plain["lines"])
    assert (nothing["shape"], nothing["schedule"]) == ((2, 1), "1f1b"), "as if it had not been planned"
    assert "paceline.pipeline.recompute" not in nothing["chosen"]


def test_a_run_that_cannot_be_measured_starts_without_a_plan() -> None:
    found = same(run_ranks(trained, 2, {}, last_rank="fails"))
    assert (found["shape"], found["schedule"], found["method"]) == ((2, 1), "1f1b", "work")
    (line,) = found["lines"]
    assert "rank 1 failed while measuring the layers: RuntimeError: out of memory" in line


def test_stages_go_by_speed_where_devices_are_unequal() -> None:
    """Replicas would wait for the slow one; nobody asked for a partition."""
    found, told = each(({}, {"last_rank": "is slow"}), ({"partition": "uniform", "stages": 2}, {}))
    assert (found["shape"], found["schedule"], found["method"]) == ((2, 1), "adaptive", "hetero")
    assert found["losses"] == pytest.approx(told["losses"], rel=1e-6)


def test_a_slow_device_has_a_layer_for_each_of_its_chunks() -> None:
    """Four layers, 3 : 1 by speed, and 2 : 2 in two chunks each."""
    (found,) = each(({}, FEW | {"bytes_per_s": FAST, "last_takes": 3.0}))
    assert (found["shape"], found["method"], found["chunks"]) == ((2, 1), "hetero", None)
    whole, chunks = (
        float(line.split(": ")[2].split()[0])
        for start in ("2 stages: ", "2 stages of 2 chunks: ")
        for line in found["lines"]
        if line.startswith(f"plan: {start}")
    )
    assert chunks > 1.3 * whole


AT_ONCE = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
"""A job's flags, whose start is of interest."""


def test_jobs_are_planned(tmp_path: Path) -> None:
    """One that trains all weights, and one that trains adapters of what it has written."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"paceline": {"pipeline": {"stages": "plan"}}}))
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 400)
    trains = AT_ONCE | {"train_file": text, "deepspeed": config}
    model = {name: value for name, value in TINY.items() if name not in ("model_type", "config_overrides")}
    adapters = model | {"model_name_or_path": tmp_path / "whole", "use_peft": True}
    for name, values in (("whole", TINY), ("adapters", adapters)):
        for code, errors in run_ranks(finetune, 2, flags(**values | trains, output_dir=tmp_path / name)):
            assert code == 0, errors
        found = json.loads((tmp_path / name / "report.json").read_text())["run"]
        assert found["stages"] in (1, 2)


def job_that_finds(fastest: int, argv: list[str], last_rank: str = "", chunks: int = 1) -> tuple[int, str]:
    """On every rank: the job, where measuring shows that ``fastest`` stages are, of so many ``chunks``."""
    from paceline.runtime import plan_at_start

    if last_rank:
        measure_otherwise(last_rank)
    else:
        measure_facts(FAST, None)

    def choose(options: Any, usual: Any) -> Any:
        return next(option for option in options if option.shape == (fastest, chunks))

    plan_at_start.choose = choose  # type: ignore[assignment]
    return finetune(argv)


@pytest.mark.parametrize("asks", [False, True])
def test_a_job_says_that_replicas_wait_for_a_slow_one(tmp_path: Path, asks: bool) -> None:
    """They get equal shares of a step, unless it is asked for others."""
    section = {"pipeline": {"unequal_replicas": {}}} if asks else {"pipeline": {}}
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"paceline": section}))
    argv = flags(**TINY | AT_ONCE | {"output_dir": tmp_path / "out", "deepspeed": config})
    (code, said), _ = run_ranks(job_that_finds, 2, 1, argv, "is slow")
    assert code == 0, said
    assert ('"unequal_replicas": {} in "pipeline" gives them shares' in said) != asks


GOES_ON = {"resume_from_checkpoint": "true"}
FOUR_STEPS = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "lr_scheduler_type": "constant"}


def losses_of(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_job_keeps_its_plan_when_it_goes_on(tmp_path: Path) -> None:
    """In every bit, though other stages are the fastest by then; planned anew only when asked, and with the states of
    the optimizer then."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 400)

    def run(output: str, fastest: tuple[int, int], **changes: Any) -> tuple[int, str]:
        """Stages that the job had, and what it said, where so many stages and chunks are the fastest."""
        argv = flags(**TINY | FOUR_STEPS | {"train_file": text, "output_dir": tmp_path / output} | changes)
        found = run_ranks(job_that_finds, 2, fastest[0], argv, chunks=fastest[1])
        assert [code for code, _ in found] == [0, 0], found
        return json.loads((tmp_path / output / "report.json").read_text())["run"]["stages"], found[0][1]

    chunks, replicas = (2, 2), (1, 1)
    kept = "the run goes on as before the checkpoint, with 2 stages of 2 chunks: "
    assert run("whole", chunks)[0] == 2
    stages, said = run("parts", replicas, resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2")
    assert stages == 2
    assert kept in said
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")[2:]
    assert kept in run("parts", replicas, **GOES_ON, max_steps=6)[1], "the choice is kept once more"
    after_four = {"resume_from_checkpoint": tmp_path / "whole" / "checkpoint-4"}
    stages, said = run("anew", replicas, **after_four, max_steps=5, replan="true")
    assert (stages, "as before the checkpoint" in said) == (1, False)
    stages, said = run("anew", chunks, **GOES_ON, max_steps=6)
    assert stages == 1
    assert "the run goes on as before the checkpoint, with 1 stage x 2 replicas" in said
    assert losses_of(tmp_path / "anew") == pytest.approx(losses_of(tmp_path / "parts")[2:], rel=1e-6)
    told = tmp_path / "told.json"
    told.write_text(json.dumps({"paceline": {"pipeline": {"stages": 2}}}))
    assert run("told", replicas, max_steps=1, deepspeed=told)[0] == 2
    stages, said = run("told", replicas, max_steps=2, **GOES_ON)  # the JSON no longer says so, but the run began so
    assert stages == 2
    assert "2 stages, as before the checkpoint" in said
    assert "plan: measured" not in said


def job_on_fast_links(argv: list[str], head_layers: float = 0.0) -> tuple[int, str]:
    """On every rank: the job, where all layers take as long and links take no time."""
    measure_facts(FAST, None, head_layers)
    return finetune(argv)


def test_a_job_keeps_its_halves_of_layers_when_it_goes_on(tmp_path: Path) -> None:
    """In every bit, though nothing is said of them; and goes on in whole layers where the JSON says so."""
    text, silent, whole = (tmp_path / name for name in ("text.txt", "silent.json", "whole.json"))
    text.write_text("to be or not to be, that is the question\n" * 400)
    sizes = {"train_batch_size": SAMPLES, "train_micro_batch_size_per_gpu": 2}
    batch = sizes | {"zero_optimization": {"stage": 1}}  # whose exchange would take replicas hours
    silent.write_text(json.dumps(batch))
    whole.write_text(json.dumps(batch | {"paceline": {"pipeline": {"half_layers": False}}}))
    three = {"config_overrides": TINY["config_overrides"].replace("num_hidden_layers=4", "num_hidden_layers=3")}

    def run(output: str, **changes: Any) -> str:
        """The job's output."""
        files = {"train_file": text, "deepspeed": silent, "output_dir": tmp_path / output}
        found = run_ranks(job_on_fast_links, 2, flags(**TINY | three | FOUR_STEPS | files | changes))
        assert [code for code, _ in found] == [0, 0], found
        return found[0][1]

    assert "paceline.pipeline.half_layers = true (" in run("halves")
    for output, changes in (("parts", {}), ("other", {"deepspeed": whole})):
        said = run(output, resume_from_checkpoint=tmp_path / "halves" / "checkpoint-2", **changes)
        assert ("paceline.pipeline.half_layers = true (as before" in said) == (output == "parts")
        assert losses_of(tmp_path / output) == losses_of(tmp_path / "halves")[2:]


def test_a_job_shares_the_head_unasked_and_keeps_that(tmp_path: Path) -> None:
    """Where the head is worth more than a stage of layers. A prompt can be completed all the same."""
    text, silent = tmp_path / "text.txt", tmp_path / "silent.json"
    text.write_text("to be or not to be, that is the question\n" * 400)
    sizes = {"train_batch_size": SAMPLES, "train_micro_batch_size_per_gpu": 2}
    silent.write_text(json.dumps(sizes | {"zero_optimization": {"stage": 1}}))

    def run(output: str, **changes: Any) -> str:
        """The job's output."""
        files = {"train_file": text, "deepspeed": silent, "output_dir": tmp_path / output}
        three = TINY["config_overrides"].replace("num_hidden_layers=4", "num_hidden_layers=3")
        model = {"config_overrides": f"{three},vocab_size=42048"}  # worth more than all layers
        found = run_ranks(job_on_fast_links, 2, flags(**TINY | model | FOUR_STEPS | files | changes), 8.0)
        assert [code for code, _ in found] == [0, 0], found
        return found[0][1]

    completed = {"sample_prompt": "to be", "sample_every": 2}
    said = run("slices", max_steps=2, **completed)
    assert "paceline.pipeline.head_slices = 16 (" in said
    assert "step 2: 'to be' continues as" in said
    assert "paceline.pipeline.head_slices = 16 (as before" in run("slices", max_steps=3, **GOES_ON)


def planned_on_hosts(namespaces: Sequence[str], address: str) -> tuple[int, int]:
    """On every rank, from now on in the network of a host of its own: the stages and replicas that are planned.

    What layers take is given, and the partition: they would go after how busy the machine's cores are.

    Args:
        namespaces: of the hosts.
    """
    import torch

    import paceline
    from paceline.runtime import plan_at_start

    enter(namespaces[int(os.environ["RANK"])])
    os.environ.update(MASTER_ADDR=address, GLOO_SOCKET_IFNAME=DEVICE)
    measured = plan_at_start.profile_items

    def profile_items(*args: Any, **kwargs: Any) -> Any:
        return [replace(item, forward_s=0.04, backward_s=0.06) for item in measured(*args, **kwargs)]

    plan_at_start.profile_items = profile_items  # type: ignore[assignment]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 128}
    config = {
        **{"train_batch_size": SAMPLES, "train_micro_batch_size_per_gpu": 8},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "paceline": {"pipeline": {"stages": "plan", "partition": "uniform"}},
    }
    model = model_config(num_hidden_layers=3, max_position_embeddings=64, **sizes)
    engine, *_ = paceline.initialize(model=model, config=config)
    ids = torch.zeros(engine.plan.micro_batch_size, 64, dtype=torch.int64)
    engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * engine.plan.micro_batches))
    return engine.plan.stages, engine.plan.data_parallel


@pytest.mark.skipif(bool(available()), reason=available())
def test_links_decide() -> None:
    """Two micro-batches of three layers in two stages take twice as long as one micro-batch on each of two replicas,
    unless gradients take seconds to be summed."""
    shapes = []
    for mbit in (None, 10):
        with Hosts(2, mbit=mbit) as hosts:
            (shape, other) = run_ranks(planned_on_hosts, 2, hosts.namespaces, hosts.addresses[0])
        assert shape == other
        shapes.append(shape)
    assert shapes == [(1, 2), (2, 1)]
