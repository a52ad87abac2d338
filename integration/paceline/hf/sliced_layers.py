"""Decoder layers whose weights lie in slices on several ranks: tensor parallelism, as transformers' plans have it.

A family's config says how each linear layer is cut (``base_model_tp_plan``). A rank keeps its slice of the weight, and
sums or gathers with the others of its group what would otherwise be a part only. Between layers every rank has the
whole hidden states, so that what is not cut (norms, embedding, head) computes the same on all of them. Layers keep
transformers' own modules: what passes between ranks passes in hooks.

Source: Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from .anatomy import Anatomy, UnsupportedModelError
from .sliced_head import check_head

KEY = "tensor_parallel.autotp_size"
REMEDY = f"leave {KEY} out, or take another model"
NOT_EXACT = {
    **dict.fromkeys(("apertus", "apertus1p5_text"), "the activation of its MLP has weights, which see slices of it"),
    "doge": "its attention adds a mask of all heads",
}
"""Model types for which transformers' plan does not give what whole layers compute, and why."""

COLUMNS, COLUMNS_GATHERED = "colwise", "colwise_gather_output"
ROWS, ROWS_OF_WHOLE = "rowwise", "rowwise_split_input"
SUMMED = "replicated_with_grad_allreduce"
STYLES = (COLUMNS, COLUMNS_GATHERED, ROWS, ROWS_OF_WHOLE, SUMMED)
"""Styles of transformers' that are known here. With the first two a rank has some outputs of a linear layer, with the
next two some inputs; the last is a module that is whole on every rank, and sees some heads only."""

SLICE = "paceline_slice"
"""Mark on a parameter of which this rank has a slice: which one (:class:`SliceOf`)."""

PARTIAL = "paceline_has_partial_gradients"
"""Mark on a whole parameter whose gradients are to be summed over the ranks that have it."""


class SliceOf(NamedTuple):
    """Slice number ``rank`` of ``size`` of a tensor that is cut in its dimension ``dim``."""

    rank: int
    size: int
    dim: int


class Slicing(NamedTuple):
    """The slice of a stage that this rank has.

    Args:
        rank: number of the slice.
        size: how many there are.
        group: ranks with the slices of this stage, in order; None: nothing is to run.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None


def _plan_of(model: PreTrainedModel, anatomy: Anatomy) -> dict[str, str]:
    """As :func:`plan_of_slices`, for any size."""
    config = model.config.get_text_config()
    start = f"{anatomy.layers}.*."
    written: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {name.removeprefix(start): style for name, style in written.items() if name.startswith(start)}
    reason = NOT_EXACT.get(model.config.model_type, "")
    if not {COLUMNS, COLUMNS_GATHERED} & set(plan.values()):
        reason = f"transformers has no plan for it (base_model_tp_plan of {type(config).__name__})"
    for index, layer in enumerate(anatomy.layers_of(model)):
        for name, module in layer.named_modules():
            style = _style(plan, name)
            if style is None:
                continue
            if style not in STYLES:
                reason = f"its layers.{index}.{name} is cut as {style!r}, and linear layers can be cut"
            elif style != SUMMED and not _is_linear(module):
                kind = f"{type(module).__module__}.{type(module).__name__}"
                reason = (
                    f"its layers.{index}.{name} is a {kind}, and a torch.nn.Linear can be cut, or one with plain LoRA"
                )
            owner = name.rpartition(".")[0]
            for own, _ in layer.get_submodule(owner).named_parameters(recurse=False):
                reason = f"its layers.{index}.{owner} has {own!r}, which the plan does not cut"
    if reason:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model type {model.config.model_type!r}) cannot have its layers in slices: "
            f"{reason}; {REMEDY}."
        )
    return plan


def plan_of_slices(model: PreTrainedModel, anatomy: Anatomy, size: int) -> dict[str, str]:
    """How the modules of a decoder layer are cut into ``size`` equal slices of whole heads.

    Returns:
        Styles by patterns of names within the layer.

    Raises:
        UnsupportedModelError: transformers has no plan for the model, or one with more than linear layers.
        ValueError: the size does not fit.
    """
    plan = _plan_of(model, anatomy)
    for layer in anatomy.layers_of(model):
        for name, module in layer.named_modules():
            style = _style(plan, name)
            if style in (None, SUMMED):
                continue
            owner, linear = layer.get_submodule(name.rpartition(".")[0]), _base_of(module)
            of_columns = style in (COLUMNS, COLUMNS_GATHERED)
            features = linear.out_features if of_columns else linear.in_features
            unit = int(getattr(owner, "head_dim", 1)) if style in (COLUMNS, ROWS) else 1
            if features % unit:
                unit = 1
            if features // unit % size:
                what = "outputs" if of_columns else "inputs"
                what = f"{features} {what}" if unit == 1 else f"{features // unit} heads"
                raise ValueError(
                    f"{KEY} is {size}: it must divide the {what} of {name} in {type(model).__name__}; choose a divisor."
                )
    for key in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(model.config.get_text_config(), key, None)
        if isinstance(count, int) and count % size:  # of heads whose widths differ
            raise ValueError(f"{KEY} is {size}: it must divide {key}, which is {count}; choose a divisor.")
    return plan


def _base_of(module: nn.Module) -> nn.Linear:
    """The linear layer itself, or that inside of an adapter."""
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Linear)
    return base


def _is_linear(module: Any) -> bool:
    """Whether a module is a linear layer, or one that PEFT's LoRA stands around as it comes."""
    if type(module) is nn.Linear:
        return True
    is_lora = type(module).__module__ == "peft.tuners.lora.layer" and type(module).__name__ == "Linear"
    if not is_lora or type(module.base_layer) is not nn.Linear:
        return False
    return not (module.lora_variant or any(module.lora_bias.values()) or module.fan_in_fan_out)


