"""Conversations, prompts with completions, and documents as samples: what is learned of them, what is refused."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from datasets import Dataset
from transformers import LlamaConfig, PreTrainedTokenizerFast

from paceline.data import datasets as data
from paceline.data.batch_plan import BatchPlan, evaluation_batches
from paceline.data.chat import IGNORED, messages_sample, pair_sample
from paceline.data.reading import read
from paceline.data.samples import make_samples
from paceline.data.tokenizer import train_tokenizer
from paceline.hf.arguments import DataArguments, parse

PLAIN = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<assistant>{% endif %}"
MARKED = "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}{% generation %}"
MARKED += "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
UNSTABLE = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if not loop.last %}old {% endif %}{{ m.content }}{% endfor %}"
)

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One, please"},
    {"role": "assistant", "content": "1 é 你好"},
    {"role": "user", "content": "And two?"},
    {"role": "assistant", "content": "2"},
]


def tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    made = train_tokenizer(["Be brief. One, please, and two <user> <assistant>"], vocab_size=300)
    made.chat_template = template
    return made


def learned(tokenizer: PreTrainedTokenizerFast, sample: tuple[list[int], list[int]]) -> str:
    ids, labels = sample
    assert len(ids) == len(labels)
    assert all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))
    return tokenizer.decode([label for label in labels if label != IGNORED])


def test_the_loss_of_a_conversation_is_on_the_assistants_turns() -> None:
    """Found by prefixes of the conversation: the turns' text and end, nothing of what was asked."""
    plain = tokenizer()
    sample = messages_sample(plain, TALK)
    assert plain.decode(sample[0]) == "".join(f"<{m['role']}>{m['content']}</s>" for m in TALK)
    assert learned(plain, sample) == "1 é 你好</s>2</s>"
    assert learned(plain, messages_sample(plain, TALK, completion_only=False)) == plain.decode(sample[0])
    assert learned(plain, messages_sample(plain, TALK[:2])) == ""


def test_templates_that_mark_the_generation_agree() -> None:
    assert messages_sample(tokenizer(MARKED), TALK) == messages_sample(tokenizer(PLAIN), TALK)


def test_what_stands_before_an_assistant_that_speaks_first_has_no_loss() -> None:
    """As where the template marks the turns: neither the name of the speaker nor a system prompt of the template's."""
    marked, plain = (tokenizer("Be brief. " + template) for template in (MARKED, PLAIN))
    assert learned(plain, messages_sample(plain, TALK[2:])) == "1 é 你好</s>2</s>"
    assert messages_sample(marked, TALK[2:]) == messages_sample(plain, TALK[2:])


def test_a_template_that_rewrites_the_past_is_refused_unless_it_marks_it() -> None:
    with pytest.raises(ValueError, match=r"changes what came before .*\(message 2\).*Remedy: --chat_template_path"):
        messages_sample(tokenizer(UNSTABLE), TALK)
    assert len(messages_sample(tokenizer(UNSTABLE), TALK, completion_only=False)[0]) > 10
    marked = UNSTABLE.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert "2" in learned(tokenizer(marked), messages_sample(tokenizer(marked), TALK))


def test_tools_reach_the_template() -> None:
    made = tokenizer("{% if tools %}{{ tools[0].name }}{% endif %}" + PLAIN)
    for tools in ([{"name": "clock"}], '[{"name": "clock"}]'):
        assert made.decode(messages_sample(made, TALK, tools)[0]).startswith("clock<system>")
    assert made.decode(messages_sample(made, TALK, [])[0]).startswith("<system>")


