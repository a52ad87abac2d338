"""Random sequences of what a user does with an engine between its steps, reproducible by kind and seed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from support.jobs import MICRO_BATCHES, ds_config

Chances = dict[str, tuple[float, Sequence[Any]]]
"""How probable each key is, and its values."""
ASYNCHRONOUS = ("one_direction", "multidirection")
FLUSHED = ("1f1b", "kfkb", "eager", "zbh1", "zbh2", "adaptive", "interleaved", "zbv", "generated", "multidirection")
IN_CHUNKS = ("interleaved", "zbv", "generated")
WARM_UP = {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 3}}
FORMATS = [{"forward": a, "backward": b} for a, b in (("int8", "int8"), ("bf16", "int8"), ("int4", "fp8_e4m3"))]
ESTIMATES = {"update_period": 2, "rank_in": 8, "rank_out": 8}
PRECISIONS: dict[str, Chances] = {
    "bf16": {},
    "fp16": {"initial_scale_power": (1, [8, 30]), "loss_scale_window": (1, [2]), "hysteresis": (1, [1])},
    "torch_autocast": {"dtype": (1, ["bfloat16"])},
}
WHOLE_BACKWARDS: list[tuple[str, dict[str, Any]]]
WHOLE_BACKWARDS = [("1f1b", {}), ("gpipe", {}), ("kfkb", {"k": 2}), ("kfkb", {"k": 3}), ("eager", {"slack": 1.0})]
SPLIT_BACKWARDS: list[tuple[str, dict[str, Any]]] = [("zbh1", {}), ("zbh2", {})]
"""Schedules that an engine is given during a run, these and those above."""
ARGUMENTS: dict[str, tuple[Sequence[Any], ...]] = {
    "evaluate": (range(6), [1, 3, 4, 7, 8]),
    "predict": (range(6), [2, 4, 8]),
    "place_experts": (range(10),),
    "prepare_experts": (range(10),),
    "share_micro_batches": ([[2, 6], [4, 4], [5, 3], [7, 1], [1, 7]],),
    "run_out": ([0, 1],),
}
FROZEN, ADAPTERS = "frozen layers", "adapters"
LIGHTHOUSE = "lighthouse:1"
"""In a config, for the address of one that runs."""
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
"""Rounding stays rounding; with Adam it becomes whole steps."""
LIMIT, LIMIT_OF_ESTIMATES, LIMIT_OF_HALVES = 2e-3, 2e-2, 6e-2
"""Relative differences: in float32; of natural gradients and of what is sent in fewer bits; in half precision."""


@dataclass(frozen=True)
class Kind:
    """The features that its cases are drawn from.

    Args:
        ranks: of a case.
        keeps_shape: every resume is in the shape of the first start, and features that change numbers with the shape
            are drawn too. Otherwise a resume has any number of stages.
        treatments: what is done to models, one of them.
    """

    ranks: int
    schedules: tuple[str, ...]
    families: tuple[str, ...] = ("llama",)
    keeps_shape: bool = False
    treatments: tuple[str, ...] = ("", "", FROZEN)

    @property
    def is_late(self) -> bool:
        """Whether there is no flush at the end of a step."""
        return self.schedules == ASYNCHRONOUS


KINDS: dict[str, Kind] = {}
for _ranks in (2, 4):
    _families, _treatments = ("llama", "llama", "mixtral", "gpt2"), ("", "", FROZEN, ADAPTERS)
    KINDS[f"asynchronous {_ranks}"] = Kind(_ranks, ASYNCHRONOUS, _families, True, _treatments)
    KINDS[f"flushed {_ranks}"] = Kind(_ranks, FLUSHED, _families, True, _treatments)
    KINDS[f"any {_ranks}"] = Kind(_ranks, FLUSHED)
    KINDS[f"experts {_ranks}"] = Kind(_ranks, FLUSHED, ("mixtral",))
    KINDS[f"adapters {_ranks}"] = Kind(_ranks, FLUSHED, treatments=(ADAPTERS,))


@dataclass(frozen=True)
class Model:
    """A tiny Hugging Face model, and what is done to it."""

    family: str
    num_layers: int
    is_tied: bool = False
    treatment: str = ""


@dataclass(frozen=True)
class Operation:
    """A call of the method of :class:`~gpu.playing.Player`, or else of the engine, that has this name."""

    action: str
    values: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A sequence that all ranks play, on both sides.

    Args:
        batches: kind of :func:`~support.jobs.step_batches`.
        limit: of relative differences.
    """

    kind: str
    seed: int
    ranks: int
    model: Model
    batches: str
    operations: tuple[Operation, ...]
    limit: float


def draw(kind: str, seed: int) -> Case:
    """The case of this number, the same every time."""
    rng, traits = Random(f"{kind} {seed}"), KINDS[kind]
    family, num_layers = rng.choice(traits.families), rng.choice([4, 2 * traits.ranks])
    is_tied, treatment = rng.random() < 0.3, rng.choice(traits.treatments)
    model = Model(family, num_layers, is_tied, treatment) if family == "llama" else Model(family, num_layers)
    sequence = _Sequence(rng, traits, model)
    sequence.draw()
    limit = max(_limit(operation.values[0]) for operation in sequence.operations if operation.action == "open")
    batches = rng.choice(["padded", "packed", "ragged", "prompt"])
    return Case(kind, seed, traits.ranks, model, batches, tuple(sequence.operations), limit)


