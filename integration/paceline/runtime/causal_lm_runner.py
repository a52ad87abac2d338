"""Compute one stage of a Hugging Face causal LM.

Between stages pass hidden states, then the side inputs packed into one int32 tensor, then sums: the experts', or those
of a head in slices, whose labels are packed with the side inputs, and whose logits follow where an evaluation looks at
them. Gradients pass likewise, without the side inputs.

Legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..comm.shapes import Meta, Shapes, Value, meta_of
from ..hf.early_recomputation import Checkpoints
from ..hf.masks import known
from ..hf.stage import LABELS, LOGITS, SIDE_INPUTS, CausalLMStage
from ..measure.flops import experts_of_token
from ..optim.gradient_buckets import Completes
from ..optim.stacked_experts import most_deferred_bytes
from .early_room import Extent
from .micro_batches import MicroBatch, MicroBatchShape
from .module import CausalLMPipeline
from .natural_gradient_part import heads_of
from .reach import Reach
from .stage_runner import Live, LossBook, StageRunner, Surroundings, gradient_of

if TYPE_CHECKING:
    from .trainer_loss import TrainersLoss

PACKED = (*SIDE_INPUTS, LABELS)
"""Names of all that may be packed into one tensor beside the hidden states, in order."""

Seen = tuple[Tensor, object]
"""Sum of a micro-batch's losses, and what somebody wanted of its logits."""


Item_co = TypeVar("Item_co", covariant=True)


class Numbered(Protocol[Item_co]):
    """Items of the micro-batches of a step, or of several, by their numbers."""

    def __getitem__(self, number: int, /) -> Item_co: ...

    def __iter__(self) -> Iterator[Item_co]: ...

    def __len__(self) -> int: ...


@dataclass
class StepBook:
    """Micro-batches that are under way, by their numbers."""

    shapes: Numbered[MicroBatchShape] = ()
    loaded: Numbered[MicroBatch] = ()
    """On the ranks that read data; as many as there are shapes."""
    label_tokens: int = 0
    """Label tokens of the whole newest step, of all replicas."""
    tokens: int = 0
    """Its tokens, padding not counted."""
    num_filled: int = 0
    """Its micro-batches that have tokens, of all replicas."""
    backward_label_tokens: int = 0
    """Label tokens of the whole step whose backward runs."""
    keeps_masks: bool = False
    """Whether every mask counts: somebody looks at what is computed at padding."""

    @property
    def own_label_tokens(self) -> int:
        """Label tokens of this replica."""
        return sum(shape.label_tokens for shape in self.shapes)


@dataclass
class Inspection:
    """An evaluation that looks at single micro-batches.

    Args:
        see: called with logits and labels; None: losses are enough.
        whole_loss: with the router's, where the model has one.
    """

    see: Callable[[Tensor, Tensor], object] | None = None
    whole_loss: bool = False
    seen: list[Seen] = field(default_factory=list)


class WithLogits(NamedTuple):
    """Key of a message that ends with logits. How many rows of the vocabulary they have depends on the boundary."""

    batch: int
    length: int
    side: tuple[str, ...]


class StreamShapes(Shapes):
    """Shapes of what passes between the stages of a causal LM.

    Batch and length are in the step's table. Width and dtype of the hidden states are the model's business (some keep
    them in fp32 under bf16), and announced with the first message; with logits all is.

    Args:
        router_size: numbers that the experts' sums are, if the model has a router loss.
        has_slices: whether the head is in slices.
    """

    def __init__(self, router_size: int | None, *, has_slices: bool = False) -> None:
        super().__init__()
        self._router_size, self._has_slices = router_size, has_slices
        self._stream: tuple[int, torch.dtype] | None = None

    def of(self, key: Hashable) -> Meta | None:
        if isinstance(key, WithLogits):
            return super().of(key)
        if self._stream is None:
            return None
        assert isinstance(key, MicroBatchShape)
        width, dtype = self._stream
        tensors: list[tuple[tuple[int, ...], torch.dtype]] = [((key.batch, key.length, width), dtype)]
        if names := side_names(key, has_slices=self._has_slices):
            tensors.append(((len(names), key.batch, key.length), torch.int32))
        if self._has_slices:
            tensors.append(((2 * key.batch * key.length,), torch.float32))
        if self._router_size is not None:
            tensors.append(((self._router_size,), torch.float32))
        return Meta(tuple(tensors))

    def learn(self, key: Hashable, meta: Meta) -> None:
        (_, _, width), dtype = meta.tensors[0]
        self._stream = (width, dtype)
        if isinstance(key, WithLogits):
            super().learn(key, meta)


def side_names(shape: MicroBatchShape, *, has_slices: bool) -> tuple[str, ...]:
    """Names of the tensors that are packed into one beside the hidden states, in order."""
    return (*shape.side, LABELS) if has_slices else shape.side


