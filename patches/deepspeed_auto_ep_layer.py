"""``deepspeed/module_inject/auto_ep_layer.py``: the way back from an AutoEP layer to the block that it replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.patches.registry import BY_REPAIR, Patch

if TYPE_CHECKING:
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

_SOURCE = "_paceline_source"


def remember_source(original: Callable[..., None]) -> Callable[..., None]:
    """``AutoEPMoELayer.__init__`` that keeps what the way back needs: the spec, and shapes by name, no tensor."""

    def __init__(self: AutoEPMoELayer, spec: Any, source_module: Any, *args: Any, **kwargs: Any) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in source_module.state_dict().items()}
        original(self, spec, source_module, *args, **kwargs)
        setattr(self, _SOURCE, (spec, shapes))

    return __init__


def source_state_dict(layer: Any, experts: tuple[Any, Any, Any]) -> dict[str, Any]:
    """What the block that ``layer`` replaced would have as its state dict; the inverse of ``repack_expert_weights``.

    Args:
        layer: an ``AutoEPMoELayer``.
        experts: w1 (gate) ``[experts, ffn, hidden]``, w2 (down) ``[experts, hidden, ffn]`` and w3 (up)
            ``[experts, ffn, hidden]`` of all experts, in their order in the model.

    Raises:
        NotImplementedError: the names or shapes are not those of the block.
    """
    import torch

    spec, shapes = getattr(layer, _SOURCE)
    state = _router_state(layer, spec, shapes)
    for name, module in (
        (spec.shared_experts_name, layer.shared_experts),
        (spec.shared_experts_gate_name, layer.shared_experts_gate),
    ):
        if module is not None:
            state |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}

    w1, w2, w3 = experts
    names = (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name)
    if spec.expert_storage == "fused_3d":
        tensors = [w1, w2, w3]
        if spec.expert_w3_name is None:
            w1 = torch.cat([w1, w3], dim=1)
            hidden_first = shapes[f"{spec.experts_name}.{names[0]}"] != tuple(w1.shape)
            tensors = [w1.transpose(1, 2), w2.transpose(1, 2)] if hidden_first else [w1, w2]
        state |= {f"{spec.experts_name}.{name}": t for name, t in zip(names, tensors, strict=False)}
    else:
        if spec.expert_w3_name is None:
            w1 = torch.cat([w1, w3], dim=1)
        for expert in range(spec.num_experts):
            for name, weight in zip(names, (w1, w2, w3), strict=True):
                if name is not None:
                    prefix = f"{spec.experts_name}.{expert}.{name}"
                    state[prefix if prefix in shapes else f"{prefix}.weight"] = weight[expert]

    state = {name: tensor.contiguous() for name, tensor in state.items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if found != shapes:
        wrong = sorted(set(found.items()) ^ set(shapes.items()))
        raise NotImplementedError(f"the weights of an AutoEP layer of {spec.model_family} cannot be named: {wrong}")
    return state


def _router_state(layer: Any, spec: Any, shapes: dict[str, Any]) -> dict[str, Any]:
    gate = layer.router.gate
    state = {f"{spec.router_name}.weight": gate.weight.detach()}
    if getattr(gate, "bias", None) is not None:
        state[f"{spec.router_name}.bias"] = gate.bias.detach()
    for bias in spec.unsupported_router_bias_names:  # AutoEP takes a model only if they are zero
        if (name := f"{spec.router_name}.{bias}") in shapes:
            state[name] = gate.weight.new_zeros(shapes[name])
    path = spec.router_name if spec.e_score_correction_bias_path is None else spec.e_score_correction_bias_path
    name = f"{path}.e_score_correction_bias".removeprefix(".")
    if name in shapes:
        state[name] = layer.router.e_score_correction_bias.detach()
    return state


def gathered_state_dict(model: Any, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
    """The state dict that ``model`` would have without AutoEP. All ranks must call it.

    Layer by layer, the ranks of the expert-parallel group that rank 0 is in send it their experts.

    Args:
        model: one whose parameters outside experts are whole on every rank (below ZeRO-3, no tensor parallelism).
        exclude_frozen_parameters: leave out parameters that are not trained.

    Returns:
        On the CPU of rank 0; None on other ranks, as ``_zero3_consolidated_16bit_state_dict``.

    Raises:
        RuntimeError: on every rank, if AutoEP was set up before the patch was there.
    """
    from deepspeed import comm as dist
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)}
    for name, layer in layers.items():
        if not hasattr(layer, _SOURCE):
            raise RuntimeError(
                f"{name} was made by AutoEP without a record of what it replaced: call paceline.repair_deepspeed() "
                "before deepspeed.initialize"
            )
    is_first = dist.get_rank() == 0
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad} if exclude_frozen_parameters else ()
    state: dict[str, Any] = {}
    if is_first:
        inside = tuple(f"{name}." for name in layers)
        dense = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inside)}
        state = {name: tensor for name, tensor in dense.items() if name not in frozen}
        state = clone_tensors_for_torch_save(state)
    for name, layer in layers.items():
        experts = tuple(_gather_experts(layer, getattr(layer.experts, w).detach()) for w in ("w1", "w2", "w3"))
        if is_first:
            block = source_state_dict(layer, experts)
            state |= {f"{name}.{key}": tensor.detach().cpu() for key, tensor in block.items()}
    return state if is_first else None


def _gather_experts(layer: Any, local: Any) -> Any:
    """``[experts, …]`` in their order in the model on rank 0, from the ranks' ``[local experts, …]``."""
    import torch
    from deepspeed import comm as dist
    from deepspeed.checkpoint.autoep_affine import autoep_experts_for_rank

    placement = [autoep_experts_for_rank(layer.expert_placement_descriptor, rank) for rank in range(layer.ep_size)]
    parts = [local]
    if layer.ep_size > 1:
        if 0 not in dist.get_all_ranks_from_group(layer.ep_group):
            return None
        if torch.distributed.get_backend(layer.ep_group) == "gloo":
            local = local.cpu()  # gloo sends nothing from a GPU
        if dist.get_rank() != 0:
            dist.send(local.contiguous(), 0, group=layer.ep_group)
            return None
        parts = [local.new_empty(len(experts), *local.shape[1:]) for experts in placement]
        parts[layer.ep_rank] = local
        for rank, part in enumerate(parts):
            if rank != layer.ep_rank:
                dist.recv(part, dist.get_global_rank(layer.ep_group, rank), group=layer.ep_group)
    whole = torch.empty(layer.num_experts, *local.shape[1:], dtype=local.dtype)
    for experts, part in zip(placement, parts, strict=True):
        whole[experts] = part.cpu()
    return whole


REMEMBER_SOURCE = Patch(
    target="deepspeed.module_inject.auto_ep_layer:AutoEPMoELayer.__init__",
    make=remember_source,
    requires="deepspeed>=0.19.8,<0.20",
    reason="an AutoEP layer does not keep the names and the layout of the weights that it replaces",
    removable_when="AutoEP layers know how to name their weights as the model that they came from",
    watches="deepspeed.module_inject.auto_ep_layer:AutoEPMoELayer.__init__",
    fingerprint="10cb1af357c8",
    applied_by=BY_REPAIR,
)

PATCHES = (REMEMBER_SOURCE,)
