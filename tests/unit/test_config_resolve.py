"""Stages, partition and batch sizes for a number of ranks."""

import copy
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.config import PacelineConfig, ScheduleChoice, choose_stages, resolve, resolve_stages

GB = 10**9


def resolved(config, world_size=4, num_layers=12, state_bytes=None, device_bytes=None, cpu=False):
    return resolve(
        config,
        world_size=world_size,
        num_layers=num_layers,
        num_items=num_layers + 2,
        state_bytes=state_bytes,
        device_bytes=device_bytes,
        cpu=cpu,
    )


def stages(count, **more):
    return {"paceline": {"pipeline": {"stages": count, **more}}}


def test_everything_left_out():
    config = {"optimizer": {"type": "AdamW"}}
    before = copy.deepcopy(config)
    got = resolved(config, cpu=True)
    assert config == before
    assert (got.stages, got.data_parallel, got.partition) == (2, 2, "work")
    assert (got.micro_batch_size, got.micro_batches, got.train_batch_size) == (1, 8, 16)
    assert got.ds_config == {
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "train_batch_size": 16,
    }
    assert {path: choice.value for path, choice in got.chosen.items()} == {
        "paceline.pipeline.stages": 2,
        "paceline.pipeline.partition": "work",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "train_batch_size": 16,
        "paceline.pipeline.schedule": "1f1b",
        "optimizer.params.torch_adam": True,
    }
    assert all(choice.why for choice in got.chosen.values())


def test_what_is_written_is_not_chosen():
    partition = {"method": [0, 4, 7, 10, 14], "repartition_every": 0}
    config = stages(4, partition=partition, schedule="gpipe") | {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "adam", "params": {"torch_adam": False}},
    }
    got = resolved(config, cpu=True)
    assert got.chosen == {}
    assert got.ds_config == config
    assert got.partition == [0, 4, 7, 10, 14]
    assert got.schedule == ScheduleChoice("gpipe")


def test_torch_adam_only_for_adam_on_cpus():
    for config, cpu in [({"optimizer": {"type": "SGD"}}, True), ({"optimizer": {"type": "Adam"}}, False), ({}, True)]:
        got = resolved(config, cpu=cpu)
        assert "params" not in got.ds_config.get("optimizer", {})
        assert "optimizer.params.torch_adam" not in got.chosen


def test_asks_deepspeed_for_the_accelerator(monkeypatch):
    pytest.importorskip("deepspeed")
    from deepspeed.accelerator import get_accelerator

    got = resolve(
        {"optimizer": {"type": "Adam"}}, world_size=1, num_layers=2, num_items=4, state_bytes=None, device_bytes=None
    )
    assert ("optimizer.params.torch_adam" in got.chosen) == (get_accelerator().device_name() == "cpu")


@pytest.mark.parametrize(
    ("world_size", "num_layers", "state_gb", "device_gb", "want"),
    [
        (1, 12, 100, 1, 1),  # one rank has no choice
        (8, 12, 10, 80, 2),  # fits on two
        (8, 12, 96, 80, 2),  # exactly 60 %
        (8, 12, 97, 80, 4),
        (8, 12, 1000, 80, 8),  # nothing fits: the most
        (8, 6, 1000, 80, 4),  # ... that the layers allow
        (3, 2, 1, 80, 1),  # no divisor but 1 and 3
        (6, 12, 200, 80, 6),
        (7, 12, 1, 80, 7),
        (8, 12, None, None, 2),
    ],
)
def test_choose_stages(world_size, num_layers, state_gb, device_gb, want):
    known = state_gb is not None
    sizes = (state_gb * GB, device_gb * GB) if known else (None, None)
    assert choose_stages(world_size, num_layers, *sizes) == want
    room = {"num_layers": num_layers, "state_bytes": sizes[0], "device_bytes": sizes[1]}
    got, why = resolve_stages(PacelineConfig(), {}, world_size=world_size, **room)
    assert got == want
    assert why


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 10**12), st.integers(1, 10**11))
def test_chosen_stages_are_usable_and_the_fewest(world_size, num_layers, state_bytes, device_bytes):
    got = choose_stages(world_size, num_layers, state_bytes, device_bytes)
    usable = [s for s in range(1, num_layers + 1) if world_size % s == 0]
    fitting = [s for s in usable if s >= min(2, world_size) and state_bytes / s <= 0.6 * device_bytes]
    assert got == (min(fitting) if fitting else max(usable))


def test_deepspeeds_own_pipeline_keys_are_honoured():
    got = resolved({"pipeline": {"stages": 4, "partition": "uniform"}})
    assert (got.stages, got.partition) == (4, "uniform")
    assert "paceline.pipeline.stages" not in got.chosen
    defaults = resolved({"pipeline": {"stages": "auto", "partition": "best"}})
    assert (defaults.stages, defaults.partition) == (2, "work")
    both = resolved(stages(4, partition=[0, 2, 4, 6, 14]) | {"pipeline": {"stages": 4, "partition": [0, 2, 4, 6, 14]}})
    assert both.partition == [0, 2, 4, 6, 14]


