"""Islands that average their parameters: one DeepSpeed job among others, which come and go.

Every so many tokens the masters of the parameters, by name, are brought together on the island's first rank, averaged
with those of the other islands over :mod:`.rounds`, and brought back to whoever steps them. So islands may have other
stages, partitions, replicas and ZeRO stages, or no pipeline at all. Inside, everything goes on as usual.

Legend: P parts that the parameters are averaged in, one after another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..comm.control import ControlPlane
from ..config import PacelineConfig
from ..config.averaging_keys import HELD_OUT, AveragingConfig
from ..state.rank_states import RankStates
from .background_rounds import BackgroundRounds, Connection, Messages
from .combining import LastModels, combining_fault, fit_weights
from .islands import ISLAND, island_number
from .masters_by_name import Masters, state_kinds
from .outer_step import OuterStep
from .period_loss import PeriodLoss
from .round_records import Exchange, News, Values, are_alike, log_round, news_of, numbers_of, settings_digest
from .rounds import Islands, Outcome, Sent
from .rules import (
    Report,
    is_no_round,
    island_weights,
    learning_rate_factor,
    parts_of,
    period_of,
)
from .scaled_rate import ScaledRate

logger = logging.getLogger("paceline")

Weigh = Callable[[Sequence[Report]], Sequence[float]]
Connect = Callable[[AveragingConfig, int, Weigh], Connection]
"""Joins the other islands; is given this one's number and the rule of weights."""

KEPT_EXCHANGES = 256


def connect_islands(section: AveragingConfig, island: int, weigh: Weigh) -> Connection:
    """Join the other islands at the lighthouse of ``section``."""
    return Islands(
        section.lighthouse,
        island,
        min_islands=section.min_islands,
        timeout_s=section.timeout_s,
        grace_s=section.grace_s,
        weigh=weigh,
    )


