"""Threads take the device of the thread that makes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from paceline.measure.device_of_thread import on_this_device


def test_a_thread_takes_the_gpu_of_the_one_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.append(("device", index)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(on_this_device(done.append), "work").result()
    assert done == [("device", 3), "work"]


def test_without_a_gpu_nothing_is_set() -> None:
    done: list[object] = []
    target = done.append
    assert torch.cuda.is_initialized() or on_this_device(target) is target
