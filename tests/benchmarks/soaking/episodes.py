"""What the episodes of a soak are: drawn from a seed, the same on every machine. Pure; nothing runs here."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

NUM_HOSTS = 4

KINDS = (
    "synchronous",
    "replicas",
    "multidirection",
    "experts",
    "one_direction",
    "natural gradient",
    "islands",
    "bf16",
    "dropout",
)
"""Each comes once in every so many episodes, in an order that is drawn anew each time."""

LONG = "long"
LONG_AT = 1
"""Number of the episode without accidents that is for leaks."""

ACCIDENTS = ("kill rank", "kill launcher", "stop rank", "stop launcher", "full disk")
SAVES = frozenset(("kill launcher", "stop rank", "stop launcher"))
"""After these the ranks save where they are, at a step at which they would not have saved otherwise."""

RATES: tuple[tuple[float | None, ...], ...] = (
    (1, 5, 25, 100),
    (5, 25, 100, 400, None),
    (25, 100, 1000, None),
)
"""Mbit/s that links change among, in one episode."""

Agreement = Literal["bitwise", "close", "bounded"]
"""With the reference: every bit of losses and checkpoint; to 1e-5; or finite, held-out loss at most 2 % above it."""

Reference = Literal["one", "same"]
"""One process without any of it; or an undisturbed run of the first shape, in which nothing adapts."""


@dataclass(frozen=True)
class Shape:
    """Of a job, from its start to an accident."""

    stages: int
    replicas: int = 1
    schedule: dict[str, Any] = field(default_factory=lambda: {"type": "1f1b"})
    partition: dict[str, Any] = field(default_factory=lambda: {"method": "uniform"})
    zero: int = 0
    experts_over: int = 1
    """Ranks that a layer's experts are spread over."""
    rebalance_every: int = 0

    @property
    def num_ranks(self) -> int:
        return self.stages * self.replicas


@dataclass(frozen=True)
class Accident:
    """What ends a job: after so many steps and ``delay_s``, or so long after its start if ``after_step`` is 0."""

    how: str
    after_step: int
    delay_s: float
    victim: int
    """Host, of those that the job has; with islands the island is ``victim`` modulo their number."""


@dataclass(frozen=True)
class Episode:
    """One job and all that happens to it. ``shapes`` has one more than there are accidents.

    Args:
        batch, samples: of a micro-batch, and of a step.
        steps: 0: until the time is up.
        islands: jobs that average; the hosts are divided among them.
        rates: Mbit/s that links change among.
        hold_s: shortest and longest time until a link changes.
        is_slowed: whether ranks are slowed down as well.
    """

    number: int
    kind: str
    shapes: tuple[Shape, ...]
    accidents: tuple[Accident, ...]
    reference: Reference
    agreement: Agreement
    family: str = "llama"
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "AdamW"
    learning_rate: float = 2e-3
    max_grad_norm: float = 0.0
    gradient_checkpointing: bool = False
    streaming: bool = False
    natural_gradient: bool = False
    bf16: bool = False
    islands: int = 1
    batch: int = 1
    samples: int = 8
    steps: int = 150
    save_steps: int = 20
    rates: tuple[float | None, ...] = RATES[1]
    hold_s: tuple[float, float] = (2.0, 8.0)
    is_slowed: bool = True

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @property
    def fills_disk(self) -> bool:
        return any(accident.how == "full disk" for accident in self.accidents)


def draw(seed: int, number: int) -> Episode:
    """The episode of that number."""
    if number == LONG_AT:
        return _long(random.Random(f"{seed} long"))
    place = number - (number > LONG_AT)
    deck = random.Random(f"{seed} deck {place // len(KINDS)}").sample(KINDS, len(KINDS))
    kind = deck[place % len(KINDS)]
    chance = random.Random(f"{seed} {number} {kind}")
    episode = _DRAWN[kind](chance, number)
    episode = replace(
        episode,
        kind=kind,
        model={"num_hidden_layers": chance.choice([4, 5, 6]), **episode.model},
        streaming=chance.random() < 0.2,
        steps=10 * chance.randint(8, 20),
        save_steps=chance.choice([5, 10, 20, 40]),
        rates=chance.choice(RATES),
        hold_s=chance.choice([(0.5, 3.0), (2.0, 8.0)]),
        is_slowed=chance.random() < 0.75,
    )
    return replace(episode, accidents=_accidents(chance, episode))


def undisturbed(episode: Episode) -> Shape:
    """Of the run that an episode with the reference "same" is compared with."""
    shape = episode.shapes[0]
    keeps = episode.kind in ("multidirection", "one_direction")
    return replace(
        shape,
        schedule=shape.schedule if keeps else {"type": "1f1b"},
        partition={"method": "uniform"},
        rebalance_every=0,
    )


