"""``launch/environment.sh``: which environment it takes, what it asks pip for, and when it has nothing to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "launch" / "environment.sh"

SCRIPT = """
source "$1"
pip_install() {
  echo "[pip ${*:2}]"
  local packages; packages=$("$1/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  if [[ $2 == torch==* ]]; then add_torch "$packages"; else add_paceline "$packages"; fi
}
add_paceline() {
  mkdir -p "$1/paceline-0.1.0.dist-info"
  printf 'Name: paceline\\nVersion: 0.1.0\\n' >"$1/paceline-0.1.0.dist-info/METADATA"
  printf '{"dir_info": {"editable": true}, "url": "file://%s"}' "${REPOSITORY// /%20}" \\
    >"$1/paceline-0.1.0.dist-info/direct_url.json"
}
add_torch() {
  mkdir "$1/torch-2.13.0.dist-info"
  printf 'Name: torch\\nVersion: 2.13.0\\n' >"$1/torch-2.13.0.dist-info/METADATA"
}
prepare_environment "$2" || exit
echo "$PYTHON"
echo "PYTHONPATH=${PYTHONPATH:-}" >&2
"""


class Clone:
    """A repository, and its environment script with pip replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said = ""
        (path / "launch").mkdir(parents=True)
        shutil.copy(SOURCE, path / "launch")
        (path / "pyproject.toml").write_text("[project]\n")

    def prepare(self, purpose: str, **variables: str) -> tuple[list[str], str]:
        """What pip is asked for, and the Python that comes out."""
        done = subprocess.run(
            ["bash", "-uc", SCRIPT, "bash", str(self.path / "launch" / "environment.sh"), purpose],
            check=False, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"]} | variables,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr)
        self.said = done.stderr
        return re.findall(r"\[pip (.*)\]", done.stderr), done.stdout.strip()

    def asked(self, purpose: str, transformers: str = "transformers==5.24.0", venv: Path | None = None) -> str:
        """What pip is asked for when paceline is installed."""
        constraint = f"--constraint {venv or self.path / '.venv'}/paceline-constraints.txt"
        what = f"{self.path}[test] {transformers}" if purpose == "test" else str(self.path)
        return f"{constraint} --editable {what}"


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "a clone")


def test_what_is_missing_is_installed_once(clone: Clone) -> None:
    venv = clone.path / ".venv"
    python = str(venv / "bin" / "python")
    assert clone.prepare("run") == (["torch==2.13.0", clone.asked("run")], python)
    assert "include-system-site-packages = false" in (venv / "pyvenv.cfg").read_text()
    assert (venv / "paceline-constraints.txt").read_text() == "torch==2.13.0\n"
    assert clone.prepare("run") == ([], python)

    assert clone.prepare("test") == ([clone.asked("test")], python)
    assert clone.prepare("test") == clone.prepare("run") == ([], python)
    other = clone.prepare("test", PACELINE_TRANSFORMERS="5.20.0")
    assert other == ([clone.asked("test", "transformers==5.20.0")], python)

    (clone.path / "pyproject.toml").write_text("[project] # changed\n")
    assert clone.prepare("run") == ([clone.asked("run")], python)


def test_another_clones_paceline_is_left_as_it_is(clone: Clone) -> None:
    venv = clone.path / ".venv"
    clone.prepare("run")
    before = sorted((path, path.stat().st_mtime_ns) for path in venv.rglob("*") if path.is_file())
    second = Clone(clone.path.parent / "second")
    assert second.prepare("run", VIRTUAL_ENV=str(venv), PYTHONPATH="mine") == ([], str(venv / "bin" / "python"))
    assert f"PYTHONPATH={second.path / 'integration'}:mine\n" in second.said
    assert f"{venv} has paceline of {clone.path}, which stays; this run takes that of {second.path}" in second.said
    with pytest.raises(RuntimeError, match=r"not what the tests of .* need: deactivate it"):
        second.prepare("test", VIRTUAL_ENV=str(venv))
    assert not (second.path / ".venv").exists()
    assert sorted((path, path.stat().st_mtime_ns) for path in venv.rglob("*") if path.is_file()) == before

    clone.prepare("test", VIRTUAL_ENV=str(venv))
    assert second.prepare("test", VIRTUAL_ENV=str(venv))[0] == [], "what the tests need is there"
    shutil.rmtree(clone.path / "launch")
    clone.path.rename(clone.path.parent / "moved")
    moved = second.path.parent / "moved" / ".venv"
    assert second.prepare("run", VIRTUAL_ENV=str(moved))[0] == [second.asked("run", venv=moved)], "it leads nowhere"


@pytest.mark.parametrize(("version", "used"), [("2.11.0+cu128", True), ("2.10.1", False)])
def test_torch_of_the_python_underneath(clone: Clone, tmp_path: Path, version: str, used: bool) -> None:
    # A stand-in for the Python underneath, since a test cannot install there. It also stands in for its environments.
    installed = tmp_path / "site" / f"torch-{version}.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    asked, _ = clone.prepare("run", PYTHONPATH=str(installed.parent), PACELINE_VENV=str(tmp_path / "venv"))
    assert ("torch==2.13.0" in asked) == (not used)
    with_system = f"include-system-site-packages = {'true' if used else 'false'}"
    assert with_system in (tmp_path / "venv" / "pyvenv.cfg").read_text()
    if used:
        assert (tmp_path / "venv" / "paceline-constraints.txt").read_text() == f"torch=={version}\n"


@pytest.mark.parametrize(("purpose", "least"), [("run", "3.10"), ("test", "3.11")])
def test_without_python(clone: Clone, tmp_path: Path, purpose: str, least: str) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("bash", "cksum", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (commands / name).symlink_to(found)
    with pytest.raises(
        RuntimeError, match=rf"^paceline: error: no Python {least} or newer found as python3: install one\n$"
    ):
        clone.prepare(purpose, PATH=str(commands))
