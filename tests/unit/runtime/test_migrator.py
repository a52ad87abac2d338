"""The part that moves layers, without an engine: a few linear layers, and callables that note their calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.control import Gather
from paceline.runtime.migration import Migrator, Seat, StageParameters
from paceline.runtime.movable_layers import Layers, TensorNote, empty_tensors
from paceline.state.named import SPREAD
from support.ranks import run_ranks

NUM_ITEMS, WIDTH = 4, 3
OLD, NEW = [0, 2, 4], [0, 3, 4]


def layer(item: int) -> nn.Linear:
    torch.manual_seed(item)
    return nn.Linear(WIDTH, 2 + item)


class Stage(nn.Module):
    def __init__(self, stage: int, parts: list[int]) -> None:
        super().__init__()
        self.parts, self.stage_id = parts, stage
        for item in range(parts[stage], parts[stage + 1]):
            self.add_module(str(item), layer(item))


class FewLayers(Layers):
    """Linear layers; ``fails`` is an item that cannot be made."""

    def __init__(self, module: Stage, fails: int | None) -> None:
        super().__init__(module)
        self.fails = fails
        self.unmade: list[int] = []

    @property
    def num_items(self) -> int:
        return NUM_ITEMS

    def check(self, parts: Sequence[int]) -> list[int]:
        if list(parts) != sorted({*parts, 0, NUM_ITEMS}):
            raise ValueError(f"{list(parts)} are no boundaries")
        return list(parts)

    def boundaries(self, method: Any, profile: str | None) -> None:
        return None

    def get(self, item: int) -> nn.Module | None:
        return self.module._modules.get(str(item))

    def kind(self, item: int) -> tuple[str, str]:
        return "linear", "linear"

    def num_parameters(self, item: int) -> int:
        return (WIDTH + 1) * (2 + item)

    def timed(self) -> tuple[dict[int, nn.Module], None, None]:
        return {}, None, None

    def cuts(self) -> tuple[int, ...]:
        return tuple(range(1, NUM_ITEMS))

    def prefix(self, item: int) -> str:
        return f"{item}."

    def make(self, item: int, notes: Sequence[TensorNote]) -> nn.Module:
        if item == self.fails:
            raise ValueError(f"layer {item} cannot be made")
        made = nn.Linear(WIDTH, 2 + item, device="meta")
        empty_tensors(made, item, notes, torch.device("cpu"))
        return made

    def unmake(self, made: Mapping[int, nn.Module | None]) -> None:
        self.unmade += made

    def swap(self, parts: Sequence[int], arrived: Mapping[int, nn.Module | None]) -> None:
        before = self.here
        self.module.parts = list(parts)
        for item in before:
            if item not in self.here:
                del self.module._modules[str(item)]
        for item, made in arrived.items():
            self.module.add_module(str(item), made)


class Estimates:
    """What is learned of each layer: its number."""

    def __init__(self, items: Sequence[int]) -> None:
        self.known = {f"{item}.weight": item for item in items}

    def leave(self, prefixes: Sequence[str]) -> Callable[[Gather], None]:
        left = {name: state for name, state in self.known.items() if name.startswith(tuple(prefixes))}

        def follow(gather: Gather) -> None:
            for told in gather(left):
                self.known |= told

        return follow


class Rank:
    """One of two stages, with all that a migrator is made of."""

    def __init__(self, *, old: Sequence[int] = OLD, fails: int | None = None, rate: float = 0.1) -> None:
        from torch import distributed as dist

        from paceline.comm.control import ControlPlane
        from paceline.optim.sharded import ShardedOptimizer

        dist.init_process_group("gloo")
        self.stage = dist.get_rank()
        self.module = Stage(self.stage, list(old))
        basic = torch.optim.AdamW(self.module.parameters(), lr=rate)
        self.optimizer = ShardedOptimizer(basic, self.parameters().names)
        self.layers = FewLayers(self.module, fails if self.stage == 0 else None)
        self.estimates = Estimates(self.layers.here)
        self.events: list[str] = []

        self.migrator = Migrator(
            ControlPlane.create(2),
            Seat(self.stage, self.stage, 0),
            self.layers,
            self.optimizer,
            torch.device("cpu"),
            parameters=self.parameters,
            step=lambda: 7,
            half_way=self.half_way,
            learned=[self.estimates],
            after=lambda: self.events.append("after"),
        )

    def parameters(self) -> StageParameters:
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return StageParameters(names, lambda parameter: True, lambda parameter: False)

    @contextmanager
    def half_way(self, what: str) -> Iterator[None]:
        self.events.append("enter")
        try:
            yield
        except RuntimeError as error:
            self.events.append(f"{what}: {error}")
            raise
        self.events.append("leave")

    def train(self) -> None:
        """Gradients follow from names alone, so that they are the same wherever a layer lies."""
        for name, parameter in self.module.named_parameters():
            (parameter * (1 + len(name) + int(name[0]))).pow(2).sum().backward()
        is_first = not self.optimizer.state
        self.optimizer.step()
        self.optimizer.zero_grad()
        if is_first:  # as optimizers note that they have no tensor of a kind
            for state in self.optimizer.state.values():
                state["nothing"] = None

    def state(self) -> dict[str, Tensor]:
        """Values and states of this stage's parameters."""
        from paceline.state.named import parts_of

        found = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        for owned in self.optimizer.owned:
            for kind, tensor in parts_of(self.optimizer, owned).items():
                found[f"{owned.name} {kind}"] = tensor.clone()
        return found