@pytest.mark.parametrize("streaming", [False, True])
def test_keys_of_other_rows_are_in_no_call_and_no_tool(streaming: bool, tmp_path: Path) -> None:
    """A typed column, as parquet files have it, has every key of any row in all of them, some with None."""
    template = (
        "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}"
    )
    calls = tokenizer(template + "{% endfor %}")
    given: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": "Go"},
                {"role": "assistant", "tool_calls": [{"arguments": {name: 1}}]},
            ],
            "tools": [{"properties": {name: {"type": "integer"}}}],
        }
        for name in ("day", "hour")
    ]
    file = tmp_path / "calls.parquet"
    Dataset.from_list(given).to_parquet(file)
    options: dict[str, Any] = {"streaming": True, "shuffle_buffer_size": 0} if streaming else {}
    args = DataArguments(train_file=str(file), validation_split_percentage=0, block_size=400, **options)
    found = data.prepare(read(args, seed=0, cache_dir=str(tmp_path)), args, calls, LlamaConfig(), seed=0)
    plan = BatchPlan(num_samples=found.num_samples, micro_batch_size=1, micro_batches_per_step=2)
    batches = found.training_batches(plan)
    texts = {calls.decode(next(batches)["input_ids"][0]) for _ in given}
    assert texts == {calls.apply_chat_template(row["messages"], row["tools"], tokenize=False) for row in given}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "'messages' must be a list of messages, .*; it is a str"),
        ([], "it is empty"),
        (["hello"], "message 0 is a str"),
        ([{"from": "human", "value": "x"}], "message 0 has from, value. Remedy: rename"),
        ([*TALK, {"role": "user", "content": [{"type": "image"}]}], "message 5 has role, content with .* is a list"),
        ([{"role": None, "content": "x"}], "message 0 has content"),
    ],
)
def test_wrong_messages(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        messages_sample(tokenizer(), messages)


def test_no_template_and_one_that_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the tokenizer has none\. Remedy: --chat_template_path"):
        messages_sample(tokenizer(None), TALK)
    with pytest.raises(ValueError, match=r"does not take a conversation of system, user.*: no system.* Remedy"):
        messages_sample(tokenizer("{{ raise_exception('no system') }}"), TALK)


def test_prompts_and_completions() -> None:
    """Strings: joined as they are, the end token appended once, the loss on the completion and the end."""
    plain = tokenizer()
    ids, labels = pair_sample(plain, "One,", " please")
    assert plain.decode(ids) == "One, please</s>"
    assert learned(plain, (ids, labels)) == " please</s>"
    assert pair_sample(plain, "One,", " please</s>") == (ids, labels)
    assert pair_sample(plain, "One,", " please", completion_only=False) == (ids, ids)
    assert learned(plain, pair_sample(plain, "", "please")) == "please</s>"
    assert pair_sample(plain, "One", "") == ([], [])
    # messages: the same tokens as the whole conversation, the loss on the last turn
    sample = pair_sample(plain, TALK[:4], TALK[4:])
    assert sample[0] == messages_sample(plain, TALK)[0]
    assert learned(plain, sample) == "2</s>"
    with pytest.raises(ValueError, match="'prompt' is a str and 'completion' a list: both must be strings"):
        pair_sample(plain, "One", TALK[4:])


def test_a_token_across_the_border_belongs_to_the_completion() -> None:
    """Where prompt and completion share a token, it is learned: else the completion would begin in its middle."""
    merged = train_tokenizer(["aaaaaaaabbbbbbbb ab ab ab ab"] * 20, vocab_size=262)
    assert len(merged.encode("ab")) == 1
    ids, labels = pair_sample(merged, "a", "b")
    assert ids == labels == [*merged.encode("ab"), merged.eos_token_id]


# columns


def rows(directory: Path, *given: dict[str, Any]) -> str:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(path)


PAIR = {"prompt": "One, ", "completion": "please"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"text": "One", "n": 1}, {}, ["text"]),
        ({"messages": TALK, "prompt": "One", "id": "x"}, {}, ["messages"]),
        (PAIR | {"tools": "[]"}, {}, ["completion", "prompt", "tools"]),
        (PAIR | {"text": "One"}, {"sample_kind": "prompt_completion"}, ["completion", "prompt"]),
        (PAIR | {"messages": TALK}, {"text_column": "prompt"}, ["text"]),
        (PAIR | {"messages": TALK}, {}, "more than one kind (messages, prompt_completion). Remedy: --sample_kind"),
        ({"prompt": "One"}, {}, "the columns prompt have no `completion`. Remedy: add it, or --text_column"),
        (PAIR, {"sample_kind": "messages"}, "--sample_kind messages needs messages; the columns are prompt"),
        ({"n": 1}, {}, "there is no column of strings; the columns are n"),
    ],
)
def test_columns_say_what_a_row_is(
    row: dict[str, Any], options: dict[str, Any], expected: Any, streaming: bool, tmp_path: Path
) -> None:
    file = rows(tmp_path, row)
    args = DataArguments(train_file=file, validation_file=file, streaming=streaming, **options)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"^--train_file {file}: .*{re.escape(expected)}"):
            read(args, seed=0)
        return
    raw = read(args, seed=0)
    assert raw.held_out is not None
    assert sorted(raw.train.column_names) == sorted(raw.held_out.column_names) == expected
    assert any("One" in text for text in raw.texts(5))


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_conversations_that_nobody_answers_are_told_so(column: str) -> None:
    plain, given = tokenizer(), Dataset.from_list([{column: TALK[:2]}, {column: TALK[1:2]}])
    told = r"none of the 2 rows has a token to train on, as no conversation has a turn of the assistant's\. Remedy: "
    with pytest.raises(ValueError, match=told + r"correct the roles, or --no_completion_only_loss"):
        make_samples(given, plain, 64)
    assert len(make_samples(given, plain, 64, completion_only=False)) == 2
    with pytest.raises(ValueError, match=r"train on\. Remedy: other data, or a larger --block_size"):
        make_samples(Dataset.from_list([{column: TALK}]), plain, 2)


