"""The families of schedules in use, each a function of its shape. Those with one chunk a rank are `grouped`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import ceil, isfinite

from .schedule import Action, Schedule, backward, check_size, forward


def grouped(num_stages: int, num_micro_batches: int, k: int, warmup: Sequence[int], name: str = "") -> Schedule:
    """Micro-batches in groups of ``k`` (the last one may be smaller), with a warm-up of its own for each stage.

    Stage s runs ``warmup[s]`` groups of forwards, then alternates one group of forwards with one of backwards, then
    drains. Both run in micro-batch order on every stage, so gradients are summed in the same order by all of them.

    Args:
        num_stages: S, one a rank.
        num_micro_batches: M, of a step.
        k: micro-batches in a group.
        warmup: groups, one number a stage; more than there are means all. It never grows along the pipeline: a stage
            cannot warm up on what the stage before it has not yet run.
        name: for people.

    Raises:
        ValueError: no schedule has this shape, or it could not be executed.
    """
    _at_least_one(num_stages=num_stages, num_micro_batches=num_micro_batches, k=k)
    check_size(num_stages, num_micro_batches)
    if len(warmup) != num_stages:
        raise ValueError(
            f"warmup={tuple(warmup)} has {len(warmup)} numbers for {num_stages} stages: give one for each stage."
        )
    num_groups = ceil(num_micro_batches / k)
    groups_ahead = [min(groups, num_groups) for groups in warmup]
    for stage, groups in enumerate(groups_ahead):
        if groups < 0:
            raise ValueError(f"warmup[{stage}]={groups} is negative: a stage warms up on 0 groups or more.")
        if stage and groups > groups_ahead[stage - 1]:
            raise ValueError(
                f"warmup={tuple(warmup)} grows from {groups_ahead[stage - 1]} on stage {stage - 1} to {groups} on stage"
                f" {stage}: the earlier one would wait for a gradient while the later one waits for an activation;"
                f" lower warmup[{stage}] to {groups_ahead[stage - 1]}."
            )
    forwards = tuple(forward(m) for m in range(num_micro_batches))
    backwards = tuple(backward(m) for m in range(num_micro_batches))
    forward_groups = [forwards[first : first + k] for first in range(0, num_micro_batches, k)]
    backward_groups = [backwards[first : first + k] for first in range(0, num_micro_batches, k)]

    def order(ahead: int) -> tuple[Action, ...]:
        steady = chain.from_iterable(zip(forward_groups[ahead:], backward_groups, strict=False))
        drain = backwards[(num_groups - ahead) * k :]
        return tuple(chain(forwards[: ahead * k], chain.from_iterable(steady), drain))

    return Schedule(tuple(order(ahead) for ahead in groups_ahead), num_micro_batches, name=name)


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B (PipeDream-Flush, arXiv 2006.09503): the fewest live activations that keep every stage busy."""
    _at_least_one(num_stages=num_stages)
    check_size(num_stages, num_micro_batches)
    return grouped(num_stages, num_micro_batches, 1, range(num_stages - 1, -1, -1), "1f1b")


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards."""
    _at_least_one(num_stages=num_stages, num_micro_batches=num_micro_batches)
    check_size(num_stages, num_micro_batches)
    return grouped(num_stages, num_micro_batches, num_micro_batches, (0,) * num_stages, "gpipe")


def kfkb(num_stages: int, num_micro_batches: int, k: int) -> Schedule:
    """K-microbatch (arXiv 2303.01675): 1F1B over groups of ``k``, which hides transfers behind k−1 micro-batches.

    ``k = 1`` is 1F1B and ``k ≥ num_micro_batches`` is GPipe. Stage s keeps min(M, k·(S−s)) activations alive.
    """
    _at_least_one(num_stages=num_stages)
    check_size(num_stages, num_micro_batches)
    return grouped(num_stages, num_micro_batches, k, range(num_stages - 1, -1, -1), f"kfkb k={k}")


def group_sizes(num_micro_batches: int) -> tuple[int, ...]:
    """The k of :func:`kfkb` to compare: powers of two below the number of micro-batches."""
    return tuple(2**power for power in range(1, num_micro_batches.bit_length()) if 2**power < num_micro_batches)


def eager(num_stages: int, num_micro_batches: int, slack: float) -> Schedule:
    """Eager 1F1B: stage s warms up on ⌈(S−1−s)·(1+slack)⌉ micro-batches, then alternates. ``slack = 0`` is 1F1B.

    Raises:
        ValueError: slack is negative or not finite.
    """
    _at_least_one(num_stages=num_stages)
    check_size(num_stages, num_micro_batches)
    if not (isfinite(slack) and slack >= 0):
        raise ValueError(f"slack={slack} must be a number from 0 upwards: 0 is 1F1B, 1 doubles the warm-up.")
    # The small number undoes rounding: 25 · 2.2 is a little more than 55.
    warmup = [ceil(min(later * (1 + slack), num_micro_batches) - 1e-9) for later in range(num_stages - 1, -1, -1)]
    return grouped(num_stages, num_micro_batches, 1, warmup, f"eager slack={slack:g}")


def forward_only(num_ranks: int, num_micro_batches: int, route: Sequence[int] = ()) -> Schedule:
    """Evaluation: the forwards of all micro-batches, no backwards.

    Args:
        route: rank of each stage, where a rank has several; micro-batches then go round the chunks, one a rank at a
            time.
    """
    _at_least_one(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    num_chunks = len(route) // num_ranks if route else 1
    check_size(num_ranks * num_chunks, num_micro_batches)
    at_once = num_ranks if num_chunks > 1 else num_micro_batches
    order = tuple(
        forward(m, chunk)
        for first in range(0, num_micro_batches, at_once)
        for chunk in range(num_chunks)
        for m in range(first, min(first + at_once, num_micro_batches))
    )
    routes = (tuple(route),) if num_chunks > 1 else ()
    return Schedule((order,) * num_ranks, num_micro_batches, num_chunks, "forward only", routes)


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """Megatron's interleaved 1F1B (arXiv 2104.04473): several chunks a rank, a bubble smaller by that factor.

    Micro-batches go round the chunks ``num_ranks`` at a time. One chunk is plain 1F1B.

    Raises:
        ValueError: ``num_ranks`` does not divide ``num_micro_batches``.
    """
    _at_least_one(num_ranks=num_ranks, num_micro_batches=num_micro_batches, num_chunks=num_chunks)
    check_size(num_ranks * num_chunks, num_micro_batches)
    if num_micro_batches % num_ranks:
        raise ValueError(
            f"num_micro_batches={num_micro_batches} is no multiple of num_ranks={num_ranks}: interleaving goes round"
            " the chunks with one micro-batch a rank; change one of them, or take 1f1b."
        )
    if num_chunks == 1:
        return one_f_one_b(num_ranks, num_micro_batches)
    rounds = [range(first, first + num_ranks) for first in range(0, num_micro_batches, num_ranks)]
    chunks = range(num_chunks)
    forwards = tuple(forward(m, chunk) for batch in rounds for chunk in chunks for m in batch)
    backwards = tuple(backward(m, chunk) for batch in rounds for chunk in reversed(chunks) for m in batch)

    def order(rank: int) -> tuple[Action, ...]:
        ahead = min(2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks, len(forwards))
        steady = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
        return tuple(chain(forwards[:ahead], steady, backwards[len(forwards) - ahead :]))

    return Schedule(
        tuple(order(rank) for rank in range(num_ranks)),
        num_micro_batches,
        num_chunks,
        f"interleaved chunks={num_chunks}",
    )


def dualpipev(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The order of DeepSpeed's ``DualPipeVSchedule`` (0.19.8).

    The model is cut into twice as many stages as there are ranks. A micro-batch goes along the ranks through the first
    half of the stages and back through the second, so that rank r holds the stages r (chunk 0) and 2R−1−r (chunk 1),
    and the first rank loads and takes the loss. Weight gradients are part of the backward, as there. DeepSpeed's engine
    waits for its messages between computes; simulated and lowered like any other schedule this one does not, so it is
    the best that DeepSpeed's can come to.

    Raises:
        ValueError: there are fewer micro-batches than stages, with which the order does not begin.
    """
    _at_least_one(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    check_size(2 * num_ranks, num_micro_batches)
    if num_micro_batches < 2 * num_ranks:
        raise ValueError(
            f"num_micro_batches={num_micro_batches} is less than 2 · num_ranks={2 * num_ranks}: DualPipeV fills both"
            " halves of the model before it alternates; give more micro-batches, or take 1f1b."
        )
    f0, f1, b0, b1 = (forward, 0), (forward, 1), (backward, 0), (backward, 1)

    def order(rank: int) -> tuple[Action, ...]:
        later = num_ranks - 1 - rank
        steps = [
            *[f0] * (2 * later),
            *[f0, f1] * (rank + 1),
            *[b1, f1] * later,
            *[f0, b1, f1, b0] * (num_micro_batches - 2 * num_ranks + rank + 1),
            *[b1, f1, b0] * later,
            *[b1, b0] * (rank + 1),
            *[b0] * later,
        ]
        ran: Counter[tuple[Callable[[int, int], Action], int]] = Counter()
        actions = []
        for make, chunk in steps:
            actions.append(make(ran[make, chunk], chunk))
            ran[make, chunk] += 1
        return tuple(actions)

    route = chunked_route(DUALPIPEV, num_ranks, 2)
    return Schedule(tuple(order(rank) for rank in range(num_ranks)), num_micro_batches, 2, DUALPIPEV, (route,))


INTERLEAVED, DUALPIPEV, ZBV, VHALF, VMIN = "interleaved", "dualpipev", "zbv", "vhalf", "vmin"
IN_V = (DUALPIPEV, ZBV, VHALF, VMIN)
"""Types with two stages a rank, along the ranks and back."""
CHUNKED = (INTERLEAVED, *IN_V)
"""Types whose ranks hold several stages of the one direction."""


def chunked_route(type: str, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Rank of each stage of a type with several stages a rank: interleaved ones go round, all others in V.

    >>> chunked_route(INTERLEAVED, 2, 2), chunked_route(DUALPIPEV, 2, 2)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    return tuple(range(num_ranks)) * num_chunks if type == INTERLEAVED else v_route(num_ranks)


def v_route(num_ranks: int) -> tuple[int, ...]:
    """Rank of each stage where there are two a rank, along the ranks and back."""
    there = tuple(range(num_ranks))
    return (*there, *reversed(there))


# By the name that the configuration gives them.
FAMILIES: Mapping[str, Callable[..., Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe, "kfkb": kfkb, "eager": eager}
_PARAMETERS = {"1f1b": (), "gpipe": (), "kfkb": ("k", "warmup"), "eager": ("slack", "warmup")}


def make(
    type: str,
    num_stages: int,
    num_micro_batches: int,
    *,
    k: int | None = None,
    slack: float | None = None,
    warmup: Sequence[int] | None = None,
) -> Schedule:
    """The schedule that a configuration names.

    Args:
        type: a key of :data:`FAMILIES`.
        num_stages: S.
        num_micro_batches: M.
        k: for ``kfkb``, needed.
        slack: for ``eager``, needed unless ``warmup`` is given.
        warmup: for ``kfkb`` and ``eager``: groups a stage, instead of the family's own; see :func:`grouped`.

    Raises:
        ValueError: there is no such family, a parameter is missing or has no meaning for it, or the shape is none.
    """
    if type not in FAMILIES:
        from .asynchronous import STREAMS
        from .split_families import SPLIT_FAMILIES

        own = {
            "families": (INTERLEAVED, DUALPIPEV),
            "split_families": tuple(SPLIT_FAMILIES),
            "asynchronous": tuple(STREAMS),
        }
        for module, types in own.items():
            if type in types:
                raise ValueError(
                    f"schedule type {type!r} has a function of its own: call paceline.schedules.{module}.{type}."
                )
        raise ValueError(f"schedule type {type!r} is unknown: choose one of {', '.join(FAMILIES)}.")
    given = {name: value for name, value in (("k", k), ("slack", slack), ("warmup", warmup)) if value is not None}
    for name, value in given.items():
        if name not in _PARAMETERS[type]:
            raise ValueError(f"{name}={value!r} has no meaning for the schedule {type!r}: leave it out.")
    if type == "kfkb" and k is None:
        raise ValueError("the schedule 'kfkb' needs k: give the number of micro-batches in a group.")
    if type == "eager" and (slack is None) == (warmup is None):
        raise ValueError(
            f"the schedule 'eager' takes slack or warmup, got slack={slack!r} and warmup={warmup!r}: give one of them."
        )
    if warmup is None:
        return FAMILIES[type](num_stages, num_micro_batches, **given)
    label = f"kfkb k={k}" if type == "kfkb" else "eager"
    name = f"{label} warmup={','.join(map(str, warmup))}"
    return grouped(num_stages, num_micro_batches, 1 if k is None else k, warmup, name)


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be 1 or more.")
