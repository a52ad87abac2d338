"""A Hugging Face causal language model as a DeepSpeed :class:`PipelineModule`."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from deepspeed.runtime import utils as ds_utils
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import (
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..comm.control import ControlPlane
from ..comm.groups import new_group
from ..comm.transport import TIMEOUT
from ..config import exclusion
from ..config.exclusions import EXPERTS, HEAD, ROUTER_LOSS, SLICED
from ..config.section import HETERO, WORK, Method, check_method
from ..hf.anatomy import Anatomy, anatomy_of
from ..hf.check import require_halves, require_slices
from ..hf.early_recomputation import recompute_early
from ..hf.layer_blocks import blocks_of
from ..hf.model_workload import work_of_items
from ..hf.paths import check_model_path
from ..hf.peft import Adapters, adapters_of, cast, check_drawn, inject, resolve_adapters, unwrapped
from ..hf.quantised import check_trainable, quantisation_of
from ..hf.router import router_loss_of
from ..hf.sliced_head import WHOLE_HEAD, Rows, check_head, rows_of
from ..hf.sliced_layers import KEY, PARTIAL, Slicing, plan_of_slices, shares_head, slice_layer
from ..hf.stage import (
    CUT,
    CausalLMStage,
    Cut,
    check_sharing,
    prune,
    recompute_layers,
    recomputed_layers,
    settle_tie,
    tied_weight,
)
from ..hf.weights import is_pretrained, load_stage, on_meta, skeleton
from ..measure.profile_file import Profile
from ..measure.tokens import tokens_of_sample
from ..moe.hf_experts import HFExpertLayer, check_experts, take_share
from ..planning.partition_methods import by_work, by_work_of_devices, checked_boundaries, weights_by_class
from ..planning.stages import over_items
from ..schedules.directions import chunks_of
from ..state.named import REPLICATED
from .compiled_layers import CompiledForwards, compiled_forwards
from .expert_groups import ExpertGroups
from .ties import Tie

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger("paceline")

EMBEDDING = "embedding"
SLICE = "head."
"""Begins the name of a slice of the head."""
_OF_A_CHUNK = re.compile(r"^stages\.\d+\.model\.")
FROM_HUB = ("cache_dir", "revision", "token", "local_files_only")
"""Of ``from_pretrained``'s arguments, those that say where a config comes from too."""


@dataclass(frozen=True)
class Item:
    """One place where a model can be cut off from the next: the embedding, a decoder layer or half of one, norm and
    head or a slice of these."""

    name: str
    kind: str
    num_parameters: int
    work: float = 0.0
    """Floating-point operations for a token, forward and backward."""
    children: tuple[str, ...] = ()
    """Of half a decoder layer, the names of its modules within the layer."""


def items_of(
    model: PreTrainedModel, anatomy: Anatomy, sequence_length: int | None = None, *, recomputes: bool = False
) -> list[Item]:
    """Embedding, decoder layers or their halves in order, head or its slices. Counts only; ``model`` may be on the meta
    device.

    Args:
        sequence_length: tokens of a sample; None: :func:`~paceline.measure.tokens.tokens_of_sample` says.
        recomputes: the layers' activations are computed again in the backward pass.
    """

    def count(*modules: torch.nn.Module | None) -> int:
        parameters = {id(p): p for m in modules if m is not None for p in m.parameters()}
        return sum(p.numel() for p in parameters.values())

    trunk = anatomy.trunk_of(model)
    embedding = trunk.get_submodule(anatomy.embedding)
    norm = [getattr(trunk, name) for name in anatomy.after]
    head = norm + [getattr(model, name) for name in anatomy.head]
    blocks = blocks_of(model, anatomy)
    counted = [
        (EMBEDDING, type(embedding).__name__, count(*(getattr(trunk, name) for name in anatomy.before))),
        *((block.name, block.class_name, block.num_parameters) for block in blocks),
    ]
    *work, of_head = work_of_items(
        model, anatomy, tokens_of_sample(sequence_length, model.config), recomputes=recomputes
    )
    children = [(), *(block.children for block in blocks)]
    items = [Item(*own, each, names) for own, each, names in zip(counted, work, children, strict=True)]
    if anatomy.head_slices == 1:
        return [*items, Item("head", "Head", count(*head), of_head)]
    whole, of_norm = count(*head), count(*norm)
    for index in range(anatomy.head_slices):
        rows = rows_of(range(index, index + 1), anatomy, model.get_output_embeddings().weight.shape[0])
        share = (rows.stop - rows.start) / rows.whole
        own = round((whole - of_norm) * share) + (0 if index else of_norm)
        items.append(Item(f"{SLICE}{index}", "Head", own, of_head * share))
    return items


