"""The optimizer's states of a checkpoint, into a run that spreads experts over another number of ranks.

DeepSpeed's files keep them by rank. Every element of them belongs to a weight of the whole model, and from there to
some rank of this run: each rank opens all files and reads what it needs.

Legend: E experts of a layer, R ranks that share them; D data-parallel ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    AUTOEP_LAYERS_KEY,
    BASE_OPTIMIZER_STATE,
    OPTIMIZER_STATE_DICT,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ..config.section import SECTION
from ..state.exchange import cover
from ..state.named import MASTER, VALUE, home_of
from .moving import states_of

PLACEMENTS, SIZES = "experts", "sizes"
"""In a checkpoint's client state, under the name of our section: of each layer the placement when it was saved, and the
number of ranks that share its experts."""

_NATIVE = re.compile(r"(?P<layer>.+)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<slot>\d+)\.(?P<weight>.+)")
_AUTOEP = re.compile(r"(?P<layer>.+)\.experts\.w[123]")


@dataclass(frozen=True)
class Spread:
    """Spread of a run's experts, in the model's order, over its D ranks.

    Args:
        sizes: R of each layer, by its name.
        num_experts: E of each layer.
        num_ranks: D.
        data_first: whether neighbouring ranks have the same experts (``use_data_before_expert_parallelism``).
    """

    sizes: Mapping[str, int]
    num_experts: Mapping[str, int]
    num_ranks: int
    data_first: bool

    @classmethod
    def of(cls, engine: Any) -> Spread:
        layers = _expert_layers(engine.module)
        return cls(
            {name: layer.ep_size for name, layer in layers.items()},
            {name: layer.num_experts for name, layer in layers.items()},
            dist.get_world_size(),
            bool(engine._config.use_data_before_expert_parallel_),
        )

    @classmethod
    def saved(cls, state: Mapping[str, Any], now: Spread) -> Spread:
        """Spread of the run that saved ``state``, the file with the weights outside experts; ``now`` where unsaid."""
        sizes = {layer["module_path"]: layer["ep_size"] for layer in state.get(AUTOEP_LAYERS_KEY) or []}
        sizes |= state.get(SECTION, {}).get(SIZES, {})
        data_first = state.get("ds_config", {}).get("use_data_before_expert_parallelism", False)
        sizes = {name: sizes.get(name, size) for name, size in now.sizes.items()}
        return cls(sizes, now.num_experts, state["dp_world_size"], data_first)

    def num_slots(self, layer: str) -> int:
        return self.num_experts[layer] // self.sizes[layer]

    def place(self, name: str, rank: int, numel: Mapping[str, int]) -> tuple[str, int]:
        """Name of a rank's parameter in the whole model, and the element of that which is its first.

        Args:
            numel: elements of one expert, of each parameter of AutoEP, which stack several.
        """
        match = _NATIVE.fullmatch(name) or _AUTOEP.fullmatch(name)
        if match is None or match["layer"] not in self.sizes:
            return name, 0
        size = self.sizes[match["layer"]]
        sharer = rank // (self.num_ranks // size) if self.data_first else rank % size
        first = sharer * self.num_slots(match["layer"])
        if match.re is _AUTOEP:
            return name, first * numel[name]
        return f"{name[: match.start('slot')]}{first + int(match['slot'])}{name[match.end('slot') :]}", 0

    def names(self, names: Sequence[str], now: Spread) -> list[str]:
        """The parameters of a group of the optimizer on a rank of this run, from those of ``now``."""
        found = []
        for layer, run in groupby(names, key=lambda name: (m := _NATIVE.fullmatch(name)) and m["layer"]):
            if layer is None or layer not in self.sizes:
                found += list(run)
                continue
            matches = [_NATIVE.fullmatch(name) for name in run]
            weights = [match["weight"] for match in matches if match and match["slot"] == "0"]
            start = f"{layer}.deepspeed_moe.experts.deepspeed_experts"
            found += [f"{start}.{slot}.{weight}" for slot in range(self.num_slots(layer)) for weight in weights]
        return found


@dataclass(frozen=True)
class Fragment:
    """Elements of a weight of the whole model from ``start`` on: flat tensors by kind (:class:`StatePart`)."""

    start: int
    kinds: Mapping[str, Tensor]


def load_states(engine: Any, checkpoint: Path, saved: Spread) -> None:
    """Give ``engine`` the optimizer's states of a checkpoint; its weights are loaded, its experts in order.

    Raises:
        ValueError: the files do not have what the engine needs.
    """
    now = Spread.of(engine)
    optimizer, rank = engine.optimizer, dist.get_rank()
    is_zero = isinstance(optimizer, DeepSpeedZeroOptimizer)
    if not is_zero and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{checkpoint} was saved with experts on other ranks, and states of {type(optimizer).__name__} cannot be "
            "spread anew: use zero_optimization.stage 1 or 2, or load with load_optimizer_states=False."
        )
    groups = optimizer.bit16_groups if is_zero else [group["params"] for group in optimizer.param_groups]
    names = [[engine.param_names[p] for p in group] for group in groups]
    numel = {
        f"{name}.experts.{weight}": getattr(layer.experts, weight)[0].numel()
        for name, layer in _expert_layers(engine.module).items()
        if isinstance(layer, AutoEPMoELayer)
        for weight in ("w1", "w2", "w3")
    }
    files = _files(checkpoint, is_zero)
    states = [_opened(file)[OPTIMIZER_STATE_DICT if is_zero else "optimizer"] for file in files]
    own = states[rank % len(states)]
    base = own[BASE_OPTIMIZER_STATE] if is_zero else own
    if len(base["param_groups"]) != len(groups):
        raise ValueError(
            f"{checkpoint} has {len(base['param_groups'])} groups of parameters, the optimizer {len(groups)}: they "
            "must be grouped alike; or load with load_optimizer_states=False."
        )

    fragments: dict[str, list[Fragment]] = defaultdict(list)
    read = _of_zero if is_zero else _of_plain
    for name, fragment in read(states, saved, [saved.names(group, now) for group in names], numel):
        fragments[name].append(fragment)

    inner = optimizer.optimizer if is_zero else optimizer
    masters = [[p] for p in optimizer.single_partition_of_fp32_groups] if is_zero else groups
    _make_states(inner, masters, base)
    if is_zero:
        optimizer._load_global_state(own)
    parts_of = states_of(engine)
    for group, group_names in zip(groups, names, strict=True):
        for parameter, name in zip(group, group_names, strict=True):
            key, first = now.place(name, rank, numel)
            for part in parts_of(parameter):
                if part.kind != VALUE:
                    _fill(part.tensor, first + part.start, part.kind, fragments[key], key)
    for group, options in zip(inner.param_groups, base["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key not in ("params", "name")})
    if is_zero:
        optimizer._link_all_hp_params()


def _expert_layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, (MoE, AutoEPMoELayer))}


def _files(checkpoint: Path, is_zero: bool) -> list[Path]:
    """Those with the optimizer's states, by rank."""
    pattern = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt" if is_zero
                         else r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt")  # fmt: skip
    found = {int(match[1]): file for file in checkpoint.iterdir() if (match := pattern.fullmatch(file.name))}
    if sorted(found) != list(range(len(found))) or not found:
        raise ValueError(
            f"{checkpoint} has the optimizer's states of ranks {sorted(found)} in files that match {pattern.pattern}: "
            "load it with the ZeRO stage that it was saved with, or with load_optimizer_states=False."
        )
    return [found[rank] for rank in sorted(found)]


