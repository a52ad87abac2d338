"""DeepSpeed's shared-memory collectives, which it compiles on every CPU machine before it does anything else."""

from __future__ import annotations

from paceline.patches.registry import Patch, Use

NO_SHM_COMM = Patch(
    target="deepspeed.ops:__compatible_ops__[deepspeed_shm_comm]",
    make=Use(False),
    requires="deepspeed>=0.19.8,<0.20",
    reason="init_distributed compiles a C++ extension for half a minute on each CPU machine, and gloo does without it",
    removable_when="DeepSpeed has a switch for the extension, or ships it built",
    watches="deepspeed.comm.torch:build_shm_op",
    fingerprint="2bf3cff9e3d1",
    accelerator="cpu",
    applied_by="paceline.initialize, paceline.launch.patched and the import of PacelineTrainer, on a CPU",
    optional=True,  # without it a run only starts later
)

PATCHES = (NO_SHM_COMM,)
