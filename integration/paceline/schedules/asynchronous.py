"""The schedules without a flush, and the multi-direction one that can also do with one.

A flush at the end of a step costs (S−1)(F+B). Without it stages run on with weights that one update has not reached
yet. Several directions over the same devices even out what that costs in memory and keep it at one update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import directions
from .schedule import BACKWARD, FORWARD, check_size
from .stream import UPDATE, Stream, StreamAction


def multidirection(num_devices: int, num_micro_batches: int) -> Stream:
    """P = d/2 directions over d devices in a static order (AMDP, arXiv 2605.29664).

    A round of d micro-batches takes 2d slots, in which every direction handles two of them, a and b. In stage s of a
    direction F_a runs in slot s, B_a in 2d−1−s, F_b in s+2 (1 if s = 0) and B_b in 2d+1−s (2d+2 if s = 0), of which
    those from 2d on fall into the next round. Devices run their actions in the order of the slots. Since only two
    micro-batches of a direction are under way, no backward is more than one update away from its forward, at any depth.

    Every device has the update of a step before its first backward of the next one.

    Args:
        num_devices: d, 2 or a multiple of 4.
        num_micro_batches: M of a step, a multiple of d.

    Raises:
        ValueError: there is no such order.
    """
    routes = directions.routes(num_devices)
    check_size(num_devices, num_micro_batches)
    if num_micro_batches < num_devices or num_micro_batches % num_devices:
        down = max(num_micro_batches // num_devices, 1) * num_devices
        nearest = [down] if num_micro_batches < num_devices else [down, down + num_devices]
        raise ValueError(
            f"{num_micro_batches} micro-batches a step do not fill rounds of {num_devices}, one a device: take "
            f"{' or '.join(map(str, nearest))}."
        )
    windows = tuple(_window(directions.stages_of(d, routes), num_micro_batches) for d in range(num_devices))
    name = "multidirection"
    return Stream(windows, num_micro_batches, len(routes), name, routes)


def _window(stages: tuple[int, ...], num_micro_batches: int) -> tuple[StreamAction, ...]:
    """Of a device that holds ``stages``, one a direction."""
    num_devices = 2 * len(stages)
    period = 2 * num_devices
    num_slots = period * (num_micro_batches // num_devices)
    slots: dict[int, StreamAction] = {}
    for direction, stage in enumerate(stages):
        forward_b, backward_b = (stage + 2, period + 1 - stage) if stage else (1, period + 2)
        for start in range(0, num_slots, period):
            first = start // 2 + direction
            a, b = first, first + len(stages)
            for kind, micro_batch, slot in (
                (FORWARD, a, stage),
                (BACKWARD, a, period - 1 - stage),
                (FORWARD, b, forward_b),
                (BACKWARD, b, backward_b),
            ):
                lag, place = divmod(start + slot, num_slots)
                assert place not in slots, "two actions in a slot"
                slots[place] = StreamAction(kind, micro_batch, direction, lag)
    window = [slots[slot] for slot in sorted(slots)]
    first_own = next(i for i, action in enumerate(window) if action.kind == BACKWARD and not action.lag)
    return (*window[:first_own], StreamAction(UPDATE, -1, -1, 1), *window[first_own:])


def one_direction(num_stages: int, num_micro_batches: int) -> Stream:
    """1F1B that is never flushed: an update every M backwards, and no copies of weights (PACI, arXiv 2606.07881).

    Stage s of S runs its forwards S−1−s micro-batches ahead of its backwards, from step to step. It takes on the update
    of a step s backwards after the step's last one, which is when the first stage has run that: then the gradients
    of all stages are known (for their norm), no stage waits, and the forward of a micro-batch uses the same version of
    the weights in every stage. Between a forward and its backward there are at most ⌈(S−1)/M⌉ updates.

    Args:
        num_stages: S, one a rank.
        num_micro_batches: M of a step.

    Raises:
        ValueError: a number below 1.
    """
    for name, count in (("num_stages", num_stages), ("num_micro_batches", num_micro_batches)):
        if count < 1:
            raise ValueError(f"{name}={count} must be 1 or more.")
    check_size(num_stages, num_micro_batches)
    windows = []
    for stage in range(num_stages):
        ahead = num_stages - 1 - stage
        window = []
        for forward in range(num_micro_batches):
            window.append(StreamAction(FORWARD, forward, 0, 0))
            back, micro_batch = divmod(forward - ahead, num_micro_batches)
            window.append(StreamAction(BACKWARD, micro_batch, 0, -back))
            late, last = divmod(stage - 1, num_micro_batches)
            if micro_batch == last:
                window.append(StreamAction(UPDATE, -1, -1, -back + late + 1))
        windows.append(tuple(window))
    return Stream(tuple(windows), num_micro_batches, 1, "one_direction", (tuple(range(num_stages)),))


MULTIDIRECTION, ONE_DIRECTION = "multidirection", "one_direction"
STREAMS: Mapping[str, Callable[[int, int], Stream]] = {MULTIDIRECTION: multidirection, ONE_DIRECTION: one_direction}


def make(type: str, num_devices: int, num_micro_batches: int) -> Stream:
    """The stream that a configuration names.

    Raises:
        ValueError: there is no such type, or none of this shape.
    """
    if type not in STREAMS:
        raise ValueError(f"schedule type {type!r} is unknown: choose one of {', '.join(STREAMS)}.")
    return STREAMS[type](num_devices, num_micro_batches)
