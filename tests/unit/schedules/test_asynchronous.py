"""Schedules without a flush, against the published tables and the laws that they declare."""

from __future__ import annotations

import re
from math import ceil, inf

import pytest

from paceline.schedules import asynchronous, directions
from paceline.schedules.asynchronous import multidirection, one_direction
from paceline.schedules.verify import verify

SHAPES = [(2, 2), (2, 6), (4, 4), (4, 8), (4, 12), (8, 8), (8, 16), (12, 12), (16, 32), (20, 20), (24, 24), (28, 28),
          (32, 32), (32, 64)]  # fmt: skip
THERE_AND_BACK = [(2, 2), (2, 6), (6, 6), (6, 12), (8, 8), (8, 16), (10, 10), (12, 12), (14, 14), (32, 64)]
ONE_DIRECTION = [(1, 1), (1, 3), (2, 1), (2, 3), (4, 1), (4, 2), (4, 3), (4, 4), (4, 8), (7, 3), (8, 8), (16, 5)]
STREAMS = [
    *(multidirection(*shape) for shape in SHAPES),
    *(multidirection(*shape, num_directions=2) for shape in THERE_AND_BACK),
    *(one_direction(*shape) for shape in ONE_DIRECTION),
]
SMALL = [stream for stream in STREAMS if stream.num_ranks <= 12]


def label(stream):
    return f"{stream.name}-{stream.num_ranks}-{stream.num_micro_batches}"


def is_there_and_back(stream):
    """Two directions in the order of its own: with four devices two are half as many."""
    return len(stream.routes) == 2 and stream.num_ranks != 4


each = pytest.mark.parametrize("stream", STREAMS, ids=label)

# The order of the forwards and of the backwards of a round, one row a device: published for 4 devices, and for 8 from
# the slots of every stage by hand (device 0 holds the stages 0, 3, 4, 7: F in the slots 0 1, 3 5, 4 6, 7 9).
FORWARDS = {
    4: ["0213", "0123", "1032", "1302"],
    8: ["04125637", "01452367", "10543276", "15034726", "26307415", "23670145", "32761054", "37216504"],
}
BACKWARDS = {
    4: ["1302", "1032", "0123", "0213"],
    8: ["37216504", "32761054", "23670145", "26307415", "15034726", "10543276", "01452367", "04125637"],
}


@pytest.mark.parametrize("num_devices", [4, 8])
@pytest.mark.parametrize(("kind", "tables"), [("F", FORWARDS), ("B", BACKWARDS)])
def test_order_tables(num_devices, kind, tables):
    stream = multidirection(num_devices, num_devices)
    for rank, expected in enumerate(tables[num_devices]):
        of_step = [a.micro_batch for step, a in stream.actions(rank, 3) if a.kind == kind and step == 1]
        assert "".join(map(str, of_step)) == expected


def test_a_whole_window():
    """Device 0 of 4: the stages 0 and 3. A quote is a step of lag, ``.1`` the chunk of the second direction."""
    window = " ".join(map(str, multidirection(4, 4).windows[0]))
    assert window == "F0 F2 B2' F1.1 U' B1.1 F3.1 B3.1 B0"
    window = " ".join(map(str, one_direction(4, 2).windows[0]))
    assert window == "F0 B1'' U'' F1 B0'"


def test_a_window_there_and_back():
    """Device 0 of 6: the stages 0 and 5, by hand. F in the slots 0 2 4 and 5 7 9, B in 11 13 15 and 6 8 10 (mod 12)."""
    window = " ".join(map(str, multidirection(6, 6).windows[0]))
    assert window == "F0 B2' F2 B4' F4 F1.1 U' B1.1 F3.1 B3.1 F5.1 B5.1 B0"
    assert multidirection(6, 6) == multidirection(6, 6, 2)
    assert multidirection(8, 8) == multidirection(8, 8, 4) != multidirection(8, 8, 2)


@each
def test_every_action_once_in_a_window(stream):
    chunks = range(stream.num_chunks)
    num_directions = len(stream.routes)
    of_chunk = [[m for m in range(stream.num_micro_batches) if m % num_directions == chunk] for chunk in chunks]
    for window in stream.windows:
        expected = [(kind, m, chunk) for chunk in chunks for m in of_chunk[chunk] for kind in "FB"]
        assert sorted(action[:3] for action in window) == sorted([*expected, ("U", -1, -1)])
        assert all(action.lag == 0 for action in window if action.kind == "F")


@each
def test_an_update_comes_after_all_backwards_of_its_step(stream):
    num_steps = stream.most_lag + 3
    for rank in range(stream.num_ranks):
        updated = 0
        for step, action in stream.actions(rank, num_steps):
            if action.kind == "U":
                assert step == updated  # one a step, in order
                updated += 1
            elif action.kind == "B":
                assert step >= updated
        assert updated == num_steps


