"""Runs of pytest that need not import torch, DeepSpeed and transformers again: forks of one process that has.

Started as a script, this is that process: it takes a run a line, and tells the process and then its status.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import Any

IMPORTED = ("datasets", "deepspeed", "pytest", "torch._dynamo", "torch.distributed", "transformers.trainer")
"""Imported once. The package itself is each run's own."""

OTHER_PACKAGE = 99
"""Status of a run that imported another package than that of its folder."""


class Runs:
    """Runs tests in folders that have a copy of the repository each."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="planted-home-")
        home = self._home.name
        own = {"PACELINE_TESTS_HF_HOME": home, "HF_HOME": home, "TORCH_EXTENSIONS_DIR": f"{home}/torch_extensions"}
        own |= dict.fromkeys(("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"), "1")
        own |= {"TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu"}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
        command = [sys.executable, "-c", f"exec(compile(open({__file__!r}).read(), 'runs', 'exec'))"]
        pipe = subprocess.PIPE
        self._process: Any = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def run(self, folder: Path, arguments: Sequence[str], limit_s: float) -> tuple[int, str]:
        """Run pytest in ``folder``: its status, and all that it says.

        Raises:
            TimeoutError: it takes longer than ``limit_s``.
        """
        with tempfile.NamedTemporaryFile("r") as output:
            asked = {"folder": str(folder), "arguments": list(arguments), "output": output.name}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            pid, is_late = int(self._process.stdout.readline()), []

            def stop() -> None:
                is_late.append(True)
                os.killpg(pid, signal.SIGKILL)

            timer = Timer(limit_s, stop)
            timer.start()
            status = int(self._process.stdout.readline())
            timer.cancel()
            with contextlib.suppress(ProcessLookupError):  # what the run has left
                os.killpg(pid, signal.SIGKILL)
            if is_late:
                raise TimeoutError(f"more than {limit_s:.0f} s")
            text = output.read()
        if status == OTHER_PACKAGE:
            raise RuntimeError(f"paceline was not imported from {folder}:\n{text[-3000:]}")
        return status, text

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()
        self._home.cleanup()


def _serve() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told, sys.stdout = sys.stdout, sys.stderr
        for name in IMPORTED:
            importlib.import_module(name)
    assert "paceline" not in sys.modules
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        if (pid := os.fork()) == 0:
            os._exit(_pytest(**asked))
        told.write(f"{pid}\n")
        told.flush()
        _, status = os.waitpid(pid, 0)
        told.write(f"{os.waitstatus_to_exitcode(status)}\n")
        told.flush()


def _pytest(folder: str, arguments: list[str], output: str) -> int:
    os.setsid()
    out, nothing = os.open(output, os.O_WRONLY), os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, descriptor)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode) for n, mode in ((0, "r"), (1, "w"), (2, "w")))
    source = f"{folder}/integration"
    os.chdir(folder)
    os.environ["PYTHONPATH"] = source
    sys.path.insert(0, source)
    sys.argv = ["pytest", *arguments]
    import pytest

    # Plugins of others are imported by now, which says nothing about the tests.
    status = int(pytest.main(["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning", *arguments]))
    sys.stdout.flush()
    sys.stderr.flush()
    place = getattr(sys.modules.get("paceline"), "__file__", None) or f"{source}/"
    return status if Path(place).is_relative_to(source) else OTHER_PACKAGE


if __name__ == "__main__":
    _serve()