def partition_items(
    items: Sequence[Item],
    num_stages: int,
    method: str | Sequence[int] | Mapping[str, float],
    route: Sequence[int] = (),
) -> list[int]:
    """Boundaries ``[0, …, len(items)]`` of ``num_stages`` runs of items.

    Args:
        method: ``"work"`` balances floating-point operations of the items; a large head may be a stage of its own.
            ``"parameters"`` balances weights, ``"uniform"`` counts decoder layers, ``"type:REGEX"`` counts items whose
            class name matches, ``{REGEX: weight, …}`` weighs them by the first that matches: there each stage gets a
            decoder layer, the first also the embedding, the last the head. Or the boundaries themselves.
        route: device of each stage, where devices hold several along one direction: ``"work"`` balances their sums.

    Raises:
        ValueError: a method that is none of these, boundaries that do not fit, or a stage left without layers.
    """
    num_layers = len(items) - 2
    weights: list[float]
    if isinstance(method, Mapping):
        try:
            check_method(method)
        except ValueError as error:
            raise ValueError(f"partition weights {dict(method)}: {error}.") from None
        weights = _per_layer(weights_by_class(method, [item.kind for item in items]))
        return list(over_items(by_work(weights, [1.0] * num_stages)))
    if not isinstance(method, str):
        blocks = "halves of decoder layers" if any(item.children for item in items) else "decoder layers"
        named = f"{len(items)} items (embedding, {num_layers} {blocks}, head)"
        return checked_boundaries(method, len(items), num_stages, named)
    name, _, pattern = method.partition(":")
    if name == WORK:
        if num_stages > num_layers:
            raise ValueError(
                f"{num_stages} stages are more than the {num_layers} layers: choose at most {num_layers} stages."
            )
        work = [item.work for item in items]
        return by_work_of_devices(work, route) if route else by_work(work, [1.0] * num_stages)
    if name == "uniform":
        weights = [1] * num_layers
    elif name == "parameters":
        weights = _per_layer([item.num_parameters for item in items])
    elif name == "type" and pattern:
        matches = [int(bool(re.search(pattern, item.kind, re.IGNORECASE))) for item in items]
        if not any(matches):
            kinds = sorted({item.kind for item in items})
            raise ValueError(f"partition method {method!r} matches no layer class; this model has {kinds}.")
        weights = _per_layer(matches)
    elif name == HETERO:
        raise ValueError(
            "partition method 'hetero' needs the times of the layers, which a pipeline that is being built has not: "
            "write it into the JSON and call paceline.initialize with the model, or give boundaries."
        )
    else:
        raise ValueError(
            f"partition method {method!r} is not known: choose 'work', 'parameters', 'uniform', 'type:REGEX', weights "
            "by class name or boundaries."
        )
    layers = [int(cut) for cut in ds_utils.partition_balanced(weights=weights, num_parts=num_stages)]
    if sorted(set(layers)) != layers:
        raise ValueError(
            f"partition method {method!r} leaves a stage without decoder layers ({layers}): choose 'uniform', give "
            f"boundaries, or take fewer than {num_stages} stages."
        )
    return list(over_items(layers))


