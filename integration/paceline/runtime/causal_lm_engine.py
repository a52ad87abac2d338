"""Training and evaluation of a :class:`CausalLMPipeline`: dictionaries in, exact token-weighted losses out.

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
from ..hf.peft import save_adapter_config
from ..patches import transformers_masking_utils
from ..patches.registry import apply
from ..supervise.watch import WATCH
from .causal_lm_layers import CausalLMLayers
from .causal_lm_runner import CausalLMRunner, Inspection, Seen, StepBook, StreamShapes
from .causal_lm_steps import CausalLMSteps, Cut, Replicas
from .engine import PacelineEngine
from .surroundings import DeepSpeedSurroundings


class CausalLMEngine(PacelineEngine):
    """The engine that :func:`paceline.initialize` builds for a Hugging Face model.

    ``train_batch(data_iter)`` takes M micro-batches from the iterator on the first and on the last stage; both must
    see the same data. The loss that it returns, and whose gradient it applies, is that of the unsplit model over all
    tokens of the step: micro-batches and replicas weigh by their label tokens.
    """

    can_cut = True
    _reduces_early = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.book = StepBook()
        self.data_iterator: Any = None
        apply(*transformers_masking_utils.PATCHES)  # for the rest of the process: they act where facts are told only
        super().__init__(*args, **kwargs)
        if self._config.pipeline["activation_checkpoint_interval"] > 0:
            self.module.enable_gradient_checkpointing()

    def _connect(self) -> None:
        super()._connect()
        self.steps = CausalLMSteps(
            self,
            self.book,
            self.module,
            self.control,
            torch.device(self.device),
            ends=(bool(self.is_first_stage()), bool(self.is_last_stage())),
            replicas=Replicas(self.grid.data_parallel_id, self.dp_world_size, self.shared_experts.groups.size),
            raises=lambda: self.checkpointer.reported(),  # noqa: PLW0108 - it is made later
        )

    @property
    def is_stopping(self) -> bool:
        """Whether any rank had been asked to stop when the last step began; the same on all ranks."""
        return self.steps.is_stopping

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
        return [held.runner for held in self.held if isinstance(held.runner, CausalLMRunner)]

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
        self.half_way.check()
        was_training = self.module.training
        reads = self.is_first_stage() or self.is_last_stage()
        try:
            while True:
                trained_on, self.data_iterator = self.data_iterator, batches if reads else None
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

    def _open_step(self, num_micro_batches: int, *, trains: bool = False, partial: bool = False) -> int:
        """As :meth:`CausalLMSteps.open`; a training step's micro-batches are cut as the tuner wants them."""
        is_cut = trains and self.cut != self.micro_batch_size
        cut = Cut(self.cut, self.run_micro_batches) if is_cut else None
        return self.steps.open(num_micro_batches, cut=cut, partial=partial)

    def _make_runner(self, stage: int) -> CausalLMRunner:
        return CausalLMRunner(
            stage,
            self.num_stages,
            reach=self.reach,
            around=DeepSpeedSurroundings(self, reduces_early=self._reduces_early),
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

    def _write_model(self, draft: Path) -> None:
        """The model's config, so that a checkpoint can become a model of its own (``paceline export``)."""
        folder = draft / MODEL
        folder.mkdir(exist_ok=True)
        hub_files.save_config(self.module.stage.model, folder)
        if self.module.adapters is not None:
            save_adapter_config(self.module.stage.model, self.module.adapters, folder)
