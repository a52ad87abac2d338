"""``--report_to``: transformers' own callbacks for trackers, called as a Trainer calls them, with the same names."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from paceline.hf.weights import skeleton
from paceline.messages import reason

logger = logging.getLogger("paceline")

_RENAMED = {"perplexity": "eval_perplexity"}


class Trackers:
    """All trackers of a run, on the rank that reports."""

    def __init__(
        self,
        names: Sequence[str],
        flags: Mapping[str, Any],
        config: PretrainedConfig,
        steps: int,
        island: int | None = None,
    ) -> None:
        """Begin a run with each of them.

        Args:
            names: as in ``TrainingArguments.report_to``.
            flags: the run's, to be shown beside it.
            steps: of the whole run.
            island: its number, where there are several: the environment may give all of them one folder.
        """
        self._callbacks = [callback() for callback in get_reporting_integration_callbacks(list(names))]
        for callback in self._callbacks:
            if island is not None and (folder := getattr(callback, "logging_dir", None)) is not None:
                callback.logging_dir = str(Path(folder, f"island{island}"))
        self._flags = _Flags(flags)
        self._state = TrainerState(max_steps=steps, is_world_process_zero=True, is_local_process_zero=True)
        self._model = skeleton(config) if self._callbacks else None
        for callback in self._callbacks:
            self._call(callback, "on_train_begin")

    def log(self, record: Mapping[str, Any]) -> None:
        """Tell the numbers of one line of ``metrics.jsonl``, at its step."""
        numbers = {
            _RENAMED.get(name, name): value
            for name, value in record.items()
            if isinstance(value, int | float) and name != "step"
        }
        self._state.global_step = record["step"]
        self._state.epoch = record.get("epoch") or self._state.epoch
        self._tell("on_log", logs=numbers)

    def close(self) -> None:
        """End the run; a second time nothing."""
        self._tell("on_train_end")
        self._callbacks = []

    def _tell(self, event: str, **more: Any) -> None:
        """Tell all of ``event``. One that cannot be written ends with a warning: the run matters more."""
        for callback in tuple(self._callbacks):
            try:
                self._call(callback, event, **more)
            except OSError as error:
                name = type(callback).__name__
                logger.warning("%s (--report_to) ends at step %d: %s", name, self._state.global_step, reason(error))
                self._callbacks.remove(callback)

    def _call(self, callback: TrainerCallback, event: str, **more: Any) -> None:
        handler: Callable[..., Any] = getattr(callback, event)
        handler(self._flags, self._state, TrainerControl(), model=self._model, **more)


class _Flags:
    """Looks to a callback like TrainingArguments, which would set up devices: a flag of theirs has its default."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self._own = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
        for field in fields(TrainingArguments):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            setattr(self, field.name, default)
        for name, value in self._own.items():
            setattr(self, name, value)
        self.process_index = self.local_process_index = 0

    def to_dict(self) -> dict[str, Any]:
        return dict(self._own)

    def to_sanitized_dict(self) -> dict[str, Any]:
        plain = (bool, int, float, str)
        return {name: value if isinstance(value, plain) else str(value) for name, value in self._own.items()}

    def to_json_string(self) -> str:
        return json.dumps(self._own, indent=2)
