"""The section's partition: read, filled in, and described by the schema."""

import re

import pytest

from paceline.config import PacelineConfig, PartitionChoice, PartitionConfig, resolve, resolve_partition
from paceline.config.section import check_method

WEIGHTS = {"LlamaDecoderLayer": 1, "Head": 3, "Embedding": 0.5}


def section(partition):
    return PacelineConfig.of({"paceline": {"pipeline": {"partition": partition}}})


def resolved(written, **theirs):
    config = {"paceline": {"pipeline": {"stages": 2, "partition": written}}, "pipeline": theirs}
    return resolve(config, world_size=2, num_layers=4, num_items=6, state_bytes=None, device_bytes=None, cpu=False)


def chosen(got):
    path = "paceline.pipeline.partition"
    return {key.removeprefix(path): choice.value for key, choice in got.chosen.items() if key.startswith(path)}


@pytest.mark.parametrize("key", ["repartition_every", "profile", "memory_gib"])
def test_null_is_left_out(key):
    assert section({"method": "hetero", key: None}) == section("hetero")


def test_weights_keep_their_order():
    """The first regular expression that matches counts."""
    read = section({"method": WEIGHTS}).pipeline.partition
    assert read == PartitionConfig(method=WEIGHTS)
    assert list(read.method) == list(WEIGHTS)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ({"method": {}}, '.method is {}: at least one class must weigh more than 0, such as {"DecoderLayer": 1, '
         '"Head": 3}; leave the key out to have it chosen.'),
        ({"method": {"a": 0}}, '.method is {"a": 0}: at least one class must weigh more than 0, such as '
         '{"DecoderLayer": 1, "Head": 3}; leave the key out to have it chosen.'),
        ({"method": {"a": 1, "b": -1}}, '.method is {"a": 1, "b": -1}: the weight of "b" must be a finite number, at '
         "least 0; leave the key out to have it chosen."),
        ({"method": {"a": True}}, '.method is {"a": true}: the weight of "a" must be a finite number, at least 0; '
         "leave the key out to have it chosen."),
        ({"method": {"a": "1"}}, '.method is {"a": "1"}: the weight of "a" must be a finite number, at least 0; leave '
         "the key out to have it chosen."),
        ({"method": {"a": float("inf")}}, '.method is {"a": Infinity}: the weight of "a" must be a finite number, at '
         "least 0; leave the key out to have it chosen."),
        ({"method": {"(": 1}}, '.method is {"(": 1}: the key "(" must be a regular expression (missing ), '
         "unterminated subpattern at position 0); leave the key out to have it chosen."),
        ({"method": {"": 1}}, '.method is {"": 1}: the key "" must be a regular expression over class names; leave '
         "the key out to have it chosen."),
        (WEIGHTS, '.LlamaDecoderLayer is not a key of this version of paceline; if these are weights of layer classes, '
         'write {"method": {"LlamaDecoderLayer": 1, "Head": 3, "Embedding": 0.5}}. Valid keys of '
         'paceline.pipeline.partition: "memory_gib", "method", "profile", "repartition_every".'),
        ({"memory_gb": 3}, '.memory_gb is not a key of this version of paceline; did you mean "memory_gib"? Valid keys '
         'of paceline.pipeline.partition: "memory_gib", "method", "profile", "repartition_every".'),
        ("heterogenous", '.method is "heterogenous": it must be "work", "parameters", "uniform", "hetero", '
         '"type:<regex>", weights {"<regex>": weight} or a list of boundaries (did you mean "hetero"?); leave '
         "the key out to have it chosen."),
        ({"method": "hetero", "repartition_every": -1}, ".repartition_every is -1: it must be greater than or equal "
         "to 0; leave the key out to have it chosen."),
        ({"method": "hetero", "repartition_every": 1.5}, ".repartition_every is 1.5: it must be a valid integer; "
         "leave the key out to have it chosen."),
        ({"method": "hetero", "memory_gib": 0}, ".memory_gib is 0: it must be greater than 0; leave the key out to "
         "have it chosen."),
        ({"method": "hetero", "profile": ""}, '.profile is "": it must have at least 1 character; leave the key '
         "out to have it chosen."),
        ({"method": "uniform", "profile": "p.json"}, '.profile is "p.json": it belongs to the method "hetero" and the '
         'method is "uniform"; drop it, or write "hetero".'),
        ({"profile": "p.json"}, '.profile is "p.json": it belongs to the method "hetero" and the method is left out; '
         'drop it, or write "hetero".'),
    ],
)  # fmt: skip
def test_refusals(partition, message):
    with pytest.raises(ValueError, match=f"^{re.escape('paceline.pipeline.partition' + message)}$"):
        section(partition)


