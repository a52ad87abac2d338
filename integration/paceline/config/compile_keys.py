"""The ``"compile"`` part of a pipeline's section: decoder layers through torch.compile."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from .part import Part


class CompileConfig(Part):
    """Arguments of ``torch.compile``, with which each decoder layer is compiled."""

    backend: Literal["inductor", "aot_eager"] | None = Field(
        default=None,
        description='"inductor" fuses kernels; "aot_eager" keeps those of PyTorch, to look for a fault. Left out: '
        '"inductor".',
    )
    # Graphs of CUDA keep one set of activations, and a pipeline has several micro-batches under way.
    mode: Literal["default", "max-autotune-no-cudagraphs"] | None = Field(
        default=None, description='Of torch.compile; not those with CUDA graphs. Left out: "default".'
    )
    dynamic: bool | None = Field(
        default=None,
        description="true: one graph for all lengths from the start; false: one for each. Left out: for the first "
        "length, then for all.",
    )

    @field_validator("mode")
    @classmethod
    def _is_of_inductor(cls, value: str | None, info: ValidationInfo) -> str | None:
        backend = info.data.get("backend")
        if value is not None and backend not in (None, "inductor"):
            raise ValueError(f'it is for the backend "inductor" and the backend is "{backend}"; drop one of them.')
        return value

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``torch.compile``."""
        return self.model_dump(exclude_none=True)
