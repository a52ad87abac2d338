"""Every causal-LM family of transformers, cut into stages and whole: ``families.json`` says what is so, and no more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers

from paceline.hf import masks, router, weights
from paceline.hf import stage as stages_of_models
from paceline.hf.adapters import ADAPTERS, REASONS, Adapter
from paceline.hf.anatomy import UnsupportedModelError, refuse_known
from paceline.hf.check import Family, compared_here, families
from paceline.hf.family_configs import NUM_LAYERS, causal_lm_configs, tiny_configs
from paceline.hf.parity import ROUNDING, Parity, check_split, cuts
from paceline.hf.quiet_transformers import quiet
from paceline.hf.stage import Cut, recompute_layers, recomputed_layers
from paceline.hf.weights import causal_config, load_stage, skeleton
from support.family_table import BEGIN, END, measure, to_json, to_markdown
from support.family_table import README as SECTION
from support.ranks import run_ranks

INSTALLED = {config_class.model_type: config_class for config_class in causal_lm_configs()}
TABLE = json.loads(resources.files("paceline.hf").joinpath("families.json").read_text())
IS_NEWEST = transformers.__version__ == TABLE["transformers"][1]
README = Path(__file__).parents[2] / SECTION


def _config_class(model_type: str) -> type[transformers.PretrainedConfig]:
    if model_type not in INSTALLED:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return INSTALLED[model_type]


MOST_USED = {
    "bloom", "cohere", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite",
    "llama", "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
}  # fmt: skip
EVERYWHERE = [(0, 1, NUM_LAYERS)]
"""One cut for the other families: embedding, a layer, layers, head."""


@pytest.mark.parametrize("model_type", sorted(families()))
def test_family_is_as_listed(model_type: str) -> None:
    listed = families()[model_type]
    measured = measure(_config_class(model_type), () if model_type in MOST_USED else EVERYWHERE)
    if not IS_NEWEST:  # older versions record the router's logits of fewer families, and refuse to ask for the others'
        assert listed.router_loss or not measured.router_loss
        measured = replace(measured, router_loss=listed.router_loss)
    assert measured == listed
    assert measured.verdict == "refused" or measured.difference <= ROUNDING


@pytest.mark.parametrize("model_type", sorted(t for t, row in families().items() if row.verdict == "refused"))
def test_refused_family_is_not_trained(model_type: str) -> None:
    reason = families()[model_type].reason
    config_class = _config_class(model_type)
    with quiet():  # some configs have no defaults
        config = SimpleNamespace(model_type=model_type) if model_type in REASONS else causal_config(config_class())
    with pytest.raises(UnsupportedModelError) as raised:
        refuse_known(config)
    assert reason in str(raised.value)


def test_table_has_every_family() -> None:
    assert compared_here()
    assert set(INSTALLED) <= set(families()), "run python tests/support/family_table.py --write"
    if IS_NEWEST:
        assert set(INSTALLED) == set(families())


def test_at_least_75_families_are_exact() -> None:
    assert sum(row.verdict == "exact" for row in families().values()) >= 75


def test_table_and_readme_are_as_written() -> None:
    text = README.read_text()
    section = text.partition(BEGIN + "\n")[2].partition(END)[0]
    assert section == to_markdown(families(), TABLE["transformers"][1], TABLE["torch"])
    if IS_NEWEST and torch.__version__.startswith(TABLE["torch"]):
        assert json.loads(to_json(families())) == TABLE


@pytest.mark.parametrize("model_type", ["bamba", "jamba"])
def test_small_copy_of_a_hybrid_has_attention(model_type: str) -> None:
    """Their own layers begin to attend behind the fourth."""
    with quiet():
        model = skeleton(tiny_configs(_config_class(model_type))[0])
    assert any(type(module).__name__.endswith("Attention") for module in model.modules())


# What the comparison must notice.


def _without(monkeypatch: pytest.MonkeyPatch, model_type: str) -> Family:
    monkeypatch.setitem(ADAPTERS, model_type, Adapter())
    return measure(_config_class(model_type))


@pytest.mark.parametrize(
    "model_type",
    sorted(t for t, a in ADAPTERS.items() if a.neutral or a.adds or a.norm or a.keep or a.count != Adapter().count),
)
def test_no_adapter_is_idle(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _without(monkeypatch, model_type).verdict == "refused"


def test_multiplier_applied_on_every_stage_shows_in_both_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    row = _without(monkeypatch, "granite")
    assert "in training its decoder changes the hidden states that come from another stage by up to" in row.reason
    with quiet():
        parity = check_split(tiny_configs(INSTALLED["granite"])[0], NUM_LAYERS)
    assert parity.logits > 1e-2
    assert parity.gradient > 0.1


def test_router_loss_of_one_stage_only_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = router.RouterLoss.accumulate
    monkeypatch.setattr(
        router.RouterLoss, "accumulate", lambda self, routing, *args, **kwargs: accumulate(self, None, *args, **kwargs)
    )
    with quiet():
        parity = check_split(tiny_configs(INSTALLED["mixtral"])[0], NUM_LAYERS)
    assert parity.logits == 0.0
    assert parity.loss > ROUNDING
    assert parity.gradient > 0.1
    assert "gate" in parity.worst_gradient


PADDED_FAMILIES = [
    "llama",
    "gpt2",
    "mixtral",
    "opt",
    "bloom",
    "mistral",
    "gemma2",
    "qwen3",
    "mamba",
    "bamba",
    "falcon_h1",
]


def needs_mask_on_a_gpu(device: torch.device) -> bool:
    return masks.needs_mask(torch.device("cuda"))


def split_as_on_a_gpu(model_types: list[str]) -> list[Parity]:
    """Compare stages that take themselves to be on a GPU."""
    with mock.patch.object(stages_of_models, "needs_mask", needs_mask_on_a_gpu):
        return [
            check_split(tiny_configs(INSTALLED[each])[0], NUM_LAYERS, boundaries=EVERYWHERE) for each in model_types
        ]


def test_padding_behind_the_tokens_needs_no_mask() -> None:
    """As on a GPU: loss and gradients are the whole model's, which has the mask; outputs at padding are not.

    In a process of its own: kernels with and without a mask round alike only where no setting of torch was changed.
    """
    [parities] = run_ranks(split_as_on_a_gpu, 1, PADDED_FAMILIES)
    for model_type, parity in zip(PADDED_FAMILIES, parities, strict=True):
        assert max(parity.loss, parity.gradient) <= ROUNDING, (model_type, parity)
        assert parity.logits > 1e-3, (model_type, parity)


@pytest.mark.parametrize("model_type", ["llama", "granitemoe", "granitemoe_swa", "granitemoeshared"])
def test_samples_of_a_packed_row_stay_apart_in_every_stage(model_type: str) -> None:
    """Also where the model's forward has no argument ``use_cache``, only its decoder's."""
    config = tiny_configs(INSTALLED[model_type])[0]
    config.output_router_logits = False
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    with quiet(), torch.no_grad():
        wanted = load_stage(None, config, Cut.whole(NUM_LAYERS)).model.eval()(
            input_ids=ids, position_ids=positions, use_cache=False
        )
        stream: torch.Tensor = ids
        for cut in cuts(NUM_LAYERS, 1, 3):
            stream, _ = load_stage(None, config, cut).eval()(stream, {"position_ids": positions})
    assert torch.equal(stream, wanted.logits)


@pytest.mark.parametrize("model_type", ["llama", "nemotron_h"])
def test_stage_without_layers_recomputes_none(model_type: str) -> None:
    """Also where nothing but the layers has transformers' flag for it."""
    with quiet():
        stage = load_stage(None, tiny_configs(INSTALLED[model_type])[0], Cut(0, 0, True, False))
    recompute_layers(stage.model, stage.anatomy)
    assert recomputed_layers(stage.model, stage.anatomy) == []


