"""The optimizer of a DeepSpeed JSON is checked before a model is loaded."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import check_ds_config, check_optimizer_values, fill_auto
from paceline.config.optimizers import DEEPSPEEDS


def test_the_list_is_deepspeeds() -> None:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    assert sorted(map(str.lower, DEEPSPEEDS)) == sorted(DEEPSPEED_OPTIMIZERS)


def optimizer(name: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            optimizer("AdamWW"),
            'optimizer.type is "AdamWW": neither DeepSpeed nor torch.optim has it; did you mean "AdamW"?',
        ),
        (optimizer("sgd"), 'did you mean "SGD"?'),
        (optimizer("lr_scheduler"), "neither DeepSpeed nor torch.optim has it; choose one of ASGD, Adadelta, Adagrad"),
        (optimizer(lr="1e-3"), 'optimizer.params.lr is "1e-3": it must be a number; write one, without quotes.'),
        (optimizer(lr=-1), "optimizer.params.lr is -1: it must be at least 0 and finite; correct it."),
        ({"gradient_clipping": -1}, "gradient_clipping is -1: it must be at least 0 and finite; correct it."),
        ({"gradient_clipping": None}, "gradient_clipping is null: it must be a number; write one, or leave it out."),
        ({"gradient_clipping": True}, "gradient_clipping is true: it must be a number"),
    ],
)
def test_refused(config: dict[str, Any], message: str) -> None:
    for check in (
        check_optimizer_values,
        lambda config: check_ds_config(config, print),
        lambda config: fill_auto(config, SimpleNamespace(), data_parallel=1),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            check(config)


@pytest.mark.parametrize("name", ["AdamW", "adamw", "Adam", "Lamb", "lion", "SGD", "Adafactor"])
def test_what_deepspeed_takes_passes(name: str) -> None:
    check_optimizer_values({**optimizer(name, lr=1e-3), "gradient_clipping": 0})
    check_optimizer_values({**optimizer(name, lr="auto"), "gradient_clipping": "auto"})
    check_optimizer_values({})
