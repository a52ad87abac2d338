"""The partition that a run begins with where devices differ, and what it is told about memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.measure.profile_file import DeviceProfile, ItemProfile, Profile
from paceline.planning.memory import States, stage_memory
from support.jobs import ds_config, model_config, step_batches
from support.ranks import RankError, run_ranks

LAYERS = 10
LINK_BYTES_PER_S = 1e6


def measure_alike() -> None:
    """All items are measured to take as long, on the second rank three times as long: its cores may be busy."""
    from paceline.runtime import hetero

    measured = hetero.profile_items
    unit_s = 0.015 if os.environ["RANK"] == "1" else 0.005

    def profile_items(*args: Any, **options: Any) -> list[ItemProfile]:
        return [replace(item, forward_s=unit_s, backward_s=2 * unit_s) for item in measured(*args, **options)]

    hetero.profile_items = profile_items  # type: ignore[assignment]


def boundaries(
    num_stages: int,
    profile: str | None = None,
    schedule: dict[str, Any] | None = None,
    *,
    recomputes: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """On every rank: what is found, and what is logged."""
    import torch.distributed as dist

    from paceline.comm.control import ControlPlane
    from paceline.config import ScheduleChoice
    from paceline.planning.memory import States
    from paceline.runtime.hetero import Shape, hetero_boundaries
    from paceline.runtime.initialize import start_distributed

    start_distributed()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    logging.getLogger("paceline").setLevel(logging.INFO)
    replicas = dist.get_world_size() // num_stages
    found, made, _ = hetero_boundaries(
        model_config(num_hidden_layers=LAYERS),
        ControlPlane.create(num_stages),
        Shape(torch.float32, 2, 16, recomputes),
        num_stages=num_stages,
        micro_batches=16,
        schedule=ScheduleChoice(**(schedule or {"type": "1f1b"})),
        states=States(data_parallel=replicas),
        profile=profile,
        **options,
    )
    return {"boundaries": found, "profile": made, "lines": lines}


def write_profile(path: Path, speeds: tuple[float, ...], **changes: Any) -> str:
    from paceline.hf.layer_profile import fingerprint

    layer = ItemProfile("layers.0", "LlamaDecoderLayer", 0.01, 0.02, 1000, 4096, 10_000)
    items = (
        ItemProfile("embedding", "Embedding", 0.0001, 0.0001, 10, 4096, 3104),
        *(replace(layer, name=f"layers.{index}") for index in range(LAYERS)),
        ItemProfile("head", "Head", 0.0001, 0.0001, 1000, 0, 3136),
    )
    devices = tuple(DeviceProfile(f"device {index}", speed, 1 << 30, 1 << 30) for index, speed in enumerate(speeds))
    model = fingerprint(model_config(num_hidden_layers=LAYERS))
    profile = Profile(model, "float32", 2, 16, False, items, devices, ())
    replace(profile, **changes).save(path)
    return str(path)


@pytest.mark.parametrize("schedule", [{"type": "interleaved", "chunks": 2}, {"type": "dualpipev", "chunks": 2}])
def test_stages_of_devices_that_hold_several(schedule: dict[str, Any], tmp_path: Path) -> None:
    """3:1: the faster device gets about three quarters of the layers, over its two stages."""
    path = write_profile(tmp_path / "p.json", (3.0, 1.0))
    first, second = run_ranks(boundaries, 2, 2, path, schedule)
    found = first["boundaries"]
    assert found == second["boundaries"]
    assert (len(found), found[0], found[-1]) == (5, 0, LAYERS + 2)
    held = {"interleaved": (0, 2), "dualpipev": (0, 3)}[schedule["type"]]
    items = sum(found[stage + 1] - found[stage] for stage in held)
    assert 8 <= items <= 10
    told = [line for line in first["lines"] if line.startswith("stage ")]
    assert told[0].startswith(f"stage {held[0]} and {held[1]} on ")


def test_speeds_of_a_profile(tmp_path: Path) -> None:
    """3:1: eight layers against two take 8/3 against 2, and seven against three 7/3 against 3."""
    path = write_profile(tmp_path / "p.json", (3.0, 1.0))
    first, second = run_ranks(boundaries, 2, 2, path)
    assert first["boundaries"] == second["boundaries"] == [0, 9, 12]
    assert first["profile"] == second["profile"]
    assert [device.speed for device in first["profile"].devices] == [3.0, 1.0]
    assert second["lines"] == []
    told = first["lines"][1:]
    assert told[0].startswith("stage 0 on ")
    assert "(speed 3): embedding to layers.7, 0.08" in told[0]
    assert "(speed 1): layers.8 to head, 0.06" in told[1]
    assert told[2].startswith("partition [0, 9, 12]: a step of ")


def test_a_profile_of_one_device_and_memory_that_limits(tmp_path: Path) -> None:
    """One layer is timed on every device. Stages are outermost: here each has two replicas."""
    path = write_profile(tmp_path / "p.json", (1.0,))
    results = run_ranks(boundaries, 4, 2, path)
    parts = results[0]["boundaries"]
    assert all(result["boundaries"] == parts for result in results)
    assert (parts[0], parts[-1], len(parts)) == (0, 12, 3)
    assert len(results[0]["profile"].devices) == 2
    assert all(device.speed > 0 for device in results[0]["profile"].devices)


def test_times_of_a_profile_stay_what_they_were(tmp_path: Path) -> None:
    """A run that has read a profile writes how its layers were measured, not how it computes itself."""
    path = write_profile(tmp_path / "p.json", (3.0, 1.0), dtype="bfloat16", gradient_checkpointing=True)
    found = run_ranks(boundaries, 2, 2, path)[0]["profile"]
    assert (found.dtype, found.gradient_checkpointing) == ("bfloat16", True)


def boundaries_with_checkpointing(path: str, keeps: bool) -> list[int]:
    os.environ["PACELINE_RECOMPUTE_EARLY"] = str(int(keeps))
    found: list[int] = boundaries(2, path, recomputes=True)["boundaries"]
    return found


def test_layers_that_keep_their_activations_count_as_they_are(tmp_path: Path) -> None:
    """Layers of 0.03 s, a head of 0.19: eight against two and the head. With their forwards once more, seven."""
    path = recomputed_profile(tmp_path / "p.json")
    for keeps, end in ((True, 9), (False, 8)):
        assert run_ranks(boundaries_with_checkpointing, 2, path, keeps) == [[0, end, 12]] * 2


def recomputed_profile(path: Path) -> str:
    layer = ItemProfile("layers.0", "LlamaDecoderLayer", 0.01, 0.03, 1000, 64, 10_000)
    items = (
        ItemProfile("embedding", "Embedding", 0.0, 0.0, 10, 64, 3104),
        *(replace(layer, name=f"layers.{index}") for index in range(LAYERS)),
        ItemProfile("head", "Head", 0.06, 0.13, 1000, 0, 3136),
    )
    return write_profile(path, (1.0, 1.0), items=items, gradient_checkpointing=True)


def boundaries_within(path: str, limits: Sequence[int | None]) -> list[list[int]]:
    return [boundaries(2, path, memory_bytes=limit)["boundaries"] for limit in limits]


def test_a_run_that_keeps_what_was_recomputed(tmp_path: Path) -> None:
    """Its layers take a forward less than those of the profile, and keep what is counted, not their input alone."""
    from paceline.hf.activations import count_items

    path = recomputed_profile(tmp_path / "p.json")
    counted = count_items(
        model_config(num_hidden_layers=LAYERS), dtype=torch.float32, micro_batch_size=2, sequence_length=16
    )
    limit = round(stage_memory(counted, [0, 7, 12], 0, States(), 2).total)
    assert run_ranks(boundaries_within, 2, path, [None, limit]) == [[[0, 9, 12], [0, 7, 12]]] * 2


def measured_boundaries(is_alike: bool) -> dict[str, Any]:
    if is_alike:
        measure_alike()
    return boundaries(2)


def test_measured_on_the_devices() -> None:
    first, second = run_ranks(measured_boundaries, 2, True)
    assert first["boundaries"] == second["boundaries"] == [0, 9, 12]
    assert [device.speed for device in first["profile"].devices] == pytest.approx([1.0, 1 / 3])
    first, second = run_ranks(measured_boundaries, 2, False)
    assert first["boundaries"] == second["boundaries"]
    assert first["boundaries"] == [0, first["boundaries"][1], 12]
    profile = first["profile"]
    assert profile.devices[0].speed == 1.0
    assert profile.devices[1].speed > 0
    # The time of what is around a layer is taken off: of a tiny one nothing may be left beside other work.
    assert max(item.forward_s for item in profile.items) > 0
    assert max(item.backward_s for item in profile.items) > 0
    assert [item.name for item in profile.items][:2] == ["embedding", "layers.0"]
    assert 0 < profile.links[0] < float("inf")  # one host, and its ranks' messages take their time too


def test_what_does_not_fit_is_an_error_on_every_rank(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "p.json", (1.0, 1.0))
    with pytest.raises(RankError, match=r"ValueError: no split fits in memory: stage 1 .* its limit is 100000 bytes"):
        run_ranks(boundaries, 2, 2, path, memory_bytes=100_000)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "p.json", (1.0, 1.0), model={"model_type": "gpt2"})
    with pytest.raises(RankError, match=r"profile .*p\.json is of another model: its head_dim is None"):
        run_ranks(boundaries, 2, 2, path)


def links() -> tuple[float, ...]:
    """Timed again where something else held a message up for a second."""
    from paceline.comm.control import ControlPlane
    from paceline.runtime.hetero import link_rates
    from paceline.runtime.initialize import start_distributed

    start_distributed()
    control = ControlPlane.create(3)
    for _ in range(20):
        rates = link_rates(control, ["a", "b", "b"], 3)
        if min(rates) > LINK_BYTES_PER_S:
            break
    return rates


def test_links_between_hosts_and_within_one_are_timed() -> None:
    results = run_ranks(links, 3)
    assert results[0] == results[1] == results[2]
    between, within = results[0]
    for rate in (between, within):
        assert LINK_BYTES_PER_S < rate < float("inf")


def states_of_a_stage(dtype: str) -> tuple[int, float]:
    """What a stage of the engine holds after a step, and what is predicted."""
    import paceline
    from paceline.planning.memory import States

    config = ds_config(1, bf16={"enabled": dtype == "bf16"}, zero_optimization={"stage": 1})
    engine, sharded, *_ = paceline.initialize(model=model_config(hidden_size=128), config=config)
    engine.train_batch(iter(step_batches(0)[engine.grid.data_parallel_id :: 2]))
    weights, *beside = States.from_config(config, 2).of(sum(p.numel() for p in engine.module.parameters()))
    held = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    return held + sharded.num_bytes(), weights + sum(beside)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_zero_1_takes_what_is_predicted(dtype: str) -> None:
    for held, predicted in run_ranks(states_of_a_stage, 2, dtype):
        assert predicted == pytest.approx(held, rel=0.03)


def built_beforehand() -> dict[str, object]:
    import paceline
    from paceline.runtime.initialize import start_distributed
    from paceline.runtime.module import CausalLMPipeline

    measure_alike()
    start_distributed()
    pipeline = CausalLMPipeline(model_config(num_hidden_layers=6), num_stages=2, partition=[0, 1, 8])
    config = ds_config(paceline={"pipeline": {"partition": {"method": "hetero", "repartition_every": 0}}})
    engine, *_ = paceline.initialize(model=pipeline, config=config)
    loss = float(engine.train_batch(iter(step_batches(0))))
    return {"parts": list(engine.module.parts), "measured": pipeline.profile is not None, "loss": loss}


def test_a_pipeline_that_was_built_beforehand_is_measured_too() -> None:
    first, second = run_ranks(built_beforehand, 2)
    assert first == second
    assert first["measured"]
    # Built with [0, 1, 8]. Of four micro-batches, 7 x 15 ms with little to wait for beat 6 x 15 ms against 2 x 45 ms.
    assert first["parts"] == [0, 7, 8]


def trains_in_several_directions(profile: str) -> tuple[list[int], float]:
    import paceline

    section = {
        "stages": 4,
        "partition": {"method": "hetero", "profile": profile},
        "schedule": {"type": "multidirection"},
    }
    config = ds_config(gradient_accumulation_steps=8, paceline={"pipeline": section})
    engine, *_ = paceline.initialize(model=model_config(num_hidden_layers=LAYERS), config=config)
    loss = engine.train_batch(iter(step_batches(0)))
    engine.flush()
    return [int(part) for part in engine.module.parts], loss.item()


def test_a_slow_device_of_several_directions_gets_less_in_both_its_stages(tmp_path: Path) -> None:
    """Device 2 has the stages 2 and 1, which device 1 has too; the same parts on all ranks, and layers stay there."""
    found = run_ranks(trains_in_several_directions, 4, write_profile(tmp_path / "p.json", (1.0, 1.0, 0.25, 1.0)))
    parts, loss = found[0]
    assert found == [(parts, loss)] * 4
    sizes = [end - first for first, end in pairwise(parts)]
    assert sizes[1] + sizes[2] < sizes[0] + sizes[3] - 2  # which have embedding and head besides
    even, wanted = run_ranks(trains_in_several_directions, 4, write_profile(tmp_path / "q.json", (1.0,) * 4))[0]
    assert even != parts
    assert loss == pytest.approx(wanted, rel=1e-5)


def parts_with_adapters(method: str, memory_gib: float, saved: list[str] | None = None) -> list[int]:
    """Boundaries of a model of which adapters are trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    import paceline

    sizes = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    config = AutoConfig.for_model("llama", num_attention_heads=4, max_position_embeddings=32, **sizes)
    lora = LoraConfig(target_modules="all-linear", r=4, modules_to_save=saved)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    partition = {"method": method, "memory_gib": memory_gib}
    pipeline = {"pipeline": {"stages": 2, "partition": partition}}
    engine, *_ = paceline.initialize(model=model, config=ds_config(paceline=pipeline))
    return [int(part) for part in engine.module.parts]


