"""What cannot move is refused and nothing has changed; an accident while layers move ends the job, and it resumes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.accidents import Running, accident, limit_from_here_on
from support.errors import runtime_errors
from support.jobs import ds_config, model_config, step_batches
from support.ranks import PATIENCE_S, run_ranks

WIDTH, VOCABULARY, MICRO_BATCHES = 8, 17, 4
ITEMS = 8
LIMIT_S = 20.0
"""Without progress, once a rank may hang: steps before take longer on a machine that is busy with all these jobs."""
VICTIM = 1

Attempt = tuple[Any, dict[str, Any], str]
"""A partition (or a rank's, by rank), more arguments, and what the message says."""


class Wide(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Fragile(Wide):
    """Cannot be made on rank 1."""

    def __init__(self) -> None:
        if os.environ["RANK"] == "1":
            raise MemoryError("no more of it")
        super().__init__()


class Fickle(Wide):
    """Is another on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        if os.environ["RANK"] == "1":
            self.more = nn.Parameter(torch.zeros(1))


def embed(module: nn.Embedding, x: Tensor) -> Tensor:
    return nn.functional.embedding(x, module.weight)


def by_weight(module: nn.Embedding, x: Tensor) -> Tensor:
    return x @ module.weight.t()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def one_hot(x: Tensor) -> Tensor:
    return nn.functional.one_hot(x % WIDTH, WIDTH).float()


def odd_layers() -> list[Any]:
    """Ten layers in two stages of five: of each kind that cannot move, one that would."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    twin = Wide()
    return [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=embed),
        twin,
        twin,
        LayerSpec(Fragile),
        LayerSpec(Fickle),
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=by_weight),
        *[LayerSpec(Wide, VOCABULARY)] * 4,
    ]


def few_layers() -> list[Any]:
    """Two stages of two; the first layer is a function."""
    from deepspeed.pipe import LayerSpec

    return [one_hot, *[LayerSpec(Wide)] * 3]


def other_groups(parameters: Any) -> torch.optim.Optimizer:
    """The ranks decay differently."""
    return torch.optim.AdamW(list(parameters), weight_decay=0.1 * int(os.environ["RANK"]))


def plain_engine(layers: Callable[[], list[Any]], optimizer: Any = None) -> Any:
    from deepspeed.pipe import PipelineModule

    import paceline

    torch.manual_seed(3)
    module = PipelineModule(layers=layers(), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES)
    if optimizer is not None:
        del config["optimizer"]
    parameters = [p for p in module.parameters() if p.requires_grad]
    return paceline.initialize(model=module, model_parameters=parameters, optimizer=optimizer, config=config)[0]


def plain_batches(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return iter([tuple(pair) for pair in torch.randint(0, WIDTH, (MICRO_BATCHES, 2, 2, 5), generator=generator)])


def lm_engine(zero: int = 0) -> Any:
    import paceline

    section = {"pipeline": {"stages": 2, "partition": "uniform"}}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, zero_optimization={"stage": zero}, paceline=section)
    return paceline.initialize(model=model_config(num_hidden_layers=ITEMS - 2), config=config)[0]


def lm_batches(engine: Any, step: int) -> Any:
    return iter(step_batches(step)[engine.grid.data_parallel_id :: engine.dp_world_size][:MICRO_BATCHES])


def run(engine: Any, attempts: Sequence[Attempt]) -> tuple[list[str], list[Any]]:
    """Two steps, attempts to move layers, two more steps: what was raised, and losses and weights."""
    from paceline.runtime.module import CausalLMPipeline

    def step(number: int) -> float:
        is_lm = isinstance(engine.module, CausalLMPipeline)
        return engine.train_batch(lm_batches(engine, number) if is_lm else plain_batches(number)).item()

    seen: list[Any] = [step(0), step(1)]
    messages = []
    parts = list(engine.module.parts)
    for wanted, arguments, _ in attempts:
        try:
            engine.repartition(wanted[engine.global_rank] if isinstance(wanted, dict) else wanted, **arguments)
            messages.append("nothing")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        assert engine.module.parts == parts
    seen += [step(2), step(3)]
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return messages, [seen, weights]


