"""Evaluation batches under a Trainer, with an engine that hands out numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from paceline.runtime.replica_shares import ReplicaShares
from paceline.runtime.trainer_batches import EvaluatedAhead, Samples, Seeing, StepsOfEpoch, without_extras


class Loader(list[dict[str, Tensor]]):
    remainder = 2


class Engine:
    """Evaluates two batches at a time; a stage in the middle reads none itself."""

    def __init__(self, reads: bool, num_batches: int) -> None:
        self.reads, self.num_batches = reads, num_batches
        self.taken: list[dict[str, Tensor]] = []

    def predict(
        self, batches: Iterable[Any], see: Callable[[Tensor, Tensor], Any] | None = None
    ) -> Iterator[tuple[Tensor, Any]]:
        source = iter(batches)
        for start in range(0, self.num_batches, 2):
            numbers = range(start, min(start + 2, self.num_batches))
            self.taken += [next(source) for _ in numbers] if self.reads else []
            for number in numbers:
                yield torch.tensor(float(number)), None if see is None else see(torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_outcomes_belong_to_their_batches_and_the_last_one_is_cut(reads: bool, count: int) -> None:
    loader = Loader({"input_ids": torch.full((3, 2), i)} for i in range(count))
    shares, engine = ReplicaShares(1, 0, None), Engine(reads, count)
    ahead = EvaluatedAhead(engine, loader, None, shares)
    assert (len(ahead), ahead.remainder) == (count, 2)
    seen = [(int(batch["input_ids"][0, 0]), batch.outcome[0].item(), shares.rows_at_end) for batch in ahead]
    assert seen == [(i, float(i), 2 if i == count - 1 else 0) for i in range(count)]
    assert shares.rows_at_end == 0
    for batch in engine.taken:  # without labels they count nothing
        assert (batch["labels"] == -100).all()


def test_the_last_batch_of_a_stream_counts_by_its_rows() -> None:
    """Its length is not known before, and Trainer repeats each loss as often as a full batch has rows."""
    loader = Loader({"input_ids": torch.ones(rows, 2)} for rows in (3, 2))
    loader.remainder = -1  # accelerate's, where data have no length
    shares = _shares()
    ahead = EvaluatedAhead(Engine(True, 2), loader, None, shares)
    assert [shares.rows_at_end for _ in ahead] == [0, shares.replicas * 2]
    assert shares.rows_at_end == 0


@pytest.mark.parametrize("is_labelled", [True, False])
def test_what_an_evaluation_keeps_of_logits(is_labelled: bool) -> None:
    """A script's function is given no labels where the data have none."""
    loader = Loader([{"labels" if is_labelled else "input_ids": torch.ones(1)}])
    seeing = Seeing(lambda logits, labels: logits if labels is None else logits + labels)
    ((loss, seen),) = [batch.outcome for batch in EvaluatedAhead(Engine(True, 1), loader, seeing, _shares())]
    assert (loss.item(), seen.item()) == (0.0, 2.0 if is_labelled else 1.0)


def test_extras_stay_behind() -> None:
    batch = {"input_ids": 1, "position_ids": 2, "seq_idx": 3, "num_items_in_batch": 4, "token_type_ids": None}
    assert without_extras(batch) == {"input_ids": 1, "position_ids": 2}
    assert without_extras({"seq_idx": 3}) == {"seq_idx": 3}  # nothing else says it


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_pipelines_take_turns_in_a_stream() -> None:
    rows = [list(_shares(own).take(Stream(), "Training", 2, trains=True)) for own in range(2)]
    assert rows == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(ValueError, match="data for evaluation are a stream and there are 2 pipelines"):
        _shares().take(Stream(), "Evaluation", 2, trains=False)
    data = [1, 2]
    assert _shares().take(data, "Evaluation", 2, trains=False) is data


@pytest.mark.parametrize("loss", [2.0, float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stays_so_beside_other_pipelines(loss: float) -> None:
    """A diverged model is not the best one; only a batch without labels, whose mean is NaN, counts nothing."""

    class Beside(ReplicaShares):
        """Next to a pipeline whose batch has as many label tokens."""

        def gather(self, data: Any) -> Any:
            return torch.cat([data, torch.full_like(data, 3)])

    shares, labels = Beside(2, 0, None), torch.tensor([[1, 2, 3, 4]])
    share = shares.share_of_loss(torch.tensor(loss), labels, torch.device("cpu"))
    assert share.item() == pytest.approx(loss, nan_ok=True)
    nothing = shares.share_of_loss(torch.tensor(float("nan")), torch.full_like(labels, -100), torch.device("cpu"))
    assert nothing.item() == 0.0


def _shares(own: int = 0) -> ReplicaShares:
    return ReplicaShares(2, own, None)


class Epoch:
    """An epoch's steps, of so many batches each, and what was read of them."""

    def __init__(self, *sizes: int, fault: Exception | None = None) -> None:
        self.sizes, self.fault = list(sizes), fault
        self.num_read = 0

    def read(self, num_batches: int) -> Samples:
        if not self.sizes:
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise fault
            return [], None
        size = min(self.sizes.pop(0), num_batches)
        self.num_read += 1
        return [{"input_ids": 10 * self.num_read + number, "num_items_in_batch": 7} for number in range(size)], size


def numbers(batches: Sequence[Any]) -> list[int]:
    return [batch["input_ids"] if isinstance(batch, dict) else -1 for batch in batches]


def taken(steps: StepsOfEpoch, count: int = 2) -> list[int]:
    return numbers([next(steps) for _ in range(count)])


def test_a_step_is_read_once_for_the_trainer_and_the_engine() -> None:
    epoch = Epoch(2, 2, 1)
    steps = StepsOfEpoch(epoch.read, 2, fills=True)
    batches, items = steps.samples(2)
    assert (numbers(batches), items) == ([10, 11], 2)
    assert taken(steps) == [10, 11]
    assert taken(steps) == [20, 21]  # ahead of the trainer
    steps.trained()
    assert epoch.num_read == 2
    assert numbers(steps.samples(2)[0]) == [20, 21]
    assert epoch.num_read == 2
    assert taken(steps) == [30, -1]  # filled up
    steps.trained()
    assert numbers(steps.samples(1)[0]) == [30]
    with pytest.raises(StopIteration):
        next(steps)
    steps.trained()
    assert "num_items_in_batch" in batches[0]


def test_a_stage_that_takes_no_micro_batch_keeps_none() -> None:
    epoch = Epoch(2, 2, 2)
    steps = StepsOfEpoch(epoch.read, 2, fills=True)
    for first in (10, 20, 30):
        assert numbers(steps.samples(2)[0]) == [first, first + 1]
        steps.trained()
        assert not steps._kept


def test_a_stream_that_ends_in_a_step_gives_the_trainer_what_is_left() -> None:
    steps = StepsOfEpoch(Epoch(2, 1).read, 2, fills=False)
    steps.samples(2)
    assert taken(steps) == [10, 11]
    with pytest.raises(StopIteration):
        next(steps)
    steps.trained()
    assert numbers(steps.samples(2)[0]) == [20]


def test_what_fails_ahead_fails_where_the_trainer_reads_too() -> None:
    steps = StepsOfEpoch(Epoch(2, fault=OSError("gone")).read, 2, fills=True)
    steps.samples(2)
    taken(steps)
    with pytest.raises(OSError, match="gone"):
        next(steps)
    steps.trained()
    with pytest.raises(OSError, match="gone"):
        steps.samples(2)
