"""Adapters (PEFT) and frozen parameters in pipelines: the numbers of one process, and no work for what is frozen."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.jobs import LAYERS, MICRO_BATCHES, TINY, ds_config, finetune, flags, model_config, step_batches
from support.ranks import OneAfterAnother, on, run_ranks

peft = pytest.importorskip("peft")

STEPS = 4
ROUNDING = {"losses": 1e-6, "norms": 1e-5}


# -- one process and several -------------------------------------------------------------------------------------------

FROZEN = {
    "first stage": r"embed|layers\.[01]\.",
    "all but the head": r"embed|layers",
    "all but the first layer": r"embed|layers\.[123]|norm\.|lm_head",
    "the middle": r"layers\.[12]\.",
    "embedding": r"embed",
    "a layer's parts": r"self_attn|embed|layers\.0",
}


def adapter_config(kind: str) -> Any:
    """PEFT's; adapters begin at random, so that every one has a gradient from the first step on."""
    attention, feedforward = ["q_proj", "v_proj"], ["gate_proj", "down_proj"]
    return {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=[*attention, *feedforward], init_lora_weights=False),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=attention, use_dora=True, init_lora_weights=False),
        "ia3": lambda: peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
        ),
        "lokr": lambda: peft.LoKrConfig(r=4, target_modules=attention, init_weights=False),
        "late lora": lambda: peft.LoraConfig(
            r=4, target_modules=attention, layers_to_transform=[2, 3], init_lora_weights=False
        ),
        "head": lambda: peft.LoraConfig(
            r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"], init_lora_weights=False
        ),
        "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "v_proj"], init_lora_weights=False),
        "biases": lambda: peft.LoraConfig(
            r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, bias="lora_only", init_lora_weights=False
        ),
    }[kind]()


def whole_model(family: str = "llama", frozen: str | None = None, adapters: str | None = None, **changes: Any) -> Any:
    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage

    model = load_stage(None, model_config(family, **changes), Cut.whole(LAYERS)).model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or not re.search(frozen, name))
    if adapters is None:
        return model
    torch.manual_seed(3)
    return peft.get_peft_model(model, adapter_config(adapters))