def test_rows_without_a_label_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """An empty completion, and a prompt that leaves no room for its completion; documents are split instead."""
    plain = tokenizer()
    given = Dataset.from_list([PAIR, PAIR | {"completion": ""}, PAIR | {"prompt": "One, " * 20}])
    samples = make_samples(given, plain, 16)
    assert samples["input_ids"][0] == pair_sample(plain, **PAIR)[0]
    assert len(samples) == 1
    (record,) = caplog.records
    assert "2 of 3 samples have no token to train on within 16 tokens" in record.message
    with pytest.raises(ValueError, match="none of the 2 rows has a token to train on"):
        make_samples(given.select([1, 2]), plain, 16)
    with pytest.raises(ValueError, match=r"held-out data: .* or --validation_split_percentage 0 to hold none out\.$"):
        make_samples(given.select([1, 2]), plain, 16, what="held-out data")
    text = "One, please, and two " * 5
    parts = make_samples(Dataset.from_dict({"text": [text, "", None]}), plain, 16)
    assert "labels" not in parts.column_names, "all tokens have a loss"
    assert max(parts["length"]) == 16
    assert [token for part in parts["input_ids"] for token in part] == [*plain.encode(text), plain.eos_token_id]


def test_samples_are_cached(tmp_path: Path) -> None:
    """So that the other ranks of a node find what one of them tokenized; another template makes another entry."""
    args = DataArguments(train_file=rows(tmp_path, *[{"messages": TALK}] * 9), validation_split_percentage=0)
    given = read(args, seed=0, cache_dir=str(tmp_path)).train
    assert isinstance(given, Dataset)
    plain = tokenizer()
    first = make_samples(given, plain, 64).cache_files
    assert first
    plain("shifts the state of the tokenizer", truncation=True, max_length=2)
    assert make_samples(given, plain, 64).cache_files == make_samples(given, tokenizer(), 64).cache_files == first
    assert make_samples(given, plain, 63).cache_files != first
    assert make_samples(given, plain, 64, completion_only=False).cache_files != first
    assert make_samples(given, tokenizer(MARKED), 64).cache_files != first


