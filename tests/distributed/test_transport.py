"""What can go wrong between the stages while both compute: memory, shapes, layouts, ends and errors."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.jobs import ds_config
from support.ranks import RankError, run_ranks

WIDTH, MICRO_BATCHES, ROWS = 8, 4, 12
SLOW_S = 0.1
"""How late a slowed lane begins each message: later than the computation that may spoil it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def square(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.float().pow(2).mean()


def batches(step: int, num: int = MICRO_BATCHES, rows: tuple[int, ...] = (2,)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(rows[i % len(rows)], WIDTH, generator=generator), torch.zeros(1)) for i in range(num)]


def engine_of(
    layers: list[type[nn.Module]],
    *,
    stock: bool = False,
    order: str | None = None,
    schedule: Any = None,
    topology: Any = None,
    micro_batches: int = MICRO_BATCHES,
    **module_options: Any,
) -> Any:
    """An engine for ``layers``, as many on each stage; DeepSpeed's own, or ours with an order of communication."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import paceline
    from paceline.runtime.engine import PacelineEngine

    deepspeed.init_distributed()
    shape = {"num_stages": int(os.environ["WORLD_SIZE"])} if topology is None else {"topology": topology}
    module_options.setdefault("loss_fn", square)
    module = PipelineModule(
        layers=[LayerSpec(layer) for layer in layers],
        partition_method="uniform",
        seed_layers=True,
        **shape,
        **module_options,
    )
    section = {} if schedule is None else {"paceline": {"pipeline": {"schedule": schedule}}}
    config = ds_config(
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=micro_batches,
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        **section,
    )
    PacelineEngine.transport_order = order
    try:
        engine, *_ = (deepspeed if stock else paceline).initialize(
            model=module, model_parameters=list(module.parameters()), config=config
        )
    finally:
        PacelineEngine.transport_order = None
    return engine


def trained(engine: Any, steps: int = 3, rows: tuple[int, ...] = (2,)) -> tuple[list[float], list[Tensor]]:
    """Losses of some steps, and the weights after them, of one rank."""
    replica = engine.grid.data_parallel_id
    losses = [engine.train_batch(iter(batches(100 * replica + step, rows=rows))).item() for step in range(steps)]
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    if hasattr(engine, "transport"):
        engine.destroy()
    return losses, weights


def assert_same(results: list[Any]) -> None:
    """On every rank: first what DeepSpeed's engine gives, then what ours must give, bit by bit."""
    for (wanted_losses, wanted), *others in results:
        for losses, weights in others:
            assert losses == wanted_losses
            for found, parameter in zip(weights, wanted, strict=True):
                assert torch.equal(found, parameter)


def slow(lane: Any, seconds: float = SLOW_S) -> None:
    begin = lane._begin

    def begin_late(message: Any) -> None:
        time.sleep(seconds)
        begin(message)

    lane._begin = begin_late
    lane.at_once_bytes = -1  # its thread begins them, while this one computes on


