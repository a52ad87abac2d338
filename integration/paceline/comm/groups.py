"""Process groups: gloo's in a job whose default group is bound to a device, and those that end with their engine."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import deepspeed.comm
import torch.distributed as dist
from deepspeed.utils import groups as of_deepspeed

MANY = 4
"""Engines and pipelines that are there, of which most are probably gone."""

_owners: weakref.WeakSet[object] = weakref.WeakSet()
_left: list[dist.ProcessGroup] = []
"""Groups of engines and pipelines that are gone."""


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


@contextmanager
def naming_the_interface() -> Iterator[None]:
    """Around what makes gloo's groups: say what to do where ranks have met, and do not reach each other."""
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        raise RuntimeError(
            "the ranks have met, and do not reach each other: have each host's name lead to an address that the others "
            "reach, or set GLOO_SOCKET_IFNAME to such an interface on every rank (for `deepspeed --hostfile` in "
            f".deepspeed_env); `paceline doctor` says what a host's name leads to. Gloo's words: {error}"
        ) from error


@contextmanager
def naming_the_meeting_place() -> Iterator[None]:
    """Around what has all ranks meet: say what to do where the port is another's, or a rank does not come."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        words = str(error).partition("\n")[0]
        address, port, rank, ranks = map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
        if "already in use" in words:
            why = f"MASTER_PORT is {port}, which another program on this host has, such as another job: choose another "
            why += "one with --master_port of deepspeed or torchrun"
        else:
            why = f"rank {rank} has not met the others of {ranks} ranks at {address}:{port}: start all of them, with a "
            why += "MASTER_ADDR and MASTER_PORT that their hosts reach"
        raise type(error)(f"{why}. Torch's words: {words}") from error


def gloo_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A new group of gloo's. Collective over all ranks of the job.

    Args:
        ranks: of its members; None for all.
        timeout: of its operations; None for torch's default.

    Returns:
        the group, or ``GroupMember.NON_GROUP_MEMBER`` on other ranks.
    """
    with unbound(), naming_the_interface():
        return new_group(ranks, timeout, backend="gloo")


def new_group(
    ranks: Sequence[int] | None = None, timeout: timedelta | None = None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """As :func:`gloo_group`, of the job's own backend.

    Args:
        backend: another one.
    """
    # Torch 2.15 declares that it is a number on other ranks.
    return cast(
        dist.ProcessGroup,
        dist.new_group(None if ranks is None else list(ranks), backend=backend, timeout=timeout),
    )


def groups_here() -> set[dist.ProcessGroup]:
    """All groups of this rank."""
    return set(dist.distributed_c10d._world.pg_map)


def end_with(owner: object, known: Set[dist.ProcessGroup]) -> None:
    """Have the groups that were made since ``known`` ended after ``owner`` is gone, by the next
    :func:`end_left_groups`.

    Gloo's only, which each rank ends by itself: each has sockets and a thread, and a process that makes engines again
    and again would run out of them. NCCL's may wait for each other. Not those that DeepSpeed keeps for its next engine.
    """
    kept: list[object] = []
    for value in vars(of_deepspeed).values():
        kept += value.values() if isinstance(value, dict) else [value]
    made = [g for g in groups_here() - known if dist.get_backend(g) == "gloo" and not any(g is one for one in kept)]
    _owners.add(owner)
    weakref.finalize(owner, _left.extend, made).atexit = False


def end_left_groups() -> None:
    """End the groups of what is gone. Not when the garbage collector finds it: torch may be making one meanwhile.

    DeepSpeed goes on asking the grid of the last pipeline: its groups stay until there is another one.
    """
    if len(_owners) >= MANY:
        gc.collect()  # engines are in circles; looking for them takes tens of milliseconds
    asked = [] if of_deepspeed.mpu is None else list(vars(of_deepspeed.mpu).values())
    here, stay = groups_here(), []
    while _left:
        group = _left.pop()
        if any(group is one for one in asked):
            stay.append(group)
        elif group in here:  # not if all groups have been ended since
            here.remove(group)  # it may have had two owners
            deepspeed.comm.destroy_process_group(group)
    _left.extend(stay)
