"""Formats of what passes between stages."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.formats import ACTIVATIONS, FORMATS, Int4, on_the_wire, pack, unpack
from paceline.comm.shapes import meta_of

ROUNDING = {"bf16": 2**-8, "int8": 0.5 / 127, "fp8_e4m3": 2**-4, "int4": 1 - 7 / 8 * (1 - 2**-4)}
"""Of the largest value of a block (int8, int4: where one of the other sign is as large), or of the value itself."""

BITS = {"bf16": 16, "int8": 8 + 32 / 256, "fp8_e4m3": 8 + 32 / 256, "int4": 4 + 8 / 16 + 32 / 256}
"""A value, of rows of 256."""


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator)
    return rows * 10.0 ** torch.randint(-6, 6, (*shape[:-1], 1), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_decoded_is_rounded(name: str, dtype: torch.dtype) -> None:
    given = values(3, 5, 256).to(dtype)
    parcel = pack(given, FORMATS[name])
    found = unpack(parcel)
    assert isinstance(found, torch.Tensor)
    assert (found.shape, found.dtype) == (given.shape, dtype)
    assert 8 * parcel.tensors[0].numel() == BITS[name] * given.numel()
    blocks = given.float().unflatten(-1, (-1, 16 if name == "int4" else 256))
    size = blocks.abs() if name == "bf16" else blocks.abs().amax(-1, keepdim=True).expand_as(blocks)
    least = 2**-8 if dtype is torch.bfloat16 else 2**-22
    limit = (ROUNDING[name] + least) * size.flatten(-2)
    assert ((found.float() - given.float()).abs() <= limit).all()
    assert torch.equal(unpack(pack(given, FORMATS[name])), found), "the same in, the same out"


@pytest.mark.parametrize("name", FORMATS)
def test_both_ends_know_what_travels(name: str) -> None:
    """Rows of values are encoded; side inputs and sums over experts are not."""
    sent = (values(2, 7, 97), torch.arange(14, dtype=torch.int32).view(1, 2, 7), torch.tensor([1e-9, 3.0]))
    parcel = pack(sent, FORMATS[name])
    assert on_the_wire(meta_of(sent), FORMATS[name]).tensors == meta_of(parcel.tensors).tensors
    assert on_the_wire(meta_of(sent), None) == meta_of(sent)
    hidden, side, sums = unpack(parcel)
    assert hidden.shape == (2, 7, 97)
    assert torch.equal(side, sent[1])
    assert torch.equal(sums, sent[2])
    assert parcel.tensors[0].dtype is torch.uint8


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 2, 5), (2, 65), (1, 1, 129)])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_any_size(name: str, shape: tuple[int, ...]) -> None:
    given = values(*shape)
    found = unpack(pack(given, FORMATS[name]))
    assert isinstance(found, torch.Tensor)
    largest = given.abs().amax(-1, keepdim=True)
    assert ((found - given).abs() <= (ROUNDING[name] + 2**-22) * largest).all()


def test_small_blocks_of_a_row_keep_their_precision() -> None:
    """Blocks have scales of their own, down to a few millionths of the row's largest value."""
    sizes = 10.0 ** -torch.arange(8.0)
    given = torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(0)) * sizes[:, None]
    found = unpack(pack(given.flatten(-2), FORMATS["int4"]))
    assert isinstance(found, torch.Tensor)
    largest = given.abs().amax(-1, keepdim=True)
    error = (found.view_as(given) - given).abs()
    assert (error <= torch.maximum(ROUNDING["int4"] * largest, 2**-10 / 448 * largest[:, :1])).all()
    assert (error[:, :5] <= ROUNDING["int4"] * largest[:, :5]).all()
    assert (found.view_as(given)[:, 7] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_all_sixteen_numbers_of_four_bits_are_used(sign: float, dtype: torch.dtype) -> None:
    """The largest value of a block is the number that has no opposite, whatever its sign."""
    blocks = torch.arange(-8.0, 8.0) * torch.tensor([[sign], [-sign / 2], [0.0], [sign / 64]])
    given = blocks.flatten().expand(2, -1).to(dtype)
    assert torch.equal(unpack(pack(given, FORMATS["int4"])), given)


def test_error_of_four_bits() -> None:
    """Of normally distributed values; the largest value of a block is within the precision of its scale."""
    given = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    found = unpack(pack(given, FORMATS["int4"]))
    assert isinstance(found, torch.Tensor)
    assert 0.07 < float((found - given).norm() / given.norm()) < 0.08
    blocks, error = given.unflatten(-1, (-1, 16)), (found - given).unflatten(-1, (-1, 16)).abs()
    largest, where = blocks.abs().max(-1, keepdim=True)
    assert (error.gather(-1, where) <= 2**-4 * largest).all()
    assert ((error <= 2**-4 * (1 + 2**-4) * largest) | (blocks.abs() > 7 / 8 * (1 - 2**-4) * largest)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros_and_an_overflow_is_seen(name: str) -> None:
    given = torch.ones(4, 8, 64)
    given[0] = 0.0
    given[1, 2, 3] = torch.inf
    given[2, 4, 5] = torch.nan
    found = unpack(pack(given, FORMATS[name]))
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found[0], given[0])
    assert not found[1, 2].isfinite().all()
    assert not found[2, 4].isfinite().all()
    rest = torch.ones(4, 8, dtype=torch.bool)
    rest[1, 2] = rest[2, 4] = False
    torch.testing.assert_close(found[rest], given[rest], rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_encoded_has_memory_of_its_own(name: str) -> None:
    given = values(2, 3, 64).to(torch.bfloat16)
    parcel = pack(given, FORMATS[name])
    before = unpack(parcel)
    given.zero_()
    assert torch.equal(unpack(parcel), before)


# -- activations in four bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 64, 256), (3, 65, 97), (70, 33), (1, 64, 3), (2, 70, 1)])
def test_what_tokens_have_in_common_costs_no_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Each sequence has a mean and four directions of its own; what is left is rounded as it would be alone."""
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(shape, generator=generator)
    mean = 4 * torch.randn(*shape[:-2], 1, shape[-1], generator=generator)
    sizes = torch.tensor([4.0, 3.0, 2.0, 2.0]) * torch.randn(*shape[:-1], 4, generator=generator)
    given = (own + mean + sizes @ torch.randn(*shape[:-2], 4, shape[-1], generator=generator)).to(dtype)
    parcel = pack(given, ACTIVATIONS["int4"])
    assert on_the_wire(meta_of(given), ACTIVATIONS["int4"]).tensors == meta_of(parcel.tensors[0]).tensors
    found = unpack(parcel)
    assert isinstance(found, torch.Tensor)
    assert (found.shape, found.dtype) == (given.shape, dtype)
    alone = unpack(pack(own, Int4(block=8)))
    assert isinstance(alone, torch.Tensor)
    of_dtype = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * given.float().norm()
    assert (found - given).float().norm() <= 1.2 * (alone - own).norm() + 0.5 * of_dtype


def test_bits_of_activations() -> None:
    """In a wide model hardly more than the codes and their scales; both in the README."""
    format = ACTIVATIONS["int4"]
    for rows, size, bits in ((2048, 4096, 5.04), (64, 64, 6.84)):
        coded_rows, width = format.coded_shape((rows, size))
        assert round(8 * coded_rows * width / (rows * size), 2) == bits


@pytest.mark.parametrize("shape", [(1, 4096), (2, 63, 256), (3, 1, 97)])
def test_of_short_sequences_nothing_is_apart(shape: tuple[int, ...]) -> None:
    """It would be more bytes than the values."""
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parcel, rows = pack(given, ACTIVATIONS["int4"]), pack(given, Int4(block=8))
    assert on_the_wire(meta_of(given), ACTIVATIONS["int4"]).tensors == meta_of(parcel.tensors[0]).tensors
    assert torch.equal(parcel.tensors[0], rows.tensors[0])
    found, alone = unpack(parcel), unpack(rows)
    assert isinstance(found, torch.Tensor)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(found, alone)


def test_sequences_of_few_directions_are_told_by_them() -> None:
    """Fewer directions than are looked for, in the data or in the width, are no harm."""
    generator = torch.Generator().manual_seed(0)
    for num, size in ((1, 64), (2, 64), (3, 3)):
        given = torch.randn(2, 64, num, generator=generator) @ torch.randn(2, num, size, generator=generator)
        found = unpack(pack(given, ACTIVATIONS["int4"]))
        assert isinstance(found, torch.Tensor)
        assert (found - given).norm() < 0.005 * given.norm()


def test_no_sequence_depends_on_another() -> None:
    """So that numbers do not depend on what a micro-batch holds besides."""
    given = values(3, 8, 64)
    given[2, 5, 7] = torch.nan
    found = unpack(pack(given, ACTIVATIONS["int4"]))
    assert isinstance(found, torch.Tensor)
    for sequence, decoded in zip(given[:2], found[:2], strict=True):
        alone = unpack(pack(sequence, ACTIVATIONS["int4"]))
        assert isinstance(alone, torch.Tensor)
        assert torch.equal(decoded, alone)
    assert not found[2, 5].isfinite().all(), "an overflow is seen"


def test_sequences_of_zeros_stay_zeros() -> None:
    given = torch.zeros(2, 5, 33)
    given[1] = -0.0
    assert torch.equal(unpack(pack(given, ACTIVATIONS["int4"])), given)
