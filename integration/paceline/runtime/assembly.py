"""Make the parts of a :class:`~paceline.runtime.engine.PacelineEngine`, each of what it needs of the others.

The engine calls these functions in the order in which the parts need each other; most are collective, since the parts
of all ranks meet.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from torch import nn

from ..averaging.averager import Averager, make_averager
from ..averaging.masters_by_name import PipelineMasters
from ..comm.formats import BoundaryFormats
from ..comm.host_barrier import host_barrier
from ..comm.staging import staging_for
from ..hf.quantised import quantisation_of
from ..hf.weights import is_pretrained
from ..moe.experts_ahead import BesideSteps
from ..moe.moving import states_of
from ..moe.stage_agreement import Stages
from ..optim.sharded import ShardedOptimizer
from ..planning.format_costs import FormatCosts
from ..schedules.asynchronous import one_direction
from ..schedules.lower import FREE
from ..schedules.windows import StreamProgram
from ..state.named import is_copy, is_spread, names_of, tied_weights
from ..state.rank_states import ParameterGroups, RandomStates, SavedPart, SchedulerState
from .asynchronous_run import AsynchronousRun
from .boundary import Boundary
from .causal_lm_runner import CausalLMRunner
from .causal_lm_steps import CausalLMSteps, Replicas
from .causal_lm_support import CausalLMSupport
from .checkpointer import Checkpointer
from .early_room import EarlyRoom, keeps_what_has_room
from .evaluation import Evaluation
from .executor import HeldStage
from .expert_part import Experts
from .format_times import format_costs
from .late_losses import LateLosses
from .migration import Migrator, Seat, StageParameters
from .model_support import Around
from .module import CausalLMPipeline
from .natural_gradient_part import NaturalGradientPart, loss_scale_of
from .optimizer_setup import check_own_parameters, step_options
from .pipeline_links import Links
from .pipeline_measurements import PipelineMeasurements
from .rank_random import draw_alike
from .rank_reports import bytes_per_parameter, step_room_bytes
from .rounding_errors import RoundingErrors
from .startup import dtype_of
from .state_owners import Mirrors, by_stage, over_directions, stage_of_parameters
from .steps_ahead import StepsAhead
from .surroundings import DeepSpeedSurroundings

if TYPE_CHECKING:
    from .engine import PacelineEngine


def causal_lm_runners(held: Sequence[HeldStage]) -> list[CausalLMRunner]:
    """Runners of the stages of a Hugging Face model; none of another one."""
    return [one.runner for one in held if isinstance(one.runner, CausalLMRunner)]


def make_mirrors(engine: PacelineEngine, model: PipelineModule) -> Mirrors | None:
    """Ranks that hold the same stages, where the schedule has directions or no flush. Collective."""
    choice = engine.plan.schedule
    if not choice.shares_updates:
        return None
    pipes = model._grid._topo.get_axis_comm_lists("pipe") or [[rank] for rank in range(dist.get_world_size())]
    equal_parts = choice.optimizer_owners == "mirror"
    return Mirrors.create(
        *(pipes, dist.get_rank(), engine.support.routes),
        equal_parts=equal_parts,
        num_sharing=engine.shared_experts.groups.size,
        plans=engine.plan.moe is not None,
    )


def make_slices_alike(engine: PacelineEngine) -> None:
    """Have ranks with slices of the same layers draw the same random numbers, and know each other. Collective."""
    grid, device = engine.grid, torch.device(engine.device)
    draw_alike(engine.control.gather, engine.global_rank, engine.global_rank - grid.get_slice_parallel_rank(), device)
    # NCCL's communicator is made now, and not while messages between stages are under way.
    dist.all_reduce(torch.zeros(1, device=device), group=grid.get_slice_parallel_group())


def make_links(engine: PacelineEngine) -> Links:
    """Lanes to the neighbours. Collective."""
    pipes = engine.grid._topo.get_axis_comm_lists("pipe") if engine.is_pipe_parallel else []
    return Links(
        pipes,
        engine.global_rank,
        torch.device(engine.device),
        routes=engine.support.routes,
        order=FREE if engine.mirrors is not None else engine.transport_order,
        activation_shapes=engine.support.activation_shapes,
        announces=engine.dynamic_shape,
        # DeepSpeed's own, whose other operations come between steps: a communicator costs memory on every GPU.
        group=engine.grid.get_pipe_parallel_group() if pipes else None,
    )


def make_rounding_errors(engine: PacelineEngine) -> RoundingErrors | None:
    """None where nothing is rounded."""
    num_boundaries = len(engine.links.routes[0]) - 1
    rounds = any(formats_of(engine)) or engine.plan.boundary.allowed is not None
    return RoundingErrors(num_boundaries) if num_boundaries and rounds else None


def formats_of(engine: PacelineEngine) -> BoundaryFormats:
    boundary = engine.plan.boundary
    return BoundaryFormats.named(boundary.forward, boundary.backward)


def format_choices(engine: PacelineEngine) -> dict[str, FormatCosts]:
    """Costs on this device of the formats that may be chosen."""
    names = engine.plan.boundary.allowed or ()
    return format_costs(names, dtype_of(engine.plan.ds_config), torch.device(engine.device))


def choose_format(engine: PacelineEngine, name: str) -> None:
    """Send in a format that was chosen, from the next step on; empty: as things are."""
    formats = BoundaryFormats.named(name, name)
    if engine.plan.boundary.allowed is None or engine.held[0].boundary.formats == formats:
        return
    for stage in engine.held:
        stage.boundary.formats = formats
    if engine.rounding_errors is not None:
        engine.rounding_errors.forget()


def make_stages(engine: PacelineEngine) -> list[HeldStage]:
    """The stages of this rank, by chunk."""
    chunks, held = engine.links.chunks, []
    around = Around(
        DeepSpeedSurroundings(engine, reduces_early=_reduces_early(engine)),
        engine.reach,
        torch.device(engine.device),
        engine.loss_book,
        lambda: (engine._compute_loss, engine.eval_return_logits),
        engine.gradient_accumulation_steps,
    )
    # Beside the computation gradients lie in buckets, which share no memory with what is sent.
    own_memory = None if engine.plan.schedule.is_asynchronous else engine.own_memory
    formats, errors = formats_of(engine), engine.rounding_errors
    number_of = {chunk: number for number, chunk in enumerate(chunks)}
    for number, (direction, stage) in enumerate(chunks):
        runner = engine.support.make_runner(number, around)
        lanes = engine.links.transports[direction].lanes(stage)
        held.append(
            HeldStage(
                runner,
                Boundary(runner, lanes, engine.meter, own_memory, number, formats, errors),
                engine.links.ranks_of_stages(direction),
                next_chunk=number_of.get((direction, stage + 1)),
                previous_chunk=number_of.get((direction, stage - 1)),
            )
        )
    return held


UNFRAGMENTED = 0.9
"""Share of a GPU's free memory that is counted on: blocks of many sizes that come and go leave holes."""


