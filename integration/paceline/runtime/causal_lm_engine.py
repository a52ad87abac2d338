"""Training and evaluation of a :class:`CausalLMPipeline`: dictionaries in, exact token-weighted losses out.

A step begins with a look at all its micro-batches. The first stage tells the others their shapes and which side
tensors they have, so that receives need no headers; all ranks learn the number of label tokens of the whole step, so
that each micro-batch's loss can be weighted as if the step were one batch; and a rank that has no data, or bad data,
stops every rank with the same message.

Legend: M micro-batches a step, B batch, S sequence, H hidden size, D data-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from ..checkpoint.format import MODEL
from ..comm.shapes import Shapes
from ..hf import hub_files
from ..hf.masks import MaskFacts
from ..hf.peft import save_adapter_config
from ..patches import transformers_masking_utils
from ..patches.registry import apply
from ..supervise.lifetime import current
from ..supervise.watch import EVERYONE, WATCH
from .causal_lm_layers import CausalLMLayers
from .causal_lm_runner import CausalLMRunner, Inspection, Seen, StepBook, StreamShapes
from .engine import PacelineEngine
from .micro_batches import FILLER, MicroBatch, MicroBatchShape, pinned, read_micro_batch, recut, shape_of
from .surroundings import DeepSpeedSurroundings

COLUMNS = 6  # of a step's table: batch, length, side inputs (bits), label tokens, tokens, checksum


def shapes_in(table: Tensor) -> list[MicroBatchShape]:
    """Of the micro-batches of a step, from its table."""
    return [shape_of(row) for row in table[1:].view(-1, COLUMNS)[: int(table[0])].tolist()]


class CausalLMEngine(PacelineEngine):
    """The engine that :func:`paceline.initialize` builds for a Hugging Face model.

    ``train_batch(data_iter)`` takes M micro-batches from the iterator on the first and on the last stage; both must
    see the same data. The loss that it returns, and whose gradient it applies, is that of the unsplit model over all
    tokens of the step: micro-batches and replicas weigh by their label tokens.
    """

    can_cut = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.book = StepBook()
        self.is_stopping = False
        """Whether any rank had been asked to stop when the last step began; the same on all ranks."""
        self.data_iterator: Any = None
        apply(*transformers_masking_utils.PATCHES)  # for the rest of the process: they act where facts are told only
        super().__init__(*args, **kwargs)
        if self._config.pipeline["activation_checkpoint_interval"] > 0:
            self.module.enable_gradient_checkpointing()

    @property
    def step_tokens(self) -> int:
        """Tokens of the last step, of all replicas together, padding not counted."""
        return self.book.tokens

    @property
    def own_loss(self) -> Callable[..., Tensor] | None:
        """What computes losses on the last stage instead of the model, as :class:`.trainer_loss.TrainersLoss` does."""
        return self._runners[0].own_loss

    @own_loss.setter
    def own_loss(self, compute: Callable[..., Tensor] | None) -> None:
        for runner in self._runners:
            runner.own_loss = compute

    @property
    def _runners(self) -> list[CausalLMRunner]:
        return [held.runner for held in self.held]

    def _make_layers(self) -> CausalLMLayers:
        return CausalLMLayers(self.module)

    # -- one step ------------------------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Mean loss per label token over all of ``batches``, of all replicas together.

        Args:
            batches: this replica's micro-batches, the same on its first and last stage; ignored on other stages.
                Replicas may have different numbers of them, also none.

        Returns:
            ``{"eval_loss", "perplexity", "eval_tokens"}`` on every rank. The router loss is not in it. When a rank is
            asked to stop (``is_stopping``) it ends early, with what there is.
        """
        sums = torch.zeros(2, dtype=torch.float64)
        for seen in self._infer(iter(batches), None):
            if self.is_last_stage():
                total = torch.stack([loss for loss, _ in seen]).sum() if seen else torch.zeros(())
                sums += torch.tensor([total.item(), self.book.own_label_tokens], dtype=torch.float64)
            if self.is_stopping:
                break
        self.control.sum(sums)
        loss = (sums[0] / sums[1]).item() if sums[1] else float("nan")
        return {"eval_loss": loss, "perplexity": float(torch.tensor(loss).exp()), "eval_tokens": int(sums[1])}

    def predict(
        self, batches: Iterable[Any], see: Callable[[Tensor, Tensor], Any] | None = None
    ) -> Iterator[tuple[Tensor, Any]]:
        """Of each of ``batches`` the model's own loss (NaN without a label token), and what ``see`` makes of it.

        Several batches are under way at a time. Collective: all ranks take all that there is, in the same order.

        Args:
            batches: as for :meth:`evaluate`; replicas have as many each.
            see: called on the last stage with logits ``[B, S, V]`` and labels ``[B, S]``; what it returns, tensors in
                tuples, lists or dicts, comes to all stages.

        Yields:
            On every rank, in order; tensors are on the CPU.
        """
        for seen in self._infer(iter(batches), see, whole_loss=True):
            counts = [shape.label_tokens for shape in self.book.shapes]
            told = [(loss.cpu() / count, kept) for (loss, kept), count in zip(seen, counts, strict=False)]
            source = self.rank_of_stage(self.num_stages - 1)
            yield from self.control.over_stages(told, source) if self.is_pipe_parallel else told

    @torch.no_grad()
    def _infer(
        self, batches: Iterator[Any], see: Callable[[Tensor, Tensor], Any] | None, whole_loss: bool = False
    ) -> Iterator[list[Seen]]:
        """Pass ``batches`` forward, as many at a time as a step has; what the last stage has seen of them.

        Args:
            whole_loss: with the router's, where the model has one.
        """
        self._check_whole()
        was_training = self.module.training
        try:
            while True:
                trained_on, self.data_iterator = self.data_iterator, batches if self._loads else None
                self.module.eval()
                inspection = Inspection(see, whole_loss)
                for runner in self._runners:
                    runner.inspection = inspection
                try:
                    with self._naming_lost_peers():
                        if not self._open_step(self.micro_batches, partial=True):
                            return
                        if self.book.shapes:  # another replica may have more batches than this one
                            self._exec_schedule(self._inference_schedule(len(self.book.shapes)))
                    WATCH.idle()
                finally:
                    self.data_iterator = trained_on
                    for runner in self._runners:
                        runner.inspection = None
                yield inspection.seen
        finally:
            self.module.train(was_training)

    @property
    def _loads(self) -> bool:
        return self.is_first_stage() or self.is_last_stage()

    def _open_step(self, num_micro_batches: int, *, trains: bool = False, partial: bool = False) -> int:
        """Load the step's micro-batches and agree on their shapes; returns how many there are on any replica.

        Args:
            trains: cut the micro-batches as the tuner wants them.
            partial: take what is left of the data, down to nothing, instead of stopping when it is short.
        """
        loaded, own, error = self._read_step(num_micro_batches, trains=trains, partial=partial)
        if trains:
            num_micro_batches = self.run_micro_batches
        # Both ends put their table down; every stage of the pipeline sees both.
        width = 1 + num_micro_batches * COLUMNS
        header = torch.zeros(2 * width + 2, dtype=torch.int64)
        tables, flags = header[:-2].view(2, width), header[-2:]
        for row, is_mine in enumerate((self.is_first_stage(), self.is_last_stage())):
            if is_mine:
                tables[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
        WATCH.doing("agreeing on the step", EVERYONE)
        flags += torch.tensor([error is not None, current().requested])
        if self.is_pipe_parallel:
            self.control.sum_over_stages(header)
        failed, stopping = (bool(flag) for flag in flags)
        table = tables[0]
        if not failed and not torch.equal(*tables):
            failed = True
            error = ValueError(
                f"the first and the last stage see different data at step {self.global_steps}: "
                "give both the same iterator (same files, seed and data-parallel rank)."
            )
        self.book.shapes = [] if failed else shapes_in(table)
        self.book.loaded = loaded
        tokens = sum(shape.tokens for shape in self.book.shapes)
        loads = [0] * self.dp_world_size
        loads[self.grid.data_parallel_id] = len(self.book.shapes)
        totals = [self.book.own_label_tokens, tokens, int(failed), int(stopping), *loads]
        if self.is_data_parallel:
            totals = self.control.sum(torch.tensor(totals) * self.is_last_stage()).tolist()
        label_tokens, tokens, failures, stops, *loads = totals
        self.is_stopping = stops > 0
        if failures:
            with self._told_once():
                self.control.raise_shared(error, f"beginning step {self.global_steps}")
        self.book.label_tokens, self.book.tokens = label_tokens, tokens
        if self._expert_groups.size > 1:  # replicas that share experts compute in step, each as often as the others
            missing = max(loads) - len(self.book.shapes)
            self.book.shapes = [*self.book.shapes, *[MicroBatchShape(1, 1, (), 0, 0, MaskFacts())] * missing]
            self.book.loaded = [*self.book.loaded, *[FILLER] * missing]
        return sum(loads)

    def _read_step(
        self, num_micro_batches: int, *, trains: bool, partial: bool
    ) -> tuple[list[MicroBatch], list[int], BaseException | None]:
        """A step's micro-batches where they are read, the numbers of their table, and what went wrong."""
        error: BaseException | None = self.checkpoint_error()
        loaded: list[MicroBatch] = []
        if not self._loads or error is not None:
            return loaded, [], error
        WATCH.doing("loading data")
        try:
            loaded = self._load(num_micro_batches, partial)
            if trains and self.cut != self.micro_batch_size:
                loaded = recut(loaded, self.cut, self.run_micro_batches)
            row = [len(loaded), *(value for batch in loaded for value in batch.row)]
            on_gpu = torch.device(self.device).type == "cuda"
            return [pinned(batch) for batch in loaded] if on_gpu else loaded, row, None
        except Exception as caught:
            return [], [], caught

    def _load(self, num_micro_batches: int, partial: bool) -> list[MicroBatch]:
        if self.data_iterator is None:
            raise ValueError("no training data: pass an iterator to train_batch, or training_data to initialize.")
        loaded: list[MicroBatch] = []
        while len(loaded) < num_micro_batches:
            try:
                batch = self._next_batch()
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
        """What would fail in the middle of the pipeline, where the other stages could only wait."""
        stage = self.module.stage
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

    def _make_runner(self, stage: int, *, reduces_early: bool) -> CausalLMRunner:
        return CausalLMRunner(
            stage,
            self.num_stages,
            reach=self.reach,
            around=DeepSpeedSurroundings(self, reduces_early=reduces_early),
            module=self.module,
            device=torch.device(self.device),
            book=self.book,
            losses=self.loss_book,
            num_replicas=self.dp_world_size,
            wants_logits=lambda: bool(self.eval_return_logits),
        )

    def _activation_shapes(self) -> Shapes:
        router_loss = self.module.stage.router_loss
        return StreamShapes(None if router_loss is None else router_loss.size)

    def _tokens_of_step(self) -> int:
        return self.book.tokens

    def _unit_of_sum(self, num_rows: int) -> float:
        return max(self.book.label_tokens, 1) / self.optimizer.loss_scale

    def _gradient_divisor(self) -> float:
        if not self.gradient_average:
            raise ValueError(
                'gradient_allreduce_op is "sum": the loss of this pipeline is the mean over all tokens of a step; '
                "leave the key out."
            )
        return 1.0  # each loss is already its share of the step's, over all replicas

    def _aggregate_total_loss(self) -> Tensor:
        """The sum of all micro-batches' shares, of all replicas, on every rank."""
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        if self.is_last_stage() and self.total_loss is not None:
            total += self.total_loss.float()
        if self.is_last_stage() and self.is_data_parallel:
            dist.all_reduce(total, group=self.grid.get_data_parallel_group())
        if self.is_pipe_parallel:
            dist.broadcast(total, src=self._loss_stage_global_rank(), group=self.grid.get_pipe_parallel_group())
        self.dp_group_loss = total.clone()
        return total

    def _write_files(self, draft: Path, more: Callable[[Path], None] | None) -> None:
        """The model's config, so that a checkpoint can become a model of its own (``paceline export``)."""
        folder = draft / MODEL
        folder.mkdir(exist_ok=True)
        hub_files.save_config(self.module.stage.model, folder)
        if self.module.adapters is not None:
            save_adapter_config(self.module.stage.model, self.module.adapters, folder)
        super()._write_files(draft, more)
