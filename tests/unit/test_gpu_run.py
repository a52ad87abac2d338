"""``tests/gpu/run.py``: what takes a process, and what takes none."""

from __future__ import annotations

import pytest

from gpu.run import SKIPPED, grouped, lacking_a_gpu

FOLDER = "tests/gpu/"
ONE = f"{FOLDER}test_capabilities.py::test_on_one_gpu_as_on_the_cpu[2 stages]"
SHORT = [f"{FOLDER}test_staging.py::test_a_block_is_used_again", f"{FOLDER}test_staging.py::test_there_and_back[float]"]
LONG = [f"{FOLDER}test_migration.py::test_moved_layers_train_on_as_without[0-2-{name}]" for name in ("fp32", "bf16")]
JOB = [f"{FOLDER}test_single_gpu.py::test_main_job_on_cuda[{name}]" for name in ("fp32", "fp16")]
TWO, FOUR = (
    f"{FOLDER}test_nccl.py::test_over_nccl_as_on_the_cpu[{name}]" for name in ("2 stages", "4 stages, changing lengths")
)
ALL = [ONE, *SHORT, *LONG, *JOB, TWO, FOUR]


def test_what_a_call_loses_at_its_end_is_one_long_test() -> None:
    assert grouped(ALL) == [[ONE], SHORT, *([test] for test in (*LONG, *JOB, TWO, FOUR))]


@pytest.mark.parametrize(
    ("num_gpus", "is_rehearsal", "skipped"),
    [(0, False, ALL), (0, True, ALL[1:]), (1, False, [])],
)
def test_no_process_is_started_only_to_skip(num_gpus: int, is_rehearsal: bool, skipped: list[str]) -> None:
    found = lacking_a_gpu(ALL, num_gpus, is_rehearsal)
    assert list(found) == skipped
    assert all(test["outcome"] == SKIPPED for test in found.values())
