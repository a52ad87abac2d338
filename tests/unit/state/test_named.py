"""Which rows of the job's tensors the rows of a rank are, and that what is saved can be loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.checkpoint import Piece
from paceline.optim.sharded import ShardedOptimizer
from paceline.planning.experts import Placement
from paceline.runtime.stage_tensors import Wishes
from paceline.state.exchange import Held, Move
from paceline.state.named import Numbering, Numberings, pieces, place


@given(st.permutations(range(8)), st.integers(1, 8), st.data())
def test_runs_are_the_rows_in_order(numbers: list[int], held: int, data: st.DataObject) -> None:
    rows = tuple(numbers[:held])
    start = data.draw(st.integers(0, held - 1))
    stop = data.draw(st.integers(start + 1, held))
    runs = list(Numbering((8, 3), rows, 2).runs(start, stop))
    found = [(row, number + row - first) for first, end, number in runs for row in range(first, end)]
    assert found == [(row, rows[row]) for row in range(start, stop)]
    assert list(Numbering((8, 3), rows, 2).runs(start, stop + held)) == list(
        Numbering((8, 3), rows, 2).runs(start, held)
    )
    jumps = [row for row in range(start + 1, stop) if rows[row] != rows[row - 1] + 1]
    assert [first for first, _, _ in runs] == [start, *jumps]


def test_experts_have_their_numbers_in_the_model() -> None:
    class Layer(nn.Module):
        placement = Placement(((4, 0, 1, 2), (2, 5, 3)), (3, 3))
        size, num_experts = 2, 6
        own_experts = placement.devices[0][:3]

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 7))

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(5)
            self.layer = Layer()
            self.expert_layers = {"layer": self.layer}

    stage = Stage()
    numberings = Numberings(stage)
    assert numberings.of(stage.layer.weight) == Numbering((6, 7), (4, 0, 1), 2), "copies are nobody's rows"
    assert list(numberings.of(stage.layer.weight).runs(0, 3)) == [(0, 1, 4), (1, 3, 0)]
    assert numberings.of(stage.norm.weight) == Numbering((5,))
    assert list(numberings.of(stage.norm.weight).runs(1, 4)) == [(1, 4, 1)]


class Saved:
    """Whole tensors that were saved."""

    def __init__(self, found: list[Piece]) -> None:
        self._found = {(piece.name, piece.kind): piece.tensor.clone() for piece in found}

    def kinds(self, name: str) -> list[str]:
        return [kind for named, kind in self._found if named == name]

    def shape(self, name: str, kind: str | None = None) -> tuple[int, ...]:
        return tuple(self._found[name, kind or "master"].shape)

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = self._found[name, kind]
        return tensor[start:stop] if tensor.dim() else tensor


@pytest.mark.parametrize("empty", [(0, 3), (4, 0)])
def test_parameters_without_elements_need_not_be_saved(empty: tuple[int, int]) -> None:
    stage: Any = nn.Module()
    stage.num_stages, stage.weight, stage.empty = 1, nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(empty))
    basic = torch.optim.AdamW([stage.weight, stage.empty])
    optimizer = ShardedOptimizer(basic, {stage.weight: "weight", stage.empty: "empty"})
    for parameter in (stage.weight, stage.empty):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved, value = Saved(list(pieces(stage, optimizer, replica=0))), stage.weight.detach().clone()
    optimizer.step()
    place(stage, optimizer, saved)
    assert torch.equal(stage.weight, value)


def test_steps_that_fused_adam_counts_for_a_group_go_with_each_parameter() -> None:
    """It has them in the state of the last one, which may go alone, or stay alone."""
    stage: Any = nn.Module()
    stage.num_stages, stage.first, stage.last = 1, nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    basic = FusedAdam.__new__(FusedAdam)  # without its kernels
    torch.optim.Optimizer.__init__(basic, [stage.first, stage.last], {"lr": 1e-3})
    optimizer = ShardedOptimizer(basic, {stage.first: "first", stage.last: "last"})
    for owned, step in zip(optimizer.owned, (0, 3), strict=True):
        optimizer.state[owned.master] = {"step": step, "exp_avg": torch.zeros_like(owned.master)}
    found = {piece.name: piece.tensor.item() for piece in pieces(stage, optimizer, replica=0) if piece.kind == "step"}
    assert found == {"first": 3, "last": 3}
    assert [optimizer.state[owned.master]["step"] for owned in optimizer.owned] == [3, 3]


@pytest.mark.parametrize("is_migrated", [False, True])
def test_moments_of_a_scalar_lie_where_it_does(is_migrated: bool) -> None:
    """Not on the host, as counts of steps do; the device "meta" stands for a GPU."""
    saved = {"step": torch.tensor(3.0), "exp_avg": torch.tensor(0.1), "exp_avg_sq": torch.tensor(0.2)}
    stage: Any = nn.Module()
    stage.num_stages, stage.scale = 1, nn.Parameter(torch.ones((), device="meta"))
    optimizer = ShardedOptimizer(torch.optim.AdamW([stage.scale]), {stage.scale: "scale"})
    if is_migrated:
        layers: Any = SimpleNamespace(here=())
        wishes = Wishes(layers, optimizer, {}, lambda tensor: "")
        for kind, value in saved.items():
            held = Held("scale", kind, 0, 1, value.dtype, whole=())
            wishes.place(Move(1, 0, 0, 0, 0, 1, 4), held, ()).copy_(value)
        wishes.settle(optimizer)
    else:
        pieces_of_scale = [Piece("scale", kind, value) for kind, value in {"master": torch.ones(()), **saved}.items()]
        place(stage, optimizer, Saved(pieces_of_scale))
    (state,) = optimizer.state.values()
    assert {kind: value.device.type for kind, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


@pytest.mark.parametrize("value", [[torch.ones(2), torch.ones(2)], [1, 2], "text"], ids=["tensors", "numbers", "text"])
def test_a_state_that_is_neither_tensor_nor_number_is_named(value: Any) -> None:
    """Lists of numbers would come back as tensors."""
    stage: Any = nn.Module()
    stage.num_stages, stage.weight = 1, nn.Parameter(torch.ones(2))
    optimizer = ShardedOptimizer(torch.optim.SGD([stage.weight], lr=0.1), {stage.weight: "weight"})
    optimizer.state[stage.weight] = {"step": 3, "history": value}
    with pytest.raises(ValueError, match=r"state 'history' of a parameter is a (list|str): only tensors .*; "):
        list(pieces(stage, optimizer, replica=0))
