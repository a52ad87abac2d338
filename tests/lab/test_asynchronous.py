"""Contestants without a flush: the real engine on an emulated device."""

from __future__ import annotations

import pytest

from lab.asynchronous import SETTLING_STEPS, AsynchronousStep
from lab.emulation import Emulation
from lab.hosts import Hosts, available
from lab.training import train
from support.ranks import PATIENCE_S

needs_hosts = pytest.mark.skipif(bool(available()), reason=available() or "-")


@needs_hosts
def test_pipelines_without_a_flush_train_and_take_the_time_of_the_device() -> None:
    names = ["stock", "multidirection-flush", "multidirection", "one_direction-clipped"]
    emulation = Emulation.of(4, [0.01], [0.02], 64 * 1024, 4)
    with Hosts(4) as hosts:
        records = train(hosts, names, emulation, warmup=1, steps=3, rates=[800.0], timeout=PATIENCE_S)
    own = {name: [record for record in records if record["contestant"] == name] for name in names}
    for name in names:
        measured = [record for record in own[name] if record["round"] == 0]
        assert len(measured) == 3
        assert {record["mbit"] for record in measured} == {800.0}
        assert sum(record["seconds"] for record in measured) > 0.98 * 3 * 4 * 0.03, "no rank computes less"
    for name in ("multidirection", "one_direction-clipped"):
        # They settle at the beginning of each turn: of the warm-up, and of the round.
        assert [record["step"] for record in own[name]] == list(range(2 * SETTLING_STEPS + 1 + 3))
        losses = [record["loss"] for record in own[name]]
        assert losses[-1] < losses[0]
    flushed = [record["loss"] for record in own["multidirection-flush"]]
    stale = [record["loss"] for record in own["multidirection"]]
    assert stale[0] == pytest.approx(flushed[0], rel=1e-5), "before the first update"
    assert stale[1] > flushed[1], "a step's first forwards have not seen the update before it"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"message_bytes": 1000}, "one_direction with messages of 1000 bytes: take a multiple of 512"),
        ({"num_layers": 4}, "one_direction with 4 layers of 0 bytes on 2 ranks: it can have a layer a rank only"),
        ({"layer_bytes": 64}, "one_direction with 2 layers of 64 bytes on 2 ranks: it can have a layer a rank only"),
    ],
)
def test_an_emulation_that_they_cannot_have(more: dict[str, int], message: str) -> None:
    settings = {"message_bytes": 512, "num_micro_batches": 4, **more}
    emulation = Emulation.of(2, [0.1], [0.1], **settings)
    with pytest.raises(ValueError, match=message):
        AsynchronousStep("one_direction", emulation)
