"""Which device holds which stage in which direction of a multi-direction pipeline.

Of d devices there are P = d / 2 directions. Each is a pipeline over all devices in an order of its own, and holds the
whole model in d stages, so that every device holds P stages. Devices that hold the same stages are a mirror group.
Source: AMDP (arXiv 2605.29664).
"""

from __future__ import annotations

MOST_DEVICES = 32
"""The order was checked up to here."""
ALLOWED = (2, *range(4, MOST_DEVICES + 1, 4))
"""Numbers of devices that have an order without collisions."""


def check_devices(num_devices: int) -> None:
    """Raise ValueError where there is no order without collisions: all but 2 and the multiples of 4 up to 32."""
    if num_devices in ALLOWED:
        return
    nearest = sorted(sorted(ALLOWED, key=lambda count: abs(count - num_devices))[:2])
    why = (
        f"it was checked for up to {MOST_DEVICES}"
        if num_devices > MOST_DEVICES
        else "two directions would need the same device at the same moment, or leave it idle"
    )
    raise ValueError(
        f"{num_devices} devices have no multi-direction order ({why}): take 2 or a multiple of 4 up to "
        f"{MOST_DEVICES}, such as {' or '.join(map(str, nearest))}."
    )


def num_directions(num_devices: int) -> int:
    """P, which is also the number of stages that a device holds."""
    return num_devices // 2


def route(direction: int, num_devices: int) -> tuple[int, ...]:
    """The device of each stage of a direction.

    >>> [route(direction, 4) for direction in range(2)]
    [(0, 1, 2, 3), (3, 2, 1, 0)]
    """
    sign = -1 if direction % 2 else 1
    first = 2 * direction + direction % 2
    return tuple((first + sign * stage) % num_devices for stage in range(num_devices))


def routes(num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The devices of all directions' stages.

    Raises:
        ValueError: there is no order for so many devices.
    """
    check_devices(num_devices)
    return tuple(route(direction, num_devices) for direction in range(num_directions(num_devices)))


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
