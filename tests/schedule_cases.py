"""Schedules to test with: every family over its parameters, and orders that no family has."""

from hypothesis import strategies as st

from paceline.schedules import Schedule, families
from paceline.schedules.schedule import backward, forward


@st.composite
def _grouped(draw):
    num_stages = draw(st.integers(1, 5))
    warmup = sorted(draw(st.lists(st.integers(0, 6), min_size=num_stages, max_size=num_stages)), reverse=True)
    return families.grouped(num_stages, draw(st.integers(1, 9)), draw(st.integers(1, 4)), warmup)


@st.composite
def _interleaved(draw):
    num_ranks = draw(st.integers(1, 4))
    return families.interleaved(num_ranks, num_ranks * draw(st.integers(1, 3)), draw(st.integers(1, 3)))


STAGES, MICRO_BATCHES = st.integers(1, 6), st.integers(1, 12)
# By family. A family that is added is added here, and thereby goes through every check.
FAMILY_CASES = {
    "grouped": _grouped(),
    "1f1b": st.builds(families.one_f_one_b, STAGES, MICRO_BATCHES),
    "gpipe": st.builds(families.gpipe, STAGES, MICRO_BATCHES),
    "kfkb": st.builds(families.kfkb, STAGES, MICRO_BATCHES, st.integers(1, 14)),
    "eager": st.builds(families.eager, STAGES, MICRO_BATCHES, st.floats(0, 4)),
    "forward_only": st.builds(families.forward_only, STAGES, MICRO_BATCHES),
    "interleaved": _interleaved(),
}


@st.composite
def executed(draw, backwards=True):
    """The orders of a random execution: whatever could run next did. Backwards and forwards come in any order."""
    num_ranks, num_chunks, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    num_stages = num_ranks * num_chunks
    orders = [[] for _ in range(num_ranks)]
    ready = [(0, forward(m), 0) for m in range(num_micro_batches)]
    while ready:
        rank, action, stage = ready.pop(draw(st.integers(0, len(ready) - 1)))
        orders[rank].append(action)
        if action.kind == "B":
            stage, make = stage - 1, backward
        elif stage == num_stages - 1:
            make = backward if backwards else None
        else:
            stage, make = stage + 1, forward
        if make and stage >= 0:
            ready.append((stage % num_ranks, make(action.micro_batch, stage // num_ranks), stage))
    return Schedule(tuple(map(tuple, orders)), num_micro_batches, num_chunks)


@st.composite
def shuffled(draw):
    """All actions of each rank in an order that may not be executable, or run a backward before its forward."""
    num_ranks, num_chunks, num_micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    pairs = [(m, c) for m in range(num_micro_batches) for c in range(num_chunks)]
    actions = [make(*pair) for pair in pairs for make in (forward, backward)]
    orders = []
    for _ in range(num_ranks):
        order = draw(st.permutations(actions))
        if draw(st.integers(0, 9)):  # mostly: each pair's forward first
            place = {action: position for position, action in enumerate(order)}
            for pair in pairs:
                first, second = sorted((place[forward(*pair)], place[backward(*pair)]))
                order[first], order[second] = forward(*pair), backward(*pair)
        orders.append(tuple(order))
    return Schedule(tuple(orders), num_micro_batches, num_chunks)


def has_backwards(schedule):
    return any(action.kind == "B" for order in schedule.orders for action in order)