def train_alone(
    steps: int = STEPS, clipping: float = 0.0, save: str | None = None, model: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Stock PEFT, torch's optimizer, a plain loop."""
    model = (whole_model(**kwargs) if model is None else model).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    losses, norms = [], []
    for step in range(steps):
        batches = step_batches(step)
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            outputs = model(**batch, num_items_in_batch=tokens, use_cache=False)
            router = getattr(outputs, "aux_loss", None)
            coefficient = getattr(model.config, "router_aux_loss_coef", 0.0)
            extra = 0.0 if router is None else coefficient * router
            loss = outputs.loss - extra + extra / len(batches)
            loss.backward()
            total += float(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clipping or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    if save is not None:
        model.save_pretrained(save)
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    state = {name: p.detach().clone() for name, p in inner.named_parameters()}
    return {"losses": losses, "norms": norms, "state": state}


def make_engine(
    stages: int,
    *,
    zero: int = 0,
    clipping: float = 0.0,
    partition: Any = "uniform",
    schedule: Any = None,
    section: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    model: Any = None,
    **kwargs: Any,
) -> Any:
    import paceline

    slices = (more or {}).get("tensor_parallel", {}).get("autotp_size", 1)
    replicas = int(os.environ["WORLD_SIZE"]) // stages // slices
    pipeline = {"stages": stages, "partition": partition, "schedule": schedule}
    config = ds_config(
        gradient_accumulation_steps=MICRO_BATCHES // replicas,
        gradient_clipping=clipping,
        zero_optimization={"stage": zero},
        paceline={"pipeline": pipeline, **(section or {})},
        **(more or {}),
    )
    return paceline.initialize(model=whole_model(**kwargs) if model is None else model, config=config)[0]


def steps_of(engine: Any, first: int, last: int) -> tuple[list[float], list[float]]:
    replicas, replica = engine.dp_world_size, engine.grid.data_parallel_id
    losses, norms = [], []
    for step in range(first, last):
        losses.append(engine.train_batch(iter(step_batches(step)[replica::replicas])).item())
        norms.append(engine.grad_norm())
    return losses, norms


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for model in engine.module.models for name, p in model.named_parameters()}


def train(stages: int, steps: int = STEPS, export_to: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """On every rank: a pipeline's numbers, and what was computed, sent and kept for them."""
    from paceline.runtime.model_export import export

    engine = make_engine(stages, **kwargs)
    backwards, backward = [0], torch.autograd.backward

    def counted(*args: Any, **kwargs: Any) -> None:
        backwards[0] += 1
        backward(*args, **kwargs)

    saved = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[0] += 1
        return tensor

    torch.autograd.backward = counted
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses, norms = steps_of(engine, 0, steps)
    torch.autograd.backward = backward
    optimizer, lanes = engine.optimizer, engine.transport.lanes()
    found = {
        "losses": losses,
        "norms": norms,
        "state": state_of(engine),
        "backwards": backwards[0] / steps,
        "saved": saved[0],
        "gradients_in": len(lanes["gradients_in"].records) if "gradients_in" in lanes else 0,
        "gradients_out": len(lanes["gradients_out"].records) if "gradients_out" in lanes else 0,
        "states": sorted({owned.name for owned in optimizer.owned if optimizer.state.get(owned.master)}),
        "optimizer_bytes": optimizer.num_bytes(),
        "gradients": [n for n, p in engine.module.named_parameters() if p.grad is not None and not p.requires_grad],
        "trained": [engine.module.state_name(n) for n, p in engine.module.named_parameters() if p.requires_grad],
    }
    if export_to is not None:
        export(engine.module, export_to, engine.control)
    engine.destroy()
    return found


def assert_same(ranks: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for rank in ranks:
        for kind, relative in ROUNDING.items():
            differences = [abs(a - b) / abs(b) for a, b in zip(rank[kind], wanted[kind], strict=True)]
            assert max(differences) <= relative, (kind, differences)
        assert rank["losses"] == ranks[0]["losses"]
        for name, tensor in rank["state"].items():
            # Adam turns the rounding of near-zero gradients into steps of the learning rate.
            torch.testing.assert_close(tensor, wanted["state"][name], rtol=0, atol=2e-4, msg=name)


@dataclass(frozen=True)
class Compared:
    """A pipeline and the process that it is compared with.

    Args:
        both: what both are trained with.
        ours: what the pipeline has besides.
    """

    stages: int
    replicas: int = 1
    both: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)


UNTIED = {"tie_word_embeddings": False}
CLIPPED = {**UNTIED, "clipping": 0.5}
AT_THE_ENDS = {"embedding": [0, 1, 6], "all but the first layer": [0, 5, 6]}
BY_STAGES = ("first stage", "all but the head", "all but the first layer", "the middle", "a layer's parts")
METHODS = ("dora", "ia3", "lokr", "late lora")
COMPARED: dict[Any, Compared] = {
    **{frozen: Compared(3, both={"frozen": FROZEN[frozen], **UNTIED}) for frozen in BY_STAGES},
    **{
        ("replicas", zero): Compared(2, 2, {"frozen": FROZEN["first stage"], **CLIPPED}, {"zero": zero})
        for zero in (0, 1)
    },
    **{
        (frozen, "at an end"): Compared(2, 1, {"frozen": FROZEN[frozen], **UNTIED}, {"partition": parts})
        for frozen, parts in AT_THE_ENDS.items()
    },
    "kfkb": Compared(2, 1, {"frozen": FROZEN["first stage"], **UNTIED}, {"schedule": {"type": "kfkb", "k": 2}}),
    "tied": Compared(2, both={"frozen": r"embed|layers\.[01]"}),
    **{
        ("lora", stages, replicas): Compared(
            stages, replicas, {"adapters": "lora", "clipping": 0.5}, {"zero": replicas - 1}
        )
        for stages, replicas in [(2, 1), (2, 2)]
    },
    **{kind: Compared(2, both={"adapters": kind}) for kind in METHODS},
    **{
        kind: Compared(3, 1, {"adapters": kind, **UNTIED}, {"partition": [0, 1, 5, 6]})
        for kind in ("head", "embedding")
    },
    "gpt2": Compared(3, both={"family": "gpt2", "adapters": "biases"}),
    "mixtral": Compared(2, both={"family": "mixtral", "adapters": "late lora"}),
}
OURS = OneAfterAnother(
    train,
    {name: on(case.stages * case.replicas, case.stages, **case.both, **case.ours) for name, case in COMPARED.items()},
)
THEIRS = OneAfterAnother(train_alone, {str(case.both): on(1, **case.both) for case in COMPARED.values()}, at_once=20)


@lru_cache
def alone(**both: Any) -> dict[str, Any]:
    return run_ranks(train_alone, 1, **both)[0]


def reference(**both: Any) -> dict[str, Any]:
    return THEIRS[str(both)][0] if str(both) in THEIRS.cases else alone(**both)


def assert_as_alone(name: Any) -> None:
    assert_same(OURS[name], reference(**COMPARED[name].both))


# -- frozen parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", BY_STAGES)
def test_frozen_parameters_change_no_number(frozen: str) -> None:
    assert_as_alone(frozen)


@pytest.mark.parametrize("zero", [0, 1])
def test_frozen_stages_with_replicas_and_zero(zero: int) -> None:
    assert_as_alone(("replicas", zero))


@pytest.mark.parametrize("frozen", AT_THE_ENDS)
def test_a_frozen_stage_of_any_shape(frozen: str) -> None:
    """A stage of the embedding alone, and one of norm and head alone."""
    assert_as_alone((frozen, "at an end"))


def test_frozen_stages_do_nothing_that_is_not_needed() -> None:
    """Three stages; the first two are frozen, then the last two, then the middle one."""
    changes = {"tie_word_embeddings": False, "partition": [0, 2, 4, 6]}
    first, second, third = run_ranks(train, 3, 3, frozen=r"embed|layers\.[012]\.", **changes)
    for stage in (first, second):
        assert stage["backwards"] == stage["saved"] == stage["optimizer_bytes"] == 0
        assert not stage["states"]
        assert stage["gradients_in"] == stage["gradients_out"] == 0
    assert third["backwards"] == MICRO_BATCHES
    assert third["gradients_out"] == 0
    assert third["states"] == sorted(third["trained"])

    first, second, third = run_ranks(train, 3, 3, frozen=FROZEN["all but the first layer"], **changes)
    assert first["states"] == sorted(first["trained"])
    assert [stage["backwards"] for stage in (first, second, third)] == [MICRO_BATCHES] * 3
    assert [stage["gradients_in"] for stage in (first, second, third)] == [MICRO_BATCHES * STEPS] * 2 + [0]
    for stage in (second, third):  # they hand on gradients of hidden states, and have none of their own
        assert stage["optimizer_bytes"] == 0
        assert not stage["states"]
        assert not stage["gradients"]


def test_frozen_stages_in_another_schedule() -> None:
    assert_as_alone("kfkb")


def test_a_frozen_weight_that_is_tied() -> None:
    assert_as_alone("tied")


def plain(stages: int, frozen: tuple[int, ...]) -> dict[str, Any]:
    """Six linear layers of a module that is nobody's model; between them goes a tensor that has no gradient too."""
    from deepspeed.pipe import PipelineModule
    from torch import nn

    import paceline

    class Layer(nn.Linear):
        def forward(self, pair: Any) -> Any:  # type: ignore[override]
            stream, scale = pair if isinstance(pair, tuple) else (pair, torch.full((1,), 2.0))
            return super().forward(stream).tanh() * scale, scale

    paceline.runtime.initialize.start_distributed()
    torch.manual_seed(0)
    layers = [Layer(8, 8) for _ in range(6)]
    for number in frozen:
        layers[number].requires_grad_(False)
    module = PipelineModule(layers, num_stages=stages, loss_fn=lambda out, label: (out[0] - label).square().mean())
    engine, *_ = paceline.initialize(model=module, config=ds_config())
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(2, 8, generator=generator), torch.randn(2, 8, generator=generator)) for _ in range(20)]
    losses, norms, batches = [], [], iter(data)
    for _ in range(5):
        losses.append(engine.train_batch(batches).item())
        norms.append(engine.grad_norm())
    return {"losses": losses, "norms": norms, "trained": len(engine.optimizer.owned)}


