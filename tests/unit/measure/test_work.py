"""Work and speed, separated from times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.measure.work import Seen, separate

WORK = {"embedding": (1.0, 0.5), "dense": (2.0, 4.0), "sparse": (3.0, 8.0), "head": (5.0, 11.0)}
SIZES = {kind: forward + backward for kind, (forward, backward) in WORK.items()}


def stages(*kinds: str, speeds: Sequence[float], noise: float = 0.0, seed: int = 0) -> list[Seen]:
    """What is seen of stages with these kinds of layers, space between them."""
    draw = random.Random(seed)
    entries: list[Seen] = []
    for stage, (names, speed) in enumerate(zip(kinds, speeds, strict=True)):
        for kind in names.split():
            forward, backward = (t / speed * (1 + draw.uniform(-noise, noise)) for t in WORK[kind])
            entries.append(Seen(len(entries), stage, kind, forward, backward))
    return entries


def test_times_are_work_by_speed() -> None:
    seen = stages("embedding dense", "dense sparse", "sparse dense head", speeds=(2.0, 8.0, 0.5))
    found = separate(seen, {})
    assert found.speeds == pytest.approx((1.0, 4.0, 0.25))
    assert found.work == {entry.item: pytest.approx([t / 2 for t in WORK[entry.kind]]) for entry in seen}
    assert not found.guessed
    assert found.guessed == ()


def test_stages_are_compared_through_others() -> None:
    found = separate(stages("dense", "sparse head", "dense sparse", "head", speeds=(1, 2, 3, 4)), {})
    assert found.speeds == pytest.approx((1, 2, 3, 4))
    assert not found.guessed


speeds_of = st.lists(st.floats(0.05, 20), min_size=1, max_size=6)


@given(speeds_of, st.integers(0, 1000))
def test_noise_of_ten_percent_is_at_most_as_much_in_speeds(speeds: list[float], seed: int) -> None:
    layers = ["dense dense sparse dense"] * len(speeds)
    found = separate(stages(*layers, speeds=speeds, noise=0.1, seed=seed), {})
    # Over the same kinds a ratio of speeds is one of means: the worst is all low here and all high there.
    assert [a / b * speeds[0] for a, b in zip(found.speeds, speeds, strict=True)] == pytest.approx(
        [1.0] * len(speeds), rel=0.2 / 0.9 + 1e-9
    )


def test_noise_averages_out() -> None:
    speeds = (1.0, 4.0, 2.0, 1.0)
    errors = []
    for seed in range(20):
        found = separate(stages(*["dense sparse " * 4] * 4, speeds=speeds, noise=0.1, seed=seed), {})
        errors += [abs(a / b - 1) for a, b in zip(found.speeds[1:], speeds[1:], strict=True)]
    assert median(errors) < 0.025


@given(speeds_of, st.floats(0.01, 100))
def test_other_units_of_time_change_work_only(speeds: list[float], unit: float) -> None:
    seen = stages(*["dense head"] * len(speeds), speeds=speeds, noise=0.1)
    scaled = [e._replace(forward_s=e.forward_s * unit, backward_s=e.backward_s * unit) for e in seen]
    a, b = separate(seen, SIZES), separate(scaled, SIZES)
    assert a.speeds == pytest.approx(b.speeds)
    assert {item: [t * unit for t in times] for item, times in a.work.items()} == {
        item: pytest.approx(list(times)) for item, times in b.work.items()
    }


def test_equal_layers_have_equal_work_and_predict_their_times() -> None:
    speeds = (1.0, 3.0)
    seen = stages("dense dense dense", "dense sparse", speeds=speeds, noise=0.1)
    found = separate(seen, {})
    assert len({found.work[item] for item in range(4)}) == 1
    for entry in seen:
        assert found.work[entry.item][0] / found.speeds[entry.stage] == pytest.approx(entry.forward_s, rel=0.25)


def test_stages_with_nothing_in_common_are_compared_by_sizes() -> None:
    seen = stages("embedding dense dense", "sparse sparse", "sparse head", speeds=(1.0, 2.0, 4.0))
    found = separate(seen, SIZES)
    assert found.speeds == pytest.approx((1.0, 2.0, 4.0))
    assert found.work[3] == pytest.approx(WORK["sparse"])
    assert found.guessed == (1, 2)
    assert found.guessed
    # Half as large for the same time: half as fast.
    assert separate(seen, SIZES | {"sparse": SIZES["sparse"] / 2}).speeds == pytest.approx((1.0, 1.0, 2.0))


def test_without_sizes_devices_that_cannot_be_compared_are_taken_for_equally_fast() -> None:
    seen = stages("dense", "sparse", "sparse", speeds=(1.0, 9.0, 9.0))
    found = separate(seen, {"sparse": 0.0})
    assert found.speeds == pytest.approx((1.0, 1.0, 1.0))
    assert found.guessed == (1, 2)


def test_functions_are_no_work_and_tell_nothing() -> None:
    seen = [*stages("dense", "dense", speeds=(1.0, 2.0)), Seen(2, 1, "function", 0.0, 0.0), Seen(3, 2, "dense", 0, 0)]
    found = separate(seen, SIZES)
    assert found.work[2] == found.work[3] == (0.0, 0.0)
    assert found.speeds[:2] == pytest.approx((1.0, 2.0))
    assert found.guessed == (2,), "nothing is known of a stage that takes no time"


def test_a_layer_without_backward_is_another_kind() -> None:
    """Frozen layers at the beginning of a model would else make their stage look fast."""
    frozen = [Seen(0, 0, "dense", 2.0, 0.0), Seen(1, 0, "dense", 2.0, 0.0), Seen(2, 0, "dense", 2.0, 4.0)]
    found = separate([*frozen, Seen(3, 1, "dense", 1.0, 2.0)], {})
    assert found.speeds == pytest.approx((1.0, 2.0))
    assert found.work[0] == pytest.approx((2.0, 0.0))
    assert found.work[3] == pytest.approx((2.0, 4.0))


def test_replicas_of_an_item_are_all_taken_in() -> None:
    found = separate([Seen(0, 0, "dense", 1.0, 2.0), Seen(0, 0, "dense", 0.0, 0.0), Seen(0, 0, "dense", 3.0, 4.0)], {})
    assert found.work == {0: pytest.approx((2.0, 3.0))}


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative, measure this item again"):
        separate([Seen(0, 0, "dense", 1.0, seconds)], {})


def test_nothing_seen() -> None:
    with pytest.raises(ValueError, match="no layer was seen"):
        separate([], {})
