"""The registry on a module of its own, and each patch on the real DeepSpeed."""

import gc
import importlib
import json
import os
import subprocess
import sys
import types

import pytest

from paceline.patches import registry
from paceline.patches.deepspeed_initialize import engine_class, plain_engine_class
from paceline.patches.deepspeed_ops import NO_SHM_COMM
from paceline.patches.registry import Patch, PatchError, Use, all_patches, applied, apply, fingerprint


def build():
    return "built"


class Owner:
    def greet(self):
        return "hello"

    @staticmethod
    def count():
        return 1


@pytest.fixture
def upstream(monkeypatch):
    module = types.ModuleType("upstream_of_the_test")
    module.build, module.also, module.Owner, module.table = build, build, Owner, {"on": True}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    assert registry._ACTIVE == {}


def patch(path="build", value="ours", **changes):
    name = "upstream_of_the_test"
    fields = {
        "target": f"{name}:{path}",
        "make": Use(value),
        "requires": "packaging>=1",
        "reason": "test",
        "removable_when": "never",
        "watches": f"{name}:build",
        "fingerprint": fingerprint(build),
    }
    return Patch(**(fields | changes))


def test_apply_and_undo(upstream):
    with applied(patch(), patch("Owner.greet"), patch("table[on]", False)):
        assert (upstream.build, Owner.greet, upstream.table) == ("ours", "ours", {"on": False})
    assert upstream.build is build
    assert Owner().greet() == "hello"
    assert upstream.table == {"on": True}


def test_make_gets_the_original(upstream):
    with applied(patch(make=lambda original: (original,))):
        assert upstream.build == (build,)


def test_static_methods_stay_static(upstream):
    with applied(patch("Owner.count", staticmethod(lambda: 2))):
        assert (Owner.count(), Owner().count()) == (2, 2)
    assert (Owner.count(), Owner().count()) == (1, 1)


def test_applying_twice_is_once(upstream):
    made = []

    def make(original):
        made.append(original)
        return "ours"

    ours = patch("also", make=make)
    with applied(ours, ours):
        with applied(ours):
            assert upstream.also == "ours"
        assert upstream.also == "ours"  # undone by who applied it
    assert upstream.also is build
    assert made == [build]
    with applied(patch("also")), applied(patch("also")):  # equal, not the same object
        assert upstream.also == "ours"


def test_all_or_none(upstream):
    bad = patch("also", requires="packaging>=1000")
    with pytest.raises(PatchError, match=r"needs packaging>=1000, found .*; port the patch"), applied(patch(), bad):
        pass
    assert upstream.build is build

    def fails(original):
        raise OSError("no")

    with pytest.raises(OSError, match="no"), applied(patch(), patch("also", make=fails)):
        pass
    assert upstream.build is build


def test_no_stacking(upstream):
    with (
        applied(patch()),
        pytest.raises(PatchError, match="holds another replacement, 'ours'"),
        applied(patch(value="theirs")),
    ):
        pass
    with pytest.raises(PatchError, match="holds another replacement"), applied(patch(), patch(value="theirs")):
        pass
    assert upstream.build is build


def test_foreign_replacements(upstream):
    original = "upstream_of_the_test:build"
    upstream.also = "foreign"
    with pytest.raises(PatchError, match="was replaced by 'foreign'; undo that"):
        patch("also", original=original).check()
    upstream.also = build
    with pytest.raises(PatchError, match="was replaced by 'foreign' while it was patched"), applied(patch()):
        upstream.build = "foreign"
    assert upstream.build == "foreign"
    upstream.build = build
    with applied(patch("also", original=original)):
        patch("also", original=original).check()  # ours is not foreign
        upstream.also = "foreign"
        with pytest.raises(PatchError, match="holds another"), applied(patch("also", original=original)):
            pass
        upstream.also = "ours"


def test_a_changed_source_is_refused(upstream):
    changed = patch("also", fingerprint="0123456789ab")
    message = f"the source of .*:build is {fingerprint(build)}, .* written against 0123456789ab; read what changed"
    with pytest.raises(PatchError, match=message), applied(patch(), changed):
        pass
    assert upstream.build is upstream.also is build
    assert "read what changed" in changed.problem()
    assert not changed.is_applied()


def test_the_source_that_is_compared_is_upstreams(upstream):
    """Also where the patch replaces what it watches, and another patch is asked about it meanwhile."""
    with applied(patch()):
        assert patch().problem() == ""
        assert patch("also").problem() == ""


def test_an_optional_patch_that_is_refused_is_left_out(upstream, caplog):
    """A run is right without it. One that others rely on is an error, and nothing is applied."""
    optional = patch("also", fingerprint="0123456789ab", optional=True)
    with caplog.at_level("WARNING", logger="paceline"), applied(patch(), optional):
        assert (upstream.build, upstream.also) == ("ours", build)
        assert patch().is_applied()
        assert not optional.is_applied()
    assert caplog.messages == [f"going on without a patch: {optional.problem()}"]
    assert NO_SHM_COMM.optional
    assert not engine_class(Owner).optional


def test_apply_lasts_until_it_is_undone(upstream):
    undo = apply(patch())
    gc.collect()
    assert upstream.build == "ours"
    undo.close()
    assert upstream.build is build
    apply(patch())  # whether its result is kept or not
    gc.collect()
    assert upstream.build == "ours"
    registry._undo(patch())


