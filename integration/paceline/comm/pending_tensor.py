"""A tensor whose value is still under way between ranks, and is waited for when somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class LaterTensor(Tensor):
    """A number that ``fetch`` brings; whatever is done with it fetches it first, and gives ordinary tensors.

    So a loop that does not look at each loss does not bring the ranks together at each step. A few functions of torch
    take a tensor for a number without asking it (``torch.tensor(loss)``, ``alpha=loss``): before anything else has
    looked they see nan. ``loss.item()`` and ``float(loss)`` ask.
    """

    _fetch: Callable[[], Tensor] | None

    @staticmethod
    def of(fetch: Callable[[], Tensor], dtype: torch.dtype) -> LaterTensor:
        with torch._C.DisableTorchFunctionSubclass():
            later = torch.full((), torch.nan, dtype=dtype).as_subclass(LaterTensor)
        later._fetch = fetch
        return later

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(_arrived, (args, kwargs or {}))
        return function(*args, **kwargs)


def _arrived(value: Any) -> Any:
    if not isinstance(value, LaterTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.as_subclass(Tensor)
        if value._fetch is not None:
            plain.copy_(value._fetch())
            value._fetch = None
    return plain
