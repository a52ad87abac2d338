"""Number of pipeline stages for a cluster that was measured, whole or in two chunks a rank: other ranks are replicas.

Where stages of whole decoder layers are far from equal, they may end within layers, between attention and MLP. Where
the head is more work than a stage, the last stages may share it.

All options train on the same samples a step, so the choice changes how long a step takes and nothing of what it learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from ..messages import plural
from .best_schedule import with_best_schedule, with_two_chunks
from .cluster import Cluster
from .strategy import NEAR, Dropped, Plan, plan_of
from .strategy_shape import ONE_F_ONE_B, Strategy
from .workload import Workload


class Stages(NamedTuple):
    """Stages of a pipeline as the JSON counts them, one a rank.

    Args:
        num_stages: of them.
        chunks: in which each is held: 2 are along the ranks and back.
    """

    num_stages: int
    chunks: int = 1

    @property
    def text(self) -> str:
        """``"2 stages"``, ``"2 stages of 2 chunks"``."""
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{plural(self.num_stages, 'stage')}{chunks}"


class Option(NamedTuple):
    """Stages times replicas, and what is predicted of them.

    Args:
        stages: one a rank.
        step_s: seconds of a step.
        order: name of the schedule that was predicted.
        memory_bytes: of the fullest device.
        why_not: it cannot be; empty: it can.
        chunks: of each stage.
        num_recomputed: layers that are recomputed so that the rest fits.
        whole_s: seconds of a step in whole decoder layers, where it is cut in halves of them; 0: it is in whole ones.
        head_slices: into which the head is cut.
        whole_head_s: seconds of a step with a whole head, where it is cut into slices.
    """

    stages: int
    data_parallel: int
    micro_batch_size: int
    micro_batches: int
    step_s: float = inf
    order: str = ""
    memory_bytes: float = inf
    why_not: str = ""
    chunks: int = 1
    num_recomputed: int = 0
    whole_s: float = 0.0
    head_slices: int = 1
    whole_head_s: float = 0.0

    @property
    def halves(self) -> bool:
        """Whether stages may end within decoder layers."""
        return self.whole_s > 0

    @property
    def shape(self) -> Stages:
        """The stages alone."""
        return Stages(self.stages, self.chunks)

    @property
    def text(self) -> str:
        """A line for people."""
        shape = self.shape.text
        shape += f" x {self.data_parallel} replicas" if self.data_parallel > 1 else ""
        if self.why_not:
            return f"{shape}: {self.why_not}"
        order = f", {self.order}" if self.stages > 1 else ""
        batches = f"{self.micro_batches} micro-batches of {self.micro_batch_size}"
        memory = f"{self.memory_bytes / 2**30:.3g} GiB"
        memory += f" with {self.num_recomputed} recomputed layers" if self.num_recomputed else ""
        halves = ", cut within layers" if self.halves else ""
        slices = f", the head in {self.head_slices} slices" if self.head_slices > 1 else ""
        return f"{shape}: {self.step_s:.4g} s a step of {batches}{order}, {memory}{halves}{slices}"


def predicted(
    option: Option,
    workload: Workload,
    cluster: Cluster,
    *,
    expert: int = 1,
    tuned: bool = False,
    within_s: float = inf,
    recomputed: Workload | None = None,
    halved: Workload | None = None,
    halved_again: Workload | None = None,
    sliced: Workload | None = None,
    sliced_halves: Workload | None = None,
) -> Option:
    """The option with its step time and memory, or the reason why it cannot be, or need not be looked at.

    Args:
        workload: with the option's micro-batches.
        expert: devices among which experts are spread.
        tuned: the schedule is chosen; otherwise it is 1F1B.
        within_s: with several chunks, a step that certainly takes longer is not predicted.
        recomputed: the workload with all layers recomputed, if some may be so that the rest fits.
        halved: the workload in halves of decoder layers, if stages may end within them: they do where that is faster.
        halved_again: the same with all layers recomputed, if some may be.
        sliced: the workload with the head in slices, if stages may share it: they do where that is faster.
        sliced_halves: the same in halves of decoder layers, if stages may end within them too.
    """
    how: dict[str, Any] = {"expert": expert, "within_s": within_s, "tuned": tuned}
    with_head = _in_halves_if_faster(option, workload, recomputed, halved, halved_again, cluster, **how)
    if sliced is None:
        return with_head
    found = _in_halves_if_faster(option, sliced, None, sliced_halves, None, cluster, **how)
    if not _is_clearly_faster(found, with_head):
        return with_head
    slices = len(sliced.items) - len(workload.items) + 1
    return found._replace(head_slices=slices, whole_head_s=with_head.step_s)


def _in_halves_if_faster(
    option: Option,
    workload: Workload,
    recomputed: Workload | None,
    halved: Workload | None,
    halved_again: Workload | None,
    cluster: Cluster,
    **how: Any,
) -> Option:
    whole = _as_cut(option, workload, cluster, recomputed=recomputed, **how)
    if halved is None:
        return whole
    found = _as_cut(option, halved, cluster, recomputed=halved_again, **how)
    return found._replace(whole_s=whole.step_s) if _is_clearly_faster(found, whole) else whole


def _is_clearly_faster(finer: Option, coarser: Option) -> bool:
    return not finer.why_not and finer.step_s * (1 + NEAR) <= coarser.step_s


def _as_cut(
    option: Option,
    workload: Workload,
    cluster: Cluster,
    *,
    expert: int,
    within_s: float,
    recomputed: Workload | None,
    tuned: bool,
) -> Option:
    if option.data_parallel % expert:
        why = f"its {option.data_parallel} replicas cannot share experts among {expert}"
        return option._replace(why_not=why)
    strategy, order = Strategy(1, option.stages, option.data_parallel, expert), ONE_F_ONE_B.type
    again = None if recomputed is None else lambda: recomputed
    if option.chunks > 1:
        found = with_two_chunks(
            *(strategy, workload, cluster),
            micro_batches=option.micro_batches,
            within_s=within_s,
            recomputed=again,
        )
        if found is None:
            return option._replace(why_not="its steps are too long, or too long to be simulated")
        if isinstance(found, Dropped):
            return option._replace(why_not=found.text)
        plan, order = found
        option = option._replace(num_recomputed=sum(plan.recomputed_of_stages))
        return option._replace(step_s=plan.step_s, order=order, memory_bytes=_fullest(plan))
    whole = plan_of(strategy, workload, cluster, recomputed=again)
    if isinstance(whole, Dropped):
        return option._replace(why_not=whole.text)
    if recomputed is not None and whole.recomputes:
        workload = workload.with_recomputed(recomputed, whole.recomputed)
        option = option._replace(num_recomputed=sum(whole.recomputed_of_stages))
    if tuned:
        whole, order = with_best_schedule(whole, workload, cluster)
    return option._replace(step_s=whole.step_s, order=order, memory_bytes=_fullest(whole))


def _fullest(plan: Plan) -> float:
    return max(need.total for need in plan.memory)


def choose(options: Sequence[Option], usual: Stages) -> Option | None:
    """The fastest; of those that are nearly as fast the ``usual`` one, else of the fewest chunks the fewest stages.

    None: none of them can be.
    """
    possible = [option for option in options if not option.why_not]
    if not possible:
        return None
    limit = min(option.step_s for option in possible) * (1 + NEAR)
    near = [option for option in possible if option.step_s <= limit]
    return min(near, key=lambda option: (option.shape != usual, option.chunks, option.stages))


def why_chosen(best: Option, options: Sequence[Option]) -> str:
    """The reason for which :func:`choose` took ``best`` of these options, and what is predicted of the others."""
    others = [option for option in options if option != best and not option.why_not]
    is_fastest = all(best.step_s <= option.step_s for option in others)
    which = "the fastest" if is_fastest else f"the default, or the simplest, of those within {NEAR:.0%} of the fastest"
    shown = [f"{best.step_s:.4g} s a step predicted", *(f"{each.step_s:.4g} with {each.shape.text}" for each in others)]
    return f"{which} that fits: {', '.join(shown)}"


def slowdown(
    seconds: Sequence[float],
    stages: int,
    *,
    follows_speed: bool,
    shares_by_speed: bool = False,
    least: Sequence[float] = (),
) -> float:
    """Seconds of a pipeline's layers by their mean over all ranks, where ranks are not equally fast.

    Args:
        seconds: that each rank takes for the same layers; the ranks of a stage are neighbours.
        follows_speed: stages get layers by the speed of their slowest device; otherwise all get as many.
        shares_by_speed: replicas get micro-batches by their speed; otherwise all wait for the slowest.
        least: share of the layers that each stage has at least, however slow its devices are; empty: none.
    """
    replicas, mean = len(seconds) // stages, sum(seconds) / len(seconds)
    of_stages = [seconds[first : first + replicas] for first in range(0, len(seconds), replicas)]
    shares = [1 / stages] * stages
    if follows_speed:
        shares = _shares_by_speed([max(own) for own in of_stages], least or [0.0] * stages)
    bottlenecks = [
        max(stages * share * own[replica] for share, own in zip(shares, of_stages, strict=True))
        for replica in range(replicas)
    ]
    if not shares_by_speed:
        return max(bottlenecks) / mean
    return replicas / sum(mean / seconds for seconds in bottlenecks)


def _shares_by_speed(seconds: Sequence[float], least: Sequence[float]) -> list[float]:
    """Shares of the layers with which the slowest stage takes least time; their sum is 1."""
    shares, free = list(least), set(range(len(least)))
    while free:
        rest = 1 - sum(share for stage, share in enumerate(least) if stage not in free)
        speed = sum(1 / seconds[stage] for stage in free)
        by_speed = {stage: rest / speed / seconds[stage] for stage in free}
        short = {stage for stage in free if by_speed[stage] < least[stage]}
        if not short:
            return [by_speed.get(stage, share) for stage, share in enumerate(shares)]
        free -= short
    return shares


def scaled(workload: Workload, factor: float) -> Workload:
    """The workload on devices that take ``factor`` times as long."""
    items = tuple(
        item._replace(
            forward_s=item.forward_s * factor,
            backward_s=item.backward_s * factor,
            expert_s=(item.expert_s[0] * factor, item.expert_s[1] * factor),
        )
        for item in workload.items
    )
    return replace(workload, items=items, stage=workload.stage.times(factor))
