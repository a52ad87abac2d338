"""``deepspeed/module_inject/auto_ep_presets/base.py``: reading a registry of transformers that takes models now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.patches.registry import BY_REPAIR, Patch, Use

_MISSING = object()


def restore_registry(registry: dict[str, Any], original_entries: dict[str, object]) -> None:
    """``_restore_transformers_output_capture_registry``, by name for whatever class the registry is."""
    for registry_key, original_entry in original_entries.items():
        if original_entry is _MISSING:
            registry.pop(registry_key, None)
        else:
            dict.__setitem__(registry, registry_key, original_entry)


def install_recorders(
    model: Any,
    registry_entries: dict[str, dict[str, Any]],
    output_capturing: Any,
    remove_output_capture_hooks: Callable[[Any], int],
) -> bool:
    """``_install_instance_transformers_output_recorders``, by name for whatever class the registry is.

    The registry maps names of model classes to what they can record. In transformers 5.23 its ``get`` and ``[…] =``
    take a model and make the name themselves: ``get(name, default)`` is a TypeError, and AutoEP does not start. The
    methods of ``dict`` take names in every version.
    """
    maybe_install_capturing_hooks = getattr(output_capturing, "maybe_install_capturing_hooks", None)
    registry = getattr(output_capturing, "_CAN_RECORD_REGISTRY", None)
    if not callable(maybe_install_capturing_hooks) or not isinstance(registry, dict):
        return False

    remove_output_capture_hooks(model)
    for module in model.modules():
        if hasattr(module, "_output_capturing_hooks_installed"):
            module._output_capturing_hooks_installed = False
    model._output_capturing_hooks_installed = False

    original_entries = {registry_key: dict.get(registry, registry_key, _MISSING) for registry_key in registry_entries}
    try:
        registry.update(registry_entries)
        maybe_install_capturing_hooks(model)
    finally:
        restore_registry(registry, original_entries)
    return True


_BASE = "deepspeed.module_inject.auto_ep_presets.base"

START = Patch(
    target=f"{_BASE}:_install_instance_transformers_output_recorders",
    make=Use(install_recorders),
    requires="deepspeed>=0.19.8,<0.20",
    reason="AutoEP does not start with transformers 5.23: _CanRecordRegistry.get() takes a model, not a name",
    removable_when="AutoEP reads transformers' registry of recorders by name",
    watches=f"{_BASE}:_install_instance_transformers_output_recorders",
    fingerprint="d98a60b9ea70",
    applied_by=BY_REPAIR,
)

PATCHES = (START,)
