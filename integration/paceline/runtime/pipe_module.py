"""Any :class:`deepspeed.pipe.PipelineModule` with the partition methods that DeepSpeed lacks."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import module as stock
from torch import nn

from ..config.section import HETERO, WORK, Method, check_method
from ..measure.probe import device_speed
from ..measure.profile_file import Profile
from ..planning.partition_methods import by_work, checked_boundaries, weights_by_class
from ..schedules.directions import chunks_of

logger = logging.getLogger("paceline")


class PipelineModule(stock.PipelineModule):
    """As :class:`deepspeed.pipe.PipelineModule`, with further values of ``partition_method``.

    Args:
        partition_method: every value of DeepSpeed's; or

            * boundaries over the layers, ``[0, 5, 9, 12]`` for three stages;
            * weights by regular expressions over the layers' class names, ``{"Block": 1, "Head": 3}``: the first that
              matches counts, none: 0; the heaviest stage becomes as light as can be;
            * ``"hetero"``: what a layer takes by the speed of its stage's device. A layer takes what its profile says,
              or as much as it has parameters; how fast devices are the profile says, or a short matrix product does.
        routes: one route, the device of each stage, where a device has several of them, as ``"interleaved"``,
            ``"dualpipev"``, ``"zbv"`` and the other schedules of several stages a device need it; see
            :func:`~paceline.schedules.families.chunked_route`.
        partition_profile: a file of ``paceline profile`` for ``"hetero"``, of as many items as there are layers. Its
            devices count if there are as many as stages.

    Raises:
        ValueError: the method, or the profile, does not fit the layers and stages.

    Example::

        model = paceline.PipelineModule(layers, num_stages=4, loss_fn=loss, partition_method="hetero")
        engine, *_ = paceline.initialize(model=model, config="ds.json")
    """

    def __init__(
        self,
        *args: object,
        partition_profile: str | Path | None = None,
        routes: Sequence[Sequence[int]] | None = None,
        **kwargs: object,
    ) -> None:
        self.partition_profile = partition_profile
        self._routes = None if routes is None else tuple(map(tuple, routes))
        super().__init__(*args, **kwargs)

    @property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """Device of each stage."""
        return (tuple(range(self.num_stages)),) if self._routes is None else self._routes

    def _build(self) -> None:
        for stage in held_stages(self):
            self._set_bounds(self.parts[stage], self.parts[stage + 1])
            super()._build()  # adds to what is there
        _set_parts(self, self.parts)

    def stage_owner(self, layer_idx: int) -> int:
        """The device that has a layer, by its number along the pipeline."""
        (route,) = self.routes
        return next(d for d, *ends in zip(route, self.parts, self.parts[1:], strict=False) if layer_idx in range(*ends))

    def chunk(self, number: int) -> stock.PipelineModule:
        """One of the stages that this rank holds: a module that shares everything with this one but its bounds."""
        held = held_stages(self)
        if len(held) == 1:
            return self
        sizes = [self.parts[stage + 1] - self.parts[stage] for stage in held]
        first = sum(sizes[:number])
        found = copy.copy(self)
        found.forward_funcs = self.forward_funcs[first : first + sizes[number]]
        found._set_bounds(self.parts[held[number]], self.parts[held[number] + 1])
        found.is_checkpointable_results_interval = None
        found._precompute_checkpointable_values()
        return found

    def _partition_layers(self, method: Method = "uniform") -> None:
        if self.partition_profile is None and not is_ours(method) and self._routes is None:
            super()._partition_layers(method)
            # numpy's integers, which random.seed refuses: with seed_layers DeepSpeed's own module fails here.
            _set_parts(self, self.parts)
        else:
            partition_layers(self, method, self.partition_profile)


def routes_of(module: stock.PipelineModule) -> tuple[tuple[int, ...], ...]:
    """Device of each stage, one route a direction."""
    found: tuple[tuple[int, ...], ...] | None = getattr(module, "routes", None)
    return (tuple(range(module.num_stages)),) if found is None else found


def held_stages(module: stock.PipelineModule) -> tuple[int, ...]:
    """The stage of each chunk that this rank holds."""
    return tuple(stage for _, stage in chunks_of(module.stage_id, routes_of(module)))


def taking_our_methods(
    original: Callable[[stock.PipelineModule, Method], None],
) -> Callable[[stock.PipelineModule, Method], None]:
    """``PipelineModule._partition_layers`` that takes boundaries, weights by class and ``"hetero"`` too.

    See :class:`PipelineModule`, which takes them without a patch.
    """

    def _partition_layers(self: stock.PipelineModule, method: Method = "uniform") -> None:
        if is_ours(method):
            partition_layers(self, method)
        else:
            original(self, method)

    return _partition_layers


def is_ours(method: object) -> bool:
    """Whether DeepSpeed lacks this partition method."""
    return not isinstance(method, str) or method.lower() in (HETERO, WORK)


def partition_layers(module: stock.PipelineModule, method: Method, profile: str | Path | None = None) -> None:
    """``PipelineModule._partition_layers`` for a method of ours; as :func:`boundaries_for`."""
    _set_parts(module, boundaries_for(module, method, profile))
    if module.global_rank == 0:
        logger.info("the partition %s cuts the %d layers at %s", method, module._num_layers, module.parts)


def boundaries_for(module: stock.PipelineModule, method: Method, profile: str | Path | None = None) -> list[int]:
    """Boundaries over the layers of a pipeline module for any partition method, DeepSpeed's own included.

    The module stays as it is. With ``"hetero"`` all ranks must call it.

    Args:
        module: of any class but :class:`~paceline.runtime.module.CausalLMPipeline`, whose layers are items.
        profile: path of a profile file, for ``"hetero"``.

    Raises:
        ValueError: the method, or the profile, does not fit the layers and stages.
    """
    layers, stages = module._layer_specs, len(routes_of(module)[0])
    if profile is not None and not (isinstance(method, str) and method.lower() == HETERO):
        raise ValueError(
            f"partition_profile is {str(profile)!r} and partition_method is {method!r}: a profile belongs to 'hetero'; "
            "drop it, or write 'hetero'."
        )
    if isinstance(method, str) and not is_ours(method):
        return _stock_boundaries(module, method)
    if isinstance(method, str) and method.lower() == WORK:
        raise ValueError(
            f"partition_method is {method!r}: only the layers of Hugging Face models tell their operations; choose "
            "'parameters' or 'uniform', give weights by class name, or 'hetero' with a profile."
        )
    if isinstance(method, str):
        return by_work(*_work_and_speeds(module, profile))
    if isinstance(method, (list, tuple)):
        return checked_boundaries(method, len(layers), stages)
    try:
        check_method(method)
    except ValueError as error:
        raise ValueError(f"partition_method is {method!r}: {error}.") from None
    return by_work(weights_by_class(method, [_class_name(layer) for layer in layers]), [1.0] * stages)


def _set_parts(module: stock.PipelineModule, boundaries: Sequence[int]) -> None:
    module.parts = [int(part) for part in boundaries]
    first = held_stages(module)[0]
    module._set_bounds(module.parts[first], module.parts[first + 1])


def _stock_boundaries(module: stock.PipelineModule, method: str) -> list[int]:
    """What DeepSpeed's own code sets, on a copy that shares everything but its bounds."""
    scratch = copy.copy(module)
    scratch.num_stages = len(routes_of(module)[0])
    with contextlib.redirect_stdout(io.StringIO()):
        stock.PipelineModule._partition_layers(scratch, method)
    return [int(part) for part in scratch.parts]


