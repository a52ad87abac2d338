"""The partition that a run begins with where devices differ: measured, or from a profile, and the same on all ranks.

Stages are outermost: rank = stage * data-parallel size + replica. A stage is as fast as its slowest replica, and has as
much memory as the one with least.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import PretrainedConfig

from ..comm.control import ControlPlane
from ..comm.staging import ranks_sharing, staging_for
from ..config import ScheduleChoice
from ..hf.activations import count_items
from ..hf.anatomy import anatomy_of
from ..hf.layer_blocks import blocks_of
from ..hf.layer_profile import Bench, CompileLayers, fingerprint, profile_items
from ..hf.quiet_transformers import quiet
from ..hf.weights import causal_config, skeleton
from ..measure.flops import TOP_K, first_of
from ..measure.host_names import host_name
from ..measure.profile_file import DeviceProfile, ItemProfile, Profile, device_profile, versions
from ..moe.hf_experts import experts_of, share_of
from ..planning.blocks import Device
from ..planning.expert_spread import UNKNOWN_LOADS, expected_imbalance, most_imbalance
from ..planning.memory import ItemMemory, States
from ..planning.recomputed_stages import RecomputedStages, fastest_stages
from ..planning.stages import StagePlan
from ..schedules.schedule import Schedule
from ..schedules.stream import Stream
from .early_room import PLANNED, keeps_what_has_room

logger = logging.getLogger("paceline")

PROBE_BYTES = 4 << 20
SMALL_BYTES = 1 << 10
PROBES = 3
"""Large messages within a host, of which the fastest counts: they take a millisecond, and so does being interrupted."""

ALIKE = 0.05
"""Devices whose speeds differ by less (relatively) are one kind: so much two measurements of one device differ."""

WORTH_TELLING = 0.1
"""What another order of the devices would have to gain."""


class Shape(NamedTuple):
    """What a micro-batch is made of."""

    dtype: torch.dtype
    micro_batch_size: int
    sequence_length: int
    gradient_checkpointing: bool = False
    half_layers: bool = False


class _Look(NamedTuple):
    """What a rank knows of its own device; ``seconds`` of what all ranks measure, None if nothing is."""

    device: DeviceProfile
    host: str
    seconds: float | None


def hetero_boundaries(
    config: PretrainedConfig,
    control: ControlPlane,
    shape: Shape,
    *,
    num_stages: int,
    micro_batches: int,
    schedule: ScheduleChoice,
    states: States,
    expert_parallel: int = 1,
    num_copies: int = 0,
    profile: str | Path | None = None,
    memory_bytes: int | None = None,
    may_recompute: bool = False,
    compiled: CompileLayers | None = None,
) -> tuple[list[int], Profile, tuple[int, ...]]:
    """Boundaries over items under which a step is predicted to be shortest, what was measured for it, and the items
    that are recomputed.

    With gradient checkpointing, layers whose activations have room count as they are: they are kept. Every rank
    measures the items on its own device, without the rest of the model. With a profile nothing is measured
    that is in it: the speeds are if it has as many devices as there are stages, otherwise one layer is timed on every
    device; so are the links. Collective over all ranks, and the same result on all.

    Args:
        micro_batches: of a step and pipeline.
        schedule: what the run begins with decides how many micro-batches are alive.
        states: how optimizer states are kept (:meth:`States.from_config`).
        expert_parallel: replicas that share experts. A layer is measured with all of them.
        num_copies: slots of a rank for copies of experts, in each layer.
        profile: path of a profile file.
        memory_bytes: of each device that may be counted on; None: what is free.
        may_recompute: activations of layers may be computed again where stages do not fit otherwise, or are faster so
            than with other boundaries.
        compiled: has the layers compiled that are measured.

    Raises:
        ValueError: on every rank: no such profile, one of another model, or a model that fits in no way.
    """
    device = torch.device(get_accelerator().device_name(int(os.environ.get("LOCAL_RANK", "0"))))
    is_first = dist.get_rank() == 0
    items: list[ItemProfile] = []
    given: Profile | None = None
    with control.together("reading the profile"):
        if profile is not None and is_first:  # one rank reads: files of a name may differ between hosts
            given = _load(profile, config, shape, tell=is_first)
    given = control.from_first(given)
    if is_first:
        logger.info("partition: %s", "measuring the layers on every device" if given is None else f"from {profile}")
    with control.together("measuring the layers"):
        look = _Look(device_profile(device, ranks_sharing(device)), host_name(), None)
        if given is None:
            items = profile_items(config, device=device, compiled=compiled, **shape._asdict())
            look = look._replace(seconds=sum(item.forward_s + item.backward_s for item in items))
        elif len(given.devices) != num_stages:
            look = look._replace(seconds=_probe(config, device, given, half_layers=shape.half_layers))
    looks: list[_Look] = control.gather(look)
    with control.together("planning the partition"):
        if given is not None:
            given = given.scaled(shape.micro_batch_size, shape.sequence_length)
            items = list(given.items)
        devices = _devices(looks, num_stages, given)
    links = given.links if given is not None and len(given.devices) == num_stages else ()
    links = links or link_rates(control, [look.host for look in looks], num_stages, device)
    found: tuple[list[int], Profile, tuple[int, ...]] | None = None
    with control.together("planning the partition"):
        if is_first:
            measured = Profile(
                model=fingerprint(config),
                dtype=str(shape.dtype).removeprefix("torch."),
                micro_batch_size=shape.micro_batch_size,
                sequence_length=shape.sequence_length,
                gradient_checkpointing=shape.gradient_checkpointing,
                items=tuple(items),
                devices=tuple(devices),
                links=tuple(links),
                versions=versions(),
            )
            if given is not None:  # its layers as they were measured, in whichever dtype
                measured = replace(given, devices=measured.devices, links=measured.links)
            limited = [Device(own.speed, memory_bytes or own.free_bytes) for own in devices]
            order, owners = schedule.planned(num_stages, micro_batches), schedule.optimizer_owners
            had, has = measured.gradient_checkpointing, shape.gradient_checkpointing
            is_alike = had == has and measured.dtype == str(shape.dtype).removeprefix("torch.")
            kept: StagePlan | None = None
            if has and expert_parallel == 1 and keeps_what_has_room(schedule):
                once = seconds_of(items, measured=had, runs=False)
                kept = kept_stages(config, shape, once, limited, states, order, links, owners=owners)
            if kept is not None:
                plan, again = RecomputedStages(kept, ())
            else:
                plan, again = fastest_stages(
                    _memory(config, shape, items, expert_parallel, num_copies, is_alike=is_alike),
                    seconds_of(items, measured=had, runs=has),
                    *(limited, states, order, links),
                    owners=owners,
                    may_recompute=may_recompute,
                )
            _tell(plan, measured, "rank 0's" if given is None else "that of the profile")
            found = list(plan.boundaries), measured, again
    result = control.from_first(found)
    assert result is not None, "the first rank has found it"
    return result


def _load(path: str | Path, config: PretrainedConfig, shape: Shape, *, tell: bool) -> Profile:
    given = Profile.load(path)
    with quiet():
        anatomy = anatomy_of(skeleton(causal_config(config)), half_layers=shape.half_layers)
    lines = given.check_fits(
        fingerprint(config),
        str(shape.dtype).removeprefix("torch."),
        micro_batch_size=shape.micro_batch_size,
        sequence_length=shape.sequence_length,
        gradient_checkpointing=shape.gradient_checkpointing,
        num_items=anatomy.num_blocks + 2,
        path=path,
    )
    for line in lines:
        if tell:
            logger.warning("%s: %s", path, line)
    return given


def _probe(config: PretrainedConfig, device: torch.device, given: Profile, *, half_layers: bool) -> float:
    """Seconds of the profile's dearest layer on this device, divided by those in the profile."""
    index = max(range(1, len(given.items) - 1), key=lambda i: given.items[i].forward_s + given.items[i].backward_s)
    bench = Bench(
        config,
        getattr(torch, given.dtype),
        device,
        given.micro_batch_size,
        given.sequence_length,
        given.gradient_checkpointing,
        half_layers,
    )
    here, there = bench.layer(index - 1), given.items[index]
    return (here.forward_s + here.backward_s) / (there.forward_s + there.backward_s)


