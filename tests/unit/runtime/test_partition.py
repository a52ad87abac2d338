"""Partitions of a model's items into stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from paceline.hf.anatomy import Anatomy, anatomy_of
from paceline.hf.weights import skeleton
from paceline.runtime.module import Item, cut_of, items_of, partition_items


def items(weights: list[int]) -> list[Item]:
    kinds = ["Embedding", *("Mamba" if i % 2 else "Attention" for i in range(len(weights) - 2)), "Head"]
    names = ["embedding", *(f"layers.{i}" for i in range(len(weights) - 2)), "head"]
    return [Item(name, kind, weight) for name, kind, weight in zip(names, kinds, weights, strict=True)]


four = st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(lambda weights: sum(weights[:1] + weights[2:]) > 0)
"""Weights of the classes, not all 0 even where there is no Mamba."""


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=24), st.data())
def test_every_stage_has_layers_and_every_item_one_stage(weights: list[int], data: st.DataObject) -> None:
    num_layers = len(weights) - 2
    stages = data.draw(st.integers(1, num_layers))
    method = data.draw(st.sampled_from(["uniform", "parameters"]))
    try:
        parts = partition_items(items(weights), stages, method)
    except ValueError as error:
        assert "without decoder layers" in str(error)  # noqa: PT017
        assert method == "parameters"
        return
    assert len(parts) == stages + 1
    cuts = [cut_of(parts, stage) for stage in range(stages)]
    assert [cut.first for cut in cuts] == [stage == 0 for stage in range(stages)]
    assert [cut.last for cut in cuts] == [stage == stages - 1 for stage in range(stages)]
    assert [layer for cut in cuts for layer in range(cut.start, cut.stop)] == list(range(num_layers))
    assert all(cut.stop > cut.start for cut in cuts)


@given(st.integers(1, 12), st.data())
def test_uniform_is_even(num_layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, num_layers))
    parts = partition_items(items([7] * (num_layers + 2)), stages, "uniform")
    sizes = [cut_of(parts, s).stop - cut_of(parts, s).start for s in range(stages)]
    assert max(sizes) - min(sizes) <= 1


def test_parameters_counts_the_embedding_and_the_head() -> None:
    assert partition_items(items([30, 10, 10, 10, 10, 10, 10, 10]), 2, "parameters") == [0, 3, 8]


LLAMAS = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}


def llama(name: str) -> tuple[list[Item], list[float]]:
    """Items of a Llama 3's shape, and the operations of a token's forward in each, worked out from the shape alone."""
    shape, length, vocab = LLAMAS[name], 1024, 128256
    model = skeleton(LlamaConfig(vocab_size=vocab, max_position_embeddings=8192, **shape))
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    weights = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * wide + 2 * hidden
    layer = 2.0 * weights + 2.0 * length * hidden
    return items_of(model, anatomy_of(model)), [0.0, *[layer] * shape["num_hidden_layers"], 2.0 * vocab * hidden]


@pytest.mark.parametrize(("name", "by_work", "by_parameters"), [("8B", 0.955, 0.918), ("1B", 0.975, 0.817)])
def test_work_is_as_even_as_can_be_where_parameters_count_the_embedding(
    name: str, by_work: float, by_parameters: float
) -> None:
    """Of four stages, the mean's share of the slowest: what a full pipeline reaches of its devices."""
    row, work = llama(name)
    assert [item.work for item in row] == pytest.approx([3 * each for each in work])

    def reached(parts: Sequence[int]) -> float:
        return sum(work) / 4 / max(sum(work[a:b]) for a, b in pairwise(parts))

    best = max(reached((0, *cuts, len(row))) for cuts in combinations(range(2, len(row) - 1), 3))
    assert reached(partition_items(row, 4, "work")) == pytest.approx(best)
    assert best == pytest.approx(by_work, abs=5e-4)
    assert reached(partition_items(row, 4, "parameters")) == pytest.approx(by_parameters, abs=5e-4)