@pytest.mark.parametrize("frozen", [(0, 1, 2, 3), (3, 4, 5)])
def test_frozen_layers_of_any_pipeline_module(frozen: tuple[int, ...]) -> None:
    whole = run_ranks(plain, 1, 1, frozen)[0]
    for stages in (2, 3):
        ranks = run_ranks(plain, stages, stages, frozen)
        for rank in ranks:
            assert rank["losses"] == whole["losses"]
            assert rank["norms"] == pytest.approx(whole["norms"], rel=1e-6)
        assert sum(rank["trained"] for rank in ranks) == whole["trained"] == 2 * (6 - len(frozen))


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (2, 2)])
def test_lora_is_that_of_one_process(stages: int, replicas: int) -> None:
    assert_as_alone(("lora", stages, replicas))
    for rank in OURS["lora", stages, replicas]:
        assert rank["trained"]
        assert all(re.search(r"\.lora_[AB]\.default\.weight$", name) for name in rank["trained"])
        assert set(rank["states"]) <= set(rank["trained"])
        assert not rank["gradients"]


@pytest.mark.parametrize("kind", METHODS)
def test_other_methods(kind: str) -> None:
    assert_as_alone(kind)


@pytest.mark.parametrize("kind", ["head", "embedding"])
def test_adapters_of_embedding_and_head(kind: str) -> None:
    """On stages of their own, too."""
    assert_as_alone(kind)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_families(family: str) -> None:
    """Tied embeddings with Conv1D, whose weights lie the other way; a router's loss, whose sums ride along."""
    assert_as_alone(family)


