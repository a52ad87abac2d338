"""Weights of one stage, in: from a checkpoint that holds the whole model, or drawn at random.

Both go through ``from_pretrained`` of a subclass whose constructor prunes the model while it is still on the meta
device: of the safetensors shards a rank then reads only its own tensors, and transformers' renaming and merging of
checkpoint tensors applies as always.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class

from .anatomy import Anatomy, UnsupportedModelError, anatomy_of, refuse_known
from .language_part import hint
from .quiet_transformers import quiet
from .stage import CausalLMStage, Cut, prune, tied_weight
from .weight_files import fault_in

logger = logging.getLogger(__name__)

CONSTRUCTED: dict[str, Callable[[Any], nn.Module]] = {
    "Conv1D": lambda module: type(module)(module.nf, module.nx),
    "XIELUActivation": lambda module: type(module)(dtype=module.alpha_p.dtype),
}
"""Classes whose weights some families set in the constructor and nowhere else, and how to construct one anew: the
constructor's own values are lost on the meta device."""


def causal_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of ``config`` that :class:`transformers.AutoModelForCausalLM` builds its model from.

    The config of a model for text and images stands for its language model where that is a causal LM of its own.
    """
    text_class = config.sub_configs.get("text_config")
    if text_class is None or type(config) not in AutoModelForCausalLM._model_mapping:
        return config
    if text_class not in AutoModelForCausalLM._model_mapping:
        return config
    model_class = _get_model_class(config, AutoModelForCausalLM._model_mapping)
    return config.get_text_config() if model_class.config_class is text_class else config


def model_class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The ``...ForCausalLM`` class that :class:`transformers.AutoModelForCausalLM` would take for ``config``."""
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has no causal language model in transformers; "
            f"choose a model that AutoModelForCausalLM can load.{hint(config)}"
        )
    return _get_model_class(config, AutoModelForCausalLM._model_mapping)


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The whole model on the meta device: names and shapes, no memory."""
    config = causal_config(config)
    refuse_known(config)
    with torch.device("meta"):
        return model_class_of(config)(config)


def same_hooks(module: nn.Module) -> dict[int, Any]:
    """For a deep copy of ``module``, which is to have the same hooks: what they belong to may be anything."""
    own = (named for part in module.modules() for named in vars(part).items())
    return {id(hooks): copy.copy(hooks) for name, hooks in own if "_hooks" in name}


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` on the meta device: with all that somebody has changed in it since it was built."""
    memo = same_hooks(model) | {id(config): config for config in (model.config, model.config.get_text_config())}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def is_pretrained(source: Any) -> bool:
    """Whether the weights of a model come from a checkpoint, as far as a name says so: its own, or its config's.

    Args:
        source: a name or directory, a config (whose weights are drawn), or a model in memory.
    """
    if isinstance(source, nn.Module):
        return bool(getattr(getattr(source, "config", None), "name_or_path", ""))
    return isinstance(source, (str, os.PathLike))


def load_stage(
    source: str | Path | None,
    config: PretrainedConfig,
    cut: Cut,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 42,
    allow_empty: bool = False,
    half_layers: bool = False,
    head_slices: int = 1,
    **from_pretrained: Any,
) -> CausalLMStage:
    """Build the stage ``cut`` of a model with its weights, on the CPU.

    Args:
        source: directory or hub name of a checkpoint; None draws the weights at random.
        seed: for random weights. Every module's weights are drawn from ``seed`` and the module's own name, so they
            are the same for every cut.
        allow_empty: leave NaN where transformers has no initial values, for a caller who sets the weights himself.
        half_layers: ``cut`` counts halves of decoder layers.
        head_slices: ``cut`` counts slices of the head. The whole head is read, or drawn, before one is kept.
        from_pretrained: passed on (``revision``, ``token``, ``cache_dir``, ``attn_implementation``, …).

    Raises:
        UnsupportedModelError: the model cannot be cut, or is to start from initial values that transformers lacks.
        ValueError: head and embedding are tied by the config, and not in the files.
        OSError: a file of weights in the directory ``source`` is missing or damaged.
    """
    config = causal_config(config)
    refuse_known(config)
    model_class = model_class_of(config)
    anatomies: list[Anatomy] = []
    ties: list[str | None] = []

    class Stage(model_class):  # type: ignore[misc, valid-type]
        def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            anatomy = anatomy_of(self, half_layers=half_layers, head_slices=head_slices)
            anatomies.append(anatomy)
            ties.append(tied_weight(self, anatomy))
            prune(self, anatomy, cut)

        def initialize_weights(self) -> None:
            _initialize_by_name(self, seed, super().initialize_weights, allow_empty)

    # What is printed, saved as architecture and looked up by class name stays the model's own.
    Stage.__name__, Stage.__qualname__, Stage.__module__ = (
        model_class.__name__,
        model_class.__qualname__,
        model_class.__module__,
    )
    Stage._keys_to_ignore_on_load_unexpected = [".*"]  # tensors of the other stages
    if source is None:
        Stage._keys_to_ignore_on_load_missing = [".*"]
        from_pretrained["state_dict"] = {}
    # One bar is enough, and what transformers says of a checkpoint is about the whole model, not about a stage.
    shows_bar = source is not None and os.environ.get("RANK", "0") == "0"
    try:
        with quiet(bars=shows_bar):
            model, info = Stage.from_pretrained(
                source, config=config, dtype=dtype, output_loading_info=True, **from_pretrained
            )
    except Exception as error:  # of safetensors, pickle, zip files and transformers, mostly without the file's name
        elsewhere = {"gguf_file", "subfolder", "variant"} & from_pretrained.keys()
        if source is None or elsewhere or not os.path.isdir(source) or not (fault := fault_in(source)):
            raise
        raise OSError(f"{source}: the weights cannot be loaded: {fault}") from error
    missing = sorted(info["missing_keys"])
    if source is not None and ties[-1] is not None and not (cut.first and cut.last):
        _check_tie(source, model, anatomies[-1], cut, ties[-1], missing)
    if source is not None and missing:
        logger.error(  # of this rank's stage: other ranks' warnings are not shown
            "%s has no weights for %s%s: they start at random.",
            source,
            ", ".join(missing[:5]),
            f" and {len(missing) - 5} more" if len(missing) > 5 else "",
        )
    model.__class__ = model_class
    if source is None:
        del model._weight_conversions  # says "loaded in its own format"; a new model is saved in the hub's
    return CausalLMStage(model, cut, anatomies[-1])


