"""The decoder layers of a Hugging Face model that can move between the stages of its pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from ..config.section import HETERO, WORK, Method
from ..hf.layer_kinds import layer_kinds
from ..hf.peft import inject
from ..hf.quantised import quantisation_of
from ..hf.quiet_transformers import quiet
from ..hf.stage import CausalLMStage, take_out
from ..hf.weights import skeleton
from ..moe.hf_experts import HFExpertLayer
from .module import CausalLMPipeline, cut_of, partition_items
from .movable_layers import Layers, TensorNote, empty_tensors


class CausalLMLayers(Layers):
    """Items of a Hugging Face model: decoder layers move, the embedding and the head stay on their stages."""

    module: CausalLMPipeline

    @property
    def num_items(self) -> int:
        return len(self.module.items)

    def check(self, parts: Sequence[int]) -> list[int]:
        return partition_items(self.module.items, self.module.num_virtual_stages, list(parts))

    def boundaries(self, method: Method, profile: str | None) -> list[int] | None:
        if method in (HETERO, WORK):
            return None  # what they look at is looked at before there is an engine
        return partition_items(self.module.items, self.module.num_virtual_stages, method)

    @property
    def held(self) -> tuple[int, ...]:
        return self.module.held

    def get(self, item: int) -> nn.Module | None:
        if not 0 < item < self.num_items - 1:
            return None
        holder = next(m for m, stage in zip(self.module.models, self.held, strict=True) if item in self._of(stage))
        return self.module.anatomy.layers_of(holder)[item - 1]

    def _of(self, stage: int) -> range:
        return range(self.parts[stage], self.parts[stage + 1])

    def kind(self, item: int) -> tuple[str, str]:
        name = self.module.items[item].kind
        if not 0 < item < self.num_items - 1:
            return name, name
        return layer_kinds(self._pattern(), self.module.anatomy)[item - 1], name

    def num_parameters(self, item: int) -> int:
        layer = self.get(item)  # of experts that lie on several ranks it has a share
        return self.module.items[item].num_parameters if layer is None else sum(p.numel() for p in layer.parameters())

    def timed(self, stage: int) -> tuple[dict[int, nn.Module], int | None, int | None]:
        own, last = self._of(stage), self.num_items - 1
        found = {item: layer for item in own if (layer := self.get(item)) is not None}
        return found, 0 if 0 in own else None, last if last in own else None

    def cuts(self) -> tuple[int, ...]:
        return tuple(range(2, self.num_items - 1))  # a decoder layer on every stage

    def prefix(self, item: int) -> str:
        anatomy = self.module.anatomy
        return f"{anatomy.trunk}.{anatomy.layers}.{item - 1}."

    def get_ready(self) -> None:
        if quantisation_of(self.module.stage.model.config) is None:
            self._pattern()

    def make(self, item: int, notes: Sequence[TensorNote]) -> nn.Module | None:
        module, model = self.module, self.module.stage.model
        anatomy = module.anatomy
        if quantisation_of(model.config) is not None:
            raise ValueError(
                f"layer {item - 1} cannot move: its weights are quantised, with scales that are no tensors of the "
                "model; leave the partition as it is."
            )
        pattern = self._pattern()
        config = model.config
        shared = {id(config): config, id(config.get_text_config()): config.get_text_config()}
        layer = copy.deepcopy(anatomy.layers_of(pattern)[item - 1], shared)
        layer.train(module.training)
        module.spread_experts(layer)
        empty_tensors(layer, item, notes, next(module.parameters()).device)
        return layer

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
                if item not in now and 0 < item < self.num_items - 1:
                    layers[item - 1] = take_out(layers[item - 1], anatomy)
        for number, stage in zip(self.held, stages, strict=True):
            layers, now = anatomy.layers_of(stage.model), self._of(number)
            for item in now:
                if item not in before[number]:
                    layer = held[item]
                    assert layer is not None
                    layers[item - 1] = layer
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