def route_of_chunks(routes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Device of each stage where devices hold several along one direction; otherwise empty.

    Args:
        routes: one a direction.
    """
    route = tuple(routes[0])
    return route if len(routes) == 1 and len(route) > len(set(route)) else ()


def _per_layer(weights: Sequence[float]) -> list[float]:
    """Weights of items as weights of decoder layers: the embedding goes with the first, the head with the last."""
    embedding, *layers, head = weights
    layers[0] += embedding
    layers[-1] += head
    return layers


def cut_of(parts: Sequence[int], stage: int) -> Cut:
    """The part of the model that ``stage`` holds under the boundaries ``parts`` over items."""
    start, stop, end = parts[stage], parts[stage + 1], parts[-1]
    layer = [min(max(item - 1, 0), end - 2) for item in (start, stop)]
    return Cut(layer[0], layer[1], first=start == 0, last=stop == end)


def check_slices(config: PretrainedConfig, head_slices: int) -> None:
    """Raise ValueError if the model of ``config`` cannot have its head in slices: its own parts, or its loss."""
    if router_loss_of(skeleton(config)) is not None:
        written = (
            f"paceline.pipeline.head_slices is {head_slices}",
            "output_router_logits is true in the model's config",
        )
        raise ValueError(exclusion(HEAD, ROUTER_LOSS).message(*written))
    require_slices(config, head_slices)


def config_of(source: ModelSource, **from_hub: object) -> PretrainedConfig:
    """The config of a model that is given by name, by config or in memory, with PEFT's adapters or without.

    Raises:
        ValueError: it is none of these, or the name is a path that does not exist, or a directory with adapters alone.
    """
    source = unwrapped(source)
    if isinstance(source, PretrainedConfig):
        return source
    if isinstance(source, PreTrainedModel):
        return source.config
    if not isinstance(source, (str, Path)):
        raise ValueError(
            f"the model is a {type(source).__name__}, and a pipeline is cut from a model of transformers (a "
            "PreTrainedModel): give the one that is inside, give layers of your own as a paceline.PipelineModule to "
            'paceline.initialize, or leave "pipeline" out of "paceline".'
        )
    check_model_path(source)
    return AutoConfig.from_pretrained(source, **from_hub)


ModelSource: TypeAlias = str | Path | PretrainedConfig | PreTrainedModel
"""A model's hub name or directory, its config, or the model in memory."""


class CausalLMPipeline(PipelineModule):
    """A causal LM over ``num_stages`` devices; this rank builds, and holds weights for, its own stages only.

    Usually a device holds one stage. With ``routes`` it holds several: *chunks*, in the order of directions and stages.
    Its methods are many: those of DeepSpeed's module that differ here, and what an engine asks of a model.

    Args:
        source: hub name or directory of a checkpoint; a config (weights drawn at random, the same for every number
            of stages); or a model in memory, of which this rank keeps its stage, with the adapters that PEFT has put
            into it.
        num_stages: devices of a pipeline; divides the world size.
        partition: see :func:`partition_items`.
        dtype: of the weights.
        seed: for random weights.
        gradient_checkpointing: recompute each decoder layer's activations in the backward pass.
        half_layers: decoder layers may be cut between attention and MLP: boundaries count halves of layers.
        head_slices: parts that the head may be cut into, by rows of the vocabulary: boundaries count them. A rank has
            read, or drawn, the whole head before it keeps its rows. Layers then stay on their stages.
        config: of the model, where it has been read, or changed, already; None: that of ``source``.
        peft_config: of PEFT: adapters that are put into the model, and are all that is trained of it. They are drawn
            from ``seed`` by name: the same for every number of stages. Not for a model in memory.
        routes: device of each stage, one route a direction, as of :class:`~paceline.schedules.Schedule`; None: one
            direction with a stage a device. There are at most as many stages as decoder layers, or halves of them.
        expert_parallel: ranks of a stage that share its experts; divides the number of replicas, and is at most that of
            experts. A rank has read, or drawn, its whole stage before it keeps its share of them.
        tensor_parallel: ranks of a stage that have slices of its layers, one of each layer, and of a head that is not
            tied to the embedding, which is whole on each; divides the ranks of a stage, and the heads and widths of the
            layers. A rank has read, or drawn, its whole stage before it keeps its slices.
        timeout: how long a rank waits for the others' small messages; default that of torch.distributed.
        from_pretrained: passed to transformers (``revision``, ``token``, ``cache_dir``, ``attn_implementation``, …).

    Raises:
        UnsupportedModelError: the model cannot be cut exactly.
        ValueError: stages or partition do not fit.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        num_stages: int,
        partition: str | Sequence[int] | Mapping[str, float] = WORK,
        dtype: torch.dtype = torch.float32,
        seed: int = 42,
        gradient_checkpointing: bool = False,
        half_layers: bool = False,
        head_slices: int = 1,
        routes: Sequence[Sequence[int]] | None = None,
        expert_parallel: int = 1,
        tensor_parallel: int = 1,
        config: PretrainedConfig | None = None,
        timeout: timedelta | None = None,
        peft_config: PeftConfig | None = None,
        **from_pretrained: object,
    ) -> None:
        source = unwrapped(source)
        from_hub = {name: from_pretrained[name] for name in FROM_HUB if name in from_pretrained}
        self.config = config or config_of(source, **from_hub)
        if from_pretrained and isinstance(source, PreTrainedModel):
            raise ValueError(
                f"{sorted(from_pretrained)} cannot be applied to a model in memory: load it with them or pass its name."
            )
        if peft_config is not None and isinstance(source, PreTrainedModel):
            raise ValueError(
                "peft_config cannot be applied to a model in memory: give get_peft_model's result, or the model's name."
            )
        self.tensor_parallel = tensor_parallel
        self.control = ControlPlane.create(num_stages, timeout)
        self.routes = tuple(map(tuple, routes)) if routes else (tuple(range(num_stages)),)
        # In lists: a model in memory, and the pattern of moving layers, are not to be registered as parts of this one.
        self._source = [source]
        self.is_pretrained = is_pretrained(source)
        """Whether training goes on from another one's weights."""
        self.pattern: list[PreTrainedModel] = []
        """The whole model without memory, once it is there, of which layers are copied that come."""
        self.profile: Profile | None = None
        """What was measured for the partition, if anything was."""
        self.is_planned = False
        """Whether its boundaries are those of a first partition: an engine does not look for one again."""
        self._dtype, self._seed = dtype, seed
        self.expert_parallel = expert_parallel
        self.expert_layers: dict[str, HFExpertLayer] = {}
        """The stage's layers whose experts lie on several ranks, by Hugging Face's names, in the model's order."""
        self._from_pretrained = from_pretrained
        self.settle: Callable[[], None] | None = None
        """What brings the weights up to date, if something is under way: the engine's. Collective."""
        whole = source if isinstance(source, PreTrainedModel) else skeleton(self.config)
        if half_layers:
            require_halves(self.config)
        if head_slices > 1:
            check_slices(self.config, head_slices)
        self.anatomy = anatomy_of(whole, half_layers=half_layers, head_slices=head_slices)
        if whole is source:
            settle_tie(whole, self.anatomy)
        self.adapters: Adapters | None
        """PEFT's, of the whole model; None: the model itself is trained."""
        if peft_config is not None:
            check_drawn(peft_config)
            self.adapters = resolve_adapters(peft_config, whole, self.anatomy)
        else:
            self.adapters = adapters_of(whole, self.anatomy)
        if self.num_virtual_stages > 1 or self.adapters is not None:
            check_sharing(whole)
        self._injects = peft_config is not None
        self._compiled: CompiledForwards | None = None
        self.recomputed = frozenset(recomputed_layers(whole, self.anatomy))
        """Items of the whole model whose activations backwards compute again, whatever stage they are on."""
        check_head(whole, self.anatomy)
        self._vocabulary = len(whole.get_output_embeddings().weight) if head_slices > 1 else 0
        check_trainable(self.config, self.adapters)
        self.items = items_of(whole, self.anatomy, recomputes=gradient_checkpointing)
        self.total_parameters = sum(p.numel() for p in whole.parameters())
        self.is_tied = tied_weight(whole, self.anatomy) is not None
        self.has_experts = has_experts(whole)
        if self.num_virtual_stages > self.anatomy.num_blocks:
            blocks = "halves of decoder layers" if half_layers else "decoder layers"
            blocks += " and slices of the head" if head_slices > 1 else ""
            raise ValueError(
                f"{self.num_virtual_stages} stages are more than the model's {self.anatomy.num_blocks} {blocks}: "
                f"choose at most {self.anatomy.num_blocks}."
            )
        if expert_parallel > 1:
            if self.adapters is not None:
                adapters = f"the model has {self.adapters.method} adapters"
                size = f"expert_parallel.autoep_size is {expert_parallel}"
                raise ValueError(exclusion("adapters", "expert_parallel").message(adapters, size))
            check_experts(whole, expert_parallel)
        self._slicing_plan: dict[str, str] = {}
        self._slices_head = False
        if tensor_parallel > 1:
            self._check_slicing(whole)
        if whole is source and self.num_virtual_stages > 1 and quantisation_of(self.config) is None:
            self.pattern.extend(_pattern_of(whole))
        # DeepSpeed prints its settings and the layers of every stage; `describe` says it in a line a stage.
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(
                layers=self.items,
                num_stages=num_stages,
                topology=self._topology(num_stages),
                partition_method=partition,
            )
        data_groups = self._grid._topo.get_axis_comm_lists("data")
        self.expert_groups = ExpertGroups.create(data_groups, expert_parallel, self.global_rank)
        self.slice_groups = ExpertGroups()
        if tensor_parallel > 1:
            self.slice_groups = ExpertGroups.of_slices(self._grid._topo.get_axis_comm_lists("model"), self.global_rank)
        if gradient_checkpointing:
            self.enable_gradient_checkpointing()
        for model in self.models if self.recomputed else ():
            recompute_early(model)

    @property
    def is_recomputed(self) -> bool:
        """Whether activations of any layer, on any stage, are computed again in the backward pass."""
        return bool(self.recomputed)

    def recomputes(self, stage: int) -> bool:
        """Whether activations of any layer of a stage that is here are computed again in the backward pass."""
        return bool(self.recomputed) and bool(self._recomputed_of(stage))

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the activations of each decoder layer in the backward pass."""
        self.recompute(range(1, self.anatomy.num_layer_blocks + 1))

    def recompute(self, items: Iterable[int]) -> None:
        """Recompute the activations of these layers, by item, in the backward pass, and of no others. Layers that
        arrive from another stage are recomputed as they were there; both halves of a layer on a stage are recomputed
        together, where both are among the ``items``."""
        self.recomputed = frozenset(items)
        if self.recomputed:
            for stage, model in zip(self.held, self.models, strict=True):
                recompute_layers(model, self.anatomy, self._recomputed_of(stage))

    def _recomputed_of(self, stage: int) -> set[int]:
        """Indices of the decoder layers whose activations a stage computes again."""
        held = range(self.parts[stage], self.parts[stage + 1])
        found = set()
        for layer in range(self.anatomy.num_layers):
            own = [block + 1 for block in self.anatomy.blocks_of(layer) if block + 1 in held]
            if own and self.recomputed.issuperset(own):
                found.add(layer)
        return found

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile each decoder layer, also those that arrive from another stage; arguments of ``torch.compile``."""
        self._compiled = compiled_forwards(*args, **kwargs)
        self.compile_layers()

    @property
    def is_compiled(self) -> bool:
        """Whether decoder layers are compiled."""
        return self._compiled is not None

    def compile_layers(self) -> None:
        """Have all decoder layers here compiled, if layers are."""
        if self._compiled is not None:
            for model in self.models:
                self._compiled.adopt(self.anatomy.layers_of(model), in_halves=self.anatomy.blocks_per_layer > 1)

    @property
    def num_virtual_stages(self) -> int:
        """Stages of one direction: as many as devices, unless a device holds several of them."""
        return len(self.routes[0])

    @property
    def held(self) -> tuple[int, ...]:
        """The stage of each chunk that this rank holds."""
        return tuple(stage for _, stage in chunks_of(self.stage_id, self.routes))

    @property
    def stage(self) -> CausalLMStage:
        """The first chunk."""
        return self.stages[0]  # type: ignore[return-value]

    @property
    def own_stages(self) -> list[CausalLMStage]:
        """The chunks of the first direction: those of all ranks together are the model."""
        chunks = chunks_of(self.stage_id, self.routes)
        return [stage for stage, (way, _) in zip(self.stages, chunks, strict=True) if way == 0]  # type: ignore[misc]

    def _partition_layers(self, method: Method = WORK) -> None:
        self.parts = partition_items(self.items, self.num_virtual_stages, method, route_of_chunks(self.routes))
        if self.has_slices:
            check_slices_of_ranks(self.parts, self.routes[0], self.anatomy)
        self._set_bounds(self.parts[self.held[0]], self.parts[self.held[0] + 1])

    def _build(self) -> None:
        held = self.held
        with self.control.together(f"loading stage {', '.join(map(str, held))}"):
            source = self._source.pop()
            self.stages = nn.ModuleList(
                self._load(cut_of(self.parts, stage), self._own_copy(source, is_last=number == len(held) - 1))
                for number, stage in enumerate(held)
            )
            if self.is_tied and 0 in held:
                _share_tied_weight(self.anatomy, dict(zip(held, self.stages, strict=True)))  # type: ignore[arg-type]
        # In one order on all ranks that hold the same stages, each with other chunks first.
        for _, model in sorted(zip(held, self.models, strict=True), key=lambda pair: pair[0]):
            self.expert_layers |= self.spread_experts(model)
        if self.tensor_parallel > 1:
            self._keep_slices()
        self.forward_funcs.append(self.stage)
        for parameter in self.parameters():
            setattr(parameter, REPLICATED, False)

    def spread_experts(self, part: nn.Module) -> dict[str, HFExpertLayer]:
        """Keep this rank's share of the experts in a part of the model; the layers that have some, by name."""
        if self.expert_parallel == 1:
            return {}
        setattr(part, CUT, True)  # if it is all of the layers, too
        return take_share(part, self._grid.get_data_parallel_rank() % self.expert_parallel, self.expert_parallel)

    def _topology(self, num_stages: int) -> ProcessTopology | None:
        """Stages outermost, slices of a layer next to each other; None: DeepSpeed's own, without slices."""
        world_size, in_a_pipeline = torch.distributed.get_world_size(), num_stages * self.tensor_parallel
        if self.tensor_parallel == 1:
            return None
        if world_size % in_a_pipeline:
            raise ValueError(
                f"{num_stages} stages with {self.tensor_parallel} slices each ({KEY}) are {in_a_pipeline} ranks, and "
                f"there are {world_size}: choose divisors."
            )
        return PipeModelDataParallelTopology(
            num_pp=num_stages, num_mp=self.tensor_parallel, num_dp=world_size // in_a_pipeline
        )

    def _check_slicing(self, whole: PreTrainedModel) -> None:
        """Find how layers are sliced; raise ValueError where they cannot be."""
        if self.has_experts:
            written = f"{KEY} is {self.tensor_parallel}", f"the {type(whole).__name__} has experts"
            raise ValueError(exclusion(SLICED, EXPERTS).message(*written))
        self._slicing_plan = plan_of_slices(whole, self.anatomy, self.tensor_parallel)
        self._slices_head = shares_head(whole, self.anatomy, self.tensor_parallel)
        cut = len(self.items) if self._slices_head else -1
        self.items[1:cut] = [replace(item, work=item.work / self.tensor_parallel) for item in self.items[1:cut]]

    @property
    def slicing(self) -> Slicing:
        """This rank's slice of its stage's layers."""
        group = self._grid.get_slice_parallel_group()
        return Slicing(self._grid.get_slice_parallel_rank(), self.tensor_parallel, group)

    def _keep_slices(self) -> None:
        """Keep this rank's slices of the layers here, and of the head."""
        stages: list[CausalLMStage] = list(self.stages)  # type: ignore[arg-type]
        for stage in stages:
            for layer in self.anatomy.layers_of(stage.model):
                self.slice_layer(layer)
            if stage.cut.last and self._slices_head:
                stage.share_head(self.slicing)

    def slice_layer(self, layer: nn.Module) -> None:
        """Keep this rank's slice of a decoder layer, which is whole."""
        if self.tensor_parallel > 1:
            slice_layer(layer, self._slicing_plan, self.slicing)

    def _own_copy(self, source: ModelSource, *, is_last: bool) -> ModelSource:
        """A model in memory is cut in place: each stage has it to itself."""
        return copy.deepcopy(source) if isinstance(source, PreTrainedModel) and not is_last else source

    def _load(self, cut: Cut, source: ModelSource) -> CausalLMStage:
        """What ``cut`` holds of the model, on the CPU. A model in memory loses the rest."""
        if not isinstance(source, PreTrainedModel):
            directory = None if isinstance(source, PretrainedConfig) else source
            stage = load_stage(
                directory,
                self.config,
                cut,
                dtype=self._dtype,
                seed=self._seed,
                allow_empty=False,
                half_layers=self.anatomy.blocks_per_layer == 2,
                head_slices=self.anatomy.head_slices,
                **self._from_pretrained,
            )
            if self._injects:
                assert self.adapters is not None
                inject(stage.model, self.adapters, self._seed)
                cast(stage.model, self._dtype)  # PEFT's own choice is fp32
            return stage
        prune(source, self.anatomy, cut)
        cast(source, self._dtype)
        return CausalLMStage(source, cut, self.anatomy)

    @property
    def models(self) -> list[PreTrainedModel]:
        """What this rank holds of the model, one a stage."""
        return [stage.model for stage in self.stages]

    def forward(
        self,
        stream: Tensor,
        side: MutableMapping[str, Tensor] | None = None,
        routing: Tensor | None = None,
        chunk: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Forward of a chunk; see :class:`paceline.hf.stage.CausalLMStage`."""
        out: tuple[Tensor, Tensor | None] = self.stages[chunk](stream, side, routing)
        return out

    def _index_tied_modules(self) -> dict[str, dict[str, object]]:
        """The embedding on the first stage and its copy, the head's weight, on the last; none where a rank has both."""
        ends = self.routes[0][0], self.routes[0][-1]
        self.ties_of_slices = self._tie_slices() if self.is_tied and self.has_slices else []
        if not self.is_tied or self.has_slices or ends[0] == ends[1] or len(self.routes) > 1:
            return {}
        comms = {}
        for pipe in self._grid._topo.get_axis_comm_lists("pipe"):
            ranks = [pipe[device] for device in ends]
            group = new_group(ranks, TIMEOUT)  # how long one waits, the watch knows
            if self.global_rank in ranks:
                model = self.models[self.held.index(0 if self.global_rank == ranks[0] else self.num_virtual_stages - 1)]
                embedding = self.anatomy.trunk_of(model).get_submodule(self.anatomy.embedding)
                comms[EMBEDDING] = {"ranks": ranks, "group": group, "weight_attr": ["weight"], "module": embedding}
                if self.global_rank != ranks[0]:
                    for parameter in embedding.parameters():
                        setattr(parameter, REPLICATED, True)  # counted once, on the first stage
        return comms

    def _tie_slices(self) -> list[Tie]:
        """The rows that the embedding on the first stage and each slice of the head on another have both."""
        first, *others = self.routes[0]
        ties = []
        for replica in range(self._grid.data_parallel_size):
            for stage, device in enumerate(others, 1):
                slices = cut_of(self.parts, stage).slices(self.anatomy)
                if not slices or device == first:
                    continue
                ranks = [self._grid.stage_to_global(stage_id=each, data=replica) for each in (first, device)]
                group = new_group(ranks, TIMEOUT)
                if self.global_rank not in ranks:
                    continue
                model = self.models[self.held.index(0 if self.global_rank == ranks[0] else stage)]
                weight = self.anatomy.trunk_of(model).get_parameter(f"{self.anatomy.embedding}.weight")
                rows = rows_of(slices, self.anatomy, self._vocabulary)
                if self.global_rank == ranks[0]:
                    ties.append(Tie(weight, group, (rows.start, rows.stop)))
                else:
                    setattr(weight, REPLICATED, True)  # counted once, on the first stage
                    ties.append(Tie(weight, group))
        return ties

    @property
    def has_slices(self) -> bool:
        """Whether the head is in slices."""
        return self.anatomy.head_slices > 1

    def parameters_in_rows(self) -> dict[nn.Parameter, Rows]:
        """Parameters of which this rank has some rows, of a head in slices."""
        stages: list[CausalLMStage] = list(self.stages)  # type: ignore[arg-type]
        return {own: rows for stage in stages for own, rows in stage.parameters_in_rows().items()}

    def require_logits(self, who: str) -> None:
        """Raise ValueError if no stage has the logits that ``who`` needs."""
        if self.has_slices:
            raise ValueError(
                f"paceline.pipeline.head_slices is {self.anatomy.head_slices} and {who} needs the logits, which no "
                f"stage has whole: {WHOLE_HEAD}."
            )

    @torch.no_grad()  # stock broadcasts into a parameter under autograd, which torch warns of at the first backward
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()
        for tie in self.ties_of_slices:
            torch.distributed.broadcast(tie.shared(tie.weight), group=tie.group, group_src=0)

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, torch.distributed.ProcessGroup]]:
        return [(tie.weight, tie.group) for tie in self.ties]

    @property
    def ties(self) -> list[Tie]:
        """Weights here, or rows of them, that another stage has too."""
        whole = [Tie(comm["module"].weight, comm["group"]) for comm in self.tied_comms.values()]
        return whole + self.ties_of_slices + self._sums_over_slices()

    def _sums_over_slices(self) -> list[Tie]:
        """Whole weights of sliced layers that see some of a layer's heads on each rank."""
        if self.tensor_parallel == 1:
            return []
        group = self._grid.get_slice_parallel_group()
        return [Tie(own, group) for own in self.parameters() if hasattr(own, PARTIAL)]

    @staticmethod
    def state_name(name: str) -> str:
        """Hugging Face's name of a parameter or buffer of this module: the same for every number of stages."""
        return _OF_A_CHUNK.sub("", name)

    def planned(self, profile: Profile | None) -> None:
        """Note that the boundaries are those of a first partition, and what was measured for it, if anything was."""
        self.profile, self.is_planned = profile, True

    def describe(self) -> list[str]:
        """Where the model went, a line a stage."""
        lines = _described(self.items, self.parts, self.routes, self.anatomy)
        if self.tensor_parallel > 1:
            what = "its layers and of the head" if self._slices_head else "its layers"
            lines.append(f"{self.tensor_parallel} ranks a stage, with slices of {what}")
        return lines


