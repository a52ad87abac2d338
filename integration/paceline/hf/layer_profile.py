"""Measures what the items of a Hugging Face causal LM cost on a device: each kind once, with random weights.

An item runs as a pipeline stage of its own, so that a model is profiled where the whole of it would not fit. What the
trunk does in every stage (masks, rotary tables) is measured in a stage without layers, and is not a layer's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..measure.clock import Clock
from ..measure.flops import size_of
from ..measure.profile_file import ItemProfile
from ..measure.recorder import SavedBytes
from .activations import check_shape
from .anatomy import Anatomy, anatomy_of
from .layer_blocks import blocks_of
from .peft import Adapters, cast, inject
from .quiet_transformers import quiet
from .stage import CausalLMStage, Cut, recompute_layers
from .weights import causal_config, load_stage, skeleton

WARM_UPS = 2
MOST_BYTES_BETWEEN = 1 << 26
"""Bytes that go through a device's caches between two passes of a layer, at most: more than caches hold."""
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "sliding_window", "tie_word_embeddings"),
)


CompileLayers = Callable[[Iterable[nn.Module]], None]
"""Has the layers that it is given compiled, in place."""


def fingerprint(config: PretrainedConfig) -> dict[str, Any]:
    """The model type and the sizes that decide what a model costs, as far as its config has them."""
    text = causal_config(config).get_text_config()
    sizes = {name: size_of(text, name) for name in SIZES}
    return {"model_type": text.model_type, **{name: value for name, value in sizes.items() if value is not None}}


def profile_items(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    micro_batch_size: int,
    sequence_length: int,
    gradient_checkpointing: bool = False,
    half_layers: bool = False,
    compiled: CompileLayers | None = None,
    adapters: Adapters | None = None,
    repeats: int = 5,
) -> list[ItemProfile]:
    """Forward and backward seconds, bytes and parameters of embedding, decoder layers in order, and head with loss.

    Medians of ``repeats`` runs; the weights of one item are on the device at a time. Not collective.

    Args:
        half_layers: decoder layers are measured in halves.
        compiled: has the decoder layers that it is given compiled; None: they are measured as they are.
        adapters: that are trained, and nothing else.

    Raises:
        ValueError: sizes below 1, or sequences longer than the model has positions.
    """
    shape = (micro_batch_size, sequence_length, gradient_checkpointing, half_layers)
    bench = Bench(config, dtype, device, *shape, compiled, adapters, repeats)
    return [bench.embedding, *(bench.layer(index) for index in range(bench.anatomy.num_blocks)), bench.head]


