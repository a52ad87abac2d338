"""Differences of two versions of a tensor: every bit comes back, and small changes take few bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.state import differences
from paceline.state.differences import packed, unpack

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def returned(new: Tensor, old: Tensor) -> tuple[int | None, Tensor]:
    """Bytes of the message, and what the receiver has then."""
    message, values = packed(new, old), old.clone()
    if message is None:
        return None, new
    unpack(message, values)
    return message.numel(), values


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("change", [0.0, 1e-6, 1e-4, 1e-2, 10.0])
def test_every_bit_comes_back(dtype: torch.dtype, change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "CHUNK", 100)
    torch.manual_seed(0)
    exact = torch.randn(27, 31, dtype=torch.float64) * 0.02
    old, new = exact.to(dtype), (exact + change * torch.randn_like(exact)).to(dtype)
    num_bytes, values = returned(new, old)
    assert same(values, new)
    assert num_bytes is None or num_bytes < new.nbytes


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_that_are_no_numbers_and_zeros_of_both_signs(dtype: torch.dtype) -> None:
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 6e-8], dtype=dtype)
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    old, new = odd[pairs[:, 0]], odd[pairs[:, 1]]
    rest = torch.ones(4000, dtype=dtype)
    num_bytes, values = returned(torch.cat([new, rest]), torch.cat([old, rest]))
    assert num_bytes is not None
    assert same(values, torch.cat([new, rest]))


@pytest.mark.parametrize("integer", differences.INTEGERS.values(), ids=str)
def test_any_two_patterns_of_bits(integer: torch.dtype) -> None:
    torch.manual_seed(1)
    ends = torch.iinfo(integer)
    old, new = (torch.randint(ends.min, ends.max, (5000,), dtype=integer) for _ in range(2))
    new = torch.where(torch.rand(5000) < 0.2, new, old)
    new[:4], old[:4] = torch.tensor([ends.min, ends.max, ends.min, 0]), torch.tensor([ends.max, ends.min, 0, ends.min])
    num_bytes, values = returned(new, old)
    assert num_bytes is not None
    assert same(values, new)


def test_an_update_of_training_takes_few_bytes() -> None:
    """An update of Adam's size, in the types of fine-tuning: the figures of the documents."""
    torch.manual_seed(2)
    exact = torch.randn(1 << 16, dtype=torch.float64) * 0.02
    later = exact + 1e-5 * (2 * torch.rand_like(exact) - 1)
    parts = {}
    for dtype in (torch.bfloat16, torch.float32):
        num_bytes, _ = returned(later.to(dtype), exact.to(dtype))
        assert num_bytes is not None
        parts[dtype] = num_bytes / later.to(dtype).nbytes
    assert parts[torch.bfloat16] < 0.15
    assert parts[torch.float32] < 0.56
    assert returned(exact.float(), exact.float())[0] == 4, "nothing has changed"


def test_what_saves_nothing_is_not_packed() -> None:
    torch.manual_seed(3)
    old, new = (torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32) for _ in range(2))
    assert packed(new, old) is None
    assert packed(old[:0], old[:0]) is None
    assert packed(old[0], old[0]) is None, "a scalar is as long as the codes of its bytes"
    assert packed(torch.zeros(3, dtype=torch.complex128), torch.zeros(3, dtype=torch.complex128)) is None


def test_tensors_that_are_not_contiguous_are_packed_as_they_read() -> None:
    old = torch.arange(600, dtype=torch.float32).view(20, 30).t()
    new = old + 1e-4
    message, values = packed(new, old), old.contiguous()
    assert message is not None
    unpack(message, values)
    assert same(values, new.contiguous())
    with pytest.raises(AssertionError):
        unpack(message, old)
