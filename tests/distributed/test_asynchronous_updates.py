"""Asynchronous updates on several ranks: in every bit those of a step where they are in time, else an emulation's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.optim.gradient_buckets import Completes
from paceline.optim.max_change import Limits
from support.limited_steps import step_limited
from support.ranks import run_ranks

WIDTH, STEPS, MICRO_BATCHES = 6, 10, 2
NUM = 10
"""Parameters of the model, all of which are trained but one."""
BASICS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
LIMITS = Limits(layer=0.01, head=0.02, total=0.03, heads=frozenset({"stage1.2"}))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class Stages(nn.Module):
    """Two stages; a parameter that is never used, and one that some micro-batches use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stage0 = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.stage1 = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 5), nn.Linear(5, 1))
        self.stage1.unused = nn.Parameter(torch.ones(3))
        self.stage0.seldom = nn.Parameter(torch.ones(WIDTH))
        self.to(dtype)

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        x = self.stage0[2](torch.tanh(self.stage0[0](x)))
        if seldom:
            x = x * self.stage0.seldom
        return self.stage1[2](self.stage1[1](torch.tanh(x))).square().mean()

    def section(self, parameter: nn.Parameter) -> int:
        return 0 if any(parameter is p for p in self.stage0.parameters()) else 1


def make(asynchronous: bool, kind: str, dtype: str, owners: str, shard: bool, **options: Any) -> tuple[Stages, Any]:
    """The model and its optimizer, over all ranks; by direction, even ranks own stage 0 and odd ones stage 1."""
    from paceline.optim.buckets import Domain
    from paceline.optim.corrections import Corrections
    from paceline.optim.sharded import ShardedOptimizer
    from paceline.optim.step_options import StepOptions

    module = Stages(DTYPES[dtype])
    names = {parameter: name for name, parameter in sorted(module.named_parameters())}
    names = {p: name for name, p in sorted((name, p) for p, name in names.items())}
    world, rank = dist.get_world_size(), dist.get_rank()

    def domain(parameter: nn.Parameter) -> Domain:
        section = module.section(parameter)
        some = tuple(range(section, world, 2)) if owners == "direction" else None
        return Domain(dist.group.WORLD, world, rank, some, section)

    step_options = StepOptions(
        dist.group.WORLD,
        shard=shard,
        domain=domain,
        divisor=float(world * MICRO_BATCHES),
        bucket_numel=60,
        corrections=Corrections() if asynchronous else None,
        **options,
    )
    return module, ShardedOptimizer(BASICS[kind](names), names, step_options)


