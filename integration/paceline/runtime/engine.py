"""DeepSpeed's pipeline engine with its faults in gradient norm and parameter groups repaired."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ..measure.clock import Clock
from .control import ControlPlane
from .module import REPLICATED


class PacelineEngine(PipelineEngine):
    """Runs any :class:`deepspeed.pipe.PipelineModule`, as :class:`PipelineEngine` does.

    * Gradient clipping of an fp32 pipeline without ZeRO takes the norm over all stages (stock: over the first).
    * Stages with different numbers of optimizer parameter groups are refused (stock: they hang under ZeRO-1).
    * A step's time is split into compute, communication and idle (:attr:`clock`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.control = getattr(model, "control", None) or ControlPlane.create(model.num_stages)
        super().__init__(*args, **kwargs)
        self.clock = Clock(torch.device(self.device))

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        parameters = list(model_parameters or ())
        trainable = [p for p in _flatten(parameters) if p.requires_grad]
        error = None
        if not isinstance(client_optimizer, torch.optim.Optimizer) and not trainable:
            error = ValueError(
                f"stage {self.module.stage_id} has no trainable parameter: train at least one parameter on every "
                "stage, or choose another partition."
            )
        self.control.settle(error, "collecting parameters")
        super()._configure_optimizer(client_optimizer, parameters)
        counts = self.control.gather(len(self.basic_optimizer.param_groups))
        if len(set(counts)) > 1 and self.zero_optimization():
            raise ValueError(
                f"stages have {sorted(set(counts))} non-empty optimizer parameter groups, by rank {counts}: ZeRO needs "
                "the same number on every stage; group parameters so that each stage has some of every group."
            )

    @torch.no_grad()
    def clip_fp32_gradients(self) -> None:
        """Scale gradients to a global 2-norm of at most ``gradient_clipping``; a weight on two stages counts once."""
        if self.is_model_parallel:  # slices of one parameter: DeepSpeed's own rule, with its own groups
            super().clip_fp32_gradients()
            return
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        own = [p.grad for p in parameters if not getattr(p, REPLICATED, False)]
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in own:
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        dist.all_reduce(squares, group=self.grid.get_pipe_parallel_group())
        norm = squares.sqrt()
        scale = (self.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([p.grad for p in parameters], scale.to(torch.float32))
        self._global_grad_norm = norm

    def _exec_reduce_tied_grads(self) -> None:
        num_bytes = sum(w.numel() * w.element_size() for w, _ in self.module.get_tied_weights_and_groups())
        with self.clock.transfer("tied", num_bytes):
            super()._exec_reduce_tied_grads()

    def _exec_reduce_grads(self) -> None:
        num_bytes = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        with self.clock.transfer("reduce", num_bytes):
            super()._exec_reduce_grads()

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        with self.clock.compute():
            super()._exec_optimizer_step(lr_kwargs)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """Run the instructions by name: the table of the stock engine holds its own functions, not their overrides."""
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self.fwd_outputs: list[Tensor] = []
        for commands in pipe_schedule:
            for command in commands:
                getattr(self, self._INSTRUCTION_MAP[type(command)].__name__)(**command.kwargs)

    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step before clipping, where it was computed."""
        norm = self.get_global_grad_norm()
        if norm is None:
            return None
        value = float(norm)
        return value if math.isfinite(value) else None


def _flatten(parameters: Iterable[Any]) -> Iterable[Tensor]:
    for entry in parameters:
        if isinstance(entry, dict):
            yield from entry["params"]
        elif isinstance(entry, (tuple, list)):
            yield entry[1]
        else:
            yield entry