def _devices(looks: Sequence[_Look], num_stages: int, given: Profile | None) -> list[DeviceProfile]:
    """One device a stage, its slowest; speeds relative to rank 0, or to where the profile was made."""
    replicas = len(looks) // num_stages
    devices: list[DeviceProfile] = []
    for stage in range(num_stages):
        own = looks[stage * replicas : (stage + 1) * replicas]
        slowest = max(own, key=lambda look: look.seconds or 0.0)
        if slowest.seconds is None:
            assert given is not None, "without a profile everything is measured"
            speed = given.devices[stage].speed
        else:
            reference = looks[0].seconds if given is None else 1.0
            assert reference is not None, "all ranks measure, or none"
            speed = reference / slowest.seconds
        devices.append(
            replace(
                slowest.device,
                speed=_alike(speed, [device.speed for device in devices]),
                memory_bytes=min(look.device.memory_bytes for look in own),
                free_bytes=min(look.device.free_bytes for look in own),
            )
        )
    return devices


def _alike(speed: float, known: Sequence[float]) -> float:
    """The speed of a device that is known already, if this one is within the noise of it."""
    return next((other for other in (1.0, *known) if abs(speed / other - 1) < ALIKE), speed)


def link_rates(
    control: ControlPlane, hosts: Sequence[str], num_stages: int, device: torch.device | None = None
) -> tuple[float, ...]:
    """Bytes a second between neighbouring stages, timed with a message each, or where that is short with several.

    The slowest replica counts. Stages take turns, so that none sends and receives at once. Messages go as activations
    do: over the backend of ``device``, or, where that takes host memory only, over the control plane. Collective.

    Args:
        hosts: of each rank.
        device: of this rank's tensors; None: the CPU.
    """
    replicas = len(hosts) // num_stages
    rank = dist.get_rank()
    stage = rank // replicas
    path = _Path(control.world, torch.device("cpu"))
    if device is not None and device.type != "cpu" and staging_for(device) is None:
        path = _Path(dist.group.WORLD, device)
        dist.all_reduce(torch.zeros(1, device=device))  # of all its ranks: it makes the group's communicator
    rate = math.inf
    for turn in (0, 1):
        sends = stage % 2 == turn
        peer = rank + replicas if sends else rank - replicas
        if 0 <= peer < len(hosts):
            repeats = PROBES if hosts[peer] == hosts[rank] else 1
            path.exchange(peer, SMALL_BYTES, sends)
            small_s = path.exchange(peer, SMALL_BYTES, sends)
            large_s = min(path.exchange(peer, PROBE_BYTES, sends) for _ in range(repeats))
            if sends:
                # The small message takes the latency, and half is the least that is left of the large one.
                rate = PROBE_BYTES / max(large_s - small_s, large_s / 2)
    rates: list[float] = control.gather(rate)
    return tuple(min(rates[stage * replicas : (stage + 1) * replicas]) for stage in range(num_stages - 1))


