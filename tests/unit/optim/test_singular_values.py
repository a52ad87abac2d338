"""Singular values that are there when somebody asks for them."""

from __future__ import annotations

from threading import Barrier

import pytest
import torch

from paceline.optim import singular_values as module
from paceline.optim.singular_values import Beside, decompose, singular
from support.ranks import PATIENCE_S

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


def test_what_waits_is_decomposed_together_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one rank, whatever their widths: one decomposition, in the same bits as each by itself."""
    beside, barrier, asked = Beside(torch.device("cpu")), Barrier(2), []
    eigen = module._eigen
    monkeypatch.setattr(module, "_eigen", lambda gram: asked.append(gram.shape) or eigen(gram))
    beside._thread.submit(barrier.wait)
    matrices = [matrix_of(6, 20 + seed % 2, seed=seed) for seed in range(5)] + [matrix_of(4, 20)]
    results = [beside(matrix) for matrix in matrices]
    barrier.wait(PATIENCE_S)
    found = [result() for result in results]
    assert asked == [(5, 6, 6), (1, 4, 4)]
    for matrix, both in zip(matrices, found, strict=True):
        assert all(map(torch.equal, both, decompose(matrix)))


def test_a_matrix_that_is_nearly_singular_keeps_its_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The square of 1e-6 is lost beside 1; a well-conditioned one needs no QR."""
    qr, calls = module._by_qr, []
    monkeypatch.setattr(module, "_by_qr", lambda matrix: calls.append(1) or qr(matrix))
    basis = torch.linalg.qr(matrix_of(40, 5))[0].T
    left = torch.linalg.qr(matrix_of(5, 5))[0]
    for smallest, num_qr in ((1e-3, 0), (1e-7, 1), (0.0, 1)):
        values = torch.tensor([1.0, 0.5, 0.1, 0.01, smallest], dtype=torch.float64)
        matrix = (left * values) @ basis
        for found in (decompose(matrix), Beside(torch.device("cpu"))(matrix)()):
            torch.testing.assert_close(found[0], values, rtol=1e-7, atol=1e-15)
            torch.testing.assert_close(found[1] @ found[1].T, torch.eye(5).double(), rtol=0, atol=1e-9)
        assert len(calls) == 2 * num_qr
        calls.clear()


def test_a_failure_comes_to_those_who_asked() -> None:
    beside = Beside(torch.device("cpu"))
    failed = beside(torch.full((3, 5), float("nan"), dtype=torch.float64))
    with pytest.raises(RuntimeError):
        failed()
    assert torch.equal(beside(matrix_of(3, 8))()[0], decompose(matrix_of(3, 8))[0])


def test_nobody_waits_who_does_not_ask() -> None:
    """The thread is held up; what is asked of it comes back all the same, and its result when it goes on."""
    beside, barrier = Beside(torch.device("cpu")), Barrier(2)
    beside._thread.submit(barrier.wait)
    result = beside(matrix_of(3, 8))
    barrier.wait(PATIENCE_S)
    assert torch.equal(result()[0], decompose(matrix_of(3, 8))[0])
