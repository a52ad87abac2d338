"""Bytes that a model's items keep for the backward, counted on the meta device: no memory, no device, little time.

The forward runs on tensors without contents. Where it asks one for a value, the answer is that of an ordinary batch
(nothing is padded, nothing is packed), and attention keeps what a fused kernel keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..measure.flops import NUM_EXPERTS, experts_of_token, first_of
from ..planning.memory import ItemMemory
from ..planning.recomputation import recomputed
from .anatomy import Anatomy, anatomy_of
from .cross_entropy import working_bytes
from .layer_blocks import Block, blocks_of
from .once import once_a_config
from .quiet_transformers import quiet
from .stage import CausalLMStage, Cut, num_tied, prune
from .weights import causal_config, skeleton

EXPERTS = "experts"
"""Name of the module that has a layer's routed experts."""
_MOST = {"micro_batch_size": 2**20, "sequence_length": 2**24}
"""Largest size; beyond, the sizes of tensors overflow."""


def check_shape(config: PretrainedConfig, micro_batch_size: int, sequence_length: int) -> None:
    """Raises ValueError for sizes below 1 or beyond measure, and for sequences longer than the model's positions."""
    for name, value in (("micro_batch_size", micro_batch_size), ("sequence_length", sequence_length)):
        if value < 1:
            raise ValueError(f"{name} is {value}: give a whole number from 1 upwards.")
        if value > _MOST[name]:
            raise ValueError(f"{name} is {value}, too large to count with: give at most {_MOST[name]}.")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        raise ValueError(
            f"sequence_length is {sequence_length} and the model has {positions} positions: give at most {positions}."
        )


def count_items(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    micro_batch_size: int,
    sequence_length: int,
    gradient_checkpointing: bool = False,
    half_layers: bool = False,
) -> list[ItemMemory]:
    """Memory of each item for one micro-batch: embedding, decoder layers (or their halves) in order, head with loss.

    The same as autograd saves on a real device with a fused attention kernel. What the trunk makes for all of its
    layers (masks, rotary tables) is counted with each.

    Raises:
        ValueError: sizes that the model cannot have, a model that cannot be cut, or one whose forward depends on
            values in another way.
    """
    config = causal_config(config)
    check_shape(config, micro_batch_size, sequence_length)
    return list(
        _counted(
            config,
            dtype=dtype,
            micro_batch_size=micro_batch_size,
            sequence_length=sequence_length,
            gradient_checkpointing=gradient_checkpointing,
            half_layers=half_layers,
        )
    )


@once_a_config
def _counted(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    micro_batch_size: int,
    sequence_length: int,
    gradient_checkpointing: bool,
    half_layers: bool,
) -> tuple[ItemMemory, ...]:
    with quiet():
        model = skeleton(config)
        anatomy = anatomy_of(model, half_layers=half_layers)
        blocks = blocks_of(model, anatomy)
    count = len(blocks)
    ids = torch.zeros(micro_batch_size, sequence_length, dtype=torch.int64, device="meta")
    parameters, saved, stream, _ = _run(config, half_layers, Cut(0, 0, True, False), dtype, ids)
    items = [ItemMemory("embedding", parameters, saved, _bytes(stream))]
    measured: dict[str, tuple[int, int, float, float]] = {}
    for index, block in enumerate(blocks):
        if block.kind not in measured:
            cut = Cut(index, index + 1, False, False)
            parameters, saved, _, factors = _run(config, half_layers, cut, dtype, stream)
            measured[block.kind] = parameters, saved, factors, min(_routed_bytes(block, config, dtype, ids), saved)
        parameters, saved, factors, routed = measured[block.kind]
        is_second = bool(index % anatomy.blocks_per_layer)
        items.append(
            ItemMemory(
                *(block.name, parameters, saved, _bytes(stream)),
                is_second=is_second,
                factor_bytes=factors,
                routed_bytes=routed,
            )
        )
    parameters, saved, logits, _ = _run(config, half_layers, Cut(count, count, False, True), dtype, stream)
    working = working_bytes(model.loss_function, logits)
    items.append(ItemMemory("head", parameters, saved, 0, working, tied_parameters=num_tied(model, anatomy)))
    return tuple(recomputed(items) if gradient_checkpointing else items)


