"""What a soak trains on: the standard library's own source, and a small tokenizer of it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.soaking.run import Inputs
from paceline.data.standard_library import source_files
from paceline.data.tokenizer import train_tokenizer

VOCABULARY = 512
TRAIN_BYTES, HELD_OUT_BYTES = 300_000, 20_000


def make(folder: Path) -> Inputs:
    """Written below ``folder``."""
    folder.mkdir(parents=True)
    text = "".join(path.read_text() for path in source_files(max_bytes=2 * (TRAIN_BYTES + HELD_OUT_BYTES)))
    train, held_out = folder / "train.txt", folder / "held_out.txt"
    train.write_text(text[:TRAIN_BYTES])
    held_out.write_text(text[TRAIN_BYTES:][:HELD_OUT_BYTES])
    train_tokenizer([text[:TRAIN_BYTES]], VOCABULARY).save_pretrained(folder / "tokenizer")
    return Inputs(train, held_out, folder / "tokenizer", folder / "home")