def batch(step: int, micro_batch: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    x = 3 * torch.randn(4, WIDTH, generator=generator)
    return x.to(dtype), rank == 1 and step % 3 == 2


def scaler() -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    return DynamicLossScaler(
        init_scale=2.0**4, scale_window=4, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False
    )


def train(module: Stages, optimizer: Any, asynchronous: bool, overflows: bool) -> list[Tensor]:
    """All weights, norms and scales of all steps."""
    found = []
    rank, dtype = dist.get_rank(), next(module.parameters()).dtype
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            loss = module(*batch(step, micro_batch, rank, dtype)) * optimizer.loss_scale
            if overflows and rank == 1 and step in (3, 4, 11):
                loss = loss * float("inf")
            is_last = micro_batch == MICRO_BATCHES - 1
            with optimizer.gradients.backward(Completes.ALL if is_last else Completes.NOTHING):
                loss.backward()
        if asynchronous:
            for section in (1, 0) if (step + rank) % 2 else (0, 1):  # not everywhere in the same order
                optimizer.updates.backward_complete(section)
            optimizer.updates.finish_step()
            optimizer.updates.apply()
        else:
            optimizer.step()
            optimizer.zero_grad()
        found += [parameter.detach().clone() for parameter in module.parameters()]
        change = optimizer.max_change_report or {"norm": -1.0, "num_limited": 0}
        told = [optimizer.outcome.grad_norm, optimizer.loss_scale, optimizer.overflow, *change.values()]
        found.append(torch.tensor(told))
    return found


CASES = {
    "fp32 by direction": ("adam", "fp32", "direction", True, 0.1, False),
    "bf16 by direction": ("adam", "bf16", "direction", True, 0.1, False),
    "bf16 by mirror": ("sgd", "bf16", "mirror", True, 0.0, False),
    "fp32 by mirror, overflows": ("sgd", "fp32", "mirror", True, 0.1, True),
    "fp32 by direction, limited": ("sgd", "fp32", "direction", True, 0.0, True),
    "bf16 by mirror, limited": ("adam", "bf16", "mirror", True, 0.1, False),
    "bf16, everything everywhere": ("adam", "bf16", "mirror", False, 0.1, True),
    "fp64, everything everywhere": ("sgd", "fp64", "direction", False, 0.0, False),
}


def in_time(names: list[str], overlaps: list[bool]) -> list[str]:
    """What differs from the synchronous step, of all cases."""
    import deepspeed

    deepspeed.init_distributed("gloo")  # the loss scaler asks it who is to tell
    wrong = []
    for name in names:
        kind, dtype, owners, shard, norm, overflows = CASES[name]
        results = []
        for asynchronous, overlap in ((False, True), *((True, overlap) for overlap in overlaps)):
            options = {"max_norm": norm, "overlap": overlap, "loss_scaler": scaler() if overflows else None}
            options["max_change"] = LIMITS if "limited" in name else None
            module, optimizer = make(asynchronous, kind, dtype, owners, shard, **options)
            results.append(train(module, optimizer, asynchronous, overflows))
            optimizer.destroy()
        for overlap, result in zip(overlaps, results[1:], strict=True):
            same = [torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(results[0], result, strict=True)]
            if not all(same):
                wrong.append(f"{name}, overlap={overlap}: differs first in result {same.index(False)}")
        num_moved = sum(not torch.equal(a, b) for a, b in zip(results[0][:NUM], results[0][-NUM - 1 : -1], strict=True))
        num_limited = max(int(told[-1]) for told in results[0][NUM :: NUM + 1])
        if (num_limited > 0) != ("limited" in name):
            wrong.append(f"{name}: {num_limited} layers were limited")
        if num_moved < NUM - 2:  # one is never used; in bf16 the one that is seldom used may not move
            wrong.append(f"{name}: only {num_moved} parameters have moved")
    return wrong


@pytest.mark.parametrize(
    ("num_ranks", "names", "overlaps"),
    [(2, list(CASES), [True]), (2, list(CASES)[2:5], [False]), (4, list(CASES)[:6:3], [True])],
)
def test_in_time_they_equal_the_step_in_every_bit(num_ranks: int, names: list[str], overlaps: list[bool]) -> None:
    assert run_ranks(in_time, num_ranks, names, overlaps) == [[]] * num_ranks


def whole_precision() -> list[str]:
    """Gradients that are accumulated in less precision than values have, or travel in less."""
    dist.init_process_group("gloo")
    wrong = []
    for accumulation, communication in (("bf16", "bf16"), ("fp32", "bf16"), ("fp64", None)):
        results = []
        for asynchronous in (False, True):
            options = {
                "accumulation_dtype": DTYPES[accumulation],
                "communication_dtype": None if communication is None else DTYPES[communication],
            }
            module, optimizer = make(asynchronous, "adam", "fp32", "direction", True, **options)
            results.append(train(module, optimizer, asynchronous, False))
            optimizer.destroy()
        if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
            wrong.append(f"{accumulation} {communication}")
    return wrong


def test_other_precisions_of_gradients() -> None:
    assert run_ranks(whole_precision, 2) == [[], []]


def synchronous(owners: str, shard: bool) -> list[Tensor]:
    dist.init_process_group("gloo")
    module, optimizer = make(False, "adam", "fp32", owners, shard)
    found = train(module, optimizer, False, False)
    optimizer.destroy()
    return found


def test_who_owns_what_does_not_matter_to_a_synchronous_step() -> None:
    wanted, _ = run_ranks(synchronous, 2, "mirror", False)
    for found in run_ranks(synchronous, 2, "direction", True):
        for value, other in zip(found[: 5 * (NUM + 1)], wanted, strict=False):
            torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-7)