def _check_tie(
    source: str | Path, model: PreTrainedModel, anatomy: Anatomy, cut: Cut, embedding: str, missing: Sequence[str]
) -> None:
    """Raise ValueError if a checkpoint has not the one tensor, the embedding's, that first and last stage read."""
    found, remedy = "", ""
    if embedding in missing:
        found = f"its files have no {embedding}"
        remedy = "load it once with AutoModelForCausalLM.from_pretrained, and give what save_pretrained then writes"
    elif cut.slices(anatomy) and tied_weight(model, anatomy) is None:  # transformers has undone the tie
        found = "its files have another tensor for each of them"
        remedy = 'write "tie_word_embeddings": false into its config.json'
    if found:
        raise ValueError(
            f"{source}: its config ties the head to the embedding (tie_word_embeddings), and {found}, which stages "
            f"cannot tell for each other: {remedy}."
        )


@contextmanager
def seeded_by_name(seed: int, name: str) -> Iterator[None]:
    """Draw from ``seed`` and ``name`` alone; afterwards the generator is where it was."""
    state = torch.random.get_rng_state()
    _seed_by_name(seed, name)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def _seed_by_name(seed: int, name: str) -> None:
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    torch.random.default_generator.manual_seed(int.from_bytes(key[:8], "little") >> 1)


def _initialize_by_name(model: PreTrainedModel, seed: int, initialize: Any, allow_empty: bool) -> None:
    """Run transformers' own initialisation with the generator seeded anew for each module, by its name.

    Raises:
        UnsupportedModelError: it leaves a tensor as the memory was.
    """
    names = {id(module): name for name, module in model.named_modules()}
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    state = torch.random.get_rng_state()
    seed_for = partial(_seed_by_name, seed)

    def seeded(owner: PreTrainedModel) -> Any:
        initialize_module = type(owner)._init_weights

        def initialize_one(module: nn.Module) -> None:
            seed_for(names[id(module)])
            initialize_module(owner, module)

        return initialize_one

    empty = {n for n, t in _float_tensors(model, recurse=True) if not getattr(t, "_is_hf_initialized", False)}
    for name, tensor in _float_tensors(model, recurse=True):
        if name in empty:
            tensor.data.fill_(math.nan)
    for owner in owners:
        owner._init_weights = seeded(owner)
    try:
        initialize()
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            own = [(leaf, t) for leaf, t in _float_tensors(module, recurse=False) if prefix + leaf in empty]
            forgotten = [leaf for leaf, tensor in own if tensor.isnan().any()]
            if forgotten and not allow_empty:
                seed_for(name)
                _construct_again(model, name, module, forgotten)
    finally:
        for owner in owners:
            del owner._init_weights
        torch.random.set_rng_state(state)


def _float_tensors(module: nn.Module, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    tensors = chain(module.named_parameters(recurse=recurse), module.named_buffers(recurse=recurse))
    yield from ((name, tensor) for name, tensor in tensors if tensor.is_floating_point() and not tensor.is_meta)


def _construct_again(model: PreTrainedModel, name: str, module: nn.Module, tensors: list[str]) -> None:
    construct = CONSTRUCTED.get(type(module).__name__)
    if construct is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model type {model.config.model_type!r}) has no initial values for "
            f"{[f'{name}.{tensor}' for tensor in tensors]}: start from a checkpoint that has them."
        )
    fresh = construct(module)
    with torch.no_grad():
        for tensor in tensors:
            getattr(module, tensor).copy_(getattr(fresh, tensor))
