"""Memory of a pipeline stage: states of its parameters, live activations, and working buffers.

The arithmetic of :class:`paceline.optim.sharded.ShardedOptimizer` and of the engine's buffers, without either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, NamedTuple

MOMENTS = {
    **dict.fromkeys(("adagrad", "rmsprop", "lion", "muon"), 1),
    **dict.fromkeys(("adam", "adamw", "adamax", "nadam", "radam", "adadelta", "asgd", "rprop", "lamb"), 2),
}
"""Numbers that an optimizer keeps for each parameter beside its master."""

MASTER_BYTES = 4

HALF = ("bf16", "bfp16", "fp16")
"""Names of DeepSpeed's for dtypes of two bytes."""


@dataclass(frozen=True)
class States:
    """The form in which the states of a parameter are kept.

    Args:
        weight_bytes: of one number of the model: 4 for fp32, 2 for bf16 and fp16.
        gradient_bytes: of one number of the accumulated gradients; None for 4.
        data_parallel: ranks that hold the same parameters.
        shard: ZeRO 1: masters and moments are spread over these ranks.
        num_moments: that the optimizer keeps for each parameter, in fp32.
        beside: updates are made beside the computation: masters have memory of their own whatever the weights are.
        gradient_sets: steps whose gradients are kept at a time.
        owned: share of the masters and moments that is here, before it is spread over the data-parallel ranks.
        trained: share of the parameters that is trained: with adapters only they have gradients, masters and moments.
        sent_bytes: of one number of the gradients on their way between replicas; None for what ``gradient_bytes`` says,
            or ``weight_bytes`` where it says nothing.
        overlaps: gradients are on their way during the last backward.
    """

    weight_bytes: int = MASTER_BYTES
    gradient_bytes: int | None = None
    data_parallel: int = 1
    shard: bool = False
    num_moments: int = 2
    beside: bool = False
    gradient_sets: int = 1
    owned: float = 1.0
    trained: float = 1.0
    sent_bytes: int | None = None
    overlaps: bool = True

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes of one number of the gradients on their way."""
        return self.sent_bytes or self.gradient_bytes or self.weight_bytes

    @classmethod
    def from_config(cls, ds_config: Mapping[str, Any], data_parallel: int) -> States:
        """Read the states that a DeepSpeed JSON asks of the pipelines' optimizer."""
        half = any(_object(ds_config, name).get("enabled") is True for name in ("bf16", "bfloat16", "fp16"))
        zero = ds_config.get("zero_optimization", {})
        optimizer = _object(ds_config, "optimizer")
        accumulated = _object(ds_config, "data_types").get("grad_accum_dtype")
        sent = ds_config.get("communication_data_type") or accumulated
        schedule = _object(_object(ds_config, "paceline"), "pipeline").get("schedule")
        named = schedule if isinstance(schedule, Mapping) else {"type": schedule}
        return cls(
            weight_bytes=2 if half else MASTER_BYTES,
            gradient_bytes=2 if accumulated in HALF else None,
            data_parallel=data_parallel,
            shard=(zero.get("stage", 0) if isinstance(zero, Mapping) else int(zero)) == 1,
            num_moments=num_moments(optimizer.get("type"), optimizer.get("params")) + bool(named.get("correction")),
            beside=named.get("type") == "one_direction"
            or (named.get("type") == "multidirection" and named.get("staleness") != 0),
            gradient_sets=2 if named.get("type") == "one_direction" else 1,
            sent_bytes=None if sent is None else 2 if sent in HALF else MASTER_BYTES,
            overlaps=_object(ds_config, "zero_optimization").get("overlap_comm") is not False,
        )

    def of(
        self, num_parameters: int, elsewhere: int = 0, empty: int = 0, copied: int = 0
    ) -> tuple[float, float, float, float]:
        """Bytes of (weights, gradients, masters, moments) for so many parameters, on each rank.

        Args:
            elsewhere: those of them that are on other ranks only, of experts that replicas share. Each rank holds as
                many, and with ZeRO 1 the states of all are spread over all replicas in any case.
            empty: parameters for which the ranks that share experts have room together, and no expert.
            copied: for which a rank has room for copies of experts besides: values, and gradients in fp32 until the
                last backward of a step, and no states.

        Where updates are made between steps, fp32 weights are their own masters. With ZeRO 1 the rows of one parameter
        that a rank owns are whole, so a rank may have a little more or less than its share.
        """
        here = num_parameters - elsewhere
        trained = self.trained * here
        dealt = self.trained * (num_parameters + empty) if self.shard else trained
        owned = self.owned * dealt / (self.data_parallel if self.shard else 1)
        has_masters = self.beside or self.weight_bytes < MASTER_BYTES
        masters = MASTER_BYTES * owned if has_masters else 0.0
        return (
            float(self.weight_bytes * (here + copied)),
            float((self.gradient_bytes or MASTER_BYTES) * trained * self.gradient_sets)
            + MASTER_BYTES * self.trained * copied,
            masters,
            self.num_moments * MASTER_BYTES * owned,
        )


