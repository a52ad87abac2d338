"""Number of stages and partition method: from our section, DeepSpeed's ``pipeline``, or the ranks and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from ..planning.divisors import divisors
from ..schedules import families
from ..schedules.asynchronous import MULTIDIRECTION
from ..schedules.directions import MOST_DEVICES, allowed_devices, has_halves, num_directions
from ..schedules.generator import GENERATED
from .recompute_keys import FIT
from .section import PLAN, SECTION, Method, PacelineConfig, ScheduleType, check_method, show, whole

Resolved = TypeVar("Resolved")

FEWEST_THAT_GO = "the fewest that go with the batch sizes and the experts"

STAGES = f"{SECTION}.pipeline.stages"
PARTITION = f"{SECTION}.pipeline.partition"
HALVES = f"{SECTION}.pipeline.half_layers"
SLICES = f"{SECTION}.pipeline.head_slices"
_UNCUT: dict[str, Any] = {"half_layers": False, "head_slices": 1}
TYPE = f"{SECTION}.pipeline.schedule.type"
PLANNED_CHUNKS = f"{SECTION}.pipeline.schedule.chunks"
CHUNKS = 2
"""Stages that a rank holds with ``"interleaved"``, unless the JSON says more."""
DIRECTIONS = f"{SECTION}.pipeline.schedule.directions"
# Share of a device's memory for weights, gradients and optimizer states; activations live in the rest.
STATE_SHARE = 0.6


def resolve_stages(
    section: PacelineConfig,
    ds_config: Mapping[str, Any],
    *,
    world_size: int,
    num_layers: int,
    state_bytes: int | None,
    device_bytes: int | None,
    num_slices: int = 1,
) -> tuple[int, str]:
    """Number of stages, and why if it was chosen (empty if the JSON says it).

    In this order: ``paceline.pipeline.stages``, DeepSpeed's ``pipeline.stages`` (which DeepSpeed parses and ignores),
    as many as an explicit partition has, :func:`choose_stages`. Arguments as of
    :func:`~paceline.config.resolve`, but ranks that have slices of the same layers, ``num_slices`` of them, count once.
    A schedule with several directions has orders for some numbers only; of these the largest is chosen.
    """
    has_directions = schedule_type(section) == MULTIDIRECTION
    schedule = section.pipeline.schedule
    asked = None if schedule is None else schedule.directions
    a_rank = stages_a_rank(section)
    num_blocks = num_layers * blocks_per_layer(section) + head_slices(section) - 1
    usable = [s for s in divisors(world_size) if s * a_rank <= num_blocks]
    blocks = _named_blocks(section, num_layers)
    ranks = f"{world_size} ranks" if num_slices == 1 else f"{world_size} groups of {num_slices} ranks"
    limits = f"{ranks} and {blocks}"
    if has_directions:
        usable = _with_directions(usable, limits, asked)
    if not usable:  # several stages on each rank
        raise ValueError(
            f"{TYPE} is {show(schedule_type(section))}, with {a_rank} stages on each rank, and the model has {blocks}: "
            "every stage needs one; take a schedule with one stage on each rank."
        )
    theirs = _deepspeeds(ds_config).get("stages")
    ours = section.pipeline.stages
    stages, path = _agree(
        None if ours == PLAN and theirs in (None, "auto") else ours,
        None if theirs in (None, "auto") else whole("pipeline.stages", theirs),
        STAGES,
    )
    if stages is None:
        method, path = resolve_method(section, ds_config)
        if not isinstance(method, tuple) and has_directions:
            return _most_with_directions(usable, limits, asked)
        if not isinstance(method, tuple):
            stages = choose_stages(world_size, num_blocks // a_rank, state_bytes, device_bytes)
            return stages, _why(stages, world_size, limits, state_bytes, device_bytes)
        stages = (len(method) - 1) // a_rank
        why = f"{path} has {len(method)} boundaries"
        value = why
    else:
        why, value = "", f"{path} is {stages}"
    if has_directions:
        _check_directions(value, stages, f"{limits} allow {usable}", asked)
    if world_size % stages:
        raise ValueError(
            f"{value} and there are {ranks}: stages must divide the ranks; write one of {usable}, or start another "
            "number of ranks."
        )
    if stages * a_rank > num_blocks:
        chunks = f" with {a_rank} stages on each rank" if a_rank > 1 else ""
        raise ValueError(f"{value}{chunks} and the model has {blocks}: every stage needs one; write one of {usable}.")
    return stages, why


def blocks_per_layer(section: PacelineConfig) -> int:
    """Parts that a decoder layer may be cut into."""
    return 2 if section.pipeline.half_layers is True else 1


def head_slices(section: PacelineConfig) -> int:
    """Parts that the head may be cut into; where they are planned, as long as nothing is measured."""
    slices = section.pipeline.head_slices
    return slices if isinstance(slices, int) else 1


def _named_blocks(section: PacelineConfig, num_layers: int) -> str:
    count, slices = blocks_per_layer(section), head_slices(section)
    blocks = f"{num_layers} decoder layers" if count == 1 else f"{count * num_layers} halves of decoder layers"
    return blocks if slices == 1 else f"{blocks} and {slices} slices of the head"


def is_planned(section: PacelineConfig, ds_config: Mapping[str, Any], *, unasked: bool = False) -> bool:
    """Whether a run chooses its number of stages, or alone that of chunks or whether layers or the head are cut, by
    what it measures at the start: as asked, if nothing implies one.

    Only 1F1B and what the tuner chooses are predicted. With any other schedule the fewest that fit are taken.

    Args:
        unasked: a number that is left out is chosen so too; but not where it changes what is learned (natural
            gradients: each replica has its own estimates), or where formats of messages, which are not predicted, show
            that links are slow.
    """
    method, _ = resolve_method(section, ds_config)
    is_left = section.natural_gradient is None and section.pipeline.boundary is None
    has_open_stages = section.pipeline.stages == PLAN or (unasked and is_left and section.pipeline.stages is None)
    is_open = (has_open_stages and not has_stages(section, ds_config)) or asks_for_less(section)
    has_counts = section.pipeline.recompute not in (None, FIT)  # of stages that are known
    if not is_open or isinstance(method, tuple) or has_counts or head_slices(section) > 1:
        return False
    is_predicted = schedule_type(section) in ("1f1b", "adaptive") and stages_a_rank(section) == 1
    return is_predicted and not may_be_late(section)


def has_stages(section: PacelineConfig, ds_config: Mapping[str, Any]) -> bool:
    """Whether the JSON gives a number of stages, in our section or in DeepSpeed's."""
    theirs = _deepspeeds(ds_config).get("stages")
    return section.pipeline.stages not in (None, PLAN) or theirs not in (None, "auto")


