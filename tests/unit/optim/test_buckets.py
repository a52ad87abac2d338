"""Buckets over several domains: each parameter once, over its own ranks, in the order of the backward."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.optim.buckets import Domain, lay_out
from paceline.optim.layout import make_buckets

EVERYONE, SOME, ALONE = Domain("all", 4, 3), Domain("some", 2, 1), Domain()

parameters = st.lists(
    st.tuples(
        st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(0, 3), st.sampled_from([EVERYONE, SOME, ALONE])
    ),
    min_size=1,
    max_size=20,
)


def laid_out(order, shapes, domains, layers, waiting, shard=True):
    return lay_out(
        order, shapes, domains, layers, waiting=waiting, bucket_numel=60, least_numel=20, cut=True, shard=shard
    )


@given(parameters, st.booleans(), st.data())
def test_each_parameter_over_its_own_ranks(parameters, shard, data) -> None:
    shapes, numbers, domains = zip(*parameters, strict=True)
    layers = [f"layers.{number}" for number in sorted(numbers)]
    order = data.draw(st.permutations(range(len(shapes))))
    waiting = data.draw(st.sets(st.sampled_from(order), max_size=2))
    found = laid_out(order, shapes, domains, layers, waiting, shard)
    assert sorted(number for part in found for number in part.bucket.parameters) == list(range(len(shapes)))
    place = {number: index for index, number in enumerate(order)}
    ends = []
    for part in found:
        assert {domains[number] for number in part.bucket.parameters} == {part.domain}
        assert part.shard == (shard and part.domain != ALONE)
        assert part.waits == bool(waiting & set(part.bucket.parameters))
        assert len(part.bucket.parts) == part.domain.size
        assert part.own == part.bucket.parts[part.domain.rank]
        ends.append((part.waits, -min(place[number] for number in part.bucket.parameters)))
    assert ends == sorted(ends)  # the one that backward finishes first comes first, whatever its ranks


@given(parameters, st.data())
def test_one_domain_is_as_if_there_were_none(parameters, data) -> None:
    shapes, numbers, _ = zip(*parameters, strict=True)
    layers = [f"layers.{number}" for number in sorted(numbers)]
    order = list(range(len(shapes)))
    waiting = data.draw(st.sets(st.sampled_from(order), max_size=2))
    found = laid_out(order, shapes, [EVERYONE] * len(shapes), layers, waiting)
    assert [part.bucket for part in found] == make_buckets(
        shapes, 4, 60, layers=layers, least_numel=20, apart=sorted(waiting)
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=20), st.integers(0, 3))
def test_sections_share_no_bucket_and_the_last_comes_first(parameters, rank) -> None:
    """Every rank of a group has the same buckets, in the same order."""
    shapes = [(rows, 3) for rows, _ in parameters]
    sections = sorted(section for _, section in parameters)
    owners = {0: (0, 2), 1: None, 2: (3,)}

    def on(place: int):
        domains = [Domain("mirrors", 4, place, owners[section], section) for section in sections]
        return laid_out(list(range(len(shapes))), shapes, domains, ["layer"] * len(shapes), set())

    found = on(rank)
    assert [part.bucket for part in found] == [part.bucket for part in on(0)]
    of_bucket = [{sections[number] for number in part.bucket.parameters} for part in found]
    assert all(len(of_it) == 1 for of_it in of_bucket)
    assert [max(of_it) for of_it in of_bucket] == sorted((max(of_it) for of_it in of_bucket), reverse=True)
    for part in found:
        assert part.domain.owners == owners[part.domain.section]
        assert part.domain.owners is None or rank in part.domain.owners or part.own == ()
