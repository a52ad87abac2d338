"""Can this model be trained as a pipeline and stay the same model? Asked before training, and by ``check-model``.

Families in ``families.json`` were compared with their unsplit models by ``tests/support/family_table.py``; any
other family is compared here, on a small copy of the given config. What the given config itself can break, the
operations that a decoder applies to its hidden states between the embedding and the layers, is checked for every model:
a stage that holds nothing must change nothing.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.version import Version
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from .adapters import ADAPTERS
from .anatomy import WHOLE_LAYERS, UnsupportedModelError, anatomy_of, refuse_known
from .family_configs import NUM_LAYERS, shrink
from .once import once_a_config
from .parity import ROUNDING, check_halves, check_slices, check_split
from .quiet_transformers import quiet
from .router import router_loss_of
from .sliced_head import WHOLE_HEAD, check_head
from .sources import config_at, model_config_at
from .stage import Cut, tied_weight
from .weights import causal_config, load_stage, model_class_of, skeleton

Verdict = Literal["exact", "rounding", "refused"]


@dataclass(frozen=True)
class ModelReport:
    """A report on one model.

    Args:
        difference: largest relative difference of loss, logits and gradients between cut and whole, in float32.
        tied: the head shares the embedding's weight.
        router_loss: its loss has a router's auxiliary term.
        adapter: its family needs more than prune and reuse (:mod:`paceline.hf.adapters`).
        num_parameters: of the whole model, a shared weight counted once.

    Of a refused model only ``reason`` is sure to be known.
    """

    model_type: str
    model_class: str
    verdict: Verdict
    reason: str = ""
    difference: float | None = None
    num_layers: int | None = None
    tied: bool = False
    router_loss: bool = False
    adapter: bool = False
    num_parameters: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Family:
    """One row of ``families.json``."""

    verdict: Verdict
    difference: float | None
    tied: bool
    router_loss: bool
    adapter: bool
    reason: str


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """The families that were compared, by model type."""
    return {model_type: Family(**row) for model_type, row in _table()["families"].items()}


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return json.loads(resources.files("paceline.hf").joinpath("families.json").read_text())


def compared_here() -> bool:
    """Whether the installed transformers is one of those, oldest to newest, that ``families.json`` speaks of."""
    oldest, newest = map(Version, _table()["transformers"])
    return oldest <= Version(transformers_version) <= newest


def check_source(source: str | Path, *, half_layers: bool = False) -> ModelReport:
    """Report on the model whose config is at ``source``, a directory or a hub name. No weights are read.

    Args:
        half_layers: as of :func:`check_model`.

    Raises:
        ValueError: there is no config that transformers can read, or none that a model can be made of.
    """
    try:
        config = model_config_at(source)
    except UnsupportedModelError:  # which check_model reports
        config = config_at(source)
    return check_model(config, half_layers=half_layers)


def check_model(config: PretrainedConfig, *, half_layers: bool = False) -> ModelReport:
    """Report on the model of ``config``; a model that cannot be cut is reported as refused, not raised.

    Args:
        half_layers: decoder layers are to be cut between attention and MLP too.
    """
    config = causal_config(config)
    try:
        with quiet():
            model_class = model_class_of(config).__name__
            difference = _difference(config)
            if half_layers:
                difference = max(difference, _difference_of_halves(config))
            model = skeleton(config)
            anatomy = anatomy_of(model)
    except UnsupportedModelError as error:
        return ModelReport(config.model_type, type(config).__name__, "refused", str(error))
    return ModelReport(
        model_type=config.model_type,
        model_class=model_class,
        verdict=verdict(difference),
        difference=difference,
        num_layers=anatomy.num_layers,
        tied=tied_weight(model, anatomy) is not None,
        router_loss=router_loss_of(model) is not None,
        adapter=config.model_type in ADAPTERS,
        num_parameters=_num_parameters(model),
    )


def require_supported(config: PretrainedConfig) -> None:
    """Check, at the start of training, that the model of ``config`` is the same model when cut into stages.

    Under a second for a family that was compared before; seconds for another. Every rank comes to the same answer,
    without asking the others.

    Raises:
        UnsupportedModelError: it is not, or it cannot be found out; the message says why.
    """
    with quiet():
        _difference(causal_config(config))


def require_language_model(source: object) -> None:
    """Raise ValueError if a model in memory, with PEFT's adapters or without, has no head over the vocabulary."""
    head = getattr(source, "get_output_embeddings", None)  # PEFT's models have the attributes of those inside
    if head is not None and head() is None:
        raise ValueError(
            f"the model is a {type(source).__name__}, whose outputs are no logits over a vocabulary: a pipeline trains "
            "causal language models; load it with AutoModelForCausalLM, or train it without a pipeline."
        )


def require_halves(config: PretrainedConfig) -> None:
    """Check that the model of ``config`` stays the same model when its decoder layers are cut in two: on a small copy,
    within seconds. Every rank comes to the same answer, without asking the others.

    Raises:
        UnsupportedModelError: it does not, or it cannot be found out; the message says why.
    """
    with quiet():
        _difference_of_halves(causal_config(config))


def require_slices(config: PretrainedConfig, head_slices: int) -> None:
    """Check that the model of ``config`` stays the same model when its head is cut into slices: as
    :func:`require_halves`.

    Raises:
        UnsupportedModelError: it does not, or it cannot be found out; the message says why.
    """
    with quiet():
        model = skeleton(config)
        check_head(model, anatomy_of(model, head_slices=head_slices))
        _difference_of_slices(causal_config(config))


