"""A pipeline trains exactly as a single process does: stages × replicas × ZeRO, with padding, masks and tied weights."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import pytest
import torch
from ranks import run_ranks

STEPS = 20
LAYERS = 4
MICRO_BATCHES, BATCH, LENGTH = 8, 2, 16
"""Of a step, over all replicas together."""


def model_config(family: str = "llama", **changes: Any) -> Any:
    from transformers import AutoConfig

    sizes = {
        "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
        "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_inner": 64},
        "mixtral": {
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.1,
        },
    }[family]
    common = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 97}
    if family != "gpt2":
        common["intermediate_size"] = 64
    return AutoConfig.for_model(family, **(common | sizes | changes))


def step_batches(step: int, kind: str = "padded") -> list[dict[str, torch.Tensor]]:
    """The micro-batches of one step; their label tokens differ widely, and one has none."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for index in range(MICRO_BATCHES):
        ids = torch.randint(3, 97, (BATCH, LENGTH), generator=generator)
        labels = ids.clone()
        batch = {"input_ids": ids, "labels": labels}
        if kind == "padded":
            used = torch.randint(2, LENGTH, (BATCH,), generator=generator)
            mask = (torch.arange(LENGTH) < used[:, None]).long()
            labels[mask == 0] = -100
            batch["attention_mask"] = mask
        elif kind == "packed":
            cut = int(torch.randint(3, LENGTH - 3, (1,), generator=generator))
            positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
            batch["position_ids"] = positions.expand(BATCH, -1).contiguous()
            labels[:, 0] = labels[:, cut] = -100
        elif kind == "prompt":
            labels[:, : int(torch.randint(1, LENGTH, (1,), generator=generator))] = -100
        elif kind == "ragged":
            length = LENGTH - 2 * index % 7
            batch = {name: tensor[:, :length].contiguous() for name, tensor in batch.items()}
        if index == 3 and kind != "packed":
            batch["labels"] = torch.full_like(batch["labels"], -100)
        batches.append(batch)
    return batches


def train(
    stages: int,
    zero: int = 0,
    clipping: float = 0.0,
    kind: str = "padded",
    family: str = "llama",
    partition: Any = "uniform",
    steps: int = STEPS,
    ds_config: dict[str, Any] | None = None,
    checkpointing: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """Runs on every rank: losses, norms and an evaluation of a pipeline."""
    import paceline

    replicas = int(os.environ["WORLD_SIZE"]) // stages
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES // replicas,
        "gradient_clipping": clipping,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "zero_optimization": {"stage": zero},
        "steps_per_print": None,
        "paceline": {"pipeline": {"stages": stages, "partition": partition}},
        **(ds_config or {}),
    }
    if checkpointing:
        config["pipeline"] = {"activation_checkpoint_interval": 1}
    engine, *_ = paceline.initialize(model=model_config(family, **changes), config=config)
    replica = engine.grid.data_parallel_id
    losses, norms = [], []
    for step in range(steps):
        losses.append(engine.train_batch(iter(step_batches(step, kind)[replica::replicas])).item())
        norms.append(engine.grad_norm())
    held_out = step_batches(steps, kind)[: MICRO_BATCHES - 1]  # replicas get different numbers of micro-batches
    evaluation = engine.evaluate(held_out[replica::replicas])
    state = {name: p.detach().clone() for name, p in engine.module.stage.model.named_parameters()}
    return {"losses": losses, "norms": norms, "evaluation": evaluation, "state": state}


def train_alone(
    clipping: float = 0.0, kind: str = "padded", family: str = "llama", steps: int = STEPS, **changes: Any
) -> dict[str, Any]:
    """The unsplit Hugging Face model in a plain loop: the reference. Runs as the only rank of its own world."""
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage

    config = model_config(family, **changes)
    model = load_stage(None, config, Cut.whole(LAYERS)).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses, norms = [], []
    for step in range(steps):
        batches = step_batches(step, kind)
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            # Hugging Face's own forward, token-weighted over the whole step; its router loss is one a micro-batch.
            outputs = model(**batch, num_items_in_batch=tokens, use_cache=False)
            router = getattr(outputs, "aux_loss", None)
            coefficient = getattr(config, "router_aux_loss_coef", 0.0) if router is not None else 0.0
            extra = coefficient * (router if router is not None else 0.0)
            loss = outputs.loss - extra + extra / len(batches)
            loss.backward()
            total += float(loss)
        if clipping:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    model.eval()
    with torch.no_grad():
        held_out = step_batches(steps, kind)[: MICRO_BATCHES - 1]
        sums = tokens = 0
        for batch in held_out:
            count = int((batch["labels"][:, 1:] != -100).sum())
            if count:
                logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
                sums += float(model.loss_function(logits, batch["labels"], 97, num_items_in_batch=1))
                tokens += count
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    evaluation = {"eval_loss": sums / tokens, "eval_tokens": tokens}
    return {"losses": losses, "norms": norms, "evaluation": evaluation, "state": state}


