"""Every pair of features works as the table of `config/README.md` says, or is refused as it says."""

from __future__ import annotations

import json

import pytest

from support import combinations_of_features as table


def test_the_readme_shows_what_was_found() -> None:
    found = json.loads(table.GOLDEN.read_text())
    assert list(found) == [table.name_of(cell) for cell in table.cells()]
    assert table.readme_part(found) in table.README.read_text()


PARTS = {
    "each by itself": [cell for cell in table.cells() if len(cell) == 1],
    **{f"pairs {part + 1} of 4": [cell for cell in table.cells() if len(cell) > 1][part::4] for part in range(4)},
}


@pytest.mark.parametrize("part", PARTS)
def test_every_pair_is_as_it_was_found(part: str) -> None:
    golden = json.loads(table.GOLDEN.read_text())
    assert table.measure(PARTS[part]) == {table.name_of(cell): golden[table.name_of(cell)] for cell in PARTS[part]}
