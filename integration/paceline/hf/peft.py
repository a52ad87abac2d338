"""PEFT's adapters in a model that is cut into stages: LoRA and whatever else sits in the layers as modules.

An adapter stays where PEFT puts it: in the place of a module of the transformers model, which it keeps as its
``base_layer``. So a stage has the adapters of what it holds, under the names that the whole model has
(``model.layers.0.self_attn.q_proj.lora_A.default.weight``), and nothing else needs to know of them.

PEFT is an optional dependency (``paceline[peft]``), imported when adapters are asked for.
"""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .anatomy import Anatomy
from .arguments import ModelArguments
from .hub_files import write_tensors
from .stage import PassThrough
from .weights import seeded_by_name

PREFIX = "base_model.model."
"""Prefix that PEFT's files put before the names of the transformers model."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

NEEDS_MORE = {
    "alora_invocation_tokens": "its adapters look for tokens in the whole input",
    "arrow_config": "its adapters choose among several",
    "layer_replication": "its layers share weights",
    "monteclora_config": "its loss has a term of the adapters' own",
}
"""Settings of LoRA's config that need more than modules in their places, and why."""


class NeedsValuesError(ValueError):
    """Adapters cannot be made without the values of the weights, as on the meta device."""


@dataclass(frozen=True)
class Adapters:
    """The one adapter of a model, as PEFT calls all its modules together.

    Args:
        config: PEFT's, of the whole model.
        name: under which PEFT has it.
        targets: names of the modules that have become adapters.
        saved: names of the modules of which a copy is trained (``modules_to_save``).
        parameters: names of the parameters that are targets themselves.
        tokens: names of the modules of which some rows are trained, and these rows (``trainable_token_indices``).
    """

    config: Any
    name: str
    targets: tuple[str, ...]
    saved: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """``"LORA"``, ``"IA3"``, …"""
        return str(getattr(self.config.peft_type, "value", self.config.peft_type))

    @property
    def scale(self) -> dict[str, object]:
        """Options that say how much what the adapters have learned counts; weights of any other fit too."""
        names = ("lora_alpha", "alpha", "alpha_pattern", "use_rslora")
        return {name: getattr(self.config, name) for name in names if hasattr(self.config, name)}


def is_peft_model(model: Any) -> bool:
    """Whether it is one of PEFT's wrappers around a model. Imports nothing."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def trained_share(model: nn.Module) -> float:
    """Share of the parameters that is trained, by their number."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(count for count, is_trained in counts if is_trained) / sum(count for count, _ in counts)


def config_of_adapters(model: Any) -> Any:
    """PEFT's config of the adapters in one of its wrappers; None of any other model."""
    return next(iter(model.peft_config.values())) if is_peft_model(model) else None


def unwrapped(model: Any) -> Any:
    """The transformers model inside PEFT's wrapper, with the adapters in their places; anything else as it is.

    Raises:
        ValueError: adapters that cannot be in a pipeline.
    """
    if not is_peft_model(model):
        return model
    if isinstance(model, sys.modules["peft"].PeftMixedModel):
        raise ValueError(
            "the model is a PeftMixedModel, whose adapters are of several methods: use get_peft_model without "
            "mixed=True, with one."
        )
    for config in model.peft_config.values():
        check_method(config)
    return model.get_base_model()


def check_method(config: Any) -> None:
    """Raise ValueError if adapters of this config are more than modules in the places of others."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    method = str(getattr(config.peft_type, "value", config.peft_type))
    reason = None
    if config.is_prompt_learning or getattr(config, "is_adaption_prompt", False):
        reason = "it puts virtual tokens before the input, which no single stage holds"
    else:
        tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
        if tuner is None or not issubclass(tuner, BaseTuner) or tuner.forward is not BaseTuner.forward:
            reason = "it changes the forward of the whole model or its loss"
        elif tuner.uses_shared_state:
            reason = "its layers share weights"
    reason = reason or next((why for key, why in NEEDS_MORE.items() if getattr(config, key, None)), None)
    if reason is not None:
        raise ValueError(
            f"peft_type {method} cannot be in a pipeline: {reason}; choose a method whose weights are modules of the "
            "layers: LoRA (also DoRA and rsLoRA), IA3, LoHa, LoKr, OFT."
        )


def lora_config(args: ModelArguments) -> Any:
    """PEFT's config as the flags say it, by the rules of TRL's ``get_peft_config``, but that one name alone is a name.

    Raises:
        ValueError: PEFT is not installed, or refuses.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError(
            f'--use_peft: adapters need PEFT, which cannot be imported ({error}); pip install "paceline[peft]".'
        ) from error
    targets: Any = args.lora_target_modules
    if targets is not None and len(targets) == 1 and not targets[0].isidentifier():
        (targets,) = targets  # a pattern, or all-linear; as a pattern, a name alone would match no layer's module
    try:
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=args.lora_r,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            bias="none",
            target_modules=targets,
            modules_to_save=args.lora_modules_to_save,
            use_rslora=args.use_rslora,
            use_dora=args.use_dora,
            base_model_name_or_path=args.model_name_or_path,
            revision=None if args.model_revision == "main" else args.model_revision,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"PEFT refuses the settings of the adapters: {error}; correct the --lora_ flags.") from error


