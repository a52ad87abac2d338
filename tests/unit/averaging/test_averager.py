"""An island among others that the tests play: what becomes of masters, counts and learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from paceline.averaging.averager import Averager, Weigh, make_averager
from paceline.averaging.islands import ISLAND
from paceline.averaging.rounds import Outcome
from paceline.averaging.rules import Report, is_no_round
from paceline.config.averaging_keys import AveragingConfig
from paceline.hf.weights import is_pretrained

NUMEL = 3
Other = tuple[Report, float]
"""What another island reports, and the value of all of its parameters."""


class Alone:
    """The only rank of an island."""

    rank = 0

    def from_first(self, value: Any) -> Any:
        return value

    def sum(self, values: Tensor) -> Tensor:
        return values


class FakeMasters:
    """Parameters ``w0``, ``w1``, … with one state each, on one rank."""

    keeps_states_apart = True

    def __init__(self, count: int = 1) -> None:
        self.values = {f"w{i}": torch.zeros(NUMEL + i) for i in range(count)}
        self.momenta = {name: torch.ones_like(value) for name, value in self.values.items()}
        self.reset: list[str] = []

    def _of(self, kind: str) -> dict[str, Tensor]:
        return self.values if kind == "master" else self.momenta

    def numels(self) -> dict[str, int]:
        return {name: value.numel() for name, value in self.values.items()}

    def gather(self, names: Sequence[str], kind: str = "master") -> list[Tensor]:
        return [self._of(kind)[name].clone() for name in names]

    def scatter(
        self, names: Sequence[str], tensors: Sequence[Tensor], *, add: bool = False, kind: str = "master"
    ) -> None:
        held = self._of(kind)
        for name, tensor in zip(names, tensors, strict=True):
            assert tensor.shape == held[name].shape
            held[name] = held[name] + tensor if add else tensor.clone()

    def reset_states(self, names: Sequence[str]) -> None:
        self.reset += names


class Others:
    """The other islands of each round, and a round with them as :class:`~paceline.averaging.rounds.Islands` does it."""

    def __init__(self) -> None:
        self.there: Callable[[Report], Sequence[Other]] = lambda own: ()
        self.weigh: Weigh = lambda reports: []
        self.calls = self.is_closed = False
        self.error: Exception | None = None
        self.reports: list[Report] = []
        """Of this island, of each round."""

    def round(self, report: Report, tensors: Any) -> Outcome:
        if self.error is not None:
            raise self.error
        self.reports.append(report)
        others = list(self.there(report))
        reports = [report, *(other for other, _ in others)]
        weights = [float(weight) for weight in self.weigh(reports)]
        finished = max(each.round for each in reports) + (not is_no_round(reports))
        means = None
        differ = len({each.round for each in reports}) > 1  # from checkpoints
        if len(reports) > 1 and not is_no_round(reports) and (differ or any(each.counts for each in reports)):
            own = tensors(reports)
            means = [weights[0] * tensor if weights[0] else torch.zeros_like(tensor) for tensor in own]
            for weight, (_, value) in zip(weights[1:], others, strict=True):
                means = [mean + weight * value for mean in means]
        return Outcome(means, reports, weights, finished, 0.0, 0.0, 0, 1)

    def is_called(self, finished: int) -> bool:
        return self.calls

    def close(self) -> None:
        self.is_closed = True


class Job:
    """An island that has joined another one that has just started, too."""

    def __init__(
        self, *, joins: bool = True, params: int = 1, is_pretrained: bool = False, least: int = 2, **section: Any
    ) -> None:
        self.masters, self.others = FakeMasters(params), Others()
        config = AveragingConfig(lighthouse="localhost:29510", min_islands=least, every_tokens=100, **section)
        self.parameter = torch.nn.Parameter(torch.zeros(NUMEL))
        self.basic = torch.optim.SGD([self.parameter], lr=1.0, momentum=0.5)
        masters: Any = self.masters
        self.averager = Averager(
            config, Alone(), masters, self.basic, is_pretrained=is_pretrained, connect=self._connected
        )
        self.steps = 0
        if joins:
            self.others.there = lambda own: [(Report(1, own.digest, 0.0, math.nan, 0, False, 0), 0.0)]
            self.averager.join(0)

    def _connected(self, section: AveragingConfig, island: int, weigh: Weigh) -> Others:
        self.others.weigh = weigh
        return self.others

    @property
    def value(self) -> float:
        return float(self.masters.values["w0"][0])

    def trains_to(self, value: float) -> None:
        for name in self.masters.values:
            self.masters.values[name] = torch.full_like(self.masters.values[name], value)

    def after_step(self, tokens: int, *others: tuple[float, float, int], loss: float = 2.0) -> None:
        """A step; if a round is due or called, others are there with ``(value, loss, tokens)`` of the same round."""

        def there(own: Report) -> list[Other]:
            return [
                (Report(i, own.digest, own.checksum, lost, n, True, own.round, n, min(1.0, n / 100)), value)
                for i, (value, lost, n) in enumerate(others, 1)
            ]

        self.steps += 1
        self.others.there, self.others.calls = there, tokens < 100
        self.averager.after_step(self.steps, loss, tokens)


@pytest.fixture(autouse=True)
def _is_island_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISLAND, "0")


def test_masters_become_the_mean_by_tokens() -> None:
    job = Job(first_round="mean")
    job.trains_to(1.0)
    job.after_step(100, (4.0, 2.0, 300))
    assert job.value == pytest.approx(0.25 * 1.0 + 0.75 * 4.0)
    averager = job.averager
    assert (averager.round, averager.tokens, averager.tokens_of_all) == (1, 100, 400)
    entry = averager.exchanges[-1]
    assert entry["step"] == 1
    assert (entry["islands"], entry["weights"], entry["tokens"]) == ([0, 1], [0.25, 0.75], 100)


def test_the_rate_is_for_the_islands_of_the_next_round() -> None:
    """The first round takes one of three; the next average divides by three all the same."""
    job = Job(first_round="best")
    assert job.averager.learning_rate_factor == 2.0  # nobody is known yet: min_islands
    job.after_step(100, (1.0, 1.0, 100), (5.0, 3.0, 100))
    assert job.value == 1.0
    assert job.averager.learning_rate_factor == 3.0
    job.after_step(100, (2.0, 2.0, 100))
    assert job.averager.learning_rate_factor == 2.0


def test_only_the_step_sees_the_scaled_rate() -> None:
    job = Job()
    job.parameter.grad = torch.ones(NUMEL)
    job.basic.step()
    assert torch.equal(job.parameter.detach(), torch.full((NUMEL,), -2.0))
    assert job.basic.param_groups[0]["lr"] == 1.0
    unscaled = Job(scale_learning_rate=False)
    assert unscaled.averager.learning_rate_factor == 1.0


@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_without_new_tokens_nothing_moves_and_no_model_is_counted(outer: Any) -> None:
    job = Job(outer=outer, combine_rounds=2)
    for value in (1.0, 2.0):
        job.after_step(100, (value, 2.0, 100))
    before, state = job.value, job.averager.state_dict()
    job.after_step(0, (9.0, 2.0, 0))
    assert job.value == before
    assert len(job.others.reports) == 4, "with the one of the start"
    after = job.averager.state_dict()
    assert after["round"] == 2
    assert after["last_rounds"]["periods"] == state["last_rounds"]["periods"] == [1.0, 1.0]


def test_islands_that_join_with_equal_values_keep_count_of_their_tokens() -> None:
    """Of two that go on from checkpoints in the middle of a period: their next average is of all of it."""
    job = Job(joins=False)
    state = {**job.averager.state_dict(), "round": 2, "tokens": 250, "trained_until": {0: 200}}
    job.averager.load_state_dict(state)
    job.others.there = lambda own: [(Report(1, own.digest, 0.0, math.nan, 0, False, 2), 0.0)]
    job.averager.join(5)
    assert job.averager.state_dict()["trained_until"] == {0: 200}


@pytest.mark.parametrize("trained", [100, 1])
def test_a_short_period_takes_a_short_outer_step(trained: int) -> None:
    """From the same momentum: with a hundredth of the tokens, and an average that is as much nearer."""
    job = Job(outer="nesterov", combine_rounds=2)
    job.trains_to(1.0)
    job.after_step(100, (1.0, 2.0, 100))
    start = job.value
    job.trains_to(start + trained / 100)
    job.after_step(trained, (start + trained / 100, 2.0, trained))
    # b = 0.9^p b + g, a step of 0.7 (g + 0.9 (p 0.9^p b + g)), with b of the first round
    gradient, period, first = -trained / 100, trained / 100, -1.0
    change = gradient + 0.9 * (period * 0.9**period * first + gradient)
    assert job.value - start == pytest.approx(-0.7 * change, rel=1e-4)
    periods = job.averager.state_dict()["last_rounds"]["periods"]
    assert periods == [1.0, pytest.approx(trained / 100)]


@pytest.mark.parametrize("loads", [False, True])
def test_an_island_that_comes_later_takes_what_the_others_have(loads: bool) -> None:
    """Also one that went on from a checkpoint, unless the others have done no more rounds."""
    job = Job(joins=False)
    if loads:
        job.averager.load_state_dict({**job.averager.state_dict(), "round": 3, "tokens": 320})
    job.trains_to(7.0)
    job.others.there = lambda own: [(Report(1, own.digest, 0.0, 2.0, 100, True, 8, 100), 3.0)]
    job.averager.join(0)
    assert job.value == 3.0
    assert job.averager.round == 9
    assert not job.others.reports[0].counts
    job.after_step(100, (3.0, 2.0, 100))
    assert job.others.reports[1].counts


def test_ranks_that_take_this_for_different_islands_are_refused() -> None:
    class Ranks(Alone):
        def __init__(self, *others: int) -> None:
            self.others = others

        def together(self, doing: str) -> Any:
            return nullcontext()

        def gather(self, island: int) -> list[int]:
            return [island, *self.others]

    section = AveragingConfig(lighthouse="localhost:29510", islands=2)
    basic = torch.optim.SGD([torch.nn.Parameter(torch.zeros(NUMEL))])

    def make(*others: int) -> Any:
        ranks: Any = Ranks(*others)
        return make_averager(section, ranks, lambda: cast(Any, FakeMasters()), basic, is_pretrained=False)

    assert make(0).island == 0
    with pytest.raises(ValueError, match="ranks of this island have different numbers, 0, 1, and train on the shares"):
        make(0, 1, 1)


def test_training_goes_on_while_islands_average() -> None:
    """By how much the average differs from what was sent is added to what has been learned since."""
    job = Job(first_round="mean", overlap_steps=2)
    job.trains_to(1.0)
    job.after_step(100, (3.0, 2.0, 100))
    assert job.value == 1.0
    assert job.averager.learning_rate_factor == 2.0
    job.trains_to(1.5)
    job.after_step(10)
    assert job.value == 1.5
    job.after_step(10)
    assert job.value == 1.5 + (2.0 - 1.0)


def test_an_island_that_is_not_finite_takes_the_others_average_beside_training_too() -> None:
    """By how much it differs from what is not finite would not be, either."""
    job = Job(first_round="mean", overlap_steps=1)
    job.trains_to(math.nan)
    job.after_step(100, (3.0, 2.0, 100), loss=math.nan)
    job.after_step(10)
    assert job.value == 3.0


@pytest.mark.parametrize("saves", [False, True])
def test_at_the_end_it_is_the_average_itself(saves: bool) -> None:
    """A difference that is added would be rounded, on each island otherwise. Trainer saves after its last step."""
    job = Job(first_round="mean", overlap_steps=2)
    job.trains_to(1.1)
    job.after_step(100, (-0.7, 2.0, 100))
    if saves:
        job.averager.settle()
    job.others.there = lambda own: ()
    job.averager.finish(1)
    assert job.value == float(0.5 * torch.tensor(1.1) + 0.5 * torch.tensor(-0.7))


@pytest.mark.parametrize(("tokens", "parts"), [((100, 50), 1), ((0, 50), 1), ((100, 50), 2)])
def test_an_island_that_ends_first_takes_what_the_others_learn_until_they_end(
    tokens: tuple[int, ...], parts: int
) -> None:
    """Also where another one has come without anything new, and went on."""
    job = Job(params=parts, parts=parts, first_round="mean")
    job.trains_to(1.0)
    job.averager.after_step(1, 2.0, 40)
    told = [(3.0, tokens[0], False), (5.0, tokens[1], False), *[(7.0, 20, True)] * parts]

    def there(own: Report) -> list[Other]:
        value, trained, ends = told.pop(0)
        return [(Report(1, own.digest, 0.0, 2.0, trained, True, own.round, trained, ends=ends), value)]

    job.others.there = there
    job.averager.finish(1)
    assert [float(value[0]) for value in job.masters.values.values()] == [7.0] * parts
    assert told == []
    assert [report.ends for report in job.others.reports] == [False, *[True] * (2 + parts)]
    assert job.others.is_closed


def test_who_waits_at_its_end_for_others_that_die_ends_too(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(first_round="mean")
    job.trains_to(1.0)
    job.averager.after_step(1, 2.0, 40)
    there = [[(Report(1, 0, 0.0, 2.0, 40, True, 0, 40), 3.0)], []]
    job.others.there = lambda own: there.pop(0)
    job.averager.finish(1)
    assert (job.value, there) == (2.0, [])
    assert "no other island is there at the end" in caplog.text
    caplog.clear()
    job = Job(first_round="mean")
    job.averager.after_step(1, 2.0, 40)
    job.others.error = TimeoutError("fewer than min_islands are left.")
    job.averager.finish(1)
    assert "are left. The model is this island's own" in caplog.text
    assert "at the end" not in caplog.text


@pytest.mark.parametrize("shares", [1, 3])
def test_an_island_that_ends_alone_says_so_where_others_have_shares(
    shares: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(joins=False, islands=shares, least=1)
    job.averager.join(0)
    job.after_step(100)
    job.averager.finish(1)
    assert ("into 3 shares: the model is this island's own" in caplog.text) == (shares == 3)


def test_who_trains_on_is_called_and_its_rate_is_for_those_that_do() -> None:
    job = Job(first_round="mean")
    job.others.there = lambda own: [(Report(1, own.digest, 0.0, 2.0, 100, True, 0, 100, ends=True), 3.0)]
    job.averager.after_step(1, 2.0, 100)
    assert job.averager.learning_rate_factor == 1.0
    job.others.there = lambda own: [(Report(1, own.digest, 0.0, 2.0, 0, True, 1, 0, ends=True), 3.0)]
    job.others.calls = True
    job.averager.after_step(2, 2.0, 10)
    assert job.averager.round == 2


def test_an_island_that_was_stopped_at_its_end_takes_the_last_average() -> None:
    """Its checkpoint has no steps left; one that was saved later has the average, and waits for nobody."""
    ended = Job(first_round="mean")
    ended.averager.after_step(1, 2.0, 40)
    ended.others.error = TimeoutError("round 1 is not done.")
    ended.averager.finish(1)
    job = Job(joins=False, first_round="mean")
    job.averager.load_state_dict(ended.averager.state_dict())
    job.trains_to(1.0)
    job.others.there = lambda own: [(Report(1, own.digest, 0.0, 2.0, 120, True, own.round, 120, ends=True), 3.0)]
    job.averager.finish(1)
    assert job.value == 0.25 * 1.0 + 0.75 * 3.0
    assert [(report.counts, report.ends) for report in job.others.reports] == [(True, True)]
    assert job.others.is_closed
    later = Job(joins=False)
    later.averager.finish(0)  # it has not trained
    later.averager.load_state_dict(job.averager.state_dict())
    later.averager.finish(1)
    assert later.others.reports == []


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_a_round_that_a_stop_has_cut_short_comes_after_the_first_step_from_the_checkpoint(overlap_steps: int) -> None:
    """The others have not been in it either, where all are stopped, and are at it as soon."""
    stopped = Job(first_round="mean", overlap_steps=overlap_steps)
    stopped.averager._rounds._stops = lambda: True
    stopped.after_step(100, (3.0, 2.0, 100))
    stopped.averager.settle()  # as a save does
    job = Job(joins=False, first_round="mean", overlap_steps=overlap_steps)
    job.averager.load_state_dict(stopped.averager.state_dict())
    job.others.there = lambda own: [(Report(1, own.digest, 1.0, math.nan, 0, False, own.round, 90), 0.0)]
    job.averager.join(1)
    job.trains_to(1.0)
    job.others.there = lambda own: [(Report(1, own.digest, own.checksum, 2.0, 120, True, own.round, 120), 3.0)]
    job.averager.after_step(2, 2.0, 20)
    job.averager.settle()
    assert (job.value, job.averager.round) == (2.0, 1)
    assert (job.others.reports[-1].trained, job.others.reports[-1].period) == (120, 1.0)


def test_islands_from_checkpoints_of_different_rounds_begin_a_period_together() -> None:
    """All take the values of the one that is further; what they had trained since their last rounds is of no use."""
    for further, value in ((4, 3.0), (2, 7.0)):
        job = Job(joins=False, first_round="mean")
        job.averager.load_state_dict(
            {**job.averager.state_dict(), "round": 3, "tokens": 320, "_next_tokens": 330.0, "trained_until": {0: 230}}
        )
        job.trains_to(7.0)
        job.others.there = lambda own: [(Report(1, own.digest, 1.0, math.nan, 0, False, further, 90), 3.0)]  # noqa: B023
        job.averager.join(3)
        assert job.value == value
        job.averager.after_step(4, 2.0, 20)
        job.averager.settle()
        assert len(job.others.reports) == 1, "no round is due"
        job.after_step(100, (5.0, 2.0, 120))
        assert [report.trained for report in job.others.reports] == [90, 120]


def test_parts_are_averaged_in_turn() -> None:
    job = Job(params=2, parts=2, first_round="mean")
    job.trains_to(1.0)
    job.after_step(50, (3.0, 2.0, 50))
    assert [float(value[0]) for value in job.masters.values.values()] == [2.0, 1.0]
    job.after_step(50, (3.0, 2.0, 300))
    assert [float(value[0]) for value in job.masters.values.values()] == [2.0, 2.5]


@pytest.mark.parametrize(("tokens", "is_told"), [(50, False), (60, True)])
def test_steps_that_are_too_large_for_the_parts_are_told_once(
    tokens: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(params=2, parts=2, first_round="mean")
    for _ in range(3):
        job.after_step(tokens, (3.0, 2.0, tokens))
    assert caplog.text.count("each is averaged every 120 tokens, not every 100; take fewer averaging.parts") == is_told


@pytest.mark.parametrize("overlap_steps", [0, 1])
@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_an_island_that_missed_rounds_of_other_parts_takes_what_the_others_have(outer: Any, overlap_steps: int) -> None:
    """Its turn would be the first part's, and the others are at the second."""
    job = Job(params=2, parts=2, first_round="mean", outer=outer, overlap_steps=overlap_steps)
    job.trains_to(1.0)
    ahead = [1, 2]

    def there(own: Report) -> list[Other]:
        return [(Report(1, own.digest, 0.0, 2.0, 50, True, ahead[0], 50), 3.0)]

    job.others.there = there
    job.averager.after_step(1, 2.0, 50)
    job.averager.settle()
    assert job.averager.round == ahead.pop(0) + 1
    first, second = (float(value[0]) for value in job.masters.values.values())
    assert (first, second != 1.0) == (1.0, True)
    job.averager.after_step(2, 2.0, 50)
    job.averager.settle()
    assert [report.counts for report in job.others.reports[-2:]] == [True, False]
    first, second = (float(value[0]) for value in job.masters.values.values())
    assert first != 1.0
    assert outer == "nesterov" or (first, second) == (3.0, 3.0)


