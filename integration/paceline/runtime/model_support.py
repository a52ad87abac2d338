"""Support of the kinds of modules that the engine trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

from ..comm.control import ControlPlane
from ..comm.shapes import Shapes
from .movable_layers import Layers
from .pipe_module import held_stages, routes_of
from .plain_layers import PlainLayers
from .reach import Reach
from .stage_runner import LossBook, PlainRunner, StageRunner, Surroundings
from .ties import Tie


class Reader(Protocol):
    """The engine, as far as reading data goes."""

    data_iterator: Iterator[object] | None
    global_steps: int

    @property
    def own_loss(self) -> object:
        """Computes losses of a causal LM instead of the model; None: the model does."""

    def _next_batch(self) -> object: ...

    def checkpoint_error(self) -> BaseException | None: ...


class Cut(NamedTuple):
    """How the samples of a step are cut into micro-batches, if not as they come."""

    size: int
    num_micro_batches: int


class Steps(Protocol):
    """Reads steps, and agrees on them with the other ranks."""

    is_stopping: bool
    """Whether any rank had been asked to stop when the last step began; the same on all ranks."""

    notices_change: bool
    """Whether this rank has noticed that steps are not what they were."""

    change_is_noticed: bool
    """Whether any rank had, when the last step began; the same on all ranks."""

    @property
    def reads(self) -> bool:
        """Whether this rank reads data."""
        ...

    @property
    def tokens(self) -> int | None:
        """Tokens of the last step, of all replicas, padding not counted; None where inputs are anything."""
        ...

    def open(self, num_micro_batches: int, *, cut: Cut | None = None, partial: bool = False) -> int:
        """Read a step before it begins; a rank whose data ends, or is broken, stops all together. Collective."""
        ...


@dataclass(frozen=True)
class Around:
    """The engine's part in what its stages compute.

    Args:
        surroundings: around each computation.
        losses: where the last stage puts them.
        wants: while an evaluation runs, ``(losses, outputs)``: what it asks for.
        num_micro_batches: by which a loss is divided, where it is the mean of them.
    """

    surroundings: Surroundings
    reach: Reach
    device: torch.device
    losses: LossBook
    wants: Callable[[], tuple[bool, bool]]
    num_micro_batches: Callable[[], int]


class ModelSupport(ABC):
    """One kind of pipeline module."""

    can_cut = False
    """Whether the samples of a step can be cut into micro-batches of another size."""

    sums_tokens = False
    """Whether losses of micro-batches and replicas are shares of the step's, or means of their own."""

    def __init__(self, module: PipelineModule) -> None:
        self.module = module

    @property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """Device of each stage, one route a direction."""
        return routes_of(self.module)

    @property
    def stages(self) -> list[tuple[int, nn.Module]]:
        """Number and module of each chunk that this rank holds."""
        return [(stage, self._modules_of(stage)) for stage in held_stages(self.module)]

    @property
    def ties(self) -> list[Tie]:
        """Weights here, or rows of them, that another stage has too."""
        return [Tie(weight, group) for weight, group in self.module.get_tied_weights_and_groups()]

    def _modules_of(self, stage: int) -> nn.Module:
        """What a stage has of this rank's modules, tied ones too."""
        module = self.module
        if len(self.routes[0]) == module.num_stages:
            whole: nn.Module = module
            return whole
        found = nn.ModuleList()
        for item in range(module.parts[stage], module.parts[stage + 1]):
            spec = module._layer_specs[item]
            own = module.tied_modules[spec.key] if isinstance(spec, TiedLayerSpec) else module._modules.get(str(item))
            found.extend([own] if own is not None else [])
        return found

    def require_logits(self, who: str) -> None:  # noqa: B027 - most kinds have them
        """Raise ValueError if no stage has the outputs that ``who`` needs."""

    def check_optimizer(self, basic: torch.optim.Optimizer) -> None:  # noqa: B027 - most kinds take all
        """Raise ValueError for an optimizer that cannot step what the stages have."""

    def keep_masks(self) -> None:  # noqa: B027 - most kinds leave no mask out
        """From now on outputs at padding count, and no mask that changes them may be left out."""

    @abstractmethod
    def make_layers(self) -> Layers:
        """The layers that can move between stages."""

    @abstractmethod
    def make_steps(
        self, reader: Reader, control: ControlPlane, device: torch.device, raises: _Raises, num_sharing: int
    ) -> Steps:
        """What reads steps.

        Args:
            raises: around an error that is raised on all ranks.
            num_sharing: pipelines that share experts and so compute in step.
        """

    @abstractmethod
    def make_runner(self, chunk: int, around: Around) -> StageRunner:
        """What computes a chunk of this rank. After :meth:`make_steps`."""

    def activation_shapes(self) -> Shapes:
        """A new book of shapes for a lane of activations."""
        return Shapes()

    def reset_shapes(self) -> None:  # noqa: B027 - shapes that are known of each micro-batch need none
        """The shapes of activations change with the next step."""

    def gradient_divisor(self, *, averages: bool) -> float:
        """Number by which the sum of the replicas' gradients is divided.

        Args:
            averages: they are to be averaged, or to be added (``gradient_allreduce_op``).
        """
        return float(self.module._grid.data_parallel_size) if averages else 1.0

    def sum_of_losses(self, num_rows: int, num_micro_batches: int) -> float:
        """Factor that makes the gradient of a micro-batch's loss that of a sum over its rows."""
        return float(num_rows * num_micro_batches)  # a loss is the mean of a micro-batch

    def write_model(self, draft: Path) -> None:  # noqa: B027 - there is nothing to write of layers of one's own
        """Write what a checkpoint needs to become a model of its own. On rank 0."""


