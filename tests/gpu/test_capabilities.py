"""Every capability on one GPU that all its ranks share, staged through host memory: the numbers of the CPU.

With ``PACELINE_GPU_TESTS_ON=cpu`` in the environment both sides run on the CPU, so that jobs, table and comparison are
tried where there is no GPU::

    PACELINE_GPU_TESTS_ON=cpu bash tests/run.sh tests/gpu/test_capabilities.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from gpu.capabilities import CAPABILITIES
from gpu.sides import ON_CPU, ONE_GPU, REHEARSAL, assert_ran_on, assert_trained, differences, run, run_on_cpu


@pytest.mark.gpu(is_rehearsed=True)
@pytest.mark.parametrize("name", list(CAPABILITIES))
def test_on_one_gpu_as_on_the_cpu(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    capability = CAPABILITIES[name]
    if capability.needs:
        pytest.importorskip(capability.needs)
    wanted = run_on_cpu(name, tmp_path / "wanted")
    found = run(name, tmp_path / "found", ON_CPU if REHEARSAL else ONE_GPU)
    assert_trained(wanted)
    assert_ran_on(found, "gloo" if REHEARSAL or capability.ranks > 1 else "nccl", num_gpus=0 if REHEARSAL else 1)
    apart = differences(found, wanted)
    record_property("differences", apart)
    limits = asdict(capability.tolerance)
    assert all(apart[what] <= limit for what, limit in limits.items()), (apart, limits)