def asks_for_chunks(section: PacelineConfig) -> bool:
    """Whether the section lets a run choose the number of stages that each rank holds."""
    schedule = section.pipeline.schedule
    return schedule is not None and schedule.chunks == PLAN


def asks_for_halves(section: PacelineConfig) -> bool:
    """Whether the section lets a run choose if decoder layers are cut in halves."""
    return section.pipeline.half_layers == PLAN


def asks_for_slices(section: PacelineConfig) -> bool:
    """Whether the section lets a run choose if the head is cut into slices."""
    return section.pipeline.head_slices == PLAN


def open_keys(section: PacelineConfig) -> list[str]:
    """Keys of the section whose value ``"plan"`` leaves a choice to the run."""
    asked = (
        (STAGES, section.pipeline.stages == PLAN),
        (HALVES, asks_for_halves(section)),
        (SLICES, asks_for_slices(section)),
        (PLANNED_CHUNKS, asks_for_chunks(section)),
    )
    return [key for key, is_open in asked if is_open]


def uncut(section: PacelineConfig) -> PacelineConfig:
    """The section in whole decoder layers, with the whole head."""
    return section.model_copy(update={"pipeline": section.pipeline.model_copy(update=_UNCUT)})


def as_it_starts(section: PacelineConfig, stages: int) -> PacelineConfig:
    """The section with so many stages, and what else it lets a run choose as it is where nothing is chosen."""
    pipeline = section.pipeline
    open_cuts = {key: value for key, value in _UNCUT.items() if getattr(pipeline, key) == PLAN}
    values: dict[str, Any] = {"stages": stages} | open_cuts
    if pipeline.schedule is not None and pipeline.schedule.chunks == PLAN:
        values["schedule"] = pipeline.schedule.model_copy(update={"chunks": None})
    return section.model_copy(update={"pipeline": pipeline.model_copy(update=values)})