class _Path(NamedTuple):
    """The way that messages between stages take."""

    group: dist.ProcessGroup | None
    device: torch.device

    def exchange(self, peer: int, num_bytes: int, sends: bool) -> float:
        """Seconds of a message and its acknowledgement."""
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        answer = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self._wait()
        begun = time.perf_counter()
        self._pass(message, peer, sends)
        self._pass(answer, peer, not sends)
        self._wait()
        return time.perf_counter() - begun

    def _pass(self, tensor: torch.Tensor, peer: int, sends: bool) -> None:
        # In a batch NCCL takes the group's communicator; alone it would make one for the two ranks.
        act = dist.isend if sends else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(act, tensor, peer, group=self.group)]):
            work.wait()

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _memory(
    config: PretrainedConfig,
    shape: Shape,
    items: Sequence[ItemProfile],
    expert_parallel: int,
    num_copies: int = 0,
    *,
    is_alike: bool = True,
) -> list[ItemMemory]:
    """Memory of each item as it was measured; its working memory is counted, where that can be.

    Args:
        is_alike: the run keeps as much as was measured; with another dtype or gradient checkpointing all is counted.
    """
    try:
        memories = count_items(config, **shape._asdict())
        counted = [(item.working_bytes, item.first_bytes, item.tied_parameters, item.routed_bytes) for item in memories]
    except ValueError:  # its forward depends on values; the tenth that is left of free memory is for this
        counted, is_alike = [(0.0, 0.0, 0, 0.0)] * len(items), True
    if not is_alike:
        return shared_memory(config, memories, expert_parallel, num_copies, half_layers=shape.half_layers)
    memories = [
        ItemMemory(
            *(item.name, item.num_parameters, item.saved_bytes, item.output_bytes, working),
            first_bytes=first,
            tied_parameters=tied,
            is_second=shape.half_layers and number % 2 == 0 and 0 < number < len(items) - 1,
            routed_bytes=routed,
        )
        for number, (item, (working, first, tied, routed)) in enumerate(zip(items, counted, strict=True))
    ]
    return shared_memory(config, memories, expert_parallel, num_copies, half_layers=shape.half_layers)