def test_others_that_are_gone_do_not_stop_a_job(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.others.error = TimeoutError("round 1 is not done.")
    job.trains_to(1.0)
    job.after_step(100)
    assert job.value == 1.0
    assert job.averager.round == 0
    assert job.averager.tokens_of_all == 100
    assert "Training goes on without the others" in caplog.text
    job.others.error = None
    job.after_step(100, (3.0, 2.0, 200))
    assert job.averager.round == 1
    caplog.clear()
    job.others.error = TimeoutError("round 2 is not done.")
    job.averager.after_step(2, torch.tensor(1.0), 1)
    job.averager.finish(2)
    assert [record.message for record in caplog.records] == [
        "round 2 is not done. The model is this island's own, and differs from that of the others."
    ]


@pytest.mark.parametrize(
    ("error", "kind"), [(ConnectionError("no lighthouse"), ValueError), (KeyError("lighthouse"), RuntimeError)]
)
def test_a_job_does_not_begin_without_a_lighthouse(error: Exception, kind: type[Exception]) -> None:
    job = Job(joins=False)
    job.others.error = error
    with pytest.raises(kind, match="lighthouse"):
        job.averager.join(0)


def test_the_optimizers_states_are_kept_reset_or_averaged() -> None:
    found = {}
    for how in ("keep", "reset", "average"):
        job = Job(optimizer_state=how, first_round="mean")
        job.after_step(100, (3.0, 2.0, 100))
        found[how] = float(job.masters.momenta["w0"][0]), job.masters.reset
    assert found == {"keep": (1.0, []), "reset": (1.0, ["w0"]), "average": (2.0, [])}
    masters: Any = FakeMasters()
    masters.keeps_states_apart = False
    section = AveragingConfig(lighthouse="a:1", min_islands=2, optimizer_state="reset", parts=2)
    with pytest.raises(ValueError, match=r'optimizer_state is "reset".*leave "parts" out'):
        Averager(section, Alone(), masters, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))


