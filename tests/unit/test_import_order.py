"""Packages import in one direction: the declared order, in which each may use those before it."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent
ORDER = (
    *("messages", "json_values", "schedules", "planning", "config", "measure", "patches", "hf", "checkpoint"),
    *("data", "comm", "optim", "supervise", "state", "moe", "averaging", "report", "runtime", "doctor", "launch"),
)
"""CONTRIBUTING.md says what each is for."""

EXCEPTIONS = {
    # A replacement of a function of transformers reads the facts that the stage puts down.
    ("patches/transformers_masking_utils.py", "hf"),
}


def imported_packages(path: Path, parts: tuple[str, ...]) -> set[str]:
    """Packages of ours that a file imports, at its top or inside of functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ["paceline", *parts[: len(parts) - node.level]] if node.level else []
            module = start + (node.module.split(".") if node.module else [])
            names = [[*module, alias.name] for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if len(name) > 1 and name[0] == "paceline"}
    return found


def test_imports_go_one_way() -> None:
    against = []
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert packages | {"messages", "json_values"} == set(ORDER), "a package is missing from ORDER, or gone"
    for package in packages:
        for path in (ROOT / package).resolve().rglob("*.py"):
            name = f"{package}/{path.name}"
            for other in imported_packages(path, (package, path.stem)) & set(ORDER):
                if other != package and ORDER.index(other) > ORDER.index(package) and (name, other) not in EXCEPTIONS:
                    against.append(f"{name} imports {other}")
    assert not against


def test_no_two_files_of_different_packages_share_a_name() -> None:
    """The commands of ``launch`` are called what the user calls; elsewhere one name has one role."""
    homes: dict[str, list[str]] = {}
    for package in (path for path in ROOT.iterdir() if (path / "__init__.py").exists() and path.name != "launch"):
        for path in package.resolve().glob("*.py"):
            if path.stem != "__init__":
                homes.setdefault(path.stem, []).append(package.name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
