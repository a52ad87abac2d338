"""Data: the embedded corpus, the tokenizer, reading, blocks, and the order of samples."""

from __future__ import annotations

import csv
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from paceline.data import datasets as data
from paceline.data import standard_library
from paceline.data.batch_plan import BatchPlan, TrainingBatches, evaluation_batches
from paceline.data.datasets import choose_block_size
from paceline.data.reading import read as read_raw
from paceline.data.rows import Collator, Rows
from paceline.data.samples import make_blocks, make_samples
from paceline.data.tokenizer import load_tokenizer, train_tokenizer
from paceline.hf.arguments import DataArguments, ModelArguments

DOCUMENTS = [f"def f{i}(x):\n\treturn  [ {i} , x ]  # é 你好\n" for i in range(40)]
LONG_AGO = 1e9
"""The age of a file tells whether it was written again, however coarse the file system's clock is."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(DOCUMENTS, vocab_size=300)


def write(directory: Path, kind: str, texts: list[str]) -> str:
    path = directory / f"corpus.{kind}"
    if kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["number", "text"], *([i, t] for i, t in enumerate(texts))])
    elif kind == "json":
        path.write_text(json.dumps([{"number": i, "text": t} for i, t in enumerate(texts)]))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"number": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    elif kind == "parquet":
        Dataset.from_dict({"number": list(range(len(texts))), "text": texts}).to_parquet(path)
    else:
        path.write_text("".join(texts))
    return str(path)


# the embedded corpus


def test_standard_library_is_stable_and_bounded() -> None:
    files = standard_library.source_files()
    assert files == standard_library.source_files()
    assert files == sorted(files)
    assert 1_000_000 < sum(p.stat().st_size for p in files) <= standard_library.MAX_BYTES
    train, held_out = standard_library.split(files)
    assert sorted(train + held_out) == files
    assert 0 < len(held_out) < 0.15 * len(files)
    # a file stays on its side whatever other files there are
    assert standard_library.split(held_out)[1] == held_out
    assert standard_library.split(files, 0) == (files, [])


def test_standard_library_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("b = 1\n")
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "large.py").write_text("#" * 100)
    (tmp_path / "_sysconfigdata__linux.py").write_text("x = 1\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text("c = 1\n")
    assert [p.name for p in standard_library.source_files(tmp_path, max_bytes=50)] == ["a.py", "b.py"]
    with pytest.raises(ValueError, match=r"needs the standard library's \*.py files. Remedy: --train_file"):
        standard_library.source_files(tmp_path / "test" / "none")


# the tokenizer


@given(st.text())
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_is_saved_and_deterministic(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "one")
    train_tokenizer(iter(DOCUMENTS), vocab_size=300).save_pretrained(tmp_path / "two")
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id, len(loaded)) == (0, 1, 2, 300)
    text = "    if x :\n\t\ty = ' a  b '\r\n</s> don't ."
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text


def test_vocabulary_has_room_for_bytes() -> None:
    with pytest.raises(ValueError, match=r"vocab_size 258: must hold 256 bytes.*Remedy: 259 or more"):
        train_tokenizer(DOCUMENTS, vocab_size=258)


def test_load_tokenizer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    bare.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelArguments(tokenizer_name=str(tmp_path), model_revision="of-the-model"))
    assert (loaded.pad_token, len(loaded)) == ("</s>", len(tokenizer))
    with pytest.raises(ValueError, match="Remedy: --tokenizer_name"):
        load_tokenizer(ModelArguments())
    with pytest.raises(ValueError, match="--model_name_or_path /nowhere/at/all: there is no such directory"):
        load_tokenizer(ModelArguments(model_name_or_path="/nowhere/at/all"))
    with pytest.raises(ValueError, match=r"no tokenizer can be loaded: .* Remedy: give the path of a folder; none has"):
        load_tokenizer(ModelArguments(model_name_or_path="misspelt"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"no tokenizer can be loaded: .* Remedy: --tokenizer_name with a model of"):
        load_tokenizer(ModelArguments(model_name_or_path=str(tmp_path / "model")))


# reading


def load_raw(args: DataArguments, **options: Any) -> tuple[Dataset, Dataset | None]:
    raw = read_raw(args, seed=0, **options)
    assert isinstance(raw.train, Dataset)
    return raw.train, raw.held_out


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_documents_of_every_kind(tmp_path: Path, kind: str) -> None:
    train, validation = load_raw(DataArguments(train_file=write(tmp_path, kind, DOCUMENTS)))
    assert validation is not None
    assert train.column_names == validation.column_names == ["text"]
    # the first 5 % are held out, as in run_clm.py
    assert (list(validation["text"]), list(train["text"])) == (DOCUMENTS[:2], DOCUMENTS[2:])


def test_lines_and_whole_files(tmp_path: Path) -> None:
    path = write(tmp_path, "txt", ["a\n", "\n", "b\n"])
    train, validation = load_raw(DataArguments(train_file=path, validation_split_percentage=0))
    assert (train.column_names, list(train["line"]), validation) == (["line"], ["a\n", "\n", "b\n"], None)
    args = DataArguments(train_file=path, keep_linebreaks=False, validation_split_percentage=0)
    assert list(load_raw(args)[0]["text"]) == ["a", "", "b"]
    source = write(tmp_path, "py", DOCUMENTS)
    train, validation = load_raw(DataArguments(train_file=source, validation_file=path))
    assert list(train["text"]) == ["".join(DOCUMENTS)]
    assert validation is not None
    assert validation.column_names == ["line"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_name_is_no_pattern(tmp_path: Path, streaming: bool) -> None:
    """``notes[1].jsonl`` is not ``notes1.jsonl``."""
    folder = tmp_path / "run[2]"
    folder.mkdir()
    for name in ("notes[1].jsonl", "notes1.jsonl", "n*.jsonl"):
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    for name in ("notes[1].jsonl", "n*.jsonl"):
        args = DataArguments(train_file=str(folder / name), streaming=streaming, validation_split_percentage=0)
        assert read_raw(args, seed=0).texts(9) == [name]


def test_too_few_rows_to_hold_any_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train, validation = load_raw(DataArguments(train_file=write(tmp_path, "jsonl", DOCUMENTS[:3])))
    assert (len(train), validation) == (3, None)
    assert "nothing is held out, 5 % of its 3 rows is no row" in caplog.text


def test_embedded_corpus() -> None:
    train, validation = load_raw(DataArguments())
    files = standard_library.split(standard_library.source_files())
    assert validation is not None
    assert (len(train), len(validation)) == tuple(map(len, files))
    assert train[0]["text"] == files[0][0].read_text(encoding="utf-8")


def test_directory_as_dataset_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split, texts in (("train", DOCUMENTS[:30]), ("validation", DOCUMENTS[30:])):
        Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    train, validation = load_raw(DataArguments(dataset_name=str(tmp_path)))
    assert validation is not None
    assert (list(train["text"]), list(validation["text"])) == (DOCUMENTS[:30], DOCUMENTS[30:])


@pytest.mark.parametrize("streaming", [False, True])
def test_directory_of_save_to_disk(streaming: bool, tmp_path: Path) -> None:
    Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(tmp_path)
    args = DataArguments(dataset_name=str(tmp_path), streaming=streaming, shuffle_buffer_size=0)
    read = read_raw(args, seed=0)
    held_out = [] if read.held_out is None else list(read.held_out["text"])
    assert held_out + read.texts(len(DOCUMENTS)) == DOCUMENTS
    assert bool(held_out) != streaming


def test_columns(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"n": 1, "title": "a", "body": "b"}\n')

    def read(column: str | None) -> list[str]:
        return list(load_raw(DataArguments(train_file=str(path), text_column=column))[0]["text"])

    assert (read(None), read("body")) == (["a"], ["b"])
    for column in ("n", "text"):
        message = (
            rf"no column '{column}' of strings; the columns are n, title, body\. Remedy: --text_column .*title, body"
        )
        with pytest.raises(ValueError, match=message):
            read(column)
    path.write_text('{"n": 1}\n')
    with pytest.raises(ValueError, match=r"no column of strings; the columns are n.*there is none"):
        read(None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 not at all", "cannot be read: .*[Pp]arquet"),
        ("a.json", b'{"text": "a"', "cannot be read: "),
        (
            "a.jsonl",
            b'{"text": "a"}\n' * 40 + b'{"text": "a", }\n',
            "cannot be read: JSON parse error: Missing a name for object member. in row 40",
        ),
        ("a.csv", b"text\na\nb,c,d\n", "cannot be read: .*Expected 1 fields in line 3, saw 3"),
        ("a.csv", b'text\n"a\n', "cannot be read: .*EOF inside string"),
        ("a.txt", b"caf\xe9\n", "cannot be read: 'utf-8' codec can't decode byte 0xe9"),
        ("a.txt", b"", "must have content, but is empty"),
        ("a.json", b" \n", "(must have rows, but has none|cannot be read)"),
        ("a.csv", b"text\n", "(must have rows, but has none|cannot be read)"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^--train_file {path}: {message}") as caught:
        load_raw(DataArguments(train_file=str(path)))
    assert "\n" not in str(caught.value)
    assert "Remedy" in str(caught.value)


def test_hub_names_that_cannot_be_reached() -> None:
    with pytest.raises(ValueError, match=r"^--dataset_name nobody/nothing: cannot be read: .*Remedy"):
        load_raw(DataArguments(dataset_name="nobody/nothing"))


def test_progress_bars_are_left_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not are_progress_bars_disabled()
    load_raw(DataArguments(train_file=write(tmp_path, "jsonl", DOCUMENTS)))
    assert not are_progress_bars_disabled()
    assert "%|" not in capsys.readouterr().err


# blocks


def blocks_of(
    given: Dataset, tokenizer: PreTrainedTokenizerFast, size: int, what: str = "training data", **mapping: Any
) -> Dataset:
    return make_blocks(make_samples(given, tokenizer, None, what=what, **mapping), size, what, **mapping)


def joined(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[int]:
    return [token for text in texts if text for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]


def flat(blocks: Dataset) -> list[int]:
    return [token for block in blocks["input_ids"] for token in block]


@pytest.mark.parametrize("num_proc", [None, 2])
def test_blocks_are_the_joined_documents(tokenizer: PreTrainedTokenizerFast, num_proc: int | None) -> None:
    texts: list[Any] = [*DOCUMENTS[:20], "", None, *DOCUMENTS[20:]]
    blocks = blocks_of(Dataset.from_dict({"text": texts}), tokenizer, 32, num_proc=num_proc)
    expected = joined(tokenizer, texts)
    assert len(blocks) == len(expected) // 32
    assert {len(block) for block in blocks["input_ids"]} == {32}
    assert flat(blocks) == expected[: len(blocks) * 32]
    assert blocks.features["input_ids"].feature.dtype == "int32"


def test_lines_continue_one_another(tokenizer: PreTrainedTokenizerFast) -> None:
    lines = "".join(DOCUMENTS).splitlines(keepends=True)
    blocks = blocks_of(Dataset.from_dict({"line": lines}), tokenizer, 16)
    assert "".join(DOCUMENTS).startswith(tokenizer.decode(flat(blocks)).rstrip("\ufffd"))


def test_no_second_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    blocks = blocks_of(Dataset.from_dict({"text": ["a</s>", "b"]}), tokenizer, 4)
    assert flat(blocks) == [*tokenizer.encode("a</s>b"), tokenizer.eos_token_id]


def test_large_data_is_grouped_in_bounded_batches(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.samples.TOKENS_PER_GROUPING", 0)  # then 64 blocks at a time
    texts = DOCUMENTS * 100
    num_tokens = len(joined(tokenizer, texts))
    num_blocks = len(blocks_of(Dataset.from_dict({"text": texts}), tokenizer, 8))
    assert num_tokens // 8 - num_tokens // (8 * 64) - 1 <= num_blocks <= num_tokens // 8


def test_too_few_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    data = Dataset.from_dict({"text": DOCUMENTS[:1]})
    num_tokens = len(joined(tokenizer, DOCUMENTS[:1]))
    assert len(blocks_of(data, tokenizer, num_tokens)) == 1
    message = f"held-out data: 1 rows have {num_tokens} tokens, less than one block of {num_tokens + 1}. Remedy"
    with pytest.raises(ValueError, match=message):
        blocks_of(data, tokenizer, num_tokens + 1, what="held-out data")
    with pytest.raises(ValueError, match="none of the 1 rows has a token to train on"):
        blocks_of(Dataset.from_dict({"text": [""]}), tokenizer, 4)


def test_blocks_are_cached(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    train, _ = load_raw(DataArguments(train_file=write(tmp_path, "jsonl", DOCUMENTS)), cache_dir=str(tmp_path))
    tokenizer("shifts the state of the tokenizer", truncation=True, max_length=2)
    first = blocks_of(train, tokenizer, 16)
    (before,) = first.cache_files
    os.utime(before["filename"], (LONG_AGO, LONG_AGO))
    assert blocks_of(train, tokenizer, 16).cache_files == [before]
    assert os.stat(before["filename"]).st_mtime == LONG_AGO
    assert blocks_of(train, tokenizer, 8).cache_files != [before]
    blocks_of(train, tokenizer, 16, load_from_cache_file=False)
    assert os.stat(before["filename"]).st_mtime > LONG_AGO


def test_one_rank_overwrites_the_cache(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--overwrite_cache: the first rank of a node tokenizes again, the others find its work."""
    args = DataArguments(train_file=write(tmp_path, "jsonl", DOCUMENTS), overwrite_cache=True, block_size=16)
    overwritten = []
    for rank in ("0", "1", "0"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        made = data.prepare(
            read_raw(args, seed=0, cache_dir=str(tmp_path)), args, tokenizer, LlamaConfig(), seed=0, progress=False
        )
        assert isinstance(made.train, Rows)
        (file,) = made.train._dataset.cache_files
        overwritten.append(os.stat(file["filename"]).st_mtime > LONG_AGO)
        os.utime(file["filename"], (LONG_AGO, LONG_AGO))
    assert overwritten == [True, False, True]


def test_block_size(tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture) -> None:
    small, large = LlamaConfig(max_position_embeddings=64), LlamaConfig(max_position_embeddings=4096)
    assert choose_block_size(None, tokenizer, small) == 64
    assert choose_block_size(4096, tokenizer, large) == 4096
    assert not caplog.records
    assert choose_block_size(None, tokenizer, large) == 1024
    assert "block_size is 1024; the model takes more, change it with --block_size" in caplog.text
    with pytest.raises(ValueError, match=r"--block_size 65: the model has 64 positions. Remedy: 64 or less"):
        choose_block_size(65, tokenizer, small)
    short = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, model_max_length=48)
    assert choose_block_size(60, short, small) == choose_block_size(None, short, small) == 48
    assert "block_size is 48 and not 60" in caplog.text


