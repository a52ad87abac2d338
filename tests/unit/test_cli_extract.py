"""`paceline extract`: the language model of a multimodal one is the same model by itself, and goes back trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Blip2Config,
    Gemma3Config,
    Llama4Config,
    LlavaConfig,
    Mistral3Config,
    PPChart2TableConfig,
    PretrainedConfig,
)

from paceline.hf.anatomy import UnsupportedModelError
from paceline.hf.check import require_supported
from paceline.hf.language_part import put_back, take_out
from paceline.launch import cli
from support.saves import small_file_system

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "gemma3": Gemma3Config(text_config=SIZES, vision_config=VISION, mm_tokens_per_image=4),
    "mistral3": Mistral3Config(
        text_config={"model_type": "mistral", **SIZES}, vision_config={"model_type": "pixtral", **VISION, "head_dim": 8}
    ),
    "llava": LlavaConfig(
        text_config={"model_type": "llama", **SIZES}, vision_config={"model_type": "clip_vision_model", **VISION}
    ),
}
TEXTS = {"gemma3": "Gemma3ForCausalLM", "mistral3": "MistralForCausalLM", "llava": "LlamaForCausalLM"}
WITH_HEAD: dict[str, PretrainedConfig] = {
    "llama4": Llama4Config(
        text_config={**SIZES, "intermediate_size_mlp": 64, "num_local_experts": 2},
        vision_config={**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "blip-2": Blip2Config(
        text_config={"model_type": "opt", **SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
        vision_config=VISION,
        qformer_config={**VISION, "encoder_hidden_size": 32, "vocab_size": 99},
    ),
}
"""Models around a whole causal LM, which they do not compute for text alone."""
IDS = torch.arange(3, 43).view(2, 20)


def written(name: str, directory: Path) -> Path:
    """A small model with what lies beside its weights on the hub."""
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(CONFIGS[name]).save_pretrained(directory)
    for file in ("tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"):
        (directory / file).write_text(file)
    return directory


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=IDS).logits
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(name, tmp_path / "source")
    assert cli.main(["extract", str(source), str(tmp_path / "text"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == TEXTS[name]
    assert {file.name for file in (tmp_path / "text").iterdir()} >= {"tokenizer_config.json", "chat_template.jinja"}
    assert not (tmp_path / "text" / "preprocessor_config.json").exists()
    whole = AutoModelForImageTextToText.from_pretrained(source)
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert type(text).__name__ == TEXTS[name]
    require_supported(text.config)
    assert torch.equal(logits_of(text), logits_of(whole))

    with torch.no_grad():
        for parameter in text.parameters():
            parameter.mul_(1.5)
    text.save_pretrained(tmp_path / "trained")
    argv = ["extract", str(tmp_path / "trained"), str(tmp_path / "back"), "--into", str(source)]
    assert cli.main(argv) == 0
    back = AutoModelForImageTextToText.from_pretrained(tmp_path / "back")
    assert torch.equal(logits_of(back), logits_of(text))
    of_tower = {key: value for key, value in whole.state_dict().items() if "vision" in key}
    assert of_tower
    assert all(torch.equal(back.state_dict()[key], value) for key, value in of_tower.items())
    assert (tmp_path / "back" / "preprocessor_config.json").exists()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_refusal_says_that_the_language_model_can_be_taken_out(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="`paceline extract` writes its language model as one that can be"):
        require_supported(CONFIGS[name])


@pytest.mark.parametrize("name", WITH_HEAD)
def test_a_language_model_that_is_there_with_its_head(name: str) -> None:
    whole = AutoModelForImageTextToText.from_config(WITH_HEAD[name])
    inside, text = whole.language_model, take_out(whole)
    assert type(text) is type(inside)
    assert text.state_dict().keys() == inside.state_dict().keys()
    assert all(torch.equal(text.state_dict()[key], value) for key, value in inside.state_dict().items())
    trained = type(text)(text.config)
    put_back(trained, whole)
    assert all(torch.equal(inside.state_dict()[key], value) for key, value in trained.state_dict().items())


def test_the_model_type_stays(tmp_path: Path) -> None:
    """The class of this one is that of got_ocr2, which has a config of its own."""
    vision = {**VISION, "output_channels": 32, "num_pos_feats": 16, "mlp_dim": 64}
    config = PPChart2TableConfig(text_config={"model_type": "qwen2", **SIZES}, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "source")
    assert cli.main(["extract", str(tmp_path / "source"), str(tmp_path / "text")]) == 0
    argv = ["extract", str(tmp_path / "text"), str(tmp_path / "back"), "--into", str(tmp_path / "source")]
    assert cli.main(argv) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "pp_chart2table"


def test_weights_of_other_shapes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written("llava", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 48
    (source / "config.json").write_text(json.dumps(config))
    assert cli.main(["extract", str(source), str(tmp_path / "text")]) == 2
    told = r"have '\S*mlp.down_proj.weight' of shape \[32, 64\], and its config says \[32, 48\]: give a model whose"
    assert re.search(told, capsys.readouterr().err)


def test_quantised_weights_are_not_taken_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written("llava", tmp_path / "source")
    file, plain = source / "config.json", (source / "config.json").read_text()
    file.write_text(json.dumps({**json.loads(plain), "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert cli.main(["extract", str(source), str(tmp_path / "text")]) == 2
    assert "has no weights that can be read" in capsys.readouterr().err
    file.write_text(plain)
    monkeypatch.setattr("paceline.hf.quantised.quantisation_of", lambda config: "fp8")
    assert cli.main(["extract", str(source), str(tmp_path / "text")]) == 2
    assert "are quantised (fp8): give a model whose weights are not" in capsys.readouterr().err


def test_weights_that_are_missing_are_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written("llava", tmp_path / "source")
    assert cli.main(["extract", str(source), str(tmp_path / "text")]) == 0
    (file,) = (tmp_path / "text").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    capsys.readouterr()
    assert cli.main(["extract", str(tmp_path / "text"), str(tmp_path / "back"), "--into", str(source)]) == 2
    assert "lack 'model.layers.1.mlp.up_proj.weight': give a model with all" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written("llava", tmp_path / "source")
    with small_file_system(tmp_path / "small", "64k") as small:
        assert cli.main(["extract", str(source), str(small / "text")]) == 2
        assert "give a directory where there is room" in capsys.readouterr().err
        assert not list(small.iterdir())


def test_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written("gemma3", tmp_path / "source")
    other = tmp_path / "other"
    config = CONFIGS["llava"].get_text_config()
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    assert cli.main(["extract", str(source), str(tmp_path / "text")]) == 0
    capsys.readouterr()
    for argv, told in (
        ([str(source), str(source)], "is there, and not empty: give a new directory"),
        ([str(other), str(tmp_path / "new")], "of model type 'llama', in which there is no language model"),
        ([str(tmp_path / "nowhere"), str(tmp_path / "new")], "does not exist: give a directory"),
        ([str(other), str(tmp_path / "new"), "--into", str(source)], "only one of the two has"),
    ):
        assert cli.main(["extract", *argv]) == 2
        assert told in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
