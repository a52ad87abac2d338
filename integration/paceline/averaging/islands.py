"""Islands that average their parameters: one DeepSpeed job among others, which come and go.

Every so many tokens the masters of the parameters, by name, are brought together on the island's first rank, averaged
with those of the other islands over :mod:`.rounds`, and brought back to whoever steps them. So islands may have other
stages, partitions, replicas and ZeRO stages, or no pipeline at all. Inside, everything goes on as usual.

Legend: P parts that the parameters are averaged in, one after another.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..comm.control import SHARED, ControlPlane
from ..config import PacelineConfig
from ..config.averaging_keys import HELD_OUT, NESTEROV, AveragingConfig
from ..hf.weights import is_pretrained
from ..messages import brief
from ..state.rank_states import RankStates
from ..supervise.lifetime import current
from ..supervise.watch import WATCH
from .combining import RunningMean, fit_weights
from .masters_by_name import Masters, state_kinds
from .rounds import Islands, Left, Outcome
from .rules import (
    OuterNesterov,
    Report,
    is_no_round,
    island_weights,
    learning_rate_factor,
    parts_of,
    period_of,
)

logger = logging.getLogger("paceline")

ISLAND = "PACELINE_ISLAND"
"""In the environment: the island's number."""

_MOST_DIGITS = 9
_POLL_S = 2.0


def island_number(section: AveragingConfig) -> tuple[int, int]:
    """``(number of this island, number of shares of the data)``.

    Raises:
        ValueError: the environment does not say, or says one that has no share.
    """
    shares = section.islands or section.min_islands
    written = os.environ.get(ISLAND)
    if written is None or not written.isdecimal() or len(written) > _MOST_DIGITS:
        found = "is not set" if written is None else f"is {brief(repr(written), 100)}"
        raise ValueError(
            f"paceline.averaging is there and {ISLAND} {found}: say which island this is, from 0, with --island N "
            f"or {ISLAND}=N in the environment."
        )
    if int(written) >= shares:
        raise ValueError(
            f"this is island {written}, and the data are divided into {shares} shares, for islands 0 to {shares - 1}: "
            'give it another number, or write "islands" into paceline.averaging.'
        )
    return int(written), shares


def island_share(section: Mapping[str, Any] | AveragingConfig, length: int) -> range:
    """Which of ``length`` samples are this island's: every so manieth."""
    config = section if isinstance(section, AveragingConfig) else AveragingConfig.model_validate(dict(section))
    island, shares = island_number(config)
    return range(island, length, shares)


def combining_fault(section: PacelineConfig, has_held_out: bool, remedy: str) -> str | None:
    """Why the last rounds' models could not be combined as ``section`` says, in the end; None: they can be.

    Args:
        remedy: how to have held-out data, where the one who asks takes them from.
    """
    averaging = section.averaging
    if has_held_out or averaging is None or averaging.combine_weights != HELD_OUT:
        return None
    return (
        f'paceline.averaging.combine_weights is "{HELD_OUT}" and there are no held-out data to fit the weights on: '
        f'{remedy}, or write "mean".'
    )


@dataclass
class _Pending:
    """An exchange that is under way."""

    indices: range
    """Of the names that it is of."""
    due: int
    """Step at whose end it is waited for."""
    counts: bool
    starts: bool
    """Before the first step: there is nothing to go on with alone."""
    overlaps: bool
    """Training goes on meanwhile."""
    tokens: int
    trained_until: int
    """Tokens that this island had trained on when it began."""
    sent: list[Tensor] | None = None
    """On the first rank: what this island had when it began; all of it, where it does not count."""
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    """On the first rank, where they are averaged: those of the optimizer, by kind."""
    is_given_up: bool = False
    thread: threading.Thread | None = None
    outcome: Outcome | None = None
    error: BaseException | None = None


