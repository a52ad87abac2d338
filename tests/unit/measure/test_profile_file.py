"""Profiles as files: what is saved is loaded, and what is no profile is refused."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from importlib import metadata
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.measure import profile_file as profiles
from paceline.measure.profile_file import DeviceProfile, ItemProfile, Profile, device_profile, kinds_of
from paceline.planning.workload import StageTimes

MODEL = {"model_type": "llama", "hidden_size": 64}
LAYER = ItemProfile("layers.0", "Layer", 0.002, 0.004, 1000, 256, 50)
ITEMS = (
    ItemProfile("embedding", "Embedding", 0.001, 0.001, 64, 256, 640),
    LAYER,
    replace(LAYER, name="layers.1"),
    ItemProfile("head", "Head", 0.003, 0.003, 500, 0, 700),
)
DEVICES = (DeviceProfile("a", 1.0, 8000, 6000), DeviceProfile("b", 0.5, 8000, 5000), DeviceProfile("c", 2, 1, 0))
PROFILE = Profile(MODEL, "float32", 2, 128, False, ITEMS, DEVICES, (1e9, inf), {"torch": "2"})


STAGE = StageTimes(0.001, 0.0005, 1.2, 0.4)


@pytest.mark.parametrize(
    "profile", [PROFILE, replace(PROFILE, stage=STAGE), replace(PROFILE, devices=DEVICES[:1], links=(), versions={})]
)
def test_a_file_gives_back_what_was_saved(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]  # no draft is left


def test_an_infinite_rate_is_null(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["links"] == [1e9, None]


def test_a_file_of_before_stages_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    PROFILE.save(path)
    values = json.loads(path.read_text())
    del values["stage"]
    path.write_text(json.dumps(values))
    assert Profile.load(path) == PROFILE
    with pytest.raises(ValueError, match="stage has split_factor 0 and weight_share"):
        replace(PROFILE, stage=STAGE._replace(split_factor=0))
    with pytest.raises(ValueError, match=r"stage\.forward_s is -1: give a number from 0 upwards"):
        replace(PROFILE, stage=STAGE._replace(forward_s=-1))


def changed(**changes: Any) -> Any:
    def change(values: dict[str, Any]) -> None:
        for path, value in changes.items():
            *parents, key = (int(part) if part.isdecimal() else part for part in path.split("__"))
            node: Any = values
            for parent in parents:
                node = node[parent]
            if value is KeyError:
                del node[key]
            else:
                node[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(format=2), "its format is 2 and must be 1; make one with `paceline profile` of this version."),
        (changed(format=KeyError), "its format is None and must be 1"),
        (changed(sequence_len=3), '"sequence_len" is not a key of a profile; did you mean "sequence_length"?'),
        (changed(items__1__zzz=3), '"zzz" is not a key of items[1]; choose from name, kind, forward_s'),
        (changed(items__1__kind=KeyError), '"items[1].kind" is missing; make the profile anew'),
        (changed(items__1__forward_s=KeyError), '"items[1].forward_s" is missing; make the profile anew'),
        (changed(items__1__forward_s="fast"), "items[1].forward_s is 'fast': give a number."),
        (changed(items__1__saved_bytes=1.5), "items[1].saved_bytes is 1.5: give a whole number."),
        (changed(items__1__saved_bytes=True), "items[1].saved_bytes is True: give a whole number."),
        (changed(items__1__backward_s=-1), "items[1].backward_s is -1.0: give a number from 0 upwards."),
        (
            changed(items__1__forward_s=10**400),
            "items[1].forward_s is too large to be computed with: give at most 1e+60",
        ),
        (
            changed(devices__1__free_bytes=10**400),
            "devices[1].free_bytes is too large to be computed with: give at most",
        ),
        (changed(dtype="float1"), "dtype is 'float1': give one of torch's, such as float32 or bfloat16."),
        (changed(dtype="int8"), "dtype is 'int8': give one of torch's, such as float32 or bfloat16."),
        (changed(dtype="nn"), "dtype is 'nn': give one of torch's, such as float32 or bfloat16."),
        (changed(gradient_checkpointing=1), "gradient_checkpointing is 1: give true or false."),
        (changed(micro_batch_size=0), "micro_batch_size is 0: give a whole number from 1 upwards."),
        (changed(items=[]), "items has 0 entries: it needs at least 3."),
        (changed(items={}), "items is {}: give a list."),
        (changed(items__0=7), "items[0] is 7: give an object {...}."),
        (changed(model=[]), "model is []: give an object {...}."),
        (changed(devices__1__speed=0), "devices[1].speed is 0.0: give a number above 0."),
        (changed(links=[1.0]), "links has 1 values for 3 devices: give 2, one between each two neighbours, or none."),
        (changed(links=[1.0, 0.0]), "links[1] is 0.0: give bytes per second, above 0."),
    ],
)
def test_what_is_no_profile_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    PROFILE.save(path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"^profile .*p\.json: ") as refused:
        Profile.load(path)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("at", "why"),
    [("none/p.json", "No such file or directory"), ("folder", "Is a directory"), ("full", "No space left")],
)
def test_what_cannot_be_written(at: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    if at == "full":
        write = Path.write_text

        def half(path: Path, text: str, encoding: str) -> None:
            write(path, text[:9])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(
        ValueError, match=f"^profile .*{at} cannot be written: {why}.*; give a path in a directory that"
    ):
        PROFILE.save(tmp_path / at)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_layers_take_time() -> None:
    idle = [replace(item, forward_s=0.0, backward_s=0.0) for item in ITEMS[1:3]]
    with pytest.raises(ValueError, match="items has no layer that takes any time"):
        replace(PROFILE, items=(ITEMS[0], *idle, ITEMS[3]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2: Expecting property name"),
        ("[1]", "its format is 'list' and must be 1"),
        ("[" * 100_000, "too many brackets inside each other; make one with `paceline profile`."),
        ('{"format": NaN}', "NaN is not JSON"),
    ],
)
def test_what_is_no_json_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"p\.json") as refused:
        Profile.load(path)
    assert message in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file or directory; make one with `paceline profile`"):
        Profile.load(tmp_path / "p.json")


def test_a_profile_fits_what_it_was_made_of() -> None:
    use: dict[str, Any] = {"micro_batch_size": 2, "sequence_length": 128}
    assert PROFILE.check_fits(MODEL, "float32", **use) == []
    told = PROFILE.check_fits(MODEL, "bfloat16", micro_batch_size=4, sequence_length=128)
    assert [line.partition(":")[0] for line in told] == [
        "the profile was measured with dtype float32 and the run has bfloat16",
        "the profile was measured with micro_batch_size 2 and the run has 4",
    ]
    with pytest.raises(ValueError, match="its hidden_size is 64 and this model's is 32; make one of this model"):
        PROFILE.check_fits({**MODEL, "hidden_size": 32}, "float32", **use)
    with pytest.raises(ValueError, match="its head_dim is None and this model's is 8"):
        PROFILE.check_fits({**MODEL, "head_dim": 8}, "float32", **use)
    with pytest.raises(ValueError, match=r"^profile own/p\.json is of another model: its head_dim"):
        PROFILE.check_fits({**MODEL, "head_dim": 8}, "float32", path="own/p.json", **use)


def test_work_scales_with_tokens() -> None:
    scaled = PROFILE.scaled(1, 384)
    assert (scaled.micro_batch_size, scaled.sequence_length) == (1, 384)
    assert scaled.items[1] == replace(LAYER, forward_s=0.003, backward_s=0.006, saved_bytes=1500, output_bytes=384)
    assert scaled.devices == PROFILE.devices


def test_what_a_stage_takes_scales_too() -> None:
    found = replace(PROFILE, stage=STAGE).scaled(4, 128).stage
    assert found == StageTimes(0.002, 0.001, 1.2, 0.4)


def test_kinds() -> None:
    assert {kind: [item.name for item in items] for kind, items in kinds_of(ITEMS).items()} == {
        "Embedding": ["embedding"],
        "Layer": ["layers.0", "layers.1"],
        "Head": ["head"],
    }


def test_this_machine() -> None:
    whole, half = (device_profile(torch.device("cpu"), num_ranks) for num_ranks in (1, 2))
    assert whole.speed == 1.0
    assert 0 < whole.free_bytes < whole.memory_bytes
    assert half.memory_bytes == whole.memory_bytes // 2


def test_versions_without_metadata_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is found on PYTHONPATH, as on machines with a GPU that it is only copied to."""

    def version(name: str) -> str:
        if name == "paceline":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(profiles.metadata, "version", version)
    assert profiles.versions() == {"paceline": paceline.__version__, "torch": "1.0", "transformers": "1.0"}