class CausalLMRunner(StageRunner):
    """One stage of a :class:`~paceline.runtime.module.CausalLMPipeline` on this rank.

    Args:
        module: all that this rank holds of the model.
        chunk: number of the stage among them.
        book: of the steps under way.
        losses: where the last stage puts them.
        num_replicas: pipelines side by side.
        wants_logits: whether an evaluation asks for them.
    """

    own_loss: TrainersLoss | None = None
    """Computes losses instead of the model."""

    inspection: Inspection | None = None
    """Set while an evaluation looks at single micro-batches."""

    def __init__(
        self,
        stage: int,
        num_stages: int,
        *,
        reach: Reach,
        around: Surroundings,
        module: CausalLMPipeline,
        chunk: int,
        device: torch.device,
        book: StepBook,
        losses: LossBook,
        num_replicas: int,
        wants_logits: Callable[[], bool],
    ) -> None:
        super().__init__(stage, num_stages, reach=reach, around=around)
        self._module, self._chunk, self._stage = module, chunk, cast("CausalLMStage", module.stages[chunk])
        self._device, self._book, self._losses = device, book, losses
        self._num_replicas, self._wants_logits = num_replicas, wants_logits

    def load(self, live: Live, number: int) -> None:
        batch = self._book.loaded[number]
        if self.is_first:
            side = {**batch.side, LABELS: batch.labels} if self._module.has_slices else batch.side
            side = {name: self._moved(tensor) for name, tensor in side.items()}
            if self._passes_logits:
                side[LOGITS] = torch.empty(0, device=self._device)
            live.inputs = (self._moved(batch.input_ids), side, None)
        if self.is_last:
            live.labels = self._moved(batch.labels)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def forward(self, live: Live, number: int) -> None:
        stream, side, routing = live.inputs
        live.label_tokens = self._book.label_tokens  # a forward is of the newest step
        facts = self._book.shapes[number].masks
        # They may look at outputs at padding.
        if self._book.keeps_masks or self.own_loss is not None or not self._module.training:
            facts = replace(facts, is_dispensable=False)
        with self._graph(), known(facts), self._around.forward():
            out, routing_out = self._module(stream, side, routing, self._chunk)
        if not self.is_last:
            live.outputs = (out, routing_out, side)
        elif self.inspection is not None:
            self._inspect(live, number, out, routing_out, self._seen_logits(out, side))
        else:
            live.outputs = (self._loss(live, number, out, routing_out, self._seen_logits(out, side)), None, None)

    def _seen_logits(self, out: Tensor, side: Mapping[str, Tensor]) -> Tensor | None:
        """Logits for whoever looks at them, where what the stage gives are not those of the whole vocabulary."""
        if self._stage.slicing is None:
            return side.get(LOGITS)
        is_seen = self._wants_logits() if self.inspection is None else self.inspection.see is not None
        return self._stage.whole_logits(out) if is_seen else None

    @property
    def _passes_logits(self) -> bool:
        """Whether those of a head in slices pass from stage to stage."""
        if not self._module.has_slices:
            return False
        return self._wants_logits() if self.inspection is None else self.inspection.see is not None

    def _loss(
        self, live: Live, number: int, logits: Tensor, routing: Tensor | None, wanted: Tensor | None = None
    ) -> Tensor:
        """The micro-batch's share in the loss of the step, of all replicas together.

        Args:
            wanted: the logits, where ``logits`` are the sums of a head in slices, or those of some rows.
        """
        book, losses = self._book, self._losses
        if self._wants_logits():
            losses.outputs = logits if wanted is None else wanted
        num_losses = len(book.shapes) * self._num_replicas
        has_tokens = bool(book.shapes[number].tokens)
        # What only fills a short step up has no share in the router loss.
        router_share = 1 / book.num_filled if has_tokens else 0.0
        num_items = max(book.label_tokens, 1)
        if self.own_loss is None:
            loss = self._stage.loss(logits, live.labels, routing, num_items, router_share=router_share)
        elif has_tokens:
            loss = self.own_loss(
                self._stage,
                self._stage.whole_logits(logits),
                self._batch_of(live.labels, number),
                routing,
                num_items=num_items,
                router_share=router_share,
                num_micro_batches=max(1, sum(other.tokens > 0 for other in book.shapes)),
            )
        else:  # a loss of somebody's own need not be made for what has no labels
            loss = logits.float().sum() * 0.0
        losses.of_forwards.append(loss.detach() * num_losses)  # eval_batch takes their mean
        losses.total = loss.detach() if losses.total is None else losses.total + loss.detach()
        return loss

    def _inspect(
        self, live: Live, number: int, logits: Tensor, routing: Tensor | None, wanted: Tensor | None = None
    ) -> None:
        inspection, labels = self.inspection, live.labels
        assert inspection is not None
        loss = self._whole_loss(number, logits, labels, routing if inspection.whole_loss else None)
        seen = None if inspection.see is None else inspection.see(logits if wanted is None else wanted, labels)
        # To the host at once: all logits of a step may be more than a GPU has room for.
        inspection.seen.append((loss, tree_map_only(Tensor, Tensor.cpu, seen)))

    def _whole_loss(self, number: int, logits: Tensor, labels: Tensor, routing: Tensor | None) -> Tensor:
        """The sum of a micro-batch's losses over its label tokens."""
        count = self._book.shapes[number].label_tokens
        assert self.inspection is not None
        if not count:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        if self.own_loss is not None and self.inspection.whole_loss:
            batch = self._batch_of(labels, number)
            whole = self._stage.whole_logits(logits)
            own = self.own_loss(self._stage, whole, batch, routing, num_items=count, router_share=1.0)
            return count * own.double()
        return self._stage.loss(logits, labels, routing, 1.0, router_share=count).double()

    def _batch_of(self, labels: Tensor, number: int) -> dict[str, Tensor]:
        """All that the last stage has loaded of a micro-batch, on its device."""
        batch = self._book.loaded[number]
        inputs = {"input_ids": batch.input_ids, **batch.side}
        if batch.has_full_mask:
            inputs["attention_mask"] = torch.ones_like(batch.input_ids)
        return {**{name: self._moved(value) for name, value in inputs.items()}, "labels": labels}

    def backward(self, live: Live, number: int, completes: Completes = Completes.NOTHING) -> None:
        out, routing, _ = live.outputs
        self._book.backward_label_tokens = live.label_tokens
        if self.is_last:
            pairs = [(self._around.scaled(out), None)]
        else:
            tensors = [out, routing][: len(live.gradients)]
            pairs = [(t, g) for t, g in zip(tensors, live.gradients, strict=True) if t.requires_grad]
        with self._around.backward(completes, stage=self.stage):
            if pairs:  # none where no output depends on what is trained
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        live.outputs = live.gradients = None

    def most_deferred_bytes(self) -> float | None:
        """Recomputed layers keep little before their backward, and leave the factors of all their products."""
        if not self._module.is_recomputed:
            return None
        model, tokens = self._module.models[self._chunk], max(shape.batch * shape.length for shape in self._book.shapes)
        rows = tokens * experts_of_token(self._module.config.get_text_config())
        return most_deferred_bytes(model, heads_of(model), tokens=tokens, rows=rows)

    def may_keep(self) -> bool:
        return self.runs_backward and self._module.recomputes(self.stage)

    def checkpoints(self, *, counts: bool, keeps: int = 0) -> Checkpoints:
        return Checkpoints(self._device, self._module if counts else None, keeps=keeps)

    def extent(self, number: int | None = None) -> Extent | None:
        shapes = list(self._book.shapes) if number is None else [self._book.shapes[number]]
        if not shapes:
            return None
        return Extent(max(shape.batch * shape.length for shape in shapes), max(shape.length for shape in shapes))

    # -- the boundary

    def activation_key(self, number: int) -> MicroBatchShape | WithLogits:
        shape = self._book.shapes[number]
        return WithLogits(shape.batch, shape.length, shape.side) if self._passes_logits else shape

    def leaving(self, live: Live) -> tuple[Tensor, ...]:
        out, routing, side = live.outputs
        leaving = [out]
        if side:
            leaving.append(torch.stack([side[name].to(torch.int32) for name in PACKED if name in side]))
        if routing is not None:
            leaving.append(routing)
        if side and LOGITS in side and side[LOGITS].numel():
            leaving.append(side[LOGITS])
        return tuple(leaving)

    def arrived(self, live: Live, number: int, value: Value) -> None:
        stream, *more = value
        side: dict[str, Tensor] = {}
        names = side_names(self._book.shapes[number], has_slices=self._module.has_slices)
        if names:
            packed = more.pop(0)
            side = {name: packed[i].long() for i, name in enumerate(names)}
        routing = more.pop(0) if more else None
        if self._passes_logits:
            side[LOGITS] = more.pop() if more else stream.new_empty(0)
        if torch.is_grad_enabled() and self.sends_gradients:
            stream.requires_grad_()
            if routing is not None:
                routing.requires_grad_()
        live.inputs = (stream, side, routing)

    def gradient_meta(self, live: Live) -> Meta:
        out, routing, _ = live.outputs
        return meta_of((out,) if routing is None else (out, routing))

    def leaving_gradients(self, live: Live) -> tuple[Tensor, ...]:
        stream, _, routing = live.inputs
        return tuple(gradient_of(tensor) for tensor in (stream, routing) if tensor is not None)
