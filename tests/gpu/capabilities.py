"""Every capability once: the job that shows it, on how many ranks, and how near to the CPU a GPU comes.

The most valuable ones come first, for a GPU that is there for a short time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu import training
from support.natural import OPTIONS


@dataclass(frozen=True)
class Tolerance:
    """The most that a GPU may differ by from the CPU.

    Args:
        losses: of a loss, relative.
        norms: of a gradient norm, relative.
        changes: of all that the parameters have changed by, together: the difference's norm to that of the change.
        states: of the optimizer's states, together, in the same way.
    """

    losses: float = 1e-4
    norms: float = 1e-3
    changes: float = 1e-3
    states: float = 1e-3


FP32 = Tolerance()
ESTIMATED = Tolerance(norms=1e-2, changes=1e-2, states=1e-2)
"""A division by estimates makes more of what is rounding in small gradients."""
HALF = Tolerance(losses=2e-3, norms=1e-2, changes=5e-2, states=5e-2)
"""Kernels round to half precision at other places, and to int8 too.

On a CPU bf16 and fp32 are 2e-5, 6e-4, 2e-2 and 9e-3 apart.
"""


@dataclass(frozen=True)
class Capability:
    """What is run.

    Args:
        job: of :mod:`gpu.training`.
        options: its keyword arguments.
        ranks: of an island.
        tolerance: against the same job on the CPU.
        islands: that average with each other.
        with_nccl: whether it also runs where each rank has a GPU of its own.
        needs: a package beside Paceline's own, without which it cannot be shown.
    """

    job: Callable[..., dict[str, Any]] = training.pipeline
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    tolerance: Tolerance = FP32
    islands: int = 1
    with_nccl: bool = False
    needs: str = ""


def _pipeline(ranks: int = 2, tolerance: Tolerance = FP32, with_nccl: bool = False, **options: Any) -> Capability:
    return Capability(options=options, ranks=ranks, tolerance=tolerance, with_nccl=with_nccl)


ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
MOVING = {"moe": {"rebalance_every": 2}}
COPIED = {"moe": {"rebalance_every": 2, "replicas": 1}}
INT8 = {"forward": "int8", "backward": "int8"}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3, "torch_adam": True}}}
"""An epsilon as large as gradients are: smaller ones would make a whole step of what is rounding."""

CAPABILITIES: dict[str, Capability] = {
    "2 stages": _pipeline(with_nccl=True),
    "bf16, ZeRO 1, 2 replicas": _pipeline(4, HALF, True, config={**BF16, **ZERO_1}),
    "4 stages, changing lengths": _pipeline(4, with_nccl=True, stages=4, kind="ragged"),
    "ZeRO 0, 2 replicas": _pipeline(4, with_nccl=True),
    "ZeRO 1, 2 replicas, AdamW, clipping": _pipeline(
        4, with_nccl=True, config={**ZERO_1, **ADAMW, "gradient_clipping": 0.05}
    ),
    "checkpoints": Capability(training.checkpoints, ranks=4, with_nccl=True),
    "layers move": _pipeline(with_nccl=True, moves={1: [0, 2, 6], 2: [0, 4, 6]}),
    "hetero": _pipeline(with_nccl=True, partition={"method": "hetero", "repartition_every": 2}),
    "adaptive": _pipeline(with_nccl=True, schedule={"type": "adaptive", "retune_every": 2}),
    "experts spread": _pipeline(4, with_nccl=True, family="mixtral", config=EXPERTS),
    "experts move": _pipeline(
        4, with_nccl=True, family="mixtral", config={**EXPERTS, **ZERO_1}, section=MOVING, are_experts_moved=True
    ),
    "experts copied": _pipeline(4, family="mixtral", config=EXPERTS, section=COPIED),
    "natural gradient, max change": _pipeline(
        tolerance=ESTIMATED,
        with_nccl=True,
        section={"natural_gradient": {**OPTIONS, "max_change": {"layer": 0.02, "total": 0.05}}},
    ),
    "Trainer": Capability(training.trainer, ranks=4, with_nccl=True),
    "main job": Capability(training.main_job, with_nccl=True),
    "multidirection": _pipeline(with_nccl=True, schedule="multidirection"),
    "one_direction": _pipeline(with_nccl=True, schedule="one_direction"),
    "averaging between islands": Capability(training.island, islands=2, needs="torchft"),
    "averaging while training goes on": Capability(
        training.island, {"overlap_steps": 1, "parts": 2}, islands=2, needs="torchft"
    ),
    "fp16": _pipeline(4, HALF, config={**FP16, **ZERO_1}),
    "autocast": _pipeline(tolerance=HALF, config=AUTOCAST),
    "interleaved": _pipeline(with_nccl=True, schedule="interleaved"),
    "dualpipev": _pipeline(with_nccl=True, schedule="dualpipev"),
    "kfkb": _pipeline(with_nccl=True, schedule={"type": "kfkb", "k": 2}),
    "eager": _pipeline(with_nccl=True, schedule="eager"),
    "zbh2": _pipeline(with_nccl=True, schedule="zbh2"),
    "zbv": _pipeline(with_nccl=True, schedule="zbv"),
    "half layers": _pipeline(with_nccl=True, partition=[0, 4, 10], keys={"half_layers": True}),
    "head alone": _pipeline(with_nccl=True, partition=[0, 5, 6]),
    "head slices": _pipeline(partition=[0, 6, 9], keys={"head_slices": 4}),
    "int8 boundaries": _pipeline(with_nccl=True, tolerance=HALF, keys={"boundary": INT8}),
    "compiled layers": _pipeline(with_nccl=True, keys={"compile": True}),
    "compiled layers, split backwards": _pipeline(schedule="zbv", keys={"compile": True}),
    "recomputed layers": _pipeline(with_nccl=True, keys={"recompute": [1, 2]}),
    "recomputed layers, split backwards": _pipeline(schedule="zbh1", keys={"recompute": [1, 2]}),
    "one_direction, error feedback": _pipeline(
        with_nccl=True, schedule={"type": "one_direction", "correction": "error_feedback"}, waits_for_device=True
    ),
    "traced steps": _pipeline(section={"report": {"trace_every": 2}}, traced_steps=2),
    "activation checkpointing": _pipeline(config={"pipeline": {"activation_checkpoint_interval": 1}}),
    "embeddings not tied": _pipeline(model={"tie_word_embeddings": False}),
    "router loss": _pipeline(family="mixtral"),
    "adapters": Capability(options={"has_adapters": True}, needs="peft"),
    "1 stage": _pipeline(1, stages=1),
    **{
        f"no pipeline, ZeRO {zero}, natural gradient": Capability(
            training.plain,
            {"zero": zero, "section": {"natural_gradient": OPTIONS}},
            tolerance=ESTIMATED,
            with_nccl=zero > 1,
        )
        for zero in (1, 2, 3)
    },
    **{
        f"no pipeline, ZeRO {zero}, experts move": Capability(
            training.plain,
            {"zero": zero, "section": MOVING, "family": "mixtral", "config": EXPERTS, "are_experts_moved": True},
            with_nccl=zero == 2,
        )
        for zero in (1, 2)
    },
    "multidirection, staleness 0": _pipeline(schedule={"type": "multidirection", "staleness": 0}),
}