def _limit(config: dict[str, Any]) -> float:
    section = config["paceline"]
    if PRECISIONS.keys() & config.keys():
        return LIMIT_OF_HALVES
    in_fewer_bits = "boundary" in section["pipeline"] or "format" in section.get("averaging", {})
    return LIMIT_OF_ESTIMATES if in_fewer_bits or "natural_gradient" in section else LIMIT


def _some(rng: Random, **choices: tuple[float, Sequence[Any]]) -> dict[str, Any]:
    """Each key with its probability, and one of its values."""
    return {key: rng.choice(values) for key, (probability, values) in choices.items() if rng.random() < probability}


class _Shape:
    """A start: its config, and what stages can be cut into."""

    def __init__(self, rng: Random, kind: Kind, model: Model) -> None:
        self.rng, self.kind = rng, kind
        stages = rng.choice([n for n in (1, 2, 4) if n <= kind.ranks and not (kind.keeps_shape and n == 1)])
        few = () if stages > 1 else ASYNCHRONOUS
        too_many = () if 1 < stages <= model.num_layers // 2 else IN_CHUNKS
        self.schedule = rng.choice([name for name in kind.schedules if name not in (*few, *too_many)])
        self.num_cuts = stages * (2 if self.schedule in IN_CHUNKS else 1) - 1
        has_halves = model.family != "gpt2" and rng.random() < 0.3
        self.num_items = model.num_layers * (2 if has_halves else 1) + 2
        self.pipeline: dict[str, Any] = {"stages": stages, "half_layers": has_halves, "schedule": self._draw_schedule()}
        self.pipeline |= _some(
            rng,
            recompute=(0 if kind.is_late and model.family == "mixtral" else 0.3, [1, 2, "fit"]),
            compile=(0.25, [{"backend": "aot_eager"}]),
        )
        self.section: dict[str, Any] = {"pipeline": self.pipeline}
        self.config = ds_config(
            gradient_accumulation_steps=MICRO_BATCHES * stages // kind.ranks,
            optimizer=copy.deepcopy(SGD),
            gradient_clipping=rng.choice([0.0, 0.3]),
            zero_optimization={"stage": rng.choice([0, 1])},
            paceline=self.section,
        )
        if kind.ranks == 2 * stages:
            self._add_features_of_two_replicas(model)
        if kind.keeps_shape:
            self.pipeline["partition"] = self.boundaries()
            self._add_numbers()
        elif stages > 1 and rng.random() < 0.3:
            methods = ["uniform", "hetero", "parameters"]
            self.pipeline["partition"] = _some(rng, method=(1, methods), repartition_every=(1, [1, 2]))
        elif not has_halves:
            self.pipeline["partition"] = rng.choice(["uniform", "parameters", "work"])

    def boundaries(self) -> list[int]:
        return [0, *sorted(self.rng.sample(range(1, self.num_items), self.num_cuts)), self.num_items]

    def _draw_schedule(self) -> dict[str, Any]:
        is_late, in_directions = self.kind.is_late, self.schedule == "multidirection"
        chances: Chances = {
            "k": (self.schedule == "kfkb", [2, 3]),
            "retune_every": (self.schedule in ("adaptive", "generated"), [1, 2, 3]),
            "chunks": (self.schedule == "interleaved", [2]),
            "optimizer_owners": (in_directions, ["direction", "mirror"]),
            "staleness": (in_directions, [int(is_late)]),
            "correction": (0.4 * is_late, ["error_feedback", "nesterov"]),
            "warm_in_steps": (0.3 * is_late, [4]),
        }
        return {"type": self.schedule, **_some(self.rng, **chances)}

    def _add_features_of_two_replicas(self, model: Model) -> None:
        rng, keeps_shape = self.rng, self.kind.keeps_shape
        if model.family == "mixtral" and rng.random() < 0.8:
            self.config["expert_parallel"] = {"enabled": True, "autoep_size": 2}
            if rng.random() < 0.8:
                every = [0] if keeps_shape else [0, 1, 2]
                self.section["moe"] = _some(rng, rebalance_every=(1, every), replicas=(1, [0, 1, 2]))
        elif self.schedule not in (*ASYNCHRONOUS, *IN_CHUNKS):
            shares: list[dict[str, Any]] = [{"micro_batches": counts} for counts in ([2, 6], [6, 2], [5, 3])]
            by_time: list[dict[str, Any]] = [] if keeps_shape else [{}, {"reshare_every": 1}]
            self.pipeline |= _some(rng, unequal_replicas=(0.4, shares + by_time))

    def _add_numbers(self) -> None:
        """Add what changes numbers: averages, estimates, formats and precisions."""
        rng, is_late = self.rng, self.kind.is_late
        self.pipeline |= _some(rng, boundary=(0.3, FORMATS))
        if "compile" not in self.pipeline:
            self.section |= _some(rng, natural_gradient=(0.35, [ESTIMATES]), max_change=(0.25, [{}]))
        alternatives: list[Chances]
        alternatives = [{"parts": (0.8, [2])}, {"optimizer_state": (0.6, ["average", "keep", "reset"])}]
        if rng.random() < 0.45:
            self.section["averaging"] = {"lighthouse": LIGHTHOUSE, "scale_learning_rate": False} | _some(
                rng,
                every_tokens=(1, [200, 300, 500]),
                outer=(0.4, ["nesterov"]),
                format=(0.3, ["int4"]),
                combine_rounds=(0.3, [2]),
                overlap_steps=(0 if is_late else 0.3, [1]),
                decay_tokens=(0 if is_late else 0.3, [2000]),
                **rng.choice(alternatives),
            )
        self.config |= _some(rng, scheduler=(0.5, [WARM_UP]))
        precision = rng.choice([None, None, None, *PRECISIONS])
        unsupported = {"fp16": ("one_direction",), "torch_autocast": ASYNCHRONOUS}
        if precision and self.schedule not in unsupported.get(precision, ()):
            self.config |= {precision: {"enabled": True, **_some(rng, **PRECISIONS[precision])}}


