"""The section, reading files, and near misses."""

import json
import logging
import re
import subprocess
import sys

import pytest

from paceline.config import PacelineConfig, PartitionConfig, near_misses, read_ds_config, warn_near_misses
from paceline.config.known import REMOVED, SECTIONS, TOP_LEVEL


def section(**keys):
    return PacelineConfig.of({"paceline": keys})


def test_absent_means_automatic():
    for config in (PacelineConfig.of({}), section(), section(pipeline={})):
        assert config.pipeline.stages is None
        assert config.pipeline.partition is None
        assert config.pipeline.schedule is None
        assert config.report.metrics is True
        assert config.report.trace_every is None
    assert section(pipeline={"stages": None, "partition": None, "schedule": None}) == section()


@pytest.mark.parametrize("method", ["work", "parameters", "uniform", "hetero", "type:Llama.*Layer", [0, 3, 6]])
def test_partition_short_and_long_form_agree(method):
    short = section(pipeline={"partition": method})
    assert short == section(pipeline={"partition": {"method": method}})
    assert short.pipeline.partition == PartitionConfig(method=method)


def test_frozen():
    with pytest.raises(ValueError, match="frozen"):
        section().pipeline.stages = 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"pipeline": {"stage": 4}},
            'paceline.pipeline.stage is not a key of this version of paceline; did you mean "stages"? Valid keys of '
            'paceline.pipeline: "boundary", "compile", "half_layers", "head_slices", "partition", "recompute", '
            '"schedule", "stages", "unequal_replicas".',
        ),
        (
            {"pipeline": {"boundary": {"forward": "int3"}}},
            "paceline.pipeline.boundary.forward is \"int3\": it must be 'bf16', 'int8', 'fp8_e4m3' or 'int4'; leave "
            "the key out to have it chosen.",
        ),
        (
            {"pipeline": {"schedule": "adaptive", "boundary": {"forward": "int8", "allowed": ["int8"]}}},
            'paceline.pipeline.boundary.allowed is ["int8"]: it leaves the choice to "adaptive", and forward has made '
            "it; drop one of them.",
        ),
        (
            {"pipeline": {"schedule": "zbh1", "boundary": {"allowed": ["int8"]}}},
            'paceline.pipeline.boundary is {"allowed": ["int8"]}: allowed is for the schedule "adaptive", which '
            'chooses, and the schedule is "zbh1": write "forward" and "backward", or "schedule": "adaptive".',
        ),
        (
            {"pipeline": {"boundary": {"allowed": []}}},
            "paceline.pipeline.boundary.allowed is []: it must have 1 entries or more; leave the key out to have it "
            "chosen.",
        ),
        (
            {"pipline": {}},
            'paceline.pipline is not a key of this version of paceline; did you mean "pipeline"? Valid keys of '
            'paceline: "averaging", "max_change", "moe", "natural_gradient", "pipeline", "report".',
        ),
        (
            {"stages": 4},
            'paceline.stages is not a key of this version of paceline; did you mean "paceline.pipeline.stages"? Valid '
            'keys of paceline: "averaging", "max_change", "moe", "natural_gradient", "pipeline", "report".',
        ),
        (
            {"quantum_gradient": {"update_period": 4}},
            'paceline.quantum_gradient is not a key of this version of paceline; did you mean "natural_gradient"? '
            'Valid keys of paceline: "averaging", "max_change", "moe", "natural_gradient", "pipeline", "report".',
        ),
        (
            {"natural_gradient": {"alpha": -1}},
            "paceline.natural_gradient.alpha is -1: it must be greater than or equal to 0; leave the key out to have "
            "it chosen.",
        ),
        (
            {"natural_gradient": {"layers": "("}},
            'paceline.natural_gradient.layers is "(": it must be a regular expression (missing ), unterminated '
            "subpattern at position 0); leave the key out to have it chosen.",
        ),
        (
            {"natural_gradient": {"num_minibatches_history": 5, "num_samples_history": 2000.0}},
            "paceline.natural_gradient.num_samples_history is 2000.0: it says what num_minibatches_history says too; "
            "drop one of them.",
        ),
        (
            {"natural_gradient": {"max_change": {"totl": 1}}},
            'paceline.natural_gradient.max_change.totl is not a key of this version of paceline; did you mean "total"? '
            'Valid keys of paceline.natural_gradient.max_change: "head", "layer", "total".',
        ),
        (
            {"max_change": {"layer": 1}, "natural_gradient": {"max_change": {}}},
            'paceline.max_change is {"layer": 1}: natural_gradient.max_change says it too; drop one of them.',
        ),
        (
            {"natural_gradient": {"method": "simple", "update_period": 4}},
            'paceline.natural_gradient.update_period is 4: it belongs to the method "online" and the method is '
            '"simple", which estimates nothing; drop it.',
        ),
        (
            {"natural_gradient": {"method": "simple", "alpha": 0}},
            "paceline.natural_gradient.alpha is 0: the rows of a micro-batch do not span all directions; write more "
            "than 0, such as 4.",
        ),
        (
            {"averaging": {"lighthouse": "node1:29510", "combine_weights": "held_out"}},
            'paceline.averaging.combine_weights is "held_out": it says how the models of the last rounds are combined '
            'and combine_rounds is 1; drop it, or write "combine_rounds": 4.',
        ),
        (
            {"averaging": {}},
            'paceline.averaging has no "lighthouse", which it needs: write it, or leave paceline.averaging out.',
        ),
        (
            {"averaging": {"lighthouse": "node1"}},
            'paceline.averaging.lighthouse is "node1": it must be host:port, such as "node1:29510", where `paceline '
            "lighthouse` runs.",
        ),
        (
            {"averaging": {"lighthouse": "http://node1:29510"}},
            'paceline.averaging.lighthouse is "http://node1:29510": it must be host:port, such as "node1:29510", where '
            "`paceline lighthouse` runs.",
        ),
        (
            {"averaging": {"lighthouse": "node1:29510", "timeout_s": 1e17}},
            "paceline.averaging.timeout_s is 1e+17: it must be less than or equal to 100000000; leave the key out to "
            "have it chosen.",
        ),
        (
            {"pipeline": {"partition": {"method": "hetero", "memory_gib": 1e200}}},
            "paceline.pipeline.partition.memory_gib is 1e+200: it must be less than or equal to 1099511627776; leave "
            "the key out to have it chosen.",
        ),
        (
            {"averaging": {"lighthouse": "node1:29510", "outer": "mean", "outer_momentum": 0.9}},
            'paceline.averaging.outer_momentum is 0.9: it belongs to the outer "nesterov" and the outer is "mean"; '
            'drop it, or write "nesterov".',
        ),
        (
            {"averaging": {"lighthouse": "node1:29510", "min_islands": 4, "islands": 2}},
            "paceline.averaging.islands is 2: min_islands is 4, and there are never more than islands; correct one.",
        ),
        (
            {"moe": {"rebalance_evry": 50}},
            'paceline.moe.rebalance_evry is not a key of this version of paceline; did you mean "rebalance_every"? '
            'Valid keys of paceline.moe: "loads_file", "rebalance_every", "replicas", "splitting".',
        ),
        (
            {"moe": {"replicas": -1}},
            "paceline.moe.replicas is -1: it must be greater than or equal to 0; leave the key out to have it chosen.",
        ),
        (
            {"moe": {"splitting": "fresh"}},
            'paceline.moe.splitting is "fresh": it says how copies share tokens and there are none; drop it, or write '
            '"replicas": 1.',
        ),
        (
            {"pipeline": {"partition": {"methods": "uniform"}}},
            'paceline.pipeline.partition.methods is not a key of this version of paceline; did you mean "method"? '
            'Valid keys of paceline.pipeline.partition: "memory_gib", "method", "profile", "repartition_every".',
        ),
        (
            {"pipeline": {"stages": "auto"}},
            'paceline.pipeline.stages is "auto": the paceline section has no "auto"; leave the key out to have it '
            "chosen.",
        ),
        (
            {"pipeline": {"stages": "4"}},
            'paceline.pipeline.stages is "4": it must be a valid integer; leave the key out to have it chosen.',
        ),
        (
            {"pipeline": {"stages": True}},
            "paceline.pipeline.stages is true: it must be a valid integer; leave the key out to have it chosen.",
        ),
        (
            {"pipeline": {"stages": 0}},
            "paceline.pipeline.stages is 0: it must be greater than or equal to 1; leave the key out to have it "
            "chosen.",
        ),
        (
            {"pipeline": {"partition": "best"}},
            'paceline.pipeline.partition.method is "best": it must be "work", "parameters", "uniform", "hetero", '
            '"type:<regex>", weights {"<regex>": weight} or a list of boundaries; leave the key out to have it chosen.',
        ),
        (
            {"pipeline": {"partition": [0, 4, 4]}},
            "paceline.pipeline.partition.method is [0, 4, 4]: boundaries must be whole numbers that start at 0 and "
            "strictly increase, such as [0, 5, 9]; leave the key out to have it chosen.",
        ),
        (
            {"pipeline": {"partition": "type:("}},
            'paceline.pipeline.partition.method is "type:(": what follows type: must be a regular expression (missing '
            "), unterminated subpattern at position 0); leave the key out to have it chosen.",
        ),
        (
            {"pipeline": 4},
            "paceline.pipeline is 4: it must be an object; leave it out or write {}.",
        ),
        (
            {"report": {"metrics": "yes"}},
            'paceline.report.metrics is "yes": it must be a valid boolean; leave the key out to have it chosen.',
        ),
        (
            {"report": {"trace_every": 0}},
            "paceline.report.trace_every is 0: it must be greater than or equal to 1; leave the key out to have it "
            "chosen.",
        ),
    ],
)
def test_refusals(keys, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        section(**keys)


def test_section_must_be_an_object():
    with pytest.raises(ValueError, match=r"^paceline is \[\]: it must be an object"):
        PacelineConfig.of({"paceline": []})


@pytest.mark.parametrize("bad", [[], [0], [1, 2], [0, 2.0], [0, True], ["a"], [0, -1]])
def test_bad_boundaries(bad):
    with pytest.raises(ValueError, match="strictly increase"):
        section(pipeline={"partition": bad})


def test_schema_describes_every_field():
    schema = PacelineConfig.model_json_schema()
    objects = [schema, *schema["$defs"].values()]
    fields = {name: field for node in objects for name, field in node.get("properties", {}).items()}
    assert {"pipeline", "stages", "partition", "schedule", "report", "metrics", "trace_every"} <= set(fields)
    for field in fields.values():  # a description equal to the one of the section stands there only
        assert field.get("description") or schema["$defs"][field["$ref"].rpartition("/")[2]]["description"]
    assert all(node["additionalProperties"] is False for node in objects)


def test_read_copies_a_dict():
    source = {"optimizer": {"params": {"lr": 1}}}
    config = read_ds_config(source)
    config["optimizer"]["params"]["lr"] = 2
    assert source == {"optimizer": {"params": {"lr": 1}}}


def test_read_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"bf16": {"enabled": true}, "list": [{"a": "{,"}, {"a": 2}], "a": "a"}')
    assert read_ds_config(path) == json.loads(path.read_text())
    assert read_ds_config(str(path)) == read_ds_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": {"x": [{"c": 1}, {"c": 1}],\n  "x": 2}}', 'line 3, column 3: duplicate key "x", first at '
         "line 2, column 8; keep one of them."),
        ('{"a\\u0062": 1, "ab": 2}', 'line 1, column 16: duplicate key "ab", first at line 1, column 2; keep one of '
         "them."),
        ('{"a": "NaN",\n "b": NaN}', "line 2, column 7: NaN is not JSON; write a number or null."),
        ('{"a": 1,}', "line 1, column 8: Illegal trailing comma before end of object; correct the JSON there."),
        ('{"a": 1 // one\n}', "line 1, column 9: Expecting ',' delimiter"),
        ('// one\n{"a": 1}', "line 1, column 1: Expecting value; delete the comments, which JSON does not have."),
        ('\ufeff{"a": 1}', "line 1, column 1: Unexpected UTF-8 BOM (decode using utf-8-sig); save the file as UTF-8 "
         "without a BOM."),
        ("\n", "the file is empty; a DeepSpeed config is an object: write {} for the defaults."),
        ("[]", None),
    ],
)  # fmt: skip
def test_strict_json(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r".") as error:
        read_ds_config(path)
    if message is None:
        assert str(error.value) == f"{path}: holds list, a DeepSpeed config is an object {{...}}."
    elif "trailing" in message and sys.version_info < (3, 13):
        assert str(error.value).startswith(f"{path}, line 1, column 9: ")
    else:
        assert str(error.value).startswith((f"{path}, {message}", f"{path}: {message}"))


