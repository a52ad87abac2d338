"""One pipeline stage of a Hugging Face causal language model, by prune and reuse.

The stage is the model itself with its own ``forward``. Decoder layers that live on other stages are replaced, at their
place in the full-length list, by modules that pass the hidden states on; so global layer indices, per-layer masks and
parameter names stay Hugging Face's own. Between stages travel the hidden states ``[batch, sequence, hidden]``.

Legend: B batch, S sequence, H hidden size, V vocabulary, E experts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import router
from .anatomy import Anatomy, UnsupportedModelError, anatomy_of, half_children
from .cross_entropy import cross_entropy_in_pieces, takes_pieces
from .early_recomputation import recompute_early
from .masks import needs_mask
from .sliced_head import Rows, RowsOfLinear, add_logits, cross_entropy_of, empty_sums, keep_rows, sums_of_ranks
from .sliced_layers import Slicing, gathered, slice_head

CUT = "paceline_is_cut"
"""Attribute of a model: whether parts of it were taken out."""
_RUNS = "paceline_runs_stage"
"""Attribute of a model: whether its stage's forward is under way."""
SIDE_INPUTS = ("attention_mask", "position_ids")
LABELS, LOGITS = "labels", "logits"
"""Name of the labels among the side inputs: stages that share a head need them."""
ADAPTED = ("base_layer", "original_module")
"""Attributes in which PEFT's modules keep the modules that they replace."""


@dataclass(frozen=True)
class Cut:
    """The cut of one stage: blocks ``start`` to ``stop - 1``, the embedding if ``first``, norm and head if ``last``.

    A block is a decoder layer, or half of one (:attr:`~paceline.hf.anatomy.Anatomy.blocks_per_layer`), or a slice of
    the head: ``last`` then stands for the last slice, and the norm is with the first one.
    """

    start: int
    stop: int
    first: bool
    last: bool

    @staticmethod
    def whole(num_blocks: int) -> Cut:
        return Cut(0, num_blocks, True, True)

    def slices(self, anatomy: Anatomy) -> range:
        """The slices of the head, by number; a head that is not cut is one."""
        if anatomy.head_slices == 1:
            return range(self.last)
        layers = anatomy.num_layer_blocks
        return range(max(self.start, layers) - layers, max(self.stop, layers) - layers + self.last)


class PassThrough(nn.Module):
    """Stands where a module lives on another stage: hands on its first input.

    Args:
        returns: length of the tuple to return, the input first; 0 returns the input itself.
        stands_for: the module that it replaces, whose plain attributes (numbers, strings) the trunk may read.
    """

    def __init__(self, returns: int = 0, stands_for: nn.Module | None = None) -> None:
        super().__init__()
        self.returns = returns
        for name, value in vars(stands_for).items() if stands_for is not None else ():
            if isinstance(value, (bool, int, float, str)) and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stream = args[0] if args else next(iter(kwargs.values()))
        return (stream, *[None] * (self.returns - 1)) if self.returns else stream


