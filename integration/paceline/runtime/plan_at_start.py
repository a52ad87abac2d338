"""Number of stages, schedule and partition that a JSON leaves to the run, by what this cluster is measured to do.

Layers, links and the optimizer are measured on the ranks that are to train. For each number of stages, whole or in two
chunks a rank, the step is predicted as ``paceline plan`` predicts it, and the fastest is taken. Where stages of whole
decoder layers would be far from equal, halves of layers are measured too, and where the head is more work than a stage,
it is also compared in slices.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import PretrainedConfig

from ..comm.control import ControlPlane, is_shared
from ..comm.staging import ranks_sharing
from ..config import RunPlan
from ..config.recompute_keys import FIT
from ..config.recompute_keys import PATH as RECOMPUTE
from ..config.run_plan import Choice
from ..config.section import HETERO, WORK, PartitionConfig
from ..config.stage_counts import (
    HALVES,
    PARTITION,
    PLANNED_CHUNKS,
    SLICES,
    STAGES,
    TYPE,
    as_it_starts,
    asks_for_chunks,
    asks_for_halves,
    asks_for_slices,
    has_stages,
    may_plan_halves,
    may_plan_slices,
)
from ..hf.anatomy import anatomy_of
from ..hf.check import require_halves
from ..hf.layer_profile import Bench, CompileLayers, fingerprint, profile_items
from ..hf.model_workload import Shape as WorkloadShape
from ..hf.model_workload import work_of_items, workload_of
from ..hf.peft import Adapters, trained_share, without_memory
from ..hf.weights import skeleton
from ..json_values import as_whole
from ..measure.collectives import agreed
from ..measure.profile_file import ItemProfile, Profile, device_profile
from ..planning.cluster import Cluster
from ..planning.finer_cuts import HEAD_SLICES, halves_may_gain, slices_may_gain
from ..planning.memory import States
from ..planning.stage_choice import Option, Stages, choose, scaled, slowdown, why_chosen
from ..planning.stage_pool import Entry, StagePool
from ..planning.workload import StageTimes, Workload
from ..supervise.watch import EVERYONE, WATCH
from .compiled_layers import compile_layers_of
from .early_room import keeps_what_has_room
from .hetero import Shape
from .measured_cluster import measure_cluster
from .module import check_slices
from .split_times import measure_stage

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger("paceline")

MOST_TOKENS = 4096
"""Tokens of the micro-batch that is measured, at most: a larger one takes longer, and its memory may not be free."""

UNEQUAL = 1.25
"""Seconds of the slowest rank by those of the fastest, from which on stages get layers by speed."""


class Measured(NamedTuple):
    """Measurements that planning stands on.

    Args:
        rank_s: seconds that each rank takes for a forward and backward of all layers.
        may_move: whether layers may move between devices unasked: not where adapters are trained, and weights may be
            quantised.
        trained: share of the parameters that is trained.
        halves: the profile in halves of decoder layers, where they were measured.
        sliced: stages that may share the head.
    """

    profile: Profile
    cluster: Cluster
    rank_s: tuple[float, ...]
    may_move: bool = True
    trained: float = 1.0
    halves: Profile | None = None
    sliced: frozenset[Stages] = frozenset()

    @property
    def item_s(self) -> list[float]:
        """Seconds of a micro-batch's forward and backward through each item, in whole layers."""
        return [item.forward_s + item.backward_s for item in self.profile.items]

    @property
    def is_unequal(self) -> bool:
        """Whether some devices are clearly faster than others."""
        return max(self.rank_s) > UNEQUAL * min(self.rank_s)


