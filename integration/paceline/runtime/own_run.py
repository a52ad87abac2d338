"""A run as its checkpoints describe it, and what differs in another one that goes on from them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from ..checkpoint import Checkpoint
from ..optim.sharded import ShardedOptimizer

logger = logging.getLogger("paceline")


class OwnRun:
    """The run of this process. Nothing here is collective.

    Args:
        model: this rank's modules. What ``adapters`` it may have names the kind of adapters, and their ``scale``.
        optimizer: None where nothing trains.
    """

    def __init__(self, model: nn.Module, optimizer: ShardedOptimizer | None) -> None:
        self._model, self._optimizer = model, optimizer

    @property
    def optimizer_name(self) -> str | None:
        return None if self._optimizer is None else type(self._optimizer.optimizer).__name__

    def model(self) -> dict[str, object]:
        """Entry of a checkpoint that describes the model."""
        return {
            "dtype": self._dtype_name(),
            "adapter": self._adapter_name(),
            "adapter_scale": self._adapter_scale(),
            "began_with": self._began_with(),
        }

    def warn_of_differences(self, checkpoint: Checkpoint, shape: Mapping[str, object] | None) -> None:
        """Tell of all that makes training go on otherwise.

        Args:
            shape: of this run; None: only the model is loaded.
        """
        saved, own = checkpoint.meta["model"]["dtype"], self._dtype_name()
        if saved != own:
            logger.warning("%s was trained in %s, this run goes on in %s", checkpoint.path, saved, own)
        saved, scale = checkpoint.meta["model"].get("adapter_scale", {}), self._adapter_scale()
        for name in (name for name in scale if name in saved and saved[name] != scale[name]):
            logger.warning(
                "%s was trained with %s %s of the adapters, this run goes on with %s: what they have learned "
                "counts more or less than before",
                *(checkpoint.path, name, saved[name], scale[name]),
            )
        if shape is None:
            return
        before, now = (each.get("train_batch_size") for each in (checkpoint.meta["shape"], shape))
        if before is not None and before != now:
            logger.warning(
                "%s was trained with %s samples a step, this run goes on with %s: its steps are of other samples",
                *(checkpoint.path, before, now),
            )

    def way_out(self, checkpoint: Checkpoint) -> str:
        """The likely cause if tensors of ``checkpoint`` do not fit, and the remedy; empty if it is another model."""
        saved, own = checkpoint.meta["model"].get("adapter"), self._adapter_name()
        if saved is None and own is not None:
            remedy = "go on without, or export it (paceline export) and train adapters to that model in a new run"
            return f" It was saved without adapters: {remedy}."
        if saved is not None and own is None:
            return " It was saved with adapters: go on with them, or begin anew from a model that they are merged into."
        if saved is not None:
            return " It was saved with adapters: give them the options that they had (method, rank, target modules)."
        if checkpoint.meta["trained_only"]:
            return " It was saved without its frozen parameters: freeze the same ones, or begin anew."
        return ""

    def _dtype_name(self) -> str:
        return str(next(self._model.parameters()).dtype).removeprefix("torch.")

    def _adapter_name(self) -> str | None:
        name: str | None = getattr(getattr(self._model, "adapters", None), "name", None)
        return name

    def _adapter_scale(self) -> dict[str, object]:
        scale: dict[str, object] = getattr(getattr(self._model, "adapters", None), "scale", {})
        return scale

    def _began_with(self) -> str | None:
        """The directory of the model that the run began with, if it has one."""
        name = getattr(getattr(self._model, "config", None), "name_or_path", "")
        return str(Path(name).resolve()) if name and Path(name).is_dir() else None
