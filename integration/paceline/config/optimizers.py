"""``"optimizer"`` of a DeepSpeed JSON; torch is imported only for a name that is not listed here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..messages import nearest
from .section import show, value_at

DEEPSPEEDS = ("Adagrad", "Adam", "AdamW", "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD", "Muon")
"""Names that DeepSpeed knows, whatever their case; a test compares them with the installed DeepSpeed."""

ELEMENTWISE = frozenset(
    ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Classes of ``torch.optim`` that treat each element by itself, so that rows of a parameter can be stepped apart."""

_ELEMENTWISE_OF_DEEPSPEED = frozenset(
    ("DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion")
)


def class_name(optimizer: object) -> str:
    """Name of an optimizer's class, behind that of its package if that is neither torch nor DeepSpeed.

    Others have classes of the same names, such as bitsandbytes an AdamW, whose states are numbers of whole blocks.
    """
    package = type(optimizer).__module__.partition(".")[0]
    name = type(optimizer).__name__
    return name if package in ("torch", "deepspeed") else f"{package}.{name}"


def is_elementwise(optimizer: object) -> bool:
    """Whether an optimizer, of torch or DeepSpeed, treats each element of a parameter by itself."""
    return class_name(optimizer) in ELEMENTWISE | _ELEMENTWISE_OF_DEEPSPEED


def is_elementwise_name(name: str) -> bool:
    """Whether the optimizer of this name in a DeepSpeed JSON is elementwise, as far as the name tells."""
    return name.lower() in {each.lower() for each in (*ELEMENTWISE, "Lion")}


REFUSED = {
    "LBFGS": "it evaluates the loss again and again within a step",
    "Muon": "it is for matrices only; pass initialize an optimizer of your own that joins it with another",
    "SparseAdam": "it is for sparse gradients, which pipelines do not have",
}


def check_optimizer(config: Mapping[str, Any]) -> None:
    """Raise ValueError if ``optimizer.type`` of a DeepSpeed JSON cannot train a pipeline, whatever its case."""
    name = value_at(config, "optimizer.type")
    for refused, why in REFUSED.items():
        if str(name).lower() == refused.lower():
            raise ValueError(
                f"optimizer.type is {name}: a pipeline cannot use it, {why}; choose one of "
                f"{', '.join(sorted(ELEMENTWISE))}."
            )


def check_optimizer_values(ds_config: Mapping[str, Any]) -> None:
    """Check the optimizer's name, its learning rate and the clipping, with pipelines or without.

    Raises:
        ValueError: there is no such optimizer, or a value is no number that training can use.
    """
    name = value_at(ds_config, "optimizer.type")
    if isinstance(name, str) and name not in ELEMENTWISE and name.lower() not in map(str.lower, DEEPSPEEDS):
        _check_in_torch(name)
    for path in ("optimizer.params.lr", "gradient_clipping"):
        value = value_at(ds_config, path)
        if value is None or value == "auto":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{path} is {show(value)}: it must be a number; write one, without quotes.")
        if not 0 <= value < math.inf:
            raise ValueError(f"{path} is {show(value)}: it must be at least 0 and finite; correct it.")
    if ds_config.get("gradient_clipping", 0) is None:
        raise ValueError("gradient_clipping is null: it must be a number; write one, or leave it out.")


def _check_in_torch(name: str) -> None:
    from torch import optim

    classes = [
        key
        for key, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, optim.Optimizer) and value is not optim.Optimizer
    ]
    if name in classes:
        return
    known = {key.lower(): key for key in (*DEEPSPEEDS, *classes)}
    near = known.get(nearest(name.lower(), known) or "")
    remedy = f'did you mean "{near}"?' if near else f"choose one of {', '.join(sorted(ELEMENTWISE))}."
    raise ValueError(f"optimizer.type is {show(name)}: neither DeepSpeed nor torch.optim has it; {remedy}")
