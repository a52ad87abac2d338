"""Run a script that cannot change with the faults of DeepSpeed repaired, and with all partition methods for pipelines.

``"paceline": {"moe": …}`` in the script's JSON is honoured; DeepSpeed alone reads over it.

    deepspeed --num_gpus 2 --module paceline.launch.patched train.py --deepspeed ds.json
    torchrun --nproc_per_node 2 -m paceline.launch.patched train.py --deepspeed ds.json
    python -m paceline.launch.patched -m deepspeed.checkpoint.ds_to_universal --input_folder …

The script sees its own name and arguments, as if it had been started itself.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec

USAGE = "usage: python -m paceline.launch.patched SCRIPT [ARGUMENT ...] | -m MODULE [ARGUMENT ...]"
_BAD_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Apply the patches of DeepSpeed that fit, then run a script or a module as ``__main__``."""
    args = list(sys.argv[1:] if argv is None else argv)
    # DeepSpeed's launcher puts its argument in front of the script's own.
    from_launcher = [args.pop(0)] if args and args[0].startswith("--local_rank=") else []
    is_module = args[:1] == ["-m"]
    if is_module:
        del args[0]
    if not args or args[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 0 if args[:1] in (["-h"], ["--help"]) else _BAD_USAGE
    name, *rest = args
    if not is_module and not os.path.exists(name):
        print(f"paceline: {name}: there is no such script; {USAGE}", file=sys.stderr)
        return _BAD_USAGE

    repair()
    sys.argv = [name, *from_launcher, *rest]
    if is_module and not _is_there(name):
        print(f"paceline: {name}: there is no such module; {USAGE}", file=sys.stderr)
        return _BAD_USAGE
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
        runpy.run_path(name, run_name="__main__")
    return 0


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):  # its package is not
            return False
        raise  # what its package imports is not


def repair() -> None:
    """Apply all repairs, all partition methods for pipelines, and on a CPU no C++ build at the start."""
    from deepspeed.accelerator import get_accelerator

    from paceline.patches.deepspeed_ops import NO_SHM_COMM
    from paceline.patches.deepspeed_pipe_module import PARTITION_METHODS
    from paceline.patches.registry import apply
    from paceline.patches.repairs import repair_deepspeed

    repair_deepspeed()
    apply(PARTITION_METHODS)
    if get_accelerator().device_name() == "cpu":
        apply(NO_SHM_COMM)


if __name__ == "__main__":
    sys.exit(main())
