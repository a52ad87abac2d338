"""Split backwards of Hugging Face models: no number depends on when gradients of weights are computed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from paceline.hf import cross_entropy
from support.jobs import ds_config, model_config, step_batches
from support.ranks import OneAfterAnother, on, run_ranks
from support.small_layers import layers, loss_of

STEPS, MICRO_BATCHES = 2, 6
PIECE_BYTES = cross_entropy.PIECE_BYTES


def late(schedule: Any, count: int) -> Any:
    """``schedule`` with split backwards, whose weights come ``count`` backwards later."""
    from paceline.schedules import Schedule
    from paceline.schedules.schedule import BACKWARD, backward_input, backward_weight

    orders = []
    for order in schedule.orders:
        left, found = deque[Any](), []
        for action in order:
            if action.kind != BACKWARD:
                found.append(action)
                continue
            found.append(backward_input(action.micro_batch, action.chunk))
            left.append(backward_weight(action.micro_batch, action.chunk))
            if len(left) > count:
                found.append(left.popleft())
        orders.append((*found, *left))
    name = f"{schedule.name}, weights {count} later"
    return Schedule(tuple(orders), schedule.num_micro_batches, schedule.num_chunks, name, schedule.routes)


@dataclass(frozen=True)
class Case:
    """How a model is trained, but for when gradients of weights are computed."""

    stages: int = 2
    replicas: int = 1
    family: str = "llama"
    data: str = "padded"
    kind: str = "1f1b"
    zero: int = 0
    bucket: int | None = None
    """Elements of a bucket of gradients."""
    overlap: bool = True
    order: str | None = None
    recompute: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    prepare: str = ""
    steps: int = STEPS

    def config(self, kind: Any = None) -> dict[str, Any]:
        return ds_config(
            gradient_accumulation_steps=MICRO_BATCHES // self.replicas,
            zero_optimization={
                "stage": self.zero,
                "overlap_comm": self.overlap,
                **({} if self.bucket is None else {"reduce_bucket_size": self.bucket}),
            },
            pipeline={"activation_checkpoint_interval": int(self.recompute)},
            paceline={"pipeline": {"stages": self.stages, "schedule": kind or self.kind}, **self.section},
            **self.options,
        )


def prepared(case: Case) -> Any:
    from transformers import AutoModelForCausalLM

    config = model_config(case.family, **{"tie_word_embeddings": False, **case.changes})
    cross_entropy.PIECE_BYTES = 1 << 10 if case.prepare == "pieces" else PIECE_BYTES
    if case.prepare not in ("frozen", "frozen head", "lora", "lora, head"):
        return config
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    if case.prepare == "frozen":
        model.model.layers[0].requires_grad_(False)
        return model
    if case.prepare == "frozen head":
        model.lm_head.requires_grad_(False)
        return model
    from peft import LoraConfig, get_peft_model

    whole = ["lm_head"] if "head" in case.prepare else None
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, modules_to_save=whole)
    return get_peft_model(model, lora)


def smoothed(stage: Any, logits: Any, batch: Any, routing: Any, *, num_items: int, **shares: Any) -> Any:
    """A loss of one's own."""
    logs = logits[:, :-1].float().log_softmax(-1)
    labels = batch["labels"][:, 1:]
    of_labels = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -((0.9 * of_labels + 0.1 * logs.mean(-1)) * (labels != -100)).sum() / num_items


def train(case: Case, count: int | None, kind: Any = None) -> dict[str, Any]:
    import paceline
    from paceline.runtime.engine import PacelineEngine

    PacelineEngine.transport_order = case.order
    torch.manual_seed(3)
    engine, *_ = paceline.initialize(model=prepared(case), config=case.config(kind))
    if count is not None:
        engine.set_schedule(late(engine.schedule, count))
    if case.prepare == "own loss":
        engine.own_loss = smoothed
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    found: dict[str, Any] = {"losses": [], "norms": []}
    found["orders"] = []
    for step in range(case.steps):
        found["losses"].append(
            engine.train_batch(iter(step_batches(step, case.data)[replica:MICRO_BATCHES:replicas])).item()
        )
        found["norms"].append(engine.grad_norm())
        found["orders"].append(engine.schedule.name)
    found["evaluated"] = engine.evaluate(step_batches(7, case.data)[:5])
    found["weights"] = {engine.module.state_name(n): p.detach().clone() for n, p in engine.module.named_parameters()}
    found["ran"] = engine.schedule.name
    found["heads"] = [
        getattr(module, "deferral", None) is not None
        for name, module in engine.module.named_modules()
        if "lm_head" in name and getattr(module, "out_features", 0) >= 97
    ]
    engine.destroy()
    return found


