"""The DeepSpeed JSON: read strictly, filled from the command line, resolved for a cluster; and our section of it."""

from .auto import fill_auto, open_autos
from .effects import without_effect
from .exclusions import Features, check_exclusions, exclusion
from .files import (
    accelerates_ds_config,
    accelerates_precision,
    check_accelerates_keys,
    read_ds_config,
    without_secrets,
)
from .known import near_misses, warn_near_misses
from .optimizers import check_optimizer_values
from .partitions import PartitionChoice, resolve_partition
from .resolve import check_ds_config, check_features, check_written, resolve
from .run_plan import Choice, RunPlan, plan_as_built
from .schedulers import check_scheduler
from .schedules import ScheduleChoice, resolve_schedule
from .section import PacelineConfig, PartitionConfig, PipelineConfig, ReportConfig, ScheduleConfig
from .stage_counts import choose_stages, resolve_stages

__all__ = [
    "Choice",
    "Features",
    "PacelineConfig",
    "PartitionChoice",
    "PartitionConfig",
    "PipelineConfig",
    "ReportConfig",
    "RunPlan",
    "ScheduleChoice",
    "ScheduleConfig",
    "accelerates_ds_config",
    "accelerates_precision",
    "check_accelerates_keys",
    "check_ds_config",
    "check_exclusions",
    "check_features",
    "check_optimizer_values",
    "check_scheduler",
    "check_written",
    "choose_stages",
    "exclusion",
    "fill_auto",
    "near_misses",
    "open_autos",
    "plan_as_built",
    "read_ds_config",
    "resolve",
    "resolve_partition",
    "resolve_schedule",
    "resolve_stages",
    "warn_near_misses",
    "without_effect",
    "without_secrets",
]
