"""Messages between a stage that a rank holds and its neighbours: receives that are posted, waits, sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import nn

from ..comm.formats import AS_THEY_ARE, BoundaryFormats, Format, Parcel, pack, unpack
from ..comm.shapes import Value, meta_of, tensors_of
from ..comm.transport import Lane
from .rounding_errors import RoundingErrors
from .stage_runner import Live, StageRunner

Received = TypeVar("Received")


class Waits(Protocol):
    """Who books the time in which a rank has nothing to do."""

    def wait(self, take: Callable[[], Received], number: int, chunk: int = 0) -> Received: ...


class OwnMemory:
    """Gradients in memory to which nobody writes while they are sent.

    Autograd may let a parameter's first gradient share the memory of an input's, and adds the next one to it. Once all
    parameters have gradients that no longer happens.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._all_have_gradients = False
        self.belong_to(parameters)

    def belong_to(self, parameters: Iterable[nn.Parameter]) -> None:
        """Name the parameters that this rank trains."""
        self._parameters = list(parameters)

    def forget(self) -> None:
        """Gradients are being collected anew."""
        self._all_have_gradients = False

    def of(self, value: Value) -> Value:
        """``value``, copied where it shares memory with a parameter's gradient."""
        if self._all_have_gradients:
            return value
        own, self._all_have_gradients = set(), True
        for parameter in self._parameters:
            if parameter.grad is None:
                self._all_have_gradients = False
            else:
                own.add(parameter.grad.untyped_storage().data_ptr())
        if isinstance(value, tuple):
            return tuple(t.clone() if t.untyped_storage().data_ptr() in own else t for t in value)
        return value.clone() if value.untyped_storage().data_ptr() in own else value


class Boundary:
    """One held stage's messages.

    Args:
        runner: of the stage.
        lanes: those of the stage, by name; see :func:`~paceline.comm.transport.lanes_of`.
        waits: books the time of a wait.
        own: gives gradients memory of their own; None: they have it.
        chunk: number of the stage among those of this rank.
        formats: in which a training step's activations and gradients travel. An evaluation's travel as they are.
        errors: are told what the formats round away.
    """

    def __init__(
        self,
        runner: StageRunner,
        lanes: Mapping[str, Lane],
        waits: Waits,
        own: OwnMemory | None,
        chunk: int = 0,
        formats: BoundaryFormats = AS_THEY_ARE,
        errors: RoundingErrors | None = None,
    ) -> None:
        self._runner, self._waits, self._own, self._chunk = runner, waits, own, chunk
        self.formats = formats
        """Of the next step; both ends of a boundary have the same."""
        self._errors = errors
        self._activations_in, self._activations_out = lanes.get("activations_in"), lanes.get("activations_out")
        self._gradients_in, self._gradients_out = lanes.get("gradients_in"), lanes.get("gradients_out")
        self.doing: tuple[str, int] | None = None
        """The last operation and the other stage in it, for the error if the connection is lost."""

    @property
    def _forward_format(self) -> Format | None:
        return self.formats.forward if torch.is_grad_enabled() else None

    def post_activation(self, live: Live, number: int) -> None:
        assert self._activations_in is not None
        self.doing = "receiving from", self._runner.stage - 1
        self._activations_in.post(number, self._runner.activation_key(number), self._forward_format)

    def wait_activation(self, live: Live, number: int) -> None:
        lane = self._activations_in
        assert lane is not None
        self.doing = "receiving from", self._runner.stage - 1
        value = self._waits.wait(lambda: lane.receive(number), number, self._chunk)
        if isinstance(value, Parcel):
            live.incoming = value
        else:
            self._runner.arrived(live, number, value)

    def unpack_activation(self, live: Live, number: int) -> None:
        """Decode what has arrived: a part of the forward, whose time it takes."""
        if live.incoming is not None:
            self._runner.arrived(live, number, unpack(live.incoming))
            live.incoming = None

    def pack_activation(self, live: Live) -> None:
        """Encode what will be sent: a part of the forward."""
        format = self._forward_format
        if format is not None and self._activations_out is not None:
            value = self._runner.leaving(live)
            tensors_of(value, f"the last layer of stage {self._runner.stage}")  # refuses what cannot be sent
            live.outgoing = self._packed("forward", self._runner.stage, value, format)

    def send_activation(self, live: Live, number: int) -> None:
        runner, lane = self._runner, self._activations_out
        assert lane is not None
        self.doing = "sending to", runner.stage + 1
        keeps = torch.is_grad_enabled() and runner.runs_backward
        if live.outgoing is not None:
            lane.send(number, runner.activation_key(number), live.outgoing)
            live.outgoing = None
            if not keeps:
                live.inputs = live.outputs = None
            return
        value = runner.leaving(live)
        tensors_of(value, f"the last layer of stage {runner.stage}")  # refuses what cannot be sent
        if not keeps:
            # A layer may give out the same memory again, which then has yet to be sent.
            value = tuple(tensor.clone() for tensor in value) if isinstance(value, tuple) else value.clone()
            live.inputs = live.outputs = None
        lane.send(number, runner.activation_key(number), value)

    def post_gradient(self, live: Live, number: int) -> None:
        if not self._runner.runs_backward:
            return
        assert self._gradients_in is not None
        self.doing = "receiving from", self._runner.stage + 1
        self._gradients_in.post(number, self._runner.gradient_meta(live), self.formats.backward)

    def wait_gradient(self, live: Live, number: int) -> None:
        lane = self._gradients_in
        if not self._runner.runs_backward:
            return
        assert lane is not None
        self.doing = "receiving from", self._runner.stage + 1
        live.gradients = self._waits.wait(lambda: lane.receive(number), number, self._chunk)

    def unpack_gradient(self, live: Live) -> None:
        """Decode what has arrived: a part of the backward."""
        if isinstance(live.gradients, Parcel):
            live.gradients = unpack(live.gradients)

    def pack_gradient(self, live: Live) -> None:
        """Encode what will be sent: a part of the backward."""
        format = self.formats.backward
        if format is not None and self._gradients_out is not None and self._runner.sends_gradients:
            live.outgoing = self._packed("backward", self._runner.stage - 1, self._own_gradients(live), format)

    def _packed(self, kind: str, boundary: int, value: Value, format: Format) -> Parcel:
        parcel = pack(value, format)
        if self._errors is not None:
            self._errors.see(kind, boundary, value, parcel)
        return parcel

    def _own_gradients(self, live: Live) -> Value:
        value = self._runner.leaving_gradients(live)
        return value if self._own is None else self._own.of(value)

    def send_gradient(self, live: Live, number: int) -> None:
        runner, lane = self._runner, self._gradients_out
        if runner.sends_gradients:
            assert lane is not None
            self.doing = "sending to", runner.stage - 1
            if live.outgoing is not None:
                lane.send(number, live.outgoing.meta, live.outgoing)
            else:
                value = self._own_gradients(live)
                lane.send(number, meta_of(value), value)
        live.inputs = live.outgoing = None


def detached(value: Value) -> Value:
    """``value`` as a stage of the same rank takes it: the same memory, without the graph that made it."""
    return tuple(tensor.detach() for tensor in value) if isinstance(value, tuple) else value.detach()
