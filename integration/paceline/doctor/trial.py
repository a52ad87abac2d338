"""The ranks of a job exchange as a run does: small, and real. All of it is collective.

What a rank finds lies in a dict that grows as it goes on, so that there is something to show when it cannot go on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ..comm.control import ControlPlane
from ..comm.groups import new_group
from ..comm.staging import shares_gpu
from ..comm.transport import TIMEOUT
from ..json_values import or_null
from ..measure.links import Message, rate
from ..measure.probe import device_speed
from ..runtime.rank_reports import compare_clocks
from ..supervise.watch import DEVICE, EVERYONE, Watch

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Elements of fp32 in a message: from a small activation to a large one."""

ENOUGH_S = 0.1
"""A message that takes so long needs no larger one to tell how fast a link is."""

_REPEATS = 5
_APPEARS_S = 2.0
"""A network's file system may show a file a moment later."""


class TrialWatch(Watch):
    """A watch that keeps the cause for the report, in which it is said, instead of ending the process."""

    def __init__(self, on_cause: Callable[[], None]) -> None:
        super().__init__()
        self._on_cause = on_cause

    def _conclude(self, cause: Any) -> None:
        with self._concluding:
            if self.cause is not None:
                return
            self.cause = cause
            self._concluded.set()
        if not self._failing:  # who fails asks for the cause, and goes on from there
            self._on_cause()


def join(store: Any, rank: int, size: int, timeout_s: float) -> torch.device:
    """Make the process group, and say which device this rank has.

    Raises:
        RuntimeError: they cannot connect.
    """
    accelerator = get_accelerator()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(accelerator.device_name())
    backend = accelerator.communication_backend_name()
    if shares_gpu():
        local, backend = local % torch.cuda.device_count(), "gloo"
    if device.type != "cpu":
        device = torch.device(device.type, local)
        accelerator.set_device(local)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return device


def examine(watch: Watch, device: torch.device, output_dir: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Try everything; what each rank found, on rank 0.

    Args:
        watch: has been started.
        output_dir: that a run is to write to; empty: none.
        found: what this rank finds, as it finds it.

    Raises:
        RuntimeError: a connection was lost, or a collective fails.
    """
    ranks = list(range(dist.get_world_size()))
    watch.doing("making the groups of the control plane", EVERYONE)
    control = ControlPlane.create()
    watch.doing("comparing clocks", EVERYONE)
    found["clock_s"], _ = compare_clocks(control, ranks)
    if output_dir:
        watch.doing(f"looking for {output_dir}", EVERYONE)
        found["output"] = _is_shared(control, Path(output_dir))
    watch.doing("waiting for the others to compute", EVERYONE)
    dist.barrier(group=control.world)
    watch.doing("computing", DEVICE)
    found["speed"] = device_speed(device)
    watch.doing("making the group of the tensors", EVERYONE)
    # The watch limits waits and names the rank to blame; the group of `join` has a limit of its own.
    group = new_group(ranks, TIMEOUT)
    for name, exchange in (("all_reduce", dist.all_reduce), ("all_to_all", _all_to_all)):
        watch.doing(f"exchanging by {name}", EVERYONE)
        exchange(torch.zeros(1 << 16, device=device), group=group)
        _wait(device)
    # Gloo sends from the host's memory only.
    found["link"] = _link(watch, control, group, torch.device("cpu") if dist.get_backend() == "gloo" else device)
    watch.doing("gathering what the ranks found", EVERYONE)
    return control.gather_at_first(found)


def _all_to_all(values: torch.Tensor, group: Any) -> None:
    """Exchange rows as experts do."""
    rows = values[: len(values) // dist.get_world_size() * dist.get_world_size()]
    dist.all_to_all_single(torch.empty_like(rows), rows, group=group)


def _is_shared(control: ControlPlane, folder: Path) -> dict[str, Any]:
    """Whether this rank sees there what rank 0 writes; nothing is left."""
    probe = folder / f".paceline-doctor-{control.from_first(os.getpid())}"
    error, missing = "", [parent for parent in (folder, *folder.parents) if not parent.exists()]
    if control.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as caught:
            error = f"{type(caught).__name__}: {caught.strerror}"
    error = control.from_first(error)
    until_s = time.monotonic() + _APPEARS_S
    while not (is_seen := not error and probe.exists()) and not error and time.monotonic() < until_s:
        time.sleep(0.1)
    dist.barrier(group=control.world)
    if control.rank == 0 and not error:
        probe.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for made in missing:
                made.rmdir()
    return {"path": str(folder), "error": error, "is_seen": is_seen}


def _link(watch: Watch, control: ControlPlane, group: Any, device: torch.device) -> dict[str, Any]:
    """Measure the link to the next rank; empty on the last one."""
    found: dict[str, Any] = {}
    for first in (0, 1):  # edges that share no rank at a time
        asks = control.rank % 2 == first
        peer = control.rank + 1 if asks else control.rank - 1
        if 0 <= peer < dist.get_world_size():
            watch.doing(f"exchanging with rank {peer}", peer)
            measured = _measure(control, group, device, peer, asks=asks)
            found = measured if asks else found
        watch.doing("waiting for the other links", EVERYONE)
        dist.barrier(group=control.world)
    return found


def _measure(control: ControlPlane, group: Any, device: torch.device, peer: int, *, asks: bool) -> dict[str, Any]:
    """Seconds of a small message, bytes per second both ways, and whether what arrives is right."""
    is_right = True

    def trip_s(there: int, back: int) -> float:
        """Seconds of a message and its answer, measured by the rank that asks, returned on both."""
        nonlocal is_right
        own = float(control.rank) if is_right else float("nan")  # which the other end finds wrong, too
        sent = torch.full((there if asks else back,), own, device=device)
        arrived = torch.empty(back if asks else there, device=device)
        acts = [lambda: dist.send(sent, peer, group=group), lambda: dist.recv(arrived, peer, group=group)]
        _wait(device)
        begun = time.perf_counter()
        for act in acts if asks else reversed(acts):
            act()
        _wait(device)
        seconds = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
        is_right = is_right and bool((arrived == peer).all())
        if asks:
            dist.send(seconds, peer, group=control.world)
        else:
            dist.recv(seconds, peer, group=control.world)
        return seconds.item()

    trip_s(1, 1)  # the first one also makes connections
    small_s = min(trip_s(1, 1) for _ in range(_REPEATS))
    found: dict[str, Any] = {"latency_s": small_s / 2}
    for way in ("bytes_per_s", "back_bytes_per_s"):
        for numel in SIZES:
            seconds = min(trip_s(*((numel, 1) if way == "bytes_per_s" else (1, numel))) for _ in range(2))
            # A small message takes half a trip, so that what is left is the large one's.
            found[way] = or_null(rate([Message(0, 1, 4 * numel, 0.0, seconds)], small_s))
            if seconds > ENOUGH_S:
                break
    trip_s(1, 1)
    return found | {"right": is_right}


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
