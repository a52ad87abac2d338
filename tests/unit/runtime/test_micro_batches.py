"""Cutting the samples of a step otherwise: the same samples, in the same order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.hf.masks import IGNORED
from paceline.runtime.causal_lm_steps import CausalLMSteps
from paceline.runtime.micro_batches import MicroBatch, count_label_tokens, read_micro_batch, recut


def micro_batch(rows: int, length: int, first: int, **side: torch.Tensor) -> MicroBatch:
    ids = torch.arange(first, first + rows * length).reshape(rows, length)
    return MicroBatch(ids, ids.clone(), side)


def ones(rows: int, length: int) -> torch.Tensor:
    return torch.ones(rows, length, dtype=torch.int64)


def samples(batches: list[MicroBatch]) -> list[dict[str, list[int]]]:
    """Row after row: its tokens that count, with what belongs to each of them."""
    found = []
    for batch in batches:
        for row in range(len(batch.input_ids)):
            mask = batch.side.get("attention_mask", torch.ones_like(batch.input_ids))[row].bool()
            sample = {"ids": batch.input_ids[row][mask].tolist(), "labels": batch.labels[row][mask].tolist()}
            for name, tensor in batch.side.items():
                if name != "attention_mask":
                    sample[name] = tensor[row][mask].tolist()
            found.append(sample)
    return found


@pytest.mark.parametrize(("size", "count"), [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)])
def test_the_same_samples_in_the_same_order(size: int, count: int) -> None:
    loaded = [micro_batch(3, 4, first) for first in range(0, 48, 12)]
    cut = recut(loaded, size, count)
    assert [tuple(batch.input_ids.shape) for batch in cut] == [(size, 4)] * count
    assert all(not batch.side for batch in cut)
    assert samples(cut) == samples(loaded)


def test_rows_of_different_lengths_are_padded_and_the_mask_says_so() -> None:
    loaded = [micro_batch(2, 3, 10), micro_batch(2, 5, 20)]
    (cut,) = recut(loaded, 4, 1)
    assert cut.input_ids.tolist()[:2] == [[10, 11, 12, 0, 0], [13, 14, 15, 0, 0]]
    assert cut.labels.tolist()[0] == [10, 11, 12, IGNORED, IGNORED]
    assert cut.side["attention_mask"].tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5] * 2
    assert samples([cut]) == samples(loaded)
    assert count_label_tokens(cut.labels) == sum(count_label_tokens(batch.labels) for batch in loaded)


def test_a_mask_that_some_have_is_kept_and_the_others_get_one() -> None:
    mask = ones(2, 4)
    mask[1, 2:] = 0
    loaded = [micro_batch(2, 4, 10, attention_mask=mask), micro_batch(2, 4, 20)]
    first, second = recut(loaded, 2, 2)
    assert torch.equal(first.side["attention_mask"], mask)
    assert torch.equal(second.side["attention_mask"], ones(2, 4))
    assert samples([first, second]) == samples(loaded)


def test_position_ids_go_with_their_samples_and_count_up_where_there_were_none() -> None:
    positions = torch.tensor([[0, 1, 0, 1]])
    loaded = [micro_batch(1, 4, 10, position_ids=positions), micro_batch(1, 3, 20)]
    (cut,) = recut(loaded, 2, 1)
    assert cut.side["position_ids"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]]
    assert cut.labels.tolist()[1] == [20, 21, 22, IGNORED]


def test_samples_of_packed_rows_are_kept_apart_where_the_rows_are_padded() -> None:
    """The loss of the rows as they were: with a mask for the padding, transformers does not look at the positions."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=97,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    lengths = [(5, 4), (6, 7)]
    loaded = [
        micro_batch(1, sum(row), 20, position_ids=torch.cat([torch.arange(n) for n in row])[None]) for row in lengths
    ]

    @torch.no_grad()
    def loss(batches: list[MicroBatch]) -> float:
        found = [model(batch.input_ids, labels=batch.labels, **batch.side, use_cache=False).loss for batch in batches]
        return float(sum(one * count_label_tokens(batch.labels) for one, batch in zip(found, batches, strict=True)))

    assert loss(recut(loaded, 2, 1)) == pytest.approx(loss(loaded), rel=1e-5)


def test_cutting_back_gives_what_was_there() -> None:
    loaded = [micro_batch(2, 4, first) for first in (0, 8, 16, 24)]
    back = recut(recut(loaded, 4, 2), 2, 4)
    for was, now in zip(loaded, back, strict=True):
        assert torch.equal(was.input_ids, now.input_ids)
        assert torch.equal(was.labels, now.labels)
        assert was.side == now.side


def test_a_row_of_the_steps_table_tells_samples_apart() -> None:
    one, same, other = (recut([micro_batch(2, 4, first)], 2, 1)[0].row for first in (0, 0, 1))
    assert one == same
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1]


@pytest.mark.parametrize(("size", "count"), [(2, 3), (4, 2), (3, 2), (1, 5)])
def test_a_wrong_number_of_samples_is_refused(size: int, count: int) -> None:
    loaded = [micro_batch(2, 4, 0), micro_batch(2, 4, 8)]
    message = f"a step has 4 samples and was to be cut into {count} micro-batches of {size}: give"
    with pytest.raises(ValueError, match=message):
        recut(loaded, size, count)


def test_a_short_last_micro_batch_is_refused() -> None:
    loaded = [micro_batch(2, 4, 0), micro_batch(1, 4, 8)]
    with pytest.raises(ValueError, match="leave paceline"):
        recut(loaded, 1, 4)


def test_a_mask_of_ones_is_no_mask() -> None:
    ids = torch.arange(6).reshape(2, 3)
    read = read_micro_batch({"input_ids": ids, "labels": ids, "attention_mask": ones(2, 3)})
    assert read.side == {}
    assert [one.has_full_mask for one in (read, *recut([read], 1, 2))] == [True] * 3, "a loss of one's own may want it"


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_what_is_none_is_missing(name: str) -> None:
    ids = torch.arange(6).reshape(2, 3)
    other = ({"input_ids", "labels"} - {name}).pop()
    with pytest.raises(ValueError, match=rf"has \['{other}'\] but no '{name}': add it"):
        read_micro_batch({"input_ids": ids, "labels": ids, "attention_mask": None, name: None})


@pytest.mark.parametrize(("device", "is_pinned"), [("cuda:0", True), ("cpu", False)])
def test_what_goes_to_a_gpu_is_pinned(device: str, is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.clone())
        return moved[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = micro_batch(2, 4, 0, attention_mask=ones(2, 4))
    steps: Any = SimpleNamespace(
        readers=SimpleNamespace(reads=True),
        _device=torch.device(device),
        _reader=SimpleNamespace(checkpoint_error=lambda: None),
        _load=lambda num, partial: [batch],
    )
    loaded, row, error = CausalLMSteps.read(steps, 1)
    assert error is None
    assert not moved  # not before the step is agreed on
    (found,) = CausalLMSteps.ready(steps, loaded)
    assert row == [1, *batch.row]
    tensors = [found.input_ids, found.labels, *found.side.values()]
    assert all(any(tensor is other for other in moved) for tensor in tensors) is is_pinned
    assert samples([found]) == samples([batch])


def test_what_a_dataset_without_a_format_gives_is_refused_by_name() -> None:
    """A loader's collation then has a tensor for each position."""
    columns = [torch.ones(2, dtype=torch.int64)] * 3
    with pytest.raises(ValueError, match=r"'input_ids' of a micro-batch is a list .* dataset\.with_format\('torch'\)"):
        read_micro_batch({"input_ids": columns, "labels": columns})
