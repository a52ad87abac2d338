"""Files of earlier runs in an output directory: kept by default, resumed from, or removed. For one rank."""

from __future__ import annotations

import shutil
from pathlib import Path

from paceline.checkpoint import complete_checkpoints, damaged_checkpoints, latest_checkpoint
from paceline.checkpoint.format import LATEST, MANIFEST
from paceline.hf.arguments import AUTO, TrainArguments
from paceline.measure.profile_file import FILE_NAME as PROFILE
from paceline.report.run_records import LOADS, METRICS, START, SUMMARY
from paceline.report.step_records import FOLDER as TRACES


def check_nothing_is_lost(output: Path, args: TrainArguments) -> None:
    """Raise ValueError if a run that does not go on from ``output`` would mix with, or write over, what is there."""
    if args.overwrite_output_dir:
        return
    if (output / "config.json").exists() or (output / "adapter_config.json").exists():
        raise ValueError(
            f"--output_dir {output} already holds a model: choose another directory, or replace it with "
            "--overwrite_output_dir."
        )
    if (checkpoint := latest_checkpoint(output)) is not None:
        raise ValueError(
            f"--output_dir {output} holds {checkpoint.name} of an earlier run: go on from it with "
            "--resume_from_checkpoint true, or start over with --overwrite_output_dir."
        )
    if damaged := damaged_checkpoints(output):
        raise ValueError(
            f"--output_dir {output} holds checkpoints of an earlier run, none of them complete "
            f"({'; '.join(damaged.values())}): choose another directory, or start over with --overwrite_output_dir."
        )


def checkpoint_to_resume(output: Path, args: TrainArguments) -> Path | None:
    """The checkpoint that ``--resume_from_checkpoint`` means; None to begin from the beginning.

    Raises:
        ValueError: there is none, or none that is complete.
    """
    asked = args.resume_from_checkpoint
    if asked is None:
        return None
    if asked not in ("true", AUTO):
        path = Path(asked)
        return path if (path / MANIFEST).exists() else latest_checkpoint(path) or path
    found = latest_checkpoint(output)
    if found is None and (damaged := damaged_checkpoints(output)) and not args.overwrite_output_dir:
        raise ValueError(
            f"--resume_from_checkpoint {asked}: no checkpoint in {output} is complete "
            f"({'; '.join(damaged.values())}); start over with --overwrite_output_dir, or repair one."
        )
    if found is None and asked != AUTO:
        raise ValueError(
            f"--resume_from_checkpoint true: {output} has no complete checkpoint; leave the flag out, or use "
            "auto, which then begins from the beginning."
        )
    return found


def goes_on_in(output: Path, checkpoint: Path | None) -> bool:
    """Whether a run from ``checkpoint`` goes on with the run of ``output``."""
    return checkpoint is not None and checkpoint.parent.resolve() == output.resolve()


def remove_earlier_run(output: Path) -> None:
    """Its checkpoints, which a later resume is not to go on from, its profile and its records.

    Only with --overwrite_output_dir.
    """
    for folder in (*complete_checkpoints(output), *damaged_checkpoints(output), output / TRACES):
        shutil.rmtree(folder, ignore_errors=True)
    for name in (LATEST, PROFILE, START, METRICS, SUMMARY, LOADS):
        (output / name).unlink(missing_ok=True)
