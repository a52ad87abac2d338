"""The rows of the adapter table speak of families and attributes that exist."""

from __future__ import annotations

import os
from operator import attrgetter

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import transformers
from transformers import BambaConfig, Gemma4TextConfig, GraniteConfig, LlamaConfig

from paceline.hf.adapters import ADAPTERS, REASONS, REFUSED, Adapter, adapter_for
from paceline.hf.anatomy import UnsupportedModelError, anatomy_of, refuse_known
from paceline.hf.check import families, quiet
from paceline.hf.family_configs import causal_lm_configs, tiny_configs
from paceline.hf.weights import skeleton

INSTALLED = {config_class.model_type: config_class for config_class in causal_lm_configs()}


def test_every_row_names_a_family() -> None:
    assert set(ADAPTERS) | set(REASONS) <= set(families())


def test_no_family_is_both_adapted_and_refused_or_refused_twice() -> None:
    assert not set(ADAPTERS) & set(REASONS)
    assert len(REASONS) == sum(len(types) for types in REFUSED.values())
    assert all(list(types) == sorted(types) for types in REFUSED.values())


@pytest.mark.parametrize("model_type", sorted(ADAPTERS))
def test_row_fits_its_model(model_type: str) -> None:
    if model_type not in INSTALLED:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    with quiet():
        config = tiny_configs(INSTALLED[model_type])[0]
        model = skeleton(config)
    adapter, anatomy = ADAPTERS[model_type], anatomy_of(model)
    trunk = anatomy.trunk_of(model)
    for name in (*adapter.neutral, *adapter.adds):
        attrgetter(name)(trunk)
    assert all(hasattr(config, name) for name in (adapter.count, *adapter.only))
    assert not adapter.order or {anatomy.layers, *anatomy.before, *anatomy.after} <= set(adapter.order)
    assert not adapter.norm or adapter.norm in anatomy.after
    for name in adapter.keep:
        anatomy.layers_of(model)[0].get_buffer(name)


def test_a_family_without_a_row_needs_nothing() -> None:
    assert adapter_for(LlamaConfig()) == Adapter()
    assert adapter_for(GraniteConfig()).neutral == {"embedding_multiplier": 1.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Gemma4TextConfig(num_kv_shared_layers=4, hidden_size_per_layer_input=0),
            "model type 'gemma4_text' cannot be a pipeline: num_kv_shared_layers is 4, and only 0 can be cut: its last "
            "layers reuse keys and values of earlier ones.",
        ),
        (
            BambaConfig(z_loss_coefficient=1e-4),
            "model type 'bamba' cannot be a pipeline: z_loss_coefficient is 0.0001, and only 0 can be cut: its z-loss "
            "is not part of the loss function.",
        ),
    ],
)
def test_configs_of_an_adapted_family_that_cannot_be_cut(config: transformers.PretrainedConfig, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        refuse_known(config)
    assert str(raised.value) == message


def test_configs_of_an_adapted_family_that_can() -> None:
    refuse_known(BambaConfig())
    refuse_known(Gemma4TextConfig(hidden_size_per_layer_input=0))
