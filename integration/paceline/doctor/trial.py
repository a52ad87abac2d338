"""The ranks of a job exchange as a run does: small, real, and in every way that a run may use. All of it is collective.

What a rank finds lies in a dict that grows as it goes on, so that there is something to show when it cannot go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ..comm.control import ControlPlane
from ..comm.shapes import Meta, Value
from ..comm.staging import shares_gpu, staging_for
from ..comm.transport import TIMEOUT, Transport
from ..measure.links import Message, rate
from ..measure.probe import device_speed
from ..runtime.rank_reports import compare_clocks
from ..supervise.first_cause import may_follow
from ..supervise.watch import DEVICE, EVERYONE, Watch

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Elements of fp32 in a message: from a small activation to a large one."""

ENOUGH_S = 0.1
"""A message that takes so long needs no larger one to tell how fast a link is."""

SMALL, REPEATS = 1, 5
_COLLECTIVE = 1 << 16


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
        RuntimeError: a connection was lost.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = list(range(size))
    watch.doing("making the groups of the control plane", EVERYONE)
    control = ControlPlane.create()
    watch.doing("comparing clocks", EVERYONE)
    found["clock_s"], found["control_latency_s"] = compare_clocks(control, ranks)
    if output_dir:
        watch.doing(f"looking for {output_dir}", EVERYONE)
        found["output"] = _is_shared(control, Path(output_dir))
    watch.doing("waiting for the others to compute", EVERYONE)
    dist.barrier(group=control.world)
    watch.doing("computing", DEVICE)
    found["speed"] = device_speed(device)
    found["collectives"] = {}
    for name, act in (("all_reduce", _all_reduce), ("all_to_all", _all_to_all)):
        watch.doing(f"exchanging by {name}", EVERYONE)
        # The watch limits waits and names the rank to blame; the group of `join` has a limit of its own.
        found["collectives"][name] = _fault(act, device, dist.new_group(ranks, timeout=TIMEOUT))
    staging = staging_for(device)
    found["links"] = {}
    for order in ("free", "paired") if device.type == "cpu" else ("free" if staging else "paired",):
        watch.doing(f"making the groups of the {order} order", EVERYONE)
        transport = Transport([ranks], rank, order=order, device=device, staging=staging)
        found["links"][order] = _links(watch, control, transport, device, rank, size)
        transport.close()
    watch.doing("gathering what the ranks found", EVERYONE)
    return control.gather_at_first(found)


