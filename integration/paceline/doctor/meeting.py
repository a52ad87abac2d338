"""Rendezvous of a job's ranks before they have a process group, so that a missing rank is named.

torch's ``monitored_barrier`` names ranks too, but in a group of gloo's, which ranks cannot make while one is missing or
is told a wrong address. The store beneath every group can be asked who is there. It is the one that torch would use:
rank 0's, at MASTER_ADDR and MASTER_PORT, or torchrun's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .finding import PROBLEM, Finding

_POLL_S = 0.1
_MOST_PORTS = (1 << 16) - 1
_TAKEN = "failed to listen"
"""In torch's message if the port is another program's, or not for this user."""

_CALL_S = 60.0
"""Torch's own limit of a call to the store; ours are shorter, and kept by :func:`deadline`."""


class Unmet(Exception):
    """An error of a rank that cannot take part; the finding has the reason."""

    def __init__(self, check: str, text: str, remedy: str) -> None:
        super().__init__(text)
        self.finding = Finding(PROBLEM, check, text, remedy)


@dataclass(frozen=True)
class Place:
    """Place of this process in its job, from the launcher's environment."""

    rank: int
    size: int
    local_rank: int
    ranks_on_host: int
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
        rank, size, host, port = values = [variables.get(name, "") for name in names]
        if wrong := _wrong(rank, size, host, port):
            shown = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
            remedy = "start the job with `deepspeed` or torchrun, which set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
            raise Unmet("launcher", f"{shown}: they make no job, {wrong}", remedy)
        if size == "1":
            return None
        local = variables.get("LOCAL_RANK") or "0"
        ranks_on_host = variables.get("LOCAL_WORLD_SIZE") or variables.get("LOCAL_SIZE") or size
        if not (local.isdecimal() and ranks_on_host.isdecimal()):
            text = f"LOCAL_RANK is {local!r} of {ranks_on_host!r} ranks on this host (LOCAL_WORLD_SIZE or LOCAL_SIZE)"
            remedy = "start the job with `deepspeed` or torchrun, or make both whole numbers"
            raise Unmet("launcher", text, remedy)
        return Place(int(rank), int(size), int(local), int(ranks_on_host), host, int(port))


def _wrong(rank: str, size: str, host: str, port: str) -> str:
    """The first rule that the launcher's variables break; empty: none."""
    if not size.isdecimal() or not int(size):
        return "WORLD_SIZE must be a whole number of at least 1"
    if not rank.isdecimal() or not int(rank) < int(size):
        return f"RANK must be a whole number from 0 to {int(size) - 1}, the last rank of WORLD_SIZE"
    if not host:
        return "MASTER_ADDR must be rank 0's address"
    if not port.isdecimal() or not 0 < int(port) <= _MOST_PORTS:
        return f"MASTER_PORT must be a whole number from 1 to {_MOST_PORTS}"
    return ""


@contextlib.contextmanager
def deadline(seconds: float, late: Callable[[], Any]) -> Iterator[None]:
    """Call ``late`` from another thread unless the block ends in time: for waits in C++ without an end of their own."""
    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def meet(place: Place, timeout_s: float) -> Any:
    """The store, which rank 0 keeps unless torchrun does.

    Raises:
        Unmet: it cannot be had within ``timeout_s``.
    """
    import torch.distributed as dist

    keeps_store = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"{place.host} port {place.port}"
    limit = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(
            *(place.host, place.port, place.size, keeps_store, limit), wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError) as error:
        if keeps_store:
            text = f"rank 0 cannot listen at {where}: {str(error).splitlines()[0]}"
            remedy = f"choose another --master_port than {place.port}, and end what listens there"
            if _TAKEN not in str(error):  # it listens, and does not reach itself
                remedy = f"give an address of rank 0's own host instead of {place.host} (MASTER_ADDR, --master_addr)"
            raise Unmet("meeting", text, remedy) from None
        remedy = (
            f"see that {place.host} is an address of rank 0's host that this one reaches, that no firewall closes port "
            f"{place.port}, and that rank 0 was started"
        )
        text = f"rank {place.rank} does not reach rank 0 at {where} within {timeout_s:g} s"
        raise Unmet("meeting", text, remedy) from None
    store.set_timeout(timedelta(seconds=_CALL_S))
    return dist.PrefixStore(f"paceline/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def exchange(store: Any, topic: str, place: Place, value: Any, timeout_s: float) -> dict[int, Any]:
    """Values of the ranks that tell one before rank 0 has waited for ``timeout_s``, by rank; the same on all ranks.

    Raises:
        RuntimeError: the connection to the store is lost.
    """
    store.set(f"{topic}/{place.rank}", json.dumps(value))
    if place.rank == 0:
        found: dict[int, Any] = {}
        until_s, left = time.monotonic() + timeout_s, set(range(place.size))
        while left and time.monotonic() < until_s:
            found |= {one: json.loads(store.get(f"{topic}/{one}")) for one in left if store.check([f"{topic}/{one}"])}
            left -= found.keys()
            time.sleep(_POLL_S if left else 0.0)
        store.set(f"{topic}/all", json.dumps(found))
    store.wait([f"{topic}/all"], timedelta(days=1))
    return {int(rank): one for rank, one in json.loads(store.get(f"{topic}/all")).items()}
