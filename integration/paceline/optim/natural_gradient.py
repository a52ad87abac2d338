"""Natural gradient of rows: each divided by a running estimate of their second moment, which is low rank plus identity.

Source: Povey, Zhang, Khudanpur, arXiv 1410.7455, appendices A (:func:`simple_natural_gradient`) and B
(:class:`OnlineNaturalGradient`), the latter as Kaldi's ``nnet3`` computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .singular_values import singular

EPSILON = 1e-10
"""Smallest eigenvalue, whatever the rows are."""

DELTA = 5e-4
"""Smallest eigenvalue over the largest."""

START_CALLS = 10
"""Calls after which the estimate follows every ``update_period``-th only."""

MOST_ETA = 0.9
"""What of an estimate the rows of one call may be, where they are counted by the sample."""

_SIMPLE_FLOOR = 1e-20


class Estimate(NamedTuple):
    """F = R' diag(d) R + rho I, of one stream or several. Its tensors are never changed."""

    basis: Tensor
    """R, of shape (..., r, D), in the dtype of the rows, or float32."""
    eigenvalues: Tensor
    """d, of shape (..., r), float64."""
    rho: Tensor
    """Of shape (...), float64."""
    num_floored: Tensor
    """Of shape (...): how many updates left rho at :data:`EPSILON`: rows too small to be seen."""

    def shared(self, alpha: float) -> Tensor:
        """What of a row's part in each direction of the basis is taken away, of shape (..., r), float64."""
        mean = self.eigenvalues.sum(-1) / self.basis.shape[-1]
        beta = self.rho * (1 + alpha) + alpha * mean
        return self.eigenvalues / (self.eigenvalues + beta.unsqueeze(-1))


@dataclass(frozen=True)
class Division:
    """Rows X times I - R' diag(e) R: what a call of :class:`OnlineNaturalGradient` does, on products with X as well.

    Args:
        basis: R, of shape (..., r, D).
        shared: e, of shape (..., r), float64: what is taken away of a row's part in each direction.
        square: squared Frobenius norm of X, of shape (...), float64.
        parts: squared norms of the columns of X R', of shape (..., r), float64.
    """

    basis: Tensor
    shared: Tensor
    square: Tensor
    parts: Tensor

    def right(self, matrix: Tensor, inside: Tensor | None = None) -> Tensor:
        """``matrix`` (..., M, D), or X itself, divided. ``inside`` is ``matrix`` R', where that is known."""
        inside = matrix @ self.basis.mT if inside is None else inside
        return matrix - (inside * self.shared.to(matrix.dtype).unsqueeze(-2)) @ self.basis

    def right_(self, matrix: Tensor) -> Tensor:
        """:meth:`right`, in the memory of ``matrix``."""
        return _subtract_(matrix, (matrix @ self.basis.mT) * self.shared.to(matrix.dtype).unsqueeze(-2), self.basis)

    def left_(self, matrix: Tensor) -> Tensor:
        """``matrix`` (..., D, M), such as X'Y, with X divided; in its memory."""
        inside = self.shared.to(matrix.dtype).unsqueeze(-1) * (self.basis @ matrix)
        return _subtract_(matrix, self.basis.mT, inside)

    @property
    def scale(self) -> Tensor:
        """What gives the divided X the norm of X, of shape (...), float64."""
        taken = (self.shared * (2 - self.shared) * self.parts).sum(-1)
        return _restoring(self.square, self.square - taken)


