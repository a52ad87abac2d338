"""Writers killed at random moments: whatever ``latest`` names then is whole, and the next run starts from it.

Run as a script, this file is the nursery that the ranks are forked from: it has imported torch once and runs no
threads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

ROUNDS = 16
TESTS = Path(__file__).parents[2]


def test_killed_at_random(tmp_path: Path) -> None:
    """Two ranks save all the time, also over a tag that is there, and are killed one after the other; 16 times."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(ROUNDS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["in the middle"] > ROUNDS // 10, told  # or nothing has been shown
    assert told["progressed"] > ROUNDS // 10, told
    assert told["last"] > told["progressed"], told  # some were killed after several saves


def main(root: Path, rounds: int) -> None:
    chance = random.Random(1)
    last = in_the_middle = progressed = 0
    longest_s = 0.1
    for number in range(20 * rounds):
        if number >= rounds and min(in_the_middle, progressed) > rounds // 10 and last > progressed:
            break  # on a machine that is busy it takes more of them to show something
        ranks = [_start(root, rank, f"{number:08x}", last) for rank in range(2)]
        time.sleep(chance.uniform(0.0, longest_s))
        chance.shuffle(ranks)
        for process in ranks:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            time.sleep(chance.choice([0.0, 0.03]))
        in_the_middle += any(path.name.endswith(".draft") for path in root.iterdir())
        reached = _checked(root)
        assert reached >= last, f"back from {last} to {reached}"
        progressed += reached > last
        longest_s *= 0.8 if reached > last else 1.5  # about as long as a few saves take on this machine, now
        last = reached
    print(json.dumps({"in the middle": in_the_middle, "progressed": progressed, "last": last}))


def _start(root: Path, rank: int, run: str, last: int) -> int:
    if (process := os.fork()) > 0:
        return process
    from paceline.checkpoint import CheckpointWriter
    from support.saves import filled

    try:
        writer = CheckpointWriter(rank=rank, world_size=2, run=run)
        for step in range(last + 1, last + 1000):
            pieces = filled(float(step), rows=20000)
            writer.save(root, f"checkpoint-{step // 2}", pieces[rank], meta={"step": step}, keep=2)
    finally:
        os._exit(1)


def _checked(root: Path) -> int:
    """The step of what ``latest`` names, every byte of it compared; 0 before the first."""
    from paceline.checkpoint import Checkpoint, complete_checkpoints, latest_checkpoint

    if not (root / "latest").exists():
        return 0
    path = latest_checkpoint(root)
    assert path is not None
    # Or it was killed when it had put the checkpoint in place, with the file in it, and before it moved the file.
    assert path == root / (root / "latest").read_text() or (path / "latest").exists(), path
    assert len(complete_checkpoints(root)) <= 4
    for checkpoint in map(Checkpoint.open, complete_checkpoints(root)):
        checkpoint.verify()
        step = checkpoint.meta["step"]
        for kind in ("master", "exp_avg"):
            assert torch.equal(checkpoint.read("weight", kind), torch.full((20000, 3), float(step)))
        if checkpoint.path == path:
            reached = step
    return reached


if __name__ == "__main__":
    import paceline.checkpoint  # noqa: F401 (once, before ranks are forked)

    main(Path(sys.argv[1]), int(sys.argv[2]))
