"""Rates of links from the messages that a run sends anyway."""

from __future__ import annotations

from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.measure.links import Links, Message, rate, variation


def message(num_bytes: int, begun_s: float, done_s: float, source: int = 0, target: int = 1) -> Message:
    return Message(source, target, num_bytes, begun_s, done_s)


def test_time_between_messages_does_not_count() -> None:
    assert rate([message(100, 0.0, 1.0), message(300, 10.0, 12.0)]) == pytest.approx(400 / 3)


@pytest.mark.parametrize(
    "spans",
    [
        [(0.0, 2.0), (0.0, 2.0)],  # shared fairly
        [(0.0, 1.0), (0.0, 2.0)],  # one after the other, begun together
        [(0.0, 2.0), (0.5, 1.0)],  # one within the other
        [(1.0, 2.0), (0.0, 1.5)],  # not in the order of their beginnings
    ],
)
def test_messages_that_share_a_sender_add_up_however_they_took_turns(spans: list[tuple[float, float]]) -> None:
    assert rate([message(100, *span) for span in spans]) == pytest.approx(200 / 2.0)


def test_latency_is_no_transfer() -> None:
    assert rate([message(100, 0.0, 1.5), message(100, 3.0, 4.5)], latency_s=0.5) == pytest.approx(100.0)
    # Two in a row: the second is on the way while the first one's latency runs.
    assert rate([message(100, 0.0, 1.5), message(100, 0.0, 2.5)], latency_s=0.5) == pytest.approx(100.0)


@pytest.mark.parametrize("messages", [[], [message(100, 1.0, 1.0)], [message(100, 1.0, 0.9)], [message(0, 0.0, 1.0)]])
def test_what_shows_no_time_or_no_bytes_is_infinitely_fast(messages: list[Message]) -> None:
    assert rate(messages) == inf
    links = Links([0, 1])
    links.update(messages)
    assert all(isfinite(seconds) for seconds in links.egress.values())


def test_what_leaves_a_host_counts_together_and_what_stays_by_edge() -> None:
    links = Links([0, 0, 2, 2])  # stages 0 and 1 on one host, 2 and 3 on another
    links.update(
        [
            message(100, 0.0, 1.0, 0, 1),
            message(100, 0.0, 4.0, 1, 0),
            message(100, 0.0, 1.0, 1, 2),
            message(300, 0.0, 2.0, 2, 1),
            message(500, 0.0, 5.0, 2, 3),
        ]
    )
    assert links.edges == pytest.approx({(0, 1): 1 / 100, (1, 0): 1 / 25, (2, 3): 1 / 100})
    assert links.egress == pytest.approx({0: 1 / 100, 2: 1 / 150})


def test_each_edge_has_its_latency_and_a_host_the_least_of_its_own() -> None:
    links = Links([0, 0, 1])
    links.update(
        [message(100, 0.0, 1.5, 0, 1), message(100, 0.0, 1.25, 1, 2)], {(0, 1): 0.5, (1, 2): 0.25, (2, 1): 9.0}
    )
    assert links.edges[0, 1] == pytest.approx(1 / 100)
    assert links.egress[0] == pytest.approx(1 / 100)


def test_the_newest_look_weighs_most_and_a_look_without_messages_changes_nothing() -> None:
    links = Links([0, 0], weight=0.75)
    for seconds in (1.0, 3.0):
        links.update([message(1, 0.0, seconds)])
    assert links.edges[0, 1] == pytest.approx(0.75 * 3.0 + 0.25 * 1.0)
    before = dict(links.edges)
    links.update([])
    assert links.edges == before


MOMENTS = st.floats(-1e6, 1e6)


@given(
    st.lists(
        st.builds(Message, st.integers(0, 1), st.integers(2, 3), st.integers(0, 10**12), MOMENTS, MOMENTS, st.none()),
        max_size=8,
    ),
    st.floats(0, 10),
)
def test_no_message_makes_a_rate_that_is_none(messages: list[Message], latency_s: float) -> None:
    assert rate(messages, latency_s) > 0
    links = Links([0, 0, 2, 2])
    links.update(messages, {(0, 2): latency_s})
    assert all(0 <= seconds < inf for seconds in links.egress.values())


def taken(edge: tuple[int, int], *seconds: float, queued: bool = False) -> list[Message]:
    """Messages of 100 bytes, one after another, that are sent when the one before has arrived, or all at once."""
    found, now = [], 0.0
    for each in seconds:
        found.append(Message(*edge, 100, 0.0 if queued else now, now + each))
        now += each
    return found


@pytest.mark.parametrize("queued", [False, True])
def test_multiples_are_those_of_successive_messages(queued: bool) -> None:
    seconds = [1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 4.0, 4.0, 2.0]
    found = variation(taken((0, 1), *seconds, queued=queued), {})
    assert found == {(0, 1): pytest.approx([each / 2.0 for each in seconds])}


@pytest.mark.parametrize("queued", [False, True])
def test_two_links_that_share_a_steady_sender_do_not_vary(queued: bool) -> None:
    """Each takes twice as long while the other one sends as well."""
    both = taken((1, 0), *[2.0] * 10, queued=queued) + taken((1, 2), *[2.0] * 10, queued=queued)
    alone = [Message(1, 2, 100, 20.0 + number, 21.0 + number) for number in range(10)]
    assert variation([*both, *alone], {}) == {}


def test_two_lanes_between_the_same_stages_share_what_there_is() -> None:
    """As with two stages a rank; also where a batch ends as one."""
    lanes = [[message._replace(lane=lane) for message in taken((0, 1), *[2.0] * 10)] for lane in "ab"]
    alone = [Message(0, 1, 100, 20.0 + number, 21.0 + number, "a") for number in range(10)]
    assert variation([*lanes[0], *lanes[1], *alone], {}) == {}


def test_messages_that_took_no_measurable_time_are_fast() -> None:
    (multiples,) = variation(taken((0, 1), *[1.5, 1.5, 1.5, 1.0] * 8), {(0, 1): 1.0}).values()
    assert max(multiples) > 1 > min(multiples)


def test_a_few_messages_tell_nothing_and_pauses_count_for_little() -> None:
    assert variation(taken((0, 1), 1.0, 5.0, 1.0), {}) == {}
    (multiples,) = variation(taken((0, 1), *[1.0] * 99, 1e6), {}).values()
    assert max(multiples) == pytest.approx(50 / (149 / 100), abs=1e-3)


def test_the_newest_look_counts_until_it_is_forgotten() -> None:
    links = Links([0, 1])
    links.update(taken((0, 1), *[1.0, 4.0] * 8))
    assert set(links.variation) == {(0, 1)}
    links.update(taken((0, 1), *[1.0] * 16))
    assert links.variation == {}
    links.update(taken((0, 1), *[1.0, 4.0] * 8))
    before = links.egress[0]
    links.forget()
    assert links.egress == {0: before}, "until there is something newer"
    links.update(taken((0, 1), *[1.0] * 16))
    assert links.egress == {0: 1 / 100}
    links.update(taken((0, 1), *[2.0] * 16))
    assert links.egress[0] == pytest.approx((0.7 * 2 + 0.3) / 100)