class OnlineNaturalGradient:
    """One stream of matrices of shape (N, D), and what has been learned of the second moment of their rows.

    The estimate is F = R' diag(d) R + rho I with R of r orthonormal rows. A call returns X (F + alpha/D tr(F) I)^-1,
    up to a factor, and the one number that gives it the Frobenius norm of X. The first call begins with an estimate
    from its own rows; every later one uses that of before the call.

    With shape (..., N, D) it is as many streams as the leading dimensions say, side by side: layers of equal shape.

    Args:
        rank: r; at most D - 1 is used.
        alpha: how much of the mean eigenvalue is added to all.
        num_samples_history: rows over which the estimate reaches back.
        num_minibatches_history: calls over which it does, in place of ``num_samples_history``; 0 for not.
        update_period: calls from one update of the estimate to the next, after the first eleven, which all update.

    Raises:
        ValueError: an argument is out of its range.

    Source: Kaldi's ``OnlineNaturalGradient``; cost O(N r D + r^2 D) a call.
    """

    def __init__(
        self,
        rank: int,
        alpha: float = 4.0,
        num_samples_history: float = 2000.0,
        num_minibatches_history: float = 0.0,
        update_period: int = 1,
    ) -> None:
        _check(rank > 0, "rank", rank, "at least 1")
        _check(alpha >= 0, "alpha", alpha, "0 or more")
        _check(0 < num_samples_history < 1e6, "num_samples_history", num_samples_history, "between 0 and 1e6")
        known = num_minibatches_history == 0 or num_minibatches_history > 1
        _check(known, "num_minibatches_history", num_minibatches_history, "more than 1, or 0 for rows to count")
        _check(update_period > 0, "update_period", update_period, "at least 1")
        self.rank = rank
        self.alpha = alpha
        self.num_samples_history = num_samples_history
        self.num_minibatches_history = num_minibatches_history
        self.update_period = update_period
        self.frozen = False
        """Whether the estimate stays as it is."""
        self.num_calls = 0
        self.num_updates = 0
        self._learned: Estimate | None = None
        self._update: Callable[[], Estimate] | None = None
        """Gives the estimate when it is next needed: the host goes on while a device computes."""

    @torch.no_grad()
    def precondition(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(x_hat, scale)``: ``x_hat`` of the shape and dtype of ``x``, to be multiplied by ``scale``.

        Computed in the dtype of ``x``, half precision in float32. ``scale`` has the leading dimensions of ``x``.
        Rows that are not finite give what they give, and are not learned from. Where ``D`` is 1 nothing is done.

        Args:
            x: of shape (..., N, D).

        Raises:
            ValueError: ``x`` has another D or other leading dimensions than before, or no rows.
        """
        rows = _wide(x)
        if x.shape[-1] == 1:
            return x, torch.ones(x.shape[:-2], dtype=rows.dtype, device=x.device)
        division, inside = self._observe(rows, False, 1.0, None)
        x_hat = division.right(rows, inside)
        return x_hat.to(x.dtype), _restoring(division.square, _square(x_hat)).to(rows.dtype)

    @torch.no_grad()
    def observe(self, x: Tensor, ones: bool = False, unit: float = 1.0, num_rows: int | None = None) -> Division:
        """What :meth:`precondition` would do with ``x``, and learn from it, without doing it.

        Args:
            x: of shape (..., N, D), in single or double precision; with D of at least 2.
            ones: rows have one column more, of ones.
            unit: the rows are ``unit`` times ``x``, which costs nothing this way.
            num_rows: of the minibatch, where ``x`` is a sample of its rows.

        Raises:
            ValueError: as :meth:`precondition`.
        """
        return self._observe(x, ones, unit, num_rows)[0]

    @property
    def learned(self) -> Estimate | None:
        """What has been learned; None before the first call."""
        if self._update is not None:
            self._learned, self._update = self._update(), None
        return self._learned

    def state_dict(self) -> dict[str, Any]:
        """Tensors, which later calls do not change, and numbers of calls."""
        learned = dict.fromkeys(Estimate._fields) if self.learned is None else self.learned._asdict()
        return {"num_calls": self.num_calls, "num_updates": self.num_updates, **learned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict` in every bit; from one of another rank, anew."""
        self._update = self._learned = None
        self.num_calls = self.num_updates = 0
        basis = state["basis"]
        if basis is not None and basis.shape[-2] != min(self.rank, basis.shape[-1] - 1):
            return
        self.num_calls, self.num_updates = state["num_calls"], state["num_updates"]
        if basis is not None:
            self._learned = Estimate(*(state[name].clone() for name in Estimate._fields))

    # -- the estimate ----------------------------------------------------------------------------------------------

    def _observe(self, x: Tensor, ones: bool, unit: float, num_rows: int | None) -> tuple[Division, Tensor]:
        """And X R'."""
        self._check_shape(x, ones)
        num_rows = num_rows or x.shape[-2]
        square = _square(x) + ones * x.shape[-2]
        estimate = self.learned or self._begin(x, square, ones, unit, num_rows)
        if estimate.basis.device != x.device or estimate.basis.dtype != x.dtype:
            estimate = estimate._replace(basis=estimate.basis.to(x.device, x.dtype))
        inside = _inside(x, estimate.basis, ones)
        parts = torch.linalg.vector_norm(inside, dim=-2).double().square()
        division = Division(estimate.basis, estimate.shared(self.alpha), square, parts)
        if self._updates():
            self._update = self._absorb(estimate, x, inside, square, ones, unit, num_rows)
        self.num_calls += 1
        return division, inside

    def _updates(self) -> bool:
        after = self.num_calls - START_CALLS
        return not self.frozen and (after <= 0 or after % self.update_period == 0)

    def _eta(self, num_rows: int) -> float:
        if self.num_minibatches_history > 0:
            return 1 / self.num_minibatches_history
        return min(MOST_ETA, -math.expm1(-num_rows / self.num_samples_history))

    def _begin(self, x: Tensor, square: Tensor, ones: bool, unit: float, num_rows: int) -> Estimate:
        """A fixed basis, in which no direction is the mean of the rows, turned to them by updates."""
        dim = x.shape[-1] + ones
        rank = min(self.rank, dim - 1)
        basis = torch.zeros(rank, dim, dtype=x.dtype, device=x.device)
        columns = torch.arange(dim, device=x.device)
        basis[columns % rank, columns] = 1.0
        basis.diagonal().fill_(1.1)
        basis /= basis.norm(dim=-1, keepdim=True)
        streams = x.shape[:-2]
        self._learned = estimate = Estimate(
            basis.expand(*streams, rank, dim).clone(),
            torch.full((*streams, rank), EPSILON, dtype=torch.float64, device=x.device),
            torch.full(streams, EPSILON, dtype=torch.float64, device=x.device),
            torch.zeros(streams, dtype=torch.int64, device=x.device),
        )
        for _ in range(1 if x.shape[-2] <= rank else 3):
            inside = _inside(x, estimate.basis, ones)
            self._learned = estimate = self._absorb(estimate, x, inside, square, ones, unit, num_rows)()
        return estimate

    def _absorb(
        self, estimate: Estimate, x: Tensor, inside: Tensor, square: Tensor, ones: bool, unit: float, num_rows: int
    ) -> Callable[[], Estimate]:
        """One step of the power method on eta/N X'X + (1 - eta) F, begun; what is returned gives the new estimate.

        Args:
            inside: X R'.
            square: the squared Frobenius norm of X, in float64.
        """
        self.num_updates += 1
        eta = self._eta(num_rows)
        share = eta / x.shape[-2] * unit * unit
        wide = estimate.basis.double()
        gathered = inside.mT @ x
        if ones:
            gathered = torch.cat([gathered, inside.sum(-2).unsqueeze(-1)], -1)
        turned = share * gathered.double()
        turned += (1 - eta) * (estimate.eigenvalues + estimate.rho.unsqueeze(-1)).unsqueeze(-1) * wide
        finite = square.isfinite() & turned.isfinite().all(-1).all(-1)
        turned = torch.where(finite[..., None, None], turned, wide)
        kept = (1 - eta) * estimate.rho
        dim, rank = turned.shape[-1], turned.shape[-2]
        trace = share * square + (1 - eta) * (dim * estimate.rho + estimate.eigenvalues.sum(-1))
        found = singular(turned)

        def updated() -> Estimate:
            values, basis = found()
            values = torch.maximum(values, kept.unsqueeze(-1))
            rho = (trace - values.sum(-1)) / (dim - rank)
            floor = (DELTA * values[..., 0]).clamp_min(EPSILON)
            eigenvalues = torch.maximum(values - rho.unsqueeze(-1), floor.unsqueeze(-1))
            rho = torch.maximum(rho, floor)
            return Estimate(
                torch.where(finite[..., None, None], basis.to(estimate.basis.dtype), estimate.basis),
                torch.where(finite.unsqueeze(-1), eigenvalues, estimate.eigenvalues),
                torch.where(finite, rho, estimate.rho),
                estimate.num_floored + (rho <= EPSILON),
            )

        return updated

    def _check_shape(self, x: Tensor, ones: bool) -> None:
        if x.dim() < 2 or x.shape[-2] == 0:
            raise ValueError(f"x has shape {tuple(x.shape)}: give (..., N, D) with at least one row.")
        found = (*x.shape[:-2], x.shape[-1] + ones)
        if self.learned is None:
            return
        *streams, _, dim = self.learned.basis.shape
        if found != (*streams, dim):
            raise ValueError(
                f"rows have {found[-1]} columns in {found[:-1]} streams, and before they had {dim} in "
                f"{tuple(streams)}: make another OnlineNaturalGradient for them."
            )


class AffineNaturalGradient:
    """Gradients of an affine layer y = x W' + b, natural in its inputs and in the derivatives of its outputs.

    With the gradient G = [dW, db] of the rows (x, 1) it is P_out G P_in, and what each side's division takes from the
    norm is given back: the same as the gradient of rows that were divided one by one.

    Args:
        rank_in: of the inputs' estimate; left out: min(20, (D_in + 1) / 2), whole.
        rank_out: of the derivatives'; left out: min(80, (D_out + 1) / 2).
        alpha, num_samples_history, num_minibatches_history, update_period: of both; see :class:`OnlineNaturalGradient`.

    Source: Kaldi's ``NaturalGradientAffineComponent``.
    """

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        bias: bool = True,
        rank_in: int | None = None,
        rank_out: int | None = None,
        alpha: float = 4.0,
        num_samples_history: float = 2000.0,
        num_minibatches_history: float = 0.0,
        update_period: int = 4,
    ) -> None:
        self.bias, self.dims = bias, (dim_in, dim_out)
        ranks = (rank_in or min(20, (dim_in + 1) // 2), rank_out or min(80, (dim_out + 1) // 2))
        self.inputs, self.outputs = (
            OnlineNaturalGradient(rank, alpha, num_samples_history, num_minibatches_history, update_period)
            for rank in ranks
        )

    @torch.no_grad()
    def gradients(
        self, x: Tensor, dy: Tensor, unit: float = 1.0, max_rows: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``(dW, db)`` of shapes (..., D_out, D_in) and (..., D_out), ``db`` None without a bias.

        In the dtype of ``dy``; what is learned is computed in float32 at least.

        Args:
            x: what the layer was given, (..., N, D_in).
            dy: derivatives of the loss, (..., N, D_out).
            unit: times ``dy`` these are derivatives of a loss *summed* over the rows. Those of a mean are so small that
                the estimate stays at :data:`EPSILON`, and nothing is divided.
            max_rows: learn from so many rows at most, evenly spread.
        """
        gradient = _product(dy, x)
        if self.bias:
            gradient = torch.cat([gradient, dy.sum(-2, dtype=gradient.dtype).unsqueeze(-1)], -1)
        gradient = self.divide(gradient, x, dy, unit, max_rows).to(dy.dtype)
        return (gradient[..., :-1], gradient[..., -1]) if self.bias else (gradient, None)

    @torch.no_grad()
    def divide(self, gradient: Tensor, x: Tensor, dy: Tensor, unit: float = 1.0, max_rows: int | None = None) -> Tensor:
        """``gradient`` (..., D_out, D_in, with one column more for a bias) divided; it may lose its own values."""
        gradient, num_rows = _wide(gradient), x.shape[-2]
        x, dy = _wide(sample(x, max_rows)), _wide(sample(dy, max_rows))
        factor = torch.ones((), dtype=torch.float64, device=x.device)
        if gradient.shape[-1] > 1:
            division = self.inputs.observe(x, self.bias, num_rows=num_rows)
            gradient, factor = division.right_(gradient), factor * division.scale
        if gradient.shape[-2] > 1:
            division = self.outputs.observe(dy, unit=unit, num_rows=num_rows)
            gradient, factor = division.left_(gradient), factor * division.scale
        return gradient.mul_(factor.to(gradient.dtype)[..., None, None])

    def state_dict(self) -> dict[str, Any]:
        sides = {"inputs": self.inputs.state_dict(), "outputs": self.outputs.state_dict()}
        return {"bias": self.bias, "dims": self.dims, **sides}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inputs.load_state_dict(state["inputs"])
        self.outputs.load_state_dict(state["outputs"])


class SimpleAffineNaturalGradient:
    """As :class:`AffineNaturalGradient`, but by :func:`simple_natural_gradient` of each call's rows; keeps nothing."""

    def __init__(self, bias: bool = True, alpha: float = 4.0) -> None:
        self.bias, self.alpha = bias, alpha

    @torch.no_grad()
    def gradients(self, x: Tensor, dy: Tensor, unit: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """``(dW, db)`` as those of :class:`AffineNaturalGradient`, in the dtype of ``dy``.

        Args:
            x: what the layer was given, (..., N, D_in).
            dy: derivatives of the loss, (..., N, D_out).
            unit: times ``dy`` these are derivatives of a loss *summed* over the rows.
        """
        rows = _wide(x)
        if self.bias:
            rows = torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1)
        gradient = (self.divided(_wide(dy), unit).mT @ self.divided(rows)).to(dy.dtype)
        return (gradient[..., :-1], gradient[..., -1]) if self.bias else (gradient, None)

    @torch.no_grad()
    def divided(self, rows: Tensor, unit: float = 1.0) -> Tensor:
        """``rows`` (..., N, D), each by the second moment of the others, with the norm that they had."""
        if rows.shape[-1] == 1:
            return rows
        x_hat, scale = simple_natural_gradient(rows * unit, self.alpha)
        return x_hat.mul_((scale / unit)[..., None, None]) if x_hat is not rows else rows


@torch.no_grad()
def simple_natural_gradient(x: Tensor, alpha: float = 4.0) -> tuple[Tensor, Tensor]:
    """``(x_hat, scale)``: each row divided by the second moment of the *other* rows of the minibatch, smoothed.

    With s = tr(X'X)/N and lambda = alpha s / D row n of ``x_hat`` is x_n (lambda I + sum_{m != n} x_m' x_m / (N-1))^-1.

    Args:
        x: of shape (..., N, D); a single row is returned as it is.
        alpha: more than 0.

    Source: arXiv 1410.7455, appendix A; cost O(min(N, D)^2 max(N, D)).
    """
    _check(alpha > 0, "alpha", alpha, "more than 0")
    num_rows, dim = x.shape[-2:]
    if num_rows == 1:
        return x, torch.ones(x.shape[:-2], dtype=x.dtype, device=x.device)
    square = _square(x)
    smoothing = (alpha * square.clamp_min(_SIMPLE_FLOOR) / (num_rows * dim)).to(x.dtype)[..., None, None]
    smaller = min(num_rows, dim)
    moment = (x.mT @ x if dim <= num_rows else x @ x.mT) / (num_rows - 1)
    moment = moment + smoothing * torch.eye(smaller, dtype=x.dtype, device=x.device)
    x_hat = torch.linalg.solve(moment, x, left=False) if dim <= num_rows else torch.linalg.solve(moment, x)
    own = (x * x_hat).sum(-1, keepdim=True)
    x_hat = x_hat * (1 + own / (num_rows - 1 - own))
    return x_hat, _restoring(square, _square(x_hat)).to(x.dtype)


def _subtract_(matrix: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return matrix.addmm_(left, right, alpha=-1) if matrix.dim() == 2 else matrix.sub_(left @ right)


def _square(x: Tensor) -> Tensor:
    """The squared Frobenius norm of each matrix, in float64."""
    norms: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1).double(), dim=-1)
    return norms.square()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _product(dy: Tensor, x: Tensor) -> Tensor:
    """dY'X in float32 at least: divisions cancel most of it, and of a half leave the error of its rounding."""
    if dy.is_cuda and dy.dim() == 2 and dy.dtype == x.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(dy.mT, x, out_dtype=torch.float32)  # as fast as a half; CPUs have none
    return _wide(dy).mT @ _wide(x)


def sample(x: Tensor, max_rows: int | None) -> Tensor:
    """Evenly spread rows of ``x``, at most ``max_rows``."""
    return x if max_rows is None else x[..., :: -(-x.shape[-2] // max_rows), :]


def _inside(x: Tensor, basis: Tensor, ones: bool) -> Tensor:
    """X R', whose X has a column of ones after those of ``x``."""
    return x @ basis[..., :-1].mT + basis[..., -1].unsqueeze(-2) if ones else x @ basis.mT


def _restoring(square: Tensor, square_hat: Tensor) -> Tensor:
    return torch.where((square > 0) & (square_hat > 0), (square / square_hat).sqrt(), 1.0)


def _check(holds: bool, name: str, value: float, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}: give {rule}.")
