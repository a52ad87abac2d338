"""The types of schedule whose steps may run into each other: what they are resolved to, and what they refuse."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import ScheduleChoice, check_features, resolve, resolve_schedule
from paceline.config.section import PacelineConfig, show
from paceline.schedules import asynchronous

LAYERS = 40


def resolved(
    schedule, world_size=4, num_layers=LAYERS, pipeline=None, moe=None, report=None, state_bytes=None, **config
):
    parts = {"moe": moe, "report": report}
    section = {"pipeline": {"schedule": schedule, **(pipeline or {})}}
    section |= {name: part for name, part in parts.items() if part is not None}
    return resolve(
        {"paceline": section, **config},
        world_size=world_size,
        num_layers=num_layers,
        num_items=num_layers + 2,
        state_bytes=state_bytes,
        device_bytes=None if state_bytes is None else 10**9,
        cpu=False,
    )


def refused(message, *args, **config):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        resolved(*args, **config)


def test_everything_left_out():
    got = resolved("multidirection")
    assert (got.stages, got.data_parallel, got.micro_batch_size, got.micro_batches) == (4, 1, 1, 8)
    assert got.schedule == ScheduleChoice(
        "multidirection", directions=2, staleness=1, optimizer_owners="direction", warm_in_steps=0
    )
    told = {path: choice.value for path, choice in got.chosen.items()}
    assert told == {
        "paceline.pipeline.stages": 4,
        "paceline.pipeline.partition": "work",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "train_batch_size": 8,
        "paceline.pipeline.schedule.directions": 2,
        "paceline.pipeline.schedule.staleness": 1,
        "paceline.pipeline.schedule.optimizer_owners": "direction",
        "paceline.pipeline.schedule.warm_in_steps": 0,
        "zero_optimization.stage": 1,
    }
    assert all(choice.why for choice in got.chosen.values())
    assert got.schedule.to_dict() == {
        "type": "multidirection",
        "directions": 2,
        "staleness": 1,
        "optimizer_owners": "direction",
        "warm_in_steps": 0,
    }


@pytest.mark.parametrize(
    ("schedule", "is_asynchronous", "has_directions"),
    [
        ("multidirection", True, True),
        ({"type": "multidirection", "staleness": 0}, False, True),
        ("one_direction", True, False),
        ("1f1b", False, False),
        ("adaptive", False, False),
        (None, False, False),
    ],
)
def test_what_kind_it_is(schedule, is_asynchronous, has_directions):
    choice = resolved(schedule).schedule
    assert (choice.is_asynchronous, choice.has_directions) == (is_asynchronous, has_directions)


@pytest.mark.parametrize("kind", ["multidirection", "one_direction"])
def test_stream(kind):
    """A run begins with one step of the stream, flushed."""
    choice = resolved(kind, pipeline={"stages": 4}).schedule
    stream = choice.stream(4, 8)
    assert stream == asynchronous.make(kind, 4, 8)
    first = choice.first(4, 8)
    assert first == stream.unrolled(1)
    assert (first.num_micro_batches, first.num_ranks) == (8, 4)


def test_no_stream_with_a_flush():
    with pytest.raises(AssertionError, match="gpipe is flushed"):
        ScheduleChoice("gpipe").stream(4, 8)


@pytest.mark.parametrize(
    ("world_size", "num_layers", "want"),
    [(2, 9, 2), (4, 9, 4), (6, 9, 2), (8, 9, 8), (8, 7, 4), (12, 40, 12), (24, 40, 24), (64, 40, 32), (80, 40, 20)],
)
def test_chosen_stages(world_size, num_layers, want):
    got = resolved("multidirection", world_size, num_layers)
    assert (got.stages, got.data_parallel) == (want, world_size // want)
    assert got.chosen["paceline.pipeline.stages"].why == (
        f"the most for {world_size} ranks and {num_layers} decoder layers: the more, the less they idle, with half the "
        "model on each"
    )
    assert resolved("multidirection", world_size, num_layers, state_bytes=10**12).stages == want


@given(st.integers(1, 96), st.integers(1, 64))
def test_chosen_stages_are_the_most_with_an_order(world_size, num_layers):
    allowed = [2, *range(4, 33, 4)]
    usable = [s for s in allowed if world_size % s == 0 and s <= num_layers]
    if usable:
        assert resolved("multidirection", world_size, num_layers).stages == max(usable)
    else:
        refused(
            'paceline.pipeline.schedule.type is "multidirection": it needs an even number of stages up to 32, which '
            f"divide the ranks and have a layer each, and {world_size} ranks and {num_layers} decoder layers allow "
            "none; start another number of ranks, or take another schedule.",
            "multidirection",
            world_size,
            num_layers,
        )


NO_ORDER = (
    'and paceline.pipeline.schedule.type "multidirection": 3 devices have no multi-direction order (two directions '
    "would need the same device at the same moment): take an even number up to 32, such as 2 or 4. Here"
)


@pytest.mark.parametrize(
    ("world_size", "pipeline", "message"),
    [
        (
            12,
            {"stages": 3},
            f"paceline.pipeline.stages is 3 {NO_ORDER} 12 ranks and 40 decoder layers allow [2, 4, 6, 12].",
        ),
        (
            6,
            {"partition": [0, 3, 6, 42]},
            f"paceline.pipeline.partition has 4 boundaries {NO_ORDER} 6 ranks and 40 decoder layers allow [2, 6].",
        ),
        (
            12,
            {"stages": 8},
            "paceline.pipeline.stages is 8 and there are 12 ranks: stages must divide the ranks; write one of "
            "[2, 4, 6, 12], or start another number of ranks.",
        ),
    ],
)
def test_stages_that_do_not_fit(world_size, pipeline, message):
    refused(message, "multidirection", world_size, pipeline=pipeline)


def test_stages_of_a_module_of_ones_own():
    """Its engine knows them, and no JSON says them."""
    section = PacelineConfig.of({"paceline": {"pipeline": {"schedule": "multidirection"}}})
    with pytest.raises(ValueError, match=r".") as error:
        resolve_schedule(section, 3, 6, micro_batch_size=1)
    assert str(error.value) == (
        'paceline.pipeline.schedule.type is "multidirection" for 3 stages: 3 devices have no multi-direction order '
        "(two directions would need the same device at the same moment): take an even number up to 32, such as 2 or 4."
    )


@pytest.mark.parametrize(
    ("world_size", "asked", "stages", "want"),
    [(8, 2, None, (8, 2)), (6, 2, None, (6, 2)), (6, None, 6, (6, 2)), (8, None, 8, (8, 4)), (8, 4, None, (8, 4)),
     (4, 1, None, (2, 1)), (20, 2, None, (20, 2)), (10, None, 10, (10, 2)), (2, 2, None, (2, 2))],
)  # fmt: skip
def test_directions(world_size, asked, stages, want):
    schedule = {"type": "multidirection"} if asked is None else {"type": "multidirection", "directions": asked}
    got = resolved(schedule, world_size, pipeline={} if stages is None else {"stages": stages})
    assert (got.stages, got.schedule.directions) == want
    assert ("paceline.pipeline.schedule.directions" in got.chosen) == (asked is None)
    assert (got.ds_config.get("zero_optimization") is None) == (want[1] == 1 or "zero_optimization.stage" in got.chosen)
    assert len(got.schedule.stream(got.stages, got.micro_batches).routes) == want[1]


@pytest.mark.parametrize(
    ("asked", "world_size", "pipeline", "message"),
    [
        (3, 6, {}, "paceline.pipeline.schedule.directions is 3: there is no order of so many directions; write 2, half "
         "the number of stages (of 2 or a multiple of 4), or leave it out."),
        (4, 6, {}, 'paceline.pipeline.schedule.type is "multidirection" with 4 directions: it needs 8 stages, which '
         "divide the ranks and have a layer each, and 6 ranks and 40 decoder layers allow none; start another number "
         "of ranks, or take another schedule."),
        (4, 16, {"stages": 16}, 'paceline.pipeline.stages is 16 and paceline.pipeline.schedule.type "multidirection": '
         "16 devices have no order of 4 directions (they would need the same device at the same moment, or leave it "
         "idle): take 2 or 8. Here 16 ranks and 40 decoder layers allow [8]."),
    ],
)  # fmt: skip
def test_directions_that_there_are_not(asked, world_size, pipeline, message):
    refused(message, {"type": "multidirection", "directions": asked}, world_size, pipeline=pipeline)


def test_one_direction_has_any_stages_and_micro_batches():
    got = resolved("one_direction", 6, pipeline={"stages": 3})
    assert (got.stages, got.data_parallel, got.micro_batches) == (3, 2, 12)
    assert resolved("one_direction").stages == 2
    for count in (1, 5):
        got = resolved("one_direction", 6, pipeline={"stages": 6}, gradient_accumulation_steps=count)
        assert got.micro_batches == count


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            {"gradient_accumulation_steps": 6},
            'gradient_accumulation_steps is 6 and paceline.pipeline.schedule.type "multidirection": 6 micro-batches a '
            "step do not fill rounds of 4, one a device: take 4 or 8.",
        ),
        (
            {"gradient_accumulation_steps": 1, "train_batch_size": 6},
            'gradient_accumulation_steps is 1 and paceline.pipeline.schedule.type "multidirection": 1 micro-batches a '
            "step do not fill rounds of 4, one a device: take 4.",
        ),
        (
            {"train_batch_size": 12},
            "train_batch_size is 12: it must be a multiple of 8 (data parallel 2 x 4 micro-batches of a round); write "
            "16, or leave it out.",
        ),
        (
            {"train_batch_size": 36, "train_micro_batch_size_per_gpu": 3},
            "train_batch_size is 36: it must be a multiple of 24 (micro-batch 3 x data parallel 2 x 4 micro-batches of "
            "a round); write 48, or leave it out.",
        ),
    ],
)
def test_micro_batches_that_do_not_fit(batches, message):
    refused(message, "multidirection", 8, pipeline={"stages": 4}, **batches)


SIZES = st.one_of(st.none(), st.integers(1, 40))


@given(st.sampled_from([2, 4]), st.sampled_from([1, 2]), SIZES, SIZES, SIZES)
def test_batch_arithmetic(num_stages, data_parallel, micro, count, train):
    """Micro-batches fill rounds, what is written stays, and a refusal means that no numbers would do."""
    written = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": count,
        "train_batch_size": train,
    }
    config = {key: value for key, value in written.items() if value is not None}
    counts = [count] if count else range(num_stages, (train or num_stages) + 1, num_stages)
    solutions = [
        (m, n)
        for m in ([micro] if micro else range(1, (train or 1) + 1))
        for n in counts
        if n % num_stages == 0 and train in (None, m * n * data_parallel)
    ]
    world_size, pipeline = num_stages * data_parallel, {"stages": num_stages}
    if not solutions:
        with pytest.raises(ValueError, match=r"^(train_batch_size|gradient_accumulation_steps) is \d+[^\n]*\.$"):
            resolved("multidirection", world_size, pipeline=pipeline, **config)
        return
    got = resolved("multidirection", world_size, pipeline=pipeline, **config)
    assert got.train_batch_size == got.micro_batch_size * got.micro_batches * data_parallel
    assert (got.micro_batch_size, got.micro_batches) in solutions or train is None
    assert got.micro_batches % num_stages == 0
    assert all(got.ds_config[key] == value for key, value in config.items())
    if count is None and train is None:
        assert got.micro_batches == 2 * num_stages
    if (micro, count) == (None, None) and train is not None:
        assert abs(got.micro_batches - 2 * num_stages) == min(abs(n - 2 * num_stages) for _, n in solutions)


@pytest.mark.parametrize("kind", ["multidirection", "one_direction"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            "torch_autocast.enabled is true and {type}: backwards would use copies of weights that an update has "
            "replaced; write bf16 instead, or take another schedule.",
        ),
        (
            {"zero_optimization": {"stage": 2}},
            "zero_optimization.stage is 2: DeepSpeed has pipelines, also of one stage, with ZeRO 0 and 1 only; "
            "write 1.",
        ),
    ],
)
def test_what_does_not_go_with_them(kind, config, message):
    refused(message.replace("{type}", f'paceline.pipeline.schedule.type "{kind}"'), kind, **config)
    if "zero_optimization" not in config:
        assert resolved("1f1b", **config).schedule.type == "1f1b"


@pytest.mark.parametrize("kind", ["multidirection", "one_direction"])
def test_measured_cuts_follow_the_devices(kind):
    got = resolved(kind, pipeline={"partition": "hetero"})
    assert (got.partition, got.partition_choice.repartition_every) == ("hetero", 100)
    assert "paceline.pipeline.partition.repartition_every" in got.chosen
    config = {"paceline": {"pipeline": {"schedule": kind}}, "pipeline": {"partition": "hetero"}}
    check_features(config, PacelineConfig.of(config))


def test_what_goes_with_them():
    for kind in ("multidirection", "one_direction"):
        boundaries = {"stages": 2, "partition": {"method": [0, 9, 42], "repartition_every": 0}}
        experts = {"enabled": True, "autoep_size": 2}
        got = resolved(kind, 4, pipeline=boundaries, expert_parallel=experts, max_change={}, bf16={"enabled": True})
        assert (got.partition, got.data_parallel) == ([0, 9, 42], 2)


def test_loss_scale():
    refused(
        'fp16.enabled is true and paceline.pipeline.schedule.type "one_direction": the backwards of two steps overlap, '
        "so that there is no one loss scale; write bf16 instead, or take another schedule.",
        "one_direction",
        fp16={"enabled": True},
    )
    assert resolved("one_direction", fp16={"enabled": False}).schedule.type == "one_direction"
    assert resolved("multidirection", fp16={"enabled": True}).schedule.type == "multidirection"


@pytest.mark.parametrize(("key", "value"), [("warm_in_steps", 3), ("correction", "nesterov")])
def test_nothing_to_make_up_for(key, value):
    refused(
        f"paceline.pipeline.schedule.{key} is {show(value)} and staleness 0: it makes up for late gradients and there "
        "are none; drop it, or write 1 for staleness.",
        {"type": "multidirection", "staleness": 0, key: value},
    )
    choice = resolved({"type": "multidirection", key: value}).schedule
    assert getattr(choice, key) == value


def test_zero_0_is_told_to_be_1():
    """Several directions share the optimizer states of a stage; one direction does what ZeRO says."""
    for config in ({}, {"zero_optimization": {"stage": 0}}):
        got = resolved("multidirection", **config)
        assert got.chosen["zero_optimization.stage"] == (
            1,
            "several directions have optimizer states once among the ranks that hold a stage, with 0 as with 1",
        )
        assert got.ds_config.get("zero_optimization") == config.get("zero_optimization")
    for kind, stages, config in (
        ("multidirection", 4, {"zero_optimization": {"stage": 1}}),
        ("multidirection", 2, {}),
        ("one_direction", 4, {}),
        ("1f1b", 4, {}),
    ):
        assert "zero_optimization.stage" not in resolved(kind, pipeline={"stages": stages}, **config).chosen