def check_drawn(config: Any) -> None:
    """Raise ValueError if adapters of this config cannot be drawn stage by stage, the same for every cut."""
    check_method(config)
    method = str(getattr(config.peft_type, "value", config.peft_type))
    start = getattr(config, "init_lora_weights", None)
    if method != "LORA" or start not in (True, False, "gaussian"):
        what = f"peft_type {method}" if method != "LORA" else f"init_lora_weights {start!r}"
        raise ValueError(
            f"{what}: adapters are drawn stage by stage for LoRA only, by its own rule or 'gaussian'; give "
            "get_peft_model's result instead, a model in memory."
        )


def adapters_of(model: PreTrainedModel, anatomy: Anatomy) -> Adapters | None:
    """Adapters that PEFT has put into ``model``; None if there are none.

    Raises:
        ValueError: it cannot be in a pipeline.
    """
    configs = getattr(model, "peft_config", None)
    if not configs:
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper

    if len(configs) > 1:
        raise ValueError(
            f"the model has the adapters {sorted(configs)}: a pipeline trains and writes one; delete the others "
            "(delete_adapter), or merge them first."
        )
    ((name, config),) = configs.items()
    check_method(config)
    targets, saved, parameters = [], [], []
    tokens: dict[str, Sequence[int]] = {}
    for path, module in model.named_modules():
        if isinstance(module, TrainableTokensWrapper):
            tokens[path] = module.token_adapter.token_indices[name]
        elif isinstance(module, AuxiliaryTrainingWrapper):
            saved.append(path)
        elif isinstance(module, BaseTunerLayer):
            if module.merged:
                raise ValueError(f"the adapter {name!r} is merged into {path}: unmerge it (unmerge_adapter) first.")
            parameter = getattr(module, "parameter_name", None)
            if parameter is None:
                targets.append(path)
            else:
                # Where several parameters of one module are targets, each adapter but the last is inside of the next.
                module_path = re.sub(r"(\.base_layer)+$", "", path)
                parameters.append(f"{module_path}.{parameter}")
    found = Adapters(config, name, tuple(targets), tuple(saved), tuple(parameters), tokens)
    _check_ties(model, anatomy, found)
    return found


def _check_ties(model: PreTrainedModel, anatomy: Anatomy, adapters: Adapters) -> None:
    """A tied weight is on the first stage and on the last, and an adapter of it would be two."""
    if not getattr(model, "all_tied_weights_keys", None):
        return
    ends = {f"{anatomy.trunk}.{anatomy.embedding}", *anatomy.head}
    touched = sorted(ends & {*adapters.targets, *adapters.saved, *adapters.tokens})
    if touched:
        raise ValueError(
            f"the adapter {adapters.name!r} is in {', '.join(touched)}, and the model ties embedding and head "
            "(tie_word_embeddings): the two are on different stages; choose other target_modules and modules_to_save."
        )


def resolve_adapters(config: Any, whole: PreTrainedModel, anatomy: Anatomy, name: str = "default") -> Adapters:
    """Put adapters of ``config`` into ``whole``, a model on the meta device, in place, and say where they are.

    Raises:
        ValueError: PEFT finds nothing to put them into, or they cannot be in a pipeline.
    """
    check_method(config)
    resolved = copy.deepcopy(config)
    _put_into(whole, resolved, name)
    found = adapters_of(whole, anatomy)
    assert found is not None
    return found


def without_memory(config: Any, whole: PreTrainedModel, anatomy: Anatomy) -> Adapters:
    """:func:`resolve_adapters` where adapters are timed or counted only: with any first weights."""
    config = copy.deepcopy(config)
    if getattr(config, "init_lora_weights", True) is not True:
        config.init_lora_weights = True
    return resolve_adapters(config, whole, anatomy)