def may_plan_halves(section: PacelineConfig) -> bool:
    """Whether the section leaves open if decoder layers are cut in halves: it asks to plan it, or is silent."""
    return asks_for_halves(section) or "half_layers" not in section.pipeline.model_fields_set


def may_plan_slices(section: PacelineConfig) -> bool:
    """Whether the section leaves open if the head is cut into slices: it asks to plan it, or is silent."""
    return asks_for_slices(section) or "head_slices" not in section.pipeline.model_fields_set


def asks_for_less(section: PacelineConfig) -> bool:
    """Whether the section lets a run choose something of a pipeline whose stages it may tell."""
    return asks_for_chunks(section) or asks_for_halves(section) or asks_for_slices(section)


def may_have_chunks(section: PacelineConfig) -> bool:
    """Whether a planned run may hold several stages on each rank: a schedule that is written says how many, and numbers
    of recomputed layers are for stages that are known."""
    is_open = section.pipeline.schedule is None or asks_for_chunks(section)
    return is_open and section.pipeline.recompute in (None, FIT)


def may_be_planned(section: PacelineConfig, ds_config: Mapping[str, Any], world_size: int) -> str:
    """A line that says if a run may take another number of stages than the JSON alone tells; empty: it takes that."""
    if world_size == 1 or not is_planned(section, ds_config, unasked=True):
        return ""
    is_counted = isinstance(ds_config.get("gradient_accumulation_steps"), int)  # which leaves one number
    if is_counted or has_stages(section, ds_config):
        may = []
        if asks_for_chunks(section) or (section.pipeline.stages == PLAN and may_have_chunks(section)):
            may.append("hold each in two chunks")
        if asks_for_halves(section):
            may.append("cut decoder layers in halves")
        if asks_for_slices(section):
            may.append("cut the head in slices")
        return f"stages: a run measures its cluster, and may {' and '.join(may)}." if may else ""
    who = "the job paceline.launch.finetune" if section.pipeline.stages is None else "a run"
    return f"stages: {who} measures its cluster, and may take another number."


def schedule_type(section: PacelineConfig) -> ScheduleType:
    """The type of schedule that the section asks for."""
    schedule = section.pipeline.schedule
    return "1f1b" if schedule is None else schedule.type or "adaptive"


def may_be_late(section: PacelineConfig) -> bool:
    """Whether the tuner may choose a schedule without a flush."""
    schedule = section.pipeline.schedule
    return schedule is not None and schedule.late_gradients is True


def stages_a_rank(section: PacelineConfig) -> int:
    """Stages of the one direction that each rank holds; where they are planned, as long as nothing is measured."""
    schedule = section.pipeline.schedule
    if schedule is None or schedule.chunks == PLAN:
        return 1
    if schedule.type in (families.INTERLEAVED, GENERATED):
        return schedule.chunks or CHUNKS
    return 2 if schedule.type in families.IN_V else schedule.chunks or 1


def resolve_method(section: PacelineConfig, ds_config: Mapping[str, Any]) -> tuple[Method | None, str]:
    """The partition method, ``None`` if the JSON has none, and the path of the key that says it.

    DeepSpeed's ``pipeline.partition`` counts too, with the same values; its default ``"best"`` means none.
    """
    ours = section.pipeline.partition
    theirs = _deepspeeds(ds_config).get("partition")
    if theirs == "best":
        theirs = None
    if theirs is not None:
        try:
            theirs = check_method(theirs)
        except ValueError as error:
            raise ValueError(
                f"pipeline.partition is {show(theirs)}: {error}; leave the key out to have it chosen."
            ) from None
    return _agree(None if ours is None else ours.method, theirs, PARTITION)


def choose_stages(world_size: int, num_blocks: int, state_bytes: int | None, device_bytes: int | None) -> int:
    """The fewest stages that divide the ranks and whose share of the states fits a device.

    At least two where there are two ranks: who wants one writes it. If nothing fits, the most stages that the ranks
    and the decoder layers, or their halves, allow. What is unknown fits.
    """
    usable = [s for s in divisors(world_size) if s <= num_blocks] or [1]
    fitting = [s for s in usable if s >= min(2, world_size) and states_fit(s, state_bytes, device_bytes)]
    return fitting[0] if fitting else usable[-1]