def trains(moves: Sequence[Sequence[int]], rate: float = 0.1) -> Any:
    rank = Rank(rate=rate)
    for parts in moves:
        rank.train()
        new = rank.migrator.agree(parts)
        if new is not None:
            rank.migrator.migrate(new)
    rank.train()
    assert all(state["nothing"] is None for state in rank.optimizer.state.values()), "it has become a tensor"
    figures = [{**migration, "seconds": 0.0} for migration in rank.migrator.migrations]
    return rank.state(), rank.events, figures, rank.estimates.known


def test_layers_move_with_their_states_and_train_on_as_if_they_had_stayed() -> None:
    stayed, moved = (run_ranks(trains, 2, moves) for moves in ([OLD, OLD, OLD], [NEW, [0, 1, 4], OLD]))
    for (expected, events, figures, _), (state, moved_events, moved_figures, estimates) in zip(
        stayed, moved, strict=True
    ):
        assert (events, figures) == ([], [])
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)
        # States are waited for at the end of the next step.
        assert moved_events == ["enter", "after", "leave", "enter", "leave"] * 3
        assert (
            {"0.weight", "1.weight", "2.weight", "3.weight"}
            >= estimates.keys()
            >= {f"{item}.weight" for item in (1, 2)}
        )
        first = moved_figures[0]
        assert (first["step"], first["from"], first["to"]) == (7, OLD, NEW)
        # Weight and bias, two moments of each element, and a step count of each.
        assert first["bytes"] == first["most_bytes"] == 4 * (3 * 4 * (WIDTH + 1) + 2)
        assert first["paused_bytes"] == 4 * 4 * (WIDTH + 1)
        assert first["transfer_s"] > 0
        assert first["rebuild_s"] > 0


def trains_ahead(rate: float, judged_bytes: int = 1 << 10) -> Any:
    """Layers are sent two steps before they move."""
    from paceline.runtime import migration
    from paceline.state import values_ahead

    rank = Rank(rate=rate)
    migration.LEAST_BYTES = 1
    values_ahead.JUDGED_BYTES = judged_bytes
    for parts in (NEW, [0, 1, 4], OLD):
        rank.train()
        assert rank.migrator.prepare(parts)
        rank.train()
        while not rank.migrator.is_prepared():
            time.sleep(0.01)
        rank.train()
        rank.migrator.migrate(parts)
    return rank.state(), rank.migrator.migrations[0]


@pytest.mark.parametrize(("rate", "judged_bytes"), [(0.1, 1 << 10), (1e-6, 1 << 10), (1e-6, 0)])
def test_layers_that_were_sent_before_move_with_what_steps_have_changed_since(rate: float, judged_bytes: int) -> None:
    """It is packed where that saves anything, and until it is known whether it takes longer than sending the rest."""
    stayed, moved = run_ranks(trains, 2, [OLD] * 8, rate), run_ranks(trains_ahead, 2, rate, judged_bytes)
    for (expected, *_), (state, first) in zip(stayed, moved, strict=True):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)
        values = 4 * 4 * (WIDTH + 1)
        assert first["bytes"] == 3 * values + 4 * 2 + first["paused_bytes"]
        assert first["paused_bytes"] <= values
        assert (first["paused_bytes"] < values) == (rate < 0.1 and judged_bytes > 0)


