"""DeepSpeed's part in a computation: autocast, timers, loss scale, the profile of operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from deepspeed.runtime.pipe.engine import BATCH_INPUT_TIMER, PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from ..optim.gradient_buckets import Completes


class DeepSpeedSurroundings:
    """The :class:`~paceline.runtime.stage_runner.Surroundings` of a DeepSpeed engine.

    Args:
        reduces_early: begin to reduce gradients beside the computations that complete them.
    """

    def __init__(self, engine: PipelineEngine, *, reduces_early: bool) -> None:
        self._engine, self._reduces_early = engine, reduces_early

    def load(self) -> AbstractContextManager[None]:
        return self._timed_load() if self._engine.wall_clock_breakdown() else nullcontext()

    @contextmanager
    def _timed_load(self) -> Iterator[None]:
        timer = self._engine.timers(BATCH_INPUT_TIMER)
        timer.start()
        yield
        timer.stop()

    def forward(self) -> AbstractContextManager[None]:
        engine = self._engine
        is_profiled = vars(engine).get("flops_profiler") is not None
        if is_profiled or engine.torch_autocast_enabled() or torch.is_autocast_enabled():
            return self._forward()
        return nullcontext()

    @contextmanager
    def _forward(self) -> Iterator[None]:
        with autocast_if_enabled(self._engine), self._profiled():
            yield

    def backward(
        self, completes: Completes, *, stage: int, is_of_weights: bool = False
    ) -> AbstractContextManager[None]:
        engine, reducing = self._engine, nullcontext()
        if self._reduces_early:
            reducing = engine.optimizer.gradients.backward(completes, stage=stage, is_of_weights=is_of_weights)
        names = [*engine.engine_timers.backward_timers, *engine.engine_timers.backward_inner_timers]
        return self._timed_backward(names, reducing) if names else reducing

    @contextmanager
    def _timed_backward(self, names: list[str], reducing: AbstractContextManager[None]) -> Iterator[None]:
        self._engine._start_timers(names)
        with reducing:
            yield
        self._engine._stop_timers(reversed(names))

    def scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._engine.optimizer.scale_if_loss(loss)
        return scaled

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """The forward of a stage, profiled if the JSON asks for it: on the first rank, of one micro-batch."""
        engine = self._engine
        profiler = getattr(engine, "flops_profiler", None)
        step = engine._config.flops_profiler_config.profile_step
        if profiler is None or engine.global_rank != 0 or engine.global_steps != step or not engine.module.training:
            yield
            return
        engine.flops_profiler = None  # once
        profiler.ds_engine = None  # its report would divide by times of a whole step
        profiler.start_profile()
        try:
            yield
            profiler.stop_profile()
            profiler.print_model_profile(
                profile_step=step,
                module_depth=engine.flops_profiler_module_depth(),
                top_modules=engine.flops_profiler_top_modules(),
                detailed=engine.flops_profiler_detailed(),
                output_file=engine.flops_profiler_output_file(),
            )
        finally:
            profiler.end_profile()
