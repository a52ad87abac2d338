"""Cases of the fuzz: command lines with their files, most of them one step away from what is valid.

A case is decided by a seed and its number. The list of commands and their flags is the parser's own, so that a command
that is new is fuzzed too; :data:`RECIPES` says what a valid command line of the known ones looks like.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzzing.values import Damage, dump

COMMAND, CONFIG, JOB, ENVIRONMENT, PROGRAM = "command", "config", "job", "environment", "program"
"""What a case calls: ``paceline`` itself; what reads and resolves a DeepSpeed JSON; the job's flags; what reads
variables of the environment; a process of its own."""

Recipe = Sequence[str]
_PLAN = ("--devices", "4", "--flops-per-s", "1e12", "--train-batch-size", "16")
_FIT = ("--device-memory-gib", "1", "--world-size", "2")
_STEP = ("--micro-batches", "4", "--forward", "0.02", "--backward", "0.04")
RECIPES: dict[str, Sequence[Recipe]] = {
    "check-config": (("@ds/*.json",), ("@ds/*.json", "--world-size", "4", "--num-layers", "8")),
    "check-model": (("@models/*",), ("@models/*/config.json",)),
    "schema": ((),),
    "patches": ((),),
    "export": (("@run", "out"), ("@run/checkpoint-2", "out", "--dtype", "bfloat16", "--max-shard-size", "20KB")),
    "simulate": (
        ("--stages", "4", *_STEP, "--transfer", "0.01"),
        ("--stages", "3", *_STEP, "--schedule", "kfkb", "--k", "2", "--latency", "0.1,0.2"),
        ("--stages", "2", *_STEP, "--schedule", "multidirection", "--staleness", "0"),
        ("--stages", "3", *_STEP, "--schedule", "eager", "--slack", "1.5", "--draw", "x.svg"),
        ("--stages", "2", *_STEP, "--compare"),
        ("--costs", "@costs.json", "--micro-batches", "4", "--trace", "x.json"),
        ("--costs", "@costs.json", "--micro-batches", "3", "--compare"),
        ("--schedule-file", "@schedule.txt", "--forward", "1,2", "--backward", "2"),
    ),
    "partition": (
        ("--costs", "@blocks.json"),
        ("--costs", "@live_blocks.json", "--micro-batches", "4", "--schedule", "eager", "--slack", "1"),
        ("--costs", "@matrix.json", "--order", "search"),
        ("--costs", "@blocks.json", "--micro-batches", "3", "--schedule", "kfkb", "--k", "2"),
    ),
    "place": (
        ("--loads", "@expert_loads.json", "--devices", "2"),
        ("--loads", "@expert_loads.json", "--devices", "2", "--replicas", "1", "--current", "@current.json"),
        ("--loads", "@expert_loads.json", "--devices", "4", "--nodes", "2", "--slots-per-device", "1"),
        ("--loads", "@expert_loads.json", "--devices", "2", "--replicas", "1", "--keep-owners"),
    ),
    "profile": (
        ("@models/llama", "--seq-length", "8", "--output", "new.json"),
        ("@models/mixtral", "--dtype", "float32"),
    ),
    "fit": (
        ("@models/llama", "--deepspeed", "@ds/*.json", *_FIT),
        ("@models/*", "--deepspeed", "@ds/*.json", *_FIT, "--seq-length", "16", "--dtype", "bfloat16"),
        ("@models/llama", "--deepspeed", "@ds/extra_profile.json", "--world-size", "2", "@+profile.json"),
    ),
    "plan": (
        ("@models/llama", *_PLAN),
        ("@models/mixtral", *_PLAN, "--loads", "@expert_loads.json", "--rebalanced"),
        ("@models/llama", "--cluster", "@cluster.json", "--train-batch-size", "8", "--write", "out"),
        ("@models/llama", "--devices", "2", "--train-batch-size", "8", "--profile", "@profile.json"),
    ),
    "trace": (("@recorded",), ("@recorded", "--step", "1", "--output", "out"), ("@run", "--format", "png")),
    "report": (("@run",),),
    "loads": (("@loads.jsonl",), ("@loads.jsonl", "-o", "x.svg")),
    "lighthouse": ((),),
    "doctor": (("--deepspeed", "@ds/*.json", "--output-dir", "out"),),
    "measure": (("@models/llama",),),
    "finetune": (
        ("--deepspeed", "@ds/*.json", "--output_dir", "out"),
        ("--model_name_or_path", "@models/llama", "--train_file", "@rows.jsonl", "--learning_rate", "1e-4"),
        ("--model_type", "llama", "--config_overrides", "hidden_size=64,num_hidden_layers=4", "--max_steps", "4"),
        ("--eval_strategy", "steps", "--eval_steps", "5", "--save_strategy", "steps", "--save_steps", "7", "--bf16"),
        ("--resume_from_checkpoint", "auto", "--warmup_ratio", "0.1", "--max_shard_size", "20KB", "--seed", "3"),
        ("--train_file", "@rows.jsonl", "--streaming", "--max_steps", "3", "--shuffle_buffer_size", "9"),
        ("@flags.json",),
    ),
}  # fmt: skip
"""By command, valid lines: ``@name`` is an input (``*``: any that there is), ``@+name`` one that lies beside."""

WEIGHTS = {
    **{"check-config": 26, "simulate": 11, "partition": 9, "place": 8, "loads": 6, "trace": 5, "lighthouse": 2},
    **{
        "fit": 4,
        "plan": 4,
        "check-model": 3,
        "export": 4,
        "profile": 1,
        "patches": 0.6,
        "schema": 0.4,
        "measure": 0.5,
        "doctor": 0.6,
    },
    **{CONFIG: 24, "finetune": 14, ENVIRONMENT: 1.5},
}
"""How many cases of a hundred and more; :data:`NEW` of any other command."""

NEW = 3.0
SLOW_TO_START = 0.3
"""How often a process is a command that imports torch and more, by how often it is another one."""

_WITH_TORCH = ("check-model", "doctor", "export", "finetune", "fit", "measure", "patches", "plan", "profile")
ONLY_ERRORS = {
    "lighthouse": (("--port", "-1"), ("--min-islands", "0"), ("--heartbeat-timeout-s", "nan")),
    "measure": (("--no-such-flag",),),
}
"""Commands that go on until they are told to stop, or start processes: with what makes any line of them wrong."""
_SWITCHES = {"--measure": ("--profile", "nowhere")}
"""Likewise for single flags."""
_ENVIRONMENT = ("PACELINE_ISLAND", "PACELINE_LOG")
_TWO_RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@dataclass
class Case:
    """One call.

    Args:
        number: by which it can be made again.
        call: one of the constants above.
        command: of ``paceline``, or ``finetune`` or ``measure``.
        inputs: of the case's folder: what each name in it is a copy of.
        files: contents that are written then, hexadecimal.
        edits: of binary files, after that.
        folders: made instead of files.
        values: what the call takes beside a command line.
    """

    number: int
    call: str
    command: str
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    edits: list[list[Any]] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Cases:
    """All cases of a seed.

    Args:
        inputs: the folder that :func:`benchmarks.fuzzing.inputs.make` has filled.
        noise: values of :func:`benchmarks.fuzzing.values.noise`.
    """

    def __init__(self, inputs: Path, seed: int, noise: Sequence[Any]) -> None:
        self.folder = inputs
        self.seed = seed
        self.noise = noise
        self.flags = _flags()
        self.there = sorted(str(path.relative_to(inputs)) for path in inputs.rglob("*"))
        weights = {name: WEIGHTS.get(name, NEW) for name in (*self.flags, CONFIG, ENVIRONMENT)}
        self.names, self.weights = list(weights), list(weights.values())

    def __call__(self, number: int, *, own_process: bool = False) -> Case:
        """Case ``number``.

        Args:
            own_process: the command as a process that is started for it.
        """
        maker = _Maker(self, random.Random(f"{self.seed}:{number}:{own_process}"), number)
        if not own_process:
            return maker.case(maker.rng.choices(self.names, self.weights)[0])
        weights = [SLOW_TO_START if name in _WITH_TORCH else 1.0 for name in self.flags]
        case = maker.case(maker.rng.choices(list(self.flags), weights)[0], own_process=True)
        case.call = PROGRAM
        return case


class _Maker:
    def __init__(self, cases: Cases, rng: random.Random, number: int) -> None:
        self.cases = cases
        self.rng = rng
        self.damage = Damage(rng, cases.noise)
        self.number = number

    def case(self, name: str, *, own_process: bool = False) -> Case:
        if name == CONFIG:
            return self._config()
        if name == ENVIRONMENT:
            env = {key: self.damage.word() for key in _ENVIRONMENT}
            section = self.damage.document({"lighthouse": "localhost:29510", "min_islands": 2}, self.rng.randrange(2))
            return Case(self.number, ENVIRONMENT, "environment", env=env, values={"section": dump(section)})
        case = Case(self.number, JOB if name == "finetune" else COMMAND, name)
        self._line(case, name)
        if name in RECIPES and case.inputs and self.rng.random() < (0.95 if name == CONFIG else 0.65):
            self._damage_file(case)
            if self.rng.random() < 0.1:
                case.argv = self.damage.words(case.argv, self.cases.flags[name])
        elif self.rng.random() < 0.93:
            case.argv = self.damage.words(case.argv, self.cases.flags[name])
        if name in ONLY_ERRORS:
            case.argv += self.rng.choice(ONLY_ERRORS[name])
        if name == "finetune" and own_process:
            case.argv += ["--no_such_flag"]
        for switch, contradiction in _SWITCHES.items():
            if any(word.startswith(switch) for word in case.argv):
                case.argv += contradiction
        return case

    def _line(self, case: Case, name: str) -> None:
        """A valid command line, or for a command without a recipe one that may be."""
        rng = self.rng
        recipe = rng.choice(RECIPES[name]) if name in RECIPES else [f"@{rng.choice(self.cases.there)}"]
        for word in recipe:
            if not word.startswith("@"):
                case.argv.append(word)
                continue
            found = [there for there in self.cases.there if Path(there).match(word.lstrip("@+"))]
            if "*" not in word:
                found = [there for there in self.cases.there if there == word.lstrip("@+")]
            if not found:  # inputs without a run
                case.argv.append(word.lstrip("@+"))
                continue
            source = rng.choice(found)
            target = source if word.startswith("@+") or name != "check-model" else source.replace("/", "_", 1)
            case.inputs[target] = source
            if not word.startswith("@+"):
                case.argv.append(target)
        if "--json" in self.cases.flags[name] and rng.random() < 0.5:
            case.argv.append("--json")

    def _damage_file(self, case: Case) -> None:
        rng = self.rng
        target = rng.choice(list(case.inputs))
        source = self.cases.folder / case.inputs[target]
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.is_file() and path.stat().st_size < 10**5)
            if not inside:
                return
            path = rng.choice(inside)
            target, source = f"{target}/{path.relative_to(source)}", path
        what = rng.random()
        if what < 0.03:
            case.folders.append(target)
        elif what < 0.05:
            case.edits.append([target, "remove"])
        else:
            self._contents(case, target, source)

    def _contents(self, case: Case, target: str, source: Path) -> None:
        rng = self.rng
        data = source.read_bytes()
        try:
            text = data.decode()
            document = (
                [json.loads(line) for line in text.splitlines()] if source.suffix == ".jsonl" else json.loads(text)
            )
        except ValueError:
            if source.suffix in (".txt", ""):
                case.files[target] = self.damage.text(data.decode(errors="replace")).hex()
            else:
                case.edits += [[target, *self.damage.edit(len(data))] for _ in range(rng.choice((1, 1, 3)))]
            return
        if rng.random() < 0.22:
            case.files[target] = self.damage.text(text).hex()
            return
        document = self.damage.document(document, rng.choice((1, 1, 1, 2, 4)))
        lines = document if source.suffix == ".jsonl" and isinstance(document, list) else [document]
        case.files[target] = "\n".join(map(dump, lines)).encode("utf-8", "surrogatepass").hex()

    def _config(self) -> Case:
        """A config by the shipped ones, or one whose section follows the schema; damaged, but for a few."""
        rng = self.rng
        shipped = [name for name in self.cases.there if name.startswith("ds/")]
        document = json.loads((self.cases.folder / rng.choice(shipped)).read_text())
        if rng.random() < 0.4:
            document["paceline"] = self._by_schema(self.cases_schema(), self.cases_schema())
        values = {
            "world_size": rng.choice((1, 2, 4, 6, 8, 64)),
            "num_layers": rng.choice((1, 2, 8, 28)),
            "state_bytes": rng.choice((None, 10**9, 10**12)),
            "device_bytes": rng.choice((None, 10**9, 8 * 10**10)),
            "args": rng.random() < 0.5,
            "max_steps": rng.choice((None, 10)),
        }
        case = Case(self.number, CONFIG, CONFIG, values=values)
        if rng.random() < 0.12:
            case.files["ds.json"] = self.damage.text(dump(document)).hex()
            return case
        document = self.damage.document(document, rng.choice((0, 1, 1, 1, 2, 3)))
        case.files["ds.json"] = dump(document).encode("utf-8", "surrogatepass").hex()
        return case

    @staticmethod
    def cases_schema() -> dict[str, Any]:
        from paceline.config import PacelineConfig

        return PacelineConfig.model_json_schema()

    def _by_schema(self, schema: dict[str, Any], whole: dict[str, Any]) -> Any:
        """A value that a JSON schema allows, but for what its conditions between keys refuse."""
        rng = self.rng
        if "$ref" in schema:
            return self._by_schema(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
        if "anyOf" in schema:
            return self._by_schema(rng.choice(schema["anyOf"]), whole)
        if "enum" in schema or "const" in schema:
            return rng.choice(schema.get("enum", [schema.get("const")]))
        kind = schema.get("type", "object")
        if kind == "object":
            known = schema.get("properties", {})
            needed = schema.get("required", ())
            made = {key: self._by_schema(of, whole) for key, of in known.items() if key in needed or rng.random() < 0.4}
            inner = schema.get("additionalProperties")
            return made | ({"Layer": self._by_schema(inner, whole)} if isinstance(inner, dict) else {})
        if kind == "array":
            inner = schema.get("items", {"type": "integer"})
            return [self._by_schema(inner, whole) for _ in range(rng.randrange(4))]
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        if kind == "integer":
            return rng.choice((low, low + 1, low + rng.randrange(100)))
        if kind == "number":
            return rng.choice((low, low + 0.5, low + 100 * rng.random()))
        plain = {"boolean": rng.random() < 0.5, "null": None, "string": rng.choice(("type:Layer", "x", "localhost:1"))}
        return plain.get(kind)


def _flags() -> dict[str, list[str]]:
    """By command, all flags that its parser knows."""
    from paceline.hf.arguments import DataArguments, ModelArguments, TrainArguments
    from paceline.launch.cli import build_parser

    subparsers = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    flags = {name: sorted(sub._option_string_actions) for name, sub in subparsers.choices.items()}
    groups = (ModelArguments, DataArguments, TrainArguments)
    flags["finetune"] = sorted(f"--{name}" for group in groups for name in group.__dataclass_fields__)
    flags["measure"] = ["--output_dir", "--micro_batch_size", "--seq_length", "--dtype", "--gradient_checkpointing"]
    return flags
