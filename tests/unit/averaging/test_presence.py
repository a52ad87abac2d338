"""What an island says where the lighthouse, or another island, does not answer."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.averaging import presence
from paceline.averaging.presence import Presence
from paceline.comm.single_process import free_port


class Lighthouse:
    """Fails so many times, then answers."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def heartbeat(self, id: str, timeout: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("connection refused")


def present(client: Any = None) -> Presence:
    """Without a connection to a lighthouse."""
    found = object.__new__(Presence)
    found.island, found.lighthouse, found.id, found.is_closed = 0, "node1:29510", "island0:own", False
    found._client = client
    return found


@pytest.mark.parametrize("failures", [0, 3])
def test_a_lighthouse_that_does_not_answer_is_named_once(
    failures: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_PAUSE_S", 0.0)
    monkeypatch.setattr(presence, "_SETTLE_S", 0.0)
    client = Lighthouse(failures)
    present(client).find_again(time.monotonic() + 60.0)
    assert client.failures == 0
    assert caplog.text.count("the lighthouse at node1:29510 does not answer") == (failures > 0)


def test_an_island_that_is_gone_is_called_without_frames_of_torch(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline")
    present()._call([f"127.0.0.1:{free_port()}"], 3, 1.0)
    assert "does not hear that it is waited for" in caplog.text
    assert "frame #" not in capfd.readouterr().err
