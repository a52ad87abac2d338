"""Which device holds which stage in which direction of a multi-direction pipeline.

Of d devices there are P directions. Each is a pipeline over all devices in an order of its own, and holds the whole
model in d stages, so that every device holds P stages. Devices that hold the same stages are a mirror group. There are
orders of P = d / 2 directions (AMDP, arXiv 2605.29664), for 2 devices and multiples of 4, and of two, there and back,
for every even number.
"""

from __future__ import annotations

from collections.abc import Sequence

THERE_AND_BACK = 2
MOST_DEVICES = 32
"""The orders were checked up to here."""


def allowed(num_devices: int) -> tuple[int, ...]:
    """Numbers of directions that have an order without collisions on so many devices, rising.

    >>> allowed(2), allowed(4), allowed(6), allowed(8), allowed(7)
    ((1, 2), (2,), (2,), (2, 4), ())
    """
    if num_devices % 2 or not 2 <= num_devices <= MOST_DEVICES:
        return ()
    return tuple(sorted({THERE_AND_BACK, num_devices // 2} if has_halves(num_devices) else {THERE_AND_BACK}))


def has_halves(num_devices: int) -> bool:
    """Whether there is an order of d / 2 directions, with which devices idle least: for 2 and the multiples of 4."""
    return num_devices == 2 or (num_devices % 4 == 0 and 4 <= num_devices <= MOST_DEVICES)


def allowed_devices(num_directions: int | None = None) -> tuple[int, ...]:
    """Numbers of devices that have an order, of so many directions or of any, rising."""
    counts = range(2, MOST_DEVICES + 1, 2)
    return tuple(d for d in counts if num_directions is None or num_directions in allowed(d))


def num_directions(num_devices: int, asked: int | None = None) -> int:
    """P, which is also the number of stages that a device holds: what is asked for, or else d / 2, or else two.

    Raises:
        ValueError: there is no order of so many directions on so many devices.
    """
    known = allowed(num_devices)
    if not known:
        nearest = sorted(sorted(allowed_devices(), key=lambda count: abs(count - num_devices))[:2])
        why = (
            f"orders were checked for up to {MOST_DEVICES}"
            if num_devices > MOST_DEVICES
            else "two directions would need the same device at the same moment"
        )
        raise ValueError(
            f"{num_devices} devices have no multi-direction order ({why}): take an even number up to {MOST_DEVICES}, "
            f"such as {' or '.join(map(str, nearest))}."
        )
    if asked is None:
        return num_devices // 2 if has_halves(num_devices) else THERE_AND_BACK
    if asked not in known:
        raise ValueError(
            f"{num_devices} devices have no order of {asked} directions (they would need the same device at the same "
            f"moment, or leave it idle): take {' or '.join(map(str, known))}."
        )
    return asked


def route(direction: int, num_devices: int) -> tuple[int, ...]:
    """The device of each stage of one of d / 2 directions.

    >>> [route(direction, 4) for direction in range(2)]
    [(0, 1, 2, 3), (3, 2, 1, 0)]
    """
    sign = -1 if direction % 2 else 1
    first = 2 * direction + direction % 2
    return tuple((first + sign * stage) % num_devices for stage in range(num_devices))


def routes(num_devices: int, asked: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The devices of all directions' stages.

    Args:
        asked: directions; None: as :func:`num_directions` chooses.

    Raises:
        ValueError: there is no such order.

    >>> routes(6)
    ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0))
    """
    count = num_directions(num_devices, asked)
    if 2 * count == num_devices:
        return tuple(route(direction, num_devices) for direction in range(count))
    there = tuple(range(num_devices))
    return there, there[::-1]


def chunks_of(device: int, routes: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """The direction and the stage of each chunk that ``device`` holds: its cells in rising order.

    >>> chunks_of(1, ((0, 1, 0, 1),)), chunks_of(1, ((0, 1), (1, 0)))
    (((0, 1), (0, 3)), ((0, 1), (1, 0)))
    """
    return tuple((d, stage) for d, order in enumerate(routes) for stage, held in enumerate(order) if held == device)


def stages_of(device: int, routes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The stage that ``device`` holds in each direction."""
    return tuple(order.index(device) for order in routes)


def mirror_groups(routes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Devices that hold the same stages, each group rising.

    >>> mirror_groups(routes(4))
    ((0, 3), (1, 2))
    """
    groups: dict[frozenset[int], list[int]] = {}
    for device in range(len(routes[0])):
        groups.setdefault(frozenset(stages_of(device, routes)), []).append(device)
    return tuple(tuple(group) for group in groups.values())