# -- memory that is written to while it is sent -----------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Position(nn.Module):
    """With one row, autograd gives the position and the input one gradient, in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position.unsqueeze(0)


def shared_gradients() -> list[Any]:
    results = [trained(engine_of([Scale, Position], stock=True), rows=(1,))]
    for order in (None, "paired"):
        engine = engine_of([Scale, Position], order=order, schedule="gpipe")
        if order is None and engine.is_last_stage():
            slow(engine.transport["gradients_out"])
        results.append(trained(engine, rows=(1,)))
    return results


def test_a_gradient_that_is_sent_is_not_added_to() -> None:
    assert_same(run_ranks(shared_gradients, 2))


class Workspace(nn.Module):
    """Evaluates into the same memory each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("place", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        place: Tensor = torch.mul(x, self.weight, out=self.place)  # type: ignore[call-overload]
        return place


class Pair(Workspace):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.place[:1]


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Tensor:
        x = x[0] + x[1] if isinstance(x, tuple) else x
        return x.sum()


def workspace(layer: type[nn.Module]) -> tuple[Any, Any]:
    found = []
    for stock in (True, False):
        engine = engine_of([layer, Total], stock=stock, loss_fn=None)
        if not stock and engine.is_first_stage():
            slow(engine.transport["activations_out"])
        outputs = engine.eval_batch(iter(batches(0)), compute_loss=False, reduce_output=None)
        found.append(outputs and [output.item() for output in outputs])
    return found[0], found[1]


@pytest.mark.parametrize("layer", [Workspace, Pair])
def test_a_layer_may_give_out_the_same_memory_again(layer: type[nn.Module]) -> None:
    (_, nothing), (wanted, found) = run_ranks(workspace, 2, layer)
    assert nothing is None
    assert len(set(wanted)) == MICRO_BATCHES
    assert found == wanted


def held() -> list[int]:
    """The most messages that were kept between two batches of a step, and those after it."""
    engine = engine_of([Block, Block], order="paired", micro_batches=16)
    sent, kept = engine.transport._batch._sent, []
    flush = engine.transport.flush

    def counting() -> None:
        flush()
        kept.append(len(sent))

    engine.transport.flush = counting
    engine.train_batch(iter(batches(0, 16)))
    return [max(kept), len(sent)]


def test_paired_order_lets_go_of_what_was_sent_by_the_end_of_a_step() -> None:
    """Gloo calls a send completed once it was waited for: only there are they kept until the step ends."""
    for most, after in run_ranks(held, 2):
        assert most > 0
        assert after == 0


def timed_steps() -> list[int]:
    """How many times of steps are kept, of all that DeepSpeed times, after each of some steps."""
    engine = engine_of([Block, Block])
    kept = []
    for step in range(3):
        engine.train_batch(iter(batches(step)))
        kept.append(sum(len(timer.event_timers) for timer in engine.timers.get_timers().values()))
    return kept


def test_times_that_nobody_prints_are_not_kept() -> None:
    assert run_ranks(timed_steps, 2) == [[0, 0, 0]] * 2


def shares_a_group() -> bool:
    engine = engine_of([Block, Block], order="paired")
    return all(lane.group is engine.grid.pp_proc_group for lane in engine.transport.lanes().values())


def test_paired_order_takes_deepspeeds_group_of_the_pipeline() -> None:
    assert run_ranks(shares_a_group, 2) == [True, True]


# -- what a device does behind the host: events in the place of the host's clock ---------------------------------------

BATCH_S = 0.002


class Event:
    """As CUDA's: the host asks for it afterwards."""

    def __init__(self, at_s: float | None = None) -> None:
        self.at_s, self.is_waited_for = at_s, False

    def synchronize(self) -> None:
        self.is_waited_for = True

    def elapsed_time(self, last_s: float) -> float:
        if not self.is_waited_for:
            raise RuntimeError("asked for before it happened")
        assert self.at_s is not None
        return (last_s - self.at_s) * 1e3


class Times:
    """Of a device that ends a batch two milliseconds after the host knows of it."""

    def now(self) -> Event:
        return Event(time.perf_counter())

    def done(self, works: list[Any]) -> Event:
        assert works
        return Event()  # known once they are done


def timed_by_events() -> Any:
    from paceline.comm import transport
    from paceline.runtime.measured_costs import MeasuredCosts
    from paceline.runtime.rank_reports import COMPARISONS

    note = transport.Lane.note

    def note_end(lane: Any, message: Any) -> None:
        message.done_s.at_s = message.done_s.at_s or time.perf_counter() + BATCH_S
        note(lane, message)

    transport.Lane.note = note_end  # type: ignore[method-assign]
    transport.work_times = lambda device: Times()  # type: ignore[assignment]
    engine = engine_of([Block, Block], order="paired")
    engine.reports.clocks.extend([(0.0, 0.0)] * COMPARISONS)  # measured, a latency may be longer than a batch
    for step in range(3):
        engine.train_batch(iter(batches(step)))
    seconds = {
        record.done_s.at_s - record.begun_s.at_s
        for lane in engine.transport.lanes().values()
        for record in lane.records
    }
    reports = engine.reports.gather({})
    costs = None
    if engine.global_rank == 0:
        knowledge = MeasuredCosts(((0, 1),))
        knowledge.update(reports)
        costs = knowledge.costs(2)
    engine.destroy()
    return min(seconds), max(seconds), costs


def test_in_the_paired_order_links_are_measured_by_the_devices_events() -> None:
    """Where NCCL communicates behind the host, whose clock tells nothing of it, the planner still sees its links."""
    (least, most, costs), (other_least, other_most, nothing) = run_ranks(timed_by_events, 2)
    assert nothing is None
    assert min(least, other_least) >= BATCH_S
    num_bytes = 2 * WIDTH * 4
    assert costs.message_bytes == (num_bytes,)
    for link in (*costs.down, *costs.up):
        assert num_bytes / (2 * max(most, other_most)) < link.bytes_per_s < float("inf")


# -- shapes and layouts -----------------------------------------------------------------------------------------------


class Drop(nn.Module):
    """How many rows it passes on depends on what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[x[:, 0] > 0])


def dropping() -> list[Any]:
    options = {"dynamic_shape": True}
    results = [trained(engine_of([Drop, Block], stock=True, **options), rows=(ROWS,))]
    results += [
        trained(engine_of([Drop, Block], order=order, schedule=schedule, **options), rows=(ROWS,))
        for order in (None, "paired")
        for schedule in ("1f1b", "gpipe")
    ]
    return results


def test_shapes_that_depend_on_contents() -> None:
    assert_same(run_ranks(dropping, 2))


def replicas_first() -> Any:
    from deepspeed.runtime.pipe.topology import ProcessTopology

    results, ranks = [], -1
    for options in ({"stock": True}, {}, {"order": "paired"}):
        topology = ProcessTopology(axes=["data", "pipe"], dims=[2, 2])
        engine = engine_of([Block, Block], topology=topology, dynamic_shape=True, **options)
        if not options.get("stock"):
            ranks = engine.control.sum_over_stages(torch.tensor([engine.global_rank])).item()
        results.append(trained(engine, rows=(2, 3, 2, 4)))
    return results, ranks


def test_pipelines_of_neighbouring_ranks() -> None:
    """The replicas outermost: a pipeline's ranks are 0 and 1, not 0 and 2."""
    ended = run_ranks(replicas_first, 4)
    assert_same([results for results, _ in ended])
    assert [ranks for _, ranks in ended] == [0 + 1, 0 + 1, 2 + 3, 2 + 3]


class Twice(nn.Module):
    """Checkpoints two uses of one weight by itself: its gradient arrives twice in each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = checkpoint(self.linear, x, use_reentrant=True)
        return x + torch.tanh(checkpoint(self.linear, x, use_reentrant=True))


def own_checkpoints(micro_batches: int) -> list[Any]:
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    options = {"topology": topology, "micro_batches": micro_batches}
    return [trained(engine_of([Block, Twice], stock=stock, **options)) for stock in (True, False)]


@pytest.mark.parametrize("micro_batches", [1, MICRO_BATCHES])
def test_a_weight_that_a_layer_checkpoints_twice(micro_batches: int) -> None:
    for (wanted_losses, wanted), (losses, weights) in run_ranks(own_checkpoints, 4, micro_batches):
        assert losses == pytest.approx(wanted_losses, rel=1e-6)
        for found, parameter in zip(weights, wanted, strict=True):
            torch.testing.assert_close(found, parameter, rtol=1e-5, atol=1e-6)


def model_axis() -> Any:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    results, looks = [], 0
    for options in ({"stock": True}, {"schedule": {"type": "adaptive", "retune_every": 2}}):
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
        engine = engine_of([Block, Block], topology=topology, **options)
        if not options.get("stock") and engine.global_rank == 0:
            knowledge = engine.controller.measurements.costs
        results.append(trained(engine, steps=9))
        if not options.get("stock") and engine.global_rank == 0:
            looks = len(knowledge._links)
    return results, looks


def test_the_tuner_tells_the_pipelines_of_a_model_axis_apart() -> None:
    ended = run_ranks(model_axis, 4)
    assert_same([results for results, _ in ended])
    assert [looks for _, looks in ended] == [2, 0, 0, 0]


# -- ends -------------------------------------------------------------------------------------------------------------


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:1, :1] * self.weight).expand(200_000, WIDTH).contiguous()


class Late(Total):
    """Has the first stage be at its end long before what it has sent is taken."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLOW_S)
        return x.sum()


def lanes_alive() -> int:
    return sum("of stage" in thread.name for thread in threading.enumerate())


def destroyed(root: str) -> dict[str, Any]:
    engine = engine_of([Large, Late], loss_fn=None)
    lanes = list(engine.transport.lanes().values())
    outputs = engine.eval_batch(iter(batches(0)), compute_loss=False, reduce_output=None)
    engine.destroy()
    found: dict[str, Any] = {
        "delivered": [len(lane.records) for lane in lanes if lane.is_sender],
        "outputs": outputs and [output.item() for output in outputs],
    }
    found["refuses"] = []
    acts: list[Callable[[], Any]] = [
        lambda: engine.save_checkpoint(root),
        engine.prepare_checkpoint,
        lambda: engine.load_checkpoint(root),
        lambda: engine.repartition([0, 1, 2]),
        lambda: engine.prepare_repartition([0, 1, 2]),
        lambda: engine.set_schedule(engine.schedule),
        lambda: engine.share_micro_batches([MICRO_BATCHES]),
        lambda: engine.place_experts({}),
        lambda: engine.eval_batch(iter(batches(1))),
        lambda: engine.train_batch(iter(batches(1))),
    ]
    for act in acts:
        try:
            act()
        except RuntimeError as error:
            found["refuses"].append(str(error))
    for order in (None, "paired", None):
        engine = engine_of([Block, Block], order=order)
        engine.train_batch(iter(batches(2)))
        engine.destroy()
    deadline = time.monotonic() + 60
    while lanes_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    found["lanes"] = lanes_alive()
    return found


def test_a_destroyed_engine_has_delivered_and_refuses_and_leaves_no_thread(tmp_path: Path) -> None:
    first, last = run_ranks(destroyed, 2, str(tmp_path))
    wanted = [x[0, 0].item() * 200_000 * WIDTH for x, _ in batches(0)]
    assert first["delivered"] == [MICRO_BATCHES]
    assert last["outputs"] == pytest.approx(wanted, rel=1e-3)
    for found in (first, last):
        refusal = "the engine was destroyed: it trains, saves and loads no more; make another one."
        assert found["refuses"] == [refusal] * 10
        assert found["lanes"] == 0


def ended_data() -> dict[str, Any]:
    """Data ends before the first micro-batch, half-way, and never; what is computed afterwards."""
    engine = engine_of([Block, Block])
    stops = 0
    found: dict[str, Any] = {"losses": [engine.train_batch(iter(batches(0))).item()]}
    total = None if engine.total_loss is None else engine.total_loss.item()
    for num in (0, MICRO_BATCHES // 2):
        try:
            engine.train_batch(iter(batches(7, num)))
        except StopIteration:
            stops += 1
        try:
            engine.eval_batch(iter(batches(7, num)))
        except StopIteration:
            stops += 1
    lanes = engine.transport.lanes().values()
    found["posted"] = sum(len(lane._arriving) + len(lane._unknown) for lane in lanes)
    found["losses"].append(engine.eval_batch(iter(batches(1))).item())
    found["total"] = (total, None if engine.total_loss is None else engine.total_loss.item())
    found["losses"].append(engine.train_batch(iter(batches(2))).item())
    found["stops"] = stops

    engine = engine_of([Block, Block])
    wanted = [engine.train_batch(iter(batches(0)))]
    wanted.append(engine.eval_batch(iter(batches(1))))
    wanted.append(engine.train_batch(iter(batches(2))))
    found["wanted"] = [loss.item() for loss in wanted]
    return found


def test_data_that_ends_leaves_an_engine_that_goes_on() -> None:
    for found in run_ranks(ended_data, 2):
        assert found["stops"] == 4
        assert found["posted"] == 0
        assert found["losses"] == found["wanted"]
        assert found["total"][0] == found["total"][1]


# -- errors -----------------------------------------------------------------------------------------------------------


class Breaks(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ArithmeticError("no more numbers")
        return super().forward(x)


def half_way() -> list[str]:
    engine = engine_of([Block, Breaks])
    engine.train_batch(iter(batches(0)))
    told = []
    acts: list[Callable[[], Any]] = [
        lambda: engine.eval_batch(iter(batches(1)), compute_loss=False, reduce_output=None),
        lambda: engine.eval_batch(iter(batches(1))),
        lambda: engine.train_batch(iter(batches(2))),
    ]
    for act in acts if engine.is_last_stage() else acts[:1]:
        try:
            act()
        except (ArithmeticError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_an_engine_refuses_to_go_on_after_a_step_that_broke() -> None:
    first, (broke, *refused) = run_ranks(half_way, 2)
    assert first == []
    assert broke == "ArithmeticError: no more numbers"
    for told in refused:
        assert "left half-way (it was interrupted; ArithmeticError: no more numbers)" in told
        assert "make another engine" in told
    assert len(refused) == 2


def broken_lane(message: str) -> None:
    """The middle of three stages fails to send forward while it waits for the first, which is late."""
    engine = engine_of([Block, Block, Block], micro_batches=2)
    engine.train_batch(iter(batches(0, 2)))
    if engine.stage_id == 0:
        engine.transport["activations_out"]._begin = late_with_its_second(engine.transport["activations_out"]._begin)
    if engine.stage_id == 1:

        def fails(_: Any) -> None:
            raise RuntimeError(message)

        engine.transport["activations_out"]._begin = fails
    engine.train_batch(iter(batches(1, 2)))


def late_with_its_second(begin: Callable[[Any], None]) -> Callable[[Any], None]:
    def begin_late(message: Any) -> None:
        if message.micro_batch == 1:
            time.sleep(3600)
        begin(message)

    return begin_late


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("the device is on fire", "RuntimeError: the device is on fire"),
        (
            "Connection closed by peer",
            r"PeerError: rank 1, stage 1, lost another rank at step 1 while sending to .*rank 2; .*by peer",
        ),
    ],
    ids=["an error", "a lost rank"],
)
def test_an_error_of_a_sending_thread_is_heard_and_named(error: str, told: str) -> None:
    with pytest.raises(RankError, match=told) as caught:
        run_ranks(broken_lane, 3, error)
    assert caught.value.rank == 1


class Lists(Block):
    def forward(self, x: Tensor) -> Any:
        return [super().forward(x)]


def passes_on_a_list(trains: bool) -> None:
    engine = engine_of([Lists, Block])
    if trains:
        engine.train_batch(iter(batches(0)))
    else:
        engine.eval_batch(iter(batches(0)))


@pytest.mark.parametrize("trains", [True, False])
def test_a_stage_that_passes_on_a_list_is_told_what_it_may_pass_on(trains: bool) -> None:
    with pytest.raises(
        RankError, match=r"ValueError: .*stage 0.* a list: .* a tensor, or a tuple of tensors"
    ) as caught:
        run_ranks(passes_on_a_list, 2, trains)
    assert caught.value.rank == 0


def connected(pipe: tuple[int, ...]) -> float:
    import torch.distributed as dist

    from paceline.comm.transport import _connect
    from paceline.runtime.initialize import start_distributed

    start_distributed()
    _connect(pipe, dist.get_rank(), torch.device("cpu"), dist.group.WORLD)
    told = torch.ones(1)
    dist.all_reduce(told)  # no message is left that a rank did not take
    return float(told)


@pytest.mark.parametrize("pipe", [(0, 1, 2), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0), (2, 0, 1)])
def test_neighbours_are_connected_both_ways(pipe: tuple[int, ...]) -> None:
    """Every rank sends to those that it expects something of, or this hangs; that NCCL needs it, GPUs show."""
    assert run_ranks(connected, 3, pipe) == [3.0] * 3
