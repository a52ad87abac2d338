"""A parameter with everything that belongs to it is collected, sent to another rank, and put into place there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jobs import ds_config, model_config, step_batches
from ranks import run_ranks

NAME = "model.layers.1.mlp.up_proj.weight"


def moved(zero: int, dtype: str, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Two stages of one shape, two replicas: stage 0 trains, and stage 1 gets a layer's weight from it."""
    import paceline
    from paceline.runtime.state import MASTER, Bundle, collect, parts_of, place, receive, send

    config = ds_config(
        2,
        zero_optimization={"stage": zero},
        optimizer=optimizer,
        bf16={"enabled": dtype == "bf16"},
        gradient_accumulation_steps=4,
    )
    engine, sharded, *_ = paceline.initialize(model=model_config(tie_word_embeddings=False), config=config)
    replica = engine.grid.data_parallel_id
    for step in range(2):
        engine.train_batch(iter(step_batches(step)[replica::2]))
    group = engine.grid.get_data_parallel_group()
    if engine.stage_id == 0:
        bundle = collect(sharded, NAME, group)
        send(bundle, engine.global_rank + 2)
        parameter = dict(engine.module.stage.model.named_parameters())[NAME]
        assert torch.equal(bundle.parts[MASTER].to(parameter.dtype), parameter.detach())
        return {"sent": dict(bundle.parts)}
    bundle = receive(engine.global_rank - 2, torch.device("cpu"))
    assert bundle.name == NAME
    # The layer that has its place here now: the same shapes under another name.
    name = NAME.replace("layers.1", "layers.3")
    renamed = Bundle(name, bundle.parts)

    class OnlyThis:
        """What is to be placed comes from the bundle, all else stays."""

        def kinds(self, other: str) -> list[str]:
            return renamed.kinds(name) if other == name else list(own[other])

        def shape(self, other: str, kind: str | None = None) -> tuple[int, ...]:
            source = renamed.parts if other == name else own[other]
            return tuple(source[kind or MASTER].shape)

        def read(self, other: str, kind: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
            source = renamed.parts if other == name else own[other]
            return source[kind][start:stop] if source[kind].dim() else source[kind]

    own = {n: {k: t.clone() for k, t in collect(sharded, n, group).parts.items()} for n in sharded.names}
    place(engine.module, sharded, OnlyThis())
    sharded.publish()
    after = collect(sharded, name, group)
    parameter = dict(engine.module.stage.model.named_parameters())[name]
    assert torch.equal(after.parts[MASTER].to(parameter.dtype), parameter.detach())
    for n in sharded.names:
        if n != name:
            now = collect(sharded, n, group).parts
            assert all(torch.equal(tensor, now[kind]) for kind, tensor in own[n].items()), n
    held = sum(parts_of(sharded, owned)[MASTER].numel() for owned in sharded.owned if owned.name == name)
    assert held <= after.parts[MASTER].numel()
    return {"received": dict(after.parts)}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_bundle_moves_whole(zero: int, dtype: str) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    ranks = run_ranks(moved, 4, zero, dtype, optimizer)
    for sender, receiver in ((0, 2), (1, 3)):
        sent, received = ranks[sender]["sent"], ranks[receiver]["received"]
        assert sorted(sent) == sorted(received) == ["exp_avg", "exp_avg_sq", "master", "step"]
        for kind, tensor in sent.items():
            assert torch.equal(tensor, received[kind]), kind
