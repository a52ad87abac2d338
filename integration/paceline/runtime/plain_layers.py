"""The layers of any :class:`deepspeed.pipe.PipelineModule` that can move between its stages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ..config.section import Method
from ..planning.partition_methods import checked_boundaries
from ..planning.repartition import stage_of
from .movable_layers import Layers, TensorNote, empty_tensors, forget_tensors, items_of_stages, tensors_of_layer
from .pipe_module import boundaries_for, held_stages

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class PlainLayers(Layers):
    """Items of any ``PipelineModule``: specs, modules, functions. Tied ones stay on their stages."""

    @property
    def num_items(self) -> int:
        return int(self.module._num_layers)

    def check(self, parts: Sequence[int]) -> list[int]:
        found = checked_boundaries(parts, self.num_items, len(self.parts) - 1)
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

    @property
    def held(self) -> tuple[int, ...]:
        return held_stages(self.module)

    def boundaries(self, method: Method, profile: str | None) -> list[int] | None:
        return boundaries_for(self.module, method, profile)

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
        layer: nn.Module | None = self.module._modules.get(str(item))
        return layer

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

    def timed(self, stage: int) -> tuple[Mapping[int, nn.Module], int | None, int | None]:
        own = items_of_stages(self.parts, [stage])
        found = {item: layer for item in own if (layer := self._module(item)) is not None}
        first, last = own[0], own[-1]
        return found, first if first == 0 else None, last if last == self.num_items - 1 else None

    def cuts(self) -> tuple[int, ...]:
        allowed = range(1, self.num_items)
        last = len(self.module.parts) - 2
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
        layer: nn.Module
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
        device: torch.device = next(p.device for p in self.module.parameters())
        return device

    def swap(self, parts: Sequence[int], arrived: Mapping[int, nn.Module | None]) -> None:
        module, before = self.module, self.here
        functions = dict(zip(before, module.forward_funcs, strict=True))
        module.parts = list(parts)
        module._set_bounds(parts[self.held[0]], parts[self.held[0] + 1])
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
