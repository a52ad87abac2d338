"""The order of samples, interrupted anywhere and resumed, in every way that data is read and laid out.

Every sample carries its number in its text, so that what a step trained on can be read from its tokens.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, PreTrainedTokenizerFast

from paceline.data import datasets as data
from paceline.data import streaming
from paceline.data.batch_plan import BatchPlan, TrainingBatches, evaluation_batches
from paceline.data.chat import IGNORED
from paceline.data.reading import read
from paceline.data.streaming import RawStream
from paceline.data.tokenizer import train_tokenizer
from paceline.hf.arguments import DataArguments

NUM_ROWS, SHARDS = 67, 3
BLOCK, GLOBAL = 48, 4
STEPS = 40
"""Of four rows each: more than two epochs of every case."""

Step = list[tuple[tuple[int, ...], ...]]
"""The rows of a step in the global batch's order, each with its tokens, labels and positions, padding cut off."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = train_tokenizer([row["text"] for row in rows("text")], vocab_size=300)
    made.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


def rows(kind: str) -> list[dict[str, Any]]:
    texts = [f"[{i}]" + " word" * (i * 7 % 11) for i in range(NUM_ROWS)]
    if kind == "text":
        return [{"text": text} for text in texts]
    return [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": t}]} for t in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows of both kinds as sharded parquet files and as one jsonl file."""
    path = tmp_path_factory.mktemp("data")
    for kind in ("text", "messages"):
        (path / kind).mkdir()
        given = rows(kind)
        (path / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
        for shard in range(SHARDS):
            part = Dataset.from_list(given[shard * NUM_ROWS // SHARDS : (shard + 1) * NUM_ROWS // SHARDS])
            part.to_parquet(path / kind / f"train-{shard:05}-of-{SHARDS:05}.parquet")
    return path


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("text", {}),
    "packed": ("messages", {"packing": True}),
    "packed text": ("text", {"packing": True}),
    "padded": ("messages", {}),
    "streamed blocks": ("text", {"streaming": True}),
    "streamed packed": ("messages", {"streaming": True, "packing": True}),
    "streamed packed text": ("text", {"streaming": True, "packing": True}),
    "streamed padded": ("messages", {"streaming": True}),
    "streamed file": ("messages", {"streaming": True, "packing": True, "file": True}),
    "streamed unshuffled": ("text", {"streaming": True, "shuffle_buffer_size": 0}),
}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that interruptions fall into the middle and on the edges of chunks and windows."""
    monkeypatch.setattr(streaming, "WINDOW", 3)
    monkeypatch.setattr(streaming, "CHUNK", 13)
    monkeypatch.setattr(streaming, "ROWS_PER_TOKENIZATION", 4)


_PREPARED: dict[str, data.Data] = {}


def prepared(case: str, folder: Path, tokenizer: PreTrainedTokenizerFast, **changes: Any) -> data.Data:
    """As a new process has it: streams at their beginning."""
    key = f"{case} {folder} {changes}"
    if key not in _PREPARED:
        _PREPARED[key] = _prepare(case, folder, tokenizer, **changes)
    return deepcopy(_PREPARED[key])


def _prepare(case: str, folder: Path, tokenizer: PreTrainedTokenizerFast, **changes: Any) -> data.Data:
    kind, options = CASES[case]
    options = {"shuffle_buffer_size": 16, "block_size": BLOCK, "validation_split_percentage": 0} | options | changes
    if options.pop("file", False):
        options["train_file"] = str(folder / f"{kind}.jsonl")
    else:
        options.setdefault("dataset_name", str(folder / kind))
    args = DataArguments(**options)
    raw = read(args, seed=5, cache_dir=str(folder / "cache"))
    config = LlamaConfig(max_position_embeddings=64)
    return data.prepare(raw, args, tokenizer, config, seed=5, progress=False)


def batches_of(given: data.Data, layout: tuple[int, int, int], seed: int = 5) -> list[TrainingBatches]:
    """Of each replica, for ``layout`` micro-batches, replicas, micro-batch size."""
    m, d, b = layout
    return [given.training_batches(BatchPlan(given.num_samples, b, m, r, d, seed)) for r in range(d)]


class Run:
    """All replicas of a run. ``make`` gives each its own data: streams are read by every rank for itself."""

    def __init__(self, make: Any, layout: tuple[int, int, int], state: dict[str, Any] | None = None) -> None:
        self.layout = layout
        self.replicas = [batches_of(make(), layout)[r] for r in range(layout[1])]
        if state is not None:
            for replica in self.replicas:
                replica.load_state_dict(json.loads(json.dumps(state)))

    def state(self) -> dict[str, Any]:
        states = [replica.state_dict() for replica in self.replicas]
        assert all(state == states[0] for state in states), "the same on every rank"
        return json.loads(json.dumps(states[0]))

    def step(self) -> Step:
        taken = [[next(replica) for _ in range(self.layout[0])] for replica in self.replicas]
        return [row for m in range(self.layout[0]) for replica in taken for row in rows_of(replica[m])]


def rows_of(batch: dict[str, torch.Tensor]) -> Iterator[tuple[tuple[int, ...], ...]]:
    for i, ids in enumerate(batch["input_ids"]):
        mask = batch["attention_mask"][i].bool() if "attention_mask" in batch else torch.ones_like(ids).bool()
        parts = [ids[mask], batch["labels"][i][mask]]
        if "position_ids" in batch:
            # padding is the last sample of a packed row, of padding tokens without labels
            positions = batch["position_ids"][i]
            used = len(ids)
            while used and ids[used - 1] == 0 and parts[1][used - 1] == IGNORED:
                used -= 1
            parts = [part[:used] for part in (*parts, positions)]
        yield tuple(tuple(part.tolist()) for part in parts)


LAYOUTS = [(4, 1, 1), (1, 2, 2), (2, 2, 1), (1, 1, 4)]


@pytest.mark.parametrize("case", CASES)
def test_a_run_resumes_where_it_was_interrupted(case: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """After every step, in another layout of the same global batch: the steps that follow are the same."""

    def make() -> data.Data:
        return prepared(case, folder, tokenizer)

    run, steps, states = Run(make, (2, 1, 2)), [], []
    for _ in range(STEPS):
        states.append(run.state())
        steps.append(run.step())
    states.append(run.state())
    for at in [*range(0, 12), *range(13, STEPS - 3, 4)]:
        resumed = Run(make, LAYOUTS[at % len(LAYOUTS)], states[at])
        assert resumed.state() == states[at]
        assert [resumed.step() for _ in range(3)] == steps[at : at + 3], f"resumed after {at} steps"
        assert resumed.state() == states[at + 3]


@pytest.mark.parametrize("case", [case for case in CASES if "blocks" not in case and "unshuffled" not in case])
def test_every_sample_once_an_epoch(case: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """By the samples' numbers, through interruptions: none is lost or repeated, and each epoch has its own order."""
    given = prepared(case, folder, tokenizer)
    seen: list[int] = []
    state = None
    while len(seen) < 2 * NUM_ROWS:
        run = Run(lambda: prepared(case, folder, tokenizer), LAYOUTS[len(seen) % 4], state)
        for _ in range(3):
            for ids, *_ in run.step():
                seen += map(int, re.findall(r"\[(\d+)\]", tokenizer.decode(ids)))
        state = run.state()
    if given.num_samples is None:
        first, second = seen[:NUM_ROWS], seen[NUM_ROWS : 2 * NUM_ROWS]
        assert sorted(first) == sorted(second) == list(range(NUM_ROWS))
        assert first != second
        assert first != sorted(first)
    else:  # the last incomplete global batch of an epoch is dropped
        assert max(Counter(seen).values()) <= 3
        assert len(set(seen)) > NUM_ROWS - GLOBAL * BLOCK / 10


def test_streamed_blocks_are_the_joined_documents(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """No token is lost between windows, or at the end of an epoch."""
    run = Run(lambda: prepared("streamed unshuffled", folder, tokenizer), (1, 1, 4))
    tokens = [token for _ in range(STEPS) for ids, _ in run.step() for token in ids]
    epoch = [t for row in rows("text") for t in [*tokenizer.encode(row["text"]), tokenizer.eos_token_id]]
    endless = (epoch * (1 + len(tokens) // len(epoch)))[: len(tokens)]
    assert tokens == endless
    assert len(tokens) > 2 * len(epoch)


def test_resuming_reads_a_chunk_and_tokenizes_a_window(
    folder: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the epoch from its beginning."""
    run = Run(lambda: prepared("streamed packed", folder, tokenizer), (1, 1, 4))
    for _ in range(9):
        run.step()
    state = run.state()
    resumed = prepared("streamed packed", folder, tokenizer)
    read: list[Any] = []
    made: list[Any] = []
    original = RawStream._named

    def counted(self: RawStream, row: dict[str, Any]) -> dict[str, Any]:
        read.append(row)
        return original(self, row)

    monkeypatch.setattr(RawStream, "_named", counted)
    stream = resumed.train
    assert isinstance(stream, streaming.RowStream)
    make = stream._make
    stream._make = lambda rows: made.extend(rows) or make(rows)  # type: ignore[func-returns-value]
    stream.load_state_dict(state["stream"])
    assert not read, "a rank without data, of a middle stage, loads a state at no cost"
    next(stream)
    assert 0 < len(made) <= 24
    assert 0 < len(read) <= 16 * 2


def test_state_in_the_middle_of_a_step(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (batches,) = batches_of(prepared("padded", folder, tokenizer), (2, 1, 2))
    next(batches)
    with pytest.raises(RuntimeError, match="step 0 has 1 micro-batches left"):
        batches.state_dict()


@pytest.mark.parametrize("case", ["blocks", "packed", "padded", "streamed blocks", "streamed packed"])
def test_another_run_is_refused(case: str, folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Other data, block size, seed or global batch: named, with both values and the remedy."""
    same = prepared(case, folder, tokenizer)
    (batches,) = batches_of(same, (2, 1, 2))
    state = batches.state_dict()

    def message(given: data.Data, layout: tuple[int, int, int] = (2, 1, 2), seed: int = 5) -> str:
        with pytest.raises(ValueError, match=r"Remedy: the data and flags of the interrupted run") as caught:
            batches_of(given, layout, seed)[0].load_state_dict(state)
        return str(caught.value)

    told = message(same, (2, 2, 2))
    assert "global batch size was 4 and is 8" in told
    assert "may not: here, --gradient_accumulation_steps 1), or a new run" in told
    assert "may not), or a new run" in message(same, (1, 1, 3))
    assert "seed was 5 and is 6" in message(same, seed=6)
    kind = CASES[case][0]
    if case != "padded":
        assert "was" in message(prepared(case, folder, tokenizer, block_size=40))
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in [*rows(kind)[1:], rows(kind)[0]]))
    options = {"train_file": str(other), "dataset_name": None}
    assert re.search(
        r"(content|samples|shards|first rows|rows) was", message(prepared(case, folder, tokenizer, **options))
    )
    if "streamed" in case:
        assert "shuffle buffer size was 16 and is 8" in message(
            prepared(case, folder, tokenizer, shuffle_buffer_size=8)
        )
        assert "packed" in message(prepared(case, folder, tokenizer, packing="packed" not in case))


@pytest.mark.parametrize("case", ["blocks", "padded", "streamed blocks", "streamed packed"])
def test_another_way_to_make_samples_is_refused(case: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Another tokenizer, template or loss, of the same rows; checking a state changes nothing."""
    same = prepared(case, folder, tokenizer)
    (batches,) = batches_of(same, (1, 1, 4))
    next(batches)
    state = batches.state_dict()
    kind = CASES[case][0]
    grown, templated = deepcopy(tokenizer), deepcopy(tokenizer)
    grown.add_tokens(["never seen"])
    templated.chat_template = tokenizer.chat_template.replace(": ", " - ")
    cases: list[tuple[str, data.Data]] = [("tokenizer was", _prepare(case, folder, grown))]
    if kind == "messages":
        cases.append(("chat template was", _prepare(case, folder, templated)))
        unmasked = _prepare(case, folder, tokenizer, completion_only_loss=False)
        cases.append(("completion only loss was True and is False", unmasked))
    for message, other in cases:
        with pytest.raises(ValueError, match=f"{message}.*Remedy: the data and flags of the interrupted run"):
            batches_of(other, (1, 1, 4))[0].check_state(state)
    if kind == "text":  # has neither
        batches_of(_prepare(case, folder, templated, completion_only_loss=False), (1, 1, 4))[0].check_state(state)
    (fresh,) = batches_of(prepared(case, folder, tokenizer), (1, 1, 4))
    before = fresh.state_dict()
    fresh.check_state(state)
    assert fresh.state_dict() == before != state


def test_the_datas_place_does_not_matter(folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    moved = tmp_path / "moved.jsonl"
    moved.write_text((folder / "messages.jsonl").read_text())
    run = Run(lambda: prepared("streamed file", folder, tokenizer), (1, 1, 4))
    run.step()
    options = {"train_file": str(moved), "file": False, "dataset_name": None}
    resumed = Run(lambda: prepared("streamed file", folder, tokenizer, **options), (1, 1, 4), run.state())
    assert resumed.step() == run.step()


@pytest.mark.parametrize("num_left", [10, 17])
def test_a_stream_that_became_shorter_is_refused(
    num_left: int, folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Where all of its chunk is gone, and where all but a row are."""
    run = Run(lambda: prepared("streamed file", folder, tokenizer), (1, 1, 4))
    while run.state()["stream"]["raw"] is None or run.state()["stream"]["raw"]["chunk"] != 1:
        run.step()
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("".join((folder / "messages.jsonl").read_text().splitlines(keepends=True)[:num_left]))
    options = {"train_file": str(shorter), "file": False, "dataset_name": None}
    resumed = Run(lambda: prepared("streamed file", folder, tokenizer, **options), (1, 1, 4), run.state())
    with pytest.raises(ValueError, match=r"has changed since the checkpoint was saved, .* rows were given .* Remedy"):
        resumed.step()


def test_a_stream_that_breaks_off_names_its_file(folder: Path, tmp_path: Path) -> None:
    """In the middle of training, and where the first rows are looked at again: the data and the remedy."""
    shutil.copytree(folder / "text", tmp_path / "text")
    args = DataArguments(dataset_name=str(tmp_path / "text"), streaming=True, shuffle_buffer_size=0)
    raw = read(args, seed=0)
    assert isinstance(raw.train, RawStream)
    assert len(raw.train.first(13)) == 13
    (torn,) = (tmp_path / "text").glob("train-00001*")
    torn.write_bytes(b"PAR1")
    for rows in (lambda: raw.train.first(100), lambda: list(raw.train.rows_from(None))):
        with pytest.raises(ValueError, match=r"^--dataset_name .*/text: cannot be read: .*\. Remedy: check"):
            rows()


def test_a_stream_without_a_label_ends(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text('{"prompt": "a", "completion": ""}\n' * 5)
    args = DataArguments(train_file=str(path), streaming=True)
    given = data.prepare(read(args, seed=0), args, tokenizer, LlamaConfig(max_position_embeddings=64), seed=0)
    with pytest.raises(ValueError, match=r"empty.jsonl: has no row with a token to train on. Remedy"):
        next(batches_of(given, (1, 1, 2))[0])


@pytest.mark.parametrize("case", ["padded", "packed", "streamed packed", "streamed blocks"])
def test_evaluation_has_every_sample_once(case: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    kind = CASES[case][0]
    file = str(folder / f"{kind}.jsonl")
    given = prepared(case, folder, tokenizer, train_file=file, validation_file=file, dataset_name=None)
    seen: list[str] = []
    for rank in range(2):
        for batch in evaluation_batches(given.held_out, 3, rank, 2):
            seen += [tokenizer.decode(ids) for ids, *_ in rows_of(batch)]
    numbers = [int(n) for text in seen for n in re.findall(r"\[(\d+)\]", text)]
    if "blocks" in case:
        assert len(numbers) > 0.8 * NUM_ROWS
        assert len(seen) == len(set(seen))
    else:
        assert sorted(numbers) == list(range(NUM_ROWS))