def _pattern_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """A copy of ``model`` without memory; empty, with a warning, if it has what nobody can copy."""
    try:
        return [on_meta(model)]
    except Exception as error:  # of whatever somebody has put into it
        logger.warning(
            "the model has what cannot be copied (%s): layers that move to another stage are made of its config, and "
            "what was changed in them beside their weights stays behind",
            error,
        )
        return []


def has_experts(model: nn.Module) -> bool:
    """Whether layers of a model have experts."""
    return any(path.rpartition(".")[2] == "experts" for path, _ in model.named_modules())


def check_slices_of_ranks(parts: Sequence[int], route: Sequence[int], anatomy: Anatomy) -> None:
    """Raise ValueError, on every rank, if one has slices on two stages: both would have one name in checkpoints."""
    stage_of: dict[int, int] = {}
    for stage, device in enumerate(route):
        if not cut_of(parts, stage).slices(anatomy):
            continue
        if device in stage_of:
            raise ValueError(
                f"boundaries {parts} put slices of the head on stages {stage_of[device]} and {stage}, which "
                "one rank holds, and a rank can have them on one stage: give boundaries in which it has "
                "(paceline.pipeline.partition), or take a schedule with one stage a rank."
            )
        stage_of[device] = stage


def _share_tied_weight(anatomy: Anatomy, stages: Mapping[int, CausalLMStage]) -> None:
    """Where one rank has the first stage and one with the head, or a part of it, one weight serves both."""
    name = f"model.{anatomy.trunk}.{anatomy.embedding}.weight"
    shared = stages[0].get_parameter(name)
    for number, stage in stages.items():
        if number == 0 or not stage.cut.slices(anatomy):
            continue
        own = stage.get_parameter(name)
        for module in stage.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is own:
                    module._parameters[leaf] = shared
        stage.take_rows_of_shared()


