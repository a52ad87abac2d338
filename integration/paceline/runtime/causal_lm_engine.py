"""Training and evaluation of a :class:`CausalLMPipeline`: dictionaries in, exact token-weighted losses out.

A step begins with a look at all its micro-batches. The first stage tells the others their shapes and which side
tensors they have, so that receives need no headers; all ranks learn the number of label tokens of the whole step, so
that each micro-batch's loss can be weighted as if the step were one batch; and a rank that has no data, or bad data,
stops every rank with the same message.

Legend: M micro-batches a step, B batch, S sequence, H hidden size, D data-parallel size.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.schedule import InferenceSchedule
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from ..checkpoint.format import MODEL
from ..hf import hub_files
from ..hf.stage import SIDE_INPUTS
from .control import PeerError
from .engine import PacelineEngine
from .lifetime import current
from .watch import EVERYONE, WATCH

IGNORED = -100
"""Label of a token that has no loss."""

_LOST_CONNECTION = re.compile(r"by peer|timed? ?out|broken pipe|NCCL|remote process", re.IGNORECASE)

_COLUMNS = 6  # of a step's table: batch, length, side inputs (bits), label tokens, tokens, checksum


@dataclass(frozen=True)
class MicroBatchShape:
    """What every stage knows of a micro-batch before it arrives."""

    batch: int
    length: int
    side: tuple[str, ...]
    label_tokens: int
    tokens: int


@dataclass
class MicroBatch:
    """One micro-batch on the first or last stage, on the CPU: ``[B, S]`` int64 each."""

    input_ids: Tensor
    labels: Tensor
    side: dict[str, Tensor]

    @property
    def row(self) -> list[int]:
        bits = sum(1 << i for i, name in enumerate(SIDE_INPUTS) if name in self.side)
        mask = self.side.get("attention_mask")
        tokens = self.input_ids.numel() if mask is None else int(mask.sum())
        contents = (self.input_ids, self.labels, *self.side.values())
        checksum = zlib.crc32(torch.stack(contents).cpu().numpy().tobytes())
        return [*self.input_ids.shape, bits, count_label_tokens(self.labels), tokens, checksum]


def count_label_tokens(labels: Tensor) -> int:
    """Label tokens that a next-token loss over ``labels`` ``[B, S]`` averages over: the first position has none."""
    return int((labels[:, 1:] != IGNORED).sum())


def read_micro_batch(batch: Any) -> MicroBatch:
    """A micro-batch from what a data loader yields: a mapping with Hugging Face's names, or ``(inputs, labels)``.

    Raises:
        ValueError: no token ids or labels, unknown keys, or shapes that do not match.
    """
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        fields = dict(batch)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, labels = batch
        fields = {**(inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}), "labels": labels}
    else:
        raise ValueError(
            f"a micro-batch is a {type(batch).__name__}: it must be a mapping with 'input_ids' and 'labels', "
            "or a pair (input_ids, labels)."
        )
    for name in ("input_ids", "labels"):
        if name not in fields:
            raise ValueError(
                f"a micro-batch has {sorted(fields)} but no {name!r}: add it"
                + (" (a copy of input_ids, -100 where there is no loss)." if name == "labels" else ".")
            )
    unknown = set(fields) - {"input_ids", "labels", *SIDE_INPUTS}
    if unknown:
        raise ValueError(
            f"a micro-batch has {sorted(unknown)}, which a causal-LM pipeline does not pass on: give only "
            f"{['input_ids', 'labels', *SIDE_INPUTS]}."
        )
    tensors = {name: torch.as_tensor(value).long() for name, value in fields.items() if value is not None}
    shape = tensors["input_ids"].shape
    for name, tensor in tensors.items():
        if tensor.shape != shape or tensor.dim() != 2:
            raise ValueError(
                f"{name!r} has shape {list(tensor.shape)}, input_ids {list(shape)}: both must be [batch, sequence]."
            )
    side = {name: tensors[name] for name in SIDE_INPUTS if name in tensors}
    if set(side) == {"attention_mask"} and bool(side["attention_mask"].all()):
        side = {}  # nothing is padded: the mask says no more than its absence, and need not travel
    return MicroBatch(tensors["input_ids"], tensors["labels"], side)


class CausalLMEngine(PacelineEngine):
    """The engine that :func:`paceline.initialize` builds for a Hugging Face model.

    ``train_batch(data_iter)`` takes M micro-batches from the iterator on the first and on the last stage; both must
    see the same data. The loss that it returns, and whose gradient it applies, is that of the unsplit model over all
    tokens of the step: micro-batches and replicas weigh by their label tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._shapes: list[MicroBatchShape] = []
        self._loaded: list[MicroBatch] = []
        self._next = {"load": 0, "receive": 0, "forward": 0}
        self._step_label_tokens = 0
        self.step_tokens = 0
        """Tokens of the last step, of all replicas together, padding not counted."""
        self.is_stopping = False
        """Whether any rank had been asked to stop when the last step began; the same on all ranks."""
        self.data_iterator: Iterator[Any] | None = None
        self.total_loss: Tensor | None = None
        self._stream_in: tuple[int, torch.dtype] | None = None
        self._stream_out: tuple[int, torch.dtype] | None = None
        super().__init__(*args, **kwargs)
        if self._config.pipeline["activation_checkpoint_interval"] > 0:
            self.module.enable_gradient_checkpointing()

    # -- one step ------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over M micro-batches.

        Returns:
            The step's loss, a scalar tensor, on every rank.

        Raises:
            StopIteration: on every rank, when the iterator of any of them has less than a step left.
            ValueError: on every rank, when a micro-batch does not fit.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        WATCH.step = self.global_steps
        with self._naming_lost_peers():
            self._open_step(self.micro_batches)
            return super().train_batch()

    _doing: tuple[str, int] | None = None

    @contextmanager
    def _naming_lost_peers(self) -> Iterator[None]:
        """Say where a rank was when the connection to another broke; the backends only say that it did."""
        try:
            yield
        except RuntimeError as error:
            if not _LOST_CONNECTION.search(str(error)):
                raise
            doing = "agreeing with the other ranks"
            if self._doing is not None:
                verb, stage = self._doing
                doing = f"{verb} stage {stage}, rank {self.grid.stage_to_global(stage_id=stage)}"
            raise PeerError(
                f"rank {self.global_rank}, stage {self.stage_id}, lost another rank at step {self.global_steps} while "
                f"{doing}; that rank's own error, if it could still give one, is the cause ({error})"
            ) from error

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As :meth:`deepspeed.PipelineEngine.eval_batch`; the mean loss is over label tokens."""
        trained_on, self.data_iterator = self.data_iterator, data_iter
        with self._naming_lost_peers():
            try:
                self._open_step(num_micro_batches or self.micro_batches)
            finally:
                self.data_iterator = trained_on
            return super().eval_batch(
                data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
            )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Mean loss per label token over all of ``batches``, of all replicas together.

        Args:
            batches: this replica's micro-batches, the same on its first and last stage; ignored on other stages.
                Replicas may have different numbers of them, also none.

        Returns:
            ``{"eval_loss", "perplexity", "eval_tokens"}`` on every rank. The router loss is not in it. When a rank is
            asked to stop (``is_stopping``) it ends early, with what there is.
        """
        with self._naming_lost_peers():
            found = self._evaluate(batches)
        WATCH.idle()
        return found

    def _evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        was_training = self.module.training
        self.module.eval()
        trained_on, self.data_iterator = self.data_iterator, iter(batches) if self._loads else None
        sums = torch.zeros(2, dtype=torch.float64)
        try:
            while self._open_step(self.micro_batches, partial=True):
                self._sum_losses = torch.zeros((), dtype=torch.float64, device=self.device)
                self._exec_schedule(InferenceSchedule(len(self._shapes), self.num_stages, self.stage_id))
                if self.is_last_stage():
                    sums += torch.stack([self._sum_losses.cpu(), torch.tensor(self._label_tokens, dtype=torch.float64)])
                if self.is_stopping:
                    break
        finally:
            self.data_iterator = trained_on
            self._sum_losses = None
            self.module.train(was_training)
        self.control.sum(sums)
        loss = (sums[0] / sums[1]).item() if sums[1] else float("nan")
        return {"eval_loss": loss, "perplexity": float(torch.tensor(loss).exp()), "eval_tokens": int(sums[1])}

    _sum_losses: Tensor | None = None

    @property
    def _loads(self) -> bool:
        return self.is_first_stage() or self.is_last_stage()

    @property
    def _label_tokens(self) -> int:
        return sum(shape.label_tokens for shape in self._shapes)

    def _open_step(self, num_micro_batches: int, partial: bool = False) -> int:
        """Load the step's micro-batches and agree on their shapes; returns how many there are on any replica.

        Args:
            partial: take what is left of the data, down to nothing, instead of stopping when it is short.
        """
        error: BaseException | None = self.checkpoint_error()
        loaded: list[MicroBatch] = []
        own: list[int] = []
        if self._loads and error is None:
            WATCH.doing("loading data")
            try:
                loaded = self._load(num_micro_batches, partial)
                own = [len(loaded), *(value for batch in loaded for value in batch.row)]
            except Exception as caught:
                error = caught
        # Both ends put their table down; every stage of the pipeline sees both.
        width = 1 + num_micro_batches * _COLUMNS
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
        rows = [] if failed else table[1:].view(-1, _COLUMNS)[: int(table[0])].tolist()
        self._shapes = [
            MicroBatchShape(batch, length, tuple(n for i, n in enumerate(SIDE_INPUTS) if bits >> i & 1), *counts)
            for batch, length, bits, *counts, _ in rows
        ]
        self._loaded = loaded
        self._next = dict.fromkeys(self._next, 0)
        tokens = sum(shape.tokens for shape in self._shapes)
        totals = [self._label_tokens, tokens, len(rows), int(failed), int(stopping)]
        if self.is_data_parallel:
            totals = self.control.sum(torch.tensor(totals) * self.is_last_stage()).tolist()
        label_tokens, tokens, count, failures, stops = totals
        self.is_stopping = stops > 0
        if failures:
            with self._told_once():
                self.control.raise_shared(error, f"beginning step {self.global_steps}")
        self._step_label_tokens, self.step_tokens = label_tokens, tokens
        return count

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

    # -- the instructions of a schedule --------------------------------------------------------------------------

    def _take(self, counter: str) -> int:
        index = self._next[counter]
        self._next[counter] += 1
        return index

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        batch = self._loaded[self._take("load")]
        if self.is_first_stage():
            side = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.side.items()}
            ids = batch.input_ids.to(self.device, non_blocking=True)
            self.pipe_buffers["inputs"][buffer_id] = (ids, side, None)
        if self.is_last_stage():
            self.pipe_buffers["labels"][buffer_id] = batch.labels.to(self.device, non_blocking=True)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        stream, side, routing = self.pipe_buffers["inputs"][buffer_id]
        shape = self._shapes[self._take("forward")]
        with self.clock.compute():
            with autocast_if_enabled(self):
                out, routing_out = self.module(stream, side, routing)
            if self.is_last_stage():
                self._keep_loss(buffer_id, out, routing_out, shape)
            else:
                self.pipe_buffers["outputs"][buffer_id] = (out, routing_out, side)

    def _keep_loss(self, buffer_id: int, logits: Tensor, routing: Tensor | None, shape: MicroBatchShape) -> None:
        stage, labels = self.module.stage, self.pipe_buffers["labels"][buffer_id]
        if self._sum_losses is not None:
            if shape.label_tokens:
                self._sum_losses += stage.loss(logits, labels, None, 1.0).double()
            return
        if self.eval_return_logits:
            self.outputs = logits
        num_losses = len(self._shapes) * self.dp_world_size
        loss = stage.loss(logits, labels, routing, max(self._step_label_tokens, 1), router_share=1 / num_losses)
        self.pipe_buffers["outputs"][buffer_id] = (loss, None, None)
        self.fwd_outputs.append(loss.detach() * num_losses)  # eval_batch takes their mean
        self.total_loss = loss.detach() if self.total_loss is None else self.total_loss + loss.detach()

    def _exec_backward_pass(self, buffer_id: int) -> None:
        out, routing, _ = self.pipe_buffers["outputs"][buffer_id]
        if self.is_last_stage():
            pairs = [(self.optimizer.scale_if_loss(out), None)]
        else:
            gradients = self.pipe_buffers["gradients"][buffer_id]
            tensors = [out, routing][: len(gradients)]
            pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if t.requires_grad]
        self._start_timers(self.engine_timers.backward_timers)
        self._start_timers(self.engine_timers.backward_inner_timers)
        with self.clock.compute(), self._counting_backwards():
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        self._stop_timers(self.engine_timers.backward_inner_timers)
        self._stop_timers(self.engine_timers.backward_timers)
        self.pipe_buffers["outputs"][buffer_id] = None
        self.pipe_buffers["gradients"][buffer_id] = None

    def _gradient_divisor(self) -> float:
        if not self.gradient_average:
            raise ValueError(
                'gradient_allreduce_op is "sum": the loss of this pipeline is the mean over all tokens of a step; '
                "leave the key out."
            )
        return 1.0  # each loss is already its share of the step's, over all replicas

    def _settle_checkpoint(self) -> None:
        """The step's header has told of a failed checkpoint."""

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

    # -- the boundary --------------------------------------------------------------------------------------------
    # Hidden states, then the side inputs packed into one int32 tensor, then the experts' sums; gradients likewise.
    # Width and dtype of the hidden states are the model's business (some keep them in fp32 under bf16) and are sent
    # once, before the first; batch and length are in the step's table.

    def _exec_send_activations(self, buffer_id: int) -> None:
        out, routing, side = self.pipe_buffers["outputs"][buffer_id]
        if self._stream_out is None:
            self._stream_out = (out.shape[-1], out.dtype)
            announced = [out.shape[-1], self.DTYPE_TO_ID[out.dtype]]
            self._send(torch.tensor(announced, device=self.device), self.next_stage)
        self._send(out.detach(), self.next_stage)
        if side:
            packed = torch.stack([side[name].to(torch.int32) for name in SIDE_INPUTS if name in side])
            self._send(packed, self.next_stage)
        if routing is not None:
            self._send(routing.detach(), self.next_stage)
        if not torch.is_grad_enabled():
            self.pipe_buffers["outputs"][buffer_id] = None

    def _exec_recv_activations(self, buffer_id: int) -> None:
        shape = self._shapes[self._take("receive")]
        if self._stream_in is None:
            hidden, dtype_id = self._receive((2,), torch.int64, self.prev_stage).tolist()
            self._stream_in = (hidden, self.ID_TO_DTYPE[dtype_id])
        hidden, dtype = self._stream_in
        stream = self._receive((shape.batch, shape.length, hidden), dtype, self.prev_stage)
        side: dict[str, Tensor] = {}
        if shape.side:
            packed = self._receive((len(shape.side), shape.batch, shape.length), torch.int32, self.prev_stage)
            side = {name: packed[i].long() for i, name in enumerate(shape.side)}
        routing = None
        router_loss = self.module.stage.router_loss
        if router_loss is not None:
            routing = self._receive((router_loss.size,), torch.float32, self.prev_stage)
        if torch.is_grad_enabled():
            stream.requires_grad_()
            if routing is not None:
                routing.requires_grad_()
        self.pipe_buffers["inputs"][buffer_id] = (stream, side, routing)

    def _exec_send_grads(self, buffer_id: int) -> None:
        stream, _, routing = self.pipe_buffers["inputs"][buffer_id]
        self._send(stream.grad, self.prev_stage)
        if routing is not None:
            self._send(routing.grad, self.prev_stage)
        self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int) -> None:
        out, routing, _ = self.pipe_buffers["outputs"][buffer_id]
        gradients = [self._receive(out.shape, out.dtype, self.next_stage)]
        if routing is not None:
            gradients.append(self._receive(routing.shape, routing.dtype, self.next_stage))
        self.pipe_buffers["gradients"][buffer_id] = gradients

    def _reserve_pipe_buffers(self, num_buffers: int) -> None:
        self.pipe_buffers.setdefault("gradients", [])
        super()._reserve_pipe_buffers(num_buffers)

    def _send(self, tensor: Tensor, stage: int) -> None:
        tensor = tensor.contiguous()
        with self.clock.transfer(f"send {stage}", tensor.numel() * tensor.element_size()):
            self._doing = ("sending to", stage)
            p2p.send(tensor, stage)
            self._doing = None

    def _receive(self, shape: Iterable[int], dtype: torch.dtype, stage: int) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with self.clock.transfer(f"receive {stage}", tensor.numel() * tensor.element_size()):
            self._doing = ("receiving from", stage)
            p2p.recv(tensor, stage)
            self._doing = None
        return tensor

    def _write_files(self, draft: Path, more: Callable[[Path], None] | None) -> None:
        """The model's config, so that a checkpoint can become a model of its own (``paceline export``)."""
        folder = draft / MODEL
        folder.mkdir(exist_ok=True)
        hub_files.save_config(self.module.stage.model, folder)
        super()._write_files(draft, more)