def make_early_room(engine: PacelineEngine) -> EarlyRoom | None:
    """None where activations are computed again within backwards always."""
    schedule, device = engine.plan.schedule, torch.device(engine.device)
    if not isinstance(engine.module, CausalLMPipeline) or schedule.is_asynchronous:
        return None
    groups, is_off = engine.module.expert_groups, not keeps_what_has_room(schedule)
    if engine.module.tensor_parallel > 1:
        groups = engine.module.slice_groups
    if is_off and groups.size == 1:
        return None  # of ranks that compute layers together each is asked, as launchers bring variables to some only
    whole = engine.plan.partition_choice.memory_bytes

    def room() -> float:
        if is_off or engine.global_steps == engine.skipped_steps:
            return 0.0  # the optimizer's first step makes its states
        free = step_room_bytes(device, engine.optimizer)
        rooms = [free * UNFRAGMENTED if device.type == "cuda" else free]
        if schedule.memory_bytes is not None:
            rooms.append(schedule.memory_bytes)
        if whole is not None:
            num_parameters = sum(parameter.numel() for parameter in engine.module.parameters())
            rooms.append(whole - bytes_per_parameter(engine.module, engine.optimizer)[0] * num_parameters)
        return min(rooms)

    return EarlyRoom(engine.meter, room, logs=engine.global_rank == 0, agree=groups.agree if groups.size > 1 else None)


