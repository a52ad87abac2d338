"""The decoder layers of a Hugging Face model, or their halves, that can move between the stages of its pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from ..config.section import HETERO, WORK, Method
from ..hf.layer_blocks import blocks_of
from ..hf.peft import inject
from ..hf.quantised import quantisation_of
from ..hf.quiet_transformers import quiet
from ..hf.stage import CausalLMStage, HalfLayer, PassThrough, take_out, take_out_half
from ..hf.weights import same_hooks, skeleton
from ..moe.hf_experts import HFExpertLayer
from .compiled_layers import run_of_half
from .module import CausalLMPipeline, cut_of, partition_items
from .movable_layers import Layers, TensorNote, empty_tensors


class CausalLMLayers(Layers):
    """Items of a Hugging Face model: decoder layers and their halves move, embedding and head stay on their stages.
    Where the head is in slices nothing moves."""

    module: CausalLMPipeline

    @property
    def num_items(self) -> int:
        return len(self.module.items)

    def check(self, parts: Sequence[int]) -> list[int]:
        if self.module.has_slices and list(parts) != self.parts:
            raise ValueError(
                f"partition {list(parts)} is another than {self.parts}, and layers stay where they are while the head "
                "is in slices (paceline.pipeline.head_slices); leave one of the two out."
            )
        return partition_items(self.module.items, self.module.num_virtual_stages, list(parts))

    def boundaries(self, method: Method, profile: str | None) -> list[int] | None:
        if method in (HETERO, WORK):
            return None  # what they look at is looked at before there is an engine
        return partition_items(self.module.items, self.module.num_virtual_stages, method)

    @property
    def held(self) -> tuple[int, ...]:
        return self.module.held

    def get(self, item: int) -> nn.Module | None:
        if not self._is_layer(item):
            return None
        _, half = self._place(item)
        layer = self._layer(item)
        return layer if half is None else HalfLayer(layer, half)

    def _is_layer(self, item: int) -> bool:
        """Whether an item is a decoder layer or half of one."""
        return 0 < item <= self.module.anatomy.num_layer_blocks

    def _layer(self, item: int) -> nn.Module:
        """The decoder layer here that an item is, or of which it is a half."""
        holder = next(m for m, stage in zip(self.module.models, self.held, strict=True) if item in self._of(stage))
        index, _ = self._place(item)
        return self.module.anatomy.layers_of(holder)[index]

    def _place(self, item: int) -> tuple[int, int | None]:
        """Number of the decoder layer that an item is, or of which it is a half, and which half."""
        index, half = divmod(item - 1, self.module.anatomy.blocks_per_layer)
        return index, half if self.module.anatomy.blocks_per_layer > 1 else None

    def _of(self, stage: int) -> range:
        return range(self.parts[stage], self.parts[stage + 1])

    def kind(self, item: int) -> tuple[str, str]:
        name = self.module.items[item].kind
        if not self._is_layer(item):
            return name, name
        return blocks_of(self._pattern(), self.module.anatomy)[item - 1].kind, name

    def num_parameters(self, item: int) -> int:
        layer = self.get(item)  # of experts that lie on several ranks it has a share
        return self.module.items[item].num_parameters if layer is None else sum(p.numel() for p in layer.parameters())

    def timed(self, stage: int) -> tuple[Mapping[int, nn.Module | Sequence[nn.Module]], int | None, int | None]:
        own, last = self._of(stage), self.num_items - 1
        if len(own) == 1 and own[0] in (0, last):  # after the stage's forward comes only the head's loss
            whole = self.module.stages[self.held.index(stage)]
            return {own[0]: whole}, None, last if last in own else None
        parts = {item: parts for item in own if (parts := self._run_of(item)) is not None}
        return parts, 0 if 0 in own else None, last if last in own else None

    def _run_of(self, item: int) -> nn.Module | Sequence[nn.Module] | None:
        """The module that is called when a layer or a half of one runs, or the modules where none is that alone."""
        layer, (_, half) = self.get(item), self._place(item)
        if layer is None or half is None:
            return layer
        return run_of_half(self._layer(item), half) or tuple(layer.children())

    def recomputed_together(self, stage: int) -> dict[int, int]:
        layers = self.module.anatomy.layers_of(self.module.models[self.held.index(stage)])
        own, found = self._of(stage), {}
        for item in own[1:]:
            index, half = self._place(item)
            if half and item - 1 in own and getattr(layers[index], "gradient_checkpointing", False):
                found[item] = item - 1
        return found

    def cuts(self) -> tuple[int, ...]:
        return tuple(range(2, self.num_items))  # a stage of the embedding alone would tell little of its device

    def prefix(self, item: int) -> str:
        anatomy = self.module.anatomy
        return f"{anatomy.trunk}.{anatomy.layers}.{self._place(item)[0]}."

    def prefixes(self, item: int) -> tuple[str, ...]:
        whole = self.prefix(item)
        return tuple(f"{whole}{name}." for name in self.module.items[item].children) or (whole,)

    def get_ready(self) -> None:
        if quantisation_of(self.module.stage.model.config) is None:
            self._pattern()

    def make(self, item: int, notes: Sequence[TensorNote]) -> nn.Module | None:
        module, model = self.module, self.module.stage.model
        if quantisation_of(model.config) is not None:
            raise ValueError(
                f"{module.items[item].name} cannot move: its weights are quantised, with scales that are no tensors of "
                "the model; leave the partition as it is."
            )
        index, half = self._place(item)
        whole = self._copied(index)
        module.spread_experts(whole)
        module.slice_layer(whole)
        layer = whole if half is None else HalfLayer(whole, half)
        empty_tensors(layer, item, notes, next(module.parameters()).device)
        return layer

    def _copied(self, index: int) -> nn.Module:
        """A decoder layer without memory, like the one that trains."""
        config = self.module.stage.model.config
        shared = {id(config): config, id(config.get_text_config()): config.get_text_config()}
        pattern = self.module.anatomy.layers_of(self._pattern())[index]
        layer: nn.Module = copy.deepcopy(pattern, shared | same_hooks(pattern))
        return layer.train(self.module.training)

    def unmake(self, made: Mapping[int, nn.Module | None]) -> None:
        """They are copies, and nobody else has them."""

    def _pattern(self) -> PreTrainedModel:
        """The whole model without memory, of which layers are copied; with the hooks that the stage's own has."""
        module = self.module
        if not module.pattern:
            with quiet():
                pattern = skeleton(module.stage.model.config)
                if module.adapters is not None:
                    inject(pattern, module.adapters)
                module.pattern.append(pattern)
        (pattern,) = module.pattern
        trunks = [module.anatomy.trunk_of(model) for model in module.models]
        # transformers installs them in a model's first forward, which a layer may see that was made before.
        is_captured = any(stage.router_loss is not None for stage in module.stages)
        if is_captured or any(getattr(trunk, "_output_capturing_hooks_installed", False) for trunk in trunks):
            for trunk in (*trunks, module.anatomy.trunk_of(pattern)):
                maybe_install_capturing_hooks(trunk)
        return pattern

    def swap(self, parts: Sequence[int], arrived: Mapping[int, nn.Module | None]) -> None:
        module, anatomy = self.module, self.module.anatomy
        held = {item: layer for item in self.here if (layer := self.get(item)) is not None} | dict(arrived)
        before = {stage: self._of(stage) for stage in self.held}
        module.parts = list(parts)
        module._set_bounds(parts[self.held[0]], parts[self.held[0] + 1])
        stages: list[CausalLMStage] = list(module.stages)  # type: ignore[arg-type]
        for number, stage in zip(self.held, stages, strict=True):
            layers, now = anatomy.layers_of(stage.model), self._of(number)
            for item in before[number]:
                if item not in now and self._is_layer(item):
                    self._take_out(layers, item, now)
        for number, stage in zip(self.held, stages, strict=True):
            layers, now = anatomy.layers_of(stage.model), self._of(number)
            for item in now:
                if item not in before[number]:
                    layer = held[item]
                    assert layer is not None
                    self._put_in(layers, item, layer)
            stage.cut = cut_of(module.parts, number)
        here = {item: layer for item in sorted(self.here) if (layer := self.get(item)) is not None}
        module.expert_layers.clear()  # in place: other parts have it too
        module.expert_layers |= {
            self.prefix(item) + name: part
            for item, layer in here.items()
            for name, part in layer.named_modules()
            if isinstance(part, HFExpertLayer)
        }
        module.recompute(module.recomputed)
        module.compile_layers()

    def _take_out(self, layers: nn.ModuleList, item: int, now: range) -> None:
        """Put a placeholder where an item has been; of a layer of which a half stays, for the other half."""
        index, half = self._place(item)
        if half is not None and any(block + 1 in now for block in self.module.anatomy.blocks_of(index)):
            take_out_half(layers[index], half)
        elif not isinstance(layers[index], PassThrough):
            layers[index] = take_out(layers[index], self.module.anatomy)

    def _put_in(self, layers: nn.ModuleList, item: int, layer: nn.Module) -> None:
        """Put an item where a placeholder has been."""
        index, half = self._place(item)
        if half is None or not isinstance(layer, HalfLayer):
            layers[index] = layer
            return
        if isinstance(layers[index], PassThrough):
            layers[index] = self._copied(index)
            take_out_half(layers[index], 1 - half)
        layer.put_into(layers[index])
