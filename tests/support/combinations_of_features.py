"""Which features work together: every pair of them in one small job, and the tables of `config/README.md` about it.

    python tests/support/combinations_of_features.py [--write]

A cell is two steps of a pipeline of two stages with two replicas (four processes). Its losses are compared with those
of one process that has what changes the numbers (precision, clipping, adapters, …) and nothing of the rest. What is
found must be what ``golden/combinations.json`` says; ``--write`` writes that file and the tables, pair by pair. The
test has several pairs in one job (:func:`in_few_jobs`): what works among ten features works among any two of them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from paceline.config.exclusions import GROUNDS, markdown

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "golden" / "combinations.json"
README = TESTS.parent / "integration" / "paceline" / "config" / "README.md"
BEGIN, END = "<!-- combinations:begin -->", "<!-- combinations:end -->"

STAGES, RANKS, STEPS = 2, 4, 2
EXACT, TRAINS, REFUSED, SAME_KEY = "exact", "trains", "refused", "one of them"
MARKS = {EXACT: "=", TRAINS: "+", REFUSED: "-", SAME_KEY: ""}
TOLERANCE = 2e-5
AT_ONCE = 12
"""Jobs that the same processes do one after another: each leaves the threads of its groups behind."""

FEATURES_A_JOB = 10
"""Of a job that shows several pairs at once."""

NO_FLUSH = {"multidirection", "one_direction", "late_gradients"}


@dataclass(frozen=True)
class Feature:
    """What it adds to the JSON and to the model.

    Args:
        config: merged into the DeepSpeed JSON.
        model: changes of the model's config.
        family: of the model.
        changes_numbers: a single process with it is what to compare with; otherwise one without it.
        is_exact: whether there is a single process to compare with.
        prepare: name of what is done to the model in memory.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    family: str = "llama"
    changes_numbers: bool = False
    is_exact: bool = True
    prepare: str = ""


def _schedule(kind: str, **keys: Any) -> dict[str, Any]:
    return {"paceline": {"pipeline": {"schedule": {"type": kind, **keys}}}}


HETERO = {"method": "hetero", "repartition_every": 1}
INT8 = {"forward": "int8", "backward": "int8"}
MIXTRAL = {"router_aux_loss_coef": 0.0, "output_router_logits": False}
FEATURES: dict[str, Feature] = {
    "kfkb": Feature(_schedule("kfkb")),
    "eager": Feature(_schedule("eager")),
    "adaptive": Feature(_schedule("adaptive", retune_every=1)),
    "late_gradients": Feature(_schedule("adaptive", retune_every=1, late_gradients=True), is_exact=False),
    "interleaved": Feature(_schedule("interleaved")),
    "dualpipev": Feature(_schedule("dualpipev")),
    "zbv": Feature(_schedule("zbv")),
    "multidirection": Feature(_schedule("multidirection", staleness=1), is_exact=False),
    "multidirection, staleness 0": Feature(_schedule("multidirection", staleness=0)),
    "one_direction": Feature(_schedule("one_direction"), is_exact=False),
    "int8 boundaries": Feature({"paceline": {"pipeline": {"boundary": INT8}}}, is_exact=False),
    "hetero, layers move": Feature({"paceline": {"pipeline": {"partition": HETERO}}}),
    "half layers": Feature({"paceline": {"pipeline": {"half_layers": True}}}),
    "head slices": Feature({"paceline": {"pipeline": {"head_slices": 4}}}),
    "compile": Feature({"paceline": {"pipeline": {"compile": {"backend": "aot_eager"}}}}),
    "tensor parallelism": Feature({"tensor_parallel": {"autotp_size": 2}}),
    "unequal replicas": Feature({"paceline": {"pipeline": {"unequal_replicas": {"micro_batches": [2, 6]}}}}),
    "ZeRO 1": Feature({"zero_optimization": {"stage": 1}}),
    "bf16": Feature({"bf16": {"enabled": True}}, changes_numbers=True, is_exact=False),
    "fp16": Feature(
        {"fp16": {"enabled": True, "initial_scale_power": 8}}, changes_numbers=True, is_exact=False, prepare="fp16"
    ),
    "autocast": Feature(
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, changes_numbers=True, is_exact=False
    ),
    "clipping": Feature({"gradient_clipping": 0.05}, changes_numbers=True),
    "checkpointing": Feature({"pipeline": {"activation_checkpoint_interval": 1}}),
    "tied embeddings": Feature(model={"tie_word_embeddings": True}, changes_numbers=True),
    "router loss": Feature(
        model={"router_aux_loss_coef": 0.1, "output_router_logits": True},
        family="mixtral",
        changes_numbers=True,
        is_exact=False,
    ),
    "expert_parallel": Feature({"expert_parallel": {"enabled": True, "autoep_size": 2}}, family="mixtral"),
    "experts move": Feature(
        {"expert_parallel": {"enabled": True, "autoep_size": 2}, "paceline": {"moe": {"rebalance_every": 1}}},
        family="mixtral",
    ),
    "LoRA": Feature(changes_numbers=True, prepare="lora"),
    "frozen layers": Feature(changes_numbers=True, prepare="frozen"),
    "natural_gradient": Feature({"paceline": {"natural_gradient": {}}}, changes_numbers=True, is_exact=False),
    "max_change": Feature({"paceline": {"natural_gradient": {"max_change": {}}}}, changes_numbers=True, is_exact=False),
    "averaging": Feature({"paceline": {"averaging": {"every_tokens": 256, "scale_learning_rate": False}}}),
    "trace_every": Feature({"paceline": {"report": {"trace_every": 1}}}),
}


