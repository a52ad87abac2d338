"""The documents: links lead somewhere, JSON and Python in them are right, and commands print what they say."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from paceline.config import PacelineConfig
from paceline.launch import cli

REPOSITORY = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(["git", "ls-files", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
DOCUMENTS = sorted(TRACKED.stdout.split())
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def text_of(document: str) -> str:
    return (REPOSITORY / document).read_text()


def blocks(language: str) -> list[Any]:
    """Blocks of code of all documents."""
    found = [(d, block) for d in DOCUMENTS for _, kind, block in BLOCK.findall(text_of(d)) if kind == language]
    return [pytest.param(block, id=f"{d}-{number}") for number, (d, block) in enumerate(found)]


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(document: str) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text_of(document))):
        if not urlsplit(link).scheme:
            yield link


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    lost = []
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = (REPOSITORY / document).parent / path if path else REPOSITORY / document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_the_front_page_is_short_and_leads_to_all_others() -> None:
    assert len(text_of("README.md").splitlines()) <= 200
    seen, left = set(), ["README.md"]
    while left:
        here = left.pop()
        if here not in seen and here.endswith(".md"):
            seen.add(here)
            for link in links(here):
                target = ((REPOSITORY / here).parent / link.partition("#")[0]).resolve()
                left.append(str(target.relative_to(REPOSITORY)))
    own = {document for document in DOCUMENTS if not document.startswith(("CHANGELOG", "tests/unit", "tests/golden"))}
    assert own <= seen


@pytest.mark.parametrize("document", DOCUMENTS)
def test_long_documents_have_a_table_of_contents(document: str) -> None:
    text = text_of(document)
    own = {anchor for anchor in anchors(REPOSITORY / document) if f"](#{anchor})" in text}
    titles = re.findall(r"^## .*$", BLOCK.sub("", text), re.MULTILINE)
    is_kept_elsewhere = document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    assert is_kept_elsewhere or len(text.splitlines()) <= 90 or len(own) >= len(titles)


@pytest.mark.parametrize("block", blocks("json"))
def test_json_is_valid(block: str) -> None:
    """Whole files, and entries of one."""
    value = json.loads(block if block.lstrip().startswith("{") else f"{{{block}}}")
    if "paceline" in value:
        PacelineConfig.of(value)


def test_every_key_of_the_section_is_in_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    keys = {key for part in (schema, *schema["$defs"].values()) for key in part.get("properties", {})}
    told = "".join(text_of(document) for document in DOCUMENTS if document != "CHANGELOG.md")
    assert len(keys) > 50
    assert sorted(key for key in keys if not re.search(rf"[`\"]{key}[`\"]", told)) == []


@pytest.mark.parametrize("block", blocks("python"))
def test_python_is_valid(block: str) -> None:
    ast.parse(block.replace("…", "..."))


def commands() -> list[Any]:
    found = []
    for document in DOCUMENTS:
        for _, kind, block in BLOCK.findall(text_of(document)):
            if kind == "bash":
                lines = block.replace("\\\n", " ").splitlines()
                found += [pytest.param(line, id=line) for line in lines if line.startswith("paceline ")]
    return found


def exit_code(words: list[str]) -> Any:
    """Of reading a command line."""
    try:
        cli.build_parser().parse_args(words)
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("line", commands())
def test_commands_are_understood(line: str) -> None:
    """Their flags are those of the command; whether the files are there is not asked."""
    assert exit_code(shlex.split(line, comments=True)[1:]) == 0


@pytest.mark.parametrize("document", DOCUMENTS)
def test_scripts_of_the_tests_have_the_flags_that_documents_give(document: str) -> None:
    """Benchmarks and tools, in blocks and in sentences: a command ends with its line, or with its backtick."""
    text = text_of(document).replace("\\\n", " ")
    spans = re.findall(r"`([^`]+)`", BLOCK.sub("", text))
    lines = [line for _, _, block in BLOCK.findall(text) for line in block.splitlines()]
    lines += re.findall(r"^ {4}.*$", BLOCK.sub("", text), re.MULTILINE)
    missing = []
    for command in (*spans, *lines):
        script, given = re.search(r"tests/(?:benchmarks|gpu|support)/\w+\.py", command), ""
        if script is not None:
            source, given = (REPOSITORY / script[0]).read_text(), command[script.end() :]
            flags = re.findall(r"(?<!\S)--[a-z][\w-]*", given)
            missing += [(script[0], flag) for flag in flags if f'"{flag}"' not in source]
    assert missing == []


def test_documents_count_gpu_tests_as_their_records_do() -> None:
    records = (REPOSITORY / "tests/benchmarks/results").glob("gpu*.json")
    tests = [test for record in records for test in json.loads(record.read_text())["tests"].items()]
    passed = {name for name, test in tests if test["outcome"] == "passed"}
    over_nccl = sum(name.startswith("tests/gpu/test_nccl.py") for name in passed)
    told = [" ".join(text_of(document).split()) for document in ("README.md", "tests/benchmarks/README.md")]
    totals = [re.findall(rf"{len(passed)} of the (\d+) (?:GPU )?tests have passed", text) for text in told]
    assert len(totals[0]) == 1
    assert totals[0] == totals[1]
    nccl = (*told, " ".join(text_of("integration/paceline/runtime/README.md").split()))
    assert all(re.search(rf"\b{over_nccl} (?:tests use|of them over|tests over) NCCL", text) for text in nccl)


@pytest.mark.parametrize("name", ["migration_pause", "migration_pause_experts", "migration_pause_plain"])
def test_pauses_of_moves_are_those_that_were_measured(name: str) -> None:
    """All tables have the same columns: a pause is all the time for which training stands still."""
    runs = json.loads((REPOSITORY / f"tests/benchmarks/{name}.json").read_text())["runs"]

    def pause(run: dict[str, Any]) -> str:
        share = 100 * run["waited_share"]
        return f"{run['seconds']:.2f} ({share:.{int(share < 10)}f}%)"

    rows = [
        f"| {now['bytes_take_s']:.2f} | {pause(now)} | {pause(ahead)} | {ahead['step_after_s']:.2f} |"
        for now, ahead in zip(runs[::2], runs[1::2], strict=True)
    ]
    assert [row for row in rows if row not in text_of("tests/benchmarks/README.md")] == []


def simulations() -> list[Any]:
    """Commands and what documents show of them."""
    found = []
    for document in DOCUMENTS:
        text = text_of(document)
        found += re.findall(r"^```\n\$ (paceline simulate .*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
        found += re.findall(r"^(paceline simulate .*)\n```\n```\n((?:.*\n)*?)```$", text, re.MULTILINE)
    return [pytest.param(*pair, id=pair[0]) for pair in found]


@pytest.mark.parametrize(("line", "shown"), simulations())
def test_simulations_print_what_is_shown(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out.splitlines() == shown.splitlines()