def test_a_file_that_cannot_be_read():
    """As one that the user may not read, which root always may."""
    path = "/proc/self/mem"
    with pytest.raises(ValueError, match=rf"^{path}: Input/output error; give the path of a DeepSpeed JSON\.$"):
        read_ds_config(path)


def test_the_name_of_the_section_misspelt():
    """All that the section asks for would be lost without a word."""
    with pytest.raises(ValueError, match=r'^"pacelin" is not a key that DeepSpeed reads: did you mean "paceline"\?$'):
        PacelineConfig.of({"pacelin": {"pipeline": {"stages": 2}}})
    for others in ({"pace": {}, "paceline": {}, "paceline_": {}}, {"_paceline": {"pipeline": {"stages": 2}}}):
        assert PacelineConfig.of(others) == PacelineConfig.of({})


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json: No such file .*; give the path of a DeepSpeed JSON\.$"):
        read_ds_config(tmp_path / "none.json")
    with pytest.raises(ValueError, match="Is a directory"):
        read_ds_config(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"\xe9": 1}')
    with pytest.raises(ValueError, match="not UTF-8"):
        read_ds_config(tmp_path / "latin.json")


def test_near_misses(caplog):
    config = {
        "gradient_acumulation_steps": 4,
        "train_micro_batch_size": 1,
        "_comment": "mine",
        "paceline": {},
        "packeline": {},
        "pipeline": {"stage": 2, "stages": 2, "comment": "mine"},
        "checkpoint": {"load_universel": True},
        "activation_checkpointing": {"partitioned_activations": True},
        "optimizer": {"type": "Adam", "params": {"lrr": 1}},
        "elasticity": {},
    }
    assert near_misses(config) == [
        '"elasticity" was removed from DeepSpeed, which refuses a config that has it; delete it.',
        '"gradient_acumulation_steps" is not a key that DeepSpeed reads; did you mean "gradient_accumulation_steps"?',
        '"train_micro_batch_size" is not a key that DeepSpeed reads; did you mean "train_micro_batch_size_per_gpu"?',
        '"packeline" is not a key that DeepSpeed reads; did you mean "paceline"?',
        '"activation_checkpointing.partitioned_activations" is not a key that DeepSpeed reads; did you mean '
        '"activation_checkpointing.partition_activations"?',
        '"checkpoint.load_universel" is not a key that DeepSpeed reads; did you mean "checkpoint.load_universal"?',
        '"pipeline.stage" is not a key that DeepSpeed reads; did you mean "pipeline.stages"?',
    ]
    with caplog.at_level(logging.WARNING, logger="paceline"):
        warn_near_misses(config)
    assert caplog.messages == near_misses(config)
    assert {record.name for record in caplog.records} == {"paceline"}


