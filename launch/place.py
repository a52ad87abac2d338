"""``paceline place``: which devices hold which experts, from a file of loads and without a cluster.

The JSON has for each layer ``placement``, the experts of each device; ``owned``, how many of them, the first, are its
own and not copies; the load of the most loaded device over the mean ``before``, ``after`` with even splitting over
copies, ``after_split`` by load, and its ``bound`` without copies; and how many experts ``moved`` to a device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from paceline.json_values import as_list, as_number, as_whole, read_json, within
from paceline.messages import aligned

if TYPE_CHECKING:
    from paceline.planning.placement import Placement

MOST_DEVICES, MOST_WITH_COPIES = 4096, 1024
"""Most devices that are planned for: more would take minutes a layer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "--loads",
        metavar="FILE",
        required=True,
        help="JSON: the load of each expert in each layer, [[expert 0, expert 1, …] of layer 0, …], in any unit; or a "
        "run's expert_loads.jsonl",
    )
    parser.add_argument("--devices", type=int, metavar="N", required=True, help="devices that share the experts")
    parser.add_argument(
        "--slots-per-device",
        type=int,
        metavar="n",
        help="experts that a device has room to own, without replicas (default: as few as hold all)",
    )
    parser.add_argument(
        "--replicas", type=int, default=0, metavar="r", help="copies of other experts that a device has room for too"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="k", help="groups of neighbouring devices in which copies stay"
    )
    parser.add_argument(
        "--speeds", type=float, nargs="+", metavar="s", help="speed of each device, in any unit (default: all equal)"
    )
    parser.add_argument(
        "--current",
        metavar="FILE",
        help='JSON: what the devices hold now, in the form of the output, {"layers": [{"placement": …}]} (default: '
        "blocks of neighbouring experts)",
    )
    parser.add_argument(
        "--keep-owners", action="store_true", help="change copies only: no optimizer state moves (with --replicas)"
    )


def run(args: argparse.Namespace) -> int:
    """The command; its exit status.

    Raises:
        ValueError: a file that is none, flags that do not go together, or too little room.
    """
    _check_flags(args)
    layers = _loads(args.loads)
    current = _current(args, layers)
    facts = {"layers": [_layer(args, *layer) for layer in zip(layers, current, strict=True)]}
    print(json.dumps(facts) if args.json else _text(facts["layers"], args))
    return 0


def _layer(args: argparse.Namespace, loads: Sequence[float], current: Placement) -> dict[str, Any]:
    from paceline.planning.placement import greedy, imbalance, lower_bound, moved, replicated, split

    devices, slots = args.devices, args.slots_per_device
    among: dict[str, Any] = {"nodes": args.nodes, "speeds": args.speeds}
    if args.replicas:
        # Nothing moves where nothing lies yet: whatever is better is taken then.
        among |= {} if args.current is not None else {"tolerance": 0.0}
        found = replicated(loads, devices, slots, args.replicas, current, keep_owners=args.keep_owners, **among)
    else:
        found = greedy(loads, devices, slots, current, **among)
    before, after = (imbalance(placement, loads, speeds=args.speeds) for placement in (current, found))
    if after >= before and _may_stay(current, args, len(loads)):
        found, after = current, before
    mean = sum(loads) / devices
    return {
        "placement": found.devices,
        "owned": found.owned,
        "before": before,
        "after": after,
        "after_split": imbalance(found, loads, split(found, loads, speeds=args.speeds), args.speeds),
        "bound": lower_bound(loads, devices, slots, args.speeds) / mean if mean else 1.0,
        "moved": moved(current, found),
    }


