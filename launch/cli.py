"""The ``paceline`` command: what can be asked without a cluster.

Nothing heavy is imported before a subcommand runs, so that ``paceline --help`` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import takewhile
from typing import Any, NoReturn

from paceline import __version__
from paceline.imports import few_collections
from paceline.messages import brief, nearest, plural, print_anything

OK, BAD_INPUT, REFUSED, INTERRUPTED = 0, 2, 3, 130

MOST = 2**20
"""Ranks, or layers, that a config is checked for."""

COMMANDS: tuple[tuple[str, str], ...] = (
    ("simulate", "Predict how long a step of a pipeline schedule takes."),
    ("partition", "Split a model's blocks over unequal devices."),
    ("place", "Say which devices should hold which experts, from the experts' loads."),
    ("profile", "Measure what each kind of layer of a model costs on this machine."),
    ("fit", "Say whether a model fits the devices, and what takes the memory."),
    ("plan", "Rank all ways to use a cluster for a model, and write the JSON of the best."),
    ("trace", "Draw a step that a run recorded, as predicted and as measured."),
    ("loads", "Show how the load of experts moved over a run, and what placing them made of it."),
    ("report", "Make a page and a JSON value of a run: what was decided, and what came of it."),
    ("extract", "Take the language model out of a multimodal one, to train it, or put it back."),
    ("lighthouse", "Run the place where islands that average their parameters find each other."),
    ("doctor", "Check an installation, or a job's ranks and what connects them; say what to fix."),
)
"""Name and help of each command that has a module of its own, with ``add_arguments`` and ``run``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status. Errors of the input or of files become one line on stderr."""
    print_anything()
    try:
        with few_collections():
            return _run(argv)
    except KeyboardInterrupt:  # Ctrl-C: whoever pressed it knows
        return INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    given = sys.argv[1:] if argv is None else argv
    parser = build_parser(given)
    if not given:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    args = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        status = command(args)
        print(end="", flush=True)
        return status
    except BrokenPipeError:  # whoever read our output has enough of it
        _drop_output()
        return OK
    except ValueError as error:
        text = str(error)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            text = f"{error.filename}: the name is too long for a file; give a shorter one."
        elif error.errno == errno.ENOSPC:
            text = f"{error.filename or 'the output'} cannot be written ({error.strerror}): write to a disk with room."
            _drop_output()
        elif error.filename is not None:
            text = f"{error.filename}: {error.strerror}; give another path, or make this one accessible."
        else:
            raise
    print(f"paceline: {brief(text)}", file=sys.stderr)
    return BAD_INPUT


def _drop_output() -> None:
    """Forget what stdout still holds, or the interpreter would fail with it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Says what was probably meant by a flag or a choice that there is not."""

    def error(self, message: str) -> NoReturn:
        super().error(brief(message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Before argparse looks: it would miss a flag that is required rather than name the one that is misspelt.
        given = list(sys.argv[1:] if args is None else args)
        own = given if self._subparsers is None else list(takewhile(lambda arg: arg.startswith("-"), given))
        for arg in takewhile(lambda arg: arg != "--", own):
            flag = arg.partition("=")[0]
            if re.fullmatch(r"--?[A-Za-z][\w-]*", flag) and flag not in self._option_string_actions:
                near = nearest(f"--{flag.lstrip('-')}".replace("_", "-"), self._option_string_actions)
                remedy = f"did you mean {near}?" if near else f"see `{self.prog} --help`."
                self.error(f"unknown flag {flag}: {remedy}")
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = nearest(str(value), choices, cutoff=0.6)
            remedy = f"did you mean {near!r}? There" if near else "there"
            raise argparse.ArgumentError(action, f"unknown {str(value)!r}: {remedy} are {', '.join(choices)}.")


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser of all commands.

    Args:
        argv: imports the module of the command in it only, and knows no other's flags; None: all.
    """
    wanted = None if argv is None else next((word for word in argv if not word.startswith("-")), "")
    parser = _Parser(
        prog="paceline", description="Fine-tune Hugging Face models as DeepSpeed pipelines.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(command=command)
        return sub

    check_config = add("check-config", _check_config, "Check a DeepSpeed JSON and show what paceline makes of it.")
    check_config.add_argument("file", metavar="FILE", help="DeepSpeed JSON")
    check_config.add_argument(
        "--world-size",
        type=_positive,
        metavar="N",
        help="number of ranks: also show what is chosen for so many (with --num-layers)",
    )
    check_config.add_argument(
        "--num-layers", type=_positive, metavar="L", help="decoder layers of the model (with --world-size)"
    )
    check_model = add("check-model", _check_model, "Say whether a Hugging Face model can be a pipeline.")
    check_model.add_argument("model", metavar="NAME_OR_DIR", help="name on the hub, or a directory with a config.json")
    check_model.add_argument(
        "--half-layers", action="store_true", help="whether its decoder layers can be cut between attention and MLP"
    )
    add("schema", _schema, 'Print the JSON schema of the "paceline" section.')
    add("patches", _patches, "List what paceline replaces in other packages at run time, and why.")
    export = add("export", _export, "Turn a checkpoint, of a killed run too, into a Hugging Face model.")
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a folder of them: its latest one")
    export.add_argument("directory", metavar="DIR", help="where to write the model")
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default 5GB)")
    export.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="default: as trained"
    )
    export.add_argument(
        "--overwrite", action="store_true", help="replace a model in DIR that is no earlier export of this run"
    )
    for name, help in COMMANDS:
        if wanted in (None, name):
            module = import_module(f"paceline.launch.{name}")
            module.add_arguments(add(name, module.run, help))
        else:
            commands.add_parser(name, help=help)
    for name, sub in commands.choices.items():
        if name not in ("schema", "lighthouse"):
            sub.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    if len(text.lstrip("0")) > len(str(MOST)) or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MOST}, which is as many as can be planned for")
    return int(text)


