"""A pipeline whose stages share one GPU: gloo, sends through host memory, and the losses of the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from jobs import train
from ranks import run_ranks

pytestmark = pytest.mark.gpu

STEPS, LR = 6, 5e-3
ONE_GPU = {
    "DS_ACCELERATOR": "cuda",
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
}


def run(stages: int, precision: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """What every rank finds, without its tensors."""
    import torch.distributed as dist

    optimizer = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0, "torch_adam": True}}
    found = train(stages, steps=STEPS, more={"optimizer": optimizer, **precision}, **kwargs)
    (device,) = {tensor.device.type for tensor in found.pop("state").values()}
    gpu = str(torch.cuda.get_device_properties(0).uuid) if device == "cuda" else ""
    return {**found, "device": device, "gpu": gpu, "backend": dist.get_backend()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stages", "ranks", "precision", "relative", "kwargs"),
    [
        (2, 2, {}, 1e-4, {"clipping": 0.1}),
        (4, 4, {}, 1e-4, {"kind": "ragged", "checkpointing": True}),
        (2, 4, {}, 1e-4, {"zero": 1, "clipping": 0.1}),
        (2, 4, {"bf16": {"enabled": True}}, 2e-3, {"zero": 1}),
    ],
    ids=["two stages", "four stages, ragged", "two stages, two replicas", "bf16"],
)
def test_stages_share_a_gpu(
    stages: int, ranks: int, precision: dict[str, Any], relative: float, kwargs: dict[str, Any]
) -> None:
    on_cpu = run_ranks(run, ranks, stages, precision, timeout=280, **kwargs)
    on_gpu = run_ranks(run, ranks, stages, precision, timeout=280, env=ONE_GPU, **kwargs)
    assert {(rank["device"], rank["backend"]) for rank in on_gpu} == {("cuda", "gloo")}
    assert len({rank["gpu"] for rank in on_gpu}) == 1
    for found, wanted in zip(on_gpu, on_cpu, strict=True):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=relative)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=50 * relative)
        assert found["evaluation"]["eval_loss"] == pytest.approx(wanted["evaluation"]["eval_loss"], rel=relative)
        assert found["losses"] == on_gpu[0]["losses"]
