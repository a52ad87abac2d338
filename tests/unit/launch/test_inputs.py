"""Models that the job's flags name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.hf.arguments import ModelArguments
from paceline.launch.inputs import _model_config


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (None, r"there is no model: give --model_name_or_path, or .* --config_name or --model_type\."),  # of a JSON
        ("lama", r"--model_type lama: transformers has no such type; did you mean llama\?"),
        ("x", r"--model_type x: transformers has no such type; give a model_type of transformers"),
    ],
)
def test_a_model_that_is_none(model_type: str | None, message: str) -> None:
    tokenizer: Any = None
    with pytest.raises(ValueError, match=message):
        _model_config(ModelArguments(model_type=model_type), tokenizer)
