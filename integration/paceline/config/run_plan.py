"""Everything that a DeepSpeed JSON, our section of it and the command line come to: one frozen value for a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .averaging_keys import AveragingConfig
from .boundary_keys import BoundaryConfig
from .compile_keys import CompileConfig
from .expert_choice import MoeChoice, resolve_moe
from .natural_gradient_keys import MaxChangeConfig, NaturalGradientConfig
from .partitions import PartitionChoice, resolve_partition
from .recompute_keys import Recompute
from .replica_keys import first_shares, interval
from .schedules import ScheduleChoice, resolve_schedule
from .section import PacelineConfig, ReportConfig
from .stage_counts import head_slices, resolve_method

if TYPE_CHECKING:
    from ..planning.stage_pool import StagePool


class Choice(NamedTuple):
    """A value that was chosen because its key was left out."""

    value: object
    why: str


@dataclass(frozen=True)
class RunPlan:
    """JSON and flags, resolved: made once, before anything is built; an engine has it as ``engine.plan``.

    Args:
        section: the ``"paceline"`` section as it was written.
        micro_batches: per step and pipeline; DeepSpeed's ``gradient_accumulation_steps``.
        partition_choice: the items of each stage, and the re-planning interval.
        schedule: the order in which the stages compute.
        ds_config: the dict for DeepSpeed.
        chosen: by path, every value that was chosen automatically.
        expert_parallel: ranks of a stage that share its experts.
        tensor_parallel: ranks of a stage that have slices of its layers.
        pool: other numbers of stages, where the run chose between some by measuring.
        planned: by path, what was chosen so. It goes into checkpoints: a run that goes on keeps it.
        trained: share of the parameters that is trained, as far as memory depends on it.
    """

    section: PacelineConfig
    stages: int
    data_parallel: int
    micro_batch_size: int
    micro_batches: int
    train_batch_size: int
    partition_choice: PartitionChoice
    schedule: ScheduleChoice
    ds_config: dict[str, Any]
    chosen: dict[str, Choice] = field(default_factory=dict)
    expert_parallel: int = 1
    tensor_parallel: int = 1
    pool: StagePool | None = None
    planned: dict[str, Any] = field(default_factory=dict)
    trained: float = 1.0

    @property
    def half_layers(self) -> bool:
        """Whether decoder layers may be cut in two."""
        return self.section.pipeline.half_layers is True

    @property
    def head_slices(self) -> int:
        """Parts that the head may be cut into; one stage has it whole."""
        return head_slices(self.section) if self.stages > 1 else 1

    @property
    def partition(self) -> str | list[int] | dict[str, float]:
        """The method, or boundaries over the pipeline's items (``stages + 1`` of them)."""
        method = self.partition_choice.method
        assert method is not None, "the plan is for a model that was built by something else"
        return list(method) if isinstance(method, tuple) else method

    @property
    def moe(self) -> MoeChoice | None:
        """Rebalancing of experts; None: they stay where they are."""
        return resolve_moe(self.section.moe)

    @property
    def num_copies(self) -> int:
        """Slots that each rank has for copies of experts, in each layer."""
        return 0 if self.moe is None else self.moe.replicas

    @property
    def natural_gradient(self) -> NaturalGradientConfig | None:
        """Natural gradients of linear layers; None: ordinary ones."""
        return self.section.natural_gradient

    @property
    def max_change(self) -> MaxChangeConfig | None:
        """Limits of an update's size, wherever the section has them; None: no limit."""
        return self.section.limits

    @property
    def recompute(self) -> Recompute | None:
        """Layers of each stage whose activations are computed again; None: as the run says for all."""
        return self.section.pipeline.recompute

    @property
    def compile(self) -> CompileConfig | None:
        """How decoder layers are compiled; None: they are not."""
        return self.section.pipeline.compile

    @property
    def boundary(self) -> BoundaryConfig:
        """Formats of what passes between stages."""
        return self.section.pipeline.boundary or BoundaryConfig()

    @property
    def replica_micro_batches(self) -> tuple[int, ...]:
        """Micro-batches of a step for each replica, to begin with."""
        unequal = self.section.pipeline.unequal_replicas
        return first_shares(unequal, replicas=self.data_parallel, micro_batches=self.micro_batches)

    @property
    def reshare_every(self) -> int:
        """Steps from one choice of :attr:`replica_micro_batches` to the next; 0: they stay."""
        retune_every = self.schedule.retune_every if self.schedule.is_tuned else None
        unequal = self.section.pipeline.unequal_replicas
        return interval(unequal, replicas=self.data_parallel, retune_every=retune_every)

    @property
    def averaging(self) -> AveragingConfig | None:
        """Islands that average their parameters; None: the job is alone."""
        return self.section.averaging

    @property
    def report(self) -> ReportConfig:
        """Files that the run writes about itself."""
        return self.section.report


def plan_as_built(
    section: PacelineConfig,
    ds_config: Mapping[str, Any],
    *,
    stages: int,
    data_parallel: int,
    micro_batch_size: int,
    micro_batches: int,
    train_batch_size: int,
) -> RunPlan:
    """The plan for a model that was built by something else: nothing but the schedule's own keys is chosen.

    Args:
        section: of ``ds_config``.
        stages: of the pipeline; 1 for a model that is no pipeline.
        data_parallel: replicas, as DeepSpeed counts them; the sizes are DeepSpeed's too.

    Raises:
        ValueError: one line with the value, the rule and the remedy.
    """
    method, _ = resolve_method(section, ds_config)
    partition, chosen = resolve_partition(section, method, default=None)
    schedule, more = resolve_schedule(section, stages, micro_batches, micro_batch_size=micro_batch_size)
    return RunPlan(
        section=section,
        stages=stages,
        data_parallel=data_parallel,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        train_batch_size=train_batch_size,
        partition_choice=partition,
        schedule=schedule,
        ds_config=dict(ds_config),
        chosen={key: Choice(*default) for key, default in (chosen | more).items()},
    )
