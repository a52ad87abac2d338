"""The schedules without a flush, and the multi-direction one that can also do with one.

A flush at the end of a step costs (S−1)(F+B). Without it stages run on with weights that one update has not reached
yet. Several directions over the same devices even out what that costs in memory and keep it at one update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import directions
from .schedule import BACKWARD, FORWARD, check_size
from .stream import UPDATE, Stream, StreamAction


def multidirection(num_devices: int, num_micro_batches: int, num_directions: int | None = None) -> Stream:
    """P directions over d devices in a static order: P = d/2 (AMDP, arXiv 2605.29664), or two, there and back.

    A round of d micro-batches takes 2d slots, in which every direction handles d/P of them. The k-th, from 0, has its
    forward in stage s in slot s+2k and its backward in slot 2d−1−s+2k, of which those from 2d on fall into the next
    round. With P = d/2 directions the second one has them in the slots 1 and 2d+2 of stage 0. Devices run their
    actions in the order of the slots. A direction has d/P micro-batches under way, and no backward is more than one
    update away from its forward, at any depth.

    Every device has the update of a step before its first backward of the next one.

    Args:
        num_devices: d, even.
        num_micro_batches: M of a step, a multiple of d.
        num_directions: P; None: as :func:`.directions.num_directions` chooses.

    Raises:
        ValueError: there is no such order.
    """
    routes = directions.routes(num_devices, num_directions)
    check_size(num_devices, num_micro_batches)
    if num_micro_batches < num_devices or num_micro_batches % num_devices:
        down = max(num_micro_batches // num_devices, 1) * num_devices
        nearest = [down] if num_micro_batches < num_devices else [down, down + num_devices]
        raise ValueError(
            f"{num_micro_batches} micro-batches a step do not fill rounds of {num_devices}, one a device: take "
            f"{' or '.join(map(str, nearest))}."
        )
    windows = tuple(
        _window(directions.stages_of(device, routes), num_devices, num_micro_batches) for device in range(num_devices)
    )
    name = MULTIDIRECTION
    if len(routes) != directions.num_directions(num_devices):
        name = f"{MULTIDIRECTION} directions={len(routes)}"
    return Stream(windows, num_micro_batches, len(routes), name, routes)


def _window(stages: tuple[int, ...], num_devices: int, num_micro_batches: int) -> tuple[StreamAction, ...]:
    """Actions of a device that holds ``stages``, one a direction."""
    num_directions, period = len(stages), 2 * num_devices
    num_slots = period * (num_micro_batches // num_devices)
    slots: dict[int, StreamAction] = {}
    for direction, stage in enumerate(stages):
        for start in range(0, num_slots, period):
            for number in range(num_devices // num_directions):
                micro_batch = start // 2 + direction + num_directions * number
                forward, backward = stage + 2 * number, period - 1 - stage + 2 * number
                if stage == 0 and number == 1 and 2 * num_directions == num_devices:
                    forward, backward = 1, period + 2
                for kind, slot in ((FORWARD, forward), (BACKWARD, backward)):
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


def make(type: str, num_devices: int, num_micro_batches: int, num_directions: int | None = None) -> Stream:
    """The stream that a configuration names.

    Args:
        num_directions: of ``"multidirection"``; None: as many as :func:`.directions.num_directions` chooses.

    Raises:
        ValueError: there is no such type, or none of this shape.
    """
    if type not in STREAMS:
        raise ValueError(f"schedule type {type!r} is unknown: choose one of {', '.join(STREAMS)}.")
    if type == MULTIDIRECTION:
        return multidirection(num_devices, num_micro_batches, num_directions)
    return STREAMS[type](num_devices, num_micro_batches)
