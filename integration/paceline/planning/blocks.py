"""The parts of a partition (blocks of layers, devices, links between them) and the cost of a given one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, inf, isfinite
from typing import NamedTuple

# Two times this close (relatively) are equal: sums of the same blocks in another order differ by rounding.
TIE = 1e-12


class Block(NamedTuple):
    """A run of layers that stays together.

    Args:
        work: seconds on a device of speed 1, or any other unit that ``speed`` is per second of.
        activation_bytes: of what it hands on to the next block, of one micro-batch.
        memory_bytes: of its state: weights, gradients, optimizer.
        live_bytes: what it keeps of each micro-batch whose backward is still to come.
    """

    work: float
    activation_bytes: float = 0.0
    memory_bytes: float = 0.0
    live_bytes: float = 0.0


class Device(NamedTuple):
    """A device that runs a stage: ``speed`` is work per second, ``memory_bytes`` the room for blocks."""

    speed: float = 1.0
    memory_bytes: float = inf


@dataclass(frozen=True)
class Partition:
    """Stage s is the blocks from ``boundaries[s]`` up to, not including, ``boundaries[s + 1]``, on device ``order[s]``.

    Args:
        boundaries: 0, ..., number of blocks.
        bottleneck_s: seconds of the slowest stage or link, for one micro-batch.
        order: of each stage, which device it is on.
    """

    boundaries: tuple[int, ...]
    bottleneck_s: float
    order: tuple[int, ...]


class DoesNotFit(ValueError):
    """No split fits in memory.

    Attributes:
        stage: the first, from 0, that no split of the earlier blocks leaves with blocks it can hold.
        need_bytes: the least that it would have to hold.
        limit_bytes: what it can hold.
    """

    def __init__(self, stage: int, device: int, need_bytes: float, limit_bytes: float, why: str) -> None:
        self.stage, self.need_bytes, self.limit_bytes = stage, need_bytes, limit_bytes
        super().__init__(
            f"no split fits in memory: stage {stage} on device {device} needs {_bytes(need_bytes)} at least ({why}) "
            f"and its limit is {_bytes(limit_bytes)}; take more devices, devices with more memory, or blocks that need "
            "less (ZeRO, activation checkpointing, smaller micro-batches), or raise "
            "paceline.pipeline.partition.memory_gib where it is set."
        )


def bottleneck(
    blocks: Sequence[Block], devices: Sequence[Device], links: Sequence[float], boundaries: Sequence[int]
) -> float:
    """Seconds of the slowest stage or link of given boundaries, for one micro-batch.

    Raises:
        ValueError: the boundaries are none of these blocks and devices, or as of :func:`partition`.
    """
    check(blocks, devices, links, None)
    check_boundaries(boundaries, len(blocks), len(devices))
    return max(times(blocks, devices, links, boundaries))


def times(
    blocks: Sequence[Block], devices: Sequence[Device], links: Sequence[float], boundaries: Sequence[int]
) -> list[float]:
    """Seconds of each stage and, if there are links, of each link; nothing is checked."""
    seconds = [
        fsum(block.work for block in blocks[first:end]) / device.speed
        for (first, end), device in zip(pairwise(boundaries), devices, strict=True)
    ]
    if links:
        cuts = boundaries[1:-1]
        seconds += [2 * blocks[cut - 1].activation_bytes / rate for cut, rate in zip(cuts, links, strict=True)]
    return seconds


def check(
    blocks: Sequence[Block], devices: Sequence[Device], links: Sequence[float], live: Sequence[float] | None
) -> Sequence[float]:
    """``live``, zeros if None, once all numbers and lengths are such that a partition can be.

    Raises:
        ValueError: names the first that is not.
    """
    if not blocks:
        raise ValueError("there are no blocks: give one at least.")
    if not devices:
        raise ValueError("there are no devices: give one at least.")
    if len(devices) > len(blocks):
        raise ValueError(
            f"{len(devices)} devices are more than {len(blocks)} blocks: each device gets one at least; take fewer "
            "devices, or smaller blocks."
        )
    live = (0.0,) * len(devices) if live is None else live
    if len(live) != len(devices):
        raise ValueError(f"live has {len(live)} values for {len(devices)} devices: give one a stage.")
    if len(links) not in (0, len(devices) - 1):
        raise ValueError(
            f"links has {len(links)} values for {len(devices)} devices: give {len(devices) - 1}, one between two "
            "neighbours, or none."
        )
    for index, block in enumerate(blocks):
        for name, value in block._asdict().items():
            if not 0 <= value < inf:
                raise ValueError(f"blocks[{index}].{name} is {value}: give a number from 0 upwards.")
    for index, device in enumerate(devices):
        if not 0 < device.speed < inf:
            raise ValueError(f"devices[{index}].speed is {device.speed}: give a number above 0.")
        if not device.memory_bytes >= 0:
            raise ValueError(f"devices[{index}].memory_bytes is {device.memory_bytes}: give a number from 0 upwards.")
    check_links(enumerate(links))
    for stage, micro_batches in enumerate(live):
        if not 0 <= micro_batches < inf:
            raise ValueError(f"live[{stage}] is {micro_batches}: give a number from 0 upwards.")
    _check_range(blocks, devices, [rate for rate in links if rate != inf], live)
    return live


def check_links(links: Iterable[tuple[object, float]]) -> None:
    """Raises ValueError for a rate that is none; each comes with its index."""
    for index, rate in links:
        if not rate > 0:
            raise ValueError(f"links[{index}] is {rate}: give bytes a second, above 0.")


def check_boundaries(boundaries: Sequence[int], num_blocks: int, num_stages: int) -> None:
    """Raises ValueError unless so many stages of at least one block each make up all blocks."""
    rising = all(first < end for first, end in pairwise(boundaries))
    if len(boundaries) != num_stages + 1 or (boundaries[0], boundaries[-1]) != (0, num_blocks) or not rising:
        raise ValueError(
            f"boundaries {list(boundaries)} do not split {num_blocks} blocks into {num_stages} stages: give "
            f"{num_stages + 1} rising numbers from 0 to {num_blocks}."
        )


def _check_range(
    blocks: Sequence[Block], devices: Sequence[Device], links: Sequence[float], live: Sequence[float]
) -> None:
    """Refuse numbers whose sum or quotient overflows."""
    largest = max(
        sum(block.work for block in blocks) / min(1.0, *(device.speed for device in devices)),
        2 * max(block.activation_bytes for block in blocks) / min([1.0, *links]),
        sum(block.memory_bytes for block in blocks) + max(live) * sum(block.live_bytes for block in blocks),
    )
    if not isfinite(largest):
        raise ValueError("the numbers are too far apart to be computed with: choose units that bring them nearer to 1.")


def _bytes(value: float) -> str:
    exact = f"{value:.0f} bytes"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{exact} ({value / size:.2f} {unit})"
    return exact