def test_the_last_rounds_are_combined_at_the_end() -> None:
    job = Job(combine_rounds=2, first_round="mean")
    for value in (1.0, 3.0):
        job.trains_to(value)
        job.after_step(100, (value, 2.0, 100))
    job.others.there = lambda own: ()
    job.averager.finish(3)
    assert job.value == 2.0
    assert job.others.is_closed
    job.averager.finish(3)  # it has left


def test_the_last_rounds_are_combined_as_held_out_data_say() -> None:
    job = Job(combine_rounds=2, combine_weights="held_out", first_round="mean")
    for value in (1.0, 3.0):
        job.trains_to(value)
        job.after_step(100, (value, 2.0, 100))
    job.others.there = lambda own: ()
    with pytest.raises(ValueError, match="no held-out data"):
        job.averager.finish(3)
    job.averager.finish(3, lambda: (job.value - 1.5) ** 2)
    assert job.value == pytest.approx(1.5)


@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_a_job_goes_on_from_its_state(outer: Any) -> None:
    """The same next rounds, in every bit; another rank of an island has the counts alone."""
    values = []
    for is_saved in (False, True):
        job = Job(outer=outer, combine_rounds=2)
        job.trains_to(1.0)
        job.after_step(100, (2.0, 2.0, 100))
        if is_saved:
            before, job = job, Job(joins=False, outer=outer, combine_rounds=2)
            job.averager.load_state_dict(before.averager.state_dict())
            job.masters.values = before.masters.values
            job.others.there = lambda own: [(Report(1, own.digest, 0.0, math.nan, 0, False, own.round), 0.0)]
            job.averager.join(1)
        job.trains_to(job.value + 1.0)
        job.after_step(100, (job.value, 2.0, 100))
        values.append((job.value, job.averager.tokens_of_all, job.averager.round))
        job.others.there = lambda own: ()
        job.averager.finish(2)
        values[-1] += (job.value,)
    assert values[0] == values[1]