_Raises = Callable[[], AbstractContextManager[None]]


class PlainSteps:
    """Reads the steps of any ``PipelineModule``: what its first and last stage take is anything."""

    is_stopping = notices_change = change_is_noticed = False
    tokens = None

    def __init__(self, reader: Reader, control: ControlPlane, raises: _Raises, *, reads: bool) -> None:
        self._reader, self._control, self._raises, self.reads = reader, control, raises, reads
        self._loaded: list[object] = []

    def open(self, num_micro_batches: int, *, cut: Cut | None = None, partial: bool = False) -> int:
        """Read the whole step before it begins: a rank whose data ends, or is broken, stops all of them together."""
        assert cut is None, "micro-batches of anything cannot be cut"
        error = self._reader.checkpoint_error()
        self._loaded = []
        if error is None and self.reads:
            try:
                self._loaded = [self._reader._next_batch() for _ in range(num_micro_batches)]
            except Exception as caught:
                error = caught
        with self._raises():
            doing = f"beginning step {self._reader.global_steps}"
            self.change_is_noticed = self._control.settle(error, doing, notices=self.notices_change)
        return num_micro_batches

    def batch(self, number: int) -> object:
        """A micro-batch of the step, on a rank that reads."""
        return self._loaded[number]


class PlainSupport(ModelSupport):
    """Any :class:`deepspeed.pipe.PipelineModule`."""

    def __init__(self, module: PipelineModule) -> None:
        super().__init__(module)
        self._shapes_version = 0
        self._chunks: dict[int, PipelineModule] = {}
        self._chunks_of: tuple[int, ...] = ()
        """Boundaries under which chunks were made."""

    def make_layers(self) -> PlainLayers:
        return PlainLayers(self.module)

    def make_steps(
        self, reader: Reader, control: ControlPlane, device: torch.device, raises: _Raises, num_sharing: int
    ) -> PlainSteps:
        reads = any(route[end] == self.module.stage_id for route in self.routes for end in (0, -1))
        self._steps = PlainSteps(reader, control, raises, reads=reads)
        return self._steps

    def make_runner(self, chunk: int, around: Around) -> PlainRunner:
        module = self.module
        return PlainRunner(
            held_stages(module)[chunk],
            len(self.routes[0]),
            reach=around.reach,
            around=around.surroundings,
            module=module,
            chunk=lambda: self._chunk(chunk),
            device=around.device,
            batch=self._steps.batch,
            losses=around.losses,
            wants=around.wants,
            num_micro_batches=around.num_micro_batches,
            shapes_version=lambda: self._shapes_version,
        )

    def _chunk(self, number: int) -> PipelineModule:
        """A stage of this rank with the layers that it has now."""
        module = self.module
        if not hasattr(module, "chunk"):
            return module
        parts = tuple(module.parts)
        if self._chunks_of != parts:
            self._chunks_of, self._chunks = parts, {}
        if number not in self._chunks:
            self._chunks[number] = module.chunk(number)
        return self._chunks[number]

    def reset_shapes(self) -> None:
        self._shapes_version += 1
