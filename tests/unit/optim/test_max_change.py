"""Limits of layers by name, and the changes of a step: measured, made smaller, or taken back."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

from paceline.optim.corrections import Corrections
from paceline.optim.max_change import Changes, Limits, Part
from paceline.optim.sharded import ShardedOptimizer
from paceline.optim.step_options import StepOptions
from paceline.optim.step_outcome import MOST_SKIPPED

LIMITS = Limits(1.0, 2.0, 0.0, heads=frozenset({"head"}))


@pytest.mark.parametrize(
    ("name", "layer", "limit"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj", 1.0),
        ("model.layers.0.mlp.up_proj.bias", "model.layers.0.mlp.up_proj", 1.0),
        ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts", 1.0),
        ("head.weight", "head", 2.0),
        ("my.head.weight", "my.head", 1.0),
        ("weight", "", 1.0),
    ],
)
def test_the_layer_of_a_parameter(name: str, layer: str, limit: float) -> None:
    assert Limits.layer_of(name) == layer
    assert LIMITS.of(layer) == limit


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_limit_is_a_norm(wrong: float) -> None:
    with pytest.raises(ValueError, match=re.escape("each limit must be a finite norm of at least 0; write 0 for any")):
        Limits(layer=wrong)


def test_without_limits_nothing_is_measured() -> None:
    assert Limits(0, 0, 0).is_none
    assert Limits(0, 1.5, 0).is_none, "there is no head"
    assert not Limits(0, 1.5, 0, heads=frozenset({"head"})).is_none
    assert not Limits(0, 0, 1).is_none
    only_head = Limits(0, 1, 0, heads=frozenset({"head"}))
    assert (only_head.concerns("head"), only_head.concerns("body")) == (True, False)


def test_rows_count_once_and_all_are_made_smaller() -> None:
    limits = Limits(5.0, 0.0, 0.0, heads=frozenset({"head"}))
    weight, bias, scalar, head = torch.zeros(3, 2), torch.zeros(3), torch.zeros(()), torch.zeros(2)
    parts = [
        Part("body", weight, slice(1, 3)),
        Part("body", bias, None),
        Part("body", scalar, slice(0, 1)),
        Part("head", head, slice(None)),
    ]
    changes = Changes(limits, ["body", "elsewhere", "head"], parts)
    weight.fill_(4.0)
    bias.fill_(10.0)
    scalar.fill_(6.0)
    head.fill_(7.0)
    squares = changes.squares(torch.device("cpu"))
    assert squares.tolist() == [4 * 16 + 36, 0.0, 0.0]  # the head has no limit: it is not looked at
    outcome = changes.limit(squares)
    assert (outcome.norm, outcome.num_limited, outcome.is_smaller) == (5.0, 1, True)
    assert weight.eq(2).all()
    assert bias.eq(5).all()
    assert scalar == 3
    assert head.eq(7).all()


def test_a_change_that_is_not_finite_is_undone_everywhere() -> None:
    one, other = torch.ones(2), torch.ones(2)
    changes = Changes(Limits(), ["a", "b"], [Part("a", one, slice(None)), Part("b", other, slice(None))])
    one[1] = math.nan
    other += 0.01
    outcome = changes.limit(changes.squares(torch.device("cpu")))
    assert not outcome.is_finite
    assert one.tolist() == other.tolist() == [1.0, 1.0]


def test_a_change_within_its_limits_keeps_its_bits() -> None:
    """Here ``before + (after - before)`` is 0."""
    values = torch.ones(1)
    changes = Changes(Limits(2.0, 0.0, 0.0), ["a"], [Part("a", values, slice(None))])
    values.fill_(1e-9)
    outcome = changes.limit(changes.squares(torch.device("cpu")))
    assert (outcome.is_smaller, values.tolist()) == (False, torch.tensor([1e-9]).tolist())


# -- the pipelines' optimizer on one rank ------------------------------------------------------------------------


def model_and_names() -> tuple[nn.Module, dict[nn.Parameter, str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, {parameter: name for name, parameter in model.named_parameters()}


def optimizer_of(limits: Limits | None, lr: float = 10.0) -> tuple[nn.Module, ShardedOptimizer]:
    model, names = model_and_names()
    basic = torch.optim.SGD(model.parameters(), lr=lr)
    return model, ShardedOptimizer(basic, names, StepOptions(max_change=limits))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def test_the_optimizer_limits_what_it_steps() -> None:
    free, free_optimizer = optimizer_of(None)
    model, optimizer = optimizer_of(Limits(0.5, 4.0, 0.0, heads=frozenset({"1"})))
    before = [p.detach().clone() for p in model.parameters()]
    for module, owner in ((free, free_optimizer), (model, optimizer)):
        backward(module)
        owner.step()
    assert free_optimizer.max_change_report is None
    assert optimizer.max_change_report is not None
    assert optimizer.max_change_report == {"norm": pytest.approx(math.hypot(0.5, 4.0)), "num_limited": 2}

    def norm(pairs: list[tuple[Tensor, Tensor]]) -> float:
        return math.sqrt(sum(float((new - old).square().sum()) for new, old in pairs))

    changed = [(new.detach(), old) for new, old in zip(model.parameters(), before, strict=True)]
    assert (norm(changed[:2]), norm(changed[2:])) == (pytest.approx(0.5), pytest.approx(4.0))
    was = [(new.detach(), old) for new, old in zip(free.parameters(), before, strict=True)]
    for (new, old), (other, _), whole, limit in zip(
        changed, was, [norm(was[:2])] * 2 + [norm(was[2:])] * 2, [0.5, 0.5, 4, 4], strict=True
    ):
        torch.testing.assert_close(new - old, (other - old) * (limit / whole))


def test_a_change_that_is_not_finite_is_left_out_and_in_the_end_raises(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = optimizer_of(Limits(), lr=math.inf)
    before = [p.detach().clone() for p in model.parameters()]
    for number in range(1, MOST_SKIPPED):
        backward(model)
        optimizer.step()
        assert optimizer.overflow
        assert re.search(rf"change is not finite.*\({number} in a row\)", caplog.messages[-1])
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    backward(model)
    with pytest.raises(FloatingPointError, match=r"change is not finite.*for the 50th time in a row; lower the"):
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    backward(model)
    optimizer.step()
    assert not optimizer.overflow
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_no_report_of_a_step_whose_gradients_are_not_finite() -> None:
    model, optimizer = optimizer_of(Limits())
    backward(model)
    optimizer.step()
    assert optimizer.max_change_report is not None
    (model(torch.ones(2, 3)).sum() * math.inf).backward()
    optimizer.step()
    assert optimizer.max_change_report is None


def test_no_limits_cost_nothing() -> None:
    _, optimizer = optimizer_of(Limits(0, 0, 0))
    assert optimizer.max_change is None


@pytest.mark.parametrize("correction", [None, "error_feedback"])
def test_beside_the_computation_an_infinite_change_counts_for_nothing(correction: str | None) -> None:
    found = []
    for rates in ([0.5, 0.5, 0.5], [0.5, math.inf, 0.5, 0.5]):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        names = {parameter: f"first.{name}" for name, parameter in model.named_parameters()}
        options = StepOptions(max_change=Limits(0.1, 0.1, 0.0), corrections=Corrections(2, correction))
        optimizer = ShardedOptimizer(torch.optim.SGD(names, lr=0.5), names, options)
        assert optimizer.updates is not None
        skipped = []
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.updates.backward_complete(0)
            optimizer.updates.finish_step()
            optimizer.updates.apply()
            skipped.append(optimizer.overflow)
            assert optimizer.max_change_report is not None
            assert math.isfinite(optimizer.max_change_report["norm"]) is math.isfinite(rate)
        assert skipped == [math.isinf(rate) for rate in rates]
        found.append([parameter.detach().clone() for parameter in model.parameters()])
        optimizer.destroy()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("correction", ["nesterov", "error_feedback"])
def test_corrections_go_on_from_where_a_limited_change_has_come_to(correction: str) -> None:
    """Weights are c times the last change ahead of the sum of all changes, as without limits."""
    ahead = 1.0 if correction == "error_feedback" else 0.9
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    options = StepOptions(max_change=Limits(0.3, 0.3, 0.0), corrections=Corrections(correction=correction))
    optimizer = ShardedOptimizer(torch.optim.SGD([weight], lr=1.0), {weight: "first.weight"}, options)
    assert optimizer.updates is not None
    total, limited = torch.zeros(4, dtype=torch.float64), 0
    for step in range(8):
        gradient = torch.randn(4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        (weight * gradient * 10.0 ** -(step % 3)).sum().backward()
        optimizer.updates.backward_complete(0)
        optimizer.updates.finish_step()
        optimizer.updates.apply()
        assert optimizer.max_change_report is not None
        limited += int(optimizer.max_change_report["num_limited"])
        change = next(iter(optimizer.state.values()))["previous_change"]
        total += change
        torch.testing.assert_close(weight.detach(), total + ahead * change, rtol=0, atol=1e-12)
    assert 0 < limited < 8
    optimizer.destroy()
