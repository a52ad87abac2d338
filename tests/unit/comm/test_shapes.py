"""What a stage passes on, in numbers that announce it; and what it may not pass on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.shapes import DTYPES, HEADER, GivenShapes, Meta, Shapes, announce, meta_of, read_announcement

METAS = st.builds(
    Meta,
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.sampled_from(DTYPES)), max_size=5).map(
        tuple
    ),
    st.booleans(),
)


@given(METAS)
def test_what_is_announced_is_read(meta: Meta) -> None:
    header = announce(meta)
    assert header.shape == (HEADER,)
    assert read_announcement(header) == meta


def test_more_than_an_announcement_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"90 tensors, \[3\] float32, .*: at most 256 numbers .* pass fewer tensors"):
        announce(Meta((((3,), torch.float32),) * 90))


def test_a_tensor_is_not_a_tuple_of_one() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert meta_of(tensor) == Meta((((2, 3), torch.bfloat16),), is_tuple=False)
    assert meta_of((tensor,)) == Meta((((2, 3), torch.bfloat16),), is_tuple=True)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([torch.zeros(1)], "list"),
        (None, "NoneType"),
        ((torch.zeros(1), 3), "int"),
        (torch.zeros(1).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"passes on a {kind}: it must .*a tensor, or a tuple of tensors"):
        meta_of(value)


def test_books_of_shapes() -> None:
    meta = meta_of(torch.zeros(2))
    shapes = Shapes()
    assert shapes.of("key") is None
    shapes.learn("key", meta)
    assert shapes.of("key") == meta
    assert shapes.of("other") is None
    assert GivenShapes().of(meta) == meta
