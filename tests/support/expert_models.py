"""Tiny models with experts, of every kind that DeepSpeed spreads over ranks, and the training of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 2, 8, 97

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **LATENT}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 40},
    "qwen3_5_moe_text": {"num_experts": 4, "shared_expert_intermediate_size": 40},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "minimax_m3_vl_text": {"num_local_experts": 4},
}
"""Of every AutoEP preset."""

EIGHT = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3},
    "deepseek_v2": {"n_routed_experts": 8, "num_experts_per_tok": 3, "topk_group": 2, "n_shared_experts": 1},
    "deepseek_v3": {"n_routed_experts": 8, "num_experts_per_tok": 3, "topk_group": 2, "n_shared_experts": 1},
}
"""Changes for eight experts, and more than two for a token where the family is known for that."""

NATIVE = "deepspeed.moe"


def build(family: str, **changes: Any) -> nn.Module:
    """The same weights on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | changes))
    return AutoModelForCausalLM.from_config(config)


class NativeModel(nn.Module):
    """Embedding, ``deepspeed.moe.layer.MoE`` twice, head."""

    def __init__(self, ep: int, num_experts: int = 8, hidden: int = 16, **layer: Any) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList()
        for _ in range(2):
            expert = nn.Sequential(nn.Linear(hidden, 24), nn.GELU(), nn.Linear(24, hidden))
            self.layers.append(MoE(hidden, expert, num_experts, ep, **({"min_capacity": 2, "k": 2} | layer)))
        self.head = nn.Linear(hidden, VOCABULARY)
        first = torch.distributed.get_rank() % ep * (num_experts // ep)
        for moe in self.layers:  # other experts on other ranks, the same in whatever number of them
            for slot, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
                generator = torch.Generator().manual_seed(first + slot)
                for weight in expert.parameters():
                    weight.data.copy_(torch.randn(weight.shape, generator=generator) / 5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x, auxiliary = self.embedding(input_ids), 0.0
        for layer in self.layers:
            moved, l_aux, _ = layer(x)
            x, auxiliary = x + moved, auxiliary + l_aux
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + 0.01 * auxiliary
        return {"loss": loss}


def ds_config(zero: int, ep: int, accumulation: int = 1, *, autoep: bool = True, **changes: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": None,
    }
    return config | ({"expert_parallel": {"enabled": True, "autoep_size": ep}} if autoep else {}) | changes


def batch(step: int, rank: int) -> Tensor:
    """Skewed: low tokens are frequent."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.rand(BATCH, LENGTH, generator=generator) ** 2 * VOCABULARY).long()


def engine_for(family: str, config: dict[str, Any], *, checkpointing: bool = False, **layer: Any) -> Any:
    """What ``deepspeed.initialize`` makes of one of these models, as a user's script calls it."""
    import deepspeed

    model: Any = NativeModel(**layer) if family == NATIVE else build(family, **EIGHT[family], **layer)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, micro_steps: Iterable[int], rank: int | None = None) -> list[float]:
    """The losses of this rank, on its own data or on another one's; gates with noise draw the same in every run."""
    rank = torch.distributed.get_rank() if rank is None else rank
    losses = []
    for step in micro_steps:
        torch.manual_seed(1000 * step + rank)
        ids = batch(step, rank)
        loss = engine(input_ids=ids, labels=ids)["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def random_placement(seed: int, num_experts: int, num_ranks: int) -> Any:
    """Equally many experts on each rank, in any order; up to one more on any ranks, if their number is no multiple."""
    from paceline.planning.experts import Placement

    draw = random.Random(seed)
    experts = draw.sample(range(num_experts), num_experts)
    sizes = [len(held) for held in Placement.contiguous(num_experts, num_ranks).devices]
    draw.shuffle(sizes)
    return Placement(tuple(tuple(experts.pop() for _ in range(size)) for size in sizes))


def scatter_experts(engine: Any, seed: int, way: str = "place_experts") -> Any:
    """Another random placement for each layer; what the engine's method returns."""
    layers: Mapping[str, Any] = engine.expert_layers
    return getattr(engine, way)(
        {
            name: random_placement(100 * seed + number, layer.num_experts, layer.size)
            for number, (name, layer) in enumerate(layers.items())
        }
    )
