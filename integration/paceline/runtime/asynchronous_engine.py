"""Pipelines without a flush: several directions over the same devices, or one whose weights drift.

A call of ``train_batch`` runs one window of a :class:`~paceline.schedules.stream.Stream`: the forwards of its step, and
what still lags of the steps before. So weights have the updates of all steps but the last ones when it returns;
:meth:`AsynchronousEngine.flush` runs what is left. With ``staleness`` 0 every step is flushed.

Nothing in a step waits for all ranks: what they must agree on travels a step ahead (:mod:`.step_agreement`), updates
are made beside the computation (:mod:`paceline.optim.asynchronous_updates`), and the loss arrives when somebody looks
at it (:mod:`..comm.pending_tensor`).
"""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.groups import gloo_group
from ..comm.loss_sums import SummedLosses
from ..comm.pending_tensor import LaterTensor
from ..comm.staging import Staging
from ..comm.transport import TIMEOUT
from ..config import RunPlan
from ..config.section import value_at
from ..optim.corrections import Corrections
from ..optim.sharded import ShardedOptimizer
from ..optim.step_options import StepOptions
from ..schedules import windows
from ..schedules.lower import Op
from ..schedules.schedule import Schedule
from ..state.rank_states import SavedPart
from ..supervise.lifetime import current
from ..supervise.watch import EVERYONE, WATCH
from .boundary import OwnMemory
from .causal_lm_engine import CausalLMEngine
from .causal_lm_steps import COLUMNS, shapes_in
from .migration import Migration
from .rank_random import OwnRandom
from .state_owners import Mirrors
from .step_agreement import Ahead
from .updates import FlushedUpdates

logger = logging.getLogger("paceline")

LEAVE_S = timedelta(seconds=30)
"""Until a rank whose script has ended leaves without the others."""

_MIRROR = "mirror"


class _ByNumber(Sequence[Any]):
    """What belongs to the micro-batches of the last steps, by their number in the run: step · M + micro-batch.

    As a sequence it is that of the newest step.
    """

    def __init__(self, num_micro_batches: int, num_steps: int) -> None:
        self._count, self._num_steps = num_micro_batches, num_steps
        self._steps: dict[int, Sequence[Any]] = {}
        self._newest: Sequence[Any] = ()

    def add(self, step: int, values: Sequence[Any]) -> None:
        self._steps[step] = self._newest = values
        self._steps.pop(step - self._num_steps, None)

    def __getitem__(self, number: Any) -> Any:
        step, micro_batch = divmod(number, self._count)
        return self._steps[step][micro_batch]

    def __len__(self) -> int:
        return len(self._newest)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._newest)


def _leave(engine: weakref.ref[AsynchronousEngine]) -> None:
    if (found := engine()) is not None:
        found.leave()


