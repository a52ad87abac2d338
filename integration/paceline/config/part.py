"""The base of all parts of the ``"paceline"`` section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """Keys that are not known are refused, and values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
