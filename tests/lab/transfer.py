"""How fast one host of a lab sends to another: a TCP transfer, timed from its first byte to the receiver's answer.

transfer.py receive ADDRESS PORT NUM_BYTES
transfer.py send ADDRESS PORT NUM_BYTES         prints the seconds
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.hosts import Hosts

PAYLOAD_SHARE = 1448 / 1514
"""Of the bytes on the wire that a limiter counts: a full Ethernet frame with IPv4, TCP and its time stamps."""

_PORT = 19000
_CHUNK = bytes(1 << 16)


def transfer_s(hosts: Hosts, sender: int, receiver: int, num_bytes: int, timeout: float = 600.0) -> float:
    """Seconds in which ``num_bytes`` go from one host to another.

    Raises:
        RuntimeError: the transfer failed.
    """
    command = [sys.executable, "-S", __file__]
    peer = [hosts.addresses[receiver], str(_PORT), str(num_bytes)]
    with contextlib.ExitStack() as stack:
        for host, role in ((receiver, "receive"), (sender, "send")):
            process = hosts.popen(host, [*command, role, *peer], output=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
        output, _ = process.communicate(timeout=timeout)
    if process.returncode:
        raise RuntimeError(f"no transfer from host {sender} to host {receiver}:\n{output}")
    return float(output)


def goodput_bytes_per_s(hosts: Hosts, sender: int, receiver: int, num_bytes: int, burst_bytes: int) -> float:
    """Bytes of payload per second, ``burst_bytes``, which a limiter lets through at once, left out."""
    return (num_bytes - burst_bytes * PAYLOAD_SHARE) / transfer_s(hosts, sender, receiver, num_bytes)


def _receive(address: str, port: int, num_bytes: int) -> None:
    with socket.create_server((address, port)) as server, server.accept()[0] as peer:
        left = num_bytes
        while left:
            got = len(peer.recv(min(left, 1 << 20)))
            if not got:
                raise ConnectionError(f"the sender left with {left} bytes to go")
            left -= got
        peer.sendall(b".")


def _send(address: str, port: int, num_bytes: int) -> None:
    with _connect(address, port) as peer:
        begin = time.perf_counter()
        for offset in range(0, num_bytes, len(_CHUNK)):
            peer.sendall(_CHUNK[: num_bytes - offset])
        peer.recv(1)
        print(time.perf_counter() - begin)


def _connect(address: str, port: int, patience_s: float = 300.0) -> socket.socket:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:  # the receiver is not there yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


if __name__ == "__main__":
    {"receive": _receive, "send": _send}[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
