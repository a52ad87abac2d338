"""The main job: fine-tune a Hugging Face causal LM as a DeepSpeed pipeline, and export it again.

Started by DeepSpeed's launcher on every rank::

    deepspeed --num_gpus 2 --module paceline.launch.finetune \
        --model_name_or_path Qwen/Qwen3-0.6B --train_file notes.jsonl --output_dir tuned --deepspeed ds_configs/pp2.json

Without a model and data it trains a small Llama on the Python standard library's own source files; nothing is
downloaded.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING

from paceline.comm.launcher_variables import translate
from paceline.comm.single_process import become_a_world, is_alone
from paceline.doctor.meeting import Place, Unmet
from paceline.imports import few_collections
from paceline.messages import brief
from paceline.supervise.lifetime import INTERRUPTED, PREEMPTED, Preempted, Preemption, end_process

if TYPE_CHECKING:
    from paceline.launch.job import Job

logger = logging.getLogger("paceline")

EMBEDDED_MODEL = {
    "model_type": "llama",
    "config_overrides": "hidden_size=128,intermediate_size=384,num_hidden_layers=4,num_attention_heads=4,"
    "num_key_value_heads=4,max_position_embeddings=512,initializer_range=0.08",
    "block_size": "128",
    "max_steps": "240",
    "learning_rate": "6e-3",
    "adam_beta2": "0.95",
    "lr_scheduler_type": "cosine",
    "warmup_steps": "10",
    "per_device_train_batch_size": "2",
    "gradient_accumulation_steps": "4",
    "logging_steps": "20",
    "eval_steps": "80",
    "max_eval_samples": "64",
    "output_dir": "runs/quickstart",
    "overwrite_output_dir": "true",
    "sample_prompt": "    def __init__(self, ",
}
"""Flags of the embedded default; one on the command line replaces its entry."""

OVERRULED = {
    "eval_strategy": "eval_steps",
    "num_train_epochs": "max_steps",
    "warmup_ratio": "warmup_steps",
    "output_dir": "overwrite_output_dir",
}
"""A flag on the command line, and the embedded default's flag that would contradict it."""

_MEETING = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_FAILED_END_S = 10.0

MODEL_FLAGS = ("model_name_or_path", "model_type", "config_name")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on this rank; returns the exit code.

    0: done; 1: a failure; 2: wrong input; 143: stopped by SIGTERM, SIGUSR1 or the launcher's end, and saved if training
    had begun; 130: interrupted (Ctrl-C).
    """
    # gloo and datasets threads would fight over the cores that the ranks compute on.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    translate(os.environ)
    if is_alone(os.environ):
        become_a_world(os.environ)
    elif absent := _absent_variables():
        text = f"a launcher of several processes (mpirun, srun) has started this one without {', '.join(absent)}"
        print(f"paceline: error: {text}: start with deepspeed or torchrun, or set them.", file=sys.stderr, flush=True)
        return 2
    elif fault := _fault_of_variables():
        print(f"paceline: error: {fault}.", file=sys.stderr, flush=True)
        return 2
    rank = int(os.environ["RANK"])
    _set_up_logging(rank)
    # Before the imports that take seconds: from here on a launcher that ends takes its ranks with it.
    with Preemption(in_training=False, interrupt=True, tell=_stop_all):
        try:
            _train(list(sys.argv[1:] if argv is None else argv))
            code = 0
        except Preempted as stop:
            if rank == 0:
                print(f"paceline: {stop}", file=sys.stderr, flush=True)
            code = PREEMPTED
        except Exception as error:
            return _fail(rank, error)
        return _leave_together(code)


def _absent_variables() -> list[str]:
    """Those that the ranks need to meet, and do not have; DeepSpeed asks MPI for all but RANK if there is mpi4py."""
    absent = [name for name in _MEETING if not os.environ.get(name)]
    return absent if "RANK" in absent or find_spec("mpi4py") is None else []


def _fault_of_variables() -> str:
    """Why the ranks could not meet by what the launcher has set; empty: they can, or it is MPI that tells them."""
    if not all(os.environ.get(name) for name in _MEETING):
        return ""
    try:
        Place.of(os.environ)
    except Unmet as unmet:
        return f"{unmet}; {unmet.finding.remedy}"
    return ""


def _train(argv: list[str]) -> None:
    with few_collections():
        job = _prepared(argv)
    job.run()


def _prepared(argv: list[str]) -> Job:
    """The job that the command line asks for, joined with the other ranks."""
    from paceline.hf.arguments import parse

    first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
    with contextlib.nullcontext() if first_of_host else contextlib.redirect_stdout(io.StringIO()):  # --help, once
        model_args, data_args, train_args, given = parse(_with_embedded_defaults(argv))
    if train_args.deepspeed is not None:
        given &= parse(argv)[3]  # a JSON's values go before the embedded defaults, not before the user's flags
    if model_args.model_name_or_path and not (data_args.dataset_name or data_args.train_file):
        raise ValueError(
            f"--model_name_or_path {model_args.model_name_or_path}: there is no data to fine-tune it on; "
            "add --dataset_name or --train_file."
        )
    from paceline.launch.job import Job
    from paceline.runtime.initialize import start_distributed
    from paceline.supervise.watch import WATCH

    start_distributed(timeout=timedelta(seconds=train_args.ddp_timeout))
    WATCH.start(train_args.ddp_timeout)
    return Job(model_args, data_args, train_args, given, _command(argv))


def _command(argv: list[str]) -> str:
    """The command for the report; the launcher is inferred from the environment, a token is hidden."""
    from paceline.config import accelerates_ds_config, accelerates_precision

    size, precision = int(os.environ["WORLD_SIZE"]), accelerates_precision(os.environ)
    # Each time torchrun's name, then DeepSpeed's.
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or str(size)
    known = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("CROSS_SIZE")
    nodes = int(known or size // int(local))
    if any(arg.startswith(("--local_rank=", "--local-rank=")) for arg in argv):
        if nodes * int(local) == size:
            words = ["deepspeed", *(["--num_nodes", str(nodes)] if nodes > 1 else []), "--num_gpus", local]
        else:  # machines with different numbers of ranks; only a hostfile says which
            words = ["deepspeed", "--hostfile", "HOSTFILE"]
        words.append("--module")
    elif file := accelerates_ds_config(os.environ):
        words = ["accelerate", "launch", "--use_deepspeed", "--deepspeed_config_file", file]
        words += [] if precision is None else ["--mixed_precision", precision]
        words += [*(["--num_machines", str(nodes)] if nodes > 1 else []), "--num_processes", str(size), "--module"]
    elif size > 1:
        words = ["torchrun", *(["--nnodes", str(nodes)] if nodes > 1 else []), "--nproc_per_node", local]
        words.append("-m")
    else:
        words = ["python", "-m"]
    own = [arg for arg in argv if not arg.startswith(("--local_rank=", "--local-rank="))]
    for place, arg in enumerate(own):
        if arg.startswith("--token="):
            own[place] = "--token=hidden"
        elif place and own[place - 1] == "--token":
            own[place] = "hidden"
    says = any(arg.startswith(("--bf16", "--fp16")) for arg in own)
    if precision is not None and not says and words[0] != "accelerate":  # which has started it all the same
        own.append(f"--{precision}")
    return shlex.join([*words, "paceline.launch.finetune", *own])


def _with_embedded_defaults(argv: list[str]) -> list[str]:
    """The command line with the embedded model's settings before it, if it names no model."""
    named = {arg.removeprefix("--").partition("=")[0].replace("-", "_") for arg in argv if arg.startswith("--")}
    own = [arg for arg in argv if not arg.startswith(("--local_rank=", "--local-rank="))]  # not the launcher's
    if named & set(MODEL_FLAGS) or (len(own) == 1 and own[0].endswith(".json")):
        return argv
    dropped = {OVERRULED[name] for name in named & set(OVERRULED)}
    defaults = {name: value for name, value in EMBEDDED_MODEL.items() if name not in dropped}
    return [*(part for name, value in defaults.items() for part in (f"--{name}", value)), *argv]


