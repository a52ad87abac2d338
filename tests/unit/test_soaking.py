"""What the soak decides without running anything: its episodes, and whether something grows."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soaking.checking import problems_of_saving
from benchmarks.soaking.episodes import (
    KINDS,
    LONG,
    LONG_AT,
    NUM_HOSTS,
    SAVES,
    draw,
    ds_config,
    is_flushed_by_saves,
    undisturbed,
)
from benchmarks.soaking.flatness import slope, trend
from paceline.config.resolve import resolve

MANY = 4 * len(KINDS) + 1


def test_episodes_are_the_same_every_time() -> None:
    first = [draw(5, number).to_dict() for number in range(MANY)]
    assert first == [draw(5, number).to_dict() for number in range(MANY)]
    assert first != [draw(6, number).to_dict() for number in range(MANY)]


def test_an_episode_does_not_depend_on_those_before_it() -> None:
    late = draw(5, 12)
    assert [draw(5, number) for number in (3, 12)][-1] == late


def test_every_kind_comes_equally_often_and_the_long_one_once() -> None:
    counts = Counter(draw(1, number).kind for number in range(MANY))
    assert counts == {**dict.fromkeys(KINDS, 4), LONG: 1}
    assert draw(1, LONG_AT).accidents == ()


def test_accidents_come_in_order_and_between_two_shapes_each() -> None:
    for number in range(MANY):
        episode = draw(2, number)
        assert len(episode.shapes) == len(episode.accidents) + 1
        steps = [accident.after_step for accident in episode.accidents if accident.after_step]
        assert steps == sorted(set(steps))
        assert episode.kind == LONG or max(steps, default=0) < 0.9 * episode.steps
        if is_flushed_by_saves(episode):
            assert not {accident.how for accident in episode.accidents} & SAVES


def _filled(config: dict[str, Any]) -> dict[str, Any]:
    filled = {key: value for key, value in config.items() if value != "auto"}
    numbers = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    params = filled["optimizer"]["params"]
    params.update({key: numbers[key] for key, value in params.items() if value == "auto"})
    return filled


@pytest.mark.parametrize("seed", range(3))
def test_every_shape_can_run(seed: int) -> None:
    """On the hosts that there are, and by the rules that the job itself applies."""
    for number in range(MANY):
        episode = draw(seed, number)
        layers = episode.model["num_hidden_layers"]
        for shape in (*episode.shapes, undisturbed(episode)):
            assert shape.num_ranks * episode.islands <= NUM_HOSTS
            micro_batches, rest = divmod(episode.samples, episode.batch * shape.replicas)
            assert rest == 0
            config = _filled(ds_config(episode, shape, "10.77.0.1:29510"))
            sizes = {"train_micro_batch_size_per_gpu": episode.batch, "gradient_accumulation_steps": micro_batches}
            resolved = resolve(
                {**config, **sizes},
                world_size=shape.num_ranks,
                num_layers=layers,
                num_items=layers + 2,
                state_bytes=None,
                device_bytes=None,
                cpu=True,
            )
            assert (resolved.stages, resolved.data_parallel) == (shape.stages, shape.replicas)
            assert resolved.micro_batches == micro_batches


def test_what_must_be_bitwise_has_a_reference_that_can_be() -> None:
    """One process for one replica without clipping; otherwise the same number of replicas throughout."""
    for seed in range(5):
        for number in range(MANY):
            episode = draw(seed, number)
            if episode.agreement != "bitwise":
                continue
            replicas = {shape.replicas for shape in episode.shapes}
            if episode.reference == "one":
                assert replicas == {1}
                assert episode.max_grad_norm == 0.0
            else:
                assert replicas == {undisturbed(episode).replicas}
                assert {shape.stages for shape in episode.shapes} == {undisturbed(episode).stages}
            if episode.model.get("attention_dropout"):
                same = replace(undisturbed(episode), schedule=episode.shapes[0].schedule)
                assert set(map(repr, episode.shapes)) == {repr(same)}


@pytest.mark.parametrize(
    ("how", "step", "saved", "took_s", "is_right"),
    [
        ("stop rank", 47, 47, 3.0, True),
        ("stop rank", 47, 48, 3.0, True),
        ("stop rank", 47, 40, 3.0, False),
        ("kill launcher", 47, 40, 3.0, False),
        ("stop launcher", 47, 20, 31.0, True),  # the launcher has killed them before they came to it
        ("stop launcher", 47, 0, 31.0, False),
        ("kill rank", 47, 40, 3.0, True),
        ("kill rank", 47, 20, 3.0, True),  # step 40 was being written
        ("kill rank", 47, 0, 3.0, False),
        ("full disk", 15, 0, 90.0, True),
        ("full disk", 47, 0, 90.0, False),
        ("stop rank", 0, 0, 3.0, True),
    ],
)
def test_what_an_accident_may_lose(how: str, step: int, saved: int, took_s: float, is_right: bool) -> None:
    assert (not list(problems_of_saving(how, step, saved, 20, took_s))) == is_right


def _samples(chance: random.Random, growth: float, level: float = 600e6, seconds: int = 300) -> list[float]:
    """Every half second: noise of 1 MB, and now and then 80 MB more for a moment."""
    count = 2 * seconds
    noise = [chance.gauss(0.0, 1e6) + 80e6 * (chance.random() < 0.1) for _ in range(count)]
    return [level + growth * number / count + extra for number, extra in enumerate(noise)]


@pytest.mark.parametrize(("growth_mb", "leaks"), [(0, False), (15, False), (-50, False), (60, True), (400, True)])
def test_memory_that_grows(growth_mb: float, leaks: bool) -> None:
    """Half of the growth is in the half that is looked at; more than 18 MB of 600 MB is too much."""
    for seed in range(5):
        values = _samples(random.Random(seed), growth_mb * 1e6)
        found = trend([number / 2 for number in range(len(values))], values)
        assert found.leaks_memory is leaks, found
        assert found.growth == pytest.approx(growth_mb / 2 * 1e6, abs=3e6)


def test_memory_that_grows_in_steps() -> None:
    """4 MB with each of 20 saves."""
    values = [600e6 + 4e6 * (number // 30) for number in range(600)]
    assert trend([number / 2 for number in range(600)], values).leaks_memory


def test_of_much_memory_30_mb_are_too_much() -> None:
    values = _samples(random.Random(0), 80e6, level=20e9)
    assert trend([float(number) for number in range(len(values))], values).leaks_memory


@pytest.mark.parametrize("at", [50, 120, 150, 170])
def test_what_is_filled_once_is_no_leak(at: int) -> None:
    values = [540e6 + 50e6 * (number >= at) for number in range(200)]
    found = trend([float(number) for number in range(200)], values)
    assert found.growth == 0
    assert not found.leaks_memory


def test_counts() -> None:
    times = [float(number) for number in range(200)]
    assert not trend(times, [80.0 + number % 3 for number in range(200)]).leaks
    assert trend(times, [80.0 + number // 20 for number in range(200)]).leaks


def test_too_short_to_tell() -> None:
    assert not trend([], []).is_judged
    assert not trend([0.0], [1.0]).is_judged
    assert not trend([float(number) for number in range(20)], [1.0] * 20).is_judged
    minute = [float(number) for number in range(60)]
    assert not trend(minute, [600e6 + 2e6 * number for number in range(60)]).leaks_memory


def test_slope_is_not_turned_by_outliers() -> None:
    assert slope([0, 1, 2, 3, 4, 5, 6], [0, 2, 4, -900, 8, 10, 900]) == pytest.approx(2.0)
    assert slope([3, 3], [1, 9]) == 0.0