READER = """
import hashlib, os, sys, time
from paceline.hf.arguments import DataArguments
from paceline.data.reading import read
from paceline.data.samples import make_blocks, make_samples
from paceline.data.tokenizer import train_tokenizer
file, start = sys.argv[1:]
tokenizer = train_tokenizer([open(file).read()], vocab_size=300)
print("ready", flush=True)
while not os.path.exists(start):
    time.sleep(0.001)
raw = read(DataArguments(train_file=file), seed=0)
blocks = make_blocks(make_samples(raw.train, tokenizer, None), 16)
print(len(raw.held_out), len(blocks), hashlib.sha256(str(list(blocks["input_ids"])).encode()).hexdigest(), end=" ")
print([os.path.basename(file["filename"]) for file in blocks.cache_files])
"""


def test_processes_may_share_a_fresh_cache(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", READER, write(tmp_path, "jsonl", DOCUMENTS * 20), str(tmp_path / "start")]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    readers = [subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        (tmp_path / "start").touch()
        outputs = [reader.communicate(timeout=900)[0] for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    assert [reader.returncode for reader in readers] == [0, 0]
    # the same blocks from the same cache entry: fingerprints do not depend on the process
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("40 ")


# the order of samples


LAYOUTS = [(m, d, 12 // (m * d)) for m in (1, 2, 3, 4, 6, 12) for d in (1, 2, 3, 4, 6, 12) if 12 % (m * d) == 0]


@given(st.sampled_from(LAYOUTS), st.integers(12, 70), st.integers(0, 2**31), st.integers(0, 3))
def test_a_step_has_the_same_samples_in_every_layout(
    layout: tuple[int, int, int], num_samples: int, seed: int, epoch: int
) -> None:
    """The law: step t has slice t of the epoch's permutation, whoever trains on which part of it."""
    per_step, ranks, size = layout
    permutation = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    plans = [BatchPlan(num_samples, size, per_step, rank, ranks, seed) for rank in range(ranks)]
    orders = [plan.order(epoch) for plan in plans]
    steps = num_samples // 12
    assert {(plan.global_batch_size, plan.steps_per_epoch) for plan in plans} == {(12, steps)}
    assert {tuple(order.shape) for order in orders} == {(steps, per_step, size)}
    for t in range(steps):
        assert torch.cat([order[t].flatten() for order in orders]).sort().values.tolist() == sorted(
            permutation[12 * t : 12 * t + 12]
        )
        for m, r, i in product(range(per_step), range(ranks), range(size)):
            assert orders[r][t, m, i] == permutation[12 * t + m * ranks * size + r * size + i]


def numbered(num_samples: int, block_size: int = 4) -> Rows:
    tokens = {"input_ids": [[i] * block_size for i in range(num_samples)], "length": [block_size] * num_samples}
    return Rows(Dataset.from_dict(tokens), Collator(), block_size)


def after(rows: Rows, plan: BatchPlan, steps: int) -> TrainingBatches:
    """The batches of a run that was interrupted after ``steps``."""
    batches = TrainingBatches(rows, plan)
    batches.load_state_dict(TrainingBatches(rows, plan).state_dict() | {"step": steps})
    return batches


def test_micro_batches_follow_the_plan_over_epochs() -> None:
    data, plan = numbered(11), BatchPlan(11, 2, 2, seed=7)
    batches = list(islice(TrainingBatches(data, plan), 12))
    assert {(tuple(b["input_ids"].shape), b["input_ids"].dtype, b["labels"].dtype) for b in batches} == {
        ((2, 4), torch.int64, torch.int64)
    }
    seen = torch.cat([b["input_ids"][:, 0] for b in batches]).tolist()
    assert seen == torch.cat([plan.order(epoch).flatten() for epoch in range(3)]).tolist()
    assert len(set(seen[:8])) == 8
    assert seen[:8] != seen[8:16]
    assert all(torch.equal(b["labels"], b["input_ids"]) for b in batches)
    for step in range(6):  # resumed
        batch = next(after(data, plan, step))
        assert torch.equal(batch["input_ids"], batches[2 * step]["input_ids"])


def test_layout_may_change_between_steps() -> None:
    data, plan = numbered(40), BatchPlan(40, 4, 3, seed=1)
    other = [replace(plan, micro_batch_size=2, data_parallel_size=2, data_parallel_rank=r) for r in range(2)]
    first = [set(b["input_ids"][:, 0].tolist()) for b in islice(after(data, plan, 2), 3)]
    second = [set(b["input_ids"][:, 0].tolist()) for p in other for b in islice(after(data, p, 2), 3)]
    assert set.union(*first) == set.union(*second)


def test_less_than_a_global_batch() -> None:
    with pytest.raises(
        ValueError, match=r"^11 training samples: .* 3 micro-batches of 2 on 2 .* = 12. Remedy: smaller"
    ):
        BatchPlan(11, 2, 3, 0, 2)


@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 4))
def test_evaluation_sees_each_sample_once(num_samples: int, size: int, ranks: int) -> None:
    data = numbered(num_samples)
    seen: list[int] = []
    for rank in range(ranks):
        batches = list(evaluation_batches(data, size, rank, ranks))
        assert all(len(b["input_ids"]) == size for b in batches[:-1])
        mine = [i for b in batches for i in b["input_ids"][:, 0].tolist()]
        assert mine == list(range(rank, num_samples, ranks))
        seen += mine
    assert sorted(seen) == list(range(num_samples))