@once_a_config
def _difference_of_slices(config: PretrainedConfig) -> float:
    name = f"model type {config.model_type!r}"
    try:
        with torch.random.fork_rng(devices=[]):
            parity = check_slices(shrink(config), NUM_LAYERS)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot have its head in slices: a small copy does not run ({type(error).__name__}: "
            f"{_first_line(error)}); {WHOLE_HEAD}."
        ) from error
    if not parity.worst <= ROUNDING:
        raise UnsupportedModelError(
            f"{name} cannot have its head in slices: so cut, a small copy of it differs from the whole model by "
            f"{parity.worst:.1e} (loss {parity.loss:.1e}, gradient of {parity.worst_gradient!r} "
            f"{parity.gradient:.1e}); {WHOLE_HEAD}."
        )
    return parity.worst


@once_a_config
def _difference_of_halves(config: PretrainedConfig) -> float:
    if getattr(config.get_text_config(), "layerdrop", 0):
        raise UnsupportedModelError(
            f"model type {config.model_type!r} cannot be cut within a decoder layer: its layerdrop of "
            f"{config.get_text_config().layerdrop} would leave out either half without the other, unless it is 0. "
            f"{WHOLE_LAYERS}"
        )
    anatomy_of(skeleton(config), half_layers=True)
    return _compare_small_copy(config, f"model type {config.model_type!r}", half_layers=True)


def verdict(difference: float) -> Verdict:
    """The verdict for the largest relative difference of a model that is not refused."""
    return "exact" if difference == 0.0 else "rounding"


@once_a_config
def _difference(config: PretrainedConfig) -> float:
    refuse_known(config)
    name = f"model type {config.model_type!r}"
    family = families().get(config.model_type) if compared_here() else None
    if family is None:
        difference = _compare_small_copy(config, name)
    elif family.difference is None:
        raise UnsupportedModelError(f"{name} cannot be a pipeline: {family.reason}.")
    else:
        difference = family.difference
    try:
        check_stream_identity(config)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a config whose parts do not fit together, which shows when they meet
        raise UnsupportedModelError(
            f"{name} cannot be a pipeline with this config: a stage without layers fails with "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error
    return difference


def _compare_small_copy(config: PretrainedConfig, name: str, *, half_layers: bool = False) -> float:
    try:
        with torch.random.fork_rng(devices=[]):
            parity = (check_halves if half_layers else check_split)(shrink(config), NUM_LAYERS)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} {_not_known(half_layers)}, and a small copy to compare now cannot be built: "
            f"{type(error).__name__}: {_first_line(error)}{'. ' + WHOLE_LAYERS if half_layers else ''}"
        ) from error
    if not parity.worst <= ROUNDING:
        what = "cannot be cut within decoder layers: so cut" if half_layers else "cannot be a pipeline: cut into stages"
        raise UnsupportedModelError(
            f"{name} {what}, a small copy of it differs from the whole model by {parity.worst:.1e} (loss "
            f"{parity.loss:.1e}, logits {parity.logits:.1e}, gradient of {parity.worst_gradient!r} "
            f"{parity.gradient:.1e}).{' ' + WHOLE_LAYERS if half_layers else ''}"
        )
    return parity.worst


def _not_known(half_layers: bool) -> str:
    if half_layers:
        return "was compared in whole layers only"
    return f"is not among the families that were compared with transformers {transformers_version}"


def check_stream_identity(config: PretrainedConfig) -> None:
    """Check that a stage without layers, embedding and head hands on the hidden states that it gets, bit for bit.

    With the config as it is (no weights are made): an embedding multiplier, dropout or position embedding that the
    decoder would apply once more on every stage shows here.

    Raises:
        UnsupportedModelError: it does not.
    """
    config = deepcopy(config)
    config._attn_implementation = "eager"
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)
    stage = load_stage(None, config, Cut(0, 0, False, False))
    # Some decoders ask their first parameter for their dtype.
    stage.anatomy.trunk_of(stage.model).register_parameter("unused", torch.nn.Parameter(torch.zeros(())))
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(2, 8, stage.model.config.hidden_size, generator=generator)
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 6:] = 0
    side = {"attention_mask": mask, "position_ids": torch.arange(8).expand(2, 8)}
    side = {name: tensor for name, tensor in side.items() if name in stage.accepts}
    for training in (True, False):
        out = _pass(stage.train(training), stream, side)
        if out.shape != stream.shape or not torch.equal(out, stream):
            what = (
                f"by up to {(out - stream).abs().max():.1e}" if out.shape == stream.shape else f"to {list(out.shape)}"
            )
            raise UnsupportedModelError(
                f"model type {config.model_type!r} cannot be a pipeline: in "
                f"{'training' if training else 'evaluation'} its decoder changes the hidden states that come from "
                f"another stage {what}, before or after its layers."
            )


def _pass(stage: torch.nn.Module, stream: Tensor, side: dict[str, Tensor]) -> Tensor:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        out, _ = stage(stream.clone(), side)
    return out


def _num_parameters(model: PreTrainedModel) -> int:
    shared = getattr(model, "all_tied_weights_keys", None) or {}
    return sum(p.numel() for name, p in model.named_parameters(remove_duplicate=False) if name not in shared)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