def _reduces_early(engine: PacelineEngine) -> bool:
    """Whether gradients may be reduced before the step's computations have ended.

    A rank with one stage has received all its messages then. One with several has not: where operations of different
    communicators run one at a time, a receive would wait for the reduction.
    """
    if engine.plan.schedule.is_asynchronous:
        return False
    return len(engine.links.chunks) == 1 or engine.links.order == FREE


def make_evaluation(engine: PacelineEngine) -> Evaluation | None:
    """None for layers of one's own, whose outputs can be anything."""
    if not isinstance(engine.support, CausalLMSupport) or not isinstance(engine.steps, CausalLMSteps):
        return None
    return Evaluation(
        engine,
        engine.steps,
        engine.support.book,
        causal_lm_runners(engine.held),
        engine.control,
        loss_rank=engine._loss_stage_global_rank(),
        is_pipe_parallel=bool(engine.is_pipe_parallel),
    )


def make_asynchronous_run(engine: PacelineEngine) -> AsynchronousRun:
    """Steps without a flush; the end of the script finishes them. Collective."""
    assert isinstance(engine.support, CausalLMSupport), "schedules without a flush are for Hugging Face models"
    assert isinstance(engine.steps, CausalLMSteps)
    choice, optimizer = engine.plan.schedule, engine.optimizer
    stream = choice.stream(engine.num_stages, engine.micro_batches)
    latest = one_direction(engine.num_stages, engine.micro_batches) if choice.late_gradients else stream
    replicas = Replicas(engine.grid.data_parallel_id, engine.dp_world_size)
    run = AsynchronousRun(
        engine,
        StreamProgram(stream, engine.links.device_number),
        engine.executor,
        optimizer if isinstance(optimizer, ShardedOptimizer) else None,
        steps=StepsAhead(
            engine,
            engine.steps,
            engine.support.book,
            engine.control,
            replicas,
            num_micro_batches=engine.micro_batches,
            num_steps=latest.most_lag + 1,
        ),
        losses=LateLosses(engine, engine.control.world, torch.device(engine.device), engine.naming_lost_peers),
        book=engine.loss_book,
        half_way=engine.half_way,
        own_random=engine.own_random,
        around=engine.naming_lost_peers,
        applied=engine.experts.renew,
    )
    atexit.register(_leave, weakref.ref(run))
    return run


def make_optimizer(engine: PacelineEngine, basic: torch.optim.Optimizer) -> ShardedOptimizer:
    """The optimizer that trains, over ``basic``. Collective."""
    names, counts, apart = parameters_of_stages(engine)
    check_own_parameters(basic, names)
    support, mirrors = engine.support, engine.mirrors
    options = replace(
        step_options(
            engine,
            engine.module._grid,
            spreads_experts=engine.shared_experts.groups.size > 1 or engine.plan.tensor_parallel > 1,
        ),
        divisor=support.gradient_divisor(averages=bool(engine.gradient_average)),
        domain=engine.shared_experts.domain(),
    )
    if mirrors is not None:
        options = over_directions(
            *(
                options,
                mirrors,
                lambda parameter: engine.stage_of[parameter],
                is_spread,
                engine.plan.schedule,
                engine.plan.ds_config,
            ),
            ties=lambda: engine.module.get_tied_weights_and_groups() if engine.num_stages > 1 else [],
            spreads_experts=engine.shared_experts.groups.size > 1,
        )
    if options.is_asynchronous:
        options = replace(options, host_barrier=host_barrier(engine.control.world, torch.device(engine.device)))
    return ShardedOptimizer(basic, names, options, counts=counts, apart=apart)


