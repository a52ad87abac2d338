"""What a loss scaler of DeepSpeed remembers between steps, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scaler_state(scaler: Any) -> dict[str, Any]:
    """What a dynamic loss scaler of DeepSpeed remembers; a static one has its scale from the JSON."""
    if scaler is None or not scaler.dynamic:
        return {}
    return {name: getattr(scaler, name) for name in SCALER_STATE if hasattr(scaler, name)}


def load_scaler_state(scaler: Any, state: Mapping[str, Any]) -> None:
    """Put :func:`scaler_state` back, if the scaler is a dynamic one too."""
    for name, value in state.items():
        if scaler is not None and scaler.dynamic:
            setattr(scaler, name, value)