def test_frozen_layers_before_the_first_adapter_cost_nothing() -> None:
    first, second = run_ranks(train, 2, 2, adapters="late lora", partition=[0, 3, 6])
    assert first["backwards"] == first["saved"] == first["optimizer_bytes"] == first["gradients_in"] == 0
    assert second["gradients_out"] == 0
    assert second["backwards"] == MICRO_BATCHES
    assert second["states"] == sorted(second["trained"])


# -- files -------------------------------------------------------------------------------------------------------------


def resumed(folder: str, stages: int, trained_only: bool, **kwargs: Any) -> dict[str, Any]:
    """Steps 0 and 1, a checkpoint, the other steps; and an engine that has seen nothing, from the checkpoint on."""
    engine = make_engine(stages, **kwargs)
    steps_of(engine, 0, 2)
    engine.save_checkpoint(folder, tag="half", exclude_frozen_parameters=trained_only)
    whole = steps_of(engine, 2, STEPS), state_of(engine)
    other = make_engine(stages, **kwargs)
    other.load_checkpoint(folder)
    again = steps_of(other, 2, STEPS), state_of(other)
    return {"whole": whole, "again": again}


def loaded(folder: str, stages: int, **kwargs: Any) -> dict[str, Any]:
    engine = make_engine(stages, **kwargs)
    engine.load_checkpoint(folder)
    losses, norms = steps_of(engine, 2, STEPS)
    return {"losses": losses, "norms": norms, "state": state_of(engine)}


