"""The main capabilities where every rank has a GPU of its own: NCCL, and the numbers of the CPU.

For machines with two GPUs or more; `python tests/gpu/run.py` there runs them with all else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from gpu.capabilities import CAPABILITIES
from gpu.sides import EACH_ITS_OWN, ON_CPU, assert_ran_on, assert_trained, differences, run

NAMES = [name for name, capability in CAPABILITIES.items() if capability.with_nccl]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_several_gpus_as_on_the_cpu(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    capability = CAPABILITIES[name]
    num_gpus = torch.cuda.device_count()
    if num_gpus < capability.ranks or num_gpus < 2:
        pytest.skip(f"needs {capability.ranks} GPUs, and there are {num_gpus}: run it on a machine with as many")
    wanted = run(name, tmp_path / "wanted", ON_CPU)
    found = run(name, tmp_path / "found", EACH_ITS_OWN)
    assert_trained(wanted)
    assert_ran_on(found, "nccl", num_gpus=capability.ranks)
    apart = differences(found, wanted)
    record_property("differences", apart)
    limits = asdict(capability.tolerance)
    assert all(apart[what] <= limit for what, limit in limits.items()), (apart, limits)
