"""Addresses of islands and of their lighthouse: ``host:port``."""

from __future__ import annotations

import ipaddress
import socket
import time

_PAUSE_S = 1.0


def own_address(lighthouse: str, host: str, port: int, timeout_s: float) -> str:
    """The address of this host that packets to the lighthouse come from. Hosts may share their name."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=timeout_s) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() + _PAUSE_S > deadline:
                raise unreachable(lighthouse, error) from None
        time.sleep(_PAUSE_S)


def unreachable(lighthouse: str, error: Exception) -> ConnectionError:
    return ConnectionError(
        f"no lighthouse answers at {lighthouse} ({error}); run `paceline lighthouse` on a host that all islands reach, "
        "and give its address in averaging.lighthouse."
    )


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f'{address!r} is no address: give host:port, such as "node1:29510".')
    return host.removeprefix("[").removesuffix("]"), int(port)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
