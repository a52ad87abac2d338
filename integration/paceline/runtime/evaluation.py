"""Evaluate a causal LM between its training steps: mean losses, and what a caller wants of single micro-batches.

Legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from ..comm.control import ControlPlane
from ..supervise.watch import WATCH
from .causal_lm_runner import CausalLMRunner, Inspection, Seen, StepBook
from .causal_lm_steps import CausalLMSteps


class Pipeline(Protocol):
    """The engine, as far as running forwards goes."""

    data_iterator: Iterator[object] | None
    module: nn.Module
    micro_batches: int

    def run_forwards(self, num_micro_batches: int) -> None:
        """Run the forwards of so many micro-batches, which have been agreed on."""

    def between_steps(self) -> AbstractContextManager[None]:
        """Around what ranks do together between training steps."""
        ...


class Evaluation:
    """Runs forwards over batches. All ranks call its methods together.

    Args:
        runners: of this rank's stages.
        loss_rank: global rank of this pipeline's last stage, in its first direction.
        is_pipe_parallel: whether the pipeline has several ranks.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        steps: CausalLMSteps,
        book: StepBook,
        runners: Sequence[CausalLMRunner],
        control: ControlPlane,
        *,
        loss_rank: int,
        is_pipe_parallel: bool,
    ) -> None:
        self._pipeline, self._steps, self._book, self._runners = pipeline, steps, book, runners
        self._control, self._loss_rank, self._is_pipe_parallel = control, loss_rank, is_pipe_parallel

    def evaluate(self, batches: Iterable[object]) -> dict[str, float]:
        """Mean loss per label token over all of ``batches``, of all replicas together.

        Args:
            batches: this replica's micro-batches, the same on its first and last stage; ignored on other stages.
                Replicas may have different numbers of them, also none.

        Returns:
            ``{"eval_loss", "perplexity", "eval_tokens"}`` on every rank. The router loss is not in it. When a rank is
            asked to stop (``is_stopping``) it ends early, with what there is.
        """
        sums = torch.zeros(2, dtype=torch.float64)
        for seen in self._run(batches, None):
            if self._control.rank == self._loss_rank and self._steps.is_first_slice:
                total = torch.stack([loss for loss, _ in seen]).sum() if seen else torch.zeros(())
                sums += torch.tensor([total.item(), self._book.own_label_tokens], dtype=torch.float64)
            if self._steps.is_stopping:
                break
        self._control.sum(sums)
        loss = (sums[0] / sums[1]).item() if sums[1] else float("nan")
        return {"eval_loss": loss, "perplexity": float(torch.tensor(loss).exp()), "eval_tokens": int(sums[1])}

    def predict(
        self, batches: Iterable[object], see: Callable[[Tensor, Tensor], object] | None = None
    ) -> Iterator[tuple[Tensor, object]]:
        """Give the model's own loss of each of ``batches`` (NaN without a label token), and what ``see`` makes of it.

        Several batches are under way at a time. Collective: all ranks take all that there is, in the same order.

        Args:
            batches: as for :meth:`evaluate`; replicas have as many each.
            see: given on all ranks or on none; called on the last stage with logits ``[B, S, V]`` and labels
                ``[B, S]``. What it returns, tensors in tuples, lists or dicts, comes to all stages.

        Yields:
            On every rank, in order; tensors are on the CPU.
        """
        for seen in self._run(batches, see, whole_loss=True):
            counts = [shape.label_tokens for shape in self._book.shapes]
            told = [(loss.cpu() / count, kept) for (loss, kept), count in zip(seen, counts, strict=False)]
            yield from self._control.over_stages(told, self._loss_rank) if self._is_pipe_parallel else told

    @torch.no_grad()
    def _run(
        self, batches: Iterable[object], see: Callable[[Tensor, Tensor], object] | None, whole_loss: bool = False
    ) -> Iterator[list[Seen]]:
        """Pass ``batches`` forward, as many at a time as a step has; what the last stage has seen of them.

        Args:
            whole_loss: with the router's, where the model has one.
        """
        pipeline, steps = self._pipeline, self._steps
        iterator = iter(batches) if steps.reads else None  # elsewhere there may be none
        was_training = pipeline.module.training
        try:
            while True:
                trained_on, pipeline.data_iterator = pipeline.data_iterator, iterator
                pipeline.module.eval()
                inspection = Inspection(see, whole_loss)
                for runner in self._runners:
                    runner.inspection = inspection
                try:
                    with pipeline.between_steps():
                        if not steps.open(pipeline.micro_batches, partial=True):
                            WATCH.idle()  # what the caller makes of it may take any time
                            return
                        if self._book.shapes:  # another replica may have more batches than this one
                            pipeline.run_forwards(len(self._book.shapes))
                    WATCH.idle()
                finally:
                    pipeline.data_iterator = trained_on
                    for runner in self._runners:
                        runner.inspection = None
                yield inspection.seen
        finally:
            pipeline.module.train(was_training)
