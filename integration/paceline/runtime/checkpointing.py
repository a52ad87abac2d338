"""Saving and loading of :class:`~paceline.runtime.engine.PacelineEngine`: in the background, and into any shape.

A checkpoint of a pipeline holds tensors by name. It loads into any number of stages, any partition, with any number of
replicas and either ZeRO stage.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint import Checkpoint, CheckpointError, CheckpointWriter, latest_checkpoint, new_run
from ..hf.quantised import quantisation_of
from ..optim.loss_scale import load_scaler_state, scaler_state
from ..optim.sharded import ShardedOptimizer
from ..state.named import pieces, place

logger = logging.getLogger("paceline")

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
NOT_RESTORED = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))
"""Entries of a parameter group that belong to the run at hand."""


class Checkpointing:
    """What an engine needs to save and load. Mixed into it; all ranks call every method together."""

    _writer: CheckpointWriter | None

    def save_checkpoint(
        self: Any,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
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
            tag: default ``global_step<N>``, as in DeepSpeed.
            client_state: what :meth:`load_checkpoint` gives back: tensors, numbers, strings, lists, dicts.
            save_latest: ``latest`` always names the last complete checkpoint; False is refused.
            exclude_frozen_parameters: leave out what is not trained: to go on, the model has to be made as at first.
                Quantised weights are left out in any case.
            wait: return when the checkpoint is there. Otherwise return when everything is copied; training goes on
                while it is written, and what goes wrong is raised by the next step, save or :meth:`finish_checkpoint`.
            keep: delete older checkpoints beyond so many.
            files: called with a folder in which rank 0 may write more files.

        Raises:
            ValueError: on every rank: a state that cannot be saved.
            CheckpointError: on every rank: a rank could not write. The checkpoint does not exist then.
        """
        exclude_frozen_parameters |= self._is_quantised
        if not save_latest:
            raise ValueError("save_latest is False: `latest` always names the last complete checkpoint; leave it out.")
        tag = str(tag if tag is not None else f"global_step{self.global_steps}")
        asked = self.control.gather((str(save_dir), tag))
        if len(set(asked)) > 1:
            raise ValueError(
                f"ranks save under different names, {sorted(set(asked))}: give all the same folder and tag."
            )
        writer = self._checkpoint_writer()
        self.finish_checkpoint()
        self._settle_averaging()
        error: Exception | None = None
        try:
            writer.take(
                save_dir,
                tag,
                pieces(
                    self.module,
                    self._sharded,
                    replica=self.replica,
                    trained_only=exclude_frozen_parameters,
                ),
                rank_state=self._rank_state(),
                meta={**self._meta(client_state), "trained_only": exclude_frozen_parameters},
                files=lambda draft: self._write_files(draft, files),
                keep=keep,
            )
        except Exception as caught:
            error = caught
        self.control.settle(error, f"saving {tag}")  # before any rank has begun to write
        writer.start()
        if wait:
            self.finish_checkpoint()
        return True

    def finish_checkpoint(self: Any) -> None:
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
        self.control.settle(error, "writing a checkpoint")

    def checkpoint_error(self: Any) -> CheckpointError | None:
        """Why the checkpoint that was being written failed, once. Does not wait, and is not collective."""
        return None if self._writer is None else self._writer.poll()

    def load_checkpoint(
        self: Any,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint of any shape: other stages, partition, replicas, ZeRO stage.

        Training goes on bitwise as it would have where the shape is the same; the states of random number generators
        (dropout) belong to ranks and are restored only then.

        Args:
            tag: default: what ``latest`` names.

        Returns:
            The checkpoint's path and the client state; ``(None, {})`` where there is no checkpoint.

        Raises:
            CheckpointError: on every rank: a file is missing, truncated or torn; names the last complete checkpoint.
            ValueError: on every rank: it is a checkpoint of another model.
        """
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn is given: tensors are loaded by name; leave it out.")
        root = Path(load_dir)
        with self.control.together(f"looking for a checkpoint in {root}"):
            if tag is None and self.global_rank == 0 and (latest := latest_checkpoint(root)) is not None:
                tag = latest.name
        tag = self.control.gather(tag)[0]
        if tag is None:
            if self.global_rank == 0:
                logger.warning("%s has no checkpoint", root)
            return None, {}
        path = root / tag
        with self.control.together(f"opening {path}"):
            checkpoint = Checkpoint.open(path)
            checkpoint.verify(self.global_rank, torch.distributed.get_world_size())
        error: Exception | None = None
        meta = checkpoint.meta
        dtype = self._dtype_name()
        if self.global_rank == 0 and meta["model"]["dtype"] != dtype:
            logger.warning("%s was trained in %s, this run goes on in %s", path, meta["model"]["dtype"], dtype)
        states = load_optimizer_states and not load_module_only and self._sharded is not None
        if states and meta["optimizer"] != type(self.basic_optimizer).__name__:
            if self.global_rank == 0:
                logger.warning(
                    "%s was saved with %s, this run has %s: its states start anew",
                    *(path, meta["optimizer"], type(self.basic_optimizer).__name__),
                )
            states = False
        try:
            trained_only = meta["trained_only"] or not load_module_strict
            if states and not trained_only:
                self.experts.take([state.get("experts", {}) for state in checkpoint.rank_states])
            place(self.module, self._sharded, checkpoint, states=states, trained_only=trained_only)
        except Exception as caught:
            does_not_fit = isinstance(caught, ValueError) and not isinstance(caught, CheckpointError)
            error = ValueError(f"{path} does not fit: {caught}") if does_not_fit else caught
        self.control.settle(error, f"loading {path}")
        if self._sharded is not None:
            self._sharded.publish()
        self.experts.fetch()
        with self.control.together(f"loading {path}"):
            if not load_module_only:
                for name in COUNTERS:
                    setattr(self, name, meta[name])
                self.experts.resume(self.global_steps)
                if states:
                    self._load_groups(checkpoint)
                    load_scaler_state(self.optimizer.loss_scaler, meta["loss_scale"])
                    if self.natural_gradient is not None:
                        self.natural_gradient.load(self._natural_states(checkpoint))
                    self._load_averaging_state(checkpoint.rank_state(0).get("averaging", {}))
                if load_lr_scheduler_states and self.lr_scheduler is not None:
                    self._load_scheduler(checkpoint)
                self._load_rng(checkpoint)
        checkpoint.close()
        return str(path), dict(meta["client_state"])

    def prepare_checkpoint(self: Any, *, exclude_frozen_parameters: bool = False) -> None:
        """Take the host memory for a checkpoint now, so that the first save is as quick as the others."""
        trained_only = exclude_frozen_parameters or self._is_quantised
        writer = self._checkpoint_writer()
        with self.control.together("preparing for checkpoints"):
            writer.prepare(pieces(self.module, self._sharded, replica=self.replica, trained_only=trained_only))

    def destroy(self: Any) -> None:
        """As DeepSpeed's; a checkpoint that is being written is finished first. Not collective."""
        if self._writer is not None:
            try:
                self._writer.close()
            except CheckpointError as error:
                logger.error("%s", error)
        super().destroy()  # type: ignore[misc]

    @property
    def _is_quantised(self: Any) -> bool:
        stage = getattr(self.module, "stage", None)
        return stage is not None and quantisation_of(stage.model.config) is not None

    @property
    def replica(self: Any) -> int:
        """Number of this rank among those that hold the same parameters."""
        return int(self.grid.data_parallel_id)

    @property
    def _sharded(self: Any) -> ShardedOptimizer | None:
        return self.optimizer if isinstance(self.optimizer, ShardedOptimizer) else None

    @contextmanager
    def _told_once(self: Any) -> Iterator[None]:
        """A failed save that is raised here on all ranks is not raised again by those that have yet to notice it."""
        try:
            yield
        except CheckpointError:
            self._writer.forget()
            raise

    # -- what belongs to no tensor -------------------------------------------------------------------------------

    def _checkpoint_writer(self: Any) -> CheckpointWriter:
        if self._writer is None:
            run = self.control.gather(new_run())[0]
            size = torch.distributed.get_world_size()
            self._writer = CheckpointWriter(rank=self.global_rank, world_size=size, run=run)
        return self._writer

    def _meta(self: Any, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        adapters = getattr(self.module, "adapters", None)
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "optimizer": None if self._sharded is None else type(self.basic_optimizer).__name__,
            "loss_scale": {} if self._sharded is None else scaler_state(self._sharded.loss_scaler),
            "client_state": dict(client_state or {}),
            "shape": self._shape(),
            "model": {"dtype": self._dtype_name(), "adapter": getattr(adapters, "name", None)},
        }

    def _dtype_name(self: Any) -> str:
        return str(next(self.module.parameters()).dtype).removeprefix("torch.")

    def _shape(self: Any) -> dict[str, Any]:
        return {
            "stages": self.num_stages,
            "data_parallel": self.dp_world_size,
            "parts": [int(part) for part in self.module.parts],
            "train_batch_size": self.train_batch_size(),
        }

    def _rank_state(self: Any) -> dict[str, Any]:
        owned = self._sharded.owned if self._sharded is not None else ()
        name_of = {id(one.master): one.name for one in owned}
        groups = [
            {
                "names": [name_of[id(master)] for master in group["params"]],
                "options": {k: v for k, v in group.items() if k not in NOT_RESTORED},
            }
            for group in (self._sharded.param_groups if self._sharded is not None else ())
        ]
        # Of each rank: groups, and with them what a scheduler keeps for each, may differ between stages.
        scheduler = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        return {
            "groups": groups,
            "lr_scheduler": scheduler,
            "rng": _rng_state(torch.device(self.device)),
            "experts": self.experts.placements(),
            "natural_gradient": {} if self.natural_gradient is None else self.natural_gradient.state_dict(),
            "averaging": self._averaging_state(),
        }

    def _load_groups(self: Any, checkpoint: Checkpoint) -> None:
        options_of: dict[str, dict[str, Any]] = {}
        for state in checkpoint.rank_states:
            for group in state["groups"]:
                options_of |= dict.fromkeys(group["names"], group["options"])
        saved = checkpoint.rank_state(0)["groups"]
        name_of = {id(owned.master): owned.name for owned in self.optimizer.owned}
        for index, group in enumerate(self.optimizer.param_groups):
            known = (options_of.get(name_of[id(master)]) for master in group["params"])
            options = next((options for options in known if options is not None), None)
            if options is None and len(saved) == len(self.optimizer.param_groups):
                options = saved[index]["options"]  # none of the group's rows are here
            given, saved_rate = group.get("initial_lr"), (options or {}).get("initial_lr")
            if self.global_rank == 0 and None not in (given, saved_rate) and given != saved_rate:
                logger.warning("the learning rate %g gives way to the checkpoint's, %g", given, saved_rate)
            group.update(options or {})

    def _natural_states(self: Any, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """What all ranks had learned, this rank last, or those of the replica that had its number."""
        states = [state.get("natural_gradient", {}) for state in checkpoint.rank_states]
        shape = checkpoint.meta["shape"]
        if shape == self._shape():
            return [states[self.global_rank]]
        replicas = shape["data_parallel"]  # the ranks of a stage follow one another
        order = sorted(range(len(states)), key=lambda rank: rank % replicas == self.replica % replicas)
        return [states[rank] for rank in order]

    def _load_scheduler(self: Any, checkpoint: Checkpoint) -> None:
        same = checkpoint.meta["shape"] == self._shape()
        state = checkpoint.rank_state(self.global_rank if same else 0)["lr_scheduler"]
        if state is None:
            return
        self.lr_scheduler.load_state_dict(state)
        if not same:
            _fit_groups(self.lr_scheduler, self.basic_optimizer.param_groups)

    def _load_rng(self: Any, checkpoint: Checkpoint) -> None:
        if checkpoint.meta["shape"] == self._shape():
            _set_rng_state(checkpoint.rank_state(self.global_rank)["rng"], torch.device(self.device))
        elif self.global_rank == 0:
            logger.info("the checkpoint has another shape: random number generators (dropout) start anew")

    def _write_files(self: Any, draft: Path, more: Callable[[Path], None] | None) -> None:
        if more is not None:
            more(draft)


def _rng_state(device: torch.device) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, [int(key) for key in keys], *rest],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _fit_groups(scheduler: Any, groups: list[dict[str, Any]]) -> None:
    """What a scheduler of torch keeps for each parameter group, from this rank's groups; in those inside it, too."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _fit_groups(inner, groups)
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = [group["lr"] for group in groups]