RECORD = """
import json
from deepspeed.runtime import config

class Keys:
    def __init__(self, spy): self.spy = spy
    def __contains__(self, key): return key in self.spy
    def __iter__(self): return dict.__iter__(self.spy)

class Spy(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.seen = set()
    def __contains__(self, key): self.seen.add(key); return super().__contains__(key)
    def __getitem__(self, key): self.seen.add(key); return super().__getitem__(key)
    def get(self, key, default=None): self.seen.add(key); return super().get(key, default)
    def keys(self): return Keys(self)
    def __copy__(self): return self

sections = {name: Spy() for name in (
    "activation_checkpointing", "checkpoint", "data_types", "flops_profiler", "torch_autocast")}
sections["optimizer"] = Spy(type="Adam", params=Spy())
sections["scheduler"] = Spy(type="WarmupLR", params=Spy())
whole = Spy(train_batch_size=1, **sections)
parsed = config.DeepSpeedConfig(whole)
print(json.dumps({
    "top": sorted(whole.seen),
    "removed": sorted(config._REMOVED_TOP_LEVEL_CONFIG_KEYS),
    "sections": {name: sorted(spy.seen) for name, spy in sections.items()} | {"pipeline": sorted(parsed.pipeline)},
}))
"""


def test_known_keys_are_what_deepspeed_reads():
    """DeepSpeed parses a dict that writes down which keys it is asked for. A process of its own, for its logging."""
    out = subprocess.run([sys.executable, "-c", RECORD], capture_output=True, text=True, check=True, timeout=900).stdout
    read = json.loads(out.splitlines()[-1])
    assert set(read["removed"]) == REMOVED
    # Read by deepspeed.initialize, and by the deprecated form of zero_optimization.
    elsewhere = {"data_parallel_size", "sequence_parallel_size", "allgather_size"}
    assert set(read["top"]) - REMOVED | elsewhere == TOP_LEVEL
    # Read by the pipeline engine.
    read["sections"]["pipeline"].append("use_reentrant")
    assert {name: frozenset(keys) for name, keys in read["sections"].items()} == SECTIONS


def test_what_is_shown_of_a_config_has_no_secrets() -> None:
    from paceline.config import without_secrets

    config = {
        "comet": {"enabled": True, "api_key": "abc", "project": "mine"},
        "wandb": {"team": "us", "API_TOKEN": "def", "password": ""},
        "optimizer": [{"params": {"lr": 1e-3, "key_size": 3}}],
    }
    assert without_secrets(config) == {
        "comet": {"enabled": True, "api_key": "hidden", "project": "mine"},
        "wandb": {"team": "us", "API_TOKEN": "hidden", "password": ""},
        "optimizer": [{"params": {"lr": 1e-3, "key_size": 3}}],
    }
