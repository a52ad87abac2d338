"""Asking whether a model can be a pipeline: answers, refusals, and what the question leaves behind."""

from __future__ import annotations

import json
import logging
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import (
    BertConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    LlamaModel,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    Starcoder2Config,
    T5Config,
)
from transformers.utils import logging as log

from paceline.hf import check
from paceline.hf.adapters import ADAPTERS, Adapter
from paceline.hf.anatomy import UnsupportedModelError
from paceline.hf.check import (
    ModelReport,
    check_model,
    check_source,
    check_stream_identity,
    require_language_model,
    require_supported,
)
from paceline.hf.parity import Parity
from paceline.hf.quiet_transformers import quiet
from paceline.runtime.module import config_of

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_difference", check._difference.__wrapped__)


def test_report_of_gpt2() -> None:
    assert check_model(GPT2Config()) == ModelReport(
        model_type="gpt2",
        model_class="GPT2LMHeadModel",
        verdict="exact",
        difference=0.0,
        num_layers=12,
        tied=True,
        num_parameters=124_439_808,
    )


def test_report_of_a_mixture_of_experts_with_an_adapter() -> None:
    report = check_model(MixtralConfig(**TINY, output_router_logits=True))
    assert (report.router_loss, report.tied, report.adapter, report.num_layers) == (True, False, False, 3)
    assert check_model(GraniteConfig(**TINY)).adapter


def test_report_of_a_refused_model() -> None:
    report = check_model(BertConfig())
    assert report.verdict == "refused"
    assert report.reason == "model type 'bert' cannot be a pipeline: it is an encoder with a language-model head."
    assert report.num_parameters is None
    assert json.loads(json.dumps(report.to_dict()))["model_class"] == "BertConfig"


def test_report_of_a_config_without_a_causal_model() -> None:
    report = check_model(T5Config())
    assert report.verdict == "refused"
    assert report.reason.startswith("model type 't5' has no causal language model in transformers; choose a model")


def test_source_is_a_directory_with_a_config(tmp_path: Path) -> None:
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    report = check_source(tmp_path)
    assert (report.model_class, report.verdict, report.num_layers) == ("LlamaForCausalLM", "exact", 3)


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere", "no/such/folder", "nowhere/", "nowhere.json"])
def test_a_path_that_leads_nowhere_is_not_taken_for_a_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"does not exist: give a directory with a config\.json") as caught:
        check_source(name)
    assert str(caught.value).startswith(repr(name))
    assert "repo" not in str(caught.value).lower()


def test_adapters_are_not_taken_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    told = f"'{tmp_path}' holds PEFT adapters of some/base, not a model: give that model .*merge_and_unload"
    for read in (check_source, config_of):
        with pytest.raises(ValueError, match=told):
            read(tmp_path)
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    assert check_source(tmp_path).verdict == "exact"


def test_a_path_that_leads_nowhere_is_named_by_a_loop_of_ones_own_too() -> None:
    with pytest.raises(ValueError, match=r"^'no/such/folder' does not exist: give a directory with a config\.json"):
        config_of("no/such/folder")


def test_a_name_may_have_been_meant_as_a_directory() -> None:
    with pytest.raises(ValueError, match="'no/such', which is no directory here, has no config that transformers"):
        check_source("no/such")


