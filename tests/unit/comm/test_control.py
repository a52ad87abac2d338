"""What all ranks are told where one of them fails."""

from __future__ import annotations

import pytest

from support.ranks import run_ranks

ENDED, WRONG, BROKEN = StopIteration("the data ended"), ValueError("no such token"), RuntimeError("no memory")


def settled(errors: list[BaseException | None]) -> tuple[str, str]:
    import torch.distributed as dist

    from paceline.comm.control import ControlPlane

    dist.init_process_group("gloo")
    try:
        ControlPlane.create().settle(errors[dist.get_rank()], "reading")
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


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
        assert told == (("RuntimeError", "no memory") if error is BROKEN else wanted)
