"""What ranks hold gets to where it is wanted: of any types, in rounds of any size, also into memory that is read."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from support.ranks import run_ranks

NUM_RANKS, NAMES = 3, 8
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def truth(name: int) -> Tensor:
    """The whole tensor of a name, as all ranks know it."""
    generator = torch.Generator().manual_seed(name)
    values = torch.randint(0, 100, (4 * (3 + name),), generator=generator)
    return values.to(DTYPES[name % len(DTYPES)])


def move_all(seed: int, round_bytes: int, packed_bytes: int, members: list[int]) -> list[str]:
    """Random ranges between the ranks of a group; returns what has not come as it should."""
    from torch import distributed as dist

    from paceline.state import exchange
    from paceline.state.exchange import Held, Move, Transfer, Wanted, carry_out, in_rounds, plan_moves, stretch
    from paceline.state.named import VALUE

    exchange.PACKED_BYTES = packed_bytes
    dist.init_process_group("gloo")
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return []
    rank, size = dist.get_rank(group), len(members)
    chance = random.Random(seed)
    held: list[list[Held]] = [[] for _ in range(size)]
    wanted: list[list[Wanted]] = [[] for _ in range(size)]
    for name in range(NAMES):
        rows, cut = 3 + name, chance.randrange(3 + name)
        for owner, (start, stop) in zip(chance.sample(range(size), 2), ((0, cut), (cut, rows)), strict=True):
            held[owner].append(Held(str(name), VALUE, 4 * start, 4 * stop, truth(name).dtype))
        for target in range(size):
            start = chance.randrange(rows)
            wanted[target].append(Wanted(str(name), 4 * start, 4 * chance.randint(start + 1, rows), VALUE))
    own = [truth(int(entry.name))[entry.start : entry.stop] for entry in held[rank]]
    # Rows of four elements that are not neighbours in memory, on some of the ranks.
    own = [t.view(-1, 4).t().contiguous().t() if chance.random() < 0.5 else t for t in own]
    places = [torch.zeros(wish.stop - wish.start, dtype=truth(int(wish.name)).dtype) for wish in wanted[rank]]
    places = [t.view(-1, 4).t().contiguous().t() if chance.random() < 0.5 else t for t in places]

    def transfer(move: Move) -> Transfer:
        entry, wish, at = held[move.source][move.held], wanted[move.target][move.wanted], (move.start, move.stop)
        leaving = stretch(own[move.held], entry.start, *at) if move.source == rank else None
        place = stretch(places[move.wanted], wish.start, *at) if move.target == rank else None
        return Transfer(move.source, move.target, leaving, place)

    moves = plan_moves(held, wanted, [0] * size)
    rounds = [[transfer(m) for m in moves if rank in (m.source, m.target)] for moves in in_rounds(moves, round_bytes)]
    told: list[int] = []
    carry_out(rounds, torch.device("cpu"), group=group, progress=lambda: told.append(1))
    away = [
        ((number, t.source, t.target), t.num_bytes < packed_bytes)
        for number, found in enumerate(rounds)
        for t in found
        if t.source != t.target
    ]
    num_messages = len({pair for pair, is_small in away if is_small}) + sum(not is_small for _, is_small in away)
    wrong = [] if len(told) == num_messages else [f"{len(told)} messages instead of {num_messages}"]
    for place, wish in zip(places, wanted[rank], strict=True):
        if not torch.equal(place.reshape(-1), truth(int(wish.name))[wish.start : wish.stop]):
            wrong.append(f"rank {rank}: {wish}")
    return wrong


@pytest.mark.parametrize(("round_bytes", "packed_bytes"), [(1, 1 << 17), (100, 40), (1 << 20, 60), (1 << 20, 1 << 17)])
@pytest.mark.parametrize("members", [[0, 1, 2], [2, 0]], ids=["world", "group"])
def test_all_that_is_wanted_arrives_small_pieces_together(
    round_bytes: int, packed_bytes: int, members: list[int]
) -> None:
    for seed in range(2):
        assert run_ranks(move_all, NUM_RANKS, seed, round_bytes, packed_bytes, members) == [[]] * NUM_RANKS


def rotate() -> list[float]:
    """Each rank sends its memory on and takes what comes into the same memory, beside a swap of its own."""
    from torch import distributed as dist

    from paceline.state.exchange import Transfer, carry_out

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    memory = torch.arange(4.0) + 10 * rank
    after, before = (rank + 1) % NUM_RANKS, (rank - 1) % NUM_RANKS
    first = [
        Transfer(rank, after, memory[:1], None),
        Transfer(before, rank, None, memory[:1]),
        Transfer(rank, rank, memory[2:3], memory[3:]),
        Transfer(rank, rank, memory[3:], memory[2:3]),
    ]
    second = [Transfer(rank, before, memory[1:2], None), Transfer(after, rank, None, memory[1:2])]
    carry_out([first, second], memory.device, in_place=True)
    return memory.tolist()


def test_memory_that_is_read_takes_what_arrives_afterwards() -> None:
    for rank, found in enumerate(run_ranks(rotate, NUM_RANKS)):
        assert found == [10 * ((rank - 1) % 3), 10 * ((rank + 1) % 3) + 1, 10 * rank + 3, 10 * rank + 2]