class AsynchronousEngine(CausalLMEngine):
    """Runs the schedules ``"multidirection"`` and ``"one_direction"`` for a Hugging Face model.

    * ``train_batch`` reads one step ahead, if it gets the same iterator at each step: :meth:`data_state` tells where
      to go on from.
    * The loss that it returns waits for the other ranks when somebody looks at it; ``grad_norm()`` is that of the last
      update in the model. A request to stop (``is_stopping``) is seen a step later.
    * A learning rate's scheduler steps when the gradients of a step are complete, finite or not.
    * ``save_checkpoint``, ``evaluate`` and ``export`` flush first: between an update and the next.
    """

    transport_order = "free"
    _reduces_early = False
    optimizer: Any
    stage_id: int

    def __init__(self, *args: Any, plan: RunPlan, **kwargs: Any) -> None:
        model = kwargs["model"]
        topology = model._grid._topo
        self._pipes = [list(pipe) for pipe in topology.get_axis_comm_lists("pipe")] or [
            [rank] for rank in range(dist.get_world_size())
        ]
        self._routes = getattr(model, "routes", None) or (tuple(range(model.num_stages)),)
        equal_parts = plan.schedule.optimizer_owners == _MIRROR
        self._mirrors = Mirrors.create(self._pipes, dist.get_rank(), self._routes, equal_parts=equal_parts)
        self._begun = 0
        """Steps since the start, or since the last flush."""
        self._number = 0
        """Of the next step of this engine: it counts on over flushes and resumes."""
        self._is_ahead: Ahead | None = None
        self._last_iterator: Any = None
        self._untold: tuple[Tensor, float, int] | None = None
        super().__init__(*args, plan=plan, **kwargs)
        self.module.settle = self.flush
        if isinstance(self.optimizer, ShardedOptimizer) and self.optimizer.updates is not None:
            self.optimizer.is_settled = lambda: not self._begun
        atexit.register(_leave, weakref.ref(self))

    # -- what is made at the start -------------------------------------------------------------------------------

    def _start_scheduling(self) -> None:
        super()._start_scheduling()
        self._choice = self.plan.schedule
        self._stream = self._choice.stream(self.num_stages, self.micro_batches)
        self._stream_program = windows.StreamProgram(self._stream, self.links.device_number)
        name = self._choice.type if self._choice.is_asynchronous else f"{self._choice.type} staleness=0"
        self._flushed_step = replace(self._stream.unrolled(1), name=name)
        num_steps = self._stream.most_lag + 1
        self._tables: tuple[_ByNumber, _ByNumber] = (
            _ByNumber(self.micro_batches, num_steps),
            _ByNumber(self.micro_batches, num_steps),
        )
        ends = sorted({route[end] for route in self._routes for end in (0, -1)})
        self._readers = {device: number for number, device in enumerate(ends)}
        # Devices that hold the same stages would draw the same dropout for different micro-batches.
        own = len(self._routes) > 1
        self._updates = _StreamUpdates(self) if self._choice.is_asynchronous else FlushedUpdates(self)
        self._random = OwnRandom(self.links.device_number, torch.device(self.device)) if own else None
        device = torch.device(self.device)
        on_host = device.type == "cpu"
        self._losses = SummedLosses(
            self.control.world if on_host else gloo_group(timeout=TIMEOUT), None if on_host else Staging(device)
        )

    def _routes_of_directions(self) -> tuple[tuple[int, ...], ...]:
        return self._routes

    def _gradients_to_send(self) -> OwnMemory | None:
        """Beside the computation gradients lie in buckets, which share no memory with what is sent."""
        return None if self.plan.schedule.is_asynchronous else self._own_memory

    def _enter(self, chunk: int) -> None:
        """From here on this rank is the stage that it has in direction ``chunk``."""
        stage = self.held[chunk].runner.stage
        self.stage_id, self.prev_stage, self.next_stage = stage, stage - 1, stage + 1
        if len(self.held) > 1:
            self.module.current = chunk

    @property
    def schedule(self) -> Schedule:
        """A step that is flushed."""
        return self._flushed_step

    def set_schedule(self, schedule: Schedule) -> None:
        raise ValueError(
            f"the schedule {schedule.name!r} cannot run here: this engine was made for {self._choice.type!r}; make "
            "another engine, with the last checkpoint."
        )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        if train_batch_size != self.train_batch_size():
            raise ValueError(
                f"train_batch_size cannot become {train_batch_size} while the schedule is {self._choice.type!r}: save "
                "a checkpoint, and load it into an engine with the other batch size."
            )

    def repartition(self, parts: Sequence[int], *, memory_bytes: int | None = None) -> Migration | None:
        if list(parts) == [int(part) for part in self.module.parts]:
            return None
        raise ValueError(
            f"layers cannot move to {list(parts)} while the schedule is {self._choice.type!r}: save a checkpoint, and "
            "load it into a pipeline with the other partition."
        )

    # -- the optimizer -------------------------------------------------------------------------------------------

    def _make_basic_optimizer(self, client_optimizer: Any, parameters: list[Any]) -> torch.optim.Optimizer:
        basic = super()._make_basic_optimizer(client_optimizer, parameters)
        order = {parameter: number for number, parameter in enumerate(self._placement().names)}
        for group in basic.param_groups:  # the same on all ranks that hold the same
            group["params"] = sorted(group["params"], key=lambda p: order.get(p, len(order)))
        return basic

    def _placement(self) -> Any:
        """By stage: every rank of a mirror group has its stages in another order."""
        found, stages = super()._placement(), self._stage_of
        ordered = dict(sorted(found.names.items(), key=lambda item: (stages[item[0]], item[1])))
        return found._replace(names=ordered)

    def _trained_stages(self) -> set[int]:
        return {stage for parameter, stage in self._stage_of.items() if parameter.requires_grad}

    @property
    def _stage_of(self) -> dict[nn.Parameter, int]:
        """The stage of each parameter here; of a weight that two share, the first."""
        module = self.module
        stages = zip(module.held, module.stages, strict=True) if len(self._routes) > 1 else ((module.stage_id, module),)
        found: dict[nn.Parameter, int] = {}
        for number, stage in sorted(stages, key=lambda pair: -pair[0]):
            found.update(dict.fromkeys(stage.parameters(), number))
        return found

    def _own_options(self, options: StepOptions) -> StepOptions:
        stages, mirrors, choice = self._stage_of, self._mirrors, self.plan.schedule
        corrections = Corrections(choice.warm_in_steps or 0, choice.correction) if choice.is_asynchronous else None
        asked = value_at(self.plan.ds_config, "zero_optimization.overlap_comm")
        return replace(
            options,
            group=mirrors.group,
            model_group=mirrors.model_group,
            domain=lambda parameter: mirrors.domain(stages[parameter]),
            shard=len(self._routes) > 1 or options.shard,
            # These groups are the only ones at work in a step, and one thread issues their operations: NCCL can, too.
            overlap=options.overlap or asked is not False,
            corrections=corrections,
            ties=self._trained_ties,
        )

    def _trained_ties(self) -> list[tuple[nn.Parameter, Any]]:
        ties = self.module.get_tied_weights_and_groups() if self.module.num_stages > 1 else []
        return [(weight, group) for weight, group in ties if weight.requires_grad]

    # -- a step --------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """As :meth:`PacelineEngine.train_batch`; without a flush the update of this step comes with the next ones.

        Returns:
            The step's loss, a scalar tensor, on every rank. To look at it waits for the other ranks' step.

        Raises:
            StopIteration: the iterator has less than a step left.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients: call it outside of torch.no_grad().")
        WATCH.step = self.global_steps
        if not isinstance(self.optimizer, ShardedOptimizer):
            raise ValueError('there is no optimizer to train with: write "optimizer" into the JSON, or pass one.')
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.half_way.check()
        self.module.train()
        self.total_loss = None
        with self._naming_lost_peers(), self._recorded():
            self._begin_step()
            with self.half_way.during("it was interrupted"):
                self._run_ops(self._stream_program.step(self._begun))
                self._begun += 1
                if self._choice.is_asynchronous:
                    self._count_step()
                else:
                    self._drain()
                    self._enter(0)
                    self._exec_reduce_tied_grads()
                    self._exec_reduce_grads()
                    self._exec_optimizer_step()
        loss = self._loss_of_step()
        self._tell(loss)
        WATCH.idle()
        return loss

    def _begin_step(self) -> None:
        ahead, self._is_ahead = self._is_ahead, None
        WATCH.doing("agreeing on the step", EVERYONE)
        if ahead is None:
            ahead = self._read_ahead()
            agreed = ahead.agreed(self._header_shape)
        else:
            agreed = ahead.agreed(self._header_shape)
            if agreed.failed and agreed.ended:  # there may be a new iterator
                ahead = self._read_ahead(ended=ahead)
                agreed = ahead.agreed(self._header_shape)
            elif ahead.iterator is not self.data_iterator and self.reads_data:
                logger.warning(
                    "train_batch got another iterator at step %d: this step was read ahead from the old one, the new "
                    "one is read from the next step on",
                    self.global_steps,
                )
        self.steps.is_stopping = agreed.stops
        tables, failed, error = agreed.tables, agreed.failed, ahead.error
        if not failed and bool((tables != tables[:, :1]).any()):
            failed = True
            error = ValueError(
                f"ranks that read the same data see different ones at step {self.global_steps}: give the first and the "
                "last stage of every direction the same iterator (same files, seed and data-parallel rank)."
            )
        if failed:
            with self.checkpointer.reported():
                self.control.raise_shared(error, f"beginning step {self.global_steps}")
        of_replicas = [shapes_in(table) for table in tables[:, 0]]
        shapes, loaded = self._tables
        shapes.add(self._number, of_replicas[self.grid.data_parallel_id])
        loaded.add(self._number, ahead.loaded)
        self.book.shapes, self.book.loaded = shapes, loaded
        everything = [shape for row in of_replicas for shape in row]
        self.book.label_tokens = sum(shape.label_tokens for shape in everything)
        self.book.tokens = sum(shape.tokens for shape in everything)
        if self._choice.is_asynchronous and not agreed.is_new:
            self._is_ahead = self._read_ahead()

    def _read_ahead(self, ended: Ahead | None = None) -> Ahead:
        """Begin to agree on a step; the iterator of ``ended`` is not asked again."""
        reader = self._readers.get(self.links.device_number)
        last, self._last_iterator = self._last_iterator, self.data_iterator

        def read() -> Any:
            if ended is not None and ended.iterator is self.data_iterator:
                return [], [], ended.error
            return self.steps.read(self.micro_batches, loads=self.reads_data)

        return Ahead.begin(
            self.data_iterator,
            read,
            place=None if reader is None else (self.grid.data_parallel_id, reader),
            shape=self._header_shape,
            is_new=self.data_iterator is not last,
            stops=current().requested,
            group=self.control.world,
        )

    @property
    def _header_shape(self) -> tuple[int, int, int]:
        return self.dp_world_size, len(self._readers), 1 + self.micro_batches * COLUMNS

    @property
    def reads_data(self) -> bool:
        return self.links.device_number in self._readers

    def set_dataiterator(self, iterator: Any) -> None:
        """As DeepSpeed's, also on ranks that are no end of direction 0."""
        self.training_dataloader = None
        self.data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """The same of ``training_data``."""
        self.training_dataloader = loader
        self.data_iterator = iter(loader)

    def data_state(self, iterator: Any) -> Any:
        ahead = self._is_ahead
        is_ahead = ahead is not None and ahead.iterator is iterator and ahead.state is not None
        return ahead.state if is_ahead else iterator.state_dict()  # type: ignore[union-attr]

    def _run_ops(self, ops: Iterable[Op]) -> None:
        """One window, of the step :attr:`_number`, which it ends."""
        self.loss_book.of_forwards = []
        self._own_memory.forget()
        if self._random is not None:
            self._random.enter()
        self.executor.run(
            ops,
            num_micro_batches=self.micro_batches,
            step=self._number,
            updates=self._updates,
            goes_on=True,
        )
        if self._random is not None:
            self._random.leave()
        self._number += 1

    def _drain(self) -> None:
        """What is left of the steps that have begun; afterwards all have ended."""
        if self._begun:
            self._number -= 1  # it is that of the last step
            self._run_ops(self._stream_program.drain(self._begun))
            self._begun = 0

    def flush(self) -> None:
        """Finish all steps that have begun, and put their updates into the model. Collective, between steps."""
        if not self._begun or not self.half_way.is_whole:
            return
        WATCH.step = self.global_steps
        was_training = self.module.training
        self.module.train()  # what is recomputed is what was computed
        with self._naming_lost_peers(), self.half_way.during("a flush was interrupted"):
            self._drain()
        self.module.train(was_training)
        self._tell()
        WATCH.idle()

    def _count_step(self) -> None:
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    def _loss_of_step(self) -> Tensor:
        """The sum of all micro-batches' shares, of all directions and replicas, on every rank."""
        wait = self._losses.add(self.total_loss)

        def fetch() -> Tensor:
            with self._naming_lost_peers(), WATCH.waiting("waiting for the loss", EVERYONE):
                return wait()

        self.agg_train_loss = LaterTensor.of(fetch, torch.float64)
        return self.agg_train_loss

    def _tell(self, loss: Tensor | None = None) -> None:
        """To DeepSpeed's monitors, of each step when the next one has run: its loss is still under way."""
        untold, self._untold = self._untold, None
        if self.global_rank != 0:
            return
        if untold is not None and self.monitor.enabled:
            last, rate, samples = untold
            told = [("Train/Samples/train_loss", last.item(), samples)]
            if self._choice.is_asynchronous:  # else the optimizer's step has said it
                told.append(("Train/Samples/lr", rate, samples))
            self.monitor.write_events(told)
        if loss is None:
            return
        self._untold = (loss, self.get_lr()[0], self.global_samples)
        every = self.steps_per_print()
        if every is not None and self.global_steps % every == 0:
            print(f"steps: {self.global_steps} loss: {loss.item():0.4f}")

    # -- between steps -------------------------------------------------------------------------------------------

    def _infer(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self.flush()
        yield from super()._infer(*args, **kwargs)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.flush()
        self.module.eval()  # who reads depends on it
        return super().eval_batch(*args, **kwargs)

    def prepare_checkpoint(self, *, exclude_frozen_parameters: bool = False) -> None:
        """Nothing: what is to be saved is under way between steps. The first save takes its memory itself."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        self.flush()
        return super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`PacelineEngine.load_checkpoint`; what was read ahead is forgotten."""
        self.flush()
        if self._is_ahead is not None:
            self._is_ahead.work.wait()
            self._is_ahead = None  # data of before
        return super().load_checkpoint(*args, **kwargs)

    def leave(self) -> None:
        """At the end of the script: finish what is under way, as all other ranks do.

        A thread that waits for a message or an update while the interpreter goes would abort the process. After an
        exception the others may never come, and nothing is waited for; they may have died, or go on training without
        this one, so that they are waited for :data:`LEAVE_S` only. Without them the end is as good as it can be.
        """
        if self._begun and not hasattr(sys, "last_type"):
            with suppress(Exception):
                # Through the store: a barrier of gloo's holds all but its first rank for as long as its group waits.
                store = dist.distributed_c10d._get_default_store()
                store.set(f"paceline/leaves/{self.global_rank}", "")
                store.wait([f"paceline/leaves/{rank}" for rank in range(dist.get_world_size())], LEAVE_S)
                self.flush()
        if isinstance(self.optimizer, ShardedOptimizer) and self.optimizer.updates is not None:
            self.optimizer.updates.stop()
        self._losses.stop()

    def destroy(self) -> None:
        self._begun = 0
        super().destroy()
        self._losses.stop()

    def zero_grad(self) -> None:
        """Forgets gradients, unless they are those of steps under way."""
        if not self._begun:
            super().zero_grad()

    @property
    def replica(self) -> int:
        return self._mirrors.ranks.index(self.global_rank)

    def _shape(self) -> dict[str, Any]:
        return {**super()._shape(), "directions": len(self._routes)}

    def _run_states(self) -> dict[str, SavedPart]:
        own: dict[str, SavedPart] = {} if self._random is None else {"own_random": self._random}
        return {**super()._run_states(), **own}


class _StreamUpdates(FlushedUpdates):
    """Updates that are made beside the computation, and applied when the program says so."""

    def __init__(self, engine: AsynchronousEngine) -> None:
        super().__init__(engine)
        self._completed = 0

    def backward_complete(self, stage: int) -> None:
        """Close the stage's gradients; those of the last stage here complete the step."""
        engine = self._engine
        engine.optimizer.updates.backward_complete(stage)
        self._completed += 1
        if self._completed == len(engine.held):
            self._completed = 0
            engine.optimizer.updates.finish_step()
            if engine.lr_scheduler is not None:
                engine.lr_scheduler.step()

    def apply(self) -> None:
        engine = self._engine
        engine.optimizer.updates.apply()
        engine._global_grad_norm = engine.optimizer.outcome.grad_norm
        engine._own_memory.forget()
        engine._step_applied = not engine.optimizer.overflow
        engine.skipped_steps += int(engine.optimizer.overflow)