def _work_and_speeds(module: stock.PipelineModule, path: str | Path | None) -> tuple[list[float], list[float]]:
    layers, stages, route = module._layer_specs, module.num_stages, routes_of(module)[0]
    if path is None:
        speeds = _stage_speeds(module)
        return [_num_parameters(layer) for layer in layers], [speeds[device] for device in route]
    profile = _read_profile(path)
    if len(profile.items) != len(layers):
        raise ValueError(
            f"the profile {path} has {len(profile.items)} items and the pipeline {len(layers)} layers: give the "
            "profile of these layers, or none."
        )
    work = [item.forward_s + item.backward_s for item in profile.items]
    devices = [device.speed for device in profile.devices]
    speeds = devices if len(devices) == stages else _stage_speeds(module)
    return work, [speeds[device] for device in route]


def _read_profile(path: str | Path) -> Profile:
    """As the first rank reads it: on all ranks the same, or the same error. Collective."""
    told: list[Profile | str] = [""]
    if dist.get_rank() == 0:
        try:
            told = [Profile.load(path)]
        except ValueError as error:
            told = [str(error)]
    torch.distributed.broadcast_object_list(told, src=0, device=torch.device(get_accelerator().current_device_name()))
    if isinstance(told[0], str):
        raise ValueError(told[0])
    return told[0]


def _stage_speeds(module: stock.PipelineModule) -> list[float]:
    """How fast the device of each stage is; of replicas of a stage the slowest counts. Collective."""
    device = torch.device(get_accelerator().device_name(module.local_rank))
    speeds = torch.zeros(module.world_size, device=device)
    dist.barrier()  # who shares a machine with others shares it as in training
    speeds[module.global_rank] = device_speed(device)
    dist.all_reduce(speeds)
    of_stage: dict[int, list[float]] = {}
    for rank, speed in enumerate(speeds.tolist()):
        of_stage.setdefault(module._topo.get_coord(rank).pipe, []).append(speed)
    return [min(of_stage[stage]) for stage in range(module.num_stages)]


def _num_parameters(layer: object) -> float:
    if isinstance(layer, stock.LayerSpec):
        with torch.random.fork_rng(devices=[]):  # the layers that are kept draw what they would have drawn
            layer = layer.build()
    return float(sum(p.numel() for p in layer.parameters())) if isinstance(layer, nn.Module) else 0.0


def _class_name(layer: object) -> str:
    """What DeepSpeed's ``type:`` looks at; empty for a callable without a name."""
    if isinstance(layer, stock.LayerSpec):
        return str(layer.typename.__name__)
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")
