"""Messages between a stage and its neighbours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.formats import AS_THEY_ARE, FORMATS, BoundaryFormats, Format, Parcel, pack, unpack
from paceline.runtime.boundary import Boundary, OwnMemory
from paceline.runtime.stage_runner import Live


def test_gradients_that_share_memory_with_a_parameters_are_copied() -> None:
    """Autograd adds the next micro-batch's gradient into that memory, perhaps while this one's is being sent."""
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    own = OwnMemory([first, second])
    gradient = torch.full((3,), 2.0)
    first.grad = gradient
    copied, _ = own.of((gradient, torch.zeros(3)))
    assert copied.data_ptr() != gradient.data_ptr()
    assert torch.equal(copied, gradient)
    other = torch.zeros(3)
    assert own.of(other) is other
    second.grad = torch.zeros(3)
    assert own.of(gradient) is not gradient, "the second parameter had none yet when this was sent"
    assert own.of(gradient) is gradient, "from now on autograd adds to what is there"
    own.forget()
    assert own.of(gradient) is not gradient


class Lane:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.next: Parcel | None = None

    def post(self, number: int, key: Any, format: Format | None) -> None:
        self.calls.append(("post", number, key) if format is None else ("post", number, key, format))

    def send(self, number: int, key: Any, value: Any) -> None:
        self.calls.append(("send", number, value))

    def receive(self, number: int) -> Any:
        self.calls.append(("receive", number))
        return self.next or f"value {number}"


class Waits:
    def wait(self, take: Any, number: int, chunk: int = 0) -> Any:
        return take()


def boundary(
    *, runs_backward: bool = True, sends_gradients: bool = True, formats: BoundaryFormats = AS_THEY_ARE
) -> tuple[Boundary, dict[str, Lane], Any]:
    lanes = {name: Lane() for name in ("activations_in", "activations_out", "gradients_in", "gradients_out")}
    runner = SimpleNamespace(
        stage=1,
        runs_backward=runs_backward,
        sends_gradients=sends_gradients,
        activation_key=lambda number: f"key {number}",
        gradient_meta=lambda live: "meta",
        leaving=lambda live: live.outputs,
        leaving_gradients=lambda live: torch.ones(2),
        arrived=lambda live, number, value: setattr(live, "inputs", value),
    )
    return Boundary(runner, lanes, Waits(), None, formats=formats), lanes, runner  # type: ignore[arg-type]


@pytest.mark.parametrize("grad", [True, False])
def test_what_an_evaluation_sends_is_its_own(grad: bool) -> None:
    """A layer may give out the same memory again, and nothing of a forward is kept for a backward."""
    edge, lanes, _ = boundary()
    live = Live()
    live.inputs = live.outputs = torch.ones(2)
    with torch.set_grad_enabled(grad):
        edge.send_activation(live, 4)
    [(_, number, value)] = lanes["activations_out"].calls
    assert number == 4
    assert (value is live.outputs) is grad
    assert (live.inputs is None) is not grad
    assert edge.doing == ("sending to", 2)


def test_messages_arrive_where_they_belong() -> None:
    edge, lanes, _ = boundary()
    live = Live()
    edge.post_activation(live, 3)
    edge.wait_activation(live, 3)
    edge.post_gradient(live, 3)
    edge.wait_gradient(live, 3)
    assert (live.inputs, live.gradients) == ("value 3", "value 3")
    assert lanes["activations_in"].calls == [("post", 3, "key 3"), ("receive", 3)]
    assert lanes["gradients_in"].calls == [("post", 3, "meta"), ("receive", 3)]
    assert edge.doing == ("receiving from", 2)
    edge.send_gradient(live, 3)
    assert [call[:2] for call in lanes["gradients_out"].calls] == [("send", 3)]
    assert live.inputs is None


@pytest.mark.parametrize(("runs_backward", "received", "sent"), [(True, 2, 0), (False, 0, 0)])
def test_stages_that_no_backward_reaches_exchange_no_gradients(runs_backward: bool, received: int, sent: int) -> None:
    edge, lanes, _ = boundary(runs_backward=runs_backward, sends_gradients=False)
    live = Live()
    edge.post_gradient(live, 0)
    edge.wait_gradient(live, 0)
    edge.send_gradient(live, 0)
    assert (len(lanes["gradients_in"].calls), len(lanes["gradients_out"].calls)) == (received, sent)


INT8 = FORMATS["int8"]


def test_in_training_activations_and_gradients_travel_encoded() -> None:
    edge, lanes, runner = boundary(formats=BoundaryFormats(INT8, FORMATS["bf16"]))
    live, values = Live(), torch.tensor([[[1.0, -2.0, 127.0]]])
    edge.post_activation(live, 3)
    assert lanes["activations_in"].calls == [("post", 3, "key 3", INT8)]
    lanes["activations_in"].next = pack(values, INT8)
    edge.wait_activation(live, 3)
    assert live.inputs is None, "it is decoded as a part of the forward"
    edge.unpack_activation(live, 3)
    assert torch.equal(live.inputs, values)
    live.outputs = 2 * values
    edge.pack_activation(live)
    edge.send_activation(live, 3)
    [(_, _, sent)] = lanes["activations_out"].calls
    assert torch.equal(unpack(sent), 2 * values)
    edge.post_gradient(live, 3)
    assert lanes["gradients_in"].calls == [("post", 3, "meta", FORMATS["bf16"])]
    lanes["gradients_in"].next = pack(values, FORMATS["bf16"])
    edge.wait_gradient(live, 3)
    edge.unpack_gradient(live)
    assert torch.equal(live.gradients, values)
    runner.leaving_gradients = lambda live: -values
    edge.pack_gradient(live)
    edge.send_gradient(live, 3)
    [(_, _, back)] = lanes["gradients_out"].calls
    assert torch.equal(unpack(back), -values)
    assert (live.inputs, live.outgoing) == (None, None)


def test_an_evaluation_sends_its_activations_as_they_are() -> None:
    edge, lanes, _ = boundary(formats=BoundaryFormats(INT8, INT8))
    live = Live()
    live.outputs = torch.ones(1, 2, 3)
    with torch.no_grad():
        edge.post_activation(live, 0)
        edge.pack_activation(live)
        edge.send_activation(live, 0)
    assert lanes["activations_in"].calls == [("post", 0, "key 0")]
    assert isinstance(lanes["activations_out"].calls[0][2], torch.Tensor)


def test_a_stage_without_a_backward_keeps_nothing_of_what_it_has_sent() -> None:
    edge, _, _ = boundary(runs_backward=False, sends_gradients=False, formats=BoundaryFormats(INT8, INT8))
    live = Live()
    live.inputs = live.outputs = torch.ones(1, 2, 3)
    edge.pack_activation(live)
    edge.send_activation(live, 0)
    assert (live.inputs, live.outputs, live.outgoing) == (None, None, None)