@dataclass
class Bench:
    """Measures single items. Arguments as of :func:`profile_items`."""

    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device
    micro_batch_size: int
    sequence_length: int
    gradient_checkpointing: bool = False
    half_layers: bool = False
    compiled: CompileLayers | None = None
    adapters: Adapters | None = None
    repeats: int = 5
    _measured: dict[str, ItemProfile] = field(default_factory=dict)
    _gradients: dict[tuple[torch.Size, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = causal_config(self.config)
        check_shape(self.config, self.micro_batch_size, self.sequence_length)
        with quiet():
            model = skeleton(self.config)
            self.anatomy: Anatomy = anatomy_of(model, half_layers=self.half_layers)
            if self.adapters is not None:
                inject(model, self.adapters)
            blocks = blocks_of(model, self.anatomy)
            self.kinds, self._names = [block.kind for block in blocks], [block.name for block in blocks]
        num_bytes = sum(parameter.numel() for parameter in model.parameters()) * self.dtype.itemsize
        self._others = torch.zeros(min(num_bytes, MOST_BYTES_BETWEEN), dtype=torch.uint8, device=self.device)

    @cached_property
    def embedding(self) -> ItemProfile:
        """The first item. What it puts out is the input of the others."""
        vocab_size = self.config.get_text_config().vocab_size
        shape = (self.micro_batch_size, self.sequence_length)
        ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        stage = self.stage(Cut(0, 0, True, False))
        kind = type(self.anatomy.trunk_of(stage.model).get_submodule(self.anatomy.embedding)).__name__
        return self._less_trunk(self._measure("embedding", kind, stage, ids))

    @cached_property
    def stream(self) -> Tensor:
        """Hidden states ``[B, S, H]`` as the embedding makes them, of a spread that layers are used to."""
        stage = self.stage(Cut(0, 0, True, False))
        ids = torch.zeros(self.micro_batch_size, self.sequence_length, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            like, _ = stage(ids, None, None)
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(self.device, like.dtype)

    @cached_property
    def trunk(self) -> ItemProfile:
        """Overhead of a stage that has no item at all."""
        stage = self.stage(Cut(0, 0, False, False))
        # Some decoders ask their first parameter for their dtype.
        unused = torch.nn.Parameter(torch.zeros((), dtype=self.dtype, device=self.device))
        self.anatomy.trunk_of(stage.model).register_parameter("unused", unused)
        # The shortest: noise only adds, and what is added here would be missing in every layer.
        return self._measure("trunk", "", stage, self.stream, typical=min)

    @cached_property
    def head(self) -> ItemProfile:
        """The last item: final norm, head and loss."""
        count = self.anatomy.num_blocks
        return self._less_trunk(self._measure("head", "Head", self.stage(Cut(count, count, False, True)), self.stream))

    def layer(self, index: int) -> ItemProfile:
        """One decoder layer, or a half of one; only the first of a kind is run."""
        kind = self.kinds[index]
        if kind not in self._measured:
            stage = self.stage(Cut(index, index + 1, False, False))
            found = self._less_trunk(self._measure("", kind, stage, self.stream))
            if self.gradient_checkpointing:  # autograd does not see that the layer's input stays, once
                is_first = index % self.anatomy.blocks_per_layer == 0
                found = replace(found, saved_bytes=is_first * self.stream.numel() * self.stream.element_size())
            self._measured[kind] = found
        return replace(self._measured[kind], name=self._names[index])

    def stage(self, cut: Cut) -> CausalLMStage:
        """Load a cut of the model onto the device, with random weights."""
        stage = load_stage(None, self.config, cut, dtype=self.dtype, allow_empty=True, half_layers=self.half_layers)
        if self.adapters is not None:
            inject(stage.model, self.adapters)
            cast(stage.model, self.dtype)
        stage = stage.to(self.device).train()
        if self.gradient_checkpointing:
            recompute_layers(stage.model)
        if self.compiled is not None:
            self.compiled(self.anatomy.layers_of(stage.model))
        return stage

    def _less_trunk(self, item: ItemProfile) -> ItemProfile:
        return replace(
            item,
            forward_s=max(item.forward_s - self.trunk.forward_s, 0.0),
            backward_s=max(item.backward_s - self.trunk.backward_s, 0.0),
            saved_bytes=max(item.saved_bytes - self.trunk.saved_bytes, 0),
        )

    def _measure(
        self,
        name: str,
        kind: str,
        stage: CausalLMStage,
        stream: Tensor,
        typical: Callable[[Sequence[float]], float] = median,
    ) -> ItemProfile:
        for _ in range(WARM_UPS):
            self.backward(*self._forward(stage, stream))
        with SavedBytes(stage, self.device) as saved:
            outputs = self._forward(stage, stream)
        output_bytes = 0 if stage.cut.last else outputs[0].numel() * outputs[0].element_size()
        forward_s, backward_s = self.times(stage, stream, [self.backward], typical)
        count = sum(parameter.numel() for parameter in stage.parameters())
        return ItemProfile(name, kind, forward_s, backward_s, max(saved.num_bytes, 0), output_bytes, count)

    def times(
        self,
        stage: CausalLMStage,
        stream: Tensor,
        parts: Sequence[Callable[..., object]],
        typical: Callable[[Sequence[float]], float] = median,
    ) -> list[float]:
        """Seconds of a forward and of each of the ``parts`` of its backward, which are given what it puts out."""
        clock = Clock(self.device)
        moments: list[list[Any]] = []
        for _ in range(self.repeats):
            found: list[Any] = []
            outputs: tuple[Tensor | None, ...] = ()
            for part in (None, *parts):
                self._pass_others()
                found.append(clock.now())
                if part is None:
                    outputs = self._forward(stage, stream)
                else:
                    part(*outputs)
                found.append(clock.now())
            moments.append(found)
        columns = zip(*(zip(found[::2], found[1::2], strict=True) for found in moments), strict=True)
        return [typical([_seconds(*span) for span in column]) for column in columns]

    def _pass_others(self) -> None:
        """Have as many bytes pass through the caches as the other layers have, which run in between."""
        self._others.add_(1)

    def _forward(self, stage: CausalLMStage, stream: Tensor) -> tuple[Tensor, Tensor | None]:
        """The roots of a backward: output, or loss, and the experts' sums."""
        stream = stream.detach()
        if stream.is_floating_point():
            stream.requires_grad_()
        output, routing = stage(stream, None, None)
        if not stage.cut.last:
            return output, routing
        labels = torch.zeros(output.shape[:2], dtype=torch.int64, device=self.device)
        return stage.loss(output, labels, routing, float(labels.numel())), None

    def backward(self, *outputs: Tensor | None) -> None:
        """Run the backward of what a forward has put out."""
        roots = [tensor for tensor in outputs if tensor is not None and tensor.requires_grad]
        if roots:  # an embedding that is frozen has none
            torch.autograd.backward(roots, [self._gradient_like(tensor) for tensor in roots])

    def _gradient_like(self, tensor: Tensor) -> Tensor:
        """Random, as in training: what is multiplied decides on a device's power, and so on its clock.

        Drawn once, in the first warm-up, and not while anything is timed.
        """
        key = tensor.shape, tensor.dtype
        if key not in self._gradients:
            drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
            self._gradients[key] = drawn.to(self.device, tensor.dtype)
        return self._gradients[key]


def _seconds(start: Any, end: Any) -> float:
    """Seconds between two moments of :meth:`paceline.measure.clock.Clock.now`."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