@pytest.mark.parametrize("trained_only", [True, False])
def test_checkpoints_resume_in_every_bit_and_in_every_shape(trained_only: bool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for rank in run_ranks(resumed, 4, folder, 2, trained_only, adapters="dora", zero=1):
        (losses, state), (losses_again, state_again) = rank["whole"], rank["again"]
        assert losses == losses_again
        assert all(torch.equal(state[name], state_again[name]) for name in state)
    wanted = reference(adapters="dora")
    wanted = {**wanted, "losses": wanted["losses"][2:], "norms": wanted["norms"][2:]}
    assert_same(run_ranks(loaded, 3, folder, 3, adapters="dora"), wanted)
    from paceline.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(tmp_path / "half")
    name = "model.layers.0.self_attn.q_proj."
    assert checkpoint.kinds(f"{name}lora_A.default.weight")
    assert bool(checkpoint.kinds(f"{name}base_layer.weight")) is not trained_only
    checkpoint.close()


# PEFT 0.21 asks for it under the name that transformers 5.23 warns of.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dora", {}),
        ("ia3", {}),
        ("head", {"tie_word_embeddings": False}),
        ("embedding", {"tie_word_embeddings": False}),
        ("biases", {"family": "gpt2"}),
    ],
)
def test_export_is_the_file_that_peft_writes(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The same names and settings as ``save_pretrained`` of one process; loaded with PEFT it is the trained model."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base, stock, ours = (str(tmp_path / name) for name in ("base", "stock", "ours"))
    whole_model(**changes).save_pretrained(base)
    run_ranks(train_alone, 1, 2, adapters=kind, save=stock, **changes)
    ranks = run_ranks(train, 2, 2, 2, adapters=kind, export_to=ours, **changes)
    found, wanted = (load_file(f"{folder}/adapter_model.safetensors") for folder in (ours, stock))
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=2e-4, msg=name)
    configs = [json.loads((Path(folder) / "adapter_config.json").read_text()) for folder in (ours, stock)]
    for config in configs:  # PEFT has sets of names
        config.update({key: sorted(value) for key, value in config.items() if isinstance(value, list)})
    assert configs[0] == configs[1]
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), ours)
    state = {name: tensor for rank in ranks for name, tensor in rank["state"].items()}
    for name, tensor in model.get_base_model().named_parameters():
        assert torch.equal(tensor, state[name]), name


def with_more_tokens(stages: int, base: str, folder: str, **pipeline: Any) -> None:
    """Adapters to a model that has got rows for new tokens: PEFT's files, those of the run, and a checkpoint."""
    from transformers import AutoModelForCausalLM

    from paceline.runtime.model_export import export

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(104, mean_resizing=False)
    model = peft.get_peft_model(model, adapter_config("lora"))
    if os.environ["RANK"] == "0":
        model.save_pretrained(f"{folder}/stock")
    engine = make_engine(stages, model=model, section={"pipeline": {"stages": stages, **pipeline}})
    export(engine.module, f"{folder}/live", engine.control)
    engine.save_checkpoint(folder, "checkpoint")


@pytest.mark.parametrize(
    ("stages", "is_tied", "pipeline"),
    [(1, True, {}), (2, False, {"head_slices": 4, "partition": [0, 7, 9]})],
    ids=["tied", "slices"],
)
def test_an_embedding_with_new_rows_is_exported_beside_adapters(
    stages: int, is_tied: bool, pipeline: dict[str, Any], tmp_path: Path
) -> None:
    """PEFT writes embedding and head where their size is not the base model's: a tied weight by both names."""
    from paceline.checkpoint.export import export_checkpoint

    base = str(tmp_path / "base")
    whole_model(tie_word_embeddings=is_tied).save_pretrained(base)
    run_ranks(with_more_tokens, stages, stages, base, str(tmp_path), **pipeline)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported")
    wanted = weights_of(tmp_path / "stock")
    assert wanted["base_model.model.lm_head.weight"].shape == (104, 32)
    for folder in ("live", "exported"):
        found = weights_of(tmp_path / folder)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), (folder, name)


def moved(partitions: list[list[int]], **kwargs: Any) -> dict[str, Any]:
    """Every step in another partition."""
    engine = make_engine(len(partitions[0]) - 1, partition=partitions[0], **kwargs)
    losses, norms = [], []
    for step in range(STEPS):
        engine.repartition(partitions[step % len(partitions)])
        one, norm = steps_of(engine, step, step + 1)
        losses += one
        norms += norm
    return {"losses": losses, "norms": norms, "state": state_of(engine), "moves": len(engine.migrations)}


@pytest.mark.parametrize(("kind", "zero"), [("dora", 1), ("late lora", 0)])
def test_adapters_move_with_their_layers(kind: str, zero: int) -> None:
    """Also to and from stages that have none."""
    ranks = run_ranks(moved, 2, [[0, 3, 6], [0, 2, 6], [0, 4, 6]], adapters=kind, zero=zero)
    assert_same(ranks, reference(adapters=kind))
    assert ranks[0]["moves"] == STEPS - 1


