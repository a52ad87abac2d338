"""Schedules to test with: every family over its parameters, and orders that no family has."""

from collections import Counter
from math import gcd, inf

from hypothesis import assume
from hypothesis import strategies as st

from paceline.schedules import Costs, Link, Schedule, families, from_text
from paceline.schedules.filling import composed, filled
from paceline.schedules.generator import generated
from paceline.schedules.schedule import backward, backward_input, backward_weight, forward
from paceline.schedules.split_families import SPLIT_FAMILIES

STAGES, MICRO_BATCHES = st.integers(1, 6), st.integers(1, 12)


@st.composite
def _grouped(draw):
    num_stages = draw(st.integers(1, 5))
    warmup = sorted(draw(st.lists(st.integers(0, 6), min_size=num_stages, max_size=num_stages)), reverse=True)
    return families.grouped(num_stages, draw(st.integers(1, 9)), draw(st.integers(1, 4)), warmup)


@st.composite
def _interleaved(draw):
    num_ranks = draw(st.integers(1, 4))
    return families.interleaved(num_ranks, num_ranks * draw(st.integers(1, 3)), draw(st.integers(1, 3)))


@st.composite
def _dualpipev(draw, make=families.dualpipev):
    num_ranks = draw(st.integers(1, 4))
    return make(num_ranks, 2 * num_ranks + draw(st.integers(0, 5)))


@st.composite
def split_costs(draw, num_stages):
    """Different everywhere, with memory: in eighths, so that ties are frequent."""
    some = st.integers(0, 16).map(lambda eighths: eighths / 8)

    def one_each(count):
        return tuple(draw(st.lists(some, min_size=count, max_size=count)))

    links = tuple(Link(draw(st.sampled_from((0.5, 1.0, inf))), draw(some)) for _ in range(2 * num_stages - 2))
    backward_s = one_each(num_stages)
    return Costs(
        forward_s=one_each(num_stages),
        backward_s=backward_s,
        message_bytes=one_each(num_stages - 1),
        down=links[::2],
        up=links[1::2],
        activation_bytes=tuple(1 + size for size in one_each(num_stages)),
        deferred_bytes=one_each(num_stages),
        weight_s=tuple(seconds * draw(st.sampled_from((0.0, 0.25, 0.5, 1.0))) for seconds in backward_s),
    )


ROUTES = st.sampled_from(("interleaved", "dualpipev")).flatmap(
    lambda type: st.builds(families.chunked_route, st.just(type), st.integers(1, 4), st.integers(1, 3))
)


@st.composite
def _composed(draw):
    route = draw(ROUTES)
    costs = draw(split_costs(len(route)))
    num_ranks = max(route) + 1
    # Each of a rank's chunks needs room once.
    least = max(
        sum(max(costs.activation_bytes[s], costs.deferred_bytes[s]) for s, held in enumerate(route) if held == rank)
        for rank in range(num_ranks)
    )
    room = (least * draw(st.sampled_from((1, 1.5, 3, 20))),) * num_ranks
    found = composed(route, draw(st.integers(1, 9)), costs, room, draw(st.sampled_from((0.0, 0.5, 2.0))))
    assume(found is not None)  # with so little room ranks may come to wait for each other
    return found


@st.composite
def _filled(draw):
    schedule = draw(
        st.one_of(_interleaved(), _dualpipev(), st.builds(families.kfkb, STAGES, MICRO_BATCHES, st.just(2)))
    )
    room = (draw(st.sampled_from((0, 4, 9, inf))),) * schedule.num_ranks
    return filled(schedule, draw(split_costs(schedule.num_stages)), room, draw(st.sampled_from((0.0, 0.5, 2.0))))


@st.composite
def _generated(draw):
    route = draw(ROUTES)
    return generated({route: draw(split_costs(len(route)))}, draw(st.integers(1, 9)))


# Two directions on four ranks, in an order like 1F1B's; both directions meet on every rank.
TWO_DIRECTIONS = """\
schedule ranks=4 micro_batches=4 chunks=2 routes=0,1,2,3/3,2,1,0 name="by hand"
rank 0: F0 F2 F1.1 B1.1 F3.1 B3.1 B0 B2
rank 1: F0 F1.1 F2 F3.1 B1.1 B0 B3.1 B2
rank 2: F1.1 F0 F3.1 F2 B0 B1.1 B2 B3.1
rank 3: F1.1 F3.1 F0 B0 F2 B2 B1.1 B3.1
"""