class _Sequence:
    """Operations as they are drawn, one after another."""

    def __init__(self, rng: Random, kind: Kind, model: Model) -> None:
        self.rng, self.kind, self.model = rng, kind, model
        self.operations: list[Operation] = []
        self.num_saves = 0
        self.prepared: list[int] | None = None

    def draw(self) -> None:
        """One to three starts, each with one to four pieces of training and what is done before them."""
        rng = self.rng
        shape = _Shape(rng, self.kind, self.model)
        for start in range(rng.randint(1, 3)):
            tags = [self._save(wait=rng.random() < 0.6)] if start else []
            if start and not self.kind.keeps_shape:
                shape = _Shape(rng, self.kind, self.model)
            self.prepared = None
            self._add("open", copy.deepcopy(shape.config))
            if start:
                self._add("load", *rng.choice([[], tags]))
            for _ in range(rng.randint(1, 4)):
                for _ in range(rng.randint(0, 3)):
                    self._do(rng.choice(self._possible(shape)), shape)
                self._add("train", rng.randint(1, 2))

    def _possible(self, shape: _Shape) -> list[str]:
        actions = ["evaluate", "predict", "save", "reload", "rewind", "zero_grad"]
        if self.model.treatment != ADAPTERS:
            actions.append("export")
        if shape.num_cuts:
            actions += ["repartition"] if self.kind.is_late else ["repartition", "prepare_repartition"]
        if shape.schedule not in (*ASYNCHRONOUS, *IN_CHUNKS):
            actions += ["set_schedule"] * 2
        if "moe" in shape.section:
            actions += ["place_experts"] if self.kind.is_late else ["place_experts", "prepare_experts"]
        if "unequal_replicas" in shape.pipeline and not self.kind.keeps_shape:
            actions += ["share_micro_batches"] * 2
        return actions if self.kind.keeps_shape else [*actions, "run_out"]

    def _do(self, action: str, shape: _Shape) -> None:
        rng = self.rng
        if action == "save":
            self._save(wait=rng.random() < 0.5, **_some(rng, keep=(0.4, [1, 2, 3])))
        elif action == "reload":
            self._add("load", self._save(wait=True))
        elif action == "rewind":
            tag = self._save(wait=rng.random() < 0.5)
            self._add("train", rng.randint(1, 2))
            if shape.num_cuts and rng.random() < 0.4:
                self._repartition(shape, shape.boundaries())
            self._add("finish_checkpoint")
            self._add("load", tag)
        elif action == "prepare_repartition":
            self.prepared = shape.boundaries()
            self._add(action, self.prepared)
        elif action == "repartition":
            is_as_prepared = rng.random() < 0.7
            self._repartition(shape, (is_as_prepared and self.prepared) or shape.boundaries())
        elif action == "set_schedule":
            is_whole = "natural_gradient" in shape.section
            name, keys = rng.choice(WHOLE_BACKWARDS if is_whole else WHOLE_BACKWARDS + SPLIT_BACKWARDS)
            self._add(action, name, **keys)
        else:
            self._add(action, *map(rng.choice, ARGUMENTS.get(action, ())))

    def _repartition(self, shape: _Shape, boundaries: list[int]) -> None:
        self.prepared = None
        self._add("repartition", boundaries)
        if self.kind.keeps_shape:
            shape.pipeline["partition"] = boundaries

    def _save(self, **options: Any) -> str:
        self.num_saves += 1
        tag = f"save{self.num_saves}"
        self._add("save", tag, **options)
        return tag

    def _add(self, action: str, *values: Any, **options: Any) -> None:
        self.operations.append(Operation(action, values, options))
