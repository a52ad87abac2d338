"""Layers that move between stages change no number: losses, weights and states are those of a run without."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.jobs import ds_config, model_config, step_batches
from support.ranks import run_ranks

LAYERS, STEPS = 6, 6
MICRO_BATCHES = 4
"""Of a step, over all replicas together."""
ITEMS = LAYERS + 2
WIDTH, VOCABULARY = 8, 17

LET_GO_S = 120.0
"""For threads, on a machine that is busy."""

Moves = Mapping[int, Sequence[Sequence[int]]]
"""Partitions to take on before a step, one after the other."""


def random_moves(seed: int, stages: int, items: int) -> Moves:
    """Among them one before the first step, two without a step in between, and one that moves all that can move."""
    chance = random.Random(seed)

    def cut() -> list[int]:
        return [0, *sorted(chance.sample(range(1, items), stages - 1)), items]

    ends = [[*range(stages), items], [0, *range(items - stages + 1, items + 1)]]
    return {0: [cut()], 1: [cut()], 2: ends, 4: [cut(), cut()], 5: [cut()]}


# -- what is trained ---------------------------------------------------------------------------------------------------


class Engineer:
    """Makes the same engine again and again, and its data."""

    def __init__(self, stages: int, zero: int = 0, clipping: float = 0.0, **options: Any) -> None:
        self.stages, self.options = stages, options
        self.replicas = int(os.environ["WORLD_SIZE"]) // stages
        self.config = ds_config(
            gradient_accumulation_steps=MICRO_BATCHES // self.replicas,
            gradient_clipping=clipping,
            zero_optimization={"stage": zero, "reduce_bucket_size": 3000},
            paceline={
                "pipeline": {
                    "stages": stages,
                    "partition": options.get("partition", "uniform"),
                    "half_layers": options.get("halves", False),
                }
            },
            pipeline={"activation_checkpoint_interval": options.get("interval", 0)},
            **options.get("more", {}),
        )
        for name in options.get("without", ()):
            del self.config[name]

    def engine(self) -> Any:
        import paceline

        torch.manual_seed(3)
        arguments: dict[str, Any] = {"optimizer": by_decay} if self.options.get("groups") else {}
        if self.options.get("numbers"):
            arguments = {"optimizer": lambda parameters: WithNumbers(list(parameters), {"lr": 1e-2})}
        return paceline.initialize(model=self.model(), config=self.config, **arguments)[0]

    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        config = model_config(
            self.options.get("family", "llama"), num_hidden_layers=LAYERS, **self.options.get("changes", {})
        )
        if not self.options.get("frozen"):
            return config
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if ".layers.2." in name or ".layers.3." in name or name.endswith("q_proj.weight"):
                parameter.requires_grad_(False)
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Tanh()  # which its config does not say
            layer.register_forward_hook(Watching().see)
        return model

    def batches(self, engine: Any, step: int) -> Any:
        return iter(step_batches(step)[:MICRO_BATCHES][engine.grid.data_parallel_id :: self.replicas])


class Watching:
    """Has a hook, and cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def see(self, *_: Any) -> None:
        assert not self.lock.locked()


def by_decay(parameters: Any) -> torch.optim.Optimizer:
    """Two groups on every stage, of other weight decay and learning rate."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1, "lr": 2e-3},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 5e-4},
        ]
    )


class WithNumbers(torch.optim.Optimizer):
    """Keeps numbers of Python's: as tensors their powers would be other ones."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "rate": 1 / 3, "mean": torch.zeros_like(parameter)}
                state["step"] += 1
                state["rate"] *= 0.9
                state["mean"].lerp_(parameter.grad, 0.1)
                assert (type(state["step"]), type(state["rate"])) == (int, float), state
                correction = 1 - 0.9 ** state["step"]
                parameter.sub_(state["mean"], alpha=group["lr"] * state["rate"] / correction)