@pytest.mark.parametrize("value", [None, 4, 0.5, True])
def test_a_method_is_none_of_these(value):
    with pytest.raises(ValueError, match="it must be"):
        check_method(value)


@pytest.mark.parametrize(
    ("partition", "choice", "left_out"),
    [
        (None, PartitionChoice("work"), {"": "work"}),
        ("uniform", PartitionChoice("uniform"), {".repartition_every": 0}),
        ([0, 3, 6], PartitionChoice((0, 3, 6)), {".repartition_every": 0}),
        ({"method": WEIGHTS}, PartitionChoice(WEIGHTS), {".repartition_every": 0}),
        ("hetero", PartitionChoice("hetero", 100), {".repartition_every": 100}),
        ({"method": "hetero", "repartition_every": 0}, PartitionChoice("hetero", 0), {}),
        ({"method": [0, 3, 6], "repartition_every": 7}, PartitionChoice((0, 3, 6), 7), {}),
        ({"repartition_every": 7}, PartitionChoice("work", 7), {"": "work"}),
        (
            {"method": "hetero", "profile": "p.json", "memory_gib": 0.5},
            PartitionChoice("hetero", 100, "p.json", 2**29),
            {".repartition_every": 100},
        ),
    ],
)
def test_what_is_left_out_is_chosen_and_listed(partition, choice, left_out):
    got = resolved(partition)
    assert got.partition_choice == choice
    assert got.partition == (list(choice.method) if isinstance(choice.method, tuple) else choice.method)
    assert chosen(got) == left_out
    assert all(choice.why for choice in got.chosen.values())


def test_deepspeeds_own_key():
    assert resolved(None, partition="hetero").partition_choice == PartitionChoice("hetero", 100)
    assert resolved({"repartition_every": 5}, partition="uniform").partition_choice == PartitionChoice("uniform", 5)
    assert resolved("hetero", partition="best").partition_choice == PartitionChoice("hetero", 100)
    with pytest.raises(ValueError, match=r"DeepSpeed's pipeline\.partition is \"uniform\": they must agree"):
        resolved("hetero", partition="uniform")


def test_to_dict_has_what_applies():
    choice, _ = resolve_partition(section({"method": "hetero", "memory_gib": 1}), "hetero")
    assert choice.to_dict() == {"method": "hetero", "repartition_every": 100, "memory_bytes": 2**30}


def test_schema_has_every_form():
    schema = PacelineConfig.model_json_schema()
    forms = schema["$defs"]["PipelineConfig"]["properties"]["partition"]["anyOf"]
    assert {"enum": ["work", "parameters", "uniform", "hetero"]} in forms
    assert {"$ref": "#/$defs/PartitionConfig"} in forms
    assert [form.get("type") for form in forms] == [None, "string", "array", None, "null"]
    partition = schema["$defs"]["PartitionConfig"]
    assert set(partition["properties"]) == {"method", "repartition_every", "profile", "memory_gib"}
    # The long form has weights as well; the short form's object is the long form.
    assert [form.get("type") for form in partition["properties"]["method"]["anyOf"]] == [
        None, "string", "array", "object", "null",
    ]  # fmt: skip
    with_hetero = {"properties": {"method": {"enum": ["hetero"]}}, "required": ["method"]}
    assert with_hetero in partition["dependentSchemas"]["profile"]["anyOf"]
