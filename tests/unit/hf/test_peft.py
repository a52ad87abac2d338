"""Adapters on one rank: flags, where PEFT puts them, what is drawn for them, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.hf import peft as adapters_module
from paceline.hf import quantised
from paceline.hf.anatomy import anatomy_of
from paceline.hf.arguments import parse
from paceline.hf.peft import Adapters, adapter_state, check_drawn, inject, lora_config, resolve_adapters
from paceline.hf.stage import Cut, bare
from paceline.hf.weights import load_stage, skeleton
from support.jobs import LAYERS, model_config

peft = pytest.importorskip("peft")
# PEFT 0.21 asks for it under the name that transformers 5.23 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODEL = ["--model_name_or_path", "some/model", "--dataset_name", "some/data"]


def resolved(config: Any, family: str = "llama", **changes: Any) -> Adapters:
    whole = skeleton(model_config(family, **changes))
    return resolve_adapters(config, whole, anatomy_of(whole))


def test_flags_make_the_config_that_they_make_in_trl() -> None:
    argv = ["--use_peft", "--lora_r", "8", "--lora_target_modules", "q_proj", "v_proj", "--use_dora", "--use_rslora"]
    model_args, *_ = parse([*MODEL, *argv, "--lora_modules_to_save", "lm_head"])
    config = lora_config(model_args)
    expected = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=32,
        lora_dropout=0.05,
        bias="none",
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
        use_dora=True,
        use_rslora=True,
        base_model_name_or_path="some/model",
    )
    assert config.to_dict() == expected.to_dict()
    model_args, *_ = parse([*MODEL, "--use_peft", "--lora_target_modules", "all-linear"])
    assert lora_config(model_args).target_modules == "all-linear"


@pytest.mark.parametrize(("given", "found"), [("q_proj", {"q_proj"}), (r".*layers\.1\..*q_proj", None)])
def test_one_name_alone_is_no_pattern(given: str, found: set[str] | None) -> None:
    """PEFT compares a pattern with the whole path of a module: a name would match none."""
    model_args, *_ = parse([*MODEL, "--use_peft", "--lora_target_modules", given])
    config = lora_config(model_args)
    assert config.target_modules == (found or given)
    assert resolved(config).targets


def test_flags_in_a_file(tmp_path: Path) -> None:
    values = {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "use_peft": True,
        "lora_target_modules": ["q_proj", "o_proj"],
    }
    path = tmp_path / "flags.json"
    path.write_text(json.dumps(values))
    model_args, *_ = parse([str(path)])
    assert model_args.use_peft
    assert model_args.lora_target_modules == ["q_proj", "o_proj"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*MODEL, "--lora_r", "8"],
            r"--lora_r 8: is for adapters, and the whole model is trained\. Remedy: add --use_peft",
        ),
        ([*MODEL, "--load_in_4bit"], r"--load_in_4bit True: is for adapters"),
        (
            ["--model_type", "llama", "--use_peft"],
            r"--use_peft True: adapters are to a model .*add --model_name_or_path",
        ),
        ([*MODEL, "--use_peft", "--lora_r", "0"], r"--lora_r 0: must be at least 1"),
        ([*MODEL, "--use_peft", "--lora_dropout", "1"], r"--lora_dropout 1\.0: must be at least 0 and less than 1"),
        ([*MODEL, "--use_peft", "--load_in_4bit", "--load_in_8bit"], r"--load_in_8bit True: weights have 4 bits or 8"),
    ],
)
def test_wrong_flags(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(argv)


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    model_args, *_ = parse([*MODEL, "--use_peft"])
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r'--use_peft: adapters need PEFT, .*pip install "paceline\[peft\]"'):
        lora_config(model_args)


@pytest.mark.parametrize(("version", "told"), [(None, "is not installed"), ("0.45.0", r"is 0\.45\.0")])
def test_without_bitsandbytes(version: str | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(quantised.metadata, "version", found)
    model_args, *_ = parse([*MODEL, "--use_peft", "--load_in_4bit"])
    with pytest.raises(
        ValueError, match=rf"--load_in_4bit: weights are quantised by bitsandbytes .* {told}; pip install"
    ):
        quantised.quantised_loading(model_args, torch.float32)


def test_quantised_weights_need_adapters() -> None:
    config = SimpleNamespace(quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ValueError, match=r"quantised \(bitsandbytes\), and quantised weights cannot be trained"):
        quantised.check_trainable(config, None)  # type: ignore[arg-type]
    quantised.check_trainable(config, object())  # type: ignore[arg-type]
    config.quantization_config["quant_method"] = "gptq"
    with pytest.raises(ValueError, match=r"quantised by gptq: pipelines train adapters on weights of bitsandbytes"):
        quantised.check_trainable(config, object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", peft.LoraConfig(r=4, target_modules="all-linear")),
        ("llama", peft.LoraConfig(r=4, target_modules=r".*\.[12]\.self_attn\.(q|k)_proj", use_dora=True)),
        ("llama", peft.LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={r"layers\.1\.self_attn\.q_proj": 2})),
        ("gpt2", peft.LoraConfig(r=4, fan_in_fan_out=True)),
        ("llama", peft.LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["norm"])),
        ("mixtral", peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS)),
        ("gpt2", peft.LoraConfig(r=4, fan_in_fan_out=True, layers_to_transform=[1], bias="all")),
        ("llama", peft.LoraConfig(r=4, trainable_token_indices=[1, 2], modules_to_save=["norm"])),
        ("llama", peft.LoraConfig(r=4, trainable_token_indices={"embed_tokens": [1, 2], "lm_head": [3]})),
    ],
    ids=[
        "all-linear",
        "regex with DoRA",
        "ranks by pattern",
        "Conv1D",
        "a module saved",
        "both stacks of experts",
        "all biases",
        "tokens and a module saved",
        "tokens at both ends",
    ],
)
def test_stages_have_the_adapters_of_the_whole(family: str, config: Any) -> None:
    """The same names, shapes and values however the model is cut, and those of ``get_peft_model``'s file."""
    model_cfg = model_config(family, tie_word_embeddings=False)
    adapters = resolved(config, family, tie_word_embeddings=False)
    whole = load_stage(None, model_cfg, Cut.whole(LAYERS)).model
    inject(whole, adapters, seed=5)
    wanted = adapter_state(whole, adapters)
    cuts = [Cut(0, 1, True, False), Cut(1, 3, False, False), Cut(3, LAYERS, False, False), Cut(4, 4, False, True)]
    found: dict[str, torch.Tensor] = {}
    trained: set[str] = set()
    for cut in cuts:
        model = load_stage(None, model_cfg, cut).model
        inject(model, adapters, seed=5)
        state = adapter_state(model, adapters)
        assert not found.keys() & state.keys()
        found |= state
        trained |= {name for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    stock = peft.get_peft_model(load_stage(None, model_cfg, Cut.whole(LAYERS)).model, config)
    assert trained == {name for name, p in stock.get_base_model().named_parameters() if p.requires_grad}
    file = peft.get_peft_model_state_dict(stock, save_embedding_layers=False)
    assert {name: tensor.shape for name, tensor in file.items()} == {name: t.shape for name, t in wanted.items()}


def test_what_cannot_be_drawn_by_name() -> None:
    check_drawn(peft.LoraConfig(init_lora_weights="gaussian"))
    with pytest.raises(ValueError, match=r"peft_type IA3: adapters are drawn .* LoRA only.*give get_peft_model's"):
        check_drawn(peft.IA3Config())
    with pytest.raises(ValueError, match=r"init_lora_weights 'pissa': adapters are drawn"):
        check_drawn(peft.LoraConfig(init_lora_weights="pissa"))


def test_what_cannot_be_made_without_memory() -> None:
    """SHiRA's mask says which elements of a weight are trained."""
    with pytest.raises(ValueError, match=r"peft_type SHIRA cannot be made without their values.* paceline.export"):
        resolved(peft.ShiraConfig(r=2, target_modules=["q_proj"]))


def test_adapters_differ_from_each_other() -> None:
    adapters = resolved(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model = load_stage(None, model_config(), Cut.whole(LAYERS)).model
    inject(model, adapters, seed=5)
    drawn = [tensor for name, tensor in adapter_state(model, adapters).items() if "lora_A" in name]
    assert len(drawn) == LAYERS
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:])


def test_what_is_inside_an_adapter() -> None:
    model = load_stage(None, model_config(tie_word_embeddings=False), Cut.whole(LAYERS)).model
    plain = model.lm_head
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert model.lm_head is not plain
    assert bare(model.lm_head) is plain
    assert bare(plain) is plain


def test_peft_is_imported_when_it_is_asked_for() -> None:
    code = "import sys, paceline, paceline.hf.peft, paceline.runtime.initialize; assert 'peft' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert not adapters_module.is_peft_model(torch.nn.Linear(1, 1))
