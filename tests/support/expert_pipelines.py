"""Pipelines of small models whose experts lie on several ranks of a stage, and what they hold."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from support.jobs import MICRO_BATCHES, ds_config, step_batches

MIXTRAL = {
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
"""One dense layer first, routing limited to groups of experts, an expert that all tokens go to."""


class Case(NamedTuple):
    family: str = "mixtral"
    zero: int = 0
    clipping: float = 0.0
    dtype: str = "fp32"
    checkpointing: bool = False
    layers: int = 3
    num_experts: int = 4
    micro_batches: int = MICRO_BATCHES


def model_config(family: str, num_layers: int = 3, num_experts: int = 4) -> Any:
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": num_layers}
    more = {
        "mixtral": {**MIXTRAL, "num_local_experts": num_experts},
        "deepseek_v3": {**DEEPSEEK, "n_routed_experts": num_experts, "n_group": 1 if num_experts % 2 else 2},
    }[family]
    return AutoConfig.for_model(family, vocab_size=97, tie_word_embeddings=False, **sizes, **more)


def make(case: Case, stages: int, experts: int, **section: Any) -> Any:
    import paceline

    replicas = int(os.environ["WORLD_SIZE"]) // stages
    config = ds_config(
        gradient_accumulation_steps=case.micro_batches // replicas,
        gradient_clipping=case.clipping,
        zero_optimization={"stage": case.zero},
        bf16={"enabled": case.dtype == "bf16"},
        paceline={"pipeline": {"stages": stages, "partition": "uniform"}, **section},
    )
    if experts > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": experts, "preset_model": case.family}
    if case.checkpointing:
        config["pipeline"] = {"activation_checkpoint_interval": 1}
    model = model_config(case.family, case.layers, case.num_experts)
    engine, *_ = paceline.initialize(model=model, config=config)
    return engine


def steps(engine: Any, first: int, count: int) -> list[float]:
    replica, replicas = engine.grid.data_parallel_id, engine.dp_world_size
    return [
        engine.train_batch(iter(step_batches(step)[replica::replicas])).item() for step in range(first, first + count)
    ]


def state(engine: Any) -> list[tuple[str, str, int, torch.Tensor]]:
    """What this rank answers for: name, kind, first row, rows."""
    from paceline.state.named import pieces

    found = pieces(engine.module, engine.optimizer, replica=engine.replica)
    return [(piece.name, piece.kind, piece.start, piece.tensor.detach().clone()) for piece in found]


def joined(ranks: list[Any]) -> dict[tuple[str, str], torch.Tensor]:
    """The state of the job: every row of every tensor, by Hugging Face's names."""
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for rank in ranks:
        for name, kind, start, rows in rank["state"]:
            assert start not in parts.setdefault((name, kind), {}), f"two ranks answer for row {start} of {name}"
            parts[name, kind][start] = rows
    return {
        key: torch.cat([rows for _, rows in sorted(of_key.items())]) if next(iter(of_key.values())).dim() else of_key[0]
        for key, of_key in parts.items()
    }


Order = tuple[tuple[int, ...], tuple[int, ...]]


def order(number: int, num_experts: int = 4) -> Order:
    """Experts of two ranks, one of two orders; of five experts the first rank has two in one of them, else three."""
    rest = tuple(range(4, num_experts))
    return ((3, 1, *rest), (0, 2)) if number % 2 else ((2, 3), (1, 0, *rest))


def packed(num_experts: int, num_ranks: int) -> Any:
    """The last ranks own all that they have room for; the first one owns what is left, perhaps none, and has a copy."""
    from paceline.planning.experts import Placement

    size = -(-num_experts // num_ranks)
    own = [tuple(range(num_experts)[size * rank : size * (rank + 1)]) for rank in reversed(range(num_ranks))]
    return Placement(((*own[0], 0), *own[1:]), tuple(map(len, own)))


def most_in_empty_slots(engine: Any) -> float:
    """The largest number, without its sign, in values, masters and states of this rank's slots without an expert."""
    from paceline.state.named import parts_of

    num_held = {p: len(layer.own_experts) for layer in engine.expert_layers.values() for p in layer.parameters()}
    rows = [parameter.detach()[held:] for parameter, held in num_held.items()]
    for owned in engine.optimizer.owned:
        held = max(num_held.get(owned.parameter, owned.stop) - owned.start, 0)
        rows += [part[held:] for part in parts_of(engine.optimizer, owned).values() if part.dim()]
    return max((float(found.abs().max()) for found in rows if found.numel()), default=0.0)


def shuffle(engine: Any, *, by_name: bool = False) -> dict[str, Any]:
    """Put the experts of every layer in an order of its own; on two ranks, each with a copy of one of the other's.

    Args:
        by_name: a layer has its order wherever it is; otherwise it follows from its place among those of its stage.
    """
    return engine.place_experts(shuffled(engine, by_name=by_name))


def shuffled(engine: Any, *, by_name: bool = False) -> dict[str, Any]:
    """The placements of :func:`shuffle`."""
    from paceline.planning.experts import Placement

    placements = {}
    for position, (name, layer) in enumerate(engine.expert_layers.items()):
        number = int(name.split(".")[2]) if by_name else position
        first, second = order(number, layer.num_experts)
        copies = ((*first, second[0]), (*second, first[1])) if layer.num_replicas else (first, second)
        placements[name] = Placement(copies, (len(first), len(second)))
    return placements
