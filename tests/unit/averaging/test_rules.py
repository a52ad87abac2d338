"""The rules of averaging between islands."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.averaging.rules import (
    OuterNesterov,
    Report,
    is_no_round,
    island_weights,
    learning_rate_factor,
    parts_of,
    period_of,
    refusals,
)

REPORT = Report(0, 17, 0.0, 2.0, 1000, counts=True, round=3)


def reports(*changes: dict[str, object]) -> list[Report]:
    return [replace(REPORT, **{"island": island, **change}) for island, change in enumerate(changes)]  # type: ignore[arg-type]


NAN, INF = math.nan, math.inf
WEIGHTS = {
    "alone": ([{}], [1.0]),
    "alone and failed": ([{"loss": NAN}], [1.0]),
    "by the tokens that they trained on": ([{"trained": 1}, {"trained": 3}, {"tokens": 10**6}], [0.25, 0.75, 0.0]),
    "equal tokens": ([{"trained": 7}, {"trained": 7}, {"trained": 7}], [1 / 3, 1 / 3, 1 / 3]),
    "of those left out no token counts": ([{"trained": 4}, {"trained": 4, "loss": 3.0}, {"trained": 1}], [0.8, 0, 0.2]),
    "nobody has trained": ([{}, {"tokens": 10**6}], [0.5, 0.5]),
    "one has just come": ([{}, {"counts": False, "round": 0, "loss": 0.0}, {}], [0.5, 0.0, 0.5]),
    "one missed a round": ([{}, {"round": 2, "loss": 0.0}], [1.0, 0.0]),
    "failed ones": ([{"loss": NAN}, {}, {"loss": INF}, {"loss": -INF}], [0.0, 1.0, 0.0, 0.0]),
    "all failed": ([{"loss": NAN}, {"loss": INF}, {"counts": False}], [0.5, 0.5, 0.0]),
    "too far off": ([{"loss": 1.0}, {"loss": 1.5}, {"loss": 1.51}], [0.5, 0.5, 0.0]),
    "too far off one that has ended": ([{"loss": 1.0, "ends": True}, {"trained": 5}, {"trained": 5}], [0.0, 0.5, 0.5]),
    "all but one that has ended failed": ([{"ends": True}, {"trained": 5, "loss": NAN}], [1.0, 0.0]),
    "nobody counts": ([{"counts": False, "island": 4}, {"counts": False, "island": 2}], [0.0, 1.0]),
    "the first round": ([{"round": 0}, {"round": 0, "loss": 1.9}], [0.0, 1.0]),
    "the first round, even": ([{"round": 0, "island": 7}, {"round": 0}, {"round": 0, "loss": NAN}], [0.0, 1.0, 0.0]),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights(case: str) -> None:
    changes, expected = WEIGHTS[case]
    assert island_weights(reports(*changes), first_round="best", difference_threshold=0.5) == expected  # type: ignore[arg-type]


def test_first_round_may_be_a_mean() -> None:
    assert island_weights(reports({"round": 0}, {"round": 0, "loss": 1.9})) == [0.5, 0.5]


anyone = st.builds(
    Report,
    island=st.integers(0, 50),
    digest=st.just(1),
    checksum=st.floats(),
    loss=st.floats(),
    tokens=st.integers(0),
    counts=st.booleans(),
    round=st.integers(0, 2),
    trained=st.integers(0, 100),
)


@given(st.lists(anyone, min_size=1, max_size=8), st.sampled_from(["best", "mean"]), st.floats(1e-3, 10), st.randoms())
def test_weights_obey_the_law(all_of: list[Report], first: str, threshold: float, random: object) -> None:
    def weigh(some: list[Report]) -> list[float]:
        return island_weights(some, first_round=first, difference_threshold=threshold)  # type: ignore[arg-type]

    all_of = [replace(report, island=i) for i, report in enumerate(all_of)]
    weights = weigh(all_of)
    assert math.isclose(sum(weights), 1.0)
    shares = {w / r.trained if r.trained else 0.0 for w, r in zip(weights, all_of, strict=True) if w > 0}
    assert max(shares) == pytest.approx(min(shares)) or len({w for w in weights if w > 0}) == 1
    assert all(w == 0 for w, r in zip(weights, all_of, strict=True) if not r.counts) or not any(
        r.counts for r in all_of
    )
    order = list(range(len(all_of)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert weigh([all_of[i] for i in order]) == [weights[i] for i in order]


REFUSALS = {
    "nobody": ([{}, {"counts": False}], set()),
    "two with one number": ([{}, {"island": 0}, {"island": 2}], {0, 1}),
    "the second with a number": ([{}, {"island": 0, "counts": False, "round": 0}], {1}),
    "a zombie": ([{"round": 1}, {"island": 0, "round": 4}], {0}),
    "those of one number have no say": ([{"island": 1}, {}, {"digest": 3}], {0, 1}),
    "the newcomer's model": ([{}, {"counts": False, "round": 0, "digest": 3}], {1}),
    "a majority does not help": ([{"digest": 3, "counts": False}, {"digest": 3, "counts": False}, {}], {0, 1}),
    "nobody is further": ([{}, {"digest": 3}, {}], {0, 1, 2}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    changes, refused = REFUSALS[case]
    assert set(refusals(reports(*changes))) == refused  # type: ignore[arg-type]


def test_refusals_say_why() -> None:
    assert refusals(reports({}, {"digest": 3, "counts": False})) == {
        1: "islands 1 and 0 differ in the model or in how it is averaged (digests 0x0000000000000003 and "
        '0x0000000000000011); start all with the same model and the same "averaging" section, and have a lighthouse '
        "for each job."
    }
    assert refusals(reports({}, {"island": 0, "counts": False})) == {
        1: "2 islands have the number 0; give each its own, or wait until the one before has ended."
    }


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), ())]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_outer_sgd_is_that_of_torch(momentum: float) -> None:
    anchors = tensors(0)
    parameters = [torch.nn.Parameter(anchor.clone()) for anchor in anchors]
    theirs = torch.optim.SGD(parameters, lr=0.7, momentum=momentum, nesterov=momentum > 0)
    ours = OuterNesterov(0.7, momentum)
    for round in range(4):
        averages = [anchor + 0.1 * noise for anchor, noise in zip(anchors, tensors(10 + round), strict=True)]
        before = [anchor.clone() for anchor in anchors]
        stepped = ours.step(anchors, averages)
        assert all(map(torch.equal, anchors, before))
        for parameter, anchor, average in zip(parameters, anchors, averages, strict=True):
            parameter.grad = anchor - average
        theirs.step()
        assert all(map(torch.equal, stepped, parameters))
        anchors = stepped
        if round == 1:
            state, ours = ours.state_dict(), OuterNesterov(0.7, momentum)
            ours.load_state_dict(state)


def test_outer_sgd_by_parts_and_for_a_newcomer() -> None:
    anchors, averages = tensors(0), tensors(1)
    whole, by_parts, newcomer = (OuterNesterov(0.7, 0.9) for _ in range(3))
    for _ in range(2):
        expected = whole.step(anchors, averages)
        second = by_parts.step(anchors[1:], averages[1:], range(1, 3))
        first = by_parts.step(anchors[:1], averages[:1], [0])
        assert all(map(torch.equal, first + second, expected))
    assert all(map(torch.equal, newcomer.buffers(anchors), map(torch.zeros_like, anchors)))
    newcomer.load_buffers(whole.buffers(anchors))
    assert all(map(torch.equal, newcomer.step(anchors, averages), whole.step(anchors, averages)))


@pytest.mark.parametrize(("rate", "momentum"), [(0.0, 0.9), (math.nan, 0.9), (0.7, 1.0), (0.7, -0.1)])
def test_outer_sgd_refuses(rate: float, momentum: float) -> None:
    with pytest.raises(ValueError, match=f"outer learning rate {rate}, momentum {momentum}: give a rate above 0"):
        OuterNesterov(rate, momentum)


def test_nothing_new_is_no_round() -> None:
    assert is_no_round(reports({}, {}))
    assert not is_no_round(reports({}, {"trained": 1}))
    assert not is_no_round(reports({}, {"counts": False}))  # it takes the others'
    assert not is_no_round(reports({}, {"round": 2}))


def test_period_of_an_average() -> None:
    both = reports({"trained": 100, "period": 0.5}, {"trained": 300})
    assert period_of(both, island_weights(both)) == pytest.approx(0.25 * 0.5 + 0.75)
    assert period_of(both, [1.0, 0.0]) == 0.5
    assert period_of(reports({"trained": 9}, {"trained": 9}, {"trained": 9}), [1 / 3] * 3) == 1.0  # in every bit
    assert period_of(reports({}, {}), [0.5, 0.5]) == 0.0
    assert period_of(reports({"trained": 5}, {}), [0.0, 1.0]) == 0.0


def test_outer_sgd_of_a_short_period() -> None:
    """Half of a period moves half as far and keeps the momentum's root; none moves nothing."""
    anchors, averages = tensors(0), tensors(1)
    for period in (0.0, 0.25, 1.0):
        outer = OuterNesterov(0.7, 0.9)
        outer.load_buffers(tensors(2))
        gradients = [period * (anchor - average) for anchor, average in zip(anchors, averages, strict=True)]
        stepped = outer.step(anchors, [a - g for a, g in zip(anchors, gradients, strict=True)], period=period)
        for new, anchor, g, b in zip(stepped, anchors, gradients, tensors(2), strict=True):
            kept = 0.9**period * b
            torch.testing.assert_close(new, anchor - 0.7 * (1.9 * g + 0.9 * period * kept))
        for new, g, b in zip(outer.buffers(anchors), gradients, tensors(2), strict=True):
            torch.testing.assert_close(new, 0.9**period * b + g)


def test_learning_rate_factor() -> None:
    assert learning_rate_factor(10**9, None, 3, scale=False) == 1.0
    assert learning_rate_factor(0, 1000, 3, scale=True) == 3.0
    assert learning_rate_factor(500, 1000, 3, scale=False) == pytest.approx(0.1**0.5)
    assert learning_rate_factor(1000, 1000, 4, scale=True) == pytest.approx(0.4)
    assert learning_rate_factor(5000, 1000, 1, scale=True) == pytest.approx(0.1)


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(1, 9))
def test_parts_are_even(numels: list[int], parts: int) -> None:
    got = parts_of(numels, parts)
    assert [i for part in got for i in part] == list(range(len(numels)))
    assert len(got) == min(parts, len(numels))
    assert all(got)
    if numels and len(numels) >= 4 * parts:
        sizes = [sum(numels[i] for i in part) for part in got]
        assert max(sizes) <= sum(numels) / parts + 2 * max(numels)


def test_parts_of_a_few() -> None:
    assert parts_of([4, 4, 1, 7], 2) == [range(2), range(2, 4)]
    assert parts_of([100, 1, 1, 1], 3) == [range(1), range(1, 2), range(2, 4)]
    assert parts_of([], 3) == []