def parameters_of_stages(engine: PacelineEngine) -> StageParameters:
    """Parameters of this rank by name, which of them count in the norm, and which are in no bucket."""
    grid, module = engine.module._grid, engine.module
    tied = tied_weights(module)
    first_slice = grid.get_slice_parallel_rank() == 0

    def counts(parameter: nn.Parameter) -> bool:
        is_slice = getattr(parameter, "model_parallel", False)
        return not is_copy(parameter, tied) and (first_slice or is_slice)

    names = names_of(module)
    if engine.mirrors is not None:
        engine.stage_of = stage_of_parameters(engine.support.stages)
        names = by_stage(names, engine.stage_of)
    return StageParameters(names, counts, lambda parameter: id(parameter) in tied)


def make_natural_gradient(engine: PacelineEngine) -> NaturalGradientPart | None:
    """None where the JSON does not ask for it. Collective."""
    if engine.plan.natural_gradient is None:
        return None

    def unit(num_rows: int) -> float:
        """Factor that makes a gradient that of a loss summed over rows."""
        losses = engine.support.sum_of_losses(num_rows, engine.gradient_accumulation_steps())
        return losses / loss_scale_of(engine)

    engine.support.keep_masks()  # estimates are of all rows, padding too
    return NaturalGradientPart(
        engine.plan.natural_gradient,
        engine.module,
        gather=engine.control.gather,
        device=torch.device(engine.device),
        unit=unit,
        name_of=getattr(engine.module, "state_name", str),
    )


def make_averaging(engine: PacelineEngine, optimizer: ShardedOptimizer) -> Averager | None:
    """None where the JSON does not ask for it. Collective."""
    return make_averager(
        engine.plan.averaging,
        engine.control,
        lambda: PipelineMasters(engine.control, engine.module, optimizer, engine.experts.fetch, engine.flush),
        engine.basic_optimizer,
        is_pretrained=getattr(engine.module, "is_pretrained", is_pretrained(engine.module)),
    )


def make_experts(engine: PacelineEngine) -> Experts:
    """Experts that lie on several ranks of a stage. Collective."""
    mirrors, stages = engine.mirrors, None
    group = engine.grid.get_data_parallel_group if mirrors is None else lambda: mirrors.planning_group

    def settle(switches: bool) -> None:
        if engine.plan.schedule.is_asynchronous and any(engine.control.gather(switches)):
            engine.flush()

    if engine.num_stages > 1:
        stages = Stages(
            *(engine.stage_id if mirrors is None else min(mirrors.stages.owners), engine.num_stages, engine.control),
            computed_s=lambda: float(engine.meter.recorder.computed_s()),  # made later
            num_micro_batches=lambda: engine.schedule.num_micro_batches,
        )
    return Experts(
        engine.shared_experts,
        engine.plan.moe,
        control=engine.control,
        stages=stages,
        group=group,
        device=torch.device(engine.device),
        states=lambda: states_of(engine),
        is_last_backward=engine.is_last_backward,
        decided=engine.decisions,
        settle=settle,
        beside=lambda: _beside_steps(engine, group()),
        half_way=partial(engine.half_way.during, takes_apart=True),
    )


