"""Number of stages for a cluster: what the links and the memory allow, and what is trained, decide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.planning.best_schedule import NEAR
from paceline.planning.cluster import Cluster, Fabric
from paceline.planning.memory import ItemMemory, States, stage_memory, with_head_slices
from paceline.planning.partition_methods import by_work
from paceline.planning.recomputation import recomputed
from paceline.planning.stage_choice import Option, Stages, choose, predicted, scaled, slowdown, why_chosen
from paceline.planning.stage_pool import Entry, StagePool
from paceline.planning.strategy import Plan, plan_of
from paceline.planning.strategy_shape import Strategy
from paceline.planning.workload import Item, Workload

MIB = 2.0**20
DEVICES = 4


def workload(trained: float = 1.0, micro_batches: int = 16) -> Workload:
    """Eight layers of 10 M parameters and 30 ms, which pass 4 MiB on; micro-batches of a pipeline of all devices."""
    layer = Item(ItemMemory("layer", 10_000_000, 40 * MIB, 4 * MIB), 0.01, 0.02)
    first = Item(ItemMemory("embedding", 1_000_000, 0.0, 4 * MIB), 0.0, 0.0)
    last = Item(ItemMemory("head", 1_000_000, 8 * MIB, 0.0), 0.005, 0.01)
    states = States(weight_bytes=4, shard=True, trained=trained)
    items = (first, *(layer,) * 8, last)
    return Workload(items, 8, 8, micro_batch_size=1, train_batch_size=micro_batches, states=states)


def cluster(mbit: float, memory_gib: float = 80.0) -> Cluster:
    return Cluster(DEVICES, 1, memory_gib * 2**30, state_bytes_per_s=1e12, across=Fabric(mbit * 125_000, 1e-4))


def options(work: Workload, where: Cluster, *, tuned: bool = False) -> dict[int, Option]:
    found = {}
    for stages in (1, 2, 4):
        option = Option(stages, DEVICES // stages, 1, work.train_batch_size * stages // DEVICES)
        found[stages] = predicted(option, work, where, tuned=tuned)
    return found


def best(work: Workload, where: Cluster, usual: int = 2) -> int:
    found = choose(list(options(work, where).values()), Stages(usual))
    assert found is not None
    return found.stages


def test_slow_links_make_pipelines_and_fast_ones_replicas() -> None:
    work = workload()
    assert [best(work, cluster(mbit)) for mbit in (100, 1_000_000)] == [4, 1]


def test_with_adapters_only_replicas_send_next_to_nothing() -> None:
    where = cluster(1000)
    assert best(workload(), where) == 4
    assert best(workload(trained=0.001), where) == 1
    light, full = options(workload(trained=0.001), where)[1], options(workload(), where)[1]
    spared = (4 + 8 / DEVICES) * 82_000_000 * 0.999  # gradients, and the share of the moments
    assert full.memory_bytes - light.memory_bytes == pytest.approx(spared)
    assert light.step_s < full.step_s


def test_what_does_not_fit_is_not_taken() -> None:
    work, fast = workload(), cluster(1_000_000)
    fits = options(work, fast)
    memory_gib = fits[1].memory_bytes / 2**30 * 0.9
    found = options(work, cluster(1_000_000, memory_gib))
    assert "GiB" in found[1].why_not
    assert found[2].step_s == pytest.approx(fits[2].step_s)
    assert choose([found[1]], Stages(2)) is None
    assert best(work, cluster(1_000_000, memory_gib)) == 2


def test_experts_need_replicas_to_be_spread_over() -> None:
    found = predicted(Option(4, 1, 1, 16), workload(), cluster(100), expert=2)
    assert "cannot share experts" in found.why_not


def test_among_nearly_equal_ones_the_usual_is_taken() -> None:
    def option(stages: int, step_s: float, chunks: int = 1) -> Option:
        return Option(stages, 4 // stages, 1, 1, step_s=step_s, chunks=chunks)

    near, far = 1 + 0.9 * NEAR, 1 + 1.1 * NEAR
    assert choose([option(1, 1.0), option(2, near), option(4, near)], Stages(2)) == option(2, near)
    assert choose([option(1, 1.0), option(2, far), option(4, near)], Stages(2)) == option(1, 1.0)
    assert choose([option(1, far), option(2, 1.0), option(4, near)], Stages(8)) == option(2, 1.0)
    # Chunks send more messages: the fewest that are as fast, unless the run has them already.
    assert choose([option(2, 1.0, 2), option(2, near)], Stages(2)) == option(2, near)
    assert choose([option(2, 1.0, 2), option(2, far)], Stages(2)) == option(2, 1.0, 2)
    assert choose([option(2, 1.0, 2), option(2, far), option(4, near)], Stages(2)) == option(4, near)
    assert choose([option(2, near, 2), option(2, 1.0)], Stages(2, 2)) == option(2, near, 2)
    both = [option(1, 1.0), option(2, near), option(4, 0.5)._replace(why_not="it needs more memory")]
    assert why_chosen(both[0], both) == "the fastest that fits: 1 s a step predicted, 1.027 with 2 stages"
    assert why_chosen(both[1], both) == (
        "the default, or the simplest, of those within 3% of the fastest that fits: 1.027 s a step predicted, "
        "1 with 1 stage"
    )


def in_chunks(work: Workload, where: Cluster) -> Option | None:
    """What is chosen of four stages, whole or in two chunks."""
    shapes = [Option(DEVICES, 1, 1, work.train_batch_size, chunks=chunks) for chunks in (1, 2)]
    return choose([predicted(shape, work, where, tuned=True) for shape in shapes], Stages(DEVICES))


def test_chunks_where_messages_are_fast_and_micro_batches_few() -> None:
    few = workload(micro_batches=4)
    chosen = {mbit: in_chunks(few, cluster(mbit)) for mbit in (1_000, 100_000)}
    assert {mbit: found and found.chunks for mbit, found in chosen.items()} == {1_000: 1, 100_000: 2}
    many = in_chunks(workload(micro_batches=128), cluster(100_000))
    assert many is not None
    assert many.chunks == 1


def test_chunks_that_cannot_be() -> None:
    """Without a layer for each, where steps are not simulated, and where memory is short."""
    work, fast, pair = workload(), cluster(100_000), Option(DEVICES, 1, 1, 16, chunks=2)
    short = replace(work, items=(*work.items[: 2 * DEVICES], work.items[-1]))
    assert "too long to be simulated" in predicted(pair._replace(micro_batches=1000), work, fast, tuned=True).why_not
    assert predicted(pair, short, fast, tuned=True).why_not
    assert predicted(pair, work, fast, tuned=True).why_not == ""
    assert "rank 0 needs" in predicted(pair, work, cluster(100_000, memory_gib=0.5), tuned=True).why_not


def test_devices_of_different_speed() -> None:
    """One of four takes twice as long: replicas wait for it, stages that follow the speeds lose a seventh."""
    seconds = [1.0, 1.0, 1.0, 2.0]
    mean = 5 / 4
    assert slowdown(seconds, 1, follows_speed=True) == pytest.approx(2 / mean)
    assert slowdown(seconds, 4, follows_speed=False) == pytest.approx(2 / mean)
    assert slowdown(seconds, 4, follows_speed=True) == pytest.approx(4 / 3.5 / mean)
    assert slowdown(seconds, 2, follows_speed=True) == pytest.approx(2 / 1.5 / mean)  # the slow one's stage is slow
    assert slowdown([3.0] * 4, 2, follows_speed=True) == pytest.approx(1.0)
    # With shares by speed, replicas lose nothing but what their own stages wait for each other.
    assert slowdown(seconds, 1, follows_speed=True, shares_by_speed=True) == pytest.approx(4 / 3.5 / mean)
    assert slowdown(seconds, 2, follows_speed=False, shares_by_speed=True) == pytest.approx(2 / 1.5 / mean)
    assert slowdown([1.0, 3.0, 1.0, 3.0], 2, follows_speed=True, shares_by_speed=True) == pytest.approx(1.5 / 2)
    assert slowdown(seconds, 4, follows_speed=True, shares_by_speed=True) == pytest.approx(4 / 3.5 / mean)
    # However slow it is, a stage has a layer: one of four, or with two chunks two of eight.
    quarters = [0.25] * 3 + [0.0]
    assert slowdown([1.0, 2.0, 1.0, 1.0], 4, follows_speed=True, least=quarters) == pytest.approx(2 / mean)
    assert slowdown(seconds, 4, follows_speed=True, least=quarters) == pytest.approx(4 / 3.5 / mean)  # it has less
    assert slowdown([1.0, 4.0], 2, follows_speed=True, least=[0.3, 0.4]) == pytest.approx(2 * 0.4 * 4 / 2.5)
    assert slowdown([1.0, 4.0, 8.0], 3, follows_speed=True, least=[0.1, 0.2, 0.2]) == pytest.approx(3 * 1.6 / (13 / 3))
    assert slowdown([3.0] * 4, 4, follows_speed=True, least=[0.25] * 4) == pytest.approx(1.0)
    work = workload()
    assert scaled(work, 2.0).items[1].backward_s == pytest.approx(2 * work.items[1].backward_s)


def test_a_line_for_people() -> None:
    assert Option(1, 4, 2, 8, why_not="too large").text == "1 stage x 4 replicas: too large"
    line = Option(4, 1, 2, 8, 1.25, "eager slack=1", 2**30).text
    assert line == "4 stages: 1.25 s a step of 8 micro-batches of 2, eager slack=1, 1 GiB"
    line = Option(2, 2, 2, 8, 1.25, "zbv", 2**30, chunks=2).text
    assert line == "2 stages of 2 chunks x 2 replicas: 1.25 s a step of 8 micro-batches of 2, zbv, 1 GiB"


def recomputed_all(work: Workload) -> Workload:
    """The same work, all of its layers recomputed."""
    memories = recomputed([item.memory for item in work.items])
    items = [item._replace(memory=memory) for item, memory in zip(work.items, memories, strict=True)]
    items[1:-1] = [item._replace(backward_s=item.backward_s + item.forward_s) for item in items[1:-1]]
    return replace(work, items=tuple(items), recomputed=tuple(range(1, len(items) - 1)))


def test_layers_are_recomputed_so_that_an_option_fits() -> None:
    """As few as it takes; what fits as it is stays as it is."""
    work, layers = workload(), range(1, 9)
    again = recomputed_all(work)
    option = Option(4, 1, 1, 16)
    free = predicted(option, work, cluster(1000))
    short = cluster(1000, (free.memory_bytes - 150 * MIB) / 2**30)
    assert "needs" in predicted(option, work, short).why_not
    for tuned in (False, True):
        found = predicted(option, work, short, recomputed=again, tuned=tuned)
        assert not found.why_not
        assert 0 < found.num_recomputed < len(layers)
        assert found.memory_bytes <= short.memory_bytes
        assert free.step_s <= found.step_s or tuned, "recomputing takes no time where a stage would wait"
        assert f" GiB with {found.num_recomputed} recomputed layers" in found.text
    whole = predicted(option, again, short)
    assert predicted(option, work, short, recomputed=again).step_s <= whole.step_s, "a run keeps what has room"
    assert predicted(option, work, cluster(1000), recomputed=again) == free
    assert "recomputed" not in free.text
    entry = Entry(option, work, recomputed=again)
    assert entry.predicted(short) == predicted(option, work, short, recomputed=again)
    assert entry.predicted(short, 2.0).num_recomputed == entry.predicted(short).num_recomputed


def in_halves(work: Workload) -> Workload:
    """The same work in items of half a layer."""
    first, *layers, last = work.items
    half = layers[0]._replace(forward_s=0.005, backward_s=0.01, memory=ItemMemory("half", 5_000_000, 20 * MIB, 4 * MIB))
    other = half._replace(memory=half.memory._replace(is_second=True))
    return replace(work, items=(first, *(half, other) * len(layers), last), blocks_per_layer=2)


def nine_layers() -> Workload:
    work = workload()
    return replace(work, items=(work.items[0], work.items[1], *work.items[1:]))


def test_halves_of_layers_where_stages_of_whole_ones_are_uneven() -> None:
    """Nine layers and a head worth half a layer on four devices: at most three layers a stage, or two and a half."""
    work, where = nine_layers(), cluster(100_000)
    option = Option(4, 1, 1, 16)
    whole, found = predicted(option, work, where), predicted(option, work, where, halved=in_halves(work))
    assert found.halves
    assert not whole.halves
    assert found.whole_s == whole.step_s > found.step_s * (1 + NEAR)
    assert found.text.endswith(", cut within layers")
    assert not predicted(Option(1, 4, 1, 4), work, where, halved=in_halves(work)).halves
    even = replace(workload(), items=(*workload().items[:-1], workload().items[-1]._replace(forward_s=0, backward_s=0)))
    assert not predicted(option, even, where, halved=in_halves(even)).halves


def test_halves_of_layers_are_recomputed_where_memory_is_short() -> None:
    """Both ways of cutting recompute as few layers as they need; where only one fits without, it is no matter how."""
    work, halves = nine_layers(), in_halves(nine_layers())
    option, again = Option(4, 1, 1, 16), [recomputed_all(each) for each in (work, halves)]
    roomy = predicted(option, work, cluster(100_000), halved=halves)
    short = cluster(100_000, 0.7 * roomy.memory_bytes / 2**30)
    assert predicted(option, work, short, halved=halves).why_not
    found = predicted(option, work, short, recomputed=again[0], halved=halves, halved_again=again[1])
    whole = predicted(option, work, short, recomputed=again[0])
    assert found.halves
    assert whole.step_s == found.whole_s > found.step_s > roomy.step_s
    assert 0 < found.num_recomputed < 12, "nine layers, of which three may be in two stages"
    assert ", cut within layers" in found.text
    assert f" with {found.num_recomputed} recomputed layers" in found.text
    entry = Entry(option, work, recomputed=again[0], halved=halves, halved_again=again[1])
    assert entry.predicted(short) == found
    assert entry.as_it_runs(halves=True).predicted(short).step_s == found.step_s
    assert entry.as_it_runs(halves=False).predicted(short).step_s == whole.step_s


def test_a_run_in_whole_layers_is_compared_as_it_is() -> None:
    """In the pool, what runs is cut as it is; others as is best for them."""
    work, where = nine_layers(), cluster(100_000)
    entry = Entry(Option(4, 1, 1, 16), work, halved=in_halves(work))
    assert entry.predicted(where).halves
    whole, halves = (entry.as_it_runs(halves=cut).predicted(where) for cut in (False, True))
    assert not whole.halves
    assert whole.step_s > halves.step_s == entry.predicted(where).step_s
    pool = StagePool((entry.as_it_runs(halves=False), Entry(Option(2, 2, 1, 8), work)), where, Stages(4))
    assert pool.entries[0].predicted(where).step_s == whole.step_s


def test_stages_share_a_head_that_is_more_than_one_of_them() -> None:
    """Eight layers and a head worth five of them on four devices: 3.25 layers each, where the head alone is five."""
    large = Item(ItemMemory("head", 16_000_000, 8 * MIB, 0.0, 4 * MIB), 0.05, 0.1)
    work = replace(workload(), items=(*workload().items[:-1], large))
    where, option = cluster(100_000), Option(4, 1, 1, 16)
    sliced = work.in_head_slices(16)
    whole, found = predicted(option, work, where), predicted(option, work, where, sliced=sliced)
    assert (whole.head_slices, found.head_slices) == (1, 16)
    assert found.whole_head_s == whole.step_s > 1.3 * found.step_s
    assert found.text.endswith(", the head in 16 slices")
    assert predicted(option, workload(), where, sliced=workload().in_head_slices(16)).head_slices == 1, "a small head"
    both = predicted(
        option, nine_layers(), where, halved=in_halves(nine_layers()), sliced=nine_layers().in_head_slices(16)
    )
    assert (both.halves, both.head_slices) == (True, 1), "what halves do alone needs no slices"
    entry = Entry(option, work, tuned=False, sliced=sliced)
    assert entry.predicted(where) == found
    assert entry.as_it_runs(halves=False, slices=True).predicted(where).step_s == found.step_s
    assert entry.as_it_runs(halves=False).predicted(where) == whole


def test_slices_of_a_head_are_all_of_it() -> None:
    """In one stage they keep what the head keeps; a stage that begins with one has its input besides."""
    items = [item.memory for item in workload().items]
    items[-1] = ItemMemory("head", 1_000_003, 8 * MIB, 0.0, 3 * MIB)
    sliced, states, before = with_head_slices(items, 16), States(), len(items) - 1
    together = stage_memory(sliced, [0, 1, before + 16], 1, states, 2)
    assert together == stage_memory(items, [0, 1, before + 1], 1, states, 2)
    apart = [stage_memory(sliced, [0, before, before + 8, before + 16], stage, states, 1) for stage in (1, 2)]
    assert sum(need.weights for need in apart) == 4 * 1_000_003
    assert [need.working for need in apart] == [1.5 * MIB, 1.5 * MIB]
    assert [need.activations for need in apart] == [4 * MIB + 4 * MIB + 4 * MIB, 4 * MIB + 4 * MIB]


def test_a_run_that_cuts_by_work_is_predicted_as_it_cuts() -> None:
    """Though its seconds would be more alike otherwise; unless that does not fit into memory."""
    work, strategy = workload(), Strategy(1, DEVICES, 1, 1)
    counted = replace(work, work=(0.0, *[1.0] * 8, 4.0))
    by_seconds, by_operations = (plan_of(strategy, each, cluster(100_000)) for each in (work, counted))
    assert isinstance(by_seconds, Plan)
    assert isinstance(by_operations, Plan)
    assert by_operations.boundaries == tuple(by_work(counted.work, [1.0] * DEVICES)) != by_seconds.boundaries
    assert by_operations.step_s > by_seconds.step_s
    short = cluster(100_000, max(need.total for need in by_seconds.memory) / 2**30)
    assert max(need.total for need in by_operations.memory) > short.memory_bytes
    fitting = plan_of(strategy, counted, short)
    assert isinstance(fitting, Plan), "cut otherwise"
