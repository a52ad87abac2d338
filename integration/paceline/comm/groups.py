"""Process groups of gloo's in a job whose default group is bound to a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


@contextmanager
def unbound() -> Iterator[None]:
    """Have torch make groups as if the default group were bound to no device. On all ranks together.

    DeepSpeed binds it where it is NCCL's. Every rank outside of a new group then takes part in a split of the default
    communicator, whatever backend the new group has. Ranks inside do so for a group of NCCL's only: after one of gloo's
    the ranks have made different numbers of splits, and the first operation of all of them never ends.
    """
    default = dist.group.WORLD
    assert default is not None, "a group is made before init_process_group"
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def gloo_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A new group of gloo's. Collective over all ranks of the job.

    Args:
        ranks: of its members; None for all.
        timeout: of its operations; None for torch's default.

    Returns:
        the group, or ``GroupMember.NON_GROUP_MEMBER`` on other ranks.
    """
    with unbound():
        return dist.new_group(None if ranks is None else list(ranks), backend="gloo", timeout=timeout)
