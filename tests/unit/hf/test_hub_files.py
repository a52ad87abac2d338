"""Files of a model that stages have written, as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline.hf.hub_files import begin, join, publish, write_tensors


def test_files_become_one_that_holds_the_same(tmp_path: Path) -> None:
    """Elements of different sizes, odd numbers of them: each tensor stays aligned, for readers that map the file."""
    torch.manual_seed(0)
    parts = [
        {"a": torch.randn(3, dtype=torch.bfloat16), "b": torch.randint(0, 9, (5,), dtype=torch.uint8)},
        {"c": torch.randn(3, 5, dtype=torch.float64), "d": torch.randn(()), "e": torch.empty(0, 4)},
        {"f": torch.randn(7, dtype=torch.bfloat16)},
    ]
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, tmp_path / name, metadata={"format": "pt"})
    join(tmp_path, names)
    (path,) = tmp_path.iterdir()
    assert path.name == "model.safetensors"
    wanted = {key: tensor for part in parts for key, tensor in part.items()}
    found = load_file(path)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    for key, entry in json.loads(data[8 : 8 + length]).items():
        assert key == "__metadata__" or entry["data_offsets"][0] % wanted[key].element_size() == 0, key
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tensor_that_several_files_have_is_written_once(tmp_path: Path) -> None:
    """A buffer of the whole model is on every stage; with two places in the file, it could not be read."""
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for number, name in enumerate(names):
        save_file({"shared": torch.full((3,), float(number)), f"own{number}": torch.ones(2)}, tmp_path / name)
    join(tmp_path, names)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"shared", "own0", "own1"}
    assert found["shared"].tolist() == [0.0] * 3


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "no folder" / "model.safetensors"
    with pytest.raises(OSError, match=r"no folder/model\.safetensors was not written: .*; see what is wrong"):
        write_tensors({"a": torch.ones(2)}, file)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_nothing_of_an_earlier_export_is_left(has_tokenizer: bool, tmp_path: Path) -> None:
    """A tokenizer without a chat template would have the earlier one's; one that the export has not stays."""
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").touch()
    tokenizers = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "chat_template.jinja")
    for name in ("config.json", "generation_config.json", "model.safetensors", "notes.txt", *tokenizers):
        (tmp_path / name).write_text("earlier")
    draft = begin(tmp_path)
    for name in ("config.json", *(tokenizers[:2] if has_tokenizer else ())):
        (draft / name).write_text("new")
    publish(draft, tmp_path)
    left = {path.name for path in tmp_path.iterdir() if path.is_dir() or path.read_text() == "earlier"}
    assert left == {"notes.txt", *(() if has_tokenizer else (*tokenizers, templates.name))}
