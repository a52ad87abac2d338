"""Measuring and counting what the items of a model cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    FalconConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
)

from paceline.hf import layer_profile as module
from paceline.hf.activations import count_items
from paceline.hf.anatomy import anatomy_of
from paceline.hf.layer_kinds import layer_kinds
from paceline.hf.layer_profile import Bench, fingerprint, profile_items
from paceline.hf.peft import trained_share, without_memory
from paceline.hf.stage import Cut
from paceline.hf.weights import skeleton
from paceline.runtime.module import items_of

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "gpt2": GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=97, bos_token_id=1, eos_token_id=2, **NO_DROPOUT),
    "mixtral": MixtralConfig(**TINY, num_local_experts=4, output_router_logits=True),
    "gemma3": Gemma3TextConfig(**TINY, head_dim=8, layer_types=SLIDING, sliding_window=8),
    "gpt_neox": GPTNeoXConfig(**TINY),  # rotates a part of its queries, and copies what attention puts out
    "falcon": FalconConfig(**TINY),  # one head of keys for all queries, which no fused kernel takes
}
SHAPE: dict[str, Any] = {"dtype": torch.float32, "micro_batch_size": 2, "sequence_length": 32}
CPU = torch.device("cpu")


class CountingOperations(TorchDispatchMode):
    """Work in operations, for a clock that no busy machine disturbs."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", CONFIGS)
def test_every_item_is_measured(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, operations = CONFIGS[family], CountingOperations()
    monkeypatch.setattr(module.Clock, "now", lambda self: float(operations.count))
    with operations:
        items = profile_items(config, device=CPU, repeats=2, **SHAPE)
    model = skeleton(config)
    own = items_of(model, anatomy_of(model))
    assert [item.name for item in items] == [item.name for item in own]
    assert [item.num_parameters for item in items] == [item.num_parameters for item in own]
    assert all(item.forward_s > 0 and item.backward_s > 0 for item in items[1:])
    assert {item.output_bytes for item in items[:-1]} == {2 * 32 * 32 * 4}
    assert items[-1].output_bytes == 0


@pytest.mark.parametrize("first_weights", [True, "pissa"])
def test_layers_are_measured_with_the_adapters_that_are_trained(first_weights: bool | str) -> None:
    """In the second and third layer: theirs is another kind. Weights that are frozen get no gradient."""
    peft = pytest.importorskip("peft")
    config, whole = CONFIGS["llama"], skeleton(CONFIGS["llama"])
    asked = peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1, 2], init_lora_weights=first_weights)
    adapters = without_memory(asked, whole, anatomy_of(whole))
    assert trained_share(whole) == pytest.approx(2 * 4 * (32 + 32) / sum(p.numel() for p in whole.parameters()))
    bench = Bench(config, device=CPU, adapters=adapters, repeats=1, **SHAPE)
    assert bench.kinds == ["LlamaDecoderLayer", *["LlamaDecoderLayer 2"] * 2]
    items = [bench.embedding, *(bench.layer(index) for index in range(3)), bench.head]
    plain = profile_items(config, device=CPU, repeats=1, **SHAPE)
    assert [own.num_parameters - other.num_parameters for own, other in zip(items, plain, strict=True)] == [
        *(0, 0),
        *(4 * (32 + 32) for _ in range(2)),
        0,
    ]
    stage = bench.stage(Cut(1, 2, False, False))
    bench.backward(*bench._forward(stage, bench.stream))
    trained = {name for name, parameter in stage.named_parameters() if parameter.grad is not None}
    assert len(trained) == 2
    assert all("q_proj.lora_" in name for name in trained)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_counted_without_memory_is_what_autograd_saves(family: str) -> None:
    if family == "falcon" and Version(torch.__version__) >= Version("2.14"):
        pytest.skip("CPUs' fused kernel takes one head of keys for all queries since torch 2.14: runs with older ones")
    measured = profile_items(CONFIGS[family], device=CPU, repeats=1, **SHAPE)
    counted = count_items(CONFIGS[family], **SHAPE)
    for own, other in zip(measured, counted, strict=True):
        assert (other.name, other.num_parameters, other.output_bytes) == (
            own.name,
            own.num_parameters,
            own.output_bytes,
        )
        assert other.saved_bytes == pytest.approx(own.saved_bytes, rel=0.01), own.name


def test_with_gradient_checkpointing_only_the_input_stays() -> None:
    plain, thrifty = (count_items(CONFIGS["llama"], gradient_checkpointing=on, **SHAPE) for on in (False, True))
    assert thrifty[1].saved_bytes == thrifty[1].output_bytes == 2 * 32 * 32 * 4
    assert thrifty[1].working_bytes == plain[1].saved_bytes > 10 * thrifty[1].saved_bytes
    assert thrifty[0] == plain[0]
    assert thrifty[-1] == plain[-1]
    measured = profile_items(CONFIGS["llama"], device=CPU, repeats=1, gradient_checkpointing=True, **SHAPE)
    assert [item.saved_bytes for item in measured[1:-1]] == [thrifty[1].saved_bytes] * 3


