"""Layers of a stage that are taken out, made anew and put in while the pipeline lives.

An *item* is what a partition counts: a layer of a :class:`deepspeed.pipe.PipelineModule`; of a Hugging Face model its
embedding, a decoder layer, or norm and head.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from ..hf.kinds import layer_kinds
from ..hf.quiet import quiet
from ..hf.stage import take_out
from ..hf.weights import skeleton
from ..planning.partition_methods import checked_boundaries
from ..planning.repartition import stage_of
from .module import REPLICATED, CausalLMPipeline, cut_of, partition_items

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class TensorNote:
    """A parameter or buffer of a layer, as its stage has it.

    Args:
        name: within the layer.
        group: number of the optimizer's group that trains it; None: it is not trained.
        options: of that group, but for its parameters.
    """

    name: str
    is_parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    group: int | None = None
    options: Mapping[str, Any] | None = None

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Layers(ABC):
    """The items of one rank's stage."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    @abstractmethod
    def num_items(self) -> int: ...

    @property
    def here(self) -> range:
        """Items of this rank's stage."""
        parts, stage = self.module.parts, self.module.stage_id
        return range(parts[stage], parts[stage + 1])

    @abstractmethod
    def check(self, parts: Sequence[int]) -> list[int]:
        """``parts``, if layers can move so that they hold.

        Raises:
            ValueError: they cannot.
        """

    @abstractmethod
    def get(self, item: int) -> nn.Module | None:
        """The module of an item that is here and can move; None for what has no tensors."""

    @abstractmethod
    def kind(self, item: int) -> tuple[str, str]:
        """The first is the same for two items that certainly do the same work, the second if they probably do."""

    @abstractmethod
    def num_parameters(self, item: int) -> int:
        """Of an item that is here."""

    @abstractmethod
    def timed(self) -> tuple[dict[int, nn.Module], int | None, int | None]:
        """Modules here by item, and the items of what runs before the first and after the last of them."""

    @abstractmethod
    def cuts(self) -> tuple[int, ...]:
        """Where items may be cut so that layers can move there."""

    @abstractmethod
    def prefix(self, item: int) -> str:
        """What the names of an item's tensors begin with, where state is concerned."""

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


def layers_of(module: PipelineModule) -> Layers:
    return CausalLMLayers(module) if isinstance(module, CausalLMPipeline) else PlainLayers(module)


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


class PlainLayers(Layers):
    """Of any ``PipelineModule``: specs, modules, functions. What is tied stays on its stages."""

    @property
    def num_items(self) -> int:
        return int(self.module._num_layers)

    def check(self, parts: Sequence[int]) -> list[int]:
        found = checked_boundaries(parts, self.num_items, self.module.num_stages)
        for item, spec in enumerate(self.module._layer_specs):
            now, then = stage_of(self.module.parts, item), stage_of(found, item)
            if now != then and (other := self._shares_tensors(item)) is not None:
                raise ValueError(
                    f"partition {found} moves layer {item} from stage {now} to {then}, which has parameters or buffers "
                    f"in common with layer {other}: choose boundaries that leave it, or give each layer its own."
                )
            if isinstance(spec, TiedLayerSpec) and now != then:
                raise ValueError(
                    f"partition {found} moves layer {item}, which is tied ({spec.key!r}), from stage {now} to {then}: "
                    "tied layers stay where they are; choose boundaries that leave it."
                )
        return found

    def _shares_tensors(self, item: int) -> int | None:
        """Another layer with a tensor of this one: modules that the list of layers has twice, or that share weights."""
        specs = self.module._layer_specs
        if not isinstance(specs[item], nn.Module):
            return None
        own = {id(tensor) for tensor in tensors_of_layer(specs[item]).values()}
        return next(
            (
                other
                for other, spec in enumerate(specs)
                if other != item
                and isinstance(spec, nn.Module)
                and any(id(tensor) in own for tensor in tensors_of_layer(spec).values())
            ),
            None,
        )

    def get(self, item: int) -> nn.Module | None:
        return self.module._modules.get(str(item))

    def kind(self, item: int) -> tuple[str, str]:
        spec, layer = self.module._layer_specs[item], self._module(item)
        shapes = [tuple(p.shape) for p in layer.parameters()] if layer is not None else []
        if not isinstance(spec, LayerSpec):
            name = getattr(spec, "__name__", type(spec).__name__)
            return f"{name} {shapes}", f"{name} {shapes}"
        # A window or a rate may be an argument, but so may the number of the layer.
        arguments = _ADDRESS.sub("", f"{spec.module_args}{spec.module_kwargs}")
        name = spec.typename.__name__
        return f"{name}{arguments} {shapes}", f"{name} {shapes}"

    def num_parameters(self, item: int) -> int:
        layer = self._module(item)
        return 0 if layer is None else sum(p.numel() for p in layer.parameters())

    def timed(self) -> tuple[dict[int, nn.Module], int | None, int | None]:
        found = {item: layer for item in self.here if (layer := self._module(item)) is not None}
        is_first, is_last = self.here.start == 0, self.here.stop == self.num_items
        return found, self.here[0] if is_first else None, self.here[-1] if is_last else None

    def cuts(self) -> tuple[int, ...]:
        allowed = range(1, self.num_items)
        last = self.module.num_stages - 1
        for item, spec in enumerate(self.module._layer_specs):
            if isinstance(spec, TiedLayerSpec) or self._shares_tensors(item) is not None:
                stage = stage_of(self.module.parts, item)
                if stage not in (0, last):
                    return tuple(self.module.parts[1:-1])  # nothing can pass it
                first, stop = (item + 1, allowed.stop) if stage == 0 else (1, item + 1)
                allowed = range(max(allowed.start, first), min(allowed.stop, stop))
        return tuple(allowed)

    def _module(self, item: int) -> nn.Module | None:
        spec = self.module._layer_specs[item]
        return self.module.tied_modules[spec.key] if isinstance(spec, TiedLayerSpec) else self.get(item)

    def prefix(self, item: int) -> str:
        return f"{item}."

    def make(self, item: int, notes: Sequence[TensorNote]) -> nn.Module | None:
        spec = self.module._layer_specs[item]
        if isinstance(spec, LayerSpec):
            # A constructor draws its initial weights: nobody else is to notice.
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                layer = spec.build()
            layer.to(self.device)
        elif isinstance(spec, nn.Module):
            layer = spec
        else:
            return None
        layer.train(self.module.training)
        empty_tensors(layer, item, notes, self.device)
        return layer

    def unmake(self, made: Mapping[int, nn.Module | None]) -> None:
        for item, layer in made.items():
            if layer is not None and layer is self.module._layer_specs[item]:
                forget_tensors(layer)

    @property
    def device(self) -> torch.device:
        return next(p.device for p in self.module.parameters())

    def swap(self, parts: Sequence[int], arrived: Mapping[int, nn.Module | None]) -> None:
        module, before = self.module, self.here
        functions = dict(zip(before, module.forward_funcs, strict=True))
        module.parts = list(parts)
        module._set_bounds(self.here.start, self.here.stop)
        for item in before:
            if item not in self.here and str(item) in module._modules:
                layer = module._modules.pop(str(item))
                if layer is module._layer_specs[item]:
                    forget_tensors(layer)  # the list of layers would keep its memory
        for item in arrived:
            layer = arrived[item]
            functions[item] = layer if layer is not None else module._layer_specs[item]
            if layer is not None:
                module.add_module(str(item), layer)
        module.forward_funcs = [functions[item] for item in self.here]
        module.fwd_map = {str(item): n for n, item in enumerate(self.here) if str(item) in module._modules}
        numbered = sorted((name for name in module._modules if name.isdigit()), key=int)
        for name in numbered:  # in the order of the model, as if built so
            module._modules[name] = module._modules.pop(name)
        module.is_checkpointable_results_interval = None
        module._precompute_checkpointable_values()