ALPACA = {"instruction": "Add.", "input": "One, please", "output": "two"}
SHAREGPT = [
    {"from": role, "value": m["content"]} for role, m in zip(("system", "human", "gpt") * 2, TALK, strict=False)
]
SHAREGPT[3:] = [{"from": "human", "value": "And two?"}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize("streaming", [False, True])
def test_instructions_and_sharegpt(streaming: bool, tmp_path: Path) -> None:
    """As people have them: the loss is on outputs and on the assistant's turns, at once or in a stream."""

    def first(template: str | None, *given: dict[str, Any]) -> tuple[str, str]:
        made = tokenizer(template)
        args = DataArguments(
            train_file=rows(tmp_path, *given), validation_split_percentage=0, streaming=streaming, block_size=400
        )
        prepared = data.prepare(read(args, seed=0), args, made, LlamaConfig(), seed=0)
        plan = BatchPlan(prepared.num_samples, 1, 1)
        batch = next(prepared.training_batches(plan))
        return made.decode(batch["input_ids"][0]), learned(
            made, (batch["input_ids"][0].tolist(), batch["labels"][0].tolist())
        )

    for row in (ALPACA, {**ALPACA, "id": "7"}):
        text, answer = first(None, row)
        assert text.startswith("Below is an instruction that describes a task, paired with an input that provides")
        assert text.endswith("\n\n### Instruction:\nAdd.\n\n### Input:\nOne, please\n\n### Response:\ntwo</s>")
        assert answer == "two</s>"
        text, answer = first(PLAIN, row)
        assert (text, answer) == ("<user>Add.\n\nOne, please</s><assistant>two</s>", "two</s>")
    assert first(PLAIN, {**ALPACA, "system": "Be brief.", "prompt": "of a dump"}) == (
        "<system>Be brief.</s><user>Add.\n\nOne, please</s><assistant>two</s>",
        "two</s>",
    )
    assert first(None, {**ALPACA, "system": "Be brief."})[0].startswith("Be brief.\n\nBelow is an instruction")
    text, _ = first(None, {**ALPACA, "input": ""}, {**ALPACA, "output": ""})  # the second is dropped
    assert "### Input" not in text

    talk = "".join(f"<{m['role']}>{m['content']}</s>" for m in TALK)
    for row in (
        {"conversations": SHAREGPT},
        {"conversations": SHAREGPT[1:], "system": "Be brief.", "prompt": "of a dump"},
        {"conversations": [{**turn, "from": turn["from"].upper()} for turn in SHAREGPT]},
        {"conversations": TALK},
    ):
        assert first(PLAIN, row) == (talk, "1 é 你好</s>2</s>")


def test_instructions_beside_a_text_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A `text` stays what is learned, as in other data; what else there is does not go without a word."""
    for row, told in (
        ({**ALPACA, "text": "all"}, "only 'text' is learned. Remedy: --sample_kind instruction"),
        ({"question": "One?", "answer": "two"}, "only 'question' is learned. Remedy: --text_column"),
        ({"Messages": TALK, "source": "web"}, "only 'source' is learned. Remedy: the names messages, or prompt"),
        ({"text": "all", "url": "there"}, ""),
    ):
        caplog.clear()
        args = DataArguments(train_file=rows(tmp_path, row), validation_split_percentage=0)
        assert read(args, seed=0).train.column_names == ["text"]
        assert (told in caplog.text) if told else not caplog.records
    args = DataArguments(train_file=rows(tmp_path, {**ALPACA, "text": "all"}), sample_kind="instruction")
    assert set(read(args, seed=0).train.column_names) == {"instruction", "input", "output"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"conversations": [{"from": "narrator", "value": "x"}]},
            "turn 0 of 'conversations' is from 'narrator' .*user",
        ),
        ({"conversations": [{"from": "gpt", "value": None}]}, "from 'gpt' with a value that is a NoneType"),
        ({"conversations": "talk"}, "'conversations' must be a list of turns.* but is a str"),
        ({"instruction": 3, "output": "x"}, "'instruction' must be a string, but is a int"),
    ],
)
def test_wrong_instructions_and_turns(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^training data: .*{message}.*Remedy.* The row: "):
        make_samples(Dataset.from_list([row]), tokenizer(), 16)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_the_loss_of_a_turn_reaches_as_far_as_trls(name: str) -> None:
    """With the template's line break after the end of a turn, which TRL's templates for training mark, too."""
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    made = tokenizer()
    made.add_special_tokens({"bos_token": "<s>"})
    samples = []
    for file in (f"{name}.jinja", f"{name}_training.jinja"):
        made.chat_template = (folder / file).read_text()
        samples.append(messages_sample(made, [TALK[1], TALK[4]]))
    assert learned(made, samples[0]).endswith(">\n")
    assert learned(made, samples[0]) == learned(made, samples[1])


def test_a_wrong_row_is_shown() -> None:
    given = Dataset.from_list([{"messages": [{"from": "human", "value": "x"}]}])
    with pytest.raises(ValueError, match=r"^training data: 'messages' must.* The row: \{'messages': \[\{'from': 'hum"):
        make_samples(given, tokenizer(), 16)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("value", [5, 0, ["a"]])
def test_a_row_that_is_no_string(value: Any, packing: bool, tmp_path: Path) -> None:
    """In the middle of a file: named with the file and what it is, at once or where the stream comes to it."""
    file = rows(tmp_path, *[{"text": "One"}] * 20, {"text": None}, {"text": value}, {"text": "two"})
    options: dict[str, Any] = {
        "train_file": file,
        "packing": packing,
        "block_size": 16,
        "validation_split_percentage": 0,
    }
    told = f"'text' must be a string, but is a {type(value).__name__}: {re.escape(str(value))}. Remedy: convert"
    with pytest.raises(ValueError, match=rf"^--train_file {file}: row 21 \(from 0\): {told}"):
        read(DataArguments(**options), seed=0)
    args = DataArguments(**options, streaming=True, shuffle_buffer_size=0)
    raw = read(args, seed=0)
    assert raw.texts(100) == ["One"] * 20 + ["two"]
    stream = data.prepare(raw, args, tokenizer(), LlamaConfig(), seed=0).train
    with pytest.raises(ValueError, match=f"^--train_file {file}: {told}"):
        next(iter(stream))  # type: ignore[arg-type]


def test_chat_template_path(tmp_path: Path) -> None:
    """A Jinja file or a tokenizer's directory gives the template, and the tokenizer keeps it for the export."""
    raw = read(DataArguments(train_file=rows(tmp_path, {"messages": TALK}), validation_split_percentage=0), seed=0)
    (tmp_path / "chat.jinja").write_text(PLAIN)
    tokenizer(PLAIN).save_pretrained(tmp_path / "tokenizer")
    for path in ("chat.jinja", "tokenizer"):
        args, bare = DataArguments(chat_template_path=str(tmp_path / path)), tokenizer(None)
        made = data.prepare(raw, args, bare, LlamaConfig(max_position_embeddings=512), seed=0)
        assert made.train.length == len(messages_sample(bare, TALK)[0])
    with pytest.raises(ValueError, match="--chat_template_path nowhere: must be a Jinja file"):
        data.prepare(raw, DataArguments(chat_template_path="nowhere"), tokenizer(), LlamaConfig(), seed=0)


def test_a_stream_has_the_data_sets_validation_split(tmp_path: Path) -> None:
    for split, count in (("train", 30), ("validation", 10)):
        given = Dataset.from_list(
            [{"messages": [*TALK[:2], {"role": "assistant", "content": str(i)}]} for i in range(count)]
        )
        given.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    args = DataArguments(dataset_name=str(tmp_path), streaming=True, max_eval_samples=4)
    raw = read(args, seed=0)
    made = data.prepare(raw, args, tokenizer(), LlamaConfig(max_position_embeddings=512), seed=0)
    plan = BatchPlan(made.num_samples, 2, 1)
    assert (plan.num_samples, plan.steps_per_epoch) == (None, None)
    batches = list(evaluation_batches(made.held_out, 3))
    assert [len(batch["input_ids"]) for batch in batches] == [3, 1]
    assert "assistant>0</s>" in tokenizer().decode(batches[0]["input_ids"][0])


def test_a_streams_held_out_rows_are_those_of_the_file(tmp_path: Path) -> None:
    """Calls whose arguments have several types, or are null, are no column of one type."""
    calls = tokenizer("{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}")
    file = tmp_path / "calls.json"
    texts = []
    for value in (1, "one", None):
        call = {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"day": value}}]}
        texts.append(calls.apply_chat_template([TALK[1], call], tokenize=False))
        with file.open("a") as rows:
            print(json.dumps({"messages": [TALK[1], call]}), file=rows)
    args = DataArguments(train_file=str(file), validation_file=str(file), streaming=True, block_size=400)
    made = data.prepare(read(args, seed=0, cache_dir=str(tmp_path)), args, calls, LlamaConfig(), seed=0)
    assert made.held_out is not None
    assert [calls.decode(batch["input_ids"][0]) for batch in evaluation_batches(made.held_out, 1)] == texts


