"""The one rule: break-even, memory of what was lost, and never more than twice the price of knowing the future."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.planning import SwitchRule


def test_pays_within_the_horizon():
    decision = SwitchRule(10).consider(2.0, 1.5, 4.9, steps=10)
    assert decision.switch
    assert (decision.now_s, decision.best_s, decision.switch_s) == (2.0, 1.5, 4.9)
    assert (decision.gain_s, decision.suffered_s) == (5.0, 0.0)
    assert decision.why == "saves 5 s in 10 steps, more than the 4.9 s of switching"


def test_break_even_is_no_reason():
    decision = SwitchRule(10).consider(2.0, 1.5, 5.0, steps=10)
    assert not decision.switch
    assert decision.why == "saves 5 s in 10 steps, no more than the 5 s of switching"


def test_what_was_lost_is_remembered():
    rule = SwitchRule(10)
    looks = [rule.consider(2.0, 1.5, 12.0, steps=10) for _ in range(3)]
    # Nothing was lost before the better option appeared.
    assert [look.suffered_s for look in looks] == [0.0, 5.0, 10.0]
    assert [look.switch for look in looks] == [False, False, True]
    assert looks[-1].why == "saves 5 s in 10 steps; 10 s lost so far, more than the 12 s of switching"


def test_counts_the_steps_that_were_done():
    rule = SwitchRule(10)
    rule.consider(2.0, 1.5, 100.0, steps=10)
    assert rule.consider(2.0, 1.5, 100.0, steps=3).suffered_s == 1.5
    assert rule.consider(2.0, 1.0, 100.0, steps=4).suffered_s == 5.5


def test_forgets_when_what_runs_is_the_best_again():
    rule = SwitchRule(10)
    rule.consider(2.0, 1.5, 12.0, steps=10)
    assert rule.consider(2.0, 1.5, 12.0, steps=10).suffered_s == 5.0
    assert rule.consider(2.0, 2.0, 12.0, steps=10).suffered_s == 0.0
    # ... and the period that ends with the next look is not counted either.
    assert rule.consider(2.0, 1.5, 12.0, steps=10).suffered_s == 0.0


def test_forgets_after_a_switch():
    rule = SwitchRule(10)
    for expected in (False, False, True, False, False, True):
        assert rule.consider(2.0, 1.5, 12.0, steps=10).switch is expected


def test_asking_is_not_deciding():
    rule = SwitchRule(10)
    for _ in range(2):
        asked = [rule.could_pay(0.5, 12.0, steps=10) for _ in range(5)]
        decided = rule.consider(2.0, 1.5, 12.0, steps=10)
        assert asked == [decided.switch] * 5 == [False] * 5
    assert rule.could_pay(0.5, 12.0, steps=10)
    assert not rule.could_pay(0.0, 0.0, steps=10)
    assert rule.consider(2.0, 1.5, 12.0, steps=10).switch


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 1000))
def test_equal_times_never_switch(now, more, steps):
    rule = SwitchRule(7)
    for best in (now, now, now + more):
        decision = rule.consider(now, best, 0.0, steps)
        assert (decision.switch, decision.gain_s, decision.suffered_s) == (False, 0.0, 0.0)
        assert decision.why == "what runs is the best"


def test_a_free_switch_takes_any_gain():
    assert SwitchRule(1).consider(1.0 + 1e-9, 1.0, 0.0, steps=1).switch


@given(
    gain=st.floats(1e-3, 10),
    price=st.floats(0, 1e3),
    horizon=st.integers(1, 50),
    looks=st.integers(1, 200),
    data=st.data(),
)
def test_never_more_than_twice_the_optimum(gain, price, horizon, looks, data):
    """A better option that stays for one horizon after the last look, whatever the number of looks before."""
    every = data.draw(st.integers(1, horizon))
    rule = SwitchRule(horizon)
    paid, steps = 0.0, 0
    for _ in range(looks):
        if rule.consider(1.0 + gain, 1.0, price, every).switch:
            paid += price
            break
        paid += gain * every
        steps += every
    else:  # the last period is as long as a horizon
        paid += gain * (horizon - every)
        steps -= every
    optimum = min(gain * (steps + horizon), price)
    assert paid <= 2 * optimum * (1 + 1e-6) + 1e-6


@given(st.floats(1e-3, 10), st.floats(0, 1e3), st.integers(1, 50))
def test_what_stays_better_is_taken_in_the_end(gain, price, horizon):
    assume(price / (gain * horizon) < 1000)
    rule = SwitchRule(horizon)
    enough = int(price / (gain * horizon)) + 2
    assert any(rule.consider(1.0 + gain, 1.0, price, horizon).switch for _ in range(enough))


@pytest.mark.parametrize("name", ["now_s", "best_s", "switch_s", "steps"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1])
def test_refuses_what_is_no_measurement(name, value):
    rule = SwitchRule(10)
    rule.consider(2.0, 1.5, 12.0, steps=10)
    message = f"{name} is {value}: it must be a number from 0 upwards; measure it again."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rule.consider(**{"now_s": 2.0, "best_s": 1.5, "switch_s": 12.0, "steps": 10, name: value})
    assert rule.consider(2.0, 1.5, 12.0, steps=10).suffered_s == 5.0


def test_refuses_no_horizon():
    with pytest.raises(ValueError, match=r"^horizon_steps is 0: it must be at least 1"):
        SwitchRule(0)