def _set_up_logging(rank: int) -> None:
    """Rank 0 says what all could say, the others errors of their own; all say all with ``PACELINE_LOG=debug``."""
    asked = os.environ.get("PACELINE_LOG", "INFO")
    known = logging.getLevelName(asked.upper())
    level = known if isinstance(known, int) else logging.INFO
    handler = logging.StreamHandler()
    prefix = "paceline" if rank == 0 else f"paceline rank {rank}"
    handler.setFormatter(logging.Formatter(f"[{prefix}] %(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level if rank == 0 or level < logging.INFO else max(level, logging.ERROR))
    if level is not known:
        logger.warning("PACELINE_LOG is %s: choose debug, info, warning or error; it is info now", brief(asked, 100))


def _fail(rank: int, error: BaseException) -> int:
    """Report an error that all ranks have once; of an error of this rank alone, have the first cause reported once.

    Returns the exit code: the first cause's where that is no failure (this rank has lost one that was told to stop).
    """
    from paceline.comm.control import is_shared
    from paceline.supervise.watch import WATCH, describe, is_input

    logger.debug("failed", exc_info=error)
    code = 2 if is_input(error) else 1
    if is_shared(error):
        speaks = rank == 0
    elif _is_distributed():
        cause = WATCH.fail(error)
        return code if cause.code == 1 else cause.code
    else:  # wrong flags, which every rank of a node sees alike
        speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    if speaks:
        print(f"paceline: error: {describe(error)}", file=sys.stderr, flush=True)
    WATCH.close()
    return code


def _is_distributed() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _leave_together(code: int) -> int:
    """Take down the process group in order: gloo's threads abort the process when it ends under them."""
    import torch.distributed as dist

    from paceline.supervise.watch import EVERYONE, WATCH

    try:
        WATCH.doing("leaving", EVERYONE)
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        logger.debug("leaving: %s", error)
        cause = WATCH.fail(error)
        return cause.code if cause.code != 1 else code or 1
    WATCH.close()
    return code


def _stop_all(code: int, text: str) -> None:
    """End the other ranks before a signal ends this process, and have ``text`` said once."""
    watch = sys.modules.get("paceline.supervise.watch")
    if code == INTERRUPTED and watch is not None and watch.WATCH.step >= 0:
        text += f" at step {watch.WATCH.step}; what was done since the last checkpoint is lost"
    if watch is not None:
        watch.WATCH.stop_all(code, text)
    elif text and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"paceline: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if not __package__:  # started by its path: files beside it have names of the standard library (profile, trace)
        beside = os.path.dirname(os.path.realpath(__file__))
        sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != beside]
    code = main()
    if code not in (0, PREEMPTED):  # ranks have not left together: what is done at the end may wait for one of them
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a launcher sends as soon as the first rank has ended
        limit = threading.Timer(_FAILED_END_S, end_process, [code])
        limit.daemon = True
        limit.start()
    with contextlib.suppress(SystemExit):
        sys.exit(0 if code == PREEMPTED else code)  # wandb hears there whether the run failed
    atexit._run_exitfuncs()  # wandb writes the end of its run
    # Not left to Python: after an error, threads of gloo or NCCL may still wait for a peer that is gone.
    end_process(code)