@pytest.mark.parametrize("stream", [s for s in STREAMS if s.name != "one_direction"], ids=label)
def test_updates_before_any_gradient_of_the_next_step(stream):
    for rank in range(stream.num_ranks):
        updated = 0
        for step, action in stream.actions(rank, 4):
            updated += action.kind == "U"
            assert action.kind != "B" or step == updated


def ends(stream, num_steps, forward_s=1.0, backward_s=2.0, update_waits=False):
    """When every action of a run ends, by a replay of its own. ``update_waits``: for all of its step on all ranks."""
    num_directions, num_stages = len(stream.routes), len(stream.routes[0])
    rows = [list(stream.actions(rank, num_steps)) for rank in range(stream.num_ranks)]
    cells = [
        sorted((direction, route.index(rank)) for direction, route in enumerate(stream.routes))
        for rank in range(stream.num_ranks)
    ]
    left = [stream.num_micro_batches * num_stages] * num_steps
    done, closed, clock, position = {}, [0.0] * num_steps, [0.0] * len(rows), [0] * len(rows)

    def arrival(rank, step, action):
        if action.kind == "U":
            return (inf if left[step] else closed[step]) if update_waits else 0.0
        direction, stage = cells[rank][action.chunk]
        assert direction == action.micro_batch % num_directions
        if action.kind == "F":
            return done.get(("F", step, action.micro_batch, stage - 1), inf) if stage else 0.0
        if stage == num_stages - 1:
            return done.get(("F", step, action.micro_batch, stage), inf)
        return done.get(("B", step, action.micro_batch, stage + 1), inf)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                step, action = row[position[rank]]
                ready = arrival(rank, step, action)
                if ready == inf:
                    break
                clock[rank] = max(clock[rank], ready) + {"F": forward_s, "B": backward_s, "U": 0.0}[action.kind]
                if action.kind != "U":
                    done[action.kind, step, action.micro_batch, cells[rank][action.chunk][1]] = clock[rank]
                if action.kind == "B":
                    left[step] -= 1
                    closed[step] = max(closed[step], clock[rank])
                position[rank] += 1
                moved = True
    assert position == [len(row) for row in rows], "ranks wait for each other"
    return done


@pytest.mark.parametrize("stream", SMALL, ids=label)
@pytest.mark.parametrize("backward_s", [1.0, 2.0, 3.0])
def test_updates_wait_for_nothing(stream, backward_s):
    """Where an update needs all ranks' gradients of its step (their norm), they are there when it is due."""
    num_steps = stream.most_lag + 4
    free, waits = (ends(stream, num_steps, 1.0, backward_s, update_waits=update_waits) for update_waits in (0, 1))
    if (stream.name, stream.num_ranks) == ("multidirection", 2):  # one direction there and back
        # Two devices have no slot between the last backward of a step and the first one of the next: device 1 stands
        # still for the last backward of device 0.
        assert max(waits.values()) == max(free.values()) + (num_steps - 1) * backward_s
    else:
        assert waits == free


