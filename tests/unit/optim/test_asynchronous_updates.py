"""Closed steps, their updates and the memory of both, on one rank."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.side_stream import SideStream
from paceline.measure.clock import Clock
from paceline.optim import task_queue
from paceline.optim.buckets import Domain, DomainBucket
from paceline.optim.corrections import Corrections
from paceline.optim.sharded import ShardedOptimizer
from paceline.optim.step_options import StepOptions
from support.ranks import PATIENCE_S
from support.streams import Streams

WIDTH = 4


@pytest.fixture(params=[True, False], ids=["thread", "inline"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def made() -> Iterator[list[ShardedOptimizer]]:
    optimizers: list[ShardedOptimizer] = []
    yield optimizers
    for optimizer in optimizers:
        if optimizer.updates is not None:
            optimizer.updates.stop()
    assert not any(thread.name == "paceline-updates" for thread in threading.enumerate())


class Watched(torch.optim.SGD):
    """Says when it steps."""

    on_step: Callable[[], Any] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        self.on_step()
        return super().step(closure)


def make(made: list[ShardedOptimizer], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Two layers, a section each, and their optimizer."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(dtype)
    names = {parameter: name for name, parameter in module.named_parameters()}
    sections = {parameter: 0 if name.startswith("0") else 1 for parameter, name in names.items()}
    step_options = StepOptions(
        domain=lambda parameter: Domain(section=sections[parameter]), corrections=Corrections(), **options
    )
    optimizer = ShardedOptimizer(Watched(names, lr=0.5), names, step_options)
    made.append(optimizer)
    return module, optimizer


def data(seed: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def finish(optimizer: ShardedOptimizer) -> None:
    optimizer.updates.backward_complete(1)
    optimizer.updates.backward_complete(0)
    optimizer.updates.finish_step()


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
    optimizer.updates.apply()
    assert [parameter._version for parameter in module.parameters()] == versions
    loss.backward()
    new = module[2].weight.detach()
    assert not torch.equal(new, old)
    ones = torch.ones(len(x), WIDTH, dtype=dtype)

    def wanted(weight: Tensor) -> Tensor:
        return ((ones @ weight) * (1 - hidden.detach() ** 2)).t() @ x

    gradient = optimizer.gradients.of(module[0].weight).to(dtype)
    torch.testing.assert_close(gradient, wanted(new), rtol=1e-2, atol=1e-2)
    assert not torch.allclose(gradient, wanted(old), rtol=1e-2, atol=1e-2)


def test_memory_is_taken_when_a_gradient_comes_and_used_again(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    one_set = optimizer.gradients.num_bytes()
    for step in range(3):  # no backward between the last one and the update, as with several directions
        module(data(step)).sum().backward()
        finish(optimizer)
        optimizer.updates.apply()
    assert optimizer.gradients.num_bytes() == one_set
    for step in range(6):
        module(data(step)).sum().backward()
        finish(optimizer)
        if step > 1:
            optimizer.updates.apply()
    assert len(optimizer.updates.pending) == 2
    assert optimizer.gradients.num_bytes() == 3 * one_set


def test_only_the_section_that_goes_on_takes_memory(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    one_set = optimizer.gradients.num_bytes()
    hidden = torch.tanh(module[0](data()))
    cut = hidden.detach().requires_grad_()
    module[2](cut).sum().backward()
    optimizer.updates.backward_complete(1)
    module[2](cut).sum().backward()
    hidden.sum().backward()
    optimizer.updates.backward_complete(0)
    optimizer.updates.finish_step()
    optimizer.updates.apply()
    assert one_set < optimizer.gradients.num_bytes() < 2 * one_set


def test_masters_are_apart_from_the_model(made, overlap) -> None:
    """The next update is made while the model still has the values of before."""
    module, optimizer = make(made, overlap=overlap)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    for _ in range(2):
        module(data()).sum().backward()
        finish(optimizer)
    if overlap:
        for update in optimizer.updates.pending:
            assert update.task.is_done.wait(PATIENCE_S)
        assert not any(torch.equal(owned.master, owned.parameter) for owned in optimizer.owned)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    gradients = torch.autograd.grad(module(data()).sum(), list(module.parameters()))
    for _ in range(2):
        optimizer.updates.apply()
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
        optimizer.updates.apply()
    torch.testing.assert_close(module[2].bias.detach(), before - 0.5 * 3)
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_what_is_left_out_changes_nothing(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    (module(data()).sum() * float("nan")).backward()
    finish(optimizer)
    module(data()).sum().backward()
    finish(optimizer)
    optimizer.updates.apply()
    assert optimizer.overflow
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    optimizer.updates.apply()
    assert not optimizer.overflow
    assert not any(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_what_no_backward_has_reached_is_left_alone(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    optimizer.optimizer.param_groups[0]["weight_decay"] = 0.1
    before = module[0].weight.detach().clone()
    module[2](data()).sum().backward()
    finish(optimizer)
    optimizer.updates.apply()
    assert torch.equal(module[0].weight, before)
    finish(optimizer)  # nothing at all
    optimizer.updates.apply()
    assert optimizer.outcome.grad_norm == 0


def test_zero_grad_forgets_what_is_not_closed(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    gradients = torch.autograd.grad(module(data()).sum(), list(module.parameters()))
    module(data()).sum().backward()
    finish(optimizer)
    module(data(1)).sum().backward()
    optimizer.zero_grad()
    optimizer.updates.apply()
    for value, old, gradient in zip(module.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(value.detach(), old - 0.5 * gradient)
    assert all(optimizer.gradients.of(parameter).count_nonzero() == 0 for parameter in module.parameters())


def test_an_optimizer_that_keeps_state_in_its_options_is_refused(made, overlap) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            return super().step(closure)

    parameter = nn.Parameter(torch.ones(3))
    options = StepOptions(overlap=overlap, corrections=Corrections())
    optimizer = ShardedOptimizer(Counting([parameter], lr=0.1), {parameter: "p"}, options)
    made.append(optimizer)
    parameter.sum().backward()
    optimizer.updates.backward_complete(0)
    optimizer.updates.finish_step()
    with pytest.raises(ValueError, match="Counting changes its option 'k' in a step"):
        optimizer.updates.apply()
    with pytest.raises(ValueError, match="Counting changes its option"):
        optimizer.updates.backward_complete(0)


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

    def late() -> None:
        assert not overlap or clock.is_asked.wait(PATIENCE_S)
        time.sleep(0.02)

    optimizer.optimizer.on_step = late
    module(data()).sum().backward()
    finish(optimizer)
    optimizer.updates.apply()
    spent = clock.read()
    assert spent["compute_s"] > 0
    # Without a thread the update is this thread's own work. Idle is then at most what a reduction took longer than the
    # one before.
    assert spent["idle_s" if overlap else "compute_s"] >= 0.02


def test_updates_have_a_stream_beside_the_computation(made, monkeypatch) -> None:
    streams, may_run, before = Streams(), threading.Event(), dict[str, set[str]]()
    monkeypatch.setattr(task_queue, "SideStream", lambda device: SideStream(torch.device("cuda"), streams))
    module, optimizer = make(made, overlap=True)
    numbers = itertools.count()

    def reduce(*args: Any) -> list[Any]:
        assert may_run.wait(PATIENCE_S)
        before["reduce"] = streams.issue("reduce")
        return []

    def stepping() -> None:
        name = f"update {next(numbers)}"
        before[name] = streams.issue(name)

    monkeypatch.setattr(DomainBucket, "start_reduction", reduce)
    optimizer.optimizer.on_step = stepping
    for step in range(2):
        streams.issue(f"backward {step}")
        module(data(step)).sum().backward()
        finish(optimizer)
    before["backward 2"] = streams.issue("backward 2")
    may_run.set()
    optimizer.updates.apply()
    before["values 0"] = streams.issue("values 0")
    optimizer.updates.apply()
    before["values 1"] = streams.issue("values 1")
    assert before["update 0"] == {"backward 0", "reduce"}, "it waits for its gradients, and for nothing else"
    assert before["update 1"] == {"backward 0", "backward 1", "reduce", "update 0"}
    assert not before["backward 2"] & {"reduce", "update 0", "update 1"}, "it waits for no update"
    assert "update 0" in before["values 0"]
    assert "update 1" in before["values 1"]


def test_memory_is_given_back_after_updates_that_nobody_applies(made, monkeypatch) -> None:
    streams = Streams()
    monkeypatch.setattr(task_queue, "SideStream", lambda device: SideStream(torch.device("cuda"), streams))
    module, optimizer = make(made, overlap=True)
    optimizer.optimizer.on_step = lambda: streams.issue("update")
    module(data()).sum().backward()
    finish(optimizer)
    optimizer.updates.pending[0].task.is_done.wait(PATIENCE_S)
    optimizer.destroy()
    assert "update" in streams.issue("free")


def test_a_rank_without_parameters_takes_part(overlap) -> None:
    options = StepOptions(overlap=overlap, corrections=Corrections())
    optimizer = ShardedOptimizer(torch.optim.SGD([{"params": []}], lr=0.1), {}, options)
    assert optimizer.updates is not None
    for _ in range(2):
        optimizer.updates.backward_complete(0)
        optimizer.updates.finish_step()
    assert len(optimizer.updates.pending) == 2
    optimizer.updates.apply()
    assert optimizer.outcome.grad_norm == 0
    optimizer.destroy()


def test_order_of_calls(made, overlap) -> None:
    module, optimizer = make(made, overlap=overlap)
    with pytest.raises(AssertionError, match="without an update"):
        optimizer.updates.apply()
    module(data()).sum().backward()
    optimizer.updates.backward_complete(0)
    with pytest.raises(AssertionError, match="section 0 is complete twice"):
        optimizer.updates.backward_complete(0)
    with pytest.raises(AssertionError, match=r"sections \[1\] are not complete"):
        optimizer.updates.finish_step()
    with pytest.raises(AssertionError, match=r"sections \[0\] are complete"):
        optimizer.publish()
    optimizer.updates.backward_complete(1)
    optimizer.updates.finish_step()
    with pytest.raises(AssertionError, match="1 updates are pending"):
        optimizer.state_dict()
    with pytest.raises(AssertionError, match="1 updates are pending"):
        optimizer.rebuild([], {})
    optimizer.updates.apply()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(NotImplementedError, match="finish_step"):
        optimizer.step()


def test_other_parameters_train_on_with_their_masters(made, overlap) -> None:
    """Between steps a layer leaves: the other one goes on as if it had been alone, in bf16 with the master it had."""
    module, optimizer = make(made, torch.bfloat16, overlap=overlap)
    module(data().bfloat16()).square().sum().backward()
    finish(optimizer)
    optimizer.updates.apply()
    masters = {owned.name: owned.master for owned in optimizer.owned}
    assert not torch.equal(masters["0.weight"], module[0].weight.float()), "rounded"
    names = {parameter: f"0.{name}" for name, parameter in module[0].named_parameters()}
    optimizer.rebuild([list(names)], names)
    assert {owned.name: owned.master is masters[owned.name] for owned in optimizer.owned} == {
        "0.weight": True,
        "0.bias": True,
    }
    before = masters["0.weight"].detach().clone()
    for _ in range(2):
        module[0](data().bfloat16()).sum().backward()
        optimizer.updates.backward_complete(0)
        optimizer.updates.finish_step()
        optimizer.updates.apply()
    ones = torch.ones(3, WIDTH).t() @ data().bfloat16().float()
    torch.testing.assert_close(masters["0.weight"].detach(), before - 2 * 0.5 * ones.bfloat16().float())
    assert torch.equal(module[0].weight, masters["0.weight"].bfloat16())


def test_what_is_left_of_it(made, overlap) -> None:
    """The parameters have memory of their own again, and can be trained."""
    module, optimizer = make(made, overlap=overlap)
    module(data()).sum().backward()
    finish(optimizer)
    optimizer.updates.apply()
    values = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer.destroy()
    assert all(torch.equal(a, b) for a, b in zip(values, module.parameters(), strict=True))
    assert {p.untyped_storage().nbytes() for p in module.parameters()} == {4 * WIDTH, 4 * WIDTH * WIDTH}
    module(data()).sum().backward()


def test_dtypes_that_do_not_go_together() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    names = {parameter: str(number) for number, parameter in enumerate(parameters)}
    with pytest.raises(ValueError, match="cannot be updated beside the computation: cast the model"):
        ShardedOptimizer(torch.optim.SGD(parameters, lr=0.1), names, StepOptions(corrections=Corrections()))