def gives_up() -> tuple[list[int], bool]:
    """Layers that were made for a move that does not come, and are let go of; whether nothing stays."""
    from paceline.runtime import migration

    rank = Rank()
    migration.LEAST_BYTES = 1
    assert rank.migrator.prepare(NEW)
    rank.migrator.forget()
    return sorted(rank.layers.unmade), rank.migrator._ahead is None


def test_nothing_stays_of_a_move_that_was_prepared_and_is_given_up() -> None:
    assert run_ranks(gives_up, 2) == [([2], True), ([], True)]


def test_a_copy_of_what_is_sent_needs_room() -> None:
    """Without it trained parameters are sent when they move."""
    first = run_ranks(trains_without_room, 2)[0]
    assert first["bytes"] == 4 * (3 * 4 * (WIDTH + 1) + 2)
    assert first["paused_bytes"] == 4 * 4 * (WIDTH + 1)


def trains_without_room() -> Any:
    from paceline.runtime import migration

    migration.room_bytes = lambda *_: 0
    return trains_ahead(0.1)[1]


def fails(what: str) -> tuple[str, list[str], list[int], bool]:
    from paceline.runtime import migration

    options: dict[str, dict[str, Any]] = {
        "make": {"fails": 2},
        "make second": {"old": [0, 1, 4], "fails": 2},
    }
    rank = Rank(**options.get(what, {}))
    rank.train()
    before = rank.state()
    state = next(iter(rank.optimizer.state.values()))
    error: BaseException | None = None
    try:
        if what == "state" and rank.stage == 1:
            state["history"] = [1.0, 2.0]
        if what == "transfer":
            migration.carry_out = _breaks
        asked = [0, 1, 4] if what == "other" and rank.stage == 1 else NEW
        new = rank.migrator.agree([0, 9, 4] if what == "boundaries" else asked)
        assert new == NEW
        rank.migrator.migrate(new, 0 if what == "memory" else None)
    except (ValueError, RuntimeError) as caught:
        error = caught
    state.pop("history", None)
    after = rank.state()
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return str(error), rank.events, rank.layers.unmade, same


def _breaks(*_: Any, **__: Any) -> None:
    raise RuntimeError("no route to host")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("boundaries", "[0, 9, 4] are no boundaries"),
        ("other", "ranks ask for different partitions, [[0, 3, 4], [0, 1, 4]]"),
        ("make", "layer 2 cannot be made"),
        ("state", "state 'history' of a parameter is a list: only tensors and numbers can be saved and moved"),
        (
            "memory",
            "partition [0, 3, 4] does not fit: stage 0 would take 0.0 MiB more for layer 2 and has room for 0.0",
        ),
    ],
)
def test_what_cannot_move_stays_on_all_ranks(what: str, message: str) -> None:
    for error, events, _, same in run_ranks(fails, 2, what):
        assert message in error
        assert "enter" not in events
        assert same


def finds_room() -> list[str]:
    """A layer of 64 bytes, with three times as many of gradients and moments."""
    rank, found = Rank(), []
    rank.train()
    for memory_bytes in (3 * 64, 5 * 64):
        try:
            rank.migrator.migrate(NEW, memory_bytes)
            found.append("moved")
        except ValueError:
            found.append("stayed")
    return found


def test_a_layer_needs_room_for_its_states_too() -> None:
    assert run_ranks(finds_room, 2) == [["stayed", "moved"]] * 2


def test_layers_that_were_made_are_let_go_where_another_cannot_be() -> None:
    assert [unmade for _, _, unmade, _ in run_ranks(fails, 2, "make second")] == [[1], []]


def test_what_breaks_on_the_way_is_noted_and_nobody_goes_on() -> None:
    for error, events, _, _ in run_ranks(fails, 2, "transfer"):
        assert error == "no route to host"
        assert events == ["enter", "layers were being moved: no route to host"]


def test_ranks_of_a_stage_tell_their_experts_apart() -> None:
    """All have the rest of a layer alike; copies are of so many experts as there are slots for them."""
    seat = Seat(3, 1, 0, slice_name=" (slice 1)", share_name=" (experts 2)", num_copies=3)
    dense, experts = nn.Parameter(torch.zeros(4, 5)), nn.Parameter(torch.zeros(4, 5))
    setattr(experts, SPREAD, True)
    assert [seat.suffix(tensor) for tensor in (dense, experts)] == [" (slice 1)", " (slice 1) (experts 2)"]
    assert [seat.copied_bytes(tensor) for tensor in (dense, experts)] == [0, 3 * 5 * 4]