def ds_config(episode: Episode, shape: Shape, lighthouse: str = "") -> dict[str, Any]:
    """The DeepSpeed JSON."""
    optimizers = {
        "AdamW": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "eps": "auto"},
        "SGD": {"lr": "auto", "momentum": 0.9},
    }
    pipeline = {"stages": shape.stages, "partition": dict(shape.partition), "schedule": dict(shape.schedule)}
    section: dict[str, Any] = {"pipeline": pipeline}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": episode.optimizer, "params": optimizers[episode.optimizer]},
        "zero_optimization": {"stage": shape.zero},
        "paceline": section,
    }
    if episode.bf16:
        config["bf16"] = {"enabled": True}
    if episode.natural_gradient:
        section["natural_gradient"] = {"alpha": 1.0}
    if shape.experts_over > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": shape.experts_over}
        section["moe"] = {"rebalance_every": shape.rebalance_every}
    if episode.islands > 1:
        section["averaging"] = {
            "lighthouse": lighthouse,
            "islands": episode.islands,
            "every_tokens": 20 * episode.samples * BLOCK,
            "timeout_s": 120,
        }
    return config


BLOCK = 32
"""Tokens of a sample."""


def overrides(episode: Episode) -> str:
    """--config_overrides of the model."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": BLOCK,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
    }
    if episode.family == "mixtral":
        sizes |= {"intermediate_size": 64, "num_local_experts": 4, "output_router_logits": False}
    return ",".join(f"{key}={value}" for key, value in {**sizes, **episode.model}.items())


# -- each kind -------------------------------------------------------------------------------------------------------


def _schedule(chance: random.Random) -> dict[str, Any]:
    return chance.choice(
        [
            {"type": "1f1b"},
            {"type": "kfkb", "k": chance.choice([2, 3, 4])},
            {"type": "eager", "slack": chance.choice([0.5, 1, 2])},
            {"type": "adaptive", "retune_every": chance.choice([5, 10, 20])},
            {"type": "adaptive", "retune_every": chance.choice([5, 10, 20])},
        ]
    )


def _partition(chance: random.Random) -> dict[str, Any]:
    every = chance.choice([5, 10, 20])
    return chance.choice(
        [
            {"method": "uniform"},
            {"method": "parameters"},
            {"method": "uniform", "repartition_every": every},
            {"method": "hetero", "repartition_every": every},
        ]
    )


def _pipeline(chance: random.Random) -> Shape:
    """One replica: every such shape has the same numbers in every bit."""
    return Shape(chance.choice([2, 3, 4, 4]), 1, _schedule(chance), _partition(chance), chance.choice([0, 1]))


def _shapes(chance: random.Random, first: Shape, *others: Shape) -> tuple[Shape, ...]:
    """Of a job with one to three accidents."""
    return (first, *(chance.choice([first, *others]) for _ in range(chance.choice([1, 1, 2, 3]))))


def _synchronous(chance: random.Random, number: int) -> Episode:
    shapes = _shapes(chance, _pipeline(chance), *(_pipeline(chance) for _ in range(3)))
    recomputes = chance.random() < 0.3
    return Episode(number, "", shapes, (), "one", "bitwise", gradient_checkpointing=recomputes)


def _replicas(chance: random.Random, number: int) -> Episode:
    first = Shape(2, 2, _schedule(chance), _partition(chance), chance.choice([0, 1]))
    if chance.random() < 0.5:  # the same number of replicas throughout
        second = replace(first, schedule=_schedule(chance), partition=_partition(chance), zero=1 - first.zero)
        return Episode(number, "", _shapes(chance, first, second), (), "same", "bitwise", samples=16, batch=2)
    shapes = _shapes(chance, first, _pipeline(chance), Shape(1, 4, zero=1))
    rest = {
        "optimizer": "SGD",
        "learning_rate": 0.05,
        "samples": 16,
        "batch": 2,
        "max_grad_norm": chance.choice([0.0, 1.0]),
    }
    return Episode(number, "", shapes, (), "one", "close", **rest)


def _experts(chance: random.Random, number: int) -> Episode:
    first = Shape(2, 2, _schedule(chance), zero=chance.choice([0, 1]), experts_over=2, rebalance_every=5)
    second = replace(first, schedule=_schedule(chance), zero=1 - first.zero)
    return Episode(
        number, "", _shapes(chance, first, second), (), "same", "bitwise", family="mixtral", samples=16, batch=2
    )


def _multidirection(chance: random.Random, number: int) -> Episode:
    owners = chance.choice(["direction", "mirror"])
    schedule = {"type": "multidirection", "optimizer_owners": owners, **_corrections(chance)}
    return _asynchronous(chance, number, Shape(chance.choice([2, 4, 4]), 1, schedule))


def _one_direction(chance: random.Random, number: int) -> Episode:
    schedule = {"type": "one_direction", **_corrections(chance)}
    return _asynchronous(chance, number, Shape(chance.choice([2, 3, 4]), 1, schedule, zero=chance.choice([0, 1])))


def _corrections(chance: random.Random) -> dict[str, Any]:
    return chance.choice([{}, {"correction": "error_feedback"}, {"correction": "nesterov"}, {"warm_in_steps": 10}])


def _asynchronous(chance: random.Random, number: int, first: Shape) -> Episode:
    if chance.random() < 0.5:  # it saves when the reference does, and so does the same in every bit
        return Episode(number, "", _shapes(chance, first), (), "same", "bitwise")
    shapes = _shapes(chance, first, first, _pipeline(chance))
    return Episode(number, "", shapes, (), "one", "bounded", learning_rate=5e-4)


def _natural(chance: random.Random, number: int) -> Episode:
    shapes = _shapes(chance, _pipeline(chance), _pipeline(chance))
    rest = {"optimizer": "SGD", "learning_rate": 0.2, "natural_gradient": True}
    return Episode(number, "", shapes, (), "one", "bitwise", **rest)


def _islands(chance: random.Random, number: int) -> Episode:
    islands = chance.choice([2, 2, 4])
    of_two = [Shape(2), Shape(1, 2, zero=1), Shape(2, schedule=_schedule(chance))]
    first = chance.choice(of_two) if islands == 2 else Shape(1)
    return Episode(number, "", _shapes(chance, first), (), "same", "bounded", islands=islands)


def _bf16(chance: random.Random, number: int) -> Episode:
    first = chance.choice([_pipeline(chance), Shape(2, 2, _schedule(chance), zero=1)])
    shapes = _shapes(chance, first, _pipeline(chance), Shape(2, 2, zero=1))
    return Episode(number, "", shapes, (), "one", "bounded", bf16=True, samples=16, batch=2, max_grad_norm=1.0)


def _dropout(chance: random.Random, number: int) -> Episode:
    """Random numbers are the ranks' own: the reference has the same shape, and no layer moves."""
    first = Shape(chance.choice([2, 4]), 1, chance.choice([{"type": "1f1b"}, {"type": "kfkb", "k": 2}]))
    if first.stages == 2:
        first = replace(first, replicas=2, zero=chance.choice([0, 1]))
    rest = {"model": {"attention_dropout": 0.1}, "max_grad_norm": 1.0, "samples": 16, "batch": 2}
    return Episode(number, "", _shapes(chance, first), (), "same", "bitwise", **rest)