def memory(owners: str) -> tuple[int, dict[str, int], float]:
    """Bytes of states, the same by stage, and seconds of collectives that were waited for."""
    from paceline.measure.clock import Clock

    dist.init_process_group("gloo")
    module, optimizer = make(True, "adam", "fp32", owners, True)
    optimizer.clock = Clock(torch.device("cpu"))
    train(module, optimizer, True, False)
    held: dict[str, int] = {}
    for owned in optimizer.owned:
        state = optimizer.state.get(owned.master, {})
        tensors = [owned.master, *(value for value in state.values() if value.dim())]
        stage = owned.name.split(".")[0]
        held[stage] = held.get(stage, 0) + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    communication_s = optimizer.clock.read()["communication_s"]
    optimizer.destroy()
    return sum(held.values()), held, communication_s


def test_by_direction_a_rank_has_the_state_of_one_stage() -> None:
    torch.manual_seed(0)
    module = Stages(torch.float32)
    wanted = {}
    for name, parameter in module.named_parameters():
        copies = 1 if name.endswith("unused") else 3  # a master and two moments, if it was ever stepped
        stage = name.split(".")[0]
        wanted[stage] = wanted.get(stage, 0) + 4 * copies * parameter.numel()
    (_, first, _), (_, second, _) = by_direction = run_ranks(memory, 2, "direction")
    assert first == {"stage0": wanted["stage0"]}
    assert second == {"stage1": wanted["stage1"]}
    by_mirror = run_ranks(memory, 2, "mirror")
    totals = [sum(total for total, *_ in ranks) for ranks in (by_direction, by_mirror)]
    assert totals == [sum(wanted.values())] * 2
    assert all(len(held) == 2 for _, held, _ in by_mirror)
    assert all(communication_s > 0 for *_, communication_s in (*by_direction, *by_mirror))


def late(most_pending: int, owners: str, kind: str, limits: Limits | None) -> list[Tensor]:
    """Updates are applied before the first micro-batch at which more than ``most_pending`` wait, or after it."""
    dist.init_process_group("gloo")
    module, optimizer = make(True, kind, "fp64", owners, True, max_norm=0.5, max_change=limits)
    rank, found = dist.get_rank(), []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            loss = module(*batch(step, micro_batch, rank, torch.float64))
            if micro_batch == step % MICRO_BATCHES and len(optimizer.updates.pending) > most_pending - 1:
                optimizer.updates.apply()  # between a forward and its backward
            loss.backward()
        optimizer.updates.backward_complete(1)
        optimizer.updates.backward_complete(0)
        optimizer.updates.finish_step()
        found += [parameter.detach().clone() for parameter in module.parameters()]
    while optimizer.updates.pending:
        optimizer.updates.apply()
    optimizer.destroy()
    return [*found, *(parameter.detach().clone() for parameter in module.parameters())]


def emulated(num_ranks: int, most_pending: int, kind: str, limits: Limits | None) -> list[Tensor]:
    """The same by hand: one process, weights of every version kept, ``torch.optim`` as it is."""
    module, newest = Stages(torch.float64), Stages(torch.float64)
    optimizer = BASICS[kind](newest.parameters())
    weights, pending, found = list(module.parameters()), [], []
    for step in range(STEPS):
        totals: list[Tensor | None] = [None] * len(weights)
        for micro_batch in range(MICRO_BATCHES):
            losses = [module(*batch(step, micro_batch, rank, torch.float64)) for rank in range(num_ranks)]
            if micro_batch == step % MICRO_BATCHES and len(pending) > most_pending - 1:
                for weight, value in zip(weights, pending.pop(0), strict=True):
                    weight.data.copy_(value)  # autograd is not told
            for loss in losses:
                for number, gradient in enumerate(torch.autograd.grad(loss, weights, allow_unused=True)):
                    if gradient is not None:
                        total = totals[number]
                        totals[number] = gradient if total is None else total + gradient
        for parameter, total in zip(newest.parameters(), totals, strict=True):
            parameter.grad = None if total is None else total / (num_ranks * MICRO_BATCHES)
        torch.nn.utils.clip_grad_norm_([p for p in newest.parameters() if p.grad is not None], 0.5)
        if limits is None:
            optimizer.step()
        else:
            step_limited(optimizer, dict(newest.named_parameters()), limits)
        pending.append([parameter.detach().clone() for parameter in newest.parameters()])
        found += [weight.detach().clone() for weight in weights]
    return [*found, *pending[-1]]


