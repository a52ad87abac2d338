"""Losses of a pipeline without a flush: a step's loss is summed over the ranks while the next steps run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.groups import gloo_group
from ..comm.loss_sums import SummedLosses
from ..comm.pending_tensor import LaterTensor
from ..comm.staging import Staging
from ..comm.transport import TIMEOUT
from ..supervise.watch import EVERYONE, WATCH


class Monitor(Protocol):
    """DeepSpeed's monitors."""

    enabled: bool

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        """Write ``(name, value, samples so far)``."""


class Monitored(Protocol):
    """DeepSpeed's engine, as far as it tells of losses."""

    global_rank: int
    global_steps: int
    global_samples: int
    monitor: Monitor

    def get_lr(self) -> list[float]: ...

    def steps_per_print(self) -> int | None: ...


class LateLosses:
    """Sums losses over the ranks, and tells DeepSpeed's monitors of them a step later. Collective.

    Args:
        world: gloo's group of all ranks.
        waiting: around a wait for the other ranks.
    """

    def __init__(
        self,
        monitored: Monitored,
        world: dist.ProcessGroup,
        device: torch.device,
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._monitored, self._waiting = monitored, waiting
        on_host = device.type == "cpu"
        self._sums = SummedLosses(
            world if on_host else gloo_group(timeout=TIMEOUT), None if on_host else Staging(device)
        )
        self._untold: tuple[Tensor, float, int] | None = None

    def of_step(self, own: Tensor | None) -> Tensor:
        """The sum over all ranks of what each has of a step's loss; to look at it waits for the other ranks."""
        wait = self._sums.add(own)

        def fetch() -> Tensor:
            with self._waiting(), WATCH.waiting("waiting for the loss", EVERYONE):
                return wait()

        return LaterTensor.of(fetch, torch.float64)

    def tell(self, loss: Tensor | None = None) -> None:
        """Tell of the last step, whose loss has arrived by now; ``loss`` is that of the newest."""
        monitored = self._monitored
        untold, self._untold = self._untold, None
        if monitored.global_rank != 0:
            return
        if untold is not None and monitored.monitor.enabled:
            last, rate, samples = untold
            told = [("Train/Samples/train_loss", last.item(), samples), ("Train/Samples/lr", rate, samples)]
            monitored.monitor.write_events(told)
        if loss is None:
            return
        rate = monitored.get_lr()[0]
        rate = rate.item() if isinstance(rate, Tensor) else rate  # a scheduler changes the tensor
        self._untold = (loss, rate, monitored.global_samples)
        every = monitored.steps_per_print()
        if every is not None and monitored.global_steps % every == 0:
            print(f"steps: {monitored.global_steps} loss: {loss.item():0.4f}")

    def stop(self) -> None:
        """Finish what was begun, as far as the other ranks do."""
        self._sums.stop()