def test_logits_are_what_the_head_works_with() -> None:
    head = count_items(CONFIGS["llama"], dtype=torch.bfloat16, micro_batch_size=2, sequence_length=32)[-1]
    assert head.working_bytes == 2 * 32 * 97 * (4 + 4)  # gradients of the logarithms and of the logits
    assert head.saved_bytes > 2 * 32 * 97 * 4  # the log-probabilities


def test_layers_that_differ_are_of_different_kinds() -> None:
    kinds = {}
    for family, config in CONFIGS.items():
        model = skeleton(config)
        kinds[family] = layer_kinds(model, anatomy_of(model))
    assert kinds["llama"] == ["LlamaDecoderLayer"] * 3
    assert kinds["gpt2"] == ["GPT2Block"] * 3
    sliding, full = "Gemma3DecoderLayer sliding_attention", "Gemma3DecoderLayer full_attention"
    assert kinds["gemma3"] == [sliding, full, sliding]


def test_layers_of_one_class_and_different_sizes_are_of_different_kinds() -> None:
    model = skeleton(CONFIGS["llama"])
    anatomy = anatomy_of(model)
    layers = anatomy.layers_of(model)
    layers[1].mlp.up_proj = torch.nn.Linear(32, 48, bias=False, device="meta")
    assert layer_kinds(model, anatomy) == ["LlamaDecoderLayer", "LlamaDecoderLayer 2", "LlamaDecoderLayer"]
    layers[2].mlp.tricks = 3
    assert layer_kinds(model, anatomy) == ["LlamaDecoderLayer", "LlamaDecoderLayer 2", "LlamaDecoderLayer 3"]


def test_each_kind_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Cut] = []
    load_stage = module.load_stage

    def noting(source: Any, config: Any, cut: Cut, **options: Any) -> Any:
        loaded.append(cut)
        return load_stage(source, config, cut, **options)

    monkeypatch.setattr(module, "load_stage", noting)
    items = profile_items(CONFIGS["gemma3"], device=CPU, repeats=1, **SHAPE)
    assert [cut.start for cut in loaded if cut.stop > cut.start] == [0, 1]
    first, other, again = ((i.forward_s, i.backward_s, i.saved_bytes, i.kind) for i in items[1:4])
    assert again == first
    assert other[2:] != first[2:], "seconds of so little may be alike"


def test_the_trunks_own_work_is_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks when it is asked, a forward takes one tick, with a layer and without: none is left."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(module.Clock, "now", lambda self: float(next(ticks)))
    bench = Bench(CONFIGS["llama"], device=CPU, repeats=3, **SHAPE)
    assert bench.trunk.forward_s == 1.0
    assert bench.layer(1).forward_s == 0.0


def test_sizes_that_cannot_be() -> None:
    config = LlamaConfig(**TINY, max_position_embeddings=64)
    too_long = "sequence_length is 65 and the model has 64 positions: give at most 64"
    for function, more in ((profile_items, {"device": CPU}), (count_items, {})):
        with pytest.raises(ValueError, match=too_long):
            function(config, dtype=torch.float32, micro_batch_size=1, sequence_length=65, **more)
        with pytest.raises(ValueError, match="micro_batch_size is 0: give a whole number from 1"):
            function(config, dtype=torch.float32, micro_batch_size=0, sequence_length=8, **more)


def test_fingerprints_tell_models_apart() -> None:
    own = fingerprint(CONFIGS["llama"])
    assert own["model_type"] == "llama"
    assert (own["num_hidden_layers"], own["vocab_size"]) == (3, 97)
    assert fingerprint(LlamaConfig(**TINY)) == own
    assert fingerprint(LlamaConfig(**{**TINY, "intermediate_size": 128})) != own
    assert fingerprint(CONFIGS["gpt2"])["hidden_size"] == 32
    gemma4 = Gemma4TextConfig(**TINY, head_dim=8, global_head_dim=16, layer_types=SLIDING)
    assert fingerprint(gemma4)["head_dim"] == [8, 16, 16]  # its last layer sees all


def test_other_bytes_pass_through_the_caches_before_each_timed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model, where other layers run between a layer's passes."""
    done: list[str] = []
    bench = Bench(CONFIGS["llama"], device=CPU, repeats=2, **SHAPE)
    for name in ("_pass_others", "_forward", "backward"):
        act = getattr(bench, name)
        monkeypatch.setattr(bench, name, lambda *args, name=name, act=act: (done.append(name), act(*args))[1])
    bench.layer(0)
    timed = ["_pass_others", "_forward", "_pass_others", "backward"] * 2
    assert done[-len(timed) :] == timed  # the stage without layers comes last, and is timed alike
    whole = skeleton(CONFIGS["llama"])
    assert bench._others.nbytes == sum(parameter.nbytes for parameter in whole.parameters())
