"""Every pair of features works as the table of `config/README.md` says, or is refused as it says."""

from __future__ import annotations

import json

import pytest

from support import combinations_of_features as table


def test_the_readme_shows_what_was_found() -> None:
    found = json.loads(table.GOLDEN.read_text())
    assert list(found) == [table.name_of(cell) for cell in table.cells()]
    assert table.readme_part(found) in table.README.read_text()


@pytest.mark.parametrize("part", range(4))
def test_every_pair_is_as_it_was_found(part: int) -> None:
    golden = json.loads(table.GOLDEN.read_text())
    chosen = table.cells()[part::4]
    assert table.measure(chosen) == {table.name_of(cell): golden[table.name_of(cell)] for cell in chosen}