def partitions_with_adapters() -> dict[str, list[int] | str]:
    found: dict[str, list[int] | str] = {}
    for name, *case in (
        ("too little", "hetero", 0.005),
        ("enough", "hetero", 0.02),
        ("a whole head", "hetero", 0.02, ["lm_head"]),
        ("work", "work", 0.02),
        ("work, without a limit", "work", 1.0),
    ):
        try:
            found[name] = parts_with_adapters(*case)
        except ValueError as error:
            found[name] = str(error)
    return found


def test_adapters_take_the_memory_of_adapters() -> None:
    """Frozen weights have neither gradients nor states: what is balanced fits where full training would not."""
    for found in run_ranks(partitions_with_adapters, 2):
        assert "no split fits" in found["too little"]
        assert len(found["enough"]) == 3, found["enough"]
        assert found["work"] == found["work, without a limit"]
        assert len(found["work"]) == 3, found["work"]
        assert "no split fits" in found["a whole head"], "which is trained whole is on one stage alone"


def losses_with_shira(stages: int) -> list[float]:
    from peft import ShiraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    import paceline

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(tie_word_embeddings=False))
    model = get_peft_model(model, ShiraConfig(r=4, target_modules=["q_proj"]))
    engine, *_ = paceline.initialize(model=model, config=ds_config(stages))
    return [engine.train_batch(iter(step_batches(step))).item() for step in range(2)]


def test_adapters_that_cannot_be_counted_without_memory_train() -> None:
    """ShiRA chooses its weights by their values, which a skeleton has not."""
    assert run_ranks(losses_with_shira, 2, 2)[0] == pytest.approx(run_ranks(losses_with_shira, 1, 1)[0], rel=1e-6)
