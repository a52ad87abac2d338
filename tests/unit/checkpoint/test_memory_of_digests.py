"""What reading a file for its digest leaves in memory: nothing, whichever thread does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys, threading
from pathlib import Path
from paceline.checkpoint.format import CHUNK_BYTES, read_digest

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def read():
    assert read_digest(path)["bytes"] == path.stat().st_size

path = Path(sys.argv[1])
# As in a job: more threads than there are heaps, so that a new thread gets the next one of all.
over = threading.Event()
for _ in range(8 * os.cpu_count() + 8):
    threading.Thread(target=lambda: (bytearray(1000), over.wait()), daemon=True).start()
before = None
for number in range(40):
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    if number == 1:
        before = resident()
grown = resident() - before
assert grown < 2 * CHUNK_BYTES, f"{grown} bytes more"
"""


def test_threads_keep_nothing(tmp_path: Path) -> None:
    """Each save is a thread's; malloc gives threads heaps of their own, as many as eight a core, and keeps them."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * 9_000_000)
    subprocess.run([sys.executable, "-c", PROGRAM, str(file)], check=True)
