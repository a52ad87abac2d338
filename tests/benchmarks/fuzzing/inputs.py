"""Valid inputs of every command, made by the programs that make them: what the fuzz damages."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.timelines import gpipe_timeline

DS_CONFIGS = Path(__file__).resolve().parents[3] / "ds_configs"
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "max_position_embeddings": 32,
}
RUN = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "paceline": {"pipeline": {"stages": 1}, "report": {"trace_every": 1}},
}
EXTRA_CONFIGS: dict[str, dict[str, Any]] = {
    "zero": {"zero_optimization": {"stage": 1}, "paceline": {"pipeline": {"stages": 2, "partition": [0, 2, 5]}}},
    "weights": {"paceline": {"pipeline": {"partition": {"method": {"DecoderLayer": 1, "Head": 3}}}}},
    "profile": {"paceline": {"pipeline": {"partition": {"method": "hetero", "profile": "profile.json"}}}},
    "theirs": {"pipeline": {"stages": 2, "partition": "uniform"}, "train_batch_size": 16, "fp16": {"enabled": True}},
    "eager": {"paceline": {"pipeline": {"stages": 2, "schedule": {"type": "eager", "warmup": [2, 0]}}}},
    "adaptive": {
        "train_batch_size": 32,
        "paceline": {"pipeline": {"schedule": {"micro_batch_sizes": [1, 2, 4], "memory_gib": 1.5, "retune_every": 7}}},
    },
    "scheduler": {
        "train_batch_size": "auto",
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    },
}
SCHEDULE = (
    'schedule ranks=2 micro_batches=3 chunks=1 name="mine"\nrank 0: F0 F1 F2 B0 B1 B2\nrank 1: F0 B0 F1 B1 F2 B2\n'
)


def make(folder: Path, *, with_run: bool = True) -> None:
    """Write all inputs into ``folder``; files and folders that :mod:`benchmarks.fuzzing.cases` names.

    Args:
        with_run: train a tiny model for two steps too, whose checkpoint, records of steps and model become inputs.
    """
    from transformers import BertConfig, GPT2Config, LlamaConfig, MixtralConfig

    folder.mkdir(parents=True, exist_ok=True)
    llama = LlamaConfig(**SIZES)
    models = {
        "llama": llama,
        "gpt2": GPT2Config(
            n_embd=16, n_layer=3, n_head=2, vocab_size=60, n_positions=32, bos_token_id=0, eos_token_id=0
        ),
        "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        "bert": BertConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    }
    for name, config in models.items():
        config.save_pretrained(folder / "models" / name)
    for path in DS_CONFIGS.glob("*.json"):
        _write(folder / "ds" / path.name, path.read_text())
    for name, values in EXTRA_CONFIGS.items():
        _write(folder / "ds" / f"extra_{name}.json", values)
    _profile(llama, folder / "profile.json")
    _costs(folder)
    _experts(folder)
    _write(folder / "schedule.txt", SCHEDULE)
    _write(folder / "rows.jsonl", '{"text": "a line"}\n{"text": "another"}\n')
    _write(folder / "flags.json", {"learning_rate": 1e-4, "max_steps": 3, "bf16": False, "output_dir": "out"})
    _records(folder / "recorded")
    if with_run:
        _run(folder)


def _write(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(values if isinstance(values, str) else json.dumps(values, indent=1))


def _profile(config: Any, path: Path) -> None:
    from paceline.hf.layer_profile import fingerprint
    from paceline.measure.profile_file import DeviceProfile, ItemProfile, Profile

    layer = ItemProfile("layers.0", "LlamaDecoderLayer", 0.01, 0.02, 4096, 1024, 3000)
    items = (
        ItemProfile("embedding", "Embedding", 0.001, 0.001, 128, 1024, 960),
        *(replace(layer, name=f"layers.{index}") for index in range(SIZES["num_hidden_layers"])),
        ItemProfile("head", "Head", 0.005, 0.01, 4096, 0, 976),
    )
    devices = tuple(DeviceProfile(f"device {index}", 1.0 + index, 2**33, 2**32) for index in range(2))
    Profile(fingerprint(config), "float32", 1, 32, False, items, devices, (1e9,)).save(path)


def _costs(folder: Path) -> None:
    from paceline.schedules.costs import Costs

    whole = Costs.uniform(3, 1.0, 2.0, 0.5)
    whole = replace(whole, hosts=(0, 1, 1), egress_bytes_per_s=(2.0, 3.0))
    _write(folder / "costs.json", whole.to_dict())
    block = {"work": 3.0, "activation_bytes": 4, "memory_bytes": 10}
    halves = {"forward": 1.0, "backward": 2.0, "live_bytes": 3}
    devices = [{"speed": 2, "memory_bytes": 70}, {"speed": 1}, {"speed": 1}]
    _write(folder / "blocks.json", {"blocks": [block] * 8, "devices": devices, "links": [8, 8]})
    _write(folder / "live_blocks.json", {"blocks": [halves] * 5, "devices": devices[1:], "links": [None]})
    matrix = [[0, 5, 1], [5, 0, 2], [1, 2, 0]]
    _write(folder / "matrix.json", {"blocks": [block] * 6, "devices": devices, "links": matrix})
    node = {"bytes_per_s": 3e11, "latency_s": 5e-6}
    cluster = {"devices": 4, "devices_per_node": 2, "memory_gib": 80, "flops_per_s": 4e14, "intra_node": node}
    _write(folder / "cluster.json", {**cluster, "inter_node": node, "state_bytes_per_s": 2e12})


def _experts(folder: Path) -> None:
    loads = [[9, 3, 2, 2], [1, 1, 1, 5.5], [4, 0, 3, 2]]
    _write(folder / "expert_loads.json", loads)
    placement = {"placement": [[0, 3, 1], [2, 1, 0]], "owned": [2, 2]}
    _write(folder / "current.json", {"layers": [placement] * 3})
    lines = []
    for step, held in ((10, [[0, 1], [2, 3]]), (20, [[0, 3], [2, 1]]), (30, [[0, 3], [2, 1]])):
        layers = [{"name": f"layers.{n}.mlp", "loads": loads[n], "placement": held} for n in range(2)]
        lines.append(json.dumps({"step": step, "steps": 10, "layers": layers}))
    _write(folder / "loads.jsonl", "\n".join(lines) + "\n")


def _records(run_dir: Path) -> None:
    from paceline.report.step_records import StepRecord, write

    predicted, measured = gpipe_timeline(2, 3), gpipe_timeline(2, 3, backward_s=0.05)
    write(run_dir, StepRecord(1, "gpipe", predicted, measured, predicted.end_s, measured.end_s))
    write(run_dir, StepRecord(2, "gpipe", None, measured, None, measured.end_s))


def _run(folder: Path) -> None:
    _write(folder / "run.json", RUN)
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}  # the tokenizer is trained too
    flags = {
        "model_type": "llama",
        "config_overrides": ",".join(f"{key}={value}" for key, value in sizes.items()),
        "deepspeed": folder / "run.json",
        "output_dir": folder / "run",
        "max_steps": 2,
        "block_size": 16,
        "max_train_samples": 20,
        "eval_strategy": "no",
        "save_steps": 2,
        "save_strategy": "steps",
        "logging_steps": 1,
    }
    argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "paceline.launch.finetune", *argv]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode:
        raise RuntimeError(f"the run whose files are inputs failed:\n{done.stdout}{done.stderr}")
