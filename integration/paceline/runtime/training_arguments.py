"""TrainingArguments, and accelerate's state that they make, made to fit the ranks that have been started.

Where there is no GPU, transformers counts several processes only with ``use_cpu=True``. Without it, every rank takes
itself for rank 0 of one, although DeepSpeed's process group has been started with all of them. Where there is one,
accelerate expects NCCL, although the group is gloo's if ranks share it.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DeepSpeedPlugin
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ..comm.launcher_variables import translate
from ..config import accelerates_ds_config, accelerates_precision, read_ds_config
from ..config.section import value_at
from .trainer_refusals import asks_for_pipeline


def count_ranks(args: TrainingArguments) -> None:
    """Make ``args`` say what rank this is, and of how many, where they do not; in place.

    Raises:
        ValueError: they count other ranks than there are, and not for want of ``use_cpu``.
    """
    if args.deepspeed and not dist.is_initialized():
        translate(os.environ)
    num_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if args.world_size == num_ranks:
        return
    if args.use_cpu or args.device.type != "cpu":
        raise ValueError(
            f"TrainingArguments count {args.world_size} ranks on {args.device.type} and {num_ranks} were started: make "
            "them after the launcher has set RANK, WORLD_SIZE and LOCAL_RANK, and before any process group; on CPUs "
            "with use_cpu=True."
        )
    args.use_cpu, args.dataloader_pin_memory = True, False
    vars(args).pop("_setup_devices")  # cached, as found without use_cpu
    assert args.device.type == "cpu"  # finds it again
    assert args.world_size == num_ranks, (args.world_size, num_ranks)
    if args.deepspeed:  # its "auto" sizes were filled for one rank
        _read_json(args)


def take_accelerates_json(args: TrainingArguments) -> None:
    """Make the JSON that ``accelerate launch`` was given that of ``args``, if it is meant for Paceline; in place.

    Transformers leaves ``args.deepspeed`` at None then, where Paceline looks, and ``args.bf16`` and ``args.fp16`` at
    False where ``accelerate launch --mixed_precision`` says them. The latter also with a JSON of ``args`` for a
    pipeline, which then says it unless it says otherwise.
    """
    is_own = args.deepspeed is not None
    if is_own and not asks_for_pipeline(args):
        return
    file = args.deepspeed if is_own else accelerates_ds_config(os.environ)
    config = {} if file is None else read_ds_config(file)
    precision = None if args.bf16 or args.fp16 else accelerates_precision(os.environ)
    if is_own and (precision is None or value_at(config, f"{precision}.enabled") is False):
        return
    if "paceline" in config:
        args.deepspeed = file
        if precision is not None:
            setattr(args, precision, True)
        _read_json(args)


def _read_json(args: TrainingArguments) -> None:
    """As TrainingArguments do when they are made."""
    args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(args.deepspeed)
    args.hf_deepspeed_config.trainer_config_process(args)
    args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=args.hf_deepspeed_config)


def match_backend() -> None:
    """Tell accelerate that the process group is gloo's, if it is: it gathers GPU tensors in another way then."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        PartialState().backend = "gloo"