class Averager:
    """The part of an engine that averages with other islands. All ranks of the island call everything together.

    Args:
        control: between the ranks of this island.
        masters: what is averaged.
        basic: the optimizer of ``torch.optim`` inside, whose learning rate is scaled.
        is_pretrained: whether the weights at the start are another training's, rather than drawn at random.
    """

    def __init__(
        self,
        section: AveragingConfig,
        control: ControlPlane,
        masters: Masters,
        basic: torch.optim.Optimizer,
        is_pretrained: bool = False,
    ) -> None:
        self._is_pretrained = is_pretrained
        self.section, self.control, self.masters, self.basic = section, control, masters, basic
        self.island, _ = island_number(section)
        self.is_first = control.rank == 0
        self.names: list[str] = []
        self.parts: list[range] = []
        self._islands: Islands | None = None
        self._pending: _Pending | None = None
        self._joined = False
        if section.optimizer_state == "reset" and section.parts > 1 and not masters.keeps_states_apart:
            raise ValueError(
                'paceline.averaging.optimizer_state is "reset" and there are parts, whose states this optimizer keeps '
                'in one: leave "parts" out, or take "keep" or "average".'
            )
        self._kinds = state_kinds(basic) if section.optimizer_state == "average" else ()
        self._to_take = 0
        """Exchanges in which it does not count, as it has missed others and lacks what they brought."""
        self.round = 0
        """Exchanges that are done; each is of part ``round % P``."""
        self.tokens = 0
        """That this island has trained on."""
        self.tokens_of_all = 0
        self.num_islands = section.min_islands
        """Expected in the next average: those of the last round, whatever it made of them."""
        self._trained_until: dict[int, int] = {}
        """Tokens at the last round of each part."""
        self._last_loss = math.nan
        self._moved = 0.0
        """Periods that the parts have been averaged over since the last model was kept, all together."""
        self._next_tokens = 0.0
        self._loss_sum: Tensor | float = 0.0
        self._since = 0
        """Tokens since the last exchange began; ``_loss_sum`` is the sum of their losses."""
        self.exchanges: list[dict[str, Any]] = []
        """What each exchange was and cost, on the first rank: of the last 256, or since they were taken away."""
        outer = section.outer == NESTEROV
        rate, momentum = section.outer_learning_rate, section.outer_momentum
        self._outer = (
            OuterNesterov(0.7 if rate is None else rate, 0.9 if momentum is None else momentum) if outer else None
        )
        self._anchors: dict[int, Tensor] = {}
        self._last_rounds = RunningMean(section.combine_rounds)
        self._average: dict[int, Tensor] = {}
        self._scales_rate = section.scale_learning_rate
        if self._scales_rate is None:
            self._scales_rate = not outer and type(basic).__name__ == "SGD"
        self._rates: list[Any] | None = None
        basic.register_step_pre_hook(self._scale_rate)
        basic.register_step_post_hook(self._restore_rate)

    @property
    def first_round(self) -> Literal["best", "mean"]:
        chosen = self.section.first_round
        return chosen or ("mean" if self._outer is not None or self._is_pretrained else "best")

    # -- what an engine calls ------------------------------------------------------------------------------------

    def join(self, step: int) -> None:
        """Before the first step: find the others; where they have gone on already, wait for their next round."""
        if self._joined:
            return
        self._joined = True
        self.names = sorted(self.masters.numels())
        numels = self.masters.numels()
        self.parts = parts_of([numels[name] for name in self.names], self.section.parts)
        every = self.section.every_tokens / len(self.parts)
        has_come_back = False
        for _ in self.parts:
            if self._exchange(step, counts=False, starts=True) is None:
                break
            has_come_back = True
        if self._outer is not None and self.control.from_first(len(self._anchors) < len(self.names)):
            for i, tensor in enumerate(self.masters.gather(self.names) or ()):
                self._anchors.setdefault(i, tensor)
        if has_come_back or self._next_tokens <= self.tokens:
            self._next_tokens = self.tokens + every
        if self.is_first:
            logger.info(
                "island %d: averages with others every %.6g tokens%s, learning rate %s",
                self.island,
                every,
                "" if len(self.parts) == 1 else f" a part of {len(self.parts)}",
                "times the number of islands" if self._scales_rate else "as scheduled",
            )

    def after_step(self, step: int, loss: Tensor | float, tokens: int) -> None:
        """A step is done: ``tokens`` of all ranks of this island together, and its mean loss."""
        self.tokens += tokens
        self._loss_sum = self._loss_sum + loss * tokens
        self._since += tokens
        if self._pending is not None and step >= self._pending.due:
            self.settle()
        is_due = self.tokens >= self._next_tokens
        if is_due or self._is_called():
            self.settle()
            every = self.section.every_tokens / len(self.parts)
            self._next_tokens = (self._next_tokens if is_due else self.tokens) + every
            self._begin(step, counts=not self._to_take, overlaps=self.section.overlap_steps > 0, is_early=not is_due)
            if not self.section.overlap_steps:
                self.settle()

    def finish(self, step: int, held_out_loss: Callable[[], float] | None = None) -> None:
        """Training is over: average what is new once more, and combine the last rounds where that is asked for.

        Args:
            held_out_loss: of the model as it is then, on held-out data. Called by all ranks, which are told the first
                one's.

        Raises:
            ValueError: weights are to be fitted, and there are no held-out data.
        """
        if not self._joined:
            return
        fits = self.section.combine_weights == HELD_OUT
        remedy = "give finish_averaging a function that computes the loss on some"
        if fault := combining_fault(PacelineConfig(averaging=self.section), held_out_loss is not None, remedy):
            raise ValueError(fault)
        self.settle()
        for _ in self.parts:
            if self._exchange(step, counts=not self._to_take, is_early=True) is None:
                break
        if self.section.combine_rounds > 1:
            if self._moved:
                self._keep_model()
            if self.control.from_first(len(self._last_rounds) > 0):
                self._combine(held_out_loss if fits else None)
        self.close()

    def _combine(self, held_out_loss: Callable[[], float] | None) -> None:
        """Take the mean of the last rounds, or what loses least on held-out data."""
        weights = self.control.from_first(self._last_rounds.weights() if self.is_first else None)
        if held_out_loss is not None:

            def take(weights: Sequence[float]) -> float:
                self._take(weights)
                return float(self.control.from_first(held_out_loss()))

            weights, loss = fit_weights(take, weights)
            if self.is_first:
                told = ", ".join(f"{weight:.3g}" for weight in weights)
                logger.info("island %d: last rounds' models weigh %s: held-out loss %.5g", self.island, told, loss)
        self._take(weights)

    def _take(self, weights: Sequence[float]) -> None:
        self.masters.scatter(self.names, self._last_rounds.mean(weights) if self.is_first else None)

    def _keep_model(self) -> None:
        """Keep the model as it is, for what the last rounds' are combined to."""
        if self.is_first and len(self._average) == len(self.names):
            period = min(1.0, self._moved / len(self.parts))
            self._last_rounds.add([self._average[i] for i in range(len(self.names))], period)
        self._moved = 0.0

    def close(self) -> None:
        """Leave the others. Not collective."""
        self._joined = False
        if self._islands is not None:
            self._islands.close()
            self._islands = None

    # -- one exchange --------------------------------------------------------------------------------------------

    def _exchange(self, step: int, *, counts: bool, starts: bool = False, is_early: bool = False) -> Outcome | None:
        self._begin(step, counts=counts, starts=starts, is_early=is_early)
        return self.settle()

    def _begin(
        self, step: int, *, counts: bool, starts: bool = False, overlaps: bool = False, is_early: bool = False
    ) -> None:
        part = self.round % len(self.parts)
        indices = self.parts[part]
        loss, tokens = self._mean_loss() if counts else (math.nan, 0)
        due = step + self.section.overlap_steps
        pending = _Pending(indices, due, counts, starts, overlaps, tokens, self.tokens)
        self._pending = pending
        if counts:
            names = [self.names[i] for i in indices]
            pending.sent = self.masters.gather(names)
            for kind in self._kinds:
                pending.states[kind] = self.masters.gather(names, kind) or []
        else:  # the others' round decides which part it is
            pending.sent = self.masters.gather(self.names)
        if not self.is_first:
            return
        assert pending.sent is not None
        checksum = math.fsum(tensor.double().sum().item() for tensor in pending.sent) if not counts else 0.0
        trained = self.tokens - self._trained_until.get(part, 0) if counts else 0
        period = min(1.0, trained / self.section.every_tokens) if is_early else 1.0
        report = Report(self.island, self._digest(), checksum, loss, tokens, counts, self.round, trained, period)
        thread = threading.Thread(target=self._run, args=(pending, report), name="paceline-average", daemon=True)
        pending.thread = thread
        thread.start()

    def _run(self, pending: _Pending, report: Report) -> None:
        try:
            try:
                pending.outcome = self._round(pending, report)
            except Left:
                self._islands = None
                pending.outcome = self._round(pending, report)
        except BaseException as error:
            self._islands = None
            pending.error = error

    def _round(self, pending: _Pending, report: Report) -> Outcome:
        islands = self._islands
        if islands is None:
            section = self.section
            islands = Islands(
                section.lighthouse,
                self.island,
                min_islands=section.min_islands,
                timeout_s=section.timeout_s,
                grace_s=section.grace_s,
                weigh=self._weigh,
            )
            self._islands = islands
        if pending.is_given_up:
            islands.close()
        return islands.round(report, partial(self._to_send, pending))

    def _is_called(self) -> bool:
        """Whether others have come to the next round, and waited for this island as long as they do."""
        if self._pending is not None or self.num_islands == 1:
            return False
        called = self.is_first and self._islands is not None and self._islands.is_called(self.round)
        return bool(self.control.sum(torch.tensor([int(called)])).item())

    def _weigh(self, reports: Sequence[Report]) -> list[float]:
        newest = max((report.round for report in reports if report.counts), default=0)
        if newest < len(self.parts):  # the first round is one of each part
            reports = [replace(report, round=report.round - newest) if report.counts else report for report in reports]
        return island_weights(
            reports, first_round=self.first_round, difference_threshold=self.section.difference_threshold
        )

    def _indices_of(self, reports: Sequence[Report]) -> range:
        """Names whose parameters a round of these islands is of: of all where none has trained yet."""
        rounds = [report.round for report in reports if report.counts]
        return self.parts[max(rounds) % len(self.parts)] if rounds else range(len(self.names))

    def _to_send(self, pending: _Pending, reports: Sequence[Report]) -> list[Tensor]:
        assert pending.sent is not None
        indices = self._indices_of(reports)
        sent = pending.sent if pending.counts else [pending.sent[i] for i in indices]
        if _are_alike(reports):
            if not pending.counts:
                return sent
            return [*sent, *(state for kind in self._kinds for state in pending.states[kind])]
        more = [torch.tensor([self.tokens_of_all], dtype=torch.float64)]
        if self._outer is not None:
            anchors = [self._anchors.get(i, tensor) for i, tensor in zip(indices, sent, strict=True)]
            more += [*anchors, *self._outer.buffers(anchors, list(indices))]
        return [*sent, *more]

    @torch.no_grad()
    def settle(self) -> Outcome | None:
        """Wait for the exchange that is under way, and take what it brought. Returns that, on all ranks alike in kind.

        None where nothing was to be had: no other island has trained.
        """
        pending = self._pending
        if pending is None:
            return None
        self._wait(pending)
        self._pending = None
        outcome = None if pending.is_given_up else pending.outcome
        new, replaces, states = None, False, None
        told: Any = None
        if self.is_first and outcome is not None and is_no_round(outcome.reports):
            told = _NOTHING_NEW
        elif self.is_first and outcome is not None:
            new, replaces, states = self._digested(pending, outcome)
            anyone_counts = any(report.counts for report in outcome.reports)
            told = (
                outcome.round,
                len(outcome.reports),
                self.tokens_of_all + sum(report.tokens for report in outcome.reports if report.counts),
                new is not None,
                states is not None,
                replaces,
                anyone_counts,
                self._indices_of(outcome.reports),
                period_of(outcome.reports, outcome.weights),
            )
        told = self.control.from_first(told)
        if told is None:
            self._alone(pending)
            return None
        if told == _NOTHING_NEW:
            return None
        finished, number, tokens_of_all, has_changed, has_states, replaces, anyone_counts, indices, period = told
        missed = finished - 1 - self.round
        self.round, self.tokens_of_all = finished, tokens_of_all
        self.num_islands = number
        if anyone_counts or has_changed:  # else each has its own values still, and what they were trained on
            for part, names_of_part in enumerate(self.parts):
                if indices.start <= names_of_part.start and names_of_part.stop <= indices.stop:
                    self._trained_until[part] = pending.trained_until if pending.counts else self.tokens
        names = [self.names[i] for i in indices]
        if has_changed:
            self.masters.scatter(names, new, add=not replaces)
        if has_states:
            for number, kind in enumerate(self._kinds):
                own = None if states is None else states[number * len(names) : (number + 1) * len(names)]
                self.masters.scatter(names, own, kind=kind)
        if pending.counts and self.section.optimizer_state == "reset":
            self.masters.reset_states(names)
        if not pending.counts and not anyone_counts:
            self.round = max(self.round - 1, 0)  # nobody has trained: it was no round
            self._to_take = 0
            return None
        if anyone_counts:
            self._moved += period
            if period and indices.stop == len(self.names):
                self._keep_model()
        if pending.counts:
            self._to_take = len(self.parts) - 1 if missed > 0 else 0
        else:
            self._to_take = max(self._to_take - 1, 0)
            self._loss_sum, self._since = 0.0, 0
        return outcome or _SOMETHING

    def _wait(self, pending: _Pending) -> None:
        """Until the first rank's thread is done; the other ranks hear from it all the time."""
        with WATCH.pause("waiting for other islands"):
            while True:
                if self.control.sum(torch.tensor([int(current().requested)])).item():
                    self._give_up(pending)
                    return
                if pending.thread is not None:
                    pending.thread.join(_POLL_S)
                state: Any = None
                if self.is_first:
                    assert pending.thread is not None
                    if pending.thread.is_alive():
                        state = "waiting"
                    elif pending.error is not None:
                        state = (type(pending.error).__name__, str(pending.error))
                    else:
                        state = "done"
                state = self.control.from_first(state)
                if state == "done":
                    return
                if state != "waiting":
                    self._failed(pending, *state)
                    return

    def _failed(self, pending: _Pending, kind: str, message: str) -> None:
        self._pending = pending.outcome = None
        if kind in (TimeoutError.__name__, ConnectionError.__name__) and not pending.starts:
            if self.is_first:
                logger.warning("%s Training goes on without the others until the next round.", message)
            return
        error: Exception = ValueError(message) if kind in ("ValueError", "ConnectionError") else RuntimeError(message)
        setattr(error, SHARED, True)
        raise error from pending.error

    def _give_up(self, pending: _Pending) -> None:
        """This job is to stop, and has no time to wait for others."""
        pending.is_given_up = True
        if self._islands is not None:
            self._islands.close()
            self._islands = None

    def _alone(self, pending: _Pending) -> None:
        """The exchange came to nothing; the others may have done it, and will be there again at the next."""
        self.tokens_of_all += pending.tokens
        self.num_islands = self.section.min_islands

    def _digested(self, pending: _Pending, outcome: Outcome) -> tuple[list[Tensor] | None, bool, list[Tensor] | None]:
        """On the first rank: what the masters become, or by how much they change (None for nothing), and the states."""
        assert pending.sent is not None
        indices = self._indices_of(outcome.reports)
        sent = pending.sent if pending.counts else [pending.sent[i] for i in indices]
        self._log(pending, outcome)
        averages, more = outcome.tensors, list[Tensor]()
        if averages is not None:
            averages, more = averages[: len(sent)], averages[len(sent) :]
        states = None
        if _are_alike(outcome.reports):
            states = more or None
        elif more:
            self.tokens_of_all, more = round(more[0].item()), more[1:]
            if self._outer is not None:
                self._anchors.update(zip(indices, more[: len(sent)], strict=True))
                self._outer.load_buffers(more[len(sent) :], list(indices))
        if not any(report.counts for report in outcome.reports):
            return averages, True, None
        if self._outer is not None:
            anchors = [self._anchors[i] for i in indices]
            period = period_of(outcome.reports, outcome.weights)
            new = self._outer.step(anchors, sent if averages is None else averages, list(indices), period)
            self._anchors.update(zip(indices, new, strict=True))
        else:
            new = sent if averages is None else averages
        if self.section.combine_rounds > 1:
            self._average.update(zip(indices, new, strict=True))
        if new is sent:
            return None, False, states
        if not pending.overlaps or not pending.counts:
            return new, True, states
        return [a - b for a, b in zip(new, sent, strict=True)], False, states

    def _log(self, pending: _Pending, outcome: Outcome) -> None:
        entry = {
            "round": outcome.round,
            "islands": [report.island for report in outcome.reports],
            "weights": outcome.weights,
            "losses": [report.loss for report in outcome.reports],
            "tokens": pending.tokens,
            "bytes_sent": outcome.bytes_sent,
            "waited_s": outcome.waited_s,
            "transfer_s": outcome.transfer_s,
            "attempts": outcome.attempts,
        }
        self.exchanges.append(entry)
        del self.exchanges[:-256]
        left_out = [r.island for r, w in zip(outcome.reports, outcome.weights, strict=True) if r.counts and not w]
        logger.info(
            "island %d: round %d with %d islands%s: %.4g MB sent, %.3g s",
            self.island,
            outcome.round,
            len(outcome.reports),
            f" (of {left_out} nothing)" if left_out else "",
            outcome.bytes_sent / 1e6,
            outcome.transfer_s,
        )

    # -- what is reported ----------------------------------------------------------------------------------------

    def _mean_loss(self) -> tuple[float, int]:
        """Mean loss over the tokens since the last exchange, of which another period begins, and how many they were.

        Of all ranks of this island: they have the same tokens, and may have other losses. Where there are none it is
        that of the period before, whose values are averaged part by part.
        """
        if self._since:
            self._last_loss = float(self._loss_sum) / self._since
        loss, tokens = self._last_loss, self._since
        self._loss_sum, self._since = 0.0, 0
        told = self.control.sum(torch.tensor([loss, 1.0], dtype=torch.float64))
        return (told[0] / told[1]).item(), tokens

    def _digest(self) -> int:
        own = {"lighthouse", "min_islands", "islands", "timeout_s", "grace_s", "every_tokens"}
        section = self.section.model_dump(exclude=own) | {"first_round": self.first_round}
        text = repr((sorted(self.masters.numels().items()), sorted(section.items()), self._kinds))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    # -- the learning rate ---------------------------------------------------------------------------------------

    @property
    def learning_rate_factor(self) -> float:
        """What the scheduled learning rate is multiplied by."""
        own = self._since + (0 if self._pending is None else self._pending.tokens)
        tokens = self.tokens_of_all + own * self.num_islands
        return learning_rate_factor(tokens, self.section.decay_tokens, self.num_islands, bool(self._scales_rate))

    def _scale_rate(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        factor = self.learning_rate_factor
        if factor != 1.0:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _restore_rate(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if self._rates is not None:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
            self._rates = None

    # -- files ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, between exchanges: the first rank has the outer optimizer and the last rounds."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        state |= {"loss_sum": float(self._loss_sum), "trained_until": dict(self._trained_until)}
        if self.is_first:
            state |= {"last_rounds": self._last_rounds.state_dict(), "average": dict(self._average)}
            if self._outer is not None:
                state |= {"anchors": dict(self._anchors), "outer": self._outer.state_dict()}
        return state

    def load_saved(self, saved: RankStates) -> None:
        """Go on as the first rank of the run that was saved."""
        if saved.first:
            self.load_state_dict(saved.first)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of any rank of an island; the first takes the first's."""
        state = tree_map_only(Tensor, Tensor.cpu, dict(state))
        for name in _COUNTERS:
            setattr(self, name, state.get(name, getattr(self, name)))
        self._loss_sum, self._trained_until = state["loss_sum"], dict(state.get("trained_until", {}))
        if self.is_first and "last_rounds" in state:
            self._last_rounds.load_state_dict(state["last_rounds"])
            self._average = dict(state["average"])
            if self._outer is not None and "anchors" in state:
                self._anchors = dict(state["anchors"])
                self._outer.load_state_dict(state["outer"])


def _are_alike(reports: Sequence[Report]) -> bool:
    """Whether these islands were in the same rounds, and so have the same anchors, momenta and counts of tokens."""
    return len({(report.counts, report.round) for report in reports}) == 1


_COUNTERS = (
    *("round", "tokens", "tokens_of_all", "num_islands", "_next_tokens", "_to_take", "_since"),
    *("_last_loss", "_moved"),
)

_NOTHING_NEW = "nothing new"

_SOMETHING: Any = object()
"""What :meth:`Averager.settle` returns on ranks that have no outcome of their own."""


class Averaging:
    """Mixed into an engine; its methods are called by all ranks together."""

    averager: Averager | None = None
    """None: this job is alone."""

    def _start_averaging(self: Any, make_masters: Callable[[], Masters]) -> None:
        section = self.plan.averaging
        if section is None:
            return
        error: Exception | None = None
        try:
            known = getattr(self.module, "is_pretrained", is_pretrained(self.module))
            self.averager = Averager(section, self.control, make_masters(), self.basic_optimizer, known)
        except Exception as caught:
            error = caught
        self.control.settle(error, "beginning to average")

    def _join_islands(self: Any) -> None:
        if self.averager is not None:
            self.averager.join(self.global_steps)

    def _average(self: Any, loss: Any, tokens: int) -> None:
        if self.averager is not None:
            self.averager.after_step(self.global_steps, loss, tokens)

    def finish_averaging(self: Any, held_out_loss: Callable[[], float] | None = None) -> None:
        """Training is over: average what is new with the islands that are there, and leave them.

        Args:
            held_out_loss: computes the loss of the model as it is when it is called, on held-out data; for
                ``"combine_weights": "held_out"``. All ranks call it together.

        Raises:
            ValueError: weights are to be fitted, and there is no such function.
        """
        if self.averager is not None:
            self.averager.finish(self.global_steps, held_out_loss)

    def _averaging_state(self: Any) -> dict[str, Any]:
        return {} if self.averager is None else self.averager.state_dict()

    def _settle_averaging(self: Any) -> None:
        """Before anything is saved: what is under way is taken."""
        if self.averager is not None:
            self.averager.settle()

    def _load_averaging_state(self: Any, state: Mapping[str, Any]) -> None:
        if self.averager is not None and state:
            self.averager.load_state_dict(state)

    def _leave_islands(self: Any) -> None:
        if self.averager is not None:
            with suppress(RuntimeError):
                self.averager.close()