# flags


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--streaming", "--max_steps", "2"], "the embedded corpus is not streamed. Remedy: --dataset_name or --tr"),
        (["--streaming", "--dataset_name", "a"], "a stream has no known end to count epochs by. Remedy: --max_steps"),
        (
            ["--streaming", "--dataset_name", "a", "--max_steps", "2", "--eval_strategy", "epoch"],
            "--eval_strategy epoch: a stream has no known epochs. Remedy: --eval_steps",
        ),
        (
            ["--streaming", "--dataset_name", "a", "--max_train_samples", "9"],
            "--max_train_samples 9: is not for --streaming.*; --max_steps ends the training",
        ),
        (
            ["--streaming", "--dataset_name", "a", "--max_steps", "2", "--save_strategy", "epoch"],
            "--save_strategy epoch: a stream has no known epochs. Remedy: --save_steps",
        ),
        (["--text_column", "a", "--sample_kind", "messages"], "cannot stand with --sample_kind messages"),
        (["--pad_to_multiple_of", "0"], "must be at least 1"),
        (["--shuffle_buffer_size", "-1"], "must be at least 0"),
    ],
)
def test_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(argv)


def test_lines_are_not_packed_and_padding_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One\ntwo\n" * 50)
    args = DataArguments(train_file=str(path), packing=True)
    with pytest.raises(ValueError, match=r"--packing: the lines of a txt file continue one another.*--no_keep_line"):
        data.prepare(read(args, seed=0), args, tokenizer(), LlamaConfig(), seed=0)
    args = DataArguments(train_file=str(path), pad_to_multiple_of=8, block_size=20)
    with pytest.raises(ValueError, match=r"--pad_to_multiple_of 8: the block size 20 .*Remedy: --block_size 16"):
        data.prepare(read(args, seed=0), args, tokenizer(), LlamaConfig(), seed=0)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        read(DataArguments(train_file=str(path), streaming=True), seed=0)
    assert "nothing is held out of a stream" in caplog.text