class Wide(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Norm(nn.Module):
    """Keeps running figures, of which one is not part of a checkpoint, and one is a count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("most", torch.zeros(()), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.mean.lerp_(x.flatten(0, -2).mean(0).to(self.mean.dtype), 0.1)
                self.most.copy_(self.most + x.abs().max())
                self.seen += 1
        return ((x - self.mean) / (1 + self.most)).to(x.dtype)


class Scale(nn.Module):
    """A parameter of one row, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.by, self.idle = nn.Parameter(torch.tensor([1.5])), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def embed(module: nn.Embedding, x: Tensor) -> Tensor:
    return nn.functional.embedding(x, module.weight)


def by_weight(module: nn.Embedding, x: Tensor) -> Tensor:
    return x @ module.weight.t()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


PLAIN_ITEMS = 10


class PlainEngineer(Engineer):
    """Of every kind of layer that a ``PipelineModule`` takes; no two boundaries are alike."""

    def engine(self) -> Any:
        import paceline

        module = self.model()
        parameters = [p for p in module.parameters() if p.requires_grad]
        arguments: dict[str, Any] = {"model_parameters": parameters}
        if self.options.get("groups"):  # an optimizer that the caller has made
            arguments |= {
                "optimizer": by_decay(parameters),
                "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
            }
        return paceline.initialize(model=module, config=self.config, **arguments)[0]

    def model(self) -> Any:
        from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
        from deepspeed.runtime.pipe.topology import ProcessTopology

        torch.manual_seed(3)
        is_reversed = self.options.get("data outermost")
        topology = ProcessTopology(["data", "pipe"], [self.replicas, self.stages]) if is_reversed else None
        return PipelineModule(
            layers=[
                TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=embed),
                LayerSpec(Wide, WIDTH, 12),
                Norm(12),
                torch.tanh,
                Wide(12, 6),
                LayerSpec(Norm, 6),
                lambda x: 2 * x,
                LayerSpec(Wide, 6, WIDTH),
                Scale(),
                TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=by_weight),
            ],
            num_stages=None if is_reversed else self.stages,
            topology=topology,
            loss_fn=loss_of,
            partition_method="uniform",
            activation_checkpoint_interval=self.options.get("interval", 0),
        )

    def batches(self, engine: Any, step: int) -> Any:
        generator = torch.Generator().manual_seed(100 * step + engine.grid.data_parallel_id)
        shape = (MICRO_BATCHES // self.replicas, 2, 2, 5)
        return iter([tuple(pair) for pair in torch.randint(0, VOCABULARY, shape, generator=generator)])


# -- what is compared --------------------------------------------------------------------------------------------------


def whole_state(engine: Any) -> dict[tuple[str, str], Tensor]:
    """All tensors of the job, on every rank: parameters, masters, states, buffers of each replica."""
    from paceline.state.named import parts_of

    own: list[tuple[str, str, int, Tensor]] = []
    name_of = getattr(engine.module, "state_name", str)
    replica = engine.grid.data_parallel_id
    for name, parameter in engine.module.named_parameters():
        own.append((name_of(name), f"value of {replica}", 0, parameter.detach().clone()))
    for name, buffer in engine.module.named_buffers():
        own.append((name_of(name), f"buffer of {replica}", 0, buffer.clone()))
    for owned in engine.optimizer.owned:
        for kind, tensor in parts_of(engine.optimizer, owned).items():
            is_cut = tensor.dim() and tensor.shape == owned.master.shape
            own.append((owned.name, kind, owned.start if is_cut else 0, tensor.clone()))
    rows: dict[tuple[str, str], dict[int, Tensor]] = {}
    for told in engine.control.gather(own):
        for name, kind, start, tensor in told:
            rows.setdefault((name, kind), {})[start] = tensor
    return {
        key: torch.cat([found[start] for start in sorted(found)]) if len(found) > 1 else found[0]
        for key, found in rows.items()
    }


def differences(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor], relative: float = 0.0) -> list[str]:
    found = [f"{key}: only one has it" for key in one.keys() ^ other.keys()]
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        same = torch.allclose(a, b, rtol=relative, atol=relative) if relative else torch.equal(a, b)
        if a.dtype != b.dtype or a.shape != b.shape or not same:
            found.append(f"{key}: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}")
    return sorted(found)


