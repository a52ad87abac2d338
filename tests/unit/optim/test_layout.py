"""Buckets and owners: nothing lost, nothing twice, equal shares."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.optim.layout import ALIGNMENT, MOST_PADDING, make_buckets

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=30)


@given(shapes, st.integers(1, 5), st.integers(1, 5000), st.booleans(), st.data())
def test_every_row_has_one_owner(
    shapes: list[tuple[int, ...]], num_owners: int, bucket_numel: int, cut: bool, data: st.DataObject
) -> None:
    apart = data.draw(st.sets(st.integers(0, len(shapes) - 1), max_size=2))
    buckets = make_buckets(shapes, num_owners, bucket_numel, apart=sorted(apart), cut=cut)
    assert sorted(i for bucket in buckets for i in bucket.parameters) == list(range(len(shapes)))
    rows_of: dict[int, list[tuple[int, int]]] = {}
    for bucket in buckets:
        assert len(bucket.parts) == num_owners
        assert bucket.bounds[0] == 0
        assert bucket.bounds[-1] == bucket.numel
        offset_of = dict(zip(bucket.parameters, bucket.offsets, strict=True))
        for owner, part in enumerate(bucket.parts):
            for rows in part:
                row = prod(shapes[rows.index][1:])
                assert rows.offset == offset_of[rows.index] + rows.start * row
                assert rows.numel == (rows.stop - rows.start) * row
                assert bucket.bounds[owner] <= rows.offset
                assert rows.offset + rows.numel <= bucket.bounds[owner + 1]
                rows_of.setdefault(rows.index, []).append((rows.start, rows.stop))
    for index, shape in enumerate(shapes):
        if prod(shape):
            pieces = sorted(rows_of[index])
            assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
            assert pieces[-1][1] == (shape[0] if shape else 1)
            assert cut or len(pieces) == 1
        else:
            assert index not in rows_of
    if apart:
        assert set(buckets[-1].parameters) == apart


@given(st.integers(2, 8), st.integers(16, 200), st.integers(1, 64))
def test_owners_have_equal_shares(num_owners: int, rows: int, width: int) -> None:
    """To within a row and padding."""
    (bucket,) = make_buckets([(rows, width), (width,), (rows, width)], num_owners, 10**9)
    parts = [sum(rows.numel for rows in part) for part in bucket.parts]
    share = sum(parts) / num_owners
    assert max(parts) - share <= max(width + 3 * ALIGNMENT, 3 * ALIGNMENT + MOST_PADDING * (share + 2 * ALIGNMENT))
    if bucket.is_even:
        assert bucket.bounds == tuple(range(0, bucket.numel + 1, bucket.numel // num_owners))
        assert bucket.numel <= (1 + MOST_PADDING) * (sum(parts) + (num_owners + 3) * ALIGNMENT)


def linears(*shapes: tuple[int, int]) -> list[tuple[int, ...]]:
    """A layer with two norms, a weight and a bias of each."""
    return [(shapes[0][1],), (shapes[0][1],), *(one for shape in shapes for one in (shape, (shape[0],)))]


LAYERS = {
    "Llama 8B": linears(*[(4096, 4096), (1024, 4096)] * 2, *[(14336, 4096)] * 2, (4096, 14336)),
    "Qwen 0.5B": linears(*[(896, 896), (128, 896)] * 2, *[(4864, 896)] * 2, (896, 4864)),
    "GPT-2": linears((768, 2304), (768, 768), (768, 3072), (3072, 768)),
    "embedding": [(50257, 768), (1024, 768)],
}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_cut_into_equal_parts(layer: str, num_ranks: int) -> None:
    """One reduce-scatter reduces them, at the price of a little memory."""
    numel = sum(prod(shape) for shape in LAYERS[layer])
    (bucket,) = make_buckets(LAYERS[layer], num_ranks, 10**9)
    assert bucket.is_even
    assert bucket.numel <= 1.03 * numel
    assert max(sum(rows.numel for rows in part) for part in bucket.parts) <= 1.03 * numel / num_ranks


def test_rows_that_are_experts_are_cut_as_they_can() -> None:
    layer = [(768,), (8, 768), (8, 1024, 768), (8, 768, 512)]
    even = {num_ranks: make_buckets(layer, num_ranks, 10**9)[0].is_even for num_ranks in (2, 4)}
    assert even == {2: True, 4: False}  # three rows and a little are an owner's share: the fourth would be padding


def test_whole_parameters_are_placed_into_equal_parts() -> None:
    """For optimizers that need all of a parameter, where its neighbours fill the other parts."""
    assert make_buckets([(64, 64)] * 4, 2, 10**9, cut=False)[0].is_even
    assert make_buckets([(64, 64)] * 4, 4, 10**9, cut=False)[0].bounds == (0, 4096, 8192, 12288, 16384)
    assert not make_buckets([(64, 64)] * 4, 3, 10**9, cut=False)[0].is_even


@given(shapes, st.integers(1, 5), st.integers(1, 5000), st.booleans(), st.data())
def test_only_owners_own_rows(
    shapes: list[tuple[int, ...]], num_ranks: int, bucket_numel: int, cut: bool, data: st.DataObject
) -> None:
    """They have what they would have if there were no others."""
    owners = sorted(data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)))
    buckets = make_buckets(shapes, num_ranks, bucket_numel, owners=owners, cut=cut)
    among_themselves = make_buckets(shapes, len(owners), bucket_numel, cut=cut)
    for bucket, wanted in zip(buckets, among_themselves, strict=True):
        assert len(bucket.bounds) == num_ranks + 1
        assert list(bucket.bounds) == sorted(bucket.bounds)
        assert [bucket.parts[owner] for owner in owners] == list(wanted.parts)
        for rank in set(range(num_ranks)) - set(owners):
            assert bucket.parts[rank] == ()
            assert bucket.bounds[rank] == bucket.bounds[rank + 1]
        assert (bucket.parameters, bucket.offsets, bucket.numel) == (wanted.parameters, wanted.offsets, wanted.numel)
    assert make_buckets(shapes, num_ranks, bucket_numel, owners=range(num_ranks), cut=cut) == make_buckets(
        shapes, num_ranks, bucket_numel, cut=cut
    )


def test_buckets_follow_the_backward() -> None:
    buckets = make_buckets([(10, 10)] * 5, 2, 150)
    assert [bucket.parameters for bucket in buckets] == [(4, 3), (2, 1), (0,)]
    assert buckets[0].bounds == (0, buckets[0].offsets[1], buckets[0].numel)


def test_who_owns_what_of_a_layer_does_not_depend_on_the_others() -> None:
    """Otherwise a layer that moves to another stage would change the owners of those that stay."""
    layer = [(40, 10), (10,), (70, 10), (30,)]

    def owners(num_layers: int) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        """By layer, counted from the last, and parameter: the rows of each owner."""
        layers = [index // len(layer) for index in range(num_layers * len(layer))]
        buckets = make_buckets(layer * num_layers, 3, 10**9, layers=layers, least_numel=1000)
        return {
            (num_layers - rows.index // len(layer), rows.index % len(layer)): [
                (owner, other.start, other.stop)
                for bucket in buckets
                for owner, part in enumerate(bucket.parts)
                for other in part
                if other.index == rows.index
            ]
            for bucket in buckets
            for part in bucket.parts
            for rows in part
        }

    few, many = owners(3), owners(7)
    assert {place: many[place] for place in few} == few


def test_small_layers_share_a_bucket() -> None:
    buckets = make_buckets([(10,)] * 6, 2, 10**9, layers=[0, 0, 1, 1, 2, 2], least_numel=30)
    assert [bucket.parameters for bucket in buckets] == [(5, 4, 3, 2), (1, 0)]