class CausalLMLayers(Layers):
    """Of a Hugging Face model: decoder layers move; the embedding and the head stay on the first and last stage."""

    module: CausalLMPipeline

    @property
    def num_items(self) -> int:
        return len(self.module.items)

    def check(self, parts: Sequence[int]) -> list[int]:
        return partition_items(self.module.items, self.module.num_stages, list(parts))

    def get(self, item: int) -> nn.Module | None:
        if not 0 < item < self.num_items - 1:
            return None
        return self.module.anatomy.layers_of(self.module.stage.model)[item - 1]

    def kind(self, item: int) -> tuple[str, str]:
        name = self.module.items[item].kind
        if not 0 < item < self.num_items - 1:
            return name, name
        return layer_kinds(self._pattern(), self.module.anatomy)[item - 1], name

    def num_parameters(self, item: int) -> int:
        return self.module.items[item].num_parameters

    def timed(self) -> tuple[dict[int, nn.Module], int | None, int | None]:
        found = {item: layer for item in self.here if (layer := self.get(item)) is not None}
        cut = self.module.stage.cut
        return found, 0 if cut.first else None, self.num_items - 1 if cut.last else None

    def cuts(self) -> tuple[int, ...]:
        return tuple(range(2, self.num_items - 1))  # a decoder layer on every stage

    def prefix(self, item: int) -> str:
        anatomy = self.module.anatomy
        return f"{anatomy.trunk}.{anatomy.layers}.{item - 1}."

    def make(self, item: int, notes: Sequence[TensorNote]) -> nn.Module | None:
        module, model = self.module, self.module.stage.model
        anatomy = module.anatomy
        pattern = self._pattern()
        config = model.config
        shared = {id(config): config, id(config.get_text_config()): config.get_text_config()}
        layer = copy.deepcopy(anatomy.layers_of(pattern)[item - 1], shared)
        layer.train(module.training)
        empty_tensors(layer, item, notes, next(module.parameters()).device)
        return layer

    def unmake(self, made: Mapping[int, nn.Module | None]) -> None:
        """They are copies, and nobody else has them."""

    def _pattern(self) -> Any:
        """The whole model without memory, of which layers are copied; with the hooks that the stage's own has."""
        module = self.module
        if not module.pattern:
            with quiet():
                module.pattern.append(skeleton(module.stage.model.config))
        (pattern,) = module.pattern
        trunks = [module.anatomy.trunk_of(model) for model in (module.stage.model, pattern)]
        if getattr(trunks[0], "_output_capturing_hooks_installed", False):
            maybe_install_capturing_hooks(trunks[1])
        return pattern

    def swap(self, parts: Sequence[int], arrived: Mapping[int, nn.Module | None]) -> None:
        module, before = self.module, self.here
        stage, anatomy = module.stage, module.anatomy
        recomputes = any(getattr(part, "gradient_checkpointing", False) for part in stage.model.modules())
        module.parts = list(parts)
        module._set_bounds(self.here.start, self.here.stop)
        layers = anatomy.layers_of(stage.model)
        for item in before:
            if item not in self.here:
                layers[item - 1] = take_out(layers[item - 1], anatomy)
        for item, layer in arrived.items():
            assert layer is not None
            layers[item - 1] = layer
        stage.cut = cut_of(module.parts, module.stage_id)
        if recomputes:
            module.enable_gradient_checkpointing()


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
