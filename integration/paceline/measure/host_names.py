"""Which ranks are on one machine, and which send through one network interface."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def machine_name() -> str:
    """The same for two ranks if and only if they have one clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def host_name() -> str:
    """The same for two ranks if and only if they send through the same interfaces."""
    try:
        return f"{machine_name()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return machine_name()


def num_nodes(hosts: Sequence[str]) -> int:
    """Number of hosts, if each has equally many neighbouring devices, more than one; else 1: nothing to be told apart.

    Args:
        hosts: of each device.
    """
    edges = [device for device in range(1, len(hosts)) if hosts[device] != hosts[device - 1]]
    count = len(edges) + 1
    size = len(hosts) // count
    are_equal = edges == list(range(size, len(hosts), size)) and len(set(hosts)) == count
    return count if are_equal and size > 1 else 1
