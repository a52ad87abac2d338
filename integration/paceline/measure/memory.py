"""Memory of this process and its device."""

from __future__ import annotations

import torch


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated on the device, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def anonymous_bytes() -> int:
    """Resident memory that no file backs (Linux ``RssAnon``): what this process really takes from the machine."""
    return _status_bytes("RssAnon")


def available_bytes(device: torch.device, ranks_per_node: int) -> int:
    """Memory that one rank may plan with: the whole device, or its share of what the machine has free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    import psutil

    return psutil.virtual_memory().available // ranks_per_node


def _status_bytes(key: str) -> int:
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
