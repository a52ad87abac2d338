"""DeepSpeed's own PipelineModule with the partition methods that it lacks, for scripts that build it themselves."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from paceline.patches.deepspeed_pipe_module import PARTITION_METHODS
from paceline.patches.registry import applied
from support.ranks import run_ranks

STOCK = ("uniform", "Parameters", "type:linear", "type:Tanh")
WRONG = ("profile", "nonsense", "type:rnn")
OURS = ([0, 1, 4], (0, 3, 4), {"linear": 1, "tanh": 5}, "hetero")

# Nothing of paceline in it.
TRAIN = """
import deepspeed, torch
from torch import nn
from deepspeed.pipe import LayerSpec, PipelineModule

deepspeed.init_distributed()
torch.manual_seed(0)
module = PipelineModule(
    [LayerSpec(nn.Linear, 4, 4) for _ in range(4)],
    num_stages=2,
    loss_fn=nn.functional.mse_loss,
    partition_method=[0, 1, 4],
)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
batch = (torch.ones(2, 4), torch.zeros(2, 4))
losses = [engine.train_batch(iter([batch, batch])).item() for _ in range(3)]
assert losses[2] < losses[0], losses
print("PARTS", module.parts, len(list(module.parameters())))
"""


def parts_of(method: Any) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [nn.Linear(8, 8), nn.Tanh(), LayerSpec(nn.Linear, 8, 9), nn.Tanh()]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            module = PipelineModule(layers, num_stages=2, partition_method=method)
    except Exception as error:
        return type(error).__name__, str(error)
    return list(module.parts), (module._local_start, module._local_stop), printed.getvalue()


def parts_with_and_without(methods: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    import deepspeed

    deepspeed.init_distributed()
    without = [parts_of(method) for method in methods]
    with applied(PARTITION_METHODS):
        return list(zip(without, [parts_of(method) for method in methods], strict=True))


def test_applied_and_undone() -> None:
    from deepspeed.pipe import PipelineModule

    original = PipelineModule._partition_layers
    with applied(PARTITION_METHODS):
        replacement = PipelineModule._partition_layers
        assert replacement is not original
        with applied(PARTITION_METHODS):
            assert PipelineModule._partition_layers is replacement
        assert PARTITION_METHODS.is_applied()
    assert PipelineModule._partition_layers is original


def test_another_source_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    from deepspeed.pipe import PipelineModule

    original = PipelineModule._partition_layers
    changed = replace(PARTITION_METHODS, fingerprint="0123456789ab")
    with caplog.at_level("WARNING", logger="paceline"), applied(changed):
        assert PipelineModule._partition_layers is original
    assert caplog.messages == [f"going on without a patch: {changed.problem()}"]
    assert "read what changed" in changed.problem()


def test_stock_values_are_as_before() -> None:
    """Same boundaries, same layers, same printed lines, same errors."""
    for rank, found in enumerate(run_ranks(parts_with_and_without, 2, STOCK + WRONG)):
        for method, (without, patched) in zip(STOCK + WRONG, found, strict=True):
            assert patched == without, (rank, method)
            assert (len(without) == 2) == (method in WRONG)


def test_ours_are_taken_only_with_the_patch() -> None:
    for rank, found in enumerate(run_ranks(parts_with_and_without, 2, OURS)):
        for method, (without, (parts, bounds, _)) in zip(OURS, found, strict=True):
            assert without[0] in ("AttributeError", "NotImplementedError"), method
            assert bounds == (parts[rank], parts[rank + 1])
            if method == "hetero":  # what the devices can do just now
                assert parts in ([0, 1, 4], [0, 2, 4], [0, 3, 4])
            else:
                assert parts == ([0, 2, 4] if isinstance(method, dict) else list(method))


def run(script: str) -> str:
    from paceline.launch.patched import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([script]) == 0, out.getvalue()
    return out.getvalue()


def test_a_script_that_cannot_change(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    ends = [re.search(r"PARTS .*", out) for out in run_ranks(run, 2, str(script))]
    assert [end and end[0] for end in ends] == ["PARTS [0, 1, 4] 2", "PARTS [0, 1, 4] 6"]
