"""What the ranks of the distributed tests do: train a small pipeline, train alone, run the main job."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from typing import Any

import torch

STEPS = 8
LAYERS = 4
MICRO_BATCHES, BATCH, LENGTH = 8, 2, 16
"""Of a step, over all replicas together."""


def model_config(family: str = "llama", **changes: Any) -> Any:
    from transformers import AutoConfig

    sizes = {
        "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
        "qwen3": {"num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 8},
        "olmo2": {"num_key_value_heads": 2, "vocab_size": 98},
        "gpt_neox": {},
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


def ds_config(stages: int | None = None, **changes: Any) -> dict[str, Any]:
    """A DeepSpeed config for an own loop of four micro-batches a step; without ``stages``, no section of ours."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        **changes,
    }
    if stages is not None:
        config["paceline"] = {"pipeline": {"stages": stages}}
    return config


def train(
    stages: int,
    zero: int = 0,
    clipping: float = 0.0,
    kind: str = "padded",
    family: str = "llama",
    partition: Any = "uniform",
    steps: int = STEPS,
    more: dict[str, Any] | None = None,
    checkpointing: bool = False,
    schedule: Any = None,
    half_layers: bool = False,
    keys: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Runs on every rank: losses, norms and an evaluation of a pipeline; ``keys`` are more of ``"pipeline"``."""
    import paceline

    slices = (more or {}).get("tensor_parallel", {}).get("autotp_size", 1)
    replicas = int(os.environ["WORLD_SIZE"]) // stages // slices
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        gradient_clipping=clipping,
        zero_optimization={"stage": zero},
        paceline={
            "pipeline": {
                "stages": stages,
                "partition": partition,
                "schedule": schedule,
                "half_layers": half_layers,
                **(keys or {}),
            }
        },
        **(more or {}),
    )
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
    held = [own for model in engine.module.models for own in model.named_parameters()]
    state = {name: parameter.detach().clone() for name, parameter in held}
    return {"losses": losses, "norms": norms, "evaluation": evaluation, "state": state}


def assert_equal(runs: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Check that the ranks of :func:`train` have, together, bit for bit the losses and weights of others."""
    weights = {name: tensor for rank in wanted for name, tensor in rank["state"].items()}
    found = {name: tensor for rank in runs for name, tensor in rank["state"].items()}
    assert found.keys() == weights.keys()
    for rank in runs:
        assert rank["losses"] == wanted[0]["losses"]
    for name, tensor in found.items():
        assert torch.equal(tensor, weights[name]), name


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
                sums += float(model.loss_function(logits, batch["labels"], config.vocab_size, num_items_in_batch=1))
                tokens += count
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    evaluation = {"eval_loss": sums / tokens, "eval_tokens": tokens}
    return {"losses": losses, "norms": norms, "evaluation": evaluation, "state": state}


TINY = {
    "model_type": "llama",
    "config_overrides": "hidden_size=32,intermediate_size=64,num_hidden_layers=4,num_attention_heads=4,"
    "num_key_value_heads=2,max_position_embeddings=64",
    "block_size": 32,
    "max_steps": 4,
    "logging_steps": 2,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 2,
    "max_train_samples": 400,
    "max_eval_samples": 9,
}
TOKENIZER_TEXTS = 4
"""Of the embedded corpus. With all of it, training a tokenizer takes longer than everything else in such a job."""


def flags(**values: Any) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def finetune(argv: list[str]) -> tuple[int, str]:
    """The main job on this rank; its exit code and what it wrote to stderr."""
    from paceline.launch import inputs
    from paceline.launch.finetune import main

    inputs.TOKENIZER_TEXTS = TOKENIZER_TEXTS
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            code = main(argv)
        except SystemExit as exit:
            code = exit.code
    return code, errors.getvalue()


def finetune_as_a_process(argv: list[str], *unset: str) -> None:
    """The main job as ``python -m`` runs it, without some variables: this process ends with the job's status."""
    from paceline.launch import inputs

    inputs.TOKENIZER_TEXTS = TOKENIZER_TEXTS
    for name in unset:
        os.environ.pop(name, None)
    sys.argv = ["finetune", *argv]
    runpy.run_module("paceline.launch.finetune", run_name="__main__", alter_sys=True)


def wait_for_what_is_sent_ahead() -> None:
    """From now on whoever asks this rank whether values have come, which are sent beside steps, waits until they have.

    Steps of small models are short: a run might be over before.
    """
    from paceline.state.values_ahead import ValuesAhead

    ValuesAhead.is_done = property(lambda values: values.wait() is None)  # type: ignore[method-assign, assignment]
