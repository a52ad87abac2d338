"""``paceline doctor`` alone: what it looks at comes with the interpreter."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.cli import main
from support.ranks import OF_A_LAUNCHER, run_ranks

WELL = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def doctor(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """As a process of its own."""
    command = [sys.executable, "-m", "paceline.launch.cli", "doctor", *args]
    return subprocess.run(
        command, env={**os.environ, **WELL, **variables}, capture_output=True, text=True, check=False, timeout=900
    )


def test_json(tmp_path: Path) -> None:
    done = doctor("--json", "--output_dir", str(tmp_path))
    shown = json.loads(done.stdout)
    assert done.returncode == 0, shown["to_fix"]
    assert shown["problems"] == 0
    assert {one["level"] for one in shown["findings"]} <= {"ok", "note"}
    assert {"python", "torch", "patches", "devices", "build locks", "--output_dir"} <= {
        one["check"] for one in shown["findings"]
    }
    assert shown["facts"]["versions"]["accelerator"] == "cpu"
    versions = (shown["system"]["torch_version"], shown["facts"]["versions"]["torch"])
    assert len({version.partition("+")[0] for version in versions}) == 1, "of the package without its build, or with it"


def look(args: list[str], variables: dict[str, str]) -> tuple[int, str, str]:
    """In a process that has imported everything: exit status, and what was printed."""
    for name in OF_A_LAUNCHER:
        del os.environ[name]
    os.environ.update(variables)
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(["doctor", *args])
    return status, out.getvalue(), errors.getvalue()


def test_problems_and_what_to_fix(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (1e9, 1e9))
    config = tmp_path / "ds.json"
    config.write_text('{"paceline": {"pipelin": {}}}')
    variables = {
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "GLOO_SOCKET_IFNAME": "wrong0",
        "RANK": "0",
        "HF_TOKEN": "hf_secret",
    }
    [(status, out, errors)] = run_ranks(look, 1, ["--deepspeed", str(config)], variables)
    assert status == 1
    assert "\nDeepSpeed general environment info:\n" in out
    lines = out.splitlines()
    problems = [line.split()[1] for line in lines if line.startswith("problem ")]
    assert problems == ["build", "deepspeed", "GLOO_SOCKET_IFNAME", "launcher"]
    todo = lines[lines.index("What to fix") + 1 :]
    assert len(todo) == 4
    assert todo[0].startswith(f"1. rm {lock} ")
    assert todo[1].startswith("2. correct ")
    assert "hf_secret" not in out
    assert "Traceback" not in errors


def test_a_broken_accelerator_is_one_problem() -> None:
    done = doctor(DS_ACCELERATOR="tpu")
    assert done.returncode == 1
    problems = [line for line in done.stdout.splitlines() if line.startswith("problem ")]
    assert len(problems) == 1
    assert "DS_ACCELERATOR must be one of" in problems[0]
    assert "Traceback" not in done.stderr


def test_packages_that_are_missing(tmp_path: Path) -> None:
    """An interpreter without site packages: nothing that paceline asks for is there."""
    source = Path(__file__).resolve().parents[2] / "integration"
    code = f"import sys; sys.path.insert(0, {str(source)!r}); from paceline.launch.cli import main; main(['doctor'])"
    done = subprocess.run(
        [sys._base_executable, "-I", "-S", "-c", code],  # type: ignore[attr-defined]
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.stderr == ""
    for package in ("torch", "deepspeed"):
        assert f"problem  {package}" in done.stdout
    assert "What to fix" in done.stdout


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf"])
def test_wrong_usage(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"--timeout={timeout}"]) == 2
    assert "--timeout is" in capsys.readouterr().err