def refused(kind: str) -> tuple[list[str], bool]:
    """Messages, and whether training went on as without the attempts."""
    import deepspeed

    deepspeed.init_distributed()
    outcomes = []
    for attempts in (ATTEMPTS[kind], ()):
        if kind.startswith("language model"):
            engine = lm_engine(zero=int(kind[-1]))
        elif kind == "odd layers":
            engine = plain_engine(odd_layers)
        else:
            engine = plain_engine(few_layers, other_groups if kind == "other groups" else None)
        outcomes.append(run(engine, attempts))
        engine.destroy()
    (messages, (losses, weights)), (_, (other_losses, other_weights)) = outcomes
    same = losses == other_losses and all(torch.equal(t, other_weights[name]) for name, t in weights.items())
    return messages, same


NO_CUT = r"ValueError: partition .* does not cut 8 items .* into 2 stages: give 3 rising boundaries from 0 to 8\."
ATTEMPTS: dict[str, list[Attempt]] = {
    "language model, ZeRO 0": [
        ([0, 8], {}, NO_CUT),
        ([0, 9, 8], {}, NO_CUT),
        ([0, 8, 8], {}, NO_CUT),
        ([1, 2, 8], {}, NO_CUT),
        ([0, 2.5, 8], {}, NO_CUT),
        ({0: [0, 2, 8], 1: [0, 3, 8]}, {}, r"ValueError: ranks ask for different partitions, \[\[0, 2, 8\], \[0, 3, "),
        (
            [0, 2, 8],
            {"memory_bytes": 100_000},
            r"ValueError: partition \[0, 2, 8\] does not fit: stage 1 would take 0\.\d MiB more for layers 2-3 and has "
            r"room for 0\.1 MiB; nothing has moved",
        ),
        ([0, 5, 8], {"memory_bytes": 1}, r"stage 0 would take 0\.\d MiB more for layer 4 and has room for 0\.0 MiB"),
    ],
    "language model, ZeRO 1": [
        ([0, 2, 8], {"memory_bytes": 100_000}, r"ValueError: partition \[0, 2, 8\] does not fit: stage \d would take "),
    ],
    "odd layers": [
        ([0, 4, 10], {}, r"ValueError: layer 4 cannot move: made anew it differs from the one that trains in more;"),
        ([0, 3, 10], {}, r"MemoryError: no more of it"),
        ([0, 2, 10], {}, r"moves layer 2 from stage 0 to 1, which has parameters or buffers in common with layer 1"),
        ([0, 6, 10], {}, r"moves layer 5, which is tied \('embedding'\), from stage 1 to 0: tied layers stay"),
        ([0, 4, 6, 10], {}, r"ValueError: partition \[0, 4, 6, 10\] does not cut 10 layers into 2 stages: give 3 "),
    ],
    "few layers": [
        ([0, 1, 4], {}, r"ValueError: partition \[0, 1, 4\] leaves stage 0 without a parameter: choose one"),
    ],
    "other groups": [
        (
            [0, 3, 4],
            {},
            r"ValueError: layer 2 cannot move to stage 0: no group of its optimizer has the options of the one that "
            r"trains linear\.\w+; give every stage the same parameter groups",
        ),
    ],
}


@pytest.mark.parametrize("kind", ATTEMPTS)
def test_what_cannot_move_is_refused_on_every_rank_and_training_goes_on(kind: str) -> None:
    for messages, same in run_ranks(refused, 4 if kind.endswith("ZeRO 1") else 2, kind):
        for message, (_, _, expected) in zip(messages, ATTEMPTS[kind], strict=True):
            assert re.search(expected, message), message
        assert same


# -- accidents ---------------------------------------------------------------------------------------------------------


def fails_half_way(root: str) -> list[str]:
    import paceline
    from paceline.runtime import migration

    engine = lm_engine()
    engine.train_batch(lm_batches(engine, 0))

    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("no route to host")

    migration.carry_out = breaks
    return runtime_errors(
        (
            lambda: engine.repartition([0, 2, ITEMS]),
            lambda: engine.repartition([0, 2, ITEMS]),
            lambda: engine.train_batch(lm_batches(engine, 1)),
            lambda: engine.evaluate(lm_batches(engine, 1)),
            lambda: engine.save_checkpoint(root),
            lambda: paceline.export(engine.module, f"{root}/model", engine.control),
        )
    )