class Averager:
    """The part of an engine that averages with other islands. All ranks of the island call everything together.

    Args:
        messages: between the ranks of this island.
        masters: of the parameters that are averaged.
        basic: the optimizer of ``torch.optim`` inside, whose learning rate is scaled.
        is_pretrained: whether the weights at the start are another training's, rather than drawn at random.
        connect: how to join the other islands.

    Raises:
        ValueError: states of the optimizer cannot be treated as ``section`` says, or this island has no number.
    """

    def __init__(
        self,
        section: AveragingConfig,
        messages: Messages,
        masters: Masters,
        basic: torch.optim.Optimizer,
        *,
        is_pretrained: bool = False,
        connect: Connect = connect_islands,
    ) -> None:
        self.section, self._messages, self._masters = section, messages, masters
        self.island, self.num_shares = island_number(section)
        self.is_first = messages.rank == 0
        if section.optimizer_state == "reset" and section.parts > 1 and not masters.keeps_states_apart:
            raise ValueError(
                'paceline.averaging.optimizer_state is "reset" and there are parts, whose states this optimizer keeps '
                'in one: leave "parts" out, or take "keep" or "average".'
            )
        self._kinds = state_kinds(basic) if section.optimizer_state == "average" else ()
        self._outer = OuterStep.of(section)
        self._models = LastModels(section.combine_rounds)
        is_mean = self._outer.has_optimizer or is_pretrained
        self.first_round: Literal["best", "mean"] = section.first_round or ("mean" if is_mean else "best")
        self._rounds = BackgroundRounds(messages, lambda: connect(section, self.island, self._weigh))
        self._exchange: Exchange | None = None
        self._has_stepped = False
        """Steps have come since the last exchange began: by how much the average differs is added to what they learned.
        The average itself is taken otherwise, since sums are rounded."""
        self._joined = False
        self._is_over = False
        """The last averages were taken, and no step has come after them."""
        self._is_anchored = False
        """The outer step has had the parameters to begin at, if it lacked them; a checkpoint may have none."""
        self._names: list[str] = []
        self._loaded_names: list[str] = []
        """On the first rank: of the parameters that a checkpoint's anchors and models are of, until they are used."""
        self._parts: list[range] = []
        self._like: list[Tensor] = []
        """On the first rank: shapes and dtypes of all parameters, on the meta device."""
        self._loss = PeriodLoss()
        self.round = 0
        """Exchanges that are done; each is of part ``round % P``."""
        self.tokens = 0
        """Tokens that this island has trained on."""
        self.tokens_of_all = 0
        self.num_islands = section.min_islands
        """Expected in the next average: those of the last round that train on, whatever it made of them."""
        self._is_alone = section.min_islands == 1
        """In the last round there was no other island."""
        self._others_train = False
        """In the last round there were islands whose training was not over."""
        self._has_failed = False
        """The last exchange came to nothing: others were not to be reached, or this island was asked to stop."""
        self._is_left = False
        """On the first rank: nobody else has come to the last round."""
        self._has_told_pace = False
        self._to_take = 0
        """Exchanges in which it does not count, as it has missed others and lacks what they brought."""
        self._trained_until: dict[int, int] = {}
        """Tokens at the last round of each part."""
        self._next_tokens = 0.0
        self.exchanges: list[dict[str, Any]] = []
        """Numbers of each exchange, on the first rank: of the last 256, or since they were taken away."""
        self._scales_rate = section.scale_learning_rate
        if self._scales_rate is None:
            self._scales_rate = not self._outer.has_optimizer and type(basic).__name__ == "SGD"
        self._rate = ScaledRate(basic, lambda: self.learning_rate_factor)

    @property
    def learning_rate_factor(self) -> float:
        """Factor of the scheduled learning rate."""
        own = self._loss.tokens + (0 if self._exchange is None else self._exchange.tokens)
        tokens = self.tokens_of_all + own * self.num_islands
        return learning_rate_factor(tokens, self.section.decay_tokens, self.num_islands, bool(self._scales_rate))

    # -- what an engine calls ------------------------------------------------------------------------------------

    def join(self, step: int) -> None:
        """Before a step. At the first: find the others; where they have gone on already, wait for their next round."""
        if not self._joined:
            self._number_parameters()
            self._find_others(step)
        self._is_over = False
        self._anchor()

    def _anchor(self) -> None:
        if not self._is_anchored:
            self._is_anchored = True
            self._check_loaded()
            lacks_anchors = self._outer.has_anchors and self._outer.num_anchors < len(self._names)
            if self._outer.has_anchors and self._messages.from_first(lacks_anchors):
                self._outer.anchor(self._masters.gather(self._names) or ())

    def _number_parameters(self) -> None:
        self._joined = True
        numels = self._masters.numels()
        self._names = sorted(numels)
        self._parts = parts_of([numels[name] for name in self._names], self.section.parts)
        # A checkpoint may be of a run with more parts, or with longer periods.
        self._to_take = min(self._to_take, len(self._parts) - 1)
        known = min(self._trained_until.values(), default=0)  # or of one with fewer
        self._trained_until = {part: self._trained_until.get(part, known) for part in range(len(self._parts))}
        self._check_loaded()

    def _check_loaded(self) -> None:
        """Forget state that a checkpoint keeps by parameter number, if the parameters that are averaged are others."""
        loaded, self._loaded_names = self._loaded_names, []
        if loaded and loaded != self._names and (self._outer.has_anchors or len(self._models)):
            logger.warning(
                "island %d: the checkpoint's averages are of %d parameters, this run's of others, %d: outer optimizer "
                "and last rounds begin anew.",
                *(self.island, len(loaded), len(self._names)),
            )
            self._outer.load_state_dict({})
            self._models.forget()

    def _find_others(self, step: int) -> None:
        has_come_back = False
        for _ in self._parts:
            self._begin(step, counts=False, starts=True)
            if not self.settle():
                break
            has_come_back = True
        every = self.section.every_tokens / len(self._parts)
        if has_come_back or not 0 < self.tokens <= self._next_tokens <= self.tokens + every:
            self._next_tokens = self.tokens + every
        if self.is_first:
            logger.info(
                "island %d: averages with others every %.6g tokens%s, learning rate %s",
                self.island,
                every,
                "" if len(self._parts) == 1 else f" a part of {len(self._parts)}",
                "times the number of islands" if self._scales_rate else "as scheduled",
            )

    def after_step(self, step: int, loss: Tensor | float, tokens: int) -> None:
        """A step is done: ``tokens`` of all ranks of this island together, and its mean loss."""
        self.tokens += tokens
        self._has_stepped = True
        self._loss.add(loss, tokens)
        self._tell_pace(tokens)
        if self._exchange is not None and step >= self._exchange.due:
            self.settle()
        is_due = self.tokens >= self._next_tokens
        if is_due or self._is_called():
            self.settle()
            every = self.section.every_tokens / len(self._parts)
            self._next_tokens = (self._next_tokens if is_due else self.tokens) + every
            self._begin(step, counts=not self._to_take, is_early=not is_due)
            if not self.section.overlap_steps:
                self.settle()

    def _tell_pace(self, tokens: int) -> None:
        """Warn once where parts are due faster than steps come, after each of which one is averaged."""
        parts = len(self._parts)
        if self.is_first and parts > 1 and tokens * parts > self.section.every_tokens and not self._has_told_pace:
            self._has_told_pace = True
            logger.warning(
                "island %d: a step has %d tokens, and averages one of %d parts: each is averaged every %d tokens, not "
                "every %d; take fewer averaging.parts, smaller steps, or a larger averaging.every_tokens",
                *(self.island, tokens, parts, tokens * parts, self.section.every_tokens),
            )

    def finish(self, step: int, held_out_loss: Callable[[], float] | None = None) -> None:
        """Training is over: take part in rounds until it is over on all islands, and combine the last ones if asked to.

        Others that train on are waited for as at any round. Once all have ended, each part is averaged once more. An
        island that was stopped meanwhile does so too: its checkpoint has no steps left.

        Args:
            held_out_loss: computes the loss of the model as it is then, on held-out data. Called by all ranks, which
                are told the first one's.

        Raises:
            ValueError: weights are to be fitted, and there are no held-out data.
        """
        if not self._joined and (self._is_over or not self.tokens):
            return
        fits = self.section.combine_weights == HELD_OUT
        remedy = "give finish_averaging a function that computes the loss on some"
        if fault := combining_fault(PacelineConfig(averaging=self.section), held_out_loss is not None, remedy):
            raise ValueError(fault)
        if not self._joined:
            self._number_parameters()
        self._anchor()  # a checkpoint may have been loaded since the last step
        self.settle()
        num_last = 0
        while num_last < len(self._parts):
            self._begin(step, counts=not self._to_take, is_early=True, ends=True)
            was_round = self.settle(is_last=True)
            if self._others_train:
                num_last = 0
            elif was_round:
                num_last += 1
            else:
                break
        if self._is_left and self.num_shares > 1:
            logger.warning(
                "island %d: no other island is there at the end, and the data are divided into %d shares: the model is "
                "this island's own, and may differ from that of the others; restart an island before the others end.",
                *(self.island, self.num_shares),
            )
        if self.section.combine_rounds > 1:
            if self._models.moved:
                self._models.keep(len(self._names), len(self._parts))
            if self._messages.from_first(len(self._models) > 0):
                self._combine(held_out_loss if fits else None)
        self.close()
        self._is_over = True

    def take_exchanges(self) -> list[dict[str, Any]]:
        """Figures of the exchanges since they were taken last."""
        found, self.exchanges = self.exchanges, []
        return found

    def close(self) -> None:
        """Leave the others. Not collective."""
        self._joined = False
        self._rounds.close()

    def _combine(self, held_out_loss: Callable[[], float] | None) -> None:
        """Take the mean of the last rounds, or what loses least on held-out data."""

        def take(weights: Sequence[float]) -> None:
            self._masters.scatter(self._names, self._models.mean(weights) if self.is_first else None)

        def loss_of(weights: Sequence[float]) -> float:
            assert held_out_loss is not None
            take(weights)
            return float(self._messages.from_first(held_out_loss()))

        weights = self._messages.from_first(self._models.weights() if self.is_first else None)
        if held_out_loss is not None:
            weights, loss = fit_weights(loss_of, weights)
            if self.is_first:
                told = ", ".join(f"{weight:.3g}" for weight in weights)
                logger.info("island %d: last rounds' models weigh %s: held-out loss %.5g", self.island, told, loss)
        take(weights)

    # -- one exchange --------------------------------------------------------------------------------------------

    def _begin(
        self,
        step: int,
        *,
        counts: bool,
        starts: bool = False,
        is_early: bool = False,
        ends: bool = False,
    ) -> None:
        part = self.round % len(self._parts)
        # Where it does not count, the others' round decides which part it is.
        indices = self._parts[part] if counts else range(len(self._names))
        names = [self._names[i] for i in indices]
        loss, tokens = self._loss.take(self._messages) if counts else (math.nan, 0)
        sent = self._masters.gather(names)
        gathered = [self._masters.gather(names, kind) or [] for kind in self._kinds if counts]
        states = [tensor for tensors in gathered for tensor in tensors]
        due = step + self.section.overlap_steps
        exchange = self._exchange = Exchange(due, counts, starts, tokens, self.tokens, indices, sent, states)
        self._has_stepped = False
        if not self.is_first:
            return
        assert sent is not None
        if not counts:
            self._like = [tensor.to("meta") for tensor in sent]
        if counts:
            checksum = self._outer.checksum(self._parts[part])
        else:
            checksum = math.fsum(tensor.double().sum().item() for tensor in sent)
        trained = self.tokens - self._trained_until.get(part, 0) if counts or starts else 0
        period = min(1.0, trained / self.section.every_tokens) if is_early else 1.0
        digest = settings_digest(self.section, self.first_round, self._masters.numels(), self._kinds)
        report = Report(self.island, digest, checksum, loss, tokens, counts, self.round, trained, period, ends)
        self._rounds.begin(report, partial(self._to_send, exchange))

    def _to_send(self, exchange: Exchange, reports: Sequence[Report]) -> Sent:
        """Tensors of a round with these islands, on the first rank."""
        indices = self._indices_of(reports)
        sent = self._sent(exchange, indices)
        if self._are_alike(reports):
            rounded = self._outer.rounded(indices, sent, exchange.states) if exchange.counts else None
            return rounded or [*sent, *exchange.states]
        if are_alike(reports):
            logger.info("island %d: islands differ in what the last round has made: this one is exact", self.island)
        tokens = torch.tensor([self.tokens_of_all], dtype=torch.float64)
        return [*sent, tokens, *self._outer.shared(indices, sent)]

    @torch.no_grad()
    def settle(self, *, is_last: bool = False) -> bool:
        """Wait for the exchange that is under way, and take what it brought.

        Args:
            is_last: no training follows.

        Returns:
            Whether it was a round; not where none is under way, or no other island has trained.
        """
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return False
        outcome = self._rounds.wait(must_succeed=exchange.starts, is_last=is_last)
        reports = [] if outcome is None else outcome.reports
        self._is_left = len(reports) == 1
        values, news, is_void = Values(), None, bool(reports) and is_no_round(reports)
        if outcome is not None and not is_void:
            values = self._digested(exchange, outcome)
            news = news_of(outcome, values, self._indices_of(reports), self.tokens_of_all)
        is_alone = (len(reports) or self.section.min_islands) == 1
        others_train = any(not report.ends for report in reports if report.island != self.island)
        told = (news, is_void, is_alone, others_train)
        news, is_void, self._is_alone, self._others_train = self._messages.from_first(told)
        self._has_failed = news is None and not is_void
        if news is not None:
            return self._take(exchange, news, values)
        if not is_void:
            # It came to nothing; the others may have done it, and will be there again at the next.
            self.tokens_of_all += exchange.tokens
            self.num_islands = self.section.min_islands
            if self._rounds.was_stopped:
                self._next_tokens = self.tokens  # it is due still where all go on from checkpoints
        return False

    def _digested(self, exchange: Exchange, outcome: Outcome) -> Values:
        """On the first rank: what the masters become, or by how much they change, and the states."""
        indices = self._indices_of(outcome.reports)
        sent = self._sent(exchange, indices)
        self.exchanges.append(numbers_of(outcome, exchange.due, exchange.tokens))
        del self.exchanges[:-KEPT_EXCHANGES]
        log_round(self.island, outcome)
        averages: Sequence[Tensor] | None = None
        more = list[Tensor]()
        if outcome.tensors is not None:
            averages = self._outer.averages(indices, outcome.tensors[: len(sent)], outcome.residuals)
            more = outcome.tensors[len(sent) :]
        states = None
        if self._are_alike(outcome.reports):
            states = more or None
        elif more:
            self.tokens_of_all = round(more[0].item())
            self._outer.take_shared(indices, more[1:])
        anyone_counts = any(report.counts for report in outcome.reports)
        if anyone_counts or averages is not None:  # else each goes on as it was
            self._outer.note_round(indices, outcome.reports)
        if not anyone_counts:
            return Values(averages, replaces=True)
        period = period_of(outcome.reports, outcome.weights)
        new = self._outer.step(indices, sent if averages is None else averages, period)
        self._models.update(indices, new)
        if new is sent:
            return Values(states=states)
        # Otherwise it takes the others' and goes on.
        is_whole = exchange.has(indices) and all(bool(tensor.isfinite().all()) for tensor in sent)
        if not self._has_stepped or not exchange.counts or not is_whole:
            return Values(new, replaces=True, states=states)
        return Values([a - b for a, b in zip(new, sent, strict=True)], states=states)

    def _take(self, exchange: Exchange, news: News, values: Values) -> bool:
        """Put what a round has brought into place, on all ranks."""
        missed = news.round - 1 - self.round
        self.round, self.tokens_of_all, self.num_islands = news.round, news.tokens_of_all, news.num_islands
        if news.anyone_counts or news.has_changed:  # else each has its own values still, and what they were trained on
            for part, indices in enumerate(self._parts):
                if news.indices.start <= indices.start and indices.stop <= news.indices.stop:
                    self._trained_until[part] = exchange.trained_until if exchange.counts else self.tokens
        names = [self._names[i] for i in news.indices]
        if news.has_changed:
            self._masters.scatter(names, values.new, add=not news.replaces)
        for number, kind in enumerate(self._kinds if news.has_states else ()):
            own = values.states and values.states[number * len(names) : (number + 1) * len(names)]
            self._masters.scatter(names, own, kind=kind)
        if exchange.counts and self.section.optimizer_state == "reset":
            self._masters.reset_states(names)
        if not exchange.counts and not news.anyone_counts:
            self.round = max(self.round - 1, 0)  # nobody has trained: it was no round
            self._to_take = 0
            if news.has_changed:
                self._next_tokens = 0.0  # all begin a period here
            return False
        if news.anyone_counts:
            self._models.moved += news.period
            if news.period and news.indices.stop == len(self._names):
                self._models.keep(len(self._names), len(self._parts))
        if exchange.counts:
            self._to_take = len(self._parts) - 1 if missed > 0 else 0
        else:
            self._to_take = max(self._to_take - 1, 0)
            self._loss.forget()
        return True

    def _are_alike(self, reports: Sequence[Report]) -> bool:
        """Whether these islands have all in common that a round needs; else they tell each other."""
        return are_alike(reports) and (not reports[0].counts or self._outer.agrees(reports))

    def _is_called(self) -> bool:
        """Whether others have come to the next round, and waited for this island as long as they do."""
        if self._exchange is not None or self._is_alone:
            return False
        return self._rounds.is_called(self.round)

    def _weigh(self, reports: Sequence[Report]) -> list[float]:
        newest = max((report.round for report in reports if report.counts), default=0)
        if newest < len(self._parts):  # the first round is one of each part
            reports = [replace(report, round=report.round - newest) if report.counts else report for report in reports]
        return island_weights(
            reports, first_round=self.first_round, difference_threshold=self.section.difference_threshold
        )

    def _indices_of(self, reports: Sequence[Report]) -> range:
        """Names whose parameters a round of these islands is of: of all where none has trained yet."""
        rounds = [report.round for report in reports if report.counts]
        return self._parts[max(rounds) % len(self._parts)] if rounds else range(len(self._names))

    def _sent(self, exchange: Exchange, indices: range) -> list[Tensor]:
        """Values of these parameters; zeros, which have no weight, where it has missed rounds and sent another part."""
        assert exchange.sent is not None
        if not exchange.has(indices):
            return [torch.zeros_like(self._like[i], device="cpu") for i in indices]
        return [exchange.sent[i - exchange.indices.start] for i in indices]

    # -- files ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of this rank between exchanges: the first rank has the outer optimizer and the last rounds."""
        names = {"names": list(self._names or self._loaded_names)}
        return {
            "round": self.round,
            "tokens": self.tokens,
            "tokens_of_all": self.tokens_of_all,
            "num_islands": self.num_islands,
            "_next_tokens": self._next_tokens,
            "_to_take": self._to_take,
            "_is_over": self._is_over and not self._has_failed,
            "_since": self._loss.tokens,
            "_last_loss": self._loss.last,
            "_moved": self._models.moved,
            "loss_sum": float(self._loss.sum),
            "trained_until": dict(self._trained_until),
            **(self._models.state_dict() | self._outer.state_dict() | names if self.is_first else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """State of any rank of an island; the first takes the first's."""
        state = tree_map_only(Tensor, Tensor.cpu, dict(state))
        for name in ("round", "tokens", "tokens_of_all", "num_islands", "_next_tokens", "_to_take", "_is_over"):
            setattr(self, name, state.get(name, getattr(self, name)))
        self._loss.tokens = state.get("_since", self._loss.tokens)
        self._loss.last = state.get("_last_loss", self._loss.last)
        self._models.moved = state.get("_moved", self._models.moved)
        self._loss.sum, self._trained_until = state["loss_sum"], dict(state.get("trained_until", {}))
        if self.is_first and "last_rounds" in state:
            self._models.load_state_dict(state)
            self._outer.load_state_dict(state)
            self._loaded_names = list(state.get("names", ()))
        self._is_anchored = False

    def load_saved(self, saved: RankStates) -> None:
        """Go on as the first rank of the run that was saved."""
        if saved.first:
            self.load_state_dict(saved.first)


def make_averager(
    section: AveragingConfig | None,
    control: ControlPlane,
    make_masters: Callable[[], Masters],
    basic: torch.optim.Optimizer,
    *,
    is_pretrained: bool,
) -> Averager | None:
    """The :class:`Averager` of an engine, on all ranks or on none; None without a section.

    Raises:
        ValueError: on every rank: as :class:`Averager`, or ranks take this for different islands.
    """
    if section is None:
        return None
    averager: Averager | None = None
    with control.together("beginning to average"):
        averager = Averager(section, control, make_masters(), basic, is_pretrained=is_pretrained)
    assert averager is not None
    numbers = sorted(set(control.gather(averager.island)))
    with control.together("beginning to average"):
        if len(numbers) > 1:
            raise ValueError(
                f"ranks of this island have different numbers, {', '.join(map(str, numbers))}, and train on the shares "
                f"of several islands: give all of them the same, on all nodes, with --island or {ISLAND}."
            )
    return averager