def _opened(file: Path) -> dict[str, Any]:
    """Open a file whose tensors are read when they are used."""
    return torch.load(file, map_location="cpu", weights_only=False, mmap=True)


def _of_zero(
    states: Sequence[Mapping[str, Any]], saved: Spread, _: Any, numel: Mapping[str, int]
) -> Iterator[tuple[str, Fragment]]:
    """Read ZeRO's files: a rank has a run of its parameters' elements, after those of the ranks before it."""
    ends: dict[tuple[str, int], int] = {}
    for rank, state in enumerate(states):
        for number, addresses in enumerate(state[PARAM_SLICE_MAPPINGS]):
            flat = {MASTER: state[SINGLE_PARTITION_OF_FP32_GROUPS][number]}
            of_group = state[BASE_OPTIMIZER_STATE]["state"].get(number, {})
            flat |= {kind: value for kind, value in of_group.items() if _is_per_element(value)}
            for name, address in addresses.items():
                place = saved.place(name, rank, numel)
                start = ends.get(place, place[1])
                ends[place] = start + address.numel
                run = slice(address.start, address.start + address.numel)
                yield place[0], Fragment(start, {kind: tensor[run] for kind, tensor in flat.items()})


def _of_plain(
    states: Sequence[Mapping[str, Any]], saved: Spread, names: Sequence[Sequence[str]], numel: Mapping[str, int]
) -> Iterator[tuple[str, Fragment]]:
    """Read a file for each of the ranks that share the experts of the layers which most ranks share."""
    seen = set()
    for sharer, state in enumerate(states):
        rank = sharer * (saved.num_ranks // len(states)) if saved.data_first else sharer
        for number, name in enumerate(name for group in names for name in group):
            place = saved.place(name, rank, numel)
            if place not in seen:
                seen.add(place)
                of_parameter = state["state"].get(number, {})
                kinds = {kind: value.flatten() for kind, value in of_parameter.items() if _is_per_element(value)}
                yield place[0], Fragment(place[1], kinds)


def _make_states(optimizer: Any, masters: Sequence[Sequence[Tensor]], base: Mapping[str, Any]) -> None:
    """Make states like those saved, to be filled, for each master. What is not per element is as it was."""
    for options, group in zip(base["param_groups"], masters, strict=True):
        states = (base["state"].get(number, {}) for number in options["params"])
        # The one with most steps: DeepSpeed's FusedAdam counts those of a group at one of its parameters.
        saved: dict[str, Any] = max(states, key=lambda state: float(state.get("step") or 0), default={})
        for master in group:
            optimizer.state[master] = {
                kind: torch.zeros_like(master)
                if _is_per_element(value)
                else _copy(value, home_of(kind, options, master.device))
                for kind, value in saved.items()
            }


def _is_per_element(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() > 0


def _copy(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if torch.is_tensor(value) else value


def _fill(tensor: Tensor, start: int, kind: str, fragments: Sequence[Fragment], name: str) -> None:
    """Fill ``tensor [n]``, elements of a weight from ``start`` on, from what the files have of it."""
    sources = [(f.kinds[kind], f.start) for f in fragments if kind in f.kinds]
    spans = [((source, first), (first, first + source.numel())) for source, first in sources]
    found, missing = cover([(start, start + tensor.numel())], spans)
    for (source, first), low, high in found:
        tensor[low - start : high - start].copy_(source[low - first : high - first])
    if missing:
        filled = sum(high - low for _, low, high in found)
        raise ValueError(
            f"the checkpoint has {filled} of {tensor.numel()} elements of {kind} of {name} that this rank needs: it "
            "was saved by another model or is not complete."
        )
