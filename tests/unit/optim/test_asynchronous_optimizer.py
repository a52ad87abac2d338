"""Closed steps, their updates and the memory of both, on one rank."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.side_stream import SideStream
from paceline.measure.clock import Clock
from paceline.optim import asynchronous_optimizer as asynchronous
from paceline.optim.asynchronous_optimizer import AsynchronousOptimizer
from paceline.optim.buckets import Domain
from streams import Streams

WIDTH = 4


@pytest.fixture(params=[True, False], ids=["thread", "inline"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def made() -> Iterator[list[AsynchronousOptimizer]]:
    optimizers: list[AsynchronousOptimizer] = []
    yield optimizers
    for optimizer in optimizers:
        optimizer.stop()
    assert not any(thread.name == "paceline-updates" for thread in threading.enumerate())


def make(made: list[AsynchronousOptimizer], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Two layers, a section each, and their optimizer."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(dtype)
    names = {parameter: name for name, parameter in module.named_parameters()}
    sections = {parameter: 0 if name.startswith("0") else 1 for parameter, name in names.items()}
    basic = torch.optim.SGD(names, lr=0.5)
    optimizer = AsynchronousOptimizer(
        basic, names, domain=lambda parameter: Domain(section=sections[parameter]), **options
    )
    made.append(optimizer)
    return module, optimizer


def data(seed: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def finish(optimizer: AsynchronousOptimizer) -> None:
    optimizer.close(1)
    optimizer.close(0)
    optimizer.finish_step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_that_is_under_way_goes_on_with_the_new_values(made, overlap, dtype) -> None:
    module, optimizer = make(made, dtype, overlap=overlap)
    x = data().to(dtype)
    module(x).square().sum().backward()
    finish(optimizer)
    old = module[2].weight.detach().clone()
    hidden = torch.tanh(module[0](x))
    loss = module[2](hidden).sum()
    versions = [parameter._version for parameter in module.parameters()]
    optimizer.apply()
    assert [parameter._version for parameter in module.parameters()] == versions
    loss.backward()
    new = module[2].weight.detach()
    assert not torch.equal(new, old)
    ones = torch.ones(len(x), WIDTH, dtype=dtype)

    def wanted(weight: Tensor) -> Tensor:
        return ((ones @ weight) * (1 - hidden.detach() ** 2)).t() @ x

    gradient = optimizer.gradient(module[0].weight).to(dtype)
    torch.testing.assert_close(gradient, wanted(new), rtol=1e-2, atol=1e-2)
    assert not torch.allclose(gradient, wanted(old), rtol=1e-2, atol=1e-2)


def test_memory_is_taken_when_a_gradient_comes_and_used_again(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    one_set = optimizer.gradient_bytes()
    for step in range(3):  # no backward between the last one and the update, as with several directions
        module(data(step)).sum().backward()
        finish(optimizer)
        optimizer.apply()
    assert optimizer.gradient_bytes() == one_set
    for step in range(6):
        module(data(step)).sum().backward()
        finish(optimizer)
        if step > 1:
            optimizer.apply()
    assert optimizer.num_pending == 2
    assert optimizer.gradient_bytes() == 3 * one_set


def test_only_the_section_that_goes_on_takes_memory(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    one_set = optimizer.gradient_bytes()
    hidden = torch.tanh(module[0](data()))
    cut = hidden.detach().requires_grad_()
    module[2](cut).sum().backward()
    optimizer.close(1)
    module[2](cut).sum().backward()
    hidden.sum().backward()
    optimizer.close(0)
    optimizer.finish_step()
    optimizer.apply()
    assert one_set < optimizer.gradient_bytes() < 2 * one_set


def test_masters_are_apart_from_the_model(made, overlap) -> None:
    """The next update is made while the model still has the values of before."""
    module, optimizer = make(made, overlap=overlap)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    for _ in range(2):
        module(data()).sum().backward()
        finish(optimizer)
    if overlap:
        for update in optimizer._pending:
            assert update.task.is_done.wait(10)
        assert not any(torch.equal(owned.master, owned.parameter) for owned in optimizer.owned)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    gradients = torch.autograd.grad(module(data()).sum(), list(module.parameters()))
    for _ in range(2):
        optimizer.apply()
    for value, old, gradient in zip(module.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(value.detach(), old - 2 * 0.5 * gradient)


def test_an_update_has_the_learning_rate_of_its_step(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.0 if step else 1.0)
        before = module[2].bias.detach().clone()
        module(data()).sum().backward()
        finish(optimizer)
        scheduler.step()  # before the update is applied, or even made
        optimizer.apply()
    torch.testing.assert_close(module[2].bias.detach(), before - 0.5 * 3)
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_what_is_left_out_changes_nothing(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    (module(data()).sum() * float("nan")).backward()
    finish(optimizer)
    module(data()).sum().backward()
    finish(optimizer)
    optimizer.apply()
    assert optimizer.overflow
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    optimizer.apply()
    assert not optimizer.overflow
    assert not any(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_what_no_backward_has_reached_is_left_alone(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    optimizer.optimizer.param_groups[0]["weight_decay"] = 0.1
    before = module[0].weight.detach().clone()
    module[2](data()).sum().backward()
    finish(optimizer)
    optimizer.apply()
    assert torch.equal(module[0].weight, before)
    finish(optimizer)  # nothing at all
    optimizer.apply()
    assert optimizer._global_grad_norm == 0


def test_zero_grad_forgets_what_is_not_closed(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    gradients = torch.autograd.grad(module(data()).sum(), list(module.parameters()))
    module(data()).sum().backward()
    finish(optimizer)
    module(data(1)).sum().backward()
    optimizer.zero_grad()
    optimizer.apply()
    for value, old, gradient in zip(module.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(value.detach(), old - 0.5 * gradient)
    assert all(optimizer.gradient(parameter).count_nonzero() == 0 for parameter in module.parameters())


def test_an_optimizer_that_keeps_state_in_its_options_is_refused(made, overlap) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            return super().step(closure)

    parameter = nn.Parameter(torch.ones(3))
    optimizer = AsynchronousOptimizer(Counting([parameter], lr=0.1), {parameter: "p"}, overlap=overlap)
    made.append(optimizer)
    parameter.sum().backward()
    optimizer.close(0)
    optimizer.finish_step()
    with pytest.raises(ValueError, match="Counting changes its option 'k' in a step"):
        optimizer.apply()
    with pytest.raises(ValueError, match="Counting changes its option"):
        optimizer.close(0)


def test_a_loss_scale_that_changes_needs_updates_in_time(made, overlap) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0, 1000, 1.0, 1, False)  # init_scale, scale_window, min_scale, ...
    module, optimizer = make(made, overlap=overlap, loss_scaler=scaler)
    module(data()).sum().backward()
    finish(optimizer)
    with pytest.raises(ValueError, match=r"set fp16\.loss_scale"):
        module(data()).sum().backward()


class ToldClock(Clock):
    """Tells when somebody begins to measure."""

    is_asked = threading.Event()

    def now(self) -> Any:
        moment = super().now()
        self.is_asked.set()
        return moment


def test_waiting_is_idle_time(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    clock = optimizer.clock = ToldClock(torch.device("cpu"))
    clock.is_asked.clear()
    make_update = optimizer._make

    def late(update: Any) -> None:
        assert not overlap or clock.is_asked.wait(10)
        time.sleep(0.02)
        make_update(update)

    optimizer._make = late
    module(data()).sum().backward()
    finish(optimizer)
    optimizer.apply()
    spent = clock.read()
    assert spent["compute_s"] > 0
    assert spent["idle_s"] >= 0.02 if overlap else spent["idle_s"] == 0


def test_updates_have_a_stream_beside_the_computation(made, monkeypatch) -> None:
    streams, may_run, before = Streams(), threading.Event(), dict[str, set[str]]()
    monkeypatch.setattr(asynchronous, "SideStream", lambda device: SideStream(torch.device("cuda"), streams))
    module, optimizer = make(made, overlap=True)
    make_update, reduce_closed, survey = optimizer._make, optimizer._reduce_closed, itertools.count()

    def reduce(*args: Any) -> None:
        assert may_run.wait(60)
        before["reduce"] = streams.issue("reduce")
        reduce_closed(*args)

    def making(update: Any) -> None:
        name = f"update {next(survey)}"
        before[name] = streams.issue(name)
        make_update(update)

    optimizer._make, optimizer._reduce_closed = making, reduce
    for step in range(2):
        streams.issue(f"backward {step}")
        module(data(step)).sum().backward()
        finish(optimizer)
    before["backward 2"] = streams.issue("backward 2")
    may_run.set()
    optimizer.apply()
    before["values 0"] = streams.issue("values 0")
    optimizer.apply()
    before["values 1"] = streams.issue("values 1")
    assert before["update 0"] == {"backward 0", "reduce"}, "it waits for its gradients, and for nothing else"
    assert before["update 1"] == {"backward 0", "backward 1", "reduce", "update 0"}
    assert not before["backward 2"] & {"reduce", "update 0", "update 1"}, "it waits for no update"
    assert "update 0" in before["values 0"]
    assert "update 1" in before["values 1"]


def test_memory_is_given_back_after_updates_that_nobody_applies(made, monkeypatch) -> None:
    streams = Streams()
    monkeypatch.setattr(asynchronous, "SideStream", lambda device: SideStream(torch.device("cuda"), streams))
    module, optimizer = make(made, overlap=True)
    make_update = optimizer._make
    optimizer._make = lambda update: (streams.issue("update"), make_update(update))
    module(data()).sum().backward()
    finish(optimizer)
    optimizer._pending[0].task.is_done.wait(60)
    optimizer.destroy()
    assert "update" in streams.issue("free")


def test_a_rank_without_parameters_takes_part(overlap) -> None:
    optimizer = AsynchronousOptimizer(torch.optim.SGD([{"params": []}], lr=0.1), {}, overlap=overlap)
    for _ in range(2):
        optimizer.close(0)
        optimizer.finish_step()
    assert optimizer.num_pending == 2
    optimizer.apply()
    assert optimizer._global_grad_norm == 0
    optimizer.stop()


def test_order_of_calls(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    with pytest.raises(AssertionError, match="without an update"):
        optimizer.apply()
    module(data()).sum().backward()
    optimizer.close(0)
    with pytest.raises(AssertionError, match="section 0 closed twice"):
        optimizer.close(0)
    with pytest.raises(AssertionError, match=r"sections \[1\] are not closed"):
        optimizer.finish_step()
    with pytest.raises(AssertionError, match=r"sections \[0\] are closed"):
        optimizer.publish()
    optimizer.close(1)
    optimizer.finish_step()
    with pytest.raises(AssertionError, match="1 updates are pending"):
        optimizer.state_dict()
    optimizer.apply()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="cannot change"):
        optimizer.rebuild([], {})


def test_what_is_left_of_it(made, overlap) -> None:
    """The parameters have memory of their own again, and can be trained."""
    module, optimizer = make(made, overlap=overlap)
    module(data()).sum().backward()
    finish(optimizer)
    optimizer.apply()
    values = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer.destroy()
    assert all(torch.equal(a, b) for a, b in zip(values, module.parameters(), strict=True))
    assert {p.untyped_storage().nbytes() for p in module.parameters()} == {4 * WIDTH, 4 * WIDTH * WIDTH}
    module(data()).sum().backward()


def test_dtypes_that_do_not_go_together() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    names = {parameter: str(number) for number, parameter in enumerate(parameters)}
    with pytest.raises(ValueError, match="cannot be updated beside the computation: cast the model"):
        AsynchronousOptimizer(torch.optim.SGD(parameters, lr=0.1), names)
