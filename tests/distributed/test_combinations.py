"""Every pair of features works as the table of `config/README.md` says, or is refused as it says."""

from __future__ import annotations

import json

import pytest

from support import combinations_of_features as table


def test_the_readme_shows_what_was_found() -> None:
    found = json.loads(table.GOLDEN.read_text())
    assert list(found) == [table.name_of(cell) for cell in table.cells()]
    assert table.readme_part(found) in table.README.read_text()


ALONE = "each by itself"
PARTS = [ALONE, "pairs, first half", "pairs, second half"]


@pytest.mark.parametrize("part", PARTS)
def test_every_pair_is_as_it_was_found(part: str) -> None:
    """Pairs that work come several in a job; their outcomes one by one are what the table's command measures."""
    golden = json.loads(table.GOLDEN.read_text())
    jobs = [cell for cell in table.cells() if len(cell) == 1]
    if part != ALONE:
        jobs = table.in_few_jobs(golden)[PARTS.index(part) - 1 :: 2]
    found = table.measure(jobs)
    for job in jobs:
        for shown in table.pairs_shown(job, golden) if len(job) > 1 else (job,):
            expected = golden[table.name_of(shown)]
            assert found[table.name_of(job)] == expected, (shown, job)


def test_a_flush_for_an_average_scales_losses() -> None:
    """Weights are copied where gradients are off, and what is under way before it has backwards to do."""
    three = ("multidirection", "fp16", "averaging")
    assert table.measure([three]) == {table.name_of(three): {"outcome": table.TRAINS}}
