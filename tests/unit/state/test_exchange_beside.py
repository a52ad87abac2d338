"""An exchange beside a rank's steps: the end of a script waits for it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import threading
import time
import torch
from paceline.state import exchange_beside

at_the_end = threading.Event()

def slow(*_, **__):
    at_the_end.wait()
    time.sleep(1)
    print("arrived", flush=True)

exchange_beside.carry_out = slow
exchange_beside.ExchangeBeside([], torch.device("cpu"), None).start()
print("end", flush=True)
at_the_end.set()
"""


def test_the_end_of_a_script_waits_for_what_is_on_its_way() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["end", "arrived"]