class AddsNothing(PassThrough):
    """Stands where a module lives on another stage whose output is added to something: the sum is unchanged."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        reference = args[0] if args else next(iter(kwargs.values()))
        nothing = torch.zeros((), device=reference.device)
        return (nothing, *[None] * (self.returns - 1)) if self.returns else nothing


def bare(module: nn.Module) -> nn.Module:
    """``module`` itself, or, of an adapter that stands in its place, what is inside."""
    while True:
        inside = next((child for name, child in module.named_children() if name in ADAPTED), None)
        if inside is None:
            return module
        module = inside


def prune(model: PreTrainedModel, anatomy: Anatomy, cut: Cut) -> None:
    """Take out of ``model``, in place, everything that ``cut`` does not hold. Works on meta and on real weights.

    A model with tied embeddings keeps the embedding on the last stage too, as the weight of its head: same name, same
    tying, two copies of one weight (see :func:`tied_weight`).
    """
    adapter = anatomy.adapter
    setattr(model, CUT, cut != Cut.whole(anatomy.num_blocks))
    trunk, layers = anatomy.trunk_of(model), anatomy.layers_of(model)
    tied, slices = tied_weight(model, anatomy), cut.slices(anatomy)
    for index in range(anatomy.num_layers):
        held = [block for block in anatomy.blocks_of(index) if cut.start <= block < cut.stop]
        if not held:
            layers[index] = take_out(layers[index], anatomy)
        elif len(held) < anatomy.blocks_per_layer:
            take_out_half(layers[index], 1 - held[0] % anatomy.blocks_per_layer)
    if not cut.first:
        for name in anatomy.before:
            module = trunk.get_submodule(name)
            if name == anatomy.embedding and slices and tied:
                continue
            is_position_table = isinstance(bare(module), nn.Embedding) and name != anatomy.embedding
            setattr(trunk, name, AddsNothing() if is_position_table or name in adapter.adds else PassThrough())
        for name, value in adapter.neutral.items():
            _neutralise(trunk, name, value)
    if adapter.norm and not (cut.first and cut.last):
        _split_norm(model, anatomy, cut)
    if 0 not in slices:
        for name in anatomy.after:
            if getattr(trunk, name) is not None:
                setattr(trunk, name, PassThrough())
    if not slices:
        for name in anatomy.head:
            setattr(model, name, PassThrough())
    _drop_lost_ties(model)


def is_called_as_stage(model: PreTrainedModel) -> bool:
    """Whether it is a stage's forward that calls the model, with what comes in over the boundary."""
    return bool(vars(model).get(_RUNS, False))


