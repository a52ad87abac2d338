"""Checkpoints of a pipeline: written in the background, and loaded into any shape.

A checkpoint holds tensors by name. It loads into any number of stages, any partition, with any number of replicas and
either ZeRO stage.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from torch import nn

from ..checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointWriter,
    Piece,
    damaged_checkpoints,
    latest_checkpoint,
    new_run,
)
from ..optim.sharded import ShardedOptimizer
from ..state.named import COPY, pieces, place, rest_of
from ..state.rank_states import ParameterGroups, RankStates, SavedPart
from ..supervise.expected import expecting_all
from .own_run import OwnRun

logger = logging.getLogger("paceline")

Value = TypeVar("Value")

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class Agreement(Protocol):
    """Small messages between all ranks, as :class:`~paceline.comm.control.ControlPlane`."""

    @property
    def rank(self) -> int: ...

    def gather(self, value: Value) -> list[Value]: ...

    def settle(self, error: BaseException | None, doing: str) -> object: ...

    def together(self, doing: str) -> AbstractContextManager[None]: ...


class Counters(Protocol):
    """Counters of a run, as DeepSpeed's engine has them."""

    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int


class PlacedExperts(Protocol):
    """Experts that lie on several ranks, as :class:`~paceline.runtime.expert_part.Experts`."""

    def placements(self) -> Mapping[str, object]: ...

    def take(self, saved: Sequence[Mapping[str, object]]) -> None:
        """Lay experts as the ranks of another run had them, before their parameters are read."""

    def fetch(self) -> None:
        """Bring what was loaded to the experts' copies."""

    def resume(self, step: int) -> None:
        """Go on at a step."""