def train(engineer: Engineer, moves: Moves, steps: int = STEPS, schedules: Mapping[int, str] | None = None) -> Any:
    """Losses, rates, evaluations and all tensors of a run; the bytes that moved."""
    from paceline.runtime import migration
    from paceline.schedules import families

    engine = engineer.engine()
    losses: list[float] = []
    num_bytes = 0
    is_ahead = engineer.options.get("ahead")
    migration.LEAST_BYTES = 1
    for step in range(steps):
        if step in (schedules or {}):
            kind, *options = schedules[step].split()
            chosen = {name: int(value) for name, value in (option.split("=") for option in options)}
            engine.set_schedule(families.make(kind, engineer.stages, engine.micro_batches, **chosen))
        for parts in moves.get(step, ()):
            figures = engine.repartition(parts)
            assert engine.module.parts == list(parts), engine.module.parts
            num_bytes += figures["bytes"] if figures else 0
        if is_ahead and (coming := moves.get(step + 1)):
            engine.prepare_repartition(coming[0] if step != 3 else coming[-1])  # once for another move than comes
        if is_ahead and step == 1:
            while not engine.repartition_is_prepared():  # what is sent is what was there before
                pass
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(1.0 if parameter.requires_grad else 1.5)
        losses += [engine.train_batch(engineer.batches(engine, step)).item(), *engine.get_lr()]
    if engineer.options.get("interval") and type(engineer) is Engineer and not engineer.options.get("halves"):
        layers = [engine.layers.get(item) for item in engine.layers.here]
        assert all(layer.gradient_checkpointing for layer in layers if layer is not None), "activations are kept"
    losses.append(engine.eval_batch(engineer.batches(engine, 99)).item())
    state = whole_state(engine)
    engine.destroy()
    return losses, state, num_bytes


def compare(plain: bool, cases: Sequence[tuple[str, dict[str, Any], Moves]], relative: float = 0.0) -> dict[str, Any]:
    """What differs, by case: nothing."""
    import deepspeed

    from paceline.runtime.engine import PacelineEngine

    deepspeed.init_distributed()
    found: dict[str, Any] = {}
    for name, options, moves in cases:
        PacelineEngine.transport_order = options.pop("order", None)
        schedules = options.pop("schedules", None)
        engineer = (PlainEngineer if plain else Engineer)(**options)
        losses, state, _ = train(engineer, {}, schedules=schedules)
        moved_losses, moved_state, num_bytes = train(engineer, moves, schedules=schedules)
        odd = differences(state, moved_state, relative)
        if losses != (pytest.approx(moved_losses, rel=relative) if relative else moved_losses):
            odd.append(f"losses {losses}, {moved_losses}")
        if not num_bytes:
            odd.append("nothing has moved")
        found[name] = odd
    return found


Case = tuple[str, dict[str, Any], Moves]


def case(name: str, stages: int = 2, *, seed: int = 0, items: int = ITEMS, **options: Any) -> Case:
    return name, {"stages": stages, **options}, random_moves(seed, stages, items)


def of_optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-2, **params}}}


UNTIED = {"tie_word_embeddings": False}
BF16 = {"bf16": {"enabled": True}}
WARM_UP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
OWN: dict[str, Any] = {"frozen": True, "groups": True, "without": ["optimizer"]}
MODELS: dict[int, list[Case]] = {
    2: [
        case("momentum, bf16, warm-up", seed=3, more={**of_optimizer("SGD", momentum=0.9), **BF16, **WARM_UP}),
        case("Adagrad, gpt2, recomputing", seed=4, family="gpt2", interval=1, more=of_optimizer("Adagrad")),
        case(
            "Adafactor, schedules",
            seed=11,
            more=of_optimizer("Adafactor"),
            schedules={0: "kfkb k=2", 2: "eager slack=1", 3: "gpipe", 4: "1f1b"},
        ),
        case("groups, frozen, ahead", seed=23, ahead=True, **OWN),
        case("numbers", seed=22, numbers=True, without=["optimizer"], changes=UNTIED),
    ],
    3: [
        case("ZeRO 1, paired", 3, seed=13, zero=1, order="paired", interval=1, schedules={1: "kfkb k=2", 3: "gpipe"}),
    ],
    4: [
        case("ZeRO 1, Adafactor", seed=19, zero=1, more=of_optimizer("Adafactor")),
        case("ZeRO 1, groups, frozen, ahead", seed=24, zero=1, ahead=True, more=BF16, **OWN),
        case("ZeRO 1, trained, ahead", seed=25, zero=1, ahead=True, changes=UNTIED),
        case("ZeRO 0, mixtral, ahead", seed=26, family="mixtral", ahead=True, more=BF16),
    ],
}
"""Whatever changes how a layer moves is in one of them; several things that have to do with nothing of each other's
are in the same."""


@pytest.mark.parametrize("world_size", MODELS)
def test_a_language_model_trains_as_without(world_size: int) -> None:
    for found in run_ranks(compare, world_size, False, MODELS[world_size]):
        assert not any(found.values()), found


