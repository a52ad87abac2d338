"""``paceline lighthouse``."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from paceline.launch.cli import main
from support.ranks import PATIENCE_S


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_runs_until_it_is_told_to_stop(stop: signal.Signals) -> None:
    command = [sys.executable, "-m", "paceline.launch.cli", "lighthouse", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(rf"lighthouse: {re.escape(socket.gethostname())}:(\d+)\n", line)
            assert found, line
            with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/status", timeout=PATIENCE_S) as page:
                assert page.status == 200
            process.send_signal(stop)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "", "")


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["lighthouse", "--host", "127.0.0.1", "--port", str(port)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"paceline: cannot listen at 127.0.0.1:{port} (Address already in use")
    assert err.endswith("; give another --port or --host, or end what listens there.\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "70000"], "--port is 70000: give one from 1 to 65535, or 0."),
        (["--min-islands", "0"], "--min-islands is 0: give a whole number from 1 to 65536."),
        (["--min-islands", "9" * 20], f"--min-islands is {'9' * 20}: give a whole number from 1 to 65536."),
        (["--join-timeout-s", "0"], "--join-timeout-s is 0: give a number of seconds above 0 and up to 1e+08."),
        (["--join-timeout-s", "1e17"], "--join-timeout-s is 1e+17: give a number of seconds above 0 and up to 1e+08."),
        (["--heartbeat-timeout-s", "nan"], "--heartbeat-timeout-s is nan: give a number of seconds above 0 and up to"),
    ],
)
def test_wrong_values(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lighthouse", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"paceline: {message}")
