"""Weights in and out: each rank reads its own, no rank takes the whole model's memory, exports are identical."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.runtime.model_export import _naming
from support.jobs import ds_config, model_config, step_batches
from support.ranks import RankError, run_ranks

GIB = 2**30


def save_random(directory: str, stages: int, shard_size: str, config: dict[str, Any]) -> dict[str, str]:
    """Export a model with random weights; digests of this stage's tensors by name."""
    import torch.distributed as dist
    from transformers import LlamaConfig

    from paceline.comm.control import ControlPlane
    from paceline.runtime.initialize import start_distributed
    from paceline.runtime.model_export import export
    from paceline.runtime.module import CausalLMPipeline

    start_distributed()
    pipeline = CausalLMPipeline(LlamaConfig(**config), num_stages=stages)
    export(pipeline, directory, ControlPlane.create(stages), max_shard_size=shard_size)
    dist.barrier()
    return digests(pipeline)


def digests(pipeline: Any) -> dict[str, str]:
    import hashlib

    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in pipeline.stage.model.state_dict().items()
    }


def anonymous_bytes() -> int:
    """Resident memory that no file backs: what this process really takes from the machine."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def load_and_measure(directory: str, stages: int, export_to: str) -> dict[str, Any]:
    """Load a checkpoint into this rank's stage while a thread watches this process's anonymous memory."""
    from transformers import AutoConfig

    from paceline.comm.control import ControlPlane
    from paceline.runtime.initialize import start_distributed
    from paceline.runtime.model_export import export
    from paceline.runtime.module import CausalLMPipeline

    start_distributed()
    control = ControlPlane.create(stages)
    config = AutoConfig.from_pretrained(directory)
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    pipeline = CausalLMPipeline(directory, num_stages=stages, config=config)
    loaded = anonymous_bytes()
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.add_(0)  # as the first step of an optimizer: a tensor mapped from the file becomes the rank's own
    trained = anonymous_bytes()
    done.set()
    watcher.join()
    digest = digests(pipeline)
    share = sum(p.numel() * p.element_size() for p in pipeline.parameters())
    export(pipeline, export_to, control, max_shard_size="100MB")
    return {
        "share": share,
        "whole": pipeline.total_parameters * 4,
        "loaded": loaded - before,
        "trained": trained - before,
        "peak": max(peak, trained) - before,
        "digests": digest,
    }


def test_a_large_model_in_four_stages(tmp_path: Path) -> None:
    """Of 0.46 GiB: no rank's anonymous memory grows by more than 1.25 times its share, and what comes out went in."""
    if shutil.disk_usage(tmp_path).free < 2 * GIB:
        pytest.skip("needs 2 GiB of disk for two copies of the model: it runs where they are free")
    config = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    saved = {k: v for rank in run_ranks(save_random, 4, source, 4, "200MB", config) for k, v in rank.items()}
    ranks = run_ranks(load_and_measure, 4, source, 4, target)
    assert ranks[0]["whole"] > 0.4 * GIB
    assert sum(rank["share"] for rank in ranks) == ranks[0]["whole"]
    for rank in ranks:
        for moment in ("loaded", "trained", "peak"):
            assert rank[moment] <= 1.25 * rank["share"], (moment, rank[moment] / rank["share"])
        assert {name: saved[name] for name in rank["digests"]} == rank["digests"]
    shutil.rmtree(source)
    again = {k: v for rank in run_ranks(load_digests, 2, target, 2) for k, v in rank.items()}
    assert again == saved
    shutil.rmtree(target)


def load_digests(directory: str, stages: int) -> dict[str, str]:
    from paceline.runtime.initialize import start_distributed
    from paceline.runtime.module import CausalLMPipeline

    start_distributed()
    return digests(CausalLMPipeline(directory, num_stages=stages))


def export_family(family: str, directory: str, stages: int, shard_size: str, **changes: Any) -> None:
    from paceline.comm.control import ControlPlane
    from paceline.runtime.initialize import start_distributed
    from paceline.runtime.model_export import export
    from paceline.runtime.module import CausalLMPipeline

    start_distributed()
    pipeline = CausalLMPipeline(model_config(family, **changes), num_stages=stages)
    export(pipeline, directory, ControlPlane.create(stages), max_shard_size=shard_size)


@pytest.mark.parametrize(
    ("family", "stages", "ranks"), [("llama", 1, 1), ("llama", 2, 4), ("gpt2", 3, 3), ("mixtral", 3, 3)]
)
def test_export_loads_as_anybody_loads_it(family: str, stages: int, ranks: int, tmp_path: Path) -> None:
    """Tied weights once, merged experts in the hub's own format, shards over stages and in a stage, twice over."""
    from transformers import AutoModelForCausalLM

    from paceline.hf.stage import Cut
    from paceline.hf.weights import load_stage

    whole = load_stage(None, model_config(family), Cut.whole(4)).model.state_dict()
    for shard_size in ("5GB", "20KB"):
        run_ranks(export_family, ranks, family, str(tmp_path), stages, shard_size)
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values()), info
        assert model.state_dict().keys() == whole.keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, whole[name]), name
        assert not (tmp_path / ".export").exists()
        if shard_size == "5GB":  # all stages' in one, as save_pretrained does it
            assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}
    if family == "mixtral":
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in index["weight_map"]
    if family == "llama":
        assert "lm_head.weight" not in index["weight_map"]


