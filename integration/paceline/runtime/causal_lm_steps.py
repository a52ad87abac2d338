"""Begin a step of a causal LM: read its micro-batches, and agree on them.

A step begins with a look at all its micro-batches. The first stage tells the others their shapes and which side
tensors they have, so that receives need no headers; all ranks learn the number of label tokens of the whole step, so
that each micro-batch's loss can be weighted as if the step were one batch; and a rank that has no data, or bad data,
stops every rank with the same message.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.control import ControlPlane
from ..hf.fixed_positions import positions_fault
from ..hf.masks import IGNORED, MaskFacts
from ..hf.stage import CausalLMStage
from ..supervise.lifetime import current
from ..supervise.watch import EVERYONE, WATCH
from .causal_lm_runner import StepBook
from .micro_batches import FILLER, MicroBatch, MicroBatchShape, pinned, read_micro_batch, recut, shape_of
from .model_support import Cut, Reader

COLUMNS = 6  # of a step's table: batch, length, side inputs (bits), label tokens, tokens, checksum


def shapes_in(table: Tensor) -> list[MicroBatchShape]:
    """Shapes of the micro-batches of a step, from its table."""
    return [shape_of(row) for row in table[1:].view(-1, COLUMNS)[: int(table[0])].tolist()]


def _print_of(table: Tensor) -> int:
    """A number that tells the table of a step from another one."""
    return zlib.crc32(table.numpy().tobytes())


def _differ(prints: Sequence[int], num_slices: int) -> bool:
    """Whether ranks with slices of the same layers have read different steps.

    Args:
        prints: of the tables of their steps, those of a replica next to each other.
    """
    starts = range(0, len(prints), num_slices)
    return any(len(set(prints[start : start + num_slices])) > 1 for start in starts)


class Read(NamedTuple):
    """A step as one rank has read it.

    Args:
        row: the numbers of its table.
        error: why it could not be read.
    """

    loaded: list[MicroBatch]
    row: list[int]
    error: BaseException | None


@dataclass(frozen=True)
class Replicas:
    """Place among the pipelines side by side.

    Args:
        number: of this pipeline.
        num_sharing: pipelines that share experts and so compute in step.
        slice_number: of this rank's slices of layers.
        num_slices: of each layer, on ranks that read the same data.
    """

    number: int = 0
    size: int = 1
    num_sharing: int = 1
    slice_number: int = 0
    num_slices: int = 1


@dataclass(frozen=True)
class Readers:
    """The ranks of a pipeline that read its data: those with the first or the last stage of some direction.

    Args:
        number: of this rank among them; None: it reads nothing.
        size: how many they are.
        speaks: whether this one counts the pipeline's tokens for all its ranks.
    """

    number: int | None
    size: int
    speaks: bool

    @classmethod
    def of(cls, routes: Sequence[Sequence[int]], device: int) -> Readers:
        """Those of a pipeline with such routes, on one of its devices."""
        ends = sorted({route[end] for route in routes for end in (0, -1)})
        number = ends.index(device) if device in ends else None
        return cls(number, len(ends), device == routes[0][-1])

    @property
    def reads(self) -> bool:
        """Whether this rank reads data."""
        return self.number is not None


class CausalLMSteps:
    """Reads steps and agrees on them with the other ranks.

    Args:
        book: gets what is known of the step.
        module: any of the model's stages on this rank.
        readers: place among the ranks that read data.
        is_pipe_parallel: whether the pipeline has several ranks.
        raises: around an error that is raised on all ranks.
    """

    def __init__(
        self,
        reader: Reader,
        book: StepBook,
        module: CausalLMStage,
        control: ControlPlane,
        device: torch.device,
        *,
        readers: Readers,
        is_pipe_parallel: bool,
        replicas: Replicas,
        raises: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._reader, self._book, self._stage, self._control, self._device = reader, book, module, control, device
        self.readers, self._replicas, self.raises = readers, replicas, raises
        self._is_pipe_parallel = is_pipe_parallel
        self.is_stopping = False
        """Whether any rank had been asked to stop when the last step began; the same on all ranks."""
        self.notices_change = self.change_is_noticed = False
        """As of :class:`~paceline.runtime.model_support.Steps`."""

    @property
    def reads(self) -> bool:
        """Whether this rank reads data."""
        return self.readers.reads

    @property
    def is_first_slice(self) -> bool:
        """Whether this rank counts for all with slices of the same layers, which have the same losses."""
        return self._replicas.slice_number == 0

    @property
    def tokens(self) -> int:
        """Tokens of the last step, of all replicas, padding not counted."""
        return self._book.tokens

    def open(self, num_micro_batches: int, *, cut: Cut | None = None, partial: bool = False) -> int:
        """Load the step's micro-batches and agree on their shapes. Collective.

        Args:
            partial: take what is left of the data, down to nothing, instead of stopping when it is short.

        Returns:
            How many there are, of all replicas.
        """
        book, control = self._book, self._control
        loaded, own, error = self.read(num_micro_batches, cut=cut, partial=partial)
        # Every reader puts its table down; every rank of the pipeline sees all.
        width, readers = 1 + (cut.num_micro_batches if cut else num_micro_batches) * COLUMNS, self.readers
        header = torch.zeros(readers.size * width + 3, dtype=torch.int64)
        tables, flags = header[:-3].view(readers.size, width), header[-3:]
        if readers.number is not None:
            tables[readers.number, : len(own)] = torch.tensor(own, dtype=torch.int64)
        WATCH.doing("agreeing on the step", EVERYONE)
        flags += torch.tensor([error is not None, current().requested, self.notices_change])
        if self._is_pipe_parallel:
            control.sum_over_stages(header)
        failed, stopping, has_changed = (bool(flag) for flag in flags)
        step = self._reader.global_steps
        if not failed and bool((tables != tables[:1]).any()):
            failed = True
            error = ValueError(
                f"the first and the last stage see different data at step {step}: "
                "give both the same iterator (same files, seed and data-parallel rank). If dropout draws from torch's "
                "generator and the data do too, let them draw from one of their own, or in dataloader workers."
            )
        shapes = [] if failed else shapes_in(tables[0])
        book.shapes, book.loaded = shapes, self.ready(loaded)
        loads = [0] * self._replicas.size
        loads[self._replicas.number] = len(shapes)
        tokens = sum(shape.tokens for shape in shapes)
        num_filled = sum(shape.tokens > 0 for shape in shapes)
        counts = [book.own_label_tokens, tokens, num_filled, *loads] if self.is_first_slice else [0] * (3 + len(loads))
        seen = [0] * (self._replicas.size * self._replicas.num_slices)
        seen[self._replicas.number * self._replicas.num_slices + self._replicas.slice_number] = _print_of(tables[0])
        totals = [int(failed), int(stopping), int(has_changed), *seen, *counts]
        if len(seen) > 1:
            totals = control.sum(torch.tensor(totals) * self.readers.speaks).tolist()
        failures, stops, notices, *told = totals
        seen, (label_tokens, tokens, num_filled, *loads) = told[: len(seen)], told[len(seen) :]
        if not failures and _differ(seen, self._replicas.num_slices):
            failures = 1
            error = ValueError(
                f"ranks with slices of the same layers see different data at step {step}: give all of a replica the "
                "same iterator (same files, seed and data-parallel rank)."
            )
        self.is_stopping, self.change_is_noticed = stops > 0, notices > 0
        if failures:
            with self.raises():
                control.raise_shared(error, f"beginning step {step}")
        book.label_tokens, book.tokens, book.num_filled = label_tokens, tokens, num_filled
        if self._replicas.num_sharing > 1:  # replicas that share experts compute in step, each as often as the others
            missing = max(loads) - len(shapes)
            book.shapes = [*shapes, *[MicroBatchShape(1, 1, (), 0, 0, MaskFacts())] * missing]
            book.loaded = [*book.loaded, *self.ready([FILLER] * missing)]
        return sum(loads)

    def read(self, num_micro_batches: int, *, cut: Cut | None = None, partial: bool = False) -> Read:
        """A step's micro-batches, where they are read."""
        error = self._reader.checkpoint_error()
        if not self.readers.reads or error is not None:
            return Read([], [], error)
        WATCH.doing("loading data")
        try:
            loaded = self._load(num_micro_batches, partial)
            if cut is not None:
                loaded = recut(loaded, cut.size, cut.num_micro_batches)
            row = [len(loaded), *(value for batch in loaded for value in batch.row)]
            return Read(loaded, row, None)
        except Exception as caught:
            return Read([], [], caught)

    def ready(self, loaded: list[MicroBatch]) -> list[MicroBatch]:
        """``loaded`` as it is copied to the device.

        Only once the step is agreed on: pinning memory can wait for all that the device was given, a reduction of the
        step before among it, which may wait for a rank that waits for this one's word on the step.
        """
        return [pinned(batch) for batch in loaded] if self._device.type == "cuda" else loaded

    def _load(self, num_micro_batches: int, partial: bool) -> list[MicroBatch]:
        if self._reader.data_iterator is None:
            raise ValueError("no training data: pass an iterator to train_batch, or training_data to initialize.")
        loaded: list[MicroBatch] = []
        while len(loaded) < num_micro_batches:
            try:
                batch = self._reader._next_batch()
            except StopIteration:
                if partial:
                    break
                raise StopIteration(
                    f"the data ended after {len(loaded)} of a step's {num_micro_batches} micro-batches"
                ) from None
            loaded.append(read_micro_batch(batch))
            self._check_against_model(loaded[-1])
        return loaded

    def _check_against_model(self, batch: MicroBatch) -> None:
        """Refuse what would fail in the middle of the pipeline, where the other stages could only wait."""
        stage = self._stage
        for name in batch.side:
            if name not in stage.accepts:
                raise ValueError(
                    f"a micro-batch has {name!r}, which {type(stage.model).__name__} does not take: leave it out."
                )
        vocab_size = stage.model.config.get_text_config().vocab_size
        least, most = (int(value) for value in batch.input_ids.aminmax())
        if least < 0 or most >= vocab_size:
            raise ValueError(
                f"a micro-batch has the token id {least if least < 0 else most}, the model's vocabulary is 0 to "
                f"{vocab_size - 1}: use the tokenizer that belongs to the model."
            )
        if fault := positions_fault(stage.model.config, batch.input_ids, batch.side):
            raise ValueError(fault)
        if self._reader.own_loss is not None:
            return  # labels are what it takes them for
        labels = batch.labels[:, 1:]  # the first has no prediction
        odd = labels[(labels != IGNORED) & ((labels < 0) | (labels >= vocab_size))]
        if odd.numel():
            raise ValueError(
                f"a micro-batch has the label {int(odd[0])}, the model's vocabulary is 0 to {vocab_size - 1}: give "
                f"token ids, and {IGNORED} where there is no loss."
            )
