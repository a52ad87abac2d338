"""The main job: fine-tune a Hugging Face causal LM as a DeepSpeed pipeline, and export it again.

Started by DeepSpeed's launcher on every rank::

    deepspeed --num_gpus 2 --module paceline.launch.finetune \
        --model_name_or_path Qwen/Qwen3-0.6B --train_file notes.jsonl --output_dir tuned --deepspeed ds_configs/pp2.json

Without a model and data it trains a small Llama on the Python standard library's own source files; nothing is
downloaded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

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
    "sample_prompt": "    def __init__(self, ",
}
"""What the embedded default is made of; a flag on the command line replaces its entry."""

OVERRULED = {"eval_strategy": "eval_steps", "num_train_epochs": "max_steps", "warmup_ratio": "warmup_steps"}
"""A flag on the command line, and the embedded default's flag that would contradict it."""

MODEL_FLAGS = ("model_name_or_path", "model_type", "config_name")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on this rank; returns the exit code."""
    # gloo and datasets threads would fight over the cores that the ranks compute on.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rank = int(os.environ.get("RANK", "0"))
    _set_up_logging(rank)
    try:
        _train(list(sys.argv[1:] if argv is None else argv))
    except (ValueError, FileNotFoundError) as error:
        return _fail(rank, error, 2)
    except Exception as error:
        logger.debug("failed", exc_info=True)
        return _fail(rank, error, 1)
    return _leave(0)


def _train(argv: list[str]) -> None:
    from paceline.hf.arguments import parse

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

    start_distributed(timeout=timedelta(seconds=train_args.ddp_timeout))
    Job(model_args, data_args, train_args, given).run()


def _with_embedded_defaults(argv: list[str]) -> list[str]:
    """The command line with the embedded model's settings before it, if it names no model."""
    named = {arg.removeprefix("--").partition("=")[0] for arg in argv if arg.startswith("--")}
    if named & set(MODEL_FLAGS) or (len(argv) == 1 and argv[0].endswith(".json")):
        return argv
    dropped = {OVERRULED[name] for name in named & set(OVERRULED)}
    defaults = {name: value for name, value in EMBEDDED_MODEL.items() if name not in dropped}
    return [*(part for name, value in defaults.items() for part in (f"--{name}", value)), *argv]


def _set_up_logging(rank: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[paceline] %(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(os.environ.get("PACELINE_LOG", "INFO").upper() if rank == 0 else logging.WARNING)


def _fail(rank: int, error: BaseException, code: int) -> int:
    """One line for an error that all ranks share; a rank of its own says so."""
    from paceline.runtime.control import PeerError

    message = " ".join(str(error).split()) or type(error).__name__
    kind = "" if isinstance(error, (ValueError, FileNotFoundError, PeerError)) else f"{type(error).__name__}: "
    if rank == 0 or (code == 1 and not isinstance(error, PeerError)):
        where = f" on rank {rank}" if code == 1 and not isinstance(error, PeerError) else ""
        print(f"paceline: error{where}: {kind}{message}", file=sys.stderr, flush=True)
    return _leave(code)


def _leave(code: int) -> int:
    """Take down the process group in order: gloo's threads abort the process when it ends under them."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        try:
            if code == 0:
                dist.barrier()
            dist.destroy_process_group()
        except RuntimeError as error:  # a peer is gone, and has said why
            logger.debug("leaving: %s", error)
            return code or 1
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an interpreter that still unwinds gloo threads can turn a clean exit into an abort