def inject(model: PreTrainedModel, adapters: Adapters, seed: int | None = None) -> None:
    """Put into ``model``, a stage or a skeleton, those of ``adapters`` that belong to modules it has; freeze the rest.

    Args:
        seed: draw the adapters' weights from it and from the names of their modules, so that they are the same for
            every cut.
    """
    config = copy.deepcopy(adapters.config)
    targets, saved, tokens = (_there(model, names) for names in (adapters.targets, adapters.saved, adapters.tokens))
    parameters = [name for name in adapters.parameters if _there(model, [name.rpartition(".")[0]])]
    trains_biases = getattr(config, "bias", "none") == "all"
    model.requires_grad_(False)
    if not targets and not saved and not parameters and not tokens and not trains_biases:
        return
    # By full names: what PEFT would find by the user's patterns depends on which layers there are.
    config.target_modules = targets
    for option in ("layers_to_transform", "layers_pattern", "exclude_modules"):
        if getattr(config, option, None) is not None:
            setattr(config, option, None)
    if getattr(config, "modules_to_save", None) is not None:
        config.modules_to_save = saved or None
    if getattr(config, "target_parameters", None) is not None:
        config.target_parameters = parameters or None
    if getattr(config, "feedforward_modules", None) is not None:  # IA3's
        config.feedforward_modules = [name for name in targets if _matches(name, config.feedforward_modules)]
    if getattr(config, "trainable_token_indices", None) is not None:
        config.trainable_token_indices = {name: list(adapters.tokens[name]) for name in tokens} or None
    if targets or parameters:
        _put_into(model, config, adapters.name)
    else:
        _train_copies(model, config, adapters.name)
    if trains_biases:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or name.endswith(".bias"))
    if seed is not None:
        _draw_by_name(model, adapters, seed)


def _put_into(model: PreTrainedModel, config: Any, name: str) -> None:
    from peft import inject_adapter_in_model

    is_empty = any(parameter.is_meta for parameter in model.parameters())
    with warnings.catch_warnings():
        # Of other stages' layers.
        warnings.filterwarnings("ignore", message=".*(target_parameters|rank_pattern|alpha_pattern).*")
        try:
            inject_adapter_in_model(config, model, adapter_name=name, low_cpu_mem_usage=is_empty)
        except NotImplementedError as error:  # torch's, of what only values decide
            if not is_empty:
                raise
            method = str(getattr(config.peft_type, "value", config.peft_type))
            raise NeedsValuesError(
                f"adapters of peft_type {method} cannot be made without their values, as where layers move, stages are "
                "planned or a checkpoint is exported: write a partition that stays, and call paceline.export in the "
                "run."
            ) from error


def _train_copies(model: Any, config: Any, name: str) -> None:
    """Train copies of modules on a stage that has no adapters, where PEFT itself would fail."""
    from peft.utils.other import set_additional_trainable_modules

    model.peft_config = {name: config}
    set_additional_trainable_modules(model, config, model.config.to_dict(), name)


def _there(model: nn.Module, names: Any) -> list[str]:
    modules = dict(model.named_modules())
    return [name for name in names if name in modules and not isinstance(modules[name], PassThrough)]


def _matches(name: str, patterns: Any) -> bool:
    from peft.tuners.tuners_utils import check_target_module_exists

    class Config:
        target_modules = patterns
        layers_to_transform = None

    return bool(check_target_module_exists(Config, name))


def _draw_by_name(model: PreTrainedModel, adapters: Adapters, seed: int) -> None:
    from peft.tuners.lora import LoraLayer

    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            with seeded_by_name(seed, name):
                layer.reset_lora_parameters(adapters.name, adapters.config.init_lora_weights)


# -- PEFT's files ------------------------------------------------------------------------------------------------------


def adapter_state(
    model: PreTrainedModel, adapters: Adapters, tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The tensors of the adapters in ``model``, a whole one or a stage, by the names of PEFT's file.

    Args:
        tensors: by the names in the model; None: the model's own.
    """
    from peft import get_peft_model_state_dict

    if not getattr(model, "peft_config", None):
        return {}  # a stage without any
    with _as_configured(model, adapters), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*save_embedding_layers.*|.*Could not find a config file.*")
        given = None if tensors is None else dict(tensors)
        state = get_peft_model_state_dict(model, state_dict=given, adapter_name=adapters.name)
    return {PREFIX + name: tensor for name, tensor in state.items()}


@contextmanager
def _as_configured(model: Any, adapters: Adapters) -> Iterator[None]:
    """Use the config of the whole model, which has more than a stage's (whether embeddings are targets)."""
    own = model.peft_config
    model.peft_config = {adapters.name: adapters.config}
    try:
        yield
    finally:
        model.peft_config = own


def save_adapter_config(model: PreTrainedModel, adapters: Adapters, folder: Path) -> None:
    """Write ``adapter_config.json``, as ``PeftModel.save_pretrained`` does."""
    config = copy.deepcopy(adapters.config)
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)


def write_adapters(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write ``adapter_model.safetensors``; a tied weight that it has by both names is written twice, as by PEFT."""
    written: dict[str, Tensor] = {}
    pointers: set[int] = set()
    for name in sorted(state):
        pointer = state[name].data_ptr()
        written[name] = state[name].clone() if pointer in pointers else state[name]
        pointers.add(pointer)
    write_tensors(written, folder / WEIGHTS)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters that are numbers to ``dtype``; not the buffers, rotary tables stay exact, nor what is quantised."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and getattr(parameter, "quant_state", None) is None:
            parameter.data = parameter.data.to(dtype)
