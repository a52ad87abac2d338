"""Layers of a stage that are taken out, made anew and put in while the pipeline lives.

An *item* is what a partition counts: a layer of a :class:`deepspeed.pipe.PipelineModule`; of a Hugging Face model its
embedding, a decoder layer, or norm and head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from ..config.section import Method
from ..state.named import REPLICATED


@dataclass(frozen=True)
class TensorNote:
    """A parameter or buffer of a layer, as its stage has it.

    Args:
        name: within the layer.
        group: number of the optimizer's group that trains it; None: it is not trained.
        options: of that group, but for its parameters.
        num_owners: ranks among which its masters and states are divided.
        copied_bytes: of the copies of experts that a rank keeps beside it.
        is_spread: it has experts, which may change ranks.
    """

    name: str
    is_parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    group: int | None = None
    options: Mapping[str, object] | None = None
    num_owners: int = 1
    copied_bytes: int = 0
    is_spread: bool = False

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def goes_ahead(self) -> bool:
        """Whether it can be sent before its layer moves."""
        return self.is_parameter and not self.is_spread

    @property
    def is_trained(self) -> bool:
        """Whether steps change it."""
        return self.is_parameter and self.group is not None


class Layers(ABC):
    """The items of one rank's stages."""

    def __init__(self, module: PipelineModule) -> None:
        self.module = module

    @property
    @abstractmethod
    def num_items(self) -> int: ...

    @property
    def parts(self) -> list[int]:
        """Boundaries between the stages, as they are."""
        return [int(part) for part in self.module.parts]

    @property
    def held(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return (self.module.stage_id,)

    @property
    def here(self) -> list[int]:
        """Items of this rank's stages."""
        return items_of_stages(self.parts, self.held)

    @abstractmethod
    def check(self, parts: Sequence[int]) -> list[int]:
        """``parts``, if layers can move so that they hold.

        Raises:
            ValueError: they cannot.
        """

    @abstractmethod
    def boundaries(self, method: Method, profile: str | None) -> list[int] | None:
        """Boundaries that a JSON's partition method gives a module that is there; None: it was built so."""

    @abstractmethod
    def get(self, item: int) -> nn.Module | None:
        """The module of an item that is here and can move; None for what has no tensors."""

    @abstractmethod
    def kind(self, item: int) -> tuple[str, str]:
        """Two keys: the first is equal for items that certainly do the same work, the second if they probably do."""

    @abstractmethod
    def num_parameters(self, item: int) -> int:
        """Count the parameters that this rank has of an item."""

    @abstractmethod
    def timed(self, stage: int) -> tuple[Mapping[int, nn.Module | Sequence[nn.Module]], int | None, int | None]:
        """The module of each item of a stage that is here, or the modules of which it consists; and the items of what
        runs before and after all of them."""

    def recomputed_together(self, stage: int) -> dict[int, int]:
        """Item of a stage that is here -> the one before it with which its activations are recomputed."""
        return {}

    @abstractmethod
    def cuts(self) -> tuple[int, ...]:
        """Boundaries that layers can move to."""

    @abstractmethod
    def prefix(self, item: int) -> str:
        """Beginning of the names of an item's tensors in state and checkpoints."""

    def prefixes(self, item: int) -> tuple[str, ...]:
        """Beginnings that an item's tensors have, and no other's."""
        return (self.prefix(item),)

    def get_ready(self) -> None:  # noqa: B027 (most have nothing to do)
        """Take the time now that the first :meth:`make` would take beside making a layer."""

    @abstractmethod
    def make(self, item: int, notes: Sequence[TensorNote]) -> nn.Module | None:
        """The module of an item that is to come, its tensors not yet filled.

        Raises:
            ValueError: what can be made here is not what is there.
        """

    @abstractmethod
    def unmake(self, made: Mapping[int, nn.Module | None]) -> None:
        """Let go of the memory of modules that :meth:`make` has given, and that nobody is to have."""

    @abstractmethod
    def swap(self, parts: Sequence[int], arrived: Mapping[int, nn.Module | None]) -> None:
        """Hold what ``parts`` says from now on."""


def items_of_stages(parts: Sequence[int], stages: Sequence[int]) -> list[int]:
    """Items that ``stages`` hold under the boundaries ``parts``, in the order of the stages."""
    return [item for stage in stages for item in range(parts[stage], parts[stage + 1])]


def empty_tensors(layer: nn.Module, item: int, notes: Sequence[TensorNote], device: torch.device) -> None:
    """Give ``layer`` memory on ``device`` for the tensors that ``notes`` describe.

    Raises:
        ValueError: it has other tensors.
    """
    twice = dict(layer.named_parameters(remove_duplicate=False)).keys() - dict(layer.named_parameters()).keys()
    twice |= dict(layer.named_buffers(remove_duplicate=False)).keys() - dict(layer.named_buffers()).keys()
    if twice:
        raise ValueError(
            f"layer {item} cannot move: {', '.join(sorted(twice)[:3])} is the same tensor as another of the layer's; "
            "leave the partition as it is, or give each its own."
        )
    found = {name: (tensor.shape, isinstance(tensor, nn.Parameter)) for name, tensor in tensors_of_layer(layer).items()}
    expected = {note.name: (torch.Size(note.shape), note.is_parameter) for note in notes}
    if found != expected:
        odd = sorted(found.keys() ^ expected.keys()) or sorted(n for n in found if found[n] != expected[n])
        raise ValueError(
            f"layer {item} cannot move: made anew it differs from the one that trains in {', '.join(odd[:3])}; leave "
            "the partition as it is, or build the layer from its config or LayerSpec alone."
        )
    for note in notes:
        owner, _, leaf = note.name.rpartition(".")
        tensor = torch.empty(note.shape, dtype=note.dtype, device=device)
        part = layer.get_submodule(owner)
        if note.is_parameter:
            parameter = nn.Parameter(tensor, requires_grad=note.requires_grad)
            vars(parameter).update(vars(part._parameters[leaf]))  # marks, such as that of a tensor-parallel slice
            setattr(parameter, REPLICATED, False)
            part._parameters[leaf] = parameter
        else:
            part._buffers[leaf] = tensor


def forget_tensors(layer: nn.Module) -> None:
    """Keep the names, shapes and marks of a layer's tensors, and not their memory."""
    for part in layer.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                vars(empty).update(vars(parameter))
                part._parameters[name] = empty
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device="meta")


def tensors_of_layer(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, also the buffers that are not part of a checkpoint."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