def _fault(act: Callable[[torch.device, Any], bool], device: torch.device, group: Any) -> str:
    """The fault of a collective; empty: none."""
    try:
        return "" if act(device, group) else "the numbers that arrive are wrong"
    except (RuntimeError, ValueError) as error:
        if may_follow(error):  # somebody is gone, which says nothing about the collective
            raise
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _all_reduce(device: torch.device, group: Any) -> bool:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    values = torch.full((_COLLECTIVE,), float(rank + 1), device=device)
    dist.all_reduce(values, group=group)
    return bool((values == size * (size + 1) // 2).all())


def _all_to_all(device: torch.device, group: Any) -> bool:
    """Exchange rows as experts do."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = torch.arange(size, dtype=torch.float32, device=device).repeat_interleave(64) + 1000 * rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    expected = 1000 * torch.arange(size, dtype=torch.float32, device=device).repeat_interleave(64) + rank
    return bool((received == expected).all())


def _is_shared(control: ControlPlane, folder: Path) -> dict[str, Any]:
    """Whether this rank sees there what rank 0 writes."""
    probe = folder / f".paceline-doctor-{control.from_first(os.getpid())}"
    error, missing = "", [parent for parent in (folder, *folder.parents) if not parent.exists()]
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as caught:
            error = f"{type(caught).__name__}: {caught.strerror}"
    error = control.from_first(error)
    is_seen = not error and _appears(probe)
    dist.barrier(group=control.world)
    if dist.get_rank() == 0 and not error:
        probe.unlink(missing_ok=True)
        for made in missing:  # the folder was not there, and is not left
            try:
                made.rmdir()
            except OSError:
                break
    return {"path": str(folder), "error": error, "is_seen": is_seen}


def _appears(path: Path, within_s: float = 2.0) -> bool:
    """A network's file system may show it a moment later."""
    until_s = time.monotonic() + within_s
    while not path.exists():
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.1)
    return True


def _links(
    watch: Watch, control: ControlPlane, transport: Transport, device: torch.device, rank: int, size: int
) -> dict[str, Any]:
    """Measure the link to the next rank: seconds of a small message, bytes per second both ways, correctness."""
    found: dict[str, Any] = {}
    for first in (0, 1):  # edges that share no rank at a time
        if rank % 2 == first and rank + 1 < size:
            watch.doing(f"exchanging with rank {rank + 1}, {transport.order} order", rank + 1)
            found = _ask(control, transport, device, rank + 1)
        elif rank % 2 != first and rank > 0:
            watch.doing(f"exchanging with rank {rank - 1}, {transport.order} order", rank - 1)
            _answer(control, transport, device, rank - 1)
        watch.doing("waiting for the other links", EVERYONE)
        dist.barrier(group=control.world)
    return found


def _ask(control: ControlPlane, transport: Transport, device: torch.device, peer: int) -> dict[str, Any]:
    number, is_right = 0, True

    def trip(there: int, back: int) -> float:
        nonlocal number, is_right
        _say(control, peer, there, back)
        values = _pattern(there, number, device)
        _wait(device)
        begun = time.perf_counter()
        transport["activations_out"].send(number, there, values)
        transport.flush()
        transport["gradients_in"].post(number, _meta(back))
        arrived = transport["gradients_in"].take(number)
        _wait(device)
        seconds = time.perf_counter() - begun
        is_right = is_right and _are_equal(arrived, _pattern(back, number + 1, device))
        number += 1
        return seconds

    trip(SMALL, SMALL)  # the first one also makes connections
    trip_s = min(trip(SMALL, SMALL) for _ in range(REPEATS))
    rates = {}
    for way in ("there", "back"):
        for numel in SIZES:
            sizes = (numel, SMALL) if way == "there" else (SMALL, numel)
            trip(*sizes)  # shapes that are new are announced
            seconds = min(trip(*sizes) for _ in range(2))
            # A small message takes half a trip, so that what is left is the large one's.
            rates[way] = rate([Message(0, 1, 4 * numel, 0.0, seconds)], trip_s)
            if seconds > ENOUGH_S:
                break
    _say(control, peer, 0, 0)
    transport.finish()
    known = {way: value if isfinite(value) else None for way, value in rates.items()}
    return {
        "latency_s": trip_s / 2,
        "bytes_per_s": known["there"],
        "back_bytes_per_s": known["back"],
        "right": is_right,
    }


def _answer(control: ControlPlane, transport: Transport, device: torch.device, peer: int) -> None:
    number = 0
    while True:
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.recv(sizes, peer, group=control.world)
        there, back = sizes.tolist()
        if not there:
            transport.finish()
            return
        transport["activations_in"].post(number, there)
        arrived = transport["activations_in"].take(number)
        is_right = _are_equal(arrived, _pattern(there, number, device))
        # A wrong message is answered by a wrong one: the other end reports for both.
        transport["gradients_out"].send(number, _meta(back), _pattern(back, number + (1 if is_right else 2), device))
        transport.flush()
        number += 1


def _say(control: ControlPlane, peer: int, there: int, back: int) -> None:
    dist.send(torch.tensor([there, back]), peer, group=control.world)


def _pattern(numel: int, number: int, device: torch.device) -> torch.Tensor:
    return torch.full((numel,), float(number), device=device)


def _are_equal(arrived: Value, expected: torch.Tensor) -> bool:
    return isinstance(arrived, torch.Tensor) and torch.equal(arrived, expected)


def _meta(numel: int) -> Meta:
    return Meta((((numel,), torch.float32),), is_tuple=False)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
