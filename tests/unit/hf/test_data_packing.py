"""Packing and padding: what goes into a row, and that a packed sample is computed as if it were alone."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, PretrainedConfig

from paceline.data.chat import IGNORED
from paceline.data.packing import require_packable
from paceline.data.rows import Collator, Rows, best_fit_decreasing
from paceline.hf.parity import cuts
from paceline.hf.stage import SIDE_INPUTS
from paceline.hf.weights import load_stage
from support import flash_attention

LENGTHS = [5, 12, 1, 7, 3, 9, 16, 2, 4]


def samples() -> Dataset:
    """Prompts of a third of each sample, then completions; one of a single token, which has nothing to learn."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]
    labels = [[IGNORED] * (len(i) // 3) + i[len(i) // 3 :] for i in ids]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "length": LENGTHS})


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 30))
def test_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    """Each sample in one row, no row too full; no two rows could be one; against brute force, the same rows' number."""
    order, ends = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = [part.tolist() for part in np.split(order, ends[:-1])] if len(ends) else []
    fill = sorted(sum(lengths[i] for i in row) for row in rows)
    assert all(row == sorted(row) and row for row in rows)
    assert all(total <= capacity for total in fill)
    assert len(fill) < 2 or fill[0] + fill[1] > capacity
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    assert len(rows) == len(rooms)


def test_padded_batches_are_as_long_as_their_longest_row() -> None:
    rows = Rows(samples(), Collator(pad_token_id=1))
    batch = rows.batch([0, 1, 2])
    assert batch["input_ids"].shape == (3, 12)
    assert batch["attention_mask"].sum(1).tolist() == [5, 12, 1]
    assert batch["input_ids"][0, 5:].eq(1).all()
    assert batch["labels"][0].tolist() == [IGNORED, *batch["input_ids"][0, 1:5].tolist(), *[IGNORED] * 7]
    assert set(rows.batch([6])) == {"input_ids", "labels"}, "nothing is padded: no mask"
    rows = Rows(samples(), Collator(pad_to_multiple_of=8))
    assert rows.batch([0, 1])["input_ids"].shape == (2, 16)


def test_packed_rows_say_where_samples_begin() -> None:
    rows = Rows(samples(), Collator(packed=True, pad_token_id=1), 16)
    assert len(rows) == 4  # 59 tokens
    batch = rows.batch(list(range(len(rows))))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    for index in range(len(rows)):
        members = rows.samples_of(index)
        starts = [0, *np.cumsum([LENGTHS[i] for i in members]).tolist()]
        position_ids = batch["position_ids"][index].tolist()
        # the padding is a sample of its own
        assert [i for i, position in enumerate(position_ids) if position == 0] == [s for s in starts if s < 16]
        assert all(batch["labels"][index, start].item() == IGNORED for start in starts if start < 16)
        tokens = [token for i in members for token in samples()[i]["input_ids"]]
        assert batch["input_ids"][index].tolist() == [*tokens, *[1] * (16 - len(tokens))]


def loss_and_gradients(config: PretrainedConfig, rows: Rows, batches: list[list[int]], num_stages: int) -> list[float]:
    """Of a model in stages, weighted by label tokens over all batches: the loss, and the norm of each gradient."""
    edges = [2] if num_stages == 2 else []
    stages = [load_stage(None, config, cut).train() for cut in cuts(4, *edges)]
    loaded = [rows.batch(indices) for indices in batches]
    tokens = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in loaded)
    total = 0.0
    for batch in loaded:
        stream, side = batch["input_ids"], {name: batch[name] for name in SIDE_INPUTS if name in batch}
        for stage in stages:
            stream, routing = stage(stream, side)
        loss = stages[-1].loss(stream, batch["labels"], routing, tokens)
        loss.backward()
        total += loss.item()
    norms = [p.grad.norm().item() for stage in stages for p in stage.parameters() if p.grad is not None]
    return [total, tokens, *norms]


SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 97}
FAMILIES = {
    "llama": {"intermediate_size": 64, "num_key_value_heads": 2},
    "gpt2": {"n_inner": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gemma3_text": {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "gemma2": {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_packed_rows_have_the_loss_of_the_samples_alone(family: str, attention: str) -> None:
    """Packed into rows, joined to one row, padded in one batch, each alone: one loss, the same gradients."""
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    config._attn_implementation = attention
    alone = [[i] for i in range(len(LENGTHS))]
    wanted = loss_and_gradients(config, Rows(samples(), Collator()), alone, 1)
    packed = Rows(samples(), Collator(packed=True), 16)
    ways: list[tuple[Rows, list[list[int]]]] = [
        (packed, [[0, 1], [2, 3]]),
        (Rows(samples(), Collator(packed=True, joined=True), 16), [[0, 1, 2, 3]]),
        (Rows(samples(), Collator(pad_to_multiple_of=4)), [list(range(len(LENGTHS)))]),
    ]
    for rows, batches in ways:
        assert loss_and_gradients(config, rows, batches, 1) == pytest.approx(wanted, rel=1e-4), rows
    two = loss_and_gradients(config, packed, [[0, 1], [2, 3]], 2)
    assert two[:2] == pytest.approx(wanted[:2], rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2"])
def test_flash_attention_keeps_the_samples_of_a_joined_row_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one stage and in two, with windows and soft caps; padded rows too. Rows side by side it would mix."""
    flash_attention.allow(monkeypatch)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    config._attn_implementation = "eager"
    alone = [[i] for i in range(len(LENGTHS))]
    wanted = loss_and_gradients(config, Rows(samples(), Collator()), alone, 1)
    config._attn_implementation = "flash_attention_2"
    joined = Rows(samples(), Collator(packed=True, joined=True), 16)
    padded = Rows(samples(), Collator())
    for rows, batches in ((joined, [[0, 1, 2, 3]]), (padded, [list(range(len(LENGTHS)))]), (padded, alone)):
        assert loss_and_gradients(config, rows, batches, 1) == pytest.approx(wanted, rel=1e-4), rows
    two = loss_and_gradients(config, joined, [[0, 1], [2, 3]], 2)
    assert two[:2] == pytest.approx(wanted[:2], rel=1e-5)
    side_by_side = loss_and_gradients(config, Rows(samples(), Collator(packed=True), 16), [[0, 1], [2, 3]], 1)
    assert side_by_side[0] != pytest.approx(wanted[0], rel=1e-4)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("mamba", "takes no position_ids"),
        ("bloom", "takes no position_ids"),
        ("opt", "does not keep packed samples apart: .* differ by"),
        ("qwen3_next", "does not keep packed samples apart: .* differ by"),
    ],
)
def test_models_that_mix_packed_samples_are_refused(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^--packing: model type '{family}' {message}.*Remedy: leave --packing out"):
        require_packable(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mixtral", "gpt2"])
def test_models_that_keep_packed_samples_apart(family: str) -> None:
    require_packable(AutoConfig.for_model(family))
