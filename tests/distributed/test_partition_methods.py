"""Every partition method as an argument of our PipelineModule, and from the JSON of a Hugging Face model."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.measure.profile_file import DeviceProfile, ItemProfile, Profile
from support.jobs import ds_config, model_config, step_batches
from support.ranks import run_ranks

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.into(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def layers() -> list[Any]:
    """Layers of every kind that DeepSpeed takes: specs, a module, a function. Parameters: 6 x 144, 0, 27."""
    from deepspeed.pipe import LayerSpec

    torch.manual_seed(0)
    return [Block(), *(LayerSpec(Block) for _ in range(5)), twice, LayerSpec(Head)]


METHODS: dict[str, tuple[Any, list[int] | None]] = {
    "boundaries": ([0, 1, 3, 8], [0, 1, 3, 8]),
    "weights": ({"Block": 1, "head": 3}, [0, 3, 6, 8]),
    "heavy head": ({"head": 4, ".": 1}, [0, 3, 7, 8]),
    "hetero": ("hetero", [0, 1, 2, 8]),  # of the speeds 1 : 1 : 4
    "uniform": ("uniform", None),
    "parameters": ("parameters", None),
    "type": ("type:block", None),
}
SPEEDS = (1.0, 1.0, 4.0)


def arguments(given: dict[str, Any], replicas: int = 1) -> dict[str, Any]:
    """Losses and boundaries by method; the boundaries of a module that was built with others; DeepSpeed's own."""
    import deepspeed

    import paceline
    from paceline.runtime import pipe_module

    deepspeed.init_distributed()
    rank = int(os.environ["RANK"])
    pipe_module.device_speed = lambda device: SPEEDS[rank // replicas] * (1 + rank % replicas)  # type: ignore[assignment]
    results: dict[str, Any] = {}
    built = {}
    for name, method in given.items():
        with contextlib.redirect_stdout(io.StringIO()):
            module = paceline.PipelineModule(
                layers(), num_stages=3, loss_fn=nn.functional.mse_loss, partition_method=method, seed_layers=True
            )
        built[name] = module
        config = ds_config(gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2)
        config["optimizer"]["params"]["torch_adam"] = True
        engine, *_ = paceline.initialize(model=module, config=config)
        generator = torch.Generator().manual_seed(1)
        batches = [(torch.randn(2, WIDTH, generator=generator), torch.randn(2, 3, generator=generator))] * 2
        losses = [engine.train_batch(iter(batches)).item() for _ in range(2)]
        results[name] = {"parts": module.parts, "losses": losses, "stock": None}
        if isinstance(method, str) and method != "hetero":
            with contextlib.redirect_stdout(io.StringIO()):
                stock = deepspeed.PipelineModule(layers(), num_stages=3, partition_method=method)
            results[name]["stock"] = [int(part) for part in stock.parts]
    first = next(iter(built.values()))
    before = (first.parts, first._local_start, first._local_stop)
    results["others"] = [pipe_module.boundaries_for(first, method) for method in given.values()]
    assert (first.parts, first._local_start, first._local_stop) == before, "boundaries_for changed the module"
    return results


def test_every_method_as_an_argument() -> None:
    """Boundaries as they should be, DeepSpeed's own by DeepSpeed, and the same losses for all of them."""
    given = {name: method for name, (method, _) in METHODS.items()}
    for found in run_ranks(arguments, 3, given):
        others = found.pop("others")
        assert [result["parts"] for result in found.values()] == others
        for name, (_, boundaries) in METHODS.items():
            assert found[name]["parts"] == boundaries or boundaries is None, name
            assert found[name]["stock"] in (None, found[name]["parts"]), name
            assert found[name]["losses"] == pytest.approx(found["uniform"]["losses"], rel=1e-6), name
        assert all(found[name]["stock"] is not None for name in ("uniform", "parameters", "type"))


def test_of_the_replicas_of_a_stage_the_slowest_counts() -> None:
    """Each stage's second replica is twice as fast as its first: it changes nothing."""
    for found in run_ranks(arguments, 6, {"hetero": "hetero"}, 2):
        assert found["hetero"]["parts"] == METHODS["hetero"][1]


def built(schedules: list[str], boundaries: list[int]) -> list[Any]:
    """Where the layers of a pipeline are that is built, and planned, before there is an engine for it."""
    import deepspeed

    import paceline
    from paceline.runtime.module import CausalLMPipeline

    deepspeed.init_distributed()
    parts = []
    for schedule in schedules:
        pipeline = CausalLMPipeline(model_config(), num_stages=2, partition=boundaries)
        pipeline.planned(None)
        config = ds_config(gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2)
        config["paceline"] = {"pipeline": {"stages": 2, "partition": "work", "schedule": schedule}}
        engine, *_ = paceline.initialize(model=pipeline, config=config)
        parts.append(list(engine.module.parts))
        engine.destroy()
    return parts


def test_what_is_planned_is_not_planned_again() -> None:
    boundaries = [0, 1, model_config().num_hidden_layers + 2]
    for found in run_ranks(built, 2, ["1f1b", "one_direction"], boundaries):
        assert found == [boundaries, boundaries]


def profile_of(layer_seconds: list[float], speeds: list[float]) -> Profile:
    items = [ItemProfile(f"{n}", "Layer", t / 3, t * 2 / 3, 0, 0, 0) for n, t in enumerate(layer_seconds)]
    devices = [DeviceProfile("any", speed, 0, 0) for speed in speeds]
    return Profile({}, "float32", 1, 1, False, tuple(items), tuple(devices))


def profiled(paths: list[str]) -> list[Any]:
    """Boundaries by profile, or the error."""
    import deepspeed

    import paceline
    from paceline.runtime import pipe_module

    deepspeed.init_distributed()
    pipe_module.device_speed = lambda device: SPEEDS[int(os.environ["RANK"])]  # type: ignore[assignment]
    results: list[Any] = []
    for path in paths:
        try:
            module = paceline.PipelineModule(
                layers(), num_stages=3, partition_method="hetero", partition_profile=path, seed_layers=True
            )
            results.append(module.parts)
        except ValueError as error:
            results.append(str(error))
    return results


def test_a_profile_instead_of_parameters(tmp_path: Path) -> None:
    """Its devices count if there are as many as stages; else the matrix product does (1 : 1 : 4)."""
    times = [1.0, 1, 1, 1, 1, 1, 0, 6]
    files = {
        "stages": profile_of(times, [2, 1, 3]),
        "one": profile_of(times, [1]),
        "model": profile_of(times[1:], [2, 1, 3]),
    }
    for name, profile in files.items():
        profile.save(tmp_path / name)
    wrong = tmp_path / "model"
    for found in run_ranks(profiled, 3, [str(tmp_path / name) for name in files]):
        assert found == [
            [0, 4, 6, 8],  # 4 / 2, 2 / 1, 6 / 3
            [0, 2, 4, 8],  # 2, 2, 8 / 4
            f"the profile {wrong} has 7 items and the pipeline 8 layers: give the profile of these layers, or none.",
        ]


def refusals(profile: str) -> list[str]:
    import deepspeed

    import paceline

    deepspeed.init_distributed()
    messages = []
    for arguments in (
        {"partition_method": [0, 9]},
        {"partition_method": [0, 4, 8]},
        {"partition_method": {"rnn": 1}},
        {"partition_method": {"block": -1}},
        {"partition_method": 4},
        {"partition_method": "work"},
        {"partition_method": "uniform", "partition_profile": profile},
    ):
        try:
            paceline.PipelineModule(layers(), num_stages=1, **arguments)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_refusals(tmp_path: Path) -> None:
    profile = str(tmp_path / "profile.json")
    [messages] = run_ranks(refusals, 1, profile)
    assert messages == [
        "partition [0, 9] does not cut 8 layers into 1 stages: give 2 rising boundaries from 0 to 8.",
        "partition [0, 4, 8] does not cut 8 layers into 1 stages: give 2 rising boundaries from 0 to 8.",
        "partition weights {'rnn': 1} match no layer class with a weight; the classes are ['Block', 'Head', 'twice']: "
        "correct the regular expressions.",
        "partition_method is {'block': -1}: the weight of \"block\" must be a finite number, at least 0.",
        'partition_method is 4: it must be "work", "parameters", "uniform", "hetero", "type:<regex>", weights '
        '{"<regex>": weight} or a list of boundaries.',
        "partition_method is 'work': only the layers of Hugging Face models tell their operations; choose 'parameters' "
        "or 'uniform', give weights by class name, or 'hetero' with a profile.",
        f"partition_profile is {profile!r} and partition_method is 'uniform': a profile belongs to 'hetero'; drop it, "
        "or write 'hetero'.",
    ]


def from_json(given: list[Any]) -> list[tuple[list[int], list[float]]]:
    import paceline

    results = []
    for partition in given:
        config = ds_config(paceline={"pipeline": {"stages": 2, "partition": partition}})
        engine, *_ = paceline.initialize(model=model_config("llama"), config=config)
        losses = [engine.train_batch(iter(step_batches(step, "padded")[:4])).item() for step in range(2)]
        results.append((engine.module.parts, losses))
    return results


def model_profile(path: Path) -> None:
    """Of the tiny model: no work in the embedding, 1 s in each of four layers and the head; devices of 1 : 3."""
    from paceline.hf.layer_profile import fingerprint

    config = model_config("llama")
    profile = replace(profile_of([0.0, 1, 1, 1, 1, 1], [1, 3]), model=fingerprint(config))
    profile.save(path)


def test_every_method_from_a_json(tmp_path: Path) -> None:
    """Items of the model: embedding, four decoder layers, head."""
    model_profile(tmp_path / "profile.json")
    measured = {"method": "hetero", "profile": str(tmp_path / "profile.json"), "repartition_every": 0}
    by_class = {"LlamaDecoderLayer": 1, "Head": 2.5, "Embedding": 0.5}
    wanted: list[tuple[Any, list[int]]] = [
        ("uniform", [0, 3, 6]),
        ("parameters", [0, 3, 6]),
        ("type:llamadecoder", [0, 3, 6]),
        ([0, 2, 6], [0, 2, 6]),
        ({"method": [0, 5, 6]}, [0, 5, 6]),
        ({"method": by_class}, [0, 4, 6]),  # 3.5 against 3.5
        (measured, [0, 2, 6]),  # 1 / 1 against 4 / 3
    ]
    for rank in run_ranks(from_json, 2, [partition for partition, _ in wanted]):
        assert [parts for parts, _ in rank] == [boundaries for _, boundaries in wanted]
        for _, losses in rank:
            assert losses == pytest.approx(rank[0][1], rel=1e-5)


def test_hetero_measures_the_model_where_there_is_no_profile() -> None:
    """Which boundaries depends on what the machine does just now; all ranks have the same, and the model trains."""
    ranks = run_ranks(from_json, 2, ["hetero", "uniform"])
    for (parts, losses), (_, uniform) in ranks:
        assert parts == ranks[0][0][0]
        assert parts[0] == 0 < parts[1] < parts[2] == 6
        assert losses == pytest.approx(uniform, rel=1e-5)