SLICES = {"tensor_parallel": {"autotp_size": 2}}


def test_lora_in_slices(tmp_path: Path) -> None:
    """Two ranks a stage: numbers, the file that is exported, and layers that move."""
    from safetensors.torch import load_file

    stock, ours = (str(tmp_path / name) for name in ("stock", "ours"))
    (wanted,) = run_ranks(train_alone, 1, adapters="lora", clipping=0.5, save=stock)
    stayed = run_ranks(train, 4, 2, adapters="lora", clipping=0.5, more=SLICES, export_to=ours)
    went = run_ranks(moved, 4, [[0, 3, 6], [0, 2, 6], [0, 4, 6]], adapters="lora", clipping=0.5, more=SLICES)
    for rank in (*stayed, *went):
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=4e-6)
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=4e-5)
    assert [rank["losses"] for rank in went] == [rank["losses"] for rank in stayed]
    found, whole = (load_file(f"{folder}/adapter_model.safetensors") for folder in (ours, stock))
    assert found.keys() == whole.keys()
    for name in whole:
        torch.testing.assert_close(found[name], whole[name], rtol=0, atol=2e-4, msg=name)


def refused_in_slices(kind: str) -> str:
    with pytest.raises(ValueError, match="cannot have its layers in slices") as raised:
        make_engine(1, adapters=kind, more=SLICES)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["dora", "ia3"])
def test_other_adapters_are_not_sliced(kind: str) -> None:
    (message, other) = run_ranks(refused_in_slices, 2, kind)
    assert message == other
    assert "and a torch.nn.Linear can be cut, or one with plain LoRA; leave tensor_parallel" in message


# -- together with the rest --------------------------------------------------------------------------------------------


def test_activation_checkpointing_changes_nothing() -> None:
    more = {"pipeline": {"activation_checkpoint_interval": 1}}
    assert_same(run_ranks(train, 2, 2, adapters="late lora", more=more), reference(adapters="late lora"))


def test_bf16_follows_fp32() -> None:
    """Masters of the adapters alone are fp32."""
    more = {"bf16": {"enabled": True}}
    ranks = run_ranks(train, 4, 2, adapters="lora", zero=1, clipping=0.5, more=more)
    wanted = reference(adapters="lora", clipping=0.5)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=2e-3)
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=5e-2)
        assert all(tensor.dtype == torch.bfloat16 for tensor in rank["state"].values())
        assert set(rank["states"]) <= set(rank["trained"])
    whole = sum(t.numel() for name, t in wanted["state"].items() if "lora" in name)
    # Gradients in fp32 lie in buckets on both replicas; masters and two moments are there once.
    assert sum(rank["optimizer_bytes"] for rank in ranks) <= 1.1 * whole * (2 * 4 + 3 * 4)


