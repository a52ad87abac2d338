"""``paceline partition``: which blocks each device gets, from a file of costs and without a cluster."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.json_values import as_list, as_number, as_object, as_rate, read_json, within
from paceline.launch.simulate import DEFAULTS, add_schedule_arguments
from paceline.messages import aligned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.planning import Block, Device, Partition
    from paceline.schedules import Schedule

_BLOCK = ("work", "forward", "backward", "activation_bytes", "memory_bytes", "live_bytes")
_DEVICE = ("speed", "memory_bytes")
_OF_SCHEDULE = ("schedule", "k", "slack")
MOST_ACTIONS = 2**16
"""Forwards and backwards of a step that is simulated for each of many partitions: more would take minutes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "--costs",
        metavar="FILE",
        required=True,
        help='JSON: {"blocks": [{"work": …, "activation_bytes": …, "memory_bytes": …}], "devices": [{"speed": …, '
        '"memory_bytes": …}], "links": [bytes a second between neighbours]}. What is left out is 0, unlimited, '
        'infinitely fast. A block may have "forward" and "backward" instead of "work" (else a third of it is forward), '
        'and "live_bytes", what it keeps of each micro-batch until its backward (with --micro-batches)',
    )
    parser.add_argument(
        "--order",
        choices=("launch", "search"),
        default="launch",
        help='of the devices: as listed (default), or the best; "links" is then a matrix, from each device to each',
    )
    step = parser.add_argument_group("shortest step instead of smallest bottleneck, by simulation")
    add_schedule_arguments(step, "1f1b (default), gpipe, kfkb or eager")


def run(args: argparse.Namespace) -> int:
    """The command; its exit status.

    Raises:
        ValueError: flags that do not go together, a file that is none, or no split that fits.
    """
    given = _read(args.costs, args.order == "search")
    schedule, live = _schedule(args, given)
    facts = _facts(given, *_solve(given, args.order == "search", schedule, live), schedule, live)
    if args.order == "launch":
        del facts["order"]
    print(json.dumps(facts, indent=2) if args.json else _text(facts, len(given.blocks)))
    return 0


class _Given(NamedTuple):
    """The contents of the file; ``links`` between neighbours or, for a search of the order, all of them."""

    blocks: list[Block]
    forward: list[float]
    devices: list[Device]
    links: list[Any]


def _solve(
    given: _Given, search: bool, schedule: Schedule | None, live: Sequence[int]
) -> tuple[Partition, float | None]:
    """The partition and, with a schedule, the seconds of its step."""
    from dataclasses import replace

    from paceline.planning import bottleneck, partition, refine, search_order, stage_costs
    from paceline.schedules import simulate

    found = (search_order if search else partition)(given.blocks, given.devices, given.links, live=live)
    if schedule is None:
        return found, None
    devices, links = _in_order(given, found.order)

    def step_s(boundaries: tuple[int, ...]) -> float:
        costs = stage_costs(boundaries, given.blocks, devices, links, forward=given.forward)
        return simulate(schedule, costs).makespan_s

    def fits(boundaries: tuple[int, ...]) -> bool:
        needs = _needs(given.blocks, boundaries, live)
        return all(need <= device.memory_bytes for need, device in zip(needs, devices, strict=True))

    boundaries, seconds = refine(found.boundaries, step_s, fits=fits)
    slowest_s = bottleneck(given.blocks, devices, links, boundaries)
    return replace(found, boundaries=boundaries, bottleneck_s=slowest_s), seconds


def _in_order(given: _Given, order: Sequence[int]) -> tuple[list[Device], list[float]]:
    """Devices by stage, and the links between them."""
    from paceline.planning import links_in_order

    is_matrix = bool(given.links) and isinstance(given.links[0], list)
    links = links_in_order(given.links, order) if is_matrix else given.links
    return [given.devices[device] for device in order], links


def _needs(blocks: Sequence[Block], boundaries: Sequence[int], live: Sequence[int]) -> list[float]:
    """Bytes of each stage."""
    stages = [blocks[first:end] for first, end in pairwise(boundaries)]
    return [
        sum(block.memory_bytes for block in stage) + alive * sum(block.live_bytes for block in stage)
        for stage, alive in zip(stages, live, strict=True)
    ]


def _schedule(args: argparse.Namespace, given: _Given) -> tuple[Schedule | None, Sequence[int]]:
    """The schedule, and the most micro-batches that it keeps alive on each stage; None and zeros without one."""
    from paceline.schedules import FAMILIES, make, verify

    options = {name: getattr(args, name) for name in _OF_SCHEDULE if getattr(args, name) is not None}
    if args.micro_batches is not None:
        if 2 * len(given.devices) * args.micro_batches > MOST_ACTIONS:
            raise ValueError(
                f"--micro-batches {args.micro_batches} on {len(given.devices)} devices are too many to simulate for "
                f"many partitions (at most {MOST_ACTIONS} forwards and backwards): give fewer."
            )
        type = options.pop("schedule", "1f1b")
        defaults = DEFAULTS.get(type, {}) if type in FAMILIES else {}
        schedule = make(type, len(given.devices), args.micro_batches, **{**defaults, **options})
        return schedule, verify(schedule, paired=False).peak_activations
    if options:
        raise ValueError(f"--{next(iter(options))} is of a step: give --micro-batches too.")
    if any(block.live_bytes for block in given.blocks):
        raise ValueError(f"{args.costs}: live_bytes are of each micro-batch that is alive: give --micro-batches too.")
    return None, (0,) * len(given.devices)