class Checkpointer:
    """Saves and loads the state of a pipeline's job. All ranks call every method together, unless it says otherwise.

    Args:
        control: between all ranks.
        model: this rank's modules. What ``adapters`` it may have names the kind of adapters, and their ``scale``.
        optimizer: None where nothing trains.
        counters: of the run; saved, and set by :meth:`load`.
        world_size: ranks.
        replica: number of this rank among those that hold the same parameters.
        shape: returns stages, partition and replicas of the run as it is now; ``data_parallel`` among them.
        groups: parameter groups and loss scale of ``optimizer``.
        scheduler: of the learning rate.
        learned: parts that go on where the optimizer's states do, by the name of their entry.
        run: parts that go on in any case, likewise.
        experts: placed before parameters are read.
        settle: ends what is under way with parameters; called by all ranks before anything is saved.
        write_model: called with a draft's folder on rank 0, to write more files.
        is_quantised: whether frozen parameters cannot be saved.
    """

    def __init__(
        self,
        control: Agreement,
        model: nn.Module,
        optimizer: ShardedOptimizer | None,
        counters: Counters,
        *,
        world_size: int,
        replica: int,
        shape: Callable[[], dict[str, object]],
        groups: ParameterGroups | None,
        scheduler: SavedPart,
        learned: Mapping[str, SavedPart],
        run: Mapping[str, SavedPart],
        experts: PlacedExperts,
        settle: Callable[[], object] = lambda: None,
        write_model: Callable[[Path], None] | None = None,
        is_quantised: bool = False,
    ) -> None:
        self._control, self._model, self._optimizer, self._counters = control, model, optimizer, counters
        self._world_size, self._replica, self._shape = world_size, replica, shape
        self._groups, self._scheduler, self._learned, self._run = groups, scheduler, dict(learned), dict(run)
        self._experts, self._settle, self._write_model = experts, settle, write_model
        self._is_quantised = is_quantised
        self._own = OwnRun(model, optimizer)
        self._is_first = control.rank == 0
        self._writer: CheckpointWriter | None = None

    # -- saving --------------------------------------------------------------------------------------------------

    def save(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        wait: bool = True,
        keep: int | None = None,
        files: Callable[[Path], None] | None = None,
    ) -> bool:
        """Save ``save_dir/tag``: complete or not there, and then named by ``save_dir/latest``.

        Waits for an earlier save that is still being written.

        Args:
            save_dir: a folder that all ranks see; a relative one lies in the working directory, which has to be the
                same on all.
            tag: default ``global_step<N>``, as in DeepSpeed.
            client_state: a dict of tensors, numbers, strings, lists and dicts that :meth:`load` gives back on all
                ranks: rank 0's.
            save_latest: ``latest`` always names the last complete checkpoint; False is refused.
            exclude_frozen_parameters: leave out what is not trained: to go on, the model has to be made as at first.
                Quantised weights are left out in any case.
            wait: return when the checkpoint is there. Otherwise return when everything is copied; training goes on
                while it is written, and what goes wrong is raised by the next step, save, :meth:`load` or
                :meth:`finish`.
            keep: delete older checkpoints beyond so many.
            files: called with a folder in which rank 0 may write more files.

        Raises:
            ValueError: on every rank: a state that cannot be saved.
            CheckpointError: on every rank: a rank could not write. The checkpoint does not exist then.
        """
        trained_only = exclude_frozen_parameters or self._is_quantised
        if not save_latest:
            raise ValueError("save_latest is False: `latest` always names the last complete checkpoint; leave it out.")
        tag = str(tag if tag is not None else f"global_step{self._counters.global_steps}")
        # As it is now: what is written in the background is to lie there whatever the working directory is by then.
        save_dir = _folder(save_dir, "save_dir").absolute()
        with expecting_all("saving a checkpoint", self._control.rank):
            asked = self._control.gather((str(save_dir), tag))
        if len(set(asked)) > 1:
            raise ValueError(
                f"ranks save under different names, {sorted(set(asked))}: give all the same tag and the same folder, "
                "as an absolute path where their working directories differ."
            )
        writer = self._open_writer()
        self.finish()
        self._settle()
        with self._control.together(f"saving {tag}"):  # before any rank has begun to write
            writer.take(
                save_dir,
                tag,
                self._pieces(trained_only),
                rank_state=self._rank_state(),
                meta={**self._meta(client_state), "trained_only": trained_only},
                files=lambda draft: self._write_files(draft, files),
                keep=keep,
            )
        writer.start()
        if wait:
            self.finish()
        return True

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is there.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        error: Exception | None = None
        try:
            if self._writer is not None:
                self._writer.wait()
        except CheckpointError as caught:
            error = caught
        self._control.settle(error, "writing a checkpoint")

    def error(self) -> CheckpointError | None:
        """Why the checkpoint that was being written failed, once. Does not wait, and is not collective."""
        return None if self._writer is None else self._writer.poll()

    @contextmanager
    def reported(self) -> Iterator[None]:
        """A failed save that is raised inside on all ranks is not raised again by those that have yet to notice it."""
        try:
            yield
        except CheckpointError:
            if self._writer is not None:
                self._writer.forget()
            raise

    def prepare(self, *, exclude_frozen_parameters: bool = False) -> None:
        """Take the host memory for a checkpoint now, so that the first save is as quick as the others."""
        writer = self._open_writer()
        with self._control.together("preparing for checkpoints"):
            writer.prepare(self._pieces(exclude_frozen_parameters or self._is_quantised))

    def close(self) -> None:
        """Finish the checkpoint that is being written. Not collective."""
        if self._writer is not None:
            try:
                self._writer.close()
            except CheckpointError as error:
                logger.error("%s", error)

    def _open_writer(self) -> CheckpointWriter:
        if self._writer is None:
            run = self._control.gather(new_run())[0]
            self._writer = CheckpointWriter(rank=self._control.rank, world_size=self._world_size, run=run)
        return self._writer

    def _pieces(self, trained_only: bool) -> Iterator[Piece]:
        return pieces(self._model, self._optimizer, replica=self._replica, trained_only=trained_only)

    def _meta(self, client_state: Mapping[str, object] | None) -> dict[str, object]:
        if not isinstance(client_state, Mapping | None):
            raise ValueError(f"client_state is a {type(client_state).__name__}: it must be a dict; make it one.")
        return {
            **{name: getattr(self._counters, name) for name in COUNTERS},
            "optimizer": self._own.optimizer_name,
            "loss_scale": {} if self._groups is None else self._groups.loss_scale(),
            "client_state": dict(client_state or {}),
            "shape": self._shape(),
            "model": self._own.model(),
        }

    def _rank_state(self) -> dict[str, object]:
        # Of each rank: groups, and with them what a scheduler keeps for each, may differ between stages.
        return {
            "groups": [] if self._groups is None else self._groups.state_dict(),
            "lr_scheduler": self._scheduler.state_dict(),
            "experts": dict(self._experts.placements()),
            **{name: part.state_dict() for name, part in (self._learned | self._run).items()},
        }

    def _write_files(self, draft: Path, more: Callable[[Path], None] | None) -> None:
        for write in (self._write_model, more):
            if write is not None:
                write(draft)

    # -- loading -------------------------------------------------------------------------------------------------

    def load(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, object]]:
        """Load a checkpoint of any shape: other stages, partition, replicas, ZeRO stage.

        Waits for a save that is still being written: until then ``latest`` names the one before, which it may delete.

        Training goes on bitwise as it would have where the shape is the same; the states of random number generators
        (dropout) belong to ranks and are restored only then.

        Args:
            tag: default: the one that ``latest`` names.

        Returns:
            The checkpoint's path and the client state; ``(None, {})`` where there is no checkpoint.

        Raises:
            CheckpointError: on every rank: a file is missing, truncated or torn, or there are only such checkpoints;
                names the last complete one. Or the save that was being written failed, and nobody has heard of it.
            ValueError: on every rank: it is a checkpoint of another model.
        """
        self.finish()
        path = self._found(_folder(load_dir, "load_dir"), None if tag is None else str(tag))
        if path is None:
            return None, {}
        with self._control.together(f"opening {path}"):
            checkpoint = Checkpoint.open(path)
            checkpoint.verify(self._control.rank, self._world_size)
            rank_states = [] if load_module_only else checkpoint.rank_states
        shape = None if load_module_only else self._shape()
        if self._is_first:
            self._own.warn_of_differences(checkpoint, shape)
        states = load_optimizer_states and not load_module_only and self._can_have_states(checkpoint)
        trained_only = checkpoint.meta["trained_only"] or not load_module_strict
        names = set().union(*self._control.gather({name for name, _ in rest_of(self._model, None)}))
        way_out = self._own.way_out(checkpoint)
        with self._control.together(f"loading {path}"), _does_not_fit(path, way_out):
            self._check_all_have_a_place(checkpoint, names, is_strict=load_module_strict)
            if states and not trained_only:
                self._experts.take([state.get("experts", {}) for state in rank_states])
            place(self._model, self._optimizer, checkpoint, states=states, trained_only=trained_only)
        if self._optimizer is not None:
            self._optimizer.publish()
        self._experts.fetch()
        with self._control.together(f"loading {path}"):
            if not load_module_only:
                self._load_rest(checkpoint, rank_states, states=states, schedule=load_lr_scheduler_states)
        checkpoint.close()
        return str(path), dict(checkpoint.meta["client_state"])

    def _found(self, root: Path, tag: str | None) -> Path | None:
        """Rank 0's answer, which reads what ``latest`` names."""
        with self._control.together(f"looking for a checkpoint in {root}"):
            if tag is None and self._is_first:
                if (latest := latest_checkpoint(root)) is not None:
                    tag = latest.name
                elif damaged := damaged_checkpoints(root):
                    raise CheckpointError(
                        f"{root} has no complete checkpoint: {'; '.join(damaged.values())}. Load another, or remove "
                        "what is there to begin anew."
                    )
        tag = self._control.gather(tag)[0]
        if tag is None and self._is_first:
            logger.warning("%s has no checkpoint: nothing is loaded, and load_checkpoint returns (None, {})", root)
        return None if tag is None else root / tag

    def _can_have_states(self, checkpoint: Checkpoint) -> bool:
        """Whether the optimizer's states go on: it is of the same kind."""
        saved, own = checkpoint.meta["optimizer"], self._own.optimizer_name
        if self._is_first and own is not None and saved != own:
            logger.warning(
                "%s was saved with %s, this run has %s: its states start anew", *(checkpoint.path, saved, own)
            )
        return own is not None and saved == own

    def _check_all_have_a_place(self, checkpoint: Checkpoint, names: set[str], *, is_strict: bool) -> None:
        """Refuse, or tell of, tensors that no rank's model has: ``names`` are those of all.

        Copies of what is beside a tied weight may be of a stage that this run has not.
        """
        left = [name for name in checkpoint.names if name not in names and not name.endswith(COPY)]
        if not left:
            return
        fault = f"it has {left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}, and this run's model has not"
        if is_strict:
            raise ValueError(f"{fault}: it is of another model.")
        if self._is_first:
            logger.warning("%s: %s; left out", checkpoint.path, fault)

    def _load_rest(
        self, checkpoint: Checkpoint, rank_states: Sequence[Mapping[str, object]], *, states: bool, schedule: bool
    ) -> None:
        """Take the states that are no tensors of the model or the optimizer."""
        meta = checkpoint.meta
        for name in COUNTERS:
            setattr(self._counters, name, meta[name])
        self._experts.resume(self._counters.global_steps)
        parts: dict[str, SavedPart] = {}
        if states and self._groups is not None:
            self._groups.load_loss_scale(meta["loss_scale"])
            parts |= {"groups": self._groups, **self._learned}
        if schedule:
            parts["lr_scheduler"] = self._scheduler  # after the groups, whose rates it may take
        parts |= self._run
        shape = meta["shape"]
        is_same = shape == self._shape()
        for name, part in parts.items():
            part.load_saved(
                RankStates(
                    [state.get(name) for state in rank_states],
                    self._control.rank if is_same else None,
                    self._replica,
                    shape["data_parallel"],
                    has_groups="groups" in parts,
                )
            )


def _folder(given: str | Path, what: str) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{what} is {given!r}: it must be a folder; give its name, the same on all ranks.")
    return Path(given)


@contextmanager
def _does_not_fit(path: Path, way_out: str) -> Iterator[None]:
    """Name the checkpoint where a tensor does not fit, and the way out."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(f"{path} does not fit: {error}{way_out}") from error
