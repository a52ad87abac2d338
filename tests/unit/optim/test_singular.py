"""Singular values that are there when somebody asks for them."""

from __future__ import annotations

from threading import Barrier

import pytest
import torch

from paceline.optim.singular import Beside, decompose, singular

SHAPES = [(1, 1), (1, 7), (4, 4), (5, 30), (3, 5, 30)]


def matrix_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_vectors_are_those_of_the_matrix(shape: tuple[int, ...]) -> None:
    matrix = matrix_of(*shape)
    values, vectors = singular(matrix)()
    torch.testing.assert_close(values, torch.linalg.svdvals(matrix), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vectors @ vectors.mT, torch.eye(shape[-2]).double().expand(*shape[:-1], shape[-2]))
    left = matrix @ vectors.mT / values.unsqueeze(-2)
    torch.testing.assert_close((left * values.unsqueeze(-2)) @ vectors, matrix, rtol=1e-10, atol=1e-10)


def test_a_thread_gives_each_its_own_in_any_order() -> None:
    beside = Beside(torch.device("cpu"))
    matrices = [matrix_of(6, 20, seed=seed) for seed in range(8)]
    asked = [beside(matrix) for matrix in matrices]
    for matrix, result in reversed(list(zip(matrices, asked, strict=True))):
        for found, wanted in zip(result(), decompose(matrix), strict=True):
            assert torch.equal(found, wanted)


def test_nobody_waits_who_does_not_ask() -> None:
    """The thread is held up; what is asked of it comes back all the same, and its result when it goes on."""
    beside, barrier = Beside(torch.device("cpu")), Barrier(2)
    beside._thread.submit(barrier.wait)
    result = beside(matrix_of(3, 8))
    barrier.wait(60)
    assert torch.equal(result()[0], decompose(matrix_of(3, 8))[0])
