"""A host's sending side that messages share: by hand, by conservation, and against integration in small time steps."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedules.costs import Costs, Link
from paceline.schedules.egress import Egress
from paceline.schedules.families import forward_only, kfkb, one_f_one_b
from paceline.schedules.simulate import simulate


def carried(egress, sends):
    """When each message has left: (time, link, message, bytes) in order of time -> {message: time}."""
    left = {}
    for now, link, message, num_bytes in [*sends, (inf, 0, 0, 0.0)]:
        while egress.done_s <= now and egress.done_s < inf:
            at = egress.done_s
            left[egress.pop()[1]] = at
        if now < inf:
            egress.send(now, link, message, num_bytes)
    return left


def test_alone():
    assert carried(Egress(2.0, {0: inf}), [(1.0, 0, 7, 6.0)]) == {7: 4.0}


def test_two_share_equally():
    # Both at 1 a second from 0; the short one is through at 2, then the other has all: 4 left at 2 a second.
    assert carried(Egress(2.0, {0: inf, 1: inf}), [(0.0, 0, 10, 2.0), (0.0, 1, 11, 6.0)]) == {10: 2.0, 11: 4.0}


def test_a_late_one_slows_the_first():
    # 4 bytes through in the first 2 seconds; then 4 left at 1 a second, beside 2 at 1 a second until 4.
    assert carried(Egress(2.0, {0: inf, 1: inf}), [(0.0, 0, 10, 8.0), (2.0, 1, 11, 2.0)]) == {11: 4.0, 10: 5.0}


def test_one_after_another_on_a_link():
    # The second on link 0 waits for the first, whoever else sends: only two ever share.
    sends = [(0.0, 0, 10, 2.0), (0.0, 0, 11, 2.0), (0.0, 1, 12, 4.0)]
    assert carried(Egress(2.0, {0: inf, 1: inf}), sends) == {10: 2.0, 11: 4.0, 12: 4.0}


def test_what_a_slow_link_leaves_goes_to_the_others():
    sends = [(0.0, 0, 10, 1.0), (0.0, 1, 11, 5.0), (0.0, 2, 12, 5.0)]
    # 11 a second: the slow link takes 1, the others 5 each.
    assert carried(Egress(11.0, {0: 1.0, 1: inf, 2: 6.0}), sends) == {10: 1.0, 11: 1.0, 12: 1.0}


def test_a_message_of_no_bytes():
    assert carried(Egress(2.0, {0: inf, 1: inf}), [(0.0, 0, 10, 4.0), (1.0, 1, 11, 0.0)]) == {11: 1.0, 10: 2.0}


def random_sends(random, num_links):
    times = sorted(random.uniform(0.0, 10.0) for _ in range(random.randint(1, 12)))
    return [(now, random.randrange(num_links), message, random.uniform(0.0, 4.0)) for message, now in enumerate(times)]


@given(seed=st.integers(0, 10**9), num_links=st.integers(1, 4))
def test_no_byte_is_lost_and_no_time_wasted(seed, num_links):
    """While anything waits the host sends at its full rate, so bytes are rate times busy time."""
    sends = random_sends(Random(seed), num_links)
    left = carried(Egress(1.5, dict.fromkeys(range(num_links), inf)), sends)
    assert sorted(left) == list(range(len(sends)))
    backlog, now = 0.0, 0.0  # of one queue with the same rate: which message goes first changes no total
    end = 0.0
    for at, _, _, num_bytes in sends:
        backlog = max(0.0, backlog - 1.5 * (at - now)) + num_bytes
        now, end = at, at + backlog / 1.5
    assert max(left.values()) == pytest.approx(end)
    for _, link, message, _ in sends:
        later = [other for _, other_link, other, _ in sends if other_link == link and other > message]
        assert all(left[message] <= left[other] for other in later)


def integrated(bytes_per_s, links, sends, step=4e-3):
    """The same as carried, in small steps of time."""
    left, now = {}, 0.0
    lines = {link: [] for link in links}
    waiting = sorted(sends)
    while waiting or any(lines.values()):
        while waiting and waiting[0][0] <= now:
            _, link, message, num_bytes = waiting.pop(0)
            lines[link].append([message, num_bytes])
        heads = [link for link in links if lines[link]]
        rates = dict.fromkeys(heads, 0.0)
        for _ in links:  # raise all that are not at their limit; each round one gets there, or nothing is left
            spare = bytes_per_s - sum(rates.values())
            rising = [link for link in heads if rates[link] < links[link]]
            for link in rising:
                rates[link] = min(links[link], rates[link] + spare / len(rising))
        now += step
        for link in heads:
            lines[link][0][1] -= rates[link] * step
            if lines[link][0][1] <= 0.0:
                left[lines[link].pop(0)[0]] = now
    return left


@settings(max_examples=10)
@given(seed=st.integers(0, 10**9))
def test_integration_in_small_steps(seed):
    random = Random(seed)
    links = {link: random.choice((0.4, 1.0, inf)) for link in range(3)}
    sends = random_sends(random, 3)
    assert carried(Egress(1.5, links), sends) == pytest.approx(integrated(1.5, links, sends), abs=0.06)


@settings(max_examples=6)
@given(seed=st.integers(0, 10**9))
def test_simulation_with_hosts_against_integration(seed):
    """Given when each message could leave, its arrival is what integration says, whatever shares its host."""
    random = Random(seed)
    stages, rate = 4, 1.5

    def some():
        return tuple(random.uniform(0.1, 2.0) for _ in range(stages))

    def links():
        return tuple(Link(random.choice((0.5, 1.0, inf)), random.choice((0.0, 0.75))) for _ in range(stages - 1))

    costs = Costs(
        some(), some(), some()[1:], links(), links(), random.choice(((0, 1, 0, 1), (0, 1, 2, 0))), (rate,) * 3
    )
    step = simulate(kfkb(stages, 3, random.randint(1, 3)), costs, timeline=True)
    for host in set(costs.hosts):
        sent = [t for t in step.timeline.transfers if costs.hosts[t.source] == host]
        link_of = {
            **{("activation", boundary): link for boundary, link in enumerate(costs.down)},
            **{("gradient", boundary + 1): link for boundary, link in enumerate(costs.up)},
        }
        sends = [(t.start_s, (t.kind, t.source), number, t.num_bytes) for number, t in enumerate(sent)]
        rates = {(t.kind, t.source): link_of[t.kind, t.source].bytes_per_s for t in sent}
        left = integrated(rate, rates, sends)
        for number, t in enumerate(sent):
            assert t.end_s == pytest.approx(left[number] + link_of[t.kind, t.source].latency_s, abs=0.06)


def shared(num_stages, rate, hosts=None, **changes):
    costs = Costs.uniform(num_stages, 1.0, 2.0)
    hosts = tuple(range(num_stages)) if hosts is None else hosts
    return replace(costs, hosts=hosts, egress_bytes_per_s=(rate,) * (max(hosts) + 1), **changes)


def test_activation_and_gradient_share_a_host():
    """Only the middle host is limited, to one byte a second; up go 4 bytes, down 2."""
    costs = replace(shared(3, 1.0, message_bytes=(4.0, 2.0)), egress_bytes_per_s=(inf, 1.0, inf))
    step = simulate(one_f_one_b(3, 3), costs, timeline=True)
    ends = {(t.kind, t.micro_batch): (t.start_s, t.end_s) for t in step.timeline.transfers if t.source == 1}
    assert ends == {
        ("activation", 0): (2.0, 4.0),
        ("activation", 1): (3.0, 6.0),  # behind the one before
        ("gradient", 0): (9.0, 15.0),  # alone until 10, shared until 14, alone again
        ("activation", 2): (10.0, 14.0),  # shared all the time
        ("gradient", 1): (12.0, 19.0),  # behind the one before, then alone
        ("gradient", 2): (19.0, 23.0),
    }
    assert step.makespan_s == 25.0


def test_ranks_of_one_host_share_what_leaves_it():
    # Ranks 0 and 2 on host 0 send to ranks 1 and 3 on host 1. With one micro-batch nothing overlaps.
    alone = simulate(forward_only(4, 1), shared(4, 0.5, hosts=(0, 1, 0, 1)))
    assert alone.makespan_s == 4 + 3 * 2
    own = simulate(forward_only(4, 8), shared(4, 0.5))
    both = simulate(forward_only(4, 8), shared(4, 0.5, hosts=(0, 1, 0, 1)))
    assert own.makespan_s == 1 + 2 + 1 + 2 + 1 + 8 * 2 + 1
    # Sixteen messages of two seconds leave host 0, and the last micro-batch has two stages to go after its first.
    assert both.makespan_s > 32.0 > own.makespan_s


def test_within_a_host_only_the_link_counts():
    costs = shared(4, 0.5, hosts=(0, 0, 1, 1), down=(Link(1.0), Link(), Link(1.0)))
    step = simulate(forward_only(4, 1), costs)
    assert step.makespan_s == 4 + 1 + 2 + 1


def test_without_limit_hosts_change_nothing():
    costs = Costs.uniform(4, 1.0, 2.0, 0.75, 0.25)
    expected = simulate(kfkb(4, 8, 2), costs).makespan_s
    assert simulate(kfkb(4, 8, 2), replace(costs, hosts=(0, 0, 1, 1))).makespan_s == expected
    unlimited = replace(costs, hosts=(0, 0, 1, 1), egress_bytes_per_s=(inf, inf))
    assert simulate(kfkb(4, 8, 2), unlimited).makespan_s == expected
    wide = replace(costs, hosts=(0, 1, 2, 3), egress_bytes_per_s=(1e9,) * 4)
    assert simulate(kfkb(4, 8, 2), wide).makespan_s == pytest.approx(expected)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**9))
def test_a_host_with_one_link_is_a_link(seed):
    """On two hosts nothing is shared: the host's rate acts as the links' own."""
    random = Random(seed)
    costs = Costs((1.0, 0.5), (2.0, random.uniform(0.0, 3.0)), (random.uniform(0.1, 4.0),))
    schedule = kfkb(2, random.randint(1, 12), random.randint(1, 4))
    links = simulate(schedule, replace(costs, down=(Link(0.7),), up=(Link(1.3),)))
    hosts = simulate(schedule, replace(costs, hosts=(0, 1), egress_bytes_per_s=(0.7, 1.3)), critical_path=True)
    assert hosts.makespan_s == pytest.approx(links.makespan_s)
    assert sum(hosts.critical_s.values()) == pytest.approx(hosts.makespan_s)
