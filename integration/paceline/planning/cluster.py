"""A cluster of equal devices in equal nodes, and how long its collectives take, by bandwidth and latency."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf, isfinite, log2
from typing import Any

from ..json_values import as_object, as_whole, or_null, short

GIB = 2**30


RATES = ("bytes_per_s", "all_reduce_bytes_per_s", "all_to_all_bytes_per_s", "zero1_bytes_per_s")
"""Of the links between devices."""


@dataclass(frozen=True)
class Fabric:
    """The links between devices: inside a node, or from one node to another.

    Args:
        bytes_per_s: from one device to another while all others send too.
        latency_s: of one message.
        all_reduce_bytes_per_s: what each device sends in an all-reduce, if measured (2·(n−1)/n of the buffer in that
            time: the "bus bandwidth" of nccl-tests); None: ``bytes_per_s``.
        all_to_all_bytes_per_s: likewise, of what each device sends to all others.
        zero1_bytes_per_s: likewise, of what each device sends when gradients are reduced to their owners, and new
            values go from owners to all (2·(n−1)/n of the buffer together); None: as in an all-reduce.
    """

    bytes_per_s: float = inf
    latency_s: float = 0.0
    all_reduce_bytes_per_s: float | None = None
    all_to_all_bytes_per_s: float | None = None
    zero1_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in RATES:
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} is {rate}: give bytes a second, above 0.")
        if not (isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s is {self.latency_s}: give seconds, from 0 upwards.")

    @property
    def reduction_bytes_per_s(self) -> float:
        """The rate of an all-reduce."""
        return self.all_reduce_bytes_per_s or self.bytes_per_s

    @property
    def exchange_bytes_per_s(self) -> float:
        """The rate of an all-to-all."""
        return self.all_to_all_bytes_per_s or self.bytes_per_s

    @property
    def sharding_bytes_per_s(self) -> float:
        """The rate of ZeRO 1's reductions to owners and of their values on the way back."""
        return self.zero1_bytes_per_s or self.reduction_bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes. Ranks are numbered node by node.

    Args:
        num_devices: N.
        devices_per_node: that share a node; the last node may have fewer.
        memory_bytes: that a rank may take of its device.
        flops_per_s: that a device reaches in a model's matrix products, not what its data sheet says.
        state_bytes_per_s: at which an optimizer reads and writes its states.
        inside: between devices of a node.
        across: between devices of different nodes.

    Raises:
        ValueError: numbers that cannot be.
    """

    num_devices: int
    devices_per_node: int
    memory_bytes: float = inf
    flops_per_s: float = inf
    state_bytes_per_s: float = inf
    inside: Fabric = field(default_factory=Fabric)
    across: Fabric = field(default_factory=Fabric)

    def __post_init__(self) -> None:
        for name in ("num_devices", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a whole number from 1 upwards.")
        for name in ("memory_bytes", "flops_per_s", "state_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number above 0.")

    def members_in_node(self, size: int, stride: int) -> int:
        """Number of a group's ranks, ``stride`` apart, that share a node; groups begin at multiples of their span."""
        span = size * stride
        if span <= self.devices_per_node and self.devices_per_node % span == 0:
            return size
        members = min(size, self.devices_per_node // stride)
        # Where nodes and groups do not divide each other, a group may lie across any number of them.
        while members > 1 and (size % members or self.devices_per_node % (members * stride)):
            members -= 1
        return max(members, 1)

    def all_reduce_s(self, num_bytes: float, size: int, stride: int) -> float:
        """Seconds to all-reduce a buffer of ``num_bytes`` on each of the ``size`` ranks, ``stride`` apart.

        Inside the nodes first, each device then reduces its share with its peers of the other nodes, and back.
        """
        rates = self.inside.reduction_bytes_per_s, self.across.reduction_bytes_per_s
        return 2 * self._one_way_s(num_bytes, size, stride, *rates)

    def to_owners_s(self, num_bytes: float, size: int, stride: int) -> float:
        """Seconds to reduce a buffer of ``num_bytes`` on each rank to owners of equal parts, or for these to give their
        parts to all: half an all-reduce, at the rate of ZeRO 1."""
        rates = self.inside.sharding_bytes_per_s, self.across.sharding_bytes_per_s
        return self._one_way_s(num_bytes, size, stride, *rates)

    def _one_way_s(self, num_bytes: float, size: int, stride: int, inside: float, across: float) -> float:
        if size == 1 or not num_bytes:
            return 0.0
        near = self.members_in_node(size, stride)
        far = size // near
        seconds = (near - 1) / near * num_bytes / inside + (far - 1) / far * (num_bytes / near) / across
        return seconds + _hops(near) * self.inside.latency_s + _hops(far) * self.across.latency_s

    def all_to_all_s(self, num_bytes: float, size: int, stride: int) -> float:
        """Seconds of an all-to-all; ``num_bytes``: all that the busiest rank sends or receives, its own share too."""
        if size == 1 or not num_bytes:
            return 0.0
        near = self.members_in_node(size, stride)
        inside_s = (near - 1) / size * num_bytes / self.inside.exchange_bytes_per_s
        across_s = (size - near) / size * num_bytes / self.across.exchange_bytes_per_s
        latency_s = _hops(near) * self.inside.latency_s + _hops(size // near) * self.across.latency_s
        return inside_s + across_s + latency_s

    def link(self, first: int, last: int) -> Fabric:
        """The link between ranks from ``first`` to ``last``: across nodes, unless one node has all of them."""
        same = first // self.devices_per_node == last // self.devices_per_node
        return self.inside if same else self.across

    @classmethod
    def from_dict(cls, values: Any) -> Cluster:
        """Read a JSON value such as ``{"devices": 16, "devices_per_node": 8, "memory_gib": 80, "flops_per_s": 4e14,
        "intra_node": {"bytes_per_s": 3e11, "latency_s": 5e-6}, "inter_node": {…}, "state_bytes_per_s": 2e12}``.

        What is left out, or null, is unlimited; one node, if ``devices_per_node`` is left out.

        Raises:
            ValueError: the key, its value, the rule and the remedy.
        """
        known = as_object("the cluster", values, _CLUSTER)
        if "devices" not in known:
            raise ValueError('the cluster has no "devices": give the number of them.')
        devices = _whole("devices", known["devices"])
        per_node = known.get("devices_per_node")
        return cls(
            devices,
            devices if per_node is None else _whole("devices_per_node", per_node),
            _above_0("memory_gib", known.get("memory_gib")) * GIB,
            _above_0("flops_per_s", known.get("flops_per_s")),
            _above_0("state_bytes_per_s", known.get("state_bytes_per_s")),
            _fabric("intra_node", known.get("intra_node")),
            _fabric("inter_node", known.get("inter_node")),
        )

    def to_dict(self) -> dict[str, Any]:
        """The inverse of :meth:`from_dict`."""
        return {
            "devices": self.num_devices,
            "devices_per_node": self.devices_per_node,
            "memory_gib": or_null(self.memory_bytes / GIB),
            "flops_per_s": or_null(self.flops_per_s),
            "state_bytes_per_s": or_null(self.state_bytes_per_s),
            "intra_node": {name: or_null(getattr(self.inside, name)) for name in _FABRIC},
            "inter_node": {name: or_null(getattr(self.across, name)) for name in _FABRIC},
        }


_CLUSTER = (
    *("devices", "devices_per_node", "memory_gib", "flops_per_s", "state_bytes_per_s"),
    *("intra_node", "inter_node"),
)
_FABRIC = ("bytes_per_s", "latency_s", *RATES[1:])


def _hops(size: int) -> int:
    """Hops of a message through a tree of so many ranks."""
    return ceil(log2(size)) if size > 1 else 0


def _fabric(where: str, values: Any) -> Fabric:
    known = {} if values is None else as_object(where, values, _FABRIC)
    given = {name: _limit(f"{where}.{name}", value) for name, value in known.items() if value is not None}
    try:
        return Fabric(**given)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def _whole(where: str, value: Any) -> int:
    if as_whole(where, value) < 1:
        raise ValueError(f"{where} is {value}: give a whole number from 1 upwards.")
    return int(value)


def _above_0(where: str, value: Any) -> float:
    found = _limit(where, value)
    if not found > 0:
        raise ValueError(f"{where} is {found}: give a number above 0.")
    return found


def _limit(where: str, value: Any) -> float:
    if value is None:
        return inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} is {short(value)}: give a number.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{where} is too large to be computed with: leave it out if there is no limit.") from None
