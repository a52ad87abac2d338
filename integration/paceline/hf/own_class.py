"""Modules that are of a class of ours and of their own: with another forward, and all that they had."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


class Own:
    """Comes before the class of a module, which is then of both (:func:`become`)."""

    plain: type[nn.Module]
    """The class that the module had."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the module as it was. The engine, which attributes of ours lead to, stays out."""
        state = {name: value for name, value in vars(self).items() if name not in _OWN}
        return object.__new__, (self.plain,), state


_OWN = (
    "natural",
    "weight_name",
    "natural_hooks",
    "num_rows",
    "deferral",
    "tap",
    "compiled",
    "parts",
    "pieces",
    "_compiled_call_impl",
)
"""Attributes of ours."""


def become(module: Any, kind: Any) -> Any:
    """``module``, which is a ``kind`` from now on, and what it was."""
    if not isinstance(module, kind):
        plain: Any = module.plain if isinstance(module, Own) else type(module)
        module.__class__ = _both(kind, plain)
    return module


@cache
def _both(kind: Any, plain: Any) -> Any:
    names = ("__module__", "__qualname__", "__doc__")
    return type(plain.__name__, (kind, plain), {"plain": plain, **{name: getattr(plain, name) for name in names}})


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``, or the one that it had before it became one of ours."""
    return module.plain if isinstance(module, Own) else type(module)
