"""Saving and loading, with the other parts of an engine replaced by small ones."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from paceline.checkpoint import CheckpointError, latest_checkpoint
from paceline.hf.peft import Adapters
from paceline.optim.corrections import NUM_UPDATES, PREVIOUS_CHANGE, Corrections
from paceline.optim.sharded import ShardedOptimizer
from paceline.runtime.checkpointer import Checkpointer
from paceline.state.rank_states import ParameterGroups, RankStates, SchedulerState

SHAPE = {"stages": 1, "data_parallel": 1, "parts": [0, 2], "train_batch_size": 4}


class Alone:
    """The only rank, or one of two of which the other says what it is given."""

    rank = 0

    def __init__(self) -> None:
        self.others: list[Any] = []
        self.failure_elsewhere: Exception | None = None

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]

    def settle(self, error: BaseException | None, doing: str) -> None:
        if error is not None:
            raise error
        if self.failure_elsewhere is not None:
            raise self.failure_elsewhere

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        yield
        self.settle(None, doing)


@dataclass
class Counts:
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    micro_steps: int = 0


@dataclass
class Part:
    """Keeps what it is given."""

    value: Any
    saved: RankStates | None = None

    def state_dict(self) -> Any:
        return self.value

    def load_saved(self, saved: RankStates) -> None:
        self.saved = saved


@dataclass
class Placed:
    """Writes down in which order it is called, with a value of the model at that time."""

    weight: nn.Parameter
    calls: list[tuple[str, Any, float]] = field(default_factory=list)

    def _note(self, call: str, given: Any = None) -> None:
        self.calls.append((call, given, self.weight.flatten()[0].item()))

    def placements(self) -> Mapping[str, Any]:
        return {"layer": [[1, 0]]}

    def take(self, saved: Sequence[Mapping[str, Any]]) -> None:
        self._note("take", list(saved))

    def fetch(self) -> None:
        self._note("fetch")

    def resume(self, step: int) -> None:
        self._note("resume", step)


class Stage(nn.Sequential):
    num_stages = 1


class Job:
    """A model that trains, and its checkpointer."""

    def __init__(
        self, seed: int = 0, optimizer: type[Any] = torch.optim.Adam, frozen: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = Stage(nn.Linear(3, 4), nn.Linear(4, 2))
        self.model[0].requires_grad_(not frozen)
        names = {parameter: name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        basic = optimizer(list(names), lr=0.1)
        self.optimizer = ShardedOptimizer(basic, names)
        self.scheduler = torch.optim.lr_scheduler.StepLR(basic, 1, gamma=0.5)
        self.control, self.counts = Alone(), Counts()
        self.learned, self.run = Part("what was learned"), Part("how it runs")
        self.experts = Placed(self.model[0].weight)
        given: dict[str, Any] = {"shape": lambda: dict(SHAPE), **options}
        self.checkpointer = Checkpointer(
            self.control,
            self.model,
            self.optimizer,
            self.counts,
            world_size=1,
            replica=0,
            groups=ParameterGroups(self.optimizer, warns=True),
            scheduler=SchedulerState(lambda: self.scheduler, lambda: basic.param_groups),
            learned={"natural_gradient": self.learned},
            run={"rng": self.run},
            experts=self.experts,
            **given,
        )

    def step(self) -> None:
        x = torch.arange(6.0).view(2, 3) + self.counts.global_steps
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.reduce_gradients()
        self.optimizer.step()
        self.scheduler.step()
        self.counts.global_steps += 1
        self.counts.global_samples += 2

    @property
    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Job]:
    job = Job()
    for _ in range(3):
        job.step()
    assert job.checkpointer.save(tmp_path, client_state={"epoch": 7})
    return tmp_path, job


def test_a_job_goes_on_bitwise(saved: tuple[Path, Job]) -> None:
    root, job = saved
    other = Job(seed=1)
    assert other.checkpointer.load(root) == (str(root / "global_step3"), {"epoch": 7})
    assert other.counts == job.counts == Counts(3, 6)
    assert same(other.values, job.values)
    for each in (job, other):
        each.step()
    assert same(other.values, job.values)
    assert other.scheduler.get_last_lr() == job.scheduler.get_last_lr() == [0.1 * 0.5**4]
    for part, value in ((other.learned, "what was learned"), (other.run, "how it runs")):
        assert part.saved is not None
        assert part.saved.own == value


def test_a_tag_can_be_a_number(saved: tuple[Path, Job]) -> None:
    """As with DeepSpeed."""
    root, job = saved
    assert job.checkpointer.save(root, 7)
    other = Job(seed=1)
    assert other.checkpointer.load(root, 7)[0] == str(root / "7")
    assert same(other.values, job.values)


def test_experts_are_placed_before_anything_is_read(saved: tuple[Path, Job]) -> None:
    root, job = saved
    other = Job(seed=1)
    before, after = other.values[0][0, 0].item(), job.values[0][0, 0].item()
    other.checkpointer.load(root)
    assert other.experts.calls == [
        ("take", [{"layer": [[1, 0]]}], before),
        ("fetch", None, after),
        ("resume", 3, after),
    ]


def test_another_shape_gets_no_state_as_its_own(saved: tuple[Path, Job]) -> None:
    root, job = saved
    other = Job(shape=lambda: {**SHAPE, "stages": 2, "parts": [0, 1, 2]})
    other.checkpointer.load(root)
    assert same(other.values, job.values)
    assert other.run.saved is not None
    assert other.run.saved.own is None
    assert other.learned.saved is not None
    assert other.learned.saved.nearest_last == ["what was learned"]


def test_another_global_batch_is_said(saved: tuple[Path, Job], caplog: pytest.LogCaptureFixture) -> None:
    root, job = saved
    job.checkpointer._shape = lambda: {**SHAPE, "train_batch_size": 32}
    job.checkpointer.save(root, "of-32")
    for size, is_said in ((32, False), (16, True)):
        other = Job(shape=lambda size=size: {**SHAPE, "train_batch_size": size})
        other.checkpointer.load(root, "of-32")
        assert ("trained with 32 samples a step, this run goes on with 16" in caplog.text) == is_said


def test_another_scale_of_adapters_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.model.adapters = adapters_of(16)
    job.checkpointer.save(tmp_path, "of-16")
    for alpha, is_said in ((16, False), (32, True)):
        other = Job()
        other.model.adapters = adapters_of(alpha)
        other.checkpointer.load(tmp_path, "of-16")
        assert ("trained with lora_alpha 16 of the adapters, this run goes on with 32" in caplog.text) == is_said


def adapters_of(alpha: int) -> Adapters:
    return Adapters(LoraConfig(r=4, lora_alpha=alpha, alpha_pattern={"q_proj": 8}), "default", (), ())


def test_only_the_model_is_loaded(saved: tuple[Path, Job]) -> None:
    root, job = saved
    other = Job(seed=1)
    other.checkpointer.load(root, load_module_only=True)
    assert same(other.values, job.values)
    assert other.counts == Counts()
    assert other.run.saved is other.learned.saved is None


@pytest.mark.parametrize("options", [{"load_optimizer_states": False}, {"optimizer": torch.optim.SGD}])
def test_without_the_optimizers_states_what_was_learned_starts_anew(
    saved: tuple[Path, Job], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    root, job = saved
    kind = {"optimizer": options["optimizer"]} if "optimizer" in options else {}
    other = Job(seed=1, **kind)
    other.checkpointer.load(root, **{name: value for name, value in options.items() if name not in kind})
    assert same(other.values, job.values)
    assert other.learned.saved is None
    assert other.run.saved is not None
    assert ("its states start anew" in caplog.text) == bool(kind)
    assert [call for call, *_ in other.experts.calls] == ["fetch", "resume"]


def test_what_another_runs_corrections_remember_is_left(tmp_path: Path) -> None:
    """It would take memory, and a later run with the correction would use it, far too old."""
    job, other = Job(), Job(seed=1)
    job.step()
    for owned in job.optimizer.owned:
        job.optimizer.state[owned.master] |= {
            PREVIOUS_CHANGE: torch.ones_like(owned.master),
            NUM_UPDATES: torch.ones(()),
        }
    job.checkpointer.save(tmp_path)
    other.checkpointer.load(tmp_path)
    assert {kind for state in other.optimizer.state.values() for kind in state} == {"step", "exp_avg", "exp_avg_sq"}
    for corrections, kept in (
        (Corrections(4, "nesterov"), {NUM_UPDATES, PREVIOUS_CHANGE}),
        (Corrections(4), {NUM_UPDATES}),
        (Corrections(), set()),
    ):
        assert corrections.keys == kept


def test_what_is_under_way_ends_before_anything_is_copied(tmp_path: Path) -> None:
    def settle() -> None:
        with torch.no_grad():
            for owned in job.optimizer.owned:
                owned.master.fill_(5.0)
        job.optimizer.publish()

    job = Job(settle=settle)
    job.checkpointer.save(tmp_path, "a")
    other = Job()
    other.checkpointer.load(tmp_path, "a")
    assert all(bool((value == 5.0).all()) for value in other.values)


def test_what_is_being_written_is_what_is_loaded(tmp_path: Path) -> None:
    """Not the one before, which goes when it is there."""
    job = Job()
    job.checkpointer.save(tmp_path, "a")
    job.step()
    wanted = job.values
    job.checkpointer.save(tmp_path, "b", wait=False, keep=1, files=lambda draft: time.sleep(0.2))
    job.step()
    assert job.checkpointer.load(tmp_path)[0] == str(tmp_path / "b")
    assert same(job.values, wanted)


def test_files_are_written_into_the_draft(tmp_path: Path) -> None:
    job = Job(write_model=lambda draft: (draft / "model").touch())
    job.checkpointer.save(tmp_path, "a", files=lambda draft: (draft / "mine").touch())
    assert {"model", "mine"} <= {path.name for path in (tmp_path / "a").iterdir()}


def test_a_job_that_has_saved_can_be_let_go(tmp_path: Path) -> None:
    """The writer lives until the exit, to end what it writes."""
    job = Job()
    job.checkpointer.save(tmp_path)
    job.checkpointer.close()
    model = weakref.ref(job.model)
    del job
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("is_quantised", [False, True])
def test_frozen_parameters_can_be_left_out(tmp_path: Path, is_quantised: bool) -> None:
    """Quantised ones always are."""
    job, other = Job(frozen=True, is_quantised=is_quantised), Job(seed=1, frozen=True)
    job.checkpointer.save(tmp_path, "a", exclude_frozen_parameters=not is_quantised)
    before = other.values
    other.checkpointer.load(tmp_path)
    assert same(other.values[:2], before[:2])
    assert same(other.values[2:], job.values[2:])


def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    job = Job()
    with pytest.raises(ValueError, match="save_latest is False"):
        job.checkpointer.save(tmp_path, save_latest=False)
    with pytest.raises(ValueError, match="client_state is a list: it must be a dict; make it one"):
        job.checkpointer.save(tmp_path, client_state=[1, 2])
    job.control.others = [(str(tmp_path), "b")]
    with pytest.raises(ValueError, match=r"different names.*give all the same"):
        job.checkpointer.save(tmp_path, "a")
    job.control.others = []
    with pytest.raises(ValueError, match=r"client_state.*pathlib"):
        job.checkpointer.save(tmp_path, "a", {"path": tmp_path})
    for call, name in ((job.checkpointer.save, "save_dir"), (job.checkpointer.load, "load_dir")):
        with pytest.raises(TypeError, match=f"{name} is None: it must be a folder; give its name"):
            call(None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tag", ["x" * 300, "no\0name", "other"])
def test_a_tag_that_cannot_be_is_none_of_a_checkpoint(tag: str, saved: tuple[Path, Job]) -> None:
    root, _ = saved
    with pytest.raises(CheckpointError, match=r"is no checkpoint: there is no such directory\. The last complete one"):
        Job().checkpointer.load(root, tag)


def test_a_relative_folder_is_the_one_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job()
    job.control.others = [("/elsewhere/saved", "a")]  # of a rank whose working directory is another
    with pytest.raises(ValueError, match=rf"{tmp_path}/saved.*an absolute path where their working directories differ"):
        job.checkpointer.save("saved", "a")
    assert list(tmp_path.iterdir()) == []


def test_a_relative_folder_stays_where_it_was_when_the_save_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, went_on = tmp_path / "began", threading.Event(), list[bool]()
    began.mkdir()
    monkeypatch.chdir(began)
    job = Job()
    job.checkpointer.save("saved", "a", wait=False, files=lambda draft: went_on.append(go_on.wait(60)))
    monkeypatch.chdir(tmp_path)
    go_on.set()
    job.checkpointer.finish()
    assert went_on == [True]
    assert latest_checkpoint(began / "saved") == began / "saved/a"


def test_nobody_writes_if_another_rank_cannot(tmp_path: Path) -> None:
    job = Job()
    job.checkpointer.prepare()
    job.control.failure_elsewhere = ValueError("rank 1 cannot")
    with pytest.raises(ValueError, match="rank 1 cannot"):
        job.checkpointer.save(tmp_path, "a")
    assert list(tmp_path.iterdir()) == []


def failing(tmp_path: Path) -> Job:
    """A job whose last save could not be written, and which has not been told."""

    def files(draft: Path) -> None:
        raise OSError("no space")

    job = Job()
    job.checkpointer.save(tmp_path, "a", wait=False, files=files)
    writer = job.checkpointer._writer
    assert writer is not None
    assert writer._thread is not None
    writer._thread.join()
    return job


def test_a_failed_save_is_told_once(tmp_path: Path) -> None:
    job = failing(tmp_path / "1")
    assert "no space" in str(job.checkpointer.error())
    assert job.checkpointer.error() is None
    with pytest.raises(CheckpointError, match="no space"):
        failing(tmp_path / "2").checkpointer.finish()
    job = failing(tmp_path / "3")
    with pytest.raises(CheckpointError, match="by another rank"), job.checkpointer.reported():
        raise CheckpointError("told by another rank")
    assert job.checkpointer.error() is None
    job.checkpointer.finish()
    assert Job().checkpointer.error() is None


def test_a_failed_save_does_not_keep_a_job_from_ending(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing(tmp_path).checkpointer.close()
    assert "no space" in caplog.text


def test_a_folder_without_a_checkpoint_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Job().checkpointer.load(tmp_path) == (None, {})
    assert "has no checkpoint" in caplog.text


def test_a_model_that_lacks_something_is_another(saved: tuple[Path, Job], caplog: pytest.LogCaptureFixture) -> None:
    """Ranks have a stage each: together they have all of it."""
    root, _ = saved
    other = Job()
    other.checkpointer._model = Stage(other.model[0])
    message = r"it has 1\.\w+ and 1 more, and this run's model has not"
    with pytest.raises(ValueError, match=rf"global_step3 does not fit: {message}: it is of another model"):
        other.checkpointer.load(root, load_module_strict=True)
    other.checkpointer.load(root, load_module_strict=False)
    assert re.search(message, caplog.text)
    other.control.others = [{"1.weight", "1.bias"}]
    other.checkpointer.load(root)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (None, "default", r"without adapters: go on without, or export it .* in a new run"),
        ("default", None, r"with adapters: go on with them, or begin anew from a model .* merged into"),
        ("default", "default", r"with adapters: give them the options that they had \(method, rank"),
        (None, None, r"without its frozen parameters: freeze the same ones"),
    ],
)
def test_adapters_that_do_not_fit_have_a_remedy(
    before: str | None, now: str | None, message: str, tmp_path: Path
) -> None:
    """Others than those that were saved have other names, or shapes; here a parameter is missing that was frozen."""
    job, other = Job(frozen=True), Job()
    for each, name in ((job, before), (other, now)):
        each.model.adapters = SimpleNamespace(name=name)  # type: ignore[assignment]
    job.checkpointer.save(tmp_path, exclude_frozen_parameters=True)
    with pytest.raises(ValueError, match=rf"does not fit: it has no 0\.weight: .* It was saved {message}"):
        other.checkpointer.load(tmp_path)


def test_checkpoints_that_are_all_damaged_are_not_none(saved: tuple[Path, Job]) -> None:
    root, _ = saved
    lost = root / "global_step3" / "rank_00000.safetensors"
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"{root} has no complete checkpoint: {lost}: No such .* to begin anew"):
        Job().checkpointer.load(root)


def test_another_model_does_not_fit(saved: tuple[Path, Job]) -> None:
    root, _ = saved
    other = Job()
    wide = Stage(nn.Linear(3, 5), nn.Linear(5, 2))
    names = {parameter: name for name, parameter in wide.named_parameters()}
    other.checkpointer._model = wide
    other.checkpointer._optimizer = ShardedOptimizer(torch.optim.Adam(list(names)), names)
    with pytest.raises(ValueError, match=r"global_step3 does not fit: .*0\.weight"):
        other.checkpointer.load(root)
    with pytest.raises(CheckpointError, match="global_step9"):
        Job().checkpointer.load(root, "global_step9")
