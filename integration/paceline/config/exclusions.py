"""One table of features that exclude each other; the config check, the engines and `README.md` here use it.

A row says which two, why, and what to do instead. Its ground tells whether the exclusion is for good: mathematics and
upstream stay, the others may go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..schedules.asynchronous import MULTIDIRECTION, ONE_DIRECTION, STREAMS
from .recompute_keys import FIT
from .section import HETERO, PLAN, SECTION, PacelineConfig, show, value_at
from .stage_counts import head_slices, may_be_late, resolve_method, schedule_type

MATHEMATICS, UPSTREAM, NOT_BUILT = "mathematics", "upstream", "not built"
GROUNDS = {
    MATHEMATICS: "the two contradict each other",
    UPSTREAM: "DeepSpeed or torch does not have it",
    NOT_BUILT: "nothing but our own code is in the way",
}

PIPELINE, LAYERS = "a pipeline", "a `PipelineModule` of one's own"
UNEQUAL = "unequal replicas"
HALVES = "half_layers"
HEAD = "head_slices"
COMPILED = "compile"
ROUTER_LOSS = "a router's loss"
RECOMPUTED = "activation checkpointing of a model with experts"
SLICED, EXPERTS = "tensor parallelism in a pipeline", "a model with experts"


@dataclass(frozen=True)
class Features:
    """The features of a run, of which some exclude each other.

    Args:
        config: the DeepSpeed JSON.
        section: its ``"paceline"`` section.
        is_pipeline: whether stages run it, or DeepSpeed's own engine.
        expert_parallel: ranks that share the experts of a stage.
        tensor_parallel: ranks that have slices of a stage's layers, where it has been taken out of ``config``.
    """

    config: Mapping[str, Any]
    section: PacelineConfig
    is_pipeline: bool = True
    expert_parallel: int = 1
    tensor_parallel: int = 1

    def written(self, feature: str) -> str | None:
        """How a feature is written here, ``"key is value"``; None: it is not asked for."""
        return FEATURES[feature](self)


_Finder = Callable[[Features], str | None]


def _schedule(*kinds: str) -> _Finder:
    def find(features: Features) -> str | None:
        kind = schedule_type(features.section)
        if ONE_DIRECTION in kinds and may_be_late(features.section):
            return f"{SECTION}.pipeline.schedule.late_gradients is true"
        return f"{SECTION}.pipeline.schedule.type {show(kind)}" if kind in kinds else None

    return find


def _part(name: str) -> _Finder:
    return lambda features: None if getattr(features.section, name) is None else f"{SECTION}.{name} is there"


def _key(path: str, asks: Callable[[Any], bool] = lambda value: value is True) -> _Finder:
    def find(features: Features) -> str | None:
        value = value_at(features.config, path)
        return f"{path} is {show(value)}" if asks(value) else None

    return find


def _first(*finders: _Finder) -> _Finder:
    return lambda features: next((text for find in finders if (text := find(features)) is not None), None)


def _is_many(value: Any) -> bool:
    return value is True or (isinstance(value, int) and value > 1)


def _is_elsewhere(value: Any) -> bool:
    return value not in (None, "none")


def _zero(*stages: int) -> _Finder:
    def find(features: Features) -> str | None:
        zero = features.config.get("zero_optimization")
        stage = zero.get("stage", 0) if isinstance(zero, Mapping) else zero
        return f"zero_optimization.stage is {show(stage)}" if stage in stages else None

    return find


def _known_later(features: Features) -> None:
    """Known with the model: who sees it takes the message from :func:`exclusion`."""


def _plain_experts(features: Features) -> str | None:
    size = value_at(features.config, "expert_parallel.autoep_size")
    is_spread = not features.is_pipeline and value_at(features.config, "expert_parallel.enabled") and _is_many(size)
    return f"expert_parallel.autoep_size is {show(size)}" if is_spread else None


def _half_autocast(features: Features) -> str | None:
    dtype = value_at(features.config, "torch_autocast.dtype")
    if not value_at(features.config, "torch_autocast.enabled") or str(dtype).lower() in ("bf16", "bfloat16"):
        return None
    return f"torch_autocast.dtype is {show(dtype)}"


def _unequal_replicas(features: Features) -> str | None:
    is_there = features.is_pipeline and features.section.pipeline.unequal_replicas is not None
    return f"{SECTION}.pipeline.unequal_replicas is there" if is_there else None


def _recompute(features: Features) -> str | None:
    value = features.section.pipeline.recompute if features.is_pipeline else None
    written = list(value) if isinstance(value, tuple) else value
    return None if value is None else f"{SECTION}.pipeline.recompute is {show(written)}"


def _half_layers(features: Features) -> str | None:
    is_there = features.is_pipeline and features.section.pipeline.half_layers is True
    return f"{SECTION}.pipeline.half_layers is true" if is_there else None


def _head_slices(features: Features) -> str | None:
    slices = head_slices(features.section)
    return f"{SECTION}.pipeline.head_slices is {slices}" if features.is_pipeline and slices > 1 else None


def _hetero(features: Features) -> str | None:
    method, path = resolve_method(features.section, features.config)
    return f"{path} is {show(method)}" if method == HETERO else None


def _planned(features: Features) -> str | None:
    pipeline = features.section.pipeline
    keys = {"stages": pipeline.stages, "half_layers": pipeline.half_layers, "recompute": pipeline.recompute}
    keys["head_slices"] = pipeline.head_slices
    keys["schedule.chunks"] = None if pipeline.schedule is None else pipeline.schedule.chunks
    found = next((key for key, value in keys.items() if value in (PLAN, FIT)), None)
    return None if found is None else f"{SECTION}.pipeline.{found} is {show(keys[found])}"


def _compile(features: Features) -> str | None:
    is_there = features.is_pipeline and features.section.pipeline.compile is not None
    return f"{SECTION}.pipeline.compile is there" if is_there else None


def _other_sizes(features: Features) -> str | None:
    schedule = features.section.pipeline.schedule
    sizes = None if schedule is None else schedule.micro_batch_sizes
    return None if sizes is None else f"{SECTION}.pipeline.schedule.micro_batch_sizes is {show(list(sizes))}"


def _spread_experts(features: Features) -> str | None:
    size = features.expert_parallel
    return f"expert_parallel.autoep_size is {size}" if size > 1 else None


def _sliced_layers(features: Features) -> str | None:
    if not features.is_pipeline:
        return None
    if features.tensor_parallel > 1:
        return f"tensor_parallel.autotp_size is {features.tensor_parallel}"
    return _key("tensor_parallel.autotp_size", _is_many)(features)


def _limits(features: Features) -> str | None:
    if features.section.limits is None:
        return None
    where = "max_change" if features.section.max_change is not None else "natural_gradient.max_change"
    return f"{SECTION}.{where} is there"


_BF16 = _first(_key("bf16.enabled"), _key("bfloat16.enabled"))
_UNTESTED = (
    *("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", "fp16.fp16_master_weights_and_grads"),
    *("hybrid_engine.enabled", "sequence_parallel_size"),
    "zero_optimization.cpu_offload",
)
_OFFLOADS = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
NO_FLUSH = '"multidirection" or "one_direction"'

FEATURES: dict[str, _Finder] = {
    PIPELINE: lambda features: "" if features.is_pipeline else None,
    LAYERS: _known_later,
    NO_FLUSH: _schedule(*STREAMS),
    '"multidirection"': _schedule(MULTIDIRECTION),
    '"one_direction"': _schedule(ONE_DIRECTION),
    "expert_parallel": _spread_experts,
    UNEQUAL: _unequal_replicas,
    "micro_batch_sizes": _other_sizes,
    "recompute": _recompute,
    HALVES: _half_layers,
    HEAD: _head_slices,
    '"hetero"': _hetero,
    '"plan" or "fit"': _planned,
    COMPILED: _compile,
    "flops_profiler": _key("flops_profiler.enabled"),
    "activation_checkpoint_interval": _key("pipeline.activation_checkpoint_interval", bool),
    **{name: _part(name) for name in ("moe", "natural_gradient", "averaging")},
    "max_change": _limits,
    "torch_autocast": _key("torch_autocast.enabled"),
    "torch_autocast other than bfloat16": _half_autocast,
    "fp16": _key("fp16.enabled"),
    "bf16": _BF16,
    "ZeRO 2 or 3": _zero(2, 3),
    "ZeRO 3": _zero(3),
    "offload": _first(*(_key(path, _is_elsewhere) for path in _OFFLOADS)),
    "hybrid_engine": _key("hybrid_engine.enabled", bool),
    "sequence parallelism": _key("sequence_parallel_size", _is_many),
    "unmanaged accumulation": _key("managed_gradient_accumulation", lambda value: value is False),
    "AutoEP's layers": _key("expert_parallel.enabled", bool),
    **{path: _key(path, _is_many) for path in _UNTESTED},
    "ZenFlow": _key("zero_optimization.zenflow", bool),
    "tensor parallelism": _key("tensor_parallel.autotp_size", _is_many),
    SLICED: _sliced_layers,
    "experts on several ranks without a pipeline": _plain_experts,
    "adapters": _known_later,
    ROUTER_LOSS: _known_later,
    RECOMPUTED: _known_later,
    EXPERTS: _known_later,
}
"""By name, how a feature is found and quoted."""


@dataclass(frozen=True)
class Exclusion:
    """Two features that do not go together.

    Args:
        first, second: names in :data:`FEATURES`, in the order in which a message quotes them.
        reason: the rule that they break.
        remedy: what to write instead.
        ground: in :data:`GROUNDS`.
    """

    first: str
    second: str
    reason: str
    remedy: str
    ground: str

    def message(self, *written: str) -> str:
        """One line with values, rule and remedy.

        Args:
            written: how the features are written, ``"key is value"``.
        """
        return f"{' and '.join(text for text in written if text)}: {self.reason}; {self.remedy}."


_OTHER_SCHEDULE = "or take another schedule"


def _in_a_pipeline(ground: str, feature: str, reason: str, remedy: str = "leave it out") -> Exclusion:
    return Exclusion(feature, PIPELINE, reason, remedy, ground)


_NO_MOE = 'leave "moe" out of "paceline"'
EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion("fp16", "bf16", "a run has one of them", "turn one off", MATHEMATICS),
    _in_a_pipeline(
        UPSTREAM, "ZeRO 2 or 3", "DeepSpeed has pipelines, also of one stage, with ZeRO 0 and 1 only", "write 1"
    ),
    *(_in_a_pipeline(NOT_BUILT, path, "this version has no pipelines with it") for path in _UNTESTED),
    _in_a_pipeline(MATHEMATICS, "unmanaged accumulation", "a pipeline's step has all of its micro-batches"),
    _in_a_pipeline(
        UPSTREAM, "AutoEP's layers", "a PipelineModule's own layers cannot be spread, those of a Hugging Face model can"
    ),
    _in_a_pipeline(
        *(NOT_BUILT, "offload", "pipelines keep their states on the devices"),
        remedy='write "none", and take more stages or ZeRO 1 if they do not fit',
    ),
    _in_a_pipeline(
        *(NOT_BUILT, "torch_autocast other than bfloat16", "pipelines scale no loss for it"),
        remedy='write "bfloat16", or use fp16',
    ),
    Exclusion(
        "torch_autocast",
        NO_FLUSH,
        "backwards would use copies of weights that an update has replaced",
        f"write bf16 instead, {_OTHER_SCHEDULE}",
        UPSTREAM,
    ),
    Exclusion(
        "fp16",
        '"one_direction"',
        "the backwards of two steps overlap, so that there is no one loss scale",
        f"write bf16 instead, {_OTHER_SCHEDULE}",
        MATHEMATICS,
    ),
    Exclusion(
        "adapters",
        "expert_parallel",
        "adapters are trained where every rank of a stage has all its experts",
        "leave expert_parallel out",
        NOT_BUILT,
    ),
    *(
        Exclusion(part, "hybrid_engine", "that is an engine of its own", "leave one of them out", UPSTREAM)
        for part in ("moe", "natural_gradient", "max_change", "averaging")
    ),
    Exclusion(
        "moe",
        "ZeRO 3",
        "ZeRO 3 cuts experts over their replicas",
        f"write stage 0, 1 or 2, or {_NO_MOE}",
        NOT_BUILT,
    ),
    Exclusion(
        "moe",
        "offload",
        "experts do not move to and from the memory that states are offloaded to",
        f"leave it out, or {_NO_MOE}",
        NOT_BUILT,
    ),
    Exclusion(
        "moe",
        "sequence parallelism",
        "experts move between ranks that see whole samples",
        f"write 1, or {_NO_MOE}",
        NOT_BUILT,
    ),
    Exclusion(
        "max_change",
        "offload",
        "changes are limited where the masters are on the device",
        "leave offload_optimizer and offload_param out of zero_optimization, or leave max_change out",
        NOT_BUILT,
    ),
    *(
        Exclusion("max_change", feature, "changes are not limited with it", "leave one of them out", NOT_BUILT)
        for feature in ("ZenFlow", "tensor parallelism")
    ),
    Exclusion(
        "averaging",
        "experts on several ranks without a pipeline",
        "islands average parameters by their names, which experts have in a pipeline only",
        'use a pipeline ("paceline": {"pipeline": {}}), or leave expert_parallel out',
        NOT_BUILT,
    ),
    Exclusion(
        "averaging",
        "ZenFlow",
        "it steps some of the weights without their masters, which is what islands average",
        "leave one of them out",
        NOT_BUILT,
    ),
    Exclusion(
        "averaging",
        "tensor parallelism",
        "islands average whole parameters, and ranks have slices of them",
        'write 1, or use a pipeline instead ("paceline": {"pipeline": {}})',
        NOT_BUILT,
    ),
    Exclusion(
        RECOMPUTED,
        NO_FLUSH,
        "what is computed again, with weights that are an update newer, sends tokens to other experts than the forward "
        "has (not with staleness 0)",
        f"leave activation checkpointing out, {_OTHER_SCHEDULE}",
        MATHEMATICS,
    ),
    Exclusion(
        UNEQUAL,
        "expert_parallel",
        "replicas that share their experts compute each micro-batch together",
        "leave one of them out",
        MATHEMATICS,
    ),
    Exclusion(
        UNEQUAL,
        NO_FLUSH,
        "steps run into each other, and all have the same micro-batches",
        f"leave unequal_replicas out, {_OTHER_SCHEDULE}",
        NOT_BUILT,
    ),
    Exclusion(
        UNEQUAL,
        "micro_batch_sizes",
        "each replica's samples would have to be cut in another way",
        "leave one of them out",
        NOT_BUILT,
    ),
    Exclusion(
        "recompute",
        "activation_checkpoint_interval",
        "one says which layers are recomputed, the other that all are",
        "drop one of them",
        MATHEMATICS,
    ),
    Exclusion(
        "recompute",
        LAYERS,
        "of one's own layers DeepSpeed recomputes all",
        'write "activation_checkpoint_interval": 1 in "pipeline" instead',
        UPSTREAM,
    ),
    Exclusion(HALVES, LAYERS, "one's own layers are cut where they are listed", "leave half_layers out", MATHEMATICS),
    Exclusion(HEAD, LAYERS, "one's own head is cut where it is listed", "leave head_slices out", MATHEMATICS),
    Exclusion(
        HEAD,
        ROUTER_LOSS,
        "the sums of the head travel where those of the experts would",
        "leave head_slices out, or write output_router_logits false in the model's config",
        NOT_BUILT,
    ),
    *(
        Exclusion(HEAD, feature, reason, "leave one of them out", NOT_BUILT)
        for feature, reason in (
            (NO_FLUSH, "slices were tried with steps that end in a flush only"),
            ('"hetero"', "times and moves are known of a whole head only"),
            ('"plan" or "fit"', "what stages take is predicted with a whole head only"),
            ("natural_gradient", "factors of the gradients are those of a whole layer"),
            ("max_change", "changes are limited by whole layers"),
        )
    ),
    *(
        Exclusion(SLICED, feature, reason, "leave one of them out", NOT_BUILT)
        for feature, reason in (
            (NO_FLUSH, "slices of layers were tried with steps that end in a flush only"),
            ("expert_parallel", "experts are not sliced, nor what is around them"),
            (UNEQUAL, "replicas were compared with whole layers only"),
            (HALVES, "layers in slices are cut between whole layers only"),
            (HEAD, "ranks with slices of a stage share the head already"),
            ('"hetero"', "times and moves are known of whole layers only"),
            ('"plan" or "fit"', "what stages take is predicted with whole layers only"),
            (COMPILED, "what passes between slices passes in hooks"),
            ("natural_gradient", "factors of the gradients are those of a whole layer"),
            ("max_change", "changes are limited by whole layers"),
        )
    ),
    Exclusion(
        SLICED,
        EXPERTS,
        "experts are not sliced, nor what is around them",
        "leave autotp_size out, and take expert_parallel",
        NOT_BUILT,
    ),
    Exclusion(
        SLICED,
        LAYERS,
        'one\'s own layers are sliced by themselves, over the axis "model" of the topology',
        "leave autotp_size out",
        MATHEMATICS,
    ),
    Exclusion(
        COMPILED,
        "flops_profiler",
        "it counts calls of functions, and a graph has none",
        "profile without compile, the operations are the same",
        UPSTREAM,
    ),
    Exclusion(
        COMPILED,
        LAYERS,
        "it compiles the decoder layers of Hugging Face models",
        "leave compile out, and call compile() of the layers before they are listed",
        UPSTREAM,
    ),
    Exclusion(UNEQUAL, LAYERS, "shares are for Hugging Face models", "leave unequal_replicas out", NOT_BUILT),
    Exclusion(NO_FLUSH, LAYERS, "these schedules are for Hugging Face models", "choose another schedule", NOT_BUILT),
)
"""Rows in the order in which they are checked."""


def exclusion(first: str, second: str) -> Exclusion:
    """The row of two features, in any order."""
    return next(row for row in EXCLUSIONS if {row.first, row.second} == {first, second})


def excluded(features: Features) -> Iterator[str]:
    """Messages of the rows that a run breaks, in the order of the table."""
    for row in EXCLUSIONS:
        first, second = features.written(row.first), features.written(row.second)
        if first is not None and second is not None:
            yield row.message(first, second)


def check_exclusions(features: Features) -> None:
    """Raise ValueError for the first row that a run breaks: one line with values, rule and remedy."""
    for message in excluded(features):
        raise ValueError(message)


def markdown() -> str:
    """The table of `README.md`."""
    lines = ["| | does not go with | because | instead | ground |", "|---|---|---|---|---|"]
    for row in EXCLUSIONS:
        lines.append(f"| {row.first} | {row.second} | {row.reason} | {row.remedy} | {row.ground} |")
    return "\n".join(lines)