@pytest.mark.parametrize(
    ("num_ranks", "most_pending", "owners", "kind", "limits"),
    [
        (2, 1, "direction", "adam", None),
        (2, 3, "mirror", "sgd", None),
        (2, 2, "direction", "adam", LIMITS),
        (4, 2, "direction", "sgd", None),
        (4, 1, "mirror", "sgd", LIMITS),
        (1, 2, "mirror", "adam", None),
    ],
)
def test_late_they_equal_an_emulation(
    num_ranks: int, most_pending: int, owners: str, kind: str, limits: Limits | None
) -> None:
    wanted = emulated(num_ranks, most_pending, kind, limits)
    for found in run_ranks(late, num_ranks, most_pending, owners, kind, limits):
        for value, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-12)


def tied(asynchronous: bool) -> list[Tensor]:
    """Two stages of two replicas; a weight is in both stages, and one replica's backward does not reach it."""
    from paceline.optim.corrections import Corrections
    from paceline.optim.sharded import ShardedOptimizer
    from paceline.optim.step_options import StepOptions

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage, replica = rank % 2, rank // 2
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][stage]
    copies = [dist.new_group([0, 1]), dist.new_group([2, 3])][replica]
    torch.manual_seed(0)
    weight, other = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4) + stage)
    names = {weight: "tied.weight", other: "other.weight"}
    optimizer: Any = ShardedOptimizer(
        torch.optim.Adam(names, lr=0.1),
        names,
        StepOptions(
            replicas,
            copies,
            max_norm=1.0,
            corrections=Corrections() if asynchronous else None,
            ties=lambda: [(weight, copies)],
        ),
        apart=lambda parameter: parameter is weight,
        counts=lambda parameter: parameter is not weight or stage == 0,
    )
    for step in range(4):
        x = torch.randn(3, generator=torch.Generator().manual_seed(10 * step + rank))
        ((weight @ x).square().sum() * (rank + 1) if rank != 3 else 0 * other.sum()).backward()
        (other.square().sum() * (replica + 1)).backward()
        if asynchronous:
            optimizer.updates.backward_complete(0)
            optimizer.updates.finish_step()
            optimizer.updates.apply()
        else:
            dist.all_reduce(optimizer.gradients.of(weight), group=copies)
            optimizer.step()
            optimizer.zero_grad()
    found = [weight.detach().clone(), other.detach().clone()]
    optimizer.destroy()
    return found


def test_tied_weights_stay_alike() -> None:
    found = run_ranks(tied, 4, True)
    for values, wanted in zip(found, run_ranks(tied, 4, False), strict=True):
        assert all(torch.equal(value, other) for value, other in zip(values, wanted, strict=True))
    assert all(torch.equal(found[0][0], values[0]) for values in found)


def left(overlap: bool) -> list[str]:
    """One rank ends while the other is within a collective."""
    dist.init_process_group("gloo")
    dist.barrier()  # both are there: the end of the other could come while this one is still being connected
    module, optimizer = make(True, "adam", "fp32", "mirror", True, overlap=overlap)
    module(*batch(0, 0, dist.get_rank(), torch.float32)).backward()
    said = []
    if dist.get_rank() == 0:
        try:
            optimizer.updates.backward_complete(1)
            optimizer.updates.backward_complete(0)
            optimizer.updates.finish_step()
            optimizer.updates.apply()
        except RuntimeError as error:
            said.append(str(error))
        try:
            optimizer.updates.backward_complete(0)  # and nothing is begun any more
        except RuntimeError as error:
            said.append(str(error))
    optimizer.destroy()
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("overlap", [True, False])
def test_what_goes_wrong_beside_the_computation_is_told(overlap: bool) -> None:
    said, _ = run_ranks(left, 2, overlap)
    assert len(said) == 2
    assert said[0] == said[1]
    assert "gloo" in said[0].lower()
