"""DeepSpeed's monitors, where the disk is full."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.monitor import monitor as deepspeeds
from deepspeed.monitor.config import DeepSpeedMonitorConfig

from paceline.runtime.monitors import OutlivedMonitors


def test_one_that_cannot_be_written_ends_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deepspeeds.dist, "get_rank", lambda: 0)
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    monitors = OutlivedMonitors(deepspeeds.MonitorMaster(DeepSpeedMonitorConfig(csv_monitor=csv)))
    seen: list[Any] = []
    monitors.comet_monitor = SimpleNamespace(write_events=seen.append)
    events = [[("loss", 1.0 / samples, samples)] for samples in (8, 16, 24)]
    file = tmp_path / "run" / "loss.csv"
    for number, one in enumerate(events):
        if number == 1:
            file.unlink()
            file.mkdir()
        monitors.write_events(one)
    assert seen == events
    (record,) = caplog.records
    assert record.getMessage() == f"csvMonitor ends before sample 16: [Errno 21] Is a directory: '{file}'"
    assert monitors.enabled  # ranks have to agree on it
