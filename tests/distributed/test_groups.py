"""Process groups where the default one is bound to a device, as DeepSpeed binds NCCL's: counted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.groups import MANY, groups_here
from support.ranks import run_ranks


class Splits:
    """In the place of the communicator of NCCL's that torch splits: counts who takes part in how many splits."""

    supports_splitting = True

    def __init__(self) -> None:
        self.count = 0

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.count += 1


def bound_job(splits: Splits) -> Any:
    """A job of gloo's whose default group says of itself what one of NCCL's says that is bound to a device."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.distributed_c10d._get_split_source = lambda group: splits
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # type: ignore[union-attr]
    return dist


def splits_of_each_rank(stages: int) -> dict[str, Any]:
    from paceline.comm.control import ControlPlane
    from paceline.comm.shapes import Shapes, meta_of
    from paceline.comm.transport import Transport

    splits = Splits()
    dist = bound_job(splits)
    rank, size = dist.get_rank(), dist.get_world_size()
    pipes = [list(range(replica, size, size // stages)) for replica in range(size // stages)]
    calls = 0
    new_group = dist.new_group

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return new_group(*args, **kwargs)

    dist.new_group = counting
    control = ControlPlane.create(stages, pipes=pipes)
    transport = Transport(pipes, rank, order="free", device=torch.device("cpu"), activation_shapes=Shapes)
    found: dict[str, Any] = {"splits": splits.count, "calls": calls, "bound": str(dist.group.WORLD.bound_device_id)}
    found["bound groups"] = [str(group.bound_device_id) for group in (control.world, control.pipe)]
    found["groups"] = len({id(lane.group) for lane in transport.lanes().values()})
    # Both ways of every edge at once.
    lanes, value = transport.lanes(), torch.full((3,), float(rank))
    keys = {"activations": "all", "gradients": meta_of(value)}
    for name in keys:
        if f"{name}_out" in lanes:
            lanes[f"{name}_out"].send(0, keys[name], value)
    for name in keys:
        if f"{name}_in" in lanes:
            lanes[f"{name}_in"].post(0, keys[name])
            found[name] = lanes[f"{name}_in"].take(0)[0].item()  # type: ignore[union-attr]
    found["sum"] = control.sum_over_stages(torch.tensor([rank])).item()
    transport.close()
    dist.group.WORLD.bound_device_id = None
    return found


@pytest.mark.parametrize(("num_ranks", "stages"), [(3, 3), (4, 2), (5, 5)])
def test_ranks_of_a_bound_job_split_nothing_for_groups_of_gloos(num_ranks: int, stages: int) -> None:
    """Outsiders would, and insiders would not: the job would hang."""
    found = run_ranks(splits_of_each_rank, num_ranks, stages)
    assert [one["splits"] for one in found] == [0] * num_ranks
    assert all(one["bound"] == "cuda:0" for one in found)
    assert all(one["bound groups"] == ["None", "None"] for one in found)


def test_lanes_take_few_groups_and_each_its_own() -> None:
    found = run_ranks(splits_of_each_rank, 5, 5)
    assert {one["calls"] for one in found} == {2 + 4}, "a control plane has two"
    assert [one["groups"] for one in found] == [2, 4, 4, 4, 2]
    for rank, one in enumerate(found):
        assert one.get("activations") == (rank - 1 if rank > 0 else None)
        assert one.get("gradients") == (rank + 1 if rank < 4 else None)
        assert one["sum"] == 10


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 1), (8, 2), (32, 3)])
def test_calls_of_new_group_do_not_grow_with_stages(
    stages: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.comm import transport

    calls: list[Any] = []
    monkeypatch.setattr(transport, "gloo_group", lambda ranks, timeout: calls.append(ranks) or len(calls))
    pipes = [list(range(replica, stages * replicas, replicas)) for replica in range(replicas)]
    for number, pipe in enumerate(pipes):
        for stage, rank in enumerate(pipe):
            calls.clear()
            groups = transport._free_groups(pipes, rank)
            assert len(calls) == replicas * min(4, 2 * (stages - 1)), "every rank takes part in all of them"
            assert len(groups) == 2 * (stages - 1)
            ways = [edge for edge in groups if stage in edge]
            assert len({groups[edge] for edge in ways}) == len(ways), "no two lanes of a rank share a group"
            assert {tuple(calls[group - 1]) for group in groups.values()} == {tuple(pipes[number])}


@pytest.mark.parametrize("pipe", [(0, 1, 2, 0, 1, 2), (0, 1, 0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 1, 2, 3, 0, 1, 2, 3)])
def test_a_rank_with_several_stages_has_a_group_for_each_lane(
    pipe: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.comm import transport

    calls: list[Any] = []
    monkeypatch.setattr(transport, "gloo_group", lambda ranks, timeout: calls.append(ranks) or len(calls))
    groups = transport._free_groups([pipe], 0)
    crossing = [s for s in range(len(pipe) - 1) if pipe[s] != pipe[s + 1]]
    assert groups.keys() == {way for s in crossing for way in ((s, s + 1), (s + 1, s))}
    for rank in set(pipe):
        own = [groups[way] for way in groups if rank in (pipe[way[0]], pipe[way[1]])]
        assert len(set(own)) == len(own), "two threads of a rank would use one group at once"
    assert all(ranks == sorted(set(pipe)) for ranks in calls)


def engines_one_after_another(stages: int) -> list[int]:
    """Groups of a process after each of its engines."""
    import paceline
    from support.jobs import ds_config, model_config, step_batches

    found = []
    section = {"pipeline": {"stages": stages}}
    for _ in range(ENGINES):
        config = ds_config(gradient_accumulation_steps=2, paceline=section)
        engine, *_ = paceline.initialize(model=model_config(num_hidden_layers=2), config=config)
        engine.train_batch(iter(step_batches(0)))
        engine.destroy()
        del engine
        found.append(len(groups_here()))
    return found


ENGINES = 12


@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (2, 1)])
def test_groups_of_engines_that_are_gone_are_ended(ranks: int, stages: int) -> None:
    """Each has sockets: a notebook that makes engines again and again would run out of files."""
    for found in run_ranks(engines_one_after_another, ranks, stages):
        assert max(found) <= (MANY + 2) * found[0] < ENGINES * (found[0] - 1), found  # one is torch's own


def engines_whose_layers_moved() -> list[int]:
    """Groups of a process after each of its engines, none of which is still there."""
    import gc

    import paceline
    from support.jobs import ds_config, model_config, step_batches

    found = []
    for _ in range(4):
        config = ds_config(gradient_accumulation_steps=2, paceline={"pipeline": {"stages": 2}})
        engine, *_ = paceline.initialize(model=model_config(num_hidden_layers=2), config=config)
        assert engine.repartition([0, 1, 4]) is not None, "nothing has moved"
        engine.train_batch(iter(step_batches(0)))
        engine.destroy()
        del engine
        gc.collect()
        found.append(len(groups_here()))
    return found


def test_the_group_that_layers_moved_over_ends_with_its_engine() -> None:
    """It is made when layers move for the first time."""
    for _, *found in run_ranks(engines_whose_layers_moved, 2):
        assert len(set(found)) == 1, f"after all engines but the first, {found}"


def engines_side_by_side() -> list[float]:
    """Losses of an engine that goes on while others come and go."""
    import paceline
    from support.jobs import MICRO_BATCHES, ds_config, model_config, step_batches

    section = {"pipeline": {"stages": 2}}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline=section)
    first, *_ = paceline.initialize(model=model_config(), config=config)
    losses = []
    for step in range(2):
        losses.append(first.train_batch(iter(step_batches(step))).item())
        other, *_ = paceline.initialize(model=model_config(), config=config)
        other.train_batch(iter(step_batches(step)))
        other.destroy()
        del other
    return losses


def test_an_engine_keeps_its_groups_while_others_come_and_go() -> None:
    from support.jobs import train

    assert run_ranks(engines_side_by_side, 2)[0] == run_ranks(train, 2, 2, steps=2)[0]["losses"]


def frees(stages: int, schedule: str, zero: int, is_destroyed: bool) -> bool:
    """Whether an engine is gone when nobody has it any more."""
    import gc
    import weakref

    import paceline
    from support.jobs import MICRO_BATCHES, ds_config, model_config, step_batches

    section = {"pipeline": {"stages": stages, "schedule": schedule}}
    zero_keys = {"zero_optimization": {"stage": zero}}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, paceline=section, **zero_keys)
    engine = paceline.initialize(model=model_config(), config=config)[0]
    for step in range(2):
        engine.train_batch(iter(step_batches(step)))
    engine.flush()
    if is_destroyed:
        engine.destroy()
    gone = weakref.ref(engine.module)
    del engine
    gc.collect()
    return gone() is None


@pytest.mark.parametrize("is_destroyed", [True, False])
@pytest.mark.parametrize(
    ("stages", "schedule", "zero"),
    [(2, "1f1b", 0), (1, "1f1b", 1), (2, "one_direction", 0), (2, "multidirection", 1)],
)
def test_engines_that_nobody_has_are_freed(stages: int, schedule: str, zero: int, is_destroyed: bool) -> None:
    """With replicas, and without a flush, hooks and a thread might keep them."""
    assert run_ranks(frees, 2, stages, schedule, zero, is_destroyed) == [True, True]
