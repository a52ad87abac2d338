"""The ``"paceline"`` section of a DeepSpeed JSON.

A key that is left out is chosen automatically. There is no ``"auto"`` in this section: accelerate refuses that string
in a section which it does not know.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
)

from .averaging_keys import AveragingConfig
from .boundary_keys import BoundaryConfig
from .compile_keys import CompileConfig
from .natural_gradient_keys import MaxChangeConfig, NaturalGradientConfig
from .part import Part
from .recompute_keys import SCHEMA as RECOMPUTE_SCHEMA
from .recompute_keys import Recompute, check_recompute
from .replica_keys import UnequalReplicasConfig

SECTION = "paceline"
HETERO = "hetero"
PLAN: Final = "plan"
"""A number, of stages or of chunks, that a run chooses by what it measures."""
MEAN: Final = "mean"
WORK = "work"
METHODS = (WORK, "parameters", "uniform", HETERO)
ScheduleType: TypeAlias = Literal[
    "1f1b",
    "gpipe",
    "kfkb",
    "eager",
    "adaptive",
    "interleaved",
    "dualpipev",
    "zbh1",
    "zbh2",
    "zbv",
    "vhalf",
    "vmin",
    "generated",
    "multidirection",
    "one_direction",
]
# The types of schedule that each key of a schedule belongs to.
_TYPES_OF: dict[str, tuple[ScheduleType, ...]] = {
    "k": ("kfkb",),
    "slack": ("eager",),
    "warmup": ("eager",),
    "retune_every": ("adaptive", "generated"),
    "micro_batch_sizes": ("adaptive",),
    "memory_gib": ("adaptive", "generated"),
    "chunks": ("interleaved", "adaptive", "generated"),
    "directions": ("multidirection",),
    "staleness": ("multidirection",),
    "optimizer_owners": ("multidirection",),
    "warm_in_steps": ("multidirection", "one_direction", "adaptive"),
    "correction": ("multidirection", "one_direction", "adaptive"),
    "late_gradients": ("adaptive",),
    "risk": ("adaptive",),
}

_SHORT_METHODS: list[dict[str, Any]] = [
    {"enum": list(METHODS)},
    {"type": "string", "pattern": "^type:."},
    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2},
]
_METHOD_SCHEMA: dict[str, Any] = {
    "anyOf": [
        *_SHORT_METHODS,
        {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}, "minProperties": 1},
        {"type": "null"},
    ]
}


MOST_GIB = 2**40
"""Most GiB of a device: more is a mistake, and its bytes may be no number any more."""

_MISSPELT = 0.8
"""Likeness from which on a key is taken for the section's name."""

_MOST_SHOWN = 200
"""Characters of a value in an error message."""

Method: TypeAlias = str | tuple[int, ...] | dict[str, float]


def check_method(value: Any) -> Method:
    """A partition method: a name, ``"type:<regex>"``, weights by regex, or boundaries over the pipeline's items.

    Raises:
        ValueError: the rule that ``value`` breaks.
    """
    if isinstance(value, str):
        if value in METHODS:
            return value
        if value.startswith("type:") and value != "type:":
            _check_regex(value[len("type:") :], "what follows type:")
            return value
    elif isinstance(value, (list, tuple)):
        whole = all(isinstance(x, int) and not isinstance(x, bool) for x in value)
        if whole and len(value) >= 2 and value[0] == 0 and all(a < b for a, b in pairwise(value)):
            return tuple(value)
        raise ValueError("boundaries must be whole numbers that start at 0 and strictly increase, such as [0, 5, 9]")
    elif isinstance(value, Mapping):
        return _check_weights(value)
    names = ", ".join(f'"{name}"' for name in METHODS)
    near = difflib.get_close_matches(value, METHODS, n=1) if isinstance(value, str) else ()
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    raise ValueError(f'it must be {names}, "type:<regex>", weights {{"<regex>": weight}} or a list of boundaries{hint}')