HALVES: dict[int, list[Case]] = {
    2: [
        case("halves, mixtral", seed=42, items=2 * LAYERS + 2, halves=True, family="mixtral", ahead=True, more=BF16),
        case("halves, recomputing", seed=43, items=2 * LAYERS + 2, halves=True, interval=1),
    ],
    4: [
        case("halves, four stages", 4, seed=44, items=2 * LAYERS + 2, halves=True, changes=UNTIED),
        case("halves, ZeRO 1", seed=45, items=2 * LAYERS + 2, halves=True, zero=1, ahead=True, changes=UNTIED),
    ],
}


@pytest.mark.parametrize("world_size", HALVES)
def test_halves_of_layers_train_as_without(world_size: int) -> None:
    for found in run_ranks(compare, world_size, False, HALVES[world_size]):
        assert not any(found.values()), found


def test_with_clipping_it_trains_as_without_to_rounding() -> None:
    """The norm is summed in another order."""
    cases = [case("ZeRO 1", seed=21, zero=1, clipping=0.5)]
    for found in run_ranks(compare, 4, False, cases, relative=1e-6):
        assert not any(found.values()), found


PLAIN: dict[int, list[Case]] = {
    2: [
        case("Adam", seed=31, items=PLAIN_ITEMS),
        case("recomputing", seed=32, items=PLAIN_ITEMS, interval=1),
        case("groups", seed=33, items=PLAIN_ITEMS, groups=True, without=["optimizer"]),
        case("paired", seed=34, items=PLAIN_ITEMS, order="paired", more=BF16),
    ],
    4: [
        case("ZeRO 1", seed=35, items=PLAIN_ITEMS, zero=1),
        case("data outermost", seed=36, items=PLAIN_ITEMS, zero=1, **{"data outermost": True}),
    ],
}


@pytest.mark.parametrize("world_size", PLAIN)
def test_any_pipeline_module_trains_as_without(world_size: int) -> None:
    """Specs, modules, functions, buffers, tied layers, boundaries of other shapes."""
    for found in run_ranks(compare, world_size, True, PLAIN[world_size]):
        assert not any(found.values()), found


# -- layers that are frozen for some steps -----------------------------------------------------------------------------


def freezes(zero: int, *, moves: bool, is_ahead: bool = False) -> Any:
    """Two layers are frozen from the third step to the fifth, before which they move."""
    from paceline.runtime import migration

    migration.LEAST_BYTES = 1
    engineer = Engineer(2, zero, changes=UNTIED)
    engine = engineer.engine()
    losses = []
    for step in range(STEPS):
        if step in (2, 5):
            for name, parameter in engine.module.named_parameters():
                if ".layers.2." in name or ".layers.3." in name:
                    parameter.requires_grad_(step == 5)
        if is_ahead and step == 1:
            assert engine.prepare_repartition([0, 2, ITEMS])
        if moves and step == 4:
            engine.repartition([0, 2, ITEMS])
        losses.append(engine.train_batch(engineer.batches(engine, step)).item())
    state = whole_state(engine)
    engine.destroy()
    return losses, state


def freezes_and_moves(zero: int) -> list[str]:
    import deepspeed

    deepspeed.init_distributed()
    losses, state = freezes(zero, moves=False)
    odd = []
    for is_ahead in (False, True):
        moved_losses, moved_state = freezes(zero, moves=True, is_ahead=is_ahead)
        odd += differences(state, moved_state) + ([] if losses == moved_losses else [f"{losses}, {moved_losses}"])
    return odd


def test_layers_that_are_frozen_for_some_steps_move_as_they_are() -> None:
    for odd in run_ranks(freezes_and_moves, 4, 1):
        assert not odd, odd


# -- what is on its way at the end ------------------------------------------------------------------------------------


def destroyed_on_the_way() -> list[str]:
    """Threads that still exchange after an engine was destroyed with layers on their way."""
    from paceline.runtime import migration
    from paceline.state import exchange_beside

    carry_out = exchange_beside.carry_out

    def slow(*args: Any, **options: Any) -> None:
        carry_out(*args, **options)
        time.sleep(2)

    exchange_beside.carry_out = slow
    migration.LEAST_BYTES = 1
    engine = Engineer(2).engine()
    assert engine.prepare_repartition([0, 2, ITEMS])
    engine.destroy()
    return [thread.name for thread in threading.enumerate() if thread.name == "paceline-exchange"]


def test_a_destroyed_engine_leaves_no_layers_on_their_way() -> None:
    assert run_ranks(destroyed_on_the_way, 2) == [[], []]