@pytest.mark.parametrize(
    "schedule", [{"type": "multidirection", "staleness": 0}, {"type": "multidirection"}, {"type": "one_direction"}]
)
@pytest.mark.parametrize("kwargs", [{"adapters": "late lora"}, {"frozen": FROZEN["first stage"]}], ids=str)
def test_schedules_without_a_flush(schedule: dict[str, Any], kwargs: dict[str, Any]) -> None:
    kwargs = {**kwargs, "tie_word_embeddings": False}
    ranks = run_ranks(train, 2, 2, schedule=schedule, **kwargs)
    wanted = reference(**kwargs)
    if schedule.get("staleness") == 0:
        assert ranks[0]["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        return
    assert ranks[0]["losses"][0] == pytest.approx(wanted["losses"][0], rel=1e-6)  # nothing is late yet
    assert ranks[0]["losses"] == pytest.approx(wanted["losses"], rel=1e-2)
    assert ranks[0]["losses"] != wanted["losses"]


def test_four_stages_in_two_directions() -> None:
    """Every rank has two stages of the model that was given, and owners are found among those that have adapters."""
    schedule = {"type": "multidirection", "staleness": 0}
    kwargs = {"adapters": "late lora", "tie_word_embeddings": False}
    assert_same(run_ranks(train, 4, 4, schedule=schedule, **kwargs), reference(**kwargs))


def averaged(**kwargs: Any) -> dict[str, Any]:
    """What islands exchange, by name: brought together on the first rank, changed, and put back."""
    from paceline.averaging.masters_by_name import PipelineMasters

    engine = make_engine(2, **kwargs)
    steps_of(engine, 0, 1)
    masters, before = PipelineMasters(engine.control, engine.module, engine.optimizer), state_of(engine)
    names = sorted(masters.numels())
    flat = masters.gather(names)
    masters.scatter(names, None if flat is None else [tensor + 1 for tensor in flat])
    changed = [name for name, tensor in state_of(engine).items() if not torch.equal(tensor, before[name])]
    return {"names": names, "changed": changed}


def test_islands_average_adapters_alone() -> None:
    ranks = run_ranks(averaged, 4, adapters="late lora", zero=1, partition=[0, 3, 6])
    names = ranks[0]["names"]
    assert len(names) == 2 * 2 * 2
    assert all("lora" in name for name in names)
    assert sorted({name for rank in ranks for name in rank["changed"]}) == names


def natural(**kwargs: Any) -> dict[str, Any]:
    engine = make_engine(2, section={"natural_gradient": {}}, **kwargs)
    losses, _ = steps_of(engine, 0, STEPS)
    return {"losses": losses, "names": engine.natural_gradient.names}


def test_natural_gradients_of_adapters() -> None:
    first, second = run_ranks(natural, 2, adapters="late lora", partition=[0, 3, 6])
    assert first["names"] == []
    assert len(second["names"]) == 8
    assert all(name.endswith(("lora_A.default.weight", "lora_B.default.weight")) for name in second["names"])
    assert first["losses"] != reference(adapters="late lora")["losses"]


# -- what is refused ---------------------------------------------------------------------------------------------------


def attempted(kind: str) -> None:
    base = whole_model(tie_word_embeddings=kind in ("tied head", "tied embedding"))
    if kind == "quantised":
        base.config.quantization_config = {"quant_method": "bitsandbytes"}
        make_engine(2, model=base)
    config = {
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, tinit=1, tfinal=2),
        "vera": lambda: peft.VeraConfig(target_modules=["q_proj"]),
        "tied head": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "tied embedding": lambda: peft.LoraConfig(target_modules=["q_proj", "embed_tokens"]),
        "replication": lambda: peft.LoraConfig(target_modules=["q_proj"], layer_replication=[[0, 3], [1, 4]]),
    }.get(kind, lambda: peft.LoraConfig(target_modules=["q_proj"]))()
    model = peft.get_peft_model(base, config)
    if kind == "two":
        model.add_adapter("other", config)
    if kind == "merged":
        model.merge_adapter()
    more = {"expert_parallel": {"enabled": True, "autoep_size": 2}} if kind == "experts" else None
    if kind == "experts":
        model = peft.get_peft_model(whole_model("mixtral"), config)
    make_engine(1 if kind == "experts" else 2, model=model, more=more)


REFUSED = {
    "prompt": r"peft_type PROMPT_TUNING cannot be in a pipeline: it puts virtual tokens .*; choose a method whose",
    "prefix": r"peft_type PREFIX_TUNING cannot be in a pipeline: it puts virtual tokens",
    "p-tuning": r"peft_type P_TUNING cannot be in a pipeline: it puts virtual tokens",
    "adalora": r"peft_type ADALORA cannot be in a pipeline: it changes the forward of the whole model or its loss",
    "vera": r"peft_type VERA cannot be in a pipeline: its layers share weights",
    "tied head": r"the adapter 'default' is in lm_head, and the model ties embedding and head .*choose other",
    "tied embedding": r"the adapter 'default' is in model\.embed_tokens, and the model ties embedding and head",
    "replication": r"peft_type LORA cannot be in a pipeline: its layers share weights",
    "two": r"the model has the adapters \['default', 'other'\]: a pipeline trains and writes one; delete",
    "merged": r"the adapter 'default' is merged into model\.layers\.0\.self_attn\.q_proj: unmerge it",
    "experts": r"the model has LORA adapters and expert_parallel\.autoep_size is 2: .*leave expert_parallel out",
    "quantised": r"the model's weights are quantised \(bitsandbytes\), and quantised weights cannot be trained: add",
}