def _with_directions(usable: list[int], limits: str, asked: int | None) -> list[int]:
    known = allowed_devices(asked)
    if not known:
        raise ValueError(
            f"{DIRECTIONS} is {asked}: there is no order of so many directions; write 2, half the number of stages "
            "(of 2 or a multiple of 4), or leave it out."
        )
    fitting = [stages for stages in usable if stages in known]
    if not fitting:
        needs = f"{known[0]} stages" if len(known) == 1 else f"an even number of stages up to {MOST_DEVICES}"
        written = f"{TYPE} is {show(MULTIDIRECTION)}" + ("" if asked is None else f" with {asked} directions")
        raise ValueError(
            f"{written}: it needs {needs}, which divide the ranks and have a layer each, and {limits} allow none; "
            "start another number of ranks, or take another schedule."
        )
    return fitting


def _most_with_directions(usable: list[int], limits: str, asked: int | None) -> tuple[int, str]:
    """Stages of a schedule with several directions, and why: 2 or a multiple of 4 where directions are left out."""
    if asked is None:
        # An even number that is not a multiple of 4 has two stages as a divisor, and they have an order too.
        stages = max(filter(has_halves, usable))
        return stages, f"the most for {limits}: the more, the less they idle, with half the model on each"
    stages = usable[-1]
    return stages, f"the most for {limits}: the more, the less each holds, {asked} of {stages} stages"


def _check_directions(value: str, stages: int, usable: str, asked: int | None) -> None:
    try:
        num_directions(stages, asked)
    except ValueError as error:
        raise ValueError(f"{value} and {TYPE} {show(MULTIDIRECTION)}: {error} Here {usable}.") from None


def fewest_that_go(
    section: PacelineConfig,
    ds_config: Mapping[str, Any],
    resolved: Callable[[PacelineConfig], Resolved],
    stages: Iterable[int],
    *,
    unasked: bool = True,
) -> Resolved:
    """The plan of ``section``, which has the fewest stages that fit; or, where a run chooses their number, that of the
    first of ``stages`` which the JSON goes with.

    Args:
        resolved: makes the plan of a section.
        unasked: as of :func:`is_planned`.

    Raises:
        ValueError: of the fewest stages, if the JSON goes with no other number.
    """
    try:
        return resolved(section)
    except ValueError:
        if is_planned(section, ds_config, unasked=unasked) and not has_stages(section, ds_config):
            for number in stages:
                pipeline = section.pipeline.model_copy(update={"stages": number})
                with suppress(ValueError):
                    return resolved(section.model_copy(update={"pipeline": pipeline}))
        raise


def states_fit(stages: int, state_bytes: int | None, device_bytes: int | None) -> bool:
    """Whether so many stages leave room for activations beside a stage's states; what is unknown fits."""
    return state_bytes is None or device_bytes is None or state_bytes / stages <= STATE_SHARE * device_bytes


def _why(stages: int, world_size: int, limits: str, state_bytes: int | None, device_bytes: int | None) -> str:
    if stages < min(2, world_size):
        return f"{limits} allow no other number"
    if state_bytes is None or device_bytes is None:
        return f"the fewest pipeline stages for {limits}"
    states = f"{state_bytes / 1e9:.3g} GB of states on devices of {device_bytes / 1e9:.3g} GB"
    if states_fit(stages, state_bytes, device_bytes):
        return f"the fewest for {limits} that leave activations {1 - STATE_SHARE:.0%} of a device ({states})"
    return f"the most for {limits}; {states} will be tight"


def _deepspeeds(ds_config: Mapping[str, Any]) -> Mapping[str, Any]:
    pipeline = ds_config.get("pipeline", {})
    if not isinstance(pipeline, Mapping):
        raise ValueError(f"pipeline is {show(pipeline)}: it must be an object; write {{}} or leave it out.")
    return pipeline


def _agree(ours: Any, theirs: Any, path: str) -> tuple[Any, str]:
    their_path = path.removeprefix(f"{SECTION}.")
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(
            f"{path} is {show(ours)} and DeepSpeed's {their_path} is {show(theirs)}: they must agree; "
            f"drop {their_path}."
        )
    return (theirs, their_path) if ours is None else (ours, path)