def freezes_first_stage(kind: type[Engineer], parts: Sequence[int] | None, options: Mapping[str, Any]) -> Any:
    """All that the first stage has at the start is frozen from the third step to the fifth, before which they move."""
    engineer = kind(2, **options)
    engine = engineer.engine()
    own = {name for name, _ in engine.module.named_parameters()} if engine.is_first_stage() else set()
    (frozen,) = (names for names in engine.control.gather(own) if names)
    losses = []
    for step in range(STEPS):
        if step in (2, 5):
            for name, parameter in engine.module.named_parameters():
                if name in frozen:
                    parameter.requires_grad_(step == 5)
        if parts is not None and step == 4:
            engine.repartition(parts)
        losses.append(engine.train_batch(engineer.batches(engine, step)).item())
    state = whole_state(engine)
    engine.destroy()
    return losses, state


def freezes_first_stage_and_moves(kind: type[Engineer], parts: Sequence[int], **options: Any) -> list[str]:
    import deepspeed

    deepspeed.init_distributed()
    losses, state = freezes_first_stage(kind, None, options)
    moved_losses, moved_state = freezes_first_stage(kind, parts, options)
    return differences(state, moved_state) + ([] if losses == moved_losses else [f"{losses}, {moved_losses}"])


@pytest.mark.parametrize(("kind", "parts"), [(Engineer, [0, 2, ITEMS]), (PlainEngineer, [0, 3, PLAIN_ITEMS])])
def test_a_stage_that_is_frozen_for_some_steps_trains_again(kind: type[Engineer], parts: list[int]) -> None:
    for odd in run_ranks(freezes_first_stage_and_moves, 2, kind, parts, changes=UNTIED):
        assert not odd, odd


# -- what users hold on to ---------------------------------------------------------------------------------------------


def hold_on(zero: int) -> list[str]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    import paceline
    from paceline.supervise.watch import WATCH

    engineer = Engineer(2, zero, more={"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}})
    engine, optimizer, _, scheduler = paceline.initialize(model=engineer.model(), config=engineer.config)
    module = engine.module
    engine.train_batch(engineer.batches(engine, 0))
    held_out = step_batches(50)[engine.grid.data_parallel_id :: engineer.replicas]
    before = engine.evaluate(held_out), engine.eval_batch(iter(held_out)).item()
    odd = []
    engine.repartition([0, 2, ITEMS])
    if WATCH.operation:
        odd.append("what the script does next has a time limit")
    if before != (engine.evaluate(held_out), engine.eval_batch(iter(held_out)).item()):
        odd.append("an evaluation differs")
    engine.train_batch(engineer.batches(engine, 1))
    if (engine.optimizer, engine.module, engine.lr_scheduler) != (optimizer, module, scheduler):
        odd.append("other objects")
    if {group["lr"] for group in optimizer.param_groups} != set(scheduler.get_last_lr()):
        odd.append("the scheduler has other groups")
    for name, parameter in module.named_parameters():
        if not torch.equal(safe_get_full_fp32_param(parameter), parameter):
            odd.append(f"the master of {name}")
        if safe_get_full_optimizer_state(parameter, "exp_avg").shape != parameter.shape:
            odd.append(f"the state of {name}")
        if engine.param_names[parameter] != name:
            odd.append(f"the name of {name}")
    figures = engine.migrations[-1]
    if (figures["from"], figures["to"], figures["step"]) != ([0, 4, 8], [0, 2, 8], 1):
        odd.append(f"figures {figures}")
    if engine.repartition([0, 2, ITEMS]) is not None or len(engine.migrations) != 1:
        odd.append("a migration to where it is")
    return odd


@pytest.mark.parametrize("zero", [0, 1])
def test_what_users_hold_on_to_is_what_trains(zero: int) -> None:
    assert run_ranks(hold_on, 4, zero) == [[]] * 4


# -- what is left behind -----------------------------------------------------------------------------------------------


def count(engine: Any) -> dict[str, int]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor) and not thing.is_meta]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return {
        "tensors": len(tensors),
        "bytes": sum(storages.values()),
        "hooks": len(engine.optimizer.gradients.hooks),
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "threads": threading.active_count(),
        "parameters": sum(1 for thing in gc.get_objects() if isinstance(thing, nn.Parameter) and not thing.is_meta),
    }