def test_boundaries_tell_the_stages():
    got = resolved({"pipeline": {"partition": [0, 2, 4, 6, 14]}})
    assert got.stages == 4
    assert got.chosen["paceline.pipeline.stages"] == (4, "pipeline.partition has 5 boundaries")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            stages(3),
            "paceline.pipeline.stages is 3 and there are 4 ranks: stages must divide the ranks; write one of "
            "[1, 2, 4], or start another number of ranks.",
        ),
        (
            {"pipeline": {"stages": 3}},
            "pipeline.stages is 3 and there are 4 ranks: stages must divide the ranks; write one of [1, 2, 4], or "
            "start another number of ranks.",
        ),
        (
            {"pipeline": {"stages": "4"}},
            'pipeline.stages is "4": it must be a whole number, at least 1; leave the key out to have it chosen.',
        ),
        (
            stages(4) | {"pipeline": {"stages": 2}},
            "paceline.pipeline.stages is 4 and DeepSpeed's pipeline.stages is 2: they must agree; drop "
            "pipeline.stages.",
        ),
        (
            stages(4, partition="uniform") | {"pipeline": {"partition": "parameters"}},
            'paceline.pipeline.partition is "uniform" and DeepSpeed\'s pipeline.partition is "parameters": they must '
            "agree; drop pipeline.partition.",
        ),
        (
            {"pipeline": {"partition": "balanced"}},
            'pipeline.partition is "balanced": it must be "work", "parameters", "uniform", "hetero", "type:<regex>", '
            'weights {"<regex>": weight} or a list of boundaries; leave the key out to have it chosen.',
        ),
        ({"pipeline": 4}, "pipeline is 4: it must be an object; write {} or leave it out."),
        (
            {"pipeline": {"activation_checkpoint_interval": "1"}},
            'pipeline.activation_checkpoint_interval is "1": it must be a whole number, at least 0; leave it out to '
            "recompute nothing.",
        ),
        ({"data_types": None}, "data_types is null: it must be an object; write {} or leave it out."),
        (
            {"data_types": {"grad_accum_dtype": "fp8"}},
            'data_types.grad_accum_dtype is "fp8": it must be fp32, bf16 or fp16; write one, or leave it out.',
        ),
        ({"steps_per_print": 0}, "steps_per_print is 0: it must be a number, at least 1; leave it out for none."),
        (
            {"steps_per_print": "10"},
            'steps_per_print is "10": it must be a number, at least 1; leave it out for none.',
        ),
        (
            stages(2, partition=[0, 3, 6, 14]),
            "paceline.pipeline.partition is [0, 3, 6, 14]: 2 stages need 3 boundaries, it has 4; correct it, or leave "
            "out one of stages and partition.",
        ),
        (
            stages(2, partition=[0, 3, 12]),
            "paceline.pipeline.partition is [0, 3, 12]: it must end at 14, the number of items (embedding, 12 decoder "
            "layers, head); correct its last number.",
        ),
        (
            stages(2) | {"zero_optimization": {"stage": 2}},
            "zero_optimization.stage is 2: DeepSpeed has pipelines, also of one stage, with ZeRO 0 and 1 only; "
            "write 1.",
        ),
        (
            {"zero_optimization": {"stage": "two"}},
            'zero_optimization.stage is "two": it must be 0, 1, 2 or 3; write one of them.',
        ),
        (
            {"tensor_parallel": {"autotp_size": 3}},
            "tensor_parallel.autotp_size is 3: it must divide the 4 ranks; choose a divisor, or start other ranks.",
        ),
        (
            {"tensor_parallel": {"autotp_size": "two"}},
            'tensor_parallel.autotp_size is "two": it must be a whole number of at least 1.',
        ),
        (
            stages(2) | {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
            "tensor_parallel.autotp_size is 2 and expert_parallel.autoep_size is 2: experts are not sliced, nor what "
            "is around them; leave one of them out.",
        ),
        (
            stages(4) | {"tensor_parallel": {"autotp_size": 2}},
            "paceline.pipeline.stages is 4 and there are 2 groups of 2 ranks: stages must divide the ranks; write one "
            "of [1, 2], or start another number of ranks.",
        ),
        (
            stages(2) | {"expert_parallel": {"enabled": True, "autoep_size": 3}},
            "expert_parallel.autoep_size is 3: it must divide the 2 replicas of each stage (ranks / stages); choose a "
            "divisor, or other stages.",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            'zero_optimization.offload_optimizer.device is "cpu": pipelines keep their states on the devices; write '
            '"none", and take more stages or ZeRO 1 if they do not fit.',
        ),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads is true: this version has no pipelines with it; leave it out.",
        ),
        (
            {"torch_autocast": {"enabled": True}},
            'torch_autocast.dtype is null: pipelines scale no loss for it; write "bfloat16", or use fp16.',
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            'torch_autocast.dtype is "float16": pipelines scale no loss for it; write "bfloat16", or use fp16.',
        ),
        (
            stages(2) | {"train_batch_size": 7},
            "train_batch_size is 7: it must be a multiple of 2 (data parallel 2); write 8, or leave it out.",
        ),
        (
            stages(2) | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3},
            "train_batch_size is 8: it must be a multiple of 6 (micro-batch 3 x data parallel 2); write 12, or leave "
            "it out.",
        ),
        (
            stages(2) | {"train_batch_size": 8, "gradient_accumulation_steps": 3},
            "train_batch_size is 8: it must be a multiple of 6 (gradient_accumulation_steps 3 x data parallel 2); "
            "write 12, or leave it out.",
        ),
        (
            stages(2) | {"train_batch_size": 8, "gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 1},
            "train_batch_size is 8: it must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x data "
            "parallel = 1 x 3 x 2 = 6; correct it or leave one of the three out.",
        ),
        (
            {"train_batch_size": 8.0},
            "train_batch_size is 8.0: it must be a whole number, at least 1; leave the key out to have it chosen.",
        ),
        (
            {"train_batch_size": "auto"},
            'train_batch_size is "auto": it must be a whole number, at least 1; leave the key out to have it chosen.',
        ),
    ],
)
def test_refusals(config, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        resolved(config)


def test_fewer_layers_than_stages():
    with pytest.raises(ValueError, match=r".") as error:
        resolved(stages(4), num_layers=3)
    assert str(error.value) == (
        "paceline.pipeline.stages is 4 and the model has 3 decoder layers: every stage needs one; write one of [1, 2]."
    )


@pytest.mark.parametrize("asked", [{}, {"stages": 2}, {"stages": 3}])
def test_fewer_layers_than_the_stages_of_a_rank(asked):
    config = {"paceline": {"pipeline": {**asked, "schedule": "interleaved"}}}
    with pytest.raises(ValueError, match=r"every stage needs one; take a schedule with one stage on each rank\.$"):
        resolved(config, num_layers=1)


def test_one_stage_is_a_pipeline_too():
    with pytest.raises(ValueError, match="sequence_parallel_size is 2: this version has no pipelines with it"):
        resolved(stages(1) | {"sequence_parallel_size": 2})


def test_slices_of_layers_take_ranks_from_the_replicas():
    plan = resolved(stages(2) | {"tensor_parallel": {"autotp_size": 2}})
    assert (plan.stages, plan.tensor_parallel, plan.data_parallel) == (2, 2, 1)
    assert "tensor_parallel" not in plan.ds_config, "DeepSpeed would cut the layers itself"
    assert resolved(stages(2) | {"tensor_parallel": {"autotp_size": 0}}).data_parallel == 2


SIZES = st.one_of(st.none(), st.integers(1, 48))


@example(1, 2, 3, None, 12)
@example(2, 3, None, 4, 24)
@example(4, 2, None, None, 32)
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2, 3]), SIZES, SIZES, SIZES)
def test_batch_arithmetic(num_stages, data_parallel, micro, count, train):
    """The product rule holds, what is written stays, and a refusal means that no numbers would do."""
    written = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": count,
        "train_batch_size": train,
    }
    config = stages(num_stages) | {key: value for key, value in written.items() if value is not None}
    solutions = [
        (m, n)
        for m in ([micro] if micro else range(1, (train or 1) + 1))
        for n in ([count] if count else range(1, (train or 1) + 1))
        if train in (None, m * n * data_parallel)
    ]
    if not solutions:
        with pytest.raises(ValueError, match=r"^train_batch_size is \d+: it must be [^\n]*; [^\n]*\.$"):
            resolved(config, world_size=num_stages * data_parallel)
        return
    got = resolved(config, world_size=num_stages * data_parallel)
    assert got.train_batch_size == got.micro_batch_size * got.micro_batches * data_parallel
    assert got.micro_batch_size >= 1
    assert got.micro_batches >= 1
    for key, value in written.items():
        assert value is None or got.ds_config[key] == value
        assert (key in got.chosen) == (value is None)
    target = 4 * num_stages if num_stages > 1 else 1
    if count is None and train is None:
        assert got.micro_batches == target
    if (micro, count) == (None, None) and train is not None:
        share = train // data_parallel
        assert abs(got.micro_batches - target) == min(abs(n - target) for n in range(1, share + 1) if share % n == 0)
