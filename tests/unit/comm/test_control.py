"""What all ranks are told where one of them fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.ranks import run_ranks

ENDED, WRONG, BROKEN = StopIteration("the data ended"), ValueError("no such token"), RuntimeError("no memory")


def settled(errors: list[BaseException | None]) -> tuple[str, str, bool]:
    import torch.distributed as dist

    from paceline.comm.control import ControlPlane, is_shared

    dist.init_process_group("gloo")
    try:
        ControlPlane.create().settle(errors[dist.get_rank()], "reading")
    except Exception as error:
        return type(error).__name__, str(error), is_shared(error)
    return "", "", False


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [
        ([None, None, ENDED], ("StopIteration", "the data ended")),
        ([ENDED, WRONG, None], ("ValueError", "no such token")),
        ([ENDED, BROKEN, None], ("PeerError", "rank 1 failed while reading: RuntimeError: no memory")),
    ],
)
def test_the_end_of_the_data_explains_nothing_where_another_rank_failed(
    errors: list[BaseException | None], wanted: tuple[str, str]
) -> None:
    for error, told in zip(errors, run_ranks(settled, 3, errors), strict=True):
        is_shared = wanted[0] != "StopIteration"  # nobody need tell the others
        assert told == (*(("RuntimeError", "no memory") if error is BROKEN else wanted), is_shared)


def values() -> list[Any]:
    numbers = torch.arange(6).view(2, 3)
    dtypes = (torch.int16, torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64)
    return [*map(numbers.to, dtypes), numbers.t(), torch.tensor(7, dtype=torch.int16), numbers[:0], "text"]


def shown(found: list[Any]) -> list[Any]:
    return [(str(one.dtype), one.shape, one.tolist()) if isinstance(one, torch.Tensor) else one for one in found]


def brought() -> list[Any]:
    import torch.distributed as dist

    from paceline.comm.control import ControlPlane

    dist.init_process_group("gloo")
    return shown(ControlPlane.create().over_stages(values() if dist.get_rank() == 1 else [], 1))


def test_tensors_of_any_dtype_and_size_come_to_all_stages() -> None:
    """Functions of logits return all kinds of tensors: token ids in 16 bits, for one."""
    assert run_ranks(brought, 2) == [shown(values())] * 2
