"""Progress: a line a report without a terminal, a bar that follows what runs with one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from paceline.report.progress import Progress
from paceline.report.running import Running

BEFORE, AFTER = Running("1f1b", 2, (0, 5, 9, 14)), Running("kfkb k=2", 2, (0, 4, 9, 14), 1)
NUMBERS = {"loss": 2.5, "s/step": 0.21253, "tokens/s": 5312.4, "lr": 1e-3}


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(9, shown=True)
    progress.step(BEFORE)
    progress.report(1, NUMBERS)
    progress.step(AFTER)
    progress.report(2, NUMBERS)
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 1/9: loss 2.5, s/step 0.2125, tokens/s 5,312, lr 0.001 · 1f1b · 5|4|5",
        "step 2/9: loss 2.5, s/step 0.2125, tokens/s 5,312, lr 0.001 · kfkb k=2 · 4|5|5 · 1 move",
    ]


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(9, shown=False)
    progress.step(BEFORE)
    progress.report(1, NUMBERS)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal_changes_as_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    main, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
        progress = Progress(9, shown=True)
        shown = []
        for step, running in enumerate((BEFORE, AFTER), 1):
            progress.step(running)
            shown.append(str(progress.bar))
            progress.report(step, NUMBERS)
            shown.append(str(progress.bar))
        progress.close()
    written = b""
    with contextlib.suppress(OSError):  # its end; the kernel hands on what was written when it comes to it
        while piece := os.read(main, 1 << 16):
            written += piece
    os.close(main)
    assert shown[0].endswith("1f1b · 5|4|5]")
    assert "5|4|5 · loss 2.5, s/step 0.2125, tokens/s 5,312, lr 0.001]" in shown[1]
    assert "kfkb k=2 · 4|5|5 · 1 move · loss 2.5" in shown[2]  # before the next numbers come
    assert "kfkb k=2 · 4|5|5 · 1 move" in written.decode()