def whole_and_split(case: Case, count: int) -> list[dict[str, Any]]:
    return [train(case, None), train(case, count)]


TIED = {"tie_word_embeddings": True}
BF16 = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
EXPERT_PARALLEL = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
NATURAL = {"natural_gradient": {"rank_in": 8, "rank_out": 8}}
CASES = {
    "three stages, paired, clipping": (Case(stages=3, order="paired", options={"gradient_clipping": 0.05}), 2),
    "recomputed, all at the end": (Case(recompute=True), MICRO_BATCHES),
    "gpt2, interleaved": (Case(kind="interleaved", family="gpt2"), 3),
    "experts, recomputed": (Case(family="mixtral", recompute=True), 2),
    "experts on two ranks": (Case(replicas=2, family="mixtral", options={"expert_parallel": EXPERT_PARALLEL}), 2),
    "bf16, frozen layer": (Case(prepare="frozen", options=BF16), 2),
    "autocast, frozen head": (Case(prepare="frozen head", options=AUTOCAST), 2),
    "LoRA with a whole head": (Case(prepare="lora, head"), 2),
    "tied, on one rank": (Case(stages=1, changes=TIED), 2),
    "tied, on one rank of two": (Case(kind="dualpipev", changes=TIED), 3),
    "tied, natural gradients": (Case(changes=TIED, section=NATURAL), 2),
    "loss in pieces, packed": (Case(prepare="pieces", data="packed"), 2),
    "loss of one's own, ragged": (Case(prepare="own loss", data="ragged"), 2),
}


WHOLE_AND_SPLIT = OneAfterAnother(
    whole_and_split, {name: on(case.stages * case.replicas, case, count) for name, (case, count) in CASES.items()}
)


@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_as_with_whole_backwards(name: str) -> None:
    count = CASES[name][1]
    for whole, split in WHOLE_AND_SPLIT[name]:
        assert split["losses"] == whole["losses"]
        assert split["norms"] == whole["norms"]
        assert split["evaluated"] == whole["evaluated"]
        assert f"weights {count} later" in split["ran"]
        assert split["weights"].keys() == whole["weights"].keys()
        for key, weight in whole["weights"].items():
            assert torch.equal(split["weights"][key], weight), key


HEADS = {
    "untied": (Case(), True),
    "tied": (Case(changes=TIED), True),
    "tied, on one rank": (Case(stages=1, changes=TIED), False),
    "tied, on one rank of two": (Case(kind="zbv", changes=TIED), False),
    "frozen head": (Case(prepare="frozen head"), False),
    "wide": (Case(changes={"vocab_size": 5000}), False),
}


OF_ONE_STEP = OneAfterAnother(
    train,
    {
        name: on(case.stages, replace(case, steps=1), 2 if case.kind == "1f1b" else None)
        for name, (case, _) in HEADS.items()
    },
)


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_left_for_later(name: str) -> None:
    case, is_left = HEADS[name]
    found = OF_ONE_STEP[name]
    heads = found[0 if case.kind == "zbv" else -1]["heads"]
    assert heads == [is_left]


