"""A rank's part in a random sequence: each operation that is drawn, and what is compared in the end."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from typing import Any

import torch

from gpu.drawing import ADAPTERS, FROZEN, LIGHTHOUSE, Case, Model
from gpu.training import adapted
from support.expert_models import random_placement
from support.expert_pipelines import state
from support.jobs import model_config, step_batches
from support.natural import allow_fp16

HELD_OUT = 1000
"""Step from which on batches are evaluated and predicted."""


def play(case: Case, folder: str, lighthouse: str) -> dict[str, Any]:
    """On a rank: losses, evaluations, and the pieces of weights and optimizer states that it answers for.

    Raises:
        RuntimeError: from what an operation has raised; names it.
    """
    from paceline.moe import rebalancer
    from paceline.runtime import migration

    migration.LEAST_BYTES = rebalancer.LEAST_BYTES = 0  # what moves is sent beside steps, however little it is
    allow_fp16()
    if "PACELINE_GPU_TESTS_HOSTS" in os.environ:
        os.environ.update(NCCL_HOSTID=f"host{os.environ['RANK']}", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.chdir(folder)
    player = Player(case, folder, lighthouse)
    for number, operation in enumerate(case.operations):
        try:
            act = getattr(player, operation.action, None) or getattr(player.engine, operation.action)
            act(*operation.values, **operation.options)
        except Exception as error:
            raise RuntimeError(f"operation {number}, {operation}: {type(error).__name__}: {error}") from error
    player.engine.flush()
    player.engine.finish_averaging()
    found = {
        "losses": [float(loss) for loss in player.losses],
        "evaluations": player.evaluations,
        "state": [(*piece, rows.cpu()) for *piece, rows in state(player.engine)],
    }
    player.engine.destroy()
    return found


class Player:
    """The engine of a case, and operations that are more than a call of its method of this name."""

    def __init__(self, case: Case, folder: str, lighthouse: str) -> None:
        self.case, self.folder, self.lighthouse = case, folder, lighthouse
        self.engine: Any = None
        self.step = 0
        self.losses: list[Any] = []
        self.evaluations: list[float] = []

    def open(self, config: dict[str, Any]) -> None:
        import paceline

        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
            gc.collect()
        config = json.loads(json.dumps(config).replace(LIGHTHOUSE, self.lighthouse))
        self.engine, *_ = paceline.initialize(model=build(self.case.model), config=config)
        self.batches = self._batches(self.step)

    def _batches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """This replica's micro-batches of one step after another."""
        from paceline.planning.unequal_replicas import dealt

        while True:
            owners = dealt(self.engine.replica_micro_batches)
            batches = zip(step_batches(step, self.case.batches), owners, strict=True)
            yield from [batch for batch, owner in batches if owner == self.engine.grid.data_parallel_id]
            step += 1

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.losses.append(self.engine.train_batch(self.batches))
            self.step += 1
            assert self.engine.global_steps == self.step, f"{self.engine.global_steps} steps instead of {self.step}"

    def run_out(self, num_batches: int) -> None:
        """Begin a step that has too few micro-batches."""
        try:
            self.engine.train_batch(iter(step_batches(5 * HELD_OUT)[:num_batches]))
        except StopIteration:
            return
        raise AssertionError(f"a step took {num_batches} micro-batches")

    def evaluate(self, step: int, count: int) -> None:
        self.evaluations.append(float(self.engine.evaluate(self._held_out(step, count))["eval_loss"]))

    def predict(self, step: int, count: int) -> None:
        for _ in self.engine.predict(self._held_out(step, count)):
            pass

    def _held_out(self, step: int, count: int) -> list[dict[str, torch.Tensor]]:
        batches = step_batches(HELD_OUT + step, self.case.batches)[:count]
        return batches[self.engine.grid.data_parallel_id :: self.engine.dp_world_size]

    def save(self, tag: str, **options: Any) -> None:
        self.engine.save_checkpoint(self.folder, tag=tag, client_state={"step": self.step}, **options)

    def load(self, tag: str | None = None) -> None:
        path, client_state = self.engine.load_checkpoint(self.folder, tag=tag)
        assert path is not None, "nothing was loaded"
        self.step = client_state["step"]
        self.batches = self._batches(self.step)

    def export(self) -> None:
        import paceline

        paceline.export(self.engine.module, f"{self.folder}/export{self.step}.{len(self.losses)}", self.engine.control)

    def set_schedule(self, name: str, **keys: Any) -> None:
        from paceline.schedules import make
        from paceline.schedules.split_families import SPLIT_FAMILIES

        sizes = self.engine.num_stages, self.engine.run_micro_batches
        self.engine.set_schedule(SPLIT_FAMILIES[name](*sizes) if name in SPLIT_FAMILIES else make(name, *sizes, **keys))

    def place_experts(self, seed: int) -> None:
        self.engine.place_experts(self._placements(seed))

    def prepare_experts(self, seed: int) -> None:
        self.engine.prepare_experts(self._placements(seed))

    def _placements(self, seed: int) -> dict[str, Any]:
        """Random ones of this stage's layers, with copies where there is room for them."""
        from paceline.planning.experts import Placement

        placements = {}
        for number, (name, layer) in enumerate(self.engine.expert_layers.items()):
            first, second = random_placement(100 * seed + number, layer.num_experts, layer.size).devices
            few, more = sorted((seed % (layer.num_replicas + 1), layer.num_replicas))
            held = (*first, *second[:few]), (*second, *first[:more])
            placements[name] = Placement(held, (len(first), len(second)))
        return placements


def build(model: Model) -> Any:
    """Its config, or the model itself where something is done to it."""
    changes: dict[str, Any] = {"num_hidden_layers": model.num_layers, "tie_word_embeddings": model.is_tied}
    if model.family == "mixtral":
        changes |= {"router_aux_loss_coef": 0.0, "output_router_logits": False}
    hf_config = model_config(model.family, **changes)
    if model.treatment != FROZEN:
        return adapted(hf_config) if model.treatment == ADAPTERS else hf_config
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage

    whole = load_stage(None, hf_config, Cut.whole(model.num_layers)).model
    whole.get_input_embeddings().requires_grad_(False)
    whole.model.layers[: model.num_layers // 2].requires_grad_(False)
    return whole
