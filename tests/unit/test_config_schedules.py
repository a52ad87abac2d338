"""The section's schedule: read, filled in for stages and micro-batches, and described by the schema."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import PacelineConfig, ScheduleChoice, ScheduleConfig, resolve, resolve_schedule
from paceline.schedules import families

SPLIT = ("zbh1", "zbh2", "zbv", "vhalf", "vmin")
TYPES = (
    "1f1b",
    "gpipe",
    "kfkb",
    "eager",
    "adaptive",
    "interleaved",
    "dualpipev",
    *SPLIT,
    "generated",
    *("multidirection", "one_direction"),
)
BOTH = ("multidirection", "one_direction")
KEYS = {
    "k": (("kfkb",), 3),
    "slack": (("eager",), 0.5),
    "warmup": (("eager",), [3, 2, 1, 0]),
    "retune_every": (("adaptive", "generated"), 7),
    "micro_batch_sizes": (("adaptive",), [1, 4]),
    "memory_gib": (("adaptive", "generated"), 1.5),
    "chunks": (("interleaved", "adaptive", "generated"), 2),
    "directions": (("multidirection",), 2),
    "staleness": (("multidirection",), 0),
    "optimizer_owners": (("multidirection",), "mirror"),
    "warm_in_steps": ((*BOTH, "adaptive"), 20),
    "correction": ((*BOTH, "adaptive"), "nesterov"),
    "late_gradients": (("adaptive",), True),
    "risk": (("adaptive",), 0.9),
}


def section(schedule):
    return PacelineConfig.of({"paceline": {"pipeline": {"schedule": schedule}}})


def resolved(schedule, num_stages=4, num_micro_batches=8, micro_batch_size=2):
    return resolve_schedule(section(schedule), num_stages, num_micro_batches, micro_batch_size=micro_batch_size)


@pytest.mark.parametrize("kind", TYPES)
def test_short_and_long_form_agree(kind):
    assert section(kind) == section({"type": kind})
    assert section(kind).pipeline.schedule == ScheduleConfig(type=kind)
    assert resolved(kind)[0].type == kind


@pytest.mark.parametrize("kind", [*TYPES, None])
@pytest.mark.parametrize("key", KEYS)
def test_a_key_belongs_to_its_types(key, kind):
    owners, value = KEYS[key]
    schedule = {"type": kind, key: value} if kind else {key: value}
    written = kind or "adaptive"
    if written in owners:
        assert getattr(section(schedule).pipeline.schedule, key) == (tuple(value) if isinstance(value, list) else value)
        return
    with pytest.raises(ValueError, match=r".") as error:
        section(schedule)
    assert str(error.value).startswith(f"paceline.pipeline.schedule.{key} is ")
    belongs, remedy = {
        1: (f'type "{owners[0]}"', f'"{owners[0]}"'),
        2: ('types "adaptive" and "generated"', "one of them"),
        3: (f'types "{owners[0]}", "{owners[1 % len(owners)]}" and "{owners[-1]}"', "one of them"),
    }[len(owners)]
    assert str(error.value).endswith(
        f': it belongs to the {belongs} and the type is "{written}"; drop it, or write {remedy}.'
    )


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("1f2b", ".type is \"1f2b\": it must be '1f1b', 'gpipe', 'kfkb', 'eager', 'adaptive', 'interleaved', "
         "'dualpipev', 'zbh1', 'zbh2', 'zbv', 'vhalf', 'vmin', 'generated', 'multidirection' or 'one_direction'; leave "
         "the key out to have it chosen."),
        ("auto", ' is "auto": the paceline section has no "auto"; leave the key out to have it chosen.'),
        (4, " is 4: it must be an object; leave it out or write {}."),
        ({"type": "kfkb", "K": 2}, '.K is not a key of this version of paceline. Valid keys of '
         'paceline.pipeline.schedule: "chunks", "correction", "directions", "k", "late_gradients", "memory_gib", '
         '"micro_batch_sizes", "optimizer_owners", "retune_every", "risk", "slack", "staleness", "type", '
         '"warm_in_steps", "warmup".'),
        ({"type": "kfkb", "k": 0}, ".k is 0: it must be greater than or equal to 1; leave the key out to have it "
         "chosen."),
        ({"type": "kfkb", "k": 2.0}, ".k is 2.0: it must be a valid integer; leave the key out to have it chosen."),
        ({"type": "eager", "slack": -1}, ".slack is -1: it must be greater than or equal to 0; leave the key out to "
         "have it chosen."),
        ({"type": "eager", "slack": float("inf")}, ".slack is Infinity: it must be a finite number; leave the key out "
         "to have it chosen."),
        ({"type": "eager", "slack": 1, "warmup": [2, 1]}, ".warmup is [2, 1]: it says what slack 1.0 says too; drop "
         "one of them."),
        ({"type": "eager", "warmup": [2, 3]}, ".warmup is [2, 3]: the numbers must never increase from one stage to "
         "the next; write such as [4, 2, 1, 0]."),
        ({"type": "eager", "warmup": [2, True]}, ".warmup.1 is true: it must be a valid integer; leave the key out to "
         "have it chosen."),
        ({"micro_batch_sizes": 2}, ".micro_batch_sizes is 2: it must be a list; leave the key out to have it chosen."),
        ({"micro_batch_sizes": [0]}, ".micro_batch_sizes.0 is 0: it must be greater than or equal to 1; leave the key "
         "out to have it chosen."),
        ({"risk": 0.4}, ".risk is 0.4: it must be greater than or equal to 0.5; leave the key out to have it chosen."),
        ({"risk": 1}, ".risk is 1: it must be less than 1; leave the key out to have it chosen."),
        ({"risk": "worst"}, ".risk is \"worst\": it must be a valid number; leave the key out to have it chosen."),
        ({"memory_gib": 0}, ".memory_gib is 0: it must be greater than 0; leave the key out to have it chosen."),
        ({"type": "multidirection", "staleness": 2}, ".staleness is 2: it must be less than or equal to 1; leave the "
         "key out to have it chosen."),
        ({"type": "multidirection", "staleness": True}, ".staleness is true: it must be a valid integer; leave the key "
         "out to have it chosen."),
        ({"type": "multidirection", "optimizer_owners": "all"}, ".optimizer_owners is \"all\": it must be 'direction' "
         "or 'mirror'; leave the key out to have it chosen."),
        ({"type": "one_direction", "warm_in_steps": -1}, ".warm_in_steps is -1: it must be greater than or equal to 0; "
         "leave the key out to have it chosen."),
        ({"type": "one_direction", "correction": "nesterow"}, ".correction is \"nesterow\": it must be 'nesterov' or "
         "'error_feedback'; leave the key out to have it chosen."),
        ({"type": "multidirection", "stale": 1}, '.stale is not a key of this version of paceline; did you mean '
         '"staleness"? Valid keys of paceline.pipeline.schedule: "chunks", "correction", "directions", "k", '
         '"late_gradients", "memory_gib", "micro_batch_sizes", "optimizer_owners", "retune_every", "risk", "slack", '
         '"staleness", "type", "warm_in_steps", "warmup".'),
    ],
)  # fmt: skip
def test_refusals(schedule, message):
    with pytest.raises(ValueError, match=f"^{re.escape('paceline.pipeline.schedule' + message)}$"):
        section(schedule)


@pytest.mark.parametrize(
    ("schedule", "choice", "chosen"),
    [
        (None, ScheduleChoice("1f1b"), {"": "1f1b"}),
        ("gpipe", ScheduleChoice("gpipe"), {}),
        ("kfkb", ScheduleChoice("kfkb", k=2), {".k": 2}),
        ({"type": "kfkb", "k": 3}, ScheduleChoice("kfkb", k=3), {}),
        ({"type": "kfkb", "k": 99}, ScheduleChoice("kfkb", k=8), {}),
        ("eager", ScheduleChoice("eager", slack=1.0), {".slack": 1.0}),
        ({"type": "eager", "slack": 2}, ScheduleChoice("eager", slack=2.0), {}),
        ({"type": "eager", "warmup": [9, 5, 1, 1]}, ScheduleChoice("eager", warmup=(9, 5, 1, 1)), {}),
        (
            {},
            ScheduleChoice("adaptive", retune_every=100, micro_batch_sizes=(2,)),
            {".type": "adaptive", ".retune_every": 100, ".micro_batch_sizes": (2,)},
        ),
        (
            {"retune_every": 5, "micro_batch_sizes": [8, 4], "memory_gib": 0.5},
            ScheduleChoice("adaptive", retune_every=5, micro_batch_sizes=(2, 4, 8), memory_bytes=2**29),
            {".type": "adaptive"},
        ),
        (
            "multidirection",
            ScheduleChoice("multidirection", directions=2, staleness=1, optimizer_owners="direction", warm_in_steps=0),
            {".directions": 2, ".staleness": 1, ".optimizer_owners": "direction", ".warm_in_steps": 0},
        ),
        (
            {
                "type": "multidirection",
                "directions": 2,
                "staleness": 0,
                "optimizer_owners": "mirror",
                "warm_in_steps": 0,
            },
            ScheduleChoice("multidirection", directions=2, staleness=0, optimizer_owners="mirror", warm_in_steps=0),
            {},
        ),
        ("one_direction", ScheduleChoice("one_direction", warm_in_steps=0), {".warm_in_steps": 0}),
        (
            {"type": "one_direction", "warm_in_steps": 9, "correction": "error_feedback"},
            ScheduleChoice("one_direction", warm_in_steps=9, correction="error_feedback"),
            {},
        ),
    ],
)
def test_what_is_left_out_is_chosen_and_listed(schedule, choice, chosen):
    got, defaults = resolved(schedule)
    assert got == choice
    assert {path: value for path, (value, _) in defaults.items()} == {
        f"paceline.pipeline.schedule{key}": value for key, value in chosen.items()
    }
    assert all(why for _, why in defaults.values())


def test_a_group_is_at_most_the_step():
    assert resolved("kfkb", num_micro_batches=1)[0].k == 1


def test_to_dict_has_what_applies():
    assert resolved({"type": "eager", "warmup": [3, 2, 1, 0]})[0].to_dict() == {
        "type": "eager",
        "warmup": (3, 2, 1, 0),
    }


def test_warmup_for_other_stages():
    message = (
        "paceline.pipeline.schedule.warmup is [2, 1]: 4 stages need 4 numbers, it has 2; write one a stage, such as "
        "[3, 2, 1, 0], or write slack instead."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        resolved({"type": "eager", "warmup": [2, 1]})


@given(st.lists(st.integers(1, 24), min_size=1, max_size=3), st.integers(1, 6), st.integers(1, 12), st.integers(1, 4))
def test_sizes_divide_the_samples(sizes, micro_batch_size, num_micro_batches, num_stages):
    samples = micro_batch_size * num_micro_batches
    schedule = {"micro_batch_sizes": sizes}
    if any(samples % size for size in sizes):
        with pytest.raises(ValueError, match=rf"must divide the {samples} samples .*write some of \[1") as error:
            resolved(schedule, num_stages, num_micro_batches, micro_batch_size)
        named = int(str(error.value).split(": ")[1].split()[0])
        assert named in sizes
        assert samples % named
        return
    choice, _ = resolved(schedule, num_stages, num_micro_batches, micro_batch_size)
    assert choice.micro_batch_sizes == tuple(sorted({*sizes, micro_batch_size}))


def test_part_of_what_a_run_is_started_with():
    config = {"paceline": {"pipeline": {"stages": 2, "schedule": {"type": "kfkb"}}}}
    got = resolve(config, world_size=4, num_layers=4, num_items=6, state_bytes=None, device_bytes=None, cpu=False)
    assert got.schedule == ScheduleChoice("kfkb", k=2)
    assert got.chosen["paceline.pipeline.schedule.k"].value == 2
    config["paceline"]["pipeline"]["schedule"] = {"type": "eager", "warmup": [1]}
    with pytest.raises(ValueError, match="2 stages need 2 numbers"):
        resolve(config, world_size=4, num_layers=4, num_items=6, state_bytes=None, device_bytes=None, cpu=False)


def test_schema_says_which_type_a_key_belongs_to():
    schema = PacelineConfig.model_json_schema()
    assert schema["$defs"]["PipelineConfig"]["properties"]["schedule"]["anyOf"] == [
        {"enum": list(TYPES)},
        {"$ref": "#/$defs/ScheduleConfig"},
        {"type": "null"},
    ]
    schedule = schema["$defs"]["ScheduleConfig"]
    assert set(schedule["dependentSchemas"]) == set(schedule["properties"]) - {"type"} == set(KEYS)
    for key, (owners, _) in KEYS.items():
        left_out, with_type = schedule["dependentSchemas"][key]["anyOf"]
        assert left_out == {"properties": {key: {"type": "null"}}}
        allowed = with_type["properties"]["type"]["enum"]
        assert allowed == [*owners] + [None] * ("adaptive" in owners)
        # A key of another type than the default one needs the type beside it.
        assert with_type.get("required", []) == (["type"] if "adaptive" not in owners else [])


def accepts(schema, value, defs):
    """What JSON Schema says of ``value``, for the keywords that the schema of a schedule uses."""
    kinds = {"integer": int, "number": (int, float), "string": str, "array": list, "object": dict, "null": type(None)}

    def holds(keyword, rule):
        match keyword:
            case "$ref":
                return accepts(defs[rule.removeprefix("#/$defs/")], value, defs)
            case "anyOf":
                return any(accepts(one, value, defs) for one in rule)
            case "enum":
                return any(value == one and type(value) is type(one) for one in rule)
            case "type":
                return (
                    isinstance(value, bool)
                    if rule == "boolean"
                    else type(value) is not bool and isinstance(value, kinds[rule])
                )
            case "minimum":
                return value >= rule
            case "maximum":
                return value <= rule
            case "exclusiveMinimum":
                return value > rule
            case "const":
                return value == rule
            case "exclusiveMaximum":
                return value < rule
            case "items":
                return all(accepts(rule, item, defs) for item in value)
            case "properties":
                return all(accepts(rule[key], item, defs) for key, item in value.items() if key in rule)
            case "required":
                return set(rule) <= set(value)
            case "additionalProperties":
                return set(value) <= set(schema["properties"])
            case "dependentSchemas":
                return all(accepts(rule[key], value, defs) for key in value if key in rule)
        assert keyword in ("title", "description", "default"), keyword
        return True

    # The type first: a number's bounds say nothing about a string.
    return all(holds(keyword, schema[keyword]) for keyword in sorted(schema, key=lambda keyword: keyword != "type"))


@pytest.mark.parametrize("key", KEYS)
def test_schema_and_validator_agree(key):
    schema = PacelineConfig.model_json_schema()["$defs"]
    values = [None, -1, 0, 1, 2, 1.5, True, "nesterov", "direction", "mean", [1], [0], [-1], [2, 1], {}, KEYS[key][1]]
    kinds = [*({"type": kind} for kind in (*TYPES, None, "1f2b")), {}]
    seen = set()
    for schedule in ({**kind, key: value} for kind in kinds for value in values):
        try:
            section(schedule)
        except ValueError:
            read = False
        else:
            read = True
        assert accepts(schema["PipelineConfig"]["properties"]["schedule"], schedule, schema) == read, schedule
        seen.add(read)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "routes"),
    [
        ("interleaved", 2, 4, ((0, 1, 0, 1),)),
        ({"type": "interleaved", "chunks": 3}, 2, 4, ((0, 1, 0, 1, 0, 1),)),
        ("dualpipev", 3, 6, ((0, 1, 2, 2, 1, 0),)),
        ("zbv", 3, 4, ((0, 1, 2, 2, 1, 0),)),
        ("zbh1", 3, 4, ((0, 1, 2),)),
        ({"type": "multidirection", "directions": 2}, 4, 4, ((0, 1, 2, 3), (3, 2, 1, 0))),
        ("kfkb", 3, 6, ((0, 1, 2),)),
    ],
)
def test_which_rank_holds_which_stage(schedule, stages, micro_batches, routes):
    choice, _ = resolved(schedule, stages, micro_batches)
    assert choice.routes(stages) == routes
    order = choice.first(stages, micro_batches)
    assert (order.routes or (tuple(range(stages)) * order.num_chunks,)) == routes


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("interleaved", r'gradient_accumulation_steps is 6 and .*"interleaved": .* no multiple of num_ranks=4'),
        ("dualpipev", r'gradient_accumulation_steps is 6 and .*"dualpipev": .* less than 2 · num_ranks=8'),
    ],
)
def test_micro_batches_that_several_stages_a_rank_cannot_have(schedule, message):
    with pytest.raises(ValueError, match=message):
        resolved(schedule, 4, 6)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            {"correction": "nesterov"},
            r'correction is "nesterov" and no late_gradients: .* write true for late_gradients',
        ),
        ({"warm_in_steps": 5, "late_gradients": False}, "warm_in_steps is 5 and no late_gradients"),
        (
            {"micro_batch_sizes": [1, 2], "late_gradients": True},
            r"micro_batch_sizes is .*1, 2.* and late_gradients true",
        ),
    ],
)
def test_late_gradients_that_adaptive_may_choose(schedule, message):
    choice, _ = resolve_schedule(section({"late_gradients": True, "correction": "nesterov"}), 4, 8, micro_batch_size=2)
    assert (choice.is_asynchronous, choice.shares_updates, choice.correction) == (True, True, "nesterov")
    assert choice.planned(4, 8) == families.one_f_one_b(4, 8)
    with pytest.raises(ValueError, match=message):
        resolve_schedule(section(schedule), 4, 8, micro_batch_size=2)