# By family. A family that is added is added here, and thereby goes through every check.
FAMILY_CASES = {
    "grouped": _grouped(),
    "1f1b": st.builds(families.one_f_one_b, STAGES, MICRO_BATCHES),
    "gpipe": st.builds(families.gpipe, STAGES, MICRO_BATCHES),
    "kfkb": st.builds(families.kfkb, STAGES, MICRO_BATCHES, st.integers(1, 14)),
    "eager": st.builds(families.eager, STAGES, MICRO_BATCHES, st.floats(0, 4)),
    "forward_only": st.builds(families.forward_only, STAGES, MICRO_BATCHES),
    "interleaved": _interleaved(),
    "dualpipev": _dualpipev(),
    "two directions": st.just(from_text(TWO_DIRECTIONS)),
    **{
        name: st.builds(make, STAGES, MICRO_BATCHES)
        for name, make in SPLIT_FAMILIES.items()
        if name != "dualpipev_split"
    },
    "dualpipev_split": _dualpipev(SPLIT_FAMILIES["dualpipev_split"]),
    "filled": _filled(),
    "composed": _composed(),
    "generated": _generated(),
}


@st.composite
def executed(draw, backwards=True):
    """The orders of a random execution: whatever could run next did. Backwards and forwards come in any order, and some
    backwards are split.
    """
    num_ranks, num_chunks, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    places = [[(stage % num_ranks, stage // num_ranks) for stage in range(num_ranks * num_chunks)]]
    orders = _execution(draw, num_ranks, num_micro_batches, places, backwards)
    return Schedule(orders, num_micro_batches, num_chunks)


@st.composite
def routed(draw, backwards=True):
    """As :func:`executed`, with one to three routes that name the ranks in any order."""
    num_ranks, num_directions = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    # So many chunks that the cells can be shared out over the directions.
    num_chunks = draw(st.integers(1, 2)) * num_directions // gcd(num_ranks, num_directions)
    num_micro_batches, num_stages = draw(st.integers(1, 6)), num_ranks * num_chunks // num_directions
    ranks = draw(st.permutations([*range(num_ranks)] * num_chunks))
    routes = tuple(tuple(ranks[first : first + num_stages]) for first in range(0, len(ranks), num_stages))
    orders = _execution(draw, num_ranks, num_micro_batches, places_of(routes), backwards)
    return Schedule(orders, num_micro_batches, num_chunks, routes=routes)


def places_of(routes):
    """By direction and stage: the rank, and its how many-th cell it is."""
    seen = Counter()
    places = []
    for route in routes:
        places.append([])
        for rank in route:
            places[-1].append((rank, seen[rank]))
            seen[rank] += 1
    return places


_BACKWARDS = st.sampled_from((backward, backward_input))


def _execution(draw, num_ranks, num_micro_batches, places, backwards):
    last = len(places[0]) - 1
    orders = [[] for _ in range(num_ranks)]
    ready = [(forward, m, 0) for m in range(num_micro_batches)]
    while ready:
        make, micro_batch, stage = ready.pop(draw(st.integers(0, len(ready) - 1)))
        rank, chunk = places[micro_batch % len(places)][stage]
        orders[rank].append(make(micro_batch, chunk))
        if make is forward and stage < last:
            ready.append((forward, micro_batch, stage + 1))
        elif make is forward and backwards:
            ready.append((draw(_BACKWARDS), micro_batch, stage))
        elif make in (backward, backward_input) and stage:
            ready.append((draw(_BACKWARDS), micro_batch, stage - 1))
        if make is backward_input:
            ready.append((backward_weight, micro_batch, stage))
    return tuple(map(tuple, orders))


@st.composite
def shuffled(draw):
    """All actions of each rank in an order that may not be executable, or run a backward before its forward, or that
    of the weights before that of the inputs.
    """
    num_ranks, num_chunks, num_micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    pairs = [(m, c) for m in range(num_micro_batches) for c in range(num_chunks)]
    orders = []
    for _ in range(num_ranks):
        ways = [(forward, *draw(st.sampled_from(((backward,), (backward_input, backward_weight))))) for _ in pairs]
        actions = [make(*pair) for pair, makes in zip(pairs, ways, strict=True) for make in makes]
        order = draw(st.permutations(actions))
        if draw(st.integers(0, 9)):  # mostly: each pair's forward first
            place = {action: position for position, action in enumerate(order)}
            for pair, makes in zip(pairs, ways, strict=True):
                for make, position in zip(makes, sorted(place[make(*pair)] for make in makes), strict=True):
                    order[position] = make(*pair)
        orders.append(tuple(order))
    return Schedule(tuple(orders), num_micro_batches, num_chunks)


def has_backwards(schedule):
    return any(action.kind != "F" for order in schedule.orders for action in order)
