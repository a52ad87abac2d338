"""The controller of a pipeline: its schedule, partition and shares of a step, as the plan asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import psutil

from ..comm.control import ControlPlane
from ..config.partitions import PartitionChoice
from ..config.schedules import ScheduleChoice
from ..planning.choose import NO_FORMATS
from ..planning.format_costs import FormatCosts
from ..planning.rebalance import Uneven
from ..planning.stage_pool import StagePool
from ..planning.tuning import DecisionLog, TuningInterval
from .controller import Actuator, Controller
from .measured_costs import MeasuredCosts
from .meter import Meter
from .movable_layers import Layers
from .other_plans import OtherPlans
from .partition_actuator import MovesLayers, PartitionActuator
from .pipeline_measurements import JobAgreement, PipelineMeasurements
from .planning_process import PlanningProcess
from .rank_reports import ReportGatherer, Routes
from .schedule_actuator import RunsSchedules, ScheduleActuator, trials
from .share_actuator import ShareActuator, SharesMicroBatches
from .step_changes import Notice, StepChanges
from .tracer import TimelineWriter


class TunedPipeline(RunsSchedules, MovesLayers, SharesMicroBatches, Protocol):
    """A pipeline whose schedule, partition and share of a step can change between steps: the engine."""


def pipeline_controller(
    schedule: ScheduleChoice,
    partition: PartitionChoice,
    pipeline: TunedPipeline,
    layers: Layers,
    meter: Meter,
    reports: ReportGatherer,
    control: ControlPlane,
    log: DecisionLog,
    timelines: TimelineWriter,
    routes: Routes,
    *,
    recomputes: bool = False,
    formats: Mapping[str, FormatCosts] = NO_FORMATS,
    notice: Notice | None = None,
    pool: StagePool | None = None,
    reshare_every: int = 0,
    uneven_experts: Callable[[], Mapping[str, Uneven] | None] = dict,
    process: PlanningProcess | None = None,
) -> Controller | None:
    """Make the controller of a pipeline.

    Args:
        schedule: of the plan, as is ``partition``.
        layers: of this rank.
        log: gets the decisions.
        routes: device of each stage, one route a direction.
        recomputes: see :func:`~paceline.runtime.schedule_actuator.trials`.
        formats: by name, costs of formats that stages may send in.
        notice: through which ranks learn that steps have changed; None: they plan at the ends of intervals only.
        pool: other numbers of stages, where the run chose between some.
        reshare_every: steps from one choice of the replicas' shares to the next; 0: they stay.
        uneven_experts: see :class:`PipelineMeasurements`.
        process: see :class:`ScheduleActuator`.

    Returns:
        None if schedule, partition and shares stay as they are.
    """
    is_adaptive = schedule.is_tuned
    repartitions = bool(partition.repartition_every) and pipeline.num_stages > 1
    if not is_adaptive and not repartitions and not reshare_every:
        return None
    agreement = JobAgreement(control)
    recomputes = agreement.from_first(recomputes)  # ranks that try other schedules would wait for each other
    is_shared_unequally = bool(reshare_every) or len(set(pipeline.replica_micro_batches)) > 1
    costs = MeasuredCosts(
        routes,
        has_flush=not schedule.is_asynchronous,
        of_first_replica=is_shared_unequally,
        parts=tuple(layers.parts),
    )
    schedules = ScheduleActuator(pipeline, costs, agreement, schedule, formats, process)
    measurements = PipelineMeasurements(
        *(pipeline, costs, schedules.apply, layers, meter, reports, agreement, log, timelines),
        trials=trials(
            *(schedule, pipeline.num_stages, pipeline.micro_batch_size, min(pipeline.replica_micro_batches)),
            recomputes=recomputes,
        )
        if is_adaptive
        else [schedules.current],
        times_layers=repartitions,
        memory_bytes=schedule.memory_bytes,
        uneven_experts=uneven_experts,
    )
    actuators: dict[Actuator, TuningInterval] = {}
    if reshare_every:
        counts = schedule.micro_batch_counts(pipeline.num_stages)
        shares = ShareActuator(pipeline, measurements, schedules, agreement, counts, reshare_every)
        actuators[shares] = TuningInterval(reshare_every)
    if is_adaptive:
        actuators[schedules] = TuningInterval(schedule.retune_every or 1)
    if repartitions:
        assert partition.repartition_every is not None
        actuators[
            PartitionActuator(
                *(pipeline, layers, measurements, schedules, agreement, partition.repartition_every),
                follows_schedules=is_adaptive,
                memory_bytes=partition.memory_bytes,
                process=process,
            )
        ] = TuningInterval(partition.repartition_every)
    if pool is not None:
        restart_s = time.time() - psutil.Process().create_time()
        aside = process if schedules.plans_aside else None
        others = OtherPlans(pool, costs, agreement, size=pipeline.micro_batch_size, restart_s=restart_s, process=aside)
        actuators[others] = TuningInterval(min(interval.every for interval in actuators.values()))
    # Steps without a flush run into each other: the host's time tells nothing of a single one.
    changes = (
        None
        if notice is None or schedule.is_asynchronous
        else StepChanges(notice, measurements.forget, decides=agreement.decides)
    )
    return Controller(measurements, actuators, agreement, log, changes=changes)
