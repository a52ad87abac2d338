"""Weighted means over islands in few bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.averaging import rounded_means
from paceline.averaging.rounded_means import ROW, Residuals, Rounded, rounded_mean
from paceline.comm.formats import FORMATS
from support.ranks import PATIENCE_S

SHAPES = ((3, 700), (5,), (2500,))


class Meeting:
    """Islands that are threads."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._sent = size, threading.Barrier(size, timeout=PATIENCE_S), dict[int, Tensor]()

    def member(self, mine: int) -> Any:
        meeting = self

        class Member:
            size = meeting.size

            def exchange(self, values: Tensor, timeout_s: float) -> Tensor:
                meeting._sent[mine] = values
                meeting._barrier.wait()
                arrived = torch.stack([meeting._sent[i][mine] for i in range(meeting.size)])
                meeting._barrier.wait()
                return arrived

        return Member()


def together(size: int, act: Callable[[int, Any], Any]) -> list[Any]:
    meeting, found = Meeting(size), [None] * size

    def run(mine: int) -> None:
        found[mine] = act(mine, meeting.member(mine))

    threads = [threading.Thread(target=run, args=(mine,)) for mine in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in found
    return found


def changes_of(island: int, round: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * round + island)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def zeros() -> list[Tensor]:
    return [torch.zeros(shape) for shape in SHAPES]


def nothing() -> Residuals:
    return Residuals(zeros(), zeros())


def one_round(
    size: int, weights: Sequence[float], name: str, changes: list[list[Tensor]], residuals: list[Residuals]
) -> list[tuple[list[Tensor], Residuals, int]]:
    def act(mine: int, group: Any) -> Any:
        return rounded_mean(group, Rounded(changes[mine], residuals[mine], FORMATS[name]), weights, mine, 1.0)

    return together(size, act)


@pytest.mark.parametrize("chunk", [2**24, 3 * ROW])
@pytest.mark.parametrize(("size", "weights"), [(2, (0.5, 0.5)), (3, (0.2, 0.5, 0.3)), (4, (0.25, 0.5, 0.0, 0.25))])
def test_all_have_the_same_mean_and_nothing_is_lost(
    size: int, weights: Sequence[float], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of what was sent is what arrives, and what islands and owners have left."""
    monkeypatch.setattr(rounded_means, "CHUNK", chunk)
    changes = [changes_of(island) for island in range(size)]
    found = one_round(size, weights, "int4", changes, [nothing() for _ in range(size)])
    for index in range(len(SHAPES)):
        mean = found[0][0][index]
        assert all(torch.equal(means[index], mean) for means, _, _ in found)
        exact = sum(weight * own[index] for weight, own in zip(weights, changes, strict=True))
        if exact.numel() > 100:  # the few of one tensor share scales with another's
            assert 0.02 < float((mean - exact).norm() / exact.norm()) < 0.25
        kept = sum(weight * left.of_changes[index] for weight, (_, left, _) in zip(weights, found, strict=True))
        kept = kept + sum(left.of_means[index] for _, left, _ in found)
        torch.testing.assert_close(mean + kept, exact, rtol=1e-5, atol=1e-6)
    for weight, (_, left, _) in zip(weights, found, strict=True):
        if not weight:  # its change is dropped
            assert not any(tensor.any() for tensor in left.of_changes)


def test_what_is_left_is_sent_the_next_time() -> None:
    """Over many rounds the sum of the means is the sum of what was to be sent, but for the last round's rest."""
    size, weights, count = 3, (0.5, 0.25, 0.25), 20
    left = [nothing() for _ in range(size)]
    got, wanted = zeros(), zeros()
    for number in range(count):
        own = [changes_of(island, number) for island in range(size)]
        wanted = [total + sum(w * own[i][index] for i, w in enumerate(weights)) for index, total in enumerate(wanted)]
        found = one_round(size, weights, "int4", own, left)
        left = [each for _, each, _ in found]
        got = [total + mean for total, mean in zip(got, found[0][0], strict=True)]
    for all_got, all_wanted in zip(got, wanted, strict=True):
        assert float((all_got - all_wanted).norm() / all_wanted.norm()) < 0.2 / count**0.5


def test_bytes_are_those_of_the_format() -> None:
    """Half a byte a value, there and back, and a scale for 16: a seventh of what a ring sends of float32."""
    rows, size = 8, 4
    one, none = [torch.ones(size * rows * ROW)], [torch.zeros(size * rows * ROW)]
    [(_, _, num_bytes), *_] = together(
        size,
        lambda mine, group: rounded_mean(
            group,
            Rounded(one, Residuals(none, none), FORMATS["int4"]),
            [1 / size] * size,
            mine,
            1.0,
        ),
    )
    assert num_bytes == 2 * (size - 1) * rows * (ROW // 2 + ROW // 16 + 4)


def test_an_island_that_has_failed_spoils_nothing() -> None:
    broken = [torch.full(shape, torch.nan) for shape in SHAPES]
    own = changes_of(0)
    (means, mine, _), (others, its, _) = one_round(2, (1.0, 0.0), "int8", [own, broken], [nothing(), nothing()])
    for mean, other, value in zip(means, others, own, strict=True):
        assert torch.equal(mean, other)
        torch.testing.assert_close(mean, value, rtol=0, atol=0.05)
    found = one_round(2, (0.5, 0.5), "int8", [own, own], [mine, its])
    for means, left, _ in found:
        for mean, value in zip(means, own, strict=True):
            torch.testing.assert_close(mean, value, rtol=0, atol=0.05)
        assert all(tensor.isfinite().all() for tensors in left for tensor in tensors)