def _described(
    items: Sequence[Item], parts: Sequence[int], routes: Sequence[Sequence[int]], anatomy: Anatomy
) -> list[str]:
    """Stages of a model, and who has them, a line each."""
    lines = []
    for stage in range(len(parts) - 1):
        own = items[parts[stage] : parts[stage + 1]]
        layers = [item for item in own if item.name.startswith("layers.")]
        names = [item.name for item in own if item not in layers and not item.name.startswith(SLICE)]
        slices = cut_of(parts, stage).slices(anatomy)
        if anatomy.head_slices > 1 and slices:
            names.append(f"{len(slices)} of the head's {anatomy.head_slices} slices")
        if layers:
            span = _span(items, range(items.index(layers[0]) - 1, items.index(layers[-1])), anatomy.blocks_per_layer)
            names.insert(1 if names and names[0] == EMBEDDING else 0, span)
        size = sum(item.num_parameters for item in own)
        lines.append(f"stage {stage}: {', '.join(names)} ({size / 1e6:.2f} M parameters)")
    orders = " | ".join(" ".join(map(str, order)) for order in routes)
    stages_a_rank = len(routes[0]) // (max(routes[0]) + 1)
    if len(routes) > 1:
        lines.append(f"{len(routes)} directions, ranks by stage: {orders}")
    elif stages_a_rank > 1:
        lines.append(f"{stages_a_rank} stages a rank, ranks by stage: {orders}")
    return lines


def _span(items: Sequence[Item], blocks: range, a_layer: int) -> str:
    """The decoder layers of a run of blocks; at its ends half a layer has the name of its main module."""
    first, last = str(blocks[0] // a_layer), str(blocks[-1] // a_layer)
    if blocks.start % a_layer:
        first = items[blocks[0] + 1].name.partition(".")[2]
    if blocks.stop % a_layer:
        last = items[blocks[-1] + 1].name.partition(".")[2]
    return f"layer {first}" if first == last else f"layers {first}-{last}"
