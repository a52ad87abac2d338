"""What is measured of a cluster, with stand-ins for its devices; real ranks: ``tests/distributed``."""

from __future__ import annotations

import pytest
import torch

from paceline.planning.gradient_costs import state_bytes_per_parameter
from paceline.runtime import measured_cluster


@pytest.mark.parametrize("issuing_s", [0.0, 5e-4])
def test_what_it_takes_to_issue_a_step_is_no_part_of_a_gpus_rate(
    monkeypatch: pytest.MonkeyPatch, issuing_s: float
) -> None:
    rate = 4e12

    def step_s(numel: int, device: torch.device) -> float:
        return issuing_s + state_bytes_per_parameter() * numel / rate

    monkeypatch.setattr(measured_cluster, "_step_s", step_s)
    assert measured_cluster._state_bytes_per_s(torch.device("cuda")) == pytest.approx(rate)