def moves(count: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Layers go to the other stage after the first step, and leave gradients of their weights for later there too."""
    import paceline

    case = Case()
    engine, *_ = paceline.initialize(model=prepared(case), config=case.config())
    if count is not None:
        engine.set_schedule(late(engine.schedule, count))
    losses = []
    for step, parts in enumerate([[0, 2, 6], [0, 4, 6], [0, 3, 6]]):
        losses.append(engine.train_batch(iter(step_batches(step)[:MICRO_BATCHES])).item())
        engine.repartition(parts)
    losses.append(engine.train_batch(iter(step_batches(3)[:MICRO_BATCHES])).item())
    weights = {engine.module.state_name(n): p.detach().clone() for n, p in engine.module.named_parameters()}
    found = losses, weights
    engine.destroy()
    return found


def moves_both_ways() -> list[Any]:
    return [moves(None), moves(3)]


def test_layers_that_move_are_split_where_they_come() -> None:
    for (losses, weights), (own_losses, own_weights) in run_ranks(moves_both_ways, 2):
        assert losses == own_losses
        assert all(torch.equal(weight, own_weights[name]) for name, weight in weights.items())


FAMILIES = ["zbh1", "zbh2", "zbv", "vhalf", "vmin"]
SETTINGS = {
    "two stages": (Case(), FAMILIES),
    "three stages, paired": (Case(stages=3, order="paired", changes={"num_hidden_layers": 6}), ["zbh2", "vmin"]),
    "replicas, ZeRO 1": (Case(replicas=2, zero=1), ["zbv"]),
    "experts with router loss": (Case(family="mixtral"), ["zbh1", "zbv"]),
    "LoRA": (Case(prepare="lora"), ["zbh1", "zbv"]),
}


OF_FAMILIES = {
    setting: OneAfterAnother(
        train, {kind: on(case.stages * case.replicas, case, None, kind) for kind in ("1f1b", *kinds)}
    )
    for setting, (case, kinds) in SETTINGS.items()
}


@pytest.mark.parametrize(("setting", "kind"), [(name, kind) for name, (_, kinds) in SETTINGS.items() for kind in kinds])
def test_families_give_every_bit_of_1f1b(setting: str, kind: str) -> None:
    ranks = list(zip(OF_FAMILIES[setting]["1f1b"], OF_FAMILIES[setting][kind], strict=True))
    whole = {name: weight for found, _ in ranks for name, weight in found["weights"].items()}
    split = {name: weight for _, found in ranks for name, weight in found["weights"].items()}
    for plain, ours in ranks:
        assert ours["ran"] == kind
        assert ours["losses"] == plain["losses"]
        assert ours["evaluated"] == plain["evaluated"]
    assert split.keys() == whole.keys()
    for name, weight in whole.items():
        assert torch.equal(split[name], weight), name


TUNED = {
    "adaptive, two stages a rank": {"type": "adaptive", "retune_every": 2, "chunks": 2},
    "generated": {"type": "generated", "retune_every": 2, "chunks": 1},
}


CHOSEN_IN_A_RUN = OneAfterAnother(
    train,
    {
        name: on(2, Case(steps=9, changes={"num_hidden_layers": 6}), None, kind)
        for name, kind in {"1f1b": "1f1b", **TUNED}.items()
    },
)


@pytest.mark.parametrize("name", TUNED)
def test_orders_that_are_chosen_as_the_run_goes_give_every_bit_of_1f1b(name: str) -> None:
    """Both parts of backwards are timed before the first choice, whatever runs then."""
    ranks = list(zip(CHOSEN_IN_A_RUN["1f1b"], CHOSEN_IN_A_RUN[name], strict=True))
    whole = {name: weight for found, _ in ranks for name, weight in found["weights"].items()}
    split = {name: weight for _, found in ranks for name, weight in found["weights"].items()}
    for plain, ours in ranks:
        assert any("zb" in order for order in ours["orders"])
        assert ours["losses"] == plain["losses"]
        assert ours["evaluated"] == plain["evaluated"]
    assert split.keys() == whole.keys()
    for key, weight in whole.items():
        assert torch.equal(split[key], weight), key


def reductions(case: Case) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A run, one whose gradients are reduced after the computations, and where each bucket of the first was reduced."""
    from paceline.optim.buckets import Buffers
    from paceline.optim.gradient_buckets import GradientBuckets
    from paceline.runtime.stage_runner import StageRunner

    beside, places = ["the end"], list[str]()
    start, backward_weight, reduced = Buffers.start_reduction, StageRunner.backward_weight, GradientBuckets.reduced

    def watched_start(self: Any, *args: Any) -> None:
        places.append(beside[0])
        start(self, *args)

    def watched_weight(self: Any, *args: Any) -> None:
        beside[0] = "W"
        backward_weight(self, *args)
        beside[0] = "the end"

    def watched_reduced(self: Any) -> Any:
        found = reduced(self)
        places.append("step")
        return found

    Buffers.start_reduction, StageRunner.backward_weight = watched_start, watched_weight  # type: ignore[method-assign]
    GradientBuckets.reduced = watched_reduced  # type: ignore[method-assign]
    early, where = train(case, None), list(places)
    Buffers.start_reduction, StageRunner.backward_weight = start, backward_weight  # type: ignore[method-assign]
    GradientBuckets.reduced = reduced  # type: ignore[method-assign]
    late = replace(case, overlap=False)
    return early, train(late, None), where


EARLY = {
    "zbh1": Case(kind="zbh1", replicas=2),
    "zbh1, tied, paired": Case(kind="zbh1", replicas=2, zero=1, order="paired", changes=TIED),
    "zbh1, tied, one stage": Case(stages=1, kind="zbh1", replicas=2, changes=TIED),
    "zbh1, experts on two ranks": Case(
        stages=1, kind="zbh1", replicas=2, zero=1, family="mixtral", options={"expert_parallel": EXPERT_PARALLEL}
    ),
    "zbh2, bf16": Case(stages=1, kind="zbh2", replicas=2, zero=1, options=BF16),
    "zbh1, LoRA, recomputed": Case(stages=1, kind="zbh1", replicas=2, zero=1, prepare="lora", recompute=True),
    "zbv, tied": Case(kind="zbv", replicas=2, zero=1, changes=TIED),
}


REDUCTIONS = OneAfterAnother(
    reductions,
    {name: on(case.stages * case.replicas, replace(case, bucket=500)) for name, case in EARLY.items()},
)


@pytest.mark.parametrize("name", EARLY)
def test_gradients_are_reduced_beside_the_last_backward_of_weights(name: str) -> None:
    for early, late, places in REDUCTIONS[name]:
        first, second, *_ = _steps(places)
        assert "W" not in first, "it is not known yet whose gradients are left for later"
        assert "W" in second
        for key in ("losses", "norms", "evaluated"):
            assert early[key] == late[key]
        for key, weight in late["weights"].items():
            assert torch.equal(early["weights"][key], weight), key


def _steps(places: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for place in places:
        if place == "step":
            found.append([])
        else:
            found[-1].append(place)
    return found


def own_layers(kind: str, interval: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A ``PipelineModule`` of one's own, which DeepSpeed may recompute (reentrant)."""
    import deepspeed

    import paceline
    from paceline.schedules.families import IN_V, v_route

    deepspeed.init_distributed("gloo")
    torch.manual_seed(3)
    stages = 2
    routes = [v_route(stages)] if kind in IN_V else None
    model = paceline.PipelineModule(
        layers("tied"), num_stages=stages, loss_fn=loss_of, seed_layers=True, routes=routes, partition_method="uniform"
    )
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES,
        pipeline={"activation_checkpoint_interval": interval},
        paceline={"pipeline": {"stages": stages, "schedule": kind}},
    )
    engine, *_ = paceline.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(0, 17, (2, MICRO_BATCHES, 2, 5), generator=generator)
        losses.append(engine.train_batch(iter(list(zip(*ids, strict=True)))).item())
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    ran = engine.schedule.is_split == (kind != "1f1b")
    engine.destroy()
    assert ran
    return losses, weights


OWN_LAYERS = OneAfterAnother(
    own_layers, {(kind, interval): on(2, kind, interval) for kind in ("1f1b", "zbh1", "zbv") for interval in (0, 1)}
)


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("kind", ["zbh1", "zbv"])
def test_layers_of_ones_own(kind: str, interval: int) -> None:
    """The tied embedding's gradient is a sum in another order where one rank has both ends."""
    ranks = list(zip(OWN_LAYERS["1f1b", interval], OWN_LAYERS[kind, interval], strict=True))
    whole = {name: weight for (_, weights), _ in ranks for name, weight in weights.items()}
    split = {name: weight for _, (_, weights) in ranks for name, weight in weights.items()}
    for (losses, _), (own_losses, _) in ranks:
        assert own_losses == pytest.approx(losses, rel=1e-6)
        assert kind != "zbh1" or own_losses == losses
    assert split.keys() == whole.keys()
    for name, weight in whole.items():
        if kind == "zbh1":
            assert torch.equal(split[name], weight), name
        else:
            torch.testing.assert_close(split[name], weight, rtol=1e-5, atol=1e-6)


def kept(names: list[str]) -> list[Any]:
    """By contestant, what this rank has kept in a step, counted by what was alive; and what the proofs say of it."""
    import deepspeed

    from lab.contestants import make
    from lab.emulation import Emulation
    from lab.kept import KEEPING

    deepspeed.init_distributed("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    emulation = Emulation.of(ranks, [0.001], [0.002], 256, MICRO_BATCHES)
    found = []
    for name in names:
        step = make(name, emulation)
        (of_rank,) = step()["verified"][rank : rank + 1]
        KEEPING.forget()
        step()
        found.append((tuple(KEEPING.peaks), tuple(of_rank)))
    return found


def test_as_much_is_alive_as_the_proof_says() -> None:
    names = ["1f1b", *FAMILIES, "our-dualpipev-split"]
    for found in run_ranks(kept, 3, names):
        for name, (alive, verified) in zip(names, found, strict=True):
            assert alive == verified, name