def test_memory_decides_what_fits() -> None:
    """A stage that has the embedding beside its even share of the work is larger than the others."""
    from paceline.planning.memory import ItemMemory, States
    from paceline.runtime.first_partition import work_boundaries
    from paceline.schedules.families import one_f_one_b

    row, _ = llama("8B")
    memories = [ItemMemory(item.name, item.num_parameters, 0.0, 0.0) for item in row]
    schedule, states = one_f_one_b(4, 8), States(data_parallel=1)
    largest = [16.0 * sum(item.num_parameters for item in row[a:b]) for a, b in pairwise([0, 9, 18, 27, 34])]

    def cut(limit: float) -> list[int]:
        return work_boundaries(row, memories, [limit] * 4, states, schedule)

    assert cut(max(largest)) == partition_items(row, 4, "work") == [0, 9, 18, 27, 34]
    tight = cut(max(largest) - 1)
    assert tight != [0, 9, 18, 27, 34]
    assert max(16.0 * sum(item.num_parameters for item in row[a:b]) for a, b in pairwise(tight)) < max(largest)
    assert cut(1.0) == partition_items(row, 4, "parameters")  # nothing fits


def test_layers_that_keep_their_activations_count_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradient checkpointing a layer with room for them computes its forward once: the head counts for more."""
    from paceline.config import resolve
    from paceline.runtime.first_partition import by_work
    from paceline.runtime.hetero import Shape

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 12}
    config = LlamaConfig(**sizes, vocab_size=4000)
    model = skeleton(config)
    whole, again = (
        partition_items(items_of(model, anatomy_of(model), 128, recomputes=recomputes), 3, "work")
        for recomputes in (False, True)
    )
    assert whole != again

    def boundaries(limit: float, *, recomputes: bool = True, schedule: str = "1f1b", chunks: int = 1) -> object:
        kind = {"type": schedule, "chunks": chunks} if chunks > 1 else schedule
        pipeline = {"stages": 3, "schedule": kind}
        ds_config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 6}
        ds_config |= {"optimizer": {"type": "Adam"}, "paceline": {"pipeline": pipeline}}
        plan = resolve(ds_config, world_size=3, num_layers=12, num_items=14, state_bytes=None, device_bytes=None)
        return by_work(config, plan, Shape(torch.float32, 2, 128, recomputes), [limit] * 3).partition

    assert boundaries(1e12) == boundaries(1e12, recomputes=False) == whole
    assert boundaries(1e12, schedule="one_direction") == again, "nothing is kept without a flush"
    assert boundaries(1.0) == boundaries(1.0, recomputes=False), "nothing fits: parameters decide"
    monkeypatch.setenv("PACELINE_RECOMPUTE_EARLY", "0")
    assert boundaries(1e12) == again


def test_type_counts_matching_layers_only() -> None:
    kinds = items([1] * 10)
    assert [item.kind for item in kinds].count("Mamba") == 4
    parts = partition_items(kinds, 2, "type:mamba")
    assert sum(item.kind == "Mamba" for item in kinds[: parts[1]]) == 2


@pytest.mark.parametrize(
    ("weights", "boundaries"),
    [
        ({"Attention|Mamba": 1}, [0, 5, 10]),
        ({"attention": 1, "mamba": 1, "head": 4}, [0, 7, 10]),  # six layers against two and the head
        ({"attention": 1, "mamba": 1, "embedding": 4}, [0, 3, 10]),
        ({"mamba": 3, "attention": 1}, [0, 5, 10]),
        ({"head": 1}, None),  # all in one place: any cut that leaves each stage a decoder layer
    ],
)
def test_weights_by_class(weights: dict[str, float], boundaries: list[int] | None) -> None:
    parts = partition_items(items([1] * 10), 2, weights)
    assert parts == boundaries or (boundaries is None and 2 <= parts[1] <= 8)


def test_the_first_weight_that_matches_counts() -> None:
    by_hand = partition_items(items([1] * 10), 2, {"attention": 1, "mamba": 1, "head": 4})
    assert partition_items(items([1] * 10), 2, {"head": 4, ".": 1, "mamba": 99, "embedding": 99}) == [0, 6, 10]
    assert partition_items(items([1] * 10), 2, {"embedding": 0, "head": 4, ".": 1, "mamba": 99}) == by_hand


@given(st.integers(1, 10), st.data())
def test_weights_leave_no_stage_without_a_layer_and_have_the_lightest_heaviest(
    num_layers: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, num_layers))
    weights = dict(zip(["Attention", "Mamba", "Embedding", "Head"], data.draw(four), strict=True))
    row = items([1] * (num_layers + 2))
    parts = partition_items(row, stages, weights)

    def heaviest(cuts: Sequence[int]) -> float:
        return max(sum(weights[item.kind] for item in row[a:b]) for a, b in pairwise(cuts))

    every = [[0, *(c + 1 for c in cuts), len(row)] for cuts in combinations(range(1, num_layers), stages - 1)]
    assert parts in every
    assert heaviest(parts) == min(map(heaviest, every))


def test_boundaries_may_leave_the_embedding_alone() -> None:
    parts = partition_items(items([1] * 6), 3, [0, 1, 5, 6])
    assert [cut_of(parts, stage) for stage in range(3)] == [cut_of(parts, 0), cut_of(parts, 1), cut_of(parts, 2)]
    assert (cut_of(parts, 0).start, cut_of(parts, 0).stop) == (0, 0)
    assert (cut_of(parts, 1).start, cut_of(parts, 1).stop) == (0, 4)
    assert (cut_of(parts, 2).start, cut_of(parts, 2).stop, cut_of(parts, 2).last) == (4, 4, True)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "best",
            "partition method 'best' is not known: choose 'work', 'parameters', 'uniform', 'type:REGEX', weights by "
            "class name or boundaries.",
        ),
        (
            "hetero",
            "partition method 'hetero' needs the times of the layers, which a pipeline that is being built has not: "
            "write it into the JSON and call paceline.initialize with the model, or give boundaries.",
        ),
        ({"head": -1}, "partition weights {'head': -1}: the weight of \"head\" must be a finite number, at least 0."),
        ({"rnn": 1}, "partition weights {'rnn': 1} match no layer class with a weight; the classes are ['Attention', "),
        ({"head": 0, "h": 1}, "partition weights {'head': 0, 'h': 1} match no layer class with a weight; the classes "),
        ("type:rnn", "partition method 'type:rnn' matches no layer class; this model has ['Attention', 'Embedding', "),
        ([0, 2], "partition [0, 2] does not cut 6 items (embedding, 4 decoder layers, head) into 2 stages: give 3 "),
        ([0, 5, 4], "partition [0, 5, 4] does not cut 6 items"),
        ([0, 2.0, 6], "partition [0, 2.0, 6] does not cut 6 items"),
    ],
)
def test_refusals(method: object, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        partition_items(items([1] * 6), 2, method)  # type: ignore[arg-type]
    assert str(raised.value).startswith(message)


def test_items_of_a_model_count_all_its_parameters_once() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=97
    )
    model = skeleton(config)
    counted = items_of(model, anatomy_of(model))
    assert [item.name for item in counted] == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    assert sum(item.num_parameters for item in counted) == sum(p.numel() for p in model.parameters())


def sliced_items(head_slices: int) -> tuple[list[Item], Anatomy]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = skeleton(LlamaConfig(**sizes, vocab_size=999))
    anatomy = anatomy_of(model, head_slices=head_slices)
    return items_of(model, anatomy, 16), anatomy


def test_slices_of_a_head_share_its_work_and_parameters() -> None:
    (whole, _), (sliced, _) = sliced_items(1), sliced_items(8)
    assert sliced[:5] == whole[:5]
    assert [item.name for item in sliced[5:]] == [f"head.{index}" for index in range(8)]
    assert sum(item.num_parameters for item in sliced[5:]) == whole[5].num_parameters
    assert sum(item.work for item in sliced[5:]) == pytest.approx(whole[5].work)


def test_work_cuts_a_head_that_is_larger_than_a_stage() -> None:
    sliced, anatomy = sliced_items(8)
    parts = partition_items(sliced, 4, "work")
    held = [cut_of(parts, stage).slices(anatomy) for stage in range(4)]
    assert [index for slices in held for index in slices] == list(range(8))
    assert sum(bool(slices) for slices in held) > 1
