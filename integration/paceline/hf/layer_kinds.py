"""Which decoder layers of a model are alike, so that one of each kind tells what all cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .anatomy import Anatomy


def layer_kinds(model: PreTrainedModel, anatomy: Anatomy) -> list[str]:
    """The kind of each decoder layer: its class, with its type or a number where one class is used in several ways.

    Alike are layers whose modules have the same classes, shapes and plain attributes (window, number of experts), and
    the same entry in the config's ``layer_types``. The model may be on the meta device.
    """
    layers = list(anatomy.layers_of(model))
    types = getattr(model.config.get_text_config(), "layer_types", None)
    types = list(types) if types is not None and len(types) == len(layers) else [None] * len(layers)
    settings = [_settings(layer) for layer in layers]
    counted = _counted(settings)
    keys = [
        (kind, _shapes(layer), tuple((name, value) for name, value in own if name not in counted))
        for layer, kind, own in zip(layers, types, settings, strict=True)
    ]
    first = {key: layer for layer, key in zip(reversed(layers), reversed(keys), strict=True)}
    ways = Counter(type(layer).__name__ for layer in first.values())
    names: dict[Any, str] = {}
    used: Counter[str] = Counter()
    for key in dict.fromkeys(keys):
        name = type(first[key]).__name__
        if ways[name] > 1 and key[0] is not None:
            name = f"{name} {key[0]}"
        used[name] += 1
        names[key] = name if used[name] == 1 else f"{name} {used[name]}"
    return [names[key] for key in keys]


def _shapes(layer: nn.Module) -> tuple[Any, ...]:
    parameters = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return (*((name, type(module).__qualname__) for name, module in layer.named_modules()), *parameters)


def _settings(layer: nn.Module) -> list[tuple[str, Any]]:
    """Plain attributes of all modules; not numbers with a fraction, which change no cost."""
    return [
        (f"{path}.{name}", value)
        for path, module in layer.named_modules()
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and (value is None or isinstance(value, (bool, int, str)))
    ]


def _counted(settings: list[list[tuple[str, Any]]]) -> set[str]:
    """Attributes that number the layers, whatever they are called."""
    offsets: dict[str, list[int | None]] = {}
    for index, own in enumerate(settings):
        for name, value in own:
            is_number = isinstance(value, int) and not isinstance(value, bool)
            offsets.setdefault(name, []).append(value - index if is_number else None)
    return {name for name, found in offsets.items() if len(found) > 1 and None not in found and len(set(found)) == 1}