def test_full_disk_ends_every_rank_and_leaves_no_model(tmp_path: Path) -> None:
    """A real full disk: the directory is on a file system of one MiB."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small file system needs root: runs in CI")
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=100k tmpfs {small} 2>/dev/null") != 0:
        pytest.skip("no permission to mount a file system here: runs where containers allow it")
    try:
        with pytest.raises(RankError, match=r"No space left|os error 28|StorageFull"):
            run_ranks(export_family, 2, "llama", str(small / "model"), 2, "5GB", hidden_size=64)
        assert list((small / "model").iterdir()) == [], "nothing goes on filling the disk"
    finally:
        os.system(f"umount {small}")


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    """As a file of the config, or one that joins those of the stages, is written."""
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}'"), _naming(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


def train_from(source: str, stages: int, output: str) -> list[float]:
    """From a checkpoint by name, own loop, and out again by the public names alone."""
    import paceline

    engine, *_ = paceline.initialize(model=source, config=ds_config(stages))
    losses = [engine.train_batch(iter(step_batches(step))).item() for step in range(2)]
    paceline.export(engine.module, output, engine.control)
    return losses


def train_in_memory(source: str, stages: int) -> list[float]:
    """The same from a model that every rank has loaded whole."""
    from transformers import AutoModelForCausalLM

    import paceline

    engine, *_ = paceline.initialize(model=AutoModelForCausalLM.from_pretrained(source), config=ds_config(stages))
    return [engine.train_batch(iter(step_batches(step))).item() for step in range(2)]


def export_under_zero(source: str, output: str) -> None:
    import paceline

    engine, *_ = paceline.initialize(model=source, config=ds_config(2, zero_optimization={"stage": 1}))
    generation = engine.module.stage.model.generation_config
    generation.temperature, generation.do_sample = 0.5, False  # which transformers refuses to save
    paceline.export(engine.module, output, engine.control, max_shard_size="20KB")


def test_shards_under_zero_and_with_a_generation_config_that_cannot_be_saved(tmp_path: Path) -> None:
    """ZeRO makes all parameters of a stage views of one storage, which is no reason for one file."""
    from transformers import AutoModelForCausalLM

    run_ranks(export_family, 1, "llama", str(tmp_path / "start"), 1, "20KB")
    run_ranks(export_under_zero, 2, str(tmp_path / "start"), str(tmp_path / "out"))
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 4
    assert max(path.stat().st_size for path in shards) < 25_000
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("start", "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def losses_in_bf16(source: str, by_name: bool) -> list[float]:
    from transformers import AutoModelForCausalLM

    import paceline

    model = source if by_name else AutoModelForCausalLM.from_pretrained(source)
    engine, *_ = paceline.initialize(model=model, config=ds_config(2, bf16={"enabled": True}))
    return [engine.train_batch(iter(step_batches(step))).item() for step in range(3)]


def test_bf16_by_name_and_from_memory_are_the_same_model(tmp_path: Path) -> None:
    run_ranks(export_family, 1, "llama", str(tmp_path), 1, "5GB")
    by_name, in_memory = (run_ranks(losses_in_bf16, 2, str(tmp_path), way)[0] for way in (True, False))
    assert by_name == in_memory


def test_fine_tune_a_checkpoint_by_name_and_from_memory(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run_ranks(export_family, 1, "mixtral", str(tmp_path / "start"), 1, "20KB")
    ranks = run_ranks(train_from, 3, str(tmp_path / "start"), 3, str(tmp_path / "tuned"))
    assert ranks[0] == ranks[2]
    assert ranks[0] == run_ranks(train_in_memory, 2, str(tmp_path / "start"), 2)[0]
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("start", "tuned"))
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)


def tied_by_hand(folder: str) -> dict[str, list[float]]:
    """Losses with head and embedding tied, or not, by the config and against it."""
    from transformers import AutoModelForCausalLM

    import paceline

    losses = {}
    for is_tied in (True, False):
        for by_hand in (False, True):
            model = AutoModelForCausalLM.from_config(model_config(tie_word_embeddings=is_tied != by_hand))
            embedding = model.get_input_embeddings().weight
            model.lm_head.weight = embedding if is_tied else torch.nn.Parameter(embedding.detach().clone())
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                parameter.data.normal_(std=0.2, generator=generator)
            engine, *_ = paceline.initialize(model=model, config=ds_config(2))
            name = f"{is_tied} {by_hand}"
            losses[name] = [engine.train_batch(iter(step_batches(step))).item() for step in range(3)]
            paceline.export(engine.module, f"{folder}/{name}/live", engine.control)
            engine.save_checkpoint(f"{folder}/{name}", "checkpoint")
    return losses


def test_head_and_embedding_are_one_weight_or_two_as_they_are_in_memory(tmp_path: Path) -> None:
    """Whatever the config of the model in memory says: in training, in exports and in checkpoints."""
    from transformers import AutoModelForCausalLM

    from paceline.checkpoint.export import export_checkpoint

    losses = run_ranks(tied_by_hand, 2, str(tmp_path))[0]
    for is_tied in (True, False):
        by_config, by_hand = (f"{is_tied} {way}" for way in (False, True))
        assert losses[by_hand] == losses[by_config]
        export_checkpoint(tmp_path / by_hand / "checkpoint", tmp_path / by_hand / "exported")
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / by_config / "live").state_dict()
        for written in ("live", "exported"):
            found = AutoModelForCausalLM.from_pretrained(tmp_path / by_hand / written)
            assert (found.lm_head.weight is found.model.embed_tokens.weight) is is_tied
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.state_dict().items())