def measure(
    hf_config: PretrainedConfig,
    control: ControlPlane,
    shape: Shape,
    peft_config: PeftConfig | None = None,
    compiled: CompileLayers | None = None,
) -> Measured:
    """Time the layers on all ranks at once, and what connects them. Collective, and the same on all ranks.

    A large micro-batch is measured by a smaller one. Random numbers that are drawn later are as without it.

    Args:
        peft_config: of adapters that are trained, and nothing else.
        compiled: has the layers compiled that are measured whole.

    Raises:
        ValueError: the model's layers cannot be run by themselves, or sizes that it cannot have.
    """
    device = _device()
    own = device_profile(device, ranks_sharing(device))
    shape = shape._replace(micro_batch_size=max(1, min(shape.micro_batch_size, MOST_TOKENS // shape.sequence_length)))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        dist.barrier()
        with control.together("measuring the layers"):
            adapters, trained = _adapters(hf_config, peft_config)
            options = {"device": device, "adapters": adapters, **shape._asdict()}
            items = profile_items(hf_config, compiled=compiled, **options)
            stage = measure_stage(Bench(hf_config, compiled=compiled, **options))
        WATCH.doing("measuring the links", EVERYONE)
        cluster = measure_cluster(control, device, min(control.gather(own.free_bytes)))
    own_s = sum(item.forward_s + item.backward_s for item in items)
    seconds = agreed([value for item in items for value in (item.forward_s, item.backward_s)], device)
    together = tuple(
        replace(item, forward_s=forward_s, backward_s=backward_s)
        for item, forward_s, backward_s in zip(items, seconds[::2], seconds[1::2], strict=True)
    )
    stage = StageTimes(*agreed(stage, device))
    rank_s: list[float] = control.gather(own_s)
    with control.together("measuring the layers"):
        profile = Profile(
            fingerprint(hf_config),
            str(shape.dtype).removeprefix("torch."),
            shape.micro_batch_size,
            shape.sequence_length,
            shape.gradient_checkpointing,
            items=together,
            devices=(own,),
            stage=stage,
        )
    return Measured(profile, cluster, tuple(rank_s), may_move=peft_config is None, trained=trained)


def _device() -> torch.device:
    return torch.device(get_accelerator().device_name(int(os.environ.get("LOCAL_RANK", "0"))))


def _adapters(hf_config: PretrainedConfig, peft_config: PeftConfig | None) -> tuple[Adapters | None, float]:
    """Adapters to measure layers with, and the share of the parameters that is trained."""
    if peft_config is None:
        return None, 1.0
    whole = skeleton(hf_config)
    return without_memory(peft_config, whole, anatomy_of(whole)), trained_share(whole)


def _with_halves(
    measured: Measured,
    hf_config: PretrainedConfig,
    control: ControlPlane,
    shape: Shape,
    peft_config: PeftConfig | None,
) -> Measured:
    """With halves of decoder layers measured too, if all ranks can. Collective.

    Args:
        shape: as for :func:`measure`.
    """
    device, profile = _device(), measured.profile
    shape = shape._replace(micro_batch_size=profile.micro_batch_size, half_layers=True)
    try:
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), control.together("measuring halves of layers"):
            require_halves(hf_config)
            adapters, _ = _adapters(hf_config, peft_config)
            items = profile_items(hf_config, device=device, adapters=adapters, **shape._asdict())
    except Exception as error:  # whole layers are planned all the same
        if not is_shared(error):
            raise
        if control.rank == 0:
            logger.info("plan: not in halves of layers: %s", error)
        return measured
    forward = agreed([item.forward_s for item in items], device)
    backward = agreed([item.backward_s for item in items], device)
    together = [replace(item, forward_s=f, backward_s=b) for item, f, b in zip(items, forward, backward, strict=True)]
    return measured._replace(halves=replace(profile, items=_as_wholes(together, profile.items)))


def _as_wholes(halves: Sequence[ItemProfile], wholes: Sequence[ItemProfile]) -> tuple[ItemProfile, ...]:
    """The halves with seconds whose sums are those of the whole layers, and embedding and head as they are there: both
    ways of cutting are compared, so they must differ in nothing else."""
    found = [wholes[0]]
    for first, second, whole in zip(halves[1:-1:2], halves[2:-1:2], wholes[1:-1], strict=True):
        forward_s, backward_s = first.forward_s + second.forward_s, first.backward_s + second.backward_s
        for half in (first, second):
            found.append(
                replace(
                    half,
                    forward_s=whole.forward_s * (half.forward_s / forward_s if forward_s else 0.5),
                    backward_s=whole.backward_s * (half.backward_s / backward_s if backward_s else 0.5),
                )
            )
    return (*found, wholes[-1])


def _with_slices(
    measured: Measured,
    hf_config: PretrainedConfig,
    control: ControlPlane,
    options: Iterable[Stages],
    kept: Mapping[str, object] | None,
) -> Measured:
    """With the stages that may share the head, if the model stays the same so: where that would help, and where the run
    that goes on has it so. Collective."""
    sliced = set()
    if not measured.is_unequal:
        sliced = {stages for stages in options if slices_may_gain(measured.item_s, *stages)}
    if kept is not None and kept.get(SLICES, 1) != 1:
        sliced.add(stages_kept(kept))
    if not sliced:
        return measured
    try:
        with control.together("checking a head in slices"):
            check_slices(hf_config, HEAD_SLICES)
    except Exception as error:  # a whole head is planned all the same
        if not is_shared(error):
            raise
        if control.rank == 0:
            logger.info("plan: not with slices of the head: %s", error)
        return measured
    return measured._replace(sliced=frozenset(sliced))


def plan_stages(
    hf_config: PretrainedConfig,
    control: ControlPlane,
    options: Mapping[Stages, RunPlan],
    usual: RunPlan,
    shape: Shape,
    peft_config: PeftConfig | None = None,
    kept: Mapping[str, object] | None = None,
    *,
    may_halve: bool = False,
    may_slice: bool = False,
) -> RunPlan | None:
    """The option that is predicted to be fastest here, with the reasons; None where there is nothing to choose.

    Collective, and the same on all ranks.

    Args:
        options: by stages, all of the same samples a step.
        usual: the one that is taken where others are no faster.
        shape: of a micro-batch, to measure with.
        peft_config: of adapters, if nothing else is trained.
        kept: ``RunPlan.planned`` of the run that goes on: it stays, and others are only compared with it.
        may_halve: stages may end within decoder layers.
        may_slice: stages may share the head.
    """
    begun = time.perf_counter()
    try:
        measured = measure(hf_config, control, shape, peft_config, compile_layers_of(usual))
        had_halves = kept is not None and kept.get(HALVES) is True
        if may_halve and (
            had_halves or measured.is_unequal or any(halves_may_gain(measured.item_s, *each) for each in options)
        ):
            measured = _with_halves(measured, hf_config, control, shape, peft_config)
        if may_slice:
            measured = _with_slices(measured, hf_config, control, options, kept)
        WATCH.idle()
        with WATCH.pause("planning the stages"):  # the first rank plans as long as it takes
            chosen = _chosen(hf_config, control, options, usual, measured, begun, kept)
    except Exception as error:
        if not is_shared(error):
            raise
        WATCH.idle()
        if control.rank == 0:
            taken = (
                f"{usual.stages} stages are taken, as few as fit" if kept is None else "what the checkpoint says stays"
            )
            logger.info("plan: %s, since steps cannot be predicted: %s", taken, error)
        return None if kept is None else as_before(options, kept)
    return chosen


def _chosen(
    hf_config: PretrainedConfig,
    control: ControlPlane,
    options: Mapping[Stages, RunPlan],
    usual: RunPlan,
    measured: Measured,
    begun: float,
    kept: Mapping[str, object] | None,
) -> RunPlan | None:
    chosen: RunPlan | None = None
    with control.together("planning the stages"):
        if control.rank == 0:
            is_asked = usual.recompute == FIT or (kept is not None and RECOMPUTE in kept)
            may_fit = is_asked or not measured.profile.gradient_checkpointing
            preferred = Stages(usual.stages) if kept is None else stages_kept(kept)
            # Layers are recomputed unasked only where nothing fits otherwise.
            for fits in ([] if is_asked else [False]) + ([True] if may_fit else []):
                pool = entries(hf_config, options, measured, fits=fits)
                found = [entry.predicted(measured.cluster) for entry in pool]
                best = choose(found, preferred)
                if best is not None:
                    break
            _tell(measured, found, time.perf_counter() - begun)
            taken = None if best is None else options[best.shape]
            if taken is not None and taken.data_parallel > 1:
                _advise_shares(taken, measured)
            if kept is not None:
                chosen = as_before(options, kept)
                now = next(entry for entry in pool if entry.option.shape == stages_of(chosen))
                _tell_better(best, _as_it_runs(now, chosen).predicted(measured.cluster))
            elif best is not None:
                chosen = _with_reasons(options[best.shape], best, found, measured, usual, fits=fits)
            if chosen is not None:
                runs = stages_of(chosen)
                cut = [_as_it_runs(entry, chosen) if entry.option.shape == runs else entry for entry in pool]
                chosen = replace(chosen, pool=StagePool(tuple(cut), measured.cluster, runs))
    result: RunPlan | None = control.from_first(chosen)
    return result


def _as_it_runs(entry: Entry, plan: RunPlan) -> Entry:
    return entry.as_it_runs(halves=plan.half_layers, slices=plan.head_slices > 1)


def entries(
    hf_config: PretrainedConfig,
    options: Mapping[Stages, RunPlan],
    measured: Measured,
    *,
    fits: bool = False,
) -> list[Entry]:
    """All options, with what their steps are predicted from.

    Args:
        fits: layers may be recomputed so that the rest fits.
    """
    profile, found = measured.profile, []
    for (stages, chunks), plan in options.items():
        option = Option(stages, plan.data_parallel, plan.micro_batch_size, plan.micro_batches, chunks=chunks)
        states = replace(States.from_config(plan.ds_config, 1), trained=measured.trained)
        sizes = WorkloadShape(
            getattr(torch, profile.dtype),
            plan.micro_batch_size,
            profile.sequence_length,
            plan.train_batch_size,
            profile.gradient_checkpointing,
            plan.half_layers,
        )
        follows, unequal = _follows_speed(plan, measured), plan.section.pipeline.unequal_replicas
        how = {"follows_speed": follows, "shares_by_speed": unequal is not None and unequal.micro_batches is None}
        are_kept = plan.expert_parallel == 1 and keeps_what_has_room(plan.schedule)
        cuts = [(sizes, profile)]
        if measured.halves is not None and stages > 1:
            cuts.append((replace(sizes, half_layers=True), measured.halves))
        workloads: list[Workload | None] = []
        for cut, of_cut in cuts:
            ways = [cut] + [replace(cut, gradient_checkpointing=True)] * fits
            counted = [replace(workload_of(hf_config, way, profile=of_cut), states=states) for way in ways]
            if plan.partition_choice.method == WORK and not follows:
                model = skeleton(hf_config)
                anatomy = anatomy_of(model, half_layers=cut.half_layers)
                recomputes = cut.gradient_checkpointing and not are_kept
                work = work_of_items(model, anatomy, cut.sequence_length, recomputes=recomputes)
                counted = [replace(each, work=tuple(work)) for each in counted]
            least = _least_shares(of_cut.items, stages, chunks)
            factor = slowdown(measured.rank_s, stages, least=least, **how)
            workloads += [scaled(each, factor) for each in counted] + [None] * (2 - len(ways))
        whole, *others = workloads
        assert whole is not None, "layers as they are"
        entry = Entry(
            *(option, whole, plan.expert_parallel, plan.schedule.is_tuned),
            plan.partition_choice.memory_bytes or inf,
            *others,
        )
        if (stages, chunks) in measured.sliced and not fits:
            halved = None if entry.halved is None else entry.halved.in_head_slices(HEAD_SLICES)
            entry = replace(entry, sliced=whole.in_head_slices(HEAD_SLICES), sliced_halves=halved)
        found.append(entry)
    return found


def _least_shares(items: Sequence[ItemProfile], stages: int, chunks: int) -> list[float]:
    """Share of the seconds of all items that each rank of a pipeline has at least: a decoder layer, or a half, for each
    of its stages but the last, which may have the head alone."""
    item_s = [item.forward_s + item.backward_s for item in items]
    each = sum(item_s[1:-1]) / len(item_s[1:-1]) / sum(item_s)
    found = [each * chunks] * stages
    found[0 if chunks > 1 else -1] -= each
    return found


def _follows_speed(plan: RunPlan, measured: Measured) -> bool:
    """Whether the stages of a plan get layers by the speed of their devices: as asked, or where nothing is asked.

    Unasked, layers do not move where messages have a format; nor where experts are spread and stay where they are:
    only the load, measured to place them, tells a layer whose experts are unevenly busy from one on a slower device.
    """
    is_asked = plan.partition_choice.method == HETERO
    return is_asked or (measured.is_unequal and measured.may_move and _may_follow_speed(plan))


def _may_follow_speed(plan: RunPlan) -> bool:
    """Whether nothing that the JSON says is in the way."""
    knows_experts = plan.expert_parallel == 1 or (plan.moe is not None and plan.moe.rebalance_every > 0)
    return PARTITION in plan.chosen and knows_experts and plan.section.pipeline.boundary is None


def _with_reasons(
    plan: RunPlan, best: Option, options: Sequence[Option], measured: Measured, usual: RunPlan, *, fits: bool
) -> RunPlan:
    """``plan``, which is the ``best`` of all ``options``, with what was chosen for it beyond the JSON of ``usual``.

    Args:
        fits: layers may be recomputed so that the rest fits.
    """
    why = why_chosen(best, options)
    are_given = len(options) == 1 or has_stages(usual.section, usual.ds_config)  # one option: halves alone are planned
    chosen = {} if are_given else {STAGES: Choice(best.stages, why)}
    if best.stages > 1 and _follows_speed(plan, measured) and plan.partition_choice.method != HETERO:
        times = max(measured.rank_s) / min(measured.rank_s)
        chosen[PARTITION] = Choice(HETERO, f"the slowest device takes {times:.2f} times as long as the fastest")
    if plan.schedule.is_tuned and usual.section.pipeline.schedule is None:
        chosen[TYPE] = Choice(plan.schedule.type, "chosen while training goes on, by what is measured")
    if best.chunks > 1 or asks_for_chunks(usual.section):
        chosen[PLANNED_CHUNKS] = Choice(best.chunks, why)
    if best.halves:
        in_whole = f"{best.whole_s:.4g} in whole layers" if isfinite(best.whole_s) else "whole layers do not fit"
        chosen[HALVES] = Choice(True, f"{best.step_s:.4g} s a step predicted, {in_whole}")
    elif asks_for_halves(usual.section):
        chosen[HALVES] = Choice(False, "stages within layers would not be clearly faster, or cannot be")
    if best.head_slices > 1:
        whole = (
            f"{best.whole_head_s:.4g} with a whole head" if isfinite(best.whole_head_s) else "a whole head does not fit"
        )
        chosen[SLICES] = Choice(best.head_slices, f"{best.step_s:.4g} s a step predicted, {whole}")
    elif asks_for_slices(usual.section) or best.shape in measured.sliced:
        chosen[SLICES] = Choice(1, "a head in slices would not make a step clearly shorter, or cannot be")
    if fits and usual.recompute is None:
        chosen[RECOMPUTE] = Choice(FIT, "nothing fits into the memory of the devices otherwise")
    return _planned(plan, chosen)


def stages_of(plan: RunPlan) -> Stages:
    """The stages of a plan."""
    return Stages(plan.stages, plan.schedule.chunks or 1)


def stages_kept(kept: Mapping[str, object]) -> Stages:
    """The stages that an earlier start of this run has chosen."""
    return Stages(as_whole(STAGES, kept[STAGES]), as_whole(PLANNED_CHUNKS, kept.get(PLANNED_CHUNKS, 1)))


def as_before(options: Mapping[Stages, RunPlan], kept: Mapping[str, object]) -> RunPlan:
    """The option that an earlier start of this run has chosen; what the JSON says by now goes before."""
    plan = options[stages_kept(kept)]
    are_written = len(options) > len({stages.num_stages for stages in options}) == 1
    is_open = {
        STAGES: not are_written,
        PARTITION: _may_follow_speed(plan),
        TYPE: plan.schedule.type == kept.get(TYPE),
        RECOMPUTE: plan.recompute is None,
        HALVES: may_plan_halves(plan.section),
        SLICES: may_plan_slices(plan.section),
    }
    why = "as before the checkpoint; --replan chooses anew"
    return _planned(plan, {path: Choice(value, why) for path, value in kept.items() if is_open.get(path, True)})


def _planned(plan: RunPlan, chosen: dict[str, Choice]) -> RunPlan:
    """``plan`` with what was ``chosen`` for it, layers that go by speed included."""
    section = as_it_starts(plan.section, plan.stages)
    if PARTITION in chosen:
        method = {"method": chosen[PARTITION].value}
        partition = (section.pipeline.partition or PartitionConfig()).model_copy(update=method)
        section = section.model_copy(update={"pipeline": section.pipeline.model_copy(update={"partition": partition})})
    for path, key in ((RECOMPUTE, "recompute"), (HALVES, "half_layers"), (SLICES, "head_slices")):
        if path in chosen:
            pipeline = section.pipeline.model_copy(update={key: chosen[path].value})
            section = section.model_copy(update={"pipeline": pipeline})
    planned = {STAGES: plan.stages, **{path: choice.value for path, choice in chosen.items()}}
    return replace(plan, section=section, chosen=chosen, planned=planned)


def _tell_better(best: Option | None, now: Option) -> None:
    """Say if the run would be planned in another way than the one in which it goes on."""
    if best is not None and best.shape != now.shape:
        logger.info(
            "plan: the run goes on as before the checkpoint, with %s. Now the fastest is %s: --replan takes it",
            *(now.text, best.text),
        )


def _advise_shares(plan: RunPlan, measured: Measured) -> None:
    """Say that replicas would wait for the slowest. Shares by speed round otherwise, so they are not taken unasked."""
    if measured.is_unequal and plan.section.pipeline.unequal_replicas is None and plan.expert_parallel == 1:
        times = max(measured.rank_s) / min(measured.rank_s)
        logger.info(
            "plan: the slowest device takes %.2f times as long as the fastest, and replicas wait for it: "
            '"unequal_replicas": {} in "pipeline" gives them shares of a step by their speed',
            times,
        )


def _tell(measured: Measured, options: Sequence[Option], seconds: float) -> None:
    cluster = measured.cluster
    fabric = cluster.across if cluster.num_devices > cluster.devices_per_node else cluster.inside
    logger.info(
        "plan: measured in %.1f s: %.4g s a micro-batch, %.3g GB/s between neighbours, all-reduce %.3g GB/s, "
        "ZeRO 1's exchange %.3g GB/s",
        seconds,
        sum(measured.rank_s) / len(measured.rank_s),
        fabric.bytes_per_s / 1e9,
        fabric.reduction_bytes_per_s / 1e9,
        fabric.sharding_bytes_per_s / 1e9,
    )
    for option in sorted(options, key=lambda option: (bool(option.why_not), option.step_s)):
        logger.info("plan: %s", option.text)