def test_a_checkpoint_of_a_run_with_longer_periods_and_more_parts_does_not_put_off_the_next_round() -> None:
    job = Job(joins=False)
    state = {"round": 2, "tokens": 500, "_next_tokens": 5000.0, "_to_take": 2, "loss_sum": 0.0}
    job.averager.load_state_dict(state)
    job.others.there = lambda own: [(Report(1, own.digest, 0.0, math.nan, 0, False, 2), 0.0)]
    job.averager.join(0)
    job.after_step(100, (0.0, 2.0, 100))
    assert job.averager.round == 3
    assert job.others.reports[-1].counts


def test_a_checkpoint_of_a_run_with_fewer_parts_tells_of_all_when_they_were_averaged() -> None:
    job = Job(joins=False, params=2, parts=2)
    job.averager.load_state_dict({"round": 3, "tokens": 300, "trained_until": {0: 300}, "loss_sum": 0.0})
    job.others.there = lambda own: [(Report(1, own.digest, 0.0, math.nan, 0, False, 3), 0.0)]
    job.averager.join(0)
    job.after_step(50, (0.0, 2.0, 50))
    assert (job.others.reports[-1].round, job.others.reports[-1].trained) == (3, 50)


def test_a_checkpoint_of_other_parameters_has_no_anchors_for_these(caplog: pytest.LogCaptureFixture) -> None:
    """One that was frozen is trained now, and the others have other numbers than before."""
    before = Job(outer="nesterov", combine_rounds=2)
    before.trains_to(1.0)
    before.after_step(100, (1.0, 2.0, 100))
    job = Job(joins=False, outer="nesterov", combine_rounds=2)
    job.masters.values |= {"a": torch.full((NUMEL,), 5.0)}
    job.averager.load_state_dict(before.averager.state_dict())
    job.others.there = lambda own: [(Report(1, own.digest, 0.0, math.nan, 0, False, own.round), 0.0)]
    job.averager.join(1)
    assert "of 1 parameters, this run's of others, 2" in caplog.text
    job.trains_to(6.0)
    job.after_step(100, (6.0, 2.0, 100))
    assert job.masters.values["a"].tolist() == pytest.approx([5.0 + 0.7 * 1.9] * NUMEL)
    job.others.there = lambda own: ()
    job.averager.finish(2)


