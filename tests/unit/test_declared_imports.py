"""What the source imports is declared in pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("integration", "launch", "patches") for path in (REPOSITORY / folder).rglob("*.py")]


def imported(path: Path) -> set[str]:
    """Packages from elsewhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"paceline"}


def declared() -> set[str]:
    text = (REPOSITORY / "pyproject.toml").read_text()  # tomllib comes with Python 3.11
    lists = re.findall(r"^(?:dependencies|peft|trl) = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    names: list[Any] = re.findall(r'"([\w-]+)', "".join(lists))
    return {name.replace("-", "_") for name in names}


def test_third_party_imports_are_declared() -> None:
    undeclared = {
        name: sorted(str(path.relative_to(REPOSITORY)) for path in SOURCES if name in imported(path))
        for name in set().union(*map(imported, SOURCES)) - declared()
    }
    assert undeclared == {}


def test_declared_packages_are_imported() -> None:
    assert declared() - set().union(*map(imported, SOURCES)) == set()
