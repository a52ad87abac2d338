"""A profile: what each item of a model costs, how fast and how large the devices are, and how fast their links.

A value and a JSON file, so that a run can be planned from what another one, or ``paceline profile``, has measured.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib import metadata
from inspect import Parameter, signature
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..json_values import known_keys, read_json
from ..planning.workload import NOTHING_BESIDE, StageTimes
from .device_memory import room_bytes

FORMAT = 1
"""Of the file. Another one is refused."""

MOST = 1e60
"""Of any number in the file; sums and products of such numbers stay numbers."""

FILE_NAME = "profile.json"
"""In a run's output directory: what was measured for its partition, for further runs."""


@dataclass(frozen=True)
class ItemProfile:
    """What one item (embedding, a decoder layer, head with loss) does with a micro-batch.

    Args:
        kind: items of one kind cost the same; the name of the layer's class, with more where that is not enough.
        forward_s: on a device of speed 1.
        backward_s: likewise; with gradient checkpointing the forward once more is in it.
        saved_bytes: kept from the forward to the backward, its input among it and its output not.
        output_bytes: of the activation that it passes on; 0 for the head.
    """

    name: str
    kind: str
    forward_s: float
    backward_s: float
    saved_bytes: int
    output_bytes: int
    num_parameters: int


@dataclass(frozen=True)
class DeviceProfile:
    """One device.

    Args:
        speed: relative to the device on which the items were measured.
        memory_bytes: that it has.
        free_bytes: that a run may still take.
    """

    name: str
    speed: float
    memory_bytes: int
    free_bytes: int


