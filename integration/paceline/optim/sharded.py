"""The pipelines' optimizer: named parameters, each with an owner that keeps its fp32 master and moments (ZeRO-1).

Gradients are accumulated in buckets and reduced to the owners, overlapped with the last backward pass of a step; the
norm is taken once per parameter in float64; owners step with an ordinary elementwise optimizer of ``torch.optim``; new
values are broadcast. With ``shard=False`` (ZeRO 0) gradients are reduced to all ranks, each of which steps everything.

Parameters keep their names, and :attr:`ShardedOptimizer.owned` says what this rank holds of which: what collects, sends
and stores state (:mod:`paceline.state.named`) needs no more.

Legend: D data-parallel size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import nn

from ..measure.clock import Clock
from .asynchronous_updates import AsynchronousUpdates
from .corrections import KEYS_OF_CORRECTIONS
from .gradient_buckets import GradientBuckets
from .owned_rows import Kept, Owned, OwnedRows
from .parameter_layout import Asks, ParameterLayout
from .step_options import DEFAULTS, StepOptions
from .step_outcome import StepOutcome, load_scaler_state, scaler_state
from .step_sums import GradientNorm, Passenger, RankSums, ShardedMaxChange
from .task_queue import TaskQueue


class ShardedOptimizer(ZeROOptimizer):
    """Wraps ``basic``, an optimizer over the model's parameters, whose groups it makes groups of masters.

    It joins the parts of a step. Its methods are many, since it has the surface that DeepSpeed asks of an optimizer.

    Asynchronous steps are taken by :attr:`updates`, not by :meth:`step`. Masters, and the memory of a step's gradients,
    always have memory of their own then, and nobody else may use the groups while updates are pending. A second set of
    gradients is taken for a bucket only when a backward comes before the update is applied. A loss scale that changes
    needs every update to be applied before the next backward.

    Args:
        basic: any optimizer of ``torch.optim`` over parameters of one device. Where it is not elementwise, every
            parameter has one owner.
        names: of the parameters.
        counts: whether a parameter counts in the norm here, or on another rank.
        apart: whether a parameter's gradient is complete only after the last backward (a tied weight).

    Raises:
        ValueError: parameters of these dtypes cannot be trained together.
    """

    def __init__(
        self,
        basic: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        options: StepOptions = DEFAULTS,
        *,
        counts: Asks = lambda parameter: True,
        apart: Asks = lambda parameter: False,
    ) -> None:
        super().__init__()
        self.optimizer, self._options = basic, options
        self.loss_scaler = scaler = options.loss_scaler
        self.dynamic_loss_scale = bool(scaler is not None and scaler.dynamic)
        self.custom_loss_scaler, self.external_loss_scale, self.torch_autocast_gradscaler = False, None, None
        self._arrive: Callable[[], None] | None = None
        """Puts masters and states into place that are still on their way here."""
        self.is_settled: Callable[[], bool] = lambda: True
        """Whether all steps that have begun are done; who runs the steps knows."""
        limits = options.max_change
        self.max_change = None if limits is None or limits.is_none else limits
        """How far layers may move from the next step on."""
        for group in basic.param_groups:
            group.pop("param_names", None)  # torch's, of parameters as they were given; ours have names of their own
        self.layout = ParameterLayout(basic, names, options, counts=counts, apart=apart)
        self.clock = Clock(self.layout.device)
        """Told what is computed and what is waited for."""
        self.outcome = StepOutcome(scaler)
        has_thread = options.overlap and options.is_asynchronous
        self._tasks = TaskQueue(self.layout.device, self._own_times, has_thread=has_thread)
        self._sums = RankSums(self._tasks.times, options.group, options.model_group)
        self._changes = ShardedMaxChange(lambda: self.max_change, self._sums, self._tasks.times)
        self.passenger = Passenger()
        """Goes along with the sums over ranks of each step."""
        self._make_parts(None)

    def _own_times(self) -> Clock:
        return self.clock

    def _make_parts(self, kept: Kept | None) -> None:
        """Make the parts that are of one layout."""
        layout, times, options = self.layout, self._tasks.times, self._options
        self._norm = GradientNorm(layout, self._sums, times, options.max_norm, self.passenger)
        self.gradients = GradientBuckets(layout, times, options)
        self._rows = OwnedRows(layout, self.optimizer, kept)
        parts = (self.gradients, self._rows, self._norm, self._changes, self.outcome, self._own_times, self._tasks)
        self.updates = AsynchronousUpdates(self.optimizer, layout, *parts, options) if options.is_asynchronous else None
        """Steps beside the computation; None: :meth:`step` takes them."""

    def rebuild(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        names: Mapping[nn.Parameter, str],
        *,
        counts: Asks = lambda parameter: True,
        apart: Asks = lambda parameter: False,
    ) -> None:
        """Train other parameters from now on, between steps: those of a stage that has gained and lost layers.

        Masters of rows that stay are kept, others are made from the parameters' values; states are gone: who wants to
        keep them holds their tensors beforehand (:attr:`owned`, :attr:`state`) and puts them into place afterwards.

        Args:
            groups: the parameters of each group of the basic optimizer, whose options stay. The others as at first.
        """
        self._check_idle()
        self.settle_states()
        self.gradients.release(keep_values=True)
        kept = self.rows.kept()
        self.rows.release()
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = list(parameters)
        self.layout = ParameterLayout(self.optimizer, names, self._options, counts=counts, apart=apart)
        self._make_parts(kept)

    def check_dtypes(self, dtypes: set[torch.dtype]) -> None:
        """Raise ValueError if parameters of these dtypes cannot be trained together."""
        self._options.gradient_dtype(dtypes, is_sharded=self.layout.is_sharded)

    def check_settled(self) -> None:
        """Raise RuntimeError unless all steps that have begun are done, on all ranks alike."""
        if not self.is_settled():
            raise RuntimeError("steps are under way, and their updates with them: call engine.flush() first.")

    def _check_idle(self) -> None:
        if self.updates is not None:
            self.updates.check_idle()

    # -- what this rank holds ------------------------------------------------------------------------------------

    @property
    def may_wait_for_states(self) -> bool:
        """Whether masters and states may come here beside a step: not where updates are made beside it, and not yet on
        GPUs, where it was never tried."""
        return self.layout.device.type == "cpu" and self.updates is None

    def expect_states(self, arrive: Callable[[], None]) -> None:
        """Masters and states are still on their way here: call ``arrive`` before anybody looks at them again.

        The next :meth:`step` does. Values and gradients of the model are not among them.
        """
        self.settle_states()
        self._arrive = arrive

    def settle_states(self) -> None:
        """Wait for masters and states that are on their way here, if any are."""
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()

    @property
    def rows(self) -> OwnedRows:
        """Masters of this rank's rows; others after :meth:`rebuild`."""
        self.settle_states()
        return self._rows

    @property
    def owned(self) -> list[Owned]:
        """Rows that this rank steps; another list after :meth:`rebuild`."""
        return self.rows.owned

    def uses_state(self, kind: str) -> bool:
        """Whether steps read the states of this kind; not what corrections remember that this run has not."""
        corrections = self._options.corrections
        return kind not in KEYS_OF_CORRECTIONS or (corrections is not None and kind in corrections.keys)

    def num_bytes(self) -> int:
        """Bytes on this rank beside the parameters' values: masters of their own, states, gradients."""
        return self.rows.num_bytes() + self.gradients.num_bytes()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        self.settle_states()
        return self.optimizer.state

    # -- the step ------------------------------------------------------------------------------------------------

    def reduce_gradients(self, **kwargs: Any) -> None:
        """Begin the reduction of what the last backward has not begun. Collective over the group, as is ``step``."""
        if self.updates is not None:
            raise NotImplementedError("asynchronous updates reduce what is complete: call updates.backward_complete.")
        self.gradients.start_reduction()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients but those of updates under way; the buckets' memory stays."""
        self.gradients.zero()
        if self.updates is None:
            self._rows.forget_gradients()

    @property
    def loss_scale(self) -> float:
        return self.outcome.loss_scale

    @property
    def cur_scale(self) -> float:
        """The loss scale, as DeepSpeed's monitor asks for it."""
        return self.loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        return self.outcome.overflow

    @property
    def _global_grad_norm(self) -> float | None:
        """The gradient norm of the last step before clipping, as DeepSpeed's engine asks for it."""
        return self.outcome.grad_norm

    @property
    def max_change_report(self) -> dict[str, float] | None:
        """See :attr:`.StepOutcome.change`; of the last step that is in the model."""
        return self.outcome.change

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Reduce, clip, step, and give the new values to all. A step with a gradient that is not finite is skipped.

        So is one whose change is not, where changes have limits. Its gradients were: the loss scale goes on.

        A parameter that no micro-batch of the step has reached, on any rank, is left alone, as in ``torch.optim``.
        """
        if self.updates is not None:
            raise NotImplementedError("asynchronous updates have no step: call backward_complete, finish_step, apply.")
        self.settle_states()
        gradients, touched = self.gradients.reduced()
        squares, touched = self._norm.survey(gradients, touched)
        scale = self.loss_scale * self._options.divisor
        self.outcome.note_gradients(squares, scale)
        if self.overflow:
            self.zero_grad()
            self.outcome.skip()
            return
        changes = self._changes.begin(self.layout, self.rows)
        with self.clock.compute():
            self.rows.hand_over(gradients, touched, self._norm.factor(squares, scale))
            self.optimizer.step()
        if changes is not None:
            limited = self._changes.limit(changes, self.layout.device)
            self.outcome.change = limited.report
            if not limited.is_finite:
                self.zero_grad()
                self.outcome.skip("change")
                return
        self.outcome.complete()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the masters' values into the model, on all ranks. Collective over the group."""
        self._check_idle()
        self.rows.write_values()
        self.gradients.publish_values()

    # -- for DeepSpeed's engine ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of this rank's part; checkpoints are written by name instead (:mod:`paceline.state.named`)."""
        self._check_idle()
        self.settle_states()
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": [owned.master.detach() for owned in self.owned],
            "loss_scale": scaler_state(self.loss_scaler),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], **kwargs: Any) -> None:
        """Put :meth:`state_dict` of the same rank in the same shape back. Collective over the group."""
        self._check_idle()
        self.settle_states()
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        for owned, master in zip(self.owned, state["masters"], strict=True):
            owned.master.copy_(master)
        load_scaler_state(self.loss_scaler, state["loss_scale"])
        self.publish()

    def destroy(self) -> None:
        """Take the hooks off, and give every parameter memory of its own again."""
        with contextlib.suppress(RuntimeError):  # what was lost on its way is of no use any more
            self.settle_states()
        if self.updates is not None:
            self.updates.stop()
            self.updates = None
        self.gradients.release()
        self.rows.release()
