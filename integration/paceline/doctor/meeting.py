"""Rendezvous of a job's ranks before they have a process group, so that a missing rank is named.

A process group is made by all ranks or waits; the store beneath it can be asked who is there. It is the one that torch
would use: rank 0's, at MASTER_ADDR and MASTER_PORT, or torchrun's own.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .finding import PROBLEM, Finding

_POLL_S = 0.1
_CALL_S = 60.0
"""Torch's own limit of a call to the store; ours are shorter, and kept by :class:`Deadline`."""


class Unmet(Exception):
    """An error of a rank that cannot take part; the finding has the reason."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


@dataclass(frozen=True)
class Place:
    """Place of this process in its job, from the launcher's environment."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int

    @staticmethod
    def of(variables: Mapping[str, str]) -> Place | None:
        """None: there is no job, or it has this process only.

        Raises:
            Unmet: the launcher's variables make no sense.
        """
        if "RANK" not in variables and "WORLD_SIZE" not in variables:
            return None
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = [variables.get(name, "") for name in names]
        rank, size, host, port = values
        is_told = rank.isdecimal() and size.isdecimal() and port.isdecimal() and host
        if not is_told or not int(rank) < int(size) or not 0 < int(port) < 1 << 16:
            shown = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
            remedy = "start the job with `deepspeed` or torchrun, which set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
            raise Unmet(Finding(PROBLEM, "launcher", f"{shown}: they make no job", remedy))
        if size == "1":
            return None
        return Place(int(rank), int(size), int(variables.get("LOCAL_RANK", "0")), host, int(port))


class Deadline:
    """Calls ``late`` from another thread unless it is left in time: for waits in C++ that have no end of their own."""

    def __init__(self, seconds: float, late: Callable[[], Any]) -> None:
        self._timer = threading.Timer(seconds, late)
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def meet(place: Place, timeout_s: float) -> Any:
    """The store, which rank 0 keeps unless torchrun does.

    Raises:
        Unmet: it cannot be had within ``timeout_s``.
    """
    import torch.distributed as dist

    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = f"{place.host} port {place.port}"
    try:
        store = dist.TCPStore(
            place.host,
            place.port,
            place.size,
            is_master=place.rank == 0 and not is_torchruns,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        if place.rank == 0 and not is_torchruns:
            remedy = f"choose another --master_port than {place.port}, and end what listens there"
            raise Unmet(Finding(PROBLEM, "meeting", f"rank 0 cannot listen at {where}: {said}", remedy)) from None
        remedy = (
            f"see that {place.host} is an address of rank 0's host that this one reaches, that no firewall closes port "
            f"{place.port}, and that rank 0 was started"
        )
        text = f"rank {place.rank} does not reach rank 0 at {where} within {timeout_s:g} s"
        raise Unmet(Finding(PROBLEM, "meeting", text, remedy)) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store.set_timeout(timedelta(seconds=_CALL_S))
    return dist.PrefixStore(f"paceline/doctor/{attempt}", store)


def tell(store: Any, topic: str, rank: int, value: Any) -> None:
    """Leave ``value`` in the store."""
    store.set(f"{topic}/{rank}", json.dumps(value))


def heard(store: Any, topic: str, ranks: Sequence[int], until_s: float) -> dict[int, Any]:
    """Messages of ``ranks`` by rank: all, or those left before ``until_s`` of the monotonic clock."""
    found: dict[int, Any] = {}
    while True:
        for rank in ranks:
            if rank not in found and store.check([f"{topic}/{rank}"]):
                found[rank] = json.loads(store.get(f"{topic}/{rank}"))
        if len(found) == len(ranks) or time.monotonic() >= until_s:
            return found
        time.sleep(_POLL_S)