def device_profile(device: torch.device, num_ranks: int = 1) -> DeviceProfile:
    """What is to be known of a device of this machine without using it; its speed is 1.

    Args:
        num_ranks: that share it, and its memory.
    """
    host = socket.gethostname()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = f"{host} {device} {properties.name}", properties.total_memory
    else:
        import psutil

        name, memory_bytes = f"{host} {device}", psutil.virtual_memory().total
    return DeviceProfile(name, 1.0, memory_bytes // num_ranks, room_bytes(device, num_ranks))


@dataclass(frozen=True)
class Profile:
    """What was measured, and of what.

    Args:
        model: the sizes that matter (:func:`paceline.hf.layer_profile.fingerprint`).
        dtype: of the weights, as torch names it (``"bfloat16"``).
        micro_batch_size: samples.
        sequence_length: tokens of a sample.
        items: in the model's order.
        devices: one, or one a stage.
        links: bytes per second between neighbouring devices, one fewer than devices; infinite (in the file: null) where
            they are on one host, empty if unknown.
        versions: of the packages that were at work.
        stage: times of a stage beside those of its items.

    Raises:
        ValueError: numbers that cannot be.
    """

    model: Mapping[str, Any]
    dtype: str
    micro_batch_size: int
    sequence_length: int
    gradient_checkpointing: bool
    items: tuple[ItemProfile, ...]
    devices: tuple[DeviceProfile, ...]
    links: tuple[float, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    stage: StageTimes = NOTHING_BESIDE

    def __post_init__(self) -> None:
        if not getattr(getattr(torch, self.dtype, None), "is_floating_point", False):
            raise ValueError(f"dtype is {self.dtype!r}: give one of torch's, such as float32 or bfloat16.")
        for name in ("micro_batch_size", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a whole number from 1 upwards.")
        for name, least in (("items", 3), ("devices", 1)):
            if len(getattr(self, name)) < least:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries: it needs at least {least}.")
        if self.links and len(self.links) != len(self.devices) - 1:
            raise ValueError(
                f"links has {len(self.links)} values for {len(self.devices)} devices: give {len(self.devices) - 1}, "
                "one between each two neighbours, or none."
            )
        for index, rate in enumerate(self.links):
            if not rate > 0:
                raise ValueError(f"links[{index}] is {rate}: give bytes per second, above 0.")
        for index, device in enumerate(self.devices):
            if not device.speed > 0:
                raise ValueError(f"devices[{index}].speed is {device.speed}: give a number above 0.")
            _from_zero(f"devices[{index}]", device)
        for index, item in enumerate(self.items):
            _from_zero(f"items[{index}]", item)
        for name, value in self.stage._asdict().items():
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"stage.{name} is {value}: give a number from 0 upwards.")
        if not (self.stage.split_factor and self.stage.weight_share <= 1):
            raise ValueError(
                f"stage has split_factor {self.stage.split_factor} and weight_share {self.stage.weight_share}: give one"
                " above 0, and one from 0 to 1."
            )
        if not any(item.forward_s + item.backward_s for item in self.items[1:-1]):
            raise ValueError("items has no layer that takes any time: nothing can be balanced by it; measure anew.")

    def save(self, path: str | Path) -> None:
        """Write the file, complete or not at all.

        Raises:
            ValueError: it cannot be written; one line with the file, why and the remedy.
        """
        path = Path(path)
        draft = path.with_name(f"{path.name}.draft")
        links = [rate if isfinite(rate) else None for rate in self.links]
        stage = self.stage._asdict()
        text = json.dumps({"format": FORMAT, **asdict(self), "links": links, "stage": stage}, indent=1)
        try:
            draft.write_text(text + "\n", encoding="utf-8")
            os.replace(draft, path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise ValueError(
                f"profile {path} cannot be written: {error.strerror}; give a path in a directory that exists, with "
                "room and the right to write."
            ) from None

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """The profile that :meth:`save` has written.

        Raises:
            ValueError: no such file, or not a profile of this format; one line with the file, the key, the rule and
                the remedy.
        """
        remedy = "make one with `paceline profile`"
        values = read_json(path, remedy, label=f"profile {path}")
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            found = values.get("format") if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"profile {path}: its format is {found!r} and must be {FORMAT}; {remedy} of this version.")
        del values["format"]
        try:
            return _build(cls, values, "")
        except ValueError as error:
            raise ValueError(f"profile {path}: {error}") from None

    def check_model(
        self, model: Mapping[str, Any], path: str | Path | None = None, *, num_items: int | None = None
    ) -> None:
        """Is it of the model with this fingerprint?

        Args:
            path: of its file, for the error.
            num_items: of the model; None: not looked at.

        Raises:
            ValueError: it is of another model, or of whole decoder layers where halves are asked for, or the reverse.
        """
        subject = "the profile" if path is None else f"profile {path}"
        for name in sorted({*model, *self.model}):
            if model.get(name) != self.model.get(name):
                raise ValueError(
                    f"{subject} is of another model: its {name} is {self.model.get(name)!r} and this model's is "
                    f"{model.get(name)!r}; make one of this model with `paceline profile`."
                )
        if num_items is not None and len(self.items) != num_items:
            raise ValueError(
                f"{subject}: it has {len(self.items)} items, and the model {num_items} (embedding, layers, head); make "
                "one of this model with `paceline profile`, with --half-layers where layers are cut in two."
            )

    def check_fits(
        self,
        model: Mapping[str, Any],
        dtype: str,
        *,
        micro_batch_size: int,
        sequence_length: int,
        gradient_checkpointing: bool = False,
        num_items: int | None = None,
        path: str | Path | None = None,
    ) -> list[str]:
        """Is the profile good for this use? Returns warnings: what differs without making it useless, a line each.

        Args:
            num_items: of the model; None: not looked at.
            path: of its file, for the error.

        Raises:
            ValueError: it is of another model, or of whole decoder layers where halves are asked for, or the reverse.
        """
        self.check_model(model, path, num_items=num_items)
        asked = {
            "dtype": dtype,
            "micro_batch_size": micro_batch_size,
            "sequence_length": sequence_length,
            "gradient_checkpointing": gradient_checkpointing,
        }
        return [
            f"the profile was measured with {name} {getattr(self, name)} and the run has {value}: all work is taken to "
            "scale alike; make another profile to be exact."
            for name, value in asked.items()
            if getattr(self, name) != value
        ]

    def scaled(self, micro_batch_size: int, sequence_length: int) -> Profile:
        """The same with seconds and bytes in proportion to the tokens of a micro-batch."""
        share = micro_batch_size * sequence_length / (self.micro_batch_size * self.sequence_length)
        items = tuple(
            replace(
                item,
                forward_s=item.forward_s * share,
                backward_s=item.backward_s * share,
                saved_bytes=round(item.saved_bytes * share),
                output_bytes=round(item.output_bytes * share),
            )
            for item in self.items
        )
        stage = self.stage.times(share)
        found = replace(self, items=items, stage=stage)
        return replace(found, micro_batch_size=micro_batch_size, sequence_length=sequence_length)


_TYPES: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
_PARTS: dict[str, Any] = {part.__name__: part for part in (ItemProfile, DeviceProfile, StageTimes)}


def _build(cls: Any, values: Any, where: str) -> Any:
    """A dataclass from a JSON object, whose keys are its fields."""
    if not isinstance(values, dict):
        raise ValueError(f"{where.rstrip('.')} is {values!r}: give an object {{...}}.")
    typed = {f.name: f.type for f in fields(cls)} if is_dataclass(cls) else dict.fromkeys(cls._fields, "float")
    needed = [name for name, given in signature(cls).parameters.items() if given.default is Parameter.empty]
    known = {name: str(kind) for name, kind in typed.items()}
    known_keys(where.rstrip(".") or "a profile", values, known)
    for key in needed:
        if key not in values:
            raise ValueError(f'"{where}{key}" is missing; make the profile anew with `paceline profile`.')
    return cls(**{key: _value(f"{where}{key}", known[key], value) for key, value in values.items()})


def _value(path: str, kind: str, value: Any) -> Any:
    if kind.startswith("tuple"):
        if not isinstance(value, list):
            raise ValueError(f"{path} is {value!r}: give a list.")
        inner = kind.removeprefix("tuple[").partition(",")[0]
        return tuple(_value(f"{path}[{index}]", inner, entry) for index, entry in enumerate(value))
    if kind in _PARTS:
        return _build(_PARTS[kind], value, f"{path}.")
    if kind.startswith("Mapping"):
        if not isinstance(value, dict):
            raise ValueError(f"{path} is {value!r}: give an object {{...}}.")
        return value
    if value is None and path.startswith("links["):
        return inf
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
        names = {"str": "a string", "int": "a whole number", "float": "a number", "bool": "true or false"}
        raise ValueError(f"{path} is {value!r}: give {names[kind]}.")
    if kind in ("int", "float") and not abs(value) <= MOST:
        raise ValueError(f"{path} is too large to be computed with: give at most {MOST:g}, or measure anew.")
    return float(value) if kind == "float" else value


def _from_zero(label: str, entry: ItemProfile | DeviceProfile) -> None:
    for name, value in asdict(entry).items():
        if not isinstance(value, str) and not (isfinite(value) and value >= 0):
            raise ValueError(f"{label}.{name} is {value}: give a number from 0 upwards.")


def versions() -> dict[str, str]:
    """Of the packages that decide how fast a model is here."""
    # Found on PYTHONPATH, this package has no metadata.
    return {"paceline": __version__, **{name: metadata.version(name) for name in ("torch", "transformers")}}


def kinds_of(items: Sequence[ItemProfile]) -> dict[str, list[ItemProfile]]:
    """Items by kind, in the order in which the kinds first come."""
    found: dict[str, list[ItemProfile]] = {}
    for item in items:
        found.setdefault(item.kind, []).append(item)
    return found
