"""The emulator of asynchronous pipelines, by hand on numbers and against a plain loop on models."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.schedules.asynchronous import multidirection, one_direction
from paceline.schedules.stream import Stream
from support.asynchronous_emulator import Emulator, accumulate, cut, versions_of
from support.jobs import model_config, step_batches, train_alone


class Factor(nn.Module):
    """Multiplies what comes in by a weight. The loss is the mean over a step's micro-batches."""

    def __init__(self, stage: int, value: float) -> None:
        super().__init__()
        self.name = f"w{stage}"
        self.register_parameter(self.name, nn.Parameter(torch.tensor(value, dtype=torch.float64)))

    def forward(self, stream: Tensor, side: Any, routing: None) -> tuple[Tensor, None]:
        return getattr(self, self.name) * stream[0, 0], None

    def loss(self, y: Tensor, labels: Tensor, routing: None, num_items: int, router_share: float) -> Tensor:
        return y / num_items


class Reshaped(Factor):
    """All but the last factor: what they hand on has the dimensions of hidden states."""

    def forward(self, stream: Tensor, side: Any, routing: None) -> tuple[Tensor, None]:
        return (getattr(self, self.name) * stream[0, 0]).reshape(1, 1), None


def product(stream: Stream, weights: list[float], num_steps: int, lr: float, **options: Any) -> Emulator:
    *inner, last = range(len(weights))
    stages = [*(Reshaped(stage, weights[stage]) for stage in inner), Factor(last, weights[last])]
    return Emulator(stream, stages, lambda masters: torch.optim.SGD(masters, lr=lr), num_steps, **options)


def numbers(*values: int) -> list[dict[str, Tensor]]:
    """Micro-batches of one label token each."""
    return [{"input_ids": torch.tensor([[value, 0]]), "labels": torch.tensor([[0, 0]])} for value in values]


def weights(emulator: Emulator) -> list[float]:
    return [value.item() for value in emulator.state.values()]


def test_two_devices_by_hand() -> None:
    """Two micro-batches a step. In stage 0 both forwards of a step use the weights before the last update, in stage 1
    only the first one does; all backwards use those after it."""
    emulator = product(multidirection(2, 2), [2, 3], num_steps=2, lr=0.5)
    assert emulator.step(numbers(1, 3)) == 2 * 3 * (1 + 3) / 2
    assert weights(emulator) == [2 - 0.5 * 3 * (1 + 3) / 2, 3 - 0.5 * 2 * (1 + 3) / 2] == [-1, 1]
    assert emulator.step(numbers(2, 4)) == (3 * (2 * 2) + 1 * (2 * 4)) / 2
    of_stage_0 = 1 * (2 + 4) / 2
    of_stage_1 = 2 * (2 + 4) / 2
    assert weights(emulator) == [-1 - 0.5 * of_stage_0, 1 - 0.5 * of_stage_1] == [-2.5, -2]


def test_one_direction_by_hand() -> None:
    """An update a micro-batch, three stages: all forwards two updates behind, backwards two, one and none."""
    emulator = product(one_direction(3, 1), [1, 2, 3], num_steps=3, lr=1.0)
    assert emulator.step(numbers(1)) == 6
    assert weights(emulator) == [1 - 6, 2 - 3, 3 - 2] == [-5, -1, 1]
    assert emulator.step(numbers(1)) == 6
    assert weights(emulator) == [-5 - 6, -1 - 3, 1 - 2] == [-11, -4, -1]
    assert emulator.step(numbers(2)) == 12
    # What comes back to stage 0 went through the first weight of stage 2 and the second one of stage 1.
    assert weights(emulator) == [-11 - 3 * -1 * 2, -4 - 3 * 1 * 2, -1 - 2 * 1 * 2] == [-5, -10, -5]


def test_a_flush_by_hand() -> None:
    """After it the weights are the newest ones everywhere."""
    emulator = product(multidirection(2, 2), [2, 3], num_steps=2, lr=0.5, flushes={0})
    emulator.step(numbers(1, 3))
    assert emulator.step(numbers(2, 4)) == -1 * 1 * (2 + 4) / 2
    assert weights(emulator) == [-1 - 0.5 * 1 * 3, 1 - 0.5 * -1 * 3]


