"""A checkpoint becomes the very files that a live pipeline is exported to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from paceline.launch.cli import main
from support.jobs import model_config
from support.ranks import run_ranks
from support.saves import small_file_system


def save_and_export(family: str, root: str, stages: int, dtype: torch.dtype, shard_size: str) -> None:
    """The same pipeline twice: as a live export, and as a checkpoint with fp32 masters cut in two."""
    import os

    from paceline.checkpoint import CheckpointWriter, Piece
    from paceline.comm.control import ControlPlane
    from paceline.data.tokenizer import train_tokenizer
    from paceline.hf import hub_files
    from paceline.runtime.initialize import start_distributed
    from paceline.runtime.model_export import export, own_tensors
    from paceline.runtime.module import CausalLMPipeline

    start_distributed()
    rank = int(os.environ["RANK"])
    pipeline = CausalLMPipeline(model_config(family), num_stages=stages, dtype=dtype)
    tokenizer = train_tokenizer(["one line of text"], 300)
    if family == "llama":  # in a folder of their own
        tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    export(pipeline, f"{root}/live", ControlPlane.create(stages), tokenizer=tokenizer, max_shard_size=shard_size)
    parameters = dict(pipeline.stage.model.named_parameters())
    pieces = []
    for name, tensor in own_tensors(pipeline.stage).items():
        if name not in parameters:
            pieces.append(Piece(name, "value", tensor))
            continue
        half = len(tensor) // 2
        for start, rows in ((0, tensor[:half]), (half, tensor[half:])):
            pieces.append(Piece(name, "master", rows.float(), start, tuple(tensor.shape)))
            pieces.append(Piece(name, "exp_avg", torch.zeros_like(rows), start, tuple(tensor.shape)))

    def files(draft: Path) -> None:
        (draft / "model").mkdir()
        hub_files.save_config(pipeline.stage.model, draft / "model")
        tokenizer.save_pretrained(draft / "model")

    meta = {"step": 3, "model": {"dtype": str(dtype).removeprefix("torch.")}}
    writer = CheckpointWriter(rank=rank, world_size=stages, run="1")
    writer.save(f"{root}/out", "checkpoint-3", pieces, meta=meta, files=files, wait=True)


@pytest.mark.parametrize(
    ("family", "stages", "dtype"),
    [
        ("llama", 1, torch.bfloat16),
        ("gpt2", 1, torch.float32),
        ("mixtral", 1, torch.bfloat16),
        ("mixtral", 2, torch.float32),
    ],
)
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_same_as_the_live_export(family, stages, dtype, shard_size, tmp_path: Path, capsys) -> None:
    """Bit for bit the same files from one stage; from several, where files are cut elsewhere, the same tensors."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_ranks(save_and_export, stages, family, str(tmp_path), stages, dtype, shard_size)
    live, again = tmp_path / "live", tmp_path / "again"
    assert main(["export", str(tmp_path / "out"), str(again), "--max-shard-size", shard_size]) == 0
    assert f"{tmp_path / 'out' / 'checkpoint-3'} is now the model {again}: " in capsys.readouterr().out
    if stages == 1:
        assert (live / "additional_chat_templates").is_dir() == (family == "llama")
        made = sorted(p.relative_to(again) for p in again.rglob("*"))
        assert made == sorted(p.relative_to(live) for p in live.rglob("*"))
        assert len(list(again.glob("model*"))) > (shard_size == "20KB")
        for path in made:
            if (again / path).is_file():
                assert (again / path).read_bytes() == (live / path).read_bytes(), path
            assert (again / path).stat().st_mode == (live / path).stat().st_mode, path
    expected = AutoModelForCausalLM.from_pretrained(live).state_dict()
    model, info = AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype is dtype
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    loaded = AutoTokenizer.from_pretrained(again)
    assert len(loaded) == len(AutoTokenizer.from_pretrained(live))
    assert loaded.chat_template == AutoTokenizer.from_pretrained(live).chat_template
    assert isinstance(loaded.chat_template, dict) == (family == "llama")


def test_other_dtypes_and_errors(tmp_path: Path, capsys) -> None:
    """--dtype and --json; what is wrong is one line on stderr and leaves no model."""
    from transformers import AutoModelForCausalLM

    run_ranks(save_and_export, 1, "llama", str(tmp_path), 1, torch.bfloat16, "5GB")
    checkpoint, target = tmp_path / "out" / "checkpoint-3", tmp_path / "again"
    assert main(["export", str(checkpoint), str(target)]) == 0
    capsys.readouterr()
    assert main(["export", str(checkpoint), str(target), "--dtype", "float32", "--json"]) == 0  # over it
    told = json.loads(capsys.readouterr().out)
    assert (told["checkpoint"], told["directory"]) == (str(checkpoint), str(target))
    assert (told["dtype"], told["num_files"]) == ("float32", 1)
    assert AutoModelForCausalLM.from_pretrained(target).dtype is torch.float32
    assert told["num_bytes"] == 4 * AutoModelForCausalLM.from_pretrained(target).num_parameters()

    other = shutil.copytree(target, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert main(["export", str(checkpoint), str(other)]) == 2
    assert f"{other} already holds another model, as its config.json is not the checkpoint's" in capsys.readouterr().err
    assert json.loads((other / "config.json").read_text())["rope_theta"] == 5.0
    assert main(["export", str(checkpoint), str(other), "--overwrite"]) == 0
    assert AutoModelForCausalLM.from_pretrained(other).dtype is torch.bfloat16
    (other / "config.json").rename(other / "adapter_config.json")
    assert main(["export", str(checkpoint), str(other)]) == 2

    capsys.readouterr()
    nowhere, earlier = tmp_path / "nowhere", shutil.copytree(checkpoint, tmp_path / "checkpoint-2")
    for arguments, message in (
        ([nowhere, target], f"{nowhere} is no checkpoint: there is no such directory"),
        ([checkpoint, checkpoint / "model"], "belongs to the checkpoint itself: export to another directory"),
        ([target, tmp_path / "x"], f"{target} is a Hugging Face model already"),
        ([checkpoint, tmp_path / "x", "--max-shard-size", "large"], "--max-shard-size large: must be a whole number"),
        ([checkpoint, tmp_path / "x", "--max-shard-size", "0KB"], "--max-shard-size 0KB: must be a whole number"),
        ([checkpoint, checkpoint / "meta.pt" / "x"], "belongs to the checkpoint itself"),
        ([checkpoint, earlier], f"{earlier} belongs to checkpoint-2, a checkpoint: export to another directory"),
        ([checkpoint, target / "config.json"], f"exporting to {target / 'config.json'} failed: "),
    ):
        assert main(["export", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert err.count("\n") == 1
    assert AutoModelForCausalLM.from_pretrained(target).dtype is torch.float32

    kept = shutil.copytree(checkpoint, tmp_path / "kept")
    data = bytearray((checkpoint / "rank_00000.safetensors").read_bytes())
    data[-9] ^= 1
    (checkpoint / "rank_00000.safetensors").write_bytes(data)
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "torn")]) == 2
    assert f"{checkpoint}/rank_00000.safetensors is torn" in capsys.readouterr().err
    assert not (tmp_path / "torn").exists()

    capsys.readouterr()
    with small_file_system(tmp_path / "disk", "100k") as disk:
        assert main(["export", str(kept), str(disk / "model")]) == 2
        assert " failed: [Errno 28] No space left on device: '" in capsys.readouterr().err
        assert list((disk / "model").iterdir()) == []