def _busiest(num_experts: int, num_devices: int, top_k: int) -> float:
    """Rows of the busiest device by the mean, before anybody has counted them."""
    most = most_imbalance(num_experts, num_devices, top_k)
    return min(most, expected_imbalance(num_experts, num_devices, UNKNOWN_LOADS))


def kept_stages(
    config: PretrainedConfig,
    shape: Shape,
    seconds: Sequence[tuple[float, float]],
    devices: Sequence[Device],
    states: States,
    schedule: Schedule | Stream,
    links: Sequence[float] = (),
    *,
    owners: str | None,
) -> StagePlan | None:
    """The fastest stages with gradient checkpointing, where activations that have room are kept.

    Args:
        seconds: of each item's forward and backward, if nothing is computed again.

    Returns:
        None where what layers keep cannot be counted, or nothing fits.
    """
    whole = shape._replace(gradient_checkpointing=False)
    limited = [Device(device.speed, PLANNED * device.memory_bytes) for device in devices]
    try:
        memory = count_items(config, **whole._asdict())
        plan, _ = fastest_stages(memory, seconds, limited, states, schedule, links, owners=owners, may_recompute=True)
    except ValueError:
        return None
    return plan


def seconds_of(items: Sequence[ItemProfile], *, measured: bool, runs: bool) -> list[tuple[float, float]]:
    """Seconds of each item's forward and backward.

    Args:
        measured: layers have computed their forward again in the backward.
        runs: they are to do so.
    """
    first, *layers, head = ((item.forward_s, item.backward_s) for item in items)
    return [first, *((forth, max(back + (runs - measured) * forth, 0.0)) for forth, back in layers), head]


def shared_memory(
    config: PretrainedConfig,
    items: Sequence[ItemMemory],
    expert_parallel: int,
    num_copies: int = 0,
    *,
    half_layers: bool,
) -> list[ItemMemory]:
    """Memory of the items where so many ranks share the experts of each layer, and have so many slots for copies.

    The busiest of them counts, with experts as uneven as expected.
    """
    if expert_parallel == 1:
        return list(items)
    with quiet():
        model = skeleton(causal_config(config))
    top_k = first_of(model.config.get_text_config(), TOP_K)
    found = list(items)
    for number, block in enumerate(blocks_of(model, anatomy_of(model, half_layers=half_layers)), 1):
        experts = [each for module in block.modules for each in experts_of(module).values()]
        whole = sum(p.numel() for each in experts for p in each.parameters())
        share = sum(share_of(each, expert_parallel) for each in experts)
        copied = num_copies * sum(share_of(each, each.num_experts) for each in experts)
        rows = [_busiest(each.num_experts, expert_parallel, top_k) for each in experts]
        own = found[number].with_rows(max(rows, default=1.0))
        found[number] = own._replace(elsewhere=whole - share, empty=expert_parallel * share - whole, copied=copied)
    return found


def _tell(plan: StagePlan, profile: Profile, whose: str) -> None:
    devices = profile.devices
    for number, (device, memory) in enumerate(zip(devices, plan.memory, strict=True)):
        stages = plan.held[number] if plan.held else (number,)
        speed = device.speed if plan.held else 1.0  # the costs are of a device of speed 1 where several have a stage
        spans = [(plan.boundaries[stage], plan.boundaries[stage + 1] - 1) for stage in stages]
        logger.info(
            "stage %s on %s (speed %.3g): %s, %s s a micro-batch, %.3g of %.3g GB",
            " and ".join(map(str, stages)),
            *(device.name, device.speed),
            " and ".join(f"{profile.items[first].name} to {profile.items[last].name}" for first, last in spans),
            " and ".join(f"{(plan.costs.forward_s[s] + plan.costs.backward_s[s]) / speed:.4g}" for s in stages),
            *(memory.total / 1e9, device.free_bytes / 1e9),
        )
    logger.info(
        "partition %s: a step of %.4g s is predicted, of samples of %d tokens; speed 1 is %s",
        *(list(plan.boundaries), plan.step_s, profile.sequence_length, whose),
    )
    if plan.better is not None and plan.better[1] >= WORTH_TELLING:
        order, gain = plan.better
        logger.info(
            "another order of the devices would make the slowest stage %.0f %% faster: %s",
            *(100 * gain, ", ".join(f"stage {s} where stage {d} is" for s, d in enumerate(order))),
        )
