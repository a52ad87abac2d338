"""A tensor whose value is still under way between ranks, and is waited for when somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class LaterTensor(Tensor):
    """``value`` once ``wait`` has returned; whatever is done with it waits first, and gives ordinary tensors.

    So a loop that does not look at each loss does not bring the ranks together at each step.
    """

    _wait: Callable[[], Any] | None

    @staticmethod
    def of(value: Tensor, wait: Callable[[], Any]) -> LaterTensor:
        with torch._C.DisableTorchFunctionSubclass():
            later = value.as_subclass(LaterTensor)
        later._wait = wait
        return later

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def arrived(value: Any) -> Any:
            if not isinstance(value, LaterTensor):
                return value
            wait, value._wait = value._wait, None
            if wait is not None:
                wait()
            with torch._C.DisableTorchFunctionSubclass():
                return value.as_subclass(Tensor)

        args, kwargs = pytree.tree_map(arrived, (args, kwargs or {}))
        return function(*args, **kwargs)
