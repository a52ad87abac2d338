"""The optimizer that a DeepSpeed JSON names, out of ``torch.optim``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..config.optimizers import ELEMENTWISE, check_optimizer

_CUDA_ONLY = frozenset(("lamb", "lion"))
"""Optimizers of DeepSpeed without kernels for CPUs (but for Lion's with ZeRO-Offload, which pipelines lack)."""

_DEEPSPEEDS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Parameters that DeepSpeed reads itself."""


def torch_class(name: str | None) -> type[torch.optim.Optimizer] | None:
    """The class of ``torch.optim`` that ``name`` means, whatever its case; None where there is none.

    Raises:
        ValueError: there is one, and it cannot train a pipeline.
    """
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    check_optimizer({"optimizer": {"type": name}})
    return classes.get(str(name).lower())


def check_deepspeeds(name: str, device: torch.device) -> None:
    """Check that DeepSpeed's own optimizer ``name`` can be made for this kind of device.

    Raises:
        ValueError: it cannot.
    """
    if device.type == "cpu" and name.lower() in _CUDA_ONLY:
        raise ValueError(
            f"optimizer.type is {name}: DeepSpeed has its kernels for GPUs only, and the ranks compute on CPUs; choose "
            f"one of {', '.join(sorted(ELEMENTWISE))}, or pass initialize a function that makes an optimizer of its "
            "argument, the stage's parameters."
        )


def make_optimizer(
    name: str, params: Iterable[Any], options: Mapping[str, Any], device: torch.device
) -> torch.optim.Optimizer:
    """``optimizer`` of a DeepSpeed JSON over ``params``.

    As in DeepSpeed, ``Adam`` decouples weight decay (AdamW's rule) unless ``adam_w_mode`` is false, and decays nothing
    unless ``weight_decay`` is given. All other defaults are those of ``torch.optim``, AdamW's weight decay of 0.01 too
    (DeepSpeed's FusedAdam has 0).

    Raises:
        ValueError: an option that the optimizer does not have, or a value that it refuses.
    """
    cls = torch_class(name)
    assert cls is not None, name
    arguments = {key: value for key, value in options.items() if key not in _DEEPSPEEDS}
    if cls is torch.optim.Adam and options.get("adam_w_mode", True):
        cls = torch.optim.AdamW
        arguments.setdefault("weight_decay", 0.0)
    if "max_grad_norm" in arguments:
        raise ValueError("optimizer.params.max_grad_norm: DeepSpeed's key is gradient_clipping; use that.")
    if device.type == "cuda" and cls in (torch.optim.Adam, torch.optim.AdamW) and "foreach" not in arguments:
        arguments.setdefault("fused", True)
    try:
        if "betas" in arguments:
            arguments["betas"] = tuple(arguments["betas"])
        return cls(params, **arguments)
    except (TypeError, ValueError, IndexError) as error:  # the last: too few betas
        raise ValueError(f"optimizer {name} with params {dict(options)}: {error}; correct optimizer.params.") from error
