"""The main capabilities over NCCL, and the numbers of the CPU.

With as many GPUs as ranks each has its own; with fewer all share one, and each passes for a host of its own.
`python tests/gpu/run.py` runs them with all else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from gpu.capabilities import CAPABILITIES
from gpu.sides import EACH_A_HOST, EACH_ITS_OWN, assert_ran_on, assert_trained, differences, run, run_on_cpu

NAMES = [name for name, capability in CAPABILITIES.items() if capability.with_nccl]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_over_nccl_as_on_the_cpu(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    capability = CAPABILITIES[name]
    is_shared = torch.cuda.device_count() < capability.ranks
    wanted = run_on_cpu(name, tmp_path / "wanted")
    found = run(name, tmp_path / "found", EACH_A_HOST if is_shared else EACH_ITS_OWN)
    assert_trained(wanted)
    assert_ran_on(found, "nccl", num_gpus=1 if is_shared else capability.ranks)
    apart = differences(found, wanted)
    record_property("differences", apart)
    limits = asdict(capability.tolerance)
    assert all(apart[what] <= limit for what, limit in limits.items()), (apart, limits)
