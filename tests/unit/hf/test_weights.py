"""Loading a stage's weights from a directory that is not whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.hf.stage import Cut, require_whole
from paceline.hf.weights import load_stage, on_meta
from support.jobs import LAYERS, model_config


def save_sharded(directory: Path) -> None:
    load_stage(None, model_config(), Cut.whole(LAYERS)).model.save_pretrained(directory, max_shard_size="40KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2


def cut_short(directory: Path) -> str:
    save_sharded(directory)
    file = sorted(directory.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    return rf"{file.name} is incomplete or damaged .*: download it again"


def git_lfs_pointer(directory: Path) -> str:
    save_sharded(directory)
    file = sorted(directory.glob("model-*.safetensors"))[-1]
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n")
    return rf"{file.name} is a git-lfs pointer.*git lfs pull"


def missing(directory: Path) -> str:
    save_sharded(directory)
    file = sorted(directory.glob("model-*.safetensors"))[0]
    file.unlink()
    return rf"{file.name} is missing: download it"


def another_format(directory: Path) -> str:
    model_config().save_pretrained(directory)
    (directory / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    return r"no model.safetensors or pytorch_model.bin \(model-Q4_K_M.gguf is in a format that is not read\)"


def truncated_pickle(directory: Path) -> str:
    model_config().save_pretrained(directory)
    file = directory / "pytorch_model.bin"
    torch.save(load_stage(None, model_config(), Cut.whole(LAYERS)).model.state_dict(), file)
    file.write_bytes(file.read_bytes()[:-1000])
    return "pytorch_model.bin is incomplete or damaged: download it again"


@pytest.mark.parametrize("damage", [cut_short, git_lfs_pointer, missing, another_format, truncated_pickle])
def test_weights_that_cannot_be_loaded_are_named_with_a_remedy(damage: Callable[[Path], str], tmp_path: Path) -> None:
    told = damage(tmp_path)
    with pytest.raises(OSError, match=f"^{tmp_path}: the weights cannot be loaded: .*{told}"):
        load_stage(tmp_path, model_config(), Cut.whole(LAYERS))


def test_another_error_stays_what_it_is(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    with pytest.raises(Exception, match="not_there") as raised:
        load_stage(tmp_path, model_config(), Cut.whole(LAYERS), attn_implementation="not_there")
    assert "cannot be loaded" not in str(raised.value)


@pytest.mark.parametrize(
    ("has_embedding", "told"),
    [
        (True, r'another tensor for each of them, .*write "tie_word_embeddings": false into its config\.json'),
        (False, r"no model\.embed_tokens\.weight, .*load it once with AutoModelForCausalLM\.from_pretrained"),
    ],
    ids=["both", "head only"],
)
def test_files_that_do_not_have_the_tie_of_their_config(has_embedding: bool, told: str, tmp_path: Path) -> None:
    """The one stage sees what another has: a whole model takes the head for both, or does not tie them."""
    from safetensors.torch import load_file, save_file

    model = load_stage(None, model_config(tie_word_embeddings=False), Cut.whole(LAYERS)).model
    model.save_pretrained(tmp_path)
    config = model_config(tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if not has_embedding:
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file, {"format": "pt"})
    whole = load_stage(str(tmp_path), config, Cut.whole(LAYERS)).model
    assert (whole.lm_head.weight is whole.model.embed_tokens.weight) is not has_embedding
    cut = Cut(2, LAYERS, False, True) if has_embedding else Cut(0, 2, True, False)
    with pytest.raises(ValueError, match=rf"^{tmp_path}: its config ties the head .*{told}"):
        load_stage(str(tmp_path), config, cut)


def test_a_model_that_is_spread_over_devices_is_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    here = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.layers", "model.norm", "lm_head"], "cpu")
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=here | {"model.norm": "disk"}, offload_folder=tmp_path / "offloaded"
    )
    with pytest.raises(ValueError, match=r"is spread over the devices cpu, disk.*load it without device_map"):
        require_whole(spread)
    require_whole(AutoModelForCausalLM.from_pretrained(tmp_path, device_map=here))
    require_whole(str(tmp_path))


class Watching:
    """Counts calls, and cannot be copied."""

    def __init__(self) -> None:
        self.count, self.lock = 0, threading.Lock()

    def see(self, *_: Any) -> None:
        self.count += 1


def test_a_copy_without_memory_is_what_somebody_made_of_the_model() -> None:
    model = load_stage(None, model_config(), Cut.whole(LAYERS)).model
    watching, layer = Watching(), model.model.layers[1]
    layer.register_forward_hook(watching.see)
    layer.mlp.act_fn = torch.nn.Tanh()
    layer.self_attn.scaling = 1.0
    copied = on_meta(model)
    assert {tensor.device.type for tensor in (*copied.parameters(), *copied.buffers())} == {"meta"}
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert copied.config is model.config
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    same = copied.model.layers[1]
    assert (type(same.mlp.act_fn), same.self_attn.scaling) == (torch.nn.Tanh, 1.0)
    copied(torch.ones(1, 3, dtype=torch.int64, device="meta"))
    model(torch.ones(1, 3, dtype=torch.int64))
    assert watching.count == 2


def test_layers_of_a_model_that_cannot_be_copied_are_made_of_its_config(caplog: pytest.LogCaptureFixture) -> None:
    from paceline.runtime.module import _pattern_of

    model = load_stage(None, model_config(), Cut.whole(LAYERS)).model
    assert len(_pattern_of(model)) == 1
    model.lock = threading.Lock()
    assert _pattern_of(model) == []
    assert "cannot pickle '_thread.lock' object" in caplog.text
