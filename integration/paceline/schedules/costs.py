"""What a step is made of, for simulation: seconds of compute, links, memory. Measured or assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite
from typing import Any

from ..json_values import as_list, as_number, as_object, as_rate, as_whole, known_keys, or_null
from .schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD


@dataclass(frozen=True)
class Link:
    """One direction between two neighbouring stages. A message occupies it for bytes / ``bytes_per_s`` and arrives
    ``latency_s`` later; the next message starts when the link is free again.

    Args:
        variation: what successive messages took, as multiples of that time. Empty: all take the same. In a replay
            micro-batches take them by their numbers.

    Raises:
        ValueError: a multiple is negative or not finite.
    """

    bytes_per_s: float = inf
    latency_s: float = 0.0
    variation: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(0 <= multiple < inf for multiple in self.variation):
            wrong = next(multiple for multiple in self.variation if not 0 <= multiple < inf)
            raise ValueError(f"a multiple in a link's variation is {wrong}: give numbers from 0 upwards.")


_NUMBERS = ("step_s", "gradient_share", "split_factor")
"""Costs that are one number for all stages."""


@dataclass(frozen=True)
class Again:
    """Activations that a step computes again, or keeps where they have room.

    Args:
        seconds: to compute those of one micro-batch, one number a stage.
        num_bytes: what they take, beside ``activation_bytes``, one a stage.
        layer_bytes: those of one layer, one a stage.
        kept: share of them that is kept in the steps that the costs are of, and no part of ``backward_s``, one a stage.
        room_bytes: what all that is alive may take, one a rank.
        is_collective: a rank keeps all or nothing, and computes nothing again early, since others take part.
    """

    seconds: tuple[float, ...]
    num_bytes: tuple[float, ...]
    layer_bytes: tuple[float, ...]
    kept: tuple[float, ...]
    room_bytes: tuple[float, ...]
    is_collective: bool = False


@dataclass(frozen=True)
class Costs:
    """What one step of a schedule of S stages costs.

    Boundary s lies between the stages s and s+1 and has its own links, also where chunks of the same two ranks meet
    more than once; ``hosts`` is for what is shared. Where a schedule has several directions all of them cost the same,
    and each has links of its own. What is empty costs nothing, and so does a boundary within a rank.

    Args:
        forward_s: seconds of one micro-batch's forward, one a stage, on a rank of speed 1.
        backward_s: the same of its backward.
        message_bytes: of an activation over each of the S−1 boundaries.
        gradient_share: bytes of its gradient, as a part of them; in formats of their own, other than 1.
        down: links for activations, one a boundary. Empty: infinitely fast.
        up: links for gradients, one a boundary. Empty: infinitely fast.
        hosts: host of each rank. Empty: no two messages share anything but a link.
        egress_bytes_per_s: what each host can send; all messages that leave it at a moment share that equally, and
            none gets more than its link carries. Empty: no limit.
        activation_bytes: what one live micro-batch keeps in memory, one a stage.
        fixed_bytes: all else in memory, one a rank.
        step_s: what a step costs besides its schedule (reduction, optimizer).
        speeds: of each rank, what divides its forwards and backwards. Empty: all 1.
        weight_s: the part of ``backward_s`` that is the gradients of the weights, one a stage; what is left is that of
            the inputs. Empty: half.
        split_factor: how many times as long as ``backward_s`` its two parts take together, where a backward is split.
        ahead_s: the part of ``backward_s`` that needs no gradient, and runs before the one that the backward waits for
            is there: activations that are computed again. One a stage. Empty: none.
        deferred_bytes: what one micro-batch keeps in memory from the backward of the inputs to that of the weights, one
            a stage. Empty: all that it kept before.
        again: what schedules keep as memory allows, see :mod:`paceline.planning.kept_activations`; it is in no file.

    Raises:
        ValueError: a length does not fit, or a number is negative or not finite where it must be.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    message_bytes: tuple[float, ...] = ()
    down: tuple[Link, ...] = ()
    up: tuple[Link, ...] = ()
    hosts: tuple[int, ...] = ()
    egress_bytes_per_s: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    fixed_bytes: tuple[float, ...] = ()
    step_s: float = 0.0
    speeds: tuple[float, ...] = ()
    weight_s: tuple[float, ...] = ()
    deferred_bytes: tuple[float, ...] = ()
    ahead_s: tuple[float, ...] = ()
    gradient_share: float = 1.0
    split_factor: float = 1.0
    again: Again | None = None

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        if not stages:
            raise ValueError("forward_s is empty: give the seconds of a forward, one number a stage.")
        lengths = {"backward_s": stages, "message_bytes": stages - 1, "down": stages - 1, "up": stages - 1}
        lengths |= dict.fromkeys(("activation_bytes", "weight_s", "deferred_bytes", "ahead_s"), stages)
        for name, length in lengths.items():
            got = len(getattr(self, name))
            if got != length and (got or name == "backward_s"):
                what = "stage" if length == stages else "boundary"
                raise ValueError(f"{name} has {got} values and there are {stages} stages: give {length}, one a {what}.")
        if self.hosts and self.egress_bytes_per_s and max(self.hosts) >= len(self.egress_bytes_per_s):
            raise ValueError(
                f"hosts names host {max(self.hosts)} and egress_bytes_per_s has {len(self.egress_bytes_per_s)} values:"
                f" give {max(self.hosts) + 1}, one a host."
            )
        for host in self.hosts:
            if host < 0:
                raise ValueError(f"host {host} is negative: hosts are numbered from 0.")
        for name in (*lengths, "forward_s", "fixed_bytes"):
            if name not in ("down", "up"):
                for index, value in enumerate(getattr(self, name)):
                    _from_zero(f"{name}[{index}]", value)
        for stage, (part, whole) in enumerate(zip(self.weight_s, self.backward_s, strict=bool(self.weight_s))):
            if part > whole:
                raise ValueError(
                    f"weight_s[{stage}] is {part} and backward_s[{stage}] {whole}: give the part of the backward that"
                    " is the gradients of the weights."
                )
        for stage, (part, whole) in enumerate(zip(self.ahead_s, self.backward_s, strict=bool(self.ahead_s))):
            if part > whole:
                raise ValueError(
                    f"ahead_s[{stage}] is {part} and backward_s[{stage}] {whole}: give the part of the backward that"
                    " needs no gradient."
                )
        for name in ("down", "up"):
            for index, link in enumerate(getattr(self, name)):
                _above_zero(f"{name}[{index}].bytes_per_s", link.bytes_per_s)
                _from_zero(f"{name}[{index}].latency_s", link.latency_s)
        for rank, speed in enumerate(self.speeds):
            _above_zero(f"speeds[{rank}]", speed)
        for host, value in enumerate(self.egress_bytes_per_s):
            _above_zero(f"egress_bytes_per_s[{host}]", value)
        _from_zero("step_s", self.step_s)
        _from_zero("gradient_share", self.gradient_share)
        _above_zero("split_factor", self.split_factor)

    @cached_property
    def seconds(self) -> dict[str, tuple[float, ...]]:
        """By kind of action: of each stage."""
        weight_s = self.weight_s or tuple(whole / 2 for whole in self.backward_s)
        input_s = tuple(self.split_factor * (b - w) for b, w in zip(self.backward_s, weight_s, strict=True))
        weight_s = tuple(self.split_factor * part for part in weight_s)
        return {
            FORWARD: self.forward_s, BACKWARD: self.backward_s, BACKWARD_INPUT: input_s, BACKWARD_WEIGHT: weight_s
        }  # fmt: skip

    @cached_property
    def seconds_ahead(self) -> dict[str, tuple[float, ...]]:
        """By kind of action: the part of :attr:`seconds` that may run before the action's input is there."""
        ahead_s = self.ahead_s or (0.0,) * len(self.forward_s)
        nothing = (0.0,) * len(self.forward_s)
        of_inputs = tuple(map(min, ahead_s, self.seconds[BACKWARD_INPUT]))
        return {FORWARD: nothing, BACKWARD: ahead_s, BACKWARD_INPUT: of_inputs, BACKWARD_WEIGHT: nothing}

    @cached_property
    def kept_bytes(self) -> dict[str, tuple[float, ...]]:
        """By kind of action: what is kept more, or less, after one of each stage."""
        live = self.activation_bytes or (0.0,) * len(self.forward_s)
        deferred = self.deferred_bytes or live
        return {
            FORWARD: live,
            BACKWARD: tuple(-size for size in live),
            BACKWARD_INPUT: tuple(after - before for before, after in zip(live, deferred, strict=True)),
            BACKWARD_WEIGHT: tuple(-size for size in deferred),
        }

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_s: float,
        backward_s: float,
        transfer_s: float = 0.0,
        latency_s: float = 0.0,
        weight_s: float | None = None,
    ) -> Costs:
        """All stages alike, all links alike: one message occupies its link for ``transfer_s``."""
        link = Link(1 / transfer_s if transfer_s else inf, latency_s)
        boundaries = num_stages - 1
        return cls(
            forward_s=(forward_s,) * num_stages,
            backward_s=(backward_s,) * num_stages,
            message_bytes=(1.0,) * boundaries,
            down=(link,) * boundaries,
            up=(link,) * boundaries,
            weight_s=() if weight_s is None else (weight_s,) * num_stages,
        )

    def of_chunks(self, route: Sequence[int]) -> Costs:
        """Costs of v stages a rank, from these of one stage a rank.

        Stage s becomes the stages v·s … v·s + v−1, with an equal part each of its time and its memory. A message in its
        middle is as large as the larger of those at its ends. Two neighbouring ranks have their links, used both ways;
        between ranks that are no neighbours here, as where the last hands on to the first, it is the worst of all.

        Args:
            route: rank of each of the v·S stages.
        """
        num_ranks, sizes = len(self.forward_s), self.message_bytes
        v = len(route) // num_ranks
        middles = [max(sizes[max(stage - 1, 0) : stage + 1], default=0.0) for stage in range(num_ranks)]
        free = (Link(),) * (num_ranks - 1)
        down, up = self.down or free, self.up or free
        ways = [_way(down, up, here, there) for here, there in pairwise(route)]

        def parts(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(value / v for value in values for _ in range(v))

        return replace(
            self,
            forward_s=parts(self.forward_s),
            backward_s=parts(self.backward_s),
            weight_s=parts(self.weight_s),
            activation_bytes=parts(self.activation_bytes),
            deferred_bytes=parts(self.deferred_bytes),
            ahead_s=parts(self.ahead_s),
            again=None
            if self.again is None
            else replace(
                self.again,
                seconds=parts(self.again.seconds),
                num_bytes=parts(self.again.num_bytes),
                layer_bytes=tuple(size for size in self.again.layer_bytes for _ in range(v)),
                kept=tuple(share for share in self.again.kept for _ in range(v)),
            ),
            message_bytes=tuple(
                middles[b // v] if (b + 1) % v else sizes[b // v] for b in range(len(route) - 1 if sizes else 0)
            ),
            down=tuple(forth for forth, _ in ways),
            up=tuple(back for _, back in ways),
        )

    def without_ahead(self) -> Costs:
        """The same where no part of a backward runs before its gradient is there: in steps without a flush."""
        return replace(self, ahead_s=()) if self.ahead_s else self

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file: what is empty is left out, and an infinite rate is null."""
        values: dict[str, Any] = {}
        for field in _written():
            value = getattr(self, field.name)
            if field.name in ("down", "up"):
                value = [_link_to_dict(link) for link in value]
            elif field.name == "egress_bytes_per_s":
                value = [or_null(rate) for rate in value]
            elif field.name not in _NUMBERS:
                value = list(value)
            if value != field.default and value != []:
                values[field.name] = value
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: a key is unknown, a value is no number or list of numbers, or the costs are none.
        """
        known_keys("the costs", values, [field.name for field in _written()])
        for name in ("forward_s", "backward_s"):
            if name not in values:
                raise ValueError(f"{name} is missing: give a list of seconds, one number a stage.")
        given: dict[str, Any] = {}
        for name, value in values.items():
            if name in _NUMBERS:
                given[name] = float(as_number(name, value))
                continue
            items = [(f"{name}[{index}]", item) for index, item in enumerate(as_list(name, value))]
            if name in ("down", "up"):
                given[name] = tuple(_link(label, item) for label, item in items)
            elif name == "egress_bytes_per_s":
                given[name] = tuple(float(as_rate(label, item)) for label, item in items)
            elif name == "hosts":
                given[name] = tuple(as_whole(label, item) for label, item in items)
            else:
                given[name] = tuple(float(as_number(label, item)) for label, item in items)
        return cls(**given)


def _written() -> list[Field[Any]]:
    """Fields that are in files."""
    return [field for field in fields(Costs) if field.name != "again"]


def _way(down: Sequence[Link], up: Sequence[Link], here: int, there: int) -> tuple[Link, Link]:
    """Links from a rank to another and back."""
    if here == there:
        return Link(), Link()
    if abs(here - there) > 1:
        links = (*down, *up)
        slowest = min(links, key=lambda link: link.bytes_per_s)
        worst = replace(slowest, latency_s=max(link.latency_s for link in links))
        return worst, worst
    boundary = min(here, there)
    return (down[boundary], up[boundary]) if here < there else (up[boundary], down[boundary])


def _link(label: str, value: Any) -> Link:
    link = as_object(label, value, ("bytes_per_s", "latency_s", "variation"))
    multiples = as_list(f"{label}.variation", link.get("variation", []))
    return Link(
        float(as_rate(f"{label}.bytes_per_s", link.get("bytes_per_s"))),
        float(as_number(f"{label}.latency_s", link.get("latency_s", 0.0))),
        tuple(float(as_number(f"{label}.variation[{number}]", each)) for number, each in enumerate(multiples)),
    )


def _link_to_dict(link: Link) -> dict[str, Any]:
    values = {"bytes_per_s": or_null(link.bytes_per_s), "latency_s": link.latency_s}
    return values | ({"variation": list(link.variation)} if link.variation else {})


def _from_zero(label: str, value: float) -> None:
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{label} is {value}: give a number from 0 upwards.")


def _above_zero(label: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{label} is {value}: give a number above 0.")