def _check_config(args: argparse.Namespace) -> int:
    from paceline.config import check_ds_config, open_autos, read_ds_config
    from paceline.config.for_ranks import resolve_for_ranks
    from paceline.config.stage_counts import FEWEST_THAT_GO, STAGES, may_be_planned
    from paceline.measure.profile_file import Profile

    if (args.world_size is None) != (args.num_layers is None):
        raise ValueError("--world-size and --num-layers belong together: give both, or neither.")
    config = read_ds_config(args.file)
    section = check_ds_config(
        config,
        lambda line: print(f"paceline: warning: {line}", file=sys.stderr),
        is_pipeline=None if args.world_size is None else True,
    )
    partition = section.pipeline.partition
    if partition is not None and partition.profile is not None:
        try:
            Profile.load(partition.profile)
        except ValueError as error:  # which may lie elsewhere where the job runs
            print(f"paceline: warning: paceline.pipeline.partition.profile: {error}", file=sys.stderr)
    shown: dict[str, Any] = {"paceline": section.model_dump(mode="json")}
    shown["auto"] = open_autos(config)
    if args.world_size is not None:
        batches = [key for key in shown["auto"] if key in config]
        if batches:
            print(f"paceline: {', '.join(batches)}: taken as left out; the command line decides.", file=sys.stderr)
        resolved = resolve_for_ranks(section, config, args.world_size, args.num_layers)
        names = ("stages", "data_parallel", "partition", "micro_batch_size", "micro_batches", "train_batch_size")
        shown["resolved"] = {name: getattr(resolved, name) for name in names}
        shown["resolved"]["repartition_every"] = resolved.partition_choice.repartition_every
        shown["resolved"]["schedule"] = resolved.schedule.to_dict()
        if line := may_be_planned(section, config, args.world_size):
            print(f"paceline: {line}", file=sys.stderr)
        shown["chosen"] = {path: choice._asdict() for path, choice in resolved.chosen.items()}
        if resolved.section.pipeline.stages != section.pipeline.stages:
            shown["chosen"][STAGES] = {"value": resolved.stages, "why": FEWEST_THAT_GO}
    print(json.dumps(shown, indent=2) if args.json else _config_text(shown))
    return OK


def _config_text(shown: Mapping[str, Any]) -> str:
    lines = [f'"paceline": {json.dumps(shown["paceline"])}']
    lines += [f"{path}: filled from the command line" for path in shown["auto"]]
    lines += [f"{name}: {json.dumps(value)}" for name, value in shown.get("resolved", {}).items()]
    lines += [
        f"chosen {path} = {json.dumps(choice['value'])}: {choice['why']}"
        for path, choice in shown.get("chosen", {}).items()
    ]
    return "\n".join(lines)


def _schema(args: argparse.Namespace) -> int:
    from paceline.config import PacelineConfig

    print(json.dumps(PacelineConfig.model_json_schema(), indent=2))
    return OK


def _check_model(args: argparse.Namespace) -> int:
    from paceline.hf.check import check_source

    report = check_source(args.model, **({"half_layers": True} if args.half_layers else {})).to_dict()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(f"{name}: {value}" for name, value in report.items() if value not in (None, "")))
    return REFUSED if report["verdict"] == "refused" else OK


def _patches(args: argparse.Namespace) -> int:
    from paceline.patches.registry import all_patches
    from paceline.patches.repairs import REPAIRS

    repair_of = {patch.target: name for name, patches in REPAIRS.items() for patch in patches}
    shown = ("target", "reason", "requires", "removable_when", "applied_by", "optional")
    rows: list[dict[str, Any]] = [
        {name: getattr(patch, name) for name in shown}
        | {"problem": patch.problem(), "repair": repair_of.get(patch.target), "applied": patch.is_applied()}
        for patch in all_patches()
    ]
    if args.json:
        print(json.dumps([{**row, "fits": not row["problem"]} for row in rows], indent=2))
        return OK
    for row in rows:
        state = f"{'' if row['applied'] else 'not '}applied in this process"
        here = f"refused: {row['problem']}" if row["problem"] else "fits"
        print(row["target"])
        for name, text in (
            ("why", row["reason"]),
            ("needs", row["requires"]),
            ("removable when", row["removable_when"]),
            ("repair", row["repair"]),
            ("state", state),
            ("applied by", row["applied_by"]),
            ("here", here),
        ):
            if text:
                print(f"  {name + ':':<15} {text}")
    return OK


def _export(args: argparse.Namespace) -> int:
    from paceline.checkpoint.export import export_checkpoint

    if not re.fullmatch(r"0*[1-9]\d*[KMGT]B", args.max_shard_size, re.IGNORECASE):
        rule = "must be a whole number above 0 with KB, MB, GB or TB"
        raise ValueError(f"--max-shard-size {args.max_shard_size}: {rule}; write it as 5GB.")
    for name in ("checkpoint", "directory"):
        if not getattr(args, name):
            raise ValueError(f"{name}: the name of a directory is empty; give one.")
    done = export_checkpoint(
        args.checkpoint,
        args.directory,
        max_shard_size=args.max_shard_size,
        dtype=args.dtype,
        overwrite=args.overwrite,
    )
    if args.json:
        paths = {"checkpoint": str(done.checkpoint), "directory": str(done.directory)}
        print(json.dumps({**vars(done), **paths}, indent=2))
    else:
        size = f"{plural(done.num_files, 'file')}, {done.num_bytes / 1e6:.1f} MB"
        print(f"{done.checkpoint} is now the model {done.directory}: {done.dtype}, {size} of weights.")
    return OK


if __name__ == "__main__":
    sys.exit(main())
