"""Memory of this process and its device."""

from __future__ import annotations

import torch

from .container_memory import container_room_bytes


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated on the device, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _resident_peak_bytes()


def available_bytes(device: torch.device, num_ranks: int) -> int:
    """Memory that each of the ``num_ranks`` ranks on this device may plan with: of a CPU, what the machine has free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // num_ranks
    return _host_bytes() // num_ranks


def plannable_bytes(device: torch.device, num_ranks: int) -> int:
    """:func:`available_bytes`, less what of a GPU goes to contexts, workspaces, NCCL and fragments: a tenth."""
    whole = available_bytes(device, num_ranks)
    return int(0.9 * whole) if device.type == "cuda" else whole


def room_bytes(device: torch.device, num_ranks: int) -> int:
    """What each of the ranks on this device may still take, with a tenth left over; caches count as free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(0.9 * (free / num_ranks + cached))
    return int(0.9 * _host_bytes()) // num_ranks


def _host_bytes() -> int:
    """Free memory of the machine, or of the container that this process is in."""
    import psutil

    return int(min(psutil.virtual_memory().available, container_room_bytes()))


def _resident_peak_bytes() -> int:
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
