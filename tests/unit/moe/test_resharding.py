"""Which weight of the whole model an element of a rank's parameter is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.moe.resharding import Fragment, Spread, _fill, _make_states

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


@pytest.mark.parametrize(("fused", "home"), [(True, "meta"), (None, "cpu")])
def test_counts_of_steps_lie_where_the_optimizer_has_them(fused: bool | None, home: str) -> None:
    """Those of torch's fused kernels on the GPU, for which the device "meta" stands; files are read on the host."""
    state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2)}
    base = {"param_groups": [{"params": [0], "fused": fused}], "state": {0: state}}
    optimizer: Any = SimpleNamespace(state={})
    master = torch.ones(5, device="meta")
    _make_states(optimizer, [[master]], base)
    assert optimizer.state[master]["step"].device.type == home
    assert (optimizer.state[master]["exp_avg"].device.type, len(optimizer.state[master]["exp_avg"])) == ("meta", 5)


def test_steps_that_are_counted_at_one_parameter_count_for_its_group() -> None:
    """DeepSpeed's FusedAdam counts those of a group in the state of its last parameter."""
    base = {"param_groups": [{"params": [0, 1]}], "state": {0: {"step": 0}, 1: {"step": 3}}}
    optimizer: Any = SimpleNamespace(state={})
    masters = [torch.ones(2), torch.ones(2)]
    _make_states(optimizer, [masters], base)
    assert [optimizer.state[master] for master in masters] == [{"step": 3}, {"step": 3}]
