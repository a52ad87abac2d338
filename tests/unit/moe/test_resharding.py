"""Which weight of the whole model an element of a rank's parameter is."""

from __future__ import annotations

import pytest
import torch

from paceline.moe.resharding import Fragment, Spread, _fill

NATIVE = "layers.3.deepspeed_moe.experts.deepspeed_experts.{}.0.weight"
EXPERTS = {"mlp": 8, "layers.3": 6}


def spread(size: int, num_ranks: int, data_first: bool = False) -> Spread:
    return Spread({"mlp": size, "layers.3": size}, EXPERTS, num_ranks, data_first)


def test_stacked_experts_begin_where_their_first_one_does() -> None:
    numel = {"mlp.experts.w1": 10}
    assert [spread(2, 4).place("mlp.experts.w1", rank, numel) for rank in range(4)] == [
        ("mlp.experts.w1", start) for start in (0, 40, 0, 40)
    ]
    assert [spread(2, 4, True).place("mlp.experts.w1", rank, numel)[1] for rank in range(4)] == [0, 0, 40, 40]


def test_experts_of_their_own_have_names_of_their_own() -> None:
    assert spread(2, 4).place(NATIVE.format(1), 3, {}) == (NATIVE.format(4), 0)
    assert spread(1, 4).place(NATIVE.format(1), 3, {}) == (NATIVE.format(1), 0)


@pytest.mark.parametrize("name", ["mlp.router.gate.weight", "other.experts.w1", "head.weight"])
def test_what_is_outside_experts_is_whole(name: str) -> None:
    assert spread(2, 4).place(name, 3, {}) == (name, 0)


def test_names_on_a_rank_of_another_run() -> None:
    """A group of the optimizer that has some weights of each expert, in the order of the model."""
    now = ["a", *(NATIVE.format(slot) for slot in range(3)), "b"]
    assert spread(3, 3).names(now, spread(2, 2)) == ["a", NATIVE.format(0), NATIVE.format(1), "b"]
    assert spread(1, 1).names(now, spread(2, 2)) == ["a", *(NATIVE.format(slot) for slot in range(6)), "b"]


def test_elements_come_from_whichever_fragments_have_them() -> None:
    fragments = [Fragment(start, {"m": torch.arange(start, start + 4.0)}) for start in (4, 0, 8)]
    found = torch.zeros(6)
    _fill(found, 3, "m", fragments, "w")
    assert found.tolist() == [3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match=r"has 2 of 6 elements of m of w that this rank needs"):
        _fill(found, 10, "m", fragments, "w")
    with pytest.raises(ValueError, match=r"has 0 of 6 elements of v of w"):
        _fill(found, 0, "v", fragments, "w")
