"""Seconds of a step behind its last backward: gradients to who steps them, the steps, and new values on their way back.

ZeRO 0 all-reduces gradients. ZeRO 1 reduces them to their owners, whose new values go to all. Gradients go in buckets,
each as soon as the last backward has finished it, one after another. What is left when a stage ends its last backward
may still be hidden behind those of the stages before it. Then all stages wait for one another, since the norm is that
of all gradients; nothing hides the steps and the new values. That compute slows down beside the reduction is not
modelled, nor are buckets that end within a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..schedules.costs import Costs
from .cluster import Cluster, Fabric
from .memory import MASTER_BYTES
from .strategy_memory import Share
from .strategy_shape import Strategy
from .strategy_times import ItemTime
from .workload import Workload

LEAST_BUCKET = 1 << 22
"""Elements of a bucket of gradients, at least: most are a layer, or several small ones."""


class Exchange(NamedTuple):
    """Seconds to reduce gradients, or to bring values back: of all parameters but experts, and of experts."""

    dense_s: float = 0.0
    experts_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both, one after the other."""
        return self.dense_s + self.experts_s


@dataclass(frozen=True)
class GradientCosts:
    """What replicas exchange, and what they step, in one strategy.

    Args:
        share: of a rank, with the form in which its states are kept.
    """

    strategy: Strategy
    workload: Workload
    cluster: Cluster
    share: Share

    def terms(
        self,
        times: Sequence[ItemTime],
        boundaries: Sequence[int],
        held: Sequence[Sequence[int]],
        costs: Costs,
        *,
        flushes: bool,
    ) -> tuple[float, float, float]:
        """Seconds behind the pipeline: gradients and values of all but experts, those of experts, and the steps.

        Args:
            held: stages of each device; the states of the first are there.
            costs: of the pipeline.
            flushes: whether a step ends with the last backwards, one stage a device; otherwise nothing is hidden.
        """
        states, later_s = self.share.dense, 0.0
        reduced, published, stepped_s = [], [], []
        for own in held:
            items = [(boundaries[stage], boundaries[stage + 1]) for stage in own]
            found = self.reduction(items)
            if flushes and states.overlaps and found.total_s:
                left = max(self.outlasting_s(times, *items[0]) - later_s, 0.0) / found.total_s
                found = Exchange(left * found.dense_s, left * found.experts_s)
            reduced.append(found._replace(dense_s=found.dense_s + self._tied_s(own[:1], len(boundaries) - 1)))
            published.append(self.publishing(items))
            stepped_s.append(self._stepped_s(*items[0]))
            if flushes and own[0] < len(costs.up):  # the stage behind it is done earlier by so much
                link = costs.up[own[0]]
                later_s += sum(time.backward_s for time in times[slice(*items[0])])
                later_s += costs.message_bytes[own[0]] / link.bytes_per_s + link.latency_s
        return _waited_for(reduced, published, stepped_s)

    def terms_of_split(
        self, weight_s: Sequence[float], boundaries: Sequence[int], held: Sequence[Sequence[int]]
    ) -> tuple[float, float, float]:
        """:meth:`terms` where backwards are split: all devices end at about the same time, with gradients of weights.
        Those of one micro-batch may hide the reduction.

        Args:
            weight_s: seconds of each item's gradients of weights.
            held: stages of each device, along one direction.
        """
        reduced, published, stepped_s = [], [], []
        for own in held:
            stages = [(boundaries[stage], boundaries[stage + 1]) for stage in own]
            found = _sum([self.reduction([items]) for items in stages])
            if self.share.dense.overlaps and found.total_s:
                last_first = [item for start, stop in reversed(stages) for item in range(stop - 1, start - 1, -1)]
                left = self._outlasting_s(weight_s, last_first) / found.total_s
                found = Exchange(left * found.dense_s, left * found.experts_s)
            reduced.append(found._replace(dense_s=found.dense_s + self._tied_s(own, len(boundaries) - 1)))
            published.append(_sum([self.publishing([items]) for items in stages]))
            stepped_s.append(sum(self._stepped_s(*items) for items in stages))
        return _waited_for(reduced, published, stepped_s)

    def reduction(self, stages: Sequence[tuple[int, int]]) -> Exchange:
        """Of a device's gradients, once the backward is done.

        Args:
            stages: that it has, each as its first item and the one behind its last.
        """
        states = self.share.dense
        return self._exchange(stages, states.sent_gradient_bytes, whole=not states.shard)

    def publishing(self, stages: Sequence[tuple[int, int]]) -> Exchange:
        """Of new values, from their owners to all. Arguments as of :meth:`reduction`."""
        states = self.share.dense
        return self._exchange(stages, states.weight_bytes, whole=False) if states.shard else Exchange()

    def outlasting_s(self, times: Sequence[ItemTime], start: int, stop: int) -> float:
        """Seconds from the end of the last backward of items ``start`` to ``stop - 1`` to that of their reduction."""
        return self._outlasting_s([time.backward_s for time in times], range(stop - 1, start - 1, -1))

    def _outlasting_s(self, ready_s: Sequence[float], items: Sequence[int]) -> float:
        """Likewise of ``items``, whose gradients are ready one after another, each after so many seconds more."""
        states = self.share.dense
        now_s = done_s = 0.0
        waiting = [0.0, 0.0]
        for item in items:
            now_s += ready_s[item]
            for kind, number in enumerate(self._trained(item, item + 1)):
                waiting[kind] += number
                if waiting[kind] >= LEAST_BUCKET or item == items[-1]:
                    bucket = (waiting[kind], 0.0) if kind == 0 else (0.0, waiting[kind])
                    seconds = self._one_way(bucket, states.sent_gradient_bytes, whole=not states.shard).total_s
                    done_s = max(done_s, now_s) + seconds
                    waiting[kind] = 0.0
        return max(done_s - now_s, 0.0)

    def _trained(self, start: int, stop: int) -> tuple[float, float]:
        """Numbers that are trained in items from ``start`` up to ``stop``: all but experts', and experts'."""
        dense, experts = self.share.parameters(start, stop)
        return self.share.dense.trained * dense, self.share.dense.trained * experts

    def _exchange(self, stages: Sequence[tuple[int, int]], num_bytes: int, *, whole: bool) -> Exchange:
        """With several directions there are as many copies of a stage on other devices, among which it goes on."""
        each = [self._trained(*items) for items in stages]
        dense, experts = sum(one for one, _ in each), sum(one for _, one in each)
        found = self._one_way((dense, experts), num_bytes, whole=whole)
        copies = Cluster(len(stages), len(stages), inside=self._farthest)
        between = copies.all_reduce_s if whole else copies.to_owners_s
        again_s = between(num_bytes * (dense + experts) / self.strategy.data, len(stages), 1)
        return found._replace(dense_s=found.dense_s + again_s)

    def _one_way(self, numbers: tuple[float, float], num_bytes: int, *, whole: bool) -> Exchange:
        strategy = self.strategy
        act = self.cluster.all_reduce_s if whole else self.cluster.to_owners_s
        return Exchange(
            act(num_bytes * numbers[0], strategy.data, strategy.tensor),
            act(num_bytes * numbers[1], strategy.expert_data, strategy.tensor * strategy.expert),
        )

    @property
    def _farthest(self) -> Fabric:
        return self.cluster.link(0, self.strategy.num_devices - 1)

    def _tied_s(self, own: Sequence[int], num_stages: int) -> float:
        """To sum gradients of weights that the first and the last stage share, unless they are on one device."""
        tied = self.workload.tied_parameters * self.share.dense.trained
        if not tied or len({0, num_stages - 1}.intersection(own)) != 1 or num_stages == 1:
            return 0.0
        gradient_bytes = self.share.dense.gradient_bytes or MASTER_BYTES
        return gradient_bytes * tied / self._farthest.reduction_bytes_per_s + 2 * self._farthest.latency_s

    def _stepped_s(self, start: int, stop: int) -> float:
        states, strategy = self.share.dense, self.strategy
        dense, experts = self._trained(start, stop)
        owned = dense / (strategy.data if states.shard else 1) + experts / (strategy.expert_data if states.shard else 1)
        each = state_bytes_per_parameter(states.gradient_bytes or MASTER_BYTES, states.num_moments)
        return owned * each / self.cluster.state_bytes_per_s


def _sum(exchanges: Sequence[Exchange]) -> Exchange:
    """One after another."""
    return Exchange(sum(one.dense_s for one in exchanges), sum(one.experts_s for one in exchanges))


def _waited_for(
    reduced: Sequence[Exchange], published: Sequence[Exchange], stepped_s: Sequence[float]
) -> tuple[float, float, float]:
    """The slowest of all devices, in each part."""
    last, slowest = (max(each, key=lambda exchange: exchange.total_s) for each in (reduced, published))
    return last.dense_s + slowest.dense_s, last.experts_s + slowest.experts_s, max(stepped_s)


def state_bytes_per_parameter(gradient_bytes: int = MASTER_BYTES, num_moments: int = 2) -> float:
    """Bytes that an optimizer step moves: the gradient is read for the norm and once more; master and moments are read
    and written."""
    return 2.0 * gradient_bytes + 2.0 * MASTER_BYTES * (1 + num_moments)
