"""How fast a device computes, before it has done any of the run's work."""

from __future__ import annotations

import time

import torch

# Edge of the square matrices: long enough to be timed, short enough to be done at once.
_EDGE = {"cpu": 512}
_EDGE_OF_ACCELERATORS = 4096
_REPEATS = 8


def device_speed(device: torch.device) -> float:
    """Matrix products per second, as an idea of how devices compare; the best of some, so that noise counts little.

    In fp32 on a CPU, in bfloat16 elsewhere: in what layers spend their time there.
    """
    edge = _EDGE.get(device.type, _EDGE_OF_ACCELERATORS)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    # Random numbers, as in training: zeros and ones switch fewer transistors, and a device that draws less power clocks
    # higher. From a generator of its own, so that the run draws what it would have drawn.
    left = torch.empty(edge, edge, dtype=dtype, device=device)
    left.normal_(generator=torch.Generator(device).manual_seed(0))
    out = left @ left  # the first one also loads the kernel
    best = float("inf")
    for _ in range(_REPEATS):
        _wait(device)
        begin = time.perf_counter()
        torch.mm(left, left, out=out)
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    return 1 / best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