@each
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_run_can_be_executed(stream, num_steps):
    """Complete, and with messages that block, too; and the peak of live activations is what the family declares."""
    schedule = stream.unrolled(num_steps)
    proof = verify(schedule, paired=stream.num_ranks <= 12)
    assert schedule.num_micro_batches == num_steps * stream.num_micro_batches
    assert proof.backward_in_order  # gradients of a stage are summed in one order
    devices = stream.num_ranks
    if stream.name == "one_direction":
        most = num_steps * stream.num_micro_batches
        assert proof.peak_activations == tuple(min(most, devices - stage) for stage in range(devices))
    elif is_there_and_back(stream):
        own = tuple(devices // 2 + 1 + min(device, devices - 1 - device) for device in range(devices))
        assert proof.peak_activations == own
    elif devices == 2:
        assert proof.peak_activations == ((2 if stream.num_micro_batches * num_steps == 2 else 3), 1)
    else:
        outer, inner = directions.mirror_groups(stream.routes)
        peaks = {rank: devices - 1 if rank in outer else devices for rank in (*outer, *inner)}
        assert dict(enumerate(proof.peak_activations)) == peaks


@pytest.mark.parametrize("num_devices", [4, 8])
def test_a_flush_has_the_same_peaks(num_devices):
    stream = multidirection(num_devices, 2 * num_devices)
    assert verify(stream.unrolled(1)).peak_activations == verify(stream.unrolled(3)).peak_activations


@pytest.mark.parametrize("stream", [s for s in STREAMS if s.name != "one_direction"], ids=label)
def test_multidirection_is_one_update_behind_at_most(stream):
    """Of a step, its first round only: each backward there runs one update after its forward.

    The exceptions have a forward that comes after the update. With half as many directions as devices that is the later
    micro-batch of a round in the last stage.
    """
    devices, directions_ = stream.num_ranks, len(stream.routes)
    for rank, mismatches in enumerate(stream.mismatches(4)):
        stages = directions.stages_of(rank, stream.routes)
        for (step, micro_batch, chunk), mismatch in mismatches.items():
            number, stage = micro_batch % devices // directions_, stages[chunk]
            is_late = number == 1 and stage == devices - 1
            if is_there_and_back(stream):  # the update is just before the first backward of the device
                is_late = stage + 2 * number > min(2 * devices - 1 - stage, devices + stage)
            assert mismatch == (step > 0 and micro_batch < devices and not is_late)


@pytest.mark.parametrize("stream", [s for s in STREAMS if s.name != "one_direction"], ids=label)
def test_multidirection_sums_every_gradient_at_the_same_weights(stream):
    """All backwards of a step use the weights after the update of the step before, in all stages."""
    for row in stream.versions(4):
        for action in row:
            assert action.version == action.step or action.kind == "F"
            assert action.version >= action.step - 1


@pytest.mark.parametrize("stream", [s for s in STREAMS if s.name == "one_direction"], ids=label)
def test_one_direction_is_a_bounded_number_of_updates_behind(stream):
    stages, micro_batches = stream.num_ranks, stream.num_micro_batches
    num_steps = stream.most_lag + stages + 2
    for stage, mismatches in enumerate(stream.mismatches(num_steps)):
        most = max(mismatches.values())
        assert most == ceil((stages - 1 - stage) / micro_batches)
        assert most <= ceil((stages - 1) / micro_batches)


@pytest.mark.parametrize("stream", [s for s in STREAMS if s.name == "one_direction"], ids=label)
def test_one_direction_goes_forward_through_one_version(stream):
    rows = stream.versions(stream.most_lag + stream.num_ranks + 2)
    versions = [{v[1:3]: v.version for v in row if v.kind == "F"} for row in rows]
    assert all(of_stage == versions[0] for of_stage in versions)
    drift = -(-(stream.num_ranks - 1) // stream.num_micro_batches)
    assert all(step - version <= drift for (step, _), version in versions[0].items())


@pytest.mark.parametrize(
    ("num_micro_batches", "message"),
    [
        (10, "10 micro-batches a step do not fill rounds of 4, one a device: take 8 or 12."),
        (3, "3 micro-batches a step do not fill rounds of 4, one a device: take 4."),
        (0, "0 micro-batches a step do not fill rounds of 4, one a device: take 4."),
        (-4, "-4 micro-batches a step do not fill rounds of 4, one a device: take 4."),
    ],
)
def test_micro_batches_fill_rounds(num_micro_batches, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        multidirection(4, num_micro_batches)


@pytest.mark.parametrize("num_devices", [6, 10, 14])
def test_the_order_of_half_as_many_collides_where_it_is_refused(num_devices):
    """The reason that the refusal gives: two actions want one slot of a device."""
    routes = tuple(directions.route(direction, num_devices) for direction in range(num_devices // 2))

    def slots(device):
        for route in routes:
            stage = route.index(device)
            own = (stage, 2 * num_devices - 1 - stage, stage + 2, 2 * num_devices + 1 - stage)
            yield from (slot % (2 * num_devices) for slot in (own if stage else (0, -1, 1, 2)))

    assert any(len(set(slots(device))) < 2 * len(routes) * 2 for device in range(num_devices))
    with pytest.raises(ValueError, match=f"have no order of {num_devices // 2} directions .*: take 2\\.$"):
        multidirection(num_devices, num_devices, num_devices // 2)


@pytest.mark.parametrize(("shape", "name"), [((0, 4), "num_stages=0"), ((4, 0), "num_micro_batches=0")])
def test_one_direction_needs_a_stage_and_a_micro_batch(shape, name):
    with pytest.raises(ValueError, match=f"^{name} must be 1 or more"):
        one_direction(*shape)


def test_make():
    assert asynchronous.make("multidirection", 4, 8) == multidirection(4, 8)
    assert asynchronous.make("multidirection", 8, 8, 2) == multidirection(8, 8, 2)
    assert asynchronous.make("one_direction", 4, 3) == one_direction(4, 3)
    with pytest.raises(ValueError, match=r"'1f1b' is unknown: choose one of multidirection, one_direction\.$"):
        asynchronous.make("1f1b", 4, 4)