def merged(*parts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Objects inside objects joined; None where two say different things of one key."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, Mapping) and isinstance(whole.get(key, {}), Mapping):
                inner = merged(whole.get(key, {}), value)
                if inner is None:
                    return None
                whole[key] = inner
            elif key in whole and whole[key] != value:
                return None
            else:
                whole[key] = copy.deepcopy(value)
    return whole


def cells() -> list[tuple[str, ...]]:
    """Each feature by itself, and each pair."""
    return [(name,) for name in FEATURES] + list(combinations(FEATURES, 2))


def name_of(cell: tuple[str, ...]) -> str:
    return " with ".join(cell)


def is_possible(cell: tuple[str, ...]) -> bool:
    """Whether one job can ask for both."""
    if {"dualpipev", "unequal replicas"} <= {*cell}:
        return False  # it takes the four micro-batches that each replica has here
    features = [FEATURES[name] for name in cell]
    return merged(*(f.config for f in features)) is not None and merged(*(f.model for f in features)) is not None


def work_only_two_by_two(job: tuple[str, ...]) -> bool:
    """Whether a job has experts whose layers are computed again without a flush, which is refused, or experts in fp16
    under autocast in compiled layers, which PyTorch fails to trace on CPUs."""
    without_flush = "checkpointing" in job and NO_FLUSH & {*job}
    return _has_experts(job) and bool(without_flush or {"compile", "fp16", "autocast"} <= {*job})


def takes_long(job: tuple[str, ...]) -> bool:
    """Whether layers with experts, which are many graphs, are compiled in several ways."""
    in_ways = {"hetero, layers move", "half layers", "checkpointing"} & {*job}
    return len(job) > 2 and _has_experts(job) and "compile" in job and bool(in_ways)


def _has_experts(job: tuple[str, ...]) -> bool:
    return any(FEATURES[name].family == "mixtral" for name in job)


def pairs_shown(job: tuple[str, ...], found: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, ...]]:
    """The pairs whose outcome in ``found`` a job of all these features shows: exact ones where nothing rounds."""
    is_exact = all(FEATURES[name].is_exact for name in job)
    return (pair for pair in combinations(job, 2) if is_exact or found[name_of(pair)]["outcome"] != EXACT)