def require_whole(source: object) -> None:
    """Raise ValueError if a model in memory, with PEFT's adapters or without, is one stage of a pipeline, or is spread
    over devices."""
    if getattr(source, CUT, False):  # PEFT's models have the attributes of those inside
        raise ValueError(
            f"the {type(source).__name__} is one stage of a pipeline already, and another is to be made of it: "
            "go on with the trainer or the engine that it was given to, or load the whole model again "
            "(trainer.save_model writes it, on all ranks)."
        )
    devices = sorted({str(device) for device in (getattr(source, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        raise ValueError(
            f"the {type(source).__name__} is spread over the devices {', '.join(devices)}, which a pipeline's stages "
            "cannot be made of: load it without device_map, or give its name; each rank then has its stage on its own."
        )


def settle_tie(model: PreTrainedModel, anatomy: Anatomy) -> None:
    """Have the config of a model in memory say what head and embedding are by now: one weight, or two."""
    head, embedding = model.get_output_embeddings(), anatomy.trunk_of(model).get_submodule(anatomy.embedding)
    if head is None or not model._tied_weights_keys:
        return
    is_tied = getattr(bare(head), "weight", None) is bare(embedding).weight
    said = bool(model.all_tied_weights_keys), bool(getattr(model.config, "tie_word_embeddings", False))
    if said != (is_tied, is_tied):
        model.config.tie_word_embeddings = is_tied
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys()


def check_sharing(model: PreTrainedModel) -> None:
    """Raise ValueError if two places of ``model`` have the same trained parameter, other than by its known ties: on two
    stages it would become two."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    seen: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = seen.setdefault(parameter, name)
        if other != name and parameter.requires_grad and name not in ties:
            raise ValueError(
                f"{name} is the same parameter as {other}, which stages cannot share: give each of them its own; of "
                "adapters choose a method whose layers have weights of their own."
            )


def recompute_layers(model: PreTrainedModel, anatomy: Anatomy | None = None, layers: Container[int] = ()) -> None:
    """Have the activations of decoder layers computed again in the backward pass.

    Args:
        anatomy: of the model; None: all layers are recomputed.
        layers: by index, those that are; others keep their activations.
    """
    if (
        anatomy is not None
        and model.supports_gradient_checkpointing
        and not any(hasattr(part, "gradient_checkpointing") for part in model.modules())
    ):
        return  # the stage has no layers; transformers would say that the model cannot recompute
    # The second name is that of transformers before 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    recompute_early(model)
    for index, layer in enumerate(() if anatomy is None else anatomy.layers_of(model)):
        if index not in layers:
            for part in layer.modules():
                if hasattr(part, "gradient_checkpointing"):
                    setattr(part, "gradient_checkpointing", False)  # noqa: B010  # a plain attribute, not a module


def recomputed_layers(model: PreTrainedModel, anatomy: Anatomy) -> list[int]:
    """Items of decoder layers whose activations are computed again in the backward pass."""
    return [
        block + 1
        for index, layer in enumerate(anatomy.layers_of(model))
        if any(getattr(part, "gradient_checkpointing", False) for part in layer.modules())
        for block in anatomy.blocks_of(index)
    ]


def tied_weight(model: PreTrainedModel, anatomy: Anatomy) -> str | None:
    """Name of the embedding weight if the model's head is tied to it, else None."""
    embedding = f"{anatomy.trunk}.{anatomy.embedding}.weight"
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    names = {*ties.keys(), *ties.values()}
    return embedding if embedding in names else None


def num_tied(model: PreTrainedModel, anatomy: Anatomy) -> int:
    """Parameters of the embedding weight if the model's head is tied to it, else 0."""
    name = tied_weight(model, anatomy)
    return 0 if name is None else model.get_parameter(name).numel()


def _drop_lost_ties(model: PreTrainedModel) -> None:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {a: b for a, b in ties.items() if a in names and b in names}


def take_out(layer: nn.Module, anatomy: Anatomy) -> PassThrough:
    """A placeholder for a decoder layer that is on another stage."""
    placeholder = PassThrough(anatomy.returns, layer)
    for name in anatomy.adapter.keep:
        owner, _, leaf = name.rpartition(".")
        placeholder.add_module(owner, nn.Module())
        placeholder.get_submodule(owner).register_buffer(leaf, layer.get_buffer(name), persistent=False)
    return placeholder


def take_out_half(layer: nn.Module, half: int) -> None:
    """Put placeholders for the modules of the first (0) or second (1) half of a decoder layer, which is on another
    stage: the residual connection around them then hands on the hidden states as they are.

    A norm passes on what it gets, for one after the sum has the hidden states themselves; what else has weights adds
    nothing to them.
    """
    returns = half_children(layer, half)
    for name, child in HalfLayer(layer, half).named_children():
        adds = "Norm" not in type(bare(child)).__name__ and any(True for _ in child.parameters())
        setattr(layer, name, (AddsNothing if adds else PassThrough)(returns[name], child))


class HalfLayer(nn.Module):
    """The modules of the first (0) or second (1) half of a decoder layer under their own names; it does not run."""

    def __init__(self, layer: nn.Module, half: int) -> None:
        super().__init__()
        other = half_children(layer, 1 - half)
        for name in half_children(layer, half):
            if name not in other:  # an activation function that both call
                self.add_module(name, layer.get_submodule(name))

    def put_into(self, layer: nn.Module) -> None:
        """Take the place of the placeholders that ``layer`` has for this half."""
        for name, child in self.named_children():
            setattr(layer, name, child)


def _neutralise(trunk: nn.Module, name: str, value: float) -> None:
    if name.startswith("config."):
        config = copy.copy(trunk.config)  # the model's own is what is exported
        setattr(config, name.removeprefix("config."), value)
        trunk.config = config
    elif name in trunk._buffers:
        del trunk._buffers[name]
        neutral = torch.tensor(value, device="cpu")
        neutral._is_hf_initialized = True  # type: ignore[attr-defined]  # or the trunk's initialisation overwrites it
        setattr(trunk, name, neutral)
    elif hasattr(trunk, name):
        setattr(trunk, name, value)


def _split_norm(model: PreTrainedModel, anatomy: Anatomy, cut: Cut) -> None:
    """Let a weightless norm that the trunk runs twice run after the embedding and before the head only."""
    trunk = anatomy.trunk_of(model)
    norm = trunk.get_submodule(anatomy.adapter.norm)
    assert not list(norm.parameters()), "every stage would train a copy"
    setattr(trunk, anatomy.adapter.norm, PassThrough())
    if cut.first:
        trunk.get_submodule(anatomy.embedding).register_forward_hook(partial(_norm_output, norm))
    if cut.last:
        model.get_output_embeddings().register_forward_pre_hook(partial(_norm_input, norm))


def _norm_output(norm: nn.Module, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return norm(output)


def _norm_input(norm: nn.Module, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (norm(args[0]), *args[1:])


def _parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Parameters of its class's forward, by name."""
    return inspect.signature(inspect.unwrap(type(module).forward)).parameters


class CausalLMStage(nn.Module):
    """A pruned model as a function from what comes in over the boundary to what goes out.

    ``forward(stream, side, routing)``:

    * ``stream``: token ids ``[B, S]`` (int64) on the first stage, hidden states ``[B, S, H]`` on the others;
    * ``side``: the batch's ``attention_mask`` and ``position_ids`` ``[B, S]``, where it has them; with a head in slices
      its labels too, and, where somebody wants them, the logits ``[B, S, R]`` of the slices so far, to which the stage
      adds its own in place;
    * ``routing``: the experts' running sums (:mod:`paceline.hf.router`), where the model asks for its router loss; with
      a head in slices their sums (:mod:`paceline.hf.sliced_head`).

    Returns ``(stream, routing)``: hidden states ``[B, S, H]``, or logits ``[B, S, V]`` on the last stage. Of a head in
    slices the last stage returns the sums in the place of logits.

    Building a stage of a head in slices takes the rows of other stages out of ``model``.
    """

    head_rows: Rows | None = None
    """The rows that the stage has of a head in slices."""

    slicing: Slicing | None = None
    """Ranks that share the stage's head, whose logits are those of this rank's rows; None: it is no other rank's."""

    def __init__(self, model: PreTrainedModel, cut: Cut, anatomy: Anatomy | None = None) -> None:
        super().__init__()
        self.model = model
        self.cut = cut
        self.anatomy = anatomy or anatomy_of(model)
        self.router_loss = router.router_loss_of(model)
        self._routers_of: tuple[Cut, bool] | None = None
        trunk = self.anatomy.trunk_of(model)
        slices = cut.slices(self.anatomy)
        self._has_head, self._is_sliced = bool(slices), self.anatomy.head_slices > 1
        target = model if slices else trunk
        self._trunk = (trunk,)  # in a tuple: the trunk is already registered as part of the model
        self._hidden: list[Tensor] = []
        if self._is_sliced and slices:
            self.head_rows = keep_rows(model, self.anatomy, slices, shares_embedding=cut.first)
            trunk.register_forward_hook(self._note_hidden)
        accepted = _parameters_of(target)
        self.accepts = frozenset(accepted)
        hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        self._takes_cache = "use_cache" in accepted or (hands_on and "use_cache" in _parameters_of(trunk))
        self.tied_weight = tied_weight(model, self.anatomy)

    def forward(
        self, stream: Tensor, side: MutableMapping[str, Tensor] | None = None, routing: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        inputs: dict[str, Any] = {"input_ids" if self.cut.first else "inputs_embeds": stream}
        for name, tensor in (side or {}).items():
            if name in (LABELS, LOGITS):
                continue
            if name not in self.accepts:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__}.forward takes no {name!r}, but the batch has it: leave it out of the "
                    "batch, or choose a model that can use it."
                )
            if name != "attention_mask" or needs_mask(stream.device):
                inputs[name] = tensor
        if self._takes_cache:  # with one, transformers does not keep apart the samples of a row
            inputs["use_cache"] = False
        routed = self.router_loss is not None and self._has_routers
        if self.router_loss is not None:
            inputs["output_router_logits"] = routed
        target = self.model if self._has_head else self._trunk[0]
        vars(self.model)[_RUNS] = True
        try:
            outputs = target(**inputs, return_dict=True)
        finally:
            vars(self.model)[_RUNS] = False
        if self.router_loss is not None:
            routing = self.router_loss.accumulate(
                routing,
                (outputs.router_logits if routed else None) or (),
                (side or {}).get("attention_mask"),
                device=stream.device,
            )
        if self._is_sliced:
            return self._with_slices(outputs, stream, side or {}, routing)
        return (outputs.logits if self.cut.last else outputs.last_hidden_state), routing

    def _with_slices(
        self, outputs: Any, stream: Tensor, side: MutableMapping[str, Tensor], sums: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states and sums for the next slice; after the last one the sums alone. Adds to logits in ``side``."""
        if sums is None:
            sums = empty_sums(stream.shape[0] * stream.shape[1], stream.device)
        if self.head_rows is None:
            return outputs.last_hidden_state, sums
        hidden = self._hidden.pop()
        if LOGITS in side:
            side[LOGITS] = torch.cat([side[LOGITS], outputs.logits], -1) if side[LOGITS].numel() else outputs.logits
        sums = add_logits(sums, outputs.logits, side[LABELS], self.head_rows.start)
        return (sums, None) if self.cut.last else (hidden, sums)

    def share_head(self, slicing: Slicing) -> None:
        """Keep this rank's rows of a head that all ranks with slices of the stage's layers share."""
        slice_head(self.model.get_output_embeddings(), slicing)
        self.slicing = slicing

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits ``[B, S, V]`` of all rows. Collective, where ranks share the head."""
        if self.slicing is None or self.slicing.group is None:
            return logits
        return gathered(logits, self.slicing.group)

    def _note_hidden(self, trunk: nn.Module, args: Any, output: Any) -> None:
        self._hidden[:] = [output[0]]

    def take_rows_of_shared(self) -> None:
        """Note that the whole embedding's weight, of another stage of this rank, has become that of the head here."""
        if self.head_rows is not None:
            RowsOfLinear.become(self.model.get_output_embeddings(), self.head_rows)

    def parameters_in_rows(self) -> dict[nn.Parameter, Rows]:
        """Parameters of which the stage has some rows, of a head in slices."""
        rows, head = self.head_rows, self.model.get_output_embeddings()
        if rows is None:
            return {}
        return {own: rows for own in head.parameters(recurse=False) if len(own) == rows.stop - rows.start < rows.whole}

    @property
    def _has_routers(self) -> bool:
        """Whether a router is among its layers, looked for again when these have changed."""
        if self._routers_of is None or self._routers_of[0] != self.cut:
            self._routers_of = self.cut, router.has_routers(self.model)
        return self._routers_of[1]

    def _shared_by(self, logits: Tensor) -> dist.ProcessGroup | None:
        """Ranks that have the other logits; None: these are all."""
        head = self.model.get_output_embeddings()
        return None if self.slicing is None or logits.shape[-1] != len(head.weight) else self.slicing.group

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        routing: Tensor | None,
        num_items: Tensor | float | None,
        router_share: float = 1.0,
    ) -> Tensor:
        """Cross entropy summed over the label tokens and divided by ``num_items``, plus the router loss.

        Args:
            logits: ``[B, S, V]``; of a head in slices their sums; of a head that ranks share, of its rows or all.
            labels: ``[B, S]``; -100 is no label. Shifted by the model's own loss function.
            routing: the whole model's running sums of the experts, or None.
            num_items: label tokens that this loss is an average over; need not be those of ``labels`` (the share of
                this micro-batch in a step).
            router_share: of this micro-batch in the router loss of a step.
        """
        if self._is_sliced:
            loss = cross_entropy_of(logits, labels, num_items)
        elif (group := self._shared_by(logits)) is not None:
            sums = empty_sums(labels.numel(), logits.device)
            own = add_logits(sums, logits, labels, dist.get_rank(group) * logits.shape[-1])
            loss = cross_entropy_of(sums_of_ranks(own, group), labels, num_items)
        elif takes_pieces(self.model.loss_function, logits):
            loss = cross_entropy_in_pieces(logits, labels, num_items)
        else:
            loss = self.model.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=logits.shape[-1],  # some heads cut off the rows that pad the vocabulary
                num_items_in_batch=num_items,
            )
        if self.router_loss is not None and routing is not None:
            router_loss = self.router_loss.value(routing).to(loss.device)
            loss = loss + router_share * self.router_loss.coefficient * router_loss
        return loss
