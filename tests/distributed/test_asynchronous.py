"""Asynchronous pipelines train as declared: with a flush a step exactly as one process, without one as the emulator.

The emulator (:mod:`support.asynchronous_emulator`) has no pipeline: it takes from the schedule which weights each
forward and each backward uses, and nothing else.
"""

from __future__ import annotations

import random
from ast import literal_eval
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.optim.max_change import Limits
from paceline.schedules import asynchronous, directions
from support.asynchronous_emulator import Emulator, accumulate, cut
from support.jobs import model_config, step_batches
from support.limited_steps import step_limited
from support.ranks import run_ranks

STEPS = 8
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}
"""With a larger epsilon than usual: Adam turns the rounding of gradients near it into steps of the learning rate."""
AHEAD = {"nesterov": 0.9, "error_feedback": 1.0}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}
"""Absolute, of parameters, whose entries are up to 1."""


@dataclass(frozen=True)
class Case:
    """A run: its pipeline, model, data and optimizer.

    Args:
        devices: of a pipeline, each with a stage of every direction.
        micro_batches: of a step and replica.
        flushes: steps after which the run is drained, beside the last one.
        data: kind of batches; see :func:`support.jobs.step_batches`.
        iterator_a_step: the engine cannot read ahead.
        sharing: replicas that share experts.
        partition: boundaries over embedding, layers and head; by default equally many layers a stage.
    """

    devices: int
    micro_batches: int
    type: str = "multidirection"
    directions: int | None = None
    staleness: int = 1
    owners: str = "direction"
    replicas: int = 1
    steps: int = STEPS
    flushes: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    clipping: float = 0.0
    tied: bool = False
    recompute: bool = False
    data: str = "padded"
    iterator_a_step: bool = False
    family: str = "llama"
    partition: tuple[int, ...] | None = None
    correction: str | None = None
    warm_in_steps: int = 0
    limits: tuple[float, float, float] | None = None
    sharing: int = 1

    @property
    def schedule(self) -> dict[str, Any]:
        common = {"type": self.type, "warm_in_steps": self.warm_in_steps, "correction": self.correction}
        if self.type == "one_direction":
            return common
        own = {"staleness": self.staleness, "optimizer_owners": self.owners, "directions": self.directions}
        return {**common, **own}

    @property
    def section(self) -> dict[str, Any]:
        """``"paceline"`` in the JSON."""
        pipeline = {"stages": self.devices, "schedule": self.schedule}
        limits = {} if self.limits is None else dict(zip(("layer", "head", "total"), self.limits, strict=True))
        return {"pipeline": pipeline, **({"max_change": limits} if limits else {})}

    def model(self) -> Any:
        return model_config(self.family, num_hidden_layers=self.devices, tie_word_embeddings=self.tied)

    @property
    def layers(self) -> list[int] | None:
        """Boundaries over decoder layers."""
        return None if self.partition is None else [min(max(item - 1, 0), self.devices) for item in self.partition]

    def batches(self, step: int) -> list[dict[str, Tensor]]:
        """Of all replicas, one after the other."""
        count = self.micro_batches * self.replicas
        return [batch for part in range(-(-count // 8)) for batch in step_batches(1000 * part + step, self.data)][
            :count
        ]


def train_one(case: Case) -> dict[str, Any]:
    """Losses, and this rank's parameters after every drain, where it has some experts as ``"name@(their numbers)"``."""

    import paceline
    from paceline.runtime.initialize import start_distributed
    from paceline.runtime.module import CausalLMPipeline

    start_distributed()
    routes = directions.routes(case.devices, case.directions) if case.type == "multidirection" else None
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.micro_batches,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "gradient_clipping": case.clipping,
        "zero_optimization": {"stage": 1},
        "steps_per_print": None,
        "pipeline": {"activation_checkpoint_interval": int(case.recompute)},
        "paceline": case.section,
        "expert_parallel": {"enabled": case.sharing > 1, "autoep_size": case.sharing},
    }
    pipeline = CausalLMPipeline(
        case.model(),
        num_stages=case.devices,
        partition=case.partition or "uniform",
        dtype=case.dtype,
        routes=routes,
        expert_parallel=case.sharing,
    )
    engine, *_ = paceline.initialize(model=pipeline, config=config)
    first = engine.grid.data_parallel_id * case.micro_batches
    own = [case.batches(step)[first : first + case.micro_batches] for step in range(case.steps)]
    data = chain.from_iterable(own)
    losses, states = [], {}
    layers = engine.expert_layers.values()
    rows = {parameter: layer.own_experts for layer in layers for parameter in layer.parameters()}
    for step in range(case.steps):
        losses.append(engine.train_batch(iter(own[step]) if case.iterator_a_step else data))
        if step in case.flushes or step == case.steps - 1:
            engine.flush()
            states[step] = {
                name if parameter not in rows else f"{name}@{rows[parameter]}": parameter.detach().clone()
                for stage in engine.module.stages
                for name, parameter in stage.named_parameters()
            }
    owned = owned_rows(engine.optimizer, rows)
    engine.destroy()
    return {"losses": [loss.item() for loss in losses], "states": states, "owned": owned}


def owned_rows(optimizer: Any, experts: Mapping[Any, Sequence[int]]) -> dict[str, Any]:
    """Rows that this rank owns of each parameter, and the elements of its masters and of all optimizer states.

    Args:
        experts: rows here of parameters that have experts of other ranks elsewhere.
    """
    rows: dict[str, list[int]] = {}
    for one in optimizer.owned:
        own = range(one.start, one.stop)
        numbers = [experts[one.parameter][row] for row in own] if one.parameter in experts else own
        rows.setdefault(f"model.{one.name}", []).extend(numbers)
    states = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    return {
        "rows": rows,
        "masters": sum(one.master.numel() for one in optimizer.owned),
        "states": sum(value.numel() for value in states if value.dim()),
    }


def train(cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Runs on every rank: :func:`train_one` for each, one after the other."""
    found = []
    for case in cases:
        try:
            found.append(train_one(case))
        except Exception as error:
            raise RuntimeError(str(case)) from error
    return found


def adamw(masters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(masters, **ADAMW)


class Corrected:
    """AdamW with a warm-in and a correction of its changes, as their formulas say."""

    def __init__(self, masters: list[torch.nn.Parameter], warm_in_steps: int, correction: str | None) -> None:
        self.masters, self.warm_in_steps, self.correction = masters, warm_in_steps, correction
        self.basic, self.num_updates = adamw(masters), 0
        self.changes = [torch.zeros_like(p) for p in masters]

    @torch.no_grad()
    def step(self) -> None:
        self.num_updates += 1
        if self.warm_in_steps:
            self.basic.param_groups[0]["lr"] = ADAMW["lr"] * min(1.0, self.num_updates / self.warm_in_steps)
        before = [p.clone() for p in self.masters]
        self.basic.step()
        changes = [p - old for p, old in zip(self.masters, before, strict=True)]
        if self.correction is not None:
            for p, change, previous in zip(self.masters, changes, self.changes, strict=True):
                p.add_(change - previous, alpha=AHEAD[self.correction])
        self.changes = changes


class Limited(Corrected):
    """The same, of which no layer moves farther than it may: corrections go on from where it has come to."""

    def __init__(self, masters: list[torch.nn.Parameter], names: list[str], case: Case) -> None:
        super().__init__(masters, case.warm_in_steps, case.correction)
        assert case.limits is not None
        heads = frozenset({"model.model.embed_tokens" if case.tied else "model.lm_head"})
        self.limits = Limits(*case.limits, heads=heads)
        self.named = dict(zip(names, masters, strict=True))
        self.num_limited = 0
        self.ahead = 0.0 if case.correction is None else AHEAD[case.correction]

    @torch.no_grad()
    def step(self) -> None:
        before, previous = [p.clone() for p in self.masters], self.changes
        self.num_limited += int(
            step_limited(SimpleNamespace(step=super().step), self.named, self.limits)["num_limited"]
        )
        moved = [p - old for p, old in zip(self.masters, before, strict=True)]
        self.changes = [
            (change + self.ahead * last) / (1 + self.ahead) for change, last in zip(moved, previous, strict=True)
        ]


def emulate(case: Case, flushes: Collection[int]) -> dict[str, Any]:
    """What :func:`train_one` should return, with the parameters of all stages, and the norms."""
    stream = asynchronous.make(case.type, case.devices, case.micro_batches, case.directions)
    stages = cut(case.model(), case.devices, boundaries=case.layers, dtype=case.dtype, recompute=case.recompute)
    names = list(dict.fromkeys(name for stage in stages for name, _ in stage.named_parameters()))
    stepped = partial(Corrected, warm_in_steps=case.warm_in_steps, correction=case.correction)
    emulator = Emulator(
        stream,
        stages,
        stepped if case.limits is None else partial(Limited, names=names, case=case),
        case.steps,
        flushes=flushes,
        clipping=case.clipping,
        replicas=case.replicas,
    )
    states = {}
    for step in range(case.steps):
        emulator.step(case.batches(step))
        states[step] = emulator.state
    assert case.limits is None or emulator._optimizer.num_limited, "nothing is limited"
    return {"losses": emulator.losses, "norms": emulator.norms, "states": states}


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The largest of each parameter, of those that ``found`` has."""
    assert found, "a rank without parameters"
    return {name: float((value - rows_of(wanted, name)).abs().max()) for name, value in found.items()}


def rows_of(wanted: dict[str, Tensor], name: str) -> Tensor:
    """What a rank has under this name."""
    name, _, experts = name.partition("@")
    return wanted[name][list(literal_eval(experts))] if experts else wanted[name]


def assert_follows(case: Case, ranks: list[dict[str, Any]], wanted: dict[str, Any], tolerance: float) -> None:
    """Every rank's losses, and its parameters after every drain; the stages of all ranks together are the model."""
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"]
        # transformers takes the cross entropy in fp32, whatever the model is.
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=max(tolerance, 1e-6))
        assert rank["states"].keys() == {*case.flushes, case.steps - 1}
        for step, state in rank["states"].items():
            for name, difference in differences(state, wanted["states"][step]).items():
                assert difference <= tolerance, f"after step {step}, {name}: {difference:.1e}"
    last = case.steps - 1
    names = {name.partition("@")[0] for rank in ranks for name in rank["states"][last]}
    assert names == wanted["states"][last].keys()


def assert_copies_agree(case: Case, ranks: list[dict[str, Any]]) -> None:
    """In every bit: the devices of a mirror group, the replicas, and the two ends of a tied weight."""
    held = []
    for step in (*case.flushes, case.steps - 1):
        seen: dict[str, Tensor] = {}
        for rank in ranks:
            for name, value in rank["states"][step].items():
                assert torch.equal(value, seen.setdefault(name, value)), f"after step {step}, {name}"
        held = [name for rank in ranks for name in rank["states"][step]]
    has_copies = case.replicas > 1 or (case.type == "multidirection" and (case.directions or case.devices // 2) > 1)
    assert (max(map(held.count, held)) > 1) == (has_copies or case.tied)


@lru_cache
def _runs(world: int, cases: tuple[Case, ...]) -> list[list[dict[str, Any]]]:
    return run_ranks(train, world, cases)


def run(case: Case, table: dict[str, Case]) -> list[dict[str, Any]]:
    """What the ranks return. All cases of ``table`` with as many ranks run on the same ones: starting takes longest."""
    world = case.devices * case.replicas
    alike = tuple(other for other in table.values() if other.devices * other.replicas == world)
    ranks = [rank[alike.index(case)] for rank in _runs(world, alike)]
    assert_copies_agree(case, ranks)
    return ranks


# -- with a flush a step ---------------------------------------------------------------------------------------------

NARROW = torch.float32
FLUSHED = {
    "two, fp64": Case(2, 4, clipping=0.5, tied=True),
    "two, two replicas, fp64": Case(2, 4, replicas=2, clipping=0.5),
    "four, two rounds, fp64": Case(4, 8, clipping=0.5, tied=True),
    "four, by mirror, fp64": Case(4, 4, owners="mirror", iterator_a_step=True),
}
SHARED = Case(2, 4, replicas=2, family="mixtral", sharing=2, dtype=NARROW, steps=5)
FLUSHED |= {
    "two, shared experts, by mirror, fp32": replace(SHARED, owners="mirror", clipping=0.5, recompute=True),
}
FLUSHED = {name: replace(case, staleness=0, steps=3) for name, case in FLUSHED.items()}


@pytest.mark.parametrize("case", FLUSHED.values(), ids=FLUSHED.keys())
def test_flushed_it_is_plain_accumulation(case: Case) -> None:
    steps = [case.batches(step) for step in range(case.steps)]
    if case.family == "mixtral":  # whose router's loss is a mean over all micro-batches
        wanted = emulate(case, range(case.steps))
    else:
        plain = accumulate(case.model(), steps, adamw, clipping=case.clipping, dtype=case.dtype)
        wanted = {"losses": plain.losses, "norms": plain.norms, "states": {case.steps - 1: plain.state}}
    assert not case.clipping or min(wanted["norms"]) > case.clipping, "nothing is clipped"
    assert_follows(case, run(case, FLUSHED), wanted, TOLERANCES[case.dtype])


# -- without one -----------------------------------------------------------------------------------------------------


def some_steps(seed: int) -> tuple[int, ...]:
    """After which to drain: the first one, and three at random, two of them in a row."""
    drawn = random.Random(seed).sample(range(2, STEPS - 2), 2)
    return tuple(sorted({0, *drawn, drawn[0] + 1}))


FOLLOWED = {
    "two": Case(2, 2, iterator_a_step=True),
    "two, two rounds, ragged": Case(2, 4, clipping=0.5, tied=True, data="ragged", flushes=some_steps(0)),
    "two, two replicas": Case(2, 4, replicas=2, clipping=0.5, tied=True, flushes=some_steps(1)),
    "four": Case(4, 4, clipping=0.5, tied=True, data="ragged", flushes=some_steps(2)),
    "four, two rounds, by mirror": Case(
        4, 8, owners="mirror", recompute=True, clipping=0.5, tied=True, iterator_a_step=True, flushes=some_steps(3)
    ),
    "four, experts": Case(4, 4, family="mixtral", steps=4, dtype=NARROW),
    "four, uneven": Case(4, 4, tied=True, steps=6, partition=(0, 1, 3, 5, 6)),
    "two, errors fed back": Case(2, 2, replicas=2, steps=8, correction="error_feedback", warm_in_steps=5),
    "two, limited": Case(2, 4, replicas=2, tied=True, steps=6, limits=(0.01, 0.02, 0.04), flushes=(2,)),
    "four, by mirror, limited, Nesterov's weights": Case(
        4, 4, owners="mirror", steps=6, limits=(0.01, 0.02, 0.05), correction="nesterov"
    ),
    "two, shared experts": replace(SHARED, clipping=0.5, flushes=(2,)),
    "two, there and back, shared experts, by mirror": replace(
        SHARED, directions=2, owners="mirror", clipping=0.5, flushes=(1,)
    ),
    "two, pairs of replicas share experts": replace(SHARED, micro_batches=2, replicas=4, directions=2, steps=4),
    "eight, by mirror": Case(8, 8, owners="mirror", clipping=0.5, steps=3),
    "two, there and back": Case(2, 4, directions=2, clipping=0.5, tied=True, data="ragged", steps=8, flushes=(0, 4)),
    "six, there and back": Case(6, 12, clipping=0.5, tied=True, data="ragged", steps=5, flushes=(2,)),
    "one direction, an update a round": Case(4, 4, "one_direction", clipping=0.5, flushes=some_steps(4)),
    "one direction, two updates a round": Case(4, 2, "one_direction", tied=True, recompute=True, data="ragged"),
    "one direction, limited": Case(
        4, 2, "one_direction", steps=6, limits=(0.01, 0.02, 0.0), correction="error_feedback"
    ),
    "one direction, shared experts": replace(SHARED, micro_batches=3, type="one_direction", clipping=0.5, flushes=(1,)),
    "one direction, two replicas": Case(2, 3, "one_direction", replicas=2, clipping=0.5, flushes=some_steps(5)),
}
FOLLOWED = dict(sorted(FOLLOWED.items(), key=lambda item: item[1].devices * item[1].replicas))
"""Cases of as many ranks beside each other: they are likely to be the same worker's."""
IN_EVERY_BIT = {
    "two": Case(2, 4, dtype=NARROW, steps=8),
    "four": Case(4, 8, dtype=NARROW, steps=8),
    "one direction": Case(4, 4, "one_direction", dtype=NARROW, steps=8),
}


@pytest.mark.parametrize("case", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_follows_the_emulator(case: Case) -> None:
    """Losses of all steps and all parameters; and states are with their owners and with nobody else."""
    wanted = emulate(case, case.flushes)
    assert not case.clipping or min(wanted["norms"]) > case.clipping, "nothing is clipped"
    ranks = run(case, FOLLOWED)
    assert_follows(case, ranks, wanted, TOLERANCES[case.dtype])
    assert_owned(case, [rank["owned"] for rank in ranks])


@pytest.mark.parametrize("case", IN_EVERY_BIT.values(), ids=IN_EVERY_BIT.keys())
def test_follows_the_emulator_in_every_bit(case: Case) -> None:
    """In fp32, where the order of all sums is given: no more than two directions, no norm, no tied weight."""
    wanted = emulate(case, case.flushes)["states"][case.steps - 1]
    for rank in run(case, IN_EVERY_BIT):
        for name, value in rank["states"][case.steps - 1].items():
            assert torch.equal(value, wanted[name]), name


def owners_of(case: Case, stage: int) -> set[int]:
    """Ranks that may have optimizer states of a stage: those of its device in direction 0, or in any."""
    routes = [range(case.devices)]
    if case.type == "multidirection" and case.owners == "mirror":
        routes = [*directions.routes(case.devices, case.directions)]
    devices = {route[stage] for route in routes}
    return {device * case.replicas + replica for device in devices for replica in range(case.replicas)}


def assert_owned(case: Case, found: list[dict[str, Any]]) -> None:
    """Every row has one owner, which is one of its stage's, and the optimizer keeps nothing of other rows."""
    own = cut(case.model(), case.devices, boundaries=case.layers, dtype=case.dtype)
    wanted: dict[str, tuple[int, set[int]]] = {}
    for stage in reversed(range(case.devices)):  # a weight that two share is the first one's
        rows = {name: len(parameter) for name, parameter in own[stage].named_parameters()}
        wanted |= {name: (count, owners_of(case, stage)) for name, count in rows.items()}
    is_copied = case.tied and (case.type != "multidirection" or (case.devices, case.directions) == (2, None))
    for name, (rows, owners) in wanted.items():
        holders = {rank: one["rows"][name] for rank, one in enumerate(found) if name in one["rows"]}
        if is_copied and "embed_tokens" in name:  # each end has one of its own
            holders = {rank: held for rank, held in holders.items() if rank in owners}
        assert holders.keys() <= owners, f"{name} is owned by {sorted(holders)}"
        assert sorted(chain.from_iterable(holders.values())) == [*range(rows)], name
    num_states = 2 + (case.correction is not None)
    assert all(one["states"] == num_states * one["masters"] > 0 for one in found)


def test_other_weights_would_be_noticed() -> None:
    """A run with a flush a step, and one without those that there are, are far from what the tests above compare."""
    case = Case(2, 4, clipping=0.5, tied=True, steps=4, flushes=(1,))
    ranks = run_ranks(train_one, 2, case)
    for flushes in (range(case.steps), ()):
        other = emulate(case, flushes)["states"][case.steps - 1]
        for rank in ranks:
            assert max(differences(rank["states"][case.steps - 1], other).values()) > 1e-6