def _may_stay(placement: Placement, args: argparse.Namespace, num_experts: int) -> bool:
    """Whether the devices can hold a placement that may come from a run with more slots, or with copies elsewhere."""
    slots = -(-num_experts // args.devices) if args.slots_per_device is None else args.slots_per_device
    per_node = args.devices // args.nodes
    return all(
        owned <= slots and len(experts) - owned <= args.replicas
        for owned, experts in zip(placement.owned, placement.devices, strict=True)
    ) and all(len({device // per_node for device in holders}) == 1 for holders in placement.copies)


def _text(layers: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    rows = [["layer", "before", "after", "split", "bound", "moved"]]
    for index, layer in enumerate(layers):
        numbers = [f"{layer[name]:.3f}" for name in ("before", "after", "after_split", "bound")]
        rows.append([str(index), *numbers, str(layer["moved"])])
    lines = [
        "load of the most loaded device over the mean: before, after, with tokens split over copies by load, and what "
        "no placement without copies gets below"
    ]
    lines += aligned(rows)
    for index, layer in enumerate(layers):
        lines += ["", f"layer {index}"]
        for device, (experts, owned) in enumerate(zip(layer["placement"], layer["owned"], strict=True)):
            copies = f" + copies {' '.join(map(str, experts[owned:]))}" if experts[owned:] else ""
            lines.append(f"  device {device}: {' '.join(map(str, experts[:owned])) or 'none'}{copies}")
    return "\n".join(lines)


def _check_flags(args: argparse.Namespace) -> None:
    for flag, least in (("devices", 1), ("slots_per_device", 1), ("replicas", 0), ("nodes", 1)):
        value = getattr(args, flag)
        if value is not None and value < least:
            raise ValueError(f"--{flag.replace('_', '-')} is {value}: give {least} or more.")
    for speed in args.speeds or ():
        if 0 < speed < inf:  # others are refused with their device
            as_number("--speeds", speed)
    if args.devices > MOST_DEVICES:
        raise ValueError(f"--devices {args.devices} are too many to plan for: give {MOST_DEVICES} or fewer.")
    if args.replicas and args.devices > MOST_WITH_COPIES:
        raise ValueError(
            f"--devices {args.devices} are too many to plan copies for: give {MOST_WITH_COPIES} or fewer, or leave "
            "--replicas out."
        )
    if args.devices % args.nodes:
        raise ValueError(f"--devices {args.devices} are not --nodes {args.nodes} of the same size: give a divisor.")
    if args.keep_owners and not args.replicas:
        raise ValueError("--keep-owners leaves nothing to change without copies: give --replicas too.")


def _loads(path: str) -> list[list[float]]:
    from paceline.planning.experts import checked_loads
    from paceline.report.expert_loads import latest

    is_log = path.endswith(".jsonl")
    layers = latest(path) if is_log else read_json(path, "give a file with JSON, [[load per expert] per layer]")
    found: list[list[float]] = []
    with within(path):
        if isinstance(layers, dict):
            raise ValueError("the file holds an object: give a list of layers, each a list of the experts' loads.")
        for index, layer in enumerate(_filled("the file", layers)):
            label = f"layer {index}"
            loads = [as_number(f"{label}, expert {n}", value) for n, value in enumerate(_filled(label, layer))]
            if found and len(loads) != len(found[0]):
                raise ValueError(
                    f"{label} has {len(loads)} experts and layer 0 has {len(found[0])}: give each layer as many."
                )
            with within(label):
                found.append(checked_loads(loads))
    return found


def _current(args: argparse.Namespace, layers: Sequence[Sequence[float]]) -> list[Placement]:
    from paceline.planning.placement import Placement

    num_experts, path = len(layers[0]), args.current
    if path is None:
        return [Placement.contiguous(num_experts, args.devices)] * len(layers)
    form = '{"layers": [{"placement": [[experts] per device]}]}'
    values = read_json(path, f"give a file with JSON, {form}")
    found = []
    with within(path):
        if not isinstance(values, dict) or "layers" not in values:
            raise ValueError(f"the file has no layers: give {form}, as `paceline place --json` prints it.")
        given = _filled("layers", values["layers"])
        if len(given) != len(layers):
            raise ValueError(f"the file has {len(given)} layers and {args.loads} has {len(layers)}: give as many.")
        for index, layer in enumerate(given):
            with within(f"layer {index}"):
                if not isinstance(layer, dict) or "placement" not in layer:
                    raise ValueError(f"it has no placement: give {form}.")
                placement = _placement(layer, num_experts, args.slots_per_device)
                if (placement.num_experts, placement.num_devices) != (num_experts, args.devices):
                    raise ValueError(
                        f"it has {placement.num_experts} experts on {placement.num_devices} devices, and {args.loads} "
                        f"has {num_experts} for --devices {args.devices}: give one of the same."
                    )
                found.append(placement)
    return found


def _placement(layer: Mapping[str, Any], num_experts: int, slots: int | None) -> Placement:
    """Of owners that are left out: all slots if the experts fill them, else by position."""
    from paceline.planning.placement import Placement

    devices = [
        _experts(f"placement[{device}]", each) for device, each in enumerate(_filled("placement", layer["placement"]))
    ]
    if layer.get("owned") is not None:
        return Placement(tuple(devices), _experts("owned", layer["owned"]))
    is_full = slots is not None and slots * len(devices) == num_experts and all(len(held) >= slots for held in devices)
    return Placement(tuple(devices), (slots,) * len(devices) if slots is not None and is_full else ())


def _experts(label: str, values: Any) -> tuple[int, ...]:
    return tuple(as_whole(f"{label}[{place}]", value) for place, value in enumerate(as_list(label, values)))


def _filled(label: str, value: Any) -> list[Any]:
    if value == []:
        raise ValueError(f"{label} is empty: give a list with something in it.")
    return as_list(label, value)