def _object(ds_config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = ds_config.get(name)
    return value if isinstance(value, Mapping) else {}


def num_moments(optimizer: str | None, params: Mapping[str, Any] | None = None) -> int:
    """Numbers for each parameter that the optimizer of a DeepSpeed JSON keeps; two if it is not known."""
    name, params = (optimizer or "AdamW").lower(), params or {}
    momentum = int(bool(params.get("momentum")))
    if name == "sgd":
        return momentum
    if name == "rmsprop":
        return 1 + momentum + int(bool(params.get("centered")))
    known = next((count for key, count in MOMENTS.items() if name in (key, f"fused{key}", f"onebit{key}")), 2)
    return known + int(bool(params.get("amsgrad")))


class ItemMemory(NamedTuple):
    """Memory of one item: embedding, a decoder layer, or head with loss.

    Args:
        saved_bytes: kept by a live micro-batch from the forward to the backward, the item's input among it.
        output_bytes: of the activation that it passes on.
        working_bytes: beyond that while it computes: what is recomputed, or the logits and their gradient.
        elsewhere: parameters of its experts that a rank of the stage does not hold, since others do.
        empty: parameters for which the ranks that share its experts have room together beyond these.
        copied: parameters of the slots that each rank has for copies of its experts.
        first_bytes: kept besides by a live micro-batch where the item is the first of its stage: the input of the
            second half of a recomputed layer, whose first half has it otherwise.
        is_second: the second half of the decoder layer that the item before it begins. A stage that has both recomputes
            both or none.
        is_slice: of the head. A stage computes its slices at once.
        factor_bytes: most that its backward of the inputs leaves for that of the weights.
        again_bytes: of what is left, where the item is recomputed, beyond ``saved_bytes``.
        tied_parameters: of the head, those that are the embedding's too: a device that has both has them once.
        routed_bytes: of the rows on their way through routed experts: part of ``saved_bytes``, or, where the item is
            recomputed, of ``working_bytes``.
    """

    name: str
    num_parameters: int
    saved_bytes: float
    output_bytes: float
    working_bytes: float = 0.0
    elsewhere: int = 0
    empty: int = 0
    copied: int = 0
    first_bytes: float = 0.0
    is_second: bool = False
    is_slice: bool = False
    factor_bytes: float = inf
    again_bytes: float = 0.0
    tied_parameters: int = 0
    routed_bytes: float = 0.0

    def with_rows(self, times: float) -> ItemMemory:
        """The item on a device whose experts have so many times as many rows."""
        more = (times - 1) * self.routed_bytes
        found = self._replace(routed_bytes=self.routed_bytes + more, factor_bytes=self.factor_bytes + more)
        if not self.working_bytes:
            return found._replace(saved_bytes=self.saved_bytes + more)
        again = self.again_bytes + more if self.again_bytes else 0.0
        return found._replace(working_bytes=self.working_bytes + more, again_bytes=again)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Arguments of :meth:`States.of`."""
        return self.num_parameters, self.elsewhere, self.empty, self.copied


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of a stage, and what they are for.

    Args:
        activations: of all micro-batches that are alive at once.
        working: what a computation takes and gives back.
        transport: of what arrives ahead of its use or has yet to be sent.
    """

    weights: float
    gradients: float
    masters: float
    moments: float
    activations: float
    working: float
    transport: float

    @property
    def states(self) -> float:
        """All that belongs to parameters."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.activations + self.working + self.transport

    def to_dict(self) -> dict[str, float]:
        """Whole bytes, for a JSON."""
        return {name: round(value) for name, value in {**asdict(self), "total": self.total}.items()}


def stage_memory(
    items: Sequence[ItemMemory],
    boundaries: Sequence[int],
    stage: int,
    states: States,
    live: int,
    deferred: int = 0,
    *,
    beside_first: bool = False,
) -> StageMemory:
    """Memory that ``stage`` needs.

    Args:
        items: of the whole model.
        boundaries: over items, ``[0, …, len(items)]``.
        live: micro-batches that are alive at once on the stage, or left for later.
        deferred: those that are left for later.
        beside_first: its device has the first stage as well.
    """
    start, stop = boundaries[stage], boundaries[stage + 1]
    held = items[start:stop]
    incoming = items[start - 1].output_bytes if start else 0.0
    outgoing = held[-1].output_bytes if stop < len(items) else 0.0
    count, *others = map(sum, zip(*(item.counts for item in held), strict=True))
    if beside_first or stage == 0:
        count -= sum(item.tied_parameters for item in held)
    weights, gradients, masters, moments = states.of(count, *others)
    # The output lives as long as the rest: it is where the backward begins.
    saved = held[0].first_bytes + sum(item.saved_bytes for item in held) + outgoing
    # One input that arrives early, its predecessor's gradient on its way out, and the gradient that arrives.
    transport = 2 * incoming + outgoing
    working = max(
        sum(item.working_bytes for item in held if item.is_slice),
        max((item.working_bytes for item in held if not item.is_slice), default=0.0),
    )
    activations = live * saved + deferred * again_bytes(items, boundaries, stage)
    return StageMemory(weights, gradients, masters, moments, activations, working, transport)


def again_bytes(items: Sequence[ItemMemory], boundaries: Sequence[int], stage: int) -> float:
    """Bytes that a micro-batch left for later keeps on ``stage`` beyond those of a live one."""
    return sum(item.again_bytes for item in items[boundaries[stage] : boundaries[stage + 1]])


def with_head_slices(items: Sequence[ItemMemory], number: int) -> list[ItemMemory]:
    """The items with the head, which is the last one, in ``number`` equal slices.

    A stage that begins with a slice keeps the hidden states, which come to it; what travels besides, twelve bytes a
    token, is not counted.
    """
    *others, head = items
    hidden = others[-1].output_bytes
    return [
        *others,
        *(
            ItemMemory(
                f"{head.name}.{index}",
                head.num_parameters * (index + 1) // number - head.num_parameters * index // number,
                head.saved_bytes / number,
                hidden if index < number - 1 else head.output_bytes,
                head.working_bytes / number,
                first_bytes=hidden,
                is_slice=True,
                tied_parameters=head.tied_parameters * (index + 1) // number - head.tied_parameters * index // number,
            )
            for index in range(number)
        ),
    ]