def _run(
    config: PretrainedConfig, half_layers: bool, cut: Cut, dtype: torch.dtype, stream: Tensor
) -> tuple[int, int, Tensor, float]:
    """Parameters, saved bytes, output (of the head: the logits), and bytes of the factors of the stage ``cut``."""
    with quiet():
        model = skeleton(config)
        anatomy: Anatomy = anatomy_of(model, half_layers=half_layers)
        prune(model, anatomy, cut)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        stage = CausalLMStage(model, cut, anatomy).train()
        counter = SavedStorages(stage)
        if stream.is_floating_point():
            stream = stream.detach().requires_grad_()
        try:
            with OrdinaryBatch(), FusedAttention(), counter.hooks:
                output, routing = stage(stream, None, None)
                if cut.last:
                    labels = torch.zeros(stream.shape[:2], dtype=torch.int64, device="meta")
                    stage.loss(output, labels, routing, float(labels.numel()))
        except (TypeError, ZeroDivisionError, IndexError, AttributeError) as error:
            raise ValueError(
                f"model type {config.model_type!r} cannot compute with this config ({type(error).__name__}: "
                f"{(str(error).splitlines() or [''])[0]}); give one that fits together."
            ) from error
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"model type {config.model_type!r}: what it keeps for the backward cannot be counted without running "
                f"it ({str(error).splitlines()[0]}); measure it with `paceline profile`."
            ) from error
    count = sum(p.numel() for p in stage.parameters())
    return count, counter.num_bytes, output.detach(), _factor_bytes(model, stream.shape[0] * stream.shape[1])


def _routed_bytes(block: Block, config: PretrainedConfig, dtype: torch.dtype, ids: Tensor) -> float:
    """Bytes that routed experts keep for the backward: each row's input, product and output."""
    text: Any = config.get_text_config()
    experts = block.num_routed
    rows = ids.numel() * experts_of_token(text) if experts else 0
    # A weight of H x F has F outputs a row for H inputs: the elements kept are about weights / H.
    return rows * (text.hidden_size + experts / first_of(text, NUM_EXPERTS) / text.hidden_size) * dtype.itemsize


def _factor_bytes(model: PreTrainedModel, tokens: int) -> float:
    """:func:`factor_bytes` of all products of a model, which the gradients of its weights are made of."""
    text: Any = model.config.get_text_config()
    rows = tokens * experts_of_token(text)
    found: list[tuple[float, Tensor]] = []
    for path, module in model.named_modules():
        is_expert = EXPERTS in path.split(".")
        for parameter in module.parameters(recurse=False):
            if is_expert and parameter.dim() == 3:
                found.append((rows, parameter))
            elif parameter.dim() == 2 and isinstance(module, (nn.Linear, Conv1D)):
                found.append((rows / first_of(text, NUM_EXPERTS) if is_expert else tokens, parameter))
    return factor_bytes(found)


def factor_bytes(products: Iterable[tuple[float, Tensor]]) -> float:
    """Bytes of the rows that go into products and come out of them.

    Args:
        products: rows and weights of each: [D_out, D_in], or transposed, or a stack of these.
    """
    return sum(rows * sum(weight.shape[-2:]) * weight.itemsize for rows, weight in products)


class SavedStorages:
    """Counts what autograd saves inside ``hooks``: bytes, each storage once, without parameters. For any device."""

    def __init__(self, module: nn.Module) -> None:
        self.num_bytes = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._seen = {parameter.untyped_storage()._cdata: parameter for parameter in module.parameters()}

    def _pack(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata  # without contents there is no address of them
        if key not in self._seen:
            self._seen[key] = tensor.detach()  # type: ignore[assignment]  # or the next one might get its place
            self.num_bytes += tensor.untyped_storage().nbytes()
        return tensor


class OrdinaryBatch(TorchDispatchMode):
    """Answers the forward's questions about values: yes, or one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype is torch.bool else 1
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta and (args[0].dim(), args[1].dim()) == (2, 3):
            return args[0].new_empty(len(args[0]), args[1].shape[-1])  # torch has it for meta tensors in bf16 only
        return func(*args, **(kwargs or {}))


class FusedAttention(TorchFunctionMode):
    """``scaled_dot_product_attention`` that keeps what a fused kernel does; meta tensors alone go the long way, as do
    keys that heads share by broadcast, which fused kernels do not take (on CPUs torch's does, from 2.14 on)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and (
            args[0].shape[1] == args[1].shape[1] or kwargs.get("enable_gqa")
        ):
            return _Fused.apply(*args[:3], args[3] if len(args) > 3 else kwargs.get("attn_mask"))
        return func(*args, **kwargs)


class _Fused(torch.autograd.Function):
    """Queries, keys and values ``[B, heads, S, size]``; a mask is added to the scores, in their dtype."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, size = query.shape
        if value.shape[-1] == size:  # it lies in memory as the queries do, and the layer may have to copy it
            output = torch.empty_like(query)
        else:
            output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        saved = [query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32)]
        if mask is not None:
            saved.append(query.new_empty(mask.shape) if mask.dtype is torch.bool else mask)
        ctx.save_for_backward(*saved)
        return output


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