@lru_cache
def reference(**kwargs: Any) -> dict[str, Any]:
    return run_ranks(train_alone, 1, **kwargs)[0]


def assert_close(losses: list[float], wanted: list[float], relative: float = 1e-6) -> None:
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    assert max(differences) <= relative, f"step {differences.index(max(differences))}: {max(differences):.2e}"


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_pipeline_is_single_process(stages: int, replicas: int, zero: int) -> None:
    ranks = run_ranks(train, stages * replicas, stages, zero=zero, clipping=0.5)
    wanted = reference(clipping=0.5)
    for rank in ranks:
        assert_close(rank["losses"], wanted["losses"])
        assert_close(rank["norms"], wanted["norms"], 1e-5)
        assert rank["losses"] == ranks[0]["losses"]
        assert_close([rank["evaluation"]["eval_loss"]], [wanted["evaluation"]["eval_loss"]])
        assert rank["evaluation"]["eval_tokens"] == wanted["evaluation"]["eval_tokens"]
    # Adam turns the rounding of near-zero gradients into steps of the learning rate; weights agree to a few of those.
    for rank in ranks:
        for name, tensor in rank["state"].items():
            torch.testing.assert_close(tensor, wanted["state"][name], rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize(("replicas", "zero"), [(1, 0), (2, 0), (1, 1), (2, 1)])
def test_stage_counts_agree_bitwise(replicas: int, zero: int) -> None:
    """Without clipping no sum runs over stages, so nothing may differ: not the losses, not a bit of any weight.

    Weights are not tied here: of a tied weight the head's and the embedding's gradients are two sums on two stages.
    """
    runs = [
        run_ranks(train, stages * replicas, stages, zero=zero, tie_word_embeddings=False) for stages in (1, 2, 3, 4)
    ]
    whole = runs[0][0]
    for run in runs[1:]:
        for rank in run:
            assert rank["losses"] == whole["losses"]
            for name, tensor in rank["state"].items():
                assert torch.equal(tensor, whole["state"][name]), name


@pytest.mark.parametrize("kind", ["prompt", "packed", "ragged"])
def test_loss_is_exact_for_every_kind_of_batch(kind: str) -> None:
    ranks = run_ranks(train, 4, 2, kind=kind, steps=5)
    assert_close(ranks[0]["losses"], reference(kind=kind, steps=5)["losses"])


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
@pytest.mark.parametrize("stages", [2, 3])
def test_other_families(family: str, stages: int) -> None:
    """Position embeddings that are added; the router's auxiliary loss, whose sums ride along with the activations."""
    ranks = run_ranks(train, stages, stages, family=family, steps=5)
    wanted = reference(family=family, steps=5)
    assert_close(ranks[0]["losses"], wanted["losses"])
    assert_close([ranks[0]["evaluation"]["eval_loss"]], [wanted["evaluation"]["eval_loss"]])


def test_activation_checkpointing_changes_nothing() -> None:
    plain, checkpointed = (run_ranks(train, 2, 2, steps=5, checkpointing=on)[0] for on in (False, True))
    assert plain["losses"] == checkpointed["losses"]


@pytest.mark.parametrize("partition", [[0, 1, 6], [0, 5, 6], "parameters", "type:LlamaDecoderLayer"])
def test_any_partition(partition: Any) -> None:
    """Also a stage that holds nothing but the embedding, and one that holds nothing but norm and head."""
    ranks = run_ranks(train, 2, 2, partition=partition, steps=5)
    assert_close(ranks[0]["losses"], reference(steps=5)["losses"])


@pytest.mark.parametrize("zero", [0, 1])
def test_bf16_follows_fp32(zero: int) -> None:
    ranks = run_ranks(train, 2, 2, zero=zero, clipping=0.5, ds_config={"bf16": {"enabled": True}})
    wanted = reference(clipping=0.5)
    assert_close(ranks[0]["losses"], wanted["losses"], 2e-3)
    assert_close(ranks[0]["norms"], wanted["norms"], 5e-2)
    assert ranks[0]["losses"] != wanted["losses"]