def test_an_engine_that_failed_half_way_does_not_go_on(tmp_path: Path) -> None:
    """Nor does it write what is left of its model over what was written before."""
    for first, *others in run_ranks(fails_half_way, 2, str(tmp_path)):
        assert first == "no route to host"
        for message in others:
            assert re.search(
                r"left half-way \(layers were being moved; RuntimeError: no route to host\).*load the last checkpoint",
                message,
            )
    assert list(tmp_path.iterdir()) == []


def moves(what: str, where: str, root: str) -> None:
    """Trains, saves, and moves layers; one rank has an accident on the way."""
    import deepspeed

    from paceline.runtime import migration
    from paceline.state import exchange_beside
    from paceline.supervise.lifetime import end_process
    from paceline.supervise.watch import WATCH

    deepspeed.init_distributed("gloo")
    WATCH.start(PATIENCE_S)
    engine = lm_engine(zero=1)
    if engine.global_rank == VICTIM:

        def has_an_accident(*args: Any, **kwargs: Any) -> Any:
            accident(what)

        if where == "exchange":
            migration.carry_out = has_an_accident
        elif where == "beside":  # masters and states, on a thread
            exchange_beside.carry_out = has_an_accident
        else:
            engine.layers.make = has_an_accident
    try:
        for step in range(4):
            if step == 2:
                engine.save_checkpoint(root)
                if what in ("hangs", "is stopped"):
                    limit_from_here_on(LIMIT_S)
                engine.repartition([0, 2, ITEMS])
            engine.train_batch(lm_batches(engine, step))
    except Exception as error:
        end_process(WATCH.fail(error).code)
    end_process(0)


@lru_cache
def undisturbed() -> list[float]:
    return run_ranks(goes_on, 2, None)[0]


def goes_on(root: str | None) -> list[float]:
    engine = lm_engine(zero=1)
    if root is not None:
        engine.load_checkpoint(root)
    return [engine.train_batch(lm_batches(engine, step)).item() for step in range(engine.global_steps, 4)]


MOVING = {
    ("is killed", "exchange"): r"rank 1 is gone \(its process ended without a word\).*at step 2, moving layers",
    ("is stopped", "exchange"): r"rank 1 is gone \(nothing heard for \d+ s: stopped, or.*at step 2, moving layers",
    ("raises", "exchange"): r"rank 1 failed at step 2, moving layers: MemoryError: no more of it",
    ("hangs", "exchange"): r"all ranks wait for each other, the limit is 20 s: .*at step 2, moving layers",
    ("is killed", "beside"): r"rank 1 is gone \(its process ended without a word\).*at step 2, ",
    ("raises", "beside"): r"rank 1 failed at step 2, .*: MemoryError: no more of it",
    ("hangs", "beside"): r"all ranks wait for each other, the limit is 20 s: .*at step 2, moving states of layers",
    ("hangs", "make"): r"rank 1 hangs at step 2, making layers that come: \d+ s in accident \(accidents.py:\d+\); the ",
}


@pytest.fixture(scope="module")
def jobs_with_accidents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, tuple[Running, Path]]]:
    """They mostly wait, and so run beside each other."""
    begun = {}
    for case in MOVING:
        root = tmp_path_factory.mktemp("checkpoints")
        begun[case] = Running(moves, 2, *case, str(root)), root
    yield begun
    for running, _ in begun.values():
        running.kill()


@pytest.mark.parametrize(("what", "where"), MOVING)
def test_an_accident_while_layers_move_ends_all_and_is_told_once(
    what: str, where: str, jobs_with_accidents: Any
) -> None:
    job, _ = jobs_with_accidents[what, where]
    ended = job.end(stopped=VICTIM if what == "is stopped" else None)
    assert len(ended.causes) == 1, "\n".join(ended.outputs)
    assert re.search(MOVING[what, where], ended.causes[0]), ended.causes
    assert ended.codes == [1, -9 if what in ("is killed", "is stopped") else 1]
    assert ended.left == []


@pytest.mark.parametrize("where", ["exchange", "beside"])
def test_a_job_that_lost_a_rank_while_layers_moved_resumes(where: str, jobs_with_accidents: Any) -> None:
    job, root = jobs_with_accidents["is killed", where]
    job.end()
    assert run_ranks(goes_on, 2, str(root))[0] == undisturbed()[2:]