@pytest.mark.parametrize("outer", ["nesterov", "mean"])
def test_an_outer_step_begins_at_what_is_loaded_where_a_checkpoint_has_no_anchors(outer: Any) -> None:
    """In an engine that has trained: a checkpoint from before the first step, and one of a run without anchors."""
    state = Job(joins=False, outer=outer).averager.state_dict()
    job = Job(outer="nesterov")
    job.trains_to(1.0)
    job.after_step(100, (1.0, 2.0, 100))
    job.averager.load_state_dict(state)
    job.trains_to(5.0)
    job.averager.join(0)
    job.trains_to(6.0)
    job.after_step(100, (6.0, 2.0, 100))
    assert job.value == pytest.approx(5.0 + 0.7 * 1.9)
    job.averager.load_state_dict(state)
    job.others.there = lambda own: [(Report(1, own.digest, 0.0, 2.0, 100, True, own.round, 100, ends=True), 6.0)]
    job.averager.finish(2)


def test_a_pretrained_model_begins_with_a_mean() -> None:
    def first_round(**options: Any) -> str:
        return Job(joins=False, **options).averager.first_round

    assert first_round(is_pretrained=True) == "mean"
    assert first_round() == "best"
    assert first_round(is_pretrained=True, first_round="best") == "best"
    assert first_round(outer="nesterov") == "mean"


def test_models_that_are_pretrained() -> None:
    config = LlamaConfig()
    assert is_pretrained("Qwen/Qwen3-0.6B")
    assert is_pretrained(Path("model"))
    assert not is_pretrained(config)
    model = torch.nn.Linear(1, 1)
    assert not is_pretrained(model)
    model.config = config
    assert not is_pretrained(model)
    config._name_or_path = "model"
    assert is_pretrained(model)