def go_back_and_forth(plain: bool, zero: int) -> tuple[dict[str, int], dict[str, int], int]:
    """Counts after six migrations, and after thirty; parameters that outlive the layers that have left."""
    import deepspeed

    deepspeed.init_distributed()
    engineer = (PlainEngineer if plain else Engineer)(2, zero, more=BF16)
    engine = engineer.engine()
    items = PLAIN_ITEMS if plain else ITEMS
    engine.train_batch(engineer.batches(engine, 0))

    def back_and_forth() -> None:
        engine.repartition([0, 2, items])
        engine.repartition([0, items // 2, items])
        engine.train_batch(engineer.batches(engine, 1))

    for _ in range(3):
        back_and_forth()
    before = count(engine)
    for _ in range(12):
        back_and_forth()
    after = count(engine)
    gc.disable()  # what only the collector finds would take memory until it comes
    layers = [engine.layers.get(item) for item in engine.layers.here if 2 <= item < items // 2]
    left = [weakref.ref(p) for layer in layers if layer is not None for p in layer.parameters()]
    del layers
    engine.repartition([0, 2, items])

    def num_left() -> int:
        return sum(ref() is not None and not ref().is_meta for ref in left)

    deadline = time.monotonic() + LET_GO_S
    while num_left() and time.monotonic() < deadline:  # a thread may not have let go yet of what it sent last
        time.sleep(0.05)
    return before, after, num_left()


@pytest.mark.parametrize(("plain", "zero"), [(False, 1), (True, 0)])
def test_nothing_grows_with_the_number_of_migrations(plain: bool, zero: int) -> None:
    for before, after, left in run_ranks(go_back_and_forth, 2 + 2 * zero, plain, zero):
        # A thread of gloo may not have let go yet of what it sent last, and one that was told to end may not have yet.
        # What each of 24 moves left would be more.
        slack = {"tensors": 20, "bytes": 20 * 1024, "threads": 20}
        assert all(after[name] <= before[name] + slack.get(name, 0) for name in before), (before, after)
        assert left == 0


# -- checkpoints -------------------------------------------------------------------------------------------------------

SAVED = {"before": 2, "between": 3, "after": 4}
CHECKPOINTED: Moves = {2: [[0, 2, ITEMS]], 3: [[0, 6, ITEMS]], 5: [[0, 3, ITEMS]]}


def saving(root: str, moves: Moves) -> dict[Any, Tensor]:
    """Saves begin before, between and after migrations, which do not wait until they are written."""
    engineer = Engineer(2, 1, more=BF16)
    engine = engineer.engine()
    for step in range(STEPS):
        for tag, at in SAVED.items():
            if at == step:
                engine.save_checkpoint(root, tag=tag, wait=False)
        for parts in moves.get(step, ()):
            engine.repartition(parts)
        engine.train_batch(engineer.batches(engine, step))
    engine.finish_checkpoint()
    return whole_state(engine)


def resuming(root: str, wanted: Mapping[Any, Tensor]) -> dict[str, list[str]]:
    """Into other boundaries, and into those that the run began with, to be moved again."""
    found = {}
    for tag, partition, moves in (
        ("after", [0, 3, ITEMS], {}),
        ("before", "uniform", CHECKPOINTED),
    ):
        engineer = Engineer(2, 1, more=BF16, partition=partition)
        engine = engineer.engine()
        engine.load_checkpoint(root, tag=tag)
        for step in range(SAVED[tag], STEPS):
            for parts in moves.get(step, ()):
                engine.repartition(parts)
            engine.train_batch(engineer.batches(engine, step))
        found[f"{tag}, {partition}, {list(moves)}"] = differences(wanted, whole_state(engine))
        engine.destroy()
    return found


def test_checkpoints_and_exports_are_those_without_migrations(tmp_path: Path) -> None:
    from paceline.checkpoint import Checkpoint
    from paceline.launch import cli

    wanted, found = (
        run_ranks(saving, 4, str(tmp_path / name), moves)[0] for name, moves in (("stay", {}), ("move", CHECKPOINTED))
    )
    assert differences(wanted, found) == []
    for tag in SAVED:
        one, other = (Checkpoint.open(tmp_path / name / tag) for name in ("stay", "move"))
        contents = [
            {(name, kind): saved.read(name, kind) for name in saved.names for kind in saved.kinds(name)}
            for saved in (one, other)
        ]
        assert differences(*contents) == [], tag
    for odd in run_ranks(resuming, 4, str(tmp_path / "move"), wanted):
        assert not any(odd.values()), odd
    exported = []
    for name in ("stay", "move"):
        assert cli.main(["export", str(tmp_path / name / "after"), str(tmp_path / name / "model")]) == 0
        exported.append({p.name: p.read_bytes() for p in sorted((tmp_path / name / "model").iterdir())})
    assert exported[0] == exported[1]
    assert "model.safetensors" in exported[0]