def _check_weights(weights: Mapping[Any, Any]) -> dict[str, float]:
    for pattern, weight in weights.items():
        _check_regex(pattern, f"the key {show(pattern)}")
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"the weight of {show(pattern)} must be a finite number, at least 0")
    if not any(weights.values()):
        raise ValueError('at least one class must weigh more than 0, such as {"DecoderLayer": 1, "Head": 3}')
    return dict(weights)


def _check_regex(pattern: Any, what: str) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"{what} must be a regular expression over class names")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{what} must be a regular expression ({error})") from None


def _method(value: Any) -> Method | None:
    return None if value is None else check_method(value)


def _plain(value: Method | None) -> Any:
    """Serialize the method unchanged: pydantic would warn of boundaries, a list in JSON and a tuple here."""
    return value


def _profile_only_with_hetero(schema: dict[str, Any]) -> None:
    with_hetero = {"properties": {"method": {"enum": [HETERO]}}, "required": ["method"]}
    schema["dependentSchemas"] = {"profile": {"anyOf": [{"properties": {"profile": {"type": "null"}}}, with_hetero]}}


class PartitionConfig(Part):
    """Which items (embedding, decoder layers, head) each stage holds."""

    model_config = ConfigDict(json_schema_extra=_profile_only_with_hetero)

    method: Annotated[
        Method | None, PlainValidator(_method), PlainSerializer(_plain), WithJsonSchema(_METHOD_SCHEMA)
    ] = Field(
        default=None,
        description='"work": stages of about equally many floating-point operations, counted from the shapes of a '
        'Hugging Face model; "parameters": of equally many parameters; "uniform": of equally many decoder layers; '
        '"type:<regex>": of equally many layers whose class name matches; "hetero": of equally much time, from what '
        'the layers take and the devices can do; {"<regex>": weight, ...}: the first regular expression that the '
        "class name of an item matches gives its weight, none: 0; a list of boundaries over the items, one more than "
        'there are stages. Left out: "work"; of a PipelineModule, as it was built.',
    )
    repartition_every: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Steps from one look for a better partition to the next; layers then move while training goes "
        'on. 0: never. Left out: 100 with "hetero", otherwise 0.',
    )
    profile: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="hetero: a file of `paceline profile` with the times of the layers. Left out: they are measured "
        "at the start.",
    )
    memory_gib: Annotated[float, Field(gt=0, le=MOST_GIB, allow_inf_nan=False)] | None = Field(
        default=None,
        description="GiB of each device that a partition chosen by times may count on. Left out: what is free.",
    )

    @field_validator("profile")
    @classmethod
    def _belongs_to_hetero(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or "method" not in info.data or info.data["method"] == HETERO:
            return value
        method = info.data["method"]
        written = "left out" if method is None else show(method)
        raise ValueError(f'it belongs to the method "hetero" and the method is {written}; drop it, or write "hetero".')


def _long_form(value: Any) -> Any:
    return value if value is None or isinstance(value, (dict, PartitionConfig)) else {"method": value}


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _only_with_its_type(schema: dict[str, Any]) -> None:
    schema["dependentSchemas"] = {
        key: {
            "anyOf": [
                {"properties": {key: {"type": "null"}}},
                {"properties": {"type": {"enum": [*owners]}}, "required": ["type"]}
                if "adaptive" not in owners
                else {"properties": {"type": {"enum": [*owners, None]}}},
            ]
        }
        for key, owners in _TYPES_OF.items()
    }


def _or_plan(value: object, other: ValidatorFunctionWrapHandler) -> object:
    return value if value == PLAN else other(value)


if TYPE_CHECKING:
    NumberOrPlan: TypeAlias = int | Literal["plan"]
else:  # not a union, whose errors would name both
    NumberOrPlan = Annotated[
        int,
        Field(ge=1),
        WrapValidator(_or_plan),
        PlainSerializer(lambda value: value),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": PLAN}]}),
    ]

if TYPE_CHECKING:
    FlagOrPlan: TypeAlias = bool | Literal["plan"]
else:
    FlagOrPlan = Annotated[
        bool,
        WrapValidator(_or_plan),
        PlainSerializer(lambda value: value),
        WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": PLAN}]}),
    ]


def _or_mean(value: object, other: ValidatorFunctionWrapHandler) -> object:
    return value if value == MEAN else other(value)


if TYPE_CHECKING:
    QuantileOrMean: TypeAlias = float | Literal["mean"]
else:
    QuantileOrMean = Annotated[
        float,
        Field(ge=0.5, lt=1),
        WrapValidator(_or_mean),
        PlainSerializer(lambda value: value),
        WithJsonSchema({"anyOf": [{"const": MEAN}, {"type": "number", "minimum": 0.5, "exclusiveMaximum": 1}]}),
    ]


class ScheduleConfig(Part):
    """In which order each stage runs the forwards and backwards of a step.

    A micro-batch size other than the configured one cuts the same samples of a step otherwise. What a step computes
    stays the same up to rounding, except for what is defined per micro-batch: dropout, a router's auxiliary loss,
    dropped tokens. So the tuner keeps to the configured size unless ``micro_batch_sizes`` says more.
    """

    model_config = ConfigDict(json_schema_extra=_only_with_its_type)

    type: ScheduleType | None = Field(
        default=None,
        description='"1f1b", "gpipe"; "kfkb": 1F1B over groups of k micro-batches; "eager": 1F1B with a longer warm-up;'
        ' "adaptive": the fastest of them for what the network and the devices do, again and again; "interleaved": '
        "Megatron's 1F1B with several stages a rank, a shorter bubble for more messages; "
        '"dualpipev": DeepSpeed\'s order of two stages a rank, along the ranks and back; with backwards split into the '
        'gradients of inputs and of weights "zbh1" and "zbh2" (one stage a rank, a shorter bubble), "zbv" (two stages, '
        'the shortest bubble), "vhalf" and "vmin" (two stages, less memory than 1F1B); "generated": an order with '
        "split backwards that is found by simulating what was measured, within memory_gib, again and again; "
        '"multidirection": '
        "several pipelines in opposite orders over the same devices, without a flush at the end of a "
        'step; "one_direction": 1F1B without a flush. Left out: "adaptive"; without any schedule: "1f1b", or '
        '"adaptive" where stages are planned.',
    )
    k: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="kfkb: micro-batches of a group; more than a step has is as many. Left out: 2."
    )
    slack: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="eager: stage s of S begins with ceil((S - 1 - s) * (1 + slack)) forwards. Left out: 1.",
    )
    warmup: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_tuple)] = Field(
        default=None, description="eager: how many forwards each stage begins with, instead of slack; never increasing."
    )
    retune_every: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="adaptive, generated: steps from one choice to the next, at most; it comes at once if steps get "
        "shorter or longer. Left out: 100.",
    )
    micro_batch_sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(_tuple)] = Field(
        default=None,
        description="adaptive: micro-batch sizes that it may change to, beside the configured one; each divides the "
        "samples of a step. Left out: none, since what is defined per micro-batch (dropout, router losses) changes "
        "with it.",
    )
    memory_gib: Annotated[float, Field(gt=0, le=MOST_GIB, allow_inf_nan=False)] | None = Field(
        default=None,
        description="adaptive, generated: GiB that live activations, and what is left for later of split backwards, "
        "may take on each rank. Left out: nine tenths of what is free.",
    )
    chunks: NumberOrPlan | None = Field(
        default=None,
        description="Stages that each rank holds. interleaved: any number; adaptive and generated: 1, or 2, along the "
        'ranks and back; adaptive also "plan": what is faster, by what the ranks measure at the start. Left out: 2, '
        "with adaptive 1.",
    )
    directions: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="multidirection: pipelines P over the d devices of a stage each, so that every device holds P of d "
        "stages. 2: for every even d, the least weights on a device; d/2: for 2 devices and multiples of 4, the least "
        "idling. Left out: d/2 where it exists, otherwise 2.",
    )
    staleness: Annotated[int, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="multidirection: updates that may come between the forward and the backward of a micro-batch. 0: "
        "none, the directions are flushed at the end of each step. Left out: 1.",
    )
    optimizer_owners: Literal["direction", "mirror"] | None = Field(
        default=None,
        description='multidirection: who holds the optimizer states of a stage. "direction": the device that has it in '
        'the first direction; "mirror": all devices that have it, each an equal part. Left out: "direction".',
    )
    warm_in_steps: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="multidirection, one_direction, adaptive with late_gradients: updates over which the learning rate "
        "rises to what it is scheduled to be, since late gradients harm most while weights change fast. Left out: 0.",
    )
    correction: Literal["nesterov", "error_feedback"] | None = Field(
        default=None,
        description="multidirection, one_direction, adaptive with late_gradients: what makes up for late gradients, at "
        'the price of one tensor more for each parameter. "error_feedback": weights move by as much more as an update '
        "differs from the last one; "
        '"nesterov": by that times the optimizer\'s momentum. Left out: nothing.',
    )

    risk: QuantileOrMean | None = Field(
        default=None,
        description="adaptive: where the times of messages vary, schedules are compared by this quantile of their step "
        "(0.9: what nine of ten steps stay below), replayed over the times that were measured. Left out: by the "
        '"mean".',
    )
    late_gradients: bool | None = Field(
        default=None,
        description='adaptive: it may also choose "one_direction", whose gradients come late: losses and weights then '
        "depend on what it chooses. Left out: false, they do not.",
    )

    @field_validator(*_TYPES_OF)
    @classmethod
    def _belongs_to_the_type(cls, value: Any, info: ValidationInfo) -> Any:
        key = str(info.field_name)
        if value is None or "type" not in info.data:
            return value
        written, owners = info.data["type"] or "adaptive", _TYPES_OF[key]
        if written not in owners:
            types, one = ("type", f'"{owners[0]}"') if len(owners) == 1 else ("types", "one of them")
            *most, last = (f'"{owner}"' for owner in owners)
            named = f"{', '.join(most)} and {last}" if most else last
            raise ValueError(f'it belongs to the {types} {named} and the type is "{written}"; drop it, or write {one}.')
        return value

    @field_validator("chunks")
    @classmethod
    def _is_planned_for_the_tuner(cls, value: Any, info: ValidationInfo) -> Any:
        if value == PLAN and info.data.get("type") not in (None, "adaptive"):
            raise ValueError(f'it is planned for the type "adaptive" and the type is "{info.data["type"]}"; write 2.')
        return value

    @field_validator("warmup")
    @classmethod
    def _never_increases(cls, value: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        if value is None:
            return value
        if info.data.get("slack") is not None:
            raise ValueError(f"it says what slack {show(info.data['slack'])} says too; drop one of them.")
        # A stage that waits for backwards before it has sent what the next one begins with would wait for ever.
        if any(a < b for a, b in pairwise(value)):
            raise ValueError("the numbers must never increase from one stage to the next; write such as [4, 2, 1, 0].")
        return value


def _schedule_long_form(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


def _compile_long_form(value: Any) -> Any:
    return ({} if value else None) if isinstance(value, bool) else value


def _allow_true_or_false(schema: dict[str, Any]) -> None:
    schema["anyOf"].insert(0, {"type": "boolean"})


def _allow_short_methods(schema: dict[str, Any]) -> None:
    schema["anyOf"][:0] = _SHORT_METHODS


def _allow_short_form(schema: dict[str, Any]) -> None:
    schema["anyOf"].insert(0, {"enum": list(get_args(ScheduleType))})


class PipelineConfig(Part):
    """How the model is cut into stages, and in which order they compute."""

    stages: NumberOrPlan | None = Field(
        default=None,
        description='Number of pipeline stages; it divides the number of ranks. "plan": the fastest, by what the ranks '
        'measure at the start. Left out: "plan" in the job, elsewhere the fewest that fit.',
    )
    partition: Annotated[PartitionConfig | None, BeforeValidator(_long_form)] = Field(
        default=None,
        description='Which items each stage holds: a method, or {"method": ...}. Left out: "work", or '
        '"hetero" where stages are planned and devices unequal.',
        json_schema_extra=_allow_short_methods,
    )
    half_layers: FlagOrPlan = Field(
        default=False,
        description="Decoder layers of a Hugging Face model may be cut in two, between attention and MLP, so that "
        "stages come closer to equal work: items are then the embedding, twice as many halves of layers, and the head. "
        '"plan": where that makes a step shorter, by what the ranks measure at the start. Left out: "plan" in the job '
        "where it plans the stages, elsewhere false.",
    )
    head_slices: NumberOrPlan = Field(
        default=1,
        description="The head of a Hugging Face model is cut into so many slices, each with a run of the vocabulary's "
        "rows, for stages to share where it is more work than one: items are then the embedding, the layers, and the "
        'slices. "plan": 16 where that makes a step shorter, by what the ranks measure at the start. Left out: "plan" '
        "in the job where it plans the stages, elsewhere 1, the last stage has the whole head.",
    )
    schedule: Annotated[ScheduleConfig | None, BeforeValidator(_schedule_long_form)] = Field(
        default=None,
        description='In which order each stage computes: a type, or {"type": ...}. Left out: "1f1b", as DeepSpeed, or '
        '"adaptive" with planned stages.',
        json_schema_extra=_allow_short_form,
    )
    recompute: Annotated[
        Recompute | None,
        PlainValidator(check_recompute),
        PlainSerializer(lambda value: value),
        WithJsonSchema(RECOMPUTE_SCHEMA),
    ] = Field(
        default=None,
        description="How many decoder layers of each stage, from its first, have their activations computed again in "
        'the backward: "fit": as few as it takes for the stage to fit into memory; a number for all stages; or a list, '
        "one a stage. Activations that then have room are kept all the same. Left out: none, or all with gradient "
        'checkpointing; where stages are planned "fit", if nothing fits otherwise.',
    )
    compile: Annotated[CompileConfig | None, BeforeValidator(_compile_long_form)] = Field(
        default=None,
        description="Compile each decoder layer with torch.compile: true, or its arguments. Numbers stay the same up "
        "to rounding, without dropout. Left out: false.",
        json_schema_extra=_allow_true_or_false,
    )
    boundary: BoundaryConfig | None = Field(
        default=None,
        description="In which formats activations and gradients travel between stages. Left out: as they are; no "
        "number changes.",
    )

    unequal_replicas: UnequalReplicasConfig | None = Field(
        default=None,
        description="Pipelines side by side take unequal shares of a step's micro-batches, by how fast they are. Left "
        "out: equal ones.",
    )

    @field_validator("boundary")
    @classmethod
    def _is_chosen_by_adaptive(cls, value: BoundaryConfig | None, info: ValidationInfo) -> BoundaryConfig | None:
        if value is None or value.allowed is None or "schedule" not in info.data:
            return value
        schedule: ScheduleConfig | None = info.data["schedule"]
        kind = "1f1b" if schedule is None else schedule.type or "adaptive"
        if schedule is None or kind != "adaptive":
            raise ValueError(
                f'allowed is for the schedule "adaptive", which chooses, and the schedule is "{kind}": write '
                '"forward" and "backward", or "schedule": "adaptive".'
            )
        if schedule.micro_batch_sizes is not None:
            raise ValueError(
                "allowed has the format chosen for one micro-batch size, and micro_batch_sizes names others: drop one "
                "of them."
            )
        partition: PartitionConfig | None = info.data.get("partition")
        if partition is not None and (partition.method == HETERO or partition.repartition_every):
            raise ValueError(
                'allowed has the format chosen for the partition that there is, and layers move: write "forward" and '
                '"backward", or "repartition_every": 0 with another method than "hetero".'
            )
        if schedule.late_gradients:
            raise ValueError(
                "allowed has the format change between two steps, and with late_gradients there is none without "
                'micro-batches under way: write "forward" and "backward", or drop late_gradients.'
            )
        return value


class ReportConfig(Part):
    """What a run tells about itself."""

    metrics: bool = Field(
        default=True, description="Write metrics every --logging_steps (loss, speed, memory, time per stage)."
    )
    html: bool = Field(
        default=True,
        description="Write report.html and report.json at the end of the job, and record for them the steps before and "
        "after each switch, or the last step where nothing switches.",
    )
    trace_every: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Record the timeline of every so many steps in trace/ of the output directory, for `paceline "
        "trace`. Left out: of none.",
    )


class MoeConfig(Part):
    """Which device holds which experts, and how that follows the load."""

    rebalance_every: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Steps from one look for a better placement to the next; experts then move while training goes "
        "on. 0: never. Left out: 50.",
    )
    replicas: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Further slots of each device, for copies of experts that are much in demand. Left out: 0.",
    )
    splitting: Literal["even", "planned", "fresh"] | None = Field(
        default=None,
        description='How the copies of an expert share its tokens: "even"; "planned": by the loads that the placement '
        'was made for; "fresh": by the loads of each batch, which the devices tell each other. Left out: "even".',
    )
    loads_file: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="File that the loads of the experts are appended to at each look, for `paceline loads`. Left out: "
        "the job writes expert_loads.jsonl in its output directory; another script none.",
    )

    @field_validator("splitting")
    @classmethod
    def _belongs_to_copies(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and "replicas" in info.data and not info.data["replicas"]:
            raise ValueError('it says how copies share tokens and there are none; drop it, or write "replicas": 1.')
        return value


class PacelineConfig(Part):
    """The section, whole. A part that is absent has all its values chosen."""

    pipeline: PipelineConfig = Field(default=PipelineConfig(), description="How the model is cut into stages.")
    moe: MoeConfig | None = Field(
        default=None, description="Experts that follow the load. Left out: they stay where DeepSpeed puts them."
    )
    natural_gradient: NaturalGradientConfig | None = Field(
        default=None, description="Natural gradients of linear layers. Left out: ordinary ones."
    )
    max_change: MaxChangeConfig | None = Field(
        default=None,
        description="How far parameters may move in one update; {} for 0.75 a layer, 1.5 the head, 2.0 in all. Left "
        "out: any distance.",
    )
    averaging: AveragingConfig | None = Field(
        default=None, description="Islands that average their parameters. Left out: the job is alone."
    )
    report: ReportConfig = Field(default=ReportConfig(), description="What a run tells about itself.")

    @field_validator("max_change")
    @classmethod
    def _is_said_once(cls, value: MaxChangeConfig | None, info: ValidationInfo) -> MaxChangeConfig | None:
        natural = info.data.get("natural_gradient")
        if value is not None and natural is not None and natural.max_change is not None:
            raise ValueError("natural_gradient.max_change says it too; drop one of them.")
        return value

    @property
    def limits(self) -> MaxChangeConfig | None:
        """Limits of an update's size, wherever they are written."""
        natural = self.natural_gradient
        return self.max_change or (None if natural is None else natural.max_change)

    @classmethod
    def of(cls, ds_config: Mapping[str, Any]) -> PacelineConfig:
        """The section of a whole DeepSpeed config.

        Raises:
            ValueError: one line with the path, the value, the rule and the remedy.
        """
        check_its_name(ds_config)
        section = ds_config.get(SECTION, {})
        if not isinstance(section, Mapping):
            raise ValueError(f"{SECTION} is {show(section)}: it must be an object; leave it out or write {{}}.")
        _refuse_unknown(section, cls, SECTION)
        try:
            return cls.model_validate(dict(section))
        except ValidationError as invalid:
            raise ValueError(_one_line(invalid)) from None


def check_its_name(ds_config: Mapping[str, Any]) -> None:
    """Raise ValueError if a key of a whole DeepSpeed config is the section's name, misspelt: all would be lost."""
    names = [str(name) for name in ds_config if not str(name).startswith("_")]  # which takes a section out
    if SECTION not in names and (near := difflib.get_close_matches(SECTION, names, 1, _MISSPELT)):
        raise ValueError(f'"{near[0]}" is not a key that DeepSpeed reads: did you mean "{SECTION}"?')


def _refuse_unknown(section: Mapping[str, Any], model: type[BaseModel], path: str) -> None:
    for key, value in section.items():
        if key not in model.model_fields:
            raise ValueError(_unknown(key, model, path, section))
        if value == "auto":
            raise ValueError(
                f'{path}.{key} is "auto": the {SECTION} section has no "auto"; leave the key out to have it chosen.'
            )
        inner = _inner(model, key)
        if inner is not None and isinstance(value, Mapping):
            _refuse_unknown(value, inner, f"{path}.{key}")


def _unknown(key: str, model: type[BaseModel], path: str, section: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, model.model_fields, n=1)
    if not near:
        # A right key in the wrong place: "stages" beside "pipeline" instead of in it.
        elsewhere = {p.rpartition(".")[2]: p for p in _paths(PacelineConfig, SECTION)}
        near = [elsewhere[k] for k in difflib.get_close_matches(key, elsewhere, n=1)]
    hint = f'; did you mean "{near[0]}"?' if near else "."
    if not near and model is PartitionConfig and isinstance(section[key], (int, float)):
        weights = {name: value for name, value in section.items() if name not in model.model_fields}
        hint = f'; if these are weights of layer classes, write {{"method": {show(weights)}}}.'
    valid = ", ".join(f'"{k}"' for k in sorted(model.model_fields))
    return f"{path}.{key} is not a key of this version of paceline{hint} Valid keys of {path}: {valid}."


def _paths(model: type[BaseModel], path: str) -> Iterator[str]:
    for key in model.model_fields:
        yield f"{path}.{key}"
        inner = _inner(model, key)
        if inner is not None:
            yield from _paths(inner, f"{path}.{key}")


def _inner(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    annotation = model.model_fields[key].annotation
    kinds = (annotation, *get_args(annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _one_line(invalid: ValidationError) -> str:
    error = invalid.errors()[0]
    path = ".".join([SECTION, *(str(part) for part in error["loc"])])
    if error["type"] in ("model_type", "dict_type"):
        return f"{path} is {show(error['input'])}: it must be an object; leave it out or write {{}}."
    if error["type"] == "missing":
        parent, _, key = path.rpartition(".")
        return f'{parent} has no "{key}", which it needs: write it, or leave {parent} out.'
    rule = error["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    rule = rule.replace("a valid tuple", "a list").replace("String should", "it must")
    if error["type"] == "too_short":
        rule = f"it must have {error['ctx']['min_length']} entries or more"
    remedy = "" if rule.endswith(".") else "; leave the key out to have it chosen."
    return f"{path} is {show(error['input'])}: {rule}{remedy}"


def whole(path: str, value: Any) -> int:
    """``value`` if it is a whole number of at least 1, else a ValueError that names ``path``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{path} is {show(value)}: it must be a whole number, at least 1; leave the key out to have it chosen."
        )
    return value


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, ``None`` where there is none."""
    node: Any = config
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def show(value: Any) -> str:
    """A value as the JSON has it, for error messages; of a long one the beginning."""
    try:
        text = json.dumps(value, default=repr)
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        return f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
