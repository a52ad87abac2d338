"""The lanes of this rank's pipeline: one transport for each direction in which micro-batches go through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..comm.shapes import Shapes
from ..comm.staging import Staging, staging_for
from ..comm.transport import Transport
from ..schedules.directions import chunks_of
from ..schedules.lower import FREE, PAIRED


class Links:
    """Transports of a rank. Collective: every rank of the world makes its own at the same time.

    Args:
        pipes: global ranks of each pipeline of the world, by device; none where there is one stage.
        routes: device of each stage, one route a direction.
        order: ``"free"`` or ``"paired"``; None: what suits the backend.
        activation_shapes: a new book of shapes for a lane of activations.
        announces: announce every activation: no two need have the same shapes.
        group: of this rank's pipeline, for the paired order.
    """

    def __init__(
        self,
        pipes: Sequence[Sequence[int]],
        rank: int,
        device: torch.device,
        *,
        routes: Sequence[Sequence[int]],
        order: str | None,
        activation_shapes: Callable[[], Shapes],
        announces: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.pipe_number = next((number for number, pipe in enumerate(pipes) if rank in pipe), rank)
        self.ranks: Sequence[int] = next((pipe for pipe in pipes if rank in pipe), [rank])
        """Global ranks of this pipeline, by device."""
        self.device_number = self.ranks.index(rank)
        """Number of this rank along its pipeline."""
        self.staging = staging_for(device)
        # What gloo sends lies in host memory; anything else has communicators that are not safe to use at once.
        self.order = order or (FREE if device.type == "cpu" or self.staging is not None else PAIRED)
        if self.order == FREE and device.type == "cuda":
            self.staging = self.staging or Staging(device)
        self.routes = tuple(tuple(route) for route in routes)
        self.failed: list[BaseException] = []
        """The first error of any lane: none can go on without the others."""
        self.transports = [
            Transport(
                [[pipe[number] for number in route] for pipe in pipes],
                rank,
                order=self.order,
                device=device,
                staging=self.staging,
                activation_shapes=activation_shapes,
                announces=announces,
                failed=self.failed,
                group=group,
            )
            for route in self.routes
        ]

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Direction and stage of each chunk that this rank holds."""
        return chunks_of(self.device_number, self.routes)

    def ranks_of_stages(self, direction: int) -> list[int]:
        """Global rank of each stage."""
        return [self.ranks[number] for number in self.routes[direction]]

    def close(self) -> None:
        """Deliver what was sent, and end."""
        for transport in self.transports:
            transport.close()