def attempts() -> dict[str, str]:
    messages = {}
    for kind in REFUSED:
        try:
            attempted(kind)
        except ValueError as error:
            messages[kind] = str(error)
    return messages


def test_what_cannot_be_trained_is_refused() -> None:
    for messages in run_ranks(attempts, 2):
        for kind, expected in REFUSED.items():
            assert re.match(expected, messages[kind]), messages[kind]


# -- the main job ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, as the job writes it."""
    folder = tmp_path_factory.mktemp("base") / "model"
    code, errors = run_ranks(finetune, 1, flags(**TINY | {"max_steps": 1}, output_dir=folder))[0]
    assert code == 0, errors
    return folder


def adapter_flags(base: Path, output: Path, **values: Any) -> list[str]:
    own = {k: v for k, v in TINY.items() if k not in ("model_type", "config_overrides")}
    text = base.parent / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 4000)
    own |= {"model_name_or_path": base, "train_file": text, "output_dir": output, "use_peft": True, "lora_r": 4}
    own["lr_scheduler_type"] = "constant"  # a run that is cut in two knows its first half only
    return [*flags(**own | values), "--lora_target_modules", "q_proj", "down_proj"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_job_trains_resumes_and_writes_adapters(base: Path, tmp_path: Path) -> None:
    """The same adapters from one stage and two, and from a run that was cut in two."""
    from peft import AutoPeftModelForCausalLM

    more = {"lora_dropout": 0.0, "max_grad_norm": 0.0, "gradient_accumulation_steps": 6}
    for stages in (1, 2):
        code, errors = run_ranks(finetune, stages, adapter_flags(base, tmp_path / f"{stages}", **more))[0]
        assert code == 0, errors
        assert "adapter written to" in errors
    one, other = (weights_of(tmp_path / f"{stages}") for stages in (1, 2))
    assert len(one) == 4 * 2 * 2
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=2e-4, msg=name)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "2")
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (4, 32, str(base))
    assert (tmp_path / "2" / "tokenizer.json").exists()
    assert not (tmp_path / "2" / "config.json").exists()

    half = tmp_path / "half"
    run_ranks(finetune, 2, adapter_flags(base, half, **more | {"max_steps": 2, "save_steps": 2}))
    resumed = adapter_flags(base, half, **more, resume_from_checkpoint="true", overwrite_output_dir=True)
    code, errors = run_ranks(finetune, 2, resumed)[0]
    assert code == 0, errors
    for name, tensor in weights_of(half).items():
        assert torch.equal(tensor, other[name]), name

    from paceline.checkpoint.export import export_checkpoint

    export_checkpoint(half / "checkpoint-2", tmp_path / "exported")
    export_checkpoint(half / "checkpoint-4", tmp_path / "exported")  # over it
    exported = weights_of(tmp_path / "exported")
    assert exported.keys() == one.keys()
    assert all(torch.equal(tensor, weights_of(half)[name]) for name, tensor in exported.items())
    assert AutoPeftModelForCausalLM.from_pretrained(tmp_path / "exported").peft_config["default"].r == 4


# -- quantised weights -------------------------------------------------------------------------------------------------


def quantised(bits: int, stages: int, base: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if bits == 4:
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    else:
        how = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=how, device_map="cpu")
    torch.manual_seed(3)
    model = peft.get_peft_model(model, adapter_config("lora"))
    if stages == 0:  # one process and a plain loop
        return train_alone(model=model)
    return train(stages, model=model)


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_on_quantised_weights(bits: int, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = str(tmp_path / "base")
    whole_model(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    wanted = run_ranks(quantised, 1, bits, 0, folder)[0]
    ranks = run_ranks(quantised, 2, bits, 2, folder)
    assert_same(ranks, wanted)
    for rank in ranks:
        assert any(not tensor.is_floating_point() for tensor in rank["state"].values())
    argv = adapter_flags(base, tmp_path / "job", **{f"load_in_{bits}bit": True})
    code, errors = run_ranks(finetune, 2, argv)[0]
    assert code == 0, errors
    assert len(weights_of(tmp_path / "job")) == 4 * 2 * 2
