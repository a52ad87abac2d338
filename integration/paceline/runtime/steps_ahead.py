"""Begin the steps of a pipeline without a flush: each has been read, and agreed on, while the one before ran."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from ..comm.control import ControlPlane
from ..supervise.lifetime import current
from ..supervise.watch import EVERYONE, WATCH
from .causal_lm_runner import StepBook
from .causal_lm_steps import COLUMNS, CausalLMSteps, Read, Replicas, shapes_in
from .micro_batches import MicroBatch, MicroBatchShape
from .model_support import Reader
from .step_agreement import Agreed, Ahead

logger = logging.getLogger("paceline")


Item = TypeVar("Item")


class TellsState(Protocol):
    """An iterator that can be gone on from."""

    def state_dict(self) -> object: ...


class ByNumber(Generic[Item]):
    """Items of the micro-batches of the last steps, by their number in the run: step · M + micro-batch.

    Its length and its items in turn are those of the newest step.
    """

    def __init__(self, num_micro_batches: int, num_steps: int) -> None:
        self._count, self._num_steps = num_micro_batches, num_steps
        self._steps: dict[int, Sequence[Item]] = {}
        self._newest: Sequence[Item] = ()

    def add(self, step: int, values: Sequence[Item]) -> None:
        self._steps[step] = self._newest = values
        self._steps.pop(step - self._num_steps, None)

    def __getitem__(self, number: int) -> Item:
        step, micro_batch = divmod(number, self._count)
        return self._steps[step][micro_batch]

    def __len__(self) -> int:
        return len(self._newest)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._newest)


class StepsAhead:
    """Reads the steps of a causal LM one ahead, if the iterator stays the same.

    Args:
        reader: has the iterator.
        steps: reads one step.
        book: gets what is known of the steps under way.
        num_micro_batches: of a step.
        num_steps: that are under way at a time at most.
    """

    def __init__(
        self,
        reader: Reader,
        steps: CausalLMSteps,
        book: StepBook,
        control: ControlPlane,
        replicas: Replicas,
        *,
        num_micro_batches: int,
        num_steps: int,
    ) -> None:
        self._reader, self._steps, self._book, self._control = reader, steps, book, control
        self._replicas, self._num_micro_batches = replicas, num_micro_batches
        self._ahead: Ahead | None = None
        self._last_iterator: Iterator[object] | None = None
        self._shapes: ByNumber[MicroBatchShape] = ByNumber(num_micro_batches, num_steps)
        self._loaded: ByNumber[MicroBatch] = ByNumber(num_micro_batches, num_steps)
        self._table_shape = (replicas.size, steps.readers.size, 1 + num_micro_batches * COLUMNS)

    def begin(self, number: int) -> None:
        """Have the micro-batches of step ``number`` of this run in the book, and read the next. Collective."""
        WATCH.doing("agreeing on the step", EVERYONE)
        ahead, agreed = self._agree()
        self._steps.is_stopping = agreed.stops
        tables, failed, error = agreed.tables, agreed.failed, ahead.error
        step = self._reader.global_steps
        if not failed and bool((tables != tables[:, :1]).any()):
            failed = True
            error = ValueError(
                f"ranks that read the same data see different ones at step {step}: give the first and the last stage "
                "of every direction the same iterator (same files, seed and data-parallel rank)."
            )
        if failed:
            with self._steps.raises():
                self._control.raise_shared(error, f"beginning step {step}")
        of_replicas = [shapes_in(table) for table in tables[:, 0]]
        self._shapes.add(number, of_replicas[self._replicas.number])
        self._loaded.add(number, self._steps.ready(ahead.loaded))
        book, everything = self._book, [shape for row in of_replicas for shape in row]
        book.shapes, book.loaded = self._shapes, self._loaded
        book.label_tokens = sum(shape.label_tokens for shape in everything)
        book.tokens = sum(shape.tokens for shape in everything)
        book.num_filled = sum(shape.tokens > 0 for shape in everything)
        if not agreed.is_new:
            self._ahead = self._read_ahead()

    def forget(self) -> None:
        """Drop what was read ahead."""
        if self._ahead is not None:
            self._ahead.work.wait()
            self._ahead = None

    def data_state(self, iterator: TellsState) -> object:
        """``iterator.state_dict()`` as of the end of the last step."""
        ahead = self._ahead
        if ahead is not None and ahead.iterator is iterator and ahead.state is not None:
            return ahead.state
        return iterator.state_dict()

    def _agree(self) -> tuple[Ahead, Agreed]:
        """The step that was read ahead, or one that is read now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            ahead = self._read_ahead()
            return ahead, ahead.agreed(self._table_shape)
        agreed = ahead.agreed(self._table_shape)
        if agreed.failed and agreed.ended:  # there may be a new iterator
            ahead = self._read_ahead(ended=ahead)
            return ahead, ahead.agreed(self._table_shape)
        if ahead.iterator is not self._reader.data_iterator and self._steps.reads:
            logger.warning(
                "train_batch got another iterator at step %d: this step was read ahead from the old one, the new one "
                "is read from the next step on",
                self._reader.global_steps,
            )
        return ahead, agreed

    def _read_ahead(self, ended: Ahead | None = None) -> Ahead:
        """Begin to agree on a step; the iterator of ``ended`` is not asked again."""
        iterator, reader = self._reader.data_iterator, self._steps.readers.number
        last, self._last_iterator = self._last_iterator, iterator

        def read() -> Read:
            if ended is not None and ended.iterator is iterator:
                return Read([], [], ended.error)
            return self._steps.read(self._num_micro_batches)

        return Ahead.begin(
            iterator,
            read,
            place=None if reader is None else (self._replicas.number, reader),
            shape=self._table_shape,
            is_new=iterator is not last,
            stops=current().requested,
            group=self._control.world,
        )