def _long(chance: random.Random) -> Episode:
    """One set of processes, in which everything adapts all the time."""
    schedule = {"type": "adaptive", "retune_every": 10}
    shape = Shape(NUM_HOSTS, 1, schedule, {"method": "hetero", "repartition_every": 10})
    rest = {"steps": 0, "save_steps": 20, "rates": RATES[1], "hold_s": (4.0, 20.0)}
    model = {"num_hidden_layers": 8}
    return Episode(LONG_AT, LONG, (shape,), (), "one", "bitwise", model=model, samples=chance.choice([8, 16]), **rest)


_DRAWN = {
    "synchronous": _synchronous,
    "replicas": _replicas,
    "multidirection": _multidirection,
    "experts": _experts,
    "one_direction": _one_direction,
    "natural gradient": _natural,
    "islands": _islands,
    "bf16": _bf16,
    "dropout": _dropout,
}


def _accidents(chance: random.Random, episode: Episode) -> tuple[Accident, ...]:
    """Between two shapes each. Those that move the saves are not for jobs that say they save as the reference does."""
    allowed = [how for how in ACCIDENTS if not (how in SAVES and is_flushed_by_saves(episode))]
    if episode.islands > 1:
        allowed.remove("full disk")  # which is the whole machine's
    number = len(episode.shapes) - 1
    steps = sorted(chance.sample(range(episode.steps // 20, episode.steps * 17 // 20), number))
    found = []
    for step in steps:
        starts = chance.random() < 0.1
        delay_s = chance.uniform(3.0, 20.0) if starts else chance.uniform(0.0, 1.0)
        how = chance.choice([one for one in allowed if not (starts and one == "full disk")])
        found.append(Accident(how, 0 if starts else step, round(delay_s, 2), chance.randrange(NUM_HOSTS)))
    return tuple(found)


def is_flushed_by_saves(episode: Episode) -> bool:
    """Whether another step to save at would be another run: steps under way are finished first."""
    return episode.kind in ("multidirection", "one_direction") and episode.agreement == "bitwise"