def test_lost_targets(upstream):
    for path in ("gone", "Owner.gone", "gone.greet", "table[gone]"):
        with pytest.raises(PatchError, match="no longer there upstream"):
            patch(path).check()
    with pytest.raises(PatchError, match="no longer there upstream"):
        patch(target="no_such_module_at_all:x").check()
    with pytest.raises(PatchError, match="which is not installed"):
        patch(requires="no-such-distribution-at-all>=1").check()
    with pytest.raises(PatchError, match="has no source"):
        fingerprint(1)


def test_accelerator(upstream, monkeypatch):
    monkeypatch.setattr(registry, "_accelerator", lambda: "cuda")
    assert patch(accelerator="cuda").problem() == ""
    assert patch(accelerator="cpu").problem() == (
        "upstream_of_the_test:build: is for the cpu accelerator, this is cuda"
    )


def test_every_patch_is_declared_and_fits():
    from deepspeed.accelerator import get_accelerator

    patches = all_patches()
    assert len({p.target for p in patches}) == len(patches)
    for p in patches:
        assert p.reason
        assert p.removable_when
        assert p.fingerprint
        if p.accelerator in ("", get_accelerator().device_name()):
            assert p.problem() == ""


def test_engine_class_is_what_initialize_builds():
    """``initialize`` looks its engine up when it is called; the subclass stands in for the whole of it."""
    import deepspeed
    from deepspeed.runtime.pipe.engine import PipelineEngine

    class Engine(PipelineEngine):
        pass

    with applied(engine_class(Engine)):
        assert deepspeed.initialize.__globals__["PipelineEngine"] is Engine
        with applied(engine_class(Engine)):
            assert deepspeed.PipelineEngine is Engine
    assert deepspeed.PipelineEngine is PipelineEngine
    with applied(plain_engine_class(Engine)):
        assert deepspeed.initialize.__globals__["DeepSpeedEngine"] is Engine


REAL = """
import json, sys, deepspeed, torch
from torch import nn
from paceline.patches.deepspeed_initialize import engine_class
from paceline.patches.deepspeed_ops import NO_SHM_COMM
from paceline.patches.registry import applied

class Engine(deepspeed.PipelineEngine):
    pass

patches = [engine_class(Engine)]
if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
    patches.append(NO_SHM_COMM)
with applied(*patches):
    deepspeed.init_distributed()
    shm = getattr(deepspeed.comm.comm.cdb, "shm_comm_op", None)
    net = deepspeed.PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss())
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
batch = (torch.ones(1, 2), torch.zeros(1, 2))
loss = engine.train_batch(iter([batch]))
deepspeed.comm.barrier()
deepspeed.comm.destroy_process_group()
print(json.dumps({"engine": type(engine).__name__, "shm": repr(shm), "loss": float(loss)}))
"""


def test_real_engine_without_a_build(tmp_path):
    """One rank, one step. The empty folder for extensions shows that nothing was compiled."""
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, check=False, env=os.environ | alone
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.pop("loss") > 0
    assert result == {"engine": "Engine", "shm": "None"}
    assert list(tmp_path.iterdir()) == []


def test_the_extension_would_be_built(monkeypatch):
    """The fault that NO_SHM_COMM removes: DeepSpeed takes what its table calls compatible, and builds it."""
    import deepspeed

    # In deepspeed.comm the name "torch" is PyTorch.
    backend = importlib.import_module("deepspeed.comm.torch")
    if deepspeed.accelerator.get_accelerator().device_name() != "cpu":
        pytest.skip("the extension is for CPUs")

    class Builder:
        NAME = "deepspeed_shm_comm"

        def load(self):
            return "extension"

        def absolute_name(self):
            return self.NAME

    monkeypatch.setattr(type(backend.get_accelerator()), "create_op_builder", lambda self, name: Builder())
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    assert backend.build_shm_op() == "extension"
    with applied(NO_SHM_COMM):
        assert backend.build_shm_op() is None
    assert backend.build_shm_op() == "extension"


def test_private_methods_of_trainer_that_we_override_are_declared_and_fit():
    """A method that upstream changes is looked at before it is overridden further."""
    from paceline.launch.job_trainer import JobTrainer
    from paceline.patches.transformers_trainer import OVERRIDES
    from paceline.runtime.sft_trainer import PacelineSFTTrainer
    from paceline.runtime.trainer import PacelineTrainer

    found = set()
    for trainer in (PacelineTrainer, PacelineSFTTrainer, JobTrainer):
        for place, ours in enumerate(trainer.__mro__):
            upstream = [each for each in trainer.__mro__[place:] if not each.__module__.startswith("paceline")]
            for name in vars(ours):
                if ours.__module__.startswith("paceline") and name.startswith("_") and not name.startswith("__"):
                    found |= {f"{one.__module__}:{one.__qualname__}.{name}" for one in upstream if name in vars(one)}
    assert {override.target for override in OVERRIDES} == found
    assert [override.problem() for override in OVERRIDES] == [""] * len(OVERRIDES)


def test_an_override_whose_source_has_changed_is_named(caplog):
    from paceline.patches.registry import Override, warn_of_changes

    changed = Override("transformers.trainer:Trainer._clip_grad_norm", "ours:Ours", ("000000000000",))
    gone = Override("transformers.trainer:Trainer._never_there", "ours:Ours", ("000000000000",))
    with caplog.at_level("WARNING", logger="paceline"):
        warn_of_changes([changed, gone])
    assert "ours:Ours overrides it, and its source is" in caplog.text
    assert "_never_there: ours:Ours overrides it, and it is not there" in caplog.text