@pytest.mark.parametrize("kind", ["twice", "not"])
def test_a_micro_batch_counts_once(kind: str) -> None:
    right = multidirection(2, 2)
    first, second = right.windows
    wrong = (*second, second[-1]) if kind == "twice" else tuple(action for action in second if str(action) != "B0")
    with pytest.raises(AssertionError, match=f"counted {kind}|{kind} counted"):
        versions_of(Stream((first, wrong), 2, 1, "wrong", right.routes), 3)


def adamw(masters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1, eps=1e-4)


def emulate(
    stream: Stream, steps: list[Any], flushes: Collection[int] = (), clipping: float = 0.0, **changes: Any
) -> Emulator:
    config = model_config(**changes)
    stages = cut(config, len(stream.routes[0]), dtype=torch.float64)
    emulator = Emulator(stream, stages, adamw, len(steps), flushes=flushes, clipping=clipping)
    for batches in steps:
        emulator.step(batches)
    return emulator


def differences(emulator: Emulator, wanted: Any) -> tuple[float, float]:
    """The largest of the losses (relative), and of the parameters."""
    assert emulator.state.keys() == wanted.state.keys()
    return (
        max(abs(a - b) / abs(b) for a, b in zip(emulator.losses, wanted.losses, strict=True)),
        max(float((emulator.state[name] - value).abs().max()) for name, value in wanted.state.items()),
    )


@pytest.mark.parametrize(
    ("stream", "clipping", "tied"),
    [
        (multidirection(2, 4), 0.0, True),
        (multidirection(4, 8), 0.5, False),
        (one_direction(4, 2), 0.5, True),
    ],
    ids=["two devices", "four devices", "one direction"],
)
def test_with_a_flush_a_step_it_is_plain_accumulation(stream: Stream, clipping: float, tied: bool) -> None:
    steps = [step_batches(step)[: stream.num_micro_batches] for step in range(4)]
    wanted = accumulate(model_config(tie_word_embeddings=tied), steps, adamw, clipping=clipping, dtype=torch.float64)
    flushed = emulate(stream, steps, range(4), clipping, tie_word_embeddings=tied)
    assert max(differences(flushed, wanted)) < 1e-12
    assert flushed.norms == pytest.approx(wanted.norms, rel=1e-12)
    losses, parameters = differences(emulate(stream, steps, (), clipping, tie_word_embeddings=tied), wanted)
    assert losses > 1e-4
    assert parameters > 1e-4
    assert flushed.stream.most_lag > 0


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # train_alone reads losses so
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_masks_and_the_loss_of_routers(family: str) -> None:
    """In fp32, with a micro-batch without labels in each step, against the plain loop of the other tests."""
    wanted = train_alone(0.5, family=family, steps=3)
    stages = cut(model_config(family), 4)
    emulator = Emulator(
        multidirection(4, 8),
        stages,
        lambda masters: torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.0),
        3,
        flushes=range(3),
        clipping=0.5,
    )
    assert [emulator.step(step_batches(step)) for step in range(3)] == pytest.approx(wanted["losses"], rel=1e-6)
    assert emulator.norms == pytest.approx(wanted["norms"], rel=1e-5)


def test_recomputed_activations_are_those_of_the_weights_in_the_backward() -> None:
    """A step whose forwards and backwards use the same weights has the same gradients, another one has not."""
    stream = multidirection(4, 4)
    runs = []
    for recompute in (False, True):
        stages = cut(model_config(), 4, dtype=torch.float64, recompute=recompute)
        emulator = Emulator(stream, stages, adamw, 3)
        for step in range(3):
            emulator.step(step_batches(step)[:4])
        runs.append(emulator)
    plain, recomputed = runs
    assert recomputed.norms[0] == plain.norms[0]
    assert abs(recomputed.norms[1] / plain.norms[1] - 1) > 1e-5


def test_two_replicas_are_one_with_twice_the_micro_batches() -> None:
    """If nothing is stale; each replica takes its own micro-batches in order."""
    steps = [step_batches(step) for step in range(3)]
    two = Emulator(
        multidirection(2, 4), cut(model_config(), 2, dtype=torch.float64), adamw, 3, flushes=range(3), replicas=2
    )
    for batches in steps:
        two.step(batches)
    assert max(differences(two, accumulate(model_config(), steps, adamw, dtype=torch.float64))) < 1e-12
