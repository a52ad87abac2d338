"""``paceline.repair_deepspeed``: explicit, reversible, idempotent, and never more than what fits."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import paceline
from paceline.patches import repairs
from paceline.patches.registry import _slot, all_patches
from paceline.patches.repairs import REPAIRS, repair_deepspeed
from support.expert_models import FAMILIES, build


def held() -> list[object]:
    return [_slot(patch.target).get() for patches in REPAIRS.values() for patch in patches]


@pytest.fixture(autouse=True)
def undone():
    before = held()
    yield
    assert all(now is then for now, then in zip(held(), before, strict=True))


def test_all_or_those_that_are_named() -> None:
    before = held()
    with paceline.repair_deepspeed() as done:
        assert done.applied == tuple(REPAIRS)
        assert done.skipped == {}
        assert not any(now is then for now, then in zip(held(), before, strict=True))
    assert done.applied == ()
    with repair_deepspeed("receive-pool", "optimizer-states") as done:
        assert done.applied == ("receive-pool", "optimizer-states")
        assert [name for name, patches in REPAIRS.items() if all(p.is_applied() for p in patches)] == [
            "optimizer-states",
            "receive-pool",
        ]


def test_a_second_call_changes_nothing_and_undoes_nothing() -> None:
    with repair_deepspeed("receive-pool"):
        with repair_deepspeed("receive-pool", "expert-placement") as inner:
            assert inner.applied == ("expert-placement",)
        assert REPAIRS["receive-pool"][0].is_applied()
        assert not REPAIRS["expert-placement"][0].is_applied()


def test_a_call_that_nobody_holds_stays() -> None:
    repair_deepspeed("receive-pool")
    gc.collect()
    patch = REPAIRS["receive-pool"][0]
    assert patch.is_applied()
    code = "import paceline; paceline.repair_deepspeed()"  # and nothing is said when the process ends
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    from paceline.patches.registry import _undo

    _undo(patch)


def test_undo_twice() -> None:
    done = repair_deepspeed("receive-pool")
    done.undo()
    done.undo()
    assert repr(done) == "Repairs(applied=[], skipped={})"


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="'recieve-pool' is not a repair of DeepSpeed: choose from autoep-start, "):
        repair_deepspeed("recieve-pool")


def test_what_does_not_fit_is_left_out_with_one_warning(monkeypatch, caplog) -> None:
    """A source that has changed is enough: nobody has read whether the repair is still right."""
    changed = {name: (replace(patches[0], fingerprint="0123456789ab"), *patches[1:])
               for name, patches in REPAIRS.items() if name in ("save-model", "moe-groups")}  # fmt: skip
    monkeypatch.setattr(repairs, "REPAIRS", {**REPAIRS, **changed})
    monkeypatch.setattr(repairs, "_told", set())
    with caplog.at_level("WARNING", logger="paceline"):
        for _ in range(2):
            with repair_deepspeed() as done:
                assert set(done.skipped) == {"save-model", "moe-groups"}
                assert set(done.applied) == set(REPAIRS) - set(done.skipped)
                assert not any(patch.is_applied() for patch in changed["save-model"])  # no half of a repair
    assert len(caplog.messages) == 1
    assert "the patch was written against 0123456789ab; read what changed" in caplog.messages[0]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(repairs, "_told", set())
    caplog.clear()
    repair_deepspeed("save-model")
    assert caplog.messages == []


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, paceline, paceline.patches.repairs\n"
        "print([m for m in ('torch', 'deepspeed', 'transformers', 'accelerate') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_repair_is_listed() -> None:
    listed = {patch.target for patch in all_patches()}
    assert {patch.target for patches in REPAIRS.values() for patch in patches} <= listed


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_finds_its_way_back_from_autoep(family: str) -> None:
    """Routers, their correction biases, shared experts and their gates: all keys of the block, all bits."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    from paceline.patches.deepspeed_auto_ep_layer import source_state_dict

    model = build(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with repair_deepspeed("autoep-start", "save-model"):
        auto_ep = AutoEP(model, parse_autoep_config({"enabled": True, "autoep_size": 1}))
        auto_ep.replace_moe_layers(auto_ep.ep_parser(), 1, 0)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)]
    assert layers
    for prefix, layer in layers:
        experts = tuple(getattr(layer.experts, name).detach() for name in ("w1", "w2", "w3"))
        block = source_state_dict(layer, experts)
        assert {f"{prefix}.{name}" for name in block} == {name for name in before if name.startswith(f"{prefix}.")}
        for name, tensor in block.items():
            assert torch.equal(tensor, before[f"{prefix}.{name}"]), name