def in_few_jobs(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Jobs of several features that together show every pair that works; a pair that does not is one by itself."""
    names = list(FEATURES)
    pairs = [cell for cell in cells() if len(cell) == 2]
    works = {pair for pair in pairs if found[name_of(pair)]["outcome"] in (EXACT, TRAINS)}
    jobs, left = [pair for pair in pairs if pair not in works], set(works)

    def gain(job: tuple[str, ...], name: str) -> int:
        """How many pairs more it shows with ``name``; 0 where it cannot have it, or shows others no longer."""
        more = tuple(sorted((*job, name), key=names.index))
        if (
            name in job
            or not works.issuperset(combinations(more, 2))
            or not is_possible(more)
            or work_only_two_by_two(more)
            or takes_long(more)
        ):
            return 0
        before, after = (left.intersection(pairs_shown(some, found)) for some in (job, more))
        return len(after) - len(before) if after >= before else 0

    for pair in pairs:
        if pair not in left:
            continue
        job = pair
        while len(job) < FEATURES_A_JOB:
            best = max(names, key=lambda name: gain(job, name))
            if gain(job, best) <= 0:
                break
            job = tuple(sorted((*job, best), key=names.index))
        left.difference_update(pairs_shown(job, found))
        jobs.append(job)
    return jobs


def _build(cell: Iterable[str], *, alone: bool, light: str) -> tuple[Any, dict[str, Any]]:
    """Model and JSON, of the whole job or of the one process that it is compared with."""
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage
    from support.jobs import LENGTH, ds_config, model_config

    features = [FEATURES[name] for name in cell]
    family = "mixtral" if any(f.family == "mixtral" for f in features) else "llama"
    changes = merged(*(f.model for f in features)) or {}
    base = MIXTRAL if family == "mixtral" else {"tie_word_embeddings": False}
    known = {key: value for key, value in changes.items() if family == "mixtral" or "router" not in key}
    # Layers are measured on as many tokens as they train on: compiled, they would be compiled for both.
    hf_config = model_config(family, max_position_embeddings=LENGTH, **{**base, **known})
    counts = [f for f in features if f.changes_numbers or not alone]
    asked = merged(*(f.config for f in counts)) or {}
    steps = 8 if alone or "tensor_parallel" in asked else 4  # then there is one replica
    config = ds_config(1 if alone else STAGES, gradient_accumulation_steps=steps, optimizer=SGD)
    config = merged({key: value for key, value in config.items() if key not in asked or key == "paceline"}, asked)
    assert config is not None
    if "averaging" in config["paceline"]:
        config["paceline"]["averaging"]["lighthouse"] = light
    prepare = {f.prepare for f in features}
    if "fp16" in prepare:
        from support.natural import allow_fp16

        allow_fp16()
    model: Any = hf_config
    if prepare & {"lora", "frozen"}:
        layers = hf_config.num_hidden_layers
        model = load_stage(None, hf_config, Cut.whole(layers)).model
        if "frozen" in prepare:
            model.get_input_embeddings().requires_grad_(False)
            model.model.layers[: layers // 2].requires_grad_(False)  # the whole first stage
        if "lora" in prepare:
            import torch
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model, config


SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def run_cell(cell: tuple[str, ...], *, alone: bool = False, light: str = "") -> tuple[str, Any]:
    """On one rank of a job: what came of it, and losses or the message."""
    import torch.distributed as dist

    import paceline
    from paceline.planning.unequal_replicas import dealt
    from support.jobs import step_batches

    engine = None
    try:
        model, config = _build(cell, alone=alone, light=light)
        engine, *_ = paceline.initialize(model=model, config=config)
        owners = dealt(engine.replica_micro_batches)
        losses = []
        for step in range(STEPS):
            own = [
                b
                for b, owner in zip(step_batches(step, "padded"), owners, strict=True)
                if owner == engine.grid.data_parallel_id
            ]
            losses.append(engine.train_batch(iter(own)))
        flush = getattr(engine, "flush", None)
        if flush is not None:
            flush()
        engine.finish_averaging()
        outcome = TRAINS, [float(loss) for loss in losses]
    except ValueError as error:
        outcome = REFUSED, str(error)
    finally:
        if engine is not None:
            engine.destroy()
        del engine
        gc.collect()
    if dist.is_initialized():
        dist.barrier()  # not where one has failed: the others would wait for it, and nobody would hear why
    return outcome


def run_cells(chosen: list[tuple[str, ...]], lights: dict[str, str], alone: bool = False) -> list[tuple[str, Any]]:
    """On one rank: all of them, one after another."""
    import os
    import tempfile

    os.chdir(tempfile.mkdtemp())  # traces and profiles go to the working directory
    found = []
    for cell in chosen:
        try:
            found.append(run_cell(cell, alone=alone, light=lights.get(name_of(cell), "")))
        except Exception as error:
            raise RuntimeError(f"{name_of(cell)}: {type(error).__name__}: {error}") from error
    return found


def reference_of(cell: tuple[str, ...]) -> tuple[str, ...]:
    """The features of a cell that one process has to have for the same numbers; the family of the model is one."""
    return tuple(name for name in cell if FEATURES[name].changes_numbers or FEATURES[name].family != "llama")


def measure(chosen: list[tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """Each cell's outcome, by its name."""
    from support.archipelago import lighthouses
    from support.ranks import run_ranks

    possible = [cell for cell in chosen if is_possible(cell)]
    averaged = [name_of(cell) for cell in possible if "averaging" in cell]
    environment = {"PACELINE_ISLAND": "0"}
    with lighthouses(max(1, len(averaged))) as addresses:
        lights = dict(zip(averaged, addresses, strict=False))
        ranks: list[list[Any]] = [[] for _ in range(RANKS)]
        for first in range(0, len(possible), AT_ONCE):
            part = possible[first : first + AT_ONCE]
            for told, outcomes in zip(ranks, run_ranks(run_cells, RANKS, part, lights, env=environment), strict=True):
                told.extend(outcomes)
    exact = [cell for cell in possible if all(FEATURES[name].is_exact for name in cell)]
    references = sorted({reference_of(cell) for cell in exact})
    wanted: dict[tuple[str, ...], Any] = {}
    for first in range(0, len(references), AT_ONCE):
        part = references[first : first + AT_ONCE]
        wanted |= zip(part, run_ranks(run_cells, 1, part, {}, True, env=environment)[0], strict=True)
    found: dict[str, dict[str, Any]] = {}
    for cell in chosen:
        name = name_of(cell)
        if not is_possible(cell):
            found[name] = {"outcome": SAME_KEY}
            continue
        told = [rank[possible.index(cell)] for rank in ranks]
        assert len({outcome for outcome, _ in told}) == 1, f"{name}: ranks differ: {told}"
        outcome, value = told[0]
        if outcome == REFUSED:
            found[name] = {"outcome": REFUSED, "message": value}
            continue
        assert all(math.isfinite(loss) for loss in value), f"{name}: {value}"
        if cell in exact:
            kind, losses = wanted[reference_of(cell)]
            assert kind == TRAINS, f"{name}: one process: {losses}"
            difference = max(abs(a - b) / abs(b) for a, b in zip(value, losses, strict=True))
            assert difference < TOLERANCE, f"{name}: {value}, and one process {losses}"
            outcome = EXACT
        found[name] = {"outcome": outcome}
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """For `config/README.md`: a triangle of marks, and why what is refused is refused."""
    names = list(FEATURES)
    head = "| | " + " | ".join(str(number) for number in range(1, len(names) + 1)) + " |"
    lines = [head, "|---|" + ":-:|" * len(names)]
    for number, row in enumerate(names, 1):
        marks = []
        for column in names[:number]:
            key = row if row == column else name_of((column, row))
            marks.append(MARKS[found[key]["outcome"]])
        marks += [""] * (len(names) - number)
        lines.append(f"| {number} {row} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def readme_part(found: Mapping[str, Mapping[str, Any]]) -> str:
    counts = {kind: sum(cell["outcome"] == kind for cell in found.values()) for kind in MARKS}
    text = (
        f"Every pair was measured, two steps of two pipelines of two stages. `=`: {counts[EXACT]} that give the losses "
        f"of one process; `+`: {counts[TRAINS]} that train, where there is no such process or rounding differs (half "
        f"precision, stale weights, estimates of each replica's own); `-`: {counts[REFUSED]} that are refused at the "
        "start, for a reason of the second table; empty: one key, one value, or too few micro-batches here. Both "
        "tables are written by "
        "`python tests/support/combinations_of_features.py --write`, and held to the truth by "
        "`tests/distributed/test_combinations.py`, which has up to ten features in a job."
    )
    reasons = " ".join(f"Ground *{ground}*: {meaning}." for ground, meaning in GROUNDS.items())
    refused = f"Refused at the start, with the values, the reason and what to do instead. {reasons}\n\n{markdown()}"
    return f"{BEGIN}\n{text}\n\n{table(found)}\n\n{refused}\n{END}"


def write(found: Mapping[str, Mapping[str, Any]]) -> None:
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(before + readme_part(found) + rest.partition(END)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--write-readme", action="store_true", help="of what was found last, without measuring")
    parser.add_argument("--only", nargs="*", help="features; of the others what is written stays")
    args = parser.parse_args()
    if args.write_readme:
        write(json.loads(GOLDEN.read_text()))
        return
    chosen = [cell for cell in cells() if args.only is None or set(args.only) & set(cell)]
    found = measure(chosen)
    for name, cell in found.items():
        print(f"{cell['outcome']:12s} {name}: {cell.get('message', '')}")
    if args.write:
        known = json.loads(GOLDEN.read_text()) if args.only is not None else {}
        write({name_of(cell): (known | found)[name_of(cell)] for cell in cells()})


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))  # without pytest
    main()