# Random weights.


@pytest.fixture
def unset_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unset_memory_is_nan")
@pytest.mark.parametrize(
    "model_type",
    ["llama", "gpt2", "mixtral", "falcon", "mamba", "codegen", "falcon_h1", "recurrent_gemma", "apertus", "openai-gpt"],
)
def test_random_weights_are_the_same_for_every_cut(model_type: str) -> None:
    config = tiny_configs(INSTALLED[model_type])[0]
    with quiet():
        whole = load_stage(None, config, Cut.whole(NUM_LAYERS)).model
        stages = [load_stage(None, config, cut).model for cut in cuts(NUM_LAYERS, 1)]
    tensors = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    assert not [name for name, tensor in tensors.items() if tensor.isnan().any()]
    held = set()
    for stage in stages:
        for name, tensor in [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers()]:
            held.add(name)
            assert torch.equal(tensor, tensors[name]), name
    assert held == set(tensors)


def test_weights_without_initial_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CONSTRUCTED", {})
    config = tiny_configs(INSTALLED["openai-gpt"])[0]
    message = (
        r"^OpenAIGPTLMHeadModel \(model type 'openai-gpt'\) has no initial values for "
        r"\['transformer.h.0.attn.c_attn.weight', 'transformer.h.0.attn.c_attn.bias'\]: start from a checkpoint that "
        "has them.$"
    )
    with quiet(), pytest.raises(UnsupportedModelError, match=message):
        load_stage(None, config, Cut.whole(NUM_LAYERS))
    with quiet():
        stage = load_stage(None, config, Cut.whole(NUM_LAYERS), allow_empty=True)
    assert stage.model.transformer.h[0].attn.c_attn.weight.isnan().all()
