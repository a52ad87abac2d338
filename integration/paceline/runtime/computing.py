"""The part of :class:`~paceline.runtime.engine.PacelineEngine` that computes one micro-batch on one stage.

The same numbers as DeepSpeed's own methods, which keep one loss for all micro-batches, copy what they receive, and go
through the hooks of an engine that has no pipeline.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor


class _Alias(torch.autograd.Function):
    """The same memory as another tensor, so that a layer may write to what it receives; no copy."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor)  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Computing:
    """Loads, forwards and backwards of any :class:`deepspeed.pipe.PipelineModule`."""

    def _exec_load_micro_batch(self: Any, buffer_id: int, micro_batch: int) -> None:
        super()._exec_load_micro_batch(buffer_id)  # type: ignore[misc]

    def _exec_forward_pass(self: Any, buffer_id: int, micro_batch: int) -> None:
        inputs = self.pipe_buffers["inputs"][buffer_id]
        if isinstance(inputs, tuple):
            inputs = tuple(_Alias.apply(tensor) if tensor.requires_grad else tensor for tensor in inputs)
        elif inputs.requires_grad:
            inputs = _Alias.apply(inputs)
        with self._graph(), autocast_if_enabled(self), self._flops_profiled():
            outputs = self.module(inputs)
        if not self.module.training:
            ds_checkpointing.reset()
        if self.is_last_stage():
            self._keep_outputs(buffer_id, outputs)
        else:
            self.pipe_buffers["outputs"][buffer_id] = outputs

    def _keep_outputs(self: Any, buffer_id: int, outputs: Any) -> None:
        loss = outputs
        if self._compute_loss and self.module.loss_fn is not None:
            loss = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
        if self.eval_return_logits:
            self.outputs = outputs
        self.fwd_outputs.append(_detached(loss))
        if not torch.is_grad_enabled():
            self.pipe_buffers["outputs"][buffer_id] = None
            return
        self.loss = self.pipe_buffers["outputs"][buffer_id] = loss
        self.total_loss = _added(self.total_loss, loss)
        additional = self.module.get_additional_losses()
        if additional is not None:
            totals = self.total_additional_losses or OrderedDict()
            for name, value in additional.items():
                totals[name] = _added(totals.get(name), value)
            self.total_additional_losses = totals

    def _exec_backward_pass(self: Any, buffer_id: int, micro_batch: int) -> None:
        if not self._runs_backward:
            return
        outputs = self.pipe_buffers["outputs"][buffer_id]
        # From each tensor of a tuple in turn, as DeepSpeed does, and with reentrant checkpointing (its own) several
        # times through a weight: a gradient is then not finished when it first arrives.
        once = self.is_last_stage() or not isinstance(outputs, tuple)
        if self.wall_clock_breakdown():
            self._start_timers(self.engine_timers.backward_timers)
            self._start_timers(self.engine_timers.backward_inner_timers)
        with self._counting_backwards(once and self.module.activation_checkpoint_interval == 0):
            if self.is_last_stage():
                self.optimizer.scale_if_loss(outputs / self.gradient_accumulation_steps()).backward()
            elif isinstance(outputs, tuple):
                pairs = list(zip((t for t in outputs if t.is_floating_point()), self.grad_layer, strict=True))
                pairs = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
                for index, (tensor, gradient) in enumerate(pairs):
                    tensor.backward(gradient=gradient, retain_graph=index < len(pairs) - 1)
            else:
                outputs.backward(gradient=self.grad_layer)
        if self.wall_clock_breakdown():
            self._stop_timers(self.engine_timers.backward_inner_timers)
            self._stop_timers(self.engine_timers.backward_timers)
        self.pipe_buffers["outputs"][buffer_id] = None

    def flops_profiler_profile_step(self) -> int:
        """None for DeepSpeed's hooks of the module, which in pipelines begin a profile and never show it."""
        return -1

    @contextmanager
    def _flops_profiled(self: Any) -> Iterator[None]:
        """The forward of a stage, profiled if the JSON asks for it: on the first rank, of one micro-batch."""
        profiler = getattr(self, "flops_profiler", None)
        step = self._config.flops_profiler_config.profile_step
        if profiler is None or self.global_rank != 0 or self.global_steps != step or not self.module.training:
            yield
            return
        self.flops_profiler = None  # once
        profiler.ds_engine = None  # its report would divide by times of a whole step
        profiler.start_profile()
        try:
            yield
            profiler.stop_profile()
            profiler.print_model_profile(
                profile_step=step,
                module_depth=self.flops_profiler_module_depth(),
                top_modules=self.flops_profiler_top_modules(),
                detailed=self.flops_profiler_detailed(),
                output_file=self.flops_profiler_output_file(),
            )
        finally:
            profiler.end_profile()

    @contextmanager
    def _counting_backwards(self: Any, overlaps: bool = True) -> Iterator[None]:
        self._backwards += 1
        with self.optimizer.final_backward(overlaps and self._backwards == self.schedule.num_micro_batches):
            yield


def _detached(loss: Any) -> Any:
    return loss.detach() if isinstance(loss, Tensor) else [part.detach() for part in loss]


def _added(total: Any, loss: Any) -> Any:
    """The running sum of losses, each a tensor or several."""
    if isinstance(loss, Tensor):
        return loss.detach().clone() if total is None else total + loss.detach()
    return [_added(None if total is None else total[index], part) for index, part in enumerate(loss)]