def _facts(
    given: _Given, found: Partition, step_s: float | None, schedule: Schedule | None, live: Sequence[int]
) -> dict[str, Any]:
    devices, links = _in_order(given, found.order)
    stages: list[dict[str, Any]] = []
    needs = _needs(given.blocks, found.boundaries, live)
    for stage, (first, end) in enumerate(pairwise(found.boundaries)):
        device = devices[stage]
        work = sum(block.work for block in given.blocks[first:end])
        sent = 2 * given.blocks[first - 1].activation_bytes / links[stage - 1] if stage and links else 0.0
        limit = device.memory_bytes if isfinite(device.memory_bytes) else None
        stages.append(
            {
                "device": found.order[stage],
                "blocks": [first, end],
                "work": work,
                "compute_s": work / device.speed,
                "transfer_s": sent,
                "memory_bytes": needs[stage],
                "memory_limit_bytes": limit,
            }
        )
    facts: dict[str, Any] = {
        "cuts": found.boundaries[1:-1],
        "boundaries": found.boundaries,
        "bottleneck_s": found.bottleneck_s,
        "order": found.order,
        "stages": stages,
    }
    if schedule is not None:
        facts.update(schedule=schedule.name, micro_batches=schedule.num_micro_batches, step_s=step_s)
    return facts


def _text(facts: Mapping[str, Any], num_blocks: int) -> str:
    lines = [f"{num_blocks} blocks on {len(facts['stages'])} devices: bottleneck {facts['bottleneck_s']:.6g} s"]
    if "step_s" in facts:
        lines.append(f"step: {facts['step_s']:.6g} s of {facts['micro_batches']} micro-batches, {facts['schedule']}")
    titles = ["stage", "device", "blocks", "work", "compute_s", "transfer_s", "memory_bytes", "limit"]
    rows = [titles]
    for index, stage in enumerate(facts["stages"]):
        first, end = stage["blocks"]
        limit = stage["memory_limit_bytes"]
        numbers = [f"{stage[name]:.6g}" for name in titles[3:6]]
        sizes = [f"{stage['memory_bytes']:.0f}", "none" if limit is None else f"{limit:.0f}"]
        rows.append([str(index), str(stage["device"]), f"{first}-{end - 1}", *numbers, *sizes])
    return "\n".join([*lines, *aligned(rows)])


def _read(path: str, search: bool) -> _Given:
    values = read_json(path, "give a file with the JSON of the costs")
    with within(path):
        return _given(values, search)


def _given(values: Any, search: bool) -> _Given:
    from paceline.planning import Device
    from paceline.planning.blocks import check

    if isinstance(values, dict) and {"format", "items"} <= values.keys():
        raise ValueError(
            "it is a profile, which belongs in a JSON for `paceline fit` (paceline.pipeline.partition.profile); costs "
            'are such as {"blocks": [{"work": 1}, {"work": 2}], "devices": [{"speed": 1}, {"speed": 2}]}.'
        )
    known = as_object("the file", values, ("blocks", "devices", "links"))
    given = [_block(f"blocks[{index}]", value) for index, value in enumerate(as_list("blocks", known.get("blocks")))]
    blocks, forward = [block for block, _ in given], [part for _, part in given]
    devices = []
    for index, value in enumerate(as_list("devices", known.get("devices"))):
        label = f"devices[{index}]"
        device = as_object(label, value, _DEVICE)
        if "speed" not in device:
            raise ValueError(f"{label} has no speed: give work a second.")
        speed, limit = as_number(f"{label}.speed", device["speed"]), device.get("memory_bytes")
        devices.append(Device(speed, as_rate(f"{label}.memory_bytes", limit)))
    links = _links(known.get("links"), search, len(devices))
    check(blocks, devices, () if search else links, None)
    return _Given(blocks, forward, devices, links)


def _block(label: str, value: Any) -> tuple[Block, float]:
    """The block, and the part of its work that is forward."""
    from paceline.planning import Block

    block = as_object(label, value, _BLOCK)
    if ("work" in block) == ("forward" in block or "backward" in block):
        raise ValueError(f"{label}: give either work, or forward and backward.")
    numbers: dict[str, float] = {"activation_bytes": 0, "memory_bytes": 0, "live_bytes": 0}
    numbers |= {name: as_number(f"{label}.{name}", number) for name, number in block.items()}
    for name in ("forward", "backward"):
        if name not in block and "work" not in block:
            raise ValueError(f"{label} has no {name}: give forward and backward, or work alone.")
        if numbers.get(name, 0.0) < 0:
            raise ValueError(f"{label}.{name} is {numbers[name]}: give a number from 0 upwards.")
    forward = numbers.pop("forward", None)
    backward = numbers.pop("backward", 0.0)
    if forward is None:
        return Block(**numbers), numbers["work"] / 3
    return Block(work=forward + backward, **numbers), forward


def _links(value: Any, search: bool, num_devices: int) -> list[Any]:
    rows = [] if value is None else as_list("links", value)
    is_matrix = any(isinstance(row, list) for row in rows)
    if is_matrix and not search:
        raise ValueError(
            f"links is a matrix: give {num_devices - 1} numbers, one between two neighbours, or --order search."
        )
    if not is_matrix:
        if rows and search:
            raise ValueError(
                "links between neighbours say nothing about another order: give a matrix of bytes a second, from each "
                "device (row) to each (column), or leave links out, or --order launch."
            )
        return [as_rate(f"links[{index}]", rate) for index, rate in enumerate(rows)]
    return [
        [as_rate(f"links[{i}][{j}]", rate) for j, rate in enumerate(as_list(f"links[{i}]", row))]
        for i, row in enumerate(rows)
    ]