@pytest.mark.parametrize("text", [None, "{", '{"model_type": "no-such-model"}'], ids=["empty", "broken", "unknown"])
def test_source_without_a_config(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"has no config that transformers [\d.]+ can read: .* Give a directory with"):
        check_source(str(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY),
        GemmaConfig(**TINY, head_dim=8),
        GPT2Config(n_embd=32, n_head=4, n_layer=3),
        GPTNeoXConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, hidden_dropout=0.3),
        OPTConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, word_embed_proj_dim=16),
        Starcoder2Config(**TINY, embedding_dropout=0.3),
        GraniteConfig(**TINY, embedding_multiplier=12.0),
    ],
    ids=lambda config: config.model_type,
)
def test_known_family_is_not_compared_again(config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check_split", None)
    require_supported(config)


@pytest.mark.parametrize(
    ("config", "when"),
    [
        (GraniteConfig(**TINY, embedding_multiplier=12.0), "training"),
        (Starcoder2Config(**TINY, embedding_dropout=0.3), "training"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_stream_that_is_changed_between_stages(
    config: PretrainedConfig, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ADAPTERS, config.model_type, Adapter())
    message = (
        rf"^model type '{config.model_type}' cannot be a pipeline: in {when} its decoder changes the hidden states "
        r"that come from another stage by up to \d\.\de[-+]\d+, before or after its layers\.$"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        require_supported(config)


def test_stream_identity_takes_the_config_as_it_is() -> None:
    config = LlamaConfig(**TINY)
    config._attn_implementation = "flash_attention_2"
    config.quantization_config = {"quant_method": "no-such-method"}
    check_stream_identity(config)
    assert config._attn_implementation == "flash_attention_2"
    assert config.quantization_config == {"quant_method": "no-such-method"}


@pytest.fixture
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "compared_here", lambda: False)


@pytest.mark.usefixtures("nothing_is_known")
def test_unknown_family_is_compared_on_a_small_copy() -> None:
    big = LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8)
    assert check_model(big).verdict == "exact"
    require_supported(GraniteConfig(embedding_multiplier=12.0))


@pytest.mark.usefixtures("nothing_is_known")
def test_unknown_family_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check_split", lambda *args: Parity(1e-7, 0.25, 0.5, "lm_head.weight"))
    message = (
        "^model type 'llama' cannot be a pipeline: cut into stages, a small copy of it differs from the whole model by "
        r"5.0e-01 \(loss 1.0e-07, logits 2.5e-01, gradient of 'lm_head.weight' 5.0e-01\).$"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        require_supported(LlamaConfig(**TINY))


@pytest.mark.usefixtures("nothing_is_known")
def test_unknown_family_that_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check_split", lambda *args: Parity(0.0, math.inf, 0.0, ""))
    with pytest.raises(UnsupportedModelError, match="differs from the whole model by inf"):
        require_supported(LlamaConfig(**TINY))


@pytest.mark.usefixtures("nothing_is_known")
def test_unknown_family_that_has_no_small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def shrink(config: PretrainedConfig) -> PretrainedConfig:
        raise KeyError("full_attention")

    monkeypatch.setattr(check, "shrink", shrink)
    message = (
        r"^model type 'llama' is not among the families that were compared with transformers [\d.]+, and a small copy "
        "to compare now cannot be built: KeyError: 'full_attention'$"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        require_supported(LlamaConfig(**TINY))


@pytest.mark.usefixtures("nothing_is_known")
def test_nothing_is_left_behind(capfd: pytest.CaptureFixture[str]) -> None:
    level, bars, state = log.get_verbosity(), log.is_progress_bar_enabled(), torch.random.get_rng_state()
    require_supported(LlamaConfig(**TINY))
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == (level, bars)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert capfd.readouterr() == ("", "")


def test_quiet_gives_back_what_was_set() -> None:
    level = log.get_verbosity()
    log.set_verbosity(logging.INFO)
    try:
        with suppress(RuntimeError), quiet():
            assert log.get_verbosity() > logging.CRITICAL
            raise RuntimeError
        assert log.get_verbosity() == logging.INFO
    finally:
        log.set_verbosity(level)


@pytest.mark.parametrize(
    ("version", "known"),
    [("5.16.9", False), ("5.17.0", True), ("5.20.1", True), ("5.23.0", True), ("5.23.1", False), ("6.0", False)],
)
def test_versions_that_the_table_speaks_of(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "transformers_version", version)
    monkeypatch.setattr(check, "_table", lambda: {"transformers": ["5.17.0", "5.23.0"]})
    assert check.compared_here() is known


def test_models_without_a_head_over_the_vocabulary_are_refused() -> None:
    config = LlamaConfig(**TINY)
    for kind in (LlamaForTokenClassification, LlamaModel):
        with pytest.raises(ValueError, match=rf"is a {kind.__name__}, whose .*; load it with AutoModelForCausalLM"):
            require_language_model(kind(config))
    for fine in (LlamaForCausalLM(config), config, "a/name"):
        require_language_model(fine)