def _style(plan: Mapping[str, str], name: str) -> str | None:
    """Style of a module within a decoder layer; None: it is whole."""
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def slice_layer(layer: nn.Module, plan: Mapping[str, str], slicing: Slicing) -> None:
    """Keep of a decoder layer, in place, what this rank has of it. Works on meta and on real weights."""
    shared: dict[str, _Inputs] = {}
    for name, module in list(layer.named_modules()):
        style = _style(plan, name)
        if style == SUMMED:
            for parameter in module.parameters():
                setattr(parameter, PARTIAL, True)
        elif style in (COLUMNS, COLUMNS_GATHERED):
            owner = name.rpartition(".")[0]
            if owner not in shared:
                shared[owner] = _Inputs(layer.get_submodule(owner), slicing.group)
            _keep_outputs(module, slicing, shared[owner], gathers=style == COLUMNS_GATHERED)
        elif style is not None:
            _keep_inputs(module, slicing, splits=style == ROWS_OF_WHOLE)


def shares_head(model: PreTrainedModel, anatomy: Anatomy, size: int) -> bool:
    """Whether each of ``size`` ranks has as many rows of the head of ``model``, whose weight is not the embedding's."""
    head = model.get_output_embeddings()
    embedding = f"{anatomy.trunk}.{anatomy.embedding}.weight"
    if embedding in {name for pair in (model.all_tied_weights_keys or {}).items() for name in pair}:
        return False
    try:
        check_head(model, replace(anatomy, head_slices=size))
    except UnsupportedModelError:
        return False
    return len(head.weight) % size == 0


def slice_head(head: nn.Module, slicing: Slicing) -> None:
    """Keep this rank's rows of a head, in place; its outputs are the logits of these."""
    _keep_outputs(head, slicing, _Inputs(head, slicing.group), gathers=False)


def _keep_outputs(module: nn.Module, slicing: Slicing, inputs: _Inputs, *, gathers: bool) -> None:
    base = _base_of(module)
    for linear in (base, *_adapters(module, "lora_B")):
        linear.out_features //= slicing.size
        _keep(linear, "weight", 0, slicing)
    if base.bias is not None:
        _keep(base, "bias", 0, slicing)
    for linear in _adapters(module, "lora_A"):
        setattr(linear.weight, PARTIAL, True)
    module.register_forward_pre_hook(inputs.enter)
    if gathers:
        module.register_forward_hook(partial(_gather_output, slicing.group))


def _keep_inputs(module: nn.Module, slicing: Slicing, *, splits: bool) -> None:
    base = _base_of(module)
    for linear in (base, *_adapters(module, "lora_A")):
        linear.in_features //= slicing.size
        _keep(linear, "weight", 1, slicing)
    if base.bias is not None:
        base.__class__ = _WithoutBias
    for linear in _adapters(module, "lora_B"):
        setattr(linear.weight, PARTIAL, True)
    if splits:
        module.register_forward_pre_hook(partial(_split_input, slicing.group))
    module.register_forward_hook(partial(_sum_output, slicing.group))


def _adapters(module: nn.Module, name: str) -> list[nn.Linear]:
    """The linear layers that LoRA has under this name beside the one that it stands around."""
    return [part for part in getattr(module, name, {}).values() if isinstance(part, nn.Linear)]


def _keep(module: nn.Module, leaf: str, dim: int, slicing: Slicing) -> None:
    whole = module.get_parameter(leaf)
    own = whole.detach().chunk(slicing.size, dim)[slicing.rank]
    kept = nn.Parameter(own.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)
    vars(kept).update(vars(whole))
    setattr(kept, SLICE, SliceOf(slicing.rank, slicing.size, dim))
    kept.model_parallel = True  # type: ignore[attr-defined]  # DeepSpeed's mark: it counts in norms on every rank
    setattr(module, leaf, kept)


class _WithoutBias(nn.Linear):
    """A linear layer whose outputs are sums over ranks: the bias is added once, to the sum."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)


class _Inputs:
    """Inputs of linear layers of which each rank has some outputs: their gradients are sums over the ranks.

    Layers of one module that get the same tensor have one sum together.
    """

    def __init__(self, owner: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._last: tuple[Tensor, Tensor] | None = None
        owner.register_forward_hook(self._forget, always_call=True)

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._last is None or self._last[0] is not args[0]:
            self._last = args[0], _Copied.apply(args[0], self._group)
        return (self._last[1], *args[1:])

    def _forget(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._last = None


def _sum_output(group: dist.ProcessGroup | None, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    summed: Tensor = _Summed.apply(output, group)
    base = _base_of(module)
    return summed + base.bias if isinstance(base, _WithoutBias) else summed


def _gather_output(group: dist.ProcessGroup | None, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    assert group is not None
    return gathered(output, group)


def _split_input(group: dist.ProcessGroup | None, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_Split.apply(args[0], group), *args[1:])


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)  # autograd may have given it to others too
    dist.all_reduce(total, group=group)
    return total


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Slices of the last dimension, put together; of what comes back, each rank takes its own."""
    whole: Tensor = _Gathered.apply(tensor, group)
    return whole


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Slices of the last dimension, put together."""
    own = tensor.contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, dim=-1)


def _own(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


class _Copied(torch.autograd.Function):
    """The tensor itself; what comes back is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _summed(dy, ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum over ranks; what comes back is everyone's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Gathered(torch.autograd.Function):
    """The whole of the ranks' slices; of what comes back, each takes its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _own(dy, ctx.group), None


class _Split(torch.autograd.Function):
    """This rank's slice of a whole; what comes back is put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _gathered(dy, ctx.group), None