def _beside_steps(engine: PacelineEngine, group: torch.distributed.ProcessGroup | None) -> BesideSteps | None:
    """None where experts move while training stands still. Collective.

    Args:
        group: of the ranks that hold the same stages.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, ShardedOptimizer) or not optimizer.may_wait_for_states:
        return None

    def disturb() -> None:
        measurements = None if engine.controller is None else engine.controller.measurements
        if isinstance(measurements, PipelineMeasurements):
            measurements.disturb_next()

    return BesideSteps.of_ranks(
        *(engine.control.gather, group, torch.device(engine.device)),
        expect=optimizer.expect_states,
        settle=optimizer.settle_states,
        disturb=disturb,
    )


def make_checkpointer(engine: PacelineEngine) -> Checkpointer:
    """Checkpoints with the state of all other parts."""
    optimizer = engine.optimizer if isinstance(engine.optimizer, ShardedOptimizer) else None
    stage, is_first = getattr(engine.module, "stage", None), engine.global_rank == 0
    learned = {"natural_gradient": engine.natural_gradient, "averaging": engine.averager}
    return Checkpointer(
        engine.control,
        engine.module,
        optimizer,
        engine,
        world_size=torch.distributed.get_world_size(),
        replica=engine.replica,
        shape=partial(_shape, engine),
        groups=None
        if optimizer is None
        else ParameterGroups(
            optimizer,
            warns=is_first,
            is_scheduled=lambda: engine.lr_scheduler is not None,
            cycles_momentum=lambda: getattr(engine.lr_scheduler, "cycle_momentum", False),
        ),
        scheduler=SchedulerState(
            lambda: engine.lr_scheduler, lambda: engine.basic_optimizer.param_groups, warns=is_first
        ),
        learned={name: part for name, part in learned.items() if part is not None},
        run=_run_states(engine),
        experts=engine.experts,
        settle=(lambda: None) if engine.averager is None else engine.averager.settle,
        write_model=engine.support.write_model,
        is_quantised=stage is not None and quantisation_of(stage.model.config) is not None,
    )


def _shape(engine: PacelineEngine) -> dict[str, object]:
    """The shape of this run, for a checkpoint of it."""
    routes = engine.support.routes
    in_turn = [stage % engine.num_stages for stage in range(len(routes[0]))]
    return {
        "stages": engine.num_stages,
        "data_parallel": engine.dp_world_size,
        **({} if engine.plan.tensor_parallel == 1 else {"tensor_parallel": engine.plan.tensor_parallel}),
        "parts": [int(part) for part in engine.module.parts],
        "train_batch_size": engine.train_batch_size(),
        **({} if engine.mirrors is None else {"directions": len(routes)}),
        # Ranks with several stages may have others: there and back, as DualPipeV has it.
        **({} if list(routes[0]) == in_turn else {"route": list(routes[0])}),
    }


def _run_states(engine: PacelineEngine) -> dict[str, SavedPart]:
    """States of this rank that go on whatever becomes of the optimizer's."""
    states: dict[str, SavedPart] = {"rng": RandomStates(torch.device(engine.device), warns=engine.global_rank == 0)}
    return states if engine.own_random is None else {**states, "own_random": engine.own_random}


def make_migrator(engine: PacelineEngine) -> Migrator | None:
    """None without an optimizer: layers then have no reason to move."""
    if not isinstance(engine.optimizer, ShardedOptimizer):
        return None
    grid = engine.grid
    is_cut, shared = grid.get_slice_parallel_world_size() > 1, engine.shared_experts
    slice_name = f" (slice {grid.get_slice_parallel_rank()})" if is_cut else ""
    share_name = f" (experts {shared.number})"
    learned = [engine.experts] if shared.groups.size > 1 else []
    device = torch.device(engine.device)
    if device.type == "cuda" and staging_for(device) is None:
        # By all ranks: it makes the communicator of NCCL, which ranks without a part in the first move would not.
        dist.all_reduce(torch.zeros(1, device=device))
    return Migrator(
        engine.control,
        Seat(engine.global_rank, engine.stage_id, engine.pipe_number, slice_name, share_name, engine.plan.num_copies),
        engine.layers,
        engine.optimizer,
        device,
        parameters=partial(parameters_of_stages, engine),
        step=lambda: int(engine.global_steps),
        half_way=partial(engine.half_way.during, takes_apart=True),
        learned=[*learned, *([] if engine.natural_gradient is None else [engine.natural_gradient])],
        after=engine.forget_old_stages,
    )


def _leave(run: weakref.ref[AsynchronousRun]) -> None:
    if (found := run()) is not None:
        found.leave()
